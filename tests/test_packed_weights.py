"""Reordered weights: the same products, and a model that is left as it was found."""

import pytest
import tiny
import torch
from torch import nn

from ia_mech.engine import packed_weights
from ia_mech.engine.packed_weights import describe, packed_linears


@pytest.mark.parametrize("rows", [1, 13, 33, 64, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_plain_ones_whatever_the_rows(rows, bias):
    torch.manual_seed(0)
    layer = nn.Linear(576, 1536, bias=bias).requires_grad_(False)
    x = torch.randn(rows, 1, 576)
    exact = (x.double() @ layer.weight.double().T) + (layer.bias.double() if bias else 0)
    with packed_linears(layer), torch.inference_mode():
        fast = layer(x)
    assert fast.shape == (rows, 1, 1536)
    error = (fast.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < 1e-6


def test_the_model_is_left_as_it_was_found_even_after_an_error():
    model = tiny.model("llama")
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    with pytest.raises(ZeroDivisionError), packed_linears(model):
        assert all("forward" in vars(m) for m in linears)
        raise ZeroDivisionError
    assert not any("forward" in vars(m) for m in linears)


def test_other_dtypes_big_models_and_replaced_forwards_are_left_alone(monkeypatch):
    half = nn.Linear(8, 8).bfloat16()
    with packed_linears(half):
        assert "forward" not in vars(half)
    hooked = nn.Linear(8, 8)
    hooked.forward = mine = lambda x: x
    with packed_linears(hooked):
        assert hooked.forward is mine
    assert hooked.forward is mine
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 8 * 8 * 4 - 1)
    big = nn.Linear(8, 8)
    with packed_linears(big):
        assert "forward" not in vars(big)


@pytest.mark.parametrize("edit", ["in place", "another tensor", "cast and back"])
def test_weights_that_changed_are_reordered_again(edit):
    layer = nn.Linear(64, 32, bias=False).requires_grad_(False)
    x = torch.randn(3, 64)
    with packed_linears(layer), torch.inference_mode():
        before = layer(x)
    with torch.no_grad():
        if edit == "in place":
            layer.weight.mul_(2)
        elif edit == "another tensor":
            layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)
        else:
            layer.double().weight.mul_(2)
            layer.float()
    with packed_linears(layer), torch.inference_mode():
        assert torch.equal(layer(x), 2 * before)  # a power of two rounds nothing


def test_what_a_run_records_of_weights():
    assert describe(nn.Linear(8, 8)) == "reordered"
    assert describe(nn.Linear(8, 8).bfloat16()) == "plain"
