"""The control task: types that recur across sources, rates that are a function of them alone."""

import numpy as np
import pytest

from probes.controls import control_outcomes, types
from probes.outcome import Outcome


def contexts(count=400, seed=0):
    """(outcome, types) of 100 sources in two runs, their labels not the numbers of Outcome."""
    rng = np.random.default_rng(seed)
    trials = rng.integers(2, 9, count)
    positives = rng.binomial(trials, rng.beta(0.5, 1.0, count))
    sources = [f"s{i % 100}" for i in range(count)]
    kinds = types(rng.integers(1, 300, count), rng.zipf(1.5, count))
    return Outcome.of(positives, trials, sources, np.arange(count) % 2), kinds


def test_types_are_quartiles_by_opening():
    tokens = np.tile([10, 20, 30, 40], 5)
    opening = np.repeat([7, 7, 3, 3, 3], 4)
    found = types(tokens, opening)
    assert sorted(set(found)) == list(range(8))
    for a in range(20):
        for b in range(20):
            same = tokens[a] == tokens[b] and opening[a] == opening[b]
            assert (found[a] == found[b]) == same


def test_openings_beyond_the_eight_most_common_are_one():
    opening = np.concatenate([np.repeat(np.arange(100, 108), 3), [1, 2, 3, 4, 5, -1]])
    found = types(np.full(30, 9), opening)  # equal lengths are one bin
    assert len(set(found)) == 9
    assert len(set(found[24:])) == 1
    assert len(set(found[:24])) == 8


def test_equally_common_openings_are_told_apart_whatever_the_order_of_contexts():
    opening = np.arange(12).repeat(2)
    order = np.random.default_rng(0).permutation(24)
    tokens = np.arange(24) % 4
    np.testing.assert_array_equal(
        types(tokens[order], opening[order]), types(tokens, opening)[order]
    )


def test_all_contexts_of_a_type_get_one_rate_in_every_source():
    outcome, kinds = contexts()
    assert len({(s, t) for s, t in zip(outcome.sources, kinds, strict=True)}) > 2 * len(set(kinds))
    for control in control_outcomes(outcome, kinds, draws=5, seed=1):
        for kind in set(kinds):
            np.testing.assert_allclose(np.ptp(control.rate[kinds == kind]), 0, atol=1e-12)
        assert np.ptp(control.rate) > 0
        assert np.isin(np.round(control.rate, 9), np.round(outcome.rate, 9)).all()


def test_trials_sources_and_runs_stay():
    outcome, kinds = contexts()
    (control,) = control_outcomes(outcome, kinds, draws=1, seed=1)
    np.testing.assert_array_equal(control.trials, outcome.trials)
    np.testing.assert_array_equal(control.sources, outcome.sources)
    np.testing.assert_array_equal(control.runs, outcome.runs)
    checked = Outcome.of(control.positives, control.trials, control.sources, control.runs)
    np.testing.assert_array_equal(checked.positives, control.positives)


def test_equal_trials_give_whole_positives():
    outcome, kinds = contexts()
    equal = Outcome.of(np.arange(400) % 8, np.full(400, 7), outcome.sources)
    (control,) = control_outcomes(equal, kinds, draws=1, seed=1)
    np.testing.assert_array_equal(control.positives, control.positives.round())


def test_draws_are_reproducible_and_differ():
    outcome, kinds = contexts()
    three = control_outcomes(outcome, kinds, draws=3, seed=1)
    two = control_outcomes(outcome, kinds, draws=2, seed=1)
    for a, b in zip(two, three, strict=False):
        np.testing.assert_array_equal(a.positives, b.positives)
    assert (three[0].positives != three[1].positives).any()
    assert (control_outcomes(outcome, kinds, 1, seed=2)[0].positives != three[0].positives).any()


def test_rates_are_distributed_as_in_the_real_outcome():
    outcome, kinds = contexts()
    drawn = [control.rate for control in control_outcomes(outcome, kinds, draws=400, seed=0)]
    for quantile in (0.25, 0.5, 0.75):
        at = np.quantile(outcome.rate, quantile)
        assert np.mean(np.array(drawn) <= at + 1e-9) == pytest.approx(
            np.mean(outcome.rate <= at + 1e-9), abs=0.03
        )


def test_a_draw_with_one_rate_only_is_drawn_again():
    rare = np.zeros(50)
    rare[3] = 1
    outcome = Outcome.of(rare, np.ones(50), np.arange(50))
    for control in control_outcomes(outcome, np.arange(50) % 2, draws=30, seed=0):
        assert set(control.rate) == {0, 1}


def test_rates_must_differ_within_a_run():
    """Scores compare contexts of the same run only: types that tell runs apart are no task."""
    runs = np.repeat([0, 1], 10)
    outcome = Outcome.of(np.arange(20) % 3, np.full(20, 2), np.arange(20), runs)
    with pytest.raises(ValueError, match="only one"):
        control_outcomes(outcome, runs, draws=1, seed=0)
    kinds = np.where(runs == 0, 0, 1 + np.arange(20) % 2)
    for control in control_outcomes(outcome, kinds, draws=30, seed=0):
        assert np.ptp(control.rate[runs == 1]) > 0


def test_what_cannot_be_a_control_task_is_refused():
    outcome, kinds = contexts()
    with pytest.raises(ValueError, match="only one"):
        control_outcomes(outcome, np.zeros(400, int), draws=1, seed=0)
    with pytest.raises(ValueError, match="one entry per context"):
        control_outcomes(outcome, kinds[:-1], draws=1, seed=0)
    with pytest.raises(ValueError, match="one entry per context"):
        types([1, 2, 3], [1, 2])
    constant = Outcome.of(np.ones(400), np.full(400, 2), outcome.sources)
    with pytest.raises(ValueError, match="all have the same"):
        control_outcomes(constant, kinds, draws=1, seed=0)
