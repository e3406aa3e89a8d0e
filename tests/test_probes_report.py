"""Tables, figures and the terminal report of a small analysis; every branch of its conclusion."""

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

from ia_mech.display import save_figure
from ia_mech.stats import Estimate
from probes.analysis import MEASURES, Arrays, Compared, Settings, analyse
from probes.controls import Baseline, Controls
from probes.report import figures, files
from probes.report.conclusion import COVERAGE, LEVEL, Conclusion, conclude
from probes.report.screen import ROWS, print_analysis, shown_layers
from probes.targets import Outcome

LAYERS, CONTEXTS, WIDTH, SIGNAL = 8, 60, 12, 3
POSITIONS = ["turn_$x$ [red]", "header_last"]
ODD = "[bold]$tf_idf$[/]"
CONCLUSION = Conclusion(True, True, False, "[red]nothing[/] is known of it.")


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
    nothing |= {"family_band": np.nan, "null": np.empty(0)}
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
        headline=replace(analysis.headline, **headline),
    )


def printed(analysis, said=CONCLUSION, width=100):
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
    frame = files.estimates(analysis)
    assert list(frame) == files.COLUMNS
    assert not frame.duplicated(files.KEY).any()
    cells, controls = LAYERS * len(POSITIONS), len(analysis.compared)
    per_cell = ["auroc_cell", "statistic", "null_band_95", "p_family", "selected_in_folds"]
    expected = {
        **dict.fromkeys(per_cell, cells),
        **dict.fromkeys(("auroc_control", "gain_over_control"), controls),
        **dict.fromkeys(MEASURES, 1),
        **dict.fromkeys(("statistic_headline", "null_band_95_headline", "p_headline"), 1),
        "null_band_95_family": 1,
    }
    assert dict(Counter(frame["quantity"])) == expected
    assert frame[["value", "sources", "contexts"]].notna().all(axis=None)
    assert (frame["contexts"] == CONTEXTS).all()


def test_rows_hold_the_right_numbers(analysis):
    frame = files.estimates(analysis).set_index(files.KEY).sort_index()
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


def test_predictions(analysis):
    frame = files.predictions(analysis)
    assert len(frame) == CONTEXTS
    assert list(frame)[:5] == ["fold", "positives", "trials", "log_odds", "probability"]
    assert list(frame)[5:] == [f"control:{ODD}", "control:output", "control:embeddings"]
    assert np.array_equal(frame["probability"], expit(analysis.headline.scores))
    assert np.array_equal(frame["control:output"], analysis.compared[1].scores)
    assert frame.groupby(analysis.outcome.sources)["fold"].nunique().eq(1).all()


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
    subtitle = axes.get_title().replace("\n", " ")
    assert "60 contexts of 40 sources · 20 permutations" in subtitle
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert dots == {(j, i) for i, j in np.argwhere(analysis.tested.p_family <= 0.05)}
    assert dots
    (frame,) = (patch for patch in axes.patches if isinstance(patch, Rectangle))
    at = POSITIONS.index(analysis.headline.position), analysis.headline.layer
    assert tuple(np.add(frame.get_xy(), 0.5)) == at


def test_layer_curve(analysis):
    figure = figures.layer_curve(analysis, "rate")
    (axes,) = figure.axes
    assert axes.get_ylabel() == f"AUROC at {analysis.headline.position}"
    assert axes.get_xlabel() == "layer (0 = embeddings)"
    at = POSITIONS.index(analysis.headline.position)
    drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
    curve = [row[at].value for row in analysis.auroc]
    assert np.array_equal(drawn["each layer by itself, 95% interval"], curve)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts() if text.get_text()]
    assert texts[0] == f"headline (nested): {analysis.headline.measures['auroc'].text()}"
    assert "null's 95% quantile (closed form)" in texts
    assert "null's largest, 95% (family-wise)" in texts
    assert texts[-4:] == [f"{c.name}: {c.auroc.text()}" for c in analysis.compared]
    styles = {line.get_label().split(":")[0]: line for line in axes.lines}
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


def test_without_permutations_nothing_is_said_of_them(untested):
    frame = files.estimates(untested).set_index("quantity")
    assert frame.loc[["p_family", "null_band_95", "p_headline"], "value"].isna().all()
    assert frame.loc[["auroc_cell", "statistic"], "value"].notna().all()
    figure = figures.layer_curve(replace(untested, compared=[]), "rate")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert not any("null" in text for text in texts)
    figures.heat_map(untested, "rate").draw_without_rendering()
    text = " ".join(printed(untested).split())
    assert "no permutations, so nothing was tested" in text and "nan" not in text


def test_saved_figures(analysis, tmp_path):
    before = dict(matplotlib.rcParams)
    paths = save_figure(figures.layer_curve(analysis, "rate"), tmp_path, "curve")
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    first = [path.read_bytes() for path in paths]
    again = save_figure(figures.layer_curve(analysis, "rate"), tmp_path, "curve")
    assert [path.read_bytes() for path in again] == first
    assert imread(paths[0]).shape[:2] == (750, 1200)
    assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")
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
    assert f"→ {analysis.headline.layer}" in text
    assert "* family-wise p ≤ 0.05" in text


def test_a_p_value_of_one_in_twenty_is_marked_as_the_conclusion_has_it(analysis):
    p = np.full_like(analysis.tested.p_family, 0.0501)
    p[2, 0] = 0.05
    edge = replace(analysis, tested=replace(analysis.tested, p_family=p, p=0.05))
    rows = heat_rows(printed(edge))
    assert [layer for layer, words in rows.items() if "*" in " ".join(words)] == [2]
    assert rows[2][0].endswith("*")
    (dot,) = figures.heat_map(edge, "rate").axes[0].lines
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (0, 2)
    assert conclude(edge).readable


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


def test_report_ends_with_the_conclusion(analysis):
    text = printed(analysis)
    assert text.splitlines()[-1] == CONCLUSION.sentence
    for name in ("rate: [k] of n", "[bold]$tf_idf$", "the words [/] of a context", "$x$ [red]"):
        assert name in text  # markup in names is text
    said = conclude(analysis)
    text = " ".join(printed(analysis, said).split())
    assert text.endswith(said.sentence)


def test_layers_that_are_shown(analysis):
    alike = stretched(analysis, 31, layer=6, picked=[(6, "header_last")] * 5)
    assert shown_layers(alike) == list(range(0, 31, 2))
    text = printed(alike)
    assert list(heat_rows(text)) == list(range(0, 31, 2))
    assert "every second layer and those chosen" in " ".join(text.split())
    apart = stretched(analysis, 31, layer=7, picked=[(at, "header_last") for at in (1, 5, 7, 11)])
    assert {1, 5, 7, 11} <= set(shown_layers(apart))
    assert len(shown_layers(apart)) <= ROWS


# -- the conclusion -------------------------------------------------------------------------------

LATENT = "So it is latent: more than the next-token distribution and the text tell."
OUTPUT_TELLS = "Not shown to be latent: the output distribution may tell as much."
TEXT_TELLS = "Not shown to be latent: it may be topic, wording or length."
BOTH_TELL = "Not shown to be latent: text and output distribution may tell as much."
NO_OUTPUT = "Whether it is latent can't be said without the output control."
TOO_NARROW = "Latent is never said of intervals below 95%."

MORE, SAME = (0.11, 0.04, 0.18), (0.03, -0.02, 0.08)  # a gain and its interval


@pytest.fixture(scope="module")
def plain():
    """60 contexts of 30 sources, two layers, one position."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(2, 60, 1, 6)).astype(np.float32)
    outcome = Outcome.of(rng.binomial(4, 0.4, 60), np.full(60, 4), np.arange(60) % 30)
    settings = Settings(folds=3, permutations=19, resamples=50, workers=1)
    return analyse(Arrays(states, ["header_last"]), outcome, None, settings)


def control(kind, gain, name=None):
    """Of a value and the ends of its interval, NaN where there is none."""
    own = Estimate(0.6, 0.5, 0.7, 30, "percentile")
    return Compared(name or kind, "by hand", kind, own, Estimate(*gain, 30, "percentile"), None)


@pytest.fixture
def concluded(plain):
    """The conclusion from these gains, by kind: a gain, or several by the control's name."""

    def say(p=0.01, level=0.95, permutations=19, **gains):
        compared = []
        for kind, gain in gains.items():
            kind = kind.replace("_", " ")
            several = gain if isinstance(gain, dict) else {kind: gain}
            compared += [control(kind, g, name) for name, g in several.items()]
        auroc = Estimate(0.712, 0.654, 0.771, 30, "percentile")
        return conclude(
            replace(
                plain,
                settings=replace(plain.settings, level=level, permutations=permutations),
                tested=replace(
                    plain.tested, p=p, null=plain.tested.null[:permutations], value=0.66
                ),
                headline=replace(
                    plain.headline, layer=1, measures={**plain.headline.measures, "auroc": auroc}
                ),
                compared=compared,
            ),
            "the rate",
        )

    return say


def claims(found):
    return found.readable, found.beyond_text, found.latent


def test_nothing_found(concluded, plain):
    untested = concluded(p=np.nan, permutations=0, text=MORE, output=MORE)
    assert claims(untested) == (False, False, False)
    assert "was not tested" in untested.sentence
    found = concluded(p=0.0501, text=MORE, output=MORE)
    assert claims(found) == (False, False, False)
    reached = np.quantile(plain.tested.null, 0.95)
    assert found.sentence == (
        "no evidence that the rate is readable from the hidden states of 60 contexts of 30 "
        "sources: AUROC 0.71 [0.65, 0.77] where the inner loop chose to look (layer 1 at "
        "header_last), p = 0.050. The closed form that is tested has 0.66, and one in twenty "
        f"permutations of the labels reaches {reached:.2f}: what is readable no better than that "
        "can't be told from nothing here."
    )
    assert "latent" not in found.sentence


def test_the_level_of_the_test_is_inclusive(concluded):
    assert (
        LEVEL == 0.05
        and concluded(p=0.05).readable
        and not concluded(p=np.nextafter(0.05, 1)).readable
    )
    assert ", p < 0.001 (selection replayed)" in concluded(p=0.0009).sentence
    assert ", p = 0.001 (selection replayed)" in concluded(p=0.001).sentence


# -- something is readable ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "beyond_text", "latent", "closing"),
    [
        ({"text": MORE, "output": MORE}, True, True, LATENT),
        ({"text": MORE, "output": SAME}, True, False, OUTPUT_TELLS),
        ({"text": SAME, "output": MORE}, False, False, TEXT_TELLS),
        ({"text": SAME, "output": SAME}, False, False, BOTH_TELL),
        ({"output": MORE}, False, False, TEXT_TELLS),
        ({"text": MORE}, True, False, NO_OUTPUT),
        ({"text": SAME}, False, False, NO_OUTPUT),
        ({}, False, False, NO_OUTPUT),
        # Zero itself is not above zero.
        ({"text": (0.1, 0.0, 0.2), "output": MORE}, False, False, TEXT_TELLS),
        # All controls of a kind have to be beaten.
        ({"text": MORE, "output": {"a": MORE, "b": SAME, "c": MORE}}, True, False, OUTPUT_TELLS),
        ({"text": {"a": SAME, "b": MORE}, "output": MORE}, False, False, TEXT_TELLS),
        # Selectivity is told, but decides nothing.
        ({"text": MORE, "output": MORE, "control_task": SAME}, True, True, LATENT),
    ],
)
def test_what_is_readable_is_held_against_its_controls(
    concluded, gains, beyond_text, latent, closing
):
    found = concluded(**gains)
    assert claims(found) == (True, beyond_text, latent)
    assert found.sentence.endswith(f". {closing}")
    assert ("So it is latent" in found.sentence) == latent


def test_the_sentence_in_full(concluded):
    assert concluded(
        text=MORE, output=(0.05, 0.01, 0.09), control_task=(0.2, 0.1, 0.3)
    ).sentence == (
        "the rate is readable from layer 1 at header_last: AUROC 0.71 [0.65, 0.77], p = 0.010 "
        "(selection replayed); +0.05 [+0.01, +0.09] over the model's own output distribution "
        "(output); +0.11 [+0.04, +0.18] over what can be read from the text (text); +0.20 [+0.10, "
        f"+0.30] over a task without meaning (control task). {LATENT}"
    )
    assert concluded().sentence == (
        "the rate is readable from layer 1 at header_last: AUROC 0.71 [0.65, 0.77], p = 0.010 "
        f"(selection replayed). {NO_OUTPUT}"
    )


# -- which control is named -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "named"),
    [
        # The smallest gain is the surest here.
        ({"sure": (0.05, 0.04, 0.06), "unsure": (0.10, 0.01, 0.19)}, "unsure"),
        ({"smaller": (0.05, 0.01, 0.09), "unsure": (0.20, -0.01, 0.41)}, "unsure"),
        ({"above": MORE, "without": (0.3, np.nan, np.nan)}, "without"),
        ({"below": (-0.1, -0.2, 0.0), "without": (0.3, np.nan, np.nan)}, "without"),
        ({"first": SAME, "second": SAME}, "first"),
    ],
)
@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
def test_the_control_whose_gain_is_least_sure_is_named(concluded, gains, named, turned):
    if turned and len(set(gains.values())) > 1:
        gains = dict(reversed(gains.items()))
    for kind in ("text", "output"):
        sentence = concluded(**{kind: gains}).sentence
        assert sum(f"({name})" in sentence for name in gains) == 1
        assert f"({named})" in sentence


# -- how sure the intervals are -------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.9, 0.9499])
def test_latent_is_never_said_of_narrow_intervals(concluded, level):
    for gains in ({"text": MORE, "output": MORE}, {"text": SAME, "output": SAME}, {}):
        found = concluded(level=level, **gains)
        assert claims(found) == (True, False, False)
        assert found.sentence.endswith(f". {TOO_NARROW}")
        assert "So it is latent" not in found.sentence
    assert COVERAGE == 0.95
    assert all(concluded(level=x, text=MORE, output=MORE).latent for x in (0.95, 0.99))


def test_gains_without_an_interval_are_no_gains(concluded):
    unknown = (0.3, np.nan, np.nan)
    both = concluded(text=unknown, output=unknown)
    assert claims(both) == (True, False, False)
    assert both.sentence.endswith(BOTH_TELL)
    assert "+0.30 over the model's own output distribution (output)" in both.sentence
    assert "nan" not in both.sentence
    text = concluded(text=unknown, output=MORE)
    assert claims(text) == (True, False, False) and text.sentence.endswith(TEXT_TELLS)
    output = concluded(text=MORE, output={"a": MORE, "b": unknown})
    assert claims(output) == (True, True, False) and output.sentence.endswith(OUTPUT_TELLS)
    undefined = concluded(text=MORE, output=(np.nan, np.nan, np.nan))
    assert claims(undefined) == (True, True, False)
