"""A control task: outcomes with nothing to read but a random function of the response's look.

Hewitt & Liang, "Designing and interpreting probes with control tasks", EMNLP 2019 (arXiv
1909.03368): a probe that predicts a random function of the input's type as well as the real target
shows its own capacity, not the model's knowledge; selectivity is the difference. What serves as the
type must recur in other sources, or there would be nothing to learn across folds: here it is how
long the response is and how it opens.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from probes.data.outcome import Outcome

_OPENINGS = 8  # openings that are told apart; the rarer ones are one
_TRIES = 10_000


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

    A type's rate is that of a context drawn at random, so that rates are distributed as in the real
    outcome. Trials, sources and runs stay each context's own; positives may be fractions. Rates
    that differ in no run, which would leave nothing to predict, are drawn again.

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
        lender = rng.integers(len(outcome), size=types.max() + 1)  # a context for every type
        rate = outcome.rate[lender]
        if any(np.ptp(rate[present]) > 0 for present in in_runs):
            row = lender[types]
            # Multiplied first: whole numbers where lender and borrower have equally many trials.
            positives = outcome.positives[row] * outcome.trials / outcome.trials[row]
            return replace(outcome, positives=positives)
    raise ValueError(f"no two types got different rates in {_TRIES} draws: almost all are the same")
