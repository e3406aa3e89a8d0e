"""Do probes carry over: trained on some contexts, tested on others of another run or dataset.

One rule makes every entry of the matrix. Where training and test contexts share no source, one
probe is trained on all of the former. Where they do (a unit tested on itself, the same prompts
answered by two models), whole sources are dealt into folds, and what is tested in a fold is
predicted by a probe trained on the other folds' sources. Layer, position and penalty are chosen
anew for every such probe, by cross-validation within its training contexts.

Tests ask whether anything learnt from the training labels carries over: these labels are permuted,
and choice and training repeated by the closed form, as in :mod:`probes.fit.nested_cv`. Permuting
the tested labels against a trained probe's fixed scores would not do. A probe of something else
leans a little on every direction; where the tested labels go with one of large variance, its scores
go with them by chance. And cross-fitted scores vary more than that: each fold's labels train the
others' probes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from threadpoolctl import threadpool_limits

from ia_mech.display import Progress, Quiet
from ia_mech.errors import UserError
from ia_mech.stats import Estimate, FoldScores, holm, permutation_p
from probes.dataset import MIN_SOURCES
from probes.fit.folds import choose, make_folds, permutations
from probes.fit.nested_cv import (
    Cell,
    Design,
    Inner,
    correlation,
    fit,
    fold_auroc,
    ridge_predictions,
    rotate,
)
from probes.outcome import Outcome
from probes.records import Hidden, Settings

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
        auroc, spearman: within folds and runs, with intervals over the sources tested, widened for
            chance in training where probes were cross-fitted.
        p: how often probes of permuted labels reach this AUROC, by the closed form; NaN without
            permutations.
        p_holm: the same, adjusted over all entries.
        picked: (layer, position) of each probe: one, or one per fold where sources are shared.
        train_contexts, train_sources, test_contexts, test_sources: how many there are.
    """

    trained: str
    tested: str
    auroc: Estimate
    spearman: Estimate
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


def carry(
    hidden: Hidden,
    outcome: Outcome,
    units: Sequence[Unit],
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> tuple[list[Entry], list[str]]:
    """Train on each unit (and on all others together), test on each.

    A unit with too few sources of either kind is not trained on, or not tested on either.

    Args:
        hidden: the states, read one layer at a time; once, and the chosen layers once more.
        outcome: k of n per context.
        units: at least two; their rows must not overlap.
        settings: the default analysis if not given; it has no control task, orders and workers.
        progress: told how far it is.

    Returns:
        The entries, row by row, and what a reader has to know.

    Raises:
        UserError: no unit can be tested with a probe of another one, or whatever reading the
            states raises.
    """
    settings, progress = settings or Settings(), progress or Quiet()
    wanted, notes = _wanted(outcome, units)
    trials = _trials(outcome, wanted, settings)
    with threadpool_limits(1):  # the matrices are small
        try:
            _select(hidden, outcome, trials, progress)
            _score(hidden, outcome, trials, progress)
        finally:
            progress.stop()
    entries = []
    for trial in trials:
        for unit, p in zip(trial.units, trial.p, strict=True):
            entries.append(_entry(trial, unit, float(p), outcome, hidden, settings))
    order = [(name, unit.name) for name, _, unit in wanted]
    entries.sort(key=lambda entry: order.index((entry.trained, entry.tested)))
    adjusted = holm([entry.p for entry in entries])
    found = [replace(e, p_holm=float(p)) for e, p in zip(entries, adjusted, strict=True)]
    return found, notes


# -- which entries --------------------------------------------------------------------------------


def _wanted(
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
    wanted = [(unit.name, unit.rows, other) for unit in trained for other in tested]
    for other in tested if len(units) > 2 else ():  # of two, all others is the other one
        rows = np.sort(np.concatenate([unit.rows for unit in units if unit is not other]))
        if min(_sources_of_either(outcome, rows)) >= MIN_SOURCES:
            wanted.append((OTHERS, rows, other))
    if all(name == unit.name for name, _, unit in wanted):
        raise UserError(
            f"no unit of {', '.join(unit.name for unit in units)} can be tested with a probe of "
            f"another one: training needs {MIN_SOURCES} sources with a positive turn and "
            f"{MIN_SOURCES} with a negative one, testing {MIN_TESTED} of each",
            "sample contexts of more sources, or choose another --target",
        )
    return wanted, notes


def _sources_of_either(outcome: Outcome, rows: np.ndarray) -> tuple[int, int]:
    """Sources with a positive turn, and with a negative one."""
    of = outcome.sources[rows]
    positive, negative = outcome.positives[rows] > 0, outcome.negatives[rows] > 0
    return len(set(of[positive])), len(set(of[negative]))


# -- probes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Round:
    """One probe.

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


class _Trial:
    """The probes of one entry, or of several that share a probe.

    Attributes:
        name: of what is trained on.
        train: its rows.
        units: tested on.
        rounds: one where no source is shared, else one per fold.
        chosen: ``[rounds, 2]`` layer and position, as indices.
        scores: ``[contexts]`` NaN where not tested.
        fold: ``[contexts]`` the round in which each was tested, -1 if none.
        p: ``[units]``.
    """

    def __init__(self, name: str, train: np.ndarray, units: list[Unit], rounds: list[_Round]):
        self.name, self.train, self.units, self.rounds = name, train, units, rounds
        self.chosen = np.zeros((len(rounds), 2), dtype=int)
        contexts = len(rounds[0].design.outcome)
        self.scores, self.fold = np.full(contexts, np.nan), np.full(contexts, -1)
        for number, one in enumerate(rounds):
            self.fold[one.tested] = number
        self.p = np.full(len(units), np.nan)


def _trials(
    outcome: Outcome, wanted: list[tuple[str, np.ndarray, Unit]], settings: Settings
) -> list[_Trial]:
    """Entries that differ in the unit tested alone, and share no source with it, share a probe."""
    trials, apart = [], {}
    for name, train, unit in wanted:
        if np.isin(outcome.sources[train], outcome.sources[unit.rows]).any():
            rounds = _crossed(outcome, train, unit.rows, settings)
            trials.append(_Trial(name, train, [unit], rounds))
        else:
            key = (name, unit.name if name == OTHERS else None)
            apart.setdefault(key, (train, []))[1].append(unit)
    for (name, _), (train, units) in apart.items():
        folds = np.full(len(outcome), settings.folds)
        folds[train] = make_folds(outcome.take(train), settings.folds, settings.seed)
        design = _design(outcome, folds, train, settings)
        tested = np.concatenate([unit.rows for unit in units])
        trials.append(_Trial(name, train, units, [_Round(design, settings.folds, tested)]))
    return trials


def _crossed(
    outcome: Outcome, train: np.ndarray, test: np.ndarray, settings: Settings
) -> list[_Round]:
    """A round per fold of the sources of both, whose labels are permuted together."""
    both = np.union1d(train, test)
    dealt = np.full(len(outcome), -1)
    dealt[both] = make_folds(outcome.take(both), settings.folds, settings.seed)
    design = _design(outcome, dealt, both, settings)
    rounds = []
    for held in range(settings.folds):
        folds = np.full(len(outcome), held)
        folds[train] = dealt[train]
        rounds.append(_Round(replace(design, folds=folds), held, test[dealt[test] == held]))
    return rounds


def _design(outcome: Outcome, folds: np.ndarray, moved: np.ndarray, settings: Settings) -> Design:
    """With permutations among the sources of these rows; other rows keep their labels."""
    permuted = []
    within = permutations(outcome.take(moved), folds[moved], settings.permutations, settings.seed)
    for rows in within:
        everyone = np.arange(len(outcome))
        everyone[moved] = moved[rows]
        permuted.append(everyone)
    return Design.of(outcome, folds, permuted, settings.estimator)


def _select(hidden: Hidden, outcome: Outcome, trials: list[_Trial], progress: Progress) -> None:
    """Fill ``chosen`` and ``p``."""
    layers, width = list(hidden.layers), len(hidden.positions)
    progress.start("choosing cells", len(layers) * width)
    # [trial][cell][round]: inner correlations, and AUROC of every unit.
    found: list[list[list[tuple[np.ndarray, np.ndarray]]]] = [[] for _ in trials]
    for layer in layers:
        states = hidden.layer(layer)
        for position in range(width):
            cell = Cell.of(states[:, position])
            for trial, by_cell in zip(trials, found, strict=True):
                by_cell.append([_examine(cell, one, trial.units) for one in trial.rounds])
            progress.advance()
    for trial, by_cell in zip(trials, found, strict=True):
        statistic = 0.0
        for number, one in enumerate(trial.rounds):
            inner = np.array([rounds[number][0] for rounds in by_cell])
            outer = np.array([rounds[number][1] for rounds in by_cell])
            correlations = inner.reshape(len(layers), width, -1)
            layer, position = choose(correlations, len(set(outcome.sources[one.train])))
            trial.chosen[number] = layer[0], position[0]
            # Each permutation is scored at the cell that its own labels choose.
            reached = outer[layer * width + position, :, np.arange(len(layer))]
            statistic = statistic + reached / len(trial.rounds)
        if len(statistic) > 1:
            trial.p = permutation_p(statistic[0], statistic[1:], slack=1e-6)


def _examine(cell: Cell, one: _Round, units: Sequence[Unit]) -> tuple[np.ndarray, np.ndarray]:
    """Of the closed-form probe with the best penalty, its ``[1 + permutations]`` correlation within
    the training contexts, and its ``[units, 1 + permutations]`` AUROC among those tested."""
    design, runs = one.design, one.design.outcome.runs
    columns = design.rates.shape[1]
    inner = np.zeros((len(design.penalties), columns), dtype=np.float32)
    for fold in one.inside:
        train, test = design.rows_outside(fold, one.held), design.rows_of(fold)
        rotated = rotate(cell, train, test, runs)
        for at, predicted in enumerate(ridge_predictions(rotated, design, train)):
            inner[at] += correlation(predicted, design, fold) / len(one.inside)
    best, train = inner.argmax(0), one.train
    rotated = rotate(cell, train, one.tested, runs)
    picked = np.empty((len(one.tested), columns), dtype=np.float32)
    for at, predicted in enumerate(ridge_predictions(rotated, design, train)):
        picked = np.where(best == at, predicted, picked)
    outer = np.empty((len(units), columns), dtype=np.float32)
    for at, unit in enumerate(units):
        mine = np.isin(one.tested, unit.rows)
        outer[at] = fold_auroc(picked[mine], design, one.tested[mine])
    return inner.max(0), outer


def _score(hidden: Hidden, outcome: Outcome, trials: list[_Trial], progress: Progress) -> None:
    """Fill ``scores``: the reported estimator's, at the chosen cells."""
    waiting: dict[int, list[tuple[_Trial, int]]] = {}
    for trial in trials:
        for number, (layer, _) in enumerate(trial.chosen):
            waiting.setdefault(int(layer), []).append((trial, number))
    progress.start("probes", sum(map(len, waiting.values())))
    for layer in sorted(waiting):
        states = hidden.layer(hidden.layers[layer])
        for trial, number in waiting[layer]:
            one = trial.rounds[number]
            cell = Cell.of(states[:, trial.chosen[number, 1]])
            trial.scores[one.tested] = _predicted(cell, one)
            progress.advance()


def _predicted(cell: Cell, one: _Round) -> np.ndarray:
    """``[tested]`` scores of the reported estimator, its penalty by its loss in the inner folds."""
    design, runs = one.design, one.design.outcome.runs
    inner = Inner(design)
    for fold in one.inside:
        train, test = design.rows_outside(fold, one.held), design.rows_of(fold)
        inner.add(rotate(cell, train, test, runs), train, test, (fold, one.held))
    train = one.train
    rotated = rotate(cell, train, one.tested, runs)
    fitted = fit(rotated, design, train, inner.penalty(one.held))
    return fitted.scores(rotated.test, runs[one.tested])


# -- scores ---------------------------------------------------------------------------------------


def _entry(
    trial: _Trial, unit: Unit, p: float, outcome: Outcome, hidden: Hidden, settings: Settings
) -> Entry:
    """Everything but the adjusted p value."""
    rows, scores = unit.rows, trial.scores[unit.rows]
    own = outcome.take(rows)
    measured = FoldScores(
        *(own.positives, own.trials, own.sources, trial.fold[rows], own.runs),
        level=settings.level,
        resamples=settings.resamples,
        seed=settings.seed,
    )
    # Cross-fitted scores share chance in training; how much isn't known here, so all is assumed.
    share = 1.0 if len(set(trial.fold[rows])) > 1 else 0.0
    layers, positions = hidden.layers, hidden.positions
    return Entry(
        trained=trial.name,
        tested=unit.name,
        auroc=measured.auroc(scores).with_training(share).estimate(),
        spearman=measured.spearman(scores).with_training(share).estimate(),
        p=p,
        p_holm=np.nan,
        picked=[(int(layers[at]), positions[where]) for at, where in trial.chosen],
        train_contexts=len(trial.train),
        train_sources=len(set(outcome.sources[trial.train])),
        test_contexts=len(rows),
        test_sources=len(set(own.sources)),
    )
