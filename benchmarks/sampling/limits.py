"""What bounds every engine: the model's matrix products on a CPU; a GPU's bandwidth and rate.

On a CPU every linear layer is multiplied with random rows, in the model's order, as a forward pass
does: its weights come from memory, since 500 MB of others went through the caches before. Each
product is computed in two ways: PyTorch's own, and oneDNN's with weights that were reordered for
that number of rows beforehand. On a GPU the ceilings are measured copies and products, and decoding
is compared with the bytes and operations that it can't avoid.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from benchmarks.sampling.workload import Contender, Size, Workload, timed
from ia_mech.engine.decode import decode
from ia_mech.errors import UserError
from ia_mech.models.load import text_config, whole_weight

PASSES = 3  # through the model's products; the median counts
TRIES, IN_A_ROW = 5, 10  # of copies and products for the ceilings; the fastest try counts


class Products(Contender):
    """The matrix products alone, for every number of contexts.

    A product has ``part``: ``prefill`` (the blocks' linear layers on every token), ``head`` (the
    unembedding at each context's last token) or ``step`` (everything, on one token of every row);
    ``rows`` are multiplied with ``count`` weights of shape ``[out, in]``; ``seconds`` are of all
    ``count`` together, by ``way``.
    """

    def __init__(self, work: Workload, contexts: int) -> None:
        super().__init__(work, contexts)
        if work.on_gpu:  # on a GPU, waiting for each product would count
            raise UserError("single products are timed on a CPU only", "use `ceilings`")

    def run(self, new_tokens: int) -> None: ...

    def measure(self) -> dict[str, Any]:
        model, size = self.work.model, self.work.size
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        head = model.get_output_embeddings()
        blocks = [module for module in linears if module is not head]
        found = []
        for contexts in size.counts:
            for part, modules, rows in (
                ("prefill", blocks, contexts * size.context_tokens),
                ("head", [head], contexts),
                ("step", linears, contexts * size.rows),
            ):
                for way in (plain, reordered) if can_reorder(modules) else (plain,):
                    each = pd.DataFrame([m.weight.shape for m in modules], columns=["out", "in"])
                    each["seconds"] = product_seconds(modules, rows, way)
                    shapes = each.groupby(["out", "in"], sort=False).seconds.agg(["size", "sum"])
                    shapes = shapes.set_axis(["count", "seconds"], axis=1).reset_index()
                    what = {"part": part, "contexts": contexts, "rows": rows, "way": way.__name__}
                    found += shapes.assign(**what).to_dict("records")
        return {"products": found}


@torch.inference_mode()
def product_seconds(
    modules: Sequence[nn.Linear],
    rows: int,
    way: Callable[[nn.Linear, int], Callable[[Tensor], Tensor]],
) -> list[float]:
    """Seconds of each module's product with ``rows`` rows; the median of a few passes."""
    computed = [(way(module, rows), module.in_features) for module in modules]
    dtype, device = modules[0].weight.dtype, modules[0].weight.device
    inputs = {width: torch.randn(rows, width, dtype=dtype) for _, width in computed}
    passes = [
        [timed(partial(one, inputs[width]), device) for one, width in computed]
        for _ in range(PASSES)
    ]
    return np.median(passes, axis=0).tolist()


def plain(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """PyTorch's own product."""
    weight = whole_weight(module, "weight")
    return lambda x: functional.linear(x, weight, module.bias)


def reordered(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """oneDNN's product with a copy of the weight in the order that it prefers for so many rows."""
    weight = torch.ops.mkldnn._reorder_linear_weight(whole_weight(module, "weight"), rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, module.bias, "none", [], "")


class Steps(Contender):
    """Decoding steps and their matrix products, which take turns; each counts at its fastest.

    ``step`` is the time of the fastest whole step, sampling included; ``products`` that of the
    products with every weight, each the faster way, at its fastest.
    """

    def run(self, new_tokens: int) -> None: ...

    def measure(self) -> dict[str, Any]:
        work, size = self.work, self.work.size
        if work.on_gpu:
            raise UserError("single products are timed on a CPU only", "use `decode`")
        modules = [module for module in work.model.modules() if isinstance(module, nn.Linear)]
        rows = self.contexts * size.rows
        ways = (plain, reordered) if can_reorder(modules) else (plain,)
        computed = [[way(module, rows) for module in modules] for way in ways]
        inputs = [torch.randn(rows, module.in_features) for module in modules]
        products = np.full((len(ways), len(modules)), np.inf)
        steps: list[float] = []
        begun = 0.0

        def after_a_step(*_) -> None:
            nonlocal begun
            steps.append(time.perf_counter() - begun)
            for way, functions in enumerate(computed):
                pairs = zip(functions, inputs, strict=True)
                taken = [timed(partial(one, x), work.device) for one, x in pairs]
                products[way] = np.minimum(products[way], taken)
            begun = time.perf_counter()

        groups = work.prefilled(self.contexts, capture=False)
        with torch.inference_mode():
            decode(
                work.model, groups, work.rows(self.contexts), [], size.new_tokens,
                on_step=after_a_step,
            )  # fmt: skip
        # The first tokens come from the prefill and take no step.
        return {"step": min(steps[1:]), "products": products.min(0).sum()}


def can_reorder(modules: Sequence[nn.Linear]) -> bool:
    """Whether oneDNN takes all of them."""
    float32 = all(module.weight.dtype == torch.float32 for module in modules)
    return float32 and torch.backends.mkldnn.is_available()


class Ceilings(Contender):
    """``bandwidth`` of copies, bytes read and written per second, and ``rate`` of matrix products,
    operations per second."""

    def run(self, new_tokens: int) -> None: ...

    def measure(self) -> dict[str, Any]:
        device, dtype = self.work.device, self.work.model.dtype
        count, width = (2**32, 8192) if self.work.on_gpu else (2**26, 512)
        source = torch.empty(count, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
        copy, product = self._fastest(lambda: target.copy_(source)), self._fastest(lambda: a @ b)
        return {"bandwidth": 2 * count / copy, "rate": 2 * width**3 / product}

    def _fastest(self, function: Callable[[], object]) -> float:
        """Seconds of one call among many in a row, so that the host's time doesn't count."""

        def repeated() -> None:
            for _ in range(IN_A_ROW):
                function()

        return min(self.seconds(repeated) for _ in range(TRIES)) / IN_A_ROW


def least(
    model: PreTrainedModel, cache: DynamicCache, size: Size, contexts: int
) -> tuple[float, float]:
    """Bytes and operations of all decoding steps that no engine can avoid.

    Each step reads every weight once, each context's keys and values once (not once per row), and
    each row's own keys and values, the newest of which it writes. Layers with a recurrent state
    read and write that of each row, and its window of the convolution. Logits are written and
    read. What a fused kernel may keep to itself, such as activations, is left out.

    Args:
        model: whose parameters are counted in the dtypes they have.
        cache: of any prefill with this model, for the layers' shapes and dtypes.
        size: of the job.
        contexts: decoded together.
    """
    rows, steps = contexts * size.rows, size.new_tokens - 1
    own = size.new_tokens / 2  # tokens of a row, the newest included, on the average of all steps
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # Embeddings that aren't tied to the head are only looked up, not read whole.
    read = [p for p in model.parameters() if p is not table or p is head]
    weights = sum(p.numel() for p in read if p.ndim > 1)
    attended = _tensors_named(cache, "keys") + _tensors_named(
        cache, "values"
    )  # [contexts, kv_heads, tokens, dim]
    recurrent, windows = (
        _tensors_named(cache, "recurrent_states"),
        _tensors_named(cache, "conv_states"),
    )
    token = sum(t.shape[1] * t.shape[-1] * t.element_size() for t in attended)
    moved = sum(p.nbytes for p in read) + token * (contexts * size.context_tokens + rows * own)
    of_row = sum(t[0].nbytes for t in recurrent + windows) + head.shape[0] * head.element_size()
    # One product for scores and one for values, for each query head.
    heads = text_config(model.config).num_attention_heads
    scored = sum(heads * t.shape[-1] for t in attended) * (size.context_tokens + own)
    # The delta rule looks a key up in the state, adds to it, and looks a query up.
    updated = 3 * sum(t[0].numel() for t in recurrent)
    return steps * (moved + 2 * rows * of_row), steps * 2 * rows * (weights + scored + updated)


def _tensors_named(cache: DynamicCache, name: str) -> list[Tensor]:
    """Tensors ``[contexts, …]`` with that name, of all layers that have one."""
    tensors: list[Tensor | None] = []
    for layer in cache.layers:
        value = getattr(layer, name, None)
        tensors += value.values() if isinstance(value, dict) else [value]
    return [tensor for tensor in tensors if tensor is not None]
