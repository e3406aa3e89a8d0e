"""The estimates as tables in a terminal."""

from pathlib import Path

import numpy as np
import pandas as pd
from rich.markup import escape

from experiments.common.estimates import together
from experiments.common.screen import console, print_notes, print_table
from experiments.perturbations.base import Base
from experiments.perturbations.tables import DISTANCE, HELD, LESS, RATE, REFERENCE, SHARE
from experiments.perturbations.verdict import verdicts
from ia_mech.cli import one_line
from ia_mech.conversations import USER_HEADER, Conversation
from ia_mech.judge.rubric import ASSESSED, heading

LAYERS = 7  # that are shown; the file has all
SHOWN = 60  # characters of a response, at either end


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print rates, profile, reference likelihood, displacement, the falsifier and notes."""
    screen = console()
    said = f"{100 * level:g}% intervals over sources, Holm-corrected p"
    print_table(
        screen,
        f"follow-up rate by condition ({said})",
        estimates,
        {
            RATE: ("rate", 3),
            RATE + LESS: ("Δ", 3),
            HELD: ("held against the unperturbed response", 3),
            HELD + LESS: ("Δ held", 3),
        },
        index=("dataset", "temperature", "condition"),
    )
    pooled = together(estimates)
    print_table(
        screen,
        "failure profile: shares of assessed turns, all datasets",
        pooled[pooled["quantity"] == SHARE],
        {category: (heading(category), 2) for category in ASSESSED},
        key="category",
        index=("temperature", "condition"),
    )
    print_table(
        screen,
        "the users' real follow-ups after each condition (T = 1)",
        estimates,
        {REFERENCE: ("log p, bits", 1), REFERENCE + LESS: ("Δ, bits", 1)},
        index=("dataset", "condition"),
    )
    moved = pooled[(pooled["quantity"] == DISTANCE) & (pooled["position"] == "header_last")]
    if not moved.empty:
        last = int(moved["layer"].max())
        chosen = np.unique(np.linspace(0, last, LAYERS).round().astype(int))
        print_table(
            screen,
            "displacement of header_last by layer (1 = mean distance between two conversations)",
            moved,
            {int(layer): (f"layer {layer}", 2) for layer in chosen},
            key="layer",
            index=("condition",),
        )
    print_notes(screen, [*verdicts(estimates, level), *notes])


def show_plan(
    conversations: list[Conversation], base: Base, notes: list[str], folder: Path
) -> None:
    """Print what the conditions make of the first conversation, and how much is to be sampled."""
    screen = console()
    first = conversations[0].metadata["unperturbed_id"]
    screen.print(f"[bold]{escape(first)}[/] under each condition")
    for one in conversations:
        if one.metadata["unperturbed_id"] == first:
            header = "" if one.header == USER_HEADER else f" (header: {one.header})"
            response = "" if one.header == "alone" else one_line(one.response)
            if len(response) > 2 * SHOWN:
                response = f"{response[:SHOWN]} … {response[-SHOWN:]}"
            screen.print(f"  {one.perturbation:<20}{escape(response)!s}{header}", soft_wrap=True)
    turns = len(conversations) * len(base.grid.rows())
    screen.print(
        f"{len(conversations)} contexts, {turns} user turns of at most {base.grid.max_new_tokens} "
        f"tokens, to {escape(str(folder))}",
        soft_wrap=True,
    )
    print_notes(screen, notes)
