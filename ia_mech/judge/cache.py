"""Verdicts that were paid for, so that none is paid for twice.

One append-only JSON-lines file per judge identity under ``cache/judgements/``: a changed rubric,
model or setting is another identity and so another file. A line is flushed to the disk before its
verdict is counted, so a kill loses at most what is in flight. One process writes at a time; any
number may read meanwhile. A line that can't be read counts as none: its verdict is asked for again.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ia_mech.errors import UserError
from ia_mech.judge.verdict import Item, Verdict, identity_hash
from ia_mech.models.embedded import cache_dir


class VerdictCache:
    """The verdicts of one judge. A context manager; holds a lock on the file while open.

    ``read_only`` takes no lock, creates no folder and repairs nothing; it works beside a process
    that writes the file, and on a read-only disk. ``folder`` is ``cache/judgements`` by default.

    Raises:
        UserError: another process writes the same file.
    """

    def __init__(
        self, identity: dict[str, Any], folder: Path | None = None, *, read_only: bool = False
    ) -> None:
        self._identity = identity
        self._judge = identity_hash(identity)
        self._file: int | None = None  # opened with the first verdict if there is no file yet
        self._read_only = read_only
        self._verdicts: dict[str, Verdict] = {}
        self.path = _folder(folder) / f"{self._judge}.jsonl"
        self._lock = None if read_only else self._acquire()
        if self.path.exists():
            self._read()
            if not read_only:
                self._open()

    def get(self, item: Item, repeat: int) -> Verdict | None:
        return self._verdicts.get(item.key(self._judge, repeat))

    def put(self, item: Item, repeat: int, verdict: Verdict) -> None:
        """Keep a verdict; when this returns it is on the disk.

        Raises:
            OSError: it can't be written, or the cache was opened to read only.
        """
        if self._read_only:
            raise OSError(f"{self.path} was opened to read only")
        key = item.key(self._judge, repeat)
        self._append(self._open(), {"key": key, "verdict": verdict.to_json()})
        self._verdicts[key] = verdict

    def __enter__(self) -> "VerdictCache":
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._lock is not None:
            self._lock.release()

    def _acquire(self) -> FileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another process is judging with the same judge ({self.path})", "wait for it"
            ) from None
        return lock

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if not os.fstat(self._file).st_size:  # new, or a kill left it without a whole line
                self._append(self._file, {"identity": self._identity})
        return self._file

    def _append(self, file: int, value: dict) -> None:
        before = os.fstat(file).st_size
        line = memoryview(json.dumps(value).encode() + b"\n")
        try:
            while line:
                line = line[os.write(file, line) :]
            os.fsync(file)
        except BaseException:  # a full disk, an interrupt: the next line must begin a line
            os.ftruncate(file, before)
            raise

    def _read(self) -> None:
        """Read the file. A last line without its end was being written when a process died."""
        content = self.path.read_bytes()
        whole, _, rest = content.rpartition(b"\n")
        if rest and not self._read_only:
            os.truncate(self.path, len(content) - len(rest))
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                value = json.loads(line)
                self._verdicts[value["key"]] = Verdict.from_json(value["verdict"])


def cached_identity(
    like: dict[str, Any], items: Sequence[Item], folder: Path | None = None
) -> dict[str, Any]:
    """The whole identity of a judge of which a part is known, by the verdicts it left.

    The hash of a local model's weights is part of its identity, and known only once the model is
    loaded; a replay loads none. One name may stand for several models (a hub id that moved on, a
    folder with other weights, another dtype), so the cache that holds all ``items`` is taken. If
    none does, it is the one that lacks least. ``like`` is the part that is known, ``model`` among
    it.

    Raises:
        UserError: no such verdicts, or all of them from several models.
    """
    wanted, model = set(items), like["model"]
    found = []
    for path in sorted(_folder(folder).glob("*.jsonl")):
        identity = None
        with (
            contextlib.suppress(ValueError, LookupError, TypeError, OSError),
            path.open("rb") as file,
        ):
            identity = json.loads(file.readline())["identity"]
        if isinstance(identity, dict) and like.items() <= identity.items():
            with VerdictCache(identity, folder, read_only=True) as cache:
                found.append((sum(cache.get(item, 0) is not None for item in wanted), identity))
    if not found:
        raise UserError(
            f"--replay: none of {len(wanted)} verdicts of {model} by this rubric is in the cache, "
            f"the first for the turn {items[0].turn[:60]!r}",
            "leave --replay out to judge them",
        )
    whole = [identity for count, identity in found if count == len(wanted)]
    if len(whole) > 1:
        weights = ", ".join(identity["weights_hash"] for identity in whole)
        raise UserError(
            f"--replay: the cache has verdicts of several models named {model} (weights {weights})",
            "leave --replay out: the model is loaded then, and what it has judged is free",
        )
    return whole[0] if whole else max(found, key=lambda pair: pair[0])[1]


def _folder(folder: Path | None) -> Path:
    return folder or cache_dir() / "judgements"
