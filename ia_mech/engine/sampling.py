"""Counter-based randomness and the sampling rule, as pure functions of tensors.

A row's noise depends on (run seed, source_id, sample, step) and on nothing else: not on the batch
it sits in, not on the temperature, not on the perturbation of its context. Two temperatures (or two
perturbations) of the same sample therefore share their noise, which pairs them in every comparison.

The generator is Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), written in integer tensor operations so that CPU and CUDA give the same random
words; only the logarithms that turn them into Gumbel noise may round differently.

The sampling rule is the Gumbel-max trick: the argmax of scores, each with Gumbel noise of its own,
is a draw from their softmax. It is used on two levels. First a block of 64 consecutive tokens is
drawn, whose score is the log-sum-exp of ``logits / T`` over its tokens; then one of its tokens,
whose score is ``logits / T``. The two probabilities multiply to ``softmax(logits / T)``: the draw
is exact, and takes ``vocab / 64 + 64`` random numbers instead of ``vocab``. With shared noise,
neighbouring temperatures mostly draw the same token: nearly as often as if every token had a number
of its own, and far more often than by an inverse CDF in vocabulary order.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox4x32 multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl key increments: golden ratio and sqrt(3) - 1
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_ONE_BELOW = 1.0 - 2.0**-24  # the largest float32 below one
BLOCK = 64  # tokens that are first drawn as one
# The least sum that a block is given, so that its score is finite. Such a block is never drawn:
# noise lies between -2.9 and 22.9, and the block with the largest logit has a sum of 1 or more.
NEVER_DRAWN = 1e-30
CPU_LOGITS = 400_000  # logits sampled at a time on a CPU, so that temporary tensors stay in cache
LOG2_E = 1 / math.log(2)


def stream_key(seed: int, source_id: str, sample: int) -> tuple[int, int]:
    """The 64-bit Philox key of one sample of one source, as two 32-bit words."""
    return _key(seed, source_id, str(sample))


def response_stream_key(seed: int, source_id: str, index: int) -> tuple[int, int]:
    """The key of one response to one source's query. No turn has this key: turns that share the
    noise of their response wouldn't be independent draws."""
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


def uniforms(keys: Tensor, numbers: Tensor, step: int | Tensor, level: int) -> Tensor:
    """Uniform numbers in (0, 1) for one decoding step.

    Args:
        keys: ``[rows, 2]`` int64, one :func:`stream_key` per row.
        numbers: ``[rows, n]`` or ``[1, n]`` int64, those of the tokens or blocks that get one each:
            consecutive, from a multiple of four.
        step: index of the token being drawn, 0 for the first; one, or ``[rows, 1]`` int64.
        level: 0 for tokens, 1 for blocks.

    Returns:
        ``[rows, n]`` float32. Small values keep full relative precision (they decide the far
        tail of the Gumbel noise); the largest is the float below one.
    """
    zero = keys.new_zeros(1, 1)
    counter = (numbers[:, ::4] // 4, zero + step, zero + level, zero)
    words = philox(counter, (keys[:, :1], keys[:, 1:]))
    bits = torch.stack([word.float() for word in words], -1).flatten(1)[:, : numbers.shape[-1]]
    return bits.add_(0.5).mul_(2.0**-32).clamp_(max=_ONE_BELOW)


def gumbel(keys: Tensor, numbers: Tensor, step: int | Tensor, level: int) -> Tensor:
    """Standard Gumbel noise ``[rows, n]`` float32; arguments as for :func:`uniforms`."""
    return uniforms(keys, numbers, step, level).neg_().log1p_().neg_().log_().neg_()


@dataclass
class Draw:
    """One token per row with what is recorded about it; every field is ``[rows]``.

    ``logprob`` is raw (T = 1) and ``logprob_tempered`` is under the row's own temperature (NaN for
    greedy), in nats. ``rank`` is 1 for the most likely token.

    ``margin`` is the smaller of two leads: of the chosen block's score over the next block's, and
    of the chosen token's score over the next one's in its block; for a greedy row it is the lead of
    the largest logit. Two computations whose ``logits / T`` (logits, if greedy) differ by less than
    half of the margin choose the same token: a block's score moves by no more than those of its
    tokens. The draw itself rounds a score by at most 2.5e-5.
    """

    token: Tensor
    logprob: Tensor
    logprob_tempered: Tensor
    rank: Tensor
    margin: Tensor


def draw_tokens(logits: Tensor, temperature: Tensor, stream: Tensor, step: int | Tensor) -> Draw:
    """Draw one token per row.

    Args:
        logits: ``[rows, vocab]`` float32, raw.
        temperature: ``[rows]`` float32; 0 is greedy: the first of the largest logits.
        stream: ``[rows, 2]`` int64, a :func:`stream_key` per row; unused by greedy rows.
        step: index of the token within its row; one, or ``[rows, 1]`` int64.
    """
    greedy = (temperature == 0)[:, None]
    divisor = temperature[:, None].masked_fill(greedy, 1.0)
    slices = cpu_slices(len(logits), logits.shape[-1], logits.device)
    parts = [_maxima_and_sums(logits[part], divisor[part]) for part in slices]
    maxima, raw, tempered = (torch.cat(each) for each in zip(*parts, strict=True))
    best = maxima.amax(-1, keepdim=True)

    def noise(numbers: Tensor, level: int) -> Tensor:
        return gumbel(stream, numbers, step, level).masked_fill_(greedy, 0.0)

    blocks = torch.arange(maxima.shape[-1], device=logits.device)[None]
    scores = torch.where(greedy, maxima, tempered.clamp(min=NEVER_DRAWN).log_())
    block, block_lead = _largest(scores + noise(blocks, 1))
    tokens, inside = _inside(block, logits)
    place, token_lead = _largest((inside - best) / divisor + noise(tokens, 0))

    token, chosen = tokens.gather(-1, place), inside.gather(-1, place)
    logprob, logprob_tempered = (
        (chosen - best) / t - sums.sum(-1, keepdim=True).log_()
        for t, sums in ((1.0, raw), (divisor, tempered))
    )
    rank = [
        ranks(logits[part], chosen[part], out=torch.empty_like(logits[part])) for part in slices
    ]
    return Draw(
        token=token[:, 0],
        logprob=logprob[:, 0],
        logprob_tempered=logprob_tempered.masked_fill_(greedy, torch.nan)[:, 0],
        rank=torch.cat(rank),
        margin=torch.minimum(block_lead, token_lead)[:, 0],
    )


def likeliest_tokens(logits: Tensor, rows: Tensor, nth: Tensor, temperature: Tensor) -> Draw:
    """Each row's ``nth`` likeliest token (0: the likeliest; of equal ones the first), which takes
    the place of a draw. Its margin is the distance to the nearer of the logits next to it.

    Args:
        logits: ``[contexts, vocab]`` float32, raw.
        rows, nth: ``[rows]`` int64: the context of each, and which of its tokens.
        temperature: ``[rows]``, above 0.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    apart = (ordered[:, :-1] - ordered[:, 1:])[rows]
    after = apart.gather(-1, nth[:, None])[:, 0]
    before = apart.gather(-1, (nth - 1).clamp(min=0)[:, None])[:, 0]
    chosen, own = ordered[rows, nth], logits[rows]
    raw, tempered = (
        chosen / t - (own / t[:, None]).logsumexp(-1)
        for t in (torch.ones_like(temperature), temperature)
    )
    margin = torch.where(nth > 0, torch.minimum(before, after), after)
    return Draw(tokens[rows, nth], raw, tempered, nth + 1, margin)


def first_tokens_holding(share: float, logits: Tensor, temperature: float, most: int) -> list[int]:
    """How many of the likeliest tokens together have a probability of at least ``share`` at a
    temperature, at most ``most``; for each of the contexts whose logits ``[contexts, vocab]``
    are."""
    probability = (logits.double() / temperature).softmax(-1)
    held = probability.sort(-1, descending=True).values[:, :most].cumsum(-1)
    return ((held < share).sum(-1) + 1).clamp(max=held.shape[-1]).tolist()


def _maxima_and_sums(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each block's largest logit, and its sums of ``exp(logits / T)``.

    Args:
        logits: ``[rows, vocab]``.
        temperature: ``[rows, 1]``.

    Returns:
        Three tensors ``[rows, blocks]``: maxima, sums at T = 1, and sums at ``temperature``. For
        the sums, the largest logit of its row is subtracted from each logit.
    """
    maxima = _by_blocks(torch.amax, logits)
    below = logits - maxima.amax(-1, keepdim=True)
    raw = _by_blocks(torch.sum, exponentials(below, 1.0, out=torch.empty_like(below)))
    return maxima, raw, _by_blocks(torch.sum, exponentials(below, temperature, out=below))


def _by_blocks(reduce: Callable[..., Tensor], values: Tensor) -> Tensor:
    """``[rows, vocab]`` reduced to ``[rows, blocks]``, the last block apart if it is shorter."""
    count = values.shape[-1] // BLOCK
    whole, rest = values[:, : count * BLOCK], values[:, count * BLOCK :]
    blocks = reduce(whole.unflatten(-1, (count, BLOCK)), -1)
    return torch.cat([blocks, reduce(rest, -1, keepdim=True)], -1) if rest.shape[-1] else blocks


def _inside(block: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of each row's block and their logits, ``[rows, 64]``; -inf beyond the last one."""
    tokens = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    last = logits.shape[-1] - 1
    inside = logits.gather(-1, tokens.clamp(max=last))
    return tokens, inside.masked_fill_(tokens > last, -torch.inf)


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the first largest of ``[rows, n]``, and its lead over the next, each ``[rows, 1]``.

    ``scores`` are overwritten.
    """
    best, index = scores.max(-1, keepdim=True)
    return index, best - scores.scatter_(-1, index, -torch.inf).amax(-1, keepdim=True)


def cpu_slices(count: int, width: int, device: torch.device) -> list[slice]:
    """Slices of ``count`` rows: on a CPU of :data:`CPU_LOGITS` numbers each, else a single one."""
    size = max(1, CPU_LOGITS // width) if device.type == "cpu" else max(1, count)
    return [slice(start, start + size) for start in range(0, count, size)]


def log_sum_exp(below: Tensor, temperature: float | Tensor, *, out: Tensor) -> Tensor:
    """``logsumexp(below / temperature)`` over the last dimension, which is kept.

    It is off by at most (ln(vocab) + 4) * 2**-23 nats: an exponent y is rounded twice, which
    changes exp(y) by a share of |y| * 2**-23, and the mean of |y| over the distribution is at most
    ln(vocab). (``log_softmax`` is as fast, but is off by up to 1e-5, always the same way.)

    Args:
        below: ``[…, vocab]`` float32, logits minus the largest of their row.
        temperature: a number, or ``[…, 1]``.
        out: a tensor like ``below``, which is overwritten.
    """
    return exponentials(below, temperature, out=out).sum(-1, keepdim=True).log_()


def exponentials(below: Tensor, temperature: float | Tensor, *, out: Tensor) -> Tensor:
    """``exp(below / temperature)`` in ``out``, which may be ``below``.

    By powers of two: on a CPU, PyTorch's ``exp`` takes four times as long as ``exp2``.
    """
    return torch.mul(below, LOG2_E / temperature, out=out).exp2_()


def ranks(logits: Tensor, chosen: Tensor, *, out: Tensor) -> Tensor:
    """Ranks ``[…]`` int64 from 1 of the ``chosen`` ``[…, 1]`` among ``logits`` ``[…, vocab]``.

    ``out``, a tensor like ``logits``, is overwritten: in float32, which counts to 2**24, comparing
    and counting take a fourth of their time in bool.
    """
    return torch.gt(logits, chosen, out=out).sum(-1).long() + 1
