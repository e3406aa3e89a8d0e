"""Names of any tokens of a context and of a turn after it, such as ``response:-1``."""

import re
from collections.abc import Iterable

from ia_mech.errors import UserError

TURN = "turn"
PARTS = ("query", "response", "header", "context", TURN)
COMPONENTS = RESID, ATTN, MLP = ("resid", "attn", "mlp")
REMEDY = f"give PART:NUMBER or PART:FIRST..LAST with a part of {', '.join(PARTS)}"


def token_names(words: Iterable[str]) -> list[str]:
    """Each token by itself, once: ``turn:0..2`` is ``turn:0``, ``turn:1`` and ``turn:2``.

    Numbers count from 0; -1 is a part's last token.

    Raises:
        UserError: a word names no tokens.
    """
    found: list[str] = []
    for word in words:
        read = re.fullmatch(r"([a-z]+):(-?[0-9]{1,6})(?:\.\.(-?[0-9]{1,6}))?", str(word))
        if read is None or read[1] not in PARTS:
            raise UserError(f"{str(word)[:40]!r} names no tokens", REMEDY)
        first, last = int(read[2]), int(read[3] or read[2])
        if first > last or (first < 0) != (last < 0):
            raise UserError(f"{word!r} names no tokens: it doesn't go up on one side of 0", REMEDY)
        found += [f"{read[1]}:{number}" for number in range(first, last + 1)]
    return list(dict.fromkeys(found))


def of_turns(names: Iterable[str]) -> bool:
    """Whether any of these tokens is a turn's."""
    return any(name.startswith(f"{TURN}:") for name in names)


def place_of(name: str, spans: dict[str, range]) -> int:
    """The index of a token whose parts have these indices; -1 if its part is too short."""
    part, number = name.split(":")
    span, at = spans[part], int(number)
    return span[at] if -len(span) <= at < len(span) else -1
