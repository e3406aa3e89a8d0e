"""The list of settings: how values are read, what is refused in one line."""

import json
import re
import shlex
import sys
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shell import call, refusal

import ia_mech
from ia_mech.collect import command
from ia_mech.collect.command import main
from ia_mech.collect.plan import build_chat
from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.settings import Settings


@pytest.fixture
def made(monkeypatch) -> list[tuple]:
    """Collects the settings that the job would get; no job runs."""
    calls: list[tuple] = []

    def make_run(plan, progress, *, shard, crew):
        calls.append((*plan, shard, crew))
        return SimpleNamespace(complete=True)

    monkeypatch.setattr(command, "_planned", lambda settings, out, *_: (settings, out))
    monkeypatch.setitem(sys.modules, "ia_mech.collect.job", SimpleNamespace(make_run=make_run))
    said = {"print_run": lambda run, full: None, "what_was_written": lambda run: ""}
    shown = SimpleNamespace(**said, print_shard=None)
    monkeypatch.setitem(sys.modules, "ia_mech.collect.summary", shown)
    return calls


# -- values ---------------------------------------------------------------------------------------


def test_the_command_the_function_and_the_record_of_a_run_read_values_alike(made):
    words = (
        "--limit all --temperatures 1.3,0.5 1 --samples 2 --positions header turn_end "
        "--header-logits none --system '' --date 2026-02-01 --model x/y "
        "--responses 2 --skip-unusable --template-option a=false 'b=[1, \"x y\"]' "
        "--template-option c=low,high d="
    )
    given = {
        "limit": "all",
        "temperatures": np.array([0.5, 1.0, 1.3]),
        "samples": np.int64(2),
        "positions": "header, turn_end",
        "header_logits": "none",
        "system": "",
        "date": date(2026, 2, 1),
        "model": Path("x/y"),
        "responses": "2",
        "skip_unusable": True,
        "template_option": {"d": "", "a": False, "b": [1, "x y"], "c": "low,high"},
    }
    assert main(shlex.split(words)) == 0
    ia_mech.sample(**given)
    (first, out, shard, crew), second = made
    assert second == (first, out, shard, crew)
    assert out == first.folder() and (shard, crew) == ((1, 1), (None, None, None))
    assert (first.limit, first.temperatures, first.header_logits) == (None, (0.5, 1.0, 1.3), "none")
    kept = json.loads(json.dumps(first.to_dict()))
    assert Settings.read(kept) == first
    assert set(kept) == {one.name for one in fields(Settings)}
    names = ("my topic", "n")
    typed = command.build_parser().parse_args(["--metadata-columns", *names])
    assert command.settings_of(typed) == Settings(metadata_columns=list(names))
    assert command.settings_of(typed).metadata_columns == names
    assert first.columns == Settings().columns and Settings(query_column="q").columns.query == "q"


def test_a_chat_template_is_its_text_wherever_it_was_read(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m }}\n{% endfor %}")
    given = Settings(chat_template=file)
    assert given.chat_template == file.read_text() and given.folder() != Settings().folder()
    assert Settings.read(given.to_dict()) == given
    assert "--chat-template" in given.command(tmp_path)
    file.write_text("{{ messages }}")
    assert Settings(chat_template=file).folder() != given.folder()
    shipped = (embedded.TEMPLATES / "plain.jinja").read_text()
    assert Settings(chat_template="plain").chat_template == shipped
    assert " --chat-template plain " in Settings(chat_template="plain").command(tmp_path)


def test_a_command_names_batch_rows_only_if_they_are_unusual_for_the_device(tmp_path):
    usual, other = (Settings(batch_rows=rows, limit=None) for rows in (96, 95))
    assert usual.command(tmp_path, "cpu").endswith(f" sample --limit all --out {tmp_path}")
    assert " --batch-rows 95 " in other.command(tmp_path, "cpu")
    assert " --batch-rows 96 " in usual.command(tmp_path, "cuda")


def test_the_settings_chat_template_is_used_whoever_loaded_the_model(tiny_subject):
    chat = build_chat(Settings(chat_template="plain"), tiny_subject.files)
    assert "User:" in chat.header_text and "User:" not in tiny_subject.tokenizer.chat_template


def test_arguments_of_the_command_that_are_no_settings(made, tmp_path):
    words = ["--shard", "2/3", "--workers", "2", "--threads", "1", "--ray"]
    assert main(["--out", str(tmp_path / "a"), *words]) == 0
    given = {"shard": "2/3", "workers": 2, "threads": 1, "ray": "local"}
    ia_mech.sample(tmp_path / "a", **given, progress=Bar())
    assert made == 2 * [(Settings(), tmp_path / "a", (2, 3), (2, 1, "local"))]


def test_none_is_the_default_and_some_defaults_depend_on_other_settings():
    same = Settings(model=None, samples=None, skip_unusable=None, temperatures=None, system=None)
    assert same == Settings() and same.limit == 24
    assert Settings(limit=None) == Settings(limit="all") and Settings(limit=None).limit is None
    assert Settings().response_temperature == 0 and Settings(responses=2).response_temperature == 1
    assert replace(Settings(responses=2), seed=1) == Settings(responses=2, seed=1)
    assert Settings(response_temperature=1).writes_responses and not Settings().writes_responses


def test_the_rows_of_a_context():
    found = Settings(temperatures=(1, 0.5), samples=2).rows()
    assert found == [(0.0, 0, 0), *((t, 40, s) for t in (0.5, 1.0) for s in (0, 1))]
    assert Settings(temperatures=()).rows() == Settings(sampled_tokens=0).rows() == [(0.0, 0, 0)]
    one = Settings(temperatures=0.5, samples=1, sampled_tokens="all 3 0 1", max_new_tokens=9)
    assert one.sampled_tokens == (1, 3, "all") and Settings.read(one.to_dict()) == one
    assert one.rows() == [(0.0, 0, 0), (0.5, 1, 0), (0.5, 3, 0), (0.5, 9, 0)]
    assert "--sampled-tokens 1 3 all" in one.command(Path("x"))
    for given in ("1 1", "9 all", "10", "-1", "some"):
        with pytest.raises(UserError, match="sampled"):
            Settings(sampled_tokens=given, max_new_tokens=9)


def test_the_folder_is_named_after_model_dataset_and_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    one = Settings(model="Org/My_Model", dataset="data/builtin:maths.jsonl")
    assert one.folder().parent == tmp_path
    assert re.fullmatch(r"my-model-builtin-maths-[0-9a-f]{8}", one.folder().name)
    assert replace(one, seed=0).folder() == one.folder() != replace(one, seed=1).folder()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert Settings(model=".").folder().name.startswith("here-builtin-")


def test_no_variable_of_the_environment_is_obeyed(made, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"):
        monkeypatch.setenv(name, "8")
    assert main([]) == 0
    assert made[0][2] == (1, 1)


# -- refusals -------------------------------------------------------------------------------------

REFUSED = [
    ("--template-option enable_thinking", "--template-option: 'enable_thinking' is not KEY=VALUE"),
    ("--chat-template no/such", "--chat-template: 'no/such' is no file of text, nor gemma or pla"),
    ("--chat-template pyproject.toml", "--chat-template: 'pyproject.toml' holds no Jinja template"),
    ("--template-option a=False", "--template-option: 'a=False': write false, as JSON does"),
    ("--template-option a=1 b=2 a=3", "--template-option: a is given twice; give it once"),
    ("--limit 0", "--limit: '0' is not a whole number from 1 up, or: all"),
    ("--temperatures -1", "--temperatures: -1 is no temperature from 0.001 to 1000"),
    ("--temperatures 0", "--temperatures: 0 is greedy decoding, which every run has"),
    ("--temperatures 1 1.0", "a temperature is given twice (1.0 1.0)"),
    ("--temperatures warm", "--temperatures: 'warm' is not a number such as 0.7"),
    ("--temperatures ,", "--temperatures: ',' names nothing"),
    ("--temperatures", "argument --temperatures: expected at least one argument"),
    ("--samples 0", "--samples: '0' is not a whole number from 1 to 1000000"),
    ("--date 20260101", "--date: '20260101' is not a date such as 2026-01-31"),
    ("--dtype int8", "--dtype: 'int8' is none of auto, float32, bfloat16, float16"),
    ("--model ''", "--model: '' names nothing"),
    ("--system a\udcff", "--system: 'a\\udcff' is not UTF-8"),
    ("--responses 2 --response given", "--response given: the model writes no responses"),
    ("--responses 2 --response-temperature 0", "greedy decoding writes the same response 2 times"),
    ("--threads 0", "argument --threads: '0' is not a whole number from 1 up"),
    ("--threads 99999", "argument --threads: '99999' is too much for this machine (1 to "),
    ("--out ''", "argument --out: '' names nothing"),
    ("--out a\udcff", "argument --out: 'a\\udcff' is not UTF-8"),
    ("--shard 3/2", "argument --shard: '3/2' is not i/n with i from 1 to n, such as 2/4"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("--limit 3 'two\nlines'", "unrecognized arguments: two lines"),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_flag_that_cannot_be_is_refused_in_one_line(made, capsys, words, expected):
    line = refusal(call(main, shlex.split(words), capsys))
    assert line.startswith(expected) and made == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"limit": [3]}, "limit=[3]; give a text or a number"),
        ({"limit": True}, "limit=True; give a text or a number"),
        (
            {"limit": -3},
            "limit=-3: '-3' is not a whole number from 1 up, or: all (in Python: limit=",
        ),
        ({"skip_unusable": 1}, "skip_unusable=1; give True or False"),
        ({"temperatures": [[0.7], 1]}, "temperatures=[[0.7], 1]; give a text or a number, or a"),
        ({"system": b"bytes"}, "system=b'bytes'; give a text or a number"),
        ({"out": ["run"]}, "out=['run']; give a text or a number"),
        ({"shard": "5/4"}, "shard: '5/4' is not i/n"),
    ],
)
def test_a_value_of_the_function_that_cannot_be_is_refused_in_one_line(made, settings, problem):
    with pytest.raises(UserError, match="^" + re.escape(problem)) as refused:
        command.sample(**settings)
    assert "\n" not in str(refused.value) and made == []


def test_rows_from_python_are_settings_as_the_file_that_they_are_written_to(
    made, monkeypatch, tmp_path
):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    command.sample(dataset=[{"prompt": "q"}])
    (file,) = (tmp_path / "data").iterdir()
    assert made[0][0].dataset == str(file) and file.read_text() == '{"prompt": "q"}\n'
    with pytest.raises(UserError, match="the dataset is int, not rows"):
        command.sample(dataset=3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": [{"my_query": "q"}]}, "row 1 of dataset: .* query_column='my_query' "),
        ({"temperatures": [1, 1]}, "; samples sets how often it is sampled"),
        ({"responses": 2, "response": "given"}, "^response='given': .* use response='generate'"),
        ({"dataset": "builtin", "split": "test"}, "leave out split, subset and revision"),
        ({"device_map": "auto", "device": "cpu"}, "^device_map can't be used with device;"),
        ({"dataset": [{"prompt": "q", "image": "x"}]}, "name it with metadata_columns if it isn"),
        (
            {"dataset": [{"prompt": "q", "files": ["x"]}]},
            r"out \(skip_unusable=True\)$",
        ),
        ({"shard": "3/2"}, "^shard: '3/2' .*; see ia-mech sample --help$"),
    ],
)
def test_from_python_a_refusal_names_parameters(tmp_path, monkeypatch, settings, said):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=said) as caught:
        ia_mech.sample(out=tmp_path / "run", **settings)
    assert "--" not in str(caught.value).replace("ia-mech sample --help", "")


def test_settings_that_there_are_not_are_all_named():
    with pytest.raises(
        TypeError,
        match=r"no setting 'limits', 'engine' .did you mean limit.*; there are model, .*seed",
    ):
        command.sample(limits=3, engine="auto")
