"""How well two raters agree: kappa, and balanced accuracy."""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.clusters import weighted_share
from ia_mech.stats.intervals import Estimate, combined
from ia_mech.stats.resampling import as_weights, source_index


def kappa_of(table: ArrayLike) -> np.ndarray:
    """Cohen's kappa, agreement of two raters beyond chance, of ``[..., c, c]`` confusion matrices.

    It is ``(observed - expected) / (1 - expected)``, where the expected agreement follows from both
    raters' own shares of labels (Cohen 1960, Educational and Psychological Measurement 20:37). It
    is symmetric in the raters, and NaN without rows or if both raters use only one and the same
    label.
    """
    table = np.asarray(table, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = table.sum((-2, -1), keepdims=True)
        shares = table / total
        expected = (shares.sum(-2) * shares.sum(-1)).sum(-1)
        kappa = (np.trace(shares, axis1=-2, axis2=-1) - expected) / (1 - expected)
    return np.where((total[..., 0, 0] > 0) & (expected < 1), kappa, np.nan)[()]


def balanced_accuracy(
    truth: ArrayLike,
    prediction: ArrayLike,
    sources: Iterable[Hashable],
    weights: ArrayLike | None = None,
    *,
    level: float = 0.95,
) -> Estimate:
    """The mean recall of two labels (Brodersen et al. 2010, ICPR), with an interval over sources.

    Each recall has its own interval (``weighted_share``), which allows for errors of kinds that
    were not seen; ``intervals.combined`` puts the two together with the correlation of their
    residuals per source. ``truth`` and ``prediction`` are ``[n]`` booleans, ``weights`` inverse
    inclusion probabilities. NaN unless the truth has both labels.
    """
    true, right = (np.asarray(x, dtype=bool) for x in (truth, prediction))
    right = true == right
    index, count = source_index(sources)
    row_weights = as_weights(weights, len(true))
    parts, residuals = [], []
    for label in (true, ~true):
        if not label.any():
            return Estimate(np.nan, np.nan, np.nan, count, "one label only")
        one = weighted_share(right, label, index, row_weights, level=level)
        parts.append((one.value, one.low, one.high))
        residuals.append(np.bincount(index, row_weights * label * (right - one.value)))
    lengths = np.linalg.norm(residuals, axis=1).prod()
    correlation = float(residuals[0] @ residuals[1] / lengths) if lengths > 0 else 0.0
    value, low, high = combined(parts, (0.5, 0.5), correlation)
    if np.isnan(low):
        return Estimate(value, np.nan, np.nan, count, "one query")
    return Estimate(value, max(low, 0.0), min(high, 1.0), count, "mover")
