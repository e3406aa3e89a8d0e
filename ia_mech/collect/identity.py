"""What two runs must share to be one, and what else rounding depends on."""

import json
import os
import platform
from dataclasses import asdict

import torch
import transformers

from ia_mech import __version__
from ia_mech.chat.format import ChatFormat
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.preflight import Inputs, kept_positions
from ia_mech.engine import packed_weights
from ia_mech.engine.check import TOKENS
from ia_mech.engine.cuda import fused
from ia_mech.engine.shared_prefix import Engine
from ia_mech.likelihood.scorer import scored_temperatures
from ia_mech.models.load import Subject
from ia_mech.run.integrity import without_folders


def build_chat(config: SampleConfig, tokenizer, eos_ids=()) -> ChatFormat:
    """The chat format that a configuration asks for."""
    return ChatFormat(tokenizer, config.system, config.thinking, config.date, eos_ids)


def probe_ids(chat: ChatFormat) -> list[int]:
    """``TOKENS`` ids of a short conversation, with which the engine is checked at start-up."""
    messages = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "Blue."},
    ]
    return (chat.context(messages).ids * TOKENS)[:TOKENS]


def eos_ids(generation_config, model_config) -> list[int]:
    """The ids at which ``generate`` stops: the model's own, one or several."""
    ids = getattr(generation_config, "eos_token_id", None)
    ids = getattr(model_config, "eos_token_id", None) if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def identity(
    config: SampleConfig,
    subject: Subject,
    chat: ChatFormat,
    snapshot: dict,
    engine: Engine,
    inputs: Inputs,
) -> dict:
    """What two runs must share to be one run."""
    model = {"model": subject.describe(), "engine": engine.name, "chat": chat.describe()}
    known = json.loads(json.dumps(model)) | identity_asked_for(config, chat, snapshot, inputs)
    return without_folders(known)


def identity_asked_for(
    config: SampleConfig, chat: ChatFormat, snapshot: dict, inputs: Inputs
) -> dict:
    """That part of the identity which is known before the model's weights are."""
    own, vector = inputs.own, inputs.vector
    known = json.loads(
        json.dumps(
            {
                "config": asdict(config),
                "positions": kept_positions(config, chat),
                "score_temperatures": scored_temperatures(config.grid.temperatures),
                "conversations": snapshot,
                "candidates": None if own is None else own.sha256,
                "intervention": None if vector is None else vector.sha256,
                "software": {
                    "ia_mech": __version__,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                },
            }
        )
    )
    return without_folders(known)


def machine(subject: Subject) -> dict:
    """What rounding depends on besides the identity: a run may go on where these differ."""
    on_gpu = subject.device.type == "cuda"
    return {
        **(_gpu(subject.device) if on_gpu else {}),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(subject.device) if on_gpu else platform.processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "weights": packed_weights.describe(subject.model),
        "python": platform.python_version(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
    }


def differences(before: dict, now: dict) -> str:
    """What a session's record has otherwise than :func:`machine` has it now; empty if nothing.

    What the record lacks, since an older version wrote it, counts as no difference.
    """
    return ", ".join(
        f"{name} {before[name]} → {value}"
        for name, value in now.items()
        if before.get(name, value) != value
    )


def _gpu(device: torch.device) -> dict:
    """What rounding on a GPU depends on besides: its kernels, and how they may add up."""
    matmul = torch.backends.cuda.matmul
    return {
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": torch.version.cuda,
        "matmul_tf32": matmul.allow_tf32,
        "bf16_reduced_precision_sums": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_sums": matmul.allow_fp16_reduced_precision_reduction,
        "kernels": "triton" if fused.available(device) else "torch",
    }
