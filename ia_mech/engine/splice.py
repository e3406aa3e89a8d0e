"""Make contexts whose states come from several contexts, one range of tokens after another.

A hybrid is a context that no conversation has: the query and the header of one, say, around the
response of another. Keys carry the position that they were computed at, so the pieces of a hybrid
have to agree on positions. Contexts are therefore prefilled so that all *end* at the same position
(:func:`aligned`). Attention with rotary embeddings depends on distances alone, and tokens at the
same distance from the end have the same position in all of them. A piece of another length begins
earlier or later; its keys needn't be rotated again. Tokens after the splice may be computed anew:
contexts are spliced where they are cut off, and the rest is fed with the turn.

Keys and values are spliced token by token. Layers with a sliding window keep those of all tokens
for this, since the window then counts the hybrid's tokens. A recurrent layer has a state at the
cut, which holds all tokens before it and is taken whole from one context. The inputs of its
convolution, which come from the last few tokens, are those of the last piece.

A hybrid that takes everything from one context equals that context; :func:`check_ceiling` refuses a
model where it doesn't.

Tokens may also be computed anew while they see few others (:func:`in_blocks`). This separates what
their keys and values hold of themselves from what they gathered from further away.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from ia_mech.engine.shared import held
from ia_mech.engine.state import Prefilled, Prefix, State, expand, forward, prefill
from ia_mech.errors import UserError

# Kinds of layers, as transformers names them, whose whole state is known.
SPLICED = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "dummy"}
RECURRENT = {"linear_attention", "hybrid"}
SINKS = 4  # first tokens of a context, which draw attention whatever they say (2309.17453)
ROUNDINGS = 16  # epsilons by which a hybrid of everything may be off, as in check.py


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
        recipient: the context whose place it takes: what follows gets this context's positions.
        pieces: in order; the last one ends where its context ends.
        state: the context whose recurrent states it has; the recipient where none is given.
    """

    recipient: int
    pieces: tuple[Piece, ...]
    state: int | None = None


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kind of each layer of a model's cache, in ``transformers``' words."""
    return get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]


@dataclass(frozen=True)
class Foreign:
    """Pieces of another context in a context that is prefilled.

    Attributes:
        ids: of the other context.
        pieces: of 0, the context itself, and of 1, the other.
        state: which of them the recurrent states are of.
    """

    ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    state: int


def prefill_foreign(model: PreTrainedModel, prefix: Prefix, foreign: Foreign) -> Prefilled:
    """A context with pieces of another one, which rows can go on from; its residuals are those of
    the context as it was."""
    group = aligned(model, [prefix.ids, foreign.ids], prefix.positions)
    made = spliced(group, [Hybrid(0, foreign.pieces, foreign.state)])
    residuals = None if group.residuals is None else group.residuals[:1]
    return Prefilled(made.state, made.logits, residuals)


def aligned(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], positions: Sequence[int] = ()
) -> Prefilled:
    """Prefill contexts together, all ending at the same position.

    Args:
        model: an installed model whose positions are relative (rotary or none).
        contexts: token ids of each.
        positions: of the first context, at which its residual stream is captured.

    Raises:
        UserError: names the layers whose states can't be spliced.
    """
    kinds = enumerate(layer_kinds(model.config), start=1)
    others = [f"{n} ({kind})" for n, kind in kinds if kind not in SPLICED]
    if others:
        raise UserError(
            f"contexts of {type(model).__name__} can't be spliced: layers {', '.join(others)}",
            f"use a model with no layers but {', '.join(sorted(SPLICED - {'dummy'}))}",
        )
    longest, places = max(map(len, contexts)), [positions, *[[-1] * len(positions)] * len(contexts)]
    each = zip(contexts, places, strict=False)
    prefixes = [Prefix(ids, at, start=longest - len(ids)) for ids, at in each]
    return prefill(model, prefixes, whole=True)


def continued(
    model: PreTrainedModel, group: Prefilled, ids: Sequence[int], positions: Sequence[int] = ()
) -> Prefilled:
    """Feed each context of a group the same further tokens; the group is left as it is.

    Args:
        model: the group's.
        ids: the further tokens.
        positions: indices into them at which the residual stream is captured.
    """
    count = len(group.logits)
    state = expand(model, [group], range(count), copies=True)
    logits, residuals = _fed(model, state, ids, positions)
    return Prefilled(state, logits[:, -1], residuals)


def _fed(model: PreTrainedModel, state: State, ids: Sequence[int], positions: Sequence[int]):
    """Feed every row the same tokens; returns logits and residuals."""
    tokens = torch.tensor([list(ids)] * state.rows)
    captured = [positions] * state.rows if positions else None
    return forward(model, state, tokens, torch.ones_like(tokens), captured=captured)


@torch.inference_mode()
def spliced(group: Prefilled, hybrids: Sequence[Hybrid]) -> Prefilled:
    """Make hybrids: a group of contexts that rows can go on from.

    Args:
        group: contexts of :func:`aligned`, or hybrids of them; left as they are.
        hybrids: how each is made.

    Returns:
        The hybrids in their order. A hybrid's ``logits`` are those of the context that its last
        piece is from, since the last header state alone decides the first token.
    """
    mask = group.state.mask
    width = mask.shape[1]
    padding = (width - mask.sum(1)).cpu().tolist()
    lengths = [sum(piece.stop - piece.start for piece in one.pieces) for one in hybrids]
    longest = max(lengths)
    # The context and column in the group of each hybrid's tokens; at padding, any will do.
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
    last = torch.tensor([one.pieces[-1].context for one in hybrids])
    held_by = [one.recipient if one.state is None else one.state for one in hybrids]
    cache = copy.copy(group.state.cache)
    cache.layers = [
        _spliced_layer(layer, row, column, torch.tensor(held_by), last)
        for layer in group.state.cache.layers
    ]
    position = group.state.position
    state = State(cache, real.to(mask.device), position[recipients.to(position.device)])
    return Prefilled(state, group.logits[last.to(group.logits.device)], None)


def _spliced_layer(layer: Any, row: Tensor, column: Tensor, states: Tensor, last: Tensor) -> Any:
    """A cache layer with the tokens ``[hybrids, tokens]`` of its contexts, the recurrent states of
    ``states`` ``[hybrids]`` and the convolutions' inputs of ``last`` ``[hybrids]``."""
    twin = copy.copy(layer)
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        where = held(layer)[0].device
        row, column = row.to(where), column.to(where)
        # [hybrids, tokens, kv_heads, dim] → [hybrids, kv_heads, tokens, dim]
        twin.keys, twin.values = (
            each[row, :, column].transpose(1, 2).contiguous() for each in held(layer)
        )
    if isinstance(layer, DynamicSlidingWindowLayer):
        twin.cumulative_length = row.shape[1]
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name, of in (("conv_states", last), ("recurrent_states", states)):
            each = dict(getattr(layer, name))
            for number, one in each.items():
                if one is not None:
                    each[number] = one[of.to(one.device)]
            setattr(twin, name, each)
    return twin


@torch.inference_mode()
def in_blocks(
    model: PreTrainedModel,
    group: Prefilled,
    contexts: Sequence[Sequence[int]],
    starts: Sequence[int],
    width: int | None,
    seed: int | None = None,
) -> Prefilled:
    """Contexts whose last tokens are computed anew and see only the first :data:`SINKS` and those
    of their own block.

    Args:
        model: without recurrent layers.
        group: the contexts, as :func:`aligned` gives them; left as they are.
        contexts: token ids of each.
        starts: for each, its first token that is computed anew; all later ones are, too.
        width: tokens of a block; None: one block for all of them.
        seed: for the control, in which each token sees the same number of tokens, but the others
            are drawn from all between ``starts`` and itself, as first computed.
    """
    old, cache = group.state, copy.copy(group.state.cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    full = _full(cache.layers)
    for layer in full:
        layer.keys, layer.values = (one.clone() for one in held(layer))
    lengths, rng = old.mask.sum(1), np.random.default_rng(seed)
    for number, (ids, start) in enumerate(zip(contexts, starts, strict=True)):
        step = 1 if seed is not None else width or len(ids)
        if not (firsts := range(start, len(ids), step)):
            continue
        seen = []
        for first in firsts:  # the token or the block that begins there
            others = [] if seed is None else rng.permutation(np.arange(start, first)).tolist()
            drawn = [Piece(number, k, k + 1) for k in sorted(others[: (width or len(ids)) - 1])]
            seen.append(Hybrid(number, (Piece(number, 0, SINKS), *drawn)))
        state = expand(model, [spliced(group, seen)], range(len(seen)), copies=True)
        before, where = state.mask.shape[1], torch.tensor(firsts)
        state.position = (old.position - lengths)[number] + where.to(old.position.device)
        each = [torch.tensor(ids[first : first + step]) for first in firsts]
        fed, mask = (pad_sequence(x, True) for x in (each, [torch.ones_like(x) for x in each]))
        forward(model, state, fed, mask)
        block, at = mask.nonzero().T
        column = old.mask.shape[1] - int(lengths[number]) + where[block] + at
        for layer, other in zip(full, _full(state.cache.layers), strict=True):
            for own, taken in zip(held(layer), held(other), strict=True):
                own[number][:, column] = taken[block, :, before + at].transpose(0, 1)
    return Prefilled(State(cache, old.mask, old.position), group.logits, None)


def _full(layers: Sequence[Any]) -> list[DynamicLayer]:
    """Those that hold keys and values."""
    return [one for one in layers if isinstance(one, DynamicLayer) and one.is_initialized]


@torch.inference_mode()
def arriving(
    model: PreTrainedModel, group: Prefilled, hybrids: Sequence[Hybrid], ids: Sequence[int]
) -> Tensor:
    """How much of the difference between donor and recipient arrives at tokens after a hybrid.

    Args:
        group: contexts of :func:`aligned`.
        hybrids: one for each context, which is the hybrid's donor.

    Returns:
        ``[contexts, layers]`` 1 − ‖hybrid − donor‖ / ‖recipient − donor‖ of the residual stream at
        these tokens, behind each block.
    """
    hybrid, donor = (
        _fed(model, expand(model, [one], range(len(one.logits)), len(ids)), ids, range(len(ids)))[1]
        for one in (spliced(group, hybrids), group)
    )
    recipient = donor[[one.recipient for one in hybrids]]
    off, apart = (
        (each - donor)[:, 1:].float().flatten(2).norm(dim=-1) for each in (hybrid, recipient)
    )
    return (1 - off / apart.clamp(min=torch.finfo(torch.float32).tiny)).cpu()


def of_everything(group: Prefilled) -> list[Hybrid]:
    """For each context a hybrid that takes everything from it, in the next one's place."""
    lengths = group.state.mask.sum(1).cpu().tolist()
    return [
        Hybrid((donor + 1) % len(lengths), (Piece(donor, 0, length),), donor)
        for donor, length in enumerate(lengths)
    ]


def check_ceiling(model: PreTrainedModel, group: Prefilled, ids: Sequence[int]) -> None:
    """Refuse a model whose hybrids don't get everything that is put into them.

    Args:
        model, group, ids: as for :func:`arriving`. Both passes have the same shape and differ only
            at masked tokens, so that only rounding may differ.

    Raises:
        UserError: names the layers behind which a hybrid of everything isn't its donor.
    """
    share = arriving(model, group, of_everything(group), ids).amin(0)
    least = 1 - ROUNDINGS * torch.finfo(model.dtype).eps
    each = enumerate(share.tolist(), start=1)
    short = [f"{n} ({one:.2f})" for n, one in each if not one >= least]
    if short:
        raise UserError(
            f"contexts of {type(model).__name__} with everything spliced in differ from the donor: "
            f"the share of the change that arrives behind layers {', '.join(short)} isn't 1",
            "use a model whose layers can be spliced",
        )
