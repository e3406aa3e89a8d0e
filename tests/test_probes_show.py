"""Tables, figures and the conclusion of a small analysis; every branch of its sentences."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from scipy.special import expit

from ia_mech.stats import Estimate
from probes import figures, show
from probes.analysis import Arrays, ControlComparison, RandomBlocks, Settings, analyse
from probes.controls import Baseline, Controls, TextTypes
from probes.figures import LEVEL
from probes.show import CONTROL_TASK, COVERAGE, RANDOM_BLOCKS, READOUT, conclude, power_of_beyond
from probes.targets import Outcome

LAYERS, CONTEXTS, WIDTH, SIGNAL = 8, 60, 12, 3
POSITIONS = ["turn_$x$ [red]", "header_last"]
ODD = "[bold]$tf_idf$[/]"


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
        TextTypes(rng.integers(4, size=CONTEXTS), np.arange(CONTEXTS) % 40 % 5),
        ["no lengths [of anything]"],
    )
    sources = np.arange(CONTEXTS) % 40
    return analyse(
        Arrays(states.astype(np.float32), POSITIONS, rng.normal(size=(LAYERS, CONTEXTS, 4))),
        Outcome.from_counts(k, np.full(CONTEXTS, 8), sources),
        controls,
        Settings(permutations=20, resamples=100, control_draws=2, workers=1),
        random_blocks={"random blocks 1": Arrays(rng.normal(size=states.shape), POSITIONS)},
    )


@pytest.fixture(scope="module")
def untested(analysis):
    """The same without permutations."""
    shape = analysis.tested.statistic.shape
    nothing = {"p_family": np.full(shape, np.nan), "band": np.full(shape, np.nan), "p": np.nan}
    nothing |= {"family_quantile": np.nan, "null": np.empty(0)}
    return replace(analysis, tested=replace(analysis.tested, **nothing))


# -- tables ---------------------------------------------------------------------------------------


def test_rows_hold_every_estimate_once(analysis):
    frame = show.estimates(analysis)
    assert list(frame) == show.COLUMNS
    assert not frame.duplicated(show.KEY).any()
    cells, controls = LAYERS * len(POSITIONS), len(analysis.controls)
    per_cell = ["auroc_cell", "statistic", "null_band_95", "p_family", "p_best"]
    per_cell += ["selected_in_folds"]
    expected = {
        **dict.fromkeys(per_cell, cells),
        "auroc_cell": 2 * cells,  # the model's and random blocks'
        "auroc_control": controls + 1,
        "auroc_oracle": 1,
        "auroc_less_control": 1,
        **dict.fromkeys(("auroc_base", "auroc_full", "auroc_gain", "deviance_saved"), 1),
        **dict.fromkeys(("auroc", "auroc_of_rates"), 1),
        **dict.fromkeys(("statistic_headline", "null_band_95_headline", "p_headline"), 1),
        "null_band_95_family": 1,
    }
    assert dict(Counter(frame["quantity"])) == expected
    assert frame[["value", "sources", "contexts"]].notna().all(axis=None)
    assert (frame["contexts"] == CONTEXTS).all()


def test_rows_hold_the_right_numbers(analysis):
    frame = show.estimates(analysis).set_index(show.KEY).sort_index()
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
    control = analysis.controls[1]
    own = frame.loc[("auroc_control", pd.NA, pd.NA, control.name)].squeeze()
    assert own["low"] == control.auroc.low
    assert frame.loc["deviance_saved"]["low"].item() == analysis.beyond.deviance_saved.low
    shares = frame.loc["selected_in_folds"]["value"]
    assert shares.sum() == pytest.approx(1)
    assert shares.max() == Counter(analysis.headline.chosen).most_common(1)[0][1] / 5
    assert frame.loc["p_headline"]["value"].item() == analysis.tested.headline_p


def test_predictions(analysis):
    frame = show.predictions(analysis)
    assert len(frame) == CONTEXTS
    assert list(frame)[:5] == ["fold", "positives", "trials", "log_odds", "probability"]
    assert list(frame)[5:] == [f"control:{ODD}", "control:output", "base", "full"]
    assert np.array_equal(frame["probability"], expit(analysis.headline.scores))
    assert np.array_equal(frame["control:output"], analysis.controls[1].scores)
    assert frame.groupby(analysis.outcome.sources)["fold"].nunique().eq(1).all()


# -- figures --------------------------------------------------------------------------------------


def test_heat_map(analysis):
    figure = figures.heat_map(analysis, "rate of $x_1$")
    axes, bar = figure.axes
    values = np.array([[cell.value for cell in row] for row in analysis.auroc])
    (image,) = axes.images
    tested = analysis.tested.p_family <= 0.05
    assert 0 < tested.sum() < tested.size
    assert np.array_equal(image.get_array().filled(np.nan), np.where(tested, values, np.nan), True)
    assert image.origin == "lower"
    assert image.get_clim() == (0.2, 0.8)  # chance is in the middle, in every figure
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("position", "layer (0 = embeddings)")
    assert [label.get_text() for label in axes.get_xticklabels()] == POSITIONS
    assert bar.get_ylabel() == "AUROC (0.5 = chance)"
    facts = [text.get_text() for text in axes.texts]
    assert [t for t in facts if re.fullmatch(r"0\.\d\d", t)] == [f"{v:.2f}" for v in values.flat]
    subtitle = axes.get_title().replace("\n", " ")
    assert "60 contexts of 40 sources · 20 permutations" in subtitle
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines}
    assert dots == {(j, i) for i, j in np.argwhere(analysis.among_best)}
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
    assert texts[0] == (
        f"headline (layer and position chosen in each fold): {analysis.headline.auroc.text()}"
    )
    assert "null's 95% quantile (closed form)" in texts
    assert "null's largest, 95% (family-wise)" in texts
    shown = [c for c in analysis.controls if c.name in ("text", "output")]
    assert texts[-1:] == [f"{c.name}: {c.auroc.text()}" for c in shown]
    assert not any(ODD in text or "control task" in text for text in texts)


def test_no_text_leaves_the_picture_or_is_taken_for_tex(analysis):
    long = "a long title of $x_1$ and $y$ " * 4
    for figure in (
        figures.heat_map(analysis, long),
        figures.layer_curve(analysis, long),
    ):
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
    frame = show.estimates(untested).set_index("quantity")
    assert frame.loc[["p_family", "null_band_95", "p_headline"], "value"].isna().all()
    assert frame.loc[["auroc_cell", "statistic"], "value"].notna().all()
    figure = figures.layer_curve(replace(untested, controls=[]), "rate")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert not any("null" in text for text in texts)
    figures.heat_map(untested, "rate").draw_without_rendering()
    assert "nan" not in str(show.tables(untested)) + conclude(untested).sentence


def test_tables_hold_scores_controls_and_every_cell(analysis):
    scores, heat_map = show.tables(analysis)
    shown = {row[0]: row[1] for row in scores.rows}
    assert shown["headline"] == analysis.headline.auroc.text()
    assert shown["rates"] == analysis.headline.auroc_of_rates.text()
    for control in analysis.controls:
        assert shown[control.name] == control.auroc.text()
    assert shown["  of its rates"] == analysis.controls[-1].oracle.text()
    assert shown["random blocks 1"] == analysis.random_blocks[0].auroc.text()
    assert shown["base"] == analysis.beyond.base.text()
    assert heat_map.full and heat_map.columns == ["layer", *POSITIONS]
    for layer, row in enumerate(heat_map.rows):
        star = ["*" if p <= 0.05 else "" for p in analysis.tested.p_family[layer]]
        best = ["°" if one else "" for one in analysis.among_best[layer]]
        values = [f"{cell.value:.2f}" for cell in analysis.auroc[layer]]
        marked = [v + s + b for v, s, b in zip(values, star, best, strict=True)]
        assert row == [str(layer), *marked]


def test_a_p_value_of_one_in_twenty_is_marked_as_the_conclusion_has_it(analysis):
    p = np.full_like(analysis.tested.p_family, 0.0501)
    p[2, 0] = 0.05
    edge = replace(analysis, tested=replace(analysis.tested, p_family=p, p=0.05))
    rows = show.tables(edge)[-1].rows
    assert [row[0] for row in rows if "*" in " ".join(row)] == ["2"] and "*" in rows[2][1]
    (image,) = figures.heat_map(edge, "rate").axes[0].images
    assert np.argwhere(~np.ma.getmaskarray(image.get_array())).tolist() == [[2, 0]]
    assert conclude(edge).readable


# -- the conclusion -------------------------------------------------------------------------------

MORE, SAME = (0.11, 0.04, 0.18), (0.03, -0.02, 0.08)  # a gain and its interval


@pytest.fixture(scope="module")
def plain():
    """60 contexts of 30 sources, two layers, one position."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(2, 60, 1, 6)).astype(np.float32)
    outcome = Outcome.from_counts(rng.binomial(4, 0.4, 60), np.full(60, 4), np.arange(60) % 30)
    settings = Settings(folds=3, permutations=19, resamples=50, workers=1)
    return analyse(Arrays(states, ["header_last"]), outcome, None, settings)


@pytest.fixture
def concluded(plain, analysis):
    """The conclusion where hidden states save this share of the deviance."""

    def say(
        saved=None,
        p=0.01,
        level=0.95,
        permutations=19,
        labelled_by="",
        control=0.7,
        left_out=0.01,
        family=0.03,
        random=(),
    ):
        auroc = Estimate(0.712, 0.654, 0.771, 30, "percentile")
        names = "control task", "10 random functions", "control task"
        beyond = saved and replace(
            analysis.beyond,
            saved=Estimate(*saved, 30, "percentile"),
            gain=Estimate(0.021, -0.004, 0.046, 30, "percentile"),
            base=Estimate(0.68, 0.6, 0.7, 30, "percentile"),
        )
        return conclude(
            replace(
                plain,
                settings=replace(plain.settings, level=level, permutations=permutations),
                tested=replace(
                    plain.tested,
                    p=p,
                    p_family=np.array([[family], [1.0]]),
                    null=plain.tested.headline_null[:permutations],
                    value=0.66,
                ),
                headline=replace(plain.headline, auroc=auroc),
                p_best=np.array([[left_out], [1.0]]),
                random_blocks=list(random),
                beyond=beyond,
                controls=[
                    ControlComparison(
                        *names,
                        Estimate(control, 0.6, 0.8, 30, "percentile"),
                        None,
                        Estimate(0.84, 0.8, 0.9, 30, "percentile"),
                    )
                ],
            ),
            "the rate",
            labelled_by,
        )

    return say


def test_the_plain_sentence_comes_first_and_says_no_more_than_was_shown(concluded):
    readable = "The rate can be read from the hidden states"
    cases = {
        MORE: (True, f"{readable}, beyond {READOUT}. "),
        SAME: (False, f"{readable}; that they tell more than {READOUT} is not shown. "),
        (0.1, 0.0, 0.2): (False, f"{readable}; that they tell more than {READOUT} is not shown. "),
        (0.3, np.nan, np.nan): (
            False,
            f"{readable}; that they tell more than {READOUT} is not shown. ",
        ),
        None: (
            False,
            f"{readable}; whether beyond {READOUT} can't be told without these controls. ",
        ),
    }
    for saved, (beyond, first) in cases.items():
        found = concluded(saved)
        assert (found.readable, found.beyond) == (True, beyond)
        assert found.sentence.startswith(first)
        assert "nan" not in found.sentence + found.control
        assert "latent" not in found.sentence


def test_a_control_task_that_is_read_as_well_is_named(concluded):
    """0.71 is shown of the probe: a control task of 0.705 is shown as high."""
    for saved in (SAME, None):
        found = concluded(saved, control=0.7051)
        assert found.readable and found.sentence.startswith(
            f"The rate can be read from the hidden states, but no better than {CONTROL_TASK}: it "
            "is not shown that they represent it. "
        )
        assert (
            "The control task has AUROC 0.71 [0.60, 0.80], of 0.84 for a probe that knows its "
            "rates." in found.control
        )
        assert "control task" not in concluded(saved, control=0.7049).sentence
    found = concluded(MORE, control=0.9)  # what no readout holds is no random function's doing
    assert found.beyond and "The control task has AUROC 0.90 [0.60, 0.80]" in found.control
    assert "control task" not in concluded(SAME, p=0.2, control=0.9).sentence


def test_a_confidence_set_of_all_places_is_said_to_single_out_none(concluded):
    assert (
        "p = 0.010 (selection replayed; of the heat map, family-wise, p = 0.030); no layer or "
        "position stands out: none of 2 pairs can be told from the best (95% confidence set)."
        in concluded(MORE, left_out=1.0).sentence
    )


def test_the_sentence_in_full(concluded):
    numbers = (
        "Probes whose layer and position are chosen inside the training folds have AUROC 0.71 "
        "[0.65, 0.77], p = 0.010 (selection replayed; of the heat map, family-wise, p = 0.030); 1 "
        "of 2 layers × positions can't be told from the best (95% confidence set)."
    )
    found = concluded(MORE, labelled_by="judge rules")
    assert (
        found.sentence
        == f"The rate can be read from the hidden states, beyond {READOUT}. {numbers}"
    )
    assert found.control == (
        f"Added to {READOUT} (AUROC 0.68), the hidden states save +11.0% [+4.0, +18.0] of its "
        "held-out deviance, AUROC +0.02 [-0.00, +0.05]. The control task has AUROC 0.70 "
        "[0.60, 0.80], of 0.84 for a probe that knows its rates. Labels: judge rules."
    )


def random_blocks(low):
    less = Estimate(0.05, low, 0.09, 30, "percentile")
    auroc = Estimate(0.66, 0.6, 0.72, 30, "percentile")
    cells = np.array([[0.6], [0.7]])
    return RandomBlocks("random blocks 7", auroc, less, cells, np.array([[False], [True]]))


def test_what_random_blocks_are_read_as_well_is_no_finding(concluded):
    found = concluded(MORE, random=[random_blocks(-0.01)])
    assert found.readable and not found.beyond
    assert found.sentence.startswith(
        f"The rate can be read from the hidden states, but from those of {RANDOM_BLOCKS} as well"
    )
    assert (
        "Random blocks (random blocks 7) are read as well as the model's: AUROC 0.66 [0.60, 0.72], "
        "the headline less that +0.05 [-0.01, +0.09]; at 1 of 2 layers × positions they are read "
        "at least as well." in found.control
    )
    less = concluded(MORE, random=[random_blocks(0.01)])
    assert less.beyond and "are read less well than the model's" in less.control
    assert not concluded(MORE, random=[random_blocks(0.01), random_blocks(-0.01)]).beyond


def test_nothing_found(concluded, plain):
    untested = concluded(MORE, p=np.nan, permutations=0)
    assert not untested.readable and not untested.beyond
    assert untested.sentence.startswith("The rate was not tested: nothing is claimed without")
    found = concluded(MORE, p=0.0501)
    assert not found.readable and not found.beyond
    reached = np.quantile(plain.tested.headline_null, 0.95)
    assert found.sentence.startswith(
        "No evidence was found that the rate can be read from the hidden states."
    )
    true = reached + 0.8416 * plain.tested.headline_null.std()
    assert (
        "The closed form that is tested has 0.66; one in twenty permutations of the labels of "
        f"these 30 sources reaches {reached:.2f}, so that a true value of about {true:.2f} would "
        "be found in four of five such data sets." in found.sentence
    )


def test_what_is_not_shown_to_be_beyond_has_its_power_beside_it(concluded):
    said = concluded(SAME).control
    assert "these are 60 contexts with 6 features" in said
    assert "add as much as the output tells" not in concluded(MORE).control
    assert "would probably be found" in power_of_beyond(200, 40)
    assert "may well not be found" in power_of_beyond(500, 2048)


def test_readable_takes_both_tests(concluded):
    assert concluded(p=0.01, family=0.03).readable
    for p, family in ((0.01, 0.0501), (0.0501, 0.03)):
        found = concluded(MORE, p=p, family=family)
        assert not found.readable and not found.beyond
        assert found.sentence.startswith("No evidence was found that the rate can be read")


def test_the_level_of_the_test_is_inclusive(concluded):
    assert (
        LEVEL == 0.05
        and concluded(p=0.05).readable
        and not concluded(p=np.nextafter(0.05, 1)).readable
    )
    assert ", p < 0.001 (selection replayed;" in concluded(p=0.0009).sentence
    assert ", p = 0.001 (selection replayed;" in concluded(p=0.001).sentence


@pytest.mark.parametrize("level", [0.8, 0.9, 0.9499])
def test_beyond_is_never_said_of_narrow_intervals(concluded, level):
    found = concluded(MORE, level=level)
    assert found.readable and not found.beyond
    assert " Beyond is never said of intervals below 95%." in found.control
    assert COVERAGE == 0.95 and all(concluded(MORE, level=x).beyond for x in (0.95, 0.99))
