"""Attention in parts: each with its log-sum-exp, merged exactly.

A softmax over keys in two places is the average of the softmaxes over each, weighted by what each
place sums to (Hydragen, arXiv 2402.05099, section 3.1). So many rows can attend to a prefix that is
stored once, each to its own tokens besides, and nothing is approximated.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
    if fused and query.shape[-1] == value.shape[-1]:
        # What scaled_dot_product_attention calls on a CPU; it keeps the log-sum-exp to itself.
        each = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
        average, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=each, scale=scaling
        )
        if bias is not None:  # where nothing is seen it gives a log-sum-exp of zero
            total = total.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
        return average, total
    batch, heads, new, dim = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(
        batch, kv_heads, -1, dim
    )  # [batch, kv_heads, heads per kv_head * new, …]
    scores = _scores(folded, key, scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        per_head = scores.view(batch, heads, new, -1)
        per_head += bias
    total = scores.logsumexp(-1)
    # Minus infinity less itself would be no number.
    least = total.clamp(min=torch.finfo(total.dtype).min)
    average = (scores - least[..., None]).exp().to(value.dtype) @ value
    return average.view(batch, heads, new, -1), total.view(batch, heads, new)


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


def merge(parts: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> Tensor:
    """What attention over all keys at once would give, from attention over parts of them.

    Args:
        parts: pairs as :func:`attend` returns them. A part that a query sees nothing of has a
            log-sum-exp of minus infinity and any finite average.
        sinks: ``[heads]`` scores of keys without a value (gpt-oss); they only take weight away.

    Returns:
        ``[batch, heads, new, value_dim]`` in the first part's dtype, computed in float32; zero
        where no part has anything to see.
    """
    totals = [total.float() for _, total in parts]
    if sinks is not None:
        totals.append(sinks.float()[:, None].expand_as(totals[0]))
    # [batch, heads, new, parts]; not a number only where every part has nothing to see
    weights = torch.stack(totals, -1).softmax(-1).nan_to_num(0.0)
    merged = sum(
        average.float() * weight[..., None]
        for (average, _), weight in zip(parts, weights.unbind(-1), strict=False)
    )
    return merged.to(parts[0][0].dtype)
