"""How far judges and annotators agree: ``agreement`` over a run, ``check`` over annotated turns.

Statistics and intervals are ``ia_mech.stats``'; here labels become what those take. Labels are
matched by the run's rows; of a judge its first repeat counts. A row that one side abstained on
(``cannot_assess``) or failed on (no category) is counted and then left out. Rows that annotators
labelled are a sample of the run's and are weighted by the inverse of their inclusion probability,
so that every figure is about the run and not about the sheet. Labels of decoys (``decoys``) count
in no comparison: what a labeller calls genuine of them stands beside its share of the run's turns.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import NOTHING, one_line, quoted
from ia_mech.display import Bar, console
from ia_mech.errors import UserError
from ia_mech.judge.label import (
    check_finished,
    items_of,
    judge_items,
    make_judge,
    print_plan,
    same_judges,
)
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE, NAMES
from ia_mech.judge.rules import RulesJudge
from ia_mech.judge.sheets import csv_bytes, json_lines, refuse_existing, write_files
from ia_mech.judge.verdict import JUDGED, Item
from ia_mech.run import Run, layout
from ia_mech.run.labels import KEY
from ia_mech.stats import (
    Estimate,
    alpha_of,
    balanced_accuracy_of,
    cluster_counts,
    cluster_mean,
    confusion,
    dyadic_mean,
    kappa_of,
)
from ia_mech.untrusted import escaped

JUDGE, ANNOTATOR = "judge", "annotator"
TEXTS = ("query", "response", "user_turn")
_UNKNOWN = Estimate(np.nan, np.nan, np.nan, 0, "no rows")

Labels = Sequence[str | None] | np.ndarray  # a category per row; None where there is none

# -- two columns of labels ---------------------------------------------------------------------


@dataclass(frozen=True)
class CategoryLine:
    """How one category fares. ``truth`` and ``predicted`` count rows, the weights are of those
    rows; precision and recall are weighted, NaN where no row was predicted so, or is so."""

    category: str
    truth: int
    predicted: int
    truth_weight: float
    predicted_weight: float
    precision: Estimate
    recall: Estimate


@dataclass(frozen=True)
class Comparison:
    """How far a prediction agrees with a truth (which may be another judge's labels).

    Attributes:
        matched: rows that have both; the next four are some of these.
        abstained_truth, abstained_prediction: rows that are ``cannot_assess`` there.
        failed_truth, failed_prediction: rows without any category there.
        n: the rows compared, those with a category other than ``cannot_assess`` on both sides.
        sources: of these rows.
        weight: the sum of their weights: about how many rows of the run they represent.
        weighted: whether weights differ from row to row.
        accuracy, kappa, alpha: of the categories.
        accuracy_genuine, balanced_accuracy, kappa_genuine, alpha_genuine: of genuine follow-ups
            against the rest. Balanced accuracy is NaN unless the truth has both.
        categories: one line for each category of the rubric, used or not.
        confusion: ``[c, c]`` sums of weights, truth down, prediction across.
        confusion_rows: the same in rows.
    """

    matched: int
    abstained_truth: int
    abstained_prediction: int
    failed_truth: int
    failed_prediction: int
    n: int
    sources: int
    weight: float
    weighted: bool
    accuracy: Estimate
    kappa: Estimate
    alpha: Estimate
    accuracy_genuine: Estimate
    balanced_accuracy: Estimate
    kappa_genuine: Estimate
    alpha_genuine: Estimate
    categories: tuple[CategoryLine, ...]
    confusion: np.ndarray
    confusion_rows: np.ndarray


def compare(
    truth: Labels,
    prediction: Labels,
    sources: Iterable[Any],
    weights: ArrayLike | None = None,
) -> Comparison:
    """Compare two columns of labels.

    Args:
        truth: ``[n]`` category of each row; None where there is none.
        prediction: ``[n]`` the labels to be measured.
        sources: ``[n]`` the source of each row, the unit of the intervals.
        weights: ``[n]`` how many rows each represents, as the inverse inclusion probability.

    Raises:
        ValueError: lengths differ, or a label isn't the rubric's.
    """
    for label in {*truth, *prediction} - {*NAMES, None}:
        raise ValueError(f"{label!r} is not a category of the rubric")
    rows = pd.DataFrame(
        {
            "truth": pd.Categorical(truth, NAMES),
            "predicted": pd.Categorical(prediction, NAMES),
            "source": pd.Series(sources, dtype=object).to_numpy(),
            "weight": np.ones(len(truth)) if weights is None else np.asarray(weights, dtype=float),
        }
    )
    kept = rows[rows["truth"].isin(ASSESSED) & rows["predicted"].isin(ASSESSED)]
    t, p = (kept[side].to_numpy(dtype=object) for side in ("truth", "predicted"))
    source, weight = kept["source"].to_numpy(), kept["weight"].to_numpy()

    def share(event: np.ndarray, at: np.ndarray | slice = slice(None)) -> Estimate:
        return cluster_mean(event[at], source[at], proportion=True, weights=weight[at])

    def line(category: str) -> CategoryLine:
        is_so, named = t == category, p == category
        return CategoryLine(
            category=category,
            truth=int(is_so.sum()),
            predicted=int(named.sum()),
            truth_weight=float(weight[is_so].sum()),
            predicted_weight=float(weight[named].sum()),
            precision=share(is_so, named),
            recall=share(named, is_so),
        )

    kappa, kappa_genuine, balanced_accuracy = _kappas(t, p, source, weight)
    alphas = group_alpha([t, p], source, weight)
    return Comparison(
        matched=len(rows),
        abstained_truth=int((rows["truth"] == CANNOT_ASSESS).sum()),
        abstained_prediction=int((rows["predicted"] == CANNOT_ASSESS).sum()),
        failed_truth=int(rows["truth"].isna().sum()),
        failed_prediction=int(rows["predicted"].isna().sum()),
        n=len(kept),
        sources=kept["source"].nunique(),
        weight=float(weight.sum()),
        weighted=bool(len(weight)) and not np.allclose(weight, weight[0]),
        accuracy=share(t == p),
        kappa=kappa,
        alpha=alphas.categories,
        accuracy_genuine=share((t == GENUINE) == (p == GENUINE)),
        balanced_accuracy=balanced_accuracy,
        kappa_genuine=kappa_genuine,
        alpha_genuine=alphas.genuine,
        categories=tuple(line(category) for category in ASSESSED),
        confusion=confusion(t, p, ASSESSED, weight),
        confusion_rows=confusion(t, p, ASSESSED).astype(int),
    )


@dataclass(frozen=True)
class GroupAlpha:
    """Krippendorff's α (nominal) of a group; n counts the rows that at least two have rated."""

    n: int
    sources: int
    weight: float
    categories: Estimate
    genuine: Estimate


def group_alpha(
    ratings: Sequence[Labels], sources: Iterable[Any], weights: ArrayLike | None = None
) -> GroupAlpha:
    """Krippendorff's α among any number of labellers, or of a judge's repeats.

    Args:
        ratings: per labeller ``[n]`` categories; ``cannot_assess`` and None count as not rated.
        sources: ``[n]`` the source of each row.
        weights: ``[n]`` how many rows each represents.
    """
    codes = np.array([pd.Categorical(column, ASSESSED).codes for column in ratings]).T  # -1: none
    weight = np.ones(len(codes)) if weights is None else np.asarray(weights, dtype=float)
    rated = (codes >= 0).sum(1) >= 2
    codes, weight = codes[rated], weight[rated]
    source = pd.Series(sources, dtype=object).to_numpy()[rated]
    if not len(codes):
        return GroupAlpha(0, 0, 0.0, _UNKNOWN, _UNKNOWN)
    patterns, pattern = np.unique(codes, axis=0, return_inverse=True)
    given, genuine = patterns.astype(object), (patterns == ASSESSED.index(GENUINE)).astype(object)
    given[patterns < 0] = genuine[patterns < 0] = None

    def statistic(counts: np.ndarray) -> np.ndarray:
        return np.stack([alpha_of(counts, x, len(codes)) for x in (given, genuine)], axis=1)

    found = cluster_counts(statistic, pattern.reshape(-1), source, weights=weight)
    return GroupAlpha(len(codes), len(set(source)), float(weight.sum()), *found)


def _kappas(
    truth: np.ndarray, prediction: np.ndarray, sources: np.ndarray, weights: np.ndarray
) -> list[Estimate]:
    """κ of the categories, κ and balanced accuracy of genuine against the rest."""
    if not len(truth):
        return [_UNKNOWN] * 3
    size = len(ASSESSED)
    rows, columns = (pd.Categorical(x, ASSESSED).codes.astype(int) for x in (truth, prediction))
    side = np.array([[category == GENUINE, category != GENUINE] for category in ASSESSED])
    merge = np.kron(side, side).astype(float)  # cells of all categories into those of genuine

    def statistic(counts: np.ndarray) -> np.ndarray:
        two = (counts @ merge).reshape(-1, 2, 2)
        balanced = np.where((two.sum(2) > 0).all(1), balanced_accuracy_of(two), np.nan)
        return np.stack([kappa_of(counts.reshape(-1, size, size)), kappa_of(two), balanced], axis=1)

    cells = rows * size + columns
    return cluster_counts(statistic, cells, sources, weights=weights, patterns=size**2)


# -- the labellers of a run --------------------------------------------------------------------


@dataclass(frozen=True)
class Labeller:
    """A judge or annotator, laid out over all rows of ``run.turns``.

    Attributes:
        name: as shown; ``judge:NAME`` or ``annotator:NAME`` where the name alone isn't clear.
        kind: ``judge`` or ``annotator``.
        labelled: ``[rows]`` whether it has a label, or a failure, for the row.
        categories: ``[rows]`` its categories; None where it failed and where it has no label.
        frame: ``[rows]`` the columns of its file (of a judge, of its first repeat), NaN elsewhere.
        repeats: ``[repeat][rows]`` categories of a judge; of an annotator empty.
        decoys: its labels of decoys: the columns of its file (of a judge, of its first repeat).
    """

    name: str
    kind: str
    labelled: np.ndarray
    categories: np.ndarray
    frame: pd.DataFrame
    repeats: tuple[np.ndarray, ...] = ()
    decoys: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True)
class Floor:
    """What a labeller calls genuine, of the turns that it put into a category.

    Attributes:
        turns: how many of the run's turns; ``genuine`` is the share, weighted by inverse inclusion
            probabilities.
        decoys: by kind of decoy, how many, and the share of these. As in :mod:`ia_mech.rates`,
            those of a judge count only if the own turn of their context is in a category, too.
        left_out: how many decoys it has labelled that don't count.
    """

    turns: int
    genuine: Estimate
    decoys: dict[str, tuple[int, Estimate]]
    left_out: int


@dataclass(frozen=True)
class Agreement:
    """All figures of a run.

    Attributes:
        labellers: who is compared.
        pairs: by the names of (truth, prediction).
        group: of all labellers, if there are more than two; ``group.n`` are rows that all have a
            label for and at least two put into a category.
        repeats: by judge, how many there are and their α.
        disagreements: as :func:`disagreements` returns them.
        floors: by labeller, what it calls genuine of turns and of decoys.
    """

    labellers: list[Labeller]
    pairs: dict[tuple[str, str], Comparison]
    group: GroupAlpha | None
    repeats: dict[str, tuple[int, GroupAlpha]]
    disagreements: pd.DataFrame
    floors: dict[str, Floor]


def agreement(run: Run, between: Sequence[str] | None = None) -> Agreement:
    """Compare the labellers of a run: those named by ``between``, or all there are.

    Raises:
        UserError: an unfinished run, an unknown name, or fewer than two labellers.
    """
    check_finished(run)
    labellers = [_labeller(run, *chosen) for chosen in _chosen(run, between)]
    sources = run.turns["source_id"].to_numpy(dtype=object)
    pairs = {}
    for first, second in combinations(labellers, 2):
        # Annotators are the truth of judges; between equals it is the one that was named first.
        if second.kind == ANNOTATOR and first.kind == JUDGE:
            first, second = second, first
        rows, weights = joint_rows([first, second])
        pairs[first.name, second.name] = compare(
            first.categories[rows], second.categories[rows], sources[rows], weights
        )
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
    floors = {labeller.name: _floor(run, labeller) for labeller in labellers}
    return Agreement(labellers, pairs, group, repeats, disagreements(run, labellers), floors)


def _floor(run: Run, labeller: Labeller) -> Floor:
    sources = run.turns["source_id"].to_numpy(dtype=object)
    rows, weights = joint_rows([labeller])
    categories = labeller.categories[rows]
    assessed = np.isin(categories, ASSESSED)
    rows, weights, genuine = rows[assessed], weights[assessed], categories[assessed] == GENUINE
    share = cluster_mean(genuine, sources[rows], proportion=True, weights=weights)
    source_of = run.contexts.set_index("context_id")["source_id"]
    decoys = {}
    counted = labeller.decoys["category"].isin(ASSESSED)
    if labeller.kind == JUDGE:
        own = pd.Series(labeller.categories, pd.MultiIndex.from_frame(run.turns[list(KEY)]))
        counted &= (
            own.reindex(pd.MultiIndex.from_frame(labeller.decoys[list(KEY)]))
            .isin(ASSESSED)
            .to_numpy()
        )
    for kind, of in labeller.decoys[counted].groupby("decoy"):
        places = (of["shown"].map(source_of), of["context_id"].map(source_of))
        called = (of["category"] == GENUINE).astype(float)
        decoys[kind] = len(of), dyadic_mean(called, *places, ends=(0, 1))
    return Floor(len(rows), share, decoys, int((~counted).sum()))


def joint_rows(labellers: Sequence[Labeller]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that all of these labelled, and how many rows of the run each represents.

    A judge labels every row. Annotators of one sheet share a sample: a row of a stratum represents
    (rows of the stratum) / (rows that all of them labelled). Sheets are independent samples, so
    that a row which is on two has the product of both probabilities. Labels without an inclusion
    probability are taken for a census.

    Returns:
        ``[n]`` positions in ``run.turns`` and ``[n]`` weights.
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


def disagreements(run: Run, labellers: Sequence[Labeller], seed: int = 0) -> pd.DataFrame:
    """All turns that at least two labellers put into different categories, the most telling first.

    Where an annotator is contradicted comes before judges among themselves; where it matters for
    the rate (genuine or not) before other categories; then by how sure a contradicted or
    contradicting judge was (the score of its category, if it has scores); then at random.

    Returns:
        Columns: the row's key, source and dataset; the texts; per labeller its category (``failed``
        where a judge has none, None where it has no label), then per labeller, as ``<name> (why)``,
        a judge's rationale or an annotator's note. The index is the position in
        ``run.turns``.
    """
    table = run.turns[[*KEY, "source_id", "dataset"]].reset_index(drop=True)
    items = items_of(run)
    table[list(TEXTS)] = [[item.query, item.response, item.turn] for item in items]
    labels = pd.DataFrame({x.name: x.categories for x in labellers}, dtype=object)
    assessed = labels.where(labels.isin(ASSESSED))
    annotators = [x.name for x in labellers if x.kind == ANNOTATOR]
    order = pd.DataFrame(
        {
            "judges_alone": assessed[annotators].isna().all(axis=1),
            "not_genuine": ~assessed.eq(GENUINE).any(axis=1),
            "unsure": -np.max([_scores(x) for x in labellers], axis=0),
            "tie": np.random.default_rng(seed).random(len(table)),
        }
    )
    for x in labellers:
        table[x.name] = labels[x.name].where(labels[x.name].notna() | ~x.labelled, "failed")
    for x in labellers:
        why = x.frame["rationale" if x.kind == JUDGE else "note"]
        table[f"{x.name} (why)"] = why.astype(object).where(why.astype(bool) & why.notna(), None)
    differ = assessed.nunique(axis=1) >= 2
    return table.loc[order[differ].sort_values(list(order)).index]


def _scores(labeller: Labeller) -> np.ndarray:
    """``[rows]`` the score that a judge gave its own category; 0 where it has none."""
    scores = labeller.frame.get("scores", np.full(len(labeller.frame), None))
    return np.array(
        [
            json.loads(given).get(category) or 0.0
            if isinstance(given, str) and category in ASSESSED
            else 0.0
            for given, category in zip(scores, labeller.categories, strict=True)
        ]
    )


def _sheet(annotator: Labeller) -> str:
    sheets = annotator.frame.loc[annotator.labelled, "sheet"].dropna().unique()
    return str(sheets[0]) if len(sheets) else f"none, of {annotator.name}"


def _chosen(run: Run, between: Sequence[str] | None) -> list[tuple[str, str, str]]:
    """(kind, name in the run, name to show) of the labellers to compare."""
    judges, annotators = run.labels.judges, run.labels.annotators
    # Columns of the table of disagreements, and names that are a judge's and an annotator's.
    taken = {*KEY, *TEXTS, "source_id", "dataset"} | (set(judges) & set(annotators))
    there = [
        (kind, name, f"{kind}:{name}" if name in taken else name)
        for kind, names in ((JUDGE, judges), (ANNOTATOR, annotators))
        for name in names
    ]
    known = ", ".join(shown for *_, shown in there) or "no labels"
    chosen = [] if between else there
    for wanted in between or ():
        found = [x for x in there if wanted in (x[1], f"{x[0]}:{x[1]}")]
        if not found:
            raise UserError(f"{run.path} has no labels of {wanted!r}", f"choose from: {known}")
        if len(found) > 1:
            problem = f"both a judge and an annotator are named {wanted!r}"
            raise UserError(problem, f"choose from: {known}")
        chosen += [x for x in found if x not in chosen]
    if len(chosen) < 2 and len(there) > 1:
        raise UserError("agreement needs two different labellers", f"choose from: {known}")
    if len(chosen) < 2:
        judge = f"python -m ia_mech.judge run {quoted(run.path)}"
        raise UserError(
            f"agreement needs two labellers, and {run.path} has {known}",
            f"run: {judge}{' --judge llm or hf' if judges else ''}, or export and import a sheet",
        )
    return chosen


def _labeller(run: Run, kind: str, name: str, shown: str) -> Labeller:
    rows = pd.MultiIndex.from_frame(run.turns[list(KEY)])
    if kind == JUDGE:
        frame, decoys = run.labels.judgements(name), run.labels.decoys(name)
        for rows_of in (frame, decoys):
            rows_of.loc[rows_of["status"] != JUDGED, "category"] = None
    else:
        frame = run.labels.annotations(name).assign(repeat=0)
        decoys = run.labels.decoys(name, "annotations").assign(repeat=0)
    for category in {*frame["category"].dropna(), *decoys["category"].dropna()} - set(NAMES):
        raise UserError(
            f"{kind} {name!r} of {run.path} uses the category {category!r}, which this rubric "
            "doesn't have",
            "judge or annotate the run again",
        )
    parts = []
    for _, part in frame.groupby("repeat"):
        at = rows.get_indexer(pd.MultiIndex.from_frame(part[list(KEY)]))
        if (at < 0).any() or len(set(at)) < len(at):
            raise UserError(
                f"the labels of {kind} {name!r} are of other turns than those in {run.path}",
                "judge the run again, or import the sheet again",
            )
        parts.append(part.set_axis(at).reindex(range(len(rows))))
    contexts = set(run.contexts["context_id"])
    if not contexts.issuperset([*decoys["context_id"], *decoys["shown"]]):
        raise UserError(
            f"the decoys of {kind} {name!r} are of other contexts than those in {run.path}",
            "judge the run again, or import the sheet again",
        )
    if not parts:
        raise UserError(f"{kind} {name!r} of {run.path} has no labels", "remove the empty file")
    columns = [part["category"].astype(object) for part in parts]
    categories = tuple(column.where(column.notna(), None).to_numpy() for column in columns)
    labelled = parts[0]["context_id"].notna().to_numpy()
    repeats = categories if kind == JUDGE else ()
    decoys = decoys[decoys["repeat"] == 0]
    return Labeller(shown, kind, labelled, categories[0], parts[0], repeats, decoys)


# -- what is shown -----------------------------------------------------------------------------

_NOTE = (
    "genuine: genuine follow-ups against the rest. n: rows that both put into a category. ≈ rows: "
    "how many of the run's rows those represent; all figures but n are weighted so."
)


def _table(first: str, *others: str, title: str | None = None) -> Table:
    """A table of numbers under headings, with names in the first column."""
    table = Table(title=title, title_justify="left")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_pairs(screen: Console, pairs: dict[tuple[str, str], Comparison]) -> None:
    """One line per pair, by the names of (truth, prediction)."""
    columns = ("pair", "n", "≈ rows", "κ genuine", "κ categories", "α categories")
    table = _table(*columns, title="agreement (95% intervals over sources)")
    for (truth, prediction), c in pairs.items():
        table.add_row(
            escape(one_line(f"{prediction} / {truth}", 60)),
            str(c.n),
            f"{c.weight:.0f}",
            *(figure.text() for figure in (c.kappa_genuine, c.kappa, c.alpha)),
        )
    screen.print(table)
    screen.print(_NOTE, soft_wrap=True)


def print_floors(screen: Console, floors: dict[str, Floor]) -> None:
    """What each labeller calls genuine, of turns and of decoys; nothing if none has decoys."""
    if not any(floor.decoys for floor in floors.values()):
        return
    table = _table("labeller", "turns after", "n", "genuine", title="share called genuine")
    table.columns[1].justify = "left"
    for name, floor in floors.items():
        lines = [("their own context", floor.turns, floor.genuine)]
        lines += [(f"another {kind} (decoys)", *of) for kind, of in floor.decoys.items()]
        for at, (context, count, share) in enumerate(lines):
            shown = "" if at else escape(one_line(name, 60))
            table.add_row(
                shown, context, str(count), share.text(), end_section=at + 1 == len(lines)
            )
    screen.print(table)
    lost = ", ".join(f"{name} {floor.left_out}" for name, floor in floors.items() if floor.left_out)
    if lost:
        screen.print(
            "decoys left out, as they (of a judge: or their context's own turn) are in no "
            f"category: {escape(one_line(lost))}",
            soft_wrap=True,
        )


def print_alpha(screen: Console, title: str, alpha: GroupAlpha) -> None:
    """Krippendorff's α of all labellers, or of a judge with itself."""
    figures = (
        f"α genuine {alpha.genuine.text()}, α categories {alpha.categories.text()} on {alpha.n} "
        f"rows (≈ {alpha.weight:.0f}) from {alpha.sources} sources"
        if alpha.n
        else "no row that all of them labelled"
    )
    screen.print(escape(f"{one_line(title)}: {figures}"), soft_wrap=True)


def print_comparison(screen: Console, title: str, comparison: Comparison) -> None:
    """The figures of one pair: agreement, categories, confusion matrix.

    On a screen less than 100 wide (110 with weights) lines break.
    """
    c = comparison
    represented = f" (representing ≈ {c.weight:.0f})" if c.weight != c.n else ""
    screen.print(f"[bold]{escape(one_line(title))}[/]", soft_wrap=True)
    screen.print(
        f"{c.n} rows{represented} from {c.sources} sources. Apart, of {c.matched}: cannot_assess "
        f"{c.abstained_prediction} (truth {c.abstained_truth}), failed {c.failed_prediction} "
        f"(truth {c.failed_truth})",
        soft_wrap=True,
    )
    if not c.n:
        screen.print("no row that both put into a category: nothing to compare")
        return
    table = _table("", "agreement", "balanced accuracy", "Cohen's κ", "Krippendorff's α")
    genuine = (c.accuracy_genuine, c.balanced_accuracy, c.kappa_genuine, c.alpha_genuine)
    table.add_row("genuine or not", *(x.text() for x in genuine))
    table.add_row("categories", c.accuracy.text(), "", c.kappa.text(), c.alpha.text())
    screen.print(table)
    table = _table("category", "n truth", "n predicted", "precision", "recall")
    for line in c.categories:
        counts = ((line.truth, line.truth_weight), (line.predicted, line.predicted_weight))
        cells = [f"{n} (≈ {weight:.0f})" if c.weighted else str(n) for n, weight in counts]
        table.add_row(line.category, *cells, line.precision.text(), line.recall.text())
    screen.print(table)
    # Columns go by number: eight names side by side fit no terminal.
    table = _table("truth ↓   prediction →", *map(str, range(1, len(ASSESSED) + 1)))
    totals = c.confusion.sum(1)
    for i, name in enumerate(ASSESSED):
        cells = []
        for rows, weight in zip(c.confusion_rows[i], c.confusion[i], strict=True):
            share = f" {weight / totals[i]:4.0%}" if rows and c.weighted else ""
            cells.append(f"{rows}{share}" if rows else "·")
        table.add_row(f"{i + 1} {name}", *cells)
    screen.print(table)
    if c.weighted:
        screen.print("rows, and the weighted share of the truth's category", soft_wrap=True)


def print_disagreements(screen: Console, found: Agreement, count: int) -> None:
    """The first few disagreements; rows of the same texts and labels are shown once."""
    table, names = found.disagreements, [x.name for x in found.labellers]
    if table.empty:
        screen.print("no disagreements")
        return
    alike = list(table.groupby([*TEXTS, *names], sort=False, dropna=False))[:count]
    screen.print(
        f"[bold]{len(table)} disagreements[/], {sum(len(rows) for _, rows in alike)} of them shown "
        "(annotators first, then genuine or not, then the judge's certainty)",
        soft_wrap=True,
    )

    def show(text: str, style: str | None = None) -> None:
        screen.print(f"    {escape(text)}", style=style, soft_wrap=True)

    for _, rows in alike:
        first = rows.iloc[0]
        show(f"query:     {one_line(first['query'], 90)}")
        show(f"response:  {one_line(first['response'], 90)}")
        show(f"user turn: {one_line(first['user_turn'], 300)}")
        for name in names:
            if isinstance(first[name], str):
                why = first[f"{name} (why)"]
                reason = f": {one_line(why, 160)}" if isinstance(why, str) else ""
                show(f"{one_line(name, 40)} says {first[name]}{reason}", "bold")
        times = f" (×{len(rows)})" if len(rows) > 1 else ""
        at = f"{first['context_id']} · T = {first['temperature']:g} · {first['sample']}"
        show(f"{one_line(at)}{times}\n")


# -- from the command line ---------------------------------------------------------------------


def command(args: argparse.Namespace) -> None:
    """``python -m ia_mech.judge agreement``."""
    if args.disagreements < 0:
        raise UserError("--disagreements can't be negative", "give 0 for none")
    for kind, path in (("json", args.json), ("csv", args.csv)):
        if path is not None:
            layout.check_output(path, kind)
    run = Run.open(args.run)
    found = agreement(run, args.between)
    contents = {}
    if args.json is not None:
        contents[args.json] = report(run, found).encode()
    if args.csv is not None:
        contents[args.csv] = csv_bytes(found.disagreements)
    write_files(contents, replace=True)
    screen = console(110)  # the confusion matrix belongs on one line
    print_pairs(screen, found.pairs)
    print_floors(screen, found.floors)
    for note in same_judges(run):
        screen.print(escape(one_line(note)), soft_wrap=True)
    if found.group is not None:
        print_alpha(screen, f"all {len(found.labellers)}", found.group)
    for name, (count, alpha) in found.repeats.items():
        print_alpha(screen, f"{name} with itself ({count} repeats)", alpha)
    for (truth, prediction), comparison in found.pairs.items():
        screen.print()
        print_comparison(screen, f"{prediction} against {truth}", comparison)
    screen.print()
    print_disagreements(screen, found, args.disagreements)
    for path in contents:
        screen.print(escape(f"written: {path}"), soft_wrap=True)
    screen.print(escape(f"next: python -m ia_mech.rates {quoted(args.run)}"), soft_wrap=True)


def report(run: Run, found: Agreement) -> str:
    """All figures as JSON; NaN is null."""
    content = {
        "run": run.name,
        "labellers": [
            {"name": x.name, "kind": x.kind, "rows": int(x.labelled.sum())}
            | {"genuine": asdict(found.floors[x.name])}
            for x in found.labellers
        ],
        "pairs": [
            {"truth": truth, "prediction": prediction, "comparison": asdict(comparison)}
            for (truth, prediction), comparison in found.pairs.items()
        ],
        "group": asdict(found.group) if found.group else None,
        "repeats": {
            name: {"repeats": count, "alpha": asdict(alpha)}
            for name, (count, alpha) in found.repeats.items()
        },
        "disagreements": len(found.disagreements),
    }
    text = json.dumps(content, default=np.ndarray.tolist)  # NaN, which isn't JSON, as a constant
    content = json.loads(text, parse_constant=lambda _: None)
    return escaped(json.dumps(content, indent=1, ensure_ascii=False)) + "\n"


def check(args: argparse.Namespace) -> int:
    """``python -m ia_mech.judge check``: judge a file's turns, and compare with its annotations.

    Returns the exit status.
    """
    rows = _read_turns(args.file)
    if args.out is not None:
        refuse_existing([args.out])
    items = [Item(row["query"], row["response"], row["user_turn"]) for row in rows]
    judge = make_judge(args)
    if args.repeats > 1:
        raise UserError("check compares one verdict per turn", "drop --repeats")
    if args.dry_run:
        print_plan(judge, items, args)
        return 0
    verdicts, _ = judge_items(items, judge, Bar())
    found = [verdicts[item, 0] for item in items]
    screen = console()
    annotated = [i for i, row in enumerate(rows) if row.get("category")]
    if annotated:
        comparison = compare(
            [rows[i]["category"] for i in annotated],
            [found[i].category for i in annotated],
            # A row without a source stands alone.
            [f"row {i}" if (s := rows[i].get("source_id")) is None else str(s) for i in annotated],
        )
        print_comparison(screen, f"{args.judge} against {args.file.name}", comparison)
        if isinstance(judge, RulesJudge) and (known := judge.fitted_on(items)):
            screen.print(
                f"[bold]{known} of these {len(items)} turns were in the rules judge's fit[/]: on "
                "them it looks better than it is; its card has cross-validated figures.",
                soft_wrap=True,
            )
    else:
        for row, verdict in zip(rows, found, strict=True):
            screen.print(
                f"{verdict.category or verdict.status:<22}{escape(one_line(row['user_turn'], 90))}",
                soft_wrap=True,
            )
    if judge.caveat:
        screen.print(escape(judge.caveat), soft_wrap=True)
    if args.out is not None:
        lines = [
            json.dumps(row | {"judge": args.judge, "verdict": verdict.to_json()}) + "\n"
            for row, verdict in zip(rows, found, strict=True)
        ]
        write_files({args.out: "".join(lines).encode()})
        print(f"verdicts: {args.out}")
    return 0 if any(verdict.status == JUDGED for verdict in found) else NOTHING


def _read_turns(path: Path) -> list[dict[str, Any]]:
    """The rows of an annotated file; UserError names the line that isn't as it should be."""
    rows = []
    for where, row in json_lines(path):
        if not all(isinstance(row.get(key), str) for key in TEXTS):
            raise UserError(f"{where} lacks a text", f"each needs {', '.join(TEXTS)}")
        if row.get("category") and row["category"] not in NAMES:
            raise UserError(
                f"{where}: no category {row['category']!r} in the rubric",
                f"give one of {', '.join(NAMES)}",
            )
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no turn", "give a JSON-lines file")
    return rows
