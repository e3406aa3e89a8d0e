"""Damaged and hostile models: one line, or another hash; and no code of theirs is run."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from ia_mech.chat.format import ChatFormat
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, load

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
