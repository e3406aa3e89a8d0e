"""Reaction information: how much a user turn tells about which response it followed, in bits.

Everything here is a function of arrays: log-likelihoods or scores of turns under each of the
K responses to one query. The arrays may be likelihoods of the subject model, of a patched one
or of another model. No model and no text is needed.

Shapes and names throughout:

- ``logprobs [turns, K]``: log-likelihood of a turn after each of the K responses to its query, in
  nats. ``-inf`` is allowed where a turn is impossible.
- ``followed [turns]``: the index, from 0, of the response that the turn followed.
- ``sources [turns]``: the query of the turn, the unit of statistics. Turns of one query may share
  responses and random draws, so no interval treats them as independent.

With p_j the likelihood after response j, w_j = p_j / Σ p_i is the posterior over the responses, all
being equally likely beforehand. The expectation of log₂ K − H(w) over turns that were drawn from
each p_j equally often is the mutual information of turn and response index given the query,
I_K ≤ log₂ K (Shannon 1948; Cover & Thomas 2006, section 2.4). I_K depends on K and on the largest
number of tokens that a turn may have.

Values per turn are averaged within a response, then over the responses of a query, then over
queries: a turn weighs more where fewer were drawn.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import rel_entr, softmax

from ia_mech.stats.resampling import as_column, source_index

LN2 = float(np.log(2))
TIED = 1e-3  # nats: likelihoods that differ by less, a ratio of 1.001, are ties
FOLDS = 5  # of queries, in which what is fitted on the others is scored


# -- one turn -----------------------------------------------------------------------------------


def reaction_bits(logprobs: ArrayLike) -> np.ndarray:
    """``[turns]`` h = log₂ K − H(w), in bits, from 0 to log₂ K; exactly 0 for equal columns.

    Its mean over turns that followed each response equally often estimates I_K without bias, from
    likelihoods of whole turns alone: the finite K leaves no nested Monte-Carlo bias.

    Args:
        logprobs: ``[turns, K]`` in nats; ``-inf`` where a turn is impossible.

    Raises:
        ValueError: a value is NaN or ``+inf``, or a turn is impossible after every response.
    """
    w = softmax(_logprobs(logprobs), axis=1)
    count = w.shape[1]
    # The divergence of w from the uniform distribution is the same number without a difference of
    # two nearly equal ones; rounding may leave it 1e-16 outside of its range.
    return (rel_entr(w, 1 / count).sum(1) / LN2).clip(0, np.log2(count))


def bits_by_token(token_logprobs: ArrayLike) -> np.ndarray:
    """``[tokens]`` bits that each token of a turn adds: H(w after t − 1) − H(w after t).

    A single token may take bits away; in expectation no token does. The bits of a turn's tokens sum
    to its :func:`reaction_bits`. If tokens after a turn's end count as 0, the means over turns sum
    to I_K.

    Args:
        token_logprobs: ``[K, tokens]`` in nats, of each token after each response and the turn so
            far.

    Raises:
        ValueError: as :func:`reaction_bits`.
    """
    return np.diff(reaction_bits(np.cumsum(token_logprobs, axis=1).T), prepend=0.0)


def evidence(logprobs: ArrayLike, followed: ArrayLike) -> np.ndarray:
    """``[turns]`` log₂(K w_k): bits that a turn gives for the response that it followed.

    :func:`reaction_bits` is the mean of the evidence over the posterior, if the turns were drawn
    from ``logprobs``. So the evidence then has the same expectation, a variance that is no smaller,
    and no lower bound. With another reader's likelihoods its expectation is a lower bound on I_K
    (Barber & Agakov 2003).

    Args:
        logprobs: as of :func:`reaction_bits`, which raises the same errors.
        followed: ``[turns]``.
    """
    return _own_bits(_logprobs(logprobs), followed)


def identified(logprobs: ArrayLike, followed: ArrayLike) -> np.ndarray:
    """``[turns]`` 1 where the response that was followed is the likeliest, 0 where it isn't.

    Responses within :data:`TIED` of the largest likelihood tie and share the 1. So K identical
    contexts give exactly 1/K, though float32 passes leave them 1e-5 nats a token apart.

    Args:
        logprobs: as of :func:`reaction_bits`, which raises the same errors.
        followed: ``[turns]``.
    """
    scores = _logprobs(logprobs)
    near = scores >= scores.max(1, keepdims=True) - TIED
    return _at_followed(near, followed) / near.sum(1)


# -- many turns ---------------------------------------------------------------------------------


def by_query(
    values: ArrayLike, followed: ArrayLike, sources: Iterable[Hashable], responses: int
) -> tuple[list, np.ndarray]:
    """The mean of each query: over its responses, of the mean over the turns after each.

    Two arms on the same queries are compared with :func:`ia_mech.stats.paired_difference` of these.

    Args:
        values: ``[turns]``.
        followed: ``[turns]``.
        sources: ``[turns]``.
        responses: K.

    Returns:
        The queries, sorted where they can be, and ``[queries]`` means.

    Raises:
        ValueError: lengths differ, a value is NaN, a source is missing, or a query has no turn
            after one of its responses.
    """
    names, source, weight = _weighed(followed, sources, responses)
    column = as_column(values, len(weight), "values")
    if np.isnan(column).any():
        raise ValueError("values must not be NaN")
    return names, np.bincount(source, weight * column, minlength=len(names))


def information(
    logprobs: ArrayLike,
    followed: ArrayLike,
    sources: Iterable[Hashable],
    size: int | None = None,
) -> dict[Hashable, float]:
    """I_K′ of each query in bits, from 0 to log₂ K′: the mean over all sets of K′ of its responses.

    For one set it is the mean of the reaction bits of turns after these responses, with only these
    responses to choose from. If the K responses were drawn independently, this estimates I_K′ of
    K′ fresh responses.

    Args:
        logprobs: as of :func:`reaction_bits`; those that the turns were drawn from. Turns of
            different temperatures are different estimates.
        followed: ``[turns]``.
        sources: ``[turns]``.
        size: K′; K if not given. All sets are visited: at most 70 a query for K = 8.

    Raises:
        ValueError: as :func:`reaction_bits` and :func:`by_query`.
    """
    scores, own = np.asarray(logprobs, dtype=float), np.asarray(followed)
    count = scores.shape[1]
    size = size or count
    names, source, weight = _weighed(own, sources, count)
    found: dict[Hashable, float] = {}
    for number, name in enumerate(names):
        turns = np.flatnonzero(source == number)
        sets = []
        for some in combinations(range(count), size):
            those = turns[np.isin(own[turns], some)]
            bits = reaction_bits(scores[those][:, list(some)])
            sets.append(weight[those] @ bits * count / size)
        found[name] = float(np.mean(sets))
    return found


# -- held-out scores ----------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """Log-scores of turns under a distribution fitted without their queries.

    Attributes:
        bits: ``[turns]`` log₂(K q_k), at most log₂ K, without a lower bound. Their mean is in
            expectation a lower bound on I_K, since q doesn't depend on the turns that it scores
            (Barber & Agakov 2003; cross-fitting: Chernozhukov et al. 2018, Econom. J. 21:C1). An
            estimate may be negative.
        fold: ``[turns]`` in which fold a turn was held out.
        fitted: ``[folds, …]`` what was fitted without each fold.
    """

    bits: np.ndarray
    fold: np.ndarray
    fitted: np.ndarray


def readable_bits(
    scores: ArrayLike,
    followed: ArrayLike,
    sources: Iterable[Hashable],
    *,
    most: ArrayLike = np.inf,
    seed: int = 0,
) -> HeldOut:
    """Bits that one fixed reader finds: q_k ∝ exp(β s_k), β fitted on other queries.

    For a reader's log-likelihoods, q_k ∝ p_k^β. One reader for all makes temperatures,
    interventions and greedy turns comparable. A difference between two arms includes the difference
    of their fitted β's.

    Args:
        scores: ``[turns, K]`` log-likelihoods in nats; finite.
        followed: ``[turns]``.
        sources: ``[turns]``; all turns of a query are in one of :data:`FOLDS` folds.
        most: the largest β, of all folds or ``[folds]``.
        seed: of the folds, which depend on it and the set of queries alone.

    Returns:
        The held-out bits; ``fitted`` is ``[folds]`` β's (:func:`fit_beta`).

    Raises:
        ValueError: a score isn't finite, a query has no turn after one of its responses, there are
            fewer than two queries.
    """
    values, own = _finite(scores), np.asarray(followed)
    _, source, weight = _weighed(own, sources, values.shape[1])
    fold = _folds(source, FOLDS, seed)
    bits, betas = np.empty(len(values)), []
    largest = np.broadcast_to(most, fold.max() + 1)
    for number in range(fold.max() + 1):
        out = fold == number
        beta = fit_beta(values[~out], own[~out], weight[~out])
        betas.append(min(beta, largest[number]))
        bits[out] = _own_bits(betas[-1] * values[out], own[out])
    return HeldOut(bits, fold, np.array(betas))


def fit_beta(scores: np.ndarray, followed: np.ndarray, weight: np.ndarray) -> float:
    """The β ≥ 0 under which q_k ∝ exp(β s_k) gives the turns the largest likelihood.

    The log-likelihood is concave in β. One turn that followed each response with probability 1/K is
    added, so that β stays finite even if every response was guessed right. β is 0 if scores point
    to the wrong responses, or don't differ.

    Args:
        scores: ``[turns, K]`` finite.
        followed: ``[turns]``.
        weight: ``[turns]`` of any sum.
    """
    centred = scores - scores.mean(1, keepdims=True)
    share = weight / weight.sum()
    kept = len(scores) / (len(scores) + 1)  # the rest is the added turn
    target = float(kept * share @ _at_followed(centred, followed))
    reach = float(np.abs(centred).max())

    def slope(beta: float) -> float:
        return target - float(share @ (softmax(beta * centred, axis=1) * centred).sum(1))

    if reach == 0 or slope(0.0) <= 0:
        return 0.0
    top = 1 / reach
    while slope(top) > 0:
        top *= 2
    from scipy.optimize import brentq  # takes half a second to load

    return float(brentq(slope, 0, top, xtol=1e-10 * top))


# -- what all share -----------------------------------------------------------------------------


def _weighed(
    followed: ArrayLike, sources: Iterable[Hashable], responses: int
) -> tuple[list, np.ndarray, np.ndarray]:
    """The queries of turns, ``[turns]`` the number of each turn's query, and ``[turns]`` weights.

    A turn weighs 1 / (K · turns after the same response); a query's weights sum to 1.
    """
    labels = list(sources)
    index, count = source_index(labels)
    if not count:
        raise ValueError("there are no turns")
    numbered = dict(zip(index.tolist(), labels, strict=True))
    names = [numbered[number] for number in range(count)]
    cell = index * responses + np.asarray(followed)
    turns = np.bincount(cell, minlength=count * responses)
    if not turns.all():
        query, response = divmod(int(turns.argmin()), responses)
        raise ValueError(
            f"query {names[query]!r} has no turn after response {response} of {responses}"
        )
    return names, index, 1 / (responses * turns[cell])


def _folds(source: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """``[turns]`` the fold of each turn's query; queries are dealt out in random order."""
    queries, index = np.unique(source, return_inverse=True)
    count = len(queries)
    if count < 2:
        raise ValueError("what is fitted on other queries takes at least two")
    order = np.random.default_rng(seed).permutation(count)
    return (order % min(folds, count))[index]


def _own_bits(scores: np.ndarray, followed: ArrayLike) -> np.ndarray:
    """``[turns]`` log₂(K q_k) of q ∝ exp(scores), exactly 0 for equal columns."""
    below = scores - scores.max(1, keepdims=True)
    return (_at_followed(below, followed) - np.log(np.exp(below).mean(1))) / LN2


def _at_followed(table: np.ndarray, followed: ArrayLike) -> np.ndarray:
    """``[turns, …]`` entries of ``[turns, K, …]`` at the response that was followed."""
    return table[np.arange(len(table)), np.asarray(followed)]


def _logprobs(values: ArrayLike) -> np.ndarray:
    """``[turns, K]`` log-likelihoods that have a posterior, or ValueError."""
    found = np.asarray(values, dtype=float)
    if np.isnan(found).any() or (found == np.inf).any():
        raise ValueError("log-likelihoods must not be NaN or +inf")
    impossible = np.flatnonzero((found == -np.inf).all(1))
    if len(impossible):
        raise ValueError(f"turn {impossible[0]} is impossible after every response")
    return found


def _finite(values: ArrayLike) -> np.ndarray:
    """Finite scores as floats, or ValueError."""
    found = np.asarray(values, dtype=float)
    if not np.isfinite(found).all():
        raise ValueError("scores must be finite")
    return found
