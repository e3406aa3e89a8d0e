"""What the rules judge reads off the three texts: rules for clear cases, numbers for the others.

:func:`clear_case` is the rules, with the evidence that they saw. :func:`measure` is the features,
for judging and for fitting alike; each has a name that says what it measures. Every one is of the
turn, alone or against the two other texts: none is of the context alone (lengths of query and
response, what kind of query it is), or labels would differ between contexts for reasons that a
probe could read off the context.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import snowballstemmer
from rapidfuzz import fuzz

from ia_mech.judge.rubric import CANNOT_ASSESS, FOLLOW_UP
from ia_mech.judge.verdict import Item

_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:['’][^\W\d_]+)*")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_STEMMER = snowballstemmer.stemmer("english")

# Words that don't show what a text is about.
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


# -- rules -------------------------------------------------------------------------------------

_MARKERS = re.compile(
    r"</?think(ing)?>|<\|channel\|>|<\|start\|>|<reasoning>|\[/?(thinking|reasoning)\]", re.I
)
_PLANNING = re.compile(
    r"\b(the user|user) (wants|is asking|asks|asked|might|may|would|needs|says|said|seems)\b|"
    r"\b(we|i) (need|have|should|must|want) to (respond|reply|answer|produce|generate|write|craft|"
    r"output|provide) (a|an|the|as|to|with|in)\b.{0,40}\b(user|message|response|reply|answer|"
    r"turn|follow-up|question)\b|"
    r"\bas the user, (i|my)\b",
    re.I,
)
# What assistants say and users hardly ever.
_DOES = (
    "(assist|help|provide|answer|fulfil|comply|generate|create|write|translate|summari[sz]e|"
    "respond|offer|give|complete|determine)"
)
_CANNOT = "('m | am )?(can't|cannot|can not|unable to|not able to|won't be able to)"
_SORRY = "((i'm |i am )?(sorry|afraid)|apologies|unfortunately|i apologi[sz]e)"
_AS_ASSISTANT = re.compile(
    "|".join(
        (
            # who it is
            r"\bas an ai\b",
            r"\b(i am|i'm) (just )?(an ai|a language model|your assistant)\b",
            # offers of help
            r"\bhow (can|may|could) i (help|assist)\b",
            r"\b(happy|glad|here) to (help|assist)\b",
            r"\b(help|assist) you (with|further)\b",
            r"\banything else (that )?(i can (do|help|assist)|you('d| would| need| want))\b",
            r"\blet me know (if|what|which|how) you\b",
            r"\bhope (this|that) helps\b",
            r"\bfeel free to ask\b",
            # what it wants of the user
            r"\b(you'd|you would|would you) like (me|to|help|assistance)\b",
            r"\bso (that )?i can (better )?(help|assist)\b",
            rf"\bi (need|require) (\w+ )?(information|details|context) (in order )?to {_DOES}\b",
            r"\bplease provide (me with )?"
            r"(your|the (text|passage|document|prompt|question|problem))\b",
            # openings under which it hands over what was asked for
            r"^(sure|certainly|of course|absolutely|understood)\b[,.!:]? "
            r"(i'll|i can|i will|i'd be|here|let me|let's)\b",
            r"^here are (some|a few|the|\w+) (\w+ )?"
            r"(tips|steps|examples|ways|suggestions|ideas|options)\b",
            r"^here('s| is) (your|the (revised|updated|corrected|final|complete))\b",
            # apologies for its mistakes, and refusals
            r"\b(sorry|apologi[sz]e|apologies) for (the|any|my) (\w+ )?"
            r"(confusion|inconvenience|mistake|misunderstanding|error|oversight)\b",
            rf"^{_SORRY}[,.]? (but )?i (made|may have made) an? \w+",
            rf"^{_SORRY}[,.]? (but )?i ?{_CANNOT} {_DOES}\b",
            rf"^{_SORRY}[,.]? (but )?i (don't|do not) have (\w+ ){{0,3}}"
            r"(information|details|access)\b",
            rf"^i ?{_CANNOT} (assist|provide|fulfil|comply)\b",
        )
    ),
    re.I,
)
# A user who puts an own question right apologises as well.
_OWN_QUESTION = re.compile(
    r"\bi (meant|wanted|intended) to (ask|say)\b|\bmy (\w+ )?(question|query|request|prompt)\b",
    re.I,
)
# Marks of chat templates, which a model may write as text, each with the role that may follow it.
_TEMPLATE = re.compile(
    r"<\|(im_start|im_end|endoftext|end_of_text|eot_id|start_header_id|end_header_id)\|>"
    r"(\s*(human|user|assistant|system)\b:?)?",
    re.I,
)
# Closings and acknowledgements open with one of these, and hold nothing but these and the others.
_THANKS = frozenset(
    """thank thanks thankyou thx ty great good nice cool awesome perfect excellent amazing wonderful
    ok okay k yes yeah yep no sure fine got understood see appreciate bye goodbye hello hi hey well
    cheers interesting right alright""".split()  # noqa: SIM905
)
_WITH_THANKS = _THANKS | frozenset(
    """helpful help helped appreciated lot done job answer response explanation information info
    explaining continue go tell more know makes sense clear really much welcome understand day
    question questions anything everything else now time glad that's""".split()  # noqa: SIM905
)
# Frequent function words of Spanish, French, German, Italian, Portuguese and Dutch that are rare in
# English prose and code.
_FOREIGN = frozenset(
    """el la los las de una por para qué cómo cuánto cuánta cuál pero más está muy también porque
    cuando puedo puede quiero tengo hay es
    le les une dans pour avec pas je vous nous mais où quel quelle est c'est qu'est j'ai sont
    der das und ist nicht ein eine mit für wie ich du sie wir auch kann aber wenn oder
    il che di per una sono è più questo perché
    não uma você isso também são mas com
    het een niet van voor ik jij maar ook""".split()  # noqa: SIM905
)
_ADDRESSES = frozenset({"you", "your", "you're", "you'd", "you'll", "you've"})
_OPENS_ANSWER = frozenset("i i'm i've i'd i'll my we we're our yes yeah no sure ok".split())  # noqa: SIM905
_COPY_WORDS = 4  # a copy of fewer words in a row may be chance


def spoken(turn: str) -> str:
    """The turn's first part that isn't blank, of those between marks of a chat template."""
    ends = [*_TEMPLATE.finditer(turn)]
    starts = [0, *(mark.end() for mark in ends)]
    parts = (turn[a:b] for a, b in zip(starts, [*(m.start() for m in ends), None], strict=True))
    return next((part for part in parts if part.strip()), "")


def clear_case(item: Item) -> tuple[str, str] | None:
    """(category, evidence) where a rule settles it, else None. The order is the rubric's."""
    turn = spoken(item.turn)
    tokens = words(turn)
    if not turn.strip():
        return "degenerate", "the turn is empty"
    if not tokens:
        return "degenerate", "no word or number in it"
    copy = _copy(tokens, item)
    foreign = None if copy else _not_english(turn, tokens)
    if foreign:
        return CANNOT_ASSESS, f"{foreign}; it reads English"
    if not words(item.query) and not words(item.response):
        return CANNOT_ASSESS, "query and response hold no words"
    loop = _loop(tokens)
    if loop:
        return "degenerate", loop
    marker = _MARKERS.search(turn)
    if marker:
        return "plans", f"the marker {marker[0]!r}"
    planning = _PLANNING.search(turn)
    known = f"{item.query}\n{item.response}".lower()
    if planning and planning[0].lower() not in known:
        return "plans", f"speaks about the answer: {planning[0]!r}"
    if copy:
        return copy
    voice = _AS_ASSISTANT.search(turn.strip().replace("’", "'"))
    own = voice and (voice[0].lower() in item.query.lower() or _OWN_QUESTION.search(turn))
    if voice and not own:
        return "speaks_as_assistant", f"speaks as an assistant: {voice[0]!r}"
    answer = _answer(tokens, item)
    if answer:
        return FOLLOW_UP, answer
    nothing_else = all(w in _WITH_THANKS or w in FUNCTION_WORDS for w in tokens)
    if nothing_else and _THANKS & set(tokens[:2]) and len(tokens) <= 14:
        return "generic", "nothing but words of thanks, closing or assent"
    return None


def _not_english(turn: str, tokens: list[str]) -> str | None:
    """Evidence that the turn is of another script or language."""
    letters = [c for c in turn if c.isalpha()]
    foreign = sum(not _latin(c) for c in letters)
    if len(letters) > 3 and foreign > len(letters) / 2:
        return f"{foreign} of {len(letters)} letters are not Latin"
    other = _other_language(tokens)
    return f"{other} are of another language" if other else None


def _other_language(tokens: list[str]) -> str | None:
    """Function words of other languages, if there are more of them than of English ones."""
    foreign = [word for word in tokens if word in _FOREIGN]
    english = sum(word in FUNCTION_WORDS for word in tokens)
    if len(set(foreign)) < 2 or len(foreign) <= english:
        return None
    return ", ".join(repr(word) for word in list(dict.fromkeys(foreign))[:4])


def _latin(character: str) -> bool:
    return character < "\u0250" or "\u1e00" <= character < "\u1f00"


def _loop(tokens: list[str]) -> str | None:
    """Evidence that the turn goes round in circles."""
    if len(tokens) >= 6 and len(set(tokens)) <= 2:
        return f"{len(tokens)} words, {len(set(tokens))} different ones"
    for length in range(1, 13):
        again = 1
        while tokens[-length * (again + 1) :][:length] == tokens[-length:] and (
            len(tokens) >= length * (again + 1)
        ):
            again += 1
        if again >= 3 and again * length >= 9 and again * length > 0.6 * len(tokens):
            return f"{' '.join(tokens[-length:])!r} {again} times in a row"
    return None


def _copy(tokens: list[str], item: Item) -> tuple[str, str] | None:
    """The turn is, word for word, a piece of the query or the response."""
    if len(tokens) < _COPY_WORDS:
        return None
    for category, name, other in (
        ("repeats_query", "query", item.query),
        ("repeats_response", "response", item.response),
    ):
        _, run = longest_run(tokens, words(other))
        if run >= _COPY_WORDS and run == len(tokens):
            return category, f"all its {run} words stand so in the {name}"
    return None


def _answer(tokens: list[str], item: Item) -> str | None:
    """Evidence that the turn answers the question to the user that the response ends with."""
    last = (sentences(item.response) or [""])[-1]
    asked = item.response.rstrip().endswith("?") and set(words(last)) & _ADDRESSES
    opens = next((word for word in tokens[:1] if word in _OPENS_ANSWER), None)
    if not asked or opens is None or spoken(item.turn).rstrip().endswith("?"):
        return None
    return f"opens with {opens!r} after the response ends by asking {last[-60:]!r}"


# -- features ----------------------------------------------------------------------------------

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
    turn, query, response = spoken(item.turn), item.query, item.response
    low = turn.lower().strip()
    tw, qw, rw = words(turn), words(query), words(response)
    ts, qs, rs = stems(tw), stems(qw), stems(rw)
    tc, qc, rc = content(tw), set(content(qw)), set(content(rw))
    n = max(len(tw), 1)
    only_r = rc - qc
    both = qc | rc
    numbers, known_q = _NUMBER.findall(turn), set(_NUMBER.findall(query))
    known_r = set(_NUMBER.findall(response))
    names = {name for name in _NAME.findall(turn) if name.lower() not in FUNCTION_WORDS}
    _, run_q = longest_run(ts, qs)
    _, run_r = longest_run(ts, rs)
    q_parts = [*sentences(query), query]
    r_parts = [*sentences(response), response[: len(turn) + 20], response]
    return {
        # how long, and how much it says again
        "log_words": math.log1p(len(tw)),
        "distinct_words": len(set(tw)) / n,
        "sentences": float(min(len(sentences(turn)), 5)),
        # restatement of the query
        "query_words": share(tc, qc),
        "query_bigrams": share(grams(ts, 2), set(grams(qs, 2))),
        "query_trigrams": share(grams(ts, 3), set(grams(qs, 3))),
        "query_run": run_q / n,
        "query_alike": alike(turn, q_parts),
        "query_covered": share(sorted(qc), set(tc)),
        # restatement of the response
        "response_words": share(tc, rc),
        "response_run": run_r / n,
        "response_alike": alike(turn, r_parts),
        # grounding
        "only_response_words": share(tc, only_r),
        "only_response_count": math.log1p(len(set(tc) & only_r)),
        "only_query_words": share(tc, qc - rc),
        "new_words": share(tc, set(tc) - both),
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
        "function_words": sum(w in FUNCTION_WORDS for w in tw) / n,
        "starts_lower": float(turn[:1].islower()),
    }
