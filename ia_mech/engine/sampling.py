"""Counter-based randomness and the sampling rule, as pure functions of tensors.

A row's noise depends on (run seed, source_id, sample, step) and on nothing else: not on the batch
it sits in, not on the temperature, not on the perturbation of its context. Two temperatures (or two
perturbations) of the same sample therefore share their noise, which pairs them in every comparison.

The generator is Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), written in integer tensor operations so that CPU and CUDA give the same random
words; only the logarithms that make Gumbel noise of them may round differently.
The sampling rule is the Gumbel-max trick: argmax over tokens of ``logits / T + Gumbel noise`` is a
draw from ``softmax(logits / T)``. With shared noise, neighbouring temperatures mostly draw the same
token, which couples them far better than an inverse CDF in vocabulary order does.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ia_mech.errors import is_out_of_memory

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox4x32 multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl key increments: golden ratio and sqrt(3) - 1
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_ONE_BELOW = 1.0 - 2.0**-24  # the largest float32 below one
_BLOCK = 64  # scores
CPU_LOGITS = 400_000  # logits sampled at a time on a CPU, so that temporary tensors stay in cache
LOG2_E = 1 / math.log(2)


def stream_key(seed: int, source_id: str, sample: int) -> tuple[int, int]:
    """The 64-bit Philox key of one sample of one source, as two 32-bit words."""
    return _key(seed, source_id, str(sample))


def response_stream_key(seed: int, source_id: str, index: int) -> tuple[int, int]:
    """The key of one response to one source's query. No turn has it: turns after a response that
    shared its noise would be no independent draws."""
    return _key(seed, source_id, "response", str(index))


def _key(seed: int, *words: str) -> tuple[int, int]:
    text = "\x1f".join([str(seed), *words]).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words (shapes must broadcast).

    Returns four int64 tensors of 32-bit words. Products of two 32-bit words wrap in int64, but
    shift and mask read the same bits as an unsigned product would have.
    """
    c0, c1, c2, c3, *_ = torch.broadcast_tensors(*counter, *key)
    c0, c2 = c0.clone(), c2.clone()
    k0, k1 = key
    for _ in range(_ROUNDS):
        # In place, or most of the time would go into fetching new memory. Of c1 and c3 only the
        # lower 32 bits count.
        p0, p1 = c0.mul_(_M0), c2.mul_(_M1)
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def uniforms(keys: Tensor, step: int | Tensor, vocab: int) -> Tensor:
    """Uniform numbers in (0, 1) for one decoding step.

    Args:
        keys: ``[streams, 2]`` int64, one :func:`stream_key` per row.
        step: index of the token being drawn, 0 for the first; one, or ``[streams, 1]`` int64.
        vocab: how many numbers per stream.

    Returns:
        ``[streams, vocab]`` float32. Small values keep full relative precision (they decide the
        far tail of the Gumbel noise); the largest is the float below one.
    """
    block = torch.arange((vocab + 3) // 4, device=keys.device)[None, :]  # [1, vocab / 4]
    zero = torch.zeros(1, 1, dtype=torch.long, device=keys.device)
    words = philox((block, zero + step, zero, zero), (keys[:, :1], keys[:, 1:]))
    bits = torch.empty(*words[0].shape, 4, device=keys.device)
    for place, word in enumerate(words):
        bits[..., place] = word
    bits = bits.flatten(1)[:, :vocab]  # [streams, vocab]
    return bits.add_(0.5).mul_(2.0**-32).clamp_(max=_ONE_BELOW)


def gumbel(keys: Tensor, step: int | Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise ``[streams, vocab]`` float32; arguments as for :func:`uniforms`."""
    return uniforms(keys, step, vocab).neg_().log1p_().neg_().log_().neg_()


@dataclass
class Draw:
    """One token per row with what is recorded about it; every field is ``[rows]``.

    ``logprob`` is raw (T = 1) and ``logprob_tempered`` is under the row's own temperature (NaN for
    greedy), in nats. ``rank`` is 1 for the most likely token. ``margin`` is by how much the chosen
    token beat the runner-up in the score that was maximised (logits, or logits / T + noise): two
    computations that differ by less than the margin choose the same token.
    """

    token: Tensor
    logprob: Tensor
    logprob_tempered: Tensor
    rank: Tensor
    margin: Tensor


def sample(logits: Tensor, temperature: Tensor, stream: Tensor, step: int) -> Draw:
    """Draw one token per row.

    Args:
        logits: ``[rows, vocab]`` float32, raw.
        temperature: ``[rows]`` float32, 0 for greedy.
        stream: ``[rows, 2]`` int64, a :func:`stream_key` per row; unused by greedy rows.
        step: index of the token within its row.
    """
    if logits.device.type == "cuda":
        return _compiled(logits.device)(logits, temperature, stream, step)
    vocab = logits.shape[-1]
    # Rows that differ in temperature only share their noise, which is made once.
    noise_row = torch.zeros(len(temperature), dtype=torch.long)
    sampled = (temperature > 0).nonzero()[:, 0]
    used, noise_row[sampled] = torch.unique(stream[sampled], dim=0, return_inverse=True)
    noise = torch.empty(len(used), vocab)
    for part in cpu_slices(len(used), 2 * vocab, logits.device):  # its words take 64 bits
        noise[part] = gumbel(used[part], step, vocab)
    parts = [
        draw(logits[part], temperature[part], noise, noise_row[part])
        for part in cpu_slices(len(temperature), vocab, logits.device)
    ]
    names = [field.name for field in fields(Draw)]
    return Draw(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def cpu_slices(count: int, width: int, device: torch.device) -> list[slice]:
    """Slices of ``count`` rows, of :data:`CPU_LOGITS` numbers each on a CPU; else a single one."""
    size = max(1, CPU_LOGITS // width) if device.type == "cpu" else max(1, count)
    return [slice(start, start + size) for start in range(0, count, size)]


def _sample_at_once(logits: Tensor, temperature: Tensor, stream: Tensor, step: int) -> Draw:
    """:func:`sample` as one expression, which a compiler makes one kernel of."""
    every = torch.arange(len(logits), device=logits.device)
    return draw(logits, temperature, gumbel(stream, step, logits.shape[-1]), every)


@functools.cache
def _compiled(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, int], Draw]:
    """:func:`_sample_at_once`, compiled if the device's compiler works: in separate operations the
    ten rounds of Philox alone read and write gigabytes at a thousand rows of 150k logits."""
    return (
        _sample_at_once if compile_failure(device) else torch.compile(_sample_at_once, dynamic=True)
    )


@functools.cache
def compile_failure(device: torch.device) -> str:
    """Why the draw isn't compiled there; empty where it is, and on a CPU, where it needn't be."""
    if device.type != "cuda":
        return ""
    try:
        compiled = torch.compile(_sample_at_once, dynamic=True)
        rows = torch.zeros(2, dtype=torch.long, device=device)
        compiled(torch.zeros(2, 8, device=device), rows.float(), torch.stack([rows, rows], 1), 0)
        return ""
    except Exception as error:  # of the compiler, the driver or the file system
        if is_out_of_memory(error):
            raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:120]


def draw(logits: Tensor, temperature: Tensor, noise: Tensor, noise_row: Tensor) -> Draw:
    """Choose one token per row, each at its own temperature.

    Args:
        logits: ``[rows, vocab]`` float32, raw.
        temperature: ``[rows]`` float32; 0 means greedy, which uses no noise.
        noise: ``[streams, vocab]`` Gumbel noise.
        noise_row: ``[rows]`` int64, the stream of each row (ignored for greedy rows).
    """
    greedy = temperature == 0
    divisor = temperature.masked_fill(greedy, 1.0)[:, None]
    scores = logits / divisor
    if noise.shape[0]:
        # Noise is finite, so a greedy row's scores stay its logits.
        scores.addcmul_(noise.index_select(0, noise_row), (~greedy)[:, None].to(noise.dtype))
    best, token = largest(scores)
    margin = best - scores.scatter_(-1, token, -torch.inf).amax(-1, keepdim=True)
    below = logits - logits.amax(-1, keepdim=True)
    chosen = below.gather(-1, token)
    raw, tempered = (chosen / t - log_sum_exp(below, t, out=scores) for t in (1.0, divisor))
    return Draw(
        token=token[:, 0],
        logprob=raw[:, 0],
        logprob_tempered=tempered[:, 0].masked_fill(greedy, torch.nan),
        rank=ranks(below, chosen, out=scores),
        margin=margin[:, 0],
    )


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of ``[rows, vocab]`` and the index of the first such one, each ``[rows, 1]``.

    On a CPU an index takes ten times as long to find as the largest number itself, so it is looked
    for in the block that holds it.
    """
    if scores.shape[-1] % _BLOCK:
        return scores.max(-1, keepdim=True)
    blocks = scores.view(len(scores), -1, _BLOCK)
    best, block = blocks.amax(-1).max(-1, keepdim=True)
    inside = blocks.take_along_dim(block[..., None], 1).argmax(-1)
    return best, block * _BLOCK + inside


def log_sum_exp(below: Tensor, temperature: float | Tensor, *, out: Tensor) -> Tensor:
    """``logsumexp(below / temperature)`` over the last dimension, which is kept.

    By powers of two: on a CPU, PyTorch's ``exp`` takes four times as long as ``exp2``. It is off by
    at most (ln(vocab) + 4) * 2**-23 nats: an exponent y is rounded twice, which changes its power
    by |y| * 2**-23 of it, and the mean of |y| over the distribution is at most ln(vocab).
    (``log_softmax`` is as fast, but is off by up to 1e-5, always the same way.)

    Args:
        below: ``[…, vocab]`` float32, logits less the largest of their row.
        temperature: a number, or ``[…, 1]``.
        out: a tensor like ``below``, which is overwritten.
    """
    torch.mul(below, LOG2_E / temperature, out=out)
    return out.exp2_().sum(-1, keepdim=True).log_()


def ranks(logits: Tensor, chosen: Tensor, *, out: Tensor) -> Tensor:
    """Ranks ``[…]`` int64 from 1 of the ``chosen`` ``[…, 1]`` among ``logits`` ``[…, vocab]``.

    ``out``, a tensor like ``logits``, is overwritten: in float32, which counts to 2**24, comparing
    and counting take a fourth of their time in bool.
    """
    return torch.gt(logits, chosen, out=out).sum(-1).long() + 1
