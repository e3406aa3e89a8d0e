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
refused by name, or become metadata. A name that is nearly one of these is asked about. The case of
a column's name doesn't matter, nor do its blanks, hyphens and underscores: ``Follow Up`` is
``follow_up``.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import chain, pairwise
from typing import Any, NoReturn

from ia_mech.cli import did_you_mean, shell_word
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
from ia_mech.untrusted import parse_json

CORRECT = "correct the row"
FORMATS = ("auto", "messages", "sharegpt", "qa", "turns", "alternating")
CUTS = ("first", "last")
_OWN = ("id", "source_id", "dataset", "messages", "real_follow_up")  # of Conversation.to_dict

# What a column may be, the first name that is there counting; fields of ColumnMap where it has one.
MISTYPED = 0.85  # how alike a column's name is to a known one, by difflib
_NAMES = {
    role: tuple(names.split())
    for role, names in {
        "id": "id question_id prompt_id key unique_id conversation_hash conversation_id",
        "source": "source_id",
        "messages": "messages conversation conversations",
        "query": "question prompt query instruction problem input",
        "response": "response output solution completion chosen choices outputs responses",
        "answer": "answer",
        "system": "system system_prompt system_message system_instruction sys developer",
        "context": "context passage input passage_text article paragraph evidence story",
        "followup": "real_follow_up follow_up",
        "history": "history chat_history past conversation_history dialogue_history"
        " previous_messages",
        "tools": "tools functions",
        "options": "options choices endings",  # of a multiple-choice question
    }.items()
}
# Those that would change the conversation: a column of nearly such a name is asked about.
_CHANGING = {
    "system": "the system message",
    "context": "a passage that the query is about",
    "followup": "the real follow-up",
    "history": "the exchanges before the query",
    "tools": "the schemas of tools",
}
_LISTED = ("choices", "outputs", "responses")  # hold answers, or other things
_TEXTS = {  # columns of the shapes that are lists of texts
    "turns": ("turns", "prompt"),
    "alternating": (*_NAMES["messages"], "turns", "data"),
}
_FIRST_ANSWER = ("reference_first_answer", "response", "responses")  # to a list of user turns
_BESIDE = (*THOUGHTS, *UNREAD, "reference", "finish_reason")


def bare(name: str) -> str:
    """A column's name without what doesn't matter: case, blanks, hyphens and underscores."""
    return re.sub(r"[\s_-]+", "", name).lower()


# Every name that is looked for; of those that are alike the first one counts.
_USUAL = dict.fromkeys(chain(*_NAMES.values(), *_TEXTS.values(), _FIRST_ANSWER, _BESIDE, _OWN))
_BY_BARE = {bare(name): name for name in reversed(_USUAL)}

# How names end that suggest a query or a response; words that suggest a gold answer.
_LIKE_QUERY = re.compile(r"(question|query|prompt|instruction|problem|input)$")
_LIKE_RESPONSE = re.compile(
    r"(response|answer|output|completion|generation|prediction|candidate|rollout|reply|replie"
    r"|assistant|hypothesis|sampled|samples|resp|pred)s?(_text)?$"
    r"|(^|_)(generated|predicted|decoded)(_|$)"
)
_LIKE_GOLD = ("gold", "correct", "expected", "reference", "target", "ideal", "truth")
_LIKE_FOLLOW_UP = re.compile(
    r"followup|next|(second|2nd)(turn|user|query|question|prompt)|(turn|user|query|question|prompt)2"
)
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


def id_of(row: dict, columns: ColumnMap) -> str | int | None:
    """What a row has for an id, whether or not the row can be used."""
    own = {bare(name): value for name, value in row.items() if isinstance(value, str | int)}
    names = [columns.id] if columns.id else _NAMES["id"]
    return next((own[bare(name)] for name in names if own.get(bare(name)) not in (None, "")), None)


def parse(row: dict, columns: ColumnMap, place: str) -> "Row":
    """Read one row in the shape ``columns`` names, or in the one its columns show.

    Raises:
        UserError: no shape fits, a named column is missing, a column holds the wrong kind, or one
            that would change the conversation can't be read.
    """
    cells = Row(row, columns, place)
    refuse_unread(cells.known, [name for name in UNREAD if name != columns.context], place)
    shape = _shape(cells) if columns.format == "auto" else columns.format
    cells.said = _read(cells, shape)
    shared: dict[str, Any] = {"id": cells.identifier("id")}
    source = cells.identifier("source")
    if isinstance(cells.known.get("dataset"), str):
        shared["dataset"] = cells.take("dataset") or None
    if cells.own:
        names = ("perturbation", "header", "response_index")
        shared |= {name: cells.take(name) for name in names if name in cells.known}
    cells.left, shared["metadata"] = cells.rest()
    for one in cells.said:
        one |= shared
        one["source_id"] = source or one["source_id"]
    if cells.own:
        cells.roles = {}
    else:
        cells.ask_about_left()
        cells.left = [cells.spelt.get(name, name) for name in cells.left]
        _refuse_empty([message for one in cells.said for message in one["messages"]], place)
    return cells


def _read(cells: "Row", shape: str) -> list[dict[str, Any]]:
    """What is said in a row of this shape: fields of a conversation for each response."""
    turns: list[str] = []
    asked = 1  # messages that come before the response in any case
    if shape == "qa":
        messages = _query(cells)
        asked = len(messages)
    else:
        texts = _TEXTS.get(shape, ())
        name = cells.name("messages", texts) if texts else _messages_column(cells)
        listed = cells.listed(cells.needed(name, "messages"), "messages", bool(texts))
        if shape == "turns":
            turns, listed = listed, listed[:1]
        if texts:
            who = ("user", "assistant")
            listed = [{"role": who[i % 2], "content": text} for i, text in enumerate(listed)]
        messages = read_messages(listed, cells.place, cells.columns.metadata)
        if name in _NAMES["query"] and not texts:
            asked = len(messages)  # a prompt is never cut
        what = "a list of user turns" if turns else "a list of messages"
        cells.refuse_beside(("context", "passage", *_NAMES["history"]), what)
    answers, gold = _answers(cells, shape, messages)
    told, follow_up = cells.follow_up(turns)
    found = []
    for answer in answers or [Answer([])]:
        before, after = messages, answer.messages
        if len(answers) == 1:
            before, after = _joined(messages, after, cells.place)
        whole = said = [dict(message) for message in (*before, *after)]
        ended = answer.finish_reason
        if not told and len(answers) < 2:
            said, follow_up = cut_dialogue(whole, cells.columns.cut, asked)
            cells.cut = any(one["role"] == "user" for one in whole[len(said) + 1 :])
            ended = ended if len(said) == len(whole) else None  # it is of the last answer
        cells.add_system(said)
        cells.add_tools(said)
        asked_for = said[: len(said) - len(after)] if len(answers) > 1 else said
        if isinstance(follow_up, str):
            follow_up = follow_up.strip() or None
        fields = {"messages": tuple(said), "source_id": source_of(asked_for), "answer": gold}
        found.append({**fields, "real_follow_up": follow_up, "finish_reason": ended})
    return found


def _query(cells: "Row") -> list[Message]:
    """The query that a column has, with the passage and the history of others."""
    name = cells.needed(cells.name("query", _NAMES["query"]), "query")
    query = cells.take(name, "query")
    names = [n for n in _NAMES["query"][:-1] if not is_gap(cells.known.get(n))]
    others = [n for n in names if cells.row[n] != query]
    if others and cells.columns.query is None:
        raise UserError(
            f"{cells.place}: the columns {name!r} and {others[0]!r} may both be the query",
            "name the one with --query-column",
        )
    if cells.columns.format == "auto" and list_of(from_json(query), str):
        raise UserError(
            f"{cells.place}: the column {name!r} is a list of texts, written as JSON",
            f"say whose texts: --messages-column {shell_word(name)} with --format turns (only the "
            "user's) or alternating (user and assistant in turn); or --format qa if the query is "
            "this JSON",
        )
    passage = cells.text("context", [n for n in _NAMES["context"] if n != name])
    if passage is not None and not is_gap(query):  # Alpaca, Dolly, SQuAD: the text to work on
        query = f"{query}\n\n{passage}"
    history = next((n for n in _NAMES["history"] if not is_gap(cells.known.get(n))), None)
    earlier = cells.listed(history, "history") if history else []
    where = f"{cells.place}: the column {history!r}"
    asked = read_messages(earlier, where, cells.columns.metadata)
    return [*asked, {"role": "user", "content": query}]


def _answers(cells: "Row", shape: str, messages: list[Message]) -> tuple[list[Answer], str | None]:
    """The responses to these messages, one in them too, and the gold answer."""
    names = _FIRST_ANSWER if shape == "turns" else _NAMES["response"]
    # Beside messages "solution" is the gold answer, for graders.
    usual = [n for n in names if (shape == "qa" or n != "solution") and cells.may_answer(n)]
    name, gold_name = cells.name("response", usual), cells.name("answer", _NAMES["answer"])
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]["content"]
        if name == cells.columns.response and cells.known.get(name, last) != last:
            cells.refuse(str(name), "stands beside messages that end with a response")
        return [Answer([], cells.beside(messages))], cells.gold(gold_name)
    unsure = shape == "qa" and gold_name and not cells.columns.answer and name is None
    query = cells.name("query", _NAMES["query"])
    # "question" with "answer" alone is a dialogue; "prompt" or "problem" with "answer" is a task
    # with its gold answer, which is no turn.
    plain = query == "question" and not {*_NAMES["response"]} & {*cells.row}
    if unsure and (query not in _NAMES["query"] or plain):
        said = from_json(cells.known[gold_name])
        if not plain or not (isinstance(said, str) or has_roles(said)):
            raise UserError(
                f"{cells.place}: the column 'answer' may be the response or the gold answer",
                "say --response-column answer or --answer-column answer",
            )
        name, gold_name = gold_name, None
    answers, gold = cells.answers(name), cells.gold(gold_name)
    if shape == "qa":
        cells.refuse_beside(_NAMES["options"], "a query")
        text = answers[0].messages[-1]["content"] if len(answers) == 1 else None
        if gold is None and isinstance(text, str) and (split := split_gsm8k(text)):
            answers[0].messages[-1]["content"], gold = split
    graded = cells.row.get("reference")
    if shape == "turns" and gold is None and isinstance(graded, list):  # MT-bench's, to each turn
        gold = (cells.take("reference", "answer") or [None])[0] or None
    return answers, gold


def source_of(messages: Sequence[Message]) -> str:
    """The source of a conversation whose row names none: a hash of all before its response.

    So rows of one query are responses to it wherever they stand, and rows that differ in a system
    message, an earlier turn or a passage are other sources.
    """
    asked = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    text = json.dumps(asked, sort_keys=True, default=str)  # what isn't JSON is refused later
    return f"q{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _refuse_empty(messages: list[Message], place: str) -> None:
    """Refuse an assistant's message that says, thinks and calls nothing."""
    for message in messages:
        content = message["content"]
        empty = isinstance(content, str) and not content.strip()
        if message["role"] == "assistant" and empty and not {*message} & {*PARTS}:
            raise UserError(
                f"{place}: a message of the assistant is empty",
                "leave it out if it is the last",
            )


def like_gold(name: str) -> bool:
    """Whether a column is named as gold answers are."""
    return name != "correct" and any(word in name.lower() for word in _LIKE_GOLD)


def like_follow_up(name: str) -> bool:
    """Whether a column is named as what the user says next may be."""
    return bool(_LIKE_FOLLOW_UP.search(bare(name)))


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


class Row:
    """One row that is read.

    Attributes:
        known: the columns that can be part of the conversation: neither null nor named as metadata.
        used: the columns already read; what is left over becomes metadata.
        spelt: the usual names of columns → how the user spells them, where that differs.
        said: fields of :class:`ia_mech.data.conversations.Conversation`, once for each response.
        left: columns with something that became metadata.
        roles: fields of :class:`ColumnMap` → columns read so.
        cut: whether it has more user turns after the real follow-up.
        unpacked: whether its response was a text with messages.
    """

    def __init__(self, row: dict, columns: ColumnMap, place: str) -> None:
        own = {bare(name): name for name in row}
        ignored = {name if name in row else own.get(bare(name), name) for name in columns.metadata}
        self.spelt = spelt = _spellings(row, columns, ignored, place)
        usual = {own: name for name, own in spelt.items()}
        self.row = row = {usual.get(k, k): v for k, v in row.items() if k not in spelt}
        named = {k: v if k == "metadata" else usual.get(v, v) for k, v in asdict(columns).items()}
        self.columns, self.place = ColumnMap(**named), place
        self.known = {k: v for k, v in row.items() if not is_null(v) and k not in ignored}
        self.used: set[str] = set()
        self.said: list[dict[str, Any]] = []
        self.left: list[str] = []
        self.roles: dict[str, str] = {}
        self.cut = self.unpacked = False

    def name(self, role: str, usual: Iterable[str] = ()) -> str | None:
        """The column for ``role``: the one the user named, else the first usual one present."""
        named = getattr(self.columns, role)
        if named is not None and named not in self.row:
            raise UserError(
                f"{self.place}: no column {named!r} (found: {self.found})"
                f"{did_you_mean(named, self.row)}",
                f"correct --{role}-column",
            )
        return named or next((name for name in usual if name in self.known), None)

    def needed(self, name: str | None, role: str) -> str:
        """The column that a shape can't do without."""
        if name is None:
            remedy = f"name the column with --{role}-column"
            raise UserError(f"{self.place}: no {role} (found: {self.found})", remedy)
        return name

    @property
    def own(self) -> bool:
        """Whether the row is a conversation as this project writes it."""
        return all(name in self.row for name in _OWN)

    @property
    def found(self) -> str:
        """The names of the columns, for an error."""
        spelt = ((self.spelt.get(k, k), v) for k, v in self.row.items())
        return ", ".join(f"{k} (empty)" if is_gap(v) else str(k) for k, v in spelt) or "none"

    def take(self, name: str | None, role: str = "") -> Any:
        """The cell of a column (None for no column, or a null), which is then used up; ``role``
        is the field of :class:`ColumnMap` that it is read as."""
        if name is None:
            return None
        self.used.add(name)
        if role and not is_gap(self.row[name]):
            self.roles[role] = self.spelt.get(name, name)
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

    def refuse(self, name: str, problem: str, remedy: str = NOT_PART) -> NoReturn:
        """Refuse a column, by default one that would change the conversation."""
        raise UserError(f"{self.place}: the column {name!r} {problem}", remedy)

    def refuse_beside(self, names: Iterable[str], what: str) -> None:
        """Refuse columns that would change a conversation whose ``what`` is there already."""
        for name in (*names, self.columns.context):
            if name not in self.used and not is_gap(self.known.get(name)):
                self.refuse(str(name), f"stands beside {what}")

    def listed(self, name: str, role: str, texts: bool = False) -> list:
        """The list in a column, or in its text: of texts, or of something else."""
        listed = as_list(self.take(name, role))
        if isinstance(listed, str) and listed.lstrip().startswith("["):
            where = f"{self.place}: the column {name!r}"
            parse_json(listed, where, "write the list as JSON, with double quotes and commas")
        if not isinstance(listed, list) or list_of(listed, str) != texts:
            kind = "a list of texts" if list_of(listed, str) else json_type(listed)
            other = "not a list of texts" if texts else "not a list of messages"
            remedy = (
                f"name another with --{role}-column (found: {self.found}), or say whose texts a "
                "list has: --format turns (the user's), or alternating"
            )
            self.refuse(name, f"is {kind}, {other}", NOT_PART if role == "history" else remedy)
        return listed

    def may_answer(self, name: str) -> bool:
        """Whether a column holds answers, if its name doesn't say so: texts in ``choices`` are the
        options of a multiple-choice question."""
        value = from_json(self.known.get(name))
        texts = list_of(value, str) and name != "choices"
        return name not in _LISTED or texts or holds_answers(value)

    def answers(self, name: str | None) -> list[Answer]:
        """What the assistant said, by the column of the response and those beside it."""
        said = self.take(name, "response")
        if name is None or is_gap(said):
            return []
        said = as_list(said) if name == "chosen" else said  # may be a transcript
        said = from_json(said) if name == "responses" else said
        several = list_of(said, str) or (name == "responses" and isinstance(said, list))
        where, ignored = f"{self.place}: the column {name!r}", self.columns.metadata
        each = said if several else [said]
        answers = [answer for one in each for answer in read_answers(one, where, ignored)]
        if len(answers) == 1:
            last = answers[0].messages[-1]
            self.unpacked = isinstance(said, str) and last["content"] != said
            reason = self.beside([last])
            answers = [Answer(answers[0].messages, answers[0].finish_reason or reason)]
        return answers

    def beside(self, messages: list[Message]) -> str | None:
        """Put the thought that a column beside the messages holds into the last message, if that
        is the assistant's. Returns how this message ended, if a column says it."""
        if messages[-1]["role"] != "assistant":
            return None
        told = [n for n in THOUGHTS if isinstance(self.known.get(n), str)]
        texts = [n for n in told if not _WORD.fullmatch(self.known[n])]  # such as "on", a setting
        if texts and "reasoning_content" not in messages[-1]:
            messages[-1]["reasoning_content"] = self.take(texts[0])
        ended = isinstance(self.known.get("finish_reason"), str)
        return self.take("finish_reason") if ended else None

    def follow_up(self, turns: Sequence[str]) -> tuple[bool, Any]:
        """Whether the row itself says what the user said next, so that its messages are the
        context, and what that is. A column that nobody named counts only if it holds text."""
        usual = [n for n in _NAMES["followup"] if isinstance(self.known.get(n), str)]
        own = self.own and not turns
        name = _OWN[-1] if own else self.name("followup", () if turns else usual)
        if name is None:
            return bool(turns), (*turns[1:], None)[0]
        return True, self.take(name, "followup")

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

    def identifier(self, role: str) -> str | None:
        value = self.take(self.name(role, _NAMES[role]), role)
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
        text = value is None or isinstance(value, str)
        return value if text else json.dumps(value, ensure_ascii=False)

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

    def ask_about_left(self) -> None:
        """Refuse a column that nothing has read and that may be a part of the conversation, by its
        name and by what it holds: metadata never reaches the model.

        It may be the response, where the model would write another in its place, or another one was
        read; or its name is nearly one that would change the conversation.
        """
        last = [one["messages"][-1] for one in self.said if one["messages"]]
        texts = [m["content"] for m in last if m["role"] == "assistant"]
        unread = [n for n in self.left if not is_said(self.known.get(n), texts)]
        usual = () if texts else (*_NAMES["response"], "answer")
        name = self.like(unread, usual, _LIKE_RESPONSE)
        if name and not (texts and self.columns.response):
            read, also = self.roles.get("response"), f"the column {name!r} may be one"
            problem, say = f"no response, and {also}", f"say --response-column {shell_word(name)}"
            if texts:
                there = read or self.roles.get("messages")
                problem = f"the response is read from {there!r}, and {also}, too"
                say = (
                    f"{say} or --response-column {shell_word(read)}"
                    if read
                    else "leave out one of them"
                )
            remedy = (
                f"{say}; or {METADATA} {name} if it is none (for a gold answer: --answer-column)"
            )
            raise UserError(f"{self.place}: {problem}", remedy)
        changing = {name: role for role in _CHANGING for name in _NAMES[role]}
        for name in self.left:
            value, plain = from_json(self.known.get(name)), re.sub(r"[\s-]", "_", name.lower())
            for near in get_close_matches(plain, [*changing], len(changing), _NEAR):
                role = changing[near]
                flag = hasattr(self.columns, role)  # else a list or an object is looked for
                fits = isinstance(value, list | dict)
                if flag:  # one word is an id or a setting, not what somebody says
                    fits = isinstance(value, str) and len(value.split()) > 1
                if fits and name not in changing and not self.used.intersection(_NAMES[role]):
                    say = f"say --{role}-column {shell_word(name)}" if flag else f"call it {near}"
                    remedy = f"{say}; or {METADATA} {name} if it is something else"
                    self.refuse(name, f"may be {_CHANGING[role]}, but isn't called so", remedy)

    def rest(self) -> tuple[list[str], dict]:
        """The columns with something that nothing has used, and all that as metadata."""
        left = {k: v for k, v in self.row.items() if k not in self.used}
        own = left.pop("metadata", None)
        if own is not None and not isinstance(own, dict):
            own = {"metadata": own}
        named = [str(k) for k, v in left.items() if not is_gap(v)]
        left = {self.spelt.get(k, k): v for k, v in left.items()}
        if left.keys() & (own or {}).keys():  # neither replaces the other
            own = {"metadata": own}
        return named, jsonable(left | (own or {}))


def _spellings(
    row: dict, columns: ColumnMap, ignored: Collection[str], place: str
) -> dict[str, str]:
    """The usual names of columns that the user spells otherwise → the user's spelling.

    Raises:
        UserError: two columns that hold something have the same usual name, and none is named.
    """
    found: dict[str, list[str]] = {}
    for own, value in row.items():
        usual = own if own in _USUAL else _BY_BARE.get(bare(own))
        if usual is not None and not {own, usual} & {*ignored} and not is_gap(value):
            found.setdefault(usual, []).append(own)
    for usual, alike in [*found.items()]:
        if len(alike) > 1:
            del found[usual]
            if not {*alike} & {*asdict(columns).values()}:
                raise UserError(
                    f"{place}: the columns {' and '.join(map(repr, alike))} have the same name but "
                    "for case, blanks, hyphens and underscores",
                    "rename one, or say which is read, with a flag such as --query-column",
                )
    return {usual: own for usual, (own,) in found.items() if own != usual}


def _shape(cells: Row) -> str:
    """The shape that the columns show."""
    named = cells.columns.messages
    listed = [n for n in ("turns", "prompt") if list_of(cells.known.get(n), str)]
    if named is not None or _messages_column(cells) is not None:
        return "turns" if named in listed else "messages"
    if cells.columns.query is not None:
        return "qa"
    if listed:
        return "turns"
    if any(name in cells.known for name in _NAMES["query"]):
        return "qa"
    query = cells.like(cells.known, _NAMES["query"], _LIKE_QUERY)
    looked_for = (*_NAMES["messages"], *_NAMES["query"])
    empty = [n for n in looked_for if n in cells.row and n not in cells.known]
    if empty and query is None:
        raise UserError(f"{cells.place}: nothing is in {' and '.join(map(repr, empty))}", CORRECT)
    response = cells.like(cells.known, _NAMES["response"], _LIKE_RESPONSE)
    messages = next((n for n, v in cells.known.items() if has_roles(as_list(v))), None)
    slips = dict[str, str]()
    for name, value in cells.known.items():
        for kind in ("query", "response") if isinstance(value, str) else ("messages",):
            for close in get_close_matches(name, _NAMES[kind], 1, MISTYPED):
                if not name.startswith(close):  # conversation_a is no slip
                    slips |= {name: close}
    if not {*slips.values()} <= {*_NAMES["response"]}:
        meant = ", ".join(f"{close!r} by {name!r}" for name, close in slips.items())
        raise UserError(
            f"{cells.place}: columns not recognised (found: {cells.found}, did you mean {meant}?)",
            "correct the name, or name the columns: --query-column, --response-column, "
            "--messages-column",
        )
    if (query is None) != (response is None):  # the other is the one other column with sentences
        texts = [k for k, v in cells.known.items() if isinstance(v, str) and len(v.split()) > 1]
        others = [k for k in texts if k not in (query, response, *_USUAL)]
        if len(others) == 1:
            query, response = query or others[0], response or others[0]
    flags = {"query": query or "NAME", "response": response or "NAME"}
    if messages:
        flags = {"messages": messages}
    named = " ".join(f"--{role}-column {shell_word(name)}" for role, name in flags.items())
    raise UserError(
        f"{cells.place}: columns not recognised (found: {cells.found})",
        f"name them: {named}; --help has the others, and --format if the shape isn't plain",
    )


def _messages_column(cells: Row) -> str | None:
    """The column with a list of messages, which may be the whole dialogue or a prompt."""
    asked = [cells.columns.query] if cells.columns.query else [*_NAMES["query"], "turns"]
    if not any(name in cells.known for name in _NAMES["query"]):
        asked.append("chosen")  # preference data without a prompt of their own
    found = [name for name in asked if holds_messages(cells.known.get(name))]
    return cells.name("messages", found if cells.columns.query else [*_NAMES["messages"], *found])


def _joined(
    asked: list[Message], said: list[Message], place: str
) -> tuple[list[Message], list[Message]]:
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
    return asked, said
