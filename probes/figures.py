"""Figures of an analysis: a heat map over layers and positions, and a curve over layers.

They are made without pyplot, so that a caller's own figures and settings stay as they are.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ia_mech.cli import one_line
from ia_mech.display import COLOURS, draw_line, new_axes, with_style
from ia_mech.run.queries import conversations_text
from probes.analysis import Analysis
from probes.fit.folds import LEVEL

PALE = 0.3  # opacity of cells that aren't significant
REACH = 0.3  # of the colour map on either side of 0.5; the same in all figures, to compare them

BLUE, VERMILION, *_ = COLOURS
_CONTROLS: dict[str, dict[str, Any]] = {
    "output": {"color": VERMILION},
    "text": {"color": "0.35", "ls": "--"},
}


# -- heat map -------------------------------------------------------------------------------------


@with_style
def heat_map(analysis: Analysis, title: str) -> Figure:
    """AUROC by layer (upwards) and position.

    Cells whose family-wise p value is above 0.05 are pale. Dots mark the confidence set of the best
    cells, and a frame marks the cell that the rule chooses on all contexts.
    """
    values = np.array([[cell.value for cell in row] for row in analysis.auroc])
    layers, positions = values.shape
    height = 2.3 + min(0.19 * layers, 9)
    size, head = (
        (max(5.4, 2.6 + 0.85 * positions), height),
        f"{one_line(title)}\n{_facts(analysis)}",
    )
    figure, axes = new_axes(head, "position", "layer (0 = embeddings)", size)
    clear = np.where(analysis.tested.p_family <= LEVEL, 1, PALE)
    look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": 0.5 - REACH, "vmax": 0.5 + REACH}
    axes.imshow(values, origin="lower", aspect="auto", alpha=clear, **look)
    axes.set_facecolor("0.85")  # cells without a value
    colours = ScalarMappable(Normalize(look["vmin"], look["vmax"]), look["cmap"])
    look = {"pad": 0.03, "fraction": 0.06, "aspect": 5 * height}
    bar = figure.colorbar(colours, ax=axes, extend="both", **look)
    bar.set_label("AUROC (0.5 = chance)")
    bar.outline.set_linewidth(0.7)
    names = [one_line(name, 24) for name in analysis.positions]
    axes.set_xticks(range(positions), names, rotation=30, ha="right", rotation_mode="anchor")
    ticks = range(0, layers, -(-layers // 20))
    axes.set_yticks(ticks, [str(analysis.layers[at]) for at in ticks])
    axes.tick_params(length=2)
    _mark_cells(figure, axes, analysis, clear * (values - 0.5))
    figure.set_label(
        "Each cell is a probe at one layer and position. The redder the cell, the better the probe "
        "ranks conversations that it wasn't trained on; white is guessing. Pale cells aren't shown "
        "to be better than guessing."
    )
    return figure


def _mark_cells(figure: Figure, axes: Axes, analysis: Analysis, depth: np.ndarray) -> None:
    """Draw dots, frame and legend. ``depth`` says how dark each cell is."""
    for i, j in np.argwhere(analysis.among_best):
        ink = "white" if abs(depth[i, j]) > 0.62 * REACH else "black"
        axes.plot(j, i, "o", color=ink, markersize=3)
    layer, position = analysis.headline.layer, analysis.headline.position
    corner = analysis.positions.index(position) - 0.5, analysis.layers.index(layer) - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=2, clip_on=False, zorder=3))
    marks: dict[str, Artist] = {
        f"chosen on all conversations: {one_line(f'layer {layer}, {position}', 40)}": Patch(
            fill=False, edgecolor="black", linewidth=2
        ),
        f"{100 * analysis.settings.level:g}% confidence set of the best": Line2D(
            [], [], marker="o", color="black", markersize=3, linestyle="none"
        ),
        "pale: family-wise p > 0.05": Patch(facecolor=to_rgba("C3", PALE)),
    }
    look: dict[str, Any] = {"ncols": 1, "frameon": False, "handlelength": 1.2}
    figure.legend(marks.values(), marks.keys(), loc="outside lower center", **look)


def _facts(analysis: Analysis) -> str:
    """A line that says how much data and how many permutations the numbers come from."""
    return (
        f"{conversations_text(len(analysis.outcome), analysis.outcome.source_count)} · "
        f"{analysis.tested.permutations} permutations"
    )


# -- layer curve ----------------------------------------------------------------------------------


@with_style
def layer_curve(analysis: Analysis, title: str) -> Figure:
    """AUROC by layer at the position chosen on all contexts, with the null and the controls on
    output and text.

    The null's band comes from the closed-form probes of the permutation tests, the curve from
    logistic regression.
    """
    headline, tested = analysis.headline, analysis.tested
    at, layers = analysis.positions.index(headline.position), pd.Series(analysis.layers)
    up = f"AUROC at {one_line(headline.position, 24)}"
    head = f"{one_line(title)}\n{_facts(analysis)}"
    figure, axes = new_axes(head, "layer (0 = embeddings)", up, (8, 5))
    null: dict[str, Any] = {"color": "0.85", "lw": 0, "label": "null's 95% quantile (closed form)"}
    axes.fill_between(layers, 0.5, tested.null_quantile[:, at], **null)
    cells = [row[at] for row in analysis.auroc]
    curve = pd.DataFrame([(one.value, one.low, one.high) for one in cells])
    curve.columns = pd.Index(["value", "low", "high"])
    level = f"{100 * analysis.settings.level:g}%"
    draw_line(axes, layers, curve, BLUE, f"each layer by itself, {level} interval")
    # The headline scores the whole selection procedure, so it belongs to no single layer.
    chosen = f"headline (layer and position chosen in each fold): {headline.auroc.text()}"
    across: dict[str, tuple[float, dict[str, Any]]] = {
        chosen: (headline.auroc.value, {"color": "black"}),
        "null's largest, 95% (family-wise)": (tested.family_quantile, {"color": "0.3", "lw": 0.8}),
    }
    for one in analysis.controls:
        if one.control.name in _CONTROLS:  # the others are in the estimates
            look = _CONTROLS[one.control.name]
            across[f"{one.control.name}: {one.auroc.text()}"] = one.auroc.value, look
    for label, (value, look) in across.items():
        axes.axhline(value, label=label, **({"lw": 1.3} | look))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10], integer=True))
    figure.set_label(
        "The black line is the result. Compare it with the controls, which are the other lines, "
        "and with the grey band, which holds 95% of the scores under permuted labels. The blue "
        "dots are the scores of single layers, none of which was selected."
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7.5)
    return figure
