"""Pictures of what each condition changes."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.common.estimates import together
from experiments.common.figures import COLOURS, coloured, head
from experiments.perturbations.tables import DISTANCE, HELD, LESS, RATE, REFERENCE, SHARE
from ia_mech.judge.rubric import ASSESSED, heading

STYLES = ("-", "--", ":", "-.")
FACES = ("0.3", "white")  # of held rates, and of the others


def _at(temperature: float) -> str:
    return f"T = {temperature:g}" if temperature else "greedy"


def _panels(rows: pd.DataFrame, margin: float) -> tuple[Figure, list[Axes], list[float], list[str]]:
    """A panel per temperature, conditions from top to bottom; ``margin`` in inches beside them."""
    temperatures = sorted(rows["temperature"].unique())
    names = list(dict.fromkeys(rows["condition"]))
    size = 4.2 * len(temperatures) + margin, 0.36 * len(names) + 1.6
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    return figure, list(axes), temperatures, names


def rates(estimates: pd.DataFrame, title: str) -> Figure:
    """Change of the follow-up rate per condition; hollow: judged after what the model was given."""
    pooled = together(estimates)
    rows = pooled[pooled["quantity"].isin([RATE + LESS, HELD + LESS])]
    figure, axes, temperatures, names = _panels(rows, 1)
    for panel, temperature, colour in zip(axes, temperatures, COLOURS, strict=False):
        for quantity, face, shift in ((HELD + LESS, colour, -0.15), (RATE + LESS, "white", 0.15)):
            own = rows[(rows["temperature"] == temperature) & (rows["quantity"] == quantity)]
            reach = np.nan_to_num(
                np.abs(own[["low", "high"]].to_numpy().T - own["value"].to_numpy())
            )
            at = [names.index(name) + shift for name in own["condition"]]
            panel.errorbar(
                own["value"], at, xerr=reach, fmt="o", ms=4, color=colour, mfc=face, lw=1.1
            )
        panel.axvline(0, color="0.3", lw=0.8)
        panel.set_xlabel("change of the follow-up rate")
        head(panel, f"{title} · {_at(temperature)}" if panel is axes[0] else _at(temperature))
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    marks = [Line2D([], [], color="0.3", marker="o", ms=4, mfc=face, lw=0) for face in FACES]
    said = "judged against the unperturbed response (held)", "against what the model was given"
    figure.legend(marks, said, loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure


def profile(estimates: pd.DataFrame, title: str) -> Figure:
    """Shares of the categories per condition, a panel per temperature."""
    pooled = together(estimates)
    rows = pooled[pooled["quantity"] == SHARE]
    figure, axes, temperatures, names = _panels(rows, 2.4)
    for panel, temperature in zip(axes, temperatures, strict=True):
        left = np.zeros(len(names))
        for number, category in enumerate(ASSESSED):
            own = rows[(rows["temperature"] == temperature) & (rows["category"] == category)]
            share = own.set_index("condition")["value"].reindex(names).fillna(0).to_numpy()
            panel.barh(
                names, share, left=left, height=0.75, color=COLOURS[number % len(COLOURS)],
                hatch="" if number < len(COLOURS) else "///", edgecolor="white", lw=0.4,
                label=heading(category),
            )  # fmt: skip
            left += share
        panel.set_xlim(0, 1)
        panel.set_xlabel("share of assessed turns")
        head(panel, f"{title} · {_at(temperature)}" if panel is axes[0] else _at(temperature))
    axes[0].invert_yaxis()
    axes[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def references(estimates: pd.DataFrame, title: str) -> Figure:
    """Bits that real follow-ups lose or gain under each condition, by dataset."""
    rows = estimates[estimates["quantity"] == REFERENCE + LESS]
    names = list(dict.fromkeys(rows["condition"]))
    datasets = list(dict.fromkeys(rows["dataset"]))
    figure = Figure(figsize=(7, 0.42 * len(names) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    for number, (colour, (dataset, own)) in enumerate(coloured(rows, "dataset")):
        shift = (number - (len(datasets) - 1) / 2) * 0.7 / max(len(datasets), 2)
        reach = np.nan_to_num(np.abs(own[["low", "high"]].to_numpy().T - own["value"].to_numpy()))
        at = [names.index(name) + shift for name in own["condition"]]
        axes.errorbar(
            own["value"], at, xerr=reach, fmt="o", ms=3.5, color=colour, lw=1, label=dataset
        )
    axes.axvline(0, color="0.3", lw=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("change of the real follow-up's log p, bits")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    head(axes, title)
    return figure


def displacement(estimates: pd.DataFrame, title: str) -> Figure:
    """How far header_last moves, layer by layer; 1 is as far as another conversation lies."""
    pooled = together(estimates)
    rows = pooled[(pooled["quantity"] == DISTANCE) & (pooled["position"] == "header_last")]
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (colour, (condition, own)) in enumerate(coloured(rows, "condition")):
        layers = own["layer"].astype(int)
        style = STYLES[number // len(COLOURS)]
        axes.plot(layers, own["value"], color=colour, ls=style, lw=1.4, label=condition)
        axes.fill_between(layers, own["low"], own["high"], color=colour, alpha=0.12, lw=0)
    axes.axhline(1, color="0.3", lw=0.8)
    axes.set_xlabel("layer (0 = embeddings)")
    axes.set_ylabel("displacement of header_last\n(1 = between two conversations)")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    head(axes, title)
    return figure
