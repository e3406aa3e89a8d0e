"""Write a run so that a kill at any moment costs a unit of work and never a consistent folder.

(Two units where one is written while the next is computed; see ``background.py``.)

A unit's files are written under temporary names, flushed, renamed, and only then entered in the
manifest, which is replaced atomically. What the manifest doesn't name doesn't exist, and is removed
when the run is opened for writing again. Units are small so that little is lost; finished units are
merged into parts of about a thousand contexts so that a large run isn't a hundred thousand files.
"""

import copy
import errno
import json
import os
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ia_mech.errors import UserError
from ia_mech.run import integrity, layout
from ia_mech.run.card import card


class Tensors(NamedTuple):
    """What goes to one safetensors file. Row k of every tensor is of the k-th context; the metadata
    holds JSON, ``contexts`` (ids) and perhaps more."""

    tensors: dict[str, Tensor]
    metadata: dict[str, list]


class RunWriter:
    """The one writer of a run's folder; holds a lock on it until closed.

    One thread may add units while another one notes what happened.

    Use :meth:`create` for a new run and :meth:`resume` for one that is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changing = threading.RLock()  # what is in the manifest
        self._lock = FileLock(path / layout.LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise _written_by_another(path) from None
        try:
            self.record, self.manifest = integrity.read_record_and_manifest(path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, record: dict, conversations: Path) -> "RunWriter":
        """Start a run in a folder that doesn't exist yet, or is empty.

        Everything a run has from the start is put together in a scratch folder that is renamed, so
        the folder is a run or isn't there.

        Args:
            path: the run's folder.
            record: what goes to ``run.json``.
            conversations: the snapshot of the conversations, moved into the run. It lies in a
                folder of its own on the same file system, where the scratch folder is made too.

        Raises:
            UserError: another process was faster.
        """
        scratch = conversations.with_name(path.name + ".new")
        scratch.mkdir()
        integrity.write_json(scratch / layout.RUN, record)
        files = {
            layout.RUN: integrity.facts_of(scratch / layout.RUN),
            layout.CONVERSATIONS: _moved(conversations, scratch / layout.CONVERSATIONS),
        }
        part = {"kind": "conversations", "name": "conversations", "units": [], "contexts": 0}
        integrity.write_json(
            scratch / layout.MANIFEST,
            {
                "format": layout.FORMAT,
                "complete": False,
                "parts": [part | {"files": files}],
                "sessions": [],
            },
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.replace(scratch, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _written_by_another(path) from None
            raise
        integrity.fsync_folder(path.parent)
        return cls(path)

    @classmethod
    def resume(
        cls,
        path: Path,
        record: dict,
        conversations: Path | None = None,
        *,
        repair: bool = False,
        name_of: Callable[[str], str] = str,
    ) -> "RunWriter":
        """Open a run to go on with it.

        Args:
            path: the run's folder.
            record: what this run's ``run.json`` would be; it must agree with the one that is there.
            conversations: a snapshot of the same conversations, to repair the one that is there.
            repair: drop damaged parts, so that they are computed again.
            name_of: what a user calls a part of the identity, such as ``config.grid.seed``.

        Raises:
            UserError: another configuration or format, a damaged part, or another process writing.
        """
        writer = cls(path)
        try:
            there = integrity.without_folders(writer.record["identity"])  # older ones have them
            refuse_another(path, there, record["identity"], name_of)
            writer._drop_damaged(repair, conversations)
            refuse_other_plan(path, writer.record, writer.manifest, record)
            writer._remove_orphans()
        except BaseException:
            writer.close()
            raise
        return writer

    def close(self) -> None:
        """Give up the lock; the folder stays resumable."""
        self._lock.release()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # -- what is done -------------------------------------------------------------------------

    def done(self, kind: str) -> set[str]:
        """Names of the units of a kind (``responses`` or ``contexts``) that are on the disk."""
        return {unit for part in self._parts(kind) for unit in part["units"]}

    def count(self, kind: str) -> int:
        """How many conversations the finished units of a kind cover."""
        return sum(part["contexts"] for part in self._parts(kind))

    def read_responses(self, bucket: int | None = None) -> dict[int, dict]:
        """The responses written so far, by the order of their conversations.

        Args:
            bucket: those of this bucket, and perhaps others beside them; all if None.
        """
        return {
            row["order"]: row
            for part in self._parts("responses")
            if bucket is None or any(unit.startswith(f"{bucket}.") for unit in part["units"])
            for row in pq.read_table(self.path / layout.responses_file(part["name"])).to_pylist()
        }

    def start_session(self, about: dict) -> None:
        """Note in the manifest that a process began to write, and on what machine."""
        begun = {"begun": datetime.now(UTC).isoformat(timespec="seconds")}
        self.manifest["sessions"].append(begun | about)
        self._write_manifest()

    def note(self, key: str, value) -> None:
        """Add a fact, as it is now, to this session's entry in the manifest."""
        with self._changing:
            self.manifest["sessions"][-1][key] = copy.deepcopy(value)
            self._write_manifest()

    def finish_responses(self) -> None:
        """Merge what is small and mark the responses complete; other shards may read them then."""
        if not self.manifest.get("responses_complete"):
            self._merge("responses", rest=True)
            self.manifest["responses_complete"] = True
            self._write_manifest()

    def finish(self) -> None:
        """Merge what is small, write the dataset card unless there is one, and mark the run
        complete."""
        self._merge("contexts", rest=True)
        if not (self.path / layout.CARD).exists():  # whose text may have been edited
            text = card(self.record, self.count("contexts"))
            integrity.replace_file(self.path / layout.CARD, lambda file: _write_text(file, text))
        self.manifest["complete"] = True
        self._write_manifest()

    # -- units --------------------------------------------------------------------------------

    def add_responses(
        self, unit: str, rows: list[dict], backed_off: dict[str, int] | None = None
    ) -> None:
        """Write the responses of one unit; ``backed_off`` as for :meth:`add_contexts`."""
        table = pa.Table.from_pylist(rows, schema=layout.RESPONSES)

        def files(part: str) -> dict[str, pa.Table]:
            return {layout.responses_file(part): table}

        self._add("responses", unit, len(rows), files, backed_off)

    def add_contexts(
        self,
        unit: str,
        contexts: pa.Table,
        generations: pa.Table,
        header_logits: dict[str, Tensor] | None,
        residuals: Tensor,
        backed_off: dict[str, int] | None = None,
    ) -> None:
        """Write one unit of contexts.

        Args:
            unit: its name in the plan.
            contexts: one row per context.
            generations: its rows.
            header_logits: tensors with the contexts first, or None.
            residuals: ``[contexts, layers + 1, positions, d_model]``.
            backed_off: most ``rows`` that were decoded, or ``turns`` scored, together, where memory
                allowed fewer than were asked for.
        """

        def files(part: str) -> dict[str, pa.Table | Tensors]:
            ids = {"contexts": contexts["context_id"].to_pylist()}
            tables: dict[str, pa.Table | Tensors] = {
                layout.contexts_file(part): contexts,
                layout.generations_file(part): generations,
            }
            if header_logits is not None:
                tables[layout.header_logits_file(part)] = Tensors(header_logits, ids)
            for layer in range(residuals.shape[1]):
                kept = {"residuals": residuals[:, layer].contiguous().cpu()}
                names = {"positions": self.record["identity"]["positions"], **ids}
                tables[layout.residuals_file(layer, part)] = Tensors(kept, names)
            return tables

        self._add("contexts", unit, contexts.num_rows, files, backed_off)

    # -- files --------------------------------------------------------------------------------

    def _parts(self, kind: str) -> list[dict]:
        return [part for part in self.manifest["parts"] if part["kind"] == kind]

    def _small(self, kind: str) -> list[dict]:
        return [part for part in self._parts(kind) if part["contexts"] < layout.PART_CONTEXTS]

    def _new_name(self, kind: str) -> str:
        """A part's number is never used twice, so a merge can't overwrite what it reads."""
        numbers = self.manifest.setdefault("next", {})
        number = numbers.get(kind, 0)
        numbers[kind] = number + 1
        return f"{number:05d}"

    def _add(
        self, kind: str, unit: str, contexts: int, files, backed_off: dict[str, int] | None
    ) -> None:
        with self._changing:
            name = self._new_name(kind)
        written = {file: self._write_file(file, data) for file, data in files(name).items()}
        self._flush_folders(written)
        part = {"kind": kind, "name": name, "units": [unit], "contexts": contexts, "files": written}
        if backed_off:
            part["backed_off"] = {unit: backed_off}
        with self._changing:
            self.manifest["parts"].append(part)
            self._write_manifest()
            self._merge(kind)

    def _merge(self, kind: str, *, rest: bool = False) -> None:
        """Merge small parts into full ones, and with ``rest`` those left over too.

        A merged part has at least ``PART_CONTEXTS`` contexts, so it is never merged, and thus
        written, again; what is left over when the run is complete is the exception.
        """
        group: list[dict] = []
        for part in self._small(kind):
            group.append(part)
            if sum(p["contexts"] for p in group) >= layout.PART_CONTEXTS:
                self._merge_group(kind, group)
                group = []
        if rest and len(group) > 1:
            self._merge_group(kind, group)

    def _merge_group(self, kind: str, group: list[dict]) -> None:
        merged = self._joined(kind, self.path, group)
        kept = [part for part in self.manifest["parts"] if part not in group]
        self.manifest["parts"] = [*kept, merged]
        self._write_manifest()
        for part in group:
            for file in part["files"]:
                (self.path / file).unlink()

    def _joined(self, kind: str, root: Path, group: list[dict]) -> dict:
        """Parts of one kind written as one, which is yet to be entered in the manifest.

        ``root`` is where their files are.
        """
        name = self._new_name(kind)
        written = {}
        for file in group[0]["files"]:
            # The files of all parts are the same but for their folder and the part's number.
            place = file.removeprefix(group[0].get("folder", ""))
            pattern = place.replace(group[0]["name"], "{}")
            files = [part.get("folder", "") + pattern.format(part["name"]) for part in group]
            target = pattern.format(name)
            written[target] = self._write_file(target, _concatenated(root, files))
        self._flush_folders(written)
        joined = {
            "kind": kind,
            "name": name,
            "units": [unit for part in group for unit in part["units"]],
            "contexts": sum(part["contexts"] for part in group),
            "files": written,
        }
        backed_off = {k: v for part in group for k, v in part.get("backed_off", {}).items()}
        return joined | ({"backed_off": backed_off} if backed_off else {})

    def add_parts(self, kind: str, root: Path, parts: list[dict]) -> None:
        """Copy parts of another run, or of several, as full ones.

        Args:
            kind: ``responses`` or ``contexts``.
            root: the folder from which their files are named.
            parts: as the manifest has them; ``folder`` is what their names begin with, if anything.
        """
        group: list[dict] = []
        for at, part in enumerate(parts, start=1):
            group.append(part)
            if sum(p["contexts"] for p in group) >= layout.PART_CONTEXTS or at == len(parts):
                self.manifest["parts"].append(self._joined(kind, root, group))
                self._write_manifest()
                group = []

    def _write_file(self, file: str, data: pa.Table | Tensors) -> dict:
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".tmp")
        if isinstance(data, pa.Table):
            pq.write_table(data, scratch, compression="zstd")
        else:
            _save_tensors(data, scratch)
        return _moved(scratch, path)

    def _flush_folders(self, files: dict) -> None:
        # Also the folders that hold these folders, which may be new.
        for folder in {self.path / parent for file in files for parent in Path(file).parents}:
            integrity.fsync_folder(folder)

    def _write_manifest(self) -> None:
        integrity.write_json(self.path / layout.MANIFEST, self.manifest)

    def _drop_damaged(self, repair: bool, conversations: Path | None) -> None:
        whole = []
        for part in self.manifest["parts"]:
            problem = integrity.damage(self.path, part["files"], content=True)
            if problem is None:
                whole.append(part)
            elif not repair:
                raise UserError(
                    f"part {part['name']} of {self.path} is damaged: {problem}",
                    "add --repair to make it again",
                )
            elif part["kind"] == "conversations":
                if conversations is None:
                    raise UserError(
                        f"part {part['name']} of {self.path} is damaged: {problem}",
                        "remove the folder and sample again",
                    )
                facts = _moved(conversations, self.path / layout.CONVERSATIONS)
                part["files"][layout.CONVERSATIONS] = facts
                whole.append(part)
                self._write_manifest()
        if len(whole) < len(self.manifest["parts"]):
            self.manifest["parts"] = whole
            self.manifest["complete"] = self.manifest["responses_complete"] = False
            self._write_manifest()

    def _remove_orphans(self) -> None:
        named = {file for part in self.manifest["parts"] for file in part["files"]}
        for folder in ("responses", "contexts", "generations", "header_logits", "residuals"):
            for path in (self.path / folder).rglob("*"):
                if path.is_file() and path.relative_to(self.path).as_posix() not in named:
                    path.unlink()
        for name in (layout.RUN, layout.MANIFEST):  # which only the holder of the lock writes
            for path in self.path.glob(f"{name}*.tmp"):
                path.unlink()


class RunFollower(RunWriter):
    """In the place of a writer on the ranks that hold a model together with the one that writes:
    it reads what that one has written, and writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changing = threading.RLock()
        self.record, self.manifest = integrity.read_record_and_manifest(path)

    def close(self) -> None: ...

    def read_responses(self, bucket: int | None = None) -> dict[int, dict]:
        _, self.manifest = integrity.read_record_and_manifest(self.path)
        return super().read_responses(bucket)

    def finish_responses(self) -> None: ...

    def finish(self) -> None: ...

    def _add(self, *_) -> None: ...

    def _write_manifest(self) -> None: ...


def _write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _moved(scratch: Path, path: Path) -> dict:
    """Flush a file and give it its name; returns what the manifest says of it."""
    with open(scratch, "rb+") as handle:
        os.fsync(handle.fileno())
    facts = integrity.facts_of(scratch)
    os.replace(scratch, path)
    return facts


def _save_tensors(data: Tensors, path: Path) -> None:
    metadata = {name: json.dumps(value) for name, value in data.metadata.items()}
    try:
        save_file(data.tensors, path, metadata=metadata)
    except SafetensorError as error:  # also for a full disk, with the number in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _written_by_another(path: Path) -> UserError:
    return UserError(
        f"{path} is being written by another process", "wait for it, or give another --out"
    )


def _concatenated(root: Path, files: list[str]) -> pa.Table | Tensors:
    if files[0].endswith(".parquet"):
        return pa.concat_tables([pq.read_table(root / file) for file in files])
    merged: dict[str, list[Tensor]] = {}
    contexts: list[str] = []
    for file in files:
        with safe_open(root / file, framework="pt") as tensors:
            metadata = {name: json.loads(text) for name, text in tensors.metadata().items()}
            contexts += metadata["contexts"]
            for key in tensors.keys():  # noqa: SIM118 (not a dictionary)
                merged.setdefault(key, []).append(tensors.get_tensor(key))
    whole = {key: torch.cat(parts) for key, parts in merged.items()}
    return Tensors(whole, metadata | {"contexts": contexts})


def refuse_another(
    path: Path, there: dict, wanted: dict, name_of: Callable[[str], str] = str
) -> None:
    """Refuse to go on with a run of another identity.

    Args:
        path: the run's folder.
        there, wanted: both identities, or the same part of both.
        name_of: as for :meth:`RunWriter.resume`.

    Raises:
        UserError: they differ; it names all differences.
    """
    differing = integrity.differences(there, wanted)
    # What follows from the configuration is left out where that explains it.
    asked = {name: v for name, v in differing.items() if name.startswith("config.")}
    if differing:
        found = [f"{name_of(name)} {v}" for name, v in (asked or differing).items()]
        raise UserError(
            f"{path} holds another configuration: {', '.join(found)}",
            "give another --out, or the configuration that it holds",
        )


def refuse_other_plan(path: Path, there: dict, manifest: dict, wanted: dict) -> None:
    """Refuse to go on with an unfinished run whose units are not these.

    Raises:
        UserError: an older version of this package dealt the contexts into other buckets.
    """
    if not manifest["complete"] and there.get("buckets") != wanted.get("buckets"):
        raise UserError(
            f"{path} was begun by an older version, which batched its contexts otherwise",
            "give another --out, or go on with that version",
        )
