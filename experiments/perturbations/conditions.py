"""The conditions: what is changed of a conversation. Pure and seeded; the source stays the same."""

from dataclasses import dataclass, replace

import numpy as np

from experiments.perturbations import responses
from experiments.perturbations.responses import UNCHANGED, Text
from ia_mech.conversations import (
    UNPERTURBED,
    UNPERTURBED_RESPONSE,
    USER_HEADER,
    Conversation,
)
from ia_mech.sampling import stream_key

REMOVE, SWAP, BARE = "remove", "swap", "header_only"
STREAM = -3  # of the draws; samples and lenders have streams of their own


@dataclass(frozen=True)
class Condition:
    """What is changed.

    Attributes:
        about: in a line.
        header: which header is opened.
    """

    about: str
    header: str = USER_HEADER


CONDITIONS = {
    "truncate": Condition("the first half of the response, cut at a sentence's end"),
    "truncate_mid": Condition("the first half of the response, cut inside a sentence"),
    "ask": Condition("a generic question after the response"),
    REMOVE: Condition("an empty response"),
    SWAP: Condition("another conversation's response of similar length, same dataset"),
    "contradict": Condition("a wrong final answer (a number), or else a sentence that retracts"),
    "neutral": Condition("an empty acknowledgement in place of the response"),
    "shuffle": Condition("the response's sentences in random order"),
    BARE: Condition("the bare user header, with no conversation", "alone"),
    "header_assistant": Condition("an assistant header in the user header's place", "assistant"),
    "header_no_turn_end": Condition("the token that ends the response left out", "no_turn_end"),
    "header_no_separator": Condition(
        "what stands between turn end and header left out", "no_turn_separator"
    ),
}


def perturbed(
    conversation: Conversation, name: str, seed: int, lender: str | None = None
) -> Conversation:
    """A conversation under a condition.

    What is drawn depends on seed, condition and conversation alone. Query, system message, earlier
    turns, reference, answer, dataset and ``source_id`` stay.

    Args:
        conversation: unperturbed, with its response.
        name: one of :data:`CONDITIONS`.
        seed: of the draws.
        lender: the response that ``swap`` puts in place.

    Returns:
        A conversation whose metadata says what its response was (``unperturbed_response``), whose
        it was (``unperturbed_id``) and how it was changed (``how``).

    Raises:
        ValueError: an unknown condition, a perturbed conversation, or no lender to swap with.
    """
    if conversation.perturbation != UNPERTURBED or conversation.response is None:
        raise ValueError("only an unperturbed conversation with a response can be perturbed")
    changed = _response(conversation, name, seed, lender)
    about = {
        UNPERTURBED_RESPONSE: conversation.response,
        "unperturbed_id": conversation.id,
        "how": changed.how,
    }
    return replace(
        conversation.with_response(changed.text),
        id=f"{conversation.id}~{name}",
        perturbation=name,
        header=CONDITIONS[name].header,
        metadata=conversation.metadata | about,
    )


def _response(conversation: Conversation, name: str, seed: int, lender: str | None) -> Text:
    text = conversation.response
    number = STREAM - list(CONDITIONS).index(name)
    rng = np.random.default_rng(list(stream_key(seed, conversation.id, number)))
    if name == "truncate":
        return responses.truncate(text)
    if name == "truncate_mid":
        return responses.truncate_mid(text)
    if name == "ask":
        return responses.ask(text, rng)
    if name == REMOVE:
        return Text("", "removed" if text.strip() else UNCHANGED)
    if name == SWAP:
        if lender is None:
            raise ValueError("swap needs another conversation's response")
        return Text(lender, "swapped")
    if name == "contradict":
        return responses.contradict(text, conversation.answer, rng)
    if name == "neutral":
        return responses.neutral(rng)
    if name == "shuffle":
        return responses.shuffle(text, rng)
    return Text(text, "header")
