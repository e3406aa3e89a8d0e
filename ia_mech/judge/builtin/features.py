"""What the judge reads off a turn, its query and its response: numbers, each with a name.

All are of the turn, alone or against the two other texts. None is of query and response alone, or
labels would differ between conversations for reasons that have nothing to do with the turn. Words
are compared as word pieces of the encoder, with their states (what they mean where they stand).
"""

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from itertools import count

import numpy as np

_LISTS = tomllib.loads((files("ia_mech.judge.builtin") / "words.toml").read_text("utf-8"))
FUNCTION_WORDS, _THANKS, _WITH_THANKS, _FOREIGN = (
    frozenset(_LISTS[name].split()) for name in ("function", "thanks", "with_thanks", "foreign")
)
_TEMPLATE, _MARKER, _PLANNING, _QUESTION = (
    re.compile(_LISTS[name], re.I) for name in ("template", "marker", "planning", "question")
)
_AT_START = {name: re.compile(pattern) for name, pattern in _LISTS["at_start"].items()}
_ANYWHERE = {name: re.compile(pattern, re.M) for name, pattern in _LISTS["anywhere"].items()}
WORD = re.compile(r"\w+(?:['’]\w+)*")
_BREAK = re.compile(r"(?<=[.!?])\s+|\n+")
_ENDED = re.compile(r"[.!?:`\"')\]]\s*$")


@dataclass(frozen=True)
class Text:
    """A text as the encoder reads it. States and meanings have length 1.

    A piece weighs nothing in function words and punctuation, else the more the rarer it is, at
    most 1.
    """

    text: str
    ids: np.ndarray  # [pieces], of its word pieces
    states: np.ndarray  # [pieces, width]
    weights: np.ndarray  # [pieces]
    meaning: np.ndarray  # [width], of the whole text
    spans: list[tuple[int, int]]  # where its sentences begin and end
    parts: np.ndarray  # [sentences, width], the sentences' meanings


def spoken(turn: str) -> str:
    """The turn's first part that isn't blank, of those between marks of a chat template."""
    marks = [*_TEMPLATE.finditer(turn)]
    starts, ends = [0, *(m.end() for m in marks)], [*(m.start() for m in marks), len(turn)]
    parts = (turn[a:b] for a, b in zip(starts, ends, strict=True))
    return next((part for part in parts if part.strip()), "")


def sentences(text: str) -> list[tuple[int, int]]:
    """Where the sentences and lines that hold a word begin and end; of none, the whole text."""
    breaks = [*_BREAK.finditer(text)]
    starts, ends = [0, *(b.end() for b in breaks)], [*(b.start() for b in breaks), len(text)]
    found = [(a, b) for a, b in zip(starts, ends, strict=True) if WORD.search(text, a, b)]
    return found or [(0, len(text))]


# -- what no classifier should decide --------------------------------------------------------------


def settled(query: str, response: str, turn: str) -> tuple[str, str] | None:
    """(category, evidence) where a rule settles it, else None; ``turn`` is what is spoken of it."""
    words = [word.replace("’", "'") for word in WORD.findall(turn.lower())]
    letters = [c for c in turn if c.isalpha()]
    foreign = sum(not (c < "\u0250" or "\u1e00" <= c < "\u1f00") for c in letters)
    if not words:
        return "degenerate", "no word or number in it"
    if len(letters) > 3 and foreign > len(letters) / 2:
        return "cannot_assess", f"{foreign} of {len(letters)} letters are not Latin"
    others = [word for word in words if word in _FOREIGN]
    if len({*others}) > 1 and len(others) > sum(word in FUNCTION_WORDS for word in words):
        return "cannot_assess", f"{', '.join(dict.fromkeys(others))} are of another language"
    if not WORD.search(query) and not WORD.search(response):
        return "cannot_assess", "query and response hold no words"
    if again := _loop(words):
        return "degenerate", again
    if marker := _MARKER.search(turn):
        return "plans", f"the marker {marker[0]!r}"
    plan = _PLANNING.search(turn)
    if plan and plan[0].lower() not in f"{query}\n{response}".lower():
        return "plans", f"speaks about the answer: {plan[0]!r}"
    nothing_else = {*words} <= _THANKS | _WITH_THANKS | FUNCTION_WORDS
    if nothing_else and _THANKS & {*words[:2]} and len(words) <= 14:
        return "generic", "nothing but words of thanks, closing or assent"
    return None


def _loop(words: list[str]) -> str:
    """Evidence that the turn goes round in circles; empty if there is none."""
    if len(words) >= 6 and len({*words}) <= 2:
        return f"{len(words)} words, {len({*words})} different ones"
    for n in range(1, 13):
        times = next(k for k in count(1) if words[-n * (k + 1) : -n * k] != words[-n:])
        if times >= 3 and times * n >= 9 and times * n > 0.6 * len(words):
            return f"{' '.join(words[-n:])!r} {times} times in a row"
    return ""


# -- form and voice --------------------------------------------------------------------------------


def form(turn: str, whole: str) -> dict[str, float]:
    """How the turn is written, and whose voice it is; ``whole`` is the turn with all its marks."""
    low = turn.strip().lower().replace("’", "'")
    words = WORD.findall(low)
    triples = [*zip(words, words[1:], words[2:], strict=False)]
    found = {name: float(bool(pattern.match(low))) for name, pattern in _AT_START.items()}
    found |= {name: float(bool(pattern.search(low))) for name, pattern in _ANYWHERE.items()}
    asks = "?" in turn or _QUESTION.match(low) or found["opens_command"]
    return found | {
        "words": float(np.log1p(len(words))),
        "repeated": 1 - len({*triples}) / max(len(triples), 1),
        "cut_at_a_mark": float(len(turn) < len(whole.strip())),
        "unfinished": float(not _ENDED.search(turn)),
        "statement": float(not asks),
    }


# -- relations to query and response ---------------------------------------------------------------


def longest_run(ids: np.ndarray, others: np.ndarray) -> int:
    """Length of the longest run of pieces that both have."""
    best, runs = 0, np.zeros(len(others) + 1, int)  # [j + 1]: of the run that ends at others[j]
    for i in ids:
        runs[1:] = np.where(others == i, runs[:-1] + 1, 0)
        best = max(best, int(runs.max()))
    return best


def relations(turn: Text, query: Text, response: Text) -> dict[str, float]:
    """What the turn has of the two texts: the same words, words of like meaning, its meaning."""
    weights, total = turn.weights, turn.weights.sum() + 1e-6
    in_query, in_response = np.isin(turn.ids, query.ids), np.isin(turn.ids, response.ids)
    triples, known = (
        {*zip(x, x[1:], x[2:], strict=False)} for x in (turn.ids.tolist(), query.ids.tolist())
    )
    near_query, near_response = (
        (turn.states @ text.states.T).max(1, initial=-1) for text in (query, response)
    )
    asked = np.array(["?" in query.text[a:b] for a, b in query.spans])
    asked = asked if asked.any() else np.arange(len(asked)) == len(asked) - 1
    to_query, to_response = query.parts @ turn.meaning, response.parts @ turn.meaning
    covered = (query.weights * np.isin(query.ids, turn.ids)).sum() / (query.weights.sum() + 1e-6)
    found = {
        # the same words
        "of_response_alone": (weights * (in_response & ~in_query)).sum() / total,
        "new": (weights * (~in_query & ~in_response)).sum() / total,
        "query_triples": len(triples & known) / max(len(triples), 1),
        "response_run": longest_run(turn.ids, response.ids) / max(len(turn.ids), 1),
        "query_covered": covered,
        # words of like meaning
        "like_query": (weights * near_query).sum() / total,
        "like_response": (weights * near_response).sum() / total,
        "like_either": (weights * np.maximum(near_query, near_response)).sum() / total,
        "nearer_response": (weights * np.maximum(near_response - near_query, 0)).sum() / total,
        # meaning
        "query_sentence": to_query.max(),
        "query_question": to_query[asked].max(),
        "response_sentence": to_response.max(),
    }
    return {name: float(value) for name, value in found.items()}


# -- in words --------------------------------------------------------------------------------------

_SAID = {  # features that are 1 or 0
    "assistant_phrase": "has a phrase of assistants",
    "solves": "works something out",
    "opens_supposing": "supposes something",
    "opens_reacting": "opens with a reaction",
    "asks_assistant": "speaks to the assistant",
    "names_a_text": "names a text or a part of one",
    "asks_for_more": "asks for more or for a change",
}


def evidence(measured: dict[str, float], turn: str, query: str, response: str) -> str:
    """What the features say, for a person to read."""
    words, asked, answered = (WORD.findall(text.lower()) for text in (turn, query, response))
    words = [word for word in words if word not in FUNCTION_WORDS]
    kind = "a statement" if measured["statement"] else "a question"
    said = ["a task" if measured["opens_command"] else kind]
    if only := [*dict.fromkeys(word for word in words if word in {*answered} - {*asked})]:
        more = f" and {len(only) - 4} more" if len(only) > 4 else ""
        said.append(f"only in the response: {', '.join(only[:4])}{more}")
    said.append(
        f"{sum(w in asked for w in words) / max(len(words), 1):.0%} of its words the query's"
    )
    said += ["copies the query"] if measured["query_triples"] >= 0.5 else []
    said += ["copies the response"] if measured["response_run"] >= 0.5 else []
    said += [text for name, text in _SAID.items() if measured[name]][:2]
    near = (f"{measured[f'{name}_sentence']:.2f} ({name})" for name in ("query", "response"))
    return "; ".join([*said, f"likeness to the nearest sentence: {', '.join(near)}"])
