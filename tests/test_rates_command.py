"""python -m ia_mech.rates: which runs it takes, what it prints and writes, what it refuses."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import CONTEXTS, rehashed, rewritten, with_settings
from shell import Outcome, call, files, refusal

from ia_mech.judge.label import items_of
from ia_mech.judge.rubric import GENUINE
from ia_mech.judge.sheets import export_sheet, import_sheet, write_sheet
from ia_mech.rates import load
from ia_mech.rates.__main__ import build_parser, main
from ia_mech.rates.compute import COLUMNS, estimates
from ia_mech.rates.load import read_runs
from ia_mech.rates.show import examples_by_category
from ia_mech.run import Run
from ia_mech.run.labels import KEY

CAVEAT = "a heuristic, 0.9 of the time right"
RULES = {"identity": {"kind": "rules"}, "repeats": 1, "caveat": CAVEAT}


def category_of(key: tuple) -> str:
    """What the planted judge says: greedy never genuine, T = 1 always, T = 0.7 the first sample."""
    _, temperature, sample = key
    if temperature == 0:
        return "prompt_restatement"
    return GENUINE if temperature == 1 or sample == 0 else "new_topic"


def plant(run: Run, judge: str = "rules", *, say=category_of, record=RULES, change=None) -> None:
    """Verdicts as a judge writes them; ``change`` may alter the rows before."""
    rows = []
    keys = run.generations[list(KEY)].itertuples(index=False, name=None)
    for key, item in zip(keys, items_of(run), strict=True):
        category = say(key)
        rows.append(
            dict(zip(KEY, key, strict=True))
            | {"repeat": 0, "category": category, "genuine": category == GENUINE}
            | {"status": "judged" if category else "unparsable", "rationale": f"[because] {key}"}
            | {"item": item.key("", 0)[:16]}
        )
    run.labels.write_judgements(judge, change(rows) if change else rows, record)


def annotate(run: Run, annotator: str = "anna", *, rows: slice = slice(None), **columns) -> None:
    labels = [
        dict(zip(KEY, key, strict=True))
        | {"category": category_of(key), "genuine": category_of(key) == GENUINE}
        | {"inclusion_probability": 0.5}
        | columns
        for key in run.generations[list(KEY)].itertuples(index=False, name=None)
    ]
    run.labels.write_annotations(annotator, labels[rows], {})


@pytest.fixture
def copy(merged, tmp_path):
    """Copies of the sampled run, to be written to."""

    def make(name: str = "run") -> Run:
        return Run.open(shutil.copytree(merged.path, tmp_path / name))

    return make


@pytest.fixture
def run(copy) -> Run:
    made = copy()
    plant(made)
    return made


@pytest.fixture
def rates(capfd, monkeypatch):
    """Run the command line in this process, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    return lambda *arguments: call(main, [str(argument) for argument in arguments], capfd)


def rewrite(run: Run, kind: str, **columns) -> Run:
    """Change columns of ``contexts`` or ``generations``, as another sampling would have."""
    for path in (run.path / kind).iterdir():
        table = pq.read_table(path)
        for column, value in columns.items():
            values = [value(old) for old in table[column].to_pylist()]
            at = table.column_names.index(column)
            field = table.schema.field(column)
            table = table.set_column(at, field, pa.array(values, type=field.type))
        pq.write_table(table, path)
    return rehashed(run.path)


def refused(outcome: Outcome, *words: str) -> None:
    line = refusal(outcome)
    for word in words:
        assert word in line, line


# -- what it says --------------------------------------------------------------------------------


def test_every_rate_is_printed_with_an_interval(run, rates):
    outcome = rates(run.path)
    assert outcome.status == 0, outcome.err
    main_table = outcome.out.split("what the turns are")[0]
    lines = [line for line in main_table.splitlines() if line.startswith("│") and "dat" not in line]
    assert len(lines) == 12  # three datasets and all of them, each at three temperatures
    interval = r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]"
    for line in lines:
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert re.fullmatch(interval, cells[4]), line
        if "greedy" not in line:
            assert re.fullmatch(r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\]", cells[5]), line
            assert re.fullmatch(interval, cells[8]), line
    greedy, cooler, one = (next(x for x in lines if f" {t} │" in x) for t in ("greedy", "0.7", "1"))
    assert "0.00 [0.00" in greedy and "0.50 [" in cooler and "1.00 [" in one
    for note in (
        "over 6 comparisons and, as a family of its own, over the 2 of (all)",
        "by sign flips of whole sources, Holm",
        "fewer than 24 sources",
        CAVEAT,
        f"ia_mech.judge export {run.path}",
    ):
        assert note in outcome.out


def test_the_first_of_repeated_verdicts_counts(copy, rates):
    run = copy()

    def repeated(rows: list[dict]) -> list[dict]:
        return rows + [row | {"repeat": 1, "category": "generic"} for row in rows]

    record = {"identity": {"kind": "llm"}, "repeats": 2}
    plant(run, "gpt-x", change=repeated, record=record)
    outcome = rates(run.path)
    assert "heuristic" not in outcome.out and "judge gpt-x" in outcome.out
    assert "2 verdicts per turn, the first is used" in outcome.out
    turns = read_runs([run.path]).turns
    assert len(turns) == len(run.generations) and "generic" not in set(turns["category"])


def test_corrected_rates_name_who_annotated_and_how_many(run, rates):
    annotate(run)
    outcome = rates(run.path)
    assert outcome.status == 0, outcome.err
    count = len(run.generations)
    assert f"against anna's labels of {count} turns: sensitivity 1.00 [" in outcome.out
    assert "Rogan & Gladen" in outcome.out and "prediction-powered rate needs 30" in outcome.out
    annotate(run, rows=slice(0, 1))  # greedy only
    assert "Rogan & Gladen: undefined: annotations of one kind only" in rates(run.path).out
    turns = read_runs([run.path]).turns  # without a sheet, datasets that no label is of count
    assert set(turns.loc[turns["annotated"], "dataset"]) == {run.generations["dataset"].iloc[0]}
    annotate(run, rows=slice(0, 2), category="cannot_assess", genuine=None)
    assert "none of anna's labels is of a turn" in rates(run.path).out


def test_turns_of_the_judges_fit_are_counted_in_a_note(run, rates, monkeypatch):
    items = [item.key("", 0)[:16] for item in items_of(run)]
    monkeypatch.setattr(load, "fitted_items", lambda: frozenset(items[:3]))
    assert "judge's fit" not in rates(run.path).out  # nothing is corrected without labels
    annotate(run)
    found = read_runs([run.path])
    known = sum(item in items[:3] for item in items)
    assert found.turns["fitted"].sum() == known >= 3
    said = " ".join(rates(run.path).out.split())
    assert f"{known} of {len(items)} turns, {known} of them labelled, were in" in said


def sheet_by(run: Run, file: Path, *, leave: tuple[str, ...] = (), say=None) -> None:
    """Export a sheet of 40 rows, fill it in but for the strata in ``leave``, and import it."""
    sheet = export_sheet(run, 40, by="rules", name="sheet")
    write_sheet(run, sheet, file)
    items = sheet.key["items"]
    filled = [
        row | {"category": say or items[row["item"]]["stratum"]}
        for row in sheet.rows
        if items[row["item"]]["stratum"] not in (*leave, "decoy")
    ]
    path = file.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in filled))
    import_sheet(run, path, "anna")


def corrected_lines(outcome: Outcome) -> list[list[str]]:
    """T, Rogan & Gladen and prediction-powered of every line of the table."""
    table = outcome.out.split("corrected for judge errors")[1].split("against anna")[0]
    lines = [line for line in table.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.split("│")] for line in lines]
    return [[cell[2], cell[5], cell[6]] for cell in cells]


def test_a_stratum_that_was_left_out_is_not_made_up_for(run, rates, tmp_path):
    sheet_by(run, tmp_path / "sheet", leave=(GENUINE,))
    outcome = rates(run.path)
    assert outcome.status == 0, outcome.err
    assert {tuple(line[1:]) for line in corrected_lines(outcome)} == {("–", "–")}
    reason = f"no labels of the stratum {GENUINE} in {run.path}"
    assert f"– under prediction-powered: {reason}, so" in outcome.out
    assert f"Rogan & Gladen: undefined: {reason}" in outcome.out
    turns = read_runs([run.path]).turns
    assert set(turns["unlabelled"]) == {GENUINE} and turns["annotated"].all()


def test_responses_of_one_kind(copy, rates, tmp_path):
    cut_off = itertools.cycle([True] * 5 + [False] * 5)  # every second context
    run = rewrite(copy(), "generations", response_cut_off=lambda _: next(cut_off))
    plant(run)
    for kind, flag in (("complete", False), ("cut-off", True)):
        file = tmp_path / f"{kind}.json"
        outcome = rates(run.path, "--responses", kind, "--json", file, "--examples", 50)
        assert outcome.status == 0, outcome.err
        assert (
            f"after {kind} responses" in outcome.out and "complete responses │" not in outcome.out
        )
        kept = (run.generations["response_cut_off"] == flag).sum()
        assert f"{kept} of {len(run.generations)} user turns" in outcome.out
        assert outcome.out.count("user turn:") == kept
        assert ("† cut off" in outcome.out) is flag
        assert "because:   [because]" in outcome.out, "texts are no markup"
        read = json.loads(file.read_text())
        assert read["about"]["responses"] == kind
        whole = [r for r in read["estimates"] if r["quantity"] == "failed" and r["rows"]]
        assert {r["responses"] for r in read["estimates"]} == {kind}
        assert sum(r["rows"] for r in whole if r["dataset"] != "(all)") == kept
        assert not [r for r in read["estimates"] if r["quantity"] == "cut_off"]


# -- pooling -------------------------------------------------------------------------------------


def reseeded(run: Run) -> Run:
    """The same run as though sampled with another seed."""
    return rewritten(run.path, "run.json", with_settings(seed=1))


def test_runs_of_other_seeds_are_pooled_and_greedy_turns_count_once(copy, rates):
    """A pooled source is a source_id of a dataset; what the runs differ in is said."""
    longer = with_settings(seed=1, max_new_tokens=99)
    first, second = copy("first"), rewritten(copy("second").path, "run.json", longer)
    plant(first)
    plant(second, say=lambda key: "generic")
    judged = read_runs([first.path, second.path])
    counts = judged.turns.groupby("temperature").size()
    assert counts.to_dict() == {0.0: CONTEXTS, 0.7: 4 * CONTEXTS, 1.0: 4 * CONTEXTS}
    assert judged.turns["source"].nunique() == judged.turns["context"].nunique() == CONTEXTS
    rows = estimates(judged, resamples=100)
    whole = rows[rows["dataset"] == "(all)"]
    rate, reach = (whole[whole["quantity"] == name] for name in ("follow_up_rate", "reach"))
    assert rate["value"].tolist() == [0, 0.25, 0.5]
    cooler = reach.loc[reach["temperature"] == 0.7, "value"]
    assert cooler.tolist() == pytest.approx([0.25, 0.5, 0.75, 1])
    outcome = rates(first.path, second.path)
    assert outcome.status == 0 and "2 runs" in outcome.out
    assert "pooled differ in max_new_tokens" in outcome.out


# -- files ---------------------------------------------------------------------------------------


def test_json_csv_and_parquet_hold_the_same_rows(run, rates, tmp_path):
    annotate(run)
    files = {kind: tmp_path / f"rates.{kind}" for kind in ("json", "csv", "parquet")}
    flags = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    outcome = rates(run.path, *flags, "--level", 0.9, "--resamples", 200, "--seed", 4)
    assert outcome.status == 0, outcome.err
    expected = estimates(read_runs([run.path]), level=0.9, resamples=200, seed=4)
    assert list(expected.columns) == list(COLUMNS) and set(expected["level"]) == {0.9}
    read = json.loads(files["json"].read_text())
    frames = {
        "json": pd.DataFrame(read["estimates"]),
        "csv": pd.read_csv(files["csv"]),
        "parquet": pd.read_parquet(files["parquet"]),
    }
    for kind, frame in frames.items():
        frame = frame.astype({name: dtype for name, dtype in COLUMNS.items() if dtype != "object"})
        both = (table.astype(object).where(table.notna(), None) for table in (frame, expected))
        pd.testing.assert_frame_equal(*both, obj=kind)
    schema = pq.read_schema(files["parquet"])
    kinds = dict(zip(schema.names, schema.types, strict=True))
    assert kinds["category"] == kinds["test"] == pa.string() and kinds["n_samples"] == pa.int64()
    about = json.loads(schema.metadata[b"ia_mech"])
    assert about == read["about"]
    assert (about["comparisons"], about["comparisons_of_all_datasets"]) == (6, 2)
    assert about["responses"] == "all" and about["annotator"] == "anna" and about["level"] == 0.9
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("rates.csv", "rates.json", "rates.parquet", "run"),
    ]


# -- examples ------------------------------------------------------------------------------------


def test_examples_are_drawn_by_seed_from_different_sources(run):
    found = examples_by_category(run, "rules", 3, seed=0)
    assert list(found["category"].unique()) == [GENUINE, "prompt_restatement", "new_topic"]
    assert (found.groupby("category")["source_id"].nunique() == 3).all() and len(found) == 9
    for turn in found.itertuples():
        assert category_of((turn.context_id, turn.temperature, turn.sample)) == turn.category
        assert turn.rationale.startswith("[because]") and turn.query and turn.response
    assert found.equals(examples_by_category(run, "rules", 3, seed=0))
    assert not all(found.equals(examples_by_category(run, "rules", 3, seed=s)) for s in (1, 2))
    assert len(examples_by_category(run, "rules", 1000)) == len(run.generations)


# -- bad input -----------------------------------------------------------------------------------


def test_unknown_or_several_judges_and_annotators(run, rates):
    refused(rates(run.path, "--judge", "gpt"), "no verdicts of 'gpt'", "rules")
    refused(rates(run.path, "--annotator", "anna"), "no labels of 'anna'")
    plant(run, "other")
    refused(rates(run.path), "other, rules", "--judge")
    annotate(run)
    annotate(run, "ben")
    refused(rates(run.path, "--judge", "other"), "anna, ben", "--annotator")
    outcome = rates(run.path, "--judge", "other", "--annotator", "ben")
    assert "judge other" in outcome.out and "against ben's labels" in outcome.out


def first_of(**changes):
    """A change of the first verdict."""
    return lambda rows: [rows[0] | changes, *rows[1:]]


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"change": lambda rows: rows[1:]}, ("don't cover", "judge it again")),
        ({"change": lambda rows: [*rows, rows[0]]}, ("don't cover", "judge it again")),
        ({"change": first_of(context_id="another")}, ("don't cover", "judge it again")),
        ({"change": first_of(item="of another text")}, ("1 turns have changed", "judge it again")),
        ({"say": lambda key: "follow_up"}, ("name follow_up", "judge it again")),
        ({"say": lambda key: None}, ("assessed none of the", "--retry-failed")),
    ],
)
def test_verdicts_that_are_not_of_the_run(copy, rates, planted, words):
    run = copy()
    plant(run, **planted)
    refused(rates(run.path), *words)


def test_labels_that_are_not_of_the_run(run, rates):
    for changes, problem in (
        ({"sample": 77}, "the labels of 'anna'"),
        ({"category": "lovely"}, "name lovely"),
        ({"inclusion_probability": 0.0}, "inclusion probabilities"),
    ):
        annotate(run, **changes)
        refused(rates(run.path), problem)
    for name in ("annotations/anna.parquet", "judgements/rules.parquet"):
        (run.path / name).write_bytes(b"PAR1")
        refused(rates(run.path), f"{name.split('/')[1]} can't be read")


def test_runs_that_can_not_be_pooled(merged, copy, rates, tmp_path):
    first, second = copy("first"), copy("second")
    plant(first)
    plant(second)
    refused(rates(tmp_path), "is not a run")
    refused(rates(merged.path), "has not been judged", f"ia_mech.judge run {merged.path}")
    refused(rates(first.path, first.path / ".." / "first"), "given twice")
    refused(rates(first.path, second.path), "is a copy of", "give each run once")
    longer = rewritten(second.path, "run.json", with_settings(max_response_tokens=99))
    plant(longer)
    refused(rates(first.path, longer.path), "of the same samples", "give one")
    plant(reseeded(second), record={"identity": {"kind": "rules", "threshold": 2}})
    refused(rates(first.path, second.path), "different judges", "--replace")
    rewritten(first.path, "manifest.json", lambda manifest: manifest.update(parts=[]))
    refused(rates(first.path), "still being written", "let the command")


def test_files_that_can_not_be_written(run, rates, tmp_path):
    pipe = tmp_path / "pipe.csv"  # as /dev/null, which would have been replaced
    os.mkfifo(pipe)
    before = files(tmp_path)
    for flags, problem in (
        (("--csv", tmp_path / "no" / "rates.csv"), "no folder"),
        (("--json", tmp_path), "is a folder"),
        (("--parquet", tmp_path / "rates.csv"), "rates.csv would hold PARQUET; give it"),
        (("--json", tmp_path / "rates"), "ends in .json"),
        (("--csv", pipe), "pipe.csv is not a regular file"),
        (("--csv", ""), "'' names nothing"),
        (("--level", "0.9999999999999999"), "is not between 0 and 1"),
        (("--csv", run.path / "contexts" / "new"), "lies inside the run"),
        (("--responses", "some"), "--help"),
        (("--level", "95"), "--help"),
        (("--resamples", "5"), "--help"),
    ):
        refused(rates(run.path, *flags), problem)
    assert files(tmp_path) == before


def test_help_is_short_and_needs_neither_torch_nor_pandas(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code = (
        "import sys; from ia_mech.rates.__main__ import build_parser as b; b().format_help(); "
        "print(*{'torch', 'pandas', 'scipy'} & set(sys.modules))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stdout.strip(), done
    assert len(build_parser().format_help().splitlines()) <= 42
