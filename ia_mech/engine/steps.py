"""One generation to decode, and the steps in which rows are decoded together."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ia_mech.engine.intervene import TokenwiseIntervention
from ia_mech.engine.sampling import Draw, draw_tokens, likeliest_tokens
from ia_mech.engine.state import Prefilled, State, expand, forward


@dataclass(frozen=True)
class Row:
    """One generation to decode.

    Attributes:
        context: the number of its context, counted through all groups.
        temperature: 0 for greedy.
        stream: key of its noise, from :func:`ia_mech.engine.sampling.stream_key`; unused if greedy.
        steered: changes made at every token of the turn; position 0 stands for all of them.
        drawn: how many of its first tokens are sampled at its temperature; the rest is greedy. None
            for all.
        first: which of the likeliest tokens is its first, from 0; None if that is drawn.
    """

    context: int
    temperature: float
    stream: tuple[int, int]
    steered: tuple[TokenwiseIntervention, ...] = ()
    drawn: int | None = None
    first: int | None = None

    @property
    def most_drawn(self) -> int:
        """``drawn`` as a number."""
        return sys.maxsize if self.drawn is None else self.drawn


class Steps:
    """The steps of one decoding. These do for any model, rows and device.

    Args:
        model, groups, rows: as for ``decode.decode``.
        places: most rows at once.
        room: most tokens that are fed to a row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Sequence[Prefilled],
        rows: Sequence[Row],
        places: int,
        room: int,
    ) -> None:
        self._model, self._groups, self._rows = model, groups, rows
        self._places, self._room = places, room
        self._firsts = torch.cat([group.logits for group in groups])
        self._device = device = self._firsts.device
        self._temperatures = torch.tensor([row.temperature for row in rows], device=device)
        self._streams = torch.tensor([row.stream for row in rows], device=device)
        self._drawn = torch.tensor([row.most_drawn for row in rows], device=device)
        self._batch: list[int] = []
        self._state: State | None = None
        self._logits = self._firsts[:0]

    def draw(self, batch: list[int], length: np.ndarray) -> Draw:
        """The next token of each row.

        Args:
            batch: the rows in the order that :meth:`forward` left them in, and behind them those
                that join.
            length: how many tokens each has drawn before.
        """
        if begun := batch[len(self._logits) :]:
            firsts = self._firsts[[self._rows[row].context for row in begun]]
            self._logits = torch.cat([self._logits, firsts])
        at = torch.tensor(batch, device=self._device)
        step = torch.from_numpy(length).to(self._device)
        temperature = self._temperatures[at].where(step < self._drawn[at], 0.0)
        draws = draw_tokens(self._logits, temperature, self._streams[at], step[:, None])
        self._take_named(draws, batch, len(batch) - len(begun))
        self._batch, self._token = batch, draws.token
        return draws

    def _take_named(self, draws: Draw, batch: list[int], begun: int) -> None:
        """Of rows that begin, those of the batch from ``begun`` on, take the first tokens that they
        name by rank instead of the drawn ones."""
        at = [at for at in range(begun, len(batch)) if self._rows[batch[at]].first is not None]
        if at:
            rows = [self._rows[batch[one]] for one in at]
            contexts, where = np.unique([row.context for row in rows], return_inverse=True)
            nth = torch.tensor([row.first for row in rows], device=self._device)
            taken = likeliest_tokens(
                self._firsts[torch.from_numpy(contexts)],
                torch.from_numpy(where).to(self._device),
                nth,
                self._temperatures[[batch[one] for one in at]],
            )
            for one, values in zip(vars(draws).values(), vars(taken).values(), strict=True):
                one[at] = values

    def forward(self, staying: list[int]) -> list[int]:
        """Feed the sampled tokens to the rows that stay; the others are dropped.

        Args:
            staying: indices into the batch.

        Returns:
            The same indices, in the order in which the rows are from now on.
        """
        state = self._state
        there = 0 if state is None else state.rows
        kept = [at for at in staying if at < there]
        begun = staying[len(kept) :]
        if state is not None and 0 < len(kept) < there:
            kept = state.drop({*range(there)} - {*kept})
        order = kept + begun
        self._state = state = state if kept else None  # frees its memory for the next one
        if not order:
            self._logits = self._firsts[:0]
            return order
        rows = [self._rows[self._batch[at]] for at in order]
        if begun:
            contexts = [row.context for row in rows[len(kept) :]]
            fresh = expand(self._model, self._groups, contexts, self._room, places=self._places)
            if state is None:
                self._state = state = fresh
            else:
                state.join(fresh)
        assert state is not None
        steered = [row.steered for row in rows]
        output = forward(self._model, state, self._token[order, None], interventions=steered)
        self._logits = output.logits[:, -1]
        return order
