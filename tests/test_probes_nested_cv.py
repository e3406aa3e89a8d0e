"""Nested cross-validation against plain loops over scikit-learn's fits; nothing leaks."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score

from probes.fit.folds import make_folds, permutations
from probes.fit.nested_cv import Design, cross_validate, scores_in, unreliability
from probes.fit.solvers import PENALTIES, compact
from probes.targets import Outcome

FOLDS, PERMUTATIONS = 4, 2
MANY, FEW = (100, 10), (60, 80)  # contexts, features: the two ways to decompose
SHAPES = pytest.mark.parametrize("shape", [MANY, FEW], ids=["n > d", "n < d"])


@dataclass(frozen=True)
class Case:
    """The data of one cross-validation."""

    features: np.ndarray
    outcome: Outcome
    folds: np.ndarray
    label_rows: list[np.ndarray]

    def design(self):
        return Design.from_outcome(self.outcome, self.folds, tuple(self.label_rows))

    def run(self):
        return cross_validate(self.features, self.design())

    def test_rows(self, fold):
        return np.flatnonzero(self.folds == fold)


def case(shape, runs=1, seed=0, features=None):
    """Sources of one to three contexts; runs differ in their means and in their rates."""
    rng = np.random.default_rng(seed)
    number = shape[0]
    sources = np.sort(rng.integers(number // 2, size=number))
    run = sources % runs
    if features is None:
        features = rng.normal(size=shape) * np.linspace(1, 3, shape[1]) + 5 + 20 * run[:, None]
    trials = rng.integers(1, 9, number)
    logit = (features - features[run == 0].mean(0) - 20 * run[:, None])[:, -3:].sum(1) / 3
    positives = rng.binomial(trials, expit(logit - run))
    outcome = Outcome.from_counts(positives, trials, sources, run)
    folds = make_folds(outcome, FOLDS, seed)
    return Case(features, outcome, folds, list(permutations(outcome, folds, PERMUTATIONS, seed)))


# -- the slow reference ---------------------------------------------------------------------------


def prepared(features, runs, train):
    """Columns minus the training means of their run, at one scale."""
    columns = features.astype(float)
    for run in np.unique(runs):
        columns[runs == run] -= features[train][runs[train] == run].mean(0)
    return columns / np.sqrt((columns[train] ** 2).sum(1).mean())


def within(values, runs):
    values = np.array(values, dtype=float)
    for run in np.unique(runs):
        values[runs == run] -= values[runs == run].mean()
    return values


def correlation(said, rate, runs):
    said, rate = within(said, runs), within(rate, runs)
    return said @ rate / np.sqrt((said @ said) * (rate @ rate))


def auroc(said, k, n, runs):
    """Within runs, each pair of turns of two contexts counting alike."""
    found, weight = [], []
    for run in np.unique(runs):
        here = runs == run
        label, turns = np.repeat([1, 0], here.sum()), np.concatenate([k[here], (n - k)[here]])
        every, own = k[here].sum() * (n - k)[here].sum(), (k[here] * (n - k)[here]).sum()
        if every > own:
            area = roc_auc_score(label, np.tile(said[here], 2), sample_weight=turns)
            found.append((area * every - own / 2) / (every - own))
            weight.append(every - own)
    return np.average(found, weights=weight)


def logistic(columns, runs, k, n, train, penalty):
    """Log-odds of everyone: each context once as positive, once as negative; runs as columns."""
    dummies = 1e3 * (runs[:, None] == np.arange(runs.max() + 1))
    everything = np.hstack([columns, dummies])  # so large that they are as good as not penalised
    weight = np.concatenate([k[train], (n - k)[train]]) / n[train].mean()
    rows, label = np.tile(train, 2)[weight > 0], np.repeat([1, 0], len(train))[weight > 0]
    fitted = LogisticRegression(
        C=1 / penalty, tol=1e-10, max_iter=10_000, fit_intercept=False, solver="newton-cholesky"
    )
    return fitted.fit(everything[rows], label, weight[weight > 0]).decision_function(everything)


def ridge(columns, runs, rate, train, penalty):
    fitted = Ridge(alpha=penalty, fit_intercept=False, solver="cholesky")
    return fitted.fit(columns[train], within(rate[train], runs[train])).predict(columns)


def reference_scores(case):
    """Log-odds and penalties, each outer fold with the other folds as inner ones."""
    k, n, runs = case.outcome.positives, case.outcome.trials, case.outcome.runs

    def scores_on(train, penalty):
        columns = prepared(case.features, runs, train)
        return logistic(columns, runs, k, n, train, penalty)

    scores, chosen = np.empty(len(k)), np.empty(FOLDS)
    for outer in range(FOLDS):
        lost = np.zeros(len(PENALTIES))
        for inner in set(range(FOLDS)) - {outer}:
            train = np.flatnonzero(~np.isin(case.folds, [outer, inner]))
            test = case.test_rows(inner)
            for at, penalty in enumerate(PENALTIES):
                margin = scores_on(train, penalty)[test]
                lost[at] += (n[test] * np.logaddexp(0, margin) - k[test] * margin).sum()
        chosen[outer] = PENALTIES[lost.argmin()]
        rest, test = np.flatnonzero(case.folds != outer), case.test_rows(outer)
        scores[test] = scores_on(rest, chosen[outer])[test]
    return scores, chosen


def reference_closed_form(case):
    """Inner, outer and whole statistics, with every fit made anew for every column of labels."""
    runs, columns = case.outcome.runs, [np.arange(len(case.outcome)), *case.label_rows]
    inner, outer = np.empty((2, FOLDS, len(columns)))
    whole = np.zeros(len(PENALTIES))
    for column, taken in enumerate(columns):
        k, n = case.outcome.positives[taken], case.outcome.trials[taken]
        rate = k / n
        for fold in range(FOLDS):
            worth = np.zeros(len(PENALTIES))
            for other in set(range(FOLDS)) - {fold}:
                train = np.flatnonzero(~np.isin(case.folds, [fold, other]))
                test, x = case.test_rows(other), prepared(case.features, runs, train)
                for at, penalty in enumerate(PENALTIES):
                    said = ridge(x, runs, rate, train, penalty)[test]
                    worth[at] += correlation(said, rate[test], runs[test]) / (FOLDS - 1)
            inner[fold, column] = worth.max()
            train, test = np.flatnonzero(case.folds != fold), case.test_rows(fold)
            x = prepared(case.features, runs, train)
            every = [ridge(x, runs, rate, train, penalty)[test] for penalty in PENALTIES]
            # Equal contexts tie, though their last digits differ.
            picked = np.round(every[worth.argmax()], 8)
            outer[fold, column] = auroc(picked, k[test], n[test], runs[test])
            if column == 0:
                whole += [correlation(said, rate[test], runs[test]) / FOLDS for said in every]
    return inner, outer, whole.max()


# -- fast against slow ----------------------------------------------------------------------------


@SHAPES
def test_the_closed_form_is_ridge_fitted_anew_for_all_labels(shape):
    made = case(shape, runs=2)
    found = made.run()
    inner, outer, whole = reference_closed_form(made)
    assert found.inner_correlation.shape == found.outer_auroc.shape == (FOLDS, 1 + PERMUTATIONS)
    np.testing.assert_allclose(found.inner_correlation, inner, atol=1e-4)
    np.testing.assert_allclose(found.outer_auroc, outer, atol=1e-3)
    assert found.whole_correlation == pytest.approx(whole, abs=1e-4)
    assert (
        found.inner_correlation[:, 0].mean() > 0.2 and found.outer_auroc[:, 0].mean() > 0.6
    )  # there is something


@pytest.mark.parametrize(("shape", "runs"), [(MANY, 2), (FEW, 1)], ids=["n > d", "n < d"])
def test_scores_and_penalties_are_those_of_nested_loops(shape, runs):
    made = case(shape, runs, seed=1)
    found = made.run()
    scores, penalties = reference_scores(made)
    np.testing.assert_array_equal(found.penalties, penalties)
    np.testing.assert_allclose(found.scores, scores, atol=1e-3)


# -- awkward states -------------------------------------------------------------------------------


@SHAPES
def test_constant_states_show_nothing(shape):
    made = case(shape, runs=2)
    constant = np.full(shape, 1234.5) + np.arange(shape[1]) / 7 + 100 * made.outcome.runs[:, None]
    made = replace(made, features=constant.astype(np.float32))
    found = made.run()
    assert not found.inner_correlation.any() and found.whole_correlation == 0
    assert (found.outer_auroc == 0.5).all() and found.unreliability == 0
    for fold in range(FOLDS):
        test, rest = made.test_rows(fold), made.folds != fold
        for run in (0, 1):
            here = made.outcome.runs == run
            (level,) = set(found.scores[test][here[test]])
            rate = (
                made.outcome.positives[rest & here].sum() / made.outcome.trials[rest & here].sum()
            )
            assert expit(level) == pytest.approx(rate, abs=1e-4)


@pytest.mark.parametrize("width", [3, 100], ids=["n > d", "n < d"])
def test_contexts_with_equal_states_tie(width):
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 3, 80)  # as where the state is that of a token: there are few
    states = (rng.normal(size=(3, width)) * 3 + 5)[kind]
    made = replace(case((80, width), runs=2, features=states), label_rows=[])
    groups = [(made.folds == f) & (made.outcome.runs == r) for f in range(FOLDS) for r in range(2)]
    _, outer, _ = reference_closed_form(made)
    found = made.run()
    np.testing.assert_allclose(found.outer_auroc, outer, atol=1e-3)
    for here in groups:
        assert len(set(found.scores[here])) == len(set(kind[here]))


# -- chance in training ---------------------------------------------------------------------------


def noise_share(strength, seed, contexts=200, width=20):
    """Share of chance in training, with a signal of this multiple of the noise along it."""
    rng = np.random.default_rng(seed)
    latent, run = rng.normal(size=contexts), np.arange(contexts) % 2
    features = rng.normal(size=(contexts, width)) + 10 * run[:, None]
    features[:, 0] += strength * latent
    outcome = Outcome.from_counts(
        rng.binomial(8, expit(2 * latent - run)), np.full(contexts, 8), range(contexts), run
    )
    design = Design.from_outcome(outcome, make_folds(outcome, 5, seed))
    states = compact(features)
    found = cross_validate(features, design)

    def by_half(fold, train):
        return scores_in(states, design, fold, train, found.penalties[fold])

    again = unreliability(design, by_half)
    assert found.unreliability == again and 0 <= again <= 1
    return again


def test_without_a_signal_all_is_chance_in_training_and_with_a_strong_one_nothing():
    nothing, strong = ([noise_share(s, seed) for seed in range(3)] for s in (0, 50))
    assert np.mean(nothing) > 0.85 and min(nothing) > 0.6
    assert max(strong) < 0.05
    assert max(strong) < np.mean([noise_share(1, seed) for seed in range(3)]) < 0.8


# -- nothing leaks --------------------------------------------------------------------------------


def test_labels_of_a_fold_do_not_influence_its_scores():
    made, fold = case(FEW, runs=2), 3
    tested = made.folds == fold
    flipped = np.where(tested, made.outcome.negatives, made.outcome.positives)
    other = replace(made, outcome=replace(made.outcome, positives=flipped), label_rows=[])
    one, two = replace(made, label_rows=[]).run(), other.run()
    np.testing.assert_array_equal(one.scores[tested], two.scores[tested])
    assert one.penalties[fold] == two.penalties[fold]
    np.testing.assert_array_equal(one.inner_correlation[fold], two.inner_correlation[fold])
    # The same scores for opposite labels.
    assert one.outer_auroc[fold] + two.outer_auroc[fold] == pytest.approx(1, abs=1e-6)


def test_states_of_a_fold_do_not_influence_what_is_chosen_for_it():
    made = case(FEW, runs=2)
    tested = made.folds == 1
    noise = np.random.default_rng(0).normal(size=FEW) * 30
    other = replace(made, features=np.where(tested[:, None], noise, made.features))
    one, two = made.run(), other.run()
    np.testing.assert_allclose(one.inner_correlation[1], two.inner_correlation[1], atol=1e-5)
    assert one.penalties[1] == two.penalties[1]
    assert abs(one.inner_correlation[0] - two.inner_correlation[0]).max() > 1e-3


def test_a_context_is_scored_by_itself_and_rotations_change_nothing():
    made = case(FEW, runs=2)
    at = made.test_rows(2)[0]
    others = np.flatnonzero((made.folds == 2) & (np.arange(len(made.folds)) != at))
    changed = made.features.copy()
    changed[others] *= 3
    one, two = made.run(), replace(made, features=changed).run()
    assert one.scores[at] == pytest.approx(two.scores[at], abs=1e-6)
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(FEW[1], FEW[1])))
    other = replace(made, features=made.features @ turn * 40 - 300)
    two = other.run()
    np.testing.assert_allclose(one.scores, two.scores, atol=1e-5)
    np.testing.assert_allclose(one.inner_correlation, two.inner_correlation, atol=1e-4)
