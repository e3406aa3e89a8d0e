"""What every command shows: one console, one progress bar and one plot style.

``matplotlib`` is imported only where a figure is drawn.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from html import unescape
from io import StringIO
from pathlib import Path
from string import ascii_lowercase
from textwrap import fill
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, urlencode

from rich.console import Console
from rich.segment import Segment
from tqdm import tqdm

from ia_mech.cli import expanded
from ia_mech.untrusted import visible

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's colours, which colour-blind readers can tell apart, and a grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "0.4")

FIGURE_FORMATS = ("png", "svg", "pdf")  # each figure is written in all of them

# Columns of estimates that say which turns are behind a mark; the mark's link names their values.
LINKED = ("model", "run", "dataset", "temperature", "category", "decoy", "condition")
SECONDS = 10.0  # after which a log file gets another line about a phase
REACH = 8.0  # points to each side of a mark within which a click hits it

STYLE: dict[Any, Any] = {
    "axes.labelsize": 10,
    "axes.linewidth": 0.7,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "font.size": 10,
    "figure.titlesize": 10,
    "figure.titleweight": "bold",
    "legend.fontsize": 10,
    "legend.frameon": False,
    "text.parse_math": False,  # names of runs and positions may hold a $
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # handled once, in ia_mech.cli

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*args, **options):
            yield Segment(text if control else visible(text), style, control)


def console(width: int = 100) -> Console:
    """A console at least ``width`` columns wide, which prints texts as they are, apart from what
    :func:`ia_mech.untrusted.visible` replaces."""
    made = _Console(highlight=False, emoji=False)  # ":cat:" in a text is not an emoji
    made.width = max(made.width, width)  # a cut-off interval is worse than a long line
    return made


class Progress(Protocol):
    """How a long computation reports what it does. A run has several phases, one after another."""

    def start(self, phase: str, total: int, *, done: int = 0, unit: str = "step") -> None:
        """A phase of ``total`` steps begins, of which ``done`` were done before."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """``steps`` more are done; ``note``, such as a rate, is shown after the time left."""

    def say(self, line: str) -> None:
        """Show a line above the bar."""

    def stop(self) -> None:
        """The phase is over, or was interrupted."""


class Quiet:
    """No progress."""

    def start(self, phase: str, total: int, *, done: int = 0, unit: str = "step") -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def say(self, line: str) -> None: ...
    def stop(self) -> None: ...


class _Bar(tqdm):
    @property
    def format_dict(self) -> dict[str, Any]:
        said = dict(super().format_dict)
        return said | {"whole": int(100 * said["n"] / max(said["total"], 1))}  # 100 only at the end


class Bar:
    """Progress on the terminal: phase, share, steps done, time taken and left, and a note.

    The bar is redrawn twice a second at a terminal and in a notebook. Elsewhere, as in a log file,
    it is a line every :data:`SECONDS`, and one at the end of a phase that had any. The time left
    assumes the mean rate since the phase began. An empty ``unit`` hides the counts; the share is
    said to be of the work then, for a note may count something else. Several threads may report at
    once.
    """

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._shown: tuple[float, object] = 0, None  # what the last line said
        self._reporting = threading.RLock()
        tqdm.monitor_interval = 0  # no thread that redraws: :meth:`advance` does

    def start(self, phase: str, total: int, *, done: int = 0, unit: str = "step") -> None:
        self.stop()
        notebook = type(sys.stderr).__module__.startswith("ipykernel")
        self._redrawn = sys.stderr.isatty() or notebook
        glyphs = "|{bar:20}| " if self._redrawn else ""
        counts = "{n_fmt}/{total_fmt} " + unit + "s " if unit else "of the work "
        self._bar = _Bar(
            file=sys.stderr if self._redrawn else StringIO(),  # :meth:`_tell` shows it then
            total=total,
            initial=done,
            desc=phase,
            unit=unit,
            mininterval=0.5 if self._redrawn else math.inf,
            smoothing=0,
            bar_format="{desc}: {whole:3d}% "
            + glyphs
            + counts
            + "[{elapsed}, {remaining} left{postfix}]",
        )
        self._told, self._told_at = 0, time.monotonic()

    def advance(self, steps: int = 1, note: str = "") -> None:
        with self._reporting:
            bar = self._bar
            if bar is None:
                return
            if note:
                bar.set_postfix_str(note, refresh=False)
            bar.update(steps)
            if time.time() - bar.last_print_t >= bar.mininterval:  # tqdm waits for whole steps
                bar.refresh()
                bar.last_print_t = time.time()
            if time.monotonic() - self._told_at >= SECONDS:
                self._tell(bar)

    def _tell(self, bar: _Bar) -> None:
        """Show a line of the bar, where it can't be redrawn."""
        if not self._redrawn:
            self._shown = bar.n, bar.postfix
            self.say(str(bar))
            self._told, self._told_at = self._told + 1, time.monotonic()

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def stop(self) -> None:
        with self._reporting:
            if self._bar is not None:
                if self._told and self._shown != (self._bar.n, self._bar.postfix):
                    self._tell(self._bar)
                self._bar.close()
                self._bar = None


def with_style(draw: Callable[..., Any]) -> Callable[..., Any]:
    """A drawing function that uses :data:`STYLE` and leaves matplotlib's own settings alone."""

    @wraps(draw)
    def draw_styled(*args: Any, **kwargs: Any) -> Any:
        from matplotlib import rc_context

        with rc_context(STYLE):
            return draw(*args, **kwargs)

    return draw_styled


TITLE = 11  # letters of a title per inch
WIDTH = 5.6  # inches of a figure, with which its letters are as large as a page's beside it


def title_axes(axes: Axes, title: str) -> None:
    """Give axes a title, wrapped to their width, and remove their top and right edge."""
    grid, figure = axes.get_gridspec(), axes.get_figure()
    panels = grid.ncols if grid is not None else 1
    width = figure.get_window_extent().width / figure.dpi if figure is not None else 6.0
    lines = [fill(line, int(TITLE * width / panels)) for line in title.splitlines()]
    axes.set_title("\n".join(lines), fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def by_colour(frame: pd.DataFrame, by: str) -> Iterator[tuple[str, tuple[str, pd.DataFrame]]]:
    """``(colour, (name, rows))`` of every value of a column, in the order of appearance."""
    for number, group in enumerate(frame.groupby(by, sort=False)):
        yield COLOURS[number % len(COLOURS)], group


def new_axes(
    title: str, across: str, up: str = "", size: tuple[float, float] = (WIDTH, 4)
) -> tuple[Figure, Axes]:
    """A figure of one panel, with a title and the labels of its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot(xlabel=across, ylabel=up)
    title_axes(axes, title)
    return figure, axes


def draw_line(
    axes: Axes, at: pd.Series, rows: pd.DataFrame, colour: str, label: str, **look: Any
) -> None:
    """Draw estimates ``[rows]`` (``value``, ``low``, ``high``) as a line at these places of the x
    axis, and their intervals as a band. ``look`` holds matplotlib's properties of the line."""
    places = at.to_numpy(dtype=float)
    style: dict[str, Any] = {"lw": 1.4, "marker": "o", "ms": 3}
    axes.plot(places, rows["value"], color=colour, label=label, **(style | look))
    axes.fill_between(places, rows["low"], rows["high"], color=colour, alpha=0.12, lw=0)
    _link(axes, places, rows["value"], rows)


def draw_points(
    axes: Axes, at: Sequence[float], rows: pd.DataFrame, *, lying: bool = False, **look: Any
) -> None:
    """Draw estimates as points and their intervals as bars; a missing interval has no bar.

    Arguments as for :func:`draw_line`. If ``lying``, ``at`` is on the y axis, values on the x axis.
    """
    value = rows["value"]
    ends = [value - rows["low"], rows["high"] - value]
    reach = [end.fillna(0).clip(lower=0) for end in ends]
    style: dict[str, Any] = {"fmt": "o", "ms": 4, "lw": 1.2} | look
    across, up = (value, at) if lying else (at, value)
    axes.errorbar(across, up, xerr=reach if lying else None, yerr=None if lying else reach, **style)
    _link(axes, across, up, rows)


def draw_rows(title: str, across: str, rows: pd.DataFrame, zero: str = "") -> Figure:
    """A figure of estimates as points with their intervals. Those with the same ``line`` stand in a
    row of that name, from top to bottom as they first appear. Those with the same ``colour``, also
    a name, have one. An estimate without an interval is a hollow point. ``zero`` says what 0 means,
    beside the line there."""
    lines, colours = list(rows["line"].unique()), list(rows["colour"].unique())
    figure, axes = new_axes(title, across, size=(WIDTH, 2.0 + 0.4 * max(len(lines), 2)))
    for number, (colour, (name, own)) in enumerate(by_colour(rows, "colour")):
        beside = (number - (len(colours) - 1) / 2) * 0.8 / max(len(colours), 2)
        at = own["line"].map(lines.index).to_numpy(dtype=float) + beside
        hollow = own["low"].isna().to_numpy()
        look: dict[str, Any] = {"lying": True, "color": colour}
        draw_points(axes, at[~hollow], own[~hollow], label=name, **look)
        draw_points(axes, at[hollow], own[hollow], mfc="white", **look)
    axes.axvline(0.0, color="0.3", lw=0.8)
    if zero:
        at_top: dict[str, Any] = {"ha": "center", "va": "bottom", "color": "0.3"}
        axes.text(0, 1.02, zero, transform=axes.get_xaxis_transform(), **at_top)
        axes.set_title(axes.get_title(), fontsize=10, fontweight="bold", pad=18)
    list_names(axes, lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    if len(colours) > 1:
        figure.legend(loc="outside lower center", ncols=min(len(colours), 3))  # off the intervals
    return figure


def link_of(**about: Any) -> str:
    """The link of a mark, as an address within a page: it names the turns behind the mark, and
    their ``share`` as a text."""
    known = {
        name: value
        for name, value in about.items()
        if (isinstance(value, str) and value)
        or (isinstance(value, float) and not math.isnan(value))
    }
    return f"#{urlencode(known)}"


def link_title(link: str, heading: Callable[[str], str] = str) -> str:
    """A link of :func:`link_of` in words; ``heading`` gives a category's name."""
    about = dict(parse_qsl(link.removeprefix("#")))
    share = about.pop("share", "")
    shown = about | {name: heading(about[name]) for name in about if name == "category"}
    words = [f"{name} {value}" for name, value in shown.items()]
    return ", ".join([*words, share] if share else words)


def _link(axes: Axes, across: Any, up: Any, rows: pd.DataFrame) -> None:
    """Lay an invisible scatter over points: in an SVG each of its points can have a link."""
    about = rows[[name for name in LINKED if name in rows]].astype(object).to_dict("records")
    ends = rows[["value", "low", "high"]].to_numpy(float)
    said = [
        f"{v:.2f}" if math.isnan(low) else f"{v:.2f} [{low:.2f}, {high:.2f}]"
        for v, low, high in ends
    ]
    links = [link_of(**row, share=text) for row, text in zip(about, said, strict=True)]
    axes.scatter(across, up, color="k", alpha=0, urls=links)


def list_names(axes: Axes, names: Sequence[str]) -> None:
    """Put names at 0, 1, … of the y axis, from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _save(path: Path, figure: Figure, kind: str, stem: str) -> None:
    """Write a figure as one of :data:`FIGURE_FORMATS`, its panels lettered if there are several."""
    from matplotlib import rc_context

    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    for letter, axes in zip(ascii_lowercase, panels, strict=False):
        title = axes.get_title()
        if len(panels) > 1 and not f"{title}  ".startswith(f"{letter}  "):
            axes.title.set_text(f"{letter}  {title}".rstrip())
    undated: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Description": figure.get_label() or None},
        "pdf": {"CreationDate": None},
    }
    # Ticks are only made now. Ids in an SVG are random without a salt.
    with rc_context({**STYLE, "svg.hashsalt": stem}):
        # Tight: a title that is wider than its axes isn't clipped.
        figure.savefig(path, format=kind, dpi=150, bbox_inches="tight", metadata=undated[kind])


def reading_of(svg: bytes) -> str:
    """The label of a figure that was saved as SVG; it says how to read the figure."""
    found = re.search(rb"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)
    return "" if found is None else unescape(" ".join(found[1].decode().split()))


def links_of(svg: bytes) -> tuple[str, list[tuple[str, list[float]]]]:
    """The links of a figure's marks, and where they are.

    Returns:
        The figure's ``viewBox``; for each mark its :func:`link_of` and the left, top, width and
        height of the rectangle to click.
    """
    box = re.search(rb'viewBox="([\d. ]+)"', svg)
    found = []
    for link, mark in re.findall(rb'<a xlink:href="(#[^"]*)"[^>]*>(.*?)</a>', svg, re.DOTALL):
        point = re.search(rb'<use [^>]*?x="([\d.]+)" y="([\d.]+)"', mark)
        path = re.findall(rb"[ML] ([\d.]+) ([\d.]+)", mark)
        corners = [point.groups()] if point else path
        if corners:
            x, y = ([float(corner[axis]) for corner in corners] for axis in (0, 1))
            more = REACH if point else 0.0
            left, top = min(x) - more, min(y) - more
            size = [max(x) + more - left, max(y) + more - top]
            found.append((unescape(link.decode()), [round(n, 1) for n in (left, top, *size)]))
    return box[1].decode() if box else "", found


def save_figure(figure: Figure, folder: str | Path, stem: str) -> list[Path]:
    """Write a figure in all :data:`FIGURE_FORMATS`, replacing each whole file at once, and return
    the paths. The same figure gives the same bytes.

    Raises:
        OSError: a file can't be written.
    """
    from ia_mech.run.integrity import replace_file

    paths = [expanded(folder) / f"{stem}.{kind}" for kind in FIGURE_FORMATS]
    for kind, path in zip(FIGURE_FORMATS, paths, strict=True):
        replace_file(path, partial(_save, figure=figure, kind=kind, stem=stem))
    return paths
