"""ia-mech judge: what run, check and rubric print and write, and what they refuse."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from judging import DECOYS, ROWS
from runs import rewritten
from shell import call, files, refusal
from stub_server import StubServer, completion

from ia_mech.cli import NOTHING
from ia_mech.judge import builtin_judge, prompt
from ia_mech.judge.__main__ import main
from ia_mech.judge.builtin import BuiltInJudge
from ia_mech.judge.rubric import ASSESSED, CANNOT_ASSESS, FOLLOW_UP, NAMES
from ia_mech.run import Run

SECRET = "sk-a-key-that-is-nowhere"


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch) -> None:
    """A cache of its own, a narrow terminal, no server and no key."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.fixture
def judge(capfd):
    """Run the command line in this process."""

    return lambda *arguments: call(main, [str(argument) for argument in arguments], capfd)


@pytest.fixture
def refused(judge, tmp_path):
    """Run a command that must be refused in one line; returns the line."""

    def refuse(*arguments) -> str:
        before = files(tmp_path)
        line = refusal(judge(*arguments))
        assert files(tmp_path) == before
        return line

    return refuse


def cells(out: str) -> list[list[str]]:
    """The rows of an output's tables, without their headers."""
    rows = [line for line in out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in rows]


QUERY = "Why does my sourdough loaf come out flat?"
RESPONSE = (
    "Most flat loaves are over-proofed. Shorten the second rise to about two hours, and press a "
    "finger in: the dent should fill slowly."
)
TURNS = {  # what the rules settle without their classifier
    "": "degenerate",
    "Thanks, that was very helpful!": "generic",
    QUERY: "repeats_query",
    "Most flat loaves are over-proofed. Shorten the second rise": "repeats_response",
}


def row(turn: str, **more) -> dict:
    return {"query": QUERY, "response": RESPONSE, "user_turn": turn} | more


def jsonl(path: Path, *rows: dict | str) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def annotated(tmp_path) -> Path:
    rows = [row(turn, category=category) for turn, category in TURNS.items()]
    rows[0]["source_id"] = rows[1]["source_id"] = 7  # may be a number
    rows[2]["source_id"] = None  # stands alone
    return jsonl(tmp_path / "turns.jsonl", *rows)


@pytest.fixture
def turns(tmp_path) -> Path:
    return jsonl(tmp_path / "turns.jsonl", *map(row, TURNS))


def all_items(run: Run, judge: str) -> set[str]:
    """Of the turns and the decoys."""
    return {*run.labels.judgements(judge)["item"], *run.labels.decoys(judge)["item"]}


# -- run ----------------------------------------------------------------------------------------


def test_the_built_in_judge_labels_every_turn(judge, run):
    outcome = judge("run", run.path)
    assert outcome.status == 0, outcome.err
    rows = run.labels.judgements("builtin")
    assert set(rows["status"]) == {"judged"} and set(rows["category"]) <= set(NAMES)
    assert (rows["rationale"].str.len() > 0).all()
    assert rows["cost"].isna().all() and rows["prompt_tokens"].sum() == 0
    assert run.labels.record("judgements", "builtin")["identity"]["kind"] == "builtin"
    assert builtin_judge().caveat in outcome.out
    distinct, shown = len(all_items(run, "builtin")), len(run.labels.decoys("builtin"))
    after = "a wrong conversation"
    judged = f"{ROWS} turns + {shown} decoys (turns shown after {after}), {distinct} distinct"
    assert f"judged {judged}, in " in outcome.out
    lines = outcome.out.splitlines()
    labels = [line.rsplit(" → ")[1] for line in lines if " → " in line]
    assert len(labels) == len(set(labels)) == min(5, rows["category"].nunique())
    shown = [line.partition("judge: ")[2].strip() for line in lines if "    judge: " in line]
    assert len(shown) == len(labels)
    for reason in shown:
        assert rows["rationale"].str.startswith(reason.removesuffix("…")).any()
    assert lines[-2:] == [
        f"labels: {run.path / 'judgements' / 'builtin.parquet'}",
        f"next: ia-mech rates {run.path}",
    ]


def test_a_run_in_place_of_a_command_is_told_the_command(refused, run):
    line = refused(run.path, "--judge", "builtin")
    assert line.endswith(f"; did you mean: ia-mech judge run {run.path} --judge builtin")


def test_a_dry_run_tells_what_a_server_would_be_asked_without_a_key(judge, run, tmp_path):
    before = files(tmp_path)
    outcome = judge("run", run.path, *LLM, "--dry-run", "--price", "1", "2")
    head, plan = outcome.out.splitlines()
    expected = rf"{ROWS} turns \+ {DECOYS} decoys, (\d+) distinct"
    distinct = int(re.fullmatch(expected, head)[1])
    assert plan.startswith(f"{distinct} requests to some-model, about ") and "$" in plan
    assert outcome.status == 0 and outcome.err == "" and files(tmp_path) == before


LLM = ("--judge", "llm", "--model", "some-model")


def verdict_reply(category: str):
    return completion(json.dumps({"rationale": "so", "category": category}))


def test_a_servers_verdicts_are_paid_for_once(judge, run, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    words = ["run", run.path, *LLM, "--price", "1000", "5000"]
    with StubServer(lambda body, n: verdict_reply(CANNOT_ASSESS if n % 2 else FOLLOW_UP)) as stub:
        first = judge(*words, "--base-url", stub.url)
        asked = len(stub.bodies)
        stands = judge(*words, "--base-url", stub.url)
        again = judge(*words, "--base-url", stub.url, "--replace")
        assert len(stub.bodies) == asked
    assert first.status == stands.status == again.status == 0, first.err
    assert "labels by some-model were there already" in stands.err and "$" not in stands.out
    rows = run.labels.judgements("some-model")
    assert asked == len(all_items(run, "some-model")) and rows["cached"].all()
    paid = f"{120 * asked} tokens, ${asked * 0.2:.4f}"
    assert f"{paid}\n" in first.out
    assert f"{paid} (${asked * 0.2:.4f} of it paid before)\n" in again.out
    follow_up, abstained = rows["follow_up"].sum(), (rows["category"] == CANNOT_ASSESS).sum()
    assert follow_up and abstained and follow_up + abstained == ROWS
    assert f"turns: follow-up {follow_up}, can't assess {abstained}\n" in again.out
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [content for content in kept if SECRET.encode() in content]


def test_a_run_without_a_usable_verdict_has_a_status_of_its_own(judge, run, turns, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    refusal = f"I, {SECRET}, can't [bold]help[/bold]\x1b[2J"
    with StubServer(lambda *_: completion(refusal=refusal)) as stub:
        server = (*LLM, "--base-url", stub.url, "--api-key-env", "OPENAI_API_KEY")
        outcome = judge("run", run.path, *server)
        assert outcome.status == NOTHING == 3
        assert outcome.out.splitlines()[-1].startswith("no turn could be judged")
        assert judge("check", turns, *server).status == NOTHING
    # Failures are counted by their messages, decoys' among them.
    failed = ROWS + DECOYS
    line = f"\n{failed} refused: I, [key], can't [bold]help[/bold]�[2J ({failed})\n"
    assert line in outcome.out and SECRET[:8] not in outcome.out + outcome.err
    kept = [path.read_bytes() for path in run.path.rglob("*.parquet")]
    assert not [content for content in kept if SECRET[:8].encode() in content]


def test_the_toy_judge_of_the_docs(judge, run, tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "judging.md").read_text("utf-8")
    code = re.search(r"`toy.py`:\n\n```python\n(.*?)```", page, re.DOTALL)[1]
    (tmp_path / "toy.py").write_text(f"{code}\n\nclass Bare(Judge):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ["run", run.path, "--judge", "toy:Toy", "--param", "letters=4"]
    outcome = judge(*words)
    assert outcome.status == 0, outcome.err
    rows = run.labels.judgements("Toy")
    assert (
        set(rows["category"]) <= {FOLLOW_UP, "new_topic"} and len(run.labels.decoys("Toy")) == ROWS
    )
    record = run.labels.record("judgements", "Toy")
    assert record["identity"] == {"kind": "toy", "letters": 4}
    line = refusal(judge(*words[:-1], "words=4", "--name", "other"))
    assert "unexpected keyword argument 'words'; give its arguments with --param" in line
    line = refusal(judge("run", run.path, "--judge", "toy:Bare"))
    assert line.startswith("--judge toy:Bare has no identity that is JSON")


# -- check --------------------------------------------------------------------------------------


def test_checking_annotated_turns_tells_how_well_the_judge_does(judge, annotated):
    outcome = judge("check", annotated)
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert "builtin against turns.jsonl" in lines and lines[-1] == builtin_judge().caveat
    found = {line[0]: line[1:] for line in cells(outcome.out)}
    for name in ASSESSED:
        count = "1" if name in TURNS.values() else "0"
        assert found[name][:2] == [count, count]


# -- what can't be ------------------------------------------------------------------------------


REFUSALS = [  # flags of check; and what is said of them
    ("--price 1 2", "--price needs --judge llm; add it, or drop it"),
    ("--max-cost 0", "--max-cost needs --judge llm; add it, or drop it"),  # 0 is given
    ("--judge json:Toy --model m", "--model needs --judge llm or --judge hf; add it, or drop it"),
    ("--judge llm", "--judge llm needs a model; give --model NAME"),
    ("--judge :Toy", "argument --judge: ':Toy' is none of builtin, llm, hf and MODULE:CLASS; see"),
    ("--judge json:Toy", "--judge json:Toy: module 'json' has no attribute 'Toy'; check it"),
    ("--judge json:JSONDecoder", "--judge json:JSONDecoder is no subclass of ia_mech.judge.verd"),
    ("--judge no_such.module:Toy", "--judge no_such.module:Toy: No module named 'no_such'; check"),
    ("--judge llm --model m --param temperature", "--param 'temperature' isn't KEY=VALUE; give"),
    ("--judge llm --model m --param model=x", "--param model can't be set; use --model"),
    ("--judge llm --model m --max-cost 1", "--max-cost needs the price; give --price IN OUT as"),
    ("--judge llm --model m --timeout nan", "--timeout nan is not above 0"),
    ("--judge llm --model m --price -1 2", "--price can't be negative"),
    ("--judge llm --model m --param response_format=x", "--param response_format can't be set"),
    ("--judge llm --model m --base-url localhost:8000", "--base-url is not the address"),
    ("--judge llm --model m --base-url http://user:password@x/v1", "--base-url is not the address"),
    ("--judge llm --model m --base-url http://x/v1?token=hidden", "--base-url is not the address"),
]


def test_flags_that_cannot_be(refused, turns):
    for words, fragment in REFUSALS:
        assert refused("check", turns, *words.split()).startswith(fragment), words


def test_the_subject_model_is_refused_by_name_and_under_another(
    run, refused, judge, tiny_model_dir, tiny_subject, tmp_path, monkeypatch
):
    words = ["run", run.path, "--judge", "hf", "--device", "cpu", "--dry-run", "--model"]
    monkeypatch.setattr(prompt, "system_message", lambda *_, names_only: "One of: generic")
    with monkeypatch.context() as unloaded:
        unloaded.setattr("ia_mech.judge.hf.load", None)
        assert refused(*words, run.model["name"]).endswith("give another --model, or --force")
    described = tiny_subject.describe()
    run = rewritten(run.path, "run.json", lambda record: record["identity"].update(model=described))
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    assert refused(*words, copy).startswith(f"{copy} is the subject model of {run.path}: ")
    outcome = judge(*words, copy, "--force")
    assert outcome.status == 0, outcome.err


GOOD = row("And then?", category=FOLLOW_UP)
LINES = [  # the second line of a file; and what is said of it
    ("  \n{", "line 3 of {file} is not JSON (Expecting property name"),  # blank lines count
    ("[]\n[]\n{", "line 2 of {file} isn't a JSON object (and 2 lines more); correct it"),
    ({"query": QUERY, "user_turn": "x"}, "line 2 of {file} lacks a text; each needs query, resp"),
    (row(["list"]), "line 2 of {file} lacks a text; each needs "),
    (row("x", category="Generic"), "line 2 of {file}: no category 'Generic' in the rubric; give"),
    (row("x", category=["generic"]), "line 2 of {file}: no category ['generic'] in the rubric; "),
]


def test_a_file_that_can_not_be_read_is_refused(refused, tmp_path):
    file = tmp_path / "turns.jsonl"
    assert f"No such file or directory: '{file}'; check the path" in refused("check", file)
    for line, fragment in LINES:
        jsonl(file, GOOD, line, GOOD)
        assert refused("check", file).startswith(fragment.format(file=file))
    file.write_text("\n \n")
    assert refused("check", file) == f"{file} holds no turn; give a JSON-lines file"
    file.write_bytes(b"\xff\xfe\x00")
    assert refused("check", file).startswith(f"line 1 of {file} is not JSON (not UTF-8 text")
    assert f"Is a directory: '{tmp_path}'; check the path" in refused("check", tmp_path)


def test_a_run_that_can_not_be_written_to_is_refused_before_it_is_judged(refused, run, monkeypatch):
    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    monkeypatch.setattr(BuiltInJudge, "judge", None)
    line = refused("run", run.path)
    assert line == f"{run.path} is not writable (Permission denied); judge a copy of the run"
