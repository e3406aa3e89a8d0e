"""Variance components of turns: by hand, and on simulated runs whose variances are known."""

from itertools import product

import numpy as np
import pytest

from ia_mech.stats.components import variance_components


def by_hand(tables):
    """Means of products over all pairs of turns, by definition."""
    same, other, noise = [], [], []
    for table in tables:
        turns = [(c, s, table[c, s]) for c, s in np.ndindex(table.shape)]
        kinds = {"same": [], "other": [], "noise": []}
        for (c, s, x), (d, t, y) in product(turns, turns):
            if np.isnan(x * y) or (c, s) == (d, t):
                continue
            kind = "same" if c == d else "noise" if s == t else "other"
            kinds[kind].append(x * y)
        for found, name in ((same, "same"), (other, "other"), (noise, "noise")):
            found.append(np.mean(kinds[name]))
    means = [np.nanmean(table) for table in tables]
    between = np.mean([x * y for i, x in enumerate(means) for j, y in enumerate(means) if i != j])
    return (
        np.mean(other) - between,
        np.mean(same) - np.mean(other),
        np.mean(means) - np.mean(same),
        np.mean(noise) - np.mean(other),
    )


def test_components_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    tables = [(rng.random((3, 5)) < share).astype(float) for share in (0.2, 0.5, 0.6, 0.9)]
    tables[1][0, 2] = tables[3][2, 4] = np.nan
    found = variance_components(tables)
    between, siblings, within, shared = by_hand(tables)
    assert found.queries == 4
    assert found.between_queries.value == pytest.approx(between, abs=1e-12)
    assert found.between_responses.value == pytest.approx(siblings, abs=1e-12)
    assert (found.within, found.shared) == pytest.approx((within, shared), abs=1e-12)


def test_the_interval_is_the_jackknifes():
    rng = np.random.default_rng(1)
    tables = [(rng.random((3, 4)) < share).astype(float) for share in np.linspace(0.1, 0.9, 9)]
    found = variance_components(tables)
    for name in ("between_queries", "between_responses"):
        without = [
            getattr(variance_components(tables[:i] + tables[i + 1 :]), name).value for i in range(9)
        ]
        error = np.sqrt(8 / 9 * np.sum((without - np.mean(without)) ** 2))
        one = getattr(found, name)
        assert (one.high - one.low) / 2 == pytest.approx(2.306004 * error, rel=1e-5)
        assert (one.high + one.low) / 2 == pytest.approx(one.value, abs=1e-12)


def simulated(rng, queries, spread, siblings=4, turns=16):
    """Shares of queries vary by 0.04, of responses by ``spread``², and siblings share noise."""
    tables = []
    for _ in range(queries):
        share = rng.choice([0.3, 0.7]) + spread * rng.choice([-1, 1], size=(siblings, 1))
        noise = np.where(
            rng.random((siblings, turns)) < 0.5, rng.random(turns), rng.random((siblings, turns))
        )
        tables.append((noise < share).astype(float))
    return tables


@pytest.mark.parametrize("spread", [0.0, 0.15])
def test_planted_variances_are_found_and_intervals_hold(spread):
    rng, runs = np.random.default_rng(2), 200
    found = [variance_components(simulated(rng, 30, spread)) for _ in range(runs)]
    for name, truth in (("between_queries", 0.04), ("between_responses", spread**2)):
        each = [getattr(one, name) for one in found]
        values = np.array([one.value for one in each])
        assert abs(values.mean() - truth) < 4 * values.std() / runs**0.5
        held = np.mean([one.low <= truth <= one.high for one in each])
        assert held > 0.95 - 3 * (0.95 * 0.05 / runs) ** 0.5
    assert np.mean([one.shared for one in found]) > 0.02
    truth = spread**2 / (spread**2 + np.mean([one.within - one.shared for one in found]) / 16)
    reliability = [one.reliability(16) for one in found]
    assert np.mean([one.low <= truth <= one.high for one in reliability]) > 0.9
