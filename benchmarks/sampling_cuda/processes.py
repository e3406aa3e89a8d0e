"""Starts the processes that measure, ends those that take too long, and keeps to the budget.

Every contender has a process of its own: compiled graphs clear workspaces that other graphs still
use, continuous batching may leave the model's attention switched, and a failed kernel makes the
device unusable for the whole process. What is ours shares one, to build the model only once.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.sampling_cuda.results import (
    CAPTURE,
    CEILINGS,
    NO_MODEL,
    ONCE,
    OURS,
    PROFILE,
    Log,
    Measured,
    Size,
    collect,
)
from benchmarks.sampling_cuda.worker import Task

# What share a process, and the order in which they are measured: what the rest is held against
# first, then the peers with a wanted ratio.
GROUPS = (
    (CEILINGS,),
    (OURS, CAPTURE, PROFILE),
    ("generate-captures",),
    ("static",),
    ("continuous",),
    ("generate",),
    ("ours-no-graphs",),
)
WORTH = 30.0  # seconds; a process that has less isn't begun
ROOT = Path(__file__).parents[2]  # where the packages are


class Refused(Exception):
    """A process refused its input and said why on stderr."""


@dataclass
class Plan:
    """What is to be measured.

    Attributes:
        models: shapes.
        contenders: names; see ``GROUPS``.
        rounds: of each.
        out: the log.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: a name of ``DTYPES``.
        size: of the job.
        together: contexts in a call of ``generate`` to begin with.
        limit: seconds after which a process is killed.
        budget: seconds for everything.
        retry: measure again what failed before.
    """

    models: Sequence[str]
    contenders: Sequence[str]
    rounds: int
    out: Path
    device: str
    dtype: str
    size: Size
    together: int
    limit: float
    budget: float
    retry: bool


class Runner:
    """Carries out a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._log = plan, Log(plan.out)
        self._begun = time.monotonic()
        # How many failures of each are to be forgotten.
        known = collect(self._log.records()) if plan.retry else {}
        self._forgiven = {job: one.failures for job, one in known.items()}

    def run(self) -> list[tuple[str, str]]:
        """Measure what is missing.

        Returns:
            Models and contenders that the budget left no time for.

        Raises:
            UserError: the log holds something else, or another setting.
            Refused: a process didn't accept its input.
        """
        plan = self._plan
        gpu = plan.device != "cpu"
        self._log.demand({"gpu": gpu, "dtype": plan.dtype} | asdict(plan.size))
        jobs = self._jobs()
        while missing := [(job, left) for job in jobs if (left := self._missing(*job))]:
            limit = min(self._plan.limit, self._left())
            if limit < min(self._plan.limit, WORTH):
                return [(model, name) for (model, _), rounds in missing for name in rounds]
            (model, _), rounds = missing[0]
            self._process(model, rounds, limit)
        return []

    def _jobs(self) -> list[tuple[str, Sequence[str]]]:
        """Models and what of them shares a process."""
        chosen = [[one for one in group if one in self._plan.contenders] for group in GROUPS]
        return [
            (model, group)
            for group in chosen
            if group
            for model in ([NO_MODEL] if CEILINGS in group else self._plan.models)
        ]

    def _left(self) -> float:
        return self._plan.budget - (time.monotonic() - self._begun)

    def _missing(self, model: str, names: Sequence[str]) -> dict[str, int]:
        """How many rounds of each are missing, where some are."""
        known = collect(self._log.records())
        found = {}
        for name in names:
            wanted = 1 if name in ONCE else self._plan.rounds
            one = known.get((model, name), Measured())
            rounds = one.missing(wanted, self._forgiven.get((model, name), 0))
            if rounds:
                found[name] = rounds
        return found

    def _process(self, model: str, rounds: dict[str, int], limit: float) -> None:
        """One process; what it dies of is noted with the contender that it was at."""
        plan = self._plan
        tell(f"{model or 'the device'}: {', '.join(rounds)}")
        task = Task(
            model, rounds, str(plan.out), plan.device, plan.dtype, plan.size, plan.together, limit
        )
        status = run_process(task, limit)
        if status == 2:
            raise Refused
        left = self._missing(model, list(rounds))
        if status == 0 or not left:
            return
        if status is None and limit < plan.limit:
            return  # the command's time was up, not the contender's: it is still missing
        why = f"killed at its limit of {limit:.0f} s" if status is None else _death(status)
        self._log.add("failed", model=model, contender=next(iter(left)), why=why)
        tell(why)


def run_process(task: Task, limit: float) -> int | None:
    """Exit status of a process, None if it was killed at its limit, in seconds."""
    here = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sampling_cuda.worker", task.written()],
        stdin=subprocess.PIPE,  # kept open: the process ends with this one
        env=os.environ | {"PYTHONPATH": here},
        start_new_session=True,  # so that its own children can be ended with it
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait()


def _death(status: int) -> str:
    """In words."""
    if status < 0:
        return f"its process was ended by signal {-status}"
    return f"its process ended with status {status}"


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
