"""Every figure of the rates report, one row per estimate. The terminal and the files show these.

The follow-up rate corrected for the judge's errors, by the turns that people annotated too.

What was drawn with no chance at all can't be weighed up: where a run has no labels, or a stratum of
its sheet has none, nothing is known of the judge's errors there, and no rate is made up for it.

The rows of one table's model and perturbation, found by what they are.

One row of the rates report, and the turns it is of.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import gammaln

from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE
from ia_mech.rates.load import EVERY, FAILED, SUBJECT, Judged
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


@dataclass(frozen=True)
class Row:
    """One estimate.

    Attributes:
        model, weights_hash, dataset, perturbation, judge: what it is of; ``dataset`` may be
            ``(all)``.
        responses: after which responses the turns come: ``all``, ``complete`` or ``cut-off`` ones.
        temperature: 0 is greedy; None over all temperatures (of ``reach``: all but greedy).
        quantity: ``follow_up_rate``; ``follow_up_rate_complete``, after responses that weren't cut
            off; ``follow_up_rate_bounds``, if none or all of the turns that weren't assessed were
            genuine; ``cannot_assess``, ``failed`` and ``cut_off``, shares of all turns;
            ``category_share``; ``reach``; ``difference_from_greedy``; ``detectable_difference``;
            ``judge_sensitivity``, ``judge_specificity``; ``rate_annotated``, ``rate_rogan_gladen``,
            ``rate_prediction_powered``.
        category: of ``category_share``.
        n_samples: of ``reach``.
        value, low, high: the estimate and its interval; NaN where there is none.
        p, p_holm: of ``difference_from_greedy``; corrected over all comparisons of the report,
            those of ``(all)`` in a family of their own.
        test: which gave p, as :class:`ia_mech.stats.Paired` names it; None without p.
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
    responses: str
    temperature: float | None
    quantity: str
    category: str | None
    n_samples: int | None
    value: float
    low: float
    high: float
    p: float
    p_holm: float
    test: str | None
    events: int | None
    rows: int
    sources: int
    contexts: int
    level: float
    method: str

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high, self.sources, self.method)


@dataclass(frozen=True)
class Group:
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
            "test": None,
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


# A prediction-powered rate rests on the judge's mean error in its own group; below so many
# annotated turns, or from fewer sources, its interval says more about the bootstrap than the rate.
MIN_ANNOTATED, MIN_ANNOTATED_SOURCES = 30, 10


def _weights(truth: pd.DataFrame) -> np.ndarray:
    """Inverse inclusion probabilities; alike where one isn't known."""
    if truth["inclusion"].isna().any():
        return np.ones(len(truth))
    return 1 / truth["inclusion"].to_numpy()


def judge_errors(group: Group, shares: dict) -> Iterator[Row]:
    """Sensitivity and specificity, over all annotated turns of a model.

    NaN with the reason if a run with labels has a stratum without any: verdicts of one kind would
    be missing among the annotated ones, and both shares be off.
    """
    truth, weights = group.turns, _weights(group.turns)
    if not len(truth):
        return
    reason = _unlabelled_strata(truth)
    for quantity, is_so in (("judge_sensitivity", 1.0), ("judge_specificity", 0.0)):
        of = (truth["truth"] == is_so).to_numpy()
        turns, right = truth[of], truth["genuine"][of] == is_so
        estimate = _undefined(reason, turns) or cluster_mean(
            right.astype(float), turns["source"], weights=weights[of], **shares
        )
        yield group.row(quantity, estimate, turns, events=int(right.sum()))


def corrected(
    group: Group, truth: pd.DataFrame, options: dict, shares: dict, annotator: str | None
) -> Iterator[Row]:
    """The follow-up rate corrected for the judge's errors, and by the annotator's labels alone.

    ``rate_annotated`` is the mean of the group's labels, weighted by inverse inclusion
    probabilities that are normalised (Hájek 1971): it needs no judge, and no more than that sample.

    Of corrected rates, ``rows`` are the turns judged and ``events`` those of them that are
    annotated and count for the correction: of the whole model for Rogan & Gladen, of the group for
    the prediction-powered rate.
    Rogan & Gladen's assumption (equal errors everywhere) covers runs without labels, but no stratum
    without any; the prediction-powered rate needs labels of every run that has turns in the group.
    """
    if not len(truth):
        return
    assessed = group.turns[group.turns["genuine"].notna()]
    judged = (assessed["genuine"], assessed["source"])
    reason = _unlabelled_strata(truth)
    estimate = _undefined(reason, assessed) or rogan_gladen(
        *judged,
        truth=truth["truth"],
        truth_prediction=truth["genuine"],
        truth_sources=truth["source"],
        truth_weights=_weights(truth),
        **options,
    )
    yield group.row("rate_rogan_gladen", _by(estimate, annotator), assessed, events=len(truth))
    own = assessed[assessed["truth"].notna()]
    reason = _unlabelled_runs(assessed) or _unlabelled_strata(assessed)
    people = _undefined(reason, own) or cluster_mean(
        own["truth"], own["source"], weights=_weights(own), **shares
    )
    yield group.row("rate_annotated", _by(people, annotator), own, events=len(own))
    if reason:
        estimate = _undefined(reason, assessed)
        yield group.row(
            "rate_prediction_powered", _by(estimate, annotator), assessed, events=len(own)
        )
    elif len(own) >= MIN_ANNOTATED and own["source"].nunique() >= MIN_ANNOTATED_SOURCES:
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


def _unlabelled_runs(turns: pd.DataFrame) -> str:
    """Why nothing is known of the judge's errors in some of these turns; empty if it is."""
    runs = turns.loc[~turns["annotated"], "run"].unique()
    return f"undefined: no labels of turns of {_listed(runs)}" if len(runs) else ""


def _unlabelled_strata(turns: pd.DataFrame) -> str:
    """Likewise, of strata of which nothing is labelled."""
    found = turns[turns["unlabelled"] != ""].drop_duplicates("run")
    strata = [f"{names} in {run}" for run, names in found[["run", "unlabelled"]].to_numpy()]
    return f"undefined: no labels of the stratum {_listed(strata)}" if strata else ""


def _listed(names) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _undefined(reason: str, turns: pd.DataFrame) -> Estimate | None:
    """No estimate, for that reason; None without one."""
    if not reason:
        return None
    return Estimate(np.nan, np.nan, np.nan, turns["source"].nunique(), reason)


def _inclusion(truth: pd.DataFrame) -> np.ndarray:
    """Inclusion probabilities up to a factor, which doesn't matter to normalised weights."""
    weights = _weights(truth)
    return weights.min() / weights


def _by(estimate: Estimate, annotator: str | None) -> Estimate:
    return replace(estimate, method=f"{estimate.method}; truth: {annotator}")


class Figures:
    """Look-ups among the rows of one model and perturbation.

    Attributes:
        lines: (dataset, temperature) of every line of a table, in order.
        curves: likewise, of the reach curves; temperature None is all of them.
        curve: the n that any curve has; [0] without curves.
        categories: those with a turn in any line, in the rubric's order.
        annotated: whether there are labels to correct rates by.
    """

    def __init__(self, rows: list[Row]) -> None:
        self._rows = {
            (r.dataset, r.temperature, r.quantity, r.category, r.n_samples): r for r in rows
        }
        self.lines = self._places("follow_up_rate")
        self.curves = self._places("reach")
        self.curve = sorted({r.n_samples for r in rows if r.quantity == "reach"}) or [0]
        there = {r.category for r in rows if r.quantity == "category_share" and r.events}
        self.categories = [name for name in ASSESSED if name in there]
        self.annotated = self.has("rate_rogan_gladen")

    def _places(self, quantity: str) -> list[tuple[str, float | None]]:
        found = (r for r in self._rows.values() if r.quantity == quantity)
        return list(dict.fromkeys((r.dataset, r.temperature) for r in found))

    def get(
        self,
        dataset: str,
        temperature: float | None,
        quantity: str,
        category: str | None = None,
        n: int | None = None,
    ) -> Row | None:
        return self._rows.get((dataset, temperature, quantity, category, n))

    def overall(self, quantity: str) -> Row:
        """A figure of all datasets and temperatures together."""
        return self._rows[ALL, None, quantity, None, None]

    def has(self, quantity: str, *, above: float | None = None) -> bool:
        return any(
            row.quantity == quantity and (above is None or row.value > above)
            for row in self._rows.values()
        )

    def farthest(self, dataset: str, temperature: float) -> Row | None:
        """Reach at the largest n there is."""
        found = [self.get(dataset, temperature, "reach", n=n) for n in reversed(self.curve)]
        return next((row for row in found if row is not None), None)

    def undefined(self, quantity: str) -> str | None:
        """Why none of a quantity's rows has a value; None if one has."""
        found = [row for row in self._rows.values() if row.quantity == quantity]
        if not found or not all(np.isnan(row.value) for row in found):
            return None
        return found[0].method.split(";")[0]


POWER = 0.8


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
        names = dict(zip(SUBJECT, subject, strict=True))
        names |= {"judge": judged.judge, "responses": judged.responses, "level": level}
        truth = turns[turns["truth"].notna() & turns["genuine"].notna()]
        rows += judge_errors(Group(names, ALL, None, truth), shares)
        for dataset, of_dataset in _datasets(turns):
            greedy = of_dataset[of_dataset["temperature"] == 0]
            for temperature, at in of_dataset.groupby("temperature"):
                group = Group(names, dataset, float(temperature), at)
                rows += _rates(group, shares)
                if temperature:
                    rows += _reach(group, shares)
                    rows += _difference(group, greedy, options | {"method": method})
                rows += corrected(group, truth, options, shares, judged.annotator)
            sampled = of_dataset[of_dataset["temperature"] > 0]
            if sampled["temperature"].nunique() > 1:
                rows += _reach(Group(names, dataset, None, sampled), shares)
    # Lines of all datasets say nothing that those of each didn't: they are a family of their own.
    adjusted = np.stack(
        [
            holm([row.p if (row.dataset == ALL) is pooled else np.nan for row in rows])
            for pooled in (False, True)
        ]
    )
    return [
        row if np.isnan(row.p) else replace(row, p_holm=float(p[int(row.dataset == ALL)]))
        for row, p in zip(rows, adjusted.T, strict=True)
    ]


def comparisons(rows: list[Row]) -> tuple[int, int]:
    """How many tests Holm's method corrected for: of single datasets, and of ``(all)``."""
    made = [row.dataset == ALL for row in rows if not np.isnan(row.p)]
    return made.count(False), made.count(True)


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


def _datasets(turns: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield from turns.groupby("dataset")
    if turns["dataset"].nunique() > 1:
        yield ALL, turns


def _share(
    group: Group, quantity: str, turns: pd.DataFrame, events: pd.Series, shares: dict, **more
) -> Row:
    """The share of events among turns, with its interval over sources."""
    estimate = cluster_mean(events.astype(float), turns["source"], **shares)
    return group.row(quantity, estimate, turns, events=int(events.sum()), **more)


def _rates(group: Group, shares: dict) -> Iterator[Row]:
    """Follow-up rate and failure profile, and what is counted apart from them."""
    turns = group.turns
    assessed = turns[turns["genuine"].notna()]
    genuine = assessed["category"] == GENUINE
    yield _share(group, "follow_up_rate", assessed, genuine, shares)
    if group.names["responses"] == EVERY and turns["cut_off"].any():
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


def _reach(group: Group, shares: dict) -> Iterator[Row]:
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


def _difference(group: Group, greedy: pd.DataFrame, options: dict) -> Iterator[Row]:
    """The rate minus the greedy rate of the same sources, and what could have been detected."""
    columns = [group.turns["genuine"], group.turns["source"], greedy["genuine"], greedy["source"]]
    paired = paired_difference(*columns, **options)
    both = pd.concat([group.turns, greedy])
    both = both[both["genuine"].notna()]
    yield group.row(
        "difference_from_greedy", paired.difference, both, p=paired.p, test=paired.test or None
    )
    size = detectable_difference(*columns, power=POWER, level=options["level"])
    method = f"{POWER:.0%} power in a single comparison"
    found = Estimate(size, np.nan, np.nan, paired.sources, method)
    yield group.row("detectable_difference", found, both)
