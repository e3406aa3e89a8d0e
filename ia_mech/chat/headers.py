"""Headers other than the user's after a response: does the role matter, or the place?

A variant changes the token ids of the regular context at one place and leaves all others as they
are, which rendering and tokenizing another text wouldn't promise.
"""

from collections.abc import Sequence
from dataclasses import replace

from ia_mech.chat.format import ChatContext, ChatFormat, TurnIds
from ia_mech.chat.template import Message
from ia_mech.data.conversations import USER_HEADER, Conversation
from ia_mech.errors import UserError


def context_and_real_follow_up(
    chat: ChatFormat, conversation: Conversation
) -> tuple[ChatContext, TurnIds | None]:
    """A conversation's context with its own kind of header, and the token ids of its real follow-up
    (None without one).

    Header ``alone`` is the bare user header with no conversation before it (a system message
    stays); ``assistant`` opens an assistant turn after the response; ``no_turn_end`` and
    ``no_turn_separator`` leave out what closes the response, and what stands between that and the
    user header. An opening follows each.

    The ids are those after the regular user header, so that all headers score the same tokens. With
    an opening there are none: the real follow-up doesn't begin with those words.

    Raises:
        UserError: the template refuses the conversation or can't express the header; or the real
            follow-up merges with the header or holds a mark that structures turns.
    """
    messages, header = conversation.messages, conversation.header
    regular = context = chat.context(messages)
    if header == "alone":
        context = _bare_header_context(chat, messages)
    elif header == "assistant":
        context = _assistant_header_context(chat, regular)
    elif header != USER_HEADER:
        context = _context_without(chat, regular, header.removeprefix("no_"))
    if conversation.real_follow_up is None or chat.opening is not None:
        return context, None
    return context, chat.turn_ids(messages, regular, conversation.real_follow_up)


def _bare_header_context(chat: ChatFormat, messages: Sequence[Message]) -> ChatContext:
    ids = chat.bare_header(messages)
    positions: dict[str, int | None] = dict.fromkeys(chat.position_names)
    positions |= zip(chat.header_names, range(len(ids))[-len(chat.header_ids) :], strict=True)
    ids = [*ids, *chat.opening_ids]
    return ChatContext(chat.template.decode(ids), ids, positions)


def _context_without(chat: ChatFormat, regular: ChatContext, name: str) -> ChatContext:
    """The context without its turn end, or without all that stands between turn end and header."""
    end = regular.positions["turn_end"]
    header = regular.positions[chat.header_names[0]]
    assert header is not None  # every context has a header
    if regular.positions[name] is None or end is None:
        raise UserError(
            f"there is no {name.replace('_', ' ')} after the response",
            "use a model whose template has one, or leave the condition out",
        )
    start, stop = end + 1, header
    if name == "turn_end":
        start, stop = end, end + 1
        # The template's white space before it goes, too, unless the response's last token holds it.
        before = chat.tail_ids[: chat.tail_ids.index(regular.ids[end])]
        while before and regular.ids[start - 1] == before.pop():
            start -= 1
    ids = [*regular.ids[:start], *regular.ids[stop:]]
    positions: dict[str, int | None] = {
        at: None if i is None or start <= i < stop else i - (stop - start) * (i >= stop)
        for at, i in regular.positions.items()
    }
    return replace(regular, text=chat.template.decode(ids), ids=ids, positions=positions)


def _assistant_header_context(chat: ChatFormat, regular: ChatContext) -> ChatContext:
    """The context with the header of assistant turns where the user header stood."""
    header = chat.assistant_header_ids
    if not header or header == chat.header_ids:
        raise UserError(
            "the chat template has no assistant header of its own",
            "use a model whose template has one, or leave the condition out",
        )
    names = chat.header_names
    kept = regular.ids[: regular.positions[names[0]]]
    positions = regular.positions | dict.fromkeys(names)
    if len(header) == len(chat.header_ids):
        positions.update({name: len(kept) + i for i, name in enumerate(names)})
    if len(header) > 1:
        positions[names[0]] = len(kept)
    positions["header_last"] = len(kept) + len(header) - 1
    ids = [*kept, *header, *chat.opening_ids]
    return replace(regular, text=chat.template.decode(ids), ids=ids, positions=positions)
