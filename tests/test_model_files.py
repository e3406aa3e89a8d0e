"""Damaged models: every file of a folder, GGUF files, the embedded model's folder and lenses.

Allowed is a model that is whole (the damaged file isn't needed), or one line that names the file or
the model.
"""

import json
import random
import shutil
from pathlib import Path

import families
import gguf
import pytest
import tiny
import torch
from shell import call, refusal

from ia_mech.chat.format import ChatFormat
from ia_mech.collect import command
from ia_mech.errors import UserError
from ia_mech.lens import Lens, lens_file
from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, load

JSON = {
    "a list": b"[]",
    "an object of nothing": b"{}",
    "a number": b"3",
    "null": b"null",
    "a text": b'"x"',
    "deep": b"[" * 200_000,
    "NaN": b"NaN",
    "half a pair": b'{"a": "\\ud800"}',
}
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors",
    "chat_template.jinja",
)
# What decides nothing here: the other files say the same, or defaults do.
SPARE = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


def damages(name: str, content: bytes, flips: int) -> dict[str, bytes | None]:
    """What stands in a file's place, by the name of the damage; None for a folder."""
    rng = random.Random(name)
    found: dict[str, bytes | None] = {
        "a folder": None,
        "empty": b"",
        "half": content[: len(content) // 2],
        "UTF-16": b"\xff\xfe" + content[:50],
    }
    for _ in range(flips):
        flipped = bytearray(content)
        flipped[rng.randrange(min(len(content), 300))] ^= 1 << rng.randrange(8)
        found[f"flipped {len(found)}"] = bytes(flipped)
    if name.endswith(".json"):
        found |= JSON
    if name.endswith(".safetensors"):
        found |= {"a long header": b"\xff" * 8 + content[8:], "a zip": b"PK\3\4" + content}
    return found


@pytest.fixture
def checkpoint(tiny_model_dir, tmp_path) -> Path:
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "checkpoint"))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


def outcome(path: Path) -> str:
    """``whole``, or the one line of a refusal that names the file's folder."""
    try:
        subject = load(ModelSpec(name=str(path), device="cpu"))
        ChatFormat(subject.tokenizer)
    except UserError as refused:
        said = str(refused)
        assert len(said.splitlines()) == 1 and "; " in said and len(said) < 500, said
        assert str(path) in said, said
        return said
    return subject.weights_hash


def tried(checkpoint: Path, whole: str, flips: int) -> dict[str, str]:
    """The outcome of every damage to every file."""
    found = {}
    for name in FILES:
        file = checkpoint / name
        content = file.read_bytes()
        for damage, there in damages(name, content, flips).items():
            file.unlink()
            if there is None:
                file.mkdir()
            else:
                file.write_bytes(there)
            found[f"{name}: {damage}"] = outcome(checkpoint)
            shutil.rmtree(file) if there is None else file.unlink()
            file.write_bytes(content)
        file.unlink()
        found[f"{name}: deleted"] = outcome(checkpoint)
        file.write_bytes(content)
    assert outcome(checkpoint) == whole
    return found


def check(found: dict[str, str], whole: str) -> None:
    read = [damage for damage, said in found.items() if said == whole]
    for damage in read:
        name, _, kind = damage.partition(": ")
        spared = name in SPARE and kind in ("deleted", "an object of nothing", "half a pair")
        assert spared or "flipped" in damage, damage
    for damage, said in found.items():
        name, _, kind = damage.partition(": ")
        if said != whole and kind in ("a folder", "empty", "half", "UTF-16", "deep", "a number"):
            missing = (name, kind) in (
                ("config.json", "a folder"),
                ("chat_template.jinja", "empty"),
            )
            assert name in said or missing or "refuses the roles" in said, (damage, said)


def test_every_damaged_file_of_a_folder_is_named(checkpoint, tiny_subject, capfd):
    found = tried(checkpoint, tiny_subject.weights_hash, 1)
    check(found, tiny_subject.weights_hash)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_many_flipped_bits(checkpoint, tiny_subject):
    found = tried(checkpoint, tiny_subject.weights_hash, 60)
    check(found, tiny_subject.weights_hash)


def test_damage_that_nothing_shows_is_another_model(checkpoint, tiny_subject):
    """A bit of a weight: the hash that the run records tells the two apart."""
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert outcome(checkpoint) != tiny_subject.weights_hash


# -- from the command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("chat_template.jinja", "{{ 'x' * 10000000000 }}", "makes more than"),
        ("chat_template.jinja", "{% for _ in [1] %}", "refuses the roles"),
        ("generation_config.json", "{", "generation_config.json is damaged"),
    ],
)
def test_the_main_job_refuses_in_one_line(checkpoint, tmp_path, capfd, file, content, said):
    (checkpoint / file).write_text(content)
    words = ["--model", str(checkpoint), "--limit", "2", "--out", str(tmp_path / "run")]
    line = refusal(call(command.main, words, capfd))
    assert said in line and str(checkpoint) in line
    assert not (tmp_path / "run").exists()


CODE = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
"""


@pytest.mark.parametrize("kind", ["auto_map", "pickle", "tokenizer"])
def test_no_code_of_a_model_is_run(checkpoint, kind):
    """``auto_map`` names code in the folder; a pickle could hold any."""
    ran = checkpoint / "ran"
    if kind == "pickle":

        class Evil:
            def __reduce__(self):
                return (Path.touch, (ran,))

        (checkpoint / "model.safetensors").unlink()
        torch.save({"lm_head.weight": Evil()}, checkpoint / "pytorch_model.bin")
    else:
        (checkpoint / "code.py").write_text(CODE)
        name = "config.json" if kind == "auto_map" else "tokenizer_config.json"
        settings = json.loads((checkpoint / name).read_text())
        settings["auto_map"] = {
            "AutoConfig": "code.Config",
            "AutoModelForCausalLM": "code.Model",
            "AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"],
        }
        settings |= {"model_type": "unheard-of"} if kind == "auto_map" else {}
        (checkpoint / name).write_text(json.dumps(settings))
    said = outcome(checkpoint)
    assert not ran.exists()
    assert str(checkpoint) in said or kind == "tokenizer"


# -- GGUF -----------------------------------------------------------------------------------------

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
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        if name not in WHOLE:
            _, _, block, part = name.removesuffix(".weight").split(".", 3)
        called = WHOLE.get(name) or f"blk.{block}.{PARTS[part]}.weight"
        writer.add_tensor(called, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def damaged_ggufs(content: bytes, flips: int) -> dict[str, bytes]:
    rng = random.Random(0)
    found = {
        "empty": b"",
        "another kind": b"PK\3\4" + content,
        "not UTF-8": content[:30] + b"\xff" * 50 + content[80:],
        "noise": b"GGUF" + rng.randbytes(1000),
        **{f"{n} bytes": content[:n] for n in (5, 200, 9000, len(content) // 2)},
        "short by one tensor": content[:-4000],
    }
    for _ in range(flips):
        flipped = bytearray(content)
        at = rng.randrange(3000)  # the settings, and the first tokens
        flipped[at] ^= 1 << rng.randrange(8)
        found[f"flipped at {at}"] = bytes(flipped)
    return found


@pytest.mark.parametrize("flips", [0, pytest.param(100, marks=pytest.mark.slow)])
def test_a_damaged_gguf_file_is_named(tmp_path, flips):
    whole = write_gguf(tmp_path / "whole.gguf")
    own = outcome(whole)
    assert len(own) == 16
    path = tmp_path / "damaged.gguf"
    for damage, content in damaged_ggufs(whole.read_bytes(), flips).items():
        path.write_bytes(content)
        said = outcome(path)
        assert "flipped" in damage or said.startswith(
            f"model '{path}' could not be loaded (damaged.gguf is damaged or of an unknown kind: "
        ), (damage, said)


# -- what is kept beside the models ----------------------------------------------------------------


@pytest.fixture
def kept(tmp_path, monkeypatch, checkpoint) -> Path:
    """The folder of an embedded model as the conversion leaves it."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))

    def convert(gguf_file: Path, folder: Path) -> None:
        shutil.copytree(checkpoint, folder)

    monkeypatch.setattr(embedded, "_convert", convert)
    monkeypatch.setattr(embedded, "gguf_file", lambda folder: folder / "none")
    return embedded.directory()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "chat_template.jinja"])
@pytest.mark.parametrize("damage", ["flipped", "half", "deleted", "folder"])
def test_a_damaged_file_of_the_embedded_model_is_noticed(kept, file, damage):
    assert embedded.directory() == kept
    path = kept / file
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "folder":
        path.mkdir()
    embedded._verify.cache_clear()  # as in another process
    for _ in range(2):
        with pytest.raises(UserError) as refused:
            load(ModelSpec(device="cpu"))
        said = str(refused.value)
        assert said.startswith(f"the embedded model in {kept} is damaged: ") and file in said
        assert said.endswith(f"; remove {kept}, so that the next command makes it again")
    shutil.rmtree(kept)
    assert embedded.directory() == kept


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"config.json": 3}', b"\xff"])
def test_a_damaged_record_of_the_embedded_model_is_noticed(kept, content):
    (kept / "written.json").write_bytes(content)
    embedded._verify.cache_clear()
    with pytest.raises(UserError, match=r"the embedded model in .* is damaged: .*; remove"):
        embedded.directory()


def test_a_folder_without_a_record_is_taken_as_it_is(kept):
    (kept / "written.json").unlink()
    embedded._verify.cache_clear()
    assert embedded.directory() == kept


@pytest.mark.parametrize("damage", ["flipped", "half", "empty", "another", "wrong"])
def test_a_damaged_lens_is_noticed(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    generator = torch.Generator().manual_seed(0)
    norm, unembedding = torch.ones(4), torch.randn(8, 4, generator=generator)
    lens = Lens(norm, torch.zeros(4), unembedding, 1e-5, False, 1.0, None)
    file = lens.save("0123456789abcdef")
    assert torch.equal(Lens.load("0123456789abcdef").unembedding, unembedding)
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[-1] ^= 1
    elif damage == "half":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = b""
    elif damage == "wrong":
        content = content.replace(b"scale", b"scald")
    else:
        content = content.replace(b"norm_bias", b"norm_bios")
    file.write_bytes(content)
    assert file == lens_file("0123456789abcdef")
    with pytest.raises(
        UserError, match=r"lens.safetensors is damaged \(.*\); remove it and sample"
    ):
        Lens.load("0123456789abcdef")
