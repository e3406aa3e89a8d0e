"""What hidden states add to the base: copies of it add nothing, a signal of their own does."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit

from benchmarks.probe_validation import blocks as planted_blocks
from probes.analysis import AnalysisSettings, Arrays, analyse
from probes.controls import Baseline, Controls
from probes.fit.beyond import (
    RATIOS,
    centre_and_scale,
    incremental_scores,
    plant,
    residual,
    saved_by,
    tune_base,
)
from probes.fit.folds import make_folds
from probes.fit.nested_cv import Design, held_out_loss
from probes.targets import Outcome

CONTEXTS, FOLDS = 90, 3
FEW = AnalysisSettings(permutations=0, resamples=50, workers=1)


def cross_fit(design, output, ends, hidden):
    """Every fold reads the same states, or those that a list has for it."""
    by_fold = hidden if isinstance(hidden, list) else [hidden] * FOLDS
    return incremental_scores(tune_base([output], [ends] * FOLDS, design), by_fold, design)


@pytest.fixture(scope="module")
def made():
    """Output and the ends of the conversation carry a latent each, hidden states another one."""
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((3, CONTEXTS))
    blocks = [z[:, None] + rng.standard_normal((CONTEXTS, 6)) for z in latents]
    blocks[0] *= 100
    run = np.arange(CONTEXTS) % 2
    k = rng.binomial(8, expit(latents.sum(0) - run))
    outcome = Outcome.from_counts(k, np.full(CONTEXTS, 8), np.arange(CONTEXTS), run)
    return blocks, Design.from_outcome(outcome, make_folds(outcome, FOLDS))


@pytest.fixture(scope="module")
def found(made):
    blocks, design = made
    return cross_fit(design, *blocks)


def test_what_hidden_states_add_is_found_out_of_fold(made, found):
    rate = made[1].outcome.rate
    assert np.corrcoef(found.full, rate)[0, 1] > np.corrcoef(found.base, rate)[0, 1] + 0.05
    assert all(ratio in RATIOS and ratio for ratio in found.ratios)
    assert 0 < found.unreliability < 0.5


def test_labels_and_choices_of_a_fold_do_not_influence_its_scores(made, found):
    blocks, design = made
    here = design.rows_of(1)
    k = design.outcome.positives.copy()
    k[here] = 8 - k[here]
    outcome = replace(design.outcome, positives=k)
    after = cross_fit(Design.from_outcome(outcome, design.folds), *blocks)
    for name in ("base", "full"):
        np.testing.assert_array_equal(getattr(found, name)[here], getattr(after, name)[here])
    assert (found.full != after.full).any()
    # Each fold reads the states that were chosen for it.
    elsewhere = cross_fit(design, *blocks[:2], [blocks[2], blocks[0], blocks[2]])
    same = elsewhere.full == found.full
    assert same[design.folds != 1].all() and not same[here].any()


def test_units_and_order_of_features_do_not_matter(made, found):
    (output, ends, hidden), design = made
    after = cross_fit(design, 1e3 * output[:, ::-1] + 7, ends, hidden / 50)
    np.testing.assert_allclose(after.full, found.full, atol=1e-5)


def test_a_planted_addition_is_found_where_it_is_large_enough(made):
    (output, ends, _), design = made
    outcome, noise = design.outcome, np.random.default_rng(5).standard_normal((CONTEXTS, 6))
    bases = tune_base([output], [ends] * FOLDS, design)
    base = incremental_scores(bases, [noise] * FOLDS, design).base
    lost, gained = [], []
    for share in (0.01, 0.8):
        states, signal = plant({"here": noise}, outcome, base, share, 0)
        left = outcome.rate - expit(base)
        for run in (0, 1):
            left[outcome.runs == run] -= left[outcome.runs == run].mean()
        assert np.corrcoef(signal, left)[0, 1] ** 2 == pytest.approx(share)
        added = states["here"] - noise
        assert np.linalg.matrix_rank(added, 1e-6) == 1
        assert abs(np.corrcoef(added[:, 0], signal)[0, 1]) == pytest.approx(1)
        # As loud as one of six directions of noise.
        assert (added**2).sum(1).mean() == pytest.approx(1, abs=0.4)
        found = incremental_scores(bases, [states["here"]] * FOLDS, design)
        losses = [
            held_out_loss(scores, outcome).sum()
            for scores in (base, found.full, saved_by(signal, outcome, base))
        ]
        lost.append(1 - losses[2] / losses[0])
        gained.append(1 - losses[1] / losses[0])
    assert 0 <= lost[0] < 0.02 < gained[1] < lost[1]
    assert abs(gained[0]) < 0.02


def test_states_without_a_difference_gain_nothing(made):
    (output, ends, _), design = made
    found = cross_fit(design, output, ends, np.ones((CONTEXTS, 5)))
    np.testing.assert_allclose(found.full, found.base, atol=1e-9)
    assert not any(found.ratios) and found.unreliability == 0


@pytest.mark.parametrize("width", [8, 300])
def test_the_residual_is_that_of_ridge_regression(width):
    rng = np.random.default_rng(1)
    base = centre_and_scale(rng.standard_normal((60, width)))
    own = rng.standard_normal((60, 4))
    copy = base[:, :4] * 30
    left = residual(copy + own, base)
    assert np.abs(left.mean(0)).max() < 1e-9
    # What is shared goes, as far as there are contexts enough to tell; what isn't stays.
    shared = np.corrcoef(left[:, 0], copy[:, 0])[0, 1] ** 2
    assert shared < (1e-3 if width == 8 else 0.9)
    assert np.corrcoef(residual(own, base)[:, 0], own[:, 0])[0, 1] > 0.9
    # One of the penalties, by hand.
    states = (copy + own) - (copy + own).mean(0)
    penalties = 60 * np.geomspace(1e-6, 1e3, 28)
    gram = base @ base.T
    solved = [p * np.linalg.solve(gram + p * np.eye(60), states) for p in penalties]
    assert min(np.abs(left - one).max() for one in solved) < 1e-6


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("loud-copy", False),
        ("complement", True),
        pytest.param("copy", False, marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_the_output_is_never_beyond_it_and_a_signal_of_its_own_is(
    kind, expected, monkeypatch
):
    monkeypatch.setattr(planted_blocks, "SETTINGS", replace(planted_blocks.SETTINGS, resamples=200))
    monkeypatch.setattr(planted_blocks, "CONTEXTS", 90)
    found, _ = planted_blocks.analysed(kind, 3)
    assert (found.beyond.deviance_saved.low > 0) == expected
    own = next(one.auroc.value for one in found.controls if one.control.name == "output")
    if kind == "loud-copy":  # though alone it is read better
        assert found.headline.auroc.value > own


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_words_that_leak_into_every_state_are_read_but_never_beyond(seed):
    found, _ = planted_blocks.analysed("leak", seed)
    assert found.headline.auroc.low > 0.6
    assert not found.beyond.deviance_saved.low > 0


def test_a_state_at_the_end_of_the_response_is_part_of_what_it_would_have_to_go_beyond():
    rng = np.random.default_rng(0)
    z = rng.standard_normal(60)
    outcome = Outcome.from_counts(rng.binomial(8, expit(2 * z)), np.full(60, 8), np.arange(60))
    states = rng.standard_normal((1, 60, 3, 8))
    states[0, :, 1, 0] += 4 * z
    noise = Baseline("noise", rng.standard_normal((60, 3)), "noise")
    names = ["query_end", "response_end", "header_last"]
    found = analyse(Arrays(states, names), outcome, Controls([noise], [noise]), FEW)
    assert set(found.headline.chosen) == {(0, "response_end")}
    np.testing.assert_array_equal(found.beyond.scores.full, found.beyond.scores.base)
    assert found.beyond.base.value > 0.7
    only = analyse(Arrays(states[:, :, 1:], names[1:]), outcome, Controls([noise], [noise]), FEW)
    assert only.beyond is None  # without the query's end
