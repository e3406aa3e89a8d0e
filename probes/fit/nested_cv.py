"""One layer and position, examined in nested cross-validation.

Five folds give the outer loop, and for each of them the other four give the inner loop. So the
contexts outside two folds train for both of them, and five folds need ten inner and five outer
decompositions, which all penalties, permutations and estimators share.

Hidden states in few coordinates: what every probe here is fitted in.

Ridge, L2-penalised logistic regression, differences of means and their whitened form only ask for
inner products, so they don't change if features are rotated. With n contexts and d features, the
n × n inner products (or, if d is smaller, the d × d ones) are decomposed once per split, and all
penalties, labels and permutations share that. Centring and one scale per cell keep this property;
scaling feature by feature wouldn't.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
from scipy.linalg import eigh

from ia_mech.stats import auroc_columns
from probes.fit import solvers as fits
from probes.fit.solvers import PENALTIES, Fit
from probes.options import ESTIMATORS
from probes.outcome import Outcome

CONSTANT = 1e-12  # a variance below this share of the mean square is rounding
RANK = 1e-12  # likewise a direction's share of the largest


@dataclass(frozen=True)
class Cell:
    """Hidden states of all contexts at one layer and position, made ready for splits.

    Attributes:
        features: ``[contexts, d]`` float64 less their overall mean.
        gram: ``[contexts, contexts]`` their inner products; None where d is the smaller.
        size: mean square of the features as given.
    """

    features: np.ndarray
    gram: np.ndarray | None
    size: float

    @classmethod
    def of(cls, features: np.ndarray) -> "Cell":
        """From ``[contexts, d]`` hidden states."""
        given = np.asarray(features, dtype=np.float64)
        size = float(np.einsum("nd,nd->", given, given) / max(given.size, 1))
        # Without the common part, which may be far larger, products lose no digits to it.
        centred = given - given.mean(0)
        gram = centred @ centred.T if centred.shape[1] > len(centred) else None
        return cls(centred, gram, size)


@dataclass(frozen=True)
class Rotated:
    """Training and test contexts of one split in the training contexts' principal axes.

    Attributes:
        train: ``[train, m]``, centred within runs, mean squared norm 1; columns are orthogonal.
        test: ``[test, m]``, by the same centres, scale and axes.
        squares: ``[m]`` squared norms of the columns of ``train``, falling.
        cell: what was rotated.
        rows: the training rows.
        runs: ``[contexts]`` run of each context.
        scale: one number that features are multiplied by.
    """

    train: np.ndarray
    test: np.ndarray
    squares: np.ndarray
    cell: Cell
    rows: np.ndarray
    runs: np.ndarray
    scale: float
    _vectors: np.ndarray

    @property
    def width(self) -> int:
        return self.cell.features.shape[1]

    def weights(self, rotated: np.ndarray) -> np.ndarray:
        """``[d]`` weights on features for ``[m]`` weights on coordinates."""
        if self.cell.gram is None:
            return self._vectors @ rotated * self.scale
        centred = self.cell.features[self.rows] - self.centres()[self.runs[self.rows]]
        by_context = self._vectors @ (rotated / np.sqrt(self.squares))
        return centred.T @ by_context * self.scale**2

    def centres(self) -> np.ndarray:
        """``[runs, d]`` training mean of each run; of all runs where a run has no training row."""
        return _averages(self.rows, self.runs, len(self.runs)) @ self.cell.features


def rotate(cell: Cell, train: np.ndarray, test: np.ndarray, runs: np.ndarray) -> Rotated:
    """Principal axes of the training contexts, and everyone's coordinates in them.

    Args:
        cell: hidden states.
        train: rows to learn centres, scale and axes from.
        test: rows to express in them.
        runs: ``[contexts]`` run of each context, numbered from 0; each is centred by itself.

    Returns:
        Coordinates; with no column where the training contexts don't differ.
    """
    averages = _averages(train, runs, len(cell.features))
    if cell.gram is None:
        centres = averages @ cell.features
        fitted = cell.features[train] - centres[runs[train]]
        other = cell.features[test] - centres[runs[test]]
        products = fitted.T @ fitted
    else:
        by_run = averages @ cell.gram
        between = by_run @ averages.T
        of_train, of_test = runs[train], runs[test]
        cross = by_run[:, train]

        def centred(rows: np.ndarray, of_rows: np.ndarray) -> np.ndarray:
            block = cell.gram[np.ix_(rows, train)] - cross[of_rows]
            return block - by_run[of_train][:, rows].T + between[np.ix_(of_rows, of_train)]

        products, other = centred(train, of_train), centred(test, of_test)
        products = (products + products.T) / 2
    total = float(np.trace(products)) / len(train)
    if total <= CONSTANT * cell.size * cell.features.shape[1]:
        none = np.empty((len(train), 0))
        vectors = np.empty((len(products), 0))
        empty = np.empty((len(test), 0))
        return Rotated(none, empty, np.empty(0), cell, train, runs, 1.0, vectors)
    scale = 1 / np.sqrt(total)
    values, vectors = eigh(products, driver="evd")
    kept = values > RANK * values[-1]
    values, vectors = values[kept][::-1], vectors[:, kept][:, ::-1]
    squares = values * scale**2
    if cell.gram is None:
        coordinates, others = fitted @ vectors * scale, other @ vectors * scale
    else:
        coordinates = vectors * np.sqrt(squares)
        others = other @ (vectors / np.sqrt(values)) * scale
    return Rotated(coordinates, others, squares, cell, train, runs, scale, vectors)


def _averages(train: np.ndarray, runs: np.ndarray, contexts: int) -> np.ndarray:
    """``[runs, contexts]`` that takes the training mean of each run.

    A run without a training row gets the mean of all: the best guess for one never seen.
    """
    number = int(runs.max()) + 1
    takes = np.zeros((number, contexts))
    takes[runs[train], train] = 1
    takes[takes.sum(1) == 0] = takes.sum(0)
    return takes / takes.sum(1, keepdims=True)


DIGITS = 9  # of log-odds: contexts with equal states tie, though their last bits may differ


@dataclass(frozen=True)
class Design:
    """What is the same for all cells: outcome, folds, permuted labels, estimator.

    Attributes:
        outcome: k of n per context.
        folds: ``[contexts]`` fold of each.
        taken: ``[1 + permutations, contexts]`` whose labels a context gets; row 0 is its own.
        estimator: of the scores that are reported, a name of :data:`ESTIMATORS`.
        penalties: falling.
    """

    outcome: Outcome
    folds: np.ndarray
    taken: np.ndarray
    estimator: str = "logistic"
    penalties: tuple[float, ...] = PENALTIES

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        folds: np.ndarray,
        permuted: Iterator[np.ndarray] | tuple = (),
        estimator: str = "logistic",
    ) -> "Design":
        """With these permutations (none if not given)."""
        if estimator not in ESTIMATORS:
            known = ", ".join(ESTIMATORS)
            raise ValueError(f"unknown estimator {estimator!r}; choose from {known}")
        return cls(outcome, folds, np.array([np.arange(len(outcome)), *permuted]), estimator)

    @property
    def fold_count(self) -> int:
        return int(self.folds.max()) + 1

    @property
    def run_count(self) -> int:
        return int(self.outcome.runs.max()) + 1

    @cached_property
    def rates(self) -> np.ndarray:
        """``[contexts, 1 + permutations]`` float32."""
        return self.outcome.rate[self.taken].T.astype(np.float32)

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

    @property
    def tried(self) -> tuple[float, ...]:
        """Penalties of the reported estimator; one nominal if it has none."""
        return self.penalties if self.estimator in ("logistic", "ridge") else (0.0,)


@dataclass(frozen=True)
class Examined:
    """What came out for one cell.

    The closed form (ridge on the rates) serves selection and permutations; the estimator gives the
    scores that are reported.

    Attributes:
        inner: ``[folds, 1 + permutations]`` float32, for each outer fold the best penalty's
            correlation with the rates, mean over inner folds.
        outer: ``[folds, 1 + permutations]`` float32, AUROC in the outer fold with that penalty.
        whole: correlation over all folds of the best penalty: what the selection on all contexts
            looks at.
        scores: ``[contexts]`` the estimator's log-odds, each from the probe of its outer fold.
        penalties: ``[folds]`` the estimator's penalty, by the inner loop.
        chance: share of the variance of the scores that is chance in training, see
            :func:`chance_in_training`.
        differs: whether any two contexts of a run have different states.
    """

    inner: np.ndarray
    outer: np.ndarray
    whole: float
    scores: np.ndarray
    penalties: np.ndarray
    chance: float
    differs: bool


def examine(cell: Cell, design: Design) -> Examined:
    """Select, test and score the probes of one cell; see :class:`Examined`."""
    number, runs = design.fold_count, design.outcome.runs
    everyone = design.rates.shape[1]
    inner = np.zeros((number, len(design.penalties), everyone), dtype=np.float32)
    learnt = Inner(design)
    for pair in combinations(range(number), 2):
        train, test = design.rows_outside(*pair), design.rows_of(*pair)
        rotated = rotate(cell, train, test, runs)
        here = {fold: design.folds[test] == fold for fold in pair}
        for at, predicted in enumerate(ridge_predictions(rotated, design, train)):
            for fold, other in (pair, pair[::-1]):
                # What was predicted for one fold helps to choose for the other.
                inner[other, at] += correlation(predicted[here[fold]], design, fold)
        learnt.add(rotated, train, test, pair)
    inner /= number - 1
    best = inner.argmax(1)
    outer = np.empty((number, everyone), dtype=np.float32)
    whole = np.zeros(len(design.penalties))
    scores, chosen = np.empty(len(runs)), np.empty(number)
    for fold in range(number):
        train, test = design.rows_outside(fold), design.rows_of(fold)
        rotated = rotate(cell, train, test, runs)
        picked = np.empty((len(test), everyone), dtype=np.float32)
        for at, predicted in enumerate(ridge_predictions(rotated, design, train)):
            picked = np.where(best[fold] == at, predicted, picked)
            whole[at] += correlation(predicted[:, :1], design, fold)[0] / number
        outer[fold] = fold_auroc(picked, design, test)
        chosen[fold] = learnt.penalty(fold)
        fitted = fit(rotated, design, train, chosen[fold])
        slope, levels = learnt.calibration(fold)
        said = slope * fitted.scores(rotated.test, runs[test]) + levels[runs[test]]
        scores[test] = np.round(said, DIGITS)
    chance = chance_in_training(cell, design, chosen)
    here = (cell.features[runs == run] for run in np.unique(runs))
    differs = any((states != states[0]).any() for states in here)
    return Examined(inner.max(1), outer, float(whole.max()), scores, chosen, chance, differs)


def examine_once(cell: Cell, design: Design) -> Examined:
    """The same without permutations."""
    return examine(cell, replace(design, taken=design.taken[:1]))


def chance_in_training(cell: Cell, design: Design, penalties: np.ndarray) -> float:
    """How much of what probes say of new contexts depends on who happened to train them.

    For each outer fold two probes are trained on a half of the other folds each, which share no
    source, and their scores in that fold are correlated, within runs. Stepped up to the whole
    training set (Spearman–Brown) that is the scores' reliability; the rest is chance.

    Args:
        cell: hidden states.
        design: outcome, folds and estimator.
        penalties: ``[folds]`` of the estimator.

    Returns:
        0 (two such probes agree) to 1 (they have nothing in common).
    """
    runs, agreement = design.outcome.runs, []
    for fold in range(design.fold_count):
        test = design.rows_of(fold)
        others = [other for other in range(design.fold_count) if other != fold]
        said = []
        for half in (others[::2], others[1::2]):
            train = design.rows_of(*half)
            rotated = rotate(cell, train, test, runs)
            scores = fit(rotated, design, train, penalties[fold]).scores(rotated.test, runs[test])
            said.append(_unit(_within(scores[:, None], runs[test])))
        if not (said[0].any() or said[1].any()):
            return 0.0  # scores that don't vary depend on nobody
        agreement.append(float((said[0] * said[1]).sum()))
    # One standard error less: to overstate agreement would make intervals too short.
    halves = np.mean(agreement) - np.std(agreement, ddof=1) / np.sqrt(len(agreement))
    halves = max(float(halves), 0.0)
    return 1 - 2 * halves / (1 + halves)


def fit(rotated: Rotated, design: Design, train: np.ndarray, penalty: float) -> Fit:
    """The reported estimator on these training rows."""
    return fit_path(rotated, design, train, [penalty])[0]


def fit_path(
    rotated: Rotated, design: Design, train: np.ndarray, penalties: list[float] | tuple
) -> list[Fit]:
    """The reported estimator for several penalties; one, the same, if it has none."""
    outcome, z = design.outcome, rotated.train
    k, n, runs = outcome.positives[train], outcome.trials[train], outcome.runs[train]
    if design.estimator == "logistic":
        return fits.logistic_path(z, runs, k, n, penalties, design.run_count)
    level = np.zeros(design.run_count)
    if design.estimator == "ridge":
        rates = outcome.rate[train]
        return [Fit(fits.ridge(z, rotated.squares, rates, p), level) for p in penalties]
    if design.estimator == "mass-mean":
        return [Fit(fits.mean_difference(z, k, n), level)]
    width = rotated.width
    return [Fit(fits.whitened_difference(z, rotated.squares, width, k, n), level)]


class Inner:
    """The inner loop of the reported estimator: which penalty, and how to calibrate."""

    def __init__(self, design: Design) -> None:
        self.design = design
        # [outer fold, penalty, context]: what the probe without both folds says of a context.
        shape = (design.fold_count, len(design.tried), len(design.outcome))
        self.said = np.full(shape, np.nan)

    def add(
        self, rotated: Rotated, train: np.ndarray, test: np.ndarray, pair: tuple[int, int]
    ) -> None:
        runs = self.design.outcome.runs[test]
        for at, fitted in enumerate(fit_path(rotated, self.design, train, self.design.tried)):
            scores = fitted.scores(rotated.test, runs)
            for fold, other in (pair, pair[::-1]):
                here = self.design.folds[test] == fold
                self.said[other, at, test[here]] = scores[here]

    def penalty(self, fold: int) -> float:
        """Of the smallest held-out loss; for ridge, of the largest correlation."""
        return self.design.tried[self._best(fold)]

    def _best(self, fold: int) -> int:
        design = self.design
        if len(design.tried) == 1:
            return 0
        rows = design.rows_outside(fold)
        k, n = design.outcome.positives[rows], design.outcome.trials[rows]
        said = self.said[fold][:, rows]
        if design.estimator == "logistic":
            return int(np.argmin((n * np.logaddexp(0, said) - k * said).sum(1)))
        worth = [
            sum(
                correlation(said[at, design.folds[rows] == other][:, None], design, other)[0]
                for other in range(design.fold_count)
                if other != fold
            )
            for at in range(len(said))
        ]
        return int(np.argmax(worth))

    def calibration(self, fold: int) -> tuple[float, np.ndarray]:
        """Slope and ``[runs]`` intercepts to log-odds; logistic regression has them already."""
        design = self.design
        if design.estimator == "logistic":
            return 1.0, np.zeros(design.run_count)
        rows = design.rows_outside(fold)
        there = design.outcome.positives[rows], design.outcome.trials[rows]
        said = self.said[fold, self._best(fold), rows]
        return fits.platt(said, design.outcome.runs[rows], *there, design.run_count)


# -- the closed form ------------------------------------------------------------------------------


def ridge_predictions(rotated: Rotated, design: Design, train: np.ndarray) -> Iterator[np.ndarray]:
    """``[test, 1 + permutations]`` float32 for each penalty, up to a constant per run."""
    z, test = rotated.train.astype(np.float32), rotated.test
    projected = z.T @ design.rates[train]
    for penalty in design.penalties:
        shrunk = (test / (rotated.squares + penalty)).astype(np.float32)
        yield shrunk @ projected


def correlation(predicted: np.ndarray, design: Design, fold: int) -> np.ndarray:
    """``[columns]`` correlation of predictions with a fold's rates, both less their runs' means."""
    rows = design.rows_of(fold)
    centred = _within(predicted, design.outcome.runs[rows])
    truth = design.standard[fold][:, : predicted.shape[1]]
    length = np.sqrt(np.einsum("nc,nc->c", centred, centred))
    product = np.einsum("nc,nc->c", centred, truth)
    return np.divide(product, length, out=np.zeros_like(product), where=length > 0)


def _within(values: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Values less the mean of their run."""
    out = values.copy()
    for run in np.unique(runs):
        out[runs == run] -= out[runs == run].mean(0)
    return out


def _unit(values: np.ndarray) -> np.ndarray:
    length = np.sqrt((values**2).sum(0))
    return np.divide(values, length, out=np.zeros_like(values), where=length > 1e-6)


def fold_auroc(scores: np.ndarray, design: Design, rows: np.ndarray) -> np.ndarray:
    """``[columns]`` AUROC within runs of a fold's contexts, under each permutation's labels."""
    outcome = design.outcome
    k, n = outcome.positives[design.taken[:, rows]].T, outcome.trials[design.taken[:, rows]].T
    won = total = 0.0
    for run in np.unique(outcome.runs[rows]):
        here = outcome.runs[rows] == run
        rest = n[here] - k[here]
        pairs = k[here].sum(0) * rest.sum(0) - (k[here] * rest).sum(0)
        won = won + pairs * np.nan_to_num(auroc_columns(scores[here], k[here], n[here]))
        total = total + pairs
    return np.divide(won, total, out=np.full(len(won), 0.5), where=total > 0)
