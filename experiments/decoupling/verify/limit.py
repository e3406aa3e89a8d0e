"""A time limit for code that isn't ours and reads text that nobody controls."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimedOut(BaseException):
    """The limit was reached. Not an ``Exception``: verifiers catch those, and would go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Stop what runs inside after so many seconds.

    By an alarm signal, which there is on POSIX systems and in the main thread; elsewhere nothing
    is stopped. An alarm that is set already is put off, not kept.

    Raises:
        TimedOut: the limit was reached.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
