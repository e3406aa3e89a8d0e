"""The sampling loop: draw, drop the rows that finished, go forward.

Rows of several contexts, each at its own temperature, are decoded in one batch, in which all rows
have the same age. The state of the prefill is never touched; rows go on from a copy of it, or refer
to it (:func:`ia_mech.engine.state.expand`). The same rows form the same batches again, whatever the
time or the machine's load.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ia_mech.engine.intervene import TokenwiseIntervention
from ia_mech.engine.sampling import Draw, sample
from ia_mech.engine.shared import Borrowed
from ia_mech.engine.state import Prefilled, State, expand, forward


@dataclass(frozen=True)
class Row:
    """One generation to decode.

    Attributes:
        context: the number of its context, counted through all groups.
        temperature: 0 for greedy.
        stream: of its noise, from :func:`ia_mech.engine.sampling.stream_key`; unused if greedy.
        steered: takes place at each token of the turn, for which position 0 stands.
        borrowed: keys and values of another context that it attends to.
    """

    context: int
    temperature: float
    stream: tuple[int, int]
    steered: tuple[TokenwiseIntervention, ...] = ()
    borrowed: Borrowed | None = None


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
    on_step: Callable[[int, int, int], None] | None = None,
) -> list[Decoded]:
    """Decode rows to their turn-end or to ``max_new_tokens``, all in one batch.

    Args:
        model: the subject model, installed.
        groups: contexts that were prefilled together, in order; left as they are.
        rows: what to decode, in any order.
        stop_ids: ids that end a row (kept as its last token).
        max_new_tokens: most tokens of a row.
        on_step: called after each step with its number, how many rows drew a token, and how many
            of them ended.

    Returns:
        What each row wrote, in the order of ``rows``.
    """
    if not rows:
        return []
    device, stops = groups[0].logits.device, set(stop_ids)
    record = _Record(len(rows), max_new_tokens)
    batch = sorted(range(len(rows)), key=lambda row: rows[row].context)  # which row is where
    temperatures = torch.tensor([rows[row].temperature for row in batch], device=device)
    streams = torch.tensor([rows[row].stream for row in batch], device=device)
    logits = torch.cat([group.logits for group in groups])[[rows[row].context for row in batch]]
    state: State | None = None
    for step in range(max_new_tokens):
        draws = sample(logits, temperatures, streams, step)
        tokens = record.add(batch, step, draws)
        ended = [at for at, token in enumerate(tokens) if token in stops]
        if step + 1 == max_new_tokens:
            ended = list(range(len(batch)))
        if on_step is not None:
            on_step(step, len(batch), len(ended))
        if len(ended) == len(batch):
            break
        token = draws.token
        if state is None:
            kept = [at for at in range(len(batch)) if at not in set(ended)]
            going = [rows[batch[at]] for at in kept]
            state = expand(
                model,
                groups,
                [row.context for row in going],
                max_new_tokens - 1,
                borrowed=[row.borrowed for row in going],
            )
        elif ended:
            kept = state.drop(ended)
        if ended:
            batch = [batch[at] for at in kept]
            at = torch.tensor(kept, device=device)
            token, temperatures, streams = token[at], temperatures[at], streams[at]
        steered = [rows[row].steered for row in batch]
        logits = forward(model, state, token[:, None], interventions=steered).logits[:, -1]
    return record.rows(stops)


class _Record:
    """What was draws, row by row, as arrays ``[rows, max_new_tokens]``."""

    FIELDS = ("token", "logprob", "logprob_tempered", "rank", "margin")

    def __init__(self, rows: int, steps: int) -> None:
        self.length = np.zeros(rows, dtype=np.int64)
        self.values = {
            name: np.zeros(
                (rows, steps), dtype=np.int64 if name in ("token", "rank") else np.float32
            )
            for name in self.FIELDS
        }

    def add(self, rows: Sequence[int], step: int, draws: Draw) -> list[int]:
        """Note a token for each of these rows; returns the tokens."""
        # In one transfer: float64 holds float32 and ids alike.
        drawn = torch.stack([getattr(draws, name).double() for name in self.FIELDS]).cpu().numpy()
        for name, values in zip(self.FIELDS, drawn, strict=True):
            self.values[name][rows, step] = values
        self.length[rows] = step + 1
        return self.values["token"][rows, step].tolist()

    def rows(self, stops: set[int]) -> list[Decoded]:
        done = []
        for row, length in enumerate(self.length):
            token, raw, tempered, rank, margin = (
                self.values[name][row, :length] for name in self.FIELDS
            )
            reason = "turn_end" if int(token[-1]) in stops else "length"
            done.append(Decoded(token, raw, tempered, rank, margin, reason))
        return done
