"""Rotary embeddings whose frequencies depend on how long a row is.

Two kinds (``dynamic``, ``longrope``) rotate long sequences otherwise than short ones. In
``transformers`` the longest row of a batch decides for all, and the outcome is written into the
module: a row changes with its neighbours, with the passes before, and with those of other threads.
Here each row's own length decides, and the module stays as it is.

Rows that have no reference are refused: those that cross the border after they were prefilled,
since a full pass over all their tokens would have rotated the first ones otherwise; and dynamic
ones beyond it, which every further token would rotate anew.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ia_mech.engine.passes import current
from ia_mech.errors import UserError

VARYING = {"dynamic", "longrope"}
BORDER = "original_max_position_embeddings"


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


def refuse_growth(config: Any, cached: int, length: int) -> None:
    """Refuse a row that has no reference, before any pass, by the configuration of a model's text.

    Args:
        config: of the text part.
        cached: tokens of the row that are prefilled.
        length: to which it grows.

    Raises:
        UserError: it crosses the border, or is beyond it with dynamic rotations.
    """
    kinds = {one.get("rope_type") for one in _parameters(config)}
    if not VARYING.isdisjoint(kinds):
        _refuse(kinds, _border(config), cached, length)


def _parameters(config: Any) -> list[dict]:
    """Of each kind of layer, where these differ."""
    each = getattr(config, "rope_parameters", None) or {}
    nested = [one for one in each.values() if isinstance(one, dict)]
    return nested or [each]


def _border(config: Any) -> int:
    known = [one[BORDER] for one in _parameters(config) if BORDER in one]
    return min([config.max_position_embeddings, *known])


def _refuse(kinds: set, border: float, cached: int, length: int) -> None:
    if length <= border:
        return
    if "dynamic" in kinds:
        raise UserError(
            f"{length} tokens: beyond {border}, this model's rotations depend on every "
            "length that it was run at (dynamic scaling)",
            "leave such conversations out, or write fewer tokens",
        )
    if 0 < cached <= border:
        raise UserError(
            f"a row of {cached} tokens grows to {length}: beyond {border}, this model "
            "rotates all of a row's tokens otherwise",
            "leave conversations near that length out, or write fewer tokens",
        )


@contextlib.contextmanager
def lowered_border(model: nn.Module, border: int) -> Iterator[None]:
    """While it lasts, rows of more than so many tokens are rotated as long ones (``longrope``), by
    copies of the modules' configurations."""
    held = [f for m in model.modules() for f in vars(m).values() if isinstance(f, RowsApart)]
    lowered = [f for f in held if "dynamic" not in f.kinds and f.border > border]
    before = [(f.border, f.config) for f in lowered]
    for forward in lowered:
        forward.lower(border)
    try:
        yield
    finally:
        for forward, (own, config) in zip(lowered, before, strict=True):
            forward.border, forward.config = own, config


class RowsApart:
    """The forward of a rotary embedding, as a pure function of each row's positions.

    Attributes:
        kinds: of its rotations.
        border: rows of up to so many tokens are rotated alike.
        config: that the rotations are made by.

    Raises:
        UserError: when it is called, by a pass of the engine, with a row that crosses the border,
            or is beyond it with dynamic rotations.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.config = self.module.config
        kind = self.module.rope_type
        self.kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        self.border = _border(self.config)

    def lower(self, border: int) -> None:
        """Take another border."""
        self.border, self.config = border, copy.deepcopy(self.config)
        for one in _parameters(self.config):
            if BORDER in one:
                # What is read beside it, the factor of attention, stays as it was made.
                one[BORDER] = border

    def __call__(self, x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, ...]:
        if position_ids.ndim != 2:  # of images: one length
            return self._rotations(x, position_ids, *args, **kwargs)
        rows_of: dict[int, list[int]] = {}
        firsts, lasts = torch.stack([position_ids.amin(-1), position_ids.amax(-1)]).tolist()
        for row, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            if current() is not None:
                _refuse(self.kinds, self.border, first, last + 1)
            rows_of.setdefault(max(last + 1, self.border), []).append(row)
        if len(rows_of) == 1:
            return self._rotations(x, position_ids, *args, **kwargs)
        parts = [
            self._rotations(x, position_ids[rows], *args, **kwargs) for rows in rows_of.values()
        ]
        back = torch.tensor([row for rows in rows_of.values() for row in rows]).argsort()
        return tuple(torch.cat(each)[back.to(x.device)] for each in zip(*parts, strict=True))

    def _rotations(self, x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, ...]:
        """Cosines and sines of rows of one length, by a twin of the module as it was made, which
        may write into itself."""
        twin = copy.copy(self.module)
        twin.config = self.config
        twin._buffers = {name: buffer.clone() for name, buffer in self.module._buffers.items()}
        for name, buffer in self.module._buffers.items():
            if "original_inv_freq" in name:
                twin._buffers[name.replace("original_", "")] = buffer.clone()
        for name in vars(twin):
            if name.endswith("max_seq_len_cached"):
                vars(twin)[name] = twin.original_max_seq_len
        return type(twin).forward(twin, x, position_ids, *args, **kwargs)
