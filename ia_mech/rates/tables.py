"""Every figure of the rates report, one row per estimate. The terminal and the files show these."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import gammaln

from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE
from ia_mech.rates.pool import FAILED, SUBJECT, Judged
from ia_mech.stats import (
    Estimate,
    cluster_mean,
    detectable_difference,
    holm,
    paired_difference,
    prediction_powered,
    rogan_gladen,
)

ALL = "(all)"  # the datasets of a model together
# A prediction-powered rate rests on the judge's mean error in its own group; below so many
# annotated turns, or from fewer sources, its interval says more about the bootstrap than the rate.
MIN_ANNOTATED, MIN_ANNOTATED_SOURCES = 30, 10
POWER = 0.8


@dataclass(frozen=True)
class Row:
    """One estimate.

    Attributes:
        model, weights_hash, dataset, perturbation, judge: what it is of; ``dataset`` may be
            ``(all)``.
        temperature: 0 is greedy; None over all temperatures (of ``reach``: all but greedy).
        quantity: ``follow_up_rate``; ``follow_up_rate_complete``, after responses that weren't cut
            off; ``follow_up_rate_bounds``, if none or all of the turns that weren't assessed were
            genuine; ``cannot_assess``, ``failed`` and ``cut_off``, shares of all turns;
            ``category_share``; ``reach``; ``difference_from_greedy``; ``detectable_difference``;
            ``judge_sensitivity``, ``judge_specificity``; ``rate_rogan_gladen``,
            ``rate_prediction_powered``.
        category: of ``category_share``.
        n_samples: of ``reach``.
        value, low, high: the estimate and its interval; NaN where there is none.
        p, p_holm: of ``difference_from_greedy``; corrected over all comparisons of the report.
        events, rows: how many turns count, of how many; of a corrected rate, ``events`` of the
            turns were annotated for the correction.
        sources, contexts: behind the estimate.
        level: of the interval.
        method: of the interval, or why there is none.
    """

    model: str
    weights_hash: str
    dataset: str
    perturbation: str
    judge: str
    temperature: float | None
    quantity: str
    category: str | None
    n_samples: int | None
    value: float
    low: float
    high: float
    p: float
    p_holm: float
    events: int | None
    rows: int
    sources: int
    contexts: int
    level: float
    method: str

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high, self.sources, self.method)


def estimates(
    judged: Judged,
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    method: str = "auto",
) -> list[Row]:
    """All figures of a report, per model and perturbation, dataset and temperature.

    Args:
        judged: turns with their labels.
        level: coverage of intervals.
        resamples: bootstrap samples.
        seed: of resampling and sign flips.
        method: of the intervals of shares and differences: ``auto``, ``percentile`` or ``bca``, as
            in :func:`ia_mech.stats.cluster_mean`.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    shares = options | {"method": method, "proportion": True}
    rows: list[Row] = []
    for subject, turns in judged.turns.groupby(SUBJECT):
        names = dict(zip(SUBJECT, subject, strict=True)) | {"judge": judged.judge, "level": level}
        truth = turns[turns["truth"].notna() & turns["genuine"].notna()]
        rows += _judge_errors(_Group(names, ALL, None, truth), shares)
        for dataset, of_dataset in _datasets(turns):
            greedy = of_dataset[of_dataset["temperature"] == 0]
            for temperature, at in of_dataset.groupby("temperature"):
                group = _Group(names, dataset, float(temperature), at)
                rows += _rates(group, shares)
                if temperature:
                    rows += _reach(group, shares)
                    rows += _difference(group, greedy, options | {"method": method})
                rows += _corrected(group, truth, options, judged.annotator)
            sampled = of_dataset[of_dataset["temperature"] > 0]
            if sampled["temperature"].nunique() > 1:
                rows += _reach(_Group(names, dataset, None, sampled), shares)
    adjusted = holm([row.p for row in rows])
    return [
        row if np.isnan(p) else replace(row, p_holm=float(p))
        for row, p in zip(rows, adjusted, strict=True)
    ]


def comparisons(rows: list[Row]) -> int:
    """How many tests Holm's method corrected for."""
    return sum(not np.isnan(row.p) for row in rows)


def any_of_n(genuine: np.ndarray, samples: np.ndarray, n: int) -> np.ndarray:
    """Chance that n samples, drawn from those there are, hold a genuine turn.

    ``1 - C(N - g, n) / C(N, n)``: the unbiased estimate of 1 - (1 - p)^n from g genuine turns among
    N independent samples (Chen et al. 2021, arXiv 2107.03374, "pass@k").

    Args:
        genuine: ``[contexts]`` g.
        samples: ``[contexts]`` N.
        n: how many are drawn.

    Returns:
        ``[contexts]`` probabilities; NaN for a context with fewer than n samples.
    """
    genuine, samples = np.asarray(genuine, dtype=float), np.asarray(samples, dtype=float)
    rest = samples - genuine
    with np.errstate(invalid="ignore"):
        log_none = (
            gammaln(rest + 1)
            - gammaln(rest - n + 1)
            - gammaln(samples + 1)
            + gammaln(samples - n + 1)
        )
    # n samples can't avoid a genuine one if fewer than n others are there.
    chance = np.where(rest < n, 1.0, -np.expm1(log_none))
    chance = np.where(genuine == 0, 0.0, np.clip(chance, 0, 1))
    return np.where(samples < n, np.nan, chance)


# -- one group of turns ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """The turns of one table row, and what names them."""

    names: dict[str, Any]
    dataset: str
    temperature: float | None
    turns: pd.DataFrame

    def row(
        self, quantity: str, estimate: Estimate, turns: pd.DataFrame | None = None, **more
    ) -> Row:
        """A row of the report; ``turns`` are those counted, all of the group if not given."""
        turns = self.turns if turns is None else turns
        counted = {
            "category": None,
            "n_samples": None,
            "p": np.nan,
            "p_holm": np.nan,
            "events": None,
            "rows": len(turns),
            "contexts": turns["context"].nunique(),
        }
        return Row(
            **self.names,
            dataset=self.dataset,
            temperature=self.temperature,
            quantity=quantity,
            value=float(estimate.value),
            low=float(estimate.low),
            high=float(estimate.high),
            sources=estimate.sources,
            method=estimate.method,
            **counted | more,
        )


def _datasets(turns: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield from turns.groupby("dataset")
    if turns["dataset"].nunique() > 1:
        yield ALL, turns


def _share(
    group: _Group, quantity: str, turns: pd.DataFrame, events: pd.Series, shares: dict, **more
) -> Row:
    """The share of events among turns, with its interval over sources."""
    estimate = cluster_mean(events.astype(float), turns["source"], **shares)
    return group.row(quantity, estimate, turns, events=int(events.sum()), **more)


def _rates(group: _Group, shares: dict) -> Iterator[Row]:
    """Follow-up rate and failure profile, and what is counted apart from them."""
    turns = group.turns
    assessed = turns[turns["genuine"].notna()]
    genuine = assessed["category"] == GENUINE
    yield _share(group, "follow_up_rate", assessed, genuine, shares)
    if turns["cut_off"].any():
        complete = assessed[~assessed["cut_off"]]
        yield _share(
            group, "follow_up_rate_complete", complete, complete["category"] == GENUINE, shares
        )
        yield _share(group, "cut_off", turns, turns["cut_off"], shares)
    for status in (CANNOT_ASSESS, FAILED):
        yield _share(group, status, turns, turns["category"] == status, shares)
    missing = len(turns) - len(assessed)
    if missing:
        low, high = genuine.sum() / len(turns), (genuine.sum() + missing) / len(turns)
        method = f"not an interval: none or all of {missing} unassessed turns genuine"
        worst = Estimate(np.nan, low, high, turns["source"].nunique(), method)
        yield group.row("follow_up_rate_bounds", worst, events=missing)
    for category in ASSESSED:
        so = assessed["category"] == category
        yield _share(group, "category_share", assessed, so, shares, category=category)


def _reach(group: _Group, shares: dict) -> Iterator[Row]:
    """Latent reach for n = 1 … the most samples that a context has."""
    assessed = group.turns[group.turns["genuine"].notna()]
    contexts = assessed.groupby("context").agg(
        source=("source", "first"), genuine=("genuine", "sum"), samples=("genuine", "size")
    )
    for n in range(1, int(contexts["samples"].max() if len(contexts) else 0) + 1):
        chance = any_of_n(contexts["genuine"].to_numpy(), contexts["samples"].to_numpy(), n)
        there = contexts["samples"] >= n
        yield group.row(
            "reach",
            cluster_mean(chance, contexts["source"], **shares),
            n_samples=n,
            rows=int(contexts.loc[there, "samples"].sum()),
            contexts=int(there.sum()),
        )


def _difference(group: _Group, greedy: pd.DataFrame, options: dict) -> Iterator[Row]:
    """The rate minus the greedy rate of the same sources, and what could have been detected."""
    columns = [group.turns["genuine"], group.turns["source"], greedy["genuine"], greedy["source"]]
    paired = paired_difference(*columns, **options)
    both = pd.concat([group.turns, greedy])
    both = both[both["genuine"].notna()]
    yield group.row("difference_from_greedy", paired.difference, both, p=paired.p)
    size = detectable_difference(*columns, power=POWER, level=options["level"])
    method = f"{POWER:.0%} power in a single comparison"
    found = Estimate(size, np.nan, np.nan, paired.sources, method)
    yield group.row("detectable_difference", found, both)


# -- the judge's errors ---------------------------------------------------------------------------


def _weights(truth: pd.DataFrame) -> np.ndarray:
    """Inverse inclusion probabilities; alike where one isn't known."""
    if truth["inclusion"].isna().any():
        return np.ones(len(truth))
    return 1 / truth["inclusion"].to_numpy()


def _judge_errors(group: _Group, shares: dict) -> Iterator[Row]:
    """Sensitivity and specificity, over all annotated turns of a model."""
    truth, weights = group.turns, _weights(group.turns)
    if not len(truth):
        return
    for quantity, is_so in (("judge_sensitivity", 1.0), ("judge_specificity", 0.0)):
        of = (truth["truth"] == is_so).to_numpy()
        turns, right = truth[of], truth["genuine"][of] == is_so
        estimate = cluster_mean(right.astype(float), turns["source"], weights=weights[of], **shares)
        yield group.row(quantity, estimate, turns, events=int(right.sum()))


def _corrected(
    group: _Group, truth: pd.DataFrame, options: dict, annotator: str | None
) -> Iterator[Row]:
    """The follow-up rate corrected for the judge's errors.

    ``rows`` are the turns judged and ``events`` those of them that are annotated and count for the
    correction: of the whole model for Rogan & Gladen, of the group for the prediction-powered rate.
    """
    if not len(truth):
        return
    assessed = group.turns[group.turns["genuine"].notna()]
    judged = (assessed["genuine"], assessed["source"])
    estimate = rogan_gladen(
        *judged,
        truth=truth["truth"],
        truth_prediction=truth["genuine"],
        truth_sources=truth["source"],
        truth_weights=_weights(truth),
        **options,
    )
    yield group.row("rate_rogan_gladen", _by(estimate, annotator), assessed, events=len(truth))
    own = assessed[assessed["truth"].notna()]
    if len(own) >= MIN_ANNOTATED and own["source"].nunique() >= MIN_ANNOTATED_SOURCES:
        estimate = prediction_powered(
            *judged,
            truth=own["truth"],
            truth_prediction=own["genuine"],
            truth_sources=own["source"],
            inclusion=_inclusion(own),
            **options,
        )
        yield group.row(
            "rate_prediction_powered", _by(estimate, annotator), assessed, events=len(own)
        )


def _inclusion(truth: pd.DataFrame) -> np.ndarray:
    """Inclusion probabilities up to a factor, which doesn't matter to normalised weights."""
    weights = _weights(truth)
    return weights.min() / weights


def _by(estimate: Estimate, annotator: str | None) -> Estimate:
    return replace(estimate, method=f"{estimate.method}; truth: {annotator}")
