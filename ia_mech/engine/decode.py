"""The sampling loop: draw, drop the rows that finished, let others take their places, go forward.

Rows of several contexts, each at its own temperature, are decoded in one batch. The prefilled state
is never changed: rows go on from a copy of it, or refer to it
(:func:`ia_mech.engine.state.expand`). The same rows always form the same batches, however long a
step takes.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from transformers import PreTrainedModel

from ia_mech.engine.installed import installed
from ia_mech.engine.passes import is_hooked_by_others
from ia_mech.engine.sampling import Draw
from ia_mech.engine.state import Prefilled
from ia_mech.engine.steps import Row as Row  # what is decoded
from ia_mech.engine.steps import Steps

INTEGERS = ("token", "rank")
FREED = 4  # rows join once one place in so many is free, since each joining copies states


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


def _stepping(
    model: PreTrainedModel, groups: Sequence[Prefilled], rows: Sequence[Row], places: int, room: int
) -> contextlib.AbstractContextManager["Steps"]:
    changed = any(row.steered for row in rows) or is_hooked_by_others(model)
    if installed(model).engine.captured and not changed:
        from ia_mech.engine import captured  # needs Triton

        return captured.stepping(model, groups, rows, places, room)
    return contextlib.nullcontext(Steps(model, groups, rows, places, room))


class _Record:
    """What each row has drawn so far, as arrays ``[rows, max_new_tokens]`` by the names that
    ``Draw`` has for it."""

    def __init__(self, rows: int, steps: int) -> None:
        self.length = np.zeros(rows, dtype=np.int64)
        self.values = {
            one.name: np.zeros((rows, steps), np.int64 if one.name in INTEGERS else np.float32)
            for one in fields(Draw)
        }

    def add(self, rows: Sequence[int], draws: Draw) -> list[int]:
        """Record the next token of each of these rows; returns the tokens."""
        steps = self.length[rows]
        # One transfer for all: float64 holds both float32 and ids exactly.
        drawn = torch.stack([one.double() for one in vars(draws).values()]).cpu().numpy()
        for mine, values in zip(self.values.values(), drawn, strict=True):
            mine[rows, steps] = values
        self.length[rows] += 1
        return self.values["token"][rows, steps].tolist()

    def rows(self, stops: set[int]) -> list[Decoded]:
        done = []
        for row, length in enumerate(self.length):
            token, raw, tempered, rank, margin = (
                values[row, :length] for values in self.values.values()
            )
            reason = "turn_end" if int(token[-1]) in stops else "length"
            done.append(Decoded(token, raw, tempered, rank, margin, reason))
        return done
