"""What each condition changes, in the terminal and as figures."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.markup import escape

from experiments.perturbations.analyse import DISTANCE, HELD, LESS, RATE, REFERENCE, SHARE
from experiments.perturbations.read import Base
from experiments.tables import tables_of
from ia_mech.cli import one_line
from ia_mech.data.conversations import USER_HEADER, Conversation
from ia_mech.display import (
    COLOURS,
    coloured,
    console,
    draw_line,
    draw_points,
    list_names,
    new_axes,
    title_axes,
)
from ia_mech.estimates import together
from ia_mech.judge.rubric import ASSESSED, heading
from ia_mech.rates.figures import draw_floor, gate_title
from ia_mech.rates.gate import Gate
from ia_mech.results import Table

LAYERS = 7  # that are shown; the file has all
SHOWN = 60  # characters of a response, at either end


def tables(estimates: pd.DataFrame, level: float) -> list[Table]:
    """Rates, profile, reference likelihood and displacement."""
    found = tables_of(
        f"follow-up rate by condition ({100 * level:g}% intervals over sources, Holm-corrected p)",
        estimates,
        {
            RATE: ("rate", 3),
            RATE + LESS: ("Δ", 3),
            HELD: ("held against the unperturbed response", 3),
            HELD + LESS: ("Δ held", 3),
        },
        index=("dataset", "temperature", "condition"),
    )
    pooled = together(estimates)
    found += tables_of(
        "failure profile: shares of assessed turns, all datasets",
        pooled[pooled["quantity"] == SHARE],
        {category: (heading(category), 2) for category in ASSESSED},
        key="category",
        index=("temperature", "condition"),
    )
    found += tables_of(
        "the users' real follow-ups after each condition (T = 1)",
        estimates,
        {REFERENCE: ("log p, bits", 1), REFERENCE + LESS: ("Δ, bits", 1)},
        index=("dataset", "condition"),
    )
    moved = _displacement(estimates)
    if not moved.empty:
        chosen = np.unique(np.linspace(0, int(moved["layer"].max()), LAYERS).round().astype(int))
        found += tables_of(
            "displacement of header_last by layer (1 = mean distance between two conversations)",
            moved,
            {int(layer): (f"layer {layer}", 2) for layer in chosen},
            key="layer",
            index=("condition",),
        )
    return found


def _displacement(estimates: pd.DataFrame) -> pd.DataFrame:
    """Rows of the displacement of ``header_last``, all datasets together."""
    pooled = together(estimates)
    return pooled[(pooled["quantity"] == DISTANCE) & (pooled["position"] == "header_last")]


def plan(conversations: list[Conversation], base: Base, notes: list[str], folder: Path) -> None:
    """Print what the conditions make of the first conversation, and how much is to be sampled."""
    to = console()
    first = conversations[0].metadata["unperturbed_id"]
    to.print(f"[bold]{escape(first)}[/] under each condition")
    for one in conversations:
        if one.metadata["unperturbed_id"] == first:
            header = "" if one.header == USER_HEADER else f" (header: {one.header})"
            response = "" if one.header == "alone" else one_line(one.response or "")
            if len(response) > 2 * SHOWN:
                response = f"{response[:SHOWN]} … {response[-SHOWN:]}"
            to.print(f"  {one.perturbation:<20}{escape(response)!s}{header}", soft_wrap=True)
    turns, most = len(conversations) * len(base.settings.rows()), base.settings.max_new_tokens
    to.print(
        f"{len(conversations)} contexts, {turns} user turns of at most {most} tokens, to "
        f"{escape(str(folder))}",
        soft_wrap=True,
    )
    for note in notes:
        to.print(one_line(note), soft_wrap=True, markup=False)


def figures(estimates: pd.DataFrame, model: str, gate: Gate) -> dict[str, Figure]:
    """The figures by the stem of their files; two of them only where there is something to show."""
    title = gate_title(model, gate)
    made = {"rates": rates(estimates, title), "profile": profile(estimates, title, gate)}
    if (estimates["quantity"] == DISTANCE).any():
        made["displacement"] = displacement(estimates, f"{model} · header_last")
    if (estimates["quantity"] == REFERENCE).any():
        made["references"] = references(estimates, f"{model} · real follow-ups")
    return made


STYLES = ("-", "--", ":", "-.")
FACES = ("0.3", "white")  # of held rates, and of the others


def _panels(
    rows: pd.DataFrame, title: str, margin: float
) -> tuple[Figure, list[Axes], list[float], list[str]]:
    """A panel per temperature, conditions from top to bottom; ``margin`` in inches beside them."""
    temperatures = sorted(rows["temperature"].unique())
    names = list(dict.fromkeys(rows["condition"]))
    size = 4.2 * len(temperatures) + margin, 0.36 * len(names) + 1.6
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    figure.suptitle(title)
    for panel, temperature in zip(axes, temperatures, strict=True):
        title_axes(panel, f"T = {temperature:g}" if temperature else "greedy")
    return figure, list(axes), temperatures, names


def rates(estimates: pd.DataFrame, title: str) -> Figure:
    """Change of the follow-up rate per condition; hollow: judged after what the model was given."""
    pooled = together(estimates)
    rows = pooled[pooled["quantity"].isin([RATE + LESS, HELD + LESS])]
    figure, axes, temperatures, names = _panels(rows, title, 1)
    for panel, temperature, colour in zip(axes, temperatures, COLOURS, strict=False):
        for quantity, face, shift in ((HELD + LESS, colour, -0.15), (RATE + LESS, "white", 0.15)):
            own = rows[(rows["temperature"] == temperature) & (rows["quantity"] == quantity)]
            at = [names.index(name) + shift for name in own["condition"]]
            draw_points(panel, at, own, lying=True, color=colour, mfc=face)
        panel.axvline(0, color="0.3", lw=0.8)
        panel.set_xlabel("change of the follow-up rate (share of turns)")
    list_names(axes[0], names)
    marks = [Line2D([], [], color="0.3", marker="o", ms=4, mfc=face, lw=0) for face in FACES]
    texts = "judged against the unperturbed response (held)", "against what the model was given"
    figure.legend(marks, texts, loc="outside lower center", ncols=2, fontsize=7)
    return figure


def profile(estimates: pd.DataFrame, title: str, gate: Gate) -> Figure:
    """Shares of the categories per condition, a panel per temperature."""
    pooled = together(estimates)
    rows = pooled[pooled["quantity"] == SHARE]
    figure, axes, temperatures, names = _panels(rows, title, 2.4)
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
        draw_floor(panel, gate, lying=True)
        panel.set_xlim(0, 1)
        panel.set_xlabel("share of assessed turns")
    axes[0].invert_yaxis()
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def references(estimates: pd.DataFrame, title: str) -> Figure:
    """Bits that real follow-ups lose or gain under each condition, by dataset."""
    rows = estimates[estimates["quantity"] == REFERENCE + LESS]
    names = list(dict.fromkeys(rows["condition"]))
    datasets = list(dict.fromkeys(rows["dataset"]))
    across = "change of the real follow-up's log p, bits"
    figure, axes = new_axes(title, across, size=(7, 0.42 * len(names) + 1.4))
    for number, (colour, (dataset, own)) in enumerate(coloured(rows, "dataset")):
        shift = (number - (len(datasets) - 1) / 2) * 0.7 / max(len(datasets), 2)
        at = [names.index(name) + shift for name in own["condition"]]
        draw_points(axes, at, own, lying=True, color=colour, label=dataset)
    axes.axvline(0, color="0.3", lw=0.8)
    list_names(axes, names)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def displacement(estimates: pd.DataFrame, title: str) -> Figure:
    """How far header_last moves, layer by layer; 1 is as far as another conversation lies."""
    rows = _displacement(estimates)
    up = "displacement of header_last\n(1 = between two conversations)"
    figure, axes = new_axes(title, "layer (0 = embeddings)", up, (7.6, 4.2))
    for number, (colour, (condition, own)) in enumerate(coloured(rows, "condition")):
        style = STYLES[number // len(COLOURS)]
        draw_line(axes, own["layer"], own, colour, condition, ls=style, marker="")
    axes.axhline(1, color="0.3", lw=0.8)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
