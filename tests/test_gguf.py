"""GGUF files: as a user gives one, and as an embedded model is made of one."""

import functools
import json
import random
from pathlib import Path

import families
import gguf
import numpy as np
import pytest
import tiny
import torch

from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.models.gguf import configuration
from ia_mech.models.gguf import tokenizer as read_tokenizer
from ia_mech.models.load import ModelSpec, load, load_files

PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@pytest.fixture(autouse=True)
def names_are_made_once(monkeypatch):
    """transformers makes the table of a file's tensor names anew for each module of a model."""
    once = functools.cache(gguf.get_tensor_name_map)
    monkeypatch.setattr(gguf, "get_tensor_name_map", once)


def write_gguf(path: Path, keys=None, tensors=None, model=None, pre="smollm") -> Path:
    """A tiny Llama and its tokenizer as one file, with further keys and tensors."""
    tokenizer = families.build("smollm2")
    model = model or tiny.model("llama", len(tokenizer))
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokenizer))
    add(writer, keys, tensors)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_tokens)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        if name not in WHOLE:
            _, _, block, part = name.removesuffix(".weight").split(".", 3)
        called = WHOLE.get(name) or f"blk.{block}.{PARTS[part]}.weight"
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # the file pairs dimensions that rotate together
            heads = len(values) // config.head_dim
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = np.ascontiguousarray(values).reshape(tensor.shape)
        writer.add_tensor(called, values)
    return close(writer)


def write_keys(path: Path, architecture: str, keys: dict, tensors=None) -> Path:
    """A file with a configuration, and with a tokenizer of pieces that begin with a space."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "block_count": 2,
        "context_length": 8192,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    add(writer, {f"{architecture}.{key}": value for key, value in sizes.items()} | keys, tensors)
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "▁b"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 3 + [-float(i) for i in range(len(pieces) - 3)])
    writer.add_token_types([2, 3, 3] + [1] * (len(pieces) - 3))
    return close(writer)


def add(writer, keys, tensors) -> None:
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))


def close(writer) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.path if isinstance(writer.path, Path) else Path(writer.path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf")


def test_a_file_loads_as_the_model_that_it_was_written_from(whole):
    given = load(ModelSpec(name=str(whole), device="cpu")).model
    own = tiny.model("llama", given.config.vocab_size)
    ids = torch.tensor([tiny.prompt(9, seed=0)])
    torch.testing.assert_close(given(ids).logits, own(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_conversion_keeps_every_bit_and_the_pre_tokenizer(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "SHARD", 10_000)
    embedded._convert(whole, tmp_path / "made", "tiny")
    made = load(ModelSpec(name=str(tmp_path / "made"), device="cpu"))
    given = load(ModelSpec(name=str(whole), device="cpu"))
    assert made.weights_hash == given.weights_hash
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 5
    assert made.model.config.eos_token_id == given.model.config.eos_token_id
    assert made.tokenizer.chat_template == given.tokenizer.chat_template
    assert made.tokenizer.get_vocab() == given.tokenizer.get_vocab()
    for one in (made, given):  # digits are split off first
        assert one.tokenizer.tokenize("in  20")[-3:] == ["ĠĠ", "2", "0"]
    assert not hasattr(made.model.config, "quantization_config")


SCALE = "llama.rope.scaling."
YARN = {"factor": 2.0, "original_max_position_embeddings": 2048, "beta_fast": 16.0}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("rope", "keys", "tensors"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {f"{SCALE}type": "linear", f"{SCALE}factor": 4.0},
            {},
        ),
        ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scale_linear": 4.0}, {}),
        (
            {"rope_type": "yarn", **YARN},
            {
                f"{SCALE}type": "yarn",
                f"{SCALE}factor": 2.0,
                f"{SCALE}original_context_length": 2048,
                f"{SCALE}finetuned": True,
                f"{SCALE}yarn_beta_fast": 16.0,
            },
            {},
        ),
        ({"rope_type": "llama3", **LLAMA3}, {}, {"rope_freqs.weight": None}),
        (
            {"rope_type": "longrope", "short_factor": [2, 4, 8, 16], "long_factor": [2, 4, 8, 16]}
            | {"factor": 1.0},
            {f"{SCALE}factor": 2.0},
            {"rope_freqs.weight": [1, 2, 4, 8]},
        ),
    ],
    ids=["linear", "old key", "yarn", "llama3", "factors"],
)
def test_scaled_positions_are_those_of_the_file(rope, keys, tensors, tmp_path):
    rope["rope_theta"] = theta = 500_000.0
    if rope["rope_type"] == "llama3":  # as the scaling's definition has them, at each frequency
        waves = [2 * np.pi * theta ** (i / 4) for i in range(4)]
        shares = [min(max((8192 / wave - 1) / 3, 0), 1) for wave in waves]
        tensors = {"rope_freqs.weight": [1 / ((1 - s) / 8 + s) for s in shares]}
    own = tiny.fresh("llama", rope_parameters=rope, vocab_size=len(families.build("smollm2")))
    keys = keys | {"llama.rope.freq_base": theta}
    file = write_gguf(tmp_path / "scaled.gguf", keys, tensors, own)
    ids = torch.tensor([tiny.prompt(200, seed=0)])
    given = load(ModelSpec(name=str(file), device="cpu")).model
    mine, rotary = given.model.rotary_emb, own.model.rotary_emb
    # A frequency takes a power, a product and a quotient; far along the text that changes logits.
    rounding = 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(mine.inv_freq, rotary.inv_freq, atol=0, rtol=rounding)
    rotary.inv_freq = mine.inv_freq
    torch.testing.assert_close(given(ids).logits, own(ids).logits, atol=1e-5, rtol=1e-5)


def test_what_gemma_3_and_phi_3_say_by_metadata_alone_is_kept(tmp_path):
    keys = {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 1024,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "block_count": 62,
        "embedding_length": 42,
    }
    keys = {f"gemma3.{key}": value for key, value in keys.items()}
    gemma = configuration(write_keys(tmp_path / "gemma.gguf", "gemma3", keys))
    assert gemma.rope_parameters["full_attention"] == {
        "rope_type": "linear",
        "rope_theta": 1e6,
        "factor": 8.0,
    }
    assert gemma.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert gemma.query_pre_attn_scalar == 21  # 42 / 2: the largest scales by this, not by its heads
    keys = {
        "rope.dimension_count": 12,  # of 16
        "attention.sliding_window": 2047,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.attn_factor": 1.19,
    }
    factors = {
        f"rope_factors_{n}.weight": [1.0, 1.5, 2.0, 2, 2, x] for n, x in (("long", 4), ("short", 3))
    }
    keys = {f"phi3.{key}": value for key, value in keys.items()}
    phi = configuration(write_keys(tmp_path / "phi.gguf", "phi3", keys, factors))
    assert phi.sliding_window == 2047
    rope = phi.rope_parameters
    assert rope["rope_type"] == "longrope" and rope["partial_rotary_factor"] == 0.75
    assert rope["long_factor"][-1] == 4 and rope["short_factor"][-1] == 3
    assert rope["original_max_position_embeddings"] == 4096
    assert rope["attention_factor"] == pytest.approx(1.19)


@pytest.mark.parametrize(
    ("keys", "tensors", "pre", "words"),
    [
        ({"llama.logit_scale": 0.5}, {}, "smollm", "llama.logit_scale|logit_scale = 0.5"),
        ({f"{SCALE}type": "longrope"}, {}, "smollm", "rope.scaling.type = longrope"),
        ({f"{SCALE}attn_factor": 1.2}, {}, "smollm", "rope.scaling.attn_factor = 1.2"),
        (
            {f"{SCALE}type": "yarn", f"{SCALE}yarn_log_multiplier": 0.1},
            {},
            "smollm",
            "yarn_log_mul",
        ),
        (
            {f"{SCALE}type": "yarn"},
            {"rope_freqs.weight": [1, 2, 3, 8]},
            "smollm",
            "rope.scaling.type = yarn",
        ),
        (
            {},
            {"blk.0.attn_sinks.weight": [1, 2, 3, 4]},
            "smollm",
            "such as blk.0.attn_sinks.weight",
        ),
        ({}, {}, "deepseek-coder", "tokenizer.ggml.pre = deepseek-coder"),
    ],
)
def test_what_can_not_be_kept_is_refused_by_name(keys, tensors, pre, words, tmp_path, capsys):
    file = write_gguf(tmp_path / "one.gguf", keys, tensors, pre=pre)
    with pytest.raises(UserError, match=words) as refused:
        load_files(ModelSpec(name=str(file), device="cpu"))
    assert "\n" not in str(refused.value)


def test_a_tokenizer_beside_the_file_is_not_the_files(tmp_path):
    file = write_gguf(tmp_path / "whole.gguf")
    alone = load_files(ModelSpec(name=str(file))).tokenizer
    other = families.build("qwen3")
    other.save_pretrained(tmp_path)
    beside = load_files(ModelSpec(name=str(file))).tokenizer
    assert beside.chat_template == alone.chat_template != other.chat_template
    assert beside("in  20 words").input_ids == alone("in  20 words").input_ids


def test_a_file_without_a_chat_template_is_refused_before_anything_slow(tmp_path, monkeypatch):
    file = write_keys(tmp_path / "pieces.gguf", "llama", {})
    with monkeypatch.context() as patch:
        patch.setattr("ia_mech.models.gguf.convert_gguf_tokenizer", None)
        patch.setattr("ia_mech.models.gguf.configuration", None)
        with pytest.raises(UserError, match=r"has no chat template; give one \(--chat-template"):
            load_files(ModelSpec(name=str(file)), needs_template=True)
    assert load_files(ModelSpec(name=str(file))).tokenizer.chat_template is None


@pytest.mark.parametrize(("prefixed", "pieces"), [(True, ["▁a"]), (False, ["a"])])
def test_a_space_is_prefixed_where_the_file_says_so(prefixed, pieces, tmp_path):
    keys = {"tokenizer.ggml.add_space_prefix": prefixed}
    given = read_tokenizer(write_keys(tmp_path / "pieces.gguf", "llama", keys))
    assert given.tokenize("a") == pieces and given.decode(given("a b").input_ids) == "a b"


def damages(content: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "another kind": b"PK\3\4" + content,
        "not UTF-8": content[:30] + b"\xff" * 50 + content[80:],
        "noise": b"GGUF" + random.Random(0).randbytes(1000),
        **{f"{n} bytes": content[:n] for n in (5, 200, 9000, len(content) // 2)},
        "short by one tensor": content[:-4000],
    }


def test_a_damaged_file_is_one_line(whole, tmp_path):
    path = tmp_path / "damaged.gguf"
    for damage, content in damages(whole.read_bytes()).items():
        path.write_bytes(content)
        with pytest.raises(UserError) as refused:
            load(ModelSpec(name=str(path), device="cpu"))
        said = str(refused.value)
        assert said.startswith(f"model '{path}' could not be loaded (") and "\n" not in said, damage


@pytest.mark.slow
def test_the_default_models_file_loads_as_the_same_weights(tmp_path):
    given, ours = load(ModelSpec(name=str(embedded.downloaded(tmp_path)))), load(ModelSpec())
    assert given.weights_hash == ours.weights_hash
    ids = torch.tensor([[1, 4093, 198, 1780, 314]])
    assert torch.equal(given.model(ids).logits, ours.model(ids).logits)
