"""Verdicts that were paid for, so that none is paid for twice.

One append-only JSON-lines file per judge identity under ``cache/judgements/``: a changed rubric,
model or setting is another identity and so another file. A line is flushed to the disk before its
verdict is counted, so a kill loses at most what is in flight. One process writes at a time. A line
that can't be read counts as none: its verdict is requested again.
"""

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ia_mech.errors import UserError
from ia_mech.judge.verdict import Item, Verdict, identity_hash
from ia_mech.models.embedded import cache_dir


class VerdictCache:
    """The verdicts of one judge, by default under ``cache/judgements``. A context manager; holds a
    lock on the file while open. Several threads may use it. In a folder that can't be written to it
    is ``read_only``: it has the verdicts that are there, and keeps no more.

    Raises:
        UserError: another process writes the same file.
    """

    def __init__(self, identity: dict[str, Any], folder: Path | None = None) -> None:
        self._judge = identity_hash(identity)
        self.path = (folder or cache_dir() / "judgements") / f"{self._judge}.jsonl"
        self._verdicts: dict[str, Verdict] = {}
        self._writing = threading.Lock()
        self._lock = FileLock(self.path.with_suffix(".lock"), thread_local=False)
        self.read_only = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except Timeout:
            raise UserError(
                f"another process is judging with the same judge ({self.path})", "wait for it"
            ) from None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            self.read_only = True
            with contextlib.suppress(OSError):
                self._load(self.path.read_bytes())
            return
        content = self.path.read_bytes()
        whole, _, rest = content.rpartition(b"\n")
        # A last line without its end was being written when a process died.
        os.ftruncate(self._file, len(content) - len(rest))
        self._load(whole)
        if not os.fstat(self._file).st_size:
            self._append({"identity": identity})

    def get(self, item: Item) -> Verdict | None:
        return self._verdicts.get(item.key(self._judge))

    def put(self, item: Item, verdict: Verdict) -> None:
        """Keep a verdict; when this returns it is on the disk, unless the cache is read-only."""
        key = item.key(self._judge)
        if self.read_only:
            return
        with self._writing:
            self._append({"key": key, "verdict": verdict.to_json()})
            self._verdicts[key] = verdict

    def __enter__(self) -> "VerdictCache":
        return self

    def __exit__(self, *_) -> None:
        if not self.read_only:
            with self._writing:
                os.close(self._file)
                self._file = -1  # not the number of a file that is opened later
        self._lock.release()

    def _append(self, value: dict) -> None:
        before = os.fstat(self._file).st_size
        line = memoryview(json.dumps(value).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except BaseException:  # a full disk, an interrupt: the next line must begin a line
            os.ftruncate(self._file, before)
            raise

    def _load(self, content: bytes) -> None:
        for line in content.splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                value = json.loads(line)
                self._verdicts[value["key"]] = Verdict.from_json(value["verdict"])
