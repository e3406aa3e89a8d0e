"""Does a block of features predict anything beyond other blocks? The cross-fitted gain.

A state that only carries a noisier copy of the output can be easier to read than the output itself,
so that a difference of two stand-alone scores shows nothing about what the state adds. Here two
predictors are compared on held-out sources: one reads the base blocks, the other reads the hidden
states too. Both are L2-penalised logistic regressions whose blocks have penalties of their own:
features are the blocks side by side, each scaled by a number, which the inner loop chooses together
with the common penalty, block by block. The larger predictor may leave the hidden states out, and
then gains nothing.

Where the base carries something in a direction of little variance, a penalised readout of few
contexts finds it better in a louder, noisier copy. So hidden states enter less what a ridge
regression on each block of the base predicts of them (the residual of Frisch & Waugh 1933): what
they share linearly with the base is gone, and what they add is not. No label takes part in this,
and so all contexts do.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit

from probes.fit.nested_cv import (
    Design,
    held_out_loss,
    inner_losses,
    less_means,
    path_scores,
    scores_in,
    unreliability,
)
from probes.fit.solvers import compact, project
from probes.targets import Outcome

RATIOS = (0.0, 0.1, 1.0, 10.0)  # of a further block's inner products to the first block's
TIE = 1e-9  # losses, sums of thousands of terms in float64, are equal up to this share
PLANTED = (0.1, 0.2, 0.4, 0.8)  # shares of what the base leaves that a planted addition tells
RIDGES = np.geomspace(1e-6, 1e3, 28)  # of the residual, per context

Place = TypeVar("Place", bound=Hashable)
Tuned = tuple[np.ndarray, float]  # the blocks side by side, and their common penalty


@dataclass(frozen=True)
class IncrementalScores:
    """Out-of-fold scores with and without the hidden states."""

    base: np.ndarray  # [contexts] log-odds from the base blocks
    full: np.ndarray  # [contexts] log-odds from these and the hidden states
    ratios: list[float]  # that each outer fold chose for the hidden states; 0 leaves them out
    unreliability: float  # of ``full - base``, see :func:`probes.fit.nested_cv.unreliability`


@dataclass(frozen=True)
class Base:
    """The readout that hidden states have to add to, of one outer fold."""

    parts: list[np.ndarray]  # [contexts, features] the blocks, each at one scale
    mixed: np.ndarray  # [contexts, features] side by side, each as large as the inner loop chose
    tuned: Tuned  # with the penalty that it chose


def tune_base(
    blocks: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    design: Design,
    apply: Callable[..., Iterable] = map,
) -> list[Base]:
    """The base of each outer fold.

    Args:
        blocks: ``[contexts, features]`` each, in any unit: what the base reads. At least one.
        ends: ``[contexts, features]`` for each outer fold, one more block: states of the layer that
            is probed, at the ends of query and response.
        design: outcome and folds.
        apply: ``map``, or what does the same for the folds in parallel.
    """
    fixed = [centre_and_scale(block) for block in blocks]

    def tune(fold: int) -> Base:
        parts = [*fixed, centre_and_scale(ends[fold])]
        mixed, tuned = parts[0], None
        for more in parts[1:]:
            mixed, _, tuned = _added(mixed, more, design, fold)
        assert tuned is not None
        return Base(parts, mixed, tuned)

    return list(apply(tune, range(design.fold_count)))


def incremental_scores(
    bases: Sequence[Base],
    hidden: Sequence[np.ndarray],
    design: Design,
    apply: Callable[..., Iterable] = map,
) -> IncrementalScores:
    """Cross-fit the base, and the base with ``hidden``: ``[contexts, d_model]`` for each fold,
    read where its inner loop chose."""

    def tune(fold: int) -> tuple[float, list[Tuned]]:
        base, left = bases[fold], np.asarray(hidden[fold], dtype=float)
        for part in base.parts:  # one by one: a wide block must not keep what a narrow one finds
            left = residual(left, part)
        _, ratio, full = _added(base.mixed, centre_and_scale(left), design, fold)
        return ratio, [base.tuned, full]

    ratios, tuned = zip(*apply(tune, range(design.fold_count)), strict=True)

    def both(fold: int, train: np.ndarray) -> list[np.ndarray]:
        return [scores_in(mixed, design, fold, train, penalty) for mixed, penalty in tuned[fold]]

    def difference(fold: int, train: np.ndarray) -> np.ndarray:
        base, full = both(fold, train)
        return full - base if ratios[fold] else np.zeros_like(base)  # not even rounding

    base, full = np.empty((2, len(design.outcome)))
    for fold in range(design.fold_count):
        rows = design.rows_of(fold)
        base[rows], full[rows] = both(fold, design.rows_outside(fold))
    return IncrementalScores(base, full, list(ratios), unreliability(design, difference))


def centre_and_scale(block: np.ndarray) -> np.ndarray:
    """Centred, with a mean squared norm of 1; zeros if contexts don't differ."""
    centred = np.asarray(block, dtype=float) - np.mean(block, axis=0)
    size = np.sqrt((centred**2).sum(1).mean())
    return centred / size if size > 0 else centred


def residual(states: np.ndarray, base: np.ndarray) -> np.ndarray:
    """States less what ridge regression on the base predicts of them.

    The penalty is that of generalised cross-validation (Golub, Heath & Wahba 1979, Technometrics
    21:215), among those that leave at least half of the degrees of freedom: with more features than
    contexts, a smaller one would leave nothing of any states.

    Args:
        states: ``[contexts, d_model]``.
        base: ``[contexts, features]``, centred, with a mean squared norm of about 1.
    """
    values, vectors = np.linalg.eigh(base @ base.T)
    rotated = vectors.T @ (states - np.mean(states, axis=0, dtype=float))
    power = (rotated**2).sum(1)
    left = np.array([p / (np.maximum(values, 0) + p) for p in len(base) * RIDGES])
    freedom = left.sum(1)
    score = np.where(freedom >= len(base) / 2, left**2 @ power / freedom**2, np.inf)
    return vectors @ (left[score.argmin()][:, None] * rotated)


def _added(
    mixed: np.ndarray, more: np.ndarray, design: Design, fold: int
) -> tuple[np.ndarray, float, Tuned]:
    """Features with one more block, its ratio, and what the inner loop of the outer fold chose."""
    wider = [np.hstack([mixed, np.sqrt(ratio) * more]) if ratio else mixed for ratio in RATIOS]
    which, tuned = _tuned(wider, design, fold)
    return wider[which], RATIOS[which], tuned


def _tuned(mixtures: Iterable[np.ndarray], design: Design, fold: int) -> tuple[int, Tuned]:
    """Which mixture, and the penalty, of the smallest held-out loss in an outer fold's inner loop.

    Of equal losses the first: features that add nothing change a loss by rounding only.
    """
    best, least = None, np.inf
    for which, mixed in enumerate(mixtures):
        states, left_out = compact(mixed), np.empty((len(design.penalties), len(design.outcome)))
        for other in range(design.fold_count):
            if other != fold:
                split = project(states, design.rows_outside(fold, other), design.outcome.runs)
                test = design.rows_of(other)
                left_out[:, test] = path_scores(split, design, test)
        losses = inner_losses(left_out, design, fold)
        at = int(np.argmax(losses <= losses.min() * (1 + TIE)))
        if best is None or losses[at] < least * (1 - TIE):
            best, least = (which, (states, design.penalties[at])), float(losses[at])
    assert best is not None
    return best


# -- what would have been found -------------------------------------------------------------------


def plant(
    hidden: Mapping[Place, np.ndarray], outcome: Outcome, base: np.ndarray, share: float, seed: int
) -> tuple[dict[Place, np.ndarray], np.ndarray]:
    """States with an addition to what the base tells, along one random direction of each.

    The addition is as loud as a direction that carries a typical part of the states' variance: its
    variance is the mean of those of the principal axes, weighted by themselves.

    Args:
        hidden: ``[contexts, d_model]`` each.
        outcome: k of n per context.
        base: ``[contexts]`` log-odds that the base predicts.
        share: squared correlation of the addition with what the base leaves of the rates.
        seed: of direction and noise.

    Returns:
        The states, and the ``[contexts]`` addition, with a variance of 1.
    """
    rng = np.random.default_rng(seed)
    left = less_means(outcome.rate - expit(base), outcome.runs)
    noise = less_means(rng.normal(size=len(outcome)), outcome.runs)
    noise -= left * (noise @ left) / max(left @ left, TIE)
    signal = np.sqrt(share) * left / max(left.std(), TIE) + np.sqrt(1 - share) * noise / noise.std()
    planted = {}
    for place, states in hidden.items():
        centred, direction = compact(states), rng.normal(size=states.shape[1])
        squares = np.linalg.norm(centred.T @ centred) ** 2 / max((centred**2).sum(), TIE)
        loud = np.sqrt(squares / len(centred)) / np.linalg.norm(direction)
        planted[place] = states + loud * signal[:, None] * direction
    return planted, signal


def saved_by(signal: np.ndarray, outcome: Outcome, base: np.ndarray) -> np.ndarray:
    """``[contexts]`` log-odds of one who knows the addition, too."""
    best = minimize_scalar(lambda times: held_out_loss(base + times * signal, outcome).sum())
    return base + best.x * signal
