"""What judges and annotators say of a run's user turns: ``judgements/`` and ``annotations/``.

::

    judgements/<judge>.parquet       one row per user turn and per decoy
    annotations/<annotator>.parquet  one row per annotated user turn or decoy
    annotations/sheets/<sheet>.json  which row of a blind sheet is which user turn

A row with a ``decoy`` is a label of the turn after the context ``shown``, which it did not follow
(:mod:`ia_mech.judge.decoys`); such rows are read apart.

Each Parquet file carries a record of who made it (the judge's identity, the annotator's sheet) and
of which run in its metadata under ``ia_mech``. Files are replaced whole: the old one or the new
one, never a half.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ia_mech.cli import shell_word
from ia_mech.errors import UserError
from ia_mech.run import integrity

KEY = ("context_id", "temperature", "sample")  # names a user turn within its run

JUDGEMENTS = pa.schema(
    [
        ("context_id", pa.string()),
        ("temperature", pa.float64()),
        ("sample", pa.int32()),
        ("category", pa.string()),
        ("genuine", pa.bool_()),
        ("status", pa.string()),
        ("rationale", pa.string()),
        ("scores", pa.string()),
        ("mode", pa.string()),
        ("error", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("cost", pa.float64()),
        ("cached", pa.bool_()),
        ("item", pa.string()),
        ("grounding", pa.float64()),
        ("fitted", pa.bool_()),
        ("answer", pa.string()),
        ("reasoning", pa.string()),
        ("served", pa.string()),
        ("decoy", pa.string()),
        ("shown", pa.string()),
    ]
)

ANNOTATIONS = pa.schema(
    [
        ("context_id", pa.string()),
        ("temperature", pa.float64()),
        ("sample", pa.int32()),
        ("category", pa.string()),
        ("genuine", pa.bool_()),
        ("note", pa.string()),
        ("sheet", pa.string()),
        ("stratum", pa.string()),
        ("inclusion_probability", pa.float64()),
        ("decoy", pa.string()),
        ("shown", pa.string()),
    ]
)
CATEGORICAL = ("context_id", "category", "status", "decoy", "shown")

ROWS_AT_A_TIME = 20_000  # as Python objects
_RECORD = b"ia_mech"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class LabelledRun(Protocol):
    """What labels have to know of their :class:`ia_mech.run.Run`."""

    path: Path

    @property
    def identity_digest(self) -> str: ...
    @property
    def turns_digest(self) -> str: ...


class Labels:
    """The labels of one run. Reached as ``Run.labels``.

    A file records the run and the texts of the turns that it labels (``Run.turns_digest``). Both
    are compared when it is read, and nothing else has to be: what was written whole is of them.
    """

    def __init__(self, run: LabelledRun) -> None:
        self.path = run.path
        self._run = run

    @property
    def judges(self) -> list[str]:
        """Names of the judges whose verdicts are there."""
        return _stems(self.path / "judgements", ".parquet")

    @property
    def annotators(self) -> list[str]:
        """Names of the annotators whose labels are there."""
        return _stems(self.path / "annotations", ".parquet")

    def digest(self, names: Sequence[str]) -> str:
        """A hash of all that judges and annotators of these names say: 16 hex digits.

        A result keeps it, so that it can be told whether its labels have been replaced since.
        """
        those = [("judgements", name) for name in self.judges if name in names]
        those += [("annotations", name) for name in self.annotators if name in names]
        content = hashlib.sha256()
        for kind, name in those:
            content.update(f"{kind}/{name}\0".encode())
            content.update(self._file(kind, name).read_bytes())
        return content.hexdigest()[:16]

    @property
    def sheets(self) -> list[str]:
        """Names of the blind sheets that were exported."""
        return _stems(self.path / "annotations" / "sheets", ".json")

    def judgements(self, judge: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Verdicts of one judge, a row per user turn; columns as :data:`JUDGEMENTS`.

        If ``columns`` are chosen, those of :data:`CATEGORICAL` among them are categorical.

        All are of turns after their own contexts; :meth:`decoys` has the others.

        ``genuine`` is nullable: None for ``cannot_assess`` and where ``status`` isn't ``judged``.

        Raises:
            UserError: no such judge has judged this run, or its file can't be read.
        """
        return self._read("judgements", judge, columns, decoys=False)

    def annotations(self, annotator: str) -> pd.DataFrame:
        """Labels of one annotator; columns as :data:`ANNOTATIONS`.

        Raises:
            UserError: no such annotator, or a file that can't be read.
        """
        return self._read("annotations", annotator, None, decoys=False)

    def decoys(
        self, name: str, kind: str = "judgements", columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Labels of turns after contexts that they didn't follow.

        Args:
            name: whose.
            kind: ``judgements`` or ``annotations``.
            columns: as for :meth:`judgements`.

        Raises:
            UserError: as :meth:`judgements` and :meth:`annotations`.
        """
        return self._read(kind, name, columns, decoys=True)

    def record(self, kind: str, name: str) -> dict[str, Any]:
        """Who made a file of ``judgements`` or ``annotations``, and how.

        Raises:
            UserError: there is no such file, or it can't be read.
        """
        return self._content(kind, name, [])[1]

    def write_judgements(
        self, judge: str, rows: Iterable[dict[str, Any]], record: dict[str, Any]
    ) -> Path:
        """Replace the verdicts of a judge; ``record`` says who it is (its identity, no keys)."""
        return self._write("judgements", judge, rows, JUDGEMENTS, record)

    def write_annotations(
        self, annotator: str, rows: list[dict[str, Any]], record: dict[str, Any]
    ) -> Path:
        """Replace the labels of an annotator."""
        return self._write("annotations", annotator, rows, ANNOTATIONS, record)

    def write_sheet(self, name: str, key: dict[str, Any]) -> Path:
        """Keep which row of an exported sheet is which user turn."""
        path = self.path / "annotations" / "sheets" / f"{check_name(name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = key | {"of": [self._run.identity_digest, name], "turns": self._run.turns_digest}
        integrity.write_json(path, record)
        return path

    def sheet(self, name: str) -> dict[str, Any]:
        """The key of an exported sheet.

        Raises:
            UserError: no such sheet, or a key that can't be read.
        """
        if name not in self.sheets:
            raise UserError(
                f"{self.path} has no sheet {name!r}",
                f"there are: {', '.join(self.sheets) or 'none'}",
            )
        path = self.path / "annotations" / "sheets" / f"{name}.json"
        try:
            key = integrity.read_json(path)
            if key.pop("of", None) != [self._run.identity_digest, name]:
                raise ValueError("it is of another sheet")
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error})", "export another sheet") from None
        self._check_turns(path, key, "export and annotate a new sheet")
        return key

    # -- files --------------------------------------------------------------------------------

    def _file(self, kind: str, name: str) -> Path:
        return self.path / kind / f"{check_name(name)}.parquet"

    def _read(
        self,
        kind: str,
        name: str,
        columns: Sequence[str] | None,
        *,
        decoys: bool,
    ) -> pd.DataFrame:
        table = self._content(kind, name, columns, decoys=decoys)[0]
        schema = JUDGEMENTS if kind == "judgements" else ANNOTATIONS
        wanted = schema.names if columns is None else columns
        missing = [name for name in wanted if name not in table.column_names]
        if missing:
            raise self._unreadable(kind, name, f"no column {', '.join(missing)}")
        frame = table.to_pandas()
        if columns is not None:
            frame = frame[list(columns)]
        return frame.astype({"genuine": "boolean"} if "genuine" in frame else {})

    def _content(
        self, kind: str, name: str, columns: Sequence[str] | None, *, decoys: bool = False
    ) -> tuple[pa.Table, dict[str, Any]]:
        """A file's rows of decoys or of the others, with these columns or all; and its record."""
        self._check_there(kind, name)
        try:
            file, decoy = self._file(kind, name), pc.field("decoy")
            record = json.loads(pq.read_schema(file).metadata[_RECORD])
            chosen: dict[str, Any] = {"filters": decoy.is_valid() if decoys else decoy.is_null()}
            if columns is not None:
                chosen |= {"columns": list(columns), "read_dictionary": list(CATEGORICAL)}
            table = pq.read_table(file, **chosen)
            run, whose = record.pop("run"), record.pop("name")
        except (pa.ArrowException, OSError, ValueError, LookupError) as error:
            raise self._unreadable(kind, name, error) from None
        except (TypeError, AttributeError):  # no metadata, or something else in it
            raise self._unreadable(kind, name, "it has no record of who wrote it") from None
        if run != self._run.identity_digest:
            raise self._unreadable(kind, name, "it is of another run")
        if whose != name:
            raise self._unreadable(kind, name, f"it holds the {kind} of {whose!r}")
        self._check_turns(file, record, f"make them again: {self.command(kind, name)}")
        return table, record

    def _check_turns(self, path: Path, record: dict[str, Any], remedy: str) -> None:
        turns = self._run.turns_digest
        if record.pop("turns", turns) != turns:
            raise UserError(
                f"{path} is of other turns: {self.path} was sampled again since", remedy
            )

    def _check_there(self, kind: str, name: str) -> None:
        there = self.judges if kind == "judgements" else self.annotators
        if name not in there:
            known = f"give one of {', '.join(there)}, or " if there else ""
            raise UserError(
                f"{self.path} has no {kind} of {name!r}",
                f"{known}run: {self.command(kind, name).removesuffix(' --replace')}",
            )

    def _unreadable(self, kind: str, name: str, problem: Exception | str) -> UserError:
        return UserError(
            f"{self._file(kind, name)} can't be read ({problem})",
            f"remove it and run: {self.command(kind, name)}",
        )

    def check_name(self, kind: str, name: str) -> None:
        """Refuse a name for a file of this kind.

        Raises:
            UserError: it can't be a file's, or a judge is to be named like an annotator.
        """
        check_name(name)
        others = self.annotators if kind == "judgements" else self.judges
        if name in others:
            what = "an annotator" if kind == "judgements" else "a judge"
            raise UserError(f"{self.path} has labels of {what} named {name!r}", "give another name")

    def command(self, kind: str, name: str) -> str:
        """The command that writes such a file, also over one that is there."""
        path = shell_word(self.path)
        if kind != "judgements":
            return f"python -m ia_mech.annotate import {path} FILE --annotator {name} --replace"
        if name == "rules":
            return f"python -m ia_mech.judge run {path} --replace"
        # Without its --judge, the rules judge would give its verdicts that name.
        return f"python -m ia_mech.judge run {path} --judge … --name {name} --replace"

    def _write(
        self,
        kind: str,
        name: str,
        rows: Iterable[dict[str, Any]],
        schema: pa.Schema,
        record: dict[str, Any],
    ) -> Path:
        path = self._file(kind, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"run": self._run.identity_digest, "turns": self._run.turns_digest, "name": name}
        text = json.dumps(record | about, sort_keys=True)
        schema = schema.with_metadata({_RECORD: text})

        def write(scratch: Path) -> None:
            with pq.ParquetWriter(scratch, schema) as file:
                for part in _parts(rows):
                    file.write_table(pa.Table.from_pylist(part, schema=schema))

        integrity.replace_file(path, write)
        return path


def _parts(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rows = iter(rows)
    while part := list(islice(rows, ROWS_AT_A_TIME)):
        yield part


def positions(turns: pd.DataFrame, labels: pd.DataFrame) -> np.ndarray:
    """``[labels]`` which of ``Run.turns`` each label is of; -1 where none."""
    keys, wanted = (pd.MultiIndex.from_frame(frame[list(KEY)]) for frame in (turns, labels))
    return keys.get_indexer(wanted)


def check_name(name: str) -> str:
    """A judge's, annotator's or sheet's name that can be a file's.

    Raises:
        UserError: it can't.
    """
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise UserError(
            f"{name!r} can't name a file",
            "use letters, digits, dots, dashes and underscores (ASCII, at most 100)",
        )
    return name


def _stems(folder: Path, suffix: str) -> list[str]:
    """Names of a folder's files; none that can't have been written here (``._rules.parquet``)."""
    stems = [path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}") if path.is_file()]
    return sorted(stem for stem in stems if _NAME.fullmatch(stem))
