"""Command lines, to be killed while they run, in forks of a process that has imported everything.

A command's imports take seconds, its work on a tiny model a fraction of one. ``Forks`` starts this
file as a process with one thread; a fork of that runs the command line as ``python -m`` does.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

LONGEST = 300  # seconds; a command that hangs is ended, so that its test fails
PART = "a part"  # what a fork writes when it begins to compute one

# What each command imports, most of it late.
MODULES = {
    "ia_mech.sample": [
        *("ia_mech.collect.command", "ia_mech.collect.job", "ia_mech.collect.summary"),
        "transformers.models.llama.modeling_llama",
    ],
    "ia_mech.judge": [
        *("ia_mech.judge.judging", "ia_mech.judge.llm", "ia_mech.judge.builtin"),
        *("ia_mech.judge.sheets", "openai"),
    ],
}


class Ended(NamedTuple):
    """How a command line ended.

    Attributes:
        status: the exit status; minus the signal's number if a signal ended it.
        seconds: how long it took, without imports and the reading of flags.
        parts: how many parts of a run it began to compute.
        err: what it wrote to stderr.
    """

    status: int
    seconds: float
    parts: int
    err: str


class Forks:
    """The process that forks, as the tests see it; ``folder`` is for what the commands write
    to stderr.

    A context manager.
    """

    def __init__(self, folder: Path) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | threads | offline | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *_) -> None:
        self._process.communicate()  # the end of its input ends it

    def run(
        self,
        *words: object,
        after: float | None = None,
        number: int = signal.SIGKILL,
        **environment: str,
    ) -> Ended:
        """Run ``python -m`` with these words, and perhaps end it before it is done.

        Args:
            words: the module and its arguments.
            after: seconds from its beginning to the signal.
            number: the signal's number.
            environment: added to the environment.
        """
        (ended,) = self.run_together([words], after=after, number=number, **environment)
        return ended

    def run_together(
        self,
        commands: Sequence[Sequence[object]],
        after: float | None = None,
        number: int = signal.SIGKILL,
        **environment: str,
    ) -> list[Ended]:
        """Run several at once; arguments as for :meth:`run`."""
        request = {"commands": [[str(word) for word in words] for words in commands]}
        request |= {"after": after, "number": int(number), "environment": environment}
        pen, reader = self._process.stdin, self._process.stdout
        assert pen is not None and reader is not None
        pen.write(json.dumps(request) + "\n")
        pen.flush()
        return [Ended(**ended) for ended in json.loads(reader.readline())]


# -- the process that forks -----------------------------------------------------------------------


def serve(folder: Path) -> NoReturn:
    """Answer requests on stdin until it ends."""
    import torch

    torch.set_num_threads(1)  # a fork has no other threads
    gc.disable()  # what is imported stays
    for line in sys.stdin:
        request = json.loads(line)
        commands, environment = request["commands"], request["environment"]
        for name in MODULES[commands[0][0]]:
            importlib.import_module(name)
        gc.freeze()
        begun = [
            _begin(folder / f"stderr-{k}", words, environment) for k, words in enumerate(commands)
        ]
        ended = [_attend(*one, request["after"], request["number"])._asdict() for one in begun]
        print(json.dumps(ended), flush=True)
    os._exit(0)  # unloading takes longer


def _begin(err: Path, words: list[str], environment: dict[str, str]) -> tuple[int, int, Path]:
    """Fork; returns the child, the pipe that it writes to, and the file of its stderr."""
    reader, pen = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(err, words, pen, environment)
    os.close(pen)
    return child, reader, err


def _attend(child: int, reader: int, err: Path, after: float | None, number: int) -> Ended:
    """Wait for a child to end, and perhaps end it."""
    if not select.select([reader], [], [], LONGEST)[0]:
        os.kill(child, signal.SIGKILL)
    written = os.read(reader, 1)  # it begins
    begun = time.monotonic()
    until = begun + (LONGEST if after is None else after)
    while True:
        if not select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
            # Not waited for yet, so still this child.
            os.kill(child, signal.SIGKILL if after is None else number)
            after, until = None, time.monotonic() + LONGEST
            continue
        more = os.read(reader, 65536)
        if not more:  # it is gone
            break
        written += more
    seconds = time.monotonic() - begun
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = err.read_text("utf-8", errors="replace")
    return Ended(status, seconds, written.decode().count(PART), text)


def _work(err: Path, words: list[str], pen: int, environment: dict[str, str]) -> NoReturn:
    """In the fork: run the command line, and never return."""
    status = 1
    gc.enable()
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _report_to(pen)
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _report_to(pen: int) -> None:
    """Write when the flags are read and the command begins, and when it begins a part."""
    from ia_mech import cli
    from ia_mech.collect.progress import PhaseProgress

    def reported(function, what: str):
        def report_first(*arguments):
            os.write(pen, f"{what}\n".encode())
            return function(*arguments)

        return report_first

    cli._status = reported(cli._status, "b")
    PhaseProgress.begin = reported(PhaseProgress.begin, PART)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
