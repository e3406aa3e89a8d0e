"""Every figure of the rates report as a tidy estimate."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import gammaln

from ia_mech.estimates import ALL, Group, TidyEstimate, by_dataset, corrected, frame_of
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, GENUINE
from ia_mech.rates.load import EVERY, FAILED, SUBJECT, Judged
from ia_mech.stats import (
    Estimate,
    cluster_mean,
    detectable_difference,
    dyadic_mean,
    paired_difference,
    prediction_powered,
    rogan_gladen,
)

POWER = 0.8
# A prediction-powered rate rests on the judge's mean error in its own group; below so many
# annotated turns, or from fewer sources, its interval says more about the bootstrap than the rate.
MIN_ANNOTATED, MIN_ANNOTATED_SOURCES = 30, 10

COLUMNS = {  # of the table and of its files, in order: dtypes
    **dict.fromkeys(("model", "weights_hash", "dataset", "perturbation"), "object"),
    **dict.fromkeys(("judge", "gate", "outcome", "responses"), "object"),
    "temperature": "float64",
    **dict.fromkeys(("quantity", "category", "decoy"), "object"),
    "n_samples": "Int64",
    **dict.fromkeys(("value", "low", "high", "p", "p_holm"), "float64"),
    "test": "object",
    "events": "Int64",
    **dict.fromkeys(("rows", "sources", "contexts"), "int64"),
    "level": "float64",
    "method": "object",
}


def estimates(
    judged: Judged, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """All figures of a report, per model and perturbation, dataset and temperature.

    Args:
        judged: turns with their labels.
        level: coverage of intervals.
        resamples: bootstrap samples.
        seed: of resampling and sign flips.

    Returns:
        One row per estimate, with :data:`COLUMNS`:

        - ``model``, ``weights_hash``, ``dataset``, ``perturbation``, ``judge``: what it is of;
          ``dataset`` may be ``(all)``.
        - ``outcome``: what is counted of the turns, ``genuine`` or ``grounded``
          (``judge.verdict.OUTCOMES``); ``gate``: what the decoys say of the judge's verdicts on it,
          over the whole report (:class:`ia_mech.rates.gate.Gate`).
        - ``responses``: after which responses the turns come: ``all``, ``complete`` or ``cut-off``
          ones.
        - ``temperature``: 0 is greedy; missing over all temperatures (of ``reach``: all but
          greedy).
        - ``quantity``: ``follow_up_rate``; ``follow_up_rate_complete``, after responses that
          weren't cut off; ``follow_up_rate_bounds``, if none or all of the turns that weren't
          assessed were genuine; ``cannot_assess``, ``failed`` and ``cut_off``, shares of all turns;
          ``category_share``; ``reach``; ``difference_from_greedy``; ``detectable_difference``;
          ``judge_sensitivity``, ``judge_specificity``; ``rate_annotated``, ``rate_rogan_gladen``,
          ``rate_prediction_powered``. Of ``grounded`` there is ``follow_up_rate`` alone. Of decoys,
          for each outcome: ``decoyed_rate``, of their turns after their own contexts; ``floor``, of
          the same turns after contexts that they didn't follow; ``excess``, the former less the
          latter.
        - ``category``: of ``category_share``. ``n_samples``: of ``reach``. ``decoy``: of the last
          three, which kind (``judge.decoys``): ``conversation`` or ``response``.
        - ``value``, ``low``, ``high``: the estimate and its interval; missing where there is none.
        - ``p``, ``p_holm``: of ``difference_from_greedy``; corrected over all comparisons of the
          report, those of ``(all)`` in a family of their own.
        - ``test``: which gave p, as :class:`ia_mech.stats.Paired` names it.
        - ``events``, ``rows``: how many turns count, of how many; of a corrected rate, ``events``
          of the turns were annotated for the correction. Of the three of decoys, ``rows`` are the
          decoys with both verdicts; ``excess`` is a difference and has no ``events``.
        - ``sources``, ``contexts``: behind the estimate; of ``floor`` and ``excess``, the sources
          of the contexts and those of the turns.
        - ``level``: of the interval. ``method``: of the interval, or why there is none.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    rows: list[TidyEstimate] = []
    for subject, turns in judged.turns.groupby(SUBJECT):
        names = dict(zip(SUBJECT, subject, strict=True))
        names |= {"judge": judged.judge, "responses": judged.responses, "level": level}
        names |= {"outcome": "genuine", "gate": judged.gate.word}
        decoys = judged.decoys[(judged.decoys[SUBJECT] == list(subject)).all(axis=1)]
        truth = turns[turns["truth"].notna() & turns["genuine"].notna() & ~turns["fitted"]]
        rows += _judge_errors(truth, names | {"dataset": ALL}, level)
        for dataset, here in by_dataset(turns):
            own, of = turns[here], names | {"dataset": dataset}
            for outcome in judged.outcomes:
                about = of | {"outcome": outcome, "gate": judged.gates[outcome].word}
                if outcome != "genuine":
                    rows += _outcome_rates(own, outcome, about, options)
                among = decoys if dataset == ALL else decoys[decoys["dataset"] == dataset]
                rows += _above_floor(among, about, level)
            greedy = own[own["temperature"] == 0]
            for temperature, at in own.groupby("temperature"):
                of_both = of | {"temperature": float(temperature)}
                rows += _rates(at, of_both, options)
                if temperature:
                    rows += _reach(at, of_both, level)
                    rows += _difference(at, greedy, of_both, options)
                rows += _corrected_rates(at, truth, of_both, options, judged.annotator)
            sampled = own[own["temperature"] > 0]
            if sampled["temperature"].nunique() > 1:
                rows += _reach(sampled, of, level)
    # Rows of all datasets say nothing that those of each didn't: they are a family of their own.
    rows = corrected(rows, lambda row: row.names["dataset"] == ALL)
    return frame_of(rows, COLUMNS, list(COLUMNS))


def comparisons(estimates: pd.DataFrame) -> tuple[int, int]:
    """How many tests Holm's method corrected for: of single datasets, and of ``(all)``."""
    tested = estimates[estimates["p"].notna()]
    pooled = int((tested["dataset"] == ALL).sum())
    return len(tested) - pooled, pooled


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


def _row(
    quantity: str,
    estimate: Estimate,
    turns: pd.DataFrame,
    names: dict[str, Any],
    *,
    p: float = np.nan,
    test: str | None = None,
    **more,
) -> TidyEstimate:
    """An estimate of these turns; ``more`` are other columns."""
    names = names | {"contexts": turns["context"].nunique()} | more
    return TidyEstimate(quantity, names, len(turns), estimate, p, test)


def _rates(turns: pd.DataFrame, names: dict[str, Any], options: dict) -> Iterator[TidyEstimate]:
    """Follow-up rate and failure profile, and what is counted apart from them."""

    def share(quantity: str, of: pd.DataFrame, events: pd.Series, **more) -> TidyEstimate:
        group = Group(of["source"].to_numpy(), options, names)
        counts = {"events": int(events.sum()), "contexts": of["context"].nunique()}
        return group.mean(quantity, events, proportion=True, **counts, **more)

    assessed = turns[turns["genuine"].notna()]
    genuine = assessed["category"] == GENUINE
    yield share("follow_up_rate", assessed, genuine)
    if names["responses"] == EVERY and turns["cut_off"].any():
        complete = assessed[~assessed["cut_off"]]
        yield share("follow_up_rate_complete", complete, complete["category"] == GENUINE)
        yield share("cut_off", turns, turns["cut_off"])
    for status in (CANNOT_ASSESS, FAILED):
        yield share(status, turns, turns["category"] == status)
    missing = len(turns) - len(assessed)
    if missing:
        low, high = genuine.sum() / len(turns), (genuine.sum() + missing) / len(turns)
        method = f"not an interval: none or all of {missing} unassessed turns genuine"
        worst = Estimate(np.nan, low, high, turns["source"].nunique(), method)
        yield _row("follow_up_rate_bounds", worst, turns, names, events=missing)
    for category in ASSESSED:
        yield share("category_share", assessed, assessed["category"] == category, category=category)


def _outcome_rates(
    turns: pd.DataFrame, outcome: str, names: dict[str, Any], options: dict
) -> Iterator[TidyEstimate]:
    """The rate of another outcome than ``genuine`` at every temperature."""
    assessed = turns[turns[outcome].notna()]
    for temperature, at in assessed.groupby("temperature"):
        counts = {"events": int(at[outcome].sum()), "contexts": at["context"].nunique()}
        group = Group(at["source"].to_numpy(), options, names | {"temperature": temperature})
        yield group.mean("follow_up_rate", at[outcome], proportion=True, **counts)


def _above_floor(
    decoys: pd.DataFrame, names: dict[str, Any], level: float
) -> Iterator[TidyEstimate]:
    """Rate, floor and excess of an outcome per kind of decoy: at every temperature, and over all.

    All three are of the decoys on which both verdicts say something.
    """
    outcome = names["outcome"]
    for kind, of_kind in decoys.groupby("decoy"):
        for temperature, drawn in [*of_kind.groupby("temperature"), (np.nan, of_kind)]:
            both = drawn.dropna(subset=[outcome, f"own_{outcome}"])
            own, other = both[f"own_{outcome}"].astype(float), both[outcome].astype(float)
            of = names | {"temperature": temperature, "decoy": kind}
            of |= {"contexts": both["context"].nunique()}
            for quantity, values, low in (
                ("decoyed_rate", own, 0),
                ("floor", other, 0),
                ("excess", own - other, -1),
            ):
                lender = both["source" if quantity == "decoyed_rate" else "lender"]
                found = dyadic_mean(values, both["source"], lender, ends=(low, 1), level=level)
                events = pd.NA if quantity == "excess" else int(values.sum())
                yield TidyEstimate(quantity, of | {"events": events}, len(both), found)


def _reach(turns: pd.DataFrame, names: dict[str, Any], level: float) -> Iterator[TidyEstimate]:
    """Latent reach for n = 1 … the most samples that a context has."""
    assessed = turns[turns["genuine"].notna()]
    contexts = assessed.groupby("context").agg(
        source=("source", "first"), genuine=("genuine", "sum"), samples=("genuine", "size")
    )
    for n in range(1, int(contexts["samples"].max() if len(contexts) else 0) + 1):
        chance = any_of_n(contexts["genuine"].to_numpy(), contexts["samples"].to_numpy(), n)
        estimate = cluster_mean(chance, contexts["source"], proportion=True, level=level)
        there = contexts[contexts["samples"] >= n]
        of = names | {"n_samples": n, "contexts": len(there)}
        yield TidyEstimate("reach", of, int(there["samples"].sum()), estimate)


def _difference(
    turns: pd.DataFrame, greedy: pd.DataFrame, names: dict[str, Any], options: dict
) -> Iterator[TidyEstimate]:
    """The rate minus the greedy rate of the same sources, and what could have been detected."""
    columns = turns["genuine"], turns["source"], greedy["genuine"], greedy["source"]
    paired = paired_difference(*columns, level=options["level"], seed=options["seed"])
    both = pd.concat([turns, greedy])
    both = both[both["genuine"].notna()]
    test = paired.test or None
    yield _row("difference_from_greedy", paired.difference, both, names, p=paired.p, test=test)
    size = detectable_difference(*columns, power=POWER, level=options["level"])
    method = f"{POWER:.0%} power in a single comparison"
    detectable = Estimate(size, np.nan, np.nan, paired.sources, method)
    yield _row("detectable_difference", detectable, both, names)


# -- the judge's errors ---------------------------------------------------------------------------


def _judge_errors(
    truth: pd.DataFrame, names: dict[str, Any], level: float
) -> Iterator[TidyEstimate]:
    """Sensitivity and specificity, over all annotated turns of a model.

    NaN with the reason if a run with labels has a stratum without any: verdicts of one kind would
    be missing among the annotated ones, and both shares be off.
    """
    if not len(truth):
        return
    reason, weights = _unlabelled_strata(truth), _weights(truth)
    for quantity, is_so in (("judge_sensitivity", 1.0), ("judge_specificity", 0.0)):
        of = (truth["truth"] == is_so).to_numpy()
        turns, right = truth[of], (truth["genuine"][of] == is_so).astype(float)
        estimate = _undefined(reason, turns) or cluster_mean(
            right, turns["source"], weights=weights[of], proportion=True, level=level
        )
        yield _row(quantity, estimate, turns, names, events=int(right.sum()))


def _corrected_rates(
    turns: pd.DataFrame,
    truth: pd.DataFrame,
    names: dict[str, Any],
    options: dict,
    annotator: str | None,
) -> Iterator[TidyEstimate]:
    """The follow-up rate corrected for the judge's errors, and by the annotator's labels alone.

    Turns that the judge was fitted on are left out, among the labels and among all turns: its
    errors there say nothing of its errors elsewhere. ``rate_annotated`` is the mean of the group's
    labels, weighted by inverse inclusion probabilities that are normalised (Hájek 1971): it needs
    no judge, and no more than that sample.

    Of corrected rates, ``rows`` are the turns judged and ``events`` those of them that are
    annotated and count for the correction: of the whole model for Rogan & Gladen, of the group for
    the prediction-powered rate.
    Rogan & Gladen's assumption (equal errors everywhere) covers runs without labels, but no stratum
    without any; the prediction-powered rate needs labels of every run that has turns in the group.
    """
    if not len(truth):
        return
    assessed = turns[turns["genuine"].notna() & ~turns["fitted"]]
    own = assessed[assessed["truth"].notna()]

    def row(quantity: str, found: Estimate, of: pd.DataFrame, labelled: int) -> TidyEstimate:
        by = replace(found, method=f"{found.method}; truth: {annotator}")
        return _row(quantity, by, of, names, events=labelled)

    estimate = _undefined(_unlabelled_strata(truth), assessed) or rogan_gladen(
        assessed["genuine"],
        assessed["source"],
        truth=truth["truth"],
        truth_prediction=truth["genuine"],
        truth_sources=truth["source"],
        truth_weights=_weights(truth),
        **options,
    )
    yield row("rate_rogan_gladen", estimate, assessed, len(truth))
    reason, weights = _unlabelled_runs(assessed) or _unlabelled_strata(assessed), _weights(own)
    estimate = _undefined(reason, own) or cluster_mean(
        own["truth"], own["source"], weights=weights, proportion=True, level=options["level"]
    )
    yield row("rate_annotated", estimate, own, len(own))
    nothing = _undefined(reason, assessed)
    if nothing:
        yield row("rate_prediction_powered", nothing, assessed, len(own))
    elif len(own) >= MIN_ANNOTATED and own["source"].nunique() >= MIN_ANNOTATED_SOURCES:
        estimate = prediction_powered(
            assessed["genuine"],
            assessed["source"],
            truth=own["truth"],
            truth_prediction=own["genuine"],
            truth_sources=own["source"],
            inclusion=weights.min() / weights,  # up to a factor: they are normalised
            level=options["level"],
        )
        yield row("rate_prediction_powered", estimate, assessed, len(own))


def _weights(truth: pd.DataFrame) -> np.ndarray:
    """Inverse inclusion probabilities; alike where one isn't known."""
    if truth["inclusion"].isna().any():
        return np.ones(len(truth))
    return 1 / truth["inclusion"].to_numpy()


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
