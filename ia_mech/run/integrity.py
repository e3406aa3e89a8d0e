"""Whether a run's files are what was written: hashes, seals, shapes, and replacing files whole.

The files of parts are named in ``manifest.json`` with their XXH3-128, a fast hash that finds damage
and mix-ups (it is no protection from people who can write to the folder). Files that stand alone,
``manifest.json`` itself, labels and cards, carry a **seal**: the XXH3-128 of their own bytes, with
zeros where its digits are. Runs of format 1 have SHA-256 in their manifest and no seals.
"""

import contextlib
import copy
import glob
import hashlib
import io
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from ia_mech.errors import UserError
from ia_mech.run.layout import MANIFEST, READABLE, RUN

HASH = "xxh3_128"
_HASHES: dict[str, Callable[[], Any]] = {HASH: xxhash.xxh3_128, "sha256": hashlib.sha256}

# -- shapes of the two JSON files ----------------------------------------------------------------

_Count = Annotated[int, Field(ge=0)]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]+$")]
# Nothing else can be named, so nothing outside the folder is read, merged or removed.
_FileName = Annotated[
    str,
    StringConstraints(
        pattern=r"^(run\.json|conversations\.parquet"
        r"|(responses|contexts|generations)/part-\d+\.parquet"
        r"|(header_logits|residuals/layer_\d+)/\d+\.safetensors)$"
    ),
]


class _File(TypedDict):
    bytes: _Count
    xxh3_128: NotRequired[_Digest]
    sha256: NotRequired[_Digest]  # before format 2


class _Part(TypedDict):
    kind: Literal["conversations", "responses", "contexts"]
    name: Annotated[str, StringConstraints(pattern=r"^(conversations|\d+)$")]
    units: list[str]
    contexts: _Count
    files: dict[_FileName, _File]
    backed_off: NotRequired[dict[str, dict[Literal["rows", "turns"], _Count]]]


class _Manifest(TypedDict):
    complete: bool
    parts: list[_Part]
    sessions: list[dict[str, Any]]
    next: NotRequired[dict[str, _Count]]


class _Grid(TypedDict):
    temperatures: list[float]
    samples: _Count
    max_new_tokens: _Count
    seed: int


class _Config(TypedDict):
    model: dict[str, Any]
    dataset: str
    grid: _Grid
    header_logits: str | int


class _Model(TypedDict):
    name: str
    weights_hash: str
    layers: _Count
    d_model: _Count
    vocab: _Count
    dtype: str


class _Chat(TypedDict):
    template_hash: str
    tail_ids: list[int]
    stop_ids: dict[Annotated[str, StringConstraints(pattern=r"^\d+$")], str]


class _Conversations(TypedDict):
    count: _Count


class _Identity(TypedDict):
    config: _Config
    model: _Model
    chat: _Chat
    positions: list[str]
    score_temperatures: NotRequired[list[float]]
    conversations: _Conversations
    software: dict[str, str]


class _Record(TypedDict):
    identity: _Identity


_SHAPES: dict[str, TypeAdapter] = {RUN: TypeAdapter(_Record), MANIFEST: TypeAdapter(_Manifest)}


def read_record_and_manifest(path: Path, *, verify: bool = True) -> tuple[dict, dict]:
    """``run.json`` and ``manifest.json`` of a run: the one door to both.

    Args:
        path: the run's folder.
        verify: compare them with the manifest's hash and seal.

    Raises:
        UserError: not a run, a run of another format, or a file that isn't what was written.
    """
    found = {}
    for name in (RUN, MANIFEST):
        if not (path / name).is_file():
            lacking = "it is a file" if path.is_file() else f"no {name}"
            raise UserError(f"{path} is not a run ({lacking})", "give a folder under cache/")
        content = (path / name).read_bytes()
        try:
            found[name] = _object(content)
            _check_format(path / name, found[name])  # first: another format may have other seals
        except ValueError as error:
            raise _damaged(path / name, str(error)) from None
        if verify:
            try:
                check_seal(io.BytesIO(content), required=found[name]["format"] != 1)
            except ValueError as error:
                raise _changed(path / name, str(error)) from None
        found[name].pop(SEAL, None)
        try:
            check_shape(_SHAPES[name], found[name])
        except ValueError as error:
            raise _damaged(path / name, str(error)) from None
    record, manifest = found[RUN], found[MANIFEST]
    for part in manifest["parts"]:
        if verify and RUN in part["files"]:
            problem = damage(path, {RUN: part["files"][RUN]}, content=True)
            if problem is not None:
                raise _changed(path / RUN, problem)
    return record, manifest


def check_shape(shape: TypeAdapter, value: dict) -> None:
    """Compare the names and types in a JSON object with those of a type.

    Raises:
        ValueError: they differ; it names the first place.
    """
    try:
        shape.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{place}: {first['msg']}") from None


def _check_format(file: Path, value: dict) -> None:
    form = value.get("format")
    if form is None:
        raise ValueError("it has no format")
    if form not in READABLE:
        raise UserError(
            f"{file} has format {form}, this version reads {' and '.join(map(str, READABLE))}",
            "read it with the version of ia_mech that wrote it",
        )


def _damaged(file: Path, problem: str) -> UserError:
    return UserError(
        f"{file} is damaged ({problem})",
        "restore it from a copy, or remove the folder and sample again",
    )


def _changed(file: Path, problem: str) -> UserError:
    return UserError(
        f"{file} is damaged ({problem})",
        "undo the change or restore a copy; analyses read it as it is with --no-verify",
    )


def without_folders(identity: dict) -> dict:
    """An identity with the last part of each path of this machine: runs are shared."""
    identity = copy.deepcopy(identity)
    config = identity["config"]
    for place, key in (
        (config["model"], "name"),
        (config["model"], "adapter"),
        (identity.get("model", {}), "name"),
        (identity.get("model", {}), "adapter"),
        (config, "dataset"),
        (config, "candidates"),
        (config, "intervention"),
    ):
        if isinstance(name := place.get(key), str) and name.startswith(("/", "~", ".", "\\")):
            place[key] = Path(os.path.abspath(os.path.expanduser(name))).name
    return identity


def differences(there: dict, wanted: dict) -> dict[str, str]:
    """Where two identities differ: both values, by a dotted name."""
    return dict(_differences(there, wanted))


def _differences(there: dict, wanted: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key in sorted({*there, *wanted}):
        a, b = there.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            values = f"is {_short(a)} there, {_short(b)} here"
            yield f"{prefix}{key}", "differs" if "sha256" in key or "hash" in key else values


def _short(value) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = {"None": "not set", "True": "set", "False": "not set"}.get(text, text)
    return text if len(text) <= 40 else text[:37] + "…"


# -- content -------------------------------------------------------------------------------------


def facts_of(path: Path) -> dict[str, int | str]:
    """What the manifest says of a file: its size and its hash."""
    return {"bytes": path.stat().st_size, HASH: _content_hash(path, HASH)}


def _content_hash(path: Path, name: str) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, _HASHES[name]).hexdigest()


def damage(root: Path, files: dict[str, dict], *, content: bool) -> str | None:
    """What is wrong with a part's files, or None.

    Args:
        root: the run's folder.
        files: name -> size and hash as the manifest has them.
        content: compare the hash of every file, not only its size.
    """
    for name, expected in files.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
        if content and any(
            _content_hash(path, known) != expected[known] for known in _HASHES if known in expected
        ):
            return f"the content of {name} is not what was written"
    return None


# -- seals ---------------------------------------------------------------------------------------

SEAL = "seal"
UNSEALED = "xxh3:" + "0" * 32  # stands in for a seal until the rest is known
_SEAL = re.compile(rb"xxh3:([0-9a-f]{32})")
_DIGITS, _BLOCK = 32, 1 << 22  # bytes


def sealed(content: bytes) -> bytes:
    """The content of a file with its last ``UNSEALED`` replaced by the hash of all of it."""
    file = io.BytesIO(content)
    _seal(file)
    return file.getvalue()


def _seal(file: BinaryIO) -> None:
    at = _last_seal(file)
    assert at is not None
    digits = _digits(file, at)
    file.seek(at)
    file.write(digits)


def check_seal(file: BinaryIO, *, required: bool) -> None:
    """Compare the content of a file with the last seal in it; a block of it is in memory.

    Raises:
        ValueError: they differ, or it has none and ``required`` says that it must.
    """
    at = _last_seal(file)
    if at is not None:
        file.seek(at)
        if file.read(_DIGITS) != _digits(file, at):
            raise ValueError("its content is not what was written")
    elif required:
        raise ValueError("it has no seal, so another program wrote it")


def _digits(file: BinaryIO, at: int) -> bytes:
    """The hash of a file, as hexadecimal digits, with zeros from ``at`` in place of its seal's."""
    found, size = xxhash.xxh3_128(), file.seek(0, os.SEEK_END)
    file.seek(0)
    for start in range(0, at, _BLOCK):
        found.update(file.read(min(_BLOCK, at - start)))
    found.update(b"0" * _DIGITS)
    for start in range(file.seek(at + _DIGITS), size, _BLOCK):
        found.update(file.read(min(_BLOCK, size - start)))
    return found.hexdigest().encode()


def _last_seal(file: BinaryIO) -> int | None:
    """Where the digits of a file's last seal begin; None if it has none."""
    # Texts in the file may look like a seal, but the seal is written after them.
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        block = file.read(end - start + len(UNSEALED))  # one that began before the last end
        at = block.rfind(b"xxh3:")
        if at >= 0:
            found = _SEAL.match(block, at)
            return start + found.start(1) if found else None
        end = start
    return None


# -- reading and replacing files -----------------------------------------------------------------

ROW_GROUP = 100_000  # rows of a table that are in memory
_CLOCK_ERROR = 2.0  # seconds; the time of a start is reckoned from that of the boot, in whole ones


def read_json(path: Path, *, verify: bool = True, required: bool = False) -> dict:
    """A JSON object that :func:`write_json` wrote; see :func:`unsealed`."""
    return unsealed(path.read_bytes(), verify=verify, required=required)


def unsealed(content: bytes, *, verify: bool = True, required: bool = False) -> dict:
    """A JSON object without its seal.

    Args:
        content: the object as JSON.
        verify: check the seal.
        required: refuse an object without one.

    Raises:
        ValueError: no JSON object, or (with ``verify``) not the one that was written.
    """
    value = _object(content)
    if verify:
        check_seal(io.BytesIO(content), required=required or SEAL in value)
    value.pop(SEAL, None)
    return value


def _object(content: bytes) -> dict:
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: dict) -> None:
    """Replace a JSON file atomically: a reader sees the old one or the new one, never a half."""
    text = json.dumps(value | {SEAL: UNSEALED}, indent=1, ensure_ascii=False)

    def write(scratch: Path) -> None:
        scratch.write_bytes(sealed(text.encode()))

    replace_file(path, write)


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Have a file written under another name, then put in its place.

    Args:
        path: the file; its folder must be there.
        write: is given the other name, in the same folder.

    Raises:
        OSError: it can't be written.
    """
    scratch = path.with_name(f"{path.name}.{process_name()}.tmp")
    for left in abandoned(path.parent, f"{path.name}.", r"\.tmp"):
        left.unlink(missing_ok=True)
    try:
        write(scratch)
        with open(scratch, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(scratch, path)
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)  # a write to an open file doesn't name it
        raise
    finally:
        scratch.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_table(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    """Replace a Parquet file atomically, with a seal in its metadata; the tables come in turn."""

    def write(scratch: Path) -> None:
        with pq.ParquetWriter(scratch, schema) as file:
            group = [schema.empty_table()]
            for table in tables:
                group.append(table)
                if sum(map(len, group)) >= ROW_GROUP:
                    file.write_table(pa.concat_tables(group))
                    group = [schema.empty_table()]
            file.write_table(pa.concat_tables(group))
            file.add_key_value_metadata({SEAL: UNSEALED})
        with scratch.open("rb+") as whole:
            _seal(whole)

    replace_file(path, write)


HOST = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())


def process_name() -> str:
    """What this process puts into the names of its scratch files and folders."""
    return f"{HOST}-{os.getpid()}"


def abandoned(folder: Path, before: str, after: str) -> list[Path]:
    """Scratch files or folders whose process, of this host, is gone; it may have been killed.

    Those of other hosts, which may share the disk, are not judged.

    Args:
        folder: where they are.
        before: how their names begin, before :func:`process_name`.
        after: how their names end, as a regular expression.
    """
    name = re.compile(f"{re.escape(before)}{HOST}-([0-9]{{1,9}}){after}")
    found = ((path, name.fullmatch(path.name)) for path in folder.glob(f"{glob.escape(before)}*"))
    return [path for path, match in found if match and _is_gone(path, int(match[1]))]


def _is_gone(path: Path, process: int) -> bool:
    """Whether the process that made a file is gone.

    Its number can be another process's by now. In containers it often is the next one's.
    """
    try:
        return psutil.Process(process).create_time() > path.stat().st_mtime + _CLOCK_ERROR
    except psutil.NoSuchProcess:
        return True
    except FileNotFoundError:
        return False


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder of its own for files in the making; those of killed processes are removed."""
    for left in abandoned(parent, ".ia_mech-", "-.*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".ia_mech-{process_name()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
