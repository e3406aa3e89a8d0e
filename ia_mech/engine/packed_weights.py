"""Matrix products on a CPU, with weights reordered once.

PyTorch's float32 product rearranges the weight at each call; oneDNN can keep it rearranged (what
``torch.compile`` does when it freezes a model). Measured on two cores, GFLOP/s with and without, of
576 x 1536: 269 against 122 at 33 rows and 374 against 158 at 132 with AVX-512, 152 against 114 and
202 against 163 with AVX2. The price is a second copy of the weights, so large models are left
alone, and rounding: sums are taken in another order. Which weights are reordered is a rule and not
a measurement, so that the same machine computes the same numbers in every process.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

MOST_BYTES = 2**31  # of weights to hold twice; a constant, so that a resumed run computes the same
ROWS = 64  # the number of rows that the order is chosen for; others are computed as well


class _Reordered(NamedTuple):
    """A layer's forward with a copy of its weight, and the version of the weight it was made of."""

    forward: Callable[[Tensor], Tensor]
    version: tuple[int, int]


_packed: WeakKeyDictionary[nn.Module, dict[nn.Linear, _Reordered]] = WeakKeyDictionary()


@contextlib.contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model's float32 linear layers on a CPU use reordered weights.

    The modules are left as they were found. A weight that was replaced or edited in place since the
    last time is reordered again, unless it was edited through ``.data``, which PyTorch doesn't
    count.
    """
    if model not in _packed or any(_version(m) != r.version for m, r in _packed[model].items()):
        _packed[model] = _reordered(model)
    mine = {m: r.forward for m, r in _packed[model].items() if "forward" not in vars(m)}
    # Through the dictionary, since this happens at every step and a module's own way is slow.
    for module, forward in mine.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in mine:
            del vars(module)["forward"]


def describe(model: nn.Module) -> str:
    """Which weights the model's linear layers multiply with; a part of what rounding depends on."""
    with packed_linears(model):
        return "reordered" if _packed[model] else "plain"


def _version(module: nn.Linear) -> tuple[int, int]:
    """Changes when the weight is replaced or edited in place."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.data_ptr(), weight._version


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _reordered(model: nn.Module) -> dict[nn.Linear, _Reordered]:
    """Reordered weights by module; empty where they don't pay or can't be had."""
    if not torch.backends.mkldnn.is_available():
        return {}
    linears = [
        m
        for m in model.modules()
        # A subclass, or a replaced forward, does something else.
        if type(m) is nn.Linear
        and "forward" not in vars(m)
        and m.weight.dtype == torch.float32
        and m.weight.device.type == "cpu"
        and not m.weight.is_inference()  # it counts no versions
    ]
    if sum(m.weight.nbytes for m in linears) > MOST_BYTES:
        return {}
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        return {
            m: _Reordered(partial(_linear, reorder(m.weight.detach(), ROWS), m.bias), _version(m))
            for m in linears
        }
    except (AttributeError, RuntimeError):  # a build of PyTorch without these operations
        return {}
