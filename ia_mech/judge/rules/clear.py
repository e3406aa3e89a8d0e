"""Cases that a rule settles, with the evidence it saw."""

import re

from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE
from ia_mech.judge.rules import text as t
from ia_mech.judge.verdict import Item

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
# An assistant introducing itself, offering help, or handing over what was asked for.
_AS_ASSISTANT = re.compile(
    r"\bas an ai\b|\b(i am|i'm) (just )?(an ai|a language model|your assistant)\b|"
    r"\bhow (can|may) i (help|assist) you\b|\b(i am|i'm|i'd be) (happy|glad) to (help|assist)\b|"
    r"\blet me know if you (have|need|would|want)\b|\bhope this helps\b|\bfeel free to ask\b|"
    r"^(sure|certainly|of course)\b[,.!:]? (i'll|i can|i will|here|let me)\b|"
    r"^here are (some|a few|the|\w+) (\w+ )?(tips|steps|examples|ways|suggestions|ideas|options)\b",
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
    continue go tell more know makes sense clear really much welcome understand day question
    questions anything everything else now time glad that's""".split()  # noqa: SIM905
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
_OPENS_ANSWER = frozenset(
    {
        "i",
        "i'm",
        "i've",
        "i'd",
        "i'll",
        "my",
        "we",
        "we're",
        "our",
        "yes",
        "yeah",
        "no",
        "sure",
        "ok",
    }
)
_COPY_WORDS = 4  # a copy of fewer words in a row may be chance


def clear_case(item: Item) -> tuple[str, str] | None:
    """(category, evidence) where a rule settles it, else None. The order is the rubric's."""
    tokens = t.words(item.turn)
    if not item.turn.strip():
        return "degenerate", "the turn is empty"
    if not tokens:
        return "degenerate", "no word or number in it"
    letters = [c for c in item.turn if c.isalpha()]
    foreign = sum(not _latin(c) for c in letters)
    if len(letters) > 3 and foreign > len(letters) / 2:
        return CANNOT_ASSESS, f"{foreign} of {len(letters)} letters are not Latin; it reads English"
    other = _other_language(tokens)
    if other:
        return CANNOT_ASSESS, f"{other} are of another language; it reads English"
    if not t.words(item.query) and not t.words(item.response):
        return CANNOT_ASSESS, "query and response hold no words"
    loop = _loop(tokens)
    if loop:
        return "degenerate", loop
    marker = _MARKERS.search(item.turn)
    if marker:
        return "meta_planning", f"the marker {marker[0]!r}"
    planning = _PLANNING.search(item.turn)
    known = f"{item.query}\n{item.response}".lower()
    if planning and planning[0].lower() not in known:
        return "meta_planning", f"speaks about the answer: {planning[0]!r}"
    copy = _copy(tokens, item)
    if copy:
        return copy
    voice = _AS_ASSISTANT.search(item.turn.strip())
    if voice and voice[0].lower() not in item.query.lower():
        return "identity_leakage", f"speaks as an assistant: {voice[0]!r}"
    answer = _answer(tokens, item)
    if answer:
        return GENUINE, answer
    nothing_else = all(w in _WITH_THANKS or w in t.FUNCTION_WORDS for w in tokens)
    if nothing_else and _THANKS & set(tokens[:2]) and len(tokens) <= 14:
        return "generic", "nothing but words of thanks, closing or assent"
    return None


def _other_language(tokens: list[str]) -> str | None:
    """Function words of other languages, if there are more of them than of English ones."""
    foreign = [word for word in tokens if word in _FOREIGN]
    english = sum(word in t.FUNCTION_WORDS for word in tokens)
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
        ("prompt_restatement", "query", item.query),
        ("assistant_restatement", "response", item.response),
    ):
        _, run = t.longest_run(tokens, t.words(other))
        if run >= _COPY_WORDS and run == len(tokens):
            return category, f"all its {run} words stand so in the {name}"
    return None


def _answer(tokens: list[str], item: Item) -> str | None:
    """Evidence that the turn answers the question to the user that the response ends with."""
    last = (t.sentences(item.response) or [""])[-1]
    asked = item.response.rstrip().endswith("?") and set(t.words(last)) & _ADDRESSES
    opens = next((word for word in tokens[:1] if word in _OPENS_ANSWER), None)
    if not asked or opens is None or item.turn.rstrip().endswith("?"):
        return None
    return f"opens with {opens!r} after the response ends by asking {last[-60:]!r}"
