"""What all command lines of the project share: errors in one line, exit statuses."""

import argparse
import contextlib
import difflib
import io
import math
import os
import re
import shlex
import shutil
import signal
import string
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ia_mech.errors import UserError, exhaustion

RUN = "run.json"  # what makes a folder a run
JUDGE_HELP = "judge whose labels count (default: the only one, or the built-in judge)"
NOTHING = 3  # the exit status of a command that ended as it should, with nothing usable

# What OpenMP, MKL and OpenBLAS (in NumPy and SciPy) read when they are loaded.
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# In the help of every command; docs/scale.md says more.
STATUSES = """\
exit status: 0 done, 1 a bug, 2 bad input, 3 nothing usable, 130 interrupted, 141 output closed
"""


class Parser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its texts and refuses in one line.

    Its help ends with the exit statuses. The type of an argument may raise UserError, too.
    """

    def __init__(self, *args, **options) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)  # a new flag must not change what a script says
        options["epilog"] = "\n".join([*options.get("epilog", "").splitlines(), STATUSES])
        super().__init__(*args, **options)

    def parse_args(self, *args: Any, **options: Any) -> Any:
        try:
            return self.read(*args, **options)
        except UserError as error:
            self.exit(refuse(str(error)))

    def read(self, *args: Any, **options: Any) -> Any:
        """What :meth:`parse_args` gives, for Python: it raises UserError and never exits."""
        return super().parse_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        for word in message.split():
            if word.startswith("--") and message.startswith("unrecognized"):
                message += did_you_mean(word.partition("=")[0], self._option_string_actions)
        raise UserError(message, f"see {self.prog} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        try:
            sys.stdout.flush()  # --help | head
        except BrokenPipeError:
            status = _closed_pipe()
        super().exit(status, message)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Which known word a mistyped one may mean, to be said after it; empty if none is close."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def run_command(
    body: Callable[[], int | None], interrupted: Callable[[], str], threads: int | None = None
) -> int:
    """Run the body of a command, with so many ``threads`` if given; returns the exit status.

    That is what the body returns, with None for 0; ``NOTHING`` if nothing usable came out. 2: bad
    input, which one line on stderr explains. 130: interrupted, with what ``interrupted()`` says was
    kept. 141: whoever read the output, such as ``head``, has closed it. A bug's exception is passed
    on, and Python ends with 1. A scheduler's SIGTERM does what Ctrl-C does.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    if sys.flags.optimize > 1:
        return refuse("transformers needs the docstrings that python -OO removes; use python -O")
    try:
        if threads is not None:
            use_threads(threads)
        status = _status(body, interrupted)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return _closed_pipe()
    except OSError as error:  # what was printed last found no room
        _discard(sys.stdout)
        return refuse(f"the output could not be written ({error.strerror}); write it elsewhere")


def _interrupt(*_: object) -> None:
    """Do what Ctrl-C does, also where a script began the job in the background, ignoring that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _status(body: Callable[[], int | None], interrupted: Callable[[], str]) -> int:
    try:
        return body() or 0
    except KeyboardInterrupt:
        print(f"\ninterrupted; {interrupted()}", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        raise
    except UserError as error:
        return refuse(str(error))
    except Exception as error:
        if lacking := exhaustion(error):
            return refuse(str(lacking))
        if isinstance(error, OSError):
            return refuse(f"{error}; check the path, its permissions and its disk")
        raise


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


def add_threads(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """``--threads``, for commands that compute: :func:`run_command` is given ``args.threads``."""
    _add_threads(parser, "on a CPU (default: one per core)")


def add_workers(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """``--workers`` and ``--threads``, for commands that compute with a model."""
    parser.add_argument(
        "--workers", type=threads, metavar="N", help="parts at a time (default: one per core)"
    )
    _add_threads(parser, "threads of each worker (default: the cores' share)")


def add_ray(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """``--ray``, for commands whose workers may be on a cluster."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        type=ray_address,
        metavar="ADDRESS",
        help="compute on a Ray cluster; without ADDRESS on this machine's devices (docs/scale.md)",
    )


def ray_address(text: str) -> str:
    """Where a Ray cluster is, for argparse."""
    if not re.fullmatch(r"local|auto|[\w.\-\[\]:]+:[0-9]+", text):
        raise argparse.ArgumentTypeError(
            f"{one_line(text, 40)!r} is not local, auto or HOST:PORT (give a run before --ray)"
        )
    return text


def _add_threads(parser: argparse.ArgumentParser | argparse._ArgumentGroup, help: str) -> None:
    parser.add_argument("--threads", type=threads, metavar="N", help=help)


def threads(text: str) -> int:
    """A number of threads, for argparse: too many only slow a machine down, or stop it."""
    found, most = whole_from(1)(text), 4 * (os.cpu_count() or 1)
    if found > most:
        raise argparse.ArgumentTypeError(f"{text!r} is too much for this machine (1 to {most})")
    return found


def use_threads(number: int) -> None:
    """Have libraries compute with so many threads, and PyTorch if it is there already."""
    os.environ.update(dict.fromkeys(THREAD_COUNTS, str(number)))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(number)


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
    group.add_argument("--seed", type=whole_from(0), default=0, help=f"seed of {seed} (default: 0)")


def number(text: str) -> float:
    """A finite number, for argparse; any other text gives NaN, which lies in no range."""
    try:
        found = float(text)
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def coverage(text: str) -> float:
    """The level of an interval, for argparse."""
    value = number(text)
    if not value > 0 or (1 + value) / 2 >= 1:  # so close to 1 that its quantile is infinite
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1, such as 0.95")
    return value


def whole_from(least: int, why: str = "", most: int = sys.maxsize) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` to ``most``, for argparse; ``why`` explains them."""

    def whole(text: str) -> int:
        # Python reads no number of thousands of digits; thirty are too many already.
        found = int(text[:30]) if text.isascii() and text.isdigit() else -1
        if not least <= found <= most:
            limits = f"{least} up" if found <= most == sys.maxsize else f"{least} to {most}"
            reason = f" ({why})" if why else ""
            shown = one_line(text, 40)
            raise argparse.ArgumentTypeError(
                f"{shown!r} is not a whole number from {limits}{reason}"
            )
        return found

    return whole


def above_zero(text: str) -> float:
    """A finite number above 0, for argparse."""
    if not number(text) > 0:
        raise argparse.ArgumentTypeError(f"{one_line(text, 40)!r} is not a number above 0")
    return number(text)


def utf8(given: str) -> str:
    """A text, for argparse; one that no JSON or Parquet file could hold is refused."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{given!r} is not UTF-8") from None
    return given


def nonblank(given: str) -> str:
    """The name of something, for argparse: a UTF-8 text that isn't blank."""
    if not given.strip():
        raise argparse.ArgumentTypeError(f"{given!r} names nothing")
    return utf8(given)


def path_of(given: str) -> Path:
    """The path of a file or folder, for argparse (``Path("")`` would be the working folder)."""
    return expanded(nonblank(given))


def expanded(given: str | Path) -> Path:
    """A path as a user gives it, with the home folder in place of ``~``.

    Raises:
        UserError: no home folder is known, or no user of that name.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        start = Path(given).parts[0]
        if start == "~":
            raise UserError(
                f"{given}: this user has no home folder",
                "set HOME; or set IA_MECH_CACHE, and give whole paths",
            ) from None
        remedy = f"give the whole path, or ./{start} for a file of that name"
        raise UserError(f"{given}: there is no user {start[1:]}", remedy) from None


def run_folder(given: str) -> Path:
    """The folder of a run, for argparse: another folder is refused before torch is loaded."""
    path = path_of(given)
    refuse_no_run(path)
    return path


def refuse_no_run(path: Path) -> None:
    """Raise UserError if a folder holds no run."""
    if (path / RUN).is_file():
        return
    if not path.exists():
        raise UserError(f"no folder {path}", "give what ia-mech sample wrote")
    lacking = "it is a file" if path.is_file() else f"no {RUN}"
    inside = path / "run"  # of a study
    there = f"{inside}, which is one" if (inside / RUN).is_file() else "what ia-mech sample wrote"
    raise UserError(f"{path} is not a run ({lacking})", f"give {there}")


def refuse_missing(path: Path) -> None:
    """Raise UserError if there is no such file."""
    if not path.is_file():
        raise UserError(f"no file {path}", "give the path of an existing file")


def below_here(path: Path) -> Path:
    """The path, relative to the working folder if it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if here in path.parents else path


def shell_word(word: object) -> str:
    """A word of a shell command that is printed to be copied: one line, whatever a path holds.
    A path below the working folder is relative to it."""
    text = str(below_here(word) if isinstance(word, Path) else word)
    if text.startswith("-"):  # a path, not a flag
        text = f"./{text}"
    if text.isprintable() and text == " ".join(text.split()):
        return shlex.quote(text)
    plain = b"/._-" + string.ascii_letters.encode() + string.digits.encode()
    escaped = (chr(b) if b in plain else f"\\x{b:02x}" for b in os.fsencode(text))
    return f"$'{''.join(escaped)}'"


def program(name: str = "ia-mech") -> str:
    """How a program of this Python's environment is typed here, to open a command that is printed.

    That is its name where the shell finds it (an active environment), else its path, relative to
    the working folder if it lies below it.
    """
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found and (not own.exists() or own in (Path(found), Path(found).resolve())):
        return name
    if not own.exists():
        return f"{program('python')} -m ia_mech.console" if name == "ia-mech" else name
    return shell_word(own)


def go_on(kept: str, command: str, words: Sequence[str]) -> str:
    """What an interrupted command says: what was kept, and the command as it was given, with all
    its ``words``, to be copied."""
    first, *rest = command.split()
    return f"{kept}\nnext: {' '.join([program(first), *rest, *map(shlex.quote, words)])}"


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
