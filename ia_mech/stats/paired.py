"""Two conditions on the same sources: their difference, its interval and its test.

AUROC of rows that have a score and a label each, by which pairs of rows are compared.

What a paired design could have found.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import stdtr, stdtrit

from ia_mech.stats.clusters import check_method, cluster_statistic
from ia_mech.stats.intervals import (
    Estimate,
    check_level,
    rate_ends,
    spread_between,
    student,
    wilson,
    zero_events_bound,
)
from ia_mech.stats.resampling import (
    CHUNK,
    as_column,
    bootstrap_estimate,
    resample_sums,
    source_index,
)


def auroc_between(
    values: ArrayLike, labels: ArrayLike, sources: Iterable[Hashable], **options
) -> Estimate:
    """Chance that a positive row of one source scores above a negative row of another one.

    Ties count half. A resample in which a source was drawn twice doesn't compare it with itself
    either, since a source is no other source for having been drawn again.

    Args:
        values: ``[n]`` scores.
        labels: ``[n]`` 1 for positive rows, 0 for negative ones.
        sources: ``[n]`` the source of each row.
        options: ``level``, ``resamples``, ``seed``, ``method`` of ``cluster_statistic``.

    Returns:
        NaN without an interval if no pair can be compared.
    """
    values, labels = np.asarray(values, dtype=float), np.asarray(labels)
    of, count = source_index(sources)
    below, behind = values[labels == 0], of[labels == 0]
    won = np.zeros((count, count))
    pairs = np.zeros_like(won)
    for source in np.unique(of[labels == 1]):
        own = values[(labels == 1) & (of == source), None]
        beaten = ((own > below) + (own == below) / 2).sum(0)
        won[source] = np.bincount(behind, beaten, minlength=count)
        pairs[source] = len(own) * np.bincount(behind, minlength=count)
    np.fill_diagonal(won, 0.0)
    np.fill_diagonal(pairs, 0.0)

    def share(_: dict, counts: np.ndarray) -> float:
        compared = counts @ pairs @ counts
        return float(counts @ won @ counts / compared) if compared else np.nan

    return cluster_statistic(share, {}, range(count), **options)


def auroc_within(
    values: ArrayLike,
    labels: ArrayLike,
    sources: Iterable[Hashable],
    groups: ArrayLike,
    **options,
) -> tuple[Estimate, int]:
    """Chance that a positive row scores above a negative one of its own group; each pair alike.

    Args:
        values: ``[n]`` scores.
        labels: ``[n]`` 1 for positive rows, 0 for negative ones.
        sources: ``[n]`` the source of each row.
        groups: ``[n]`` a number each: the group of each row, within one source.
        options: as of :func:`auroc_between`.

    Returns:
        The estimate, over sources that have a pair, and of how many rows it is.
    """
    values, labels, groups = np.asarray(values, dtype=float), np.asarray(labels), np.asarray(groups)
    sources = np.asarray(list(sources), dtype=object)
    both = np.intersect1d(groups[labels == 1], groups[labels == 0])
    won, pairs, names = [], [], []
    for group in both:
        here = groups == group
        own, other = values[here & (labels == 1), None], values[here & (labels == 0)]
        won.append(((own > other) + (own == other) / 2).sum())
        pairs.append(own.size * other.size)
        names.append(sources[here][0])

    def share(columns: dict[str, np.ndarray], counts: np.ndarray) -> float:
        compared = counts @ columns["pairs"]
        return float(counts @ columns["won"] / compared) if compared else np.nan

    columns = {"won": np.array(won), "pairs": np.array(pairs)}
    return cluster_statistic(share, columns, names, **options), int(np.isin(groups, both).sum())


PAIRED_METHODS = ("auto", "mover", "student", "percentile", "bca")
P_RANGE = (1e-12, 0.99)  # where an interval is inverted for its p value; above it p is 1


@dataclass(frozen=True)
class Paired:
    """A difference between two conditions.

    Attributes:
        difference: first minus second, with its interval.
        p: two-sided p value of no difference; NaN without a common source.
        sources: how many sources are in both conditions.
        test: how p was found: ``sign flip``, or the larger of it and an interval's: ``mover and
            sign flip``, ``student and sign flip``.
    """

    difference: Estimate
    p: float
    sources: int
    test: str = ""


@dataclass(frozen=True)
class Condition:
    """One condition on the common sources.

    Attributes:
        means: ``[n]`` of each source.
        rows: ``[n]`` how many values stand behind each of them.
        binary: all values (of any source) are 0 or 1.
        within: all values lie in [0, 1].
    """

    means: np.ndarray
    rows: np.ndarray
    binary: bool
    within: bool

    @property
    def single(self) -> bool:
        """Each source has one value, an event or none: they are independent trials."""
        return self.binary and bool((self.rows == 1).all())

    @property
    def table(self) -> np.ndarray:
        """``[n, 2]`` sums of values and of weights, every source weighing the same."""
        return np.stack([self.means, np.ones(len(self.means))], axis=1)


def conditions(
    values_a: ArrayLike,
    sources_a: Iterable[Hashable],
    values_b: ArrayLike,
    sources_b: Iterable[Hashable],
) -> tuple[Condition, Condition]:
    """Both conditions on the sources that have values in both."""
    labels_a, labels_b = list(sources_a), list(sources_b)
    index, count = source_index(labels_a + labels_b)
    a = as_column(values_a, len(labels_a), "values_a")
    b = as_column(values_b, len(labels_b), "values_b")
    sums, rows = np.zeros((2, count)), np.zeros((2, count), dtype=int)
    for i, (values, where) in enumerate(((a, index[: len(a)]), (b, index[len(a) :]))):
        kept = ~np.isnan(values)
        rows[i] = np.bincount(where[kept], minlength=count)
        sums[i] = np.bincount(where[kept], values[kept], minlength=count)
    both = (rows > 0).all(0)
    first, second = (
        Condition(
            means=sums[i, both] / rows[i, both],
            rows=rows[i, both],
            binary=bool((np.isnan(values) | (values == 0) | (values == 1)).all()),
            within=bool((np.isnan(values) | ((values >= 0) & (values <= 1))).all()),
        )
        for i, values in enumerate((a, b))
    )
    return first, second


def paired_difference(
    values_a: ArrayLike,
    sources_a: Iterable[Hashable],
    values_b: ArrayLike,
    sources_b: Iterable[Hashable],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    permutations: int = 10_000,
    seed: int = 0,
    proportion: bool | None = None,
    method: str = "auto",
) -> Paired:
    """Mean of the first condition minus mean of the second, the source being the pair.

    Only sources with values in both conditions count. Each gives one difference, of its own means,
    and all weigh the same however many rows they have: that is what makes the pair exchangeable.
    Where every source has equally many rows per condition (one greedy row against eight samples,
    say) this is the difference of the two means over rows.

    The interval, for ``method="auto"``:

    - Between two rates: MOVER, the distances of both rates' own intervals put together with the
      correlation between the conditions over sources (Newcombe 1998, Statist. Med. 17:2635; Zou &
      Donner 2008, ibid. 27:1693). It holds its level near zero, where 95% intervals from a
      bootstrap of differences hold a true 2% against 0 in 85 to 90% (``benchmarks/coverage.md``).
      If no source differs: the one-sided exact bound on sources to either side, since a difference
      of rates is no larger than the share of sources that differ.
    - Between other means: Student's interval of the differences, as in :func:`cluster_mean`.

    The p value, by what the conditions allow (``Paired.test`` names it):

    - If every source has as many rows in one condition as in the other, the conditions are
      exchangeable under no difference, and flipping the signs of whole sources is an exact test
      (:func:`sign_flip_p`).
    - If not (one greedy row against eight samples), a single row is 0 or 1 and a mean of eight is
      not: differences are skewed, and flipping signs rejects up to twice as often as it should at
      the 5% level, more at smaller ones. Where the interval begins to leave out 0 (MOVER's for
      rates, else Student's) is right at 5%, but small p values of it are too small where sources
      are fewer than 24. p is the larger of the two, so it rejects only where both do.

    A sign-flip test and an interval are made separately and may disagree at the margin.

    Args:
        values_a: ``[n]`` values of the first condition; NaN entries are left out.
        sources_a: ``[n]`` their sources.
        values_b: ``[m]`` values of the second condition.
        sources_b: ``[m]`` their sources.
        level: coverage.
        resamples: bootstrap samples, where the method is a bootstrap.
        permutations: sign flips to visit at most; with few sources all of them are visited.
        seed: of resampling and flips.
        proportion: the means are rates; if not given they are if all values are 0 or 1.
        method: of the interval: ``auto``, ``mover``, ``student``, ``percentile`` or ``bca``
            (both without an interval where no resample differs).

    Returns:
        All NaN without a common source; with one there is no interval.

    Raises:
        ValueError: lengths differ, an option is unknown, or a value of a proportion lies outside
            [0, 1].
    """
    check_level(level)
    check_method(method, PAIRED_METHODS)
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, not {permutations}")
    a, b = conditions(values_a, sources_a, values_b, sources_b)
    proportion = are_rates(a, b, proportion)
    if method == "mover" and not proportion:
        raise ValueError("method 'mover' is for proportions")
    differences = a.means - b.means
    n = len(differences)
    if n == 0:
        return Paired(Estimate(np.nan, np.nan, np.nan, 0, "no common source"), np.nan, 0)
    balanced = bool((a.rows == b.rows).all())
    table = np.stack([differences, np.ones(n)], axis=1)
    p, test = _p_value(a, b, table, balanced, proportion, permutations, seed)
    return Paired(_interval(a, b, table, proportion, level, method, resamples, seed), p, n, test)


def _p_value(
    a: Condition,
    b: Condition,
    table: np.ndarray,
    balanced: bool,
    proportion: bool,
    permutations: int,
    seed: int,
) -> tuple[float, str]:
    """Two-sided p value and the name of the test."""
    differences, n = table[:, 0], len(table)
    flips = sign_flip_p(differences, permutations, seed)
    if balanced or n == 1 or np.ptp(differences) == 0:  # without spread only flips say anything
        return flips, "sign flip"
    spread = spread_between(table)
    if proportion:
        return max(flips, _mover_p(a, b, spread.mean)), "mover and sign flip"
    ratio = abs(spread.mean) / np.sqrt(spread.variance)
    return max(flips, float(2 * stdtr(spread.freedom, -ratio))), "student and sign flip"


def _mover_p(a: Condition, b: Condition, difference: float) -> float:
    """One minus the level at which MOVER's interval of the difference begins to leave out 0."""
    if abs(difference) < 1e-12:
        return 1.0

    def inner_end(exponent: float) -> float:
        """How far the interval at level ``1 - 10 ** exponent`` stays clear of 0, if it does."""
        low, high = _mover(a, b, 1 - 10**exponent)
        return low if difference > 0 else -high

    smallest, largest = np.log10(P_RANGE)
    if inner_end(smallest) > 0:
        return P_RANGE[0]
    if inner_end(largest) <= 0:
        return 1.0
    return float(10 ** brentq(inner_end, smallest, largest, xtol=1e-6))


def _interval(
    a: Condition,
    b: Condition,
    table: np.ndarray,
    proportion: bool,
    level: float,
    method: str,
    resamples: int,
    seed: int,
) -> Estimate:
    """The interval of the mean of the differences, by the method asked for."""
    differences, n = table[:, 0], len(table)
    value = float(differences.mean())
    if proportion and not differences.any():
        bound = zero_events_bound(n, level)
        return Estimate(0.0, -bound, bound, n, "exact, one-sided")
    if n == 1:
        return Estimate(value, np.nan, np.nan, 1, "one source")
    if method == "mover" or (method == "auto" and proportion):
        return Estimate(value, *_mover(a, b, level), n, "mover")
    if method in ("auto", "student"):
        return Estimate(value, *student(table, level), n, "student")
    replicates = resample_sums(differences[:, None], resamples, seed)[:, 0] / n
    jackknife = (differences.sum() - differences) / (n - 1)
    return bootstrap_estimate(value, replicates, jackknife, n, level, method)


def are_rates(a: Condition, b: Condition, proportion: bool | None) -> bool:
    """What the caller says; if nothing, whether all values are 0 or 1."""
    if proportion and not (a.within and b.within):
        raise ValueError("values of a proportion must lie between 0 and 1")
    return (a.binary and b.binary) if proportion is None else proportion


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; 0 where one of both has no spread."""
    spread = float(a.std() * b.std())
    together = float(((a - a.mean()) * (b - b.mean())).mean())
    return together / spread if spread > 0 else 0.0


def _mover(a: Condition, b: Condition, level: float) -> tuple[float, float]:
    """Ends of the interval of a difference of rates from both rates' intervals."""
    distances, r = [], correlation(a.means, b.means)
    for condition in (a, b):
        rate, rows = float(condition.means.mean()), int(condition.rows.sum())
        low, high, _ = rate_ends(condition.table, rows, condition.single, level)
        distances.append((rate - low, high - rate))
    (low_a, high_a), (low_b, high_b) = distances
    difference = float(a.means.mean() - b.means.mean())
    down = low_a**2 - 2 * r * low_a * high_b + high_b**2
    up = high_a**2 - 2 * r * high_a * low_b + low_b**2
    low, high = difference - np.sqrt(max(down, 0)), difference + np.sqrt(max(up, 0))
    return float(max(low, -1)), float(min(high, 1))


def sign_flip_p(differences: np.ndarray, permutations: int, seed: int) -> float:
    """Two-sided p value of a mean difference of zero by flipping signs (Fisher 1935, section 21).

    If conditions are exchangeable within a source, each difference is as likely with the other
    sign. Sources without a difference change nothing and are left out; with k others there are
    2^k equally likely sums, all of which are visited where that is no more than ``permutations``
    (then p is exact), else so many random ones and the observed one (then p is never 0).

    Args:
        differences: ``[sources]``, each weighing the same.
        permutations: how many sums to visit at most.
        seed: of the random signs.
    """
    moved = differences[differences != 0]
    k = len(moved)
    if k == 0:
        return 1.0
    # Sums that are equal in exact arithmetic may differ in the last bits; they count as reached.
    threshold = abs(moved.sum()) - 1e-10 * np.abs(moved).sum()
    if k < 63 and 2**k <= permutations:
        sums = np.zeros(1)
        for difference in moved:
            sums = np.concatenate([sums + difference, sums - difference])
        return float((np.abs(sums) >= threshold).mean())
    rng, reached, chunk = np.random.default_rng(seed), 0, max(1, CHUNK // k)
    for start in range(0, permutations, chunk):
        flipped = rng.integers(2, size=(min(chunk, permutations - start), k), dtype=np.int8)
        sums = moved.sum() - 2 * (flipped.astype(float) @ moved)
        reached += int((np.abs(sums) >= threshold).sum())
    return (1 + reached) / (1 + permutations)


def detectable_difference(
    values_a: ArrayLike,
    sources_a: Iterable[Hashable],
    values_b: ArrayLike,
    sources_b: Iterable[Hashable],
    *,
    power: float = 0.8,
    level: float = 0.95,
    proportion: bool | None = None,
) -> float:
    """Smallest true paired difference that this design would have found with this power.

    It speaks of the design (number of sources, how far their values spread and go together), not of
    the difference that was observed; "observed power" would only repeat the p value (Hoenig &
    Heisey 2001, Amer. Statist. 55:19).

    - Between two rates: how far the first rate would have to lie from the second, towards one half,
      for the interval of :func:`paired_difference` to leave out 0 with this power. The first
      condition's spread is taken as it would be at that rate, with the design effect observed; a
      rate without events has none, and its sources then count as one observation each.
    - Between other means: ``(t(level) + t(power)) * standard error`` of the per-source differences
      (Bloom 1995, Evaluation Review 19:547, "minimum detectable effect").

    Simulated power is near what is asked for where the conditions have different numbers of rows,
    and higher at low rates where they have the same (``benchmarks/coverage.md``).

    Args:
        values_a: ``[n]`` values of the first condition; NaN entries are left out.
        sources_a: ``[n]`` their sources.
        values_b: ``[m]`` values of the second condition, the one compared with.
        sources_b: ``[m]`` their sources.
        power: chance of finding it.
        level: 1 minus the two-sided level of the test.
        proportion: the means are rates; if not given they are if all values are 0 or 1.

    Returns:
        A positive number, at most 1 for rates; NaN with fewer than two common sources, if no
        difference is large enough, or, for other means, if all differences are alike.

    Raises:
        ValueError: lengths differ, power or level lie outside (0, 1), or a value of a proportion
            lies outside [0, 1].
    """
    check_level(level)
    if not 0 < power < 1:
        raise ValueError(f"power must lie strictly between 0 and 1, not {power!r}")
    a, b = conditions(values_a, sources_a, values_b, sources_b)
    if len(a.means) < 2:
        return np.nan
    if are_rates(a, b, proportion):
        return _between_rates(a, b, power, level)
    spread = spread_between(np.stack([a.means - b.means, np.ones(len(a.means))], axis=1))
    if spread.variance == 0:
        return np.nan
    return spread.reach(level) + spread.reach(2 * power - 1)


def _between_rates(a: Condition, b: Condition, power: float, level: float) -> float:
    """The difference at which MOVER's interval just leaves out 0 with the power asked for."""
    n, rate_a, base = len(a.means), float(a.means.mean()), float(b.means.mean())
    spread_a, spread_b = spread_between(a.table), spread_between(b.table)
    rows_a, rows_b = int(a.rows.sum()), int(b.rows.sum())
    low, high, _ = rate_ends(b.table, rows_b, b.single, level)
    reach_b = high - base
    if base > 0.5:  # look down instead of up: count what is no event
        base, reach_b = 1 - base, base - low
    size = float(n)  # how many independent trials the first condition is worth
    if spread_a.variance > 0 and not a.single:
        size = min(rows_a, rate_a * (1 - rate_a) / spread_a.variance)
    r, quantile = correlation(a.means, b.means), float(stdtrit(n - 1, power))

    def margin(difference: float) -> float:
        """By how much a difference is larger than it need be."""
        rate = min(base + difference, 1.0)
        reach_a = rate - wilson(rate * size, size, level)[0]
        variance_a = rate * (1 - rate) / size
        covariance = r * np.sqrt(variance_a * spread_b.variance)
        error = np.sqrt(max(variance_a + spread_b.variance - 2 * covariance, 0))
        needed = np.sqrt(max(reach_a**2 - 2 * r * reach_a * reach_b + reach_b**2, 0))
        return difference - needed - quantile * error

    if not margin(1e-9) < 0 < margin(1 - base):
        return np.nan
    return float(brentq(margin, 1e-9, 1 - base, xtol=1e-9))
