"""Which context's prefix is in which slot, and which seat of it each line has.

All lines of a context ask its keys in one matrix product, so their queries are brought together: a
slot has so many seats, each seat names a line. Which lines these are changes only while the host is
asked, so the tables are made here, in plain Python, and copied to the device.
"""

from collections.abc import Sequence

import numpy as np

from ia_mech.engine.cuda.sizes import Sizes


class Seating:
    """The slots of a batch.

    Args:
        slots: how many there are.

    Attributes:
        slot: of each context that is held, the slot of its prefix.
    """

    def __init__(self, slots: int) -> None:
        self.slot: dict[int, int] = {}
        self._slots = slots

    @property
    def free(self) -> int:
        """How many contexts more could be held."""
        return self._slots - len(self.slot)

    def keep(self, contexts: set[int]) -> None:
        """Nobody needs other contexts than these any more."""
        self.slot = {context: slot for context, slot in self.slot.items() if context in contexts}

    def hold(self, context: int) -> int:
        """The lowest free slot, which is this context's from now on."""
        self.slot[context] = self._lowest()
        return self.slot[context]

    def squeeze(self, slots: int) -> list[tuple[int, int]]:
        """Contexts move to the first ``slots`` slots; returns from where to where."""
        moves = []
        for context, slot in self.slot.items():
            if slot >= slots:
                moves.append((slot, self._lowest()))
                self.slot[context] = moves[-1][1]
        return moves

    def _lowest(self) -> int:
        taken = set(self.slot.values())
        return next(slot for slot in range(self._slots) if slot not in taken)

    def tables(self, contexts: Sequence[int | None], sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        """Who sits where.

        Args:
            contexts: of each line, None if it is idle.
            sizes: of the bucket.

        Returns:
            The line in each seat ``[slots, seats]`` (an empty one names line 0, and nobody reads
            what that gives), and the seat of each line ``[lines]``, counted through all slots
            (0 for an idle one). Both int64.
        """
        line_at = np.zeros((sizes.slots, sizes.seats), dtype=np.int64)
        seat_of = np.zeros(sizes.lines, dtype=np.int64)
        taken = [0] * sizes.slots
        for line, context in enumerate(contexts):
            if context is not None:
                slot = self.slot[context]
                line_at[slot, taken[slot]] = line
                seat_of[line] = slot * sizes.seats + taken[slot]
                taken[slot] += 1
        return line_at, seat_of
