"""Damaged and hostile models: one line, or another hash; and no code of theirs is run."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from ia_mech.chat.format import ChatFormat
from ia_mech.engine.check import check_engine
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, load, load_files

pytestmark = pytest.mark.usefixtures("loaded_anew")


@pytest.fixture
def checkpoint(tiny_model_dir, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "checkpoint"))


def outcome(path: Path) -> str:
    """The hash of the model's weights, or the one line of a refusal that names the model."""
    try:
        subject = load(ModelSpec(name=str(path), device="cpu"))
        ChatFormat(subject.tokenizer)
    except UserError as refused:
        said = str(refused)
        assert len(said.splitlines()) == 1 and "; " in said and len(said) < 600, said
        assert str(path) in said, said
        return said
    return subject.weights_hash


def damages(content: bytes) -> dict[str, bytes]:
    rng = random.Random(0)
    flipped = bytearray(content)
    flipped[rng.randrange(min(len(content), 300))] ^= 1 << rng.randrange(8)
    return {
        "empty": b"",
        "half": content[: len(content) // 2],
        "UTF-16": b"\xff\xfe" + content[:50],
        "deep": b"[" * 200_000,
        "flipped": bytes(flipped),
    }


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_file_is_one_line(checkpoint, tiny_subject, name, capfd):
    file = checkpoint / name
    content = file.read_bytes()
    for damage, damaged in damages(content).items():
        file.write_bytes(damaged)
        said = outcome(checkpoint)
        assert said != tiny_subject.weights_hash or damage == "flipped", damage
    file.unlink()
    assert outcome(checkpoint) != tiny_subject.weights_hash
    file.write_bytes(content)
    assert outcome(checkpoint) == tiny_subject.weights_hash
    assert "Traceback" not in capfd.readouterr().err


def test_damage_that_nothing_shows_is_another_model(checkpoint, tiny_subject):
    """A bit of a weight: the hash that the run records tells the two apart."""
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert outcome(checkpoint) != tiny_subject.weights_hash


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "model.safetensors").write_text(POINTER), "git-lfs pointer.*git lfs pull"),
        (lambda f: (f / "tokenizer.json").write_text(POINTER), "git-lfs pointer.*git lfs pull"),
        (
            lambda f: (
                (f / "model.safetensors")
                .rename(f / "model.safetensors.index.json")
                .write_text(
                    json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}})
                )
            ),
            "lacks 1 of 1 files of weights, such as model-1.safetensors; copy or download",
        ),
        (
            lambda f: (f / "config.json").write_text(
                json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
            ),
            r"custom code.*--trust-remote-code \(trust_remote_code=True\)",
        ),
    ],
    ids=["weights", "tokenizer", "shard", "auto_map"],
)
def test_what_a_folder_lacks_is_named_with_the_way_to_it(checkpoint, spoil, words):
    spoil(checkpoint)
    assert re.search(words, outcome(checkpoint))


def test_weights_that_are_no_numbers_are_not_blamed_on_the_dtype(checkpoint):
    model = load(ModelSpec(name=str(checkpoint), device="cpu")).model
    model.get_input_embeddings().weight[3] = torch.nan
    with pytest.raises(UserError, match="copy or download the model again"):
        check_engine(model, list(range(1, 20)))


def test_another_precision_of_torchs_is_named(checkpoint):
    torch.set_default_dtype(torch.float64)
    try:
        assert "torch.set_default_dtype(torch.float32)" in str(refusal(checkpoint))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "torch.autocast is on" in str(refusal(checkpoint))


def refusal(path: Path) -> UserError:
    with pytest.raises(UserError) as refused:
        load(ModelSpec(name=str(path), device="cpu"))
    return refused.value


def test_a_template_is_found_where_old_folders_have_it(checkpoint):
    file = checkpoint / "chat_template.jinja"
    template = file.read_text()
    file.unlink()
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load(ModelSpec(name=str(checkpoint))).tokenizer.chat_template == template


def test_what_transformers_warns_of_is_mended_or_shown_once(checkpoint, capfd):
    """A Mistral checkpoint as it was published: its tokenizer has another expression."""
    file, config = checkpoint / "tokenizer.json", checkpoint / "config.json"
    words = json.loads(file.read_text())
    size = len(words["model"]["vocab"]) + len(words["added_tokens"])
    words["model"]["vocab"] |= {f"unused {i}": size + i for i in range(100_000)}
    words["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": r"\p{N}{1,3}|\p{L}+|\s+"},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }
    file.write_text(json.dumps(words))
    said = json.loads(config.read_text())
    rope = {"rope_type": "default", "rope_theta": 1e4, "odd": 1}
    said |= {"model_type": "mistral", "transformers_version": "4.50.0", "rope_parameters": rope}
    config.write_text(json.dumps(said))
    tokenizer = load_files(ModelSpec(name=str(checkpoint))).tokenizer
    assert tokenizer.tokenize("2024") == list("2024")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("note: ") for line in lines)
    assert "fix_mistral_regex" in lines[0] and "odd" in lines[1]


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
