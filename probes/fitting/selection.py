"""Which layer and position is the headline, and what p values go with that.

Selection looks at inner folds only and is the same function of its numbers for the observed labels
and for every permutation, so that the headline's p value pays for it.
"""

from dataclasses import dataclass

import numpy as np

from ia_mech.stats import permutation_p


@dataclass(frozen=True)
class Tested:
    """Selection and permutation tests over a heat map.

    All arrays over cells are ``[layers, positions]`` in the given order.

    Attributes:
        statistic: AUROC of the closed-form probes, mean over outer folds.
        p_family: family-wise p value: how often the largest statistic of a permutation reaches it.
        band: the 95% quantile of each cell's own permuted statistics.
        family_band: the 95% quantile of the largest.
        picked: ``[folds, 2]`` layer and position (as indices) that each outer fold's inner loop
            chose.
        headline: layer and position (as indices) chosen on all contexts.
        value: the headline's statistic: each outer fold scores the cell that was chosen for it.
        p: its p value, with the selection replayed under each permutation.
        null: ``[permutations]`` the headline's statistic under each.
        permutations: how many there were.
    """

    statistic: np.ndarray
    p_family: np.ndarray
    band: np.ndarray
    family_band: float
    picked: np.ndarray
    headline: tuple[int, int]
    value: float
    p: float
    null: np.ndarray
    permutations: int


def choose(correlations: np.ndarray, sources: int) -> tuple[np.ndarray, np.ndarray]:
    """The earliest layer that reads as well as the best one, by the one-standard-error rule.

    What a block writes into the residual stream stays there, so many later layers read alike, and
    the best of them is best by chance. At the best cell's position, the earliest layer within one
    standard error of it (Breiman et al. 1984, section 3.4.3) is chosen. The standard error is that
    of Fisher's z, ``1 / sqrt(sources - 3)``.

    Args:
        correlations: ``[layers, positions, …]`` held-out correlations; other axes are separate
            choices.
        sources: how many the correlations are from.

    Returns:
        Indices of layer and position, each ``[…]``.
    """
    layers, positions = correlations.shape[:2]
    rest = correlations.shape[2:]
    flat = correlations.reshape(layers * positions, -1)
    best = flat.argmax(0)
    position = best % positions
    columns = np.arange(flat.shape[1])
    there = correlations.reshape(layers, positions, -1)[:, position, columns]
    clipped = np.clip(flat[best, columns], -1 + 1e-6, 1 - 1e-6)
    floor = np.tanh(np.arctanh(clipped) - 1 / np.sqrt(max(sources - 3, 1)))
    layer = (there >= np.minimum(floor, flat[best, columns])).argmax(0)
    return layer.reshape(rest), position.reshape(rest)


def against_permutations(
    inner: np.ndarray, outer: np.ndarray, whole: np.ndarray, sources_inside: int, sources: int
) -> Tested:
    """Select the headline and test everything against permutations.

    Args:
        inner: ``[layers, positions, folds, 1 + permutations]`` inner correlations; column 0 of the
            last axis is observed.
        outer: the same shape, AUROC in the outer folds.
        whole: ``[layers, positions]`` correlations over all folds.
        sources_inside: sources in the inner loop of one outer fold (on average).
        sources: all of them.
    """
    statistic = outer.mean(2)
    observed, null = statistic[..., 0], statistic[..., 1:]
    largest = null.max((0, 1))
    layer, position = choose(inner, sources_inside)
    folds, columns = np.indices(layer.shape)
    headline = outer[layer, position, folds, columns].mean(0)
    at = choose(whole[..., None], sources)
    return Tested(
        statistic=observed,
        p_family=_p(observed, largest.reshape(-1, 1, 1)),
        band=_quantile(null),
        family_band=float(_quantile(largest)),
        picked=np.stack([layer[:, 0], position[:, 0]], axis=1),
        headline=(int(at[0][0]), int(at[1][0])),
        value=float(headline[0]),
        p=float(_p(headline[0], headline[1:])),
        null=headline[1:],
        permutations=null.shape[-1],
    )


def _p(observed: np.ndarray, null: np.ndarray) -> np.ndarray:
    """NaN without permutations. Statistics are float32, and sums in another order differ there."""
    return (
        permutation_p(observed, null, slack=1e-6) if len(null) else np.full_like(observed, np.nan)
    )


def _quantile(null: np.ndarray) -> np.ndarray:
    if not null.shape[-1]:
        return np.full(null.shape[:-1], np.nan)
    return np.quantile(null, 0.95, axis=-1)
