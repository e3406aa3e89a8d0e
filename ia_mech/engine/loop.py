"""The sampling loop: prefill once, expand to rows, decode, sample, and refill the batch.

Read :meth:`Stream.run` first. Rows of several contexts, each at its own temperature, are decoded in
one batch of slots. A row that finishes frees its slot for another; the state of the prefill is
never touched, only copies of it (or layers that refer to it) advance.

Everything here depends on the rows, the width and on which rows finish, so the same run forms the
same batches again.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.engine.cuda import fused
from ia_mech.engine.intervention import Steered, intervene
from ia_mech.engine.prefill import Prefilled, State, can_join, expand, forward, join, put_rows
from ia_mech.engine.sampling import Draw, draw, gumbel
from ia_mech.models import parallel

CPU_LOGITS = 400_000  # logits sampled at a time on a CPU, so that temporary tensors stay in cache
COMPACT_BELOW = 0.875  # a batch that no row joins is compacted at this share of busy slots


@dataclass(frozen=True)
class Row:
    """One generation to decode: which context of the group, at which temperature, which noise.

    ``steered`` takes place at each token of the turn, for which position 0 stands.
    """

    context: int
    temperature: float
    stream: tuple[int, int]  # sampling.stream_key(...); unused by greedy rows
    steered: tuple[Steered, ...] = ()


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


class Stream:
    """The work of one :func:`ia_mech.engine.decode.decode_stream`, step by step.

    Arguments as there, except that ``rows`` are in the order of their contexts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Iterable[Prefilled],
        rows: Sequence[Row],
        stop_ids: Collection[int],
        max_new_tokens: int,
        width: int,
        on_step: Callable[[int, list[int]], None] | None,
        share: bool,
    ) -> None:
        self._model, self._groups, self._rows = model, iter(groups), rows
        self._stops, self._most = set(stop_ids), max_new_tokens
        self._width, self._on_step, self._share = min(width, len(rows)), on_step, share
        self._schedule = Schedule(len(rows), self._width)
        self._record = _Record(len(rows), max_new_tokens)
        self._temperature = torch.tensor([row.temperature for row in rows])
        self._keys = torch.tensor([row.stream for row in rows]).view(-1, 2)
        self._group: Prefilled | None = None
        self._first = self._end = 0  # numbers of the group's contexts
        self._state: State | None = None

    def run(self) -> list[Decoded]:
        """Decode all rows."""
        schedule = self._schedule
        token = torch.zeros(0, dtype=torch.long)  # [slots], the newest of each
        while True:
            token = self._refill(token)  # prefill, expand
            if self._state is None:
                return self._record.rows(self._stops)
            keep = schedule.compact(can_join(self._state))
            if keep is not None:
                token = token[keep]
                self._state.keep(torch.tensor(keep, device=token.device))
            each = [self._rows[row].steered if row >= 0 else () for row in schedule.slots]
            with intervene(self._model, each):
                logits = decode_step(self._model, self._state, token)
            busy = len(schedule.busy)
            token, finished = self._sample(logits, schedule.slots, schedule.age)
            lengths = [schedule.age[slot] + 1 for slot in finished]
            schedule.drawn(finished)
            self._report(busy, lengths)
            if schedule.busy:
                self._state.retire(finished)
            else:
                self._state = None

    def _refill(self, token: Tensor) -> Tensor:
        """Start rows until no slot is free or none waits; returns the newest token per slot."""
        schedule = self._schedule
        while schedule.waiting and schedule.free:
            if self._state is not None and not can_join(self._state):
                break
            group = None  # release it before the next one is made
            group = self._group_of(self._rows[schedule.waiting[0]].context)
            rows, first = self._sample_first(group)
            if not rows:
                continue
            context = [self._rows[row].context for row in rows]
            index = torch.tensor(context, device=first.device) - self._first
            slots = schedule.place(rows)
            if self._state is None:
                self._state = expand(
                    group.state,
                    index,
                    capacity=self._most,
                    share=self._share,
                    max_rows=self._width,
                    numbers=context,
                )
                token = first
            else:
                join(self._state, slots, group.state, index, context)
                at = torch.tensor(slots, device=token.device)
                token = put_rows(token, first, at, self._state.rows)
        return token

    def _group_of(self, context: int) -> Prefilled:
        while self._group is None or context >= self._end:
            self._group = None
            self._group = next(self._groups)
            self._first, self._end = self._end, self._end + len(self._group.logits)
        return self._group

    def _sample_first(self, group: Prefilled) -> tuple[list[int], Tensor]:
        """Sample the first tokens of the group's next rows, from the prefill's logits.

        Returns:
            As many rows as there are free slots, of those that don't end with their first token,
            and these tokens.
        """
        schedule = self._schedule
        going: list[int] = []
        first: list[Tensor] = []
        while len(going) < schedule.free:
            left = [r for r in schedule.waiting if self._rows[r].context < self._end]
            rows = schedule.take(min(schedule.free - len(going), len(left)))
            if not rows:
                break
            index = torch.tensor([self._rows[row].context for row in rows]) - self._first
            logits = group.logits[index.to(group.logits.device)]
            token, finished = self._sample(logits, rows, [0] * len(rows))
            self._report(len(rows), [1] * len(finished))
            on = [at for at in range(len(rows)) if at not in finished]
            going += [rows[at] for at in on]
            first.append(token[on])
        return going, torch.cat(first)

    def _sample(
        self, logits: Tensor, rows: Sequence[int], ages: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Sample and record a token for each row (-1 for none) that has ``ages`` tokens.

        Returns:
            The tokens ``[rows]``, and the indices of those that are their rows' last.
        """
        row, age = torch.tensor(rows), torch.tensor(ages)
        # An idle slot is sampled greedily, which takes no noise.
        temperature = torch.where(row < 0, 0.0, self._temperature[row])
        device = logits.device
        drawn = sample(logits, temperature.to(device), self._keys[row].to(device), age.to(device))
        drawn = replace(drawn, token=parallel.tokens_of_first(drawn.token))
        self._record.add(row.numpy(), age.numpy(), drawn)
        tokens = drawn.token.tolist()
        finished = [
            at
            for at, (row, age) in enumerate(zip(rows, ages, strict=True))
            if row >= 0 and (tokens[at] in self._stops or age + 1 == self._most)
        ]
        return drawn.token, finished

    def _report(self, tokens: int, lengths: list[int]) -> None:
        if self._on_step is not None:
            self._on_step(tokens, lengths)


def decode_step(model: PreTrainedModel, state: State, token: Tensor) -> Tensor:
    """Append one token to every row; returns the next raw logits ``[rows, vocab]`` (float32)."""
    return forward(model, state, token[:, None], torch.ones_like(token)[:, None])[:, -1]


def sample(logits: Tensor, temperature: Tensor, stream: Tensor, step: Tensor) -> Draw:
    """Draw one token per row; noise is made once per stream and step that a non-greedy row uses.

    Args:
        logits: ``[rows, vocab]`` float32.
        temperature: ``[rows]``, 0 for greedy.
        stream: ``[rows, 2]`` int64 Philox keys.
        step: ``[rows]`` int64, index of the token within its row.
    """
    if fused.available(logits.device):
        return fused.draw(logits, temperature, stream, step)
    vocab = logits.shape[-1]
    noise_row = torch.zeros(len(temperature), dtype=torch.long, device=logits.device)
    sampled = (temperature > 0).nonzero()[:, 0]
    used = torch.cat([stream, step[:, None]], dim=-1)[sampled]
    used, noise_row[sampled] = torch.unique(used, dim=0, return_inverse=True)
    noise = torch.empty(len(used), vocab, device=logits.device)
    for part in cpu_slices(len(used), vocab, logits.device):
        noise[part] = gumbel(used[part, :2], used[part, 2:], vocab)
    parts = [
        draw(logits[part], temperature[part], noise, noise_row[part])
        for part in cpu_slices(len(temperature), vocab, logits.device)
    ]
    names = [field.name for field in fields(Draw)]
    return Draw(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def cpu_slices(count: int, width: int, device: torch.device) -> list[slice]:
    """Slices of ``count`` rows, of :data:`CPU_LOGITS` numbers each on a CPU; else a single one."""
    size = max(1, CPU_LOGITS // width) if device.type == "cpu" else max(1, count)
    return [slice(start, start + size) for start in range(0, count, size)]


class Schedule:
    """Which row is decoded in which batch slot, and when.

    Rows wait in order; those that finish free their slots for the next ones; when none waits any
    more, or none may join, the batch is compacted.

    Args:
        rows: how many; they are taken in order.
        width: most slots.

    Attributes:
        slots: the row in each slot, -1 for an idle one.
        age: how many tokens the row in each slot has drawn.
        waiting: the rows that haven't been taken.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.slots: list[int] = []
        self.age: list[int] = []
        self.waiting = range(rows)
        self._width = width

    @property
    def busy(self) -> list[int]:
        """The slots that hold a row."""
        return [slot for slot, row in enumerate(self.slots) if row >= 0]

    @property
    def free(self) -> int:
        """How many rows could be placed."""
        return self._width - len(self.busy)

    def take(self, most: int) -> list[int]:
        """Remove up to ``most`` rows from those that wait."""
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return list(taken)

    def place(self, rows: Sequence[int]) -> list[int]:
        """Give each row, of one drawn token, a slot: idle ones first, then new ones."""
        idle = [slot for slot, row in enumerate(self.slots) if row < 0]
        slots = idle[: len(rows)]
        for slot, row in zip(slots, rows, strict=False):
            self.slots[slot], self.age[slot] = row, 1
        added = rows[len(slots) :]
        slots += range(len(self.slots), len(self.slots) + len(added))
        self.slots += added
        self.age += [1] * len(added)
        return slots

    def drawn(self, finished: Sequence[int], steps: int = 1) -> None:
        """Every busy slot drew ``steps`` tokens; the rows in the slots ``finished`` ended."""
        for slot in self.busy:
            self.age[slot] += steps
        for slot in finished:
            self.slots[slot] = -1
        if not self.busy:
            self.slots, self.age = [], []

    def compact(self, can_join: bool = True) -> list[int] | None:
        """The slots to keep, if it is time to drop the others; they are then numbered anew.

        Args:
            can_join: whether waiting rows may take idle slots.
        """
        busy, wanted = self.busy, can_join and self.waiting
        if wanted or not busy or len(busy) > COMPACT_BELOW * len(self.slots):
            return None
        self.keep(busy)
        return busy

    def keep(self, slots: Sequence[int]) -> None:
        """Drop all other slots; these are then numbered anew."""
        self.slots = [self.slots[slot] for slot in slots]
        self.age = [self.age[slot] for slot in slots]


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

    def add(self, rows: np.ndarray, ages: np.ndarray, drawn: Draw) -> None:
        """Append a token to each row that isn't -1 and has ``ages`` tokens."""
        real = rows >= 0
        rows, ages = rows[real], ages[real]
        for name in self.FIELDS:
            self.values[name][rows, ages] = getattr(drawn, name).cpu().numpy()[real]
        self.length[rows] = ages + 1

    def rows(self, stop_ids: set[int]) -> list[Decoded]:
        done = []
        for row, length in enumerate(self.length):
            token, raw, tempered, rank, margin = (
                self.values[name][row, :length] for name in self.FIELDS
            )
            reason = "turn_end" if int(token[-1]) in stop_ids else "length"
            done.append(Decoded(token, raw, tempered, rank, margin, reason))
        return done
