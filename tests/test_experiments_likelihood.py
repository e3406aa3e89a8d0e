"""Likelihood of written follow-ups: scores against forward passes, and estimates by hand."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scored
from conftest import Silent

from experiments import likelihood
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
from ia_mech.errors import UserError
from ia_mech.run import Run
from ia_mech.settings import Settings


@pytest.fixture(scope="module")
def runs(tiny_model_dir, tiny_subject, tmp_path_factory) -> list[Run]:
    """Written follow-ups, and two responses that the model wrote to the same queries."""
    folder = tmp_path_factory.mktemp("likelihood")
    decoding = {"temperatures": (0.85, 1.0), "samples": 1, "max_new_tokens": 5}
    data = {"dataset": scored.dataset(folder / "chats.jsonl"), "limit": None}
    written = {"response": "generate", "responses": 2, "unfinished": True, "max_response_tokens": 4}
    made = []
    for name, options in (("plain", {}), ("siblings", written)):
        settings = Settings(**decoding, **data, model=str(tiny_model_dir), **options)
        made.append(collect(settings, tiny_subject, folder / name, Silent()))
    return made


def experiment(*runs) -> Likelihood:
    args = Likelihood.build_parser().parse_args([str(run.path) for run in runs])
    args.resamples = 100
    return Likelihood(list(runs), args, Path())


@pytest.fixture(scope="module")
def measured(runs, tmp_path_factory):
    """The experiment, its units, and what the command scored of them."""
    out = tmp_path_factory.mktemp("out")
    words = [str(run.path) for run in runs]
    assert main([*words, "--resamples", "100", "--out", str(out)]) == 0
    one = experiment(*runs)
    one.check()
    units = one.units()
    assert one.notes == []
    return one, units, pd.read_parquet(out / "turns.parquet")


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


def test_what_replaces_a_response_is_another_one(measured, runs):
    one, units, _ = measured
    plain, siblings = (run.contexts for run in runs)
    assert len(units) == len(one.references) == 8
    responses = dict(zip(plain["context_id"], plain["messages"], strict=True))
    for unit, name in zip(units, one.references["context_id"], strict=True):
        own = responses[name][-1]["content"]
        written = siblings[siblings["source_id"] == name]["messages"]
        others = {messages[-1]["content"] for messages in written} - {own}
        assert [kind for kind, _ in unit.contexts].count(SIBLINGS) == len(others)
        assert len({ids for kind, ids in unit.contexts if kind == OTHERS}) <= likelihood.DONORS
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


def test_one_follow_up_has_estimates_without_intervals(measured, runs):
    one, _, rows = measured
    alone = experiment(runs[0])
    alone.references, alone.curve = one.references[:1], one.curve[:1]
    rows = rows[(rows["row"] == 0) & (rows["against"].isna() | (rows["against"] == EMPTY))]
    found = estimates_of(alone.estimate(rows), Likelihood.columns, 0.95)
    contrasts = found[found["quantity"] == "contrast, bits"]
    assert contrasts["term"].tolist() == [EMPTY]
    assert contrasts["low"].isna().all() and set(contrasts["method"]) == {"one source"}
    assert any("count the topic, too" in note for note in alone.notes)  # there are no siblings


def test_the_sentence_is_about_siblings_and_another_follow_up_is_the_control(measured):
    one, _, rows = measured
    sentence, control = one.conclude(estimates_of(one.estimate(rows), Likelihood.columns, 0.95))
    assert "after sibling responses" in sentence
    assert control.startswith("The same of another conversation's follow-up")


def test_a_follow_up_that_two_runs_score_counts_once(runs):
    plain = runs[0]
    for one, other in zip(read_references([plain]), read_references([plain, plain]), strict=True):
        pd.testing.assert_frame_equal(one, other)


def test_runs_without_follow_ups_to_given_responses_are_refused(runs):
    plain, siblings = runs
    contexts = plain.contexts[plain.contexts["reference"].isna()]
    for run in (SimpleNamespace(path=plain.path, contexts=contexts), siblings):
        with pytest.raises(UserError, match="no context has what a user really said after the"):
            read_references([run])


def test_follow_ups_written_without_the_response_are_marked_and_not_pooled(measured, monkeypatch):
    one, _, rows = measured
    monkeypatch.setattr(likelihood, "BLIND", ("odd",))
    found = estimates_of(one.estimate(rows), Likelihood.columns, 0.95)
    own = found[(found["quantity"] == "contrast, bits") & (found["term"] == SIBLINGS)]
    values = own.set_index("dataset")["value"]
    assert set(values.index) == {"plain", "odd (response unseen)", "(all)"}
    assert values["(all)"] == values["plain"]
