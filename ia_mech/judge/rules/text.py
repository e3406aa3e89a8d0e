"""Words, sentences and overlaps: what the rules judge measures with."""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import snowballstemmer
from rapidfuzz import fuzz

_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:['’][^\W\d_]+)*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_STEMMER = snowballstemmer.stemmer("english")

# Words that say nothing about what a text is about.
FUNCTION_WORDS = frozenset(
    """
    a about above after again all also am an and any are as at be because been before being below
    between both but by can cannot could did do does doing done down during each either else even
    ever every few for from further get gets go goes had has have having he her here hers herself
    him himself his how i if in into is it its itself just let like make makes many may me might
    mine more most much must my myself no nor not now of off on once one only or other our ours
    ourselves out over own per please same shall she should so some such than that the their
    theirs them themselves then there these they this those through to too two under until up upon
    us use used using very want was we were what when where whether which while who whom whose why
    will with within without would yes yet you your yours yourself yourselves i'm i've i'd i'll
    you're you've it's that's what's there's don't doesn't didn't isn't aren't wasn't can't won't
    let's
    """.split()  # noqa: SIM905
)


def words(text: str) -> list[str]:
    """Lower-case words and numbers, in order."""
    return [word.replace("’", "'") for word in _WORD.findall(text.lower())]


@lru_cache(maxsize=100_000)
def stem(word: str) -> str:
    """Snowball stem of a word; numbers stay as they are."""
    return _STEMMER.stemWord(word.removesuffix("'s"))


def stems(tokens: Sequence[str]) -> list[str]:
    return [stem(token) for token in tokens]


def content(tokens: Sequence[str]) -> list[str]:
    """Stems of the words that carry a subject."""
    return [stem(t) for t in tokens if t not in FUNCTION_WORDS and (len(t) > 1 or t.isdigit())]


def sentences(text: str) -> list[str]:
    """Sentences and lines that hold at least one word."""
    return [piece.strip() for piece in _SENTENCE.split(text) if _WORD.search(piece)]


def grams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def share(part: Sequence, of: set) -> float:
    """Share of the members of ``part`` that are in ``of``; 0 for none."""
    return sum(x in of for x in part) / len(part) if part else 0.0


def longest_run(tokens: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Longest run of tokens that both have, as (start in tokens, length)."""
    best, start = 0, 0
    number: dict[str, int] = {}
    peers = np.array([number.setdefault(peer, len(number)) for peer in other], dtype=int)
    runs = np.zeros(len(other) + 1, dtype=int)  # [j + 1]: of the run that ends at other[j]
    for i, token in enumerate(tokens):
        runs[1:] = np.where(peers == number.get(token, -1), runs[:-1] + 1, 0)
        longest = int(runs.max())
        if longest > best:
            best, start = longest, i - longest + 1
    return start, best


def alike(turn: str, pieces: Sequence[str]) -> float:
    """Largest edit similarity of the turn or its first sentence to a piece, in 0 … 1."""
    lowered = turn.lower()
    first = (sentences(lowered) or [lowered])[0]
    best = 0.0
    for piece in pieces:
        piece = piece.lower()
        best = max(best, fuzz.ratio(lowered, piece), fuzz.ratio(first, piece))
    return best / 100
