"""The parts of a run: what is dealt to a shard, computed, written and resumed as one.

A **part** is some consecutive contexts with all their rows. Parts are a pure function of settings
and conversations, since rounding depends on the batch that a row sits in: nothing here looks at the
clock, at free memory, at what was already done, or at the number of shards. The machine that begins
a run decides how much memory a part may take, and records it; all others read it from the run.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from ia_mech.collect.survey import Survey
from ia_mech.engine.memory import Footprint, part_bytes
from ia_mech.models.load import resolve_device
from ia_mech.run import Run, layout
from ia_mech.settings import Settings, Shard

# Rows decoded together. One core's matrix products are nearly at their best with these; a GPU's
# number is an estimate.
BATCH_ROWS = {"cpu": 96, "cuda": 1024}
RESPONSES = 16  # fewer responses together cost as much: reading the weights is what takes the time
# Where memory allows only a few long responses at a time, a part has so many times more: those that
# wait take the places of those that end.
WAITING = 4
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
        batch_rows: most user turns decoded together.
        response_rows: most responses written together.
        part_bytes: about how much memory the largest part takes.
    """

    contexts: dict[str, list[int]]
    responses: dict[str, list[int]]
    batch_rows: int
    response_rows: int
    part_bytes: int

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
        return replace(self, contexts=mine, responses=written)


def part_room(settings: Settings, size: Footprint, out: Path) -> int:
    """Bytes of memory that a part may take: what the run was begun with, else this machine's."""
    if (out / layout.RUN).is_file() and (begun := Run(out).record.get("part_room")):
        return begun
    everywhere = settings.device_map is not None
    return part_bytes(resolve_device(settings.device), size.weights, everywhere)


def plan_parts(surveyed: Survey, settings: Settings, size: Footprint, room: int) -> Parts:
    """The parts of a run.

    Parts of contexts are alike in size, with at most :data:`QUEUE` times ``batch_rows`` rows or one
    context each, as long as they take no more than ``room`` bytes of memory. Where the rows of the
    longest context alone take more, fewer are decoded together. Where the model writes several
    responses to a query, no part splits them: one is drawn in place of another.
    """
    device = resolve_device(settings.device).type
    batch_rows = settings.batch_rows or BATCH_ROWS[device]
    rows, several, new = len(settings.rows()), PARTS[device], settings.max_new_tokens
    longest = max(surveyed.lengths)
    fitting = (room - size.context(longest)) // size.row(longest, new)
    if fitting < rows:
        batch_rows = max(1, min(batch_rows, fitting))
    each = settings.responses  # contexts of a query whose responses are written
    starts = [
        order
        for order, one in enumerate(surveyed.conversations)
        if order not in surveyed.prompts or each == 1 or one.response_index == 0
    ]
    parts = part_count(len(starts), max(1, QUEUE[device] * batch_rows // (rows * each)), several)
    firsts, splits = {starts[at * len(starts) // parts] for at in range(parts)}, set(starts)
    contexts: list[list[int]] = []
    held: list[int] = []  # bytes of each part
    state = taken = widest = 0  # bytes of the last part: its contexts, all its rows, its widest row
    for order, length in enumerate(surveyed.lengths):
        row = size.row(length, new)
        state, taken = state + size.context(length), taken + min(rows, batch_rows) * row
        widest = max(widest, row)
        needed = state + min(taken, batch_rows * widest)
        if order in firsts or (order in splits and needed > room):
            state, taken, widest = size.context(length), min(rows, batch_rows) * row, row
            needed = state + taken
            contexts.append([])
            held.append(0)
        contexts[-1].append(order)
        held[-1] = needed
    response_rows, responses = batch_rows, []
    if surveyed.prompts:
        prompt = max(surveyed.prompts.values())
        context, row = size.context(prompt), size.row(prompt, settings.max_response_tokens)
        waiting = WAITING if row > WAITING**2 * context else 1  # not where prompts fill the memory
        response_rows = max(1, min(batch_rows, room // (row + waiting * context)))
        most, writing = min(batch_rows, waiting * response_rows), len(surveyed.prompts)
        wanted = min(most, max(RESPONSES, writing // part_count(writing, most, several)))
        together = max(1, wanted // max(map(len, contexts)))
        responses = [
            [order for part in contexts[start : start + together] for order in part]
            for start in range(0, len(contexts), together)
        ]
        held.append(min(wanted, response_rows) * row + wanted * context)
    return Parts(_named(contexts), _named(responses), batch_rows, response_rows, max(held))


def part_count(count: int, most: int, several: int) -> int:
    """Of how many equal parts ``count`` items are, at most ``most`` in each: a multiple of
    ``several`` if there are items enough."""
    parts = -(-count // most)
    return min(count, -(-parts // several) * several)


def _named(parts: list[list[int]]) -> dict[str, list[int]]:
    return dict(zip(layout.part_names(len(parts)), parts, strict=True))
