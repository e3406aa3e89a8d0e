"""A time limit for code that isn't ours and reads text that nobody controls."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimedOut(BaseException):
    """The limit was reached. Not an ``Exception``: verifiers catch those, and would go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Stop what runs inside after so many seconds of processor time.

    Not of the clock's, so that a busy machine gives the same verdicts. By a signal, which there is
    on POSIX systems and in the main thread; elsewhere nothing is stopped. A profiling timer that is
    set already is put off, not kept.

    Raises:
        TimedOut: the limit was reached.
    """
    if not hasattr(signal, "SIGPROF") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
