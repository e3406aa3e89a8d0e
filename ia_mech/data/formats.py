"""From one data row, in any of the usual shapes, to the parts of a conversation.

Pure functions of a row (a dict as ``json.loads`` or Arrow gives it): no files and no network.
``place`` says where the row stands ("file.jsonl line 17") and opens every error.

Shapes:
    messages     a list of ``{"role", "content"}``; also this project's own JSONL
    sharegpt     the same, for a list of ``{"from", "value"}``
    qa           one column with the query, perhaps one with the response
    turns        a list of user turns as texts (MT-bench): the query, then what the user said next
    alternating  a list of texts of user and assistant in turn

In any of them a list of texts may stand in place of the response: a conversation each. Columns
beside a shape are part of the conversation (system message, history, passage, tools, thought), are
refused by name, or become metadata. A name that is nearly one of these is asked about.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NoReturn

from ia_mech.data.messages import (
    METADATA,
    NOT_PART,
    PARTS,
    THOUGHTS,
    UNREAD,
    Answer,
    Message,
    as_list,
    has_roles,
    holds_answers,
    holds_messages,
    holds_said,
    is_said,
    read_answers,
    read_messages,
    read_tools,
    refuse_unread,
)
from ia_mech.data.values import from_json, is_gap, is_null, json_type, jsonable, list_of
from ia_mech.errors import UserError
from ia_mech.run.layout import UNPERTURBED
from ia_mech.untrusted import parse_json

CORRECT = "correct the row, or leave such rows out (--skip-unusable; with --dry-run it lists them)"
FORMATS = ("auto", "messages", "sharegpt", "qa", "turns", "alternating")
CUTS = ("first", "last")
USER_HEADER = "user"

# Names that columns are known by. A column with nearly a name of the second group never becomes
# metadata: the user is asked.
_ID = ("id", "question_id", "prompt_id", "key", "unique_id", "conversation_hash", "conversation_id")
_OWN = ("id", "source_id", "dataset", "messages", "real_follow_up")  # of Conversation.to_dict
_MESSAGES = ("messages", "conversation", "conversations")
_QUERY = ("question", "prompt", "query", "instruction", "problem", "input")
_LISTED = ("choices", "outputs", "responses")  # hold answers, or other things
_RESPONSE = ("response", "output", "solution", "completion", "chosen", *_LISTED)
_AFTER_MESSAGES = tuple(name for name in _RESPONSE if name != "solution")  # which is gold there
_FIRST_ANSWER = ("reference_first_answer", "response", "responses")
_OPTIONS = ("options", "choices", "endings")  # of a multiple-choice question

_WHAT = {  # what a role is called in an error, and the names of its columns
    "system": (
        "the system message",
        "system system_prompt system_message system_instruction sys systemPrompt developer",
    ),
    "context": (
        "a passage that the query is about",
        "context passage input passage_text article paragraph evidence story",
    ),
    "followup": ("the real follow-up", "real_follow_up follow_up followup"),
    "history": (
        "the exchanges before the query",
        "history chat_history past conversation_history dialogue_history previous_messages",
    ),
    "tools": ("the schemas of tools", "tools functions"),
}
_NAMES = {role: tuple(names.split()) for role, (_, names) in _WHAT.items()}

# How names end that suggest a query or a response; words that suggest a gold answer.
_LIKE_QUERY = re.compile(r"(question|query|prompt|instruction|problem|input)$")
_LIKE_RESPONSE = re.compile(
    r"(response|answer|output|completion|generation|prediction|candidate|rollout|reply|replie"
    r"|assistant|hypothesis|sampled|samples|resp|pred)s?$"
)
_LIKE_GOLD = ("gold", "correct", "expected", "reference", "target", "ideal", "truth")
_NEAR = 0.8  # of difflib: a name with a letter too many, too few or swapped is near
_WORD = re.compile(r"\s*\w*\s*", re.ASCII)
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_GSM8K_END = re.compile(r"\s*####\s*(-?[\d,.]*\d)\s*$")


@dataclass(frozen=True)
class ColumnMap:
    """Which columns of the data hold what; None leaves a column to be recognised by its name.

    ``metadata`` names columns, and fields of messages, that aren't part of the conversation.
    ``cut`` decides where a dialogue of several exchanges is cut: ``first`` keeps the first
    user-assistant exchange and takes the next user turn as the real follow-up; ``last`` cuts before
    the last user turn, so that the earlier turns stay in the context.
    """

    format: str = "auto"
    id: str | None = None
    source: str | None = None
    messages: str | None = None
    query: str | None = None
    response: str | None = None
    followup: str | None = None
    answer: str | None = None
    system: str | None = None
    context: str | None = None
    metadata: tuple[str, ...] = ()
    cut: str = "first"

    @property
    def names_content(self) -> bool:
        """Whether the shape or a column of its own was named: then no preset is guessed."""
        columns = (self.messages, self.query, self.response, self.followup, self.answer)
        return self.format != "auto" or any(columns)


@dataclass
class ParsedRow:
    """What a row says, before anything is checked; None where it says nothing.

    ``messages`` ends with the response where the row has one.
    """

    messages: list[Message]
    real_follow_up: str | None = None
    answer: str | None = None
    id: str | None = None
    source_id: str | None = None
    dataset: str | None = None
    metadata: dict = field(default_factory=dict)
    perturbation: str = UNPERTURBED
    header: str = USER_HEADER
    responses: list[Answer] | None = None  # several, each of which answers the query
    response_index: int | None = None
    finish_reason: str | None = None
    left: list[str] = field(default_factory=list)  # columns that became metadata
    roles: dict[str, str] = field(default_factory=dict)  # fields of ColumnMap → columns read so
    cut: bool = False  # whether it has more turns after the real follow-up
    unpacked: bool = False  # whether its response was a text with messages


def parse(row: dict, columns: ColumnMap, place: str) -> ParsedRow:
    """Read one row in the shape ``columns`` names, or in the one its columns show.

    Raises:
        UserError: no shape fits, a named column is missing, a column holds the wrong kind, or one
            that would change the conversation can't be read.
    """
    cells = _Cells(row, columns, place)
    refuse_unread(cells.known, [name for name in UNREAD if name != columns.context], place)
    shape = _detect(cells) if columns.format == "auto" else columns.format
    readers = {"qa": _from_qa, "turns": _from_turns, "alternating": _from_alternating}
    parsed = readers.get(shape, _from_messages)(cells)
    cells.add_system(parsed.messages)
    cells.add_tools(parsed.messages)
    parsed.id = cells.identifier("id", _ID)
    parsed.source_id = cells.identifier("source", ("source_id",))
    if isinstance(cells.known.get("dataset"), str):
        parsed.dataset = cells.take("dataset")
    if cells.own:
        for name in ("perturbation", "header", "response_index"):
            if name in cells.known:
                setattr(parsed, name, cells.take(name))
    parsed.unpacked = cells.unpacked
    parsed.left, parsed.metadata = cells.rest()
    if not cells.own:
        parsed.roles = cells.roles
        cells.refuse_another_response(parsed)
        cells.refuse_near_names(parsed.left)
        said = [message for answer in parsed.responses or () for message in answer.messages]
        _refuse_empty([*parsed.messages, *said], place)
    return parsed


def _refuse_empty(messages: list[Message], place: str) -> None:
    """Refuse an assistant's message that says, thinks and calls nothing."""
    for message in messages:
        content = message["content"]
        empty = isinstance(content, str) and not content.strip()
        if message["role"] == "assistant" and empty and not {*message} & {*PARTS}:
            raise UserError(
                f"{place}: a message of the assistant is empty",
                "leave it out if it is the last (the model can write the response), or leave the "
                "row out (--skip-unusable)",
            )


def like_gold(name: str) -> bool:
    """Whether a column is named as gold answers are."""
    return name != "correct" and any(word in name.lower() for word in _LIKE_GOLD)


def split_gsm8k(solution: str) -> tuple[str, str] | None:
    """Response and gold answer of a GSM8K solution; None if the text isn't one.

    The calculator annotations go, and the ``#### 18`` at the end becomes a sentence: both are
    marks for graders that no assistant writes. The gold answer has no thousands separators.
    """
    end = _GSM8K_END.search(solution)
    if end is None:
        return None
    worked = _CALCULATOR.sub("", solution[: end.start()])
    return f"{worked}\nThe answer is {end[1]}".lstrip(), end[1].replace(",", "")


def cut_dialogue(
    messages: list[Message], cut: str, asked: int = 1
) -> tuple[list[Message], str | None]:
    """The context and the user turn that followed it (None if none did); see :class:`ColumnMap`.

    The response is the assistant's last message before the next user turn: calls of tools, and what
    the tools gave, stand before it. ``first`` keeps ``asked`` messages in any case.
    """
    roles = [message["role"] for message in messages]
    users = [i for i, role in enumerate(roles) if role == "user"]
    if cut == "last":
        ends = users[1:][-1:]
    else:
        ends = [end for i, end in pairwise(users) if end >= asked and "assistant" in roles[i:end]]
    if not ends:
        return messages, None
    return messages[: ends[0]], messages[ends[0]]["content"]


class _Cells:
    """One row, with the columns already used; what is left over becomes metadata.

    ``known`` has the columns that can be part of the conversation: neither null nor named as
    metadata.
    """

    def __init__(self, row: dict, columns: ColumnMap, place: str) -> None:
        self.row, self.columns, self.place = row, columns, place
        self.known = {k: v for k, v in row.items() if not is_null(v) and k not in columns.metadata}
        self.used: set[str] = set()
        self.roles: dict[str, str] = {}
        self.unpacked = False

    def name(self, role: str, usual: Iterable[str] = ()) -> str | None:
        """The column for ``role``: the one the user named, else the first usual one present."""
        named = getattr(self.columns, role)
        if named is not None and named not in self.row:
            raise UserError(
                f"{self.place}: no column {named!r} (found: {self.found})",
                f"correct --{role}-column",
            )
        return named or next((name for name in usual if name in self.known), None)

    @property
    def own(self) -> bool:
        """Whether the row is a conversation as this project writes it."""
        return all(name in self.row for name in _OWN)

    @property
    def found(self) -> str:
        """The names of the columns, for an error."""
        shown = (f"{k} (empty)" if is_gap(v) else str(k) for k, v in self.row.items())
        return ", ".join(shown) or "none"

    def take(self, name: str | None, role: str = "") -> Any:
        """The cell of a column (None for no column, or a null), which is then used up; ``role``
        is the field of :class:`ColumnMap` that it is read as."""
        if name is None:
            return None
        self.used.add(name)
        if role and not is_gap(self.row[name]):
            self.roles[role] = name
        return None if is_null(self.row[name]) else self.row[name]

    def text(self, role: str, usual: Sequence[str]) -> str | None:
        """The text of the one column that has something for ``role``."""
        named = getattr(self.columns, role) is not None
        names = [self.name(role)] if named else [n for n in usual if not is_gap(self.known.get(n))]
        texts = {name: self.take(name, role) for name in names if name is not None}
        texts = {name: text for name, text in texts.items() if not is_gap(text)}
        if len(set(map(str, texts.values()))) > 1:
            raise UserError(
                f"{self.place}: the columns {' and '.join(texts)} may both be the {role}",
                f"name one with --{role}-column, or the other with {METADATA}",
            )
        for name, text in texts.items():
            if not isinstance(text, str):
                self.refuse(name, f"is {json_type(text)}, not text")
            return text
        return None

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Refuse a column that would change the conversation."""
        raise UserError(f"{self.place}: the column {name!r} {problem}", NOT_PART)

    def refuse_beside(self, names: Iterable[str], what: str) -> None:
        """Refuse columns that would change a conversation whose ``what`` is there already."""
        for name in (*names, self.columns.context):
            if name not in self.used and not is_gap(self.known.get(name)):
                self.refuse(str(name), f"stands beside {what}")

    def listed(self, name: str, role: str = "") -> Any:
        """The list in a column, or in its text."""
        value = as_list(self.take(name, role))
        if isinstance(value, str) and value.lstrip().startswith("["):
            where = f"{self.place}: the column {name!r}"
            parse_json(value, where, "write the list as JSON, with double quotes and commas")
        return value

    def messages(self, name: str) -> list[Message]:
        """The messages in a column."""
        listed = self.listed(name, "messages")
        if not isinstance(listed, list):
            raise UserError(
                f"{self.place}: no list of messages (column {name!r} is {json_type(listed)})",
                f"name its column with --messages-column (found: {self.found})",
            )
        if list_of(listed, str):
            raise UserError(
                f"{self.place}: the column {name!r} is a list of texts, not of messages",
                "say whose texts: --format turns (the user's alone), or --format alternating "
                "(user and assistant in turn)",
            )
        return read_messages(listed, self.place, self.columns.metadata)

    def texts(self, usual: tuple[str, ...]) -> list[str]:
        """The list of texts in the column that ``usual`` or the user names."""
        name = self.name("messages", usual)
        texts: Any = None if name is None else self.listed(name, "messages")
        if not list_of(texts, str):
            raise UserError(
                f"{self.place}: no list of texts (column {name!r} is {json_type(texts)})",
                f"name its column with --messages-column (found: {self.found})",
            )
        return texts

    def refuse_another_query(self, name: str) -> None:
        """Refuse a row with another column that may be the query, unless the user chose one."""
        query = self.row[name]
        others = [n for n in _QUERY[:-1] if not is_gap(self.known.get(n)) and self.row[n] != query]
        if others and self.columns.query is None:
            raise UserError(
                f"{self.place}: the columns {name!r} and {others[0]!r} may both be the query",
                "name the one with --query-column",
            )

    def response(self, usual: Iterable[str]) -> str | None:
        """The name of the column that holds the response, or several."""
        others = [n for n in _LISTED if not self._holds_answers(n)]
        return self.name("response", [n for n in usual if n not in others])

    def _holds_answers(self, name: str) -> bool:
        """Whether a column of :data:`_LISTED` holds answers. Texts in ``choices`` are the options
        of a multiple-choice question."""
        value = from_json(self.known.get(name))
        return holds_answers(value) or (list_of(value, str) and name != "choices")

    def answers(self, name: str | None) -> list[Answer]:
        """What the assistant said, by the column of the response and those beside it."""
        if name is None or (is_gap(self.row[name]) and not self.own):
            self.take(name)
            return []
        where = f"{self.place}: the column {name!r}"
        said = self.take(name, "response")
        said = as_list(said) if name == "chosen" else said  # may be a transcript
        said = from_json(said) if name == "responses" else said
        several = list_of(said, str) or (name == "responses" and isinstance(said, list))
        each = said if several else [said]
        answers = [a for one in each for a in read_answers(one, where, self.columns.metadata)]
        if len(answers) == 1:
            last = answers[0].messages[-1]
            self.unpacked = isinstance(said, str) and last["content"] != said
            reason = self.beside([last])
            answers = [Answer(answers[0].messages, answers[0].finish_reason or reason)]
        return answers

    def beside(self, messages: list[Message]) -> str | None:
        """Put the thought that a column beside the messages holds into the last message, if that
        is the assistant's. Returns how this message ended, if a column says it."""
        if not messages or messages[-1]["role"] != "assistant":
            return None
        told = [n for n in THOUGHTS if isinstance(self.known.get(n), str)]
        texts = [n for n in told if not _WORD.fullmatch(self.known[n])]  # such as "on", a setting
        if texts and "reasoning_content" not in messages[-1]:
            messages[-1]["reasoning_content"] = self.take(texts[0])
        ended = isinstance(self.known.get("finish_reason"), str)
        return self.take("finish_reason") if ended else None

    def followup(self) -> str | None:
        """The column of the user's real next turn. An unnamed one counts only if it holds text."""
        return self.name(
            "followup", [n for n in _NAMES["followup"] if isinstance(self.known.get(n), str)]
        )

    def history(self) -> list[Message]:
        """The exchanges before the query."""
        name = next((n for n in _NAMES["history"] if not is_gap(self.known.get(n))), None)
        if name is None:
            return []
        listed = self.listed(name)
        if not isinstance(listed, list) or list_of(listed, str):
            kind = "a list of texts" if isinstance(listed, list) else json_type(listed)
            self.refuse(name, f"is {kind}, not a list of messages or exchanges")
        where = f"{self.place}: the column {name!r}"
        return read_messages(listed, where, self.columns.metadata)

    def add_system(self, messages: list[Message]) -> None:
        """Open messages with the system message that a column has."""
        text = self.text("system", _NAMES["system"])
        if text is None:
            return
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": text})
        elif messages[0]["content"] != text:
            raise UserError(
                f"{self.place}: a column has another system message than the messages",
                f"leave out one of them, or name the column with {METADATA}",
            )

    def add_tools(self, messages: list[Message]) -> None:
        """Give the first message the tools that a column, or any message, has."""
        tools = [message.pop("tools") for message in messages if "tools" in message]
        if any(other != tools[0] for other in tools):
            raise UserError(f"{self.place}: the tools change within the conversation", NOT_PART)
        names = [name for name in _NAMES["tools"] if not is_gap(from_json(self.known.get(name)))]
        if names:
            tools = [read_tools(self.take(names[0]), self.place)]
        if tools and messages:
            messages[0]["tools"] = tools[0]

    def identifier(self, role: str, usual: tuple[str, ...]) -> str | None:
        value = self.take(self.name(role, usual))
        blank = value is None or value == ""
        if isinstance(value, list | dict) or (blank and getattr(self.columns, role) is not None):
            raise UserError(
                f"{self.place}: the {role} is {json_type(value)}, not text or a number",
                f"name another column with --{role}-column",
            )
        return None if blank else str(value)

    def gold(self, name: str | None) -> str | None:
        if name in self.used and self.columns.answer is None:
            return None  # as the response
        value = jsonable(self.take(name, "answer"))
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False)

    def like(self, names: Iterable[str], usual: Sequence[str], ends: re.Pattern) -> str | None:
        """The first column that holds what somebody said, and whose name ends like one that is
        looked for, or is nearly a usual one, and isn't an id's or a gold answer's."""
        for name in names:
            known, value = name.lower(), self.known.get(name)
            near = ends.search(known) or get_close_matches(known, usual, 1, _NEAR)
            plain = near and not known.endswith("id") and not like_gold(name)
            number = isinstance(value, int | float) and ends.fullmatch(known) and known[-1] != "s"
            if plain and not is_gap(value) and (number or holds_said(value)):
                return name
        return None

    def refuse_another_response(self, parsed: ParsedRow) -> None:
        """Refuse a row with a column that nothing has read and that is named like a response, where
        the model would write another in its place, or another was read."""
        said = [m["content"] for m in parsed.messages[-1:] if m["role"] == "assistant"]
        unread = [n for n in parsed.left if not is_said(self.known.get(n), said)]
        if not parsed.responses and not said:
            if name := self.like(unread, (*_RESPONSE, "answer"), _LIKE_RESPONSE):
                raise UserError(
                    f"{self.place}: no response, and the column {name!r} may be one",
                    f"say --response-column {name}; or, if the model is to write the response, "
                    f"{METADATA} {name} (for a gold answer: --answer-column {name})",
                )
        elif self.columns.response is None and (name := self.like(unread, (), _LIKE_RESPONSE)):
            read = self.roles.get("response")
            meant = f"say --response-column {read} or --response-column {name}"
            raise UserError(
                f"{self.place}: the response is read from {read or self.roles.get('messages')!r}, "
                f"and the column {name!r} may be one, too",
                f"{meant if read else 'leave out one of them'}, or {METADATA} {name} if it is none",
            )

    def refuse_near_names(self, left: Iterable[str]) -> None:
        """Refuse a column whose name is nearly one that would change the conversation, if what it
        holds could be that: metadata never reaches the model."""
        for name in left:
            if name not in self.known or any(name in names for names in _NAMES.values()):
                continue
            value, plain = from_json(self.known[name]), re.sub(r"[\s-]", "_", name.lower())
            for role, names in _NAMES.items():
                near = get_close_matches(plain, map(str.lower, names), 1, _NEAR)
                flag = hasattr(self.columns, role)  # else a list or an object is looked for
                fits = isinstance(value, list | dict)
                if flag:  # one word is an id or a setting, not what somebody says
                    fits = isinstance(value, str) and len(value.split()) > 1
                if near and fits and not self.used.intersection(names):
                    say = f"say --{role}-column {name}" if flag else f"call it {near[0]}"
                    raise UserError(
                        f"{self.place}: the column {name!r} may be {_WHAT[role][0]}, but isn't "
                        "called so",
                        f"{say}; or {METADATA} {name} if it is something else",
                    )

    def rest(self) -> tuple[list[str], dict]:
        """The columns with something that nothing has used, and all that as metadata."""
        left = {k: v for k, v in self.row.items() if k not in self.used}
        own = left.pop("metadata", None)
        if own is not None and not isinstance(own, dict):
            own = {"metadata": own}
        named = [str(k) for k, v in left.items() if not is_gap(v)]
        if left.keys() & (own or {}).keys():  # neither replaces the other
            own = {"metadata": own}
        return named, jsonable(left | (own or {}))


def _detect(cells: _Cells) -> str:
    named = cells.columns.messages
    listed = [n for n in ("turns", "prompt") if list_of(cells.known.get(n), str)]
    if named is not None or _messages_column(cells) is not None:
        return "turns" if named in listed else "messages"
    if cells.columns.query is not None:
        return "qa"
    if listed:
        return "turns"
    if any(name in cells.known for name in _QUERY):
        return "qa"
    query = cells.like(cells.known, _QUERY, _LIKE_QUERY) or "NAME"
    empty = [n for n in (*_MESSAGES, *_QUERY) if n in cells.row and n not in cells.known]
    if empty and query == "NAME":
        raise UserError(f"{cells.place}: nothing is in {' and '.join(map(repr, empty))}", CORRECT)
    response = cells.like(cells.known, _RESPONSE, _LIKE_RESPONSE) or "NAME"
    messages = next((n for n, v in cells.known.items() if has_roles(as_list(v))), "NAME")
    raise UserError(
        f"{cells.place}: columns not recognised (found: {cells.found})",
        f"name them: --query-column {query} --response-column {response}, or --messages-column "
        f"{messages}; --help has the others, and --format if the shape isn't plain",
    )


def _messages_column(cells: _Cells) -> str | None:
    """The column with a list of messages, which may be the whole dialogue or a prompt."""
    asked = [cells.columns.query] if cells.columns.query else [*_QUERY, "turns"]
    if not any(name in cells.known for name in _QUERY):
        asked.append("chosen")  # preference data without a prompt of their own
    found = [name for name in asked if holds_messages(cells.known.get(name))]
    return cells.name("messages", found if cells.columns.query else [*_MESSAGES, *found])


def _from_messages(cells: _Cells) -> ParsedRow:
    name = _messages_column(cells)
    if name is None:
        raise UserError(
            f"{cells.place}: no list of messages (found: {cells.found})",
            "name its column with --messages-column",
        )
    messages = cells.messages(name)
    cells.refuse_beside(("context", "passage", *_NAMES["history"]), "a list of messages")
    # A prompt is never cut: all of it comes before the response.
    return _dialogue(cells, messages, len(messages) if name in _QUERY else 1)


def _from_alternating(cells: _Cells) -> ParsedRow:
    texts = cells.texts((*_MESSAGES, "turns", "data"))
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return _dialogue(cells, messages, 1)


def _dialogue(cells: _Cells, messages: list[Message], asked: int) -> ParsedRow:
    """A list of messages, with the answer in it, or in a column of its own."""
    name = cells.response(_AFTER_MESSAGES)
    if not messages or messages[-1]["role"] != "assistant":
        answers = cells.answers(name)
    else:
        answers = [Answer([], cells.beside(messages))]
        said = cells.known.get(name, messages[-1]["content"])
        if name == cells.columns.response and said != messages[-1]["content"]:
            cells.refuse(str(name), "stands beside messages that end with a response")
    return _row(cells, messages, answers, cells.gold(cells.name("answer", ("answer",))), asked)


def _from_qa(cells: _Cells) -> ParsedRow:
    name = cells.name("query", _QUERY)
    if name is None:
        raise UserError(
            f"{cells.place}: no query (found: {cells.found})",
            "name its column with --query-column",
        )
    cells.refuse_another_query(name)
    query = cells.take(name, "query")
    if cells.columns.format == "auto" and list_of(from_json(query), str):
        raise UserError(
            f"{cells.place}: the column {name!r} is a list of texts, written as JSON",
            f"say whose texts: --messages-column {name} with --format turns (the user's alone) or "
            "alternating (user and assistant in turn); or --format qa if the query is this JSON",
        )
    passage = cells.text("context", [n for n in _NAMES["context"] if n != name])
    if passage is not None and not is_gap(query):  # Alpaca, Dolly, SQuAD: the text to work on
        query = f"{query}\n\n{passage}"
    response_name = cells.response(_RESPONSE)
    answer_name = cells.name("answer", ("answer",))
    # "question" with "answer" alone is a dialogue; "prompt" or "problem" with "answer" is a task
    # with its gold answer, which is no turn.
    unsure = answer_name is not None and cells.columns.answer is None and response_name is None
    if unsure and (name not in _QUERY or (name == "question" and not {*_RESPONSE} & {*cells.row})):
        said = from_json(cells.known[answer_name])
        if name != "question" or not (isinstance(said, str) or has_roles(said)):
            raise UserError(
                f"{cells.place}: the column 'answer' may be the response or the gold answer",
                "say --response-column answer or --answer-column answer",
            )
        response_name, answer_name = answer_name, None
    answers, gold = cells.answers(response_name), cells.gold(answer_name)
    cells.refuse_beside(_OPTIONS, "a query")
    text = answers[0].messages[-1]["content"] if len(answers) == 1 else None
    if gold is None and isinstance(text, str) and (split := split_gsm8k(text)):
        answers[0].messages[-1]["content"], gold = split
    asked = [*cells.history(), {"role": "user", "content": query}]
    return _row(cells, asked, answers, gold, len(asked))


def _from_turns(cells: _Cells) -> ParsedRow:
    turns = cells.texts(("turns", "prompt"))
    cells.refuse_beside(("context", "passage", *_NAMES["history"]), "a list of user turns")
    answers = cells.answers(cells.response(_FIRST_ANSWER))
    gold = cells.gold(cells.name("answer", ("answer",)))
    graded = cells.row.get("reference")
    if gold is None and isinstance(graded, list):  # MT-bench: the right answer to each turn
        gold = (cells.take("reference", "answer") or [None])[0] or None
    parsed = _answered(cells, [{"role": "user", "content": turns[0]}], answers)
    followup = cells.name("followup")
    parsed.answer = gold
    parsed.real_follow_up = cells.take(followup, "followup") if followup else (*turns, None)[1]
    return parsed


def _row(
    cells: _Cells, messages: list[Message], answers: list[Answer], gold: str | None, asked: int
) -> ParsedRow:
    """A dialogue with the answers that columns hold, cut after ``asked`` messages or later."""
    parsed = _answered(cells, messages, answers)
    parsed.answer = gold
    followup = "real_follow_up" if cells.own else cells.followup()
    if followup is not None:  # the row itself says what follows, so its messages are the context
        parsed.real_follow_up = cells.take(followup, "followup")
        return parsed
    whole = parsed.messages
    parsed.messages, parsed.real_follow_up = cut_dialogue(whole, cells.columns.cut, asked)
    parsed.cut = len(whole) > len(parsed.messages) + 1
    if len(parsed.messages) < len(whole):
        parsed.finish_reason = None  # of the last answer, which is left out
    return parsed


def _answered(cells: _Cells, asked: list[Message], answers: list[Answer]) -> ParsedRow:
    """What was asked, with the answer or the answers that columns hold."""
    if len(answers) > 1:
        return ParsedRow(asked, responses=answers)
    only = answers[0] if answers else Answer([])
    return ParsedRow(_joined(asked, only.messages, cells.place), finish_reason=only.finish_reason)


def _joined(asked: list[Message], said: list[Message], place: str) -> list[Message]:
    """The query and what followed it, which in preference data begins with the query again."""
    if said and said[0]["role"] == "system":
        asked = [said[0], *asked]
    if said and said[0]["role"] != "assistant":
        repeated = said[: len(asked)]
        if [m["content"] for m in repeated] != [m["content"] for m in asked]:
            raise UserError(
                f"{place}: the response begins with other messages than the query",
                "write one list of messages, or a response without the query",
            )
        said = said[len(asked) :]
    return [*asked, *said]
