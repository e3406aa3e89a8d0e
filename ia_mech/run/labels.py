"""The labels of a run's user turns, in ``judgements/`` and ``annotations/``.

A *judge* is a program or a model that labels turns; an *annotator* is a person who does.

::

    judgements/<judge>.parquet       one row per user turn and per decoy
    annotations/<annotator>.parquet  one row per annotated user turn or decoy
    annotations/sheets/<sheet>.json  which row of a blind sheet is which user turn

In a row with a ``decoy``, the turn was shown after the context ``shown``, which it did not follow
(:mod:`ia_mech.judge.decoys`). Only :meth:`Labels.decoys` reads these rows.
:mod:`ia_mech.run.labelled` puts labels beside the run's turns.

The metadata of each Parquet file hold a record of who made it (the judge's identity, or the
annotator's sheet) under ``ia_mech``. A file is replaced whole, so that readers never see a half.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ia_mech.cli import shell_word
from ia_mech.errors import UserError
from ia_mech.run import integrity

KEY = ("context_id", "temperature", "sample", "sampled_tokens")  # names a user turn within its run

_TURN = [
    ("context_id", pa.string()),
    ("temperature", pa.float64()),
    ("sample", pa.int32()),
    ("sampled_tokens", pa.int32()),
    ("category", pa.string()),
    ("follow_up", pa.bool_()),
]
_DECOY = [("decoy", pa.string()), ("shown", pa.string())]
JUDGEMENTS = pa.schema(
    [
        *_TURN,
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
        ("fitted", pa.bool_()),
        ("answer", pa.string()),
        ("reasoning", pa.string()),
        ("served", pa.string()),
        *_DECOY,
    ]
)

ANNOTATIONS = pa.schema(
    [
        *_TURN,
        ("note", pa.string()),
        ("sheet", pa.string()),
        ("stratum", pa.string()),
        ("inclusion_probability", pa.float64()),
        *_DECOY,
    ]
)
CATEGORICAL = ("context_id", "category", "status", "decoy", "shown")

ROWS_AT_A_TIME = 20_000  # as Python objects
_RECORD = b"ia_mech"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


BUILT_IN = "builtin"  # the name of the built-in judge


class LabelledRun(Protocol):
    path: Path

    @property
    def turns_digest(self) -> str: ...

    @property
    def labels(self) -> "Labels": ...


def choose_judge(runs: Sequence[LabelledRun], judge: str | None) -> str:
    """Whose labels count: those of the ``judge`` that is named, else of the only one that labelled
    the runs. Of several that labelled all of them it is the built-in judge, which a line on stderr
    then says.

    Raises:
        UserError: a run isn't judged, or one has to be named.
    """
    for run in runs:
        if not run.labels.judges:
            raise UserError(
                f"{run.path} has not been judged",
                f"run: ia-mech judge run {shell_word(run.path)}; in Python: ia_mech.label(run)",
            )
    if judge is not None:
        return judge
    names = sorted({name for run in runs for name in run.labels.judges})
    if len(names) == 1:
        return names[0]
    there = f"{runs[0].path} has" if len(runs) == 1 else "the runs have"
    there, how = f"{there} labels by {', '.join(names)}", '--judge NAME, or judge="NAME"'
    if any(BUILT_IN not in run.labels.judges for run in runs):
        raise UserError(there, f"name the judge that counts: {how}")
    print(f"{there}: the built-in judge's count ({how}, for another's)", file=sys.stderr)
    return BUILT_IN


class Labels:
    """The labels of one run. Reached as ``Run.labels``.

    A file of labels holds a hash of the texts that it labels (``Run.turns_digest``). The hash is
    compared when the file is read.
    """

    def __init__(self, run: LabelledRun) -> None:
        self.path = run.path
        self._run = run

    def __repr__(self) -> str:
        return f"Labels({str(self.path)!r}: judges {self.judges}, annotators {self.annotators})"

    @property
    def judges(self) -> list[str]:
        """Names of the judges whose verdicts are there."""
        return _stems(self.path / "judgements", ".parquet")

    @property
    def annotators(self) -> list[str]:
        """Names of the annotators whose labels are there."""
        return _stems(self.path / "annotations", ".parquet")

    @property
    def sheets(self) -> list[str]:
        """Names of the blind sheets that were exported."""
        return _stems(self.path / "annotations" / "sheets", ".json")

    def flag(self, judge: str) -> str:
        """What a printed command needs to read this judge's labels: empty for the only judge."""
        return f" --judge {shell_word(judge)}" if self.judges != [judge] else ""

    def digest(self, names: Sequence[str]) -> str:
        """A hash of all labels of these judges and annotators: 16 hex digits.

        A result keeps the hash, which shows later whether the labels have been replaced.
        """
        those = [("judgements", name) for name in self.judges if name in names]
        those += [("annotations", name) for name in self.annotators if name in names]
        content = hashlib.sha256()
        for kind, name in those:
            content.update(f"{kind}/{name}\0".encode())
            content.update(self._file(kind, name).read_bytes())
        return content.hexdigest()[:16]

    def judgements(self, judge: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """What one judge said of turns after their own contexts, as it was written.

        Args:
            judge: its name.
            columns: some columns of :data:`JUDGEMENTS`; those of :data:`CATEGORICAL` are then
                categorical. All columns, as texts, if not given.

        Raises:
            UserError: no judge of this name has judged this run, or its file can't be read.
        """
        return self._read("judgements", judge, columns, decoys=False)

    def annotations(self, annotator: str) -> pd.DataFrame:
        """Labels of one annotator, with the columns of :data:`ANNOTATIONS`.

        Raises:
            UserError: there is no such annotator, or the file can't be read.
        """
        return self._read("annotations", annotator, None, decoys=False)

    def decoys(
        self, name: str, kind: str = "judgements", columns: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Labels of turns that were shown after contexts which they didn't follow.

        Args:
            name: of the judge or annotator.
            kind: ``judgements`` or ``annotations``.
            columns: as for :meth:`judgements`.

        Raises:
            UserError: as :meth:`judgements` and :meth:`annotations`.
        """
        return self._read(kind, name, columns, decoys=True)

    def record(self, kind: str, name: str) -> dict[str, Any]:
        """The record of who made a file of ``judgements`` or ``annotations``, and how.

        Raises:
            UserError: there is no such file, or it can't be read.
        """
        there = self.judges if kind == "judgements" else self.annotators
        if name not in there:
            known = f"give one of {', '.join(there)}, or " if there else ""
            raise UserError(
                f"{self.path} has no {kind} of {name!r}",
                f"{known}run: {self.command(kind, name).removesuffix(' --replace')}",
            )
        file = self._file(kind, name)
        try:
            record = dict(json.loads((pq.read_schema(file).metadata or {})[_RECORD]))
            turns, whose = record.pop("turns"), record.pop("name")
            if whose != name:
                raise ValueError(f"it holds the {kind} of {whose!r}")
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            raise self._unreadable(kind, name, error) from None
        if turns != self._run.turns_digest:
            remedy = f"make them again: {self.command(kind, name)}"
            raise UserError(
                f"{file} labels other turns: {self.path} was sampled again since", remedy
            )
        return record

    def write_judgements(
        self, judge: str, rows: Iterable[dict[str, Any]], record: dict[str, Any]
    ) -> Path:
        """Replace the verdicts of a judge; ``record`` is the judge's identity, without API keys."""
        return self._write("judgements", judge, rows, JUDGEMENTS, record)

    def write_annotations(
        self, annotator: str, rows: list[dict[str, Any]], record: dict[str, Any]
    ) -> Path:
        """Replace the labels of an annotator."""
        return self._write("annotations", annotator, rows, ANNOTATIONS, record)

    def remove(self, kind: str, name: str) -> None:
        """Remove the labels of a judge (``judgements``) or annotator (``annotations``); also a file
        that can't be read.

        Raises:
            UserError: there are none.
        """
        there = self.judges if kind == "judgements" else self.annotators
        if name not in there:
            known = f"choose from: {', '.join(there)}" if there else "there is nothing to remove"
            raise UserError(f"{self.path} has no {kind} of {name!r}", known)
        self._file(kind, name).unlink()

    def write_sheet(self, name: str, key: dict[str, Any]) -> Path:
        """Keep which row of an exported sheet is which user turn."""
        path = self.path / "annotations" / "sheets" / f"{check_name(name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        integrity.write_json(path, key | {"turns": self._run.turns_digest})
        return path

    def sheet(self, name: str) -> dict[str, Any]:
        """The key of an exported sheet, by its name among :attr:`sheets`.

        Raises:
            UserError: the key can't be read, or belongs to other turns.
        """
        path = self.path / "annotations" / "sheets" / f"{name}.json"
        try:
            key = integrity.read_json(path)
            turns = key.pop("turns")
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error})", "export another sheet") from None
        if turns != self._run.turns_digest:
            raise UserError(
                f"{path} belongs to other turns: {self.path} was sampled again since",
                "export and annotate a new sheet",
            )
        return key

    def check_name(self, kind: str, name: str) -> None:
        """Refuse a name for a file of this kind.

        Raises:
            UserError: no file can have the name, or a judge and an annotator would share it.
        """
        check_name(name)
        others = self.annotators if kind == "judgements" else self.judges
        if name in others:
            what = "an annotator" if kind == "judgements" else "a judge"
            raise UserError(f"{self.path} has labels by {what} named {name!r}", "give another name")

    def command(self, kind: str, name: str) -> str:
        """The command that writes such a file, also over one that is there."""
        path = shell_word(self.path)
        if kind != "judgements":
            return f"ia-mech annotate import {path} FILE --annotator {name} --replace"
        if name == BUILT_IN:
            return f"ia-mech judge run {path} --replace"
        # Without its --judge, the built-in judge would give its verdicts that name.
        return f"ia-mech judge run {path} --judge … --name {name} --replace"

    # -- files --------------------------------------------------------------------------------

    def _file(self, kind: str, name: str) -> Path:
        return self.path / kind / f"{check_name(name)}.parquet"

    def _read(
        self, kind: str, name: str, columns: Sequence[str] | None, *, decoys: bool
    ) -> pd.DataFrame:
        """The rows of a file that are decoys, or those that are not, with these columns or all."""
        self.record(kind, name)
        schema = JUDGEMENTS if kind == "judgements" else ANNOTATIONS
        wanted, dictionaries = schema.names if columns is None else list(columns), []
        if columns is not None:
            dictionaries = list(CATEGORICAL)
        decoy = pc.field("decoy")
        rows = decoy.is_valid() if decoys else decoy.is_null()
        try:
            table = pq.read_table(
                self._file(kind, name), columns=wanted, filters=rows, read_dictionary=dictionaries
            )
            frame = table.to_pandas()[wanted]
        except (pa.ArrowException, OSError, LookupError) as error:
            raise self._unreadable(kind, name, error) from None
        return frame.astype({"follow_up": "boolean"} if "follow_up" in frame else {})

    def _unreadable(self, kind: str, name: str, problem: Exception) -> UserError:
        return UserError(
            f"{self._file(kind, name)} can't be read ({problem})",
            f"remove it and run: {self.command(kind, name)}",
        )

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
        about = {"turns": self._run.turns_digest, "name": name}
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


def check_name(name: str) -> str:
    """The name of a judge, annotator or sheet, once it is known that a file can have it.

    Raises:
        UserError: no file can have the name.
    """
    if not _NAME.fullmatch(name) or len(name) > 100:
        raise UserError(
            f"{name!r} can't name a file",
            "use letters, digits, dots, dashes and underscores (ASCII, at most 100)",
        )
    return name


def _stems(folder: Path, suffix: str) -> list[str]:
    """Names of a folder's label files; other files, such as ``._rules.parquet``, are left out."""
    stems = [path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}") if path.is_file()]
    return sorted(stem for stem in stems if _NAME.fullmatch(stem))
