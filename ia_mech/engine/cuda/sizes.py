"""How large the buffers of a batch are, and what they take of a device's memory.

Pure arithmetic on the plan of a stream, so that the same run makes the same buffers again: matrix
products round differently in another shape. Free memory is only compared with the result, and can
do no more than refuse it; a smaller batch is then tried, said and recorded as after any other lack
of memory (:class:`ia_mech.engine.memory.Halving`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ia_mech.engine.cuda.kernels import split

ROUND = 128  # prefixes are given room in multiples of this, so that units of a run share buffers
SPARE = 2  # contexts held at a time, as a multiple of those that fill the batch
RESERVE = 0.9  # of the free memory that a batch may plan with; the rest is for fragmentation
# Bytes per logit of the sampling rule in PyTorch operations: logits, scores, two distributions and
# the noise in float32, and about six of Philox' integer tensors of a quarter of the vocabulary.
SAMPLING_BYTES = 5 * 4 + 6 * 8 // 4
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
    def of(cls, contexts: Sequence[int], width: int, longest: int, own: int) -> "Sizes":
        """For rows of these contexts, a batch of ``width``, contexts of up to ``longest`` tokens
        and rows of up to ``own``.

        Rows that end early leave their context's slot half empty; with :data:`SPARE` times the
        slots that a full batch needs, others can begin in their place.
        """
        rows = Counter(contexts)
        seats = min(width, max(rows.values(), default=1))
        slots = min(len(rows), width, max(2, -(-SPARE * width // seats)))
        return cls(width, max(1, slots), seats, -(-longest // ROUND) * ROUND, own)

    @property
    def buckets(self) -> list[int]:
        """The numbers of lines that steps are made for: powers of two, and all."""
        powers = [1 << n for n in range(self.lines.bit_length())]
        return [*(n for n in powers if n < self.lines), self.lines]

    def bucket(self, lines: int) -> "Sizes":
        """The part of the buffers that a step of the smallest bucket for so many lines reads."""
        n = next(n for n in self.buckets if n >= lines)
        return Sizes(n, min(self.slots, n), min(self.seats, n), self.prefix, self.own)


@dataclass(frozen=True)
class Shape:
    """What of a model its batches' memory depends on.

    Attributes:
        layers: of each layer the key-value heads, and the dimensions of a key and of a value.
        heads: of the queries.
        width: of the residual stream and of the blocks' widest layer, together.
        vocab: number of logits.
        dtype: of weights and cache.
    """

    layers: tuple[tuple[int, int, int], ...]
    heads: int
    width: int
    vocab: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config, layers: Sequence, logits: Tensor) -> "Shape":
        """Of a model with this text configuration, from the layers of a prefilled cache."""
        widest = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(
            tuple((t.keys.shape[1], t.keys.shape[-1], t.values.shape[-1]) for t in layers),
            config.num_attention_heads,
            config.hidden_size + widest,
            logits.shape[-1],
            layers[0].keys.dtype,
        )


def needed_bytes(shape: Shape, sizes: Sizes, fused: bool = False) -> int:
    """What a batch of these sizes takes: its buffers, and what a step needs besides.

    Args:
        shape: of the model, whose weights are in memory already.
        sizes: of the batch.
        fused: kernels make no tensors of the size of the logits in sampling, nor of scores in
            attention.
    """
    item = shape.dtype.itemsize
    tokens = sizes.slots * sizes.prefix + sizes.lines * sizes.own
    cache = tokens * item * sum(heads * (key + value) for heads, key, value in shape.layers)
    attention = _parts(shape, sizes) if fused else _scores(shape, sizes)
    logits = sizes.lines * shape.vocab * (item + 4 + (0 if fused else SAMPLING_BYTES))
    activations = 4 * sizes.lines * shape.width * item
    return cache + max(attention, logits) + activations


def _scores(shape: Shape, sizes: Sizes) -> int:
    """Bytes of the scores of a layer's attention in PyTorch operations."""
    seen = sizes.slots * sizes.seats * sizes.prefix + sizes.lines * sizes.own
    return seen * shape.heads * 4 * SCORES


def _parts(shape: Shape, sizes: Sizes) -> int:
    """Bytes of what the kernels of a layer's attention tell each other: of each line and head an
    average and a log-sum-exp for every split. Smaller buckets have fewer lines, but more splits."""
    most = 0
    for bucket in map(sizes.bucket, sizes.buckets):
        for kv_heads, _, dim in shape.layers:
            queries = bucket.seats * shape.heads // kv_heads
            splits = split(bucket.slots, kv_heads, queries, bucket.prefix)
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
