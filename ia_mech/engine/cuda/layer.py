"""A cache layer of fixed addresses: prefixes in slots, and each line's own keys and values.

What a step reads and writes is told by tensors, never by numbers of Python: a CUDA graph replays
the addresses and the shapes that it saw, and only what is stored there may change.
"""

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ia_mech.engine.attention import attend, merge
from ia_mech.engine.cuda import kernels
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.shared import PrefixLayer


@dataclass(frozen=True)
class View:
    """What all layers look at during one step of a bucket.

    Attributes:
        sizes: of the bucket.
        place: ``[lines]`` int64, where each line writes its keys and values.
        length: ``[slots]`` int64, tokens of each slot's context.
        line_at, seat_of: as :meth:`ia_mech.engine.cuda.seating.Seating.tables` makes them, the
            first one flat.
        own_bias: ``[lines, 1, 1, own]``, 0 up to that place and minus infinity after it; None for
            kernels, which read the place.
        prefix_bias: ``[slots, 1, 1, prefix]``, 0 for tokens of the slot's context, else minus
            infinity; None for kernels, which read the length.
    """

    sizes: Sizes
    place: Tensor
    length: Tensor
    line_at: Tensor
    seat_of: Tensor
    own_bias: Tensor | None = None
    prefix_bias: Tensor | None = None


class StaticLayer(PrefixLayer):
    """Buffers of one layer.

    Args:
        layer: a prefilled layer, whose keys and values say heads, dimensions, dtype and device.
        sizes: of the batch.
        by_kernels: attention is made by :mod:`ia_mech.engine.cuda.kernels`.

    Attributes:
        own: keys and values ``[lines, kv_heads, own, dim]`` of the lines' own tokens.
        prefix: keys and values ``[slots, kv_heads, prefix, dim]`` of contexts, without padding.
        view: of the step that is being made.
        by_kernels: as given.
    """

    def __init__(self, layer: DynamicLayer, sizes: Sizes, by_kernels: bool = False) -> None:
        super().__init__()
        self.by_kernels = by_kernels
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        # Zeros: what nobody wrote yet is multiplied with a weight of zero.
        self.own, self.prefix = (
            tuple(
                tensor.new_zeros(count, tensor.shape[1], room, tensor.shape[-1])
                for tensor in (layer.keys, layer.values)
            )
            for count, room in ((sizes.lines, sizes.own), (sizes.slots, sizes.prefix))
        )
        self.keys, self.values = self.own
        self.view: View | None = None

    def put_prefix(self, slot: int, layer: DynamicLayer, context: int, padding: int) -> None:
        """Copy a context's keys and values from a prefill, without its left padding, to a slot."""
        for buffer, tensor in zip(self.prefix, (layer.keys, layer.values), strict=True):
            tokens = tensor.shape[2] - padding
            buffer[slot, :, :tokens] = tensor[context, :, padding:]

    def move_prefix(self, start: int, to: int) -> None:
        """What is in one slot is copied to another."""
        for buffer in self.prefix:
            buffer[to] = buffer[start]

    def keep(self, index: Tensor) -> None:
        """The lines ``index`` ``[kept]`` int64 become the first ones, in place."""
        for buffer in self.own:
            buffer[: len(index)] = buffer[index]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values ``[lines, kv_heads, 1, dim]``; returns the lines' own,
        all their room."""
        self.demand_attention()
        lines, place = self.view.sizes.lines, self.view.place[:, None, None, None]
        for buffer, states in zip(self.own, (key_states, value_states), strict=True):
            buffer[:lines].scatter_(2, place.expand_as(states), states)
        keys, values = (buffer[:lines] for buffer in self.own)
        return self.hand_out(keys), values

    def get_seq_length(self) -> int:
        """Of prefix and own tokens, as far as there is room; the model is told the positions."""
        return self.prefix[0].shape[2] + self.own[0].shape[2]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one query a line, ``[lines, heads, 1, dim]``, over prefix and own tokens;
        arguments and result as for :meth:`ia_mech.engine.shared.SharedLayer.attend`."""
        self.waiting = False
        view, (prefix_keys, prefix_values) = self.view, self.prefix
        slots, seats = view.sizes.slots, view.sizes.seats
        numbers = {"scaling": scaling, "softcap": softcap}
        if self.by_kernels:
            return kernels.attend(
                query, (key, value), (prefix_keys[:slots], prefix_values[:slots]),
                place=view.place, length=view.length, line_at=view.line_at, seat_of=view.seat_of,
                sinks=sinks, **numbers,
            )  # fmt: skip
        own = attend(query, key, value, bias=view.own_bias, **numbers)

        _, heads, _, dim = query.shape
        kv_heads = prefix_keys.shape[1]
        # Seats and the heads of a group become the rows of one matrix per slot and key-value head.
        seated = query[view.line_at].view(slots, seats, kv_heads, -1, dim).transpose(1, 2)
        seated = seated.reshape(slots, kv_heads, -1, dim)
        bias = view.prefix_bias.expand(-1, -1, seated.shape[2], -1)
        average, total = attend(
            seated, prefix_keys[:slots], prefix_values[:slots], bias=bias, **numbers
        )
        average = average.view(slots, kv_heads, seats, -1, average.shape[-1]).transpose(1, 2)
        total = total.view(slots, kv_heads, seats, -1).transpose(1, 2)
        before = (
            average.reshape(slots * seats, heads, 1, -1)[view.seat_of],
            total.reshape(slots * seats, heads, 1)[view.seat_of],
        )
        return merge([before, own], sinks)
