"""Tests by flipped signs and by permuted labels, and Holm's correction for many tests."""

from collections.abc import Callable, Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.resampling import CHUNK, source_index


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm's step-down adjustment, which bounds the chance of any false alarm (Holm 1979, Scand. J.
    Statist. 6:65), valid under any dependence between the tests.

    It takes and gives ``[m]`` p values in one order; NaN (no test was made) stays NaN and isn't
    counted.
    """
    p = np.array(p_values, dtype=float)
    made = np.flatnonzero(~np.isnan(p))
    order = made[np.argsort(p[made], kind="stable")]
    p[order] = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)).clip(max=1)
    return p


def permutation_p(observed: ArrayLike, null: ArrayLike, slack: float = 1e-12) -> np.ndarray:
    """How often a permuted statistic reaches the observed one.

    The observed labels count as one of the permutations (Phipson & Smyth 2010), so p is never 0.

    Args:
        observed: ``[…]`` statistics; larger means more effect. NaN gives NaN.
        null: ``[permutations, …]`` the statistics under each permutation; NaN counts as no effect.
        slack: relative (absolute below 1): equal statistics may differ in the last bits after a
            permutation, and ties count against us.
    """
    observed, null = np.asarray(observed, dtype=float), np.asarray(null)
    floor = observed - slack * np.maximum(1, np.abs(observed))
    with np.errstate(invalid="ignore"):
        values = (1 + (null >= floor).sum(0)) / (1 + len(null))
    return np.where(np.isnan(observed), np.nan, values)


def source_permutation_p(
    statistic: Callable[[np.ndarray], float],
    labels: ArrayLike,
    sources: Iterable[Hashable],
    *,
    permutations: int = 1000,
    seed: int = 0,
) -> float:
    """p value of a statistic of labels when labels change places between whole sources.

    Where every source has one label, sources' labels are permuted, whatever the sources' sizes.
    Otherwise a source's labels move as a block, rows in their order, between sources of the same
    number of rows. NaN where no source can change places with another.

    ``statistic`` gives a number for ``[n]`` labels; larger means more effect, NaN none.
    """
    labels = np.asarray(labels)
    index, count = source_index(sources)
    rows = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    first = np.array([r[0] for r in rows])
    constant = all((labels[r] == labels[r[0]]).all() for r in rows)
    sizes = np.zeros(count, dtype=int) if constant else np.array([len(r) for r in rows])
    movable = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
    if all(len(members) < 2 for members in movable):
        return np.nan
    rng, null = np.random.default_rng(seed), np.empty(permutations)
    for b in range(permutations):
        donor = np.arange(count)
        for members in movable:
            donor[members] = rng.permutation(members)
        if constant:
            permuted = labels[first[donor]][index]
        else:
            permuted = labels.copy()
            for receiver, other in enumerate(donor):
                permuted[rows[receiver]] = labels[rows[other]]
        null[b] = statistic(permuted)
    return float(permutation_p(statistic(labels), null))


def sign_flip_p(differences: np.ndarray, permutations: int, seed: int) -> float:
    """Two-sided p value of a mean difference of zero by flipping signs (Fisher 1935, section 21).

    ``[sources]`` differences weigh the same; those of 0 are left out. With k others there are 2^k
    equally likely sums, all of which are visited where that is at most ``permutations`` (then p is
    exact), else ``permutations`` random ones and the observed one (then p is never 0).
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
