"""Which other conversations' responses and references stand in for a conversation's own.

A swap source is of the same dataset (the same kind of task) and has another ``source_id`` (not the
same prompt). The draw depends on the seed and the conversation alone, whatever order contexts are
computed in.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ia_mech.data.conversations import Conversation
from ia_mech.engine.sampling import stream_key

REACH = 4  # responses are drawn from this many times as many conversations, the nearest in length
RESPONSES, REFERENCES = -1, -2  # random streams that no sample of a run has


@dataclass(frozen=True)
class SwapSource:
    """What a conversation offers to others.

    ``order`` is its index in the run, ``tokens`` the length of its response, and ``reference`` the
    user turn that followed in the data, if one did.
    """

    order: int
    id: str
    source_id: str
    dataset: str
    response: str
    tokens: int
    reference: str | None


class SwapSources:
    """All conversations of a run as swap sources; ``order`` says which is which.

    Args:
        sources: one per conversation.
        seed: of the draws.
    """

    def __init__(self, sources: Iterable[SwapSource], seed: int) -> None:
        self._all = {one.order: one for one in sorted(sources, key=lambda one: one.order)}
        self._seed = seed
        by_dataset: dict[str, list[SwapSource]] = {}
        for one in self._all.values():
            by_dataset.setdefault(one.dataset, []).append(one)
        self._by_length = {name: _ByLength(found) for name, found in by_dataset.items()}
        self._references = {name: _References(found) for name, found in by_dataset.items()}

    @classmethod
    def of(
        cls, rows: Iterable[tuple[int, Conversation, dict | None]], tokenizer, seed: int
    ) -> "SwapSources":
        """From (order, conversation, the response the model wrote or None) of a run."""

        def swap_source(order: int, one: Conversation, written: dict | None) -> SwapSource:
            if written is not None:
                response, tokens = written["response"], written["tokens"]
            else:
                response = one.response or ""
                tokens = len(tokenizer(response, add_special_tokens=False)["input_ids"])
            return SwapSource(
                order, one.id, one.source_id, one.dataset, response, tokens, one.reference
            )

        return cls((swap_source(*row) for row in rows), seed)

    def responses(self, order: int, count: int) -> list[SwapSource]:
        """Swap sources whose responses are about as long as a conversation's own.

        Args:
            order: of the conversation.
            count: how many are wanted; drawn from the ``REACH · count`` nearest in length (ties:
                the earlier conversation).

        Returns:
            At most ``count``, no two with the same response, none empty or the conversation's own.
        """
        own = self._all[order]
        near: list[SwapSource] = []
        seen = {own.response.strip(), ""}
        for one in self._by_length[own.dataset].nearest(own.tokens):
            if len(near) == REACH * count:
                break
            if one.source_id != own.source_id and one.response.strip() not in seen:
                seen.add(one.response.strip())
                near.append(one)
        return self._draw(near, count, own, RESPONSES)

    def reference(self, order: int, besides: Sequence[SwapSource] = ()) -> SwapSource | None:
        """One with a reference turn, none of ``besides``; None if there is none."""
        own = self._all[order]
        taken = {own.source_id, *(one.source_id for one in besides)}
        found = self._references[own.dataset].besides(taken, own.reference)
        drawn = self._draw(found, 1, own, REFERENCES)
        return drawn[0] if drawn else None

    def _draw(
        self, found: Sequence[SwapSource], count: int, own: SwapSource, stream: int
    ) -> list[SwapSource]:
        rng = np.random.default_rng(list(stream_key(self._seed, own.id, stream)))
        return [found[i] for i in rng.permutation(len(found))[:count]]


class _ByLength:
    """Swap sources of one dataset, found by the length of their response."""

    def __init__(self, sources: list[SwapSource]) -> None:
        self._of: dict[int, list[SwapSource]] = {}
        for one in sources:
            self._of.setdefault(one.tokens, []).append(one)
        self._lengths = sorted(self._of)

    def nearest(self, tokens: int) -> Iterator[SwapSource]:
        """All of them, by the distance of their length from ``tokens``, then by order."""
        above = bisect_left(self._lengths, tokens)
        below = above - 1
        while below >= 0 or above < len(self._lengths):
            down = tokens - self._lengths[below] if below >= 0 else float("inf")
            up = self._lengths[above] - tokens if above < len(self._lengths) else float("inf")
            same: list[SwapSource] = []
            if up <= down:
                same += self._of[self._lengths[above]]
                above += 1
            if down <= up:
                same += self._of[self._lengths[below]]
                below -= 1
            yield from sorted(same, key=lambda one: one.order)


class _References:
    """Swap sources of one dataset that have a reference, on arrays: each conversation searches
    all of them."""

    def __init__(self, sources: list[SwapSource]) -> None:
        kept = [one for one in sources if (one.reference or "").strip()]
        self._all = np.array(kept, dtype=object)
        self._source_code, self._sources = _coded([one.source_id for one in kept])
        self._text_code, self._texts = _coded([one.reference for one in kept])

    def besides(self, source_ids: set[str], reference: str | None) -> Sequence[SwapSource]:
        """Those with other source ids and another reference."""
        taken = [self._source_code.get(source_id, -1) for source_id in source_ids]
        own = self._text_code.get(reference, -1)
        return self._all[~np.isin(self._sources, taken) & (self._texts != own)]


def _coded(values: list[str | None]) -> tuple[dict[str | None, int], np.ndarray]:
    """A number for each distinct value, and the number of every value, int64."""
    code = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return code, np.array([code[value] for value in values], dtype=np.int64)
