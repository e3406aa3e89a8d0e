"""What a chat template would leave out of a conversation: tools, their calls and results, names."""

from collections.abc import Sequence
from typing import Any

from ia_mech.chat.template import MARK, ChatTemplate, Message, message
from ia_mech.errors import UserError


def refuse_unshown(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[dict] = ()
) -> None:
    """Refuse a conversation of which the rendered text lacks something that the messages say.

    Thoughts are not looked at: which of them a dialogue shows is the template's own affair.

    Args:
        template: of the model.
        messages: with the response, where there is one.
        tools: that the assistant may call.

    Raises:
        UserError: names what isn't shown.
    """
    marks: dict[str, str] = {}  # what each stands for

    def mark(what: str) -> str:
        marks[f"{MARK}{len(marks):03d}"] = what
        return [*marks][-1]

    marked = [_marked(one, mark) for one in messages]
    schemas = [_renamed(one, mark("the tools")) for one in tools]
    if not marks:
        return
    if messages[-1]["role"] == "assistant":  # as in a context
        marked.append(message("user", MARK))
    text = template.render(marked, tools=schemas or None)
    for name, what in marks.items():
        if name not in text:
            raise UserError(
                f"the chat template doesn't show {what}",
                "use a model whose template does, leave out such conversations (--skip-unusable), "
                "or write them without",
            )


def _marked(given: Message, mark: Any) -> Message:
    """A message with marks in place of what the template may leave out."""
    made = dict(given)
    if given["role"] == "tool":
        made["content"] = mark("the result of a tool call")
    elif "name" in given:
        made["name"] = mark(f"the name of the {given['role']} ({given['name'][:40]!r})")
    if calls := given.get("tool_calls"):
        made["tool_calls"] = [_renamed(call, mark("a tool call")) for call in calls]
    return made


def _renamed(tool: dict, name: str) -> dict:
    return tool | {"function": tool["function"] | {"name": name}}
