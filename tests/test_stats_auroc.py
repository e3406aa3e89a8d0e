"""AUROC by pairs of rows, against pairs counted one by one."""

import numpy as np
import pytest

from ia_mech.stats import auroc_between


def rows(seed=0, count=60, sources=9):
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 6, count).astype(float),  # ties are common
        (rng.random(count) < 0.4).astype(float),
        np.array([f"s{i}" for i in rng.integers(0, sources, count)]),
    )


def counted(values, labels, allowed) -> float:
    """Over all pairs that are allowed."""
    won = pairs = 0.0
    for i in np.flatnonzero(labels == 1):
        for j in np.flatnonzero(labels == 0):
            if allowed(i, j):
                pairs += 1
                won += (values[i] > values[j]) + (values[i] == values[j]) / 2
    return won / pairs


def test_pairs_of_different_sources():
    values, labels, sources = rows()
    found = auroc_between(values, labels, sources, resamples=200)
    expected = counted(values, labels, lambda i, j: sources[i] != sources[j])
    assert found.value == pytest.approx(expected)
    assert found.value != pytest.approx(counted(values, labels, lambda i, j: True))
    assert found.low < found.value < found.high and found.sources == len(set(sources))


def test_a_source_is_not_compared_with_its_own_copies():
    """Sources that are perfectly ordered inside and alike between: 0.5, in every resample."""
    sources = np.repeat(np.arange(8), 2)
    values, labels = np.tile([0.0, 1.0], 8), np.tile([0.0, 1.0], 8)
    values += 10 * sources
    found = auroc_between(values, labels, sources, resamples=400)
    assert found.value == 0.5
    assert found.low == pytest.approx(0.5, abs=1e-12) or np.isnan(found.low)


@pytest.mark.parametrize("labels", [np.ones(4), np.zeros(4)])
def test_without_pairs_there_is_nothing(labels):
    values, sources = np.arange(4.0), np.arange(4)
    assert np.isnan(auroc_between(values, labels, sources, resamples=100).value)
