"""How experiments show estimates: plans, tables that may be empty, sentences."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from rich.markup import escape

from ia_mech.cli import one_line
from ia_mech.display import console
from ia_mech.estimates import (
    ALL,
    TidyEstimate,
    all_datasets,
    could_show,
    estimate_of,
    frame_of,
    queries_needed,
    smallest_effect,
)
from ia_mech.results import Table, cell_of, table_of

LEAST = queries_needed()  # the fewest queries that can show anything
DETECTABLE = (
    "Minimum detectable: 80 of 100 repetitions would show a true difference of this size (80% "
    "power), before the correction of p; none: too few data to show any."
)


def only(found: pd.DataFrame, quantity: str, **names: Any) -> pd.DataFrame:
    """The estimates of a quantity that have these values in other columns."""
    mine = found["quantity"] == quantity
    for name, value in names.items():
        mine &= found[name] == value
    return found[mine]


def headline(sentence: str, found: pd.DataFrame) -> str:
    """A sentence about estimates, after a warning if they rest on too few queries.

    Fewer than :data:`LEAST` queries can't reach p = 0.05.
    """
    most = int(found["sources"].max()) if len(found) else 0
    few = f"Too few queries ({most}) to show anything. " if most < LEAST else ""
    return few + sentence


def too_few(queries: int, comparisons: int = 1) -> str:
    """A warning before anything is computed, where so few queries can't show any of so many
    comparisons, which are Holm-corrected together; else an empty text."""
    needed = queries_needed(comparisons)
    if queries >= needed:
        return ""
    after = f" after the correction for {comparisons} comparisons" if comparisons > 1 else ""
    return f"{queries}; to show anything{after} takes at least {needed}"


def out_of_reach(what: str, differences: pd.DataFrame) -> str:
    """A sentence where the queries are too few for any of these tests, which are Holm-corrected
    together, to show a change of ``what``; else an empty text."""
    tested = all_datasets(differences)
    tested = tested[tested["p_holm"].notna()]
    most = int(tested["sources"].max()) if len(tested) else 0
    needed = queries_needed(max(1, len(tested)))
    if most >= needed or tested.empty:
        return ""
    return (
        f"With {most} queries no change of the {what} can be shown: after the correction for "
        f"{len(tested)} comparisons, that takes at least {needed}."
    )


def print_plan(lines: Mapping[str, str]) -> None:
    """Print what will be computed: name → what."""
    to, width = console(), max(18, *map(len, lines)) + 2
    for name, value in lines.items():
        to.print(f"{name:<{width}}{escape(one_line(value))}", soft_wrap=True)


def estimates_of(
    estimates: Iterable[TidyEstimate], names: Mapping[str, str], level: float
) -> pd.DataFrame:
    """Estimates as a table (:func:`ia_mech.estimates.frame_of`), with what each could have shown.

    The column ``detectable`` is :func:`smallest_effect`.
    """
    found = frame_of(estimates, names)
    return found.assign(detectable=smallest_effect(found, level))


def tables_of(
    title: str,
    found: pd.DataFrame,
    columns: Mapping[Any, tuple[str, int | str]],
    /,
    detectable: str = "",
    most: float = np.inf,
    **options: Any,
) -> list[Table]:
    """Tables (:func:`ia_mech.results.table_of`) of estimates: all datasets together, then each.

    The list is empty if no estimate is of ``columns``. Beside the quantity ``detectable`` stands
    the minimum detectable effect; ``most`` is the largest possible difference.
    """
    if detectable:
        found = with_detectable(found, detectable, most)
        items, digits = list(columns.items()), columns[detectable][1]
        at = list(columns).index(detectable) + 1
        shown = "minimum detectable", digits if isinstance(digits, int) else 2
        columns = dict([*items[:at], ("detectable", shown), *items[at:]])
        options["legend"] = f"{options.get('legend', '')} {DETECTABLE}".strip()
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


def with_detectable(rows: pd.DataFrame, quantity: str, most: float = np.inf) -> pd.DataFrame:
    """The rows, and one more for each row of ``quantity``: the effect that it could have shown, as
    the quantity ``detectable``. It is infinite if that effect isn't below ``most``."""
    own = rows[rows["quantity"] == quantity]
    nothing: dict[str, Any] = dict.fromkeys(("low", "high", "p", "p_holm"), np.nan)
    value = own["detectable"].where(~(own["detectable"] >= most), np.inf)
    told = own.assign(quantity="detectable", value=value, sources=0, **nothing)
    return pd.concat([rows, told], ignore_index=True)


def sentence_of(
    words: str,
    rows: pd.DataFrame,
    digits: int = 2,
    *,
    null: float | None = None,
    level: float = 0.95,
    most: float = np.inf,
) -> str:
    """Estimates as a sentence: ``Words: greedy 0.22 [0.17, 0.27], T = 1: 0.28 [0.25, 0.30].``

    Args:
        words: what the estimates are.
        rows: all of one quantity; if there are several datasets, only all together are told.
        digits: decimals.
        null: the value without an effect. If an interval contains it, the sentence says how large
            an effect would have been shown.
        level: the intervals' level, where rows don't say what they could have shown.
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
        said = cell_of(row, digits)
        few = estimate_of(row).few
        if null is not None and not few and row["low"] <= null <= row["high"]:
            said += (
                f" ({could_show(row.get('detectable', smallest_effect(row, level)), digits, most)})"
            )
        found.append(" ".join([*where, said]))
    return f"{words[:1].upper()}{words[1:]}: {', '.join(found)}." if found else ""
