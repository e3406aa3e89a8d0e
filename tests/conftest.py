"""The environment of the tests, the order of their files, and a quiet progress.

The process that deals tests to workers reads this file and runs no tests, so ``common`` holds all
that takes seconds to import.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
# As in an active environment, where commands are printed by their names.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Idle threads would spin, and take the cores of other tests; it is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# OpenBLAS's idle threads spin: small products on a busy machine took 30 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))

# A shell starts background jobs with SIGINT ignored, and what they start inherits that: tests of
# Ctrl-C would wait for an interrupt that can't come.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes, not the power: flushing to the disk shows nothing here, and is slow.
os.fsync = lambda _: None


# Files that take longest, before all others: one at the end would be waited for by itself.
LONGEST = (
    *("test_locate", "test_readme", "test_kills", "test_probes_transfer"),
    *("test_collect", "test_probes_train", "test_study", "test_check", "test_interchange"),
    *("test_probes_beyond", "test_planted_locate", "test_devices", "test_probes_analysis"),
    *("test_shards", "test_architectures", "test_perturbations", "test_rates", "test_steering"),
)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        gc.disable()  # while half a million objects that stay are imported
        import torch

        if not torch.cuda.is_available():
            # Kernels then run in Triton's interpreter. It is read when Transformers loads Triton.
            os.environ.setdefault("TRITON_INTERPRET", "1")
        for name in ("common", "runs"):
            config.pluginmanager.import_plugin(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


class Silent:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps, self.note = 0, ""

    def start(self, phase: str, total: int, *, done: int = 0, unit: str = "step") -> None:
        self.lines.append(f"{phase} {total} {done}")

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.steps += steps
        self.note = note or self.note

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stop(self) -> None: ...
