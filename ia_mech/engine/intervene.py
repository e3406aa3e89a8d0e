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
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.capture import find_blocks
from ia_mech.errors import UserError


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
        _check_some(self.positions)
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
        _check_some(self.positions)
        _check_length(self.direction)

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
        _check_some(self.positions)
        _check_length(self.direction)

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        unit = (self.direction / self.direction.norm()).to(own)
        return own - self.dose * (own * unit).sum(-1, keepdim=True) * unit


TokenwiseIntervention = Add | ProjectOut  # what can be done at any token alike
Intervention = Replace | TokenwiseIntervention


class Edit(NamedTuple):
    """What an intervention changed: a row's states at positions of a layer."""

    row: int
    layer: int
    positions: tuple[int, ...]


def _check_some(positions: Sequence[int]) -> None:
    if not positions:
        raise UserError("an intervention selects no position", "select at least one position")


def _check_length(direction: Tensor) -> None:
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
) -> Iterator[list[Edit]]:
    """Intervene in the one forward pass that is made while this lasts.

    Args:
        model: the subject model.
        rows: the interventions in each row of the batch; those of a row at one layer happen in
            their order.
        first: ``[rows]`` the position of the token in the pass's first column: 0 where a pass
            computes whole contexts (the default), less than 0 where the row is padded on its left,
            more where the pass goes on from a cache.

    Yields:
        What was touched, as far as the pass has come.

    Raises:
        UserError: a layer isn't there; a token isn't in the pass.
        RuntimeError: on leaving, if a layer didn't run.
    """
    if not any(rows):
        yield []
        return
    begin = [0] * len(rows) if first is None else list(first)
    blocks = find_blocks(model)
    touched: list[Edit] = []
    edits: dict[int, list[tuple[int, Intervention]]] = defaultdict(list)
    for row, interventions in enumerate(rows):
        for one in interventions:
            check_layers([one.layer], len(blocks))
            if not (isinstance(one, TokenwiseIntervention) and one.dose == 0):
                edits[one.layer].append((row, one))
    handles = []
    try:
        for layer, of_states in edits.items():
            hook = _StateHook(of_states, begin, touched)
            handles.append(
                blocks[layer - 1].register_forward_hook(hook.leave)
                if layer
                else blocks[0].register_forward_pre_hook(hook.enter, with_kwargs=True)
            )
        yield touched
        wanted = sum(map(len, edits.values()))
        if len(touched) != wanted:
            raise RuntimeError(f"{len(touched)} of {wanted} interventions took place")
    finally:
        for handle in handles:
            handle.remove()


class _StateHook:
    """Edits the residual stream of one layer."""

    def __init__(
        self, edits: list[tuple[int, Intervention]], first: list[int], touched: list[Edit]
    ) -> None:
        self.edits, self.first, self.touched = edits, first, touched

    def enter(self, _module, args, kwargs) -> tuple[tuple, dict]:
        """Before the first block: layer 0."""
        if args:
            return (self._edited(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._edited(kwargs["hidden_states"])}

    def leave(self, _module, _args, output):
        """After a block."""
        if isinstance(output, tuple):
            return (self._edited(output[0]), *output[1:])
        return self._edited(output)

    def _edited(self, hidden: Tensor) -> Tensor:
        new = hidden.clone()
        for row, one in self.edits:
            at = [position - self.first[row] for position in one.positions]
            _check_inside(at, hidden.shape[1], self.first[row])
            new[row, at] = one.apply(new[row, at])
            self.touched.append(Edit(row, one.layer, one.positions))
        return new


def _check_inside(columns: list[int], width: int, first: int) -> None:
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

    What a pass computes below the first intervention is what it computes without one.

    Args:
        model: the subject model.
        layer: 0 leaves nothing out.
        states: ``[rows, tokens, d_model]`` of that layer.
    """
    skipped = list(find_blocks(model))[:layer]

    def stand_in(hidden_states: Tensor, *_, **__) -> Tensor:
        return states

    for block in skipped:
        block.forward = stand_in
    try:
        yield
    finally:
        for block in skipped:
            del block.forward
