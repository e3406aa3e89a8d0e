"""Agreement of judges and annotators: figures against hand computation, and what is shown."""

import numpy as np
import pandas as pd
import pytest
from judging import ROWS, FakeJudge, annotate, keys_of, plant
from test_results import example_result

from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main
from ia_mech.judge.comparison import compare
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.judging import items_of, label_run
from ia_mech.judge.labellers import (
    agreement,
    compare_pairs,
    disagreements,
    follow_up_shares,
    joint_rows,
    labellers_of,
)
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, FOLLOW_UP, NAMES
from ia_mech.judge.sheets import csv_bytes, export_sheet, import_sheet, write_sheet
from ia_mech.judge.verdict import Verdict
from ia_mech.rates.compute import estimates
from ia_mech.rates.load import read_runs
from ia_mech.results import folder_of, read, write
from ia_mech.run import Run
from ia_mech.run.labels import KEY


def random_labels(seed: int, names=NAMES) -> list[str]:
    return [names[i] for i in np.random.default_rng(seed).integers(len(names), size=ROWS)]


def pairs_of(run: Run, between=None) -> dict:
    return compare_pairs(labellers_of(run, between))


def disagreements_of(run: Run) -> pd.DataFrame:
    return disagreements(run, labellers_of(run))


# -- two columns of labels ------------------------------------------------------------------------


def test_a_worked_example_with_weights():
    """By hand: weights of twice follow-up 1, (follow-up, generic) 2, twice generic 3 + 4."""
    truth = [FOLLOW_UP, FOLLOW_UP, "generic", "generic"]
    prediction = [FOLLOW_UP, "generic", "generic", "generic"]
    c = compare(truth, prediction, ["a", "b", "c", "d"], [1, 2, 3, 4])
    assert (c.n, c.weight) == (4, 10)
    value = {name: figure.value for name, figure in c.figures.items()}
    # Observed 8/10; expected 3/10 * 1/10 + 7/10 * 9/10 = 0.66.
    for of in ("follow_up", "categories"):
        assert value["kappa", of] == pytest.approx((0.8 - 0.66) / (1 - 0.66))
        assert value["accuracy", of] == pytest.approx(0.8)
    assert value["balanced_accuracy", "follow_up"] == pytest.approx((1 / 3 + 1) / 2)
    for of, precision, recall in ((FOLLOW_UP, 1, 1 / 3), ("generic", 7 / 9, 1)):
        assert value["precision", of] == pytest.approx(precision)
        assert value["recall", of] == pytest.approx(recall)
    assert np.isnan([value["precision", "degenerate"], value["recall", "degenerate"]]).all()
    g, h = ASSESSED.index(FOLLOW_UP), ASSESSED.index("generic")
    assert c.confusion[[g, g, h], [g, h, h]].tolist() == [1, 1, 2] and c.confusion.sum() == 4


def test_abstentions_and_failures_stand_apart():
    truth = [FOLLOW_UP, "generic", CANNOT_ASSESS, FOLLOW_UP, "generic", None, CANNOT_ASSESS]
    prediction = [FOLLOW_UP, CANNOT_ASSESS, FOLLOW_UP, None, "generic", "generic", CANNOT_ASSESS]
    c = compare(truth, prediction, list("abcdefg"))
    assert (c.matched, c.n) == (7, 2)
    assert c.apart == (
        "cannot_assess in the truth 2, no category in the truth 1, cannot_assess in the prediction "
        "2, no category in the prediction 1"
    )
    assert c.figures["accuracy", "categories"].value == 1


def test_what_has_no_value_or_no_interval():
    perfect = compare([FOLLOW_UP, "generic"] * 20, [FOLLOW_UP, "generic"] * 20, range(40)).figures
    kappa = perfect["kappa", "follow_up"]
    assert kappa.value == perfect["balanced_accuracy", "follow_up"].value == 1
    assert np.isnan(kappa.low)  # resampling perfect agreement says nothing
    assert 0.9 < perfect["accuracy", "follow_up"].low < 1  # an exact bound does
    one = compare(["generic"] * 9, [FOLLOW_UP] * 4 + ["generic"] * 5, range(9)).figures
    assert np.isnan(one["balanced_accuracy", "follow_up"].value)  # the truth has no follow-up
    empty = compare([CANNOT_ASSESS], [FOLLOW_UP], ["a"])
    assert empty.n == 0 and np.isnan(empty.figures["kappa", "follow_up"].value)
    assert compare([], [], []).n == 0


# -- a run ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_of_a_sample_are_about_the_run(run):
    """Weighted accuracy is unbiased over the draws of a stratified sheet; unweighted isn't."""
    rng = np.random.default_rng(3)
    verdicts = ["generic"] * 45 + [FOLLOW_UP] * 10 + ["degenerate"] * 5
    rate = {"generic": 0.9, FOLLOW_UP: 0.4, "degenerate": 0.6}  # the judge is right so often
    truth = [label if rng.random() < rate[label] else "new_topic" for label in verdicts]
    right = np.array(truth) == np.array(verdicts)
    plant(run, "builtin", verdicts)
    place = {tuple(key.values()): i for i, key in enumerate(keys_of(run))}
    weighted, plain = [], []
    for seed in range(300):
        key = export_sheet(run, 15, seed=seed).key
        drawn = [item for item in key["items"].values() if "decoy" not in item]
        at = [place[tuple(p[c] for c in KEY)] for p in drawn]
        weights = 1 / np.array([p["inclusion_probability"] for p in drawn])
        weighted.append(np.average(right[at], weights=weights))
        plain.append(right[at].mean())
    error = np.std(weighted) / np.sqrt(len(weighted))
    assert abs(np.mean(weighted) - right.mean()) < 4 * error
    assert abs(np.mean(plain) - right.mean()) > 10 * error

    strata = {i: p["stratum"] for i, p in zip(at, drawn, strict=True)}
    of = {i: p["inclusion_probability"] for i, p in zip(at, drawn, strict=True)}
    annotate(run, "anna", {i: truth[i] for i in at}, key["sheet"], strata, of)
    ((names, comparison),) = pairs_of(run).items()
    assert names == ("anna", "builtin")  # people are the truth
    assert comparison.n == 15 and comparison.weight == pytest.approx(ROWS)
    accuracy = comparison.figures["accuracy", "categories"]
    assert accuracy.value == pytest.approx(weighted[-1])


def test_weights_of_two_annotators(run):
    def weights_of(*names):
        found = joint_rows(labellers_of(run, names))
        return dict(zip(*(x.tolist() for x in found), strict=True))

    strata = {i: "low" if i < 40 else "high" for i in range(ROWS)}
    of = {i: 10 / 40 if i < 40 else 10 / 20 for i in range(ROWS)}
    on_sheet = [*range(10), *range(40, 50)]
    annotate(run, "anna", dict.fromkeys(on_sheet, FOLLOW_UP), "one", strata, of)
    annotate(run, "bert", dict.fromkeys(on_sheet, FOLLOW_UP), "one", strata, of)
    # Of one sheet, all of it: the sheet's probabilities.
    assert weights_of("anna", "bert") == {i: 1 / of[i] for i in on_sheet}
    # Of one sheet, not all: the rows that both labelled stand for their strata.
    part = [0, 1, 2, 3, 40, 41, 42, 43, 44]
    of_part = {i: 4 / 40 if i < 40 else 5 / 20 for i in part}
    annotate(run, "cleo", dict.fromkeys(part, FOLLOW_UP), "one", strata, of_part)
    weights = weights_of("anna", "cleo")
    assert weights == {i: 40 / 4 if i < 40 else 20 / 5 for i in part}
    assert sum(weights.values()) == ROWS
    # Of two sheets: independent samples.
    annotate(run, "dora", dict.fromkeys([5, 9, 50], FOLLOW_UP), "two", "all")
    assert weights_of("anna", "dora") == pytest.approx({5: 4 * 20, 9: 4 * 20})
    plant(run, "builtin", random_labels(0))
    assert weights_of("builtin", "cleo", "anna") == weights


def test_who_is_compared_with_whom(run):
    with pytest.raises(UserError, match="has no labels; run: ia-mech judge"):
        labellers_of(run)
    plant(run, "first", random_labels(0))
    with pytest.raises(UserError, match="has first; run: ia-mech judge"):
        labellers_of(run)
    plant(run, "second", random_labels(1))
    annotate(run, "anna", dict.fromkeys(range(9), FOLLOW_UP))
    assert list(pairs_of(run)) == [("first", "second"), ("anna", "first"), ("anna", "second")]
    # Between equals the one named first.
    assert list(pairs_of(run, ["second", "first"])) == [("second", "first")]
    with pytest.raises(UserError, match="two different judges or annotators; choose from: first,"):
        labellers_of(run, ["second", "second"])
    with pytest.raises(UserError, match="no labels by 'third'; choose from: first, second, anna"):
        labellers_of(run, ["third", "second"])


def test_turns_that_a_judge_was_fitted_on_count_in_no_comparison(run):
    """On them the judge is always right; on the others never."""
    said = [FOLLOW_UP, "generic"] * (ROWS // 2)
    known = [i < 20 for i in range(ROWS)]
    plant(run, "builtin", said, fitted=known)
    truth = {i: said[i] if known[i] else said[i - 1] for i in range(ROWS)}
    annotate(run, "anna", truth)
    pair = pairs_of(run)["anna", "builtin"]
    assert pair.n == ROWS - 20 and pair.figures["accuracy", "follow_up"].value == 0
    assert "builtin was fitted on 20 of the 60 turns" in " ".join(agreement(run).notes)


@pytest.fixture
def colliding(run) -> Run:
    """Half of the contexts are of another dataset, with the ids of the other half."""
    names = run.contexts["context_id"].tolist()
    of = {name: (f"d{n % 2}", f"q{n // 2}") for n, name in enumerate(names)}
    for frame in (run.contexts, run.turns):
        frame["dataset"] = [of[name][0] for name in frame["context_id"]]
        frame["source_id"] = [of[name][1] for name in frame["context_id"]]
    for name in ("first", "second"):
        say = FOLLOW_UP if name == "first" else "generic"
        judge = FakeJudge(lambda item, _, say=say: Verdict(say), paid=False, name=name)
        label_run(run, judge, name, Quiet())
    return run


def test_sources_of_two_datasets_with_one_id_stay_apart(colliding):
    """In the frame of labelled turns, which all read, and in two judges' agreement. A turn of
    evidence -0.5 depends on its own response if that is the only one, not of two."""
    contexts = len(colliding.contexts)
    assert colliding.labelled("first", texts=False)["source"].nunique() == contexts
    assert pairs_of(colliding)["first", "second"].figures["kappa", "follow_up"].sources == contexts
    assert {one.estimate.sources for one in follow_up_shares(labellers_of(colliding)[0])} == {
        contexts
    }
    found = estimates(read_runs([colliding], "first")).query("dataset == '(all)'")
    assert set(found.query("quantity in ('rate', 'floor')")["sources"]) == {contexts}
    turns = colliding.generations[list(KEY)].assign(evidence=-0.5, run=colliding.name)
    about = {"kind": "reaction", "identities": [colliding.identity_digest]}
    found = example_result(about=about, data={"turns": turns})
    write(found, folder_of(colliding.path, "reaction"))
    assert (read_runs([colliding], "first").turns["dependent"] == 1).all()


# -- disagreements, and what is shown -------------------------------------------------------------


def test_the_most_telling_disagreements_come_first(run):
    first = ["generic"] * ROWS
    second = list(first)
    for i, category in {
        1: FOLLOW_UP,
        2: "degenerate",
        3: FOLLOW_UP,
        4: CANNOT_ASSESS,
        5: None,
    }.items():
        second[i] = category
    plant(run, "first", first, rationale=["because"] * ROWS)
    plant(run, "second", second)
    plant(run, "sample", [None, *first[1:]])  # is called like a column of the table
    annotate(run, "anna", {0: "generic", 7: "new_topic", 8: FOLLOW_UP, 9: "generic"})
    found = disagreements_of(run)
    # People contradicted (follow-ups first), then judges alone: follow-ups, then others.
    contradicted, others = found.index.tolist()[:2], found.index.tolist()[2:]
    assert contradicted == [8, 7] and {*others[:2]} == {1, 3} and others[2:] == [2]
    names = ["first", "sample", "second", "anna"]
    labels = [f"{name}: label" for name in names]
    assert found.loc[8, labels].tolist() == ["generic", "generic", "generic", FOLLOW_UP]
    assert found.loc[1, labels].tolist() == ["generic", "generic", FOLLOW_UP, None]
    assert found.loc[8, [f"{name}: why" for name in names]].tolist() == [
        *("because", None, None, "note 8")
    ]
    key = keys_of(run)[8] | {"user_turn": run.generations["text"][8]}
    assert found.loc[8, list(key)].to_dict() == key
    plant(run, "first", [FOLLOW_UP, *first[1:]])
    # A failure is shown as one, beside those that disagree.
    assert disagreements_of(run).loc[0, labels].tolist() == [
        *(FOLLOW_UP, "failed", "generic", "generic")
    ]


def test_the_command(run, capsys):
    said = ["generic"] * 40 + [FOLLOW_UP] * 20
    plant(run, "builtin", said, rationale=["=[red]x[/red]\x1b :cat:"] * ROWS)
    annotate(run, "anna", dict.fromkeys(range(0, ROWS, 4), FOLLOW_UP))
    assert main(["agreement", str(run.path), "--disagreements", "3", "--full"]) == 0
    text = capsys.readouterr().out
    assert "=[red]x[/red]� :cat:" in text and "\x1b" not in text
    assert "10 disagreements" in text and text.count("anna labels it") == 3
    found = read(folder_of(run.path, "agreement"))
    rows = found.estimates.query("truth == 'anna'").set_index(["quantity", "term"])
    assert rows.loc[("accuracy", "categories"), "value"] == pytest.approx(5 / 15)
    assert rows.loc[("accuracy", "categories"), "rows"] == 15
    assert np.isnan(rows.loc[("balanced_accuracy", "follow_up"), "value"])  # all are follow-ups
    assert {of for quantity, of in rows.index if quantity == "recall"} == set(ASSESSED)
    assert set(found.estimates.loc[found.estimates["truth"] == "", "quantity"]) == {"share"}
    table = pd.read_parquet(folder_of(run.path, "agreement") / "disagreements.parquet")
    assert len(table) == 10 and set(table["anna: label"]) == {FOLLOW_UP}
    assert table["user_turn"].isin(run.generations["text"]).all()
    assert Run.open(run.path).verify() == []


# -- decoys ---------------------------------------------------------------------------------------


def test_decoys_stand_beside_the_turns_and_count_in_no_comparison(run, tmp_path):
    """A judge that accepts everything, one that accepts own turns alone, and an annotator."""
    run.generations["text"] = [f"turn {i}" for i in range(ROWS)]
    own = set(items_of(run))
    judges = {
        "agreeable": lambda item, _: Verdict(FOLLOW_UP),
        "careful": lambda item, _: Verdict(FOLLOW_UP if item in own else "new_topic"),
    }
    for name, say in judges.items():
        label_run(run, FakeJudge(say, paid=False, name=name), name, Quiet())
    sheet = export_sheet(run, 20, judge="careful", name="sheet")
    write_sheet(run, sheet, tmp_path / "sheet")
    decoys = [place for place in sheet.key["items"].values() if "decoy" in place]
    rows = [
        row | {"category": FOLLOW_UP if "decoy" in sheet.key["items"][row["item"]] else "generic"}
        for row in sheet.rows
    ]
    file = tmp_path / "filled.csv"
    file.write_bytes(csv_bytes(pd.DataFrame(rows)))
    import_sheet(run, file, "anna")

    found = agreement(run)
    shares_of = found.estimates[found.estimates["truth"] == ""].set_index(["prediction", "decoy"])
    for name, shares in (("agreeable", (1, 1)), ("careful", (1, 0)), ("anna", (0, 1))):
        share, floor = shares_of.loc[(name, "")], shares_of.loc[(name, "wrong_conversation")]
        assert (share["value"], floor["value"]) == shares
        assert floor["rows"] == (len(decoys) if name == "anna" else ROWS)
        assert floor["low"] < 1 and floor["high"] > 0
    assert shares_of.loc[("anna", ""), "rows"] == 20 and len(decoys) == 5
    pairs = pairs_of(run)
    assert pairs["agreeable", "careful"].figures["accuracy", "categories"].value == 1
    assert pairs["anna", "careful"].figures["accuracy", "follow_up"].value == 0
    assert pairs["anna", "careful"].matched == 20
    assert "agreeable 1.00 [" in found.control and "careful 0.00 [" in found.control
    (shown,) = [table for table in found.tables if table.title == "share called follow-ups"]
    assert ["careful", "a wrong conversation"] in [row[:2] for row in shown.rows]


def test_decoys_that_do_not_count_are_those_of_rates(run):
    """Of a judge: not assessed, or of a turn that was not after its own context."""
    run.generations["text"] = [f"turn {i}" for i in range(ROWS)]
    drawn, items = draw_decoys(run), items_of(run)
    lost = {items_of(run, drawn)[ROWS:][-1], items[0]}
    for name in ("careful", "twin"):
        judge = FakeJudge(
            lambda item, _: Verdict(CANNOT_ASSESS if item in lost else FOLLOW_UP), paid=False
        )
        label_run(run, judge, name, Quiet())
    found = agreement(run).estimates.query("decoy == 'wrong_conversation'")
    assert read_runs([run], "careful").gate.decoys == ROWS - 2
    assert found["rows"].tolist() == [ROWS - 2] * 2
