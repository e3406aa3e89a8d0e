"""Change the residual stream that a model computes in a forward pass.

An intervention names a layer, tokens of its row, and what happens there. Layers are numbered as
everywhere (:mod:`ia_mech.engine.capture`): 0 = embeddings, l = output of block l. Positions are
indices into the row's own tokens, from the first token of its context on, whatever part of them a
pass computes; a :class:`ia_mech.chat.format.ChatContext` has those of named tokens, query and
response. Keys and values of another context are put into a row's attention by
:class:`ia_mech.engine.shared.Borrowed`.

To add a kind, write a dataclass with a ``layer`` and a method ``apply``.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.capture import find_blocks
from ia_mech.errors import UserError
from ia_mech.models.load import text_config


@dataclass(frozen=True, eq=False)
class Replace:
    """Put given states in place of the residual stream's.

    Attributes:
        layer: whose states.
        positions: of the row's tokens.
        states: ``[positions, d_model]``; they carry no rotation, so they may come from a context of
            another length.
    """

    layer: int
    positions: tuple[int, ...]
    states: Tensor

    def __post_init__(self) -> None:
        _require_positions(self.positions)
        if self.states.ndim != 2 or len(self.states) != len(self.positions):
            raise ValueError(f"{len(self.positions)} positions, but {self.states.shape} states")

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        return self.states.to(own)


@dataclass(frozen=True, eq=False)
class Add:
    """Add a direction to the residual stream.

    Attributes:
        layer: whose states.
        positions: of the row's tokens.
        direction: ``[d_model]``, of any length but 0.
        dose: length of what is added, in units of the norm of the state it is added to. With 0
            nothing is touched.
    """

    layer: int
    positions: tuple[int, ...]
    direction: Tensor
    dose: float

    def __post_init__(self) -> None:
        _require_positions(self.positions)
        _require_direction(self.direction)

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        unit = (self.direction / self.direction.norm()).to(own)
        return own + self.dose * own.norm(dim=-1, keepdim=True) * unit


@dataclass(frozen=True, eq=False)
class ProjectOut:
    """Remove the residual stream's component along a direction.

    Attributes:
        layer: whose states.
        positions: of the row's tokens.
        direction: ``[d_model]``, of any length but 0.
        dose: share of the component that is removed. With 0 nothing is touched.
    """

    layer: int
    positions: tuple[int, ...]
    direction: Tensor
    dose: float = 1.0

    def __post_init__(self) -> None:
        _require_positions(self.positions)
        _require_direction(self.direction)

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        unit = (self.direction / self.direction.norm()).to(own)
        return own - self.dose * (own * unit).sum(-1, keepdim=True) * unit


TokenwiseIntervention = Add | ProjectOut  # what can be done at any token alike
Intervention = Replace | TokenwiseIntervention


def _require_positions(positions: Sequence[int]) -> None:
    if not positions:
        raise UserError("an intervention selects no position", "select at least one position")


def _require_direction(direction: Tensor) -> None:
    if not 0 < direction.norm() < torch.inf:
        raise UserError("the direction has no length", "give one that isn't zero")


def at_tokens(
    steered: Sequence[TokenwiseIntervention], positions: Sequence[int]
) -> list[Intervention]:
    """The same at other positions; nothing at none."""
    return [replace(one, positions=tuple(positions)) for one in steered] if positions else []


def check_layers(layers: Sequence[int], depth: int) -> None:
    """Refuse layers that a model of so many blocks lacks.

    Raises:
        UserError: names the layer.
    """
    for layer in layers:
        if not 0 <= layer <= depth:
            raise UserError(
                f"there is no layer {layer} to change",
                f"give layers from 0 to {depth} (0: embeddings, l: block l)",
            )


@contextlib.contextmanager
def intervene(
    model: PreTrainedModel,
    rows: Sequence[Sequence[Intervention]],
    first: Sequence[int] | None = None,
) -> Iterator[None]:
    """Intervene in the one forward pass that is made while this lasts.

    Args:
        model: the subject model.
        rows: the interventions in each row of the batch; those of a row at one layer happen in
            their order.
        first: ``[rows]`` the position of the token in the pass's first column: 0 where a pass
            computes whole contexts (the default), less than 0 where the row is padded on its left,
            more where the pass goes on from a cache.

    Raises:
        UserError: a layer isn't there; a token isn't in the pass.
        RuntimeError: on leaving, if a layer didn't run once.
    """
    if not any(rows):
        yield
        return
    begin = [0] * len(rows) if first is None else list(first)
    blocks = find_blocks(model)
    edits: dict[int, list[tuple[int, Intervention]]] = defaultdict(list)
    for row, interventions in enumerate(rows):
        for one in interventions:
            check_layers([one.layer], len(blocks))
            if not (isinstance(one, TokenwiseIntervention) and one.dose == 0):
                edits[one.layer].append((row, one))
    hooks = {layer: _StateHook(of_layer, begin) for layer, of_layer in edits.items()}
    handles = []
    try:
        for layer, hook in hooks.items():
            handles.append(
                blocks[layer - 1].register_forward_hook(hook.leave)
                if layer
                else blocks[0].register_forward_pre_hook(hook.enter, with_kwargs=True)
            )
        yield
        for layer, hook in hooks.items():
            if hook.runs != 1:
                raise RuntimeError(f"layer {layer} ran {hook.runs} times, expected once")
    finally:
        for handle in handles:
            handle.remove()


class _StateHook:
    """Edits the residual stream of one layer."""

    def __init__(self, edits: list[tuple[int, Intervention]], first: list[int]) -> None:
        self.edits, self.first, self.runs = edits, first, 0

    def enter(self, _module, args, kwargs) -> tuple[tuple, dict]:
        """Before the first block: layer 0."""
        if args:
            return (self._edit(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._edit(kwargs["hidden_states"])}

    def leave(self, _module, _args, output):
        """After a block."""
        if isinstance(output, tuple):
            return (self._edit(output[0]), *output[1:])
        return self._edit(output)

    def _edit(self, hidden: Tensor) -> Tensor:
        new = hidden.clone()
        for row, one in self.edits:
            at = [position - self.first[row] for position in one.positions]
            _require_computed(at, hidden.shape[1], self.first[row])
            new[row, at] = one.apply(new[row, at])
        self.runs += 1
        return new


def _require_computed(columns: list[int], width: int, first: int) -> None:
    for column in columns:
        if not 0 <= column < width:
            raise UserError(
                f"position {column + first} isn't among the tokens {max(first, 0)} to "
                f"{first + width - 1} that are computed",
                "change one that is",
            )


@contextlib.contextmanager
def from_layer(model: PreTrainedModel, layer: int, states: Tensor) -> Iterator[None]:
    """Leave out the blocks up to a layer: a forward pass begins with that layer's states.

    What a pass computes below the first intervention is what it computes without one. Blocks that
    later ones take keys and values from (Gemma 4) are computed all the same.

    Args:
        model: the subject model.
        layer: 0 leaves nothing out.
        states: ``[rows, tokens, d_model]`` of that layer.
    """
    modes = getattr(text_config(model.config), "kv_sharing_modes", [])
    needed = "store" in modes[:layer] and "reuse" in modes[layer:]
    skipped = [] if needed else list(find_blocks(model))[:layer]

    def skip(hidden_states: Tensor, *_, **__) -> Tensor:
        return states

    for block in skipped:
        block.forward = skip
    try:
        yield
    finally:
        for block in skipped:
            del block.forward
