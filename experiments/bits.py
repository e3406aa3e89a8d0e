"""Bits: turns are scored after several contexts, and the scores tell which one a turn followed.

A unit is a query with its K contexts, one for each response, and its turns. Estimates are means
over queries, or mean differences between two values of the same queries.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from experiments.experiment import Model, Unit
from ia_mech.estimates import Group, TidyEstimate, by_dataset, paired_row
from ia_mech.likelihood.reaction import by_query
from ia_mech.run.queries import Query
from ia_mech.run.sources import split_source

Ids = tuple[int, ...]

LEAST_QUERIES = 3  # a scale is fitted on other queries, and a penalty chosen on others again


@dataclass(frozen=True)
class SiblingTurns(Unit):
    """Turns that are scored after each of the contexts of a query.

    Attributes:
        arm: whose turns they are.
        contexts: token ids with each of the K responses, and the open header.
        turns: token ids and temperature of each turn.
    """

    arm: str
    contexts: tuple[Ids, ...]
    turns: tuple[tuple[Ids, float], ...]


def unit_of(arm: str, query: Query, turns: Iterable[tuple[Ids, float]]) -> SiblingTurns:
    """Turns, to be scored after each context of a query."""
    contexts, pairs = tuple(query.token_ids), tuple(turns)
    tokens = sum(map(len, contexts)) + len(contexts) * sum(len(ids) for ids, _ in pairs)
    return SiblingTurns(query.source, query.dataset, tokens, arm, contexts, pairs)


def turns_of(query: Query) -> list[tuple[Ids, float]]:
    """Token ids and temperature of a query's turns."""
    ids = (tuple(one.tolist()) for one in query.turns["token_ids"])
    return list(zip(ids, query.turns["temperature"].astype(float), strict=True))


def score_turns(model: Model, unit: SiblingTurns) -> pd.DataFrame:
    """One row per turn, in the unit's order, log-probabilities in nats.

    ``own`` ``[K · tokens]``: of each token, turn-end included, after each response, at the turn's
    own temperature (at T = 1 for greedy turns); ``reader`` ``[K]``: of the whole turn at T = 1.
    """
    from ia_mech.likelihood.scorer import after_each

    temperatures = sorted({t for _, t in unit.turns} - {0.0, 1.0})
    score = partial(model.score, temperatures=temperatures)
    rows = []
    scores = after_each(score, unit.contexts, [ids for ids, _ in unit.turns])
    for each, (_, temperature) in zip(scores, unit.turns, strict=True):
        raw = np.stack([one.logprobs_raw for one in each]).astype(np.float64)
        own = raw
        if temperature in temperatures:
            which = temperatures.index(temperature)
            own = np.stack([one.logprobs_tempered[which] for one in each]).astype(np.float64)
        rows.append({"own": own.ravel(), "reader": raw.sum(1)})
    return pd.DataFrame(rows).assign(arm=unit.arm)


def mean_by_query(turns: pd.DataFrame, values: Any, responses: int) -> pd.Series:
    """Values of turns → their mean by query, each of its responses weighing the same."""
    names, found = by_query(values, turns["followed"], turns["source"], responses)
    return pd.Series(found, index=names)


@dataclass(frozen=True)
class QueryValues:
    """A value of every query, of which the mean is estimated.

    Attributes:
        quantity: what it is.
        values: by source.
        names: what it is of. Without ``dataset`` there is an estimate for each dataset, and one for
            all together.
        baseline: what it is tested against: by source, what is subtracted; None for a plain mean.
        null: a number that a plain mean is tested against.
        proportion: values are shares of events, for the interval of a plain mean.
        least, most: the bounds of the value.
    """

    quantity: str
    values: pd.Series
    names: dict[str, Any]
    baseline: pd.Series | None = None
    null: float | None = None
    proportion: bool = False
    least: float = -np.inf
    most: float = np.inf


def estimate_means(each: Iterable[QueryValues], options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """The means of values over queries."""
    for one in each:
        frame = one.values.rename_axis("source").reset_index(name="value")
        groups: Iterable[tuple[str, Any]]
        if "dataset" in one.names:
            groups = [(one.names["dataset"], np.ones(len(frame), dtype=bool))]
        else:
            frame["dataset"] = frame["source"].map(lambda source: split_source(source)[0])
            groups = by_dataset(frame)
        for dataset, here in groups:
            values, sources = frame.loc[here, "value"], frame.loc[here, "source"].to_numpy()
            group = Group(sources, options, one.names | {"dataset": dataset})
            if one.baseline is not None:
                pair = values, sources, one.baseline, one.baseline.index
                row = paired_row(group, one.quantity, *pair)
            else:
                row = group.mean(one.quantity, values, proportion=one.proportion)
            if one.null is not None:
                # Rounded: sums of thirds that miss 0 by 1e-17 would count as signs.
                more = (values - one.null).round(9)
                test = paired_row(group, one.quantity, more, sources, 0 * more, sources)
                row = replace(row, p=test.p, test=test.test)
            yield replace(row, estimate=row.estimate.clip(one.least, one.most))


def halves_of(queries: Iterable[str], seed: int) -> dict[str, int]:
    """Each query's half, 0 or 1, drawn by seed."""
    names = sorted(set(queries))
    order = np.random.default_rng([seed, 2]).permutation(len(names))
    return {names[at]: place % 2 for place, at in enumerate(order)}
