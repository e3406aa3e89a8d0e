"""Ways to damage a file of a run: a table of functions, each of which replaces one file.

A damage takes the file, a source of random choices and other files of the same kind (of another
run, of other parts of the same run). It raises :class:`Unfit` where it doesn't apply. It never
writes into the file that is there, which may be a hard link to the original.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.torch import save


class Unfit(Exception):
    """A damage that this file can't have, or that would leave it as it is."""


class Twins(NamedTuple):
    """Files that could be mistaken for one: of another run, and of other parts of the same run."""

    elsewhere: Path | None
    beside: list[Path]


Damage = Callable[[Path, Random, Twins], None]


def _bytes(change: Callable[[bytes, Random], bytes]) -> Damage:
    """A damage that gives a file other bytes."""

    def damage(path: Path, rng: Random, twins: Twins) -> None:
        before = path.read_bytes()
        after = change(before, rng)
        if after == before:
            raise Unfit
        path.unlink()
        path.write_bytes(after)

    return damage


# -- any file -----------------------------------------------------------------------------------


def _flip(low: float, high: float) -> Damage:
    """One bit between two shares of the file's length."""

    def flipped(content: bytes, rng: Random) -> bytes:
        at = rng.randrange(int(low * len(content)), max(1, int(high * len(content))))
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]

    return _bytes(flipped)


def _elsewhere(path: Path, rng: Random, twins: Twins) -> None:
    if twins.elsewhere is None or not twins.elsewhere.is_file():
        raise Unfit
    _bytes(lambda *_: twins.elsewhere.read_bytes())(path, rng, twins)


def _beside(path: Path, rng: Random, twins: Twins) -> None:
    if not twins.beside:
        raise Unfit
    chosen = rng.choice(twins.beside)
    _bytes(lambda *_: chosen.read_bytes())(path, rng, twins)


def _removed(path: Path, rng: Random, twins: Twins) -> None:
    path.unlink()


def _forbidden(path: Path, rng: Random, twins: Twins) -> None:
    if os.geteuid() == 0:
        raise Unfit  # root may read everything
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    path.chmod(0)


def _folder(path: Path, rng: Random, twins: Twins) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path, rng: Random, twins: Twins) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _fifo(path: Path, rng: Random, twins: Twins) -> None:
    path.unlink()
    os.mkfifo(path)


# -- JSON ---------------------------------------------------------------------------------------

_VALUES = (None, True, 0, -1, 2**40, 1.5, "x", "", [], {}, [1], {"x": 1})


def _of_json(change: Callable[[Any, Random], Any]) -> Damage:
    def changed(content: bytes, rng: Random) -> bytes:
        return json.dumps(change(json.loads(content), rng), indent=1, ensure_ascii=False).encode()

    return _only(".json", _bytes(changed))


def _only(suffix: str, damage: Damage) -> Damage:
    def fitting(path: Path, rng: Random, twins: Twins) -> None:
        if path.suffix != suffix:
            raise Unfit
        damage(path, rng, twins)

    return fitting


def _place(value: Any, rng: Random) -> tuple[Any, Any]:
    """A container in a JSON value and a key in it; those near the top are likelier."""
    while True:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not (isinstance(value[key], dict | list) and value[key]) or rng.random() < 0.4:
            return value, key
        value = value[key]


def _without_key(value: Any, rng: Random) -> Any:
    container, key = _place(value, rng)
    del container[key]
    return value


def _other_type(value: Any, rng: Random) -> Any:
    container, key = _place(value, rng)
    container[key] = rng.choice([v for v in _VALUES if type(v) is not type(container[key])])
    return value


# -- Parquet and safetensors --------------------------------------------------------------------


def _of_table(change: Callable[[pa.Table, Random], pa.Table]) -> Damage:
    """Another table in a file of the same size, if it can be written in as little."""

    def changed(content: bytes, rng: Random) -> bytes:
        table = pq.read_table(io.BytesIO(content))
        other = change(table, rng)
        if other.equals(table):
            raise Unfit
        sink = io.BytesIO()
        pq.write_table(other, sink, compression="zstd", compression_level=19)
        written = sink.getvalue()
        # What lies between the columns and the footer is read by no reader.
        footer = 8 + int.from_bytes(written[-8:-4], "little")
        padding = bytes(max(0, len(content) - len(written)))
        return written[:-footer] + padding + written[-footer:]

    return _only(".parquet", _bytes(changed))


def _values_swapped(table: pa.Table, rng: Random) -> pa.Table:
    """Two different values of one column, each in the other's row."""
    columns = list(range(table.num_columns))
    rng.shuffle(columns)
    for at in columns:
        values = table.column(at).to_pylist()
        one = rng.randrange(len(values)) if values else 0
        others = [row for row in range(len(values)) if values[row] != values[one]]
        if others:
            order = list(range(len(values)))
            other = rng.choice(others)
            order[one], order[other] = other, one
            return table.set_column(at, table.schema.field(at), table.column(at).take(order))
    raise Unfit


def _columns_swapped(table: pa.Table, rng: Random) -> pa.Table:
    """Two columns of one type under each other's name."""
    types = table.schema.types
    pairs = [(a, b) for a in range(len(types)) for b in range(a) if types[a] == types[b]]
    if not pairs:
        raise Unfit
    a, b = rng.choice(pairs)
    first, second = table.column(a), table.column(b)
    table = table.set_column(a, table.schema.field(a), second)
    return table.set_column(b, table.schema.field(b), first)


def _column_removed(table: pa.Table, rng: Random) -> pa.Table:
    return table.remove_column(rng.randrange(table.num_columns))


def _column_of_text(table: pa.Table, rng: Random) -> pa.Table:
    at = rng.randrange(table.num_columns)
    texts = pa.array([f"{value}" for value in table.column(at).to_pylist()])
    return table.set_column(at, table.schema.field(at).name, texts)


def _of_tensors(change: Callable[[Any, Random], Any]) -> Damage:
    """Other numbers in tensors of the same names, shapes and metadata."""

    def damage(path: Path, rng: Random, twins: Twins) -> None:
        with safe_open(path, framework="pt") as file:
            tensors = {name: change(file.get_tensor(name), rng) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        _bytes(lambda *_: save(tensors, metadata))(path, rng, twins)

    return _only(".safetensors", damage)


# -- the table ----------------------------------------------------------------------------------

DAMAGES: dict[str, Damage] = {
    "emptied": _bytes(lambda content, _: b""),
    "cut in half": _bytes(lambda content, _: content[: len(content) // 2]),
    "last byte cut": _bytes(lambda content, _: content[:-1]),
    "a byte longer": _bytes(lambda content, _: content + b"\0"),
    "a bit at the start": _flip(0, 0.02),
    "a bit": _flip(0.02, 0.98),
    "a bit at the end": _flip(0.98, 1),
    "random bytes": _bytes(lambda content, rng: rng.randbytes(len(content))),
    "zeros": _bytes(lambda content, _: bytes(len(content))),
    "of another run": _elsewhere,
    "of another part": _beside,
    "removed": _removed,
    "forbidden": _forbidden,
    "a folder": _folder,
    "a dangling link": _dangling,
    "a FIFO": _fifo,
    "JSON: []": _of_json(lambda value, _: []),
    "JSON: {}": _of_json(lambda value, _: {}),
    "JSON: null": _of_json(lambda value, _: None),
    "JSON: a number": _of_json(lambda value, _: 7),
    "JSON: a text": _of_json(lambda value, _: "x"),
    "JSON: in a list": _of_json(lambda value, _: [value]),
    "JSON: nested deeply": _only(".json", _bytes(lambda content, _: b"[" * 200_000)),
    "JSON: a key less": _of_json(_without_key),
    "JSON: another type": _of_json(_other_type),
    "Parquet: two values swapped": _of_table(_values_swapped),
    "Parquet: two columns swapped": _of_table(_columns_swapped),
    "Parquet: a column less": _of_table(_column_removed),
    "Parquet: a column of text": _of_table(_column_of_text),
    "Parquet: no rows": _of_table(lambda table, _: table.slice(0, 0)),
    "Parquet: last row doubled": _of_table(
        lambda table, _: pa.concat_tables([table, table.slice(len(table) - 1)])
    ),
    "tensors: constants": _of_tensors(lambda tensor, _: tensor * 0 + 1),
    "tensors: in reverse order": _of_tensors(lambda tensor, _: tensor.flip(0).contiguous()),
}
SWAPPED = ("of another run", "of another part")
# Those with a random choice are tried at several places.
DRAWS = {
    "a bit at the start": 4,
    "a bit": 4,
    "a bit at the end": 4,
    "of another part": 2,
    "JSON: a key less": 12,
    "JSON: another type": 24,
    "Parquet: two values swapped": 6,
    "Parquet: two columns swapped": 3,
    "Parquet: a column less": 6,
    "Parquet: a column of text": 6,
}


def draws() -> Iterator[tuple[str, int]]:
    """Every damage, and the number of the draw."""
    for name in DAMAGES:
        for draw in range(DRAWS.get(name, 1)):
            yield name, draw


def copied_by_links(original: Path, copy: Path) -> None:
    """A copy of a folder that shares the files' content: none of it may be written into."""
    shutil.copytree(original, copy, copy_function=os.link, symlinks=True)
