"""What a turn shares with one response and not with others: features of texts for copy bits.

A shared word counts more if fewer of the K responses have it. A word that r responses have counts
log₂(K / r): the bits that it would give alone, and 0 if all responses have it. Words of the query
don't count. Words are compared by their English Snowball stems. Each Chinese or Japanese character
is a word of its own.
"""

import re
from collections.abc import Hashable, Mapping, Sequence, Set
from functools import lru_cache

import numpy as np
import snowballstemmer

GROUPS: Mapping[str, tuple[int, ...]] = {  # in the order in which they are added
    "stems": (0, 1),
    "n-grams": (2, 3),
    "numbers": (4,),
    "names": (5,),
    "question words": (6,),
}
FEATURES = (
    "shared_stems",
    "share_of_response",
    "shared_bigrams",
    "shared_trigrams",
    "shared_numbers",
    "shared_names",
    "asked_words",
)
ASKING = frozenset("what why how when where which who whom whose".split())  # noqa: SIM905
BESIDE = 3  # words after a question word that belong to it: "how does the lens …"

_WORD = re.compile(  # a character of Chinese or Japanese, a word up to an apostrophe, a number
    r"[\u3040-\u30ff\u3400-\u9fff]|(?<!\w['’])[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|\d[\d.,]*"
)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_TITLED = re.compile(r"[^\W\d_]\w+")
_WITHIN = re.compile(r"(?<=[\w,;'’)] )[^\W\d_]\w+")  # a word stands before it, no full stop
_STEMMER = snowballstemmer.stemmer("english")


def copy_features(turns: Sequence[str], query: str, responses: Sequence[str]) -> np.ndarray:
    """Features of turns with each of the responses to one query.

    All but ``share_of_response`` are log(1 + sum of weights). The sum is over what the turn shares
    with that response and the query doesn't have, each counted once.

    - ``shared_stems``: stems of words.
    - ``share_of_response``: the share of the response's different stems that the turn has, from 0
      to 1, stems of the query included. It tells a turn that repeats the response from a turn
      after a long response.
    - ``shared_bigrams``, ``shared_trigrams``: runs of two and three stems.
    - ``shared_numbers``: numbers in digits.
    - ``shared_names``: words with a capital letter, which the response has within a sentence.
    - ``asked_words``: stems up to :data:`BESIDE` words after an English question word in the turn.

    Args:
        turns: that followed any of the responses.
        query: what the responses answer.
        responses: K texts.

    Returns:
        ``[turns, K, features]`` float, in the order of :data:`FEATURES`; concatenate those of
        several queries for :func:`ia_mech.likelihood.reaction.choice_bits`.
    """
    asked = _TextSets(query)
    given = [_TextSets(response) for response in responses]
    own, names = [one.stems for one in given], [one.names_within for one in given]
    out = np.zeros((len(turns), len(given), len(FEATURES)))
    for row, text in enumerate(turns):
        turn = _TextSets(text)
        columns = (
            _shared(turn.stems, own, asked.stems),
            np.array([len(turn.stems & one) / max(len(one), 1) for one in own]),
            *(_shared(turn.runs[n], [o.runs[n] for o in given], asked.runs[n]) for n in (2, 3)),
            _shared(turn.numbers, [one.numbers for one in given], asked.numbers),
            _shared(turn.names, names, asked.names),
            _shared(turn.asked, own, asked.stems),
        )
        out[row] = np.stack(columns, axis=1)
    return out


def stems(text: str) -> list[str]:
    """The stems of a text's words and its numbers, in their order."""
    return [_stem(word) for word in _words(text)]


class _TextSets:
    """The parts of a text, as sets."""

    def __init__(self, text: str) -> None:
        words, order = _words(text), stems(text)
        self.stems = set(order)
        self.runs = {n: set(zip(*(order[i:] for i in range(n)), strict=False)) for n in (2, 3)}
        self.numbers = set(_NUMBER.findall(text))
        self.names = {word.lower() for word in _TITLED.findall(text) if word[0].isupper()}
        self.names_within = {word.lower() for word in _WITHIN.findall(text) if word[0].isupper()}
        self.asked = {
            stem
            for i, word in enumerate(words)
            if word in ASKING
            for stem in order[i + 1 : i + 1 + BESIDE]
        }


def _words(text: str) -> list[str]:
    return [word.rstrip(".,") for word in _WORD.findall(text.lower())]


def _shared(turn: Set[Hashable], responses: Sequence[Set], query: Set[Hashable]) -> np.ndarray:
    """``[K]`` log(1 + weight of what is shared with each response and isn't in the query)."""
    weights = np.zeros(len(responses))
    for one in turn - query:
        has = np.array([one in response for response in responses])
        if has.any():
            weights += has * np.log2(len(responses) / has.sum())
    return np.log1p(weights)


@lru_cache(maxsize=100_000)
def _stem(word: str) -> str:
    return _STEMMER.stemWord(word)
