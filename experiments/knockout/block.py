"""Likelihoods of turns while some tokens can't attend to others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.given_turns import Ids, places_of
from ia_mech.chat.format import ChatContext
from ia_mech.engine.intervene import Block, edges_between
from ia_mech.engine.sampling import stream_key
from ia_mech.likelihood.intervened import Continued

INTACT = "intact"
SPARED = 1  # first tokens to which no control blocks edges
# From which tokens to which; "header" is all that stands between response and turn.
EDGES = {
    "header → response": (("header",), "response"),
    "turn → response": (("turn",), "response"),
    "header and turn → response": (("header", "turn"), "response"),
    "turn → header": (("turn",), "header"),
    "turn → query": (("turn",), "query"),
}
RANDOM = "random edges, as many as "


@dataclass(frozen=True)
class Asked:
    """A query with its responses and the turns after them.

    Attributes:
        source: of the query.
        dataset: of the query.
        contexts: one with each response.
        turns: ids, and which response they followed.
    """

    source: str
    dataset: str
    contexts: tuple[ChatContext, ...]
    turns: tuple[tuple[Ids, int], ...]


@dataclass(frozen=True)
class Arm:
    """Edges that are blocked in layers ``first`` to ``last``."""

    of: str
    first: int
    last: int


def arms_of(depth: int, window: int) -> list[Arm]:
    """The intact model, every kind of edge in all layers, in each window, and random edges.

    Args:
        depth: of the model.
        window: layers of a window; the next one begins half a window later. The last one ends with
            the last layer.
    """
    starts = sorted({*range(1, depth - window + 2, max(1, window // 2)), depth - window + 1})
    arms = [Arm(INTACT, 0, 0)]
    arms += [Arm(of, 1, depth) for of in EDGES]
    arms += [Arm(RANDOM + of, 1, depth) for of in EDGES]
    if window < depth:
        arms += [Arm(of, first, first + window - 1) for of in EDGES for first in starts]
    return arms


def blocked(model: PreTrainedModel, asked: Asked, arms: Sequence[Arm], seed: int) -> pd.DataFrame:
    """Log-likelihoods at T = 1 of a query's turns after each response, with edges blocked.

    Returns:
        A row per arm and turn: ``of``, ``first``, ``last``, ``turn``, ``followed``, and
        ``logprobs`` ``[responses]`` of the whole turn, in nats.
    """
    turns = [turn for turn, _ in asked.turns]
    scores = np.empty((len(arms), len(turns), len(asked.contexts)))
    for k, context in enumerate(asked.contexts):
        run = Continued(model, context.ids, min(places_of(context).values()), turns)
        rows = []
        for arm in arms:
            for number, turn in enumerate(turns):
                key = stream_key(seed, f"{asked.source}\x1f{arm.of}\x1f{k}", number)
                edges = edges_of(arm.of, context, run.start, turn, np.random.default_rng(key))
                layers = range(arm.first, arm.last + 1) if len(edges) else ()
                rows.append((number, [Block(layer, edges) for layer in layers]))
        found = run.score(rows)
        scores[:, :, k] = np.reshape([one.sum() for one in found], scores.shape[:2])
    return pd.DataFrame(_records(asked, arms, scores))


def _records(asked: Asked, arms: Sequence[Arm], scores: np.ndarray) -> Iterator[dict]:
    for arm, of_arm in zip(arms, scores, strict=True):
        for number, ((_, followed), each) in enumerate(zip(asked.turns, of_arm, strict=True)):
            yield {
                "of": arm.of,
                "first": arm.first,
                "last": arm.last,
                "turn": number,
                "followed": followed,
                "logprobs": each,
            }


def edges_of(
    of: str, context: ChatContext, start: int, turn: Ids, rng: np.random.Generator
) -> Tensor:
    """``[edges, 2]`` of a kind, or as many random ones; a turn's last token attends to nothing."""
    end = len(context.ids)
    spans = {
        "query": context.query,
        "response": context.response,
        "header": range(start, end),
        "turn": range(end, end + len(turn) - 1),
    }
    if of == INTACT:
        return torch.zeros(0, 2, dtype=torch.long)
    queries, keys = EDGES[of.removeprefix(RANDOM)]
    froms = [position for name in queries for position in spans[name]]
    edges = edges_between(froms, spans[keys])
    if of.startswith(RANDOM):
        allowed = other_edges(start, end + len(turn) - 1)
        edges = allowed[np.sort(rng.permutation(len(allowed))[: len(edges)])]
    return edges


def other_edges(start: int, tokens: int) -> Tensor:
    """``[edges, 2]`` that a control may block: of tokens from ``start`` on, but to SPARED ones.

    Models rest attention that they don't need on the first token, an attention sink (Xiao et al.
    2023, arXiv 2309.17453). A model without it is damaged, whatever else it may read.
    """
    return edges_between(range(start, tokens), range(SPARED, tokens))
