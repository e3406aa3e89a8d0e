"""Blind sheets: what is drawn, what is shown, and what comes back."""

import base64
import csv
import gzip
import io
import json
import re
from collections import Counter

import pandas as pd
import pytest
from judging import ROWS, plant
from runs import files_under

from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE, NAMES
from ia_mech.judge.sheets import (
    COLUMNS,
    allocate,
    csv_bytes,
    export_sheet,
    import_sheet,
    read_sheet,
    write_sheet,
)
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.untrusted import spreadsheet_safe, visible

# What the judge of these tests says of the run's 60 rows: strata of very different sizes.
SAID = ["prompt_restatement"] * 34 + ["degenerate"] * 14 + [GENUINE] * 7 + ["new_topic"] * 2
SAID += [CANNOT_ASSESS] + [None] * 2


def spread(labels: list[str | None]) -> list[list[str | None]]:
    """One repeat of labels, spread over the run's rows."""
    return [[labels[i * 7 % len(labels)] for i in range(ROWS)]]


@pytest.fixture
def judged(run) -> Run:
    plant(run, "rules", spread(SAID))
    return run


def exported(run: Run, n: int = 30, **options):
    sheet = export_sheet(run, n, **options)
    return sheet, write_sheet(run, sheet, run.path.parent / sheet.key["sheet"])


def own(sheet) -> list[dict]:
    """Where the sheet's rows are in the run, but for decoys."""
    return [place for place in sheet.key["items"].values() if "decoy" not in place]


def filled_in(sheet, blank: int = 0) -> list[dict]:
    """The sheet with a category in all rows but the last few, spelt as people do."""
    spelt = ["genuine_follow_up", "Generic", " new topic ", "CANNOT-ASSESS", "degenerate"]
    count = len(sheet.rows) - blank
    return [
        row | {"category": spelt[i % 5] if i < count else " ", "note": f"so, {i};\n“né”"}
        for i, row in enumerate(sheet.rows)
    ]


def save(path, rows, *, encoding="utf-8", columns=COLUMNS, **dialect):
    with open(path, "w", encoding=encoding, newline="") as handle:
        writer = csv.DictWriter(handle, columns, extrasaction="ignore", **dialect)
        writer.writeheader()
        writer.writerows(rows)
    return path


# -- drawing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 20, 60])
def test_weights_of_every_stratum_add_up_to_its_rows(judged, n):
    sheet = export_sheet(judged, n)
    sizes = Counter(category or "failed" for category in SAID)
    totals, drawn = Counter(), Counter()
    for place in own(sheet):
        totals[place["stratum"]] += 1 / place["inclusion_probability"]
        drawn[place["stratum"]] += 1
    assert totals == pytest.approx(sizes)
    assert drawn.total() == n == len(sheet.rows) - round(n / 4)
    for stratum, counts in sheet.key["strata"].items():
        assert counts == {"rows": sizes[stratum], "drawn": drawn[stratum]}
        assert drawn[stratum] >= min(sizes[stratum], 5, n // 6)


def test_allocation_lies_between_proportional_and_equal():
    drawn = allocate({"common": 10_000, "rare": 100, "tiny": 3}, 200)
    assert drawn == {"common": 179, "rare": 18, "tiny": 3}
    assert allocate({"only": 9}, 9) == {"only": 9}


@pytest.mark.slow
def test_every_row_of_a_stratum_is_as_likely(judged):
    seen = Counter()
    for seed in range(200):
        for place in own(export_sheet(judged, 20, seed=seed)):
            seen[place["stratum"], tuple(place[column] for column in KEY)] += 1
    common = [count for (stratum, _), count in seen.items() if stratum == "prompt_restatement"]
    probability = export_sheet(judged, 20).key["strata"]["prompt_restatement"]["drawn"] / 34
    assert len(common) == 34
    spread = 4.5 * (200 * probability * (1 - probability)) ** 0.5
    assert all(abs(count - 200 * probability) < spread for count in common)


def test_draws_repeat_and_sheets_are_independent(judged):
    assert export_sheet(judged, 20) == export_sheet(judged, 20)
    one, other = (export_sheet(judged, 20, name=name).key["items"] for name in ("one", "other"))
    rows = [{tuple(p[c] for c in KEY) for p in items.values()} for items in (one, other)]
    assert rows[0] != rows[1]
    assert not one.keys() & other.keys()  # an item belongs to one sheet


def test_without_a_judge_there_is_one_stratum(run):
    sheet = export_sheet(run, 15)
    assert sheet.key["judge"] is None
    assert sheet.key["strata"] == {"all": {"rows": 60, "drawn": 15}}
    assert {p["inclusion_probability"] for p in own(sheet)} == {0.25}


def test_which_judge_stratifies(run):
    plant(run, "first", spread([GENUINE, "generic"]))
    assert export_sheet(run, 10).key["judge"]["name"] == "first"
    plant(run, "second", spread(["generic"]))
    with pytest.raises(UserError, match=r"several judges \(first, second\); name the one"):
        export_sheet(run, 10)
    assert export_sheet(run, 10, by="second").key["strata"].keys() == {"generic"}
    plant(run, "rules", spread(SAID))
    expected = {"name": "rules", "identity_hash": "hash of rules"}
    assert export_sheet(run, 10).key["judge"] == expected
    with pytest.raises(UserError, match="has no judgements of 'third'"):
        export_sheet(run, 10, by="third")


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (0, "has 60 user turns; give --n from 1 to 60"),
        (-3, "has 60 user turns; give --n from 1 to 60"),
        (61, r"\(60 takes them all\)"),
        (5, "can't cover the 6 strata by judge 'rules'"),
    ],
)
def test_a_sheet_that_cannot_be_drawn(judged, n, said):
    with pytest.raises(UserError, match=said):
        export_sheet(judged, n)


# -- what is shown --------------------------------------------------------------------------------


def test_the_sheet_is_blind(judged):
    sheet, files = exported(judged)
    items = items_of(judged, draw_decoys(judged, 1))
    items = {(i.query, i.response, i.turn) for i in items}
    assert judged.labels.sheet(sheet.key["sheet"]) == sheet.key
    assert [json.loads(line) for line in files[1].read_text().splitlines()] == sheet.rows
    assert files[0].read_bytes().startswith(b"\xef\xbb\xbf")  # for Excel
    for row in sheet.rows:
        assert tuple(row) == COLUMNS
        assert (row["query"], row["response"], row["user_turn"]) in items
        assert re.fullmatch("t[0-9a-f]{12}", row["item"])
        assert row["category"] == row["note"] == "" and row["response_complete"] is True
    contexts = judged.contexts
    forbidden = {*contexts["context_id"], *contexts["source_id"], *contexts["dataset"], *NAMES}
    forbidden |= {judged.model["name"], "rules", "failed", "temperature", "0.7"}
    forbidden |= set(contexts["reference"].dropna())
    turns = {row[c] for row in sheet.rows for c in ("query", "response", "user_turn")}
    for file in files[:2]:
        text = file.read_text(encoding="utf-8-sig")
        shown = [word for word in forbidden if word in text or word in file.name]
        assert [word for word in shown if not any(word in turn for turn in turns)] == []
        assert judged.path.name not in file.stem.split("-")


def page_data(page: str) -> tuple[str, dict]:
    """A page without its data, and that data."""
    before, data, after = re.split(r'(?<=id="data">)(.*?)(?=</script>)', page, maxsplit=1)
    return before + after, json.loads(gzip.decompress(base64.b64decode(data)))


def test_the_page_holds_the_sheet_and_nothing_else(judged):
    sheet, (*_, page) = exported(judged)
    _, (*_, another) = exported(judged, 12, name="other")
    frame, data = page_data(page.read_text())
    assert page_data(another.read_text())[0] == frame  # it is alike whatever the sheet holds
    assert data.keys() == {"sheet", "rows", "categories"} and data["sheet"] == sheet.key["sheet"]
    columns = COLUMNS[:-2]
    expected = [{name: row[name] for name in columns} for row in sheet.rows]
    for row in expected:
        row.update({name: visible(row[name]) for name in columns if name != "response_complete"})
    assert data["rows"] == expected
    assert [(c["key"], c["name"]) for c in data["categories"]] == list(
        zip("123456780", NAMES, strict=True)
    )


def test_the_pages_json_is_read_as_other_sheets_are(judged, tmp_path):
    sheet, _ = exported(judged)
    rows = filled_in(sheet, blank=4)
    lines = tmp_path / "sheet.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exporting = [{name: row[name] for name in ("item", "category", "note")} for row in rows]
    file = tmp_path / "sheet.json"
    file.write_text(json.dumps(exporting, indent=1))
    import_sheet(judged, lines, "anna")
    import_sheet(judged, file, "bert")
    anna, bert = (judged.labels.annotations(name) for name in ("anna", "bert"))
    pd.testing.assert_frame_equal(anna, bert)
    for content, problem in (
        ("{}", "isn't a JSON list"),
        ("[3]", "object 1 of .* isn't a JSON object"),
        ("[{", "is not JSON"),
        ('[{"item": "t", "note": ""}]', "has no column 'category'"),
        ('[{"item": "t", "category": 3}]', "object 1 of .*category isn't a text"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=problem):
            read_sheet(file)


def test_a_cut_off_response_is_shown_as_one(judged):
    judged.contexts.loc[judged.contexts["context_id"] == "maths-01", "response_cut_off"] = True
    sheet = export_sheet(judged, 60)
    for row in sheet.rows:
        place = sheet.key["items"][row["item"]]
        cut = place.get("shown", place["context_id"]) == "maths-01"
        assert row["response_complete"] is not cut


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "\t=1", "\n=1", "＝1+1", "－1", "\tx", "\r\nx"],
)
def test_a_cell_is_no_formula(text):
    cell = spreadsheet_safe(text)
    assert cell.startswith("'") and cell[1:] == text.replace("\r\n", "\n")


def test_texts_survive_the_csv():
    texts = ['a "quoted", one', "two\nlines\n\n", "a;b\tc", "Ünïcødé 🙂", "'=x", "", "1 = 2"]
    rows = [{"text": text, "number": 0.7} for text in texts]
    content = csv_bytes(pd.DataFrame(rows)).decode("utf-8-sig")
    back = list(csv.DictReader(io.StringIO(content, newline="")))
    assert [row["text"] for row in back] == texts
    assert spreadsheet_safe("a\x00b\rc\x1b") == "a�b\nc�"


# -- the way back ---------------------------------------------------------------------------------


def _as_it_is(path, rows):
    path.write_bytes(csv_bytes(pd.DataFrame(rows, columns=COLUMNS)))
    return path


def _jsonl(path, rows, encoding="utf-8", end="\n"):
    path = path.with_suffix(".jsonl")
    text = "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    path.write_bytes((text + end).encode(encoding))
    return path


WAYS = {
    "as it is": _as_it_is,
    "quoted where needed, BOM": lambda p, rows: save(p, rows, encoding="utf-8-sig"),
    "shuffled, without texts": lambda p, rows: save(
        p, rows[::-1], columns=("note", "category", "item")
    ),
    "without notes": lambda p, rows: save(p, rows, columns=("item", "category")),
    "jsonl with BOM": lambda p, rows: _jsonl(p, rows, "utf-8-sig", "\r\n"),
}


@pytest.mark.parametrize("way", WAYS)
def test_there_and_back(judged, way):
    sheet, files = exported(judged)
    rows = filled_in(sheet)
    file = WAYS[way](files[0].with_name("filled.csv"), rows)
    import_sheet(judged, file, "anna")
    labels = judged.labels.annotations("anna").set_index(list(KEY))
    decoys = judged.labels.decoys("anna", "annotations").set_index(list(KEY))
    assert len(labels) == 30 and len(decoys) == 8
    for row in rows:
        place = sheet.key["items"][row["item"]]
        of = decoys if "decoy" in place else labels
        label = of.loc[tuple(place[column] for column in KEY)]
        assert [label[c] for c in ("decoy", "shown") if c in place] == [
            place[c] for c in ("decoy", "shown") if c in place
        ]
        category = row["category"].strip().lower().replace(" ", "_").replace("-", "_")
        assert label["category"] == category
        assert (label["genuine"] is pd.NA) == (category == CANNOT_ASSESS)
        assert category == CANNOT_ASSESS or label["genuine"] == (category == GENUINE)
        assert label["note"] == ("" if way == "without notes" else row["note"])
        assert label["stratum"] == place["stratum"] and label["sheet"] == sheet.key["sheet"]
        if "decoy" in place:
            assert pd.isna(label["inclusion_probability"])
        else:
            assert label["inclusion_probability"] == place["inclusion_probability"]
    record = judged.labels.record("annotations", "anna")
    assert record["sheet"] == sheet.key["sheet"] and record["judge"]["name"] == "rules"


def test_what_is_filled_in_counts_as_the_sample(judged, capsys):
    sheet, files = exported(judged)
    rows = filled_in(sheet, 12)
    strata = {row["item"]: sheet.key["items"][row["item"]]["stratum"] for row in rows}
    for row in rows:
        if strata[row["item"]] in ("failed", GENUINE):
            row["category"] = ""
    file = save(files[0].with_name("part.csv"), rows)
    assert main(["import", str(judged.path), str(file), "--annotator", "anna"]) == 0
    # Which rows come last, and so stay blank, depends on the texts, and these on the CPU.
    labelled = {strata[row["item"]] for row in rows if row["category"].strip()}
    missing = sorted(set(strata.values()) - labelled - {"decoy"})
    assert f"of a turn that the judge calls {' or '.join(missing)}: no" in capsys.readouterr().out
    labels = judged.labels.annotations("anna")
    assert len(labels) == sum(
        bool(row["category"].strip()) and strata[row["item"]] != "decoy" for row in rows
    )
    sizes = Counter(category or "failed" for category in SAID)
    totals = (1 / labels["inclusion_probability"]).groupby(labels["stratum"]).sum()
    assert totals.to_dict() == pytest.approx({s: sizes[s] for s in totals.index})


def test_an_item_that_stands_there_twice(judged):
    sheet, files = exported(judged)
    rows = filled_in(sheet)
    file = save(files[0].with_name("twice.csv"), [*rows, rows[0], rows[1] | {"category": ""}])
    import_sheet(judged, file, "anna")
    assert len(judged.labels.annotations("anna")) == 30
    save(file, [*rows, rows[0] | {"category": "degenerate"}])
    said = rf"row 40 of .*calls {rows[0]['item']} degenerate, and row 2 of .* genuine_follow_up; "
    with pytest.raises(UserError, match=said):
        import_sheet(judged, file, "anna", replace=True)


def test_labels_are_replaced_only_when_asked(judged):
    sheet, files = exported(judged)
    file = save(files[0].with_name("filled.csv"), filled_in(sheet))
    for annotator in ("anna", "bert"):
        import_sheet(judged, file, annotator)
    kept = (judged.path / "annotations/bert.parquet").read_bytes()
    with pytest.raises(UserError, match="'anna'; give another --annotator, or --replace"):
        import_sheet(judged, file, "anna")
    save(file, filled_in(sheet, 20))
    import_sheet(judged, file, "anna", replace=True)
    kinds = ("decoy" in sheet.key["items"][row["item"]] for row in sheet.rows[:18])
    assert len(judged.labels.annotations("anna")) == 18 - sum(kinds)
    assert (judged.path / "annotations/bert.parquet").read_bytes() == kept


def _bad_cells(column, value, at=3):
    def change(path, rows):
        return save(path, [row | {column: value} if i == at else row for i, row in enumerate(rows)])

    return change


def _bad_text(change, suffix=".csv"):
    def write(path, rows):
        path = (save if suffix == ".csv" else _jsonl)(path, rows)
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


BAD = {
    "a near category": (
        _bad_cells("category", "assistant_restatment"),
        "row 5 of .* has the unknown category 'assistant_restatment'; choose from gen",
    ),
    "an unknown item": (_bad_cells("item", "t000000000000"), "row 5 .* the item 't000000000000'"),
    "no item": (_bad_cells("item", ""), "row 5 of .* has the item ''"),
    "semicolons": (
        lambda p, rows: save(p, rows, delimiter=";"),
        "(isn't CSV |has no column 'item')",
    ),
    "another run's": (
        lambda p, rows: save(p, [r | {"item": f"t{i:012x}"} for i, r in enumerate(rows)]),
        "holds annotations of another run: none of its 38 items",
    ),
    "nothing filled in": (
        lambda p, rows: save(p, [r | {"category": ""} for r in rows]),
        "no row of .* has a category",
    ),
    "no category column": (
        lambda p, rows: save(p, rows, columns=("item", "note")),
        "has no column 'category'; keep the columns item, category, note",
    ),
    "latin-1": (
        _bad_text(lambda b: b + "né".encode("cp1252")),
        r"isn't UTF-8 \(byte 0xe9 in line",
    ),
    "an open quote": (_bad_text(lambda b: b + b'"t12'), "isn't CSV "),
    "too many cells": (
        _bad_text(lambda b: b + b"a,b,c,d,e,f,g,h,i\r\n"),
        "isn't CSV .*Expected 7 fields in line .* saw 9",
    ),
    "broken JSON": (
        _bad_text(lambda b: b.replace(b'"item"', b'"item', 1), ".jsonl"),
        "line 1 of .* is not JSON",
    ),
    "deep JSON": (_bad_text(lambda b: b"[" * 100_000, ".jsonl"), "line 1 of .* is not JSON"),
    "no file": (lambda p, rows: p, "there is no file"),
    "no file of that kind": (lambda p, rows: p / "none", "there is no file"),
    "a folder": (lambda p, rows: p.parent, "is a folder; check the path"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sheets_are_refused_in_one_line_and_nothing_is_written(judged, capsys, case):
    sheet, files = exported(judged)
    change, said = BAD[case]
    file = change(files[0].with_name("bad.csv"), filled_in(sheet))
    before = files_under(judged.path)
    assert main(["import", str(judged.path), str(file), "--annotator", "anna"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(said, error), error
    assert files_under(judged.path) == before


def test_a_file_holds_one_sheet(judged):
    one, files = exported(judged, name="one")
    other, _ = exported(judged, name="other")
    file = save(files[0].with_name("both.csv"), filled_in(one) + filled_in(other))
    with pytest.raises(UserError, match="mixes the sheets one and other"):
        import_sheet(judged, file, "anna")


def test_labels_of_turns_that_have_changed_are_refused(judged):
    sheet, files = exported(judged)
    file = save(files[0].with_name("filled.csv"), filled_in(sheet))
    again = Run.open(judged.path)
    again.generations["text"] += "!"
    with pytest.raises(UserError, match=r"is of other turns: .*; export and annotate a new sheet"):
        import_sheet(again, file, "anna")
    assert judged.labels.annotators == []


def test_an_annotator_is_not_named_like_a_judge(judged):
    sheet, files = exported(judged)
    file = save(files[0].with_name("filled.csv"), filled_in(sheet))
    with pytest.raises(UserError, match="has labels of a judge named 'rules'; give another name"):
        import_sheet(judged, file, "rules")


# -- files that appear together or not at all -----------------------------------------------------


def test_nothing_is_overwritten(judged, tmp_path):
    sheet, files = exported(judged)
    kept = [file.read_bytes() for file in files]
    with pytest.raises(UserError, match=f"has a sheet named '{sheet.key['sheet']}'"):
        exported(judged)
    other = export_sheet(judged, 30, name="other")
    files[0].unlink()
    before = files_under(tmp_path)
    with pytest.raises(UserError, match="exists; give another --out, or remove it"):
        write_sheet(judged, other, files[1].with_suffix(""))
    assert files_under(tmp_path) == before and files[1].read_bytes() == kept[1]
    with pytest.raises(UserError, match="there is no folder"):
        write_sheet(judged, other, tmp_path / "nowhere" / "sheet")
    with pytest.raises(UserError, match="lies inside the run"):
        write_sheet(judged, other, judged.path / "sheet")
    assert files_under(tmp_path) == before


# -- the command line -----------------------------------------------------------------------------


def test_export_and_import_say_what_they_did(judged, tmp_path, capsys):
    out = tmp_path / "for anna.csv"
    command = ["export", str(judged.path), "--n", "30", "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "30 of 60 turns, by categories of rules:" in said
    assert "  and 8 turns after contexts that they did not follow, as a control\n" in said
    assert re.search(r"genuine_follow_up +5 of +7\n", said)
    assert f"sheet: {out}\n" in said and "python -m ia_mech.judge rubric" in said
    assert f"next: python -m ia_mech.judge import {judged.path} '{out}' --annotator NAME\n" in said
    assert judged.labels.sheets == ["for-anna"]
    assert main(command) == 2
    assert capsys.readouterr().err.count("\n") == 1

    rows = [{**row._asdict(), "category": "generic"} for row in read_sheet(out)]
    save(out, rows[:20], columns=("item", "category"))
    assert main(["import", str(judged.path), str(out), "--annotator", "anna"]) == 0
    said = capsys.readouterr().out
    decoys = len(judged.labels.decoys("anna", "annotations"))
    assert 0 < decoys < 8  # of the first 20 rows, as the order is random
    count = 20 - decoys
    assert f"{count} of 30 rows labelled by anna: generic {count}\nand {decoys} decoys; " in said
    assert f"{30 - count} of the sheet's 30 rows have no category" in said
    assert f"next: python -m ia_mech.judge agreement {judged.path}" in said
