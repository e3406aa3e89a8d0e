"""What was read of a user's data, in words: a misread column is seen before it costs anything."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ia_mech.chat.template import MARK, Joints
from ia_mech.data.conversations import Conversation, ConversationSource
from ia_mech.data.formats import like_follow_up, like_gold
from ia_mech.settings import Settings

# What a column may be read as, by the field of ColumnMap.
ROLES = {
    "messages": "messages",
    "query": "query",
    "context": "passage",
    "response": "response",
    "system": "system message",
    "followup": "real follow-up",
    "answer": "gold answer",
    "id": "id",
    "source": "source",
}
# What a row may have or lack; the second argument says whether the model writes all responses.
KINDS: dict[str, Callable[[Conversation, bool], bool]] = {
    "with earlier turns": lambda row, _: sum(m["role"] == "user" for m in row.messages) > 1,
    "with tools": lambda row, _: "tools" in row.messages[0],
    "without a response (the model will write it)": lambda row, _: row.response is None,
    "whose response the model will write anew": lambda row, anew: anew and row.response is not None,
    "with several responses": lambda row, anew: (
        not anew and row.response is not None and row.response_index is not None
    ),
    "with a later user turn, the real follow-up": lambda row, _: row.real_follow_up is not None,
    "with a gold answer": lambda row, _: row.answer is not None,
}


class DataRead(NamedTuple):
    """What was read: the number of rows, each of which may have become several contexts; what they
    hold, in one line (empty for built-in data); and notes on what wasn't read."""

    rows: int
    text: str
    notes: list[str]


def what_was_read(
    conversations: Sequence[Conversation],
    source: ConversationSource,
    settings: Settings,
    joints: Joints,
) -> DataRead:
    """Describe the conversations of a run's contexts.

    Args:
        source: that they come from, read to its end.
        joints: of the chat template.
    """
    rows = [*{one.query_id: one for one in reversed(conversations)}.values()]
    builtin = settings.dataset.split(":")[0] == "builtin"
    text = "" if builtin else _text(rows, source, settings, joints)
    real = any(row.real_follow_up is not None for row in rows)
    return DataRead(len(rows), text, [*_notes(len(rows), real, source, settings, builtin)])


def _text(
    rows: Sequence[Conversation], source: ConversationSource, settings: Settings, joints: Joints
) -> str:
    """Columns that were read, and what rows have."""
    recognised = [
        f"{what} from {' or '.join(f'`{name}`' for name in source.roles[role])}"
        for role, what in ROLES.items()
        if role in source.roles
    ]
    own = sum(row.messages[0]["role"] == "system" for row in rows)
    counts = {"with a system message of their own": own}
    if settings.system is not None:
        counts["get the one of the command line"] = len(rows) - own
    elif writes_system(joints):
        default = "default one" if own else "default system message"
        counts[f"get the template's {default}"] = len(rows) - own
    anew = settings.response == "generate"
    counts["whose response was a text with messages, read as these"] = source.unpacked
    counts |= {what: sum(holds(row, anew) for row in rows) for what, holds in KINDS.items()}
    listed = [*recognised, *(f"{count} {what}" for what, count in counts.items() if count)]
    many = f"{len(rows)} row{'s' * (len(rows) != 1)}"
    return f"{many}: {', '.join(listed) or 'a query and a response each'}"


def writes_system(joints: Joints) -> bool:
    """Whether a template writes a system message of its own where a conversation has none."""
    before, after, *_ = [*joints.system.split(MARK), ""]
    around = joints.first.startswith(before) and joints.first.endswith(after)
    return bool(before) and around and len(joints.first) > len(before) + len(after)


def _notes(
    rows: int, real: bool, source: ConversationSource, settings: Settings, builtin: bool
) -> Iterator[str]:
    """How many conversations of the data are used, and which of its columns no model sees.
    ``real``: some have a real follow-up."""
    if source.rest and not builtin:
        total = source.count()
        first = f"{rows} of {total}" if total else f"the first {rows}"
        yield f"{settings.dataset}: {first} conversations used (--limit)"
    elif settings.limit is not None and rows < settings.limit:
        fewer = f"has fewer conversations than --limit {settings.limit}: {rows}"
        yield f"{settings.dataset} {fewer}"
    if source.cut:
        many = f"{source.cut} conversation{'s' * (source.cut != 1)}"
        yield f"{many} cut after the first response (--cut last: before the last user turn)"
    if source.left:
        gold = [name for name in source.left if like_gold(name)]
        more = f" (if {gold[0]} is a gold answer: --answer-column {gold[0]})" if gold else ""
        if not real and (after := [name for name in source.left if like_follow_up(name)]):
            more += f" (if {after[0]} is what the user said next: --followup-column {after[0]})"
        listed = ", ".join(source.left)
        yield f"columns that the model doesn't see (metadata): {listed}{more}"
