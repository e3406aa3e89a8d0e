"""Pictures of the estimates: rates, the first token, where greedy leaves, and the logit lens.

The estimates as tables in a terminal.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.common.screen import WIDTH, print_notes, print_table
from experiments.temperature_sweep.analyse import FAILURE, KINDS, LESS, LESS_OTHERS, RATE, RIVALS
from experiments.temperature_sweep.read import HEADER_LAST
from ia_mech.display import coloured, console, title_axes
from ia_mech.estimates import ALL, together
from ia_mech.judge.rubric import ASSESSED, GENUINE, heading

BY_TEMPERATURE = ("dataset", "temperature")
SHOWN = (0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0)  # of the curve; the file has them all


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print what there is: rates, failures, first token, hidden turns, references, lens, notes."""
    screen = console(WIDTH)
    rates = {RATE: (RATE, 2), RATE + LESS: ("difference from greedy", 2)}
    title = f"follow-up rate by temperature ({100 * level:g}% intervals over sources)"
    print_table(screen, title, estimates, rates, index=BY_TEMPERATURE)
    failures = {c: (heading(c), 2) for c in ASSESSED}
    del failures[GENUINE]
    whole = together(estimates)
    for quantity, title in (
        (FAILURE, "failures, shares of all turns"),
        (FAILURE + LESS, "failures, differences from greedy"),
    ):
        rows = whole[whole["quantity"] == quantity]
        print_table(screen, title, rows, failures, key="of", index=BY_TEMPERATURE)
    _first_token(screen, whole)
    kinds = {
        "first token is greedy's": ("opens as greedy", 2),
        "greedy leaves it": ("greedy leaves", 2),
        "token where greedy leaves": ("at token", 1),
        "share of turn before greedy leaves": ("turn before that", 2),
        "rank where greedy leaves": ("rank there", 1),
        "probability where greedy leaves": ("probability", 2),
        "median gap where greedy leaves": ("median gap, nats", 2),
    }
    title = "where greedy leaves sampled turns (token and rank: medians)"
    print_table(screen, title, whole, kinds, index=(*BY_TEMPERATURE, "of"))
    apart = {
        f"{name}{LESS_OTHERS}": (head, 2)
        for name, head in {
            "first token is greedy's": "opens as greedy",
            "token where greedy leaves": "token",
            "log2 rank where greedy leaves": "log2 rank",
            "gap where greedy leaves": "gap, nats",
        }.items()
    }
    title = "the same of genuine turns, less other turns of the same context and temperature"
    print_table(screen, title, whole, apart, index=("of", *BY_TEMPERATURE))
    best = {"best temperature": ("best T", 2)}
    print_table(screen, "temperature at which real follow-ups are likeliest", estimates, best)
    _lens(screen, whole)
    print_notes(screen, notes)


def _first_token(screen, whole: pd.DataFrame) -> None:
    rows = whole[whole["temperature"].round(6).isin(SHOWN)]
    masses = rows["quantity"] == "mass on openings"
    named = rows["quantity"].where(~masses, rows["quantity"] + ", " + rows["of"])
    columns = {
        "first token's entropy": ("entropy, nats", 2),
        "effective number of first tokens": ("effective tokens", 1),
        "mass on turn-end": ("turn-end", ".0e"),
        "total variation from T = 1": ("variation from T = 1", 2),
        "mass on openings, genuine": ("genuine openings", 2),
        "mass on openings, restated": ("restatements'", 2),
        "mass on openings, genuine less restated": ("difference", 2),
    }
    title = "the first token of the user turn"
    print_table(screen, title, rows.assign(quantity=named), columns, index=BY_TEMPERATURE)


def _lens(screen, whole: pd.DataFrame) -> None:
    last = whole["layer"].max()
    rows = whole[whole["layer"].isna() | (whole["layer"] == last)]
    rows = rows.sort_values(
        "of", kind="stable", key=lambda of: of.map(list(dict.fromkeys(of)).index)
    )
    columns = {
        "greedy ahead for good": ("contexts where it is", 2),
        "layer where greedy overtakes": ("from layer (median)", 1),
    }
    title = f"logit lens: where greedy's opening is ahead, to the last layer ({last})"
    print_table(screen, title, rows, columns, index=("of", "position"))


KIND_OF = {"genuine": "genuine turns of others", "restated": "restatements of others"}
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # powers would be set as TeX, which is off
LINES = {ALL: {"lw": 2.2, "zorder": 3}}  # all datasets together stand out


def rates(estimates: pd.DataFrame, title: str) -> Figure:
    """Left the follow-up rate by temperature, a line per dataset; right all other categories."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for colour, (dataset, rows) in coloured(of(estimates, RATE), "dataset"):
        line(left, rows, "temperature", colour, dataset)
    whole = together(estimates)
    for colour, (category, rows) in coloured(of(whole, FAILURE), "of"):
        line(right, rows, "temperature", colour, heading(category))
    for axes, label in ((left, RATE), (right, "share of turns")):
        axes.set_xlabel("temperature (0 = greedy)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        legend(axes)
    title_axes(left, title)
    title_axes(right, "failures")
    return figure


def first_token(estimates: pd.DataFrame, title: str) -> Figure:
    """The first token's distribution by temperature: four panels, a line per dataset in three."""
    figure = Figure(figsize=(9.5, 7), layout="constrained")
    upper, lower = figure.subplots(2, 2)
    panels = {
        "effective number of first tokens": (upper[0], "effective number of tokens"),
        "total variation from T = 1": (upper[1], "total variation from T = 1"),
        "mass on turn-end": (lower[0], "probability of ending at once"),
    }
    for quantity, (axes, label) in panels.items():
        for colour, (dataset, rows) in coloured(of(estimates, quantity), "dataset"):
            line(axes, rows, "temperature", colour, dataset)
        axes.set_ylabel(label)
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
        title_axes(axes, "")
    title_axes(upper[0], title)
    return figure


def hidden(estimates: pd.DataFrame, title: str) -> Figure:
    """Where greedy has left by, and at which rank: genuine turns solid, others dashed."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
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
    title_axes(left, title)
    title_axes(right, "")
    return figure


def lens(estimates: pd.DataFrame, title: str) -> Figure:
    """Left log p by layer at ``header_last``; right the share of contexts that are overtaken."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    whole = together(estimates)
    said = of(whole, "log p by the lens")
    places = list(dict.fromkeys(said["position"]))
    place = HEADER_LAST if HEADER_LAST in places else places[-1]
    for colour, (kind, rows) in coloured(said[said["position"] == place], "of"):
        line(left, rows, "layer", colour, kind)
    within = said[(said["position"] == place) & (said["layer"] > 0)]  # embeddings are far below
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
    title_axes(left, title)
    title_axes(right, f"greedy's opening for good ahead of the {RIVALS['best']}")
    return figure


def of(estimates: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Rows of one quantity."""
    return estimates[estimates["quantity"] == quantity]


def legend(axes: Axes) -> None:
    """Names of the lines, if there are any."""
    if axes.get_lines():
        axes.legend(frameon=False, fontsize=7)


def line(axes: Axes, rows: pd.DataFrame, across: str, colour: str, label: str, **look) -> None:
    """A line with its intervals as a band."""
    x, low, high = (rows[name].to_numpy(dtype=float) for name in (across, "low", "high"))
    look = {"lw": 1.4, "marker": "o", "ms": 2.5} | LINES.get(label, {}) | look
    axes.plot(x, rows["value"].to_numpy(), color=colour, label=label, **look)
    axes.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
