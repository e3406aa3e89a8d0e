"""A cache layer of fixed addresses: prefixes in slots, and each line's own keys and values.

What a step reads and writes is told by tensors, never by numbers of Python: a CUDA graph replays
the addresses and the shapes that it saw, and only what is stored there may change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ia_mech.engine.cuda import kernels
from ia_mech.engine.cuda.sizes import Sizes, keys_and_values, window_of
from ia_mech.engine.prefill import CacheLayer
from ia_mech.engine.shared_prefix import PrefixLayer, attend, merge


@dataclass(frozen=True)
class View:
    """What all layers look at during one step of a bucket.

    Attributes:
        sizes: of the bucket.
        place: ``[lines]`` int64, where each line writes its keys and values.
        length: ``[slots]`` int64, tokens of each slot's context.
        line_at, seat_of: as :meth:`ia_mech.engine.cuda.seating.Seating.tables` makes them, the
            first one flat.
        by_kernels: attention is made by :mod:`ia_mech.engine.cuda.kernels`, without biases.
        biases: those that were asked for; layers of the same window share them.
    """

    sizes: Sizes
    place: Tensor
    length: Tensor
    line_at: Tensor
    seat_of: Tensor
    by_kernels: bool = False
    biases: dict[tuple, Tensor] = field(default_factory=dict)

    def held(self, window: int | None) -> Tensor:
        """``[slots]`` int64, how many tokens of each context a layer of this window holds: the last
        ones, as many as the first of its own tokens sees."""
        return self.length if window is None else self.length.clamp(max=window - 1)

    def own_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """``[lines, 1, 1, own]``, minus infinity where a line doesn't see its own token, else 0."""

        def unseen() -> Tensor:
            tokens = torch.arange(self.sizes.own, device=self.place.device)
            place = self.place[:, None]
            later = tokens > place
            return later if window is None else later | (tokens <= place - window)

        return self._bias(("own", window), unseen, dtype)[:, None, None]

    def prefix_bias(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Minus infinity where a query doesn't see a token that its slot holds, else 0.

        Args:
            window: of the layer.
            group: heads that share a key.
            dtype: of the queries.

        Returns:
            ``[slots, 1, seats * group, room]``, or ``[slots, 1, 1, room]`` without a window.
        """
        slots, seats = self.sizes.slots, self.sizes.seats

        def unseen() -> Tensor:
            held = self.held(window)[:, None, None]
            tokens = torch.arange(self.sizes.room(window), device=self.place.device)
            none_there = tokens >= held
            if window is None:
                return none_there
            place = self.place[self.line_at].view(slots, seats, 1)
            passed = none_there | (tokens <= held + place - window)
            return passed[:, :, None].expand(-1, -1, group, -1).reshape(slots, seats * group, -1)

        return self._bias(("prefix", window, group), unseen, dtype)[:, None]

    def _bias(self, name: tuple, unseen: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """Zeros with minus infinity where ``unseen`` is true, made once for each name."""
        if name not in self.biases:
            hidden = unseen()
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.biases[name] = zeros.masked_fill_(hidden, -torch.inf)
        return self.biases[name]


class StaticLayer(PrefixLayer):
    """Buffers of one layer.

    Args:
        layer: a prefilled layer, whose keys and values say heads, dimensions, dtype and device.
        sizes: of the batch.

    Attributes:
        window: tokens of its sliding window, the newest one included; None = it sees all.
        own: keys and values ``[lines, kv_heads, own, dim]`` of the lines' own tokens.
        prefix: keys and values ``[slots, kv_heads, room, dim]`` of contexts, without padding; under
            a window only of the last tokens that somebody may see.
        view: of the step that is being made.
    """

    def __init__(self, layer: DynamicLayer, sizes: Sizes) -> None:
        super().__init__()
        tensors = keys_and_values(layer)
        self.dtype, self.device, self.is_initialized = tensors[0].dtype, tensors[0].device, True
        self.window = window_of(layer)
        # Zeros: what nobody wrote yet is multiplied with a weight of zero.
        self.own, self.prefix = (
            tuple(
                tensor.new_zeros(count, tensor.shape[1], room, tensor.shape[-1])
                for tensor in tensors
            )
            for count, room in (
                (sizes.lines, sizes.own),
                (sizes.slots, sizes.room(self.window)),
            )
        )
        self.keys, self.values = self.own
        self.view: View | None = None

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return [*self.own, *self.prefix]

    def forget_rows(self) -> None:
        """Nothing: each row writes its own keys before it looks at them."""

    def look(self, view: View) -> None:
        """What follows is a step of this view."""
        self.view = view

    def begin(self, lines: Tensor, layer: CacheLayer, contexts: Tensor) -> None:
        """Nothing: a row that begins has no keys of its own, and its context's are in a slot."""

    def put_prefixes(
        self, slots: Tensor, layer: CacheLayer, contexts: Tensor, padding: Tensor
    ) -> None:
        """Copy contexts' keys and values from a prefill, without their left padding, to slots.

        All at once, however long they are: after a short one its last token is repeated, which
        nobody looks at.

        Args:
            slots: ``[contexts]`` int64.
            layer: of the prefill.
            contexts: ``[contexts]`` int64, which of its rows.
            padding: ``[contexts]`` int64, of each of them.
        """
        assert isinstance(layer, DynamicLayer)  # the model's layer that this one stands in for
        tensors = keys_and_values(layer)
        held = tensors[0].shape[2]
        # A window let go of the first tokens, which padding is the first of.
        gone = 0 if self.window is None else layer.get_seq_length() - held
        first = (padding - gone).clamp(min=0)
        at = (first[:, None] + torch.arange(held, device=first.device)).clamp(max=held - 1)
        for buffer, tensor in zip(self.prefix, tensors, strict=True):
            chosen = tensor[contexts[:, None], :, at]  # [contexts, held, kv_heads, dim]
            buffer[slots, :, :held] = chosen.transpose(1, 2)

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
        assert self.view is not None  # every step begins with a look
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
        arguments and result as for :meth:`ia_mech.engine.shared_prefix.SharedLayer.attend`."""
        self.waiting = False
        view, (prefix_keys, prefix_values) = self.view, self.prefix
        assert view is not None  # as in update
        slots, seats = view.sizes.slots, view.sizes.seats
        if view.by_kernels:
            return kernels.attend(
                query, (key, value), (prefix_keys[:slots], prefix_values[:slots]),
                place=view.place, length=view.held(self.window), line_at=view.line_at,
                seat_of=view.seat_of, scaling=scaling, softcap=softcap, sinks=sinks,
                window=self.window,
            )  # fmt: skip
        bias = view.own_bias(self.window, query.dtype)
        own = attend(query, key, value, scaling=scaling, softcap=softcap, bias=bias)

        _, heads, _, dim = query.shape
        kv_heads = prefix_keys.shape[1]
        # Seats and the heads of a group become the rows of one matrix per slot and key-value head.
        seated = query[view.line_at].view(slots, seats, kv_heads, -1, dim).transpose(1, 2)
        seated = seated.reshape(slots, kv_heads, -1, dim)
        bias = view.prefix_bias(self.window, heads // kv_heads, query.dtype)
        average, total = attend(
            seated, prefix_keys[:slots], prefix_values[:slots],
            scaling=scaling, softcap=softcap, bias=bias,
        )  # fmt: skip
        average = average.view(slots, kv_heads, seats, -1, average.shape[-1]).transpose(1, 2)
        total = total.view(slots, kv_heads, seats, -1).transpose(1, 2)
        before = (
            average.reshape(slots * seats, heads, 1, -1)[view.seat_of],
            total.reshape(slots * seats, heads, 1)[view.seat_of],
        )
        return merge(before, own, sinks)
