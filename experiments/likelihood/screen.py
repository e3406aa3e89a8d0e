"""The estimates as tables in a terminal."""

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import one_line


def show(estimates: pd.DataFrame, notes: list[str]) -> None:
    """Print what there is: references, contrasts, rivals, generations, notes."""
    console = Console(highlight=False, emoji=False)
    console.width = max(console.width, 118)  # intervals belong on one line
    plain = estimates[estimates["temperature"].isna()]
    _print(
        console,
        "the users' real follow-ups (95% intervals over sources)",
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
    for quantity, title in (
        ("contrast, bits", "bits in favour of the context's own response"),
        ("reference beats", "share of contexts where the follow-up is likelier than (whole turn)"),
        ("reference beats per token", "the same per token"),
    ):
        rows = estimates[estimates["quantity"] == quantity]
        rows = rows[rows["temperature"].isna() | (rows["temperature"] == 1.0)]
        names = {of: (of, 2) for of in dict.fromkeys(rows["of"])}
        _print(console, title, rows, names, "of")
    for quantity in (
        "generations' contrast, bits",
        "AUROC of genuine, between contexts",
        "AUROC of genuine, within contexts",
    ):
        rows = estimates[estimates["quantity"] == quantity]
        rows = rows[rows["of"].str.startswith("response")]
        names = {of: (of, 2) for of in dict.fromkeys(rows["of"])}
        _print(console, quantity, rows, names, "of", by_temperature=True)
    for note in notes:
        console.print(escape(one_line(note)), soft_wrap=True)


def _print(
    console: Console,
    title: str,
    rows: pd.DataFrame,
    columns: dict[str, tuple[str, int]],
    key: str,
    by_temperature: bool = False,
) -> None:
    """A row per dataset (and temperature), a column per kind of estimate; nothing if empty."""
    rows = rows[rows[key].isin(columns)]
    if rows.empty:
        return
    table = Table(title=title, title_justify="left")
    table.add_column("dataset", no_wrap=True)
    if by_temperature:
        table.add_column("T", justify="right", no_wrap=True)
    table.add_column("turns", justify="right")
    for name, _ in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    groups = ["dataset", "temperature"] if by_temperature else ["dataset"]
    for names, own in rows.groupby(groups, sort=False):
        found = own.set_index(key)
        cells = [
            _cell(found.loc[of], digits) if of in found.index else ""
            for of, (_, digits) in columns.items()
        ]
        t = ([f"{names[1]:g}" if names[1] else "greedy"]) if by_temperature else []
        table.add_row(escape(one_line(names[0], 30)), *t, str(own["turns"].max()), *cells)
    console.print(table)


def _cell(row: pd.Series, digits: int) -> str:
    value = f"{row['value']:.{digits}f}"
    if np.isnan(row["low"]):
        return f"{value} [–]"
    return f"{value} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"
