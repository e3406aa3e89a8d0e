"""Which row sits where in a batch, as all shared layers of its cache see it.

A line is a place in the batch. Rows that finish give their line to rows that begin, so the rows of
a batch may be of different age: line 3 may hold the fortieth token of one context's turn while line
4 holds the first of another's. Each line writes its own keys and values at its own age, and looks
at no more than it wrote.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Lines ``start`` to before ``stop``, in the order of :attr:`Lines.order`, of one context."""

    start: int
    stop: int
    context: int


@dataclass(frozen=True)
class Step:
    """What the layers need to know of the tokens that are being written.

    Attributes:
        start: where all lines write, or None if their ages differ.
        end: up to where the lines that are furthest hold keys afterwards.
        places: ``[lines or 1, new]`` int64, where each line writes; None for one token of all lines
            of the same age.
        bias: ``[lines or 1, 1, new, end]``, 0 for keys that a token may look at, else minus
            infinity; None where each may look at all.
    """

    start: int | None
    end: int
    places: Tensor | None
    bias: Tensor | None


class Lines:
    """The lines of a batch.

    Args:
        contexts: of each line, the number of the context it continues.
        dtype: of the model.
        device: where its tensors are.

    Attributes:
        contexts: as given, kept up to date.
        ages: how many own tokens each line holds.
        padding: how many of these, the first ones, are none; nobody looks at them.
        order: ``[lines]`` int64, the lines sorted by context; None if they already are.
        back: ``[lines]`` int64, where each line is in that order; None likewise.
        spans: of the contexts, in that order.
        step: of the tokens that are being written.
    """

    def __init__(self, contexts: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.contexts, self.dtype, self.device = list(contexts), dtype, device
        self.ages, self.padding = [0] * len(contexts), [0] * len(contexts)
        self.step = Step(0, 0, None, None)
        self._idle: set[int] = set()
        self._sort()

    def __len__(self) -> int:
        return len(self.contexts)

    def _sort(self) -> None:
        order = sorted(range(len(self)), key=lambda line: self.contexts[line])
        self.order = self.back = None
        if order != list(range(len(self))):
            self.order = torch.tensor(order, device=self.device)
            self.back = self.order.argsort()
        self.spans = []
        for at, line in enumerate(order):
            context = self.contexts[line]
            if self.spans and self.spans[-1].context == context:
                self.spans[-1] = Span(self.spans[-1].start, at + 1, context)
            else:
                self.spans.append(Span(at, at + 1, context))

    def put(self, lines: list[int], contexts: list[int]) -> None:
        """Rows of these contexts begin in these lines; lines after the last one are new."""
        for line, context in zip(lines, contexts, strict=True):
            if line == len(self):
                self.contexts.append(context)
                self.ages.append(0)
                self.padding.append(0)
            else:
                self.contexts[line], self.ages[line], self.padding[line] = context, 0, 0
                self._idle.discard(line)
        self._sort()

    def keep(self, index: list[int]) -> None:
        """Only the given lines, in the given order."""
        self._idle = {at for at, line in enumerate(index) if line in self._idle}
        self.contexts = [self.contexts[line] for line in index]
        self.ages = [self.ages[line] for line in index]
        self.padding = [self.padding[line] for line in index]
        self._sort()

    def retire(self, lines: list[int]) -> None:
        """Nobody looks at these any more; what they compute until they are taken is thrown away."""
        self._idle.update(lines)

    def begin(self, new: int) -> None:
        """Each line is about to write ``new`` tokens; sets :attr:`step`."""
        busy = [age for line, age in enumerate(self.ages) if line not in self._idle]
        oldest = max(busy, default=0)
        for line in self._idle:  # kept in step, so that they neither differ nor need room
            self.ages[line] = oldest
        start = oldest if min(busy, default=0) == oldest else None
        places = bias = None
        if start is None or new > 1 or any(self.padding):
            ages = self.ages if start is None else [oldest]
            places = torch.tensor(ages, device=self.device)[:, None]
            places = places + torch.arange(new, device=self.device)
            unseen = self._unseen(places, oldest + new)
            bias = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device)
            bias.masked_fill_(unseen, -torch.inf)
        self.step = Step(start, oldest + new, places, bias)

    def _unseen(self, places: Tensor, end: int) -> Tensor:
        """Which of the keys before ``end`` tokens at these places may not look at,
        ``[lines or 1, 1, new, end]`` bool."""
        keys, own = torch.arange(end, device=self.device), places[:, None, :, None]
        unseen = keys > own
        if any(self.padding):
            padding = torch.tensor(self.padding, device=self.device)[:, None, None, None]
            # Padding looks at itself, since to look at nothing would give no number.
            unseen = unseen | ((keys < padding) & (keys != own))
        return unseen

    def finish(self, new: int) -> None:
        """The tokens are written."""
        self.ages = [age + new for age in self.ages]

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write ``[lines, heads, new, dim]`` into a buffer ``[capacity, heads, room, dim]``.

        Returns:
            A view of what the lines hold, ``[lines, heads, end, dim]``.
        """
        used = buffer[: len(self), :, : self.step.end]
        if self.step.start is not None:
            used[:, :, self.step.start :] = states
        else:
            line = torch.arange(len(self), device=self.device)[:, None]
            used[line, :, self.step.places] = states.transpose(1, 2)
        return used
