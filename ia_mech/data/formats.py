"""From one data row, in any of the usual shapes, to the parts of a conversation.

Pure functions of a row (a dict as ``json.loads`` or Arrow gives it): no files and no network.
``place`` says where the row stands ("file.jsonl line 17") and opens every error.

Shapes:
    messages   a list of ``{"role", "content"}``; also this project's own JSONL
    sharegpt   a list of ``{"from", "value"}``
    qa         one column with the query, perhaps one with the response
    turns      a list of user turns as strings (MT-bench): the query, then what the user said next

In any of them ``responses`` may hold a list of texts in place of the response: a conversation each.
"""

import json
import math
import re
from dataclasses import dataclass, field
from datetime import date
from typing import Any, cast

from ia_mech.errors import UserError

FORMATS = ("auto", "messages", "sharegpt", "qa", "turns")
CUTS = ("first", "last")
DEPTH = 100  # levels of a row's other values; what copies them later recurses, too
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}

_ID = ("id", "question_id", "prompt_id", "key", "unique_id", "conversation_hash", "conversation_id")
_MESSAGES = ("messages", "conversation", "conversations")
_QUERY = ("question", "prompt", "query", "instruction", "problem")
_RESPONSE = ("response", "output", "solution", "completion")
_FIRST_ANSWER = ("reference_first_answer", "response")
_FOLLOWUP = ("reference", "follow_up", "followup")

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_GSM8K_END = re.compile(r"\s*####\s*(-?[\d,.]*\d)\s*$")

Message = dict[str, Any]


@dataclass(frozen=True)
class ColumnMap:
    """Which columns of the data hold what; None leaves a column to be recognised by its name.

    ``cut`` decides where a dialogue of several exchanges is cut: ``first`` keeps the first
    user-assistant exchange and takes the next user turn as the reference; ``last`` cuts before the
    last user turn, so that the earlier turns stay in the context.

    Raises:
        UserError: ``format`` or ``cut`` is not one of :data:`FORMATS`, :data:`CUTS`.
    """

    format: str = "auto"
    id: str | None = None
    source: str | None = None
    messages: str | None = None
    query: str | None = None
    response: str | None = None
    followup: str | None = None
    answer: str | None = None
    cut: str = "first"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"no format {self.format!r}", f"use one of {', '.join(FORMATS)}")
        if self.cut not in CUTS:
            raise UserError(f"no cut {self.cut!r}", f"use one of {', '.join(CUTS)}")

    @property
    def names_content(self) -> bool:
        """Whether the shape or a column with content was named: then nothing is guessed."""
        columns = (self.messages, self.query, self.response, self.followup, self.answer)
        return self.format != "auto" or any(columns)


@dataclass
class ParsedRow:
    """What a row says, before anything is checked; None where it says nothing.

    ``messages`` ends with the query, or with the response where the row has one.
    """

    messages: list[Message]
    reference: str | None = None
    answer: str | None = None
    id: str | None = None
    source_id: str | None = None
    dataset: str | None = None
    metadata: dict = field(default_factory=dict)
    perturbation: str | None = None
    header: str | None = None
    responses: list[str] | None = None  # several, each of which answers the query
    response_index: int | None = None


def parse(row: dict, columns: ColumnMap, place: str) -> ParsedRow:
    """Read one row in the shape ``columns`` names, or in the one its columns show.

    Raises:
        UserError: no shape fits, a named column is missing, or a column holds the wrong kind.
    """
    shape = _detect(row, columns, place) if columns.format == "auto" else columns.format
    reader = {"qa": _from_qa, "turns": _from_turns}.get(shape, _from_messages)
    cells = _Cells(row, columns, place)
    parsed = reader(cells)
    parsed.id = cells.identifier("id", _ID)
    parsed.source_id = cells.identifier("source", ("source_id",))
    if isinstance(row.get("dataset"), str):
        parsed.dataset = cells.take("dataset")
    if isinstance(row.get("perturbation"), str):  # as experiments write them
        parsed.perturbation = cells.take("perturbation")
        parsed.header = cells.take("header" if "header" in row else None)
    parsed.responses = cells.responses()
    if isinstance(row.get("response_index"), int):  # as our own JSONL has it
        parsed.response_index = cells.take("response_index")
    parsed.metadata = cells.rest()
    return parsed


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


def cut_dialogue(messages: list[Message], cut: str) -> tuple[list[Message], str | None]:
    """The context and the user turn that followed it (None if none did); see :class:`ColumnMap`."""
    if cut == "last":
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if len(users) < 2:
            return messages, None
        return messages[: users[-1]], messages[users[-1]]["content"]
    for i, message in enumerate(messages[1:], start=1):
        if message["role"] == "assistant" and messages[i - 1]["role"] == "user":
            after = messages[i + 1 : i + 2]
            follows = after and after[0]["role"] == "user"
            return messages[: i + 1], after[0]["content"] if follows else None
    return messages, None


def jsonable(value, depth: int = 0):
    """A copy that JSON can hold: nulls inside dicts dropped, dates as ISO text.

    Nulls go because columnar files pad every record with the keys of all others (IFBench: 40 keys,
    of which a row uses one or two). NaN, with which such files mark a gap, is a null; JSON has no
    number for it, nor for the infinities.

    Raises:
        RecursionError: nested deeper than :data:`DEPTH`; ``depth`` is that of ``value``.
    """
    if depth > DEPTH:
        raise RecursionError(f"nested deeper than {DEPTH} levels")
    if isinstance(value, dict):
        return {str(k): jsonable(v, depth + 1) for k, v in value.items() if not _is_null(v)}
    if isinstance(value, list | tuple):
        return [jsonable(v, depth + 1) for v in value]
    if isinstance(value, date):  # datetimes too
        return value.isoformat()
    if _is_null(value):
        return None
    return value if isinstance(value, str | int | float | bool) else str(value)


def _is_null(value) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


class _Cells:
    """One row, with the columns already used; what is left over becomes metadata."""

    def __init__(self, row: dict, columns: ColumnMap, place: str) -> None:
        self.row, self.columns, self.place = row, columns, place
        self.used: set[str] = set()

    def name(self, role: str, usual: tuple[str, ...] = ()) -> str | None:
        """The column for ``role``: the one the user named, else the first usual one present."""
        named = getattr(self.columns, role)
        if named is not None and named not in self.row:
            raise UserError(
                f"{self.place}: no column {named!r} (found: {_column_names(self.row)})",
                f"correct --{role}-column",
            )
        return named or next((name for name in usual if name in self.row), None)

    def take(self, name: str | None):
        """The cell of a column (None for no column), which is then used up."""
        if name is None:
            return None
        self.used.add(name)
        return self.row[name]

    def followup(self) -> str | None:
        """The column of the user's real next turn. An unnamed one counts only if it holds text."""
        texts = tuple(n for n in _FOLLOWUP if isinstance(self.row.get(n), str | None))
        return self.name("followup", texts)

    def identifier(self, role: str, usual: tuple[str, ...]) -> str | None:
        value = self.take(self.name(role, usual))
        blank = _is_null(value) or value == ""
        if isinstance(value, list | dict) or (blank and getattr(self.columns, role) is not None):
            raise UserError(
                f"{self.place}: the {role} is {_type_name(value)}, not text or a number",
                f"name another column with --{role}-column",
            )
        return None if blank else str(value)

    def responses(self) -> list[str] | None:
        """The texts of the column ``responses``; a list of other things is of no such column."""
        value = self.row.get("responses")
        if value is None or _list_of(value, dict):
            return None
        if not _list_of(value, str):
            raise UserError(
                f"{self.place}: the responses are not a list of texts ({_type_name(value)})",
                'write "responses": ["…", "…"], or name the column otherwise',
            )
        return self.take("responses")

    def gold(self, name: str | None) -> str | None:
        value = jsonable(self.take(name))
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False)

    def rest(self) -> dict:
        left = {k: v for k, v in self.row.items() if k not in self.used}
        own = left.pop("metadata", None)
        if own is not None and not isinstance(own, dict):
            own = {"metadata": own}
        return jsonable(left | (own or {}))


def _detect(row: dict, columns: ColumnMap, place: str) -> str:
    if columns.messages is not None:
        return "turns" if _list_of(row.get(columns.messages), str) else "messages"
    if columns.query is not None:
        return "qa"
    if any(name in row for name in _MESSAGES) or _list_of(row.get("prompt"), dict):
        return "messages"
    if "turns" in row or _list_of(row.get("prompt"), str):
        return "turns"
    if any(name in row for name in _QUERY):
        return "qa"
    raise UserError(
        f"{place}: columns not recognised (found: {_column_names(row)})",
        "name them: --messages-column, or --query-column with --response-column, "
        "--followup-column, --answer-column, and --format if the shape isn't plain",
    )


def _from_messages(cells: _Cells) -> ParsedRow:
    name = cells.name("messages", (*_MESSAGES, "prompt"))
    listed = cells.take(name)
    if not isinstance(listed, list):
        raise UserError(
            f"{cells.place}: no list of messages (column {name!r} is {_type_name(listed)})",
            f"name its column with --messages-column (found: {_column_names(cells.row)})",
        )
    messages = [_message(message, cells.place) for message in listed]
    if messages and messages[-1]["role"] == "user":
        response = cells.take(cells.name("response", ("response",)))
        if response is not None:
            messages.append({"role": "assistant", "content": response})
    answer = cells.gold(cells.name("answer", ("answer",)))
    followup = cells.followup()
    if followup is not None:  # the row itself says what follows, so its messages are the context
        return ParsedRow(messages, cells.take(followup), answer)
    if name == "prompt" and cells.columns.cut == "first":  # a prompt is a context as it stands
        return ParsedRow(messages, None, answer)
    return ParsedRow(*cut_dialogue(messages, cells.columns.cut), answer)


def _message(message, place: str) -> Message:
    """Role and content of one message; roles unknown here are left for the check of the whole."""
    if not isinstance(message, dict) or not ({"role", "from"} & message.keys()):
        raise UserError(
            f"{place}: a message is {_type_name(message)} without a role",
            'write messages as {"role": …, "content": …} or {"from": …, "value": …}',
        )
    role, content = ("role", "content") if "role" in message else ("from", "value")
    name = str(message[role])
    # Content of another type than text is refused later, by conversations.validate.
    return {"role": ROLES.get(name, name), "content": cast(str, message.get(content))}


def _from_qa(cells: _Cells) -> ParsedRow:
    query_name = cells.name("query", _QUERY)
    if query_name is None:
        raise UserError(
            f"{cells.place}: no query (found: {_column_names(cells.row)})",
            "name its column with --query-column",
        )
    query = cells.take(query_name)
    if query_name == "instruction" and cells.row.get("input"):  # Alpaca: the text to work on
        query = f"{query}\n\n{cells.take('input')}"
    response_name = cells.name("response", _RESPONSE)
    answer_name = cells.name("answer", ("answer",))
    # "question" with "answer" alone is a dialogue; "prompt" or "problem" with "answer" is a task
    # with its gold answer, which is no turn.
    is_dialogue = query_name == "question" and cells.columns.answer is None
    if response_name is None and is_dialogue:
        response_name, answer_name = answer_name, None
    response = cells.take(response_name)
    answer = cells.gold(answer_name)
    if isinstance(response, str) and answer is None and (split := split_gsm8k(response)):
        response, answer = split
    messages = [{"role": "user", "content": query}]
    if response is not None:
        messages.append({"role": "assistant", "content": response})
    return ParsedRow(messages, cells.take(cells.followup()), answer)


def _from_turns(cells: _Cells) -> ParsedRow:
    name = cells.name("messages", ("turns", "prompt"))
    turns = cells.take(name)
    if not _list_of(turns, str):
        raise UserError(
            f"{cells.place}: no list of user turns (column {name!r} is {_type_name(turns)})",
            f"name its column with --messages-column (found: {_column_names(cells.row)})",
        )
    messages = [{"role": "user", "content": turns[0]}]
    response = cells.take(cells.name("response", _FIRST_ANSWER))
    if response is not None:
        messages.append({"role": "assistant", "content": response})
    answer = cells.gold(cells.name("answer", ("answer",)))
    graded = cells.row.get("reference")
    if answer is None and isinstance(graded, list):  # MT-bench: the right answer to each turn
        answer = (cells.take("reference") or [None])[0] or None
    followup = cells.name("followup")
    return ParsedRow(messages, cells.take(followup) if followup else (*turns, None)[1], answer)


def _list_of(value, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def _column_names(row: dict) -> str:
    return ", ".join(map(str, row)) or "none"


def _type_name(value) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text"}
    return names.get(type(value).__name__, "empty" if value == "" else type(value).__name__)
