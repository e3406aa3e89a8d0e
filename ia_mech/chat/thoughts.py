"""Find a response's thought in what a model wrote, and in what a template renders.

A thought is told from the rest of a response by the marks that the chat template writes around
thoughts, or at least names. A message holds its thought as ``reasoning_content``. The template gets
the thought where it reads thoughts: under a key of the message, or within the content. Whether a
dialogue then shows the thought depends on the template: most leave it out once a user turn follows.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ia_mech.chat.template import MARK, ChatTemplate, Message, message
from ia_mech.data.messages import THOUGHTS as KEYS  # of messages; ours is the first
from ia_mech.errors import UserError

CONTENT = "content"
_THOUGHT = MARK[::-1]  # stands where a thought will be
_QUERY = message("user", "What is it?")


@dataclass(frozen=True)
class Marks:
    """The marks around a thought, and the ``space`` between marks and words of one content."""

    opening: str
    closing: str
    space: str = ""


# Marks that templates name though they write no dialogue's thought. Others show their marks.
NAMED = (
    Marks("<think>", "</think>", "\n"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<mm:think>", "</mm:think>"),
    Marks("<|channel>thought", "<channel|>", "\n"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    Marks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "\n"),
)


@dataclass(frozen=True)
class Response:
    """A response without its thought, and the thought (None without one). ``within_thought``: it
    ended within its thought, or before the mark that the template writes after one."""

    text: str
    thought: str | None = None
    within_thought: bool = False


class Thoughts:
    """What a chat template does with thoughts; ``added`` are the ids of the tokens that text can't
    be cut into by accident.

    Attributes:
        marks: around thoughts in what the model writes; None if the template knows no thoughts.
        key: where the template reads a message's thought: one of :data:`KEYS`, or ``content``;
            None if nowhere.
        content_mark: what the template writes before a content, after the assistant's header or a
            thought (harmony's final channel); empty if nothing.
    """

    def __init__(self, template: ChatTemplate, added: Collection[int]) -> None:
        self._template = template
        self._opened = self._asked = template.render([_QUERY], add_generation_prompt=True)
        shown = [key for key in KEYS if self._shows({key: _THOUGHT})]
        named = [marks for marks in NAMED if marks.closing in template.source]
        written = self._written_marks(shown[0]) if shown else None
        self.marks = named[0] if named else written
        self._asked = self.header(self._opened)
        self.content_mark = self._before_content()
        if self.marks is not None:
            mark = self.of_text(self.content_mark).text
            closing = written.closing if written else ""
            self.content_mark = mark or closing.partition(self.marks.closing)[2].strip()
        self.key = shown[0] if shown else self._other_key()
        # Inside a text only such a token is surely a mark; words may be the response's own.
        self._is_told = bool(set(added).intersection(template.encode(self.content_mark)[0]))
        if self.marks is not None:
            closing = self.marks.closing.removesuffix(self.content_mark).strip()
            self.marks = replace(self.marks, closing=closing)

    # -- what the template does ---------------------------------------------------------------

    def shown(self, *, followed: bool) -> bool:
        """Whether a dialogue, ``followed`` by a user turn or not, shows its last response's
        thought."""
        said = self.given(message("assistant", MARK) | {KEYS[0]: _THOUGHT})
        return self._shows(said, (followed,))

    def given(self, turn: Message) -> Message:
        """A message as the template takes it, with its thought where the template reads one."""
        thought = turn.get(KEYS[0])
        bare = {name: value for name, value in turn.items() if name not in KEYS}
        if not thought or self.key is None:
            return bare
        if self.key != CONTENT:
            return bare | {self.key: thought}
        return bare | {CONTENT: self._joined(thought, turn[CONTENT])}

    def told_apart(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with thoughts that stood in contents moved to keys of their own."""
        return [
            turn | _as_message(self.of_text(turn[CONTENT]))
            if turn["role"] == "assistant" and KEYS[0] not in turn
            else turn
            for turn in messages
        ]

    def header(self, opened: str) -> str:
        """The text that asks for a response, minus marks at its end that open or skip a thought."""
        if self.marks not in NAMED:
            return opened
        end = opened.rstrip()
        bare = end.removesuffix(self.marks.closing).rstrip().removesuffix(self.marks.opening)
        return bare if len(bare) < len(end) else opened

    def _joined(self, thought: str, text: str) -> str:
        assert self.marks is not None
        parts = (self.marks.opening, thought, self.marks.closing, text)
        return self.marks.space.join(part for part in parts if part)

    def _shows(self, said: dict[str, Any], followed: Sequence[bool] = (False, True)) -> bool:
        """Whether a dialogue shows :data:`_THOUGHT`, ``followed`` by a user turn or not."""
        turns = [_QUERY, message("assistant", MARK) | said]
        dialogues = [[*turns, message("user", "Why?")] if more else turns for more in followed]
        return any(_THOUGHT in self._rendered(dialogue) for dialogue in dialogues)

    def _rendered(self, dialogue: Sequence[Message]) -> str:
        try:
            return self._template.render(dialogue)
        except UserError:  # the template refuses this key
            return ""

    def _before_content(self, **said: str) -> str:
        """What the template writes between the assistant's header and a last response's content."""
        text = self._rendered([_QUERY, message("assistant", MARK) | said])
        before = text.partition(MARK)[0] if MARK in text else ""
        return before.removeprefix(self._asked).strip() if before.startswith(self._asked) else ""

    def _written_marks(self, key: str) -> Marks | None:
        """The marks that the template writes around the thought of a last response."""
        opening, _, closing = self._before_content(**{key: _THOUGHT}).partition(_THOUGHT)
        return Marks(opening.strip(), closing.strip()) if closing.strip() else None

    def _other_key(self) -> str | None:
        """Where a template reads thoughts, if a plain dialogue shows none under any key."""
        if self.marks is None:
            return None
        plain = self._rendered([_QUERY, message("assistant", MARK)])
        writes = self.marks.closing in plain.rpartition(_QUERY[CONTENT])[2]  # around no thought
        if (
            not writes
            and not self.content_mark
            and self._shows({CONTENT: self._joined(_THOUGHT, MARK)})
        ):
            return CONTENT
        source = self._template.source
        return next((key for key in KEYS[:2] if re.search(rf"[.'\"]{key}\b", source)), None)

    # -- what a model wrote -------------------------------------------------------------------

    def of_text(self, text: str, prompt: str | None = None) -> Response:
        """Split a response's text from its thought. ``prompt`` is what the response was written
        after, which may open a thought; None if that isn't known."""
        if self.marks is None:
            return Response(text)
        opening, closing = self.marks.opening, self.marks.closing
        before, closed, after = text.partition(closing)
        begun = before.lstrip().startswith(opening or closing) or (closed and not before.strip())
        if not begun and (closed or prompt is not None):
            begun = self._opens(self._opened if prompt is None else prompt)
        if not begun:
            return Response(text)
        thought = before.replace(opening, "", 1).strip()
        return Response(after.strip(), thought or None, not closed)

    def _opens(self, prompt: str) -> bool:
        """Whether a prompt ends within a thought."""
        assert self.marks is not None
        end = prompt.rstrip()
        if self.marks.opening:
            return end.endswith(self.marks.opening)
        return not end.endswith(self.marks.closing)  # such a template opens the thought itself

    def parse(self, text: str, prompt: str, structure: Collection[str]) -> Response:
        """A sampled response without its thought and the marks that the template writes.

        Args:
            text: what was written.
            prompt: what it was written after.
            structure: tokens that open and close turns. The response ends before the first of them
                that begins neither a thought nor a content. It also ends before a second end of a
                thought, where templates cut a response off.
        """
        if self._is_told:
            found = self._channels(text, prompt, structure)
        else:
            marks = "" if self.marks is None else self.marks.opening + self.marks.closing
            others = [token for token in structure if token not in marks]
            found = self.of_text(_until(text, others).strip(), prompt)
            found = replace(found, text=found.text.removeprefix(self.content_mark))
        thought = found.thought and _until(found.thought, structure).strip()
        ends = [self.marks.closing] if self.marks and thought else []
        said = _until(found.text, [*structure, *ends]).strip()
        return Response(said, thought or None, found.within_thought)

    def _channels(self, text: str, prompt: str, structure: Collection[str]) -> Response:
        """Parse a response whose content has its own mark, after thoughts and other channels."""
        before, found, said = text.partition(self.content_mark)
        opening, closing = (self.marks.opening, self.marks.closing) if self.marks else ("", "")
        if opening and prompt.rstrip().endswith(opening):
            before = opening + before
        if not opening or opening not in before:
            return Response(said if found else text)
        thoughts = [_until(part, (closing, *structure)) for part in before.split(opening)[1:]]
        return Response(said, "\n".join(map(str.strip, thoughts)), not found)


def _as_message(response: Response) -> dict[str, str]:
    said = {CONTENT: response.text}
    return said if response.thought is None else said | {KEYS[0]: response.thought}


def _until(text: str, tokens: Collection[str]) -> str:
    """A text up to the first of these tokens."""
    for token in tokens:
        text = text.partition(token)[0]
    return text
