"""Is a response right? By its gold answer, or by the instructions in its query.

The data decide which: instructions where the metadata hold ``instruction_id_list`` and ``kwargs``
(IFEval, IFBench), else maths where there is a mathematical gold answer (GSM8K, MATH).

Maths is checked by Hugging Face's ``math-verify``. It finds the answer in a text (after "final
answer", in a box, else the last number or formula) and compares formulas rather than text: 1/2, 0.5
and \\frac{1}{2} are equal, and so are 50% and both 50 and 0.5. :func:`cleared` first removes what
misleads it.

Instructions are checked by ``if-verifiable``, which holds the checkers of google-research's IFEval
(25 instructions) and of allenai's IFBench (58). Seven of them need NLTK's data, which no package
installs and which isn't downloaded here: without it their prompts aren't verified. The checkers are
the benchmarks' own, crude ones included: "every 5th word in Japanese" is followed by a response of
four words, and "answer in German" by one whose language can't be told.
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from unittest.mock import patch

MATHS, INSTRUCTIONS = "maths", "instructions"
SECONDS = 5.0  # for one response


@dataclass(frozen=True)
class Correctness:
    """Whether a response is right, and what that rests on.

    Attributes:
        verifier: ``maths`` or ``instructions``.
        correct: whether it is; None if that couldn't be verified.
        why: in a few words.
        answer: what was read off the response, for maths.
        gold: what it was compared with, for maths.
        instructions: their ids.
        followed: of each instruction, whether the response follows it; None if that couldn't be
            verified.
        followed_loosely: the same of the response without its first line, last line or asterisks,
            whichever does best.
    """

    verifier: str
    correct: bool | None
    why: str
    answer: str | None = None
    gold: str | None = None
    instructions: tuple[str, ...] = ()
    followed: tuple[bool | None, ...] = ()
    followed_loosely: tuple[bool | None, ...] = ()

    @property
    def correct_loosely(self) -> bool | None:
        """All instructions are followed loosely; for maths, the same as ``correct``."""
        if not self.instructions or self.correct is None:
            return self.correct
        return all(self.followed_loosely)


def verifier_of(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """``instructions``, ``maths``, or None if nothing says which response is right."""
    if has_instructions(metadata):
        return INSTRUCTIONS
    return MATHS if answer is not None and gold(answer) else None


def verify(
    query: str,
    response: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    *,
    cut_off: bool = False,
    seconds: float = SECONDS,
) -> Correctness:
    """Compare a response with its gold answer or its query's instructions.

    Where a verifier crashes or takes too long, ``correct`` is None and ``why`` says so.

    Args:
        query: the user's prompt.
        response: the model's; what precedes the last ``</think>`` is ignored.
        answer: the gold answer.
        metadata: of the conversation.
        cut_off: the response was cut off by a token limit.
        seconds: time limit, of the processor.

    Raises:
        ValueError: no verifier applies.
    """
    name = verifier_of(answer, metadata)
    if name is None:
        raise ValueError("neither a mathematical gold answer nor instructions")
    text = response.rpartition("</think>")[2]
    if name == INSTRUCTIONS:
        checkers()  # their import takes seconds that must not count towards the limit
    try:
        with limited(seconds):
            if name == MATHS:
                assert answer is not None  # verifier_of says maths
                return _verify_maths(text, answer, cut_off=cut_off)
            return _verify_instructions(query, text, metadata)
    except TimedOut:
        return Correctness(name, None, f"the verifier took more than {seconds:g} s")
    except Exception as error:  # two libraries raise anything on arbitrary text
        return Correctness(name, None, f"the verifier failed: {type(error).__name__}")


class TimedOut(BaseException):
    """The limit was reached. Not an ``Exception``, since verifiers catch those and go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Stop the block after so many seconds of processor time.

    Processor time gives the same results on a busy machine. The limit is a signal, so it holds on
    POSIX systems and in the main thread only. A profiling timer that is already set is cancelled.

    Raises:
        TimedOut: the limit was reached.
    """
    if not hasattr(signal, "SIGPROF") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- maths -----------------------------------------------------------------------------------------

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its own timeout is off

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

    Accepted: what follows the last ``####``; a ``\\boxed{}``; a number with sign, currency,
    thousands separators, fraction, per cent and at most two words of unit; and LaTeX with words in
    ``\\text{}``. A sentence that mentions a number is none of these.
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
    """A response without what math-verify would mistake for an answer, or not see one behind.

    Removes calculator marks, bold, escaped currency signs and the numbers of list items; makes
    typographic minus signs plain.
    """
    for pattern, plain in _CLEARED:
        response = pattern.sub(plain, response)
    return response


def _verify_maths(response: str, answer: str, *, cut_off: bool = False) -> Correctness:
    """Compare a response with a gold answer that :func:`gold` can read.

    The answer is read after the last line that opens with ``####`` if there is one, else where the
    library finds it. A response without a number or formula is wrong; and so is one that was cut
    off without a ``####``, a box or the word "answer": the last number before a cut is only where
    the text happened to end.
    """
    import math_verify

    wanted = list(gold(answer) or ())
    text = cleared(response)
    marked = _MARKED.findall(text)
    if cut_off and not (marked or _STATED.search(text)):
        why = "cut off before it states an answer"
        return Correctness(MATHS, False, why, gold=str(wanted[-1]))
    places = [("after ####", marked[-1])] if marked else []
    places.append(("in a box" if "\\boxed" in text else "as math-verify finds it", text))
    for place, part in places:
        found = math_verify.parse(part, parsing_timeout=None, raise_on_error=True)
        if found:
            right = math_verify.verify(wanted, found, timeout_seconds=None, raise_on_error=True)
            why = f"{'equal' if right else 'not equal'}; answer read {place}"
            return Correctness(MATHS, bool(right), why, answer=str(found[-1]), gold=str(wanted[-1]))
    return Correctness(
        MATHS, False, "no answer could be read off the response", gold=str(wanted[-1])
    )


# -- instructions ----------------------------------------------------------------------------------

NLTK = "python -m nltk.downloader punkt_tab stopwords averaged_perceptron_tagger_eng"
_WORDS = "tokenizers/punkt_tab/english/"
_NEEDS = {
    "ratio:stop_words": ("corpora/stopwords",),
    "words:start_verb": (_WORDS, "taggers/averaged_perceptron_tagger_eng"),
    "words:keywords_specific_position": (_WORDS,),
    "words:words_position": (_WORDS,),
    "format:title_case": (_WORDS,),
    "change_case:capital_word_frequency": (_WORDS,),
    "length_constraints:number_sentences": (_WORDS,),
}


def has_instructions(metadata: Mapping[str, Any]) -> bool:
    """Whether a conversation has instructions, in the form in which both datasets give them."""
    ids, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    return (
        isinstance(ids, list)
        and isinstance(kwargs, list)
        and 0 < len(ids) == len(kwargs)
        and all(isinstance(name, str) for name in ids)
        and all(isinstance(given, dict | None) for given in kwargs)
    )


def _verify_instructions(query: str, response: str, metadata: Mapping[str, Any]) -> Correctness:
    """Check every instruction; a response is right if all are followed, strictly.

    If one can't be checked the result is open, even where another is violated: counting such
    prompts only when they are wrong would make accuracy too low.
    """
    ids = tuple(metadata["instruction_id_list"])
    found = [
        check(name, given or {}, query, response)
        for name, given in zip(ids, metadata["kwargs"], strict=True)
    ]
    strict, loose, reasons = zip(*found, strict=True)
    unknown = [f"{name}: {why}" for name, why in zip(ids, reasons, strict=True) if why]
    correct = None if unknown else all(strict)
    broken = [name for name, followed in zip(ids, strict, strict=True) if followed is False]
    why = "; ".join(unknown) or (f"violated: {', '.join(broken)}" if broken else "all followed")
    return Correctness(
        INSTRUCTIONS, correct, why, instructions=ids, followed=strict, followed_loosely=loose
    )


def check(
    name: str, given: Mapping[str, Any], query: str, response: str
) -> tuple[bool | None, bool | None, str]:
    """One instruction: followed strictly, followed loosely, and why that couldn't be verified.

    Args:
        name: id of the instruction.
        given: its parameters; None stands for one that it doesn't take.
        query: what "repeat the prompt" is compared with.
        response: an empty one follows nothing.
    """
    from if_verifiable import IFBenchSample, evaluate_output_for_sample

    known = checkers()
    if name not in known:
        return None, None, "no verifier knows this instruction"
    benchmark, kind = known[name]
    given = {key: value for key, value in given.items() if value is not None}
    # Some checkers need the data only for responses that are long enough, and call the others
    # wrong: without this check, only wrong ones would count.
    if not all(map(_installed, _NEEDS.get(name, ()))):
        return None, None, f"its verifier needs NLTK's data ({NLTK})"
    # A checker draws a missing parameter at random.
    missing = [key for key in kind(name).get_instruction_args_keys() if key not in given]
    if missing:
        return None, None, f"its parameter {missing[0]} is not in the data"
    if not response.strip():
        return False, False, ""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)  # a language that can't be told is logged with the whole text
    try:
        sample = IFBenchSample("", query, [name], [given])
        results, _ = evaluate_output_for_sample(benchmark, sample, response)
    except Exception as error:
        return None, None, f"its verifier failed: {type(error).__name__}"
    finally:
        logging.disable(level)
    return bool(results[0].strict_pass), bool(results[0].loose_pass), ""


def _installed(resource: str) -> bool:
    """Whether NLTK finds this data."""
    import nltk

    try:
        nltk.data.find(resource)
    except LookupError:
        return False
    return True


@cache
def checkers() -> dict[str, tuple[str, type]]:
    """Instruction id → the benchmark it is of, and its checker."""
    # The library downloads data as it is imported; what runs offline has to stay offline. Its
    # language detection draws at random unless it is seeded.
    with patch("nltk.download", return_value=False):
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0
    return {
        name: (benchmark, kind)
        for benchmark, of in (("ifbench", IFBENCH), ("ifeval", IFEVAL))
        for name, kind in of.items()
    }
