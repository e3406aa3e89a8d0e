"""Attention of one decoding step in two kernels, which make no tensor of scores.

In PyTorch operations the scores of every seat with every token that a prefix has *room* for are
written to memory and read again, in float32, and so are those with the own tokens. Here they never
leave the chip (online softmax: FlashAttention, arXiv 2205.14135), and only tokens that are there
are read. All lines of a context ask its prefix together, as the rows of one matrix (Hydragen,
arXiv 2402.05099); a long prefix may be cut in splits that are worked on side by side
(Flash-Decoding, https://pytorch.org/blog/flash-decoding). The second kernel looks at each line's
own tokens and merges.

How many tokens there are is read from tensors, and grids depend on a bucket's sizes alone, so that
CUDA graphs can replay both. Scores and sums are float32; products of float32 are not made in TF32.
Needs Triton; :func:`ia_mech.engine.shared_prefix.attend` is the reference and what is used without.
"""

import torch
from torch import Tensor

from ia_mech.engine.cuda import fused
from ia_mech.engine.shared_prefix import FUSED

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

PROGRAMS = 256  # about two for each multiprocessor of a large GPU; with fewer, prefixes are split
SHORTEST = 256  # tokens of a split, at least: less isn't worth a merge
LEAST = 16  # rows and columns of a matrix that tl.dot takes


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype on this device is attended to by these kernels."""
    return dtype in FUSED and fused.available(device)


def attend(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    prefix: tuple[Tensor, Tensor],
    *,
    place: Tensor,
    length: Tensor,
    line_at: Tensor,
    seat_of: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of one query a line over its context's prefix and its own tokens.

    All keys and values are of the query's dtype, and a line's newest own token is stored already.

    Args:
        query: ``[lines, heads, 1, dim]``; so many heads as there are for each key-value head ask
            it, in order.
        own: keys ``[lines, kv_heads, room, dim]`` and values ``[lines, kv_heads, room,
            value_dim]``, contiguous.
        prefix: the same of slots, ``[slots, kv_heads, room, …]``, without padding in front.
        place: ``[lines]`` int64, where in its own room each line's newest token is.
        length: ``[slots]`` int64, tokens of each slot's context.
        line_at, seat_of: as :meth:`ia_mech.engine.cuda.seating.Seating.tables` makes them, the
            first one flat. A line that is idle sees its own tokens only.
        scaling: factor of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``[heads]`` scores of keys without a value (gpt-oss); they only take weight away.
        window: a query sees so many tokens at most, itself included (sliding window); None = all.

    Returns:
        ``[lines, heads, 1, value_dim]`` in the query's dtype.
    """
    lines, heads, _, dim = query.shape
    slots, kv_heads, room, value_dim = prefix[1].shape
    seats, group, item = len(line_at) // slots, heads // kv_heads, query.dtype.itemsize
    rows, columns, warps = tile(seats * group, max(dim, value_dim), item)
    blocks, splits = -(-seats * group // rows), split(slots, kv_heads, seats * group, room)
    span = -(-room // splits // columns) * columns
    query = query.contiguous()
    averages = torch.empty(
        splits, lines, heads, value_dim, dtype=torch.float32, device=query.device
    )
    totals = torch.empty(splits, lines, heads, dtype=torch.float32, device=query.device)
    output = query.new_empty(lines, heads, 1, value_dim)
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "DIM_PADDED": _padded(dim),
        "VALUE_PADDED": _padded(value_dim),
        "SOFTCAP": softcap,
        "WINDOW": window,
    }
    tables, parts = (place, line_at, seat_of), (averages, totals)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _prefix[(blocks, kv_heads, slots * splits)](
            query, *prefix, *tables, length, *parts,
            scaling, lines, seats, room, splits, span,
            **constants, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=2,
        )  # fmt: skip
        rows, columns, warps = tile(group, max(dim, value_dim), item)
        _own[(kv_heads, lines)](
            query, *own, *tables, *parts, sinks, output,
            scaling, lines, own[0].shape[2], splits,
            **constants, ROWS=rows, COLUMNS=min(columns, 32), num_warps=warps, num_stages=2,
        )  # fmt: skip
    return output


def tile(queries: int, dim: int, item: int) -> tuple[int, int, int]:
    """How much a program works on at a time.

    Args:
        queries: of a key-value head that ask the same keys.
        dim: the larger dimension of keys and values.
        item: bytes of a number.

    Returns:
        Queries, keys, and warps. Sums stay in registers, and queries and two stages of keys and
        values in 96 KiB of shared memory, which small GPUs have as well. (Compiled for sm_90;
        products of float32 aren't made by tensor cores and need more registers.)
    """
    padded = _padded(dim)
    most, columns = (16384 // padded, 8192 // padded) if item < 4 else (4096 // padded,) * 2
    most, columns = (min(max(LEAST, n), 64 if item < 4 else 32) for n in (most, columns))
    rows = min(_padded(queries), most)
    return rows, columns, 8 if rows * padded > 8192 else 4


def split(slots: int, kv_heads: int, queries: int, room: int) -> int:
    """In how many splits prefixes are read: one, if there are programs enough without.

    Args:
        slots: of the bucket.
        kv_heads: of the layer.
        queries: that a slot and key-value head have.
        room: tokens for which prefixes have room.
    """
    programs = slots * kv_heads * -(-queries // 64)
    return max(1, min(-(-PROGRAMS // programs), room // SHORTEST))


def _padded(size: int) -> int:
    """The next power of two that tl.dot takes."""
    return max(LEAST, 1 << (size - 1).bit_length())


if triton is not None:

    @triton.jit
    def _tanh(x):
        """By exponentials; near zero by its series, since 1 - e would lose what x says."""
        e = tl.exp(-2.0 * tl.abs(x))
        large = tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
        square = x * x
        series = ((-17.0 / 315.0 * square + 2.0 / 15.0) * square - 1.0 / 3.0) * square + 1.0
        return tl.where(tl.abs(x) < 0.2, x * series, large)

    @triton.jit
    def _look(
        query, keys, values, begin, stop, first, scaling,
        DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
        DIM_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
        SOFTCAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Queries ``[ROWS, DIM_PADDED]`` over the keys from ``begin`` up to ``stop``.

        Each query sees those from its ``first`` ``[ROWS]`` on. Returns the weighted sum of values
        ``[ROWS, VALUE_PADDED]``, the sum of weights and the largest score ``[ROWS]``, from which
        the weights are counted; a query that sees nothing has sums of zero.
        """
        # Not minus infinity, whose difference with itself is not a number.
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        of_key, of_value = tl.arange(0, DIM_PADDED), tl.arange(0, VALUE_PADDED)
        for start in range(begin, stop, COLUMNS):
            token = start + tl.arange(0, COLUMNS)
            there = token < stop
            key = tl.load(
                keys + token[:, None] * DIM + of_key[None, :],
                mask=there[:, None] & (of_key < DIM)[None, :],
                other=0.0,
            )
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
            if SOFTCAP is not None:
                scores = SOFTCAP * _tanh(scores / SOFTCAP)
            seen = there[None, :] & (token[None, :] >= first[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            less = tl.exp(top - higher)
            total = total * less + tl.sum(weights, 1)
            value = tl.load(
                values + token[:, None] * VALUE_DIM + of_value[None, :],
                mask=there[:, None] & (of_value < VALUE_DIM)[None, :],
                other=0.0,
            )
            result = tl.dot(
                weights.to(value.dtype), value, result * less[:, None], input_precision="ieee"
            )
            top = higher
        return result, total, top

    @triton.jit(do_not_specialize=["lines", "seats", "room", "splits", "span"])
    def _prefix(
        query, keys, values, place, line_at, seat_of, length, averages, totals,
        scaling, lines, seats, room, splits, span,
        KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
        DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
        DIM_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
        SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Of a slot and key-value head: some of its seats' queries over one split of the prefix.

        Writes the average of values ``[splits, lines, heads, VALUE_DIM]`` and the log-sum-exp
        ``[splits, lines, heads]`` of every line that has a seat; each of them has one writer.
        """
        slot, part = tl.program_id(2) // splits, tl.program_id(2) % splits
        kv_head = tl.program_id(1)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        seat = slot * seats + row // GROUP
        head = kv_head * GROUP + row % GROUP
        there = row < seats * GROUP
        # An empty seat names some line as well, but that line names another seat.
        line = tl.load(line_at + seat, mask=there, other=0)
        seated = there & (tl.load(seat_of + line) == seat)
        at = line * (KV_HEADS * GROUP) + head

        tokens = tl.load(length + slot).to(tl.int32)
        begin, stop = part * span, tl.minimum(tokens, part * span + span)
        first = tl.zeros([ROWS], tl.int32)
        if WINDOW is not None:
            first = tokens + tl.load(place + line).to(tl.int32) - WINDOW + 1
            nearest = tl.min(tl.where(seated, first, tokens))
            begin = tl.maximum(begin, nearest // COLUMNS * COLUMNS)
        stop = tl.where(tl.max(seated.to(tl.int32)) > 0, stop, begin)

        of_key, of_value = tl.arange(0, DIM_PADDED), tl.arange(0, VALUE_PADDED)
        asked = tl.load(
            query + at[:, None] * DIM + of_key[None, :],
            mask=seated[:, None] & (of_key < DIM)[None, :],
            other=0.0,
        )
        before = (slot.to(tl.int64) * KV_HEADS + kv_head) * room
        result, total, top = _look(
            asked, keys + before * DIM, values + before * VALUE_DIM, begin, stop, first, scaling,
            DIM, VALUE_DIM, DIM_PADDED, VALUE_PADDED, SOFTCAP, ROWS, COLUMNS,
        )  # fmt: skip

        nothing = total == 0.0
        total = tl.where(nothing, 1.0, total)
        at += part.to(tl.int64) * lines * (KV_HEADS * GROUP)
        tl.store(
            averages + at[:, None] * VALUE_DIM + of_value[None, :],
            result / total[:, None],
            mask=seated[:, None] & (of_value < VALUE_DIM)[None, :],
        )
        tl.store(totals + at, tl.where(nothing, -float("inf"), top + tl.log(total)), mask=seated)

    @triton.jit(do_not_specialize=["lines", "room", "splits"])
    def _own(
        query, keys, values, place, line_at, seat_of, averages, totals, sinks, output,
        scaling, lines, room, splits,
        KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
        DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
        DIM_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
        SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """Of a line and key-value head: its queries over its own tokens, merged with the prefix.

        The sums of all parts are brought to one largest score and added; of its own tokens a line
        sees at least the newest, so they are not zero.
        """
        line, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(0)
        row = tl.arange(0, ROWS)
        there = row < GROUP
        at = line * (KV_HEADS * GROUP) + kv_head * GROUP + row
        of_key, of_value = tl.arange(0, DIM_PADDED), tl.arange(0, VALUE_PADDED)
        shown = there[:, None] & (of_value < VALUE_DIM)[None, :]
        asked = tl.load(
            query + at[:, None] * DIM + of_key[None, :],
            mask=there[:, None] & (of_key < DIM)[None, :],
            other=0.0,
        )
        newest = tl.load(place + line).to(tl.int32)
        oldest = newest * 0
        if WINDOW is not None:
            oldest = tl.maximum(newest - WINDOW + 1, 0)
        before = (line * KV_HEADS + kv_head) * room
        result, total, top = _look(
            asked, keys + before * DIM, values + before * VALUE_DIM,
            oldest, newest + 1, tl.zeros([ROWS], tl.int32), scaling,
            DIM, VALUE_DIM, DIM_PADDED, VALUE_PADDED, SOFTCAP, ROWS, COLUMNS,
        )  # fmt: skip

        seated = tl.load(line_at + tl.load(seat_of + line)) == line
        for part in range(0, tl.where(seated, splits, 0)):
            there_at = at + part * lines.to(tl.int64) * (KV_HEADS * GROUP)
            theirs = tl.load(totals + there_at, mask=there, other=-float("inf"))
            average = tl.load(
                averages + there_at[:, None] * VALUE_DIM + of_value[None, :], mask=shown, other=0.0
            )
            higher = tl.maximum(top, theirs)
            less, weight = tl.exp(top - higher), tl.exp(theirs - higher)
            result = result * less[:, None] + average * weight[:, None]
            total = total * less + weight
            top = higher
        if sinks is not None:
            head = kv_head * GROUP + row
            sink = tl.load(sinks + head, mask=there, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, sink)
            less = tl.exp(top - higher)
            result = result * less[:, None]
            total = total * less + tl.exp(sink - higher)
        result = result / total[:, None]
        tl.store(
            output + at[:, None] * VALUE_DIM + of_value[None, :],
            result.to(output.dtype.element_ty),
            mask=shown,
        )
