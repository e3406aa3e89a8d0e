"""Means of values that involve two sources each, with intervals over sources."""

from collections.abc import Hashable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from ia_mech.stats.intervals import Estimate, combined, degrees_of_freedom, unseen
from ia_mech.stats.resampling import as_column, source_index

EXACT = "exact, one-sided"


def dyadic_mean(
    values: ArrayLike,
    first: Iterable[Hashable],
    second: Iterable[Hashable],
    *,
    ends: tuple[float, float] = (-1.0, 1.0),
    level: float = 0.95,
) -> Estimate:
    """Mean of values each of which involves two sources, with an interval over sources.

    Values that share a source may depend on each other; others don't. The interval is Student's
    with the dyadic-robust variance (Aronow, Samii & Assenova 2015, Political Analysis 23:564): the
    sum of products of residuals over all pairs of values that share a source, over n squared.

    - Residuals are smaller than errors: if ``m`` of the n^2 pairs share a source (each value with
      itself included), the sum is too small by the factor ``1 - m / n^2`` and is divided by it.
    - Where values that share a source depend on each other negatively, the estimate may be far too
      small or below 0. It is kept at least as large as if only values that share both sources
      depended on each other; the interval is then conservative.
    - The degrees of freedom are those of ``intervals.spread_between``, of residuals per source.

    If all values are alike, or the residuals of every source add up to 0, the interval is that of
    ``intervals.unseen``, for as many observations as there are first or second sources, whichever
    are fewer. There is none if nearly all pairs of values share a source.

    Args:
        values: ``[n]`` numbers; NaN entries are left out.
        first, second: ``[n]`` the two sources of each value, which may be one.
        ends: the least and the largest that a value can be; the interval stays between them.
        level: coverage.

    Raises:
        ValueError: lengths differ, a source is missing, or a value isn't between the ends.
    """
    one, other = list(first), list(second)
    index, _ = source_index(one + other)
    column = as_column(values, len(one), "values")
    if len(other) != len(one):
        raise ValueError(f"{len(one)} first sources but {len(other)} second ones")
    kept = ~np.isnan(column)
    column = column[kept]
    if not len(column):
        return Estimate(np.nan, np.nan, np.nan, 0, "no values")
    if ((column < ends[0]) | (column > ends[1])).any():
        raise ValueError(f"values must lie between {ends[0]:g} and {ends[1]:g}")
    pairs = np.stack([index[: len(one)][kept], index[len(one) :][kept]], axis=1)
    independent = _independent(pairs)
    pairs = np.unique(np.sort(pairs, axis=1), return_inverse=True)[1].reshape(-1, 2)
    sources, value = int(pairs.max()) + 1, float(column.mean())
    squares, shared, same = _products(column - value, pairs)
    _, *counts = _products(np.ones(len(column)), pairs)
    pairs_shared, pairs_same = (count / len(column) ** 2 for count in counts)
    if np.ptp(column) and pairs_shared > 1 - 1e-9:
        return Estimate(value, np.nan, np.nan, sources, "too few queries")
    if squares.max() <= 1e-20:
        least = unseen(value, independent, level, ends)
        return Estimate(value, *least, sources, EXACT)
    variance = max(shared / (1 - pairs_shared), same / (1 - pairs_same)) / len(column) ** 2
    half = float(stdtrit(degrees_of_freedom(squares), (1 + level) / 2) * np.sqrt(variance))
    low, high = max(value - half, ends[0]), min(value + half, ends[1])
    return Estimate(value, low, high, sources, "dyadic-robust student")


def dyadic_difference(
    values: ArrayLike,
    others: ArrayLike,
    first: Iterable[Hashable],
    second: Iterable[Hashable],
    *,
    times: float = 1.0,
    level: float = 0.95,
) -> Estimate:
    """Mean of values minus ``times`` that of others: two rates over the same pairs of sources.

    :func:`dyadic_mean` of the differences; rows in which either is NaN are left out. A rate of 0 or
    1 adds no spread to the differences but isn't certain, so what ``intervals.unseen`` allows it is
    added (``intervals.combined``).
    """
    one, other = list(first), list(second)
    rates = np.stack([as_column(x, len(one), "values") for x in (values, others)])
    difference = rates[0] - times * rates[1]
    ends = (-times, 1.0)
    found = dyadic_mean(difference, one, other, ends=ends, level=level)
    if np.isnan(found.low):
        return found
    kept = ~np.isnan(difference)
    independent = _independent(source_index(one + other)[0].reshape(2, -1).T[kept])
    means = rates[:, kept].mean(axis=1).tolist()
    parts, factors = [(found.value, found.low, found.high)], [1.0]
    if set(means) <= {0.0, 1.0}:  # the differences add nothing to these two
        parts = [(found.value,) * 3]
    for rate, factor in zip(means, (1, -times), strict=True):
        if rate in (0, 1):
            least, most = unseen(rate, independent, level)
            parts.append((0.0, least - rate, most - rate))
            factors.append(factor)
    _, low, high = combined(parts, factors)
    return replace(found, low=max(low, ends[0]), high=min(high, ends[1]))


def _products(values: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, float, float]:
    """From ``[n]`` values and ``[n, 2]`` pairs of sources (sorted in each row): squared sums of
    values per source; sums of products over pairs of values that share a source, and over those
    that share both."""
    sources = int(pairs.max()) + 1
    two = pairs[:, 0] != pairs[:, 1]
    squares = (
        np.bincount(pairs[:, 0], values, sources) + np.bincount(pairs[two, 1], values[two], sources)
    ) ** 2
    which, at = np.unique(pairs, axis=0, return_inverse=True)
    alike = np.bincount(at.reshape(-1), values) ** 2
    # Values that share two different sources are together in the sums of both.
    twice = alike[which[:, 0] != which[:, 1]].sum()
    return squares, float(squares.sum() - twice), float(alike.sum())


def _independent(pairs: np.ndarray) -> int:
    """How many of ``[n, 2]`` pairs of sources count as independent: as many as there are sources on
    the side with fewer, as if all pairs of a source on that side were one."""
    return min(len(np.unique(side)) for side in pairs.T)
