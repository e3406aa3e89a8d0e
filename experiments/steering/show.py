"""Steering in the terminal and as figures."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from experiments.steering.analyse import (
    ADDED,
    BEYOND,
    BITS,
    COST,
    DEGENERATE,
    DISTINCT,
    ENDED,
    EXCESS,
    EXPECTED,
    KL,
    LOGP,
    ODDS,
    RANK,
    RATE,
    RISE,
    WRONG,
    of_arm,
)
from experiments.steering.controls import ALIKE, DONORS, PATCHED, RANDOM, SHUFFLES
from experiments.steering.read import REPORTING, Read
from experiments.tables import print_plan, tables_of
from ia_mech.display import COLOURS, draw_line, draw_points, list_names, new_axes
from ia_mech.estimates import p_value, together
from ia_mech.results import Table, cell_of
from ia_mech.steering import SteeringVector

SIGNIFICANT = 0.05
SCORED = {
    KL: ("KL", 3),
    ODDS: ("log-odds", 2),
    LOGP: ("log p a token", 3),
    EXPECTED: ("first token's rate", 3),
    ENDED: ("turn-end", 3),
    BITS: ("readable bits", 2),
    WRONG: ("wrong way", 2),
    BEYOND: ("beyond control", 2),
}
SAMPLED = {
    RATE: ("rate", 2),
    RISE: ("change", 2),
    EXCESS: ("excess", 2),
    DEGENERATE: ("degenerate", 2),
    DISTINCT: ("distinct pairs", 2),
    COST: ("unsteered log p", 2),
}
LIMITS = (
    "A steered model is another model: that turns change along a direction shows that it can move "
    "them, not that the model uses it. Random directions of the same KL show what any push does."
)


def plan(read: Read, vector: SteeringVector, arms: int, directions: int, samples: int) -> None:
    """What will be computed: sources, arms and tokens.

    Args:
        read: the queries.
        vector: along which the model is steered.
        arms: doses and ablation, whose turns are scored after all contexts of their query.
        directions: random ones, at a dose of each sign; their turns, and those of other controls,
            are scored after their own context.
        samples: turns sampled per context.
    """
    crossed = own = contexts = 0
    for query in read.queries:
        tokens = sum(len(turn.ids) for turn in query.turns)
        crossed += tokens * len(query.contexts)
        if query.half == REPORTING:
            own += tokens
            contexts += len(query.contexts)
    others = len(PATCHED) * DONORS + SHUFFLES + 3
    controls = 2 * directions + others if directions else 0
    sampled = contexts * (samples + 1) * (samples > 0)
    lines = {
        "sources": f"{len(read.queries)}, half of them to choose the dose",
        "steered": f"layer {vector.layer} at {', '.join(vector.positions)}",
        "arms": f"{arms}, and at most {controls} controls",
        "tokens to compute": f"{crossed * arms + own * controls}, from layer {vector.layer} on",
        "turns to sample": f"{sampled} under each of the arms that are sampled",
    }
    print_plan(lines)


def tables(estimates: pd.DataFrame, dose: float, level: float) -> list[Table]:
    """Doses, controls and sampled turns."""
    found = together(estimates)
    found = found[found["half"] == REPORTING]
    intervals = f"{100 * level:g}% intervals over sources, on the half that didn't choose the dose"
    scored = found[found["quantity"].isin(SCORED) & ~found["of"].isin(ALIKE)]
    title = f"what steering changes, by dose ({intervals}; {dose:g} was chosen)"
    made = tables_of(title, scored, SCORED, index=("of", "dose"))
    several = found[found["of"].isin(ALIKE)]
    first = several[(several["of"] != RANDOM) | (several["draw"] < 3)]
    title = "other directions, of the same KL in the half that chose (of random ones, three)"
    made += tables_of(title, first, SCORED, index=("of", "draw", "dose"))
    sampled = found[found["quantity"].isin(SAMPLED)]
    title = "sampled turns, by the rules judge"
    return made + tables_of(title, sampled, SAMPLED, index=("of", "dose"))


def verdict(estimates: pd.DataFrame, dose: float, outcome: str) -> str:
    """What was found, in one sentence."""
    found = together(estimates)
    kl = of_arm(found, KL, ADDED, dose).iloc[0]
    odds = of_arm(found, ODDS, ADDED, dose)
    if odds.empty:
        return (
            f"With dose {dose:g} the KL at the header is {cell_of(kl, 3)}; without verdicts, what "
            "that does to the turns isn't told."
        )
    beyond, rank = of_arm(found, BEYOND, ADDED, dose), of_arm(found, RANK, ADDED, dose)
    head = f"{cell_of(odds.iloc[0])} nats at dose {dose:g} (KL {kl['value']:.3f})"
    if beyond.empty:
        return f"Steering changes the log-odds of {outcome} turns by {head}; without controls."
    more, reached = beyond.iloc[0], rank.iloc[0]
    clear = more["p"] <= SIGNIFICANT and reached["p"] <= SIGNIFICANT and more["value"] > 0
    said = "Steering makes" if clear else "It isn't shown that steering makes"
    count = int(reached["rows"])
    return (
        f"{said} {outcome} turns likelier than random directions of the same KL do: their log-odds "
        f"change by {head}, {cell_of(more)} beyond the mean of {count} random ones, of which "
        f"{round(reached['value'] * count)} reach it "
        f"({p_value(reached['p'])})."
    )


def control(estimates: pd.DataFrame) -> str:
    """What the controls change, in one sentence."""
    found = together(estimates)
    said = []
    for of in ALIKE:
        values = of_arm(found, ODDS, of)[lambda rows: rows["dose"] >= 0]["value"]
        if len(values):
            most = f" (at most {values.max():.2f})" if len(values) > 1 else ""
            said.append(f"{of} {values.mean():.2f}{most}")
    return f"change of the log-odds under controls: {', '.join(said)}" if said else ""


def figures(estimates: pd.DataFrame, doses: Sequence[float], model: str) -> dict[str, Figure]:
    """The figures by the stem of their files; ``doses`` are those chosen, the first above 0."""
    found = together(estimates)
    quantity = ODDS if len(of_arm(found, ODDS, ADDED)) else KL
    made = {"doses": by_dose(found, quantity, doses, f"{model} · steering by dose")}
    if any(len(of_arm(found, ODDS, of)) for of in ALIKE):
        title = f"{model} · other directions of the same KL"
        made["controls"] = by_control(found, doses[0], title)
    return made


def by_dose(estimates: pd.DataFrame, quantity: str, doses: Sequence[float], title: str) -> Figure:
    """A quantity by dose, with random directions at the chosen ones."""
    figure, axes = new_axes(title, "dose, in norms of the state", f"{quantity}, nats")
    rows = of_arm(estimates, quantity, ADDED).sort_values("dose")
    draw_line(axes, rows["dose"], rows, COLOURS[0], "direction")
    drawn = of_arm(estimates, quantity, RANDOM)
    if len(drawn):
        at = [next(dose for dose in doses if dose * own > 0) for own in drawn["dose"]]
        axes.plot(at, drawn["value"], "_", color="0.4", ms=8, label="random, same KL")
    axes.axhline(0, color="0.3", lw=0.8)
    axes.legend()
    return figure


def by_control(estimates: pd.DataFrame, dose: float, title: str) -> Figure:
    """The change of the log-odds under the chosen dose and every control."""
    rows = [("direction", of_arm(estimates, ODDS, ADDED, dose))]
    alike = estimates[estimates["dose"] >= 0]
    rows += [(of, found) for of in ALIKE if len(found := of_arm(alike, ODDS, of))]
    figure, axes = new_axes(title, f"{ODDS}, nats", size=(7, 3))
    for at, (_, found) in enumerate(rows):
        if len(found) > 1:  # draws of one kind: their intervals would hide each other
            axes.plot(found["value"], [at] * len(found), "|", color="0.4", ms=9)
        else:
            draw_points(axes, [at], found, lying=True, color=COLOURS[0] if not at else "0.4")
    axes.axvline(0, color="0.3", lw=0.8)
    list_names(axes, [of for of, _ in rows])
    return figure
