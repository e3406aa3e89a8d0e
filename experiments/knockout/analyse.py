"""Readable bits of turns under knockouts, and what each takes away."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from experiments.knockout.block import INTACT, RANDOM
from experiments.knockout.matched import MATCHED
from ia_mech.estimates import Group, TidyEstimate, by_dataset, corrected, frame_of, paired_row
from ia_mech.likelihood.reaction import by_query, mean_over_queries, readable_bits

# ``of``: the edges, ``first`` and ``last``: layers in which they are blocked; 0: none.
COLUMNS = {"dataset": "str", "of": "str", "first": "int64", "last": "int64", "responses": "int64"}
BITS, LOST = "readable bits", "readable bits, intact less blocked"
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
    rows: pd.DataFrame, responses: int, *, level: float = 0.95, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each.

    p is Holm-corrected over the edges blocked in all layers, over random ones, over matched ones,
    and over windows.

    Args:
        rows: with ``bits``.
        responses: K.
        level: coverage of the intervals.
        seed: of tests.
    """
    options = {"level": level, "seed": seed}
    found = list(_estimates(rows, responses, options))
    depth = int(rows["last"].max())
    return frame_of(corrected(found, lambda row: _family(row.names, depth)), COLUMNS)


def _family(names: dict, depth: int) -> tuple:
    whole = (names["first"], names["last"]) == (1, depth)
    return names["dataset"], whole, *map(names["of"].startswith, (RANDOM, MATCHED))


def _estimates(rows: pd.DataFrame, responses: int, options: dict) -> Iterable[TidyEstimate]:
    for dataset, here in by_dataset(rows):
        intact: tuple[np.ndarray, list] | None = None
        for (of, first, last), mine in rows[here].groupby(ARM, sort=False):
            names = {"dataset": dataset, "of": of, "first": first, "last": last}
            group = Group(np.array([]), options, names | {"responses": responses})
            turns = mine["bits"], mine["followed"], mine["source"], responses
            yield group.row(BITS, mean_over_queries(*turns, level=options["level"]), len(mine))
            sources, means = by_query(*turns)
            if of == INTACT:
                intact = means, sources
            elif intact is not None and len(sources) > 1:
                yield paired_row(group, LOST, *intact, means, sources)
