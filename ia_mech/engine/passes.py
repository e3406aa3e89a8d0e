"""The current pass: what a thread's forward pass captures and edits.

An installed model (``installed.py``) keeps a hook before its first block and one behind each block.
A hook looks at its thread's current pass and does nothing where there is none. So several threads
may run one model at once, each in its own pass, and no hook has to be removed after a pass.

| in a pass | tokens | layers | |
|---|---|---|---|
| captured | the same number of positions in each row | all, 0 to L | as edits leave them |
| edited | any positions, each row its own | any, 0 to L | in the order of a row's interventions |
| edited: what attention or MLP adds | any positions, each row its own | any, 1 to L | the same |
| borrowed | all | those that share their prefix | by ``shared.Borrowed``, for scored turns |
| stopped | | between any two | by what :data:`on_block` raises |

Positions are indices into a row's own tokens, whichever of them the pass computes.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ia_mech.engine.intervene import Intervention, TokenwiseIntervention, check_layers
from ia_mech.errors import UserError
from ia_mech.run.tokens import RESID

# Called before the first block of each of a thread's passes, and behind every block; an exception
# that it raises ends the pass.
on_block: ContextVar[Callable[[], None] | None] = ContextVar("on_block", default=None)


class Pass:
    """What is captured and edited in one forward pass.

    Args:
        depth: how many blocks the model has.
        width: tokens of each row that the pass computes, padding included.
        first: ``[rows]`` position of the token in the pass's first column: less than 0 where a row
            is padded on its left, more than 0 where the pass goes on from a cache.
        captured: ``[rows][positions]`` where the residual stream is captured, -1 where a row lacks
            the position; None captures nothing.
        interventions: for each row, its interventions; empty if no row has any.
        masked: whether any layer looks at the mask; if none does, no mask is made.

    Raises:
        UserError: the model lacks a layer, or the pass doesn't compute a token.
    """

    def __init__(
        self,
        depth: int,
        width: int,
        first: Sequence[int],
        captured: Sequence[Sequence[int]] | None = None,
        interventions: Sequence[Sequence[Intervention]] = (),
        *,
        masked: bool = True,
    ) -> None:
        self.masked = masked
        self._layers = range(depth + 1)
        self._on_block = on_block.get()
        self._ran: list[int] = []
        self._kept: list[Tensor] = []
        self._captured: Tensor | None = None
        if captured is not None:
            for own, begin in zip(captured, first, strict=True):
                _require_computed([at - begin for at in own if at >= 0], width, begin)
            at = torch.tensor([list(own) for own in captured], dtype=torch.long)
            self._captured = torch.where(at < 0, at, at - torch.tensor(first)[:, None])
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}  # rows, columns
        # component and layer → row, columns, and what is done there
        self._edits: dict[tuple[str, int], list[tuple[int, list[int], Intervention]]]
        self._edits = defaultdict(list)
        for row, changes in enumerate(interventions):
            for one in changes:
                check_layers([one.layer], depth)
                columns = [position - first[row] for position in one.positions]
                _require_computed(columns, width, first[row])
                if not (isinstance(one, TokenwiseIntervention) and one.dose == 0):
                    self._edits[one.component, one.layer].append((row, columns, one))
        self._to_edit = {*self._edits}

    def through(self, layer: int, hidden: Tensor) -> Tensor:
        """The states ``[rows, tokens, d_model]`` of a layer, as the next block gets them."""
        if self._on_block is not None:
            self._on_block()
        self._ran.append(layer)
        hidden = self.edited(RESID, layer, hidden)
        if self._captured is not None:
            self._keep(hidden, self._captured)
        return hidden

    def edited(self, component: str, layer: int, states: Tensor) -> Tensor:
        """States ``[rows, tokens, d_model]`` of a component, as edits leave them."""
        place = component, layer
        if place in self._edits:
            states = states.clone()
            for row, columns, one in self._edits[place]:
                states[row, columns] = one.apply(states[row, columns])
            self._to_edit.discard(place)
        return states

    def _keep(self, hidden: Tensor, columns: Tensor) -> None:
        if hidden.ndim != 3:
            raise ValueError(f"a block gave a tensor of {hidden.ndim} dimensions, expected 3")
        # Copied once per device, without waiting for what that has yet to do.
        if hidden.device not in self._indices:
            rows = torch.arange(len(columns), device=hidden.device)[:, None]
            at = columns.clamp(min=0).to(hidden.device, non_blocking=True)
            self._indices[hidden.device] = rows, at
        self._kept.append(hidden[self._indices[hidden.device]])  # [rows, positions, d_model]

    def residuals(self) -> Tensor | None:
        """``[rows, layers + 1, positions, d_model]`` in the model's dtype, after the pass.

        Raises:
            RuntimeError: the blocks didn't run once each, in order: layers can't be told apart. Or
                something wasn't edited.
        """
        if self._ran != [*self._layers]:
            raise RuntimeError(
                f"layers {self._ran} ran, expected each of 0 to {self._layers[-1]} once"
            )
        if self._to_edit:
            raise RuntimeError(f"{sorted(self._to_edit)} weren't edited")
        if self._captured is None:
            return None
        device = self._kept[0].device
        kept = torch.stack([one.to(device) for one in self._kept], dim=1)
        lacking = (self._captured < 0).to(device, non_blocking=True)
        return kept.masked_fill_(lacking[:, None, :, None], torch.nan)


def _require_computed(columns: Sequence[int], width: int, first: int) -> None:
    for column in columns:
        if not 0 <= column < width:
            raise UserError(
                f"position {column + first} isn't among the tokens {max(first, 0)} to "
                f"{first + width - 1} that are computed",
                "name one of those",
            )


_current: ContextVar[Pass | None] = ContextVar("pass", default=None)


def current() -> Pass | None:
    """This thread's current pass; None outside of passes."""
    return _current.get()


@contextlib.contextmanager
def making(one: Pass) -> Iterator[None]:
    """While it lasts, this is the thread's current pass."""
    before = _current.set(one)
    try:
        yield
    finally:
        _current.reset(before)


def hook_blocks(blocks: nn.ModuleList) -> None:
    """Put hooks on the blocks, through which current passes capture and edit their states."""
    blocks[0].register_forward_pre_hook(_enter_first, with_kwargs=True)
    for layer, block in enumerate(blocks, start=1):
        block.register_forward_hook(_Leave(layer))


def is_hooked_by_others(model: nn.Module) -> bool:
    """Whether anybody else has put hooks on a model, which may do something else at each pass."""
    return any(
        not str(hook.__module__).startswith(("ia_mech.", "transformers."))
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )


def _enter_first(_module, args, kwargs):
    one = current()
    if one is None:
        return None
    if args:
        return (one.through(0, args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": one.through(0, kwargs["hidden_states"])}


class _Leave:
    """The hook behind a layer's block."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, _module, _args, output):
        one = current()
        if one is None:
            return None
        if isinstance(output, tuple):
            return (one.through(self.layer, output[0]), *output[1:])
        return one.through(self.layer, output)
