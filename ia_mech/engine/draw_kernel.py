"""The draw of ``sampling.draw_tokens`` as two Triton kernels, for CUDA.

The first kernel reads the logits once. Of each block of 64 tokens it keeps the largest logit and
two sums of exponentials: at T = 1 and at the row's own T. The second kernel draws a block, then one
of its tokens, with the same random words as ``sampling.gumbel``. For the rank it reads only those
logits again whose block has a larger one than the chosen.

Logits stay in the model's dtype. What is launched depends on the shapes alone, so that a CUDA graph
can hold it. This file needs Triton, and is imported only where that is there.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ia_mech.engine.sampling import BLOCK, LOG2_E, NEVER_DRAWN, Draw

_BLOCK = tl.constexpr(BLOCK)
_PIECE = tl.constexpr(64)  # blocks that are read at a time
_LOG2_E = tl.constexpr(LOG2_E)
_FLOOR = tl.constexpr(math.log(NEVER_DRAWN))
_NONE = tl.constexpr(2**30)


@triton.jit
def _words(key, counter, step, level: tl.constexpr):
    """Random words as ``sampling.uniforms`` takes them: four for each ``counter``, in order."""
    zero = counter * 0
    first, second, third, fourth = tl.philox(key, counter, zero + step, zero + level, zero)
    return tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))


@triton.jit
def _gumbel(words):
    """Noise as ``sampling.gumbel`` makes it; only the logarithms may round differently."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log1p(-uniform): its series where 1 - uniform would lose what a small number says.
    series = 1.0 / 8
    for power in tl.static_range(7, 0, -1):
        series = series * uniform + 1.0 / power
    return -tl.log(tl.where(uniform < 0.125, series * uniform, -tl.log(1.0 - uniform)))


@triton.jit
def _largest(scores, index):
    """The index of the first largest score, and its lead over the next. Where no score is a number,
    the index is none of theirs."""
    best = tl.max(scores, 0)
    at = tl.min(tl.where(scores == best, index, _NONE), 0)
    return at, best - tl.max(tl.where(index == at, -float("inf"), scores), 0)


@triton.jit
def _reduce_blocks(logits, temperature, stats, stride, blocks, VOCAB: tl.constexpr):
    """``stats`` ``[rows, 3, blocks]``: each block's largest logit, and its sums of exponentials of
    logits minus the block's largest, at T = 1 and at the row's T."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(temperature + row)
    block = piece * _PIECE + tl.arange(0, _PIECE)
    token = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(logits + row * stride + token, mask=token < VOCAB, other=-float("inf"))
    x = x.to(tl.float32)
    top = tl.max(x, 1)
    below = x - tl.where(top == -float("inf"), 0.0, top)[:, None]
    to, there = stats + row * 3 * blocks + block, block < blocks
    tl.store(to, top, mask=there)
    tl.store(to + blocks, tl.sum(tl.exp2(below * _LOG2_E), 1), mask=there)
    warmth = _LOG2_E / tl.where(t == 0.0, 1.0, t)
    tl.store(to + 2 * blocks, tl.sum(tl.exp2(below * warmth), 1), mask=there)


@triton.jit
def _draw(
    logits, temperature, drawn, stream, step, stats, token, rank, logprob, tempered, margin,
    stride, blocks, VOCAB: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program draws one row's token. ``BLOCKS``: the number of blocks, up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    stats += row * 3 * blocks
    t, now = tl.load(temperature + row), tl.load(step + row)
    greedy = (t == 0.0) | (now >= tl.load(drawn + row))
    now, t = now.to(tl.int32), tl.where(greedy, 1.0, t)
    key = tl.load(stream + 2 * row) | (tl.load(stream + 2 * row + 1) << 32)

    block = tl.arange(0, BLOCKS)
    there = block < blocks
    top = tl.load(stats + block, mask=there, other=-float("inf"))
    best = tl.max(top, 0)
    below = top - best
    total = tl.load(stats + blocks + block, mask=there, other=0.0)
    total = tl.log(tl.sum(total * tl.exp(below), 0))
    warm = tl.load(stats + 2 * blocks + block, mask=there, other=0.0)
    # A block's score is the log-sum-exp of its logits / T.
    scores = tl.maximum(tl.log(warm) + below / t, _FLOOR)
    warm = tl.log(tl.sum(warm * tl.exp(below / t), 0))
    noise = _gumbel(_words(key, tl.arange(0, BLOCKS // 4), now, 1))
    chosen, lead = _largest(
        tl.where(greedy, top, tl.where(there, scores + noise, -float("inf"))), block
    )
    chosen = tl.minimum(chosen, blocks - 1)  # also of an idle row, whose logits may be no numbers

    place = tl.arange(0, _BLOCK)
    tokens = chosen * _BLOCK + place
    x = tl.load(logits + tokens, mask=tokens < VOCAB, other=-float("inf")).to(tl.float32)
    counter = chosen * (_BLOCK // 4) + tl.arange(0, _BLOCK // 4)
    scores, noise = (x - best) / t, _gumbel(_words(key, counter, now, 0))
    at, inner_lead = _largest(tl.where(greedy, scores, scores + noise), place)
    x = tl.max(tl.where(place == at, x, -float("inf")), 0)

    above = 0
    for first in range(0, blocks, _PIECE):
        number = first + tl.arange(0, _PIECE)
        tops = tl.load(stats + number, mask=number < blocks, other=-float("inf"))
        if tl.max(tops, 0) > x:
            of_piece = first * _BLOCK + tl.arange(0, _PIECE * _BLOCK)
            others = tl.load(logits + of_piece, mask=of_piece < VOCAB, other=-float("inf"))
            above += tl.sum((others.to(tl.float32) > x).to(tl.int32), 0)

    tl.store(token + row, tl.minimum(chosen * _BLOCK + at, VOCAB - 1))
    tl.store(rank + row, above + 1)
    tl.store(logprob + row, x - best - total)
    tl.store(tempered + row, tl.where(greedy, float("nan"), (x - best) / t - warm))
    tl.store(margin + row, tl.minimum(lead, inner_lead))


def draw(
    logits: Tensor,
    temperature: Tensor,
    drawn: Tensor,
    stream: Tensor,
    step: Tensor,
    *,
    out: Draw | None = None,
) -> Draw:
    """Draw one token per row, as ``sampling.draw_tokens`` does.

    Args:
        logits: ``[rows, vocab]`` in float32, bfloat16 or float16, raw; each row is contiguous.
        temperature: ``[rows]`` float32; 0 is greedy.
        drawn: ``[rows]`` int64, how many of a row's first tokens are sampled at its temperature;
            the rest is greedy.
        stream: ``[rows, 2]`` int64, contiguous, a key per row.
        step: ``[rows]`` int64, the index of the token within its row.
        out: tensors to write to; made anew if None.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    stats = temperature.new_empty(rows, 3, blocks)
    if out is None:
        like = temperature, temperature, step, temperature
        out = Draw(torch.empty_like(step), *map(torch.empty_like, like))
    _reduce_blocks[(rows, triton.cdiv(blocks, _PIECE.value))](
        logits, temperature, stats, logits.stride(0), blocks, VOCAB=vocab, num_warps=8
    )
    _draw[(rows,)](
        *(logits, temperature, drawn, stream, step, stats),
        *(out.token, out.rank, out.logprob, out.logprob_tempered, out.margin),
        *(logits.stride(0), blocks),
        VOCAB=vocab,
        BLOCKS=triton.next_power_of_2(max(blocks, 4)),
        num_warps=16,
    )
    return out
