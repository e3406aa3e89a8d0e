"""Compute several parts at once, in threads that each have compute threads of their own.

PyTorch's kernels let go of the interpreter's lock, so two workers with one compute thread each keep
two cores busy and never wait at a barrier; one worker with two compute threads waits hundreds of
times in every pass, for the slower of the two. Only tensors and ids are a worker's business: what
it computed is handed to the main thread, which alone touches texts, files and the terminal.

What a worker does crosses to it as data, for the model may be in another process (``cluster.py``):
a function by name, what it is given besides the model, and a listener, which it tells what it does.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import joblib
import psutil
import torch

from ia_mech.engine.passes import on_block

Item = TypeVar("Item")
Result = TypeVar("Result")

PROCESS = Path("/proc/self/cgroup")  # says in which control groups this process is
GROUPS = Path("/sys/fs/cgroup")
# Files of a control group, and of its cached files in memory.stat, which give way: of version 1.
GROUP_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
# More would wait for the interpreter's lock, which a step holds for some 24 ms.
MOST_WORKERS = 8


class Stopped(Exception):
    """Ends the pass of a worker whose result nobody waits for any more."""


def usable_cores() -> int:
    """The cores that this process may use, by its affinity and its control group."""
    return joblib.cpu_count()


class Memory(NamedTuple):
    """Bytes of memory: all that this process may ever have, and what is free of them now."""

    total: int
    free: int


def usable_memory() -> Memory:
    """The machine's memory, as far as this process's control groups and their parents allow."""
    machine = psutil.virtual_memory()
    allowed = [Memory(machine.total, machine.available)]
    groups = PROCESS.read_text().splitlines() if PROCESS.is_file() else []  # not on a Mac
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if not controllers:
            root, *names = GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, *names = GROUPS / "memory", *GROUP_V1
        else:
            continue
        # In a container, the group's path may be the host's; its own group is the root then.
        folders = [root / path.strip("/"), *(root / path.strip("/")).parents]
        for folder in folders[: folders.index(root) + 1]:
            if one := _group_memory(folder, *names):
                allowed.append(one)
    return Memory(*map(min, zip(*allowed, strict=True)))


def _group_memory(folder: Path, limit: str, used: str, cached: str) -> Memory | None:
    """What a control group allows; None if it sets no limit."""
    try:
        most, now = ((folder / name).read_text().strip() for name in (limit, used))
        if most == "max":
            return None
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return Memory(int(most), max(0, int(most) - int(now) + int(stat.get(cached, 0))))
    except (OSError, ValueError):  # no such group, or files that can't be read
        return None


class Crew(NamedTuple):
    """How many workers, how many compute threads each (None leaves it to :meth:`for_items`), and
    where they are."""

    workers: int | None = None
    threads: int | None = None
    ray: str | None = None  # the address of a cluster; None: threads of this process

    def for_items(
        self,
        items: int,
        item_bytes: int = 0,
        on_cpu: bool = True,
        machine: tuple[int, int] | None = None,
    ) -> tuple[int, int]:
        """The number of workers, and of threads each, for so many items.

        By default there is one worker per core, but no more than :data:`MOST_WORKERS`, one per
        item, and as many as free memory has room for their items. Threads change rounding, so their
        default depends on cores and items alone: if there are fewer items than cores, each worker
        gets its share of the cores. A GPU has one worker. ``machine`` is the cores and the free
        bytes of memory of another machine.
        """
        cores, free = machine or (usable_cores(), usable_memory().free)
        items = max(1, items)
        if not on_cpu:
            return 1, self.threads or cores
        threads = self.threads or cores // min(MOST_WORKERS, cores, items)
        fit = free // max(1, item_bytes)
        most = min(MOST_WORKERS, cores // threads, items, fit)
        return self.workers or max(1, most), threads


ANY = Crew()


class Team:
    """Workers around a model: threads of this process (a subclass has others).

    Attributes:
        device: that they compute on.
        most, threads: for :func:`compute_in_workers`.
        named: whether the progress of a run has named the model, which the first run does.
    """

    named = False

    def __init__(self, subject: Any = None) -> None:
        self.subject, self.most, self.threads = subject, 1, 1
        self.device = torch.device("cpu") if subject is None else subject.device

    def begin(self, task: Callable[..., Result], *args: Any) -> Result:
        """Have ``task(subject, *args)`` called wherever the model is loaded, before anything else;
        returns what it gave where it ended first."""
        return task(self.subject, *args)

    def spread(self, crew: Crew, items: int, item_bytes: int = 0) -> None:
        """Decide how many workers there are; arguments as of :meth:`Crew.for_items`."""
        self.most, self.threads = crew.for_items(items, item_bytes, self.device.type == "cpu")

    def ready(self) -> int:
        """How many workers there are now."""
        return self.most

    def call(self, task: Callable[..., Result], *args: Any, listener: Any = None) -> Result:
        """``task(subject, *args, listener)`` by a worker, for the thread that waits. All of it can
        be pickled but the listener, whose methods are called here."""
        return task(self.subject, *args, listener)

    def devices(self) -> str:
        """The end of a note of the progress, which says how many there are if that may change."""
        return ""


def compute_in_workers(
    items: Iterable[Item],
    compute: Callable[[Item], Result],
    done: Callable[[Item, Result], None],
    workers: int,
    threads: int = 1,
    ready: Callable[[], int] | None = None,
) -> None:
    """Compute items, several at a time, and hand on each result while others are computed.

    Items are begun in their order and end in any. After an error, or Ctrl-C, the items in work are
    given up between two blocks of a pass, and what was finished is handed on before the error is
    raised.

    Args:
        items: what to compute; iterated in this thread, no further ahead than workers need.
        compute: called in a worker's thread. What it calls elsewhere has to be safe there.
        done: called in this thread with an item and its result.
        workers: how many there are at most.
        threads: PyTorch's compute threads of each worker; this thread keeps its own number.
        ready: how many there are now, where that changes.

    Raises:
        Exception: the first that ``compute`` raised, unchanged.
    """
    stop, error = threading.Event(), None
    coming, waiting = iter(items), dict[Future[Result], Item]()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    def begin(item: Item) -> Result:
        check()
        return compute(item)

    with (
        torch_threads(threads),
        _on_interrupt(stop.set),
        ThreadPoolExecutor(workers, initializer=on_block.set, initargs=(check,)) as pool,
    ):
        try:
            while True:
                if not stop.is_set():
                    # One item more waits, so that no worker does.
                    wanted = max(0, (ready() if ready else workers) + 1 - len(waiting))
                    waiting |= {pool.submit(begin, item): item for item in islice(coming, wanted)}
                if not waiting:
                    break
                # Python sees a signal that comes just before an endless wait only after the wait.
                finished = wait(waiting, timeout=1, return_when=FIRST_COMPLETED).done
                for future in [one for one in waiting if one in finished]:  # as they were begun
                    item = waiting.pop(future)
                    if future.exception() is None:
                        done(item, future.result())
                    else:
                        stop.set()
                        error = error or future.exception()
        except BaseException:
            stop.set()
            raise
    if stop.is_set():
        raise error if error and not isinstance(error, Stopped) else KeyboardInterrupt


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Threads that start while this lasts have so many of PyTorch's compute threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _on_interrupt(tell: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call ``tell``: an exception at any moment could lose a result, or half write it.

    A second Ctrl-C does what it always did.
    """
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler
    if before is signal.SIG_IGN:  # as in a job that a script began in the background
        yield
        return

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        tell()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
