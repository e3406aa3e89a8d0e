"""One labeller against another, and several among themselves: figures with intervals.

Statistics and intervals are ``ia_mech.stats``'; here labels become what those take. A row that one
side abstained on (``cannot_assess``) or failed on (no category) is counted and then left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE
from ia_mech.stats import (
    Estimate,
    alpha_of,
    balanced_accuracy_of,
    cluster_counts,
    cluster_mean,
    confusion,
    kappa_of,
)

_UNKNOWN = Estimate(np.nan, np.nan, np.nan, 0, "no rows")


@dataclass(frozen=True)
class CategoryLine:
    """How one category fares. ``truth`` and ``predicted`` count rows, the weights what they stand
    for; precision and recall are weighted, NaN where no row was predicted so, or is so."""

    category: str
    truth: int
    predicted: int
    truth_weight: float
    predicted_weight: float
    precision: Estimate
    recall: Estimate


@dataclass(frozen=True)
class Comparison:
    """How far a prediction agrees with a truth (which may be another judge's word).

    Attributes:
        matched: rows that both were asked about; the next four are some of these.
        abstained_truth, abstained_prediction: rows that one (or both) said ``cannot_assess`` of.
        failed_truth, failed_prediction: rows of which one has no category at all.
        n: the rows compared, those that both put into a category.
        sources: of these rows.
        weight: the sum of their weights: about how many rows they stand for.
        weighted: whether weights differ from row to row.
        accuracy, kappa, alpha: of the categories.
        accuracy_genuine, balanced_accuracy, kappa_genuine, alpha_genuine: of genuine follow-ups
            against the rest. Balanced accuracy is NaN unless the truth has both.
        categories: one line for each category of the rubric, used or not.
        confusion: ``[c, c]`` sums of weights, truth down, prediction across.
        confusion_rows: the same in rows.
    """

    matched: int
    abstained_truth: int
    abstained_prediction: int
    failed_truth: int
    failed_prediction: int
    n: int
    sources: int
    weight: float
    weighted: bool
    accuracy: Estimate
    kappa: Estimate
    alpha: Estimate
    accuracy_genuine: Estimate
    balanced_accuracy: Estimate
    kappa_genuine: Estimate
    alpha_genuine: Estimate
    categories: tuple[CategoryLine, ...]
    confusion: np.ndarray
    confusion_rows: np.ndarray


def compare(
    truth: Sequence[str | None],
    prediction: Sequence[str | None],
    sources: Sequence[str],
    weights: ArrayLike | None = None,
) -> Comparison:
    """Compare two columns of labels.

    Args:
        truth: ``[n]`` category of each row; None where there is none.
        prediction: ``[n]`` the same from whom is to be measured.
        sources: ``[n]`` the source of each row, the unit of the intervals.
        weights: ``[n]`` how many rows each stands for, as the inverse inclusion probability.

    Raises:
        ValueError: lengths differ, or a label isn't the rubric's.
    """
    truth, prediction = _labels(truth), _labels(prediction)
    weights = np.ones(len(truth)) if weights is None else np.asarray(weights, dtype=float)
    sources = np.asarray(sources, dtype=object)
    if not len(truth) == len(prediction) == len(sources) == len(weights):
        raise ValueError("truth, prediction, sources and weights must be of one length")
    kept = _assessed(truth) & _assessed(prediction)
    counts = {
        "matched": len(truth),
        "abstained_truth": int((truth == CANNOT_ASSESS).sum()),
        "abstained_prediction": int((prediction == CANNOT_ASSESS).sum()),
        "failed_truth": sum(label is None for label in truth),
        "failed_prediction": sum(label is None for label in prediction),
    }
    truth, prediction, sources, weights = (x[kept] for x in (truth, prediction, sources, weights))
    same = truth == prediction
    same_genuine = (truth == GENUINE) == (prediction == GENUINE)
    kappas = _kappas(truth, prediction, sources, weights)
    alphas = group_alpha([truth, prediction], sources, weights)
    return Comparison(
        **counts,
        n=len(truth),
        sources=len(set(sources)),
        weight=float(weights.sum()),
        weighted=bool(len(weights)) and not np.allclose(weights, weights[0]),
        accuracy=_share(same, sources, weights),
        kappa=kappas[0],
        alpha=alphas.categories,
        accuracy_genuine=_share(same_genuine, sources, weights),
        balanced_accuracy=kappas[2],
        kappa_genuine=kappas[1],
        alpha_genuine=alphas.genuine,
        categories=tuple(
            _line(category, truth == category, prediction == category, sources, weights)
            for category in ASSESSED
        ),
        confusion=confusion(truth, prediction, ASSESSED, weights),
        confusion_rows=confusion(truth, prediction, ASSESSED).astype(int),
    )


@dataclass(frozen=True)
class GroupAlpha:
    """Krippendorff's α (nominal) of a group; n counts the rows that at least two have rated."""

    n: int
    sources: int
    weight: float
    categories: Estimate
    genuine: Estimate


def group_alpha(
    ratings: Sequence[Sequence[str | None]],
    sources: Sequence[str],
    weights: ArrayLike | None = None,
) -> GroupAlpha:
    """Krippendorff's α among any number of labellers, or of a judge's repeats.

    Args:
        ratings: per labeller ``[n]`` categories; ``cannot_assess`` and None count as not rated.
        sources: ``[n]`` the source of each row.
        weights: ``[n]`` how many rows each stands for.
    """
    columns = np.array(
        [[ASSESSED.index(x) if x in ASSESSED else -1 for x in column] for column in ratings]
    ).T.reshape(-1, len(ratings))
    weights = np.ones(len(columns)) if weights is None else np.asarray(weights, dtype=float)
    rated = (columns >= 0).sum(1) >= 2
    columns, weights = columns[rated], weights[rated]
    sources = np.asarray(sources, dtype=object)[rated]
    if not len(columns):
        return GroupAlpha(0, 0, 0.0, _UNKNOWN, _UNKNOWN)
    patterns, pattern = np.unique(columns, axis=0, return_inverse=True)
    given = [[None if code < 0 else code for code in row] for row in patterns.tolist()]
    genuine_code = ASSESSED.index(GENUINE)
    genuine = [[None if code is None else code == genuine_code for code in row] for row in given]

    def statistic(counts: np.ndarray) -> np.ndarray:
        return np.stack([alpha_of(counts, x, len(columns)) for x in (given, genuine)], axis=1)

    found = cluster_counts(statistic, pattern.reshape(-1), sources, weights=weights)
    return GroupAlpha(len(columns), len(set(sources)), float(weights.sum()), *found)


def _kappas(
    truth: np.ndarray, prediction: np.ndarray, sources: np.ndarray, weights: np.ndarray
) -> list[Estimate]:
    """κ of the categories, κ and balanced accuracy of genuine against the rest."""
    if not len(truth):
        return [_UNKNOWN] * 3
    number, size = {category: i for i, category in enumerate(ASSESSED)}, len(ASSESSED)
    cell = [number[a] * size + number[b] for a, b in zip(truth, prediction, strict=True)]
    side = np.array([[category == GENUINE, category != GENUINE] for category in ASSESSED])
    merge = np.kron(side, side).astype(float)  # cells of all categories into those of genuine

    def statistic(counts: np.ndarray) -> np.ndarray:
        two = (counts @ merge).reshape(-1, 2, 2)
        balanced = np.where((two.sum(2) > 0).all(1), balanced_accuracy_of(two), np.nan)
        return np.stack([kappa_of(counts.reshape(-1, size, size)), kappa_of(two), balanced], axis=1)

    return cluster_counts(statistic, cell, sources, weights=weights, patterns=size**2)


def _line(
    category: str,
    truth: np.ndarray,
    predicted: np.ndarray,
    sources: np.ndarray,
    weights: np.ndarray,
) -> CategoryLine:
    return CategoryLine(
        category=category,
        truth=int(truth.sum()),
        predicted=int(predicted.sum()),
        truth_weight=float(weights[truth].sum()),
        predicted_weight=float(weights[predicted].sum()),
        precision=_share(truth[predicted], sources[predicted], weights[predicted]),
        recall=_share(predicted[truth], sources[truth], weights[truth]),
    )


def _share(event: np.ndarray, sources: np.ndarray, weights: np.ndarray) -> Estimate:
    return cluster_mean(event, sources, proportion=True, weights=weights)


def _labels(labels: Sequence[str | None]) -> np.ndarray:
    """``[n]`` objects; ValueError for what is neither None nor a name of the rubric."""
    column = np.empty(len(labels), dtype=object)
    column[:] = [None if label is None or label != label else label for label in labels]
    for label in set(column):
        if label is not None and label != CANNOT_ASSESS and label not in ASSESSED:
            raise ValueError(f"{label!r} is not a category of the rubric")
    return column


def _assessed(labels: np.ndarray) -> np.ndarray:
    return np.array([label in ASSESSED for label in labels], dtype=bool)
