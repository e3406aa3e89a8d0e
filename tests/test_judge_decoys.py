"""Decoys: which turn is shown after which context, and that their labels stay apart."""

from collections.abc import Callable
from types import SimpleNamespace

import pandas as pd
import pytest
from judging import ROWS, FakeJudge, Recorded, follow_up
from runs import stored

from ia_mech.judge.decoys import SIBLING, WRONG, draw_decoys
from ia_mech.judge.judging import items_of, label_run
from ia_mech.run import Run
from ia_mech.run.labels import KEY


def run_of(
    sources: dict[str, int],
    responses: int = 1,
    digest: str = "0123456789abcdef",
    text: Callable[[int], str] = "response {}".format,
    unfinished: Callable[[int], bool] = lambda number: False,
) -> SimpleNamespace:
    """A run of so many sources per dataset, with turns greedy and three at T = 1 after each
    response, whose number decides its text and whether it is unfinished."""
    contexts = [
        {"dataset": dataset, "source_id": f"{dataset}-{n}", "perturbation": None}
        | {"context_id": f"{dataset}-{n}/r{k}", "response_unfinished": unfinished(k)}
        | {"messages": [{"role": "user", "content": f"{n}"}, {"role": "", "content": text(k)}]}
        for dataset, count in sources.items()
        for n in range(count)
        for k in range(responses)
    ]
    turns = [
        context
        | {"temperature": temperature, "sampled_tokens": 6 * (temperature > 0), "sample": sample}
        for context in contexts
        for temperature in (0.0, 1.0)
        for sample in range(3 if temperature else 1)
    ]
    return SimpleNamespace(
        contexts=pd.DataFrame(contexts), turns=pd.DataFrame(turns), identity_digest=digest
    )


def with_context(run: SimpleNamespace, decoys: pd.DataFrame) -> pd.DataFrame:
    """The decoys with the facts of their turn's context, and of the context shown (``…_shown``)."""
    facts = run.contexts.set_index("context_id")[["dataset", "source_id"]]
    return decoys.join(facts, on="context_id").join(facts, on="shown", rsuffix="_shown")


def pairs(decoys: pd.DataFrame) -> set[tuple]:
    return {*decoys.itertuples(index=False, name=None)}


@pytest.mark.parametrize("count", [2, 7])
def test_every_turn_is_shown_after_a_context_of_another_source(count):
    run = run_of({"a": count, "b": 4}, responses=2, text=lambda k: "the same")
    decoys = draw_decoys(run)
    found = with_context(run, decoys)
    assert list(decoys.columns) == [*KEY, "decoy", "shown"]
    assert set(decoys["decoy"]) == {WRONG}
    assert pairs(decoys[list(KEY)]) == pairs(run.turns[list(KEY)]) and len(decoys) == len(run.turns)
    assert (found["dataset"] == found["dataset_shown"]).all()
    assert (found["source_id"] != found["source_id_shown"]).all()
    assert set(found["shown"]) == set(run.contexts["context_id"])  # those of a source take turns
    for _, at in found.groupby(["dataset", "temperature"]):
        one = at[["source_id", "source_id_shown"]].drop_duplicates()
        assert one["source_id"].is_unique and one["source_id_shown"].is_unique


def test_every_turn_is_shown_after_all_siblings():
    run = run_of({"a": 3}, responses=4)
    decoys = draw_decoys(run)
    own = with_context(run, decoys[decoys["decoy"] == SIBLING])
    assert (own["source_id"] == own["source_id_shown"]).all()
    assert (own["context_id"] != own["shown"]).all()
    assert len(own) == 3 * len(run.turns) and not own[[*KEY, "shown"]].duplicated().any()


def test_siblings_worded_alike_count_once_and_unfinished_ones_apart():
    """Of responses A B A B' A' C, ' being unfinished: A has B and C, C has A and B, A' has B'."""
    texts, cut = "ABABAC", {3, 4}
    run = run_of({"a": 2}, 6, text=texts.__getitem__, unfinished=cut.__contains__)
    decoys = draw_decoys(run)
    own = decoys[decoys["decoy"] == SIBLING]
    shown = own.groupby("context_id")["shown"].agg(lambda names: {int(name[-1]) for name in names})
    expected = {0: {1, 5}, 1: {0, 5}, 2: {1, 5}, 3: {4}, 4: {3}, 5: {0, 1}}
    assert {int(name[-1]): seen for name, seen in shown.items()} == expected


def test_one_source_has_siblings_only():
    assert draw_decoys(run_of({"a": 1})).empty
    assert set(draw_decoys(run_of({"a": 1}, responses=2))["decoy"]) == {SIBLING}


def test_fewer_decoys_are_among_the_more():
    run = run_of({"a": 5, "b": 3}, responses=2)
    every, two, one = draw_decoys(run), draw_decoys(run, 2), draw_decoys(run, 1)
    assert pairs(one) < pairs(two) < pairs(every)
    others = with_context(run, one[one["decoy"] == WRONG])
    assert (others.groupby(["source_id", "temperature"]).size() == 1).all() and len(others) == 8 * 2
    assert draw_decoys(run, 0).empty


def test_the_draw_depends_on_the_run_alone():
    sources = {"a": 20, "b": 5}
    decoys = draw_decoys(run_of(sources), 1)
    pd.testing.assert_frame_equal(decoys, draw_decoys(run_of(sources), 1))
    assert not decoys.equals(draw_decoys(run_of(sources, digest="fedcba9876543210"), 1))


# -- judged ---------------------------------------------------------------------------------------


@pytest.fixture
def labelled(run, tmp_path):
    """Judge the run, whose turns all differ; returns the judge."""
    run.generations["text"] = [f"turn {i}" for i in range(ROWS)]
    stored(run)

    def call(say=follow_up, name: str = "fake", paid: bool = True, **options) -> FakeJudge:
        judge = FakeJudge(say, paid=paid, name=name)
        label_run(run, judge, name, Recorded(), cache_folder=tmp_path / "cache", **options)
        return judge

    return call


def test_decoys_are_judged_among_the_turns_and_stored_apart(run, labelled):
    judge = labelled()
    rows, decoys = run.labels.judgements("fake"), run.labels.decoys("fake")
    assert rows[list(KEY)].values.tolist() == run.turns[list(KEY)].values.tolist()
    assert rows["decoy"].isna().all() and rows["shown"].isna().all()
    plan = draw_decoys(run, 1)
    columns = [*KEY, "decoy", "shown"]
    assert decoys[columns].values.tolist() == plan.values.tolist()
    items = items_of(run)
    expected = items_of(run, plan)[ROWS:]
    assert {item for item, _ in judge.asked} == {*items, *expected}
    by_context = dict(zip(run.turns["context_id"], items, strict=True))
    texts = run.generations.set_index(list(KEY))["text"]
    for item, row in zip(expected, plan.itertuples(index=False), strict=True):
        assert item.query == by_context[row.shown].query
        assert item.turn == texts[tuple(row[:4])]
        assert item.response == by_context[row.shown].response
    texts_of = [(item.query, item.response, item.turn) for item, _ in judge.asked]
    assert texts_of == sorted(texts_of), "nothing but its texts decides when an item is judged"


def test_a_free_judge_sees_all_decoys_and_a_paid_one_few(run, labelled):
    labelled(name="free", paid=False)
    labelled(name="paid")
    labelled(name="none", decoys=0)
    columns = [*KEY, "decoy", "shown", "item"]
    free, paid = (run.labels.decoys(name) for name in ("free", "paid"))
    assert len(free) == ROWS and pairs(paid[columns]) < pairs(free[columns])
    assert len(paid) == len(draw_decoys(run, 1)) and run.labels.decoys("none").empty
    records = [run.labels.record("judgements", name) for name in ("free", "paid", "none")]
    assert [record["decoys_per_source"] for record in records] == [None, 1, 0]


def test_perturbations_and_datasets_do_not_mix(run: Run):
    run.turns["dataset"] = [f"d{i % 2}" for i in run.generations["order"]]
    run.turns["perturbation"] = [f"p{i // 2 % 2}" for i in run.generations["order"]]
    facts = run.turns.drop_duplicates("context_id").set_index("context_id")
    facts = facts["dataset"] + facts["perturbation"]
    decoys = draw_decoys(run)
    assert (decoys["context_id"].map(facts) == decoys["shown"].map(facts)).all()
    assert len(decoys) == ROWS and facts.nunique() == 4
