"""Matrix products on a CPU, with weights reordered once.

PyTorch's float32 product rearranges the weight at each call; oneDNN can keep it rearranged (what
``torch.compile`` does when it freezes a model). One thread, times as fast as the plain product of
1536 x 8960: 2.8 at 10 rows, 1.2 at 33 and 1.1 at 120 with AVX-512; 1.1, 1.2 and 1.1 with AVX2. The
price is rounding, since sums are taken in another order, and 1 ms for each number of rows that a
shape of weight meets for the first time.

A small model keeps both orders, and its modules are left as they were found. A large one keeps one:
reordered weights take the place of the plain ones, for good. Which of the two is a rule on the
model alone, so that the same machine computes the same numbers in every process.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MOST_BYTES = 2**31  # of weights that are held in both orders
ROWS = 64  # the number of rows that the order is chosen for; others are computed as well


class _Copy(NamedTuple):
    """A forward with a reordered copy of the weight, and the version that it is a copy of."""

    forward: Callable[[Tensor], Tensor]
    version: tuple[int, int]


_copies: WeakKeyDictionary[nn.Module, dict[nn.Linear, _Copy]] = WeakKeyDictionary()


@contextlib.contextmanager
def reordered_weights(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model's float32 linear layers on a CPU use reordered weights.

    A small model's weight that was replaced or edited in place since the last time is reordered
    again, unless it was edited through ``.data``, which PyTorch doesn't count. The first call with
    a large model replaces its weights: they can be read by
    :func:`ia_mech.models.load.whole_weight`, but the model can't be copied, saved or trained.
    """
    if model not in _copies or any(_version(m) != c.version for m, c in _copies[model].items()):
        _copies[model] = _reorder_all(model)
    mine = {m: c.forward for m, c in _copies[model].items() if "forward" not in vars(m)}
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
    with reordered_weights(model):
        replaced = any(type(m) is nn.Linear and m.weight.is_mkldnn for m in model.modules())
        return "reordered" if _copies[model] or replaced else "plain"


def _reorder_all(model: nn.Module) -> dict[nn.Linear, _Copy]:
    """Reordered copies of the weights, after replacing them in a large model, which has none.

    None either where reordering can't be had.
    """
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
    try:
        if sum(m.weight.nbytes for m in linears) > MOST_BYTES:
            _replace(model, {m for m in linears if not m.weight.requires_grad})  # not in training
            return {}
        products = {m: partial(_product, _reorder(m.weight), m.bias) for m in linears}
        return {m: _Copy(product, _version(m)) for m, product in products.items()}
    except (AttributeError, RuntimeError):  # a build of PyTorch without these operations
        return {}


def _replace(model: nn.Module, linears: set[nn.Linear]) -> None:
    """Have reordered weights take the place of the plain ones, one after the other."""
    for module in model.modules() if linears else ():
        if module in linears:
            module.weight = nn.Parameter(_reorder(module.weight), requires_grad=False)
            module.forward = partial(_forward_reordered, module)  # type: ignore[method-assign]
        # Weights are mapped from files, which stay in memory as long as anything is mapped to them.
        for parameter in module.parameters(recurse=False):
            if not parameter.is_mkldnn:
                parameter.data = parameter.data.clone()


def _version(module: nn.Linear) -> tuple[int, int]:
    """Changes when the weight is replaced or edited in place."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.data_ptr(), weight._version


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _forward_reordered(module: nn.Linear, x: Tensor) -> Tensor:
    """The forward of a layer whose weight was replaced; it may have been again, by a plain one."""
    weight = module.weight
    if not weight.is_mkldnn:
        return linear(x, weight, module.bias)
    if x.requires_grad and torch.is_grad_enabled():  # oneDNN's product has no gradient
        return linear(x, weight.to_dense(), module.bias)
    return _product(weight, module.bias, x)
