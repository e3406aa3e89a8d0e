"""Contexts whose keys and values come from several contexts, token range by token range.

A hybrid is a context that never was: the query and the header of one conversation, say, around the
response of another. Keys carry the position that they were computed at, so what is spliced together
has to agree on positions. Contexts that are to be spliced are therefore prefilled so that all *end*
at the same position (:func:`aligned`): attention with rotary embeddings depends on distances alone,
and what stands at the same distance from the end is at the same position in all of them. A piece of
another length needs no turning of keys; it begins earlier or later. What comes after the splice may
be computed anew: contexts are spliced where they are cut off, and the rest is fed with the turn.

Only layers whose prefix rows can share take part (:attr:`ia_mech.engine.shared.Engine.shared`). In
the others, those with a sliding window or a recurrent state, a hybrid has what its recipient has.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.shared import held
from ia_mech.engine.state import (
    Prefilled,
    Prefix,
    State,
    expand,
    forward,
    is_full,
    prefill,
    rows_of,
)


@dataclass(frozen=True)
class Piece:
    """Tokens of one of the contexts: ``start`` up to ``stop``, counted as in its ids."""

    context: int
    start: int
    stop: int


@dataclass(frozen=True)
class Hybrid:
    """What a hybrid is made of.

    Attributes:
        recipient: the context whose place it takes: what follows is at its positions, and layers
            that can't be spliced are its own.
        pieces: in order; the last one ends where its context ends.
    """

    recipient: int
    pieces: tuple[Piece, ...]


def aligned(model: PreTrainedModel, contexts: Sequence[Sequence[int]]) -> Prefilled:
    """Prefill contexts together, all ending at the same position.

    Args:
        model: an installed model whose positions are relative (rotary or none).
        contexts: token ids of each.
    """
    longest = max(map(len, contexts))
    return prefill(model, [Prefix(ids, start=longest - len(ids)) for ids in contexts])


def continued(
    model: PreTrainedModel, group: Prefilled, ids: Sequence[int], positions: Sequence[int] = ()
) -> Prefilled:
    """The contexts of a group, each with the same further tokens; the group is left as it is.

    Args:
        model: of the group.
        ids: the further tokens.
        positions: indices into them at which the residual stream is captured.
    """
    count = len(group.logits)
    state = expand(model, [group], range(count), copies=True)
    tokens = torch.tensor([list(ids)] * count)
    logits, residuals = forward(
        model,
        state,
        tokens,
        torch.ones_like(tokens),
        captured=[positions] * count if positions else None,
    )
    return Prefilled(state, logits[:, -1], residuals)


@torch.inference_mode()
def spliced(group: Prefilled, hybrids: Sequence[Hybrid]) -> Prefilled:
    """Hybrids as a group of contexts that rows can go on from.

    Args:
        group: contexts of :func:`aligned`; left as they are.
        hybrids: what to make of them.

    Returns:
        The hybrids in their order. Their ``logits`` are those of the contexts that the last pieces
        are of: the distribution of a first token is that of the last header state.
    """
    mask, device = group.state.mask, group.state.mask.device
    width = mask.shape[1]
    padding = (width - mask.sum(1)).tolist()
    lengths = [sum(piece.stop - piece.start for piece in one.pieces) for one in hybrids]
    longest = max(lengths)
    # Where each token of each hybrid is in the group: context and column; padding is anywhere.
    row, column = torch.zeros(2, len(hybrids), longest, dtype=torch.long)
    real = torch.zeros(len(hybrids), longest, dtype=torch.long)
    for number, one in enumerate(hybrids):
        at = longest - lengths[number]
        real[number, at:] = 1
        for piece in one.pieces:
            end = at + piece.stop - piece.start
            row[number, at:end] = piece.context
            column[number, at:end] = torch.arange(piece.start, piece.stop) + padding[piece.context]
            at = end
    recipients = torch.tensor([one.recipient for one in hybrids])
    cache = copy.copy(group.state.cache)
    cache.layers = []
    for layer in group.state.cache.layers:
        if is_full(layer):
            cache.layers.append(_gather_tokens(layer, row.to(device), column.to(device)))
        else:
            cache.layers.append(rows_of([layer], [recipients], width))
    state = State(cache, real.to(device), group.state.position[recipients.to(device)])
    last = torch.tensor([one.pieces[-1].context for one in hybrids])
    return Prefilled(state, group.logits[last.to(device)], None)


def _gather_tokens(layer, row: Tensor, column: Tensor):
    """A full-attention layer with the given tokens ``[hybrids, tokens]`` of its contexts."""
    twin = copy.copy(layer)
    # [hybrids, tokens, kv_heads, dim] → [hybrids, kv_heads, tokens, dim]
    twin.keys, twin.values = (
        each[row, :, column].transpose(1, 2).contiguous() for each in held(layer)
    )
    return twin
