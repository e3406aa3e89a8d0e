"""Estimates over scored turns, one row each, with intervals over sources."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from experiments.likelihood.read import CONTROL, MEAN_OF_LOGS, Scored
from ia_mech.estimates import Group, TidyEstimate, by_dataset, frame_of
from ia_mech.likelihood.candidates import REFERENCE
from ia_mech.stats import cluster_statistic

CONTRASTS = {
    "response": "response_contrast_bits",
    MEAN_OF_LOGS: MEAN_OF_LOGS,
    "empty": "empty_contrast_bits",
    "header": "header_contrast_bits",
}
# ``temperature``: at which turns were scored; ``of``: rival, contrast or kind of turn.
COLUMNS = {"dataset": "str", "temperature": "float64", "of": "str"}


def estimates(
    scored: Scored, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each: quantity, :data:`COLUMNS`, value and interval."""
    options = {"level": level, "resamples": resamples, "seed": seed}
    rows: list[TidyEstimate] = []
    scores = scored.references
    for dataset, here in by_dataset(scores.frame):
        references = scores.frame[here]
        group = Group(references["source"].to_numpy(), options, {"dataset": dataset})
        rows += _references(group, references)
        rows += by_temperature(group, scores.curve[here], scores.temperatures)
        rows += _contrasts(group, references, scored.candidates)
        rows += _rivals(group, references, scored)
    return frame_of(rows, COLUMNS)


def _references(group: Group, references: pd.DataFrame) -> Iterator[TidyEstimate]:
    tokens = references["reference_token_ids"].map(len).to_numpy()
    filled = np.where(tokens > 0, tokens, np.nan)  # an empty turn has no token to speak of
    yield group.mean("bits per byte", references["reference_bits_per_byte"])
    yield group.mean("log p per token", references["reference_logprob"] / filled)
    yield group.mean("log p", references["reference_logprob"])
    yield group.mean("log p with turn-end", references["reference_logprob_with_end"])
    greedy = references["reference_greedy"].astype(float)
    yield group.mean("greedy writes it", greedy, proportion=True)
    until = group.mean("tokens until greedy leaves", references["reference_greedy_tokens"])
    low = float(np.maximum(until.estimate.low, 0))  # of counts; NaN stays NaN
    yield replace(until, estimate=replace(until.estimate, low=low))
    left = references["reference_greedy_left_prob"]
    yield group.mean("probability where greedy leaves", left, proportion=True)
    ranks = references["reference_greedy_left_rank"]
    if ranks.notna().any():
        yield group.median("median rank where greedy leaves", ranks)


def by_temperature(
    group: Group, curve: np.ndarray, temperatures: np.ndarray
) -> Iterator[TidyEstimate]:
    """The mean log-probability of a whole turn by temperature, and where it is largest.

    Args:
        group: of the references.
        curve: ``[references, temperatures]`` log-probabilities in nats.
        temperatures: ascending.
    """
    for column, t in zip(curve.T, temperatures, strict=True):
        yield group.mean("tempered log p", column, temperature=float(t))

    def best(columns, counts) -> float:
        return float(temperatures[np.argmax(counts @ columns["curve"])])

    estimate = cluster_statistic(best, {"curve": curve}, group.sources, **group.options)
    if estimate.sources > 1:
        # Between which points of the grid it may lie; where all resamples agree there is no spread.
        ends = np.nan_to_num([estimate.low, estimate.high], nan=estimate.value)
        at = np.searchsorted(temperatures, ends) + np.array([-1, 1])
        low, high = temperatures[at.clip(0, len(temperatures) - 1)]
        estimate = replace(estimate, low=float(low), high=float(high))
    yield group.row("best temperature", estimate, len(curve))


def _contrasts(
    group: Group, references: pd.DataFrame, candidates: pd.DataFrame
) -> Iterator[TidyEstimate]:
    """Contrasts of references, of the control, and how much the former exceed the latter.

    The log of a mean is above the mean of logs, so a turn to which all responses are alike has a
    negative ``response`` contrast on average, and a zero one in the ``mean of logs``, as the
    placebo has.
    """
    own, control = (
        candidates[candidates["name"] == name].set_index("reference").reindex(references.index)
        for name in (REFERENCE, CONTROL)
    )
    tokens = own["tokens"].where(own["tokens"] > 0)  # an empty turn has no token to speak of
    for name, column in CONTRASTS.items():
        bits, shuffled = own[column].astype(float), control[column].astype(float)
        if bits.notna().any():
            yield group.mean("contrast, bits", bits, of=name)
            yield group.mean("contrast, bits per token", bits / tokens, of=name)
        if (bits - shuffled).notna().any():
            yield group.mean("control's contrast, bits", shuffled, of=name)
            yield group.mean("contrast less control's, bits", bits - shuffled, of=name)
    if own["placebo"].notna().any():
        yield group.mean("placebo's contrast, bits", own["placebo"], of=MEAN_OF_LOGS)
    for name, turns in ((REFERENCE, own), (CONTROL, control)):
        if turns["likeliest"].notna().any():
            yield group.mean(
                "likeliest after its response", turns["likeliest"], of=name, proportion=True
            )
            yield group.mean("likeliest after its response, by chance", turns["chance"], of=name)


def _rivals(group: Group, references: pd.DataFrame, scored: Scored) -> Iterator[TidyEstimate]:
    """How often the reference is likelier than a rival, as a whole turn and per token."""
    candidates = scored.candidates[scored.candidates["reference"].isin(references.index)]
    own = candidates[candidates["name"] == REFERENCE].set_index("reference")
    for name, rival in candidates[candidates["name"] != REFERENCE].groupby("name", sort=False):
        rival = rival.set_index("reference")
        genuine = own.loc[rival.index]
        subset = Group(rival["source"].to_numpy(), group.options, group.names)
        beats = (genuine["whole"] > rival["whole"]).astype(float)
        yield subset.mean("reference beats", beats, temperature=1.0, of=name, proportion=True)
        per_token = [f["logprob"] / f["tokens"].where(f["tokens"] > 0) for f in (genuine, rival)]
        beats = (per_token[0] > per_token[1]).astype(float)
        beats = beats.where(per_token[0].notna() & per_token[1].notna())
        yield subset.mean(
            "reference beats per token", beats, temperature=1.0, of=name, proportion=True
        )
        curves = np.stack(genuine["curve"].to_list()), np.stack(rival["curve"].to_list())
        for at, t in enumerate(scored.references.temperatures):
            if t != 1.0:
                beats = (curves[0][:, at] > curves[1][:, at]).astype(float)
                yield subset.mean(
                    "reference beats", beats, temperature=float(t), of=name, proportion=True
                )
    odds = references["candidate_log_odds"]
    yield group.mean("log-odds among candidates", odds, temperature=1.0)
