"""Estimates per condition, and how far each is from the unperturbed one."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.common.estimates import (
    ALL,
    Group,
    Row,
    by_dataset,
    corrected,
    frame_of,
    paired_row,
)
from experiments.perturbations.displacement import Moved, displacements
from experiments.perturbations.read import Compared
from ia_mech.conversations import UNPERTURBED
from ia_mech.judge.rubric import ASSESSED
from ia_mech.stats import detectable_difference
from ia_mech.stats.intervals import Estimate

RATE = "follow-up rate"
HELD = "follow-up rate, held against the unperturbed response"
SHARE = "category share"
REFERENCE = "reference log p, bits"
LESS = ", less unperturbed"
DETECTABLE = "detectable difference"
DISTANCE, RELATIVE = "header displacement", "header displacement, relative to its norm"
COLUMNS = {
    "dataset": "str",
    "condition": "str",
    "temperature": "float64",
    "category": "str",
    "layer": "Int64",
    "position": "str",
}


def estimates(
    compared: Compared, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each: quantity, :data:`COLUMNS`, value, interval and test.

    Differences are Holm-corrected over all tests of one quantity; those over all datasets
    (``all``) are a family of their own.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    rows: list[Row] = []
    for dataset, here in by_dataset(compared.turns):
        for temperature, turns in compared.turns[here].groupby("temperature"):
            names = {"dataset": dataset, "temperature": float(temperature)}
            rows += _turns(turns, names, options)
    for dataset, here in by_dataset(compared.contexts):
        rows += _references(compared.contexts[here], {"dataset": dataset}, options)
    rows += _displacements(compared, options)
    rows = corrected(rows, lambda row: (row.quantity, row.names["dataset"] == ALL))
    return frame_of(rows, COLUMNS)


def _turns(turns: pd.DataFrame, names: dict[str, Any], options: dict) -> Iterator[Row]:
    """Rates and profile of one temperature, condition by condition."""
    plain = turns[turns["condition"] == UNPERTURBED]
    for condition, own in turns.groupby("condition", sort=False):
        group = Group(own["source"].to_numpy(), options, names | {"condition": condition})
        for quantity, column in ((RATE, "genuine"), (HELD, "held")):
            yield group.mean(quantity, own[column], proportion=True)
            if condition != UNPERTURBED:
                yield _less(group, quantity, own, plain, own[column], plain[column])
        if condition != UNPERTURBED:
            columns = own["held"], own["source"], plain["held"], plain["source"]
            size = detectable_difference(*columns, level=options["level"])
            sources = own["source"].nunique()
            if 2.0 ** (1 - sources) > 1 - options["level"]:
                size = np.nan  # no signs of so few sources can be surprising
            found = Estimate(size, np.nan, np.nan, sources, "80% power, one test")
            yield group.row(DETECTABLE, found, len(own))
        for category in ASSESSED:
            events, before = (_events(frame, category) for frame in (own, plain))
            yield group.mean(SHARE, events, proportion=True, category=category)
            if condition != UNPERTURBED:
                yield _less(group, SHARE, own, plain, events, before, category=category)


def _events(turns: pd.DataFrame, category: str) -> np.ndarray:
    """``[turns]`` 1 where the category is that one; NaN where the turn wasn't assessed."""
    return np.where(turns["genuine"].isna(), np.nan, turns["category"] == category).astype(float)


def _less(group: Group, quantity: str, own, plain, values, baseline, **names) -> Row:
    """Values of a condition's rows less those of the unperturbed ones; the source is the pair."""
    sides = values, own["source"], baseline, plain["source"]
    return paired_row(group, quantity + LESS, *sides, **names)


def _references(contexts: pd.DataFrame, names: dict[str, Any], options: dict) -> Iterator[Row]:
    """Log-probability of real follow-ups at T = 1, in bits."""
    scored = contexts[contexts["logprob"].notna()]
    plain = scored[scored["condition"] == UNPERTURBED]
    for condition, own in scored.groupby("condition", sort=False):
        group = Group(own["source"].to_numpy(), options, names | {"condition": condition})
        bits, before = (frame["logprob"].to_numpy() / np.log(2.0) for frame in (own, plain))
        yield group.mean(REFERENCE, bits, temperature=1.0)
        if condition != UNPERTURBED:
            yield _less(group, REFERENCE, own, plain, bits, before, temperature=1.0)


def _displacements(compared: Compared, options: dict) -> Iterator[Row]:
    plain = compared.contexts[compared.contexts["condition"] == UNPERTURBED]
    parts = list(by_dataset(plain))
    for moved in displacements(compared):
        for dataset, here in parts:
            yield from _moved(moved, dataset, here, plain["source"].to_numpy(), options)


def _moved(
    moved: Moved, dataset: str, here: np.ndarray, sources: np.ndarray, options: dict
) -> Iterator[Row]:
    names = {name: getattr(moved, name) for name in ("condition", "layer", "position")}
    group = Group(sources[here], options, {"dataset": dataset, **names})
    for quantity, values in ((DISTANCE, moved.distance), (RELATIVE, moved.relative)):
        if not np.isnan(values[here]).all():
            row = group.mean(quantity, values[here])
            low = float(np.maximum(row.estimate.low, 0))  # of a distance; NaN stays NaN
            yield replace(row, estimate=replace(row.estimate, low=low))
