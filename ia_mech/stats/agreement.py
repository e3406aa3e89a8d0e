"""How well two raters agree: confusion matrix, kappa, balanced accuracy.

Rows may carry weights: inverse inclusion probabilities of a stratified sample, or the
multiplicities of a resample, or their product. ``kappa_of`` and ``balanced_accuracy_of`` take the
tables of many resamples at once, as ``cluster_bootstrap`` makes them; intervals come from there.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.resampling import as_weights


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
