"""Files of rows, and rows that Python has.

A file is JSON Lines, JSON, Parquet, CSV or TSV, perhaps packed; a folder holds shards of one kind.
What a row means is for ``formats``.
"""

import codecs
import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ia_mech.cli import refuse_missing
from ia_mech.data.values import jsonable, list_of
from ia_mech.errors import UserError
from ia_mech.run.integrity import replace_file
from ia_mech.untrusted import parse_json

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")  # of files with rows
KINDS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_WRAPPERS = ("data", "rows", "examples", "instances", "samples", *_SPLITS)  # of a list of rows
AS_JSON = "write one JSON object per line, in UTF-8 (.json may also hold one array)"
_PARQUET_ROWS = 256  # at a time: bounds the memory, not the speed

# (place, row): a line of JSON that is yet to be parsed, or any value.
Reader = Callable[[], Iterator[tuple[str, Any]]]
# Rows of a dataset: what reads them, from the first one at every call; and how many there are, None
# where only reading them all would tell.
Rows = tuple[Reader, Callable[[], int | None]]


def kind(path: Path) -> str | None:
    """The suffix that says how a file holds its rows; None if it is of no such kind."""
    suffix = (path.with_suffix("") if path.suffix in _PACKED else path).suffix
    return suffix if suffix in SUFFIXES else None


def rows_of(path: Path) -> Rows:
    """The rows of a file or of a folder of shards, of which none is read yet.

    Raises:
        UserError: it isn't there, can't be read, or is of another kind.
    """
    if not path.is_dir():
        refuse_missing(path)
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} can't be read", "change its permissions, or give a copy")
    if (path / "state.json").is_file():  # Dataset.save_to_disk
        from datasets import load_from_disk

        stored = load_from_disk(str(path))
        return partial(numbered, stored, path.name), partial(len, stored)
    shards = _shards(path)
    readers = {".json": _json_rows, ".csv": _csv_rows, ".tsv": _csv_rows, ".parquet": _parquet_rows}
    read = readers.get(form := str(kind(shards[0])), lines_of)

    def rows() -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(map(read, shards))

    def count() -> int:
        if form != ".parquet":
            return sum(1 for _ in rows())  # they are quickly passed over
        import pyarrow.parquet as pq

        return sum(pq.read_metadata(shard).num_rows for shard in shards)

    return rows, count


def saved(rows: Any, folder: Path) -> Path:
    """The JSON Lines file, named after its content, that rows from Python are written to.

    Args:
        rows: a list of dicts, a pandas ``DataFrame``, a ``datasets.Dataset`` or any other iterable
            of dicts.

    Raises:
        UserError: they are nothing of the kind, or there are none.
    """
    if hasattr(rows, "iterrows"):  # a DataFrame: its gaps are NaN, NaT or NA
        _refuse_twice([*rows.columns], "the DataFrame")
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    listed = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Mapping) else []
    if not listed or not all(isinstance(row, Mapping) for row in listed):
        raise UserError(
            f"the dataset is {type(rows).__name__}, not rows",
            "give a list of dicts, a pandas DataFrame, a datasets.Dataset (one split of a "
            "DatasetDict), the path of a file or the name of a dataset",
        )
    plain = ({str(name): jsonable(cell) for name, cell in row.items()} for row in listed)
    content = b"".join(json.dumps(row).encode() + b"\n" for row in plain)
    path = folder / f"rows-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda scratch: scratch.write_bytes(content))
    return path


def _refuse_twice(names: list, what: str) -> None:
    if twice := [name for at, name in enumerate(names) if name in names[:at]]:
        raise UserError(f"{what} has several columns named {twice[0]!r}", "rename or drop them")


def _shards(path: Path) -> list[Path]:
    """The file, or the files of a folder."""
    if not path.is_dir():
        if kind(path) is None:
            raise UserError(
                f"{path} is not a {KINDS} file, nor one of these with {' or '.join(_PACKED)}",
                "convert it to one of these",
            )
        return [path]
    if (path / "run.json").is_file():
        raise UserError(f"{path} is a run, not a dataset", "give the file that it was made of")
    if (path / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        raise UserError(f"{path} holds several splits", "give the folder of one")
    files = sorted(f for f in path.iterdir() if kind(f) and f.name[0] not in "._")
    if not files:
        raise UserError(f"{path} holds no {KINDS} file", "give a file, or a folder of shards")
    kinds = sorted({str(kind(file)) for file in files})
    splits = sorted({word for file in files for word in _SPLITS if file.name.startswith(word)})
    several = kinds if len(kinds) > 1 else splits if len(splits) > 1 else []
    if several:
        raise UserError(
            f"{path} holds several kinds of files ({', '.join(several)})",
            "give one file, or a folder of shards of one dataset",
        )
    return files


def _lines(path: Path) -> Iterator[bytes]:
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            unpacked = pa.input_stream(file, _PACKED.get(path.suffix))
            yield from io.BufferedReader(unpacked, 1 << 18)
    except OSError as error:
        if error.errno is not None:
            raise  # the machine's fault, not the file's
        raise UserError(f"{path.name} can't be unpacked ({error})", "pack it again") from None


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """The rows of a JSON Lines file, not yet parsed."""
    lines = enumerate(_lines(path), start=1)
    return ((f"{path.name} line {number}", line) for number, line in lines if line.strip())


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # One value can't be read in pieces: the file is held whole. JSONL is for large data.
    lines = lines_of(path)
    (place, first), second = next(lines, ("", b"[]")), next(lines, None)
    if second is not None:
        with suppress(UserError):  # the first line alone is no JSON
            parse_json(first, place, AS_JSON)
            return lines_of(path)
    whole = b"".join(_lines(path)) or b"[]"
    return numbered(_rows_in(parse_json(whole, path.name, AS_JSON), path), path.name)


def numbered(rows: Iterable, name: str) -> Iterator[tuple[str, Any]]:
    """The rows with their places."""
    return ((f"{name} row {number}", row) for number, row in enumerate(rows, start=1))


def _rows_in(value: Any, path: Path) -> list:
    """The rows of a JSON value: a list, an object that holds one, or a table as pandas writes it
    (``to_json`` with ``orient`` split, columns or index)."""
    if not isinstance(value, dict):
        return value if isinstance(value, list) else [value]
    names, data = value.get("columns", []), value.get("data", [])
    if list_of(names, str) and list_of(data, list) and {*map(len, data)} == {len(names)}:
        return [dict(zip(names, row, strict=True)) for row in data]
    found = [name for name in _WRAPPERS if list_of(value.get(name), dict)]
    if len(found) > 1:
        raise UserError(
            f"{path.name} holds several lists of rows ({', '.join(found)})", "write one to a file"
        )
    if found:
        # The hub's viewer wraps each row, too.
        return [row.get("row", row) if "row_idx" in row else row for row in value[found[0]]]
    cells = list(value.values())
    if list_of(cells, dict) and all(cell.keys() == cells[0].keys() for cell in cells):
        if all(label.isdigit() for label in cells[0]):
            return [{n: cell[label] for n, cell in value.items()} for label in cells[0]]
        return [row if n.isdigit() else {"id": n} | row for n, row in value.items()]
    return [value]


def _csv_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """The rows of a table, whose cells are all texts."""
    csv.field_size_limit(1 << 30)
    texts, last, split = _texts(path), 0, ","
    try:
        first = next(texts, "")
        split = "\t" if kind(path) == ".tsv" else max(",;\t", key=first.count)
        table = csv.reader(chain([first], texts), delimiter=split, strict=True)
        names = next(table, [])
        _refuse_twice(names, path.name)
        for number, cells in enumerate(table, start=1):
            if not any(map(str.strip, cells)):
                continue
            if len(cells) != len(names):
                raise csv.Error(f"{len(cells)} cells under {len(names)} names")
            yield f"{path.name} row {number}", dict(zip(names, cells, strict=True))
            last = number
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"{path.name} can't be read as a table with {split!r} between cells, in UTF-8 "
            f"(after row {last}: {error})",
            "write it as JSON Lines: DataFrame.to_json(…, orient='records', lines=True)",
        ) from None


def _texts(path: Path) -> Iterator[str]:
    """The lines of a text in UTF-8, or in UTF-16 with its mark, as spreadsheets write it."""
    lines = _lines(path)
    first = next(lines, b"")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        yield from io.StringIO(b"".join([first, *lines]).decode("utf-16"), newline="")
        return
    yield first.decode("utf-8-sig")
    yield from (line.decode("utf-8") for line in lines)


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _refuse_twice(file.schema_arrow.names, path.name)
            batches = file.iter_batches(batch_size=_PARQUET_ROWS)
            yield from numbered(chain.from_iterable(b.to_pylist() for b in batches), path.name)
    except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the machine's fault, not the file's
        # ValueError: a text that isn't UTF-8. OverflowError: a date far beyond the calendar.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(
            f"{path.name} is not readable as Parquet ({reason})", "write it again"
        ) from error
