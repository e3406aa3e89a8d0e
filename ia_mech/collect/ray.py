"""``--ray``: the shards of a run on the devices of a Ray cluster, many more than there are devices.

A worker, a Ray actor, has one device and keeps the model and the surveyed conversations. Shards lie
on a disk that all machines share; one whose worker dies goes on with another, and one that fails by
its data is named at the end, when all others are done.
"""

import contextlib
import os
import re
import socket
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import Prepared, collect, keep_lens, prepare
from ia_mech.collect.preflight import check_folder, read_inputs
from ia_mech.collect.shards import Shard
from ia_mech.display import Progress, Quiet
from ia_mech.engine.plan import batch_defaults
from ia_mech.errors import UserError
from ia_mech.models.load import load
from ia_mech.run import Run, layout

SHARDS_PER_DEVICE = 8
TRIES = 3  # of a shard whose worker dies
PATIENCE = 10.0  # seconds until a cluster has to answer


class Lost(Exception):
    """The worker that had a task is gone."""


class Pool(Protocol):
    """Workers, and the tasks that they have."""

    def start(self) -> tuple[Any, Any]:
        """A new worker, and the task whose end says that it is ready."""

    def give(self, worker: Any, shard: Shard, phase: str | None) -> Any:
        """A task for a worker."""

    def end_of_one(self, tasks: Sequence[Any]) -> tuple[Any, str | None]:
        """The first task to end, and what was wrong with it; raises :class:`Lost`, with the task,
        where its worker is gone."""


def work_off(
    pool: Pool, workers: int, shards: Sequence[Shard], phase: str | None, progress: Progress
) -> dict[Shard, str]:
    """Have shards made; returns what was wrong with those that failed.

    Raises:
        UserError: a worker can't be made.
    """
    waiting, tries, failed = deque(shards), Counter[Shard | None](), dict[Shard, str]()
    busy: dict[Any, tuple[Any, Shard | None]] = {}  # task: worker, and None while it is starting
    idle: list[Any] = []

    def start() -> None:
        worker, task = pool.start()
        busy[task] = worker, None

    def settle(shard: Shard, problem: str | None) -> None:
        if problem is not None:
            failed[shard] = problem
        progress.advance()

    for _ in range(min(workers, len(waiting))):
        start()
    while waiting or any(shard is not None for _, shard in busy.values()):
        try:
            task, problem = pool.end_of_one(list(busy))
            worker, shard = busy.pop(task)
            idle.append(worker)
            if shard is not None:
                settle(shard, problem)
            elif problem is not None:
                what, _, remedy = problem.partition("; ")
                raise UserError(what, remedy or "see Ray's logs")
        except Lost as lost:
            _, shard = busy.pop(lost.args[0])
            tries[shard] += 1
            if shard is None and tries[None] >= TRIES * workers:
                raise UserError("workers of Ray die before they begin", "see its logs") from None
            if shard is not None and tries[shard] < TRIES:
                waiting.append(shard)
            elif shard is not None:
                settle(shard, f"its worker died {TRIES} times")
            if waiting and not idle:
                start()
        while waiting and idle:
            shard = waiting.popleft()
            worker = idle.pop()
            busy[pool.give(worker, shard, phase)] = worker, shard
    return failed


def sample_on_ray(
    config: SampleConfig,
    out: Path,
    address: str,
    progress: Progress,
    threads: int | None = None,
    repair: bool = False,
) -> Run:
    """Make a run in shards on all devices of a cluster.

    Args:
        address: of the cluster; empty for the one of ``RAY_ADDRESS``, or of this machine.
        threads: of a worker on a CPU; there is one worker per machine unless it is given.
        repair: compute damaged parts of shards again.

    Raises:
        UserError: no Ray; no cluster at the address; shards that failed, by name.
    """
    pool = _Ray(address, (config, out.resolve(), threads, repair), config.model.device, threads)
    with contextlib.closing(pool):
        _make_all(pool, config, out, progress)
    return Run.open(out)


def _make_all(pool: "_Ray", config: SampleConfig, out: Path, progress: Progress) -> None:
    there = layout.shards_in(out)
    of = there[0][1] if there else SHARDS_PER_DEVICE * pool.devices
    shards = [Shard(k, of) for k in range(1, of + 1)]
    check_folder(out, shards[0])
    written = config.rivals and config.response != "given"
    for phase in ("responses", "turns") if written else (None,):
        progress.start(f"shards, {phase}" if phase else "shards", of, unit="shard")
        try:
            failed = work_off(pool, pool.devices, shards, phase, progress)
        finally:
            progress.stop()
        if failed:
            shard, problem = next(iter(failed.items()))
            raise UserError(
                f"{len(failed)} of {of} shards failed, such as {shard}: {problem}",
                "the same command makes them again",
            )


class _Ray:
    """The workers of a cluster: one per GPU, or per so many threads, or per machine without any."""

    def __init__(self, address: str, job: tuple, device: str, threads: int | None) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--ray needs Ray", "install it: pip install 'ia-mech[ray]'") from None
        self._ray, self._job = ray, job
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent out unasked
        try:
            if place := re.search(r"([^/:]+):([0-9]+)$", address):  # Ray would try for minutes
                socket.create_connection((place[1], int(place[2])), timeout=PATIENCE).close()
            ray.init(address=address or None, log_to_driver=False, logging_level="error")
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"no Ray answers at {address!r} ({reason})",
                "start it with: ray start --head, or leave the address out",
            ) from None
        found = ray.cluster_resources()
        gpus = 0 if device == "cpu" else int(found.get("GPU", 0))
        nodes = [node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"]]
        cpus = threads or int(min(nodes))
        self.devices = gpus or max(1, sum(int(each // cpus) for each in nodes))
        options = {"num_gpus": 1} if gpus else {"num_cpus": cpus}
        self._actor = ray.remote(**options, scheduling_strategy="SPREAD")(_Worker)

    def close(self) -> None:
        self._ray.shutdown()

    def start(self) -> tuple[Any, Any]:
        worker = self._actor.remote(*self._job)
        return worker, worker.begin.remote()

    def give(self, worker: Any, shard: Shard, phase: str | None) -> Any:
        return worker.make.remote(shard, phase)

    def end_of_one(self, tasks: Sequence[Any]) -> tuple[Any, str | None]:
        (task,), _ = self._ray.wait(list(tasks), num_returns=1)
        try:
            return task, self._ray.get(task)
        except self._ray.exceptions.RayActorError:
            raise Lost(task) from None


class _Worker:
    """Makes shards, one after another; what was wrong with one is returned, not raised."""

    def __init__(self, config: SampleConfig, out: Path, threads: int | None, repair: bool) -> None:
        self.config, self.out, self.threads, self.repair = config, out, threads, repair
        self.prepared: Prepared | None = None

    def begin(self) -> str | None:
        """Load the model and survey the conversations."""
        try:
            if self.threads:
                torch.set_num_threads(self.threads)
            self.subject = load(self.config.model)
            rows = self.config.batch_rows or batch_defaults(self.subject.device).batch_rows
            self.config = replace(self.config, batch_rows=rows)
            folder = self.out / layout.SHARDS
            folder.mkdir(parents=True, exist_ok=True)
            self.prepared = prepare(self.config, self.subject, read_inputs(self.config), folder)
        except Exception as error:
            return _said(error)
        return None

    def make(self, shard: Shard, phase: str | None) -> str | None:
        """Make a shard, or go on with it."""
        repair = self.repair and (shard.folder(self.out) / layout.RUN).is_file()
        try:
            run = collect(
                self.config,
                self.subject,
                self.out,
                Quiet(),
                prepared=self.prepared,
                repair=repair,
                shard=shard,
                phase=phase,
            )
            keep_lens(run, self.subject)
        except Exception as error:
            return _said(error)
        return None


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + (" ".join(str(error).split()) or "no reason")
