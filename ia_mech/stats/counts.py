"""Statistics of how often which kind of row occurs, on all resamples at once."""

from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from ia_mech.stats.clusters import STATISTIC_METHODS, check_method
from ia_mech.stats.intervals import Estimate, check_level
from ia_mech.stats.resampling import (
    CHUNK,
    as_weights,
    bootstrap_estimate,
    resample_counts,
    source_index,
)


def cluster_counts(
    statistic: Callable[[np.ndarray], np.ndarray],
    pattern: ArrayLike,
    sources: Iterable[Hashable],
    *,
    weights: ArrayLike | None = None,
    patterns: int | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "auto",
) -> Estimate | list[Estimate]:
    """A statistic of counts of row patterns, with a cluster-bootstrap interval over sources.

    Many statistics don't ask which rows there are but how many of each kind: those of a confusion
    matrix ask for its cells, Krippendorff's alpha for the different rows of ratings. Their counts
    are summed per source once; a resample is then a sum over the sources drawn, and the statistic
    sees many resamples in one call. Draws, left-out resamples and intervals are those of
    :func:`cluster_statistic`, and so is the result.

    Args:
        statistic: called with ``[k, patterns]`` float sums of weights, one row per resample (k
            varies from call to call), gives ``[k]`` numbers, or ``[k, m]`` for m statistics; NaN
            where it isn't defined. ``kappa_of``, ``balanced_accuracy_of`` and ``alpha_of`` do so.
        pattern: ``[n]`` the number of each row's pattern, from 0.
        sources: ``[n]`` the source of each row.
        weights: ``[n]`` weights of rows, for instance inverse inclusion probabilities; 1 where none
            are given.
        patterns: how many there are; one more than the largest number, if not given.
        level: coverage.
        resamples: bootstrap samples.
        seed: of the resampling.
        method: ``auto``, ``percentile`` or ``bca``, as there.

    Returns:
        An estimate, or a list of m where the statistic gives ``[k, m]``.

    Raises:
        ValueError: lengths differ, a pattern isn't a number from 0 to ``patterns - 1``, a source is
            missing, or an option is unknown.
    """
    check_level(level)
    check_method(method, STATISTIC_METHODS)
    index, clusters = source_index(sources)
    codes = _pattern_numbers(pattern, len(index))
    needed = int(codes.max(initial=-1)) + 1
    width = needed if patterns is None else patterns
    if needed > width:
        raise ValueError(f"pattern holds {needed - 1}, but there are {width} patterns from 0")
    # Most sources show few of the patterns; the zeros needn't be stored.
    rows = (as_weights(weights, len(index)), (index, codes))
    table = csr_array(rows, shape=(max(clusters, 1), max(width, 1)))[:clusters, :width]
    total = np.asarray(table.sum(axis=0), dtype=float).reshape(1, width)
    value = np.asarray(statistic(total), dtype=float)
    many, values = value.ndim > 1, value.reshape(-1)
    if clusters < 2:
        reason = "one source" if clusters else "no values"
        estimates = [Estimate(float(v), np.nan, np.nan, clusters, reason) for v in values]
        return estimates if many else estimates[0]

    def evaluated(sums: Iterable[np.ndarray]) -> np.ndarray:
        parts = [np.asarray(statistic(block), dtype=float) for block in sums]
        return np.concatenate([part.reshape(len(part), -1) for part in parts])

    replicates = evaluated(_resampled(table, resamples, seed))
    jackknife = np.empty((0, len(values)))
    if method == "bca":
        jackknife = evaluated(total - part.toarray() for part in _blocks(table))
    estimates = [
        bootstrap_estimate(float(v), replicates[:, j], jackknife[:, j], clusters, level, method)
        for j, v in enumerate(values)
    ]
    return estimates if many else estimates[0]


def _pattern_numbers(pattern: ArrayLike, rows: int) -> np.ndarray:
    """``[rows]`` integers from 0, or ValueError."""
    codes = np.asarray(pattern)
    if codes.shape != (rows,):
        raise ValueError(f"pattern must have {rows} entries, one per row, not shape {codes.shape}")
    if rows and (codes.dtype.kind not in "iu" or codes.min() < 0):
        raise ValueError("pattern must hold integers from 0")
    return codes.astype(np.intp)


def _blocks(table: np.ndarray | csr_array) -> Iterator[np.ndarray | csr_array]:
    """Rows in blocks small enough to be dense."""
    size = max(1, CHUNK // max(table.shape[1], 1))
    for start in range(0, table.shape[0], size):
        yield table[start : start + size]


def _resampled(table: csr_array, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """``[k, patterns]`` sums over the sources drawn, in blocks of bounded memory."""
    size = max(1, CHUNK // max(table.shape[1], 1))
    across = table.T.tocsr()
    for counts in resample_counts(table.shape[0], resamples, seed):
        for start in range(0, len(counts), size):
            yield (across @ counts[start : start + size].T).T
