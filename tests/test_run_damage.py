"""Reading a damaged run gives what was written, or one line that names the file."""

import json
import os
import shutil
from pathlib import Path
from random import Random

import pytest
from runs import write_by_hand
from shell import call, files

from ia_mech.errors import UserError
from ia_mech.rates.__main__ import main as rates
from ia_mech.run import Run

OTHERS = (None, True, 0, -1, 2**40, 1.5, "x", "", "../x", [], {}, [1], {"x": 1})


def flipped(content: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


BYTES = {
    "emptied": lambda content, _: b"",
    "cut": lambda content, rng: content[: rng.randrange(len(content))],
    "a bit": flipped,
    "zeros": lambda content, _: bytes(len(content)),
    "noise": lambda content, rng: rng.randbytes(len(content)),
    "longer": lambda content, _: content + b"\0",
    "a list": lambda *_: b"[]",
    "nested": lambda *_: b"[" * 200_000,
}
PLACES = {
    "removed": lambda path: None,
    "a folder": Path.mkdir,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


def damage(path: Path, name: str, rng: Random) -> None:
    content = path.read_bytes()
    path.unlink()
    if name in BYTES:
        path.write_bytes(BYTES[name](content, rng))
    else:
        PLACES[name](path)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Run:
    return write_by_hand(tmp_path_factory.mktemp("written") / "run")


@pytest.mark.parametrize("name", [*BYTES, *PLACES])
def test_a_damaged_file_is_named(written, tmp_path, name):
    digest = written.digest()
    files = ["run.json", *written.parts("contexts")[1]["files"]]
    copy = shutil.copytree(written.path, tmp_path / "copy")
    for number, file in enumerate(files):
        damage(copy / file, name, Random(number))
        with pytest.raises(UserError, match=file):
            assert Run.open(copy).digest() == digest
        if (copy / file).is_dir():
            (copy / file).rmdir()
        (copy / file).unlink(missing_ok=True)
        shutil.copy(written.path / file, copy / file)


@pytest.mark.parametrize("place", PLACES)
def test_a_part_without_a_manifest_that_is_a_file_is_no_part(written, tmp_path, place):
    copy = shutil.copytree(written.path, tmp_path / "copy")
    damage(copy / "manifests" / "contexts-00001.json", place, Random(0))
    assert (
        not Run.open(copy, unfinished=True).complete
        and len(Run.open(copy, unfinished=True).parts("contexts")) == 3
    )


def other_json(value, rng: Random):
    """The value with one place in it replaced, or removed; those near the top are likelier."""
    container = value
    while True:
        key = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
        inner = container[key]
        if not (isinstance(inner, dict | list) and inner) or rng.random() < 0.3:
            break
        container = inner
    if rng.random() < 0.3:
        del container[key]
    else:
        container[key] = rng.choice(OTHERS)
    return value


@pytest.mark.parametrize("file", ["run.json", "manifests/contexts-00001.json"])
def test_other_json_is_read_or_refused_in_one_line(written, tmp_path, capfd, file):
    """A manifest has no hash of its own: it is read as it is, or refused."""
    path = shutil.copytree(written.path, tmp_path / "run")
    before = (path / file).read_text()
    refused = 0
    for number in range(40):
        changed = other_json(json.loads(before), Random(number))
        (path / file).write_text(json.dumps(changed))
        try:
            run = Run.open(path)
            run.digest()
            assert run.verify() == []
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused == 40 if file == "run.json" else refused > 20
    assert call(rates, [str(path)], capfd).status == 2
    assert files(path)[file]  # nothing was removed
