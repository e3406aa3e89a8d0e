"""Units are written while the next one is computed.

A GPU would wait for the disk otherwise, and for the text of its rows. On a CPU, which would do both
at once no faster, each unit is written before the next one is begun, so that a kill costs no more
than the unit that was being computed.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Does pieces of work in the order they were given, one at a time.

    At most one is under way while its caller goes on, so that no more than two units are in memory.

    Args:
        threaded: in a thread of its own; else each is done before :meth:`do` returns.
    """

    def __init__(self, threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="writer") if threaded else None
        self._last: Future | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Begin this once what was given before it is done.

        Raises:
            Exception: whatever the work before it raised; this one is not begun then.
        """
        if self._pool is None:
            work()
            return
        self.wait()
        self._last = self._pool.submit(work)

    def wait(self) -> None:
        """Until everything is done.

        Raises:
            Exception: whatever the last work raised.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Everything is done, also after an error or Ctrl-C, which is told rather than another."""
        try:
            if kind is None:
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=True)
