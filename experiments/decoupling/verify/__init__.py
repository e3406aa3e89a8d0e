"""Is a response right? By its gold answer, or by the instructions in its query.

Which of both applies is told from the data: instructions where the metadata hold
``instruction_id_list`` and ``kwargs`` (IFEval, IFBench), else maths where there is a gold answer
that is mathematics (GSM8K, MATH).
"""

from collections.abc import Mapping
from typing import Any

from experiments.decoupling.verify import instructions, maths
from experiments.decoupling.verify.verdict import TimedOut, Verdict, limited

SECONDS = 5.0  # for one response


def verifier_of(answer: str | None, metadata: Mapping[str, Any]) -> str | None:
    """``instructions``, ``maths``, or None: there is nothing to hold a response against."""
    if instructions.applies(metadata):
        return instructions.NAME
    return maths.NAME if answer is not None and maths.gold(answer) else None


def verify(
    query: str,
    response: str,
    answer: str | None,
    metadata: Mapping[str, Any],
    *,
    cut_off: bool = False,
    seconds: float = SECONDS,
) -> Verdict:
    """Hold a response against its gold answer or its query's instructions.

    A verifier that crashes, or takes longer, gives a verdict without an answer that says so.

    Args:
        query: what was asked.
        response: what the model said; what stands before the last ``</think>`` isn't looked at.
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
    said = response.rpartition("</think>")[2]
    if name == instructions.NAME:
        instructions.checkers()  # what has to be imported takes seconds that the limit isn't for
    try:
        with limited(seconds):
            if name == maths.NAME:
                return maths.verdict(said, answer, cut_off=cut_off)
            return instructions.verdict(query, said, metadata)
    except TimedOut:
        return Verdict(name, None, f"the verifier took more than {seconds:g} s")
    except Exception as error:  # two libraries raise here, on text that nobody controls
        return Verdict(name, None, f"the verifier failed: {type(error).__name__}")
