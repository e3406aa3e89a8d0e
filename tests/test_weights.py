"""Reordered weights: the same products; a small model as it was outside of passes, a large one held
once."""

import copy

import pytest
import tiny
import torch
from torch import nn

from ia_mech.engine import weights
from ia_mech.engine.passes import Pass, making
from ia_mech.engine.state import Prefix, prefill
from ia_mech.engine.weights import BothOrders, describe, reorder_weights
from ia_mech.models.load import weights_hash, whole_weight


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch) -> str:
    if request.param == "large":
        monkeypatch.setattr(weights, "MOST_BYTES", 0)
    return request.param


@torch.inference_mode()
def in_a_pass(module, x):
    """What a module gives in a pass of the engine."""
    with making(Pass(0, 1, [0])):
        return module(x)


@pytest.mark.parametrize("rows", [1, 33, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_plain_ones_whatever_the_rows(size, rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(576, 1536, bias=bias).requires_grad_(False)
    x = torch.randn(rows, 1, 576)
    plain = layer(x)
    exact = (x.double() @ layer.weight.double().T) + (layer.bias.double() if bias else 0)
    reorder_weights(layer)
    fast = in_a_pass(layer, x)
    assert fast.shape == (rows, 1, 1536)
    error = (fast.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < 1e-6
    assert torch.equal(layer(x), plain if size == "small" else fast), "outside of passes"
    assert describe(layer) == "reordered"


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_model_holds_its_weights_once_and_they_can_be_read(monkeypatch, tied):
    monkeypatch.setattr(weights, "MOST_BYTES", 0)
    model = tiny.fresh("llama", tie_word_embeddings=tied)
    ids = torch.tensor([tiny.prompt(9, seed=0)])
    before, own = model(ids).logits, weights_hash(model)
    head = model.lm_head.weight.clone()
    reorder_weights(model)
    torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
    assert all(m.weight.is_mkldnn for m in model.modules() if type(m) is nn.Linear)
    assert not model.model.embed_tokens.weight.is_mkldnn
    assert torch.equal(whole_weight(model.lm_head, "weight"), head)
    assert weights_hash(model) == own
    states = model.model.embed_tokens(ids).requires_grad_()
    model(inputs_embeds=states).logits.sum().backward()
    plain = tiny.fresh("llama", tie_word_embeddings=tied)
    expected = states.detach().requires_grad_()
    plain(inputs_embeds=expected).logits.sum().backward()
    torch.testing.assert_close(states.grad, expected.grad, atol=1e-4, rtol=1e-4)


def test_other_dtypes_replaced_forwards_and_weights_in_training_are_left_alone(monkeypatch):
    half = nn.Linear(8, 8).bfloat16()
    reorder_weights(half)
    assert "forward" not in vars(half) and describe(half) == "plain"
    hooked = nn.Linear(8, 8)
    hooked.forward = mine = lambda x: x
    reorder_weights(hooked)
    assert hooked.forward is mine
    monkeypatch.setattr(weights, "MOST_BYTES", 0)
    trained = nn.Linear(8, 8)
    reorder_weights(trained)
    assert describe(trained) == "plain" and not trained.weight.is_mkldnn


@pytest.mark.parametrize("edit", ["in place", "another tensor", "cast and back", "through data"])
def test_weights_that_changed_are_used(size, edit):
    if size == "large" and edit in ("cast and back", "through data"):
        pytest.skip("PyTorch casts and edits no reordered weights, and says so")
    layer = nn.Linear(64, 32, bias=False).requires_grad_(False)
    x = torch.randn(3, 64)
    reorder_weights(layer)
    before = in_a_pass(layer, x)
    with torch.no_grad():
        if edit == "in place":
            layer.weight.mul_(2)
        elif edit == "another tensor":
            layer.weight = nn.Parameter(whole_weight(layer, "weight") * 2, requires_grad=False)
        elif edit == "through data":  # is counted by nobody
            layer.weight.data.mul_(2)
            assert torch.equal(in_a_pass(layer, x), before)
            reorder_weights(layer)
        else:
            layer.double().weight.mul_(2)
            layer.float()
    torch.testing.assert_close(in_a_pass(layer, x), 2 * before, atol=1e-6, rtol=1e-6)


def test_in_a_dtype_that_has_no_other_order_the_plain_weight_is_used():
    layer, x = nn.Linear(64, 32).requires_grad_(False), torch.randn(3, 64)
    reorder_weights(layer)
    layer.bfloat16()
    assert torch.equal(in_a_pass(layer, x.bfloat16()), layer(x.bfloat16()))


def test_a_copy_has_weights_of_its_own():
    layer, x = nn.Linear(64, 32, bias=False).requires_grad_(False), torch.randn(3, 64)
    reorder_weights(layer)
    before = in_a_pass(layer, x)
    other = copy.deepcopy(nn.Sequential(layer))
    assert isinstance(other[0].forward, BothOrders) and other[0].forward.module is other[0]
    with torch.no_grad():
        other[0].weight.mul_(2)
    torch.testing.assert_close(in_a_pass(other, x), 2 * before, atol=1e-6, rtol=1e-6)
    assert torch.equal(in_a_pass(layer, x), before)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_of_the_unembedding_follow_one_another_in_memory(family, count):
    model, seen = tiny.model(family), []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    prefill(model, [Prefix(tuple(tiny.prompt(6, seed))) for seed in range(count)])
    hook.remove()
    (rows,) = seen
    assert rows.shape == (count, 1, rows.shape[-1])
    assert rows.stride() == torch.empty(rows.shape).stride()
