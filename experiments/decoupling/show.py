"""Accuracy beside follow-up rate, in the terminal and as figures."""

from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.decoupling.analyse import DIFFERENCE, EVERY, RANK
from experiments.tables import tables_of
from ia_mech.display import COLOURS, draw_points, title_axes
from ia_mech.rates.figures import draw_floor, gate_title
from ia_mech.rates.gate import Gate
from ia_mech.results import Table, label_of

NAMES = ("model", "dataset", "of")
MARKERS = "osD^vP*X<>"  # of models; after ten they begin again


def tables(estimates: pd.DataFrame, level: float) -> list[Table]:
    """What there is: accuracy, follow-up rates and their association, models."""
    percent = f"{100 * level:g}% intervals over sources"
    accuracy = {
        "accuracy": ("accuracy", 2),
        "accuracy, loose": ("loose", 2),
        "unverified": ("unverified", 2),
        "cut off": ("cut off", 2),
    }
    title = f"the model's own responses ({percent})"
    found = tables_of(title, estimates, accuracy, index=NAMES)
    single = {
        "instructions followed": ("followed", 2),
        "instructions followed, loosely": ("loosely", 2),
    }
    found += tables_of(f"single instructions ({percent})", estimates, single, index=NAMES)
    rates = {
        "follow-up rate": ("follow-up rate", 2),
        "follow-up rate, right": ("after right ones", 2),
        "follow-up rate, wrong": ("after wrong ones", 2),
        DIFFERENCE: ("right less wrong", 2),
        "AUROC of being right": ("AUROC", 2),
    }
    title = f"user turns after them ({percent}; p Holm-corrected)"
    found += tables_of(title, estimates, rates, index=(*NAMES, "temperature"))
    over = {RANK: ("Kendall's τ-b, accuracy and follow-up rate", 2)}
    index = ("dataset", "of", "temperature")
    return found + tables_of(f"over models ({percent})", estimates, over, index=index)


def figures(estimates: pd.DataFrame, models: str, gate: Gate) -> dict[str, Figure]:
    """The figures by the stem of their files."""
    made = {"scatter": scatter(estimates, gate), "association": association(estimates, gate)}
    for figure in made.values():
        figure.suptitle(gate_title(models, gate))
    return made


def scatter(estimates: pd.DataFrame, gate: Gate) -> Figure:
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
        for (model, dataset), own in rows.groupby(["model", "dataset"]):
            across = accuracy.loc[[(model, dataset)]]
            look: dict[str, Any] = {"fmt": markers[model], "color": colours[dataset], "ms": 5}
            draw_points(axes, across["value"], own, **look)
            draw_points(axes, own["value"], across, lying=True, **look)
        draw_floor(axes, gate)
        axes.set(xlim=_limits(accuracy), ylim=_limits(rates, gate.floor))
        axes.set_xlabel("accuracy (share of responses)")
        title_axes(axes, "greedy" if temperature == 0 else f"T = {temperature:g}")
    places[0].set_ylabel("follow-up rate (share of turns)")
    handles = places[0].get_legend_handles_labels()[0]  # the floor
    handles += [Line2D([], [], color=colours[name], lw=3, label=name) for name in datasets]
    if len(models) > 1:
        handles += [
            Line2D([], [], color="0.3", ls="", marker=markers[name], label=name) for name in models
        ]
    figure.legend(handles=handles, loc="outside right center")
    return figure


def association(estimates: pd.DataFrame, gate: Gate) -> Figure:
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
            draw_points(axes, at, rows, color=COLOURS[0], mfc=face, label=f"after {kind} responses")
        draw_floor(axes, gate)
        names = [label_of(t, "temperature") for t in temperatures]
        axes.set_xticks(range(len(names)), names)
        axes.set(ylim=(-0.03, 1.03), xlabel="temperature")
        title_axes(axes, f"{dataset}\n{model}")
    panels[0].set_ylabel("follow-up rate (share of turns)")
    entries = panels[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside right center")
    return figure


def _limits(rows: pd.DataFrame, least: float = 0.0) -> tuple[float, float]:
    """From just below 0 to just above the highest end of an interval, and ``least``."""
    top = float(np.fmax(rows[["value", "high"]].max(axis=None), least))
    return -0.03 * top, 1.03 * top if top > 0 else 1.0


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    lines = -(-count // columns)
    figure = Figure(figsize=(1 + 2.6 * columns, 0.6 + 3 * lines), layout="constrained")
    made = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for spare in made[count:]:
        spare.remove()
    return figure, list(made[:count])
