"""Solvers and estimators against scikit-learn and formulas, both decompositions, odd scales."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import ortho_group
from sklearn.base import clone
from sklearn.covariance import ledoit_wolf, ledoit_wolf_shrinkage
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from probes.estimators import LDAProbe, LogisticProbe, MassMeanProbe, RidgeProbe, make
from probes.fit import solvers
from probes.fit.solvers import ESTIMATORS, PENALTIES, Features, Training, project

FEW, MANY = (150, 20), (60, 200)  # contexts, features: the two ways to decompose
SHAPES = pytest.mark.parametrize("shape", [FEW, MANY], ids=["n > d", "n < d"])
ALL = pytest.mark.parametrize("probe", [make(name, 1.0) for name in ESTIMATORS], ids=ESTIMATORS)


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


def both_ways(features):
    """The same states by their inner products and by their features."""
    centred = features - features.mean(0)
    size = Features.of(features).size
    return Features(centred, centred @ centred.T, size), Features(centred, None, size)


def projected(features):
    """All contexts as training and test contexts of one run."""
    rows = np.arange(len(features.centred))
    return project(features, rows, rows, np.zeros(len(rows), int))


def assert_parallel(one, other):
    np.testing.assert_allclose(one / np.linalg.norm(one), other / np.linalg.norm(other), atol=1e-9)


# -- against scikit-learn -------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("penalty", PENALTIES)
def test_logistic_weights_are_scikit_learns(shape, penalty):
    features, k, n = contexts(shape)
    probe = LogisticProbe(penalty).fit(features, k / n, sample_weight=n)
    columns, scale = scaled(features)
    found = reference(columns, k, n, penalty)
    weights = found.coef_[0] * scale
    np.testing.assert_allclose(probe.coef_[0], weights, atol=1e-4 * abs(weights).max())
    np.testing.assert_allclose(
        probe.decision_function(features), found.decision_function(columns), rtol=1e-4, atol=1e-4
    )


@SHAPES
def test_a_massive_activation_changes_nothing_in_that(shape):
    features, k, n = contexts(shape, seed=2)
    features[:, 3] = features[:, 3] * 1e4 + 1e6
    columns, scale = scaled(features)
    for penalty in (1e-3, 1e-6):  # the massive one has nearly all of the squared norm
        probe = LogisticProbe(penalty).fit(features, k / n, sample_weight=n)
        found = reference(columns, k, n, penalty)
        # Weights of so different sizes compare as what they do to the features.
        ours, theirs = probe.coef_[0] * features.std(0), found.coef_[0] * scale * features.std(0)
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * abs(theirs).max())


@SHAPES
def test_several_runs_get_an_intercept_each_that_is_not_penalised(shape):
    features, k, n = contexts(shape, seed=3)
    runs = np.arange(len(features)) % 3
    features = features + 10.0 * runs[:, None]  # runs differ in their means, which must not count
    k = np.where(runs == 1, np.minimum(k + 1, n), k)
    probe = LogisticProbe(1.0).fit(features, k / n, sample_weight=n, runs=runs)
    centres = np.array([features[runs == run].mean(0) for run in range(3)])
    centred = features - centres[runs]
    scale = 1 / np.sqrt((centred**2).sum(1).mean())
    dummies = 1e3 * (runs[:, None] == np.arange(3))
    columns = np.hstack([centred * scale, dummies])
    found = reference(columns, k, n, 1.0, fit_intercept=False)
    weights, levels = found.coef_[0, :-3] * scale, found.coef_[0, -3:] * 1e3
    np.testing.assert_allclose(probe.coef_[0], weights, atol=1e-3 * abs(weights).max())
    np.testing.assert_allclose(probe.intercepts_ + centres @ probe.coef_[0], levels, atol=1e-3)
    np.testing.assert_allclose(probe.intercept_, [probe.intercepts_.mean()])
    # Named runs in any order are the same runs.
    named = LogisticProbe(1.0).fit(
        features, k / n, sample_weight=n, runs=np.array(list("abc"))[runs]
    )
    np.testing.assert_array_equal(named.intercepts_, probe.intercepts_)


@SHAPES
def test_closed_forms_are_scikit_learns(shape):
    features, k, n = contexts(shape)
    columns, scale = scaled(features)
    theirs = [Ridge(alpha=p, solver="cholesky").fit(columns, k / n).coef_ for p in PENALTIES]
    for states in both_ways(features):
        projection = projected(states)
        training = Training(projection, k, n, np.zeros(shape[0], int), 1)
        for fit, expected in zip(solvers.ridge(training, PENALTIES), theirs, strict=True):
            error = abs(projection.weights(fit.weights) / scale - expected).max()
            assert error < 1e-8 * abs(expected).max()
        intensity, target = solvers.shrinkage(projection.train, projection.squares, shape[1])
        assert intensity == pytest.approx(ledoit_wolf_shrinkage(columns), abs=1e-8)
        assert target == pytest.approx((columns**2).mean(), rel=1e-8)
    positive, negative = (np.average(features, axis=0, weights=w) for w in (k, n - k))
    covariance, _ = ledoit_wolf(features)
    for probe, direction in [
        (RidgeProbe(PENALTIES[2]), theirs[2]),
        (MassMeanProbe(), positive - negative),
        (LDAProbe(), np.linalg.solve(covariance, positive - negative)),
    ]:
        assert_parallel(probe.fit(features, k / n, sample_weight=n).coef_[0], direction)


def test_calibration_is_a_logistic_regression_on_the_score():
    features, k, n = contexts((400, 3))
    scores, runs = 100 + 20 * features[:, 0], np.zeros(400, int)
    slope, level = solvers.platt(scores, runs, k, n, 1)
    columns = scaled(scores[:, None])[0]
    expected = reference(columns, k, n, 1e-3).decision_function(columns)
    np.testing.assert_allclose(slope * scores + level[0], expected, atol=1e-4)
    assert solvers.platt(np.ones(400), runs, k, n, 1)[0] == 0


# -- coordinates ----------------------------------------------------------------------------------


@SHAPES
def test_inner_products_and_features_give_the_same(shape):
    features, k, n = contexts(shape)
    rows = np.arange(shape[0])
    runs, test, train = rows % 2, rows[::4], rows[rows % 4 > 0]
    found = []
    for states in both_ways(features):
        projection = project(states, train, test, runs)
        labels = runs[train], k[train], n[train]
        path = solvers.logistic_path(projection.train, *labels, [1.0, 0.01], 2)
        scores = [fit.scores(projection.test, runs[test]) for fit in path]
        weights = [projection.weights(fit.weights) for fit in path]
        found.append([projection.squares, *scores, *weights])
        products = projection.train.T @ projection.train
        np.testing.assert_allclose(products, np.diag(projection.squares), atol=1e-9)
        assert (projection.train**2).sum(1).mean() == pytest.approx(1)
        assert (np.diff(projection.squares) <= 0).all()
        # Coordinates and raw features give the same scores of contexts that weren't fitted on.
        raw = (states.centred - projection.centres()[runs])[test] @ weights[1]
        np.testing.assert_allclose(raw + path[1].intercepts[runs[test]], scores[1], atol=1e-8)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6 * abs(other).max())


@SHAPES
@ALL
def test_turned_and_shifted_features_are_predicted_alike(shape, probe):
    features, k, n = contexts(shape)
    turned = features @ ortho_group.rvs(shape[1], random_state=0) * 7 - 40
    chances = [
        clone(probe).fit(x, k / n, sample_weight=n).predict_proba(x) for x in (features, turned)
    ]
    np.testing.assert_allclose(*chances, atol=1e-6)


def test_a_run_without_training_contexts_is_centred_on_the_mean_of_all():
    for shape in (FEW, MANY):
        features, k, n = contexts(shape)
        runs = (np.arange(shape[0]) >= 50).astype(int)
        train, test = np.flatnonzero(runs == 0), np.flatnonzero(runs == 1)
        for states in both_ways(features):
            projection = project(states, train, test, runs)
            np.testing.assert_allclose(*projection.centres(), atol=1e-12)
            labels = runs[train], k[train], n[train]
            (fit,) = solvers.logistic_path(projection.train, *labels, [1.0], 2)
            assert fit.intercepts[1] == fit.intercepts[0]


# -- what may go wrong ----------------------------------------------------------------------------


@SHAPES
@ALL
def test_features_that_do_not_differ_predict_the_base_rate(shape, probe):
    _, k, n = contexts(shape)
    constant = np.full(shape, 1234.5) + np.arange(shape[1]) / 7
    for states in both_ways(constant):
        assert projected(states).train.shape == (shape[0], 0)
    fitted = clone(probe).fit(constant, k / n, sample_weight=n)
    assert not fitted.coef_.any()
    chance = fitted.predict_proba(constant)[:, 1]
    np.testing.assert_allclose(chance, k.sum() / n.sum(), atol=1e-5)


@pytest.mark.parametrize("penalty", [1.0, 1e-3])
@SHAPES
def test_separable_labels_converge(shape, penalty):
    features, *_ = contexts(shape)
    label = (features[:, 0] > 5).astype(int)
    probe = LogisticProbe(penalty).fit(features, label)
    columns, scale = scaled(features)
    weights = reference(columns, label, np.ones(len(label)), penalty).coef_[0] * scale
    np.testing.assert_allclose(probe.coef_[0], weights, atol=1e-4 * abs(weights).max())
    assert (probe.predict(features) == label).all() or penalty == 1


@SHAPES
@ALL
def test_a_run_of_negatives_only_stays_finite(shape, probe):
    features, k, n = contexts(shape)
    runs = np.arange(shape[0]) % 2
    k = np.where(runs == 1, 0, k)
    fitted = clone(probe).fit(features, k / n, sample_weight=n, runs=runs)
    assert np.isfinite(fitted.coef_).all() and np.isfinite(fitted.intercepts_).all()
    centres = np.array([features[runs == run].mean(0) for run in range(2)])
    chance = expit(fitted.intercepts_ + centres @ fitted.coef_[0])
    assert chance[1] < 0.01 < chance[0]


@SHAPES
def test_a_falling_path_ends_where_a_cold_start_does(shape):
    features, k, n = contexts(shape)
    labels = np.zeros(shape[0], int), k, n
    coordinates = projected(Features.of(features)).train
    path = solvers.logistic_path(coordinates, *labels, PENALTIES, 1)
    (cold,) = solvers.logistic_path(coordinates, *labels, PENALTIES[-1:], 1)
    size = abs(cold.weights).max()
    np.testing.assert_allclose(path[-1].weights, cold.weights, atol=1e-4 * size)


# -- as scikit-learn estimators -------------------------------------------------------------------


@pytest.mark.slow
@ALL
def test_scikit_learns_own_checks_pass(probe):
    weightless = "a context without turns has no rate: a weight of 0 is refused"
    checks = "sample_weight_equivalence_on_dense_data", "classifiers_one_label_sample_weights"
    expected = {f"check_{name}": weightless for name in checks}
    results = check_estimator(clone(probe), expected_failed_checks=expected, on_skip=None)
    assert len(results) > 40


@ALL
def test_it_serves_in_scikit_learns_tools(probe):
    features, k, n = contexts(FEW)
    label = (2 * k > n).astype(int)
    pipeline = make_pipeline(StandardScaler(), clone(probe))
    chance = cross_val_predict(pipeline, features, label, method="predict_proba", cv=4)
    assert chance.shape == (150, 2) and roc_auc_score(label, chance[:, 1]) > 0.6


def test_the_penalty_can_be_searched():
    features, *_ = contexts(FEW)
    search = GridSearchCV(LogisticProbe(), {"penalty": [100.0, 0.1]}, scoring="neg_log_loss", cv=3)
    assert search.fit(features, features[:, 0] > 5).best_params_["penalty"] == 0.1


def test_labels_of_any_kind_are_kept():
    features, *_ = contexts(FEW)
    label = features[:, 0] > 5
    words = np.where(label, "follow-up", "end")
    probe = LogisticProbe().fit(features, words)
    assert probe.classes_.tolist() == ["end", "follow-up"]
    assert set(probe.predict(features)) == {"end", "follow-up"}
    binary = LogisticProbe().fit(features, label)
    assert binary.classes_.tolist() == [0, 1] and binary.n_features_in_ == 20
    np.testing.assert_array_equal(binary.coef_, probe.coef_)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"X": np.where(np.eye(20) > 0, np.nan, 1.0)}, "NaN"),
        ({"X": np.where(np.eye(20) > 0, np.inf, 1.0)}, "infinity"),
        ({"y": np.ones(20)}, "alike"),
        ({"y": np.full(20, 0.3)}, "alike"),
        ({"runs": np.arange(20) % 2}, "alike"),
        ({"y": np.arange(20) / 10}, "Unknown label type"),
        ({"y": np.arange(20) % 3}, "multiclass"),
        ({"sample_weight": np.zeros(20)}, "above zero"),
        ({"sample_weight": np.full(20, np.nan)}, "finite"),
        ({"sample_weight": np.ones(19)}, "20 entries"),
        ({"runs": np.zeros(19)}, "one entry per context"),
        ({"penalty": 0.0}, "penalty"),
        ({"penalty": np.nan}, "penalty"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, problem):
    given = {"X": np.eye(20), "y": np.arange(20) % 2, "penalty": 1.0} | change
    with pytest.raises(ValueError, match=problem):
        LogisticProbe(given.pop("penalty")).fit(**given)


def test_estimators_are_made_by_name():
    assert make("logistic", 3.0).penalty == make("ridge", 3.0).penalty == 3.0
    assert isinstance(make("mass-mean", 3.0), MassMeanProbe)
    with pytest.raises(ValueError, match="'svm'; choose from logistic, mass-mean, lda, ridge"):
        make("svm", 1.0)
