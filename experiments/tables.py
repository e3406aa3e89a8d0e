"""Estimates as tables of texts."""

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
from rich.markup import escape

from ia_mech.cli import one_line
from ia_mech.display import console
from ia_mech.estimates import together
from ia_mech.results import Table

POWER = 0.8  # with which an effect would have been shown
HEADS = {"temperature": "T"}  # columns that are called otherwise on the screen


def print_plan(lines: Mapping[str, str]) -> None:
    """Print what will be computed: name → what."""
    to = console()
    for name, value in lines.items():
        to.print(f"{name:<20}{escape(one_line(value))}", soft_wrap=True)


def table_of(
    title: str,
    rows: pd.DataFrame,
    columns: Mapping[Any, tuple[str, int | str]],
    *,
    key: str = "quantity",
    index: tuple[str, ...] = ("dataset",),
    legend: str = "",
) -> list[Table]:
    """A line per combination of ``index``, a column per kind of estimate; no table of no rows.

    Args:
        title: of the table.
        rows: estimates as :func:`ia_mech.estimates.frame_of` makes them.
        columns: value of ``key`` → column head and number of decimals (or a format such as
            ``".0e"``). The Holm-corrected p of a test follows its difference.
        key: the column that tells kinds of estimates apart.
        index: columns that name a line.
        legend: what the columns hold, under the table.
    """
    rows = rows[rows[key].isin(list(columns))]
    if rows.empty:
        return []
    shown = {of: head for of, head in columns.items() if of in set(rows[key])}
    heads = [HEADS.get(name, name) for name in index]
    lines = []
    for names, own in rows.groupby(list(index), sort=False, dropna=False):
        by_key = own.set_index(key)
        cells = [
            cell(by_key.loc[of], digits) if of in by_key.index else ""
            for of, (_, digits) in shown.items()
        ]
        labels = [label(name, of) for name, of in zip(names, index, strict=True)]
        lines.append([*labels, str(own["rows"].max()), *cells])
    heads += ["rows", *(one_line(name, 40) for name, _ in shown.values())]
    return [Table(title, heads, lines, legend)]


def smallest_effect(row: pd.Series, level: float = 0.95) -> float:
    """The effect that an estimate's spread had 80% power to show at its level, two-sided.

    That is the sum of two normal quantiles times the standard error, which is read off the
    interval: 2.8 standard errors at 95%. NaN without an interval.
    """
    tail = NormalDist().inv_cdf(0.5 + level / 2)
    return (row["high"] - row["low"]) / (2 * tail) * (tail + NormalDist().inv_cdf(POWER))


def stated(words: str, rows: pd.DataFrame, digits: int = 2, *, null: float | None = None) -> str:
    """Estimates as a sentence: ``Words: greedy 0.22 [0.17, 0.27], T = 1: 0.28 [0.25, 0.30].``

    Args:
        words: what the estimates are.
        rows: all of one quantity; of several datasets, those of all together are taken.
        digits: decimals.
        null: what there would be without an effect. Of an estimate whose interval holds it the
            sentence says how large an effect would have been shown.

    Returns:
        The sentence; an empty text if there is no estimate.
    """
    whole = together(rows[rows["value"].notna()]).sort_values("temperature")
    names = [name for name in ("dataset", "model") if name in whole and whole[name].nunique() > 1]
    found = []
    for _, row in whole.iterrows():
        where = [one_line(row[name], 40) for name in names]
        if not np.isnan(t := row["temperature"]):
            where.append("greedy" if t == 0 else f"T = {t:g}:")
        said = cell(row, digits)
        if null is not None and row["low"] <= null <= row["high"]:
            said += f" (with 80% power {smallest_effect(row):.{digits}f} would have been shown)"
        found.append(" ".join([*where, said]))
    return f"{words[:1].upper()}{words[1:]}: {', '.join(found)}." if found else ""


def label(value: Any, column: str = "") -> str:
    """What names a line: text, a number, or a temperature."""
    if isinstance(value, str):
        return one_line(value, 40)
    if pd.isna(value):
        return "–"
    if column == "temperature" and value == 0:
        return "greedy"
    return f"{value:g}"


def cell(row: pd.Series, digits: int | str = 2) -> str:
    """An estimate as text: value, interval, and the corrected p of a test."""
    if np.isnan(row["value"]):
        return "–"
    style = digits if isinstance(digits, str) else f".{digits}f"
    ends = "–" if np.isnan(row["low"]) else f"{row['low']:{style}}, {row['high']:{style}}"
    text = f"{row['value']:{style}} [{ends}]"
    return text if np.isnan(row["p_holm"]) else f"{text} {p_value(row['p_holm'])}"


def p_value(p: float) -> str:
    """A p value as text."""
    return "p<0.001" if p < 0.001 else f"p={p:.3f}"
