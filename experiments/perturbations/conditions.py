"""The conditions: what is changed of a conversation. Pure and seeded; the source stays the same.

Changes to a response: pure functions of its text and a random generator.

Each returns the new text and, in a word, how it was made: what a change does may depend on the
text, and a text that has nothing to change stays as it is (:data:`UNCHANGED`).
"""

import re
from dataclasses import dataclass, replace

import numpy as np
from sentencex import segment

from ia_mech.data.conversations import (
    UNPERTURBED,
    UNPERTURBED_RESPONSE,
    USER_HEADER,
    Conversation,
)
from ia_mech.engine.sampling import stream_key

UNCHANGED = "unchanged"

QUESTIONS = (
    "Does that answer your question?",
    "Is there a part of this that I should explain further?",
    "Would you like to see another example?",
    "What would you like to look at next?",
    "Shall I go into more detail on any of this?",
)
ACKNOWLEDGEMENTS = ("Okay.", "Alright.", "I see.", "Noted.", "Understood.")
RETRACTIONS = (
    "On reflection, that is wrong: the opposite is true.",
    "Correction: none of the above holds, and the reverse is the case.",
    "In fact I was mistaken throughout, and exactly the contrary is right.",
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?![\d]|[.,]\d)")
_FENCED = re.compile(r"(^```.*?^```[^\n]*\n?)", re.DOTALL | re.MULTILINE)
_LIST_NUMBER = re.compile(r"\s*(?:\d{1,3}|[A-Za-z])[.)]\s*")


@dataclass(frozen=True)
class Text:
    """A changed response.

    Attributes:
        text: of the response.
        how: what was done.
    """

    text: str
    how: str


def sentences(text: str) -> list[str]:
    """The sentences of a text, white space and all: joined they are the text.

    A line ends a sentence, too (list items, steps of a computation), but not within a fenced code
    block, which is one sentence.
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
        # Sentences are set apart by white space; what is nothing else belongs to the one before,
        # and a list's number to what it numbers.
        before = merged[-1] if merged else ""
        apart = before.strip() and before[-1].isspace() and piece.strip()
        apart = apart and not _LIST_NUMBER.fullmatch(before)
        if merged and not apart:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def truncate(text: str, fraction: float = 0.5) -> Text:
    """The first whole sentences that fit into a fraction of the characters, but one at least.

    A response of one sentence is cut between words.
    """
    pieces = sentences(text)
    if len(pieces) < 2:
        return truncate_mid(text, fraction)
    limit, kept = fraction * len(text.rstrip()), 1
    while kept < len(pieces) - 1 and len("".join(pieces[: kept + 1]).rstrip()) <= limit:
        kept += 1
    return Text("".join(pieces[:kept]).rstrip(), "sentences")


def truncate_mid(text: str, fraction: float = 0.5) -> Text:
    """A fraction of the characters, cut back to the end of a word inside a sentence."""
    words = list(re.finditer(r"\S+", text))
    if len(words) < 2:
        return Text(text, UNCHANGED)
    limit = fraction * len(text.rstrip())
    kept = max(1, sum(word.end() <= limit for word in words))
    ends = {len(text[:end].rstrip()) for end in np.cumsum([len(s) for s in sentences(text)])}
    while kept > 1 and words[kept - 1].end() in ends:
        kept -= 1
    return Text(text[: words[kept - 1].end()], "words")


def ask(text: str, rng: np.random.Generator) -> Text:
    """The response with one of :data:`QUESTIONS` after it."""
    return Text(_append(text, _drawn(QUESTIONS, rng)), "question")


def neutral(rng: np.random.Generator) -> Text:
    """One of :data:`ACKNOWLEDGEMENTS` in place of the response."""
    return Text(_drawn(ACKNOWLEDGEMENTS, rng), "acknowledgement")


def contradict(text: str, answer: str | None, rng: np.random.Generator) -> Text:
    """The response with a wrong final answer.

    Where the gold answer is a number, the response's last number becomes another one, in the last
    sentence that holds it and wherever it follows; neither it nor the gold answer is drawn. Where
    there is no such number, one of :data:`RETRACTIONS` is appended.
    """
    gold, found = _value(answer or ""), list(NUMBER.finditer(text))
    if gold is None or not found:
        return Text(_append(text, _drawn(RETRACTIONS, rng)), "retraction")
    said = found[-1].group()
    wrong = _other_number(said, gold, rng)
    start = 0
    for piece in sentences(text):
        if start + len(piece) > found[-1].start():
            break
        start += len(piece)
    tail = NUMBER.sub(
        lambda match: wrong if _value(match.group()) == _value(said) else match.group(),
        text[start:],
    )
    return Text(text[:start] + tail, "number")


def shuffle(text: str, rng: np.random.Generator) -> Text:
    """The sentences in another order; the white space between them stays where it is."""
    pieces = sentences(text)
    said = [piece.strip() for piece in pieces]
    if len(set(said)) < 2:
        return Text(text, UNCHANGED)
    order = rng.permutation(len(said))
    while [said[i] for i in order] == said:
        order = rng.permutation(len(said))
    moved = (
        piece.replace(own, said[i], 1) for piece, own, i in zip(pieces, said, order, strict=True)
    )
    return Text("".join(moved), "sentences")


def _append(text: str, sentence: str) -> str:
    return f"{text.rstrip()} {sentence}".strip()


def _drawn(texts: tuple[str, ...], rng: np.random.Generator) -> str:
    return texts[rng.integers(len(texts))]


def _value(number: str) -> float | None:
    """What a number written as text is worth; None if the text isn't one."""
    if not NUMBER.fullmatch(number.strip().lstrip("$")):
        return None
    return float(number.strip().lstrip("$").replace(",", "").replace("−", "-"))


def _other_number(said: str, gold: float, rng: np.random.Generator) -> str:
    """A number written like ``said``, near it, that is neither ``said`` nor ``gold``."""
    value = _value(said)
    decimals = len(said.partition(".")[2])
    step = 10.0**-decimals
    reach = max(2, round(0.3 * abs(value) / step))
    while True:
        units = int(rng.integers(1, reach + 1)) * (1 if rng.random() < 0.5 else -1)
        wrong = round(value + units * step, decimals)
        sign_kept = value < 0 or wrong >= 0
        if wrong not in (value, gold) and sign_kept:
            grouped = "," if "," in said else ""
            return f"{wrong:{grouped}.{decimals}f}"


REMOVE, SWAP, BARE = "remove", "swap", "header_only"
STREAM = -3  # of the draws; samples and lenders have streams of their own


@dataclass(frozen=True)
class Condition:
    """What is changed.

    Attributes:
        about: in a line.
        header: which header is opened.
    """

    about: str
    header: str = USER_HEADER


CONDITIONS = {
    "truncate": Condition("the first half of the response, cut at a sentence's end"),
    "truncate_mid": Condition("the first half of the response, cut inside a sentence"),
    "ask": Condition("a generic question after the response"),
    REMOVE: Condition("an empty response"),
    SWAP: Condition("another conversation's response of similar length, same dataset"),
    "contradict": Condition("a wrong final answer (a number), or else a sentence that retracts"),
    "neutral": Condition("an empty acknowledgement in place of the response"),
    "shuffle": Condition("the response's sentences in random order"),
    BARE: Condition("the bare user header, with no conversation", "alone"),
    "header_assistant": Condition("an assistant header in the user header's place", "assistant"),
    "header_no_turn_end": Condition("the token that ends the response left out", "no_turn_end"),
    "header_no_separator": Condition(
        "what stands between turn end and header left out", "no_turn_separator"
    ),
}


def perturbed(
    conversation: Conversation, name: str, seed: int, lender: str | None = None
) -> Conversation:
    """A conversation under a condition.

    What is drawn depends on seed, condition and conversation alone. Query, system message, earlier
    turns, reference, answer, dataset and ``source_id`` stay.

    Args:
        conversation: unperturbed, with its response.
        name: one of :data:`CONDITIONS`.
        seed: of the draws.
        lender: the response that ``swap`` puts in place.

    Returns:
        A conversation whose metadata says what its response was (``unperturbed_response``), whose
        it was (``unperturbed_id``) and how it was changed (``how``).

    Raises:
        ValueError: an unknown condition, a perturbed conversation, or no lender to swap with.
    """
    if conversation.perturbation != UNPERTURBED or conversation.response is None:
        raise ValueError("only an unperturbed conversation with a response can be perturbed")
    changed = _response(conversation, name, seed, lender)
    about = {
        UNPERTURBED_RESPONSE: conversation.response,
        "unperturbed_id": conversation.id,
        "how": changed.how,
    }
    return replace(
        conversation.with_response(changed.text),
        id=f"{conversation.id}~{name}",
        perturbation=name,
        header=CONDITIONS[name].header,
        metadata=conversation.metadata | about,
    )


def _response(conversation: Conversation, name: str, seed: int, lender: str | None) -> Text:
    text = conversation.response
    number = STREAM - list(CONDITIONS).index(name)
    rng = np.random.default_rng(list(stream_key(seed, conversation.id, number)))
    if name == "truncate":
        return truncate(text)
    if name == "truncate_mid":
        return truncate_mid(text)
    if name == "ask":
        return ask(text, rng)
    if name == REMOVE:
        return Text("", "removed" if text.strip() else UNCHANGED)
    if name == SWAP:
        if lender is None:
            raise ValueError("swap needs another conversation's response")
        return Text(lender, "swapped")
    if name == "contradict":
        return contradict(text, conversation.answer, rng)
    if name == "neutral":
        return neutral(rng)
    if name == "shuffle":
        return shuffle(text, rng)
    return Text(text, "header")
