"""Which other conversations' responses stand in for a conversation's own.

A donor, the other conversation, is of the same dataset (the same kind of task) and has another
``source_id`` (not the same prompt). The choice depends on the seed and the conversation alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ia_mech.data.conversations import Conversation
from ia_mech.engine.sampling import stream_key

REACH = 4  # responses are drawn from this many times as many conversations, the nearest in length
RESPONSES = -1  # a random stream that no sample of a run has


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

    def responses(self, recipient: int, count: int) -> list[str]:
        """Responses of other conversations, about as long as a conversation's own.

        Args:
            recipient: the number of the conversation.
            count: how many are wanted; drawn from the ``REACH · count`` nearest in length (ties: by
                id).

        Returns:
            At most ``count``, no two the same, none empty or the conversation's own.
        """
        own = self._all[recipient]
        near: dict[str, str] = {}
        for i in np.lexsort((self._ids, abs(self._tokens - self._tokens[recipient]))):
            one, text = self._all[i], self._all[i].response or ""
            if one.dataset == own.dataset and one.source_id != own.source_id:
                near.setdefault(text.strip(), text)
        unwanted = ("", (own.response or "").strip())
        found = [text for bare, text in near.items() if bare not in unwanted]
        rng = np.random.default_rng(list(stream_key(self._seed, own.id, RESPONSES)))
        nearest = found[: REACH * count]
        return [nearest[i] for i in rng.permutation(len(nearest))[:count]]
