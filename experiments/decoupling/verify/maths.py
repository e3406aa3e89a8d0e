"""Mathematical answers, by Hugging Face's ``math-verify``.

The library finds the answer in a text (after "final answer", in a box, else the last number or
formula), reads it as a formula, and compares formulas rather than text: 1/2, 0.5 and \\frac{1}{2}
are equal, and so are 50% and both 50 and 0.5. What it trips over is cleared away first: see
:func:`cleared`.
"""

import logging
import re
from functools import lru_cache

from experiments.decoupling.verify.verdict import Verdict

NAME = "maths"
logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns of what ``limited`` takes care of

_MARKED = re.compile(r"^[ \t*]*####[ \t]*(\S.*)$", re.MULTILINE)  # GSM8K's way of giving an answer
_STATED = re.compile(r"\\boxed|\banswer", re.IGNORECASE)
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
def gold(answer: str) -> tuple | None:
    """A gold answer as formulas, or None if it isn't one number or formula.

    Taken are: what follows the last ``####``; a ``\\boxed{}``; a number with sign, currency,
    thousands separators, fraction, per cent and at most two words of unit; and LaTeX, where words
    stand in ``\\text{}``. A sentence that mentions a number is none of them.
    """
    from math_verify import parse

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
        found = parse(text, parsing_timeout=None, raise_on_error=True)
    except Exception:  # of many kinds, from three parsers
        return None
    # A text that couldn't be read as a formula comes back as a text alone.
    return tuple(found) if found and not isinstance(found[0], str) else None


def cleared(response: str) -> str:
    """A response without what isn't an answer but is read as one, or hides one.

    Calculator marks, bold, escaped currency signs, the numbers of a list's lines; and typographic
    minus signs are plain ones.
    """
    for pattern, plain in _CLEARED:
        response = pattern.sub(plain, response)
    return response


def verdict(response: str, answer: str, *, cut_off: bool = False) -> Verdict:
    """Hold a response against a gold answer that :func:`gold` can read.

    After the last line that opens with ``####`` if there is one with an answer, else by what the
    library finds in the text. A response without a number or formula is wrong; and so is one that
    was cut off without a ``####``, a box or the word "answer": the last number before a cut is
    where the text happened to end.
    """
    from math_verify import parse, verify

    wanted = list(gold(answer))
    text = cleared(response)
    marked = _MARKED.findall(text)
    if cut_off and not (marked or _STATED.search(text)):
        why = "cut off before it states an answer"
        return Verdict(NAME, False, why, gold=str(wanted[-1]))
    places = [("after ####", marked[-1])] if marked else []
    places.append(("in a box" if "\\boxed" in text else "as math-verify finds it", text))
    for place, part in places:
        found = parse(part, parsing_timeout=None, raise_on_error=True)
        if found:
            right = verify(wanted, found, timeout_seconds=None, raise_on_error=True)
            why = f"{'equal' if right else 'not equal'}; answer read {place}"
            return Verdict(NAME, bool(right), why, answer=str(found[-1]), gold=str(wanted[-1]))
    return Verdict(NAME, False, "no answer could be read off the response", gold=str(wanted[-1]))
