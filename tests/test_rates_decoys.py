"""Rates beside their floor: what decoys say of a judge, and the words that follow from it."""

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from judging import FakeJudge
from runs import planted as sampled
from runs import rewritten, stored
from test_results import example_result

from ia_mech.display import Quiet
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.judging import items_of, label_run
from ia_mech.judge.rubric import CANNOT_ASSESS, FOLLOW_UP
from ia_mech.judge.verdict import Verdict
from ia_mech.rates.gate import gate_of
from ia_mech.rates.load import JudgedTurns, read_runs
from ia_mech.rates.result import result
from ia_mech.results import folder_of, write
from ia_mech.run import Run
from ia_mech.run.labels import KEY

NEW = "new_topic"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run whose turns all differ, after two responses to each of twelve queries; each test judges
    it anew."""
    run = sampled(tmp_path_factory.mktemp("decoys") / "run", [24])
    for frame in (run.generations, run.contexts):
        query = np.unique(frame["context_id"], return_inverse=True)[1] // 2
        frame["source_id"], frame["dataset"] = [f"q{n}" for n in query], "d"
    run.contexts["messages"] = [
        [{"role": "user", "content": source}, {"role": "assistant", "content": context}]
        for source, context in zip(
            run.contexts["source_id"], run.contexts["context_id"], strict=True
        )
    ]
    run.generations["text"] = [f"turn {i}" for i in range(len(run.generations))]
    return stored(run)


def judged_by(run: Run, say) -> JudgedTurns:
    """The run as read after ``say`` (item → category or verdict) has judged it."""

    def verdict(item, _):
        answer = say(item)
        return answer if isinstance(answer, Verdict) else Verdict(answer)

    label_run(run, FakeJudge(verdict, paid=False), "planted", Quiet(), replace=True)
    return read_runs([run])


def planted(run: Run, share: float = 0.5) -> set:
    """Such a share of the turns, chosen at random, with the contexts that they followed."""
    chosen = np.random.default_rng(0).random(len(run.generations)) < share
    return {item for item, so in zip(items_of(run), chosen, strict=True) if so}


def number(item) -> int:
    return int(item.turn.split()[1])


# -- the gates ------------------------------------------------------------------------------------


def test_gates_of_judges_that_look_at_different_things(run):
    """What each calls follow-ups → rate and floor, the gate, and whether a reaction is shown."""
    follow_up, asked = planted(run), {item.turn: item.query for item in items_of(run)}
    first, rate = items_of(run)[0], len(follow_up) / 120
    most = np.mean([n % 7 > 0 for n in range(120)])
    for says, numbers, verdict, reacts in (
        (lambda item: True, (1, 1), "failed", False),
        # What a judge likes about a turn cancels: every decoy is paired with its own turn.
        (lambda item: number(item) % 4, (0.75, 0.75), "failed", False),
        (
            lambda item: item.query == asked[item.turn] and number(item) % 7,
            *((most, 0), "passed", False),
        ),
        # No decoy of twelve sources called a follow-up: the floor may be 0.39 for all that is seen.
        (lambda item: item in follow_up, (rate, 0), "undecided", True),
        (lambda item: item in follow_up or number(item) % 4 == 0, None, "undecided", True),
        (lambda item: item == first, (1 / 120, 0), "undecided", False),  # one rare success
    ):
        gate = judged_by(run, lambda item, yes=says: FOLLOW_UP if yes(item) else NEW).gate
        assert gate.decoys == 120 and (gate.verdict, gate.reacts) == (verdict, reacts)
        assert numbers is None or (gate.rate, gate.floor) == pytest.approx(numbers)
        assert gate.beyond.value == pytest.approx(gate.rate - gate.floor)
        assert gate.beyond.low < gate.beyond.value < gate.beyond.high
        decided = gate.margin.low > 0, gate.margin.high < 0
        assert decided == (verdict == "passed", verdict == "failed")
        assert gate.siblings.margin == gate.siblings.beyond


def test_the_figure_has_rate_and_floor(run):
    follow_up = planted(run)
    judged = judged_by(run, lambda i: FOLLOW_UP if i in follow_up else NEW)
    _, names = result(judged).figures["rates"].axes[0].get_legend_handles_labels()
    assert names == ["follow-ups", "after a wrong conversation"]


def test_sentence_and_control_follow_the_gate(run):
    follow_up = planted(run, 0.95)
    judged = judged_by(run, lambda item: FOLLOW_UP if item in follow_up else NEW)
    words = (
        "Judge's control passed: of the {} turns, judge planted calls {} follow-ups to their own"
    )
    gate = judged.gate
    assert gate.short.startswith(words.format(gate.decoys, gate.count(gate.rate)))
    found = result(judged)
    assert "turns react to their own response: they are follow-ups" in found.sentence
    assert "(of another query). Over all temperatures together, the diff" in found.control
    assert set(found.estimates["gate"]) == {"passed"}


def test_verdicts_without_decoys_have_no_floor(run):
    judged_by(run, lambda item: FOLLOW_UP)
    path = run.path / "judgements" / "planted.parquet"
    table = pq.read_table(path).slice(0, len(run.generations))
    run.labels.write_judgements("planted", table.to_pylist(), {"identity": {"kind": "fake"}})
    judged = read_runs([run])
    assert judged.gate.word == "no decoys" and judged.decoys.empty
    found = result(judged)
    assert set(found.estimates["gate"]) == {"no decoys"} and found.estimates["decoy"].isna().all()
    assert "There is no control of judge planted: it was shown no turn" in found.control


def test_perturbed_contexts_do_not_decide():
    pairs = pd.DataFrame(
        {"perturbation": ["none"] * 40 + ["empty"] * 40, "decoy": "wrong_conversation"}
        | {"source": [*range(40)] * 2, "shown_source": [*range(1, 40), 0] * 2}
        | {"follow_up": [0.0] * 40 + [1.0] * 40, "own_follow_up": 1.0}
    )
    assert gate_of(pairs, "j").verdict == "passed"
    assert gate_of(pairs[40:], "j").verdict == "failed"
    few = gate_of(pairs[:3], "j")
    assert (
        few.verdict == "undecided"
        and "calls 3 follow-ups to their own conversation, and none to a wrong one" in few.short
        and few.short.endswith(", of too few queries to be sure")
    )
    alone = gate_of(pairs.assign(decoy="sibling"), "j")
    assert alone.verdict == "no decoys" and alone.siblings.decoys == 40


def test_an_undecided_control_says_how_many_queries_would_do():
    def of(n: int):
        """8 of 20 turns are follow-ups, 3 of 20 after wrong conversations."""
        pairs = pd.DataFrame({"perturbation": "none", "decoy": "wrong_conversation"}, range(n))
        pairs = pairs.assign(source=range(n), shown_source=np.roll(range(n), 1))
        own, there = (pairs.index % 20 < 8).astype(float), (pairs.index % 20 > 16).astype(float)
        return gate_of(pairs.assign(own_follow_up=own, follow_up=there), "j")

    few = of(40)
    assert few.verdict == "undecided"
    (needed,) = re.findall(
        r"; 40 queries are too few to pass \(about (\d+) such would do\)", few.short
    )
    more = of(20 * math.ceil(int(needed) / 20))
    assert more.verdict == "passed" and 0 < more.margin.low < more.margin.value / 2


def test_counts_of_the_control_can_be_subtracted():
    n = 216
    pairs = pd.DataFrame({"perturbation": "none", "decoy": "wrong_conversation"}, index=range(n))
    pairs = pairs.assign(source=range(n), shown_source=np.roll(range(n), 1))
    pairs = pairs.assign(own_follow_up=pairs.index < 3, follow_up=pairs.index == 5)
    said = gate_of(pairs.astype({"own_follow_up": float, "follow_up": float}), "j").short
    assert "calls 3 follow-ups to their own conversation, and 1 to a wrong one" in said


def test_a_models_gate_is_the_same_whatever_other_runs_are_named(run, merged, tmp_path):
    """Of one model the judge calls own turns alone, of the other all turns follow-ups."""
    follow_up = planted(run, 0.95)
    judged_by(run, lambda item: FOLLOW_UP if item in follow_up else NEW)
    other = Run.open(shutil.copytree(merged.path, tmp_path / "other"))
    other = rewritten(
        other.path, "run.json", lambda record: record["identity"]["model"].update(name="second")
    )
    label_run(other, FakeJudge(paid=False), "planted", Quiet())
    alone = [read_runs([one]).gate for one in (run, other)]
    assert [gate.verdict for gate in alone] == ["passed", "failed"]
    both = read_runs([run, other])
    gates = {model: gate for (model, _), gate in both.by_model.items()}
    for gate, model in zip(alone, ("planted", "second"), strict=True):
        named = replace(gate, model=model, siblings=replace(gate.siblings, model=model))
        assert repr(gates[model]) == repr(named)
    assert both.gate == gates["second"]  # a claim about both rests on the worse one


# -- rate, floor and beyond -----------------------------------------------------------------------


def test_a_pair_with_an_unassessed_verdict_leaves_and_is_counted(run):
    decoys, items = draw_decoys(run), items_of(run)
    conversations = np.flatnonzero(decoys["decoy"] == "wrong_conversation")
    others = [items_of(run, decoys)[len(items) :][at] for at in conversations[-2:]]
    lost = {items[0], *others}  # the own turn of one conversation and one sibling; two decoys
    judged = judged_by(run, lambda item: CANNOT_ASSESS if item in lost else FOLLOW_UP)
    assert (judged.gate.decoys, judged.gate.siblings.decoys) == (117, 119)
    assert any(note.startswith("4 of 240 turns shown after wrong") for note in judged.notes)


# -- apt and dependent ----------------------------------------------------------------------------


def test_bits_are_joined_with_verdicts_turn_by_turn(run):
    """Evidence above 0 of 1 bit: the own response is likelier than its one sibling."""
    keys = run.generations[[*KEY, "source_id"]]
    evidence = np.where(keys["temperature"] > 0, np.where(keys["sample"] == 0, 0.9, -0.5), np.nan)
    about = {"kind": "reaction", "identities": [run.identity_digest]}
    # Every query is of a dataset of its own, and all have the same id: they aren't one source.
    names = {"dataset": keys["source_id"], "source_id": "1"}
    turns = keys.assign(evidence=evidence, run=run.name, **names)
    twice = pd.concat([turns.assign(run="another", evidence=9.0), turns])
    judged_by(run, lambda item: FOLLOW_UP if number(item) % 3 else NEW)
    for folder in (folder_of(run.path, "reaction"), run.path.with_name("run-reaction")):
        write(example_result(about=about, data={"turns": twice}), folder)
        judged = read_runs([run])
        own = judged.turns
        expected = ((own["follow_up"] == 1) & (own["sample"] == 0)).astype(float)
        sampled = own["temperature"] > 0
        assert own["dependent"][sampled].equals(expected[sampled])
        assert own["dependent"][~sampled].isna().all()
        shutil.rmtree(folder)
    found = result(judged)
    rows = found.estimates.query("outcome == 'dependent' and temperature == 1")
    assert rows["value"].item() == pytest.approx(expected[own["temperature"] == 1].mean())
    (further,) = (one for one in found.tables if one.title.startswith("further rates"))
    assert "dependent follow-ups" in further.columns
    assert read_runs([run]).turns["dependent"].isna().all()
