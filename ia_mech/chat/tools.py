"""Tools, their calls and results, and names: whether a chat template shows what messages have."""

from collections.abc import Iterator, Sequence

from ia_mech.chat.template import MARK, ChatTemplate, Message
from ia_mech.errors import UserError

ANSWERED, CALLED = "what a tool answered", "calls of tools"


def refuse_hidden(template: ChatTemplate, turns: Sequence[Message]) -> None:
    """Refuse a dialogue of which the template would leave out what belongs to tools, or a name.

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
    """What a message has of these, and the message with a mark in its place."""
    if turn["role"] == "tool":
        yield ANSWERED, turn | {"content": MARK}
    elif "name" in turn:  # a tool's is only repeated
        yield f"the {turn['role']}'s name", turn | {"name": MARK}
    for kind, what in (("tool_calls", CALLED), ("tools", "the tools that there are")):
        for number, one in enumerate(turn.get(kind) or ()):
            named = one | {"function": one["function"] | {"name": MARK}}
            yield what, turn | {kind: [*turn[kind][:number], named, *turn[kind][number + 1 :]]}
