"""A control: other edges that carry as much attention as those of a kind."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.given_turns import Ids, places_of
from experiments.knockout.block import EDGES, Asked, edges_of, other_edges
from ia_mech.engine.intervene import Block
from ia_mech.engine.sampling import stream_key
from ia_mech.likelihood.intervened import Continued

MATCHED = "edges of as much attention as "


def blocked_matched(model: PreTrainedModel, asked: Asked, depth: int, seed: int) -> pd.DataFrame:
    """Log-likelihoods of a query's turns with matched edges blocked in all layers.

    Returns:
        Rows as of :func:`experiments.knockout.block.blocked`, one per kind of edges and turn, with
        ``reached`` ``[responses]``: the attention of the edges drawn over that of the kind, the
        mean of the layers.
    """
    turns = [turn for turn, _ in asked.turns]
    shape = len(EDGES), len(turns), len(asked.contexts)
    scores, reached = np.empty(shape), np.empty(shape)
    for k, context in enumerate(asked.contexts):
        run = Continued(model, context.ids, min(places_of(context).values()), turns)
        rows = []
        for number, turn in enumerate(turns):
            weights = attention(model, (*context.ids, *turn[:-1]))
            for of in EDGES:
                own = edges_of(of, context, run.start, turn, np.random.default_rng(0))
                key = stream_key(seed, f"{asked.source}\x1f{MATCHED}{of}\x1f{k}", number)
                drawn, share = matched(weights, own, run.start, np.random.default_rng(key))
                blocks = [Block(at, edges) for at, edges in enumerate(drawn, 1) if len(edges)]
                rows.append((number, blocks))
                reached[list(EDGES).index(of), number, k] = share
        found = [one.sum() for one in run.score(rows)]
        scores[:, :, k] = np.reshape(found, (len(turns), len(EDGES))).T
    return pd.DataFrame(
        {"of": MATCHED + of, "first": 1, "last": depth, "turn": number, "followed": followed}
        | {"logprobs": scores[kind, number], "reached": reached[kind, number]}
        for kind, of in enumerate(EDGES)
        for number, (_, followed) in enumerate(asked.turns)
    )


def attention(model: PreTrainedModel, ids: Ids) -> Tensor:
    """``[layers, tokens, tokens]`` of each token to each other, the mean of the heads."""
    with _eager(model), torch.inference_mode():
        tokens = torch.tensor([ids], device=model.device)
        found = model(input_ids=tokens, use_cache=False, output_attentions=True)
    return torch.stack([one[0].float().mean(0).cpu() for one in found.attentions])


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """The one back end that returns its weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def matched(
    weights: Tensor, edges: Tensor, start: int, rng: np.random.Generator
) -> tuple[list[Tensor], float]:
    """Other edges of tokens from ``start`` on, in each layer of as much attention as these.

    Edges are taken in random order as long as the attention of those taken doesn't exceed that of
    the edges given.

    Args:
        weights: ``[layers, tokens, tokens]``.
        edges: ``[edges, 2]``.
        start: of the tokens whose edges may be drawn.
        rng: of the order.

    Returns:
        ``[edges, 2]`` of each layer, and the mean of the layers of the attention that they carry,
        as a share of that of the edges given (1 where that is 0).
    """
    allowed = other_edges(start, weights.shape[-1])
    taken = set(map(tuple, edges.tolist()))
    others = allowed[[tuple(pair) not in taken for pair in allowed.tolist()]]
    found, shares = [], []
    for layer in weights:
        wanted = float(layer[edges[:, 0], edges[:, 1]].double().sum())
        order = others[rng.permutation(len(others))]
        values = layer[order[:, 0], order[:, 1]].double().numpy()
        kept, total = [], 0.0
        for number, value in enumerate(values):
            if total + value <= wanted:
                kept.append(number)
                total += value
        found.append(order[kept])
        shares.append(total / wanted if wanted > 0 else 1.0)
    return found, float(np.mean(shares))
