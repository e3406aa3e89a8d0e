"""Figures of rates: rate and floor against temperature, and what the turns are."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ia_mech.cli import one_line
from ia_mech.display import COLOURS, draw_points, draw_rows, link_of, title_axes, with_style
from ia_mech.estimates import all_datasets, with_shown_intervals
from ia_mech.judge.decoys import WRONG
from ia_mech.judge.rubric import heading
from ia_mech.rates.fit import FOOTNOTE
from ia_mech.rates.fit import temperature as named
from ia_mech.rates.gate import Gate
from ia_mech.rates.gate import named as judge_named
from ia_mech.stats import LEAST_SHOWN

LINES = {  # quantities of the left panel: label, colour
    "rate": ("follow-ups", COLOURS[0]),
    "floor": ("after a wrong conversation", COLOURS[1]),
}


def gate_title(name: str, gate: Gate) -> str:
    """The title of a figure that shows a judge's rate: of what, by which judge, its control."""
    return f"{name}\nby {judge_named(gate.judge)}; control: {gate.verdict}"


@with_style
def draw_rates(estimates: pd.DataFrame, title: str, fit: float = math.inf) -> Figure:
    """Left, rate and floor by temperature; right, the failure profile.

    Args:
        estimates: of :func:`ia_mech.rates.compute.estimates`, of one model and perturbation. The
            pooled datasets are drawn where there are several.
        title: of the left panel.
        fit: the highest temperature of the judge's fit; those above it get a star.
    """
    whole = all_datasets(estimates[estimates["outcome"] == "follow_up"])
    whole = with_shown_intervals(whole[whole["temperature"].notna()])
    figure = Figure(figsize=(9.5, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    temperatures = sorted(whole["temperature"].unique())
    apart = 0.015 * temperatures[-1]  # intervals beside each other, not on each other
    for number, (quantity, (label, colour)) in enumerate(LINES.items()):
        own = whole[whole["quantity"] == quantity]
        own = own[own["decoy"].isna() | (own["decoy"] == WRONG)].sort_values("temperature")
        if own["value"].notna().any():
            at = own["temperature"] + apart * number
            draw_points(left, at, own, fmt="o-", capsize=2, color=colour, label=label)
    left.axhline(0, color="0.7", lw=0.7)
    left.set_ylabel("share of turns")
    left.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.15))
    title_axes(left, title)
    _profile(right, whole[whole["quantity"] == "category_share"], fit)
    left.set_xticks(temperatures, [named(t, fit) for t in temperatures])
    for axes in (left, right):
        axes.set_xlabel("temperature")
    figure.set_label(
        "Left, with intervals: the share of turns that the judge calls follow-ups, and the share "
        "of the same turns that it calls follow-ups after a wrong conversation (one of another "
        "query). Right: the share of turns in each category. Turns that the judge could not "
        "assess, or failed on, are left out." + f" {FOOTNOTE}" * bool(temperatures[-1] > fit)
    )
    return figure


@with_style
def draw_by(estimates: pd.DataFrame, title: str) -> Figure:
    """The follow-up rate at each value of a field: a row per value, a colour per temperature.

    Args:
        estimates: of :func:`ia_mech.rates.compute.estimates`, of one model and perturbation; their
            ``dataset`` is the field's value.
        title: of the figure.
    """
    rates = estimates[(estimates["quantity"] == "rate") & (estimates["outcome"] == "follow_up")]
    rates = rates.sort_values("dataset", kind="stable")
    rates = with_shown_intervals(rates).assign(
        line=rates["dataset"].map(lambda value: one_line(value, 40)),
        colour=[f"T = {t:g}" if t else "greedy" for t in rates["temperature"]],
    )
    figure = draw_rows(title, "share of turns that are follow-ups", rates)
    figure.set_label(
        "Each point is a follow-up rate, and the line through it is its interval. A point is "
        f"hollow where fewer than {LEAST_SHOWN} queries give no interval."
    )
    return figure


def _profile(axes: Axes, shares: pd.DataFrame, fit: float) -> None:
    """Stacked bars, a bar per temperature."""
    temperatures = sorted(shares["temperature"].unique())
    under = np.zeros(len(temperatures))
    for number, category in enumerate(shares["category"].unique()):
        own = shares[shares["category"] == category].set_index("temperature").reindex(temperatures)
        heights = own["value"].fillna(0).to_numpy()
        if heights.any():
            bars = axes.bar(
                range(len(temperatures)),
                heights,
                bottom=under,
                color=[*COLOURS, "0.75"][number % (len(COLOURS) + 1)],
                edgecolor="white",
                label=heading(category),
            )
            for bar, (temperature, of) in zip(bars, own.iterrows(), strict=True):
                if of["value"] > 0:
                    share = f"{of['events']} of {of['rows']} assessed turns"
                    bar.set_url(link_of(temperature=temperature, category=category, share=share))
            under = under + heights
    axes.set_xticks(range(len(temperatures)), [named(t, fit) for t in temperatures])
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of assessed turns")
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    title_axes(axes, "what the turns are")
