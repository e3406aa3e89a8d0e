"""Rates corrected for a judge's errors, from the rows that were annotated, too.

A judge that errs moves a rate, most of all one near zero: with a specificity of 0.98, 2% of
follow-ups come out of nothing. Both corrections take the judge's verdict on every row and the truth
on some, and carry the uncertainty of both.
"""

from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike

from ia_mech.stats.intervals import Estimate, check_level
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
    resamples: int = 2000,
    seed: int = 0,
    clip: bool = True,
) -> Estimate:
    """Rate of judged-genuine rows plus the judge's mean error on the annotated ones.

    Prediction-powered inference (Angelopoulos et al. 2023, Science 382:669): mean of the
    predictions + weighted mean of (truth - prediction), the weights being inverse inclusion
    probabilities. They are normalised to sum to 1 (Hájek 1971), so that the judge's mean error is a
    mean whatever the number of annotations that came in. Unlike Rogan & Gladen's it needs no judge
    better than chance; a poor judge only makes it wide.

    Arguments, interval and result are those of :func:`rogan_gladen`, but for
    ``inclusion``: ``[m]`` the probability with which each row was chosen for annotation, in (0, 1].
    NaN without rows or annotations.

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
    value = _prediction_powered(totals[None])[0]
    replicates = _prediction_powered(resample_sums(_with_unseen(table), resamples, seed))
    return _estimate(value, replicates, count, level, clip)


def _rogan_gladen(sums: np.ndarray) -> np.ndarray:
    """``[k]`` corrected rates of ``[k, 6]`` sums; NaN where the judge is no better than chance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = sums[:, POSITIVE] / sums[:, ROWS]
        sensitivity = sums[:, HIT] / (sums[:, HIT] + sums[:, MISS])
        false_alarms = sums[:, FALSE_ALARM] / (sums[:, FALSE_ALARM] + sums[:, CORRECT_REJECTION])
        better = sensitivity - false_alarms
        return np.where(better > 1e-12, (rate - false_alarms) / better, np.nan)


def _prediction_powered(sums: np.ndarray) -> np.ndarray:
    """``[k]`` corrected rates of ``[k, 6]`` sums; NaN where no annotation was drawn."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = (sums[:, MISS] - sums[:, FALSE_ALARM]) / sums[:, HIT:].sum(1)
        return sums[:, POSITIVE] / sums[:, ROWS] + error


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
