"""An estimate with its interval, and the intervals of one mean or rate that have a formula."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

LEAST_SHOWN = 5  # fewest queries from which an interval is shown


@dataclass(frozen=True)
class Estimate:
    """A number with an interval; ``low`` and ``high`` are NaN where none can be given."""

    value: float
    low: float
    high: float
    sources: int  # how many stand behind it
    method: str = ""  # how the interval was made, or why there is none

    def clip(self, least: float, most: float = np.inf) -> "Estimate":
        """The estimate with its interval cut to bounds that the number can't be outside of."""
        low, high = np.clip([self.low, self.high], least, most)
        return replace(self, low=float(low), high=float(high))

    @property
    def few(self) -> bool:
        """Whether so few queries stand behind it that its interval isn't shown."""
        return 0 < self.sources < LEAST_SHOWN

    def text(
        self,
        digits: int | str = 2,
        *,
        sign: bool = False,
        percent: bool = False,
        counts: tuple[int, int] | None = None,
    ) -> str:
        """``0.42 [0.31, 0.55]``; ``–`` without a value, ``[no interval]`` without an interval.

        From fewer than :data:`LEAST_SHOWN` queries no interval is shown, but how many queries there
        are, or the ``counts`` of a rate: ``0.42 (3 queries)``, ``3 of 8``.

        Args:
            digits: decimals, or a format such as ``.0e``.
            sign: show the sign, as for differences. An end that rounds to 0 keeps its sign, which
                says on which side of 0 the interval ends.
            percent: as ``42.0% [31.0, 55.0]``.
            counts: of a rate: its events, and of how many rows.
        """
        style = ("+" if sign else "") + (digits if isinstance(digits, str) else f".{digits}f")
        scale, unit = (100, "%") if percent else (1, "")
        value, low, high = (format(scale * x, style) for x in (self.value, self.low, self.high))
        if np.isnan(self.value):
            return "–"
        if self.few:
            queries = "1 query" if self.sources == 1 else f"{self.sources} queries"
            return f"{counts[0]} of {counts[1]}" if counts else f"{value}{unit} ({queries})"
        interval = "no interval" if np.isnan(self.low) else f"{low}, {high}"
        return f"{value}{unit} [{interval}]"


def check_level(level: float) -> None:
    """Raise ValueError unless the level is a probability strictly between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, not {level!r}")


def wilson(successes: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Score interval of a rate from independent trials (Wilson 1927, JASA 22:209); both counts may
    be fractional. Without trials it is (NaN, NaN)."""
    check_level(level)
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n: {successes} of {n}")
    if n == 0:
        return np.nan, np.nan
    z, rate = float(ndtri((1 + level) / 2)), successes / n
    centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    low = 0.0 if successes == 0 else centre - half  # rounding must not leave 1e-18 behind
    high = 1.0 if successes == n else centre + half
    return float(low), float(high)


def zero_events_bound(sources: int, level: float = 0.95) -> float:
    """Upper bound on a rate when none of n sources had an event: ``1 - (1 - level) ** (1 / n)``,
    about 3 / n at 95% (Hanley & Lippman-Hand 1983, JAMA 249:1743).

    Exact and one-sided. A source counts as one observation, so the bound holds for any correlation
    within sources, and where sources differ in their rates.
    """
    check_level(level)
    if sources < 1:
        raise ValueError(f"a bound needs at least one source, not {sources}")
    return float(-np.expm1(np.log1p(-level) / sources))


class Spread(NamedTuple):
    """A weighted mean, its variance and that variance's degrees of freedom. The variance is
    linearised, made from residuals per source, and robust to any dependence within sources."""

    mean: float
    variance: float
    freedom: float


def spread_between(table: np.ndarray) -> Spread:
    """Cluster-robust variance of a weighted mean, with its degrees of freedom, from a table
    ``[sources, 2]``: sums of weighted values and of weights; at least two sources.

    If few sources carry most of the variance, as near a rate of zero, its estimate is bad. The
    number of carriers is ``(sum of squares)^2 / sum of fourth powers`` of the residuals (compare
    Carter, Schnepel & Steigerwald 2017, Rev. Econ. Stat. 99:698). With ``1 / k = 1 / carriers - 1 /
    n`` (n equal sources are n carriers) there are ``1 + k`` degrees of freedom, at most n - 1;
    Satterthwaite's ``2 k`` is too many (``benchmarks/coverage.md``).
    """
    sources, (total, weight) = len(table), table.sum(0)
    mean = float(total / weight)
    squares = ((table[:, 0] - mean * table[:, 1]) / weight) ** 2
    variance = sources / (sources - 1) * float(squares.sum())
    if variance <= 1e-28 * mean**2:  # all sources alike, up to rounding
        return Spread(mean, 0.0, sources - 1)
    return Spread(mean, variance, degrees_of_freedom(squares))


def degrees_of_freedom(squares: np.ndarray) -> float:
    """Degrees of freedom of a variance (see :func:`spread_between`), from ``[sources]`` squares,
    which each source adds to it."""
    sources, total = len(squares), squares.sum()
    if not total:
        return sources - 1
    uneven = float((squares**2).sum() / total**2) - 1 / sources
    return min(1 + 1 / max(uneven, 1 / sources**2), sources - 1)


def student(table: np.ndarray, level: float) -> Estimate:
    """Mean plus and minus a Student quantile times its cluster-robust standard error, from a table
    as :func:`spread_between` takes it.

    There is no interval if all sources are alike: nothing says how others may differ.
    """
    check_level(level)
    spread = spread_between(table)
    if spread.variance == 0:
        return Estimate(spread.mean, np.nan, np.nan, len(table), "all queries alike")
    half = float(stdtrit(spread.freedom, (1 + level) / 2) * np.sqrt(spread.variance))
    return Estimate(spread.mean, spread.mean - half, spread.mean + half, len(table), "student")


def clustered_wilson(table: np.ndarray, rows: float, level: float) -> tuple[float, float]:
    """Score interval of a rate with the effective number of rows in place of the number of rows.

    The effective number is ``rate * (1 - rate) / variance``, no more than the rows there are, times
    the squared ratio of Student's quantiles for ``rows - 1`` and the variance's degrees of freedom
    (Korn & Graubard 1998, Survey Methodology 24:193). Unlike theirs, these degrees are those of
    :func:`spread_between`, which keep coverage at rates of a few percent.

    Args:
        table: ``[sources, 2]`` sums of weighted events and of weights; two sources that differ.
        rows: number of rows; infinite where their values vary less than events do.
        level: coverage.
    """
    spread, quantile = spread_between(table), (1 + level) / 2
    rate, freedom = spread.mean, spread.freedom
    size = min(rows, rate * (1 - rate) / spread.variance)
    known = stdtrit(max(rows - 1, freedom), quantile)
    size = float(size * (known / stdtrit(freedom, quantile)) ** 2)
    return wilson(rate * size, size, level)


def unseen(
    value: float, sources: int, level: float, ends: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """The interval of a mean that allows for sources of a kind that none of those seen has.

    Such sources may make up a share of :func:`zero_events_bound`, and differ as far as ``ends``
    allow: the least and the largest mean that a source can have. Around a rate of 0 or 1 this is
    the exact one-sided interval. No interval of a bounded mean is narrower, so none has width 0,
    however alike the sources are.
    """
    bound = zero_events_bound(sources, level)
    return value - bound * (value - ends[0]), value + bound * (ends[1] - value)


def hull(*intervals: tuple[float, float]) -> tuple[float, float]:
    """The smallest interval that holds all of these."""
    lows, highs = zip(*intervals, strict=True)
    return min(lows), max(highs)


def rate_interval(
    table: np.ndarray, rows: float, level: float, *, independent: bool = False
) -> tuple[float, float, str]:
    """The interval of a rate, and the name of the method; ``table`` and ``rows`` as
    :func:`clustered_wilson` takes them.

    - All sources alike: the exact one-sided bound (:func:`unseen`), whatever the correlation.
    - ``independent`` (every source has one row, 0 or 1, and all weigh the same): the exact binomial
      interval (Clopper & Pearson 1934).
    - Otherwise :func:`clustered_wilson`'s, at least as wide as :func:`unseen`'s.
    """
    sources, (events, weight) = len(table), table.sum(0)
    rate = float(events / weight)
    least = unseen(rate, sources, level)
    if sources == 1 or spread_between(table).variance == 0:
        return *least, "exact, one-sided" if rate in (0, 1) else "all queries alike"
    if independent:
        from scipy.stats import binomtest  # which takes a second to load

        exact = binomtest(round(rate * sources), sources).proportion_ci(level, "exact")
        return exact.low, exact.high, "clopper-pearson"
    return *hull(least, clustered_wilson(table, rows, level)), "wilson"


def combined(
    parts: Sequence[tuple[float, float, float]], weights: Sequence[float], correlation: float = 0.0
) -> tuple[float, float, float]:
    """A weighted sum of estimates, with an interval made from theirs.

    MOVER, the method of variance estimates recovery (Newcombe 1998, Statist. Med. 17:873 and 2635;
    Zou & Donner 2008, ibid. 27:1693): the distances from each value to the end that moves the sum
    the same way are combined as standard errors are. ``parts`` are value, low and high of each
    estimate; weights of 1 and -1 make a difference; ``correlation`` is that between any two parts.
    """
    value, low, high = np.array(parts, dtype=float).T
    factor = np.asarray(weights, dtype=float)
    below, above = factor * (value - low), factor * (high - value)
    middle = float(factor @ value)

    def together(away: np.ndarray) -> float:
        alone, squared = (away**2).sum(), away.sum() ** 2
        return float(np.sqrt(max((1 - correlation) * alone + correlation * squared, 0)))

    positive = factor > 0
    down, up = np.where(positive, below, above), np.where(positive, above, below)
    return middle, middle - together(down), middle + together(up)
