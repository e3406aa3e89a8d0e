"""How well a turn's words show that it belongs to this conversation: the rarest word they share.

The score is the rarity of the rarest word that the turn shares with query or response. One rare
word is better evidence than many common ones: problems of one kind share "total" and "hours", but
seldom a name. Sums of inverse document frequencies, TF-IDF cosines and a regression on several
such features took problems of one kind for one another more often (``benchmarks/grounding.md``).

A score means something beside those of decoys only: a long turn shares a rarer word with any
conversation than a short one. :mod:`ia_mech.rates` makes p values of the scores, by the decoys of
the same run. A turn without a rare word, such as "thanks" or "why?", can't be told from a decoy.
"""

import json
import re
from functools import cache
from importlib.resources import files

from ia_mech.judge.rules.features import content, stem, words
from ia_mech.judge.verdict import Item

TABLE = "grounding.json"
# Words about the exchange itself, which conversations of any subject share: common at any rank.
_TASK_STEMS = frozenset(
    stem(word)
    for word in """
    ai answer blog bullet calculate describe draft edit email essay example explain format heading
    instruction keyword letter line list message number paragraph phrase poem problem prompt
    question quote reply report request response revise rewrite sentence solution solve step story
    article style sum summarize summary task text title tone topic total translate word write
    """.split()  # noqa: SIM905
)
_DIGITS = 3  # numbers with fewer significant digits are common: 12, 50, 1,000, 0.5


@cache
def ranks() -> dict[str, int]:
    """Ranks of common stems, the commonest 1."""
    shipped = json.loads((files("ia_mech.judge.rules") / TABLE).read_bytes())
    return {word: rank for rank, word in enumerate(shipped["common"].split(), start=1)}


def rarest_shared(item: Item, ranks: dict[str, int]) -> tuple[int, str]:
    """Score and the word behind it, in lower case; (0, "") if no word is shared.

    The score is a stem's rank among the common ones, or one more than their number for any other.
    Function words and words about the exchange itself count for nothing, nor do numbers of one or
    two significant digits.
    """
    there = {*content(words(item.query)), *content(words(item.response))} - _TASK_STEMS
    best, shown = 0, ""
    for word in words(item.turn):
        if not content([word]) or stem(word) not in there or _common_number(word):
            continue
        rank = ranks.get(stem(word), len(ranks) + 1)
        if rank > best:
            best, shown = rank, word
    return best, shown


def _common_number(word: str) -> bool:
    digits = re.sub(r"\D", "", word).strip("0")
    return word[0].isdigit() and len(digits) < _DIGITS
