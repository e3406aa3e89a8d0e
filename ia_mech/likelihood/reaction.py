"""Reaction information: how much a user turn tells about which response it followed, in bits.

Everything here is a function of arrays: log-likelihoods, scores or features of turns under each of
the K responses to one query. Whoever has such arrays (the subject's likelihoods, patched ones,
another model's, a judge's scores) can use it; no model and no text is needed.

Shapes and names throughout:

- ``logprobs [turns, K]``: log-likelihood of a turn after each of the K responses to its query, in
  nats. ``-inf`` is allowed where a turn is impossible.
- ``followed [turns]``: the index, from 0, of the response that the turn followed.
- ``sources [turns]``: the query of the turn, the unit of statistics. Turns of one query may share
  anything (responses, random draws): no interval takes them for independent.

With p_j the likelihood after response j, w_j = p_j / Σ p_i is the posterior over the responses, all
being equally likely beforehand. The expectation of log₂ K − H(w) over turns that were drawn from
each p_j equally often is the mutual information of turn and response index given the query,
I_K ≤ log₂ K (Shannon 1948; Cover & Thomas 2006, section 2.4). K and the largest number of tokens
of a turn are part of what is estimated.

Values per turn are averaged within a response, then over the responses of a query, then over
queries: a turn weighs more where fewer were drawn.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, minimize
from scipy.special import log_softmax, rel_entr, softmax

from ia_mech.stats import Estimate, cluster_mean, matched_permutation
from ia_mech.stats.resampling import as_column, source_index

LN2 = float(np.log(2))
TIED = 1e-3  # nats: likelihoods that differ by less, a ratio of 1.001, are ties
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the conditional logit, from which one is chosen
INNER = 3  # folds in which it is chosen


# -- one turn -----------------------------------------------------------------------------------


def posterior(logprobs: ArrayLike) -> np.ndarray:
    """``[turns, K]`` w: how likely each response is, given the turn; every row sums to 1.

    Args:
        logprobs: ``[turns, K]`` in nats; ``-inf`` where a turn is impossible.

    Raises:
        ValueError: the shape is another, K is below 2, a value is NaN or ``+inf``, or a turn is
            impossible after every response.
    """
    return softmax(_logprobs(logprobs), axis=1)


def reaction_bits(logprobs: ArrayLike) -> np.ndarray:
    """``[turns]`` h = log₂ K − H(w), in bits, from 0 to log₂ K; exactly 0 for equal columns.

    Its mean over turns that followed each response equally often estimates I_K without bias, from
    likelihoods of whole turns alone: the finite K leaves no nested Monte-Carlo bias.

    Args:
        logprobs: as of :func:`posterior`, which raises the same errors.
    """
    w = posterior(logprobs)
    count = w.shape[1]
    # The divergence of w from the uniform distribution is the same number without a difference of
    # two nearly equal ones; rounding may leave it 1e-16 outside of its range.
    return (rel_entr(w, 1 / count).sum(1) / LN2).clip(0, np.log2(count))


def bits_by_token(token_logprobs: ArrayLike) -> np.ndarray:
    """``[turns, tokens]`` bits that each token adds: H(w after t − 1) − H(w after t).

    A single token may take bits away; in expectation none does. A turn's row sums to its
    :func:`reaction_bits`. After a turn's end there is NaN; a mean over turns that counts these as
    0 sums to I_K over tokens.

    Args:
        token_logprobs: ``[turns, K, tokens]`` in nats, of each token after each response and the
            turn so far; NaN after the last token of a turn.

    Raises:
        ValueError: the shape is another, padding differs between the K responses or stands before
            a token, or :func:`posterior` can't use the sums up to a token.
    """
    tokens = np.asarray(token_logprobs, dtype=float)
    if tokens.ndim != 3:
        raise ValueError(f"token log-likelihoods must be [turns, K, tokens], not {tokens.shape}")
    padded = np.isnan(tokens)
    ended = padded.any(1)
    if (padded != ended[:, None]).any():
        raise ValueError("a token has a log-likelihood after some responses only")
    if (ended[:, :-1] > ended[:, 1:]).any():
        raise ValueError("NaN stands before a token; it may only follow a turn's last one")
    bits = np.zeros((len(tokens), tokens.shape[2] + 1))
    sums = np.where(padded, 0.0, tokens).cumsum(2)
    for t in range(tokens.shape[2]):
        bits[:, t + 1] = reaction_bits(sums[:, :, t])
    return np.where(ended, np.nan, np.diff(bits, axis=1))


def evidence(logprobs: ArrayLike, followed: ArrayLike) -> np.ndarray:
    """``[turns]`` log₂(K w_k): bits that a turn gives for the response that it followed.

    It has the same expectation as :func:`reaction_bits` where ``logprobs`` are those the turns were
    drawn from, a larger variance, and no lower bound. With another reader's likelihoods its
    expectation is a lower bound on I_K (Barber & Agakov 2003).

    Args:
        logprobs: as of :func:`posterior`, which raises the same errors.
        followed: ``[turns]``.
    """
    scores = _logprobs(logprobs)
    return _own_bits(scores, _followed(followed, scores))


def identified(logprobs: ArrayLike, followed: ArrayLike, tolerance: float = TIED) -> np.ndarray:
    """``[turns]`` 1 where the response that was followed is the likeliest, 0 where it isn't.

    All within ``tolerance`` of the largest tie and share the 1, so that K identical contexts give
    exactly 1/K though a float32 pass leaves them 1e-5 nats a token apart.

    Args:
        logprobs: as of :func:`posterior`, which raises the same errors.
        followed: ``[turns]``.
        tolerance: in nats; raise it for likelihoods of less than float32's precision.
    """
    scores = _logprobs(logprobs)
    near = scores >= scores.max(1, keepdims=True) - tolerance
    return _at_followed(near, _followed(followed, scores)) / near.sum(1)


def subset_bits(logprobs: ArrayLike, followed: ArrayLike, size: int) -> np.ndarray:
    """``[turns]`` reaction bits among ``size`` of the K responses, for a curve over K′.

    The mean over all subsets of that size that hold the response the turn followed. Averaged over
    turns it estimates the mean, over all subsets of K′ = ``size`` responses, of the information
    that a turn has about which of them it followed; where the K responses were drawn
    independently, that is I_K′ of K′ fresh ones. ``size`` = K gives :func:`reaction_bits`.

    Args:
        logprobs: as of :func:`posterior`, which raises the same errors.
        followed: ``[turns]``.
        size: K′, from 2 to K. All subsets are visited: at most 35 a turn for K = 8.

    Raises:
        ValueError: ``size`` is out of range, or a turn is impossible after the response that it
            followed.
    """
    scores = _logprobs(logprobs)
    own, count = _followed(followed, scores), scores.shape[1]
    if not 2 <= size <= count:
        raise ValueError(f"size must lie between 2 and the {count} responses, not {size}")
    impossible = np.flatnonzero(_at_followed(scores, own) == -np.inf)
    if len(impossible):
        raise ValueError(f"turn {impossible[0]} is impossible after the response that it followed")
    bits = np.zeros(len(scores))
    for k in range(count):
        others = list(combinations([j for j in range(count) if j != k], size - 1))
        for some in others:
            bits[own == k] += reaction_bits(scores[own == k][:, [k, *some]]) / len(others)
    return bits


def distinctness(turns: Sequence[Hashable]) -> float:
    """Chance that two turns, after two different ones of K responses, differ.

    1 − Σ n_v (n_v − 1) / (K (K − 1)) over the different turns v, without bias for a fresh pair of
    responses (as Simpson's index: Simpson 1949, Nature 163:688). For greedy turns, whose own I_K
    is near its ceiling because they are deterministic.

    Args:
        turns: of one query, one after each response: texts, or tuples of ids.

    Raises:
        ValueError: there are fewer than two.
    """
    count = len(turns)
    if count < 2:
        raise ValueError(f"distinctness needs at least two turns, not {count}")
    alike = sum(n * (n - 1) for n in Counter(turns).values())
    return 1 - alike / (count * (count - 1))


# -- many turns ---------------------------------------------------------------------------------


def by_query(
    values: ArrayLike, followed: ArrayLike, sources: Iterable[Hashable], responses: int
) -> tuple[list, np.ndarray]:
    """Each query's mean: of the means over turns after each of its responses.

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
            after one of its responses (its mean would be of something else).
    """
    design = _Design.from_turns(followed, sources, responses)
    column = as_column(values, len(design.weight), "values")
    if np.isnan(column).any():
        raise ValueError("values must not be NaN")
    sums = np.bincount(design.source, design.weight * column, minlength=len(design.names))
    return design.names, sums


def mean_over_queries(
    values: ArrayLike,
    followed: ArrayLike,
    sources: Iterable[Hashable],
    responses: int,
    *,
    level: float = 0.95,
) -> Estimate:
    """Mean over queries of :func:`by_query`, with Student's interval over queries.

    ``benchmarks/reaction.md`` has its coverage.

    Args:
        values: ``[turns]``.
        followed: ``[turns]``.
        sources: ``[turns]``.
        responses: K.
        level: coverage.

    Raises:
        ValueError: as :func:`by_query`, or the level is out of range.
    """
    names, means = by_query(values, followed, sources, responses)
    return cluster_mean(means, range(len(names)), level=level)


def information(
    logprobs: ArrayLike,
    followed: ArrayLike,
    sources: Iterable[Hashable],
    among: Mapping[Any, Sequence[int]] | None = None,
    size: int | None = None,
) -> dict[Hashable, float]:
    """I_K′ of each query in bits, from 0 to log₂ K′: the mean over sets of K′ of its responses.

    Args:
        logprobs: as of :func:`posterior`; those that the turns were drawn from. Turns of different
            temperatures are different estimates.
        followed: ``[turns]``.
        sources: ``[turns]``.
        among: query → which of its responses; turns that followed another one are left out, and so
            are queries with fewer than K′. All K of every query if not given.
        size: K′ (:func:`subset_bits`); K if not given.

    Raises:
        ValueError: as the functions named, and :func:`by_query`.
    """
    scores, labels = _logprobs(logprobs), list(sources)
    own, count = _followed(followed, scores), scores.shape[1]
    if len(labels) != len(own):
        raise ValueError(f"{len(own)} turns but {len(labels)} sources")
    mine = [range(count) if among is None else among.get(label, ()) for label in labels]
    held = np.array([len(those) * (k in those) for k, those in zip(own, mine, strict=True)])
    found: dict[Hashable, float] = {}
    for several in sorted({*held[held >= (size or count)].tolist()}):
        here = np.flatnonzero(held == several)
        columns = np.array([list(mine[turn]) for turn in here])  # [turns, several]
        index = (columns == own[here, None]).argmax(1)
        bits = subset_bits(np.take_along_axis(scores[here], columns, 1), index, size or count)
        names, means = by_query(bits, index, [labels[turn] for turn in here], several)
        found |= dict(zip(names, means.tolist(), strict=True))
    return found


@dataclass(frozen=True)
class PermutationTest:
    """A permutation test of scores that needn't be likelihoods.

    Attributes:
        statistic: mean score of a turn with the response that it followed, less the mean with all
            K responses; in the scores' unit. 0 is expected where turns don't depend on responses.
        p: one-sided, of the statistic's being as large; never 0.
        permutations: how many were drawn.
    """

    statistic: float
    p: float
    permutations: int


def permutation_test(
    scores: ArrayLike,
    followed: ArrayLike,
    sources: Iterable[Hashable],
    *,
    permutations: int = 10_000,
    seed: int = 0,
) -> PermutationTest:
    """Whether scores, of any reader or judge, tell which response a turn followed.

    All turns after one response stay together, and these blocks change places between the responses
    of a query: turns that share random draws, or a block's number of turns, then don't matter. A
    reader that prefers some responses or some turns, whatever follows what, changes nothing.

    Args:
        scores: ``[turns, K]`` of the turn with each response; finite, larger means likelier.
        followed: ``[turns]``.
        sources: ``[turns]``.
        permutations: random ones.
        seed: of the permutations.

    Raises:
        ValueError: a score isn't finite, shapes don't fit, or a query has no turn after one of its
            responses.
    """
    values = _scores(scores)
    count = values.shape[1]
    design = _Design.from_turns(_followed(followed, values), sources, count)
    tables = np.zeros((len(design.names), count, count))
    np.add.at(tables, (design.source, design.followed), design.weight[:, None] * count * values)
    return PermutationTest(
        *matched_permutation(tables, permutations=permutations, seed=seed), permutations
    )


# -- held-out scores ----------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """Log-scores of turns under a distribution fitted without their queries.

    Attributes:
        bits: ``[turns]`` log₂(K q_k), at most log₂ K, without a lower bound. Their mean
            (:func:`mean_over_queries`) is in expectation a lower bound on I_K, since q doesn't
            depend on the turns that it scores (Barber & Agakov 2003; cross-fitting: Chernozhukov
            et al. 2018, Econom. J. 21:C1). An estimate may be negative.
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
    folds: int = 5,
    seed: int = 0,
) -> HeldOut:
    """Bits that one fixed reader finds: q_k ∝ exp(β s_k), β fitted on other queries.

    For a reader's log-likelihoods, q_k ∝ p_k^β. The same reader makes temperatures, interventions
    and greedy turns comparable. What the β's differ by between two arms belongs to the arms.

    Args:
        scores: ``[turns, K]`` log-likelihoods in nats, or scores of any unit; finite, and a larger
            one means likelier.
        followed: ``[turns]``.
        sources: ``[turns]``; all turns of a query are in one fold.
        most: the largest β, of all folds or ``[folds]``.
        folds: how many; as many as queries where these are fewer.
        seed: of the folds, which depend on it and the set of queries alone.

    Returns:
        The held-out bits; ``fitted`` is ``[folds]`` β's (:func:`fit_beta`).

    Raises:
        ValueError: a score isn't finite, shapes don't fit, a query has no turn after one of its
            responses, there are fewer than two queries or folds.
    """
    values = _scores(scores)
    design = _Design.from_turns(_followed(followed, values), sources, values.shape[1])
    fold = design.folds(folds, seed)
    bits, betas = np.empty(len(values)), []
    largest = np.broadcast_to(most, fold.max() + 1)
    for number in range(fold.max() + 1):
        out = fold == number
        beta = fit_beta(values[~out], design.followed[~out], design.weight[~out])
        betas.append(min(beta, largest[number]))
        bits[out] = _own_bits(betas[-1] * values[out], design.followed[out])
    return HeldOut(bits, fold, np.array(betas))


def fit_beta(scores: np.ndarray, followed: np.ndarray, weight: np.ndarray) -> float:
    """The β ≥ 0 under which q_k ∝ exp(β s_k) gives the turns the largest likelihood.

    The log-likelihood is concave in β; it counts one turn more than there are, which followed each
    response with probability 1/K, so that β stays finite where every response was told right. 0
    where scores go against the responses, or don't differ.

    Args:
        scores: ``[turns, K]`` finite.
        followed: ``[turns]``.
        weight: ``[turns]`` of any sum.
    """
    centred = scores - scores.mean(1, keepdims=True)
    share = weight / weight.sum()
    kept = len(scores) / (len(scores) + 1)  # the rest is the turn that followed any response
    target = float(kept * share @ _at_followed(centred, followed))
    reach = float(np.abs(centred).max())

    def slope(beta: float) -> float:
        return target - float(share @ (softmax(beta * centred, axis=1) * centred).sum(1))

    if reach == 0 or slope(0.0) <= 0:
        return 0.0
    top = 1 / reach
    while slope(top) > 0:
        top *= 2
    return float(brentq(slope, 0, top, xtol=1e-10 * top))


def choice_bits(
    features: ArrayLike,
    followed: ArrayLike,
    sources: Iterable[Hashable],
    *,
    folds: int = 5,
    seed: int = 0,
) -> HeldOut:
    """Bits that features of turn and response find: a conditional logit over the K responses.

    q_k ∝ exp(b · x_k) (McFadden 1974, in *Frontiers in Econometrics*), b fitted on other queries by
    penalised maximum likelihood: a ridge on features in units of their spread within turns, chosen
    from :data:`RIDGES` by the held-out score in :data:`INNER` folds of those queries. Every query
    weighs the same.

    Args:
        features: ``[turns, K, features]`` finite, of the turn with each response; what doesn't
            differ between a turn's responses has no effect.
        followed: ``[turns]``.
        sources: ``[turns]``; all turns of a query are in one fold.
        folds: how many; as many as queries where these are fewer.
        seed: of the folds, the same as in :func:`readable_bits`.

    Returns:
        The held-out bits; ``fitted`` is ``[folds, features]`` coefficients in the features' units.

    Raises:
        ValueError: as :func:`readable_bits`; of three queries at least two are fitted on.
    """
    x = np.asarray(features, dtype=float)
    if x.ndim != 3 or x.shape[1] < 2:
        raise ValueError(f"features must be [turns, K, features] with K ≥ 2, not {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("features must be finite")
    design = _Design.from_turns(_followed(followed, x[:, :, :1]), sources, x.shape[1])
    fold = design.folds(folds, seed)
    if len(design.names) < 3:
        raise ValueError("a conditional logit needs at least three queries, to choose its ridge")
    x = x - x.mean(1, keepdims=True)
    bits, fitted = np.empty(len(x)), []
    for number in range(fold.max() + 1):
        out = fold == number
        train = design.only(~out)
        coefficients = _chosen_logit(x[~out], train, seed)
        fitted.append(coefficients)
        bits[out] = _own_bits(x[out] @ coefficients, design.followed[out])
    return HeldOut(bits, fold, np.array(fitted))


def _chosen_logit(x: np.ndarray, design: "_Design", seed: int) -> np.ndarray:
    """``[features]`` coefficients with the ridge that does best in inner folds.

    ``x [turns, K, features]`` is centred within turns.
    """
    scale = np.sqrt((x**2).mean((0, 1)))
    scale[scale == 0] = 1
    x = x / scale
    fold = design.folds(INNER, seed)
    scores = np.zeros(len(RIDGES))
    for number in range(fold.max() + 1):
        out = fold == number
        start = np.zeros(x.shape[2])
        for at in reversed(range(len(RIDGES))):  # each begins where the stronger one ended
            train = design.followed[~out], design.weight[~out]
            start = _logit(x[~out], *train, RIDGES[at], start)
            scores[at] += design.weight[out] @ _own_bits(x[out] @ start, design.followed[out])
    best = len(RIDGES) - 1 - int(scores[::-1].argmax())  # of equal ones the strongest
    whole = _logit(x, design.followed, design.weight, RIDGES[best], np.zeros(x.shape[2]))
    return whole / scale


def _logit(
    x: np.ndarray, followed: np.ndarray, weight: np.ndarray, ridge: float, start: np.ndarray
) -> np.ndarray:
    """``[features]`` coefficients of the conditional logit, by L-BFGS."""
    share = weight / weight.sum()
    chosen = share @ x[np.arange(len(x)), followed]
    flat = x.reshape(-1, x.shape[2])

    def loss(b: np.ndarray) -> tuple[float, np.ndarray]:
        log_q = log_softmax((flat @ b).reshape(x.shape[:2]), axis=1)
        expected = (share[:, None] * np.exp(log_q)).ravel() @ flat
        value = ridge / 2 * b @ b - share @ _at_followed(log_q, followed)
        return float(value), ridge * b - chosen + expected

    return minimize(loss, start, jac=True, method="L-BFGS-B").x


# -- what all share -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Design:
    """Which response and which query each turn belongs to.

    Attributes:
        followed: ``[turns]`` integers.
        source: ``[turns]`` numbers of the queries.
        names: of the queries, by number.
        weight: ``[turns]`` 1 / (K · turns after the same response); a query's sum to 1.
    """

    followed: np.ndarray
    source: np.ndarray
    names: list
    weight: np.ndarray

    @classmethod
    def from_turns(
        cls, followed: ArrayLike, sources: Iterable[Hashable], responses: int
    ) -> "_Design":
        own, labels = _indices(followed, responses), list(sources)
        index, count = source_index(labels)
        if len(index) != len(own):
            raise ValueError(f"{len(own)} turns but {len(index)} sources")
        if not count:
            raise ValueError("there are no turns")
        names = [
            label for _, label in sorted(dict(zip(index.tolist(), labels, strict=True)).items())
        ]
        cells = np.bincount(index * responses + own, minlength=count * responses)
        if not cells.all():
            query, response = divmod(int(cells.argmin()), responses)
            raise ValueError(
                f"query {names[query]!r} has no turn after response {response} of {responses}"
            )
        return cls(own, index, names, 1 / (responses * cells[index * responses + own]))

    def folds(self, folds: int, seed: int) -> np.ndarray:
        """``[turns]`` the fold of each turn's query; queries are dealt out in random order."""
        count = len(self.names)
        if min(folds, count) < 2:
            raise ValueError(f"{folds} folds of {count} queries: at least two of each are needed")
        order = np.random.default_rng(seed).permutation(count)
        return (order % min(folds, count))[self.source]

    def only(self, turns: np.ndarray) -> "_Design":
        """The same of the turns of some queries, ``[turns]`` true or false."""
        kept, source = np.unique(self.source[turns], return_inverse=True)
        names = [self.names[number] for number in kept]
        return _Design(self.followed[turns], source, names, self.weight[turns])


def _own_bits(scores: np.ndarray, followed: np.ndarray) -> np.ndarray:
    """``[turns]`` log₂(K q_k) of q ∝ exp(scores), exactly 0 for equal columns."""
    below = scores - scores.max(1, keepdims=True)
    return (_at_followed(below, followed) - np.log(np.exp(below).mean(1))) / LN2


def _at_followed(table: np.ndarray, followed: np.ndarray) -> np.ndarray:
    """``[turns]`` entries of ``[turns, K]`` at the response that was followed."""
    return table[np.arange(len(table)), followed]


def _logprobs(values: ArrayLike) -> np.ndarray:
    """``[turns, K]`` log-likelihoods that have a posterior, or ValueError."""
    found = np.asarray(values, dtype=float)
    if found.ndim != 2 or found.shape[1] < 2:
        raise ValueError(f"log-likelihoods must be [turns, K] with K ≥ 2, not {found.shape}")
    if np.isnan(found).any() or (found == np.inf).any():
        raise ValueError("log-likelihoods must not be NaN or +inf")
    impossible = np.flatnonzero((found == -np.inf).all(1))
    if len(impossible):
        raise ValueError(f"turn {impossible[0]} is impossible after every response")
    return found


def _scores(values: ArrayLike) -> np.ndarray:
    """``[turns, K]`` finite scores, or ValueError."""
    found = np.asarray(values, dtype=float)
    if found.ndim != 2 or found.shape[1] < 2:
        raise ValueError(f"scores must be [turns, K] with K ≥ 2, not {found.shape}")
    if not np.isfinite(found).all():
        raise ValueError("scores must be finite")
    return found


def _followed(followed: ArrayLike, table: np.ndarray) -> np.ndarray:
    """``[turns]`` indices of responses that fit a ``[turns, K, …]`` table, or ValueError."""
    own = _indices(followed, table.shape[1])
    if len(own) != len(table):
        raise ValueError(f"{len(table)} turns but {len(own)} responses followed")
    return own


def _indices(followed: ArrayLike, responses: int) -> np.ndarray:
    """``[turns]`` integers from 0 to K − 1, or ValueError."""
    own = np.asarray(followed)
    if own.ndim != 1 or (own.size and own.dtype.kind not in "iu"):
        raise ValueError("followed must be [turns] integers")
    own = own.astype(np.intp)
    if own.size and not (own.min() >= 0 and own.max() < responses):
        raise ValueError(f"followed must lie between 0 and {responses - 1}")
    return own
