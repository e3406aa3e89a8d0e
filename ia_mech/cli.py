"""What all command lines of the project share: errors in one line, exit statuses."""

import argparse
import atexit
import contextlib
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from ia_mech.errors import UserError, exhaustion

# Bytes of address space, most of which is never used: PyTorch, SciPy and Arrow map 1.5 GB when they
# are loaded, and each thread 0.1 GB.
ADDRESS_SPACE = 4 * 2**30
# Of Arrow and others; and of each of OpenMP, rayon, and OpenBLAS in NumPy and in SciPy.
THREADS, THREADS_PER_PROCESSOR = 16, 4

NOTHING = 3  # the exit status of a command that ended as it should, with nothing usable

# In the help of every command; docs/reliability.md says more.
STATUSES = """\
exit status: 0 done, 1 a bug, 2 bad input, 3 nothing usable, 130 interrupted, 141 output closed
"""


class Parser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its texts and refuses in one line.

    Its help ends with the exit statuses.
    """

    def __init__(self, *args, **options) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options["epilog"] = "\n".join([*options.get("epilog", "").splitlines(), STATUSES])
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        self.exit(2, f"error: {message}; see {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        try:
            sys.stdout.flush()  # --help | head
        except BrokenPipeError:
            status = _closed_pipe()
        super().exit(status, message)


def guarded(body: Callable[[], int | None], interrupted: Callable[[], str]) -> int:
    """Run the body of a command; returns the exit status.

    That is what the body returns, with None for 0; ``NOTHING`` if nothing usable came out. 2: bad
    input, which one line on stderr explains. 130: interrupted, with what ``interrupted()`` says was
    kept. 141: whoever read the output, such as ``head``, has closed it. A bug's exception is passed
    on, and Python ends with 1.
    """
    try:
        status = _status(body, interrupted)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return _closed_pipe()
    except OSError as error:  # what was printed last found no room
        _discard(sys.stdout)
        return refuse(f"the output could not be written ({error.strerror}); write it elsewhere")


def _status(body: Callable[[], int | None], interrupted: Callable[[], str]) -> int:
    def tell() -> int:
        print(f"\ninterrupted; {interrupted()}", file=sys.stderr, flush=True)
        return 130

    with _interrupts(tell) as ctrl_c:
        try:
            _check_limits()
            return body() or 0
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt) as error:
            ctrl_c.over = True
            # Libraries turn an interrupt into errors of their own.
            if ctrl_c.pressed or isinstance(error, KeyboardInterrupt):
                return tell()
            if isinstance(error, UserError):
                return refuse(str(error))
            if lacking := exhaustion(error):
                return refuse(str(lacking))
            if isinstance(error, OSError):
                return refuse(f"{error}; check the path and its disk")
            raise


class _CtrlC:
    """What Ctrl-C does while a command runs: raise ``KeyboardInterrupt`` as usual.

    During an import it ends the process. Modules swallow an exception that is raised while they are
    imported, so that the interrupt is lost, or are left half initialised and crash. Nothing needs
    to be tidied up: what is on the disk is whole after a kill, too.

    Attributes:
        pressed: whether it was.
        over: the command has ended; from now on Ctrl-C does nothing.
    """

    def __init__(self, tell: Callable[[], int]) -> None:
        self.tell = tell  # what was kept; returns the exit status
        self.pressed = self.over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        self.pressed = True
        if _importing(frame):
            self.over = True
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(self.tell())
        raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    """Whether an import is under way in a command."""
    while frame is not None and frame.f_code is not _status.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _check_limits() -> None:
    """Refuse limits under which libraries abort or hang, which no code of ours could report.

    Raises:
        UserError: there is too little address space, or too few threads can be started.
    """
    limit = -1
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < ADDRESS_SPACE:  # negative: none
        raise UserError(
            f"ulimit -v allows {limit / 2**30:.1f} GB of address space, too little for PyTorch and "
            "its threads",
            f"raise it to {ADDRESS_SPACE / 2**30:g} GB or more, or set it to unlimited",
        )
    done, started = threading.Event(), []
    needed = THREADS + THREADS_PER_PROCESSOR * _processors()
    try:
        for _ in range(needed):
            started.append(threading.Thread(target=done.wait, daemon=True))
            started[-1].start()
    except RuntimeError:
        raise UserError(
            f"only {len(started) - 1} of the {needed} threads that libraries need can be started",
            f"raise ulimit -u, or set OMP_NUM_THREADS=1 (then {THREADS + THREADS_PER_PROCESSOR})",
        ) from None
    finally:
        done.set()


def _processors() -> int:
    """How many threads libraries start for their computations."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else os.cpu_count() or 1


@contextlib.contextmanager
def _interrupts(tell: Callable[[], int]) -> Iterator[_CtrlC]:
    """Have Ctrl-C end a command in an orderly way.

    Nothing changes outside the main thread, or where Ctrl-C already does something else.
    """
    ctrl_c = _CtrlC(tell)
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield ctrl_c
        return
    signal.signal(signal.SIGINT, ctrl_c)
    try:
        yield ctrl_c
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.unregister(_end_at_once)
        atexit.register(_end_at_once)


def _end_at_once() -> None:
    """Unloading PyTorch takes seconds; an exception that is raised then has no handler."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _closed_pipe() -> int:
    """The exit status of a program that SIGPIPE ends."""
    _discard(sys.stdout, sys.stderr)
    return 128 + 13


def _discard(*streams: TextIO) -> None:
    """Let what is still buffered go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError):
            os.dup2(nowhere, stream.fileno())


def add_intervals(group: argparse._ArgumentGroup, seed: str) -> None:
    """``--level``, ``--resamples`` and ``--seed``; ``seed`` says what is drawn with it."""
    group.add_argument(
        "--level", type=coverage, default=0.95, help="coverage of intervals (default: 0.95)"
    )
    group.add_argument(
        "--resamples",
        type=whole_from(100, "fewer say nothing"),
        default=2000,
        help="bootstrap samples, where an interval is made from them (default: 2000)",
    )
    group.add_argument("--seed", type=whole_from(0), default=0, help=f"of {seed} (default: 0)")


def coverage(text: str) -> float:
    """The level of an interval, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0 or (1 + value) / 2 >= 1:  # so close to 1 that its quantile is infinite
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1, such as 0.95")
    return value


def whole_from(least: int, why: str = "") -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` up, for argparse; ``why`` explains the limit."""

    def whole(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            reason = f" ({why})" if why else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} up{reason}"
            )
        return int(text)

    return whole


def utf8(given: str) -> str:
    """A text, for argparse; one that no JSON or Parquet file could hold is refused."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{given!r} is not UTF-8") from None
    return given


def named(given: str) -> str:
    """The name of something, for argparse: a UTF-8 text that isn't blank."""
    if not given.strip():
        raise argparse.ArgumentTypeError(f"{given!r} names nothing")
    return utf8(given)


def path_of(given: str) -> Path:
    """The path of a file or folder, for argparse (``Path("")`` would be the working folder)."""
    return Path(named(given))


def quoted(word: object) -> str:
    """A word of a shell command that is printed to be copied: one line, whatever a path holds."""
    text = str(word)
    if text.startswith("-"):  # a path, not a flag
        text = f"./{text}"
    if text.isprintable() and text == " ".join(text.split()):
        return shlex.quote(text)
    escaped = (c if c.isalnum() or c in "/._-" else _escaped(c) for c in text)
    return f"$'{''.join(escaped)}'"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def threads(text: str) -> int:
    """A number of threads, for argparse: too many only slow a machine down, or stop it."""
    found, most = whole_from(1)(text), 4 * (os.cpu_count() or 1)
    if found > most:
        raise argparse.ArgumentTypeError(f"{text!r} is too much for this machine (1 to {most})")
    return found


def tolerant_streams() -> None:
    """Replace characters that the terminal's encoding lacks; a model may write any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def refuse(problem: str) -> int:
    with contextlib.suppress(OSError):  # stderr may have no room either
        print(f"error: {one_line(' '.join(problem.split()))}", file=sys.stderr)
    return 2


def one_line(text: str, width: int | None = None) -> str:
    """Text on one line, control characters made visible (a model's text is not to be trusted)."""
    kinds = {"\n": "⏎", "\t": " ", "\u00a0": " ", "\u202f": " "}
    text = "".join(c if c.isprintable() else kinds.get(c, "�") for c in text)
    return text if width is None or len(text) <= width else text[: width - 1] + "…"
