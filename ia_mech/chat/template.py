"""A chat template as a function of messages: rendering, and where a message's text stands in it."""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta

from ia_mech.errors import UserError

PINNED_DATE = "2026-01-01"  # for templates that print today's date; ids must not change at midnight
MARK = "Qzxvjk"  # stands where a turn's text will be; no template holds or changes it
GIVEN = ("messages", "tools", "add_generation_prompt")  # variables that are no options
DATES = ("strftime_now", "date_string", "current_date", "today")

Message = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class Joints:
    """What a template writes between turns, as text.

    Attributes:
        first: before a first query.
        asked: between a query and its response, where a user turn follows.
        tail: between a response and the user turn that follows it.
        queried: after a query that comes last; "" if the template opens an answer there unasked.
        prompt: after a query whose answer is asked for.
        answered: between a query and a response that comes last.
        last: after a response that comes last; None if the template doesn't show a response there.
        system: all that it writes in a dialogue with a system message.
        refused: why no dialogue can begin with a system message; "" where one can.
    """

    first: str
    asked: str
    tail: str
    queried: str
    prompt: str
    answered: str
    last: str | None
    system: str
    refused: str


class ChatTemplate:
    """A chat template at a fixed date, with fixed options: variables that every rendering is given,
    such as ``enable_thinking``. It is the one whose text is ``source``, or else the tokenizer's.

    Raises:
        UserError: there is no template, or the tokenizer gives no offsets into the text (fast
            tokenizers do); or the template never reads an option.
    """

    def __init__(
        self,
        tokenizer,
        date: str = PINNED_DATE,
        options: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                "the tokenizer gives no character offsets", "use the model's fast tokenizer"
            )
        try:  # of several named templates this picks the default one
            self.source: str = tokenizer.get_chat_template(source)
        except ValueError as error:
            raise UserError(
                "the tokenizer has no chat template, or none that is named default",
                "give one (--chat-template, chat_template=), or use an instruct model",
            ) from error
        self._date, self._given = date, {"documents": None, **(options or {})}
        for name in options or {}:
            self._refuse_option(name)

    @property
    def hash(self) -> str:
        """SHA-256 of the chat template, 16 hex digits."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    def render(self, messages: Sequence[Message], **options) -> str:
        """The dialogue's text, as ``apply_chat_template`` renders it; ``options`` are its keywords.

        The dialogue's tools are those of the first message that has ``tools``.

        Raises:
            UserError: the template refuses these messages.
        """
        given = {"add_generation_prompt": False, **self.tokenizer.special_tokens_map}
        given |= self._given | {"tools": next((m["tools"] for m in messages if "tools" in m), None)}
        bare = [{k: v for k, v in m.items() if k != "tools"} for m in messages]
        try:
            return _compiled(self.source, self._date).render(messages=bare, **(given | options))
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is no Jinja template (line {error.lineno}: {error.message})",
                "mend it, or give another",
            ) from error
        except Exception as error:  # templates raise whatever their authors chose
            raise UserError(
                f"the chat template refuses the roles {'/'.join(m['role'] for m in messages)} "
                f"({str(error).splitlines()[0][:120] if str(error) else type(error).__name__})",
                "use conversations that the template allows, or another model",
            ) from error

    def _refuse_option(self, name: str) -> None:
        # This includes variables that the template may set before it reads them.
        try:
            found = meta.find_undeclared_variables(_environment().parse(self.source))
        except TemplateError:  # rendering reports it
            return
        read = {one for one in found if one not in (*GIVEN, *DATES) and not one.endswith("_token")}
        if name not in read:
            remedy = f"give one of {', '.join(sorted(read))}" if read else "leave it out"
            raise UserError(
                f"--template-option {name}: the chat template reads no such option",
                "use --date for dates" if name in DATES else remedy,
            )

    def joints(self) -> Joints:
        """What the template writes between turns, whatever the turns say.

        Raises:
            UserError: it refuses a user turn after a response, or doesn't show each turn once.
        """
        first, asked, tail, queried = self._pieces("user", "assistant", "user")
        prompt = self._pieces("user", "assistant", "user", add_generation_prompt=True)[-1]
        try:
            *_, answered, last = self._pieces("user", "assistant", "user", "assistant")
        except UserError:  # some templates show a response only where something follows it
            answered, last = asked, None
        # Where an answer is opened unasked, this doesn't tell what ends the turn before it.
        opener = (asked.split() or [MARK])[-1]
        queried = "" if opener in queried else queried
        last = "" if last and opener in last else last
        system = refused = ""
        try:
            system = MARK.join(self._pieces("system", "user", "assistant", "user"))
        except UserError as error:
            refused = error.problem
        return Joints(first, asked, tail, queried, prompt, answered, last, system, refused)

    def _pieces(self, *roles: str, **options) -> list[str]:
        """What is rendered before, between and after the texts of turns with these roles."""
        marks = [f"{MARK}{number}" for number in range(len(roles))]
        turns = [message(role, mark) for role, mark in zip(roles, marks, strict=True)]
        text = self.render(turns, **options)
        for role, mark in zip(roles, marks, strict=True):
            _refuse_unless_once(text, mark, role)
        for role, mark, found in zip(roles, marks, sorted(marks, key=text.index), strict=True):
            if mark != found:
                raise UserError(
                    f"the chat template moves the {role} turn's text into another turn",
                    "use a template that keeps turns in order",
                )
        return re.split("|".join(marks), text)

    def spans(self, messages: Sequence[Message], *indices: int) -> tuple[str, list[Span]]:
        """The rendered dialogue, and where the contents of these messages stand in it (characters).

        Raises:
            UserError: the template refuses the dialogue, or a content can't be found in it.
        """
        text = self.render(messages)
        return text, [self._span(messages, index, text) for index in indices]

    def _span(self, messages: Sequence[Message], index: int, text: str) -> Span:
        role, content = messages[index]["role"], messages[index]["content"]
        marked = [*messages]
        marked[index] = messages[index] | {"content": MARK + MARK}
        rendered = self.render(marked)
        _refuse_unless_once(rendered, MARK + MARK, role)
        before, _, after = rendered.partition(MARK + MARK)
        if text == before.rstrip() + after:  # white space that is written only before words
            before = before.rstrip()
        if (
            len(before) + len(after) > len(text)
            or not text.startswith(before)
            or not text.endswith(after)
        ):
            if not content.strip():
                raise UserError(
                    f"the chat template renders an empty {role} turn differently from others",
                    "leave out conversations with an empty turn",
                )
            raise UserError(
                f"the {role} turn can't be found in the rendered dialogue",
                "remove template markup from its text",
            )
        return len(before), len(text) - len(after)

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text and the characters each stands for."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], encoding["offset_mapping"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens kept."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def token(self, token: int) -> str:
        """A token as the vocabulary writes it."""
        return self.tokenizer.convert_ids_to_tokens(token)


@functools.lru_cache
def _compiled(source: str, date: str) -> Template:
    """A template as ``apply_chat_template`` compiles it, but with a fixed date."""
    pinned = datetime.fromisoformat(date).strftime
    return _environment().from_string(source, {"strftime_now": lambda form: pinned(form)})


def _environment() -> Environment:
    # Not public, and the only way to the sandbox in which transformers renders.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template("").environment


def _refuse_unless_once(text: str, mark: str, role: str) -> None:
    if text.count(mark) != 1:
        raise UserError(
            f"the chat template doesn't show the {role} turn's text exactly once",
            "use a template that renders every turn",
        )


def message(role: str, content: str) -> Message:
    """One message as templates take it."""
    return {"role": role, "content": content}
