"""Instructions that a program can check, by ``if-verifiable``: those of IFEval and IFBench.

The library holds the checkers of google-research's IFEval (25 instructions) and of allenai's
IFBench (58). Seven of them look words or sentences up in NLTK's data, which no package brings along
and which isn't downloaded here: without it their prompts aren't verified.

The checkers are the benchmarks' own, crude ones included: "every 5th word in Japanese" is followed
by a response of four words, and "answer in German" by one whose language can't be told.
"""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any
from unittest.mock import patch

from experiments.decoupling.verify.verdict import Verdict

NAME = "instructions"
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


def applies(metadata: Mapping[str, Any]) -> bool:
    """Whether a conversation has instructions, in the form in which both datasets give them."""
    ids, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    return (
        isinstance(ids, list)
        and isinstance(kwargs, list)
        and 0 < len(ids) == len(kwargs)
        and all(isinstance(name, str) for name in ids)
        and all(isinstance(given, dict | None) for given in kwargs)
    )


def verdict(query: str, response: str, metadata: Mapping[str, Any]) -> Verdict:
    """Check every instruction; a response is right if all are followed, strictly.

    If one can't be checked the verdict is open, even where another is violated: to count such
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
    return Verdict(NAME, correct, why, instructions=ids, followed=strict, followed_loosely=loose)


def check(
    name: str, given: Mapping[str, Any], query: str, response: str
) -> tuple[bool | None, bool | None, str]:
    """One instruction: followed strictly, followed loosely, and why that can't be told.

    Args:
        name: id of the instruction.
        given: its parameters; None stands for one that it doesn't take.
        query: what was asked, which "repeat the prompt" is held against.
        response: what was said. An empty one follows nothing.
    """
    from if_verifiable import IFBenchSample, evaluate_output_for_sample

    known = checkers()
    if name not in known:
        return None, None, "no verifier knows this instruction"
    benchmark, kind = known[name]
    given = {key: value for key, value in given.items() if value is not None}
    # Some checkers ask for it only of responses that are long enough, and call the others wrong:
    # without it, only wrong ones would count.
    if not all(map(_there, _NEEDS.get(name, ()))):
        return None, None, f"its verifier needs NLTK's data ({NLTK})"
    # A checker draws what it isn't told at random, and would judge by that.
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


def _there(resource: str) -> bool:
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
