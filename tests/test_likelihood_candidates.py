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


def test_candidates_are_for_every_context_or_for_one_conversation(own, tmp_path):
    everywhere = [Candidate("why", "Why?"), Candidate("long", "Make it longer.")]
    assert own.of("a") == [*everywhere, Candidate("odd", "Où ? 🙂")]
    assert own.of("b") == [*everywhere, Candidate("odd", "Who?")]
    assert own.of("c") == everywhere
    assert own.sha256 == hashlib.sha256((tmp_path / "own.jsonl").read_bytes()).hexdigest()
    alone = OwnCandidates.read(written(tmp_path / "f", {"name": "a", "text": "b", "id": 81}))
    assert alone.of("81") == [Candidate("a", "b")] and alone.of("82") == []


ROW = '{"name": "why", "text": "Why?"}\n'
FOR_A = '{"name": "why", "text": "Who?", "id": "a"}\n'
TWICE = "has two candidates 'why' for one context; give each a name of its own"
BAD = {
    "not UTF-8": (b'{"name": "why", "text": "\xff"}', "(not UTF-8 text); give a JSONL file"),
    "not JSON": (
        ROW + "why: Why?",
        'line 2 is not JSON (Expecting value at character 1); write {"name": "',
    ),
    "no text": ('{"name": "why"}', "line 1 has no text that is text; give one to each"),
    "blank text": ('{"name": "why", "text": " \\n"}', "line 1 has no text that is text"),
    "a number as name": ('{"name": 3, "text": "Why?"}', "line 1 has no name that is text"),
    "true as id": ('{"name": "w", "text": "Why?", "id": true}', "has no id that is text"),
    "another key": ('{"name": "w", "text": "Why?", "ID": "a"}', "the key 'ID'"),
    "control characters": ('{"name": "w\\u001b[1m", "text": "Why?"}', "can't be"),
    "half a surrogate pair": ('{"name": "w", "text": "\\ud800"}', "surrogate"),
    "twice everywhere": (ROW + ROW, TWICE),
    "twice for one": (FOR_A + FOR_A, TWICE),
    "everywhere and for one": (ROW + FOR_A, TWICE),
    "empty": ("", "holds no candidate; give lines such as"),
    **{name: (ROW.replace("why", name), f"'{name}' is a candidate that every") for name in NAMES},
    "no file": (None, "can't be read (No such file or directory); give a JSONL file"),
}


@pytest.mark.parametrize(("content", "problem"), BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_used(tmp_path, content, problem):
    file = tmp_path / "own.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refused:
        OwnCandidates.read(file)
    said = str(refused.value)
    assert str(file) in said and problem in said and "\n" not in said


@pytest.mark.parametrize("within", ["\u2028", "\u2029", "\x85"])
def test_only_newlines_end_a_line(tmp_path, within):
    """``json.dumps(…, ensure_ascii=False)`` writes these characters as they are."""
    file = tmp_path / "own.jsonl"
    row = {"name": "why", "text": f"Why?{within}Why not?"}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert OwnCandidates.read(file).of("a") == [Candidate("why", row["text"])]


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


def test_an_empty_text_and_what_the_user_really_said_are_no_rivals(own):
    def names(lender=None, candidates=None, **changes):
        return [one.name for one in rivals(conversation(**changes), lender, candidates)]

    assert names() == ["query", "response", "closing"]
    assert names(response=" \n") == ["query", "closing"]
    every = ["query", "response", "other_reference", "closing", "why", "long", "odd"]
    for said, name in (
        ("Who?", "query"),
        (" You.\n", "response"),
        ("Is it blue?", "other_reference"),
        (CLOSING_TEXT, "closing"),
        ("Why?", "why"),
    ):
        assert names(LENDER, own, reference=said) == [one for one in every if one != name]
