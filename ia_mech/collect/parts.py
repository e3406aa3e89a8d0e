"""The parts of a run: what is dealt to a shard, computed, written and resumed as one.

A **part** is some consecutive contexts with all their rows. Parts are a pure function of settings
and conversations, since rounding depends on the batch that a row sits in: nothing here looks at the
clock, at what was already done, or at the number of shards. Memory only limits how many rows of a
part are computed together. The machine that begins a run decides how much of it a part may take,
and records that; all others read it from the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ia_mech.run import layout
from ia_mech.settings import BATCH_ROWS, Settings, Shard

RESPONSES = 16  # fewer responses together cost as much: reading the weights is what takes the time
# A part of contexts has so many times the rows that are decoded together, and the others wait. Most
# turns are short and a few long: a GPU's step takes as long for the last rows as for a thousand.
QUEUE = {"cpu": 1, "cuda": 4}
PARTS = {"cpu": 4, "cuda": 1}  # parts come in such numbers, so that workers end together


@dataclass(frozen=True)
class Parts:
    """What is computed, written and resumed together.

    Attributes:
        contexts: by name, the orders of the contexts of each part.
        responses: by name, the orders of the contexts whose responses are written in each part.
            These parts are wider, since responses are long and a step costs little more for many
            rows. Each covers whole parts of contexts.
    """

    contexts: dict[str, list[int]]
    responses: dict[str, list[int]]

    @property
    def counts(self) -> dict[str, int]:
        """How many parts there are of each kind: what ``run.json`` says."""
        return {"responses": len(self.responses), "contexts": len(self.contexts)}

    @property
    def orders(self) -> list[int]:
        """The contexts of all parts."""
        return [order for part in self.contexts.values() for order in part]

    def of_shard(self, shard: Shard) -> "Parts":
        """The parts that are dealt to a shard: each n-th, with the responses that they need."""
        number, of = shard

        def dealt(parts: dict[str, list[int]]) -> dict[str, list[int]]:
            return dict([*parts.items()][number - 1 :: of])

        if not self.responses:
            return replace(self, contexts=dealt(self.contexts))
        written = dealt(self.responses)
        orders = {order for part in written.values() for order in part}
        mine = {name: part for name, part in self.contexts.items() if part[0] in orders}
        return Parts(mine, written)


def plan_parts(settings: Settings, device: str, written: Sequence[int | None]) -> Parts:
    """The parts of a run.

    Parts of contexts are alike in size, with at most :data:`QUEUE` times ``batch_rows`` rows or one
    context each. Where the model writes several responses to a query, no part splits them: one is
    drawn in place of another.

    Args:
        settings: of the run.
        device: the kind of device that computes.
        written: of each context, which of the query's responses the model writes for it (0, 1, …);
            None if its response is given.
    """
    most, several = settings.batch_rows or BATCH_ROWS[device], PARTS[device]
    rows = len(settings.rows()) * settings.responses
    starts = [order for order, index in enumerate(written) if not index]
    parts = part_count(len(starts), max(1, QUEUE[device] * most // rows), several)
    firsts = [starts[at * len(starts) // parts] for at in range(parts)]
    contexts = [list(range(*ends)) for ends in pairwise([*firsts, len(written)])]
    writing, responses = len(written) - written.count(None), []
    if writing:
        wanted = min(most, max(RESPONSES, writing // part_count(writing, most, several)))
        together = max(1, wanted // max(map(len, contexts)))
        responses = [
            [order for part in contexts[start : start + together] for order in part]
            for start in range(0, len(contexts), together)
        ]
    return Parts(_named(contexts), _named(responses))


def part_count(count: int, most: int, several: int) -> int:
    """Of how many equal parts ``count`` items are, at most ``most`` in each: a multiple of
    ``several`` if there are items enough."""
    parts = -(-count // most)
    return min(count, -(-parts // several) * several)


def _named(parts: list[list[int]]) -> dict[str, list[int]]:
    return dict(zip(layout.part_names(len(parts)), parts, strict=True))
