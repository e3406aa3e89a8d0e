"""Principal axes, and logistic regression against scikit-learn; odd scales."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from probes.fit.solvers import PENALTIES, compact, logistic_path, project

FEW, MANY = (150, 20), (60, 120)  # contexts, features: the two ways to decompose
SHAPES = pytest.mark.parametrize("shape", [FEW, MANY], ids=["n > d", "n < d"])


def contexts(shape, seed=0, trials=8):
    """Features far from zero, and k of n (n differing) that depend on the first of them."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=shape) * np.linspace(1, 3, shape[1]) + 5
    n = rng.integers(1, trials + 1, shape[0])
    k = rng.binomial(n, expit(features[:, 0] - 5.5))
    return features, k, n


def scaled(features):
    centred = features - features.mean(0)
    scale = 1 / np.sqrt((centred**2).sum(1).mean())
    return centred * scale, scale


def reference(columns, k, n, penalty, **settings):
    """scikit-learn's logistic regression: each context once as positive and once as negative."""
    weight = np.concatenate([k, n - k]) / n.mean()
    label = np.repeat([1, 0], len(k))
    # Weights of 0 are dropped: they change nothing but the number of rows.
    rows = np.tile(np.arange(len(k)), 2)[weight > 0]
    settings = {"solver": "newton-cholesky"} | settings
    found = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000, **settings)
    return found.fit(columns[rows], label[weight > 0], weight[weight > 0])


def projected(features):
    """All contexts as training contexts of one run."""
    rows = np.arange(len(features))
    return project(features, rows, np.zeros(len(rows), int))


def fitted(features, k, n, penalty, runs=None):
    """``[d]`` weights on features as they are, ``[runs]`` intercepts, ``[n]`` log-odds."""
    rows = np.arange(len(features))
    runs = np.zeros(len(features), int) if runs is None else runs
    split = project(features, rows, runs)
    (fit,) = logistic_path(split.train, runs, k, n, [penalty], runs.max() + 1)
    weights = split.axes @ fit.weights
    return weights, fit.intercepts - split.centres @ weights, fit.scores(split.train, runs)


# -- against scikit-learn -------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("penalty", PENALTIES[::2])
def test_weights_are_scikit_learns(shape, penalty):
    features, k, n = contexts(shape)
    ours, _, scores = fitted(features, k, n, penalty)
    columns, scale = scaled(features)
    found = reference(columns, k, n, penalty)
    weights = found.coef_[0] * scale
    np.testing.assert_allclose(ours, weights, atol=1e-4 * abs(weights).max())
    np.testing.assert_allclose(scores, found.decision_function(columns), rtol=1e-4, atol=1e-4)


@SHAPES
def test_a_massive_activation_changes_nothing_in_that(shape):
    features, k, n = contexts(shape, seed=2)
    features[:, 3] = features[:, 3] * 1e4 + 1e6
    columns, scale = scaled(features)
    for penalty in (1e-3, 1e-6):  # the massive one has nearly all of the squared norm
        found = reference(columns, k, n, penalty)
        # Weights of very different sizes are compared by their effect on the scores.
        ours = fitted(features, k, n, penalty)[0] * features.std(0)
        theirs = found.coef_[0] * scale * features.std(0)
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * abs(theirs).max())


@SHAPES
def test_several_runs_get_an_intercept_each_that_is_not_penalised(shape):
    features, k, n = contexts(shape, seed=3)
    runs = np.arange(len(features)) % 3
    features = features + 10.0 * runs[:, None]  # runs differ in their means, which must not count
    k = np.where(runs == 1, np.minimum(k + 1, n), k)
    ours, intercepts, _ = fitted(features, k, n, 1.0, runs)
    centres = np.array([features[runs == run].mean(0) for run in range(3)])
    centred = features - centres[runs]
    scale = 1 / np.sqrt((centred**2).sum(1).mean())
    dummies = 1e3 * (runs[:, None] == np.arange(3))
    columns = np.hstack([centred * scale, dummies])
    found = reference(columns, k, n, 1.0, fit_intercept=False)
    weights, levels = found.coef_[0, :-3] * scale, found.coef_[0, -3:] * 1e3
    np.testing.assert_allclose(ours, weights, atol=1e-3 * abs(weights).max())
    np.testing.assert_allclose(intercepts + centres @ ours, levels, atol=1e-3)


# -- coordinates ----------------------------------------------------------------------------------


@SHAPES
def test_compact_states_give_the_same_probes_as_states_as_they_are(shape):
    features, k, n = contexts(shape)
    rows = np.arange(shape[0])
    runs, test, train = rows % 2, rows[::4], rows[rows % 4 > 0]
    small = compact(features)
    assert small.shape[1] == min(shape)
    np.testing.assert_allclose(small @ small.T, (c := features - features.mean(0)) @ c.T, atol=1e-9)
    found = []
    for states in (features, small):
        split = project(states, train, runs)
        labels = runs[train], k[train], n[train]
        path = logistic_path(split.train, *labels, [1.0, 0.01], 2)
        found.append([split.squares, *(fit.scores(split.at(test), runs[test]) for fit in path)])
        products = split.train.T @ split.train
        np.testing.assert_allclose(products, np.diag(split.squares), atol=1e-9)
        assert (split.train**2).sum(1).mean() == pytest.approx(1)
        assert (np.diff(split.squares) <= 0).all()
        # Coordinates and features give the same scores of contexts that weren't fitted on.
        raw = (states - split.centres[runs])[test] @ (split.axes @ path[1].weights)
        np.testing.assert_allclose(raw + path[1].intercepts[runs[test]], found[-1][-1], atol=1e-8)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * abs(other).max())


@SHAPES
def test_a_run_without_training_contexts_is_centred_on_the_mean_of_all(shape):
    features, k, n = contexts(shape)
    runs = (np.arange(shape[0]) >= 50).astype(int)
    train = np.flatnonzero(runs == 0)
    split = project(features, train, runs)
    np.testing.assert_allclose(*split.centres, atol=1e-12)
    (fit,) = logistic_path(split.train, runs[train], k[train], n[train], [1.0], 2)
    assert fit.intercepts[1] == fit.intercepts[0]


# -- what may go wrong ----------------------------------------------------------------------------


@SHAPES
def test_a_run_of_negatives_only_stays_finite(shape):
    features, k, n = contexts(shape)
    runs = np.arange(shape[0]) % 2
    k = np.where(runs == 1, 0, k)
    weights, intercepts, _ = fitted(features, k, n, 1.0, runs)
    assert np.isfinite(weights).all() and np.isfinite(intercepts).all()
    centres = np.array([features[runs == run].mean(0) for run in range(2)])
    chance = expit(intercepts + centres @ weights)
    assert chance[1] < 0.01 < chance[0]
