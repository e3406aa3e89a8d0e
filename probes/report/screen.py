"""What an analysis shows at a terminal."""

from collections import Counter

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ia_mech.cli import one_line
from ia_mech.stats import Estimate
from probes.analysis import Analysis
from probes.report.conclusion import LEVEL, Conclusion

ROWS = 17  # layers that the heat map shows


def print_analysis(
    screen: Console, analysis: Analysis, target: str, conclusion: Conclusion, within: str = "run"
) -> None:
    """Headline, controls, heat map, notes and, last, the conclusion.

    Args:
        screen: made as wide as the heat map if it is narrower.
        analysis: of one target.
        target: what was probed, in words.
        conclusion: of the analysis.
        within: what compared contexts share, in words.
    """
    layers = shown_layers(analysis)
    heat_map = _heat_map(analysis, layers)
    wide = screen.options.update(width=1000)
    screen.width = max(screen.width, Measurement.get(screen, wide, heat_map).maximum)
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
    by_fold = ", ".join(f"{_place(*place)} ×{times}" for place, times in chosen)
    screen.print(
        f"[bold]headline: {_place(headline.layer, headline.position)}[/] (chosen by the outer "
        f"folds: {by_fold}); {_tests(analysis)}"
    )
    screen.print(_measures(analysis))
    if analysis.compared:
        screen.print(_controls(analysis))
    screen.print(
        f"[bold]AUROC by layer (0 = embeddings) and position[/], {analysis.settings.estimator} "
        f"probes, {100 * analysis.settings.level:g}% intervals over sources"
    )
    screen.print(heat_map)
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
        f"p {_p(tested.p)} (selection replayed); smallest family-wise p {_p(smallest)} "
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
        ("calibration: p less rate", _signed(found["calibration_in_the_large"], 3)),
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
    table.add_column(escape(f"headline's gain [{level}]"), no_wrap=True)
    for control in analysis.compared:
        task = "(gain: selectivity) " if control.kind == "control task" else ""
        names = escape(one_line(control.name, 16)), escape(task + one_line(control.what))
        table.add_row(*names, control.auroc.text(), _signed(control.gain))
    return table


# -- the heat map ---------------------------------------------------------------------------------


def _heat_map(analysis: Analysis, layers: list[int]) -> Table:
    table = _table()
    table.add_column("layer", justify="right", no_wrap=True)
    for position in analysis.positions:
        # Names such as turn_separator are wider than the numbers below them.
        name = "_\n".join(one_line(position, 24).rsplit("_", 1))
        table.add_column(Text(name), no_wrap=True)
    for layer in layers:
        i = analysis.layers.index(layer)
        row = [_cell(analysis, i, j) for j in range(len(analysis.positions))]
        here = layer == analysis.headline.layer
        table.add_row(f"→ {layer}" if here else str(layer), *row, style="bold" * here)
    return table


def _cell(analysis: Analysis, i: int, j: int) -> str:
    """With its interval at the headline's position only: more wouldn't fit."""
    estimate = analysis.auroc[i][j]
    star = "*" if analysis.tested.p_family[i, j] <= LEVEL else ""
    if analysis.positions[j] == analysis.headline.position:
        return estimate.text() + star
    return ("–" if np.isnan(estimate.value) else f"{estimate.value:.2f}") + star


def _explained(analysis: Analysis, layers: list[int]) -> list[str]:
    """What a reader of the heat map has to know."""
    lines = []
    if (analysis.tested.p_family <= LEVEL).any():
        lines.append("* family-wise p ≤ 0.05 (closed form)")
    elif analysis.tested.permutations:
        lines.append("no family-wise p ≤ 0.05 (closed form)")
    if len(layers) < len(analysis.layers):
        step = _step(analysis)
        every = {2: "every second layer", 3: "every third layer"}.get(step, f"one layer in {step}")
        lines.append(f"{every} and those chosen")
    return [*lines, "rest: estimates.parquet"]


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
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    made.show_header, made.expand = show_header, expand
    return made


def _place(layer: int, position: str) -> str:
    return f"layer {layer} {escape(one_line(position, 24))}"


def _signed(estimate: Estimate, digits: int = 2) -> str:
    """``+0.12 [-0.02, +0.25]``."""
    if np.isnan(estimate.value):
        return "–"
    # The sign of an end decides the conclusion, so -0.00 keeps its sign.
    value, low, high = (f"{x:+.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [–]" if np.isnan(estimate.low) else f"{value} [{low}, {high}]"


def _p(p: float) -> str:
    return "–" if np.isnan(p) else "< 0.001" if p < 0.001 else f"= {p:.3f}"
