"""Conversations: every shape of row, every error's text, order and re-iteration."""

import json
import tracemalloc
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ia_mech.data.conversations import ColumnMap, Conversation, open_conversations, validate
from ia_mech.data.formats import split_gsm8k
from ia_mech.errors import UserError

USER, ASSISTANT = "user", "assistant"
DIALOGUE = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "r1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "r2"},
    {"role": "user", "content": "q3"},
]


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
        "reference": "more",
        "answer": "42",
        "metadata": {"k": [1, None]},
    }
    return Conversation(**(fields | changes))


def test_query_and_response():
    assert example().query == "q1" and example().response == "r1"
    open_ended = example(messages=tuple(DIALOGUE[:3]))
    assert open_ended.query == "q2" and open_ended.response is None


def test_with_response_appends_or_replaces_and_leaves_the_original_alone():
    original = example()
    assert turns(original.with_response("new")) == [(USER, "q1"), (ASSISTANT, "new")]
    assert original.response == "r1"
    appended = example(messages=tuple(DIALOGUE[:3])).with_response("new")
    assert turns(appended)[-2:] == [(USER, "q2"), (ASSISTANT, "new")]
    assert len(appended.messages) == 4


def test_dict_round_trip_survives_json():
    conversation = example()
    assert Conversation.from_dict(json.loads(json.dumps(conversation.to_dict()))) == conversation


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "here: no user message"),
        ([{"role": "system", "content": "s"}], "here: no user message"),
        ([{"role": "tool", "content": "x"}], "here: message 1 has the role 'tool'"),
        ([{"role": "user", "content": None}], "here: message 1 (user) is null, not text"),
        ([{"role": "user", "content": ["x"]}], "here: message 1 (user) is list, not text"),
        ([{"role": "user", "content": " \n"}], "here: the query is empty"),
        ([{"role": "user", "content": "\ud83d"}], "message 1 (user) has half a surrogate pair"),
        (DIALOGUE[1:2], "don't alternate"),
        ([DIALOGUE[0], DIALOGUE[2]], "roles: user, user"),
        ([DIALOGUE[0], {"role": "system", "content": "s"}], "roles: user, system"),
    ],
)
def test_validation_names_the_row_and_the_fault(messages, text):
    with pytest.raises(UserError) as caught:
        validate(example(messages=tuple(messages)), "here")
    assert text in str(caught.value)


# --- shapes of rows


def test_messages_are_cut_at_the_first_exchange(jsonl):
    (only,) = read(jsonl({"messages": DIALOGUE}))
    assert turns(only) == [(USER, "q1"), (ASSISTANT, "r1")] and only.reference == "q2"


def test_messages_cut_last_keeps_earlier_turns(jsonl):
    (only,) = read(jsonl({"messages": DIALOGUE}), cut="last")
    assert len(only.messages) == 4 and only.response == "r2" and only.reference == "q3"


def test_messages_tolerate_other_names_for_the_roles(jsonl):
    said = [{"role": "human", "content": "q"}, {"role": "gpt", "content": "r", "weight": 1}]
    (only,) = read(jsonl({"messages": said}))
    assert only.messages == (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "r"},
    )


def test_a_response_column_completes_messages_that_end_with_the_query(jsonl):
    (only,) = read(jsonl({"prompt": DIALOGUE[:3], "response": "r2"}))
    assert turns(only)[-1] == (ASSISTANT, "r2") and only.query == "q2"


def test_sharegpt(jsonl):
    said = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "r"},
        {"from": "human", "value": " again? "},
    ]
    path = jsonl({"id": 7, "conversations": said})
    for columns in ({}, {"format": "sharegpt"}):
        (only,) = read(path, **columns)
        assert turns(only) == [("system", "s"), (USER, "q"), (ASSISTANT, "r")]
        assert only.reference == "again?" and only.id == "7"


@pytest.mark.parametrize(
    ("query", "response"),
    [
        ("question", "answer"),
        ("prompt", "response"),
        ("query", "response"),
        ("instruction", "output"),
    ],
)
def test_pairs_of_columns(jsonl, query, response):
    (only,) = read(jsonl({query: "q", response: "r", "follow_up": "f"}))
    assert turns(only) == [(USER, "q"), (ASSISTANT, "r")]
    assert only.reference == "f" and only.answer is None and only.metadata == {}


def test_answer_is_gold_beside_a_response_and_for_bare_prompts(jsonl):
    rows = [
        {"question": "q", "response": "r", "answer": 4},
        {"prompt": "q", "answer": "4"},
        {"question": "q", "response": None, "answer": "4"},
    ]
    both, bare, unanswered = read(jsonl(*rows))
    assert both.response == "r" and both.answer == "4"
    assert bare.response is None and bare.answer == "4"
    assert unanswered.response is None and unanswered.answer == "4"


def test_alpaca_input_belongs_to_the_query(jsonl):
    (only,) = read(jsonl({"instruction": "Translate.", "input": "Guten Tag", "output": "Hello"}))
    assert only.query == "Translate.\n\nGuten Tag" and only.metadata == {}


def test_blank_references_are_none_and_others_are_stripped(jsonl):
    blank, padded = read(
        jsonl({"question": "q", "answer": "r", "reference": "  "},
              {"question": "q", "answer": "r", "reference": " why?\n"})
    )  # fmt: skip
    assert blank.reference is None and padded.reference == "why?"


def test_turns(jsonl):
    answered = {"question_id": 3, "turns": ["q", "then"], "reference_first_answer": "r"}
    with_answer, without = read(
        jsonl(answered, answered | {"question_id": 4, "reference_first_answer": None})
    )
    assert turns(with_answer) == [(USER, "q"), (ASSISTANT, "r")]
    assert with_answer.reference == "then" and with_answer.id == "3"
    assert without.response is None and without.reference == "then"


def test_own_form_is_read_back_as_it_is(jsonl):
    # Without its reference a row of three turns would be cut; here the messages are the context.
    whole = example(messages=tuple(DIALOGUE[:3]), reference=None, metadata={"k": [1, 2]})
    assert read(jsonl(whole.to_dict())) == [whole]


def test_named_columns_win(jsonl):
    row = {"uid": 5, "group": "g", "ask": "q", "say": "r", "next": "f", "gold": [1], "prompt": "no"}
    names = {"id": "uid", "source": "group", "query": "ask", "response": "say"}
    (only,) = read(jsonl(row), **names, followup="next", answer="gold")
    assert (only.id, only.source_id, only.reference, only.answer) == ("5", "g", "f", "[1]")
    assert turns(only) == [(USER, "q"), (ASSISTANT, "r")] and only.metadata == {"prompt": "no"}


def test_a_question_with_its_answer_named_gold_has_no_response(jsonl):
    (only,) = read(jsonl({"question": "q", "answer": "4"}), answer="answer")
    assert only.response is None and only.answer == "4"


def test_gsm8k_marks_are_found_only_at_the_end():
    assert split_gsm8k("so <<1+1=2>>2\n#### 2") == ("so 2\nThe answer is 2", "2")
    assert split_gsm8k("#### 2\nand more") is None
    assert split_gsm8k("no mark") is None


def test_metadata_keeps_the_rest_without_nulls(jsonl):
    row = {"prompt": "q", "tag": "x", "kwargs": [{"a": None, "b": 1}], "metadata": {"own": 2}}
    (only,) = read(jsonl(row))
    assert only.metadata == {"tag": "x", "kwargs": [{"b": 1}], "own": 2}


# --- ids, order, laziness


def test_ids_default_to_stem_and_row(jsonl):
    first, second = read(jsonl({"prompt": "a"}, "", {"prompt": "b", "id": ""}))
    assert (first.id, second.id) == ("data-00001", "data-00002")  # blank lines aren't rows
    assert second.source_id == "data-00002" and second.dataset == "data"


def test_limit_and_reiteration(jsonl):
    source = open_conversations(jsonl(*({"prompt": str(i)} for i in range(5))), limit=3)
    assert [c.query for c in source] == [c.query for c in source] == ["0", "1", "2"]


def test_rows_are_read_only_as_far_as_needed(jsonl):
    path = jsonl({"prompt": "a"}, {"prompt": "b"}, "this is not JSON")
    assert len(read(path, limit=2)) == 2


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


def test_builtin_takes_one_of_each_in_turn():
    conversations = list(open_conversations("builtin"))
    parts = ("maths", "instructions", "open")
    assert [c.id for c in conversations] == [f"{p}-{n:02d}" for n in range(1, 33) for p in parts]
    first = [c.dataset for c in open_conversations("builtin", limit=24)]
    assert {first.count(name) for name in set(first)} == {8}
    assert all(c.response for c in conversations)


@pytest.mark.parametrize("part", ["maths", "instructions", "open"])
def test_builtin_parts(part):
    source = open_conversations(f"builtin:{part}")
    assert source.name == f"builtin-{part}"
    assert [c.id for c in source] == [f"{part}-{n:02d}" for n in range(1, 33)]


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


# --- errors


FILES = {
    "rows.csv": (b"a,b", "rows.csv is not a .jsonl, .json, .parquet file"),
    "quotes.jsonl": (
        b"{\"prompt\": \"a\"}\n{'prompt': 'b'}",
        "quotes.jsonl line 2 is not JSON (Expecting property name",
    ),
    "latin.jsonl": (b'{"prompt": "\xe9"}', "latin.jsonl line 1 is not JSON (not UTF-8"),
    "list.jsonl": (b"[1]", "list.jsonl line 1 holds a list, not an object"),
    "bad.parquet": (b"nothing of the kind", "bad.parquet is not readable as Parquet"),
    "empty.jsonl": (b"\n", "dataset empty has no rows; give one that has"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_read(tmp_path, name):
    content, text = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert text in error_of(str(tmp_path / name))


def test_names_and_options_that_do_not_fit(jsonl):
    assert error_of("nowhere.jsonl") == "no file nowhere.jsonl; give the path of an existing file"
    path = jsonl({"prompt": "a"})
    assert error_of(path, limit=0) == "--limit 0 leaves no rows; use --limit 1 or more"
    assert "has no splits" in error_of(path, split="test")


def test_duplicate_ids_name_both_rows(jsonl):
    rows = [{"id": name, "prompt": "q"} for name in ("a", "b", "a")]
    assert error_of(jsonl(*rows)).startswith(
        "data.jsonl line 3: id 'a' is that of row 1 and of row 3"
    )


def test_unrecognised_columns_name_what_is_there_and_the_flags(jsonl):
    text = error_of(jsonl({"text": "x", "label": 1}))
    assert text.startswith("data.jsonl line 1: columns not recognised (found: text, label)")
    for flag in ("--format", "--query-column", "--messages-column", "--response-column"):
        assert flag in text


def test_a_named_column_that_is_missing(jsonl):
    text = error_of(jsonl({"prompt": "x"}), columns=ColumnMap(query="ask"))
    assert text == ("data.jsonl line 1: no column 'ask' (found: prompt); correct --query-column")


@pytest.mark.parametrize(
    ("row", "columns", "text"),
    [
        ({"messages": None}, {}, "no list of messages (column 'messages' is null)"),
        ({"messages": ["hi"]}, {}, "a message is text without a role"),
        ({"messages": []}, {}, "no user message"),
        ({"messages": [{"role": ["x"], "content": "a"}]}, {}, "has the role \"['x']\""),
        ({"turns": []}, {}, "no list of user turns (column 'turns' is a list)"),
        ({"text": "x"}, {"format": "messages"}, "no list of messages (column None is null)"),
        ({"text": "x"}, {"format": "qa"}, "no query (found: text)"),
        ({"prompt": 3}, {}, "message 1 (user) is int, not text"),
        ({"prompt": "x", "uid": None}, {"id": "uid"}, "the id is null, not text or a number"),
        ({"prompt": "x", "id": ["a"]}, {}, "the id is a list, not text or a number"),
        ({"prompt": "x", "f": 1}, {"followup": "f"}, "the reference is int, not text"),
    ],
)
def test_rows_that_do_not_fit_are_named(jsonl, row, columns, text):
    said = error_of(jsonl(row), columns=ColumnMap(**columns))
    assert said.startswith("data.jsonl line 1: ") and text in said


def test_unknown_formats_and_cuts():
    with pytest.raises(UserError, match="no format 'csv'; use one of auto, messages, sharegpt"):
        ColumnMap(format="csv")
    with pytest.raises(UserError, match="no cut 'middle'; use one of first, last"):
        ColumnMap(cut="middle")


def test_an_unknown_name_lists_the_presets_and_the_close_ones():
    text = error_of("gsm-8")
    assert "no dataset 'gsm-8'" in text and "did you mean gsm8k?" in text
    assert "ifbench, healthbench, coval" in text
    assert "no built-in dataset 'builtin:math'" in error_of("builtin:math")


# --- real files, where they are at hand
