"""Our engine: the whole job, decoding alone, capture, and rows that differ."""

from collections.abc import Sequence
from typing import Any

from benchmarks.sampling.limits import least
from benchmarks.sampling.workload import Contender, Workload
from ia_mech.engine.decode import Decoded

PAIRS = 10  # of prefills with and without capture, per round


class Ours(Contender):
    """The whole job; without ``share`` every row copies its context's keys and values."""

    def __init__(self, work: Workload, contexts: int, share: bool = True) -> None:
        super().__init__(work, contexts)
        self.share = share
        self.notes = str(work.engine) if share else "copies of the prefix"

    def run(self, new_tokens: int) -> None:
        decoded = self.work.whole_job(self.contexts, new_tokens, self.share)
        self.work.written["ours" if self.share else "copies", self.contexts] = decoded


class Decoding(Contender):
    """Decoding alone, of prefilled contexts; and the work that no engine can avoid."""

    def run(self, new_tokens: int) -> object:
        return self.measure()

    def measure(self) -> dict[str, Any]:
        work, size = self.work, self.work.size
        groups = work.prefilled(self.contexts, capture=False)
        taken = self.seconds(lambda: work.decode(groups, size.new_tokens, share=True))
        moved, computed = least(work.model, groups[0].state.cache, size, self.contexts)
        return {"seconds": taken, "least_bytes": moved, "least_operations": computed}


class Capture(Contender):
    """Prefills without and with capture of all layers, taking turns; lists of seconds."""

    def run(self, new_tokens: int = 0, capture: bool = True) -> object:
        return self.work.prefilled(self.contexts, capture)

    def measure(self) -> dict[str, Any]:
        taken: dict[str, list[float]] = {"plain": [], "captured": []}
        for _ in range(PAIRS):
            taken["plain"].append(self.seconds(lambda: self.run(capture=False)))
            taken["captured"].append(self.seconds(self.run))
        return taken


def differing(work: Workload) -> list[dict[str, Any]]:
    """Rows that should be equal: with shared prefixes and with copies, alone and among others.

    Returns:
        ``what`` was compared, how many ``rows``, and ``margins`` (see :func:`first_differences`).
    """
    rows, few, many = work.size.rows, work.size.counts[0], work.size.counts[-1]
    pairs = {
        f"shared prefixes and copies, {count * rows} rows": (("ours", count), ("copies", count))
        for count in work.size.counts
    }
    if few < many:
        within = f"{few * rows} rows alone and among {many * rows}"
        pairs[f"{within}, shared"] = (("ours", few), ("ours", many))
        pairs[f"{within}, copies"] = (("copies", few), ("copies", many))
    found = []
    for what, (one, other) in pairs.items():
        if one in work.written and other in work.written:
            alone, among = work.written[one], work.written[other]
            margins = first_differences(alone, among[: len(alone)])
            found.append({"what": what, "rows": len(alone), "margins": margins})
    return found


def first_differences(one: Sequence[Decoded], other: Sequence[Decoded]) -> list[float]:
    """For each pair of rows that differ: the larger margin at the first token that differs."""
    margins = []
    for a, b in zip(one, other, strict=True):
        unequal = (a.token_ids != b.token_ids).nonzero()[0]
        if len(unequal):
            margins.append(float(max(a.margins[unequal[0]], b.margins[unequal[0]])))
    return margins
