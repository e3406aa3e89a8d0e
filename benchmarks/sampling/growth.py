"""How our time grows with rows, new tokens and prefix, and which rows other computations change."""

import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks.sampling.peers import Workload, prefixes, real_contexts, rows_of, timed
from benchmarks.sampling.results import Compared, Point
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Decoded
from ia_mech.engine.prefill import Prefix, prefill


def points(workload: Workload) -> list[Point]:
    """The workload, then one thing at a time that is less or more of it; nothing measured yet."""
    size = workload.size
    rows, new_tokens, context = size.rows, size.new_tokens, size.context_tokens
    return [
        Point(*setting, prefill=[], decode=[])
        for setting in (
            (rows, new_tokens, context),
            *((grown, new_tokens, context) for grown in size.grown_rows),
            *((rows, grown, context) for grown in size.grown_tokens),
            *((rows, new_tokens, grown) for grown in size.grown_contexts),
        )
    ]


class Growth:
    """Measures points on one context, of which shorter prefixes are the end."""

    def __init__(self, workload: Workload) -> None:
        self.model = workload.subject.model
        self.blocks = find_blocks(self.model)
        self.points = points(workload)
        longest = max(point.prefix for point in self.points)
        self.ids = real_contexts(workload.subject, longest, 1)[0]

    def measure(self) -> None:
        """One round of all points."""
        for point in self.points:
            context, rows = prefixes([self.ids[-point.prefix :]]), rows_of(0, point.rows)
            prefilling = partial(prefill, self.model, context, self.blocks)
            point.prefill.append(timed(prefilling))
            decoding = partial(decode, self.model, prefilling(), rows, [], point.new_tokens)
            point.decode.append(timed(decoding))


def capture_cost(workload: Workload, pairs: int) -> tuple[float, float]:
    """Seconds of a prefill without and with capture of all layers: medians, taking turns."""
    model, ids = workload.subject.model, workload.contexts[0]
    blocks = find_blocks(model)
    plain, captured = [], []
    for _ in range(pairs):
        plain.append(timed(lambda: prefill(model, [Prefix(ids)])))
        captured.append(timed(lambda: prefill(model, prefixes([ids]), blocks)))
    return statistics.median(plain), statistics.median(captured)


def compare(
    written: dict[tuple[str, int], Sequence[Decoded]], rows: int, contexts: int
) -> list[Compared]:
    """Shared against portable, and the first context's rows alone against among all contexts'.

    Args:
        written: by engine (``ours``, ``portable``) and number of contexts.
        rows: per context.
        contexts: in the larger version.
    """
    pairs = {
        f"shared and portable engine, {rows} rows": (("ours", 1), ("portable", 1)),
        f"shared and portable engine, {contexts * rows} rows": (
            ("ours", contexts),
            ("portable", contexts),
        ),
        f"{rows} rows alone and among {contexts * rows}, shared": (("ours", 1), ("ours", contexts)),
        f"{rows} rows alone and among {contexts * rows}, portable": (
            ("portable", 1),
            ("portable", contexts),
        ),
    }
    found = []
    for what, (one, other) in pairs.items():
        if one in written and other in written:
            count = len(written[one])
            margins = first_differences(written[one], written[other][:count])
            found.append(Compared(what, count, margins))
    return found


def first_differences(one: Sequence[Decoded], other: Sequence[Decoded]) -> list[float]:
    """Of rows whose tokens differ: the margin at the first that does, the larger of the two."""
    margins = []
    for a, b in zip(one, other, strict=True):
        differing = (a.token_ids != b.token_ids).nonzero()[0]
        if len(differing):
            margins.append(float(max(a.margins[differing[0]], b.margins[differing[0]])))
    return margins
