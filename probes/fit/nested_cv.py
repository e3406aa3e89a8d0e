"""Nested cross-validation of probes at one layer and position.

The outer loop has five folds. For each of them, the inner loop has the other four. A probe that
leaves out two folds is used in the inner loops of both, so that five folds need ten inner and five
outer decompositions. All penalties and permutations share these.

Selection and permutation tests use the closed form (ridge regression on the rates), which takes one
matrix product for all permutations. The reported scores are those of logistic regression.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from ia_mech.stats import auroc_columns
from probes.fit.solvers import PENALTIES, Fit, Projection, compact, logistic_path, project
from probes.targets import Outcome

# Scores are rounded, so that contexts with equal states tie whatever their last bits are.
DIGITS = 9  # of log-odds
SHARE_DIGITS = 5  # of float32 predictions, as shares of the largest


@dataclass(frozen=True)
class Design:
    outcome: Outcome
    folds: np.ndarray  # [contexts] fold of each
    # [1 + permutations, contexts] the context whose labels each gets; in row 0 its own.
    label_rows: np.ndarray
    trained: np.ndarray  # [contexts] whether each may be used for training and selection
    tested: np.ndarray  # [contexts] whether each is tested; the folds of these are the outer folds
    penalties: tuple[float, ...] = PENALTIES  # descending

    @classmethod
    def from_outcome(
        cls, outcome: Outcome, folds: np.ndarray, permuted: Iterable[np.ndarray] = ()
    ) -> "Design":
        """A design in which all contexts are used for training and for testing."""
        every = np.ones(len(outcome), dtype=bool)
        return cls(outcome, folds, np.array([np.arange(len(outcome)), *permuted]), every, every)

    def observed(self) -> "Design":
        """The same design without permutations."""
        return replace(self, label_rows=self.label_rows[:1])

    @cached_property
    def fold_count(self) -> int:
        return int(self.folds.max()) + 1

    @cached_property
    def outer(self) -> list[int]:
        """The folds with contexts that are tested."""
        return np.unique(self.folds[self.tested]).tolist()

    @cached_property
    def rates(self) -> np.ndarray:
        """``[contexts, 1 + permutations]`` float32: the rates under each permutation."""
        return self.outcome.rate[self.label_rows].T.astype(np.float32)

    @cached_property
    def standard(self) -> list[np.ndarray]:
        """The standardised rates of each fold's training contexts."""
        return [self.standard_rates(self.rows_of(fold)) for fold in range(self.fold_count)]

    def standard_rates(self, rows: np.ndarray) -> np.ndarray:
        """``[rows, 1 + permutations]`` rates, centred within runs; columns of length 1 (or 0)."""
        return _unit(less_means(self.rates[rows], self.outcome.runs[rows]))

    def rows_of(self, *folds: int) -> np.ndarray:
        """The contexts of these folds that may be used for training."""
        return np.flatnonzero(self.trained & np.isin(self.folds, folds))

    def rows_outside(self, *folds: int) -> np.ndarray:
        """The contexts of all other folds that may be used for training."""
        return np.flatnonzero(self.trained & ~np.isin(self.folds, folds))

    def tested_rows(self, fold: int) -> np.ndarray:
        return np.flatnonzero(self.tested & (self.folds == fold))


@dataclass(frozen=True)
class CrossValidated:
    """The result of nested cross-validation at one layer and position.

    Correlations and AUROC are those of the closed form, scores those of logistic probes.
    """

    # [outer folds, 1 + permutations] float32 correlation with the rates: the mean over inner folds,
    # at the best penalty.
    inner_correlation: np.ndarray
    outer_auroc: np.ndarray  # [outer folds, 1 + permutations] float32, at the same penalty
    whole_correlation: float  # mean over all outer folds, for the selection on all contexts
    differs: bool  # whether two contexts of a run have different states
    scores: np.ndarray  # [contexts] log-odds from the outer fold's probe; NaN if not tested
    penalties: np.ndarray  # [outer folds] of the logistic probes, chosen by the inner loop
    unreliability: float  # of the scores, see :func:`unreliability`


def cross_validate(features: np.ndarray, design: Design) -> CrossValidated:
    """Choose penalties for probes of ``[contexts, d]`` features, score and test the probes."""
    states, runs = compact(features), design.outcome.runs
    outer, columns = design.outer, design.rates.shape[1]
    inner = np.zeros((design.fold_count, len(design.penalties), columns), dtype=np.float32)
    # [outer fold, penalty, context]: a context's score by the probe trained without both folds.
    left_out = np.full((design.fold_count, len(design.penalties), len(runs)), np.nan)
    for pair in combinations(range(design.fold_count), 2):
        if not {*pair} & {*outer}:
            continue
        split, test = project(states, design.rows_outside(*pair), runs), design.rows_of(*pair)
        here = {fold: design.folds[test] == fold for fold in pair}
        predicted = ridge_predictions(split, design, test)
        by_path = path_scores(split, design, test)
        for fold, other in (pair, pair[::-1]):
            # Predictions for one fold help to choose for the other.
            rows = test[here[fold]]
            for at in range(len(design.penalties)):
                own = predicted[at, here[fold]]
                inner[other, at] += correlation(own, design.standard[fold], runs[rows])
            left_out[other][:, rows] = by_path[:, here[fold]]
    inner /= design.fold_count - 1
    best = inner[outer].argmax(1)
    aurocs = np.empty((len(outer), columns), dtype=np.float32)
    whole = np.zeros(len(design.penalties))
    scores, chosen = np.full(len(runs), np.nan), np.empty(len(outer))
    for number, fold in enumerate(outer):
        split, test = project(states, design.rows_outside(fold), runs), design.tested_rows(fold)
        predicted = ridge_predictions(split, design, test)
        truth = design.standard_rates(test)[:, :1]
        for at, own in enumerate(predicted[..., :1]):
            whole[at] += correlation(own, truth, runs[test])[0] / len(outer)
        of_best = np.take_along_axis(predicted, best[number][None, None], axis=0)[0]
        aurocs[number] = fold_auroc(of_best, design, test)
        chosen[number] = design.penalties[inner_losses(left_out[fold], design, fold).argmin()]
        raw = fit(split, design, chosen[number]).scores(split.at(test), runs[test])
        scores[test] = np.round(raw, DIGITS)

    def by_half(fold: int, train: np.ndarray) -> np.ndarray:
        return scores_in(states, design, fold, train, chosen[outer.index(fold)])

    given = np.asarray(features)
    tested = (given[design.tested & (runs == run)] for run in np.unique(runs[design.tested]))
    return CrossValidated(
        inner_correlation=inner[outer].max(1),
        outer_auroc=aurocs,
        whole_correlation=float(whole.max()),
        differs=any(np.ptp(own, axis=0).any() for own in tested),
        scores=scores,
        penalties=chosen,
        unreliability=unreliability(design, by_half),
    )


def unreliability(design: Design, predict: Callable[[int, np.ndarray], np.ndarray]) -> float:
    """The share of the variance of new contexts' scores that is chance in training, which is one
    minus the scores' reliability.

    For each outer fold, two probes are trained, each on one half of the other folds. The halves
    share no source. The correlation of the two probes' scores in the outer fold, within runs, is
    stepped up to the whole training set (Spearman–Brown) and gives the reliability. Folds in which
    both probes give constant scores are left out.

    Args:
        design: outcome and folds.
        predict: ``(fold, train rows) -> [contexts of the fold]`` scores of a probe of these rows.

    Returns:
        From 0 (the two probes agree, or all scores are constant) to 1 (they don't correlate).
    """
    runs, agreement = design.outcome.runs, []
    for fold in design.outer:
        test = design.tested_rows(fold)
        others = [other for other in range(design.fold_count) if other != fold]
        halves = []
        for half in (others[::2], others[1::2]):
            scores = predict(fold, design.rows_of(*half))
            halves.append(_unit(less_means(scores[:, None], runs[test])))
        if halves[0].any() or halves[1].any():
            agreement.append(float((halves[0] * halves[1]).sum()))
    if len(agreement) < 2:
        return float(len(agreement))
    # One standard error less: overstated agreement would make intervals too short.
    lower = np.mean(agreement) - np.std(agreement, ddof=1) / np.sqrt(len(agreement))
    lower = max(float(lower), 0.0)
    return 1 - 2 * lower / (1 + lower)


# -- logistic regression --------------------------------------------------------------------------


def fit(split: Projection, design: Design, penalty: float) -> Fit:
    """The logistic probe that is trained on the training rows."""
    return _path(split, design, [penalty])[0]


def _path(split: Projection, design: Design, penalties: Sequence[float]) -> list[Fit]:
    rows, outcome = split.rows, design.outcome
    labels = outcome.runs[rows], outcome.positives[rows], outcome.trials[rows]
    return logistic_path(split.train, *labels, penalties, int(outcome.runs.max()) + 1)


def path_scores(split: Projection, design: Design, test: np.ndarray) -> np.ndarray:
    """``[penalties, test]`` log-odds of the logistic probes with each penalty."""
    coordinates, runs = split.at(test), design.outcome.runs[test]
    fits = _path(split, design, design.penalties)
    return np.array([fitted.scores(coordinates, runs) for fitted in fits])


def scores_in(
    features: np.ndarray, design: Design, fold: int, train: np.ndarray, penalty: float
) -> np.ndarray:
    """``[tested contexts of the fold]`` log-odds of the logistic probe of the training rows."""
    test, runs = design.tested_rows(fold), design.outcome.runs
    split = project(features, train, runs)
    return fit(split, design, penalty).scores(split.at(test), runs[test])


def inner_losses(left_out: np.ndarray, design: Design, fold: int) -> np.ndarray:
    """``[penalties]`` held-out loss in an outer fold's inner loop, in nats.

    Args:
        left_out: ``[penalties, contexts]`` log-odds of probes that were trained without the outer
            fold and without the context's own fold.
        design: outcome and folds.
        fold: the outer fold.
    """
    rows = design.rows_outside(fold)
    return held_out_loss(left_out[:, rows], design.outcome.take(rows)).sum(1)


def held_out_loss(scores: np.ndarray, outcome: Outcome) -> np.ndarray:
    """``[…, contexts]`` loss of log-odds in nats, summed over the turns of each context.

    Where siblings are compared, the level of a query isn't known. There the loss is taken over
    pairs of turns after two responses to the query, one turn with the property and one without: it
    is the loss of telling which is which (the pair's conditional likelihood, which doesn't depend
    on the level). A query's mean over its pairs is divided among its contexts, and its weight is
    its number of turns.
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


# -- the closed form ------------------------------------------------------------------------------


def ridge_predictions(split: Projection, design: Design, test: np.ndarray) -> np.ndarray:
    """``[penalties, test, 1 + permutations]`` float32 predicted rates, up to a constant per run."""
    projected = split.train.astype(np.float32).T @ design.rates[split.rows]
    coordinates = split.at(test)
    shrunk = (coordinates / (split.squares + penalty) for penalty in design.penalties)
    return np.stack([one.astype(np.float32) @ projected for one in shrunk])


def correlation(predicted: np.ndarray, standard: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """``[columns]`` correlation, within runs, of predictions with rates that
    :meth:`Design.standard_rates` has standardised."""
    centred = less_means(predicted, runs)
    length = np.sqrt(np.einsum("nc,nc->c", centred, centred))
    product = np.einsum("nc,nc->c", centred, standard)
    return np.divide(product, length, out=np.zeros_like(product), where=length > 0)


def fold_auroc(scores: np.ndarray, design: Design, rows: np.ndarray) -> np.ndarray:
    """``[columns]`` AUROC of a fold's contexts, within runs, with each permutation's labels."""
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


def less_means(values: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """``[contexts, …]`` values minus the mean of their run."""
    out = values.copy()
    for run in np.unique(runs):
        out[runs == run] -= out[runs == run].mean(0)
    return out


def _unit(values: np.ndarray) -> np.ndarray:
    """Columns divided by their length; a column without length becomes 0."""
    length = np.sqrt((values**2).sum(0))
    return np.divide(values, length, out=np.zeros_like(values), where=length > 1e-6)
