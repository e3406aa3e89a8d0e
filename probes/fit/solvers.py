"""Fit linear probes: the principal axes of a split, and logistic regression in these axes.

L2-penalised logistic regression and ridge regression use inner products only, so that rotated
features give the same probe. One decomposition per split therefore serves all penalties, labels and
permutations. Centring and one common scale keep this property; scaling each feature would not.

Labels are binomial: context i has k of n positive turns, and its weight is n divided by the mean n.
The weights sum to the number of contexts, so that a penalty means the same for every target. Each
run has an intercept, which is not penalised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh
from scipy.optimize import minimize
from scipy.special import expit

PENALTIES = (100.0, 10.0, 1.0, 0.1, 0.01, 0.001)  # of squared weights, at mean squared norm 1
INTERCEPT_PENALTY = 1e-6  # an intercept would diverge where all turns of a run are alike
STEPS = 1000  # far more than a fit needs
TOLERANCE = 1e-7  # of the scaled gradient, whose square is about twice the excess loss in nats
CONSTANT = 1e-12  # a variance below this share of the mean square is rounding
RANK = 1e-12  # a direction with a smaller share of the largest variance is rounding


# -- principal axes -------------------------------------------------------------------------------


def compact(features: np.ndarray) -> np.ndarray:
    """``[contexts, at most contexts]`` float64 with the inner products of ``[contexts, d]``
    features minus their mean; zeros if contexts differ by rounding only."""
    given = np.asarray(features, dtype=np.float64)
    centred = given - given.mean(0)
    if (centred**2).sum() <= CONSTANT * (given**2).sum():
        return np.zeros((len(given), 1))
    if centred.shape[1] > len(centred):
        return np.asarray(np.linalg.qr(centred.T, mode="r")).T
    return centred


@dataclass(frozen=True)
class Projection:
    """Contexts in the principal axes of the training contexts."""

    features: np.ndarray  # [contexts, d]
    runs: np.ndarray  # [contexts]
    rows: np.ndarray  # the training rows
    # [train, m] coordinates of the training rows: centred within runs, with orthogonal columns
    # and a mean squared norm of 1.
    train: np.ndarray
    squares: np.ndarray  # [m] squared norms of the columns of ``train``, descending
    axes: np.ndarray  # [d, m] maps centred features to coordinates
    # [runs, d] training mean of each run. A run without training rows gets the mean of all.
    centres: np.ndarray

    def at(self, rows: np.ndarray) -> np.ndarray:
        """``[rows, m]`` coordinates of any contexts."""
        return (self.features[rows] - self.centres[self.runs[rows]]) @ self.axes


def project(features: np.ndarray, train: np.ndarray, runs: np.ndarray) -> Projection:
    """Principal axes of the training contexts.

    They are found from the inner products of contexts or of features, whichever are fewer.

    Args:
        features: ``[contexts, d]``.
        train: the rows that centres, scale and axes are learned from.
        runs: ``[contexts]`` run of each context, numbered from 0; each run is centred by itself.

    Returns:
        The projection; it has no axes if the training contexts don't differ.
    """
    takes = np.zeros((int(runs.max()) + 1, len(features)))
    takes[runs[train], train] = 1
    takes[takes.sum(1) == 0] = takes.sum(0)
    centres = takes / takes.sum(1, keepdims=True) @ features
    fitted = features[train] - centres[runs[train]]
    wide = fitted.shape[1] > len(fitted)
    values, vectors = eigh(fitted @ fitted.T if wide else fitted.T @ fitted, driver="evd")
    total, mean_square = values.sum() / len(fitted), (features**2).sum() / len(features)
    kept = (values > RANK * values[-1]) & (total > CONSTANT * mean_square)
    values, axes = values[kept][::-1], vectors[:, kept][:, ::-1]
    if wide:
        axes = fitted.T @ (axes / np.sqrt(values))
    scale = 1 / np.sqrt(total) if kept.any() else 1.0
    axes = axes * scale
    return Projection(features, runs, train, fitted @ axes, values * scale**2, axes, centres)


# -- logistic regression --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """A linear probe in the coordinates of a projection."""

    weights: np.ndarray  # [m]
    intercepts: np.ndarray  # [runs]

    def scores(self, coordinates: np.ndarray, runs: np.ndarray) -> np.ndarray:
        """``[contexts]`` log-odds."""
        return coordinates @ self.weights + self.intercepts[runs]


def logistic_path(
    coordinates: np.ndarray,
    runs: np.ndarray,
    positives: np.ndarray,
    trials: np.ndarray,
    penalties: Sequence[float],
    run_count: int,
) -> list[Fit]:
    """L2-penalised binomial logistic regression for descending penalties. Each fit starts from the
    one before.

    L-BFGS minimises ``sum of weighted losses + penalty / 2 * |weights|²``. Columns are orthogonal
    and centred within runs, so that the curvature is nearly diagonal. Each parameter is scaled by
    the root of its own curvature; then some ten steps are enough.

    Args:
        coordinates: ``[n, m]``.
        runs: ``[n]`` run of each context.
        positives: ``[n]`` k.
        trials: ``[n]`` n.
        penalties: descending.
        run_count: how many intercepts. A run without contexts gets the mean of the others.
    """
    weight = trials / trials.mean()
    target = positives / trials * weight
    present, own = np.unique(runs, return_inverse=True)
    mass, m = np.bincount(own, weight), coordinates.shape[1]
    rate = np.clip(np.bincount(own, target) / mass, 1e-3, 1 - 1e-3)
    of_runs = mass * rate * (1 - rate)
    curvature = np.concatenate([(coordinates**2).sum(0) * of_runs.sum() / len(own), of_runs])
    ridge = np.full(len(curvature), INTERCEPT_PENALTY)

    def objective(scaled: np.ndarray, unit: np.ndarray) -> tuple[float, np.ndarray]:
        theta = scaled * unit
        margin = coordinates @ theta[:m] + theta[m:][own]
        loss = weight @ np.logaddexp(0, margin) - target @ margin + ridge @ theta**2 / 2
        left = weight * expit(margin) - target
        slope = np.concatenate([left @ coordinates, np.bincount(own, left)]) + ridge * theta
        return float(loss), slope * unit

    theta, found = np.concatenate([np.zeros(m), np.log(rate / (1 - rate))]), []
    options = {"maxiter": STEPS, "maxfun": STEPS, "ftol": 0, "gtol": TOLERANCE, "maxcor": 20}
    for penalty in penalties:
        ridge[:m] = penalty
        unit = 1 / np.sqrt(curvature + ridge)
        best = minimize(
            objective, theta / unit, (unit,), method="L-BFGS-B", jac=True, options=options
        )
        theta = best.x * unit
        intercepts = np.full(run_count, theta[m:].mean())
        intercepts[present] = theta[m:]
        found.append(Fit(theta[:m], intercepts))
    return found
