"""The model confidence set against a slow reference, and whether it holds the best model."""

import numpy as np
import pytest

from ia_mech.stats import model_confidence_set
from ia_mech.stats.resampling import resample_counts


def slow(losses, resamples, seed, stretch):
    """One elimination after another, in loops."""
    counts = np.concatenate(list(resample_counts(losses.shape[1], resamples, seed)))
    left, p, largest = list(range(len(losses))), np.ones(len(losses)), 0.0
    while len(left) > 1:
        excess = {m: losses[m].mean() - np.mean([losses[o].mean() for o in left]) for m in left}
        drawn = {m: [] for m in left}
        for row in counts:
            means = {m: (row * losses[m]).sum() / row.sum() - losses[m].mean() for m in left}
            for m in left:
                drawn[m].append(stretch * (means[m] - np.mean(list(means.values()))))
        error = {m: np.sqrt(np.mean(np.square(drawn[m]))) for m in left}
        worst = max(left, key=lambda m: excess[m] / error[m])
        highest = np.max([np.array(drawn[m]) / error[m] for m in left], axis=0)
        reached = (highest >= excess[worst] / error[worst]).sum()
        largest = max(largest, (1 + reached) / (1 + resamples))
        p[worst] = largest
        left.remove(worst)
    return p


@pytest.mark.parametrize("stretch", [1.0, 1.3])
def test_p_values_are_those_of_loops(stretch):
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(5, 30)) + np.array([0, 0.1, 0.5, 0.9, 0.2])[:, None]
    found = model_confidence_set(losses, resamples=60, seed=4, stretch=stretch)
    np.testing.assert_allclose(found, slow(losses, 60, 4, stretch))


def test_a_much_better_model_is_alone_and_equal_ones_stay_together():
    rng = np.random.default_rng(0)
    losses = rng.normal(size=(4, 50))
    losses[2] -= 5
    assert (model_confidence_set(losses) > 0.05).tolist() == [False, False, True, False]
    twins = np.repeat(losses[:1], 3, axis=0)
    assert model_confidence_set(twins).tolist() == [1, 1, 1]
    assert model_confidence_set(losses[:1]).tolist() == [1]


@pytest.mark.slow
def test_it_holds_the_best_model_as_often_as_it_should():
    rng, held = np.random.default_rng(0), []
    for _ in range(300):
        shared = rng.normal(size=60)
        losses = 0.5 * shared + rng.normal(size=(8, 60))
        losses[1:] += 0.05  # so little that any of the others may look better
        held.append(model_confidence_set(losses, resamples=300)[0] > 0.05)
    assert np.mean(held) >= 0.93  # of 300 at 95%, fewer have a chance of 1 in 20
