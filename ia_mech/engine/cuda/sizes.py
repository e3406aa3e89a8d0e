"""How large the buffers of a batch are, and what they take of a device's memory.

Pure arithmetic on the plan of a stream, so that the same run makes the same buffers again: matrix
products round differently in another shape. Free memory is only compared with the result, and can
do no more than refuse it; a smaller batch is then tried, said and recorded as after any other lack
of memory (:class:`ia_mech.engine.plan.OomBackoff`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from ia_mech.engine.cuda.kernels import split

ROUND = 128  # prefixes are given room in multiples of this, so that units of a run share buffers
SPARE = 2  # contexts held at a time, as a multiple of those that fill the batch
# Of the free memory that a batch may plan with. The rest is for what it isn't asked for: the next
# contexts' prefill, turns that are scored, graphs, workspaces of libraries, fragmentation.
RESERVE = 0.7
SMALLEST, FACTOR = 16, 4  # below so many lines a step takes as long as reading the weights
# Bytes per logit of the sampling rule in PyTorch operations: logits, scores, two distributions and
# the noise in float32, and about six of Philox' integer tensors of a quarter of the vocabulary.
SAMPLING_BYTES = 5 * 4 + 6 * 8 // 4
STATES = 3  # recurrent states of a layer alive at once in a step: decayed, what is added, the sum
SCORES = 3  # float32 tensors of attention scores alive at once: raw, weights, and in half precision


@dataclass(frozen=True)
class Sizes:
    """Of the buffers of one batch.

    Attributes:
        lines: rows decoded at a time.
        slots: contexts whose prefix is held at a time.
        seats: lines that one context has at most.
        prefix: tokens of the longest context, rounded up.
        own: tokens of a row.
    """

    lines: int
    slots: int
    seats: int
    prefix: int
    own: int

    @classmethod
    def of(cls, contexts: int, rows: int, width: int, longest: int, own: int) -> "Sizes":
        """For a job, all of whose batches have the same buffers and graphs then.

        Rows that end early leave their context's slot half empty; with :data:`SPARE` times the
        slots that a full batch needs, others can begin in their place.

        Args:
            contexts: how many there are.
            rows: of each of them, at most.
            width: most rows of a batch.
            longest: tokens of the longest context.
            own: tokens of a row, at most.
        """
        width = max(1, min(width, contexts * rows))
        seats = min(width, rows)
        slots = min(contexts, _slots(width, seats))
        return cls(width, slots, seats, -(-longest // ROUND) * ROUND, own)

    @classmethod
    def of_rows(cls, contexts: Sequence[int], width: int, longest: int, own: int) -> "Sizes":
        """For rows of these contexts and no others; the rest as for :meth:`of`."""
        rows = Counter(contexts)
        return cls.of(len(rows), max(rows.values()), width, longest, own)

    def narrowed(self, width: int) -> "Sizes":
        """The same for batches of fewer rows, if memory left no more."""
        lines, seats = min(self.lines, width), min(self.seats, width)
        slots = min(self.slots, _slots(lines, seats))
        return replace(self, lines=lines, slots=slots, seats=seats)

    def room(self, window: int | None) -> int:
        """Tokens of a context that a layer has room for, with a sliding window of so many tokens or
        none. Whoever goes on from the context sees one less; with that one, rows stay aligned."""
        return self.prefix if window is None else min(self.prefix, window)

    @property
    def buckets(self) -> list[int]:
        """The numbers of lines that steps are made for: some far apart, since each is a capture,
        and all."""
        found, n = [], SMALLEST
        while n < self.lines:
            found.append(n)
            n *= FACTOR
        return [*found, self.lines]

    def bucket(self, lines: int) -> "Sizes":
        """The part of the buffers that a step of the smallest bucket for so many lines reads."""
        n = next(n for n in self.buckets if n >= lines)
        return Sizes(n, min(self.slots, n), min(self.seats, n), self.prefix, self.own)


def _slots(lines: int, seats: int) -> int:
    """Slots for a batch whose contexts have so many lines each at first."""
    return min(lines, max(2, -(-SPARE * lines // seats)))


@dataclass(frozen=True)
class Shape:
    """What of a model its batches' memory depends on.

    Attributes:
        layers: of each attention layer the key-value heads, the dimensions of a key and of a value,
            and the tokens of its sliding window, None if it sees all.
        heads: of the queries.
        width: of the residual stream and of the blocks' widest layer, together.
        vocab: number of logits.
        dtype: of weights and cache.
        recurrent: of each recurrent layer, the bytes of a row's state.
    """

    layers: tuple[tuple[int, int, int, int | None], ...]
    heads: int
    width: int
    vocab: int
    dtype: torch.dtype
    recurrent: tuple[int, ...] = ()

    @classmethod
    def of(cls, config, layers: Sequence, logits: Tensor, dtype: torch.dtype) -> "Shape":
        """Of a model with this text configuration, from the layers of a prefilled cache."""
        widest = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        attention = [
            (*keys_and_values(layer), window_of(layer))
            for layer in layers
            if isinstance(layer, DynamicLayer)
        ]
        states = [states_of(layer).values() for layer in layers]
        return cls(
            tuple(
                (keys.shape[1], keys.shape[-1], values.shape[-1], window)
                for keys, values, window in attention
            ),
            config.num_attention_heads,
            config.hidden_size + widest,
            logits.shape[-1],
            dtype,
            tuple(sum(state[0].nbytes for state in held) for held in states if held),
        )


def keys_and_values(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Of a prefilled attention layer, ``[rows, kv_heads, tokens, dim]`` each."""
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def window_of(layer) -> int | None:
    """Tokens of an attention layer's sliding window, the newest one included; None without one."""
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


def states_of(layer) -> dict[tuple[str, int], Tensor]:
    """The states ``[rows, …]`` that a recurrent layer holds, by kind and number; of others none."""
    if not isinstance(layer, LinearAttentionLayer):
        return {}
    kinds = ("conv_states", "recurrent_states")
    named = {(kind, n): state for kind in kinds for n, state in getattr(layer, kind).items()}
    return {name: state for name, state in named.items() if state is not None}


def needed_bytes(shape: Shape, sizes: Sizes, fused: bool = False) -> int:
    """What a batch of these sizes takes: its buffers, and what a step needs besides.

    Args:
        shape: of the model, whose weights are in memory already.
        sizes: of the batch.
        fused: kernels make no tensors of the size of the logits in sampling, nor of scores in
            attention.
    """
    item = shape.dtype.itemsize
    largest = sizes.lines * max(shape.recurrent, default=0)
    # The largest state once more: rows that begin or move are copied, and a warm-up has its own.
    cache = sizes.lines * sum(shape.recurrent) + largest
    for heads, key, value, window in shape.layers:
        tokens = sizes.slots * sizes.room(window) + sizes.lines * sizes.own
        cache += tokens * item * heads * (key + value)
    attention = _parts(shape, sizes) if fused else _scores(shape, sizes)
    logits = sizes.lines * shape.vocab * (item + 4 + (0 if fused else SAMPLING_BYTES))
    activations = 4 * sizes.lines * shape.width * item
    return cache + max(attention, logits, STATES * largest) + activations


def _scores(shape: Shape, sizes: Sizes) -> int:
    """Bytes of the scores of a layer's attention in PyTorch operations, and of biases."""
    seen, biases = 0, {}
    for heads, _, _, window in shape.layers:
        asked = sizes.slots * sizes.seats * sizes.room(window)
        seen = max(seen, asked + sizes.lines * sizes.own)
        if window is not None:  # one for each query, for all layers of this window
            biases[window] = asked * shape.heads // heads * shape.dtype.itemsize
    return seen * shape.heads * 4 * SCORES + sum(biases.values())


def _parts(shape: Shape, sizes: Sizes) -> int:
    """Bytes of what the kernels of a layer's attention tell each other: of each line and head an
    average and a log-sum-exp for every split. Smaller buckets have fewer lines, but more splits."""
    most = 0
    for bucket in map(sizes.bucket, sizes.buckets):
        for kv_heads, _, dim, window in shape.layers:
            queries = bucket.seats * shape.heads // kv_heads
            splits = split(bucket.slots, kv_heads, queries, bucket.room(window))
            most = max(most, splits * bucket.lines * shape.heads * (dim + 1) * 4)
    return most


def demand(needed: int, free: int) -> None:
    """Raises MemoryError if a batch that needs so many bytes is too large for what is free."""
    if needed > RESERVE * free:
        raise MemoryError(
            f"out of memory: the batch needs {needed / 2**30:.2f} GiB of {free / 2**30:.2f} free"
        )


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that a new tensor could have, PyTorch's own reserve included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
