"""How much of what turns are hangs on the query, on the response, and on the draw.

A table of zeros and ones per query, ``[responses, samples]``, is taken apart into variances by
pairs of turns. Two turns after one response share query and response;
two after different responses to one query share the query; two after different queries share
nothing. Only pairs with *different* sample numbers are used: turns with one sample number after
siblings are drawn with the same noise, so they agree more than the responses make them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import t as student_t

from ia_mech.stats.intervals import Estimate, check_level


@dataclass(frozen=True)
class Components:
    """The variances of turns of several queries.

    Attributes:
        queries: how many tell: those with two responses, and two turns after each.
        between_queries: of the share of ones from query to query; it may be estimated below 0, and
            has no interval where all queries are alike. Intervals are the jackknife's.
        between_responses: likewise of the share from response to response of one query.
        within: from turn to turn after one response.
        shared: of ``within``, what siblings' turns with one sample number share.
    """

    queries: int
    between_queries: Estimate
    between_responses: Estimate
    within: float
    shared: float

    def reliability(self, turns: int) -> Estimate:
        """The share of the variance of siblings' rates that the responses make, of rates over so
        many turns: how well such rates could at best be predicted (the square of a correlation).
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
    """Take the variance of turns apart.

    Args:
        tables: of each query, ``[responses, samples]`` of 0, 1, or NaN where there is no label. A
            column is one sample number.
        level: of the intervals.

    Raises:
        ValueError: fewer than two queries have pairs of every kind.
    """
    check_level(level)
    rows = [row for table in tables if (row := _moments(np.asarray(table, float))) is not None]
    if len(rows) < 2:
        raise ValueError("two queries with two responses, and two turns after each, are needed")
    mean, square, same, other, noise = np.array(rows).T
    siblings = same - other
    return Components(
        len(rows),
        _jackknifed(_between(mean, other), _without_each(mean, other), level),
        _jackknifed(siblings.mean(), _means_without_each(siblings), level),
        float((square - same).mean()),
        float((noise - other).mean()),
    )


def _moments(table: np.ndarray) -> tuple[float, ...] | None:
    """Of a query: mean, mean square, and mean products of pairs of turns: of one response, of two
    responses with different sample numbers, of two responses with the same; None if it lacks any.
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
    return other.mean() - (mean.sum() ** 2 - (mean**2).sum()) / (n * (n - 1))


def _without_each(mean: np.ndarray, other: np.ndarray) -> np.ndarray:
    n = len(mean)
    if n < 3:
        return np.full(n, np.nan)
    products = (mean.sum() - mean) ** 2 - ((mean**2).sum() - mean**2)
    return _means_without_each(other) - products / ((n - 1) * (n - 2))


def _means_without_each(values: np.ndarray) -> np.ndarray:
    return (values.sum() - values) / (len(values) - 1)


def _jackknifed(value: float, without: np.ndarray, level: float) -> Estimate:
    n = len(without)
    error = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    if not error > 0:  # all queries are alike, which says nothing of others
        return Estimate(float(value), np.nan, np.nan, n, "undefined: all queries are alike")
    reach = student_t.ppf((1 + level) / 2, n - 1) * error
    low, high = float(value - reach), float(value + reach)
    return Estimate(float(value), low, high, n, "jackknife over queries")
