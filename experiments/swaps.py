"""Which other conversations' responses and follow-ups stand in for a conversation's own.

A donor, the other conversation, is of the same dataset (the same kind of task) and has another
``source_id`` (not the same prompt). The choice depends on the seed and the conversation alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ia_mech.data.conversations import Conversation
from ia_mech.engine.sampling import stream_key

REACH = 4  # responses are drawn from this many times as many conversations, the nearest in length
RESPONSES, REFERENCES = -1, -2  # random streams that no sample of a run has


class Donors:
    """Conversations that are donors to each other; they are named by their number in ``those``.

    Args:
        those: conversations with their responses.
        tokenizer: counts the tokens of responses.
        seed: of the draws.
    """

    def __init__(self, those: Sequence[Conversation], tokenizer: Any, seed: int) -> None:
        texts = [one.response or "" for one in those]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self._all, self._seed = list(those), seed
        self._tokens = np.array([len(one) for one in ids])
        self._ids = np.array([one.id for one in those])

    def responses(
        self, recipient: int, count: int, besides: Sequence[Conversation] = ()
    ) -> list[str]:
        """Responses of other conversations, about as long as a conversation's own.

        Args:
            recipient: the number of the conversation.
            count: how many are wanted; drawn from the ``REACH · count`` nearest in length (ties: by
                id).
            besides: conversations whose sources are not wanted.

        Returns:
            At most ``count``, no two the same, none empty or the conversation's own.
        """
        own = self._all[recipient]
        taken = {own.source_id, *(one.source_id for one in besides)}
        near: dict[str, str] = {}
        for i in np.lexsort((self._ids, abs(self._tokens - self._tokens[recipient]))):
            one, text = self._all[i], self._all[i].response or ""
            if one.dataset == own.dataset and one.source_id not in taken:
                near.setdefault(text.strip(), text)
        unwanted = ("", (own.response or "").strip())
        found = [text for bare, text in near.items() if bare not in unwanted]
        return self._draw(found[: REACH * count], count, own, RESPONSES)

    def reference(self, recipient: int) -> Conversation | None:
        """A donor with another follow-up; None if there is none."""
        own = self._all[recipient]
        found = [
            one
            for one in self._all
            if one.dataset == own.dataset
            and one.source_id != own.source_id
            and (one.reference or "").strip()
            and one.reference != own.reference
        ]
        found.sort(key=lambda one: one.id)
        return next(iter(self._draw(found, 1, own, REFERENCES)), None)

    def _draw(self, found: Sequence[Any], count: int, own: Conversation, stream: int) -> list:
        rng = np.random.default_rng(list(stream_key(self._seed, own.id, stream)))
        return [found[i] for i in rng.permutation(len(found))[:count]]
