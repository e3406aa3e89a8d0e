"""AUROC of contexts that have one score each, and k positive turns of n."""

import numpy as np


def auroc_columns(scores: np.ndarray, positives: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """How often a random positive turn scores higher than a random negative one of another context.

    A context has k positive turns of n and one score. Ties count one half (Hanley & McNeil 1982,
    Radiology 143:29). Turns of one context share its score, so pairs within a context aren't
    counted: they would draw the result to one half, and the more so in resamples.

    Args:
        scores: ``[n, m]`` each context's score, in m columns; may be infinite, not NaN.
        positives, trials: ``[n, m]`` k and n of each context.

    Returns:
        ``[m]`` from 0 to 1; NaN where no context has a positive turn while another has a negative.
    """
    given = (scores, positives, trials - positives)
    rows, k, misses = (np.ascontiguousarray(x.T, dtype=float) for x in given)
    order = np.argsort(rows, axis=1)
    rows, k, misses = (np.take_along_axis(x, order, axis=1) for x in (rows, k, misses))
    concordant, pairs = concordance(rows, k, misses)
    own = np.einsum("ij,ij->i", k, misses)
    concordant, pairs = concordant - own / 2, pairs - own
    return np.divide(concordant, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def concordance(
    scores: np.ndarray, positives: np.ndarray, negatives: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``[m]`` pairs of a positive and a negative turn in the right order, and ``[m]`` pairs in all.

    Ties count one half; pairs within a context tie, and are among both. ``scores`` are ``[m, n]``
    in ascending order, or ``[1, n]`` for all columns; turns ``[m, n]`` in the same order.
    """
    after = np.cumsum(negatives, axis=1)
    middle = after - negatives / 2
    same = np.broadcast_to(scores[:, 1:] == scores[:, :-1], (len(after), after.shape[1] - 1))
    tied = same.any(axis=1)
    if tied.any():
        middle[tied] = _tied_middle(same[tied], after[tied], negatives[tied])
    pairs = positives.sum(axis=1) * negatives.sum(axis=1)
    return np.einsum("ij,ij->i", positives, middle), pairs


def _tied_middle(same: np.ndarray, after: np.ndarray, misses: np.ndarray) -> np.ndarray:
    """``[m, n]`` negative turns below each context, and half of those that tie with it. Contexts
    ascend: ``same`` ``[m, n - 1]`` says whether each ties with the next, ``after`` counts negative
    turns up to and including its own, ``misses`` its own."""
    edge = np.zeros((len(same), 1), dtype=bool)
    # Running sums never fall, so the largest start of a tie so far is that of a context's own tie.
    below = np.where(np.hstack([edge, same]), 0.0, after - misses)
    upto = np.where(np.hstack([same, edge]), np.inf, after)
    start = np.maximum.accumulate(below, axis=1)
    end = np.minimum.accumulate(upto[:, ::-1], axis=1)[:, ::-1]
    return (start + end) / 2
