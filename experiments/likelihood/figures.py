"""Pictures of the estimates: tempered likelihood, and what a follow-up owes to the response."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.common.figures import coloured, head


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
    head(axes, title)
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
    head(axes, title)
    return figure
