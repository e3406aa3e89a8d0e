"""AUROC: of contexts that have k positive turns of n, and of rows that have a label each."""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.clusters import cluster_bootstrap
from ia_mech.stats.intervals import Estimate
from ia_mech.stats.resampling import source_index


def check_outcomes(positives: np.ndarray, trials: np.ndarray) -> None:
    """Raise ValueError unless 0 ≤ positives ≤ trials, and trials are above 0 and finite."""
    if not ((positives >= 0) & (positives <= trials) & (trials > 0) & np.isfinite(trials)).all():
        raise ValueError("positives must lie between 0 and trials, and trials above 0")


def auroc_columns(scores: ArrayLike, positives: ArrayLike, trials: ArrayLike) -> np.ndarray:
    """How often a random positive turn scores higher than a random negative one of another context.

    Of many columns at once, as a permutation null needs it. A context has k positive turns of n and
    one score. Ties count one half (Hanley & McNeil 1982, Radiology 143:29). Turns of one context
    share its score whatever the score is, so pairs within a context say nothing and aren't counted;
    they would draw the result to one half, and the more so in resamples, which repeat contexts.

    Args:
        scores: ``[n, m]`` a score of each context per column; may be infinite.
        positives: ``[n]`` positive turns, or ``[n, m]`` if they differ between columns.
        trials: ``[n]`` or ``[n, m]`` all turns.

    Returns:
        ``[m]`` from 0 to 1; NaN where no context has a positive turn while another has a negative.

    Raises:
        ValueError: shapes don't fit, a score is NaN, or there are not 0 ≤ k ≤ n, n > 0.
    """
    table = np.asarray(scores, dtype=float)
    if table.ndim != 2:
        raise ValueError(f"scores must have two dimensions, not {table.ndim}")
    k, n = np.asarray(positives, dtype=float), np.asarray(trials, dtype=float)
    for name, column in (("positives", k), ("trials", n)):
        if column.shape not in (table.shape, table.shape[:1]):
            raise ValueError(f"{name} have shape {column.shape}, scores {table.shape}")
    if np.isnan(table).any():
        raise ValueError("a score is NaN")
    if k.ndim != n.ndim:  # one of them is the same in all columns, the other is not
        k, n = (c if c.ndim == 2 else np.broadcast_to(c[:, None], table.shape) for c in (k, n))
    check_outcomes(k, n)
    rows = np.ascontiguousarray(table.T)
    order = np.argsort(rows, axis=1)
    rows, k, misses = (_in_order(values, order) for values in (rows.T, k, n - k))
    after = np.cumsum(misses, axis=1)
    middle = after - misses / 2
    same = rows[:, 1:] == rows[:, :-1]
    tied = same.any(axis=1)
    if tied.any():
        middle[tied] = _tied_middle(same[tied], after[tied], misses[tied])
    own = np.einsum("ij,ij->i", k, misses)
    pairs = k.sum(axis=1) * misses.sum(axis=1) - own
    concordant = np.einsum("ij,ij->i", k, middle) - own / 2
    return np.divide(concordant, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def _in_order(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """``[m, n]``: ``[n]`` or ``[n, m]`` values, each column in its order ``[m, n]``."""
    if values.ndim == 1:
        return values[order]
    return np.take_along_axis(np.ascontiguousarray(values.T), order, axis=1)


def _tied_middle(same: np.ndarray, after: np.ndarray, misses: np.ndarray) -> np.ndarray:
    """Negative turns below each context, and half of those that tie with it.

    Args:
        same: ``[m, n - 1]`` whether a context, in ascending order, ties with the next.
        after: ``[m, n]`` negative turns up to and including the context.
        misses: ``[m, n]`` negative turns of the context.
    """
    edge = np.zeros((len(same), 1), dtype=bool)
    # running sums don't fall, so the largest so far at which a tie starts is that of one's own tie
    below = np.where(np.hstack([edge, same]), 0.0, after - misses)
    upto = np.where(np.hstack([same, edge]), np.inf, after)
    start = np.maximum.accumulate(below, axis=1)
    end = np.minimum.accumulate(upto[:, ::-1], axis=1)[:, ::-1]
    return (start + end) / 2


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
        options: ``level``, ``resamples`` and ``seed`` of ``cluster_bootstrap``.

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

    def share(drawn: np.ndarray) -> list[float]:
        compared = [counts @ pairs @ counts for counts in drawn]
        return [
            counts @ won @ counts / among if among else np.nan
            for counts, among in zip(drawn, compared, strict=True)
        ]

    (estimate,) = cluster_bootstrap(share, range(count), **options)
    return estimate
