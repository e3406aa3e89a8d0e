"""Prefill contexts once; expand copies of the prefilled state to rows; let rows join a batch.

The state of a prefill is never changed: rows decode from copies of it, or refer to it where a layer
shares its prefix (``shared_prefix.py``). Rows that join a batch under way take batch slots that
became free. A shared layer only has to know their context; sliding windows and recurrent states are
overwritten in place. Windows end with the newest token in every row, so a context that is shorter
than what the batch has seen is padded on its left, and a longer one pads the batch.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from ia_mech.engine.capture import ResidualCapture
from ia_mech.engine.intervention import Intervention, intervene
from ia_mech.engine.packed_weights import packed_linears
from ia_mech.engine.shared_prefix import BatchSlots, SharedLayer, held, sharing
from ia_mech.models.load import accepts

RECURRENT = ("conv_states", "recurrent_states")
CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


@dataclass(frozen=True)
class Prefix:
    """One context as the engine sees it.

    ``positions`` are indices into ``ids`` of the named tokens, in the run's order; -1 = lacking.
    ``interventions`` take place at indices into ``ids``, while it is prefilled.
    """

    ids: Sequence[int]
    positions: Sequence[int] = ()
    interventions: Sequence[Intervention] = ()


@dataclass
class State:
    """What decoding continues from: keys, values and recurrent state, and what each row attends to.

    ``cache`` is a ``transformers`` cache of ``rows`` rows; ``mask`` is ``[rows, length]`` int64, 1
    for real tokens and 0 for left padding; ``position`` is ``[rows]`` int64, the position id of the
    next token. ``slots`` is None where no layer is shared.
    """

    cache: DynamicCache
    mask: Tensor
    position: Tensor
    slots: BatchSlots | None = None

    @property
    def rows(self) -> int:
        return self.mask.shape[0]

    def keep(self, index: Tensor) -> None:
        """Keep the rows ``index`` ``[kept]`` int64, in that order, in place.

        Goes layer by layer, so at most one layer is in memory twice.
        """
        self.cache.reorder_cache(cast(torch.LongTensor, index))  # which is its dtype
        self.mask, self.position = self.mask[index], self.position[index]
        if self.slots is not None:
            self.slots.keep(index.tolist())

    def retire(self, slots: list[int]) -> None:
        """Mark batch slots as unused until other rows join there."""
        if self.slots is not None:
            self.slots.retire(slots)


@dataclass
class Prefilled:
    """A group of contexts after their single forward pass.

    ``logits``: ``[contexts, vocab]`` float32 at the last token. ``residuals``: ``[contexts,
    layers + 1, positions, d_model]`` in the model's dtype, or None if nothing was to be captured.
    """

    state: State
    logits: Tensor
    residuals: Tensor | None


# -- prefill --------------------------------------------------------------------------------------


def prefill(
    model: PreTrainedModel, prefixes: Sequence[Prefix], blocks: nn.ModuleList | None = None
) -> Prefilled:
    """Run a left-padded group of contexts through the model once.

    Args:
        model: the subject model, in evaluation mode.
        prefixes: the contexts; all with the same number of positions.
        blocks: the model's blocks; given, the residual stream is captured at the positions, as the
            interventions leave it.
    """
    ids, mask = _left_padded([prefix.ids for prefix in prefixes], model.device)
    interventions = [prefix.interventions for prefix in prefixes]
    first = [len(prefix.ids) - ids.shape[1] for prefix in prefixes]
    state = State(
        cache=DynamicCache(config=model.config),
        mask=mask[:, :0],
        position=torch.zeros(len(prefixes), dtype=torch.long, device=model.device),
    )
    if blocks is None:
        with intervene(model, interventions, first):
            return Prefilled(state, forward(model, state, ids, mask)[:, -1], None)
    at = torch.tensor([list(prefix.positions) for prefix in prefixes], dtype=torch.long)
    padding = torch.tensor([[ids.shape[1] - len(prefix.ids)] for prefix in prefixes])
    captured = ResidualCapture(blocks, torch.where(at < 0, at, at + padding))
    with intervene(model, interventions, first), captured as capture:
        logits = forward(model, state, ids, mask)[:, -1]
    return Prefilled(state, logits, capture.residuals())


@torch.inference_mode()
def continue_prefill(
    model: PreTrainedModel,
    begun: Prefilled,
    index: Sequence[int],
    rests: Sequence[Sequence[int]],
) -> Prefilled:
    """Prefill contexts that begin alike, from the prefilled state of their beginnings.

    Args:
        model: a model all of whose layers can be shared.
        begun: the beginnings, left as they are.
        index: ``[contexts]``, which of these each context begins with.
        rests: the ids that follow, at least one each.

    Returns:
        What :func:`prefill` of the whole contexts gives, without residuals.
    """
    ids, mask = _left_padded(rests, model.device)
    longest = ids.shape[1]
    at = torch.tensor(index, device=model.device)
    state = expand(begun.state, at, capacity=longest, share=True)
    assert state.slots is not None  # all layers are shared
    state.slots.padding = [longest - len(rest) for rest in rests]
    logits = forward(model, state, ids, mask)[:, -1]
    lengths = state.mask.sum(-1, keepdim=True)
    length = int(lengths.max())
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(state.cache.layers):
        assert isinstance(layer, SharedLayer)
        cache.update(*layer.in_one_place(length), number)
    real = torch.arange(length, device=model.device) >= length - lengths
    return Prefilled(State(cache, real.long(), state.position), logits, None)


def _left_padded(ids: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """``[rows, longest]`` int64 ids with zeros on their left, and the mask of the real ones."""
    longest = max(len(one) for one in ids)
    padded = torch.zeros(len(ids), longest, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, one in enumerate(ids):
        padded[row, longest - len(one) :] = torch.tensor(one)
        mask[row, longest - len(one) :] = 1
    return padded.to(device), mask.to(device)


@torch.inference_mode()
def forward(
    model: PreTrainedModel, state: State, ids: Tensor, mask: Tensor, *, keep: int = 1
) -> Tensor:
    """Run the model on from a state, which is advanced in place.

    Args:
        model: the subject model.
        state: its cache, mask and positions grow by ``ids``.
        ids: ``[rows, new]`` int64.
        mask: ``[rows, new]`` int64, 0 for padding (left padding of a fresh state, or right padding
            of the last tokens this state will ever see).
        keep: how many of the new tokens' logits to return, from the end; 0 = all.

    Returns:
        Raw logits ``[rows, kept, vocab]`` in float32.
    """
    positions = state.position[:, None] + mask.cumsum(-1) - 1
    state.mask = torch.cat([state.mask, mask], dim=-1)
    arguments: dict[str, int | Tensor] = {}
    if accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = keep
    if accepts(model, "position_ids"):
        arguments["position_ids"] = positions.clamp(min=0)
    if state.slots is not None:
        state.slots.begin(ids.shape[1])
    with packed_linears(model), sharing(model, state.cache):
        output = model(
            input_ids=ids,
            # A mask of ones only costs time: without one, attention takes its unmasked path.
            attention_mask=None if state.mask.all() else state.mask,
            past_key_values=state.cache,
            use_cache=True,
            **arguments,
        )
    if state.slots is not None:
        state.slots.finish(ids.shape[1])
    state.position = state.position + mask.sum(-1)
    logits = output.logits if keep == 0 else output.logits[:, -keep:]
    return logits.float()


# -- expand ---------------------------------------------------------------------------------------


def expand(
    state: State,
    index: Tensor,
    capacity: int = 0,
    *,
    share: bool = False,
    max_rows: int = 0,
    numbers: Sequence[int] | None = None,
) -> State:
    """A new state whose row i goes on from row ``index[i]``; the given state is left as it was.

    ``reorder_cache`` is the one selection that every cache layer of ``transformers`` implements,
    recurrent ones included. It assigns new tensors, so shallow copies of the layers (and of the
    dictionaries that recurrent layers keep their states in) are enough to protect the original.

    Args:
        state: what to copy from.
        index: ``[rows]`` int64.
        capacity: tokens to preallocate per row, so that full-attention layers write in place
            instead of concatenating; 0 where the number isn't known.
        share: full-attention layers refer to the given state's keys and values instead of copying
            them; see :mod:`ia_mech.engine.shared_prefix`.
        max_rows: rows to preallocate for, where more are going to join.
        numbers: ``[rows]``, the number that stands for each row's context; by default the index.
    """
    contexts = index.tolist()
    numbers = contexts if numbers is None else list(numbers)
    cache = copy.copy(state.cache)
    cache.layers = []
    new = State(cache, state.mask[index], state.position[index])
    for layer in state.cache.layers:
        if _is_full(layer) and share:
            if new.slots is None:
                keys, _ = held(layer)
                new.slots = BatchSlots(numbers, keys.dtype, keys.device)
            shared = SharedLayer(layer, new.slots, capacity, max(max_rows, len(numbers)))
            shared.refer(
                layer, _left_padding(state.mask), dict(zip(numbers, contexts, strict=True))
            )
            shared.length = state.mask.shape[1]
            cache.layers.append(shared)
        elif _is_full(layer) and capacity:
            cache.layers.append(PreallocatedLayer(layer, index, capacity))
        else:
            cache.layers.append(_selected(layer, index))
    return new


def _is_full(layer: object) -> TypeGuard[DynamicLayer]:
    """Whether a cache layer is one of full attention and holds something."""
    return type(layer) is DynamicLayer and bool(layer.is_initialized)


def _left_padding(mask: Tensor) -> list[int]:
    """Tokens of left padding of each row of a mask ``[rows, length]``."""
    return (mask.cumsum(-1) == 0).sum(-1).tolist()


def _selected(layer: CacheLayer, index: Tensor) -> CacheLayer:
    """A copy of a layer that holds the given rows; the layer is left as it was."""
    twin = copy.copy(layer)
    for name, value in vars(twin).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    twin.reorder_cache(cast(torch.LongTensor, index))
    return twin


class PreallocatedLayer(DynamicLayer):
    """Rows of a prefilled full-attention layer, with buffers for the tokens to come.

    ``DynamicCache`` concatenates keys and values anew at every step. At 33 rows of 280 tokens that
    copying takes more than half of a decoding step on a CPU; writing in place takes nothing.
    ``keys`` and ``values`` are views of the used part, so whatever reads a ``DynamicLayer`` reads
    this one alike. Tokens beyond the capacity make it grow.

    Args:
        layer: the prefilled layer, left as it is.
        index: ``[rows]`` int64, which of its rows to copy.
        capacity: how many tokens more to allocate.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: DynamicLayer, index: Tensor, capacity: int) -> None:
        super().__init__()
        keys, values = held(layer)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._allocate(keys, values, index, capacity)
        self._use(keys.shape[-2])

    def _allocate(self, keys: Tensor, values: Tensor, index: Tensor, capacity: int) -> None:
        """Buffers ``[rows, heads, length + capacity, dim]`` that begin with these rows."""
        self._buffers = []
        for tensor in (keys, values):
            _, heads, length, dim = tensor.shape
            buffer = tensor.new_empty(len(index), heads, length + capacity, dim)
            for row, source in enumerate(index.tolist()):  # in place, without a copy in between
                buffer[row, :, :length] = tensor[source]
            self._buffers.append(buffer)

    def _use(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ``[rows, heads, new, head_dim]``; returns all there are."""
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            rows = torch.arange(self.keys.shape[0], device=self.device)
            self._allocate(self.keys, self.values, rows, end)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self._use(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the given rows, in the given order, in buffers of their own."""
        length = self.keys.shape[-2]
        index = beam_idx.to(self.device)  # of this layer: blocks may be on several
        self._buffers = [buffer.index_select(0, index) for buffer in self._buffers]
        self._use(length)


# -- join -----------------------------------------------------------------------------------------


def can_join(state: State) -> bool:
    """Whether rows can join this batch: a layer is shared, and all are of known kinds."""
    return state.slots is not None and all(map(_is_known, state.cache.layers))


def _is_known(layer: object) -> bool:
    recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
    holds_keys = isinstance(layer, DynamicLayer)
    return type(layer) in (SharedLayer, DynamicSlidingWindowLayer) or (recurrent and not holds_keys)


@torch.inference_mode()
def join(
    state: State, slots: Sequence[int], source: State, index: Tensor, numbers: Sequence[int]
) -> None:
    """Put rows into batch slots, in place.

    Args:
        state: the batch; :func:`can_join` is true of it.
        slots: unused ones, or new ones that follow on the last.
        source: prefilled contexts, left as they are.
        index: ``[slots]`` int64, which of them each slot goes on from.
        numbers: ``[slots]``, the numbers that stand for these contexts in the batch.
    """
    assert state.slots is not None
    at = torch.tensor(slots, device=index.device)
    rows = max(state.rows, max(slots) + 1)
    old, new = state.mask.shape[1], source.mask.shape[1]
    length = max(old, new)
    state.mask = put_rows(
        pad(state.mask, (length - old, 0)), pad(source.mask[index], (length - new, 0)), at, rows
    )
    state.position = put_rows(state.position, source.position[index], at, rows)
    state.slots.put(list(slots), list(numbers))
    padding = _left_padding(source.mask)
    contexts = dict(zip(numbers, index.tolist(), strict=True))
    for layer, theirs in zip(state.cache.layers, source.cache.layers, strict=True):
        if isinstance(layer, SharedLayer):
            assert isinstance(theirs, DynamicLayer)
            layer.refer(theirs, padding, contexts)
            layer.length = length
        elif isinstance(layer, DynamicSlidingWindowLayer):
            _put_window(layer, _selected(theirs, index), at, rows, length)
        else:
            _put_recurrent(layer, _selected(theirs, index), at, rows)


def put_rows(old: Tensor, new: Tensor, at: Tensor, rows: int) -> Tensor:
    """``old`` ``[rows or fewer, …]`` with ``new`` ``[slots, …]`` at the given rows; in place where
    ``old`` has that many rows."""
    if rows > old.shape[0]:
        old = torch.cat([old, old.new_zeros(rows - old.shape[0], *old.shape[1:])])
    old[at] = new
    return old


def _put_window(layer, fresh, at: Tensor, rows: int, length: int) -> None:
    tokens = min(length, layer.sliding_window - 1)
    for name in ("keys", "values"):
        ours, theirs = (
            pad(tensor, (0, 0, tokens - tensor.shape[-2], 0))
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
