"""How far judges and annotators agree: ``agreement`` over a run, ``check`` over annotated turns.

Statistics and intervals are ``ia_mech.stats``'; here labels become what those take. Labels are
matched by the run's rows. A row that one side abstained on
(``cannot_assess``) or failed on (no category) is counted and then left out. Rows that annotators
labelled are a sample of the run's and are weighted by the inverse of their inclusion probability,
so that every figure is about the run and not about the sheet. Labels of decoys (``decoys``) count
in no comparison: what a labeller calls genuine of them stands beside its share of the run's turns.
Nor do turns that a judge was fitted on.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from rich.console import Console
from rich.markup import escape

from ia_mech.cli import NOTHING, one_line, shell_word
from ia_mech.display import Bar, console
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, frame_of
from ia_mech.judge.command import make_judge, print_plan
from ia_mech.judge.label import (
    LabelSet,
    check_finished,
    items_of,
    judge_items,
    read_labels,
    same_judges,
)
from ia_mech.judge.rubric import BUILT_IN, CANNOT_ASSESS, Rubric
from ia_mech.judge.sheets import json_lines, refuse_existing, write_new_files
from ia_mech.judge.verdict import JUDGED, Item
from ia_mech.results import Result, Table, about_runs, folder_of, print_table, show, write
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.run.layout import refuse_unwritable
from ia_mech.run.sources import sources_of
from ia_mech.stats import (
    Estimate,
    balanced_accuracy,
    cluster_bootstrap,
    cluster_mean,
    dyadic_mean,
    kappa_of,
    weighted_share,
)

JUDGE, ANNOTATOR = "judge", "annotator"
TEXTS = ("query", "response", "user_turn")
_UNKNOWN = Estimate(np.nan, np.nan, np.nan, 0, "no rows")
_OF = dict.fromkeys(("truth", "prediction", "term", "decoy"), "str")  # what estimates are of

Labels = Sequence[str | None] | np.ndarray  # a category per row; None where there is none

# -- two columns of labels ---------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """How far a prediction agrees with a truth (which may be another judge's labels).

    Attributes:
        matched: rows that have both.
        apart: how many of these are ``cannot_assess`` or without a category, in words; empty for
            none.
        n: the rows compared, those with a category other than ``cannot_assess`` on both sides.
        weight: the sum of their weights: about how many rows of the run they represent.
        figures: by (quantity, of): ``accuracy`` and ``kappa`` of ``categories``; these and
            ``balanced_accuracy`` of ``genuine`` follow-ups against the rest (NaN unless the truth
            has both); ``precision`` and ``recall`` of each category, NaN where none was predicted
            so, or is so.
        confusion: ``[c, c]`` rows, truth down, prediction across.
    """

    matched: int
    apart: str
    n: int
    weight: float
    figures: dict[tuple[str, str], Estimate]
    confusion: np.ndarray
    rubric: Rubric = BUILT_IN


def compare(
    truth: Labels,
    prediction: Labels,
    sources: Iterable[Any],
    weights: ArrayLike | None = None,
    rubric: Rubric = BUILT_IN,
) -> Comparison:
    """Compare two columns of labels.

    Args:
        truth: ``[n]`` category of each row; None where there is none.
        prediction: ``[n]`` the labels to be measured.
        sources: ``[n]`` the source of each row, the unit of the intervals.
        weights: ``[n]`` how many rows each represents, as the inverse inclusion probability.
        rubric: that both labelled by.
    """
    rows = pd.DataFrame(
        {
            "truth": pd.Categorical(truth, rubric.names),
            "prediction": pd.Categorical(prediction, rubric.names),
            "source": pd.Series(sources, dtype=object).to_numpy(),
            "weight": np.ones(len(truth)) if weights is None else np.asarray(weights, dtype=float),
        }
    )
    assessed = rubric.assessed
    kept = rows[rows["truth"].isin(assessed) & rows["prediction"].isin(assessed)]
    t, p = (kept[side].to_numpy(dtype=object) for side in ("truth", "prediction"))
    source, weight = kept["source"].to_numpy(), kept["weight"].to_numpy()

    every = np.ones(len(t), dtype=bool)

    def share(event: np.ndarray, among: np.ndarray = every) -> Estimate:
        return weighted_share(event, among, source, weight)

    size = len(assessed)
    down, across = (pd.Categorical(x, assessed).codes.astype(int) for x in (t, p))
    cells = down * size + across
    kappa, kappa_genuine = _kappas(cells, source, weight, rubric)
    true, predicted = np.isin(t, rubric.accepted), np.isin(p, rubric.accepted)
    figures = {
        ("accuracy", "genuine"): share(true == predicted),
        ("balanced_accuracy", "genuine"): balanced_accuracy(true, predicted, source, weight),
        ("kappa", "genuine"): kappa_genuine,
        ("accuracy", "categories"): share(t == p),
        ("kappa", "categories"): kappa,
    }
    for name in assessed:
        figures["precision", name] = share(t == name, p == name)
        figures["recall", name] = share(p == name, t == name)
    apart = {
        f"{reason} in the {side}": int(left_out.sum())
        for side in ("truth", "prediction")
        for reason, left_out in (
            (CANNOT_ASSESS, rows[side] == CANNOT_ASSESS),
            ("no category", rows[side].isna()),
        )
    }
    return Comparison(
        matched=len(rows),
        apart=", ".join(f"{reason} {count}" for reason, count in apart.items() if count),
        n=len(kept),
        weight=float(weight.sum()),
        figures=figures,
        confusion=np.bincount(cells, minlength=size**2).reshape(size, size),
        rubric=rubric,
    )


def _kappas(
    cells: np.ndarray, sources: np.ndarray, weights: np.ndarray, rubric: Rubric
) -> list[Estimate]:
    """κ of the categories, and of genuine against the rest; ``[n]`` cells of the confusion."""
    if not len(cells):
        return [_UNKNOWN] * 2
    names, size = rubric.assessed, len(rubric.assessed)
    accepted = np.isin(names, rubric.accepted)
    side = np.stack([accepted, ~accepted], axis=1)
    merge = np.kron(side, side).astype(float)  # cells of all categories into those of genuine

    def statistic(counts: np.ndarray) -> np.ndarray:
        two = (counts @ merge).reshape(-1, 2, 2)
        return np.stack([kappa_of(counts.reshape(-1, size, size)), kappa_of(two)], axis=1)

    return cluster_bootstrap(statistic, sources, cells, weights=weights, number=size**2)


# -- the labellers of a run --------------------------------------------------------------------


@dataclass(frozen=True)
class Labeller:
    """A judge or annotator, whose labels are laid out over all rows of ``run.turns``.

    Attributes:
        name: in the run, where no judge and annotator have the same one.
        kind: ``judge`` or ``annotator``.
        labels: its labels.
    """

    name: str
    kind: str
    labels: LabelSet

    @property
    def labelled(self) -> np.ndarray:
        """``[rows]`` whether it has a label, or a failure, for the row."""
        return self.labels.turns["context_id"].notna().to_numpy()

    @property
    def categories(self) -> np.ndarray:
        """``[rows]`` its categories; None where it failed and where it has no label."""
        column = self.labels.turns["category"].astype(object)
        return column.where(column.notna(), None).to_numpy()

    @property
    def fitted(self) -> np.ndarray:
        """``[rows]`` whether it was fitted on the row, so that agreement there shows nothing."""
        if self.kind == ANNOTATOR:
            return np.zeros(len(self.labels.turns), dtype=bool)
        return self.labels.turns["fitted"].fillna(False).to_numpy(dtype=bool)


def labellers_of(run: Run, between: Sequence[str] | None = None) -> list[Labeller]:
    """The labellers named by ``between``, or all there are.

    Raises:
        UserError: an unfinished run, an unknown name, fewer than two labellers, or ones that
            labelled by different rubrics.
    """
    check_finished(run)
    kinds = {JUDGE: "judgements", ANNOTATOR: "annotations"}
    labellers = [
        Labeller(name, kind, read_labels(run, kinds[kind], name))
        for name, kind in _chosen(run, between).items()
    ]
    for one in labellers[1:]:
        if one.labels.rubric.names != labellers[0].labels.rubric.names:
            raise UserError(
                f"{labellers[0].name} and {one.name} labelled by different rubrics",
                "name those of one rubric with --between",
            )
    return labellers


def compare_pairs(run: Run, labellers: Sequence[Labeller]) -> dict[tuple[str, str], Comparison]:
    """By the names of (truth, prediction): each two of the labellers, on the turns that neither was
    fitted on. Annotators are the truth of judges; between equals it is the one named first.
    """
    sources = sources_of(run.turns).to_numpy(dtype=object)
    pairs = {}
    for first, second in combinations(labellers, 2):
        if second.kind == ANNOTATOR and first.kind == JUDGE:
            first, second = second, first
        rows, weights = joint_rows([first, second])
        fair = ~(first.fitted | second.fitted)[rows]
        rows, weights = rows[fair], weights[fair]
        pairs[first.name, second.name] = compare(
            first.categories[rows],
            second.categories[rows],
            sources[rows],
            weights,
            second.labels.rubric,
        )
    return pairs


def genuine_shares(run: Run, labeller: Labeller) -> Iterator[TidyEstimate]:
    """What a labeller calls genuine, of the turns and of the decoys that it put into a category.

    The turns are weighted by inverse inclusion probabilities. As in :mod:`ia_mech.rates`, decoys of
    a judge count only if the same turn is in a category after its own context, too.
    """
    sources = sources_of(run.turns).to_numpy(dtype=object)
    categories, rubric = labeller.categories, labeller.labels.rubric
    rows, weights = joint_rows([labeller])
    assessed = pd.Series(categories[rows]).isin(rubric.assessed).to_numpy()
    rows, weights = rows[assessed], weights[assessed]
    genuine = pd.Series(categories[rows]).isin(rubric.accepted).to_numpy()
    share = cluster_mean(genuine, sources[rows], proportion=True, weights=weights)
    names = {"prediction": labeller.name, "term": "genuine"}
    yield TidyEstimate("share", names, len(rows), share)
    source_of = run.contexts.set_index("context_id").pipe(sources_of)
    decoys = labeller.labels.decoys
    decoys = decoys[decoys["category"].isin(rubric.assessed)]
    if labeller.kind == JUDGE:
        own = pd.Series(categories[decoys["row"]], index=decoys.index)
        decoys = decoys[own.isin(rubric.assessed)]
    for kind, alike in decoys.groupby("decoy"):
        ends = (alike["shown"].map(source_of), alike["context_id"].map(source_of))
        genuine = alike["category"].isin(rubric.accepted).astype(float)
        floor = dyadic_mean(genuine, *ends, ends=(0, 1))
        yield TidyEstimate("floor", names | {"decoy": kind}, len(alike), floor)


def agreement(run: Run, between: Sequence[str] | None = None) -> Result:
    """Compare the labellers of a run: those named by ``between``, or all there are.

    Raises:
        UserError: as :func:`labellers_of`.
    """
    labellers = labellers_of(run, between)
    pairs = compare_pairs(run, labellers)
    shares = [share for labeller in labellers for share in genuine_shares(run, labeller)]
    estimates = [
        TidyEstimate(quantity, {"truth": truth, "prediction": name, "term": term}, pair.n, figure)
        for (truth, name), pair in pairs.items()
        for (quantity, term), figure in pair.figures.items()
    ]
    kappas = [
        f"{one_line(name)} against {one_line(truth)} {pair.figures['kappa', 'genuine'].text()} "
        f"({pair.n} turns)"
        for (truth, name), pair in pairs.items()
    ]
    floors = [
        f"{one_line(share.names['prediction'])} {share.estimate.text()}"
        for share in shares
        if share.names.get("decoy") == "conversation"
    ]
    names = [labeller.name for labeller in labellers]
    control = "Of turns held against another conversation, these shares are called genuine"
    return Result(
        name="agreement",
        question="How far do judges and annotators agree?",
        sentence=f"Agreement beyond chance on genuine or not (Cohen's κ): {', '.join(kappas)}.",
        control=f"{control}: {', '.join(floors)}." if floors else "",
        estimates=frame_of([*estimates, *shares], _OF),
        tables=_tables(pairs, shares),
        notes=[note.replace(str(run.path), run.name) for note in same_judges(run)]
        + [
            f"{one_line(x.name)} was fitted on {x.fitted.sum()} of the {len(x.fitted)} turns: no "
            "comparison counts these."
            for x in labellers
            if x.fitted.any()
        ],
        about={"kind": "agreement", **about_runs([run], names), "settings": {"between": names}},
        data={"disagreements": disagreements(run, labellers)},
    )


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
        own = same[0].labels.turns[same[0].labelled]
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
        Columns: the row's key, source and dataset; the texts; then per labeller, as ``<name>:
        label``, its category (``failed`` where a judge has none, None where it has no label), and,
        as ``<name>: why``, a judge's rationale or an annotator's note. The index is the position
        in ``run.turns``.
    """
    table = run.turns[[*KEY, "source_id", "dataset"]].reset_index(drop=True)
    items = items_of(run)
    table[list(TEXTS)] = [[item.query, item.response, item.turn] for item in items]
    labels = pd.DataFrame({x.name: x.categories for x in labellers}, dtype=object)
    rubric = labellers[0].labels.rubric
    assessed = labels.where(labels.isin(rubric.assessed))
    annotators = [x.name for x in labellers if x.kind == ANNOTATOR]
    order = pd.DataFrame(
        {
            "judges_alone": assessed[annotators].isna().all(axis=1),
            "not_genuine": ~assessed.isin(rubric.accepted).any(axis=1),
            "unsure": -np.max([_certainty(x) for x in labellers], axis=0),
            "tie": np.random.default_rng(seed).random(len(table)),
        }
    )
    for x in labellers:
        shown = labels[x.name].where(labels[x.name].notna() | ~x.labelled, "failed")
        table[f"{x.name}: label"] = shown
    for x in labellers:
        why = x.labels.turns["rationale" if x.kind == JUDGE else "note"]
        table[f"{x.name}: why"] = why.astype(object).where(why.astype(bool) & why.notna(), None)
    differ = assessed.nunique(axis=1) >= 2
    return table.loc[order[differ].sort_values(list(order)).index]


def _certainty(labeller: Labeller) -> np.ndarray:
    """``[rows]`` the score that a judge gave its own category; 0 where it has none."""
    turns = labeller.labels.turns
    scores = turns["scores"] if "scores" in turns else [None] * len(turns)
    return np.array(
        [
            json.loads(given).get(category) or 0.0
            if isinstance(given, str) and category in labeller.labels.rubric.assessed
            else 0.0
            for given, category in zip(scores, labeller.categories, strict=True)
        ]
    )


def _sheet(annotator: Labeller) -> str:
    sheets = annotator.labels.turns["sheet"].dropna().unique()
    return str(sheets[0]) if len(sheets) else f"none, of {annotator.name}"


def _chosen(run: Run, between: Sequence[str] | None) -> dict[str, str]:
    """The labellers to compare, by name: judge or annotator."""
    kinds = dict.fromkeys(run.labels.judges, JUDGE)
    kinds |= dict.fromkeys(run.labels.annotators, ANNOTATOR)
    known = ", ".join(kinds) or "no labels"
    for name in between or ():
        if name not in kinds:
            raise UserError(f"{run.path} has no labels of {name!r}", f"choose from: {known}")
    if len(kinds) < 2:
        judge = f"python -m ia_mech.judge run {shell_word(run.path)}"
        raise UserError(
            f"agreement needs two labellers, and {run.path} has {known}",
            f"run: {judge}{' --judge llm or hf' if kinds else ''}, or export and import a sheet",
        )
    chosen = {name: kinds[name] for name in between or kinds}
    if len(chosen) < 2:
        raise UserError("agreement needs two different labellers", f"choose from: {known}")
    return chosen


# -- what is shown -----------------------------------------------------------------------------


def _tables(
    pairs: dict[tuple[str, str], Comparison], shares: Sequence[TidyEstimate]
) -> list[Table]:
    """All pairs, what is called genuine, and in full each pair."""
    rows = []
    for (truth, name), pair in pairs.items():
        shown = [("accuracy", "genuine"), ("balanced_accuracy", "genuine"), ("kappa", "genuine")]
        figures = [pair.figures[figure].text() for figure in (*shown, ("kappa", "categories"))]
        names = f"{one_line(name)} / {one_line(truth)}"
        rows.append([names, str(pair.n), f"{pair.weight:.0f}", *figures])
    heads = ["pair", "n", "≈ rows", "agreement", "balanced accuracy", "κ", "κ of categories"]
    legend = (
        "genuine follow-ups against the rest, but for the last column. n: rows that both put into "
        "a category; ≈ rows: how many of the run's these represent, by which figures are weighted"
    )
    tables = [Table("agreement (95% intervals over sources)", heads, rows, legend)]
    if any(share.quantity == "floor" for share in shares):
        contexts = {"": "their own context", "sibling": "another response"}
        lines = []
        for share in shares:
            kind = share.names.get("decoy", "")
            context = contexts.get(kind, f"another {kind}")
            name = one_line(share.names["prediction"])
            lines.append([name, context, str(share.rows), share.estimate.text()])
        heads = ["labeller", "turns after", "n", "genuine"]
        tables.append(Table("share called genuine", heads, lines))
    for (truth, name), pair in pairs.items():
        tables += _pair_tables(f"{one_line(name)} against {one_line(truth)}", pair)
    return tables


def _pair_tables(title: str, pair: Comparison) -> list[Table]:
    """Precision and recall by category, and the confusion matrix in rows."""
    counts, names = pair.confusion, pair.rubric.assessed
    lines = [
        [name, str(counts[i].sum()), str(counts[:, i].sum())]
        + [pair.figures[quantity, name].text() for quantity in ("precision", "recall")]
        for i, name in enumerate(names)
    ]
    heads = ["category", "n truth", "n predicted", "precision", "recall"]
    apart = f"; left out: {pair.apart}" if pair.apart else ""
    # Columns go by number: eight names side by side fit no terminal.
    cells = [
        [f"{i + 1} {name}", *(str(count) if count else "·" for count in counts[i])]
        for i, name in enumerate(names)
    ]
    numbers = ["truth ↓   prediction →", *map(str, range(1, len(names) + 1))]
    about = f"{pair.n} of {pair.matched} rows{apart}"
    return [
        Table(title, heads, lines, about, full=True),
        Table(f"{title}: rows", numbers, cells, full=True),
    ]


def _print_disagreements(
    screen: Console, table: pd.DataFrame, names: Sequence[str], count: int
) -> None:
    """The first few disagreements; of rows with the same texts and labels the first."""
    different = table.drop_duplicates([*TEXTS, *(f"{name}: label" for name in names)])
    screen.print(
        f"[bold]{len(table)} disagreements[/], {len(different)} of them different (annotators "
        "first, then genuine or not, then the judge's certainty)",
        soft_wrap=True,
    )
    for row in different.head(count).to_dict("records"):
        lines = [
            f"query:     {one_line(row['query'], 90)}",
            f"response:  {one_line(row['response'], 90)}",
            f"user turn: {one_line(row['user_turn'], 300)}",
        ]
        for name in names:
            if isinstance(label := row[f"{name}: label"], str):
                why = row[f"{name}: why"]
                reason = f": {one_line(why, 160)}" if isinstance(why, str) else ""
                lines.append(f"{one_line(name, 40)} labels it {label}{reason}")
        place = f"{row['context_id']} · T = {row['temperature']:g} · {row['sample']}"
        for line in [*lines, one_line(place)]:
            screen.print(f"    {escape(line)}", soft_wrap=True)
        screen.print()


# -- from the command line ---------------------------------------------------------------------


def command(args: argparse.Namespace) -> None:
    """``python -m ia_mech.judge agreement``."""
    run = Run.open(args.run)
    result = agreement(run, args.between)
    folder = folder_of(run.path, result.name)
    refuse_unwritable(folder, "make the run writable")
    write(result, folder)
    screen = console()
    show(result, screen, full=args.full)
    screen.print()
    names = result.about["settings"]["between"]
    _print_disagreements(screen, result.data["disagreements"], names, args.disagreements)
    screen.print(escape(f"wrote {shell_word(folder)}"), soft_wrap=True)
    screen.print(escape(f"next: python -m ia_mech.report {shell_word(args.run)}"), soft_wrap=True)


def check(args: argparse.Namespace) -> int:
    """``python -m ia_mech.judge check``: judge a file's turns, and compare with its annotations.

    Returns the exit status.
    """
    if args.out is not None:
        refuse_existing(args.out)
    rows = _read_turns(args.file)
    items = [Item(row["query"], row["response"], row["user_turn"]) for row in rows]
    judge = make_judge(args)
    _check_categories(rows, judge.rubric, args.file)
    if args.dry_run:
        print_plan(judge, items)
        return 0
    judged, _ = judge_items(items, judge, Bar())
    verdicts = [judged[item] for item in items]
    screen = console()
    annotated = [i for i, row in enumerate(rows) if row.get("category")]
    if annotated:
        comparison = compare(
            [rows[i]["category"] for i in annotated],
            [verdicts[i].category for i in annotated],
            # A row without a source stands alone.
            [f"row {i}" if (s := rows[i].get("source_id")) is None else str(s) for i in annotated],
            rubric=judge.rubric,
        )
        for table in _tables({(args.file.name, args.judge): comparison}, []):
            print_table(screen, table)
        if known := sum(judge.fitted_on(items)):
            screen.print(
                f"[bold]{known} of these {len(items)} turns were in the judge's fit[/]: on "
                "them it looks better than it is; its card has cross-validated figures.",
                soft_wrap=True,
            )
    else:
        for row, verdict in zip(rows, verdicts, strict=True):
            screen.print(
                f"{verdict.category or verdict.status:<22}{escape(one_line(row['user_turn'], 90))}",
                soft_wrap=True,
            )
    if judge.caveat:
        screen.print(escape(judge.caveat), soft_wrap=True)
    if args.out is not None:
        lines = [
            json.dumps(row | {"judge": args.judge, "verdict": verdict.to_json()}) + "\n"
            for row, verdict in zip(rows, verdicts, strict=True)
        ]
        write_new_files({args.out: "".join(lines).encode()})
        print(f"verdicts: {args.out}")
    return 0 if any(verdict.status == JUDGED for verdict in verdicts) else NOTHING


def _read_turns(path: Path) -> list[dict[str, Any]]:
    """The rows of an annotated file; UserError names the line that isn't as it should be."""
    rows = []
    for where, row in json_lines(path):
        if not all(isinstance(row.get(key), str) for key in TEXTS):
            raise UserError(f"{where} lacks a text", f"each needs {', '.join(TEXTS)}")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no turn", "give a JSON-lines file")
    return rows


def _check_categories(rows: list[dict[str, Any]], rubric: Rubric, path: Path) -> None:
    """Raise UserError unless the annotations are of the rubric's categories."""
    for row in rows:
        if row.get("category") and row["category"] not in [*rubric.names]:
            raise UserError(
                f"{path}: no category {row['category']!r} in the rubric",
                f"give one of {', '.join(rubric.names)}",
            )
