"""Refuse dialogues whose tools, calls, results or names a chat template doesn't show."""

from collections.abc import Iterator, Sequence

from ia_mech.chat.template import MARK, ChatTemplate, Message
from ia_mech.errors import UserError

ANSWERED, CALLED = "the answers of tools", "the calls of tools"


def refuse_hidden(template: ChatTemplate, turns: Sequence[Message]) -> None:
    """Refuse a dialogue if the template would leave out a name, or anything that belongs to tools.

    Raises:
        UserError: names it.
    """
    # Answers may rest on tools that were called. Tools that nobody called may be left out.
    used = any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
    for index, turn in enumerate(turns):
        for what, marked in _marked(turn):
            if MARK not in template.render([*turns[:index], marked, *turns[index + 1 :]]):
                remedy = "use a model whose template does, or leave out such conversations"
                if what not in (ANSWERED, CALLED) and not used:
                    remedy += "; or, if it isn't needed, name it with --metadata-columns"
                raise UserError(f"the chat template doesn't show {what}", remedy)


def _marked(turn: Message) -> Iterator[tuple[str, Message]]:
    """Each tool, call, answer or name of a message, in words, and the message with it marked."""
    if turn["role"] == "tool":
        yield ANSWERED, turn | {"content": MARK}
    elif "name" in turn:  # a tool's name only repeats its call's
        yield f"the {turn['role']}'s name", turn | {"name": MARK}
    for kind, what in (("tool_calls", CALLED), ("tools", "the list of tools")):
        for number, one in enumerate(turn.get(kind) or ()):
            named = one | {"function": one["function"] | {"name": MARK}}
            yield what, turn | {kind: [*turn[kind][:number], named, *turn[kind][number + 1 :]]}
