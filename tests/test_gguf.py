"""GGUF files: as a user gives one, and as an embedded model is made of one."""

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
from ia_mech.models.load import ModelSpec, load

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


def write_gguf(path: Path) -> Path:
    """The tiny Llama and its tokenizer as one file."""
    tokenizer = families.build("smollm2")
    model = tiny.model("llama", len(tokenizer))
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
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_tokens)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    given, ours = load(ModelSpec(name=str(embedded.gguf_file(tmp_path)))), load(ModelSpec())
    assert given.weights_hash == ours.weights_hash
    ids = torch.tensor([[1, 4093, 198, 1780, 314]])
    assert torch.equal(given.model(ids).logits, ours.model(ids).logits)
