"""Fit linear probes: one PCA projection that all fits share, and logistic regression in it.

L2-penalised logistic regression and ridge regression use inner products only, so that projected
features give the same probe. With n contexts and d features, the n × n inner products (or the d × d
ones, if d is smaller) are decomposed once per split, and all penalties, labels and permutations
share that. Centring and one common scale keep this property; scaling each feature wouldn't.

Labels are binomial: context i has k of n positive turns and weighs n over the mean n. The weights
sum to the number of contexts, so that a penalty means the same for every target. Intercepts, one
per run, are not penalised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, eigh
from scipy.special import expit

PENALTIES = (100.0, 10.0, 1.0, 0.1, 0.01, 0.001)  # of the squared weights; mean squared norm is 1
TOLERANCE = 1e-9  # of the Newton decrement, per context
MAX_STEPS = 60
INTERCEPT_PENALTY = 1e-6  # an intercept would diverge where all turns of a run are alike
CONSTANT = 1e-12  # a variance below this share of the mean square is rounding
RANK = 1e-12  # likewise a direction's share of the largest


# -- PCA projection -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """Hidden states of all contexts at one layer and position (or a control's features).

    Attributes:
        centred: ``[contexts, d]`` float64 less their overall mean.
        gram: ``[contexts, contexts]`` their inner products; None where d is the smaller.
        size: mean square of the features as given.
    """

    centred: np.ndarray
    gram: np.ndarray | None
    size: float

    @classmethod
    def from_states(cls, features: np.ndarray) -> "Features":
        """From ``[contexts, d]`` hidden states."""
        given = np.asarray(features, dtype=np.float64)
        size = float(np.einsum("nd,nd->", given, given) / max(given.size, 1))
        # The common part may be far larger; without it, products keep their digits.
        centred = given - given.mean(0)
        gram = centred @ centred.T if centred.shape[1] > len(centred) else None
        return cls(centred, gram, size)


@dataclass(frozen=True)
class Projection:
    """Training and test contexts of one split in the training contexts' principal axes.

    Attributes:
        train: ``[train, m]``, centred within runs, mean squared norm 1; columns are orthogonal.
        test: ``[test, m]``, by the same centres, scale and axes.
        squares: ``[m]`` squared norms of the columns of ``train``, falling.
        features: what was projected.
        rows: the training rows.
        runs: ``[contexts]`` run of each context.
        scale: one number that features are multiplied by.
    """

    train: np.ndarray
    test: np.ndarray
    squares: np.ndarray
    features: Features
    rows: np.ndarray
    runs: np.ndarray
    scale: float
    _vectors: np.ndarray

    def weights(self, projected: np.ndarray) -> np.ndarray:
        """``[d]`` weights on features for ``[m]`` weights on coordinates."""
        if self.features.gram is None:
            return self._vectors @ projected * self.scale
        centred = self.features.centred[self.rows] - self.centres()[self.runs[self.rows]]
        by_context = self._vectors @ (projected / np.sqrt(self.squares))
        return centred.T @ by_context * self.scale**2

    def centres(self) -> np.ndarray:
        """``[runs, d]`` training mean of each run; of all runs where a run has no training row."""
        return _averages(self.rows, self.runs, len(self.runs)) @ self.features.centred


def project(
    features: Features, train: np.ndarray, test: np.ndarray, runs: np.ndarray
) -> Projection:
    """Principal axes of the training contexts, and coordinates of train and test in them.

    Args:
        features: hidden states.
        train: rows to learn centres, scale and axes from.
        test: rows to express in them.
        runs: ``[contexts]`` run of each context, numbered from 0; each is centred by itself.

    Returns:
        Coordinates; with no column where the training contexts don't differ.
    """
    averages = _averages(train, runs, len(features.centred))
    if features.gram is None:
        centres = averages @ features.centred
        fitted = features.centred[train] - centres[runs[train]]
        other = features.centred[test] - centres[runs[test]]
        products = fitted.T @ fitted
    else:
        gram = features.gram
        by_run = averages @ gram
        between = by_run @ averages.T
        of_train, of_test = runs[train], runs[test]
        cross = by_run[:, train]

        def centred(rows: np.ndarray, of_rows: np.ndarray) -> np.ndarray:
            block = gram[np.ix_(rows, train)] - cross[of_rows]
            return block - by_run[of_train][:, rows].T + between[np.ix_(of_rows, of_train)]

        products, other = centred(train, of_train), centred(test, of_test)
        products = (products + products.T) / 2
    total = float(np.trace(products)) / len(train)
    differ = total > CONSTANT * features.size * features.centred.shape[1]
    scale = 1 / np.sqrt(total) if differ else 1.0
    values, vectors = eigh(products, driver="evd")
    kept = (values > RANK * values[-1]) & differ
    values, vectors = values[kept][::-1], vectors[:, kept][:, ::-1]
    squares = values * scale**2
    if features.gram is None:
        coordinates, others = fitted @ vectors * scale, other @ vectors * scale
    else:
        coordinates = vectors * np.sqrt(squares)
        others = other @ (vectors / np.sqrt(values)) * scale
    return Projection(coordinates, others, squares, features, train, runs, scale, vectors)


def _averages(train: np.ndarray, runs: np.ndarray, contexts: int) -> np.ndarray:
    """``[runs, contexts]`` matrix that takes each run's training mean.

    A run without a training row gets the mean of all, the best guess for an unseen run.
    """
    number = int(runs.max()) + 1
    takes = np.zeros((number, contexts))
    takes[runs[train], train] = 1
    takes[takes.sum(1) == 0] = takes.sum(0)
    return takes / takes.sum(1, keepdims=True)


# -- solvers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A linear probe in the coordinates of a projection.

    Attributes:
        weights: ``[m]``.
        intercepts: ``[runs]``.
    """

    weights: np.ndarray
    intercepts: np.ndarray

    def scores(self, coordinates: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """``[contexts]`` linear scores: for logistic regression, log-odds."""
        return coordinates @ self.weights + self.intercepts[runs]


def logistic_path(
    coordinates: np.ndarray,
    runs: np.ndarray,
    positives: np.ndarray,
    trials: np.ndarray,
    penalties: Sequence[float],
    run_count: int,
) -> list[Fit]:
    """L2-penalised binomial logistic regression for falling penalties, each started at the last.

    Minimises ``sum of weighted losses + penalty / 2 * |weights|²`` by Newton's method. With more
    coordinates than half the contexts it works in the dual (Rasmussen & Williams 2006, algorithm
    3.1), whose steps cost a third of a Cholesky factorisation.

    Args:
        coordinates: ``[n, m]``.
        runs: ``[n]`` run of each context.
        positives: ``[n]`` k.
        trials: ``[n]`` n.
        penalties: falling.
        run_count: how many intercepts; those of runs without contexts are the mean of the others.
    """
    weight = trials / trials.mean()
    target = positives / trials * weight
    present = np.unique(runs)
    dummies = (runs[:, None] == present).astype(float)
    dual = coordinates.shape[1] > 0.5 * len(coordinates)
    products = coordinates @ coordinates.T if dual else np.empty((0, 0))
    rate = np.clip((dummies.T @ target) / (dummies.T @ weight), 1e-3, 1 - 1e-3)
    state = np.zeros(len(coordinates) if dual else coordinates.shape[1])
    intercepts = np.log(rate / (1 - rate))
    found = []
    for penalty in penalties:
        if dual:
            state, intercepts = _dual(products, dummies, target, weight, penalty, state, intercepts)
            weights = coordinates.T @ state
        else:
            state, intercepts = _primal(
                coordinates, dummies, target, weight, penalty, state, intercepts
            )
            weights = state
        by_run = np.full(run_count, intercepts.mean())
        by_run[present] = intercepts
        found.append(Fit(weights, by_run))
    return found


def _loss(margin: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    return float((weight * np.logaddexp(0, margin) - target * margin).sum())


def _descend(
    objective: Callable[[np.ndarray], float], state: np.ndarray, step: np.ndarray, now: float
) -> tuple[np.ndarray, float]:
    """Take the step, halved until the objective doesn't rise."""
    share = 1.0
    for _ in range(30):
        moved = state + share * step
        value = objective(moved)
        if value <= now + 1e-12 * abs(now):
            return moved, value
        share /= 2
    return state, now


def _primal(
    features: np.ndarray,
    dummies: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    penalty: float,
    weights: np.ndarray,
    intercepts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and intercepts, from a start."""
    columns = np.hstack([features, dummies])
    m = features.shape[1]
    ridge_on = np.full(columns.shape[1], INTERCEPT_PENALTY)
    ridge_on[:m] = penalty

    def objective(theta: np.ndarray) -> float:
        return _loss(columns @ theta, target, weight) + (ridge_on * theta**2).sum() / 2

    theta = np.concatenate([weights, intercepts])
    now = objective(theta)
    for _ in range(MAX_STEPS):
        chance = expit(columns @ theta)
        slope = columns.T @ (weight * chance - target) + ridge_on * theta
        curve = (columns * (weight * chance * (1 - chance))[:, None]).T @ columns
        curve[np.diag_indices_from(curve)] += ridge_on
        step = -cho_solve(cho_factor(curve), slope)
        theta, now = _descend(objective, theta, step, now)
        if -(slope @ step) <= TOLERANCE * len(features):
            break
    return theta[:m], theta[m:]


def _dual(
    products: np.ndarray,
    dummies: np.ndarray,
    target: np.ndarray,
    weight: np.ndarray,
    penalty: float,
    alphas: np.ndarray,
    intercepts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """``weights = features.T @ alphas``; the step solves for margins, then for alphas."""
    n, q = len(products), dummies.shape[1]

    def objective(state: np.ndarray) -> float:
        alpha, level = state[:n], state[n:]
        smooth = products @ alpha
        penalised = penalty * (alpha @ smooth) + INTERCEPT_PENALTY * (level @ level)
        return _loss(smooth + dummies @ level, target, weight) + penalised / 2

    state = np.concatenate([alphas, intercepts])
    now = objective(state)
    for _ in range(MAX_STEPS):
        alpha, level = state[:n], state[n:]
        smooth = products @ alpha
        margin = smooth + dummies @ level
        chance = expit(margin)
        residual = target - weight * chance
        curve = np.maximum(weight * chance * (1 - chance), 1e-12)
        root = np.sqrt(curve)
        system = products * root[:, None] * root
        system[np.diag_indices(n)] += penalty
        factor = cho_factor(system, overwrite_a=True, check_finite=False)
        # (products + penalty / curve) alpha + dummies level = response, and the levels' own
        # equation dummies' alpha penalty = INTERCEPT_PENALTY level.
        right = np.column_stack([dummies, margin + residual / curve])
        solved = cho_solve(factor, right * root[:, None], check_finite=False) * root[:, None]
        by_dummy, by_response = solved[:, :q], solved[:, q]
        small = penalty * (dummies.T @ by_dummy) + INTERCEPT_PENALTY * np.eye(q)
        new_level = np.linalg.solve(small, penalty * (dummies.T @ by_response))
        new_alpha = by_response - by_dummy @ new_level
        step = np.concatenate([new_alpha, new_level]) - state
        slope_smooth = -residual + penalty * alpha
        slope = np.concatenate(
            [products @ slope_smooth, INTERCEPT_PENALTY * level - dummies.T @ residual]
        )
        state, now = _descend(objective, state, step, now)
        if -(slope @ step) <= TOLERANCE * n:
            break
    return state[:n], state[n:]
