"""How experiments show estimates: plans, tables that may be empty, sentences, and figures.

A figure is declared: which estimates to show, over which column, grouped by which column.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.markup import escape

from ia_mech.cli import one_line
from ia_mech.display import by_colour, console, draw_line, draw_rows, new_axes
from ia_mech.estimates import (
    ALL,
    TidyEstimate,
    all_datasets,
    could_show,
    estimate_of,
    frame_of,
    queries_needed,
    smallest_effect,
    with_shown_intervals,
)
from ia_mech.results import Table, cell_of, label_of, table_of
from ia_mech.stats import LEAST_SHOWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLOOR = "after a wrong conversation"  # a line among those of datasets
LEAST = queries_needed()  # the fewest queries that can show anything
TOO_FEW = "Too few queries"  # how the warning begins


def only(found: pd.DataFrame, quantity: str, **names: Any) -> pd.DataFrame:
    """The estimates of a quantity that have these values in other columns; None: a missing one."""
    mine = found["quantity"] == quantity
    for name, value in names.items():
        mine &= found[name].isna() if value is None else found[name] == value
    return found[mine]


def told(found: pd.DataFrame, quantity: str, digits: int | str = 2, **names: Any) -> str:
    """The one estimate of these as text; an empty one if there is none.

    Raises:
        ValueError: there are several.
    """
    rows = only(found, quantity, **names)
    if len(rows) > 1:
        raise ValueError(f"{len(rows)} estimates of {quantity!r} with {names}")
    return "".join(cell_of(row, digits) for _, row in rows.iterrows())


def spans(numbers: Iterable[int], between: str = ", ") -> str:
    """``3–5, 8``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return between.join("–".join(map(str, span)) for span in found)


def headline(sentence: str, found: pd.DataFrame) -> str:
    """A sentence about estimates, after a warning if they rest on too few queries.

    Fewer than :data:`LEAST` queries can't reach p = 0.05.
    """
    most = int(found["sources"].max()) if len(found) else 0
    few = f"{TOO_FEW} ({most}) to show anything. " if most < LEAST else ""
    return few + sentence


def too_few(queries: int) -> str:
    """A warning before anything is computed, where so few queries can't show a difference; else an
    empty text."""
    if queries >= LEAST:
        return ""
    return f"with {queries}, no difference can be shown, however large; that takes at least {LEAST}"


def print_plan(lines: Mapping[str, str]) -> None:
    """Print what will be computed: name → what."""
    to, width = console(), max(18, *map(len, lines)) + 2
    for name, value in lines.items():
        to.print(f"{name:<{width}}{escape(one_line(value))}", soft_wrap=True)


def estimates_of(
    estimates: Iterable[TidyEstimate], names: Mapping[str, str], level: float
) -> pd.DataFrame:
    """Estimates as a table (:func:`ia_mech.estimates.frame_of`), with what each could have shown.

    The column ``detectable`` is :func:`smallest_effect`, infinite where a test that flips signs has
    too few queries to show anything (:func:`queries_needed`).
    """
    rows = list(estimates)
    found = frame_of(rows, names)
    none = [
        "sign flip" in (row.test or "") and row.estimate.sources < queries_needed(row.together)
        for row in rows
    ]
    return found.assign(detectable=smallest_effect(found, level).mask(none, np.inf))


def tables_of(
    title: str,
    found: pd.DataFrame,
    columns: Mapping[Any, tuple[str, int | str]],
    /,
    **options: Any,
) -> list[Table]:
    """Tables (:func:`ia_mech.results.table_of`) of estimates: all datasets together, then each.

    The list is empty if no estimate is of ``columns``.
    """
    there = found[found[options.get("key", "quantity")].isin(list(columns))]
    if there.empty:
        return []
    if (there["dataset"] != ALL).all():
        return [table_of(title, there, columns, **options)]
    whole, each = (there[of_all] for of_all in (there["dataset"] == ALL, there["dataset"] != ALL))
    made = [table_of(title, whole, columns, **options)]
    if len(each):
        options["full"] = True
        made.append(table_of(f"{title}, by dataset", each, columns, **options))
    return made


def sentence_of(
    words: str, rows: pd.DataFrame, *, null: float | None = None, most: float = np.inf
) -> str:
    """Estimates as a sentence: ``Words: greedy 0.22 [0.17, 0.27], T = 1: 0.28 [0.25, 0.30].``

    Args:
        words: what the estimates are.
        rows: all of one quantity; if there are several datasets, only all together are told.
        null: the value without an effect. If an interval contains it, the sentence says how large
            an effect would have been shown.
        most: the largest possible effect, such as 1 for a difference of rates.

    Returns:
        The sentence; an empty text if there is no estimate.
    """
    whole = all_datasets(rows[rows["value"].notna()])
    if "temperature" in whole:
        whole = whole.sort_values("temperature")
    names = [name for name in ("dataset", "model") if name in whole and whole[name].nunique() > 1]
    found = []
    for _, row in whole.iterrows():
        where = [one_line(row[name], 40) for name in names]
        if not np.isnan(t := row.get("temperature", np.nan)):
            where.append("greedy" if t == 0 else f"T = {t:g}:")
        said = cell_of(row)
        few = estimate_of(row).few
        if null is not None and not few and row["low"] <= null <= row["high"]:
            least = row.get("detectable", smallest_effect(row))
            said += f" ({could_show(least, most=most)})"
        found.append(" ".join([*where, said]))
    return f"{words[:1].upper()}{words[1:]}: {', '.join(found)}." if found else ""


# -- figures ---------------------------------------------------------------------------------------


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

    Beside all datasets together, each one is a thin line without a band.
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
        of_each = self.by == "dataset" and (shown["dataset"] == ALL).any()
        for colour, (name, rows) in by_colour(shown, self.by):
            rows = rows.sort_values(self.across, kind="stable")
            look: dict[str, float] = {}
            if of_each and name not in (ALL, FLOOR):
                rows, look = rows.assign(low=np.nan, high=np.nan), {"lw": 0.8, "ms": 2}
            draw_line(axes, rows[self.across], rows, colour, _label(name, self.by), **look)
        for label, level in (self.levels or {}).items():
            axes.axhline(level, color="0.3", lw=0.8, ls=":", label=label or None)
        if self.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.legend()
        dotted = f" Dotted: {', '.join(filter(None, self.levels))}." if self.levels else ""
        figure.set_label(
            f"Each line is one {self.by.replace('_', ' ')}; the band around it is its interval, "
            "not corrected for how many there are. Thin lines have theirs in the tables; fewer "
            f"than {LEAST_SHOWN} queries give none.{dotted}"
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
        differences: whether they are differences, of which 0 is none.
    """

    title: str
    x: str
    rows: pd.DataFrame
    names: str = "term"
    by: str = "dataset"
    differences: bool = False

    def draw(self) -> "Figure":
        told = [name for name in (self.by, "temperature") if name in self.rows]
        told = [one for one in told if one != self.names and self.rows[one].nunique(False) > 1]
        rows = with_shown_intervals(self.rows).assign(
            line=_labels(self.rows, [self.names]), colour=_labels(self.rows, told)
        )
        figure = draw_rows(self.title, self.x, rows, "no difference" if self.differences else "")
        what, chance = "an estimate", ""
        if self.differences:
            what = "a difference, not a rate"
            chance = (
                " Go by the corrected p in the table: a difference is shown if it is at most "
                "0.05. Of many intervals some miss 0 by chance."
            )
        figure.set_label(
            f"Each point is {what}, and the line through it is its interval.{chance} Hollow points "
            f"have no interval: fewer than {LEAST_SHOWN} queries."
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
