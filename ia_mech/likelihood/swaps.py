"""Responses and references of other conversations, to be put in the place of a conversation's own.

A donor is of the same dataset, so that it is about the same kind of task, and of another source, so
that it isn't about the same prompt. Which ones are drawn depends on the seed and the conversation
alone, whatever order contexts are computed in.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ia_mech.data.conversations import Conversation
from ia_mech.engine.sampling import stream_key

REACH = 4  # a response is drawn from the nearest in length, so many times as many as are wanted
RESPONSES, REFERENCES = -1, -2  # streams of their own, which no sample of a run has


@dataclass(frozen=True)
class Donor:
    """What a conversation can lend.

    Attributes:
        order: of the conversation in the run.
        tokens: of its response.
        reference: the user turn that followed in the data, or None.
    """

    order: int
    id: str
    source_id: str
    dataset: str
    response: str
    tokens: int
    reference: str | None


class Donors:
    """All conversations of a run as lenders; which is which is told by ``order``.

    Args:
        donors: one per conversation.
        seed: of the draws.
    """

    def __init__(self, donors: Iterable[Donor], seed: int) -> None:
        self._all = {donor.order: donor for donor in sorted(donors, key=lambda d: d.order)}
        self._of_dataset: dict[str, dict[int, list[Donor]]] = {}
        for donor in self._all.values():
            by_length = self._of_dataset.setdefault(donor.dataset, {})
            by_length.setdefault(donor.tokens, []).append(donor)
        self._lengths = {name: sorted(by) for name, by in self._of_dataset.items()}
        self._with_reference = {
            name: _References([d for d in self._all.values() if d.dataset == name])
            for name in self._of_dataset
        }
        self._seed = seed

    @classmethod
    def of(
        cls, rows: Iterable[tuple[int, Conversation, dict | None]], tokenizer, seed: int
    ) -> "Donors":
        """Of a run's (order, conversation, response that the model wrote, if it did)."""

        def donor(order: int, conversation: Conversation, written: dict | None) -> Donor:
            if written is not None:
                response, tokens = written["response"], written["tokens"]
            else:
                response = conversation.response or ""
                tokens = len(tokenizer(response, add_special_tokens=False)["input_ids"])
            return Donor(
                order,
                conversation.id,
                conversation.source_id,
                conversation.dataset,
                response,
                tokens,
                conversation.reference,
            )

        return cls((donor(*row) for row in rows), seed)

    def responses(self, order: int, count: int) -> list[Donor]:
        """Lenders of responses about as long as a conversation's own.

        Args:
            order: of the conversation.
            count: how many are wanted; they are drawn from the ``REACH · count`` nearest in length
                (ties: the earlier conversation), fewer if there are not so many.

        Returns:
            At most ``count``, no two with the same response, none empty or the conversation's own.
        """
        own, near = self._all[order], []
        said = {own.response.strip(), ""}
        for donor in self._nearest(own):
            if len(near) == REACH * count:
                break
            if donor.source_id != own.source_id and donor.response.strip() not in said:
                said.add(donor.response.strip())
                near.append(donor)
        return self._draw(near, count, own, RESPONSES)

    def reference(self, order: int, besides: Sequence[Donor] = ()) -> Donor | None:
        """A lender of a reference turn: another one than ``besides``; None if there is none."""
        own = self._all[order]
        taken = {own.source_id, *(donor.source_id for donor in besides)}
        others = self._with_reference[own.dataset].besides(taken, own.reference)
        drawn = self._draw(others, 1, own, REFERENCES)
        return drawn[0] if drawn else None

    def _nearest(self, own: Donor) -> Iterator[Donor]:
        """Donors of the dataset by the difference of their response's length from the own one."""
        by_length = self._of_dataset[own.dataset]
        lengths = self._lengths[own.dataset]
        above = bisect_left(lengths, own.tokens)
        below = above - 1
        while below >= 0 or above < len(lengths):
            down = own.tokens - lengths[below] if below >= 0 else float("inf")
            up = lengths[above] - own.tokens if above < len(lengths) else float("inf")
            same: list[Donor] = []
            if up <= down:
                same += by_length[lengths[above]]
                above += 1
            if down <= up:
                same += by_length[lengths[below]]
                below -= 1
            yield from sorted(same, key=lambda donor: donor.order)

    def _draw(self, donors: Sequence[Donor], count: int, own: Donor, stream: int) -> list[Donor]:
        rng = np.random.default_rng(list(stream_key(self._seed, own.id, stream)))
        chosen = rng.permutation(len(donors))[:count]
        return [donors[i] for i in chosen]


class _References:
    """Donors of one dataset that have a reference.

    Who of them may lend is asked once per conversation of the run, so it is found on arrays.
    """

    def __init__(self, donors: list[Donor]) -> None:
        kept = [donor for donor in donors if (donor.reference or "").strip()]
        self._donors = np.array(kept, dtype=object)
        self._source_code: dict[str, int] = {}
        self._text_code: dict[str, int] = {}
        coded = [
            (
                self._source_code.setdefault(donor.source_id, len(self._source_code)),
                self._text_code.setdefault(donor.reference, len(self._text_code)),
            )
            for donor in kept
        ]
        self._sources, self._texts = np.array(coded, dtype=np.int64).reshape(-1, 2).T

    def besides(self, sources: set[str], reference: str | None) -> Sequence[Donor]:
        """Those of other sources and with another reference."""
        taken = [self._source_code.get(source, -1) for source in sources]
        own = self._text_code.get(reference, -1)
        return self._donors[~np.isin(self._sources, taken) & (self._texts != own)]
