"""A run that is interrupted or out of disk goes on to the same digest; kills are in test_kills."""

import errno
import os
import shutil
from pathlib import Path
from random import Random

import pytest
from runs import files_under, sampled
from test_run_damage import BYTES, PLACES, damage

from ia_mech.display import Quiet
from ia_mech.engine.workers import Crew
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter, integrity
from ia_mech.settings import Settings

MANIFEST = "manifests/contexts-00001.json"
SMALL = Settings(
    limit=6,
    response="generate",
    max_response_tokens=6,
    temperatures=(1.0,),
    samples=1,
    max_new_tokens=4,
    batch_rows=4,
)  # two parts of responses, four of contexts


@pytest.fixture(scope="module")
def whole(tiny_subject, tmp_path_factory) -> Run:
    run = sampled(SMALL, tiny_subject, tmp_path_factory.mktemp("small") / "run")
    assert run.record["parts"] == {"responses": 2, "contexts": 4}
    return run


@pytest.fixture(scope="module")
def undisturbed(whole) -> str:
    return whole.digest()


class CtrlC(Quiet):
    """A progress during which somebody presses Ctrl-C: in a phase, in a part, after a few steps."""

    def __init__(self, phase: str, part: int) -> None:
        self.phase, self.part, self.steps = phase, part, 0 if part else 2
        self.now, self.stopped = "", False

    def start(self, phase: str, *_, **__) -> None:
        self.now = phase

    def advance(self, steps: int = 1, note: str = "") -> None:
        if self.now == self.phase:
            self.steps -= self.part == 0
            self.part -= "writing" in note
        if self.steps < 0:
            raise KeyboardInterrupt

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize(
    ("phase", "part", "kept"),
    [
        ("responses", 1, {"responses": 3, "contexts": 0}),
        ("user turns", 2, {"responses": 6, "contexts": 3}),
    ],
)
def test_an_interrupted_run_goes_on(tiny_subject, tmp_path, undisturbed, phase, part, kept):
    out, progress = tmp_path / "run", CtrlC(phase, part)
    with pytest.raises(KeyboardInterrupt):
        sampled(SMALL, tiny_subject, out, progress, crew=Crew(workers=1))
    assert progress.stopped
    run = Run.open(out, unfinished=True)
    assert not run.complete and run.verify() == []
    # The worker may have finished the next part while that one was written.
    assert all(kept[kind] <= count for kind, count in run.counts.items())
    assert os.listdir(tmp_path) == ["run"]
    run = sampled(SMALL, tiny_subject, out, Quiet())  # the lock was given up, too
    assert run.complete and run.digest() == undisturbed


class FullDisk:
    """A disk with room for so many files and half of another."""

    def __init__(self, patch: pytest.MonkeyPatch, files: int) -> None:
        self.left = files
        write, write_json = RunWriter._write, integrity.write_json

        def file(writer, name, how):
            self.count(writer.path / f"{name}.tmp")
            return write(writer, name, how)

        def record(path, value):
            self.count(path.with_name(path.name + ".half.tmp"))
            return write_json(path, value)

        patch.setattr(RunWriter, "_write", file)
        patch.setattr(integrity, "write_json", record)

    def count(self, scratch: Path) -> None:
        if self.left <= 0:
            scratch.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        self.left -= 1


def test_a_full_disk_is_reported_and_a_later_call_goes_on(
    tiny_subject, tmp_path, monkeypatch, undisturbed
):
    """Each call finds room for a few files more than the one before."""
    out = tmp_path / "run"
    for room in (0, 1, 4, 6):
        with monkeypatch.context() as patch:
            FullDisk(patch, room)
            with pytest.raises(UserError) as reported:
                sampled(SMALL, tiny_subject, out)
        assert reported.value.problem == f"{out} could not be written (No space left on device)"
        assert reported.value.remedy.startswith("free some space, ")
        if room:
            assert (
                not Run.open(out, unfinished=True).complete
                and Run.open(out, unfinished=True).verify() == []
            )
    assert Run.open(out, unfinished=True).counts["contexts"] > 0
    with pytest.raises(UserError, match="is still being written or was interrupted"):
        Run.open(out)
    run = sampled(SMALL, tiny_subject, out)
    assert run.complete and run.verify() == [] and run.digest() == undisturbed


@pytest.mark.parametrize("file", ["responses/part-00000.parquet", "residuals/00001.safe"])
def test_a_damaged_part_is_named_and_computed_again(whole, tiny_subject, tmp_path, progress, file):
    out = Path(shutil.copytree(whole.path, tmp_path / "run"))
    (name,) = out.glob(f"{file}*")
    damage(name, "a bit", Random(0))
    run = sampled(SMALL, tiny_subject, out, progress)
    assert str(name.relative_to(out)) in progress.lines[0] and "damaged" in progress.lines[0]
    assert run.complete and run.verify() == [] and run.digest() == whole.digest()


@pytest.mark.parametrize("mounted", [False, True], ids=["no folder", "an empty one"])
def test_a_run_whose_tensors_are_away_is_refused_and_left_as_it_is(
    whole, tiny_subject, tmp_path, mounted
):
    """As on a disk that isn't mounted."""
    out = Path(shutil.copytree(whole.path, tmp_path / "run"))
    kept = files_under(out)
    shutil.move(out / "residuals", tmp_path / "disk")
    if mounted:
        (out / "residuals").mkdir()
    with pytest.raises(UserError, match="residuals lacks all 4 files that were"):
        sampled(SMALL, tiny_subject, out)
    with pytest.raises(UserError, match=r"residuals lacks all 4 .*; mount its disk"):
        Run.open(out).residuals()
    assert Run.open(out).generations.equals(whole.generations)
    shutil.copytree(tmp_path / "disk", out / "residuals", dirs_exist_ok=True)
    assert files_under(out) == kept and sampled(SMALL, tiny_subject, out).digest() == whole.digest()


def test_a_damaged_part_is_given_up_only_for_a_whole_one(
    whole, tiny_subject, tmp_path, monkeypatch
):
    out = Path(shutil.copytree(whole.path, tmp_path / "run"))
    (out / "residuals/00001.safetensors").unlink()
    kept = {file for file in files_under(out) if not file.endswith(".lock")}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunWriter, "add_contexts", stopped)
        sampled(SMALL, tiny_subject, out)
    assert kept <= {*files_under(out)}
    assert sampled(SMALL, tiny_subject, out).digest() == whole.digest()


def stopped(*_, **__) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BYTES, *PLACES])
def test_every_damage_is_computed_again_or_refused_with_the_file(
    whole, tiny_subject, tmp_path, name
):
    """Without ``run.json`` or a part's manifest, the run or the part is begun anew."""
    again = 0
    for file in ("run.json", MANIFEST, *sorted(whole.parts("contexts")[1]["files"])):
        out = Path(shutil.copytree(whole.path, tmp_path / "run"))
        damage(out / file, name, Random(file))
        try:
            run = sampled(SMALL, tiny_subject, out)
        except UserError as error:
            place = file if file.endswith(".json") and name not in PLACES else str(out)
            assert place in str(error), (file, error)
            assert file.endswith(".json") or name in PLACES, (file, error)
        else:
            again += 1
            assert run.complete and run.verify() == [] and run.digest() == whole.digest(), file
        shutil.rmtree(out)
    assert again or name == "a folder"  # which no file can take the place of
