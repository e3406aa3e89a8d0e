"""How much of a difference between two conditions comes from their mix: fewer values of a kind."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from ia_mech.stats.intervals import Estimate, check_level, degrees_of_freedom
from ia_mech.stats.resampling import as_column, source_index


class Decomposition(NamedTuple):
    """A difference of means, and the two parts that add up to it."""

    difference: Estimate
    mix: Estimate  # because the kind's share differs
    rest: Estimate  # because values of the kind, or the others, differ
    p: float  # two-sided, of a difference of 0; NaN without an interval
    p_rest: float  # two-sided, of a rest of 0


def decomposed_difference(
    values: ArrayLike,
    kind: ArrayLike,
    treated: ArrayLike,
    sources: Iterable[Hashable],
    *,
    level: float = 0.95,
) -> Decomposition:
    """The mean of treated values minus that of the others, as a sum of two parts (Kitagawa 1955,
    JASA 50:1168): from the shares of a kind, at each kind's mean over both conditions; and from the
    means of each kind, at its average share.

    Means are taken per source, then over the sources that have both conditions, each once. If a
    condition has no value of a kind, it is given the other condition's mean. Intervals are
    Student's with the jackknife's variance and the degrees of freedom of
    ``intervals.spread_between``. No p is below 2^(1 − n) with n sources: flipping their signs gives
    no smaller one, and with few sources the jackknife's may be far too small.

    Args:
        values: ``[n]`` numbers; NaN entries are left out.
        kind, treated: ``[n]`` whether a value is of the kind, and from the treated condition.
        sources: ``[n]`` the source of a value.
        level: coverage.

    Raises:
        ValueError: lengths differ, or a source is missing.
    """
    check_level(level)
    index, count = source_index(sources)
    column, marks, heated = (as_column(x, len(index), "values") for x in (values, kind, treated))
    kept = ~np.isnan(column)
    index, column, marks, heated = index[kept], column[kept], marks[kept], heated[kept]
    cells = np.zeros((count, 2, 4))
    terms = np.stack([column, column * marks, marks, np.ones(len(column))], axis=1)
    np.add.at(cells, (index, heated.astype(int)), terms)
    cells = cells[(cells[:, :, 3] > 0).all(axis=1)]
    n = len(cells)
    if n < 2:
        none = Estimate(np.nan, np.nan, np.nan, n, "too few queries")
        return Decomposition(none, none, none, np.nan, np.nan)
    means = cells[:, :, :3] / cells[:, :, 3:]
    whole = _parts(means.mean(axis=0))
    without = np.array([_parts(one) for one in (means.sum(axis=0) - means) / (n - 1)])
    squares = (without - whole) ** 2
    errors = np.sqrt((n - 1) / n * squares.sum(axis=0))
    freedom = np.array([degrees_of_freedom(one) for one in squares.T])
    certain = errors < 1e-14  # sources that are all alike: an interval would claim certainty
    reach = np.where(certain, np.nan, stdtrit(freedom, (1 + level) / 2) * errors)
    difference, mix, rest = (
        Estimate(value, value - half, value + half, n, "jackknife over sources")
        for value, half in zip(whole.tolist(), reach.tolist(), strict=True)
    )
    p = 2 * stdtr(freedom, -abs(whole) / np.where(certain, 1, errors))
    p = np.where(certain, np.nan, p.clip(2.0 ** (1 - n))).tolist()
    return Decomposition(difference, mix, rest, p[0], p[2])


def _parts(means: np.ndarray) -> np.ndarray:
    """``[3]`` difference, mix and rest, from ``[2, 3]``: for each condition the mean of all values,
    the mean with values of the other kind set to 0, and the kind's share."""
    whole, of_kind, share = means.T
    shares = np.array([share, 1 - share])
    levels = np.full((2, 2), np.nan)
    np.divide([of_kind, whole - of_kind], shares, out=levels, where=shares > 1e-12)
    levels = np.where(np.isnan(levels), levels[:, ::-1], levels)  # the other condition's
    mix = float((np.diff(shares)[:, 0] * np.nan_to_num(levels).mean(axis=1)).sum())
    difference = float(whole[1] - whole[0])
    return np.array([difference, mix, difference - mix])
