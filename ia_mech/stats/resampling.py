"""Draw whole sources, and read an interval off the draws.

A resample is a vector of counts, how often each source was drawn; a statistic that is a function of
sums over sources needs one matrix product for many resamples.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.intervals import Estimate

CHUNK = 1 << 18  # counts per chunk: 2 MB, whatever the number of resamples


def source_index(sources: Iterable[Hashable]) -> tuple[np.ndarray, int]:
    """``[n]`` numbers of sources from 0, and how many there are.

    The order decides which draws of a generator fall to which source. It is sorted where labels can
    be sorted (tuples and mixed kinds are fine), so a result doesn't depend on the order of rows.

    Raises:
        ValueError: a source is None or NaN.
    """
    if isinstance(sources, np.ndarray) and sources.ndim != 1:
        raise ValueError(f"sources must have one dimension, not {sources.ndim}")
    labels = sources.tolist() if hasattr(sources, "tolist") else list(sources)
    unique = list(dict.fromkeys(labels))
    if any(label is None or label != label for label in unique):
        raise ValueError("a source is missing (None or NaN)")
    with suppress(TypeError):  # kinds that don't compare keep the order in which they came
        unique.sort()
    number = {label: i for i, label in enumerate(unique)}
    index = np.fromiter((number[label] for label in labels), dtype=np.intp, count=len(labels))
    return index, len(unique)


def as_column(values: ArrayLike, rows: int, name: str) -> np.ndarray:
    """``[rows]`` floats, or ValueError naming the argument."""
    column = np.asarray(values, dtype=float)
    if column.shape != (rows,):
        raise ValueError(f"{name} must have {rows} entries, one per row, not shape {column.shape}")
    return column


def as_weights(weights: ArrayLike | None, rows: int) -> np.ndarray:
    """``[rows]`` weights, 1 where none are given; ValueError if one is negative or not finite."""
    if weights is None:
        return np.ones(rows)
    column = as_column(weights, rows, "weights")
    if not (np.isfinite(column).all() and (column >= 0).all()):
        raise ValueError("weights must be finite and not negative")
    return column


def resample_counts(sources: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Bootstrap draws of sources: ``[chunk, sources]`` float counts, every row of which sums to
    ``sources``, in chunks of bounded memory that don't change what is drawn."""
    rng = np.random.default_rng(seed)
    chunk = max(1, CHUNK // sources)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        draws = rng.integers(sources, size=(rows, sources))
        draws += np.arange(rows)[:, None] * sources
        counts = np.bincount(draws.ravel(), minlength=rows * sources)
        yield counts.reshape(rows, sources).astype(float)


def resample_sums(table: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """``[resamples, columns]`` sums over drawn sources of a ``[sources, columns]`` table."""
    return np.concatenate([c @ table for c in resample_counts(len(table), resamples, seed)])


def widened_level(level: float, sources: int) -> float:
    """The level to ask of a bootstrap so that few sources don't make it too sure.

    A bootstrap of n sources has a spread too small by ``sqrt((n - 1) / n)`` and normal tails where
    Student's belong; this undoes both for a mean ("expanded percentile interval", Hesterberg 2015,
    Amer. Statist. 69:371).
    """
    from scipy.stats import norm, t  # which takes a second to load

    quantile = t.ppf((1 + level) / 2, sources - 1) * np.sqrt(sources / (sources - 1))
    return float(1 - 2 * norm.sf(min(quantile, 8.0)))  # two sources ask for all replicates


def bootstrap_estimate(
    value: float, replicates: np.ndarray, sources: int, level: float
) -> Estimate:
    """The percentile interval (Efron 1979) of replicates, or why there is none.

    There is none if the statistic is NaN, on the data or on more than a tenth of the resamples
    (fewer are left out), and none if no resample differs by more than rounding: an interval of no
    width would claim a certainty that a handful of sources can't give. The level is
    :func:`widened_level` for the number of sources, which is at least 2.
    """
    defined = replicates[~np.isnan(replicates)]
    reason = ""
    if np.isnan(value):
        reason = "undefined"
    elif len(defined) < 0.9 * len(replicates):
        reason = "undefined in more than a tenth of resamples"
    elif np.ptp(defined) <= 1e-12 * np.abs(defined).max():
        reason = "no resample differs"
    if reason:
        return Estimate(value, np.nan, np.nan, sources, reason)
    wide = widened_level(level, sources)
    low, high = np.quantile(defined, [(1 - wide) / 2, (1 + wide) / 2])
    return Estimate(value, float(low), float(high), sources, "percentile")
