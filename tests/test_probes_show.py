"""Tables, figures and the conclusion of a small analysis; every branch of its sentences."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ia_mech.stats import Estimate
from probes import show
from probes.analysis import AnalysisSettings, Arrays, RandomBlocks, analyse
from probes.controls import Baseline, Controls
from probes.show import RANDOM_BLOCKS, READOUT, conclude
from probes.targets import Outcome

LAYERS, CONTEXTS, WIDTH, SIGNAL = 5, 60, 12, 3
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
        ["no lengths [of anything]"],
    )
    sources = np.arange(CONTEXTS) % 40
    return analyse(
        Arrays(states.astype(np.float32), POSITIONS, rng.normal(size=(LAYERS, CONTEXTS, 4))),
        Outcome.from_counts(k, np.full(CONTEXTS, 8), sources),
        controls,
        AnalysisSettings(folds=3, permutations=20, resamples=100, workers=1),
        random_blocks={"random blocks 1": Arrays(rng.normal(size=states.shape), POSITIONS)},
    )


# -- tables ---------------------------------------------------------------------------------------


def test_rows_hold_the_right_numbers(analysis):
    frame = show.estimates(analysis).set_index(show.KEY).sort_index()
    cell = frame.loc[("auroc_cell", 4, "header_last", pd.NA)].squeeze()
    expected = analysis.auroc[4][1]
    assert [cell["value"], cell["low"]] == [expected.value, expected.low]
    assert (cell["sources"], cell["level"], cell["method"]) == (40, 0.95, expected.method)
    tested = frame.loc[("statistic", 4, "header_last", pd.NA)].squeeze()
    assert tested["value"] == analysis.tested.statistic[4, 1]
    assert tested["p"] == analysis.tested.p_family[4, 1]
    control = analysis.controls[1]
    own = frame.loc[("auroc_control", pd.NA, pd.NA, control.control.name)].squeeze()
    assert own["low"] == control.auroc.low
    assert frame.loc["deviance_saved"]["low"].item() == analysis.beyond.deviance_saved.low
    shares = frame.loc["selected_in_folds"]["value"]
    assert shares.sum() == pytest.approx(1)
    assert shares.max() == Counter(analysis.headline.chosen).most_common(1)[0][1] / 3
    assert frame.loc["statistic_headline"]["p"].item() == analysis.tested.headline_p


# -- the conclusion -------------------------------------------------------------------------------

MORE, SAME = (0.11, 0.04, 0.18), (0.03, -0.02, 0.08)  # a gain and its interval


@pytest.fixture(scope="module")
def plain():
    """60 contexts of 30 sources, two layers, one position."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(2, 60, 1, 6)).astype(np.float32)
    outcome = Outcome.from_counts(rng.binomial(4, 0.4, 60), np.full(60, 4), np.arange(60) % 30)
    settings = AnalysisSettings(folds=3, permutations=19, resamples=50, workers=1)
    return analyse(Arrays(states, ["header_last"]), outcome, None, settings)


def interval(value, low, high):
    return Estimate(value, low, high, 30, "percentile")


@pytest.fixture
def concluded(plain, analysis):
    """The conclusion where hidden states save this share of the deviance."""

    def say(saved=None, p=0.01, family=0.03, level=0.95, random=(), planted=None):
        tested = replace(
            plain.tested,
            headline_p=p,
            p_family=np.array([[family], [1.0]]),
        )
        changed = replace(
            plain,
            settings=replace(plain.settings, level=level),
            tested=tested,
            headline=replace(plain.headline, auroc=interval(0.712, 0.654, 0.771)),
            random_blocks=list(random),
            beyond=saved
            and replace(analysis.beyond, deviance_saved=interval(*saved), planted=planted),
        )
        return conclude(changed, "the rate")

    return say


CAN = "The rate can be read from the hidden states"
SAME_LOW, NO_INTERVAL = (0.1, 0.0, 0.2), (0.3, np.nan, np.nan)


@pytest.mark.parametrize(
    ("given", "readable", "beyond", "first"),
    [
        ({"saved": MORE}, True, True, f"{CAN}, and they tell more than {READOUT}. "),
        ({"saved": SAME}, True, False, f"{CAN}; it is not shown that they tell more than"),
        ({"saved": SAME_LOW}, True, False, f"{CAN}; it is not shown that they tell more than"),
        ({"saved": NO_INTERVAL}, True, False, f"{CAN}; it is not shown that they tell more than"),
        ({}, True, False, f"{CAN}; whether they tell more than {READOUT} was not tested"),
        # Both tests are needed, and p = 0.05 is enough.
        ({"saved": MORE, "p": 0.05, "family": 0.05}, True, True, f"{CAN}, and they tell more than"),
        ({"saved": MORE, "p": 0.0501}, False, False, "No evidence was found that the rate can"),
        ({"saved": MORE, "family": 0.0501}, False, False, "No evidence was found that the rate"),
        # Intervals below 95% never show that hidden states tell more.
        ({"saved": MORE, "level": 0.9499}, True, False, f"{CAN}; it is not shown that they tell"),
        ({"saved": MORE, "level": 0.99}, True, True, f"{CAN}, and they tell more than"),
    ],
)
def test_the_plain_sentence_comes_first_and_says_no_more_than_was_shown(
    concluded, given, readable, beyond, first
):
    found = concluded(**given)
    assert (found.readable, found.beyond) == (readable, beyond)
    assert found.sentence.startswith(first)
    assert "nan" not in found.sentence + found.control


def random_blocks(low, high=0.15):
    estimates = interval(0.66, 0.6, 0.72), interval((low + high) / 2, low, high)
    return RandomBlocks("random blocks 7", *estimates, np.array([[0.0], [1.0]]))


def test_what_random_blocks_may_be_read_as_well_is_no_finding(concluded):
    """That a difference isn't shown doesn't make two AUROCs the same."""
    found = concluded(MORE, random=[random_blocks(-0.01)])
    assert found.readable and not found.beyond
    assert found.sentence.startswith(
        f"{CAN}. That it can be read better there than from {RANDOM_BLOCKS} is not shown"
    )
    words = "not shown to be read less well than the model's (0.11 would have been shown with "
    assert f"{words}80% power): AUROC 0.66 [0.60, 0.72]" in found.control
    assert "At 1 of 2 layers × positions they are read at least as well" in found.control
    assert "as well as" not in found.sentence + found.control
    for low, high in ((-0.06, 0.01), (-0.01, 0.05)):  # either end reaches the margin
        assert "as well as" not in concluded(MORE, random=[random_blocks(low, high)]).control
    alike = concluded(MORE, random=[random_blocks(-0.02, 0.03)])
    assert "are read as well as the model's, give or take 0.05: AUROC" in alike.control
    assert alike.readable and not alike.beyond
    less = concluded(MORE, random=[random_blocks(0.01)])
    assert less.beyond and "are read less well than the model's" in less.control
    assert not concluded(MORE, random=[random_blocks(0.01), random_blocks(-0.01)]).beyond


def test_where_nothing_is_shown_it_says_what_could_have_been(concluded, plain):
    null = plain.tested.headline_null
    reached = np.quantile(null, 0.95)
    words = f"reaches {reached:.2f}, so a true AUROC of about {reached + 0.8416 * null.std():.2f}"
    assert words in concluded(MORE, p=0.0501).sentence
    for planted, said in {
        (0.043, True): "saved 4.3% of that deviance, it would be found.",
        (0.2, False): "saved 20.0% of that deviance, it would not be found, nor",
    }.items():
        assert said in concluded(SAME, planted=planted).control
