"""Blind sheets: what is drawn, what is shown, and what comes back."""

import base64
import csv
import gzip
import io
import json
import re
import shutil
import subprocess
from collections import Counter

import pandas as pd
import pytest
from judging import ROWS, plant
from runs import files_under

from ia_mech.annotate import main
from ia_mech.errors import UserError
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import CANNOT_ASSESS, FOLLOW_UP, NAMES, heading
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
VERDICTS = ["repeats_query"] * 34 + ["degenerate"] * 14 + [FOLLOW_UP] * 7 + ["new_topic"] * 2
VERDICTS += [CANNOT_ASSESS] + [None] * 2


def spread(labels: list[str | None]) -> list[str | None]:
    """Labels, spread over the run's rows."""
    return [labels[i * 7 % len(labels)] for i in range(ROWS)]


@pytest.fixture
def judged(run) -> Run:
    plant(run, "builtin", spread(VERDICTS))
    return run


def exported(run: Run, n: int = 30, **options):
    sheet = export_sheet(run, n, **options)
    return sheet, write_sheet(run, sheet, run.path.parent / sheet.key["sheet"])


def own(sheet) -> list[dict]:
    """Where the sheet's rows are in the run, but for decoys."""
    return [place for place in sheet.key["items"].values() if "decoy" not in place]


def filled_in(sheet, blank: int = 0) -> list[dict]:
    """The sheet with a category in all rows but the last few, spelt as people do."""
    spelt = ["follow_up", "Generic", " new topic ", "CANNOT-ASSESS", "degenerate"]
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


@pytest.mark.parametrize("n", [6, 20])
def test_weights_of_every_stratum_add_up_to_its_rows(judged, n):
    sheet = export_sheet(judged, n)
    sizes = Counter(category or "failed" for category in VERDICTS)
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


def test_draws_repeat_and_sheets_are_independent(judged):
    assert export_sheet(judged, 20) == export_sheet(judged, 20)
    one, other = (export_sheet(judged, 20, name=name).key["items"] for name in ("one", "other"))
    rows = [{tuple(p[c] for c in KEY) for p in items.values()} for items in (one, other)]
    assert rows[0] != rows[1]
    assert not one.keys() & other.keys()  # an item belongs to one sheet


def test_which_judge_stratifies(run):
    sheet = export_sheet(run, 15)
    assert sheet.key["judge"] is None
    assert sheet.key["strata"] == {"all": {"rows": 60, "drawn": 15}}
    assert {p["inclusion_probability"] for p in own(sheet)} == {0.25}
    plant(run, "first", spread([FOLLOW_UP, "generic"]))
    assert export_sheet(run, 10).key["judge"]["name"] == "first"
    plant(run, "second", spread(["generic"]))
    with pytest.raises(UserError, match=r"labels by first, second; name the judge that counts"):
        export_sheet(run, 10)
    assert export_sheet(run, 10, judge="second").key["strata"].keys() == {"generic"}
    plant(run, "builtin", spread(VERDICTS))
    expected = {"name": "builtin", "identity_hash": "hash of builtin"}
    assert export_sheet(run, 10).key["judge"] == expected


def test_a_sheet_that_cannot_be_drawn(judged):
    for n, fragment in (
        (0, "has 60 user turns; give --n from 1 to 60"),
        (61, r"\(60 takes them all\)"),
        (5, "can't cover the 6 strata"),
    ):
        with pytest.raises(UserError, match=fragment):
            export_sheet(judged, n)


# -- what is shown --------------------------------------------------------------------------------


def test_the_sheet_is_blind(judged):
    sheet, files = exported(judged)
    items = items_of(judged, draw_decoys(judged, 1))
    items = {(i.query, i.response, i.turn) for i in items}
    assert judged.labels.sheet(sheet.key["sheet"]) == sheet.key
    assert files[0].read_bytes().startswith(b"\xef\xbb\xbf")  # for Excel
    for row in sheet.rows:
        assert tuple(row) == COLUMNS
        assert (row["query"], row["response"], row["user_turn"]) in items
        assert re.fullmatch("t[0-9a-f]{12}", row["item"])
        assert row["category"] == row["note"] == "" and row["response_complete"] is True
    contexts = judged.contexts
    forbidden = {*contexts["context_id"], *contexts["source_id"], *contexts["dataset"], *NAMES}
    forbidden |= {judged.model["name"], "builtin", "failed", "temperature", "0.7"}
    forbidden |= set(contexts["real_follow_up"].dropna())
    turns = {row[c] for row in sheet.rows for c in ("query", "response", "user_turn")}
    for file in files[:1]:
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
    assert (
        data.keys() == {"sheet", "digest", "rows", "categories"}
        and data["sheet"] == sheet.key["sheet"]
    )
    columns = COLUMNS[:-2]
    expected = [{name: row[name] for name in columns} for row in sheet.rows]
    for row in expected:
        row.update({name: visible(row[name]) for name in columns if name != "response_complete"})
    assert data["rows"] == expected
    assert [(c["key"], c["name"]) for c in data["categories"]] == list(
        zip("123456780", NAMES, strict=True)
    )


def test_an_unfinished_response_is_shown_as_one(judged):
    judged.contexts.loc[judged.contexts["context_id"] == "maths-01", "response_unfinished"] = True
    sheet = export_sheet(judged, 60)
    for row in sheet.rows:
        place = sheet.key["items"][row["item"]]
        cut = place.get("shown", place["context_id"]) == "maths-01"
        assert row["response_complete"] is not cut


def test_texts_survive_the_csv_and_none_is_a_formula():
    texts = ['a "quoted", one', "two\nlines\n\n", "a;b\tc", "Ünïcødé 🙂", "'=x", "", "1 = 2"]
    rows = [{"text": text, "number": 0.7} for text in texts]
    content = csv_bytes(pd.DataFrame(rows)).decode("utf-8-sig")
    back = list(csv.DictReader(io.StringIO(content, newline="")))
    assert [row["text"] for row in back] == texts
    assert spreadsheet_safe("a\x00b\rc\x1b") == "a�b\nc�"
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", " =1", "\n=1", "＝1+1", "－1", "\tx", "\r\nx"):
        assert spreadsheet_safe(text) == "'" + text.replace("\r\n", "\n")


# -- the way back ---------------------------------------------------------------------------------


WAYS = [
    lambda p, rows: save(p, rows, encoding="utf-8-sig"),
    lambda p, rows: save(p, rows[::-1], columns=("note", "category", "item")),
    lambda p, rows: save(p, rows, delimiter=";"),  # where a comma is the decimal mark
]


def test_there_and_back(judged):
    """Whatever program saved the sheet, and wherever it put the rows."""
    sheet, files = exported(judged)
    rows = filled_in(sheet)
    for number, way in enumerate(WAYS):
        file = way(files[0].with_name(f"filled-{number}.csv"), rows)
        import_sheet(judged, file, f"anna-{number}")
    first, *others = (
        judged.labels.annotations(name).sort_values(list(KEY), ignore_index=True)
        for name in judged.labels.annotators
    )
    assert len(others) == len(WAYS) - 1
    for other in others:
        pd.testing.assert_frame_equal(first, other)
    labels = first.set_index(list(KEY))
    decoys = judged.labels.decoys("anna-0", "annotations").set_index(list(KEY))
    assert len(labels) == 30 and len(decoys) == 8
    for row in rows:
        place = sheet.key["items"][row["item"]]
        of = decoys if "decoy" in place else labels
        label = of.loc[tuple(place[column] for column in KEY)]
        for column in {"decoy", "shown"} & place.keys():
            assert label[column] == place[column]
        category = row["category"].strip().lower().replace(" ", "_").replace("-", "_")
        assert label["category"] == category
        assert (label["follow_up"] is pd.NA) == (category == CANNOT_ASSESS)
        assert category == CANNOT_ASSESS or label["follow_up"] == (category == FOLLOW_UP)
        assert label["note"] == row["note"]
        assert label["stratum"] == place["stratum"] and label["sheet"] == sheet.key["sheet"]
        if "decoy" in place:
            assert pd.isna(label["inclusion_probability"])
        else:
            assert label["inclusion_probability"] == place["inclusion_probability"]
    record = judged.labels.record("annotations", "anna-0")
    assert record["sheet"] == sheet.key["sheet"] and record["judge"]["name"] == "builtin"
    save(files[0], rows, columns=("item", "category"))
    import_sheet(judged, files[0], "without-notes")
    assert set(judged.labels.annotations("without-notes")["note"]) == {""}


def test_what_is_filled_in_counts_as_the_sample(judged, capsys):
    sheet, files = exported(judged)
    rows = filled_in(sheet, 12)
    strata = {row["item"]: sheet.key["items"][row["item"]]["stratum"] for row in rows}
    for row in rows:
        if strata[row["item"]] in ("failed", FOLLOW_UP):
            row["category"] = ""
    file = save(files[0].with_name("part.csv"), rows)
    assert main(["import", str(judged.path), str(file), "--annotator", "anna"]) == 0
    # Which rows come last, and so stay blank, depends on the texts, and these on the CPU.
    labelled = {strata[row["item"]] for row in rows if row["category"].strip()}
    missing = map(heading, sorted(set(strata.values()) - labelled - {"decoy"}))
    assert f"no label is of the strata {', '.join(missing)}: no" in capsys.readouterr().out
    labels = judged.labels.annotations("anna")
    assert len(labels) == sum(
        bool(row["category"].strip()) and strata[row["item"]] != "decoy" for row in rows
    )
    sizes = Counter(category or "failed" for category in VERDICTS)
    totals = (1 / labels["inclusion_probability"]).groupby(labels["stratum"]).sum()
    assert totals.to_dict() == pytest.approx({s: sizes[s] for s in totals.index})


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


BAD = [  # content of a table, where ITEM is one of the sheet's items; and what is said of it
    (
        "item,category\nITEM,restatment\nITEM,x\nITEM,y\n",
        r"row 2 of .* unknown category 'restatment' \(and 2 rows more\); choose",
    ),
    ("item,category\nITEM,generic\nt00,generic", "row 3 of .* the item 't00'; keep the items"),
    ("item,category\nITEM,generic\n,generic", "row 3 of .* has the item ''"),
    ("item,category\nITEM,generic\nITEM,\nITEM,new topic", "row 4 .* 'new topic', unlike a"),
    ("item,note\nITEM,x\n", "has no column 'category'; keep the columns item, category, note"),
    ("item,category\nt00,generic\n", "annotations of another run: none of its 1 items"),
    ("item,category\nITEM,\n", "no row of .* has a category"),
    ("item,category\nITEM,né\n", "isn't CSV in UTF-8 .*position 29"),
    ('item,category\n"t12', "isn't CSV "),
    ("item,category\na,b\na,b,c", "isn't CSV .*Expected 2 fields in line 3, saw 3"),
    (None, "No such file"),
]


def test_bad_sheets_are_refused_in_one_line_and_nothing_is_written(judged, tmp_path, capsys):
    sheet, _ = exported(judged)
    before = files_under(judged.path)
    for number, (content, fragment) in enumerate(BAD):
        file = tmp_path / f"bad-{number}.csv"
        if content is not None:
            file.write_bytes(content.replace("ITEM", sheet.rows[3]["item"]).encode("cp1252"))
        assert main(["import", str(judged.path), str(file), "--annotator", "anna"]) == 2, fragment
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and re.search(fragment, error), (fragment, error)
    assert files_under(judged.path) == before


def test_a_file_holds_one_sheet_and_an_annotator_is_not_named_like_a_judge(judged):
    one, files = exported(judged, name="one")
    other, _ = exported(judged, name="other")
    file = save(files[0].with_name("both.csv"), filled_in(one) + filled_in(other))
    with pytest.raises(UserError, match=r"has the item .*a table of each sheet"):
        import_sheet(judged, file, "anna")
    with pytest.raises(UserError, match="has labels by a judge named 'builtin'; give another name"):
        import_sheet(judged, file, "builtin")


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


# -- what the page keeps --------------------------------------------------------------------------

BROWSER = """
const fs = require("fs"), vm = require("vm");
const kept = {}, tabs = [], files = [];
async function tab(file) {
  const page = fs.readFileSync(file, "utf-8"), elements = {}, keys = {};
  const made = () => ({ children: [], value: "", append() {}, setAttribute() {}, remove() {},
    replaceChildren() {}, addEventListener() {}, focus() {}, blur() {}, click() {} });
  const at = (id) => elements[id] ??= made();
  at("data").textContent = page.match(/id="data">([^<]*)</)[1];
  const told = [];
  tabs.push(told);
  const localStorage = { getItem: (key) => kept[key] ?? null, setItem: (key, value) => {
    kept[key] = value;  // browsers tell the other tabs
    tabs.filter((other) => other !== told).flat().forEach((listener) => listener({ key }));
  } };
  const window = { addEventListener: (_, listener) => told.push(listener) };
  const document = { createElement: made, getElementById: at,
    addEventListener: (_, press) => { keys.press = press; } };
  const script = page.match(/<script>([\\s\\S]*?)<\\/script>/)[1];
  vm.runInNewContext(script, { document, localStorage, window,
    confirm: () => true, atob, Blob, DecompressionStream, Response, Uint8Array,
    setTimeout: () => {}, URL: { createObjectURL(blob) { files.push(blob); } } });
  while (!at("state").textContent) await new Promise((done) => setTimeout(done, 5));
  return { press: (key) => keys.press({ key, preventDefault() {} }),
    state: () => at("state").textContent };
}
(async () => {
  const [first, second] = [await tab(process.argv[2]), await tab(process.argv[2])];
  for (const key of "12") first.press(key);
  for (const key of "34") second.press(key);
  const other = await tab(process.argv[3]), again = await tab(process.argv[2]);
  const [key] = Object.keys(kept), state = JSON.parse(kept[key]);
  state.notes[Object.keys(state.labels)[0]] = "so, \\"né\\";\\n1";
  kept[key] = JSON.stringify(state);
  again.press("e");
  const bytes = Buffer.from(await files[0].arrayBuffer()).toString("base64");
  console.log(JSON.stringify([again.state(), other.state(), Object.keys(kept).length, bytes]));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_tabs_of_a_page_keep_each_others_labels_and_pages_of_one_name_stay_apart(judged, tmp_path):
    pages = []
    for number, n in enumerate((12, 20)):
        run = Run.open(shutil.copytree(judged.path, tmp_path / f"{number}" / "run"))
        *_, page = write_sheet(run, export_sheet(run, n, name="sheet"), run.path.parent / "sheet")
        pages.append(str(page))
    script = tmp_path / "browser.js"
    script.write_text(BROWSER)
    done = subprocess.run(
        ["node", str(script), *pages], capture_output=True, text=True, check=True, timeout=60
    )
    *found, saved = json.loads(done.stdout)
    assert found == ["4 of 15 done", "0 of 25 done", 1]
    # What the page saves is a table that import reads.
    file = tmp_path / "sheet-filled.csv"
    file.write_bytes(base64.b64decode(saved))
    rows = read_sheet(file)
    assert rows["category"].tolist() == list(NAMES[:4])
    assert rows["note"].tolist() == ['so, "né";\n1', "", "", ""]
    import_sheet(Run.open(tmp_path / "0" / "run"), file, "anna")
