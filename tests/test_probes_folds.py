"""Folds, permutations against all label arrangements that give the folds, selection, its tests."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from itertools import permutations as orders_of

import numpy as np
import pytest
from scipy.stats import chisquare

from probes.fit.folds import exchangeable_sources, make_folds, permutations, select_and_test
from probes.targets import Outcome

DRAWS = 4_000
LAYERS, POSITIONS, FOLDS, PERMUTATIONS = 7, 3, 5, 29
INSIDE, SOURCES = 40, 50


def singles(positives, trials=8, runs=None):
    """One context per source."""
    number = len(positives)
    return Outcome.from_counts(positives, np.full(number, trials), range(number), runs)


def mixed(seed=0, sources=47):
    """Sources of one to three contexts in one or two runs, rows in any order."""
    rng = np.random.default_rng(seed)
    kinds = [(0,), (0,), (1,), (0, 0), (0, 1), (0, 1, 1)]
    rows = [(s, run) for s in range(sources) for run in kinds[rng.integers(len(kinds))]]
    rows = [rows[at] for at in rng.permutation(len(rows))]
    source, run = np.array(rows).T
    trials = rng.integers(1, 9, len(rows))
    return Outcome.from_counts(rng.binomial(trials, 0.4), trials, source, run)


def source_rates(outcome):
    number = range(outcome.sources.max() + 1)
    rows = [outcome.sources == s for s in number]
    return np.array([outcome.positives[r].sum() / outcome.trials[r].sum() for r in rows])


def composition(outcome, source):
    """How many contexts each source has in each run."""
    return tuple(sorted(outcome.runs[outcome.sources == source]))


def classes(outcome):
    found = {}
    for source in range(outcome.sources.max() + 1):
        found.setdefault(composition(outcome, source), []).append(source)
    return list(found.values())


def per_source(outcome, by_context):
    return np.array([by_context[outcome.sources == s][0] for s in range(outcome.sources.max() + 1)])


def assert_dealt_evenly(rates, fold, folds):
    """Sorted by rate, ties in some order, each ``folds`` in a row are in distinct folds.

    Fold f holds exactly one of each full block, so its sources by rate are the first block's, the
    second's, … (a fold's extra source comes last). That is the same as: no fold's i-th lowest rate
    is above another's (i + 1)-th lowest, and counts differ by at most one.
    """
    ranked = [np.sort(rates[fold == f]) for f in range(folds)]
    sizes = [len(r) for r in ranked]
    assert max(sizes) - min(sizes) <= 1
    for lower, upper in product(ranked, repeat=2):
        both = min(len(lower), len(upper) - 1)
        assert (lower[:both] <= upper[1 : both + 1]).all()


# -- folds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "folds"), [(0, 3), (1, 5)])
def test_sources_stay_whole_and_each_class_is_dealt_evenly(seed, folds):
    outcome = mixed(seed)
    by_context = make_folds(outcome, folds, seed)
    assert all(len(set(by_context[outcome.sources == s])) == 1 for s in set(outcome.sources))
    assert sorted(set(by_context)) == list(range(folds))
    rates, fold = source_rates(outcome), per_source(outcome, by_context)
    for members in classes(outcome):
        assert_dealt_evenly(rates[members], fold[members], folds)


def test_too_few_sources_or_folds_are_refused():
    outcome = Outcome.from_counts(np.arange(8), np.full(8, 8), np.arange(8) % 4)
    with pytest.raises(ValueError, match="4 sources can't be dealt into 5 folds"):
        make_folds(outcome, 5)
    with pytest.raises(ValueError, match="2 folds leave the inner loop none"):
        make_folds(mixed(), 2)


# -- permutations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_labels_of_a_source_move_together_in_order_to_one_like_it(seed):
    outcome = mixed(seed)
    folds = make_folds(outcome, 5, seed)
    moved = set()
    for rows in permutations(outcome, folds, 40, seed):
        assert sorted(rows) == list(range(len(outcome)))
        np.testing.assert_array_equal(outcome.runs[rows], outcome.runs)
        for source in range(outcome.sources.max() + 1):
            own = np.flatnonzero(outcome.sources == source)
            (giver,) = set(outcome.sources[rows[own]])
            assert composition(outcome, giver) == composition(outcome, source)
            for run in set(outcome.runs[own]):
                # In the order they stand in, within each run.
                given = rows[own[outcome.runs[own] == run]]
                of_giver = (outcome.sources == giver) & (outcome.runs == run)
                np.testing.assert_array_equal(given, np.flatnonzero(of_giver))
            moved |= {source} if giver != source else set()
    assert len(moved) == exchangeable_sources(outcome)


@pytest.mark.parametrize("folds", [3, 5])
def test_permuted_labels_are_stratified_as_the_observed_ones(folds):
    outcome = mixed()
    by_context = make_folds(outcome, folds)
    fold, rates = per_source(outcome, by_context), source_rates(outcome)
    for rows in permutations(outcome, by_context, 30):
        permuted = rates[outcome.sources[rows]]
        there = per_source(outcome, permuted)
        for members in classes(outcome):
            assert sorted(there[members]) == sorted(rates[members])
            assert_dealt_evenly(there[members], fold[members], folds)


# -- exactly the arrangements that could have led to these folds ----------------------------------


def chance_of(labels, fold, folds):
    """The probability that the rule gives ``fold`` for these labels of one class, enumerated.

    The slow way: all orders that sort the sources by rate are as likely; each block of neighbours
    is dealt to distinct folds, whichever and in any order alike.
    """
    total, orders = Fraction(0), list(orders_of(range(len(labels))))
    orders = [o for o in orders if all(labels[a] <= labels[b] for a, b in pairwise(o))]
    for order in orders:
        chance = Fraction(1, len(orders))
        for start in range(0, len(order), folds):
            dealt = tuple(int(fold[source]) for source in order[start : start + folds])
            dealings = list(orders_of(range(folds), len(dealt)))
            chance *= Fraction(dealings.count(dealt), len(dealings))
        total += chance
    return total


def expected_of(labels, fold, folds):
    """label arrangement -> its probability given the folds, all arrangements being as likely."""
    found = {given: chance_of(given, fold, folds) for given in set(orders_of(labels))}
    total = sum(found.values())
    return {key: float(value / total) for key, value in found.items() if value}


def assert_drawn(outcome, fold, expected):
    drawn = Counter(
        tuple(int(x) for x in outcome.positives[rows])
        for rows in permutations(outcome, fold, DRAWS, seed=0)
    )
    assert_frequencies(drawn, expected)


def assert_frequencies(found, expected):
    assert set(found) == set(expected)
    counts = np.array([found[key] for key in expected])
    assert chisquare(counts, counts.sum() * np.array(list(expected.values()))).pvalue > 1e-3


@pytest.mark.parametrize(
    ("labels", "folds"),
    [
        ((0, 1, 2, 3, 4, 5), 3),  # all differ
        ((3, 0, 5, 1, 4), 4),  # and the last block is not full
        ((0, 0, 0, 1, 3, 3), 3),  # ties within blocks and across
        ((0, 0, 0, 0, 1), 3),
    ],
    ids=["distinct", "partial", "ties", "ties, partial"],
)
def test_exactly_what_could_have_led_to_the_folds_is_drawn_and_evenly(labels, folds):
    outcome = singles(labels)
    fold = make_folds(outcome, folds, seed=3)
    expected = expected_of(labels, fold, folds)
    assert labels in expected
    if len(set(labels)) == len(labels):
        assert len(set(expected.values())) == 1  # without ties, each is as likely
    assert_drawn(outcome, fold, expected)


def test_the_rule_enumerated_above_is_the_one_that_deals():
    labels, folds = (0, 0, 1, 3, 3), 3
    outcome = singles(labels)
    every = {fold: chance_of(labels, fold, folds) for fold in product(range(folds), repeat=5)}
    assert sum(every.values()) == 1
    expected = {fold: float(chance) for fold, chance in every.items() if chance}
    found = Counter(tuple(make_folds(outcome, folds, seed).tolist()) for seed in range(DRAWS))
    assert_frequencies(found, expected)


def test_two_runs_are_permuted_independently():
    labels, runs = (0, 2, 5, 7, 4, 1, 3, 8, 6), [0, 0, 0, 0, 0, 1, 1, 1, 1]
    outcome = singles(labels, runs=runs)
    fold = make_folds(outcome, 3, seed=1)
    assert list(np.bincount(fold)) == [3, 3, 3]  # the runs' partial blocks are in distinct folds
    first, second = expected_of(labels[:5], fold[:5], 3), expected_of(labels[5:], fold[5:], 3)
    assert_drawn(outcome, fold, {a + b: first[a] * second[b] for a in first for b in second})


# -- selection -----------------------------------------------------------------------------------


def maps(seed=0, signal=0.0):
    """Inner and outer statistics of all cells, folds and labels, and those of all contexts.

    Rounded, so that permutations tie with what is observed.
    """
    rng = np.random.default_rng(seed)
    shape = (LAYERS, POSITIONS, FOLDS, 1 + PERMUTATIONS)
    inner = rng.normal(0, 0.2, shape).round(2).clip(-0.95, 0.95)
    outer = rng.normal(0.5, 0.05, shape).round(2)
    inner[3:, 1, :, 0] += signal
    outer[3:, 1, :, 0] += signal / 2
    whole = inner[..., 0].mean(2)
    return inner, outer, whole


def slow_choice(correlations, sources):
    """``[layers, positions]``: the best cell, then the first layer near enough."""
    best = max(
        ((at, where) for at in range(len(correlations)) for where in range(POSITIONS)),
        key=lambda cell: correlations[cell],  # the first, if several are best
    )
    limit = np.arctanh(correlations[best]) - 1 / np.sqrt(sources - 3)
    for layer in range(len(correlations)):
        if np.arctanh(correlations[layer, best[1]]) >= limit:
            return layer, best[1]
    raise AssertionError("the best itself is near enough")


def slow_p(observed, null):
    return (1 + sum(value >= observed - 1e-6 for value in null)) / (1 + len(null))


# -- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "signal"), [(0, 0.0), (2, 0.3)])
def test_everything_is_what_loops_find(seed, signal):
    inner, outer, whole = maps(seed, signal)
    found = select_and_test(*(np.float32(one) for one in (inner, outer)), whole, INSIDE, SOURCES)
    headline, largest = [], []
    for column in range(1 + PERMUTATIONS):
        picked = [slow_choice(inner[:, :, fold, column], INSIDE) for fold in range(FOLDS)]
        if column == 0:
            np.testing.assert_array_equal(found.chosen, picked)
        headline.append(np.mean([outer[*picked[f], f, column] for f in range(FOLDS)]))
        largest.append(
            max(outer[at, w, :, column].mean() for at in range(LAYERS) for w in range(3))
        )
    assert found.headline_statistic == pytest.approx(headline[0])
    np.testing.assert_allclose(found.headline_null, headline[1:], rtol=1e-6)
    assert found.headline_p == slow_p(headline[0], headline[1:])
    for layer in range(LAYERS):
        for position in range(POSITIONS):
            by_column = outer[layer, position].mean(0)
            assert found.statistic[layer, position] == pytest.approx(by_column[0])
            assert found.p_family[layer, position] == slow_p(by_column[0], largest[1:])
            band = np.quantile(by_column[1:], 0.95)
            assert found.null_quantile[layer, position] == pytest.approx(band)
    assert found.family_quantile == pytest.approx(np.quantile(largest[1:], 0.95))
    assert found.chosen_on_all == slow_choice(whole, SOURCES)
    assert found.permutations == PERMUTATIONS and found.headline_null.shape == (PERMUTATIONS,)
    assert (found.headline_p == 1 / (1 + PERMUTATIONS)) == (signal == 0.3)
