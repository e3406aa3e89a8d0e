"""The estimates as tables in a terminal."""

import pandas as pd

from experiments.common.estimates import together
from experiments.common.screen import console, print_notes, print_table
from experiments.temperature_sweep.tables import FAILURE, LESS, LESS_OTHERS, RATE
from ia_mech.judge.rubric import ASSESSED, GENUINE, heading

BY_TEMPERATURE = ("dataset", "temperature")
SHOWN = (0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0)  # of the curve; the file has them all


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print what there is: rates, failures, first token, hidden turns, references, lens, notes."""
    screen = console()
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
