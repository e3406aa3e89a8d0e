"""Likelihood of real follow-ups: what is scored, against forward passes, and estimates by hand."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scored
from conftest import Silent
from shell import call, refusal

from experiments import likelihood
from experiments.experiment import Model
from experiments.likelihood import (
    CONTROL,
    EMPTY,
    OTHERS,
    REFERENCE,
    SHUFFLED,
    SIBLINGS,
    Likelihood,
    contrasts_of,
    main,
    read_references,
)
from experiments.tables import estimates_of
from ia_mech.collect.job import collect
from ia_mech.run import Run
from ia_mech.settings import Settings

DECODING = {"temperatures": (0.85, 1.0), "samples": 1, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def sampled(tiny_model_dir, tiny_subject, tmp_path_factory):
    """Make a run in a folder of its own."""

    def make(conversations=scored.CONVERSATIONS, **options) -> Run:
        folder = tmp_path_factory.mktemp("likelihood")
        data = scored.dataset(folder / "chats.jsonl", conversations)
        options = DECODING | {"model": str(tiny_model_dir)} | options
        settings = Settings(dataset=data, limit=None, **options)
        return collect(settings, tiny_subject, folder / "run", Silent())

    return make


@pytest.fixture(scope="module")
def plain(sampled) -> Run:
    """Tests leave it as it is."""
    return sampled()


@pytest.fixture(scope="module")
def siblings(sampled) -> Run:
    return sampled(response="generate", responses=2, max_response_tokens=4)


@pytest.fixture(scope="module")
def measured(plain, siblings, tiny_subject):
    """The experiment, its units, and what was scored of them."""
    words = [str(plain.path), str(siblings.path), "--swaps", "2", "--resamples", "100"]
    args = Likelihood.build_parser().parse_args(words)
    one = Likelihood([plain, siblings], args, Path())
    one.check()
    units = one.units()
    assert one.notes == []
    rows = [one.measure(Model(tiny_subject, one.chat, True), unit) for unit in units]
    return one, units, pd.concat(rows, ignore_index=True)


# -- what is measured ------------------------------------------------------------------------------


def test_scores_equal_full_forward_passes(measured, tiny_subject):
    _, units, rows = measured
    assert set(rows["against"].dropna()) == {SIBLINGS, OTHERS, EMPTY, SHUFFLED}
    for unit in units:
        mine = rows[rows["row"] == unit.row]
        for (kind, context), (name, ids, tokens) in (
            (place, turn) for place in unit.contexts for turn in unit.turns
        ):
            of = mine[(mine["turn"] == name) & (mine["against"].fillna("") == (kind or ""))]
            if kind is not None and name not in (REFERENCE, CONTROL):
                assert of.empty
                continue
            full = scored.logprobs(tiny_subject.model, list(context), list(ids))
            nearest = (of["whole"] - full.sum()).abs().min()
            assert nearest <= scored.nats(len(ids))["atol"]
            nearest = (of["logprob"] - full[:tokens].sum()).abs().min()
            assert nearest <= scored.nats(len(ids))["atol"]


def test_what_replaces_a_response_is_another_one(measured, plain, siblings):
    one, units, _ = measured
    assert len(units) == len(one.references) == 8
    responses = dict(zip(plain.contexts["context_id"], plain.contexts["messages"], strict=True))
    for unit, name in zip(units, one.references["context_id"], strict=True):
        own = responses[name][-1]["content"]
        written = siblings.contexts[siblings.contexts["source_id"] == name]["messages"]
        others = {messages[-1]["content"] for messages in written} - {own}
        assert [kind for kind, _ in unit.contexts].count(SIBLINGS) == len(others)
        assert len({ids for kind, ids in unit.contexts if kind == OTHERS}) <= 2
        assert unit.contexts[0][0] is None


def test_contrasts_are_means_of_log_ratios_in_bits():
    rows = pd.DataFrame(
        [
            {"row": 0, "turn": REFERENCE, "against": None, "logprob": -2.0},
            {"row": 0, "turn": REFERENCE, "against": OTHERS, "logprob": -3.0},
            {"row": 0, "turn": REFERENCE, "against": OTHERS, "logprob": -5.0},
            {"row": 0, "turn": REFERENCE, "against": EMPTY, "logprob": -1.0},
        ]
    ).assign(tokens=3, whole=0.0)
    found = contrasts_of(rows).set_index("against")
    bits = found["bits"]
    assert bits[OTHERS] == pytest.approx(2 / np.log(2))
    assert bits[EMPTY] == pytest.approx(-1 / np.log(2))
    assert found["placebo"][OTHERS] == pytest.approx(2 / np.log(2))
    assert np.isnan(found["placebo"][EMPTY])
    assert found["likeliest"].to_dict() == {OTHERS: 1.0, EMPTY: 0.0}
    assert found["chance"].to_dict() == {OTHERS: 1 / 3, EMPTY: 1 / 2}


# -- estimates -------------------------------------------------------------------------------------


def test_a_turn_to_which_all_responses_are_alike_has_no_contrast():
    """Means of logarithms: 400 contexts whose log-probabilities owe the response nothing."""
    rng = np.random.default_rng(0)
    rows = [
        {"row": row, "turn": REFERENCE, "against": against, "logprob": value}
        for row in range(400)
        for against, value in zip(
            (None, OTHERS, OTHERS, OTHERS), rng.normal(-20, 3, size=4), strict=True
        )
    ]
    found = contrasts_of(pd.DataFrame(rows).assign(tokens=5, whole=0.0))
    error = found["bits"].std() / 20
    assert abs(found["bits"].mean()) < 3 * error
    assert abs(found["likeliest"].mean() - 0.25) < 3 * np.sqrt(0.25 * 0.75 / 400)


def test_the_estimates_of_a_run_are_means_of_what_was_scored(measured):
    one, _, rows = measured
    found = estimates_of(one.estimate(rows), Likelihood.columns, 0.95)
    assert set(found["dataset"]) == {"plain", "odd", "(all)"}
    found = found[found["dataset"] == "(all)"]
    curve = np.stack(one.references["reference_logprob_tempered_with_end"].to_list()).mean(0)
    tempered = found[found["quantity"] == "tempered log p"]
    np.testing.assert_allclose(tempered["value"], curve)
    best = found[found["quantity"] == "best temperature"]["value"].item()
    assert best == tempered["temperature"].to_numpy()[np.argmax(curve)]
    values = found.set_index(["quantity", "term"])["value"]
    contrasts = contrasts_of(rows)
    mine = contrasts[(contrasts["turn"] == REFERENCE) & (contrasts["against"] == SIBLINGS)]
    np.testing.assert_allclose(values["contrast, bits", SIBLINGS], mine["bits"].mean())
    after = rows[rows["against"].isna()].pivot(index="row", columns="turn", values="whole")
    both = after.dropna(subset=["query"])
    np.testing.assert_allclose(
        values["follow-up beats", "query"], (both[REFERENCE] > both["query"]).mean()
    )


def test_one_follow_up_has_estimates_without_intervals(sampled, tiny_subject, capfd):
    run = sampled(scored.CONVERSATIONS[:1])
    outcome = call(main, [str(run.path), "--resamples", "100"], capfd)
    assert outcome.status == 0, outcome.err
    found = pd.read_parquet(run.path / "results" / "likelihood" / "estimates.parquet")
    contrasts = found[found["quantity"] == "contrast, bits"]
    assert contrasts["term"].tolist() == [EMPTY]  # there is no other response
    assert contrasts["low"].isna().all() and set(contrasts["method"]) == {"one source"}


# -- the command -----------------------------------------------------------------------------------


def test_the_command_scores_once_and_says_what_is_the_control(plain, siblings, tmp_path, capfd):
    run = Run.open(shutil.copytree(plain.path, tmp_path / "run"))
    words = [str(run.path), str(siblings.path), "--resamples", "100", "--swaps", "2"]
    outcome = call(main, words, capfd)
    assert outcome.status == 0, outcome.err
    folder = run.path / "results" / "likelihood"
    assert "after sibling responses" in outcome.out.splitlines()[0]
    assert outcome.out.splitlines()[1].startswith("The same of another conversation's follow-up")
    parts = {file.name: file.stat().st_mtime_ns for file in (folder / "parts").iterdir()}
    assert len(parts) == 8
    assert call(main, words, capfd).out == outcome.out
    assert {f.name: f.stat().st_mtime_ns for f in (folder / "parts").iterdir()} == parts
    alone = call(main, [str(run.path), "--resamples", "100"], capfd).out
    assert "count the topic, too. Add a run of --response generate" in alone


def test_a_follow_up_that_two_runs_score_counts_once(plain, sampled):
    alone, both = read_references([plain]), read_references([plain, sampled(seed=1)])
    for one, other in zip(alone, both, strict=True):
        pd.testing.assert_frame_equal(one, other)


def test_runs_without_follow_ups_to_given_responses_are_refused(sampled, siblings, capfd):
    for runs in ([sampled([scored.CONVERSATIONS[3]])], [siblings]):
        line = refusal(call(main, [str(run.path) for run in runs], capfd))
        assert line.startswith("no context has what a user really said after the response")


def test_follow_ups_written_without_the_response_are_marked_and_not_pooled(measured, monkeypatch):
    one, _, rows = measured
    monkeypatch.setattr(likelihood, "BLIND", ("odd",))
    found = estimates_of(one.estimate(rows), Likelihood.columns, 0.95)
    own = found[(found["quantity"] == "contrast, bits") & (found["term"] == SIBLINGS)]
    values = own.set_index("dataset")["value"]
    assert set(values.index) == {"plain", "odd (response unseen)", "(all)"}
    assert values["(all)"] == values["plain"]
