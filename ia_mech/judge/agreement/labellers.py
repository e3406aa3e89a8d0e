"""The judges and annotators of a run, compared in pairs and as a group.

Labels are matched by the run's rows; of a judge its first repeat counts. Rows that annotators
labelled are a sample of the run's and are weighted by the inverse of their inclusion probability,
so that every figure is about the run and not about the sheet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from ia_mech.errors import UserError
from ia_mech.judge.agreement.comparison import Comparison, GroupAlpha, compare, group_alpha
from ia_mech.judge.agreement.disagreements import Disagreement, disagreements
from ia_mech.judge.label import check_finished
from ia_mech.judge.rubric import NAMES
from ia_mech.judge.verdict import JUDGED
from ia_mech.run import Run
from ia_mech.run.labels import KEY

JUDGE, ANNOTATOR = "judge", "annotator"


@dataclass(frozen=True)
class Labeller:
    """A judge or annotator, laid out over all rows of ``run.generations``.

    Attributes:
        name: as shown; ``judge:NAME`` or ``annotator:NAME`` where one name is two labellers.
        kind: ``judge`` or ``annotator``.
        labelled: ``[rows]`` whether it was asked about the row.
        categories: ``[rows]`` what it said; None also where it failed.
        frame: ``[rows]`` the columns of its file (of a judge, of its first repeat), NaN elsewhere.
        repeats: ``[repeat][rows]`` categories of a judge; of an annotator empty.
    """

    name: str
    kind: str
    labelled: np.ndarray
    categories: np.ndarray
    frame: pd.DataFrame
    repeats: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two labellers; ``truth`` is the one that the other is measured against."""

    truth: str
    prediction: str
    comparison: Comparison


@dataclass(frozen=True)
class Agreement:
    """All figures of a run: pairs, the whole group (None if it is a pair), judges' repeats.

    ``group.n`` are rows that everyone was asked about and at least two put into a category.
    """

    labellers: tuple[Labeller, ...]
    pairs: tuple[Pair, ...]
    group: GroupAlpha | None
    repeats: dict[str, tuple[int, GroupAlpha]]
    disagreements: list[Disagreement]


def agreement(run: Run, between: Sequence[str] | None = None) -> Agreement:
    """Compare the labellers of a run.

    Args:
        run: a finished run.
        between: their names; all there are by default.

    Raises:
        UserError: an unfinished run, an unknown name, or fewer than two labellers.
    """
    check_finished(run)
    labellers = [_labeller(run, *who) for who in _chosen(run, between)]
    sources = run.generations["source_id"].to_numpy(dtype=object)
    pairs = []
    for first, second in combinations(labellers, 2):
        # People are the truth of judges; between equals it is the one that was named first.
        if second.kind == ANNOTATOR and first.kind == JUDGE:
            first, second = second, first
        rows, weights = joint_rows([first, second])
        columns = first.categories[rows], second.categories[rows]
        pairs.append(Pair(first.name, second.name, compare(*columns, sources[rows], weights)))
    group = None
    if len(labellers) > 2:
        rows, weights = joint_rows(labellers)
        columns = [labeller.categories[rows] for labeller in labellers]
        group = group_alpha(columns, sources[rows], weights)
    repeats = {
        labeller.name: (len(labeller.repeats), group_alpha(labeller.repeats, sources))
        for labeller in labellers
        if len(labeller.repeats) > 1
    }
    return Agreement(tuple(labellers), tuple(pairs), group, repeats, disagreements(run, labellers))


def joint_rows(labellers: Sequence[Labeller]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that all of these were asked about, and how many rows of the run each stands for.

    A judge was asked about every row. Annotators of one sheet share a sample: a row of a stratum
    stands for (rows of the stratum) / (rows that all of them labelled). Sheets are independent
    samples, so that a row which is on two has the product of both probabilities. Labels without an
    inclusion probability are taken for a census.

    Returns:
        ``[n]`` positions in ``run.generations`` and ``[n]`` weights.
    """
    joint = np.logical_and.reduce([labeller.labelled for labeller in labellers])
    weights = np.ones(len(joint))
    annotators = [labeller for labeller in labellers if labeller.kind == ANNOTATOR]
    for sheet in dict.fromkeys(_sheet(annotator) for annotator in annotators):
        same = [annotator for annotator in annotators if _sheet(annotator) == sheet]
        own = same[0].frame[same[0].labelled]
        shared = np.logical_and.reduce([annotator.labelled for annotator in same])
        probability = own["inclusion_probability"].fillna(1.0).astype(float)
        for _, cell in probability.groupby([own["stratum"].fillna(""), probability]):
            at = cell.index[shared[cell.index]]
            weights[at] *= len(cell) / cell.iloc[0] / max(len(at), 1)
    rows = np.flatnonzero(joint)
    return rows, weights[rows]


def _sheet(annotator: Labeller) -> str:
    sheets = annotator.frame.loc[annotator.labelled, "sheet"].dropna().unique()
    return str(sheets[0]) if len(sheets) else f"none, of {annotator.name}"


def _chosen(run: Run, between: Sequence[str] | None) -> list[tuple[str, str, str]]:
    """(kind, name in the run, name to show) of the labellers to compare."""
    there = [(JUDGE, name) for name in run.labels.judges]
    there += [(ANNOTATOR, name) for name in run.labels.annotators]
    names = [name for _, name in there]
    shown = {
        (kind, name): name if names.count(name) == 1 else f"{kind}:{name}" for kind, name in there
    }
    known = ", ".join(shown.values()) or "nobody"
    chosen = []
    for name in dict.fromkeys(between) if between else shown.values():
        found = [w for w in there if name in (w[1], f"{w[0]}:{w[1]}")]
        if len(found) != 1:
            what = (
                f"both a judge and an annotator are named {name!r}"
                if found
                else (f"nobody named {name!r} has labelled {run.path}")
            )
            raise UserError(what, f"choose from: {known}")
        if (*found[0], shown[found[0]]) not in chosen:
            chosen.append((*found[0], shown[found[0]]))
    if len(chosen) < 2:
        raise UserError(
            f"agreement needs two labellers, and {run.path} has {known}"
            if not between
            else "agreement needs two different labellers",
            f"run: python -m ia_mech.judge run {run.path}, or export and import a sheet",
        )
    return chosen


def _labeller(run: Run, kind: str, name: str, shown: str) -> Labeller:
    rows = pd.MultiIndex.from_frame(run.generations[list(KEY)])
    frame = run.labels.judgements(name) if kind == JUDGE else run.labels.annotations(name)
    if kind == JUDGE:
        frame.loc[frame["status"] != JUDGED, "category"] = None
    else:
        frame["repeat"] = 0
    columns, first = [], None
    for _, part in frame.groupby("repeat"):
        at = rows.get_indexer(pd.MultiIndex.from_frame(part[list(KEY)]))
        if (at < 0).any() or len(set(at)) < len(at):
            raise UserError(
                f"the labels of {kind} {name!r} are of other turns than those in {run.path}",
                "judge the run again, or import the sheet again",
            )
        part = part.set_axis(at).reindex(range(len(rows)))
        column = np.empty(len(rows), dtype=object)
        column[:] = [c if isinstance(c, str) else None for c in part["category"]]
        for category in {*column} - {None, *NAMES}:
            raise UserError(
                f"{kind} {name!r} of {run.path} uses the category {category!r}, which this "
                "rubric doesn't have",
                "judge or annotate the run again",
            )
        columns.append(column)
        if first is None:
            first, labelled = part, np.isin(np.arange(len(rows)), at)
    if first is None:
        raise UserError(f"{kind} {name!r} of {run.path} has no labels", "remove the empty file")
    repeats = tuple(columns) if kind == JUDGE else ()
    return Labeller(shown, kind, labelled, columns[0], first, repeats)
