"""ia-mech rates: which runs it takes, what it prints and writes, what it refuses."""

import itertools
import json
import shutil

import judging
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import CONTEXTS, planted, rehashed, rewritten, sampled, with_settings
from shell import Outcome, call, files, refusal

from ia_mech.errors import UserError
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import FOLLOW_UP, read_rubric
from ia_mech.judge.sheets import csv_bytes, export_sheet, import_sheet, write_sheet
from ia_mech.rates.__main__ import main
from ia_mech.rates.compute import estimates
from ia_mech.rates.load import read_runs
from ia_mech.rates.result import _by_group, result
from ia_mech.results import folder_of, read
from ia_mech.run import Run
from ia_mech.settings import Settings

CAVEAT = "A heuristic, 0.9 of the time right"
ABOVE = "*: above the built-in judge's fit (T ≤ 0.7)."
RULES = {"identity": {"kind": "builtin"}, "caveat": CAVEAT}


def category_of(key: tuple) -> str:
    """What the planted judge says: follow-ups are all turns at T = 1, the first at T = 0.7, no
    greedy one."""
    _, temperature, sample, _ = key
    if temperature == 0:
        return "repeats_query"
    return FOLLOW_UP if temperature == 1 or sample == 0 else "new_topic"


def said(run: Run, say=category_of) -> list[str | None]:
    return [say(tuple(key.values())) for key in judging.keys_of(run)]


def plant(run: Run, judge: str = "builtin", *, say=category_of, record=RULES, fitted=()) -> Run:
    """Verdicts as a judge writes them."""
    known = [item.id in fitted for item in items_of(run)]
    judging.plant(run, judge, said(run, say), record, fitted=known)
    return run


def annotate(run: Run, annotator: str = "anna") -> None:
    judging.annotate(run, annotator, dict(enumerate(said(run))))


@pytest.fixture
def copy(merged, tmp_path):
    """Copies of the sampled run, to be written to."""

    def make(name: str = "run") -> Run:
        return Run.open(shutil.copytree(merged.path, tmp_path / name))

    return make


@pytest.fixture
def run(copy) -> Run:
    return plant(copy())


@pytest.fixture
def rates(capfd, monkeypatch):
    """Run the command line in this process, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    return lambda *arguments: call(main, [str(argument) for argument in arguments], capfd)


def rewrite(run: Run, **columns) -> Run:
    """Change columns of generations, as another sampling would have."""
    for path in (run.path / "generations").iterdir():
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


# -- what it prints and writes -------------------------------------------------------------------


def test_conversations_that_dont_look_english_are_counted_beside_the_built_in_judges_rates(
    rates, tmp_path
):
    file = tmp_path / "chats.jsonl"
    pairs = [
        (
            "Was kann ich tun, wenn die Kette meines Fahrrads seit Tagen quietscht?",
            "Reinige sie zuerst mit einem Tuch, dann gib Öl auf jedes Glied und wische ab.",
        ),
        ("Und der Sattel?", "Fette die Stütze."),  # too few words to tell
        ("自転車のチェーンがうるさい。", "油をさしてください。"),
        ("What do I do if the chain squeaks?", "Clean it, and put oil on each of its links."),
        ("Solve x + 4 = 9", "x = 5"),
    ]
    file.write_text("".join(json.dumps({"prompt": q, "response": r}) + "\n" for q, r in pairs))
    run = planted(tmp_path / "run", [4], dataset=str(file))
    warned = "2 of the conversations don't look English, and the built-in judge was fitted on"
    assert warned in rates(plant(run).path).out
    plant(run, "other", record={"identity": {"kind": "toy"}})
    assert "English" not in rates(run.path, "--judge", "other").out


def test_a_field_of_the_data_tells_rates_apart(run, rates):
    refused(
        rates(run.path, "--by", "shade"),
        "has no field 'shade'; choose from: dataset, topic, title.",
    )
    refused(rates(run.path, "--by", "Topic"), "no field 'Topic' (did you mean topic?); choose")
    same = [estimates(read_runs([run], by=by)) for by in (None, "dataset")]
    pd.testing.assert_frame_equal(*same)
    ids = run.contexts["context_id"]
    fields = {"topic": ["maths", None] * (len(ids) // 2), "n": range(len(ids)), "id": ids}
    run.metadata = pd.DataFrame(fields, pd.Index(ids))  # as if the data had these
    labelled = run.labelled("builtin")
    assert (ids[labelled["data.n"]].to_numpy() == labelled["context_id"]).all()
    judged = read_runs([run], by="topic")
    found, plain = estimates(judged), estimates(read_runs([run]))
    assert set(found["dataset"]) == {"maths", "–", "(all)"}
    follow_up = found[(found["quantity"] == "rate") & (found["outcome"] == "follow_up")]
    assert follow_up.groupby("dataset")["rows"].sum()[["maths", "–"]].sum() == len(judged.turns)
    for rows in (found, plain):  # what they are together is the same
        rows.drop(rows[rows["dataset"] != "(all)"].index, inplace=True)
    pd.testing.assert_frame_equal(found.reset_index(drop=True), plain.reset_index(drop=True))
    run.unanswered = 2, 14  # as if the model had written responses
    made = result(read_runs([run], by="topic"))
    assert any("2 of 14 queries of run have too few finished" in note for note in made.notes)
    assert list(made.figures) == ["by field", "rates", "categories"]
    names = [text.get_text() for text in made.figures["by field"].axes[0].get_yticklabels()]
    assert names == ["maths", "–"]
    assert made.name == "rates-builtin-by-topic" and made.question.endswith(", by topic?")
    table = made.tables[0]
    assert table.title.startswith("follow-up rates by topic") and table.columns[0] == "topic"
    assert {row[0] for row in table.rows} == {"maths", "–"}  # without the pooled rates
    assert table.legend.startswith("–: rows of the data without it")
    same = "By topic, 0.00 of greedy turns are follow-ups in each of 2 groups, 0 of 12 in all."
    assert same in made.sentence
    single = result(read_runs([run], by="n")).tables[0]  # a query each
    cells = [cell for row in single.rows for cell in row]
    assert len(single.rows) == 3 * len(ids) and not any("[" in cell for cell in cells)
    assert "0 of 1" in cells and any(cell.endswith("(1 query)") for cell in cells)
    run.metadata["tags"] = [["a"]] * len(ids)
    with pytest.raises(UserError, match=r"field 'tags' of .* values that are lists or objects"):
        read_runs([run], by="tags")
    run.metadata["topic"] = "maths"
    del run.groups
    alone = result(read_runs([run], by="topic"))
    table = alone.tables[0]
    assert "topic" in table.columns and {row[1] for row in table.rows} == {"maths"}
    assert "without it" not in table.legend and "same topic" in alone.sentence
    tied = pd.DataFrame(
        {"dataset": [*"abcd"], "value": [0.5, 0.0, 1.0, 1.0], "sources": [1, 5, 5, 6], "rows": 6}
        | {"quantity": "rate", "outcome": "follow_up", "temperature": 0.0, "events": [3, 0, 6, 6]}
        | {"low": 0.0, "high": 1.0, "p_holm": float("nan")}
    )
    small = "1 of 4 groups have fewer than 5 queries: too few to compare"
    assert _by_group("topic", tied) == (
        "By topic, 0.00 [0.00, 1.00] (topic = b) to 1.00 (2 groups, such as topic = c) of greedy "
        f"turns are follow-ups ({small})."
    )
    few = "By topic, no two groups can be compared: 1 of 2 groups have fewer than 5 queries"
    assert _by_group("topic", tied[:2]).startswith(few)
    tied.loc[1:, ["rows", "value"]] = 0, float("nan")  # none of their turns could be assessed
    assert "same rate" not in _by_group("topic", tied)


def test_temperatures_above_the_fit_are_in_the_sentence_where_there_are_no_others(run, monkeypatch):
    annotate(run)
    assert "at T = 0.7, " in (said := result(read_runs([run])).sentence) and "T = 1" not in said
    monkeypatch.setattr("ia_mech.rates.fit.FITTED_TO", 0.5)
    assert "at T = 0.7*, " in (said := result(read_runs([run])).sentence) and "T = 1" not in said


def test_every_rate_is_printed_with_its_interval_and_written(run, rates, tmp_path):
    annotate(run)
    outcome = rates(run.path, "--full", "--level", 0.9, "--seed", 4)
    assert outcome.status == 0, outcome.err
    said = "By the built-in judge, 0 of ", "; at T = 0.7, ", " │     1* │ ", "fewer than 24 queries"
    for text in (*said, CAVEAT, ABOVE):
        assert text in outcome.out
    assert "no rate is corrected by anna's labels" in outcome.out  # there are too few

    kept = read(folder_of(run.path, "rates-builtin"))
    expected = estimates(read_runs([run.path]), level=0.9, seed=4)
    assert set(expected["level"]) == {0.9}
    both = (table.astype(object).where(table.notna(), None) for table in (kept.estimates, expected))
    pd.testing.assert_frame_equal(*both)
    about = kept.about
    assert about["kind"] == "rates" and about["identities"] == [run.identity_digest]
    assert about["settings"]["annotator"] == "anna" and about["settings"]["level"] == 0.9
    assert (about["judge"], about["gate"], list(kept.figures)) == (
        "builtin",
        "no decoys",
        ["rates", "categories"],
    )
    assert str(tmp_path) not in json.dumps(about)
    assert Run.open(run.path).verify() == []


def test_responses_of_one_kind(copy, rates, tmp_path):
    unfinished = itertools.cycle([True] * 5 + [False] * 5)  # every second context
    run = plant(rewrite(copy(), response_unfinished=lambda _: next(unfinished)))
    outcome = rates(run.path, "--after", "unfinished", "--out", tmp_path / "elsewhere")
    assert outcome.status == 0, outcome.err
    assert "30 of 60 user turns" in outcome.out
    found = read(tmp_path / "elsewhere").estimates
    assert set(found["responses"]) == {"unfinished"}


def test_runs_of_other_seeds_are_pooled_and_greedy_turns_count_once(copy):
    """A pooled source is a source_id of a dataset; a note names what the runs differ in."""
    longer = with_settings(seed=1, max_response_tokens=99)
    first, second = plant(copy("first")), rewritten(copy("second").path, "run.json", longer)
    plant(second, say=lambda key: "generic")
    judged = read_runs([first.path, second.path])
    counts = judged.turns.groupby("temperature").size()
    assert counts.to_dict() == {0.0: CONTEXTS, 0.7: 4 * CONTEXTS, 1.0: 4 * CONTEXTS}
    assert judged.turns["source"].nunique() == judged.turns["context"].nunique() == CONTEXTS
    assert "runs that were pooled differ in max_response_tokens." in judged.notes
    rows = estimates(judged)
    whole = rows[rows["dataset"] == "(all)"]
    rate, reach = (whole[whole["quantity"] == name] for name in ("rate", "pass_at_k"))
    assert rate["value"].tolist() == [0, 0.25, 0.5]
    cooler = reach.loc[reach["temperature"] == 0.7, "value"]
    assert cooler.tolist() == pytest.approx([0.25, 0.5, 0.75, 1])


# -- whose labels --------------------------------------------------------------------------------


def test_turns_of_the_judges_fit_are_counted_in_a_note(run):
    known = {item.id for item in items_of(run)[:3]}
    plant(run, fitted=known)
    annotate(run)
    count = sum(item.id in known for item in items_of(run))
    judged = read_runs([run.path])
    assert judged.turns["fitted"].sum() == count >= 3
    words = f"{count} of {len(judged.turns)} turns, {count} of them labelled, were in"
    assert words in judged.notes[-1]


def test_a_stratum_that_was_left_out_is_not_made_up_for(run, tmp_path):
    sheet = export_sheet(run, 40, judge="builtin", name="sheet")
    write_sheet(run, sheet, tmp_path / "sheet")
    strata = {item: of["stratum"] for item, of in sheet.key["items"].items()}
    rows = [row | {"category": strata[row["item"]]} for row in sheet.rows]
    rows = [row for row in rows if row["category"] not in (FOLLOW_UP, "decoy")]
    filled = tmp_path / "filled.csv"
    filled.write_bytes(csv_bytes(pd.DataFrame(rows)))
    import_sheet(run, filled, "anna")
    assert set(read_runs([run.path]).turns["unlabelled"]) == {f"the stratum {FOLLOW_UP} of run"}


# -- bad input -----------------------------------------------------------------------------------


def test_labels_that_can_not_be_taken(run, rates):
    refused(rates(run.path, "--annotator", "anna"), "no labels by 'anna'")
    plant(run, "other")
    said = rates(run.path)
    assert "labels by builtin, other: the built-in judge's count" in said.err
    assert said.out.splitlines()[-1].endswith(f"report {run.path} --judge builtin")
    annotate(run)
    annotate(run, "ben")
    refused(rates(run.path, "--judge", "other"), "anna, ben", "--annotator")
    assert read_runs([run.path], "other", "ben").annotator == "ben"
    (run.path / "judgements" / "other.parquet").unlink()
    (run.path / "annotations" / "ben.parquet").unlink()
    plant(run, say=lambda key: None)
    refused(rates(run.path), "assessed none of the", "judge again")


def test_runs_that_can_not_be_pooled(copy, rates):
    first, second = plant(copy("first")), plant(copy("second"))
    refused(rates(first.path, first.path / ".." / "first"), "give each run once")
    refused(rates(first.path, second.path), "is a copy of", "give each run once")
    plant(rewritten(second.path, "run.json", with_settings(max_response_tokens=99)))
    refused(rates(first.path, second.path), "of the same samples", "give one")
    second = rewritten(second.path, "run.json", with_settings(seed=1))
    plant(second, record={"identity": {"kind": "builtin", "threshold": 2}})
    refused(rates(first.path, second.path), "different judges", "--replace")


def test_queries_of_two_datasets_do_not_count_twice(tmp_path, rates):
    rows = [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(3)]
    runs = []
    for name in ("one", "two"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(plant(planted(tmp_path / name, [3], dataset=str(file))).path)
        rows[0] = {"prompt": "What is 7?", "response": "It is 7."}
    line = "2 queries are in dataset 'one' of", "and in 'two' of", "count each run alone"
    refused(rates(*runs), *line)


def test_rates_of_several_runs_do_not_take_the_place_of_one_runs_own(copy, rates):
    first, second = (
        plant(copy("first")),
        rewritten(copy("second").path, "run.json", with_settings(seed=1)),
    )
    plant(second)
    assert rates(first.path).status == rates(first.path, second.path).status == 0
    own, pooled = (read(folder_of(first.path, f"rates-builtin{end}")) for end in ("", "-pooled"))
    assert len(own.about["identities"]) == 1 and len(pooled.about["identities"]) == 2
    assert " of 2 runs" in pooled.sentence and " of 2 runs" not in own.sentence


def test_a_place_that_results_can_not_go_to(run, rates, tmp_path):
    (tmp_path / "file").touch()
    before = files(tmp_path)
    for place, *problem in (
        (tmp_path / "file", "is a file"),
        (run.path / "contexts" / "new", "lies inside the run", "leave --out out"),
        (run.path, "is a run"),
    ):
        refused(rates(run.path, "--out", place), *problem)
    assert files(tmp_path) == before


def test_rates_are_by_the_rubric_that_the_judge_labelled_by(copy, tmp_path):
    """Two of its categories count as follow-ups; none of them is the built-in one's."""
    file = tmp_path / "mine.toml"
    kinds = (("asks", "true"), ("objects", "true"), ("thanks", "false"))
    tables = [
        f'[[categories]]\nname = "{k}"\ndefinition = "d"\nfollow_up = {g}\n' for k, g in kinds
    ]
    file.write_text('instructions = "Label."\n' + "".join(tables))
    own = {"rubric": read_rubric(file).record()}
    named = {0: "thanks", 0.7: "asks", 1: "objects"}
    run = plant(copy(), say=lambda key: named[key[1]], record=RULES | own)
    turns = read_runs([run.path]).turns
    assert turns.groupby("temperature")["follow_up"].mean().to_dict() == {0: 0, 0.7: 1, 1: 1}


def test_turns_count_by_how_many_of_their_tokens_were_sampled(tiny_subject, tmp_path, capfd):
    """By default those that were sampled as a whole; the first token is that of the whole turn."""
    drawn = Settings(limit=6, temperatures=1, samples=2, sampled_tokens="1 all", max_new_tokens=4)
    run = sampled(drawn, tiny_subject, tmp_path / "run")
    turns = run.generations
    assert turns["sampled_tokens"].tolist() == 6 * [0, 1, 1, 4, 4]
    first = turns["token_ids"].map(lambda ids: ids[0])
    one, whole = (first[turns["sampled_tokens"] == k].tolist() for k in (1, 4))
    assert one == whole and {len(query.turns) for query in run.queries()} == {3}
    assert [run.decoding(1.0, k) for k in (0, 1, 4)] == ["greedy", "T = 1, first token", "T = 1"]
    plant(run, say=lambda key: FOLLOW_UP if key[3] == 1 else "new_topic")
    for words, wanted in (([], 0.0), (["--sampled-tokens", "1"], 1.0)):
        assert call(main, [str(run.path), *words], capfd).status == 0
        name = "-".join(["rates-builtin", *words]).replace("---sampled-tokens", "-sampled")
        found = read(folder_of(run.path, name)).estimates
        rate = found[(found["quantity"] == "rate") & (found["temperature"] == 1)]
        assert set(rate["value"]) == {wanted}
    refused = refusal(call(main, [str(run.path), "--sampled-tokens", "2"], capfd))
    assert (
        "has no sampled turns with --sampled-tokens 2; count others: --sampled-tokens 1 or"
        in refused
    )
