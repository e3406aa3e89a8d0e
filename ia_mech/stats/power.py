"""What a paired design could have found."""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import stdtrit

from ia_mech.stats.intervals import check_level, rate_ends, spread_between, wilson
from ia_mech.stats.paired import Condition, are_rates, conditions, correlation


def detectable_difference(
    values_a: ArrayLike,
    sources_a: Iterable[Hashable],
    values_b: ArrayLike,
    sources_b: Iterable[Hashable],
    *,
    power: float = 0.8,
    level: float = 0.95,
    proportion: bool | None = None,
) -> float:
    """Smallest true paired difference that this design would have found with this power.

    It speaks of the design (number of sources, how far their values spread and go together), not of
    the difference that was observed; "observed power" would only repeat the p value (Hoenig &
    Heisey 2001, Amer. Statist. 55:19).

    - Between two rates: how far the first rate would have to lie from the second, towards one half,
      for the interval of :func:`paired_difference` to leave out 0 with this power. The first
      condition's spread is taken as it would be at that rate, with the design effect observed; a
      rate without events has none, and its sources then count as one observation each.
    - Between other means: ``(t(level) + t(power)) * standard error`` of the per-source differences
      (Bloom 1995, Evaluation Review 19:547, "minimum detectable effect").

    Simulated power is near what is asked for where the conditions have different numbers of rows,
    and higher at low rates where they have the same (``benchmarks/coverage.md``).

    Args:
        values_a: ``[n]`` values of the first condition; NaN entries are left out.
        sources_a: ``[n]`` their sources.
        values_b: ``[m]`` values of the second condition, the one compared with.
        sources_b: ``[m]`` their sources.
        power: chance of finding it.
        level: 1 minus the two-sided level of the test.
        proportion: the means are rates; if not given they are if all values are 0 or 1.

    Returns:
        A positive number, at most 1 for rates; NaN with fewer than two common sources, if no
        difference is large enough, or, for other means, if all differences are alike.

    Raises:
        ValueError: lengths differ, power or level lie outside (0, 1), or a value of a proportion
            lies outside [0, 1].
    """
    check_level(level)
    if not 0 < power < 1:
        raise ValueError(f"power must lie strictly between 0 and 1, not {power!r}")
    a, b = conditions(values_a, sources_a, values_b, sources_b)
    if len(a.means) < 2:
        return np.nan
    if are_rates(a, b, proportion):
        return _between_rates(a, b, power, level)
    spread = spread_between(np.stack([a.means - b.means, np.ones(len(a.means))], axis=1))
    if spread.variance == 0:
        return np.nan
    return spread.reach(level) + spread.reach(2 * power - 1)


def _between_rates(a: Condition, b: Condition, power: float, level: float) -> float:
    """The difference at which MOVER's interval just leaves out 0 with the power asked for."""
    n, rate_a, base = len(a.means), float(a.means.mean()), float(b.means.mean())
    spread_a, spread_b = spread_between(a.table), spread_between(b.table)
    rows_a, rows_b = int(a.rows.sum()), int(b.rows.sum())
    low, high, _ = rate_ends(b.table, rows_b, b.single, level)
    reach_b = high - base
    if base > 0.5:  # look down instead of up: count what is no event
        base, reach_b = 1 - base, base - low
    size = float(n)  # how many independent trials the first condition is worth
    if spread_a.variance > 0 and not a.single:
        size = min(rows_a, rate_a * (1 - rate_a) / spread_a.variance)
    r, quantile = correlation(a.means, b.means), float(stdtrit(n - 1, power))

    def margin(difference: float) -> float:
        """By how much a difference is larger than it need be."""
        rate = min(base + difference, 1.0)
        reach_a = rate - wilson(rate * size, size, level)[0]
        variance_a = rate * (1 - rate) / size
        covariance = r * np.sqrt(variance_a * spread_b.variance)
        error = np.sqrt(max(variance_a + spread_b.variance - 2 * covariance, 0))
        needed = np.sqrt(max(reach_a**2 - 2 * r * reach_a * reach_b + reach_b**2, 0))
        return difference - needed - quantile * error

    if not margin(1e-9) < 0 < margin(1 - base):
        return np.nan
    return float(brentq(margin, 1e-9, 1 - base, xtol=1e-9))
