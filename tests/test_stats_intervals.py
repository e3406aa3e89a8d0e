"""Intervals of means and rates: exact cases, their definitions, coverage on clustered data."""

import numpy as np
import pytest
from scipy.stats import binomtest, t, ttest_1samp

from ia_mech.stats import cluster_mean, weighted_share, wilson, zero_events_bound
from ia_mech.stats.intervals import combined
from ia_mech.stats.resampling import source_index

SIZES = np.array([1, 2, 4, 8, 16, 17])  # rows per source where they differ; mean 8


def clustered(rng, rate, sources, equal=True, correlation=0.5):
    """Beta-binomial events: (values, sources) with 8 rows per source, or 8 on average."""
    sizes = np.full(sources, 8) if equal else np.resize(SIZES, sources)
    index = np.repeat(np.arange(sources), sizes)
    shape = (1 - correlation) / correlation
    rates = rng.beta(rate * shape, (1 - rate) * shape, sources)
    return (rng.random(len(index)) < rates[index]).astype(float), index


def test_no_event_gives_the_exact_one_sided_bound_on_sources():
    estimate = cluster_mean(np.zeros(60), np.repeat(np.arange(20), 3), proportion=True)
    assert (estimate.value, estimate.low, estimate.sources) == (0, 0, 20)
    assert estimate.high == zero_events_bound(20) == pytest.approx(1 - 0.05 ** (1 / 20))
    exact = binomtest(0, 20, alternative="less").proportion_ci(0.95, "exact").high
    assert zero_events_bound(20) == pytest.approx(exact)
    assert zero_events_bound(300) == pytest.approx(3 / 300, rel=0.01)  # the rule of three

    ones = cluster_mean(np.ones(60), np.repeat(np.arange(20), 3), proportion=True)
    assert (ones.value, ones.high) == (1, 1) and ones.low == pytest.approx(0.05 ** (1 / 20))
    no_rate = cluster_mean(np.ones(60), np.repeat(np.arange(20), 3))
    assert np.isnan([no_rate.low, no_rate.high]).all() and no_rate.method == "all queries alike"


def test_one_source_has_no_interval_and_no_values_no_estimate():
    assert np.isnan(cluster_mean([0.0, 1.0], ["a", "a"]).low)
    assert np.isnan(cluster_mean([0.0, 1.0], ["a", "a"], proportion=True).low)
    assert np.isnan(cluster_mean([], []).value)
    two = cluster_mean([1.0, np.nan, 3.0], ["a", "b", "c"])
    assert (two.value, two.sources) == (2, 2)
    assert two.high == pytest.approx(2 + t.ppf(0.975, 1))


def test_one_row_per_source_gives_the_exact_binomial_interval():
    values = np.repeat([1.0, 0.0], [3, 47])
    estimate = cluster_mean(values, np.arange(50), proportion=True)
    expected = binomtest(3, 50).proportion_ci(0.95, "exact")
    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))
    assert estimate.method == "clopper-pearson"


def test_the_clustered_score_interval_equals_its_definition_row_by_row():
    values, index = clustered(np.random.default_rng(4), 0.1, 30, equal=False)
    rate, deviations = values.mean(), []
    for source in range(30):
        rows = [v for v, s in zip(values, index, strict=True) if s == source]
        deviations.append(sum(v - rate for v in rows) / len(values))
    squares = [d**2 for d in deviations]
    variance = 30 / 29 * sum(squares)
    carriers = sum(squares) ** 2 / sum(s**2 for s in squares)
    freedom = 1 + 1 / (1 / carriers - 1 / 30)
    assert 1 < freedom < 29
    size = rate * (1 - rate) / variance
    size *= (t.ppf(0.975, len(values) - 1) / t.ppf(0.975, freedom)) ** 2
    estimate = cluster_mean(values, index, proportion=True)
    assert (estimate.low, estimate.high) == pytest.approx(wilson(rate * size, size))


def test_formulas_equal_scipy():
    for successes, n in ((0, 10), (3, 17), (17, 17)):
        expected = binomtest(successes, n).proportion_ci(0.9, "wilson")
        assert wilson(successes, n, 0.9) == pytest.approx((expected.low, expected.high))
    assert np.isnan(wilson(0, 0)).all()


def test_sources_that_are_all_alike_leave_what_was_not_seen():
    """Of ten sources with a rate of a half, a share of the exact bound may have another rate."""
    alike = cluster_mean(np.tile([0.0, 1.0], 40), np.repeat(np.arange(10), 8), proportion=True)
    bound = zero_events_bound(10)
    assert (alike.low, alike.high) == pytest.approx((0.5 - bound / 2, 0.5 + bound / 2))
    nearly = np.tile([0.0, 1.0], 40)
    nearly[0] = 1
    wider = cluster_mean(nearly, np.repeat(np.arange(10), 8), proportion=True)
    assert wider.low <= wider.value * (1 - bound) and wider.high - wider.low >= 0.99 * bound


def test_a_stratum_without_errors_is_not_free_of_them():
    """15 rows without an error in a stratum of 1,500 allow 18% missed, hence a recall of 0.13."""
    weights = np.repeat([40 / 15, 100, 20, 4], 15)
    follow_up = np.arange(60) < 15
    found = weighted_share(follow_up, follow_up, range(60), weights)
    assert found.value == 1 and found.high == 1
    assert found.low == pytest.approx(0.124, abs=0.001)
    missed = follow_up | (np.arange(60) == 20)  # in the large stratum
    found = weighted_share(follow_up, missed, range(60), weights)
    value = 40 / 140
    assert found.value == pytest.approx(value) and found.low < 0.13 < 0.9 < found.high
    even = weighted_share(follow_up, missed, range(60), np.full(60, 7.0))
    assert even == cluster_mean(follow_up[missed], np.arange(16), proportion=True)


def test_a_combination_moves_with_its_parts():
    one, other = (0.5, 0.4, 0.7), (0.2, 0.1, 0.25)
    value, low, high = combined([one, other], (1, -1), 0.3)
    down = np.sqrt(0.1**2 + 0.05**2 - 2 * 0.3 * 0.1 * 0.05)
    up = np.sqrt(0.2**2 + 0.1**2 - 2 * 0.3 * 0.2 * 0.1)
    assert (value, low, high) == pytest.approx((0.3, 0.3 - down, 0.3 + up))


def test_a_mean_of_equal_normal_sources_gets_nearly_the_t_interval_of_their_means():
    values = np.random.default_rng(2).normal(size=(40, 3))
    auto = cluster_mean(values.ravel(), np.repeat(np.arange(40), 3))
    expected = ttest_1samp(values.mean(1), 0).confidence_interval()
    assert auto.method == "student"
    assert (auto.low, auto.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert auto.high - auto.low >= expected.high - expected.low
    alike = cluster_mean(np.tile([0.1, 0.3], 10), np.repeat(np.arange(10), 2))
    assert alike.value == pytest.approx(0.2) and np.isnan([alike.low, alike.high]).all()


def test_weights_count_rows_as_often_as_they_say():
    values, index = clustered(np.random.default_rng(8), 0.3, 20)
    times = np.random.default_rng(9).integers(0, 4, len(values))
    weighted = cluster_mean(values, index, weights=times)
    assert weighted == cluster_mean(np.repeat(values, times), np.repeat(index, times))
    weighted = cluster_mean(values, index, weights=times * 7.5, proportion=True)
    assert weighted.value == pytest.approx(values @ times / times.sum())
    assert weighted.low < weighted.value < weighted.high


def test_sources_may_be_any_labels_and_rows_come_in_any_order():
    values, index = clustered(np.random.default_rng(1), 0.3, 10)
    plain = cluster_mean(values, index)
    assert plain == cluster_mean(values, [("dataset", i) for i in index.tolist()])
    shuffled = np.random.default_rng(2).permutation(len(values))
    again = cluster_mean(values[shuffled], index[shuffled])
    assert (again.low, again.high) == pytest.approx((plain.low, plain.high))
    assert source_index(["b", 1, ("c",), "b"])[0].tolist() == [0, 1, 2, 0]
    assert source_index(np.array(["b", "a", "b"]))[0].tolist() == [1, 0, 1]
