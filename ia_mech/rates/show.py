"""What the rates report shows at a terminal."""

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from ia_mech.cli import one_line
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, SHORT
from ia_mech.rates.figures import Figures
from ia_mech.rates.notes import notes_of
from ia_mech.rates.pool import EVERY, FAILED, Judged
from ia_mech.rates.rows import Row

CURVE = 5  # points of a reach curve that fit on a line


def console() -> Console:
    """A console that leaves texts as they are."""
    made = Console(highlight=False, emoji=False)  # ":cat:" in a text is not an emoji
    made.width = max(made.width, 100)
    return made


def print_rates(screen: Console, judged: Judged, rows: list[Row]) -> None:
    """The tables of every model and perturbation, then what has to be said of them.

    Args:
        screen: where to; it is widened to hold a table's intervals on one line.
        judged: what the rows are of.
        rows: the estimates.
    """
    level = f"{rows[0].level * 100:g}%"
    subjects = list(dict.fromkeys((r.model, r.weights_hash, r.perturbation) for r in rows))
    for model, weights, perturbation in subjects:
        subject = (model, weights, perturbation)
        figures = Figures([r for r in rows if (r.model, r.weights_hash, r.perturbation) == subject])
        name = one_line(model, 60)
        if len({other for same, other, _ in subjects if same == model}) > 1:
            name += f" ({weights})"
        if perturbation != "none":
            name += f" · perturbation {one_line(perturbation, 60)}"
        if judged.responses != EVERY:
            name += f" · after {judged.responses} responses"
        title = escape(f"{name} · judge {judged.judge}")
        _show(screen, _main_table(figures, f"[bold]{title}[/] ({level} intervals over sources)"))
        if figures.has("follow_up_rate_bounds"):
            _show(screen, _unassessed_table(figures, "turns that were not assessed: left out"))
        _show(screen, _profile_table(figures, "what the turns are: % of those assessed"))
        _say_absent(screen, figures)
        if max(figures.curve) > 1:
            _show(screen, _reach_table(figures, "contexts with a genuine turn among n samples"))
        if figures.annotated:
            _show(screen, _corrected_table(figures, "follow-up rate, corrected for judge errors"))
            _say_errors(screen, figures, judged.annotator)
    for note in notes_of(judged, rows):
        screen.print(escape(note), soft_wrap=True)


# -- tables ---------------------------------------------------------------------------------------


def _main_table(figures: Figures, title: str) -> Table:
    cut = figures.has("cut_off")
    most = {row.n_samples for place in figures.lines if (row := figures.farthest(*place))}
    names = ["contexts", "turns", "follow-up rate", "complete responses" if cut else None]
    names += ["Δ from greedy", "Holm p", "detect-\nable Δ"]
    names += [f"any of {most.copy().pop()}" if len(most) == 1 else "any of n samples"]
    table = _table(title, [name for name in names if name])
    for dataset, temperature, first in _lines(figures.lines):
        every, rate, complete, cut_off, difference, size = (
            figures.get(dataset, temperature, quantity)
            for quantity in (
                *(FAILED, "follow_up_rate", "follow_up_rate_complete", "cut_off"),
                *("difference_from_greedy", "detectable_difference"),
            )
        )
        cells = [
            str(every.contexts),
            str(every.rows) + (f" († {cut_off.events})" if cut_off else ""),
            rate.estimate.text(),
        ]
        if cut:
            complete = complete or rate
            cells.append(f"{complete.estimate.text()} of {complete.rows}")
        reach = figures.farthest(dataset, temperature)
        cells += [
            _signed(difference) if difference else "–",
            _p(difference.p_holm) if difference else "–",
            f"{size.value:.2f}" if size and not np.isnan(size.value) else "–",
            _reach(figures, reach) + (f" of {reach.n_samples}" if reach and len(most) > 1 else ""),
        ]
        _add(table, dataset, temperature, first, cells)
    return table


def _unassessed_table(figures: Figures, title: str) -> Table:
    """Lines where the judge couldn't assess some turns or failed on them."""
    table = _table(title, ["turns", "can't assess", "judge failed", "rate if none … all genuine"])
    there = [at for at in figures.lines if figures.get(*at, "follow_up_rate_bounds")]
    for dataset, temperature, first in _lines(there):
        bounds = figures.get(dataset, temperature, "follow_up_rate_bounds")
        counts = [figures.get(dataset, temperature, name) for name in (CANNOT_ASSESS, FAILED)]
        cells = [str(bounds.rows), *(str(row.events) for row in counts)]
        cells.append(f"{bounds.low:.2f} … {bounds.high:.2f}")
        _add(table, dataset, temperature, first, cells)
    return table


def _profile_table(figures: Figures, title: str) -> Table:
    found = figures.categories
    table = _table(title, [SHORT[name] for name in found])
    for dataset, temperature, first in _lines(figures.lines):
        shares = [figures.get(dataset, temperature, "category_share", name) for name in found]
        _add(table, dataset, temperature, first, [_percent(share) for share in shares])
    return table


def _reach_table(figures: Figures, title: str) -> Table:
    own = max((r.n_samples for at in figures.lines if (r := figures.farthest(*at))), default=1)
    points = curve_points(own, max(figures.curve))
    table = _table(title, [f"n = {n}" for n in points])
    for dataset, temperature, first in _lines(figures.curves):
        found = [figures.get(dataset, temperature, "reach", n=n) for n in points]
        _add(table, dataset, temperature, first, [_reach(figures, row) for row in found])
    return table


def _reach(figures: Figures, row: Row | None) -> str:
    """The estimate; where some contexts have fewer samples than n, how many it is of."""
    if row is None:
        return "–"
    contexts = figures.get(row.dataset, row.temperature, "reach", n=1).contexts
    fewer = f" ({row.contexts}/{contexts})" if row.contexts < contexts else ""
    return row.estimate.text() + fewer


def _corrected_table(figures: Figures, title: str) -> Table:
    table = _table(
        title, ["by the judge", "by the labels alone", "Rogan & Gladen", "prediction-powered"]
    )
    for dataset, temperature, first in _lines(figures.lines):
        found = [
            figures.get(dataset, temperature, quantity)
            for quantity in (
                *("follow_up_rate", "rate_annotated"),
                *("rate_rogan_gladen", "rate_prediction_powered"),
            )
        ]
        cells = [row.estimate.text() if row else "–" for row in found]
        if found[1] and not np.isnan(found[1].value):
            cells[1] += f" of {found[1].rows}"
        _add(table, dataset, temperature, first, cells)
    return table


def curve_points(own: int, most: int) -> list[int]:
    """A few n to show a curve at: the most samples at one temperature, the most of all, and powers
    of two, of which the smallest go first. n = 1 is the follow-up rate."""
    powers = [2**i for i in range(1, 32) if 2**i < most and 2**i != own]
    ends = sorted({own, most})
    return sorted([*ends, *powers[max(0, len(powers) + len(ends) - CURVE) :]])


def _table(title: str, names: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("dataset", no_wrap=True)
    for name in ("T", *names):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add(
    table: Table, dataset: str, temperature: float | None, first: bool, cells: list[str]
) -> None:
    if first and table.row_count:
        table.add_section()
    at = "all" if temperature is None else f"{temperature:g}" if temperature else "greedy"
    table.add_row(escape(one_line(dataset, 30)) if first else "", at, *cells)


def _show(screen: Console, table: Table) -> None:
    wide = screen.options.update(width=1000)
    screen.width = max(screen.width, Measurement.get(screen, wide, table).maximum)
    screen.print(table)


def _lines(pairs: list[tuple]) -> list[tuple[str, float | None, bool]]:
    """(dataset, temperature, whether the dataset has to be named on this line)."""
    return [(d, t, i == 0 or pairs[i - 1][0] != d) for i, (d, t) in enumerate(pairs)]


# -- cells ----------------------------------------------------------------------------------------


def _signed(row: Row) -> str:
    """``+0.12 [-0.02, +0.25]``."""
    if np.isnan(row.value):
        return "–"
    value, low, high = (x + 0.0 if abs(x) >= 0.005 else 0.0 for x in (row.value, row.low, row.high))
    ends = "–" if np.isnan(row.low) else f"{low:+.2f}, {high:+.2f}"
    return f"{value:+.2f} [{ends}]"


def _p(p: float) -> str:
    return "–" if np.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def _percent(row: Row) -> str:
    """The share, and its interval on a second line: eight of them stand side by side."""

    def text(share: float) -> str:
        percent = 100 * share
        return f"{percent:.1f}" if 0 < percent < 9.95 else f"{percent:.0f}"

    if np.isnan(row.value):
        return "–"
    return f"{text(row.value)}\n" + (
        "[–]" if np.isnan(row.low) else f"[{text(row.low)}–{text(row.high)}]"
    )


# -- notes ----------------------------------------------------------------------------------------


def _say_absent(screen: Console, figures: Figures) -> None:
    absent = [name for name in ASSESSED if name not in figures.categories]
    if absent:
        screen.print(f"none is {', '.join(absent)}", soft_wrap=True)


def _say_errors(screen: Console, figures: Figures, annotator: str | None) -> None:
    found = [figures.overall(f"judge_{name}") for name in ("sensitivity", "specificity")]
    turns = sum(row.rows for row in found)
    texts = [
        f"{name} {row.estimate.text()} ({row.rows} turns)"
        for name, row in zip(("sensitivity", "specificity"), found, strict=True)
    ]
    line = f"against {annotator}'s labels of {turns} turns: {', '.join(texts)}"
    undefined = figures.undefined("rate_rogan_gladen")
    line += f"; Rogan & Gladen: {undefined}" if undefined else ""
    screen.print(escape(line + "."), soft_wrap=True)
