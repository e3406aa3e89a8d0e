"""What two runs must share to be one, and what else rounding depends on."""

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from ia_mech.chat.format import ChatFormat
from ia_mech.engine import weights
from ia_mech.engine.check import TOKENS
from ia_mech.engine.shared import Engine
from ia_mech.models.load import Subject
from ia_mech.run.integrity import without_folders
from ia_mech.settings import Settings

# Packages that bring kernels which transformers takes where they are installed: of recurrent layers
# (Qwen3.5: the first two), and of attention.
KERNELS = ("flash-linear-attention", "causal-conv1d", "kernels", "flash-attn")


def build_chat(settings: Settings, tokenizer: Any, eos_ids: Sequence[int] = ()) -> ChatFormat:
    """The chat format that settings ask for."""
    return ChatFormat(
        tokenizer,
        settings.system,
        settings.thinking,
        settings.date,
        eos_ids,
        settings.opening,
        settings.template_option,
    )


def probe_ids(chat: ChatFormat) -> list[int]:
    """``TOKENS`` ids of a short conversation, with which the engine is checked at start-up."""
    messages = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "Blue."},
    ]
    return (chat.context(messages).ids * TOKENS)[:TOKENS]


def eos_ids(generation_config: Any, model_config: Any) -> list[int]:
    """The ids at which ``generate`` stops: the model's own, one or several."""
    ids = getattr(generation_config, "eos_token_id", None)
    ids = getattr(model_config, "eos_token_id", None) if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def identity(subject: Subject, chat: ChatFormat, engine: Engine, requested: dict) -> dict:
    """What two runs must share to be one run; ``requested`` is its part from
    :meth:`ia_mech.collect.survey.Survey.identity`."""
    known = {"model": subject.describe(), "engine": engine.name, "chat": chat.describe()}
    return without_folders(json.loads(json.dumps(known)) | requested)


def machine(subject: Subject, threads: int) -> dict:
    """What rounding depends on besides the identity, the threads of a worker among it: a run may go
    on where these differ."""
    on_gpu = subject.device.type == "cuda"
    return {
        **(_gpu(subject.device) if on_gpu else {}),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(subject.device) if on_gpu else platform.processor(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "weights": weights.describe(subject.model),
        "kernels": {name: version_of(name) for name in KERNELS},
        "python": platform.python_version(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
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


def _gpu(device: torch.device) -> dict:
    """What rounding on a GPU depends on besides: its kernels, and how they may add up."""
    matmul = torch.backends.cuda.matmul
    return {
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": torch.version.cuda,
        "sdpa": [
            name
            for name in ("flash", "mem_efficient", "math", "cudnn")
            if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        ],
        "matmul_tf32": matmul.allow_tf32,
        "bf16_reduced_precision_sums": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_sums": matmul.allow_fp16_reduced_precision_reduction,
    }
