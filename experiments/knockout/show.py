"""Knockouts in the terminal and as figures."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.given_turns import TOKENS, places_of
from experiments.knockout.analyse import BEYOND, BITS, LOST, OWN, OWN_LOST
from experiments.knockout.block import EDGES, INTACT, RANDOM, Arm, Asked
from experiments.knockout.matched import MATCHED
from experiments.tables import cell, print_plan, print_table
from ia_mech.display import COLOURS, coloured, draw_points, list_names, new_axes
from ia_mech.engine.plan import PREFILL_COST, RESCORE_COST
from ia_mech.estimates import together

SIGNIFICANT = 0.05
OTHERS = {RANDOM: "as many random edges", MATCHED: "edges of as much attention"}
HEADER, TURN, BOTH = list(EDGES)[:3]
LIMITS = (
    "A model whose edges are blocked is another model: bits that it doesn't read may be lost since "
    "the edges carry them, or since it is damaged; random edges show the latter. Edges in a window "
    "that take nothing away may be made up for by other layers."
)


def plan(queries: Sequence[Asked], arms: Sequence[Arm], depth: int, writing: int = 0) -> None:
    """What will be computed: passes, tokens and time; ``writing`` arms sample turns, too."""
    prefilled = sum(len(context.ids) for one in queries for context in one.contexts)
    tokens = 0
    for one in queries:
        for context in one.contexts:
            tail = len(context.ids) - min(places_of(context).values())
            tokens += sum(tail + len(turn) for turn, _ in one.turns)
    share = sum(1 - (arm.first - 1) / depth for arm in arms if arm.of != INTACT)
    cost = PREFILL_COST * prefilled + RESCORE_COST * tokens * (1 + share)
    turns = sum(len(one.turns) for one in queries)
    cost += writing * (TOKENS * turns + RESCORE_COST * tokens)
    lines = {
        "queries": f"{len(queries)}, {len(queries[0].contexts)} responses to each",
        "turns": f"{turns}, scored after each response under {len(arms)} knockouts",
        "tokens to prefill": str(prefilled),
        "tokens to compute": f"{tokens * len(arms)}, from the first blocked layer on",
    }
    if writing:
        lines["turns to sample"] = f"{turns} under each of {writing} knockouts, then scored, too"
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
    beyond = together(whole)[lambda rows: rows["control"] != ""]
    title = "readable bits lost beyond what other edges take away, blocked in all layers"
    heads: dict[str, tuple[str, int | str]] = {key: (name, 2) for key, name in OTHERS.items()}
    print_table(to, title, beyond, heads, key="control", index=("of",))
    found = together(estimates)
    layers = found["first"].astype(str) + "–" + found["last"].astype(str)
    found = found.assign(layers=layers.mask(found["last"] == 0, "–"))
    title = "edges blocked in some layers only"
    print_table(to, title, found[_windows(found)], columns, index=("of", "layers"))
    title = f"turns that the model writes with edges blocked: their I_{most} under the same model"
    columns = {OWN: (f"I_{most}", 2), OWN_LOST: ("lost", 2)}
    print_table(to, title, found, columns, index=("of", "layers"))
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

    def clear(of: str, quantity: str = LOST) -> bool:
        """Whether there is a test, and a loss that it shows."""
        if (of, quantity) not in whole.index:
            return False
        row = whole.loc[(of, quantity)]
        return row["p_holm"] <= SIGNIFICANT and row["value"] > 0

    control = MATCHED if (whole["control"] == MATCHED).any() else RANDOM
    whole = whole[whole["control"].isin(["", control])]
    ways = ((TURN, "directly"), (HEADER, "through the header"))
    lossy = [name for of, name in ways if clear(of)]
    routes = [name for of, name in ways if clear(of) and clear(of, BEYOND)]
    said = "The turn isn't shown to need either route from the response"
    if routes:
        said = f"The turn reads the response {' and '.join(routes)}"
    elif lossy:
        said = "The turn isn't shown to need the response's edges more than others"
    elif clear(BOTH) and clear(BOTH, BEYOND):
        said = "Either route from the response to the turn makes up for the other"
    return (
        f"{said}: {cell(intact)} readable bits intact, {cell(whole.loc[(HEADER, BITS)])} without "
        f"{HEADER}, {cell(whole.loc[(TURN, BITS)])} without {TURN}, "
        f"{cell(whole.loc[(BOTH, BITS)])} without both."
    )


def control(estimates: pd.DataFrame) -> str:
    """What blocked edges take away beyond what other edges do, in one sentence."""
    found = together(estimates)
    rows = found[(found["quantity"] == BEYOND) & found["of"].isin([HEADER, TURN, BOTH])]
    said = []
    for other, mine in rows.groupby("control", sort=False):
        each = ", ".join(f"{cell(row)} for {row['of']}" for _, row in mine.iterrows())
        said.append(f"with {OTHERS[other]} {each}")
    words = "Readable bits lost less those lost with other edges blocked (below 0: these take more)"
    return f"{words}: {'; '.join(said)}." if said else ""


def figures(estimates: pd.DataFrame, model: str) -> dict[str, Figure]:
    """The figures by the stem of their files."""
    found = together(estimates)
    made = {"knockouts": by_edges(found, f"{model} · edges blocked in all layers")}
    if _windows(found).any():
        made["windows"] = by_window(found, f"{model} · edges blocked in some layers")
    return made


def by_edges(estimates: pd.DataFrame, title: str) -> Figure:
    """Readable bits with edges blocked in all layers, or others in their place."""
    rows = estimates[~_windows(estimates) & (estimates["quantity"] == BITS)]
    kinds = [INTACT, *EDGES]
    figure, axes = new_axes(title, "readable bits of a turn", size=(7, 3.8))
    looks = {
        "": {"color": COLOURS[0], "label": "these edges"},
        MATCHED: {"color": COLOURS[1], "mfc": "white", "label": "others of as much attention"},
        RANDOM: {"color": "0.4", "mfc": "white", "label": "as many random ones"},
    }
    for number, (prefix, look) in enumerate(looks.items()):
        names = [kind for kind in kinds if prefix + kind in set(rows["of"])]
        mine = rows.set_index("of").loc[[prefix + name for name in names]]
        at = [kinds.index(name) + 0.22 * number for name in names]
        draw_points(axes, at, mine, lying=True, ms=5, **look)
    figure.legend(loc="outside lower center", ncols=3)
    axes.axvline(0, color="0.3", lw=0.8)
    list_names(axes, kinds)
    return figure


def by_window(estimates: pd.DataFrame, title: str) -> Figure:
    """Readable bits lost, by the middle of the window, side by side for the kinds of edges."""
    lost = estimates[estimates["quantity"] == LOST]
    rows = lost[_windows(lost)]
    figure, axes = new_axes(title, "middle of the window of layers", "readable bits lost")
    for number, (colour, (of, mine)) in enumerate(coloured(rows, "of")):
        at = (mine["first"] + mine["last"]) / 2 + 0.4 * (number - (len(EDGES) - 1) / 2)
        draw_points(axes, at, mine, color=colour, label=of, ms=4)
    axes.axhline(0, color="0.3", lw=0.8)
    figure.legend(loc="outside lower center", ncols=3)
    return figure
