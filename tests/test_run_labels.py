"""What judges and people say of a run: files that come back as they were, or not at all."""

import json
import os
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import files_under

from ia_mech.errors import UserError
from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE
from ia_mech.run import Run
from ia_mech.run.labels import ANNOTATIONS, JUDGEMENTS, KEY, Labels

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
BAD_NAMES = ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "-x", "_x", "a b", "a\n", "é"]


@pytest.fixture
def labels(tmp_path) -> Labels:
    (tmp_path / "run").mkdir()
    return labels_in(tmp_path / "run")


def labels_in(path, run: str = "0123456789abcdef", turns: str = "turns") -> Labels:
    return Labels(SimpleNamespace(path=path, identity_digest=run, turns_digest=turns))


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


def test_genuine_is_nullable(labels):
    labels.write_judgements("rules", ROWS, WHO)
    genuine = labels.judgements("rules")["genuine"]
    assert genuine.dtype == "boolean"
    assert genuine.tolist() == [True, False, pd.NA, pd.NA]
    assert genuine.mean() == 0.5
    labels.write_annotations("anna", [LABELS[1]], {})
    assert labels.annotations("anna")["genuine"].dtype == "boolean"
    assert labels.annotations("anna")["genuine"].isna().all()


def test_annotations_come_back_as_they_were_written(labels):
    path = labels.write_annotations("anna", LABELS, {"sheets": ["sheet-1"]})
    assert path == labels.path / "annotations" / "anna.parquet"
    frame = labels.annotations("anna")
    assert list(frame.columns) == ANNOTATIONS.names
    assert frame.iloc[0].dropna().to_dict() == LABELS[0]
    assert frame[list(KEY)].iloc[1].tolist() == ["c1", 1.0, 3]
    assert frame["note"].isna().tolist() == [False, True]
    assert labels.record("annotations", "anna") == {"sheets": ["sheet-1"]}


def test_sheets_come_back_as_they_were_written(labels):
    key = {"rows": [["c0", 0.0, 0]], "judge": "rules", "note": "日本"}
    path = labels.write_sheet("sheet-1", key)
    assert path == labels.path / "annotations" / "sheets" / "sheet-1.json"
    assert labels.sheet("sheet-1") == key


def test_a_sheet_that_is_not_this_one_is_refused_by_name(labels, tmp_path):
    path = labels.write_sheet("sheet-1", {"n": 1})
    whole = path.read_bytes()
    another = labels.write_sheet("sheet-2", {"n": 2}).read_bytes()
    (tmp_path / "other").mkdir()
    elsewhere = labels_in(tmp_path / "other", "fedcba9876543210").write_sheet("sheet-1", {"n": 1})
    for content in (b"{}", b"[]", another, elsewhere.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path} is damaged \(.*; export another sheet"):
            labels.sheet("sheet-1")
    path.write_bytes(whole)
    assert labels.sheet("sheet-1") == {"n": 1}


def test_labels_of_other_turns_are_refused(labels):
    labels.write_judgements("rules", ROWS, WHO)
    labels.write_annotations("anna", LABELS, {})
    labels.write_sheet("sheet-1", {"n": 1})
    again = labels_in(labels.path, turns="other turns")
    for read, remedy in (
        (lambda: again.judgements("rules"), "judge run"),
        (lambda: again.decoys("rules"), "judge run"),
        (lambda: again.annotations("anna"), "judge import"),
        (lambda: again.sheet("sheet-1"), "export and annotate a new sheet"),
    ):
        with pytest.raises(UserError, match=rf"was sampled again since; .*{remedy}"):
            read()


def test_the_digest_of_turns_tells_texts_apart(merged):
    whole, parted = Run(merged.path), Run(merged.path)
    whole.generations  # noqa: B018 (read at once, not part by part)
    assert whole.turns_digest == parted.turns_digest
    changed = Run(merged.path)
    changed.generations.loc[3, "text"] += "."
    assert changed.turns_digest != whole.turns_digest


def test_labels_leave_the_rest_of_the_run_as_it_was(merged, run):
    before = files_under(run.path)
    run.labels.write_judgements("rules", ROWS, WHO)
    run.labels.write_annotations("anna", LABELS, {})
    added = ["annotations/anna.parquet", "judgements/rules.parquet"]
    assert files_under(run.path) == sorted(before + added)
    again = Run.open(run.path)
    assert again.digest() == merged.digest() and again.verify() == []


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BAD_NAMES, "a" * 101])
def test_a_name_that_can_not_be_a_files_writes_nothing(labels, name):
    for write in (
        lambda: labels.write_judgements(name, ROWS, WHO),
        lambda: labels.write_annotations(name, LABELS, {}),
        lambda: labels.write_sheet(name, {}),
    ):
        with pytest.raises(UserError, match="can't name a file; use letters, digits, dots, dashes"):
            write()
    assert list(labels.path.parent.rglob("*")) == [labels.path]


# -- replaced whole -----------------------------------------------------------------------------


def test_writing_again_replaces_rows_and_record(labels):
    labels.write_judgements("rules", ROWS, WHO)
    labels.write_judgements("rules", ROWS[:1], {"identity": {}})
    assert len(labels.judgements("rules")) == 1
    assert labels.record("judgements", "rules") == {"identity": {}}
    assert files_under(labels.path) == ["judgements/rules.parquet"]


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(labels, monkeypatch, step):
    path = labels.write_judgements("rules", ROWS, WHO)
    before = path.read_bytes()

    def full(*arguments):
        if step == "write":
            arguments[0].where.write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        *((pq.ParquetWriter, "write_table") if step == "write" else (os, "replace")), full
    )
    with pytest.raises(OSError, match="No space left"):
        labels.write_judgements("rules", ROWS[:1], {})
    assert path.read_bytes() == before
    assert files_under(labels.path) == ["judgements/rules.parquet"]
    monkeypatch.undo()
    labels.write_judgements("rules", ROWS[:1], {})
    assert len(labels.judgements("rules")) == 1


# -- what can't be read -------------------------------------------------------------------------


def test_an_unknown_judge_is_refused_naming_those_there(labels):
    # A command without --judge would give the rules judge's verdicts that name.
    command = r"run: python -m ia_mech\.judge run \S+/run --judge … --name gpt$"
    expected = r"run has no judgements of 'gpt'; " + command
    for read in (labels.judgements, lambda name: labels.record("judgements", name)):
        with pytest.raises(UserError, match=expected):
            read("gpt")
    labels.write_judgements("rules", ROWS, WHO)
    labels.write_judgements("other", ROWS, WHO)
    for read in (labels.judgements, lambda name: labels.record("judgements", name)):
        with pytest.raises(UserError, match=r"of 'gpt'; give one of other, rules, or " + command):
            read("gpt")


def test_a_file_that_is_not_of_these_labels_is_refused_by_name(labels):
    path = labels.write_judgements("rules", ROWS, WHO)
    table = pq.read_table(path)
    others = [pa.table({"context_id": ["c0"], "genuine": [True]})]
    others += [table.replace_schema_metadata({"ia_mech": text}) for text in ("3", "[]", "{}", "no")]
    contents = [b"not Parquet", path.read_bytes()[:-20]]
    for other in others:
        pq.write_table(other, path)
        contents.append(path.read_bytes())
    (labels.path / "annotations").mkdir()
    for content in contents:
        for kind in ("judgements", "annotations"):
            (labels.path / kind / "rules.parquet").write_bytes(content)
            said = rf"(?s){kind}/rules\.parquet can't be read \(.*; remove it and run: python"
            with pytest.raises(UserError, match=said):
                getattr(labels, kind)("rules")
            with pytest.raises(UserError, match=said):
                labels.record(kind, "rules")
