"""Reordered weights: the same products; a small model left as it was, a large one held once."""

import pytest
import tiny
import torch
from torch import nn

from ia_mech.engine import weights
from ia_mech.engine.weights import describe, reordered_weights
from ia_mech.models.load import weights_hash, whole_weight


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch) -> str:
    if request.param == "large":
        monkeypatch.setattr(weights, "MOST_BYTES", 0)
    return request.param


@pytest.mark.parametrize("rows", [1, 33, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_plain_ones_whatever_the_rows(size, rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(576, 1536, bias=bias).requires_grad_(False)
    x = torch.randn(rows, 1, 576)
    exact = (x.double() @ layer.weight.double().T) + (layer.bias.double() if bias else 0)
    with reordered_weights(layer), torch.inference_mode():
        fast = layer(x)
    assert fast.shape == (rows, 1, 1536)
    error = (fast.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < 1e-6
    assert describe(layer) == "reordered"


def test_a_small_model_is_left_as_it_was_found_even_after_an_error():
    model = tiny.model("llama")
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    with pytest.raises(ZeroDivisionError), reordered_weights(model):
        assert all("forward" in vars(m) for m in linears)
        raise ZeroDivisionError
    assert not any("forward" in vars(m) or m.weight.is_mkldnn for m in linears)


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_model_holds_its_weights_once_and_they_can_be_read(monkeypatch, tied):
    monkeypatch.setattr(weights, "MOST_BYTES", 0)
    model = tiny.fresh("llama", tie_word_embeddings=tied)
    ids = torch.tensor([tiny.prompt(9, seed=0)])
    before, own = model(ids).logits, weights_hash(model)
    head = model.lm_head.weight.clone()
    with reordered_weights(model):
        inside = model(ids).logits
    torch.testing.assert_close(inside, before, atol=1e-5, rtol=1e-5)
    assert torch.equal(model(ids).logits, inside)  # outside, too: there is no other order
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
    with reordered_weights(half):
        assert "forward" not in vars(half)
    assert describe(half) == "plain"
    hooked = nn.Linear(8, 8)
    hooked.forward = mine = lambda x: x
    with reordered_weights(hooked):
        assert hooked.forward is mine
    assert hooked.forward is mine
    monkeypatch.setattr(weights, "MOST_BYTES", 0)
    trained = nn.Linear(8, 8)
    assert describe(trained) == "plain" and not trained.weight.is_mkldnn


@pytest.mark.parametrize("edit", ["in place", "another tensor", "cast and back"])
def test_weights_that_changed_are_used(size, edit):
    if (size, edit) == ("large", "cast and back"):
        pytest.skip("PyTorch casts no reordered weights, and says so")
    layer = nn.Linear(64, 32, bias=False).requires_grad_(False)
    x = torch.randn(3, 64)
    with reordered_weights(layer), torch.inference_mode():
        before = layer(x)
    with torch.no_grad():
        if edit == "in place":
            layer.weight.mul_(2)
        elif edit == "another tensor":
            layer.weight = nn.Parameter(whole_weight(layer, "weight") * 2, requires_grad=False)
        else:
            layer.double().weight.mul_(2)
            layer.float()
    with reordered_weights(layer), torch.inference_mode():
        torch.testing.assert_close(layer(x), 2 * before, atol=1e-6, rtol=1e-6)
