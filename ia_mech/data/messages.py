"""The messages of a data row, in any of the usual spellings, as chat templates take them.

A message is a dict as ``Conversation.messages`` has it. What would change the conversation and
isn't read (images, documents) is refused by name. Other fields (times, languages, flags) are left
out; null ones are gaps.

Contents of another type than text and unknown roles are kept for the check of the whole
conversation, which names them.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ia_mech.data.values import from_json, is_gap, is_null, json_type, jsonable, list_of
from ia_mech.errors import UserError

Message = dict[str, Any]

_NAMES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard claude gemini bot chatbot model ai llm",
    "tool": "tool function observation ipython tool_response tool_result function_response",
}
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
_CALLING = ("function_call", "tool_call")  # ShareGPT's roles of messages that are a call
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
PARTS = ("reasoning_content", "tool_calls")  # of an assistant's message, beside its content
# Of a query and its answer, where a list has both in one item.
_EXCHANGES = (
    *(("input", "output"), ("user", "assistant"), ("human", "assistant")),
    *(("question", "answer"), ("prompt", "response"), ("query", "response")),
)
_CHOICE = ("message", "text", "response", "content", "output", "completion")  # what it says
# What no text-only conversation has.
UNREAD = (
    *("image", "images", "audio", "audios", "video", "videos", "files", "attachments"),
    *("document", "documents", "contexts", "passages", "chat_template_kwargs"),
)
_UNREAD_FIELDS = (*UNREAD, "file", "context", "refusal", "channel", "functions")
_PART_FIELDS = ("type", "text", "annotations", "cache_control", "logprobs")
METADATA = "--metadata-columns"
NOT_PART = (
    f"put what it says into the messages, or name it with {METADATA} if it isn't part of the "
    "conversation"
)


@dataclass(frozen=True)
class Answer:
    """What an assistant said to a query: its messages, and those of tools and users after it."""

    messages: list[Message]
    finish_reason: str | None = None


def read_messages(listed: Sequence, place: str, ignored: Collection[str] = ()) -> list[Message]:
    """Messages out of a list of messages, or of exchanges of a query and an answer, as JSON or
    Arrow gives it; ``ignored`` are fields that aren't part of the conversation.

    Raises:
        UserError: something that is no message, or that can't be kept; ``place`` opens it.
    """
    return [
        message
        for number, one in enumerate(listed, start=1)
        for message in _read(one, f"{place}: message {number}", ignored)
    ]


def as_list(value: Any) -> Any:
    """The list that a text holds, as JSON or as a transcript; other values as they are."""
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        _, *turns = re.split(r"\n\n(Human|Assistant):", value)
        pairs = zip(turns[::2], turns[1::2], strict=True)
        listed = [{"role": role, "content": text.strip()} for role, text in pairs]
        return listed if listed[-1]["content"] else listed[:-1]  # an answer that is asked for
    return from_json(value)


def holds_messages(value: Any) -> bool:
    """Whether a value is a list of messages, or a text that holds one."""
    return list_of(value, dict) or (isinstance(value, str) and has_roles(as_list(value)))


def has_roles(listed: Any) -> bool:
    """Whether a value is a list of messages that say whose they are."""
    return list_of(listed, dict) and bool({"role", "from"} & listed[0].keys())


def holds_answers(value: Any) -> bool:
    """Whether a value is a list of answers: messages, or what chat APIs give."""
    return list_of(value, dict) and all(_is_choice(one) or has_roles([one]) for one in value)


def holds_said(value: Any) -> bool:
    """Whether a value holds what somebody said: a text, a list of texts or objects, a choice."""
    if isinstance(value, dict):
        return any(isinstance(value.get(name), str | dict) for name in _CHOICE)
    listed = value if isinstance(value, list) else [value]
    return any(isinstance(one, str | dict) for one in listed)


def is_said(value: Any, said: Collection[str]) -> bool:
    """Whether a value, or one in an object, is among these texts."""
    values = value.values() if isinstance(value, dict) else [value]
    return any(isinstance(one, str) and one in said for one in values)


def read_answers(value: Any, place: str, ignored: Collection[str] = ()) -> list[Answer]:
    """The answers in a cell: one (a text, a message or several), or the choices of a chat API.

    Raises:
        UserError: as :func:`read_messages`.
    """
    if has_roles(listed := from_json(value)):  # else the JSON is what was said
        value = listed
    if isinstance(value, dict) and not is_gap(value.get("choices")):
        value = value["choices"]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return [Answer([{"role": "assistant", "content": value}])]
    if not value or all(map(_is_choice, value)):
        return [_choice(one, place, ignored) for one in value]
    return [Answer(read_messages(value, place, ignored))]


def _is_choice(value: Any) -> bool:
    return isinstance(value, dict) and "role" not in value and not {*_CHOICE}.isdisjoint(value)


def _choice(choice: dict, place: str, ignored: Collection[str]) -> Answer:
    said = next((choice[name] for name in _CHOICE if not is_gap(choice.get(name))), None)
    said = said if isinstance(said, dict) else {"role": "assistant", "content": said}
    reason = choice.get("finish_reason")
    return Answer(read_messages([said], place, ignored), None if is_null(reason) else str(reason))


def read_tools(value: Any, place: str) -> list[dict]:
    """The schemas of tools, each as an object with ``function``.

    Raises:
        UserError: they are none.
    """
    problem = f"{place}: the tools are not a list of objects with names"
    remedy = f"write their schemas as JSON, or name the column with {METADATA} if there were none"
    named = [function for _, function in _functions(value, problem, remedy)]
    plain = ({k: v for k, v in function.items() if k != "type"} for function in named)
    return [{"type": "function", "function": jsonable(function)} for function in plain]


def _functions(value: Any, problem: str, remedy: str) -> Iterator[tuple[dict, dict]]:
    """Each object of a list, or of its JSON, with the named function that it has, or that it is."""
    value = from_json(value)
    for one in map(from_json, value if isinstance(value, list) else [value]):
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(problem, remedy)
        yield one, function


def refuse_unread(fields: dict, names: Collection[str], place: str) -> None:
    """Refuse cells that would change the conversation and can't be given to a model.

    Raises:
        UserError: names the first one.
    """
    for name in names:
        value = fields.get(name)
        if isinstance(value, str | bytes | list | dict) and not is_gap(value):
            raise UserError(f"{place} has {name!r}, which can't be read", NOT_PART)


def _read(given: Any, place: str, ignored: Collection[str]) -> Iterator[Message]:
    if isinstance(given, dict):
        given = {k: v for k, v in given.items() if not is_null(v) and k not in ignored}
        if "role" in given or "from" in given:
            yield _message(given, place)
            return
        pairs = (names for names in _EXCHANGES if set(names) <= given.keys())
        given = [given[name] for name in next(pairs, ())] or given
    if not isinstance(given, list) or len(given) != 2 or isinstance(given[0], dict):
        raise UserError(
            f"{place} is {json_type(given)} without a role",
            'write messages as {"role": …, "content": …} or {"from": …, "value": …}',
        )
    query, answer = given
    yield {"role": "user", "content": query}
    if answer is not None:
        yield {"role": "assistant", "content": answer}


def _message(given: dict, place: str) -> Message:
    """One message, without the fields that are null."""
    name = str(given.get("role", given.get("from")))
    key = name.strip().lower().replace("-", "_").replace(" ", "_")
    content = next((given[n] for n in ("content", "value", "text", "parts") if n in given), None)
    calls = [given.get("tool_calls"), given.get("function_call")]
    if key in _CALLING:
        key, content, calls = "assistant", None, [content]
    made: Message = {"role": ROLES.get(key, name), "content": content}
    given = {k: v for k, v in given.items() if not is_gap(v)}
    unread = [k for k in _UNREAD_FIELDS if (k, given.get(k)) != ("channel", "final")]
    refuse_unread(given, unread, place)
    thoughts = [given[k] for k in THOUGHTS if k in given]
    if isinstance(content, list):
        made["content"], thought = _joined(content, place)
        thoughts += thought
    if thoughts := [one for one in thoughts if not is_gap(one)]:
        if not list_of(thoughts, str) or len({*thoughts}) > 1:
            problem = "two thoughts that differ, or one that is no text"
            raise UserError(f"{place} has {problem}", "keep one, as text, in reasoning_content")
        made["reasoning_content"] = thoughts[0]
    if called := [call for value in calls if not is_gap(value) for call in _calls(value, place)]:
        made["tool_calls"] = called
    if made.keys() & {*PARTS}:
        if made["role"] != "assistant":
            raise UserError(
                f"{place} ({name}) has a thought or a tool call",
                "leave it to the assistant's messages",
            )
        made["content"] = "" if made["content"] is None else made["content"]
    made |= {k: str(given[k]) for k in ("name", "tool_call_id") if k in given}
    if "tools" in given:
        made["tools"] = read_tools(given["tools"], place)
    return made


def _joined(parts: list, place: str) -> tuple[str, list]:
    """The text parts of a content, each on lines of its own, and its thoughts."""
    texts, thoughts = [], []
    for part in parts:
        if isinstance(part, str):
            part = {"text": part}
        part = {k: v for k, v in part.items() if not is_null(v)} if isinstance(part, dict) else {}
        kind = part.get("type", "text")
        extra = [k for k, v in part.items() if k not in _PART_FIELDS and not is_gap(v)]
        if kind in ("thinking", "reasoning") and kind in part:
            thought = part[kind]
            thoughts.append(_joined(thought, place)[0] if isinstance(thought, list) else thought)
        elif kind in ("text", "input_text", "output_text") and "text" in part and not extra:
            texts.append(part["text"])
        else:
            kind = next(iter(extra), kind) if kind == "text" else kind
            raise UserError(
                f"{place} has a part of the kind {str(kind)!r}, which is no text",
                "write what the part says as text",
            )
    return "\n".join(map(str, texts)), thoughts


def _calls(value: Any, place: str) -> list[dict]:
    """Calls of tools as templates take them: arguments as an object, not as its JSON."""
    remedy = 'write "tool_calls": [{"function": {"name": …, "arguments": …}}]'
    made = []
    for call, function in _functions(value, f"{place} has a tool call without a name", remedy):
        arguments = function.get("arguments", function.get("parameters"))
        arguments = {} if is_gap(arguments) else jsonable(from_json(arguments))
        named = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        made.append(named if is_null(call.get("id")) else {"id": str(call["id"]), **named})
    return made
