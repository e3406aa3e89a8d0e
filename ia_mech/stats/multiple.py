"""Many tests at once: adjusted p values, and permutation against the maximum statistic."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import false_discovery_control

from ia_mech.stats.resampling import source_index


def holm(p_values: ArrayLike) -> np.ndarray:
    """Holm's step-down adjustment, which bounds the chance of any false alarm.

    Holm (1979), Scand. J. Statist. 6:65. Valid under any dependence between the tests.

    Args:
        p_values: ``[m]``; NaN marks a test that wasn't made, stays NaN and isn't counted.

    Returns:
        ``[m]`` adjusted p values in the given order; reject where they are below the level.

    Raises:
        ValueError: a p value lies outside [0, 1].
    """
    p, made = _checked(p_values)
    order = np.flatnonzero(made)[np.argsort(p[made], kind="stable")]
    p[order] = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)).clip(max=1)
    return p


def benjamini_hochberg(p_values: ArrayLike) -> np.ndarray:
    """Benjamini & Hochberg's step-up adjustment, which bounds the false discovery rate.

    Benjamini & Hochberg (1995), J. R. Statist. Soc. B 57:289. Valid for independent and for
    positively dependent tests.

    Args:
        p_values: ``[m]``; NaN marks a test that wasn't made, stays NaN and isn't counted.

    Returns:
        ``[m]`` adjusted p values in the given order.

    Raises:
        ValueError: a p value lies outside [0, 1].
    """
    p, made = _checked(p_values)
    if made.any():
        p[made] = false_discovery_control(p[made], method="bh")
    return p


def _checked(p_values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """A copy of the p values, and which of them are there."""
    p = np.array(p_values, dtype=float)
    if p.ndim != 1:
        raise ValueError(f"p values must have one dimension, not {p.ndim}")
    made = ~np.isnan(p)
    if ((p[made] < 0) | (p[made] > 1)).any():
        raise ValueError("p values must lie between 0 and 1")
    return p, made


@dataclass(frozen=True)
class PermutationTest:
    """What a permutation test with m statistics found.

    Attributes:
        observed: ``[m]`` the statistics on the labels as they are.
        p_adjusted: ``[m]`` family-wise: how often the largest of the m permuted statistics reaches
            the observed one.
        p_raw: ``[m]`` how often the same statistic, permuted, reaches it.
        null_maximum: ``[permutations]`` the largest statistic of each permutation.
    """

    observed: np.ndarray
    p_adjusted: np.ndarray
    p_raw: np.ndarray
    null_maximum: np.ndarray


def permutation_max(
    statistic: Callable[[np.ndarray], ArrayLike],
    labels: ArrayLike,
    groups: Iterable[Hashable],
    *,
    permutations: int = 1000,
    seed: int = 0,
    strata: Iterable[Hashable] | None = None,
) -> PermutationTest:
    """Permutation test of m statistics at once, against their maximum.

    Rows of a group (the contexts of one source) aren't exchangeable with those of another one by
    one: where all rows of a group share a label, shuffling within groups changes nothing, and
    shuffling rows pretends to more independence than there is. So whole groups change places.

    - If every group has one label, groups' labels are permuted, whatever the groups' sizes.
    - Otherwise a group's labels move as a block, rows in their order, between groups of the same
      number of rows.

    All m statistics see the same permutation, so their dependence is kept, and each observed
    statistic is compared with the maximum (Westfall & Young 1993, single step). Every p value
    counts the observed labels as one of the permutations (:func:`permutation_p`).

    Args:
        statistic: gives ``[m]`` numbers (or one) for ``[n]`` labels; larger means more effect. A
            NaN counts as no effect.
        labels: ``[n]`` or ``[n, …]``, one entry per row.
        groups: ``[n]`` the group of each row.
        permutations: random permutations.
        seed: of the permutations.
        strata: ``[n]`` groups only change places within a stratum (a dataset, say); constant within
            each group.

    Raises:
        ValueError: lengths differ, a stratum cuts through a group, or no group can move.
    """
    labels = np.asarray(labels)
    index, count = source_index(groups)
    if len(labels) != len(index):
        raise ValueError(f"{len(labels)} labels but {len(index)} rows in groups")
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, not {permutations}")
    rows = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    stratum = np.zeros(len(index), dtype=np.intp)
    if strata is not None:
        stratum, _ = source_index(strata)
        if len(stratum) != len(index):
            raise ValueError(f"{len(stratum)} strata but {len(index)} rows in groups")
        if any((stratum[r] != stratum[r[0]]).any() for r in rows):
            raise ValueError("a stratum must hold whole groups")
    first = np.array([r[0] for r in rows])
    constant = all((labels[r] == labels[r[0]]).all() for r in rows)
    sizes = np.zeros(count, dtype=int) if constant else np.array([len(r) for r in rows])
    _, cell = np.unique(np.stack([stratum[first], sizes]), axis=1, return_inverse=True)
    cells = [np.flatnonzero(cell == c) for c in range(cell.max() + 1)]
    if all(len(c) < 2 for c in cells):
        raise ValueError("no group can change places with another; there is nothing to permute")

    observed = np.atleast_1d(np.asarray(statistic(labels), dtype=float))
    rng, null = np.random.default_rng(seed), np.empty((permutations, len(observed)))
    for b in range(permutations):
        donor = np.arange(count)
        for members in cells:
            donor[members] = rng.permutation(members)
        if constant:
            permuted = labels[first[donor]][index]
        else:
            permuted = labels.copy()
            for receiver, giver in enumerate(donor):
                permuted[rows[receiver]] = labels[rows[giver]]
        null[b] = statistic(permuted)
    maximum = np.where(np.isnan(null), -np.inf, null).max(1)
    adjusted = permutation_p(observed, maximum[:, None])
    return PermutationTest(observed, adjusted, permutation_p(observed, null), maximum)


def permutation_p(observed: ArrayLike, null: ArrayLike, slack: float = 1e-12) -> np.ndarray:
    """How often a permuted statistic reaches the observed one.

    The observed labels count as one of the permutations (Phipson & Smyth 2010), so p is never 0.

    Args:
        observed: ``[…]`` statistics; larger means more effect. NaN gives NaN.
        null: ``[permutations, …]`` the same under each permutation; NaN counts as no effect.
        slack: relative (absolute below 1): equal statistics may differ in the last bits after a
            permutation, and ties count against us.
    """
    observed, null = np.asarray(observed, dtype=float), np.asarray(null)
    floor = observed - slack * np.maximum(1, np.abs(observed))
    with np.errstate(invalid="ignore"):
        values = (1 + (null >= floor).sum(0)) / (1 + len(null))
    return np.where(np.isnan(observed), np.nan, values)
