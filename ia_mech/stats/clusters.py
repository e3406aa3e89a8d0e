"""Means, rates and any other statistic of rows, with intervals over sources.

Statistics of how often which kind of row occurs, on all resamples at once.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import csr_array

from ia_mech.stats.intervals import (
    Estimate,
    check_level,
    clustered_wilson,
    korn_graubard,
    rate_ends,
    student,
)
from ia_mech.stats.resampling import (
    CHUNK,
    as_column,
    as_weights,
    bootstrap_estimate,
    resample_counts,
    resample_sums,
    source_index,
)

MEAN_METHODS = ("auto", "student", "percentile", "bca", "wilson", "korn-graubard")
STATISTIC_METHODS = ("auto", "percentile", "bca")


def check_method(method: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless the method is one of those."""
    if method not in known:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(known)}")


def cluster_mean(
    values: ArrayLike,
    sources: Iterable[Hashable],
    *,
    proportion: bool = False,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "auto",
    weights: ArrayLike | None = None,
) -> Estimate:
    """Mean of values with an interval over sources.

    What ``method="auto"`` gives, by what the simulations in ``benchmarks/coverage.md`` showed:

    - A rate strictly between 0 and 1: the score interval with the effective number of rows
      (``wilson``; see ``intervals.clustered_wilson``). It costs no resampling, holds its level at
      2% as well as at 50%, and the percentile bootstrap doesn't.
    - A rate from one row per source: the exact binomial interval (Clopper & Pearson 1934).
    - No event at all, or nothing but events: the exact one-sided bound on sources
      (:func:`zero_events_bound`) at ``level``, so ``[0, bound]`` or ``[1 - bound, 1]``. It takes
      each source for one observation, which holds whatever the correlation within sources; it
      assumes that a source's rate has nothing to do with its number of rows. This comes before any
      ``method``: no bootstrap can say anything there.
    - A mean of other values: Student's interval with a cluster-robust variance and as many degrees
      of freedom as that variance is worth (``student``; see ``intervals.spread_between``). Where
      values are skewed and sources few no interval keeps its level; this one misses least.

    Args:
        values: ``[n]`` numbers; NaN entries are left out.
        sources: ``[n]`` the source of each, any hashable labels.
        proportion: the mean is a rate: values lie between 0 and 1 (events, or shares of them).
        level: coverage.
        resamples: bootstrap samples, where the method is a bootstrap.
        seed: of the resampling.
        method: ``auto``, ``student``, ``percentile`` or ``bca`` (both draw whole sources with
            replacement, "pairs cluster bootstrap", Cameron, Gelbach & Miller 2008, Rev. Econ. Stat.
            90:414; without an interval where no resample differs), or, for proportions, ``wilson``
            or ``korn-graubard``.
        weights: ``[n]`` weights of rows, for instance inverse inclusion probabilities; the mean is
            the weighted mean, and rows of weight 0 are left out. All 1 if not given: every row
            counts alike, so a source counts by its number of rows.

    Raises:
        ValueError: lengths differ, a source is missing, an option is unknown, or a value of a
            proportion lies outside [0, 1].
    """
    check_level(level)
    check_method(method, MEAN_METHODS)
    if method in ("wilson", "korn-graubard") and not proportion:
        raise ValueError(f"method {method!r} is for proportions")
    index, _ = source_index(sources)
    values = as_column(values, len(index), "values")
    row_weights = as_weights(weights, len(values))
    kept = ~np.isnan(values) & (row_weights > 0)
    values, row_weights = values[kept], row_weights[kept]
    if not len(values):
        return Estimate(np.nan, np.nan, np.nan, 0, "no values")
    if proportion and ((values < 0) | (values > 1)).any():
        raise ValueError("values of a proportion must lie between 0 and 1")
    _, index = np.unique(index[kept], return_inverse=True)
    table = np.stack(
        [np.bincount(index, row_weights * values), np.bincount(index, row_weights)], axis=1
    )
    clusters, (total, weight) = len(table), table.sum(0)
    value = float(total / weight)
    all_alike = bool((values == values[0]).all())
    if proportion and (method == "auto" or (all_alike and values[0] in (0, 1))):
        rows = row_weights.sum() ** 2 / (row_weights**2).sum()
        binary = bool(np.isin(values, (0, 1)).all())
        single = clusters == len(values) and bool((row_weights == row_weights[0]).all())
        low, high, name = rate_ends(table, rows, binary and single, level)
        return Estimate(value, low, high, clusters, name)
    if clusters == 1:
        return Estimate(value, np.nan, np.nan, 1, "one source")
    if method in ("wilson", "korn-graubard"):
        rows = row_weights.sum() ** 2 / (row_weights**2).sum()
        formula = clustered_wilson if method == "wilson" else korn_graubard
        return Estimate(value, *formula(table, rows, level), clusters, method)
    if method in ("auto", "student"):
        return Estimate(value, *student(table, level), clusters, "student")
    sums = resample_sums(table, resamples, seed)
    replicates = sums[:, 0] / sums[:, 1]
    jackknife = (total - table[:, 0]) / (weight - table[:, 1])
    return bootstrap_estimate(value, replicates, jackknife, clusters, level, method)


def cluster_statistic(
    statistic: Callable[[dict[str, np.ndarray], np.ndarray], float | np.ndarray],
    columns: Mapping[str, ArrayLike],
    sources: Iterable[Hashable],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "auto",
) -> Estimate | list[Estimate]:
    """Any statistic of rows with a cluster-bootstrap interval over sources.

    Whole sources are drawn with replacement (Davison & Hinkley 1997, section 3.8; Cameron, Gelbach
    & Miller 2008, Rev. Econ. Stat. 90:414); a resample reaches the statistic as row multiplicities,
    so that rows are never copied. A resample on which the statistic is NaN (no row of a category
    was drawn, say) is left out; if more than a tenth are NaN there is no interval, nor if no
    resample differs, as with perfect agreement.

    The statistic is called once per resample. One that only depends on how often which kind of row
    occurs (:func:`cluster_counts`) takes many resamples at once, and a hundredth of the time.

    Args:
        statistic: called with the columns and ``[n]`` float multiplicities of rows, gives one
            number or ``[k]`` of them.
        columns: name to ``[n]`` array.
        sources: ``[n]`` the source of each row.
        level: coverage.
        resamples: bootstrap samples.
        seed: of the resampling.
        method: ``auto`` is the percentile interval at a level widened for the number of sources
            (``resampling.widened``); ``percentile`` and ``bca`` (one more call per source) are at
            exactly ``level``.

    Returns:
        An estimate, or a list of k where the statistic gives an array.

    Raises:
        ValueError: columns and sources differ in length, or an option is unknown.
    """
    check_level(level)
    check_method(method, STATISTIC_METHODS)
    index, clusters = source_index(sources)
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, column in arrays.items():
        if len(column) != len(index):
            raise ValueError(f"column {name!r} has {len(column)} rows, sources {len(index)}")
    value = np.asarray(statistic(arrays, np.ones(len(index))), dtype=float)
    many, values = value.ndim > 0, np.atleast_1d(value)
    if clusters < 2:
        reason = "one source" if clusters else "no values"
        estimates = [Estimate(float(v), np.nan, np.nan, clusters, reason) for v in values]
        return estimates if many else estimates[0]
    replicates = np.array(
        [
            np.atleast_1d(statistic(arrays, row[index]))
            for counts in resample_counts(clusters, resamples, seed)
            for row in counts
        ],
        dtype=float,
    )
    jackknife = np.empty((0, len(values)))
    if method == "bca":
        left_out = (np.where(index == i, 0.0, 1.0) for i in range(clusters))
        jackknife = np.array([np.atleast_1d(statistic(arrays, w)) for w in left_out], dtype=float)
    estimates = [
        bootstrap_estimate(float(v), replicates[:, j], jackknife[:, j], clusters, level, method)
        for j, v in enumerate(values)
    ]
    return estimates if many else estimates[0]


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
