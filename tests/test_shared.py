"""Attention in two parts against attention over all keys in float64; layers that share a prefix;
borrowed keys and values against passes over both contexts with a mask per head.
"""

import numpy as np
import pytest
import tiny
import torch
import transformers
from contract import LOGPROB, masked_logits, prefilled, stepped

from ia_mech.engine.check import check_engine
from ia_mech.engine.score import Turn, score
from ia_mech.engine.shared import Borrowed, Engine, SharedLayer, attend, attend_shared, merge
from ia_mech.engine.state import expand, forward
from ia_mech.errors import UserError

ROWS, HEADS, KV_HEADS, DIM = 3, 6, 2, 16


def normal(keys: int, *, rows=ROWS, heads=KV_HEADS, dim=DIM, seed=0) -> torch.Tensor:
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
    query = normal(new, heads=HEADS, seed=1)
    prefix = normal(40, seed=2), normal(40, dim=value_dim, seed=3)
    suffix = normal(own, seed=4), normal(own, dim=value_dim, seed=5)
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


def test_parts_that_see_nothing_count_for_nothing():
    average, total = normal(2, seed=1), torch.zeros(ROWS, KV_HEADS, 2)
    nothing = torch.full_like(total, -torch.inf)
    zero = torch.zeros_like(average)
    for sinks in (None, torch.full((KV_HEADS,), -1e4)):
        assert torch.equal(merge((average, total), (zero, nothing), sinks), average)
        assert torch.equal(merge((zero, nothing), (average, total), sinks), average)
        assert torch.equal(merge((zero, nothing), (zero, nothing), sinks), zero)
        far = merge((average, total - 1e3), (normal(2, seed=2), total + 1e3), sinks)
        assert torch.equal(far, normal(2, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_query_that_sees_nothing_has_a_log_sum_exp_of_minus_infinity(dtype, softcap):
    """With the kernel for CPUs and without; its neighbours aren't touched."""
    query, key = normal(3, heads=HEADS, seed=1).to(dtype), normal(700, seed=2).to(dtype)
    bias = torch.zeros(ROWS, 1, 3, 700, dtype=dtype)
    bias[1, :, 2] = -torch.inf
    average, total = attend(query, key, key, scaling=0.25, softcap=softcap, bias=bias)
    whole = attend(query, key, key, scaling=0.25, softcap=softcap)
    assert (total[1, :, 2] == -torch.inf).all() and (average[1, :, 2] == 0).all()
    seen = torch.ones(ROWS, HEADS, 3, dtype=torch.bool)
    seen[1, :, 2] = False
    torch.testing.assert_close(average[seen], whole[0][seen])
    torch.testing.assert_close(total[seen], whole[1][seen])


@pytest.mark.parametrize("spread", [4, 16])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("softcap", [None, 1e9])
def test_half_precision_is_as_exact_as_attention_of_pytorch(spread, new, softcap):
    """Scores of such a standard deviation, in one part and in two; the cap changes nothing."""
    query = normal(new, heads=HEADS, dim=64, seed=1).bfloat16()
    key, value = (normal(600, dim=64, seed=seed).bfloat16() for seed in (2, 3))
    scaling = spread / 8
    expected = exact(query, key, value, torch.zeros(1, 600, dtype=torch.bool), scaling=scaling)
    each = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (key, value))
    whole = torch.nn.functional.scaled_dot_product_attention(query, *each, scale=scaling)
    parts = [
        attend(query, key[:, :, cut], value[:, :, cut], scaling=scaling, softcap=softcap)
        for cut in (slice(None), slice(400), slice(400, None))
    ]
    theirs, ours, merged = (
        (found.double() - expected).norm() / expected.norm()
        for found in (whole, parts[0][0], merge(*parts[1:]))
    )
    assert ours <= 1.5 * theirs and merged <= 1.5 * theirs


# -- layers ----------------------------------------------------------------------------------------

LENGTHS = (23, 14, 5)
SHARED = {
    "llama": (1, 2, 3, 4), "mistral": (), "qwen3": (1, 2, 3, 4), "qwen3_moe": (1, 2, 3, 4),
    "qwen3_5": (4,), "gpt_oss": (2, 4), "glm4": (1, 2, 3, 4), "glm4_moe": (1, 2, 3, 4),
    "gemma3": (4,), "gemma4": (2,),
}  # fmt: skip


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_layers_of_full_attention_are_shared(architecture):
    model = tiny.model(architecture)
    assert Engine.possible(model).shared == SHARED[architecture]
    layers = expand(model, [prefilled(model, LENGTHS)], [0, 1]).cache.layers
    found = [n for n, layer in enumerate(layers, start=1) if isinstance(layer, SharedLayer)]
    assert tuple(found) == SHARED[architecture]


def test_where_every_layer_is_shared_no_mask_is_made(monkeypatch):
    """Not even for padded contexts; where one isn't, all layers get one."""
    masks = []

    def noted(module, query, key, value, mask, **kwargs):
        masks.append(mask)
        return attend_shared(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr("ia_mech.engine.installed.attend_shared", noted)
    for architecture, made in (("llama", False), ("gemma3", True)):
        model = tiny.model(architecture)
        stepped(model, expand(model, [prefilled(model, LENGTHS)], [0, 1, 2], 1), [3, 4, 5])
        assert [mask is not None for mask in masks] == [made] * len(SHARED[architecture])
        masks.clear()


def test_keys_that_the_attention_function_never_sees_are_an_error(monkeypatch):
    """Those of the first layer are attended to as if they were all."""
    model = tiny.model("llama")
    state = expand(model, [prefilled(model, LENGTHS)], [0], 2)
    attend_to = SharedLayer.update

    def without_the_layer(layer, *states):
        keys, values = attend_to(layer, *states)
        return (keys.clone(), values) if layer.number == 1 else (keys, values)

    monkeypatch.setattr(SharedLayer, "update", without_the_layer)
    said = "doesn't use the cached keys"
    with pytest.raises(RuntimeError, match=said):
        forward(model, state, torch.tensor([[3]]), torch.tensor([[1]]))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=said):
        forward(model, state, torch.tensor([[3]]), torch.tensor([[1]]))


def other_model(config) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager"} if config.model_type == "gemma2" else {}
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager)
    return made.eval().requires_grad_(False)


SIZES = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": tiny.EOS,
}  # fmt: skip


def test_soft_capped_scores_are_shared():
    """Compared with full passes by the check, which would leave a layer out."""
    capped = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8, attn_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
    )  # fmt: skip
    assert check_engine(other_model(capped), tiny.prompt(24, seed=0)).shared == (2, 4)


def test_a_cache_of_something_else_than_keys_is_found_out_and_copied():
    latent = transformers.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=4, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    engine = check_engine(other_model(latent), tiny.prompt(24, seed=0))
    assert not engine.share and "doesn't use the cached keys" in engine.why


# -- borrowed keys and values ----------------------------------------------------------------------

# Of the families that can, those whose heads differ in nothing from llama's are left out.
BORROWING = ("llama", "gemma3", "gpt_oss")
GROUPS = ((23, 14, 5), (9, 30))  # tokens of contexts


def ids_of(context: int) -> list[int]:
    length = [n for group in GROUPS for n in group][context]
    return tiny.prompt(length, seed=length)


def over_both(model, donor: list[int], own: list[int], turn: list[int], layers) -> torch.Tensor:
    """Logits ``[tokens, vocab]`` that predict a turn, by one pass over donor, context and turn.

    Each has the positions it would have alone. The donor's tokens see each other, so do the
    context's, and the turn's see the turn and, layer by layer, the context or the donor.

    Args:
        layers: from 1, in which the turn sees the donor.
    """
    part = torch.tensor([0] * len(donor) + [1] * len(own) + [2] * len(turn))
    at = torch.cat([torch.arange(len(donor)), torch.arange(len(own) + len(turn))])
    before = torch.arange(len(part)) <= torch.arange(len(part))[:, None]

    def sees(layer: int) -> torch.Tensor:
        of_turn = (part == 2) | (part == (0 if layer in layers else 1))
        return before & torch.where(part[:, None] == 2, of_turn, part == part[:, None])

    return masked_logits(model, [*donor, *own, *turn], at, sees)[len(donor) + len(own) - 1 : -1]


def some_layers(architecture: str) -> list[tuple[int, ...]]:
    layers = SHARED[architecture]
    return [layers[-1:], layers[::2], layers]


def cases(architecture: str) -> list[tuple[int, Borrowed | None]]:
    """Contexts and what is borrowed: from the same group and another, longer and shorter."""
    few, some, every = some_layers(architecture)
    return [
        (0, Borrowed(2, every)), (0, Borrowed(4, some)), (1, None), (1, Borrowed(3, every)),
        (2, Borrowed(0, every)), (2, Borrowed(4, few)), (3, Borrowed(1, some)), (0, None),
    ]  # fmt: skip


def by_one_pass(model, context: int, borrowed: Borrowed | None, turn) -> torch.Tensor:
    donor, layers = ((), ()) if borrowed is None else (ids_of(borrowed.context), borrowed.layers)
    return over_both(model, list(donor), ids_of(context), list(map(int, turn)), layers)


def logprobs(logits: torch.Tensor, turn) -> np.ndarray:
    chosen = torch.tensor(np.asarray(turn, dtype=np.int64))[:, None]
    return logits.double().log_softmax(-1).gather(-1, chosen)[:, 0].numpy()


@pytest.mark.parametrize("architecture", BORROWING)
def test_scores_with_borrowed_keys_equal_passes_with_a_mask_per_layer(architecture):
    model = tiny.model(architecture)
    groups = [prefilled(model, lengths) for lengths in GROUPS]
    turns = [
        Turn(context, tiny.prompt(5 + number, seed=number), borrowed=borrowed)
        for number, (context, borrowed) in enumerate(cases(architecture))
    ]
    moved = 0
    for turn, ours in zip(turns, score(model, groups, turns), strict=True):
        theirs = logprobs(by_one_pass(model, turn.context, turn.borrowed, turn.ids), turn.ids)
        np.testing.assert_allclose(ours.logprobs_raw, theirs, rtol=0, atol=LOGPROB)
        plain = logprobs(by_one_pass(model, turn.context, None, turn.ids), turn.ids)
        moved += np.abs(theirs - plain).max() > 1e-3
    assert moved == 6, "whoever borrows writes something else"


def test_what_cant_be_borrowed_is_refused():
    llama, gemma = ((m, prefilled(m, LENGTHS)) for m in map(tiny.model, ("llama", "gemma3")))
    for (model, group), layers, share, said in (
        (llama, [5], True, "layer 5 can't be borrowed: rows share .* in layers 1-4"),
        (llama, [0], True, "layer 0 can't be borrowed"),
        (llama, [1, 2], False, "layer 1-2 can't be borrowed: rows share .* in layers .none"),
        (gemma, [1, 4], True, "layer 1 can't be borrowed: rows share .* in layers 4"),
    ):
        with pytest.raises(UserError, match=said):
            expand(model, [group], [0], borrowed=[Borrowed(1, layers)], copies=not share)
