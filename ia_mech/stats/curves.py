"""Rankings of contexts that have k positive turns of n, one group of contexts at a time.

A context's score is that of all its turns, so its k positive and n - k negative turns tie. Where
functions take multiplicities, those are ``[contexts, resamples]``, how often each context occurs in
each resample, and one call scores all resamples: the order of the contexts is the same in all.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

STEPS = 60  # of Newton, halved ones included; eight are usual


def check_outcomes(positives: np.ndarray, trials: np.ndarray) -> None:
    """Raise ValueError unless 0 ≤ positives ≤ trials, and trials are above 0 and finite."""
    if not ((positives >= 0) & (positives <= trials) & (trials > 0) & np.isfinite(trials)).all():
        raise ValueError("positives must lie between 0 and trials, and trials above 0")


def auroc(scores: ArrayLike, positives: ArrayLike, trials: ArrayLike) -> float:
    """How often a random positive turn scores higher than a random negative one of another context.

    Ties count one half (Hanley & McNeil 1982, Radiology 143:29). Turns of one context share its
    score whatever the score is, so pairs within a context say nothing and aren't counted; they
    would draw the result to one half, and the more so in resamples, which repeat contexts.

    Args:
        scores: ``[n]`` score of each context; may be infinite.
        positives: ``[n]`` positive turns.
        trials: ``[n]`` all turns.

    Returns:
        From 0 to 1, or NaN if no context has a positive turn while another has a negative one.

    Raises:
        ValueError: see :func:`auroc_columns`.
    """
    column = np.asarray(scores, dtype=float)
    if column.ndim != 1:
        raise ValueError(f"scores must have one dimension, not {column.ndim}")
    return float(auroc_columns(column[:, None], positives, trials)[0])


def auroc_columns(scores: ArrayLike, positives: ArrayLike, trials: ArrayLike) -> np.ndarray:
    """:func:`auroc` of many columns, as a permutation null needs it.

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
    rows, k, misses = (in_order(values, order) for values in (rows.T, k, n - k))
    after = np.cumsum(misses, axis=1)
    middle = after - misses / 2
    same = rows[:, 1:] == rows[:, :-1]
    tied = same.any(axis=1)
    if tied.any():
        middle[tied] = tied_middle(same[tied], after[tied], misses[tied])
    own = np.einsum("ij,ij->i", k, misses)
    pairs = k.sum(axis=1) * misses.sum(axis=1) - own
    concordant = np.einsum("ij,ij->i", k, middle) - own / 2
    return np.divide(concordant, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def in_order(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """``[m, n]``: ``[n]`` or ``[n, m]`` values, each column in its order ``[m, n]``."""
    if values.ndim == 1:
        return values[order]
    return np.take_along_axis(np.ascontiguousarray(values.T), order, axis=1)


def tied_middle(same: np.ndarray, after: np.ndarray, misses: np.ndarray) -> np.ndarray:
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


def curves(
    scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray, multiplicities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Turns at or above each threshold: what ROC and precision-recall curves are made of.

    Args:
        scores: ``[n]`` in descending order; those that tie make one threshold.
        positives: ``[n]`` positive turns.
        negatives: ``[n]`` negative turns.
        multiplicities: ``[n, resamples]``.

    Returns:
        Positive and negative turns, ``[thresholds + 1, resamples]`` each, from 0 to all.
    """
    ends = np.append(np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1)
    found = []
    for turns in (positives, negatives):
        sums = np.zeros((len(scores) + 1, multiplicities.shape[1]))
        np.multiply(turns[:, None], multiplicities, out=sums[1:])
        np.cumsum(sums[1:], axis=0, out=sums[1:])
        found.append(sums if len(ends) == len(scores) else sums[np.append(0, ends + 1)])
    return found[0], found[1]


def concordance(hits: np.ndarray, misses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a positive and a negative turn in the right order, ties one half, and all pairs.

    The area under the ROC curve by the trapezoid rule, before it is divided.

    Args:
        hits: ``[thresholds + 1, resamples]`` positive turns, of :func:`curves`.
        misses: ``[thresholds + 1, resamples]`` negative turns.
    """
    area = np.einsum("ir,ir->r", np.diff(misses, axis=0), hits[1:] + hits[:-1]) / 2
    return area, hits[-1] * misses[-1]


def precision_sum(hits: np.ndarray, misses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum over positive turns of the precision at their threshold, and how many there are.

    The quotient is the average precision as scikit-learn defines it: not interpolated, ties are one
    threshold. It is 1 if no turn is negative.

    Args:
        hits: ``[thresholds + 1, resamples]`` positive turns, of :func:`curves`.
        misses: ``[thresholds + 1, resamples]`` negative turns.
    """
    turns = hits[1:] + misses[1:]
    precision = np.divide(hits[1:], turns, out=np.zeros_like(turns), where=turns > 0)
    return np.einsum("ir,ir->r", np.diff(hits, axis=0), precision), hits[-1]


def recalled(
    hits: np.ndarray, misses: np.ndarray, false_positive_rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """Positive turns found at a rate of false positives, and all of them.

    The ROC curve is interpolated linearly, so that a tie is one segment; where it rises vertically
    at that rate, the upper end counts. Both are 0 if no turn is negative.

    Args:
        hits: ``[thresholds + 1, resamples]`` positive turns, of :func:`curves`.
        misses: ``[thresholds + 1, resamples]`` negative turns.
        false_positive_rate: from 0 to 1.
    """
    target = false_positive_rate * misses[-1]
    # 0.29 * 100 is less than 29: rounding must not choose the lower end of a vertical segment
    last = (misses <= target * (1 + 1e-12)).sum(axis=0) - 1
    following = np.minimum(last + 1, len(misses) - 1)
    each = np.arange(len(last))
    width = misses[following, each] - misses[last, each]
    excess = np.maximum(target - misses[last, each], 0.0)
    share = np.divide(excess, width, out=np.zeros_like(width), where=width > 0)
    found = hits[last, each] + share * (hits[following, each] - hits[last, each])
    return np.where(misses[-1] > 0, found, 0.0), np.where(misses[-1] > 0, hits[-1], 0.0)


def centred_ranks(values: np.ndarray, multiplicities: np.ndarray) -> np.ndarray:
    """``[n, resamples]`` mid-ranks among rows repeated so many times, less their mean.

    Args:
        values: ``[n]`` what to rank.
        multiplicities: ``[n, resamples]``.
    """
    _, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.add.reduceat(multiplicities[order], starts, axis=0)
    upto = np.cumsum(sizes, axis=0)
    return (upto - sizes / 2 - upto[-1] / 2)[group]


def rank_correlation(
    first: np.ndarray, second: np.ndarray, multiplicities: np.ndarray
) -> np.ndarray:
    """``[resamples]`` Spearman's (1904) correlation, NaN where either is constant.

    Args:
        first: ``[n]`` values.
        second: ``[n]`` values.
        multiplicities: ``[n, resamples]``.
    """
    x, y = centred_ranks(first, multiplicities), centred_ranks(second, multiplicities)
    weighted = x * multiplicities
    spread = np.einsum("ir,ir->r", weighted, x)
    spread *= np.einsum("ir,ir,ir->r", y, y, multiplicities)
    products = np.einsum("ir,ir->r", weighted, y)
    root = np.sqrt(spread)
    return np.divide(products, root, out=np.full(len(root), np.nan), where=root > 0)


def logistic_slope(
    predictor: np.ndarray, positives: np.ndarray, trials: np.ndarray, multiplicities: np.ndarray
) -> np.ndarray:
    """Slope of the logistic regression of turns on one predictor and an intercept.

    Newton's method, its steps halved until the likelihood rises, for all resamples at once.

    Args:
        predictor: ``[n]`` finite values.
        positives: ``[n]`` positive turns.
        trials: ``[n]`` all turns.
        multiplicities: ``[n, resamples]``, not all 0 in a resample.

    Returns:
        ``[resamples]``; NaN where there is none, as the predictor is constant or it separates the
        positive from the negative turns.
    """
    x = predictor - predictor.mean()  # keeps the intercept from mattering to the slope's rounding
    k, n = positives, trials
    resamples = multiplicities.shape[1]
    slopes = np.full(resamples, np.nan)
    rate = k @ multiplicities / (n @ multiplicities)
    active = np.flatnonzero((rate > 0) & (rate < 1))
    place = np.zeros((2, len(active)))
    place[0] = np.log(rate[active] / (1 - rate[active]))
    step, best = np.zeros_like(place), np.full(len(active), -np.inf)
    for _ in range(STEPS):
        if not len(active):
            break
        counts = multiplicities[:, active]
        linear = (place[0] + step[0]) + x[:, None] * (place[1] + step[1])
        fit = expit(linear)
        likelihood = k * linear.T - n * np.logaddexp(0, linear).T
        likelihood = np.einsum("ri,ir->r", likelihood, counts)
        rises = likelihood >= best - 1e-12 * np.abs(best)
        small = (np.abs(step) <= 1e-9 * (1 + np.abs(place))).all(axis=0) & np.isfinite(best)
        place = np.where(rises, place + step, place)
        best = np.where(rises, likelihood, best)
        newton, solvable = newton_step(x, k, n, fit, counts)
        step = np.where(rises, newton, step / 2)
        slopes[active[small]] = place[1, small]
        going = ~small & (solvable | ~rises)
        active, place, step, best = active[going], place[:, going], step[:, going], best[going]
    return slopes


def newton_step(
    x: np.ndarray, k: np.ndarray, n: np.ndarray, fit: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``[2, resamples]`` step of intercept and slope, and ``[resamples]`` whether there is one."""
    residual = (k[:, None] - n[:, None] * fit) * counts
    weight = n[:, None] * fit * (1 - fit) * counts
    gradient, across = residual.sum(axis=0), x @ residual
    flat, mixed, steep = weight.sum(axis=0), x @ weight, x**2 @ weight
    determinant = flat * steep - mixed**2
    solvable = determinant > 1e-12 * flat * steep
    scale = np.where(solvable, determinant, np.inf)
    step = np.stack([steep * gradient - mixed * across, flat * across - mixed * gradient])
    return step / scale, solvable
