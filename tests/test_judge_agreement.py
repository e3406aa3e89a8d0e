"""Agreement of judges and annotators: figures against hand computation, and what is shown."""

import csv
import io
import json
import re

import numpy as np
import pytest
from judging import DECOYS, ROWS, FakeJudge, keys_of, plant
from rich.console import Console
from runs import files_under, rewritten
from shell import files

from ia_mech.display import Quiet, console
from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main
from ia_mech.judge.agreement import (
    agreement,
    compare,
    group_alpha,
    joint_rows,
    print_comparison,
    print_floors,
    report,
)
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.label import items_of, label_run
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE, NAMES
from ia_mech.judge.sheets import export_sheet, import_sheet, write_sheet
from ia_mech.judge.verdict import Verdict
from ia_mech.rates.load import read_runs
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.stats import alpha_of
from ia_mech.untrusted import inert


def annotate(run: Run, name: str, said: dict[int, str], sheet="s", stratum="all", of=None) -> None:
    """Labels of an annotator by row; each row has the same probability unless ``of`` tells it."""
    keys = keys_of(run)
    rows = [
        {
            **keys[i],
            "category": category,
            "note": f"note {i}",
            "sheet": sheet,
            "stratum": stratum if isinstance(stratum, str) else stratum[i],
            "inclusion_probability": len(said) / ROWS if of is None else of[i],
        }
        for i, category in said.items()
    ]
    run.labels.write_annotations(name, rows, {})


def alpha(ratings, weights) -> float:
    """Krippendorff's α of units, each a pattern of its own."""
    units = sum(len([x for x in unit if x is not None]) > 1 for unit in ratings)
    return alpha_of(np.array([weights], dtype=float), ratings, units)[0]


def random_labels(seed: int, names=NAMES) -> list[str]:
    return [names[i] for i in np.random.default_rng(seed).integers(len(names), size=ROWS)]


# -- two columns of labels ------------------------------------------------------------------------


def test_a_worked_example_with_weights():
    """By hand: weights of (genuine, genuine) 1, (genuine, generic) 2, (generic, generic) 3 + 4."""
    truth = [GENUINE, GENUINE, "generic", "generic"]
    prediction = [GENUINE, "generic", "generic", "generic"]
    c = compare(truth, prediction, ["a", "b", "c", "d"], [1, 2, 3, 4])
    assert (c.n, c.sources, c.weight, c.weighted) == (4, 4, 10, True)
    # Observed 8/10; expected 3/10 * 1/10 + 7/10 * 9/10 = 0.66.
    assert c.kappa.value == c.kappa_genuine.value == pytest.approx((0.8 - 0.66) / (1 - 0.66))
    assert c.accuracy.value == c.accuracy_genuine.value == pytest.approx(0.8)
    assert c.balanced_accuracy.value == pytest.approx((1 / 3 + 1) / 2)
    assert c.alpha.value == pytest.approx(
        alpha(list(zip(truth, prediction, strict=True)), [1, 2, 3, 4])
    )
    lines = {line.category: line for line in c.categories}
    assert tuple(lines) == ASSESSED
    genuine, generic, unused = (lines[x] for x in (GENUINE, "generic", "degenerate"))
    assert (genuine.truth, genuine.predicted) == (2, 1)
    assert (genuine.truth_weight, genuine.predicted_weight) == (3, 1)
    assert (genuine.precision.value, genuine.recall.value) == pytest.approx((1, 1 / 3))
    assert (generic.precision.value, generic.recall.value) == pytest.approx((7 / 9, 1))
    assert (unused.truth, unused.predicted) == (0, 0)
    assert np.isnan([unused.precision.value, unused.recall.value]).all()
    g, h = ASSESSED.index(GENUINE), ASSESSED.index("generic")
    assert c.confusion[[g, g, h], [g, h, h]].tolist() == [1, 2, 7] and c.confusion.sum() == 10
    assert c.confusion_rows[[g, g, h], [g, h, h]].tolist() == [1, 1, 2]


def test_abstentions_and_failures_stand_apart():
    truth = [GENUINE, "generic", CANNOT_ASSESS, GENUINE, "generic", None, CANNOT_ASSESS]
    prediction = [GENUINE, CANNOT_ASSESS, GENUINE, None, "generic", "generic", CANNOT_ASSESS]
    c = compare(truth, prediction, list("abcdefg"))
    assert (c.matched, c.n, c.sources, c.weighted) == (7, 2, 2, False)
    assert (c.abstained_truth, c.abstained_prediction) == (2, 2)
    assert (c.failed_truth, c.failed_prediction) == (1, 1)
    assert c.accuracy.value == c.kappa.value == 1
    with pytest.raises(ValueError, match="'nonsense' is not a category"):
        compare(["nonsense"], [GENUINE], ["a"])
    with pytest.raises(ValueError, match="same length"):
        compare([GENUINE], [GENUINE], ["a", "b"])


def test_what_has_no_value_or_no_interval():
    perfect = compare([GENUINE, "generic"] * 20, [GENUINE, "generic"] * 20, range(40))
    assert perfect.kappa.value == perfect.balanced_accuracy.value == 1
    assert np.isnan(perfect.kappa.low)  # resampling perfect agreement says nothing
    assert perfect.kappa.method == perfect.alpha.method == "no resample differs"
    assert 0.9 < perfect.accuracy.low < 1  # an exact bound does
    one = compare(["generic"] * 9, [GENUINE] * 4 + ["generic"] * 5, range(9))
    assert np.isnan(one.balanced_accuracy.value)  # the truth has no genuine follow-up
    empty = compare([CANNOT_ASSESS], [GENUINE], ["a"])
    assert empty.n == 0 and np.isnan(empty.kappa.value) and np.isnan(empty.alpha.value)
    assert compare([], [], []).n == 0
    text = shown(lambda console: print_comparison(console, "x", empty))
    assert "no row that both put into a category" in text


@pytest.mark.parametrize("seed", range(2))
def test_alpha_from_patterns_is_alpha_from_rows(seed):
    rng = np.random.default_rng(seed)
    choices = np.array([*ASSESSED[:3], CANNOT_ASSESS, None], dtype=object)
    table = choices[rng.choice(5, p=[0.4, 0.2, 0.2, 0.1, 0.1], size=(50, 3))]
    weights = rng.integers(1, 9, 50).astype(float)
    found = group_alpha(list(table.T), rng.integers(8, size=50), weights)
    table[table == CANNOT_ASSESS] = None
    assert found.categories.value == pytest.approx(alpha(table, weights))
    genuine = np.array([[None if x is None else x == GENUINE for x in r] for r in table], object)
    assert found.genuine.value == pytest.approx(alpha(genuine, weights))
    paired = (table != None).sum(1) >= 2  # noqa: E711
    assert found.n == paired.sum() and found.weight == weights[paired].sum()
    assert found.categories.low < found.categories.value < found.categories.high


# -- a run ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_of_a_sample_are_about_the_run(run):
    """Weighted accuracy is unbiased over the draws of a stratified sheet; unweighted isn't."""
    rng = np.random.default_rng(3)
    judged = ["generic"] * 45 + [GENUINE] * 10 + ["degenerate"] * 5
    rate = {"generic": 0.9, GENUINE: 0.4, "degenerate": 0.6}  # the judge is right so often
    truth = [said if rng.random() < rate[said] else "new_topic" for said in judged]
    right = np.array(truth) == np.array(judged)
    plant(run, "rules", [judged])
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
    ((names, comparison),) = agreement(run).pairs.items()
    assert names == ("anna", "rules")  # people are the truth
    assert comparison.n == 15 and comparison.weight == pytest.approx(ROWS)
    assert comparison.accuracy.value == pytest.approx(weighted[-1])


def test_weights_of_two_annotators(run):
    def weights_of(*names):
        found = agreement(run, names)
        return dict(zip(*(x.tolist() for x in joint_rows(found.labellers)), strict=True))

    strata = {i: "low" if i < 40 else "high" for i in range(ROWS)}
    of = {i: 10 / 40 if i < 40 else 10 / 20 for i in range(ROWS)}
    on_sheet = [*range(10), *range(40, 50)]
    annotate(run, "anna", dict.fromkeys(on_sheet, GENUINE), "one", strata, of)
    annotate(run, "bert", dict.fromkeys(on_sheet, GENUINE), "one", strata, of)
    # Of one sheet, all of it: the sheet's probabilities.
    assert weights_of("anna", "bert") == {i: 1 / of[i] for i in on_sheet}
    # Of one sheet, not all: the rows that both labelled stand for their strata.
    part = [0, 1, 2, 3, 40, 41, 42, 43, 44]
    of_part = {i: 4 / 40 if i < 40 else 5 / 20 for i in part}
    annotate(run, "cleo", dict.fromkeys(part, GENUINE), "one", strata, of_part)
    weights = weights_of("anna", "cleo")
    assert weights == {i: 40 / 4 if i < 40 else 20 / 5 for i in part}
    assert sum(weights.values()) == ROWS
    # Of two sheets: independent samples.
    annotate(run, "dora", dict.fromkeys([5, 9, 50], GENUINE), "two", "all")
    assert weights_of("anna", "dora") == pytest.approx({5: 4 * 20, 9: 4 * 20})
    plant(run, "rules", [random_labels(0)])
    assert weights_of("rules", "cleo", "anna") == weights
    # Not of a sheet: a census.
    annotate(run, "edda", {7: GENUINE, 8: GENUINE}, None, "x", dict.fromkeys(range(60)))
    assert weights_of("rules", "edda") == {7: 1, 8: 1}
    assert agreement(run, ["cleo", "edda"]).pairs["cleo", "edda"].n == 0


def test_who_is_compared_with_whom(run):
    with pytest.raises(UserError, match=r"needs two labellers, and .* has no labels; run: python"):
        agreement(run)
    plant(run, "first", [random_labels(0)])
    problem = (
        r"needs two labellers, and .* has first; run: python \S+ ia_mech.judge run \S+ --judge "
    )
    with pytest.raises(UserError, match=problem + "llm or hf, or export and import a sheet$"):
        agreement(run)
    plant(run, "second", [random_labels(1)])
    annotate(run, "first", dict.fromkeys(range(9), GENUINE))
    with pytest.raises(
        UserError, match="two different labellers; choose from: judge:first, second"
    ):
        agreement(run, ["second", "second"])
    assert list(agreement(run).pairs) == [
        ("judge:first", "second"),
        ("annotator:first", "judge:first"),
        ("annotator:first", "second"),
    ]
    # Between equals the one named first.
    assert list(agreement(run, ["second", "judge:first"]).pairs) == [("second", "judge:first")]
    with pytest.raises(UserError, match="both a judge and an annotator are named 'first'; choose"):
        agreement(run, ["first", "second"])
    with pytest.raises(UserError, match=r"no labels of 'third'; choose from: judge:first, sec"):
        agreement(run, ["third", "second"])
    with pytest.raises(UserError, match="needs two different labellers"):
        agreement(run, ["second", "second"])


def test_a_judge_with_itself(run):
    said = random_labels(0, ASSESSED)
    noisy = [x if i % 3 else "generic" for i, x in enumerate(said)]
    plant(run, "same", [said, said])
    plant(run, "noisy", [said, noisy, said])
    found = agreement(run)
    assert found.pairs["noisy", "same"].kappa.value == 1  # the first repeat counts
    (two, same), (three, noise) = found.repeats["same"], found.repeats["noisy"]
    assert (two, three) == (2, 3) and same.n == noise.n == ROWS
    assert same.categories.value == 1 and 0 < noise.categories.value < 1


def test_the_group_is_measured_where_everyone_was_asked(run):
    said = random_labels(0, ASSESSED)
    plant(run, "a", [said])
    plant(run, "b", [said[:30] + random_labels(1, ASSESSED)[30:]])
    annotate(run, "anna", {i: said[i] for i in range(0, 40, 2)})
    group = agreement(run).group
    assert group.n == 20 and group.weight == pytest.approx(ROWS)
    assert 0 < group.categories.value < 1
    assert agreement(run, ["a", "b"]).group is None


def test_labels_that_do_not_belong(run):
    plant(run, "good", [random_labels(0)])
    plant(run, "other", [["off_topic"] * ROWS])
    with pytest.raises(UserError, match="uses the category 'off_topic', which this rubric"):
        agreement(run)
    run.labels.write_judgements(
        "other",
        [{"context_id": "x", "temperature": 0.0, "sample": 0, "repeat": 0, "status": "judged"}],
        {},
    )
    with pytest.raises(UserError, match="judge 'other' are of other turns than those"):
        agreement(run)
    run.labels.write_judgements("other", [], {})
    with pytest.raises(UserError, match=r"judge 'other' of .* has no labels"):
        agreement(run)
    run = rewritten(run.path, "manifest.json", lambda manifest: manifest.update(parts=[]))
    with pytest.raises(UserError, match="still being written"):
        agreement(run)


# -- disagreements, and what is shown -------------------------------------------------------------


def test_the_most_telling_disagreements_come_first(run):
    first = ["generic"] * ROWS
    second = list(first)
    for i, category in {1: GENUINE, 2: "degenerate", 3: GENUINE, 4: CANNOT_ASSESS, 5: None}.items():
        second[i] = category
    sure = [json.dumps({GENUINE: 0.6 + 0.3 * (i == 3), "degenerate": 0.99}) for i in range(ROWS)]
    plant(run, "first", [first], rationale=["because"] * ROWS)
    plant(run, "second", [second], scores=sure)
    plant(run, "sample", [[None, *first[1:]]])  # is called like a column of the table
    annotate(run, "anna", {0: "generic", 7: "new_topic", 8: GENUINE, 9: "generic"})
    found = agreement(run).disagreements
    # People contradicted (genuine first), then judges alone: genuine by certainty, then others.
    assert found.index.tolist() == [8, 7, 3, 1, 2]
    names = ["first", "judge:sample", "second", "anna"]
    assert found.loc[8, names].tolist() == ["generic", "generic", "generic", GENUINE]
    assert found.loc[1, names].tolist() == ["generic", "generic", GENUINE, None]
    assert found.loc[8, [f"{name} (why)" for name in names]].tolist() == [
        *("because", None, None, "note 8")
    ]
    key = keys_of(run)[8] | {"user_turn": run.generations["text"][8]}
    assert found.loc[8, list(key)].to_dict() == key
    assert agreement(run).disagreements.equals(found)
    plant(run, "first", [[GENUINE, *first[1:]]])
    # A failure is shown as one, beside those that disagree.
    assert agreement(run).disagreements.loc[0, names].tolist() == [
        *(GENUINE, "failed", "generic", "generic")
    ]


def shown(body) -> str:
    console = Console(
        file=io.StringIO(), width=110, highlight=False, emoji=False, force_terminal=False
    )
    body(console)
    return console.file.getvalue()


def test_the_command(run, tmp_path, capsys):
    said = ["generic"] * 40 + [GENUINE] * 20
    plant(run, "rules", [said, said], rationale=["=[red]x[/red]\x1b :cat:"] * ROWS)
    annotate(run, "anna", dict.fromkeys(range(0, ROWS, 4), GENUINE))
    out = {"--json": tmp_path / "a.json", "--csv": tmp_path / "a.csv"}
    options = [str(x) for pair in out.items() for x in pair]
    out["--json"].write_text("old")
    before = files_under(run.path)
    assert main(["agreement", str(run.path), "--disagreements", "3", *options]) == 0
    assert files_under(run.path) == before
    text = capsys.readouterr().out
    for name in ASSESSED:
        assert len(re.findall(rf"│ (\d )?{name} ", text)) == 2, name  # used or not
    assert "rules / anna" in text and "15 rows (representing ≈ 60) from 12 sources" in text
    assert "rules with itself (2 repeats)" in text
    assert "=[red]x[/red]� :cat:" in text and "\x1b" not in text
    assert "10 disagreements" in text and len(re.findall("anna says", text)) == 3
    assert max(map(len, text.splitlines()[:6])) <= 110

    report = json.loads(out["--json"].read_text(), parse_constant=pytest.fail)
    (pair,) = report["pairs"]
    figures = pair["comparison"]
    assert (pair["truth"], figures["n"], figures["weight"]) == ("anna", 15, pytest.approx(60))
    assert figures["accuracy"]["value"] == pytest.approx(5 / 15)
    assert figures["balanced_accuracy"]["value"] is None  # the truth is genuine throughout
    assert [line["category"] for line in figures["categories"]] == list(ASSESSED)
    assert report["repeats"]["rules"]["repeats"] == 2 and report["disagreements"] == 10
    rows = list(csv.DictReader(io.StringIO(out["--csv"].read_text(encoding="utf-8-sig"))))
    assert len(rows) == 10 and {row["anna"] for row in rows} == {GENUINE}
    assert {row["rules (why)"] for row in rows} == {"'=[red]x[/red]� :cat:"}
    assert {row["user_turn"] for row in rows} <= {inert(text) for text in run.generations["text"]}


def test_no_disagreement_and_alike_rows(run, capsys):
    plant(run, "a", [["generic"] * ROWS])
    plant(run, "b", [["generic"] * ROWS])
    assert main(["agreement", str(run.path)]) == 0
    assert "no disagreements" in capsys.readouterr().out
    # Rows with the same text in the same context are shown once, with their number.
    plant(run, "b", [[GENUINE] * ROWS])
    found = agreement(run)
    alike = found.disagreements[["query", "response", "user_turn"]].drop_duplicates()
    assert main(["agreement", str(run.path), "--disagreements", "60"]) == 0
    text = capsys.readouterr().out
    assert len(re.findall("a says", text)) == len(alike)
    assert "60 disagreements, 60 of them shown" in text


@pytest.mark.parametrize("flag", ["--json", "--csv"])
def test_no_output_is_written_into_a_run(run, flag, capsys):
    target = run.path / "run.json"
    before = files(run.path)
    assert main(["agreement", str(run.path), flag, str(target)]) == 2
    assert "lies inside the run" in capsys.readouterr().err
    assert files(run.path) == before


# -- decoys ---------------------------------------------------------------------------------------


def test_decoys_stand_beside_the_turns_and_count_in_no_comparison(run, tmp_path, capsys):
    """A judge that accepts everything, one that accepts own turns alone, and an annotator."""
    run.generations["text"] = [f"turn {i}" for i in range(ROWS)]
    own = set(items_of(run))
    judges = {
        "agreeable": lambda item, _: Verdict(GENUINE),
        "careful": lambda item, _: Verdict(GENUINE if item in own else "new_topic"),
    }
    for name, say in judges.items():
        label_run(run, FakeJudge(say, paid=False, name=name), name, Quiet())
    sheet = export_sheet(run, 20, by="careful", name="sheet")
    write_sheet(run, sheet, tmp_path / "sheet")
    decoys = [place for place in sheet.key["items"].values() if "decoy" in place]
    rows = [
        row | {"category": GENUINE if "decoy" in sheet.key["items"][row["item"]] else "generic"}
        for row in sheet.rows
    ]
    file = tmp_path / "filled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_sheet(run, file, "anna")

    found = agreement(run)
    floors = found.floors
    for name, shares in (("agreeable", (1, 1)), ("careful", (1, 0)), ("anna", (0, 1))):
        count, share = floors[name].decoys["conversation"]
        assert (floors[name].genuine.value, share.value) == shares
        assert count == (len(decoys) if name == "anna" else DECOYS)
        assert share.low < 1 and share.high > 0
    assert floors["anna"].turns == 20 and len(decoys) == 5
    assert found.pairs["agreeable", "careful"].accuracy.value == 1  # on the turns themselves
    assert found.pairs["anna", "careful"].accuracy_genuine.value == 0
    assert found.pairs["anna", "careful"].matched == 20
    print_floors(console(200), floors)
    table = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    at = next(i for i, line in enumerate(lines) if line[:1] == ["careful"])
    assert lines[at][:3] == ["careful", "their own context", "60"]
    assert lines[at + 1][:3] == ["", "another conversation (decoys)", str(DECOYS)]
    assert lines[at][3].startswith("1.00 [") and lines[at + 1][3].startswith("0.00 [")
    assert "another response" not in table and "left out" not in table
    assert max(map(len, table.splitlines())) <= 80
    written = json.loads(report(run, found))
    genuine = {one["name"]: one["genuine"] for one in written["labellers"]}
    assert genuine["careful"]["decoys"]["conversation"][1]["value"] == 0


def test_decoys_that_do_not_count_are_those_of_the_rates_report(run, capsys):
    """Of a judge: not assessed, or after a context whose own turn was not."""
    run.generations["text"] = [f"turn {i}" for i in range(ROWS)]
    drawn, items = draw_decoys(run), items_of(run)
    lost = {items_of(run, drawn)[ROWS:][3], items[0]}  # the first context's greedy turn is drawn
    names = "careful", "twin"
    judge = FakeJudge(
        lambda item, _: Verdict(CANNOT_ASSESS if item in lost else GENUINE), paid=False
    )
    for name in names:
        label_run(run, judge, name, Quiet())
    found = agreement(run)
    assert read_runs([run], "careful").gate.decoys == DECOYS - 2
    for name in names:
        assert found.floors[name].decoys["conversation"][0] == DECOYS - 2
        assert found.floors[name].left_out == 2
    print_floors(console(), found.floors)
    assert "in no category: careful 2, twin 2" in capsys.readouterr().out


def test_one_judge_under_two_names_is_noted(run, capsys):
    """In agreement and in rates; another setting is another judge."""
    for name, limit in (("one", 1), ("two", 1), ("three", 2)):
        judge = FakeJudge(lambda *_: Verdict(GENUINE), paid=False, limit=limit)
        label_run(run, judge, name, Quiet())
    note = f"one and two are one judge under several names in {run.path} (same kind and identity)"
    assert [line for line in read_runs([run], "three").notes if line.startswith(note)]
    assert main(["agreement", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert note in out and "three are" not in out and "and three" not in out


def test_without_decoys_nothing_is_said_of_them(run, capsys):
    plant(run, "one", [random_labels(0)])
    plant(run, "two", [random_labels(1)])
    print_floors(console(), agreement(run).floors)
    assert capsys.readouterr().out == ""
