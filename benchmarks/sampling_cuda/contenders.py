"""What a contender of ``benchmarks.sampling_cuda`` is; ours, and what ours is made of."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from benchmarks.sampling_cuda import device as devices
from benchmarks.sampling_cuda import floor
from benchmarks.sampling_cuda.workload import Workload
from ia_mech.errors import UserError

PAIRS = 5  # of prefills with and without capture, per round


class Contender(ABC):
    """One of those that are measured, on one workload.

    Attributes:
        notes: how it runs, for the tables.
    """

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.notes: dict = {}

    @abstractmethod
    def measure(self) -> dict:
        """One round; what was found, by name, seconds if nothing else is said."""

    def warm_up(self) -> float:
        """What is done once; returns the seconds that a measurement takes at most."""
        begun = time.perf_counter()
        self.measure()
        return time.perf_counter() - begun

    def close(self) -> None:
        """Let go of what the library keeps."""
        return None

    def _seconds(self, function: Callable[[], object]) -> float:
        return devices.seconds(function, self.work.model.device)


class Ours(Contender):
    """The whole job, ``seconds``, and its decoding by itself, of contexts that were prefilled,
    ``decode``.

    Args:
        work: the job.
        graphs: as CUDA graphs, where the engine has them.
    """

    def __init__(self, work: Workload, graphs: bool = True) -> None:
        super().__init__(work)
        engine = work.engine
        if not graphs and not engine.graphs:
            raise UserError("ours decodes without graphs anyway", "see there")
        self.graphs = graphs and engine.graphs
        steps = "CUDA graphs" if self.graphs else "plain loop"
        shared = engine.name.removesuffix(", CUDA graphs")
        why = f" ({engine.why})" if engine.why else ""
        self.notes = {"engine": f"{shared}, {steps}{why}"}
        cache = next(iter(work.groups(False))).state.cache
        least = floor.least(work.model, cache, work.size)
        self.notes |= {"least_bytes": least.bytes, "least_operations": least.operations}

    def measure(self) -> dict:
        whole = self._seconds(partial(self.work.whole_job, self.graphs))
        ready = list(self.work.groups(False))
        return {
            "seconds": whole,
            "decode": self._seconds(partial(self.work.decode, ready, self.graphs)),
        }


class Capture(Contender):
    """Prefills of all contexts, ``plain`` and ``captured`` taking turns; lists of seconds."""

    def measure(self) -> dict:
        taken: dict[str, list[float]] = {"plain": [], "captured": []}
        for _ in range(PAIRS):
            for name, capture in (("plain", False), ("captured", True)):
                taken[name].append(self._seconds(lambda on=capture: list(self.work.groups(on))))
        return taken


class Profile(Contender):
    """What the GPU does during ours; see :func:`benchmarks.sampling_cuda.device.summary`."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        if work.model.device.type != "cuda":
            raise UserError("a CPU runs no kernels", "use --device cuda")

    def warm_up(self) -> float:
        self.graphs = self.work.engine.graphs
        return 2 * self._seconds(partial(self.work.whole_job, self.graphs))

    def measure(self) -> dict:
        return devices.profiled(partial(self.work.whole_job, self.graphs), self.work.model.device)
