"""What a language model's answer says: a verdict, or a failure of a known type.

Answers are read strictly: what isn't a verdict becomes a failure and is never guessed at. A draft
is no verdict: of an answer that a token limit cut off, or of reasoning without an answer, a verdict
counts only if it is the whole text. A quotation is no verdict either: among other words, a verdict
has to end the answer, begin a sentence or be called the answer, and may not name the category of an
object of the material's.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ia_mech.chat.thoughts import KNOWN
from ia_mech.cli import one_line
from ia_mech.judge.prompt import clean
from ia_mech.judge.rubric import BUILT_IN, Rubric
from ia_mech.judge.verdict import JUDGED, Item, Verdict

LONGEST_RATIONALE = 1000  # characters kept
LONGEST_ANSWER = 20_000  # characters kept of an answer and of its reasoning
QUOTED = 200  # characters of an unusable answer that its verdict quotes

# How models begin to refuse in words, where the protocol has a field for it.
_REFUSAL = re.compile(
    r"(i['’]?m (very |so )?sorry|i am sorry|sorry|i apologi[sz]e|unfortunately,? i|"
    r"i (can ?not|can['’]t|won['’]t|will not|must decline)|i(['’]m| am) (unable|not able))\b",
    re.IGNORECASE,
)
_TAG = re.compile(  # tags, control tokens, code fences: no words of an answer
    r"<\|constrain\|>\w+|<[^<>\n]*>|\[/?[A-Z][A-Z _]*\]|```\w*"
)
_OPENED = re.compile(r"<(\w+)>|\[([A-Z_ ]+)\]")
_FOR_ANSWERS = {"answer", "final_answer", "final", "verdict", "label", "json", "output", "result"}
_NAMES_IT = _FOR_ANSWERS | {"category", "classification", "evaluation", "assessment", "judgement"}
_NAMES_IT |= {"judgment", "so", "thus", "therefore", "hence", "here"}
_BESIDE_IT = {"is", "s", "the", "my", "this", "requested", "correct", "as", "follows", "of", "for"}
_BESIDE_IT |= {"user", "turn"}


class NoVerdict(ValueError):
    """A text that holds no verdict, or more than one."""


def read_completion(
    completion: dict[str, Any], rubric: Rubric = BUILT_IN, item: Item | None = None
) -> Verdict:
    """Read the first of a chat completion's ``choices``, which may be anything.

    Tokens and cost are the caller's to add. A refusal or a filter isn't an answer whatever it says.
    ``item`` is what was judged: an object that stands in it is quoted.

    Returns:
        A verdict or a failure, with the answer and the reasoning as they came. Its ``mode`` is
        where the verdict stood if it wasn't the whole content: ``text`` (inside other text, so the
        server didn't enforce the form), ``reasoning`` or ``tool_calls`` (the content being empty).
    """
    choice = _object(_first(completion["choices"]))
    message, ended = _object(choice.get("message")), choice.get("finish_reason")
    content = _text_of(message.get("content"))
    # vLLM calls the field reasoning, or reasoning_content before 0.12; others took up either.
    reasoning = _text_of(message.get("reasoning_content")) or _text_of(message.get("reasoning"))
    called = _arguments_of(message)
    texts = {"": content, "tool_calls": called, "reasoning": reasoning}
    place = next((name for name, text in texts.items() if text.strip()), "")
    text = texts[place]
    came = Verdict(
        None,
        "empty",
        answer=clean(content or called)[:LONGEST_ANSWER],
        reasoning=clean(reasoning)[:LONGEST_ANSWER],
    )
    if refusal := _text_of(message.get("refusal")):
        return replace(came, status="refused", error=_quote(refusal))
    if ended == "content_filter":
        error = "the server's content filter ended the answer"
        return replace(came, status="filtered", error=error)
    try:
        answer, whole = find_verdict(text, rubric, item)
        if not whole and (ended == "length" or place == "reasoning"):
            raise NoVerdict("a verdict inside other words may be a draft")
    except NoVerdict as problem:
        if ended == "length":
            status, error = "truncated", f"cut off by a token limit: {_quote(text)}"
        elif place == "reasoning" or not text.strip():
            status, error = "empty", f"the answer has no content {_quote(text)}".strip()
        elif _REFUSAL.match(text.strip()):
            status, error = "refused", _quote(text)
        else:
            status, error = "unparsable", f"{problem}: {_quote(text)}"
        return replace(came, status=status, error=error)
    rationale = clean(_text_of(answer.get("rationale")))[:LONGEST_RATIONALE]
    mode = place or ("" if whole else "text")
    category = rubric.named(answer["category"])
    return replace(came, category=category, status=JUDGED, rationale=rationale, mode=mode)


def find_verdict(
    text: str, rubric: Rubric = BUILT_IN, item: Item | None = None
) -> tuple[dict[str, Any], bool]:
    """The one verdict in a text, and whether it is the whole text.

    A verdict is a JSON object with a ``category`` that names one of the rubric's. It may stand
    after other words (a sentence, or "The answer is"); thinking in front of it is skipped (a
    server without a reasoning parser leaves it in the content). Two objects with a category are
    none, even if they agree: one of them may be a quotation.

    Raises:
        NoVerdict: there is none, or more than one; or it is quoted.
    """
    text = text.strip()
    objects = list(_objects(text))
    words = text  # a mark or a word in an object's strings is evidence
    for start, end, _ in objects:
        words = f"{words[:start]}{'{' * (end - start)}{words[end:]}"
    begin = max(end for marks in KNOWN for end in (0, *_ends(marks.closing, words)))
    marks = (marks.opening for marks in KNOWN if not marks.opening[0].isalpha())
    if any(_ends(mark, words[begin:]) for mark in marks):
        raise NoVerdict("thinking without an end")
    verdicts = [one for one in objects if one[0] >= begin and "category" in one[2]]
    if len(verdicts) != 1:
        many = "more than one" if verdicts else "no"
        raise NoVerdict(f"{many} JSON object with a category")
    ((start, end, verdict),) = verdicts
    whole = len(objects) == 1 and text[0] == "{" and text[-1] == "}"
    if not whole:
        _refuse_quotation(words[begin:start], words[end:], verdict, item)
    if rubric.named(verdict["category"]) is None:
        raise NoVerdict(f"no such category: {one_line(str(verdict['category']), 60)!r}")
    return verdict, whole


def _refuse_quotation(before: str, after: str, verdict: dict[str, Any], item: Item | None) -> None:
    """Raise NoVerdict where a verdict among other words may be someone else's."""
    if re.search(r"[\w{]", _TAG.sub("", after)):
        raise NoVerdict("words after the JSON object")
    for mark in _OPENED.finditer(before):
        name = mark[1] or mark[2]
        if name.lower() not in _FOR_ANSWERS and not re.search(
            rf"/{name}[>\]]", before[mark.end() :]
        ):
            raise NoVerdict(f"a JSON object within {mark[0]}")
    before = _TAG.sub("", before)
    # The last clause: a colon's line may end before the object.
    clause = re.split(r"[.!?](?=\W|$)|[,;{]|(?<!:)\n", re.sub(r":[^\w{]*$", ":", before))[-1]
    named = set(re.findall(r"\w+", clause.lower()))
    if named and not (named & _NAMES_IT and named <= _NAMES_IT | _BESIDE_IT):
        raise NoVerdict("a JSON object that no word calls the answer")
    if re.search(r"[>\"'“”„‘’«»]\s*$", before):
        raise NoVerdict("a JSON object in quotation marks")
    texts = (item.query, item.response, item.turn) if item else ()
    if any(verdict["category"] == one.get("category") for t in texts for *_, one in _objects(t)):
        raise NoVerdict("a JSON object of the material's")


def _ends(mark: str, text: str) -> list[int]:
    """Where a mark ends in a text, in capitals or not."""
    return [found.end() for found in re.finditer(re.escape(mark), text, re.IGNORECASE)]


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Outermost JSON objects of a text, from left to right, with where they begin and end; strings
    may hold raw line ends."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_repetition, strict=False)
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            yield start, end, value
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is given twice")
    return dict(pairs)


def _arguments_of(message: dict[str, Any]) -> str:
    """What a function is called with: some proxies ask for a form by way of a tool."""
    calls = message.get("tool_calls")
    call = _object(_first(calls)).get("function") if isinstance(calls, list) else None
    arguments = _object(call or message.get("function_call")).get("arguments")
    return json.dumps(arguments) if isinstance(arguments, dict) else _text_of(arguments)


def _first(values: list[Any]) -> Any:
    return next(iter(values), None)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text_of(value: Any) -> str:
    """Content as text; some servers send a list of parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        return "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _quote(text: str) -> str:
    return one_line(clean(text.strip()), QUOTED)
