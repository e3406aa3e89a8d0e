"""Rates beside their floor: what a judge's decoys say, and the word that follows from it."""

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from judging import DECOYS, FakeJudge
from shell import call

from ia_mech.display import Quiet, Recorder
from ia_mech.errors import UserError
from ia_mech.judge.decoys import draw_decoys, own_turns
from ia_mech.judge.label import items_of, label_run
from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE
from ia_mech.judge.verdict import Verdict
from ia_mech.rates.__main__ import main
from ia_mech.rates.compute import estimates
from ia_mech.rates.gate import gate_of
from ia_mech.rates.load import Judged, read_runs
from ia_mech.rates.show import print_rates
from ia_mech.report.contents import shown
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.stats import dyadic_mean

NEW = "new_topic"


@pytest.fixture
def run(run) -> Run:
    """A run whose turns all differ."""
    run.generations["text"] = [f"turn {i}" for i in range(len(run.generations))]
    return run


def judged_by(run: Run, say) -> Judged:
    """The run as read after ``say`` (item → category or verdict) has judged it."""

    def verdict(item, _):
        said = say(item)
        return said if isinstance(said, Verdict) else Verdict(said)

    label_run(run, FakeJudge(verdict, paid=False), "planted", Quiet())
    return read_runs([run])


def planted(run: Run, every: int = 2) -> set:
    """Every so many-th turn, with the context it followed."""
    return set(items_of(run)[::every])


def number(item) -> int:
    return int(item.turn.split()[1])


# -- the gate -------------------------------------------------------------------------------------


def test_a_judge_that_accepts_every_turn_has_no_excess_and_is_not_grounded(run):
    judged = judged_by(run, lambda item: GENUINE)
    gate = judged.gate
    assert (gate.rate, gate.floor, gate.decoys) == (1, 1, DECOYS)
    assert gate.excess.low < gate.excess.value == 0 < gate.excess.high
    assert gate.verdict == gate.word == "not grounded" and str(gate) == "planted: not grounded"
    found = estimates(judged)
    assert set(found["gate"]) == {"not grounded"}


def test_a_judge_of_well_formed_turns_has_no_excess_and_is_not_grounded(run):
    """What it likes about a turn cancels exactly: every turn drawn is a decoy once."""
    judged = judged_by(run, lambda item: GENUINE if number(item) % 4 else NEW)
    assert 0.5 < judged.gate.rate == judged.gate.floor < 1
    assert judged.gate.excess.value == 0 and judged.gate.verdict == "not grounded"
    excess = estimates(judged).query("quantity == 'excess'")
    assert (excess["value"] == 0).all()
    assert (excess["low"] < 0).all() and (excess["high"] > 0).all()


def test_a_perfect_judge_finds_the_share_of_planted_turns_and_is_grounded(run):
    genuine = planted(run)
    judged = judged_by(run, lambda item: GENUINE if item in genuine else NEW)
    own = run.generations.assign(planted=[item in genuine for item in items_of(run)])
    share = draw_decoys(run).merge(own, on=list(KEY))["planted"].mean()
    gate = judged.gate
    assert gate.floor == 0 and gate.rate == gate.excess.value == share
    assert gate.verdict == "grounded" and gate.margin.low > 0


def test_between_the_two_nothing_is_decided(run):
    genuine = planted(run)
    judged = judged_by(
        run, lambda item: GENUINE if item in genuine or number(item) % 5 == 0 else NEW
    )
    assert judged.gate.margin.low < 0 < judged.gate.margin.high
    assert judged.gate.verdict == "undecided" and judged.gate.word == f"undecided ({DECOYS} decoys)"
    assert "undecided. Of" in judged.gate.sentence


def test_one_rare_success_does_not_make_a_judge_grounded(run):
    one = items_of(run)[0]
    assert judged_by(run, lambda item: GENUINE if item == one else NEW).gate.verdict == "undecided"


def test_verdicts_without_decoys_have_no_floor(run):
    judged_by(run, lambda item: GENUINE)
    path = run.path / "judgements" / "planted.parquet"
    table = pq.read_table(path).slice(0, len(run.generations))
    run.labels.write_judgements("planted", table.to_pylist(), {"identity": {"kind": "fake"}})
    judged = read_runs([run])
    assert judged.gate.word == "no decoys" and judged.decoys.empty
    found = estimates(judged)
    assert set(found["gate"]) == {"no decoys"} and found["decoy"].isna().all()


def test_perturbed_contexts_do_not_decide():
    pairs = pd.DataFrame(
        {"perturbation": ["none"] * 40 + ["empty"] * 40, "decoy": "conversation"}
        | {"source": [*range(40)] * 2, "lender": [*range(1, 40), 0] * 2}
        | {"genuine": [0.0] * 40 + [1.0] * 40, "own_genuine": 1.0}
    )
    assert gate_of(pairs, "j", "genuine").verdict == "grounded"
    assert gate_of(pairs[40:], "j", "genuine").verdict == "not grounded"
    assert gate_of(pairs.assign(decoy="response"), "j", "genuine").verdict == "no decoys"


# -- rate, floor and excess -----------------------------------------------------------------------


def test_the_three_numbers_are_of_the_same_turns(run):
    judged = judged_by(run, lambda item: GENUINE if number(item) % 3 else NEW)
    found = estimates(judged)
    texts = run.generations.set_index(list(KEY))["text"].str.split().str[1].astype(int) % 3 > 0
    for temperature in (0.0, 0.7, 1.0):
        drawn = draw_decoys(run).query("temperature == @temperature")
        values = {
            row.quantity: row
            for row in found[found["decoy"].notna() & (found["temperature"] == temperature)]
            .query("dataset == '(all)'")
            .itertuples()
        }
        share = np.mean([texts[tuple(key)] for key in drawn[list(KEY)].to_numpy()])
        assert values["decoyed_rate"].value == values["floor"].value == share
        assert values["excess"].rows == len(drawn) == 12 and pd.isna(values["excess"].events)
        assert values["floor"].events == values["decoyed_rate"].events == share * 12
        assert values["excess"].sources == 12


def test_a_pair_with_an_unassessed_verdict_leaves_and_is_counted(run):
    drawn, items = draw_decoys(run), items_of(run)
    # The first context's own turn, greedy, which is drawn; and two decoys at T = 1, one of them
    # after the context whose own turn isn't assessed either.
    late = [*np.flatnonzero(drawn["temperature"] == 1)[:2]]
    others = [items_of(run, drawn)[len(items) :][at] for at in late]
    own = items[run.generations.set_index(list(KEY)).index.get_loc(own_turns(drawn)[late[0]])]
    lost = {items[0], own, *others}
    judged = judged_by(run, lambda item: CANNOT_ASSESS if item in lost else GENUINE)
    rows = estimates(judged).query("decoy.notna() and dataset == '(all)'")
    rows = rows.assign(temperature=rows["temperature"].fillna(np.inf))  # over all of them
    counted = rows.pivot(index="quantity", columns="temperature", values="rows")
    assert (counted.to_numpy() == [11, 12, 10, 33]).all()
    assert len(drawn) == 36 and judged.gate.decoys == 33
    assert (
        "3 of 36 decoys are left out: the judge gave no category to the decoy (2) or else to the "
        "context's own turn (1)."
    ) in judged.notes


def test_the_interval_is_dyadic_over_both_sources(run):
    rng = np.random.default_rng(0)
    said = {}
    judged = judged_by(run, lambda item: said.setdefault(item, rng.choice([GENUINE, NEW])))
    pairs = judged.decoys
    difference = pairs["own_genuine"] - pairs["genuine"]
    expected = dyadic_mean(difference, pairs["source"], pairs["lender"])
    rows = estimates(judged).query("quantity == 'excess' and dataset == '(all)'")
    (row,) = rows[rows["temperature"].isna()].itertuples()
    assert (row.value, row.low, row.high) == (expected.value, expected.low, expected.high)
    assert row.value == pytest.approx(difference.mean())


def test_grounded_is_an_outcome_of_its_own(run):
    """Genuine and a small p value; with its own rate, floor and gate."""
    genuine = planted(run, 3)

    def say(item):
        return Verdict(
            GENUINE if number(item) % 4 else NEW, grounded_p=0.04 + 0.02 * (item not in genuine)
        )

    judged = judged_by(run, say)
    assert judged.outcomes == ["genuine", "grounded"]
    turns = judged.turns
    is_genuine = turns["genuine"] == 1
    assert turns["grounded"].sum() == sum(i % 4 > 0 for i in range(0, 60, 3))
    assert (turns.loc[~is_genuine, "grounded"] == 0).all()
    assert judged.gates["genuine"].verdict == "not grounded"
    assert judged.gates["grounded"].floor == 0
    found = estimates(judged)
    rates = found[(found["quantity"] == "follow_up_rate") & (found["dataset"] == "(all)")]
    assert rates["outcome"].tolist() == ["grounded"] * 3 + ["genuine"] * 3
    assert set(found["category"][found["outcome"] == "grounded"].dropna()) == set()


def test_turns_worded_alike_are_no_contrast_and_are_counted(run):
    run.generations["text"] = "the same"
    judged = judged_by(run, lambda item: GENUINE)
    assert judged.decoys["alike"].all()
    assert any(
        note.startswith(f"{DECOYS} of {DECOYS} decoys are no contrast") for note in judged.notes
    )


def test_decoys_stay_out_of_rates(run):
    """Whatever a judge says of decoys, the rates of the run are the same."""
    own = set(items_of(run))
    found = []
    for other in (GENUINE, NEW):
        judged = judged_by(run, lambda item, other=other: GENUINE if item in own else other)
        rates = estimates(judged).query("decoy.isna()").drop(columns="gate")
        found.append(rates.reset_index(drop=True))
        assert len(judged.turns) == 60 and (judged.turns["genuine"] == 1).all()
    pd.testing.assert_frame_equal(*found)


@pytest.mark.parametrize(
    ("column", "value"),
    [("shown", "nowhere"), ("decoy", "neighbour"), ("category", "odd"), ("item", "0" * 16)],
)
def test_decoys_that_are_not_of_the_run_are_refused(run, column, value):
    judged_by(run, lambda item: GENUINE)
    rows = pq.read_table(run.path / "judgements" / "planted.parquet").to_pylist()
    rows[-1][column] = value
    run.labels.write_judgements("planted", rows, {"identity": {}})
    with pytest.raises(
        UserError, match=r"the decoys of 'planted' in .* are not of its turns; judge"
    ):
        read_runs([run])


def test_every_table_says_which_judge_and_of_how_many_decoys(run):
    screen = Recorder()
    judged = judged_by(run, lambda item: CANNOT_ASSESS if number(item) == 7 else GENUINE)
    judged.decoys.loc[judged.decoys.index[0], "genuine"] = np.nan  # after the gate was found
    print_rates(screen, judged, estimates(judged))
    titles = [shown(table).title for table in screen.tables]
    assert len(titles) > 4 and all("judge planted: not grounded" in title for title in titles)
    for title, table in zip(titles, screen.tables, strict=True):
        if "(floor)" in title:
            pooled = shown(table).rows[-1][3]
            assert f" · {pooled} decoys\n" in title and int(pooled) < DECOYS
            break
    else:
        pytest.fail("no table has a floor")


# -- the command ----------------------------------------------------------------------------------


def test_the_command_prints_floor_and_word_within_100_columns(merged, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    run = Run.open(shutil.copytree(merged.path, tmp_path / "run"))
    label_run(run, FakeJudge(lambda *_: Verdict(GENUINE), paid=False), "planted", Quiet())
    paths = {kind: tmp_path / f"rates.{kind}" for kind in ("json", "csv", "parquet")}
    flags = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    outcome = call(main, [str(run.path), *flags, "--examples", "1"], capfd)
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("genuine after their own"))
    table = lines[at + 1 : at + 20]
    assert all(len(line.rstrip()) <= 100 for line in table)
    head = next(line for line in table if line.startswith("┃"))
    assert all(word in head for word in ("all turns", "decoys", "rate", "floor", "excess"))
    pooled = [line.split("│")[2:-1] for line in outcome.out.splitlines() if "│    all │" in line]
    gate = read_runs([run]).gate
    ends = f"+0.00 [{gate.excess.low:+.2f}, {gate.excess.high:+.2f}]"
    assert [cell.strip() for cell in pooled[-1]] == ["all", "–", f"{DECOYS}", "1.00", "1.00", ends]
    assert (
        f"judge planted on genuine turns: not grounded. Of {DECOYS} turns it accepts 1.00 after "
        "their own conversation and 1.00 after another one, as decoys: an excess of"
    ) in outcome.out
    assert "examples · judge planted: not grounded (drawn by seed" in outcome.out
    assert json.loads(paths["json"].read_text())["about"]["gates"] == {"genuine": "not grounded"}
    for frame in (pd.read_csv(paths["csv"]), pd.read_parquet(paths["parquet"])):
        assert set(frame["gate"]) == {"not grounded"} and set(frame["outcome"]) == {"genuine"}
        assert {"decoyed_rate", "floor", "excess"} <= set(frame["quantity"])
