"""Labels of judges and people: their files are read as they were written, or not at all."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from judging import ROWS as COUNT
from judging import keys_of
from runs import files_under, with_column, write_by_hand

from ia_mech.errors import UserError
from ia_mech.judge.rubric import BUILT_IN, CANNOT_ASSESS, FOLLOW_UP
from ia_mech.run import Run
from ia_mech.run.labels import ANNOTATIONS, JUDGEMENTS, KEY, Labels
from ia_mech.run.sources import sources_of

WHO = {"identity": {"kind": "builtin", "model": "ü"}, "repeats": 1}
VERDICTS = [
    {"category": FOLLOW_UP, "follow_up": True, "status": "judged", "rationale": "asks “why”\n日本"},
    {"category": "new_topic", "follow_up": False, "status": "judged", "scores": '{"generic": 0.5}'},
    {"category": CANNOT_ASSESS, "follow_up": None, "status": "judged", "cost": 0.25},
    {"category": None, "follow_up": None, "status": "refused", "error": "no", "cached": True},
]
ROWS = [
    {
        "context_id": f"c{i}",
        "temperature": 0.7 * i,
        "sampled_tokens": 6 * (i > 0),
        "sample": i,
        **verdict,
    }
    for i, verdict in enumerate(VERDICTS)
]
LABELS = [
    {"context_id": "c0", "temperature": 0.0, "sampled_tokens": 0, "sample": 0}
    | {"category": FOLLOW_UP, "follow_up": True}
    | {"note": "sicher", "sheet": "sheet-1", "stratum": "generic", "inclusion_probability": 0.125},
    {"context_id": "c1", "temperature": 1.0, "sampled_tokens": 6, "sample": 3}
    | {"category": CANNOT_ASSESS},
]
BAD_NAMES = ["", ".", "../x", "a/b", "a\\b", ".hidden", "-x", "a b", "a\n", "é", "a" * 101]


@pytest.fixture
def labels(tmp_path) -> Labels:
    (tmp_path / "run").mkdir()
    return labels_in(tmp_path / "run")


def labels_in(path, turns: str = "turns") -> Labels:
    return Labels(SimpleNamespace(path=path, turns_digest=turns))


# -- round trips --------------------------------------------------------------------------------


def test_judgements_come_back_as_they_were_written(labels):
    path = labels.write_judgements("builtin", ROWS, WHO)
    assert path == labels.path / "judgements" / "builtin.parquet"
    frame = labels.judgements("builtin")
    assert list(frame.columns) == JUDGEMENTS.names
    for (_, row), written in zip(frame.iterrows(), ROWS, strict=True):
        assert row.dropna().to_dict().items() >= {k: v for k, v in written.items() if v}.items()
    assert frame["category"].isna().tolist() == [False, False, False, True]
    assert frame["follow_up"].dtype == "boolean" and frame["follow_up"].mean() == 0.5
    assert frame["follow_up"].tolist() == [True, False, pd.NA, pd.NA]
    # Again: rows and record are replaced.
    labels.write_judgements("builtin", ROWS[:1], {"identity": {}})
    assert len(labels.judgements("builtin")) == 1
    assert labels.record("judgements", "builtin") == {"identity": {}}
    assert files_under(labels.path) == ["judgements/builtin.parquet"]


def test_annotations_and_sheets_come_back_as_they_were_written(labels):
    path = labels.write_annotations("anna", LABELS, {"sheets": ["sheet-1"]})
    assert path == labels.path / "annotations" / "anna.parquet"
    frame = labels.annotations("anna")
    assert list(frame.columns) == ANNOTATIONS.names and frame["follow_up"].dtype == "boolean"
    assert [row.dropna().to_dict() for _, row in frame.iterrows()] == LABELS
    assert labels.record("annotations", "anna") == {"sheets": ["sheet-1"]}
    key = {"rows": [["c0", 0.0, 0]], "judge": "builtin", "note": "日本"}
    path = labels.write_sheet("sheet-1", key)
    assert path == labels.path / "annotations" / "sheets" / "sheet-1.json"
    assert labels.sheet("sheet-1") == key


def test_the_key_of_a_sheet_that_can_not_be_read_is_refused_by_name(labels):
    path = labels.write_sheet("sheet-1", {"n": 1})
    for content in (b"{}", b"[]"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path} is damaged \(.*; export another sheet"):
            labels.sheet("sheet-1")


def test_labels_of_other_turns_are_refused(labels):
    labels.write_judgements("builtin", ROWS, WHO)
    labels.write_annotations("anna", LABELS, {})
    labels.write_sheet("sheet-1", {"n": 1})
    again = labels_in(labels.path, turns="other turns")
    for read, remedy in (
        (lambda: again.judgements("builtin"), "judge run"),
        (lambda: again.decoys("builtin"), "judge run"),
        (lambda: again.annotations("anna"), "annotate import"),
        (lambda: again.sheet("sheet-1"), "export and annotate a new sheet"),
    ):
        with pytest.raises(UserError, match=rf"was sampled again since; .*{remedy}"):
            read()


def test_verdicts_under_another_name_are_refused(labels):
    labels.write_judgements("builtin", [], {})
    (labels.path / "judgements/builtin.parquet").rename(labels.path / "judgements/strict.parquet")
    with pytest.raises(
        UserError, match=r"strict\.parquet can't be read \(it holds the judgements of"
    ):
        labels.judgements("strict")


def test_the_digest_of_turns_tells_texts_apart(tmp_path):
    def change(stored: list) -> None:
        stored[1] = with_column("text", "another")(stored[1])

    runs = [write_by_hand(tmp_path / f"{n}", how) for n, how in enumerate([None, None, change])]
    assert runs[0].turns_digest == runs[1].turns_digest != runs[2].turns_digest


# -- what is there ------------------------------------------------------------------------------


def test_labels_leave_the_rest_of_the_run_as_it_was(merged, tmp_path):
    run = Run.open(shutil.copytree(merged.path, tmp_path / "run"))
    before = files_under(run.path)
    run.labels.write_judgements("builtin", ROWS, WHO)
    run.labels.write_annotations("anna", LABELS, {})
    added = ["annotations/anna.parquet", "judgements/builtin.parquet"]
    assert files_under(run.path) == sorted(before + added)
    again = Run.open(run.path)
    assert again.digest() == merged.digest() and again.verify() == []


# -- laid out over the turns --------------------------------------------------------------------


def test_labels_are_laid_out_over_the_turns_whatever_their_order(run, capsys):
    """They equal a look-up by key, row by row: verdicts, failures, turns not assessed, and gaps."""
    keys = keys_of(run)
    said = [[FOLLOW_UP, "new_topic", CANNOT_ASSESS, None][i % 4] for i in range(COUNT)]
    order = np.random.default_rng(0).permutation(COUNT)
    verdicts = [
        keys[i]
        | {"category": said[i], "follow_up": BUILT_IN.follow_up(said[i]), "rationale": f"{i}"}
        for i in order
    ]
    shown = keys[20]["context_id"]
    decoys = [keys[i] | {"category": said[i], "decoy": "sibling", "shown": shown} for i in (9, 4)]
    run.labels.write_judgements("builtin", verdicts + decoys, {})
    of_sheet = {"sheet": "s", "stratum": "all", "inclusion_probability": 0.25}
    labels = [keys[i] | of_sheet | {"category": FOLLOW_UP, "follow_up": True} for i in (7, 3)]
    run.labels.write_annotations("anna", labels, {})

    frame = run.labelled("builtin", "anna", ["rationale"])
    assert frame[list(KEY)].to_dict("records") == keys
    assert frame["category"].tolist() == [category or "failed" for category in said]
    number = {None: np.nan, True: 1.0, False: 0.0}
    expected = [number[BUILT_IN.follow_up(category)] for category in said]
    np.testing.assert_array_equal(frame["follow_up"], expected)
    assert frame["rationale"].tolist() == [str(i) for i in range(COUNT)]
    assert np.flatnonzero(frame["truth"] == 1).tolist() == [3, 7]
    assert frame["truth_category"].notna().sum() == 2 and frame["inclusion"].sum() == 0.5
    source_of = dict(zip(run.contexts["context_id"], sources_of(run.contexts), strict=True))
    own = run.labelled("builtin", texts=False)["source"]
    assert own.tolist() == [source_of[key["context_id"]] for key in keys]

    with pytest.raises(UserError, match="ia-mech judge run"):
        run.decoys("unjudged")
    found = run.decoys("builtin")
    assert found["row"].tolist() == [9, 4] and set(found["decoy"]) == {"sibling"}
    assert set(found["shown_source"]) == {source_of[shown]}
    assert found["source"].tolist() == [source_of[keys[i]["context_id"]] for i in (9, 4)]
    assert run.decoys("anna").empty and "category" not in run.labelled(annotator="anna")
    assert run.labelled()["category"].tolist() == frame["category"].tolist()
    assert frame["text"].tolist() == run.generations["text"].tolist()
    said = {row.context_id: row.messages[-2:] for row in run.contexts.itertuples()}
    for name, at in (("query", 0), ("response", 1)):
        assert frame[name].tolist() == [said[c][at]["content"] for c in frame["context_id"]]
    assert not {"query", "response", "text"} & {*run.labelled(texts=False)}
    run.labels.write_judgements("other", verdicts, {})
    assert run.labelled()["category"].tolist() == frame["category"].tolist()
    assert "by builtin, other: the built-in judge's count" in capsys.readouterr().err
    run.labels.write_judgements("another", verdicts, {})
    run.labels.remove("judgements", "builtin")
    with pytest.raises(UserError, match=r"by another, other; name the judge .*--judge NAME, or ju"):
        run.labelled()
    with pytest.raises(UserError, match=r"no judgements of 'builtin'; choose from: another, other"):
        run.labels.remove("judgements", "builtin")


# -- names --------------------------------------------------------------------------------------


def test_a_name_that_can_not_be_a_files_writes_nothing(labels):
    for name in BAD_NAMES:
        for write in (
            lambda name: labels.write_judgements(name, ROWS, WHO),
            lambda name: labels.write_annotations(name, LABELS, {}),
            lambda name: labels.write_sheet(name, {}),
        ):
            with pytest.raises(UserError, match="can't name a file; use letters, digits, dots, da"):
                write(name)
    assert list(labels.path.parent.rglob("*")) == [labels.path]


# -- replaced whole -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(labels, monkeypatch, step):
    path = labels.write_judgements("builtin", ROWS, WHO)
    before = path.read_bytes()

    def full(*arguments):
        if step == "write":
            arguments[0].where.write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        *((pq.ParquetWriter, "write_table") if step == "write" else (os, "replace")), full
    )
    with pytest.raises(OSError, match="No space left"):
        labels.write_judgements("builtin", ROWS[:1], {})
    assert path.read_bytes() == before
    assert files_under(labels.path) == ["judgements/builtin.parquet"]
    monkeypatch.undo()
    labels.write_judgements("builtin", ROWS[:1], {})
    assert len(labels.judgements("builtin")) == 1


# -- what can't be read -------------------------------------------------------------------------


def test_an_unknown_judge_is_refused_naming_those_there(labels):
    for read in (labels.judgements, lambda name: labels.record("judgements", name)):
        with pytest.raises(UserError, match="run has no judgements of 'gpt'; run: ia-mech judge"):
            read("gpt")
    labels.write_judgements("builtin", ROWS, WHO)
    labels.write_judgements("other", ROWS, WHO)
    # A command without --judge would give the built-in judge's verdicts that name.
    with pytest.raises(UserError, match=r"of 'gpt'; give one of builtin, other, or .* --judge …"):
        labels.judgements("gpt")


def test_a_file_that_can_not_be_read_is_refused_by_name(labels):
    """No Parquet, half of a Parquet file, another table, and a damaged record."""
    path = labels.write_judgements("builtin", ROWS, WHO)
    whole, table = path.read_bytes(), pq.read_table(path)

    def damage():
        path.write_bytes(b"not Parquet")
        yield
        path.write_bytes(whole[:-20])
        yield
        pq.write_table(pa.table({"context_id": ["c0"], "follow_up": [True]}), path)
        yield
        for record in ("3", "[]", "{}", "no JSON"):
            pq.write_table(table.replace_schema_metadata({"ia_mech": record}), path)
            yield

    (labels.path / "annotations").mkdir()
    for _ in damage():
        shutil.copy(path, labels.path / "annotations")
        for kind, read in (("judgements", labels.judgements), ("annotations", labels.annotations)):
            problem = rf"(?s){kind}/builtin\.parquet can't be read \(.*; remove it and run: "
            with pytest.raises(UserError, match=problem):
                read("builtin")
            with pytest.raises(UserError, match=problem):
                labels.record(kind, "builtin")
