"""The built-in conversations are complete and in order, and their metadata is true."""

import json
import re
from collections import Counter
from importlib import resources

import pytest

from ia_mech.data.conversations import BUILTIN, open_conversations

ROWS = {
    name: [
        json.loads(line)
        for line in (resources.files("ia_mech") / "data" / f"builtin_{name}.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    for name in BUILTIN
}
ALL = [row for rows in ROWS.values() for row in rows]


def response(row: dict) -> str:
    return row["messages"][-1]["content"]


def test_no_query_and_no_follow_up_is_there_twice():
    for texts in (
        [row["id"] for row in ALL],
        [json.dumps(row["messages"]) for row in ALL],
        [row["messages"][-2]["content"] for row in ALL],
        [response(row) for row in ALL],
        [row["real_follow_up"] for row in ALL],
    ):
        assert len(set(texts)) == 96


@pytest.mark.parametrize("name", BUILTIN)
def test_a_row_is_a_dialogue_that_ends_with_a_response(name):
    for row in ROWS[name]:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        for text in [*(message["content"] for message in row["messages"]), row["real_follow_up"]]:
            assert text.strip() == text != ""
            assert all(c.isprintable() or c == "\n" for c in text)
        assert row["metadata"]["topic"].strip()
        assert (row["answer"] is not None) == (name == "maths")


def test_the_response_ends_with_the_gold_answer():
    for row in ROWS["maths"]:
        answer = row["answer"]
        assert re.fullmatch(r"\d+(\.\d+)?", answer)
        last = re.sub(r"(?<=\d),(?=\d{3})", "", response(row).splitlines()[-1])
        assert re.search(rf"(?<![\d.]){re.escape(answer)}(?!\d|\.\d)", last), last


def test_siblings_are_four_finished_responses_to_each_query():
    found = [*open_conversations("builtin:siblings")]
    assert len({one.source_id for one in found}) == 15 and len(found) == 60
    assert len({(one.source_id, one.response) for one in found}) == 60
    assert {(one.finish_reason, one.dataset) for one in found} == {("stop", "builtin-siblings")}


def test_the_topics_of_the_demo_have_enough_queries_to_compare():
    of = Counter(one.metadata["topic"] for one in open_conversations("builtin", limit=24))
    assert of == {"numbers": 8, "everyday": 6, "code": 4, "writing": 3, "knowledge": 3}


def test_the_queries_of_a_study_are_of_four_datasets_in_turn():
    found = list(open_conversations("builtin:study"))
    assert len(found) == 180 and all(one.response is None for one in found)
    assert [one.dataset for one in found[:4]] == [one.dataset for one in found[4:8]]
    assert len({one.dataset for one in found[:4]}) == 4
