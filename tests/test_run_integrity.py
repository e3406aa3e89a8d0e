"""Reading a file of a run gives what was written, or one line that names the file."""

import json

import pytest
from shell import call, refusal

from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge
from ia_mech.run import Run, integrity

READERS = {
    "contexts/part-00000.parquet": lambda run: run.contexts,
    "generations/part-00000.parquet": lambda run: run.generations,
    "header_logits/00000.safetensors": lambda run: run.header_logits(),
    "residuals/00000.safetensors": lambda run: run.residuals(1, "header_last"),
}


def flip(path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "read"), READERS.items())
def test_a_flipped_bit_is_found_when_the_file_is_read(run, file, read):
    flip(run.path / file, (run.path / file).stat().st_size // 2, 3)
    damaged = Run.open(run.path)  # sizes agree
    with pytest.raises(UserError, match=f"part 00000 of .* the content of {file} is not what was"):
        read(damaged)
    for other, read_other in READERS.items():
        if other != file:
            read_other(damaged)


def test_a_file_is_compared_once(run, monkeypatch):
    compared = []
    known = integrity.content_hash
    monkeypatch.setattr(integrity, "content_hash", lambda p: compared.append(p.name) or known(p))
    opened = Run.open(run.path)
    for _ in range(2):
        for position in opened.positions:
            opened.residuals(1, position)
    assert compared == ["run.json", "00000.safetensors"]


# -- run.json and a manifest ----------------------------------------------------------------------

GONE = object()
MANIFEST = "manifests/contexts-00000.json"
FILES = ("files", "contexts/part-00000.parquet")
CHANGES = [
    ("run.json", ("format",), 2, r"run.json has format 2, this version reads 7"),
    ("run.json", ("identity",), GONE, "run.json is damaged .it lacks identity"),
    ("run.json", ("identity", "model"), GONE, "run.json is not the one that contexts-000"),
    ("run.json", ("identity", "settings", "seed"), 5, "run.json is not the one that contexts-000"),
    (MANIFEST, ("format",), 99, "contexts-00000.json has format 99, this version reads 7"),
    (MANIFEST, ("run",), "00", "run.json is not the one that contexts-00000.json belongs to"),
    (MANIFEST, ("files",), GONE, "contexts-00000.json is damaged .it lacks files"),
    (MANIFEST, ("name",), "00001", "contexts-00000.json is damaged .it is of the part"),
    (MANIFEST, ("contexts",), True, "contexts-00000.json is damaged .it has True contexts"),
    (MANIFEST, (*FILES, "bytes"), "many", "contexts/part-00000.parquet has .* bytes, many"),
    (MANIFEST, FILES, GONE, "contexts/part-00000.parquet is not among its files"),
    (MANIFEST, ("session",), [7], "contexts-00000.json is damaged .the session is no object"),
]


@pytest.mark.parametrize(("file", "path", "new", "expected"), CHANGES)
def test_a_json_file_that_is_not_as_it_was_written_is_one_line(
    run, capfd, file, path, new, expected
):
    whole = json.loads((run.path / file).read_text())
    place = whole
    for key in path[:-1]:
        place = place[key]
    if new is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    (run.path / file).write_text(json.dumps(whole))
    with pytest.raises(UserError, match=expected):
        Run.open(run.path).contexts  # noqa: B018
    assert refusal(call(lambda words: judge(["run", *words]), [str(run.path)], capfd))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "contexts/../../secret"])
def test_no_file_outside_the_run_is_read_or_replaced(run, name):
    part = json.loads((run.path / MANIFEST).read_text())
    part["files"][name] = part["files"][FILES[-1]]
    (run.path / MANIFEST).write_text(json.dumps(part))
    with pytest.raises(UserError, match=f"the file '{name}' lies outside the run"):
        Run.open(run.path)


# -- identities -----------------------------------------------------------------------------------


def test_an_identity_names_no_folder_of_this_machine():
    settings = {
        "model": "/home/me/my-model",
        "adapter": "../tuned",
        "dataset": "~/data/c.jsonl",
    }
    settings |= {"intervention": "./vector.safetensors", "system": "/x/y"}
    known = {"settings": settings, "model": {"name": "/home/me/my-model", "adapter": "../tuned"}}
    clean = integrity.without_folders(known)
    assert clean["settings"] == {
        **{"model": "my-model", "adapter": "tuned", "dataset": "c.jsonl"},
        **{"intervention": "vector.safetensors", "system": "/x/y"},
    }
    assert clean["model"] == {"name": "my-model", "adapter": "tuned"}
    assert settings["model"] == "/home/me/my-model"  # the original is as it was
    hub = {"settings": {"model": "org/name", "dataset": "org/data"}}
    assert integrity.without_folders(hub) == hub
