"""Which other conversations' responses and follow-ups stand in for a conversation's own.

A donor, the other conversation, is of the same dataset (the same kind of task) and has another
``source_id`` (not the same prompt). The choice depends on the seed and the conversation alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ia_mech.data.conversations import Conversation
from ia_mech.engine.sampling import stream_key

REACH = 4  # responses are drawn from this many times as many conversations, the nearest in length
RESPONSES, REFERENCES = -1, -2  # random streams that no sample of a run has


@dataclass(frozen=True)
class Donor:
    """What a conversation offers to others.

    Attributes:
        id: of the conversation.
        source_id: of its prompt.
        dataset: that it is of.
        response: the text.
        tokens: of the response.
        reference: what the user said next, if the data says it.
    """

    id: str
    source_id: str
    dataset: str
    response: str
    tokens: int
    reference: str | None


def donor_of(conversation: Conversation, tokenizer: Any) -> Donor:
    """What a conversation with its response offers; ``tokenizer`` counts the response's tokens."""
    one, response = conversation, conversation.response or ""
    tokens = len(tokenizer(response, add_special_tokens=False)["input_ids"])
    return Donor(one.id, one.source_id, one.dataset, response, tokens, one.reference)


class Donors:
    """Conversations that are donors to each other; they are named by their number in ``those``."""

    def __init__(self, those: Sequence[Donor], seed: int) -> None:
        self._all, self._seed = list(those), seed
        self._datasets = np.array([one.dataset for one in those], dtype=object)
        self._ids = np.array([one.id for one in those])
        self._sources = np.array([one.source_id for one in those], dtype=object)
        self._tokens = np.array([one.tokens for one in those])

    def responses(self, recipient: int, count: int, besides: Sequence[Donor] = ()) -> list[Donor]:
        """Donors whose responses are about as long as a conversation's own.

        Args:
            recipient: the number of the conversation.
            count: how many are wanted; drawn from the ``REACH · count`` nearest in length (ties: by
                id).
            besides: donors whose sources are not wanted.

        Returns:
            At most ``count``, no two with the same response, none empty or the conversation's own.
        """
        own = self._all[recipient]
        taken = {one.source_id for one in besides}
        others = self._others(own)
        others = others[[self._sources[i] not in taken for i in others]]
        by_distance = np.lexsort((self._ids[others], abs(self._tokens[others] - own.tokens)))
        near: list[Donor] = []
        seen = {own.response.strip(), ""}
        for one in (self._all[others[i]] for i in by_distance):
            if len(near) == REACH * count:
                break
            if one.response.strip() not in seen:
                seen.add(one.response.strip())
                near.append(one)
        return self._drawn(near, count, own, RESPONSES)

    def reference(self, recipient: int) -> Donor | None:
        """One with another follow-up; None if there is none."""
        own = self._all[recipient]
        found = [
            one
            for one in (self._all[i] for i in self._others(own))
            if (one.reference or "").strip() and one.reference != own.reference
        ]
        found.sort(key=lambda one: one.id)
        return next(iter(self._drawn(found, 1, own, REFERENCES)), None)

    def _others(self, own: Donor) -> np.ndarray:
        return np.flatnonzero((self._datasets == own.dataset) & (self._sources != own.source_id))

    def _drawn(self, found: Sequence[Donor], count: int, own: Donor, stream: int) -> list[Donor]:
        rng = np.random.default_rng(list(stream_key(self._seed, own.id, stream)))
        return [found[i] for i in rng.permutation(len(found))[:count]]
