"""What is computed together, and what to do when memory runs out.

Batches and units are pure functions of configuration and contexts. Rounding depends on the batch a
row sits in, so a run gives the same bits again only if it forms the same batches again: nothing
here looks at the clock, at free memory or at what was already done.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ia_mech.errors import UserError, is_out_of_memory
from ia_mech.models import parallel

Item = TypeVar("Item")
Result = TypeVar("Result")


class OomBackoff:
    """Map a function over slices of a sequence, halving the slice whenever memory runs out.

    The smaller size stays in force. Smaller batches round differently and may change rows whose
    decision was a near-tie: ``notify`` lets the run record it.

    Args:
        limit: most items per call.
        notify: called with the new size whenever it shrinks.
        outermost: whether a single item that doesn't fit is an error for the user, or else a
            ``MemoryError``, on which a caller may use a smaller batch.
    """

    def __init__(
        self,
        limit: int,
        notify: Callable[[int], None] | None = None,
        *,
        outermost: bool = True,
    ) -> None:
        self.limit = limit
        self._notify = notify
        self._outermost = outermost

    def map(
        self, function: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> list[Result]:
        """All results of ``function`` on consecutive slices of ``items``.

        Raises:
            UserError, MemoryError: a single item doesn't fit (see ``outermost``).
        """
        results: list[Result] = []
        while len(results) < len(items):
            group = items[len(results) : len(results) + self.limit]
            try:
                results.extend(function(group))
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the except block: the traceback would keep the batch's tensors alive.
            self._halve(len(group))
        return results

    def retry(self, function: Callable[[int], Result]) -> Result:
        """The result of ``function``, which is called with the limit until that is small enough.

        Raises:
            UserError, MemoryError: as for :meth:`map`.
        """
        while True:
            try:
                return function(self.limit)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            self._halve(self.limit)

    def _halve(self, size: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if parallel.active():  # the other ranks go on with larger batches
            raise parallel.OnThisRank(
                f"out of memory on rank {os.environ['RANK']} with {size} items together",
                "lower --batch-rows, or use more ranks for --tensor-parallel",
            )
        if size == 1 and not self._outermost:
            raise MemoryError("a single item doesn't fit")
        if size == 1:
            raise UserError(
                "out of memory with a batch of one",
                "use a smaller model, --dtype bfloat16, or shorter conversations",
            )
        self.limit = size // 2
        if self._notify is not None:
            self._notify(self.limit)


COLDEST, HOTTEST = 1e-3, 1e3  # logits divided by less or by more leave what float32 can tell apart
MOST = 1_000_000  # samples of a temperature, and tokens of a turn
# Contexts of a bucket, on average, where more don't fill a batch; bounds memory, and lost balance
# between shards, whatever the size of the run.
BUCKET = 64
UNIT_BATCHES = 3  # most batches that are written together
# Responses are long, so that few of them are as much work as a unit may be; but a step costs the
# same for few rows as for many, and fewer rows than these would mostly wait for it.
RESPONSE_ROWS = 32
SLOW = 150  # decoded tokens per second of a small model on two busy cores
# Costs in decoded tokens (SmolLM2-135M, float32, one AVX-512 core: 3.0 ms per decoded token in a
# batch of 65 to 104 rows).
STEP_COST = 9.0  # per decoding step, however many rows take part
PREFILL_COST = 0.5  # per prefilled token
SCORE_COST = 1.6  # per token of a turn that is scored at all temperatures
RESCORE_COST = 1.0  # per token of a turn that is scored at T = 1, in another context


@dataclass(frozen=True)
class BatchDefaults:
    """How much is computed together on a kind of device, and how much a kill costs there.

    Attributes:
        batch_rows: rows decoded together, unless the configuration says otherwise.
        prefill_tokens: most tokens of one prefill, padding included.
        unit_cost: most work, in decoded tokens, that is written together, and so lost in a kill.
    """

    batch_rows: int
    prefill_tokens: int
    unit_cost: float


# A CPU is fastest while a prefill's activations fit into its caches (four contexts of 230 tokens
# take a fourth less time each than sixteen); a unit takes at most 20 seconds where it is slow. A
# GPU is fast when it has much to do; its numbers are estimates (see benchmarks/README.md).
CPU = BatchDefaults(128, 1024, 20 * SLOW)
GPU = BatchDefaults(1024, 8192, 262_144)


@dataclass(frozen=True)
class Grid:
    """The decoding settings of a run: greedy, and ``samples`` rows at each temperature."""

    temperatures: tuple[float, ...] = (0.7, 1.0, 1.3)
    samples: int = 4
    max_new_tokens: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            check_temperature(temperature)
        if 0 in self.temperatures:
            raise UserError(
                "temperature 0 is greedy decoding, which every run has", "leave 0 out of the list"
            )
        if len(set(self.temperatures)) < len(self.temperatures):
            raise UserError(
                f"a temperature is given twice ({' '.join(map(str, self.temperatures))})",
                "give each once; --samples sets how often it is sampled",
            )
        for flag, value in (("samples", self.samples), ("max-new-tokens", self.max_new_tokens)):
            if value < 1:
                raise UserError(f"--{flag} {value}", "give at least 1")
            if value > MOST:  # rows are planned as lists
                raise UserError(f"--{flag} {value}", f"give at most {MOST}")

    def rows(self) -> list[tuple[float, int]]:
        """(temperature, sample) of every row of a context: greedy first, as (0.0, 0)."""
        sampled = [(t, s) for t in self.temperatures for s in range(self.samples)]
        return [(0.0, 0), *sampled]


def check_temperature(value: float, name: str = "temperature") -> None:
    """Raise UserError for a temperature that can't be sampled at; 0 is greedy decoding."""
    if not (value == 0 or COLDEST <= value <= HOTTEST):
        raise UserError(
            f"{name} {value} is not possible",
            f"give finite temperatures above 0 ({COLDEST:g} to {HOTTEST:g})",
        )


def plan_units(
    lengths: Sequence[int],
    contexts_per_unit: int,
    max_tokens: float = math.inf,
    max_padding: float = math.inf,
) -> list[list[int]]:
    """Split contexts into units that are computed, or written, together.

    Contexts of similar length share a unit, which keeps the padding small; ties keep their order.

    Args:
        lengths: tokens of each context.
        contexts_per_unit: how many contexts a unit holds at most.
        max_tokens: most tokens of a unit, padding included; a longer context is a unit of its own.
        max_padding: most padding of a unit, as a share of its real tokens.

    Returns:
        Lists of indices into ``lengths``; every index once.
    """
    units: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Sorted, so the context that comes last is the longest of its unit.
        if units and len(units[-1]) < contexts_per_unit:
            padded = (len(units[-1]) + 1) * lengths[i]
            real = lengths[i] + sum(lengths[j] for j in units[-1])
            if padded <= max_tokens and padded - real <= max_padding * real:
                units[-1].append(i)
                continue
        units.append([i])
    return units


def evenly(count: int, most: int) -> int:
    """The size of equal parts of ``count`` items, at most ``most`` each."""
    return -(-count // max(1, -(-count // most)))


def consecutive(lengths: Sequence[float], max_tokens: float) -> list[list[int]]:
    """Indices in order, cut where a part would exceed ``max_tokens``; a longer item is alone."""
    parts: list[list[int]] = []
    tokens = 0.0
    for i, length in enumerate(lengths):
        tokens += length
        if not parts or tokens > max_tokens:
            parts.append([])
            tokens = length
        parts[-1].append(i)
    return parts


def batch_defaults(device: torch.device) -> BatchDefaults:
    """Batch-size defaults for ``device``."""
    return CPU if device.type == "cpu" else GPU


def contexts_per_batch(rows_per_context: int, batch_rows: int) -> int:
    """How many contexts fill a batch of ``batch_rows`` rows; at least one."""
    return max(1, batch_rows // rows_per_context)


def bucket_count(contexts: int, rows_per_context: int, batch_rows: int) -> int:
    """Into how many buckets the contexts of a run are dealt; no batch holds contexts of two.

    A bucket fills a batch on average, so that few are left half empty.
    """
    return -(-contexts // max(BUCKET, contexts_per_batch(rows_per_context, batch_rows)))


def bucket_of(dataset: str, source_id: str, buckets: int) -> int:
    """The bucket of a source: it depends on nothing but its name and the number of buckets."""
    name = json.dumps([dataset, source_id]).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) % buckets


def write_units(
    lengths: Sequence[int], costs: Sequence[float], most_contexts: int, most_cost: float
) -> list[list[int]]:
    """Split contexts into the units that are computed through one batch and written together.

    Args:
        lengths: tokens of each context; units hold contexts of similar length.
        costs: work on each, in decoded tokens.
        most_contexts: most contexts of a unit.
        most_cost: most work of a unit; a context that takes more is a unit of its own.

    Returns:
        Lists of indices into ``lengths``; every index once.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    units = []
    for part in consecutive([costs[i] for i in by_length], most_cost):
        size = evenly(len(part), most_contexts)
        for start in range(0, len(part), size):
            units.append([by_length[i] for i in part[start : start + size]])
    return units
