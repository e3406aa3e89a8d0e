"""Does one thing go with another: two groups of sources, and two rankings of a few things."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import kendalltau, permutation_test

from ia_mech.stats.clusters import cluster_mean
from ia_mech.stats.intervals import Estimate
from ia_mech.stats.multiple import permutation_max


@dataclass(frozen=True)
class Grouped:
    """A difference between two groups of sources.

    Attributes:
        first: the rate of the rows with label 1.
        second: that of the rows with label 0.
        difference: first minus second, with its interval.
        p: two-sided p value of no association; NaN where a group is empty.
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
) -> Grouped:
    """Rate of the rows with label 1 minus rate of those with label 0.

    The interval is MOVER's without correlation, the distances of both rates' own intervals over
    sources put together (Newcombe 1998, Statist. Med. 17:873, method 10; Zou & Donner 2008,
    Statist. Med. 27:1693). It says something where a group has no event, and no bootstrap does. A
    source with rows in both groups counts in both as if it were two, which is on the safe side if
    its rows are alike.

    The p value is of the difference's size when labels change places between sources (Fisher 1935,
    section 21; :func:`ia_mech.stats.permutation_max`). It and the interval are made separately and
    may disagree at the margin.

    Args:
        values: ``[n]`` events (0 or 1) or shares of them; NaN is left out.
        labels: ``[n]`` 1 or 0.
        sources: ``[n]`` the source of each row.
        level: coverage.
        permutations: of labels.
        seed: of the permutations.

    Raises:
        ValueError: lengths differ, or a value lies outside [0, 1].
    """
    values, labels = np.asarray(values, dtype=float), np.asarray(labels)
    sources = np.array([*sources, None], dtype=object)[:-1]  # tuples stay what they are
    kept = ~np.isnan(values)
    values, labels, sources = values[kept], labels[kept], sources[kept]
    options = {"proportion": True, "level": level, "seed": seed}
    first, second = (
        cluster_mean(values[labels == label], sources[labels == label], **options)
        for label in (1, 0)
    )
    count = len(set(sources))
    if not (first.sources and second.sources):
        nothing = Estimate(np.nan, np.nan, np.nan, count, "one group is empty")
        return Grouped(first, second, nothing, np.nan, "")
    difference = first.value - second.value
    down = np.hypot(first.value - first.low, second.high - second.value)
    up = np.hypot(first.high - first.value, second.value - second.low)
    low, high = max(difference - down, -1.0), min(difference + up, 1.0)

    def size(permuted: np.ndarray) -> float:
        one = permuted == 1
        return abs(values[one].mean() - values[~one].mean())

    test = permutation_max(size, labels, sources, permutations=permutations, seed=seed)
    estimate = Estimate(difference, low, high, count, "mover")
    return Grouped(first, second, estimate, float(test.p_raw[0]), "permutation of sources")


def kendall(x: ArrayLike, y: ArrayLike) -> float:
    """Kendall's (1945, Biometrika 33:239) rank correlation τ-b; NaN where either is constant.

    Args:
        x: ``[n]`` numbers.
        y: ``[n]`` numbers.
    """
    return float(kendalltau(x, y).statistic)


def kendall_p(x: ArrayLike, y: ArrayLike, *, permutations: int = 10_000, seed: int = 0) -> float:
    """Two-sided p value of no rank correlation, by permuting one of both.

    Exact over all ``n!`` orders if there are no more of them than ``permutations``, else over so
    many random ones; NaN where either is constant. (SciPy's own p is exact only without ties.)
    """
    if np.isnan(kendall(x, y)):
        return np.nan
    found = permutation_test(
        (np.asarray(x, dtype=float),),
        lambda permuted: abs(kendall(permuted, y)),
        permutation_type="pairings",
        n_resamples=permutations,
        alternative="greater",
        rng=seed,
    )
    return float(found.pvalue)
