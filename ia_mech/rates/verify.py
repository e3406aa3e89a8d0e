"""Is a response right? A column of the data, the query's instructions or a gold answer decides.

The data decide which of these counts. A given response is right if the data say so in a column
``correct``. One that the model wrote is checked by the instructions of its query, where the data
hold ``instruction_id_list`` and ``kwargs`` (as IFEval has them), else by a mathematical gold answer
(GSM8K, MATH).

Maths is checked by Hugging Face's ``math-verify``. It finds the answer in a text (after "final
answer", in a box, else the last number or formula) and compares formulas rather than text: 1/2, 0.5
and \\frac{1}{2} are equal, and so are 50% and both 50 and 0.5. :func:`clean_response` first
removes what misleads it. It works in the main thread only, where it can limit its time.

Instructions are checked by ``if-verifiable``, which holds the checkers of google-research's IFEval:
the benchmark's own, crude ones included (a response whose language can't be told counts as
following "answer in German").
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MATHS, INSTRUCTIONS, COLUMN = "math-verify", "if-verifiable", "column correct"  # verifiers
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
SECONDS = 10  # for one formula; a comparison takes milliseconds


@dataclass(frozen=True)
class Correctness:
    """Whether a response is right, and what that rests on."""

    verifier: str | None  # of :func:`verifier_of`; None if nothing says what is right
    correct: bool | None  # None if that couldn't be verified
    why: str  # in a few words
    answer: str | None = None  # what was read off the response, for maths
    gold: str | None = None  # what it was compared with, for maths


def verifier_of(answer: str | None, metadata: Mapping[str, Any], *, given: bool) -> str | None:
    """What verifies a response: the library or the column; None if nothing says what is right.
    ``answer`` is the gold one; ``given``: the response is the data's, not the model's own."""
    if given:
        return COLUMN if str(metadata.get("correct")).lower() in TRUTH else None
    if has_instructions(metadata):
        return INSTRUCTIONS
    return MATHS if answer is not None and gold_formulas(answer) else None


def verify(
    query: str,
    response: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    *,
    given: bool = False,
    unfinished: bool = False,
) -> Correctness:
    """Whether a response is right; what precedes its last ``</think>`` doesn't count.
    ``unfinished``: it was cut off by a token limit, or ended within its thought.

    Where a verifier crashes or takes too long, ``correct`` is None and ``why`` says so.
    """
    from math_verify.errors import TimeoutException

    name, text = verifier_of(answer, metadata, given=given), response.rpartition("</think>")[2]
    try:
        if name == COLUMN:
            return Correctness(name, TRUTH[str(metadata["correct"]).lower()], "as the data say")
        if name == INSTRUCTIONS:
            return _instructions(query, text, metadata)
        if name == MATHS and answer is not None:
            return _maths(text, answer, unfinished=unfinished)
    except TimeoutException:
        return Correctness(name, None, f"the verifier took more than {SECONDS} s")
    except Exception as error:  # two libraries raise anything on arbitrary text
        return Correctness(name, None, f"the verifier failed: {type(error).__name__}")
    return Correctness(None, None, "nothing says whether it is right")


# -- maths -----------------------------------------------------------------------------------------

_MARKED = re.compile(r"^[ \t*]*####[ \t]*(\S.*)$", re.MULTILINE)  # GSM8K's way of giving an answer
_ANNOUNCES = re.compile(r"\\boxed|\banswer", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\?[$€£])?\s*(?P<number>[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?\s*%?)"
    r"(?:\s+[^\W\d]+){0,2}\s*\.?"
)
_FORMULA = re.compile(r"\\(?:text|textbf|mathrm|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_CLEARED = (
    (re.compile(r"<<[^<>\n]*>>"), ""),  # GSM8K's calculator marks
    (re.compile(r"[−–](?=[ \t]*[$\d.])"), "-"),
    (re.compile(r"\*\*|__|\\\$"), ""),  # bold; a currency's sign
    (re.compile(r"-\$(?=\d[\d,.]*(?![\d,.$]))"), "-"),
    (re.compile(r"^[ \t]*\d+[.)][ \t]+(?=\S)", re.MULTILINE), ""),  # a list's numbers
)


@lru_cache(maxsize=4096)
def gold_formulas(answer: str) -> tuple | None:
    """A gold answer as formulas, or None if it isn't one number or formula.

    Accepted: what follows the last ``####``; a ``\\boxed{}``; a number with sign, currency,
    thousands separators, fraction, per cent and at most two words of unit; and LaTeX with words in
    ``\\text{}``. A sentence that mentions a number is none of these.
    """
    from math_verify import parse
    from math_verify.errors import TimeoutException

    marked = _MARKED.findall(answer)
    text = (marked[-1] if marked else answer).strip()
    number = _NUMBER.fullmatch(text)
    if number:
        text = (number["sign"] + number["number"]).replace(",", "")
    elif "\\boxed" not in text:
        text = text.strip("$").strip()
        if not text or "\n" in text or _WORD.search(_FORMULA.sub(" ", text)):
            return None
        text = f"${text}$"
    try:
        found = parse(text, parsing_timeout=SECONDS, raise_on_error=True)
    except (Exception, TimeoutException):  # of many kinds, from three parsers
        return None
    # A text that couldn't be read as a formula comes back as a text alone.
    return tuple(found) if found and not isinstance(found[0], str) else None


def clean_response(response: str) -> str:
    """A response without what math-verify would mistake for an answer, or not see one behind."""
    for pattern, plain in _CLEARED:
        response = pattern.sub(plain, response)
    return response


def _maths(response: str, answer: str, *, unfinished: bool = False) -> Correctness:
    """Compare a response with a gold answer that :func:`gold_formulas` can read.

    The answer is read after the last line that opens with ``####`` if there is one, else where the
    library finds it. A response without a number or formula is wrong; and so is one that was cut
    off without a ``####``, a box or the word "answer": the last number before a cut is only where
    the text happened to end.
    """
    import math_verify

    wanted = list(gold_formulas(answer) or ())
    text = clean_response(response)
    marked = _MARKED.findall(text)
    if unfinished and not (marked or _ANNOUNCES.search(text)):
        why = "unfinished before it states an answer"
        return Correctness(MATHS, False, why, gold=str(wanted[-1]))
    places = [("after ####", marked[-1])] if marked else []
    places.append(("in a box" if "\\boxed" in text else "as math-verify finds it", text))
    for place, part in places:
        found = math_verify.parse(part, parsing_timeout=SECONDS, raise_on_error=True)
        if found:
            right = math_verify.verify(wanted, found, timeout_seconds=SECONDS, raise_on_error=True)
            why = f"{'equal' if right else 'not equal'}; answer read {place}"
            return Correctness(MATHS, bool(right), why, answer=str(found[-1]), gold=str(wanted[-1]))
    return Correctness(
        MATHS, False, "no answer could be read off the response", gold=str(wanted[-1])
    )


# -- instructions ----------------------------------------------------------------------------------


def has_instructions(metadata: Mapping[str, Any]) -> bool:
    """Whether a conversation has instructions, in the form in which IFEval gives them."""
    ids, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    return isinstance(ids, list) and isinstance(kwargs, list) and 0 < len(ids) == len(kwargs)


def _instructions(query: str, response: str, metadata: Mapping[str, Any]) -> Correctness:
    """Check every instruction; a response is right if all are followed, strictly.

    If one can't be checked the result is open, even where another is violated: counting such
    prompts only when they are wrong would make accuracy too low.
    """
    from if_verifiable import IFEvalSample, evaluate_output_for_sample
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    from langdetect import DetectorFactory

    ids = list(metadata["instruction_id_list"])
    kwargs = [
        {key: value for key, value in (given or {}).items() if value is not None}
        for given in metadata["kwargs"]
    ]
    for name, given in zip(ids, kwargs, strict=True):
        if name not in INSTRUCTION_DICT:
            return Correctness(INSTRUCTIONS, None, f"{name}: IFEval has no such instruction")
        # A checker draws a missing parameter at random.
        needed = INSTRUCTION_DICT[name](name).get_instruction_args_keys()
        if missing := [key for key in needed if key not in given]:
            why = f"{name}: its parameter {missing[0]} is not in the data"
            return Correctness(INSTRUCTIONS, None, why)
    if not response.strip():
        return Correctness(INSTRUCTIONS, False, "an empty response")
    DetectorFactory.seed = 0  # language detection draws at random
    logging.disable(logging.ERROR)  # a language that can't be told is logged with the whole text
    try:
        sample = IFEvalSample("", query, ids, kwargs)
        results, _ = evaluate_output_for_sample("ifeval", sample, response)
    finally:
        logging.disable(logging.NOTSET)
    broken = [one.instruction_id for one in results if not one.strict_pass]
    why = f"violated: {', '.join(broken)}" if broken else "all followed"
    return Correctness(INSTRUCTIONS, not broken, why)
