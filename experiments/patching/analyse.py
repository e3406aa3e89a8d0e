"""τ and its intervals: how much of what the response changes follows the states that are moved."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from experiments.patching.patch import ARMS, BEFORE_TAIL, BOTH, INTERCHANGE, TAIL
from ia_mech.estimates import Group, TidyEstimate, by_dataset, frame_of, paired_row
from ia_mech.likelihood.reaction import identified
from ia_mech.stats import cluster_ratios, sign_flip_map

# ``of``: interchange, a control or an arm; ``layer``: missing for all; ``token``: from 1.
COLUMNS = {"dataset": "str", "of": "str", "layer": "Int64", "position": "str", "token": "Int64"}
TAU, CHANGE, DISTANCE = "τ", "change of identification", "relative distance"
BY_TOKEN = "τ of the first tokens"
LESS = f"{TAIL} less {BEFORE_TAIL}, nats"
MAX_T = "sign flips, max-T over the map"
CELL = ["of", "layer", "position"]


def estimates(
    rows: pd.DataFrame, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each.

    Args:
        rows: of all pairs, as :func:`experiments.patching.patch.patched` makes them, with
            ``source`` and ``dataset``.
        level: coverage of the intervals.
        resamples: bootstrap samples.
        seed: of resamples and tests.
    """
    options = {"level": level, "resamples": resamples, "seed": seed}
    rows = rows.assign(
        moved=[float((a - b).sum()) for a, b in zip(rows["after"], rows["before"], strict=True)],
        whole=[float((a - b).sum()) for a, b in zip(rows["goal"], rows["before"], strict=True)],
        told=_told(rows, "after") - _told(rows, "before"),
    )
    found: list[TidyEstimate] = []
    for dataset, here in by_dataset(rows):
        for of, mine in rows[here].groupby("of", sort=False):
            found += _of_kind(mine, {"dataset": dataset, "of": of}, options)
        columns = ["moved", "source"]
        through, past = (rows.loc[here & (rows["of"] == of), columns] for of in (TAIL, BEFORE_TAIL))
        if len(through):
            group = Group(np.array([]), options, {"dataset": dataset})
            values = *through.to_numpy().T, *past.to_numpy().T
            found.append(paired_row(group, LESS, *values, of=TAIL))
    return frame_of(found, COLUMNS)


def _told(rows: pd.DataFrame, column: str) -> np.ndarray:
    """``[rows]`` 1 where a turn is likelier after B than in another run, 0.5 in a tie."""
    pairs = zip(rows[column], rows["goal"], strict=True)
    logprobs = np.array([[run.sum(), goal.sum()] for run, goal in pairs])
    return identified(logprobs, np.ones(len(rows), dtype=int))


def _of_kind(
    rows: pd.DataFrame, names: dict[str, Any], options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """Estimates at the cells of a map, or of an arm."""
    sums = rows.groupby([*CELL, "source"], sort=False)[["moved", "whole"]].sum()
    moved = sums["moved"].unstack("source")  # [cells, sources]
    whole = sums["whole"].unstack("source").iloc[0]
    sources = np.array(moved.columns)
    group = Group(sources, options)
    ratios = cluster_ratios(moved.to_numpy().T, whole.to_numpy(), sources, **options)
    p = np.full(len(moved), np.nan)
    if names["of"] == INTERCHANGE:
        p = sign_flip_map(moved.to_numpy().T, seed=options["seed"])
    means = rows.groupby([*CELL, "source"], sort=False)[["told", "distance"]].mean()
    told, distance = (means[name].unstack("source") for name in ("told", "distance"))
    turns = len(rows) // len(moved)
    for number, cell in enumerate(moved.index):
        where = names | _where(*cell[1:])
        test = MAX_T if names["of"] == INTERCHANGE else None
        yield group.row(TAU, ratios[number], turns, p=float(p[number]), test=test, **where)
        yield group.mean(CHANGE, told.loc[cell].to_numpy(), **where)
        if names["of"] == INTERCHANGE:
            yield group.mean(DISTANCE, distance.loc[cell].to_numpy(), **where)
    if names["of"] in ARMS and names["of"] != BOTH:
        yield from _by_token(rows, names, options)


def _by_token(
    rows: pd.DataFrame, names: dict[str, Any], options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """τ of turns that are cut after so many tokens."""
    longest = max(map(len, rows["goal"]))
    moved, whole = np.zeros((2, len(rows), longest))
    for number, row in enumerate(rows.itertuples()):
        moved[number, : len(row.goal)] = row.after - row.before
        whole[number, : len(row.goal)] = row.goal - row.before
    sources = rows["source"].to_numpy()
    group = Group(sources, options)
    for token in range(1, longest + 1):
        ended = moved[:, :token].sum(1, keepdims=True), whole[:, :token].sum(1)
        (ratio,) = cluster_ratios(*ended, sources, **options)
        yield group.row(BY_TOKEN, ratio, len(rows), token=token, **names)


def _where(layer: int, position: str) -> dict[str, Any]:
    return {"layer": None if layer < 0 else layer, "position": position}


def strongest(rows: pd.DataFrame) -> tuple[int, str]:
    """The cell of the largest τ of all pairs together."""
    mine = rows[rows["of"] == INTERCHANGE]
    moved = mine["after"].map(np.sum) - mine["before"].map(np.sum)
    layer, position = moved.groupby([mine["layer"], mine["position"]]).sum().idxmax()
    return int(layer), str(position)


def largest_error(rows: pd.DataFrame, of: str, against: str) -> float:
    """Nats by which a run that should equal another one differs from it, at worst a token."""
    mine = rows[rows["of"] == of]
    pairs = zip(mine["after"], mine[against], strict=True)
    return max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0)
