"""Do probes transfer: train on some contexts, test on those of another run or dataset.

One rule makes every entry of the matrix. Where training and test contexts share no source, one
probe is trained on all of the former. Where they do (a unit tested on itself, the same prompts
answered by two models), whole sources are dealt into folds, and each fold is predicted by a probe
of the other folds' sources. Layer, position and penalty are chosen anew for every such probe, by
cross-validation within its training contexts.

The tests permute the training labels and repeat choice and training in closed form, as
:mod:`probes.fit.nested_cv` does. Permuting the tested labels against fixed scores would be wrong: a
probe of something else leans a little on every direction, and where the tested labels go with one
of large variance, its scores go with them by chance. Cross-fitted scores vary even more, since each
fold's labels train the other folds' probes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from threadpoolctl import threadpool_limits

from ia_mech.display import Progress, Quiet
from ia_mech.errors import UserError
from ia_mech.stats import Estimate, holm, permutation_p
from probes.analysis import HiddenStates, Settings, fold_scores
from probes.dataset import MIN_SOURCES
from probes.fit.folds import choose, make_folds, permutations, seeds_of
from probes.fit.nested_cv import Design, InnerLoop, correlation, fit, fold_auroc, ridge_predictions
from probes.fit.solvers import Features, project
from probes.targets import Outcome

OTHERS = "all others"
MIN_TESTED = 10  # sources with a positive turn, and with a negative one, in what is tested on


@dataclass(frozen=True, eq=False)
class Unit:
    """What probes are trained or tested on: a run, or a dataset.

    Attributes:
        name: not :data:`OTHERS`.
        rows: its contexts.
    """

    name: str
    rows: np.ndarray


@dataclass(frozen=True)
class Entry:
    """One entry of the matrix.

    Attributes:
        trained, tested: names of units; ``trained`` may be :data:`OTHERS`.
        auroc: within folds and runs, with an interval over the sources tested, widened for chance
            in training where probes were cross-fitted.
        p: how often probes of permuted labels reach this AUROC, by the closed form; NaN without
            permutations.
        p_holm: the same, adjusted over all entries.
        picked: (layer, position) of each probe: one, or one per fold where sources are shared.
        train_contexts, train_sources, test_contexts, test_sources: how many there are.
    """

    trained: str
    tested: str
    auroc: Estimate
    p: float
    p_holm: float
    picked: list[tuple[int, str]]
    train_contexts: int
    train_sources: int
    test_contexts: int
    test_sources: int

    @property
    def usual(self) -> tuple[int, str]:
        """The layer and position that most of its probes read."""
        return Counter(self.picked).most_common(1)[0][0]


def cross_evaluate(
    hidden: HiddenStates,
    outcome: Outcome,
    units: Sequence[Unit],
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> tuple[list[Entry], list[str]]:
    """Train on each unit (and on all others together), test on each.

    A unit with too few sources of either kind is not trained on, or not tested on either.

    Args:
        hidden: the states; each layer is read once, and the chosen layers once more.
        outcome: k of n per context.
        units: at least two; their rows must not overlap.
        settings: the default analysis if not given; there is no control task, and one thread.
        progress: shows phases and steps; nothing is shown if not given.

    Returns:
        The entries, row by row, and what a reader has to know.

    Raises:
        UserError: no unit can be tested with a probe of another one, or whatever reading the
            states raises.
    """
    settings, progress = settings or Settings(), progress or Quiet()
    pairs, notes = _pairs(outcome, units)
    evaluations = _evaluations(outcome, pairs, settings)
    with threadpool_limits(1):  # the matrices are small
        try:
            _select(hidden, outcome, evaluations, progress)
            _score(hidden, evaluations, progress)
        finally:
            progress.stop()
    entries = {
        (one.name, unit.name): _entry(one, unit, float(p), outcome, hidden, settings)
        for one in evaluations
        for unit, p in zip(one.units, one.p, strict=True)
    }
    ordered = [entries[name, unit.name] for name, _, unit in pairs]
    adjusted = holm([entry.p for entry in ordered])
    return [replace(e, p_holm=float(p)) for e, p in zip(ordered, adjusted, strict=True)], notes


# -- which entries --------------------------------------------------------------------------------


def _pairs(
    outcome: Outcome, units: Sequence[Unit]
) -> tuple[list[tuple[str, np.ndarray, Unit]], list[str]]:
    """Name and rows of what is trained on, and the unit tested on, of every entry; and notes."""
    trained, tested, notes = [], [], []
    for unit in units:
        have = _sources_of_either(outcome, unit.rows)
        lacks = f"{unit.name}: {have[0]} sources with a positive turn, {have[1]} with a negative"
        if np.ptp(outcome.rate[unit.rows]) == 0:
            lacks, have = f"{unit.name}: every context has the same rate", (0, 0)
        if min(have) >= MIN_SOURCES:
            trained.append(unit)
        if min(have) >= MIN_TESTED:
            tested.append(unit)
        if min(have) < MIN_TESTED:
            notes.append(f"{lacks}; not tested on ({MIN_TESTED} of each needed), nor trained on.")
        elif min(have) < MIN_SOURCES:
            notes.append(f"{lacks}; not trained on by itself ({MIN_SOURCES} of each needed).")
    pairs = [(unit.name, unit.rows, other) for unit in trained for other in tested]
    for other in tested if len(units) > 2 else ():  # of two, all others is the other one
        rows = np.sort(np.concatenate([unit.rows for unit in units if unit is not other]))
        if min(_sources_of_either(outcome, rows)) >= MIN_SOURCES:
            pairs.append((OTHERS, rows, other))
    if all(name == unit.name for name, _, unit in pairs):
        raise UserError(
            f"no unit of {', '.join(unit.name for unit in units)} can be tested with a probe of "
            f"another one: training needs {MIN_SOURCES} sources with a positive turn and "
            f"{MIN_SOURCES} with a negative one, testing {MIN_TESTED} of each",
            "sample contexts of more sources, or choose another --target",
        )
    return pairs, notes


def _sources_of_either(outcome: Outcome, rows: np.ndarray) -> tuple[int, int]:
    """Sources with a positive turn, and with a negative one."""
    of = outcome.sources[rows]
    positive, negative = outcome.positives[rows] > 0, outcome.negatives[rows] > 0
    return len(set(of[positive])), len(set(of[negative]))


# -- probes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Fold:
    """One probe: what it is trained on, and what it predicts.

    Attributes:
        design: its folds are those of the training contexts; every other context is in ``held``.
        held: number of the fold that is not trained on.
        tested: rows to predict.
    """

    design: Design
    held: int
    tested: np.ndarray

    @property
    def train(self) -> np.ndarray:
        return self.design.rows_outside(self.held)

    @property
    def inside(self) -> list[int]:
        """Folds of the training contexts."""
        return [fold for fold in range(self.design.fold_count) if fold != self.held]


class _Evaluation:
    """The probes of one entry, or of several that share a probe.

    Attributes:
        name: of what is trained on.
        train: its rows.
        units: tested on.
        folds: one where no source is shared, else one per fold of the sources.
        chosen: ``[folds, 2]`` layer and position of each probe, as indices.
        scores: ``[contexts]`` NaN where not tested.
        fold: ``[contexts]`` the fold in which each was tested, -1 if none.
        p: ``[units]``.
    """

    def __init__(self, name: str, train: np.ndarray, units: list[Unit], folds: list[_Fold]) -> None:
        self.name, self.train, self.units, self.folds = name, train, units, folds
        contexts = len(folds[0].design.outcome)
        self.chosen = np.zeros((len(folds), 2), dtype=int)
        self.scores, self.fold = np.full(contexts, np.nan), np.full(contexts, -1)
        for number, fold in enumerate(folds):
            self.fold[fold.tested] = number
        self.p = np.full(len(units), np.nan)


def _evaluations(
    outcome: Outcome, pairs: list[tuple[str, np.ndarray, Unit]], settings: Settings
) -> list[_Evaluation]:
    """Entries that differ in the unit tested alone, and share no source with it, share a probe."""
    found: list[_Evaluation] = []
    apart: dict[tuple[str, str | None], tuple[np.ndarray, list[Unit]]] = {}
    for name, train, unit in pairs:
        if np.isin(outcome.sources[train], outcome.sources[unit.rows]).any():
            folds = _cross_fitted(outcome, train, unit.rows, settings)
            found.append(_Evaluation(name, train, [unit], folds))
        else:
            key = (name, unit.name if name == OTHERS else None)
            apart.setdefault(key, (train, []))[1].append(unit)
    for (name, _), (train, units) in apart.items():
        dealt = np.full(len(outcome), settings.folds)
        dealt[train] = make_folds(outcome.take(train), settings.folds, seeds_of(settings.seed)[0])
        design = _design(outcome, dealt, train, settings)
        tested = np.concatenate([unit.rows for unit in units])
        found.append(_Evaluation(name, train, units, [_Fold(design, settings.folds, tested)]))
    return found


def _cross_fitted(
    outcome: Outcome, train: np.ndarray, test: np.ndarray, settings: Settings
) -> list[_Fold]:
    """One per fold of the sources of both, whose labels are permuted together."""
    both = np.union1d(train, test)
    dealt = np.full(len(outcome), -1)
    dealt[both] = make_folds(outcome.take(both), settings.folds, seeds_of(settings.seed)[0])
    design = _design(outcome, dealt, both, settings)
    found = []
    for held in range(settings.folds):
        folds = np.full(len(outcome), held)
        folds[train] = dealt[train]
        found.append(_Fold(replace(design, folds=folds), held, test[dealt[test] == held]))
    return found


def _design(outcome: Outcome, folds: np.ndarray, moved: np.ndarray, settings: Settings) -> Design:
    """With permutations among the sources of these rows; other rows keep their labels."""
    permuted = []
    seed = seeds_of(settings.seed)[1]
    within = permutations(outcome.take(moved), folds[moved], settings.permutations, seed)
    for rows in within:
        taken = np.arange(len(outcome))
        taken[moved] = moved[rows]
        permuted.append(taken)
    return Design.from_outcome(outcome, folds, permuted)


def _select(
    hidden: HiddenStates, outcome: Outcome, evaluations: list[_Evaluation], progress: Progress
) -> None:
    """Fill ``chosen`` and ``p``."""
    layers, width = list(hidden.layers), len(hidden.positions)
    progress.start("choosing layers and positions", len(layers) * width)
    # For each evaluation, [layer × position][fold]: inner correlations, and AUROC of every unit.
    found: list[list[list[tuple[np.ndarray, np.ndarray]]]] = [[] for _ in evaluations]
    for layer in layers:
        states = hidden.layer(layer)
        for position in range(width):
            features = Features.from_states(states[:, position])
            for one, by_place in zip(evaluations, found, strict=True):
                by_place.append([_closed_form(features, fold, one.units) for fold in one.folds])
            progress.advance()
    for one, by_place in zip(evaluations, found, strict=True):
        statistics = []  # of each fold, [1 + permutations, units]
        for number, fold in enumerate(one.folds):
            inner = np.array([folds[number][0] for folds in by_place])
            outer = np.array([folds[number][1] for folds in by_place])
            correlations = inner.reshape(len(layers), width, -1)
            at, where = choose(correlations, len(set(outcome.sources[fold.train])))
            one.chosen[number] = at[0], where[0]
            # Each permutation is scored where its own labels choose to read.
            statistics.append(outer[at * width + where, :, np.arange(len(at))] / len(one.folds))
        statistic = np.sum(statistics, axis=0)
        if len(statistic) > 1:
            one.p = permutation_p(statistic[0], statistic[1:], slack=1e-6)


def _closed_form(
    features: Features, fold: _Fold, units: Sequence[Unit]
) -> tuple[np.ndarray, np.ndarray]:
    """Of the closed-form probe with the best penalty: its ``[1 + permutations]`` correlation within
    the training contexts, and its ``[units, 1 + permutations]`` AUROC among those tested."""
    design, runs = fold.design, fold.design.outcome.runs
    columns = design.rates.shape[1]
    inner = np.zeros((len(design.penalties), columns), dtype=np.float32)
    for number in fold.inside:
        train, test = design.rows_outside(number, fold.held), design.rows_of(number)
        projection = project(features, train, test, runs)
        for at, predicted in enumerate(ridge_predictions(projection, design)):
            inner[at] += correlation(predicted, design, number) / len(fold.inside)
    best = inner.argmax(0)
    projection = project(features, fold.train, fold.tested, runs)
    picked = np.empty((len(fold.tested), columns), dtype=np.float32)
    for at, predicted in enumerate(ridge_predictions(projection, design)):
        picked = np.where(best == at, predicted, picked)
    outer = np.empty((len(units), columns), dtype=np.float32)
    for at, unit in enumerate(units):
        mine = np.isin(fold.tested, unit.rows)
        outer[at] = fold_auroc(picked[mine], design, fold.tested[mine])
    return inner.max(0), outer


def _score(hidden: HiddenStates, evaluations: list[_Evaluation], progress: Progress) -> None:
    """Fill ``scores``: those of logistic probes, where each chose to read."""
    waiting: dict[int, list[tuple[_Evaluation, int]]] = {}
    for one in evaluations:
        for number, (layer, _) in enumerate(one.chosen):
            waiting.setdefault(int(layer), []).append((one, number))
    progress.start("probes", sum(map(len, waiting.values())))
    for layer in sorted(waiting):
        states = hidden.layer(hidden.layers[layer])
        for one, number in waiting[layer]:
            fold = one.folds[number]
            features = Features.from_states(states[:, one.chosen[number, 1]])
            one.scores[fold.tested] = _predicted(features, fold)
            progress.advance()


def _predicted(features: Features, fold: _Fold) -> np.ndarray:
    """``[tested]`` scores of a logistic probe, its penalty chosen by the inner folds."""
    design, runs = fold.design, fold.design.outcome.runs
    loop = InnerLoop(design)
    for number in fold.inside:
        train, test = design.rows_outside(number, fold.held), design.rows_of(number)
        loop.add(project(features, train, test, runs), test, (number, fold.held))
    projection = project(features, fold.train, fold.tested, runs)
    fitted = fit(projection, design, loop.penalty(fold.held))
    return fitted.scores(projection.test, runs[fold.tested])


# -- scores ---------------------------------------------------------------------------------------


def _entry(
    one: _Evaluation,
    unit: Unit,
    p: float,
    outcome: Outcome,
    hidden: HiddenStates,
    settings: Settings,
) -> Entry:
    """Everything but the adjusted p value."""
    rows, scores = unit.rows, one.scores[unit.rows]
    own = outcome.take(rows)
    measured = fold_scores(own, one.fold[rows], settings)
    # Cross-fitted scores share chance in training; how much isn't known here, so all is assumed.
    share = 1.0 if len(set(one.fold[rows])) > 1 else 0.0
    layers, positions = hidden.layers, hidden.positions
    return Entry(
        trained=one.name,
        tested=unit.name,
        auroc=measured.auroc(scores).with_training(share).estimate(),
        p=p,
        p_holm=np.nan,
        picked=[(int(layers[at]), positions[where]) for at, where in one.chosen],
        train_contexts=len(one.train),
        train_sources=len(set(outcome.sources[one.train])),
        test_contexts=len(rows),
        test_sources=len(set(own.sources)),
    )
