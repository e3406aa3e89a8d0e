"""GGUF files: the configuration and the tokenizer that the file itself describes.

``transformers`` reads what its mappings name and drops the rest without a word: scaled positions,
windows, the width of a head. Here each key of the architecture and each tensor is passed on, known
to change nothing, or refused by its name, before any weight is read.
"""

import copy
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import (
    GGUF_CONFIG_ARCHS,
    convert_gguf_tokenizer,
    get_gguf_config,
    get_gguf_tokenizer,
    read_gguf_metadata,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from ia_mech.errors import UserError

REMEDY = "give the model's folder or hub id instead of the GGUF file"
# What transformers' mappings leave out, as a configuration calls it.
MEANT = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "use_parallel_residual": "use_parallel_residual",
    "vocab_size": "vocab_size",
}
HARMLESS = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "tensor_data_layout": "Meta AI original pth",
}
SIZES = ("context_length", "feed_forward_length")  # a wrong one shows in the tensors, or in nothing
ROTATION = ("rope.freq_base", "rope.freq_base_swa", "rope.scale_linear")
SCALES = "rope.scaling."
# Keys of a kind of scaled positions, besides its factor and the length it was trained with.
SCALING: dict[str, dict[str, str]] = {
    "linear": {},
    "yarn": {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"},
    "longrope": {"attn_factor": "attention_factor"},
}
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# llama.cpp's pre-tokenizers that transformers doesn't know: GPT-2's expression, and before it, for
# some, each digit by itself.
GPT2 = ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "a.x-4.0", "mellum", "olmo", "mpt")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
COMPOSED = ("qwen2", "qwen35")  # an accent after its letter is the letter with the accent
# Those whose words that are tokens are no longer cut into merges.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken")


class _Read(dict):
    """A dictionary that remembers what was asked for."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


def refuse_without_template(file: Path) -> None:
    """Raise UserError for a file without a chat template, before anything slow is made of it."""
    if "tokenizer.chat_template" not in read_gguf_metadata(str(file))[0]:
        raise UserError(
            f"{file.name} has no chat template",
            "give one (--chat-template, chat_template=), or the file of an instruct model",
        )


def configuration(file: Path) -> PretrainedConfig:
    """The configuration that a GGUF file describes, whole.

    Raises:
        UserError: the file says something that can't be passed on.
    """
    return copy.deepcopy(_configuration(file, file.stat().st_mtime_ns))


@functools.lru_cache(maxsize=1)  # with a large vocabulary transformers reads for 13 s
def _configuration(file: Path, _: int) -> PretrainedConfig:
    metadata, tensors = read_gguf_metadata(str(file))
    architecture = metadata["general.architecture"]
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if architecture in GGUF_CONFIG_ARCHS:
        read = _Read(metadata)
        get_gguf_config(read, tensors)
        done = {key.removeprefix(prefix) for key in read.keys_read}
    else:
        mappings: dict[str, Any] = GGUF_CONFIG_MAPPING
        known = mappings.get(architecture.replace("-", "_")) or mappings[config.model_type]
        done = {key for key, name in known.items() if name is not None}
    for key in sorted(own.keys() - done - {*ROTATION}):
        if not key.startswith(SCALES):
            _pass_on(config, key, own[key])
    _scale(config, own, _factors(file, tensors))
    for name in ("bos", "eos", "padding"):  # not those that other models of this kind have
        if f"tokenizer.ggml.{name}_token_id" not in metadata:
            setattr(config, f"{name.removesuffix('ding')}_token_id", None)
    if config.model_type in ("gemma2", "gemma3_text"):  # as llama.cpp tells the 27B models
        large = config.num_hidden_layers == {"gemma2": 46, "gemma3_text": 62}[config.model_type]
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if large else config.head_dim
    if architecture not in GGUF_CONFIG_ARCHS:
        _refuse_tensors(config, architecture, {*tensors} - {*FACTORS})
    return config


def _pass_on(config: PretrainedConfig, key: str, value: Any) -> None:
    """Set in a configuration what a key says, unless it says so already; or refuse the key."""
    width = getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    name = MEANT.get(key)
    if name == "head_dim" and value == width:
        return
    if name is not None and hasattr(config, name):
        setattr(config, name, value)
    elif key == "rope.dimension_count":
        rotation = _rotation(config)
        if value != int(width * rotation.get("partial_rotary_factor", 1.0)):
            if "partial_rotary_factor" not in rotation:
                raise _refusal(key, value)
            rotation["partial_rotary_factor"] = value / width
    elif key == "attention.sliding_window" and config.model_type == "phi3":
        config.sliding_window = value or None
    elif not (key in SIZES or (key in HARMLESS and HARMLESS[key] == value)):
        raise _refusal(key, value)


def _refusal(key: str, value: Any) -> UserError:
    return UserError(f"the GGUF file says {key} = {str(value)[:40]}, which can't be kept", REMEDY)


def _rotation(config: PretrainedConfig) -> dict[str, Any]:
    """How a configuration rotates positions; in layers without a window, where they differ."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def _factors(file: Path, tensors: tuple[str, ...]) -> dict[str, list[float]]:
    """By how much a file divides each frequency, by the name of the tensor that says so."""
    if not {*tensors} & {*FACTORS}:
        return {}
    found = {one.name: one for one in GGUFReader(file).tensors if one.name in FACTORS}
    return {name: one.data.astype(np.float64).tolist() for name, one in found.items()}


def _scale(config: PretrainedConfig, own: dict[str, Any], factors: dict[str, list[float]]) -> None:
    """Set how positions are scaled.

    Raises:
        UserError: they are scaled in a way that isn't known here.
    """
    if "rope.freq_base" in own:
        _rotation(config)["rope_theta"] = own["rope.freq_base"]
    if "rope.freq_base_swa" in own:
        if "sliding_attention" not in config.rope_parameters:
            raise _refusal("rope.freq_base_swa", own["rope.freq_base_swa"])
        config.rope_parameters["sliding_attention"]["rope_theta"] = own["rope.freq_base_swa"]
    kind = own.get("rope.scaling.type", "linear")  # llama.cpp's default
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0
    length = own.get("rope.scaling.original_context_length", config.max_position_embeddings)
    if FACTORS[0] in factors:
        kind, made = "llama3", _of_frequencies(config, factors[FACTORS[0]])
    elif factors:
        made = {"short_factor": factors.get(FACTORS[1]), "long_factor": factors.get(FACTORS[2])}
        kind, made = "longrope", {**made, "original_max_position_embeddings": length}
        if hasattr(config, "original_max_position_embeddings"):  # Phi-3's stands by itself
            config.original_max_position_embeddings = length
    elif kind == "yarn":
        made = {"factor": factor, "original_max_position_embeddings": length}
    elif kind == "linear":
        made = {"factor": factor}
    elif kind == "none":
        return
    else:
        raise _refusal("rope.scaling.type", kind)
    names = SCALING.get(kind, {})
    plain = ("type", "factor", "original_context_length", "finetuned")
    for key in (key for key in own if key.startswith(SCALES)):
        short = key.removeprefix(SCALES)
        if short in names:
            made[names[short]] = own[key]
        elif short not in plain:
            raise _refusal(key, own[key])
    if (kind, factor) != ("linear", 1):
        _rotation(config).update({"rope_type": kind, **made})


def _of_frequencies(config: PretrainedConfig, factors: list[float]) -> dict[str, Any]:
    """Llama 3's scaling, of the factors that a file has in its place.

    Raises:
        UserError: these factors follow from no such scaling.
    """
    theta, count = _rotation(config)["rope_theta"], len(factors)
    largest, length = max(factors), 8192  # the only length that Llama 3 was trained with
    for factor, index in zip(factors, range(count), strict=True):
        turns = length / (2 * math.pi * theta ** (index / count))
        share = min(max((turns - 1) / 3, 0), 1)
        if not math.isclose(factor, 1 / ((1 - share) / largest + share), rel_tol=1e-4):
            raise _refusal(FACTORS[0], [round(one, 3) for one in factors])
    return {
        "factor": largest,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }


def _refuse_tensors(config: PretrainedConfig, architecture: str, tensors: set[str]) -> None:
    """Raise for tensors that have no place in the model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    placed = get_gguf_hf_weights_map(model, processor)
    left = sorted(n for n in tensors if not {n, n.removesuffix(".weight")} & placed.keys())
    if left := [name for name in left if name != "output.weight"]:
        raise UserError(
            f"{len(left)} tensors of the GGUF file have no place in the model, such as {left[0]}",
            REMEDY,
        )


def tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes, whatever stands beside the file.

    Raises:
        UserError: how the file cuts text isn't known here.
    """
    architecture, described, settings = get_gguf_tokenizer(str(file))
    backend, _ = convert_gguf_tokenizer(architecture, described)
    if described["tokenizer_type"] == "gpt2":
        kind = described.get("pre_tokenizer_type")
        if kind in DIGITS or kind in GPT2:
            digits = [pre_tokenizers.Digits(individual_digits=True)] if kind in DIGITS else []
            words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
        elif kind not in GGUF_PRE_TOKENIZER_SPLITS:
            raise UserError(
                f"how the GGUF file cuts text isn't known here (tokenizer.ggml.pre = {kind})",
                REMEDY,
            )
        backend.model.ignore_merges = kind in WHOLE_WORDS
        if kind in COMPOSED:
            backend.normalizer = normalizers.NFC()
    elif described.get("add_prefix_space") is False and not architecture.startswith("gemma"):
        backend.normalizer = None  # Phi-3's would write the space
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    made.name_or_path = str(file)  # given above, transformers would ask a hub for it
    return made
