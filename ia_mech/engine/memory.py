"""When memory runs out, compute the same again with fewer rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

from ia_mech.errors import UserError, is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")

_share = ContextVar("_share", default=1)  # passes may hold one part in so many of their limits


def allowed(most: int) -> int:
    """How much of the limit ``most`` this thread's passes may use at the moment; at least 1."""
    return max(1, most // _share.get())


@contextmanager
def smaller_passes(share: int) -> Iterator[None]:
    """While it lasts, this thread's passes hold at most one part in ``share`` of their limits."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


class Backoff:
    """Call functions with a limit that is halved whenever memory runs out.

    The smaller limit stays in force. Smaller batches round differently and may change rows whose
    decision was a near-tie: ``notify`` lets the run record that.

    Args:
        notify: called with the new limit whenever it shrinks.
    """

    def __init__(self, limit: int, notify: Callable[[int], None] = lambda limit: None) -> None:
        self.limit = limit
        self._notify = notify

    def retry(self, function: Callable[[int], Result], most: int | None = None) -> Result:
        """Call ``function`` with the limit, halved until memory suffices; returns its result.

        Args:
            function: takes the most items that it may compute together.
            most: how many items there are at all, if that is known.

        Raises:
            UserError: not even one item fits.
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
