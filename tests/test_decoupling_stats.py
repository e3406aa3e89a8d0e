"""Two groups of sources, and two rankings: against closed forms, scipy and simulation."""

import numpy as np
import pytest
from scipy import stats

from ia_mech.stats import cluster_mean, group_difference, kendall, kendall_p


def test_a_difference_between_groups_is_put_together_from_both_rates():
    values = [1, 1, 0, 1, 0, 0, 1, 0, 0, 0]
    labels = [1] * 4 + [0] * 6
    found = group_difference(values, labels, range(10))
    right, wrong = cluster_mean(values[:4], range(4), proportion=True), None
    wrong = cluster_mean(values[4:], range(6), proportion=True)
    assert (found.first, found.second) == (right, wrong)
    difference = 3 / 4 - 1 / 6
    down = np.sqrt((right.value - right.low) ** 2 + (wrong.high - wrong.value) ** 2)
    up = np.sqrt((right.high - right.value) ** 2 + (wrong.value - wrong.low) ** 2)
    assert found.difference.value == pytest.approx(difference)
    assert found.difference.low == pytest.approx(difference - down)
    assert found.difference.high == pytest.approx(min(difference + up, 1))
    assert (found.difference.sources, found.difference.method) == (10, "mover")


def test_its_p_value_is_that_of_fishers_exact_test():
    values, labels = [1] * 5 + [0] * 7, [1, 1, 1, 1, 0] + [1] + [0] * 6
    found = group_difference(values, labels, range(12), permutations=20_000)
    total = stats.hypergeom(12, 5, 5)  # right ones among those with an event
    sizes = {k: abs(k / 5 - (5 - k) / 7) for k in range(6)}
    exact = sum(total.pmf(k) for k in sizes if sizes[k] >= sizes[4] - 1e-9)
    assert found.p == pytest.approx(exact, abs=0.01)
    assert found.test == "permutation of sources"


def test_an_empty_group_leaves_it_open():
    for labels in ([1, 1, 1], [0, 0, 0]):
        found = group_difference([1, 0, 1], labels, "abc")
        assert np.isnan([found.difference.value, found.difference.low, found.p]).all()
        assert found.difference.method == "one group is empty" and found.test == ""


def test_missing_values_are_left_out_and_sources_may_be_tuples():
    sources = [(0, 1), (0, 1), (0, 2), (1, 1), (1, 2), (1, 2)]
    whole = group_difference([1, 0, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0], sources)
    holes = [(9, 9), *sources[:3], (0, 1), *sources[3:]]
    values = [np.nan, 1, 0, 0, np.nan, 1, 0, 1]
    assert whole == group_difference(values, [1, 1, 1, 1, 1, 0, 0, 0], holes)
    assert (whole.first.sources, whole.second.sources, whole.difference.sources) == (2, 2, 4)


@pytest.mark.parametrize("seed", range(5))
def test_kendalls_correlation_is_scipys(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 5, 9), rng.integers(0, 5, 9)
    assert kendall(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)


def test_its_p_value_is_exact_for_few_and_missing_without_spread():
    assert np.isnan(kendall([1, 1, 1], [1, 2, 3])) and np.isnan(kendall_p([1, 2, 3], [2, 2, 2]))
    assert kendall_p([1, 2, 3, 4], [1, 2, 3, 4]) == pytest.approx(2 / 24)
    rng = np.random.default_rng(1)
    x, y = rng.random(6), rng.random(6)
    assert kendall_p(x, y) == pytest.approx(stats.kendalltau(x, y, method="exact").pvalue)


@pytest.mark.slow
def test_its_p_value_is_drawn_for_many():
    rng = np.random.default_rng(2)
    x = rng.random(12)
    y = x + rng.random(12)
    exact = stats.kendalltau(x, y, method="exact").pvalue
    assert kendall_p(x, y, permutations=4000) == pytest.approx(exact, abs=0.01)


@pytest.mark.slow
def test_intervals_hold_the_difference():
    rng, held = np.random.default_rng(0), []
    for _ in range(300):
        labels = np.repeat([1, 0], [15, 45])
        values = rng.random(60) < np.where(labels == 1, 0.3, 0.05)
        found = group_difference(values, labels, range(60), permutations=1).difference
        held.append(found.low <= 0.25 <= found.high)
    assert np.mean(held) >= 0.93
