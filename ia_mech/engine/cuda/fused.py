"""The sampling rule in one kernel: noise, choice and what is recorded, in two looks at the logits.

In PyTorch operations the ten rounds of Philox alone read and write gigabytes at a thousand rows of
150k logits; here noise never leaves the registers. The random words are those of
:mod:`ia_mech.engine.sampling`, bit for bit; logarithms round differently. Needs Triton, which
PyTorch brings along for CUDA; where it is missing, or ``IA_MECH_TRITON=0``, PyTorch operations
are used.
"""

import functools
import os

import torch
from torch import Tensor

from ia_mech.engine.sampling import Draw
from ia_mech.errors import is_out_of_memory

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 4096  # logits at a time


def available(device: torch.device) -> bool:
    """Whether the kernel is used on this device: a GPU, with a Triton that works, unless
    ``IA_MECH_TRITON=0``."""
    wanted = triton is not None and os.environ.get("IA_MECH_TRITON") != "0"
    return wanted and device.type == "cuda" and not problem(device)


def missed(device: torch.device) -> str:
    """Why a GPU lacks the kernel where it is wanted; empty where it has it."""
    if device.type != "cuda" or os.environ.get("IA_MECH_TRITON") == "0":
        return ""
    return "Triton isn't installed" if triton is None else problem(device)


@functools.cache
def problem(device: torch.device) -> str:
    """What keeps Triton from working there, empty where nothing does. By trial: it needs a C
    compiler, a folder to write to, and a GPU that isn't too old."""
    try:
        drawn = draw(
            torch.zeros(1, 8, device=device),
            torch.zeros(1, device=device),
            torch.zeros(1, 2, dtype=torch.long, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
        )
        return "" if drawn.token.tolist() == [0] else "it draws wrong tokens"
    except Exception as error:  # of the compiler, the driver or the file system
        if is_out_of_memory(error):
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:120]


def draw(logits: Tensor, temperature: Tensor, keys: Tensor, step: Tensor) -> Draw:
    """As ``draw`` of :mod:`ia_mech.engine.sampling` with its ``gumbel`` noise of these keys.

    Args:
        logits: ``[rows, vocab]``, raw, of any floating dtype, each row without gaps; computed with
            in float32.
        temperature: ``[rows]`` float32, without gaps; 0 means greedy.
        keys: ``[rows, 2]`` int64, Philox keys.
        step: ``[rows]`` int64, index of the token being drawn.
    """
    rows, vocab = logits.shape
    token, rank = (torch.empty(rows, dtype=torch.long, device=logits.device) for _ in range(2))
    # Each begins at a multiple of 16 bytes whatever the rows, or Triton would compile once more.
    room = -(-rows // 4) * 4
    floats = torch.empty(3, room, dtype=torch.float32, device=logits.device)[:, :rows]
    block = min(BLOCK, triton.next_power_of_2(vocab))
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _draw[(rows,)](
            logits, temperature, keys.contiguous(), step, token, rank, *floats,
            logits.stride(0), VOCAB=vocab, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return Draw(token, floats[0], floats[1], rank, floats[2])


if triton is not None:

    @triton.jit
    def _gumbel(bits):
        """Standard Gumbel noise of 32-bit words, in float32."""
        u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
        # -log(1 - u): near zero by its series, since 1 - u would lose what u says.
        series = 0.1
        for n in tl.static_range(9, 0, -1):
            series = series * u + 1.0 / n
        exponential = tl.where(u < 0.125, series * u, -tl.log(1.0 - u))
        return -tl.log(exponential)

    @triton.jit
    def _draw(
        logits, temperature, keys, step, token, rank, logprob, tempered, margin,
        stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        t = tl.load(temperature + row)
        greedy = t == 0.0
        divisor = tl.where(greedy, 1.0, t)
        seed = tl.load(keys + 2 * row) | (tl.load(keys + 2 * row + 1) << 32)
        number = tl.load(step + row).to(tl.int32)

        best, second, chosen, at = -float("inf"), -float("inf"), -float("inf"), 0
        # Largest and sum of exponentials, of the logits and of what they are divided to.
        top, total, top_t, total_t = -1e30, 0.0, -1e30, 0.0
        for start in range(0, VOCAB, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(logits + offsets, mask=offsets < VOCAB, other=-float("inf")).to(tl.float32)
            scaled = tl.div_rn(x, divisor + tl.zeros_like(x))
            # Four words of each counter are the noise of four neighbours.
            counter = start // 4 + tl.arange(0, BLOCK // 4)
            zero = tl.zeros_like(counter)
            a, b, c, d = tl.philox(seed, counter, zero + number, zero, zero)
            words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
            score = tl.where(greedy, x, scaled + _gumbel(words))
            score = tl.where(offsets < VOCAB, score, -float("inf"))

            here, place = tl.max(score, 0, return_indices=True)
            others = tl.max(tl.where(offsets == start + place, -float("inf"), score))
            new = here > best
            second = tl.maximum(tl.minimum(best, here), tl.maximum(second, others))
            at = tl.where(new, start + place, at)
            taken = tl.sum(tl.where(offsets == start + place, x, 0.0))
            chosen = tl.where(new, taken, chosen)
            best = tl.maximum(best, here)

            higher = tl.maximum(top, tl.max(x))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher))
            top = higher
            higher_t = tl.maximum(top_t, tl.max(scaled))
            total_t = total_t * tl.exp(top_t - higher_t) + tl.sum(tl.exp(scaled - higher_t))
            top_t = higher_t

        above = 0
        for start in range(0, VOCAB, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(logits + offsets, mask=offsets < VOCAB, other=-float("inf")).to(tl.float32)
            above += tl.sum((x > chosen).to(tl.int32))

        tl.store(token + row, tl.cast(at, tl.int64))
        tl.store(rank + row, tl.cast(above + 1, tl.int64))
        tl.store(logprob + row, chosen - top - tl.log(total))
        cold = tl.div_rn(chosen, divisor) - top_t - tl.log(total_t)
        tl.store(tempered + row, tl.where(greedy, float("nan"), cold))
        tl.store(margin + row, best - second)
