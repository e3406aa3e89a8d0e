"""How a language model's answer is read: strictly. What isn't a verdict becomes no verdict."""

import json
from dataclasses import dataclass
from typing import Any

from ia_mech.cli import one_line
from ia_mech.judge.llm.prompt import clean
from ia_mech.judge.rubric import NAMES
from ia_mech.judge.verdict import JUDGED

LONGEST_RATIONALE = 1000  # characters kept
QUOTED = 200  # characters of an unusable answer that its verdict quotes


@dataclass(frozen=True)
class Answer:
    """What one completion says.

    ``status`` and ``category`` as in ``Verdict``; ``place`` says where the verdict stood if it
    wasn't the whole content: ``text`` (found inside other text, so the server didn't enforce the
    form), ``reasoning`` (in the reasoning field, the content being empty).
    """

    status: str
    category: str | None = None
    rationale: str = ""
    place: str = ""
    error: str = ""


class NoVerdict(ValueError):
    """A text that holds no verdict, or more than one."""


def read_completion(completion: Any) -> Answer:
    """Read the first choice of a chat completion.

    The order matters: a refusal or a filter isn't an answer whatever it says; a whole verdict
    counts even if the server cut off what came after it.
    """
    choices = getattr(completion, "choices", None)
    message = getattr(choices[0], "message", None) if choices else None
    if message is None:
        return Answer("empty", error="the completion holds no message")
    ended = getattr(choices[0], "finish_reason", None)
    if refusal := _text(getattr(message, "refusal", None)):
        return Answer("refused", error=_quote(refusal))
    if ended == "content_filter":
        return Answer("filtered", error="the server's content filter ended the answer")
    content = _text(getattr(message, "content", None))
    # vLLM calls the field reasoning, or reasoning_content before 0.12; others took up either.
    reasoning = _text(getattr(message, "reasoning_content", None)) or _text(
        getattr(message, "reasoning", None)
    )
    text, place = (content, "") if content.strip() else (reasoning, "reasoning")
    try:
        verdict, whole = find_verdict(text)
    except NoVerdict as problem:
        if ended == "length":
            return Answer("truncated", error=f"cut off by a token limit: {_quote(text)}")
        if not content.strip():
            thinking = f", the thinking begins: {_quote(text)}" if text.strip() else ""
            return Answer("empty", error=f"the answer is empty{thinking}")
        return Answer("unparsable", error=f"{problem}: {_quote(text)}")
    rationale = verdict.get("rationale")
    rationale = clean(rationale)[:LONGEST_RATIONALE] if isinstance(rationale, str) else ""
    return Answer(JUDGED, verdict["category"], rationale, place or ("" if whole else "text"))


def find_verdict(text: str) -> tuple[dict[str, Any], bool]:
    """The one verdict in a text, and whether it is the whole text.

    A verdict is a JSON object with a ``category`` that is, to the letter, one of the rubric's
    names. It may stand in a code fence or among other words; thinking in front of it is skipped (a
    server without a reasoning parser leaves it in the content). Two objects with a category are
    none, even if they agree: one of them may be a quotation.

    Raises:
        NoVerdict: there is none, or more than one.
    """
    answer, thought = text.strip(), False
    if not answer.startswith(("{", "```")):  # else a </think> stands in the rationale, as evidence
        thinking, thought, after = answer.partition("</think>")
        if thought:
            answer = after.strip()
        elif thinking.startswith("<think>"):
            raise NoVerdict("thinking without an end")
    objects = [(found, whole) for found, whole in _objects(answer) if "category" in found]
    if not objects:
        raise NoVerdict("no JSON object with a category")
    if len(objects) > 1:
        raise NoVerdict("more than one JSON object with a category")
    found, whole = objects[0]
    if found["category"] not in NAMES:
        raise NoVerdict(f"no such category: {one_line(str(found['category']), 60)!r}")
    return found, whole and not thought


def _objects(text: str) -> list[tuple[dict[str, Any], bool]]:
    """Outermost JSON objects of a text, from left to right, and whether each is all of it."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_repetition)
    found, start = [], text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            found.append((value, start == 0 and end == len(text)))
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is given twice")
    return dict(pairs)


def _text(value: Any) -> str:
    """Content as text; some servers send a list of parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        return "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _quote(text: str) -> str:
    return one_line(clean(text.strip()), QUOTED)
