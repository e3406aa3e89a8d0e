"""What figures share: panel letters, intervals, and a judge's floor; and the progress bar."""

import io
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.image import imread

from experiments.shown import Bars, Lines
from experiments.temperature_sweep import RATE, TemperatureSweep
from ia_mech import display
from ia_mech.display import (
    Bar,
    draw_line,
    draw_points,
    link_of,
    links_of,
    new_axes,
    reading_of,
    save_figure,
)
from ia_mech.rates.gate import Gate
from ia_mech.stats import Estimate

FLOOR = 0.31
GATE = Gate("planted", 40, 0.4, FLOOR, Estimate(0.09, -0.02, 0.2, 40, ""),
            Estimate(-0.22, -0.3, 0.1, 40, ""))  # fmt: skip
NONE = Estimate(np.nan, np.nan, np.nan, 0, "no values")
WITHOUT = Gate("planted", 0, np.nan, np.nan, NONE, NONE)


def frame(*rows: dict) -> pd.DataFrame:
    usual = {"dataset": "d", "temperature": 1.0, "term": "", "model": "m", "value": 0.4,
             "low": 0.3, "high": 0.6}  # fmt: skip
    return pd.DataFrame([usual | row for row in rows])


def test_a_figure_says_in_its_file_how_to_read_it_and_its_title_is_not_clipped(tmp_path, pictures):
    title = "smollm2-135m-instruct · follow-ups by builtin · floor +0.12 [+0.06, +0.18]"
    figure = Lines(title, "x", "y", frame({}, {"temperature": 2.0}), levels={"a & b": 0.5}).draw()
    (axes,) = figure.axes
    axes.set_yticks([0.5], ["a long name of a tick"])  # moves axes and title to the right
    assert " ".join(axes.get_title().split()) == title
    png, svg, _ = save_figure(figure, tmp_path, "lines")
    edges = imread(png)[:, [0, -1], :3]
    assert edges.min() == 1.0  # white
    assert reading_of(svg.read_bytes()) == figure.get_label()
    assert "one term" in figure.get_label() and "Dotted: a & b." in figure.get_label()
    assert reading_of(b"<svg/>") == ""


def test_marks_lead_to_what_they_are_of_and_the_file_says_where_they_are(tmp_path, pictures):
    rows = frame({"decoy": None}, {"temperature": 3.0, "decoy": "sibling", "value": 0.6})
    for draw in (lambda axes: draw_line(axes, rows["temperature"], rows, "C0", "line"),
                 lambda axes: draw_points(axes, [1.0, 3.0], rows)):  # fmt: skip
        figure, axes = new_axes("t", "x", "y")
        draw(axes)
        (bar,) = axes.bar([2.0], [0.5])
        bar.set_url(link_of(temperature=0.0, category="a b"))
        _, svg, _ = save_figure(figure, tmp_path, "marks")
        box, found = links_of(svg.read_bytes())
        links, places = (list(of) for of in zip(*found, strict=True))
        interval = "share=0.{}0+%5B0.30%2C+0.60%5D"
        first = f"#model=m&dataset=d&temperature=1.0&{interval.format(4)}"
        second = f"#model=m&dataset=d&temperature=3.0&decoy=sibling&{interval.format(6)}"
        assert sorted(links) == sorted([first, second, "#temperature=0.0&category=a+b"])
        at = {link: np.array(place) for link, place in zip(links, places, strict=True)}
        apart = (at[second] - at[first])[:2]
        pixels = axes.transData.transform([[1.0, 0.4], [3.0, 0.6]])
        expected = (pixels[1] - pixels[0]) * [1, -1] * 72 / figure.dpi  # an SVG has 72 to the inch
        assert apart == pytest.approx(expected, abs=0.2)
        width, height = map(float, box.split()[2:])
        for left, top, wide, high in places:
            assert 0 <= left <= left + wide <= width and 0 <= top <= top + high <= height
    assert links_of(b"<svg/>") == ("", [])


def test_bars_and_bands_end_where_intervals_do():
    rows = frame({}, {"value": 0.5, "low": np.nan, "high": np.nan})
    for lying in (False, True):
        _, axes = new_axes("", "")
        draw_points(axes, [7, 9], rows, lying=lying)
        bars, _ = axes.collections
        ends = [segment[:, 0 if lying else 1].tolist() for segment in bars.get_segments()]
        assert ends == [pytest.approx([0.3, 0.6]), [0.5, 0.5]], "none where there is no interval"
    _, axes = new_axes("", "")
    draw_line(axes, pd.Series([1, 2]), rows, "C0", "line")
    corners = axes.collections[0].get_paths()[0].vertices
    assert corners[:, 1].min() == 0.3 and corners[:, 1].max() == 0.6
    assert axes.lines[0].get_ydata().tolist() == [0.4, 0.5]


def test_all_datasets_together_stand_out():
    rows = [{"dataset": name, "temperature": t} for name in ("a", "(all)") for t in (0.0, 1.0)]
    axes = Lines("t", "x", "y", frame(*rows), by="dataset").draw().axes[0]
    assert [line.get_linewidth() for line in axes.lines] == [0.8, 1.4]
    bands = [one for one in axes.collections if isinstance(one, PolyCollection)]
    assert len([one for one in bands if one.get_paths()]) == 1


def test_where_a_table_has_no_interval_a_figure_has_none_either():
    few = frame({"sources": 4, "term": "a"}, {"sources": 5, "term": "b", "value": 0.5})
    figure = Bars("t", "x", few).draw()
    filled, hollow = (one.lines[0] for one in figure.axes[0].containers)
    assert filled.get_xdata().tolist() == [0.5] and hollow.get_xdata().tolist() == [0.4]
    assert filled.get_markerfacecolor() != "white" == hollow.get_markerfacecolor()
    bars = [one for one in figure.axes[0].collections if hasattr(one, "get_segments")]
    ends = [segment[:, 0].tolist() for one in bars for segment in one.get_segments()]
    assert ends == [pytest.approx([0.3, 0.6]), [0.4, 0.4]]
    lines = Lines("t", "x", "y", few.assign(temperature=[0.5, 1.0], term="x")).draw()
    corners = lines.axes[0].collections[0].get_paths()
    assert all((path.vertices[:, 0] == 1.0).all() for path in corners)


@pytest.mark.parametrize("gate", [GATE, WITHOUT])
def test_figures_of_a_judges_rate_show_its_floor_and_excess(gate):
    experiment = TemperatureSweep([SimpleNamespace(model={"name": "m"})], Namespace(), Path())
    experiment.gate = gate
    floors = [] if gate is WITHOUT else [{"quantity": "floor", "value": at} for at in (0.1, FLOOR)]
    floors = [row | {"temperature": float(at)} for at, row in enumerate(floors)]
    figure = experiment.figures(frame({"quantity": RATE}, *floors))["rates"].draw()
    (axes,) = figure.axes
    drawn = [line for line in axes.lines if line.get_label() == "after a wrong conversation"]
    if gate is WITHOUT:
        assert drawn == [] and axes.get_title() == "m\nby judge planted; control: no decoys"
        return
    assert drawn[0].get_xdata().tolist() == [0, 1] and drawn[0].get_ydata().tolist() == [0.1, FLOOR]
    assert axes.get_title() == "m\nby judge planted; control: undecided"


def test_a_bar_is_a_line_now_and_then_where_none_can_be_redrawn(capsys, monkeypatch):
    def lines(steps: int) -> list[str]:
        bar = Bar()
        bar.start("rows", 40)
        for number in range(steps):
            bar.advance(1, f"number {number}")
        bar.stop()
        return capsys.readouterr().err.splitlines()

    assert lines(40) == []  # it was over in less than SECONDS
    monkeypatch.setattr(display, "SECONDS", 0.0)
    shown = lines(40)
    assert len(shown) == 40 and shown[0].startswith("rows:   2% 1/40 steps [00:00, ")
    assert len({*shown}) == 40 and shown[-1].endswith("number 39]")
    assert shown[-2].startswith("rows:  97% 39/40"), "100% only at the end"


def test_a_notebook_redraws_its_bar(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(
        sys, "stderr", type("OutStream", (), {"__module__": "ipykernel.iostream"})()
    )
    for name in ("write", "flush", "isatty"):
        setattr(sys.stderr, name, getattr(written, name))
    bar = Bar()
    bar.start("rows", 40)
    bar.stop()
    assert written.getvalue().startswith("\rrows:   0% |")
