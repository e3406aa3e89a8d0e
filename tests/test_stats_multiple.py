"""Adjusted p values and the permutation test against the maximum."""

import numpy as np
import pytest

from ia_mech.stats import benjamini_hochberg, holm, permutation_max


def test_holm_and_bh_equal_their_definitions():
    p = np.array([0.01, 0.04, 0.03, 0.005, 0.5])
    m, order = len(p), np.argsort(p)
    slow_holm, slow_bh = np.empty(m), np.empty(m)
    for place, i in enumerate(order):
        slow_holm[i] = min(1, max((m - j) * p[order[j]] for j in range(place + 1)))
        slow_bh[i] = min(1, min(m / (j + 1) * p[order[j]] for j in range(place, m)))
    assert holm(p) == pytest.approx(slow_holm)
    assert benjamini_hochberg(p) == pytest.approx(slow_bh)
    # R: p.adjust(c(.01, .04, .03, .005), "holm") and "BH"
    assert holm(p[:4]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert benjamini_hochberg(p[:4]) == pytest.approx([0.02, 0.04, 0.04, 0.02])


def test_tests_that_were_not_made_do_not_count():
    for adjust in (holm, benjamini_hochberg):
        with_nan = adjust([np.nan, 0.01, 0.04, np.nan])
        assert np.isnan(with_nan[[0, 3]]).all()
        assert with_nan[1:3] == pytest.approx(adjust([0.01, 0.04]))
        assert adjust([]).shape == (0,) and np.isnan(adjust([np.nan])).all()
        with pytest.raises(ValueError, match="between 0 and 1"):
            adjust([0.5, 1.5])


def differences(features):
    """Statistics of labels: for each of m features, how far apart the two labels' means are."""

    def statistic(labels):
        on = labels == 1
        return np.abs(features[on].mean(0) - features[~on].mean(0))

    return statistic


def test_the_permutation_test_equals_a_loop_over_groups():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(10), rng.integers(1, 5, 10))
    label_of = np.array([0, 1] * 5)
    labels = label_of[groups]
    features = rng.normal(size=(len(groups), 3)) + labels[:, None] * [0, 0.5, 2]
    statistic = differences(features)
    test = permutation_max(statistic, labels, groups, permutations=200, seed=6)
    observed, draws = statistic(labels), np.random.default_rng(6)
    null = np.array(
        [statistic(label_of[draws.permutation(np.arange(10))][groups]) for _ in range(200)]
    )
    assert test.observed == pytest.approx(observed)
    for j in range(3):
        adjusted = (1 + sum(row.max() >= observed[j] for row in null)) / 201
        raw = (1 + sum(row[j] >= observed[j] for row in null)) / 201
        assert test.p_adjusted[j] == pytest.approx(adjusted)
        assert test.p_raw[j] == pytest.approx(raw)
    assert (test.p_adjusted >= test.p_raw).all()
    assert test.null_maximum == pytest.approx(null.max(1))


def test_labels_that_differ_within_groups_move_as_blocks_of_the_same_size():
    groups = np.array([0, 0, 1, 1, 2, 3, 3, 4])
    labels = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    seen = []
    permutation_max(lambda x: seen.append(x.copy()) or 0.0, labels, groups, permutations=50)
    blocks = {(1, 2), (3, 4), (6, 7)}
    for permuted in seen:
        assert {tuple(permuted[groups == g]) for g in (0, 1, 3)} == blocks
        assert {permuted[4], permuted[7]} == {5, 8}
    assert len({tuple(s) for s in seen}) > 5


def test_groups_stay_in_their_stratum():
    groups, strata = np.repeat(np.arange(6), 2), np.repeat(["x", "y"], 6)
    labels, seen = np.repeat([0, 1, 2, 10, 11, 12], 2), []
    permutation_max(lambda x: seen.append(x) or 0.0, labels, groups, permutations=20, strata=strata)
    assert all(sorted(s[:6]) == [0, 0, 1, 1, 2, 2] for s in seen)
    with pytest.raises(ValueError, match="whole groups"):
        permutation_max(len, labels, groups, strata=np.arange(12) % 2)


def test_false_alarms_over_many_statistics_stay_at_five_percent():
    """20 correlated features of 40 groups of 3 equal rows; the smallest adjusted p is uniform."""
    rng, alarms, raw_alarms, trials = np.random.default_rng(1), 0, 0, 300
    groups = np.repeat(np.arange(40), 3)
    for _ in range(trials):
        features = (rng.normal(size=(40, 20)) + rng.normal(size=(40, 1)))[groups]
        labels = (rng.permutation(40) < 20).astype(int)[groups]
        test = permutation_max(differences(features), labels, groups, permutations=199)
        alarms += test.p_adjusted.min() <= 0.05
        raw_alarms += test.p_raw.min() <= 0.05
    assert 0.02 <= alarms / trials <= 0.085
    assert raw_alarms / trials > 0.2  # what not adjusting would do


def test_an_undefined_statistic_has_no_p_and_cannot_win():
    test = permutation_max(
        lambda x: np.array([np.nan, float(x[0])]), [1, 0, 0, 0], list("abcd"), permutations=99
    )
    assert np.isnan(test.p_raw[0]) and np.isnan(test.p_adjusted[0])
    assert test.p_raw[1] == test.p_adjusted[1]
    assert 0.1 < test.p_raw[1] < 0.4


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="2 labels but 3 rows"):
        permutation_max(len, [0, 1], list("abc"))
    with pytest.raises(ValueError, match="nothing to permute"):
        permutation_max(len, [0, 1], list("aa"))
    with pytest.raises(ValueError, match="permutations must be"):
        permutation_max(len, [0, 1], list("ab"), permutations=0)
    with pytest.raises(ValueError, match="one dimension"):
        holm([[0.1]])
