"""The command line: one line for bad input and nothing written, and what a run says and keeps."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import families
import pytest
import tiny
import torch
from shell import Outcome, call, files, refusal

from ia_mech.collect import command as command_line
from ia_mech.collect.command import build_parser
from ia_mech.engine import plan
from ia_mech.run import Run

SMALL = ["--limit", "3", "--samples", "1", "--temperatures", "1", "--max-new-tokens", "4"]
DATA = ("contexts", "generations", "header_logits", "residuals")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only cost time in a model as small as this one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sample(tiny_model_dir, capfd):
    """Run the command line in this process, on the tiny model unless told otherwise."""

    def run(*arguments, small: bool = True) -> Outcome:
        words = ["--model", tiny_model_dir, *(SMALL if small else []), *map(str, arguments)]
        return call(command_line.main, words, capfd)

    return run


@pytest.fixture
def refused(sample, tmp_path):
    """Run a command that must be refused in one line; returns the line."""

    def call(*arguments, small: bool = True) -> str:
        before = files(tmp_path)
        outcome = sample(*arguments, small=small)
        line = refusal(outcome)
        assert files(tmp_path) == before
        scratch = [p.name for p in tmp_path.rglob("*") if p.name.startswith(".ia_mech")]
        assert scratch == []
        return line

    return call


def rows(path: Path, *objects: dict) -> Path:
    path.write_text("".join(json.dumps(o) + "\n" for o in objects), encoding="utf-8")
    return path


def question(**changes) -> dict:
    return {"id": "q1", "question": "What is 17 times 24?", "answer": "408."} | changes


# -- models that can't be -------------------------------------------------------------------------


def test_an_unknown_model(refused):
    line = refused("--model", "nobody/nothing")
    assert line.startswith("model 'nobody/nothing' could not be loaded (")
    assert "use --model smollm2-135m-instruct (embedded), a local directory" in line


def test_a_model_directory_without_configuration(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    line = refused("--model", tmp_path / "empty")
    assert line == f"{tmp_path}/empty holds no config.json; give a directory written by " + (
        "save_pretrained"
    )


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            families.plain,
            "the tokenizer has no chat template; use an instruct model, or its tokenizer",
        ),
        (
            lambda: families.build("no_user"),
            "the chat template refuses the roles user/assistant/user (Unsupported role: user); "
            "use conversations, or a model, whose template allows them",
        ),
    ],
    ids=["no template", "no user role"],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
def test_a_template_that_cannot_be_used(refused, tmp_path, family, expected, dry):
    made = tiny.subject("llama", family())
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    assert refused("--model", tmp_path / "model", *dry) == expected


def test_weights_that_are_cut_off(refused, tiny_model_dir, tmp_path):
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert refused("--model", folder).startswith(f"model '{folder}' could not be loaded (")


def test_a_revision_of_a_local_model(refused, tiny_model_dir):
    line = refused("--revision", "v2")
    assert line == f"--revision v2: {tiny_model_dir} is not a model of the hub; leave " + (
        "--revision out"
    )


# -- data that can't be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("gsm9k", "did you mean gsm8k?"),
        ("biultin", "did you mean builtin or builtin:open?"),
        ("wild-chat-1m", "did you mean wildchat?"),
    ],
)
def test_an_unknown_dataset_with_close_names(refused, name, close):
    line = refused("--dataset", name)
    assert line.startswith(f"no dataset '{name}' (there are builtin, builtin:maths, ")
    assert close in line and line.endswith("or a hub id org/name")


def test_an_unknown_dataset_without_close_names(refused):
    assert "did you mean" not in refused("--dataset", "xyz")
    assert refused("--dataset", "builtin:poems") == (
        "no built-in dataset 'builtin:poems'; use builtin or builtin:maths, "
        "builtin:instructions, builtin:open"
    )


def test_files_that_hold_no_conversations(refused, tmp_path):
    file = tmp_path / "chats.jsonl"
    assert refused("--dataset", file) == f"no file {file}; give the path of an existing file"
    file.write_text("not JSON\n")
    assert refused("--dataset", file).startswith("chats.jsonl line 1 is not JSON (Expecting value)")
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not JSON (not UTF-8 text)" in refused("--dataset", file)
    file.write_text("")
    assert refused("--dataset", file) == "dataset chats has no rows; give one that has"
    file.write_text("\n\n")
    assert refused("--dataset", file) == "dataset chats has no rows; give one that has"
    line = refused("--dataset", rows(file, {"foo": 1, "bar": 2}))
    assert line.startswith("chats.jsonl line 1: columns not recognised (found: foo, bar); name ")


def test_a_late_row_that_is_wrong_writes_nothing_either(refused, tmp_path):
    file = rows(tmp_path / "chats.jsonl", question(), question(id="q2"), question(id="q1"))
    line = refused("--dataset", file)
    assert line.startswith("chats.jsonl line 3: id 'q1' is that of row 1 and of row 3; make the ")
    with file.open("a") as handle:
        handle.write("{\n")
    assert "line 3" in refused("--dataset", file, "--limit", "all")
    rows(file, question(), {"id": "q2", "question": "Why?"})
    line = refused("--dataset", file, "--response", "given")
    assert line == (
        "conversation q2: no response, and --response given was asked for; "
        "use --response auto to let the model write the missing ones"
    )


def test_a_conversation_longer_than_the_models_context(refused, tmp_path):
    long = question(id="long", question="lighthouse " * 4096)
    line = refused("--dataset", rows(tmp_path / "chats.jsonl", question(), long))
    assert re.match(r"conversation long needs \d{4,} tokens, the model has 4096; ", line)
    assert "needs 44" in refused("--limit", "1", "--max-new-tokens", "4000")
    line = refused("--response", "generate", "--max-response-tokens", "4096")
    assert "the model has 4096" in line


def test_control_characters_of_the_data_do_not_reach_the_terminal_in_an_error(refused, tmp_path):
    line = refused("--dataset", rows(tmp_path / "chats.jsonl", {"\x1b[2J\x07evil\u202e": 1}))
    assert "(found: �[2J�evil�)" in line and line.isprintable()


def test_a_dataset_that_cannot_be_opened(refused, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", "chats.jsonl")

    monkeypatch.setattr("ia_mech.collect.preflight.open_conversations", denied)
    line = refused()
    assert "Permission denied: 'chats.jsonl'; check the path, its permissions and the room" in line


# -- settings that can't be -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--temperatures -1", "temperature -1.0 is not possible; give finite temperatures above 0"),
        ("--temperatures nan", "temperature nan is not possible; give finite"),
        ("--temperatures 1 inf", "temperature inf is not possible; give finite"),
        ("--temperatures 0", "temperature 0 is greedy decoding, which every run has; leave 0 out"),
        ("--temperatures 1 0.5 1.0", "a temperature is given twice (1.0 0.5 1.0); give each once"),
        ("--temperatures warm", "--temperatures warm: not all are numbers; give for example 0.7"),
        ("--temperatures 1 1,x", "--temperatures 1 1,x: not all are numbers; give for example"),
        ("--temperatures ,", "--temperatures ,: no number; give for example 0.7 1.0"),
        ("--temperatures", "argument --temperatures: expected at least one argument; see python"),
        ("--samples 0", "--samples 0; give at least 1"),
        ("--samples -3", "--samples -3; give at least 1"),
        ("--samples two", "argument --samples: invalid int value: 'two'; see python -m"),
        ("--max-new-tokens 0", "--max-new-tokens 0; give at least 1"),
        ("--max-response-tokens 0", "--max-response-tokens 0; give at least 1"),
        ("--batch-rows 0", "--batch-rows 0; give at least 1"),
        ("--limit 0", "argument --limit: '0' is neither a positive number nor all; see python"),
        ("--limit -1", "argument --limit: '-1' is neither a positive number nor all; see"),
        ("--limit many", "argument --limit: 'many' is neither a positive number nor all; see"),
        ("--limit 2.5", "argument --limit: '2.5' is neither a positive number nor all; see"),
        ("--limit ²", "argument --limit: '²' is neither a positive number nor all; see"),
        ("--header-logits 0", "argument --header-logits: '0' is neither full, none nor a positive"),
        ("--header-logits top", "argument --header-logits: 'top' is neither full, none nor a"),
        ("--header-logits ²", "argument --header-logits: '²' is neither full, none nor a"),
        ("--date tomorrow", "--date 'tomorrow' is not a date; give it as YYYY-MM-DD"),
        ("--date 2026-02-30", "--date '2026-02-30' is not a date; give it as YYYY-MM-DD"),
        ("--date 20260101", "--date '20260101' is not a date; give it as YYYY-MM-DD"),
        ("--date ''", "--date '' is not a date; give it as YYYY-MM-DD"),
        ("--device gpu", "--device 'gpu' is not a device; use auto, cpu, cuda or cuda:N"),
        ("--device cuda:", "--device 'cuda:' is not a device; use auto, cpu, cuda or cuda:N"),
        ("--device cpu:0", "--device 'cpu:0' is not a device; use auto, cpu, cuda or cuda:N"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8' (choose from"),
        ("--response maybe", "argument --response: invalid choice: 'maybe' (choose from"),
        ("--format csv", "argument --format: invalid choice: 'csv' (choose from"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag; see python -m ia_mech.sample"),
        ("--limit 3 'two\nlines'", "unrecognized arguments: two lines; see python -m"),
        ("--split train", "builtin has no splits, subsets or revisions; leave out --split"),
        ("--id-column key", "builtin_maths.jsonl line 1: no column 'key' (found: id, dataset,"),
        (
            "--positions header_9",
            "--positions header_9: this model's template has no such position; give all, header, "
            "or names among query_end, response_end, turn_end, turn_separator, header_0,",
        ),
    ],
)
def test_a_setting_that_cannot_be(refused, words, expected):
    assert refused(*shlex.split(words)).startswith(expected)


def test_cuda_on_a_machine_without(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        expected = "no CUDA device is available here; use --device cpu"
        assert refused("--device", device) == expected
        assert refused("--device", device, "--dry-run") == expected


def test_an_attention_that_cannot_be(refused):
    line = refused("--attention", "nope")
    assert "can't be run with --attention 'nope'" in line
    assert line.endswith("use --attention eager, or sdpa")


@pytest.mark.parametrize(
    "words", ["--dataset gsm9k", "--positions nowhere", "--device gpu", "--out {file}"]
)
def test_what_can_be_told_early_is_told_before_the_weights_are_loaded(
    refused, monkeypatch, tmp_path, words
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ia_mech.models.load.load", None)
    refused(*words.format(file=tmp_path / "file").split())


# -- folders that can't be ------------------------------------------------------------------------


def test_a_full_disk(refused, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    line = refused()
    assert line.startswith("the run needs about ") and " free; make room, lower --limit" in line


def test_a_file_as_out(refused, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    assert refused("--out", file) == f"{file} is a file; give another --out"
    assert refused("--out", file / "run") == f"{file} is a file; give another --out"
    assert refused("--out", file / "a" / "run") == f"{file} is a file; give another --out"


def test_foreign_files_in_out(refused, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    line = refused("--out", tmp_path / "thesis")
    assert line == f"{tmp_path}/thesis holds files but no run; give an empty or new folder as --out"


def test_an_out_that_is_not_writable(refused, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write everywhere")
    for out in (locked / "run", locked / "a" / "run"):
        line = refused("--out", out)
        assert line == f"{locked} is not writable; give another --out or set IA_MECH_CACHE"


def test_an_out_that_is_said_not_to_be_writable(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    line = refused("--out", tmp_path / "run")
    assert line == f"{tmp_path} is not writable; give another --out or set IA_MECH_CACHE"


def test_an_out_with_another_configuration(sample, refused, tmp_path):
    assert sample("--out", tmp_path / "run").status == 0
    line = refused("--out", tmp_path / "run", "--samples", "2", "--seed", "7")
    assert line.startswith(f"{tmp_path}/run holds another configuration (")
    assert "config.grid.samples: 1 there, 2 asked for" in line
    assert "config.grid.seed: 0 there, 7 asked for" in line
    assert "config.positions" not in line


def test_there_must_be_a_run_to_repair(refused, tmp_path):
    line = refused("--repair", "--out", tmp_path / "none")
    assert line.startswith("there is no run in ") and line.endswith("to begin one")


def test_a_dry_run_refuses_a_folder_that_the_run_would_refuse(refused, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds files but no run" in refused("--dry-run", "--out", tmp_path)


def test_a_damaged_part_is_named_and_repaired(sample, refused, tmp_path):
    out = tmp_path / "run"
    run = sample("--out", out).run
    digest = run.digest()
    damaged = next((out / "residuals" / "layer_02").iterdir())
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    line = refused("--out", out)
    assert re.match(rf"part \d+ of {out} is damaged: ", line) and "--repair" in line
    assert str(damaged.relative_to(out)) in line
    repaired = sample("--out", out, "--repair").run
    assert repaired.complete and repaired.verify() == [] and repaired.digest() == digest


def test_a_missing_part_is_named_and_repaired(sample, refused, tmp_path):
    out = tmp_path / "run"
    digest = sample("--out", out).run.digest()
    missing = next((out / "generations").iterdir())
    missing.unlink()
    assert f"{missing.relative_to(out)} is missing" in refused("--out", out)
    assert sample("--out", out, "--repair").run.digest() == digest


# -- dry runs and help ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "--limit 6 --samples 2 --temperatures 0.5 1 1.5 --max-new-tokens 8",
        "--limit 6 --samples 2 --temperatures 0.5 1 1.5 --max-new-tokens 8 --header-logits 10",
        "--limit 6 --samples 1 --temperatures 1 --max-new-tokens 4 --positions header_last "
        "--header-logits none",
        "--limit 24 --samples 1 --temperatures 1 --max-new-tokens 4",
    ],
)
def test_a_dry_run_writes_nothing_and_tells_what_a_run_then_writes(sample, tmp_path, words):
    outcome = sample(*words.split(), "--dry-run", small=False)
    assert outcome.status == 0 and outcome.err == ""
    assert list(tmp_path.iterdir()) == []
    told = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in outcome.out.splitlines())
    run = sample(*words.split(), small=False).run
    assert told["conversations"] == f"builtin: {len(run.contexts)}"
    limit = run.config["grid"]["max_new_tokens"]
    assert told["rows to decode"] == f"{len(run.generations)} x at most {limit} tokens"
    tokens = run.contexts["context_tokens"]
    assert told["context tokens"] == f"{tokens.sum()} (longest {tokens.max()})"
    assert told["positions kept"] == ", ".join(run.positions)
    assert told["responses to generate"] == "0"
    assert told["user header"] == repr("<|im_start|>user\n")
    size, unit, out = re.fullmatch(r"([\d.]+) (\w+), to (.*)", told["bytes to be written"]).groups()
    assert Path(out) == run.path
    size = float(size) * {"kB": 1e3, "MB": 1e6}[unit]
    parts = [p for kind in DATA for p in (run.path / kind).rglob("*") if p.is_file()]
    written = sum(part.stat().st_size for part in parts)
    assert abs(size - written) <= 0.3 * written


def test_a_dry_run_counts_the_responses_to_generate(sample, tmp_path):
    file = rows(tmp_path / "chats.jsonl", question(), {"id": "q2", "question": "Why?"})
    for policy, count in (("auto", 1), ("generate", 2)):
        outcome = sample("--dataset", file, "--response", policy, "--dry-run")
        assert re.search(rf"^responses to generate +{count}$", outcome.out, re.MULTILINE)


def test_help_names_every_flag_and_loads_no_torch(cache):
    code = (
        "import sys\n"
        "from ia_mech.collect.command import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stopped: assert stopped.code == 0\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules\n"
        "try: main(['--dtype', 'int8'])\n"
        "except SystemExit as stopped: assert stopped.code == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert len(flags) > 30
    for flag in flags:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", done.stdout), flag
    for action in build_parser()._actions:
        assert action.help
    assert not cache.exists()


# -- runs that are there already ------------------------------------------------------------------


def test_the_same_command_again_computes_nothing(sample, tmp_path, monkeypatch):
    first = sample()
    assert "weights" in first.err.splitlines()[0] and "finished before" not in first.err
    before = files(tmp_path)
    monkeypatch.setattr("ia_mech.collect.job.prefill", None)
    second = sample()
    assert second.status == 0 and second.out == first.out
    assert second.err == f"{first.run.path} was finished before; nothing was computed again\n"
    assert files(tmp_path) == before


class Interrupted:
    """An engine call that is interrupted from the n-th time on."""

    def __init__(self, original, limit: int) -> None:
        self.original, self.limit, self.calls = original, limit, 0

    def __call__(self, *arguments, **settings):
        self.calls += 1
        if self.calls > self.limit:
            raise KeyboardInterrupt
        return self.original(*arguments, **settings)


@pytest.mark.parametrize(("limit", "heading"), [(1, "one user turn"), (2, "two user turns")])
def test_the_turns_shown_are_of_as_many_contexts_as_there_are(sample, tmp_path, limit, heading):
    outcome = sample("--limit", limit, "--out", tmp_path / "run")
    _, found, shown = outcome.out.partition(f"{heading} (evenly spaced, not chosen)")
    assert found
    for context in outcome.run.contexts["context_id"]:
        assert shown.count(f"  {context} · ") == 1


def test_an_interrupted_run_says_what_is_kept_and_goes_on(sample, monkeypatch, tmp_path):
    from ia_mech.collect import job as collect

    monkeypatch.setattr("ia_mech.engine.plan.UNIT_BATCHES", 1)
    words = ["--batch-rows", "2"]  # one context at a time
    whole = sample(*words, "--out", tmp_path / "whole").run
    original = collect.prefill
    out = tmp_path / "run"
    monkeypatch.setattr(collect, "prefill", Interrupted(original, 1))
    outcome = sample(*words, "--out", out)
    assert outcome.status == 130 and outcome.out == ""
    assert outcome.err.splitlines()[-1] == (
        f"interrupted; contexts kept: 1, in {out}; the same command goes on from there"
    )
    assert "Traceback" not in outcome.err
    assert not Run.open(out).complete

    again = Interrupted(original, 2)
    monkeypatch.setattr(collect, "prefill", again)
    run = sample(*words, "--out", out).run
    assert again.calls == 2
    assert run.complete and run.digest() == whole.digest()


def test_an_interrupted_run_keeps_its_responses(sample, monkeypatch, tmp_path):
    from ia_mech.collect import responses

    out = tmp_path / "run"
    words = ["--response", "generate", "--max-response-tokens", "4", "--out", out]
    original = responses.prefill
    monkeypatch.setattr(plan, "CPU", replace(plan.CPU, response_share=64))
    monkeypatch.setattr(responses, "prefill", Interrupted(original, 1))
    outcome = sample(*words)
    assert outcome.status == 130
    assert f"interrupted; responses kept: 2, contexts kept: 0, in {out}; " in outcome.err
    monkeypatch.setattr(responses, "prefill", original)
    assert len(sample(*words).run.contexts) == 3


def test_an_interruption_before_anything_is_written(sample, monkeypatch, cache):
    monkeypatch.setattr("ia_mech.models.load.load", Interrupted(None, 0))
    outcome = sample()
    assert outcome == (130, "", "\ninterrupted; nothing was written yet\n")
    assert not cache.exists()


def test_another_spelling_of_the_same_settings_is_the_same_run(sample):
    first = sample("--temperatures", "0.5,1.0", "1.5").run
    assert first.config["grid"]["temperatures"] == [0.5, 1.0, 1.5]
    assert sorted(first.generations["temperature"].unique()) == [0, 0.5, 1.0, 1.5]
    for words in ("0.5 1 1.5", "0.5,1,1.5,", "0.5, 1 1.50"):
        second = sample("--temperatures", *words.split())
        assert "finished before" in second.err and second.run.path == first.path
    assert sample("--header-logits", "010").run.path == sample("--header-logits", "10").run.path


def test_the_folder_is_named_after_model_and_dataset(sample, tiny_model_dir, cache, monkeypatch):
    name = Path(tiny_model_dir).name
    run = sample("--dataset", "builtin:maths").run
    assert re.fullmatch(rf"{name}-builtin-maths-[0-9a-f]{{8}}", run.path.name)
    assert run.path.parent == cache
    monkeypatch.chdir(tiny_model_dir)
    outcome = sample("--model", ".", "--dry-run")
    assert f"to {cache}/{name}-builtin-" in outcome.out


# -- what a run says ------------------------------------------------------------------------------


def tables(out: str) -> list[list[dict[str, str]]]:
    """The tables of an output, as rows by column."""
    found = []
    for line in out.splitlines():
        cells = [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]
        if line.startswith("┃"):
            found.append([])
            header = cells
        elif line.startswith("│"):
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


def test_every_share_has_an_interval(sample):
    outcome = sample("--limit", "6", "--samples", "2", "--temperatures", "0.7", "1.3")
    turns, followups = tables(outcome.out)
    assert [row["T"] for row in turns] == ["greedy", "0.7", "1.3"]
    assert [row["rows"] for row in turns] == ["6", "12", "12"]
    assert [row["dataset"] for row in followups] == [
        "builtin-instructions",
        "builtin-maths",
        "builtin-open",
    ]
    shares = [row["ended by turn-end"] for row in turns]
    shares += [row["greedy writes"] for row in followups]
    for share in shares:
        value, low, high = map(float, re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", share).groups())
        assert 0 <= low <= value <= high <= 1 and low < high
    for row in followups:
        for column in ("log p / token", "bits / byte"):
            assert re.fullmatch(r"-?\d+\.\d\d \[-?\d+\.\d\d, -?\d+\.\d\d\]", row[column])
        assert re.fullmatch(r"-?\d+\.\d \[-?\d+\.\d, -?\d+\.\d\]", row["contrast, bits"])


def test_a_share_of_a_single_source_still_has_an_interval(sample):
    turns, _ = tables(sample("--limit", "1").out)
    for row in turns:
        assert re.fullmatch(r"\d\.\d\d \[(\d\.\d\d, \d\.\d\d|–)\]", row["ended by turn-end"])


def test_responses_that_are_cut_off_are_counted(sample):
    outcome = sample("--response", "generate", "--max-response-tokens", "3")
    cut = outcome.run.contexts["response_cut_off"]
    assert cut.any()
    assert f"{cut.sum()} of 3 responses were cut off at 3 tokens: a cut-off " in outcome.out
    assert "cut off" not in sample().out


def test_three_turns_are_shown(sample):
    outcome = sample()
    run = outcome.run
    shown = re.findall(r"^    user turn: (.*)$", outcome.out, re.MULTILINE)
    assert len(shown) == 3
    heads = re.findall(r"^  (\S+) · (greedy|T = 1)$", outcome.out, re.MULTILINE)
    assert [name for name, _ in heads] == run.contexts["context_id"].tolist()


@pytest.mark.parametrize("folder", ["run", "it's a run", 'a "$HOME" run'])
def test_the_commands_that_are_suggested_work(sample, capfd, tmp_path, folder):
    outcome = sample("--positions", "response_end", "--out", tmp_path / folder)
    words = shlex.split(re.search(r"^read it: (.*)$", outcome.out, re.MULTILINE)[1])
    assert words[:2] == ["python", "-c"] and len(words) == 3
    judge = shlex.split(re.search(r"^next: (.*)$", outcome.out, re.MULTILINE)[1])
    assert judge == ["python", "-m", "ia_mech.judge", "run", str(tmp_path / folder)]
    exec(words[2], {})
    assert capfd.readouterr().out.endswith("torch.Size([3, 32])\n")


EVIL = "\x1b[31mred\x07 \x1b]0;title\x9c\r\x00 \u202eleft [bold]bold[/bold] :cat: \\"


def controls(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}


def test_control_characters_of_texts_do_not_reach_the_terminal(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ia_mech.chat.format.ChatFormat.text", lambda self, ids: EVIL + "\nsecond\u2028"
    )
    evil = question(
        id=EVIL, question=EVIL, answer=EVIL, dataset="set\x1b[2J[red]", reference="Why?"
    )
    outcome = sample("--dataset", rows(tmp_path / "chats.jsonl", evil))
    assert outcome.status == 0
    assert controls(outcome.out) == set()
    assert controls(outcome.err) <= {"\r"}
    (turn,) = re.findall(r"^    user turn: (.*)$", outcome.out, re.MULTILINE)
    # Nothing is interpreted either: markup and emoji names are what the model wrote.
    assert turn == "�[31mred� �]0;title��� �left [bold]bold[/bold] :cat: \\⏎second�"
    assert tables(outcome.out)[1][0]["dataset"] == "set�[2J[red]"


def test_a_terminal_that_knows_ascii_only_is_enough(sample, monkeypatch, tiny_model_dir):
    monkeypatch.setattr("ia_mech.chat.format.ChatFormat.text", lambda self, ids: "né 日本")
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert sample().status == 0
    screen.flush()
    assert b"user turn: n? ??" in screen.buffer.getvalue()


def test_a_lens_that_cannot_be_written_does_not_cost_the_run(sample, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ia_mech.lens.save_lens", full)
    outcome = sample()
    assert outcome.status == 0 and outcome.run.complete
    assert "note: no offline lens for this model: [Errno 28] No space left" in outcome.err


def test_a_run_says_on_what_it_works(sample, tiny_model_dir, tiny_subject):
    assert sample().err.splitlines()[0] == (
        f"{tiny_model_dir}: 4 layers, d_model 32, float32 on cpu, "
        f"weights {tiny_subject.weights_hash}"
    )
