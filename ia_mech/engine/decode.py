"""The sampling loop: draw, drop the rows that finished, let others take their places, go forward.

Rows of several contexts, each at its own temperature, are decoded in one batch. The prefilled state
is never changed: rows go on from a copy of it, or refer to it
(:func:`ia_mech.engine.state.expand`). The same rows always form the same batches, however long a
step takes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ia_mech.engine.intervene import TokenwiseIntervention
from ia_mech.engine.sampling import Draw, draw_tokens
from ia_mech.engine.state import Prefilled, expand, forward

FREED = 4  # rows join once one place in so many is free, since each joining copies states


@dataclass(frozen=True)
class Row:
    """One generation to decode.

    Attributes:
        context: the number of its context, counted through all groups.
        temperature: 0 for greedy.
        stream: key of its noise, from :func:`ia_mech.engine.sampling.stream_key`; unused if greedy.
        steered: changes made at every token of the turn; position 0 stands for all of them.
        drawn: how many of its first tokens are drawn; the rest is greedy. None for all.
    """

    context: int
    temperature: float
    stream: tuple[int, int]
    steered: tuple[TokenwiseIntervention, ...] = ()
    drawn: int | None = None


@dataclass(frozen=True)
class Decoded:
    """What one row wrote. Arrays have one entry per token, the turn-end included if there is one.

    Log-probabilities in nats: ``logprobs_raw`` at T = 1, ``logprobs_tempered`` at the row's own
    temperature (NaN for tokens that weren't drawn). ``ranks`` count from 1; ``margins`` as in
    ``sampling.Draw``.
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
    device, stops = groups[0].logits.device, set(stop_ids)
    record = _Record(len(rows), max_new_tokens)
    places = min(together or len(rows), len(rows))
    waiting = sorted(range(len(rows)), key=lambda row: rows[row].context)
    temperatures = torch.tensor([row.temperature for row in rows], device=device)
    most_drawn = torch.tensor(
        [max_new_tokens if row.drawn is None else row.drawn for row in rows], device=device
    )
    streams = torch.tensor([row.stream for row in rows], device=device)
    firsts = torch.cat([group.logits for group in groups])
    batch: list[int] = []  # the row in each place
    logits, state, changed = firsts[:0], None, False
    while batch or waiting:
        there, free = len(batch), places - len(batch)
        if waiting and free * FREED >= places:
            joining, waiting = waiting[:free], waiting[free:]
            batch += joining
            logits = torch.cat([logits, firsts[[rows[row].context for row in joining]]])
            changed = True
        if changed:
            at = torch.tensor(batch, device=device)
            temperature, stream, drawn = temperatures[at], streams[at], most_drawn[at]
            steps = torch.tensor(record.length[batch], device=device)[:, None]
        now = torch.where(steps[:, 0] < drawn, temperature, 0.0)
        draws = draw_tokens(logits, now, stream, steps)
        tokens = record.add(batch, draws)
        left = (max_new_tokens - record.length[batch]).tolist()
        last = {at for at, token in enumerate(tokens) if token in stops or not left[at]}
        if on_step is not None:
            on_step(len(batch), len(last), sum(left[at] for at in last))
        kept = [at for at in range(there) if at not in last]
        if state is not None and 0 < len(kept) < there:
            kept = state.drop([at for at in range(there) if at in last])
        begun = [at for at in range(there, len(batch)) if at not in last]
        batch, changed = [batch[at] for at in kept + begun], bool(last)
        if not batch:
            logits = firsts[:0]
            continue
        token = draws.token[kept + begun] if changed else draws.token
        state = state if kept else None  # frees its memory for the next one
        if begun:
            fresh = expand(
                model,
                groups,
                [rows[row].context for row in batch[len(kept) :]],
                max_new_tokens - 1,
                places=places,
            )
            if state is None:
                state = fresh
            else:
                state.join(fresh)
        assert state is not None
        steps = steps + 1
        steered = [rows[row].steered for row in batch]
        logits = forward(model, state, token[:, None], interventions=steered).logits[:, -1]
    return record.rows(stops)


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
