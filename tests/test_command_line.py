"""The command line: one line for bad input and nothing written, and what a run says and keeps."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shell import Outcome, call, files, refusal

from ia_mech import console
from ia_mech.cli import path_of, program, shell_word
from ia_mech.collect import command as command_line
from ia_mech.collect.plan import Plan
from ia_mech.collect.summary import print_run
from ia_mech.console import COMMANDS
from ia_mech.data.conversations import ConversationSource
from ia_mech.models import embedded
from ia_mech.run import Run, RunWriter
from ia_mech.settings import Settings

SMALL = ["--limit", "3", "--samples", "1", "--temperatures", "1", "--max-new-tokens", "4"]
DATA = ("contexts", "generations", "header_logits", "residuals")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "cache"


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


# -- what is refused -------------------------------------------------------------------------------

REFUSED = {  # words, in which {tmp} is a folder with the files below: the beginning of the line
    "--dataset gsm9k": "no dataset 'gsm9k' (did you mean gsm8k?); there are builtin, ",
    "--dataset {tmp}/none.jsonl": "no file {tmp}/none.jsonl; give the path of an existing file",
    "--dataset {tmp}/text.jsonl": "text.jsonl line 1 is not JSON (Expecting",
    "--dataset {tmp}/blank.jsonl": "dataset blank has no rows; give one that has",
    "--device gpu": "--device 'gpu' is not a device; use auto, cpu, cuda or cuda:N",
    "--device cuda": "--device cuda: this machine has 0 CUDA device(s); use --device cpu",
    "--device cuda:1": "--device cuda:1: this machine has 0 CUDA device(s); use --device cpu",
    "--intervention v.safetensors": "there is no steering vector v.safetensors; write it",
    "--split train": "builtin has no splits, subsets or revisions; leave out --split",
    "--revision v2": "--revision v2: ",
    "--id-column key": "builtin_maths.jsonl line 1: no column 'key' (found: id, source_id,",
    "--limit 1 --max-new-tokens 4000": "builtin_maths.jsonl line 1 (id maths-01): it needs 44",
    "--positions header_9": "--positions header_9: this model's template has no such position; "
    "give all, header, or names among query_end, response_end, turn_end, turn_separator, header_0,",
    "--out {tmp}/text.jsonl": "{tmp}/text.jsonl is a file; give another --out or set IA_MECH_CACHE",
    "--out {tmp}/text.jsonl/a/run": "{tmp}/text.jsonl is a file; give another --out",
    "--out {tmp}/thesis": "{tmp}/thesis holds files but no run; give an empty or new folder as",
    "--out {tmp}/run/sub": "{tmp}/run/sub lies inside the run {tmp}/run; write it somewhere else",
    "--out {tmp}/link/sub": "{tmp}/link/sub lies inside the run {tmp}/run; write it somewhere else",
    "--out ~no-one/run": "~no-one/run: there is no user no-one; give the whole path, or ./~no-one",
    "--dataset ~no-one/x.jsonl": "~no-one/x.jsonl: there is no user no-one; give the whole path",
    "--intervention ~no-one/v": "~no-one/v: there is no user no-one; give the whole path",
    "--out /proc/foo": "/proc is not writable (No such file or directory); give another --out",
}


@pytest.fixture
def odd_files(tmp_path, merged) -> Path:
    (tmp_path / "text.jsonl").write_text("not JSON\n")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    shutil.copytree(merged.path, tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize(("words", "expected"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_go_with_data_model_machine_or_folder_is_one_line(
    refused, odd_files, monkeypatch, words, expected
):
    if "/proc" in words and not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = refused(*words.format(tmp=odd_files).split())
    assert line.startswith(expected.format(tmp=odd_files))


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(monkeypatch, tmp_path, sample):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert path_of("~/run") == tmp_path / "run"
    monkeypatch.setenv("IA_MECH_CACHE", "~/runs")
    assert embedded.models_dir() == tmp_path / "runs" / "models"
    assert Settings().folder().parent == tmp_path / "runs"
    monkeypatch.delenv("IA_MECH_CACHE")
    assert embedded.models_dir() == tmp_path / "xdg" / "ia_mech" / "models"
    assert sample("--limit", "1", "--out", "~/run")[0] == 0
    assert Run.open("~/run").path == tmp_path / "run"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch, refused):
    def no_entry(_):
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    line = "~/run: this user has no home folder; set HOME; or set IA_MECH_CACHE, and give whole"
    assert refused("--out", "~/run").startswith(line)
    monkeypatch.delenv("IA_MECH_CACHE")
    assert refused("--out", "run", "--model", "smollm2-135m-instruct").startswith("~/.cache: this")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert refused("--out", "run", "--model", "org/model").startswith("~/.cache/huggingface/hub: ")


def test_what_the_machine_refuses_is_one_line(refused, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", "chats.jsonl")

    with monkeypatch.context() as patch:
        patch.setattr("ia_mech.data.conversations.open_conversations", denied)
        expected = "Permission denied: 'chats.jsonl'; check the path, its permissions and its disk"
        assert expected in refused()
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    assert re.match(r"the run needs about .* free; free some space, lower --limit", refused())


@pytest.mark.parametrize(
    "words",
    ["--dataset gsm9k", "--device gpu", "--out {file}", "--intervention {file}", "--samples 0"],
)
def test_what_needs_no_model_is_checked_before_anything_is_fetched(
    refused, monkeypatch, tmp_path, words
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("ia_mech.models.embedded.directory", None)
    words = words.format(file=tmp_path / "file").split()
    refused("--model", "smollm2-135m-instruct", *words)
    refused("--model", "smollm2-135m-instruct", *words, "--dry-run")


def test_what_needs_no_weights_is_checked_before_they_are_loaded(refused, monkeypatch):
    monkeypatch.setattr("ia_mech.collect.job.team_of", None)
    refused("--positions", "nowhere")


def test_data_without_a_usable_row_are_refused_before_a_model_is_looked_for(
    refused, monkeypatch, tmp_path
):
    monkeypatch.setattr("ia_mech.collect.plan.load_files", None)
    data = rows(tmp_path / "chats.jsonl", question(question=""), question(id="q2", question=3))
    assert "chats.jsonl line 2 (id q2)" in refused("--dataset", data)


def test_data_is_read_once_and_a_context_rendered_once(sample, monkeypatch):
    read, rendered = [], []
    made, render = ConversationSource._made, Plan.render
    monkeypatch.setattr(ConversationSource, "_made", lambda *a: read.append(a) or made(*a))
    monkeypatch.setattr(Plan, "render", lambda *a: rendered.append(a) or render(*a))
    assert len(sample().run.contexts) == len(rendered) == 3
    assert len(read) == 1 + 3  # the first row shows whether the data can be used


# -- dry runs -------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_says_what_a_run_then_writes(sample, tmp_path):
    words = "--limit 6 --samples 2 --temperatures 0.5 1 1.5 --max-new-tokens 8"
    outcome = sample(*words.split(), "--dry-run", small=False)
    assert outcome.status == 0 and re.fullmatch(r"loading \S+ …\n", outcome.err)
    assert list(tmp_path.iterdir()) == []
    plan = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in outcome.out.splitlines())
    run = sample(*words.split(), small=False).run
    assert plan["conversations"] == f"builtin: {len(run.contexts)}"
    limit = run.settings["max_new_tokens"]
    assert plan["user turns"] == f"{len(run.generations)} x at most {limit} tokens"
    tokens = run.contexts["context_tokens"]
    assert plan["context tokens"] == f"{tokens.sum()} (longest {tokens.max()})"
    assert plan["positions kept"] == ", ".join(run.positions)
    assert plan["user header"] == repr("<|im_start|>user\n")
    size, unit, out = re.fullmatch(r"([\d.]+) (\w+), to (.*)", plan["bytes to be written"]).groups()
    assert Path(out) == run.path
    size = float(size) * {"kB": 1e3, "MB": 1e6}[unit]
    parts = [p for kind in DATA for p in (run.path / kind).rglob("*") if p.is_file()]
    written = sum(part.stat().st_size for part in parts)
    assert abs(size - written) <= 0.3 * written


def test_output_that_is_not_read_to_the_end_is_no_error():
    """Output of Python's own print, and of the console that prints tables."""
    code = "import sys; from ia_mech.cli import run_command; from ia_mech.display import console; "
    code += "sys.exit(run_command(lambda: {}('text'), str))"
    for write in ("print", "console().print"):
        command = [sys.executable, "-c", code.format(write)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()  # as `| head -0` does
            assert process.stderr.read() == b""
            assert process.wait() == 141


@pytest.mark.parametrize("begun", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN); "])
def test_a_scheduler_s_sigterm_does_what_ctrl_c_does(begun):
    """Also where a script began the job in the background, with Ctrl-C ignored."""
    code = "import os, signal, sys, time; from ia_mech.cli import run_command; " + begun
    code += "stop = lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)); "
    code += "sys.exit(run_command(stop, lambda: 'all is kept'))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130 and ended.stderr == "\ninterrupted; all is kept\n"


@pytest.mark.parametrize("words", [["smaple"], ["sample", "--modle", "x"]])
def test_a_mistyped_word_is_told_what_was_meant(words, capfd):
    line = refusal(call(console.main, words, capfd))
    assert f"(did you mean {'sample' if len(words) == 1 else '--model'}?)" in line


# -- runs that are there already ------------------------------------------------------------------


MANY = ["--limit", "6", "--batch-rows", "4", "--workers", "1"]  # parts of 1, 2, 1 and 2 contexts


def stopped(monkeypatch, after: int, before_it=lambda: None) -> list[str]:
    """Interrupt a run after so many parts of contexts; returns their names as they are written."""
    written: list[str] = []
    original = RunWriter.add_contexts

    def add_contexts(self, name, *arguments, **options) -> None:
        if len(written) == after:
            before_it()
            raise KeyboardInterrupt
        original(self, name, *arguments, **options)
        written.append(name)

    monkeypatch.setattr(RunWriter, "add_contexts", add_contexts)
    return written


def test_an_interrupted_run_says_what_is_kept_and_goes_on(sample, monkeypatch, tmp_path):
    out = tmp_path / "run"
    command = (*MANY, "--out", out)

    def there() -> str:
        outcome = sample(*command, "--dry-run")
        assert outcome.status == 0, outcome.err
        return re.search(r"^of this already there +([^;\n]*)", outcome.out, re.MULTILINE)[1]

    assert there() == "nothing"
    for kept, line in (
        (
            0,
            "nothing was kept: turns are written 2 conversations at a time",
        ),
        (
            1,
            f"kept in {out}: the turns of 1 of 6 conversations",
        ),
    ):
        with monkeypatch.context() as patch:
            stopped(patch, kept)
            outcome = sample(*command)
        assert outcome.status == 130 and outcome.out == "" and "Traceback" not in outcome.err
        *_, said, again = outcome.err.splitlines()
        assert said == f"interrupted; {line}"
        assert again.startswith("next: ") and " sample --model " in again
        assert again.endswith(" " + shlex.join(map(str, command))), "all flags, to be copied"
        assert there() == f"0 responses, {kept} contexts"
    with monkeypatch.context() as patch:
        written = stopped(patch, -1)
        run = sample(*command).run
    assert run.complete and len(written) == run.record["parts"]["contexts"] - 1
    assert there() == "all of it: nothing would be computed again"

    # The same command again computes nothing; another one is refused with the flags that differ.
    before = files(tmp_path)
    outcome = sample(*command)
    assert f"{out} was finished before; nothing was computed again" in outcome.err.splitlines()
    for dry in ([], ["--dry-run"]):
        outcome = sample(*command, "--samples", "2", "--seed", "7", *dry)
        line = refusal(outcome._replace(err=outcome.err.splitlines()[-1] + "\n"))
        assert "--samples is 1 there, 2 here, --seed is 0 there, 7 here; " in line
    assert files(tmp_path) == before


@pytest.mark.parametrize("damage", [b"", b'{"parts": 3}'])
def test_an_interrupted_run_whose_manifest_is_damaged_says_so(
    sample, monkeypatch, tmp_path, damage
):
    file = tmp_path / "run" / "manifests" / "contexts-00000.json"
    stopped(monkeypatch, 1, lambda: file.write_bytes(damage))
    outcome = sample(*MANY, "--out", tmp_path / "run")
    assert outcome.status == 130 and "Traceback" not in outcome.err
    assert outcome.err.splitlines()[-1].startswith(f"interrupted; {file} is damaged")
    assert refusal(sample(*MANY, "--out", tmp_path / "run")).startswith(f"{file} is damaged")


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: os.truncate(file, 9)])
def test_the_same_command_computes_a_damaged_part_again(sample, tmp_path, damage):
    digest = sample(*MANY, "--out", tmp_path / "run").run.digest()
    for folder in ("generations", "residuals"):
        damage(min((tmp_path / "run" / folder).iterdir()))
    outcome = sample(*MANY, "--out", tmp_path / "run")
    assert outcome.status == 0 and "damaged" in outcome.err
    assert outcome.run.digest() == digest and outcome.run.verify() == []


def test_rows_that_cannot_be_used_are_refused_or_skipped_counted_and_listed(
    sample, refused, tmp_path
):
    good, bad = question(), {"id": "q2", "question": 3}
    data = rows(tmp_path / "chats.jsonl", bad, good, question(id="q3", question=""))
    said = refused("--dataset", data)
    assert (
        said.startswith("chats.jsonl line 1 (id q2): ") and "; chats.jsonl line 3 (id q3)" in said
    )
    for words in (["--dry-run"], []):
        outcome = sample("--dataset", data, "--skip-unusable", *words)
        notes = [line for line in outcome.out.splitlines() if line.startswith("note: skipped, ")]
        assert len(notes) == 2 and "line 1" in notes[0] and "line 3" in notes[1]
        fewer = f"note: {data} has fewer conversations than --limit 3: 1"
        assert fewer in (outcome.out + outcome.err).splitlines()
    assert outcome.run.contexts["context_id"].tolist() == ["q1"]


def test_rows_that_are_faulty_or_too_long_are_named_in_one_error(refused, tmp_path):
    empty, long = question(id="q2", question=""), question(id="q3", response="so " * 9_000)
    said = refused("--dataset", rows(tmp_path / "chats.jsonl", question(), empty, long))
    assert said.startswith("chats.jsonl line 2 (id q2): the query is empty; chats.jsonl line 3 (id")
    assert "): it needs " in said and said.count("--skip-unusable") == 1


def test_a_column_that_may_be_the_real_follow_up_is_pointed_at_where_there_is_none(
    sample, tmp_path
):
    row = question(next_turn="And 18 times 24?")
    hint = "(if next_turn is what the user said next: --followup-column next_turn)"
    words = ("--dry-run", "--dataset", rows(tmp_path / "chats.jsonl", row))
    assert hint in sample(*words).out
    assert "said next" not in sample(*words, "--followup-column", "next_turn").out


def test_what_was_read_of_a_file_is_said_before_anything_is_computed(sample, tmp_path):
    rows_ = [
        question(system="Be brief.", reference="408"),
        question(id="q2", messages=[{"role": "user", "content": "Why?"}], answer="7"),
        question(id="q3", follow_up="And 18 times 24?"),
    ]
    del rows_[1]["question"]
    rows_[2]["answer"] = '[{"role": "assistant", "content": "408."}]'
    data = rows(tmp_path / "chats.jsonl", *rows_)
    read = (
        "3 rows: messages from `messages`, query from `question`, response from `answer`, system "
        "message from `system`, real follow-up from `follow_up`, gold answer from `answer`, "
        "id from `id`, "
        "1 with a system message of their own, 2 get the template's default one, 1 whose "
        "response was a text with messages, read as these, 1 without a response (the model will "
        "write it), 1 with a later user turn, the real follow-up, 1 with a gold answer"
    )
    words = ("--dataset", data, "--max-response-tokens", "3")
    planned = sample(*words, "--dry-run")
    assert re.search(r"^what was read +(.*)$", planned.out, re.MULTILINE)[1] == read
    gold = "reference (if reference is a gold answer: --answer-column reference)"
    assert f"note: columns that the model doesn't see (metadata): {gold}\n" in planned.out
    named = sample(*words, "--query-column", "question", "--dry-run", "--skip-unusable")
    assert "query from `question`, response from `answer`" in named.out
    said = sample(*words).err.splitlines()
    assert said[1] == f"{data}: {read}" and "layers, d_model" not in " ".join(said[:2])


def test_without_docstrings_nothing_runs():
    words = [sys.executable, "-OO", "-m", "ia_mech.sample", "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.endswith("removes; use python -O\n")


# -- what a run says ------------------------------------------------------------------------------


def test_one_table_is_shown_unless_all_are_asked_for(sample, tmp_path):
    data = rows(tmp_path / "chats.jsonl", question(follow_up="And 18 times 24?"))
    short = sample("--dataset", data, "--out", tmp_path / "run").out
    assert "--full: 1 more table\n" in short and "bits / byte" not in short
    full = sample("--dataset", data, "--out", tmp_path / "run", "--full").out
    assert "--full" not in full and "bits / byte" in full and "greedy writes: share" in full


@pytest.mark.parametrize("where", ["active", "below", "elsewhere", "not installed"])
def test_a_command_is_printed_as_it_is_typed(tmp_path, monkeypatch, where):
    (tmp_path / "env" / "bin").mkdir(parents=True)
    own = tmp_path / "env" / "bin" / "ia-mech"
    if where != "not installed":
        own.write_text("#!/bin/sh\n")
        own.chmod(0o755)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", str(own.parent) if where == "active" else "/nowhere")
    monkeypatch.chdir(Path(__file__).parent if where == "elsewhere" else tmp_path)
    assert (
        program()
        == {
            "active": "ia-mech",
            "below": "env/bin/ia-mech",
            "elsewhere": str(own),
            "not installed": "env/bin/python -m ia_mech.console",
        }[where]
    )


def test_unfinished_responses_are_marked_and_counted(sample):
    outcome = sample("--response", "generate", "--max-response-tokens", "3")
    run = outcome.run
    cut = run.contexts.set_index("context_id")["response_unfinished"]
    assert cut.any() and (run.contexts["response_tokens"] <= 3).all()
    assert (run.generations["response_unfinished"] == run.generations["context_id"].map(cut)).all()
    assert f"responses are unfinished ({cut.sum()} cut off); the limit was 3 tokens" in outcome.out
    heads = re.findall(r"^  (\S+) · (greedy|T = 1)$", outcome.out, re.MULTILINE)
    assert [name for name, _ in heads] == run.contexts["context_id"].tolist()


@pytest.mark.parametrize(
    "folder", ["run", 'it\'s a "$HOME" run', "two  lines\n\\x and a tab\t", "-r é"]
)
def test_the_commands_that_are_suggested_work(merged, capfd, tmp_path, folder):
    path = shutil.copytree(merged.path, tmp_path / folder)
    print_run(Run.open(path))
    out = capfd.readouterr().out
    words = in_bash(re.search(r"^from Python: (.*)$", out, re.MULTILINE)[1])
    assert words[:2] == ["python", "-c"] and len(words) == 3
    judge = in_bash(re.search(r"^next: (.*)$", out, re.MULTILINE)[1])
    assert judge == ["ia-mech", "judge", "run", str(path)]
    exec(words[2], {})
    assert re.search(r"torch.Size\(\[.*32\]\)\n$", capfd.readouterr().out)


def in_bash(command: str) -> list[str]:
    """The words of a command, as the shell takes them."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_paths_are_quoted_for_a_shell_on_one_line():
    paths = ["plain", "é", "a b", "it's", "two\nlines", "a  b ", "\x1b[31m\u202e", "a\udcff", "-x"]
    found = [shell_word(path) for path in paths]
    assert all(word.isprintable() and word == " ".join(word.split()) for word in found)
    assert found[0] == "plain"
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {' '.join(found)}"], capture_output=True)
    read = [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
    assert read == [*paths[:-1], "./-x"]


def test_a_lens_that_cannot_be_written_does_not_cost_the_run(sample, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ia_mech.collect.job.save_lens", full)
    outcome = sample()
    assert outcome.status == 0 and outcome.run.complete
    assert "note: no offline lens for this model: [Errno 28] No space left" in outcome.err


# -- from Python ----------------------------------------------------------------------------------


def test_a_run_in_three_lines(tiny_model_dir, tmp_path, capfd):
    from ia_mech import Run, sample
    from ia_mech.display import Quiet

    before = torch.get_num_threads()
    settings = {"limit": 3, "samples": 1, "temperatures": [0.7, 1.0], "max_new_tokens": 4}
    settings |= {"model": tiny_model_dir, "positions": ["header"]}
    run = sample(tmp_path / "run", threads=before + 1, **settings)
    assert isinstance(run, Run) and run.complete and run.path == tmp_path / "run"
    out, err = capfd.readouterr()
    assert not out and "engine: agrees" in err
    assert sample(tmp_path / "run", progress=Quiet(), **settings).complete
    assert capfd.readouterr() == ("", "")
    assert run.settings["temperatures"] == [0.7, 1.0] and len(run.generations) == 9
    # Threads are recorded and set back; another number of them is no other run.
    assert run.sessions[0]["threads"] == before + 1 and torch.get_num_threads() == before
    # The command with the same settings finds it finished.
    words = "--limit 3 --samples 1 --temperatures 0.7 1 --max-new-tokens 4 --positions header"
    words = ["--model", tiny_model_dir, *words.split(), "--out", str(tmp_path / "run")]
    assert "finished before" in call(command_line.main, words, capfd).err


def test_the_function_and_the_command_have_one_name():
    import ia_mech

    command = [sys.executable, "-m", "ia_mech.sample", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: ia-mech sample")
    with pytest.raises(ImportError, match="from ia_mech import sample"):
        importlib.import_module("ia_mech.sample")
    assert ia_mech.sample is command_line.sample and ia_mech.Run is Run
    assert {"sample", "label", "study", "Run"} <= set(dir(ia_mech))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ia_mech.nothing  # noqa: B018


RUN_WORDS = {
    "study": ["./nosuch"],
    "sample": ["--model", "./nosuch"],
    "judge": ["run", "nosuch"],
    "annotate": ["export", "nosuch"],
    "compare": ["nosuch", "nosuch"],
    "post-training": ["compare", "nosuch"],
}
ANSWER = """
import contextlib, importlib, io, json, sys
for module, words, status in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        try:
            found = importlib.import_module(module).main(words)
        except SystemExit as stopped:
            found = stopped.code
    assert found == status, (module, words, found, said.getvalue())
    slow = {"torch", "transformers", "sklearn", "matplotlib", "scipy.stats", "openai"}
    slow &= set(sys.modules)
    assert not slow, (module, words, slow)
    assert status == 0 or said.getvalue().count("\\n") == 1, said.getvalue()
"""


def test_help_and_refusals_wait_for_no_import_that_takes_seconds(run, tmp_path):
    """For every command: a wrong path, a bad flag, a read-only folder, another run."""
    (tmp_path / "file").touch()
    calls = []
    for name, (module, _) in COMMANDS.items():
        words = RUN_WORDS.get(name, ["nosuch"])
        calls += [(module, ["--help"], 0), (module, words, 2), (module, [*words, "--nosuch"], 2)]
    for name in ("reaction", "mass-vector", "steering", "interchange", "rates"):
        calls.append((COMMANDS[name][0], [str(run.path), "--out", str(run.path)], 2))
    for words in (["--out", str(tmp_path)], ["--out", str(run.path), "--seed", "7"]):
        calls.append((COMMANDS["sample"][0], words, 2))
    words = [sys.executable, "-c", ANSWER, json.dumps(calls)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_path_below_the_working_folder_is_shown_relative_to_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert shell_word(tmp_path / "cache" / "run") == "cache/run"
    assert shell_word(Path("/elsewhere/run")) == "/elsewhere/run"
