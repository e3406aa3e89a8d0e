"""Cache layers in buffers of fixed size and address: a prefix per context, own tokens per row.

``transformers`` finds them in the place of its own layers. Which tokens a step reads and writes is
given by tensors, never by Python numbers: a CUDA graph replays the addresses and the shapes that it
was captured with, and only the contents may change.

Attention over the prefixes is one batched product for all contexts, in PyTorch's own operations
(:func:`ia_mech.engine.shared_prefix.attend`). Kernels that return log-sum-exps
(``aten._scaled_dot_product_efficient_attention``, FlashInfer) have no CPU implementation, so no
test here could run them; FlexAttention, uncompiled, computes the same as ``attend`` under ``vmap``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ia_mech.engine.prefill import RECURRENT
from ia_mech.engine.shared_prefix import PrefixLayer, attend, held, merge

ROUND = 8  # capacities are multiples of this, as tensor cores need it in half precision
SPARE = 2  # prefixes held at a time, as a multiple of the contexts that fill the batch
SMALLEST, FACTOR = 16, 4  # below so many rows a step takes as long as reading the weights


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

    @classmethod
    def of(cls, contexts: int, rows: int, longest: int, own: int, width: int) -> "Sizes":
        """For so many contexts with at most so many rows each, decoded ``width`` at a time.

        Rows that end early leave room for rows of other contexts only if these have a prefix slot,
        so there are :data:`SPARE` times as many as fill the batch.

        Args:
            contexts: how many there are in all.
            rows: of each of them, at most.
            longest: tokens of the longest context.
            own: tokens of a row, at most.
            width: most rows of a batch.
        """
        slots = max(1, min(width, contexts * rows))
        each = min(slots, rows)
        prefixes = min(contexts, slots, max(2, -(-SPARE * slots // each)))
        return cls(slots, prefixes, each, -(-longest // ROUND) * ROUND, own)

    @property
    def buckets(self) -> list[int]:
        """The numbers of batch slots that steps are made for: a few, since each is a capture."""
        found, n = [], SMALLEST
        while n < self.slots:
            found.append(n)
            n *= FACTOR
        return [*found, self.slots]

    def bucket(self, slots: int) -> "Sizes":
        """What a step of the smallest bucket for so many batch slots uses."""
        n = next(n for n in self.buckets if n >= slots)
        return Sizes(n, self.prefixes, min(self.rows, n), self.prefix_capacity, self.own_capacity)


@dataclass(frozen=True)
class View:
    """What all layers read during one step.

    Attributes:
        sizes: of the bucket.
        place: ``[slots]`` int64, where each row writes its newest own token.
        length: ``[prefixes]`` int64, tokens of each prefix.
        gather: ``[prefixes * rows]`` int64, the batch slots by prefix; see
            :meth:`ia_mech.engine.cuda.stream.PrefixSlots.tables`.
        scatter: ``[slots]`` int64, where in ``gather`` each batch slot is.
        biases: those that were made, since layers of the same window share them.
    """

    sizes: Sizes
    place: Tensor
    length: Tensor
    gather: Tensor
    scatter: Tensor
    biases: dict[tuple, Tensor] = field(default_factory=dict)

    def own_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """``[slots, 1, 1, own]``, minus infinity where a row doesn't see its own token, else 0."""

        def hidden() -> Tensor:
            tokens = torch.arange(self.sizes.own_capacity, device=self.place.device)
            place = self.place[:, None]
            later = tokens > place
            return later if window is None else later | (tokens <= place - window)

        return self._bias(("own", window), hidden, dtype)[:, None, None]

    def prefix_bias(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Minus infinity where a query doesn't see a token of its prefix, else 0.

        Args:
            window: of the layer.
            group: heads that share a key.
            dtype: of the queries.

        Returns:
            ``[prefixes, 1, rows * group, capacity]``, or ``[prefixes, 1, 1, capacity]`` without a
            window.
        """

        def hidden() -> Tensor:
            # Of a window the layer holds the last tokens: those that a row's first token sees.
            length = self.length if window is None else self.length.clamp(max=window - 1)
            length = length[:, None, None]
            tokens = torch.arange(capacity(self.sizes, window), device=self.place.device)
            beyond = tokens >= length
            if window is None:
                return beyond
            place = self.place[self.gather].view(self.sizes.prefixes, self.sizes.rows, 1)
            passed = beyond | (tokens <= length + place - window)
            return passed.repeat_interleave(group, 1)

        return self._bias(("prefix", window, group), hidden, dtype)[:, None]

    def _bias(self, name: tuple, hidden: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        if name not in self.biases:
            mask = hidden()
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self.biases[name] = zeros.masked_fill_(mask, -torch.inf)
        return self.biases[name]


def capacity(sizes: Sizes, window: int | None) -> int:
    """Tokens of a context that a layer with this sliding window, or none, has memory for."""
    return sizes.prefix_capacity if window is None else min(sizes.prefix_capacity, window)


class StaticLayer(PrefixLayer):
    """An attention layer, with a sliding window or without.

    Args:
        layer: a prefilled layer, whose keys and values give heads, dimensions and dtype.
        sizes: of the batch.
        device: where the buffers are made.

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
        tensors, tokens = held(layer), capacity(sizes, self.window)

        def buffers(count: int, room: int) -> tuple[Tensor, ...]:
            # Zeros: what was never written is multiplied with a weight of zero.
            shapes = [(count, t.shape[1], room, t.shape[-1]) for t in tensors]
            return tuple(torch.zeros(s, dtype=tensors[0].dtype, device=device) for s in shapes)

        self.own = buffers(sizes.slots, sizes.own_capacity)
        self.prefix = buffers(sizes.prefixes, tokens)
        self.keys, self.values = self.own
        self.dtype, self.device, self.is_initialized = tensors[0].dtype, device, True
        self.view: View | None = None

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return [*self.own, *self.prefix]

    def put_prefixes(
        self, slots: Tensor, layer: DynamicLayer, contexts: Tensor, padding: Tensor
    ) -> None:
        """Copy contexts' keys and values from a prefill, without their left padding.

        All at once: after a short context its last token is repeated, which no row attends to.

        Args:
            slots: ``[contexts]`` int64, prefix slots.
            layer: of the prefill.
            contexts: ``[contexts]`` int64, which of its rows.
            padding: ``[contexts]`` int64, of each of them.
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
        view, sizes, (keys, values) = self.view, self.view.sizes, self.prefix
        bias = view.own_bias(self.window, query.dtype)
        own = attend(query, key, value, scaling=scaling, softcap=softcap, bias=bias)

        (prefixes, rows), kv_heads = (sizes.prefixes, sizes.rows), keys.shape[1]
        _, heads, _, dim = query.shape
        # Rows and the heads of a group become the rows of one matrix per prefix and key-value head.
        gathered = query[view.gather].view(prefixes, rows, kv_heads, -1, dim).transpose(1, 2)
        gathered = gathered.reshape(prefixes, kv_heads, -1, dim)
        bias = view.prefix_bias(self.window, heads // kv_heads, query.dtype)
        average, total = attend(gathered, keys, values, scaling=scaling, softcap=softcap, bias=bias)
        average = average.view(prefixes, kv_heads, rows, -1, values.shape[-1]).transpose(1, 2)
        total = total.view(prefixes, kv_heads, rows, -1).transpose(1, 2)
        before = (
            average.reshape(prefixes * rows, heads, 1, -1)[view.scatter],
            total.reshape(prefixes * rows, heads, 1)[view.scatter],
        )
        return merge([before, own], sinks)


class StaticRecurrentLayer(LinearAttentionLayer):
    """A recurrent layer: each row's own state, which every step overwrites in place.

    ``conv_states`` and ``recurrent_states`` are views of the slots that a step uses.

    Args:
        layer: a prefilled layer, whose states give shapes and dtype.
        sizes: of the batch.
        device: where the buffers are made.

    Attributes:
        states: ``[slots, …]`` by kind and number, as :func:`states_of` names them.
    """

    def __init__(self, layer: LinearAttentionLayer, sizes: Sizes, device: torch.device) -> None:
        super().__init__(layer.number_of_states)
        self.dtype, self.device = layer.dtype, device
        # What else a prefill sets.
        for name in (
            "is_conv_states_initialized",
            "is_recurrent_states_initialized",
            "has_previous_state",
            "conv_kernel_size",
        ):
            setattr(self, name, dict(getattr(layer, name)))
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

    def begin(self, slots: Tensor, layer: LinearAttentionLayer, contexts: Tensor) -> None:
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
STATIC: dict[type, type[StaticLayer] | type[StaticRecurrentLayer]] = {
    DynamicLayer: StaticLayer,
    DynamicSlidingWindowLayer: StaticLayer,
    LinearAttentionLayer: StaticRecurrentLayer,
}


def static_layers(layers: Sequence, sizes: Sizes, device: torch.device) -> list:
    """Static layers for the prefilled layers of a cache."""
    return [STATIC[type(layer)](layer, sizes, device) for layer in layers]
