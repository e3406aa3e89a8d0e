"""Agreement against published worked examples, definitions and scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics

from ia_mech.stats import alpha_of, balanced_accuracy_of, confusion, kappa_of

# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", example C: four observers,
# twelve units, missing data; published: nominal 0.743.
NONE = np.nan
OBSERVERS = np.array(
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, NONE, NONE, NONE],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NONE, 3],
        [NONE, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NONE],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NONE],
    ]
)


def alpha(ratings, weights=None):
    """Of units, each its own pattern."""
    weights = np.ones(len(ratings)) if weights is None else np.asarray(weights, dtype=float)
    rated = np.array([sum(x is not None and x == x for x in unit) for unit in ratings])
    return alpha_of(weights[None], ratings, int((rated >= 2).sum()))[0]


def alpha_by_pairs(ratings, weights):
    """Observed over expected disagreement, from all pairs of ratings (nominal), by its definition.

    Weights are scaled to a mean of 1 over units with two or more ratings.
    """
    units = [[x for x in unit if x is not None and x == x] for unit in ratings]
    kept = [(unit, w) for unit, w in zip(units, weights, strict=True) if len(unit) > 1]
    scale = len(kept) / sum(w for _, w in kept)
    pool = [(x, w * scale) for unit, w in kept for x in unit]
    n = sum(w for _, w in pool)
    observed = sum(
        w * scale * sum(unit[i] != x for i in range(len(unit)) for x in unit) / (len(unit) - 1)
        for unit, w in kept
    )
    expected = sum(v * w for x, v in pool for y, w in pool if x != y)
    return 1 - (observed / n) / (expected / (n * (n - 1)))


def random_labels(n=200):
    rng = np.random.default_rng(0)
    truth = rng.integers(4, size=n)
    prediction = np.where(rng.random(n) < 0.6, truth, rng.integers(4, size=n))
    return truth, prediction, rng.random(n) + 0.1


def test_kappa_of_published_tables():
    # Fleiss, Levin & Paik, "Statistical Methods for Rates and Proportions" (3rd ed., table 18.1),
    # also Gwet (2014): kappa 0.68 (0.676).
    assert kappa_of([[75, 1, 4], [5, 4, 1], [0, 0, 10]]) == pytest.approx(0.23 / 0.34)
    # The 50 grant proposals of two readers, the usual two-by-two example: 0.40.
    assert kappa_of([[20, 5], [10, 15]]) == pytest.approx(0.40)
    # Gwet's (2008) paradox: 94% agree, kappa is negative.
    assert kappa_of([[118, 5], [2, 0]]) == pytest.approx(-0.0234, abs=5e-5)


def test_alpha_of_published_examples():
    assert alpha(OBSERVERS.T) == pytest.approx(0.743, abs=5e-4)
    words = [[None if np.isnan(v) else "abcde"[int(v) - 1] for v in u] for u in OBSERVERS.T]
    assert alpha(words) == alpha(np.array(words, dtype=object)) == alpha(OBSERVERS.T)
    # The same document, example A: two observers, ten units, two values: 0.095.
    pairs = np.array([[0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]])
    assert alpha(pairs.T) == pytest.approx(0.095, abs=5e-4)


def test_alpha_equals_its_definition_pair_by_pair():
    rng = np.random.default_rng(1)
    table = rng.integers(4, size=(40, 3)).astype(float)
    table[rng.random(table.shape) < 0.3] = np.nan
    weights = rng.random(40) + 0.1
    assert alpha(table) == pytest.approx(alpha_by_pairs(table, np.ones(40)))
    assert alpha(table, weights) == pytest.approx(alpha_by_pairs(table, weights))
    assert alpha(table, weights * 9.5) == pytest.approx(alpha(table, weights))


def test_everything_equals_scikit_learn_with_weights():
    truth, prediction, weights = random_labels()
    table = confusion(truth, prediction, range(4), weights)
    assert table == pytest.approx(
        metrics.confusion_matrix(truth, prediction, sample_weight=weights)
    )
    assert kappa_of(table) == pytest.approx(
        metrics.cohen_kappa_score(truth, prediction, sample_weight=weights)
    )
    assert balanced_accuracy_of(table) == pytest.approx(
        metrics.balanced_accuracy_score(truth, prediction, sample_weight=weights)
    )


def test_a_stack_of_tables_gives_what_each_gives():
    tables = np.random.default_rng(0).integers(9, size=(20, 3, 3)).astype(float)
    tables[0] = 0  # no rows
    tables[1], tables[2, 0] = np.diag([5, 0, 0]), 0  # one label only; one that isn't in the truth
    for statistic in (kappa_of, balanced_accuracy_of):
        alone = [statistic(table) for table in tables]
        assert statistic(tables) == pytest.approx(np.array(alone), nan_ok=True)
        assert isinstance(alone[5], float) and np.isnan(alone[0])
        assert statistic(tables.reshape(4, 5, 3, 3)).shape == (4, 5)
    assert np.isnan(kappa_of(tables[1])) and balanced_accuracy_of(tables[1]) == 1
    assert kappa_of(np.eye(2)) == 1


def test_without_pairs_or_differences_there_is_no_alpha():
    for ratings in ([["a", None], [None, "b"]], [[None, None]], [["a", "a"], ["a", "a"]]):
        assert np.isnan(alpha(ratings))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: confusion(["a"], ["b"], ["a"]), "'b' isn't a category"),
        (lambda: confusion(["a"], ["a", "a"], ["a"]), "1 rows of truth but 2 of prediction"),
        (lambda: confusion(["a"], ["a"], ["a", "a"]), "differ from each other"),
        (lambda: alpha_of(np.ones((1, 1)), [1, 2], 1), r"must be \[patterns, raters\]"),
        (lambda: alpha_of(np.ones((1, 3)), [[1, 2]], 1), "3 weights but 1 patterns"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
