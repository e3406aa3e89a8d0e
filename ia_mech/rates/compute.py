"""Follow-up rates, floors, differences and all other numbers of runs, as tidy estimates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import gammaln

from ia_mech.estimates import ALL, TidyEstimate, by_dataset, frame_of, holm_corrected
from ia_mech.judge.decoys import DECOY_KINDS
from ia_mech.judge.rubric import CANNOT_ASSESS
from ia_mech.rates.evidence import DEPENDENT
from ia_mech.rates.gate import VERDICTS
from ia_mech.rates.latent import rises
from ia_mech.rates.load import EVERY, FAILED, SUBJECT, JudgedTurns, matching
from ia_mech.stats import (
    Estimate,
    cluster_mean,
    dyadic_difference,
    dyadic_rate,
    paired_difference,
    prediction_powered,
    variance_components,
)

# A prediction-powered rate rests on the judge's mean error in its own group. With fewer annotated
# turns, or fewer sources, its interval says more about the method than about the rate.
MIN_ANNOTATED, MIN_ANNOTATED_SOURCES = 30, 10
RELIABILITY_TURNS = 16  # that a probe of the rates of siblings would have after each response

NAMES = {  # what an estimate is of: dtypes
    **dict.fromkeys(("model", "weights_hash", "dataset", "perturbation"), "object"),
    **dict.fromkeys(("judge", "gate", "outcome", "responses"), "object"),
    "temperature": "float64",
    **dict.fromkeys(("category", "decoy"), "object"),
    "n_samples": "Int64",
    "events": "Int64",
    "level": "float64",
}


def rates(
    rows: pd.DataFrame,
    by: Sequence[str] = (),
    *,
    outcome: str = "follow_up",
    quantity: str = "rate",
    level: float = 0.95,
    **names: Any,
) -> Iterator[TidyEstimate]:
    """How often rows have an outcome, by group; the values of the columns ``by`` make the groups.

    ``rows`` are ``JudgedTurns.turns``, or any table with ``source``, ``by`` and the outcome: 1, 0,
    or NaN where there is no telling. Estimates are of the group's values, ``outcome``, ``events``
    (rows with it) and ``names``.
    """
    for group, own in _groups(rows, by):
        rate = cluster_mean(own[outcome], own["source"], proportion=True, level=level)
        of = {"outcome": outcome, "level": level, "events": int(own[outcome].sum())}
        counted = int(own[outcome].notna().sum())
        yield TidyEstimate(quantity, names | group | of, counted, rate)


def differences(
    rows: pd.DataFrame,
    by: Sequence[str],
    base: Mapping[str, Any],
    *,
    within: str | None = None,
    outcome: str = "follow_up",
    quantity: str = "difference",
    level: float = 0.95,
    seed: int = 0,
    **names: Any,
) -> Iterator[TidyEstimate]:
    """How much higher each group's rate (:func:`rates`) is than that of a condition, paired by
    source.

    The condition is ``base``, such as ``{"temperature": 0}``: a group is compared with the rows
    that differ from it in this alone. The condition's own groups have no difference. With
    ``within``, only those values of that column count that both groups have. ``seed`` is of sign
    flips.
    """
    for group, own in _groups(rows, by):
        if all(group[name] == value for name, value in base.items()):
            continue
        others = rows[matching(rows, group | dict(base))]
        if within is not None:
            both = set(own[within]) & set(others[within])
            own, others = (part[part[within].isin(both)] for part in (own, others))
        columns = own[outcome], own["source"], others[outcome], others["source"]
        pair = paired_difference(*columns, level=level, seed=seed)
        counted = int(own[outcome].notna().sum() + others[outcome].notna().sum())
        of = names | group | {"outcome": outcome, "level": level, "events": pd.NA}
        yield TidyEstimate(quantity, of, counted, pair.difference, pair.p, pair.test or None)


def floors(
    decoys: pd.DataFrame,
    kind: str,
    by: Sequence[str] = (),
    *,
    level: float = 0.95,
    **names: Any,
) -> Iterator[TidyEstimate]:
    """How often turns are called follow-ups after contexts that they didn't follow, by group.

    These are all decoys of a kind with both verdicts (``JudgedTurns.decoys``). The other arguments
    are those of :func:`rates`. There are three quantities: ``rate_after_own``, of the turns after
    their own contexts; ``floor``, of the same turns after the other contexts; and ``beyond``, the
    difference.
    """
    for group, those in _groups(decoys[decoys["decoy"] == kind], by):
        of = names | group | {"outcome": "follow_up", "level": level, "decoy": kind}
        both = those[["source", "shown_source", *VERDICTS]].dropna()
        own, other = (both[name].astype(float) for name in VERDICTS)
        # The turns of decoys are turns: their rate has the interval of any other rate.
        rate = cluster_mean(own, both["source"], proportion=True, level=level)
        pair = both["source"], both["shown_source"]
        floor = dyadic_rate(other, *pair, level=level)
        beyond = dyadic_difference(own, other, *pair, level=level)
        for quantity, estimate, events in (
            ("rate_after_own", rate, int(own.sum())),
            ("floor", floor, int(other.sum())),
            ("beyond", beyond, pd.NA),
        ):
            yield TidyEstimate(quantity, of | {"events": events}, len(both), estimate)


def _groups(rows: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The values of these columns and the rows that have them."""
    if not by and len(rows):
        yield {}, rows
    for values, own in rows.groupby(list(by), observed=True) if by else ():
        yield dict(zip(by, values, strict=True)), own


def estimates(judged: JudgedTurns, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
    """All figures, per model and perturbation, dataset and temperature; ``seed`` is of sign flips.

    Returns:
        One row per estimate:

        - ``quantity``: ``rate``; ``rate_complete``, of follow-ups after
          finished responses; ``difference``, of the follow-up rate from the greedy one;
          ``cannot_assess``, ``failed`` and ``unfinished``, shares of all turns; ``category_share``;
          ``pass_at_k``, the share of contexts with a follow-up among k = ``n_samples``;
          ``variance_between_queries`` and ``variance_between_responses``, of the share of
          follow-ups, and ``reliability``, that of the rates of a query's responses over
          ``n_samples`` turns (:mod:`ia_mech.stats.components`; where queries have several
          responses); ``rate_prediction_powered``, corrected by the annotator's labels. Of decoys
          ``rate_after_own``, ``floor`` and ``beyond`` (:func:`floors`), and ``rise``,
          ``rise_staying_in_role``, ``rise_once_in_role`` and ``rise_beyond_siblings``
          (:func:`ia_mech.rates.latent.rises`).
        - ``model``, ``weights_hash``, ``perturbation``, ``dataset`` (may be ``(all)``),
          ``temperature`` (0 is greedy; missing over all of them, of ``pass_at_k`` all but greedy),
          ``judge``, ``responses`` (after which the turns come), ``outcome`` (``follow_up`` or
          ``dependent``), ``category`` (of ``category_share``), ``decoy`` (its kind): what it is of.
          ``gate``: what decoys of other conversations say of the judge's verdicts on this model.
        - ``value``, ``low``, ``high``, ``level``, ``method``: the estimate and its interval;
          missing where there is none. ``p``, ``p_holm``, ``test``: of a difference; corrected over
          all comparisons, those of ``(all)`` in a family of their own.
        - ``events``, ``rows``: how many turns count, of how many; of a corrected rate, ``events``
          of the turns were annotated for the correction; of decoys, ``rows`` are those with both
          verdicts; of ``pass_at_k``, contexts. ``sources``: behind the estimate.
    """
    rows: list[TidyEstimate] = []
    for subject, turns in judged.turns.groupby(SUBJECT, observed=True):
        names = dict(zip(SUBJECT, subject, strict=True))
        decoys = judged.decoys[matching(judged.decoys, names)]
        word = judged.by_model[names["model"], names["weights_hash"]].verdict
        names |= {"judge": judged.judge, "responses": judged.responses}
        for dataset, here in by_dataset(turns):
            of, own = names | {"dataset": dataset}, turns[here]
            among = decoys if dataset == ALL else decoys[decoys["dataset"] == dataset]
            about = {"level": level, **of, "gate": word}
            rows += rates(own, ["temperature"], **about)
            for kind in DECOY_KINDS:
                rows += floors(among, kind, ["temperature"], **about)
                rows += floors(among, kind, **about)
            rows += rises(among, about | {"outcome": "follow_up"}, level, seed)
            if own[DEPENDENT].notna().any():
                rows += rates(own, ["temperature"], outcome=DEPENDENT, **about)
            # Of pooled runs some may lack a temperature: their greedy turns are no baseline for it.
            greedy = {"temperature": 0.0}
            like: dict[str, Any] = {"within": "context", "seed": seed}
            rows += differences(own, ["temperature"], greedy, **like, **about)
            rows += _profile(own, judged.rubric.assessed, about)
            if judged.responses == EVERY and own["unfinished"].any():
                rows += rates(
                    own, ["temperature"], quantity="unfinished", outcome="unfinished", **about
                )
                complete = own[~own["unfinished"]]
                rows += rates(complete, ["temperature"], quantity="rate_complete", **about)
            for temperature, at in own.groupby("temperature"):
                of_group = of | {"temperature": float(temperature), "level": level}
                of_group |= {"outcome": "follow_up", "gate": word}
                if temperature:
                    rows += _pass_at_k(at, of_group, level)
                    rows += _components(at, of_group, level)
                rows += _corrected_rate(at, of_group, level, judged.annotator)
    rows = holm_corrected(rows, lambda row: (row.quantity, row.names["dataset"] == ALL))
    return frame_of(rows, NAMES)


def _profile(
    turns: pd.DataFrame, categories: Sequence[str], about: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """What the turns are: shares of categories among those assessed, and of the others."""
    assessed = turns["follow_up"].notna()
    for category in (CANNOT_ASSESS, FAILED, *categories):
        share = (turns["category"] == category).astype(float)
        quantity, names = category, {"outcome": "follow_up"}
        if category in categories:
            share = share.where(assessed)
            quantity, names = "category_share", names | {"category": category}
        marked = turns[["source", "temperature"]].assign(share=share)
        for row in rates(marked, ["temperature"], outcome="share", quantity=quantity, **about):
            yield replace(row, names=row.names | names)


def pass_at_k(follow_up: np.ndarray, samples: np.ndarray, n: int) -> np.ndarray:
    """Chance that n samples, drawn from those there are, hold a follow-up; ``[contexts]``, NaN
    for one with fewer than n samples.

    ``1 - C(N - g, n) / C(N, n)``: the unbiased estimate of 1 - (1 - p)^n from g follow-ups among
    N independent samples (Chen et al. 2021, arXiv 2107.03374, "pass@k").
    """
    follow_up, samples = np.asarray(follow_up, dtype=float), np.asarray(samples, dtype=float)
    rest = samples - follow_up
    with np.errstate(invalid="ignore"):
        a, b, c, d = map(gammaln, (rest + 1, rest - n + 1, samples + 1, samples - n + 1))
        log_none = a - b - c + d
    # n samples can't avoid a follow-up if fewer than n others are there.
    chance = np.where(rest < n, 1.0, -np.expm1(log_none))
    chance = np.where(follow_up == 0, 0.0, np.clip(chance, 0, 1))
    return np.where(samples < n, np.nan, chance)


def _pass_at_k(turns: pd.DataFrame, names: dict[str, Any], level: float) -> Iterator[TidyEstimate]:
    """:func:`pass_at_k` for k = 1 … the most samples that a context has."""
    assessed = turns[turns["follow_up"].notna()]
    contexts = assessed.groupby("context", observed=True).agg(
        source=("source", "first"), follow_up=("follow_up", "sum"), samples=("follow_up", "size")
    )
    for n in range(1, int(contexts["samples"].max() if len(contexts) else 0) + 1):
        chance = pass_at_k(contexts["follow_up"].to_numpy(), contexts["samples"].to_numpy(), n)
        estimate = cluster_mean(chance, contexts["source"], proportion=True, level=level)
        there = int((contexts["samples"] >= n).sum())
        yield TidyEstimate("pass_at_k", names | {"n_samples": n}, there, estimate)


def _components(turns: pd.DataFrame, names: dict[str, Any], level: float) -> Iterator[TidyEstimate]:
    """How much of the follow-up rate hangs on the query and how much on the response."""
    values = turns.assign(follow_up=turns["follow_up"].astype(float))
    each = ["perturbation", "run", "source"]
    tables = [
        own.pivot(index="context", columns="sample", values="follow_up").to_numpy()
        for _, own in values.groupby(each, observed=True)
    ]
    try:
        found = variance_components(tables, level)
    except ValueError:  # no query has siblings, or one turn each
        return
    least = names | {"n_samples": RELIABILITY_TURNS}

    count = int(values["follow_up"].notna().sum())
    yield TidyEstimate("variance_between_queries", names, count, found.between_queries)
    yield TidyEstimate("variance_between_responses", names, count, found.between_responses)
    yield TidyEstimate("reliability", least, count, found.reliability(RELIABILITY_TURNS))


def _corrected_rate(
    turns: pd.DataFrame, names: dict[str, Any], level: float, annotator: str | None
) -> Iterator[TidyEstimate]:
    """The follow-up rate corrected by the labels of the group, if there are enough of them.

    Turns that the judge was fitted on are left out, among the labels and among all turns: its
    errors there say nothing of its errors elsewhere. A group with turns that the annotator had no
    chance to see has no such rate.
    """
    assessed = turns[turns["follow_up"].notna() & ~turns["fitted"]]
    own = assessed[assessed["truth"].notna()]
    if not len(own):
        return
    missing = [text for text in assessed["unlabelled"].unique() if text]
    if missing:
        reason = f"undefined: no labels of {' and '.join(missing)}"
        estimate = Estimate(np.nan, np.nan, np.nan, assessed["source"].nunique(), reason)
    elif len(own) < MIN_ANNOTATED or own["source"].nunique() < MIN_ANNOTATED_SOURCES:
        return
    else:
        estimate = prediction_powered(
            assessed["follow_up"],
            assessed["truth"],
            assessed["source"],
            inclusion=assessed["inclusion"],
            level=level,
        )
    of = names | {"events": len(own)}
    estimate = replace(estimate, method=f"{estimate.method}; truth: {annotator}")
    yield TidyEstimate("rate_prediction_powered", of, len(assessed), estimate)
