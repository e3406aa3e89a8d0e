"""Matrix products on a CPU, with weights reordered once.

PyTorch's float32 product rearranges the weight at each call; oneDNN can keep it rearranged (what
``torch.compile`` does when it freezes a model). With one thread and a weight of 1536 x 8960 this is
2.8 times as fast at 10 rows, 1.2 at 33 and 1.1 at 120 with AVX-512; 1.1, 1.2 and 1.1 with AVX2. The
price is other rounding, since sums are taken in another order, and 1 ms whenever a shape of weight
meets a number of rows for the first time. The whole engine is 1.8 to 2 times as fast with 33 and 96
rows of the embedded model on a machine where PyTorch's own product is slow (an AMD EPYC), and not
faster on some others.

A small model keeps both orders and uses the reordered one only in the engine's passes
(``passes.py``); everything else computes as if it weren't installed. A large model keeps only the
reordered weights, which replace the plain ones for good. The model alone decides which, so the same
machine computes the same numbers in every process.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ia_mech.engine.passes import current

MOST_BYTES = 2**31  # of weights that are held in both orders
ROWS = 64  # the number of rows that the order is chosen for; other numbers work, too


def reorder_weights(model: nn.Module) -> None:
    """Let the model's float32 linear layers on a CPU use reordered weights.

    A small model's weight that is replaced or edited in place later is reordered again, unless it
    is edited through ``.data``, which PyTorch doesn't count (``peft`` merges adapters that way);
    calling this again takes in such edits, too. A large model's weights are replaced: they can be
    read by :func:`ia_mech.models.load.whole_weight`, but the model can't be copied, saved or
    trained.
    """
    if not torch.backends.mkldnn.is_available():
        return
    held = [f for m in model.modules() if isinstance(f := vars(m).get("forward"), BothOrders)]
    for forward in held:
        forward.forget()
    linears = [
        m
        for m in model.modules()
        # A subclass, or a replaced forward, does something else.
        if type(m) is nn.Linear
        and "forward" not in vars(m)
        and _is_plain(m.weight)
        and not m.weight.is_inference()  # these count no versions
    ]
    try:
        if sum(m.weight.nbytes for m in linears) > MOST_BYTES:
            _replace(model, {m for m in linears if not m.weight.requires_grad})  # none in training
            return
        for module in linears:
            forward = BothOrders(module)
            forward.reorder()
            module.forward = forward  # type: ignore[method-assign, assignment]
    except (AttributeError, RuntimeError):  # a build of PyTorch without these operations
        return


def pack_rows(model: PreTrainedModel) -> None:
    """Give the unembedding of a model on a CPU rows that follow one another in memory.

    Those of a prefill's last tokens don't, and PyTorch's bfloat16 product (2.13, AVX-512) then
    takes 2.4 s a row instead of 0.04 s, with a vocabulary of 151,936 and 1,536 dimensions.
    """
    model.get_output_embeddings().register_forward_pre_hook(_packed)


def _packed(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # contiguous() would leave a single row as it is.
    return tuple(one.clone(memory_format=torch.contiguous_format) for one in inputs)


def held_bytes(model: nn.Module) -> int:
    """Bytes of an installed model's weights, in both orders where it holds both."""
    found = [vars(module).get("forward") for module in model.modules()]
    both = [one.module.weight.nbytes for one in found if isinstance(one, BothOrders)]
    return sum(both) + sum(one.nbytes for one in model.parameters())


def describe(model: nn.Module) -> str:
    """Which order of weights an installed model's linear layers use; rounding depends on it."""
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    found = any(isinstance(vars(m).get("forward"), BothOrders) for m in linears)
    return "reordered" if found or any(m.weight.is_mkldnn for m in linears) else "plain"


class BothOrders:
    """The forward of a layer that holds its weight in both orders."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.forget()

    def forget(self) -> None:
        """Reorder the weight again before it is used the next time."""
        self._held: tuple[Tensor, Tensor, tuple[int, int]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "BothOrders":
        # The module is being copied, and refers to this.
        copied = memo[id(self)] = BothOrders.__new__(BothOrders)
        copied.module = memo.get(id(self.module), self.module)
        copied.forget()
        return copied

    def reorder(self) -> Tensor:
        """A copy of the weight in the other order. Threads may ask for it at once: ``_held`` is
        replaced as a whole."""
        weight = self.module.weight
        version = _version(weight)
        copied = _reorder(weight)
        # The weight is held, too, or another could later have its address in memory.
        self._held = copied, weight, version
        return copied

    def __call__(self, x: Tensor) -> Tensor:
        # Read from the dictionary, since a module's own lookup is slow.
        weight, bias = (self.module._parameters[name] for name in ("weight", "bias"))
        assert weight is not None
        # oneDNN's product has no gradient.
        differentiated = x.requires_grad and torch.is_grad_enabled()
        if current() is None or differentiated or not _is_plain(weight):
            return linear(x, weight, bias)
        held = self._held
        if held is not None and held[1] is weight and held[2] == _version(weight):
            return _product(held[0], bias, x)
        return _product(self.reorder(), bias, x)


def _is_plain(weight: Tensor) -> bool:
    """Whether the weight can be reordered."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and not weight.is_mkldnn


def _replace(model: nn.Module, linears: set[nn.Linear]) -> None:
    """Replace plain weights by reordered ones, one after the other."""
    for module in model.modules() if linears else ():
        if module in linears:
            module.weight = nn.Parameter(_reorder(module.weight), requires_grad=False)
            module.forward = partial(_forward_reordered, module)  # type: ignore[method-assign]
        # Weights are mapped from files, which stay in memory as long as anything is mapped to them.
        for parameter in module.parameters(recurse=False):
            if not parameter.is_mkldnn:
                parameter.data = parameter.data.clone()


def _version(weight: Tensor) -> tuple[int, int]:
    """Changes when the weight is replaced or edited in place."""
    return weight.data_ptr(), weight._version


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _forward_reordered(module: nn.Linear, x: Tensor) -> Tensor:
    """The forward of a layer with a reordered weight, or with a plain one that has replaced
    that."""
    weight = module.weight
    if not weight.is_mkldnn:
        return linear(x, weight, module.bias)
    if x.requires_grad and torch.is_grad_enabled():  # oneDNN's product has no gradient
        return linear(x, weight.to_dense(), module.bias)
    return _product(weight, module.bias, x)
