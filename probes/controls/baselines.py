"""What a probe could read without any awareness in the hidden state: baselines as feature matrices.

A probe on hidden states shows something only beyond what the same probe reads from the context's
text, its length, its dataset, an untrained encoder, or the model's own next-token distribution.
None of these functions sees a label, so all contexts may take part in document frequencies and
standardisation: it can only help a baseline.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.sparse import csr_array
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from ia_mech.lens import Lens

_CONSTANT = 1e-6  # a column that varies less, relative to its size, varies by round-off only
_RANK = 1e-12  # eigenvalues below this share of the largest are round-off
_VALUES = 2**23  # most logits held at a time: 32 MiB, three times over with what is made from them
_MOST_LIKELY = 10


@dataclass(frozen=True)
class Baseline:
    """Features of contexts to be probed in place of hidden states.

    Attributes:
        name: short, for tables.
        features: ``[contexts, features]`` float64, at least one column.
        what: one line that says what they are.
    """

    name: str
    features: np.ndarray
    what: str


def tfidf(texts: Sequence[str]) -> Baseline:
    """TF-IDF of words and word pairs, sublinear, over all contexts.

    Linear methods need inner products only. The features are therefore coordinates
    ``[contexts, rank]`` with the same Gram matrix as the sparse matrix of terms, exactly: U√s of
    its eigendecomposition U s Uᵀ. Terms of a single context are left out unless there are no
    others; single digits and letters count as words.
    """
    what = "TF-IDF of the context's words and word pairs"
    if not any(re.search(r"\w", text) for text in texts):
        return Baseline("tfidf", np.zeros((len(texts), 1)), what)
    try:
        terms = _vectorizer(min_df=2).fit_transform(texts)
    except ValueError:  # no term occurs in two contexts
        terms = _vectorizer(min_df=1).fit_transform(texts)
    values, vectors = np.linalg.eigh((terms @ terms.T).toarray())
    kept = values > _RANK * values[-1]
    # The largest come first, as in principal components.
    return Baseline("tfidf", (vectors[:, kept] * np.sqrt(values[kept]))[:, ::-1].copy(), what)


def lengths(
    prompt_tokens: ArrayLike,
    response_tokens: ArrayLike,
    context_tokens: ArrayLike,
    cut_off: ArrayLike,
) -> Baseline:
    """Logs of three lengths, their squares, and whether the response was cut off.

    Args:
        prompt_tokens, response_tokens, context_tokens: ``[contexts]`` numbers of tokens.
        cut_off: ``[contexts]`` whether the response ended at the limit of tokens.

    Raises:
        ValueError: a length is negative or missing, or there is not one entry per context.
    """
    columns = [np.asarray(c, float) for c in (prompt_tokens, response_tokens, context_tokens)]
    cut = np.asarray(cut_off, float)
    if len({c.shape for c in (*columns, cut)}) > 1 or cut.ndim != 1:
        raise ValueError("lengths and cut_off must have one entry per context")
    if not all((c >= 0).all() for c in columns):
        raise ValueError("lengths must be 0 or more")
    logs = _standardised(np.log1p(np.stack(columns, axis=1)))  # a response may be empty
    features = _standardised(np.column_stack([logs, logs**2, cut]))
    return Baseline("lengths", features, "lengths of prompt, response and context; cut off or not")


def dataset_id(datasets: ArrayLike, runs: ArrayLike) -> Baseline:
    """One-hot of the pairs of run and dataset; a constant column if there is only one pair.

    Args:
        datasets: ``[contexts]`` name of the dataset of each.
        runs: ``[contexts]`` run of each.
    """
    pairs = pd.MultiIndex.from_arrays([np.asarray(runs), np.asarray(datasets)])
    index, unique = pd.factorize(pairs, sort=True)
    features = np.eye(len(unique))[index] if len(unique) > 1 else np.zeros((len(index), 1))
    return Baseline("dataset", features, "which run and dataset the context is from")


def random_projection(token_ids: Sequence[ArrayLike], width: int, seed: int) -> Baseline:
    """An untrained encoder: the mean over a context's tokens of random vectors of unit size.

    The vector of a token, Gaussian with variance 1 / width, is a function of seed and token id
    alone, whatever else occurs. Random encoders: Wieting & Kiela, "No training required", ICLR
    2019 (arXiv 1901.10444).

    Args:
        token_ids: per context, its ``[tokens]`` ids.
        width: d_model of the model that is probed.
        seed: 0 or more.

    Raises:
        ValueError: a context has no tokens.
    """
    sizes = np.array([len(ids) for ids in token_ids])
    if not sizes.all():
        raise ValueError("a context has no tokens")
    unique, column = np.unique(np.concatenate(list(token_ids)), return_inverse=True)
    row = np.repeat(np.arange(len(sizes)), sizes)
    # Duplicate entries add up: each is a token's share of its context.
    share = csr_array((1 / sizes[row], (row, column)), shape=(len(sizes), len(unique))).tocsc()
    features = np.zeros((len(sizes), width))
    step = max(1, _VALUES // width)  # vectors of a whole vocabulary would take gigabytes
    for start in range(0, len(unique), step):
        ids = unique[start : start + step]
        vectors = [np.random.default_rng((seed, int(i))).standard_normal(width) for i in ids]
        features += share[:, start : start + step] @ (np.stack(vectors) / np.sqrt(width))
    return Baseline("random", features, f"mean of random token vectors, {width} wide (untrained)")


def output_state(lens: Lens, residual: Tensor | np.ndarray) -> Baseline:
    """The final norm of the last layer: the model's own output distribution, linearly.

    Every next-token logit is linear in it (up to a softcap), so that a probe on it reads whatever
    the model is about to say. What an earlier layer knows and this doesn't tell is latent.

    Args:
        lens: of the model.
        residual: ``[contexts, d_model]`` last layer at ``header_last``, before the final norm.

    Raises:
        ValueError: the residual is not finite.
    """
    features = lens.norm(_finite(residual)).double().numpy()
    return Baseline("output", features, "the model's output state, final_norm(last layer)")


def output_summaries(
    lens: Lens,
    residual: Tensor | np.ndarray,
    turn_end_ids: Sequence[int],
    temperatures: Sequence[float],
) -> Baseline:
    """Cheap summaries of the next-token distribution, standardised; constant ones are dropped.

    At T = 1: entropy, log-probability of the top token, probability of the top ten, and
    log-probability of ending the turn at once. At each other temperature: entropy. All in nats.

    Args:
        lens: of the model.
        residual: ``[contexts, d_model]`` last layer at ``header_last``, before the final norm.
        turn_end_ids: tokens that end a turn; if there are none, that summary is left out.
        temperatures: those the run was sampled at, above 0.

    Raises:
        ValueError: a temperature is not above 0, or the residual is not finite.
    """
    if not all(0 < t < np.inf for t in temperatures):
        raise ValueError("temperatures must be above 0")
    others = [t for t in dict.fromkeys(temperatures) if t != 1]
    step = max(1, _VALUES // len(lens.unembedding))
    chunks = [
        _summaries(
            torch.cat(list(lens.logits_in_slices(rows)), dim=-1), sorted(set(turn_end_ids)), others
        )
        for rows in _finite(residual).split(step)
    ]
    features = _standardised(torch.cat(chunks).double().numpy())
    what = "entropy, top tokens and turn-end mass of the model's next-token distribution"
    return Baseline("output summaries", features, what)


def _vectorizer(min_df: int) -> TfidfVectorizer:
    return TfidfVectorizer(
        token_pattern=r"\b\w+\b", ngram_range=(1, 2), sublinear_tf=True, min_df=min_df
    )


def _standardised(columns: np.ndarray) -> np.ndarray:
    """``[contexts, varying]`` of mean 0 and variance 1; a column of zeros if none varies."""
    deviation = columns.std(axis=0)
    varies = deviation > _CONSTANT * np.abs(columns).max(axis=0)
    if not varies.any():
        return np.zeros((len(columns), 1))
    kept = columns[:, varies]
    return (kept - kept.mean(axis=0)) / deviation[varies]


def _finite(residual: Tensor | np.ndarray) -> Tensor:
    residual = torch.as_tensor(residual).detach()
    if not residual.isfinite().all():
        raise ValueError("the residual stream has NaN or infinite values")
    return residual


def _summaries(logits: Tensor, turn_end_ids: list[int], temperatures: list[float]) -> Tensor:
    """``[contexts, summaries]`` of ``[contexts, vocab]``, at T = 1 and entropies at the others."""
    total = logits.logsumexp(-1)
    top = logits.topk(min(_MOST_LIKELY, logits.shape[-1])).values - total[:, None]
    columns = [_entropy(logits), top[:, 0], top.exp().sum(-1)]
    if turn_end_ids:
        columns.append(logits[:, turn_end_ids].logsumexp(-1) - total)
    columns += [_entropy(logits / t) for t in temperatures]
    return torch.stack(columns, dim=-1)


def _entropy(logits: Tensor) -> Tensor:
    # log Z − E[logit] needs no logarithm of a probability that underflowed.
    shifted = logits - logits.amax(-1, keepdim=True)
    probability = shifted.softmax(-1)
    return shifted.logsumexp(-1) - torch.einsum("cv,cv->c", probability, shifted)
