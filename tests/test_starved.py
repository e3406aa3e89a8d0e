"""Machines that lack memory, threads, files or space: the right result, or one line.

What a library does by itself when it is starved (OpenBLAS and libgomp end the process, Arrow may
wait for ever) can't be reported by anyone; limits under which that happens are refused beforehand.
"""

import errno
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from shell import call, refusal

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech import cli
from ia_mech.errors import UserError, exhaustion
from ia_mech.judge import __main__ as judge
from ia_mech.run import Run

# -- what is recognised ---------------------------------------------------------------------------


def of_the_system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "a/file")


LACKING = {
    "files": (of_the_system(errno.EMFILE), "Too many open files: 'a/file'; raise ulimit -n"),
    "files, PyTorch": (
        RuntimeError("unable to open file <a> in read-only mode: Too many open files (24)"),
        "raise ulimit -n",
    ),
    "space": (
        of_the_system(errno.ENOSPC),
        "No space left on device: 'a/file'; free some space, or",
    ),
    "space, Rust": (
        SafetensorError("I/O error: No space left on device (os error 28)"),
        "free some space, or give another path",
    ),
    "quota": (of_the_system(errno.EDQUOT), "free some space, or give another path"),
    "size": (of_the_system(errno.EFBIG), "File too large: 'a/file'; raise ulimit -f"),
    "read only": (of_the_system(errno.EROFS), "'a/file'; give another path"),
    "permission": (of_the_system(errno.EACCES), "change its permissions, or give another path"),
    "processes": (of_the_system(errno.EAGAIN), "raise ulimit -u"),
    "memory": (of_the_system(errno.ENOMEM), "free memory, raise ulimit -v"),
    "memory, Python": (MemoryError(), "there is no memory left (MemoryError); free memory"),
    "memory, PyTorch": (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate 64 bytes."
        ),
        "there is no memory left ([enforce fail at",
    ),
    "memory, CUDA": (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "or another --device"),
    "memory, oneDNN": (RuntimeError("could not create a primitive"), "there is no memory left"),
    "memory, loader": (
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        "there is no memory left",
    ),
    "threads": (RuntimeError("can't start new thread"), "raise ulimit -u (or -v), or set OMP_NUM"),
    "temporary": (
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
        "free space in one of them, or set TMPDIR",
    ),
}


@pytest.mark.parametrize(("error", "said"), LACKING.values(), ids=LACKING)
def test_what_is_lacking_is_said_with_a_remedy(error, said, capsys):
    def body() -> None:
        raise error

    assert cli.guarded(body, str) == 2
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1 and line.startswith("error: ") and said in line


@pytest.mark.parametrize("error", [RuntimeError("index out of range"), KeyError("a"), OSError("b")])
def test_other_errors_are_not(error):
    assert exhaustion(error) is None


# -- limits that are refused beforehand -----------------------------------------------------------


def test_too_little_address_space_is_refused_before_anything_is_loaded(monkeypatch, capfd):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (3 * 2**29, -1))
    line = refusal(call(judge.main, ["run", "nowhere"], capfd))
    assert line == (
        "ulimit -v allows 1.5 GB of address space, too little for PyTorch and its threads; raise "
        "it to 4 GB or more, or set it to unlimited"
    )


@pytest.mark.parametrize(("threads", "needed"), [("1", 20), ("8", 48), ("", None)])
def test_too_few_threads_are_refused_before_anything_is_loaded(monkeypatch, capfd, threads, needed):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    needed = needed or 16 + 4 * os.cpu_count()
    start, started = threading.Thread.start, []

    def few(thread) -> None:
        if len(started) == 7:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    line = refusal(call(judge.main, ["run", "nowhere"], capfd))
    assert line == (
        f"only 7 of the {needed} threads that libraries need can be started; raise ulimit -u, or "
        "set OMP_NUM_THREADS=1 (then 20)"
    )


def test_output_that_finds_no_room_is_one_line(capsys, monkeypatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise of_the_system(errno.ENOSPC)

    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.guarded(lambda: None, str) == 2
    line = "error: the output could not be written (No space left on device); write it elsewhere\n"
    assert capsys.readouterr().err == line


# -- real limits ----------------------------------------------------------------------------------

FEW = ("--permutations", "39", "--resamples", "100", "--threads", "2")
COMMANDS = ("sample", "judge", "rates", "probes", "experiment")


def words(command: str, folder: Path, model: str) -> list[str]:
    run = str(folder / "run")
    return {
        "sample": [
            *("-m", "ia_mech.sample", "--model", model, "--limit", "6", "--samples", "2"),
            *("--max-new-tokens", "4", "--batch-rows", "4", "--out", str(folder / "new")),
        ],
        "judge": ["-m", "ia_mech.judge", "run", run],
        "rates": ["-m", "ia_mech.rates", run, "--judge", "rules", "--csv", str(folder / "r.csv")],
        "probes": ["-m", "probes.train", str(folder / "planted"), *FEW],
        "experiment": ["-m", "experiments.temperature_sweep", run, "--judge", "rules"],
    }[command]


@pytest.fixture(scope="module")
def prepared(tiny_model_dir, tmp_path_factory) -> Path:
    """A judged run, a planted one, and a cache with the lenses of both."""
    folder = tmp_path_factory.mktemp("starved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IA_MECH_CACHE", str(folder / "cache"))
        for command in ("sample", "judge"):
            assert python(words(command, folder, tiny_model_dir), folder).status == 0
            if command == "sample":
                (folder / "new").rename(folder / "run")
        planted = plant(Plan("signal", contexts=80, layers=5, informative_layer=3, d_model=24))
        planted.lens.save(planted.weights_hash)
        write(planted, folder / "planted")
    return folder


class Ended:
    """How a process ended; ``line`` is the last of stderr."""

    def __init__(self, process: subprocess.CompletedProcess) -> None:
        self.status, self.err = process.returncode, process.stderr
        lines = [line for line in re.split(r"[\r\n]", self.err) if line.strip()]
        self.line = lines[-1] if lines else ""

    @property
    def refused(self) -> bool:
        """In one line, apart from what was said before."""
        return (
            self.status == 2 and self.line.startswith("error: ") and self.err.count("error:") == 1
        )


def python(arguments, folder: Path, *before: str, limit: Callable | None = None, **environment):
    """Run Python in a folder with its cache, under a limit."""
    home = {"IA_MECH_CACHE": str(folder / "cache"), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [*before, sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | home | environment,
        preexec_fn=limit,
        timeout=300,
    )
    return Ended(done)


def copied(prepared: Path, folder: Path) -> Path:
    return Path(shutil.copytree(prepared, folder, dirs_exist_ok=True))


def check(ended: Ended, folder: Path, *, remedies: str = "") -> None:
    """The right result or one line, and no scratch files."""
    assert ended.status == 0 or ended.refused, ended.err
    assert "Traceback" not in ended.err
    if ended.refused:
        assert re.search(remedies, ended.line), ended.line
    assert [path for path in folder.rglob("*.tmp*") if "new" not in path.parts] == []


def limited(what: int, to: int) -> Callable:
    return lambda: resource.setrlimit(what, (to, to))


@pytest.mark.slow
@pytest.mark.parametrize("files", [8, 20])
@pytest.mark.parametrize("command", COMMANDS)
def test_few_open_files(prepared, tiny_model_dir, tmp_path, command, files):
    folder = copied(prepared, tmp_path)
    limit = limited(resource.RLIMIT_NOFILE, files)
    ended = python(words(command, folder, tiny_model_dir), folder, limit=limit)
    check(ended, folder, remedies="Too many open files.*; raise ulimit -n")


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 4096, 40_000])
@pytest.mark.parametrize("command", COMMANDS)
def test_small_files_only(prepared, tiny_model_dir, tmp_path, command, size):
    folder = copied(prepared, tmp_path)
    limit = limited(resource.RLIMIT_FSIZE, size)
    ended = python(words(command, folder, tiny_model_dir), folder, limit=limit)
    check(ended, folder, remedies=r"File too large.*; raise ulimit -f|temporary.*; free space")
    if command == "sample":
        resumes(prepared, folder, tiny_model_dir)


def resumes(prepared: Path, folder: Path, model: str) -> None:
    """The same command goes on and comes to the same run."""
    ended = python(words("sample", folder, model), folder)
    assert ended.status == 0, ended.err
    assert Run.open(folder / "new").digest() == Run.open(prepared / "run").digest()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_output_to_a_full_device(prepared, tiny_model_dir, tmp_path, command):
    folder = copied(prepared, tmp_path)
    shell = ("bash", "-c", 'exec "$@" > /dev/full', "bash")
    check(python(words(command, folder, tiny_model_dir), folder, *shell), folder)
    if command == "sample":
        resumes(prepared, folder, tiny_model_dir)


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 MB: its folder, and a function that leaves so many bytes of it free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")

    def leave(free: int) -> None:
        with open(folder / "ballast", "wb") as file:
            file.write(bytes(shutil.disk_usage(folder).free - free))

    yield folder, leave
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 40_960, 90_112])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk(prepared, tiny_model_dir, disk, command, free):
    folder, leave = disk
    copied(prepared, folder)
    leave(free)
    ended = python(words(command, folder, tiny_model_dir), folder)
    remedies = "No space left on device.*; free some space|the run needs about .*; free some space"
    check(ended, folder, remedies=remedies)
    if command == "sample":
        (folder / "ballast").unlink()
        resumes(prepared, folder, tiny_model_dir)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_too_few_processes(prepared, tiny_model_dir, tmp_path, command):
    """The limit doesn't hold for root: another user, who may read what is root's."""
    other = ("--reuid=65534", "--regid=65534", "--clear-groups")
    reading = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")
    user = ("setpriv", *other, *reading)
    if shutil.which("setpriv") is None or os.geteuid() != 0:
        pytest.skip("needs setpriv and root")
    folder = copied(prepared, tmp_path)
    for processes in (1, 10, 60):
        shell = ("bash", "-c", f'ulimit -u {processes}; exec "$@"', "bash")
        ended = python(
            words(command, folder, tiny_model_dir), folder, *user, *shell, HOME=str(tmp_path)
        )
        check(ended, folder, remedies=r"only \d+ of the 20 threads .*; raise ulimit -u")
        assert ended.refused == (processes < 60), ended.err


# Address space that is used up while the command works: a limit just above what is mapped after the
# libraries were loaded.
NEARLY_USED_UP = """
import importlib, resource, sys
import matplotlib.figure, pyarrow.parquet, scipy.linalg, sklearn.linear_model, torch, transformers
from ia_mech import cli
_, left, module, *words = sys.argv
main = importlib.import_module(module).main
cli.ADDRESS_SPACE = 0
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(left) * 2**20,) * 2)
sys.exit(main(words))
"""
# What libraries say when they end the process.
ABORTED = (
    r"OpenBLAS|libgomp|bad_alloc|ABORT|Memory allocation still failed|^out of memory: going on"
)


@pytest.mark.slow
@pytest.mark.parametrize("left", [30, 100, 200, 400, 800])
def test_nearly_no_address_space_left(prepared, tiny_model_dir, tmp_path, left):
    folder = copied(prepared, tmp_path)
    _, _, *arguments = words("sample", folder, tiny_model_dir)
    starved = ["-c", NEARLY_USED_UP, str(left), "ia_mech.collect.command", *arguments]
    ended = python(starved, folder, OMP_NUM_THREADS="2")
    ok = ended.status == 0 or ended.refused
    assert ok or (ended.status not in (1, 2) or re.search(ABORTED, ended.line)), ended.err
    assert "Traceback" not in ended.err
    resumes(prepared, folder, tiny_model_dir)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_little_address_space(prepared, tiny_model_dir, tmp_path, command):
    folder = copied(prepared, tmp_path)
    for megabytes, enough in ((500, False), (1500, False), (4097, True)):
        limit = limited(resource.RLIMIT_AS, megabytes * 2**20)
        ended = python(words(command, folder, tiny_model_dir), folder, limit=limit)
        check(ended, folder, remedies="too little for PyTorch and its threads; raise it")
        assert (ended.status == 0) == enough, ended.err


def test_a_user_error_is_passed_on_as_it_is(capsys):
    def body() -> None:
        raise UserError("No space left on device", "stay calm")

    assert cli.guarded(body, str) == 2
    assert capsys.readouterr().err == "error: No space left on device; stay calm\n"
