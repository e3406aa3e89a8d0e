"""The cluster bootstrap: multiplicities of rows, sums over kinds, and a loop over rows agree; and
means of shares."""

import tracemalloc

import numpy as np
import pytest

from ia_mech.stats import cluster_bootstrap, cluster_mean, kappa_of
from ia_mech.stats.intervals import student
from ia_mech.stats.resampling import widened_level

LABELS = 4


def raters(seed, rows=120):
    """``[rows, 3]`` labels that agree more often than not, sources, weights."""
    rng = np.random.default_rng(seed)
    truth = rng.choice(LABELS, size=rows, p=[0.5, 0.3, 0.15, 0.05])
    right = rng.random((3, rows)) < 0.7
    table = np.where(right, truth, rng.integers(LABELS, size=(3, rows))).T.astype(float)
    return table, rng.integers(rows // 4, size=rows), rng.random(rows) + 0.1


def kappas(counts):
    return kappa_of(counts.reshape(-1, LABELS, LABELS))


def test_a_share_of_16_turns_is_not_one_event():
    """Its interval holds the truth and is about as wide as that of any mean."""
    rng, covered, width, plain = np.random.default_rng(0), 0, 0.0, 0.0
    for _ in range(200):
        shares = rng.binomial(16, 0.3, 60) / 16
        found = cluster_mean(shares, range(60), proportion=True)
        covered += found.low <= 0.3 <= found.high
        width += found.high - found.low
        of_means = student(np.stack([shares, np.ones(60)], axis=1), 0.95)
        plain += of_means.high - of_means.low
    assert covered >= 180 and width < 1.3 * plain
    one_of_all = cluster_mean([1.0] * 20 + [0.0] * 40, range(60), proportion=True)
    assert one_of_all.method == "clopper-pearson"  # events stay events


@pytest.mark.parametrize("queries", [8, 24, 140])
@pytest.mark.parametrize("kind", ["any", "rare"])
def test_a_mass_is_a_bounded_mean(kind, queries):
    """Where masses have any value, the interval is Student's, about. Where most are near 0 and few
    are large, Student's holds the truth far too rarely, and this one doesn't."""
    rng, found = np.random.default_rng(5), []
    for _ in range(300):
        values, truth = rng.beta(1, 1.2, queries), 1 / 2.2
        if kind == "rare":
            large = rng.random(queries) < 0.03
            values = np.where(large, rng.uniform(0.3, 1, queries), rng.uniform(0, 0.02, queries))
            truth = 0.03 * 0.65 + 0.97 * 0.01
        one = cluster_mean(values, range(queries), proportion=True)
        plain = cluster_mean(values, range(queries))
        found.append([e.low <= truth <= e.high for e in (one, plain)])
        found[-1] += [e.high - e.low for e in (one, plain)]
    covered, plain, width, of_plain = np.mean(found, axis=0)
    assert covered > 0.92
    if kind == "any":
        assert width < 1.02 * of_plain
    elif queries < 140:
        assert plain < 0.7


def test_a_bootstrap_equals_copying_the_rows_of_the_sources_drawn():
    rng = np.random.default_rng(3)
    sources = np.repeat(np.arange(12), rng.integers(1, 6, 12))
    values = rng.normal(size=len(sources))
    (estimate,) = cluster_bootstrap(
        lambda counts: counts @ values / counts.sum(1), sources, resamples=300, seed=9
    )
    means = []
    for drawn in np.random.default_rng(9).integers(12, size=(300, 12)):
        rows = np.concatenate([np.flatnonzero(sources == s) for s in drawn])
        means.append(values[rows].mean())
    tail = (1 - widened_level(0.95, 12)) / 2
    expected = values.mean(), *np.quantile(means, [tail, 1 - tail])
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(expected, abs=1e-12)
    assert (estimate.sources, estimate.method) == (12, "percentile")


def test_sums_over_kinds_equal_multiplicities_of_rows():
    table, sources, weights = raters(0)
    cell = (table[:, 0] * LABELS + table[:, 1]).astype(int)

    def each(counts):
        return [kappas(np.bincount(cell, weights * row, LABELS**2)[None])[0] for row in counts]

    options = {"resamples": 200, "seed": 2}
    (slow,) = cluster_bootstrap(each, sources, **options)
    (fast,) = cluster_bootstrap(kappas, sources, cell, weights=weights, number=16, **options)
    assert (fast.value, fast.low, fast.high) == pytest.approx(
        (slow.value, slow.low, slow.high), rel=0, abs=1e-12
    )
    assert (fast.sources, fast.method) == (slow.sources, slow.method)
    assert fast.low < fast.value < fast.high


def test_the_widened_level_makes_up_for_few_sources():
    # For n = 20 a 95% interval asks for 96.8%: sqrt(20 / 19) * 2.093 normal deviations.
    assert widened_level(0.95, 20) == pytest.approx(0.968, abs=0.001)
    assert widened_level(0.95, 10**6) == pytest.approx(0.95, abs=1e-5)
    assert widened_level(0.95, 2) < 1


def test_many_kinds_in_many_sources_stay_small_in_memory():
    rows = 20_000
    tracemalloc.start()
    (estimate,) = cluster_bootstrap(
        lambda counts: (counts > 0).sum(1) / rows, np.arange(rows), resamples=30
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert estimate.value == 1 and estimate.high == pytest.approx(1 - np.exp(-1), abs=0.02)
    assert peak < 60e6  # 3.2 GB would be the table of sources by rows


def test_where_there_is_no_interval():
    def shares(counts):
        with np.errstate(invalid="ignore"):
            return counts / counts.sum(1, keepdims=True)

    one, other = cluster_bootstrap(shares, ["a", "a", "a"], [0, 0, 1])
    assert (one.value, other.value) == pytest.approx((2 / 3, 1 / 3))
    assert np.isnan([one.low, other.high]).all() and one.method == "one query"
    (none,) = cluster_bootstrap(lambda counts: counts.sum(1) * np.nan, [])
    assert (none.sources, none.method) == (0, "no values")
    (rare,) = cluster_bootstrap(
        lambda c: np.where(c[:, 0] > 0, c[:, 1], np.nan), range(10), [0] + [1] * 9, resamples=300
    )  # a third of the resamples draw no row of the first kind
    assert np.isnan(rare.low) and "undefined" in rare.method
    (perfect,) = cluster_bootstrap(
        lambda c: kappa_of(c.reshape(-1, 2, 2)), range(40), [0, 3] * 20, number=4
    )
    assert perfect.value == 1 and np.isnan([perfect.low, perfect.high]).all()
    assert perfect.method == "no resample differs"
    (little,) = cluster_bootstrap(lambda c: 1 + 1e-9 * c[:, 0], range(9), resamples=20)
    assert little.low < little.high  # little is not nothing
