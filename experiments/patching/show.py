"""Patching in the terminal and as figures."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape

from experiments.given_turns import places_of
from experiments.patching.analyse import BY_TOKEN, CHANGE, DISTANCE, LESS, TAU
from experiments.patching.patch import (
    ALL_LAYERS,
    ARMS,
    BEFORE_TAIL,
    BOTH,
    CONTROLS,
    HEADER,
    INTERCHANGE,
    TAIL,
    Design,
)
from experiments.patching.read import Pair
from experiments.tables import cell, print_plan, print_table
from ia_mech.display import coloured, draw_line, new_axes
from ia_mech.engine.plan import PREFILL_COST, RESCORE_COST
from ia_mech.estimates import together

MOST = 5  # cells shown
SIGNIFICANT = 0.05
LIMITS = (
    "Header states are moved while the turn still attends to the response: a small τ shows that "
    "the turn doesn't need them, not that they hold nothing (header after nothing: what they tell "
    "by themselves); a large one shows that the turn follows them against the response."
)


def plan(pairs: Sequence[Pair], design: Design, depth: int) -> None:
    """What will be computed: passes, tokens and time.

    Args:
        pairs: of all queries.
        design: of the patching.
        depth: layers of the model, or 0 if that isn't known.
    """
    cost, prefilled, computed = 0.0, 0, 0
    for pair in pairs:
        contexts = [c for c in (pair.a, pair.b, pair.same, pair.other) if c is not None]
        prefilled += sum(len(context.ids) for context in contexts)
        places = places_of(pair.a).values()
        tail = len(pair.a.ids) - min(places)
        tokens = sum(tail + len(turn) for turn in pair.turns)
        kinds = len(CONTROLS) * len(design.controls)
        singles = [layer for layer, _ in design.cells]
        singles += [layer for layer, _ in design.controls] * len(CONTROLS)
        whole = (len(ARMS) + len(places)) * design.arms
        computed += tokens * (len(design.cells) + kinds + whole)
        share = sum(1 - layer / max(depth, 1) for layer in singles) + whole
        cost += RESCORE_COST * tokens * share
    cost += PREFILL_COST * prefilled
    lines = {
        "queries": f"{len(pairs)}, a pair of responses each",
        "interchanges": f"{len(design.cells)} cells, {len(design.controls)} with controls",
        "tokens to prefill": str(prefilled),
        "tokens to compute": f"{computed}, from the patched layer on",
    }
    print_plan(lines, cost)


def tables(to: Console, estimates: pd.DataFrame, level: float, same: float, own: float) -> None:
    """Arms, the strongest cells with their controls, and the verdict.

    Args:
        to: where to.
        estimates: all.
        level: coverage of the intervals.
        same: largest difference of the run with response and header of B from B's run, in nats.
        own: largest difference that a run's own states make, in nats.
    """
    title = f"share of the reaction that follows the states ({100 * level:g}% intervals)"
    columns: dict[str, tuple[str, int | str]] = {TAU: ("τ", 3), CHANGE: ("identification", 2)}
    arms = estimates[estimates["of"].isin([*ARMS, ALL_LAYERS]) & (estimates["of"] != BOTH)]
    print_table(to, title, arms, columns, index=("dataset", "of", "position"))
    found = together(estimates)
    cells = found[(found["of"] == INTERCHANGE) & (found["quantity"] == TAU)]
    best = cells.sort_values("value", ascending=False).head(MOST)
    controls = found[found["of"].isin(CONTROLS)]
    kept = pd.concat([found[found["of"] == INTERCHANGE], controls])
    keys = set(zip(best["layer"], best["position"], strict=True))
    shown = kept[[key in keys for key in zip(kept["layer"], kept["position"], strict=True)]]
    columns = {TAU: ("τ", 3), CHANGE: ("identification", 2), DISTANCE: ("distance", 2)}
    index = ("layer", "position", "of")
    shown = shown.sort_values(["layer", "position"], kind="stable")
    print_table(to, "the largest τ of single states", shown, columns, index=index)
    if len(controls):
        largest = controls[(controls["quantity"] == TAU)].groupby("of", sort=False)["value"]
        worst = largest.agg(lambda values: values.abs().max())
        said = ", ".join(f"{of} {value:.3f}" for of, value in worst.items())
        to.print(f"controls, largest |τ| at a cell: {escape(said)}", soft_wrap=True)
    to.print(
        f"checks: response and header of B equal B's run to {same:.1e} nats a token; a run's own "
        f"states change {own:.1e}.",
        soft_wrap=True,
    )
    to.print(LIMITS, soft_wrap=True)


def verdict(estimates: pd.DataFrame) -> str:
    """What was found, in one sentence."""
    found = together(estimates)
    tau = found[found["quantity"] == TAU]
    cells = tau[tau["of"] == INTERCHANGE]
    if cells["value"].isna().all():
        return (
            "The turns aren't likelier after the response that they followed than after another: "
            "there is nothing to share out."
        )
    best = cells.loc[cells["value"].idxmax()]
    clear = int((cells["p"] <= SIGNIFICANT).sum())
    header, tail, before = (tau[tau["of"] == of].iloc[0] for of in (HEADER, TAIL, BEFORE_TAIL))
    less = found[found["quantity"] == LESS].iloc[0]
    said = "Whether more of the reaction passes through the header or past it isn't told apart"
    if less["p"] <= SIGNIFICANT:
        through, past = ("through", "past") if less["value"] > 0 else ("past", "through")
        said = f"More of the reaction passes {through} the header than {past} it"
    return (
        f"{said}: τ is {cell(header)} with all header states, {cell(tail)} with these, turn "
        f"end and separator, {cell(before)} with the response alone, and at most {cell(best)} with "
        f"one state (layer {best['layer']}, {best['position']}); {clear} of {len(cells)} differ "
        "from 0."
    )


def control(estimates: pd.DataFrame) -> str:
    """What the strongest state's τ is held against, in one sentence; empty if there is no τ."""
    found = together(estimates)
    tau = found[found["quantity"] == TAU]
    cells = tau[tau["of"] == INTERCHANGE]
    if cells["value"].isna().all():
        return ""
    best = cells.loc[cells["value"].idxmax()]
    there = (tau["layer"] == best["layer"]) & (tau["position"] == best["position"])
    held = tau[tau["of"].isin(CONTROLS) & there]
    near = [row["of"] for _, row in held.iterrows() if not best["low"] > np.fmax(row["high"], 0)]
    said = "exceeds those of all controls at that place"
    if near:
        said = f"is not shown to exceed that of {', nor of '.join(near)} (intervals overlap)"
    each = ", ".join(f"{row['of']} {cell(row)}" for _, row in held.iterrows())
    return f"The largest τ of one state {said}: {each}."


def figures(estimates: pd.DataFrame, model: str) -> dict[str, Figure]:
    """The figures by the stem of their files."""
    found = together(estimates)
    return {
        "map": tau_map(found, f"{model} · τ of single states"),
        "tokens": by_token(found, f"{model} · τ of the first tokens"),
    }


def tau_map(estimates: pd.DataFrame, title: str) -> Figure:
    """τ by layer and position; a dot where it differs from 0 over the whole map."""
    rows = estimates[(estimates["of"] == INTERCHANGE) & (estimates["quantity"] == TAU)]
    positions = list(dict.fromkeys(rows["position"]))
    layers = sorted(set(rows["layer"]))
    values, clear = np.full((2, len(layers), len(positions)), np.nan)
    for row in rows.itertuples():
        at = layers.index(row.layer), positions.index(row.position)
        values[at], clear[at] = row.value, row.p <= SIGNIFICANT
    size = 1.6 + 0.9 * len(positions), 5
    figure, axes = new_axes(title, "position", "layer (0 = embeddings)", size)
    reach = max(float(np.nan_to_num(np.abs(values)).max()), 1e-3)
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap="RdBu_r", vmin=-reach, vmax=reach
    )
    figure.colorbar(image, ax=axes, label="τ, share of the reaction (dot: differs from 0)")
    up, across = np.nonzero(clear == 1)
    axes.plot(across, up, "k.", ms=4)
    axes.set_xticks(range(len(positions)), positions, rotation=45, ha="right")
    step = max(1, len(layers) // 8)
    axes.set_yticks(range(0, len(layers), step), layers[::step])
    return figure


def by_token(estimates: pd.DataFrame, title: str) -> Figure:
    """τ of turns that are cut after so many tokens, a line per arm."""
    figure, axes = new_axes(title, "tokens of the turn", "τ (share of the reaction)")
    for colour, (of, mine) in coloured(estimates[estimates["quantity"] == BY_TOKEN], "of"):
        draw_line(axes, mine["token"], mine, colour, of)
    axes.axhline(0, color="0.3", lw=0.8)
    axes.axhline(1, color="0.3", lw=0.8, ls=":")
    axes.set_ylim(-0.5, 1.5)
    axes.legend()
    return figure
