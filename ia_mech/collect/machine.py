"""What rounding depends on besides a run's identity: a run may go on where it differs."""

import os
import platform
from importlib import metadata

import torch

from ia_mech.engine import weights
from ia_mech.models.load import Subject

# Packages that bring kernels which transformers takes where they are installed: of recurrent layers
# (Qwen3.5: the first two), and of attention.
KERNELS = ("flash-linear-attention", "causal-conv1d", "kernels", "flash-attn")


def machine(subject: Subject) -> dict:
    """The facts of this machine, but for the threads of a worker."""
    on_gpu = subject.device.type == "cuda"
    return {
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(subject.device) if on_gpu else platform.processor(),
        "cpus": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "weights": weights.describe(subject.model),
        "kernels": {name: version_of(name) for name in KERNELS},
        "python": platform.python_version(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it isn't."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine_changes(before: dict, now: dict) -> str:
    """Where a session's record differs from what :func:`machine` says now; empty if nowhere."""
    return ", ".join(
        f"{name} {before.get(name)} → {value}"
        for name, value in now.items()
        if before.get(name) != value
    )
