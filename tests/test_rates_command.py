"""python -m ia_mech.rates: which runs it takes, what it prints and writes, what it refuses."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from judging import FakeJudge
from runs import CONTEXTS, rehashed, rewritten, with_settings
from shell import Outcome, call, files, refusal

from ia_mech.display import Quiet
from ia_mech.judge.label import items_of, label_run
from ia_mech.judge.rubric import GENUINE
from ia_mech.judge.sheets import export_sheet, import_sheet, write_sheet
from ia_mech.judge.verdict import Verdict
from ia_mech.rates import load
from ia_mech.rates.__main__ import build_parser, main
from ia_mech.rates.compute import estimates
from ia_mech.rates.load import read_runs
from ia_mech.report.__main__ import main as main_of_report
from ia_mech.results import folder_of, read
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


def test_the_verdict_comes_first_then_the_pooled_rows(run, rates):
    label_run(run, FakeJudge(paid=False), "fake", Quiet())
    outcome = rates(run.path, "--judge", "fake")
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith(
        "Of 60 user turns of planted from 12 sources, judge fake calls genuine follow-ups: greedy "
        "1.00 [0.78, 1.00], T = 0.7 1.00 [0.78, 1.00], T = 1 1.00 [0.78, 1.00]."
    )
    assert "the rate is less than twice the judge's floor" in lines[0]
    assert "can't be told: no query has siblings" in lines[0]
    assert lines[1].startswith("Judge fake: failed. Of 60 decoys the turns are genuine to the")
    assert lines[3].startswith("rates (95% intervals over sources)")
    assert "by dataset" not in outcome.out and "--full prints more tables" in outcome.out
    for note in ("over 6 comparisons and", "p by sign flip", "fewer than 24 sources", "a fake"):
        assert note in outcome.out
    assert lines[-1] == f"next: python -m ia_mech.report {run.path}"
    assert main_of_report([str(run.path)]) == 0


def test_without_a_genuine_turn_no_share_of_the_rate_is_claimed(run, rates):
    label_run(run, FakeJudge(lambda *_: Verdict("generic"), paid=False), "never", Quiet())
    said = rates(run.path, "--judge", "never").out.splitlines()[0]
    assert "greedy 0.00 [0.00" in said and "twice" not in said and "None is, so there" in said


def test_every_rate_has_an_interval(run, rates):
    outcome = rates(run.path, "--full")
    assert outcome.status == 0, outcome.err
    table = outcome.out.split("rates by dataset")[1].split("what the turns are")[0]
    lines = [line for line in table.splitlines() if line.startswith("│")]
    assert len(lines) == 12  # three datasets and all of them, each at three temperatures
    interval = r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]"
    for line in lines:
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert re.fullmatch(interval, cells[3]), line
        if cells[1] != "greedy":
            assert re.match(r"[+-]\d\.\d\d \[[+-]\d\.\d\d, [+-]\d\.\d\d\] p", cells[4]), line
    greedy, cooler, one = (next(x for x in lines if f" {t} │" in x) for t in ("greedy", "0.7", "1"))
    assert "0.00 [0.00" in greedy and "0.50 [" in cooler and "1.00 [" in one
    assert CAVEAT in outcome.out and "ia_mech.judge export" in outcome.out


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


def test_corrected_rates_name_who_annotated(run, rates):
    annotate(run)
    outcome = rates(run.path, "--full")
    assert outcome.status == 0, outcome.err
    assert "rate, corrected by labels" not in outcome.out  # 12 or 24 labels in a row of the table
    assert "no rate is corrected by anna's labels: that takes 30" in outcome.out
    annotate(run, rows=slice(0, 1))
    turns = read_runs([run.path]).turns  # without a sheet, datasets that no label is of count
    known = set(turns.loc[turns["unlabelled"] == "", "dataset"])
    assert known == {run.generations["dataset"].iloc[0]}


def test_turns_of_the_judges_fit_are_counted_in_a_note(run, rates, monkeypatch):
    items = [item.key("", 0)[:16] for item in items_of(run)]
    monkeypatch.setattr(load, "fitted_items", lambda: frozenset(items[:3]))
    assert "judge's fit" not in rates(run.path).out  # nothing is corrected without labels
    annotate(run)
    known = sum(item in items[:3] for item in items)
    assert read_runs([run.path]).turns["fitted"].sum() == known >= 3
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


def test_a_stratum_that_was_left_out_is_not_made_up_for(run, tmp_path):
    sheet_by(run, tmp_path / "sheet", leave=(GENUINE,))
    judged = read_runs([run.path])
    assert set(judged.turns["unlabelled"]) == {f"the stratum {GENUINE} of run"}
    rows = estimates(judged).query("quantity == 'rate_prediction_powered'")
    assert len(rows) and rows["value"].isna().all()
    assert rows["method"].str.startswith(f"undefined: no labels of the stratum {GENUINE}").all()


def test_responses_of_one_kind(copy, rates):
    cut_off = itertools.cycle([True] * 5 + [False] * 5)  # every second context
    run = rewrite(copy(), "generations", response_cut_off=lambda _: next(cut_off))
    plant(run)
    for kind, flag in (("complete", False), ("cut-off", True)):
        outcome = rates(run.path, "--responses", kind)
        assert outcome.status == 0, outcome.err
        kept = (run.generations["response_cut_off"] == flag).sum()
        assert f"{kept} of {len(run.generations)} user turns" in outcome.out
        found = read(folder_of(run.path, f"rates-rules-{kind}")).estimates
        assert set(found["responses"]) == {kind}
        whole = found[(found["quantity"] == "failed") & (found["dataset"] != "(all)")]
        assert whole["rows"].sum() == kept and not (found["quantity"] == "cut_off").any()
    outcome = rates(run.path)
    assert "50% of them follow a response that was cut off" in outcome.out
    assert "after complete responses" in outcome.out


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
    rows = estimates(judged)
    whole = rows[rows["dataset"] == "(all)"]
    rate, reach = (whole[whole["quantity"] == name] for name in ("rate", "reach"))
    assert rate["value"].tolist() == [0, 0.25, 0.5]
    cooler = reach.loc[reach["temperature"] == 0.7, "value"]
    assert cooler.tolist() == pytest.approx([0.25, 0.5, 0.75, 1])
    outcome = rates(first.path, second.path)
    assert outcome.status == 0 and "2 runs" in outcome.out
    assert "pooled differ in max_new_tokens" in outcome.out


# -- files ---------------------------------------------------------------------------------------


def test_the_result_holds_every_estimate(run, rates, tmp_path):
    annotate(run)
    outcome = rates(run.path, "--level", 0.9, "--seed", 4)
    assert outcome.status == 0, outcome.err
    kept = read(folder_of(run.path, "rates-rules"))
    expected = estimates(read_runs([run.path]), level=0.9, seed=4)
    assert set(expected["level"]) == {0.9}
    both = (table.astype(object).where(table.notna(), None) for table in (kept.estimates, expected))
    pd.testing.assert_frame_equal(*both)
    about = kept.about
    assert about["kind"] == "rates" and about["identities"] == [run.identity_digest]
    assert about["settings"]["annotator"] == "anna" and about["settings"]["level"] == 0.9
    assert (about["judge"], about["gate"], list(kept.figures)) == ("rules", "no decoys", ["rates"])
    assert str(tmp_path) not in json.dumps(about)
    assert Run.open(run.path).verify() == []
    elsewhere = tmp_path / "elsewhere"
    assert rates(run.path, "--out", elsewhere).status == 0
    assert read(elsewhere).name == "elsewhere"


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
    assert "judge other" in outcome.out and "corrected by ben's labels" in outcome.out


def test_labels_that_are_not_of_the_run(run, rates):
    plant(run, say=lambda key: None)
    refused(rates(run.path), "assessed none of the", "judge again")
    plant(run, say=lambda key: "follow_up")
    refused(rates(run.path), "name follow_up, which the rubric lacks", "make them again")
    plant(run)
    annotate(run, category="lovely")
    refused(rates(run.path), "name lovely", "judge import")
    for name in ("annotations/anna.parquet", "judgements/rules.parquet"):
        (run.path / name).write_bytes(b"PAR1")
        refused(rates(run.path), f"{name.split('/')[1]} can't be read")


def test_labels_of_turns_that_were_sampled_again(run, rates):
    rewrite(run, "generations", text=lambda text: f"{text}!")
    refused(rates(run.path), "rules.parquet is of other turns", "judge run")


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


def test_folders_that_can_not_be_written(run, rates, tmp_path):
    (tmp_path / "file").touch()
    before = files(tmp_path)
    for flags, *problem in (
        (("--out", tmp_path / "file"), "is a file"),
        (("--out", ""), "'' names nothing"),
        (("--out", run.path / "contexts" / "new"), "lies inside the run", "leave --out out"),
        (("--out", run.path), "is a run"),
        (("--seed", "-1"), "--seed: '-1' is not a whole number from 0 up"),
        (("--seed", 10**19), "is not a whole number from 0 to 9223372036854775807"),
        (("--seed", "9" * 5000), "is not a whole number from 0 to 9223372036854775807"),
        (("--level", "0.9999999999999999"), "is not between 0 and 1"),
        (("--responses", "some"), "--help"),
        (("--level", "95"), "--help"),
    ):
        refused(rates(run.path, *flags), *problem)
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
