"""How well two or more raters agree: confusion matrix, kappa, balanced accuracy, alpha.

Rows may carry weights: inverse inclusion probabilities of a stratified sample, or the
multiplicities of a resample, or their product. ``kappa_of``, ``balanced_accuracy_of`` and
``alpha_of`` take the tables of many resamples at once, as ``cluster_counts`` makes them; intervals
come from there.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.resampling import as_weights, is_missing


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
    position = {category: i for i, category in enumerate(categories)}
    if len(position) != len(categories):
        raise ValueError("categories must differ from each other")
    unknown = [label for label in (*truth, *prediction) if label not in position]
    if unknown:
        raise ValueError(f"{unknown[0]!r} isn't a category")
    rows, columns = (
        np.array([position[label] for label in labels], dtype=np.intp)
        for labels in (truth, prediction)
    )
    if len(rows) != len(columns):
        raise ValueError(f"{len(rows)} rows of truth but {len(columns)} of prediction")
    size = len(categories)
    cells = np.bincount(rows * size + columns, as_weights(weights, len(rows)), size * size)
    return cells.reshape(size, size)


def kappa_of(table: ArrayLike) -> np.ndarray:
    """Cohen's kappa, agreement of two raters beyond chance, of ``[..., c, c]`` confusion matrices.

    Cohen (1960), Educational and Psychological Measurement 20:37:
    ``(observed - expected) / (1 - expected)``, expected from both raters' own shares of labels. It
    is symmetric in the raters, and NaN without rows or if both use one and the same label only.
    """
    table = np.asarray(table, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = table.sum((-2, -1), keepdims=True)
        shares = table / total
        expected = (shares.sum(-2) * shares.sum(-1)).sum(-1)
        kappa = (np.trace(shares, axis1=-2, axis2=-1) - expected) / (1 - expected)
    return np.where((total[..., 0, 0] > 0) & (expected < 1), kappa, np.nan)[()]


def balanced_accuracy_of(table: ArrayLike) -> np.ndarray:
    """Balanced accuracy of ``[..., c, c]`` confusion matrices, truth down and prediction across.

    The mean recall over the labels that the truth holds (Brodersen et al. 2010, ICPR); NaN without
    rows.
    """
    table = np.asarray(table, dtype=float)
    right, actual = np.diagonal(table, axis1=-2, axis2=-1), table.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        recalls = np.where(actual > 0, right / actual, 0.0)
        return recalls.sum(-1) / (actual > 0).sum(-1)


def alpha_of(weights: np.ndarray, patterns: ArrayLike, units: int) -> np.ndarray:
    """Krippendorff's nominal alpha of many resamples, from how much weight each pattern has.

    Agreement of any number of raters, some of whose ratings may be missing:
    ``1 - observed / expected disagreement`` from the coincidences of values within units
    (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability"). Units with fewer than two
    ratings say nothing and are left out. Only proportions of weights count: they are scaled to a
    mean of 1 over ``units``, so that the small-sample term keeps its meaning.

    Args:
        weights: ``[k, patterns]`` in each resample, the weight of all units rated so.
        patterns: ``[patterns, raters]`` the different rows of ratings; None or NaN where a rater
            gave none.
        units: how many units with two or more ratings the data have.

    Returns:
        ``[k]`` alphas, at most 1; NaN where no unit has two ratings or all ratings are the same.

    Raises:
        ValueError: a shape isn't one of those.
    """
    table = np.asarray(patterns, dtype=None if isinstance(patterns, np.ndarray) else object)
    if table.ndim != 2:
        raise ValueError(f"patterns must be [patterns, raters], not of {table.ndim} dimensions")
    if weights.shape[1] != len(table):
        raise ValueError(f"{weights.shape[1]} weights but {len(table)} patterns")
    values = [value for value in dict.fromkeys(table.ravel().tolist()) if not is_missing(value)]
    counts = np.zeros((len(table), len(values)))  # how often each value was given
    for i, value in enumerate(values):
        counts[:, i] = (table == value).sum(1)
    ratings = counts.sum(1)
    paired = ratings >= 2
    counts, ratings, weights = counts[paired], ratings[paired], weights[:, paired]
    pairs = counts[:, :, None] * counts[:, None, :] - counts[:, :, None] * np.eye(len(values))
    per_pattern = (pairs / (ratings[:, None, None] - 1)).reshape(len(counts), len(values) ** 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = weights * (units / weights.sum(1, keepdims=True))
    coincidence = (scaled @ per_pattern).reshape(len(weights), len(values), len(values))
    totals, differ = coincidence.sum(1), 1 - np.eye(len(values))
    expected = (totals[:, :, None] * differ * totals[:, None, :]).sum((1, 2))
    observed = (coincidence * differ).sum((1, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        alpha = 1 - (totals.sum(1) - 1) * observed / expected
    return np.where(expected > 0, alpha, np.nan)
