"""What a model's rows hold in memory, and how much a part may take; when memory runs out, compute
the same again with fewer rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ia_mech.engine.installed import LayerBytes, installed
from ia_mech.engine.weights import held_bytes
from ia_mech.engine.workers import MOST_WORKERS, usable_cores, usable_memory
from ia_mech.errors import UserError, is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")

RESERVE = 8  # one part in so many of a device's memory is left to activations and drivers
# A step's logits, and two copies while a token is sampled from them; or, of captured steps, those
# in the memory of the graphs, those of the run before capturing, and the graphs' other tensors.
LOGITS_HELD = 3


@dataclass(frozen=True)
class Footprint:
    """What a model's contexts and rows hold.

    Attributes:
        weights: bytes of all weights, in both orders where the model holds both.
        vocab: how many logits a token has.
        layers: what the layers of its cache hold.
    """

    weights: int
    vocab: int
    layers: tuple[LayerBytes, ...]

    @classmethod
    def read(cls, recorded: dict) -> "Footprint":
        """A footprint from what ``run.json`` has of it, its ``asdict``."""
        layers = tuple(LayerBytes(*one) for one in recorded["layers"])
        return cls(recorded["weights"], recorded["vocab"], layers)

    def context(self, tokens: int) -> int:
        """Bytes of a prefilled context of so many tokens."""
        return sum(one.layers * one.of(tokens) for one in self.layers)

    def row(self, tokens: int, new: int) -> int:
        """Most bytes of a row that goes on from such a context for ``new`` tokens: its own state,
        one layer of it twice while that is replaced, and its logits."""
        own = sum(one.layers * (one.fixed + one.each * new) for one in self.layers if one.shared)
        copied = [one for one in self.layers if not one.shared]
        twice = max((one.of(tokens + new) for one in copied), default=0)
        own += sum(one.layers * one.of(tokens + new) for one in copied)
        return own + twice + LOGITS_HELD * 4 * self.vocab


def footprint(model: PreTrainedModel) -> Footprint:
    """The footprint of a model that has passed the start-up check, which measured it."""
    made = installed(model)
    return Footprint(held_bytes(model), made.config.vocab_size, made.held)


def part_bytes(device: torch.device, weights: int, everywhere: bool = False) -> int:
    """How many bytes of this machine's memory a part may take, however many are free now.

    Args:
        everywhere: the weights are distributed over all GPUs.

    Returns:
        All that the device has, less the weights and a reserve; on a CPU, one worker's share of
        that, with as many workers as its cores allow.
    """
    if device.type == "cpu":
        total, workers = usable_memory().total, min(MOST_WORKERS, usable_cores())
    else:
        count = torch.cuda.device_count() if everywhere else 1
        total, workers = torch.cuda.get_device_properties(device).total_memory * count, 1
    left = total - total // RESERVE - weights
    return max(left, total // RESERVE) // workers


# What decoding with a model leaves for the next one: tensors and graphs of captured steps. One that
# decodes takes it out.
kept: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()

_share = ContextVar("_share", default=1)  # passes may hold one part in so many of their limits


def allowed(most: int) -> int:
    """How much of the limit ``most`` this thread's passes may use at the moment; at least 1."""
    return max(1, most // _share.get())


@contextmanager
def smaller_passes(share: int) -> Iterator[None]:
    """While it lasts, this thread's passes hold at most one part in ``share`` of their limits."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


class Backoff:
    """Call functions with a limit that is halved whenever memory runs out, and nothing in
    :data:`kept` can be given up for it.

    The smaller limit stays in force. Smaller batches round differently and may change rows whose
    decision was a near-tie: ``notify`` lets the run record that.

    Args:
        notify: called with the new limit whenever it shrinks.
    """

    def __init__(self, limit: int, notify: Callable[[int], None] = lambda limit: None) -> None:
        self.limit = limit
        self._notify = notify

    def retry(self, function: Callable[[int], Result], most: int | None = None) -> Result:
        """Call ``function`` with the limit, halved until memory suffices; returns its result.

        Args:
            function: takes the most items that it may compute together.
            most: how many items there are at all, if that is known.

        Raises:
            UserError: not even one item fits.
        """
        while True:
            size = self.limit if most is None else min(self.limit, most)
            try:
                return function(size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block: the traceback would keep the batch's tensors alive.
            spare = bool(kept)
            kept.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if spare:
                continue
            if size == 1:
                raise UserError(
                    "out of memory with a batch of one",
                    "use a smaller model, --dtype bfloat16, or shorter conversations",
                )
            self.limit = size // 2
            self._notify(self.limit)

    def map(
        self, function: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> list[Result]:
        """All results of ``function`` on consecutive slices of ``items``.

        Raises:
            UserError: as for :meth:`retry`.
        """
        results: list[Result] = []
        while rest := items[len(results) :]:

            def of_first(size: int, rest: Sequence[Item] = rest) -> Sequence[Result]:
                return function(rest[:size])

            results.extend(self.retry(of_first, len(rest)))
        return results
