"""The sampling loop over static buffers: as ``engine/loop.py``, but the host is a few steps behind.

While the device makes some steps, the host looks at what those before drew: which rows ended, and
what is recorded of them. What their lines drew after the end is thrown away. Then others begin in
their place. When nobody waits any more the batch moves to the smallest bucket that holds it. What
the device is told depends on what was drawn, never on when it arrived.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ia_mech.engine.cuda.copies import HostCopy
from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.cuda.stepper import FIELDS, STEPS, Stepper, forget, stepper_for
from ia_mech.engine.loop import Decoded, Stream
from ia_mech.engine.prefill import Prefilled
from ia_mech.engine.sampling import Draw


@dataclass(frozen=True)
class Flight:
    """Tokens that rows draw and nobody looked at yet.

    Attributes:
        rows: ``[lines]``, which row each line held, -1 for none.
        ages: ``[lines]``, how many tokens that row had drawn before.
        drawn: ``[steps, 5, lines or more]``.
    """

    rows: np.ndarray
    ages: np.ndarray
    drawn: HostCopy


class StaticStream(Stream):
    """The work of one :func:`ia_mech.engine.decode.decode_stream` on static buffers.

    The schedule counts tokens when they are launched, not when they were seen.

    Args:
        sizes: of the buffers.
        arguments: as for :class:`ia_mech.engine.loop.Stream`.

    Raises:
        ValueError: the rows don't fit into buffers of these sizes.
    """

    def __init__(self, sizes: Sizes, *arguments) -> None:
        super().__init__(*arguments)
        seats = min(self._width, max(Counter(row.context for row in self._rows).values()))
        if self._width > sizes.lines or seats > sizes.seats or self._most > sizes.own:
            wanted = f"{self._width} rows of {self._most} tokens, {seats} of a context"
            raise ValueError(f"{wanted}, don't fit into {sizes}")
        self._sizes = sizes
        self._seating = Seating(self._sizes.slots)
        self._stepper: Stepper | None = None
        self._ended = np.zeros(len(self._rows), dtype=bool)

    def run(self) -> list[Decoded]:
        """Decode all rows."""
        try:
            return self._run()
        except BaseException:
            forget(self._model)  # a smaller batch may need its memory, and it is left in mid-step
            raise

    def _run(self) -> list[Decoded]:
        behind: list[Flight] = []
        while True:
            ahead = self._fill()
            if self._schedule.busy:
                self._move()
                ahead.append(self._launch())
            for flight in behind:
                self._note(flight)
            if not ahead:
                return self._record.rows(self._stops)
            behind = ahead

    def _launch(self) -> Flight:
        """The next steps of all lines."""
        schedule = self._schedule
        rows, ages = np.array(schedule.slots), np.array(schedule.age)
        sizes = self._sizes.bucket(len(rows))
        self._stepper.seat(*self._seating.tables(self._held(), sizes))
        steps = min(STEPS, self._most - min(schedule.age[line] for line in schedule.busy))
        drawn = self._stepper.run(sizes.lines, steps)
        schedule.drawn([line for line in schedule.busy if ages[line] + steps >= self._most], steps)
        self._forget()
        return Flight(rows, ages, drawn)

    def _held(self) -> list[int | None]:
        """Of each line the context, None if it is idle."""
        return [None if row < 0 else self._rows[row].context for row in self._schedule.slots]

    def _forget(self) -> None:
        """Contexts that no line continues leave their slots."""
        self._seating.keep({context for context in self._held() if context is not None})

    def _fill(self) -> list[Flight]:
        """Rows begin until no line or no slot is free, or nobody waits."""
        schedule, begun = self._schedule, []
        while schedule.waiting and schedule.free:
            first = self._rows[schedule.waiting[0]].context
            if first not in self._seating.slot and not self._seating.free:
                break
            begun.append(self._begin_rows(self._group_of(first)))
        return begun

    def _begin_rows(self, group: Prefilled) -> Flight:
        """As many of the group's rows as there are lines and slots for draw their first token."""
        schedule, reach = self._schedule, self._reach()
        here = [row for row in schedule.waiting if self._rows[row].context < reach]
        rows = schedule.take(min(schedule.free, len(here)))
        if self._stepper is None:
            self._stepper = stepper_for(self._model, self._sizes, group)
        contexts = [self._rows[row].context for row in rows]
        self._hold([c for c in dict.fromkeys(contexts) if c not in self._seating.slot], group)
        slots = [self._seating.slot[context] for context in contexts]
        index = torch.tensor(contexts) - self._first
        lines = schedule.place(rows)
        drawn = self._stepper.begin(
            lines, slots, group, index, self._temperature[rows], self._keys[rows]
        )
        if self._most == 1:
            schedule.drawn(lines, 0)
            self._forget()
        return Flight(np.array(rows), np.zeros(len(rows), dtype=np.int64), drawn)

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

    def _hold(self, contexts: list[int], group: Prefilled) -> None:
        """These contexts of the group get slots."""
        tokens, room = group.state.mask.shape[1], self._sizes.prefix
        if tokens > room:
            raise ValueError(f"a context of {tokens} tokens, where room was made for {room}")
        if contexts:
            slots = [self._seating.hold(context) for context in contexts]
            self._stepper.put_contexts(slots, group, [c - self._first for c in contexts])

    def _move(self) -> None:
        """When nobody waits any more, lines that are busy move to a smaller bucket if they fit."""
        busy = self._schedule.busy
        smaller = self._sizes.bucket(len(busy))
        if self._schedule.waiting or smaller == self._sizes.bucket(len(self._schedule.slots)):
            return
        self._schedule.keep(busy)
        self._stepper.keep(busy, self._seating.squeeze(smaller.slots))

    def _note(self, flight: Flight) -> None:
        """Record what was drawn; rows that ended leave their lines."""
        rows = np.where(self._ended[flight.rows], -1, flight.rows)  # and -1 stays what it is
        drawn = flight.drawn.wait().numpy()[:, :, : len(rows)]
        tokens = drawn[:, FIELDS.index("token")].astype(np.int64)
        kept, ended = resolve(tokens, flight.ages, sorted(self._stops), self._most)
        kept[rows < 0], ended[rows < 0] = 0, False
        for step in range(len(drawn)):
            fields = {name: torch.from_numpy(drawn[step, at]) for at, name in enumerate(FIELDS)}
            self._record.add(np.where(step < kept, rows, -1), flight.ages + step, Draw(**fields))
        over = rows[ended]
        self._ended[over] = True
        line_of = {row: line for line, row in enumerate(self._schedule.slots)}
        self._schedule.drawn([line_of[row] for row in over.tolist() if row in line_of], 0)
        self._forget()
        self._report(int(kept.sum()), (flight.ages + kept)[ended].tolist())


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
