"""How far the judges and annotators of a run agree.

Rows that annotators labelled are a sample of the run's and are weighted by the inverse of their
inclusion probability, so that every figure is about the run and not about the sheet. Labels of
decoys count in no comparison, nor do turns that a judge was fitted on. How often decoys are called
follow-ups stands beside how often the run's turns are.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape

from ia_mech.cli import one_line, program, shell_word
from ia_mech.display import console
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, frame_of
from ia_mech.judge.comparison import TEXTS, Comparison, compare, tables_of_pairs
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import Rubric, heading, rubric_of
from ia_mech.results import Result, about_runs, folder_of, show, write
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.run.layout import refuse_unwritable
from ia_mech.stats import cluster_mean, dyadic_rate

_OF = dict.fromkeys(("truth", "prediction", "term", "decoy"), "str")  # what estimates are of


@dataclass(frozen=True)
class Labeller:
    """A judge or an annotator of a run.

    ``turns`` has a row for each of ``Run.turns``: the ``label`` (a category, ``failed``, or
    missing), whether that is a ``follow_up``, ``why``, the ``source``, and whether the judge was
    ``fitted`` on the turn; of an annotator also ``sheet``, ``stratum`` and ``inclusion``.
    """

    name: str
    annotates: bool
    turns: pd.DataFrame
    decoys: pd.DataFrame  # its labels of these, as ``Run.decoys``
    rubric: Rubric  # what it labelled by

    @property
    def labelled(self) -> np.ndarray:
        """``[rows]`` whether it has a label, or a failure, for the row."""
        return self.turns["label"].notna().to_numpy()


def labellers_of(run: Run, between: Sequence[str] | None = None) -> list[Labeller]:
    """The labellers named by ``between``, or all there are.

    Raises:
        UserError: an unfinished run, an unknown name, fewer than two labellers, or ones that
            labelled by different rubrics.
    """
    run.check_finished()
    labellers = [_labeller(run, name) for name in _chosen(run, between)]
    for one in labellers[1:]:
        if one.rubric.names != labellers[0].rubric.names:
            raise UserError(
                f"{labellers[0].name} and {one.name} labelled by different rubrics",
                "name those of one rubric with --between",
            )
    return labellers


def _labeller(run: Run, name: str) -> Labeller:
    annotates = name in run.labels.annotators
    if annotates:
        turns = run.labelled(annotator=name, texts=False).assign(fitted=False)
        names = {"truth_category": "label", "truth": "follow_up", "note": "why"}
    else:
        turns = run.labelled(name, columns=["rationale", "fitted"], texts=False)
        turns["fitted"] = turns["fitted"].fillna(False).astype(bool)
        names = {"category": "label", "rationale": "why"}
    turns = turns.rename(columns=names).astype({"label": object, "source": object})
    rubric = rubric_of(run.labels.record("annotations" if annotates else "judgements", name))
    return Labeller(name, annotates, turns, run.decoys(name), rubric)


def compare_pairs(labellers: Sequence[Labeller]) -> dict[tuple[str, str], Comparison]:
    """By the names of (truth, prediction): each two of the labellers, on the turns that neither was
    fitted on. Annotators are the truth of judges; between equals it is the one named first.
    """
    pairs = {}
    for first, second in combinations(labellers, 2):
        if second.annotates and not first.annotates:
            first, second = second, first
        rows, weights = joint_rows([first, second])
        fair = ~(first.turns["fitted"] | second.turns["fitted"]).to_numpy()[rows]
        truth, prediction = (one.turns.iloc[rows[fair]] for one in (first, second))
        pairs[first.name, second.name] = compare(
            truth["label"], prediction["label"], truth["source"], weights[fair], second.rubric
        )
    return pairs


def follow_up_shares(labeller: Labeller) -> Iterator[TidyEstimate]:
    """What a labeller calls follow-ups, of the turns and of the decoys that it put into a category.

    The turns are weighted by inverse inclusion probabilities. As in :mod:`ia_mech.rates`, decoys of
    a judge count only if the same turn is in a category after its own context, too.
    """
    rows, weights = joint_rows([labeller])
    turns = labeller.turns.iloc[rows]
    there = turns["follow_up"].notna().to_numpy()
    turns = turns[there]
    share = cluster_mean(
        turns["follow_up"], turns["source"], proportion=True, weights=weights[there]
    )
    names = {"prediction": labeller.name, "term": "follow_up"}
    yield TidyEstimate("share", names, len(turns), share)
    decoys = labeller.decoys[labeller.decoys["follow_up"].notna()]
    if not labeller.annotates:
        own = labeller.turns["follow_up"].to_numpy()[decoys["row"]]
        decoys = decoys[~np.isnan(own)]
    for kind, alike in decoys.groupby("decoy", observed=True):
        floor = dyadic_rate(alike["follow_up"], alike["shown_source"], alike["source"])
        yield TidyEstimate("floor", names | {"decoy": kind}, len(alike), floor)


def agreement(run: Run, between: Sequence[str] | None = None) -> Result:
    """Compare the labellers of :func:`labellers_of`; raises what that raises."""
    labellers = labellers_of(run, between)
    pairs = compare_pairs(labellers)
    shares = [share for labeller in labellers for share in follow_up_shares(labeller)]
    estimates = [
        TidyEstimate(quantity, {"truth": truth, "prediction": name, "term": term}, pair.n, figure)
        for (truth, name), pair in pairs.items()
        for (quantity, term), figure in pair.figures.items()
    ]
    kappas = [
        f"{one_line(name)} against {one_line(truth)} {pair.figures['kappa', 'follow_up'].text()} "
        f"({pair.n} turns)"
        for (truth, name), pair in pairs.items()
    ]
    floors = [
        f"{one_line(share.names['prediction'])} {share.estimate.text()}"
        for share in shares
        if share.names.get("decoy") == "wrong_conversation"
    ]
    names = [labeller.name for labeller in labellers]
    control = "Of turns shown after a wrong conversation, these shares are called follow-ups"
    return Result(
        name="agreement",
        question="How far do judges and annotators agree?",
        sentence=f"Agreement beyond chance on follow-up or not (Cohen's κ): {', '.join(kappas)}.",
        control=f"{control}: {', '.join(floors)}." if floors else "",
        estimates=frame_of([*estimates, *shares], _OF),
        tables=tables_of_pairs(pairs, shares),
        notes=[
            f"{one_line(x.name)} was fitted on {x.turns['fitted'].sum()} of the {len(x.turns)} "
            "turns: no comparison counts these."
            for x in labellers
            if x.turns["fitted"].any()
        ],
        about={"kind": "agreement", **about_runs([run], names), "settings": {"between": names}},
        data={"disagreements": disagreements(run, labellers)},
    )


def joint_rows(labellers: Sequence[Labeller]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that all of these labelled, and how many rows of the run each represents.

    A judge labels every row. Annotators of one sheet share a sample: a row of a stratum represents
    (rows of the stratum) / (rows that all of them labelled). Sheets are independent samples, so
    that a row which is on two has the product of both probabilities.

    Returns:
        ``[n]`` positions in ``run.turns`` and ``[n]`` weights.
    """
    joint = np.logical_and.reduce([labeller.labelled for labeller in labellers])
    weights = np.ones(len(joint))
    by_sheet: dict[str, list[Labeller]] = {}
    for labeller in labellers:
        if labeller.annotates and labeller.labelled.any():
            sheet = labeller.turns["sheet"].dropna().iloc[0]
            by_sheet.setdefault(sheet, []).append(labeller)
    for same in by_sheet.values():
        own = same[0].turns[same[0].labelled]
        shared = np.logical_and.reduce([labeller.labelled for labeller in same])
        for _, cell in own["inclusion"].groupby([own["stratum"], own["inclusion"]]):
            at = cell.index[shared[cell.index]]
            weights[at] *= len(cell) / cell.iloc[0] / max(len(at), 1)
    rows = np.flatnonzero(joint)
    return rows, weights[rows]


def disagreements(run: Run, labellers: Sequence[Labeller], seed: int = 0) -> pd.DataFrame:
    """All turns that at least two labellers put into different categories, the most telling first.

    Where an annotator is contradicted comes before judges among themselves; where it matters for
    the rate (follow-up or not) before other categories; then at random. Per labeller there are the
    columns ``<name>: label``, its category (``failed`` where a judge has none), and ``<name>:
    why``; the index is the position in ``run.turns``.
    """
    table = run.turns[[*KEY, "source_id", "dataset"]].reset_index(drop=True)
    items = items_of(run)
    table[list(TEXTS)] = [[item.query, item.response, item.turn] for item in items]
    labels = pd.DataFrame({x.name: x.turns["label"] for x in labellers}, dtype=object)
    rubric = labellers[0].rubric
    assessed = labels.where(labels.isin(rubric.assessed))
    annotators = [x.name for x in labellers if x.annotates]
    order = pd.DataFrame(
        {
            "judges_alone": assessed[annotators].isna().all(axis=1),
            "not_follow_up": ~assessed.isin(rubric.follow_ups).any(axis=1),
            "tie": np.random.default_rng(seed).random(len(table)),
        }
    )
    for name, column in labels.items():
        table[f"{name}: label"] = column.where(column.notna(), None)
    for x in labellers:
        why = x.turns["why"].astype(object)
        table[f"{x.name}: why"] = why.where(why.astype(bool) & why.notna(), None)
    differ = assessed.nunique(axis=1) >= 2
    return table.loc[order[differ].sort_values(list(order)).index]


def _chosen(run: Run, between: Sequence[str] | None) -> list[str]:
    """The names of the labellers to compare."""
    there = [*run.labels.judges, *run.labels.annotators]
    known = ", ".join(there) or "no labels"
    for name in between or ():
        if name not in there:
            raise UserError(f"{run.path} has no labels by {name!r}", f"choose from: {known}")
    if len(there) < 2:
        judge = f"{program()} judge run {shell_word(run.path)}"
        raise UserError(
            f"agreement needs two judges or annotators, and {run.path} has {known}",
            f"run: {judge}{' --judge llm or hf' if there else ''}, or export and import a sheet",
        )
    chosen = [*dict.fromkeys(between or there)]
    if len(chosen) < 2:
        problem = "agreement needs two different judges or annotators"
        raise UserError(problem, f"choose from: {known}")
    return chosen


def _print_disagreements(
    screen: Console, table: pd.DataFrame, names: Sequence[str], count: int
) -> None:
    """The first few disagreements; of rows with the same texts and labels the first."""
    different = table.drop_duplicates([*TEXTS, *(f"{name}: label" for name in names)])
    screen.print(
        f"[bold]{len(table)} disagreements[/], {len(different)} of them different (annotators "
        "first, then follow-up or not)",
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
                lines.append(f"{one_line(name, 40)} labels it {heading(label)}{reason}")
        place = f"{row['context_id']} · T = {row['temperature']:g} · {row['sample']}"
        for line in [*lines, one_line(place)]:
            screen.print(f"    {escape(line)}", soft_wrap=True)
        screen.print()


def command(args: argparse.Namespace) -> None:
    """``ia-mech judge agreement``."""
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
    screen.print(escape(f"next: {program()} report {shell_word(args.run)}"), soft_wrap=True)
