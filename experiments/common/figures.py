"""Colours and headings that the figures of all experiments share."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "0.4")  # Okabe & Ito


def coloured(frame: pd.DataFrame, by: str) -> Iterator[tuple[str, tuple[str, pd.DataFrame]]]:
    """``(colour, (name, rows))`` of every value of a column, in the order of appearance."""
    for number, group in enumerate(frame.groupby(by, sort=False)):
        yield COLOURS[number % len(COLOURS)], group


def head(axes: Axes, title: str) -> None:
    """A title, and no more frame than axes need."""
    axes.set_title(title, fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
