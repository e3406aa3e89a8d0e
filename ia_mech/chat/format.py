"""From a conversation to a chat context: text, token ids and named positions.

The user header is *derived* from the tokenizer's own chat template, never listed: the dialogue
query, response, user turn is rendered with a marker in place of the user turn, and what stands
before the marker is the context with its open header. Rendering the whole dialogue and cutting it
matters: templates such as Qwen3's rewrite the assistant turn once a user turn follows it.

What stands between response and user turn is cut into turn end, turn separator and user header by
one observation: a template ends a turn even where no turn follows. A special token closes the
response if the template also writes it after a last turn, or never writes it before the first user
turn. The header begins with the first other token that isn't white space.

A new template family needs no registration but in ``tests/families.py``. Where the derivation is
wrong, change the general rule in :class:`ChatFormat`, never a case for one family. What a template
can't express is a ``UserError``, and a position that it lacks is None: neither is guessed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ia_mech.chat.template import MARK, PINNED_DATE, ChatTemplate, Joints, Message, message
from ia_mech.chat.thoughts import KEYS, Response, Thoughts
from ia_mech.chat.tools import refuse_hidden
from ia_mech.errors import UserError

# First tokens of many kinds: the header's ids must not depend on how the user turn begins.
_PROBES = (MARK, "7 apples", "(why?)", "éclair", '"Yes"', "the", "😀", "日本")
# What ``run.json`` records of a chat format as it is.
RECORDED = (
    *("options", "system", "thinking", "date", "opening", "opening_ids", "header_text"),
    *("header_ids", "tail_text", "tail_ids", "turn_end_id", "closing_id"),
)


@dataclass(frozen=True)
class ChatContext:
    """Query and response rendered by the model's template, ending with the open user header and,
    after it, the words that the user turn is made to begin with, if there are any.

    ``positions`` maps every name of ``ChatFormat.position_names`` to an index into ``ids``, or to
    None where this context lacks the token; ``header_last`` is the header's own last token, whether
    or not words follow it. ``query`` and ``response`` are the indices of their tokens; empty where
    there are none.
    """

    text: str
    ids: list[int]
    positions: dict[str, int | None]
    query: range = range(0)
    response: range = range(0)


@dataclass(frozen=True)
class TurnIds:
    """Token ids of a given user turn as the dialogue holds it. ``words`` go up to the token that
    holds the turn's last character. ``end`` closes the turn: a mark, and white space before it
    where the template writes some; it is empty where the template closes user turns with text."""

    words: list[int]
    end: list[int]

    @property
    def whole(self) -> list[int]:
        return [*self.words, *self.end]


class ChatFormat:
    """What a tokenizer's template says about user turns, derived and verified.

    Args:
        tokenizer: a fast tokenizer: offsets into the text are needed.
        system: a system message for every conversation that has none; None leaves it to the
            template, which may insert one of its own.
        thinking: ``template`` renders the assistant turn as the template does once a user turn
            follows; ``keep`` renders it as the template does when it is last (for Qwen3: with its
            thought, or an empty block).
        date: ISO date for templates that print today's date.
        eos_ids: stop ids that the model's generation configuration lists.
        opening: words that every user turn is made to begin with. They end the context and are no
            part of the turn, which then begins with a space, or ends at once.
        options: variables that the template is always given, such as ``enable_thinking``.
        template: a chat template in place of the tokenizer's own.

    Attributes:
        template: the chat template at this date, with these options.
        thoughts: what the template does with thoughts.
        header_text, header_ids: the user header.
        tail_text, tail_ids: all that stands between a response and the user turn.
        turn_end_id: the token that closes the assistant turn, or None.
        assistant_header_ids: the ids that open an assistant turn, whether its text is given or
            asked for; empty if none do.
        opening_ids: the ids of the words that user turns are made to begin with, if any.
        closing_id: the first token after a user turn that an answer follows, white space aside;
            None if that is text. If nothing closes user turns, it is what opens the assistant's.
        stop_ids: ids that end a sampled user turn.
        position_names, header_names: all named positions, and those of the header, in order.

    Raises:
        UserError: there is no template, or no user role in it; the header can't be told; an opening
            merges with what stands beside it, or the template changes it; the template never reads
            an option; or ``keep`` is asked of a template that leaves all thoughts out.
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
        template: str | None = None,
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
            self.template = ChatTemplate(tokenizer, date, options, template)
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
        joints = self.template.joints()
        if joints.tail in ("", joints.asked):
            raise UserError(
                "the chat template doesn't mark user turns apart from assistant turns",
                "use a template that marks every turn's role",
            )
        if joints.last is None and self.thinking == "keep":
            raise UserError(
                "the chat template doesn't show a response that comes last",
                "use --thinking template",
            )
        self._refused = joints.refused
        self._derive_header(joints)
        self._derive_stops(joints, eos_ids)

    def _derive_header(self, joints: Joints) -> None:
        before = MARK.join((joints.first, joints.asked, joints.tail))
        self.tail_text = joints.tail
        # White space that merges with the user's first token ("[INST] Why" -> "[INST]", "▁Why")
        # belongs to the user turn; the header then ends before it.
        self._lead = ""
        while not self._is_stable(before):
            if not before[-1:].isspace():
                raise UserError(
                    "the ids of the user header depend on how the user turn begins",
                    "use a tokenizer whose template ends the header with a token of its own",
                )
            before, self._lead = before[:-1], before[-1] + self._lead
        self.tail_text = self.tail_text.removesuffix(self._lead)
        ids, offsets = self._tokenize_context(before)
        self.tail_ids, starts = _tokens_from(ids, offsets, len(before) - len(self.tail_text))
        ends = self._ends(joints)
        gap = self._first_but(ends, self.tail_ids)
        self.header_ids = self.tail_ids[gap:]
        if not self.header_ids:
            raise UserError(
                "the chat template opens user turns with no token of its own",
                "use a template that marks every turn's role",
            )
        self.header_text = before[starts[gap] :]
        closed = [i for i in range(gap) if self.tail_ids[i] in self._marks]
        # Index within the tail; the separator is what stands between turn end and header, if
        # anything does.
        self._turn_end = closed[-1] if closed else None
        self._separator = gap - 1 if closed and gap - 1 > closed[-1] else None
        self.turn_end_id = None if self._turn_end is None else self.tail_ids[self._turn_end]
        self._closed_tail = self.tail_ids[self._turn_end :]
        numbers = range(len(self.header_ids) - 1)
        self.header_names = (*(f"header_{i}" for i in numbers), "header_last")
        before_header = ("query_end", "response_end", "turn_end", "turn_separator")
        self.position_names = (*before_header, *self.header_names)
        query, openings = joints.first + MARK, []
        for opening in (joints.asked, joints.prompt):
            ids, offsets = self.template.encode(query + opening.removesuffix(self._lead))
            openings.append(_tokens_from(ids, offsets, len(query))[0])
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(*openings, strict=False))
        answer = [token for token, _ in alike]
        self.assistant_header_ids = answer[self._first_but(ends, answer) :]

    def _is_stable(self, context: str) -> bool:
        """Whether a context has ids of its own, the same however the user turn begins."""
        (ids, offsets), *others = (self._tokenize_context(context, probe) for probe in _PROBES)
        return offsets[-1][1] == len(context) and all(other == ids for other, _ in others)

    def _ends(self, joints: Joints) -> set[int]:
        """Marks that close a turn, rather than open the next one."""
        ends = self._marks.intersection(self.tail_ids)
        ends -= set(self.template.encode(joints.first)[0])  # no turn ends before one has begun
        for text in (joints.last or "", joints.queried):
            ends |= self._marks.intersection(self.template.encode(text)[0])
        end_of_text = self.tokenizer.eos_token_id
        if any(i != end_of_text and self._is_word(i) for i in self.tail_ids):
            ends.add(end_of_text)
        return ends

    def _is_word(self, token: int) -> bool:
        """Whether a token is more than white space."""
        return bool(self.tokenizer.decode([token]).strip())

    def _first_but(self, ends: set[int], ids: list[int]) -> int:
        """Index of the first token that is neither white space nor among these marks."""
        others = (i for i, token in enumerate(ids) if token not in ends and self._is_word(token))
        return next(others, len(ids))

    def _first_mark(self, text: str) -> tuple[int, str] | None:
        """The mark with which a text begins, and white space before it; None if words come
        first."""
        for token, (start, _) in zip(*self.template.encode(text), strict=True):
            if token in self._marks:
                return token, text[:start]
            if self._is_word(token):
                return None
        return None

    def _derive_stops(self, joints: Joints, eos_ids: Sequence[int]) -> None:
        closing = self._first_mark(joints.answered)
        self.closing_id = closing[0] if closing else None
        self._closing_text = closing[1] + self.template.token(closing[0]) if closing else ""
        # For each mark that ends a turn, the white space that the template writes before it.
        texts = (joints.tail, joints.queried, joints.prompt, joints.answered)
        self._spaces = dict(filter(None, map(self._first_mark, texts)))
        eos = {i for i in (self.tokenizer.eos_token_id, *eos_ids) if i is not None}
        self.stop_ids = sorted({*self._spaces, *eos})
        # A response is stopped as ``generate`` would stop it. If the template ends a last assistant
        # turn with a token outside the eos set (some fine-tunes), that token stops it, too; if it
        # writes nothing there, the mark that follows a response in a dialogue does.
        last = self._first_mark(joints.last or "") or self._first_mark(joints.tail)
        self.response_stop_ids = sorted(eos | ({last[0]} if last else set()))
        # Marks that no turn's text may hold: as text they would end the turn or open another one.
        # Other tokens that the template writes are refused only if flagged as special: <think> is
        # allowed.
        others = (joints.first, joints.asked, joints.last or "", joints.system)
        written = self.template.encode(MARK.join((*texts, *others)))[0]
        added = self.tokenizer.added_tokens_decoder
        special = {i for i in written if i in added and added[i].special}
        turning = {*self.tail_ids, *self.stop_ids, *self.response_stop_ids} & self._marks
        self._structure = special | turning

    def _derive_thoughts(self) -> None:
        self.thoughts = Thoughts(self.template, self._marks)
        self._shows_thoughts = self.thoughts.shown(followed=self.thinking == "template")
        if self.thinking == "keep" and self.thoughts.marks and not self._shows_thoughts:
            raise UserError(
                "--thinking keep: the chat template leaves out a response's thought",
                "use --thinking template",
            )

    def _derive_opening(self, opening: str) -> None:
        self._refuse_marks("user", opening)
        dialogue = [message("user", "What is it?"), message("assistant", "It is blue.")]
        whole = self.template.render([*dialogue, message("user", f"{opening} {MARK}")])
        if f"{self.header_text}{self._lead}{opening} {MARK}" not in whole:
            raise UserError(
                f"the chat template changes the words of --opening {opening[:40]!r}",
                "give other words",
            )
        context = self.context(dialogue)  # without an opening yet
        text = f"{context.text}{self._lead}{opening}"
        self.opening_ids = self.template.encode(text)[0][len(context.ids) :]
        for following in (self._closing_text.lstrip(), *(f" {probe}" for probe in _PROBES)):
            self._refuse_merged(text + following, [*context.ids, *self.opening_ids])

    def _refuse_merged(self, text: str, ids: list[int]) -> None:
        """Raise unless a text with an opening begins with these ids."""
        if self.template.encode(text)[0][: len(ids)] != ids:
            raise UserError(
                f"the words of --opening {str(self.opening)[:40]!r} merge with text beside them",
                "begin and end them with a letter or common punctuation",
            )

    # -- contexts -----------------------------------------------------------------------------

    def context(self, messages: Sequence[Message]) -> ChatContext:
        """Render a conversation that ends with a response (it may be empty) and open the user
        header after it.

        Raises:
            UserError: the template refuses the conversation; its text holds a mark that structures
                turns, or changes the header's tokens.
        """
        turns = self._turns(messages)
        last = len(turns) - 1
        dialogue = [*turns, message("user", MARK)] if self.thinking == "template" else turns
        asked = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
        shown = (asked, *range(last, len(dialogue)))
        whole, (query, response, *user) = self.template.spans(dialogue, *shown)
        text = whole[: response[1]] + self.tail_text
        if user and whole[: user[0][0]] != text + self._lead:
            raise UserError(
                "the chat template opens this user turn differently from others",
                "use a template that opens every user turn alike",
            )
        ids, offsets = self._tokenize_context(text)
        if ids[-len(self.header_ids) :] != self.header_ids:
            raise UserError(
                "the user header's tokens merge with the end of this response",
                "remove the conversation, or change how its response ends",
            )
        positions = dict.fromkeys(self.position_names)
        query_tokens = _tokens_within(offsets, *query)
        begin = self._response_begin(turns, text, response[0])
        response_tokens = _tokens_within(offsets, begin, response[1])
        positions["query_end"] = query_tokens[-1] if query_tokens else None
        positions["response_end"] = response_tokens[-1] if response_tokens else None
        tail = len(ids) - len(self.tail_ids)
        # White space before the turn end may be in the response's last token.
        if self._turn_end is not None and ids[tail + self._turn_end :] == self._closed_tail:
            positions["turn_end"] = tail + self._turn_end
            if self._separator is not None:
                positions["turn_separator"] = tail + self._separator
        positions |= zip(self.header_names, range(len(ids))[-len(self.header_ids) :], strict=True)
        if self.opening_ids:
            text, ids = f"{text}{self._lead}{self.opening}", [*ids, *self.opening_ids]
            self._refuse_merged(f"{text} {MARK}", ids)
        return ChatContext(text, ids, positions, query_tokens, response_tokens)

    def _response_begin(self, turns: Sequence[Message], text: str, content: int) -> int:
        """Where a response begins (a character): at its thought, if the context shows that."""
        if not self._shows_thoughts or not any(turns[-1].get(key) for key in KEYS):
            return content
        opened = self.thoughts.header(self.template.render(turns[:-1], add_generation_prompt=True))
        return len(opened) if text.startswith(opened) else content

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that ends with a query, with the assistant's turn opened.

        Raises:
            UserError: as :meth:`context`.
        """
        text = self.template.render(self._turns(messages), add_generation_prompt=True)
        return self.template.encode(text)[0]

    def turn_ids(self, messages: Sequence[Message], context: ChatContext, turn: str) -> TurnIds:
        """Token ids of a user turn as it is tokenized in the dialogue, without the opening that the
        context ends with.

        Raises:
            UserError: the turn's first token merges with the header, or its text holds a mark that
                structures turns.
        """
        opening = self.opening
        whole = turn if opening is None else f"{opening} {turn}"
        dialogue = self._turns([*messages, message("user", whole)])
        rendered, ((start, end),) = self.template.spans(dialogue, len(dialogue) - 1)
        content = rendered[start:end]
        content = self._lead + content if opening is None else content.removeprefix(opening)
        said = context.text + content
        ids, offsets = self.template.encode(said + self._closing_text)
        if ids[: len(context.ids)] != context.ids:
            raise UserError(
                f"the user turn {turn[:40]!r} merges with the user header",
                "give it words, without white space before them",
            )
        end_ids, _ = _tokens_from(ids, offsets, len(said))
        return TurnIds(ids[len(context.ids) : len(ids) - len(end_ids)], end_ids)

    def bare_header(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the open user header with no turn before it, and no opening after it.
        System messages stay, the template's or the conversation's, and what begins a text.

        Raises:
            UserError: the template refuses a first user turn, or opens it differently from later
                ones.
        """
        system = [m for m in self._turns(messages) if m["role"] == "system"]
        turns = [*system, message("user", MARK)]
        whole, ((start, _),) = self.template.spans(turns, len(system))
        before = whole[:start]
        text = before.removesuffix(self._lead)
        ids, _ = self._tokenize_context(text)
        if not before.endswith(self._lead) or ids[-len(self.header_ids) :] != self.header_ids:
            raise UserError(
                "the chat template opens a first user turn differently from later ones",
                "leave the system message out",
            )
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn, with special tokens. Left out are the token that ended it,
        white space that the template writes before that, and what stands after an opening."""
        text = self.template.decode(_without_stop(ids, self.stop_ids))
        if ids:
            text = text.removesuffix(self._spaces.get(ids[-1], ""))
        return text.removeprefix(self._lead) if self.opening is None else text.lstrip()

    def parse_response(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> Response:
        """The content of a sampled response, as an assistant turn has it, and its thought.

        It leaves out the marks that the template itself writes before a content (harmony's final
        channel), and all from the first other mark that structures turns.
        """
        text = _without_stop(ids, self.response_stop_ids)
        return self.thoughts.parse(
            self.template.decode(text),
            self.template.decode(prompt_ids),
            [self.template.token(i) for i in self._structure],
        )

    @property
    def position_tokens(self) -> dict[str, str]:
        """The text of the token at each position whose token is the same in all contexts."""
        at = {"turn_end": self._turn_end, "turn_separator": self._separator}
        at |= zip(self.header_names, range(-len(self.header_ids), 0), strict=True)
        return {
            name: self.template.decode([self.tail_ids[index]])
            for name in self.position_names
            if (index := at.get(name)) is not None
        }

    def describe(self) -> dict:
        """What ``run.json`` records of the chat format."""
        token = self.template.token
        return {
            "template": self.template.source,
            **{name: getattr(self, name) for name in RECORDED},
            "stop_ids": {str(i): token(i) for i in self.stop_ids},
            "response_stop_ids": {str(i): token(i) for i in self.response_stop_ids},
        }

    # -- rendering ----------------------------------------------------------------------------

    def _turns(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template gets them, with a system message and checked for marks."""
        messages = self.thoughts.told_apart(messages)
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, message("system", self.system))
        if messages[0]["role"] == "system" and self._refused:
            raise UserError(
                f"a system message can't be given: {self._refused}",
                "leave it out, or put its words at the start of the first query",
            )
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
        turns = [self.thoughts.given(turn) for turn in messages]
        refuse_hidden(self.template, turns)
        return turns

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


def _tokens_from(
    ids: list[int], offsets: Sequence[tuple[int, int]], start: int
) -> tuple[list[int], list[int]]:
    """Ids of the tokens that begin at this character or later, and where they begin."""
    first = next((i for i, (a, b) in enumerate(offsets) if start <= a and start < b), len(ids))
    return ids[first:], [a for a, _ in offsets[first:]]


def _tokens_within(offsets: Sequence[tuple[int, int]], start: int, end: int) -> range:
    """Indices of the tokens that end within the characters ``start … end``, or hold the last one.

    A token of spaces may have no width: some tokenizers trim spaces off their offsets.
    """
    inside = [i for i, (a, b) in enumerate(offsets) if start < b <= end or start <= a < end < b]
    return range(inside[0], inside[-1] + 1) if inside else range(0)
