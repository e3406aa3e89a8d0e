"""Command lines in forks of one process that has imported everything, to be killed in the midst.

A command's imports take seconds, its work on a tiny model a fraction of one. ``Forks`` starts this
file as a process with one thread; a fork of that runs the command line as ``python -m`` does.
"""

import builtins
import contextlib
import fcntl
import importlib
import io
import json
import os
import runpy
import select
import signal
import stat
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

UNIT = "a unit"  # is what a fork says when it begins to compute one

# What each command imports, most of it late.
MODULES = {
    "ia_mech.sample": [
        *("ia_mech.collect.command", "ia_mech.collect.job", "ia_mech.collect.summary"),
        "transformers.models.llama.modeling_llama",
    ],
    "ia_mech.judge": [
        *("ia_mech.judge.label", "ia_mech.judge.llm", "ia_mech.judge.rules"),
        *("ia_mech.judge.sheets", "httpx", "openai"),
    ],
    "ia_mech.rates": [f"ia_mech.rates.{name}" for name in ("compute", "load", "show")],
    "probes.train": [
        *("probes.analysis", "probes.controls", "probes.report.files", "probes.report.screen"),
        *("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg"),
    ],
    "experiments.likelihood": [
        *(f"experiments.likelihood.{name}" for name in ("analyse", "read", "show")),
        *("experiments.tables", "matplotlib.backends.backend_agg"),
        "matplotlib.backends.backend_svg",
    ],
}


class Ended(NamedTuple):
    """How a command line ended.

    Attributes:
        status: of its exit; minus the signal's number where a signal ended it.
        seconds: that it took, without imports and the reading of flags.
        units: of sampling that it began to compute.
        steps: what it did to files below the folder, one line each, if that was asked for.
        err: what it wrote to stderr.
    """

    status: int
    seconds: float
    units: int
    steps: list[str]
    err: str

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


class Forks:
    """The process that forks, as the tests see it. A context manager.

    Args:
        folder: for the output of the commands.
        part_contexts: how many contexts a full part holds, so that small runs have merges.
    """

    def __init__(self, folder: Path, part_contexts: int = 4) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(part_contexts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | threads | offline,
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
        below: Path | None = None,
        at: int | None = None,
        **environment: str,
    ) -> Ended:
        """Run ``python -m`` with these words, perhaps not to its end.

        Args:
            words: the module and its arguments.
            after: seconds after its beginning when it gets the signal.
            number: of that signal.
            below: list what is done to files in this folder.
            at: kill it at this one of those steps, from 0. See :class:`Steps`.
            environment: added to the environment.
        """
        asked = {
            "words": [str(word) for word in words],
            "after": after,
            "number": int(number),
            "below": None if below is None else str(below),
            "at": at,
            "environment": environment,
        }
        pen, reader = self._process.stdin, self._process.stdout
        assert pen is not None and reader is not None
        pen.write(json.dumps(asked) + "\n")
        pen.flush()
        return Ended(**json.loads(reader.readline()))


# -- the process that forks -----------------------------------------------------------------------


def serve(folder: Path, part_contexts: int) -> NoReturn:
    """Answer requests on stdin until it ends."""
    import torch

    torch.set_num_threads(1)  # a fork has no other threads
    from ia_mech.run import layout

    layout.PART_CONTEXTS = part_contexts
    for line in sys.stdin:
        asked = json.loads(line)
        for name in MODULES[asked["words"][0]]:
            importlib.import_module(name)
        print(json.dumps(_attended(folder, **asked)._asdict()), flush=True)
    os._exit(0)  # unloading takes longer


def _attended(
    folder: Path,
    words: list[str],
    after: float | None,
    number: int,
    below: str | None,
    at: int | None,
    environment: dict[str, str],
) -> Ended:
    reader, pen = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(folder, words, pen, below, at, environment)
    os.close(pen)
    said = os.read(reader, 1)  # it begins
    begun = time.monotonic()
    until = None if after is None else begun + after
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            os.kill(child, number)  # not waited for yet, so still this child
            until = None
            continue
        more = os.read(reader, 65536)
        if not more:  # it is gone
            break
        said += more
    seconds = time.monotonic() - begun
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    err = (folder / "stderr").read_text("utf-8", errors="replace")
    lines = said[1:].decode().splitlines()
    steps = [line for line in lines if line != UNIT]
    return Ended(status, seconds, len(lines) - len(steps), steps, err)


def _work(
    folder: Path,
    words: list[str],
    pen: int,
    below: str | None,
    at: int | None,
    environment: dict[str, str],
) -> NoReturn:
    """In the fork: run the command line, and never return."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if words[0] == "ia_mech.sample":
            _tell_units(pen)
        if below is not None:
            Steps(below, pen, at).watch()
        _tell_begin(pen)
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


def _tell_begin(pen: int) -> None:
    """Tell when the flags are read and the command begins."""
    from ia_mech import cli

    original = cli._status

    def telling(body, interrupted):
        def begun():
            os.write(pen, b"b")
            return body()

        return original(begun, interrupted)

    cli._status = telling


def _tell_units(pen: int) -> None:
    from ia_mech.collect.job import _Job

    def telling(method):
        def compute(*arguments):
            os.write(pen, f"{UNIT}\n".encode())
            return method(*arguments)

        return compute

    _Job._respond, _Job._run_contexts = telling(_Job._respond), telling(_Job._run_contexts)


class Steps:
    """Every state that a kill can leave in a folder, one after another.

    A step is a change of a file or folder, and the kill comes before it. Three have a state of
    their own: after a file was opened to be written, it is there and empty; before its content is
    flushed to the disk, only a half may be there; and of what is appended, only a half is there.
    """

    def __init__(self, below: str, pen: int, at: int | None) -> None:
        self.below, self.pen, self.at, self.count = os.path.realpath(below), pen, at, 0
        self.write = os.write

    def watch(self) -> None:
        """Watch this process from now on."""
        os.fsync, os.write = self._flushed(os.fsync, os.ftruncate), self._appended(os.write)
        for name in ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "truncate"):
            setattr(os, name, self._before(name, getattr(os, name)))
        os.ftruncate = self._before("ftruncate", os.ftruncate)
        os.open = self._opened(os.open)
        builtins.open = io.open = self._made(io.open)

    def _step(self, what: str, file, folder: int | None = None) -> bool:
        """Count a step below the folder; whether it is the one to be killed at."""
        path = self._path(file, folder)
        if not path.startswith(self.below + os.sep):
            return False
        self.write(self.pen, f"{what} {path[len(self.below) + 1 :]}\n".encode())
        self.count += 1
        return self.count - 1 == self.at

    def _path(self, file, folder: int | None) -> str:
        if isinstance(file, int):
            return os.path.realpath(f"/proc/self/fd/{file}")
        path = os.fspath(file)
        if folder is not None:
            path = os.path.join(os.path.realpath(f"/proc/self/fd/{folder}"), path)
        return os.path.abspath(path)

    def _before(self, name: str, operation):
        def operate(file, *arguments, dir_fd=None, **settings):
            # Nothing changes where a folder is made that is there, or what isn't there removed.
            if os.path.lexists(self._path(file, dir_fd)) is not (name == "mkdir") and self._step(
                name, file, dir_fd
            ):
                kill()
            if dir_fd is not None:
                settings["dir_fd"] = dir_fd
            return operation(file, *arguments, **settings)

        return operate

    def _flushed(self, fsync, ftruncate):
        def flush(file):
            number = file if isinstance(file, int) else file.fileno()
            found = os.fstat(number)
            # What was appended before to a file is on the disk.
            appending = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND
            regular = stat.S_ISREG(found.st_mode) and not appending
            if regular and self._step("half of", number):
                ftruncate(number, found.st_size // 2)
                kill()
            return fsync(file)

        return flush

    def _appended(self, write):
        def append(file, content):
            if self._step("append to", file):
                write(file, bytes(content)[: len(content) // 2])
                kill()
            return write(file, content)

        return append

    def _opened(self, original):
        def open_(path, flags, *arguments, **settings):
            made = original(path, flags, *arguments, **settings)
            if flags & os.O_CREAT and not isinstance(path, int) and self._step("open", path):
                kill()
            return made

        return open_

    def _made(self, original):
        def open_(file, mode="r", *arguments, **settings):
            made = original(file, mode, *arguments, **settings)
            if set(mode) & set("wax") and not isinstance(file, int) and self._step("open", file):
                kill()
            return made

        return open_


def kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
