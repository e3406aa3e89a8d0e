"""Verdicts that were paid for, kept so that no one pays twice.

One append-only JSON-lines file per judge identity under ``cache/judgements/``: a changed rubric,
model or setting is another identity and so another file. A line is flushed to the disk before its
verdict is counted, so a kill loses at most what is in flight. One process writes at a time.
"""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ia_mech.embedded import cache_dir
from ia_mech.errors import UserError
from ia_mech.judge.verdict import Item, Verdict, identity_hash

_FIELDS = {field.name for field in fields(Verdict)}


class VerdictCache:
    """The verdicts of one judge. A context manager; holds a lock on the file while open.

    Args:
        identity: the judge's.
        folder: where the files lie; ``cache/judgements`` by default.

    Raises:
        UserError: another process writes the same file.
    """

    def __init__(self, identity: dict[str, Any], folder: Path | None = None) -> None:
        self._identity = identity
        self._judge = identity_hash(identity)
        self._file: int | None = None  # a new one begins with its first verdict
        folder = folder or cache_dir() / "judgements"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{self._judge}.jsonl"
        self._lock = FileLock(self.path.with_suffix(".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another process is judging with the same judge ({self.path})", "wait for it"
            ) from None
        self._verdicts: dict[str, Verdict] = {}
        if self.path.exists():
            self._read()
            self._open()

    def get(self, item: Item, repeat: int) -> Verdict | None:
        return self._verdicts.get(item.key(self._judge, repeat))

    def put(self, item: Item, repeat: int, verdict: Verdict) -> None:
        """Keep a verdict; when this returns it is on the disk."""
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
        self._lock.release()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if not os.fstat(self._file).st_size:  # new, or a kill left it without a whole line
            self._append({"identity": self._identity})

    def _append(self, value: dict) -> None:
        line = memoryview((json.dumps(value, ensure_ascii=False) + "\n").encode())
        while line:
            line = line[os.write(self._file, line) :]
        os.fsync(self._file)

    def _read(self) -> None:
        """Read what is there. A last line without its end was being written when a process died."""
        content = self.path.read_bytes()
        whole, _, rest = content.rpartition(b"\n")
        if rest:
            os.truncate(self.path, len(content) - len(rest))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                value = json.loads(line)
                if "key" in value:
                    known = {k: v for k, v in value["verdict"].items() if k in _FIELDS}
                    self._verdicts[value["key"]] = Verdict(**known)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._lock.release()
                raise UserError(
                    f"line {number} of {self.path} is damaged ({error})",
                    "remove that line, or the file to judge anew",
                ) from None
