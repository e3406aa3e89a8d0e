"""GGUF files: the configuration and the tokenizer that the file itself describes.

``transformers`` drops without a word what its mappings don't name: scaled positions, windows, the
width of a head. Here each key of the architecture and each tensor is passed on, known to change
nothing, or refused by its name, before any weight is read.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import (
    GGUF_CONFIG_ARCHS,
    convert_gguf_tokenizer,
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
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
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
FACTORS = {  # tensors of numbers by which frequencies are divided, as a configuration calls them
    "rope_freqs.weight": ("short_factor", "long_factor"),
    "rope_factors_short.weight": ("short_factor",),
    "rope_factors_long.weight": ("long_factor",),
}
GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}  # their layers
# llama.cpp's pre-tokenizers that transformers doesn't know: GPT-2's expression, and before it, for
# some, each digit by itself.
GPT2 = ("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "a.x-4.0", "mellum", "olmo", "mpt")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
COMPOSED = ("qwen2", "qwen35")  # an accent after its letter is the letter with the accent
# Those whose words that are tokens are no longer cut into merges.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken")


def configuration(file: Path) -> PretrainedConfig:
    """The configuration that a GGUF file describes, whole.

    Raises:
        UserError: the file says something that can't be passed on.
    """
    return _configuration(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # with a large vocabulary transformers reads for 13 s
def _configuration(file: Path, _: int) -> PretrainedConfig:
    metadata, tensors = read_gguf_metadata(str(file))
    architecture = metadata["general.architecture"]
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    if architecture in GGUF_CONFIG_ARCHS:  # these are read whole, but for scaled positions
        done = {key for key in own if not key.startswith("rope.scal")}
    else:
        mappings: dict[str, Any] = GGUF_CONFIG_MAPPING
        known = mappings.get(architecture.replace("-", "_")) or mappings[config.model_type]
        done = {key for key, name in known.items() if name is not None}
    own = {key: own[key] for key in sorted(own) if key not in done - {"rope.freq_base"}}
    rope = {key: own.pop(key) for key in [*own] if key.startswith("rope.")}
    for key, value in own.items():
        _pass_on(config, key, value)
    factors = {}
    if not FACTORS.keys().isdisjoint(tensors):
        found = (one for one in GGUFReader(file).tensors if one.name in FACTORS)
        factors = {name: one.data.tolist() for one in found for name in FACTORS[one.name]}
    if rope or factors:
        _rotate(config, rope, factors)
    for name in ("bos", "eos", "padding"):  # not those that other models of this kind have
        if f"tokenizer.ggml.{name}_token_id" not in metadata:
            setattr(config, f"{name.removesuffix('ding')}_token_id", None)
    if layers := GEMMA_27B.get(config.model_type):  # llama.cpp tells them apart by their layers
        width = config.hidden_size // config.num_attention_heads
        large = config.num_hidden_layers == layers
        config.query_pre_attn_scalar = width if large else config.head_dim
    if architecture not in GGUF_CONFIG_ARCHS:
        _refuse_tensors(config, architecture, tensors)
    return config


def _width(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _pass_on(config: PretrainedConfig, key: str, value: Any) -> None:
    """Set in a configuration what a key says, unless it says so already; or refuse the key."""
    name = MEANT.get(key)
    if name == "head_dim" and value == _width(config):
        return
    if name is not None and hasattr(config, name):
        setattr(config, name, value)
    elif key == "attention.sliding_window" and config.model_type == "phi3":
        config.sliding_window = value or None
    elif key not in SIZES and not (key in HARMLESS and HARMLESS[key] == value):
        raise _refusal(key, value)


def _refusal(key: str, value: Any) -> UserError:
    return UserError(f"the GGUF file says {key} = {str(value)[:40]}, which can't be kept", REMEDY)


def _rotate(config: PretrainedConfig, rope: dict[str, Any], factors: dict[str, Any]) -> None:
    """Set how positions are rotated, as a file's keys and factors say; keys are used up.

    ``transformers`` takes any factors, Llama 3's too, as ``longrope``'s.

    Raises:
        UserError: positions are scaled in a way that isn't known here.
    """
    full = config.rope_parameters.get("full_attention", config.rope_parameters)
    if "rope.freq_base" in rope:
        full["rope_theta"] = rope.pop("rope.freq_base")
    if "rope.freq_base_swa" in rope and "sliding_attention" in config.rope_parameters:
        sliding = config.rope_parameters["sliding_attention"]
        sliding["rope_theta"] = rope.pop("rope.freq_base_swa")
    if "rope.dimension_count" in rope and "partial_rotary_factor" in full:
        full["partial_rotary_factor"] = rope.pop("rope.dimension_count") / _width(config)
    elif rope.get("rope.dimension_count") == _width(config):
        del rope["rope.dimension_count"]
    kind = rope.pop("rope.scaling.type", "linear")  # llama.cpp's default
    factor = rope.pop("rope.scaling.factor", 0) or rope.pop("rope.scale_linear", 0) or 1.0
    length = rope.pop("rope.scaling.original_context_length", config.max_position_embeddings)
    rope.pop("rope.scaling.finetuned", None)  # changes nothing
    if kind == "none":
        kind, factor = "linear", 1.0
    if factors and kind in ("linear", "longrope"):
        scaled = {name: [factor * one for one in each] for name, each in factors.items()}
        full |= {"rope_type": "longrope", "factor": 1.0, **scaled}
        full["attention_factor"] = rope.pop("rope.scaling.attn_factor", 1.0)
        full["original_max_position_embeddings"] = length
        if hasattr(config, "original_max_position_embeddings"):  # Phi-3's stands by itself
            config.original_max_position_embeddings = length
    elif kind == "yarn" and not factors:
        full |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
        for name in ("beta_fast", "beta_slow"):
            if (key := f"rope.scaling.yarn_{name}") in rope:
                full[name] = rope.pop(key)
    elif kind == "linear":
        full |= {"rope_type": kind, "factor": factor} if factor != 1 else {}
    else:
        raise _refusal("rope.scaling.type", kind)
    for key, value in rope.items():
        raise _refusal(key, value)


def _refuse_tensors(config: PretrainedConfig, architecture: str, tensors: tuple[str, ...]) -> None:
    """Raise UserError for tensors that have no place in the model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    placed = {*get_gguf_hf_weights_map(model, processor), *FACTORS, "output.weight"}
    if left := sorted(n for n in tensors if not {n, n.removesuffix(".weight")} & placed):
        raise UserError(
            f"{len(left)} tensors of the GGUF file have no place in the model, such as {left[0]}",
            REMEDY,
        )


def tokenizer(file: Path, needs_template: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes, whatever stands beside the file.

    Raises:
        UserError: how the file cuts text isn't known here; or the file has no chat template, and
            one is needed.
    """
    architecture, described, settings = get_gguf_tokenizer(str(file))
    if needs_template and not settings.get("chat_template"):  # what follows takes a while
        raise UserError(
            f"{file.name} has no chat template",
            "give one (--chat-template, chat_template=), or the file of an instruct model",
        )
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
