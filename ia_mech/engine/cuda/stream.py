"""The sampling loop over static buffers: as ``engine/loop.py``, with the host one step behind.

While the device makes a step, the host looks at what the one before drew: which rows ended, and
what is recorded of them. What their batch slots draw after the end is dropped, and other rows begin
in their place. What is decoded together depends on what was drawn, never on when it arrived.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ia_mech.engine.cuda.layers import Sizes
from ia_mech.engine.cuda.stepper import FIELDS, StaticBuffers, Stepper
from ia_mech.engine.loop import Decoded, Stream
from ia_mech.engine.prefill import Prefilled
from ia_mech.engine.sampling import Draw


class PrefixSlots:
    """Which context's prefix is in which of ``count`` prefix slots.

    Attributes:
        slot: by context, the prefix slot of each that is held.
    """

    def __init__(self, count: int) -> None:
        self.slot: dict[int, int] = {}
        self._count = count

    @property
    def free(self) -> int:
        """How many contexts more could be held."""
        return self._count - len(self.slot)

    def keep(self, contexts: set[int]) -> None:
        """Free the slots of all other contexts."""
        self.slot = {context: slot for context, slot in self.slot.items() if context in contexts}

    def hold(self, context: int) -> int:
        """Give a context the lowest free slot."""
        taken = set(self.slot.values())
        self.slot[context] = next(n for n in range(self._count) if n not in taken)
        return self.slot[context]

    def tables(self, contexts: Sequence[int | None], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        """How queries are brought together by prefix, and their results brought back.

        Args:
            contexts: of each batch slot, None if it is idle.
            sizes: of the part of the buffers that a step uses.

        Returns:
            ``gather`` ``[prefixes * rows]`` int64: the batch slots of each prefix, then zeros,
            whose results are not used. ``scatter`` ``[slots]`` int64: where in ``gather`` each
            batch slot is, 0 for an idle one.
        """
        gather = np.zeros(sizes.prefixes * sizes.rows, dtype=np.int64)
        scatter = np.zeros(sizes.slots, dtype=np.int64)
        taken: Counter[int] = Counter()
        for slot, context in enumerate(contexts):
            if context is not None:
                scatter[slot] = self.slot[context] * sizes.rows + taken[context]
                gather[scatter[slot]] = slot
                taken[context] += 1
        return gather, scatter


@dataclass(frozen=True)
class Pending:
    """Tokens that the host hasn't seen yet."""

    rows: np.ndarray  # [slots], the row of each, -1 for none
    ages: np.ndarray  # [slots], how many tokens that row had drawn before
    drawn: Callable[[], Tensor]  # [fields, slots or more]


class StaticStream(Stream):
    """The work of one :func:`ia_mech.engine.decode.decode_stream` in static buffers.

    The schedule counts tokens when their step is launched, not when they are seen. Arguments are as
    for :class:`ia_mech.engine.loop.Stream`; raises ValueError where rows or a context don't fit.
    """

    def __init__(self, buffers: StaticBuffers, sizes: Sizes, *arguments) -> None:
        super().__init__(*arguments)
        self._buffers, self._sizes = buffers, sizes
        each = min(self._width, max(Counter(row.context for row in self._rows).values()))
        if self._width > sizes.slots or each > sizes.rows or self._most > sizes.own_capacity:
            wanted = f"{self._width} rows of {self._most} tokens, {each} of a context"
            raise ValueError(f"{wanted}, don't fit into {sizes}")
        self._prefixes = PrefixSlots(sizes.prefixes)
        self._stepper: Stepper | None = None
        self._ended = np.zeros(len(self._rows), dtype=bool)
        self._begun = False  # rows began since the tables were made

    def run(self) -> list[Decoded]:
        """Decode all rows."""
        try:
            return self._run()
        except BaseException:
            self._buffers.release()  # a smaller batch may need the memory
            raise

    def _run(self) -> list[Decoded]:
        behind: list[Pending] = []
        while True:
            ahead = self._begin()
            if self._schedule.busy:
                ahead.append(self._step())
            for pending in behind:
                self._note(pending)
            if not ahead:
                return self._record.rows(self._stops)
            behind = ahead

    def _begin(self) -> list[Pending]:
        """Rows begin until no batch slot or no prefix slot is free, or none waits."""
        schedule, begun = self._schedule, []
        while schedule.waiting and schedule.free:
            first = self._rows[schedule.waiting[0]].context
            if first not in self._prefixes.slot and not self._prefixes.free:
                break
            begun.append(self._begin_rows(self._group_of(first)))
        return begun

    def _begin_rows(self, group: Prefilled) -> Pending:
        """The next rows of this group draw their first token, as many as there are slots for."""
        schedule, held = self._schedule, self._prefixes
        rows: list[int] = []
        new: dict[int, None] = {}  # contexts that need a prefix slot, in order
        for row in schedule.waiting[: schedule.free]:
            context = self._rows[row].context
            lacking = context not in held.slot and context not in new
            if context >= self._end or (lacking and len(new) == held.free):
                break
            if lacking:
                new[context] = None
            rows.append(row)
        schedule.take(len(rows))
        if self._stepper is None:
            self._stepper = self._buffers.stepper(self._sizes, group)
        tokens, most = group.state.mask.shape[1], self._sizes.prefix_capacity
        if tokens > most:
            raise ValueError(f"a context of {tokens} tokens doesn't fit into buffers for {most}")
        if new:
            prefixes = [held.hold(context) for context in new]
            self._stepper.put_prefixes(prefixes, group, [c - self._first for c in new])
        contexts = [self._rows[row].context for row in rows]
        slots = schedule.place(rows)
        self._begun = True
        drawn = self._stepper.begin(
            slots,
            [held.slot[context] for context in contexts],
            group,
            torch.tensor(contexts) - self._first,
            self._temperature[rows],
            self._keys[rows],
        )
        if self._most == 1:
            schedule.drawn(slots, 0)
            self._free_prefixes()
        return Pending(np.array(rows), np.zeros(len(rows), dtype=np.int64), drawn)

    def _step(self) -> Pending:
        """The next token of all rows."""
        schedule, stepper, most = self._schedule, self._stepper, self._most
        assert stepper is not None  # a slot is busy, so rows have begun
        kept = schedule.compact()
        if kept is not None:
            stepper.keep(kept)
        part = stepper.part(len(schedule.slots))
        if kept is not None or self._begun:
            stepper.put_tables(*self._prefixes.tables(self._held(), part))
            self._begun = False
        rows, ages = np.array(schedule.slots), np.array(schedule.age)
        drawn = stepper.step(part)
        schedule.drawn([slot for slot in schedule.busy if ages[slot] + 1 == most])
        self._free_prefixes()
        return Pending(rows, ages, drawn)

    def _held(self) -> list[int | None]:
        """Of each batch slot the context, None if it is idle."""
        return [None if row < 0 else self._rows[row].context for row in self._schedule.slots]

    def _free_prefixes(self) -> None:
        """Contexts that no row continues leave their prefix slots."""
        self._prefixes.keep({context for context in self._held() if context is not None})

    def _note(self, pending: Pending) -> None:
        """Record what was drawn; rows that ended leave their batch slots."""
        rows = np.where(self._ended[pending.rows], -1, pending.rows)  # and -1 stays what it is
        drawn = pending.drawn()[:, : len(rows)]
        self._record.add(rows, pending.ages, Draw(**dict(zip(FIELDS, drawn, strict=True))))
        tokens = drawn[FIELDS.index("token")].long().numpy()
        last = np.isin(tokens, sorted(self._stops)) | (pending.ages + 1 == self._most)
        last &= rows >= 0
        over = rows[last]
        self._ended[over] = True
        slot_of = {row: slot for slot, row in enumerate(self._schedule.slots)}
        self._schedule.drawn([slot_of[row] for row in over.tolist() if row in slot_of], 0)
        self._free_prefixes()
        self._report(int((rows >= 0).sum()), (pending.ages[last] + 1).tolist())
