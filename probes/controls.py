"""What a probe on hidden states is compared with: baselines.

A probe on hidden states shows something only beyond what can be read from the context's text, its
length, its dataset, or the model's own next-token distribution. Baselines are feature matrices and
are made without any label, so all contexts may take part in document frequencies and
standardisation: that can only help a baseline.

To add a control, make a :class:`Baseline` of the :class:`probes.dataset.ProbeSet` and enter it in
:func:`controls_of`: under ``text`` if it reads the conversation, under ``output`` if it reads the
model's next-token distribution. The controls of either kind, side by side, are a block of the
readout that hidden states have to add to (:mod:`probes.fit.beyond`).
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

_CONSTANT = 1e-6  # a column that varies less, relative to its size, varies by round-off only
_RANK = 1e-12  # eigenvalues below this share of the largest are round-off
_TERMS = {"token_pattern": r"\b\w+\b", "ngram_range": (1, 2), "sublinear_tf": True}
_TOPICS = 100  # dimensions of latent semantic analysis
_VALUES = 2**23  # most logits held at a time: 32 MiB, three times over with what is made from them
_MOST_LIKELY = 10
HEADER_LAST = "header_last"  # where the first token of the user turn is predicted


@dataclass(frozen=True)
class Baseline:
    """Features of contexts, probed in place of hidden states."""

    name: str  # short, for tables
    features: np.ndarray  # [contexts, features] float64, at least one column
    what: str  # one line that says what they are


@dataclass(frozen=True)
class Controls:
    text: list[Baseline] = field(default_factory=list)  # what the contexts themselves tell
    output: list[Baseline] = field(default_factory=list)  # the model's own output distribution
    missing: list[str] = field(default_factory=list)  # why one is missing, a sentence each


# -- text ------------------------------------------------------------------------------------------


def lsa(texts: Sequence[str]) -> Baseline:
    """Latent semantic analysis (Deerwester et al. 1990): the largest principal coordinates of
    TF-IDF of words and word pairs, sublinear, every context's of length 1.

    They are U√s of the eigendecomposition U s Uᵀ of the terms' Gram matrix, as a truncated singular
    value decomposition of the sparse matrix of terms would give. Terms of a single context are left
    out unless there are no others; single digits and letters count as words.
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
    """Logs of three lengths in tokens, their squares, and whether the response is unfinished (ended
    at the limit of tokens, or within its thought); ``[contexts]`` each."""
    tokens = np.column_stack([prompt_tokens, response_tokens, context_tokens])
    logs = _standardised(np.log1p(tokens.astype(float)))  # a response may be empty
    features = _standardised(np.column_stack([logs, logs**2, unfinished]))
    return Baseline("lengths", features, "lengths of prompt, response and context; finished or not")


def dataset_id(datasets: ArrayLike, runs: ArrayLike) -> Baseline:
    """One-hot of the pairs of run and dataset; a constant column if there is only one pair."""
    pairs = pd.MultiIndex.from_arrays([np.asarray(runs), np.asarray(datasets)])
    index, unique = pd.factorize(pairs, sort=True)
    features = np.eye(len(unique))[index] if len(unique) > 1 else np.zeros((len(index), 1))
    return Baseline("dataset", features, "which run and dataset the context is from")


# -- the model's output ----------------------------------------------------------------------------


def output_state(lens: Lens, residual: Tensor) -> Baseline:
    """The final norm of the last layer: the model's own output distribution, linearly.

    Every next-token logit is linear in it (up to a softcap), so that a probe on it reads whatever
    the model is about to say. What only an earlier layer shows is latent.

    ``residual``: ``[contexts, d_model]`` last layer at ``header_last``, before the final norm.
    """
    features = lens.norm(residual).double().numpy()
    return Baseline("output", features, "the model's output state, final_norm(last layer)")


def output_summaries(
    lens: Lens,
    residual: Tensor,
    turn_end_ids: Sequence[int],
    temperatures: Sequence[float],
) -> Baseline:
    """Cheap summaries of the next-token distribution, standardised; constant ones are dropped.

    At T = 1: entropy, log-probability of the top token, probability of the top ten, and
    log-probability of ending the turn at once, if there are tokens that do. At each other
    temperature (above 0): entropy. All in nats. ``residual`` is as :func:`output_state` takes it.
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
    """``[contexts, varying]`` of mean 0 and variance 1; a column of zeros if none varies."""
    deviation = columns.std(axis=0)
    varies = deviation > _CONSTANT * np.abs(columns).max(axis=0)
    if not varies.any():
        return np.zeros((len(columns), 1))
    kept = columns[:, varies]
    return (kept - kept.mean(axis=0)) / deviation[varies]


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


# -- all controls of a probe set -------------------------------------------------------------------


def controls_of(data: ProbeSet) -> Controls:
    """Text baselines and the output distribution.

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
    """The state that all next-token logits are linear in, and summaries; or why there are none."""
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
