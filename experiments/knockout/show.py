"""Knockouts in the terminal and as figures."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.given_turns import places_of
from experiments.knockout.analyse import BITS, LOST
from experiments.knockout.block import EDGES, INTACT, RANDOM, Arm, Asked
from experiments.knockout.matched import MATCHED
from experiments.tables import cell, print_plan, print_table
from ia_mech.display import COLOURS, coloured, draw_line, draw_points, list_names, new_axes
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


def control(estimates: pd.DataFrame) -> str:
    """What blocked edges are held against, in one sentence: as many random ones."""
    found = together(estimates)
    whole = found[~_windows(found) & (found["quantity"] == LOST)]
    whole = whole.assign(p_holm=np.nan).set_index("of")  # p is of 0, not of random edges
    said = []
    for of in (HEADER, TURN, BOTH):
        if of in whole.index and RANDOM + of in whole.index:
            own, drawn = whole.loc[of], whole.loc[RANDOM + of]
            more = "more" if own["low"] > drawn["high"] else "not shown to be more"
            said.append(f"{of} {cell(own)}, {more} than {cell(drawn)}")
    return f"Bits lost, against as many random edges: {'; '.join(said)}." if said else ""


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
    across = "readable bits of a turn (hollow: as many random edges blocked)"
    figure, axes = new_axes(title, across, size=(7, 3.2))
    for control, look in ((False, {"color": COLOURS[0]}), (True, {"color": "0.4", "mfc": "white"})):
        mine = rows[rows["of"].str.startswith(RANDOM) == control]
        at = [kinds.index(of.removeprefix(RANDOM)) + 0.25 * control for of in mine["of"]]
        draw_points(axes, at, mine, lying=True, ms=5, **look)
    axes.axvline(0, color="0.3", lw=0.8)
    list_names(axes, kinds)
    return figure


def by_window(estimates: pd.DataFrame, title: str) -> Figure:
    """Readable bits by the middle of the window, a line per kind of edge."""
    bits = estimates[estimates["quantity"] == BITS]
    rows = bits[_windows(bits)]
    figure, axes = new_axes(title, "middle of the window of layers", "readable bits of a turn")
    for colour, (of, mine) in coloured(rows, "of"):
        draw_line(axes, (mine["first"] + mine["last"]) / 2, mine, colour, of)
    intact = bits[bits["of"] == INTACT].iloc[0]
    axes.axhline(intact["value"], color="0.3", lw=0.8, ls=":", label=INTACT)
    axes.legend()
    return figure
