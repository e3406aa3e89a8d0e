"""Write a run part by part, so that a run can be resumed whenever it was killed.

A part's files are written under temporary names, flushed, renamed, and only then entered in the
part's manifest. A file that no manifest names counts as absent: its part is computed again and the
file is replaced. The manifest of a damaged part stays until the part is whole again. Several
processes may work on one run. A process locks the part that it computes, and the system releases
the lock if the process dies.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ia_mech.errors import UserError
from ia_mech.run import integrity, layout
from ia_mech.run.dataset_card import dataset_card
from ia_mech.run.reader import Run

if TYPE_CHECKING:
    from torch import Tensor


class RunWriter:
    """Writes parts that it has locked. A context manager, which releases its locks at the end.

    The folder and ``run.json`` are made if they aren't there.

    Args:
        path: the run's folder.
        record: the content of ``run.json``, without ``format``.
        name_of: gives the user's word for a key of the identity, such as ``settings.samples``.

    Attributes:
        path: the folder.
        record: ``run.json``.

    Raises:
        UserError: the folder holds another run, other parts are planned, or a file is damaged.
    """

    def __init__(
        self, path: Path, record: dict[str, Any], name_of: Callable[[str], str] = str
    ) -> None:
        self.path = path
        self.record, self._run = _begin_run(path, record)
        refuse_another(path, self.record, record, name_of)
        self._session: dict[str, Any] = {}
        self._damaged: dict[tuple[str, str], dict[str, Any]] = {}  # manifests of such parts
        self._locks: dict[tuple[str, str], FileLock] = {}

    def close(self) -> None:
        """Release all locks, so that other processes can compute these parts."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_session(self, facts: dict[str, Any]) -> None:
        """Set the session that the manifests of later parts hold: ``facts`` and the time now."""
        self._session = {"begun": datetime.now(UTC).isoformat(timespec="milliseconds")} | facts

    # -- parts --------------------------------------------------------------------------------

    def finished_parts(self, kind: str) -> dict[str, int]:
        """The parts that are whole: name → number of contexts."""
        parts = {part["name"]: part for part in Run(self.path).parts(kind)}
        damaged = self._damaged.get
        return {n: part["contexts"] for n, part in parts.items() if part != damaged((kind, n))}

    def find_damage(self, kind: str, names: Collection[str]) -> list[str]:
        """Find those of these parts that are damaged: they count as not done from now on.

        The hashes of tensors, which may be large, are compared in a complete run alone.

        Returns:
            A line for each, which says what is wrong.

        Raises:
            UserError: a folder lacks the files of all parts. It was moved, or its disk is away.
        """
        run, problems = Run(self.path), []
        done = [part for part in run.parts(kind) if part["name"] in names]
        integrity.refuse_lost_folders(self.path, done)
        for part in done:
            files = part["files"]
            hashed = files if run.complete else layout.texts_of(files)
            problem = integrity.damage(self.path, files, content=False)
            if problem := problem or integrity.damage(self.path, hashed, content=True):
                self._damaged[kind, part["name"]] = part
                problems.append(f"part {part['name']} of the {kind} is damaged: {problem}")
        return problems

    def claim(self, kind: str, name: str) -> bool:
        """Lock a part that isn't done, to compute it. The lock is released when the part is added.

        Returns:
            Whether the part is locked now. If not, it is done, or another process computes it.
        """
        if not self._lock(kind, name):
            return False
        if self._is_done(kind, name):
            self._give_up(kind, name)
            return False
        return True

    def _is_done(self, kind: str, name: str) -> bool:
        """Whether a part is there, and isn't the one that was found to be damaged."""
        file = self.path / layout.manifest_file(kind, name)
        if not file.is_file():
            return False
        found = self._damaged.get((kind, name))
        return found is None or found != integrity.read_manifest(file, self._run)

    def _lock(self, kind: str, name: str) -> bool:
        """Whether this process has the part's lock now."""
        if (kind, name) not in self._locks:
            file = self.path / layout.lock_file(kind, name)
            file.parent.mkdir(exist_ok=True)
            lock = FileLock(file)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
            self._locks[kind, name] = lock
        return True

    def _give_up(self, kind: str, name: str) -> None:
        lock = self._locks.pop((kind, name))
        Path(lock.lock_file).unlink(missing_ok=True)  # a process that waits finds the part done
        lock.release()

    def keep_batches(self, name: str, limit: int, batches: list[Any]) -> None:
        """Keep the draws of a part of responses that isn't whole yet.

        Args:
            name: of the part.
            limit: most draws of a batch, which decides which draws each batch has.
            batches: all that are finished: of each draw its token ids, and how it ended.
        """
        file = self.path / layout.batches_file(name)
        file.parent.mkdir(exist_ok=True)
        integrity.write_json(file, {"limit": limit, "batches": batches})

    def kept_batches(self, name: str, limit: int) -> list[Any]:
        """What :meth:`keep_batches` kept with this limit; nothing if the file is damaged."""
        try:
            kept = integrity.read_json(self.path / layout.batches_file(name))
        except (OSError, ValueError):
            return []
        return kept["batches"] if kept.get("limit") == limit else []

    def add_responses(
        self,
        name: str,
        rows: list[dict[str, Any]],
        batch_rows: int | None = None,
        captured: bool = False,
    ) -> None:
        """Write a part of responses; how it was computed as for :meth:`add_contexts`."""
        self._refuse_unclaimed("responses", name)
        files = {}
        if rows:
            table = pa.Table.from_pylist(rows, schema=layout.RESPONSES)
            files = self._write_table("responses", name, table)
        self._add("responses", name, len(rows), files, batch_rows, captured)
        (self.path / layout.batches_file(name)).unlink(missing_ok=True)

    def add_contexts(
        self,
        name: str,
        contexts: pa.Table,
        generations: pa.Table,
        header_logits: "Tensor | None",
        residuals: "Tensor | None",
        batch_rows: int | None = None,
        captured: bool = False,
    ) -> None:
        """Write a part of contexts; a part without contexts has no files.

        Args:
            header_logits: ``[contexts, vocab]``, or None.
            residuals: ``[contexts, layers + 1, positions, d_model]``.
            batch_rows: the largest number of rows decoded together, where memory allowed fewer than
                were asked for.
            captured: whether its rows were decoded by captured steps.
        """
        self._refuse_unclaimed("contexts", name)
        files: dict[str, Any] = {}
        if contexts.num_rows:
            ids = {"contexts": contexts["context_id"].to_pylist()}
            generations = generations.sort_by([(key, "ascending") for key in layout.TURN_KEYS])
            files |= self._write_table("contexts", name, contexts)
            files |= self._write_table("generations", name, generations)
            if header_logits is not None:
                kept = {layout.LOGITS: header_logits}
                files |= self._write_tensors("header_logits", name, kept, ids)
            if residuals is not None:
                names = {"positions": self.record["identity"]["positions"], **ids}
                kept = {
                    layout.layer_name(layer): states.contiguous().cpu()
                    for layer, states in enumerate(residuals.unbind(1))
                }
                files |= self._write_tensors("residuals", name, kept, names)
        self._add("contexts", name, contexts.num_rows, files, batch_rows, captured)

    def add_states(
        self,
        name: str,
        tensors: "dict[str, Tensor]",
        contexts: int,
        turns: list[list[Any]],
        tokens: list[str],
    ) -> None:
        """Write what was captured at these tokens of a part of so many contexts, a row for each of
        these turns (their :data:`ia_mech.run.labels.KEY`)."""
        self._refuse_unclaimed(layout.STATES, name)
        names = {"tokens": tokens, "turns": turns}
        files = self._write_tensors(layout.STATES, name, tensors, names)
        self._add(layout.STATES, name, contexts, files, None, False)

    def finish(self) -> None:
        """Write the dataset card if the run is complete, has a context and no card yet."""
        run = Run(self.path)
        file = self.path / layout.CARD
        if (
            run.complete and run.counts["contexts"] and not file.exists()
        ):  # a user may have edited the card
            text = dataset_card(run.record, run.policies)
            integrity.replace_file(file, lambda scratch: scratch.write_text(text, encoding="utf-8"))

    # -- files --------------------------------------------------------------------------------

    def _refuse_unclaimed(self, kind: str, name: str) -> None:
        if not self.claim(kind, name):
            raise RuntimeError(f"part {name} of the {kind} is done, or another process computes it")

    def _add(
        self,
        kind: str,
        name: str,
        contexts: int,
        files: dict[str, Any],
        batch_rows: int | None,
        captured: bool,
    ) -> None:
        # The folders above may be new, too.
        for folder in {self.path / parent for file in files for parent in Path(file).parents}:
            integrity.fsync_folder(folder)
        part = {"format": layout.FORMAT, "run": self._run, "kind": kind, "name": name}
        part |= {"contexts": contexts, "files": files, "session": self._session}
        part |= {"batch_rows": batch_rows} if batch_rows else {}
        part |= {"captured": True} if captured else {}
        integrity.write_json(self.path / layout.manifest_file(kind, name), part)
        integrity.fsync_folder(self.path)
        self._damaged.pop((kind, name), None)
        self._give_up(kind, name)

    def _write_table(self, folder: str, part: str, table: pa.Table) -> dict[str, Any]:
        file = layout.part_file(folder, part)
        return self._write(file, lambda path: pq.write_table(table, path, compression="zstd"))

    def _write_tensors(
        self, folder: str, part: str, tensors: "dict[str, Tensor]", names: dict[str, Any]
    ) -> dict[str, Any]:
        """A safetensors file. Row k of every tensor belongs to the k-th context of ``names``.

        The names are one JSON text: safetensors writes several metadata in a random order, and two
        files of the same part would then differ.
        """
        metadata = {layout.METADATA: json.dumps(names)}
        file = layout.part_file(folder, part)
        return self._write(file, lambda path: _save(tensors, path, metadata))

    def _write(self, file: str, write: Callable[[Path], None]) -> dict[str, Any]:
        """Write a file whole; returns its name with the size and hash for the manifest."""
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.tmp")
        write(scratch)
        integrity.fsync_file(scratch)
        facts = integrity.size_and_hash(scratch)
        os.replace(scratch, path)
        return {file: facts}


def _save(tensors: "dict[str, Tensor]", path: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # raised for a full disk, too, whose number is in the text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def kept_draws(path: Path) -> int:
    """How many responses are kept of parts that aren't whole (:meth:`RunWriter.keep_batches`)."""
    kept = (json.loads(file.read_bytes()) for file in path.glob(layout.batches_file("*")))
    return sum(len(batch) for part in kept for batch in part["batches"])


def _begin_run(path: Path, record: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Write ``run.json`` unless there is one. Of several processes that begin a run, one writes it.

    Returns:
        The content of the file, and the hash of its bytes.
    """
    path.mkdir(parents=True, exist_ok=True)
    file = path / layout.RUN
    if not file.exists():
        lock = FileLock(path / f"{layout.RUN}.lock")
        with lock:
            if not file.exists():
                integrity.write_json(file, {"format": layout.FORMAT, **record})
                integrity.fsync_folder(path.parent)
            Path(lock.lock_file).unlink(missing_ok=True)  # a process that waits finds the file
    return integrity.read_record(path)


def refuse_another(
    path: Path,
    there: dict[str, Any],
    wanted: dict[str, Any],
    name_of: Callable[[str], str] = str,
    local_model: bool = False,
) -> None:
    """Refuse to resume a run that has another identity, or other parts.

    The same weights are the same model, whatever their folder is called.

    Args:
        path: the run's folder.
        there: ``run.json``.
        wanted: the record asked for, as far as it is known. Its identity may lack keys.
        name_of: as for :class:`RunWriter`.
        local_model: the model is a folder or a file. Its name decides nothing then, as long as the
            hash of its weights isn't known.

    Raises:
        UserError: the records differ. The error names all differences.
    """
    known: dict[str, Any] = json.loads(json.dumps(wanted["identity"]))  # lists, not tuples
    before = {name: there["identity"].get(name) for name in known}
    differing = integrity.changed_values(before, known)
    if "model.weights_hash" not in differing if "model" in known else local_model:
        differing = {
            k: v for k, v in differing.items() if k not in ("settings.model", "model.name")
        }
    # Where settings differ, they explain what else differs, which is left out.
    settings = {name: v for name, v in differing.items() if name.startswith("settings.")}
    parts = {"parts": there["parts"]}, {"parts": wanted.get("parts", there["parts"])}
    differing = settings or differing or integrity.changed_values(*parts)
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
