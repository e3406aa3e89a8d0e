"""Tests against enumeration, definitions and SciPy."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import permutation_test

from ia_mech.stats import holm, permutation_p
from ia_mech.stats.significance import sign_flip_p, source_permutation_p


def test_holm_equals_its_definition():
    p = np.array([0.01, 0.04, 0.03, 0.005, 0.5])
    m, order, slow = len(p), np.argsort(p), np.empty(5)
    for place, i in enumerate(order):
        slow[i] = min(1, max((m - j) * p[order[j]] for j in range(place + 1)))
    assert holm(p) == pytest.approx(slow)
    # R: p.adjust(c(.01, .04, .03, .005), "holm")
    assert holm(p[:4]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_tests_that_were_not_made_do_not_count():
    with_nan = holm([np.nan, 0.01, 0.04, np.nan])
    assert np.isnan(with_nan[[0, 3]]).all()
    assert with_nan[1:3] == pytest.approx(holm([0.01, 0.04]))
    assert holm([]).shape == (0,) and np.isnan(holm([np.nan])).all()


def test_all_sign_flips_are_visited_where_sources_are_few():
    differences = np.array([0.5, -0.25, 0.0, 1.0, 0.125, 0.75])
    sums = [abs(np.dot(s, differences)) for s in product((1, -1), repeat=6)]
    expected = np.mean([s >= abs(differences.sum()) - 1e-12 for s in sums])
    assert sign_flip_p(differences, 10_000, seed=0) == expected
    scipys = permutation_test(
        (differences, np.zeros(6)), lambda x, y: (x - y).mean(), permutation_type="samples"
    )
    assert expected == pytest.approx(scipys.pvalue)


def test_random_sign_flips_come_close_to_all_of_them():
    differences = np.random.default_rng(0).normal(0.3, 1, 18)
    exact = sign_flip_p(differences, 2**18, seed=0)
    assert sign_flip_p(differences, 20_000, seed=1) == pytest.approx(exact, abs=0.01)
    assert sign_flip_p(np.ones(40), 1000, seed=0) == 1 / 1001  # never 0


def test_permuting_sources_equals_a_loop_over_them():
    rng = np.random.default_rng(0)
    sources, label_of = np.repeat(np.arange(10), rng.integers(1, 5, 10)), np.array([0, 1] * 5)
    feature = rng.normal(size=len(sources)) + 0.5 * label_of[sources]

    def apart(labels):
        return abs(feature[labels == 1].mean() - feature[labels == 0].mean())

    found = source_permutation_p(apart, label_of[sources], sources, permutations=200, seed=6)
    draws, reached = np.random.default_rng(6), 0
    for _ in range(200):
        reached += apart(label_of[draws.permutation(10)][sources]) >= apart(label_of[sources])
    assert found == pytest.approx((1 + reached) / 201)


def test_labels_that_differ_within_sources_move_as_blocks_of_the_same_size():
    sources, seen = np.array([0, 0, 1, 1, 2, 3, 3, 4]), []
    labels = np.arange(1, 9)
    source_permutation_p(lambda x: seen.append(x.copy()) or 0.0, labels, sources, permutations=50)
    for permuted in seen:
        blocks = {tuple(permuted[sources == s]) for s in (0, 1, 3)}
        assert blocks == {(1, 2), (3, 4), (6, 7)} and {permuted[4], permuted[7]} == {5, 8}
    assert len({tuple(s) for s in seen}) > 5


def test_an_undefined_statistic_has_no_p_and_counts_as_no_effect():
    null = np.array([[np.nan, 1.0], [0.0, np.nan], [0.0, 3.0]])
    found = permutation_p([np.nan, 2.0], null)
    assert np.isnan(found[0]) and found[1] == 2 / 4
