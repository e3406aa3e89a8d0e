"""What a follow-up is compared with: the usual rivals and the user's own."""

import hashlib
import json
from pathlib import Path

import pytest

from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import CLOSING_TEXT, NAMES, Candidate, OwnCandidates, rivals
from ia_mech.likelihood.swaps import SwapSource


def written(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def own(tmp_path) -> OwnCandidates:
    file = written(
        tmp_path / "own.jsonl",
        {"name": "why", "text": " Why?\n"},
        {"name": "odd", "text": "Où ? 🙂", "id": "a"},
        {"name": "odd", "text": "Who?", "id": "b"},
        {"name": "long", "text": "Make it longer.", "id": None},
    )
    file.write_text(f"\n{file.read_text(encoding='utf-8')}  \n\n", encoding="utf-8")
    return OwnCandidates.read(file)


# -- the user's own -----------------------------------------------------------------------------


def test_candidates_are_for_every_context_or_for_one_conversation(own):
    everywhere = [Candidate("why", "Why?"), Candidate("long", "Make it longer.")]
    assert own.of("a") == [*everywhere, Candidate("odd", "Où ? 🙂")]
    assert own.of("b") == [*everywhere, Candidate("odd", "Who?")]
    assert own.of("c") == everywhere


def test_the_hash_is_of_the_file(own, tmp_path):
    file = tmp_path / "own.jsonl"
    assert own.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert OwnCandidates.read(str(file)).sha256 == own.sha256
    other = written(tmp_path / "other.jsonl", {"name": "why", "text": "Why?"})
    assert OwnCandidates.read(other).sha256 != own.sha256


ROW = '{"name": "why", "text": "Why?"}\n'
FORM = 'write {"name": "why", "text": "Why?"}'
EACH = "give one to each"
BAD = {
    "not UTF-8": (b'{"name": "why", "text": "\xff"}', "(not UTF-8 text)", "give a JSONL file"),
    "not JSON": (ROW + "why: Why?", "line 2 is not a JSON object", FORM),
    "a list": ('["why", "Why?"]', "line 1 is not a JSON object", FORM),
    "no text": ('{"name": "why"}', "line 1 has no text that is text", EACH),
    "blank text": ('{"name": "why", "text": " \\n"}', "line 1 has no text that is text", EACH),
    "a number as name": ('{"name": 3, "text": "Why?"}', "line 1 has no name that is text", EACH),
    "a list as id": ('{"name": "w", "text": "Why?", "id": []}', "has no id that is text", EACH),
    "true as id": ('{"name": "w", "text": "Why?", "id": true}', "has no id that is text", EACH),
    "another key": ('{"name": "w", "text": "Why?", "ID": "a"}', "the key 'ID'", "use name,"),
    "control characters": ('{"name": "w\\u001b[1m", "text": "Why?"}', "can't be", "plain"),
    "twice everywhere": (ROW + ROW, "has two candidates 'why' for one context", "a name of its"),
    "twice for one": (
        '{"name": "w", "text": "Why?", "id": "a"}\n{"name": "w", "text": "Who?", "id": "a"}',
        "has two candidates 'w' for one context",
        "give each a name of its own",
    ),
    "everywhere and for one": (
        ROW + '{"name": "why", "text": "Who?", "id": "a"}',
        "has two candidates 'why' for one context",
        "give each a name of its own",
    ),
    "empty": ("", "holds no candidate", 'give lines such as {"name": "why", "text": "Why?"}'),
}  # fmt: skip


@pytest.mark.parametrize(("content", "problem", "remedy"), BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_used(tmp_path, content, problem, remedy):
    file = tmp_path / "own.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refused:
        OwnCandidates.read(file)
    assert str(file) in refused.value.problem and problem in refused.value.problem
    assert remedy in refused.value.remedy
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_every_context_has_are_refused(tmp_path, name):
    file = written(tmp_path / "f", {"name": name, "text": "Why?"})
    with pytest.raises(UserError, match=f"line 1: '{name}' is a candidate that every context has"):
        OwnCandidates.read(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"nowhere can't be read \(No such file or directory\); g"):
        OwnCandidates.read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"can't be read \(Is a directory\); give a JSONL file"):
        OwnCandidates.read(tmp_path)


@pytest.mark.parametrize("within", ["\u2028", "\u2029", "\x85"])
def test_only_newlines_end_a_line(tmp_path, within):
    """``json.dumps(…, ensure_ascii=False)`` writes these characters as they are."""
    file = tmp_path / "own.jsonl"
    row = {"name": "why", "text": f"Why?{within}Why not?"}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert OwnCandidates.read(file).of("a") == [Candidate("why", row["text"])]


@pytest.mark.parametrize("key", ["text", "name"])
def test_half_a_surrogate_pair_is_refused(tmp_path, key):
    """No tokenizer takes one, and no Parquet file: it would end the run with a traceback."""
    row = {"name": "why", "text": "Why?"} | {key: "\ud800"}
    with pytest.raises(UserError, match="surrogate"):
        OwnCandidates.read(written(tmp_path / "f", row))


def test_ids_that_the_run_has_not_are_refused(own, tmp_path):
    own.check({"a", "b", "c"}, 1)
    with pytest.raises(UserError, match=r"names conversations that the run hasn't: b; give ids"):
        own.check({"a"}, 1)
    rows = [{"name": "n", "text": "t", "id": name} for name in "gfedc"]
    many = OwnCandidates.read(written(tmp_path / "many", *rows))
    with pytest.raises(UserError, match=r"hasn't: d, e, f and 1 more; give ids of this dataset"):
        many.check({"c"}, 1)
    written(tmp_path / "all", {"name": "why", "text": "Why?"})
    everywhere = OwnCandidates.read(tmp_path / "all")
    everywhere.check(set(), 1)
    with pytest.raises(UserError, match="the data doesn't say that; give data with a later user"):
        everywhere.check({"a"}, 0)


def test_numbers_as_ids_are_read_as_text(tmp_path):
    file = written(tmp_path / "f", {"name": "w", "text": "Why?", "id": 81})
    assert OwnCandidates.read(file).of("81") == [Candidate("w", "Why?")]


# -- rivals -------------------------------------------------------------------------------------


def conversation(query="Who?", response="You.", reference="Why me?") -> Conversation:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "an earlier query"},
        {"role": "assistant", "content": "an earlier response"},
        {"role": "user", "content": query},
        {"role": "assistant", "content": response},
    ]
    return Conversation("a", "a", "chats", tuple(messages), reference)


LENDER = SwapSource(7, "lender", "s7", "chats", "Blue.", 2, " Is it blue?\n")


def test_rivals_are_the_query_the_response_another_reference_a_closing_and_the_users_own(own):
    found = rivals(conversation("Who?\n", "\n You. "), LENDER, own)
    assert found == [
        Candidate("query", "Who?"),
        Candidate("response", "You."),
        Candidate("other_reference", "Is it blue?", "lender"),
        Candidate("closing", CLOSING_TEXT),
        Candidate("why", "Why?"),
        Candidate("long", "Make it longer."),
        Candidate("odd", "Où ? 🙂"),
    ]
    assert {"reference", *(c.name for c in found[:4])} == set(NAMES)


@pytest.mark.parametrize(
    ("reference", "left"),
    [
        ("Who?", ["response", "other_reference", "closing", "why", "long", "odd"]),
        (" You.\n", ["query", "other_reference", "closing", "why", "long", "odd"]),
        ("Is it blue?", ["query", "response", "closing", "why", "long", "odd"]),
        (CLOSING_TEXT, ["query", "response", "other_reference", "why", "long", "odd"]),
        ("Why?", ["query", "response", "other_reference", "closing", "long", "odd"]),
    ],
)
def test_what_the_user_really_said_is_no_rival(own, reference, left):
    found = rivals(conversation(reference=reference), LENDER, own)
    assert [c.name for c in found] == left
