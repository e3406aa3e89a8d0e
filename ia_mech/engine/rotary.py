"""Rotary embeddings whose frequencies depend on how long a row is.

Two kinds (``dynamic``, ``longrope``) rotate long sequences otherwise than short ones. In
``transformers`` the longest row of a batch decides for all, and the outcome is written into the
module: a row changes with its neighbours, with the passes before, and with those of other threads.
Here each row's own length decides, and the module stays as it is.

A row that crosses the border while it is written goes on with the keys that it has, as in
``transformers``; a full pass over all its tokens would have rotated them otherwise.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

VARYING = {"dynamic", "longrope"}


def separate_rows(model: nn.Module) -> None:
    """Let the model's rotary embeddings rotate each row by its own length."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if VARYING.isdisjoint(kind.values() if isinstance(kind, dict) else [kind]):
            continue
        # Where accelerate put its own forward in front, it calls this one.
        name = "_old_forward" if "_old_forward" in vars(module) else "forward"
        if not isinstance(vars(module).get(name), RowsApart):
            setattr(module, name, RowsApart(module))


class RowsApart:
    """The forward of a rotary embedding, as a pure function of each row's positions."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def __call__(self, x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, ...]:
        if position_ids.ndim != 2:  # of images: one length
            return self._rotations(x, position_ids, *args, **kwargs)
        rows_of: dict[int, list[int]] = {}
        border = self._border()
        for row, last in enumerate(position_ids.amax(-1).tolist()):
            rows_of.setdefault(max(last + 1, border), []).append(row)
        if len(rows_of) == 1:
            return self._rotations(x, position_ids, *args, **kwargs)
        parts = [
            self._rotations(x, position_ids[rows], *args, **kwargs) for rows in rows_of.values()
        ]
        back = torch.tensor([row for rows in rows_of.values() for row in rows]).argsort()
        return tuple(torch.cat(each)[back.to(x.device)] for each in zip(*parts, strict=True))

    def _border(self) -> int:
        """Rows of up to so many tokens are rotated alike."""
        parameters = self.module.config.rope_parameters
        each = parameters.values() if isinstance(self.module.rope_type, dict) else [parameters]
        name = "original_max_position_embeddings"
        known = [one[name] for one in each if one and name in one]
        return min(self.module.original_max_seq_len, *known, math.inf)

    def _rotations(self, x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, ...]:
        """Cosines and sines of rows of one length, by a twin of the module as it was made, which
        may write into itself."""
        twin = copy.copy(self.module)
        twin._buffers = {name: buffer.clone() for name, buffer in self.module._buffers.items()}
        for name, buffer in self.module._buffers.items():
            if "original_inv_freq" in name:
                twin._buffers[name.replace("original_", "")] = buffer.clone()
        for name in vars(twin):
            if name.endswith("max_seq_len_cached"):
                vars(twin)[name] = twin.original_max_seq_len
        return type(twin).forward(twin, x, position_ids, *args, **kwargs)
