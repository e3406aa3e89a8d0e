"""Choice of the headline and its tests, against loops over layers, positions and permutations."""

import numpy as np
import pytest

from probes.fit.folds import against_permutations, choose

LAYERS, POSITIONS, FOLDS, PERMUTATIONS = 7, 3, 5, 29
INSIDE, SOURCES = 40, 50


def maps(seed=0, signal=0.0):
    """Inner and outer statistics of all cells, folds and labels, and those of all contexts.

    Rounded, so that permutations tie with what is observed.
    """
    rng = np.random.default_rng(seed)
    shape = (LAYERS, POSITIONS, FOLDS, 1 + PERMUTATIONS)
    inner = rng.normal(0, 0.2, shape).round(2).clip(-0.95, 0.95)
    outer = rng.normal(0.5, 0.05, shape).round(2)
    inner[3:, 1, :, 0] += signal
    outer[3:, 1, :, 0] += signal / 2
    whole = inner[..., 0].mean(2)
    return inner, outer, whole


def slow_choice(correlations, sources):
    """``[layers, positions]``: the best cell, then the first layer near enough."""
    best = max(
        ((at, where) for at in range(len(correlations)) for where in range(POSITIONS)),
        key=lambda cell: correlations[cell],  # the first, if several are best
    )
    limit = np.arctanh(correlations[best]) - 1 / np.sqrt(sources - 3)
    for layer in range(len(correlations)):
        if np.arctanh(correlations[layer, best[1]]) >= limit:
            return layer, best[1]
    raise AssertionError("the best itself is near enough")


def slow_p(observed, null):
    return (1 + sum(value >= observed - 1e-6 for value in null)) / (1 + len(null))


# -- the choice -----------------------------------------------------------------------------------

# Of 103 sources the standard error of Fisher's z is 0.1: of a best 0.60, all from 0.5325 are near.
CURVES = [
    ([0.1, 0.2, 0.54, 0.6, 0.55], 2),
    ([0.1, 0.2, 0.53, 0.6, 0.55], 3),
    ([0.1, 0.2, 0.53, 0.55, 0.6], 3),
    ([0.54, 0.2, 0.1, 0.3, 0.6], 0),  # the earliest, though there is a gap
    ([0.6, 0.6, 0.6, 0.6, 0.6], 0),
    ([0.6, 0.5, 0.4, 0.3, 0.2], 0),
    ([-0.5, -0.3, -0.2, -0.05, 0.0], 3),
    ([-0.6, -0.5, -0.4, -0.35, -0.3], 3),
    ([0.0, 0.0, 0.0, 0.0, 1.0], 4),
    ([0.0, 0.0, 1.0, 1.0, 1.0], 2),
    ([0.0, 0.0, 0.0, 0.0, 0.0], 0),
    ([-1.0, -1.0, -1.0, -1.0, -0.999], 4),
]


@pytest.mark.parametrize(("curve", "expected"), CURVES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_earliest_layer_within_one_standard_error(curve, expected, dtype):
    layer, position = choose(np.array(curve, dtype=dtype)[:, None], 103)
    assert (layer, position) == (expected, 0)


def test_few_sources_forgive_more():
    curve = np.array([0.1, 0.3, 0.5, 0.6])[:, None]
    assert [int(choose(curve, sources)[0]) for sources in (10_000, 103, 30, 8, 4)] == [
        3,
        3,
        2,
        1,
        0,
    ]
    assert choose(curve, 3)[0] == choose(curve, 2)[0] == choose(curve, 4)[0]


def test_the_position_is_the_best_cells():
    correlations = np.full((4, 3), 0.1)
    correlations[0] = [0.58, 0.3, 0.3]  # near enough and earlier, but elsewhere
    correlations[2, 1], correlations[3, 1] = 0.55, 0.6
    assert choose(correlations, 103) == (2, 1)


def test_many_choices_at_once_are_those_one_by_one():
    rng = np.random.default_rng(0)
    correlations = rng.uniform(-0.9, 0.9, (LAYERS, POSITIONS, 4, 50)).round(1)  # many ties
    layer, position = choose(correlations, 20)
    assert layer.shape == position.shape == (4, 50)
    for fold in range(4):
        for column in range(50):
            expected = slow_choice(correlations[:, :, fold, column], 20)
            assert (layer[fold, column], position[fold, column]) == expected
    assert len(set(layer.ravel())) == LAYERS and len(set(position.ravel())) == POSITIONS


# -- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("seed", "signal"), [(0, 0.0), (1, 0.1), (2, 0.3)])
def test_everything_is_what_loops_find(seed, signal, dtype):
    inner, outer, whole = maps(seed, signal)
    found = against_permutations(inner.astype(dtype), outer.astype(dtype), whole, INSIDE, SOURCES)
    headline, largest = [], []
    for column in range(1 + PERMUTATIONS):
        picked = [slow_choice(inner[:, :, fold, column], INSIDE) for fold in range(FOLDS)]
        if column == 0:
            np.testing.assert_array_equal(found.picked, picked)
        headline.append(np.mean([outer[*picked[f], f, column] for f in range(FOLDS)]))
        largest.append(
            max(outer[at, w, :, column].mean() for at in range(LAYERS) for w in range(3))
        )
    assert found.value == pytest.approx(headline[0])
    np.testing.assert_allclose(found.null, headline[1:], rtol=1e-6)
    assert found.p == slow_p(headline[0], headline[1:])
    for layer in range(LAYERS):
        for position in range(POSITIONS):
            by_column = outer[layer, position].mean(0)
            assert found.statistic[layer, position] == pytest.approx(by_column[0])
            assert found.p_family[layer, position] == slow_p(by_column[0], largest[1:])
            band = np.quantile(by_column[1:], 0.95)
            assert found.band[layer, position] == pytest.approx(band)
    assert found.family_band == pytest.approx(np.quantile(largest[1:], 0.95))
    assert found.headline == slow_choice(whole, SOURCES)
    assert found.permutations == PERMUTATIONS and found.null.shape == (PERMUTATIONS,)
    assert (found.p == 1 / (1 + PERMUTATIONS)) == (signal == 0.3)


def test_the_null_pays_for_the_selection():
    """Inner and outer agree as they do without signal in one set of labels: chosen, then scored."""
    rng = np.random.default_rng(0)
    shape, p = (LAYERS, POSITIONS, FOLDS, 1 + 19), []
    for _ in range(300):
        shared = rng.normal(0, 0.1, shape)
        inner, outer = shared + rng.normal(0, 0.1, shape), 0.5 + shared / 2
        whole = inner[..., 0].mean(2)
        found = against_permutations(inner, outer, whole, INSIDE, SOURCES)
        p.append([found.p, found.p_family.min()])
    for rejected in (np.array(p) <= 0.1 + 1e-9).mean(0):
        assert 0.06 < rejected < 0.14


def test_observed_labels_alone_have_no_p_value():
    inner, outer, whole = maps(signal=0.3)
    found = against_permutations(inner[..., :1], outer[..., :1], whole, INSIDE, SOURCES)
    full = against_permutations(inner, outer, whole, INSIDE, SOURCES)
    assert found.permutations == 0 and found.null.shape == (0,)
    assert np.isnan(found.p) and np.isnan(found.family_band)
    assert np.isnan(found.p_family).all() and found.p_family.shape == (LAYERS, POSITIONS)
    assert np.isnan(found.band).all() and found.band.shape == (LAYERS, POSITIONS)
    assert (found.value, found.headline) == (full.value, full.headline)
    np.testing.assert_array_equal(found.picked, full.picked)


def test_one_cell_is_its_own_headline():
    inner, outer, _ = maps()
    found = against_permutations(inner[:1, :1], outer[:1, :1], inner[:1, :1, 0, 0], INSIDE, SOURCES)
    assert found.headline == (0, 0) and not found.picked.any()
    assert found.value == pytest.approx(found.statistic[0, 0])
    assert found.p == found.p_family[0, 0]
