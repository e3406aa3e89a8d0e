"""Change the residual stream that a model computes in a forward pass, or what is added to it.

An intervention names a layer, tokens of its row, and a change. Layers are numbered as everywhere
(:mod:`ia_mech.engine.blocks`): 0 = embeddings, l = output of block l. Positions count the row's own
tokens from the first token of its context, whichever of them a pass computes
(:mod:`ia_mech.engine.passes`); a :class:`ia_mech.chat.format.ChatContext` holds those of named
tokens, query and response. :class:`ia_mech.engine.shared.Borrowed` lets a row attend to the keys
and values of another context.

To add a kind, write a dataclass with ``layer``, ``positions`` and a method ``apply``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ia_mech.errors import UserError
from ia_mech.run.tokens import RESID


@dataclass(frozen=True, eq=False)
class Replace:
    """Replace states of the residual stream by given ones.

    Attributes:
        layer: whose states.
        positions: of the row's tokens.
        states: ``[positions, d_model]``; they hold no rotation, so they may come from a context of
            another length.
        component: what is replaced: the stream, or what the layer's attention or MLP adds to it
            (:func:`ia_mech.engine.components.hook_branches` first).
    """

    layer: int
    positions: tuple[int, ...]
    states: Tensor
    component: str = RESID

    def __post_init__(self) -> None:
        _require_positions(self.positions)
        if self.states.ndim != 2 or len(self.states) != len(self.positions):
            raise ValueError(f"{len(self.positions)} positions, but {self.states.shape} states")

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        return self.states.to(own)


@dataclass(frozen=True, eq=False)
class _Along:
    """A change along a direction, the same at every token.

    Attributes:
        layer: whose states.
        positions: of the row's tokens.
        direction: ``[d_model]``, of any length but 0.
        dose: size of the change; 0 changes nothing.
    """

    component = RESID

    layer: int
    positions: tuple[int, ...]
    direction: Tensor
    dose: float

    def __post_init__(self) -> None:
        _require_positions(self.positions)
        if not 0 < (length := self.direction.norm()) < torch.inf:
            raise UserError(f"the direction has length {length:g}", "give a finite one above 0")

    def _unit(self, own: Tensor) -> Tensor:
        return (self.direction / self.direction.norm()).to(own)


class Add(_Along):
    """Add a direction to the residual stream; ``dose`` is the length of what is added, in units of
    the norm of the state that it is added to."""

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        return own + self.dose * own.norm(dim=-1, keepdim=True) * self._unit(own)


class ProjectOut(_Along):
    """Remove the residual stream's component along a direction; ``dose`` is the share of the
    component that is removed."""

    def apply(self, own: Tensor) -> Tensor:
        """What takes the place of ``[positions, d_model]``."""
        unit = self._unit(own)
        return own - self.dose * (own * unit).sum(-1, keepdim=True) * unit


TokenwiseIntervention = Add | ProjectOut  # kinds that are the same at every token
Intervention = Replace | TokenwiseIntervention


def _require_positions(positions: Sequence[int]) -> None:
    if not positions:
        raise UserError("an intervention selects no position", "select at least one position")


def at_tokens(
    steered: Sequence[TokenwiseIntervention], positions: Sequence[int]
) -> list[Intervention]:
    """The interventions at other positions, such as all of a turn's; none without positions."""
    return [replace(one, positions=tuple(positions)) for one in steered] if positions else []


def within(interventions: Sequence[Intervention], start: int, stop: int) -> list[Intervention]:
    """The interventions, limited to positions from ``start`` up to ``stop``."""
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
