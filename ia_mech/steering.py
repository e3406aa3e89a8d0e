"""A steering vector in a file: a direction, what is done with it, and where.

The file is in safetensors format and holds the tensor ``direction`` ``[d_model]`` float32. Its
metadata hold layer, positions, kind, dose and model as JSON, under ``ia_mech``.

Positions have the names that they have in a run (``turn_end``, ``header_last``, …). :data:`TURN`
stands for every token of the generated user turn. A position in the context is steered during
prefill, :data:`TURN` during decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from ia_mech.cli import expanded
from ia_mech.errors import UserError
from ia_mech.run.integrity import replace_file

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.engine.intervene import TokenwiseIntervention

FORMAT = 1
TURN = "turn"  # besides the names of a template's positions
ADD, PROJECT_OUT = STEERING_KINDS = ("add", "project out")
_TYPES = {"kind": str, "layer": int, "positions": list, "model": str, "weights_hash": str}


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """A direction in one model's residual stream, and what is done with it.

    Attributes:
        kind: :data:`ADD` or :data:`PROJECT_OUT`.
        layer: the layer whose states are changed; 0 = embeddings, l = output of block l.
        positions: names; a context that lacks one of them is refused.
        direction: ``[d_model]`` float32, of any length but 0.
        dose: for :data:`ADD` the length of the added vector, as a multiple of the norm of the state
            that it is added to (negative: in the opposite direction); for :data:`PROJECT_OUT` the
            share of the state's component along the direction that is removed.
        model: the model's name.
        weights_hash: the hash of the model's weights.
    """

    kind: str
    layer: int
    positions: tuple[str, ...]
    direction: Tensor
    dose: float
    model: str
    weights_hash: str

    def __post_init__(self) -> None:
        if self.kind not in STEERING_KINDS:
            raise UserError(
                f"a steering vector of kind {self.kind!r}", f"use {' or '.join(STEERING_KINDS)}"
            )
        if not self.positions:
            raise UserError("a steering vector without a position", f"name one, such as {TURN}")
        if not isfinite(self.dose):
            raise UserError(f"a steering vector of dose {self.dose}", "give a finite one")
        self._intervention()  # refuses a direction without length

    def __str__(self) -> str:
        when = [*["prefill"] * (set(self.positions) != {TURN}), *["decoding"] * bool(self.at_turn)]
        return (
            f"{self.kind}, dose {self.dose:g}, layer {self.layer} at {', '.join(self.positions)} "
            f"({' and '.join(when)})"
        )

    def _intervention(self) -> TokenwiseIntervention:
        from ia_mech.engine.intervene import Add, ProjectOut

        made = Add if self.kind == ADD else ProjectOut
        return made(self.layer, (0,), self.direction, self.dose)

    @property
    def at_turn(self) -> tuple[TokenwiseIntervention, ...]:
        """The changes at each token of the turn."""
        return (self._intervention(),) if TURN in self.positions else ()

    def at_context(self, places: Mapping[str, int | None]) -> tuple[TokenwiseIntervention, ...]:
        """The changes in a context.

        Args:
            places: position → its index among the context's tokens.

        Raises:
            UserError: the context lacks a position.
        """
        named = [name for name in self.positions if name != TURN]
        if lacking := [name for name in named if places.get(name) is None]:
            raise UserError(
                f"the context has no {lacking[0]}, where it is to be steered",
                "name other positions, or leave the conversation out",
            )
        at = tuple(index for name in named if (index := places[name]) is not None)
        return (replace(self._intervention(), positions=at),) if at else ()

    def check(self, layers: int, width: int, names: Sequence[str]) -> None:
        """Refuse a model that the vector can't steer.

        Args:
            layers: how many blocks the model has.
            width: its ``d_model``.
            names: the positions of its template.

        Raises:
            UserError: the model has another width, or lacks the layer or a position.
        """
        from ia_mech.engine.intervene import check_layers

        if len(self.direction) != width:
            raise UserError(
                f"the steering vector has {len(self.direction)} numbers, the model's states have "
                f"{width}",
                "give a vector of this model",
            )
        check_layers([self.layer], layers)
        for name in self.positions:
            if name not in (*names, TURN):
                raise UserError(
                    f"this model's template has no position {name} to steer at",
                    f"use names among {', '.join(names)}, {TURN}",
                )

    def check_weights(self, weights_hash: str) -> None:
        """Refuse a model with other weights than those that the vector was made with.

        Raises:
            UserError: the weights differ.
        """
        if weights_hash != self.weights_hash:
            raise UserError(
                f"the steering vector is of {self.model} with the weights {self.weights_hash}, "
                f"this model has {weights_hash}",
                "give a vector of this model, or the --model that the vector was made with",
            )

    @property
    def _content(self) -> bytes:
        from safetensors.torch import save

        facts = {"format": FORMAT, "kind": self.kind, "layer": self.layer, "dose": self.dose}
        facts |= {"positions": self.positions, "model": self.model}
        facts |= {"weights_hash": self.weights_hash}
        tensors = {"direction": self.direction.detach().float().cpu().contiguous()}
        return save(tensors, {"ia_mech": json.dumps(facts, sort_keys=True)})

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file."""
        return hashlib.sha256(self._content).hexdigest()

    def save(self, file: str | Path) -> None:
        """Write the file whole; its folder must be there."""

        def write(scratch: Path) -> None:
            scratch.write_bytes(self._content)

        replace_file(expanded(file), write)

    @classmethod
    def load(cls, file: str | Path) -> SteeringVector:
        """Read a file that :meth:`save` wrote.

        Raises:
            UserError: there is no such file, or it holds no steering vector, or has another format.
        """
        remedy = "write it with SteeringVector.save, or with ia-mech steering"
        file = expanded(file)
        if not file.is_file():
            raise UserError(f"there is no steering vector {file}", remedy)
        try:
            with safe_open(file, "pt") as opened:
                facts = json.loads((opened.metadata() or {})["ia_mech"])
                direction = opened.get_tensor("direction")
            if facts["format"] != FORMAT:
                raise UserError(
                    f"{file} has format {facts['format']}, this version reads {FORMAT}",
                    "read it with the version of ia_mech that wrote it",
                )
            known = {name: facts[name] for name in _TYPES}
            right = all(type(known[name]) is kind for name, kind in _TYPES.items())
            right = right and all(isinstance(name, str) for name in known["positions"])
            if not right or direction.ndim != 1 or not direction.isfinite().all():
                raise ValueError
            known["positions"] = tuple(known["positions"])
            return cls(**known, direction=direction.float(), dose=float(facts["dose"]))
        except (SafetensorError, ValueError, TypeError, KeyError, OSError):
            raise UserError(f"{file} is damaged or no steering vector", remedy) from None
