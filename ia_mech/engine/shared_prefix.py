"""Rows that attend to their context's keys and values where the prefill left them.

Copied to every row, a prefix of 231 tokens is read 33 times over at each step of 33 rows, and on a
CPU that takes as long as half of the matrix products. Here each layer of full attention keeps a
reference to the prefill's tensors: all rows of a context attend to them in one matrix product per
key-value head, each row to its own tokens besides, and the two parts are merged by their
log-sum-exp (Hydragen, arXiv 2402.05099, section 3.1). Nothing is approximated. Layers with a
sliding window or a recurrent state are copied and computed as usual.

The model's code isn't touched: ``transformers`` lets attention functions be registered by name, and
the name is set in the model's configuration for the time of a forward pass.

In this order: attention over parts (:func:`attend`, :func:`merge`), which row sits where
(:class:`BatchSlots`), the cache layer (:class:`SharedLayer`), its registration (:func:`sharing`).
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from ia_mech.engine.sampling import LOG2_E
from ia_mech.models.load import text_config

FUSED = (torch.float32, torch.bfloat16, torch.float16)  # what PyTorch's kernel for CPUs takes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over one set of keys, without padding.

    Args:
        query: ``[batch, heads, new, dim]``.
        key: ``[batch, kv_heads, keys, dim]``; each head of it serves ``heads / kv_heads`` others,
            in order.
        value: ``[batch, kv_heads, keys, value_dim]``.
        scaling: factor of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        bias: ``[batch or 1, 1, new or 1, keys]`` in the query's dtype, added to the scores; minus
            infinity hides a key.

    Returns:
        The average of the values ``[batch, heads, new, value_dim]`` in the query's dtype, and the
        log-sum-exp of the scores ``[batch, heads, new]`` float32. A query that sees no key has an
        average of zero and a log-sum-exp of minus infinity.
    """
    fused = query.device.type == "cpu" and query.dtype in FUSED and softcap is None
    # One query to each set of keys are many small products, which the kernel does one by one.
    if fused and query.shape[2] > 1 and query.shape[-1] == value.shape[-1]:
        # What scaled_dot_product_attention calls on a CPU; it keeps the log-sum-exp to itself.
        each = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        average, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=each, scale=scaling
        )
        if bias is not None:  # where nothing is seen it gives a log-sum-exp of zero
            total = total.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
        return average, total
    batch, heads, new, dim = query.shape
    # [batch, kv_heads, heads per kv_head * new, …]
    scores = _scores(query.reshape(batch, key.shape[1], -1, dim), key, scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        per_head = scores.view(batch, heads, new, -1)
        per_head += bias
    top = scores.amax(-1, keepdim=True)
    # Minus infinity less itself would be no number.
    scores -= top.clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.mul_(LOG2_E).exp2_()  # as in sampling.log_sum_exp
    total = weights.sum(-1, keepdim=True)
    average = weights.div_(total.clamp(min=1.0)).to(value.dtype) @ value
    return average.view(batch, heads, new, -1), (top + total.log()).view(batch, heads, new)


def _scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Products of ``[…, queries, dim]`` and ``[…, keys, dim]``, scaled, in float32.

    In float16 a product ends at 65504, which 128 numbers of 23 reach. So queries take as much of
    the scaling as is a power of two, which rounds nothing but the tiniest numbers; other dtypes
    have float32's range.
    """
    first = 1.0
    if query.dtype == torch.float16:
        first = 2.0 ** min(0, math.frexp(scaling)[1])
        query = query * first
    return (query @ key.mT).float() * (scaling / first)


def merge(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], sinks: Tensor | None = None
) -> Tensor:
    """What attention over all keys at once would give, from attention over two parts of them.

    Args:
        first: as :func:`attend` returns it.
        second: of the other keys.
        sinks: ``[heads]`` scores of keys without a value (gpt-oss); they only take weight away.

    Returns:
        ``[batch, heads, new, value_dim]`` in the first part's dtype, computed in float32; zero
        where neither part has anything to see.
    """
    (average, total), (other, other_total) = first, second
    # Not a number only where neither part has anything to see.
    weight = torch.sigmoid(other_total - total).nan_to_num_(0.0)
    merged = torch.lerp(average.float(), other.float(), weight[..., None])
    if sinks is not None:
        seen = torch.logaddexp(total, other_total) - sinks.float()[:, None]
        merged = merged * torch.sigmoid(seen)[..., None]
    return merged.to(average.dtype)


@dataclass(frozen=True)
class Span:
    """Slots ``start`` to before ``stop`` of one context, in the order of ``BatchSlots.order``."""

    start: int
    stop: int
    context: int


@dataclass(frozen=True)
class Step:
    """What the layers need to know of the tokens that are being written.

    Attributes:
        start: where all slots write, or None if their ages differ.
        end: the number of own keys that the oldest slots hold afterwards.
        places: the slots ``[slots, 1]`` and where each writes ``[slots or 1, new]``, int64; None
            where all write at ``start``.
        bias: ``[slots or 1, 1, new, end]``, 0 for keys that a token may attend to, else minus
            infinity; None where each may attend to all.
    """

    start: int | None
    end: int
    places: tuple[Tensor, Tensor] | None
    bias: Tensor | None


class BatchSlots:
    """Which row sits where in a batch, as all shared layers of its cache see it.

    Rows that finish free their slot for rows that begin, so the rows of a batch differ in age: slot
    3 may hold the fortieth token of one context's turn while slot 4 holds the first of another's.
    Each slot writes its own keys and values at its own age, and attends to no more than it wrote.

    Args:
        contexts: the number of the context that each slot continues.
        dtype: of the model.
        device: where its tensors are.

    Attributes:
        contexts: as given, kept up to date.
        ages: how many own tokens each slot holds.
        padding: how many of these, the first ones, are padding, which is never attended to.
        order: ``[slots]`` int64, the slots sorted by context; None if they already are.
        back: ``[slots]`` int64, where each slot is in that order; None likewise.
        spans: the contexts' slots in that order.
        step: what is being written.
    """

    def __init__(self, contexts: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.contexts, self.dtype, self.device = list(contexts), dtype, device
        self.ages, self.padding = [0] * len(contexts), [0] * len(contexts)
        self.step = Step(0, 0, None, None)
        self._idle: set[int] = set()
        self._sort()

    def __len__(self) -> int:
        return len(self.contexts)

    def _sort(self) -> None:
        order = sorted(range(len(self)), key=lambda slot: self.contexts[slot])
        self.order = self.back = None
        if order != list(range(len(self))):
            self.order = torch.tensor(order, device=self.device)
            self.back = self.order.argsort()
        self.spans: list[Span] = []
        for at, slot in enumerate(order):
            context = self.contexts[slot]
            if self.spans and self.spans[-1].context == context:
                self.spans[-1] = Span(self.spans[-1].start, at + 1, context)
            else:
                self.spans.append(Span(at, at + 1, context))

    def put(self, slots: list[int], contexts: list[int]) -> None:
        """Rows of these contexts take these slots; slots after the last one are new."""
        for slot, context in zip(slots, contexts, strict=True):
            if slot == len(self):
                self.contexts.append(context)
                self.ages.append(0)
                self.padding.append(0)
            else:
                self.contexts[slot], self.ages[slot], self.padding[slot] = context, 0, 0
                self._idle.discard(slot)
        self._sort()

    def keep(self, index: list[int]) -> None:
        """Only the given slots, in the given order."""
        self._idle = {at for at, slot in enumerate(index) if slot in self._idle}
        self.contexts = [self.contexts[slot] for slot in index]
        self.ages = [self.ages[slot] for slot in index]
        self.padding = [self.padding[slot] for slot in index]
        self._sort()

    def retire(self, slots: list[int]) -> None:
        """Mark slots as idle: what they compute until they are taken is thrown away."""
        self._idle.update(slots)

    def begin(self, new: int) -> None:
        """Each slot is about to write ``new`` tokens; sets :attr:`step`."""
        busy = [age for slot, age in enumerate(self.ages) if slot not in self._idle]
        oldest = max(busy, default=0)
        for slot in self._idle:  # kept in step, so that ages don't differ and buffers don't grow
            self.ages[slot] = oldest
        start = oldest if min(busy, default=0) == oldest else None
        places = bias = None
        if start is None or new > 1 or any(self.padding):
            ages = self.ages if start is None else [oldest]
            at = torch.tensor(ages, device=self.device)[:, None]
            at = at + torch.arange(new, device=self.device)
            if start is None:
                places = torch.arange(len(self), device=self.device)[:, None], at
            unseen = self._unseen(at, oldest + new)
            bias = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device)
            bias.masked_fill_(unseen, -torch.inf)
        self.step = Step(start, oldest + new, places, bias)

    def _unseen(self, places: Tensor, end: int) -> Tensor:
        """``[slots or 1, 1, new, end]`` bool: the keys that tokens at these places may not attend
        to."""
        keys, own = torch.arange(end, device=self.device), places[:, None, :, None]
        unseen = keys > own
        if any(self.padding):
            padding = torch.tensor(self.padding, device=self.device)[:, None, None, None]
            # Padding attends to itself: a softmax over nothing would be NaN.
            unseen = unseen | ((keys < padding) & (keys != own))
        return unseen

    def finish(self, new: int) -> None:
        """The tokens are written."""
        self.ages = [age + new for age in self.ages]

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write ``[slots, heads, new, dim]`` into a buffer ``[max_rows, heads, capacity, dim]``.

        Returns:
            A view of what the slots hold, ``[slots, heads, end, dim]``.
        """
        used = buffer[: len(self), :, : self.step.end]
        if self.step.places is None:
            used[:, :, self.step.start :] = states
        else:
            slot, at = self.step.places
            used[slot, :, at] = states.transpose(1, 2)
        return used


# In transformers' tables; "ia_mech_shared_sdpa" where other layers are left to sdpa.
NAME = "ia_mech_shared"

ATTRIBUTE = "shared_layer"  # of keys that a shared layer handed out: the layer

UNUSED = "its attention doesn't use the cached keys as they are"


@dataclass(frozen=True)
class Engine:
    """How a model's rows attend to their prefix.

    Attributes:
        shared: number of layers that read it where the prefill left it; 0 = the portable engine.
        layers: of the model.
        why: why no layer is shared, or no static buffers are used on a GPU; empty otherwise.
        static: rows are decoded in static buffers; see :mod:`ia_mech.engine.cuda`. Layers with a
            sliding window then share the prefix of the rows that are decoded, too.
        graphs: the steps in these are captured as CUDA graphs.
    """

    shared: int
    layers: int
    why: str = ""
    static: bool = False
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
        shared = f"shared-prefix {self.shared} of {self.layers} layers" if self.shared else ""
        buffers = "CUDA graphs" if self.graphs else "static buffers" if self.static else ""
        return ", ".join(filter(None, [shared, buffers])) or "portable"

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


def held(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Keys and values ``[rows, kv_heads, tokens, dim]`` of a prefilled layer."""
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


class PrefixLayer(DynamicLayer):
    """A layer that hands out only the rows' own keys, and attends to prefixes by itself.

    Attributes:
        waiting: keys were handed out that no attention function has used yet.
        window: tokens of its sliding window, None if it has none.
    """

    keys: Tensor
    values: Tensor
    waiting = False
    window: int | None = None

    def hand_out(self, keys: Tensor) -> Tensor:
        """These keys, carrying this layer as ``shared_layer``, since attention functions don't get
        the cache. A view that isn't kept, or the two would keep each other alive."""
        self.waiting = True
        keys = keys[:]
        setattr(keys, ATTRIBUTE, self)
        return keys

    def demand_attention(self) -> None:
        """Raises RuntimeError if keys were handed out that no attention function has used."""
        if self.waiting:
            raise RuntimeError(UNUSED)


class SharedLayer(PrefixLayer):
    """A full-attention layer: its part of several contexts by reference, and what rows add to it.

    ``keys`` and ``values`` are views of the rows' own tokens only, ``[rows, kv_heads, own, dim]``;
    lengths and mask sizes count the context's as well, padding included. Buffers grow where the
    capacity is exceeded.

    Args:
        layer: a prefilled layer, whose keys say how many heads there are.
        slots: of the batch, the same for all layers of a cache.
        capacity: tokens of a row to preallocate.
        max_rows: rows to preallocate.

    Attributes:
        contexts: by number, keys and values ``[1, kv_heads, tokens, dim]`` of a context's prefix.
        length: tokens of all that a mask covers, own ones included.
    """

    def __init__(
        self, layer: DynamicLayer, slots: BatchSlots, capacity: int, max_rows: int
    ) -> None:
        super().__init__()
        keys, values = held(layer)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.slots, self.length = slots, 0
        self.contexts: dict[int, tuple[Tensor, Tensor]] = {}
        # Zeros: what is stored beyond a row's age is multiplied with a weight of zero.
        self._buffers = tuple(
            tensor.new_zeros(max_rows, tensor.shape[1], capacity, tensor.shape[-1])
            for tensor in (keys, values)
        )
        self.keys, self.values = (buffer[: len(slots), :, :0] for buffer in self._buffers)

    def refer(self, layer: DynamicLayer, padding: list[int], numbers: dict[int, int]) -> None:
        """Add contexts that rows continue, and drop those without rows.

        Args:
            layer: of a prefill, left as it is.
            padding: ``[contexts]``, tokens of left padding of each of its contexts.
            numbers: from the number that stands for a context in the batch to its row here.
        """
        used = set(self.slots.contexts)
        self.contexts = {n: known for n, known in self.contexts.items() if n in used}
        keys, values = held(layer)
        for number, context in numbers.items():
            one, tokens = slice(context, context + 1), slice(padding[context], None)
            self.contexts[number] = keys[one, :, tokens], values[one, :, tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[rows, kv_heads, new, dim]``; returns the rows' own ones.

        Raises:
            RuntimeError: the model's attention didn't use what was returned the last time.
        """
        self.demand_attention()
        self._grow()
        self.keys, self.values = (
            self.slots.write(buffer, states)
            for buffer, states in zip(self._buffers, (key_states, value_states), strict=True)
        )
        self.length += key_states.shape[-2]
        return self.hand_out(self.keys), self.values

    def _grow(self) -> None:
        rows, capacity = self._buffers[0].shape[0], self._buffers[0].shape[2]
        more = max(0, len(self.slots) - rows), max(0, self.slots.step.end - capacity)
        if any(more):
            self._buffers = tuple(
                pad(buffer, (0, 0, 0, more[1], 0, 0, 0, more[0])) for buffer in self._buffers
            )

    def in_one_place(self, length: int) -> tuple[Tensor, Tensor]:
        """Copies of prefix and own keys and values, ``[rows, kv_heads, length, dim]``, left-padded
        with zeros."""

        def joined(which: int, own: Tensor) -> Tensor:
            whole = own.new_zeros(*own.shape[:2], length, own.shape[-1])
            for slot, context in enumerate(self.slots.contexts):
                before = self.contexts[context][which][0]
                mine = own[slot, :, self.slots.padding[slot] :]
                begin = length - before.shape[-2] - mine.shape[-2]
                whole[slot, :, begin : begin + before.shape[-2]] = before
                whole[slot, :, begin + before.shape[-2] :] = mine
            return whole

        return joined(0, self.keys), joined(1, self.values)

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
            softcap: see :func:`ia_mech.engine.shared_prefix.attend`.
            sinks: see :func:`ia_mech.engine.shared_prefix.merge`.

        Returns:
            ``[rows, heads, new, value_dim]``.
        """
        self.waiting = False
        bias = self.slots.step.bias
        own = attend(query, key, value, scaling=scaling, softcap=softcap, bias=bias)
        order, back = self.slots.order, self.slots.back
        sorted_query = query if order is None else query[order]
        spans = self.slots.spans
        parts = [self._attend_prefix(sorted_query, span, scaling, softcap) for span in spans]
        if len(parts) == 1:
            return merge(parts[0], own, sinks)
        average, total = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if back is not None:
            average, total = average[back], total[back]
        return merge((average, total), own, sinks)

    def _attend_prefix(
        self, query: Tensor, span: Span, scaling: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attention of the rows of a span over their context, as :func:`attend` returns it."""
        keys, values = self.contexts[span.context]
        query = query[span.start : span.stop]
        rows, heads, new, dim = query.shape
        kv_heads = keys.shape[1]
        # Rows, heads of a group and new tokens become the rows of one matrix per key-value head.
        folded = (
            query.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        )
        average, total = attend(folded, keys, values, scaling=scaling, softcap=softcap)
        average = average.reshape(kv_heads, rows, -1, values.shape[-1]).transpose(0, 1)
        total = total.reshape(kv_heads, rows, -1).transpose(0, 1)
        return average.reshape(rows, heads, new, -1), total.reshape(rows, heads, new)


@contextlib.contextmanager
def sharing(model: PreTrainedModel, cache: DynamicCache) -> Iterator[None]:
    """Make the model's attention understand the shared layers of this cache, if it has any.

    Raises:
        RuntimeError: on leaving, if something other than the attention function used a shared
            layer's keys; the model's output is wrong then.
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

    With an original, masks are made as for that. Without one every layer is shared, and under a
    name that its table of masks doesn't hold ``transformers`` makes no masks.
    """
    if original is None:
        AttentionInterface.register(NAME, _attention)
        return NAME
    name = f"{NAME}_{original}"
    AttentionInterface.register(name, _attention_or(original))
    masks = AttentionMaskInterface._global_mapping
    if original in masks:
        masks[name] = masks[original]
    return name


def _attention_or(original: str) -> Callable:
    def attention(module, query, key, value, attention_mask, **kwargs):
        if hasattr(key, ATTRIBUTE):
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
    layer = getattr(key, ATTRIBUTE, None)
    if layer is None:
        raise RuntimeError(UNUSED)
    # Models that rely on masks don't pass their windows here.
    if sliding_window not in (None, layer.window):
        raise NotImplementedError("the layer's keys aren't kept for this sliding window")
    if position_bias is not None:
        raise NotImplementedError("a shared layer knows no position bias")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = layer.attend(query, key, value, scaling, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None
