"""Accuracy beside follow-up rate, in the terminal and as figures."""

from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

from experiments.decoupling.analyse import DIFFERENCE, EVERY, RANK
from experiments.tables import label, print_table
from ia_mech.display import COLOURS, title_axes

NAMES = ("model", "dataset", "of")
MARKERS = "osD^vP*X<>"  # of models; after ten they begin again


def tables(console: Console, estimates: pd.DataFrame, level: float) -> None:
    """Print what there is: accuracy, follow-up rates and their association, models."""
    percent = f"{100 * level:g}% intervals over sources"
    accuracy = {
        "accuracy": ("accuracy", 2),
        "accuracy, loose": ("loose", 2),
        "unverified": ("unverified", 2),
        "cut off": ("cut off", 2),
    }
    title = f"the model's own responses ({percent})"
    print_table(console, title, estimates, accuracy, index=NAMES)
    single = {
        "instructions followed": ("followed", 2),
        "instructions followed, loosely": ("loosely", 2),
    }
    print_table(console, f"single instructions ({percent})", estimates, single, index=NAMES)
    rates = {
        "follow-up rate": ("follow-up rate", 2),
        "follow-up rate, right": ("after right ones", 2),
        "follow-up rate, wrong": ("after wrong ones", 2),
        DIFFERENCE: ("right less wrong", 2),
        "AUROC of being right": ("AUROC", 2),
    }
    title = f"user turns after them ({percent}; p Holm-corrected)"
    print_table(console, title, estimates, rates, index=(*NAMES, "temperature"))
    over = {RANK: ("Kendall's τ-b, accuracy and follow-up rate", 2)}
    index = ("dataset", "of", "temperature")
    print_table(console, f"over models ({percent})", estimates, over, index=index)


def figures(estimates: pd.DataFrame, title: str) -> dict[str, Figure]:
    """The figures by the stem of their files."""
    return {"scatter": scatter(estimates, title), "association": association(estimates, title)}


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
            xerr = _reach(across["value"], across["low"], across["high"])
            yerr = _reach(row.value, row.low, row.high)
            look: dict[str, Any] = {"fmt": markers[row.model], "color": colours[row.dataset]}
            axes.errorbar(across["value"], row.value, xerr=xerr, yerr=yerr, ms=5, lw=1, **look)
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
        for kind, face, shift in (("right", COLOURS[0], -0.1), ("wrong", "white", 0.1)):
            rows = own[own["quantity"] == f"follow-up rate, {kind}"]
            at = [temperatures.index(t) + shift for t in rows["temperature"]]
            yerr = _reach(rows["value"], rows["low"], rows["high"])
            look: dict[str, Any] = {"fmt": "o", "color": COLOURS[0], "mfc": face, "lw": 1}
            axes.errorbar(at, rows["value"], yerr=yerr, label=f"after {kind} responses", **look)
        names = [label(t, "temperature") for t in temperatures]
        axes.set_xticks(range(len(names)), names)
        axes.set(ylim=(-0.03, 1.03), xlabel="temperature")
        title_axes(axes, f"{dataset}\n{model}")
    panels[0].set_ylabel("follow-up rate")
    entries = panels[0].get_legend_handles_labels()
    figure.legend(*entries, frameon=False, fontsize=8, loc="outside right upper")
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
