"""Nested cross-validation of probes at one layer and position.

Five folds give the outer loop; for each of them the other four give the inner loop. A probe that
leaves out two folds serves both of them, so that five folds need ten inner and five outer
decompositions, which all penalties and permutations share.

Selection and permutation tests use the closed form (ridge on the rates), which costs one matrix
product for all permutations; the reported scores are those of logistic regression.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from ia_mech.stats import auroc_columns
from probes.fit.solvers import PENALTIES, Features, Fit, Projection, logistic_path, project
from probes.targets import Outcome

# Contexts with equal states tie, though the last bits of their scores may differ.
DIGITS = 9  # of log-odds
SHARE_DIGITS = 5  # of float32 predictions, as shares of the largest


@dataclass(frozen=True)
class Design:
    """What all layers and positions share: outcome, folds, permuted labels, penalties.

    Attributes:
        outcome: k of n per context.
        folds: ``[contexts]`` fold of each.
        label_rows: ``[1 + permutations, contexts]`` whose labels a context gets; row 0 is its own.
        penalties: falling.
    """

    outcome: Outcome
    folds: np.ndarray
    label_rows: np.ndarray
    penalties: tuple[float, ...] = PENALTIES

    @classmethod
    def from_outcome(
        cls, outcome: Outcome, folds: np.ndarray, permuted: Iterable[np.ndarray] = ()
    ) -> "Design":
        """With these permutations (none if not given)."""
        return cls(outcome, folds, np.array([np.arange(len(outcome)), *permuted]))

    def observed(self) -> "Design":
        """The same without permutations."""
        return replace(self, label_rows=self.label_rows[:1])

    @property
    def fold_count(self) -> int:
        return int(self.folds.max()) + 1

    @property
    def run_count(self) -> int:
        return int(self.outcome.runs.max()) + 1

    @cached_property
    def rates(self) -> np.ndarray:
        """``[contexts, 1 + permutations]`` float32."""
        return self.outcome.rate[self.label_rows].T.astype(np.float32)

    @cached_property
    def standard(self) -> dict[int, np.ndarray]:
        """Rates of each fold's contexts, centred within runs, columns of length 1 (or 0)."""
        found = {}
        for fold in range(self.fold_count):
            rows = self.rows_of(fold)
            found[fold] = _unit(_within(self.rates[rows], self.outcome.runs[rows]))
        return found

    def rows_of(self, *folds: int) -> np.ndarray:
        return np.flatnonzero(np.isin(self.folds, folds))

    def rows_outside(self, *folds: int) -> np.ndarray:
        return np.flatnonzero(~np.isin(self.folds, folds))


@dataclass(frozen=True)
class CrossValidated:
    """What nested cross-validation finds at one layer and position.

    Attributes:
        inner_correlation: ``[folds, 1 + permutations]`` float32, for each outer fold the best
            penalty's correlation with the rates, mean over inner folds; by the closed form.
        outer_auroc: ``[folds, 1 + permutations]`` float32, in the outer fold with that penalty.
        whole_correlation: over all folds, of the best penalty, for the selection on all contexts.
        scores: ``[contexts]`` log-odds, each from the logistic probe of its outer fold.
        penalties: ``[folds]`` that probe's penalty, by the inner loop.
        unreliability: of the scores, see :func:`unreliability`.
        differs: whether any two contexts of a run have different states.
    """

    inner_correlation: np.ndarray
    outer_auroc: np.ndarray
    whole_correlation: float
    scores: np.ndarray
    penalties: np.ndarray
    unreliability: float
    differs: bool


def cross_validate(features: Features, design: Design) -> CrossValidated:
    """Select penalties, score and test the probes at one layer and position."""
    number, runs = design.fold_count, design.outcome.runs
    columns = design.rates.shape[1]
    inner = np.zeros((number, len(design.penalties), columns), dtype=np.float32)
    loop = InnerLoop(design)
    for pair in combinations(range(number), 2):
        test = design.rows_of(*pair)
        projection = project(features, design.rows_outside(*pair), test, runs)
        here = {fold: design.folds[test] == fold for fold in pair}
        for at, predicted in enumerate(ridge_predictions(projection, design)):
            for fold, other in (pair, pair[::-1]):
                # Predictions for one fold help to choose for the other.
                inner[other, at] += correlation(predicted[here[fold]], design, fold)
        loop.add(projection, test, pair)
    inner /= number - 1
    best = inner.argmax(1)
    outer = np.empty((number, columns), dtype=np.float32)
    whole = np.zeros(len(design.penalties))
    scores, chosen = np.empty(len(runs)), np.empty(number)
    for fold in range(number):
        test = design.rows_of(fold)
        projection = project(features, design.rows_outside(fold), test, runs)
        predicted = ridge_predictions(projection, design)
        for at, own in enumerate(predicted[..., :1]):
            whole[at] += correlation(own, design, fold)[0] / number
        outer[fold] = fold_auroc(with_penalties(predicted, best[fold]), design, test)
        chosen[fold] = loop.penalty(fold)
        raw = fit(projection, design, chosen[fold]).scores(projection.test, runs[test])
        scores[test] = np.round(raw, DIGITS)

    def by_half(fold: int, train: np.ndarray) -> np.ndarray:
        return scores_in(features, design, fold, train, chosen[fold])

    by_run = (features.centred[runs == run] for run in np.unique(runs))
    return CrossValidated(
        inner_correlation=inner.max(1),
        outer_auroc=outer,
        whole_correlation=float(whole.max()),
        scores=scores,
        penalties=chosen,
        unreliability=unreliability(design, by_half),
        differs=any((states != states[0]).any() for states in by_run),
    )


def unreliability(design: Design, predict: Callable[[int, np.ndarray], np.ndarray]) -> float:
    """Share of the variance of new contexts' scores that is chance in training: one less their
    reliability.

    For each outer fold two probes are trained on one half each of the other folds, which share no
    source, and their scores in that fold are correlated within runs. Stepped up to the whole
    training set (Spearman–Brown) that is the reliability of the scores. Folds
    that both halves score alike throughout say nothing of it.

    Args:
        design: outcome and folds.
        predict: ``(fold, train rows) -> [contexts of the fold]`` scores, trained on those rows.

    Returns:
        0 (two such probes agree, or all scores are constant) to 1 (they have nothing in common).
    """
    runs, agreement = design.outcome.runs, []
    for fold in range(design.fold_count):
        test = design.rows_of(fold)
        others = [other for other in range(design.fold_count) if other != fold]
        halves = []
        for half in (others[::2], others[1::2]):
            scores = predict(fold, design.rows_of(*half))
            halves.append(_unit(_within(scores[:, None], runs[test])))
        if halves[0].any() or halves[1].any():
            agreement.append(float((halves[0] * halves[1]).sum()))
    if len(agreement) < 2:
        return float(len(agreement))
    # One standard error less: overstated agreement would make intervals too short.
    lower = np.mean(agreement) - np.std(agreement, ddof=1) / np.sqrt(len(agreement))
    lower = max(float(lower), 0.0)
    return 1 - 2 * lower / (1 + lower)


# -- logistic regression --------------------------------------------------------------------------


def fit(projection: Projection, design: Design, penalty: float) -> Fit:
    """The logistic probe of the projection's training rows."""
    return fit_path(projection, design, [penalty])[0]


def scores_in(
    features: Features, design: Design, fold: int, train: np.ndarray, penalty: float
) -> np.ndarray:
    """``[contexts of the fold]`` scores of the logistic probe of the training rows."""
    test, runs = design.rows_of(fold), design.outcome.runs
    projection = project(features, train, test, runs)
    return fit(projection, design, penalty).scores(projection.test, runs[test])


def fit_path(projection: Projection, design: Design, penalties: Sequence[float]) -> list[Fit]:
    """The same for several penalties, which fall."""
    rows, outcome = projection.rows, design.outcome
    labels = outcome.runs[rows], outcome.positives[rows], outcome.trials[rows]
    return logistic_path(projection.train, *labels, penalties, design.run_count)


def held_out_loss(scores: np.ndarray, outcome: Outcome) -> np.ndarray:
    """``[…, contexts]`` loss of log-odds in nats, summed over the turns of each context.

    Where responses to one query are compared, a query's level isn't known: of each turn with the
    property and each turn without it after another response, the loss is that of telling which is
    which (the conditional likelihood of the pair, which has no level). A query's mean over such
    pairs is shared out among its contexts, and counts as often as it has turns.
    """
    if not outcome.compares_siblings:
        return outcome.trials * np.logaddexp(0, scores) - outcome.positives * scores
    losses = np.zeros(scores.shape)
    for run in range(int(outcome.runs.max()) + 1):
        rows = np.flatnonzero(outcome.runs == run)
        pairs = np.outer(outcome.positives[rows], outcome.negatives[rows])
        pairs[np.diag_indices(len(rows))] = 0
        if total := pairs.sum():
            apart = scores[..., rows, None] - scores[..., None, rows]
            share = pairs * (outcome.trials[rows].sum() / total)
            losses[..., rows] = (share * np.logaddexp(0, -apart)).sum(-1)
    return losses


class InnerLoop:
    """The inner loop of logistic regression, which chooses a penalty."""

    def __init__(self, design: Design) -> None:
        self.design = design
        # [outer fold, penalty, context]: a context's score by the probe trained without both folds.
        shape = (design.fold_count, len(design.penalties), len(design.outcome))
        self.scores = np.full(shape, np.nan)

    def add(self, projection: Projection, test: np.ndarray, pair: tuple[int, int]) -> None:
        """Fit without both folds of a pair, and score them."""
        runs = self.design.outcome.runs[test]
        for at, fitted in enumerate(fit_path(projection, self.design, self.design.penalties)):
            scores = fitted.scores(projection.test, runs)
            for fold, other in (pair, pair[::-1]):
                here = self.design.folds[test] == fold
                self.scores[other, at, test[here]] = scores[here]

    def losses(self, fold: int) -> np.ndarray:
        """``[penalties]`` held-out loss over all other folds, in nats."""
        rows = self.design.rows_outside(fold)
        return held_out_loss(self.scores[fold][:, rows], self.design.outcome.take(rows)).sum(1)

    def penalty(self, fold: int) -> float:
        """Of the smallest held-out loss."""
        return self.design.penalties[int(np.argmin(self.losses(fold)))]


# -- the closed form ------------------------------------------------------------------------------


def ridge_predictions(projection: Projection, design: Design) -> np.ndarray:
    """``[penalties, test, 1 + permutations]`` float32, up to a constant per run."""
    train = projection.train.astype(np.float32)
    projected = train.T @ design.rates[projection.rows]
    shrunk = (projection.test / (projection.squares + penalty) for penalty in design.penalties)
    return np.stack([coordinates.astype(np.float32) @ projected for coordinates in shrunk])


def with_penalties(predicted: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """``[test, columns]`` of :func:`ridge_predictions`, each column by the penalty (an index) that
    was chosen for it."""
    return np.take_along_axis(predicted, chosen[None, None], axis=0)[0]


def correlation(predicted: np.ndarray, design: Design, fold: int) -> np.ndarray:
    """``[columns]`` correlation of predictions with a fold's rates, both less their runs' means."""
    rows = design.rows_of(fold)
    centred = _within(predicted, design.outcome.runs[rows])
    truth = design.standard[fold][:, : predicted.shape[1]]
    length = np.sqrt(np.einsum("nc,nc->c", centred, centred))
    product = np.einsum("nc,nc->c", centred, truth)
    return np.divide(product, length, out=np.zeros_like(product), where=length > 0)


def fold_auroc(scores: np.ndarray, design: Design, rows: np.ndarray) -> np.ndarray:
    """``[columns]`` AUROC within runs of a fold's contexts, under each permutation's labels."""
    outcome = design.outcome
    largest = np.abs(scores).max(0)
    scores = np.round(scores / np.where(largest > 0, largest, 1), SHARE_DIGITS)
    k, n = (
        outcome.positives[design.label_rows[:, rows]].T,
        outcome.trials[design.label_rows[:, rows]].T,
    )
    won, total = np.zeros(k.shape[1]), np.zeros(k.shape[1])
    for run in np.unique(outcome.runs[rows]):
        here = outcome.runs[rows] == run
        rest = n[here] - k[here]
        pairs = k[here].sum(0) * rest.sum(0) - (k[here] * rest).sum(0)
        won = won + pairs * np.nan_to_num(auroc_columns(scores[here], k[here], n[here]))
        total = total + pairs
    return np.divide(won, total, out=np.full(len(won), 0.5), where=total > 0)


def _within(values: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Values less the mean of their run."""
    out = values.copy()
    for run in np.unique(runs):
        out[runs == run] -= out[runs == run].mean(0)
    return out


def _unit(values: np.ndarray) -> np.ndarray:
    """Columns divided by their length; those of no length become 0."""
    length = np.sqrt((values**2).sum(0))
    return np.divide(values, length, out=np.zeros_like(values), where=length > 1e-6)
