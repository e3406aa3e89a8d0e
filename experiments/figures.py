"""Figures, declared: which estimates to show, over which column, grouped by which column."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ia_mech.display import by_colour, draw_line, draw_rows, new_axes
from ia_mech.estimates import ALL, with_shown_intervals
from ia_mech.results import label_of
from ia_mech.stats import LEAST_SHOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FLOOR = "the judge's floor"  # a line among those of datasets


@dataclass(frozen=True, eq=False)
class Lines:
    """Estimates over a number: one line for each value of a column, with intervals as a band.

    Attributes:
        title: of the figure.
        x, y: what the axes show, with units.
        rows: estimates (:func:`ia_mech.estimates.frame_of`).
        across: the column on the x axis.
        by: the column that tells lines apart.
        levels: label → value where a dotted line is drawn across, such as a ceiling or chance.
        log: whether the y axis is logarithmic.

    Of more than two datasets, all together are drawn first and thick, and each without a band.
    """

    title: str
    x: str
    y: str
    rows: pd.DataFrame
    across: str = "temperature"
    by: str = "term"
    levels: dict[str, float] | None = None
    log: bool = False

    def draw(self) -> "Figure":
        figure, axes = new_axes(self.title, self.x, self.y)
        shown = with_shown_intervals(self.rows)
        each = [] if self.by != "dataset" else [*set(shown["dataset"]) - {ALL, FLOOR}]
        crowded = len(each) > 2
        if crowded:
            shown = shown.sort_values("dataset", key=lambda names: names != ALL, kind="stable")
        for colour, (name, rows) in by_colour(shown, self.by):
            rows = rows.sort_values(self.across, kind="stable")
            look: dict[str, float] = {}
            if crowded and name == ALL:
                look = {"lw": 3}
            elif crowded and name in each:
                rows, look = rows.assign(low=np.nan, high=np.nan), {"lw": 0.8, "ms": 2}
            draw_line(axes, rows[self.across], rows, colour, _label(name, self.by), **look)
        for label, level in (self.levels or {}).items():
            axes.axhline(level, color="0.3", lw=0.8, ls=":", label=label or None)
        if self.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.legend()
        dotted = f" Dotted: {', '.join(filter(None, self.levels))}." if self.levels else ""
        thin = f" {ALL} is thick; the intervals of thin lines are in the tables." * crowded
        figure.set_label(
            f"Each line is one {self.by.replace('_', ' ')}; the band around it is its interval, "
            f"not corrected for how many there are.{thin}{dotted}"
            + _lacking(shown, "There is no band")
        )
        return figure


@dataclass(frozen=True, eq=False)
class Bars:
    """Estimates as points with their intervals, in one row for each value of a column.

    Colours tell apart the values of another column, and temperatures if there are several. An
    estimate without an interval is a hollow point.

    Attributes:
        title: of the figure.
        x: what is drawn, with its unit.
        rows: estimates.
        names: the column that names the rows, from top to bottom in the order of ``rows``.
        by: the column whose values have colours.
    """

    title: str
    x: str
    rows: pd.DataFrame
    names: str = "term"
    by: str = "dataset"

    def draw(self) -> "Figure":
        told = [name for name in (self.by, "temperature") if name in self.rows]
        told = [one for one in told if one != self.names and self.rows[one].nunique(False) > 1]
        rows = with_shown_intervals(self.rows).assign(
            line=_labels(self.rows, [self.names]), colour=_labels(self.rows, told)
        )
        figure = draw_rows(self.title, self.x, rows)
        figure.set_label(
            "Each point is an estimate, and the line through it is its interval. Of many intervals "
            "some miss 0 by chance: an effect is shown only where its corrected p in the table is "
            "below 0.05." + _lacking(rows, "A point is hollow")
        )
        return figure


Drawing = Lines | Bars


def _label(value: Any, column: str) -> str:
    """The name that a table gives a value; a temperature is written as ``T = 1``."""
    label = label_of(value, column)
    return f"T = {label}" if column == "temperature" and value > 0 else label


def _labels(rows: pd.DataFrame, columns: list[str]) -> list[str]:
    """``[rows]``: each row's label, made from its values in these columns."""
    return [", ".join(_label(row[name], name) for name in columns) for _, row in rows.iterrows()]


def _lacking(rows: pd.DataFrame, what: str) -> str:
    """A sentence on estimates without an interval, if there are some."""
    without = rows["value"].notna() & rows["low"].isna()
    why = f"where fewer than {LEAST_SHOWN} queries, or queries that are all alike, give no interval"
    return f" {what} {why}." if without.any() else ""


def _values(column: pd.Series) -> list:
    return list(dict.fromkeys(column))
