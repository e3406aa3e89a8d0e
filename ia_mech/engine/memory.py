"""What to do when memory runs out: the same again with fewer rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

from ia_mech.errors import UserError, is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")

_share = ContextVar("_share", default=1)  # one part in so many of what passes may hold


def allowed(most: int) -> int:
    """Of the most that a pass may hold, what this thread's passes may at the moment; at least 1."""
    return max(1, most // _share.get())


@contextmanager
def smaller_passes(share: int) -> Iterator[None]:
    """Passes of this thread hold one part in ``share`` of what they may."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


class Backoff:
    """Call functions with a limit that is halved whenever memory runs out.

    The smaller limit stays in force. Smaller batches round differently and may change rows whose
    decision was a near-tie: ``notify`` lets the run record it.

    Args:
        notify: called with the new limit whenever it shrinks.
    """

    def __init__(self, limit: int, notify: Callable[[int], None] = lambda limit: None) -> None:
        self.limit = limit
        self._notify = notify

    def retry(self, function: Callable[[int], Result], most: int | None = None) -> Result:
        """The result of ``function``, which is called with the limit until that is small enough.

        Args:
            function: takes the most items that it may compute together.
            most: how many items there are at all, if that is known.

        Raises:
            UserError: it doesn't fit with a limit of one either.
        """
        while True:
            size = self.limit if most is None else min(self.limit, most)
            try:
                return function(size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block: the traceback would keep the batch's tensors alive.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if size == 1:
                raise UserError(
                    "out of memory with a batch of one",
                    "use a smaller model, --dtype bfloat16, or shorter conversations",
                )
            self.limit = size // 2
            self._notify(self.limit)

    def map(
        self, function: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> list[Result]:
        """All results of ``function`` on consecutive slices of ``items``.

        Raises:
            UserError: as for :meth:`retry`.
        """
        results: list[Result] = []
        while rest := items[len(results) :]:

            def of_first(size: int, rest: Sequence[Item] = rest) -> Sequence[Result]:
                return function(rest[:size])

            results.extend(self.retry(of_first, len(rest)))
        return results
