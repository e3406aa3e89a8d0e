"""Pictures of the estimates: tempered likelihood, and what a follow-up owes to the response.

The estimates as tables in a terminal.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.common.screen import WIDTH, print_notes, print_table
from ia_mech.display import coloured, console, title_axes

BY_KIND = ("dataset", "of")


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print what there is: references, contrasts, rivals, generations, notes."""
    screen = console(WIDTH)
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


def temperature_curve(estimates: pd.DataFrame, title: str) -> Figure:
    """Mean log-probability of real follow-ups by temperature, a line per dataset."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    curves = estimates[estimates["quantity"] == "tempered log p"]
    for colour, (dataset, rows) in coloured(curves, "dataset"):
        axes.plot(rows["temperature"], rows["value"], color=colour, marker="o", ms=3, label=dataset)
        axes.fill_between(
            rows["temperature"], rows["low"], rows["high"], color=colour, alpha=0.15, lw=0
        )
        best = estimates[
            (estimates["quantity"] == "best temperature") & (estimates["dataset"] == dataset)
        ]["value"].iloc[0]
        axes.axvline(best, color=colour, lw=0.8, ls=":")
    # The cold end runs to minus thousands; what matters is around the maximum.
    top = curves["high"].max()
    floor = curves[curves["temperature"].between(0.5, 2.0)]["low"].min()
    if np.isfinite([top, floor]).all() and floor < top:
        axes.set_ylim(floor, top + 0.05 * (top - floor))
    axes.set_xlabel("temperature (dotted: the best of the grid)")
    axes.set_ylabel("log p of the real follow-up, nats")
    axes.legend(frameon=False, fontsize=8)
    title_axes(axes, title)
    return figure


def contrasts(estimates: pd.DataFrame, title: str) -> Figure:
    """Bits that real follow-ups gain from the response, against each thing put in its place.

    Hollow: the same for another conversation's follow-up, the control.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    own = estimates[estimates["quantity"] == "contrast, bits"]
    control = estimates[estimates["quantity"] == "control's contrast, bits"]
    kinds = list(dict.fromkeys(own["of"]))
    datasets = list(dict.fromkeys(own["dataset"]))
    for number, (colour, (dataset, rows)) in enumerate(coloured(own, "dataset")):
        middle = (number - (len(datasets) - 1) / 2) * 0.8 / max(len(datasets), 2)
        hollow = control[control["dataset"] == dataset]
        for part, face, label in ((rows, colour, dataset), (hollow, "white", None)):
            value = part["value"].to_numpy()
            reach = np.abs(part[["low", "high"]].to_numpy().T - value)
            axes.errorbar(
                value,
                [kinds.index(of) + middle for of in part["of"]],
                xerr=np.nan_to_num(reach),
                fmt="o",
                ms=4,
                color=colour,
                mfc=face,
                lw=1.2,
                label=label,
            )
    axes.axvline(0, color="0.3", lw=0.8)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlabel("bits in favour of the context's own response (hollow: another's follow-up)")
    axes.legend(frameon=False, fontsize=8)
    title_axes(axes, title)
    return figure
