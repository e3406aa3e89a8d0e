"""Does a part take the memory that is planned for it? Random models of three shapes, on a CPU.

    python benchmarks/planned_memory.py

Each part holds more than 1 GB of state. Counted are the bytes of tensors that operations return,
until they are freed: neither other memory of the process, nor what an operation takes while it
runs. The recurrent shape took 100 seconds on a busy machine with two cores.
"""

import argparse
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from ia_mech.engine.check import TOKENS, check_engine
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.memory import footprint
from ia_mech.engine.state import Prefix, prefill_all

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Shape:
    """A model's configuration and a part's size: contexts, tokens, rows per context, new tokens."""

    config: Callable[..., transformers.PretrainedConfig]
    changes: dict
    contexts: int
    tokens: int
    rows: int
    new: int


SHAPES = {
    "Llama": Shape(
        transformers.LlamaConfig, {"num_hidden_layers": 16, "head_dim": 128}, 6, 550, 13, 12
    ),
    "sliding": Shape(
        transformers.MistralConfig,
        {"num_hidden_layers": 8, "head_dim": 64, "sliding_window": 256},
        6,
        300,
        13,
        4,
    ),
    "Qwen3.5": Shape(
        Qwen3_5TextConfig,
        {
            "num_hidden_layers": 16,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
        },
        6,
        150,
        13,
        4,
    ),
}


class Counted(TorchDispatchMode):
    """Counts the bytes of storages that operations make while it is active, and their ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._count((args, kwargs), made=False)  # weights, say
        found = func(*args, **(kwargs or {}))
        self._count(found, made=True)
        return found

    def _count(self, values, made: bool) -> None:
        for one in tree_leaves(values):
            if not isinstance(one, torch.Tensor) or one.is_mkldnn:  # weights, reordered
                continue
            storage = one.untyped_storage()
            if storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes() if made else 0
                weakref.finalize(storage, self._freed, storage._cdata)
                self.held += self._known[storage._cdata]
                self.peak = max(self.peak, self.held)

    def _freed(self, key: int) -> None:
        self.held -= self._known.pop(key)


def planned_and_taken(shape: Shape) -> tuple[int, int]:
    """Bytes of a part: planned, and at the peak."""
    torch.manual_seed(0)
    config = shape.config(**SIZES, **shape.changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    check_engine(model.requires_grad_(False), list(range(3, 3 + TOKENS)))
    size = footprint(model)
    planned = shape.contexts * (
        size.context(shape.tokens) + shape.rows * size.row(shape.tokens, shape.new)
    )
    ids = torch.randint(3, 1000, (shape.contexts, shape.tokens)).tolist()
    rows = [Row(c, 1.0, (c, r)) for c in range(shape.contexts) for r in range(shape.rows)]
    with torch.inference_mode(), Counted() as counted:
        groups, _ = prefill_all(model, [Prefix(one) for one in ids])
        decode(model, groups, rows, [], shape.new)
    return planned, counted.peak


def main() -> None:
    """Print a line for each shape."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{'shape':<10}{'planned GB':>12}{'taken GB':>10}{'planned / taken':>17}")
    for name, shape in SHAPES.items():
        planned, taken = planned_and_taken(shape)
        print(
            f"{name:<10}{planned / 1e9:>12.2f}{taken / 1e9:>10.2f}{planned / taken:>17.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
