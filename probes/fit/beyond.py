"""Do hidden states predict anything beyond the base? The cross-fitted gain.

The *base* is a set of feature blocks: the output, the text, and the states at the ends of query and
response. Two predictors are compared on held-out sources: one reads the base, the other reads the
base and the hidden states. Two separate probes can't answer the question: a state may hold a noisy
copy of the output and still be easier to read than the output itself.

Both predictors are L2-penalised logistic regressions, in which each block has a penalty of its own.
The blocks stand side by side and each is multiplied by a factor. The inner loop chooses the factors
and the common penalty, block by block. The larger predictor may leave the hidden states out, and
then gains nothing.

Hidden states are used without the part that a ridge regression on each block of the base predicts
(the residual of Frisch & Waugh 1933). Without this step a copy could count as new: a penalised
regression on few contexts can't use a direction of the base that has little variance, but it can
use a copy of that direction with large variance. The step removes what hidden states share linearly
with the base and keeps what they add. It uses no labels, and therefore all contexts.
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
TIE = 1e-9  # losses that differ by a smaller share are equal: they are sums of thousands of terms
PLANTED = (0.1, 0.2, 0.4, 0.8)  # shares that a planted addition explains of what the base doesn't
RIDGES = np.geomspace(1e-6, 1e3, 28)  # penalties of the ridge regressions, per context

Place = TypeVar("Place", bound=Hashable)
Tuned = tuple[np.ndarray, float]  # the blocks side by side, and their common penalty


@dataclass(frozen=True)
class IncrementalScores:
    """Out-of-fold scores with and without the hidden states."""

    base: np.ndarray  # [contexts] log-odds from the base blocks
    full: np.ndarray  # [contexts] log-odds from the base blocks and the hidden states
    ratios: list[float]  # that each outer fold chose for the hidden states; 0 leaves them out
    unreliability: float  # of ``full - base``, see :func:`probes.fit.nested_cv.unreliability`


@dataclass(frozen=True)
class Base:
    """The base of one outer fold, to which hidden states have to add."""

    parts: list[np.ndarray]  # [contexts, features] the blocks, all with the same scale
    mixed: np.ndarray  # [contexts, features] side by side, with the factors that were chosen
    tuned: Tuned  # the same, with the penalty that was chosen


def tune_base(
    blocks: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    design: Design,
    apply: Callable[..., Iterable] = map,
) -> list[Base]:
    """The base of each outer fold.

    Args:
        blocks: ``[contexts, features]`` each, in any unit; at least one.
        ends: for each outer fold a further block, ``[contexts, features]``: the states of the layer
            that is probed, at the ends of query and response.
        design: outcome and folds.
        apply: ``map``, or a function that does the same in parallel.
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
    """Cross-fit the base, and the base with hidden states.

    Args:
        bases: of each outer fold, from :func:`tune_base`.
        hidden: ``[contexts, d_model]`` for each outer fold, at the layer and position that its
            inner loop chose.
        design: outcome and folds.
        apply: as for :func:`tune_base`.
    """

    def tune(fold: int) -> tuple[float, list[Tuned]]:
        base, left = bases[fold], np.asarray(hidden[fold], dtype=float)
        # One block after another: in one regression, a wide block without information would use up
        # the degrees of freedom that a narrow one needs.
        for part in base.parts:
            left = residual(left, part)
        _, ratio, full = _added(base.mixed, centre_and_scale(left), design, fold)
        return ratio, [base.tuned, full]

    ratios, tuned = zip(*apply(tune, range(design.fold_count)), strict=True)

    def both(fold: int, train: np.ndarray) -> list[np.ndarray]:
        return [scores_in(mixed, design, fold, train, penalty) for mixed, penalty in tuned[fold]]

    def difference(fold: int, train: np.ndarray) -> np.ndarray:
        base, full = both(fold, train)
        return full - base if ratios[fold] else np.zeros_like(base)  # no rounding errors either

    base, full = np.empty((2, len(design.outcome)))
    for fold in range(design.fold_count):
        rows = design.rows_of(fold)
        base[rows], full[rows] = both(fold, design.rows_outside(fold))
    return IncrementalScores(base, full, list(ratios), unreliability(design, difference))


def centre_and_scale(block: np.ndarray) -> np.ndarray:
    """The block, centred and with a mean squared norm of 1; zeros if its rows are all the same."""
    centred = np.asarray(block, dtype=float) - np.mean(block, axis=0)
    size = np.sqrt((centred**2).sum(1).mean())
    return centred / size if size > 0 else centred


def residual(states: np.ndarray, base: np.ndarray) -> np.ndarray:
    """States minus the part that a ridge regression on the base predicts.

    Generalised cross-validation (Golub, Heath & Wahba 1979, Technometrics 21:215) chooses the
    penalty among those that leave at least half of the degrees of freedom. With more features than
    contexts, a smaller penalty would leave nothing of any states.

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
    """The features with one more block, the ratio of that block, and the penalty, as the inner loop
    of the outer fold chose them."""
    wider = [np.hstack([mixed, np.sqrt(ratio) * more]) if ratio else mixed for ratio in RATIOS]
    which, tuned = _tuned(wider, design, fold)
    return wider[which], RATIOS[which], tuned


def _tuned(mixtures: Iterable[np.ndarray], design: Design, fold: int) -> tuple[int, Tuned]:
    """The mixture and penalty with the smallest held-out loss in an outer fold's inner loop.

    Of equal losses the first is taken: features that add nothing change a loss by rounding only.
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
    """Add a signal, which the base doesn't hold, to hidden states along a random direction.

    The signal has the variance of a typical direction of the states: the mean of the variances of
    the principal axes, weighted by themselves.

    Args:
        hidden: ``[contexts, d_model]`` each.
        outcome: k of n per context.
        base: ``[contexts]`` log-odds that the base predicts.
        share: the squared correlation of the signal with the rates minus the base's prediction.
        seed: of direction and noise.

    Returns:
        The states with the signal, and the ``[contexts]`` signal with a variance of 1.
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
    """``[contexts]`` log-odds of a predictor that knows the base's prediction and the signal."""
    best = minimize_scalar(lambda times: held_out_loss(base + times * signal, outcome).sum())
    return base + best.x * signal
