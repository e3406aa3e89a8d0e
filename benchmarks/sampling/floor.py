"""What the model's matrix products take by themselves: no engine that computes them is faster.

Every linear layer of the model is multiplied with random rows, in the model's order, as a forward
pass does: its weights come from memory, since 500 MB of others went through the caches before. Two
ways of computing each: PyTorch's own, and oneDNN's with weights reordered for that number of rows
beforehand (reordering isn't counted). Attention, norms and sampling are left out.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.sampling.peers import Workload, timed
from benchmarks.sampling.results import Product

PASSES = 3  # through the model; the median counts


def measure(workload: Workload, into: list[Product]) -> None:
    """One round of all products, of one and of all contexts, added to the records ``into``."""
    model, size = workload.subject.model, workload.size
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()
    blocks = [module for module in linears if module is not head]
    for contexts in (1, len(workload.contexts)):
        for part, modules, rows in (
            ("prefill", blocks, contexts * size.context_tokens),
            ("head", [head], contexts),
            ("step", linears, contexts * size.rows),
        ):
            _add(into, part, contexts, rows, modules)


def _add(
    into: list[Product], part: str, contexts: int, rows: int, modules: Sequence[nn.Linear]
) -> None:
    shapes = [tuple(module.weight.shape) for module in modules]
    seconds = {"plain": products(modules, rows, plain)}
    if can_reorder(modules):
        seconds["reordered"] = products(modules, rows, reordered)
    for shape in dict.fromkeys(shapes):
        known = [p for p in into if (p.part, p.contexts, p.shape) == (part, contexts, shape)]
        if not known:
            ways = {way: [] for way in seconds}
            known = [Product(part, contexts, rows, shape, shapes.count(shape), ways)]
            into += known
        for way, taken in seconds.items():
            of_shape = [t for t, other in zip(taken, shapes, strict=True) if other == shape]
            known[0].seconds[way].append(sum(of_shape))


@torch.inference_mode()
def products(
    modules: Sequence[nn.Linear],
    rows: int,
    way: Callable[[nn.Linear, int], Callable[[Tensor], Tensor]],
) -> list[float]:
    """Seconds of each module's product with ``rows`` rows; the median of a few passes."""
    computed = [way(module, rows) for module in modules]
    inputs = {
        module.in_features: torch.randn(
            rows, module.in_features, dtype=module.weight.dtype, device=module.weight.device
        )
        for module in modules
    }
    passes = [
        [
            timed(partial(product, inputs[module.in_features]))
            for module, product in zip(modules, computed, strict=True)
        ]
        for _ in range(PASSES)
    ]
    return [statistics.median(taken) for taken in zip(*passes, strict=True)]


def plain(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """PyTorch's own product."""
    return lambda x: functional.linear(x, module.weight, module.bias)


def reordered(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """oneDNN's product with a copy of the weight that is in its order for so many rows."""
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, module.bias, "none", [], "")


def can_reorder(modules: Sequence[nn.Linear]) -> bool:
    """Whether oneDNN takes them all."""
    return torch.backends.mkldnn.is_available() and all(
        module.weight.device.type == "cpu" and module.weight.dtype == torch.float32
        for module in modules
    )
