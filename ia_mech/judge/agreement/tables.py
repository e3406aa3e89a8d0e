"""Agreement as it is shown at a terminal, and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import one_line
from ia_mech.judge.agreement.comparison import Comparison, GroupAlpha
from ia_mech.judge.agreement.disagreements import Disagreement
from ia_mech.judge.rubric import ASSESSED

if TYPE_CHECKING:
    from ia_mech.judge.agreement.labellers import Pair

_NOTE = (
    "genuine: genuine follow-ups against the rest. n: rows that both put into a category. ≈ rows: "
    "how many of the run's rows those stand for; all figures but n are weighted so."
)


def print_pairs(console: Console, pairs: Sequence["Pair"]) -> None:
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
    console.print(table)
    console.print(_NOTE, soft_wrap=True)


def print_group(console: Console, size: int, group: GroupAlpha) -> None:
    """Krippendorff's α of everyone."""
    if not group.n:
        console.print(f"all {size}: there is no row that everyone labelled", soft_wrap=True)
        return
    console.print(
        f"all {size}: α genuine {escape(group.genuine.text())}, α categories "
        f"{escape(group.categories.text())} on {group.n} rows (≈ {group.weight:.0f}) from "
        f"{group.sources} sources",
        soft_wrap=True,
    )


def print_repeats(console: Console, repeats: Mapping[str, tuple[int, GroupAlpha]]) -> None:
    """How far judges agree with themselves."""
    for name, (count, alpha) in repeats.items():
        console.print(
            f"{escape(one_line(name))} with itself ({count} repeats): α genuine "
            f"{escape(alpha.genuine.text())}, α categories {escape(alpha.categories.text())} on "
            f"{alpha.n} rows",
            soft_wrap=True,
        )


def print_comparison(console: Console, title: str, comparison: Comparison) -> None:
    """The figures of one pair: agreement, categories, confusion matrix.

    Args:
        console: at least 100 wide (110 with weights), or lines break.
        title: who is measured against whom.
        comparison: the figures.
    """
    c = comparison
    weight = f" (standing for ≈ {c.weight:.0f})" if c.weight != c.n else ""
    console.print(f"[bold]{escape(one_line(title))}[/]", soft_wrap=True)
    console.print(
        f"{c.n} rows{weight} from {c.sources} sources. Apart, of {c.matched}: cannot_assess "
        f"{c.abstained_prediction} (truth {c.abstained_truth}), failed {c.failed_prediction} "
        f"(truth {c.failed_truth})",
        soft_wrap=True,
    )
    if not c.n:
        console.print("no row that both put into a category: nothing to compare")
        return
    table = Table()
    table.add_column("")
    for name in ("agreement", "balanced accuracy", "Cohen's κ", "Krippendorff's α"):
        table.add_column(name, justify="right", no_wrap=True)
    genuine = (c.accuracy_genuine, c.balanced_accuracy, c.kappa_genuine, c.alpha_genuine)
    table.add_row("genuine or not", *(x.text() for x in genuine))
    table.add_row("categories", c.accuracy.text(), "", c.kappa.text(), c.alpha.text())
    console.print(table)
    _print_categories(console, c)
    _print_confusion(console, c)


def _print_categories(console: Console, c: Comparison) -> None:
    table = Table()
    table.add_column("category", no_wrap=True)
    for name in ("n truth", "n predicted", "precision", "recall"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in c.categories:
        counts = ((line.truth, line.truth_weight), (line.predicted, line.predicted_weight))
        cells = [f"{n} (≈ {weight:.0f})" if c.weighted else str(n) for n, weight in counts]
        table.add_row(line.category, *cells, line.precision.text(), line.recall.text())
    console.print(table)


def _print_confusion(console: Console, c: Comparison) -> None:
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
    console.print(table)
    if c.weighted:
        console.print("rows, and the weighted share of the truth's category", soft_wrap=True)


def print_disagreements(console: Console, found: Sequence[Disagreement], count: int) -> None:
    """The first few disagreements; rows of the same texts and labels in a row are one."""
    if not found:
        console.print("no disagreements")
        return
    alike = groupby(sorted_alike(found), key=_look)
    shown = [list(rows) for _, rows in alike][:count]
    console.print(
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
            console.print(f"    {name} {escape(one_line(text, width))}", soft_wrap=True)
        for name, category in d.said.items():
            why = f": {one_line(d.why[name], 160)}" if name in d.why else ""
            line = f"{one_line(name, 40)} says {category}{why}"
            console.print(f"    [bold]{escape(line)}[/]", soft_wrap=True)
        at = f"{d.row['context_id']} · T = {d.row['temperature']:g} · {d.row['sample']}"
        console.print(f"    {escape(one_line(at))}{times}\n", soft_wrap=True)


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
