"""One result: what rates, agreement, probes and experiments return, write, print and report.

::

    RUN/results/<name>/
      result.json           question, sentence, control, tables, notes, provenance; written last
      estimates.parquet     every number with its interval, one row each
      <figure>.png .svg .pdf     <table>.parquet     what else an analysis keeps

:func:`write` makes that folder, :func:`read` reads it, :func:`show` prints a result. The report
shows what :func:`read` returns and computes nothing.
"""

import json
import os
import re
import shutil
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from ia_mech.cli import expanded, one_line, program, shell_word
from ia_mech.console import COMMANDS
from ia_mech.display import save_figure
from ia_mech.errors import UserError
from ia_mech.estimates import estimate_of, p_value, write_parquet
from ia_mech.run.integrity import fsync_folder, read_json
from ia_mech.run.layout import RUN, refuse_unwritable
from ia_mech.stats import LEAST_SHOWN
from ia_mech.untrusted import escape_unseen, visible

if TYPE_CHECKING:
    from rich.console import Console

    from ia_mech.run import Run

RESULT, ESTIMATES = "result.json", "estimates.parquet"
SHARE = "share"  # given in place of decimals for a share of a whole that is itself noisy
WIDEST = 1.0  # widest interval with which such a share is shown
NOTES, NOTE_LENGTH = 2, 140  # most notes that the terminal shows by itself, and letters of one
_SENTENCE_END = re.compile(r"(?<=[\w)\]*][.?!]) (?=[A-Z])")
_VERBATIM = ("question", "sentence", "control", "notes", "about")  # fields, in result.json too


@dataclass(frozen=True)
class Table:
    """A table as it is shown, made of texts."""

    title: str
    columns: list[str]
    rows: list[list[str]]  # cells; the first one names the row
    legend: str = ""  # what the columns hold, where their names don't say it
    full: bool = False  # the page folds it away


@dataclass(frozen=True)
class Result:
    """What an analysis found.

    Attributes:
        name: its folder's name, such as ``rates-builtin``.
        question: what was asked, in one sentence.
        sentence: what was found, with its interval; else the effect that would have been found.
        control: what the finding is compared with, and how that came out.
        estimates: every number, one row each (:func:`ia_mech.estimates.frame_of`).
        tables: what the report shows. The first answers the question: the terminal shows it alone,
            unless ``--full`` is given.
        figures: the file's stem → matplotlib figure, or its SVG in a result that was read.
            Files have dashes for the spaces of a stem.
        notes: what a reader has to know.
        about: where it comes from, as JSON: ``kind`` (``rates``, ``probe``, …), what
            :func:`about_runs` gives, ``settings``, ``judge`` and ``gate`` where there is one.
        data: the file's stem → further table, kept as Parquet.
        files: the name of any other file → the function that writes it.
    """

    name: str
    question: str
    sentence: str
    control: str
    estimates: pd.DataFrame = field(repr=False)
    tables: Sequence[Table] = field(default=(), repr=False)
    figures: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, pd.DataFrame] = field(default_factory=dict, repr=False)
    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """The result in a notebook: question, sentence, control, and figures if it was read."""
        words = (self.question, self.sentence, control_of(self))
        texts = "".join(f"<p>{escape(visible(text))}</p>" for text in words)
        svgs = (svg for svg in self.figures.values() if isinstance(svg, bytes))
        return texts + "".join(
            f'<img src="data:image/svg+xml;base64,{b64encode(svg).decode()}">' for svg in svgs
        )


def about_runs(runs: "Sequence[Run]", labellers: Sequence[str] = ()) -> dict[str, Any]:
    """What :attr:`Result.about` says of runs: which they are, which of them were sampled although
    the engine's check failed, and whose labels were used.

    For judges and annotators (``labellers``) it holds a digest of their present labels, by run, so
    that a reader can tell whether labels were replaced since.
    """
    about: dict[str, Any] = {
        "runs": [run.name for run in runs],
        "identities": [run.identity_digest for run in runs],
        "ignored_checks": {run.name: run.ignored_check for run in runs if run.ignored_check},
    }
    if labellers:
        about["labellers"] = list(labellers)
        about["labels"] = {run.identity_digest: run.labels.digest(labellers) for run in runs}
    return about


def table_of(
    title: str,
    estimates: pd.DataFrame,
    columns: Mapping[str, tuple[str, int | str]],
    index: Sequence[str] = ("dataset", "temperature"),
    *,
    key: str = "quantity",
    rows: str = "rows",
    pooled: str = "sampled",
    legend: str = "",
    full: bool = False,
) -> Table:
    """Estimates as a table: a line per combination of ``index``, a column per kind of estimate.

    Args:
        title, legend, full: as in :class:`Table`.
        estimates: as :func:`ia_mech.estimates.frame_of` makes them, in the order of the lines.
        columns: value of ``key`` → head, and decimals or a format such as ``+.2f``, as
            :func:`cell_of` takes them.
        index: the columns that name a line. A column with one value is left out, unless it is the
            last.
        key: the column that tells kinds of estimates apart.
        rows: head of the column that counts the rows of a line's first estimate.
        pooled: the name of a line over several temperatures.
    """
    kept = estimates[estimates[key].isin(list(columns))]
    shown = {of: head for of, head in columns.items() if of in set(kept[key])}
    named = [name for name in index[:-1] if kept[name].nunique(dropna=False) > 1] + [*index[-1:]]
    lines = []
    for values, own in kept.groupby(named, sort=False, dropna=False):
        by_key = {getattr(row, key): row for row in own.itertuples(index=False)}
        cells = [
            cell_of(by_key[of], digits) if of in by_key else "" for of, (_, digits) in shown.items()
        ]
        labels = zip(values, named, strict=True)
        names = [label_of(value, name, pooled=pooled) for value, name in labels]
        count = next(by_key[of].rows for of in shown if of in by_key)
        lines.append([*names, str(count), *cells])
    if any(cell.endswith(("query)", "queries)")) for line in lines for cell in line):
        few = f"Fewer than {LEAST_SHOWN} queries: no interval, but how many queries there are."
        legend = f"{legend} {few}".strip()
    heads = [{"temperature": "T", "term": "what"}.get(name, name) for name in named]
    return Table(title, [*heads, rows, *(head for head, _ in shown.values())], lines, legend, full)


def label_of(value: Any, column: str, pooled: str = "sampled") -> str:
    """A value that names a line, as text. A missing temperature is shown as ``pooled``, any other
    missing value as ``all``."""
    if not isinstance(value, str) and pd.isna(value):
        return pooled if column == "temperature" else "all"
    if column == "temperature" and value == 0:
        return "greedy"
    return one_line(value, 60) if isinstance(value, str) else f"{value:g}"


def cell_of(row: Any, digits: int | str = 2) -> str:
    """An estimate as text, with its interval and the corrected p of its test.

    Few queries give no interval (:meth:`ia_mech.stats.Estimate.text`). A :data:`SHARE` with an
    interval wider than :data:`WIDEST` is shown as ``can't be told``. An estimate from no query is a
    plain number.

    Args:
        row: a line of a table of estimates.
        digits: decimals, a format such as ``+.2f``, or :data:`SHARE`.
    """
    if digits == SHARE:
        digits = 2
        if row.high - row.low > WIDEST:
            return "can't be told"
    number = f"{row.value:{digits if isinstance(digits, str) else f'.{digits}f'}}"
    if not row.sources and not np.isnan(row.value):
        return number
    estimate, events = estimate_of(row), getattr(row, "events", pd.NA)
    text = estimate.text(digits, counts=(events, row.rows) if pd.notna(events) else None)
    return text if estimate.few or np.isnan(row.p_holm) else f"{text} {p_value(row.p_holm)}"


def folder_of(run: Path, name: str) -> Path:
    """Where a run keeps a result."""
    return run / "results" / name


def write(result: Result, folder: Path) -> None:
    """Write a result into a folder in place of an earlier one, ``result.json`` last.

    So all files that a ``result.json`` names are from one analysis. Other files in the folder, such
    as parts that an experiment has computed, stay.

    Raises:
        UserError: the folder holds a result of another kind, or a folder has the name of a file;
            nothing is replaced then.
        OSError: it can't be written.
    """
    there = _record(folder) if (folder / RESULT).exists() else None
    if there is not None and there["about"].get("kind") != result.about.get("kind"):
        raise UserError(
            f"{folder} holds a result of {there['about'].get('kind')}", "name another folder"
        )
    scratch = folder / ".new"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        write_parquet(result.estimates, scratch / ESTIMATES, dict(result.about))
        for stem, frame in result.data.items():
            write_parquet(frame, scratch / f"{stem}.parquet", dict(result.about))
        for name, fill in result.files.items():
            fill(scratch / name)
        for stem, figure in result.figures.items():
            save_figure(figure, scratch, _file_stem(stem))
        written = sorted(path.name for path in scratch.iterdir())
        record = {
            **{name: getattr(result, name) for name in _VERBATIM},
            "tables": [asdict(table) for table in result.tables],
            "figures": list(result.figures),
            "files": written,
        }
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
        (scratch / RESULT).write_text(escape_unseen(text) + "\n", encoding="utf-8")
        for name in (*written, RESULT):
            if (folder / name).is_dir():
                raise UserError(f"{folder / name} is a folder", "remove it, or name another folder")
        (folder / RESULT).unlink(missing_ok=True)
        for name in () if there is None else set(there["files"]) - set(written):
            (folder / Path(name).name).unlink(missing_ok=True)
        for name in (*written, RESULT):
            os.replace(scratch / name, folder / name)
        fsync_folder(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _file_stem(figure: str) -> str:
    """How the files of a figure are called."""
    return Path(figure).name.replace(" ", "-")


def read(folder: str | Path) -> Result:
    """The result that :func:`write` wrote into a folder; a notebook shows it with its figures.

    Raises:
        UserError: there is none, or it is damaged.
    """
    folder = expanded(folder)
    record = _record(folder)
    try:
        return Result(
            name=folder.name,
            tables=[Table(**table) for table in record["tables"]],
            figures={
                stem: (folder / f"{_file_stem(stem)}.svg").read_bytes()
                for stem in record["figures"]
            },
            estimates=pq.read_table(folder / ESTIMATES).to_pandas(),
            **{name: record[name] for name in _VERBATIM},
        )
    except (OSError, pa.ArrowException, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None


def kind_of(folder: Path) -> str | None:
    """The kind of the result in a folder; None if the folder holds no result.

    Raises:
        UserError: it is damaged.
    """
    return _record(folder)["about"].get("kind") if (folder / RESULT).exists() else None


def folders_of(run: Path, identity: str = "", places: Collection[Path] = ()) -> list[Path]:
    """The folders with results on a run: those in its ``results/``, and those in ``places`` whose
    names begin with the run's (``cache/<run>-reaction``) and whose results name this ``identity``.

    Raises:
        UserError: one is damaged.
    """
    folders = [file.parent for file in sorted(run.glob(f"results/*/{RESULT}"))]
    for place in dict.fromkeys(path.resolve() for path in places):
        for folder in sorted(file.parent for file in place.glob(f"*/{RESULT}")):
            beside = folder.name.startswith(f"{run.resolve().name}-")
            if beside and identity in _record(folder)["about"].get("identities", []):
                folders.append(folder)
    return folders


def refuse_place(folder: Path, kind: str | None = None, inside: Path | None = None) -> None:
    """Refuse a folder that a result can't go to.

    Args:
        folder: the folder that ``--out`` names, or the usual one.
        kind: the result's kind; None if it may replace any result.
        inside: the run's own folder for this result, if there is one.

    Raises:
        UserError: the folder is a run or lies in one, can't be written to, holds files but no
            result, or holds a result of another kind.
    """
    named = inside is None or folder.resolve() != inside.resolve()
    for place in (folder.resolve(), *folder.resolve().parents) if named else ():
        if (place / RUN).is_file():
            where = "is a run" if place == folder.resolve() else f"lies inside the run {place}"
            raise UserError(
                f"--out {folder} {where}, where only the run's own files belong",
                "name a folder elsewhere, or leave --out out: the result then goes to results/ in "
                "the run",
            )
    refuse_unwritable(folder)
    owner = kind_of(folder)
    if kind is not None and owner not in (None, kind):
        raise UserError(f"{folder} holds results of {owner}", "name another folder with --out")
    files = (path for path in folder.glob("*") if path.is_file())
    if owner is None and any(files):
        raise UserError(f"{folder} holds files but no result", "name another folder with --out")


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = read_json(folder / RESULT)
        if not isinstance(record["about"], dict) or not isinstance(record["files"], list):
            raise ValueError("not a result")
        return record
    except FileNotFoundError:
        raise UserError(f"{folder} holds no result", _maker(folder)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, error) from None


def _maker(folder: Path) -> str:
    """What to do where a folder holds no result: the command that writes it, if its name tells."""
    run = folder.parent.parent
    if folder.parent.name == "results" and (run / RUN).is_file():
        fitting = [one for one in COMMANDS if f"{folder.name}-".startswith(f"{one}-")]
        if fitting:
            return f"make it with: {program()} {max(fitting, key=len)} {shell_word(run)}"
    return "name a folder in RUN/results"


def _damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"the result in {folder} is damaged ({error})", "remove it, and analyse again")


def control_of(result: Result) -> str:
    """The control of a result, which begins with that word."""
    alone = result.control.startswith("Judge's control ")
    return f"{'' if alone else 'Control: '}{result.control}"


def sentences_of(text: str) -> list[str]:
    """The sentences of a text. Each is shown on a line of its own."""
    return _SENTENCE_END.split(text)


def show(result: Result, screen: "Console", *, full: bool = False, rest: str = "--full") -> None:
    """Print a result: its sentence, one line of its control, one table and at most :data:`NOTES`
    short notes; or all of these if ``full``. Each sentence stands on a line of its own.

    ``rest`` is the flag that shows the others: the last line is ``--full: 5 more tables, 1 note, 2
    sentences`` (of the control).
    """
    control = sentences_of(one_line(control_of(result))) if result.control else []
    told, tables, notes = control, result.tables, result.notes
    if not full:
        told = control[:1]
        tables = tables[:1]
        notes = [note for note in notes if len(note) <= NOTE_LENGTH][:NOTES]
    for sentence in sentences_of(one_line(result.sentence)):
        screen.print(sentence, style="bold", soft_wrap=True, markup=False)
    for sentence in told:
        screen.print(sentence, soft_wrap=True, markup=False)
    for table in tables:
        print_table(screen, table)
    lines = [
        f"warning: {name} was sampled although the engine's check failed ({problem})."
        for name, problem in result.about.get("ignored_checks", {}).items()
    ]
    lines += [f"note: {one_line(note)}" for note in notes]
    kinds: tuple[tuple[str, Sequence, Sequence], ...] = (
        ("more table", result.tables, tables),
        ("note", result.notes, notes),
        ("sentence", control, told),
    )
    left = [(len(every) - len(shown), kind) for kind, every, shown in kinds]
    if more := [f"{count} {kind}{'s' * (count > 1)}" for count, kind in left if count]:
        lines.append(f"{rest}: {', '.join(more)}")
    if lines:
        screen.print()
    for line in lines:
        screen.print(line, soft_wrap=True, markup=False)


def print_table(screen: "Console", table: Table) -> None:
    """Print an empty line and a table. The screen is made wide enough to cut off no interval."""
    shown = RichTable(title=Text(table.title, "bold"), title_justify="left")
    for at, name in enumerate(table.columns):
        shown.add_column(Text(name), justify="right" if at else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    needed = Measurement.get(screen, screen.options.update(width=1000), shown).maximum
    screen.width = max(screen.width, needed)
    screen.print()
    screen.print(shown, soft_wrap=True)
    if table.legend:
        screen.print(table.legend, soft_wrap=True, markup=False)
