"""The sampling loop: draw, drop the rows that finished, let others take their places, go forward.

Rows of several contexts, each at its own temperature, are decoded in one batch. The prefilled state
is never changed: rows go on from a copy of it, or refer to it
(:func:`ia_mech.engine.state.expand`). The same rows always form the same batches, however long a
step takes.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ia_mech.engine.installed import installed
from ia_mech.engine.intervene import TokenwiseIntervention
from ia_mech.engine.sampling import Draw, draw_tokens
from ia_mech.engine.state import Prefilled, State, expand, forward

FREED = 4  # rows join once one place in so many is free, since each joining copies states


@dataclass(frozen=True)
class Row:
    """One generation to decode.

    Attributes:
        context: the number of its context, counted through all groups.
        temperature: 0 for greedy.
        stream: key of its noise, from :func:`ia_mech.engine.sampling.stream_key`; unused if greedy.
        steered: changes made at every token of the turn; position 0 stands for all of them.
        drawn: how many of its first tokens are drawn at its temperature; the rest is greedy. None
            for all.
    """

    context: int
    temperature: float
    stream: tuple[int, int]
    steered: tuple[TokenwiseIntervention, ...] = ()
    drawn: int | None = None

    @property
    def most_drawn(self) -> int:
        """``drawn`` as a number."""
        return sys.maxsize if self.drawn is None else self.drawn


@dataclass(frozen=True)
class Decoded:
    """What one row wrote. Arrays have one entry per token, the turn-end included if there is one.

    Log-probabilities in nats: ``logprobs_raw`` at T = 1, ``logprobs_tempered`` at the row's own
    temperature (NaN for greedy). ``ranks`` count from 1; ``margins`` as in ``sampling.Draw``.
    """

    token_ids: np.ndarray
    logprobs_raw: np.ndarray
    logprobs_tempered: np.ndarray
    ranks: np.ndarray
    margins: np.ndarray
    finish_reason: str  # "turn_end" or "length"


def decode(
    model: PreTrainedModel,
    groups: Sequence[Prefilled],
    rows: Sequence[Row],
    stop_ids: Collection[int],
    max_new_tokens: int,
    *,
    together: int | None = None,
    on_step: Callable[[int, int, int], None] | None = None,
) -> list[Decoded]:
    """Decode rows to their turn-end or to ``max_new_tokens``, in one batch.

    Args:
        groups: groups of prefilled contexts, in order; left as they are.
        stop_ids: ids that end a row (kept as its last token).
        max_new_tokens: most tokens of a row.
        together: most rows at once; the others wait, in the order of their contexts, until one
            place in :data:`FREED` is free. None for all.
        on_step: called after each step with how many rows drew a token, how many of them ended, and
            how many tokens the ended rows have left unwritten.

    Returns:
        What each row wrote, in the order of ``rows``.
    """
    if not rows:
        return []
    stops, record = set(stop_ids), _Record(len(rows), max_new_tokens)
    places = min(together or len(rows), len(rows))
    waiting = sorted(range(len(rows)), key=lambda row: rows[row].context)
    batch: list[int] = []
    with _stepping(model, groups, rows, places, max_new_tokens - 1) as steps:
        while batch or waiting:
            free = places - len(batch)
            if waiting and free * FREED >= places:
                batch, waiting = batch + waiting[:free], waiting[free:]
            tokens = record.add(batch, steps.draw(batch, record.length[batch]))
            left = (max_new_tokens - record.length[batch]).tolist()
            last = {at for at, token in enumerate(tokens) if token in stops or not left[at]}
            if on_step is not None:
                on_step(len(batch), len(last), sum(left[at] for at in last))
            order = steps.forward([at for at in range(len(batch)) if at not in last])
            batch = [batch[at] for at in order]
    return record.rows(stops)


def captures(model: PreTrainedModel, rows: Sequence[Row]) -> bool:
    """Whether such rows are decoded by captured steps (``captured.py``)."""
    return installed(model).engine.captured and not any(row.steered for row in rows)


def _stepping(
    model: PreTrainedModel, groups: Sequence[Prefilled], rows: Sequence[Row], places: int, room: int
) -> contextlib.AbstractContextManager["Steps"]:
    if captures(model, rows):
        from ia_mech.engine import captured  # needs Triton

        return captured.stepping(model, groups, rows, places, room)
    return contextlib.nullcontext(Steps(model, groups, rows, places, room))


class Steps:
    """The steps of one decoding. These do for any model, rows and device.

    Args:
        model, groups, rows: as for :func:`decode`.
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
        if batch != self._batch:
            self._batch, at = batch, torch.tensor(batch, device=self._device)
            self._step = torch.from_numpy(length).to(self._device)[:, None]
            self._temperature, self._stream = self._temperatures[at], self._streams[at]
            self._last_drawn = self._drawn[at]
        temperature = self._temperature.where(self._step[:, 0] < self._last_drawn, 0.0)
        draws = draw_tokens(self._logits, temperature, self._stream, self._step)
        self._token, self._step = draws.token, self._step + 1
        return draws

    def forward(self, staying: list[int]) -> list[int]:
        """Feed the drawn tokens to the rows that stay; the others are dropped.

        Args:
            staying: indices into the batch.

        Returns:
            The same indices, in the order in which the rows are from now on.
        """
        state, everyone = self._state, len(self._batch)
        there = 0 if state is None else state.rows
        kept = [at for at in staying if at < there]
        begun = staying[len(kept) :]
        if state is not None and 0 < len(kept) < there:
            kept = state.drop([at for at in range(there) if at not in set(kept)])
        order = kept + begun
        self._state = state = state if kept else None  # frees its memory for the next one
        if not order:
            self._logits, self._batch = self._firsts[:0], []
            return order
        token = self._token[order] if len(order) < everyone else self._token
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
        output = forward(self._model, state, token[:, None], interventions=steered)
        self._logits = output.logits[:, -1]
        if len(order) < everyone:
            self._batch = []  # what is known of each row is looked up again
        return order


class _Record:
    """What each row has drawn so far, as arrays ``[rows, max_new_tokens]``."""

    FIELDS = ("token", "logprob", "logprob_tempered", "rank", "margin")

    def __init__(self, rows: int, steps: int) -> None:
        self.length = np.zeros(rows, dtype=np.int64)
        self.values = {
            name: np.zeros(
                (rows, steps), dtype=np.int64 if name in ("token", "rank") else np.float32
            )
            for name in self.FIELDS
        }

    def add(self, rows: Sequence[int], draws: Draw) -> list[int]:
        """Record the next token of each of these rows; returns the tokens."""
        steps = self.length[rows]
        # One transfer for all: float64 holds both float32 and ids exactly.
        drawn = torch.stack([getattr(draws, name).double() for name in self.FIELDS]).cpu().numpy()
        for name, values in zip(self.FIELDS, drawn, strict=True):
            self.values[name][rows, steps] = values
        self.length[rows] += 1
        return self.values["token"][rows, steps].tolist()

    def rows(self, stops: set[int]) -> list[Decoded]:
        done = []
        for row, length in enumerate(self.length):
            token, raw, tempered, rank, margin = (
                self.values[name][row, :length] for name in self.FIELDS
            )
            reason = "turn_end" if int(token[-1]) in stops else "length"
            done.append(Decoded(token, raw, tempered, rank, margin, reason))
        return done
