"""A recurrent cache layer of fixed addresses: each line's own state, which every step overwrites.

``transformers`` updates such states in place already. What is added here is a batch whose first
lines alone take part in a step, and rows that begin in some of them.
"""

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ia_mech.engine.cuda.layer import View
from ia_mech.engine.cuda.sizes import Sizes, states_of
from ia_mech.engine.prefill import CacheLayer


class StaticRecurrentLayer(LinearAttentionLayer):
    """Buffers of one layer; ``conv_states`` and ``recurrent_states`` are their first lines.

    Args:
        layer: a prefilled layer, whose states say shapes, dtype and device.
        sizes: of the batch.

    Attributes:
        states: ``[lines, …]``, named as by :func:`ia_mech.engine.cuda.sizes.states_of`.
    """

    def __init__(self, layer: LinearAttentionLayer, sizes: Sizes) -> None:
        super().__init__(layer.number_of_states)
        self.dtype, self.device = layer.dtype, layer.device
        # What else there is to know of a layer that has been prefilled.
        for name in (
            "is_conv_states_initialized",
            "is_recurrent_states_initialized",
            "has_previous_state",
            "conv_kernel_size",
        ):
            setattr(self, name, dict(getattr(layer, name)))
        self._aside: dict[tuple, Tensor] | None = None
        self.states = {
            name: state.new_zeros(sizes.lines, *state.shape[1:])
            for name, state in states_of(layer).items()
        }
        self._show(sizes.lines)

    def _show(self, lines: int) -> None:
        for (kind, number), buffer in self.states.items():
            shown = buffer[:lines]
            if self._aside is not None:
                name = kind, number, *shown.shape
                if name not in self._aside:
                    self._aside[name] = torch.zeros_like(shown)
                shown = self._aside[name]
            getattr(self, kind)[number] = shown

    def step_aside(self, scratch: dict[tuple, Tensor] | None) -> None:
        """From the next ``look`` on steps read and write ``scratch``, which is filled as needed,
        instead of the lines' states; None ends that. Layers may share it, where their numbers don't
        matter: the states of a large batch don't fit into memory twice."""
        self._aside = scratch

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return list(self.states.values())

    def forget_rows(self) -> None:
        """Lines are as in a new batch."""
        for tensor in self.tensors():
            tensor.zero_()

    def look(self, view: View) -> None:
        """What follows is a step of this view's bucket."""
        self._show(view.sizes.lines)

    def begin(self, lines: Tensor, layer: CacheLayer, contexts: Tensor) -> None:
        """Rows of a prefill's contexts ``[rows]`` int64 begin in ``lines`` ``[rows]`` int64."""
        for name, state in states_of(layer).items():
            self.states[name][lines] = state[contexts]

    def put_prefixes(
        self, slots: Tensor, layer: CacheLayer, contexts: Tensor, padding: Tensor
    ) -> None:
        """Nothing: a state is copied where a row begins, and nobody reads it elsewhere."""

    def move_prefix(self, start: int, to: int) -> None:
        """Nothing, likewise."""

    def keep(self, index: Tensor) -> None:
        """The lines ``index`` ``[kept]`` int64 become the first ones, in place."""
        for buffer in self.states.values():
            buffer[: len(index)] = buffer[index]
