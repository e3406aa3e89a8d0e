"""Correct rates and masses for a judge's errors, by the rows that were also annotated.

A judge's errors move a rate, most of all one near zero: with a specificity of 0.98, a rate of 0
looks like 2%. The correction takes the judge's verdict on every row and the annotations of some,
and its interval carries the uncertainty of both.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.clusters import weighted_share
from ia_mech.stats.intervals import (
    Estimate,
    clustered_wilson,
    combined,
    hull,
    spread_between,
    student,
    unseen,
)
from ia_mech.stats.resampling import as_column, source_index

# Columns of the table of sums per source: the number of rows and of the judge's positive verdicts;
# the weights of all annotated rows, of those annotated 1, and of those with a positive verdict.
ROWS, POSITIVE, WEIGHT, TRUE, PREDICTED = range(5)


def prediction_powered(
    predicted: ArrayLike,
    truth: ArrayLike,
    sources: Iterable[Hashable],
    *,
    inclusion: ArrayLike,
    level: float = 0.95,
) -> Estimate:
    """The rate by the annotated rows, made more precise by the judge's verdicts on all rows.

    Prediction-powered inference with a tuned weight (PPI++; Angelopoulos, Duchi & Zrnic 2023,
    arXiv:2311.01453): mean truth of the annotated rows + λ (mean verdict of all rows - mean verdict
    of the annotated rows). Means of annotated rows are weighted by inverse inclusion probabilities,
    normalised (Hájek 1971). λ minimises the linearised variance between sources within [0, 1] and
    is cross-fitted: each source's rows are weighted by the λ of all other sources, since one λ for
    all would bias a rate of 20% by 0.004 (``benchmarks/coverage.md``).

    The interval is ``intervals.clustered_wilson``'s, and no narrower than what unseen sources could
    add to each stratum, the rows of one inclusion probability. Where the annotations are all 0 or
    all 1, λ is 0, and the interval is that of the annotations alone (``clusters.weighted_share``).
    λ is also 0 where another would give a rate outside (0, 1). There is no interval where fewer
    than two sources were annotated, and no rate without annotations.

    Args:
        predicted: ``[n]`` the judge's verdict on every row, 0 or 1; NaN (no verdict) is left out.
        truth: ``[n]`` the annotation of each row, 0 or 1; NaN where there is none.
        sources: ``[n]`` each row's source; the estimate counts those of all rows.
        inclusion: ``[n]`` the probability with which a row was chosen for annotation, in (0, 1], up
            to a common factor; ignored for rows without an annotation.
        level: coverage.

    Raises:
        ValueError: lengths differ, a verdict or annotation is neither 0, 1 nor NaN, or an inclusion
            probability lies outside (0, 1].
    """
    index, _ = source_index(sources)
    verdict, actual = (
        _binary(predicted, len(index), "predicted"),
        _binary(truth, len(index), "truth"),
    )
    judged = ~np.isnan(verdict)
    noted = (~np.isnan(actual))[judged]
    chances = as_column(inclusion, len(index), "inclusion")[judged]
    if not ((chances > 0) & (chances <= 1))[noted].all():
        raise ValueError("inclusion probabilities must lie in (0, 1]")
    weights = np.zeros(len(noted))
    weights[noted] = 1 / chances[noted]
    verdict, actual = verdict[judged], np.nan_to_num(actual[judged])
    _, index = np.unique(index[judged], return_inverse=True)
    columns = np.ones(len(index)), verdict, weights, weights * actual, weights * verdict
    table = np.stack([np.bincount(index, column) for column in columns], axis=1)
    count, totals = len(table), table.sum(0)
    if not totals[WEIGHT]:
        reason = "undefined: no annotations" if count else "undefined: no rows"
        return Estimate(np.nan, np.nan, np.nan, count, reason)
    events, weight = totals[[TRUE, WEIGHT]]
    if events in (0, weight):
        every = np.ones(noted.sum(), dtype=bool)
        alone = weighted_share(actual[noted], every, index[noted], weights[noted], level=level)
        return replace(alone, sources=count)
    if (table[:, WEIGHT] > 0).sum() < 2:
        return Estimate(float(events / weight), np.nan, np.nan, count, "one annotated query")
    tuned = _tuned(table)
    value, influence = _powered(table, tuned)
    if not 0 < value < 1:
        tuned = np.zeros(count)
        value, influence = _powered(table, tuned)
    sizes = table[:, ROWS]  # then a table with this mean and these residuals
    moments = np.stack([value * sizes + sizes.sum() * influence, sizes], axis=1)
    low, high = _unseen_errors(
        (actual - tuned.mean() * verdict)[noted],
        weights[noted],
        index[noted],
        value,
        (-float(tuned.mean()), 1.0),
        level,
    )
    if (influence**2).sum() > 0:
        low, high = hull((low, high), clustered_wilson(moments, sizes.sum(), level))
    return Estimate(value, max(low, 0.0), min(high, 1.0), count, "wilson")


def corrected_labels(
    verdicts: ArrayLike,
    kinds: Iterable[Hashable],
    truth: ArrayLike,
    sources: Iterable[Hashable],
    *,
    inclusion: ArrayLike,
    worth: ArrayLike,
) -> np.ndarray:
    """``[n]`` numbers in place of the judge's verdicts: any weighted sum of them is, on average
    over draws of the annotated rows, that of annotations of all rows.

    The difference estimator of survey sampling (Horvitz & Thompson 1952; Särndal, Swensson &
    Wretman 1992, chapter 6), which prediction-powered inference rests on (Angelopoulos et al. 2023,
    Science 382:669). A row's number is what is expected of it, and, if it is annotated, how far the
    annotation is from that, by inverse inclusion probability. Expected is the mean annotation of
    rows of its kind, such as the judge's category, that are of other sources: no annotation adds to
    what is expected of itself. If there are none, it is the judge's verdict.

    Single numbers may lie outside [0, 1]. Their sums over sources are nearly independent, so means
    have :func:`corrected_mean`'s interval, which the draw without replacement makes a little wide.

    Args:
        verdicts: ``[n]`` the judge's, 0 or 1; NaN, for which there is no number either.
        kinds: ``[n]`` what the judge says of each row, as labels.
        truth: ``[n]`` the annotation of each row, 0 or 1; NaN where there is none.
        sources: ``[n]`` each row's source.
        inclusion: ``[n]`` the probability with which a row was chosen for annotation, in (0, 1];
            ignored for rows without an annotation.
        worth: ``[n]`` how much each row adds to a sum, about: a row's weight among its kind.
    """
    index, clusters = source_index(sources)
    kind, number = source_index(kinds)
    verdict = _binary(verdicts, len(index), "verdicts")
    actual = _binary(truth, len(index), "truth")
    noted = ~np.isnan(actual + verdict)
    weights = np.where(noted, 1 / as_column(inclusion, len(index), "inclusion"), 0.0)
    actual = np.where(noted, actual, 0.0)

    def of_others(column: np.ndarray) -> np.ndarray:
        """``[n]`` the sum over rows of a row's kind that are of other sources."""
        cells = np.bincount(kind * clusters + index, column, number * clusters)
        table = cells.reshape(number, clusters)
        return (table.sum(1, keepdims=True) - table)[kind, index]

    heavy = weights * as_column(worth, len(index), "worth")
    total, of = of_others(heavy * actual), of_others(heavy)
    known = (of > 1e-9 * heavy.sum()) & ~np.isnan(verdict)  # not the rounding of 0
    expected = np.divide(total, of, out=verdict.copy(), where=known)
    return expected + weights * (actual - np.nan_to_num(expected))


def corrected_mean(
    values: ArrayLike, annotated: ArrayLike, sources: Iterable[Hashable], *, level: float = 0.95
) -> Estimate:
    """The mean of sums of :func:`corrected_labels`, which is a mean of shares, though the sums may
    lie outside [0, 1].

    The interval is that of any mean of shares (``intervals.rate_interval``), but no narrower than
    what sources could add that are unlike the annotated ones. There is none where fewer than two
    sources are annotated.

    Args:
        values: ``[n]``; NaN is left out.
        annotated: ``[n]`` whether annotations went into a value.
        sources: ``[n]`` each value's source.
        level: coverage.
    """
    index, _ = source_index(sources)
    column = as_column(values, len(index), "values")
    kept = ~np.isnan(column)
    seen = len(np.unique(index[kept & np.asarray(annotated, dtype=bool)]))
    _, index = np.unique(index[kept], return_inverse=True)
    table = np.stack([np.bincount(index, column[kept]), np.bincount(index)], axis=1)
    if seen < 2:
        return Estimate(np.nan, np.nan, np.nan, len(table), "fewer than 2 annotated queries")
    mean = float(table[:, 0].sum() / table[:, 1].sum())
    value = float(np.clip(mean, 0, 1))
    ends = unseen(value, seen, level)
    if spread_between(table).variance:
        if 0 < mean < 1:
            ends = hull(ends, clustered_wilson(table, np.inf, level))
        else:
            alone = student(table, level)
            ends = hull(ends, (alone.low, alone.high))
    return Estimate(value, *ends, len(table), "wilson").clip(0, 1)


def _unseen_errors(
    errors: np.ndarray,
    weights: np.ndarray,
    index: np.ndarray,
    value: float,
    ends: tuple[float, float],
    level: float,
) -> tuple[float, float]:
    """Ends of the interval if each stratum may hold kinds of errors that were not seen in it. The
    arguments are those of annotated rows, whose errors lie between ``ends``."""
    parts, shares = [], []
    for weight in np.unique(weights):
        at = weights == weight
        error = float(errors[at].mean())
        parts.append((error, *unseen(error, len(np.unique(index[at])), level, ends)))
        shares.append(weight * at.sum() / weights.sum())
    middle, low, high = combined(parts, shares)
    return value + low - middle, value + high - middle


def _tuned(table: np.ndarray) -> np.ndarray:
    """``[sources]`` λ of :func:`prediction_powered`, each from all sources but that one."""
    _, truth = _powered(table, np.zeros(len(table)))
    _, error = _powered(table, np.ones(len(table)))
    gap = truth - error  # from the annotated rows' mean verdict to that of all rows
    covariance, variance = (truth * gap).sum() - truth * gap, (gap**2).sum() - gap**2
    shares = np.divide(covariance, variance, out=np.zeros(len(table)), where=variance > 1e-18)
    return np.clip(shares, 0, 1)


def _powered(table: np.ndarray, tuned: np.ndarray) -> tuple[float, np.ndarray]:
    """The rate with each source's λ, and each source's influence on it; these sum to 0."""
    rows, verdicts, weights = table[:, ROWS], table[:, POSITIVE], table[:, WEIGHT]
    left = table[:, TRUE] - tuned * table[:, PREDICTED]
    mean, added = left.sum() / weights.sum(), (tuned * verdicts).sum() / rows.sum()
    influence = (left - mean * weights) / weights.sum()
    influence += (tuned * verdicts - added * rows) / rows.sum()
    return float(mean + added), influence


def _binary(values: ArrayLike, rows: int, name: str) -> np.ndarray:
    """``[rows]`` of 0, 1 and NaN, or ValueError."""
    column = as_column(values, rows, name)
    if not (np.isnan(column) | (column == 0) | (column == 1)).all():
        raise ValueError(f"{name} must be 0, 1 or NaN")
    return column
