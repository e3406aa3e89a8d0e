"""One process of ``benchmarks.sampling_cuda``: measures some contenders on one model.

Started by :mod:`benchmarks.sampling_cuda.processes` with what to do as JSON. It ends when its
standard input does, so that nothing of a killed benchmark stays on the GPU.
"""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

from benchmarks.sampling_cuda import device as devices
from benchmarks.sampling_cuda.contenders import Capture, Contender, Ours, Profile
from benchmarks.sampling_cuda.peers import Continuous, Generate, told
from benchmarks.sampling_cuda.results import CEILINGS, Log, Setting, Size
from benchmarks.sampling_cuda.workload import Workload, build
from ia_mech.cli import guarded
from ia_mech.errors import UserError
from ia_mech.models.load import DTYPES

KERNELS = ("flash-attn", "flash-attn-3", "flash-linear-attention", "causal-conv1d", "kernels")
MAKERS: dict[str, Callable[[Workload, int], Contender]] = {
    "ours": lambda work, _: Ours(work),
    "ours-no-graphs": lambda work, _: Ours(work, graphs=False),
    "capture": lambda work, _: Capture(work),
    "profile": lambda work, _: Profile(work),
    "generate": lambda work, together: Generate(work, together),
    "generate-captures": lambda work, together: Generate(
        work, together, return_dict_in_generate=True, output_hidden_states=True, output_scores=True
    ),
    "static": lambda work, together: Generate(work, together, cache_implementation="static"),
    "continuous": lambda work, _: Continuous(work),
}


@dataclass(frozen=True)
class Task:
    """What a process is to do.

    Attributes:
        model: one of the shapes; none for the ceilings.
        rounds: of each contender.
        out: the log.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: a name of ``DTYPES``.
        size: of the job.
        together: contexts in a call of ``generate`` to begin with.
        seconds: after so many it will be killed.
    """

    model: str
    rounds: dict[str, int]
    out: str
    device: str
    dtype: str
    size: Size
    together: int
    seconds: float

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Task":
        fields = json.loads(text)
        return cls(**fields | {"size": Size(**fields["size"])})


def main(argv: list[str] | None = None) -> int:
    begun = time.monotonic()
    task = Task.read((sys.argv[1:] if argv is None else argv)[0])
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    return guarded(lambda: Process(task, begun).run(), lambda: "what was measured is kept")


def _end_with_stdin() -> None:
    os.read(0, 1)  # nothing is ever sent; sys.stdin would be locked at this process's own end
    os._exit(1)


def setting(device: torch.device, dtype: str, size: Size) -> Setting:
    """Of this machine and these libraries."""
    return Setting(
        device=devices.name(device),
        gpu=device.type == "cuda",
        driver=devices.driver(device),
        dtype=dtype,
        torch=torch.__version__,
        transformers=transformers.__version__,
        besides=_besides(),
        **asdict(size),
    )


def _besides() -> str:
    """Which packages are installed that transformers' models and peers use if they are."""
    found = []
    for package in KERNELS:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found) or "none"


class Process:
    """The work of one process.

    Args:
        task: what to do.
        begun: when, by the monotonic clock.
    """

    def __init__(self, task: Task, begun: float) -> None:
        self._task, self._end = task, begun + task.seconds
        self._log, self._device = Log(Path(task.out)), torch.device(task.device)
        self._work: Workload | None = None

    def run(self) -> None:
        """Measure one contender after the other; after one that failed, nothing can be trusted and
        the others are left to a new process.

        Raises:
            UserError: the log is of another setting.
        """
        torch.set_float32_matmul_precision("highest")
        task = self._task
        self._log.agree(setting(self._device, task.dtype, task.size))
        for number, (contender, rounds) in enumerate(task.rounds.items()):
            share = (self._end - time.monotonic()) / (len(task.rounds) - number)
            if problem := self._try(contender, rounds, time.monotonic() + share):
                self._note("failed", contender, why=problem)
                return

    def _try(self, contender: str, rounds: int, end: float) -> str:
        """Measure one; returns what kept it from being measured."""
        try:
            if contender == CEILINGS:
                self._measured(contender, partial(devices.ceilings, self._device, self._dtype), {})
            else:
                self._measure(contender, rounds, end)
        except UserError as error:
            return str(error)
        except Exception as error:  # a peer that can't is a result, too
            return told(error)
        return ""

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._task.dtype]

    def _measure(self, contender: str, rounds: int, end: float) -> None:
        """Warm up, and measure as often as there is time for, but once at least."""
        task = self._task
        if self._work is None:
            self._work = Workload(build(task.model, self._dtype, self._device), task.size)
        one = MAKERS[contender](self._work, task.together)
        try:
            begun = time.monotonic()
            estimate = one.warm_up()
            self._note("warm-up", contender, seconds=time.monotonic() - begun)
            if rounds > 1 and time.monotonic() + rounds * estimate > end:
                self._note("cut", contender, why=f"a warm-up of {estimate:.0f} s")
                rounds = 1
            for _ in range(rounds):
                self._measured(contender, one.measure, one.notes)
        finally:
            one.close()
        devices.tidy(self._device)

    def _measured(self, contender: str, measure: Callable[[], dict], notes: dict) -> None:
        """One round, and the GPU's state before it."""
        gpu = devices.state(self._device)
        self._note("measured", contender, values=measure(), notes=notes, gpu=gpu)

    def _note(self, kind: str, contender: str, **fields) -> None:
        """Say it, and put it into the log."""
        self._log.add(kind, model=self._task.model, contender=contender, **fields)
        what = f"{self._task.model} {contender}".strip()
        print(f"{what}: {kind}, {_short(fields)}", flush=True)


def _short(fields: dict) -> str:
    """Numbers, reasons and how it ran, for the terminal; of several numbers the median."""
    told = dict(fields.get("values", fields))
    told |= {name: text for name, text in fields.get("notes", {}).items() if name == "engine"}
    for name, value in told.items():
        if isinstance(value, list):
            numbers = [one for one in value if isinstance(one, float)]
            told[name] = statistics.median(numbers) if numbers else f"{len(value)} of them"
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name}: {value}"
        for name, value in told.items()
    )


if __name__ == "__main__":
    sys.exit(main())
