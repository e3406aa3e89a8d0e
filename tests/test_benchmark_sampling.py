"""The sampling benchmark: its arithmetic, its tables, and (marked ``slow``) a small whole run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shell import call, refusal
from torch import nn

from benchmarks.sampling import __main__ as command
from benchmarks.sampling.limits import least
from benchmarks.sampling.measure import CONTENDERS, Kind, measure
from benchmarks.sampling.ours import differing
from benchmarks.sampling.results import Results, gflops
from benchmarks.sampling.tables import full, peers_table
from benchmarks.sampling.workload import Contender, Size, Task, Workload
from ia_mech.errors import UserError

SMALL = Size((1, 4), 24, 5, 6)


def record(contender: str, contexts: int = 1, **values) -> dict:
    head = {"model": "m", "contender": contender, "contexts": contexts}
    return head | {"values": values, "notes": "shared | whole"}


def products(number: int) -> list[dict]:
    """A round in which plain products are faster in round 0 and reordered ones in round 1."""
    shapes = [("prefill", 7, 0.5), ("head", 1, 0.25), ("step", 5, 0.125)]
    return [
        {"part": part, "contexts": contexts, "rows": rows * contexts, "out": 20, "in": 10,
         "count": 3, "way": way, "seconds": [contexts * seconds * (number + 1), 9.0][way != fast]}
        for contexts in (1, 4) for part, rows, seconds in shapes for way in ("plain", "reordered")
        for fast in [["plain", "reordered"][number]]
    ]  # fmt: skip


@pytest.fixture
def results() -> Results:
    failed = {"model": "m", "contender": "static", "contexts": 1, "failed": "pip install it"}
    compared = {"what": "5 rows alone and among 20", "rows": 5, "margins": [1e-6, 2e-5]}
    return Results(
        "EPYC", False, ["2026-11-21", "2026-11-22"], {"m": Size((1, 4), 7, 5, 9)},
        [
            *(record("ours", 1, seconds=s) for s in (2.0, 4.0)),
            *(record("ours", 4, seconds=s) for s in (4.0, 8.0)),
            *(record("copies", 4, seconds=s) for s in (8.0, 8.0)),
            *(record("generate", 1, seconds=s) for s in (6.0, 20.0)),
            *(record("products", products=products(number)) for number in range(2)),
            *(record("steps", 4, step=s, products=p) for s, p in ((0.3, 0.1), (0.2, 0.15))),
            *(record("capture", plain=[0.5], captured=[s]) for s in (0.505, 0.51)),
            *(record("decode", 4, seconds=s, least_bytes=60.0, least_operations=30.0)
              for s in (0.5, 1.0, 2.0)),
            record("ceilings", bandwidth=100.0, rate=100.0),
            record("differing", 4, compared=[compared]),
            failed,
        ],
    )  # fmt: skip


def row(markdown: str, first: str) -> list[str]:
    """The other cells of the table row that begins with ``first``."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {first} |"))
    return line[2:-2].split(" | ")[1:]


def test_the_floor_takes_the_faster_way_and_one_step_less_than_new_tokens(results):
    assert results.floor("m", 1) == [0.5 + 0.25 + 8 * 0.125, 1.0 + 0.5 + 8 * 0.25]
    assert results.floor("m", 4) == [4 * seconds for seconds in results.floor("m", 1)]
    assert results.floor("m", 1, ["step"]) == [1.0, 2.0]
    of = results.products("m").query("part == 'step' and contexts == 1 and way == 'plain'")
    assert gflops(of) == pytest.approx(2 * 5 * 20 * 10 * 3 / ((0.125 + 9) / 2) / 1e9)
    assert row(full(results), "20 × 10")[0] == row(full(results), "all")[0] == "3"


def test_ratios_are_taken_within_a_round_where_contenders_take_turns(results):
    shown = peers_table(results, "m")
    # 45 tokens in 3 s and 180 in 6 s; generate is called four times for four contexts
    assert row(shown, "ia_mech, all layers at 5 positions") == ["", "15", "", "30", ""]
    assert row(shown, "`generate`") == ["8", "3", "4.00 (3.00 … 5.00)", "3", "8.00 (6.00 … 10.00)"]
    copies = row(shown, "the same, a copy of the prefix per row")  # not measured with one
    assert copies == ["", "", "", "22", "1.50 (1.00 … 2.00)"]
    assert row(shown, "the matrix products alone")[2] == "0.88 (0.88 … 0.88)"


def test_on_a_gpu_ratios_are_of_all_pairs(results):
    results.on_gpu = True
    assert results.ratios([6.0, 8.0], [1.0, 2.0, 4.0]) == [6.0, 3.0, 1.5, 8.0, 4.0, 2.0]


def test_saved_measurements_give_the_same_tables_and_files_go_together(results, tmp_path):
    saved, other = tmp_path / "saved.json", tmp_path / "other.json"
    results.save(saved)
    assert full(Results.read([saved])) == full(results)
    sizes = {"n": results.sizes["m"]}
    replace(results, sizes=sizes, records=[record("ours", 1, seconds=1.0) | {"model": "n"}]).save(
        other
    )
    assert list(Results.read([saved, other]).sizes) == ["m", "n"]
    with pytest.raises(UserError, match="hold the same model on a CPU"):
        Results.read([saved, saved])
    replace(results, setting="another", sizes=sizes, records=[]).save(other)
    with pytest.raises(UserError, match="different settings"):
        Results.read([saved, other])
    other.write_text('{"sizes": {"m": {}}}')
    with pytest.raises(UserError, match="was not saved by --json"):
        Results.read([other])


def test_differing_rows_count_with_their_first_decision():
    def decoded(tokens: list[int], margins: list[float]) -> SimpleNamespace:
        return SimpleNamespace(token_ids=np.array(tokens), margins=np.array(margins))

    one = [decoded([1, 2, 3], [1.0, 0.5, 2.0]), decoded([4, 5], [1.0, 1.0])]
    other = [decoded([1, 7, 8], [1.0, 0.25, 3.0]), decoded([4, 5], [1.0, 1.0])]
    written = {("ours", 1): one, ("ours", 4): [*other, *one]}
    (found,) = differing(SimpleNamespace(size=replace(SMALL, rows=2), written=written))
    assert (found["rows"], found["margins"]) == (2, [0.5])


@pytest.mark.parametrize("tied", [True, False])
def test_the_least_work_by_hand(tied):
    model = nn.Module()
    model.table, model.matrix = nn.Embedding(10, 4), nn.Linear(4, 4, bias=False)
    model.norm, model.head = nn.LayerNorm(4, bias=False), nn.Linear(4, 10, bias=False)
    if tied:
        model.head.weight = model.table.weight
    text = SimpleNamespace(num_attention_heads=6)
    model.config = SimpleNamespace(get_text_config=lambda decoder: text)
    model.get_input_embeddings, model.get_output_embeddings = (
        lambda: model.table,
        lambda: model.head,
    )
    keys = torch.zeros(1, 2, 8, 3, dtype=torch.bfloat16)  # 2 heads of width 3
    windows = {0: torch.zeros(1, 6, 4, dtype=torch.bfloat16), 1: None}
    recurrent = SimpleNamespace(recurrent_states={0: torch.zeros(1, 5, 7)}, conv_states=windows)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=keys, values=keys.clone()), recurrent])
    moved, computed = least(model, cache, Size((4,), 8, 5, 10), 4)
    # 20 rows, 9 steps, 5 own tokens on average. Weights: 40 + 16 + 4 numbers of 4 bytes, whether
    # or not there is a second table, which is only looked up in. A token: 2 x 2 x 3 x 2 bytes.
    # Logits and states are written and read, the states in their own dtypes.
    each = 10 * 4 + 35 * 4 + 24 * 2
    assert moved == 9 * (60 * 4 + 24 * (4 * 8 + 20 * 5) + 20 * 2 * each)
    # The norm is no product. Six heads score 3 numbers and add up 3, of 8 + 5 tokens.
    assert computed == 9 * 2 * 20 * (56 + 6 * 6 * 13 + 3 * 35)


class Broken(Contender):
    def run(self, new_tokens: int) -> None:
        if new_tokens > 2:
            raise RuntimeError("CUDA error: an illegal\nmemory access")


class Refused(Broken):
    def __init__(self, work: Workload, contexts: int) -> None:
        raise UserError("no", "never")


def test_contenders_take_turns_and_one_that_fails_is_a_result(monkeypatch):
    monkeypatch.setitem(CONTENDERS, "generate", Kind(Broken, counts="last"))
    monkeypatch.setitem(CONTENDERS, "static", Kind(Refused))
    small = Size((1, 2), 24, 5, 3)
    task = Task("tiny", ("ours", "copies", "generate", "static"), 2, small, "cpu", "float32", 1)
    _, records = measure(task)
    order = [(one["contender"], one["contexts"]) for one in records if "values" in one]
    turns = [("ours", 1), ("ours", 2), ("copies", 1), ("copies", 2)]
    assert order == [*turns, *turns, ("differing", 2)]
    assert all(one["margins"] == [] for one in records[-1]["values"]["compared"])
    failed = {one["contender"]: one["failed"] for one in records if "failed" in one}
    assert failed == {
        "generate": "RuntimeError: CUDA error: an illegal memory access", "static": "no; never"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device", "cpu", "--models", "tiny", "qwen3-4b"], "takes hours on a CPU"),
        (["--read", "none.json"], "no file none.json"),
        (["--device", "cpu", "--json", "none/file"], "can't be written"),
        (["--device", "cpu", "--models", "tiny", "--write"], "mean nothing"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, problem, capfd, monkeypatch):
    monkeypatch.setattr(command, "in_process", None)  # nothing is measured
    assert problem in refusal(call(command.main, words, capfd))


@pytest.mark.slow
def test_everything_runs_in_small_and_a_dead_process_is_a_result(tmp_path):
    words = ["--device", "cpu", "--models", "tiny-hybrid", "tiny", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sampling", *words, "--json", tmp_path / "all.json"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    for model in ("tiny", "tiny-hybrid"):
        found = Results.read([tmp_path / "all.json"])
        lacking = {n for n in CONTENDERS if not found.records_of(model, n)}
        hybrid = {"continuous"} if model == "tiny-hybrid" else set()
        assert lacking == {"transformer-lens"} | hybrid
    assert done.stdout.strip() == full(found).strip()
