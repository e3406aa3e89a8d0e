"""Attention in parts against attention over all keys in float64."""

import pytest
import torch

from ia_mech.engine.shared_prefix import attend, merge

ROWS, HEADS, KV_HEADS, DIM = 3, 6, 2, 16


def drawn(keys: int, *, rows=ROWS, heads=KV_HEADS, dim=DIM, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, keys, dim, generator=generator)


def exact(query, key, value, unseen, *, scaling, softcap=None, sinks=None) -> torch.Tensor:
    """Plain attention in float64; ``unseen`` broadcasts to ``[rows, heads, new, keys]``."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(groups, 1) for t in (key, value))
    scores = query.double() @ key.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


@pytest.mark.parametrize(("new", "own"), [(1, 5), (5, 9)])
@pytest.mark.parametrize("scaling", [0.25, 1e-6, -1e4])
@pytest.mark.parametrize(
    ("softcap", "with_sinks", "value_dim"),
    [(None, False, DIM), (None, True, DIM), (5.0, False, DIM), (None, False, 8)],
)
def test_two_parts_equal_all_keys_in_float64(new, own, scaling, softcap, with_sinks, value_dim):
    """Scores up to 1e5 of either sign; capped ones and narrow values take the path without the
    fused kernel."""
    query = drawn(new, heads=HEADS, seed=1)
    prefix = drawn(40, seed=2), drawn(40, dim=value_dim, seed=3)
    suffix = drawn(own, seed=4), drawn(own, dim=value_dim, seed=5)
    sinks = torch.linspace(-3, 3, HEADS) if with_sinks else None
    numbers = {"scaling": scaling, "softcap": softcap}
    unseen = torch.ones(new, 40 + own, dtype=torch.bool).triu(40 + own - new + 1)
    unseen = unseen.repeat(ROWS, 1, 1, 1)
    unseen[1, ..., 40 + own - new] = own > new  # a key that one of the rows may not look at
    bias = torch.zeros(ROWS, 1, new, own).masked_fill(unseen[..., 40:], -torch.inf)
    parts = [attend(query, *prefix, **numbers), attend(query, *suffix, bias=bias, **numbers)]
    key, value = (torch.cat(pair, 2) for pair in zip(prefix, suffix, strict=True))
    expected = exact(query, key, value, unseen, sinks=sinks, **numbers)
    ours = merge(*parts, sinks)
    assert ours.dtype == torch.float32 and ours.shape == expected.shape
    # Scores of 1e5 are themselves rounded by 4e-3, which is what the merge may then be off by.
    largest = abs(scaling) * float((query.double() @ key.repeat_interleave(3, 1).mT.double()).max())
    allowed = 2e-6 + (0 if softcap else 4e-7 * largest)
    assert (ours.double() - expected).abs().max() < allowed


def test_a_log_sum_exp_is_that_of_the_scores():
    query, key = drawn(4, heads=HEADS, seed=1), drawn(7, seed=2)
    scores = query.double() @ key.double().repeat_interleave(3, 1).mT * 0.3
    for softcap in (None, 1e9):  # both paths: such a cap changes nothing
        _, total = attend(query, key, key, scaling=0.3, softcap=softcap)
        torch.testing.assert_close(total.double(), scores.logsumexp(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("score", [-1e4, 0.0, 1e4])
def test_the_merge_of_given_scores_in_float64(score):
    averages = drawn(2, seed=1), drawn(2, seed=2)
    totals = [torch.full((ROWS, KV_HEADS, 2), score), torch.full((ROWS, KV_HEADS, 2), score + 1.5)]
    weights = torch.tensor([0.0, 1.5], dtype=torch.float64).softmax(0)
    expected = weights[0] * averages[0].double() + weights[1] * averages[1].double()
    merged = merge(*zip(averages, totals, strict=True))
    assert (merged.double() - expected).abs().max() < 1e-6


def test_parts_that_see_nothing_count_for_nothing():
    average, total = drawn(2, seed=1), torch.zeros(ROWS, KV_HEADS, 2)
    nothing = torch.full_like(total, -torch.inf)
    zero = torch.zeros_like(average)
    for sinks in (None, torch.full((KV_HEADS,), -1e4)):
        assert torch.equal(merge((average, total), (zero, nothing), sinks), average)
        assert torch.equal(merge((zero, nothing), (average, total), sinks), average)
        assert torch.equal(merge((zero, nothing), (zero, nothing), sinks), zero)
        far = merge((average, total - 1e3), (drawn(2, seed=2), total + 1e3), sinks)
        assert torch.equal(far, drawn(2, seed=2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_query_that_sees_nothing_has_a_log_sum_exp_of_minus_infinity(dtype, softcap):
    """With the kernel for CPUs and without; its neighbours aren't touched."""
    query, key = drawn(3, heads=HEADS, seed=1).to(dtype), drawn(700, seed=2).to(dtype)
    bias = torch.zeros(ROWS, 1, 3, 700, dtype=dtype)
    bias[1, :, 2] = -torch.inf
    average, total = attend(query, key, key, scaling=0.25, softcap=softcap, bias=bias)
    whole = attend(query, key, key, scaling=0.25, softcap=softcap)
    assert (total[1, :, 2] == -torch.inf).all() and (average[1, :, 2] == 0).all()
    seen = torch.ones(ROWS, HEADS, 3, dtype=torch.bool)
    seen[1, :, 2] = False
    torch.testing.assert_close(average[seen], whole[0][seen])
    torch.testing.assert_close(total[seen], whole[1][seen])


def test_sinks_only_take_weight_away():
    average, total = drawn(2, seed=1), torch.zeros(ROWS, KV_HEADS, 2)
    nothing = torch.zeros_like(average), torch.full_like(total, -torch.inf)
    merged = merge((average, total), nothing, torch.tensor([0.0, -1e4]))
    torch.testing.assert_close(merged[:, 0], average[:, 0] / 2)
    assert torch.equal(merged[:, 1], average[:, 1])


def test_half_precision_is_merged_in_float32():
    query, prefix, own = (drawn(n, seed=n).bfloat16() for n in (1, 50, 3))
    parts = [attend(query, keys, keys, scaling=0.25) for keys in (prefix, own)]
    merged = merge(*parts)
    keys = torch.cat([prefix, own], 2)
    expected = exact(query, keys, keys, torch.zeros(1, 53, dtype=torch.bool), scaling=0.25)
    assert merged.dtype == torch.bfloat16
    assert (merged.double() - expected).abs().max() < 2e-2


def test_products_beyond_the_range_of_float16():
    """Of 16 numbers near 80, scaled to near 500; the cap, which changes nothing, takes the path
    without the fused kernel."""
    query = torch.full((1, 1, 1, 16), 80.0).half()
    key = (80 - torch.arange(5.0) / 4)[:, None].expand(1, 1, 5, 16).half()
    value = drawn(5, rows=1, heads=1, seed=3).half()
    average, total = attend(query, key, value, scaling=0.005, softcap=1e9)
    unseen = torch.zeros(5, dtype=torch.bool)
    expected = exact(query, key.double(), value.double(), unseen, scaling=0.005)
    assert total.isfinite().all() and (average.double() - expected).abs().max() < 2e-3
