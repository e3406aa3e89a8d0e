"""The rules of a CUDA graph on a CPU: a tape records what a step launches, and launches it again.

As with a graph, none of the step's Python runs again: addresses, shapes and numbers are those of
the recording. What a graph can't hold is an error: numbers that the host reads, shapes that depend
on numbers, and tensors made of the host's numbers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"),
    *("bincount", "repeat_interleave", "lift_fresh", "lift_fresh_copy"),
}


class Tape(TorchDispatchMode):
    """What was launched while it recorded.

    Attributes:
        names: of the launched operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple, dict, list]] = []

    @property
    def names(self) -> list[str]:
        return [_name(operation) for operation, *_ in self._calls]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _name(func)
        masks = [one.dtype == torch.bool for one in tree_leaves(args) if isinstance(one, Tensor)]
        if name in FORBIDDEN or (name.startswith("index") and any(masks)):
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        made = func(*args, **kwargs)
        aliases = [one.alias_info for one in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliases)
        if not views and name != "_unsafe_view" and not name.startswith(("empty", "new_empty")):
            new = [] if any(aliases) else tree_leaves(made)
            self._calls.append((func, args, kwargs, new))
        return made

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            made = tree_leaves(func(*args, **kwargs))
            for old, new in zip(outputs, made, strict=False):
                if isinstance(old, Tensor):
                    old.copy_(new)


def _name(operation) -> str:
    return operation._schema.name.split("::")[1]


def record(step, _before) -> Tape:
    """In place of ``captured.capture``: as with a GPU, the step runs once before."""
    step()
    tape = Tape()
    with tape:
        step()
    return tape
