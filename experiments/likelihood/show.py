"""Likelihood of real follow-ups in the terminal and as figures."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.tables import table_of
from ia_mech.display import coloured, draw_line, draw_points, list_names, new_axes
from ia_mech.results import Table

BY_KIND = ("dataset", "of")


def tables(estimates: pd.DataFrame, level: float) -> list[Table]:
    """What there is: references, contrasts, rivals."""
    plain = estimates[estimates["temperature"].isna()]
    found = table_of(
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
    title = "bits in favour of the context's own response"
    found += table_of(title, plain, bits, index=BY_KIND)
    rank = {
        "likeliest after its response": ("likeliest after its own", 2),
        "likeliest after its response, by chance": ("by chance", 2),
    }
    title = "how often a turn is likelier after its context's response than after any swapped one"
    found += table_of(title, plain, rank, index=BY_KIND)
    at_one = estimates[estimates["temperature"].isna() | (estimates["temperature"] == 1.0)]
    for quantity, title in (
        ("reference beats", "share of contexts where the follow-up is likelier than (whole turn)"),
        ("reference beats per token", "the same per token"),
    ):
        rows = at_one[at_one["quantity"] == quantity]
        rivals: dict[str, tuple[str, int | str]] = {of: (of, 2) for of in dict.fromkeys(rows["of"])}
        found += table_of(title, rows, rivals, key="of")
    return found


def figures(estimates: pd.DataFrame, model: str) -> dict[str, Figure]:
    """The figures by the stem of their files."""
    made = {"temperature_curve": temperature_curve(estimates, f"{model} · real follow-ups")}
    if (estimates["quantity"] == "contrast, bits").any():
        title = f"{model} · bits in favour of the own response"
        made["contrasts"] = contrasts(estimates, title)
    return made


def temperature_curve(estimates: pd.DataFrame, title: str) -> Figure:
    """Mean log-probability of real follow-ups by temperature, a line per dataset."""
    across = "temperature (dotted: the best of the grid)"
    figure, axes = new_axes(title, across, "log p of the real follow-up, nats", (7, 4.2))
    curves = estimates[estimates["quantity"] == "tempered log p"]
    for colour, (dataset, rows) in coloured(curves, "dataset"):
        draw_line(axes, rows["temperature"], rows, colour, dataset)
        best = estimates[estimates["quantity"] == "best temperature"].set_index("dataset")["value"]
        axes.axvline(best[dataset], color=colour, lw=0.8, ls=":")
    # The cold end runs to minus thousands; what matters is around the maximum.
    top = curves["high"].max()
    floor = curves[curves["temperature"].between(0.5, 2.0)]["low"].min()
    if np.isfinite([top, floor]).all() and floor < top:
        axes.set_ylim(floor, top + 0.05 * (top - floor))
    axes.legend()
    return figure


def contrasts(estimates: pd.DataFrame, title: str) -> Figure:
    """Bits that real follow-ups gain from the response, against each thing put in its place.

    Hollow: the same for another conversation's follow-up, the control.
    """
    across = "bits in favour of the context's own response (hollow: another's follow-up)"
    figure, axes = new_axes(title, across, size=(7, 4.2))
    own = estimates[estimates["quantity"] == "contrast, bits"]
    control = estimates[estimates["quantity"] == "control's contrast, bits"]
    kinds = list(dict.fromkeys(own["of"]))
    datasets = list(dict.fromkeys(own["dataset"]))
    for number, (colour, (dataset, rows)) in enumerate(coloured(own, "dataset")):
        middle = (number - (len(datasets) - 1) / 2) * 0.8 / max(len(datasets), 2)
        hollow = control[control["dataset"] == dataset]
        for part, face, label in ((rows, colour, dataset), (hollow, "white", None)):
            at = [kinds.index(of) + middle for of in part["of"]]
            draw_points(axes, at, part, lying=True, color=colour, mfc=face, label=label)
    axes.axvline(0, color="0.3", lw=0.8)
    list_names(axes, kinds)
    axes.legend()
    return figure
