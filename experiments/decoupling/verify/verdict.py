"""What a verifier says of a response.

And a time limit for verifiers, which are not ours and read text of any kind.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Verdict:
    """Whether a response is right, and what that rests on.

    Attributes:
        verifier: ``maths`` or ``instructions``.
        correct: it is; None if that couldn't be told.
        why: in a few words.
        answer: what was read off the response, for maths.
        gold: what it was compared with, for maths.
        instructions: their ids.
        followed: of each instruction, whether the response follows it; None if that couldn't be
            told.
        followed_loosely: the same of the response without its first line, last line or asterisks,
            whichever does best.
    """

    verifier: str
    correct: bool | None
    why: str
    answer: str | None = None
    gold: str | None = None
    instructions: tuple[str, ...] = ()
    followed: tuple[bool | None, ...] = ()
    followed_loosely: tuple[bool | None, ...] = ()

    @property
    def correct_loosely(self) -> bool | None:
        """All instructions are followed loosely; for maths, the same as ``correct``."""
        if not self.instructions or self.correct is None:
            return self.correct
        return all(self.followed_loosely)
