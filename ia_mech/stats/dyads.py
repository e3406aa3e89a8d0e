"""Means of values that involve several sources each, with intervals over sources."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from ia_mech.stats.differences import Difference
from ia_mech.stats.intervals import Estimate, combined, degrees_of_freedom, hull, unseen
from ia_mech.stats.resampling import as_column, source_index

EXACT, STUDENT = "exact, one-sided", "dyadic-robust student"


def dyadic_mean(values: ArrayLike, *sources: Iterable[Hashable], **options: Any) -> Estimate:
    """The mean of :func:`dyadic_test`, which says what it takes."""
    return dyadic_test(values, *sources, **options).difference


def dyadic_rate(values: ArrayLike, *sources: Iterable[Hashable], level: float = 0.95) -> Estimate:
    """:func:`dyadic_mean` of events, 0 or 1, with an interval that is no narrower than
    ``intervals.unseen``: one event among few sources has little spread, but doesn't bound a rate
    more tightly than none."""
    found = dyadic_mean(values, *sources, ends=(0.0, 1.0), level=level)
    if np.isnan(found.low):
        return found
    index = _numbered(sources)
    independent = _independent(index[~np.isnan(as_column(values, len(index), "values"))])
    low, high = hull((found.low, found.high), unseen(found.value, independent, level))
    return replace(found, low=low, high=high)


def dyadic_test(
    values: ArrayLike,
    *sources: Iterable[Hashable],
    ends: tuple[float, float] = (-1.0, 1.0),
    level: float = 0.95,
) -> Difference:
    """Mean of values each of which involves several sources, with an interval over sources, and
    the p value of a mean of 0 by the same variance.

    Values that share a source may depend on each other; others don't. The interval is Student's
    with the dyadic-robust variance (Aronow, Samii & Assenova 2015, Political Analysis 23:564): the
    sum of products of residuals over all pairs of values that share a source, over n squared.

    - Residuals are smaller than errors: if ``m`` of the n^2 pairs share a source (each value with
      itself included), the sum is too small by the factor ``1 - m / n^2`` and is divided by it.
    - Where values that share a source depend on each other negatively, the estimate may be far too
      small or below 0. It is kept at least as large as if only values that share all sources
      depended on each other; the interval is then conservative.
    - No p is below 2^(1 − n) with n sources: flipping signs gives no smaller one.
    - The degrees of freedom are those of ``intervals.spread_between``, of residuals per source.

    If all values are alike, or the residuals of every source add up to 0, the interval is that of
    ``intervals.unseen``, for as many observations as there are first or second … sources,
    whichever are fewest. There is none if nearly all pairs of values share a source.

    Args:
        values: ``[n]`` numbers; NaN entries are left out.
        sources: ``[n]`` each value's first source, its second, …; some may be the same.
        ends: the least and the largest that a value can be; the interval stays between them.
        level: coverage.

    Raises:
        ValueError: lengths differ, a source is missing, or a value isn't between the ends.
    """
    index = _numbered(sources)
    column = as_column(values, len(index), "values")
    kept = ~np.isnan(column)
    column, index = column[kept], index[kept]
    if not len(column):
        return Difference(Estimate(np.nan, np.nan, np.nan, 0, "no values"), np.nan)
    if ((column < ends[0]) | (column > ends[1])).any():
        raise ValueError(f"values must lie between {ends[0]:g} and {ends[1]:g}")
    independent = _independent(index)
    sets = np.unique(np.sort(index, axis=1), return_inverse=True)[1].reshape(index.shape)
    count, value = int(sets.max()) + 1, float(column.mean())
    squares, shared, same = _products(column - value, sets)
    _, *counts = _products(np.ones(len(column)), sets)
    all_shared, all_same = (number / len(column) ** 2 for number in counts)
    if np.ptp(column) and all_shared > 1 - 1e-9:
        return Difference(Estimate(value, np.nan, np.nan, count, "too few queries"), np.nan)
    if squares.max() <= 1e-20:
        found = Estimate(value, *unseen(value, independent, level, ends), count, EXACT)
        end = ends[0] if value > 0 else ends[1]
        return Difference(found, float((end / (end - value)) ** independent), EXACT)
    variance = max(shared / (1 - all_shared), same / (1 - all_same)) / len(column) ** 2
    error, freedom = float(np.sqrt(variance)), degrees_of_freedom(squares)
    half = float(stdtrit(freedom, (1 + level) / 2)) * error
    low, high = max(value - half, ends[0]), min(value + half, ends[1])
    p = max(float(2 * stdtr(freedom, -abs(value) / error)), 2.0 ** (1 - count))
    return Difference(Estimate(value, low, high, count, STUDENT), p, STUDENT)


def dyadic_difference(
    values: ArrayLike,
    others: ArrayLike,
    *sources: Iterable[Hashable],
    times: float = 1.0,
    level: float = 0.95,
) -> Estimate:
    """Mean of values minus ``times`` that of others: two rates over the same sources.

    :func:`dyadic_mean` of the differences; rows in which either is NaN are left out. A rate near 0
    or 1 adds little spread to the differences, or none, but isn't certain: by how much its interval
    is narrower than ``intervals.unseen`` allows is added (``intervals.combined``). So one event
    more in ``others`` doesn't make a difference surer.
    """
    index = _numbered(sources)
    rates = np.stack([as_column(x, len(index), "values") for x in (values, others)])
    difference = rates[0] - times * rates[1]
    ends = (-times, 1.0)
    found = dyadic_mean(difference, *index.T, ends=ends, level=level)
    if np.isnan(found.low):
        return found
    kept = ~np.isnan(difference)
    independent = _independent(index[kept])
    parts = [(found.value, found.low, found.high)]
    if set(rates[:, kept].mean(axis=1).tolist()) <= {0.0, 1.0}:  # the differences add nothing
        parts = [(found.value,) * 3]
    for column in rates[:, kept]:
        own = dyadic_mean(column, *index[kept].T, ends=(0.0, 1.0), level=level)
        ends_seen = (own.value,) * 2 if np.ptp(column) == 0 else (own.low, own.high)
        away = np.subtract(unseen(own.value, independent, level), own.value) ** 2
        least, most = np.sqrt(np.maximum(away - np.subtract(ends_seen, own.value) ** 2, 0))
        parts.append((0.0, -least, most))
    _, low, high = combined(parts, (1.0, 1.0, -times))
    return replace(found, low=max(low, ends[0]), high=min(high, ends[1]))


def _numbered(sources: Sequence[Iterable[Hashable]]) -> np.ndarray:
    """``[n, m]`` numbers of m lists of sources; ValueError if their lengths differ."""
    names = [name for row in zip(*sources, strict=True) for name in row]
    return source_index(names)[0].reshape(-1, len(sources))


def _products(values: np.ndarray, sets: np.ndarray) -> tuple[np.ndarray, float, float]:
    """From ``[n]`` values and ``[n, m]`` sources (sorted in each row): squared sums of values per
    source; sums of products over pairs of values that share a source, and over those that share
    all."""
    sets = sets.copy()
    sets[:, 1:][sets[:, 1:] == sets[:, :-1]] = -1  # a source counts once in a value
    sets.sort(axis=1)
    squared = []
    for size in range(1, sets.shape[1] + 1):
        keys = np.concatenate([sets[:, at] for at in combinations(range(sets.shape[1]), size)])
        there = keys.min(axis=1) >= 0
        _, at = np.unique(keys[there], axis=0, return_inverse=True)
        again = np.resize(values, len(keys))[there]
        squared.append(np.bincount(at.reshape(-1), again) ** 2)
    # Values that share several sources are in the sums of each: inclusion and exclusion.
    shared = sum((-1) ** number * one.sum() for number, one in enumerate(squared))
    _, at = np.unique(sets, axis=0, return_inverse=True)
    return squared[0], float(shared), float((np.bincount(at.reshape(-1), values) ** 2).sum())


def _independent(index: np.ndarray) -> int:
    """How many of ``[n, m]`` lists of sources count as independent: as many as there are sources on
    the side with fewest, as if all values of a source on that side were one."""
    return min(len(np.unique(side)) for side in index.T)
