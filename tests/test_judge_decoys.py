"""Decoys: which turn is shown after which context, and that their labels stay apart."""

import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
from judging import DECOYS, ROWS, FakeJudge, Recorded, genuine

from ia_mech.judge.decoys import CONVERSATION, RESPONSE, draw_decoys
from ia_mech.judge.label import items_of, label_run
from ia_mech.judge.verdict import Item, Verdict
from ia_mech.rates.compute import estimates
from ia_mech.rates.load import read_runs
from ia_mech.run import Run
from ia_mech.run.labels import KEY


def drawn_from(
    sources: dict[str, int], responses: int = 1, digest: str = "0123456789abcdef", samples: int = 3
) -> tuple[SimpleNamespace, pd.DataFrame]:
    """A run of so many sources per dataset, greedy and at T = 1; and its decoys."""
    rows = [
        {"dataset": dataset, "source_id": f"{dataset}-{n}", "perturbation": None}
        | {"context_id": f"{dataset}-{n}/r{k}", "response_index": k if responses > 1 else None}
        | {"temperature": temperature, "sample": sample, "text": f"{dataset}{n}{k}{sample}"}
        for dataset, count in sources.items()
        for n in range(count)
        for k in range(responses)
        for temperature in (0.0, 1.0)
        for sample in range(samples if temperature else 1)
    ]
    run = SimpleNamespace(turns=pd.DataFrame(rows), identity_digest=digest)
    return run, draw_decoys(run)


def with_context(run, decoys: pd.DataFrame) -> pd.DataFrame:
    """The decoys with the facts of their turn, and of the context shown (``…_shown``)."""
    facts = run.turns.drop_duplicates("context_id").set_index("context_id")
    facts = facts[["dataset", "source_id", "response_index"]]
    return decoys.join(facts, on="context_id").join(facts, on="shown", rsuffix="_shown")


@pytest.mark.parametrize("count", [2, 3, 7])
def test_every_source_lends_one_turn_and_is_shown_another_sources(count):
    run, decoys = drawn_from({"a": count, "b": 4})
    found = with_context(run, decoys)
    assert set(decoys["decoy"]) == {CONVERSATION}
    assert list(decoys.columns) == [*KEY, "decoy", "shown"]
    assert (found["dataset"] == found["dataset_shown"]).all()
    assert (found["source_id"] != found["source_id_shown"]).all()
    for (dataset, _), at in found.groupby(["dataset", "temperature"]):
        sources = {f"{dataset}-{n}" for n in range(count if dataset == "a" else 4)}
        assert set(at["source_id"]) == set(at["source_id_shown"]) == sources
        assert len(at) == len(sources)
        following = dict(zip(at["source_id_shown"], at["source_id"], strict=True))
        source, seen = min(sources), set()
        while source not in seen:  # one cycle, not several
            seen.add(source)
            source = following[source]
        assert seen == sources


def test_the_context_shown_is_that_of_the_turn_its_source_lends():
    _, decoys = drawn_from({"a": 6}, responses=3)
    for _, at in decoys[decoys["decoy"] == CONVERSATION].groupby("temperature"):
        assert set(at["shown"]) == set(at["context_id"])


def test_another_response_to_the_same_query_is_shown_where_there_is_one():
    run, decoys = drawn_from({"a": 6}, responses=3)
    other = with_context(run, decoys[decoys["decoy"] == RESPONSE])
    assert len(other) == 6 * 2
    assert (other["source_id"] == other["source_id_shown"]).all()
    assert (other["response_index"] != other["response_index_shown"]).all()
    own = decoys[decoys["decoy"] == CONVERSATION]
    assert set(zip(other["shown"], other["temperature"], strict=True)) == set(
        zip(own["shown"], own["temperature"], strict=True)
    )


def test_one_source_has_no_decoys():
    assert drawn_from({"a": 1}, responses=2)[1].empty


def test_the_draw_depends_on_the_run_alone():
    sources = {"a": 20, "b": 5}
    _, decoys = drawn_from(sources)
    pd.testing.assert_frame_equal(decoys, drawn_from(sources)[1])
    assert not decoys.equals(drawn_from(sources, digest="fedcba9876543210")[1])


def test_every_turn_of_a_source_may_be_drawn():
    samples = set()
    for number in range(40):
        _, decoys = drawn_from({"a": 5}, digest=f"{number:016x}")
        samples |= set(decoys.loc[decoys["temperature"] == 1, "sample"])
    assert samples == {0, 1, 2}


def test_contexts_that_name_no_perturbation_are_unperturbed(merged, run):
    run.generations["perturbation"] = None
    pd.testing.assert_frame_equal(draw_decoys(run), draw_decoys(merged))


# -- judged ---------------------------------------------------------------------------------------


@pytest.fixture
def labelled(run, tmp_path):
    """Judge the run, whose turns all differ; returns the judge."""
    run.generations["text"] = [f"turn {i}" for i in range(ROWS)]

    def call(say=genuine, name: str = "fake", **options) -> FakeJudge:
        judge = FakeJudge(say, name=name)
        label_run(run, judge, name, Recorded(), cache_folder=tmp_path / "cache", **options)
        return judge

    return call


def test_decoys_are_judged_among_the_turns_and_stored_apart(run, labelled):
    judge = labelled()
    rows, decoys = run.labels.judgements("fake"), run.labels.decoys("fake")
    assert rows[list(KEY)].values.tolist() == run.turns[list(KEY)].values.tolist()
    assert rows["decoy"].isna().all() and rows["shown"].isna().all()
    plan = draw_decoys(run)
    columns = [*KEY, "decoy", "shown"]
    assert len(decoys) == DECOYS and decoys[columns].values.tolist() == plan.values.tolist()
    items = items_of(run)
    expected = items_of(run, plan)[ROWS:]
    assert {item for item, _ in judge.asked} == {*items, *expected}
    by_context = dict(zip(run.turns["context_id"], items, strict=True))
    texts = run.generations.set_index(list(KEY))["text"]
    for item, row in zip(expected, plan.itertuples(index=False), strict=True):
        assert item.query == by_context[row.shown].query
        assert item.turn == texts[row.context_id, row.temperature, row.sample]
        assert item.response == by_context[row.shown].response
    # Nothing but its text decides when an item is judged.
    keys = [item.key("", 0) for item, _ in judge.asked]
    assert keys == sorted(keys, reverse=True)  # the judge begins with the last
    where = [at for at, (item, _) in enumerate(judge.asked) if item in set(expected)]
    assert min(where) < 10 and max(where) > len(keys) - 10


def test_two_judges_see_the_same_decoys(run, labelled):
    labelled(name="one")
    labelled(lambda item, repeat: Verdict("new_topic"), name="two", repeats=2)
    one, two = run.labels.decoys("one"), run.labels.decoys("two")
    columns = [*KEY, "decoy", "shown", "item"]
    pd.testing.assert_frame_equal(
        one[columns], two.loc[two["repeat"] == 0, columns].reset_index(drop=True)
    )
    assert len(two) == 2 * DECOYS and not two["genuine"].any()


def test_a_judge_that_costs_nothing_judges_part_by_part(merged, parted, tmp_path, monkeypatch):
    """The verdicts are those of the whole run; each part is judged with its decoys among it."""

    def judged(of: Run) -> tuple[Run, list[list[tuple[Item, int]]]]:
        folder, asked = of.path.parent.name, []

        class Watched(FakeJudge):
            def judge(self, items, repeats):
                asked.append([*zip(items, repeats, strict=True)])
                return super().judge(items, repeats)

        run = Run.open(shutil.copytree(of.path, tmp_path / folder))
        label_run(run, Watched(paid=False), "fake", Recorded())
        assert "generations" not in vars(run) and "contexts" not in vars(run)
        return run, asked

    (run, at_once), (again, by_part) = judged(merged), judged(parted)
    assert len(at_once) == 1 and len(by_part) == len(again.parts("contexts")) > 2
    assert all(items == sorted(items, key=lambda of: of[0].key("", 0)) for items in by_part)
    assert {*at_once[0]} == {of for items in by_part for of in items}
    shown = [{(item.query, item.response) for item, _ in items} for items in by_part]
    assert [len(texts) for texts in shown] == [2] * len(by_part)  # contexts, decoys included
    pd.testing.assert_frame_equal(run.labels.decoys("fake"), again.labels.decoys("fake"))
    rows, others = (of.labels.judgements("fake").set_index(list(KEY)) for of in (run, again))
    pd.testing.assert_frame_equal(
        rows.drop(columns="cached"), others.loc[rows.index].drop(columns="cached")
    )
    tables = [estimates(read_runs([of.path])) for of in (run, again)]
    pd.testing.assert_frame_equal(*tables)


def test_a_verdicts_p_value_is_stored(run, labelled):
    def say(item: Item, repeat: int) -> Verdict:
        return Verdict("generic", grounded_p=int(item.turn[5:]) / ROWS)

    labelled(say)
    assert run.labels.judgements("fake")["grounded_p"].tolist() == [i / ROWS for i in range(ROWS)]
    assert Verdict.from_json(Verdict("generic", grounded_p=0.25).to_json()).grounded_p == 0.25


def test_perturbations_and_datasets_do_not_mix(run: Run):
    run.turns["dataset"] = [f"d{i % 2}" for i in run.generations["order"]]
    run.turns["perturbation"] = [f"p{i // 2 % 2}" for i in run.generations["order"]]
    facts = run.turns.drop_duplicates("context_id").set_index("context_id")
    facts = facts["dataset"] + facts["perturbation"]
    decoys = draw_decoys(run)
    assert (decoys["context_id"].map(facts) == decoys["shown"].map(facts)).all()
    assert len(decoys) == DECOYS and facts.nunique() == 4
