"""Numbers that tell the categories of a user turn apart, from the three texts alone.

Each feature has a name that says what it measures; :func:`measure` is the one place that computes
them, for judging and for fitting alike. Every one is of the turn, alone or against the two other
texts: none is of the context alone (lengths of query and response, what kind of query it is), or
labels would differ between contexts for reasons that a probe could read off the context.
"""

import math
import re
from collections import Counter

from ia_mech.judge.rules import text as t
from ia_mech.judge.verdict import Item

_QUESTION = re.compile(
    r"^(what|how|why|when|where|who|which|whose|is|are|was|were|do|does|did|can|could|would|will|"
    r"should|has|have|in what|in which|to what)\b"
)
_COMMAND = re.compile(
    r"^(please\s+)?(write|give|explain|describe|create|implement|find|calculate|list|make|tell|show|"
    r"provide|compare|discuss|design|imagine|consider|suppose|solve|compute|determine|generate|"
    r"translate|summari[sz]e|rewrite|identify|evaluate|convert|define|name|add|use|explore|analy[sz]e)\b"
)
_ASKS_ASSISTANT = re.compile(
    r"\b(can|could|would|will) you\b|\bplease\b|\byou (mentioned|said|gave|wrote|told|described|"
    r"provided|used|listed)\b|\byour (answer|response|explanation|solution|example|list|code|email|"
    r"story|advice|suggestion|question|method|approach|calculation)s?\b"
)
_POINTS_BACK = re.compile(
    r"\b(this|that|these|those|above|earlier|previous|it|mentioned|instead|another|else|again|"
    r"example|detail|details|more|further|other|specific|elaborate|clarify|shorter|longer|simpler)\b"
)
_OWN_SIDE = re.compile(r"\b(i|i'm|i've|i'd|i'll|me|my|mine|myself|we|our)\b")
_ADDRESS = re.compile(r"\b(you|your|yours)\b")
_ASSISTANT = re.compile(
    r"\b(here is|here are|here's|i'm sorry|i apologi[sz]e|as an ai|language model|i'd be happy|"
    r"i can help|let me|sure|certainly|of course|feel free|to solve|we need to|we can|we have to|"
    r"let's|first,|step 1|step by step|in conclusion|therefore|in summary|the answer is|"
    r"the correct answer|the final answer|it is important to|so,)"
)
_CODE = re.compile(
    r"```|\bdef \w+\(|^\s*(import|from) \w+|#include|\breturn\b|[{};]\s*$|\w+\(\w*\)", re.M
)
_LIST = re.compile(r"^\s*(\d+[.)]|[-*•])\s", re.M)
_MATHS = re.compile(r"\d\s*[-+*/×=^]\s*[\d(]|=\s*\S")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(
    r"(?<=[a-z,;] )[A-Z][a-z]+|^[A-Z][a-z]+(?= (?:has|had|bought|is|was|wants|will|went)\b)"
)
_PUZZLE = re.compile(
    r"\b(how many|how much|how long|how far|how old|probability of|sum of|what is the (value|"
    r"probability|sum|area|number|answer|percentage))\b"
)


def measure(item: Item) -> dict[str, float]:
    """Features of one item, by name, in a fixed order."""
    turn, query, response = item.turn, item.query, item.response
    low = turn.lower().strip()
    tw, qw, rw = t.words(turn), t.words(query), t.words(response)
    ts, qs, rs = t.stems(tw), t.stems(qw), t.stems(rw)
    tc, qc, rc = t.content(tw), set(t.content(qw)), set(t.content(rw))
    n = max(len(tw), 1)
    only_r = rc - qc
    both = qc | rc
    numbers, known_q = _NUMBER.findall(turn), set(_NUMBER.findall(query))
    known_r = set(_NUMBER.findall(response))
    names = {name for name in _NAME.findall(turn) if name.lower() not in t.FUNCTION_WORDS}
    _, run_q = t.longest_run(ts, qs)
    _, run_r = t.longest_run(ts, rs)
    q_parts = [*t.sentences(query), query]
    r_parts = [*t.sentences(response), response[: len(turn) + 20], response]
    return {
        # how long, and how much it repeats itself
        "log_words": math.log1p(len(tw)),
        "few_words": float(len(tw) < 4),
        "distinct_words": len(set(tw)) / n,
        "repeated_trigrams": _repeated(ts, 3),
        "sentences": float(min(len(t.sentences(turn)), 5)),
        # restatement of the query
        "query_words": t.share(tc, qc),
        "query_bigrams": t.share(t.grams(ts, 2), set(t.grams(qs, 2))),
        "query_trigrams": t.share(t.grams(ts, 3), set(t.grams(qs, 3))),
        "query_run": run_q / n,
        "query_alike": t.alike(turn, q_parts),
        "query_covered": t.share(sorted(qc), set(tc)),
        # restatement of the response
        "response_words": t.share(tc, rc),
        "response_bigrams": t.share(t.grams(ts, 2), set(t.grams(rs, 2))),
        "response_trigrams": t.share(t.grams(ts, 3), set(t.grams(rs, 3))),
        "response_run": run_r / n,
        "response_alike": t.alike(turn, r_parts),
        "run_difference": (run_r - run_q) / n,
        # grounding
        "only_response_words": t.share(tc, only_r),
        "only_response_count": math.log1p(len(set(tc) & only_r)),
        "only_query_words": t.share(tc, qc - rc),
        "new_words": t.share(tc, set(tc) - both),
        "new_count": math.log1p(len(set(tc) - both)),
        "no_content": float(not tc),
        "new_numbers": sum(x not in known_q | known_r for x in numbers) / max(len(numbers), 1),
        "numbers": math.log1p(len(numbers)),
        "response_numbers": sum(x in known_r for x in numbers) / max(len(numbers), 1),
        "new_names": float(sum(name not in query and name not in response for name in names) > 0),
        "known_names": float(any(name in query or name in response for name in names)),
        # whose voice
        "question_mark": float("?" in turn),
        "ends_with_question": float(low.endswith("?")),
        "opens_question": float(bool(_QUESTION.search(low))),
        "asks_what_is": float(bool(re.match(r"what('s| is| are| was| were)\b", low))),
        "asks_how_or_why": float(bool(re.match(r"(so |and |but )?(how|why)\b", low))),
        "opens_command": float(bool(_COMMAND.search(low))),
        "asks_assistant": float(bool(_ASKS_ASSISTANT.search(low))),
        "points_back": float(bool(_POINTS_BACK.search(low))),
        "first_person": float(bool(_OWN_SIDE.search(low))),
        "second_person": float(bool(_ADDRESS.search(low))),
        "assistant_phrase": float(bool(_ASSISTANT.search(low))),
        "code": float(bool(_CODE.search(turn))),
        "list": float(bool(_LIST.search(turn))),
        "equation": float(bool(_MATHS.search(turn))),
        "puzzle": float(bool(_PUZZLE.search(low))),
        "statement": float(
            "?" not in turn and not _QUESTION.search(low) and not _COMMAND.search(low)
        ),
        # what it answers
        "answers_question": float(
            "?" in response[-200:] and bool(_OWN_SIDE.search(low)) and "?" not in turn
        ),
        # how it is written
        "capitals": sum(w[:1].isupper() for w in turn.split()[1:]) / n,
        "odd_characters": sum(
            not (c.isascii() and (c.isalnum() or c in " \n.,?!'\"-:;()")) for c in turn
        )
        / max(len(turn), 1),
        "long_words": sum(len(w) > 9 for w in tw) / n,
        "function_words": sum(w in t.FUNCTION_WORDS for w in tw) / n,
        "starts_lower": float(turn[:1].islower()),
        "unfinished": float(low[-1:] not in ".?!)`\"'"),
    }


def _repeated(tokens: list[str], n: int) -> float:
    counts = Counter(t.grams(tokens, n))
    total = sum(counts.values())
    return sum(c - 1 for c in counts.values()) / total if total else 0.0
