"""A run that is killed, interrupted or out of disk goes on to the same digest.

``python tests/test_resume.py FOLDER VARIANT`` is what gets killed: it imports everything once and
forks a child for every attempt, so that ten of them take seconds.
"""

import errno
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import families
import pytest
import tiny
import torch

import ia_mech.collect.job
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.display import Quiet
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.models.load import Subject
from ia_mech.run import Run, RunWriter, integrity, layout

# What the child says: it begins, it computes a unit, the unit is on the disk.
BEGUN, COMPUTING, KEPT = "b", "u", "k"
# Each kill comes after a random delay since then. Few ones are in the default run of the tests.
SINCE = {
    "few": KEPT + COMPUTING + KEPT + KEPT,
    "given": BEGUN + KEPT + KEPT + COMPUTING + KEPT + KEPT + BEGUN + KEPT + COMPUTING + KEPT,
    "generate": BEGUN + KEPT + KEPT + COMPUTING + KEPT + KEPT + BEGUN + KEPT + COMPUTING + KEPT,
}
GENERATE = SampleConfig(
    response="generate", max_response_tokens=6, grid=Grid((1.0,), 1, 4, 0), batch_rows=2
)
VARIANTS = {
    "few": replace(GENERATE, limit=10),
    "given": SampleConfig(limit=48, grid=Grid((0.7, 1.0), 2, 6, 0), batch_rows=4),
    "generate": replace(GENERATE, limit=24),
}
# Two or three contexts, whose rows go through a narrower batch, or two responses.
UNITS = {"few": 5 + 4, "given": 24, "generate": 12 + 8}
VARIANT = pytest.mark.parametrize(
    "variant",
    ["few", *(pytest.param(name, marks=pytest.mark.slow) for name in ("given", "generate"))],
)


# -- the process that is killed -----------------------------------------------------------------


def drive(root: Path, name: str) -> dict:
    """Make a variant once undisturbed, and once with kills; what was seen, as JSON."""
    torch.set_num_threads(1)  # a forked child has no other threads
    layout.PART_CONTEXTS = 7  # merges on the way
    subject = tiny.subject("llama", families.build("smollm2"))
    config, moments, attempts = VARIANTS[name], random.Random(name), []
    whole = _attempt(config, subject, root / "whole")
    for since in SINCE[name]:
        share = len(SINCE[name]) if since == KEPT else 1  # all of these stay within one whole run
        delay = moments.uniform(0, whole["spans"][since] / share)
        attempts.append(_attempt(config, subject, root / "killed", since, delay))
    last = _attempt(config, subject, root / "killed")
    return {"whole": whole, "attempts": attempts, "last": last}


def _attempt(
    config: SampleConfig,
    subject: Subject,
    out: Path,
    since: str | None = None,
    delay: float = 0.0,
) -> dict:
    """One child that makes the run or goes on with it.

    Args:
        since: what the child says when the clock starts that it is killed by; None: not killed.
        delay: how many seconds later.
    """
    before = _state(out)
    reader, pen = os.pipe()
    child = os.fork()
    if child == 0:
        _work(config, subject, out, pen)
    os.close(pen)
    told, times = "", {}
    until = None  # when to kill
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            os.kill(child, signal.SIGKILL)  # not waited for yet, so still this child
            until = None
            continue
        letters = os.read(reader, 100).decode()
        now = time.monotonic()
        for letter in letters:
            times.setdefault(letter, now)
        if letters and since in times and since not in told:
            until = now + delay
        told += letters
        if not letters:  # the child is gone
            break
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    marks = [times.get(letter, now) for letter in (BEGUN, COMPUTING, KEPT)] + [now]
    return {
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "failed": os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0,
        "spans": {
            letter: marks[i + 1] - marks[i] for i, letter in enumerate((BEGUN, COMPUTING, KEPT))
        },
        "computed": told.count(COMPUTING),
        "before": before,
        "after": _state(out),
    }


def _work(config: SampleConfig, subject: Subject, out: Path, pen: int) -> None:
    """In the child: make the run, tell the parent of every unit, and never return."""

    def say(letter: str) -> None:
        os.write(pen, letter.encode())

    def computing(method):
        def compute(*args):
            say(COMPUTING)
            return method(*args)

        return compute

    def keeping(method):
        def keep(*args):
            method(*args)
            say(KEPT)

        return keep

    job = ia_mech.collect.job._Job
    job._respond, job._run_contexts = computing(job._respond), computing(job._run_contexts)
    RunWriter._add = keeping(RunWriter._add)
    try:
        say(BEGUN)
        collect(config, subject, out, Quiet())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _state(out: Path) -> dict:
    """What lies on the disk; opening it raises if it isn't whole."""
    if not out.exists():
        return {"units": [], "complete": False}
    run = Run.open(out)
    if problems := run.verify():
        raise AssertionError(problems)
    parts = run._manifest["parts"]
    units = [f"{part['kind']} {unit}" for part in parts for unit in part["units"]]
    return {"units": units, "complete": run.complete}


@VARIANT
def test_a_run_killed_again_and_again_loses_a_unit_each_time_and_nothing_else(variant, tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), variant],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    attempts, last = seen["attempts"], seen["last"]

    whole, killed = Run.open(tmp_path / "whole"), Run.open(tmp_path / "killed")
    assert whole.complete and killed.complete
    assert killed.verify() == []
    assert len(killed.contexts) == VARIANTS[variant].limit
    policy = "given" if variant == "given" else "generated"
    assert set(killed.contexts["response_policy"]) == {policy}
    assert killed.digest() == whole.digest()
    assert not last["failed"] and not last["killed"]
    left = {p.relative_to(killed.path).as_posix() for p in killed.path.rglob("*") if p.is_file()}
    parts = json.loads((killed.path / "manifest.json").read_text())["parts"]
    named = {file for part in parts for file in part["files"]}
    assert left == named | {"run.json", "manifest.json", ".lock"}

    # The kills came in the middle, and left states that differ.
    assert not any(a["failed"] for a in attempts)
    interrupted = [a for a in attempts if a["killed"] and not a["after"]["complete"]]
    half = len(attempts) // 2
    assert len(interrupted) >= half
    assert len({len(a["after"]["units"]) for a in interrupted}) >= half

    for attempt in [seen["whole"], *attempts, last]:
        before, after = attempt["before"]["units"], attempt["after"]["units"]
        assert len(after) == len(set(after))  # no unit lies in two parts
        assert set(before) <= set(after)
        lost = attempt["computed"] - (len(after) - len(before))
        assert lost in ((0, 1) if attempt["killed"] else (0,))
    assert seen["whole"]["computed"] == UNITS[variant]
    assert sorted(last["after"]["units"]) == sorted(seen["whole"]["after"]["units"])
    computed = sum(attempt["computed"] for attempt in [*attempts, last])
    assert UNITS[variant] <= computed <= UNITS[variant] + len(attempts)


# -- Ctrl-C and a full disk, in this process ----------------------------------------------------

SMALL = replace(GENERATE, limit=6)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(layout, "PART_CONTEXTS", 4)


@pytest.fixture(scope="module")
def undisturbed(tiny_subject, tmp_path_factory) -> str:
    return collect(SMALL, tiny_subject, tmp_path_factory.mktemp("small") / "run", Quiet()).digest()


class CtrlC(Quiet):
    """A progress during which somebody presses Ctrl-C, in a phase, after so many steps."""

    def __init__(self, phase: str, steps: int) -> None:
        self.phase, self.steps = phase, steps
        self.now, self.stopped = "", False

    def start(self, phase: str, *_, **__) -> None:
        self.now = phase

    def advance(self, *_) -> None:
        self.steps -= self.now == self.phase
        if self.steps < 0:
            raise KeyboardInterrupt

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(
    ("phase", "steps", "responses", "contexts"),
    [
        ("responses", 0, 0, 0),
        ("responses", 10, 2, 0),  # at most eight reports of a unit
        ("user turns", 20, 6, 3),  # at most 19 of the first unit, at least one of each other
    ],
)
def test_an_interrupted_run_goes_on(
    tiny_subject, tmp_path, undisturbed, phase, steps, responses, contexts
):
    out = tmp_path / "run"
    progress = CtrlC(phase, steps)
    with pytest.raises(KeyboardInterrupt):
        collect(SMALL, tiny_subject, out, progress)
    assert progress.stopped
    assert not Run.open(out).complete and Run.open(out).verify() == []
    parts = json.loads((out / "manifest.json").read_text())["parts"]
    kept = {
        kind: sum(part["contexts"] for part in parts if part["kind"] == kind)
        for kind in ("responses", "contexts")
    }
    assert kept == {"responses": responses, "contexts": contexts}
    assert os.listdir(tmp_path) == ["run"]
    run = collect(SMALL, tiny_subject, out, Quiet())  # the lock was given up, too
    assert run.complete and run.digest() == undisturbed


class FullDisk:
    """After so many files there is no room for another; a half of that one is there already."""

    def __init__(self, patch: pytest.MonkeyPatch, files: float) -> None:
        self.left, self.written = files, 0
        write_file, write_json = RunWriter._write_file, integrity.write_json

        def file(writer, name, data):
            self.count(writer.path / f"{name}.tmp")
            return write_file(writer, name, data)

        def record(path, value):
            self.count(path.with_name(path.name + ".tmp"))
            return write_json(path, value)

        patch.setattr(RunWriter, "_write_file", file)
        patch.setattr(integrity, "write_json", record)

    def count(self, scratch: Path) -> None:
        if self.left <= 0:
            scratch.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        self.left -= 1
        self.written += 1


def test_a_full_disk_is_reported_and_a_later_call_goes_on(
    tiny_subject, tmp_path, monkeypatch, undisturbed
):
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, float("inf"))
        collect(SMALL, tiny_subject, tmp_path / "roomy", Quiet())
    files = disk.written
    assert files > 30
    for room in (1, 2, files // 2, files - 1):
        folder = tmp_path / f"room-for-{room}"
        with monkeypatch.context() as patch:
            FullDisk(patch, room)
            with pytest.raises(UserError) as reported:
                collect(SMALL, tiny_subject, folder / "run", Quiet())
        assert reported.value.problem == (
            f"{folder / 'run'} could not be written (No space left on device)"
        )
        assert reported.value.remedy == (
            "free some space or give another --out; the same command then goes on from what is kept"
        )
        # Nothing but the run, and no run before both of its JSON files are whole.
        assert os.listdir(folder) == (["run"] if room >= 2 else [])
        if room >= 2:
            assert not Run.open(folder / "run").complete
            assert Run.open(folder / "run").verify() == []
        run = collect(SMALL, tiny_subject, folder / "run", Quiet())
        assert run.complete and run.verify() == []
        assert run.digest() == undisturbed
        assert not list(run.path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_full_disk_again_and_again_still_makes_progress(
    tiny_subject, tmp_path, monkeypatch, undisturbed
):
    """Room for one unit at a time: every call keeps what it made."""
    out, counts = tmp_path / "run", []
    for _ in range(20):
        with monkeypatch.context() as patch:
            FullDisk(patch, 14)
            try:
                run = collect(SMALL, tiny_subject, out, Quiet())
                break
            except UserError:
                parts = json.loads((out / "manifest.json").read_text())["parts"]
                counts.append(sum(len(part["units"]) for part in parts))
    assert counts == sorted(counts) and counts[-1] == 5
    assert run.digest() == undisturbed


if __name__ == "__main__":
    print(json.dumps(drive(Path(sys.argv[1]), sys.argv[2])))
