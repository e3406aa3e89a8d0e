"""Do probes transfer? They are trained on some contexts and tested on another run or dataset.

One rule makes every entry of the matrix. If training and test contexts share no source, one probe
is trained on all training contexts. If they share sources (a unit tested on itself, or the same
prompts answered by two models), whole sources are dealt into folds, and each fold is predicted by a
probe of the other folds' sources. Layer, position and penalty are chosen anew for every probe, by
cross-validation within its training contexts.

Each entry is a nested cross-validation (:mod:`probes.fit.nested_cv`) that trains on some contexts
and tests on others. Its permutation test permutes the training labels and repeats choice and
training. Permuting the tested labels against fixed scores would give p values that are too small.
Any probe has a small component along every direction. If the tested labels correlate with a
direction of large variance, so do the probe's scores, by chance. Cross-fitted scores vary even
more, since each fold's labels train the probes of the other folds.
"""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from ia_mech.display import Progress, Quiet
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, frame_of
from ia_mech.results import Result, Table
from ia_mech.stats import Estimate, holm
from probes.analysis import AnalysisSettings, HiddenStates, Place, fold_scores, processors, select
from probes.dataset import MIN_SOURCES, ProbeSet
from probes.fit.folds import make_folds, permutations, seeds_of
from probes.fit.nested_cv import CrossValidated, Design, cross_validate
from probes.show import COLUMNS, DTYPES
from probes.targets import Outcome

STAR = 0.05  # smaller Holm-adjusted p values are marked
MIN_TESTED = 10  # sources with a positive turn, and with a negative one, for testing


@dataclass(frozen=True)
class Entry:
    """One entry of the matrix: the units for training and testing, and the result."""

    trained: str
    tested: str
    auroc: Estimate  # within folds and runs, over the sources tested, widened where cross-fitted
    p: float  # share of permutations whose closed-form probes reach the score
    p_holm: float  # adjusted over all entries
    chosen: list[Place]  # by each probe: one, or one per fold where sources are shared
    test_contexts: int

    @property
    def name(self) -> str:
        return f"{self.trained} → {self.tested}"

    @property
    def most_chosen(self) -> Place:
        """The layer and position that most of the entry's probes read."""
        return Counter(self.chosen).most_common(1)[0][0]


def cross_evaluate(
    hidden: HiddenStates,
    outcome: Outcome,
    units: Mapping[str, np.ndarray],
    settings: AnalysisSettings | None = None,
    progress: Progress | None = None,
) -> tuple[list[Entry], list[str]]:
    """Train on each unit and test on each.

    A unit with too few sources of either kind isn't used for training, or for neither.

    Args:
        hidden: the states of the outcome's contexts.
        outcome: k of n per context.
        units: name → rows; at least two units, which don't overlap.
        settings, progress: as for :func:`probes.analysis.analyse`.

    Returns:
        The entries, row by row, and notes for the reader.

    Raises:
        UserError: no unit can be tested with a probe of another unit, or states can't be read.
    """
    settings, progress = settings or AnalysisSettings(), progress or Quiet()
    pairs, notes = pairs_of(outcome, units)
    problems = [_problem(outcome, units[one], units[other], settings) for one, other in pairs]
    places = list(product(hidden.layers, hidden.positions))

    def probed(place: Place) -> list[CrossValidated]:
        states = hidden.at(*place)
        return [cross_validate(states[rows], design) for rows, design in problems]

    progress.start("probes", len(places))
    by_place = []
    with threadpool_limits(1), ThreadPoolExecutor(settings.workers or processors()) as pool:
        try:
            for found in pool.map(probed, places):
                by_place.append(found)
                progress.advance()
        finally:
            progress.stop()
    shape, entries = (len(hidden.layers), len(hidden.positions)), []
    of_problems = zip(pairs, problems, zip(*by_place, strict=True), strict=True)
    for (trained, tested), (_, design), cells in of_problems:
        selected = select(cells, design, shape)
        chosen = [int(np.ravel_multi_index(tuple(cell), shape)) for cell in selected.chosen]
        scores = np.empty(len(design.folds))
        for fold, at in zip(design.outer, chosen, strict=True):
            here = design.tested_rows(fold)
            scores[here] = cells[at].scores[here]
        # With a single probe the interval is conditional on it: chance in training doesn't count.
        widened = np.mean([cells[at].unreliability for at in chosen]) if len(chosen) > 1 else 0.0
        rows = np.flatnonzero(design.tested)
        by_fold = fold_scores(design.outcome.take(rows), design.folds[rows], settings)
        entries.append(
            Entry(
                trained=trained,
                tested=tested,
                auroc=by_fold.auroc(scores[rows]).with_training(float(widened)).estimate(),
                p=selected.headline_p,
                p_holm=np.nan,
                chosen=[places[at] for at in chosen],
                test_contexts=len(rows),
            )
        )
    adjusted = holm([entry.p for entry in entries])
    return [replace(one, p_holm=float(p)) for one, p in zip(entries, adjusted, strict=True)], notes


def _problem(
    outcome: Outcome, train: np.ndarray, test: np.ndarray, settings: AnalysisSettings
) -> tuple[np.ndarray, Design]:
    """The contexts for training and testing, and the design of their cross-validation.

    If training and test share no source, the test contexts are one fold. If they share some, the
    labels of both are permuted together.
    """
    rows = np.union1d(train, test)
    own, trained, tested = outcome.take(rows), np.isin(rows, train), np.isin(rows, test)
    shared = bool(np.isin(own.sources[trained], own.sources[tested]).any())
    moved = np.flatnonzero(trained | shared)
    of_folds, of_permutations = seeds_of(settings.seed)
    folds = np.full(len(rows), settings.folds)
    folds[moved] = make_folds(own.take(moved), settings.folds, of_folds)
    labels = np.tile(np.arange(len(rows)), (1 + settings.permutations, 1))
    for at, taken in enumerate(
        permutations(own.take(moved), folds[moved], settings.permutations, of_permutations)
    ):
        labels[1 + at, moved] = moved[taken]
    return rows, Design(own, folds, labels, trained, tested)


def pairs_of(
    outcome: Outcome, units: Mapping[str, np.ndarray]
) -> tuple[list[tuple[str, str]], list[str]]:
    """The names of the training and test unit of every entry, and notes."""
    trained, tested, notes = [], [], []
    for name, rows in units.items():
        positive, negative = outcome.sources_of_either_kind(rows)
        differ = np.ptp(outcome.rate[rows]) > 0
        few = min(positive, negative) if differ else 0
        trained += [name] * (few >= MIN_SOURCES)
        tested += [name] * (few >= MIN_TESTED)
        if few < MIN_SOURCES:
            what = "trained on" if few >= MIN_TESTED else "trained or tested on"
            alike = "" if differ else ", and all conversations the same rate"
            notes.append(
                f"{name} isn't {what}: {positive} queries have a positive turn, {negative} a "
                f"negative one{alike}."
            )
    pairs = list(product(trained, tested))
    if all(one == other for one, other in pairs):
        raise UserError(
            f"no unit of {', '.join(units)} can be tested with a probe of another one: training "
            f"needs {MIN_SOURCES} queries with a positive turn and {MIN_SOURCES} with a negative "
            f"one, testing {MIN_TESTED} of each",
            "sample conversations of more queries, or choose another --target",
        )
    return pairs, notes


def units_of(data: ProbeSet) -> dict[str, np.ndarray]:
    """Name → rows of each run or, for a single run, of each dataset. Where the folders of two runs
    have the same name, their names get a number.

    Raises:
        UserError: only one unit has an outcome.
    """
    of, unit = data.contexts["dataset"], "dataset"
    if len(data.runs) > 1:
        folders = [run.name for run in data.runs]
        names = {
            number: folder if folders.count(folder) == 1 else f"{folder} ({number + 1})"
            for number, folder in enumerate(folders)
        }
        of, unit = data.contexts["run"].map(names), "run"
    units = {name: np.flatnonzero(of == name) for name in of.unique()}
    if len(units) < 2:
        raise UserError(
            f"only one {unit} has an outcome, {next(iter(units))}: --transfer needs two",
            "give several runs, or one of several datasets",
        )
    return units


# -- what a result gets ---------------------------------------------------------------------------


def with_transfer(
    result: Result,
    entries: list[Entry],
    notes: list[str],
    data: ProbeSet,
    settings: AnalysisSettings,
) -> Result:
    """A result of probes with the matrix as its first table, its estimates and its notes."""
    explained = (
        "An entry of the matrix: how often the context of a random positive turn scores higher "
        f"than that of a random negative one of the same {data.within}, by a probe of the row's "
        "conversations, among the column's (0.5: chance). Layer, position and penalty are chosen "
        "within the former. p: choice and training replayed by ridge regression on "
        f"{settings.permutations} permutations of their labels. Where the two share sources, "
        f"{settings.folds} probes are cross-fitted, and both are permuted; else the interval is "
        "given the probe."
    )
    return replace(
        result,
        estimates=pd.concat([result.estimates, _estimates(entries, settings)], ignore_index=True),
        tables=[_table(entries, settings), *result.tables],
        notes=[*result.notes, explained, *notes],
    )


def _estimates(entries: list[Entry], settings: AnalysisSettings) -> pd.DataFrame:
    """One row per entry; ``layer`` and ``position`` are those that most of its probes read."""
    rows = []
    for entry in entries:
        layer, position = entry.most_chosen
        names = {"layer": layer, "position": position, "level": settings.level}
        names |= {"control": entry.name, "contexts": entry.test_contexts}
        rows.append(
            TidyEstimate(
                "auroc_transfer",
                names,
                entry.test_contexts,
                entry.auroc,
                entry.p,
                p_holm=entry.p_holm,
            )
        )
    return frame_of(rows, DTYPES, COLUMNS)


def _table(entries: list[Entry], settings: AnalysisSettings) -> Table:
    """The matrix: training units in rows, test units in columns."""
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
