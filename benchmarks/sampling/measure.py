"""Which contenders are measured, and how: in turns within one process, which returns records.

A record has ``model``, ``contender`` and ``contexts`` (decoded together); and ``values`` (see the
contenders' ``measure``) with ``notes`` (how it ran), or why it ``failed``.
"""

import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.sampling.limits import Ceilings, Products, Steps
from benchmarks.sampling.ours import Capture, Decoding, Ours, differing
from benchmarks.sampling.peers import Continuous, Generate, TransformerLens
from benchmarks.sampling.workload import Contender, Size, Task, Workload, one_line, release_memory
from ia_mech.errors import UserError

PACKAGES = (
    "torch", "transformers", "transformer-lens", "flash-attn", "flash-attn-3",
    "flash-linear-attention", "causal-conv1d", "kernels",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A contender, before it is made for a number of contexts of a workload."""

    make: Callable[[Workload, int], Contender]
    devices: tuple[str, ...] = ("cpu", "cuda")  # where it is measured by default
    counts: str = "all"  # numbers of contexts; or only the "first" or the "last"
    once: bool = False  # one round is enough
    alone: tuple[str, ...] = ()  # where it has a process of its own

    def numbers(self, size: Size) -> tuple[int, ...]:
        """Of contexts."""
        chosen = {"all": slice(None), "first": slice(1), "last": slice(-1, None)}[self.counts]
        return size.counts[chosen]


CPU, GPU = ("cpu",), ("cuda",)
CAPTURES: dict[str, Any] = {
    "return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True
}  # fmt: skip
CONTENDERS = {
    "ceilings": Kind(Ceilings, GPU, "first", once=True),
    "ours": Kind(Ours),
    "copies": Kind(partial(Ours, share=False), CPU),
    "decode": Kind(Decoding, GPU, "last"),
    # Where a call is made per context, one context tells how long several take.
    "generate": Kind(Generate, counts="first", alone=GPU),
    "generate-captures": Kind(partial(Generate, **CAPTURES), counts="first", alone=GPU),
    "static": Kind(partial(Generate, cache_implementation="static"), GPU, "first", alone=GPU),
    "continuous": Kind(Continuous, GPU, "last", alone=CPU + GPU),
    "transformer-lens": Kind(TransformerLens, CPU, "first"),
    "products": Kind(Products, CPU, "first"),
    "steps": Kind(Steps, CPU),
    "capture": Kind(Capture, counts="first"),
}


def in_process(task: Task) -> tuple[str, list[dict[str, Any]]]:
    """Setting and records of a task that a fresh process measures.

    Raises:
        UserError: the model or its contexts can't be had.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin) as pool:
            setting, records, refused = pool.submit(_measure_or_refuse, task).result()
    except BrokenProcessPool:
        died = {"model": task.model, "contexts": 0, "failed": "its process died"}
        return "", [died | {"contender": name} for name in task.contenders]
    if refused:
        raise UserError(*refused)
    return setting, records


def _begin() -> None:
    """Set up a process: libraries print into no table, and Ctrl-C ends without a traceback."""
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _measure_or_refuse(task: Task) -> tuple[str, list[dict[str, Any]], tuple[str, ...]]:
    """Give the two texts of a UserError as a third value, since it can't be pickled."""
    try:
        return *measure(task), ()
    except UserError as error:
        return "", [], (error.problem, error.remedy)


def measure(task: Task) -> tuple[str, list[dict[str, Any]]]:
    """Warm up all contenders, then measure them in turns; returns setting and records."""
    torch.set_float32_matmul_precision("highest")
    work, records = Workload(task), list[dict[str, Any]]()
    made: list[tuple[str, Contender]] = []

    def attempt(name: str, contexts: int, what: Callable[[], None]) -> bool:
        """Whether it succeeded. That a contender can't run is a result, too."""
        why = ""
        try:
            what()
        except Exception as error:
            why = one_line(error)
        if why:  # only now is the exception gone; its traceback held tensors
            failed = {"model": task.model, "contender": name, "contexts": contexts, "failed": why}
            records.append(failed)
            release_memory(work.device)
        return not why

    def warm_up(name: str, contexts: int) -> None:
        contender = CONTENDERS[name].make(work, contexts)
        contender.warm_up()
        made.append((name, contender))

    def measured(name: str, contender: Contender) -> None:
        record = {"model": task.model, "contender": name, "contexts": contender.contexts}
        records.append(record | {"values": contender.measure(), "notes": contender.notes})

    for name in task.contenders:
        for contexts in CONTENDERS[name].numbers(task.size):
            tell(f"{task.model}: warming up {name}, contexts: {contexts}")
            attempt(name, contexts, partial(warm_up, name, contexts))
    for number in range(task.rounds):
        for name, contender in list(made):
            if number and CONTENDERS[name].once:
                continue
            contexts = contender.contexts
            tell(f"{task.model}: round {number + 1} of {task.rounds}: {name}, contexts: {contexts}")
            if not attempt(name, contexts, partial(measured, name, contender)):
                made.remove((name, contender))
    for _, contender in made:
        contender.close()
    if compared := differing(work):
        record = {"model": task.model, "contender": "differing", "contexts": task.size.counts[-1]}
        records.append(record | {"values": {"compared": compared}, "notes": ""})
    return setting(work.device, task.dtype), records


def setting(device: torch.device, dtype: str) -> str:
    """Hardware, versions and dtype, on one line."""
    names = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            names.append(f"{package} {version(package)}")
    where = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return f"{where}, {dtype} on {device.type}, {', '.join(names)}"


def processor() -> str:
    """The CPU's name, with the widest vectors it has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"model name\s*: (.*)", text)
    vectors = next((v for v in ("avx512f", "avx2") if re.search(rf"\b{v}\b", text)), None)
    named = name[1].strip() if name else platform.machine()
    return f"{named} ({vectors})" if vectors else named


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
