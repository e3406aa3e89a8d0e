"""Sentences of experiments: what they say where no effect was shown."""

import numpy as np
import pandas as pd
import pytest

from experiments.shown import sentence_of
from ia_mech.estimates import few_sources, smallest_effect
from ia_mech.stats import paired_difference


def estimate(value: float, low: float, high: float) -> pd.DataFrame:
    row = {"dataset": "d", "temperature": np.nan, "value": value, "low": low, "high": high}
    return pd.DataFrame([row | {"p_holm": np.nan, "sources": 30, "method": ""}])


def test_an_effect_of_2_8_standard_errors_is_found_in_four_of_five_studies():
    """By simulation: the interval of a mean with a known standard error leaves 0 out."""
    se = 0.1
    row = estimate(0.0, -1.96 * se, 1.96 * se).iloc[0]
    effect = smallest_effect(row)
    assert effect == pytest.approx(2.8 * se, rel=0.01)
    drawn = np.random.default_rng(0).normal(effect, se, size=20_000)
    assert np.mean(drawn - 1.96 * se > 0) == pytest.approx(0.8, abs=0.01)


def test_only_a_null_says_what_it_could_have_shown():
    null, shown = estimate(0.02, -0.08, 0.12), estimate(0.2, 0.1, 0.3)
    said = sentence_of("change", null, null=0.0)
    assert said == "Change: 0.02 [-0.08, 0.12] (0.14 would have been shown with 80% power)."
    assert sentence_of("change", shown, null=0.0) == "Change: 0.20 [0.10, 0.30]."
    assert sentence_of("change", null) == "Change: 0.02 [-0.08, 0.12]."
    assert "power" not in sentence_of("change", estimate(0.02, np.nan, np.nan), null=0.0)
    noisy = estimate(0.02, -0.9, 1.0)
    said = sentence_of("change", noisy, null=0.0, most=1)
    assert said == "Change: 0.02 [-0.90, 1.00] (too few data to show any effect)."
    assert "with 80% power" in sentence_of("change", noisy, null=0.0)


def test_the_smallest_p_that_few_sources_could_reach_is_said():
    for count, least in ((4, "0.12"), (5, "0.062"), (12, None)):
        found = paired_difference(
            np.arange(1.0, count + 1), range(count), [0.0] * count, range(count)
        )
        row = {"dataset": "d", "low": 1.0, "p": found.p, "test": found.test, "sources": count}
        notes = few_sources(pd.DataFrame([row]))
        assert found.p == 2.0 ** (1 - count) and len(notes) == 1
        assert f"no p below {least}," in notes[0] if least else "no p" not in notes[0]
