"""Rows that attend to their context's keys and values where the prefill left them.

Copied to every row, a prefix of 231 tokens is read 33 times over at each step of 33 rows, and on a
CPU that takes as long as half of the matrix products. Here each layer of full attention keeps a
reference to the prefill's tensors; all rows of a context attend to them as one matrix product per
key-value head, each row to its own tokens besides, and :mod:`ia_mech.engine.attention` merges the
two. Layers with a sliding window or a recurrent state are copied and computed as ever.

The model's code isn't touched: ``transformers`` lets attention functions be registered by name, and
the name is set in the model's configuration for the time of a forward pass.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from ia_mech.engine.attention import attend, merge
from ia_mech.engine.lines import Lines, Span
from ia_mech.models import text_config

# In transformers' tables; "ia_mech_shared_sdpa" where other layers are left to sdpa.
NAME = "ia_mech_shared"

UNUSED = "its attention doesn't use the cached keys as they are"


@dataclass(frozen=True)
class Engine:
    """How a model's rows attend to their prefix.

    Attributes:
        shared: number of layers that read it where the prefill left it; 0 = the portable engine.
        layers: of the model.
        why: what keeps all layers portable, or decoding on a GPU from graphs, where something does.
        graphs: a GPU replays decoding steps as CUDA graphs; see :mod:`ia_mech.engine.cuda`. Layers
            with a sliding window then share the prefix of the rows that are decoded, too.
    """

    shared: int
    layers: int
    why: str = ""
    graphs: bool = False

    @classmethod
    def possible(cls, model: PreTrainedModel) -> "Engine":
        """As many shared layers as the model's architecture allows."""
        layers = DynamicCache(config=model.config).layers
        shared = sum(type(layer) is DynamicLayer for layer in layers)
        return cls(shared, len(layers), "" if shared else "no layer has full attention")

    @property
    def whole(self) -> bool:
        """Whether every layer is shared."""
        return self.shared == self.layers

    @property
    def name(self) -> str:
        """What a run records."""
        if not self.shared:
            return "CUDA graphs" if self.graphs else "portable"
        graphs = ", CUDA graphs" if self.graphs else ""
        return f"shared-prefix {self.shared} of {self.layers} layers{graphs}"

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


class PrefixLayer(DynamicLayer):
    """A layer whose keys, as it hands them out, are only the rows' own: it attends by itself.

    Attributes:
        waiting: keys were handed out that no attention function has used yet.
        window: tokens of its sliding window, None if it has none.
    """

    waiting = False
    window: int | None = None

    def hand_out(self, keys: Tensor) -> Tensor:
        """These keys, carrying this layer as ``shared_layer``: attention functions aren't told the
        cache. It is a view that isn't kept, or the two would keep each other alive."""
        self.waiting = True
        keys = keys[:]
        keys.shared_layer = self
        return keys

    def demand_attention(self) -> None:
        """Raises RuntimeError if keys were handed out that no attention function has used."""
        if self.waiting:
            raise RuntimeError(UNUSED)


class SharedLayer(PrefixLayer):
    """The layer's part of several contexts, by reference, and room for the tokens that rows add.

    ``keys`` and ``values`` are views of the rows' own tokens only, ``[rows, kv_heads, own, dim]``;
    lengths and mask sizes count the context's as well, padding included. Tokens beyond the room
    make it grow.

    Args:
        layer: a prefilled layer, whose keys say how many heads there are.
        lines: of the batch, the same for all layers of a cache.
        room: for how many tokens of a row.
        capacity: for how many rows; more make it grow.

    Attributes:
        contexts: by number, keys and values ``[1, kv_heads, tokens, dim]`` of a context's prefix.
        length: tokens of all that a mask covers, own ones included.
    """

    def __init__(self, layer: DynamicLayer, lines: Lines, room: int, capacity: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.lines, self.contexts, self.length = lines, {}, 0
        # Zeros: what is stored beyond a row's age is multiplied with a weight of zero.
        self._buffers = tuple(
            tensor.new_zeros(capacity, tensor.shape[1], room, tensor.shape[-1])
            for tensor in (layer.keys, layer.values)
        )
        self.keys, self.values = (buffer[: len(lines), :, :0] for buffer in self._buffers)

    def refer(self, layer: DynamicLayer, padding: list[int], numbers: dict[int, int]) -> None:
        """From now on rows may continue these contexts, and only those that still have rows.

        Args:
            layer: of a prefill, left as it is.
            padding: ``[contexts]``, tokens of left padding of each of its contexts.
            numbers: by which number lines call which of them.
        """
        used = set(self.lines.contexts)
        self.contexts = {n: known for n, known in self.contexts.items() if n in used}
        for number, context in numbers.items():
            one, tokens = slice(context, context + 1), slice(padding[context], None)
            self.contexts[number] = layer.keys[one, :, tokens], layer.values[one, :, tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[rows, kv_heads, new, dim]``; returns the rows' own ones.

        Raises:
            RuntimeError: the model's attention passed by what was returned the last time.
        """
        self.demand_attention()
        self._make_room()
        self.keys, self.values = (
            self.lines.write(buffer, states)
            for buffer, states in zip(self._buffers, (key_states, value_states), strict=True)
        )
        self.length += key_states.shape[-2]
        return self.hand_out(self.keys), self.values

    def _make_room(self) -> None:
        rows, room = len(self.lines), self.lines.step.end
        if rows > self._buffers[0].shape[0] or room > self._buffers[0].shape[2]:
            more = (
                buffer.new_zeros(
                    max(rows, buffer.shape[0]), buffer.shape[1], max(room, buffer.shape[2]),
                    buffer.shape[3],
                )
                for buffer in self._buffers
            )  # fmt: skip
            old, self._buffers = self._buffers, tuple(more)
            for buffer, before in zip(self._buffers, old, strict=True):
                buffer[: before.shape[0], :, : before.shape[2]] = before

    def in_one_place(self, length: int) -> tuple[Tensor, Tensor]:
        """Copies of prefix and own keys and values, ``[rows, kv_heads, length, dim]``, left-padded
        with zeros."""
        found = []
        for which, own in enumerate((self.keys, self.values)):
            whole = own.new_zeros(*own.shape[:2], length, own.shape[-1])
            for line, context in enumerate(self.lines.contexts):
                before = self.contexts[context][which][0]
                mine = own[line, :, self.lines.padding[line] :]
                begin = length - before.shape[-2] - mine.shape[-2]
                whole[line, :, begin : begin + before.shape[-2]] = before
                whole[line, :, begin + before.shape[-2] :] = mine
            found.append(whole)
        return tuple(found)

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the given rows, in the given order; the prefixes stay where they are."""
        own = self.keys.shape[-2]
        self._buffers = tuple(buffer.index_select(0, beam_idx) for buffer in self._buffers)
        self.keys, self.values = (buffer[:, :, :own] for buffer in self._buffers)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of queries ``[rows, heads, new, dim]`` over prefix and own tokens.

        Args:
            query: of the newest tokens of every row.
            key: the rows' own, ``[rows, kv_heads, own, dim]``.
            value: theirs, ``[rows, kv_heads, own, value_dim]``.
            scaling: factor of the scores.
            softcap: see :func:`ia_mech.engine.attention.attend`.
            sinks: see :func:`ia_mech.engine.attention.merge`.

        Returns:
            ``[rows, heads, new, value_dim]``.
        """
        self.waiting = False
        numbers = {"scaling": scaling, "softcap": softcap}
        own = attend(query, key, value, bias=self.lines.step.bias, **numbers)
        order, back = self.lines.order, self.lines.back
        sorted_query = query if order is None else query[order]
        parts = [self._attend_prefix(sorted_query, span, numbers) for span in self.lines.spans]
        if len(parts) == 1:
            return merge([parts[0], own], sinks)
        before = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if back is not None:
            before = tuple(tensor[back] for tensor in before)
        return merge([before, own], sinks)

    def _attend_prefix(self, query: Tensor, span: Span, numbers: dict) -> tuple[Tensor, Tensor]:
        """Attention of the rows of a span over their context, as :func:`attend` returns it."""
        keys, values = self.contexts[span.context]
        query = query[span.start : span.stop]
        rows, heads, new, dim = query.shape
        kv_heads = keys.shape[1]
        # Rows, heads of a group and new tokens become the rows of one matrix per key-value head.
        folded = (
            query.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        )
        average, total = attend(folded, keys, values, **numbers)
        average = average.reshape(kv_heads, rows, -1, values.shape[-1]).transpose(0, 1)
        total = total.reshape(kv_heads, rows, -1).transpose(0, 1)
        return average.reshape(rows, heads, new, -1), total.reshape(rows, heads, new)


@contextlib.contextmanager
def sharing(model: PreTrainedModel, cache: DynamicCache) -> Iterator[None]:
    """While it lasts, the model's attention understands the shared layers of this cache.

    A cache without any changes nothing.

    Raises:
        RuntimeError: on leaving, if a shared layer's keys were used by something else than the
            attention function; the model's output is wrong then.
    """
    shared = [layer for layer in cache.layers if isinstance(layer, PrefixLayer)]
    if not shared:
        yield
        return
    others = [
        layer
        for layer in cache.layers
        if isinstance(layer, CacheLayerMixin) and not isinstance(layer, PrefixLayer)
    ]
    config = text_config(model.config)
    before = config._attn_implementation
    config._attn_implementation = _registered(before if others else None)
    try:
        yield
        for layer in shared:
            layer.demand_attention()
    finally:
        config._attn_implementation = before


def _registered(original: str | None) -> str:
    """The name of an attention function that leaves layers which aren't shared to ``original``.

    With an original, masks are made as for that. Without one there are no such layers, and under a
    name that the table of masks doesn't know ``transformers`` makes none.
    """
    if original is None:
        AttentionInterface.register(NAME, _attention)
        return NAME
    name = f"{NAME}_{original}"
    AttentionInterface.register(name, _attention_or(original))
    masks = AttentionMaskInterface._global_mapping
    if original in masks:
        AttentionMaskInterface.register(name, masks[original])
    return name


def _attention_or(original: str) -> Callable:
    def attention(module, query, key, value, attention_mask, **kwargs):
        if hasattr(key, "shared_layer"):
            return _attention(module, query, key, value, attention_mask, **kwargs)
        # As the model's own code looks it up: each has an eager function of its own.
        code = sys.modules[type(module).__module__]
        eager = getattr(code, "eager_attention_forward", None)
        function = code.ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        return function(module, query, key, value, attention_mask, **kwargs)

    return attention


def _attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention as ``transformers`` calls it, over a shared layer; ``[rows, new, heads, dim]``."""
    if not hasattr(key, "shared_layer"):
        raise RuntimeError(UNUSED)
    # Models that keep to masks say nothing of their windows here.
    if sliding_window not in (None, key.shared_layer.window):
        raise NotImplementedError("the layer's keys aren't kept for this sliding window")
    if position_bias is not None:
        raise NotImplementedError("a shared layer knows no position bias")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = key.shared_layer.attend(query, key, value, scaling, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None
