"""Where nothing can be read: constants of sources, and labels without meaning."""

from dataclasses import replace

import numpy as np
import pytest
from test_probes_analysis import POSITIONS, SMALL, WIDTH, slow_auroc

from probes.analysis import analyse
from probes.fit.folds import against_permutations, make_folds, permutations
from probes.fit.nested_cv import Cell, Design, examine, examine_once
from probes.outcome import Outcome
from probes.analysis import Arrays


def fingerprints(seed):
    """A target that is a random constant per source, in states that tell sources apart."""
    rng = np.random.default_rng(seed)
    sources = np.repeat(np.arange(60), 6)
    own = rng.normal(size=(3, 60, 2, 80))
    states = 3 * own[:, sources] + rng.normal(size=(3, 360, 2, 80))
    return Arrays(states, POSITIONS), rng.choice([0, 1, 7, 8], 60)[sources], sources


# An interval misses 0.5 in some seeds, as it should; these are fixed.
@pytest.mark.parametrize("seed", range(3))
def test_sources_that_are_told_apart_do_not_help_but_contexts_would(seed):
    hidden, positives, sources = fingerprints(seed)
    trials = np.full(len(sources), 8)
    settings = replace(SMALL, folds=5)
    whole = analyse(hidden, Outcome.of(positives, trials, sources), settings=settings)
    auroc = whole.headline.measures["auroc"]
    assert auroc.low < 0.5 < auroc.high
    assert whole.tested.p > 0.05
    by_context = Outcome.of(positives, trials, np.arange(len(sources)))
    leaky = analyse(hidden, by_context, settings=settings)
    assert leaky.headline.measures["auroc"].low > 0.8


def test_over_many_targets_constant_per_source_the_mean_is_one_half():
    found = []
    for seed in range(60):
        hidden, positives, sources = fingerprints(seed)
        outcome = Outcome.of(positives, np.full(len(sources), 8), sources)
        design = Design.of(outcome, make_folds(outcome, 5, seed), estimator="mass-mean")
        scores = cross_validate(Features.of(hidden.layer(0)[:, 0]), design.observed()).scores
        found.append(slow_auroc(scores, outcome, design.folds))
    assert abs(np.mean(found) - 0.5) < 3 * np.std(found) / np.sqrt(len(found))


def test_labels_without_meaning_are_seldom_found():
    rng, repeats, p = np.random.default_rng(0), 100, []
    for seed in range(repeats):
        cells = [Features.of(states) for states in rng.normal(size=(4, 36, WIDTH))]
        outcome = Outcome.of(rng.binomial(8, rng.beta(1, 1, 36)), np.full(36, 8), range(36))
        folds = make_folds(outcome, 3, seed)
        design = Design.of(outcome, folds, permutations(outcome, folds, 19, seed), "mass-mean")
        examined = [cross_validate(cell, design) for cell in cells]
        inner, outer = (
            np.array([getattr(e, name) for e in examined]).reshape(2, 2, 3, -1)
            for name in ("inner", "outer")
        )
        whole = np.array([e.whole for e in examined]).reshape(2, 2)
        tested = against_permutations(inner, outer, whole, 24, 36)
        p.append([tested.p, tested.p_family.min()])
    # At a level of 0.1, over 19 of 100 have odds of 1 in 500.
    assert ((np.array(p) <= 0.1 + 1e-9).sum(0) <= 19).all()
    assert (abs(np.mean(p, axis=0) - 0.525) < 0.1).all()


# -- what it refuses ------------------------------------------------------------------------------
