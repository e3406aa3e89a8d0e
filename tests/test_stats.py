"""Intervals: exact cases, agreement with slow references, and coverage on clustered data.

``benchmarks/coverage.py`` is the whole study; here stands a small grid of it.
"""

import tracemalloc

import numpy as np
import pytest
from scipy.stats import beta, binomtest, bootstrap, norm, t, ttest_1samp

from ia_mech.stats import Estimate, cluster_mean, cluster_statistic, wilson, zero_events_bound
from ia_mech.stats.intervals import clopper_pearson, clustered_wilson
from ia_mech.stats.resampling import resample_sums, source_index, widened

SIZES = np.array([1, 2, 4, 8, 16, 17])  # rows per source where they differ; mean 8


def clustered(rng, rate, sources, equal=True, correlation=0.5):
    """Beta-binomial events: (values, sources) with 8 rows per source, or 8 on average."""
    sizes = np.full(sources, 8) if equal else np.resize(SIZES, sources)
    index = np.repeat(np.arange(sources), sizes)
    shape = (1 - correlation) / correlation
    rates = rng.beta(rate * shape, (1 - rate) * shape, sources)
    return (rng.random(len(index)) < rates[index]).astype(float), index


def coverage(rate, sources, trials, **options):
    """Share of trials whose interval holds the rate."""
    rng, covered = np.random.default_rng(11), 0
    method = options.pop("method", "auto")
    for _ in range(trials):
        values, index = clustered(rng, rate, sources, **options)
        estimate = cluster_mean(values, index, proportion=True, method=method, resamples=500)
        covered += estimate.low <= rate <= estimate.high
    return covered / trials


def test_no_event_gives_the_exact_one_sided_bound_on_sources():
    estimate = cluster_mean(np.zeros(60), np.repeat(np.arange(20), 3), proportion=True)
    assert (estimate.value, estimate.low, estimate.sources) == (0, 0, 20)
    assert estimate.high == zero_events_bound(20) == pytest.approx(1 - 0.05 ** (1 / 20))
    exact = binomtest(0, 20, alternative="less").proportion_ci(0.95, "exact").high
    assert zero_events_bound(20) == pytest.approx(exact)
    assert zero_events_bound(300) == pytest.approx(3 / 300, rel=0.01)  # the rule of three


def test_only_events_mirror_that_whatever_the_method():
    for method in ("auto", "bca", "percentile", "wilson"):
        estimate = cluster_mean(
            np.ones(60), np.repeat(np.arange(20), 3), proportion=True, method=method
        )
        assert (estimate.value, estimate.high) == (1, 1)
        assert estimate.low == pytest.approx(0.05 ** (1 / 20))


def test_the_bound_holds_where_it_is_tightest():
    """At a rate just above the bound no event is seen in at most 5% of data sets."""
    rate, rng = zero_events_bound(50) * 1.0001, np.random.default_rng(1)
    for correlation in (0.2, 0.999):  # at the latter a source is one observation
        none = np.mean(
            [not clustered(rng, rate, 50, correlation=correlation)[0].any() for _ in range(4000)]
        )
        assert none < 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / 4000)
    assert none > 0.03


def test_a_mean_that_is_no_proportion_gets_no_binomial_bound():
    estimate = cluster_mean(np.ones(60), np.repeat(np.arange(20), 3))
    assert (estimate.low, estimate.high) == (1, 1)


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


def test_formulas_equal_scipy():
    for successes, n in ((0, 10), (3, 17), (17, 17)):
        expected = binomtest(successes, n).proportion_ci(0.9, "wilson")
        assert wilson(successes, n, 0.9) == pytest.approx((expected.low, expected.high))
        expected = binomtest(successes, n).proportion_ci(0.9, "exact")
        assert clopper_pearson(successes, n, 0.9) == pytest.approx((expected.low, expected.high))
    assert np.isnan(wilson(0, 0)).all()
    assert clopper_pearson(2.5, 20, 0.95)[0] == pytest.approx(beta.ppf(0.025, 2.5, 18.5))


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


def test_few_sources_with_events_make_a_rate_more_uncertain():
    """The same four events: in four sources, or all in one."""
    spread, lumped = np.zeros((100, 8)), np.zeros((100, 8))
    spread[:4, 0] = 1
    lumped[0, :4] = 1
    index = np.repeat(np.arange(100), 8)
    wide, narrow = (cluster_mean(v.ravel(), index, proportion=True).high for v in (lumped, spread))
    assert wide > 3 * narrow


def test_sources_that_are_all_alike_leave_the_binomial_spread():
    table = np.array([[4.0, 8.0]] * 10)
    assert clustered_wilson(table, 80, 0.95) == pytest.approx(
        wilson(*(x * (t.ppf(0.975, 79) / t.ppf(0.975, 9)) ** 2 for x in (40, 80)))
    )


def test_the_vectorised_bootstrap_equals_one_resample_at_a_time():
    rng = np.random.default_rng(3)
    sources = np.repeat(np.arange(12), rng.integers(1, 6, 12))
    values = rng.normal(size=len(sources))
    estimate = cluster_mean(values, sources, resamples=300, seed=9, method="percentile")
    means = []
    for drawn in np.random.default_rng(9).integers(12, size=(300, 12)):
        rows = np.concatenate([np.flatnonzero(sources == s) for s in drawn])
        means.append(values[rows].mean())
    low, high = np.quantile(means, [0.025, 0.975])
    assert estimate.low == pytest.approx(low, abs=1e-12)
    assert estimate.high == pytest.approx(high, abs=1e-12)

    bca = cluster_mean(values, sources, resamples=300, seed=9, method="bca")
    jackknife = np.array([values[sources != s].mean() for s in range(12)])
    deviation = jackknife.mean() - jackknife
    a = (deviation**3).sum() / (6 * (deviation**2).sum() ** 1.5)
    z0 = norm.ppf((np.array(means) < values.mean()).mean())
    z = z0 + norm.ppf([0.025, 0.975])
    ends = np.quantile(means, norm.cdf(z0 + z / (1 - a * z)))
    assert (bca.low, bca.high) == pytest.approx(tuple(ends))


def test_bca_agrees_with_scipy_where_every_source_has_one_row():
    values = np.random.default_rng(0).exponential(size=40)
    ours = cluster_mean(values, np.arange(40), resamples=20_000, method="bca")
    scipys = bootstrap(
        (values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((scipys.low, scipys.high), abs=0.015)


def test_a_mean_of_equal_normal_sources_gets_nearly_the_t_interval_of_their_means():
    values = np.random.default_rng(2).normal(size=(40, 3))
    auto = cluster_mean(values.ravel(), np.repeat(np.arange(40), 3))
    expected = ttest_1samp(values.mean(1), 0).confidence_interval()
    assert auto.method == "student"
    assert (auto.low, auto.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert auto.high - auto.low >= expected.high - expected.low
    alike = cluster_mean(np.tile([0.1, 0.3], 10), np.repeat(np.arange(10), 2))
    assert alike.low == alike.value == alike.high


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_a_bootstrap_in_which_no_resample_differs_has_no_interval(method):
    """Every source has the same mean: of 0 and 1, or of values whose sums are only rounded."""
    for pair, proportion in (([0.0, 1.0], True), ([0.0, 1.0], False), ([0.1, 0.3], False)):
        values, sources = np.tile(pair, 7), np.repeat(np.arange(7), 2)
        estimate = cluster_mean(values, sources, proportion=proportion, method=method)
        assert estimate.value == pytest.approx(np.mean(pair))
        assert np.isnan([estimate.low, estimate.high]).all()
        assert (estimate.method, estimate.sources) == ("no resample differs", 7)
    rate = cluster_mean(np.tile([0.0, 1.0], 7), np.repeat(np.arange(7), 2), proportion=True)
    assert rate.low < 0.5 < rate.high  # a score interval knows better
    constant = cluster_statistic(lambda c, w: 3.0, {}, [], method=method)
    assert constant.method == "no values"
    constant = cluster_statistic(lambda c, w: 3.0, {}, range(9), method=method, resamples=20)
    assert constant.method == "no resample differs" and np.isnan(constant.high)
    differ = cluster_mean([1.0, 1.0, 1.0 + 1e-9], range(3), method=method)
    assert differ.low < differ.high  # little is not nothing


def test_coverage_of_means_of_skewed_values():
    """Log-normal rows in 50 sources of unequal size: better than the bootstrap, if below 95%."""
    rng, covered = np.random.default_rng(3), {"auto": 0, "percentile": 0}
    index = np.repeat(np.arange(50), np.resize(SIZES, 50))
    for _ in range(800):
        values = np.exp(rng.normal(rng.normal(size=50)[index] / 2, 0.5))
        for method in covered:
            e = cluster_mean(values, index, method=method, resamples=300)
            covered[method] += e.low <= np.exp(0.25) <= e.high
    assert covered["auto"] / 800 > 0.92
    assert covered["auto"] > covered["percentile"]


def test_the_widened_level_makes_up_for_few_sources():
    # For n = 20 a 95% interval asks for 96.8%: sqrt(20 / 19) * 2.093 normal deviations.
    assert widened(0.95, 20) == pytest.approx(0.968, abs=0.001)
    assert widened(0.95, 10**6) == pytest.approx(0.95, abs=1e-5)
    assert widened(0.95, 2) < 1


def test_chunks_do_not_change_the_draws_and_bound_the_memory():
    table = np.random.default_rng(0).random((1000, 2))
    tracemalloc.start()
    sums = resample_sums(table, 10_000, seed=5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # 80 MB would be all draws at once
    draws = np.random.default_rng(5).integers(1000, size=(300, 1000))
    assert sums[:300] == pytest.approx(table[draws].sum(1))


def test_any_statistic_sees_the_same_resamples_as_the_mean():
    rng = np.random.default_rng(6)
    values, sources = rng.normal(size=90), np.repeat(np.arange(30), 3)

    def moments(columns, weights):
        mean = np.average(columns["v"], weights=weights)
        return np.array([mean, np.average(columns["v"] ** 2, weights=weights)])

    for method in ("percentile", "bca"):
        mean, square = cluster_statistic(
            moments, {"v": values}, sources, resamples=200, seed=3, method=method
        )
        expected = cluster_mean(values, sources, resamples=200, seed=3, method=method)
        assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high))
        assert square.value == pytest.approx((values**2).mean())
    single = cluster_statistic(lambda c, w: moments(c, w)[0], {"v": values}, sources)
    assert isinstance(single, Estimate) and single.low < single.value < single.high


def test_a_statistic_that_is_often_undefined_has_no_interval():
    def share(columns, weights):
        at = columns["there"] == 1
        return np.nan if not weights[at].sum() else float(weights[at].sum() / weights.sum())

    there = np.zeros(10)
    there[0] = 1  # a third of the resamples draw no row of it
    estimate = cluster_statistic(share, {"there": there}, np.arange(10), resamples=300)
    assert estimate.value == 0.1 and np.isnan(estimate.low)
    assert "undefined" in estimate.method
    assert np.isnan(cluster_statistic(share, {"there": there}, np.zeros(10)).low)


def test_weights_count_rows_as_often_as_they_say():
    values, index = clustered(np.random.default_rng(8), 0.3, 20)
    times = np.random.default_rng(9).integers(0, 4, len(values))
    for method in ("percentile", "bca"):
        weighted = cluster_mean(values, index, weights=times, method=method)
        repeated = cluster_mean(np.repeat(values, times), np.repeat(index, times), method=method)
        assert weighted == repeated
    weighted = cluster_mean(values, index, weights=times * 7.5, proportion=True)
    assert weighted.value == pytest.approx(values @ times / times.sum())
    assert weighted.low < weighted.value < weighted.high


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("sources", [50, 100])
def test_coverage_on_clustered_rates(sources, equal):
    """2000 data sets each, within-source correlation 0.5: 93 to 97% at 0.2 and 0.5, more at 0.02.

    The bands are widened by two standard errors of the simulation.
    """
    slack = 2 * np.sqrt(0.05 * 0.95 / 2000)
    assert coverage(0.02, sources, 2000, equal=equal) >= 0.93 - slack
    for rate in (0.2, 0.5):
        assert 0.93 - slack <= coverage(rate, sources, 2000, equal=equal) <= 0.97 + slack


def test_the_plain_bootstrap_would_not_pass_that():
    assert coverage(0.02, 50, 400, method="percentile") < 0.9


def test_intervals_that_ignore_clusters_would_not_cover():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(300):
        values, _ = clustered(rng, 0.5, 80)
        estimate = cluster_mean(values, np.arange(len(values)), proportion=True)
        covered += estimate.low <= 0.5 <= estimate.high
    assert covered / 300 < 0.85


def test_sources_may_be_any_labels_and_rows_come_in_any_order():
    values, index = clustered(np.random.default_rng(1), 0.3, 10)
    plain = cluster_mean(values, index)
    assert plain == cluster_mean(values, [("dataset", i) for i in index.tolist()])
    shuffled = np.random.default_rng(2).permutation(len(values))
    again = cluster_mean(values[shuffled], index[shuffled])
    assert (again.low, again.high) == pytest.approx((plain.low, plain.high))
    assert source_index(["b", 1, ("c",), "b"])[0].tolist() == [0, 1, 2, 0]
    assert source_index(np.array(["b", "a", "b"]))[0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster_mean([1, 2], ["a"]), "values must have 1 entries"),
        (lambda: cluster_mean([1], ["a"], method="magic"), "unknown method 'magic'"),
        (lambda: cluster_mean([1], ["a"], method="wilson"), "for proportions"),
        (lambda: cluster_mean([1], ["a"], level=95), "level must lie strictly"),
        (lambda: cluster_mean([2], ["a"], proportion=True), "between 0 and 1"),
        (lambda: cluster_mean([1], ["a"], weights=[-1]), "not negative"),
        (lambda: cluster_mean([1, 2], ["a", None]), "a source is missing"),
        (lambda: cluster_mean([1, 2], ["a", float("nan")]), "a source is missing"),
        (lambda: cluster_mean([1, 2], ["a", "b"], method="bca", resamples=0), "resamples must"),
        (lambda: cluster_mean([[1], [2]], np.zeros((2, 1))), "one dimension"),
        (lambda: cluster_statistic(None, {"x": [1]}, ["a", "b"]), "column 'x' has 1 rows"),
        (lambda: cluster_statistic(None, {}, [], method="wilson"), "unknown method"),
        (lambda: wilson(3, 2), "between 0 and n"),
        (lambda: zero_events_bound(0), "at least one source"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_estimate_reads_as_value_and_interval():
    assert Estimate(0.5, 0.25, 0.75, 9).text() == "0.50 [0.25, 0.75]"
    assert Estimate(0.5, np.nan, np.nan, 1).text() == "0.50 [–]"
    assert Estimate(np.nan, np.nan, np.nan, 0).text() == "–"
