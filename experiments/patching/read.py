"""Pairs of responses to one query, with the contexts that patching moves states between."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.given_turns import Given, Ids, context_with, places_of
from experiments.perturbations.conditions import shuffle
from ia_mech.chat.format import ChatContext
from ia_mech.engine.sampling import stream_key
from ia_mech.errors import UserError

TURNS = 2  # after response B


@dataclass(frozen=True)
class Pair:
    """Two responses to a query, and turns that were sampled after the second.

    Attributes:
        source: of the query.
        dataset: of the query.
        a: the context with response A.
        b: the context with response B.
        turns: ids of the turns after B.
        same: the context with A's sentences in another order, or None.
        other: the context with a response to another query, or None.
        bare: ids of the user header alone, or None where the template has none.
    """

    source: str
    dataset: str
    a: ChatContext
    b: ChatContext
    turns: tuple[Ids, ...]
    same: ChatContext | None
    other: ChatContext | None
    bare: Ids | None


def pairs_of(given: Given, seed: int) -> tuple[list[Pair], list[str]]:
    """One pair per query, drawn by seed, and what a reader has to know.

    Raises:
        UserError: no query has two responses that differ, with turns after the second.
    """
    pairs, lacking = [], 0
    for number, query in enumerate(given.queries):
        rng = np.random.default_rng([*stream_key(seed, query.source, 0), 2])
        order = rng.permutation(len(query.responses)).tolist()
        contexts, turns = given.contexts[query.source], given.turns[query.source]
        chosen = [
            (a, b)
            for b in order
            for a in order
            if query.responses[a] != query.responses[b] and turns[b]
        ]
        if not chosen:
            lacking += 1
            continue
        a, b = chosen[0]
        moved = shuffle(query.responses[a], rng).text
        others = given.queries[number - 1]  # the last one's for the first
        told = others.responses[int(rng.integers(len(others.responses)))]
        pairs.append(
            Pair(
                query.source,
                query.dataset,
                contexts[a],
                contexts[b],
                tuple(turns[b][:TURNS]),
                context_with(given.chat, query, moved) if moved != query.responses[a] else None,
                context_with(given.chat, query, told) if others is not query else None,
                _bare(given, query.messages),
            )
        )
    if not pairs:
        raise UserError(
            "no query has two different responses", "sample with a higher --response-temperature"
        )
    notes = [f"{lacking} queries have responses that are all alike; they are left out."]
    return pairs, notes if lacking else []


def _bare(given: Given, messages: Sequence[dict]) -> Ids | None:
    try:
        return tuple(given.chat.opening(messages))
    except UserError:
        return None


def positions_of(pairs: Sequence[Pair], wanted: Sequence[str] | None) -> list[str]:
    """The positions between response and turn that all contexts have.

    Args:
        pairs: the pairs.
        wanted: names of those to keep; all if None.

    Raises:
        UserError: one that is wanted isn't there.
    """
    contexts = [c for pair in pairs for c in (pair.a, pair.b, pair.same, pair.other) if c]
    names = [name for name in places_of(pairs[0].a) if all(name in places_of(c) for c in contexts)]
    for name in wanted or ():
        if name not in names:
            raise UserError(
                f"there is no position {name} between response and turn",
                f"give --positions from {', '.join(names)}",
            )
    return names if wanted is None else [name for name in names if name in wanted]
