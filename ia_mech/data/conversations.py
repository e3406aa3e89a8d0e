"""Conversations: what a run is about, and where they come from.

``open_conversations`` gives a lazy stream that can be iterated as often as wanted; only the ids
seen are kept, to find duplicates. The shapes of rows are in ``formats``, the public datasets in
``presets``; here are the conversation itself, its checks, and the readers of files.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ia_mech.cli import did_you_mean, expanded, one_line
from ia_mech.data import files, presets
from ia_mech.data.files import Rows
from ia_mech.data.formats import CORRECT, ColumnMap, bare, id_of, parse
from ia_mech.data.messages import Message
from ia_mech.data.values import DEPTH, from_json, json_type, list_of
from ia_mech.errors import UserError
from ia_mech.run.layout import UNPERTURBED
from ia_mech.untrusted import parse_json

BUILTIN = ("maths", "instructions", "open")
STUDY = "study"  # the queries of a study, without responses
SIBLINGS = "siblings"  # four responses to each query, written by the embedded model
_PARTS = {"builtin": BUILTIN} | {f"builtin:{name}": (name,) for name in (*BUILTIN, SIBLINGS, STUDY)}
UNPERTURBED_RESPONSE = "unperturbed_response"  # in the metadata of a perturbed conversation
USER_HEADER = "user"
HEADERS = (USER_HEADER, "alone", "assistant", "no_turn_end", "no_turn_separator")
ROLES = ("system", "user", "assistant", "tool")
# By their first letters. An assistant may call tools before it answers.
_ORDER = re.compile(r"s?(u(at+)*a)*u(at+)*a?")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
NAMED = 5  # rows that one error names
SKIP = "or leave such rows out (--skip-unusable)"
MOST_UNUSABLE = 1_000  # rows, after which no more are read


@dataclass(frozen=True)
class Conversation:
    """A query, with the turns before it and perhaps the response to it.

    Attributes:
        id: unique in its dataset.
        source_id: the original prompt, shared by every perturbation and response of it.
        messages: an optional system message, then user and assistant in turn; the last message is
            the response to the last user message, or what asks for it. ``content`` is text. An
            assistant's message may have its thought as ``reasoning_content`` (text), and
            ``tool_calls`` (a list of objects), which messages of the role ``tool`` answer (perhaps
            with ``name`` and ``tool_call_id``) before the assistant goes on. The first message may
            have ``tools``, the schemas of those that the assistant may call. An empty response is
            a turn without text.
        real_follow_up: what the user really said next, if the data has it.
        answer: the gold answer to the query.
        metadata: anything else the data says; JSON values only.
        perturbation: what was changed of the source's conversation; :data:`UNPERTURBED` if nothing.
        header: which header is opened after the response, one of :data:`HEADERS`; see
            :func:`ia_mech.chat.headers.context_and_real_follow_up`.
        response_index: which of several responses to the query this one is; None if there is one.
        finish_reason: how a response written elsewhere ended, such as ``stop`` or ``length``; None
            if the data doesn't say.
    """

    id: str
    source_id: str
    dataset: str
    messages: tuple[Message, ...]
    real_follow_up: str | None = None
    answer: str | None = None
    metadata: dict = field(default_factory=dict)
    perturbation: str = UNPERTURBED
    header: str = USER_HEADER
    response_index: int | None = None
    finish_reason: str | None = None

    @property
    def query(self) -> str:
        """The last user message."""
        return next(m["content"] for m in reversed(self.messages) if m["role"] == "user")

    @property
    def response(self) -> str | None:
        """The assistant's answer to the query; None if it has yet to be given."""
        last = self.messages[-1]
        return last["content"] if last["role"] == "assistant" else None

    @property
    def thought(self) -> str | None:
        """What the assistant thought before its response; None if it isn't known."""
        last = self.messages[-1]
        return last.get("reasoning_content") if last["role"] == "assistant" else None

    def with_response(self, text: str, thought: str | None = None) -> "Conversation":
        """The same conversation with this response, in place of the one it has, if any."""
        kept = self.messages if self.response is None else self.messages[:-1]
        said = {"role": "assistant", "content": text}
        if thought is not None:
            said["reasoning_content"] = thought
        return replace(self, messages=(*kept, said), finish_reason=None)

    def with_response_index(self, index: int) -> "Conversation":
        """The same query with another response, yet to be given: number ``index`` of several."""
        return replace(self, id=f"{self.id}/r{index}", response_index=index)

    @property
    def query_id(self) -> str:
        """What the ids of several responses to one query begin with."""
        return self.id.removesuffix(f"/r{self.response_index}")

    def to_dict(self) -> dict:
        """A JSON object that :func:`open_conversations` reads back unchanged."""
        row = asdict(self) | {"messages": [dict(m) for m in self.messages]}
        for name in ("perturbation", "header", "response_index", "finish_reason"):
            if row[name] == getattr(Conversation, name):  # most conversations say nothing of it
                del row[name]
        return row


def validate(conversation: Conversation, place: str) -> None:
    """Check what every later step takes for granted.

    Raises:
        UserError: unknown role, content that isn't text, an empty query, or turns out of order.
    """
    for number, message in enumerate(conversation.messages, start=1):
        following = next(iter(conversation.messages[number:]), None)
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise UserError(
                f"{place}: message {number} has the role {role!r}", f"use {', '.join(ROLES)}"
            )
        _check_text(content, f"{place}: message {number} ({role})")
        _check_text(
            message.get("reasoning_content", ""), f"{place}: the thought of message {number}"
        )
        if message.get("tool_calls") and (following is None or following["role"] != "tool"):
            raise UserError(
                f"{place}: message {number} calls a tool, and no result follows",
                "add it, and the answer after it",
            )
    for name in ("id", "source_id", "real_follow_up", "answer", "perturbation"):
        if (text := getattr(conversation, name)) is not None:
            _check_text(text, f"{place}: the {name.replace('_', ' ')}")
    for name in ("dataset", "perturbation"):  # they head tables, figures and files
        if not (text := getattr(conversation, name)).isprintable():
            raise UserError(
                f"{place}: the {name} {text!r} holds characters that can't be printed",
                "name it with plain text",
            )
    if conversation.header not in HEADERS:
        raise UserError(
            f"{place}: the header is {conversation.header!r}", f"use one of {', '.join(HEADERS)}"
        )
    roles = [message["role"] for message in conversation.messages]
    if "user" not in roles:
        raise UserError(f"{place}: no user message", CORRECT)
    if not _ORDER.fullmatch("".join(role[0] for role in roles)):
        raise UserError(
            f"{place}: user and assistant don't alternate, starting with user, after an optional "
            f"system message and with tools before an answer (roles: {', '.join(roles[:8])})",
            CORRECT,
        )
    if not conversation.query.strip():
        raise UserError(f"{place}: the query is empty", CORRECT)


def together(faults: Sequence[tuple[str, UserError]]) -> UserError:
    """One error that names the first of several rows with their faults, counts the others, and
    ends with what to do.

    Args:
        faults: of each row its place, and an error that begins with the place.
    """
    alike: dict[str, list[str]] = {}
    for place, error in faults[:NAMED]:
        alike.setdefault(error.problem.removeprefix(place), []).append(place)
    named = [f"{', '.join(places)}{fault}" for fault, places in alike.items()]
    if (more := len(faults) - NAMED) > 0:
        least = "at least " * (len(faults) >= MOST_UNUSABLE)
        named.append(f"and {least}{more:,} more row{'s' * (more > 1)}")
    remedies = dict.fromkeys(error.remedy for _, error in faults[:NAMED])
    return UserError("; ".join(named), "; ".join([*remedies, SKIP]))


def _check_text(content, what: str) -> None:
    if not isinstance(content, str):
        raise UserError(f"{what} is {json_type(content)}, not text", CORRECT)
    try:
        content.encode()
    except UnicodeEncodeError:  # JSON can spell one; no tokenizer or Parquet file takes it
        raise UserError(f"{what} has half a surrogate pair", "remove it from the text") from None


@dataclass
class ConversationSource:
    """A lazy stream of checked conversations; every iteration starts from the first.

    Attributes:
        name: of the dataset, short.
        description: what was opened, for the record of a run (JSON values).
        count: how many rows there are; None where only reading them would tell.

    What the last iteration has found so far:
        skipped: with ``skip_unusable``, place and reason of each row that was left out.
        faults: without, each row that can't be used, as :func:`together` takes them.
        places: where the row of each conversation stands, by the conversation's id.
        rest: whether it ended by ``limit``, before the last row.
        left: columns kept as metadata.
        roles: columns read, by fields of :class:`ia_mech.data.formats.ColumnMap`.
        cut: how many rows go on after the real follow-up, unread.
        unpacked: how many rows had a text with messages for a response.
    """

    name: str
    description: dict
    read: files.Reader
    count: Callable[[], int | None]
    columns: ColumnMap
    preset: presets.Preset | None
    limit: int | None
    skip_unusable: bool

    def __iter__(self) -> Iterator[Conversation]:
        yield from self.usable()
        if self.faults:
            raise together(self.faults)

    def usable(self) -> Iterator[Conversation]:
        """The conversations of all rows that can be used. The other rows are in :attr:`faults`,
        unless there is no other: one error names them then."""
        self.skipped: list[str] = []
        self.faults: list[tuple[str, UserError]] = []
        self.places: dict[str, str] = {}
        self.rest = False
        self.left: dict[str, None] = {}
        self.roles: dict[str, dict[str, None]] = {}
        self.cut = self.unpacked = used = 0  # rows
        names: set[str] = set()  # of columns and of fields of messages
        rows = self.read()
        for number, (place, row) in enumerate(rows, start=1):
            if number - len(self.skipped) - 1 == self.limit or len(self.faults) == MOST_UNUSABLE:
                self.rest = True
                break
            try:
                if isinstance(row, bytes):
                    row = parse_json(row, place, files.AS_JSON)
                if not isinstance(row, dict):
                    kind = type(row).__name__
                    raise UserError(f"{place} holds a {kind}, not an object", files.AS_JSON)
                if (own := id_of(row, self.columns)) is not None:
                    place += f" (id {one_line(str(own), 40)})"
                if not names.issuperset(self.columns.metadata):
                    names.update(_names(row))
                made = self._made(row, place, number)
            except UserError as error:
                if self.skip_unusable:
                    self.skipped.append(error.problem)
                else:
                    self.faults.append((place, error))
                continue
            self.places |= {conversation.id: place for conversation in made}
            used += 1
            yield from made
        if self.faults and not used:
            raise together(self.faults)
        for name in self.columns.metadata:
            if bare(name) not in map(bare, names):
                raise UserError(
                    f"no column {name!r} in the {used} rows of {self.name} that were read"
                    f"{did_you_mean(name, names)}",
                    "correct --metadata-columns (a word of its own for each name)",
                )
        if not used:
            why = f"no usable row ({self.skipped[0]})" if self.skipped else "no rows"
            raise UserError(f"dataset {self.name} has {why}", "give one that has")

    def _made(self, row: Any, place: str, number: int) -> list[Conversation]:
        """The checked conversations of a row."""
        columns = self.columns
        try:
            if not columns.names_content and (preset := self.preset or presets.recognise(row)):
                row, columns = preset.adapted(row, columns, place)
            parsed = parse(row, columns, place)
        except RecursionError:
            raise UserError(
                f"{place}: its values are nested deeper than {DEPTH} levels",
                "leave out the column, or write it as text",
            ) from None
        self.left |= dict.fromkeys(parsed.left)
        for role, name in parsed.roles.items():
            self.roles.setdefault(role, {})[name] = None
        self.cut += parsed.cut
        self.unpacked += parsed.unpacked
        unnamed = {"id": f"{self.name.rsplit('/', 1)[-1]}-{number:05d}", "dataset": self.name}
        made = [
            Conversation(**(unnamed | {k: v for k, v in said.items() if v is not None}))
            for said in parsed.said
        ]
        if len(made) > 1:
            made = [one.with_response_index(index) for index, one in enumerate(made)]
        for conversation in made:
            validate(conversation, place)
            if conversation.id in self.places:
                raise UserError(
                    f"{place}: its id is that of {self.places[conversation.id]}, too",
                    "make the ids unique, or name another column with --id-column",
                )
        return made


def open_conversations(
    dataset: str,
    *,
    limit: int | None = None,
    columns: ColumnMap | None = None,
    split: str | None = None,
    subset: str | None = None,
    revision: str | None = None,
    skip_unusable: bool = False,
) -> ConversationSource:
    """Open a dataset and read its first usable row, so that one without any is refused at once.

    Args:
        dataset: ``builtin`` (three parts in turn), ``builtin:maths|instructions|open``,
            ``builtin:siblings``, ``builtin:study``, a file or a folder of files (``files``), a
            preset's name, or a hub id ``org/name`` (streamed).
        limit: at most so many rows; None for all.
        columns: what the columns are called, where they can't be recognised.
        split, subset, revision: of a hub dataset; a preset has defaults.
        skip_unusable: leave out rows that can't be used, and list them, where one of them would
            otherwise end the iteration with a ``UserError``. They don't count for ``limit``.

    Raises:
        UserError: nothing of this name, nothing in it, or no row that can be used. Iterating ends
            with one error for all rows that can't be used.
    """
    columns, preset = columns or ColumnMap(), presets.find(dataset)
    opened = local(dataset)
    if opened and (split or subset or revision):
        raise UserError(
            f"{dataset} has no splits, subsets or revisions",
            "leave out --split, --subset and --revision",
        )
    of_hub = preset or presets.Preset(dataset, dataset, None, None, (), columns, streamed=True)
    name, (read, count), found = opened or presets.open_hub(of_hub, subset, split, revision)
    description = {"dataset": dataset, "limit": limit, "columns": asdict(columns), **found}
    source = ConversationSource(
        name, description, read, count, columns, preset, limit, skip_unusable
    )
    next(iter(source))
    return source


def local(dataset: str) -> tuple[str, Rows, dict] | None:
    """A built-in dataset or a file, of which no row is read yet; None for one of the hub.

    Raises:
        UserError: there is none of this name, or a file of another format.
    """
    if dataset in _PARTS:
        read = partial(_builtin, dataset)
        return dataset.replace(":", "-"), (read, lambda: sum(1 for _ in read())), {}
    if presets.find(dataset):
        return None
    path = expanded(dataset)
    if files.kind(path) or path.exists():
        return path.name.partition(".")[0], files.rows_of(path), {"file": path.name}
    if _HUB_ID.fullmatch(dataset):
        return None
    names = [*_PARTS, *presets.PRESETS]
    raise UserError(
        f"no dataset {dataset!r}{did_you_mean(dataset.lower(), names)}; there are "
        f"{', '.join(names)}",
        f"use one of these, a {files.KINDS} file, a folder of such files, or a hub id org/name",
    )


def _names(row: dict) -> Iterator[str]:
    """The columns of a row, and the fields of objects that it lists, such as messages."""
    yield from row
    for value in map(from_json, row.values()):
        if list_of(value, dict):
            yield from chain.from_iterable(value)


def _builtin(dataset: str) -> Iterator[tuple[str, bytes]]:
    parts = [Path(__file__).with_name(f"builtin_{name}.jsonl") for name in _PARTS[dataset]]
    # One of each in turn, so that any number of first rows is balanced.
    return chain.from_iterable(zip(*map(files.lines_of, parts), strict=True))
