"""The conditions: how a conversation is changed. Pure and seeded; the source stays the same.

Changes to a response are functions of its text and a random generator. Each returns the new text
and, in a word, how it was made, since that may depend on the text; a text with nothing to change
stays as it is (:data:`UNCHANGED`).
"""

import re
from collections.abc import Sequence
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
from ia_mech.errors import UserError

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
class Change:
    """A changed response, and how it was made."""

    text: str
    how: str


def sentences(text: str) -> list[str]:
    """The sentences of a text with their white space: joined they are the text.

    The end of a line ends a sentence, too (list items, steps of a computation). A fenced code block
    is one sentence.
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


def truncate(text: str, fraction: float = 0.5) -> Change:
    """The first whole sentences that fit into a fraction of the characters, at least one.

    A response of one sentence is cut between words.
    """
    pieces = sentences(text)
    if len(pieces) < 2:
        return truncate_mid(text, fraction)
    limit, kept = fraction * len(text.rstrip()), 1
    while kept < len(pieces) - 1 and len("".join(pieces[: kept + 1]).rstrip()) <= limit:
        kept += 1
    return Change("".join(pieces[:kept]).rstrip(), "sentences")


def truncate_mid(text: str, fraction: float = 0.5) -> Change:
    """A fraction of the characters, cut back to the end of a word inside a sentence."""
    words = list(re.finditer(r"\S+", text))
    if len(words) < 2:
        return Change(text, UNCHANGED)
    limit = fraction * len(text.rstrip())
    kept = max(1, sum(word.end() <= limit for word in words))
    ends = {len(text[:end].rstrip()) for end in np.cumsum([len(s) for s in sentences(text)])}
    while kept > 1 and words[kept - 1].end() in ends:
        kept -= 1
    return Change(text[: words[kept - 1].end()], "words")


def ask(text: str, rng: np.random.Generator) -> Change:
    """The response with one of :data:`QUESTIONS` after it."""
    return Change(_append(text, _drawn(QUESTIONS, rng)), "question")


def neutral(rng: np.random.Generator) -> Change:
    """One of :data:`ACKNOWLEDGEMENTS` in place of the response."""
    return Change(_drawn(ACKNOWLEDGEMENTS, rng), "acknowledgement")


def contradict(text: str, answer: str | None, rng: np.random.Generator) -> Change:
    """The response with a wrong final answer.

    Where the gold answer is a number, the response's last number becomes another one, in the last
    sentence that holds it and wherever it follows; neither it nor the gold answer is drawn. Where
    there is no such number, one of :data:`RETRACTIONS` is appended.
    """
    gold, found = _value(answer or ""), list(NUMBER.finditer(text))
    if gold is None or not found:
        return Change(_append(text, _drawn(RETRACTIONS, rng)), "retraction")
    last = found[-1].group()
    wrong = _other_number(last, gold, rng)
    start = 0
    for piece in sentences(text):
        if start + len(piece) > found[-1].start():
            break
        start += len(piece)
    tail = NUMBER.sub(
        lambda match: wrong if _value(match.group()) == _value(last) else match.group(),
        text[start:],
    )
    return Change(text[:start] + tail, "number")


def shuffle(text: str, rng: np.random.Generator) -> Change:
    """The sentences in another order; the white space between them stays where it is."""
    pieces = sentences(text)
    bare = [piece.strip() for piece in pieces]
    if len(set(bare)) < 2:
        return Change(text, UNCHANGED)
    order = rng.permutation(len(bare))
    while [bare[i] for i in order] == bare:
        order = rng.permutation(len(bare))
    moved = (
        piece.replace(own, bare[i], 1) for piece, own, i in zip(pieces, bare, order, strict=True)
    )
    return Change("".join(moved), "sentences")


def _append(text: str, sentence: str) -> str:
    return f"{text.rstrip()} {sentence}".strip()


def _drawn(texts: tuple[str, ...], rng: np.random.Generator) -> str:
    return texts[rng.integers(len(texts))]


def _value(number: str) -> float | None:
    """What a number written as text is worth; None if the text isn't one."""
    if not NUMBER.fullmatch(number.strip().lstrip("$")):
        return None
    return float(number.strip().lstrip("$").replace(",", "").replace("−", "-"))


def _other_number(number: str, gold: float, rng: np.random.Generator) -> str:
    """Another number near ``number`` and written like it, but not ``gold``."""
    value = _value(number)
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


REMOVE, SWAP, HEADER_ONLY = "remove", "swap", "header_only"
STREAM = -3  # of the draws; samples and swap sources have streams of their own


# Condition → the header that is opened. What each changes: docs/perturbations.md.
CONDITIONS = {
    "truncate": USER_HEADER,
    "truncate_mid": USER_HEADER,
    "ask": USER_HEADER,
    REMOVE: USER_HEADER,
    SWAP: USER_HEADER,
    "contradict": USER_HEADER,
    "neutral": USER_HEADER,
    "shuffle": USER_HEADER,
    HEADER_ONLY: "alone",
    "header_assistant": "assistant",
    "header_no_turn_end": "no_turn_end",
    "header_no_separator": "no_turn_separator",
}


def known_conditions(names: Sequence[str]) -> list[str]:
    """The requested conditions in their usual order.

    Raises:
        UserError: an unknown name.
    """
    unknown = [name for name in names if name not in CONDITIONS]
    if unknown:
        raise UserError(f"no condition {unknown[0]!r}", f"use {', '.join(CONDITIONS)}")
    return [name for name in CONDITIONS if name in names]


def perturbed(
    conversation: Conversation, name: str, seed: int, swap_source: str | None = None
) -> Conversation:
    """A conversation under a condition.

    Draws depend on seed, condition and conversation alone. Query, system message, earlier turns,
    reference, answer, dataset and ``source_id`` stay.

    Args:
        conversation: unperturbed, with its response.
        name: one of :data:`CONDITIONS`.
        seed: of the draws.
        swap_source: the response that ``swap`` puts in place.

    Returns:
        A conversation whose metadata hold the unperturbed response (``unperturbed_response``), the
        id of its conversation (``unperturbed_id``) and how it was changed (``how``).

    Raises:
        ValueError: an unknown condition, a perturbed conversation, or no response to swap in.
    """
    if conversation.perturbation != UNPERTURBED or conversation.response is None:
        raise ValueError("only an unperturbed conversation with a response can be perturbed")
    changed = _response(conversation, name, seed, swap_source)
    about = {
        UNPERTURBED_RESPONSE: conversation.response,
        "unperturbed_id": conversation.id,
        "how": changed.how,
    }
    return replace(
        conversation.with_response(changed.text),
        id=f"{conversation.id}~{name}",
        perturbation=name,
        header=CONDITIONS[name],
        metadata=conversation.metadata | about,
    )


def _response(conversation: Conversation, name: str, seed: int, swap_source: str | None) -> Change:
    text = conversation.response or ""
    number = STREAM - list(CONDITIONS).index(name)
    rng = np.random.default_rng(list(stream_key(seed, conversation.id, number)))
    match name:
        case "truncate":
            return truncate(text)
        case "truncate_mid":
            return truncate_mid(text)
        case "ask":
            return ask(text, rng)
        case "remove":
            return Change("", "removed" if text.strip() else UNCHANGED)
        case "swap":
            if swap_source is None:
                raise ValueError("swap needs another conversation's response")
            return Change(swap_source, "swapped")
        case "contradict":
            return contradict(text, conversation.answer, rng)
        case "neutral":
            return neutral(rng)
        case "shuffle":
            return shuffle(text, rng)
        case _:
            return Change(text, "header")
