"""A difference of means split into mix and rest: by hand, by leaving sources out, and coverage."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ia_mech.stats import decomposed_difference


def planted(seed: int, sources: int = 60, rest: float = 0.0, shared: float = 0.0):
    """Turns of two conditions. The first has more copies, whose value is 0. From other values a
    floor is subtracted that depends on the source shown. ``rest`` of the difference isn't mix."""
    rng = np.random.default_rng(seed)
    of = np.repeat(np.arange(sources), 12)
    treated = np.tile(np.arange(12) >= 4, sources)
    copies = rng.random(len(of)) < np.where(treated, 0.2, 0.5)
    rate = np.clip(0.5 + rng.normal(0, 0.1, sources)[of] + rest * treated, 0, 1)
    shown = (of + rng.integers(1, sources, len(of))) % sources
    floor = rng.random(len(of)) < np.clip(0.2 + shared * rng.normal(size=sources)[shown], 0, 1)
    values = (~copies & (rng.random(len(of)) < rate)).astype(float) - (~copies & floor)
    return values, copies, treated, of


def by_hand(values, kind, treated, first):
    """Parts and standard errors, each source left out in turn."""
    known = pd.DataFrame({"s": first, "t": treated, "v": values, "k": kind, "vk": values * kind})
    means = known.groupby(["s", "t"])[["v", "k", "vk"]].mean().unstack().dropna().to_numpy()

    def parts(m):
        v, k, vk = m.reshape(3, 2)
        inside, outside = vk / k, (v - vk) / (1 - k)
        mix = (k[1] - k[0]) * (inside.mean() - outside.mean())
        return np.array([v[1] - v[0], mix, v[1] - v[0] - mix])

    n = len(means)
    without = np.array([parts(np.delete(means, i, 0).mean(0)) for i in range(n)])
    whole = parts(means.mean(0))
    return whole, np.sqrt((n - 1) / n * ((without - whole) ** 2).sum(0))


def test_parts_by_hand():
    """Two equal sources: first 3 of 4 values, then 1 of 4, are of the kind, whose value is 0."""
    values = np.tile([0, 0, 0, 1, 0, 1, 1, 0], 2)
    kind = np.tile([1, 1, 1, 0, 1, 0, 0, 0], 2)
    treated = np.tile(np.repeat([0, 1], 4), 2)
    found = decomposed_difference(values, kind, treated, np.repeat([0, 1], 8))
    # The others' means are 1 and 2/3, so a share of 1/2 more of them makes 1/2 · 5/6.
    assert found.difference.value == pytest.approx(0.25)
    assert found.mix.value == pytest.approx(0.5 * 5 / 6)
    assert found.rest.value == pytest.approx(0.25 - 5 / 12)
    # Two sources that are alike show no spread.
    assert np.isnan([found.p, found.p_rest, found.rest.low, found.rest.high]).all()


def test_equal_to_leaving_each_source_out():
    values, kind, treated, first = planted(0)
    values[5] = np.nan
    found = decomposed_difference(values, kind, treated, first)
    known = ~np.isnan(values)
    whole, errors = by_hand(*(one[known] for one in (values, kind, treated, first)))
    for at, one in enumerate(found[:3]):
        assert one.value == pytest.approx(whole[at], abs=1e-12)
        least, most = (stats.t.ppf(0.975, df) * errors[at] for df in (59, 20))
        assert least * 0.999 <= (one.high - one.low) / 2 <= most
    assert found.mix.value + found.rest.value == pytest.approx(found.difference.value)


def test_a_condition_without_the_kind_has_the_others_mean():
    values, kind, treated, first = planted(1)
    kind = kind & ~treated
    found = decomposed_difference(values, kind, treated, first)
    assert all(np.isfinite([one.value, one.low, one.high]).all() for one in found[:3])


def test_sources_without_both_conditions_dont_count():
    values, kind, treated, first = planted(2)
    alone = decomposed_difference(values, kind, treated, first)
    more = [
        np.r_[one, other] for one, other in zip((values, kind, treated), (9, 1, 1), strict=True)
    ]
    again = decomposed_difference(*more, np.r_[first, 99])
    assert again[:3] == alone[:3]
    one = decomposed_difference(values[:12], kind[:12], treated[:12], first[:12])
    assert np.isnan(one.rest.value) and one.rest.method == "too few queries"


@pytest.mark.parametrize("shared", [0.0, 0.3])
def test_intervals_of_the_rest_hold_the_truth(shared):
    """300 times, so 95% ± 2.5% by two standard errors. Floors that depend on the conversation shown
    don't matter, since both conditions are shown wrong conversations that are drawn alike."""
    held = rejected = 0
    for seed in range(300):
        found = decomposed_difference(*planted(seed, sources=40, shared=shared))
        held += found.rest.low <= 0 <= found.rest.high
        rejected += found.p_rest < 0.05
    assert 0.92 <= held / 300 <= 0.985
    assert rejected == 300 - held
    assert decomposed_difference(*planted(0, sources=200, rest=0.3)).p_rest < 0.001
