"""AUROC of rows that have a score and a label each, by which pairs of rows are compared."""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.clusters import cluster_statistic
from ia_mech.stats.intervals import Estimate
from ia_mech.stats.resampling import source_index


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
