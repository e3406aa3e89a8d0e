"""What can be done to a response: another one in its place, its sentences in another order or half
of them left out, its answer contradicted, a question asked at its end."""

import re
from collections.abc import Sequence

import numpy as np
from sentencex import segment

from ia_mech.data.conversations import Conversation

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
    """The response to another query of the dataset, about as long as a conversation's own.

    Args:
        those: conversations with their responses.
        tokens: of each response.
        recipient: the number of the conversation.
        rng: draws one of the :data:`REACH` nearest in length (ties: by id), of which no two are the
            same and none is empty or the conversation's own.

    Returns:
        The response; None if there is none.
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
    moved = (
        piece.replace(own, bare[i], 1) for piece, own, i in zip(pieces, bare, order, strict=True)
    )
    return "".join(moved)


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


def contradict(text: str, answer: str | None, rng: np.random.Generator) -> tuple[str, str]:
    """A response with a wrong final answer, and whether by a number or a retraction.

    Where the gold answer is a number, the response's last number becomes another one, in the last
    sentence that holds it and wherever it follows; neither it nor the gold answer is drawn. Where
    there is no such number, one of :data:`RETRACTIONS` is appended.
    """
    gold, found = _value_of(answer or ""), list(NUMBER.finditer(text))
    if gold is None or not found:
        retraction = RETRACTIONS[rng.integers(len(RETRACTIONS))]
        return f"{text.rstrip()} {retraction}".strip(), "retraction"
    last = found[-1].group()
    wrong = _other_number(last, gold, rng)
    start = 0
    for piece in sentences(text):
        if start + len(piece) > found[-1].start():
            break
        start += len(piece)

    def changed(match: re.Match[str]) -> str:
        return wrong if _value_of(match.group()) == _value_of(last) else match.group()

    return text[:start] + NUMBER.sub(changed, text[start:]), "number"


def _value_of(number: str) -> float | None:
    """What a number written as text is worth; None if the text isn't one."""
    if not NUMBER.fullmatch(number.strip().lstrip("$")):
        return None
    return float(number.strip().lstrip("$").replace(",", "").replace("−", "-"))


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
