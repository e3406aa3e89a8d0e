"""The sampling loop: prefill once, expand to rows, decode, sample.

Rows of several contexts, each at its own temperature, are decoded in one batch. A finished row
leaves the batch; the state of the prefill is never touched, only what is made of it advances.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.packed import packed_linears
from ia_mech.engine.prefix import Prefilled, State, expand, forward
from ia_mech.sampling import Draw, draw, gumbel

COMPACT_BELOW = 0.875  # the batch is compacted when this share of it, or less, is still decoding
# On a CPU sampling goes over rows and streams in slices of so many numbers, whose tensors stay in
# its cache; a slice of noise is also small enough for PyTorch not to wake its threads at each of
# the 120 integer operations.
CPU_LOGITS, CPU_NOISE = 400_000, 50_000


@dataclass(frozen=True)
class Row:
    """One generation to decode: which context of the group, at which temperature, which noise."""

    context: int
    temperature: float
    stream: tuple[int, int]  # sampling.stream_key(...); unused by greedy rows


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
    prefilled: Prefilled,
    rows: Sequence[Row],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    on_step: Callable[[int, int], None] | None = None,
    share: bool = True,
) -> list[Decoded]:
    """Decode rows to their turn-end or to ``max_new_tokens``.

    Args:
        model: the subject model.
        prefilled: the contexts that the rows continue; left as it is.
        rows: what to decode, in any order.
        stop_ids: ids that end a row (kept as its last token).
        max_new_tokens: most tokens of a row.
        on_step: called after each step with (tokens written, rows finished) in that step.
        share: rows read their context's keys and values where the prefill left them, in layers of
            full attention; else every row gets a copy.
    """
    device = prefilled.logits.device
    context = torch.tensor([row.context for row in rows], device=device)
    temperature = torch.tensor([row.temperature for row in rows], device=device)
    stream = torch.tensor([row.stream for row in rows], device=device).view(-1, 2)
    stops = torch.tensor(list(stop_ids), device=device)
    record = _Record(len(rows), max_new_tokens)

    alive = torch.arange(len(rows), device=device)  # which row each line of the batch is
    running = torch.ones(len(rows), dtype=torch.bool, device=device)  # per line of the batch
    state: State | None = None
    logits = prefilled.logits[context]
    with packed_linears(model):
        for step in range(max_new_tokens):
            drawn = sample(logits, temperature[alive], stream[alive], step)
            record.add(step, alive[running], drawn, running)
            ended = torch.isin(drawn.token, stops) & running
            if on_step is not None:
                last = step + 1 == max_new_tokens
                on_step(int(running.sum()), int(running.sum() if last else ended.sum()))
            running = running & ~ended
            if not running.any() or step + 1 == max_new_tokens:
                break
            token = drawn.token
            if state is None or running.float().mean() <= COMPACT_BELOW:
                keep = running.nonzero()[:, 0]
                alive, token, running = alive[keep], token[keep], running[keep]
                if state is None:
                    index = context[alive]
                    state = expand(prefilled.state, index, room=max_new_tokens, share=share)
                else:
                    state.keep(keep)
            logits = decode_step(model, state, token)
    return record.rows(stops.tolist())


def decode_step(model: PreTrainedModel, state: State, token: Tensor) -> Tensor:
    """Append one token to every row; returns the next raw logits ``[rows, vocab]`` (float32)."""
    return forward(model, state, token[:, None], torch.ones_like(token)[:, None])[:, -1]


def sample(logits: Tensor, temperature: Tensor, stream: Tensor, step: int) -> Draw:
    """Draw one token per row; noise is made once per stream that a non-greedy row uses.

    Args:
        logits: ``[rows, vocab]`` float32.
        temperature: ``[rows]``, 0 for greedy.
        stream: ``[rows, 2]`` int64 Philox keys.
        step: index of the token within its row.
    """
    vocab = logits.shape[-1]
    noise_row = torch.zeros(len(temperature), dtype=torch.long, device=logits.device)
    sampled = (temperature > 0).nonzero()[:, 0]
    keys, noise_row[sampled] = torch.unique(stream[sampled], dim=0, return_inverse=True)
    noise = torch.empty(len(keys), vocab, device=logits.device)
    for part in _slices(len(keys), vocab, CPU_NOISE, logits.device):
        noise[part] = gumbel(keys[part], step, vocab)
    parts = [
        draw(logits[part], temperature[part], noise, noise_row[part])
        for part in _slices(len(temperature), vocab, CPU_LOGITS, logits.device)
    ]
    names = vars(parts[0])
    return Draw(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _slices(count: int, width: int, most: int, device: torch.device) -> list[slice]:
    """Slices of rows of ``width`` numbers, ``most`` numbers each; one slice but on a CPU."""
    size = max(1, most // width) if device.type == "cpu" else max(1, count)
    return [slice(start, start + size) for start in range(0, count, size)]


class _Record:
    """What was drawn, row by row, as arrays ``[rows, max_new_tokens]``."""

    FIELDS = ("token", "logprob", "logprob_tempered", "rank", "margin")

    def __init__(self, rows: int, steps: int) -> None:
        self.length = np.zeros(rows, dtype=np.int64)
        self.values = {
            name: np.zeros(
                (rows, steps), dtype=np.int64 if name in ("token", "rank") else np.float32
            )
            for name in self.FIELDS
        }

    def add(self, step: int, rows: Tensor, drawn: Draw, running: Tensor) -> None:
        rows = rows.cpu().numpy()
        for name in self.FIELDS:
            self.values[name][rows, step] = getattr(drawn, name)[running].cpu().numpy()
        self.length[rows] = step + 1

    def rows(self, stop_ids: list[int]) -> list[Decoded]:
        done = []
        for row, length in enumerate(self.length):
            token, raw, tempered, rank, margin = (
                self.values[name][row, :length] for name in self.FIELDS
            )
            reason = "turn_end" if token[-1] in stop_ids else "length"
            done.append(Decoded(token, raw, tempered, rank, margin, reason))
        return done
