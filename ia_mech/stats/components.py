"""How much of the difference between turns comes from the query, the response, and the draw.

Each query has a table of zeros and ones, ``[responses, samples]``. Pairs of turns split their
variance. Two turns after one response share query and response; two after different responses to
one query share the query; two after different queries share nothing. Of turns after siblings only
pairs with *different* sample numbers are used: those with the same number are drawn with the same
noise, so they agree more than the responses make them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from ia_mech.stats.intervals import Estimate


@dataclass(frozen=True)
class Components:
    """The variances of turns of several queries. Intervals are the jackknife's; there is none if
    all queries are alike."""

    queries: int  # those with two responses, and two turns after each
    between_queries: Estimate  # of the share of ones from query to query; may be below 0
    between_responses: Estimate  # of the share of ones from response to response of one query
    within: float  # of turns after one response
    shared: float  # part of ``within`` that siblings' turns of one sample number share

    def reliability(self, turns: int) -> Estimate:
        """The share of the variance of siblings' rates, each over so many turns, that comes from
        the responses: the best that a prediction of such rates can explain (a squared correlation).
        """
        noise = (self.within - self.shared) / turns

        def share(variance: float) -> float:
            if np.isnan(variance):
                return variance
            variance = max(variance, 0.0)
            return variance / (variance + noise) if variance + noise > 0 else np.nan

        one = self.between_responses
        return replace(one, value=share(one.value), low=share(one.low), high=share(one.high))


def variance_components(tables: Sequence[np.ndarray], level: float = 0.95) -> Components:
    """Split the variance of turns, given a table ``[responses, samples]`` for each query: 0, 1, or
    NaN without a label. A column is one sample number.

    Raises:
        ValueError: fewer than two queries have pairs of every kind.
    """
    rows = [row for table in tables if (row := _moments(np.asarray(table, float))) is not None]
    if len(rows) < 2:
        raise ValueError("two queries with two responses, and two turns after each, are needed")
    mean, square, same, other, noise = np.array(rows).T
    return Components(
        len(rows),
        _jackknifed(lambda rest: _between(mean[rest], other[rest]), len(rows), level),
        _jackknifed(lambda rest: (same - other)[rest].mean(), len(rows), level),
        float((square - same).mean()),
        float((noise - other).mean()),
    )


def _moments(table: np.ndarray) -> tuple[float, ...] | None:
    """A query's mean, mean square, and mean products of pairs of turns: after one response, after
    two responses with different sample numbers, after two with the same; None if a kind is lacking.
    """
    known = ~np.isnan(table)
    values, counts = np.where(known, table, 0.0), known.astype(float)

    def sums(x: np.ndarray) -> tuple[float, float, float]:
        each = (x**2).sum()
        by_response, by_sample = (x.sum(1) ** 2).sum(), (x.sum(0) ** 2).sum()
        other = x.sum() ** 2 - by_response - by_sample + each
        return by_response - each, other, by_sample - each

    pairs = sums(counts)
    if not all(pairs):
        return None
    same, other, noise = np.array(sums(values)) / pairs
    return values.sum() / counts.sum(), (values**2).sum() / counts.sum(), same, other, noise


def _between(mean: np.ndarray, other: np.ndarray) -> float:
    n = len(mean)
    if n < 2:
        return np.nan
    return float(other.mean() - (mean.sum() ** 2 - (mean**2).sum()) / (n * (n - 1)))


def _jackknifed(statistic: Callable[[np.ndarray], float], n: int, level: float) -> Estimate:
    """Jackknife estimate of a statistic that takes ``[n]`` booleans, the queries that count."""
    value = float(statistic(np.ones(n, dtype=bool)))
    without = np.array([statistic(np.arange(n) != left_out) for left_out in range(n)])
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    if not error > 0:  # all queries are alike, which tells nothing of others
        return Estimate(value, np.nan, np.nan, n, "undefined: all queries are alike")
    reach = float(stdtrit(n - 1, (1 + level) / 2) * error)
    return Estimate(value, value - reach, value + reach, n, "jackknife over queries")
