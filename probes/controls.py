"""What a probe on hidden states is compared with: baselines, and a control task.

A probe on hidden states shows something only beyond what can be read from the context's text, its
length, its dataset, or the model's own next-token distribution. Baselines are feature matrices and
are made without any label, so all contexts may take part in document frequencies and
standardisation: that can only help a baseline.

The control task (Hewitt & Liang, "Designing and interpreting probes with control tasks", EMNLP
2019, arXiv 1909.03368) is an outcome that is a random function of the input's type. A probe that
predicts it as well as the real target shows its own capacity, not the model's knowledge;
selectivity is the difference. A type must recur in other sources, or nothing could be learnt across
folds: here it is the length of the response and its first token.

To add a control, make a :class:`Baseline` of the :class:`probes.dataset.ProbeSet` and enter it in
:func:`controls_of`: under ``text`` if it reads the conversation, under ``output`` if it reads the
model's next-token distribution. The controls of either kind, side by side, are a block of the
readout that hidden states have to add to (:mod:`probes.fit.beyond`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.linalg import block_diag
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from ia_mech.lens import Lens, NoLens
from ia_mech.run import Run
from probes.dataset import ProbeSet
from probes.targets import Outcome

_CONSTANT = 1e-6  # a column that varies less, relative to its size, varies by round-off only
_RANK = 1e-12  # eigenvalues below this share of the largest are round-off
_TOPICS = 100  # dimensions of latent semantic analysis
_VALUES = 2**23  # most logits held at a time: 32 MiB, three times over with what is made from them
_MOST_LIKELY = 10
_OPENINGS = 8  # openings that are told apart; the rarer ones are one
_TRIES = 10_000
HEADER_LAST = "header_last"  # where the first token of the user turn is predicted


@dataclass(frozen=True)
class Baseline:
    """Features of contexts, probed in place of hidden states.

    Attributes:
        name: short, for tables.
        features: ``[contexts, features]`` float64, at least one column.
        what: one line that says what they are.
    """

    name: str
    features: np.ndarray
    what: str


@dataclass(frozen=True)
class Controls:
    """What the headline is compared with.

    Attributes:
        text: what a probe could read from the contexts themselves.
        output: the model's own output distribution; empty where it isn't available.
        types: ``[contexts]`` types of the control task; None where there aren't two.
        missing: why a control is missing, one sentence each.
    """

    text: list[Baseline] = field(default_factory=list)
    output: list[Baseline] = field(default_factory=list)
    types: np.ndarray | None = None
    missing: list[str] = field(default_factory=list)


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
        terms = _vectorizer(min_df=2).fit_transform(texts)
    except ValueError:  # no term occurs in two contexts
        terms = _vectorizer(min_df=1).fit_transform(texts)
    values, vectors = np.linalg.eigh((terms @ terms.T).toarray())
    kept = np.flatnonzero(values > _RANK * values[-1])[::-1][:_TOPICS]
    topics = vectors[:, kept] * np.sqrt(values[kept])
    length = np.linalg.norm(topics, axis=1, keepdims=True)
    return Baseline("text", np.divide(topics, length, out=topics, where=length > 0), what)


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


# -- the model's output ----------------------------------------------------------------------------


def output_state(lens: Lens, residual: Tensor | np.ndarray) -> Baseline:
    """The final norm of the last layer: the model's own output distribution, linearly.

    Every next-token logit is linear in it (up to a softcap), so that a probe on it reads whatever
    the model is about to say. What only an earlier layer shows is latent.

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


# -- the control task ------------------------------------------------------------------------------


def types(response_tokens: ArrayLike, opening: ArrayLike) -> np.ndarray:
    """Quartile of the response's length × its first token.

    Args:
        response_tokens: ``[contexts]`` lengths.
        opening: ``[contexts]`` id of the response's first token, -1 if it has none. The eight most
            common are told apart (the smaller id first, if equally common).

    Returns:
        ``[contexts]`` types, numbered from 0 without gaps.

    Raises:
        ValueError: lengths and openings differ in number.
    """
    tokens, opening = np.asarray(response_tokens, dtype=float), np.asarray(opening)
    if tokens.shape != opening.shape or tokens.ndim != 1:
        raise ValueError("response_tokens and opening must have one entry per context")
    length = np.searchsorted(np.quantile(tokens, [0.25, 0.5, 0.75]), tokens)
    _, index, counts = np.unique(opening, return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), dtype=int)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    kind = length * (_OPENINGS + 1) + np.minimum(rank[index], _OPENINGS)
    return np.unique(kind, return_inverse=True)[1]


def control_outcomes(outcome: Outcome, types: ArrayLike, draws: int, seed: int) -> list[Outcome]:
    """Outcomes where every type has a random rate, and nothing else counts.

    A type's rate is that of a random context, so that rates are distributed as in the real outcome.
    Trials, sources and runs stay as they are; positives may be fractions. Rates that differ in no
    run, which would leave nothing to predict, are drawn again.

    Args:
        outcome: the real one.
        types: ``[contexts]`` type of each, numbered from 0.
        draws: how many.
        seed: of the generator; the first outcomes are the same however many are drawn.

    Raises:
        ValueError: no run has two types, all contexts have the same rate, or almost all have it so
            that no draw has two.
    """
    types = np.asarray(types)
    if types.shape != outcome.trials.shape:
        raise ValueError("types must have one entry per context")
    in_runs = [np.unique(types[outcome.runs == run]) for run in np.unique(outcome.runs)]
    if all(len(present) < 2 for present in in_runs):
        raise ValueError("a control task needs two types of contexts in a run; there is only one")
    if np.ptp(outcome.rate) == 0:
        raise ValueError("a control task needs contexts with different rates; all have the same")
    rng = np.random.default_rng(seed)
    return [_draw(outcome, types, in_runs, rng) for _ in range(draws)]


def _draw(
    outcome: Outcome, types: np.ndarray, in_runs: list[np.ndarray], rng: np.random.Generator
) -> Outcome:
    for _ in range(_TRIES):
        drawn = rng.integers(len(outcome), size=types.max() + 1)  # a context for every type
        rate = outcome.rate[drawn]
        if any(np.ptp(rate[present]) > 0 for present in in_runs):
            row = drawn[types]
            # Multiplied first: whole numbers where both contexts have equally many trials.
            positives = outcome.positives[row] * outcome.trials / outcome.trials[row]
            return replace(outcome, positives=positives)
    raise ValueError(f"no two types got different rates in {_TRIES} draws: almost all are the same")


# -- all controls of a probe set -------------------------------------------------------------------


def controls_of(data: ProbeSet, seed: int = 0) -> Controls:
    """Text baselines, the output distribution, and types for the control task.

    Args:
        data: contexts and hidden states.
        seed: of the control task.

    Raises:
        UserError: hidden states can't be read.
    """
    frame = data.contexts
    given = data.embeddings
    text = [
        lsa(frame["text"].tolist())
        if given is None
        else Baseline("text", _standardised(given), "the given embeddings of the context"),
        lengths(
            frame["prompt_tokens"],
            frame["response_tokens"],
            frame["context_tokens"],
            frame["cut_off"],
        ),
        dataset_id(frame["dataset"], frame["run"]),
    ]
    missing = []
    output, why = _output(data)
    if why is not None:
        missing.append(f"no output control, so nothing can be said to go beyond it: {why}")
    text, output = (
        [replace(one, features=data.comparable(one.features)) for one in those]
        for those in (text, output)
    )
    kinds = types(frame["response_tokens"], frame["opening"])
    try:
        control_outcomes(data.outcome, kinds, 1, seed)
    except ValueError as error:
        missing.append(f"no control task, so no selectivity: {error}")
        return Controls(text, output, None, missing)
    return Controls(text, output, kinds, missing)


def lens_of(run: Run) -> tuple[Lens | None, str | None]:
    """The lens of a run's model; or None, and why there is none.

    Raises:
        UserError: its file is damaged.
    """
    try:
        return Lens.load(run.model["weights_hash"]), None
    except NoLens as missing:
        return None, str(missing)


def _output(data: ProbeSet) -> tuple[list[Baseline], str | None]:
    """The state that all next-token logits are linear in, and summaries; or why there are none."""
    of_model: dict[str, list[int]] = {}
    for number in data.contexts["run"].unique():
        of_model.setdefault(data.runs[number].model["weights_hash"], []).append(number)
    order, states, summaries = [], [], []
    for numbers in of_model.values():
        runs = [data.runs[number] for number in numbers]
        lacking = [run for run in runs if HEADER_LAST not in run.positions]
        if lacking:
            return [], f"{HEADER_LAST} was not kept in {lacking[0].path}"
        lens, why = lens_of(runs[0])
        if lens is None:
            return [], why
        last = np.concatenate(
            [data.states(n, data.runs[n].layers[-1], HEADER_LAST) for n in numbers]
        )
        ends = {int(token) for run in runs for token in run.record["identity"]["chat"]["stop_ids"]}
        temperatures = {t for run in runs for t in run.settings["temperatures"] if t > 0}
        states.append(output_state(lens, last))
        summaries.append(output_summaries(lens, last, sorted(ends), sorted(temperatures)))
        order += [np.flatnonzero(data.contexts["run"] == number) for number in numbers]
    back = np.argsort(np.concatenate(order), kind="stable")
    return [_stacked(states, back), _stacked(summaries, back)], None


def _stacked(parts: list[Baseline], order: np.ndarray) -> Baseline:
    """One baseline of several models' rows; each model has columns of its own.

    A direction in one model's output needn't mean the same in another's: with shared columns one
    set of weights would have to fit all models, and the control would be weaker than the output.
    """
    blocks = block_diag(*(part.features - part.features.mean(0) for part in parts))
    return replace(parts[0], features=blocks[order])
