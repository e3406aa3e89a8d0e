"""What people bring: messages in other spellings, columns beside them, tools, thoughts, gaps."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ia_mech.data.conversations import ColumnMap, open_conversations
from ia_mech.errors import UserError


def said(*texts: str) -> list[dict]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


def read(tmp_path, *rows: dict, **columns):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(open_conversations(str(file), columns=ColumnMap(**columns)))


BRIEF = {"role": "system", "content": "Be brief."}
ASK, CARP = said("Name a fish.", "A carp.")
TIDE = {"function": {"name": "tide", "arguments": {"at": "noon"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **TIDE}]}
LOW = {"role": "tool", "content": "low"}
ROUND = [*said("How is the tide?"), CALL, LOW, {"role": "assistant", "content": "It is low."}]
SCHEMA = {"name": "tide", "parameters": {"type": "object"}}
THOUGHT = CARP | {"reasoning_content": "Pike or carp?"}
AS_JSON = json.dumps([ASK, CARP])


def shared(*turns: tuple[str, str]) -> list[dict]:
    return [{"from": who, "value": text} for who, text in turns]


READ = {  # a row, and the messages that it has
    "names of the two": (
        {"conversations": shared(("USER", ASK["content"]), ("ChatGPT", "A carp."))}, [ASK, CARP]
    ),
    "prompter and text": (
        {"messages": [{"role": "prompter", "text": "Name a fish."}, CARP]}, [ASK, CARP]
    ),
    "model and parts": (
        {"messages": [ASK, {"role": "model", "parts": [{"text": "A carp."}]}]}, [ASK, CARP]
    ),
    "exchanges": ({"conversation": [{"input": "Name a fish.", "output": "A carp."}]}, [ASK, CARP]),
    "text parts": (
        {"messages": [ASK | {"content": [{"type": "text", "text": "Name"}, "a fish."]}]},
        said("Name\na fish."),
    ),
    "null fields are gaps": (
        {"messages": [ASK | {"value": None, "images": None, "name": ""},
                      CARP | {"tool_calls": [], "thinking": None, "audio": {"id": None}}]},
        [ASK, CARP],
    ),
    "null columns are gaps": (
        {"prompt": "Name a fish.", "messages": None, "system": None, "images": [], "context": ""},
        [ASK],
    ),
    "messages as JSON": ({"messages": AS_JSON}, [ASK, CARP]),
    "prompt as JSON": ({"prompt": json.dumps([ASK]), "response": "A carp."}, [ASK, CARP]),
    "a query that is JSON": ({"prompt": '[{"a": 1}]'}, said('[{"a": 1}]')),
    "fields of no weight": ({"messages": [ASK | {"time": 3}, CARP | {"weight": 1}]}, [ASK, CARP]),
    "a name": ({"messages": [ASK | {"name": "Ann"}]}, [ASK | {"name": "Ann"}]),
    # thoughts
    "reasoning_content": ({"messages": [ASK, THOUGHT]}, [ASK, THOUGHT]),
    "thinking": ({"messages": [ASK, CARP | {"thinking": "Pike or carp?"}]}, [ASK, THOUGHT]),
    "said twice": (
        {"messages": [ASK, THOUGHT | {"reasoning": THOUGHT["reasoning_content"]}]}, [ASK, THOUGHT]
    ),
    "a part that thinks": (
        {"messages": [ASK, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Pike or carp?"},
            {"type": "text", "text": "A carp."}]}]},
        [ASK, THOUGHT],
    ),
    "nothing but a thought": (
        {"messages": [ASK, {"role": "assistant", "content": None, "reasoning": "Pike or"}]},
        [ASK, {"role": "assistant", "content": "", "reasoning_content": "Pike or"}],
    ),
    "a thought in a column": (
        {"prompt": "Name a fish.", "response": "A carp.", "reasoning_content": "Pike or carp?"},
        [ASK, THOUGHT],
    ),
    "a setting of that name": (
        {"messages": [ASK], "output": "A carp.", "reasoning": "on"}, [ASK, CARP]
    ),
    "a thought without spaces": (
        {"prompt": "Name a fish.", "response": "A carp.", "thinking": "鲤鱼"},
        [ASK, CARP | {"reasoning_content": "鲤鱼"}],
    ),
    # tools
    "a round with a tool": (
        {"messages": [*ROUND[:1], CALL | {"content": None, "tool_calls": json.dumps([TIDE])},
                      *ROUND[2:], ASK]},
        ROUND,
    ),
    "arguments as JSON, ids": (
        {"messages": [*ROUND[:1], CALL | {"tool_calls": [{"id": 1, "function": {
            "name": "tide", "arguments": '{"at": "noon"}'}}]},
            LOW | {"role": "ipython", "tool_call_id": 1}, ROUND[3]]},
        [*ROUND[:1], CALL | {"tool_calls": [{"id": "1", "type": "function", **TIDE}]},
         LOW | {"tool_call_id": "1"}, ROUND[3]],
    ),
    "function_call": (
        {"messages": [*ROUND[:1], {"role": "assistant", "function_call": TIDE["function"]},
                      LOW | {"role": "function", "name": "tide"}, ROUND[3]]},
        [*ROUND[:2], LOW | {"name": "tide"}, ROUND[3]],
    ),
    "ShareGPT's roles": (
        {"conversations": shared(("human", "How is the tide?"),
                                 ("function_call", json.dumps(TIDE["function"])),
                                 ("observation", "low"), ("gpt", "It is low."))},
        ROUND,
    ),
    "a call as text": (
        {"conversations": shared(("human", "How is the tide?"), ("gpt", "<call>tide</call>"),
                                 ("tool", "low"), ("gpt", "It is low."), ("human", "And now?"))},
        [*ROUND[:1], {"role": "assistant", "content": "<call>tide</call>"}, *ROUND[2:]],
    ),
    "no answer yet": ({"messages": ROUND[:3]}, ROUND[:3]),
    # columns
    "system": ({"system": "Be brief.", "conversations": [ASK, CARP]}, [BRIEF, ASK, CARP]),
    "system there and here": (
        {"system_prompt": "Be brief.", "messages": [BRIEF, ASK]}, [BRIEF, ASK]
    ),
    "passage": (
        {"question": "Who?", "context": "Ann sings.", "answers": {"text": ["Ann"]}},
        said("Who?\n\nAnn sings."),
    ),
    "history": (
        {"instruction": "Another?", "output": "A pike.", "history": [["Name a fish.", "A carp."]],
         "system": "Be brief."},
        [BRIEF, ASK, CARP, *said("Another?", "A pike.")],
    ),
    "history of messages": (
        {"query": "Another?", "chat_history": AS_JSON}, [ASK, CARP, *said("Another?")]
    ),
    "completion of messages": ({"prompt": [ASK], "completion": [CARP]}, [ASK, CARP]),
    "completion of more": ({"prompt": [ASK], "completion": [CARP, ASK, CARP]}, [ASK, CARP]),
    "a prompt of more": (
        {"prompt": [ASK, CARP, ASK], "completion": [CARP, ASK, CARP]}, [ASK, CARP, ASK, CARP]
    ),
    "chosen": ({"prompt": "Name a fish.", "chosen": "A carp.", "rejected": "An oak."}, [ASK, CARP]),
    "chosen, the query repeated": (
        {"prompt": "Name a fish.", "chosen": [BRIEF, ASK, CARP]}, [BRIEF, ASK, CARP]
    ),
    "several answers to a dialogue": (
        {"messages": [ASK, CARP, ASK], "outputs": ["A carp.", "A pike."]}, [ASK, CARP, ASK, CARP]
    ),
    "chosen alone": ({"chosen": [ASK, CARP], "rejected": [ASK]}, [ASK, CARP]),
    "input and output": ({"input": [ASK], "output": "A carp."}, [ASK, CARP]),
    "the same response twice": ({"messages": [ASK, CARP], "response": "A carp."}, [ASK, CARP]),
    "a choice": (
        {"messages": [ASK], "choices": [{"message": THOUGHT | {"refusal": None}, "index": 0}]},
        [ASK, THOUGHT],
    ),
    "a transcript": (
        {"chosen": "\n\nHuman: Name a fish.\n\nAssistant: A carp.", "rejected": "\n\nHuman: No."},
        [ASK, CARP],
    ),
    "a transcript beside its query": (
        {"prompt": "\n\nHuman: Name a fish.\n\nAssistant:",
         "chosen": "\n\nHuman: Name a fish.\n\nAssistant: A carp."},
        [ASK, CARP],
    ),
    "responses that only look alike": (
        {"prompt": "Name a fish.", "responses": ["\n\nHuman: Why?", '[{"a": 1}]']},
        said("Name a fish.", "\n\nHuman: Why?"),
    ),
    "a transcript that asks": (
        {"prompt": "\n\nHuman: Name a fish.\n\nAssistant:", "response": "A carp."}, [ASK, CARP]
    ),
    "a response of an API": (
        {"messages": [ASK], "response": {"choices": [{"message": CARP}]}}, [ASK, CARP]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "messages"), READ.values(), ids=READ)
def test_a_row_is_read_as_the_conversation_that_it_is(tmp_path, row, messages):
    only, *_ = read(tmp_path, row)
    assert list(only.messages) == messages


@pytest.mark.parametrize("name", READ)
def test_parquet_with_the_columns_of_all_rows_reads_alike(tmp_path, name):
    row, messages = READ[name]
    whole = {
        "messages": [dict.fromkeys(("role", "content", "from", "value", "name", "tool_calls"))]
    }
    rows = [row, whole | dict.fromkeys(("system", "context", "response", "tools"))]
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pytest.skip("no columnar file can hold such rows")
    pq.write_table(table.slice(0, 1), tmp_path / "rows.parquet")
    only, *_ = open_conversations(str(tmp_path / "rows.parquet"))
    assert list(only.messages) == messages


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
OTHER = "and the column {!r} may be one, too".format
REFUSED = [  # a row, and what is said of it
    *(
        ({"question": "a", "answer": "b", name: value}, OTHER(name))
        for name, value in (
            ("model_response", "c"), ("prediction", "4"), ("prediction", 4), ("generation", "c"),
            ("generations", ["c", "d"]), ("completions", [{"model": "m", "response": "c"}]),
            ("llm_answer", {"content": "c"}),
        )
    ),
    ({"instruction": "a", "output": "b", "prediction": "c"}, OTHER("prediction")),
    ({"messages": [ASK, CARP], "model_output": "A pike."}, OTHER("model_output")),
    ({"question": "a", "answers": ["b", "c"]}, "no response, and the column 'answers' may be one"),
    ({"prompt": "a", "sampled": ["b"]}, "no response, and the column 'sampled' may be one"),
    ({"question": "a", "answer": ["b", "c"]}, "may be the response or the gold answer; say --resp"),
    ({"question": "a", "answer": {"value": "b"}}, "may be the response or the gold answer"),
    ({"question": "a", "answer": 4}, "may be the response or the gold answer"),
    ({"prompt": '["a", "b"]', "response": "c"}, "'prompt' is a list of texts, written as JSON"),
    ({"conversation_a": [ASK, CARP], "question_id": "b"}, "them: --messages-column conversati"),
    ({"messages": [ASK | {"content": [IMAGE]}]}, "message 1 has a part of the kind 'image_url'"),
    ({"messages": [ASK | {"content": [IMAGE | {"type": "text", "text": "a"}]}]}, "'image_url'"),
    ({"messages": [ASK | {"content": [{"type": "input_audio"}]}]}, "of the kind 'input_audio'"),
    ({"messages": [ASK | {"content": [{"type": "tool_result"}]}]}, "of the kind 'tool_result'"),
    ({"messages": [ASK | {"images": ["a.png"]}]}, "message 1 has 'images', which can't be read"),
    ({"messages": [ASK, CARP | {"channel": "analysis"}]}, "message 2 has 'channel'"),
    ({"messages": [ASK | {"tools": [SCHEMA]}, CARP, ASK | {"tools": [TIDE]}],
      "real_follow_up": "a"},
     "the tools change within the conversation"),
    ({"messages": [ASK | {"tool_calls": [TIDE]}]}, "message 1 (user) has a thought or a tool call"),
    ({"messages": [ASK, CALL | {"tool_calls": ["tide"]}]}, "has a tool call without a name"),
    ({"messages": [ASK, CALL | {"tool_calls": "tide"}]}, "has a tool call without a name"),
    ({"messages": [ASK, THOUGHT | {"reasoning": "No."}]}, "message 2 has two thoughts that differ"),
    ({"messages": [ASK, CARP | {"thinking": [1]}]}, "differ, or one that is no text"),
    ({"messages": [ASK, CALL]}, "message 2 calls a tool, and no result follows"),
    ({"messages": [ASK, CALL, *said("And?")]}, "message 2 calls a tool, and no result follows"),
    ({"messages": str([ASK])}, "the column 'messages' is not JSON (Expecting property name"),
    ({"messages": ["Hi.", "Hello."]}, "is a list of texts, not a list of messages; name another"),
    ({"messages": [ASK], "context": "Ann sings."}, "'context' stands beside a list of messages"),
    ({"messages": [ASK], "history": [["q", "r"]]}, "'history' stands beside a list of messages"),
    ({"messages": [ASK, CARP], "response": "A pike."}, OTHER("response")),
    ({"messages": [BRIEF, ASK], "system": "Sing."}, "another system message than the messages"),
    ({"turns": ["a", "b"], "passage": "Ann sings."}, "'passage' stands beside a list of user"),
    ({"prompt": "a", "context": 4096}, "the column 'context' is int, not text"),
    ({"prompt": "a", "context": {"contexts": ["b"]}}, "column 'context' is an object, not text"),
    ({"prompt": "a", "context": "b", "passage": "c"}, "context and passage may both be the"),
    ({"prompt": "a", "system": ["b"]}, "the column 'system' is a list, not text"),
    ({"prompt": "a", "history": {"b": 1}}, "'history' is an object, not a list of messages"),
    ({"prompt": "a", "history": "User: b"}, "'history' is text, not a list of messages"),
    ({"prompt": "a", "history": ["b", "c"]}, "'history' is a list of texts"),
    ({"question": "a", "options": ["b", "c"], "answer": "b"}, "'options' stands beside a query"),
    ({"question": "a", "choices": ["b", "c"], "answer": 1}, "'choices' stands beside a query"),
    ({"prompt": "a", "completions": ["b", "c"]}, "the column 'completions' may be one; say"),
    ({"prompt": "a", "documents": ["b"]}, "has 'documents', which can't be read"),
    ({"prompt": "a", "image": {"bytes": "b"}}, "has 'image', which can't be read"),
    ({"prompt": "a", "chat_template_kwargs": {"b": True}}, "has 'chat_template_kwargs'"),
    ({"prompt": "a", "tools": "a calculator"}, "the tools are not a list of objects with names"),
    ({"prompt": "a", "question": "b"}, "the columns 'question' and 'prompt' may both be the query"),
    ({"prompt": "a", "chosen": said("b", "c")}, "begins with other messages than the query"),
    ({"messages": said("a", " ")}, "a message of the assistant is empty; leave it out if"),
    ({"messages": said("a", "", "b", "c"), "real_follow_up": "d"}, "the assistant is empty"),
    ({"prompt": "a", "responses": ["b", ""]}, "a message of the assistant is empty"),
    ({"messages": said("a", "b"), "responses": ["c"]}, OTHER("responses")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "text"), REFUSED)
def test_what_would_change_the_conversation_is_refused_by_name(tmp_path, row, text):
    with pytest.raises(UserError) as caught:
        read(tmp_path, row)
    assert text in str(caught.value) and str(caught.value).startswith("rows.jsonl line 1")


def test_columns_and_fields_can_be_named_as_metadata_or_as_what_they_are(tmp_path):
    row = {"prompt": "a", "context": 4096, "files": ["x"], "sys": "b", "document": "c"}
    (only,) = read(tmp_path, row, metadata=("context", "files", "sys", "document"))
    assert list(only.messages) == said("a") and only.metadata["context"] == 4096
    (only,) = read(tmp_path, row, metadata=("files",), context="document")
    assert only.messages == (BRIEF | {"content": "b"}, *said("a\n\nc"))
    (only,) = read(tmp_path, row | {"motto": "d"}, metadata=("context", "files", "document"),
                   system="motto")  # fmt: skip
    assert only.messages[0]["content"] == "d" and only.metadata["sys"] == "b"
    (only,) = read(tmp_path, {"messages": [ASK | {"name": "Ann"}]}, metadata=("name",))
    assert list(only.messages) == [ASK]


def test_an_answer_beside_a_query_of_another_name_is_asked_about(tmp_path):
    row = {"qustion": "Name a fish.", "answer": "A carp."}
    with pytest.raises(UserError, match="say --response-column answer or --answer-column answer"):
        read(tmp_path, row, query="qustion")
    (given,) = read(tmp_path, row, query="qustion", response="answer")
    (gold,) = read(tmp_path, row, query="qustion", answer="answer")
    assert (given.response, given.answer, gold.response) == ("A carp.", None, None)
    (other,) = read(tmp_path, row | {"said": "A pike."}, query="qustion", response="said")
    assert (other.response, other.answer) == ("A pike.", "A carp.")


def test_every_text_of_a_list_is_a_response(tmp_path):
    for name, listed, named in (
        ("output", ["a", "b"], None), ("outputs", ["a", "b"], None),
        ("responses", '["a", "b"]', None), ("generations", ["a", "b"], "generations"),
        ("completions", [{"model": "m", "response": text} for text in "ab"], "completions"),
    ):  # fmt: skip
        found = read(tmp_path, {"prompt": "q", name: listed}, response=named)
        assert [(one.response, one.response_index) for one in found] == [("a", 0), ("b", 1)]


def test_a_column_of_the_user_that_is_named_like_one_of_ours_can_be_metadata(tmp_path):
    ours = dict.fromkeys(("dataset", "source_id", "follow_up", "context_id", "text"), "x")
    ours |= {"perturbation": "x", "header": "alone", "response_index": 3, "temperature": 0.7}
    (only,) = read(tmp_path, {"prompt": "a", "response": "b"} | ours, metadata=tuple(ours))
    assert only.metadata == ours and (only.dataset, only.real_follow_up) == ("rows", None)
    row = {"prompt": "a", "response": "b", "perturbation": "x", "header": "alone"}
    (other,) = read(tmp_path, row)
    assert (other.perturbation, other.header, len(other.metadata)) == ("none", "user", 2)
    (both,) = read(tmp_path, {"prompt": "a", "topic": "b", "metadata": {"topic": "c"}})
    assert both.metadata == {"topic": "b", "metadata": {"topic": "c"}}


def test_a_name_that_nothing_in_the_data_has_is_no_metadata(tmp_path):
    rows = [{"prompt": "a"}, {"messages": [ASK | {"time": 3}], "my topic": "b"}]
    assert len(read(tmp_path, *rows, metadata=("my topic", "time"))) == 2
    for wrong in ("my topci", "topic"):
        with pytest.raises(UserError, match=f"no column '{wrong}' in the 2 rows .*mean my topic"):
            read(tmp_path, *rows, metadata=("time", wrong))


@pytest.mark.parametrize("name", ["data", "prompt"])
def test_lists_of_texts_are_what_the_format_says(tmp_path, name):
    row = {name: ["Name a fish.", "A carp.", "Another?"]}
    (only,) = read(tmp_path, row, messages=name, format="alternating")
    assert list(only.messages) == [ASK, CARP] and only.real_follow_up == "Another?"
    (only,) = read(tmp_path, row, messages=name, format="turns")
    assert list(only.messages) == [ASK] and only.real_follow_up == "A carp."


def test_how_a_response_ended_is_kept_unless_it_is_cut_off_the_dialogue(tmp_path):
    choices = [
        {"text": "A carp.", "finish_reason": "stop"},
        {"text": "A", "finish_reason": "length"},
    ]
    rows = [
        {"prompt": "Name a fish.", "response": "A carp.", "finish_reason": "length"},
        {"messages": [ASK, CARP], "finish_reason": "length"},
        {"messages": [ASK, CARP, ASK, CARP], "finish_reason": "length"},
        {"prompt": "Name a fish.", "finish_reason": "length"},
        {"prompt": "Name a fish.", "outputs": choices},
        {"prompt": "Name a fish.", "responses": [{"message": THOUGHT}, CARP]},
    ]
    found = read(tmp_path, *rows)
    ends = ["length", "length", None, None, "stop", "length", None, None]
    assert [one.finish_reason for one in found] == ends
    assert [one.response_index for one in found] == [None] * 4 + [0, 1, 0, 1]
    assert [one.thought for one in found[-2:]] == [THOUGHT["reasoning_content"], None]
    assert found[3].metadata == {"finish_reason": "length"}  # of no response


@pytest.mark.parametrize("tools", [[SCHEMA], [{"type": "function", "function": SCHEMA}]])
def test_tools_are_read_as_templates_take_them(tmp_path, tools):
    for cell in (tools, json.dumps(tools), [json.dumps(one) for one in tools]):
        (only,) = read(tmp_path, {"prompt": "a", "tools": cell})
        (first,) = only.messages
        assert first == said("a")[0] | {"tools": [{"type": "function", "function": SCHEMA}]}
        row = {"system": "b", "messages": [said("a")[0] | {"tools": tools}]}
        system, _ = read(tmp_path, row)[0].messages
        assert system == BRIEF | {"content": "b", "tools": first["tools"]}
    assert read(tmp_path, {"prompt": "a", "tools": "[]"})[0].messages == tuple(said("a"))


def test_the_end_of_a_file_beyond_the_limit_and_columns_left_over_are_known(tmp_path):
    rows = [{"prompt": f"{i}", "topic": "a", "input": ""} for i in range(5)]
    read(tmp_path, *rows)  # writes the file
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for suffix in ("jsonl", "parquet", "json"):
        for limit, rest in ((2, True), (5, False), (6, False), (None, False)):
            source = open_conversations(str(tmp_path / f"rows.{suffix}"), limit=limit)
            assert len(list(source)) == min(limit or 5, 5)
            assert (source.rest, source.count(), [*source.left]) == (rest, 5, ["topic"])
