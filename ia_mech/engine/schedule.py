"""Which row is decoded in which line of the batch, and when.

Pure bookkeeping: what happens depends on the rows, the width and on which rows finish, so that the
same run forms the same batches again. Rows wait in order; those that finish give their line to the
next ones; when nobody waits any more, or may join, the batch is compacted.
"""

from collections.abc import Sequence

COMPACT_BELOW = 0.875  # a batch that nobody joins is compacted at this share of busy lines


class Schedule:
    """A batch of at most ``width`` lines, through which rows go.

    Args:
        rows: how many; they are taken in order.
        width: most lines.

    Attributes:
        lines: of each line the row it holds, -1 for one that is idle.
        age: of each line, how many tokens its row has drawn.
        waiting: the rows that haven't been taken.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.lines: list[int] = []
        self.age: list[int] = []
        self.waiting = range(rows)
        self._width = width

    @property
    def busy(self) -> list[int]:
        """The lines that hold a row."""
        return [line for line, row in enumerate(self.lines) if row >= 0]

    @property
    def free(self) -> int:
        """How many rows could be placed."""
        return self._width - len(self.busy)

    def take(self, most: int) -> list[int]:
        """The next rows, ``most`` of them at most. They wait no more."""
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return list(taken)

    def place(self, rows: Sequence[int]) -> list[int]:
        """Rows of one drawn token get a line each: idle ones first, then new ones."""
        idle = [line for line, row in enumerate(self.lines) if row < 0]
        lines = idle[: len(rows)]
        for line, row in zip(lines, rows, strict=False):
            self.lines[line], self.age[line] = row, 1
        added = rows[len(lines) :]
        lines += range(len(self.lines), len(self.lines) + len(added))
        self.lines += added
        self.age += [1] * len(added)
        return lines

    def drawn(self, finished: Sequence[int], steps: int = 1) -> None:
        """Every busy line drew so many tokens; rows in the given lines ended with one of them."""
        for line in self.busy:
            self.age[line] += steps
        for line in finished:
            self.lines[line] = -1
        if not self.busy:
            self.lines, self.age = [], []

    def compact(self, joined: bool = True) -> list[int] | None:
        """The lines to keep, if it's time to keep no others; they are then counted anew.

        Args:
            joined: whether waiting rows may take idle lines.
        """
        busy, wanted = self.busy, joined and self.waiting
        if wanted or not busy or len(busy) > COMPACT_BELOW * len(self.lines):
            return None
        self.keep(busy)
        return busy

    def keep(self, lines: Sequence[int]) -> None:
        """Only these lines, which are then counted anew."""
        self.lines = [self.lines[line] for line in lines]
        self.age = [self.age[line] for line in lines]
