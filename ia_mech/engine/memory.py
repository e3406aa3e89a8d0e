"""Go on with half the batch when memory runs out."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ia_mech.errors import UserError
from ia_mech.models import is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")


class Halving:
    """Map a function over slices of a sequence, halving the slice whenever memory runs out.

    The smaller size is kept for what comes after. Halving changes the batches and so, by rounding,
    may change rows whose decision was a near-tie: ``notify`` lets the run record it.

    Args:
        limit: most items per call.
        notify: called with the new size whenever it shrinks.
        outermost: nothing around this could use a smaller batch still; a single item that doesn't
            fit is then an error for the user, and else a ``MemoryError`` for what is around.
    """

    def __init__(
        self,
        limit: int,
        notify: Callable[[int], None] | None = None,
        *,
        outermost: bool = True,
    ) -> None:
        self.limit = limit
        self._notify = notify
        self._outermost = outermost

    def map(
        self, function: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> list[Result]:
        """All results of ``function`` on consecutive slices of ``items``.

        Raises:
            UserError, MemoryError: a single item doesn't fit (see ``outermost``).
        """
        results: list[Result] = []
        while len(results) < len(items):
            group = items[len(results) : len(results) + self.limit]
            try:
                results.extend(function(group))
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block: the traceback would keep the batch's tensors alive.
            self._halve(len(group))
        return results

    def retry(self, function: Callable[[int], Result]) -> Result:
        """The result of ``function``, which is called with the limit until that is small enough.

        Raises:
            UserError, MemoryError: as for :meth:`map`.
        """
        while True:
            try:
                return function(self.limit)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            self._halve(self.limit)

    def _halve(self, size: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if size == 1 and not self._outermost:
            raise MemoryError("a single item doesn't fit")
        if size == 1:
            raise UserError(
                "out of memory with a batch of one",
                "use a smaller model, --dtype bfloat16, or shorter conversations",
            )
        self.limit = size // 2
        if self._notify is not None:
            self._notify(self.limit)
