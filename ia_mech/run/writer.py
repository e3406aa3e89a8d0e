"""Write a run part by part, so that a kill at any moment leaves a run to go on with.

A part's files are written under temporary names, flushed, renamed, and only then entered in the
manifest, which is replaced atomically. What no manifest names doesn't exist: an unfinished part is
computed again and written over what is there. Processes that share a run (its shards) have a
manifest each, in the same folder.
"""

import copy
import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ia_mech.errors import UserError
from ia_mech.run import integrity, layout
from ia_mech.run.card import card
from ia_mech.run.reader import Run

if TYPE_CHECKING:
    from torch import Tensor


class RunWriter:
    """The one writer of a manifest; holds a lock on it until closed. A context manager.

    The folder and ``run.json`` are made if they aren't there. Damaged parts of the manifest are
    dropped, so that they count as not done.

    Args:
        path: the run's folder.
        record: what ``run.json`` holds, without ``format``.
        shard: number (from 1) and count of the processes that share the run.
        name_of: what a user calls a part of the identity, such as ``settings.samples``.

    Attributes:
        path: the folder.
        record: ``run.json``.
        damaged: what was wrong with each part that was dropped, a line each.

    Raises:
        UserError: the folder holds another run, other parts are planned, another process writes the
            same manifest, or a file is damaged.
    """

    def __init__(
        self,
        path: Path,
        record: dict[str, Any],
        shard: tuple[int, int] = (1, 1),
        name_of: Callable[[str], str] = str,
    ) -> None:
        self.path, self._shard = path, shard
        wanted = json.loads(json.dumps({"format": layout.FORMAT, **record}))  # lists, not tuples
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path / layout.lock_file(shard))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{path} is being written by another process", "wait for it, or give another --out"
            ) from None
        try:
            if not (path / layout.RUN).exists():
                # Another shard may do the same at this moment, and writes the same.
                integrity.write_json(path / layout.RUN, wanted)
                integrity.fsync_folder(path.parent)
            self.record, run = integrity.read_record(path)
            self._file = path / layout.manifest_file(shard)
            self._manifest: dict[str, Any] = {"format": layout.FORMAT, "run": run}
            self._manifest |= {"parts": [], "sessions": []}
            if self._file.is_file():
                self._manifest = integrity.read_manifest(self._file, run)
            refuse_another(path, self.record, wanted, name_of)
            self.damaged = self._drop_damaged()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others write."""
        self._lock.release()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is there ------------------------------------------------------------------------

    def finished_parts(self, kind: str) -> dict[str, int]:
        """Names of the parts that are whole, of all shards, and how many contexts each has.

        Args:
            kind: ``responses`` or ``contexts``.
        """
        return {part["name"]: part["contexts"] for part in Run(self.path).parts(kind)}

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """When, on what machine and with what notes processes wrote this manifest."""
        return self._manifest["sessions"]

    def start_session(self, facts: dict[str, Any]) -> None:
        """Note in the manifest that a process began to write, and on what machine."""
        begun = {"begun": datetime.now(UTC).isoformat(timespec="seconds")}
        self.sessions.append(begun | facts)
        self._write_manifest()

    def note(self, name: str, value: Any) -> None:
        """Add a fact, as it is now, to this session's entry in the manifest."""
        self.sessions[-1][name] = copy.deepcopy(value)
        self._write_manifest()

    # -- parts --------------------------------------------------------------------------------

    def add_responses(
        self, name: str, rows: list[dict[str, Any]], batch_rows: int | None = None
    ) -> None:
        """Write a part of responses; ``batch_rows`` as for :meth:`add_contexts`."""
        files = {}
        if rows:
            table = pa.Table.from_pylist(rows, schema=layout.RESPONSES)
            file = layout.responses_file(name)
            files[file] = self._write_table(file, table)
        self._add("responses", name, len(rows), files, batch_rows)

    def add_contexts(
        self,
        name: str,
        contexts: pa.Table,
        generations: pa.Table,
        header_logits: "dict[str, Tensor] | None",
        residuals: "Tensor | None",
        batch_rows: int | None = None,
    ) -> None:
        """Write a part of contexts; one without contexts has no files.

        Args:
            name: of the part.
            contexts: one row per context, in the run's order.
            generations: their rows.
            header_logits: tensors with the contexts first, or None.
            residuals: ``[contexts, layers + 1, positions, d_model]``.
            batch_rows: most rows that were decoded together, where memory allowed fewer than were
                asked for.
        """
        files = {}
        if contexts.num_rows:
            ids = {"contexts": contexts["context_id"].to_pylist()}
            generations = generations.sort_by([(key, "ascending") for key in layout.TURN_KEYS])
            for file, table in (
                (layout.contexts_file(name), contexts),
                (layout.generations_file(name), generations),
            ):
                files[file] = self._write_table(file, table)
            if header_logits is not None:
                file = layout.header_logits_file(name)
                files[file] = self._write_tensors(file, header_logits, ids)
            if residuals is not None:
                names = {"positions": self.record["identity"]["positions"], **ids}
                for layer in range(residuals.shape[1]):
                    file = layout.residuals_file(layer, name)
                    kept = {"residuals": residuals[:, layer].contiguous().cpu()}
                    files[file] = self._write_tensors(file, kept, names)
        self._add("contexts", name, contexts.num_rows, files, batch_rows)

    def finish(self) -> None:
        """Write the dataset card if the run is complete now, unless there is one."""
        run = Run(self.path)
        file = self.path / layout.CARD
        if run.complete and not file.exists():  # its text may have been edited
            text = card(run.record, run.counts["contexts"])
            integrity.replace_file(file, lambda scratch: scratch.write_text(text, encoding="utf-8"))

    # -- files --------------------------------------------------------------------------------

    def _add(
        self, kind: str, name: str, contexts: int, files: dict[str, Any], batch_rows: int | None
    ) -> None:
        # Also the folders that hold these folders, which may be new.
        for folder in {self.path / parent for file in files for parent in Path(file).parents}:
            integrity.fsync_folder(folder)
        part = {"kind": kind, "name": name, "contexts": contexts, "files": files}
        if batch_rows is not None:
            part["batch_rows"] = batch_rows
        self._manifest["parts"].append(part)
        self._write_manifest()

    def _write_table(self, file: str, table: pa.Table) -> dict[str, Any]:
        return self._write(file, lambda path: pq.write_table(table, path, compression="zstd"))

    def _write_tensors(
        self, file: str, tensors: "dict[str, Tensor]", names: dict[str, Any]
    ) -> dict[str, Any]:
        """A safetensors file. Row k of every tensor is of the k-th context of ``names``.

        The names are one JSON text: safetensors writes several in a random order, and two writers
        of one part would differ.
        """
        metadata = {layout.METADATA: json.dumps(names)}
        return self._write(file, lambda path: _save(tensors, path, metadata))

    def _write(self, file: str, write: Callable[[Path], None]) -> dict[str, Any]:
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = layout.scratch_file(path, self._shard)
        write(scratch)
        integrity.fsync_file(scratch)
        facts = integrity.size_and_hash(scratch)
        os.replace(scratch, path)
        return facts

    def _write_manifest(self) -> None:
        integrity.write_json(self._file, self._manifest)

    def _drop_damaged(self) -> list[str]:
        whole, damaged = [], []
        for part in self._manifest["parts"]:
            problem = integrity.damage(self.path, part["files"], content=True)
            if problem is None:
                whole.append(part)
            else:
                damaged.append(f"part {part['name']} of the {part['kind']} is damaged: {problem}")
        if damaged:
            self._manifest["parts"] = whole
            self._write_manifest()
        return damaged


def _save(tensors: "dict[str, Tensor]", path: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # also for a full disk, with the number in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def refuse_another(
    path: Path, there: dict[str, Any], wanted: dict[str, Any], name_of: Callable[[str], str] = str
) -> None:
    """Refuse to go on with a run of another identity, or of other parts.

    Args:
        path: the run's folder.
        there, wanted: both records, as in ``run.json``; of their identities perhaps only what is
            known.
        name_of: as for :class:`RunWriter`.

    Raises:
        UserError: they differ; it names all differences.
    """
    differing = integrity.differences(there["identity"], wanted["identity"])
    # What follows from the settings is left out where they explain it.
    settings = {name: v for name, v in differing.items() if name.startswith("settings.")}
    differing = (
        settings
        or differing
        or integrity.differences({"parts": there["parts"]}, {"parts": wanted["parts"]})
    )
    if differing:
        found = [
            f"{name_of(name)} {values}"
            for name, values in differing.items()
            if not name.startswith("conversations.")
        ]
        if len(found) < len(differing):
            found.append("the conversations have changed since")
        raise UserError(
            f"{path} holds another configuration: {', '.join(found)}",
            "give another --out, or the configuration that it holds",
        )
