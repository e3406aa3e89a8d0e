"""A rate corrected for a judge's errors, from the rows that were annotated, too.

A judge that errs moves a rate, most of all one near zero: with a specificity of 0.98, 2% of
follow-ups come out of nothing. The correction takes the judge's verdict on every row and the truth
on some, and carries the uncertainty of both.
"""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.intervals import Estimate, check_level, clustered_wilson, rate_interval
from ia_mech.stats.resampling import as_column, source_index

# Columns of the table of sums per source: rows and the judge's positive verdicts; of annotated rows
# the weights, those of positive annotations and those of positive verdicts.
ROWS, POSITIVE, WEIGHT, TRUE, ACCEPTED = range(5)


def prediction_powered(
    predicted: ArrayLike,
    truth: ArrayLike,
    sources: Iterable[Hashable],
    *,
    inclusion: ArrayLike,
    level: float = 0.95,
) -> Estimate:
    """Rate of annotated rows, plus what the judge's verdicts on all rows tell beyond them.

    Prediction-powered inference with a tuned weight (PPI++; Angelopoulos, Duchi & Zrnic 2023,
    arXiv:2311.01453): mean truth of the annotated rows + λ (mean verdict of all rows - mean verdict
    of the annotated rows). λ = 0 is the rate of the annotations alone, λ = 1 the judge's rate plus
    its mean error on them. Means of annotated rows are weighted by inverse inclusion probabilities,
    normalised (Hájek 1971). A poor judge makes λ small, so that the interval is hardly ever wider
    than without a judge.

    λ minimises the variance between sources, linearised: minus the covariance of both terms over
    the variance of the second, kept within [0, 1]. It is cross-fitted: each source's rows are
    weighted by the λ of all other sources, since one λ for all biases a rate of 20% by 0.004
    (``benchmarks/coverage.md``).

    The interval is the score interval of ``intervals.clustered_wilson`` with the linearised
    variance between sources; in simulation it covers as well where the annotations show no error of
    a judge that errs. Where the annotations are all 0 or all 1, λ is 0, and the interval is the
    exact bound on annotated sources. λ is 0, too, where another would give a rate outside (0, 1).

    Args:
        predicted: ``[n]`` the judge's verdict on every row, 0 or 1; NaN (no verdict) is left out.
        truth: ``[n]`` the annotation of each row, 0 or 1; NaN where there is none.
        sources: ``[n]`` their sources.
        inclusion: ``[n]`` the probability with which a row was chosen for annotation, in (0, 1], up
            to a common factor; of rows without an annotation it isn't looked at.
        level: coverage.

    Returns:
        The corrected rate, within [0, 1]; ``sources`` are those of all rows. Without an interval
        with one source. NaN without rows or annotations.

    Raises:
        ValueError: lengths differ, a verdict or annotation is neither 0, 1 nor NaN, or an inclusion
            probability lies outside (0, 1].
    """
    check_level(level)
    table = _table(predicted, truth, sources, inclusion)
    count, totals = len(table), table.sum(0)
    if not totals[WEIGHT]:
        reason = "undefined: no annotations" if count else "undefined: no rows"
        return Estimate(np.nan, np.nan, np.nan, count, reason)
    by_truth = table[table[:, WEIGHT] > 0][:, [TRUE, WEIGHT]]
    events, weight = by_truth.sum(0)
    if events in (0, weight):
        low, high, name = rate_interval(by_truth, weight, False, level)
        return Estimate(float(events / weight), low, high, count, name)
    if count < 2:
        return Estimate(float(events / weight), np.nan, np.nan, count, "one source")
    value, influence = _powered(table, _tuned(table))
    if not 0 < value < 1:
        value, influence = _powered(table, np.zeros(len(table)))
    rows = table[:, ROWS]  # a mean over them with this value and these residuals
    moments = np.stack([value * rows + rows.sum() * influence, rows], axis=1)
    return Estimate(value, *clustered_wilson(moments, rows.sum(), level), count, "wilson")


def _tuned(table: np.ndarray) -> np.ndarray:
    """``[sources]`` λ of :func:`prediction_powered`, each from all sources but that one."""
    _, truth = _powered(table, np.zeros(len(table)))
    _, error = _powered(table, np.ones(len(table)))
    gap = truth - error  # of the annotated rows' mean verdict from that of all rows
    covariance, variance = (truth * gap).sum() - truth * gap, (gap**2).sum() - gap**2
    shares = np.divide(covariance, variance, out=np.zeros(len(table)), where=variance > 1e-18)
    return np.clip(shares, 0, 1)


def _powered(table: np.ndarray, tuned: np.ndarray) -> tuple[float, np.ndarray]:
    """The rate with each source's λ, and each source's influence on it; these sum to 0."""
    rows, verdicts, weights = table[:, ROWS], table[:, POSITIVE], table[:, WEIGHT]
    left = table[:, TRUE] - tuned * table[:, ACCEPTED]
    mean, added = left.sum() / weights.sum(), (tuned * verdicts).sum() / rows.sum()
    influence = (left - mean * weights) / weights.sum()
    influence += (tuned * verdicts - added * rows) / rows.sum()
    return float(mean + added), influence


def _table(
    predicted: ArrayLike, truth: ArrayLike, sources: Iterable[Hashable], inclusion: ArrayLike
) -> np.ndarray:
    """``[sources, 5]`` sums per source that has a verdict."""
    index, count = source_index(sources)
    verdicts, actual = (
        _binary(predicted, len(index), "predicted"),
        _binary(truth, len(index), "truth"),
    )
    judged = ~np.isnan(verdicts)
    annotated = judged & ~np.isnan(actual)
    chances = as_column(inclusion, len(index), "inclusion")[annotated]
    if not ((chances > 0) & (chances <= 1)).all():
        raise ValueError("inclusion probabilities must lie in (0, 1]")
    weights = np.zeros(len(index))
    weights[annotated] = 1 / chances
    columns = judged, verdicts == 1, weights, weights * (actual == 1), weights * (verdicts == 1)
    table = np.stack([np.bincount(index, column, count) for column in columns], axis=1)
    return table[table[:, ROWS] > 0]


def _binary(values: ArrayLike, rows: int, name: str) -> np.ndarray:
    """``[rows]`` of 0, 1 and NaN, or ValueError."""
    column = as_column(values, rows, name)
    if not (np.isnan(column) | (column == 0) | (column == 1)).all():
        raise ValueError(f"{name} must be 0, 1 or NaN")
    return column
