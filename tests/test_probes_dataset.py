"""What probes are trained on: k and n of every target, and hidden states row by row."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import CONTEXTS, LAYERS, files_under, rehashed, rewritten, with_settings
from safetensors.torch import load_file, save_file

from ia_mech.errors import UserError
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import BUILT_IN, CANNOT_ASSESS, FOLLOW_UP
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.run.sources import sources_of
from probes.dataset import ProbeSet, check_enough, read
from probes.targets import Outcome, parse_target

NEW, LOOP, FAILED = "new_topic", "degenerate", "failed"
RATE = parse_target("rate")
RULES = {"identity": {"kind": "builtin"}, "repeats": 1}


# -- reading --------------------------------------------------------------------------------------


def plant(run: Run, say) -> Run:
    """Write verdicts as a judge does; ``say`` maps a context's number, T and sample to one."""
    number = {context: at for at, context in enumerate(run.contexts["context_id"])}
    rows = []
    keys = run.generations[list(KEY)].itertuples(index=False, name=None)
    for key, item in zip(keys, items_of(run), strict=True):
        category = say(number[key[0]], *key[1:])
        rows.append(
            dict(zip(KEY, key, strict=True))
            | {"repeat": 0, "category": category, "follow_up": BUILT_IN.follow_up(category)}
            | {"status": "judged", "item": item.id}
        )
    run.labels.write_judgements("builtin", rows, RULES)
    return run


def saying(context: int, temperature: float, sample: int, _: int) -> str:
    """Context 2 has a greedy follow-up, 5 was never assessed, even ones have some at T = 1."""
    if context == 5:
        return CANNOT_ASSESS
    if temperature == 0:
        return FOLLOW_UP if context == 2 else NEW
    return FOLLOW_UP if context % 2 == 0 and temperature == 1 else NEW


def with_record(run: Run, **changes) -> Run:
    """Change ``run.json``: the seed, or what the model is."""

    def change(record: dict) -> None:
        if "seed" in changes:
            with_settings(seed=changes.pop("seed"))(record)
        record["identity"]["model"].update(changes)

    return rewritten(run.path, "run.json", change)


def rewrite(run: Run, name: str, write) -> Run:
    """Replace files of a kind; the manifest says they are as they were written."""
    for file in [file for file in files_under(run.path) if file.startswith(name)]:
        write(run.path / file)
    return rehashed(run.path)


def change_residuals(run: Run, change) -> Run:
    def write(path: Path) -> None:
        save_file({name: change(layer) for name, layer in load_file(path).items()}, path)

    return rewrite(run, "residuals/", write)


@pytest.fixture
def copy(merged, tmp_path):
    """Judged copies of the sampled run, to be written to."""

    def make(name: str = "run", of: Run = merged, say=saying) -> Run:
        return plant(Run.open(shutil.copytree(of.path, tmp_path / name)), say)

    return make


@pytest.fixture
def other(copy) -> Run:
    """The same contexts with another seed and other hidden states."""
    return change_residuals(with_record(copy("other"), seed=1), lambda x: x * 2 + 1)


def aligned(found: ProbeSet) -> None:
    """Row by row what the runs hold."""
    for layer in found.layers:
        states = [found.at(layer, position) for position in found.positions]
        assert all(one.dtype == np.float32 for one in states)
        assert {one.shape for one in states} == {(len(found), found.width)}
        for number, frame in found.contexts.groupby("run"):
            run = found.runs[number]
            ids = run.contexts["context_id"].tolist()
            rows = [ids.index(context) for context in frame["context_id"]]
            assert frame["row"].tolist() == rows
            for at, position in enumerate(found.positions):
                own = run.residuals(layer, position)[rows]
                np.testing.assert_array_equal(states[at][frame.index], own)


def test_rows_are_the_contexts_with_an_outcome(copy):
    run = copy()
    found = read([run.path])
    frame = found.contexts
    assert frame["row"].tolist() == [row for row in range(CONTEXTS) if row != 5]
    assert frame["trials"].unique().tolist() == [4]
    assert frame["positives"].tolist() == [2 * (row % 2 == 0) for row in frame["row"]]
    own = run.contexts.iloc[frame["row"]]
    for column in ("context_id", "dataset", "context_tokens"):
        assert frame[column].tolist() == own[column].tolist()
    sources = sources_of(own)
    assert frame["source"].tolist() == sources.tolist()
    for text, messages in zip(frame["text"], own["messages"], strict=True):
        assert text == "\n".join(message["content"] for message in messages)
    assert found.layers == run.layers and len(found.layers) == LAYERS
    assert found.positions == [*run.positions] and found.width == run.model["d_model"]
    assert found.judge == "builtin"
    assert any("1 of 12 conversations have no outcome for the target" in n for n in found.notes)
    assert found.outcome.positives.tolist() == frame["positives"].tolist()
    aligned(found)


def test_runs_are_pooled_row_by_row(copy, other):
    run = copy()
    found = read([run.path, other.path])
    assert found.contexts["run"].tolist() == [0] * 11 + [1] * 11
    assert found.contexts["source"][:11].tolist() == found.contexts["source"][11:].tolist()
    states = found.at(2, "header_last")
    assert not np.array_equal(states[:11], states[11:])
    assert len(set(found.outcome.runs)) == 2
    aligned(found)
    greedy = read([run.path, other.path], target="greedy")  # repeated greedy turns count once
    assert greedy.contexts["run"].unique().tolist() == [0]


def test_chosen_positions_and_layers(copy):
    run = copy()
    found = read([run.path], positions=["header_last", "response_end"], layers=[3, 0, 3])
    assert found.positions == ["response_end", "header_last"] and list(found.layers) == [0, 3]
    aligned(found)


def with_column(run: Run, name: str, change) -> Run:
    """Change a column of ``contexts``; ``change`` maps number and value of each context."""

    def write(path: Path) -> None:
        table = pq.read_table(path)
        values = [change(row, old) for row, old in enumerate(table[name].to_pylist())]
        at, field = table.column_names.index(name), table.schema.field(name)
        pq.write_table(table.set_column(at, field, pa.array(values, type=field.type)), path)

    return rewrite(run, "contexts/", write)


def same_strata(found: ProbeSet, *columns: str) -> bool:
    """Whether contexts are compared if, and only if, they share these columns."""
    shared = list(found.contexts[list(columns)].itertuples(index=False, name=None))
    strata = found.outcome.runs.tolist()
    return len(set(shared)) == len(set(strata)) == len(set(zip(shared, strata, strict=True)))


def test_within_datasets_those_of_one_dataset_only(copy, other):
    run = with_column(copy(), "perturbation", lambda at, _: [None, "role-swap"][at % 2])
    first = with_column(run, "dataset", lambda at, _: f"set {at // 2 % 2}")
    second = with_column(other, "dataset", lambda at, _: f"set {at // 2 % 2}")
    found = read([first.path, second.path], within="dataset")
    assert found.within == "dataset"
    assert same_strata(found, "run", "dataset", "perturbation")
    assert len(set(found.outcome.runs)) == 6
    plain = read([first.path, second.path])
    assert same_strata(plain, "run", "perturbation") and len(set(plain.outcome.runs)) == 3
    aligned(found)


def lacking(run: Run, row: int, *names: str) -> Run:
    """Make a context lack positions, as the template would: null index, NaN state."""
    nothing = dict.fromkeys(names)

    def drop_states(states: torch.Tensor) -> torch.Tensor:
        states[row, [[*run.positions].index(name) for name in names]] = torch.nan
        return states

    with_column(run, "positions", lambda at, old: old | nothing if at == row else old)
    return change_residuals(run, drop_states)


def test_a_position_that_some_context_lacks_is_left_out_with_a_note(copy):
    run = lacking(copy(), 3, "turn_separator", "query_end")
    found = read([run.path])
    assert found.positions == [
        name for name in run.positions if name not in ("turn_separator", "query_end")
    ]
    assert "left out: turn_separator, which 1 of 11 conversations lack." in found.notes
    aligned(found)
    with pytest.raises(UserError, match="no position is left: some conversations lack query_end"):
        read([run.path], positions=["query_end"])
    run = lacking(copy("fifth"), 5, "turn_separator")  # a context without an outcome
    assert read([run.path]).positions == [*run.positions]


def test_lengths_are_by_the_ends_of_query_and_response(copy):
    run = lacking(copy(), 0, "response_end")
    frame = read([run.path]).contexts
    assert frame["response_tokens"][0] == 0
    for context in frame[1:].itertuples():
        at = run.contexts["positions"][context.row]
        assert context.prompt_tokens == at["query_end"] + 1
        assert context.prompt_tokens + context.response_tokens == at["response_end"] + 1


# -- refusals -------------------------------------------------------------------------------------


def test_models_of_other_sizes_are_refused(copy, other):
    run = copy()
    with pytest.raises(UserError, match="number of blocks: 4 and 9"):
        read([run.path, with_record(other, layers=9).path])


def test_a_target_that_no_context_has_is_refused(copy):
    run = copy(say=lambda context, t, *_: NEW if t else CANNOT_ASSESS)
    with pytest.raises(UserError, match=r"none of the 12 conversations has an outcome .* greedy"):
        read([run.path], target="greedy")


# -- is there enough? ---------------------------------------------------------------------------


def outcome(positive: int, negative: int, both: int = 0) -> Outcome:
    """Sources of one context and two turns: all positive, all negative, or one of each."""
    k = [2] * positive + [0] * negative + [1] * both
    return Outcome.from_counts(k, [2] * len(k), np.arange(len(k)))


def test_enough_sources_of_either_kind_pass():
    check_enough(outcome(20, 20), RATE)
    check_enough(outcome(1, 1, 19), RATE)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (outcome(0, 30), ["0 of 30 queries have a turn that counts", "(--dataset)"]),
        (outcome(30, 0), ["0 of 30 queries have a turn that doesn't count", "--target"]),
        (outcome(7, 17), ["7 of 24 queries", "about 70 queries"]),
        (outcome(1, 0, 19), ["19 of 20 queries", "about 40 queries"]),
        (
            outcome(22, 1),
            ["1 of 23 queries have a turn that doesn't count", "takes about 40 queries: 20 with"],
        ),
        (outcome(0, 1, 11), ["11 of 12 queries have a turn that counts"]),
    ],
)
def test_too_little_is_refused_and_what_to_do_is_said(given, words):
    with pytest.raises(UserError) as refusal:
        check_enough(given, RATE)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_sources_count_where_rates_vary():
    """However many other sources a run has."""
    for few in (5, 19, 20):
        k = [2] * 40 + [0] * 40 + [2] * few + [0] * few
        runs = [4] * 40 + [5] * 40 + [7] * (2 * few)
        given = Outcome.from_counts(k, [2] * len(k), np.arange(len(k)), runs)
        if few == 20:
            check_enough(given, RATE)
            continue
        words = f"where their rates differ {few} of {len(k)} queries have .* --within"
        with pytest.raises(UserError, match=words):
            check_enough(given, RATE)
