"""Every estimate of a sweep, one row each, with intervals over sources."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.likelihood import by_temperature
from experiments.temperature_sweep.measure import (
    MOSTLY,
    FirstToken,
    LensCurves,
    Measured,
    against_others,
    overtaking,
)
from experiments.temperature_sweep.read import HEADER_LAST
from ia_mech.estimates import (
    ALL,
    Group,
    TidyEstimate,
    by_dataset,
    corrected,
    frame_of,
    paired_row,
)
from ia_mech.judge.rubric import ASSESSED, GENUINE

RATE, FAILURE = "follow-up rate", "share of turns"
LESS = " less greedy's"  # of the same sources
LESS_OTHERS = " less other turns'"  # of the same context at the same temperature
GARBLED = "degenerate"
OTHERS = ("all others", "others but degenerate ones")
KINDS = {1.0: "genuine", 0.0: "not genuine"}
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
RANKS = (2, 3, 5, 10, 30, 100, 300, 1000)
RIVALS = {"best": "best follow-up opening", "follow_ups": "all follow-up openings"}
# ``of``: a category, a kind of turn or of opening; ``at``: a number of tokens, or a rank.
COLUMNS = {
    "dataset": "str",
    "temperature": "float64",
    "layer": "Int64",
    "position": "str",
    "of": "str",
    "at": "float64",
}


def estimates(
    measured: Measured, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each: quantity, :data:`COLUMNS`, value, interval, test."""
    options = {"level": level, "resamples": resamples, "seed": seed}

    def groups(frame: pd.DataFrame) -> Iterator[tuple[Group, np.ndarray]]:
        for dataset, here in by_dataset(frame):
            yield Group(frame["source"].to_numpy()[here], options, {"dataset": dataset}), here

    rows: list[TidyEstimate] = []
    turns = measured.sweep.turns[measured.sweep.turns["genuine"].notna()]
    for group, here in groups(turns):
        rows += _shares(group, turns[here])
    for group, here in groups(measured.sweep.contexts):
        rows += _first_token(group, measured.first, here)
        if measured.lens is not None:
            rows += _lens(group, measured.lens, here)
    for group, here in groups(measured.hidden):
        rows += _hidden(group, measured.hidden[here])
    if measured.references is not None:
        for group, here in groups(measured.references.frame):
            curve = measured.references.curve[here]
            rows += by_temperature(group, curve, measured.references.temperatures)
    # All datasets together repeat what each of them says: a family of their own.
    families = corrected(rows, lambda row: (_family(row.quantity), row.names["dataset"] == ALL))
    return frame_of(families, COLUMNS)


def _family(quantity: str) -> str:
    """The rate, the failures, and how hidden genuine turns are: one question each."""
    return LESS_OTHERS if quantity.endswith(LESS_OTHERS) else quantity


def _mass(group: Group, quantity: str, values, **names) -> TidyEstimate:
    """The mean of values between 0 and 1 that aren't events, nor made of events.

    A rate's interval assumes the variance of events, which is far more than probabilities have.
    This is the interval of a mean, clipped to [0, 1].
    """
    row = group.mean(quantity, values, **names)
    return replace(row, estimate=row.estimate.within(0, 1))


# -- rates ----------------------------------------------------------------------------------------


def _shares(group: Group, turns: pd.DataFrame) -> Iterator[TidyEstimate]:
    """Follow-up rate and failure profile by temperature, and how they differ from greedy's."""
    greedy = turns[turns["temperature"] == 0]
    for temperature, at in turns.groupby("temperature"):
        own = Group(at["source"].to_numpy(), group.options, group.names)
        for category in ASSESSED:
            names: dict[str, Any] = {"temperature": float(temperature)}
            quantity = RATE
            if category != GENUINE:
                quantity, names["of"] = FAILURE, category
            events, before = ((f["category"] == category).astype(float) for f in (at, greedy))
            yield own.mean(quantity, events, proportion=True, **names)
            if temperature:
                pair = events, at["source"], before, greedy["source"]
                yield paired_row(own, quantity + LESS, *pair, **names)


# -- the first token ------------------------------------------------------------------------------


def _first_token(group: Group, first: FirstToken, here: np.ndarray) -> Iterator[TidyEstimate]:
    for column, t in enumerate(first.temperatures):
        at, t = (here, column), float(t)
        yield group.mean("first token's entropy", first.entropy[at], temperature=t)
        yield group.mean("effective number of first tokens", first.tokens[at], temperature=t)
        yield _mass(group, "mass on turn-end", first.turn_end[at], temperature=t)
        yield _mass(group, "total variation from T = 1", first.variation[at], temperature=t)
        for of, mass in (("genuine", first.genuine[at]), ("restated", first.restated[at])):
            yield _mass(group, "mass on openings", mass, of=of, temperature=t)
        less = first.genuine[at] - first.restated[at]
        yield group.mean("mass on openings", less, of="genuine less restated", temperature=t)


# -- how hidden -----------------------------------------------------------------------------------


def _hidden(group: Group, frame: pd.DataFrame) -> Iterator[TidyEstimate]:
    for temperature, at in frame.groupby("temperature"):
        names = {"temperature": float(temperature)}
        for kind, of in KINDS.items():
            turns = at[at["genuine"] == kind]
            if len(turns):
                own = Group(turns["source"].to_numpy(), group.options, group.names | names)
                yield from _depths(replace(own, names=own.names | {"of": of}), turns)
        yield from _against(group, at, **names)
    yield from _against(group, frame)


def _depths(group: Group, turns: pd.DataFrame) -> Iterator[TidyEstimate]:
    """Of turns of one kind: whether and where greedy leaves them, and how far below it they are."""
    left = turns["leaves"]
    yield group.mean("first token is greedy's", turns["follows"], proportion=True)
    yield group.mean("greedy leaves it", left, proportion=True)
    yield group.median("token where greedy leaves", turns["token"])
    yield _mass(group, "share of turn before greedy leaves", turns["before"])
    yield group.median("rank where greedy leaves", turns["rank"])
    yield _mass(group, "probability where greedy leaves", turns["probability"])
    yield group.mean("gap where greedy leaves", turns["gap"])
    yield group.median("median gap where greedy leaves", turns["gap"])
    for at in TOKENS:
        by_then = (turns["token"] <= at).astype(float)  # one that is never left counts as not
        yield group.mean("greedy has left by token", by_then, proportion=True, at=float(at))
    for at in RANKS:
        within = (turns["rank"] <= at).astype(float).where(left == 1)
        yield group.mean("rank where greedy leaves, at most", within, proportion=True, at=float(at))


def _against(group: Group, frame: pd.DataFrame, **names) -> Iterator[TidyEstimate]:
    """Genuine turns less the others of the same context and temperature, and whether that is 0.

    Noise that leads far from greedy also garbles, and what is garbled isn't genuine. So genuine
    turns are also compared with the well-formed others alone.
    """
    yield from _compared(group, frame, of=OTHERS[0], **names)
    yield from _compared(group, frame[frame["category"] != GARBLED], of=OTHERS[1], **names)


def _compared(group: Group, frame: pd.DataFrame, **names) -> Iterator[TidyEstimate]:
    columns = {
        "first token is greedy's": frame["follows"],
        "token where greedy leaves": frame["token"],
        "log2 rank where greedy leaves": np.log2(frame["rank"]),
        "gap where greedy leaves": frame["gap"],
    }
    for quantity, values in columns.items():
        centred, genuine, rows = against_others(frame.assign(value=values), "value")
        if not genuine.any():
            continue
        sources = rows["source"].to_numpy()
        pair = centred[genuine], sources[genuine], centred[~genuine], sources[~genuine]
        yield paired_row(group, quantity + LESS_OTHERS, *pair, **names)


# -- logit lens -----------------------------------------------------------------------------------


def _lens(group: Group, lens: LensCurves, here: np.ndarray) -> Iterator[TidyEstimate]:
    greedy = lens.greedy[here]
    for place, position in enumerate(lens.positions):
        if np.isnan(greedy[..., place]).all():
            continue
        for at, layer in enumerate(lens.layers):
            names: dict[str, Any] = {"layer": layer, "position": position}
            for name, of in {"greedy": "greedy opening", **RIVALS}.items():
                values = getattr(lens, name)[here, at, place]
                yield group.mean("log p by the lens", values, of=of, **names)
    share = lens.share[here]
    # Where greedy itself opens as follow-ups do, it overtakes no more than other such openings.
    kinds = {", greedy opens so": share >= MOSTLY, ", greedy doesn't": share < MOSTLY}
    for name, of in RIVALS.items():
        first = overtaking(greedy, getattr(lens, name)[here])
        for place, position in enumerate(lens.positions):
            names = {"position": position}
            yield from _overtaking(group, first[:, place], lens.layers, of=of, **names)
            if position == HEADER_LAST:
                for kind, of_kind in kinds.items():
                    subset = replace(group, sources=group.sources[of_kind])
                    own = first[of_kind, place]
                    yield from _overtaking(subset, own, lens.layers, of=of + kind, **names)


def _overtaking(
    group: Group, first: np.ndarray, layers: list[int], **names
) -> Iterator[TidyEstimate]:
    """From which layer on greedy's opening stays ahead: the distribution, and its median."""
    if np.isnan(first).all():
        return
    for at, layer in enumerate(layers):
        ahead = (first <= at).astype(float)
        ahead[np.isnan(first)] = np.nan
        yield group.mean("greedy ahead for good", ahead, proportion=True, layer=layer, **names)
    overtaken = np.isfinite(first)
    numbers = np.full(len(first), np.nan)
    numbers[overtaken] = np.array(layers)[first[overtaken].astype(int)]
    yield group.median("layer where greedy overtakes", numbers, **names)
