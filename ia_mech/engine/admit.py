"""Rows that join a batch that is already being decoded.

A shared layer only has to know their context. Layers that hold something of their own for each row,
a sliding window's last keys or a recurrent state, get theirs written over those of the line that
became free. What such layers hold ends with the newest token in every row, so a context that is
shorter than what the batch has seen gets padding on its left, and a longer one pads the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from ia_mech.engine.prefix import State, left_padding, selected
from ia_mech.engine.shared import SharedLayer

RECURRENT = ("conv_states", "recurrent_states")


def can_admit(state: State) -> bool:
    """Whether rows can join this batch: some layer is shared, and each is of a kind known here."""
    return state.lines is not None and all(map(_is_known, state.cache.layers))


def _is_known(layer) -> bool:
    recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
    holds_keys = isinstance(layer, DynamicLayer)
    return type(layer) in (SharedLayer, DynamicSlidingWindowLayer) or (recurrent and not holds_keys)


@torch.inference_mode()
def admit(
    state: State, lines: Sequence[int], source: State, index: Tensor, numbers: Sequence[int]
) -> None:
    """Rows begin in the given lines of a batch, in place.

    Args:
        state: the batch; ``can_admit`` said that it can.
        lines: of which nobody needs the rows any more, or that follow on the last one.
        source: prefilled contexts, left as they are.
        index: ``[lines]`` int64, which of them each line goes on from.
        numbers: ``[lines]``, by which number the batch calls that context.
    """
    at = torch.tensor(lines, device=index.device)
    rows = max(state.rows, max(lines) + 1)
    old, new = state.mask.shape[1], source.mask.shape[1]
    length = max(old, new)
    state.mask = put_rows(
        pad(state.mask, (length - old, 0)), pad(source.mask[index], (length - new, 0)), at, rows
    )
    state.position = put_rows(state.position, source.position[index], at, rows)
    state.lines.put(list(lines), list(numbers))
    padding = left_padding(source.mask)
    called = dict(zip(numbers, index.tolist(), strict=True))
    for layer, theirs in zip(state.cache.layers, source.cache.layers, strict=True):
        if isinstance(layer, SharedLayer):
            layer.refer(theirs, padding, called)
            layer.length = length
        elif isinstance(layer, DynamicSlidingWindowLayer):
            _put_window(layer, selected(theirs, index), at, rows, length)
        else:
            _put_recurrent(layer, selected(theirs, index), at, rows)


def put_rows(old: Tensor, new: Tensor, at: Tensor, rows: int) -> Tensor:
    """``old`` ``[fewer or rows, …]`` with ``new`` ``[lines, …]`` at the given rows, in place where
    there are as many."""
    if rows > old.shape[0]:
        old = torch.cat([old, old.new_zeros(rows - old.shape[0], *old.shape[1:])])
    old[at] = new
    return old


def _put_window(layer, fresh, at: Tensor, rows: int, length: int) -> None:
    held = min(length, layer.sliding_window - 1)
    for name in ("keys", "values"):
        ours, theirs = (
            pad(tensor, (0, 0, held - tensor.shape[-2], 0))
            for tensor in (getattr(layer, name), getattr(fresh, name))
        )
        setattr(layer, name, put_rows(ours, theirs, at, rows))
    layer.cumulative_length = length


def _put_recurrent(layer, fresh, at: Tensor, rows: int) -> None:
    for name in RECURRENT:
        ours, theirs = getattr(layer, name), getattr(fresh, name)
        for number, state in ours.items():
            if state is not None:
                ours[number] = put_rows(state, theirs[number], at, rows)
