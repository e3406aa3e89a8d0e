"""Means, rates and any other statistic of rows, with intervals over sources."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from ia_mech.stats.intervals import Estimate, check_level, rate_ends, student
from ia_mech.stats.resampling import (
    CHUNK,
    as_column,
    as_weights,
    bootstrap_estimate,
    resample_counts,
    source_index,
)


def cluster_mean(
    values: ArrayLike,
    sources: Iterable[Hashable],
    *,
    proportion: bool = False,
    level: float = 0.95,
    weights: ArrayLike | None = None,
) -> Estimate:
    """Mean of values with an interval over sources.

    Which interval, by what the simulations in ``benchmarks/coverage.md`` showed:

    - A rate strictly between 0 and 1: the score interval with the effective number of rows
      (``wilson``; see ``intervals.clustered_wilson``). It holds its level at 2% as well as at 50%,
      and the percentile bootstrap doesn't.
    - A rate from one row per source: the exact binomial interval (Clopper & Pearson 1934).
    - No event at all, or nothing but events: the exact one-sided bound on sources
      (``intervals.zero_events_bound``) at ``level``, so ``[0, bound]`` or ``[1 - bound, 1]``. It
      takes each source for one observation, which holds whatever the correlation within sources; it
      assumes that a source's rate has nothing to do with its number of rows.
    - A mean of other values: Student's interval with a cluster-robust variance and as many degrees
      of freedom as that variance is worth (``student``; see ``intervals.spread_between``). Where
      values are skewed and sources few no interval keeps its level; this one misses least.

    Args:
        values: ``[n]`` numbers; NaN entries are left out.
        sources: ``[n]`` the source of each, any hashable labels.
        proportion: the mean is a rate: values lie between 0 and 1 (events, or shares of them).
        level: coverage.
        weights: ``[n]`` weights of rows, for instance inverse inclusion probabilities; the mean is
            the weighted mean, and rows of weight 0 are left out. All 1 if not given: every row
            counts alike, so a source counts by its number of rows.

    Raises:
        ValueError: lengths differ, a source is missing, the level is out of range, or a value of a
            proportion lies outside [0, 1].
    """
    check_level(level)
    index, _ = source_index(sources)
    column = as_column(values, len(index), "values")
    row_weights = as_weights(weights, len(column))
    kept = ~np.isnan(column) & (row_weights > 0)
    column, row_weights = column[kept], row_weights[kept]
    if not len(column):
        return Estimate(np.nan, np.nan, np.nan, 0, "no values")
    if proportion and ((column < 0) | (column > 1)).any():
        raise ValueError("values of a proportion must lie between 0 and 1")
    _, index = np.unique(index[kept], return_inverse=True)
    table = np.stack(
        [np.bincount(index, row_weights * column), np.bincount(index, row_weights)], axis=1
    )
    clusters, (total, weight) = len(table), table.sum(0)
    value = float(total / weight)
    if proportion:
        rows = row_weights.sum() ** 2 / (row_weights**2).sum()
        binary = bool(np.isin(column, (0, 1)).all())
        single = clusters == len(column) and bool((row_weights == row_weights[0]).all())
        low, high, name = rate_ends(table, rows, binary and single, level)
        return Estimate(value, low, high, clusters, name)
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, 1, "one source")
    return Estimate(value, *student(table, level), clusters, "student")


def cluster_statistic(
    statistic: Callable[[dict[str, np.ndarray], np.ndarray], float],
    columns: Mapping[str, ArrayLike],
    sources: Iterable[Hashable],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Any statistic of rows with a cluster-bootstrap interval over sources.

    Whole sources are drawn with replacement (Davison & Hinkley 1997, section 3.8; Cameron, Gelbach
    & Miller 2008, Rev. Econ. Stat. 90:414); a resample reaches the statistic as row multiplicities,
    so that rows are never copied. The interval is that of ``resampling.bootstrap_estimate``.

    The statistic is called once per resample. One that only depends on how often which kind of row
    occurs (:func:`cluster_counts`) takes many resamples at once, and a hundredth of the time.

    Args:
        statistic: called with the columns and ``[n]`` float multiplicities of rows, gives one
            number.
        columns: name to ``[n]`` array.
        sources: ``[n]`` the source of each row.
        level: coverage.
        resamples: bootstrap samples.
        seed: of the resampling.

    Raises:
        ValueError: columns and sources differ in length, or the level is out of range.
    """
    check_level(level)
    index, clusters = source_index(sources)
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, column in arrays.items():
        if len(column) != len(index):
            raise ValueError(f"column {name!r} has {len(column)} rows, sources {len(index)}")
    value = float(statistic(arrays, np.ones(len(index))))
    if clusters < 2:
        return _no_interval(value, clusters)
    replicates = [
        statistic(arrays, row[index])
        for counts in resample_counts(clusters, resamples, seed)
        for row in counts
    ]
    return bootstrap_estimate(value, np.array(replicates, dtype=float), clusters, level)


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
) -> list[Estimate]:
    """Statistics of counts of row patterns, with a cluster-bootstrap interval over sources.

    Many statistics don't ask which rows there are but how many of each kind: those of a confusion
    matrix ask for its cells, a median for the different values. Their counts are summed per source
    once; a resample is then a sum over the sources drawn, and the statistic sees many resamples in
    one call. Draws and intervals are those of :func:`cluster_statistic`.

    Args:
        statistic: called with ``[k, patterns]`` float sums of weights, one row per resample (k
            varies from call to call), gives ``[k]`` numbers, or ``[k, m]`` for m statistics; NaN
            where it isn't defined. ``kappa_of`` and ``balanced_accuracy_of`` do so.
        pattern: ``[n]`` the number of each row's pattern, from 0.
        sources: ``[n]`` the source of each row.
        weights: ``[n]`` weights of rows, for instance inverse inclusion probabilities; 1 where none
            are given.
        patterns: how many there are; one more than the largest number, if not given.
        level: coverage.
        resamples: bootstrap samples.
        seed: of the resampling.

    Returns:
        ``m`` estimates; one where the statistic gives ``[k]``.

    Raises:
        ValueError: lengths differ, a pattern isn't a number from 0 to ``patterns - 1``, a source is
            missing, or the level is out of range.
    """
    check_level(level)
    index, clusters = source_index(sources)
    codes = _pattern_numbers(pattern, len(index))
    needed = int(codes.max(initial=-1)) + 1
    width = needed if patterns is None else patterns
    if needed > width:
        raise ValueError(f"pattern holds {needed - 1}, but there are {width} patterns from 0")
    # Most sources show few of the patterns; the zeros needn't be stored.
    rows = (as_weights(weights, len(index)), (index, codes))
    table = csr_array(rows, shape=(max(clusters, 1), max(width, 1)))[:clusters, :width]

    def evaluated(sums: np.ndarray) -> np.ndarray:
        return np.asarray(statistic(sums), dtype=float).reshape(len(sums), -1)

    total = np.asarray(table.sum(axis=0), dtype=float).reshape(width)
    drawn = _resampled(table, resamples, seed)
    return _bootstrapped(evaluated, total, drawn, clusters, level)


def _bootstrapped(
    statistics: Callable[[np.ndarray], np.ndarray],
    total: np.ndarray,
    drawn: Iterable[np.ndarray],
    clusters: int,
    level: float,
) -> list[Estimate]:
    """Estimates of functions of sums over sources.

    Args:
        statistics: ``[k, columns]`` sums to ``[k, m]`` values.
        total: ``[columns]`` sums over all sources.
        drawn: ``[k, columns]`` sums over the sources of resamples, in blocks.
        clusters: how many sources there are.
        level: coverage.
    """
    values = statistics(total[None])[0]
    if clusters < 2:
        return [_no_interval(float(value), clusters) for value in values]
    replicates = np.concatenate([statistics(sums) for sums in drawn])
    return [
        bootstrap_estimate(float(value), column, clusters, level)
        for value, column in zip(values, replicates.T, strict=True)
    ]


def _no_interval(value: float, clusters: int) -> Estimate:
    """What can be said of at most one source."""
    return Estimate(value, np.nan, np.nan, clusters, "one source" if clusters else "no values")


def _pattern_numbers(pattern: ArrayLike, rows: int) -> np.ndarray:
    """``[rows]`` integers from 0, or ValueError."""
    codes = np.asarray(pattern)
    if codes.shape != (rows,):
        raise ValueError(f"pattern must have {rows} entries, one per row, not shape {codes.shape}")
    if rows and (codes.dtype.kind not in "iu" or codes.min() < 0):
        raise ValueError("pattern must hold integers from 0")
    return codes.astype(np.intp)


def _resampled(table: csr_array, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """``[k, patterns]`` sums over the sources drawn, in blocks of bounded memory."""
    size = max(1, CHUNK // max(table.shape[1], 1))
    across = table.T.tocsr()
    for counts in resample_counts(table.shape[0], resamples, seed):
        for start in range(0, len(counts), size):
            yield (across @ counts[start : start + size].T).T
