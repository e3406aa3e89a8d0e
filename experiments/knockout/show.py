"""Knockouts in the terminal and as figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.given_turns import places_of
from experiments.knockout.analyse import BITS, LOST
from experiments.knockout.block import EDGES, INTACT, RANDOM, Arm, Asked
from experiments.knockout.matched import MATCHED
from experiments.tables import cell, print_plan, print_table
from ia_mech.display import COLOURS, title_axes
from ia_mech.engine.plan import PREFILL_COST, RESCORE_COST
from ia_mech.estimates import together

SIGNIFICANT = 0.05
HEADER, TURN, BOTH = list(EDGES)[:3]
LIMITS = (
    "A model whose edges are blocked is another model: bits that it doesn't read may be lost since "
    "the edges carry them, or since it is damaged; random edges show the latter. Edges in a window "
    "that take nothing away may be made up for by other layers."
)


def plan(queries: Sequence[Asked], arms: Sequence[Arm], depth: int) -> None:
    """What will be computed: passes, tokens and time."""
    prefilled = sum(len(context.ids) for one in queries for context in one.contexts)
    tokens = 0
    for one in queries:
        for context in one.contexts:
            tail = len(context.ids) - min(places_of(context).values())
            tokens += sum(tail + len(turn) for turn, _ in one.turns)
    share = sum(1 - (arm.first - 1) / depth for arm in arms if arm.of != INTACT)
    cost = PREFILL_COST * prefilled + RESCORE_COST * tokens * (1 + share)
    turns = sum(len(one.turns) for one in queries)
    lines = {
        "queries": f"{len(queries)}, {len(queries[0].contexts)} responses to each",
        "turns": f"{turns}, scored after each response under {len(arms)} knockouts",
        "tokens to prefill": str(prefilled),
        "tokens to compute": f"{tokens * len(arms)}, from the first blocked layer on",
    }
    print_plan(lines, cost)


def tables(to: Console, estimates: pd.DataFrame, level: float) -> None:
    """Knockouts of all layers with their controls, windows, and the verdict."""
    most = estimates["responses"].max()
    columns: dict[str, tuple[str, int | str]] = {BITS: ("readable bits", 2), LOST: ("lost", 2)}
    whole = estimates[~_windows(estimates)]
    title = (
        f"bits that the model reads in its turns about which of {most} responses they followed, "
        f"edges blocked in all layers ({100 * level:g}% intervals over queries)"
    )
    print_table(to, title, whole, columns, index=("dataset", "of"))
    found = together(estimates)
    some = found[_windows(found)]
    if len(some):
        layers = some["first"].astype(str) + "–" + some["last"].astype(str)
        title = "edges blocked in some layers only"
        print_table(to, title, some.assign(layers=layers), columns, index=("of", "layers"))
    to.print(verdict(estimates), soft_wrap=True, markup=False)
    to.print(LIMITS, soft_wrap=True)


def _windows(estimates: pd.DataFrame) -> pd.Series:
    return (estimates["last"] > 0) & (
        (estimates["first"] > 1) | (estimates["last"] < estimates["last"].max())
    )


def verdict(estimates: pd.DataFrame) -> str:
    """What was found, in one sentence."""
    found = together(estimates)
    whole = found[~_windows(found)].set_index(["of", "quantity"])
    intact = whole.loc[(INTACT, BITS)]

    def clear(of: str) -> bool:
        return (of, LOST) in whole.index and whole.loc[(of, LOST), "p_holm"] <= SIGNIFICANT

    routes = [
        name for of, name in ((TURN, "directly"), (HEADER, "through the header")) if clear(of)
    ]
    said = "The turn isn't shown to need either route from the response"
    if routes:
        said = f"The turn reads the response {' and '.join(routes)}"
    elif clear(BOTH):
        said = "Either route from the response to the turn makes up for the other"
    return (
        f"{said}: {cell(intact)} readable bits intact, {cell(whole.loc[(HEADER, BITS)])} without "
        f"{HEADER}, {cell(whole.loc[(TURN, BITS)])} without {TURN}, "
        f"{cell(whole.loc[(BOTH, BITS)])} without both."
    )


def figures(estimates: pd.DataFrame, model: str) -> dict[str, Figure]:
    """The figures by the stem of their files."""
    found = together(estimates)
    made = {"knockouts": by_edges(found, f"{model} · edges blocked in all layers")}
    if _windows(found).any():
        made["windows"] = by_window(found, f"{model} · edges blocked in some layers")
    return made


def by_edges(estimates: pd.DataFrame, title: str) -> Figure:
    """Readable bits with edges blocked in all layers; hollow: as many random ones."""
    rows = estimates[~_windows(estimates) & (estimates["quantity"] == BITS)]
    rows = rows[~rows["of"].str.startswith(MATCHED)]
    kinds = [INTACT, *EDGES]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for row in rows.itertuples():
        control = row.of.startswith(RANDOM)
        at = kinds.index(row.of.removeprefix(RANDOM)) + (0.25 if control else 0)
        reach = np.nan_to_num(np.abs([[row.value - row.low], [row.high - row.value]]))
        colour = COLOURS[0] if not control else "0.4"
        look: dict[str, Any] = {"color": colour, "mfc": "white" if control else colour}
        axes.errorbar(row.value, at, xerr=reach, fmt="o", ms=5, lw=1.2, **look)
    axes.axvline(0, color="0.3", lw=0.8)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlabel("readable bits (hollow: as many random edges blocked)")
    title_axes(axes, title)
    return figure


def by_window(estimates: pd.DataFrame, title: str) -> Figure:
    """Readable bits by the middle of the window, a line per kind of edge."""
    bits = estimates[estimates["quantity"] == BITS]
    rows = bits[_windows(bits)]
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.add_subplot()
    for number, of in enumerate(EDGES):
        mine = rows[rows["of"] == of]
        at, colour = (mine["first"] + mine["last"]) / 2, COLOURS[number]
        axes.plot(at, mine["value"], "o-", ms=3, color=colour, label=of)
        axes.fill_between(at, mine["low"], mine["high"], color=colour, alpha=0.12, lw=0)
    intact = bits[bits["of"] == INTACT].iloc[0]
    axes.axhline(intact["value"], color="0.3", lw=0.8, ls=":", label=INTACT)
    axes.set_xlabel("middle of the window of layers")
    axes.set_ylabel("readable bits")
    axes.legend(frameon=False)
    title_axes(axes, title)
    return figure
