"""What an analysis shows at a terminal."""

from collections import Counter

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ia_mech.cli import one_line
from probes.analysis import Analysis
from probes.report.conclusion import LEVEL, Conclusion, p_text, place, signed

ROWS = 17  # layers that the heat map shows
LETTERS = 6  # of a word in a position's name: 13 positions fit into 100 columns


def print_analysis(
    screen: Console, analysis: Analysis, target: str, conclusion: Conclusion, within: str = "run"
) -> None:
    """Headline, controls, heat map, notes and, last, the conclusion.

    Args:
        screen: at least 100 columns wide.
        analysis: of one target.
        target: what was probed, in words.
        conclusion: of the analysis.
        within: what compared contexts share, in words.
    """
    layers = shown_layers(analysis)
    outcome, headline, folds = analysis.outcome, analysis.headline, analysis.settings.folds
    share = outcome.positives.sum() / outcome.trials.sum()
    screen.print(f"[bold]{escape(one_line(target))}[/]")
    screen.print(
        f"{len(outcome)} contexts of {outcome.source_count} sources, {round(outcome.trials.sum())} "
        f"turns, {share:.1%} positive. Scores: mean over {folds} outer folds; on new sources, of "
        f"probes trained on {folds - 1}/{folds} of these; pairs of contexts within a fold and "
        f"{within}."
    )
    chosen = Counter(headline.picked).most_common()
    by_fold = ", ".join(f"{_place(*at)} ×{times}" for at, times in chosen)
    screen.print(
        f"[bold]headline: layer and position chosen inside each outer fold[/] ({by_fold}; of all "
        f"contexts, for the kept probe: {escape(one_line(place(headline)))}); {_tests(analysis)}"
    )
    screen.print(_measures(analysis))
    if analysis.compared:
        screen.print(_controls(analysis))
    screen.print(
        f"[bold]AUROC by layer (0 = embeddings) and position[/], {analysis.settings.estimator} "
        f"probes, n = {len(outcome)} contexts in every column"
    )
    screen.print(_heat_map(analysis, layers))
    screen.print(escape("; ".join(_explained(analysis, layers))))
    for note in analysis.notes:
        screen.print(escape(one_line(note)))
    screen.print(f"[bold]{escape(one_line(conclusion.sentence))}[/]")


def _tests(analysis: Analysis) -> str:
    """The headline's p value, the smallest family-wise one, and where that is."""
    tested = analysis.tested
    if not tested.permutations:
        return "no permutations, so nothing was tested"
    # Several places may have the smallest possible p: the one that reads best is named.
    order = np.lexsort((-tested.statistic.ravel(), tested.p_family.ravel()))
    i, j = np.unravel_index(order[0], tested.p_family.shape)
    smallest, where = float(tested.p_family[i, j]), (analysis.layers[i], analysis.positions[j])
    return (
        f"p {p_text(tested.p)} (selection replayed); smallest family-wise p {p_text(smallest)} "
        f"({_place(*where)}); {tested.permutations} permutations"
    )


def _measures(analysis: Analysis) -> Table:
    """The headline's measures in two columns, each with its reference value below it."""
    found = analysis.headline.measures
    left = [
        ("AUROC", found["auroc"].text()),
        ("  of the rates themselves", found["auroc_of_rates"].text()),
        ("average precision", found["average_precision"].text()),
        ("  prevalence", found["prevalence"].text()),
        ("recall at 5% FPR", found["recall_at_5_fpr"].text()),
        ("Spearman's ρ", found["spearman"].text()),
    ]
    right = [
        ("deviance explained", found["deviance_explained"].text()),
        ("Brier score", found["brier"].text(3)),
        ("  of a run's rate", found["brier_of_rate"].text(3)),
        ("calibration: p less rate", signed(found["calibration_in_the_large"], 3)),
        ("calibration: slope", found["calibration_slope"].text()),
        ("", ""),
    ]
    table = _table(show_header=False)
    for (name, value), other in zip(left, right, strict=True):
        table.add_row(name, value + "    ", *other)
    return table


def _controls(analysis: Analysis) -> Table:
    table, level = _table(expand=True), f"{100 * analysis.settings.level:g}%"
    table.add_column("control", no_wrap=True)
    table.add_column("what a probe reads there", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column(escape(f"AUROC [{level}]"), no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    rows = [(control.name, control.what, control.auroc) for control in analysis.compared]
    if analysis.beyond is not None:
        rows.append(("output + text", "all of these side by side", analysis.beyond.base))
        rows.append(("  + hidden", "and the hidden states of the headline", analysis.beyond.full))
    for name, what, auroc in rows:
        n = str(len(analysis.outcome))
        table.add_row(escape(one_line(name, 16)), escape(one_line(what)), auroc.text(), n)
    return table


# -- the heat map ---------------------------------------------------------------------------------


def _heat_map(analysis: Analysis, layers: list[int]) -> Table:
    table = _table()
    table.add_column("layer", justify="right", no_wrap=True)
    for position in analysis.positions:
        words = [word[:LETTERS] for word in one_line(position, 24).split("_")]
        table.add_column(Text("\n".join(words)), no_wrap=True)
    for layer in layers:
        i = analysis.layers.index(layer)
        row = [_cell(analysis, i, j) for j in range(len(analysis.positions))]
        here = layer == analysis.headline.layer
        table.add_row(f"→ {layer}" if here else str(layer), *row, style="bold" * here)
    return table


def _cell(analysis: Analysis, i: int, j: int) -> str:
    value = analysis.auroc[i][j].value
    star = "*" if analysis.tested.p_family[i, j] <= LEVEL else ""
    best = "°" if analysis.among_best[i, j] else ""
    return ("–" if np.isnan(value) else f"{value:.2f}") + star + best


def _explained(analysis: Analysis, layers: list[int]) -> list[str]:
    """What a reader of the heat map has to know."""
    lines = []
    if (analysis.tested.p_family <= LEVEL).any():
        lines.append("* family-wise p ≤ 0.05 (closed form)")
    elif analysis.tested.permutations:
        lines.append("no family-wise p ≤ 0.05 (closed form)")
    level = f"{100 * analysis.settings.level:g}%"
    lines.append(f"° in the {level} confidence set of the best (held-out log loss)")
    if len(layers) < len(analysis.layers):
        step = _step(analysis)
        every = {2: "every second layer", 3: "every third layer"}.get(step, f"one layer in {step}")
        lines.append(f"{every} and those chosen")
    return [*lines, "intervals and the rest: estimates.parquet"]


def shown_layers(analysis: Analysis, step: int | None = None) -> list[int]:
    """Every so many layers (:data:`ROWS` at most, if not given), and those that were chosen."""
    chosen = {analysis.headline.layer, *(layer for layer, _ in analysis.headline.picked)}
    spaced = set(analysis.layers[:: step or _step(analysis)])
    return [layer for layer in analysis.layers if layer in spaced | chosen]


def _step(analysis: Analysis) -> int:
    steps = range(1, len(analysis.layers) + 1)
    return next((s for s in steps if len(shown_layers(analysis, s)) <= ROWS), len(steps))


# -- texts ----------------------------------------------------------------------------------------


def _table(show_header: bool = True, expand: bool = False) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
    made.show_header, made.expand = show_header, expand
    return made


def _place(layer: int, position: str) -> str:
    return f"layer {layer} {escape(one_line(position, 24))}"
