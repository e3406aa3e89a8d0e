"""How well two raters agree: confusion matrix, kappa, balanced accuracy.

``kappa_of`` and ``balanced_accuracy_of`` take the tables of many resamples at once, as
``cluster_bootstrap`` makes them, with weighted cells or not; intervals come from there.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def confusion(
    truth: Sequence[Hashable], prediction: Sequence[Hashable], categories: Sequence[Hashable]
) -> np.ndarray:
    """``[c, c]`` how many rows have each pair of labels, truth down and prediction across.

    Args:
        truth: ``[n]`` labels.
        prediction: ``[n]`` labels.
        categories: ``[c]`` all labels there may be; gives the order.

    Raises:
        ValueError: lengths differ.
        KeyError: a label isn't a category.
    """
    position = {category: i for i, category in enumerate(categories)}
    table = np.zeros((len(position), len(position)))
    for true, predicted in zip(truth, prediction, strict=True):
        table[position[true], position[predicted]] += 1
    return table


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
