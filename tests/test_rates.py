"""The figures of rates, against hand counts, brute force and simulation."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from ia_mech.errors import UserError
from ia_mech.estimates import ALL
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, FOLLOW_UP
from ia_mech.rates.compute import differences, estimates, floors, pass_at_k, rates
from ia_mech.rates.load import FAILED, JudgedTurns, restrict_responses
from ia_mech.stats import (
    cluster_mean,
    dyadic_mean,
    holm,
    paired_difference,
    prediction_powered,
    variance_components,
)

NEW, LOOP = "new_topic", "degenerate"
POWERED = "rate_prediction_powered"


def judged(turns: list[tuple], **columns) -> JudgedTurns:
    """From (source, temperature, sample, category) rows; other columns as given for all."""
    frame = pd.DataFrame(turns, columns=["source", "temperature", "sample", "category"])
    defaults = {
        **{"model": "m", "weights_hash": "w", "dataset": "d", "perturbation": "none"},
        **{"run": "cache/A", "unlabelled": "", "unfinished": False, "fitted": False},
        **dict.fromkeys(("truth", "inclusion", "dependent"), np.nan),
    }
    for name, value in (defaults | columns).items():
        frame[name] = value
    frame["context"] = frame["source"]
    frame["temperature"] = frame["temperature"].astype(float)
    assessed = ~frame["category"].isin([FAILED, CANNOT_ASSESS])
    frame["follow_up"] = (frame["category"] == FOLLOW_UP).astype(float).where(assessed)
    return JudgedTurns(frame, "planted", {}, "anna", [], [])


def erring(seed: int, sources: int = 100, samples: int = 6) -> tuple[JudgedTurns, float]:
    """Turns of which 20% are follow-ups, with a judge of 0.8 sensitivity and 0.9 specificity. A
    part is annotated, more of those it calls follow-ups. And the true rate."""
    rng = np.random.default_rng(seed)
    count = sources * samples
    chance = np.repeat(rng.beta(1, 4, size=sources), samples)
    truth = rng.random(count) < chance
    accepted = np.where(truth, rng.random(count) < 0.8, rng.random(count) < 0.1)
    inclusion = np.where(accepted, 0.6, 0.2)
    annotated = rng.random(count) < inclusion
    turns = [
        (f"s{i // samples:03d}", 1, i % samples, FOLLOW_UP if yes else NEW)
        for i, yes in enumerate(accepted)
    ]
    known = np.where(annotated, truth.astype(float), np.nan)
    inclusion = np.where(annotated, inclusion, np.nan)
    return judged(turns, truth=known, inclusion=inclusion), truth.mean()


def picked(rows: pd.DataFrame, quantity: str, temperature: float = 1.0, **more):
    """The rows of that kind."""
    found = rows[(rows["quantity"] == quantity) & (rows["temperature"] == temperature)]
    for name, value in more.items():
        found = found[found[name] == value]
    return found


def one(rows: pd.DataFrame, quantity: str, temperature: float = 1.0, **more):
    (row,) = picked(rows, quantity, temperature, **more).itertuples(index=False)
    return row


def powered(turns: pd.DataFrame):
    """The corrected rate of these turns, by the function that has tests of its own."""
    columns = turns["follow_up"], turns["truth"], turns["source"]
    return prediction_powered(*columns, inclusion=turns["inclusion"])


# -- rates ---------------------------------------------------------------------------------------


def test_rates_and_profile_are_the_counted_ones():
    turns = [("a", 0, 0, NEW), ("b", 0, 0, FOLLOW_UP)]
    turns += [("a", 1, i, c) for i, c in enumerate([FOLLOW_UP, NEW, FOLLOW_UP, CANNOT_ASSESS])]
    turns += [("b", 1, i, c) for i, c in enumerate([LOOP, NEW, FOLLOW_UP, FAILED, CANNOT_ASSESS])]
    rows = estimates(judged(turns), level=0.9)
    rate = one(rows, "rate")
    assert (rate.value, rate.events, rate.rows, rate.sources) == (0.5, 3, 6, 2)
    expected = cluster_mean([1, 0, 1, 0, 0, 1], list("aaabbb"), proportion=True, level=0.9)
    assert (rate.low, rate.high, rate.level) == (expected.low, expected.high, 0.9)
    assert rate.method == expected.method
    shares = {name: one(rows, "category_share", category=name) for name in ASSESSED}
    assert {n: r.events for n, r in shares.items() if r.events} == {FOLLOW_UP: 3, NEW: 2, LOOP: 1}
    assert sum(row.value for row in shares.values()) == pytest.approx(1)
    apart = [(row.events, row.rows) for row in (one(rows, CANNOT_ASSESS), one(rows, FAILED))]
    assert apart == [(2, 9), (1, 9)]
    assert one(rows, "rate", 0.0).value == 0.5
    assert not rows["quantity"].str.endswith("complete").any()


def test_what_the_rate_hangs_on_is_taken_from_pairs_of_turns():
    rng, turns, contexts = np.random.default_rng(0), [], []
    for source in "abcdef":
        for response in range(3):
            for sample in range(4):
                category = FOLLOW_UP if rng.random() < 0.2 + 0.3 * response else NEW
                turns.append((source, 1, sample, category))
                contexts.append(f"{source}/r{response}")
    whole = judged(turns)
    whole = replace(whole, turns=whole.turns.assign(context=contexts))
    tables = [own["follow_up"].to_numpy().reshape(3, 4) for _, own in whole.turns.groupby("source")]
    rows, expected = estimates(whole), variance_components(tables)
    for quantity, of in (
        ("variance_between_queries", expected.between_queries),
        ("variance_between_responses", expected.between_responses),
        ("reliability", expected.reliability(16)),
    ):
        row = one(rows, quantity)
        assert (row.value, row.low, row.high, row.sources) == (of.value, of.low, of.high, 6)
    alone = estimates(judged(turns[:4]))  # no query has siblings
    assert "reliability" not in set(alone["quantity"])


def test_every_figure_can_be_restricted_to_one_kind_of_response():
    whole, _ = erring(5, 60)
    turns = whole.turns.assign(unfinished=whole.turns["source"].str[-1].astype(int) < 3)
    turns.loc[turns["sample"] == 0, "temperature"] = 0.0
    whole = replace(whole, turns=turns)
    for responses in ("complete", "unfinished"):
        part = restrict_responses(whole, responses)
        kept = turns[turns["unfinished"] == (responses == "unfinished")]
        expected = estimates(replace(whole, turns=kept.assign(unfinished=False)))
        rows = estimates(part)
        assert POWERED in set(rows["quantity"])
        pd.testing.assert_frame_equal(rows, expected.assign(responses=responses), check_dtype=False)
        assert part.notes[-1].startswith(f"{len(kept)} of {len(turns)} user turns: those after")
        none = replace(whole, turns=turns.assign(unfinished=responses == "complete"))
        with pytest.raises(UserError, match=f"no user turn comes after a {responses} response"):
            restrict_responses(none, responses)
    complete = turns[~turns["unfinished"] & (turns["temperature"] == 1)]
    assert one(estimates(whole), "rate_complete").value == complete["follow_up"].mean()


def test_models_of_one_name_perturbations_and_datasets_stand_apart():
    turns = [("a", 1, 0, FOLLOW_UP), ("a", 1, 0, NEW), ("a", 1, 0, NEW)]
    rows = estimates(
        judged(turns, weights_hash=["v", "w", "v"], perturbation=["none", "none", "words"])
    )
    rates = rows.loc[rows["quantity"] == "rate", ["weights_hash", "perturbation", "value"]]
    assert rates.to_numpy().tolist() == [["v", "none", 1], ["v", "words", 0], ["w", "none", 0]]
    turns = [("a", 1, 0, FOLLOW_UP), ("b", 1, 0, NEW), ("c", 1, 0, NEW)]
    rows = estimates(judged(turns, dataset=["x", "y", "y"]))
    values = [one(rows, "rate", dataset=name).value for name in ("x", "y", ALL)]
    assert values == [1, 0, pytest.approx(1 / 3)]


# -- any of n ------------------------------------------------------------------------------------


def test_pass_at_k_is_the_mean_over_all_subsets():
    for samples in range(1, 8):
        for follow_up in range(samples + 1):
            marks = [1] * follow_up + [0] * (samples - follow_up)
            for n in range(1, 9):
                got = pass_at_k([follow_up], [samples], n)[0]
                if n > samples:
                    assert np.isnan(got)
                else:
                    expected = np.mean([any(subset) for subset in combinations(marks, n)])
                    assert got == pytest.approx(expected, abs=1e-12)


def test_reach_at_each_temperature():
    turns = [("a", 0, 0, FOLLOW_UP), ("b", 0, 0, NEW)]
    turns += [("a", 0.5, i, c) for i, c in enumerate([NEW, NEW])]
    turns += [("b", 0.5, i, c) for i, c in enumerate([NEW, CANNOT_ASSESS])]
    turns += [("a", 1, i, c) for i, c in enumerate([FOLLOW_UP, NEW])]
    turns += [("b", 1, i, c) for i, c in enumerate([NEW, NEW])]
    rows = estimates(judged(turns))
    assert [one(rows, "pass_at_k", n_samples=n).value for n in (1, 2)] == [0.25, 0.5]
    lone = one(rows, "pass_at_k", 0.5, n_samples=2)  # b has one sample that was assessed
    assert (lone.value, lone.rows) == (0, 1)
    assert picked(rows, "pass_at_k", 0.0).empty


# -- differences ---------------------------------------------------------------------------------


def test_differences_are_paired_by_source_and_corrected_over_all():
    rng, turns = np.random.default_rng(0), []
    for source in range(25):
        lean = rng.uniform(-0.1, 0.1)
        for temperature, rate, samples in ((0, 0.1, 1), (0.7, 0.3, 3), (1, 0.6, 3)):
            for sample in range(samples):
                category = FOLLOW_UP if rng.random() < rate + lean else NEW
                turns.append((f"s{source:03d}", temperature, sample, category))
    turns.append(("s099", 1, 0, FOLLOW_UP))  # without a greedy turn it doesn't count
    sample = judged(turns)
    turns = sample.turns
    turns["dataset"] = np.where(turns["source"] < "s012", "x", "y")
    rows = estimates(sample)
    found = rows[rows["quantity"] == "difference"]
    assert len(found) == 6  # two temperatures of x, y and both
    for row in found.itertuples():
        own = turns if row.dataset == ALL else turns[turns["dataset"] == row.dataset]
        own = own[own["source"] != "s099"]
        columns = []
        for temperature in (row.temperature, 0):
            at = own[own["temperature"] == temperature]
            columns += [at["follow_up"], at["source"]]
        paired = paired_difference(*columns)
        expected = paired.difference
        assert (row.value, row.low, row.high) == (expected.value, expected.low, expected.high)
        assert (row.p, row.test, row.method) == (paired.p, paired.test, expected.method)
        assert row.rows == len(columns[0]) + len(columns[2])
    for _, family in found.groupby(found["dataset"] == ALL):
        assert family["p_holm"].tolist() == holm(family["p"]).tolist()
    assert rows["p_holm"].notna().sum() == len(found)


# -- the judge's errors --------------------------------------------------------------------------


def test_corrected_rates_find_the_truth_behind_a_judge_that_errs():
    sample, truth = erring(5, sources=300)
    assert sample.turns["follow_up"].mean() - truth > 0.02
    row, expected = one(estimates(sample), POWERED), powered(sample.turns)
    assert (row.value, row.low, row.high) == (expected.value, expected.low, expected.high)
    assert row.low < truth < row.high and "anna" in row.method


def test_turns_that_the_judge_was_fitted_on_leave_the_corrections():
    sample, _ = erring(1)
    turns = sample.turns
    known = turns["source"] < "s020"
    expected = powered(turns[~known])
    turns["fitted"] = known
    turns.loc[known, "category"] = FOLLOW_UP  # what the judge says of them has no bearing
    turns.loc[known, ["follow_up", "truth", "inclusion"]] = 1.0
    row = one(estimates(sample), POWERED)
    assert (row.value, row.low, row.high) == (expected.value, expected.low, expected.high)
    counts = turns.loc[~known, "truth"].notna().sum(), (~known).sum(), 80
    assert (row.events, row.rows, row.sources) == counts


def test_prediction_powered_needs_annotations_in_the_group():
    turns = [(f"s{i:02d}", t, 0, FOLLOW_UP if i % 3 else NEW) for t in (0, 1) for i in range(40)]
    truth = np.array([float(i % 3 > 0) for _ in range(2) for i in range(40)])
    truth[5], truth[50] = 0, 1
    truth[70:] = np.nan  # 40 annotated at greedy, 30 at T = 1
    rows = estimates(judged(turns, truth=truth, inclusion=0.5))
    assert one(rows, POWERED, 0.0).events == 40
    assert one(rows, POWERED).events == 30
    truth[69] = np.nan
    rows = estimates(judged(turns, truth=truth, inclusion=0.5))
    assert picked(rows, POWERED).empty


def test_no_corrected_rate_of_turns_that_nobody_could_label():
    """Dataset x of run A is annotated, y of run B not."""
    sample, other = erring(2, 60)[0], erring(3, 60)[0]
    other.turns["truth"] = other.turns["inclusion"] = np.nan
    known = pd.concat([sample.turns, other.turns], ignore_index=True)
    known["dataset"] = np.repeat(["x", "y"], len(other.turns))
    known["source"] = known["context"] = known["dataset"] + known["source"]
    known["unlabelled"] = known["dataset"].map({"x": "", "y": "turns of B"})
    rows = estimates(replace(sample, turns=known))
    own = one(rows, POWERED, dataset="x")
    assert own.low < own.value < own.high
    assert picked(rows, POWERED, dataset="y").empty
    row = one(rows, POWERED, dataset=ALL)
    assert np.isnan([row.value, row.low, row.high]).all() and row.events == own.events
    assert row.method == "undefined: no labels of turns of B; truth: anna"


# -- the rate table ------------------------------------------------------------------------------


def test_the_rate_table_takes_any_columns_and_any_baseline():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"source": np.repeat([f"s{i}" for i in range(20)], 8)})
    rows["condition"] = np.tile(["plain", "steered"], 80)
    rows["half"] = np.where(rows.index < 80, "choosing", "reporting")
    rows["apt"] = (rng.random(160) < 0.4).astype(float)
    found = list(rates(rows, ["half", "condition"], outcome="apt", term="arm"))
    assert [(row.names["half"], row.names["condition"], row.names["term"]) for row in found] == [
        (half, condition, "arm")
        for half in ("choosing", "reporting")
        for condition in ("plain", "steered")
    ]
    expected = rows.groupby(["half", "condition"])["apt"].mean()
    assert [row.estimate.value for row in found] == pytest.approx(expected.tolist())
    found = list(differences(rows, ["half", "condition"], {"condition": "plain"}, outcome="apt"))
    assert [row.names["condition"] for row in found] == ["steered"] * 2
    apart = (expected.xs("steered", level=1) - expected.xs("plain", level=1)).tolist()
    assert [row.estimate.value for row in found] == pytest.approx(apart)


def test_above_a_floor_all_three_numbers_are_of_the_same_decoys():
    rng = np.random.default_rng(1)
    decoys = pd.DataFrame({"source": [f"s{i % 15}" for i in range(60)], "temperature": 1.0})
    decoys["shown_source"] = [f"s{(i + 1) % 15}" for i in range(60)]
    decoys["decoy"] = "wrong_conversation"
    decoys["follow_up"] = rng.choice([0.0, 1.0, np.nan], 60)
    decoys["own_follow_up"] = rng.choice([0.0, 1.0, np.nan], 60)
    rate, floor, beyond = floors(decoys, "wrong_conversation", ["temperature"])
    both = decoys.dropna()
    assert floor.estimate.value == both["follow_up"].mean()
    difference = both["own_follow_up"] - both["follow_up"]
    turns = cluster_mean(both["own_follow_up"], both["source"], proportion=True)
    assert rate.estimate == turns
    assert beyond.estimate == dyadic_mean(difference, both["source"], both["shown_source"])
    assert {row.rows for row in (rate, floor, beyond)} == {len(both)}
    assert not list(floors(decoys, "sibling"))


def test_the_reach_of_one_turn_is_a_mean_of_shares():
    """Of 60 contexts with 16 turns each, it varies as little as the rate does."""
    rng = np.random.default_rng(0)
    said = [FOLLOW_UP if yes else NEW for yes in rng.random(960) < 0.4]
    turns = [(f"s{i // 16:02d}", 1, i % 16, one) for i, one in enumerate(said)]
    found = estimates(judged(turns)).set_index(["quantity", "n_samples"])
    reach = found.loc[("pass_at_k", 1)]
    rate = found.xs("rate", level="quantity").iloc[0]
    assert reach["value"] == pytest.approx(rate["value"])
    assert reach["high"] - reach["low"] < 1.3 * (rate["high"] - rate["low"])
