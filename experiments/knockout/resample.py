"""Turns that are sampled while edges are blocked, and their likelihoods under the same knockout."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from experiments.given_turns import TOKENS, Ids, places_of
from experiments.knockout.block import EDGES, INTACT, Arm, Asked, blocked, edges_of
from ia_mech.chat.format import ChatContext
from ia_mech.engine.intervene import Block, intervene
from ia_mech.engine.state import Prefix, expand, forward, prefill
from ia_mech.engine.sampling import gumbel, stream_key

Window = tuple[int, int]  # first and last layer


def windows_of(windows: Iterable[Window]) -> list[Arm]:
    """The intact model, and every kind of edge in each of the windows."""
    return [
        Arm(INTACT, 0, 0),
        *(Arm(of, *window) for window in dict.fromkeys(windows) for of in EDGES),
    ]


def resampled(
    model: PreTrainedModel,
    asked: Asked,
    arms: Sequence[Arm],
    samples: int,
    stops: Sequence[int],
    seed: int,
) -> pd.DataFrame:
    """Log-likelihoods of turns that each arm writes itself, after each response.

    Args:
        model: the subject model.
        asked: a query; its own turns aren't used.
        arms: all but random edges.
        samples: turns after each response.
        stops: ids that end a turn.
        seed: of the draws, which all arms share.

    Returns:
        Rows as of :func:`experiments.knockout.block.blocked`, with ``token_ids`` of the turn.
    """
    written = []  # [responses][arms][samples]
    for k, context in enumerate(asked.contexts):
        keys = [stream_key(seed, f"{asked.source}\x1f{k}", number) for number in range(samples)]
        written.append(sampled(model, context, arms, keys, stops))
    parts = []
    for number, arm in enumerate(arms):
        turns = tuple((turn, k) for k, some in enumerate(written) for turn in some[number])
        made = blocked(model, replace(asked, turns=turns), [arm], seed)
        parts.append(made.assign(token_ids=[list(turn) for turn, _ in turns]))
    return pd.concat(parts, ignore_index=True)


@torch.inference_mode()
def sampled(
    model: PreTrainedModel,
    context: ChatContext,
    arms: Sequence[Arm],
    keys: Sequence[tuple[int, int]],
    stops: Sequence[int],
) -> list[list[Ids]]:
    """``[arms][keys]`` turns at T = 1, of :data:`TOKENS` tokens at most, the turn end included.

    :mod:`ia_mech.engine.loop` does the same to all tokens of a turn; here each has its own edges.

    Args:
        model: the subject model.
        context: that they follow.
        arms: all but random edges.
        keys: of the draws, as :func:`ia_mech.engine.sampling.stream_key` makes them.
        stops: ids that end a turn.
    """
    start, end = min(places_of(context).values()), len(context.ids)
    rows = len(arms) * len(keys)
    index = torch.zeros(rows, dtype=torch.long, device=model.device)
    state = expand(prefill(model, [Prefix(context.ids[:start])]).state, index, capacity=TOKENS)
    streams = torch.tensor(keys, device=model.device)
    new = torch.tensor([context.ids[start:]] * rows, device=model.device)
    tokens = new[:, :0]
    for step in range(TOKENS):
        first = start if step == 0 else end + step - 1
        blocks = [_blocks(arm, context, start, step, first) for arm in arms for _ in keys]
        with intervene(model, blocks, [first] * rows):
            logits = forward(model, state, new, torch.ones_like(new))[:, -1]
        noise = gumbel(streams, step, logits.shape[1]).repeat(len(arms), 1)
        new = (logits + noise).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], dim=1)
        if torch.isin(tokens, torch.tensor(stops, device=tokens.device)).any(1).all():
            break
    turns = [_ended(row, stops) for row in tokens.tolist()]
    return [turns[at : at + len(keys)] for at in range(0, rows, len(keys))]


def _blocks(arm: Arm, context: ChatContext, start: int, step: int, first: int) -> list[Block]:
    """What an arm blocks of tokens from ``first`` on, ``step`` of them the turn's."""
    turn = (0,) * (step + 1)  # its last token is still to be drawn
    edges = edges_of(arm.of, context, start, turn, np.random.default_rng(0))
    edges = edges[edges[:, 0] >= first]
    return [Block(layer, edges) for layer in range(arm.first, arm.last + 1)] if len(edges) else []


def _ended(tokens: Sequence[int], stops: Sequence[int]) -> Ids:
    """A row up to its turn end."""
    ends = [at for at, token in enumerate(tokens) if token in stops]
    return tuple(tokens[: ends[0] + 1] if ends else tokens)
