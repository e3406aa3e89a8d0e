"""The estimates as tables in a terminal."""

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import one_line

WIDTH = 1000  # tables take what they need; an interval that is cut is worse than a long line


def show(estimates: pd.DataFrame, notes: list[str], level: float) -> None:
    """Print what there is: references, contrasts, rivals, generations, notes."""
    console = Console(highlight=False, emoji=False)
    console.width = max(console.width, WIDTH)
    plain = estimates[estimates["temperature"].isna()]
    _print(
        console,
        f"the users' real follow-ups ({100 * level:g}% intervals over sources)",
        plain,
        {
            "bits per byte": ("bits / byte", 2),
            "log p per token": ("log p / token", 2),
            "greedy writes it": ("greedy writes it", 2),
            "tokens until greedy leaves": ("greedy tokens", 1),
            "median rank where greedy leaves": ("rank there", 0),
            "best temperature": ("best T", 2),
        },
        "quantity",
    )
    bits = {
        "contrast, bits": ("follow-up", 2),
        "control's contrast, bits": ("another's follow-up", 2),
        "contrast less control's, bits": ("difference", 2),
        "placebo's contrast, bits": ("placebo", 2),
    }
    _print(console, "bits in favour of the context's own response", plain, bits, "quantity", "of")
    rank = {
        "likeliest after its response": ("likeliest after its own", 2),
        "likeliest after its response, by chance": ("by chance", 2),
    }
    title = "how often a turn is likelier after its context's response than after any swapped one"
    _print(console, title, plain, rank, "quantity", "of")
    for quantity, title in (
        ("reference beats", "share of contexts where the follow-up is likelier than (whole turn)"),
        ("reference beats per token", "the same per token"),
    ):
        rows = estimates[estimates["quantity"] == quantity]
        rows = rows[rows["temperature"].isna() | (rows["temperature"] == 1.0)]
        names = {of: (of, 2) for of in dict.fromkeys(rows["of"])}
        _print(console, title, rows, names, "of")
    for quantity in (
        "generations' contrast, bits",
        "generations' contrast, bits per token",
        "AUROC of genuine, between sources",
        "AUROC of genuine, within contexts",
    ):
        rows = estimates[estimates["quantity"] == quantity]
        rows = rows[rows["of"].str.startswith("response")]
        names = {of: (of, 2) for of in dict.fromkeys(rows["of"])}
        _print(console, quantity, rows, names, "of", "temperature")
    for note in notes:
        console.print(escape(one_line(note)), soft_wrap=True)


def _print(
    console: Console,
    title: str,
    rows: pd.DataFrame,
    columns: dict[str, tuple[str, int]],
    key: str,
    besides: str | None = None,
) -> None:
    """A row per dataset (and what stands in ``besides``), a column per kind of estimate.

    Nothing is printed of no rows.
    """
    rows = rows[rows[key].isin(columns)]
    if rows.empty:
        return
    table = Table(title=escape(title), title_justify="left")
    table.add_column("dataset", no_wrap=True)
    if besides is not None:
        table.add_column({"temperature": "T"}.get(besides, besides), no_wrap=True)
    table.add_column("turns", justify="right", no_wrap=True)
    for name, _ in columns.values():
        table.add_column(escape(one_line(name, 40)), justify="right", no_wrap=True)
    groups = ["dataset"] if besides is None else ["dataset", besides]
    for names, own in rows.groupby(groups, sort=False):
        found = own.set_index(key)
        cells = [
            _cell(found.loc[of], digits) if of in found.index else ""
            for of, (_, digits) in columns.items()
        ]
        more = [_label(name) for name in names[1:]]
        table.add_row(escape(one_line(names[0], 30)), *more, str(own["turns"].max()), *cells)
    console.print(table)


def _label(value: str | float) -> str:
    """What ``besides`` holds: a name, or a temperature."""
    return value if isinstance(value, str) else f"{value:g}" if value else "greedy"


def _cell(row: pd.Series, digits: int) -> str:
    value = f"{row['value']:.{digits}f}"
    if np.isnan(row["low"]):
        return f"{value} [–]"
    return f"{value} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"
