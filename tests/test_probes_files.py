"""A folder of an analysis is there whole or as it was before, whatever happens while writing."""

import os
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from shell import files

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech.display import KINDS
from ia_mech.errors import UserError
from probes.analysis import Analysis, Settings, analyse
from probes.card import Probe
from probes.dataset import ProbeSet, read
from probes.report.conclusion import conclude
from probes.report.files import Kept

PLAN = Plan("signal", contexts=60, layers=2, informative_layer=1, d_model=16)
SETTINGS = Settings(permutations=19, resamples=20, workers=1)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write(plant(PLAN), tmp_path_factory.mktemp("keep") / "run").path


@pytest.fixture(scope="module")
def analysis(original) -> Analysis:
    data = read([original], positions=["header_last"])
    return analyse(data, data.outcome, None, SETTINGS)


@pytest.fixture
def data(original, tmp_path) -> ProbeSet:
    return read([shutil.copytree(original, tmp_path / "run")], positions=["header_last"])


@pytest.fixture
def kept(data, analysis, monkeypatch) -> Kept:
    """Written once; its pictures aren't drawn."""
    monkeypatch.setattr("probes.report.files.save_figure", blank)
    kept = Kept.place(data, SETTINGS, "mine")
    kept.write(analysis, conclude(analysis))
    return kept


def blank(figure, folder, stem):
    for kind in KINDS:
        (folder / f"{stem}.{kind}").write_text("a picture")


def beside(kept: Kept, word: str):
    return kept.folder.with_name(f".{kept.folder.name}.{word}")


def alone(kept: Kept) -> bool:
    return [path.name for path in kept.folder.parent.iterdir()] == [kept.folder.name]


def other(analysis: Analysis) -> Analysis:
    """One whose files differ."""
    return replace(analysis, notes=["another one"])


def test_a_new_analysis_takes_the_place_of_the_old_one(kept, analysis):
    before = files(kept.folder)
    kept.write(analysis, conclude(analysis))
    assert files(kept.folder) == before and alone(kept)
    kept.write(other(analysis), conclude(analysis))
    changed = {name for name, content in files(kept.folder).items() if content != before[name]}
    assert changed == {"card.json"} and alone(kept)
    assert Probe.load(kept.folder).card["notes"] == ["another one"]


def test_a_moved_run_is_the_same_run(kept, data, tmp_path):
    moved = shutil.move(data.runs[0].path, tmp_path / "moved")
    again = Kept.place(read([moved], positions=["header_last"]), SETTINGS, "mine")
    assert again.folder == tmp_path / "moved" / "probes" / "mine"


@pytest.mark.parametrize("replacing", [False, True])
def test_what_no_analysis_wrote_is_never_replaced(kept, replacing):
    (kept.folder / "notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"holds what no analysis wrote \(notes.md\)"):
        Kept.place(kept.data, SETTINGS, "mine", replace=replacing)
    file = kept.folder.parent / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match="file is a file"):
        Kept.place(kept.data, SETTINGS, "file", replace=replacing)
    assert file.read_text() == (kept.folder / "notes.md").read_text() == "mine"


def test_an_empty_folder_is_free_and_an_analysis_without_its_card_is_not(kept):
    (kept.folder.parent / "empty").mkdir()
    assert Kept.place(kept.data, SETTINGS, "empty")
    (kept.folder / "card.json").write_text("{")
    with pytest.raises(UserError, match=r"card.json is missing or can't be read; .*--replace"):
        Kept.place(kept.data, SETTINGS, "mine")
    assert Kept.place(kept.data, SETTINGS, "mine", replace=True)


def test_sources_in_tables_hold_no_control_characters(kept):
    sources = pd.read_parquet(kept.folder / "predictions.parquet")["source"]
    assert sources.map(str.isprintable).all() and sources.str.contains("/").all()


# -- killed ---------------------------------------------------------------------------------------


def test_what_a_kill_left_aside_is_brought_back(kept, analysis):
    """Killed between the two renamings: neither is in its place."""
    before = files(kept.folder)
    shutil.copytree(kept.folder, beside(kept, "new"))
    os.replace(kept.folder, beside(kept, "old"))
    again = Kept.place(kept.data, SETTINGS, "mine")
    assert files(again.folder) == before
    assert not beside(kept, "old").exists()
    again.write(other(analysis), conclude(analysis))
    assert alone(kept) and Probe.load(kept.folder).card["notes"] == ["another one"]


def test_what_is_brought_back_is_not_replaced_unasked(kept):
    before = files(kept.folder)
    os.replace(kept.folder, beside(kept, "old"))
    with pytest.raises(UserError, match="differs in settings"):
        Kept.place(kept.data, replace(SETTINGS, seed=1), "mine")
    assert files(kept.folder) == before and alone(kept)
    assert Kept.place(kept.data, replace(SETTINGS, seed=1), "mine", replace=True)


def test_the_new_one_stays_if_it_is_in_its_place_already(kept, analysis):
    """Killed after the second renaming: the old one is no longer wanted."""
    shutil.copytree(kept.folder, beside(kept, "old"))
    kept.write(other(analysis), conclude(analysis))
    shutil.copytree(kept.folder, beside(kept, "old"))
    (beside(kept, "old") / "card.json").write_text("older")
    before = files(kept.folder)
    Kept.place(kept.data, SETTINGS, "mine")
    assert files(kept.folder) == before and alone(kept)


def test_half_of_a_new_one_is_no_hindrance(kept, analysis):
    half = beside(kept, "new")
    half.mkdir()
    (half / "estimates.parquet").write_text("half")
    (half / "leftover").write_text("of a killed one")
    before = files(kept.folder)
    kept.write(analysis, conclude(analysis))
    assert files(kept.folder) == before and alone(kept)


# -- failures while writing -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "^C"])
def test_a_failure_while_filling_leaves_the_old_one_as_it_was(kept, analysis, monkeypatch, error):
    before = files(kept.folder)

    def fail(*args):
        raise error

    monkeypatch.setattr(Probe, "save", fail)
    with pytest.raises(type(error)):
        kept.write(other(analysis), conclude(analysis))
    assert files(kept.folder) == before and alone(kept)


@pytest.mark.parametrize("failing", [1, 2], ids=["the old one aside", "the new one in place"])
def test_a_renaming_that_fails_leaves_the_old_one_as_it_was(kept, analysis, monkeypatch, failing):
    before, rename, renamed = files(kept.folder), os.replace, []

    def once(source, target):
        if kept.folder in (source, target):
            renamed.append(source)
            if len(renamed) == failing:
                raise PermissionError("held open by another program")
        return rename(source, target)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(PermissionError, match="held open"):
        kept.write(other(analysis), conclude(analysis))
    assert len(renamed) >= failing
    assert files(kept.folder) == before and alone(kept)
    kept.write(other(analysis), conclude(analysis))
    assert alone(kept) and Probe.load(kept.folder).card["notes"] == ["another one"]


def test_a_first_one_that_fails_leaves_nothing(data, analysis, monkeypatch):
    kept = Kept.place(data, SETTINGS, "first")
    assert not kept.folder.exists()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(Probe, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        kept.write(analysis, conclude(analysis))
    assert list(kept.folder.parent.iterdir()) == []
