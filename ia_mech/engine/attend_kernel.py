"""Attention of one decoding step as a Triton kernel, for CUDA.

Each row attends to its context's prefix where the prefill left it, to its own tokens, and to its
newest token, whose key and value the kernel stores. What ``shared.attend`` and ``shared.merge``
compute in parts is one softmax here, which goes over all keys once.

A *tile* is some rows of one context. A program computes one tile and one key-value head: the rows'
queries that share this head are the rows of one matrix (Hydragen, arXiv 2402.05099). The program
goes through the prefix once, then through the own tokens of all its rows, where each row sees its
own alone.

What changes from step to step are numbers in tensors: the rows of each tile, the *place* where a
row's own tokens are, its *age* (how many they are), and the addresses of the prefixes. What is
launched depends on the shapes alone, so that a CUDA graph can hold it. Prefixes are never copied,
and a row that ends or joins moves nothing. This file needs Triton, and is imported only where that
is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    large = tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    square = x * x  # the series, where 1 - e would lose what a small x says
    series = ((-17.0 / 315.0 * square + 2.0 / 15.0) * square - 1.0 / 3.0) * square + 1.0
    return tl.where(tl.abs(x) < 0.2, x * series, large)


@triton.jit
def _load(vectors, at, there, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The vectors of length ``SIZE`` with the numbers ``at``; zeros where none is ``there``."""
    of = tl.arange(0, PADDED)
    mask = there[:, None] & (of < SIZE)[None, :]
    return tl.load(vectors + at[:, None] * SIZE + of[None, :], mask=mask, other=0.0)


@triton.jit
def _store(vectors, at, there, matrix, SIZE: tl.constexpr, PADDED: tl.constexpr):
    of = tl.arange(0, PADDED)
    mask = there[:, None] & (of < SIZE)[None, :]
    tl.store(vectors + at[:, None] * SIZE + of[None, :], matrix, mask=mask)


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    if SOFTCAP is None:
        return scores
    else:
        return SOFTCAP * _tanh(scores / SOFTCAP)


@triton.jit
def _fold(
    query, keys, values, at, there, seen, scaling, result, total, top,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Go on with a softmax over more keys: those with the numbers ``at`` that are ``there``, of
    which a query sees some. So far ``top`` is the largest score, ``total`` the sum of the weights
    ``exp(score - top)``, and ``result`` that of the weighted values."""
    key = _load(keys, at, there, DIM, DIM_PADDED)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    scores = tl.where(seen & there[None, :], _capped(scores, SOFTCAP), -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights, faded = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
    total = total * faded + tl.sum(weights, 1)
    value = _load(values, at, there, VALUE_DIM, VALUE_PADDED)
    result = result * faded[:, None]
    result = tl.dot(weights.to(value.dtype), value, result, input_precision="ieee")
    return result, total, higher


@triton.jit
def _attend(
    query, new_key, new_value, own_key, own_value,
    key_at, value_at, head_tokens, begins, stops, tile_context, tile_rows, places, ages, sinks,
    output, scaling, room,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    tile_rows += tile * ROWS
    context = tl.load(tile_context + tile)
    if context >= 0:
        # A query is one head of one row; those without a row fill up the matrix.
        slot = tl.arange(0, QUERIES)
        seat, head = slot // GROUP, kv_head * GROUP + slot % GROUP
        row = tl.load(tile_rows + seat, mask=seat < ROWS, other=-1)
        seated = row >= 0
        row = tl.where(seated, row, 0).to(tl.int64)
        age = tl.load(ages + row)
        asked = row * (KV_HEADS * GROUP) + head
        queries = _load(query, asked, seated, DIM, DIM_PADDED)

        # The newest token is stored by its row's first query. Each row sees it, so that no softmax
        # is over nothing.
        key = _load(new_key, row * KV_HEADS + kv_head, seated, DIM, DIM_PADDED)
        value = _load(new_value, row * KV_HEADS + kv_head, seated, VALUE_DIM, VALUE_PADDED)
        newest = (tl.load(places + row).to(tl.int64) * KV_HEADS + kv_head) * room + age
        stores = seated & (slot % GROUP == 0)
        _store(own_key, newest, stores, key, DIM, DIM_PADDED)
        _store(own_value, newest, stores, value, VALUE_DIM, VALUE_PADDED)
        top = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scaling
        top = _capped(top, SOFTCAP)
        total = tl.full([QUERIES], 1.0, tl.float32)
        result = value.to(tl.float32)

        begin, stop = tl.load(begins + context), tl.load(stops + context)
        nearest = tl.zeros([QUERIES], tl.int32) + begin  # token of the prefix that a query sees
        span = tl.max(tl.where(seated, age, 0), 0)  # most own tokens that a query sees
        if WINDOW is not None:
            nearest = stop + age - (WINDOW - 1)
            begin = tl.maximum(begin, tl.min(tl.where(seated, nearest, stop), 0))
            span = tl.minimum(span, WINDOW - 1)
        before = kv_head * tl.load(head_tokens + context)
        keys = tl.load(key_at + context).to(tl.pointer_type(own_key.dtype.element_ty))
        values = tl.load(value_at + context).to(tl.pointer_type(own_value.dtype.element_ty))
        if DIM % 16 == 0 and VALUE_DIM % 16 == 0:  # then vectors begin at multiples of 16 bytes
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        for start in range(begin, stop, COLUMNS):
            token = start + tl.arange(0, COLUMNS)
            result, total, top = _fold(
                queries, keys + before * DIM, values + before * VALUE_DIM, token, token < stop,
                token[None, :] >= nearest[:, None], scaling, result, total, top,
                DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, SOFTCAP,
            )  # fmt: skip

        # The last own tokens of the tile's first row, then of its second, and so on.
        rows = tl.max(tl.where(seated, seat + 1, 0), 0)
        for start in range(0, rows * span, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            number = column // span
            owner = tl.load(tile_rows + number, mask=number < rows, other=-1)
            there = owner >= 0
            token = tl.load(ages + owner, mask=there, other=0) - span + column % span
            at = tl.load(places + owner, mask=there, other=0).to(tl.int64)
            at = (at * KV_HEADS + kv_head) * room + token
            result, total, top = _fold(
                queries, own_key, own_value, at, there & (token >= 0),
                number[None, :] == seat[:, None], scaling, result, total, top,
                DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, SOFTCAP,
            )  # fmt: skip

        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            higher = tl.maximum(top, sink)
            faded = tl.exp(top - higher)
            result, total = result * faded[:, None], total * faded + tl.exp(sink - higher)
        result = (result / total[:, None]).to(output.dtype.element_ty)
        _store(output, asked, seated, result, VALUE_DIM, VALUE_PADDED)


class Prefixes(NamedTuple):
    """Where one layer's prefixes are, on its device; every field is ``[contexts]``.

    Attributes:
        key_at: int64 addresses of each context's keys ``[kv_heads, tokens, dim]``, whose tokens
            follow one another without a gap.
        value_at: the same of its values.
        head_tokens: int64, how many tokens' places lie between the beginnings of two heads.
        begins: int32, the first token that isn't padding.
        stops: int32, how many tokens there are, padding included.
    """

    key_at: Tensor
    value_at: Tensor
    head_tokens: Tensor
    begins: Tensor
    stops: Tensor


@dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    Attributes:
        queries: most queries of a tile.
        columns: keys that are read at a time.
        warps: of a program.
        stages: how many readings overlap, as Triton counts them.
    """

    queries: int
    columns: int
    warps: int
    stages: int = 2

    @classmethod
    def of(cls, dtype: torch.dtype, dim: int) -> "Tiling":
        """One whose programs fit into registers. (Which is fastest has not been measured.)

        Args:
            dim: length of keys or values, the longer of both.
        """
        if dtype == torch.float32:  # multiplied without tensor cores
            return cls(16, 32 if dim <= 128 else 16, warps=8)
        return cls(32, 64 if dim <= 128 else 32, warps=4 if dim <= 256 else 8)

    def rows(self, group: int) -> int:
        """Rows of a tile, where so many heads share their keys."""
        return max(1, self.queries // group)


def tiles(contexts: Sequence[int], rows: int) -> list[tuple[int, list[int]]]:
    """The tiles of a batch, each a context and some of its rows.

    Args:
        contexts: of each row; -1 for an idle one.
        rows: most rows of a tile, as :meth:`Tiling.rows` has it.
    """
    of: dict[int, list[int]] = {}
    for row, context in enumerate(contexts):
        of.setdefault(context, []).append(row)
    made = []
    for context in sorted(of.keys() - {-1}):
        mine, count = of[context], -(-len(of[context]) // rows)
        made += [(context, mine[number::count]) for number in range(count)]  # about as many each
    return made


def attend(
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    prefix: Prefixes,
    tile_context: Tensor,
    tile_rows: Tensor,
    places: Tensor,
    ages: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Attention ``[rows, heads, value_dim]`` of each row's newest token; idle rows hold anything.

    Args:
        query: ``[rows, heads, dim]``.
        new_key: ``[rows, kv_heads, dim]``, of the newest tokens.
        new_value: ``[rows, kv_heads, value_dim]``.
        own_key: ``[places, kv_heads, room, dim]``, the rows' own keys; the new ones are written.
        own_value: ``[places, kv_heads, room, value_dim]``.
        prefix: this layer's.
        tile_context: ``[tiles]`` int32, the context of each tile; -1 for one without rows.
        tile_rows: ``[tiles, rows of a tile]`` int32, filled up with -1 behind the rows.
        places: ``[rows]`` int32, where each row's own tokens are.
        ages: ``[rows]`` int32, how many tokens a row has there, the newest not counted.
        scaling: factor of the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        window: how many tokens a row sees, its newest included; None for all.
        sinks: ``[heads]`` scores of keys without a value.
        tiling: for tests of speed.
    """
    rows, heads, dim = query.shape
    _, kv_heads, room, value_dim = own_value.shape
    group, tile = heads // kv_heads, tile_rows.shape[1]
    tiling = tiling or Tiling.of(query.dtype, max(dim, value_dim))
    output = query.new_empty(rows, heads, value_dim)
    _attend[(len(tile_context), kv_heads)](
        *(query.contiguous(), new_key.contiguous(), new_value.contiguous(), own_key, own_value),
        *(*prefix, tile_context, tile_rows, places, ages, query if sinks is None else sinks),
        *(output, scaling, room),
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=tile,
        QUERIES=_padded(tile * group),
        DIM=dim,
        DIM_PADDED=_padded(dim),
        VALUE_DIM=value_dim,
        VALUE_PADDED=_padded(value_dim),
        SOFTCAP=softcap,
        WINDOW=window,
        SINKS=sinks is not None,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return output


def _padded(size: int) -> int:
    """To what Triton takes as the side of a matrix of a product."""
    return max(16, triton.next_power_of_2(size))
