"""Means, rates and any other statistic of rows, with intervals over sources."""

from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from ia_mech.stats.intervals import Estimate, combined, hull, rate_interval, student
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

    A rate has :func:`ia_mech.stats.intervals.rate_interval`; with weights, the rows of each weight
    are a stratum (:func:`weighted_share`). Other means have ``intervals.student``.

    Args:
        values: ``[n]`` numbers; NaN entries are left out.
        sources: ``[n]`` the source of each, any hashable labels.
        proportion: the mean is a rate or a mass: values lie between 0 and 1. If they are 0 or 1,
            each is an event; shares of events vary less, and their variance alone counts. Sources
            unlike those seen may have any such value.
        level: coverage.
        weights: ``[n]``, for instance inverse inclusion probabilities; rows of weight 0 are left
            out. None: a source counts by its number of rows.

    Raises:
        ValueError: lengths differ, a source is missing, or a value of a proportion lies outside
            [0, 1].
    """
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
    if clusters == 1 and not (proportion and value in (0, 1)):
        return Estimate(value, np.nan, np.nan, 1, "one query")
    if not proportion:
        return student(table, level)
    if weights is not None:
        every = np.ones(len(column), dtype=bool)
        return weighted_share(column, every, index, row_weights, level=level)
    rows = len(column) if np.isin(column, (0, 1)).all() else np.inf
    low, high, name = rate_interval(table, rows, level, independent=clusters == rows)
    return Estimate(value, low, high, clusters, name)


def weighted_share(
    events: ArrayLike,
    among: ArrayLike,
    sources: Iterable[Hashable],
    weights: ArrayLike,
    *,
    level: float = 0.95,
) -> Estimate:
    """Weighted share of events among some rows of a stratified sample, such as a recall.

    Rows of one weight are a stratum, which has its own rate interval. A share r lies in the
    interval if 0 lies in the interval of a sum: over strata, weight times mean of ``event - r``,
    where rows that don't count add 0. So a stratum of large weight in which no row counts widens
    the interval, since it may hold rows that do. Other sources would fill the strata differently:
    where all rows count, the interval is no narrower than the one from the variance between
    sources. NaN where no row counts.

    ``events`` are ``[n]``, from 0 to 1; ``among`` says which rows count; ``weights`` are above 0,
    the inverse inclusion probabilities.
    """
    index, _ = source_index(sources)
    counts = np.asarray(among, dtype=bool)
    hits = np.where(counts, np.asarray(events, dtype=float), 0.0)
    row_weights = as_weights(weights, len(index))
    clusters = len(np.unique(index[counts]))
    if not clusters:
        return Estimate(np.nan, np.nan, np.nan, 0, "no values")
    # weights that differ only by rounding are the same
    labels = np.array([float(f"{weight:.9g}") for weight in row_weights])
    strata, totals = [], []
    for weight in np.unique(labels):
        rows = labels == weight
        _, own = np.unique(index[rows], return_inverse=True)
        columns = hits[rows], counts[rows].astype(float), None
        strata.append(np.stack([np.bincount(own, column) for column in columns], axis=1))
        totals.append(weight * rows.sum())
    if len(strata) == 1:
        return cluster_mean(hits[counts], index[counts], proportion=True, level=level)
    share = np.array(totals) / sum(totals)
    hit, counted = np.array([table[:, :2].sum(0) / table[:, 2].sum() for table in strata]).T
    value = float(share @ hit / (share @ counted))
    all_count = bool(counts.all())

    def ends(r: float) -> tuple[float, float]:
        """Ends of the interval of the mean event, if rows that don't count have the value r."""
        parts = []
        for table in strata:
            rows = table[:, 2]
            sums = np.stack([table[:, 0] + r * (rows - table[:, 1]), rows], axis=1)
            low, high, _ = rate_interval(sums, rows.sum() if all_count else np.inf, level)
            parts.append((float(sums[:, 0].sum() / rows.sum()), low, high))
        return combined(parts, share.tolist())[1:]

    if all_count:
        sums = np.bincount(index, row_weights * hits), np.bincount(index, row_weights)
        low, high = hull(ends(value), rate_interval(np.stack(sums, axis=1), np.inf, level)[:2])
    else:
        low = _root(lambda r: ends(r)[0] - r, 0.0, value)
        high = _root(lambda r: ends(r)[1] - r, 1.0, value)
    return Estimate(value, max(low, 0.0), min(high, 1.0), clusters, "stratified")


def _root(away: Callable[[float], float], end: float, value: float) -> float:
    """Where a function of a share changes sign between an end and the estimate; if nowhere, the
    end."""
    outer, inner = away(end), away(value)
    if outer * inner >= 0:
        return end
    from scipy.optimize import brentq  # which takes half a second to load

    return float(brentq(away, end, value, xtol=1e-6))


def cluster_bootstrap(
    statistic: Callable[[np.ndarray], ArrayLike],
    sources: Iterable[Hashable],
    kinds: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    number: int | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Estimate]:
    """Statistics of rows with a cluster-bootstrap interval over sources (Davison & Hinkley 1997,
    section 3.8), as ``resampling.bootstrap_estimate`` makes it.

    The statistic sees a resample as counts: how often each row was drawn, or, if it only asks how
    many rows there are of each kind (the cells of a confusion matrix), how many of each kind.
    Counts of kinds are summed per source once.

    Args:
        statistic: called with ``[k, rows]`` multiplicities, or ``[k, kinds]`` sums of weights, one
            line per resample (k varies from call to call), gives ``[k]`` numbers, or ``[k, m]`` for
            m statistics, each with its own estimate; NaN where it isn't defined.
        sources, weights: ``[n]`` each row's.
        kinds: ``[n]`` the number of each row's kind, from 0; without it each row is a kind.
        number: how many kinds there are, if not one more than the largest number.
    """
    index, clusters = source_index(sources)
    codes = np.arange(len(index)) if kinds is None else np.asarray(kinds, dtype=np.intp)
    width = int(codes.max(initial=-1)) + 1 if number is None else number
    # Most sources have few of the kinds; the zeros needn't be stored.
    rows = (as_weights(weights, len(index)), (index, codes))
    table = csr_array(rows, shape=(max(clusters, 1), max(width, 1)))[:clusters, :width]

    def values_of(sums: np.ndarray) -> np.ndarray:
        return np.asarray(statistic(sums), dtype=float).reshape(len(sums), -1)

    values = values_of(np.asarray(table.sum(axis=0), dtype=float).reshape(1, width))[0]
    if clusters < 2:
        reason = "one query" if clusters else "no values"
        return [Estimate(float(value), np.nan, np.nan, clusters, reason) for value in values]
    replicates = np.concatenate([values_of(sums) for sums in _resampled(table, resamples, seed)])
    return [
        bootstrap_estimate(float(value), column, clusters, level)
        for value, column in zip(values, replicates.T, strict=True)
    ]


def _resampled(table: csr_array, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """``[k, kinds]`` sums over the sources drawn, in blocks of bounded memory."""
    size = max(1, CHUNK // max(table.shape[1], 1))
    across = table.T.tocsr()
    for counts in resample_counts(table.shape[0], resamples, seed):
        for start in range(0, len(counts), size):
            yield (across @ counts[start : start + size].T).T
