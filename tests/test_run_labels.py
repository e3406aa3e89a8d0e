"""What judges and people say of a run: files that come back as they were, or not at all."""

import json
import os
import shutil

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import files_under

from ia_mech.errors import UserError
from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE
from ia_mech.run import Run
from ia_mech.run.labels import ANNOTATIONS, JUDGEMENTS, KEY, Labels, check_name

WHO = {"identity": {"kind": "rules", "model": "ü"}, "repeats": 1}
VERDICTS = [
    {"category": GENUINE, "genuine": True, "status": "judged", "rationale": "asks “why”\n日本"},
    {"category": "new_topic", "genuine": False, "status": "judged", "scores": '{"generic": 0.5}'},
    {"category": CANNOT_ASSESS, "genuine": None, "status": "judged", "cost": 0.25},
    {"category": None, "genuine": None, "status": "refused", "error": "no", "cached": True},
]
ROWS = [
    {"context_id": f"c{i}", "temperature": 0.7 * i, "sample": i, "repeat": 0, **verdict}
    for i, verdict in enumerate(VERDICTS)
]
LABELS = [
    {"context_id": "c0", "temperature": 0.0, "sample": 0, "category": GENUINE, "genuine": True}
    | {"note": "sicher", "sheet": "sheet-1", "stratum": "generic", "inclusion_probability": 0.125},
    {"context_id": "c1", "temperature": 1.0, "sample": 3, "category": CANNOT_ASSESS},
]
BAD_NAMES = ["", "..", "../x", "a/b", "a\\b", ".hidden", "-x", "a b", "a\n", "é", "a" * 101]


@pytest.fixture
def labels(tmp_path) -> Labels:
    (tmp_path / "run").mkdir()
    return Labels(tmp_path / "run")


# -- round trips --------------------------------------------------------------------------------


def test_judgements_come_back_as_they_were_written(labels):
    path = labels.write_judgements("rules", ROWS, WHO)
    assert path == labels.path / "judgements" / "rules.parquet"
    frame = labels.judgements("rules")
    assert list(frame.columns) == JUDGEMENTS.names
    assert frame["context_id"].tolist() == ["c0", "c1", "c2", "c3"]
    assert frame["temperature"].tolist() == [0.7 * i for i in range(4)]
    assert frame["category"].tolist()[:3] == [GENUINE, "new_topic", CANNOT_ASSESS]
    assert frame["category"].isna().tolist() == [False, False, False, True]
    assert frame["rationale"][0] == "asks “why”\n日本"
    assert json.loads(frame["scores"][1]) == {"generic": 0.5}
    assert frame["cost"][2] == 0.25 and frame["cost"].isna().sum() == 3
    assert frame["error"][3] == "no" and frame["cached"][3]
    assert frame["genuine"].dtype == "boolean" and frame["genuine"].mean() == 0.5
    assert frame["genuine"].tolist() == [True, False, pd.NA, pd.NA]
    assert labels.record("judgements", "rules") == WHO
    labels.write_judgements("rules", [], {"identity": {}})  # replaced whole
    assert labels.judgements("rules").shape == (0, len(JUDGEMENTS))
    assert labels.record("judgements", "rules") == {"identity": {}}
    assert files_under(labels.path) == ["judgements/rules.parquet"]


def test_annotations_and_sheets_come_back_as_they_were_written(labels):
    path = labels.write_annotations("anna", LABELS, {"sheets": ["sheet-1"]})
    assert path == labels.path / "annotations" / "anna.parquet"
    frame = labels.annotations("anna")
    assert list(frame.columns) == ANNOTATIONS.names
    assert frame.iloc[0].to_dict() == LABELS[0]
    assert frame[list(KEY)].iloc[1].tolist() == ["c1", 1.0, 3]
    assert frame["note"].isna().tolist() == [False, True]
    assert frame["genuine"].dtype == "boolean" and pd.isna(frame["genuine"][1])
    assert labels.record("annotations", "anna") == {"sheets": ["sheet-1"]}
    key = {"rows": [["c0", 0.0, 0]], "judge": "rules", "note": "日本"}
    path = labels.write_sheet("anna", key)
    assert path == labels.path / "annotations" / "sheets" / "anna.json"
    assert labels.sheet("anna") == key
    assert (labels.annotators, labels.sheets) == (["anna"], ["anna"])


def test_files_open_in_pandas_and_without_a_record(labels):
    """A table that another program wrote has no record, and is read all the same."""
    path = labels.write_judgements("rules", ROWS, WHO)
    frame = pd.read_parquet(path)
    assert frame["context_id"].tolist() == ["c0", "c1", "c2", "c3"]
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    assert labels.record("judgements", "rules") == {}
    assert len(labels.judgements("rules")) == 4


# -- what is there ------------------------------------------------------------------------------


def test_labels_leave_the_rest_of_the_run_as_it_was(merged, tmp_path):
    run = Run.open(shutil.copytree(merged.path, tmp_path / "run"))
    before = files_under(run.path)
    assert run.labels.judges == run.labels.annotators == run.labels.sheets == []
    run.labels.write_judgements("rules", ROWS, WHO)
    run.labels.write_annotations("anna", LABELS, {})
    added = ["annotations/anna.parquet", "judgements/rules.parquet"]
    assert files_under(run.path) == sorted(before + added)
    again = Run.open(run.path)
    assert again.digest() == merged.digest() and again.verify() == []


def test_a_folder_name_with_an_equals_sign_adds_no_column(tmp_path):
    path = tmp_path / "seed=3" / "lr=0.1"
    path.mkdir(parents=True)
    labels = Labels(path)
    labels.write_judgements("rules", ROWS, WHO)
    assert list(labels.judgements("rules").columns) == JUDGEMENTS.names


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_can_not_be_a_files_writes_nothing_and_finds_nothing(labels, name):
    """Not even a file that is there: names don't lead out of the folder."""
    for write in (
        lambda: labels.write_judgements(name, ROWS, WHO),
        lambda: labels.write_annotations(name, LABELS, {}),
        lambda: labels.write_sheet(name, {}),
    ):
        with pytest.raises(UserError, match="can't name a file; use letters, digits, dots, dashes"):
            write()
    assert list(labels.path.parent.rglob("*")) == [labels.path]
    (labels.path / "judgements").mkdir()
    pq.write_table(pa.table({"x": [1]}), labels.path / "x.parquet")
    (labels.path / "annotations" / "sheets").mkdir(parents=True)
    (labels.path / "annotations" / "x.json").write_text("{}")
    for read in (labels.judgements, labels.annotations, labels.sheet):
        with pytest.raises(UserError, match=" has no "):
            read(name)


def test_names_are_listed_in_order_without_files_that_were_not_written_here(labels):
    names = ["7", "Qwen3_0.6B", "a" * 100, "gpt-5-mini", "rules"]
    for name in reversed(names):
        assert labels.write_judgements(check_name(name), ROWS, WHO).stem == name
    folder = labels.path / "judgements"
    for name in ("._rules.parquet", "rules.parquet.tmp", "notes.txt", "a b.parquet"):
        (folder / name).write_text("mine")
    (folder / "folder.parquet").mkdir()
    assert labels.judges == names


# -- replaced whole -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(labels, monkeypatch, step):
    path = labels.write_judgements("rules", ROWS, WHO)
    before = path.read_bytes()

    def full(*arguments):
        if step == "write":
            arguments[1].write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((pq, "write_table") if step == "write" else (os, "replace")), full)
    with pytest.raises(OSError, match="No space left"):
        labels.write_judgements("rules", ROWS[:1], {})
    assert path.read_bytes() == before
    assert files_under(labels.path) == ["judgements/rules.parquet"]
    monkeypatch.undo()
    labels.write_judgements("rules", ROWS[:1], {})
    assert len(labels.judgements("rules")) == 1


# -- what can't be read -------------------------------------------------------------------------


def test_an_unknown_name_is_refused_naming_those_there(tmp_path):
    labels = Labels(tmp_path / "a run")
    with pytest.raises(UserError, match=r"of 'gpt'; run: python -m \S+ run '\S+/a run'$"):
        labels.judgements("gpt")
    labels.write_judgements("rules", ROWS, WHO)
    labels.write_judgements("other", ROWS, WHO)
    labels.write_annotations("anna", LABELS, {})
    labels.write_sheet("one", {})
    for read, text in (
        (labels.judgements, r"of 'gpt' \(there are: other, rules\); run: python"),
        (lambda name: labels.record("judgements", name), r"\(there are: other, rules\); run: "),
        (labels.annotations, r"no annotations of 'gpt' \(there are: anna\); run: "),
        (lambda name: labels.record("annotations", name), r"\(there are: anna\); run: "),
        (labels.sheet, "no sheet 'gpt'; there are: one"),
    ):
        with pytest.raises(UserError, match=text):
            read("gpt")


@pytest.mark.parametrize("damage", [b"", b"not Parquet", "cut", "flipped"])
def test_a_file_that_is_not_parquet_is_refused_by_name(labels, damage):
    path = labels.write_judgements("rules", ROWS, WHO)
    whole = path.read_bytes()
    content = {"cut": whole[:-20], "flipped": whole[:-40] + b"\xff" * 30 + whole[-10:]}
    path.write_bytes(content.get(damage, damage))
    shutil.copytree(labels.path / "judgements", labels.path / "annotations")
    for read in (labels.judgements, lambda name: labels.record("judgements", name)):
        with pytest.raises(
            UserError, match=r"(?s)judgements/rules\.parquet can't be read \(.*remo"
        ):
            read("rules")
    for read in (labels.annotations, lambda name: labels.record("annotations", name)):
        with pytest.raises(
            UserError, match=r"(?s)annotations/rules\.parquet can't be read \(.*rem"
        ):
            read("rules")


def test_other_tables_damaged_records_and_damaged_sheets_are_refused_by_name(labels):
    path = labels.write_annotations("anna", LABELS, {})
    pq.write_table(pa.table({"context_id": ["c0"], "genuine": [True]}), path)
    with pytest.raises(UserError, match=r"anna\.parquet can't be read \(no column temperature, sa"):
        labels.annotations("anna")
    path = labels.write_judgements("rules", ROWS, WHO)
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"ia_mech": b"{"}), path)
    with pytest.raises(UserError, match=r"judgements/rules\.parquet can't be read"):
        labels.record("judgements", "rules")
    labels.write_sheet("one", {"rows": []}).write_text('{"rows": [')
    with pytest.raises(UserError, match=r"sheets/one\.json is damaged .*; export another sheet"):
        labels.sheet("one")
