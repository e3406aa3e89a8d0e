"""The sampling benchmark's arithmetic and tables; nothing is measured."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from benchmarks.sampling import __main__ as sampling
from benchmarks.sampling.growth import compare, first_differences
from benchmarks.sampling.memory import expected_bytes, held_bytes
from benchmarks.sampling.peers import rows_of
from benchmarks.sampling.results import (
    Compared,
    Held,
    Point,
    Product,
    Results,
    Timing,
    floor,
    gflops,
)
from benchmarks.sampling.tables import (
    CLOSING,
    OPENING,
    between_markers,
    full,
    growth_table,
    memory_table,
    peers_table,
    short,
)
from ia_mech.engine.sampling import stream_key
from ia_mech.errors import UserError


def products(contexts: int, scale: float) -> list[Product]:
    """Two rounds in which the faster way changes."""

    def product(part: str, rows: int, seconds: float) -> Product:
        ways = {"plain": [scale * seconds, 9.0], "reordered": [9.0, scale * 2 * seconds]}
        return Product(part, contexts, rows, (20, 10), 3, ways)

    return [product("prefill", 7, 0.5), product("head", 1, 0.25), product("step", 5, 0.125)]


@pytest.fixture
def results() -> Results:
    return Results(
        setting="AMD EPYC, 2 cores, 2 threads, float32 on cpu, torch 2, 2026-11-21",
        context_tokens=7,
        rows=5,
        new_tokens=9,
        contexts=4,
        rounds=2,
        missing={"llama.cpp": "llama-cpp-python can't be imported; pip install it"},
        timings=[
            Timing("ours", 1, [2.0, 4.0]),
            Timing("ours", 4, [4.0, 8.0]),
            Timing("portable", 4, [8.0, 8.0]),
            Timing("generate", 1, [6.0, 20.0]),
        ],
        products=[*products(1, 1.0), *products(4, 2.0)],
        plain=[0.5, 0.5],
        captured=[0.505, 0.51],
        growth=[Point(5, 9, 7, [1.0, 1.0], [4.0, 8.0]), Point(10, 17, 7, [1.0, 1.0], [16.0, 32.0])],
        memory=[Held(1, True, 10_000_000, 10_000_000, 11_500_000), Held(4, False, 100, 160, None)],
        compared=[Compared("5 rows alone and among 20", 5, [1e-6, 2e-5])],
    )


def lines(markdown: str) -> dict[str, list[str]]:
    """The cells of a table's rows by their first cell."""
    rows = [line[2:-2].split(" | ") for line in markdown.splitlines()[2:]]
    return {cells[0]: cells[1:] for cells in rows}


def test_the_floor_takes_the_faster_way_and_one_step_less_than_new_tokens(results):
    assert floor(results, 1) == [0.5 + 0.25 + 8 * 0.125, 1.0 + 0.5 + 8 * 0.25]
    assert floor(results, 1, ["step"]) == [1.0, 2.0]
    assert floor(results, 4) == [2 * seconds for seconds in floor(results, 1)]
    assert floor(results, 2) is None
    of = [p for p in results.products if p.part == "step" and p.contexts == 1]
    assert gflops(of, "plain") == pytest.approx(2 * 5 * 20 * 10 * 3 / ((0.125 + 9) / 2) / 1e9)


def test_ratios_are_taken_within_a_round(results):
    shown = lines(peers_table(results, wanted=False))
    # 45 tokens in 3 s and 180 in 6 s; generate is called four times for four contexts
    assert shown["ia_mech, all layers at 5 positions"] == ["15", "", "30", ""]
    assert shown["`generate`"] == ["3", "4.00 (3.00 … 5.00)", "3", "8.00 (6.00 … 10.00)"]
    assert shown["the matrix products alone"][1] == "0.88 (0.88 … 0.88)"
    assert lines(peers_table(results))["`generate`"][0] == "8"


def test_a_contender_without_one_context_leaves_its_cells_empty(results):
    shown = lines(peers_table(results, wanted=False))
    assert shown["the same, a copy of the prefix per row"] == ["", "", "22", "1.50 (1.00 … 2.00)"]


def test_growth_is_held_against_linear_in_rows_and_steps(results):
    grown = growth_table(results).splitlines()[-1]
    assert grown == (
        "| 10 | 17 | 7 | 1.00 | 24.00 | 1500 | 4.00 (4.00 … 4.00) | 4.00 | 3.53 (3.40 … 3.67) |"
    )


def test_memory_is_shown_over_what_is_expected_and_may_be_unknown(results):
    shown = lines(memory_table(results))
    assert shown["5 rows of 1 context"] == ["10", "10", "+0%", "12", "+15%"]
    assert shown["20 rows of 4 contexts, a copy of the prefix per row"][2:] == [
        "+60%",
        "unknown",
        "",
    ]


def test_everything_is_in_the_full_text_and_no_flag_in_the_short_one(results):
    told = full(results)
    assert results.setting in told and "pip install it" in told
    assert "| 5 rows alone and among 20 | 5 | 2 | 2.0e-05, 1.0e-06 |" in told
    assert "adds +1.5% (+1.0% … +2.0%) to a plain prefill (500 ms)" in told
    assert "1.50 s of steps for 5 rows" in told
    assert not re.search(r"(?<!-)--[a-z]", short(results))  # the README's flags are other commands'
    results.rounds, results.products = 1, []
    assert "Matrix products" not in full(results)


def test_saved_measurements_give_the_same_tables(results, tmp_path):
    results.save(tmp_path / "saved.json")
    assert full(Results.read(tmp_path / "saved.json")) == full(results)
    (tmp_path / "saved.json").write_text('{"rows": 3}')
    with pytest.raises(UserError, match="was not saved by --json"):
        Results.read(tmp_path / "saved.json")


def test_only_what_is_between_the_markers_is_replaced():
    document = f"# Speed\n\n{OPENING}\nold\n{CLOSING}\n\nmore\n"
    after = between_markers(document, "\nnew\n")
    assert after == f"# Speed\n\n{OPENING}\n\nnew\n\n{CLOSING}\n\nmore\n"
    assert between_markers(after, "new") == after


@pytest.mark.parametrize("document", ["", OPENING, f"{CLOSING}{OPENING}", 2 * (OPENING + CLOSING)])
def test_a_document_needs_each_marker_once(document):
    with pytest.raises(UserError, match="markers"):
        between_markers(document, "new")


def test_the_readmes_have_the_markers():
    for document in sampling.DOCUMENTS:
        assert "new" in between_markers(Path(document).read_text(encoding="utf-8"), "new")


def decoded(tokens: list[int], margins: list[float]) -> SimpleNamespace:
    return SimpleNamespace(token_ids=np.array(tokens), margins=np.array(margins))


def test_differing_rows_count_with_their_first_decision():
    one = [decoded([1, 2, 3], [1.0, 0.5, 2.0]), decoded([4, 5], [1.0, 1.0])]
    other = [decoded([1, 7, 8], [1.0, 0.25, 3.0]), decoded([4, 5], [1.0, 1.0])]
    assert first_differences(one, other) == [0.5]
    written = {("ours", 1): one, ("ours", 4): [*other, *one]}
    assert compare(written, 2, 4) == [Compared("2 rows alone and among 8, shared", 2, [0.5])]


def test_storages_are_counted_once_wherever_they_are_reached():
    kept = torch.zeros(4, 8)
    layer = SimpleNamespace(keys=kept[:, :3], buffers=(kept, torch.zeros(2)), own={"a": [kept[0]]})
    layer.itself, layer.model = layer, torch.nn.Linear(100, 100)
    assert held_bytes([[layer], layer]) == 4 * 8 * 4 + 2 * 4


def test_expected_bytes_are_each_context_once_and_each_rows_own_tokens():
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2
    )
    model = SimpleNamespace(config=config, dtype=torch.float32)
    token = 2 * 3 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    assert expected_bytes(model, 2, 50, 10, 6) == token * (2 * 50 + 10 * 6)


def test_a_context_gets_greedy_and_as_many_samples_per_temperature():
    rows = rows_of(1, 33)
    assert Counter(row.temperature for row in rows) == {0.0: 1, 0.5: 8, 0.7: 8, 1.0: 8, 1.3: 8}
    noise = Counter(row.stream for row in rows if row.temperature)
    assert set(noise.values()) == {4} and len(noise) == 8
    assert stream_key(0, "benchmark-1", 7) in noise
    assert {row.stream for row in rows_of(0, 33)} & set(noise) == set()
