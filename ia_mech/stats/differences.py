"""Differences between two conditions on the same sources, or between two groups of rows."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.clusters import cluster_mean
from ia_mech.stats.intervals import Estimate, combined, hull, rate_interval, student, unseen
from ia_mech.stats.resampling import as_column, source_index
from ia_mech.stats.significance import sign_flip_p, source_permutation_p

P_RANGE = (1e-12, 0.99)  # p values that are found by inverting an interval; above, p is 1


@dataclass(frozen=True)
class Difference:
    """A difference between two conditions or groups.

    Attributes:
        difference: first minus second, with its interval.
        p: two-sided p value of no difference; NaN where nothing can be tested.
        test: how p was found: ``sign flip``; ``mover and sign flip`` or ``student and sign flip``,
            the larger of that interval's p and sign flips'; ``permutation of queries``. Empty
            without p.
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


def _conditions(
    a: ArrayLike, sources_a: list[Hashable], b: ArrayLike, sources_b: list[Hashable]
) -> list[_Condition]:
    """Both conditions on the sources that have values in both."""
    index, count = source_index(sources_a + sources_b)
    found = []
    for name, values, where in (
        ("values_a", a, index[: len(sources_a)]),
        ("values_b", b, index[len(sources_a) :]),
    ):
        column = as_column(values, len(where), name)
        where, column = where[~np.isnan(column)], column[~np.isnan(column)]
        rows = np.bincount(where, minlength=count)
        sums = np.bincount(where, column, minlength=count)
        found.append((sums, rows, bool(np.isin(column, (0, 1)).all())))
    both = (found[0][1] > 0) & (found[1][1] > 0)
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
) -> Difference:
    """Mean of the first condition minus mean of the second, paired by source.

    Only sources with values in both conditions count (NaN is no value); each gives the difference
    of its two means, and all weigh the same. Two rates (all values are 0 or 1) have MOVER's
    interval with the correlation between the conditions, at least as wide as Student's of the
    differences and as ``intervals.unseen``; other means have Student's.

    p comes from sign flips (:func:`sign_flip_p`, at most ``permutations``) where every source has
    as many rows in one condition as in the other. If not (one greedy row against eight samples),
    flips reject up to twice as often as they should, and p is the larger of theirs and the
    interval's (one minus the level at which the interval begins to leave out 0). All is NaN without
    a common source; with one there is no interval.
    """
    a, b = _conditions(values_a, list(sources_a), values_b, list(sources_b))
    differences, n = a.means - b.means, len(a.means)
    if n == 0:
        return Difference(Estimate(np.nan, np.nan, np.nan, 0, "no common query"), np.nan)
    found = _interval(a, b, level)
    p, test = sign_flip_p(differences, permutations, seed), "sign flip"
    # If all differences are the same, only flips give a p.
    if (a.rows != b.rows).any() and n > 1 and np.ptp(differences) > 0:
        p, test = max(p, _inverted(a, b)), f"{found.method} and {test}"
    return Difference(found, p, test)


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
    """The mean difference with Student's interval, for rates the hull of that and MOVER's."""
    differences, n, rates = a.means - b.means, len(a.means), a.binary and b.binary
    value = float(differences.mean())
    ends = unseen(value, n, level, (-1.0, 1.0))
    if rates and not differences.any():
        return Estimate(value, *ends, n, "exact, one-sided")
    if n == 1:
        return Estimate(value, np.nan, np.nan, 1, "one query")
    plain = student(np.stack([differences, np.ones(n)], axis=1), level)
    if not rates:
        return plain
    parts = a.interval(level), b.interval(level)
    together = combined(parts, (1, -1), _correlation(a.means, b.means))[1:]
    low, high = hull(together, ends, *([] if np.isnan(plain.low) else [(plain.low, plain.high)]))
    return Estimate(value, max(low, -1.0), min(high, 1.0), n, "mover")


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; 0 if either has no spread."""
    spread = float(a.std() * b.std())
    together = float(((a - a.mean()) * (b - b.mean())).mean())
    return together / spread if spread > 0 else 0.0


def group_difference(
    values: ArrayLike,
    labels: ArrayLike,
    sources: Iterable[Hashable],
    *,
    level: float = 0.95,
    permutations: int = 2000,
    seed: int = 0,
) -> Difference:
    """Rate of the rows with label 1 minus rate of those with label 0.

    The interval is MOVER's without correlation: a source with rows in both groups counts in both as
    if it were two, which is on the safe side if its rows are alike. The p value says how often the
    difference is as large when labels change places between sources
    (``significance.source_permutation_p``). The two may disagree at the margin.

    ``values`` are ``[n]`` events (0 or 1) or shares of them; NaN is left out.

    Raises:
        ValueError: lengths differ, or a value lies outside [0, 1].
    """
    events, groups = np.asarray(values, dtype=float), np.asarray(labels)
    names = np.array([*sources, None], dtype=object)[:-1]  # keeps tuples whole
    kept = ~np.isnan(events)
    events, groups, names = events[kept], groups[kept], names[kept]
    first, second = (
        cluster_mean(events[groups == label], names[groups == label], proportion=True, level=level)
        for label in (1, 0)
    )
    count = len(set(names))
    if not (first.sources and second.sources):
        nothing = Estimate(np.nan, np.nan, np.nan, count, "one group is empty")
        return Difference(nothing, np.nan)

    def size(permuted: np.ndarray) -> float:
        one = permuted == 1
        return float(abs(events[one].mean() - events[~one].mean()))

    p = source_permutation_p(size, groups, names, permutations=permutations, seed=seed)
    parts = [(one.value, one.low, one.high) for one in (first, second)]
    value, low, high = combined(parts, (1, -1))
    estimate = Estimate(value, low, high, count, "mover").clip(-1, 1)
    if count == 1 or np.isnan(low):
        estimate = Estimate(value, np.nan, np.nan, count, "one query")
    return Difference(estimate, p, "" if np.isnan(p) else "permutation of queries")
