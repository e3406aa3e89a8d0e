"""What was read of a user's data, in words: a misread column is seen before it costs anything."""

from collections import Counter
from collections.abc import Iterator, Sequence

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.template import MARK, Joints
from ia_mech.data.conversations import Conversation, ConversationSource
from ia_mech.data.formats import like_gold
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
}
DEFAULT_SYSTEM = "get the template's default system message"


class DataRead:
    """What was read.

    Args:
        conversations: of the run's contexts.
        source: that they come from.
        settings: of the run.
        chat: the model's chat format.

    Attributes:
        rows: how many rows of the data are used; each may become several contexts.
        text: what they hold, in one line; empty for built-in data.
        notes: what else to say of the data, a line each.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        source: ConversationSource,
        settings: Settings,
        chat: ChatFormat,
    ) -> None:
        first = {one.query_id: one for one in reversed(conversations)}
        kinds = Counter(kind for one in first.values() for kind in _kinds(one, settings))
        self.rows, builtin = len(first), settings.dataset.split(":")[0] == "builtin"
        self.text = "" if builtin else _text(self.rows, kinds, source, settings, chat)
        self.notes = [*_notes(self.rows, source, settings, builtin)]


def _kinds(conversation: Conversation, settings: Settings) -> Iterator[str]:
    """What a row has, or lacks, that decides what the model is shown."""
    messages = conversation.messages
    if messages[0]["role"] == "system":
        yield "system"
    if sum(message["role"] == "user" for message in messages) > 1:
        yield "earlier"
    if "tools" in messages[0]:
        yield "tools"
    if conversation.response is None:
        yield "no response"
    elif settings.response == "generate":
        yield "replaced"
    elif conversation.response_index is not None:
        yield "several"
    if conversation.real_follow_up is not None:
        yield "follow-up"
    if conversation.answer is not None:
        yield "answer"


def _text(
    rows: int,
    kinds: Counter[str],
    source: ConversationSource,
    settings: Settings,
    chat: ChatFormat,
) -> str:
    """Columns that no flag named, and what rows have."""
    recognised = [
        f"{what} from {' or '.join(f'`{name}`' for name in source.roles[role])}"
        for role, what in ROLES.items()
        if role in source.roles and getattr(settings.columns, role) is None
    ]
    own = kinds["system"]
    parts = [(own, "with a system message of their own")]
    if settings.system is not None:
        parts.append((rows - own, "get that of --system"))
    elif writes_system(chat.template.joints()):
        parts.append((rows - own, "get the template's default one" if own else DEFAULT_SYSTEM))
    parts += [
        (kinds["earlier"], "with earlier turns"),
        (kinds["tools"], "with tools"),
        (kinds["no response"], "without a response (the model will write it)"),
        (kinds["replaced"], "whose response the model will write anew"),
        (kinds["several"], "with several responses"),
        (kinds["follow-up"], "with a later user turn, the real follow-up"),
        (kinds["answer"], "with a gold answer"),
    ]
    listed = [*recognised, *(f"{count} {what}" for count, what in parts if count)]
    return f"{rows} rows: {', '.join(listed) or 'a query and a response each'}"


def writes_system(joints: Joints) -> bool:
    """Whether a template writes a system message of its own where a conversation has none."""
    before, after, *_ = [*joints.system.split(MARK), ""]
    around = joints.first.startswith(before) and joints.first.endswith(after)
    return bool(before) and around and len(joints.first) > len(before) + len(after)


def _notes(
    rows: int, source: ConversationSource, settings: Settings, builtin: bool
) -> Iterator[str]:
    """How many conversations of the data are used, and which of its columns no model sees."""
    if source.rest and not builtin:
        total = source.count()
        first = f"{rows} of {total}" if total else f"the first {rows}"
        yield f"{settings.dataset}: {first} conversations used (--limit)"
    elif settings.limit is not None and rows < settings.limit:
        fewer = f"has fewer conversations than --limit {settings.limit}: {rows}"
        yield f"{settings.dataset} {fewer}"
    if source.cut:
        later = "--cut last would read up to the last one"
        yield f"rows with user turns after the first follow-up: {source.cut}; {later}"
    if source.left:
        gold = [name for name in source.left if like_gold(name)]
        more = f" (if {gold[0]} is a gold answer: --answer-column {gold[0]})" if gold else ""
        listed = ", ".join(source.left)
        yield f"columns that the model doesn't see (metadata): {listed}{more}"
