"""Presets, on invented rows of the real schemas; the hub itself is played by a stand-in."""

import json
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from ia_mech.data.conversations import ColumnMap, open_conversations
from ia_mech.data.presets import PRESETS
from ia_mech.errors import UserError

FIXTURES = Path(__file__).parent / "fixtures" / "presets"


def fixture_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FIXTURES / f"{name}.jsonl").read_text().splitlines()]


class FakeHub:
    """Stands in for the hub: knows the fixtures by hub id, records the calls."""

    def __init__(self) -> None:
        self.rows = {preset.path: fixture_rows(preset.name) for preset in PRESETS.values()}
        self.calls: list[dict] = []

    def load_dataset(self, path: str, **options):
        self.calls.append({"path": path, **options})
        return self.rows[path] if options["split"] else {"train": self.rows[path]}


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    fake = FakeHub()
    info = type("Info", (), {"sha": "c0ffee"})
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *a, **k: info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    return fake


def local(name: str, **columns) -> list:
    path = str(FIXTURES / f"{name}.jsonl")
    return list(open_conversations(path, columns=ColumnMap(**columns)))


@pytest.mark.parametrize("name", PRESETS)
def test_hub_rows_and_the_same_rows_in_a_local_file_read_alike(name, hub):
    def content(conversations):
        return [(c.messages, c.real_follow_up, c.answer, c.metadata) for c in conversations]

    from_hub = list(open_conversations(name))
    from_file = local(name)
    assert content(from_hub) == content(from_file)
    assert len(from_hub) == len(fixture_rows(name))
    if name != "gsm8k":  # the only preset without an id of its own
        assert [c.id for c in from_hub] == [c.id for c in from_file]
    assert {c.dataset for c in from_hub} == {name}


def test_gsm8k_solutions_become_what_an_assistant_writes():
    first, thousands, negative = local("gsm8k")
    assert first.response == (
        "Each tray holds 6, so 3 trays hold 3*6=18 seedlings.\nThe answer is 18"
    )
    assert first.answer == "18" and first.id == "gsm8k-00001"
    assert thousands.response.endswith("$1,500.\nThe answer is 1,500")
    assert thousands.answer == "1500"
    assert negative.answer == "-5" and negative.response == "4-9=-5\nThe answer is -5"


FOUND = [  # of a preset's row, fields of its conversation
    ("math-500", 0, {"answer": "25", "id": "test/prealgebra/9001.json"}),
    ("math-500", 0, {"metadata": {"subject": "Prealgebra", "level": 1}}),
    ("ifeval", 0, {"id": "9001", "response": None, "real_follow_up": None}),
    ("ifbench", 0, {"id": "901", "response": None, "real_follow_up": None}),
    ("coval", 0, {"query": "Should towns ban fireworks on private land?", "response": None}),
    ("coval", 0, {"metadata": {"candidates": 4}}),
    ("coval", 1, {"query": "We agreed on nothing.", "id": "cv-0002"}),
    ("mt-bench", 0, {"real_follow_up": "Now make it rhyme.", "answer": None}),
    ("mt-bench", 1, {"answer": "40%", "id": "90000002", "metadata": {"category": "math"}}),
    (
        "mt-bench",
        1,
        {"real_follow_up": "And after two blue ones are taken away?", "response": None},
    ),
]


@pytest.mark.parametrize(("name", "at", "fields"), FOUND)
def test_rows_of_a_preset_become_conversations(name, at, fields):
    row = local(name)[at]
    assert {field: getattr(row, field) for field in fields} == fields


def test_solutions_constraints_and_developer_messages_are_kept():
    assert local("math-500")[0].response.endswith("\\boxed{25}$.")
    brief = "You are a helpful assistant.\n\nAnswer briefly."
    assert local("coval")[0].messages[0] == {"role": "system", "content": brief}
    words = {"num_words": 40, "relation": "at least"}
    for name, kwargs in (
        ("ifeval", [words, {"keywords": ["lantern"]}]),
        ("ifbench", [{"keyword1": "copper", "small_n": 2}]),
    ):
        first, second = local(name)
        assert first.metadata["kwargs"] == kwargs
        assert second.metadata["kwargs"] == [{}]  # one per instruction, even without arguments


def test_healthbench_prompts_stay_whole_or_are_cut_before_the_last_user_turn():
    single, multi = local("healthbench")
    assert single.response is None and multi.response is None
    assert [m["role"] for m in multi.messages] == ["user", "assistant", "user"]
    assert multi.query.startswith("Lisinopril") and multi.id == "hb-0002"
    assert single.metadata == {"example_tags": ["theme:context_seeking"]}
    single, multi = local("healthbench", cut="last")
    assert single.response is None and single.real_follow_up is None
    assert multi.response == "Which ones, and how do you feel with them?"
    assert multi.real_follow_up.startswith("Lisinopril")


def test_wildchat_equal_dialogues_are_one_source():
    bread, hi, hi_again = local("wildchat")
    assert bread.real_follow_up == "in the fridge or outside?"
    assert bread.response == "Dense sourdough rye keeps about a week."
    assert hi.source_id == hi_again.source_id == "bb22"
    assert (hi.id, hi_again.id) == ("bb22-7101", "bb22-7201")
    assert hi.real_follow_up is None
    kept = {"model": "gpt-4-0314", "language": "English", "turn": 1}
    assert hi.metadata == kept | {"toxic": False, "redacted": False}


def test_defaults_reach_the_hub_and_the_commit_is_recorded(hub):
    source = open_conversations("GSM8K", limit=1)
    expected = {"path": "openai/gsm8k", "name": "main", "data_files": None, "split": "test"}
    assert hub.calls[0] == expected | {"revision": "c0ffee", "streaming": False}
    assert source.description["revision"] == "c0ffee" and source.description["split"] == "test"
    assert [c.id for c in source] == ["gsm8k-00001"]


def test_subsets_are_files_and_hub_ids_are_streamed(hub, monkeypatch):
    open_conversations("healthbench", subset="hard")
    assert hub.calls[0]["data_files"] == "hard_2025-05-08-21-00-10.jsonl"
    assert hub.calls[0]["name"] is None
    with pytest.raises(UserError, match=r"no subset 'easy'; use one of full, hard, consensus$"):
        open_conversations("healthbench", subset="easy")
    source = open_conversations("openai/gsm8k")  # which has one split
    assert hub.calls[1]["streaming"] is True and hub.calls[1]["split"] is None
    assert source.name == "openai/gsm8k"
    assert [c.id for c in source] == ["gsm8k-00001", "gsm8k-00002", "gsm8k-00003"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: {"train": [], "test": []})
    with pytest.raises(UserError, match=r"has the splits train, test; choose one with --split$"):
        open_conversations("openai/gsm8k")


def test_a_changed_schema_names_the_missing_column(hub):
    for row in hub.rows["openai/coval"]:
        del row["responses"]
    said = r"row 2 \(id cv-0002\): preset coval expects column 'responses'"
    with pytest.raises(UserError, match=said):
        open_conversations("coval")


def raising(error: Exception):
    def call(*args, **kwargs):
        raise error

    return call


def test_a_hub_that_does_not_answer_is_one_line_with_a_way_out(hub, monkeypatch):
    error = ConnectionError("no route\nlong story")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", raising(error))
    with pytest.raises(UserError) as caught:
        open_conversations("wildchat")
    said = "dataset 'allenai/WildChat-1M' could not be read (ConnectionError: no route); check the"
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value) and hub.calls == []  # not tried: its retries take long
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_conversations("gsm8k").description["revision"] is None


def test_a_stream_that_breaks_is_a_user_error(hub):
    def rows():
        yield fixture_rows("gsm8k")[0]
        raise OSError("connection reset\nby peer")

    hub.rows["openai/gsm8k"] = rows()
    with pytest.raises(
        UserError, match=r"'gsm8k' could not be read \(OSError: connection reset\);"
    ):
        list(open_conversations("gsm8k"))
