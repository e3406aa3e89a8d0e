"""Cache layers in buffers of fixed size and address: a prefix per context, own tokens per row.

``transformers`` finds them in the place of its own layers. Which tokens a step reads and writes is
given by tensors, never by Python numbers: a CUDA graph replays the addresses and the shapes that it
was captured with, and only the contents may change.

Attention over the prefixes is one batched product for all contexts, in PyTorch's own operations
(:func:`ia_mech.engine.shared_prefix.attend`). Kernels that return log-sum-exps
(``aten._scaled_dot_product_efficient_attention``, FlashInfer) have no CPU implementation, so no
test here could run them; FlexAttention, uncompiled, computes the same as ``attend`` under ``vmap``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ia_mech.engine.prefill import RECURRENT
from ia_mech.engine.shared_prefix import PrefixLayer, attend, held, merge


@dataclass(frozen=True)
class Sizes:
    """Of the buffers of a batch, or of the part of them that a step uses.

    Attributes:
        slots: batch slots, rows decoded at a time.
        prefixes: prefix slots, contexts held at a time.
        rows: batch slots that hold rows of one context, at most.
        prefix_capacity: tokens of the longest context.
        own_capacity: tokens of a row.
    """

    slots: int
    prefixes: int
    rows: int
    prefix_capacity: int
    own_capacity: int

    def capacity(self, window: int | None) -> int:
        """Tokens of a context that a layer with this sliding window, or none, has memory for."""
        return self.prefix_capacity if window is None else min(self.prefix_capacity, window)


@dataclass(frozen=True)
class View:
    """What all layers read during one step.

    Attributes:
        sizes: of the part of the buffers that it uses.
        place: ``[slots]`` int64, where each row writes its newest own token.
        length: ``[prefixes]`` int64, tokens of each prefix.
        gather: ``[prefixes * rows]`` int64, the batch slots by prefix; see
            :meth:`ia_mech.engine.cuda.stream.PrefixSlots.tables`.
        scatter: ``[slots]`` int64, where in ``gather`` each batch slot is.
        made: by window, what :meth:`bias` gave.
    """

    sizes: Sizes
    place: Tensor
    length: Tensor
    gather: Tensor
    scatter: Tensor
    made: dict[int | None, list[Tensor]] = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Minus infinity where a row doesn't see a token, else 0, for layers of this window.

        Returns:
            Of own tokens ``[slots, 1, 1, own]``; of the prefix ``[prefixes, 1, rows, capacity]``,
            or ``[prefixes, 1, 1, capacity]`` without a window.
        """
        if window not in self.made:
            sizes, device = self.sizes, self.place.device
            place, length = self.place[:, None], self.length[:, None, None]
            own = torch.arange(sizes.own_capacity, device=device)
            tokens = torch.arange(sizes.capacity(window), device=device)
            later = own > place
            if window is None:
                absent = tokens >= length
            else:
                later |= own <= place - window
                # The layer holds the last tokens, which a row's first token sees.
                length = length.clamp(max=window - 1)
                place = self.place[self.gather].view(sizes.prefixes, sizes.rows, 1)
                absent = (tokens >= length) | (tokens <= length + place - window)
            self.made[window] = [
                torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
                for hidden in (later[:, None, None], absent[:, None])
            ]
        return self.made[window]


class StaticLayer(PrefixLayer):
    """An attention layer, made from a prefilled one, with a sliding window or without.

    Attributes:
        window: tokens of its sliding window, the newest one included; None = it sees all.
        own: keys and values ``[slots, kv_heads, own, dim]`` of the rows' own tokens.
        prefix: keys and values ``[prefixes, kv_heads, capacity, dim]`` of contexts, without
            padding; under a window only of the last tokens that a row may see.
        view: of the step that is being made.
    """

    def __init__(self, layer: DynamicLayer, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        self.window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        tensors, tokens = held(layer), sizes.capacity(self.window)

        # Zeros: what was never written is multiplied with a weight of zero.
        self.own, self.prefix = (
            [t.new_zeros(n, t.shape[1], room, t.shape[-1], device=device) for t in tensors]
            for n, room in ((sizes.slots, sizes.own_capacity), (sizes.prefixes, tokens))
        )
        self.keys, self.values = self.own
        self.dtype, self.device, self.is_initialized = tensors[0].dtype, device, True
        self.view: View | None = None

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return [*self.own, *self.prefix]

    def put_prefixes(self, slots: Tensor, layer: Any, contexts: Tensor, padding: Tensor) -> None:
        """Copy ``contexts`` ``[n]`` of a prefilled layer, without their left ``padding`` ``[n]``,
        to prefix slots ``[n]``; all int64.

        All at once: after a short context its last token is repeated, which no row attends to.
        """
        tensors = held(layer)
        tokens = tensors[0].shape[2]
        # A window has dropped the first tokens, padding before others.
        dropped = 0 if self.window is None else layer.get_seq_length() - tokens
        first = (padding - dropped).clamp(min=0)
        at = (first[:, None] + torch.arange(tokens, device=first.device)).clamp(max=tokens - 1)
        for buffer, tensor in zip(self.prefix, tensors, strict=True):
            chosen = tensor[contexts[:, None], :, at]  # [contexts, tokens, kv_heads, dim]
            buffer[slots, :, :tokens] = chosen.transpose(1, 2)

    def begin(self, slots: Tensor, layer: Any, contexts: Tensor) -> None:
        """Nothing: a row has no own tokens at first."""

    def reset(self) -> None:
        """Nothing: rows write their tokens before they read them."""

    def keep(self, index: Tensor) -> None:
        """The batch slots ``index`` ``[kept]`` int64 become the first ones, in place."""
        for buffer in self.own:
            buffer[: len(index)] = buffer[index]

    def look(self, view: View) -> None:
        """The next step has this view."""
        self.view = view

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values ``[slots, kv_heads, 1, dim]``; returns all own ones."""
        self.demand_attention()
        assert self.view is not None  # every step begins with look()
        slots, place = self.view.sizes.slots, self.view.place[:, None, None, None]
        for buffer, new in zip(self.own, (key_states, value_states), strict=True):
            buffer[:slots].scatter_(2, place.expand_as(new), new)
        keys, values = (buffer[:slots] for buffer in self.own)
        return self.hand_out(keys), values

    def get_seq_length(self) -> int:
        """Capacity for prefix and own tokens; the model is given the positions."""
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
        """Attention of one query a row, ``[slots, heads, 1, dim]``, over prefix and own tokens;
        arguments and result as for :meth:`ia_mech.engine.shared_prefix.SharedLayer.attend`."""
        self.waiting = False
        assert self.view is not None  # as in update
        view, shape = self.view, (self.view.sizes.prefixes, self.view.sizes.rows)
        later, absent = view.bias(self.window, query.dtype)
        attended = partial(attend, scaling=scaling, softcap=softcap)
        own = attended(query, key, value, bias=later)
        # [prefixes, heads, rows, dim]: all rows of a context in one product per key-value head
        gathered = query[view.gather, :, 0].unflatten(0, shape).transpose(1, 2)
        before = attended(gathered, *self.prefix, bias=absent)
        average, total = (
            tensor.transpose(1, 2).flatten(0, 1)[view.scatter][:, :, None] for tensor in before
        )
        return merge((average, total), own, sinks)


class StaticRecurrentLayer(LinearAttentionLayer):
    """A recurrent layer: each row's own state, which every step overwrites in place.

    ``conv_states`` and ``recurrent_states`` are views of the slots that a step uses; ``states`` has
    the buffers ``[slots, …]`` by kind and number, as :func:`states_of` names them.
    """

    def __init__(self, layer: LinearAttentionLayer, sizes: Sizes, device: torch.device) -> None:
        super().__init__(layer.number_of_states)
        for name, value in vars(layer).items():  # all that a prefill sets
            setattr(self, name, dict(value) if isinstance(value, dict) else value)
        self.states = {
            name: torch.zeros(sizes.slots, *state.shape[1:], dtype=state.dtype, device=device)
            for name, state in states_of(layer).items()
        }
        self._use(sizes.slots)

    def _use(self, slots: int) -> None:
        for (kind, number), buffer in self.states.items():
            getattr(self, kind)[number] = buffer[:slots]

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return list(self.states.values())

    def put_prefixes(self, *_) -> None:
        """Nothing: rows begin with copies of their context's state."""

    def reset(self) -> None:
        """All states are zero, as at first."""
        for buffer in self.states.values():
            buffer.zero_()

    def begin(self, slots: Tensor, layer: Any, contexts: Tensor) -> None:
        """Rows of a prefill's contexts ``[rows]`` int64 begin in batch slots ``[rows]`` int64."""
        for name, state in states_of(layer).items():
            self.states[name][slots] = state[contexts]

    def keep(self, index: Tensor) -> None:
        """The batch slots ``index`` ``[kept]`` int64 become the first ones, in place."""
        for buffer in self.states.values():
            buffer[: len(index)] = buffer[index]

    def look(self, view: View) -> None:
        """The next step has this view."""
        self._use(view.sizes.slots)


def states_of(layer: LinearAttentionLayer) -> dict[tuple[str, int], Tensor]:
    """The states ``[rows, …]`` of a recurrent layer, by kind and number."""
    named = {(kind, n): state for kind in RECURRENT for n, state in getattr(layer, kind).items()}
    return {name: state for name, state in named.items() if state is not None}


# By a cache layer's type, what takes its place.
STATIC: dict[type, Callable[..., StaticLayer | StaticRecurrentLayer]] = {
    DynamicLayer: StaticLayer,
    DynamicSlidingWindowLayer: StaticLayer,
    LinearAttentionLayer: StaticRecurrentLayer,
}
