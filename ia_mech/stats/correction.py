"""Rates corrected for a judge's errors, from the rows that were annotated, too.

A judge that errs moves a rate, most of all one near zero: with a specificity of 0.98, 2% of
follow-ups come out of nothing. Both corrections take the judge's verdict on every row and the truth
on some, and carry the uncertainty of both.
"""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.intervals import Estimate, check_level, clustered_wilson, rate_ends
from ia_mech.stats.resampling import (
    NONE_DIFFERS,
    all_alike,
    as_column,
    as_weights,
    resample_sums,
    source_index,
    widened,
)

IMPOSSIBLE = "undefined: no rate fits, so the judge errs otherwise here than where it was annotated"

# Columns of the table of sums per source.
ROWS, POSITIVE, HIT, MISS, FALSE_ALARM, CORRECT_REJECTION = range(6)


def rogan_gladen(
    predicted: ArrayLike,
    sources: Iterable[Hashable],
    *,
    truth: ArrayLike,
    truth_prediction: ArrayLike,
    truth_sources: Iterable[Hashable],
    truth_weights: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    clip: bool = True,
) -> Estimate:
    """Rate of judged-genuine rows corrected by the judge's sensitivity and specificity.

    ``(rate + specificity - 1) / (sensitivity + specificity - 1)`` (Rogan & Gladen 1978, Am. J.
    Epidemiol. 107:71). The judge must err alike on the annotated rows and on all of them: annotate
    rows of the same kind, and weigh them by their inverse inclusion probabilities.

    The interval is a percentile interval of the whole formula: sources are drawn with their rows
    and annotations, so that the uncertainty of the rate, of both error rates and of what they share
    is in it; the level is widened for the number of sources (``resampling.widened``). Where the
    data show no error of a kind (no false alarm among the annotations, say) a bootstrap would take
    the judge for perfect in it: one made-up source with nothing else then joins the draw. The
    97.5th percentile of how often it is drawn is three times, so that this is the "rule of three"
    on sources. A resample in which the judge is no better than chance could be anything: it counts
    as 0 for the lower end and as 1 for the upper. Near zero that makes the interval wide, and
    :func:`prediction_powered` the better estimate.

    Args:
        predicted: ``[n]`` the judge's verdict on every row, 0 or 1; NaN (no verdict) is left out.
        sources: ``[n]`` their sources.
        truth: ``[m]`` the annotation of the annotated rows, 0 or 1; NaN is left out.
        truth_prediction: ``[m]`` the judge's verdict on them.
        truth_sources: ``[m]`` their sources; need not occur in ``sources``.
        truth_weights: ``[m]`` inverse inclusion probabilities; alike if not given.
        level: coverage.
        resamples: bootstrap samples.
        seed: of the resampling.
        clip: keep the estimate within [0, 1]; unclipped it is unbiased, but may be negative.

    Returns:
        The corrected rate; ``sources`` are those of all rows. Without an interval with one source,
        or if no resample differs. NaN, with the reason in ``method``, if sensitivity or specificity
        can't be had or sum to 1 or less: no correction can add the information that the verdicts
        lack. With ``clip`` also NaN (:data:`IMPOSSIBLE`) if the whole interval lies outside [0, 1]:
        a rate well below the judge's own false-alarm rate shows that it doesn't err alike on both.

    Raises:
        ValueError: lengths differ, or a verdict or annotation is neither 0, 1 nor NaN.
    """
    check_level(level)
    table, count = _table(
        predicted, sources, truth, truth_prediction, truth_sources, truth_weights, "truth_weights"
    )
    value, reason = _rogan_gladen(table.sum(0)[None])[0], ""
    totals = table.sum(0)
    if not totals[ROWS]:
        reason = "undefined: no rows"
    elif not (totals[HIT] + totals[MISS] and totals[FALSE_ALARM] + totals[CORRECT_REJECTION]):
        reason = "undefined: annotations of one kind only"
    elif np.isnan(value):
        reason = "undefined: sensitivity + specificity <= 1"
    if reason:
        return Estimate(np.nan, np.nan, np.nan, count, reason)
    replicates = _rogan_gladen(resample_sums(_with_unseen(table), resamples, seed))
    return _estimate(value, replicates, count, level, clip)


def prediction_powered(
    predicted: ArrayLike,
    sources: Iterable[Hashable],
    *,
    truth: ArrayLike,
    truth_prediction: ArrayLike,
    truth_sources: Iterable[Hashable],
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
        predicted, sources, truth, truth_prediction, truth_sources: as for :func:`rogan_gladen`.
        inclusion: ``[m]`` the probability with which each row was chosen for annotation, in (0, 1];
            up to a common factor.
        level: coverage.

    Returns:
        The corrected rate, within [0, 1]; ``sources`` are those of all rows. Without an interval
        with one source. NaN without rows or annotations.

    Raises:
        ValueError: as there, or an inclusion probability lies outside (0, 1].
    """
    check_level(level)
    chances = as_column(inclusion, len(np.asarray(inclusion)), "inclusion")
    if not ((chances > 0) & (chances <= 1)).all():
        raise ValueError("inclusion probabilities must lie in (0, 1]")
    table, count = _table(
        predicted, sources, truth, truth_prediction, truth_sources, 1 / chances, "inclusion"
    )
    totals = table.sum(0)
    if not totals[ROWS] or not totals[HIT:].sum():
        reason = "undefined: no annotations" if totals[ROWS] else "undefined: no rows"
        return Estimate(np.nan, np.nan, np.nan, count, reason)
    known = table[table[:, HIT:].any(1)]
    by_truth = np.stack([known[:, HIT] + known[:, MISS], known[:, HIT:].sum(1)], axis=1)
    events, weight = by_truth.sum(0)
    if events in (0, weight):
        low, high, name = rate_ends(by_truth, weight, False, level)
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
    rows, verdicts, weights = table[:, ROWS], table[:, POSITIVE], table[:, HIT:].sum(1)
    left = table[:, HIT] + table[:, MISS] - tuned * (table[:, HIT] + table[:, FALSE_ALARM])
    mean, added = left.sum() / weights.sum(), (tuned * verdicts).sum() / rows.sum()
    influence = (left - mean * weights) / weights.sum()
    influence += (tuned * verdicts - added * rows) / rows.sum()
    return float(mean + added), influence


def _rogan_gladen(sums: np.ndarray) -> np.ndarray:
    """``[k]`` corrected rates of ``[k, 6]`` sums; NaN where the judge is no better than chance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = sums[:, POSITIVE] / sums[:, ROWS]
        sensitivity = sums[:, HIT] / (sums[:, HIT] + sums[:, MISS])
        false_alarms = sums[:, FALSE_ALARM] / (sums[:, FALSE_ALARM] + sums[:, CORRECT_REJECTION])
        better = sensitivity - false_alarms
        return np.where(better > 1e-12, (rate - false_alarms) / better, np.nan)


def _estimate(
    value: float, replicates: np.ndarray, count: int, level: float, clip: bool
) -> Estimate:
    """Percentile ends; replicates that are NaN count against both of them."""
    kept = float(np.clip(value, 0, 1) if clip else value)
    if count < 2:
        return Estimate(kept, np.nan, np.nan, count, "one source")
    tail = (1 - widened(level, count)) / 2
    low = np.quantile(np.where(np.isnan(replicates), 0.0, replicates), tail)
    high = np.quantile(np.where(np.isnan(replicates), 1.0, replicates), 1 - tail)
    if clip and (high <= 0 or low >= 1):  # clipping would make a certainty of a contradiction
        return Estimate(np.nan, np.nan, np.nan, count, IMPOSSIBLE)
    if all_alike(replicates):
        return Estimate(kept, np.nan, np.nan, count, NONE_DIFFERS)
    low, high = np.clip([low, high], 0, 1) if clip else (low, high)
    return Estimate(kept, float(low), float(high), count, "percentile")


def _table(
    predicted: ArrayLike,
    sources: Iterable[Hashable],
    truth: ArrayLike,
    truth_prediction: ArrayLike,
    truth_sources: Iterable[Hashable],
    truth_weights: ArrayLike | None,
    weights_name: str,
) -> tuple[np.ndarray, int]:
    """``[all sources, 6]`` sums per source, and how many sources have rows."""
    labels, truth_labels = list(sources), list(truth_sources)
    index, count = source_index(labels + truth_labels)
    verdicts = _binary(predicted, len(labels), "predicted")
    actual = _binary(truth, len(truth_labels), "truth")
    judged = _binary(truth_prediction, len(truth_labels), "truth_prediction")
    weights = as_weights(truth_weights, len(truth_labels), weights_name)
    at, truth_at = index[: len(labels)], index[len(labels) :]
    table = np.zeros((count, 6))
    kept = ~np.isnan(verdicts)
    table[:, ROWS] = np.bincount(at[kept], minlength=count)
    table[:, POSITIVE] = np.bincount(at[kept], verdicts[kept], minlength=count)
    cells = ((HIT, 1, 1), (MISS, 1, 0), (FALSE_ALARM, 0, 1), (CORRECT_REJECTION, 0, 0))
    for column, is_so, said in cells:
        chosen = (actual == is_so) & (judged == said)
        table[:, column] = np.bincount(truth_at[chosen], weights[chosen], minlength=count)
    with_rows = int((table[:, ROWS] > 0).sum())
    return table[table.any(1)], with_rows


def _binary(values: ArrayLike, rows: int, name: str) -> np.ndarray:
    """``[rows]`` of 0, 1 and NaN, or ValueError."""
    column = as_column(values, rows, name)
    if not (np.isnan(column) | (column == 0) | (column == 1)).all():
        raise ValueError(f"{name} must be 0, 1 or NaN")
    return column


def _with_unseen(table: np.ndarray) -> np.ndarray:
    """The table with a made-up source for every kind of event that never occurred.

    It is as large as sources are on average: a made-up miss weighs what annotated rows judged 0
    weigh per source that has any, a made-up false alarm what rows judged 1 weigh.
    """
    totals, unit, made_up = table.sum(0), np.eye(6), []

    def size(*columns: int) -> float:
        sums = table[:, columns].sum(1)
        return float(sums.sum() / max((sums > 0).sum(), 1))

    any_annotation = size(HIT, MISS, FALSE_ALARM, CORRECT_REJECTION)
    if totals[MISS] == 0:
        made_up.append(unit[MISS] * (size(MISS, CORRECT_REJECTION) or any_annotation))
    if totals[FALSE_ALARM] == 0:
        made_up.append(unit[FALSE_ALARM] * (size(HIT, FALSE_ALARM) or any_annotation))
    if totals[POSITIVE] == 0:
        made_up.append(size(ROWS) * (unit[ROWS] + unit[POSITIVE]))
    if totals[POSITIVE] == totals[ROWS]:
        made_up.append(size(ROWS) * unit[ROWS])
    return np.concatenate([table, *(row[None] for row in made_up)])
