"""Tables, pictures and the terminal report of a small analysis."""

import re
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from rich.console import Console
from scipy.special import expit

from ia_mech.estimates import write_parquet
from probes.analysis import analyse
from probes.controls import Baseline, Controls
from probes.outcome import Outcome
from probes.analysis import MEASURES, Arrays, Settings
from probes.report import figures
from probes.report import keep as tables
from probes.report.screen import ROWS, print_analysis, shown_layers
from probes.report.verdict import Verdict, verdict

LAYERS, CONTEXTS, WIDTH, SIGNAL = 8, 60, 12, 3
POSITIONS = ["turn_$x$ [red]", "header_last"]
CONTEXT = {"target": "rate", "judge": "rules", "estimator": "logistic", "runs": "a", "model": "m"}
ODD = "[bold]$tf_idf$[/]"
SAID = Verdict(True, True, False, "[red]nothing[/] is known of it.")


@pytest.fixture(scope="module")
def analysis():
    """The signal is at the last position from one layer on."""
    rng = np.random.default_rng(0)
    latent = rng.normal(size=CONTEXTS)
    states = rng.normal(size=(LAYERS, CONTEXTS, len(POSITIONS), WIDTH))
    states[SIGNAL:, :, 1, 0] += 3 * latent
    k = rng.binomial(8, 1 / (1 + np.exp(1 - 2 * latent)))
    controls = Controls(
        [Baseline(ODD, rng.normal(size=(CONTEXTS, 5)), "the words [/] of a context")],
        [Baseline("output", latent[:, None] + rng.normal(size=(CONTEXTS, 4)), "the output")],
        rng.integers(4, size=CONTEXTS),
        ["no lengths [of anything]"],
    )
    sources = np.arange(CONTEXTS) % 40
    return analyse(
        Arrays(states.astype(np.float32), POSITIONS),
        Outcome.of(k, np.full(CONTEXTS, 8), sources),
        controls,
        Settings(permutations=20, resamples=100, control_draws=2, workers=1),
    )


@pytest.fixture(scope="module")
def untested(analysis):
    """The same without permutations."""
    shape = analysis.tested.statistic.shape
    nothing = {"p_family": np.full(shape, np.nan), "band": np.full(shape, np.nan), "p": np.nan}
    nothing |= {"family_band": np.nan, "null": np.empty(0), "permutations": 0}
    return replace(analysis, tested=replace(analysis.tested, **nothing))


def stretched(analysis, layers, **headline):
    """The same with layers repeated, so that there are more."""
    rows = np.arange(layers) % LAYERS
    cells = {"statistic", "p_family", "band"}
    tested = {name: getattr(analysis.tested, name)[rows] for name in cells}
    return replace(
        analysis,
        layers=list(range(layers)),
        tested=replace(analysis.tested, **tested),
        auroc=[analysis.auroc[at] for at in rows],
        code=[analysis.code[at] for at in rows],
        headline=replace(analysis.headline, **headline),
    )


def printed(analysis, said=SAID, width=100):
    screen = Console(highlight=False, emoji=False, width=width)
    with screen.capture() as capture:
        print_analysis(screen, analysis, "rate: [k] of n", said)
    return capture.get()


def heat_rows(text):
    """Layer -> the words of its line."""
    lines = text[text.index("AUROC by layer") :].splitlines()
    found = (re.fullmatch(r"\s*(?:→ +)?(\d+)  (.*)", line) for line in lines)
    return {int(m[1]): m[2].split() for m in found if m}


# -- tables ---------------------------------------------------------------------------------------


def test_rows_hold_every_estimate_once(analysis):
    frame = tables.rows(analysis, CONTEXT)
    assert list(frame) == [*tables.COLUMNS, *CONTEXT]
    assert not frame.duplicated(tables.KEY).any()
    cells, controls = LAYERS * len(POSITIONS), len(analysis.compared)
    per_cell = ["auroc_cell", "statistic", "null_band_95", "p_family", "selected_in_folds"]
    expected = {
        **dict.fromkeys(per_cell, cells),
        **dict.fromkeys(("auroc_control", "gain_over_control"), controls),
        **dict.fromkeys(("code_bits_saved_per_turn", "code_ratio"), LAYERS),
        **dict.fromkeys(MEASURES, 1),
        **dict.fromkeys(("statistic_headline", "null_band_95_headline", "p_headline"), 1),
        "null_band_95_family": 1,
    }
    assert dict(Counter(frame["quantity"])) == expected
    assert frame[["value", "sources", "contexts"]].notna().all(axis=None)
    assert (frame["contexts"] == CONTEXTS).all()
    assert frame[list(CONTEXT)].eq(pd.Series(CONTEXT)).all(axis=None)


def test_rows_hold_the_right_numbers(analysis):
    frame = tables.rows(analysis, {}).set_index(tables.KEY).sort_index()
    cell = frame.loc[("auroc_cell", 5, "header_last", pd.NA)].squeeze()
    expected = analysis.auroc[5][1]
    assert (cell["value"], cell["low"], cell["high"]) == (
        *(expected.value, expected.low),
        expected.high,
    )
    assert (cell["sources"], cell["level"], cell["method"]) == (40, 0.95, expected.method)
    tested = frame.loc[("statistic", 5, "header_last", pd.NA)].squeeze()
    assert (tested["value"], tested["p"]) == (
        analysis.tested.statistic[5, 1],
        analysis.tested.p_family[5, 1],
    )
    control = analysis.compared[1]
    gain = frame.loc[("gain_over_control", pd.NA, pd.NA, control.name)].squeeze()
    assert gain["low"] == control.gain.low
    shares = frame.loc["selected_in_folds"]["value"]
    assert shares.sum() == pytest.approx(1)
    assert shares.max() == Counter(analysis.headline.picked).most_common(1)[0][1] / 5
    assert frame.loc["p_headline"]["value"].item() == analysis.tested.p


def test_rows_without_permutations(untested):
    frame = tables.rows(untested, CONTEXT).set_index("quantity")
    assert frame.loc[["p_family", "null_band_95", "p_headline"], "value"].isna().all()
    assert frame.loc[["auroc_cell", "statistic"], "value"].notna().all()


def test_context_may_not_replace_a_column(analysis):
    with pytest.raises(ValueError, match="layer"):
        tables.rows(analysis, {"layer": 3})


def test_predictions(analysis):
    frame = tables.predictions(analysis)
    assert len(frame) == CONTEXTS
    assert list(frame)[:7] == [
        *("fold", "source", "run", "positives", "trials", "log_odds", "probability")
    ]
    assert list(frame)[7:] == [f"control:{ODD}", "control:output", "control:embeddings"]
    assert np.array_equal(frame["probability"], expit(analysis.headline.scores))
    assert np.array_equal(frame["control:output"], analysis.compared[1].scores)
    assert frame.groupby("source")["fold"].nunique().eq(1).all()


def test_parquet_is_replaced_whole(analysis, tmp_path):
    frame, path = tables.rows(analysis, CONTEXT), tmp_path / "estimates.parquet"
    path.write_text("old")
    write_parquet(frame, path)
    pd.testing.assert_frame_equal(pd.read_parquet(path), frame, check_dtype=False)

    def broken(scratch):
        scratch.write_text("half")
        raise OSError("disk full")

    before = path.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        tables.replace_file(path, broken)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# -- figures --------------------------------------------------------------------------------------


def test_heat_map(analysis):
    figure = figures.heat_map(analysis, "rate of $x_1$")
    axes, bar = figure.axes
    values = np.array([[cell.value for cell in row] for row in analysis.auroc])
    (image,) = axes.images
    assert np.array_equal(image.get_array(), values)
    assert image.origin == "lower"
    assert np.isclose(sum(image.get_clim()), 1)  # chance is in the middle
    assert image.get_clim()[1] >= values.max()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("position", "layer (0 = embeddings)")
    assert [label.get_text() for label in axes.get_xticklabels()] == POSITIONS
    assert bar.get_ylabel() == "AUROC (0.5 = chance)"
    facts = [text.get_text() for text in axes.texts]
    assert [t for t in facts if re.fullmatch(r"0\.\d\d", t)] == [f"{v:.2f}" for v in values.flat]
    subtitle = next(text for text in facts if "contexts" in text).replace("\n", " ")
    assert "60 contexts of 40 sources · 20 permutations" in subtitle
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert dots == {(j, i) for i, j in np.argwhere(analysis.tested.p_family <= 0.05)}
    assert dots
    (frame,) = (patch for patch in axes.patches if isinstance(patch, Rectangle))
    at = POSITIONS.index(analysis.headline.position), analysis.headline.layer
    assert tuple(np.add(frame.get_xy(), 0.5)) == at


def test_heat_map_of_many_layers_has_no_numbers(analysis):
    figure = figures.heat_map(stretched(analysis, 40), "rate")
    (facts,) = (text.get_text() for text in figure.axes[0].texts)
    assert "contexts" in facts
    assert len(figure.axes[0].get_yticks()) == 20


def test_layer_curve(analysis):
    figure = figures.layer_curve(analysis, "rate")
    upper, lower = figure.axes
    assert tuple(figure.get_size_inches()) == (8, 6)
    assert upper.get_ylabel() == f"AUROC at {analysis.headline.position}"
    assert "bits saved" in lower.get_ylabel()
    assert lower.get_xlabel() == "layer (0 = embeddings)"
    at = POSITIONS.index(analysis.headline.position)
    drawn = {line.get_label(): line.get_ydata() for line in upper.lines}
    curve = [row[at].value for row in analysis.auroc]
    assert np.array_equal(drawn["each layer by itself, 95% interval"], curve)
    saved = [code.saved_per_turn.value for code in analysis.code]
    assert np.array_equal(lower.lines[0].get_ydata(), saved)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts() if text.get_text()]
    assert texts[0] == f"headline (nested): {analysis.headline.measures['auroc'].text()}"
    assert "null's 95% quantile (closed form)" in texts
    assert "null's largest, 95% (family-wise)" in texts
    assert texts[-4:] == [f"{c.name}: {c.auroc.text()}" for c in analysis.compared]
    styles = {line.get_label().split(":")[0]: line for line in upper.lines}
    assert styles["control task"].get_linestyle() == ":"
    assert styles["output"].get_linestyle() == "-"
    assert styles[ODD].get_linestyle() == "--"


def test_no_text_leaves_the_picture_or_is_taken_for_tex(analysis):
    for draw in (figures.heat_map, figures.layer_curve):
        figure = draw(analysis, "a long title of $x_1$ and $y$ " * 4)
        figure.draw_without_rendering()
        width, height = figure.get_size_inches() * figure.dpi
        # Numbers left out: axes keep ticks beyond their ends, which aren't drawn.
        texts = figure.findobj(
            lambda a: isinstance(a, Text) and a.get_visible() and re.search("[a-z]", a.get_text())
        )
        assert len(texts) > 5
        assert not any(text.get_parse_math() for text in texts)
        for text in texts:
            box = text.get_window_extent()
            assert box.x0 >= -1 and box.y0 >= -1, text
            assert box.x1 <= width + 1 and box.y1 <= height + 1, text


def test_layer_curve_without_permutations_or_controls(untested):
    figure = figures.layer_curve(replace(untested, compared=[]), "rate")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert not any("null" in text for text in texts)
    figures.heat_map(untested, "rate").draw_without_rendering()


def test_saved_figures(analysis, tmp_path):
    before = dict(matplotlib.rcParams)
    paths = figures.save(figures.layer_curve(analysis, "rate"), tmp_path, "curve")
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    first = [path.read_bytes() for path in paths]
    again = figures.save(figures.layer_curve(analysis, "rate"), tmp_path, "curve")
    assert [path.read_bytes() for path in again] == first
    assert imread(paths[0]).shape[:2] == (900, 1200)
    assert ElementTree.parse_target(paths[1]).getroot().tag.endswith("svg")
    assert dict(matplotlib.rcParams) == before


# -- the terminal ---------------------------------------------------------------------------------


def test_report_prints_every_cell(analysis):
    text = printed(analysis)
    rows = heat_rows(text)
    assert list(rows) == list(range(LAYERS))
    assert analysis.headline.position == POSITIONS[1]
    for layer, words in rows.items():
        star = ["*" if p <= 0.05 else "" for p in analysis.tested.p_family[layer]]
        first, headline = (cell.text() for cell in analysis.auroc[layer])
        assert words[0] == first.split()[0] + star[0]
        assert " ".join(words[1:4]) == headline + star[1]
        assert words[4] == f"{round(analysis.code[layer].saved_per_turn.value, 3) + 0.0:+.3f}"
    assert f"→ {analysis.headline.layer}" in text
    assert "* family-wise p ≤ 0.05" in text


def test_a_p_value_of_one_in_twenty_is_marked_as_the_verdict_has_it(analysis):
    p = np.full_like(analysis.tested.p_family, 0.0501)
    p[2, 0] = 0.05
    edge = replace(analysis, tested=replace(analysis.tested, p_family=p, p=0.05))
    rows = heat_rows(printed(edge))
    assert [layer for layer, words in rows.items() if "*" in " ".join(words)] == [2]
    assert rows[2][0].endswith("*")
    (dot,) = figures.heat_map(edge, "rate").axes[0].lines
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (0, 2)
    assert verdict(edge).readable


def test_report_prints_headline_controls_and_estimand(analysis):
    text = " ".join(printed(analysis).split())
    assert "60 contexts of 40 sources, 480 turns" in text
    assert (
        "mean over 5 outer folds; on new sources, of probes trained on 4/5 of these; pairs of "
        "contexts within a fold and run" in text
    )
    for layer, position in analysis.headline.picked:
        assert f"layer {layer} {position} ×" in text
    assert f"p = {analysis.tested.p:.3f} (selection replayed)" in text
    for name in ("auroc", "average_precision", "prevalence", "deviance_explained"):
        assert analysis.headline.measures[name].text() in text
    for control in analysis.compared:
        assert control.name[:15] in text
        assert control.auroc.text() in text
        assert f"{control.gain.value:+.2f} [{control.gain.low:+.2f}," in text
    assert "selectivity" in text
    assert "no lengths [of anything]" in text


def test_report_ends_with_the_verdict(analysis):
    assert printed(analysis).splitlines()[-1] == SAID.sentence
    said = verdict(analysis)
    text = " ".join(printed(analysis, said).split())
    assert text.endswith(said.sentence)


def test_markup_in_names_is_text(analysis):
    text = printed(analysis)
    assert "rate: [k] of n" in text
    assert "[bold]$tf_idf$" in text
    assert "the words [/] of a context" in text
    assert "$x$ [red]" in text


def test_report_fits(analysis, untested):
    many = stretched(analysis, 31)
    lines = printed(many, verdict(many)).splitlines()
    assert len(lines) < 45
    for text in (printed(analysis), printed(many), printed(untested), printed(analysis, width=80)):
        assert max(map(len, text.splitlines())) <= 100


def test_positions_that_do_not_fit_are_named(analysis):
    names = [f"position_number{n}" for n in range(11)] + ["header_last"]
    repeated = {
        name: np.repeat(getattr(analysis.tested, name), 6, axis=1)
        for name in ("statistic", "p_family", "band")
    }
    wide = replace(
        analysis,
        positions=names,
        auroc=[[row[0]] * 11 + [row[1]] for row in analysis.auroc],
        tested=replace(analysis.tested, **repeated),
        headline=replace(
            analysis.headline, picked=[(3, "header_last")] * 5, position="header_last"
        ),
    )
    text = printed(wide)
    assert max(map(len, text.splitlines())) <= 100
    assert "no room for position_number" in " ".join(text.split())
    assert analysis.auroc[3][1].text() in text


def test_layers_that_are_shown(analysis):
    alike = stretched(analysis, 31, layer=6, picked=[(6, "header_last")] * 5)
    assert shown_layers(alike) == list(range(0, 31, 2))
    text = printed(alike)
    assert list(heat_rows(text)) == list(range(0, 31, 2))
    assert "every second layer and those chosen" in " ".join(text.split())
    apart = stretched(analysis, 31, layer=7, picked=[(at, "header_last") for at in (1, 5, 7, 11)])
    assert {1, 5, 7, 11} <= set(shown_layers(apart))
    assert len(shown_layers(apart)) <= ROWS


def test_report_without_permutations(untested):
    text = " ".join(printed(untested).split())
    assert "no permutations, so nothing was tested" in text
    assert "nan" not in text
