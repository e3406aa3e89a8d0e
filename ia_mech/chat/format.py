"""From a conversation to a chat context: text, token ids and named positions.

The user header is *derived* from the tokenizer's own chat template, never listed: the dialogue
query, response, user turn is rendered with a marker in place of the user turn, and what stands
before the marker is the context with its open header. Rendering the whole dialogue and cutting it
matters: templates such as Qwen3's rewrite the assistant turn once a user turn follows it.

What stands between response and user turn is cut into turn end, turn separator and user header by
one observation: a turn can't end before one has begun, so the first of its special tokens that the
dialogue already holds before the first user turn opens a turn, and the header starts there.

To support a new template family, nothing is registered. Add its template and special tokens to
``tests/families.py``, and what has to be found in it to ``FOUND`` in ``tests/test_chat.py``. Where
the derivation is wrong, change the general rule in :class:`ChatFormat`, never a case for one
family. What a template can't express is a ``UserError``, and a position that it lacks is None:
neither is guessed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ia_mech.chat.template import MARK, PINNED_DATE, ChatTemplate, Message, message
from ia_mech.chat.thoughts import KEYS, Response, Thoughts
from ia_mech.errors import UserError

# First tokens of many kinds: the header's ids must not depend on how the user turn begins.
_PROBES = (MARK, "7 apples", "(why?)", "éclair", '"Yes"', "the", "😀", "日本")


@dataclass(frozen=True)
class ChatContext:
    """Query and response rendered by the model's template, ending with the open user header and,
    where there are some, the words that the user turn is made to begin with.

    ``positions`` maps every name of ``ChatFormat.position_names`` to an index into ``ids``, or to
    None where this context lacks the token; ``header_last`` is the header's own last token, whether
    or not words follow it. ``query`` and ``response`` are the indices of their
    tokens, empty where there are none.
    """

    text: str
    ids: list[int]
    positions: dict[str, int | None]
    query: range = range(0)
    response: range = range(0)


class ChatFormat:
    """What a tokenizer's template says about user turns, derived and verified.

    Args:
        tokenizer: a fast tokenizer (offsets into the text are needed) with a chat template.
        system: a system message for every conversation that has none; None leaves it to the
            template, which may insert one of its own.
        thinking: ``template`` renders the assistant turn as the template does once a user turn
            follows; ``keep`` renders it as the template does when it is last (for Qwen3: with its
            thought, or an empty block).
        date: ISO date given to templates that print today's.
        eos_ids: stop ids that the model's generation configuration lists.
        opening: words that every user turn is made to begin with. They end the context and are no
            part of the turn; what goes on from them begins with a space, or ends the turn.
        options: variables that the template is always given, such as ``enable_thinking``.

    Attributes:
        template: the tokenizer's chat template at this date, with these options.
        thoughts: what the template does with thoughts.
        header_text, header_ids: the user header.
        tail_text, tail_ids: all that stands between a response and the user turn.
        turn_end_id: the token that closes the assistant turn, or None.
        opening_ids: the words that user turns are made to begin with; none without an opening.
        closing_id: the token that closes a user turn, or None if the template closes it with text.
        stop_ids: ids that end a sampled user turn.
        position_names: all named positions, in order.

    Raises:
        UserError: no template, no user role, or a template in which the header can't be told; an
            opening that merges with what stands beside it, or isn't kept by the template; an option
            that it never reads; ``keep`` with a template that leaves all thoughts out.
    """

    def __init__(
        self,
        tokenizer,
        system: str | None = None,
        thinking: str = "template",
        date: str = PINNED_DATE,
        eos_ids: Sequence[int] = (),
        opening: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.thinking = thinking
        self.date = date
        self.opening = opening
        self.options = dict(options or {})
        self.opening_ids: list[int] = []
        # Tokens that text can't be cut into by accident. Some families (DeepSeek) don't flag their
        # role markers as special; some tokenizers add runs of spaces, which mark nothing.
        self._marks = {
            i for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
        } | set(tokenizer.all_special_ids)
        try:
            self.template = ChatTemplate(tokenizer, date, options)
            self._derive(eos_ids)
            self._derive_thoughts()
            if opening is not None:
                self._derive_opening(opening)
        except UserError as error:
            name = tokenizer.name_or_path
            raise UserError(
                f"{name}: {error.problem}" if name else error.problem, error.remedy
            ) from error

    # -- derivation ---------------------------------------------------------------------------

    def _derive(self, eos_ids: Sequence[int]) -> None:
        dialogue = [message("user", "What is it?"), message("assistant", "It is blue.")]
        turns = [*dialogue, message("user", MARK)]
        before, _ = self.template.around(turns, 2)
        response_before, response_after = self.template.around(turns, 1)
        self.tail_text = response_after[: response_after.index(MARK)]
        assistant_header = response_before.rpartition("What is it?")[2]
        if not before.endswith(self.tail_text) or self.tail_text in ("", assistant_header):
            raise UserError(
                "the chat template doesn't mark user turns apart from assistant turns",
                "use a template that marks every turn's role",
            )
        # White space that merges with the user's first token ("[INST] Why" -> "[INST]", "▁Why")
        # belongs to the user turn; the header then ends before it.
        self._lead = ""
        if not self._is_stable(before):
            self._lead = before[len(before.rstrip()) :]
            before = before.rstrip()
            if not self._is_stable(before):
                raise UserError(
                    "the ids of the user header depend on how the user turn begins",
                    "use a tokenizer whose template ends the header with a token of its own",
                )
            self.tail_text = self.tail_text.removesuffix(self._lead)
        context = self._tokenize_context(before)
        ids, offsets = context
        start = len(before) - len(self.tail_text)
        first = next((i for i, (a, _) in enumerate(offsets) if a >= start), len(ids))
        self.tail_ids = ids[first:]
        gap = self._gap_length(turns)
        self.header_ids = self.tail_ids[gap:]
        if not self.header_ids:
            raise UserError(
                "the chat template opens user turns with no token of its own",
                "use a template that marks every turn's role",
            )
        header_start = offsets[first + gap][0]
        self.header_text = before[header_start:]
        ends = [i for i in range(gap) if self.tail_ids[i] in self._marks]
        # Index within the tail; the separator is what stands between turn end and header, if
        # anything does.
        self._turn_end = ends[-1] if ends else None
        self._separator = gap - 1 if ends and gap - 1 > ends[-1] else None
        self.turn_end_id = None if self._turn_end is None else self.tail_ids[self._turn_end]
        self.position_names = (
            "query_end",
            "response_end",
            "turn_end",
            "turn_separator",
            *(f"header_{i}" for i in range(len(self.header_ids) - 1)),
            "header_last",
        )
        self._derive_stops(dialogue, eos_ids)

    def _is_stable(self, context: str) -> bool:
        """Whether a context has ids of its own, the same however the user turn begins."""
        (ids, offsets), *others = (self._tokenize_context(context, probe) for probe in _PROBES)
        return offsets[-1][1] == len(context) and all(other == ids for other, _ in others)

    def _gap_length(self, dialogue: list[Message]) -> int:
        """How many tokens of the tail stand before the header."""
        before, after = self.template.around(dialogue, 0)
        # Neither the end of text, which some families also begin with, nor what follows a query
        # (an end that a default system message has already shown) opens a user turn.
        ends = {self.tokenizer.eos_token_id, *self.template.encode(after)[0][:1]}
        for i in self.template.encode(before)[0]:
            if i in self._marks and i not in ends and i in self.tail_ids:
                return self.tail_ids.index(i)
        # Roles marked in plain text: the header starts after the closing token and white space.
        index = 0
        while index < len(self.tail_ids) and (
            self.tail_ids[index] in self._marks
            or not self.tokenizer.decode([self.tail_ids[index]]).strip()
        ):
            index += 1
        return index

    def _derive_stops(self, dialogue: list[Message], eos_ids: Sequence[int]) -> None:
        turns = [*dialogue, message("user", MARK)]
        after = [
            self.template.around([*turns, message("assistant", "Yes.")], 2)[1],
            self.template.render(turns, add_generation_prompt=True).rpartition(MARK)[2],
            self.template.render(turns).rpartition(MARK)[2],
        ]
        firsts = [self.template.encode(text)[0][:1] for text in after]
        closing = [ids[0] for ids in firsts if ids and ids[0] in self._marks]
        self.closing_id = closing[0] if firsts[0] and firsts[0][0] in self._marks else None
        self._closing_text = (
            self.template.token(self.closing_id) if self.closing_id is not None else ""
        )
        eos = {i for i in (self.tokenizer.eos_token_id, *eos_ids) if i is not None}
        ends = {self.turn_end_id} if self.turn_end_id is not None else set()
        self.stop_ids = sorted({*closing, *eos, *ends})
        # A response is stopped as ``generate`` would stop it; templates whose last assistant turn
        # ends with a token outside the eos set (some fine-tunes) add that one.
        last = self.template.encode(self.template.around(dialogue, 1)[1])[0][:1]
        self.response_stop_ids = sorted(eos | {i for i in last if i in self._marks})
        # Marks that no turn's text may hold: as text they would end the turn or open another one.
        # Of what else the template writes, only tokens flagged as special: <think> is allowed.
        turns.append(message("assistant", "Yes."))
        written = set(self.template.encode(self.template.render(turns))[0])
        try:
            turns.insert(0, message("system", "Be brief."))
            written.update(self.template.encode(self.template.render(turns))[0])
        except UserError:
            pass  # no system role
        added = self.tokenizer.added_tokens_decoder
        special = {i for i in written if i in added and added[i].special}
        turning = {*self.tail_ids, *self.stop_ids, *self.response_stop_ids} & self._marks
        self._structure = special | turning

    def _derive_thoughts(self) -> None:
        self.thoughts = Thoughts(self.template, self._marks)
        self._shows_thoughts = self.thoughts.shown(followed=self.thinking == "template")
        if self.thinking == "keep" and self.thoughts.marks and not self._shows_thoughts:
            raise UserError(
                "--thinking keep: the chat template leaves out what a response's thought was",
                "use --thinking template",
            )

    def _derive_opening(self, opening: str) -> None:
        self._refuse_marks("user", opening)
        dialogue = [message("user", "What is it?"), message("assistant", "It is blue.")]
        whole = self.template.render([*dialogue, message("user", f"{opening} {MARK}")])
        if f"{self.header_text}{self._lead}{opening} {MARK}" not in whole:
            raise UserError(
                f"the chat template changes the words of --opening {opening[:40]!r}",
                "give others",
            )
        context = self.context(dialogue)  # without an opening yet
        text = f"{context.text}{self._lead}{opening}"
        self.opening_ids = self.template.encode(text)[0][len(context.ids) :]
        for following in (self._closing_text, *(f" {probe}" for probe in _PROBES)):
            self._refuse_merged(text + following, [*context.ids, *self.opening_ids])

    def _refuse_merged(self, text: str, ids: list[int]) -> None:
        """Raise unless a text with an opening begins with these ids."""
        if self.template.encode(text)[0][: len(ids)] != ids:
            raise UserError(
                f"the words of --opening {str(self.opening)[:40]!r} merge with what stands beside "
                "them",
                "begin and end them with a letter or a usual mark",
            )

    # -- contexts -----------------------------------------------------------------------------

    def context(self, messages: Sequence[Message]) -> ChatContext:
        """Render a conversation that ends with a response and open the user header after it.

        Args:
            messages: roles and contents; the last one is the assistant's (it may be empty).

        Raises:
            UserError: the template refuses the conversation, or its text holds a mark of turns or
                breaks the header.
        """
        turns = self._turns(messages)
        last = len(turns) - 1
        dialogue = [*turns, message("user", MARK)] if self.thinking == "template" else turns
        response = self.template.span(dialogue, last)
        query = self.template.span(dialogue, _last_query(turns))
        text = self.template.render(dialogue)[: response[1]] + self.tail_text
        if self.thinking == "template":
            whole = self.template.render(dialogue)
            if not whole.startswith(text + self._lead + MARK):
                raise UserError(
                    "the chat template opens this user turn in another way than others",
                    "use a template that opens every user turn alike",
                )
        ids, offsets = self._tokenize_context(text)
        if ids[-len(self.header_ids) :] != self.header_ids:
            raise UserError(
                "the user header is not tokenized alone after this response",
                "remove the conversation, or what its response ends with",
            )
        positions = dict.fromkeys(self.position_names)
        query_tokens = _tokens_within(offsets, *query)
        begin = self._response_begin(turns, text, response[0])
        response_tokens = _tokens_within(offsets, begin, response[1])
        positions["query_end"] = query_tokens[-1] if query_tokens else None
        positions["response_end"] = response_tokens[-1] if response_tokens else None
        tail = len(ids) - len(self.tail_ids)
        if ids[tail:] == self.tail_ids:
            if self._turn_end is not None:
                positions["turn_end"] = tail + self._turn_end
            if self._separator is not None:
                positions["turn_separator"] = tail + self._separator
        header = len(ids) - len(self.header_ids)
        for index, name in enumerate(self.position_names[4:]):
            positions[name] = header + index
        if self.opening_ids:
            text, ids = f"{text}{self._lead}{self.opening}", [*ids, *self.opening_ids]
            self._refuse_merged(f"{text} {MARK}", ids)
        return ChatContext(text, ids, positions, query_tokens, response_tokens)

    def _response_begin(self, turns: Sequence[Message], text: str, content: int) -> int:
        """The character with which a response begins: with its thought, if the context shows it."""
        if not self._shows_thoughts or not any(turns[-1].get(key) for key in KEYS):
            return content
        opened = self.thoughts.header(self.template.render(turns[:-1], add_generation_prompt=True))
        return len(opened) if text.startswith(opened) else content

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that ends with a query, with the assistant's turn opened.

        Raises:
            UserError: the template refuses the conversation, or its text holds a mark of turns.
        """
        return self.template.encode(
            self.template.render(self._turns(messages), add_generation_prompt=True)
        )[0]

    def reference_ids(
        self, messages: Sequence[Message], context: ChatContext, turn: str
    ) -> list[int]:
        """Token ids of a user turn as it is tokenized in the dialogue, without its closing token
        and without the opening that the context ends with.

        Raises:
            UserError: the turn's first token merges with the header, or its text holds a mark of
                turns.
        """
        opening = self.opening
        whole = turn if opening is None else f"{opening} {turn}"
        dialogue = self._turns([*messages, message("user", whole)])
        start, end = self.template.span(dialogue, len(dialogue) - 1)
        content = self.template.render(dialogue)[start:end]
        content = self._lead + content if opening is None else content.removeprefix(opening)
        ids = self.template.encode(context.text + content + self._closing_text)[0]
        if ids[: len(context.ids)] != context.ids:
            raise UserError(
                f"the user turn {turn[:40]!r} merges with the user header",
                "remove the white space it begins with",
            )
        ids = ids[len(context.ids) :]
        return ids[:-1] if self.closing_id is not None else ids

    def bare_header(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the open user header with no turn before it, and no opening after it.

        What the template itself writes there stays (begin of text, system message), and so does a
        system message of the conversation.

        Raises:
            UserError: the template opens a first user turn in another way than later ones, or
                refuses it.
        """
        system = [m for m in self._turns(messages) if m["role"] == "system"]
        before, _ = self.template.around([*system, message("user", MARK)], len(system))
        text = before.removesuffix(self._lead)
        ids, _ = self._tokenize_context(text)
        if not before.endswith(self._lead) or ids[-len(self.header_ids) :] != self.header_ids:
            raise UserError(
                "the chat template opens a first user turn in another way than later ones",
                "leave the system message out",
            )
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """What a sampled turn says: special tokens kept, the token that ended it left out.

        So is what stands between an opening and the words that go on from it.
        """
        text = self.template.decode(_without_stop(ids, self.stop_ids))
        return text.removeprefix(self._lead) if self.opening is None else text.lstrip()

    def parse_response(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> Response:
        """What a sampled response says, as the content of an assistant turn, and what it thought.

        Left out are the marks that the template writes before content by itself (harmony's final
        channel), and all from the first other mark of turns on.
        """
        text = _without_stop(ids, self.response_stop_ids)
        return self.thoughts.parse(
            self.template.decode(text),
            self.template.decode(ids[len(text) :]),
            self.template.decode(prompt_ids),
            [self.template.token(i) for i in self._structure],
        )

    def describe(self) -> dict:
        """What ``run.json`` records of the chat format."""
        decode = self.template.token
        return {
            "template_hash": self.template.hash,
            "options": self.options,
            "system": self.system,
            "thinking": self.thinking,
            "date": self.date,
            "opening": self.opening,
            "opening_ids": self.opening_ids,
            "header_text": self.header_text,
            "header_ids": self.header_ids,
            "tail_text": self.tail_text,
            "tail_ids": self.tail_ids,
            "turn_end_id": self.turn_end_id,
            "closing_id": self.closing_id,
            "stop_ids": {str(i): decode(i) for i in self.stop_ids},
            "response_stop_ids": {str(i): decode(i) for i in self.response_stop_ids},
        }

    # -- rendering ----------------------------------------------------------------------------

    def _turns(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template gets them, with the system message and free of marks."""
        messages = self.thoughts.told_apart(messages)
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, message("system", self.system))
        for turn in messages:
            calls = json.dumps(turn.get("tool_calls") or "", ensure_ascii=False)
            for text in (turn["content"], turn.get(KEYS[0]) or "", calls):
                self._refuse_marks(turn["role"], text)
        if (
            self.thinking == "keep"
            and not self._shows_thoughts
            and any(turn.get(KEYS[0]) for turn in messages)
        ):
            raise UserError(
                "--thinking keep: the chat template has no place for a thought",
                "use --thinking template, or leave out conversations with one",
            )
        return [self.thoughts.given(turn) for turn in messages]

    def _refuse_marks(self, role: str, content: str) -> None:
        """Raise if a text, tokenized, would end its turn or open another one."""
        mark = next((i for i in self.template.encode(content)[0] if i in self._structure), None)
        if mark is not None:
            raise UserError(
                f"the {role} turn {content[:40]!r} holds the token {self.template.token(mark)!r}, "
                "with which the chat template structures turns",
                "remove it from the text, or the conversation",
            )

    def _tokenize_context(self, text: str, probe: str = MARK):
        """Ids and offsets of a context as they are when a user turn follows it."""
        ids, offsets = self.template.encode(text + self._lead + probe)
        count = sum(end <= len(text) for _, end in offsets)
        return ids[:count], offsets[:count]


def _without_stop(ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    ids = list(ids)
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def _last_query(turns: Sequence[Message]) -> int:
    return max(i for i, turn in enumerate(turns) if turn["role"] == "user")


def _tokens_within(offsets: Sequence[tuple[int, int]], start: int, end: int) -> range:
    """Indices of the tokens that end within the characters ``start … end``.

    A token of spaces may be of no width: some tokenizers trim spaces off their offsets.
    """
    inside = [i for i, (_, b) in enumerate(offsets) if start < b <= end]
    return range(inside[0], inside[-1] + 1) if inside else range(0)
