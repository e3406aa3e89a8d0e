"""Means over sets of sources: the variance against sums over all pairs, exact ends, coverage."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import t

from ia_mech.stats import (
    cluster_mean,
    decomposed_difference,
    dyadic_difference,
    dyadic_mean,
    dyadic_rate,
    dyadic_test,
    zero_events_bound,
)


def brute(values, *sources) -> tuple[float, float]:
    """Both variances of the mean by looking at every pair of values."""
    n, e = len(values), np.asarray(values) - np.mean(values)
    sums, counts = np.zeros(2), np.zeros(2)
    for i, j in product(range(n), repeat=2):
        one, other = ({side[at] for side in sources} for at in (i, j))
        for at, so in enumerate((one & other, one == other)):
            if so:
                sums[at] += e[i] * e[j]
                counts[at] += 1
    shared, same = sums / (1 - counts / n**2) / n**2
    return shared, same


def half_width(estimate) -> float:
    return (estimate.high - estimate.low) / 2


@pytest.mark.parametrize("seed", range(6))
def test_the_variance_is_that_of_all_pairs_of_values(seed):
    rng = np.random.default_rng(seed)
    first = rng.integers(12, size=30)
    second = np.where(rng.random(30) < 0.2, first, rng.integers(12, size=30))
    strength = rng.normal(size=12)  # dependence of either sign
    values = strength[first] + (-1) ** seed * strength[second] + rng.normal(size=30)
    found = dyadic_mean(values, first, second, ends=(-99, 99))
    variance = max(brute(values, first.tolist(), second.tolist()))
    assert found.value == pytest.approx(values.mean()) and found.sources == 12
    e = values - values.mean()
    sums = [e[(first == s) | (second == s)].sum() for s in range(12)]
    uneven = sum(x**4 for x in sums) / sum(x**2 for x in sums) ** 2 - 1 / 12
    quantile = t.ppf(0.975, min(1 + 1 / uneven, 11))
    assert half_width(found) == pytest.approx(quantile * np.sqrt(variance))


@pytest.mark.parametrize("seed", range(4))
def test_values_of_three_sources_and_the_test_of_their_mean(seed):
    rng = np.random.default_rng(seed)
    sides = rng.integers(9, size=(3, 40))  # now and then a source is on several sides
    values = rng.normal(size=9)[sides].sum(0) + rng.normal(size=40)
    found = dyadic_test(values, *sides, ends=(-99, 99))
    e, error = values - values.mean(), np.sqrt(max(brute(values, *sides.tolist())))
    sums = np.array([e[(sides == s).any(0)].sum() for s in range(9)])
    freedom = min(1 + 1 / ((sums**4).sum() / (sums**2).sum() ** 2 - 1 / 9), 8)
    assert half_width(found.difference) == pytest.approx(t.ppf(0.975, freedom) * error)
    assert found.p == pytest.approx(2 * t.sf(abs(values.mean()) / error, freedom))
    for level in (1 - found.p * 1.01, 1 - found.p / 1.01):
        at = dyadic_test(values, *sides, ends=(-99, 99), level=level).difference
        assert (at.low <= 0 <= at.high) == (level > 1 - found.p)
    with pytest.raises(ValueError, match="shorter"):
        dyadic_test(values, sides[0], sides[1][:-1])


def test_the_test_of_values_that_are_alike_goes_with_their_interval():
    ring = np.arange(10), np.roll(np.arange(10), -1)
    assert dyadic_test(np.zeros(10), *ring).p == 1
    for value in (1.0, -1.0):
        assert dyadic_test(np.full(10, value), *ring).p == 2**-10
    for value in (0.3, 0.4):  # 0.35 is where the interval begins to leave out 0
        found = dyadic_test(np.full(10, value), *ring)
        assert (found.difference.low > 0) == (found.p < 0.05) == (value > 0.35)


def test_one_source_each_is_the_cluster_robust_interval_of_means():
    rng = np.random.default_rng(0)
    sources = np.repeat(np.arange(30), 4)
    values = rng.normal(size=30)[sources] / 9 + rng.normal(size=120) / 9
    own, usual = dyadic_mean(values, sources, sources), cluster_mean(values, sources)
    assert (own.value, own.low, own.high) == pytest.approx((usual.value, usual.low, usual.high))


def test_all_alike_gives_exact_ends_from_sources():
    ring = np.arange(10), np.roll(np.arange(10), -1)
    none = dyadic_mean(np.zeros(10), *ring)
    bound = zero_events_bound(10)
    assert (none.value, none.low, none.high) == (0, -bound, bound)
    assert none.method == "exact, one-sided"
    apart = dyadic_mean(np.zeros(10), np.arange(10), np.arange(10), ends=(0, 1))
    assert (apart.low, apart.high) == (0, bound)
    few = dyadic_mean(np.zeros(10), np.arange(10), np.arange(10) % 2 + 10, ends=(0, 1))
    assert (few.low, few.high) == (0, zero_events_bound(2))  # of all that two contexts are part of
    most = dyadic_mean(np.ones(10), *ring, ends=(-2, 1))
    assert (most.low, most.high) == pytest.approx((1 - 3 * bound, 1))


def test_what_is_missing_is_left_out():
    values = [1.0, 0.0, np.nan, 1.0, 0.0, -1.0]
    first, second = [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]
    kept = [0, 1, 3, 4, 5]
    found = dyadic_mean(values, first, second)
    alone = dyadic_mean(*([column[i] for i in kept] for column in (values, first, second)))
    assert found == alone and found.value == 0.2
    assert np.isnan(dyadic_mean([np.nan], [0], [1]).value)


def test_a_floor_of_0_is_not_certain():
    """With no follow-up among the decoys of 12 sources, the floor may still be 22%."""
    ring = np.arange(12), np.roll(np.arange(12), -1)
    own, none = np.array([1.0] * 8 + [0.0] * 4), np.zeros(12)
    excess = dyadic_mean(own, *ring, ends=(-1, 1))
    margin = dyadic_difference(own, none, *ring, times=2)
    assert excess.low > 0 > margin.low
    below = np.hypot(excess.value - excess.low, 2 * zero_events_bound(12))
    assert margin.low == pytest.approx(max(excess.value - below, -2))
    assert margin.high == pytest.approx(min(excess.high, 1))


def test_one_event_among_the_others_does_not_make_a_difference_surer():
    ring = np.repeat(np.arange(8), 6), np.repeat(np.roll(np.arange(8), 1), 6)
    own = (np.tile(np.arange(6), 8) < np.repeat([1, 2, 2, 3, 3, 4, 4, 5], 6)) * 1.0
    none, one = np.zeros(48), np.eye(1, 48)[0]
    for times in (1, 2):
        without, found = (dyadic_difference(own, of, *ring, times=times) for of in (none, one))
        assert found.value < without.value and found.low < without.low


@pytest.mark.parametrize("sources", [2, 3])
def test_too_few_sources_have_no_interval(sources):
    first = np.arange(sources)
    found = dyadic_mean(first / 9, first, np.roll(first, 1))
    assert np.isnan(found.low) and found.method == "too few queries"


def test_one_event_bounds_a_rate_no_more_tightly_than_none():
    ring = np.repeat(np.arange(8), 6), np.repeat(np.roll(np.arange(8), 1), 6)
    none, one = np.zeros(48), np.eye(1, 48)[0]
    bound, found = dyadic_rate(none, *ring), dyadic_rate(one, *ring)
    assert dyadic_mean(one, *ring, ends=(0, 1)).high < bound.high < found.high
    assert found.low <= found.value == 1 / 48


def test_no_p_is_below_that_of_flipped_signs():
    values, sources = 0.5 + 0.001 * np.arange(8), np.arange(8)
    assert dyadic_test(values, sources, sources).p == 2.0**-7
    twice = np.repeat(values, 2) * np.tile([0, 1], 8)
    found = decomposed_difference(twice, np.zeros(16), np.tile([0, 1], 8), np.repeat(sources, 2))
    assert found.p == found.p_rest == 2.0**-7
