"""Differences: two conditions on the same sources, two groups of rows."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.clusters import cluster_mean
from ia_mech.stats.intervals import (
    Estimate,
    combined,
    hull,
    rate_interval,
    student,
    unseen,
)
from ia_mech.stats.resampling import as_column, source_index
from ia_mech.stats.significance import sign_flip_p, source_permutation_p

P_RANGE = (1e-12, 0.99)  # where an interval is inverted for its p value; above it p is 1


@dataclass(frozen=True)
class PairedDifference:
    """A difference between two conditions.

    Attributes:
        difference: first minus second, with its interval.
        p: two-sided p value of no difference; NaN without a common source.
        test: how p was found: ``sign flip``, or the larger of it and an interval's: ``mover and
            sign flip``, ``student and sign flip``.
    """

    difference: Estimate
    p: float
    test: str = ""


@dataclass(frozen=True)
class _Condition:
    """One condition on the common sources: ``[n]`` means, ``[n]`` how many values stand behind
    each, and whether all values (of any source) are 0 or 1."""

    means: np.ndarray
    rows: np.ndarray
    binary: bool

    def interval(self, level: float) -> tuple[float, float, float]:
        """The rate and its interval, every source weighing the same."""
        table = np.stack([self.means, np.ones(len(self.means))], axis=1)
        single = self.binary and bool((self.rows == 1).all())
        ends = rate_interval(table, self.rows.sum(), level, independent=single)
        return float(self.means.mean()), *ends[:2]


def _conditions(*given: tuple[ArrayLike, Iterable[Hashable]]) -> list[_Condition]:
    """Each condition's values and sources, on the sources that have values in all."""
    labels = [list(sources) for _, sources in given]
    index, count = source_index([label for own in labels for label in own])
    found = []
    for number, (values, own) in enumerate(
        zip((values for values, _ in given), labels, strict=True)
    ):
        column = as_column(values, len(own), f"values_{'ab'[number]}")
        kept, start = ~np.isnan(column), sum(map(len, labels[:number]))
        where = index[start : start + len(own)][kept]
        rows = np.bincount(where, minlength=count)
        sums = np.bincount(where, column[kept], minlength=count)
        found.append((sums, rows, bool(np.isin(column[kept], (0, 1)).all())))
    both = np.all([rows > 0 for _, rows, _ in found], axis=0)
    return [_Condition(sums[both] / rows[both], rows[both], binary) for sums, rows, binary in found]


def paired_difference(
    values_a: ArrayLike,
    sources_a: Iterable[Hashable],
    values_b: ArrayLike,
    sources_b: Iterable[Hashable],
    *,
    level: float = 0.95,
    permutations: int = 10_000,
    seed: int = 0,
) -> PairedDifference:
    """Mean of the first condition minus mean of the second, the source being the pair.

    Only sources with values in both conditions count (NaN is none); each gives one difference, of
    its own means, and all weigh the same. Two rates (all values are 0 or 1) have MOVER's interval
    with the correlation between the conditions, no less than Student's of the differences or than
    ``intervals.unseen``; other means have Student's.

    p is the sign flips' (:func:`sign_flip_p`, of ``permutations`` at most) where every source has
    as many rows in one condition as in the other. If not (one greedy row against eight samples),
    flips reject up to twice as often as they should, and p is the larger of theirs and of the
    interval's, which leaves out 0 from that level on. ``docs/statistics.md`` has the reasons.
    All is NaN without a common source; with one there is no interval.
    """
    a, b = _conditions((values_a, sources_a), (values_b, sources_b))
    differences, n = a.means - b.means, len(a.means)
    if n == 0:
        return PairedDifference(Estimate(np.nan, np.nan, np.nan, 0, "no common source"), np.nan)
    found = _interval(a, b, level)
    p, test = sign_flip_p(differences, permutations, seed), "sign flip"
    # Without spread only flips say anything.
    if (a.rows != b.rows).any() and n > 1 and np.ptp(differences) > 0:
        p, test = max(p, _inverted(a, b)), f"{found.method} and {test}"
    return PairedDifference(found, p, test)


def _inverted(a: _Condition, b: _Condition) -> float:
    """One minus the level at which the interval of the difference begins to leave out 0."""
    difference = float((a.means - b.means).mean())
    if abs(difference) < 1e-12:
        return 1.0

    def inner_end(exponent: float) -> float:
        """How far the interval at level ``1 - 10 ** exponent`` stays clear of 0, if it does."""
        found = _interval(a, b, 1 - 10**exponent)
        return found.low if difference > 0 else -found.high

    smallest, largest = np.log10(P_RANGE)
    if inner_end(smallest) > 0:
        return P_RANGE[0]
    if inner_end(largest) <= 0:
        return 1.0
    from scipy.optimize import brentq  # which takes half a second to load

    return float(10 ** brentq(inner_end, smallest, largest, xtol=1e-6))


def _interval(a: _Condition, b: _Condition, level: float) -> Estimate:
    """The mean of the differences: Student's, for rates MOVER's hull with it."""
    differences, n, rates = a.means - b.means, len(a.means), a.binary and b.binary
    value = float(differences.mean())
    ends = unseen(value, n, level, (-1.0, 1.0))
    if rates and not differences.any():
        return Estimate(value, *ends, n, "exact, one-sided")
    if n == 1:
        return Estimate(value, np.nan, np.nan, 1, "one source")
    plain = student(np.stack([differences, np.ones(n)], axis=1), level)
    if not rates:
        return plain
    parts = a.interval(level), b.interval(level)
    together = combined(parts, (1, -1), _correlation(a.means, b.means))[1:]
    low, high = hull(together, ends, *([] if np.isnan(plain.low) else [(plain.low, plain.high)]))
    return Estimate(value, max(low, -1.0), min(high, 1.0), n, "mover")


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; 0 where one of both has no spread."""
    spread = float(a.std() * b.std())
    together = float(((a - a.mean()) * (b - b.mean())).mean())
    return together / spread if spread > 0 else 0.0


@dataclass(frozen=True)
class GroupDifference:
    """A difference between two groups of sources.

    Attributes:
        first, second: the rates of the rows with label 1, and with label 0.
        difference: first minus second, with its interval.
        p: two-sided p value of no association; NaN where a group is empty, or no source can change
            places with another.
        test: how p was found; empty without one.
    """

    first: Estimate
    second: Estimate
    difference: Estimate
    p: float
    test: str


def group_difference(
    values: ArrayLike,
    labels: ArrayLike,
    sources: Iterable[Hashable],
    *,
    level: float = 0.95,
    permutations: int = 2000,
    seed: int = 0,
) -> GroupDifference:
    """Rate of the rows with label 1 minus rate of those with label 0.

    The interval is MOVER's without correlation: a source with rows in both groups counts in both as
    if it were two, which is on the safe side if its rows are alike. The p value is of the
    difference's size when labels change places between sources
    (``significance.source_permutation_p``). The two may disagree at the margin.

    Args:
        values: ``[n]`` events (0 or 1) or shares of them; NaN is left out.
        labels: ``[n]`` 1 or 0.
        sources: ``[n]`` the source of each row.
        level: coverage.
        permutations, seed: of the labels.

    Raises:
        ValueError: lengths differ, or a value lies outside [0, 1].
    """
    events, groups = np.asarray(values, dtype=float), np.asarray(labels)
    names = np.array([*sources, None], dtype=object)[:-1]  # tuples stay what they are
    kept = ~np.isnan(events)
    events, groups, names = events[kept], groups[kept], names[kept]
    first, second = (
        cluster_mean(events[groups == label], names[groups == label], proportion=True, level=level)
        for label in (1, 0)
    )
    count = len(set(names))
    if not (first.sources and second.sources):
        nothing = Estimate(np.nan, np.nan, np.nan, count, "one group is empty")
        return GroupDifference(first, second, nothing, np.nan, "")

    def size(permuted: np.ndarray) -> float:
        one = permuted == 1
        return float(abs(events[one].mean() - events[~one].mean()))

    p = source_permutation_p(size, groups, names, permutations=permutations, seed=seed)
    parts = [(one.value, one.low, one.high) for one in (first, second)]
    difference, low, high = combined(parts, (1, -1))
    if count == 1:
        low, high = np.nan, np.nan
    low, high = np.clip([low, high], -1, 1).tolist()
    method = "one source" if np.isnan(low) else "mover"
    estimate = Estimate(difference, low, high, count, method)
    test = "" if np.isnan(p) else "permutation of sources"
    return GroupDifference(first, second, estimate, p, test)
