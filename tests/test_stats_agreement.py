"""Agreement against published worked examples and scikit-learn."""

import numpy as np
import pytest
from sklearn import metrics

from ia_mech.stats import (
    balanced_accuracy,
    cluster_statistic,
    cohen_kappa,
    confusion,
    kappa_of,
    krippendorff_alpha,
    precision_recall,
)

# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", example C: four observers,
# twelve units, missing data; published: nominal 0.743, ordinal 0.815, interval 0.849.
NONE = np.nan
OBSERVERS = np.array(
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, NONE, NONE, NONE],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NONE, 3],
        [NONE, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NONE],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NONE],
    ]
)


def labels_of(table):
    """Two columns of labels with this confusion matrix."""
    rows, columns = np.indices(np.shape(table))
    counts = np.ravel(table)
    return np.repeat(rows.ravel(), counts), np.repeat(columns.ravel(), counts)


def random_labels(n=200):
    rng = np.random.default_rng(0)
    truth = rng.integers(4, size=n)
    prediction = np.where(rng.random(n) < 0.6, truth, rng.integers(4, size=n))
    return truth, prediction, rng.random(n) + 0.1


def test_kappa_of_published_tables():
    # Fleiss, Levin & Paik, "Statistical Methods for Rates and Proportions" (3rd ed., table 18.1),
    # also Gwet (2014): kappa 0.68 (0.676).
    table = np.array([[75, 1, 4], [5, 4, 1], [0, 0, 10]])
    truth, prediction = labels_of(table)
    assert cohen_kappa(truth, prediction) == pytest.approx(0.23 / 0.34)
    assert kappa_of(table) == pytest.approx(0.676, abs=5e-4)
    # The 50 grant proposals of two readers, the usual two-by-two example: 0.40.
    assert cohen_kappa(*labels_of([[20, 5], [10, 15]])) == pytest.approx(0.40)
    # Gwet's (2008) paradox: 94% agree, kappa is negative.
    assert cohen_kappa(*labels_of([[118, 5], [2, 0]])) == pytest.approx(-0.0234, abs=5e-5)


def test_alpha_of_published_examples():
    for level, published in (("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)):
        assert krippendorff_alpha(OBSERVERS.T, level) == pytest.approx(published, abs=5e-4)
    # The same document, example A: two observers, ten units, two values: 0.095.
    pairs = np.array([[0, 1, 0, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]])
    assert krippendorff_alpha(pairs.T) == pytest.approx(0.095, abs=5e-4)
    # Gwet (2014) gives 0.677 for the table whose kappa is 0.676.
    truth, prediction = labels_of([[75, 1, 4], [5, 4, 1], [0, 0, 10]])
    alpha = krippendorff_alpha(np.stack([truth, prediction], axis=1))
    assert alpha == pytest.approx(0.6769, abs=5e-5)


def test_alpha_equals_its_definition_pair_by_pair():
    """Observed over expected disagreement, from all pairs of ratings of the example."""
    ratings = [[v for v in unit if not np.isnan(v)] for unit in OBSERVERS.T]
    ratings = [unit for unit in ratings if len(unit) > 1]
    pool = [v for unit in ratings for v in unit]
    n = len(pool)
    observed = sum(
        (u[i] - u[j]) ** 2 / (len(u) - 1)
        for u in ratings
        for i in range(len(u))
        for j in range(len(u))
        if i != j
    )
    expected = sum((x - y) ** 2 for x in pool for y in pool)  # a value differs by 0 from itself
    slow = 1 - (observed / n) / (expected / (n * (n - 1)))
    assert krippendorff_alpha(OBSERVERS.T, "interval") == pytest.approx(slow)


def test_alpha_takes_labels_of_any_kind():
    words = [[None if np.isnan(v) else "abcde"[int(v) - 1] for v in u] for u in OBSERVERS.T]
    expected = krippendorff_alpha(OBSERVERS.T)
    assert krippendorff_alpha(words) == pytest.approx(expected)
    assert krippendorff_alpha(np.array(words, dtype=object)) == pytest.approx(expected)


def test_weights_count_rows_as_often_as_they_say():
    truth, prediction, _ = random_labels()
    times = np.random.default_rng(1).integers(0, 3, 200)
    repeated = np.repeat(truth, times), np.repeat(prediction, times)
    assert cohen_kappa(truth, prediction, times) == pytest.approx(cohen_kappa(*repeated))
    assert (confusion(truth, prediction, range(4), times) == confusion(*repeated, range(4))).all()
    # Alpha's small-sample term knows the number of units, so only nearly.
    weighted = krippendorff_alpha(np.stack([truth, prediction], 1), weights=times)
    assert weighted == pytest.approx(krippendorff_alpha(np.stack(repeated, 1)), abs=1e-3)
    scaled = krippendorff_alpha(np.stack([truth, prediction], 1), weights=times * 9.5)
    assert scaled == pytest.approx(weighted)


def test_everything_equals_scikit_learn_with_weights():
    truth, prediction, weights = random_labels()
    assert cohen_kappa(truth, prediction, weights) == pytest.approx(
        metrics.cohen_kappa_score(truth, prediction, sample_weight=weights)
    )
    assert confusion(truth, prediction, range(4), weights) == pytest.approx(
        metrics.confusion_matrix(truth, prediction, sample_weight=weights)
    )
    assert balanced_accuracy(truth, prediction, weights) == pytest.approx(
        metrics.balanced_accuracy_score(truth, prediction, sample_weight=weights)
    )
    precision, recall, _, _ = metrics.precision_recall_fscore_support(
        truth, prediction, sample_weight=weights
    )
    scores = precision_recall(truth, prediction, range(4), weights)
    assert [s.precision for s in scores] == pytest.approx(precision)
    assert [s.recall for s in scores] == pytest.approx(recall)
    assert [s.truth for s in scores] == np.bincount(truth).tolist()
    assert [s.predicted for s in scores] == np.bincount(prediction).tolist()


def test_the_confusion_matrix_has_truth_down_and_prediction_across():
    table = confusion(["a", "a", "b"], ["a", "c", "b"], ["a", "b", "c"])
    assert table.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    scores = {s.category: s for s in precision_recall(["a", "a"], ["a", "c"], ["a", "b", "c"])}
    assert (scores["a"].precision, scores["a"].recall) == (1.0, 0.5)
    assert np.isnan(scores["b"].precision) and np.isnan(scores["b"].recall)
    assert scores["c"].precision == 0 and np.isnan(scores["c"].recall)
    assert (scores["c"].truth, scores["c"].predicted) == (0, 1)


def test_what_cannot_be_said_is_nan():
    assert np.isnan(cohen_kappa([], []))
    assert np.isnan(cohen_kappa(["a", "a"], ["a", "a"]))
    assert np.isnan(balanced_accuracy([], []))
    assert np.isnan(krippendorff_alpha([["a", None], [None, "b"]]))
    assert np.isnan(krippendorff_alpha([["a", "a"], ["a", "a"]]))
    assert cohen_kappa(["a", "b"], ["a", "b"]) == 1


def test_agreement_gets_its_interval_from_the_clusters():
    truth, prediction, _ = random_labels()
    estimate = cluster_statistic(
        lambda c, w: cohen_kappa(c["truth"], c["prediction"], w),
        {"truth": truth, "prediction": prediction},
        np.arange(200) // 4,
        resamples=300,
    )
    assert estimate.value == pytest.approx(cohen_kappa(truth, prediction))
    assert estimate.low < estimate.value < estimate.high and estimate.sources == 50


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: confusion(["a"], ["b"], ["a"]), "prediction holds 'b', which isn't a category"),
        (lambda: confusion(["a"], ["a", "a"], ["a"]), "1 rows of truth but 2 of prediction"),
        (lambda: confusion(["a"], ["a"], ["a", "a"]), "differ from each other"),
        (lambda: confusion(["a"], ["a"], ["a"], [1, 2]), "weights must have 1 entries"),
        (lambda: cohen_kappa(["a", None], ["a", "b"]), "a label is missing"),
        (lambda: krippendorff_alpha([["a", "b"]], "ratio"), "unknown level 'ratio'"),
        (lambda: krippendorff_alpha(["a", "b"]), "must be \\[units, raters\\]"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
