"""The sampling loop over static buffers: as ``engine/loop.py``, a few steps at a time.

Rows that end are noticed after up to ``STEPS`` steps, from the tokens; what their lines wrote after
the end is thrown away. Then others begin in their place. When nobody waits any more the batch moves
to the smallest bucket that holds it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.cuda.stepper import FIELDS, STEPS, Stepper, stepper_for
from ia_mech.engine.loop import Decoded, Stream
from ia_mech.engine.prefix import Prefilled
from ia_mech.sampling import Draw


class StaticStream(Stream):
    """The work of one :func:`ia_mech.engine.loop.decode_stream` on static buffers.

    Args:
        longest: tokens of the longest context of all groups.
        arguments: as for :class:`ia_mech.engine.loop.Stream`.
    """

    def __init__(self, longest: int, *arguments) -> None:
        super().__init__(*arguments)
        contexts = [row.context for row in self._rows]
        self._sizes = Sizes.of(contexts, self._width, longest, self._most)
        self._seating = Seating(self._sizes.slots)
        self._stepper: Stepper | None = None

    def run(self) -> list[Decoded]:
        """Decode all rows."""
        schedule = self._schedule
        while True:
            self._fill()
            if not schedule.busy:
                return self._record.rows(self._stops)
            self._move()
            sizes = self._sizes.bucket(len(schedule.lines))
            self._stepper.seat(*self._seating.tables(self._held(), sizes))
            left = max(self._most - schedule.age[line] for line in schedule.busy)
            self._note(self._stepper.run(sizes.lines, min(STEPS, left)).numpy())
            self._seating.keep({context for context in self._held() if context is not None})

    def _held(self) -> list[int | None]:
        """Of each line the context, None if it is idle."""
        return [None if row < 0 else self._rows[row].context for row in self._schedule.lines]

    def _fill(self) -> None:
        """Rows begin until no line or no slot is free, or nobody waits."""
        schedule = self._schedule
        while schedule.waiting and schedule.free:
            first = self._rows[schedule.waiting[0]].context
            if first not in self._seating.slot and not self._seating.free:
                break
            group = self._group_of(first)
            rows, token = self._draw_first(group, self._reach())
            if not rows:
                continue
            if self._stepper is None:
                self._stepper = stepper_for(self._model, self._sizes, group)
            contexts = [self._rows[row].context for row in rows]
            slots = [self._slot_of(context, group) for context in contexts]
            lines = schedule.place(rows)
            self._stepper.begin(
                lines,
                slots,
                token,
                self._temperature[rows],
                self._keys[rows],
                group,
                [context - self._first for context in contexts],
            )

    def _reach(self) -> int:
        """Rows of contexts before this one may begin: of those there is a group and a slot."""
        new: set[int] = set()
        for row in self._schedule.waiting:
            context = self._rows[row].context
            if context >= self._end:
                break
            if context not in self._seating.slot:
                new.add(context)
            if len(new) > self._seating.free:
                return context
        return self._end

    def _slot_of(self, context: int, group: Prefilled) -> int:
        if context not in self._seating.slot:
            slot = self._seating.hold(context)
            self._stepper.put_context(slot, group, context - self._first)
        return self._seating.slot[context]

    def _move(self) -> None:
        """When nobody waits any more, lines that are busy move to a smaller bucket if they fit."""
        busy = self._schedule.busy
        smaller = self._sizes.bucket(len(busy))
        if self._schedule.waiting or smaller == self._sizes.bucket(len(self._schedule.lines)):
            return
        self._schedule.keep(busy)
        self._stepper.keep(busy, self._seating.squeeze(smaller.slots))

    def _note(self, drawn: np.ndarray) -> None:
        """Record what ``[steps, 5, bucket]`` was drawn; rows that ended leave their lines."""
        schedule, steps = self._schedule, len(drawn)
        rows, ages = np.array(schedule.lines), np.array(schedule.age)
        drawn = drawn[:, :, : len(rows)]
        tokens = drawn[:, FIELDS.index("token")].astype(np.int64)
        kept, ended = resolve(tokens, ages, sorted(self._stops), self._most)
        kept[rows < 0], ended[rows < 0] = 0, False
        for step in range(steps):
            fields = {name: torch.from_numpy(drawn[step, at]) for at, name in enumerate(FIELDS)}
            self._record.add(np.where(step < kept, rows, -1), ages + step, Draw(**fields))
        finished = np.flatnonzero(ended).tolist()
        schedule.drawn(finished, steps)
        self._tell(int(kept.sum()), len(finished))


def resolve(
    tokens: np.ndarray, ages: np.ndarray, stop_ids: Sequence[int], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where rows ended among tokens that were drawn without looking.

    Args:
        tokens: ``[steps, lines]``.
        ages: ``[lines]``, how many tokens each row had drawn before.
        stop_ids: tokens that end a row.
        most: tokens that end it as well.

    Returns:
        How many of the tokens belong to each row, ``[lines]`` int64, and which rows ended,
        ``[lines]`` bool.
    """
    number = ages + 1 + np.arange(len(tokens))[:, None]
    last = np.isin(tokens, stop_ids) | (number == most)
    ended = last.any(0)
    return np.where(ended, last.argmax(0) + 1, len(tokens)), ended
