"""Tiny random models of every architecture that the engine is tested on.

Their weights are drawn larger than a fresh initialisation's, so that attention isn't uniform, an
error in a mask or a position shows, and greedy decoding doesn't settle on one token. Nothing about
interaction awareness can be read off them.
"""

import copy
import functools

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma4 import Gemma4Config, Gemma4TextConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from ia_mech.engine.installed import install
from ia_mech.models.load import ModelSpec, Subject, weights_hash

VOCAB = 97
EOS = 2

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SLIDING = {"sliding_window": 8}
_HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    # Its own chunked and step-by-step forms drift apart as weights grow: the same turn scored
    # both ways differs by 3e-5 nats at 0.25, by 1e-6 at 0.1.
    "initializer_range": 0.1,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}

_CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, _SLIDING),
    "qwen3": (transformers.Qwen3Config, {}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"num_experts": 4, **_MOE}),
    "qwen3_5": (Qwen3_5TextConfig, _HYBRID),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
    ),
    "glm4": (transformers.Glm4Config, {}),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_MOE},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], **_SLIDING},
    ),
    # Heads of full attention are fewer and wider, the last two layers read the keys and values of
    # the two before them, and each layer has an embedding of its own.
    "gemma4": (
        Gemma4TextConfig,
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 16,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 4096,
            **_SLIDING,
        },
    ),
}

_VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4},
    **{"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14},
}
_PATCHES = {
    **{"depth": 4, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16},
    **{"num_heads": 2, "patch_size": 14},
}
_THREE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
_LATENT = {
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, **_MOE},
}
_PROJECTED = {"vision_output_dim": 16, "projector_output_dim": 16, "projector_input_dim": 16}
# Models that read images, too: sizes, and those of vision and text, with as many layers in both.
_WRAPPERS = {
    "gemma3": (transformers.Gemma3Config, {"mm_tokens_per_image": 1}, _VISION, {}),
    "gemma4": (Gemma4Config, {}, _VISION, _CONFIGS["gemma4"][1]),
    "llama4": (
        transformers.Llama4Config,
        {},
        _VISION | _PROJECTED,
        {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
    ),
    "mistral3": (
        transformers.Mistral3Config,
        {},
        _VISION | {"model_type": "pixtral"},
        {"model_type": "mistral", **_SLIDING},
    ),
    "mistral4": (
        transformers.Mistral3Config,
        {},
        _VISION | {"model_type": "pixtral"},
        {"model_type": "mistral4", **_LATENT},
    ),
    "qwen2vl": (
        transformers.Qwen2VLConfig,
        {},
        {"depth": 4, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14},
        _THREE,
    ),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, {}, _PATCHES, _THREE),
    "qwen3vl": (
        transformers.Qwen3VLConfig,
        {},
        _PATCHES | {"deepstack_visual_indexes": [0]},
        _THREE,
    ),
    "glm4v": (transformers.Glm4vConfig, {}, _PATCHES | {"image_size": 28}, _THREE),
}

ARCHITECTURES, WRAPPERS = tuple(_CONFIGS), tuple(_WRAPPERS)
# One each of full attention, sliding windows with sinks, recurrent layers, and local with global.
FAMILIES = ("llama", "gpt_oss", "qwen3_5", "gemma3")


@functools.cache
def model(architecture: str, vocab: int = VOCAB) -> PreTrainedModel:
    """A random model in float32 on the CPU, installed; the same at every call."""
    made = fresh(architecture, vocab_size=vocab)
    install(made)
    return made


def fresh(architecture: str, **sizes) -> PreTrainedModel:
    """The same model as another object, not installed, or one of other sizes."""
    kind, changes = _CONFIGS[architecture]
    torch.manual_seed(0)
    # gpt-oss has attention sinks, which the sdpa path doesn't know.
    attention = "eager" if architecture == "gpt_oss" else "sdpa"
    config = kind(**{**_SIZES, **changes, **sizes})
    made = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    return made.eval().requires_grad_(False)


def blank(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that adds nothing to a token's embedding, all of whose weights are 0, but for norms
    that only scale: to plant something in."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
        for module in made.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.weight.fill_(1.0)
    return made


def wrapper(architecture: str, vocab: int = VOCAB) -> PreTrainedModel:
    """A random model that reads images, too."""
    kind, sizes, vision, changes = _WRAPPERS[architecture]
    torch.manual_seed(0)
    config = kind(
        text_config=_SIZES | {"vocab_size": vocab} | changes, vision_config=vision, **sizes
    )
    made = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return made.eval().requires_grad_(False)


def subject(architecture: str, tokenizer) -> Subject:
    """A random model that goes with a tokenizer, as the main job wants it."""
    made = model(architecture, len(tokenizer))
    return Subject(ModelSpec(name=f"tiny-{architecture}"), made, tokenizer, weights_hash(made))


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
