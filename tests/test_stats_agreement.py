"""Agreement against published worked examples, definitions and scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics

from ia_mech.stats import balanced_accuracy, kappa_of


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


def test_everything_equals_scikit_learn_with_weights():
    truth, prediction, weights = random_labels()
    table = metrics.confusion_matrix(truth, prediction, sample_weight=weights)
    assert kappa_of(table) == pytest.approx(
        metrics.cohen_kappa_score(truth, prediction, sample_weight=weights)
    )
    found = balanced_accuracy(truth > 1, prediction > 1, range(200), np.round(weights, 1) + 1)
    assert found.value == pytest.approx(
        metrics.balanced_accuracy_score(
            truth > 1, prediction > 1, sample_weight=np.round(weights, 1) + 1
        )
    )


def test_a_stack_of_tables_gives_what_each_gives():
    tables = np.random.default_rng(0).integers(9, size=(20, 3, 3)).astype(float)
    tables[0], tables[1] = 0, np.diag([5, 0, 0])  # no rows; one label only
    alone = np.array([kappa_of(table) for table in tables])
    assert kappa_of(tables) == pytest.approx(alone, nan_ok=True)
    assert np.isnan(alone[:2]).all() and not np.isnan(alone[2:]).any()


def test_balanced_accuracy_allows_for_errors_that_were_not_seen():
    """10 right of 10 allow a recall of 0.74, even where the other recall is known better."""
    truth = np.repeat([1, 0], [40, 10])
    found = balanced_accuracy(truth, [1] * 36 + [0] * 14, range(50))
    assert found.value == pytest.approx(0.95)
    assert found.low < 0.95 - (1 - 0.05**0.1) / 2
    assert found.high < 1
    perfect = balanced_accuracy(truth, truth, range(50))
    assert perfect.low < (1 + 0.05**0.1) / 2 and perfect.high == 1
    assert np.isnan(balanced_accuracy([1, 1], [1, 0], "ab").value)
