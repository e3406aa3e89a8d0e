"""Differences: their definitions, false alarms, coverage, power."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import stdtr

from ia_mech.stats import cluster_mean, group_difference, paired_difference, zero_events_bound
from ia_mech.stats.intervals import spread_between
from ia_mech.stats.significance import sign_flip_p


def two_conditions(rng, rate_a, rate_b, sources=60, rows_a=1, rows_b=8):
    """Events of two conditions that share each source's uniform draw, as shared noise makes them.

    A source's rate is Beta around the condition's; both come from one quantile.
    """
    easy = rng.beta(1.0, 1.0, sources)
    out = []
    for rate, rows in ((rate_a, rows_a), (rate_b, rows_b)):
        # Uniform ranks to a rate with the right mean: a step of random height, within-source
        # correlation about one half.
        rates = np.where(easy < rate, 0.6 + 0.4 * rate, 0.4 * rate)
        values = rng.random((sources, rows)) < rates[:, None]
        out += [values.ravel().astype(float), np.repeat(np.arange(sources), rows)]
    return out


def test_without_differences_nothing_is_significant_and_the_bound_is_on_sources():
    zeros, sources = np.zeros(30), np.arange(30)
    paired = paired_difference(zeros, sources, zeros, sources)
    assert paired.p == 1 and paired.difference.value == 0
    assert paired.difference.high == -paired.difference.low == zero_events_bound(30)
    constant = paired_difference(zeros + 5, sources, zeros + 5, sources)  # no rates: no bound
    assert np.isnan(constant.difference.low) and constant.difference.value == 0


def test_sources_that_all_differ_alike_are_not_all_there_are():
    """Half of 24 sources go from 0 to a half and half from a half to 1: rates symmetric about ½."""
    rows = np.repeat(np.arange(24), 2)
    before = np.where(rows < 12, 0.0, np.arange(48) % 2)
    after = np.where(rows < 12, np.arange(48) % 2, 1.0)
    found = paired_difference(after, rows, before, rows).difference
    bound = zero_events_bound(24)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.5 - 1.5 * bound, 0.5 + 0.5 * bound))


def test_each_common_source_weighs_the_same():
    paired = paired_difference(
        [1, 1, 0, 0, 9, np.nan], list("aaabbc"), [0, 1, 1, 7], ["a", "b", "b", "d"]
    )
    assert paired.difference.sources == 2
    assert paired.difference.value == pytest.approx(((2 / 3 - 0) + (4.5 - 1)) / 2)
    alone = paired_difference([1.0], ["a"], [0.0], ["a"])
    assert np.isnan(alone.difference.low) and alone.difference.value == 1
    none = paired_difference([1.0], ["a"], [0.0], ["b"])
    assert none.difference.sources == 0 and np.isnan(none.p) and np.isnan(none.difference.value)


def test_mover_equals_its_definition():
    a, sources_a, b, sources_b = two_conditions(np.random.default_rng(3), 0.1, 0.3)
    paired = paired_difference(a, sources_a, b, sources_b)
    one, two = (
        cluster_mean(a, sources_a, proportion=True),
        cluster_mean(b, sources_b, proportion=True),
    )
    r = np.corrcoef(a, b.reshape(60, 8).mean(1))[0, 1]
    l1, u1 = one.value - one.low, one.high - one.value
    l2, u2 = two.value - two.low, two.high - two.value
    value = one.value - two.value
    expected = (
        value,
        value - np.sqrt(l1**2 - 2 * r * l1 * u2 + u2**2),
        value + np.sqrt(u1**2 - 2 * r * u1 * l2 + l2**2),
    )
    got = paired.difference
    other = cluster_mean(a - b.reshape(60, 8).mean(1), np.arange(60))  # Student's may be wider
    expected = value, min(expected[1], other.low), max(expected[2], other.high)
    assert (got.value, got.low, got.high) == pytest.approx(expected)
    assert got.method == "mover"


def test_p_is_where_the_interval_begins_to_leave_out_zero():
    """With unequal numbers of rows, for rates and for other means."""
    rng, sources = np.random.default_rng(1), np.arange(60)
    for data in (
        two_conditions(rng, 0.1, 0.3),
        (rng.normal(0.4, 1, 60), sources, rng.normal(0, 1, 480), np.repeat(sources, 8)),
    ):
        p = paired_difference(*data).p
        assert 1e-6 < p < 0.5
        for level, excluded in ((1 - p * 1.01, True), (1 - p * 0.99, False)):
            e = paired_difference(*data, level=level).difference
            assert (e.low > 0 or e.high < 0) == excluded
    far = paired_difference(np.ones(60), sources, np.zeros(120), np.repeat(sources, 2))
    assert far.p == 2 * 0.5**60 or far.p < 1e-3
    same = paired_difference([1, 0], ["a", "b"], [1, 0, 0, 1], ["a", "a", "b", "b"])
    assert same.p == 1 and same.test == "mover and sign flip"


def test_few_sources_do_not_give_tiny_p_values():
    """Four of eight sources move, one way: flips alone allow no p below 2 / 2^4."""
    greedy, sources = [1, 1, 1, 1, 0, 0, 0, 0], np.arange(8)
    for hits in ([1, 1, 1, 1, 0, 0, 0, 0], [2, 2, 2, 2, 0, 0, 0, 0], [0] * 8):
        samples = np.concatenate([np.arange(4) < hit for hit in hits]).astype(float)
        found = paired_difference(samples, np.repeat(sources, 4), greedy, sources)
        assert found.p >= 0.125 and found.test == "mover and sign flip"


# -- two groups of sources ------------------------------------------------------------------------


def test_a_difference_between_groups_is_put_together_from_both_rates():
    values = [1, 1, 0, 1, 0, 0, 1, 0, 0, 0]
    labels = [1] * 4 + [0] * 6
    found = group_difference(values, labels, range(10))
    right = cluster_mean(values[:4], range(4), proportion=True)
    wrong = cluster_mean(values[4:], range(6), proportion=True)
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
    assert found.test == "permutation of queries"


def test_an_empty_group_or_a_single_source_leaves_it_open():
    for labels, sources, reason in (
        ([1, 1, 1], "abc", "one group is empty"),
        ([0, 0, 0], "abc", "one group is empty"),
        ([1, 0, 1], "aaa", "one query"),
    ):
        found = group_difference([1, 0, 1], labels, sources)
        assert np.isnan([found.difference.low, found.p]).all()
        assert (found.difference.method, found.test) == (reason, "")


def test_missing_values_are_left_out_and_sources_may_be_tuples():
    sources = [(0, 1), (0, 1), (0, 2), (1, 1), (1, 2), (1, 2)]
    whole = group_difference([1, 0, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0], sources)
    holes = [(9, 9), *sources[:3], (0, 1), *sources[3:]]
    values = [np.nan, 1, 0, 0, np.nan, 1, 0, 1]
    assert whole == group_difference(values, [1, 1, 1, 1, 1, 0, 0, 0], holes)
    assert whole.difference.sources == 4


def test_p_of_other_means_is_students_where_rows_differ():
    rng = np.random.default_rng(1)
    first, sources = rng.normal(size=12), np.arange(12)
    second = rng.normal(size=36) + 1
    found = paired_difference(first, sources, second, np.repeat(sources, 3))
    each = first - second.reshape(12, 3).mean(1)
    spread = spread_between(np.stack([each, np.ones(12)], axis=1))
    student = 2 * stdtr(spread.freedom, -abs(spread.mean) / np.sqrt(spread.variance))
    assert found.test == "student and sign flip"
    assert student > sign_flip_p(each, 10_000, 0)
    assert found.p == pytest.approx(student, rel=1e-5)


@pytest.mark.slow
def test_intervals_hold_the_difference_of_groups():
    rng, held = np.random.default_rng(0), []
    for _ in range(300):
        labels = np.repeat([1, 0], [15, 45])
        values = rng.random(60) < np.where(labels == 1, 0.3, 0.05)
        found = group_difference(values, labels, range(60), permutations=1).difference
        held.append(found.low <= 0.25 <= found.high)
    assert np.mean(held) >= 0.93
