"""Runs for tests to read and to damage, written without a model. One is as the main job leaves it,
over built-in conversations; a small one is written by hand."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import families
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Silent

from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import Conversation, open_conversations
from ia_mech.run import Run, RunWriter, integrity, layout
from ia_mech.settings import Settings

CONTEXTS, LAYERS, WIDTH = 12, 5, 32  # layers: embeddings included
# Temperature, sampled tokens and sample.
ROWS = [(0.0, 0, 0), (0.7, 6, 0), (0.7, 6, 1), (1.0, 6, 0), (1.0, 6, 1)]
SETTINGS = Settings(
    model="planted",
    limit=CONTEXTS,
    temperatures=(0.7, 1.0),
    samples=2,
    max_new_tokens=6,
    batch_rows=384,
)
_WORDS = ["why", "how", "cat", "river", "seven", "blue", "sing", "maybe", "no", "of", "seen"]


@cache
def chat() -> ChatFormat:
    """The chat format of the planted runs: a small ChatML tokenizer with SmolLM2's template."""
    return ChatFormat(families.build("smollm2"))


def record_of(
    contexts: int, responses: int = 0, positions=None, model: dict | None = None, **settings
) -> dict:
    """The record that ``RunWriter`` takes, for a run of so many parts with these settings."""
    described = {"name": "planted", "weights_hash": "0a0b", "layers": LAYERS - 1, "d_model": WIDTH}
    described |= {"vocab": len(chat().tokenizer), "dtype": "float32"}
    identity = {
        "settings": replace(SETTINGS, **settings).to_dict(),
        "model": described | {"revision": None, "adapter": None} | (model or {}),
        "chat": chat().describe(),
        "engine": "shared",
        "positions": chat().position_names if positions is None else positions,
        "score_temperatures": [0.7, 1.0],
        "conversations": {"count": CONTEXTS},
        "software": {"torch": "planted"},
        "intervention": None,
    }
    parts = {"responses": responses, "contexts": contexts}
    return {"identity": identity, "parts": parts, "position_tokens": chat().position_tokens}


@pytest.fixture(scope="session")
def merged(tmp_path_factory) -> Iterator[Run]:
    """A finished run of one part. Tests that write into it copy it."""
    run = planted(tmp_path_factory.mktemp("merged") / "run", [CONTEXTS])
    written = files_under(run.path), run.generations.copy(), run.contexts.copy()
    yield run
    assert files_under(run.path) == written[0]
    assert run.generations.equals(written[1]) and run.contexts.equals(written[2])


@pytest.fixture
def run(merged, tmp_path) -> Run:
    """A copy of it to write into."""
    return Run.open(shutil.copytree(merged.path, tmp_path / "run"))


@pytest.fixture(scope="session")
def parted(tmp_path_factory) -> Run:
    """The same rows and tensors in six parts."""
    return planted(tmp_path_factory.mktemp("parted") / "run", [2] * 6)


def planted(path: Path, sizes: list[int], **settings) -> Run:
    """A run in parts of these sizes; over built-in conversations, or those of the ``dataset`` among
    the settings."""
    conversations = list(open_conversations(settings.get("dataset", "builtin"), limit=sum(sizes)))
    record = record_of(len(sizes), **settings)
    begins = np.cumsum([0, *sizes])
    with RunWriter(path, record) as writer:
        writer.start_session({"machine": "planted"})
        for at, name in enumerate(layout.part_names(len(sizes))):
            orders = range(begins[at], begins[at + 1])
            writer.add_contexts(name, *_part([(o, conversations[o]) for o in orders]))
        writer.finish()
    return Run.open(path)


def _part(those: list[tuple[int, Conversation]]):
    """The arguments of ``RunWriter.add_contexts``, for conversations and their places in a run."""
    contexts, turns = [], []
    for order, conversation in those:
        rng, prompt = random.Random(order), chat().context(conversation.messages)
        names = {
            **{"context_id": conversation.id, "source_id": conversation.source_id},
            **{"dataset": conversation.dataset, "perturbation": "none", "order": order},
            **{"response_index": None, "response_unfinished": False},
        }
        contexts.append(
            names
            | {
                "messages": list(conversation.messages),
                "real_follow_up": conversation.real_follow_up,
            }
            | {"answer": conversation.answer, "metadata": json.dumps(dict(conversation.metadata))}
            | {"response_policy": "given", "response_finish_reason": "given"}
            | {"text": prompt.text, "token_ids": prompt.ids, "positions": prompt.positions}
            | {"context_tokens": len(prompt.ids)}
            | {"response_tokens": len(_ids_of(conversation.response))}
            | {"first_token_entropy": 2.0, "first_token_entropy_tempered": [1.0, 2.0]}
        )
        for temperature, drawn, sample in ROWS:
            text = " ".join(rng.choices(_WORDS, k=6))
            ids = [*_ids_of(text), chat().closing_id]
            turns.append(
                names
                | {"temperature": temperature, "sampled_tokens": drawn, "sample": sample}
                | {"text": text}
                | {"finish_reason": "turn_end", "tokens": len(ids), "token_ids": ids}
                | {"logprob_raw": -9.0, "logprob_tempered": -8.0 if temperature else None}
                | {"logprobs_raw": [-1.5] * len(ids), "ranks": [1] * len(ids)}
                | {"margins": [0.5] * len(ids)}
            )
    positions, size = chat().position_names, len(chat().tokenizer)
    residuals = [_random(LAYERS, len(positions), WIDTH, seed=order) for order, _ in those]
    for kept, row in zip(residuals, contexts, strict=True):
        kept[:, [row["positions"][name] is None for name in positions]] = torch.nan
    return (
        pa.Table.from_pylist(contexts, schema=layout.contexts_schema(positions)),
        pa.Table.from_pylist(turns, schema=layout.GENERATIONS),
        shifted(torch.stack([_random(size, seed=order) * 3 for order, _ in those])),
        torch.stack(residuals),
    )


def _ids_of(text: str) -> list[int]:
    return chat().tokenizer(text, add_special_tokens=False)["input_ids"]


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shifted(logits: torch.Tensor) -> torch.Tensor:
    """Full header logits as they are stored."""
    return (logits - logits.amax(-1, keepdim=True)).half()


def sampled(settings, subject, out: Path, progress=None, **options) -> Run:
    """What the main job makes."""
    from ia_mech.collect.job import collect
    from ia_mech.collect.plan import Plan

    return collect(Plan(settings, out, subject.files), subject, progress or Silent(), **options)


def files_under(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def files_named(root: Path) -> list[str]:
    """The files that the manifests name."""
    manifests = [json.loads(file.read_text()) for file in root.glob("manifests/*.json")]
    return sorted(file for part in manifests for file in part["files"])


def rehashed(root: Path) -> Run:
    """Enter the hashes of the run's present files, as if they had been written so."""
    for file in root.glob("manifests/*.json"):
        part = integrity.read_json(file)
        part["run"] = integrity.content_hash(root / layout.RUN)
        part["files"] = {name: integrity.size_and_hash(root / name) for name in part["files"]}
        integrity.write_json(file, part)
    return Run.open(root)


def stored(run: Run) -> Run:
    """Write the run's frames, which a test has changed, to its files."""
    contexts, turns = run.contexts, run.generations
    for part in run.parts("contexts"):
        file = run.path / layout.part_file("contexts", part["name"])
        here = contexts["order"].isin(pq.read_table(file, columns=["order"])["order"].to_pylist())
        orders = contexts.loc[here, "order"]
        for path, frame in (
            (file, contexts[here]),
            (
                run.path / layout.part_file("generations", part["name"]),
                turns[turns["order"].isin(orders)],
            ),
        ):
            schema = pq.read_schema(path)
            table = pa.Table.from_pandas(frame[schema.names], schema, preserve_index=False)
            pq.write_table(table, path)
    return rehashed(run.path)


def unfinished(run: Run) -> Run:
    """The run without a part of contexts."""
    (run.path / layout.manifest_file("contexts", "00000")).unlink()
    return Run.open(run.path, unfinished=True)


def rewritten(root: Path, name: str, change: Callable[[dict], object]) -> Run:
    """The run with another ``run.json`` or manifest, and its labels made its own."""
    value = integrity.read_json(root / name)
    change(value)
    integrity.write_json(root / name, value)
    run = rehashed(root)
    for path in (root / "judgements").glob("*.parquet") if run.complete else ():
        table = pq.read_table(path)
        record = json.loads(table.schema.metadata[b"ia_mech"])
        run.labels.write_judgements(path.stem, table.to_pylist(), record)
    return run


def with_settings(**settings) -> Callable[[dict], None]:
    """A change of ``run.json`` to other settings, as if the run had been sampled with them."""

    def change(record: dict) -> None:
        record["identity"]["settings"].update(settings)

    return change


# -- a small run written by hand ----------------------------------------------------------------

SMALL_VOCAB = 11
KEPT = ["response_end", "header_last"]
PARTS = [[0, 1], [2, 3, 4], [], [5, 6, 7]]  # orders of the contexts of each part
SMALL_MODEL = {"name": "by hand", "layers": 1, "d_model": 3, "vocab": SMALL_VOCAB}
RECORD = record_of(len(PARTS), positions=KEPT, model=SMALL_MODEL, dataset="by hand")


def residuals_of(order: int) -> torch.Tensor:
    """``[layers + 1, positions, d_model]`` of a context; some lack ``response_end``."""
    made = _random(2, 2, 3, seed=order)
    if order % 3 == 1:
        made[:, 0] = torch.nan
    return made


def contexts_table(orders: list[int]) -> pa.Table:
    rows = [{"context_id": f"c{order}", "order": order} for order in orders]
    return pa.Table.from_pylist(rows, schema=layout.contexts_schema(KEPT))


def generations_table(orders: list[int]) -> pa.Table:
    rows = [
        {"order": order, "temperature": t, "sampled_tokens": 6 * (t > 0), "sample": sample}
        | {"text": f"{order} {t} {sample}"}
        for order in orders
        for t, sample in [(1.0, 1), (0.0, 0), (1.0, 0), (0.7, 0)]
    ]
    return pa.Table.from_pylist(rows, schema=layout.GENERATIONS)


def add_part(writer: RunWriter, part: int, header_logits=None, change=None) -> None:
    orders = PARTS[part]
    residuals = torch.stack([residuals_of(order) for order in orders]) if orders else None
    if header_logits is None and orders:
        logits = [_random(SMALL_VOCAB, seed=100 + order) * 3 for order in orders]
        header_logits = shifted(torch.stack(logits))
    stored = [contexts_table(orders), generations_table(orders), header_logits, residuals]
    if change is not None:
        change(stored)
    writer.add_contexts(layout.part_names(len(PARTS))[part], *stored)


def write_by_hand(out: Path, change=None, parts=range(4)) -> Run:
    """Do with a folder what the main job does: begin or resume the run, and finish it."""
    names = [layout.part_names(len(PARTS))[part] for part in parts]
    with RunWriter(out, RECORD) as writer:
        writer.start_session({"machine": "test"})
        writer.find_damage("contexts", names)
        for part, name in zip(parts, names, strict=True):
            if writer.claim("contexts", name):
                add_part(writer, part, change=change if part == 1 else None)
        writer.finish()
    return Run.open(out, unfinished=True)


@pytest.fixture
def by_hand(tmp_path) -> Run:
    return write_by_hand(tmp_path / "by-hand")


def first_part(tmp_path: Path, header_logits: torch.Tensor) -> Run:
    """A run of one part of two contexts with these header logits."""
    record = record_of(1, positions=KEPT, model=SMALL_MODEL | {"vocab": 49_152})
    with RunWriter(tmp_path / "first", record) as writer:
        add_part(writer, 0, header_logits)
    return Run.open(tmp_path / "first")


def with_column(column: str, value):
    def change(table: pa.Table) -> pa.Table:
        at = table.column_names.index(column)
        values = [value, *table[column].to_pylist()[1:]]
        field = table.schema.field(column)
        return table.set_column(at, field, pa.array(values, type=field.type))

    return change
