"""A run that is interrupted or out of disk goes on to the same digest; kills are in test_kills."""

import errno
import json
import os
from pathlib import Path

import pytest

from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.display import Quiet
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter, integrity, layout

SMALL = SampleConfig(
    limit=6,
    response="generate",
    max_response_tokens=6,
    grid=Grid((1.0,), 1, 4, 0),
    batch_rows=2,
)


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
            "free some space, or give another path; the same command then goes on from what is kept"
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
