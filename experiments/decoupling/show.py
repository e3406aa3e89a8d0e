"""Pictures: accuracy against follow-up rate, and the rate after right and after wrong responses.

The estimates as tables in a terminal.
"""

from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.common.screen import WIDTH, label, print_notes, print_table
from experiments.decoupling.analyse import DIFFERENCE, EVERY, RANK
from ia_mech.display import COLOURS, console, title_axes

NAMES = ("model", "dataset", "of")


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print what there is: accuracy, follow-up rates and their association, models, notes."""
    screen = console(WIDTH)
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


MARKERS = "osD^vP*X<>"  # of models; after ten they begin again


def scatter(estimates: pd.DataFrame, title: str) -> Figure:
    """Accuracy against follow-up rate, a panel per temperature.

    A colour per dataset, a marker per model; bars are the intervals of both.
    """
    every = estimates[(estimates["of"] == EVERY) & (estimates["model"] != "")]
    accuracy = every[every["quantity"] == "accuracy"].set_index(["model", "dataset"])
    rates = every[every["quantity"] == "follow-up rate"]
    models, datasets = (sorted(rates[name].unique()) for name in ("model", "dataset"))
    markers = dict(zip(models, cycle(MARKERS), strict=False))
    colours = dict(zip(datasets, cycle(COLOURS), strict=False))
    panels = list(rates.groupby("temperature"))
    figure, places = _panels(len(panels))
    for axes, (temperature, rows) in zip(places, panels, strict=True):
        for row in rows.itertuples():
            across = accuracy.loc[(row.model, row.dataset)]
            axes.errorbar(
                across["value"],
                row.value,
                xerr=_reach(across["value"], across["low"], across["high"]),
                yerr=_reach(row.value, row.low, row.high),
                fmt=markers[row.model],
                ms=5,
                lw=1,
                color=colours[row.dataset],
            )
        axes.set(xlim=_limits(accuracy), ylim=_limits(rates), xlabel="accuracy")
        title_axes(axes, "greedy" if temperature == 0 else f"T = {temperature:g}")
    places[0].set_ylabel("follow-up rate")
    handles = [Line2D([], [], color=colours[name], lw=3, label=name) for name in datasets]
    if len(models) > 1:
        handles += [
            Line2D([], [], color="0.3", ls="", marker=markers[name], label=name) for name in models
        ]
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside right upper")
    figure.suptitle(title, fontsize=10)
    return figure


def association(estimates: pd.DataFrame, title: str) -> Figure:
    """Follow-up rate after right (filled) and after wrong (hollow) responses, by temperature."""
    every = estimates[(estimates["of"] == EVERY) & (estimates["model"] != "")]
    parts = list(dict.fromkeys(zip(every["dataset"], every["model"], strict=True)))
    figure, panels = _panels(len(parts))
    for axes, (dataset, model) in zip(panels, parts, strict=True):
        own = every[(every["dataset"] == dataset) & (every["model"] == model)]
        temperatures = sorted(own["temperature"].dropna().unique())
        for kind, face, shift in (("right", "#0072B2", -0.1), ("wrong", "white", 0.1)):
            rows = own[own["quantity"] == f"follow-up rate, {kind}"]
            axes.errorbar(
                [temperatures.index(t) + shift for t in rows["temperature"]],
                rows["value"],
                yerr=_reach(rows["value"], rows["low"], rows["high"]),
                fmt="o",
                color="#0072B2",
                mfc=face,
                lw=1,
                label=f"after {kind} responses",
            )
        names = [label(t, "temperature") for t in temperatures]
        axes.set_xticks(range(len(names)), names)
        axes.set(ylim=(-0.03, 1.03), xlabel="temperature")
        title_axes(axes, f"{dataset}\n{model}")
    panels[0].set_ylabel("follow-up rate")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        frameon=False,
        fontsize=8,
        loc="outside right upper",
    )
    figure.suptitle(title, fontsize=10)
    return figure


def _limits(rows: pd.DataFrame) -> tuple[float, float]:
    """From just below 0 to just above the highest end of an interval."""
    top = float(rows[["value", "high"]].max(axis=None))
    return -0.03 * top, 1.03 * top if top > 0 else 1.0


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    lines = -(-count // columns)
    figure = Figure(figsize=(1 + 2.6 * columns, 0.6 + 3 * lines), layout="constrained")
    made = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for spare in made[count:]:
        spare.remove()
    return figure, list(made[:count])


def _reach(value, low, high) -> np.ndarray:
    """``[2, n]`` lengths of error bars; 0 where there is no interval."""
    value, low, high = (np.atleast_1d(np.asarray(part, dtype=float)) for part in (value, low, high))
    return np.nan_to_num(np.clip([value - low, high - value], 0, None))
