"""Correct a rate for a judge's errors, by the rows that were also annotated.

A judge's errors move a rate, most of all one near zero: with a specificity of 0.98, a rate of 0
looks like 2%. The correction takes the judge's verdict on every row and the annotations of some,
and its interval carries the uncertainty of both.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.clusters import weighted_share
from ia_mech.stats.intervals import Estimate, clustered_wilson, combined, hull, unseen
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
