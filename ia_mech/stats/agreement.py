"""How well two or more judges agree: confusion, kappa, alpha, precision and recall.

Rows may carry weights: inverse inclusion probabilities of a stratified sample, or the
multiplicities that ``cluster_statistic`` hands over, or their product. Intervals come from there;
nothing here knows sources. ``kappa_of``, ``balanced_accuracy_of`` and ``alpha_of`` take the tables
of many resamples at once, as ``cluster_counts`` makes them. Labels are strings or numbers; a
missing label is the caller's to leave out, except for Krippendorff's alpha, which is made for it.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.resampling import as_weights, is_missing


def _encode(labels: Iterable[Hashable]) -> tuple[np.ndarray, list[Hashable]]:
    """``[n]`` numbers of labels and the different labels they stand for."""
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biuf":
        found, codes = np.unique(labels, return_inverse=True)
        return codes, found.tolist()
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    number = {label: i for i, label in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], dtype=np.intp), list(number)


def _codes(labels: Iterable[Hashable], categories: Sequence[Hashable], name: str) -> np.ndarray:
    """``[n]`` positions of labels in categories; ValueError for a label that isn't there."""
    position = {category: i for i, category in enumerate(categories)}
    if len(position) != len(categories):
        raise ValueError("categories must differ from each other")
    codes, found = _encode(labels)
    unknown = [label for label in found if label not in position]
    if unknown:
        raise ValueError(f"{name} holds {unknown[0]!r}, which isn't a category")
    return np.array([position[label] for label in found], dtype=np.intp)[codes]


def _categories(*columns: Iterable[Hashable]) -> list[Hashable]:
    """The labels that occur; ValueError if one is missing."""
    found = dict.fromkeys(label for column in columns for label in _encode(column)[1])
    if any(is_missing(label) for label in found):
        raise ValueError("a label is missing (None or NaN); leave such rows out")
    return list(found)


def confusion(
    truth: Sequence[Hashable],
    prediction: Sequence[Hashable],
    categories: Sequence[Hashable],
    weights: ArrayLike | None = None,
) -> np.ndarray:
    """Weight of every pair of labels.

    Args:
        truth: ``[n]`` labels.
        prediction: ``[n]`` labels.
        categories: ``[c]`` all labels there may be; gives the order.
        weights: ``[n]`` row weights; 1 where none are given.

    Returns:
        ``[c, c]`` sums of weights, truth down and prediction across.

    Raises:
        ValueError: lengths differ or a label isn't a category.
    """
    rows = _codes(truth, categories, "truth")
    columns = _codes(prediction, categories, "prediction")
    if len(rows) != len(columns):
        raise ValueError(f"{len(rows)} rows of truth but {len(columns)} of prediction")
    size = len(categories)
    cells = np.bincount(rows * size + columns, as_weights(weights, len(rows)), size * size)
    return cells.reshape(size, size)


def cohen_kappa(
    truth: Sequence[Hashable],
    prediction: Sequence[Hashable],
    weights: ArrayLike | None = None,
) -> float:
    """Agreement of two judges on nominal labels beyond chance.

    Cohen (1960), Educational and Psychological Measurement 20:37:
    ``(observed - expected) / (1 - expected)``, expected from both judges' own shares of labels. It
    is symmetric in the judges.

    Args:
        truth: ``[n]`` labels of one judge.
        prediction: ``[n]`` labels of the other.
        weights: ``[n]`` row weights, for instance inverse inclusion probabilities; they are sample
            weights, not degrees of disagreement.

    Returns:
        Kappa, at most 1; NaN without rows or if both judges use one and the same label throughout.
    """
    table = confusion(truth, prediction, _categories(truth, prediction), weights)
    return kappa_of(table)


def kappa_of(table: np.ndarray) -> float | np.ndarray:
    """Cohen's kappa of a ``[c, c]`` confusion matrix, or of ``[..., c, c]`` many.

    See :func:`cohen_kappa`.
    """
    table = np.asarray(table, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = table.sum((-2, -1), keepdims=True)
        shares = table / total
        expected = (shares.sum(-2) * shares.sum(-1)).sum(-1)
        kappa = (np.trace(shares, axis1=-2, axis2=-1) - expected) / (1 - expected)
    kappa = np.where((total[..., 0, 0] > 0) & (expected < 1), kappa, np.nan)
    return kappa if kappa.ndim else float(kappa)


def krippendorff_alpha(
    ratings: ArrayLike, level: str = "nominal", weights: ArrayLike | None = None
) -> float:
    """Agreement of any number of judges, some of whose ratings may be missing.

    ``1 - observed / expected disagreement`` from the coincidences of values within units
    (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability"). Units with fewer than two
    ratings say nothing and are left out.

    Args:
        ratings: ``[units, raters]`` labels (numbers unless nominal); None or NaN where a rater gave
            none.
        level: ``nominal``, ``ordinal`` or ``interval``: how far apart two values are.
        weights: ``[units]``; only their proportions count: they are scaled to a mean of 1 over
            units with two or more ratings, so that the small-sample term keeps its meaning.

    Returns:
        Alpha, at most 1; NaN if no unit has two ratings or all ratings are the same.

    Raises:
        ValueError: shape or level isn't one of those.
    """
    table = _ratings(ratings, level)
    weight = as_weights(weights, len(table))
    counts, values = _values_per_unit(table, level)
    paired = counts.sum(1) >= 2
    counts, weight = counts[paired], weight[paired]
    if not len(counts) or weight.sum() == 0:
        return np.nan
    weight = weight / weight.mean()
    scale = weight / (counts.sum(1) - 1)
    coincidence = counts.T @ (counts * scale[:, None]) - np.diag(scale @ counts)
    return float(_alpha(coincidence[None], values, level)[0])


def alpha_of(
    weights: np.ndarray, patterns: ArrayLike, units: int, level: str = "nominal"
) -> np.ndarray:
    """Krippendorff's alpha of many resamples at once, from how much weight each pattern has.

    It equals :func:`krippendorff_alpha` of the units with the weights they have in the resample.

    Args:
        weights: ``[k, patterns]`` in each resample, the weight of all units rated so.
        patterns: ``[patterns, raters]`` the different rows of ratings, as there.
        units: how many units with two or more ratings the data have, for the small-sample term.
        level: ``nominal``, ``ordinal`` or ``interval``.

    Returns:
        ``[k]`` alphas; NaN where no unit has two ratings or all ratings are the same.

    Raises:
        ValueError: a shape or level isn't one of those.
    """
    table = _ratings(patterns, level)
    if weights.shape[1] != len(table):
        raise ValueError(f"{weights.shape[1]} weights but {len(table)} patterns")
    counts, values = _values_per_unit(table, level)
    ratings = counts.sum(1)
    paired = ratings >= 2
    counts, ratings, weights = counts[paired], ratings[paired], weights[:, paired]
    pairs = counts[:, :, None] * counts[:, None, :] - counts[:, :, None] * np.eye(len(values))
    per_pattern = (pairs / (ratings[:, None, None] - 1)).reshape(len(counts), len(values) ** 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = weights * (units / weights.sum(1, keepdims=True))
    coincidence = scaled @ per_pattern
    return _alpha(coincidence.reshape(len(weights), len(values), len(values)), values, level)


def _ratings(ratings: ArrayLike, level: str) -> np.ndarray:
    """``[units, raters]``, or ValueError; lists keep None and mixed kinds as they are."""
    if level not in ("nominal", "ordinal", "interval"):
        raise ValueError(f"unknown level {level!r}; choose from nominal, ordinal, interval")
    table = np.asarray(ratings, dtype=None if isinstance(ratings, np.ndarray) else object)
    if table.ndim != 2:
        raise ValueError(f"ratings must be [units, raters], not of {table.ndim} dimensions")
    return table


def _values_per_unit(table: np.ndarray, level: str) -> tuple[np.ndarray, list]:
    """``[units, values]`` how often each value was given, and the values, sorted unless nominal."""
    codes, found = _encode(table.ravel())
    values = [value for value in found if not is_missing(value)]
    if level != "nominal":
        values.sort()
    position = {value: i for i, value in enumerate(values)}
    missing = len(values)  # the last column, cut off again
    column = np.array([position.get(value, missing) for value in found], dtype=np.intp)[codes]
    cells = np.repeat(np.arange(len(table)), table.shape[1]) * (missing + 1) + column
    counts = np.bincount(cells, minlength=len(table) * (missing + 1)).astype(float)
    return counts.reshape(len(table), missing + 1)[:, :missing], values


def _alpha(coincidence: np.ndarray, values: list, level: str) -> np.ndarray:
    """``[k]`` alphas of ``[k, c, c]`` coincidences of values within units."""
    totals = coincidence.sum(1)
    distance = _distances(values, totals, level)
    expected = (totals[:, :, None] * distance * totals[:, None, :]).sum((1, 2))
    observed = (coincidence * distance).sum((1, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        alpha = 1 - (totals.sum(1) - 1) * observed / expected
    return np.where(expected > 0, alpha, np.nan)


def _distances(values: list, totals: np.ndarray, level: str) -> np.ndarray:
    """Squared differences between values, as Krippendorff defines them per level.

    Args:
        values: ``c`` of them.
        totals: ``[k, c]`` how often each occurs.
        level: ``nominal``, ``ordinal`` or ``interval``.

    Returns:
        ``[k or 1, c, c]``.
    """
    if level == "nominal":
        return 1 - np.eye(len(values))[None]
    if level == "interval":
        line = np.asarray(values, dtype=float)[None]
    else:  # an ordinal value stands where its ranks have their middle
        line = np.cumsum(totals, axis=1) - totals / 2
    return (line[:, :, None] - line[:, None, :]) ** 2


@dataclass(frozen=True)
class CategoryScore:
    """How well one category is found.

    Attributes:
        category: the label.
        precision: weighted share of rows predicted so that are so; NaN if none is predicted.
        recall: weighted share of rows that are so that are predicted so; NaN if there is none.
        truth: rows that are so, unweighted.
        predicted: rows predicted so, unweighted.
    """

    category: Hashable
    precision: float
    recall: float
    truth: int
    predicted: int


def precision_recall(
    truth: Sequence[Hashable],
    prediction: Sequence[Hashable],
    categories: Sequence[Hashable],
    weights: ArrayLike | None = None,
) -> list[CategoryScore]:
    """Precision, recall and numbers of rows for each category, in the order of ``categories``.

    Args:
        truth: ``[n]`` labels.
        prediction: ``[n]`` labels.
        categories: ``[c]`` all labels there may be.
        weights: ``[n]`` row weights; 1 where none are given.

    Raises:
        ValueError: lengths differ or a label isn't a category.
    """
    table = confusion(truth, prediction, categories, weights)
    rows = confusion(truth, prediction, categories)
    right, actual, predicted = np.diag(table), table.sum(1), table.sum(0)
    return [
        CategoryScore(
            category=category,
            precision=float(right[i] / predicted[i]) if predicted[i] else np.nan,
            recall=float(right[i] / actual[i]) if actual[i] else np.nan,
            truth=int(rows[i].sum()),
            predicted=int(rows[:, i].sum()),
        )
        for i, category in enumerate(categories)
    ]


def balanced_accuracy(
    truth: Sequence[Hashable],
    prediction: Sequence[Hashable],
    weights: ArrayLike | None = None,
) -> float:
    """Mean recall over the labels that the truth holds (Brodersen et al. 2010, ICPR).

    Args:
        truth: ``[n]`` labels.
        prediction: ``[n]`` labels.
        weights: ``[n]`` row weights; a label whose rows all weigh 0 isn't there.

    Returns:
        A number in [0, 1]; NaN without rows. One label alone gives its recall.
    """
    return balanced_accuracy_of(
        confusion(truth, prediction, _categories(truth, prediction), weights)
    )


def balanced_accuracy_of(table: np.ndarray) -> float | np.ndarray:
    """Balanced accuracy of a ``[c, c]`` confusion matrix, or of ``[..., c, c]`` many.

    Truth is down and prediction across; see :func:`balanced_accuracy`.
    """
    table = np.asarray(table, dtype=float)
    right, actual = np.diagonal(table, axis1=-2, axis2=-1), table.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        recalls = np.where(actual > 0, right / actual, 0.0)
        mean = recalls.sum(-1) / (actual > 0).sum(-1)
    return mean if mean.ndim else float(mean)
