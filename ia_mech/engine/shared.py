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
from ia_mech.engine.room import RoomyLayer
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
        why: what keeps all layers portable, where something does.
    """

    shared: int
    layers: int
    why: str = ""

    @classmethod
    def possible(cls, model: PreTrainedModel) -> "Engine":
        """As many shared layers as the model's architecture allows."""
        layers = DynamicCache(config=model.config).layers
        shared = sum(type(layer) is DynamicLayer for layer in layers)
        return cls(shared, len(layers), "" if shared else "no layer has full attention")

    @property
    def name(self) -> str:
        """What a run records."""
        if not self.shared:
            return "portable"
        return f"shared-prefix {self.shared} of {self.layers} layers"

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


@dataclass(frozen=True)
class Span:
    """Consecutive rows, from ``start`` to before ``stop``, that continue one context."""

    start: int
    stop: int
    context: int


class SharedLayer(RoomyLayer):
    """The layer's part of a context, by reference, and room for the tokens that rows add to it.

    ``keys`` and ``values`` are views of the rows' own tokens only, ``[rows, kv_heads, own, dim]``;
    lengths and mask sizes count the context's as well, padding included. Tokens beyond the room
    make it grow.

    Args:
        layer: the prefilled layer, left as it is.
        padding: ``[contexts]``, tokens of left padding of each context.
        index: ``[rows]`` int64, the context that each row continues. Consecutive rows of a context
            are computed together.
        room: for how many tokens.

    Attributes:
        prefix: keys and values of the contexts, ``[contexts, kv_heads, tokens, dim]``.
        waiting: keys were handed out that no attention function has used yet.
    """

    def __init__(self, layer: DynamicLayer, padding: list[int], index: Tensor, room: int) -> None:
        DynamicLayer.__init__(self)  # not RoomyLayer's, which copies the prefix
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.prefix, self._padding = (layer.keys, layer.values), padding
        self._buffers = tuple(
            tensor.new_empty(len(index), tensor.shape[1], room, tensor.shape[-1])
            for tensor in self.prefix
        )
        self.waiting = False
        self._use(0)
        self._place(index)

    def _place(self, context: Tensor) -> None:
        self._context = context
        contexts, counts = torch.unique_consecutive(context, return_counts=True)
        stops = counts.cumsum(0).tolist()
        self.spans = [
            Span(start, stop, context)
            for start, stop, context in zip([0, *stops], stops, contexts.tolist(), strict=False)
        ]

    def prefix_of(self, context: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of a context, ``[1, kv_heads, tokens, dim]``, unpadded."""
        keys, values = self.prefix
        one, tokens = slice(context, context + 1), slice(self._padding[context], None)
        return keys[one, :, tokens], values[one, :, tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[rows, kv_heads, new, dim]``; returns the rows' own ones.

        The keys returned carry this layer as ``shared_layer``: attention functions aren't told the
        cache. They are a view that isn't kept, or the two would keep each other alive.

        Raises:
            RuntimeError: the model's attention passed by what was returned the last time.
        """
        self.demand_attention()
        super().update(key_states, value_states)
        self.waiting = True
        keys = self._buffers[0][:, :, : self.keys.shape[-2]]
        keys.shared_layer = self
        return keys, self.values

    def demand_attention(self) -> None:
        """Raises RuntimeError if keys were handed out that no attention function has used."""
        if self.waiting:
            raise RuntimeError(UNUSED)

    def get_seq_length(self) -> int:
        return self.prefix[0].shape[-2] + self.keys.shape[-2]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the given rows, in the given order; the prefix stays where it is."""
        super().reorder_cache(beam_idx)
        self._place(self._context[beam_idx])

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
        own = attend(query, key, value, causal=True, **numbers)
        before = [self._attend_prefix(query, span, numbers) for span in self.spans]
        if len(before) == 1:
            return merge([before[0], own], sinks)
        averages, totals = zip(*before, strict=True)
        return merge([(torch.cat(averages), torch.cat(totals)), own], sinks)

    def _attend_prefix(self, query: Tensor, span: Span, numbers: dict) -> tuple[Tensor, Tensor]:
        """Attention of the rows of a span over their context, as :func:`attend` returns it."""
        keys, values = self.prefix_of(span.context)
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
    shared = [layer for layer in cache.layers if isinstance(layer, SharedLayer)]
    if not shared:
        yield
        return
    others = [
        layer
        for layer in cache.layers
        if isinstance(layer, CacheLayerMixin) and not isinstance(layer, SharedLayer)
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
    if sliding_window is not None or position_bias is not None:
        raise NotImplementedError("a shared layer knows no sliding window and no position bias")
    if not hasattr(key, "shared_layer"):
        raise RuntimeError(UNUSED)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = key.shared_layer.attend(query, key, value, scaling, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None
