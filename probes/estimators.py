"""The probes as scikit-learn estimators, on features as they come.

They fit what :mod:`probes.fit.nested_cv` fits: features are centred (within each run) and divided
by one number, so that their mean squared norm is 1, and contexts weigh their number of trials over
its mean. ``penalty`` is of half the squared weights on such features, against the sum of losses:
scikit-learn's ``C = 1 / penalty`` there, or the ``alpha`` of its ridge regression. The resulting
weights and intercepts are for the features as given.
"""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ia_mech.stats.resampling import as_column
from probes.fit.solvers import ESTIMATORS, Features, Training, platt, project
from probes.targets import Outcome


class _Probe(ClassifierMixin, BaseEstimator):
    """A linear probe of two classes, or of rates.

    Attributes:
        coef_: ``[1, d]`` weights on the features as given; scores are log-odds.
        intercept_: ``[1]`` mean of ``intercepts_``.
        intercepts_: ``[runs]`` intercept of each run, in the sorted order of their labels.
        classes_: the two labels; 0 and 1 for rates.
        n_features_in_: d.
    """

    _name: str  # in ESTIMATORS
    penalty = 1.0  # not used by estimators without one

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        runs: Iterable[Hashable] | None = None,
    ) -> "_Probe":
        """Learn from contexts.

        ``cross_val_predict`` replaces ``y`` by class numbers first, so use it with labels, not with
        rates.

        Args:
            X: ``[n, d]``.
            y: ``[n]`` labels of two kinds, or rates between 0 and 1.
            sample_weight: ``[n]`` trials behind each rate; 1 if not given.
            runs: ``[n]`` run of each context, each with an intercept; one if not given.

        Raises:
            ValueError: a value is missing or not finite, lengths differ, a weight or the penalty
                isn't above 0, there are more than two labels, or no run has two different ones.
        """
        checked = validate_data(self, X, y, dtype=np.float64)
        features, labels = np.asarray(checked[0]), np.asarray(checked[1])
        rates, self.classes_ = _rates(labels)
        n = len(features)
        trials = np.ones(n) if sample_weight is None else as_column(sample_weight, n, "weights")
        if not (np.isfinite(trials) & (trials > 0)).all():
            raise ValueError("sample_weight must be finite and above zero")
        if not (np.isfinite(self.penalty) and self.penalty > 0):
            raise ValueError(f"penalty must be a finite number above 0, not {self.penalty}")
        # Sources only matter to folds, and there are none here.
        outcome = Outcome.of(rates * trials, trials, np.arange(n), runs)
        if all(np.ptp(rates[outcome.runs == run]) == 0 for run in np.unique(outcome.runs)):
            raise ValueError("all labels are alike (1 class), so there is nothing to learn")
        rows, run_count = np.arange(n), int(outcome.runs.max()) + 1
        projection = project(Features.of(features), rows, rows[:0], outcome.runs)
        counts = outcome.positives, outcome.trials
        training = Training(projection, *counts, outcome.runs, run_count)
        (fitted,) = ESTIMATORS[self._name].solve(training, [self.penalty])
        slope, levels = 1.0, fitted.intercepts
        if not ESTIMATORS[self._name].log_odds:
            scores = fitted.scores(projection.train, outcome.runs)
            slope, levels = platt(scores, outcome.runs, *counts, run_count)
        weights = slope * projection.weights(fitted.weights)
        centres = features.mean(axis=0) + projection.centres()
        self.coef_ = weights[None]
        self.intercepts_ = levels - centres @ weights
        self.intercept_ = self.intercepts_.mean(keepdims=True)
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """``[n]`` log-odds of the second class for ``[n, d]`` features."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return X @ self.coef_[0] + self.intercept_[0]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """``[n, 2]`` probabilities of the classes for ``[n, d]`` features."""
        chance = expit(self.decision_function(X))
        return np.column_stack([1 - chance, chance])

    def predict(self, X: ArrayLike) -> np.ndarray:
        """``[n]`` the more probable label for ``[n, d]`` features."""
        positive = self.decision_function(X) > 0
        return self.classes_[positive.astype(int)]

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class LogisticProbe(_Probe):
    """L2-penalised binomial logistic regression.

    Args:
        penalty: of half the squared weights on scaled features, above 0; see the module.
    """

    _name = "logistic"

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty


class MassMeanProbe(_Probe):
    """Difference of the means of positive and negative turns (Marks & Tegmark 2023).

    Scores become log-odds by a logistic fit on the training scores (Platt 1999): these are
    probabilities in sample. The nested analysis calibrates on inner held-out scores instead.
    """

    _name = "mass-mean"


class LDAProbe(_Probe):
    """Linear discriminant analysis with a Ledoit–Wolf covariance: the whitened mass-mean probe.

    Calibrated in sample, as :class:`MassMeanProbe` is.
    """

    _name = "lda"


class RidgeProbe(_Probe):
    """Ridge regression of the rates, every context counting alike whatever its trials.

    Trials only enter the calibration, which is in sample, as :class:`MassMeanProbe`'s is.

    Args:
        penalty: of the squared weights on scaled features, against the sum of squared errors.
    """

    _name = "ridge"

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty


_CLASSES: dict[str, type[_Probe]] = {
    probe._name: probe for probe in (LogisticProbe, MassMeanProbe, LDAProbe, RidgeProbe)
}


def make(name: str, penalty: float) -> _Probe:
    """The estimator of a name in :data:`probes.fit.solvers.ESTIMATORS`, with a penalty if it has
    one.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown estimator {name!r}; choose from {', '.join(_CLASSES)}")
    found = _CLASSES[name]()
    return found.set_params(penalty=penalty) if ESTIMATORS[name].penalised else found


def _rates(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``[n]`` rates of the second label, and the two labels."""
    y = column_or_1d(y)
    if y.dtype.kind in "fiub" and ((y >= 0) & (y <= 1)).all():
        return y.astype(float), np.array([0, 1])
    check_classification_targets(y)
    classes, codes = np.unique(y, return_inverse=True)
    if len(classes) > 2:
        raise ValueError(
            "Only binary classification is supported. The type of the target is multiclass."
        )
    return codes.astype(float), classes
