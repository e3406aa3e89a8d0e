"""What may be said: every branch, from a small analysis whose numbers are replaced by hand."""

from dataclasses import replace

import numpy as np
import pytest

from ia_mech.stats import Estimate
from probes.analysis import analyse
from probes.outcome import Outcome
from probes.analysis import Arrays, Compared, Settings
from probes.report.verdict import COVERAGE, LEVEL, verdict

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
    settings = Settings(folds=3, permutations=19, orders=1, resamples=50, workers=1)
    return analyse(Arrays(states, ["header_last"]), outcome, None, settings)


def control(kind, gain, name=None):
    """Of a value and the ends of its interval, NaN where there is none."""
    own = Estimate(0.6, 0.5, 0.7, 30, "percentile")
    return Compared(name or kind, "by hand", kind, own, Estimate(*gain, 30, "percentile"), None)


@pytest.fixture
def said(plain):
    """The verdict on these gains, by kind: a gain, or several by the control's name."""

    def say(p=0.01, level=0.95, permutations=19, **gains):
        compared = []
        for kind, gain in gains.items():
            kind = kind.replace("_", " ")
            several = gain if isinstance(gain, dict) else {kind: gain}
            compared += [control(kind, g, name) for name, g in several.items()]
        auroc = Estimate(0.712, 0.654, 0.771, 30, "percentile")
        return verdict(
            replace(
                plain,
                settings=replace(plain.settings, level=level, permutations=permutations),
                tested=replace(plain.tested, p=p, permutations=permutations, value=0.66),
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


# -- nothing to say -------------------------------------------------------------------------------


def test_nothing_found(said, plain):
    found = said(p=0.0501, text=MORE, output=MORE)
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


def test_nothing_is_claimed_without_permutations(said, plain):
    found = said(p=np.nan, permutations=0, text=MORE, output=MORE)
    assert claims(found) == (False, False, False)
    assert found.sentence == ("the rate was not tested: nothing is claimed without permutations.")


def test_the_level_of_the_test_is_inclusive(said):
    assert LEVEL == 0.05 and said(p=0.05).readable and not said(p=np.nextafter(0.05, 1)).readable
    assert ", p < 0.001 (selection replayed)" in said(p=0.0009).sentence
    assert ", p = 0.001 (selection replayed)" in said(p=0.001).sentence


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
def test_what_is_readable_is_held_against_its_controls(said, gains, beyond_text, latent, closing):
    found = said(**gains)
    assert claims(found) == (True, beyond_text, latent)
    assert found.sentence.endswith(f". {closing}")
    assert ("So it is latent" in found.sentence) == latent


def test_the_sentence_in_full(said):
    assert said(text=MORE, output=(0.05, 0.01, 0.09), control_task=(0.2, 0.1, 0.3)).sentence == (
        "the rate is readable from layer 1 at header_last: AUROC 0.71 [0.65, 0.77], p = 0.010 "
        "(selection replayed); +0.05 [+0.01, +0.09] over the model's own output distribution "
        "(output); +0.11 [+0.04, +0.18] over what can be read from the text (text); +0.20 [+0.10, "
        f"+0.30] over a task without meaning (control task). {LATENT}"
    )
    assert said().sentence == (
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
def test_the_control_whose_gain_is_least_sure_is_named(said, gains, named, turned):
    if turned and len(set(gains.values())) > 1:
        gains = dict(reversed(gains.items()))
    for kind in ("text", "output"):
        sentence = said(**{kind: gains}).sentence
        assert sum(f"({name})" in sentence for name in gains) == 1
        assert f"({named})" in sentence


# -- how sure the intervals are -------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.8, 0.9, 0.9499])
def test_latent_is_never_said_of_narrow_intervals(said, level):
    for gains in ({"text": MORE, "output": MORE}, {"text": SAME, "output": SAME}, {}):
        found = said(level=level, **gains)
        assert claims(found) == (True, False, False)
        assert found.sentence.endswith(f". {TOO_NARROW}")
        assert "So it is latent" not in found.sentence


@pytest.mark.parametrize("level", [0.95, 0.99])
def test_at_95_percent_and_more_it_is(said, level):
    assert COVERAGE == 0.95
    assert said(level=level, text=MORE, output=MORE).latent


def test_gains_without_an_interval_are_no_gains(said):
    unknown = (0.3, np.nan, np.nan)
    both = said(text=unknown, output=unknown)
    assert claims(both) == (True, False, False)
    assert both.sentence.endswith(BOTH_TELL)
    assert "+0.30 over the model's own output distribution (output)" in both.sentence
    assert "nan" not in both.sentence
    text = said(text=unknown, output=MORE)
    assert claims(text) == (True, False, False) and text.sentence.endswith(TEXT_TELLS)
    output = said(text=MORE, output={"a": MORE, "b": unknown})
    assert claims(output) == (True, True, False) and output.sentence.endswith(OUTPUT_TELLS)
    undefined = said(text=MORE, output=(np.nan, np.nan, np.nan))
    assert claims(undefined) == (True, True, False)
