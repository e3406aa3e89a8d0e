"""Whether a run's files are as they were written: hashes, the two kinds of JSON files, and how a
file is replaced.

A manifest holds the XXH3-128 hash of each file of its part and of ``run.json``. The hash is fast
and finds damage and mix-ups. It does not stop a person who can write to the folder.
"""

import copy
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ia_mech.cli import refuse_no_run
from ia_mech.errors import UserError
from ia_mech.run.layout import FORMAT, MANIFESTS, RUN

HASH = "xxh3_128"


def read_record(path: Path) -> tuple[dict[str, Any], str]:
    """``run.json`` of a run, and the hash of its bytes, which every manifest holds.

    Raises:
        UserError: the folder is no run or one of another format, or the file is damaged.
    """
    refuse_no_run(path)
    file = path / RUN
    remedy = "restore it from a copy, or remove the folder and sample again"
    return _read(file, ("identity", "parts"), remedy), content_hash(file)


def read_manifest(file: Path, run: str) -> dict[str, Any]:
    """The manifest of one part of a run.

    Args:
        file: the manifest.
        run: the hash of the run's ``run.json``.

    Raises:
        UserError: the file has another format, is damaged, or belongs to another ``run.json``.
    """
    remedy = "restore it from a copy, or remove it: its part is then computed again"
    keys = ("run", "kind", "name", "contexts", "files", "session")
    manifest = _read(file, keys, remedy)
    if manifest["run"] != run:
        raise UserError(
            f"{file.parents[1] / RUN} is not the one that {file.name} belongs to",
            "undo the change or restore a copy",
        )
    try:  # the only file without a hash of its own
        kind, name, contexts = (manifest[key] for key in ("kind", "name", "contexts"))
        if f"{kind}-{name}.json" != file.name:
            raise ValueError(f"it is of the part {kind!r} {name!r}")
        if type(contexts) is not int or contexts < 0:
            raise ValueError(f"it has {contexts!r} contexts")
        for path, facts in manifest["files"].items():
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ValueError(f"the file {path!r} lies outside the run")
            if not {"bytes", HASH} <= facts.keys():
                raise ValueError(f"the file {path!r} has no size or no hash")
        if not isinstance(manifest["session"], dict):
            raise ValueError("the session is no object")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(file, error, remedy) from None
    return manifest


def _read(file: Path, keys: Sequence[str], remedy: str) -> dict[str, Any]:
    try:
        value = read_json(file)
    except ValueError as error:
        raise _damaged(file, error, remedy) from None
    if value.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"{file} has format {value['format']}, this version reads {FORMAT}",
            "read it with the version of ia_mech that wrote it",
        )
    if lacking := [key for key in ("format", *keys) if key not in value]:
        raise _damaged(file, f"it lacks {lacking[0]}", remedy)
    return value


def _damaged(file: Path, problem: object, remedy: str) -> UserError:
    return UserError(f"{file} is damaged ({problem})", remedy)


# -- identities ----------------------------------------------------------------------------------


def without_folders(known: dict[str, Any]) -> dict[str, Any]:
    """An identity in which paths of this machine are cut to their last part: runs are shared."""
    known = copy.deepcopy(known)
    settings, model = known["settings"], known.get("model", {})
    paths = ("model", "adapter", "dataset", "intervention")
    for place, key in [*((settings, key) for key in paths), (model, "name"), (model, "adapter")]:
        if isinstance(name := place.get(key), str) and name.startswith(("/", "~", ".", "\\")):
            place[key] = Path(os.path.abspath(os.path.expanduser(name))).name
    return known


def changed_values(
    there: dict[str, Any], wanted: dict[str, Any], prefix: str = ""
) -> dict[str, str]:
    """Where two identities differ: dotted name → both values, in words."""
    found: dict[str, str] = {}
    for key in sorted({*there, *wanted}):
        a, b = there.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= changed_values(a, b, f"{prefix}{key}.")
        elif a != b:
            none = "all" if key == "limit" else "not set"
            values = f"is {_short(a, none)} there, {_short(b, none)} here"
            found[prefix + key] = "differs" if "sha256" in key or "hash" in key else values
    return found


def _short(value: Any, none: str) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = {"None": none, "True": "set", "False": "not set"}.get(text, text)
    return text if len(text) <= 40 else text[:37] + "…"


# -- content -------------------------------------------------------------------------------------


def content_hash(path: Path) -> str:
    """The XXH3-128 of a file, as hexadecimal digits."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, xxhash.xxh3_128).hexdigest()


def size_and_hash(path: Path) -> dict[str, int | str]:
    """Size and hash of a file, as its manifest holds them."""
    return {"bytes": path.stat().st_size, HASH: content_hash(path)}


def refuse_lost_folders(root: Path, parts: list[dict[str, Any]]) -> None:
    """Raise UserError if a folder lacks the files of all these parts: it was moved, or its disk is
    away. Computing these parts again could be a mistake, as for one damaged part it isn't."""
    files = [root / file for part in parts for file in part["files"]]
    for folder in sorted({file.parent for file in files}):
        own = [file for file in files if file.parent == folder]
        several = len(own) > 1 or (len(parts) == 1 and not folder.is_dir())  # not one bad part
        if several and not any(file.exists() for file in own):
            raise UserError(
                f"{folder} lacks all {len(own)} files that were written there",
                "mount its disk or bring the files back; or remove "
                f"{root / MANIFESTS}, and the whole run is computed again",
            )


def damage(root: Path, files: dict[str, dict[str, Any]], *, content: bool) -> str | None:
    """What is wrong with the first damaged file, or None.

    Args:
        root: the folder that the names begin in.
        files: name -> size and hash, as :func:`size_and_hash` gave them.
        content: compare each file's hash, too, not only its size.
    """
    for name, expected in files.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written"
        if content and content_hash(path) != expected[HASH]:
            return f"the content of {name} is not what was written"
    return None


# -- reading and replacing files -----------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: the file holds no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except IsADirectoryError:
        raise ValueError("it is a folder") from None
    except RecursionError:
        raise ValueError("its values are nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file whole, see :func:`replace_file`."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    replace_file(path, lambda scratch: scratch.write_bytes(text.encode()))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file whole: a reader sees the old file or the new one, never a half.

    Args:
        path: the file; its folder must be there.
        write: writes the new file under the name that it is given, in the same folder.

    Raises:
        OSError: the file can't be written.
    """
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write(scratch)
        fsync_file(scratch)
        os.replace(scratch, path)
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)  # a write to an open file doesn't name it
        raise
    finally:
        scratch.unlink(missing_ok=True)
    fsync_folder(path.parent)


def fsync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with open(path, "rb+") as handle:
        os.fsync(handle.fileno())


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
