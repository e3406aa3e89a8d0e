"""The estimates as tables in a terminal."""

import pandas as pd

from experiments.common.screen import console, print_notes, print_table

BY_KIND = ("dataset", "of")


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print what there is: references, contrasts, rivals, generations, notes."""
    screen = console()
    plain = estimates[estimates["temperature"].isna()]
    print_table(
        screen,
        f"the users' real follow-ups ({100 * level:g}% intervals over sources)",
        plain,
        {
            "bits per byte": ("bits / byte", 2),
            "log p per token": ("log p / token", 2),
            "greedy writes it": ("greedy writes it", 2),
            "tokens until greedy leaves": ("greedy tokens", 1),
            "median rank where greedy leaves": ("rank there", 0),
            "best temperature": ("best T", 2),
        },
    )
    bits = {
        "contrast, bits": ("follow-up", 2),
        "control's contrast, bits": ("another's follow-up", 2),
        "contrast less control's, bits": ("difference", 2),
        "placebo's contrast, bits": ("placebo", 2),
    }
    print_table(screen, "bits in favour of the context's own response", plain, bits, index=BY_KIND)
    rank = {
        "likeliest after its response": ("likeliest after its own", 2),
        "likeliest after its response, by chance": ("by chance", 2),
    }
    title = "how often a turn is likelier after its context's response than after any swapped one"
    print_table(screen, title, plain, rank, index=BY_KIND)
    for quantity, title in (
        ("reference beats", "share of contexts where the follow-up is likelier than (whole turn)"),
        ("reference beats per token", "the same per token"),
    ):
        rows = estimates[estimates["quantity"] == quantity]
        rows = rows[rows["temperature"].isna() | (rows["temperature"] == 1.0)]
        names = {of: (of, 2) for of in dict.fromkeys(rows["of"])}
        print_table(screen, title, rows, names, key="of")
    for quantity in (
        "generations' contrast, bits",
        "generations' contrast, bits per token",
        "AUROC of genuine, between sources",
        "AUROC of genuine, within contexts",
    ):
        rows = estimates[estimates["quantity"] == quantity]
        rows = rows[rows["of"].str.startswith("response")]
        names = {of: (of, 2) for of in dict.fromkeys(rows["of"])}
        print_table(screen, quantity, rows, names, key="of", index=("dataset", "temperature"))
    print_notes(screen, notes)
