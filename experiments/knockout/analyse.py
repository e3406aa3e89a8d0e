"""Readable bits of turns under knockouts, and what each takes away."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from experiments.knockout.block import INTACT, RANDOM
from experiments.knockout.matched import MATCHED
from ia_mech.estimates import Group, TidyEstimate, by_dataset, corrected, frame_of, paired_row
from ia_mech.likelihood.reaction import (
    by_query,
    mean_over_queries,
    reaction_bits,
    readable_bits,
)

# ``of``: the edges, ``first`` and ``last``: layers in which they are blocked; 0: none. ``control``:
# RANDOM or MATCHED, the edges that :data:`BEYOND` compares with.
COLUMNS = {
    "dataset": "str",
    "of": "str",
    "control": "str",
    "first": "int64",
    "last": "int64",
    "responses": "int64",
}
BITS, LOST = "readable bits", "readable bits, intact less blocked"
BEYOND = "readable bits lost, less with other edges"  # ``control`` names the others
OWN, OWN_LOST = "I_K of own turns", "I_K of own turns, intact less blocked"
ARM = ["of", "first", "last"]


def with_bits(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The rows with ``bits``: held out, β fitted for each arm on the turns of other queries.

    Args:
        rows: of all queries, as :func:`experiments.knockout.block.blocked` makes them, with
            ``source`` and ``dataset``.
        seed: of the folds, which all arms share.
    """
    parts = []
    for _, mine in rows.groupby(ARM, sort=False):
        scores = np.stack(mine["logprobs"].tolist())
        held = readable_bits(scores, mine["followed"], mine["source"], seed=seed)
        parts.append(mine.assign(bits=held.bits))
    return pd.concat(parts, ignore_index=True)


def estimates(
    rows: pd.DataFrame,
    responses: int,
    own: pd.DataFrame | None = None,
    *,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Every estimate, one row each.

    p is Holm-corrected over the edges blocked in all layers, over random ones, over matched ones,
    over the comparisons with each of these, and over windows; that of turns which knockouts wrote
    themselves likewise.

    Args:
        rows: with ``bits``.
        responses: K.
        own: of the turns that each knockout wrote, with its log-likelihoods
            (:func:`experiments.knockout.resample.resampled`), ``source`` and ``dataset``.
        level: coverage of the intervals.
        seed: of tests.
    """
    options = {"level": level, "seed": seed}
    found = list(_estimates(rows, responses, options))
    if own is not None:
        own = own.assign(bits=reaction_bits(np.stack(own["logprobs"].tolist())))
        found += _estimates(own, responses, options, (OWN, OWN_LOST))
    depth = int(rows["last"].max())
    return frame_of(corrected(found, lambda row: _family(row, depth)), COLUMNS)


def _family(row: TidyEstimate, depth: int) -> tuple:
    names = row.names
    whole = (names["first"], names["last"]) == (1, depth)
    others = map(names["of"].startswith, (RANDOM, MATCHED))
    return row.quantity, names["dataset"], whole, names.get("control", ""), *others


def _estimates(
    rows: pd.DataFrame, responses: int, options: dict, quantities: tuple[str, str] = (BITS, LOST)
) -> Iterable[TidyEstimate]:
    bits, lost = quantities
    for dataset, here in by_dataset(rows):
        in_all_layers: dict[str, tuple[np.ndarray, list]] = {}
        depth = rows["last"].max()
        for (of, first, last), mine in rows[here].groupby(ARM, sort=False):
            names = {"dataset": dataset, "of": of, "first": first, "last": last}
            group = Group(np.array([]), options, names | {"responses": responses})
            turns = mine["bits"], mine["followed"], mine["source"], responses
            yield group.row(bits, mean_over_queries(*turns, level=options["level"]), len(mine))
            sources, means = by_query(*turns)
            if of == INTACT or (first, last) == (1, depth):
                in_all_layers[of] = means, sources
            if of != INTACT and INTACT in in_all_layers and len(sources) > 1:
                yield paired_row(group, lost, *in_all_layers[INTACT], means, sources)
        for of, (means, sources) in in_all_layers.items():
            names = {"dataset": dataset, "of": of, "first": 1, "last": depth}
            group = Group(np.array([]), options, names | {"responses": responses})
            for control in (RANDOM, MATCHED):
                if control + of in in_all_layers and len(sources) > 1:
                    others = in_all_layers[control + of]
                    yield paired_row(group, BEYOND, *others, means, sources, control=control)
