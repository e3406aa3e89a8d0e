"""The follow-up rate corrected for the judge's errors, by the turns that people annotated too.

What was drawn with no chance at all can't be weighed up: where a run has no labels, or a stratum of
its sheet has none, nothing is known of the judge's errors there, and no rate is made up for it.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from ia_mech.rates.rows import Group, Row
from ia_mech.stats import Estimate, cluster_mean, prediction_powered, rogan_gladen

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
