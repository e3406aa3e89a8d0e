"""Verdicts that were paid for, kept so that no one pays twice.

One append-only JSON-lines file per judge identity under ``cache/judgements/``: a changed rubric,
model or setting is another identity and so another file. A line is flushed to the disk before its
verdict is counted, so a kill loses at most what is in flight. One process writes at a time; any
number may read meanwhile.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ia_mech.errors import UserError
from ia_mech.judge.verdict import Item, Verdict, identity_hash
from ia_mech.models.embedded import cache_dir

_FIELDS = {field.name for field in fields(Verdict)}


class VerdictCache:
    """The verdicts of one judge. A context manager; holds a lock on the file while open.

    Args:
        identity: the judge's.
        folder: where the files lie; ``cache/judgements`` by default.
        read_only: look and touch nothing: no lock, no folder, no mending; works beside a process
            that writes the file, and where nothing can be written.

    Raises:
        UserError: another process writes the same file; a damaged line.
    """

    def __init__(
        self, identity: dict[str, Any], folder: Path | None = None, *, read_only: bool = False
    ) -> None:
        self._identity = identity
        self._judge = identity_hash(identity)
        self._file: int | None = None  # a new one begins with its first verdict
        self._read_only = read_only
        self._lock: FileLock | None = None
        self._verdicts: dict[str, Verdict] = {}
        self.path = _folder(folder) / f"{self._judge}.jsonl"
        if not read_only:
            self._acquire()
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
        if self._file is None:
            self._open()
        key = item.key(self._judge, repeat)
        self._append({"key": key, "verdict": verdict.to_json()})
        self._verdicts[key] = verdict

    def __enter__(self) -> "VerdictCache":
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._lock is not None:
            self._lock.release()

    def _acquire(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path.with_suffix(".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another process is judging with the same judge ({self.path})", "wait for it"
            ) from None

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if not os.fstat(self._file).st_size:  # new, or a kill left it without a whole line
            self._append({"identity": self._identity})

    def _append(self, value: dict) -> None:
        before = os.fstat(self._file).st_size
        line = memoryview((json.dumps(value, ensure_ascii=False) + "\n").encode())
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except BaseException:  # a full disk, an interrupt: the next line is to begin a line
            os.ftruncate(self._file, before)
            raise

    def _read(self) -> None:
        """Read what is there. A last line without its end was being written when a process died."""
        content = self.path.read_bytes()
        whole, _, rest = content.rpartition(b"\n")
        if rest and not self._read_only:
            os.truncate(self.path, len(content) - len(rest))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                value = json.loads(line)
                if "key" in value:
                    known = {k: v for k, v in value["verdict"].items() if k in _FIELDS}
                    self._verdicts[value["key"]] = Verdict(**known)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if self._lock is not None:
                    self._lock.release()
                raise UserError(
                    f"line {number} of {self.path} is damaged ({error})",
                    "remove that line, or the file to judge anew",
                ) from None


def identities(like: dict[str, Any], folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """The identities of all caches in a folder that say the same as ``like``, and perhaps more."""
    for path in sorted(_folder(folder).glob("*.jsonl")):
        with contextlib.suppress(ValueError, OSError), path.open("rb") as file:
            first = json.loads(file.readline())
            identity = first.get("identity") if isinstance(first, dict) else None
            if isinstance(identity, dict) and like.items() <= identity.items():
                yield identity


def _folder(folder: Path | None) -> Path:
    return folder or cache_dir() / "judgements"
