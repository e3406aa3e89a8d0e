"""The built-in conversations: complete, in order, and what their metadata says of them is true."""

import json
import re
from importlib import resources

import pytest

from ia_mech.data.conversations import BUILTIN

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
CONSTRAINTS = [
    pytest.param(row, constraint, id=f"{row['id']}-{constraint['kind']}-{index}")
    for row in ROWS["instructions"]
    for index, constraint in enumerate(row["metadata"]["constraints"])
]


def named(rows):
    return pytest.mark.parametrize("row", rows, ids=[row["id"] for row in rows])


def response(row: dict) -> str:
    return row["messages"][-1]["content"]


@pytest.mark.parametrize("name", BUILTIN)
def test_there_are_32_of_each_with_ids_in_order(name):
    assert [row["id"] for row in ROWS[name]] == [f"{name}-{i:02d}" for i in range(1, 33)]
    assert {row["dataset"] for row in ROWS[name]} == {f"builtin-{name}"}


def test_no_query_and_no_follow_up_is_there_twice():
    for texts in (
        [row["id"] for row in ALL],
        [json.dumps(row["messages"]) for row in ALL],
        [row["messages"][-2]["content"] for row in ALL],
        [response(row) for row in ALL],
        [row["reference"] for row in ALL],
    ):
        assert len(set(texts)) == 96


@named(ALL)
def test_a_row_is_a_dialogue_that_ends_with_a_response(row):
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
    texts = [*(message["content"] for message in row["messages"]), row["reference"]]
    for text in texts:
        assert text.strip() == text != ""
        assert all(c.isprintable() or c == "\n" for c in text)
    assert row["metadata"]["topic"].strip()


@named(ROWS["maths"])
def test_the_response_ends_with_the_gold_answer(row):
    answer = row["answer"]
    assert re.fullmatch(r"\d+(\.\d+)?", answer)
    last = re.sub(r"(?<=\d),(?=\d{3})", "", response(row).splitlines()[-1])
    assert re.search(rf"(?<![\d.]){re.escape(answer)}(?!\d|\.\d)", last), last


@named(ROWS["instructions"] + ROWS["open"])
def test_only_maths_has_gold_answers(row):
    assert row["answer"] is None


def pieces(text: str) -> list[str]:
    return [piece for piece in text.split("\n\n") if piece.strip()]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def occurrences(text: str, wanted: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(wanted)}(?!\w)", text, re.IGNORECASE))


CHECKS = {
    "max_words": lambda said, n: len(said.split()) <= n,
    "min_words": lambda said, n: len(said.split()) >= n,
    "exact_lines": lambda said, n: sum(bool(line.strip()) for line in said.split("\n")) == n,
    "bullets": lambda said, n: sum(line.startswith("- ") for line in said.split("\n")) == n,
    "paragraphs": lambda said, n: len(pieces(said)) == n,
    "includes": lambda said, text: text.lower() in said.lower(),
    "excludes": lambda said, text: text.lower() not in said.lower(),
    "starts_with": lambda said, text: said.startswith(text),
    "ends_with": lambda said, text: said.endswith(text),
    "count": lambda said, text, n: occurrences(said, text) == n,
    "valid_json": is_json,
    "all_lowercase": lambda said: said == said.lower(),
    "all_uppercase": lambda said: said == said.upper(),
    "no_commas": lambda said: "," not in said,
}


@named(ROWS["instructions"])
def test_an_instruction_has_constraints_to_check(row):
    constraints = row["metadata"]["constraints"]
    assert constraints
    assert len({json.dumps(c, sort_keys=True) for c in constraints}) == len(constraints)


@pytest.mark.parametrize(("row", "constraint"), CONSTRAINTS)
def test_the_response_keeps_the_constraint(row, constraint):
    settings = dict(constraint)
    assert CHECKS[settings.pop("kind")](response(row), **settings)


def test_every_kind_of_constraint_is_used():
    used = {constraint["kind"] for _, constraint in (p.values for p in CONSTRAINTS)}
    assert used == set(CHECKS)
