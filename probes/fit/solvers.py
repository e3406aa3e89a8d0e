"""Probes fitted in rotated coordinates: ridge, logistic regression, differences of means.

Labels are binomial: context i has k of n positive turns and weighs n over the mean n, so that the
weights sum to the number of contexts and a penalty means the same for every target. Intercepts,
one per run, are not penalised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit

PENALTIES = (100.0, 10.0, 1.0, 0.1, 0.01, 0.001)  # of the squared weights; mean squared norm is 1
TOLERANCE = 1e-9  # of the Newton decrement, per context
MOST_STEPS = 60
HELD = 1e-6  # on intercepts, which would run away where all turns of a run are alike


@dataclass(frozen=True)
class Fit:
    """A linear probe in rotated coordinates.

    Attributes:
        weights: ``[m]``.
        intercepts: ``[runs]``.
    """

    weights: np.ndarray
    intercepts: np.ndarray

    def scores(self, coordinates: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """``[contexts]`` linear scores: for logistic regression, log-odds."""
        return coordinates @ self.weights + self.intercepts[runs]


def ridge(
    coordinates: np.ndarray, squares: np.ndarray, rates: np.ndarray, penalty: float
) -> np.ndarray:
    """``[m]`` or ``[m, columns]`` ridge weights for ``[n]`` or ``[n, columns]`` rates.

    Every context counts alike. The columns of ``coordinates`` are orthogonal with squared norms
    ``squares``, so there is nothing to solve.
    """
    shrunk = coordinates / (squares + penalty)
    return shrunk.T @ rates


def mean_difference(coordinates: np.ndarray, positives: np.ndarray, trials: np.ndarray):
    """``[m]`` mean of positive turns minus mean of negative ones (Marks & Tegmark 2023)."""
    negatives = trials - positives
    return coordinates.T @ (positives / positives.sum() - negatives / negatives.sum())


def shrinkage(coordinates: np.ndarray, squares: np.ndarray, width: int) -> tuple[float, float]:
    """Ledoit & Wolf's (2004) shrinkage of the covariance, and the variance it shrinks to.

    From principal coordinates alone; the directions that they leave out (up to ``width``) have no
    variance and count as such.
    """
    n = len(coordinates)
    target = squares.sum() / n / width
    frobenius = (squares**2).sum() / n**2
    spread = ((coordinates**2).sum(1) ** 2).sum() / n
    noise = (spread - frobenius) / (width * n)
    distance = (frobenius - width * target**2) / width
    return (1.0 if distance <= 0 else min(noise, distance) / distance), target


def whitened_difference(
    coordinates: np.ndarray,
    squares: np.ndarray,
    width: int,
    positives: np.ndarray,
    trials: np.ndarray,
) -> np.ndarray:
    """``[m]`` direction of linear discriminant analysis with a Ledoit–Wolf covariance.

    The covariance is the total one: it and the one within classes differ by a multiple of the
    difference's own outer product, which changes the length of the direction only.
    """
    intensity, target = shrinkage(coordinates, squares, width)
    variance = (1 - intensity) * squares / len(coordinates) + intensity * target
    return mean_difference(coordinates, positives, trials) / variance


def logistic_path(
    coordinates: np.ndarray,
    runs: np.ndarray,
    positives: np.ndarray,
    trials: np.ndarray,
    penalties: Sequence[float],
    run_count: int,
) -> list[Fit]:
    """L2-penalised binomial logistic regression for falling penalties, each from the last.

    Minimises ``sum of weighted losses + penalty / 2 * |weights|²`` by Newton's method; with more
    coordinates than half the contexts in the dual (Rasmussen & Williams 2006, algorithm 3.1), whose
    steps cost a third of a Cholesky factorisation.

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
    products = coordinates @ coordinates.T if dual else None
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
        everyone = np.full(run_count, intercepts.mean())
        everyone[present] = intercepts
        found.append(Fit(weights, everyone))
    return found


def _loss(margin: np.ndarray, target: np.ndarray, weight: np.ndarray) -> float:
    return float((weight * np.logaddexp(0, margin) - target * margin).sum())


def _descend(
    objective: Callable[[np.ndarray], float], state: np.ndarray, step: np.ndarray, now: float
) -> tuple[np.ndarray, float]:
    """The step, halved until it doesn't go up."""
    share = 1.0
    for _ in range(30):
        moved = state + share * step
        value = objective(moved)
        if value <= now + 1e-12 * abs(now):
            return moved, value
        share /= 2
    return state, now


def _primal(features, dummies, target, weight, penalty, weights, intercepts):
    columns = np.hstack([features, dummies])
    m = features.shape[1]
    ridge_on = np.full(columns.shape[1], HELD)
    ridge_on[:m] = penalty

    def objective(theta: np.ndarray) -> float:
        return _loss(columns @ theta, target, weight) + (ridge_on * theta**2).sum() / 2

    theta = np.concatenate([weights, intercepts])
    now = objective(theta)
    for _ in range(MOST_STEPS):
        chance = expit(columns @ theta)
        slope = columns.T @ (weight * chance - target) + ridge_on * theta
        curve = (columns * (weight * chance * (1 - chance))[:, None]).T @ columns
        curve[np.diag_indices_from(curve)] += ridge_on
        step = -cho_solve(cho_factor(curve), slope)
        theta, now = _descend(objective, theta, step, now)
        if -(slope @ step) <= TOLERANCE * len(features):
            break
    return theta[:m], theta[m:]


def _dual(products, dummies, target, weight, penalty, alphas, intercepts):
    """``weights = features.T @ alphas``; the step solves for margins, then for alphas."""
    n, q = len(products), dummies.shape[1]

    def objective(state: np.ndarray) -> float:
        alpha, level = state[:n], state[n:]
        smooth = products @ alpha
        penalised = penalty * (alpha @ smooth) + HELD * (level @ level)
        return _loss(smooth + dummies @ level, target, weight) + penalised / 2

    state = np.concatenate([alphas, intercepts])
    now = objective(state)
    for _ in range(MOST_STEPS):
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
        # equation dummies' alpha penalty = HELD level.
        right = np.column_stack([dummies, margin + residual / curve])
        solved = cho_solve(factor, right * root[:, None], check_finite=False) * root[:, None]
        by_dummy, by_response = solved[:, :q], solved[:, q]
        small = penalty * (dummies.T @ by_dummy) + HELD * np.eye(q)
        new_level = np.linalg.solve(small, penalty * (dummies.T @ by_response))
        new_alpha = by_response - by_dummy @ new_level
        step = np.concatenate([new_alpha, new_level]) - state
        slope_smooth = -residual + penalty * alpha
        slope = np.concatenate([products @ slope_smooth, HELD * level - dummies.T @ residual])
        state, now = _descend(objective, state, step, now)
        if -(slope @ step) <= TOLERANCE * n:
            break
    return state[:n], state[n:]


def platt(
    scores: np.ndarray, runs: np.ndarray, positives: np.ndarray, trials: np.ndarray, run_count: int
) -> tuple[float, np.ndarray]:
    """Slope and ``[runs]`` intercepts that turn scores into log-odds (Platt 1999).

    Scores must come from contexts the probe wasn't fitted on, or it would be too sure of itself.
    """
    spread, centre = scores.std(), scores.mean()
    standard = (scores - centre) / spread if spread > 0 else np.zeros_like(scores)
    path = logistic_path(standard[:, None], runs, positives, trials, [1e-3], run_count)
    slope = float(path[0].weights[0] / spread) if spread > 0 else 0.0
    return slope, path[0].intercepts - slope * centre
