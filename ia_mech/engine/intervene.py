"""Change the residual stream that a model computes in a forward pass.

An intervention names a layer, tokens of its row, and what happens there. Layers are numbered as
everywhere (:mod:`ia_mech.engine.blocks`): 0 = embeddings, l = output of block l. Positions are
indices into the row's own tokens, from the first token of its context on, whatever part of them a
pass computes (:mod:`ia_mech.engine.passes`); a :class:`ia_mech.chat.format.ChatContext` has those
of named tokens, query and response. Keys and values of another context are put into a row's
attention by :class:`ia_mech.engine.shared.Borrowed`.

To add a kind, write a dataclass with a ``layer`` and a method ``apply``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
        _require_positions(self.positions)
        if self.states.ndim != 2 or len(self.states) != len(self.positions):
            raise ValueError(f"{len(self.positions)} positions, but {self.states.shape} states")

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        return self.states.to(own)


@dataclass(frozen=True, eq=False)
class _Along:
    """A change along a direction, at any token alike.

    Attributes:
        layer: whose states.
        positions: of the row's tokens.
        direction: ``[d_model]``, of any length but 0.
        dose: how much; with 0 nothing is touched.
    """

    layer: int
    positions: tuple[int, ...]
    direction: Tensor
    dose: float

    def __post_init__(self) -> None:
        _require_positions(self.positions)
        if not 0 < self.direction.norm() < torch.inf:
            raise UserError("the direction has no length", "give one that isn't zero")

    def _unit(self, own: Tensor) -> Tensor:
        return (self.direction / self.direction.norm()).to(own)


class Add(_Along):
    """Add a direction to the residual stream; ``dose`` is the length of what is added, in units of
    the norm of the state it is added to."""

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        return own + self.dose * own.norm(dim=-1, keepdim=True) * self._unit(own)


class ProjectOut(_Along):
    """Remove the residual stream's component along a direction; ``dose`` is the share of it that is
    removed."""

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        unit = self._unit(own)
        return own - self.dose * (own * unit).sum(-1, keepdim=True) * unit


TokenwiseIntervention = Add | ProjectOut  # what can be done at any token alike
Intervention = Replace | TokenwiseIntervention


def _require_positions(positions: Sequence[int]) -> None:
    if not positions:
        raise UserError("an intervention selects no position", "select at least one position")


def at_tokens(
    steered: Sequence[TokenwiseIntervention], positions: Sequence[int]
) -> list[Intervention]:
    """The same at other positions, such as all of a turn; nothing at none."""
    return [replace(one, positions=tuple(positions)) for one in steered] if positions else []


def within(interventions: Sequence[Intervention], start: int, stop: int) -> list[Intervention]:
    """What of the interventions takes place at positions from ``start`` up to ``stop``."""
    found: list[Intervention] = []
    for one in interventions:
        at = [i for i, position in enumerate(one.positions) if start <= position < stop]
        if at:
            positions = tuple(one.positions[i] for i in at)
            if isinstance(one, Replace):
                found.append(replace(one, positions=positions, states=one.states[at]))
            else:
                found.append(replace(one, positions=positions))
    return found


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
