"""A command that was killed can be given again, and comes to the same end.

Random moments are seeded, and spread over the time of an undisturbed command; where they fall in
the work differs from machine to machine. ``test_run_writing`` tests every state between two
operations on files. docs/scale.md has the counts.
"""

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from forked import Ended, Forks
from runs import files_named
from stub_server import StubServer, item_of

from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.judging import items_of
from ia_mech.judge.verdict import Item
from ia_mech.run import Run

GENERATED = [
    *("--response", "generate", "--max-response-tokens", 6, "--batch-rows", 4),
    *("--temperatures", 1, "--samples", 1, "--max-new-tokens", 4),
]
GIVEN = ["--temperatures", 0.7, 1, "--samples", 2, "--max-new-tokens", 6, "--batch-rows", 10]
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["^C", "TERM"])


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks


def was_stopped(ended: Ended, number: int) -> bool:
    """Whether the signal ended the command, as it should; otherwise the command was done before."""
    if number in (signal.SIGINT, signal.SIGTERM):
        assert ended.status in (0, 130), ended.err
        # A signal within a finalizer is printed by Python itself, and the command goes on.
        assert "Traceback" not in ended.err.partition("Exception ignored in")[0]
        assert ("interrupted; " in ended.err) == (ended.status == 130)
    else:
        assert ended.status in (0, -number), ended.err
    return ended.status != 0


# -- the main job ---------------------------------------------------------------------------------


class Sampling:
    """The main job with fixed settings, in folders of a test's own."""

    def __init__(self, forks: Forks, model: str, folder: Path, *settings: object) -> None:
        self.forks, self.folder = forks, folder
        self.words = ["ia_mech.sample", "--model", model, "--workers", 2, *settings]
        self.whole = self.run("whole")
        assert self.whole.status == 0, self.whole.err
        run = Run.open(folder / "whole" / "run")
        self.digest, self.files = run.digest(), files_named(run.path)

    def run(self, name: str, *more: object, **options) -> Ended:
        """The command into the folder ``name/run``."""
        out, cache = self.folder / name / "run", str(self.folder / name / "cache")
        return self.forks.run(*self.words, *more, "--out", out, **options, IA_MECH_CACHE=cache)

    def kept(self, name: str) -> set[tuple[str, str]]:
        """The parts that are on the disk: each is whole."""
        path = self.folder / name / "run"
        if not (path / "run.json").is_file():
            return set()
        run = Run.open(path, unfinished=True)
        assert run.verify() == []
        return {(kind, part["name"]) for kind in run.counts for part in run.parts(kind)}

    def check_finished(self, name: str) -> None:
        """Check that a run equals an undisturbed one."""
        run = Run.open(self.folder / name / "run")
        assert run.complete and run.verify() == [] and run.digest() == self.digest
        assert files_named(run.path) == self.files


@pytest.fixture(scope="module")
def generated(forks, tiny_model_dir, tmp_path_factory) -> Sampling:
    return Sampling(forks, tiny_model_dir, tmp_path_factory.mktemp("few"), "--limit", 4, *GENERATED)


def stop_sampling(
    sampling: Sampling, stops: int, seed: str, number: int = signal.SIGKILL, shards: int = 1
) -> None:
    """Stop it so often, then go on until it is done; each time costs the parts in work at most, of
    two workers, and the one that is being written.

    With shards, those of a run are made one after another.
    """
    moments, done, runs = random.Random(seed), 0, 0
    while done < stops:
        name = f"stopped-{runs}"
        for shard in range(1, shards + 1):
            stopped = True
            while stopped:
                before = sampling.kept(name)
                after = moments.uniform(0, sampling.whole.seconds) if done < stops else None
                more = ("--shard", f"{shard}/{shards}") if shards > 1 else ()
                ended = sampling.run(name, *more, after=after, number=number)
                stopped = was_stopped(ended, number)
                done += stopped
                now = sampling.kept(name)
                assert before <= now
                assert ended.parts - len(now - before) in (range(4) if stopped else (0,))
        sampling.check_finished(name)
        shutil.rmtree(sampling.folder / name)
        runs += 1


def test_a_run_that_is_killed_loses_a_part_and_nothing_else(generated):
    stop_sampling(generated, 1, "few")


def test_any_processes_at_once_make_the_run_and_each_part_once(forks, generated, tmp_path):
    """Two processes for the whole run, one for a shard of 2, and one for a shard of 3."""
    sampling = generated
    words = [*sampling.words, "--out", tmp_path / "run"]
    each = [words, [*words, "--shard", "2/2"], [*words, "--shard", "1/3"], words]
    ended = forks.run_together(each, IA_MECH_CACHE=str(tmp_path))
    assert [one.status for one in ended] == [0] * 4, [one.err for one in ended]
    run = Run.open(tmp_path / "run")
    assert run.complete and run.verify() == [] and run.digest() == sampling.digest
    assert sum(one.parts for one in ended) == sampling.whole.parts
    assert not list(run.path.rglob("*.lock"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["--limit", 24, *GENERATED], ["--limit", 24, *GIVEN]],
    ids=["responses generated", "responses given"],
)
def test_sampling_killed_at_random_moments(forks, tiny_model_dir, tmp_path, settings):
    stop_sampling(Sampling(forks, tiny_model_dir, tmp_path, *settings), 40, "many")


@pytest.mark.slow
def test_shards_killed_at_random_moments(forks, tiny_model_dir, tmp_path):
    sampling = Sampling(forks, tiny_model_dir, tmp_path, "--limit", 24, *GENERATED)
    stop_sampling(sampling, 20, "shards", shards=2)


@pytest.mark.slow
@SIGNALS
def test_sampling_ended_at_random_moments(forks, tiny_model_dir, tmp_path, number):
    sampling = Sampling(forks, tiny_model_dir, tmp_path, "--limit", 24, *GENERATED)
    stop_sampling(sampling, 20, "ended", number)


# -- judging --------------------------------------------------------------------------------------

CONCURRENCY = 4


class Judging:
    """``judge run --judge llm`` of copies of one run, each with a cache of its own."""

    def __init__(self, forks: Forks, run: Path, folder: Path, **server) -> None:
        self.forks, self.source, self.folder, self.server = forks, run, folder, server

    def judge(self, name: str, stub: StubServer, **options) -> Ended:
        run = self.folder / name / "run"
        if not run.exists():
            shutil.copytree(self.source, run)
        words = ["run", run, "--judge", "llm", "--model", "stub", "--base-url", stub.url]
        words += ["--concurrency", CONCURRENCY, "--price", 1, 2]
        cache = str(self.folder / name / "cache")
        return self.forks.run("ia_mech.judge", *words, **options, IA_MECH_CACHE=cache)

    def whole(self) -> tuple[Ended, pd.DataFrame, Counter]:
        """An undisturbed judging: how it ended, its verdicts, its requests."""
        with StubServer(**self.server) as stub:
            ended = self.judge("whole", stub)
            assert ended.status == 0, ended.err
            return ended, verdicts(self.folder / "whole"), requests(stub)

    def paid(self, name: str) -> set[Item]:
        """The items with a verdict in the cache. A last line that is cut off doesn't count."""
        found = list((self.folder / name / "cache").rglob("*.jsonl"))
        if not found or not (first := found[0].read_bytes().partition(b"\n"))[1]:
            return set()
        identity = json.loads(first[0])["identity"]
        run = Run.open(self.folder / name / "run")
        items = items_of(run, draw_decoys(run, 1))
        with VerdictCache(identity, found[0].parent) as cache:
            return {item for item in items if cache.get(item)}


def verdicts(folder: Path) -> pd.DataFrame:
    """The judgements, without the columns that say where a verdict came from."""
    return Run.open(folder / "run").labels.judgements("stub").drop(columns="cached")


def requests(stub: StubServer) -> Counter[Item]:
    """How often each item was requested; a request that a kill cut off has no body."""
    return Counter(Item(*item_of(body).values()) for body in stub.bodies if body)


def stop_judging(judging: Judging, stops: int, seed: str, number: int = signal.SIGKILL) -> int:
    """Stop it so often, then go on until it is done; returns how many requests were made again."""
    whole, expected, once = judging.whole()
    assert set(once.values()) == {1}
    moments, done, runs, again = random.Random(seed), 0, 0, 0
    while done < stops:
        name, stopped, paid = f"stopped-{runs}", 0, []
        with StubServer(**judging.server) as stub:
            while True:
                after = moments.uniform(0, whole.seconds) if done < stops else None
                ended = judging.judge(name, stub, after=after, number=number)
                if not was_stopped(ended, number):
                    break
                done, stopped = done + 1, stopped + 1
                made = requests(stub)
                paid.append({item: made[item] for item in judging.paid(name)})
            made = requests(stub)
        assert verdicts(judging.folder / name).equals(expected)
        assert set(made) == set(once)
        for then in paid:
            assert {item: made[item] for item in then} == then, "judged, and requested again"
        surplus = made.total() - once.total()
        assert surplus <= CONCURRENCY * stopped
        again += surplus
        (cache,) = (judging.folder / name / "cache").rglob("*.jsonl")
        keys = [json.loads(line).get("key") for line in cache.read_text().splitlines()]
        assert keys[0] is None and len(keys) == len(set(keys)) == 1 + len(once)
        shutil.rmtree(judging.folder / name)
        runs += 1
    return again


def test_a_judging_that_is_killed_pays_for_no_verdict_twice(forks, merged, tmp_path):
    stop_judging(Judging(forks, merged.path, tmp_path, delay=0.01), 1, "few")


@pytest.mark.slow
def test_judging_killed_at_random_moments(forks, merged, tmp_path):
    stop_judging(Judging(forks, merged.path, tmp_path, delay=0.02), 40, "judging")


@pytest.mark.slow
@SIGNALS
def test_judging_ended_at_random_moments(forks, merged, tmp_path, number):
    again = stop_judging(Judging(forks, merged.path, tmp_path, delay=0.02), 20, "ended", number)
    assert again == 0, "it waits for what is under way"
