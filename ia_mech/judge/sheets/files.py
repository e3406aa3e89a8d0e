"""The files of a blind sheet: CSV for spreadsheets and JSON lines, written, and read back warily.

A sheet goes through programs that nobody here controls. So its CSV has a byte order mark (Excel
reads UTF-8 only with one) and quotes everything; on the way back commas, semicolons and tabs, any
quoting and any line ends are accepted. Texts are a model's and not to be trusted: a cell that a
spreadsheet would run as a formula gets an apostrophe in front (:func:`inert`). Nothing reads texts
back, so the apostrophe needn't be told from the model's own.
"""

import contextlib
import csv
import io
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ia_mech.errors import UserError
from ia_mech.run import layout

_NEEDED = ("item", "category")
_FORMULA = frozenset("=+-@")
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class SheetRow:
    """What is read of one row of a filled-in sheet; ``where`` names it in an error."""

    where: str
    item: str
    category: str
    note: str


def inert(text: str) -> str:
    """A text as a cell that no spreadsheet takes for a formula.

    One that begins with ``= + - @`` (also full-width, or behind white space) or with white space
    other than a blank is given an apostrophe in front, as OWASP advises against CSV injection.
    Control characters, which some programs stop at, become visible. A file opened with another
    separator than its own escapes any such care.
    """
    text = _NO_TEXT.sub("�", text.replace("\r\n", "\n").replace("\r", "\n"))
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])
    return f"'{text}" if first in _FORMULA or text.startswith(("\t", "\n")) else text


def csv_bytes(columns: Sequence[str], rows: Iterable[dict[str, object]]) -> bytes:
    """A CSV file: UTF-8 with byte order mark, comma, everything quoted, every text inert."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
    writer.writerow(columns)
    for row in rows:
        cells = (row.get(column) for column in columns)
        writer.writerow(["" if cell is None else inert(str(cell)) for cell in cells])
    return file.getvalue().encode("utf-8-sig")


def jsonl_bytes(columns: Sequence[str], rows: Iterable[dict[str, object]]) -> bytes:
    """JSON lines with the texts as they are."""
    lines = (json.dumps({c: row[c] for c in columns}, ensure_ascii=False) for row in rows)
    return "".join(line + "\n" for line in lines).encode()


class NewFiles:
    """Files that appear together or not at all. A context manager: whole when it ends well.

    Args:
        contents: path -> bytes.
        replace: whether files that are there may be replaced.

    Raises:
        UserError: a file is there and may not be replaced, or its folder isn't.
    """

    def __init__(self, contents: dict[Path, bytes], *, replace: bool = False) -> None:
        for path in contents:
            if not path.parent.is_dir():
                raise UserError(f"there is no folder {path.parent}", "make it first")
            if path.is_dir() or (path.exists() and not replace):
                raise UserError(f"{path} exists", "give another --out, or remove it")
        self._contents, self._replace = contents, replace

    def __enter__(self) -> None:
        self._scratch = {path: path.with_name(path.name + ".tmp") for path in self._contents}
        try:
            for path, content in self._contents.items():
                with open(self._scratch[path], "wb") as handle:
                    handle.write(content)
                    handle.flush()
                    os.fsync(handle.fileno())
        except BaseException:
            self._remove()
            raise

    def __exit__(self, kind, *_) -> None:
        placed: list[Path] = []
        try:
            if kind is None:
                for path, scratch in self._scratch.items():
                    os.replace(scratch, path)
                    placed.append(path)
                    layout.fsync_folder(path.parent)
        except BaseException:
            for path in placed if not self._replace else ():
                path.unlink(missing_ok=True)
            raise
        finally:
            self._remove()

    def _remove(self) -> None:
        for scratch in self._scratch.values():
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def read_sheet(path: Path) -> list[SheetRow]:
    """The rows of a filled-in sheet, CSV or JSON lines by its suffix; empty lines are left out.

    Raises:
        UserError: neither of the two, not UTF-8, not what the suffix says, or a column is missing.
    """
    if path.suffix.lower() not in (".csv", ".tsv", ".jsonl"):
        raise UserError(f"{path} is neither .csv nor .jsonl", "save the sheet as CSV UTF-8")
    if not path.is_file():
        raise UserError(f"there is no file {path}", "give the sheet that was filled in")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path} isn't UTF-8 (byte {content[error.start]:#04x} in line {line})",
            "save it as CSV UTF-8, or fill in the JSON lines",
        ) from None
    rows = _json_rows(path, text) if path.suffix.lower() == ".jsonl" else _csv_rows(path, text)
    return list(rows)


def _csv_rows(path: Path, text: str) -> Iterator[SheetRow]:
    first = next(iter(text.splitlines()), "")
    delimiter = max(",;\t", key=first.count)
    limit = csv.field_size_limit(2**31 - 1)  # a process-wide setting; responses may be long
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = [cell.strip().lower() for cell in next(reader, [])]
        _check_columns(path, header)
        for number, cells in enumerate(reader, 2):
            if not any(cell.strip() for cell in cells):
                continue
            where = f"row {number} of {path} (ends in line {reader.line_num})"
            if any(cell.strip() for cell in cells[len(header) :]):
                raise UserError(
                    f"{where} has {len(cells)} cells under {len(header)} headings",
                    "correct it, or begin again from the exported sheet",
                )
            # Some programs leave out empty cells at the end of a row.
            row = dict.fromkeys(header, "") | dict(zip(header, cells, strict=False))
            yield _row(where, row)
    except csv.Error as error:
        raise UserError(
            f"{path} isn't CSV at line {reader.line_num} ({error})",
            "save it as CSV UTF-8, or fill in the JSON lines",
        ) from None
    finally:
        csv.field_size_limit(limit)


def _json_rows(path: Path, text: str) -> Iterator[SheetRow]:
    # Not splitlines(): a text may hold U+2028, which JSON needn't escape.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} isn't JSON ({error})", "correct that line") from None
        if not isinstance(value, dict):
            raise UserError(f"{where} isn't a JSON object", "correct that line")
        _check_columns(where, value)
        for column in (*_NEEDED, "note"):
            if not isinstance(value.get(column, ""), str | None):
                raise UserError(f"{where}: {column} isn't a text", "put it in quotes, or leave ''")
        yield _row(where, value)


def _check_columns(where: Path | str, columns: Iterable[str]) -> None:
    columns = list(columns)
    for name in _NEEDED:
        if columns.count(name) != 1:
            problem = f"has {columns.count(name)} columns" if name in columns else "has no column"
            raise UserError(
                f"{where} {problem} {name!r}",
                f"keep the columns {' and '.join(_NEEDED)} of the exported sheet",
            )


def _row(where: str, row: dict) -> SheetRow:
    cells = ((row.get(column) or "").strip() for column in (*_NEEDED, "note"))
    # JSON can hold half a surrogate pair, which no file of ours can.
    return SheetRow(where, *(cell.encode(errors="replace").decode() for cell in cells))
