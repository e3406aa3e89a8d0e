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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from ia_mech.display import Progress, Quiet
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, frame_of
from ia_mech.results import Result, Table
from ia_mech.stats import Estimate, holm, permutation_p
from probes.analysis import HiddenStates, Settings, fold_scores
from probes.dataset import MIN_SOURCES, ProbeSet
from probes.fit.folds import choose, make_folds, permutations, seeds_of
from probes.fit.nested_cv import (
    Design,
    InnerLoop,
    correlation,
    fit,
    fold_auroc,
    ridge_predictions,
    with_penalties,
)
from probes.fit.solvers import Features, project
from probes.targets import Outcome

STAR = 0.05  # Holm-adjusted p values below it are marked
MIN_TESTED = 10  # sources with a positive turn, and with a negative one, in what is tested on


@dataclass(frozen=True)
class Entry:
    """One entry of the matrix.

    Attributes:
        trained, tested: names of units.
        auroc: within folds and runs, with an interval over the sources tested, widened for chance
            in training where probes were cross-fitted.
        p: how often probes of permuted labels reach this AUROC, by the closed form; NaN without
            permutations.
        p_holm: the same, adjusted over all entries.
        chosen: (layer, position) of each probe: one, or one per fold where sources are shared.
        train_contexts, train_sources, test_contexts: how many there are.
    """

    trained: str
    tested: str
    auroc: Estimate
    p: float
    p_holm: float
    chosen: list[tuple[int, str]]
    train_contexts: int
    train_sources: int
    test_contexts: int

    @property
    def most_chosen(self) -> tuple[int, str]:
        """The layer and position that most of its probes read."""
        return Counter(self.chosen).most_common(1)[0][0]


def cross_evaluate(
    hidden: HiddenStates,
    outcome: Outcome,
    units: Mapping[str, np.ndarray],
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> tuple[list[Entry], list[str]]:
    """Train on each unit, test on each.

    A unit with too few sources of either kind is not trained on, or not tested on either.

    Args:
        hidden: the states; each layer is read once, and the chosen layers once more.
        outcome: k of n per context.
        units: name → rows, of two runs or datasets at least; rows must not overlap.
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
    probes = {
        (trained, tested): _probes(outcome, units[trained], units[tested], settings)
        for trained, tested in pairs
    }
    with threadpool_limits(1):  # the matrices are small
        try:
            p = _select(hidden, probes, progress)
            _score(hidden, [probe for own in probes.values() for probe in own], progress)
        finally:
            progress.stop()
    entries = []
    for (trained, tested), adjusted in zip(pairs, holm(list(p.values())), strict=True):
        own, train, test = probes[trained, tested], units[trained], units[tested]
        scores, folds = np.empty(len(outcome)), np.empty(len(outcome), dtype=int)
        for number, probe in enumerate(own):
            scores[probe.tested], folds[probe.tested] = probe.scores, number
        auroc = fold_scores(outcome.take(test), folds[test], settings).auroc(scores[test])
        # Cross-fitted scores share chance in training; how much isn't known here, so all is
        # assumed.
        entries.append(
            Entry(
                trained=trained,
                tested=tested,
                auroc=auroc.with_training(1.0 if len(own) > 1 else 0.0).estimate(),
                p=p[trained, tested],
                p_holm=float(adjusted),
                chosen=[probe.place for probe in own],
                train_contexts=len(train),
                train_sources=len(set(outcome.sources[train])),
                test_contexts=len(test),
            )
        )
    return entries, notes


def _pairs(
    outcome: Outcome, units: Mapping[str, np.ndarray]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Names of what is trained and tested on, of every entry; and notes."""
    trained, tested, notes = [], [], []
    for name, rows in units.items():
        have = outcome.sources_of_either_kind(rows)
        lacks = f"{name}: {have[0]} sources with a positive turn, {have[1]} with a negative"
        if np.ptp(outcome.rate[rows]) == 0:
            lacks, have = f"{name}: every context has the same rate", (0, 0)
        if min(have) >= MIN_SOURCES:
            trained.append(name)
        if min(have) >= MIN_TESTED:
            tested.append(name)
        if min(have) < MIN_TESTED:
            notes.append(f"{lacks}; not tested on ({MIN_TESTED} of each needed), nor trained on.")
        elif min(have) < MIN_SOURCES:
            notes.append(f"{lacks}; not trained on by itself ({MIN_SOURCES} of each needed).")
    pairs = list(product(trained, tested))
    if all(one == other for one, other in pairs):
        raise UserError(
            f"no unit of {', '.join(units)} can be tested with a probe of another one: training "
            f"needs {MIN_SOURCES} sources with a positive turn and {MIN_SOURCES} with a negative "
            f"one, testing {MIN_TESTED} of each",
            "sample contexts of more sources, or choose another --target",
        )
    return pairs, notes


def units_of(data: ProbeSet) -> dict[str, np.ndarray]:
    """Name → rows of the runs or, of a single run, of its datasets. Runs are named by their
    folders, with their number where two are alike.

    Raises:
        UserError: there is only one with an outcome.
    """
    of = data.contexts["dataset"]
    if len(data.runs) > 1:
        folders = [run.name for run in data.runs]
        names = {
            number: folder if folders.count(folder) == 1 else f"{folder} ({number + 1})"
            for number, folder in enumerate(folders)
        }
        of = data.contexts["run"].map(names)
    units = {name: np.flatnonzero(of == name) for name in of.unique()}
    if len(units) < 2:
        raise UserError(
            f"there is one {_unit(data)} with an outcome, {next(iter(units))}: nothing to carry "
            "over to",
            "give several runs, or one of several datasets",
        )
    return units


def _unit(data: ProbeSet) -> str:
    return "run" if len(data.runs) > 1 else "dataset"


# -- probes ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Probe:
    """One probe: what it is trained on, what it predicts, and what comes of it.

    Attributes:
        design: its folds are those of the training contexts; every other context is in ``held``.
        held: number of the fold that is not trained on.
        tested: rows to predict.
        found: of each layer and position, see :func:`_closed_form`.
        place: layer and position that it reads.
        scores: ``[tested]`` log-odds.
    """

    design: Design
    held: int
    tested: np.ndarray
    found: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    place: tuple[int, str] = (0, "")
    scores: np.ndarray | None = None

    @property
    def train(self) -> np.ndarray:
        return self.design.rows_outside(self.held)

    @property
    def inside(self) -> list[int]:
        """Folds of the training contexts."""
        return [fold for fold in range(self.design.fold_count) if fold != self.held]


def _probes(
    outcome: Outcome, train: np.ndarray, test: np.ndarray, settings: Settings
) -> list[_Probe]:
    """One probe where no source is shared; else one per fold of the sources of both, whose labels
    are permuted together."""
    shared = bool(np.isin(outcome.sources[train], outcome.sources[test]).any())
    moved = np.union1d(train, test) if shared else train
    of_folds, of_permutations = seeds_of(settings.seed)
    dealt = np.full(len(outcome), settings.folds)  # in no fold, but for those that are dealt
    dealt[moved] = make_folds(outcome.take(moved), settings.folds, of_folds)
    permuted = []
    for rows in permutations(
        outcome.take(moved), dealt[moved], settings.permutations, of_permutations
    ):
        taken = np.arange(len(outcome))  # other contexts keep their labels
        taken[moved] = moved[rows]
        permuted.append(taken)
    design = Design.from_outcome(outcome, dealt, permuted)
    found = []
    for held in range(settings.folds) if shared else [settings.folds]:
        folds = np.full(len(outcome), held)
        folds[train] = dealt[train]
        found.append(_Probe(replace(design, folds=folds), held, test[dealt[test] == held]))
    return found


def _select(
    hidden: HiddenStates, entries: Mapping[tuple[str, str], list[_Probe]], progress: Progress
) -> dict[tuple[str, str], float]:
    """Choose the ``place`` of every probe; the p value of each entry."""
    layers, positions = list(hidden.layers), list(hidden.positions)
    progress.start("choosing layers and positions", len(layers) * len(positions))
    for layer in layers:
        states = hidden.layer(layer)
        for position in range(len(positions)):
            features = Features.from_states(states[:, position])
            for own in entries.values():
                for probe in own:
                    probe.found.append(_closed_form(features, probe))
            progress.advance()
    p = {}
    for names, own in entries.items():
        statistics = []  # of each probe, [1 + permutations]
        for probe in own:
            inner, outer = (np.array(each) for each in zip(*probe.found, strict=True))
            sources = len(set(probe.design.outcome.sources[probe.train]))
            at, where = choose(inner.reshape(len(layers), len(positions), -1), sources)
            probe.place = layers[at[0]], positions[where[0]]
            # Each permutation is scored where its own labels choose to read.
            statistics.append(outer[at * len(positions) + where, np.arange(len(at))])
        statistic = np.mean(statistics, axis=0)
        tested = len(statistic) > 1
        p[names] = (
            float(permutation_p(statistic[0], statistic[1:], slack=1e-6)) if tested else np.nan
        )
    return p


def _closed_form(features: Features, probe: _Probe) -> tuple[np.ndarray, np.ndarray]:
    """Of the closed-form probe with the best penalty: its ``[1 + permutations]`` correlation within
    the training contexts, and its ``[1 + permutations]`` AUROC among those tested."""
    design, runs = probe.design, probe.design.outcome.runs
    columns = design.rates.shape[1]
    inner = np.zeros((len(design.penalties), columns), dtype=np.float32)
    for number in probe.inside:
        train, test = design.rows_outside(number, probe.held), design.rows_of(number)
        projection = project(features, train, test, runs)
        for at, predicted in enumerate(ridge_predictions(projection, design)):
            inner[at] += correlation(predicted, design, number) / len(probe.inside)
    projection = project(features, probe.train, probe.tested, runs)
    predicted = with_penalties(ridge_predictions(projection, design), inner.argmax(0))
    return inner.max(0), fold_auroc(predicted, design, probe.tested)


def _score(hidden: HiddenStates, probes: list[_Probe], progress: Progress) -> None:
    """The ``scores`` of logistic probes, where each chose to read; their penalties are chosen by
    the inner folds."""
    progress.start("probes", len(probes))
    for layer in sorted({probe.place[0] for probe in probes}):
        states = hidden.layer(layer)
        for probe in (probe for probe in probes if probe.place[0] == layer):
            features = Features.from_states(states[:, hidden.positions.index(probe.place[1])])
            design, runs = probe.design, probe.design.outcome.runs
            loop = InnerLoop(design)
            for number in probe.inside:
                train, test = design.rows_outside(number, probe.held), design.rows_of(number)
                loop.add(project(features, train, test, runs), test, (number, probe.held))
            projection = project(features, probe.train, probe.tested, runs)
            fitted = fit(projection, design, loop.penalty(probe.held))
            probe.scores = fitted.scores(projection.test, runs[probe.tested])
            progress.advance()


# -- the result -----------------------------------------------------------------------------------


def result_of(
    entries: list[Entry],
    data: ProbeSet,
    notes: list[str],
    settings: Settings,
    about: dict[str, Any],
    name: str,
) -> Result:
    by = _unit(data)
    others = [entry for entry in entries if entry.trained != entry.tested]
    starred = sum(entry.p_holm < STAR for entry in others)
    best, least = (f(others, key=lambda entry: entry.auroc.value) for f in (max, min))
    return Result(
        name=name,
        question=f"Does a probe of {data.target.words}, trained on one {by}, work on another?",
        sentence=f"Of {len(others)} probes tested on another {by} than they were trained on, "
        f"{starred} read it above chance (p < {STAR:g} after Holm's method); their AUROC is "
        f"{least.auroc.text()} ({least.trained} → {least.tested}) to {best.auroc.text()} "
        f"({best.trained} → {best.tested}).",
        control="Layer, position and penalty were chosen by cross-validation within the training "
        f"contexts; p is from {settings.permutations} permutations of the training labels (whole "
        "sources), choice and training replayed by ridge regression. "
        f"Labels: {data.labelled_by}.",
        estimates=_estimates(entries),
        tables=[_table(entries, settings)],
        notes=[
            f"target {data.target.name}: {data.target.describe()}",
            *_explained(entries, data, settings),
            *data.notes,
            *notes,
        ],
        about=about,
    )


def _estimates(entries: list[Entry]) -> pd.DataFrame:
    """One row per entry; ``layer`` and ``position`` are those that most of its probes read."""
    names = dict.fromkeys(("trained", "tested", "position"), "string")
    counts = dict.fromkeys(("layer", "train_contexts", "train_sources"), "Int64")
    rows = []
    for entry in entries:
        layer, position = entry.most_chosen
        of: dict[str, Any] = {"trained": entry.trained, "tested": entry.tested, "layer": layer}
        of |= {"position": position, "train_sources": entry.train_sources}
        of["train_contexts"] = entry.train_contexts
        one = TidyEstimate("auroc", of, entry.test_contexts, entry.auroc, entry.p)
        rows.append(replace(one, p_holm=entry.p_holm))
    return frame_of(rows, names | counts)


def _table(entries: list[Entry], settings: Settings) -> Table:
    """Rows trained on, columns tested on; what the probe of a row reads is named once."""
    tested = list(dict.fromkeys(entry.tested for entry in entries))
    rows = []
    for trained in dict.fromkeys(entry.trained for entry in entries):
        row = {entry.tested: entry for entry in entries if entry.trained == trained}
        places = {place for entry in row.values() for place in entry.chosen}
        reads = "{} {}".format(*places.pop()) if len(places) == 1 else "its own in each"
        cells = [
            row[name].auroc.text() + ("*" if row[name].p_holm < STAR else " ") for name in tested
        ]
        rows.append([trained, reads, *cells])
    return Table(
        f"AUROC, trained on ↓ tested on → [{settings.level * 100:g}% intervals]",
        ["trained on", "layer, position", *tested],
        rows,
        f"* p < {STAR:g} after Holm's method over {len(entries)} entries",
    )


def _explained(entries: list[Entry], data: ProbeSet, settings: Settings) -> list[str]:
    """What an entry means, and what else a reader has to know."""
    lines = [
        "An entry: how often the context of a random positive turn scores higher than that of a "
        f"random negative one of the same {data.within}, by the row's probe, among the column's "
        "contexts (0.5: chance). The interval is over the sources tested, given the trained "
        "probes.",
    ]
    if any(len(entry.chosen) > 1 for entry in entries):
        lines.append(
            f"Where training and test share sources, {settings.folds} probes were cross-fitted by "
            "folds of whole sources, and the tested labels are permuted with those trained on."
        )
    models = len({run.model["weights_hash"] for run in data.runs})
    if models > 1:
        lines.append(
            f"the runs are of {models} models: a direction in one need not mean the same in "
            "another."
        )
    if len(entries) >= STAR * (settings.permutations + 1):
        enough = 100 * (int(len(entries) / STAR) // 100 + 1)
        lines.append(
            f"{settings.permutations} permutations can't give a * among {len(entries)} entries; "
            f"give --permutations {enough}."
        )
    mixed = (data.contexts.groupby("run")["dataset"].nunique() > 1).any()
    if mixed and data.within == _unit(data) == "run":
        lines.append(
            "Some runs hold several datasets, whose contexts are compared with each other too: a "
            "probe that only tells datasets apart can score. --within dataset compares within them."
        )
    return lines
