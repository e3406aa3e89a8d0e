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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from probes.fit.nested_cv import Design, InnerLoop, scores_in, unreliability
from probes.fit.solvers import Features, project

RATIOS = (0.0, 0.1, 1.0, 10.0)  # of a further block's inner products to the first block's
TIE = 1e-9  # losses, sums of thousands of terms in float64, are equal up to this share
RIDGES = np.geomspace(1e-6, 1e3, 28)  # of the residual, per context

Tuned = tuple[Features, float]  # the blocks side by side, and their common penalty


@dataclass(frozen=True)
class IncrementalScores:
    """Out-of-fold scores with and without the hidden states.

    Attributes:
        base: ``[contexts]`` log-odds from the base blocks.
        full: ``[contexts]`` log-odds from these and the hidden states.
        ratios: what each outer fold's inner loop chose for the hidden states; 0 leaves them out.
        unreliability: of ``full - base``, see :func:`probes.fit.nested_cv.unreliability`.
    """

    base: np.ndarray
    full: np.ndarray
    ratios: list[float]
    unreliability: float


def incremental_scores(
    blocks: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    hidden: Sequence[np.ndarray],
    design: Design,
    apply: Callable[..., Iterable] = map,
) -> IncrementalScores:
    """Cross-fit both predictors.

    Args:
        blocks: ``[contexts, features]`` each, in any unit: what the base reads. At least one.
        ends: ``[contexts, features]`` for each outer fold, one more block of the base: states of
            the same layer as ``hidden``, at the ends of query and response.
        hidden: ``[contexts, d_model]`` for each outer fold, read where its inner loop chose.
        design: outcome and folds.
        apply: ``map``, or what does the same for the folds in parallel.
    """
    fixed = [centre_and_scale(block) for block in blocks]

    def tune(fold: int) -> tuple[float, list[Tuned]]:
        mixed, *others = parts = [*fixed, centre_and_scale(ends[fold])]
        left, stages = np.asarray(hidden[fold], dtype=float), []
        for part in parts:  # one by one: a wide block must not keep what a narrow one would find
            left = residual(left, part)
        for more in (*others, centre_and_scale(left)):
            wider = [np.hstack([mixed, np.sqrt(r) * more]) if r else mixed for r in RATIOS]
            stages.append(_tuned(wider, design, fold))
            mixed = wider[stages[-1][0]]
        (_, base), (which, full) = stages[-2:]
        return RATIOS[which], [base, full]

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


def _tuned(mixtures: Iterable[np.ndarray], design: Design, fold: int) -> tuple[int, Tuned]:
    """Which mixture, and the penalty, of the smallest held-out loss in an outer fold's inner loop.

    Of equal losses the first: features that add nothing change a loss by rounding only.
    """
    best, least = None, np.inf
    for which, mixed in enumerate(mixtures):
        features, loop = Features.from_states(mixed), InnerLoop(design)
        for other in range(design.fold_count):
            if other != fold:
                test, train = design.rows_of(other), design.rows_outside(fold, other)
                loop.add(project(features, train, test, design.outcome.runs), test, (other, fold))
        losses = loop.losses(fold)
        at = int(np.argmax(losses <= losses.min() * (1 + TIE)))
        if best is None or losses[at] < least * (1 - TIE):
            best, least = (which, (features, design.penalties[at])), float(losses[at])
    assert best is not None
    return best
