"""The estimates as tables in a terminal."""

import pandas as pd

from experiments.common.screen import console, print_notes, print_table
from experiments.decoupling.tables import DIFFERENCE, RANK

NAMES = ("model", "dataset", "of")


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print what there is: accuracy, follow-up rates and their association, models, notes."""
    screen = console()
    percent = f"{100 * level:g}% intervals over sources"
    accuracy = {
        "accuracy": ("accuracy", 2),
        "accuracy, loose": ("loose", 2),
        "unverified": ("unverified", 2),
        "cut off": ("cut off", 2),
    }
    print_table(screen, f"the model's own responses ({percent})", estimates, accuracy, index=NAMES)
    single = {
        "instructions followed": ("followed", 2),
        "instructions followed, loosely": ("loosely", 2),
    }
    print_table(screen, f"single instructions ({percent})", estimates, single, index=NAMES)
    rates = {
        "follow-up rate": ("follow-up rate", 2),
        "follow-up rate, right": ("after right ones", 2),
        "follow-up rate, wrong": ("after wrong ones", 2),
        DIFFERENCE: ("right less wrong", 2),
        "AUROC of being right": ("AUROC", 2),
    }
    title = f"user turns after them ({percent}; p Holm-corrected)"
    print_table(screen, title, estimates, rates, index=(*NAMES, "temperature"))
    over = {RANK: ("Kendall's τ-b, accuracy and follow-up rate", 2)}
    title = f"over models ({percent})"
    print_table(screen, title, estimates, over, index=("dataset", "of", "temperature"))
    print_notes(screen, notes)
