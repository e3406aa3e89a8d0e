"""Which of several models may be the best: a confidence set."""

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.resampling import resample_sums

ROUNDING = 1e-12  # relative; losses that differ by less are the same


def model_confidence_set(
    losses: ArrayLike, *, resamples: int = 2000, seed: int = 0, stretch: float = 1.0
) -> np.ndarray:
    """The model confidence set of Hansen, Lunde & Nason (2011, Econometrica 79:453), statistic
    T_max.

    While the remaining models can be told apart, the one whose loss exceeds their mean by most
    standard errors leaves. The set {p > α} holds the model of the smallest expected loss with a
    probability of 1 − α at least, in large samples.

    ``losses`` are ``[models, sources]``; ``stretch`` is a factor on the spread of the resampled
    means, for losses that vary by more than the choice of sources (see
    :meth:`ia_mech.stats.ResampledScore.with_training`). Returns ``[models]`` p values; the largest
    is 1.

    Raises:
        ValueError: losses aren't finite, there is no model, or there are fewer than two sources.
    """
    table = np.asarray(losses, dtype=float)
    if table.ndim != 2 or not table.size or table.shape[1] < 2 or not np.isfinite(table).all():
        raise ValueError("losses must be finite, [models, sources], of two sources or more")
    models, sources = table.shape
    mean = table.mean(axis=1)
    spread = stretch * (resample_sums(table.T, resamples, seed) / sources - mean)
    least = ROUNDING * np.abs(table).max()
    left, p, largest = np.arange(models), np.ones(models), 0.0
    while len(left) > 1:
        excess = mean[left] - mean[left].mean()
        deviations = spread[:, left] - spread[:, left].mean(axis=1, keepdims=True)
        error = np.sqrt((deviations**2).mean(axis=0))
        differs = error > least
        scale = np.where(differs, error, np.inf)
        statistic = excess / scale
        worst = statistic.argmax()
        reached = ((deviations / scale).max(axis=1) >= statistic[worst]).sum()
        # A set is left out no sooner than the sets that hold it.
        largest = max(largest, (1 + reached) / (1 + resamples))
        p[left[worst]] = largest
        left = np.delete(left, worst)
    return p
