"""Whether the turn's words show that it belongs to this conversation: the p value of a decoy.

The score is the rarity of the rarest word that the turn shares with query or response. One rare
word is better evidence than many common ones: problems of one kind share "total" and "hours", but
seldom a name. Sums of inverse document frequencies, TF-IDF cosines and a regression on several
such features took problems of one kind for one another more often (``benchmarks/grounding.md``).

The p value is conformal (Vovk, Gammerman & Shafer 2005): the share of decoys, turns held against
*another* conversation, that score as high. There is one decoy per source, so that each counts once
("subsampling once" of Dunn, Wasserman & Ramdas 2023, J. Amer. Statist. Assoc. 118:2491), and the
other conversation is that with the most similar query of the data set, so that p values stay valid
in data sets whose conversations are more alike than those of the calibration. A turn without a rare
word, such as "thanks" or "why?", can't be told from a decoy: its p value is large whatever it
followed.
"""

import json
import re
from functools import cache
from importlib.resources import files

import numpy as np

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
def table() -> tuple[dict[str, int], np.ndarray]:
    """Ranks of common stems, the commonest 1; and the decoys' scores, ``[sources]``, ascending."""
    shipped = json.loads((files("ia_mech.judge.rules") / TABLE).read_bytes())
    ranks = {word: rank for rank, word in enumerate(shipped["common"].split(), start=1)}
    return ranks, np.array(shipped["decoys"])


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


def p_value(score: int, decoys: np.ndarray) -> float:
    """``(1 + number of decoys that score as high) / (1 + number of decoys)``.

    Args:
        score: of the turn; higher is better grounded.
        decoys: ``[sources]`` scores, ascending.
    """
    above = len(decoys) - int(np.searchsorted(decoys, score, side="left"))
    return (1 + above) / (1 + len(decoys))


def _common_number(word: str) -> bool:
    digits = re.sub(r"\D", "", word).strip("0")
    return word[0].isdigit() and len(digits) < _DIGITS
