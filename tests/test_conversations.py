"""Conversations: shapes of rows, errors, sources, files, order and re-iteration."""

import bz2
import gzip
import json
import re
import tracemalloc
from datetime import datetime

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ia_mech.data.conversations import (
    SKIP,
    ColumnMap,
    Conversation,
    open_conversations,
    validate,
)
from ia_mech.data.files import saved
from ia_mech.data.formats import like_follow_up, like_gold
from ia_mech.errors import UserError

USER, ASSISTANT = "user", "assistant"
DIALOGUE = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "r1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "r2"},
    {"role": "user", "content": "q3"},
]

BRIEF = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "tide", "arguments": {"at": "noon"}}}],
}
RESULT = {"role": "tool", "content": "low"}


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows (or raw lines) to data.jsonl and gives its path."""

    def write(*rows, name: str = "data.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


def read(path: str, limit: int | None = None, **columns) -> list[Conversation]:
    return list(open_conversations(path, limit=limit, columns=ColumnMap(**columns)))


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in conversation.messages]


def error_of(path: str, **options) -> str:
    with pytest.raises(UserError) as caught:
        list(open_conversations(path, **options))
    text = str(caught.value)
    assert "\n" not in text and "; " in text  # one line, with a remedy
    return text


# --- the conversation itself


def example(**changes) -> Conversation:
    fields = {
        "id": "a",
        "source_id": "s",
        "dataset": "d",
        "messages": tuple(DIALOGUE[:2]),
        "real_follow_up": "more",
        "answer": "42",
        "metadata": {"k": [1, None]},
    }
    return Conversation(**(fields | changes))


def test_with_response_appends_or_replaces_and_leaves_the_original_alone():
    original = example()
    assert turns(original.with_response("new")) == [(USER, "q1"), (ASSISTANT, "new")]
    assert original.response == "r1"
    appended = example(messages=tuple(DIALOGUE[:3])).with_response("new", "hm")
    assert turns(appended)[-2:] == [(USER, "q2"), (ASSISTANT, "new")]
    assert len(appended.messages) == 4 and (appended.thought, original.thought) == ("hm", None)
    after = example(messages=(DIALOGUE[0], CALL, RESULT, DIALOGUE[1]), finish_reason="length")
    validate(after, "here")
    changed = after.with_response("new")
    assert changed.messages == (DIALOGUE[0], CALL, RESULT, {"role": ASSISTANT, "content": "new"})
    assert (after.query, changed.finish_reason) == ("q1", None)


def test_an_empty_response_is_a_turn_and_none_is_not():
    empty = example(messages=(*DIALOGUE[:1], {"role": "assistant", "content": ""}))
    validate(empty, "here")
    assert empty.response == ""


INVALID = [
    ([], "here: no user message"),
    ([{"role": "critic", "content": "x"}], "here: message 1 has the role 'critic'"),
    ([{"role": "user", "content": None}], "here: message 1 (user) is null, not text"),
    ([{"role": "user", "content": ["x"]}], "here: message 1 (user) is a list, not text"),
    ([{"role": "user", "content": " \n"}], "here: the query is empty"),
    ([{"role": "user", "content": "\ud83d"}], "message 1 (user) has half a surrogate pair"),
    (DIALOGUE[1:3], "don't alternate"),
    ([DIALOGUE[0], DIALOGUE[2]], "roles: user, user"),
    ([DIALOGUE[0], {"role": "system", "content": "s"}], "roles: user, system"),
    ([DIALOGUE[0], RESULT], "roles: user, tool"),
    ([DIALOGUE[0], CALL, RESULT, DIALOGUE[2]], "roles: user, assistant, tool, user"),
    ([DIALOGUE[0], DIALOGUE[1] | {"reasoning_content": 3}], "the thought of message 2 is int"),
]


@pytest.mark.parametrize(("messages", "text"), INVALID)
def test_validation_names_the_row_and_the_fault(messages, text):
    with pytest.raises(UserError, match=re.escape(text)):
        validate(example(messages=tuple(messages)), "here")


# --- shapes of rows


Q, R = (USER, "q"), (ASSISTANT, "r")
SHARED = [{"from": who, "value": said} for who, said in
          (("system", "s"), ("human", "q"), ("gpt", "r"), ("human", " again? "))]  # fmt: skip
TWO = {"turns": ["q", "then"], "reference_first_answer": "r"}
ROWS = {  # a row, column names, its turns, and further fields of the conversation
    "cut at the first exchange": (
        {"messages": DIALOGUE}, {}, [(USER, "q1"), (ASSISTANT, "r1")], {"real_follow_up": "q2"}
    ),
    "cut at the last": (
        {"messages": DIALOGUE}, {"cut": "last"},
        [(m["role"], m["content"]) for m in DIALOGUE[:4]], {"real_follow_up": "q3"},
    ),
    "system and query": (
        {"messages": [BRIEF, DIALOGUE[0]]}, {}, [("system", "Be brief."), (USER, "q1")], {}
    ),
    "other names of roles": (
        {"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "r"}]},
        {}, [Q, R], {"real_follow_up": None},
    ),
    "response beside": (
        {"prompt": DIALOGUE[:1], "response": "r"}, {}, [(USER, "q1"), R], {}
    ),
    "sharegpt": (
        {"id": 7, "conversations": SHARED}, {}, [("system", "s"), Q, R],
        {"real_follow_up": "again?", "id": "7"},
    ),
    "sharegpt by name": (
        {"conversations": SHARED}, {"format": "sharegpt"}, [("system", "s"), Q, R], {}
    ),
    "question, answer": ({"question": "q", "answer": "r"}, {}, [Q, R], {"answer": None}),
    "prompt, response": ({"prompt": "q", "response": "r"}, {}, [Q, R], {}),
    "query, response": ({"query": "q", "response": "r"}, {}, [Q, R], {}),
    "instruction, output": (
        {"instruction": "Translate.", "input": "Tag", "output": "r", "follow_up": "f"},
        {}, [(USER, "Translate.\n\nTag"), R], {"real_follow_up": "f", "metadata": {}},
    ),
    "gold beside": (
        {"question": "q", "response": "r", "answer": 4}, {}, [Q, R], {"answer": "4"}
    ),
    "gold of a bare prompt": ({"prompt": "q", "answer": "4"}, {}, [Q], {"answer": "4"}),
    "gold by name": (
        {"question": "q", "answer": "4"}, {"answer": "answer"}, [Q], {"answer": "4"}
    ),
    "a gap for the response": ({"question": "q", "response": ""}, {}, [Q], {}),
    "gold, no response": (
        {"question": "q", "response": None, "answer": "4"}, {}, [Q], {"answer": "4"}
    ),
    "blank real follow-up": (
        {"question": "q", "answer": "r", "real_follow_up": "  "}, {}, [Q, R],
        {"real_follow_up": None}
    ),
    "padded real follow-up": (
        {"question": "q", "answer": "r", "real_follow_up": " w\n"}, {}, [Q, R],
        {"real_follow_up": "w"}
    ),
    "one exchange, cut at the last": (
        {"messages": DIALOGUE[:2]}, {"cut": "last"},
        [(USER, "q1"), (ASSISTANT, "r1")], {"real_follow_up": None},
    ),
    "gsm8k's marks": (
        {"question": "q", "answer": "so <<1+1=2>>2\n#### 2"}, {},
        [Q, (ASSISTANT, "so 2\nThe answer is 2")], {"answer": "2"},
    ),
    "gsm8k's marks, not at the end": (
        {"question": "q", "answer": "#### 2\nand more"}, {},
        [Q, (ASSISTANT, "#### 2\nand more")], {"answer": None},
    ),
    "turns": (TWO, {}, [Q, R], {"real_follow_up": "then"}),
    "turns without answer": (
        TWO | {"reference_first_answer": None}, {}, [Q], {"real_follow_up": "then"}
    ),
    "metadata without nulls": (
        {"prompt": "q", "kwargs": [{"a": None, "b": 1}], "metadata": {"own": 2}}, {}, [Q],
        {"metadata": {"kwargs": [{"b": 1}], "own": 2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "columns", "expected", "fields"), ROWS.values(), ids=ROWS)
def test_a_row_becomes_a_conversation(jsonl, row, columns, expected, fields):
    (only,) = read(jsonl(row), **columns)
    assert turns(only) == expected
    assert {name: getattr(only, name) for name in fields} == fields


def test_own_form_is_read_back_as_it_is(jsonl):
    # Without its real follow-up a row of three turns would be cut; here messages are the context.
    whole = example(messages=tuple(DIALOGUE[:3]), real_follow_up=None, metadata={"k": [1, 2]})
    thought = DIALOGUE[1] | {"reasoning_content": "hm"}
    tool = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
    called = (
        BRIEF | {"tools": [tool]},
        DIALOGUE[0],
        CALL,
        RESULT | {"name": "tide", "tool_call_id": "1"},
        thought,
    )
    told = example(id="b", messages=called, finish_reason="length")
    empty = example(id="c", messages=(DIALOGUE[0], DIALOGUE[1] | {"content": ""}))
    assert read(jsonl(*(one.to_dict() for one in (whole, told, empty)))) == [whole, told, empty]


def test_named_columns_win(jsonl):
    row = {"uid": 5, "group": "g", "ask": "q", "say": "r", "next": "f", "gold": [1], "prompt": "no"}
    names = {"id": "uid", "source": "group", "query": "ask", "response": "say"}
    (only,) = read(jsonl(row), **names, followup="next", answer="gold")
    assert (only.id, only.source_id, only.real_follow_up, only.answer) == ("5", "g", "f", "[1]")
    assert turns(only) == [(USER, "q"), (ASSISTANT, "r")] and only.metadata == {"prompt": "no"}


# --- ids, order, laziness


def test_case_blanks_and_hyphens_of_a_column_name_do_not_matter(jsonl):
    row = {"Question": "Q?", "Answer": "A.", "Follow Up": "why though", "Correct": "yes", "ID": "7"}
    source = open_conversations(jsonl(row))
    (one,) = source
    assert (one.id, one.query, one.response, one.real_follow_up) == ("7", "Q?", "A.", "why though")
    assert one.metadata == {"Correct": "yes"}
    assert source.left == {"Correct": None}
    assert source.roles["query"] == {"Question": None}
    both = {"Prompt": "P", "prompt": "Q", "response": "A"}
    assert "'Prompt' and 'prompt' have the same name but for case" in error_of(jsonl(both))
    (named,), (other,) = read(jsonl(both), query="Prompt"), read(jsonl(both), metadata=("Prompt",))
    assert (named.query, named.metadata) == ("P", {"prompt": "Q"})
    assert (other.query, other.metadata) == ("Q", {"Prompt": "P"})


def test_ids_default_to_stem_and_row(jsonl):
    first, second = read(jsonl({"prompt": "a"}, "", {"prompt": "b", "id": ""}))
    assert (first.id, second.id) == ("data-00001", "data-00002")  # blank lines aren't rows
    assert second.dataset == "data"


def test_a_source_is_all_that_stands_before_the_response_wherever_the_row_stands(jsonl):
    asked = [
        {"prompt": "q"},
        {"prompt": "q2"},
        {"prompt": "q", "context": "One passage."},
        {"prompt": "q", "context": "Another passage."},
        {"prompt": "q", "system": "Be brief."},
        {"prompt": "q", "history": [["q0", "r0"]]},
        {"prompt": "q", "tools": [{"name": "tide"}]},
    ]
    answered = [row | {"response": "r", "id": f"r{i}"} for i, row in enumerate(asked)]
    sources = [one.source_id for one in read(jsonl(*asked))]
    assert len(set(sources)) == len(asked) and sources[0] == "q471ff01e5266e7be"
    others = read(jsonl(*answered[::-1], name="other.jsonl"))
    assert [one.source_id for one in others] == sources[::-1]
    (same,) = read(jsonl({"messages": [DIALOGUE[0] | {"content": "q"}, *DIALOGUE[1:]]}))
    (last,) = read(jsonl(answered[-1]), limit=1)
    assert (same.source_id, last.source_id) == (sources[0], sources[-1])
    (own,) = read(jsonl({"prompt": "q", "source_id": "mine"}))
    (named,) = read(jsonl({"prompt": "q", "doc": 7}), source="doc")
    assert (own.source_id, named.source_id) == ("mine", "7")


def test_rows_are_read_again_each_time_and_only_as_far_as_needed(jsonl):
    path = jsonl({"prompt": "a"}, {"prompt": "b"}, "this is not JSON")
    source = open_conversations(path, limit=2)
    assert [c.query for c in source] == [c.query for c in source] == ["a", "b"]


UNUSABLE = [  # a row, column names, and what is said of it
    ({"prompt": ""}, {}, "data.jsonl line 2: the query is empty"),
    ("{not JSON", {}, "data.jsonl line 2 is not JSON (Expecting property name enclosed in double "),
    (
        {"id": "a", "prompt": "again"},
        {},
        "line 2 (id a): its id is that of data.jsonl line 1 (id a), too",
    ),
    ({"other": "x"}, {}, "data.jsonl line 2: columns not recognised (found: other)"),
    ({"promt": "x"}, {}, "(found: promt, did you mean 'prompt' by 'promt'?)"),
    ({"prompt": "q", "model_output": "r"}, {}, "no response, and the column 'model_output' may be"),
    ({"prompt": "q", "predicted": "r"}, {}, "no response, and the column 'predicted' may be"),
    ({"prompt": "q", "output_text": "r"}, {}, "no response, and the column 'output_text' may be"),
    (
        {"prompt": "q", "responses": ["r", 3]},
        {},
        "no response, and the column 'responses'",
    ),
    ({"prompt": "q", "responses": ["r", "\ud800"]}, {}, "data.jsonl line 2"),  # neither is used
    ({"n": 1, "prompt": None}, {}, "line 2: nothing is in 'prompt'"),
    ({"messages": "hi"}, {}, "the column 'messages' is text, not a list of messages"),
    ({"messages": [3]}, {}, "message 1 is int without a role"),
    ({"messages": [{"role": ["x"], "content": "a"}]}, {}, "has the role \"['x']\""),
    ({"text": "x"}, {"format": "qa"}, "no query (found: text)"),
    ({"prompt": "x", "id": ["a"]}, {}, "the id is a list, not text or a number"),
    ({"prompt": "x", "f": 1}, {"followup": "f"}, "the real follow up is int, not text"),
    ({"prompt": "x"}, {"query": "ask"}, "no column 'ask' (found: prompt)"),
]


@pytest.mark.parametrize(("row", "columns", "text"), UNUSABLE)
def test_unusable_rows_are_named_or_left_out_and_listed_on_demand(jsonl, row, columns, text):
    good = {"prompt": "q", "ask": "q", "f": "then"}
    path, names = jsonl(good | {"id": "a"}, row, good | {"id": "c"}), ColumnMap(**columns)
    assert text in error_of(path, columns=names)
    source = open_conversations(path, columns=names, skip_unusable=True)
    for _ in range(2):
        assert [c.id for c in source] == ["a", "c"]
        (skipped,) = source.skipped
        assert text in skipped and ";" not in skipped, "place and reason, without remedy"


def test_a_column_that_is_named_like_a_response_is_asked_about(jsonl):
    """Otherwise the model would write another response in its place."""
    path = jsonl({"prompt": "q", "model_output": "r", "expected_answer": "s"})
    assert "say --response-column model_output; or --metadata-columns mod" in error_of(path)
    (named,) = read(path, response="model_output")
    (unnamed,) = read(path, metadata=("model_output",))
    assert (named.response, unnamed.response) == ("r", None)
    (gold,) = read(jsonl({"prompt": "q", "expected_answer": "s"}))
    assert gold.metadata == {"expected_answer": "s"}
    for typo, value, meant in (
        ("sytem_prompt", "Be brief.", "the system message, but isn't called so; say --system-col"),
        ("contxt", "It rained all day.", "a passage that the query is about"),
        ("folow_up", "And then?", "the real follow-up, but isn't called so; say --followup-column"),
        (
            "histroy",
            DIALOGUE[:2],
            "the exchanges before the query, but isn't called so; call it hi",
        ),
        ("tool", json.dumps([{"name": "tide"}]), "the schemas of tools, but isn't called so; call"),
    ):
        row = {"prompt": "q", "response": "r", typo: value}
        assert f"the column '{typo}' may be {meant}" in error_of(jsonl(row))
        (kept,) = read(jsonl(row), metadata=(typo,))
        assert turns(kept) == [(USER, "q"), (ASSISTANT, "r")]
    for name, value in (("system_id", "prod-7"), ("tool", "search"), ("reference", "It is so.")):
        source = open_conversations(jsonl({"prompt": "q", "response": "r", name: value}))
        assert [one.real_follow_up for one in source] == [None] and [*source.left] == [name]
    for typo in ("respones", "reponse", "anser", "answr"):
        assert f"column '{typo}' may be one" in error_of(jsonl({"prompt": "q", typo: "r"}))
    both = error_of(jsonl({"id": "a", "user_question": "q", "bot_reply": "r"}))
    assert "--query-column user_question --response-column bot_reply;" in both
    odd = jsonl({"ID": "a1", "Customer asks": "Where is it?", "Bot reply": "Here, I hope."})
    named = "--query-column 'Customer asks' --response-column 'Bot reply'; --help has"
    assert named in error_of(odd)
    chat = jsonl({"chat": DIALOGUE[:2]})
    assert "--messages-column chat; --help" in error_of(chat)


def test_whether_a_response_is_correct_is_no_gold_answer():
    assert [name for name in ("correct", "correct_answer", "reference") if like_gold(name)] == [
        "correct_answer", "reference"
    ]  # fmt: skip


def test_a_column_may_hold_what_the_user_said_next():
    names = ("next_user_turn", "Follow-up text", "user 2", "second_question", "context", "topic2")
    assert [name for name in names if like_follow_up(name)] == [*names[:4]]


def test_rows_that_go_on_after_the_follow_up_are_counted(jsonl):
    said = [{"role": role, "content": "x"} for role in (USER, ASSISTANT, USER, ASSISTANT, USER)]
    source = open_conversations(jsonl(*({"messages": said[:n]} for n in (5, 4, 3))))
    assert len(list(source)) == 3 and source.cut == 1


def test_rows_left_out_do_not_count_for_the_limit_and_some_row_must_be_usable(jsonl, tmp_path):
    good, bad = {"prompt": "q"}, {"prompt": " "}
    source = open_conversations(jsonl(bad, good, bad, good, bad), limit=2, skip_unusable=True)
    assert len(source.skipped) == 1, "those before the first usable row"
    assert [c.id for c in source] == ["data-00002", "data-00004"] and len(source.skipped) == 2
    said = "dataset data has no usable row (data.jsonl line 1: the query is empty)"
    assert error_of(jsonl(bad, bad), skip_unusable=True).startswith(said)
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([good, 5]))
    source = open_conversations(str(array), skip_unusable=True)
    assert len(list(source)) == 1 and source.skipped == [
        "rows.json row 2 holds a int, not an object"
    ]


def test_one_error_names_the_first_unusable_rows_and_counts_the_others(jsonl):
    good, empty, number = {"prompt": "q"}, {"prompt": " ", "ID": 7}, {"prompt": 3}
    path = jsonl(good, empty, number, good, *[empty] * 5)
    source = open_conversations(path)
    with pytest.raises(UserError) as raised:
        list(source)
    lines = ", ".join(f"data.jsonl line {n} (id 7)" for n in (2, 5, 6, 7))
    assert str(raised.value) == (
        f"{lines}: the query is empty; data.jsonl line 3: message 1 (user) is int, not text; "
        f"and 2 more rows; correct the row; {SKIP}"
    )
    assert len(list(source.usable())) == 2 and len(source.faults) == 7
    assert len(list(open_conversations(path, limit=1))) == 1, "those after the limit aren't read"
    assert " more " not in error_of(jsonl(empty, good)), "a single one"
    assert "; and at least 995 more rows; " in error_of(jsonl(*[empty] * 1_001))


def test_memory_does_not_grow_with_the_rows(tmp_path):
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for _ in range(400):
            file.write(json.dumps({"prompt": "x" * 50_000}) + "\n")  # 20 MB
    source = open_conversations(str(path))
    tracemalloc.start()
    assert sum(1 for _ in source) == 400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


# --- other files


def test_json_array_and_json_lines(tmp_path, jsonl):
    array = tmp_path / "array.json"
    array.write_bytes(b"\xef\xbb\xbf \n" + json.dumps([{"prompt": "a"}, {"prompt": "b"}]).encode())
    assert [c.query for c in read(str(array))] == ["a", "b"]
    lines = jsonl({"prompt": "a"}, {"prompt": "b"}, name="lines.json")
    assert [c.query for c in read(lines)] == ["a", "b"]


def test_parquet(tmp_path):
    said = [[{"role": "user", "content": f"q{i}"}] for i in range(600)]
    times = [datetime(2024, 5, 1)] * 600
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": range(600), "messages": said, "when": times}), path)
    conversations = read(str(path))
    assert len(conversations) == 600 and conversations[599].id == "599"
    assert conversations[0].metadata == {"when": "2024-05-01T00:00:00"}


TABLE = [{"prompt": f"q{i}\n\nor; this", "response": "é, r", "n": 2**53 + i} for i in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in TABLE).encode()
FRAME = pd.DataFrame(TABLE)
WRITTEN = {  # a file of these rows, or a folder of files
    "rows.ndjson": LINES,
    "rows.jsonl.gz": gzip.compress(LINES),
    "rows.jsonl.bz2": bz2.compress(LINES),
    "rows.json.gz": gzip.compress(json.dumps(TABLE).encode()),
    "pretty.json": json.dumps(TABLE, indent=1).encode(),
    "wrapped.json": json.dumps({"version": 1, "data": TABLE}).encode(),
    "viewer.json": json.dumps({"rows": [{"row_idx": 0, "row": row} for row in TABLE]}).encode(),
    "named.json": json.dumps({f"row {i}": row for i, row in enumerate(TABLE)}).encode(),
    **{
        f"{orient}.json": FRAME.to_json(orient=orient).encode()
        for orient in ("columns", "index", "split", "records", "table")
    },
    "rows.csv": FRAME.to_csv(index=False).replace('\n"q5', '\n,,\n\n"q5').encode(),
    "rows.csv.gz": gzip.compress(FRAME.to_csv(index=False, sep=";").encode("utf-8-sig")),
    "rows.tsv": FRAME.to_csv(sep="\t").encode(),
    "excel.csv": FRAME.to_csv(index=False, sep="\t").encode("utf-16"),
    "jsonl": {f"{i}.jsonl": LINES.splitlines(True)[4 * i : 4 * i + 4] for i in range(3)},
    "parquet": {f"train-{i}-of-3.parquet": FRAME[4 * i : 4 * i + 4].to_parquet() for i in range(3)},
}


def written(path, content) -> str:
    if isinstance(content, dict):
        path.mkdir()
        for name, part in content.items():
            written(path / name, part)
    else:
        path.write_bytes(b"".join(content) if isinstance(content, list) else content)
    return str(path)


@pytest.mark.parametrize("name", WRITTEN)
def test_rows_are_read_alike_however_they_are_written(tmp_path, name):
    path = written(tmp_path / name, WRITTEN[name])
    source = open_conversations(path)
    found = [(one.query, one.response, str(one.metadata["n"])) for one in source]
    assert found == [(row["prompt"], row["response"], str(row["n"])) for row in TABLE]
    assert (source.count(), source.name) == (12, name.partition(".")[0])


def test_rows_from_python_become_a_file_that_is_named_after_them(tmp_path):
    split = datasets.Dataset.from_pandas(FRAME)
    split.save_to_disk(tmp_path / "split")
    assert len(read(str(tmp_path / "split"))) == 12
    paths = [saved(rows, tmp_path / "data") for rows in (TABLE, iter(TABLE), FRAME, split)]
    assert len({*paths}) == 1 and paths[0].read_bytes() == LINES
    odd = pd.DataFrame({"prompt": ["q"], "a": [np.arange(2)], "b": [pd.NaT], "c": [datetime.max]})
    assert json.loads(saved(odd, tmp_path).read_text()) == {
        "prompt": "q", "a": [0, 1], "b": None, "c": "9999-12-31T23:59:59.999999"
    }  # fmt: skip
    with pytest.raises(UserError, match="the DataFrame has several columns named 'prompt'"):
        saved(pd.concat([FRAME, FRAME], axis=1), tmp_path)
    for wrong in ([], 3, {"prompt": ["q"]}, ["q"], datasets.DatasetDict(train=split)):
        with pytest.raises(UserError, match="not rows; give a list of dicts, a pandas DataFrame"):
            saved(wrong, tmp_path)


def test_a_folder_that_holds_no_one_dataset_is_refused(tmp_path):
    for names, text in (
        (["a.jsonl", "b.csv"], "holds several kinds of files (.csv, .jsonl)"),
        (["train.jsonl", "test.jsonl"], "holds several kinds of files (test, train)"),
        (["run.json"], "is a run, not a dataset"),
        (["dataset_dict.json"], "holds several splits"),
        (["README.md"], "holds no .jsonl, .ndjson, .json, .parquet, .csv or .tsv file"),
    ):
        path = written(tmp_path / names[0], dict.fromkeys(names, LINES))
        assert text in error_of(path)


# --- errors


UNREADABLE = {
    "nowhere.jsonl": (None, "give the path of an existing file"),
    "rows.xlsx": (b"a", ".xlsx is not a .jsonl, .ndjson, .json, .parquet, .csv or .tsv file"),
    "rows.csv": (b"prompt,response\nq,r,s\n", "(after row 0: 3 cells under 2 names); write it as"),
    "latin.csv": (
        "prompt;id\né;1\n".encode("latin-1"),
        "between cells, in UTF-8 (after row 0:",
    ),
    "twice.csv": (b"prompt,prompt\nq,r\n", "twice.csv has several columns named 'prompt'"),
    "bad.jsonl.gz": (b"nothing of the kind", "bad.jsonl.gz can't be unpacked"),
    "two.json": (b'{"train": [{"prompt": "q"}], "test": [{"prompt": "q"}]}', "(train, test)"),
    "latin.jsonl": ('{"prompt": "é"}'.encode("latin-1"), "line 1 is not JSON (not UTF-8"),
    "bad.parquet": (b"nothing of the kind", "bad.parquet is not readable as Parquet"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_can_not_be_read_are_named(tmp_path, name):
    content, text = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert text in error_of(str(tmp_path / name))


def test_options_that_can_not_be_are_refused(jsonl):
    path = jsonl({"prompt": "a"})
    assert "has no splits" in error_of(path, split="test")
    assert "did you mean gsm8k?" in error_of("gsm-8")
    assert "no dataset 'builtin:math' (did you mean builtin:maths?)" in error_of("builtin:math")
