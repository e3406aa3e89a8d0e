"""What the built-in judge wasn't fitted on: other languages than English, and higher temperatures.

A star marks such temperatures in a result's sentences, tables and figures. The legend of such a
table says what it means.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ia_mech.judge.builtin.features import FUNCTION_WORDS
from ia_mech.results import Result, Table
from ia_mech.run.labels import BUILT_IN

FITTED_TO = 0.7  # the highest temperature of turns that it was fitted on
FOOTNOTE = f"*: above the built-in judge's fit (T ≤ {FITTED_TO})."
# Half of a run's queries have this many words or more, if they are like those that it was fitted
# on: of these, three quarters have at least 28.
FITTED_WORDS = 20
FEW_WORDS = 25  # fewer don't tell one language in Latin letters from another
LEAST_SHARE = 1 / 10  # of function words in English; German or Indonesian texts have 0 to 0.06
_WORD = re.compile(r"[^\W\d_]{2,}")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_NAMED = re.compile(r"\bT = (\d++(?:\.\d++)?+)(?!\*)")


def highest(record: Mapping[str, Any]) -> float:
    """Up to which temperature the judge of this record was fitted; infinity if it wasn't."""
    return FITTED_TO if record.get("identity", {}).get("kind") == BUILT_IN else math.inf


def looks_english(text: str) -> bool:
    """Whether a text may be English: by its script and, where there are words enough, by its share
    of English function words."""
    words = _WORD.findall(text.lower())
    accented = sum(not word.isascii() for word in words)
    if len(words) < FEW_WORDS:
        letters = "".join(words)
        return sum(letter.isascii() for letter in letters) >= len(letters) / 2
    known = sum(word in FUNCTION_WORDS for word in words)
    return known > max(accented, LEAST_SHARE * len(words))


def starred(text: str, fit: float) -> str:
    """The text with a star behind each ``T = …`` above the fit."""
    return _NAMED.sub(lambda found: found[0] + "*" * (float(found[1]) > fit), text)


def temperature(value: float, fit: float) -> str:
    """A temperature as the axis of a figure names it."""
    star = "*" if value > fit else ""
    return f"{value:g}{star}" if value else "greedy"


def marked(result: Result, record: Mapping[str, Any]) -> Result:
    """The result of a judge's labels, with stars behind temperatures above the judge's fit."""
    fit = highest(record)
    if fit == math.inf:
        return result
    tables = [_marked(table, fit) for table in result.tables]
    for figure in result.figures.values():
        _mark(figure, fit)
    sentence, control = starred(result.sentence, fit), starred(result.control, fit)
    if sentence != result.sentence and tables == [*result.tables]:
        control = f"{control} {FOOTNOTE}".strip()
    return replace(result, sentence=sentence, control=control, tables=tables)


def _marked(table: Table, fit: float) -> Table:
    rows = [
        [_cell(head, cell, fit) for head, cell in zip(table.columns, row, strict=True)]
        for row in table.rows
    ]
    title = starred(table.title, fit)
    if (title, rows) == (table.title, table.rows):
        return table
    return replace(table, title=title, rows=rows, legend=f"{table.legend} {FOOTNOTE}".strip())


def _cell(head: str, cell: str, fit: float) -> str:
    if head == "T" and _NUMBER.fullmatch(cell):
        return temperature(float(cell), fit)
    return starred(cell, fit)


def _mark(figure: Any, fit: float) -> None:
    """Stars in a figure's words: titles, legends and the names of ticks."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(starred(text.get_text(), fit))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        names = [one.get_text() for one in axis.get_ticklabels()]
        if (marks := [starred(name, fit) for name in names]) != names:
            axis.set_ticks(axis.get_ticklocs(), marks)
