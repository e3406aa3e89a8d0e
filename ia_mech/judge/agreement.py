"""One labeller against another, and several among themselves: figures with intervals.

Statistics and intervals are ``ia_mech.stats``'; here labels become what those take. A row that one
side abstained on (``cannot_assess``) or failed on (no category) is counted and then left out.

``agreement`` of ``python -m ia_mech.judge``.

The turns that labellers disagree on, the most telling first.

The judges and annotators of a run, compared in pairs and as a group.

Labels are matched by the run's rows; of a judge its first repeat counts. Rows that annotators
labelled are a sample of the run's and are weighted by the inverse of their inclusion probability,
so that every figure is about the run and not about the sheet.

Agreement as it is shown at a terminal, and as JSON.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import combinations, groupby
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import one_line
from ia_mech.display import console
from ia_mech.errors import UserError
from ia_mech.judge.label import check_finished, items_of
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE, NAMES
from ia_mech.judge.sheets import NewFiles, csv_bytes
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
    kappa_of,
)


@dataclass(frozen=True)
class Disagreement:
    """A turn that got different categories.

    Attributes:
        row: its context, temperature, sample and source.
        item: the texts.
        said: labeller -> category; ``failed`` where a judge has none, missing where not asked.
        why: labeller -> a judge's rationale or an annotator's note, where there is one.
    """

    row: dict[str, Any]
    item: Item
    said: dict[str, str]
    why: dict[str, str]


def disagreements(run: Run, labellers: Sequence["Labeller"], seed: int = 0) -> list[Disagreement]:
    """All turns that at least two labellers put into different categories.

    Where a person is contradicted comes before judges among themselves; where it matters for the
    rate (genuine or not) before other categories; then by how sure a contradicted or contradicting
    judge was (the score of its category, if it has scores); then at random.
    """
    rows, items = run.generations, items_of(run)
    keys = rows[[*KEY, "source_id", "dataset"]].to_dict("records")
    tie = np.random.default_rng(seed).random(len(rows))
    found = []
    for i in np.flatnonzero(np.sum([x.labelled for x in labellers], axis=0) >= 2):
        asked = [labeller for labeller in labellers if labeller.labelled[i]]
        sorted_in = [x for x in asked if x.categories[i] in ASSESSED]
        categories = {x.categories[i] for x in sorted_in}
        if len(categories) < 2:
            continue
        people = any(x.kind == "annotator" for x in sorted_in)
        genuine = GENUINE in categories
        sure = max(_score(labeller, i) for labeller in sorted_in)
        disagreement = Disagreement(
            keys[i],
            items[i],
            {x.name: x.categories[i] or "failed" for x in asked},
            {x.name: why for x in asked if (why := _why(x, i))},
        )
        found.append(((not people, not genuine, -sure, tie[i]), disagreement))
    return [disagreement for _, disagreement in sorted(found, key=lambda pair: pair[0])]


def csv_of(found: Sequence[Disagreement], names: Sequence[str]) -> bytes:
    """A CSV file of disagreements: a column with the category of each labeller, one with why."""
    rows = [
        d.row
        | {"query": d.item.query, "response": d.item.response, "user_turn": d.item.turn}
        | d.said
        | {f"{name} (why)": why for name, why in d.why.items()}
        for d in found
    ]
    columns = [*KEY, "source_id", "dataset", "query", "response", "user_turn", *names]
    return csv_bytes([*columns, *(f"{name} (why)" for name in names)], rows)


def _score(labeller: "Labeller", row: int) -> float:
    if labeller.kind != "judge" or not isinstance(labeller.frame["scores"].iloc[row], str):
        return 0.0
    scores = json.loads(labeller.frame["scores"].iloc[row])
    return float(scores.get(labeller.categories[row]) or 0.0)


def _why(labeller: "Labeller", row: int) -> str:
    why = labeller.frame["rationale" if labeller.kind == "judge" else "note"].iloc[row]
    return why if isinstance(why, str) else ""


_UNKNOWN = Estimate(np.nan, np.nan, np.nan, 0, "no rows")


@dataclass(frozen=True)
class CategoryLine:
    """How one category fares. ``truth`` and ``predicted`` count rows, the weights what they stand
    for; precision and recall are weighted, NaN where no row was predicted so, or is so."""

    category: str
    truth: int
    predicted: int
    truth_weight: float
    predicted_weight: float
    precision: Estimate
    recall: Estimate


@dataclass(frozen=True)
class Comparison:
    """How far a prediction agrees with a truth (which may be another judge's word).

    Attributes:
        matched: rows that both were asked about; the next four are some of these.
        abstained_truth, abstained_prediction: rows that one (or both) said ``cannot_assess`` of.
        failed_truth, failed_prediction: rows of which one has no category at all.
        n: the rows compared, those that both put into a category.
        sources: of these rows.
        weight: the sum of their weights: about how many rows they stand for.
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
    truth: Sequence[str | None],
    prediction: Sequence[str | None],
    sources: Sequence[str],
    weights: ArrayLike | None = None,
) -> Comparison:
    """Compare two columns of labels.

    Args:
        truth: ``[n]`` category of each row; None where there is none.
        prediction: ``[n]`` the same from whom is to be measured.
        sources: ``[n]`` the source of each row, the unit of the intervals.
        weights: ``[n]`` how many rows each stands for, as the inverse inclusion probability.

    Raises:
        ValueError: lengths differ, or a label isn't the rubric's.
    """
    truth, prediction = _labels(truth), _labels(prediction)
    weights = np.ones(len(truth)) if weights is None else np.asarray(weights, dtype=float)
    sources = np.asarray(sources, dtype=object)
    if not len(truth) == len(prediction) == len(sources) == len(weights):
        raise ValueError("truth, prediction, sources and weights must be of one length")
    kept = _assessed(truth) & _assessed(prediction)
    counts = {
        "matched": len(truth),
        "abstained_truth": int((truth == CANNOT_ASSESS).sum()),
        "abstained_prediction": int((prediction == CANNOT_ASSESS).sum()),
        "failed_truth": sum(label is None for label in truth),
        "failed_prediction": sum(label is None for label in prediction),
    }
    truth, prediction, sources, weights = (x[kept] for x in (truth, prediction, sources, weights))
    same = truth == prediction
    same_genuine = (truth == GENUINE) == (prediction == GENUINE)
    kappas = _kappas(truth, prediction, sources, weights)
    alphas = group_alpha([truth, prediction], sources, weights)
    return Comparison(
        **counts,
        n=len(truth),
        sources=len(set(sources)),
        weight=float(weights.sum()),
        weighted=bool(len(weights)) and not np.allclose(weights, weights[0]),
        accuracy=_share(same, sources, weights),
        kappa=kappas[0],
        alpha=alphas.categories,
        accuracy_genuine=_share(same_genuine, sources, weights),
        balanced_accuracy=kappas[2],
        kappa_genuine=kappas[1],
        alpha_genuine=alphas.genuine,
        categories=tuple(
            _line(category, truth == category, prediction == category, sources, weights)
            for category in ASSESSED
        ),
        confusion=confusion(truth, prediction, ASSESSED, weights),
        confusion_rows=confusion(truth, prediction, ASSESSED).astype(int),
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
    ratings: Sequence[Sequence[str | None]],
    sources: Sequence[str],
    weights: ArrayLike | None = None,
) -> GroupAlpha:
    """Krippendorff's α among any number of labellers, or of a judge's repeats.

    Args:
        ratings: per labeller ``[n]`` categories; ``cannot_assess`` and None count as not rated.
        sources: ``[n]`` the source of each row.
        weights: ``[n]`` how many rows each stands for.
    """
    columns = np.array(
        [[ASSESSED.index(x) if x in ASSESSED else -1 for x in column] for column in ratings]
    ).T.reshape(-1, len(ratings))
    weights = np.ones(len(columns)) if weights is None else np.asarray(weights, dtype=float)
    rated = (columns >= 0).sum(1) >= 2
    columns, weights = columns[rated], weights[rated]
    sources = np.asarray(sources, dtype=object)[rated]
    if not len(columns):
        return GroupAlpha(0, 0, 0.0, _UNKNOWN, _UNKNOWN)
    patterns, pattern = np.unique(columns, axis=0, return_inverse=True)
    given = [[None if code < 0 else code for code in row] for row in patterns.tolist()]
    genuine_code = ASSESSED.index(GENUINE)
    genuine = [[None if code is None else code == genuine_code for code in row] for row in given]

    def statistic(counts: np.ndarray) -> np.ndarray:
        return np.stack([alpha_of(counts, x, len(columns)) for x in (given, genuine)], axis=1)

    found = cluster_counts(statistic, pattern.reshape(-1), sources, weights=weights)
    return GroupAlpha(len(columns), len(set(sources)), float(weights.sum()), *found)


def _kappas(
    truth: np.ndarray, prediction: np.ndarray, sources: np.ndarray, weights: np.ndarray
) -> list[Estimate]:
    """κ of the categories, κ and balanced accuracy of genuine against the rest."""
    if not len(truth):
        return [_UNKNOWN] * 3
    number, size = {category: i for i, category in enumerate(ASSESSED)}, len(ASSESSED)
    cell = [number[a] * size + number[b] for a, b in zip(truth, prediction, strict=True)]
    side = np.array([[category == GENUINE, category != GENUINE] for category in ASSESSED])
    merge = np.kron(side, side).astype(float)  # cells of all categories into those of genuine

    def statistic(counts: np.ndarray) -> np.ndarray:
        two = (counts @ merge).reshape(-1, 2, 2)
        balanced = np.where((two.sum(2) > 0).all(1), balanced_accuracy_of(two), np.nan)
        return np.stack([kappa_of(counts.reshape(-1, size, size)), kappa_of(two), balanced], axis=1)

    return cluster_counts(statistic, cell, sources, weights=weights, patterns=size**2)


def _line(
    category: str,
    truth: np.ndarray,
    predicted: np.ndarray,
    sources: np.ndarray,
    weights: np.ndarray,
) -> CategoryLine:
    return CategoryLine(
        category=category,
        truth=int(truth.sum()),
        predicted=int(predicted.sum()),
        truth_weight=float(weights[truth].sum()),
        predicted_weight=float(weights[predicted].sum()),
        precision=_share(truth[predicted], sources[predicted], weights[predicted]),
        recall=_share(predicted[truth], sources[truth], weights[truth]),
    )


def _share(event: np.ndarray, sources: np.ndarray, weights: np.ndarray) -> Estimate:
    return cluster_mean(event, sources, proportion=True, weights=weights)


def _labels(labels: Sequence[str | None]) -> np.ndarray:
    """``[n]`` objects; ValueError for what is neither None nor a name of the rubric."""
    column = np.empty(len(labels), dtype=object)
    column[:] = [None if label is None or label != label else label for label in labels]
    for label in set(column):
        if label is not None and label != CANNOT_ASSESS and label not in ASSESSED:
            raise ValueError(f"{label!r} is not a category of the rubric")
    return column


def _assessed(labels: np.ndarray) -> np.ndarray:
    return np.array([label in ASSESSED for label in labels], dtype=bool)


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


_NOTE = (
    "genuine: genuine follow-ups against the rest. n: rows that both put into a category. ≈ rows: "
    "how many of the run's rows those stand for; all figures but n are weighted so."
)


def print_pairs(screen: Console, pairs: Sequence["Pair"]) -> None:
    """One line per pair."""
    table = Table(title="agreement (95% intervals over sources)", title_justify="left")
    table.add_column("pair", overflow="fold")
    for name in ("n", "≈ rows", "κ genuine", "κ categories", "α categories"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        c = pair.comparison
        table.add_row(
            escape(one_line(f"{pair.prediction} / {pair.truth}", 60)),
            str(c.n),
            f"{c.weight:.0f}",
            c.kappa_genuine.text(),
            c.kappa.text(),
            c.alpha.text(),
        )
    screen.print(table)
    screen.print(_NOTE, soft_wrap=True)


def print_group(screen: Console, size: int, group: GroupAlpha) -> None:
    """Krippendorff's α of everyone."""
    if not group.n:
        screen.print(f"all {size}: there is no row that everyone labelled", soft_wrap=True)
        return
    screen.print(
        f"all {size}: α genuine {escape(group.genuine.text())}, α categories "
        f"{escape(group.categories.text())} on {group.n} rows (≈ {group.weight:.0f}) from "
        f"{group.sources} sources",
        soft_wrap=True,
    )


def print_repeats(screen: Console, repeats: Mapping[str, tuple[int, GroupAlpha]]) -> None:
    """How far judges agree with themselves."""
    for name, (count, alpha) in repeats.items():
        screen.print(
            f"{escape(one_line(name))} with itself ({count} repeats): α genuine "
            f"{escape(alpha.genuine.text())}, α categories {escape(alpha.categories.text())} on "
            f"{alpha.n} rows",
            soft_wrap=True,
        )


def print_comparison(screen: Console, title: str, comparison: Comparison) -> None:
    """The figures of one pair: agreement, categories, confusion matrix.

    Args:
        screen: at least 100 wide (110 with weights), or lines break.
        title: who is measured against whom.
        comparison: the figures.
    """
    c = comparison
    weight = f" (standing for ≈ {c.weight:.0f})" if c.weight != c.n else ""
    screen.print(f"[bold]{escape(one_line(title))}[/]", soft_wrap=True)
    screen.print(
        f"{c.n} rows{weight} from {c.sources} sources. Apart, of {c.matched}: cannot_assess "
        f"{c.abstained_prediction} (truth {c.abstained_truth}), failed {c.failed_prediction} "
        f"(truth {c.failed_truth})",
        soft_wrap=True,
    )
    if not c.n:
        screen.print("no row that both put into a category: nothing to compare")
        return
    table = Table()
    table.add_column("")
    for name in ("agreement", "balanced accuracy", "Cohen's κ", "Krippendorff's α"):
        table.add_column(name, justify="right", no_wrap=True)
    genuine = (c.accuracy_genuine, c.balanced_accuracy, c.kappa_genuine, c.alpha_genuine)
    table.add_row("genuine or not", *(x.text() for x in genuine))
    table.add_row("categories", c.accuracy.text(), "", c.kappa.text(), c.alpha.text())
    screen.print(table)
    _print_categories(screen, c)
    _print_confusion(screen, c)


def _print_categories(screen: Console, c: Comparison) -> None:
    table = Table()
    table.add_column("category", no_wrap=True)
    for name in ("n truth", "n predicted", "precision", "recall"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in c.categories:
        counts = ((line.truth, line.truth_weight), (line.predicted, line.predicted_weight))
        cells = [f"{n} (≈ {weight:.0f})" if c.weighted else str(n) for n, weight in counts]
        table.add_row(line.category, *cells, line.precision.text(), line.recall.text())
    screen.print(table)


def _print_confusion(screen: Console, c: Comparison) -> None:
    """Columns go by number: eight names side by side fit no terminal."""
    table = Table()
    table.add_column("truth ↓   prediction →", no_wrap=True)
    for number in range(1, len(ASSESSED) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    totals = c.confusion.sum(1)
    for i, name in enumerate(ASSESSED):
        cells = []
        for j in range(len(ASSESSED)):
            rows = int(c.confusion_rows[i, j])
            share = f" {c.confusion[i, j] / totals[i]:4.0%}" if rows and c.weighted else ""
            cells.append(f"{rows}{share}" if rows else "·")
        table.add_row(f"{i + 1} {name}", *cells)
    screen.print(table)
    if c.weighted:
        screen.print("rows, and the weighted share of the truth's category", soft_wrap=True)


def print_disagreements(screen: Console, found: Sequence[Disagreement], count: int) -> None:
    """The first few disagreements; rows of the same texts and labels in a row are one."""
    if not found:
        screen.print("no disagreements")
        return
    alike = groupby(sorted_alike(found), key=_look)
    shown = [list(rows) for _, rows in alike][:count]
    screen.print(
        f"[bold]{len(found)} disagreements[/], {sum(map(len, shown))} of them shown "
        "(people first, then genuine or not, then the judge's certainty)",
        soft_wrap=True,
    )
    for rows in shown:
        d = rows[0]
        times = f" (×{len(rows)})" if len(rows) > 1 else ""
        for name, text, width in (
            ("query:    ", d.item.query, 90),
            ("response: ", d.item.response, 90),
            ("user turn:", d.item.turn, 300),
        ):
            screen.print(f"    {name} {escape(one_line(text, width))}", soft_wrap=True)
        for name, category in d.said.items():
            why = f": {one_line(d.why[name], 160)}" if name in d.why else ""
            line = f"{one_line(name, 40)} says {category}{why}"
            screen.print(f"    [bold]{escape(line)}[/]", soft_wrap=True)
        at = f"{d.row['context_id']} · T = {d.row['temperature']:g} · {d.row['sample']}"
        screen.print(f"    {escape(one_line(at))}{times}\n", soft_wrap=True)


def sorted_alike(found: Sequence[Disagreement]) -> list[Disagreement]:
    """The same order, but later look-alikes (same texts, same labels) behind the first of them."""
    first: dict[Any, int] = {}
    for i, d in enumerate(found):
        first.setdefault(_look(d), i)
    return sorted(found, key=lambda d: first[_look(d)])


def _look(d: Disagreement) -> tuple:
    return d.item, tuple(d.said.items())


def to_json(value: Any) -> Any:
    """Dataclasses as objects, arrays as lists, NaN as None; tuples become lists."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def command(args: argparse.Namespace) -> None:
    """``python -m ia_mech.judge agreement``."""
    if args.disagreements < 0:
        raise UserError("--disagreements can't be negative", "give 0 for none")
    for path in (args.json, args.csv):
        if path is not None:
            layout.refuse_inside_run(path)
    run = Run.open(args.run)
    found = agreement(run, args.between)
    contents = {}
    if args.json is not None:
        text = json.dumps(report(run, found), indent=1, ensure_ascii=False, allow_nan=False)
        contents[args.json] = (text + "\n").encode()
    if args.csv is not None:
        contents[args.csv] = csv_of(found.disagreements, [x.name for x in found.labellers])
    with NewFiles(contents, replace=True):
        pass
    screen = console()
    screen.width = max(screen.width, 110)  # the confusion matrix belongs on one line
    print_pairs(screen, found.pairs)
    if found.group is not None:
        print_group(screen, len(found.labellers), found.group)
    if found.repeats:
        print_repeats(screen, found.repeats)
    for pair in found.pairs:
        screen.print()
        print_comparison(screen, f"{pair.prediction} against {pair.truth}", pair.comparison)
    screen.print()
    print_disagreements(screen, found.disagreements, args.disagreements)
    for path in contents:
        screen.print(escape(f"written: {path}"), soft_wrap=True)
    screen.print(escape(f"next: python -m ia_mech.rates {args.run}"), soft_wrap=True)


def report(run: Run, found: Agreement) -> dict[str, Any]:
    """All figures as JSON; NaN is null."""
    return to_json(
        {
            "run": str(run.path),
            "labellers": [
                {"name": x.name, "kind": x.kind, "rows": int(x.labelled.sum())}
                for x in found.labellers
            ],
            "pairs": found.pairs,
            "group": found.group,
            "repeats": {
                name: {"repeats": count, "alpha": alpha}
                for name, (count, alpha) in found.repeats.items()
            },
            "disagreements": len(found.disagreements),
        }
    )
