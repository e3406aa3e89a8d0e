"""What a probe on hidden states is compared with: baselines, and a control task.

A probe on hidden states shows something only beyond what can be read from the context's text, its
length, its dataset, or the model's own next-token distribution. Baselines are feature matrices and
are made without any label, so all contexts may take part in document frequencies and
standardisation: that can only help a baseline.

The control task (Hewitt & Liang, "Designing and interpreting probes with control tasks", EMNLP
2019, arXiv 1909.03368) is an outcome that is a random function of the input's type. A probe that
predicts it as well as the real target shows its own capacity, not the model's knowledge;
selectivity is the difference. A type must recur in other sources, or nothing could be learnt across
folds: here it is length and opening, of the response and of the query.

To add a control, make a :class:`Baseline` of the :class:`probes.dataset.ProbeSet` and enter it in
:func:`controls_of`: under ``text`` if it reads the conversation, under ``output`` if it reads the
model's next-token distribution. The controls of either kind, side by side, are a block of the
readout that hidden states have to add to (:mod:`probes.fit.beyond`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.special import expit, logit
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor

from ia_mech.lens import Lens, NoLens
from probes.dataset import ENDS, ProbeSet
from probes.targets import Outcome

_CONSTANT = 1e-6  # a column that varies less, relative to its size, varies by round-off only
_RANK = 1e-12  # eigenvalues below this share of the largest are round-off
_TOPICS = 100  # dimensions of latent semantic analysis
_VALUES = 2**23  # most logits held at a time: 32 MiB, three times over with what is made from them
_MOST_LIKELY = 10
_OPENINGS = 8  # openings that are told apart; the rarer ones are one
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
class TextTypes:
    """What the control task's random functions are of.

    Attributes:
        response: ``[contexts]`` type of each response, numbered from 0.
        query: ``[contexts]`` type of each query, likewise; the same for all responses to a query.
    """

    response: np.ndarray
    query: np.ndarray


@dataclass(frozen=True)
class Controls:
    """What the headline is compared with.

    Attributes:
        text: what a probe could read from the contexts themselves.
        output: the model's own output distribution; empty where it isn't available.
        types: of the control task; None where there is none.
        missing: why a control is missing, one sentence each.
    """

    text: list[Baseline] = field(default_factory=list)
    output: list[Baseline] = field(default_factory=list)
    types: TextTypes | None = None
    missing: list[str] = field(default_factory=list)

    def within(self, centred: Callable[[np.ndarray], np.ndarray]) -> "Controls":
        """Of contexts that are compared within their source: baselines without its level, and no
        control task, whose random functions are of queries, too."""

        def each(baselines: list[Baseline]) -> list[Baseline]:
            return [replace(one, features=centred(one.features)) for one in baselines]

        return replace(self, text=each(self.text), output=each(self.output), types=None)


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
    unfinished: ArrayLike,
) -> Baseline:
    """Logs of three lengths, their squares, and whether the response is unfinished.

    Args:
        prompt_tokens, response_tokens, context_tokens: ``[contexts]`` numbers of tokens.
        unfinished: ``[contexts]`` whether the response ended at the limit of tokens, or within its
            thought.
    """
    tokens = np.column_stack([prompt_tokens, response_tokens, context_tokens])
    logs = _standardised(np.log1p(tokens.astype(float)))  # a response may be empty
    features = _standardised(np.column_stack([logs, logs**2, unfinished]))
    return Baseline("lengths", features, "lengths of prompt, response and context; finished or not")


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


def output_state(lens: Lens, residual: Tensor) -> Baseline:
    """The final norm of the last layer: the model's own output distribution, linearly.

    Every next-token logit is linear in it (up to a softcap), so that a probe on it reads whatever
    the model is about to say. What only an earlier layer shows is latent.

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
    """Cheap summaries of the next-token distribution, standardised; constant ones are dropped.

    At T = 1: entropy, log-probability of the top token, probability of the top ten, and
    log-probability of ending the turn at once. At each other temperature: entropy. All in nats.

    Args:
        lens: of the model.
        residual: ``[contexts, d_model]`` last layer at ``header_last``, before the final norm.
        turn_end_ids: tokens that end a turn; if there are none, that summary is left out.
        temperatures: those the run was sampled at, above 0.
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


def text_types(tokens: ArrayLike, opening: ArrayLike) -> np.ndarray:
    """Quartile of a text's length × its opening.

    Args:
        tokens: ``[contexts]`` lengths.
        opening: ``[contexts]`` what each begins with, as a number. The eight most common are told
            apart (the smaller number first, if equally common).

    Returns:
        ``[contexts]`` types, numbered from 0 without gaps.
    """
    tokens = np.asarray(tokens, dtype=float)
    length = np.searchsorted(np.quantile(tokens, [0.25, 0.5, 0.75]), tokens)
    _, index, counts = np.unique(opening, return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), dtype=int)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    kind = length * (_OPENINGS + 1) + np.minimum(rank[index], _OPENINGS)
    return np.unique(kind, return_inverse=True)[1]


def variances(outcome: Outcome) -> tuple[float, float]:
    """How far apart the contexts' rates are, without the noise of counting few turns.

    Moment estimates: what the observed rates vary, less the binomial variance that each is
    expected to have. They are unbiased, and so may be negative.

    Args:
        outcome: k of n per context.

    Returns:
        Variance of the rates of a run's queries, and of the rates within a query. The second is
        0 where no query of a run has two contexts: then the first is of the contexts.

    Raises:
        ValueError: no context has two turns, so that noise can't be told from anything else.
    """
    several = outcome.trials > 1
    if not several.any():
        raise ValueError("how far rates differ can't be told from one turn per context")
    outcome = outcome.take(several)
    noise = outcome.rate * (1 - outcome.rate) / (outcome.trials - 1)
    return _variances(outcome.rate, noise, *_queries(outcome))


def _queries(outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
    """``[contexts]`` query of each (a source in a run), and ``[queries]`` run of each."""
    pairs = np.stack([outcome.runs, outcome.sources])
    found, query = np.unique(pairs, axis=1, return_inverse=True)
    return query, found[0]


def _variances(
    rate: np.ndarray, noise: np.ndarray, query: np.ndarray, runs: np.ndarray
) -> tuple[float, float]:
    """Between and within queries, where ``noise`` is the variance of each rate's error."""
    size = np.bincount(query)
    mean = np.bincount(query, rate) / size
    own = noise * (1 - 1 / size[query])
    free = (size - 1).sum()
    within = (((rate - mean[query]) ** 2).sum() - own.sum()) / free if free else 0.0
    of_run = np.bincount(runs)
    apart = mean - (np.bincount(runs, mean) / np.maximum(of_run, 1))[runs]
    expected = within / size + np.bincount(query, noise) / size**2
    shares = 1 - 1 / of_run[runs]
    if not shares.any():
        return 0.0, float(within)
    return float((apart @ apart - shares @ expected) / shares.sum()), float(within)


def control_outcomes(
    outcome: Outcome, types: TextTypes, draws: int, seed: int
) -> list[tuple[Outcome, np.ndarray]]:
    """Outcomes where types have random rates and nothing else counts, as hard as the real one.

    Log-odds are the sum of a normal deviate per type of query and one per type of response. Their
    sizes make mean and variance of the rates, between queries and within them, those that
    :func:`variances` estimates of the real outcome; where queries don't differ, the response's
    part counts less its mean over the query. Turns are then drawn: what a probe can learn of
    rates that are known from few turns is as little as in the real outcome.

    Args:
        outcome: the real one. Its trials, sources and runs stay as they are.
        types: of the same contexts.
        draws: how many.
        seed: of the generator; the first outcomes are the same however many are drawn.

    Returns:
        Each outcome with the ``[contexts]`` rates that its turns were drawn from.

    Raises:
        ValueError: rates differ no more than chance makes them, or types don't differ in any run.
    """
    between, within = variances(outcome)
    if max(between, within) <= 0:
        raise ValueError("contexts' rates differ no more than chance has few turns differ")
    rng = np.random.default_rng(seed)
    return [_draw(outcome, types, between, within, rng) for _ in range(draws)]


def _draw(
    outcome: Outcome, types: TextTypes, between: float, within: float, rng: np.random.Generator
) -> tuple[Outcome, np.ndarray]:
    query, runs = _queries(outcome)
    of_response, of_query = (
        rng.standard_normal(of.max() + 1)[of] for of in (types.response, types.query)
    )
    if len(runs) == len(query):  # one response per query
        of_query = np.zeros(len(query))
    elif between <= 0:
        of_query = np.zeros(len(query))
        of_response = of_response - (np.bincount(query, of_response) / np.bincount(query))[query]
    elif within <= 0:
        of_response = np.zeros(len(query))
    parts = [_standardised(part[:, None])[:, 0] for part in (of_query, of_response)]
    in_runs = [np.ptp((parts[0] + parts[1])[outcome.runs == run]) for run in np.unique(runs)]
    if max(in_runs) < _CONSTANT:
        raise ValueError("a control task needs two types of contexts in a run; there is only one")
    wanted = max(between, 0.0), max(within, 0.0)
    rates = _matched(parts, outcome, wanted, query, runs)
    return replace(outcome, positives=rng.binomial(outcome.trials.astype(int), rates) * 1.0), rates


def _matched(
    parts: list[np.ndarray],
    outcome: Outcome,
    wanted: tuple[float, float],
    query: np.ndarray,
    runs: np.ndarray,
) -> np.ndarray:
    """Rates whose log-odds are a level and multiples of the parts, with the wanted variances and
    the mean of the outcome's rates (as nearly as the parts allow)."""
    mean, size = outcome.rate.mean(), sum(wanted)
    slope = mean * (1 - mean)

    def rates(levels: np.ndarray) -> np.ndarray:
        return expit(levels[0] + levels[1] * parts[0] + levels[2] * parts[1])

    def off(levels: np.ndarray) -> list[float]:
        found = rates(levels)
        got = _variances(found, np.zeros(len(found)), query, runs)
        return [(found.mean() - mean) / np.sqrt(size), *np.subtract(got, wanted) / size]

    start = [logit(mean), *(np.sqrt(one) / slope + 0.1 for one in wanted)]
    return rates(least_squares(off, start, bounds=([-np.inf, 0, 0], np.inf)).x)


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
    kinds = TextTypes(
        text_types(frame["response_tokens"], frame["first_token"]),
        text_types(frame["prompt_tokens"], pd.factorize(frame["first_word"])[0]),
    )
    try:
        control_outcomes(data.outcome, kinds, 1, seed)
    except ValueError as error:
        missing.append(f"no control task, so no selectivity: {error}")
        return Controls(text, output, None, missing)
    return Controls(text, output, kinds, missing)


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
    last = torch.from_numpy(data.at(runs[0].layers[-1], [HEADER_LAST])[:, 0])
    ends = {int(token) for run in runs for token in run.record["identity"]["chat"]["stop_ids"]}
    temperatures = {t for run in runs for t in run.settings["temperatures"] if t > 0}
    summaries = output_summaries(lens, last, sorted(ends), sorted(temperatures))
    return [output_state(lens, last), summaries], None
