"""Machines that lack memory, threads, files or space: the right result, or one line."""

import errno
import io
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tiny_encoder
import torch
from safetensors import SafetensorError

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech import cli
from ia_mech.errors import UserError, exhaustion
from ia_mech.models import embedded
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
    "memory, Python": (MemoryError(), "there is no memory left (MemoryError); free memory"),
    "memory, PyTorch": (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate 64 bytes."
        ),
        "there is no memory left ([enforce fail at",
    ),
    "memory, CUDA": (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "or another --device"),
    "threads": (RuntimeError("can't start new thread"), "raise ulimit -u, or give --threads 1"),
    "nothing, but bad input": (UserError("No space", "stay calm"), "error: No space; stay calm\n"),
}


@pytest.mark.parametrize(("error", "expected"), LACKING.values(), ids=LACKING)
def test_what_is_lacking_is_one_line_with_a_remedy(error, expected, capsys):
    def body() -> None:
        raise error

    assert cli.run_command(body, str) == 2
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1 and line.startswith("error: ") and expected in line


@pytest.mark.parametrize("error", [RuntimeError("index out of range"), KeyError("a"), OSError("b")])
def test_other_errors_are_not(error):
    assert exhaustion(error) is None


def test_output_that_finds_no_room_is_one_line(capsys, monkeypatch):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise of_the_system(errno.ENOSPC)

    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.run_command(lambda: None, str) == 2
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
        "rates": ["-m", "ia_mech.rates", run, "--judge", "builtin"],
        "probes": ["-m", "probes.train", str(folder / "planted"), *FEW],
        "experiment": ["-m", "experiments.temperature_sweep", run, "--judge", "builtin"],
    }[command]


@pytest.fixture(scope="module")
def prepared(tiny_model_dir, tmp_path_factory) -> Path:
    """A judged run, a planted one, and a cache with the lenses of both."""
    folder = tmp_path_factory.mktemp("starved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IA_MECH_CACHE", str(folder / "cache"))
        encoder = folder / "cache" / "models" / embedded.ENCODER.folder
        shutil.copytree(tiny_encoder.encoder_directory(), encoder)
        for command in ("sample", "judge"):
            assert python(words(command, folder, tiny_model_dir), folder).returncode == 0
            if command == "sample":
                (folder / "new").rename(folder / "run")
        planted = plant(Plan("signal", contexts=80, layers=5, informative_layer=3, d_model=24))
        planted.lens.save(planted.weights_hash)
        write(planted, folder / "planted")
    return folder


def python(arguments, folder: Path, limit: Callable | None = None):
    """Run Python in a folder with its cache, under a limit."""
    home = {"IA_MECH_CACHE": str(folder / "cache"), "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | home,
        preexec_fn=limit,
        timeout=300,
    )


def check(ended: subprocess.CompletedProcess, folder: Path, remedies: str) -> None:
    """The right result, or one line after what was said before; and no scratch files."""
    if ended.returncode != 0:
        line = re.split(r"[\r\n]", ended.stderr.rstrip())[-1]
        assert ended.returncode == 2 and line.startswith("error: "), ended.stderr
        assert re.search(remedies, line) and ended.stderr.count("error:") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path for path in folder.rglob("*.tmp*") if "new" not in path.parts] == []


@pytest.mark.slow
@pytest.mark.parametrize("files", [8, 20])
@pytest.mark.parametrize("command", COMMANDS)
def test_few_open_files(prepared, tiny_model_dir, tmp_path, command, files):
    folder = Path(shutil.copytree(prepared, tmp_path, dirs_exist_ok=True))
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files))
    ended = python(words(command, folder, tiny_model_dir), folder, limit)
    check(ended, folder, "Too many open files.*; raise ulimit -n")


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
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    leave(free)
    ended = python(words(command, folder, tiny_model_dir), folder)
    remedies = "No space left on device.*; free some space|the run needs about .*; free some space"
    check(ended, folder, remedies)
    if command == "sample":  # the same command goes on and comes to the same run
        (folder / "ballast").unlink()
        again = python(words("sample", folder, tiny_model_dir), folder)
        assert again.returncode == 0, again.stderr
        assert Run.open(folder / "new").digest() == Run.open(prepared / "run").digest()
