"""``--ray``: the shards of a run on the devices of a Ray cluster, which share a disk."""

import os
import re
import socket
from pathlib import Path
from typing import Any

from ia_mech.collect.job import make_run
from ia_mech.collect.survey import survey
from ia_mech.display import Progress, Quiet
from ia_mech.engine.workers import Crew
from ia_mech.errors import UserError
from ia_mech.models.load import resolve_device
from ia_mech.run import Run
from ia_mech.settings import Settings, Shard

PATIENCE = 10  # seconds for a cluster to answer
TRIES = 3  # of a shard whose worker dies; what it had written is kept


def sample_on_ray(
    settings: Settings, out: Path, address: str, progress: Progress, threads: int | None
) -> Run:
    """Make a run with one shard per device of a cluster, or of this machine.

    Args:
        settings: of the run.
        out: the run's folder, on a disk that all machines share.
        address: of a cluster; empty to start one on this machine.
        progress: counts shards.
        threads: of each worker on a CPU, and the CPUs that it is given; one if None.

    Raises:
        UserError: no Ray, no cluster, no device; or what was wrong with a shard.
    """
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray", "install it: pip install 'ia-mech[ray]'") from None
    out = out.absolute()
    survey(settings, out)  # refused before anything is started
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent out unasked
    try:
        if place := re.search(r"([^/:]+):([0-9]+)$", address):  # Ray would try for minutes
            socket.create_connection((place[1], int(place[2])), PATIENCE).close()
        ray.init(address or "local", log_to_driver=False, configure_logging=False)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"no Ray cluster answers at {address or 'this machine'} ({reason})",
            "start one with: ray start --head, or give --ray without an address",
        ) from None
    try:
        gpu = resolve_device(settings.device).type == "cuda"
        need: dict[str, Any] = {"num_gpus": 1} if gpu else {"num_cpus": threads or 1}
        kind, each = ("GPU", 1) if gpu else ("CPU", threads or 1)
        count = int(ray.cluster_resources().get(kind, 0)) // each
        if not count:
            raise UserError(f"the Ray cluster has no {kind} for a worker", "add one to it")

        def shard(which: Shard) -> str | None:
            try:
                make_run(settings, out, Quiet(), shard=which, crew=Crew(1, threads or 1))
                return None
            except UserError as error:
                return f"shard {which[0]}/{which[1]}: {error}"

        task = ray.remote(max_retries=TRIES - 1, **need)(shard)
        waiting = [task.remote((number, count)) for number in range(1, count + 1)]
        progress.start("shards", count, unit="shard")
        problems = []
        while waiting:
            (done,), waiting = ray.wait(waiting)
            try:
                problems.append(ray.get(done))
            except ray.exceptions.RayError as error:
                problems.append(f"a worker died {TRIES} times ({str(error).splitlines()[0][:160]})")
            progress.advance()
    finally:
        progress.stop()
        ray.shutdown()
    if wrong := [problem for problem in problems if problem]:
        raise UserError(wrong[0], "the same command goes on from what is kept")
    return Run.open(out)
