"""Shards on a cluster: a dead worker costs a try, a bad shard is named, and all others are made."""

import importlib.util
import os
import signal
from collections import deque

import psutil
import pytest
from conftest import Silent
from shell import call, refusal

from ia_mech.collect.command import main
from ia_mech.collect.ray import TRIES, Lost, work_off
from ia_mech.collect.shards import Shard
from ia_mech.errors import UserError
from ia_mech.run import Run

SHARDS = [Shard(k, 6) for k in range(1, 7)]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray isn't installed (ia-mech[ray])"
)


class FakePool:
    """Workers whose tasks end in order; ``fates`` says how those of a shard do, one after another.

    A fate is None (made), a problem, or ``dies``.
    """

    def __init__(self, fates: dict[Shard | None, list[str | None]]) -> None:
        self.fates = {name: deque(of) for name, of in fates.items()}
        self.tasks: dict[int, Shard | None] = {}
        self.started, self.given = 0, list[tuple[int, Shard]]()

    def start(self):
        self.started += 1
        return self.started, self._task(None)

    def give(self, worker, shard, phase):
        assert phase == "turns"
        self.given.append((worker, shard))
        return self._task(shard)

    def _task(self, shard) -> int:
        self.tasks[len(self.tasks)] = shard
        return len(self.tasks) - 1

    def end_of_one(self, tasks):
        task = min(tasks)
        fates = self.fates.get(self.tasks[task])
        fate = fates.popleft() if fates else None
        if fate == "dies":
            raise Lost(task)
        return task, fate


def test_every_shard_is_made_once_by_a_few_workers():
    pool, progress = FakePool({}), Silent()
    assert work_off(pool, 2, SHARDS, "turns", progress) == {}
    assert [shard for _, shard in pool.given] == SHARDS and pool.started == 2
    assert {worker for worker, _ in pool.given} == {1, 2} and progress.steps == 6


def test_a_shard_of_a_dead_worker_is_made_by_another_one():
    pool, progress = FakePool({SHARDS[1]: ["dies"], SHARDS[5]: ["dies", "dies"]}), Silent()
    assert work_off(pool, 2, SHARDS, "turns", progress) == {}
    assert [shard for _, shard in pool.given].count(SHARDS[5]) == 3
    dead = {worker for worker, shard in pool.given if shard == SHARDS[1]}
    assert len(dead) == 2 and progress.steps == 6


def test_a_shard_that_fails_by_its_data_or_kills_its_workers_is_named_and_the_others_are_made():
    pool = FakePool({SHARDS[0]: ["bad row; mend it"], SHARDS[3]: ["dies"] * TRIES})
    failed = work_off(pool, 2, SHARDS, "turns", Silent())
    assert failed == {SHARDS[0]: "bad row; mend it", SHARDS[3]: "its worker died 3 times"}
    assert {shard for _, shard in pool.given} == set(SHARDS)


def test_an_idle_worker_takes_the_shard_of_a_dead_one():
    """A replacement may never start, as on a cluster that has lost a machine."""
    pool = FakePool({SHARDS[1]: ["dies"]})
    assert work_off(pool, 2, SHARDS[:2], "turns", Silent()) == {}
    assert pool.started == 2 and pool.given[2] == (pool.given[0][0], SHARDS[1])


def test_workers_that_cannot_begin_end_the_command():
    for fate, problem in (
        ("no model; give one", "no model; give one"),
        ("dies", "die before they"),
    ):
        with pytest.raises(UserError, match=problem):
            work_off(FakePool({None: [fate] * 20}), 2, SHARDS, "turns", Silent())


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_missing_extra_is_named(tmp_path, capfd):
    line = refusal(call(main, ["--ray", "--out", str(tmp_path / "run")], capfd))
    assert line == "--ray needs Ray; install it: pip install 'ia-mech[ray]'"


def test_ray_makes_all_shards(capfd):
    line = refusal(call(main, ["--ray", "--shard", "1/2"], capfd))
    assert line == "--ray makes all shards and phases; leave out --shard and --phase"


SMALL = ["--limit", "96", "--temperatures", "1", "--samples", "1", "--max-new-tokens", "4"]


@pytest.mark.slow
@needs_ray
def test_two_workers_make_the_run_also_if_they_are_killed(
    tiny_model_dir, tmp_path, capfd, monkeypatch
):
    words = [*SMALL, "--model", tiny_model_dir, "--threads", "1"]
    whole = call(main, [*words, "--out", str(tmp_path / "whole")], capfd).run
    killed = []

    class Killing(Silent):
        def advance(self, steps: int = 1, note: str = "") -> None:
            super().advance(steps, note)
            found = [
                one
                for one in psutil.Process().children(recursive=True)
                if "_Worker" in " ".join(one.cmdline()[:1])
            ]
            if self.steps in (3, 7) and found:
                os.kill(found[0].pid, signal.SIGKILL)
                killed.append(found[0].pid)

    monkeypatch.setattr("ia_mech.display.Bar", Killing)
    outcome = call(main, [*words, "--out", str(tmp_path / "run"), "--ray"], capfd)
    assert outcome.status == 0, outcome.err
    assert len(killed) == 2
    assert Run.open(tmp_path / "run").digest() == whole.digest()


@needs_ray
@pytest.mark.slow
def test_no_cluster_at_an_address_is_one_line(tmp_path, capfd):
    words = ["--ray", "127.0.0.1:1", "--out", str(tmp_path / "run")]
    line = refusal(call(main, words, capfd))
    assert line.startswith("no Ray answers at '127.0.0.1:1' (")
    assert line.endswith("; start it with: ray start --head, or leave the address out")
