"""A full-attention cache layer that writes into room made ahead.

``DynamicCache`` concatenates keys and values anew at every step. At 33 rows of 280 tokens that
copying takes more than half of a decoding step on a CPU; writing in place takes nothing.
"""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """Rows of a prefilled layer, with room for the tokens to come.

    ``keys`` and ``values`` are views of the used part of larger buffers, so everything that reads a
    ``DynamicLayer`` reads this one alike. Tokens beyond the room make it grow.

    Args:
        layer: the prefilled layer, left as it is.
        index: ``[rows]`` int64, which of its rows to copy.
        room: for how many tokens more.
    """

    def __init__(self, layer: DynamicLayer, index: Tensor, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self._buffers = tuple(_with_room(t, index, room) for t in (layer.keys, layer.values))
        self._use(layer.keys.shape[-2])

    def _use(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[rows, heads, new, head_dim]``; returns all there are."""
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            everyone = torch.arange(self.keys.shape[0], device=self.device)
            self._buffers = tuple(_with_room(t, everyone, end) for t in (self.keys, self.values))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self._use(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the given rows, in the given order, in buffers of their own."""
        length = self.keys.shape[-2]
        self._buffers = tuple(buffer.index_select(0, beam_idx) for buffer in self._buffers)
        self._use(length)


def _with_room(tensor: Tensor, index: Tensor, room: int) -> Tensor:
    """``tensor[index]``, ``[rows, heads, length, dim]``, with ``room`` more along the length."""
    _, heads, length, dim = tensor.shape
    buffer = tensor.new_empty(len(index), heads, length + room, dim)
    for row, source in enumerate(index.tolist()):  # straight into place, without a copy between
        buffer[row, :, :length] = tensor[source]
    return buffer
