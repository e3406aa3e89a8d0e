"""The report: what the page holds, which results it finds, and that texts in it stay texts."""

import base64
import gzip
import hashlib
import html
import json
import re
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from judging import plant
from matplotlib.figure import Figure
from runs import rehashed, rewritten, with_settings
from shell import call, refusal

from ia_mech.cli import program
from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge_main
from ia_mech.judge.decoys import DECOY_KINDS
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.judge.sheets import export_sheet, import_sheet, write_sheet
from ia_mech.judge.shown import labelled_turns, rule
from ia_mech.page import packed, rendered
from ia_mech.rates.__main__ import main as rates_main
from ia_mech.rates.evidence import doubts
from ia_mech.rates.fit import FITTED_WORDS
from ia_mech.report import turns as browsers
from ia_mech.report.__main__ import main, render_report
from ia_mech.report.contents import missing
from ia_mech.report.ending import ERRS
from ia_mech.results import RESULT, Result, Table, folder_of, read, sentences_of, write
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.untrusted import visible

CATEGORIES = [[FOLLOW_UP, "generic", "degenerate", "new_topic"][i * 7 % 4] for i in range(60)]


@pytest.fixture
def judged(run) -> Run:
    plant(run, "builtin", CATEGORIES)
    return run


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    def absent(spec, fetch):
        assert not fetch  # a page is made of what is on the disk
        raise UserError("no such model", "none")

    monkeypatch.setattr(browsers, "load_files", absent)


@pytest.fixture
def report(capfd):
    return lambda *words: call(main, [str(word) for word in words], capfd)


def unpacked(page: str) -> dict:
    """The data that a page's script reads."""
    data = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page, re.S)[1]
    return json.loads(gzip.decompress(base64.b64decode(data)))


def read_by_people(page: str) -> str:
    """The text of a page, without its markup and non-breaking spaces."""
    return html.unescape(re.sub(r"<[^>]*>", "", page)).replace("\xa0", " ")


def moons(folder: Path, *runs: Run, text: str = "", **data: pd.DataFrame) -> Path:
    """A result of an analysis that the report doesn't know; ``text`` stands in all its fields."""
    frame = pd.DataFrame({"quantity": ["moons", "suns"], "value": [0.123456, 2.0], "term": "sky"})
    result = Result(
        name=folder.name,
        question=f"How many moons?{text}",
        sentence=f"There are 0.12 moons.{text}",
        control=f"No moons by day.{text}",
        estimates=frame.assign(low=np.nan, p=np.nan, sources=3, dataset=f"d{text}"),
        tables=[
            Table("by night", ["T", "moons"], [["greedy", f"7 moons{text}"]], "moons: as seen"),
            Table("by day", ["T", f"moons{text}"], [["greedy", "no <b>moons</b>"]], full=True),
        ],
        figures={"orbit": Figure()},
        notes=[f"a note <b>on</b> it{text}"],
        about={"kind": "moons", "identities": [run.identity_digest for run in runs]},
        data=data,
    )
    write(result, folder)
    return folder


def another(run: Run, folder: Path) -> Run:
    """A copy of a run, of another seed."""
    return rewritten(shutil.copytree(run.path, folder), "run.json", with_settings(seed=7))


def test_the_errors_of_the_judge_are_those_of_its_card():
    card = " ".join(files("ia_mech.judge.builtin").joinpath("CARD.md").read_text("utf-8").split())
    assert re.findall(r"0\.\d+", ERRS) == ["0.43", "0.49", "0.36", "0.41"]
    assert "(Qwen 0.43 where it calls 0.49, SmolLM2 0.36 where it calls 0.41)" in card


# -- what it says -----------------------------------------------------------------------------


def test_commands_of_missing_results_are_said_and_run(run, report):
    """From a sampled run to its rates, by the commands that are printed."""
    mains = {"judge": judge_main, "rates": rates_main}
    for labels in ([], ["builtin"]):
        outcome = report(run.path)
        (line,) = [line for line in outcome.out.splitlines() if line.startswith("next: ")]
        name, *words = line.removeprefix("next: ia-mech ").split()
        page = (run.path / "report.html").read_text()
        assert f"ia-mech {name}" in page and "There are no results yet" in page
        conclusions = re.findall(r'<p class="conclusion">(.*?)</p>', page)
        said = [outcome.out.splitlines()[0]] if labels else []
        assert [one.replace("\u00a0", " ") for one in conclusions] == said
        turns = unpacked(page)["turns"]
        own = [text for text, decoy in zip(turns["text"], turns["decoy"], strict=True) if not decoy]
        assert own == [visible(text) for text in run.generations["text"]]
        assert list(turns["labels"]) == labels
        assert mains[name](words) == 0
    by_field = run.path / "results" / "rates-builtin-by-topic"
    folder_of(run.path, "rates-builtin").rename(by_field)
    assert missing(run, [by_field], "builtin") == ""
    by_field.rename(folder_of(run.path, "rates-builtin"))
    outcome = report(run.path)
    assert (outcome.status, outcome.err) == (0, "reading runs and results …\n")
    ending = outcome.out.splitlines()
    said = run.labelled("builtin").groupby("temperature")["follow_up"].sum().astype(int)
    assert ending[0] == (
        f"By the built-in judge, {said[0.0]} of 12 greedy user turns and {said[0.7]} of 24 sampled "
        "at T = 0.7 are follow-ups. Most of what this judge calls follow-ups fits other "
        "conversations, too."
    )
    assert re.fullmatch(
        r"Judge's control failed: of the 60 turns, the built-in judge calls \d+ follow-ups to "
        r"their own conversation, and \d+ to a wrong one \(of another query\): "
        "don't rely on its rates.",
        ending[1],
    )
    errs = ERRS.format(f"{program('ia-mech')} annotate export {run.path}")
    assert errs in ending and "annotate export" not in outcome.out.replace(errs, "")
    assert ending[-2:] == [
        f"page: {run.path / 'report.html'}",
        f"open it in a browser: {(run.path / 'report.html').as_uri()}",
    ]
    page = (run.path / "report.html").read_text()
    first = f"{said[0.0]} of 12 greedy user turns"
    assert page.partition("<main>")[2].partition("<form")[0].count(first) == 1
    assert 'class="conclusion"' not in page, "the answer stands on it once"
    headline = page.partition('<p class="sentence">')[2].partition("</p>")[0]
    assert "T\xa0=\xa00.7" in html.unescape(headline) and "*" not in headline
    found = read(folder_of(run.path, "rates-builtin"))
    cells = {cell for table in found.tables for row in table.rows for cell in row}
    assert len(cells) > 20 and "<title></title>" not in page
    page_words = " ".join(page.split())
    for text in (f">{' '.join(cell.split())}</td>" for cell in cells):
        assert text.replace("'", "&#39;") in page_words
    for text in (*sentences_of(found.sentence), *sentences_of(found.control)):
        assert text in read_by_people(page)
    assert str(run.path) not in page
    assert Run.open(run.path).verify() == []
    plant(run, "builtin", CATEGORIES)
    assert "can't be told" not in report(run.path).out, "the rates are of other labels"


def test_a_report_ends_with_the_answer_and_turns_of_different_labels(run, report, tmp_path):
    plant(run, "builtin", CATEGORIES)
    rows = Run.open(run.path).labelled("builtin")
    counts = rows.groupby("temperature")["follow_up"].agg(["sum", "count"]).astype(int)
    first, *_ = report(run.path).out.splitlines()
    (yes, of), *sampled = counts.itertuples(index=False)
    told = [f"{yes} of {of} sampled" for yes, of in sampled]
    assert first == (
        f"By the built-in judge, {yes} of {of} greedy user turns, {told[0]} at T = 0.7 and "
        f"{told[1]} at T = 1 are follow-ups."
    )
    found = labelled_turns(Run.open(run.path), "builtin", 3)
    assert rule(found) == "one turn of each of the 3 commonest categories, follow-ups first"
    assert found[0].category == FOLLOW_UP and len({one.category for one in found}) == 3
    assert len({one.context_id for one in found}) == 3
    assert sum(rows["category"] == found[1].category) >= sum(rows["category"] == found[2].category)
    texts = run.generations.set_index("context_id")["text"]
    assert all(one.text in set(texts[one.context_id]) for one in found)
    both = report(run.path, another(run, tmp_path / "other").path).out.splitlines()
    assert both[0].startswith("run: By the") and both[1].startswith("other: By the")


def test_follow_ups_that_may_only_restate_the_query_are_marked_and_no_examples(run, monkeypatch):
    plant(run, "builtin", [FOLLOW_UP] * 60)
    first, second = run.generations["text"].iloc[:2]
    for suspect in (lambda query, text: text == first, lambda query, text: True):
        monkeypatch.setattr("ia_mech.judge.shown.restates", suspect)
        monkeypatch.setattr(browsers, "restates", suspect)
        turns = unpacked(render_report([run]))["turns"]
        texts = [visible(first)] if suspect("", second) is False else turns["text"]
        assert [text in texts for text in turns["text"]] == turns["restates"]
        (example,) = labelled_turns(run, "builtin", 1)
        assert (example.text == first) == suspect("", second), "the first, if all are suspects"


def test_rates_by_a_field_alone_leave_the_plain_answer_on_top(run, report):
    assert judge_main(["run", str(run.path)]) == 0
    assert rates_main([str(run.path), "--by", "dataset"]) == 0
    lines = report(run.path).out.splitlines()
    top, rest = read_by_people((run.path / "report.html").read_text()).split("by dataset?", 1)
    assert "How often are the user turns follow-ups?" in top and "By dataset, " in rest
    assert lines[0] in top and lines[1] in top
    assert rates_main([str(run.path)]) == 0 and report(run.path).status == 0
    page = (run.path / "report.html").read_text()
    assert page.index('class="sentence">By the built-in') < page.index("follow-ups, by dataset?")
    assert 'class="conclusion"' not in page


def test_turns_and_decoys_stand_after_what_the_judge_was_shown(run):
    assert judge_main(["run", str(run.path)]) == 0
    run = Run.open(run.path)
    texts = run.generations.set_index(list(KEY))["text"]
    own = run.labels.judgements("builtin").assign(decoy="")
    own["shown"] = own["context_id"]
    verdicts = pd.concat([own, run.labels.decoys("builtin")])
    expected = {
        (row.shown, row.temperature, visible(texts[tuple(getattr(row, name) for name in KEY)]),
         row.category, row.decoy)
        for row in verdicts.itertuples()
    }  # fmt: skip
    data = unpacked(render_report([run]))
    turns, contexts = data["turns"], data["contexts"]
    assert len(turns["text"]) == len(verdicts) > len(own) == 60
    assert own["category"].nunique() > 1
    codes = turns["labels"]["builtin"]["category"]
    assert expected == {
        (contexts["id"][turns["context"][i]], turns["temperature"][i], turns["text"][i],
         data["categories"][codes[i]], ["", *DECOY_KINDS][turns["decoy"][i]])
        for i in range(len(verdicts))
    }  # fmt: skip
    messages = dict(zip(run.contexts["context_id"], run.contexts["messages"], strict=True))
    responses = [messages[id_][-1]["content"] for id_ in contexts["id"]]
    assert contexts["response"] == responses


def test_what_is_known_of_a_context_and_of_a_verdict_stands_beside_its_turns(judged):
    verdicts = ["because", "", ""] * 20
    plant(judged, "other", ["generic", "new_topic", "generic"] * 20, rationale=verdicts)
    data = unpacked(render_report([judged]))
    contexts, rows = data["contexts"], judged.contexts.set_index("context_id")
    for at, id_ in enumerate(contexts["id"]):
        for name in ("real_follow_up", "answer"):
            given = rows.loc[id_, name]
            assert contexts[name][at] == (given if isinstance(given, str) else "")
        whole = contexts["before"][at] + contexts["response"][at] + contexts["after"][at]
        text = rows.loc[id_, "text"]
        assert text.startswith(contexts["before"][at]) and text.endswith(contexts["after"][at])
        assert contexts["after"][at] and len(whole) <= len(text)
    assert any(contexts["answer"]) and any(contexts["real_follow_up"])
    assert data["turns"]["labels"]["other"]["reason"] == verdicts


def test_what_people_said_and_why_a_judge_gave_no_verdict(judged):
    sheet = export_sheet(judged, 12)
    rows = [row | {"category": "generic", "note": "dull"} for row in sheet.rows]
    table, *_ = write_sheet(judged, sheet._replace(rows=rows), judged.path.parent / "sheet")
    import_sheet(judged, table, "anna")
    (judged.path / "judgements" / "builtin.parquet").unlink()
    scores = [json.dumps({"generic": 0.75, "follow_up": 0.25}), *[None] * 59]
    why = {"error": ["", "no JSON", *[""] * 58], "mode": ["text", *[""] * 59], "scores": scores}
    plant(judged, "builtin", ["generic", None, *["generic"] * 58], **why)
    labels = unpacked(render_report([judged]))["turns"]["labels"]
    assert list(labels) == ["builtin", "anna (annotator)"]
    assert labels["builtin"]["score"][:2] == [0.25, None]
    shown = "scores: generic 0.75, follow-up 0.25 · judged by text"
    assert labels["builtin"]["reason"][:3] == [shown, "no JSON", ""]
    own = judged.labels.annotations("anna")
    assert labels["anna (annotator)"]["reason"].count("dull") == len(own) > 0


def test_a_judge_that_is_named_comes_first_and_one_that_is_removed_leaves(judged, report, capfd):
    plant(judged, "apes", ["generic"] * 60)
    assert rates_main([str(judged.path), "--judge", "apes"]) == 0
    said = report(judged.path)
    assert "labels by apes, builtin: the built-in judge's count" in said.err
    assert said.out.splitlines()[-1].endswith(f"rates {judged.path} --judge builtin")
    said = report(judged.path, "--judge", "apes")
    assert said.out.startswith("By judge apes, 0 of 12") and "next: " not in said.out
    page = (judged.path / "report.html").read_text()
    assert list(unpacked(page)["turns"]["labels"]) == ["apes", "builtin"]
    said = call(judge_main, ["remove", str(judged.path), "--judge", "apes"], capfd)
    assert said.status == 0 and f"rests on them, and stays: {judged.path}" in said.out
    page = render_report([Run.open(judged.path)])
    assert list(unpacked(page)["turns"]["labels"]) == ["builtin"]
    assert "labels that have been replaced or removed since" in page
    judged.check_finished()


# -- results --------------------------------------------------------------------------------------


def test_a_result_that_it_has_never_seen(judged):
    folder = moons(folder_of(judged.path, "moons"), judged)
    page = render_report([judged])
    for words in ("How many moons?", "There are 0.12 moons.", "No moons by day.", "0.1235"):
        assert words in page
    for words in ("a note &lt;b&gt;on", "no &lt;b&gt;moons", "moons: as seen"):
        assert words in page
    assert "quantity" in page and "term: sky" in page  # alike in all rows: said once
    assert base64.b64encode((folder / "orbit.svg").read_bytes()).decode() in page


def test_results_beside_the_run_count_if_they_are_of_it(judged, report, tmp_path):
    moons(tmp_path / f"{judged.path.name}-moons", judged)
    other = moons(tmp_path / f"{judged.path.name}-others")
    moons(tmp_path / "elsewhere", judged)
    page = render_report([judged])
    assert page.count('id="s1"') == 1 and page.count("There are 0.12 moons.") == 1
    assert "run-moons" in page and "run-others" not in page
    assert report(judged.path, "--results", other).status == 0
    assert "run-others" in (judged.path / "report.html").read_text()


def test_bits_and_outcomes_of_turns_come_from_results(judged):
    turns = judged.generations[list(KEY)].iloc[::2]
    each = [[0.5, -0.25]] * len(turns)
    bits = turns.assign(reaction_bits=np.arange(len(turns)) / 8, bits_by_token=each)
    moons(folder_of(judged.path, "moons"), judged, turns=bits)
    outcomes = turns.assign(dependent=1.0, run="run")
    moons(folder_of(judged.path, "rates-builtin"), judged, turns=outcomes)
    found = unpacked(render_report([judged]))["turns"]
    assert found["bits"][::2] == pytest.approx(bits["reaction_bits"], abs=5e-4)
    assert set(found["bits"][1::2]) == {None} and found["token_bits"][:2] == [[0.5, -0.25], None]
    assert found["labels"]["builtin"]["dependent"] == [1.0, None] * 30


def test_each_run_has_its_own_probabilities(judged, tmp_path):
    """A probe of two runs of the same conversations, whose contexts are named alike."""
    other = another(judged, tmp_path / "other")
    ids = judged.contexts["context_id"]
    predicted = pd.concat(
        [
            pd.DataFrame({"run": name, "context_id": ids, "probability": value})
            for name, value in (("run", 0.25), ("other", 0.75))
        ]
    )
    moons(folder_of(judged.path, "probe-mine"), judged, other, predictions=predicted)
    for runs, wanted in (
        ([judged, other], [0.25, 0.75] * 12),
        ([other, judged], [0.75, 0.25] * 12),
        ([judged], [0.25] * 12),
    ):
        contexts = unpacked(render_report(runs))["contexts"]
        assert contexts["probes"]["probe-mine"] == wanted


def test_two_runs_stand_side_by_side(judged, tmp_path):
    other = another(judged, tmp_path / "other")
    bare = another(judged, tmp_path / "bare")
    shutil.rmtree(bare.path / "judgements")
    for one in (judged, other):
        moons(folder_of(one.path, "moons"), one)
    page = render_report([judged, other, Run.open(bare.path)])
    assert page.count('<p class="small">3 queries</p>') == 2
    assert page.count('id="s1"') == 1 and 'id="s2"' not in page
    assert re.findall(r"<h\d class=\"of\">(.*?)</h", page) == ["run", "other"]
    assert page.count("There are no results yet") == 1
    assert "<b>bare.</b> There are no results yet" in page
    data = unpacked(page)
    assert data["runs"] == ["run", "other", "bare"] and len(data["turns"]["text"]) == 180
    contexts = data["contexts"]
    assert contexts["run"] == [0, 1, 2] * 12 and contexts["id"][::3] == contexts["id"][1::3]


def test_two_models_are_named_by_their_models_and_their_comparison_opens_the_page(judged, tmp_path):
    def renamed(record):
        record["identity"]["model"]["name"] = "another"

    other = rewritten(shutil.copytree(judged.path, tmp_path / "x" / "run"), "run.json", renamed)
    for one in (judged, other):
        moons(folder_of(one.path, "moons"), one)
    both = read(moons(tmp_path / "compare", judged, other))
    shutil.rmtree(tmp_path / "compare")
    about = {"kind": "compare", "identities": both.about["identities"]}
    write(replace(both, question="Which?", figures={}, about=about), tmp_path / "compare")
    page = render_report([judged, other], [tmp_path / "compare"])
    names = [judged.model["name"], "another"]
    assert unpacked(page)["runs"] == names
    assert (
        re.findall(r"<h\d class=\"of\">(.*?)</h", page) == names
    )  # of moons; the comparison is of both
    assert "<h1>Which?</h1>" in page and page.count("There are 0.12 moons.") == 3
    assert "data-elsewhere" not in page  # its numbers lead to turns
    assert render_report([judged], [tmp_path / "compare"]).count("data-elsewhere") == 1


def test_results_of_labels_that_were_replaced_say_so(judged):
    folder = moons(folder_of(judged.path, "moons"), judged)
    about = {"kind": "moons", "labellers": ["builtin"]}
    for digest, old in ((judged.labels.digest(["builtin"]), False), ("0" * 16, True)):
        labels = {judged.identity_digest: digest}
        write(replace(read(folder), figures={}, about=about | {"labels": labels}), folder)
        page = render_report([judged])
        assert ("labels that have been replaced or removed since." in page) == old


# -- the turns ---------------------------------------------------------------------------------


def test_a_page_that_would_be_too_large_holds_a_sample_of_whole_contexts(judged):
    _, words = browsers.browser([judged], ["run"], [[]])
    assert words.startswith("60 turns after 12 conversations.") and "not shown" in words
    limit = 40 * judged.settings["max_new_tokens"]  # of the tokens that 60 turns may have
    small, words = browsers.browser([judged], ["run"], [[]], limit)
    kept = json.loads(gzip.decompress(base64.b64decode(small)))
    count = len(kept["contexts"]["id"])
    assert count == 9 and len(kept["turns"]["text"]) == 45  # three of four in each dataset
    assert words.startswith("This page holds 45 of 60 turns")
    assert len(set(kept["contexts"]["dataset"])) == judged.contexts["dataset"].nunique()


def test_what_came_before_a_response_holds_the_calls_of_tools():
    call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
    said = [("user", "Rain?", None), ("assistant", "", [call]), ("tool", "no", None)]
    messages = [{"role": r, "content": c, "tool_calls": calls} for r, c, calls in said]
    assert browsers._query(messages) == (
        'user: Rain?\n\nassistant: weather({"city": "Köln"})\n\ntool: no'
    )


def test_fields_of_the_data_with_few_values_tell_groups_apart(judged):
    ids = judged.contexts["context_id"]
    fields = {"topic": ["maths", None] * 6, "n": range(12), "tags": [["a"]] * 12, "year": 2020}
    judged.metadata = pd.DataFrame(fields, pd.Index(ids))
    assert judged.groups["topic"].tolist() == ["maths", "–"] * 6
    assert list(judged.groups) == ["topic", "n", "year"]
    data, _ = browsers.browser([judged], ["run"], [[]])
    found = json.loads(gzip.decompress(base64.b64decode(data)))["contexts"]["fields"]
    assert found["topic"] == ["maths", "–"] * 6 and found["year"] == ["2020"] * 12


def test_tokens_are_as_long_as_javascript_counts(judged, monkeypatch):
    tokens = {0: "a ", 1: "😀", 2: " b\U000e0041", 3: "<end>"}  # the last letter is a tag
    fake = SimpleNamespace(decode=lambda ids, **_: tokens.get(ids[0], "?"))
    monkeypatch.setattr(browsers, "load_files", lambda *_, **__: SimpleNamespace(tokenizer=fake))
    rows = judged.generations
    rows["text"] = ["".join(tokens[n] for n in range(3)), *["a b"] * (len(rows) - 1)]
    rows["token_ids"] = [np.array([0, 1, 2, 3])] * len(rows)
    monkeypatch.setattr(
        type(judged), "windows", lambda self, some, of: iter([(self.contexts[some], rows[of])])
    )
    data, note = browsers.browser([judged], ["run"], [[]])
    turns = json.loads(gzip.decompress(base64.b64decode(data)))["turns"]
    assert turns["pieces"][turns["text"].index("a 😀 b�")] == [2, 2, 3]  # an emoji is two units
    assert turns["pieces"].count(None) == len(rows) - 1  # of texts that these aren't the tokens of
    assert "not shown" not in note


def test_a_context_has_its_likeliest_first_tokens_at_temperature_1(judged, monkeypatch):
    fake = SimpleNamespace(decode=lambda ids, **_: f"<{ids[0]}>")
    monkeypatch.setattr(browsers, "load_files", lambda *_, **__: SimpleNamespace(tokenizer=fake))
    for limit in (browsers.MAX_TOKENS, 40 * judged.settings["max_new_tokens"]):
        data, _ = browsers.browser([judged], ["run"], [[]], limit)
        contexts = json.loads(gzip.decompress(base64.b64decode(data)))["contexts"]
        places = {id_: at for at, id_ in enumerate(judged.contexts["context_id"])}
        for id_, first in zip(contexts["id"], contexts["first"], strict=True):
            shares = np.exp(judged.header_logits()[places[id_]].double().numpy())
            shares /= shares.sum()
            assert [share for _, share in first] == pytest.approx(np.sort(shares)[:-6:-1], abs=1e-3)
            ids = [int(token[1:-1]) for token, _ in first]
            assert shares[ids] == pytest.approx([share for _, share in first], abs=1e-3)


# -- texts stay texts ---------------------------------------------------------------------------

HOSTILE = [
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "</textarea></script></style><svg onload=window.hacked=1>",
    "[x](javascript:window.hacked=1) javascript:window.hacked=1",
    "left \u202e right \u2066 nothing \x00 here \x1b[2J",
    "=cmd|' /C calc'!A0 " + "x" * 100_000,
    "{{ 7 * 7 }} ${7 * 7} <!-- --> ]]> &amp;",
]


def hostile(run: Run) -> Run:
    """The run with such texts as turns, queries, responses, ids, datasets and its name."""
    for kind in ("contexts", "generations"):
        for file in (run.path / kind).glob("*.parquet"):
            table = pq.read_table(file)
            rows = table.to_pylist()
            for row in rows:
                worst = HOSTILE[row["order"] % len(HOSTILE)]
                row["context_id"] += worst[:40]
                row["dataset"] = worst[:60]
                if kind == "generations":
                    row["text"] = worst
                else:
                    for message in row["messages"]:
                        message["content"] = worst
            pq.write_table(type(table).from_pylist(rows, schema=table.schema), file)
    return rehashed(run.path.rename(run.path.with_name("<img src=x onerror=hacked=1>\u202e")))


def test_hostile_texts_are_inert(run):
    bad = hostile(run)
    plant(bad, "builtin", CATEGORIES)
    moons(folder_of(bad.path, "moons"), bad, text="".join(HOSTILE))
    page = render_report([bad])
    outside = re.sub(r'id="data">.*?</script>', "", page, flags=re.S)
    assert outside.count("<script") == 2  # the data's and the script's own
    assert "<img src=x" not in outside and "<svg onload" not in outside and "\u202e" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u2066]", page)
    data = unpacked(page)
    seen = "".join(data["turns"]["text"] + data["contexts"]["id"] + data["contexts"]["query"])
    assert "\u202e" not in seen and "\x00" not in seen and "\x1b" not in seen
    assert HOSTILE[0] in data["turns"]["text"]  # as it is: the script sets text only


def test_the_policy_allows_this_script_and_style_alone():
    page = rendered("annotate", packed({}), title="t</title><script>", rubric=(), order="o")
    assert "<title>t&lt;/title&gt;&lt;script&gt;</title>" in page
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)[1]
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    for tag in ("script", "style"):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert len(content) == 1
        digest = base64.b64encode(hashlib.sha256(content[0].encode()).digest()).decode()
        assert parts[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(|https?://", page)


# -- refusals -----------------------------------------------------------------------------------


def test_bad_input_ends_in_one_line(judged, report, tmp_path, capfd):
    assert str(tmp_path) in refusal(report(tmp_path))
    assert "holds no result" in refusal(report(judged.path, "--results", tmp_path))
    assert "is a folder" in refusal(report(judged.path, "--out", tmp_path))
    (tmp_path / "mine.py").write_text("mine")
    assert "no report wrote" in refusal(report(judged.path, "--out", tmp_path / "mine.py"))
    assert (tmp_path / "mine.py").read_text() == "mine"
    nowhere = tmp_path / "nowhere" / "page.html"
    assert "there is no folder" in refusal(report(judged.path, "--out", nowhere))
    (judged.path / "report.html").mkdir()
    assert "report.html is a folder; remove it" in refusal(report(judged.path))
    (judged.path / "report.html").rmdir()
    inside = judged.path / "contexts" / "page.html"
    assert "lies inside the run" in refusal(report(judged.path, "--out", inside))
    folder = moons(folder_of(judged.path, "moons"), judged, turns=pd.DataFrame({"a": [1]}))
    (folder / "turns.parquet").write_bytes(b"PAR1")
    assert "turns.parquet is damaged; remove it" in refusal(report(judged.path))
    for damage in ("{", "{}"):
        (folder / RESULT).write_text(damage)
        assert f"the result in {folder} is damaged" in refusal(report(judged.path))
    assert not (judged.path / "report.html").exists()


def test_findings_come_first_advice_and_the_judge_s_card_are_folded(judged):
    folder = moons(judged.path / "results" / "moons", judged)
    record = json.loads((folder / "result.json").read_text())
    record["sentence"] = "Moons were found. To tell more, raise --limit of sample."
    record["about"]["command"] = "ia-mech moons cache/run --full"
    (folder / "result.json").write_text(json.dumps(record))
    page = render_report([judged])
    top, folded = page.split("What would tell more", 1)
    assert "Moons were found." in top and "raise --limit" not in top.split("<h1>")[1]
    assert "raise --limit" in folded
    commands = folded.split("The commands", 1)[1]
    assert "ia-mech sample" in commands and "ia-mech moons cache/run --full" in commands


def test_follow_ups_that_take_most_of_their_words_from_the_query_are_counted():
    said = [
        ("Plan a weekend in Lisbon", "Can you plan a weekend in Lisbon?", 1.0, "none", True),
        ("Plan a weekend in Lisbon", "Is the castle open on a weekend?", 1.0, "none", True),
        ("Plan a weekend in Lisbon", "A weekend in Lisbon?", 0.0, "none", True),
        ("Plan a weekend in Lisbon", "A weekend in Lisbon?", 1.0, "remove", True),
        ("Plan a weekend in Lisbon", "A weekend in Lisbon?", 1.0, "none", False),
    ]
    rows = pd.DataFrame(said, columns=["query", "text", "follow_up", "perturbation", "drawn"])
    run = SimpleNamespace(labelled=lambda judge: rows, drawn=lambda these: these["drawn"])
    (line,) = doubts(run, "me")
    assert line.startswith("1 of the 2 follow-ups repeats mostly words of the query")
    rows.loc[0, "text"] = "What does the fado cost?"
    assert list(doubts(run, "me")) == []
    (line,) = doubts(run, "builtin")
    assert line.startswith("Half of the queries have at most 5 words.")
    rows["query"] = "word " * FITTED_WORDS
    assert list(doubts(run, "builtin")) == []
