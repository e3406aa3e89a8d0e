"""What an experiment changes about a context, or about the pass over it.

- *Text*: functions of a response, which give another one.
- *Splice*: keys, values and recurrent states of a part of the context are another context's.
- *Mask*: the tokens of the response see few others.
- *Replace*: states of the residual stream, at some tokens after one layer, are another context's.
- *Add*: a vector is added to states (:class:`ia_mech.steering.SteeringVector`).

A change of a pass is a small dataclass. ``laid`` makes what turns of a query's siblings are scored
after, or written after, from passes that :class:`Passes` has made once. Those that ``sampled`` has
can be sampled with :mod:`experiments.arms`, too: it gives what is changed while a conversation is
prefilled. To add a change, write such a class here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sentencex import segment

from ia_mech.data.conversations import Conversation
from ia_mech.likelihood.carried import CANDIDATES
from ia_mech.run.tokens import RESID

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.chat.format import ChatContext
    from ia_mech.engine.score import Turn
    from ia_mech.engine.splice import Hybrid
    from ia_mech.engine.state import Prefilled

Ids = tuple[int, ...]
Pairs = Sequence[tuple[int, int]]  # of recipients and donors, by their numbers

# -- text ------------------------------------------------------------------------------------------

REACH = 4  # a response is drawn from so many, the nearest in length

RETRACTIONS = (
    "On reflection, that is wrong: the opposite is true.",
    "Correction: none of the above holds, and the reverse is the case.",
    "In fact I was mistaken throughout, and exactly the contrary is right.",
)
GENERIC_QUESTIONS = (  # that an assistant might end any response with
    "Is there anything else you would like to know?",
    "Does that answer your question?",
    "Would you like me to go into more detail?",
    "What do you think?",
    "How else can I help you today?",
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?![\d]|[.,]\d)")
_FENCED = re.compile(r"(^```.*?^```[^\n]*\n?)", re.DOTALL | re.MULTILINE)
_LIST_NUMBER = re.compile(r"\s*(?:\d{1,3}|[A-Za-z])[.)]\s*")


def other_response(
    those: Sequence[Conversation], tokens: Sequence[int], recipient: int, rng: np.random.Generator
) -> str | None:
    """The response to another query of the dataset, about as long as a conversation's own, if there
    is one: drawn of the :data:`REACH` nearest in length (ties: by id), of which no two are the same
    and none is empty or the conversation's own.

    Args:
        those, tokens: conversations with their responses, and how many tokens these have.
        recipient: the number of the conversation.
        rng: draws.
    """
    own = those[recipient]
    near: dict[str, str] = {}
    order = range(len(those))
    for i in sorted(order, key=lambda i: (abs(tokens[i] - tokens[recipient]), those[i].id)):
        one, text = those[i], those[i].response or ""
        if one.dataset == own.dataset and one.source_id != own.source_id:
            near.setdefault(text.strip(), text)
    unwanted = ("", (own.response or "").strip())
    found = [text for bare, text in near.items() if bare not in unwanted][:REACH]
    return found[rng.integers(len(found))] if found else None


def sentences(text: str) -> list[str]:
    """The sentences of a text with their white space: joined they are the text.

    Sentences are told as English ones are. The end of a line ends a sentence, too (list items,
    steps of a computation). A fenced code block is one sentence.
    """
    pieces: list[str] = []
    for block in _FENCED.split(text):
        if _FENCED.fullmatch(block):
            pieces.append(block)
            continue
        for line in block.splitlines(keepends=True):
            pieces += segment("en", line)
    merged: list[str] = []
    for piece in pieces:
        # White space separates sentences: a piece of nothing else belongs to the one before, and a
        # list's number to what it numbers.
        before = merged[-1] if merged else ""
        separate = bool(before.strip() and before[-1].isspace() and piece.strip())
        if merged and (not separate or _LIST_NUMBER.fullmatch(before)):
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def shuffle_sentences(text: str, rng: np.random.Generator) -> str | None:
    """The sentences in another order; the white space between them stays where it is.

    None if there is no other order: the text has no two different sentences.
    """
    pieces = sentences(text)
    bare = [piece.strip() for piece in pieces]
    if len(set(bare)) < 2:
        return None
    order = rng.permutation(len(bare))
    while [bare[i] for i in order] == bare:
        order = rng.permutation(len(bare))
    each = zip(pieces, bare, order, strict=True)
    return "".join(piece.replace(own, bare[i], 1) for piece, own, i in each)


def truncate(text: str) -> str | None:
    """The first half of the sentences, rounded down; None if there is only one."""
    pieces = sentences(text)
    return "".join(pieces[: len(pieces) // 2]).rstrip() or None


def ask(text: str, rng: np.random.Generator) -> str:
    """The response with one of :data:`GENERIC_QUESTIONS` at its end, after a blank line if it has
    several lines."""
    question = GENERIC_QUESTIONS[rng.integers(len(GENERIC_QUESTIONS))]
    text = text.rstrip()
    return f"{text}\n\n{question}" if "\n" in text else f"{text} {question}".strip()


def contradict(text: str, answer: str | None, rng: np.random.Generator) -> str:
    """A response with a wrong final answer.

    Where the gold answer is a number, the response's last number becomes another one, in the last
    sentence that holds it and wherever it follows; neither it nor the gold answer is drawn. Where
    there is no such number, one of :data:`RETRACTIONS` is appended.
    """
    gold, found = _value_of(answer or ""), list(NUMBER.finditer(text))
    if gold is None or not found:
        retraction = RETRACTIONS[rng.integers(len(RETRACTIONS))]
        return f"{text.rstrip()} {retraction}".strip()
    last = found[-1].group()
    wrong = _other_number(last, gold, rng)
    start = 0
    for piece in sentences(text):
        if start + len(piece) > found[-1].start():
            break
        start += len(piece)

    def changed(match: re.Match[str]) -> str:
        return wrong if _value_of(match.group()) == _value_of(last) else match.group()

    return text[:start] + NUMBER.sub(changed, text[start:])


def _value_of(number: str) -> float | None:
    """What a number written as text is worth; None if the text isn't one."""
    bare = number.strip().lstrip("$")
    return float(bare.replace(",", "").replace("−", "-")) if NUMBER.fullmatch(bare) else None


def _other_number(number: str, gold: float, rng: np.random.Generator) -> str:
    """Another number near ``number`` and written like it, but not ``gold``."""
    value = _value_of(number)
    assert value is not None  # NUMBER matched it
    decimals = len(number.partition(".")[2])
    step = 10.0**-decimals
    reach = max(2, round(0.3 * abs(value) / step))
    while True:
        units = int(rng.integers(1, reach + 1)) * (1 if rng.random() < 0.5 else -1)
        wrong = round(value + units * step, decimals)
        sign_kept = value < 0 or wrong >= 0
        if wrong not in (value, gold) and sign_kept:
            grouped = "," if "," in number else ""
            return f"{wrong:{grouped}.{decimals}f}"


# -- passes over a query's siblings ----------------------------------------------------------------

RESPONSES = CANDIDATES + 1  # of a query: one is the recipient, the others are candidates
# The parts of a context: 0 the query, 1 the response, 2 the tokens between response and header,
# 3 the header, 4 the recurrent state after the header.
OWN = "own context"
HEADER, AFTER_RESPONSE, RESPONSE, QUERY = "header", "after the response", "response", "query"
STATE = "recurrent state"
RESPONSE_AND_HEADER, RESPONSE_AND_STATE = "response and header", "response and state"
QUERY_AND_RESPONSE = "query and response"  # with the state, all that is before what follows
HEADER_AND_STATE, ALL_THREE = "header and state", "response, header and state"
SITES = (HEADER, AFTER_RESPONSE, RESPONSE, QUERY)
OF_RECURRENT = (STATE, RESPONSE_AND_HEADER, RESPONSE_AND_STATE, HEADER_AND_STATE, ALL_THREE)
WHOLE_SITES = (*SITES, *OF_RECURRENT)
DONATED = {  # the parts of a site
    QUERY: {0},
    RESPONSE: {1},
    AFTER_RESPONSE: {2, 3},
    HEADER: {3},
    STATE: {4},
    RESPONSE_AND_HEADER: {1, 3},
    RESPONSE_AND_STATE: {1, 4},
    HEADER_AND_STATE: {3, 4},
    ALL_THREE: {1, 3, 4},
    QUERY_AND_RESPONSE: {0, 1, 4},
    OWN: {0, 1, 2, 3, 4},
}


class Laid(NamedTuple):
    """What turns are scored or written after.

    Attributes:
        groups: contexts.
        turn: a turn after the context of a pair, from the pair's number and the turn's tokens.
        anew: the tokens after the response are computed anew, so that they stand before the turn.
    """

    groups: "list[Prefilled]"
    turn: "Callable[[int, Ids], Turn]"
    anew: bool = False


class Passes:
    """The contexts of a unit (:class:`experiments.outcome.SiblingContexts`), prefilled once:
    ``to_response``, up to the end of the response; and ``whole``, with the open header, and states
    of all tokens after the response.

    Raises:
        UserError: a hybrid of everything isn't its donor.
    """

    def __init__(self, model: Any, unit: Any, on_tokens: Callable[[int], None]) -> None:
        from ia_mech.engine.splice import aligned, check_ceiling, continued

        self.model, self.unit, self.on_tokens = model, unit, on_tokens
        self.to_response = aligned(model, self.contexts)
        self.whole = continued(model, self.to_response, unit.after, range(len(unit.after)))
        check_ceiling(model, self.to_response, unit.after)
        check_ceiling(model, self.whole, unit.turns[0][3])

    @property
    def contexts(self) -> list[Ids]:
        """The tokens of each, up to the end of its response."""
        return [ids[:end] for ids, end in zip(self.unit.contexts, self.unit.stops, strict=True)]

    def anew(self, pairs: Pairs, response: bool = True, state: bool = False) -> "list[Hybrid]":
        """The recipients' contexts up to the response's end, with the donors' response or recurrent
        state."""
        from ia_mech.engine.splice import Hybrid, Piece

        unit, found = self.unit, []
        for d, j in pairs:
            k = j if response else d
            pieces = Piece(d, 0, unit.starts[d]), Piece(k, unit.starts[k], unit.stops[k])
            found.append(Hybrid(d, pieces, j if state else d))
        return found

    def going_on(self, hybrids: "list[Hybrid]", group: "Prefilled | None" = None) -> Laid:
        """Hybrids of a group of contexts up to their response's end (default: as they are); what
        follows is computed anew."""
        from ia_mech.engine.score import Turn
        from ia_mech.engine.splice import spliced

        return Laid([spliced(group or self.to_response, hybrids)], Turn, anew=True)


def edges_of(context: "ChatContext") -> tuple[int, ...]:
    """Where the parts of a context begin, and where the last one ends."""
    header = [at for name, at in context.positions.items() if name.startswith("header_")]
    first = min(at for at in header if at is not None)
    return 0, context.response.start, context.response.stop, first, len(context.ids)


def positions_of(places: Mapping[str, int | None], names: Sequence[str]) -> tuple[int, ...]:
    """The indices of named positions that a context has."""
    return tuple(int(at) for name in names if (at := places[name]) is not None)


class Given(NamedTuple):
    """A donor of a context that turns are sampled after, with its states by layer and position."""

    context: "Callable[[], ChatContext]"
    state: "Callable[[int, str], Tensor]"


@dataclass(frozen=True)
class Whole:
    """Everything is the donor's: the ceiling."""

    def laid(self, of: Passes, pairs: Pairs) -> Laid:
        from ia_mech.engine.score import Turn

        return Laid([of.whole], lambda n, ids: Turn(pairs[n][1], ids))


@dataclass(frozen=True)
class Splice:
    """Keys, values and recurrent state of a site (:data:`DONATED`) are the donor's."""

    site: str

    def hybrid(self, own: tuple[int, Sequence[int]], other: tuple[int, Sequence[int]]) -> "Hybrid":
        """Of recipient and donor, each with its number, and where its parts begin and end."""
        from ia_mech.engine.splice import Hybrid, Piece

        found = []
        for number in range(len(own[1]) - 1):
            which, edges = other if number in DONATED[self.site] else own
            found.append(Piece(which, *edges[number : number + 2]))
        return Hybrid(own[0], tuple(found), (other if 4 in DONATED[self.site] else own)[0])

    def laid(self, of: Passes, pairs: Pairs) -> Laid:
        from ia_mech.engine.score import Turn
        from ia_mech.engine.splice import spliced

        each = [(number, of.unit.edges(number)) for number in range(len(of.unit.contexts))]
        hybrids = [self.hybrid(each[d], each[j]) for d, j in pairs]
        return Laid([spliced(of.whole, hybrids)], Turn)

    def sampled(self, context: "ChatContext", donor: Given) -> Any:
        """What is changed in a context while it is prefilled."""
        from ia_mech.engine.splice import Foreign

        given = donor.context()
        made = self.hybrid((0, edges_of(context)), (1, edges_of(given)))
        assert made.state is not None
        return Foreign(tuple(given.ids), made.pieces, made.state)


@dataclass(frozen=True)
class Anew:
    """The donor's response, or its recurrent state there, and what follows is computed anew."""

    response: bool = True
    state: bool = False

    def laid(self, of: Passes, pairs: Pairs) -> Laid:
        return of.going_on(of.anew(pairs, self.response, self.state))


@dataclass(frozen=True)
class Layers:
    """The donor's response in some layers, or in all others, as far as rows can attend to another
    context there; what follows is computed anew."""

    first: int
    stop: int
    others: bool = False

    def laid(self, of: Passes, pairs: Pairs) -> Laid | None:
        from ia_mech.engine.installed import installed
        from ia_mech.engine.score import Turn
        from ia_mech.engine.shared import Borrowed
        from ia_mech.engine.splice import spliced

        window = range(self.first, self.stop)
        shared = installed(of.model).engine.shared
        inside = sum(number in window for number in shared)
        assert of.whole.residuals is not None
        if not inside or inside == of.whole.residuals.shape[1] - 1:  # nothing, or everything
            return None
        layers = tuple(number for number in shared if (number in window) != self.others)
        count = len(of.unit.contexts)

        def turn(n: int, ids: Ids) -> Turn:
            return Turn(pairs[n][0], ids, borrowed=Borrowed(count + n, layers))

        return Laid([of.to_response, spliced(of.to_response, of.anew(pairs))], turn, anew=True)


@dataclass(frozen=True)
class Band:
    """So many tokens of the donor's response in place of as many of the recipient's, at the same
    distance from its end; what follows is computed anew.

    Attributes:
        behind, most: how many tokens follow the band, and how many follow its start; None: it
            reaches to the start of the shorter response.
    """

    behind: int
    most: int | None

    def hybrid(self, unit: Any, recipient: int, donor: int) -> "Hybrid":
        from ia_mech.engine.splice import Hybrid, Piece

        both = recipient, donor
        lengths = [unit.stops[which] - unit.starts[which] for which in both]
        counts = min(self.most or max(lengths), *lengths), min(self.behind, *lengths)
        (own_first, first), (own_stop, stop) = (
            [unit.stops[which] - count for which in both] for count in counts
        )
        pieces = (
            Piece(recipient, 0, own_first),
            Piece(donor, first, stop),
            Piece(recipient, own_stop, unit.stops[recipient]),
        )
        return Hybrid(recipient, tuple(piece for piece in pieces if piece.start < piece.stop))

    def laid(self, of: Passes, pairs: Pairs) -> Laid | None:
        hybrids = [self.hybrid(of.unit, *pair) for pair in pairs]
        if all(len({piece.context for piece in one.pieces}) == 1 for one in hybrids):
            return None  # no response is long enough
        return of.going_on(hybrids)


@dataclass(frozen=True)
class Mask:
    """The donor's response, whose tokens saw only those of their block of so many (None: all of the
    response), or as many drawn at random; what follows is computed anew."""

    width: int | None
    random: bool = False

    def laid(self, of: Passes, pairs: Pairs) -> Laid:
        from ia_mech.engine.splice import in_blocks

        what = of.model, of.to_response, of.contexts, of.unit.starts
        group = in_blocks(*what, self.width, of.unit.seed if self.random else None)
        lengths = zip(of.unit.starts, of.unit.stops, strict=True)
        of.on_tokens(sum(stop - start for start, stop in lengths))
        return of.going_on(of.anew(pairs), group)


@dataclass(frozen=True)
class Replaced:
    """States of the residual stream after a layer, at named tokens after the response, are the
    donor's. Or what the layer's attention or MLP adds there, which
    :class:`experiments.moved_mass.MassUnder` alone puts in."""

    tokens: tuple[str, ...]
    layer: int
    component: str = RESID

    def laid(self, of: Passes, pairs: Pairs) -> Laid:
        from ia_mech.engine.intervene import Replace
        from ia_mech.engine.score import Turn

        states, at = of.whole.residuals, [of.unit.places[name] for name in self.tokens]
        assert states is not None and self.component == RESID
        each = [Replace(self.layer, tuple(at), states[j, self.layer, at]) for _, j in pairs]

        def turn(n: int, ids: Ids) -> Turn:
            return Turn(pairs[n][0], ids, interventions=(each[n],))

        return Laid([of.to_response], turn, anew=True)

    def sampled(self, context: "ChatContext", donor: Given) -> Any:
        """What is changed in a context while it is prefilled."""
        import torch

        from ia_mech.engine.intervene import Replace

        assert self.component == RESID
        states = torch.stack([donor.state(self.layer, name) for name in self.tokens])
        return Replace(self.layer, positions_of(context.positions, self.tokens), states)


Change = Whole | Splice | Anew | Layers | Band | Mask | Replaced


@dataclass(frozen=True)
class Cell:
    """A change, and what it is called.

    Attributes:
        term, layer: what it is of; layer -1 for none.
        change: what is changed.
        every: every recipient and turn is measured, in place of the first recipient and the turns
            of maps.
        written: turns are written after it, in place of those that are there.
    """

    term: str
    change: Change
    layer: int = -1
    every: bool = False
    written: bool = False
