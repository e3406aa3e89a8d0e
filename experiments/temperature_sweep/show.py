"""A sweep in the terminal, five rows, and as figures."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.temperature_sweep.analyse import (
    FAILURE,
    KINDS,
    LESS_OTHERS,
    OTHERS,
    RATE,
    RIVALS,
)
from experiments.temperature_sweep.read import HEADER_LAST
from ia_mech.display import coloured, draw_line, title_axes
from ia_mech.estimates import ALL, together
from ia_mech.judge.rubric import heading
from ia_mech.rates.figures import draw_floor, gate_title
from ia_mech.rates.gate import Gate
from ia_mech.results import Table, cell_of

# quantity, further names, head, decimals: a row per question, over all datasets.
MAIN: tuple[tuple[str, dict[str, str], str, int], ...] = (
    (RATE, {}, RATE, 2),
    ("effective number of first tokens", {}, "effective number of first tokens", 1),
    (
        f"gap where greedy leaves{LESS_OTHERS}",
        {"of": OTHERS[0]},
        "genuine turns' gap to greedy, less other turns', nats",
        2,
    ),
    ("best temperature", {}, "temperature at which real follow-ups are likeliest", 2),
    (
        "layer where greedy overtakes",
        {"of": RIVALS["best"], "position": HEADER_LAST},
        "layer from which greedy's opening is ahead (median)",
        1,
    ),
)


def tables(estimates: pd.DataFrame, level: float) -> list[Table]:
    """The five main rows: a column per sampled temperature, and one without."""
    whole = together(estimates)
    columns = [*of(whole, RATE)["temperature"], None]
    name = whole["dataset"].iloc[0]
    name = "all datasets" if name == ALL else name
    heads = ["overall" if t is None else f"T = {t:g}" if t else "greedy" for t in columns]
    lines = []
    for quantity, names, head, digits in MAIN:
        rows = of(whole, quantity)
        for column, wanted in names.items():
            rows = rows[rows[column] == wanted]
        cells = []
        for t in columns:
            at = rows[rows["temperature"].isna() if t is None else rows["temperature"] == t]
            cells.append(cell_of(at.iloc[0], digits) if len(at) else "")
        lines.append([head, *cells])
    title = f"{name} ({100 * level:g}% intervals over sources, Holm-corrected p)"
    legend = (
        "estimates.parquet has the rest: datasets, failures, the first token at more temperatures, "
        "where greedy leaves each kind of turn, every layer and position; turns.parquet has the "
        "turns."
    )
    return [Table(title, ["", *heads], lines, legend)]


def figures(estimates: pd.DataFrame, model: str, gate: Gate) -> dict[str, Figure]:
    """The figures by the stem of their files; no ``lens`` where there was none to read with."""
    title = gate_title(model, gate)
    made = {
        "rates": rates(estimates, title, gate),
        "first_token": first_token(estimates, title),
        "hidden": hidden(estimates, title),
    }
    if (estimates["quantity"] == "log p by the lens").any():
        made["lens"] = lens(estimates, title)
    return made


KIND_OF = {"genuine": "genuine turns of others", "restated": "restatements of others"}
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # powers would be set as TeX, which is off
# All datasets together stand out.
LINES: dict[str, dict[str, Any]] = {ALL: {"lw": 2.2, "zorder": 3}}


def _panels(title: str, lines: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with two panels a line."""
    figure = Figure(figsize=(9.5, 0.7 + 3.5 * lines), layout="constrained")
    figure.suptitle(title)
    panels = list(figure.subplots(lines, 2).flat)
    for axes in panels:
        title_axes(axes, "")
    return figure, panels


def rates(estimates: pd.DataFrame, title: str, gate: Gate) -> Figure:
    """Left the follow-up rate by temperature, a line per dataset; right all other categories."""
    figure, (left, right) = _panels(title)
    for colour, (dataset, rows) in coloured(of(estimates, RATE), "dataset"):
        line(left, rows, "temperature", colour, dataset)
    whole = together(estimates)
    for colour, (category, rows) in coloured(of(whole, FAILURE), "of"):
        line(right, rows, "temperature", colour, heading(category))
    draw_floor(left, gate)
    for axes, up in ((left, f"{RATE} (share of turns)"), (right, "share of turns")):
        axes.set_xlabel("temperature (0 = greedy)")
        axes.set_ylabel(up)
        axes.set_ylim(bottom=0)
        legend(axes)
    title_axes(left, "genuine follow-ups")
    title_axes(right, "failures")
    return figure


def first_token(estimates: pd.DataFrame, title: str) -> Figure:
    """The first token's distribution by temperature: four panels, a line per dataset in three."""
    figure, panels = _panels(title, lines=2)
    upper, lower = panels[:2], panels[2:]
    curves = {
        "effective number of first tokens": (upper[0], "effective number of tokens"),
        "total variation from T = 1": (upper[1], "total variation from T = 1"),
        "mass on turn-end": (lower[0], "probability of ending at once"),
    }
    for quantity, (axes, up) in curves.items():
        for colour, (dataset, rows) in coloured(of(estimates, quantity), "dataset"):
            line(axes, rows, "temperature", colour, dataset)
        axes.set_ylabel(up)
    upper[0].set_yscale("log")
    upper[0].yaxis.set_major_formatter(PLAIN)
    legend(upper[0])
    masses = of(together(estimates), "mass on openings")
    for colour, (kind, rows) in coloured(masses[masses["of"].isin(("genuine", "restated"))], "of"):
        line(lower[1], rows, "temperature", colour, f"openings of {KIND_OF[kind]}")
    lower[1].set_ylabel("probability")
    legend(lower[1])
    for axes in (*upper, *lower):
        axes.set_xlabel("temperature")
    return figure


def hidden(estimates: pd.DataFrame, title: str) -> Figure:
    """Where greedy has left by, and at which rank: genuine turns solid, others dashed."""
    figure, (left, right) = _panels(title)
    whole = together(estimates)
    panels = {
        "greedy has left by token": (left, "token", "turns that greedy has left by then"),
        "rank where greedy leaves, at most": (
            right,
            "rank there, at most",
            "share of turns it leaves",
        ),
    }
    for quantity, (axes, across, up) in panels.items():
        for colour, (t, rows) in coloured(of(whole, quantity), "temperature"):
            for kind, dashes in zip(KINDS.values(), ("-", "--"), strict=True):
                own = rows[rows["of"] == kind]
                if len(own):
                    line(axes, own, "at", colour, f"T = {t:g}, {kind}", ls=dashes)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PLAIN)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_ylim(0, 1)
    legend(right)
    return figure


def lens(estimates: pd.DataFrame, title: str) -> Figure:
    """Left log p by layer at ``header_last``; right the share of contexts that are overtaken."""
    figure, (left, right) = _panels(title)
    whole = together(estimates)
    log_p = of(whole, "log p by the lens")
    places = list(dict.fromkeys(log_p["position"]))
    place = HEADER_LAST if HEADER_LAST in places else places[-1]
    for colour, (kind, rows) in coloured(log_p[log_p["position"] == place], "of"):
        line(left, rows, "layer", colour, kind)
    # The embeddings are far below.
    within = log_p[(log_p["position"] == place) & (log_p["layer"] > 0)]
    if within["low"].notna().any():
        left.set_ylim(within["low"].min() - 1, 0.5)
    left.set_ylabel(f"log p at {place}, nats")
    legend(left)
    ahead = of(whole, "greedy ahead for good")
    ahead = ahead[ahead["of"] == RIVALS["best"]]
    for colour, (position, rows) in coloured(ahead, "position"):
        line(right, rows, "layer", colour, position)
    right.set_ylabel("share of contexts")
    right.set_ylim(0, 1)
    legend(right)
    for axes in (left, right):
        axes.set_xlabel("layer (0 = embeddings)")
    title_axes(right, "greedy's opening ahead for good")
    return figure


def of(estimates: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Rows of one quantity."""
    return estimates[estimates["quantity"] == quantity]


def legend(axes: Axes) -> None:
    """Names of the lines, if there are any."""
    if axes.get_lines():
        axes.legend()


def line(axes: Axes, rows: pd.DataFrame, across: str, colour: str, label: str, **look: Any) -> None:
    """A line against a column."""
    draw_line(axes, rows[across], rows, colour, label, **(LINES.get(label, {}) | look))
