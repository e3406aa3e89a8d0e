"""Runs to read and to damage: sampled ones as fixtures, and one written by hand."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Silent

from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.collect.rows import stored_logits
from ia_mech.engine.plan import Grid
from ia_mech.run import Run, RunWriter, integrity, layout

CONTEXTS = 12
CONFIG = SampleConfig(limit=CONTEXTS, grid=Grid((0.7, 1.0), 2, 6, 0), batch_rows=4)
LAYERS = 5  # of the tiny model, embeddings included


@pytest.fixture(scope="session")
def merged(tiny_subject, tmp_path_factory) -> Iterator[Run]:
    """A run of the tiny subject as it is left: one part. Tests that write into it copy it."""
    run = sampled(CONFIG, tiny_subject, tmp_path_factory.mktemp("merged") / "run")
    written = files_under(run.path), run.generations.copy(), run.contexts.copy()
    yield run
    assert files_under(run.path) == written[0]
    assert run.generations.equals(written[1]) and run.contexts.equals(written[2])


@pytest.fixture
def run(merged, tmp_path) -> Run:
    """A copy of it to write into."""
    return Run.open(shutil.copytree(merged.path, tmp_path / "run"))


@pytest.fixture(scope="module")
def parted(tiny_subject, tmp_path_factory) -> Run:
    """The same run with a part for every unit of two contexts; tests leave both as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PART_CONTEXTS", 1)
        return sampled(CONFIG, tiny_subject, tmp_path_factory.mktemp("parted") / "run")


def sampled(config: SampleConfig, subject, out: Path, **options) -> Run:
    return collect(config, subject, out, Silent(), **options)


def files_under(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def files_named(root: Path) -> list[str]:
    """The files that the manifest names."""
    manifest = json.loads((root / "manifest.json").read_text())
    return sorted(file for part in manifest["parts"] for file in part["files"])


def resealed(root: Path) -> Run:
    """The run with its files as they are now, as if they had been written so."""
    manifest = integrity.read_json(root / "manifest.json", verify=False)
    for part in manifest["parts"]:
        part["files"] = {name: integrity.facts_of(root / name) for name in part["files"]}
    integrity.write_json(root / "manifest.json", manifest)
    return Run.open(root)


def rewritten(root: Path, name: str, change: Callable[[dict], object]) -> Run:
    """The run with another ``run.json`` or ``manifest.json``, and its labels made its own."""
    value = integrity.read_json(root / name)
    change(value)
    integrity.write_json(root / name, value)
    if name == "run.json":
        resealed(root)
    run = Run.open(root)
    for path in (root / "judgements").glob("*.parquet"):
        table = pq.read_table(path)
        record = json.loads(table.schema.metadata[b"ia_mech"])
        run.labels.write_judgements(path.stem, table.to_pylist(), record)
    return run


# -- a run written by hand ----------------------------------------------------------------------

VOCAB = 11
KEPT = ["response_end", "header_last"]
UNITS = [[5, 0], [7, 2, 1], [3, 6], [4]]  # orders of the contexts of each unit
RECORD = {
    "format": layout.FORMAT,
    "identity": {
        "config": {
            "model": {"name": "by hand"},
            "dataset": "by hand",
            "limit": 8,
            "header_logits": "full",
            "grid": {"temperatures": [0.7, 1.0], "samples": 2, "max_new_tokens": 4, "seed": 0},
        },
        "model": {
            "name": "by hand",
            "weights_hash": "00",
            "layers": 1,
            "d_model": 3,
            "vocab": VOCAB,
            "dtype": "float32",
        },
        "chat": {"template_hash": "00", "tail_ids": [1], "stop_ids": {"2": "end"}},
        "positions": KEPT,
        "conversations": {"count": 8},
        "software": {"torch": "by hand"},
    },
}


def residuals_of(order: int) -> torch.Tensor:
    """``[layers + 1, positions, d_model]`` of a context; some lack ``response_end``."""
    made = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(order))
    if order % 3 == 1:
        made[:, 0] = torch.nan
    return made


def logits_of(order: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(100 + order)) * 3


def contexts_table(orders: list[int]) -> pa.Table:
    rows = [{"context_id": f"c{order}", "order": order} for order in orders]
    return pa.Table.from_pylist(rows, schema=layout.contexts_schema(KEPT))


def generations_table(orders: list[int]) -> pa.Table:
    rows = [
        {"order": order, "temperature": t, "sample": sample, "text": f"{order} {t} {sample}"}
        for order in orders
        for t, sample in [(1.0, 1), (0.0, 0), (1.0, 0), (0.7, 0)]
    ]
    return pa.Table.from_pylist(rows, schema=layout.GENERATIONS)


def snapshot_in(folder: Path, text: str = "as read") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "conversations.parquet"
    pq.write_table(pa.table({"conversation": [text]}), file)
    return file


def add_unit(run: RunWriter, unit: int, header_logits: dict | None = None, change=None) -> None:
    orders = UNITS[unit]
    residuals = torch.stack([residuals_of(order) for order in orders])
    if header_logits is None:
        logits = torch.stack([logits_of(order) for order in orders])
        header_logits = stored_logits(logits, run.record["identity"]["config"]["header_logits"])
    stored = [contexts_table(orders), generations_table(orders), header_logits, residuals]
    if change is not None:
        change(stored)
    run.add_contexts(f"0.{unit}", *stored)


def write_by_hand(out: Path, scratch: Path, *, repair: bool = False, change=None) -> Run:
    """What the main job does with a folder: begin or go on, and finish."""
    if (out / "run.json").is_file():
        run = RunWriter.resume(out, RECORD, snapshot_in(scratch), repair=repair)
    else:
        run = RunWriter.create(out, RECORD, snapshot_in(scratch))
    with run:
        run.start_session({"machine": "test"})
        for unit in range(len(UNITS)):
            if f"0.{unit}" not in run.done("contexts"):
                add_unit(run, unit, change=change if unit == 1 else None)
        run.finish()
    return Run.open(out)


@pytest.fixture
def by_hand(tmp_path) -> Run:
    return write_by_hand(tmp_path / "by-hand", tmp_path / "scratch")


def first_unit(
    tmp_path: Path, *, header_logits: dict | str | None = None, config: str = "full"
) -> Run:
    """A run of one unit of two contexts, orders 5 and 0, with these header logits."""
    known = RECORD["identity"]
    identity = known | {"config": known["config"] | {"header_logits": config}}
    identity["model"] = known["model"] | {"vocab": 49_152}
    record = RECORD | {"identity": identity}
    with RunWriter.create(tmp_path / "first", record, snapshot_in(tmp_path / "scratch")) as run:
        add_unit(run, 0, header_logits)
    return Run.open(tmp_path / "first")


def with_column(column: str, value):
    def change(table: pa.Table) -> pa.Table:
        at = table.column_names.index(column)
        values = [value, *table[column].to_pylist()[1:]]
        field = table.schema.field(column)
        return table.set_column(at, field, pa.array(values, type=field.type))

    return change
