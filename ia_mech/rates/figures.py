"""Figures of rates: rate and floor against temperature, rates by a field, and categories."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ia_mech.cli import one_line
from ia_mech.display import COLOURS, draw_points, draw_rows, link_of, new_axes, with_style
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
    """Rate and floor by temperature.

    Args:
        estimates: of :func:`ia_mech.rates.compute.estimates`, of one model and perturbation. The
            pooled datasets are drawn where there are several.
        title: of the figure, below what it shows.
        fit: the highest temperature of the judge's fit; those above it get a star.
    """
    whole = all_datasets(estimates[estimates["outcome"] == "follow_up"])
    whole = with_shown_intervals(whole[whole["temperature"].notna()])
    figure, axes = new_axes(
        f"How often turns are follow-ups\n{title}", "temperature", "share of turns (0 to 1)"
    )
    temperatures = sorted(whole["temperature"].unique())
    apart = 0.015 * temperatures[-1]  # intervals beside each other, not on each other
    for number, (quantity, (label, colour)) in enumerate(LINES.items()):
        own = whole[whole["quantity"] == quantity]
        own = own[own["decoy"].isna() | (own["decoy"] == WRONG)].sort_values("temperature")
        if own["value"].notna().any():
            at = own["temperature"] + apart * number
            draw_points(axes, at, own, fmt="o-", capsize=2, color=colour, label=label)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_xticks(temperatures, [named(t, fit) for t in temperatures])
    figure.legend(loc="outside lower center", ncols=2)
    figure.set_label(
        "Rates with their intervals: how many of the turns the judge calls follow-ups, and how "
        "many of the same turns if they are shown after a wrong conversation (one of another "
        "query). Turns that it could not assess are left out."
        + f" {FOOTNOTE}"
        * bool(temperatures[-1] > fit)
    )
    return figure


@with_style
def draw_categories(estimates: pd.DataFrame, title: str, fit: float = math.inf) -> Figure:
    """What the turns are: a bar per temperature, stacked of the shares of categories. Arguments as
    for :func:`draw_rates`."""
    shares = all_datasets(estimates[estimates["quantity"] == "category_share"])
    figure, axes = new_axes(
        f"What the turns are\n{title}", "temperature", "share of turns (0 to 1)", (6.8, 4.0)
    )
    _profile(axes, shares[shares["temperature"].notna()], fit)
    figure.set_label(
        "The share of turns in each category, of those that the judge could assess."
        + f" {FOOTNOTE}" * bool(shares["temperature"].max() > fit)
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
    across = "share of turns that are follow-ups (0 to 1)"
    figure = draw_rows(title, across, rates)
    figure.set_label(
        "Rates: each point is the share of turns that are follow-ups, and the line through it is "
        f"its interval. A point is hollow where fewer than {LEAST_SHOWN} queries give no interval."
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
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
