"""Matrix products on a CPU, with weights reordered once.

PyTorch's float32 product rearranges the weight at each call; oneDNN can keep it rearranged (what
``torch.compile`` does when it freezes a model). Measured on two cores, GFLOP/s with and without, of
576 x 1536: 205 against 95 at 33 rows, 221 against 180 at 132, 217 against 191 at 1024. The price is
a second copy of the weights, so large models are left alone, and rounding: sums are taken in
another order.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

MOST_BYTES = 2**31  # of weights to hold twice; a constant, so that a resumed run computes the same
ROWS = 64  # the number of rows that the order is chosen for; others are computed as well

_packed: WeakKeyDictionary[nn.Module, dict[nn.Linear, Callable]] = WeakKeyDictionary()


@contextlib.contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model's float32 linear layers on a CPU use reordered weights.

    The modules are left as they were found. Weights are read on first use: a model whose weights
    change afterwards must not be passed again.
    """
    if model not in _packed:
        _packed[model] = {
            module: partial(_linear, weight, module.bias)
            for module, weight in _reordered(model).items()
        }
    mine = {m: forward for m, forward in _packed[model].items() if "forward" not in vars(m)}
    # Through the dictionary, since this happens at every step and a module's own way is slow.
    for module, forward in mine.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in mine:
            del vars(module)["forward"]


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _reordered(model: nn.Module) -> dict[nn.Linear, Tensor]:
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
    ]
    if sum(m.weight.nbytes for m in linears) > MOST_BYTES:
        return {}
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        return {m: reorder(m.weight.detach(), ROWS) for m in linears}
    except (AttributeError, RuntimeError):  # a build of PyTorch without these operations
        return {}
