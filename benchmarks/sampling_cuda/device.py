"""The device by itself: its clock, its state, its ceilings, and what it did during a run."""

import gc
import math
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from ia_mech.errors import UserError

CEILING_TRIES, IN_A_ROW = 5, 10  # of copies and products; the fastest try counts
KERNELS, NAME = 10, 100  # the most expensive ones are listed; so many characters of their names
FIELDS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu"}
FIELDS |= {"watts": "power.draw"}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Of one call, up to the device's last kernel."""
    synchronize(device)
    begun = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begun


def tidy(device: torch.device) -> None:
    """Give back what nobody holds any more; not to be called while an exception is handled, whose
    traceback holds the tensors of the frames it came through."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # of a device that a failed kernel left unusable
            torch.cuda.empty_cache()


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """``bandwidth`` of copies, bytes read and written per second, and ``rate`` of matrix products,
    operations per second."""
    count, width = (2**32, 8192) if device.type == "cuda" else (2**26, 512)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    copy, product = _fastest(lambda: target.copy_(source), device), _fastest(lambda: a @ b, device)
    return {"bandwidth": 2 * count / copy, "rate": 2 * width**3 / product}


def _fastest(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call among many in a row, so that the host's part isn't seen."""

    def repeated() -> None:
        for _ in range(IN_A_ROW):
            function()

    return min(seconds(repeated, device) for _ in range(CEILING_TRIES)) / IN_A_ROW


def name(device: torch.device) -> str:
    """Of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from benchmarks.sampling.__main__ import processor

    return processor()


def driver(device: torch.device) -> str:
    """The GPU driver's version, ``unknown`` without nvidia-smi."""
    found = _smi(device, ["driver_version"])
    return found[0] if found else "unknown"


def state(device: torch.device) -> dict[str, str | float | None] | None:
    """The GPU's uuid, clocks in MHz, temperature and power; None without nvidia-smi.

    One of these is None where the GPU doesn't tell it.
    """
    found = _smi(device, ["uuid", *FIELDS.values()])
    if found is None:
        return None
    told: dict[str, str | float | None] = {"uuid": found[0]}
    for field, value in zip(FIELDS, found[1:], strict=True):
        try:
            told[field] = float(value)
        except ValueError:
            told[field] = None
    return told


def _smi(device: torch.device, fields: Sequence[str]) -> list[str] | None:
    """What nvidia-smi says of the device, a field each; None where it can't be asked."""
    if device.type != "cuda":
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = [value.strip() for value in done.stdout.strip().split(",")]
    return found if done.returncode == 0 and len(found) == len(fields) else None


@dataclass(frozen=True)
class Event:
    """What the GPU did from ``start`` to ``end``, in microseconds."""

    name: str
    start: float
    end: float


def profiled(function: Callable[[], object], device: torch.device) -> dict:
    """What the GPU did during a call, as :func:`summary` says it.

    Raises:
        UserError: nothing of it can be seen.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        synchronize(device)
    return summary(
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)  # which span kernels and are none
    )


def summary(events: Iterable[Event]) -> dict:
    """How long the GPU was idle, and what it was busy with.

    Copies from and to the host don't count as work: they run beside kernels.

    Returns:
        ``span`` from the first kernel to the last and ``busy``, in seconds, ``idle`` as a share of
        the span; ``kernels``, the most expensive ones, with name, seconds and count of each.

    Raises:
        UserError: there are no kernels.
    """
    host = ("Memcpy HtoD", "Memcpy DtoH")
    kernels = sorted((e for e in events if not e.name.startswith(host)), key=lambda e: e.start)
    if not kernels:
        raise UserError(
            "the profiler saw no kernels", "let it use CUPTI (NVreg_RestrictProfilingToAdminUsers)"
        )
    busy, end, total, count = 0.0, -math.inf, Counter(), Counter()
    for event in kernels:
        busy += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
        total[event.name] += event.end - event.start
        count[event.name] += 1
    span = end - kernels[0].start
    return {
        "span": span / 1e6,
        "busy": busy / 1e6,
        "idle": 1 - busy / span if span else 0.0,
        "kernels": [
            {"name": kernel[:NAME], "seconds": taken / 1e6, "count": count[kernel]}
            for kernel, taken in total.most_common(KERNELS)
        ],
    }
