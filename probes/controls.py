"""Baselines, with which a probe on hidden states is compared.

A probe shows something about hidden states only if it reads more than the context's text, its
length, its dataset, and the model's own next-token distribution tell. Baselines are matrices of
features. They are made without labels, so that document frequencies and standardisation may use all
contexts: that can only help a baseline.

To add a control, make a :class:`Baseline` of the :class:`probes.dataset.ProbeSet` and enter it in
:func:`controls_of`: under ``text`` if it reads the conversation, under ``output`` if it reads the
model's next-token distribution. All controls of one kind, side by side, are one block of the base
that hidden states have to add to (:mod:`probes.fit.beyond`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from ia_mech.lens import Lens, NoLens
from probes.dataset import ENDS, ProbeSet

_CONSTANT = 1e-6  # a column that varies less, relative to its size, varies by rounding only
_RANK = 1e-12  # eigenvalues below this share of the largest are rounding
_TERMS = {"token_pattern": r"\b\w+\b", "ngram_range": (1, 2), "sublinear_tf": True}
_TOPICS = 100  # dimensions of latent semantic analysis
_VALUES = 2**23  # most logits held at a time: 32 MiB, and twice as much for their summaries
_MOST_LIKELY = 10
HEADER_LAST = "header_last"  # where the first token of the user turn is predicted


@dataclass(frozen=True)
class Baseline:
    """Features of contexts, which are probed in place of hidden states."""

    name: str  # short, for tables
    features: np.ndarray  # [contexts, features] float64, at least one column
    what: str  # one line that says what they are


@dataclass(frozen=True)
class Controls:
    text: list[Baseline] = field(default_factory=list)  # made from the conversations
    output: list[Baseline] = field(default_factory=list)  # made from the model's output
    missing: list[str] = field(default_factory=list)  # a sentence on each missing control


# -- text ------------------------------------------------------------------------------------------


def lsa(texts: Sequence[str]) -> Baseline:
    """Latent semantic analysis (Deerwester et al. 1990): the largest principal coordinates of the
    sublinear TF-IDF of words and word pairs, scaled to length 1 for each context.

    The coordinates are U√s of the eigendecomposition U s Uᵀ of the terms' Gram matrix; a truncated
    singular value decomposition of the sparse matrix of terms would give the same. Terms that occur
    in one context only are left out, unless there are no others. Single digits and letters count as
    words.
    """
    what = "latent semantic analysis of the context's words and word pairs"
    if not any(re.search(r"\w", text) for text in texts):
        return Baseline("text", np.zeros((len(texts), 1)), what)
    try:
        terms = TfidfVectorizer(**_TERMS, min_df=2).fit_transform(texts)
    except ValueError:  # no term occurs in two contexts
        terms = TfidfVectorizer(**_TERMS, min_df=1).fit_transform(texts)
    values, vectors = np.linalg.eigh((terms @ terms.T).toarray())
    kept = np.flatnonzero(values > _RANK * values[-1])[::-1][:_TOPICS]
    topics = vectors[:, kept] * np.sqrt(values[kept])
    length = np.linalg.norm(topics, axis=1, keepdims=True)
    return Baseline("text", np.divide(topics, length, out=topics, where=length > 0), what)


def lengths(
    prompt_tokens: ArrayLike,
    response_tokens: ArrayLike,
    context_tokens: ArrayLike,
    unfinished: ArrayLike,
) -> Baseline:
    """Logs of three lengths in tokens, the squares of these, and whether the response is unfinished
    (it reached the limit of tokens, or ended within its thought).

    Each argument is ``[contexts]``.
    """
    tokens = np.column_stack([prompt_tokens, response_tokens, context_tokens])
    logs = _standardised(np.log1p(tokens.astype(float)))  # a response may be empty
    features = _standardised(np.column_stack([logs, logs**2, unfinished]))
    return Baseline("lengths", features, "lengths of prompt, response and context; finished or not")


def dataset_id(datasets: ArrayLike, runs: ArrayLike) -> Baseline:
    """The pairs of run and dataset as one-hot columns; one constant column for a single pair."""
    pairs = pd.MultiIndex.from_arrays([np.asarray(runs), np.asarray(datasets)])
    index, unique = pd.factorize(pairs, sort=True)
    features = np.eye(len(unique))[index] if len(unique) > 1 else np.zeros((len(index), 1))
    return Baseline("dataset", features, "which run and dataset the context is from")


# -- the model's output ----------------------------------------------------------------------------


def output_state(lens: Lens, residual: Tensor) -> Baseline:
    """The output state: the last layer after the final norm.

    Every next-token logit is linear in it (up to a softcap), so that a probe of it can read
    whatever the model is about to say.

    Args:
        lens: of the model.
        residual: ``[contexts, d_model]`` last layer at ``header_last``, before the final norm.
    """
    features = lens.norm(residual).double().numpy()
    return Baseline("output", features, "the model's output state, final_norm(last layer)")


def output_summaries(
    lens: Lens,
    residual: Tensor,
    turn_end_ids: Sequence[int],
    temperatures: Sequence[float],
) -> Baseline:
    """Summaries of the next-token distribution, standardised; constant ones are left out.

    At T = 1: entropy, log-probability of the top token, probability of the top ten, and
    log-probability of ending the turn at once, if some tokens end it. At each other temperature
    (above 0): entropy. All are in nats.

    Args:
        lens, residual: as for :func:`output_state`.
        turn_end_ids: the tokens that end a turn.
        temperatures: of the run's turns.
    """
    others = [t for t in dict.fromkeys(temperatures) if t != 1]
    step = max(1, _VALUES // len(lens.unembedding))
    chunks = [
        _summaries(
            torch.cat(list(lens.logits_in_slices(rows)), dim=-1), sorted(set(turn_end_ids)), others
        )
        for rows in residual.split(step)
    ]
    features = _standardised(torch.cat(chunks).double().numpy())
    what = "entropy, top tokens and turn-end mass of the model's next-token distribution"
    return Baseline("output summaries", features, what)


def _standardised(columns: np.ndarray) -> np.ndarray:
    """The columns that vary, with mean 0 and variance 1; a column of zeros if none varies."""
    deviation = columns.std(axis=0)
    varies = deviation > _CONSTANT * np.abs(columns).max(axis=0)
    if not varies.any():
        return np.zeros((len(columns), 1))
    kept = columns[:, varies]
    return (kept - kept.mean(axis=0)) / deviation[varies]


def _summaries(logits: Tensor, turn_end_ids: list[int], temperatures: list[float]) -> Tensor:
    """``[contexts, summaries]`` of ``[contexts, vocab]`` logits, see :func:`output_summaries`."""
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


# -- all controls of a probe set -------------------------------------------------------------------


def controls_of(data: ProbeSet) -> Controls:
    """The controls of contexts: text baselines and, where it can be had, the output.

    Raises:
        UserError: hidden states can't be read.
    """
    frame = data.contexts
    text = [
        lsa(frame["text"].tolist()),
        lengths(
            frame["prompt_tokens"],
            frame["response_tokens"],
            frame["context_tokens"],
            frame["unfinished"],
        ),
        dataset_id(frame["dataset"], frame["run"]),
    ]
    missing = []
    output, why = _output(data)
    if why is not None:
        missing.append(f"no output control, so nothing can be said to go beyond it: {why}")
    if not data.has_ends:
        missing.append(
            f"no states at {' and '.join(ENDS)}, so nothing can be said to go beyond them: some "
            "runs did not keep them, or some contexts lack them"
        )
    return Controls(text, output, missing)


def _output(data: ProbeSet) -> tuple[list[Baseline], str | None]:
    """The output state and its summaries; or, without these, the reason why they are missing."""
    runs = [data.runs[number] for number in data.contexts["run"].unique()]
    if lacking := [run for run in runs if HEADER_LAST not in run.positions]:
        return [], f"{HEADER_LAST} was not kept in {lacking[0].name}"
    if opened := [run for run in runs if run.settings["opening"] is not None]:
        return [], f"{HEADER_LAST} doesn't predict turns that go on from words ({opened[0].name})"
    try:
        lens = Lens.load(runs[0].model["weights_hash"])
    except NoLens as missing:
        return [], str(missing)
    last = torch.from_numpy(data.at(runs[0].layers[-1], HEADER_LAST))
    ends = {int(token) for run in runs for token in run.record["identity"]["chat"]["stop_ids"]}
    temperatures = {t for run in runs for t in run.settings["temperatures"] if t > 0}
    summaries = output_summaries(lens, last, sorted(ends), sorted(temperatures))
    return [output_state(lens, last), summaries], None
