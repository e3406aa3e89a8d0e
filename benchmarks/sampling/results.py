"""What ``benchmarks.sampling`` measured: records that are saved as JSON, and their arithmetic.

Every list of seconds has one number per round; ratios are taken within a round.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ia_mech.errors import UserError

OURS, FLOOR = "ours", "floor"


@dataclass
class Timing:
    """Seconds of a contender, named as ``--peers`` does, for so many contexts together."""

    peer: str
    contexts: int
    seconds: list[float]


@dataclass
class Product:
    """All ``count`` products with weights of one shape in one pass through the model.

    ``part``: ``prefill`` (the blocks' linear layers on every token of the contexts), ``head`` (the
    unembedding at each context's last token) or ``step`` (everything, on one token of every row);
    of so many contexts. ``rows`` are multiplied with weights ``shape`` [out, in]. ``seconds``: of
    all ``count`` together, by the way they were computed.
    """

    part: str
    contexts: int
    rows: int
    shape: tuple[int, int]
    count: int
    seconds: dict[str, list[float]]


@dataclass
class Point:
    """Ours, one context: what prefill and decoding take as the workload grows."""

    rows: int
    new_tokens: int
    prefix: int
    prefill: list[float]
    decode: list[float]


@dataclass
class Held:
    """Bytes of keys and values, ours: ``expected`` is every context once and every row's own
    tokens, ``caches`` what the tensors in the caches hold, ``peak`` by how much the process grew
    while it prefilled and decoded; None where that isn't known."""

    contexts: int
    shared: bool
    expected: int
    caches: int
    peak: int | None


@dataclass
class Compared:
    """Rows of two computations that should be one, and the margin where each first differs."""

    what: str
    rows: int
    margins: list[float]


@dataclass
class Results:
    """Everything a run measured.

    Attributes:
        setting: hardware, versions, dtype, date; one line.
        context_tokens: of each context.
        rows: per context.
        new_tokens: per row.
        contexts: decoded together in the larger version of the workload.
        rounds: of every contender.
        missing: why a peer wasn't measured, and the remedy.
        timings: all contenders.
        products: what the floor is made of.
        plain: seconds of a prefill without capture, per round.
        captured: seconds of one with it.
        growth: the workload itself is the first point.
        memory: of the shared and the portable engine.
        compared: engines and widths.
    """

    setting: str
    context_tokens: int
    rows: int
    new_tokens: int
    contexts: int
    rounds: int
    missing: dict[str, str]
    timings: list[Timing]
    products: list[Product]
    plain: list[float]
    captured: list[float]
    growth: list[Point]
    memory: list[Held]
    compared: list[Compared]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Results":
        """What :meth:`save` wrote.

        Raises:
            UserError: the file holds something else.
        """
        kinds = {"timings": Timing, "products": Product, "growth": Point}
        kinds |= {"memory": Held, "compared": Compared}
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            records = {name: [kind(**one) for one in fields[name]] for name, kind in kinds.items()}
            return cls(**fields | records)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} was not saved by --json ({error})", "measure again") from error

    def seconds(self, peer: str, contexts: int) -> list[float] | None:
        """Of a contender for so many contexts: measured together, or one call after another."""
        if peer == FLOOR:
            return floor(self, contexts)
        of = {t.contexts: t.seconds for t in self.timings if t.peer == peer}
        if contexts in of or 1 not in of:
            return of.get(contexts)
        return [contexts * taken for taken in of[1]]


def floor(
    results: Results, contexts: int, parts: Sequence[str] = ("prefill", "head", "step")
) -> list[float] | None:
    """Seconds that the workload's matrix products take by themselves, per round; None if unknown.

    The prefill's once and a step's for every new token but the first, which the prefill predicts;
    for each shape the faster way of computing it, in that round.
    """
    found = [p for p in results.products if p.contexts == contexts and p.part in parts]
    if not found:
        return None
    times = {"prefill": 1, "head": 1, "step": results.new_tokens - 1}
    return [
        sum(times[p.part] * min(taken[number] for taken in p.seconds.values()) for p in found)
        for number in range(results.rounds)
    ]


def gflops(products: Sequence[Product], way: str) -> float:
    """Billions of floating-point operations per second of some products together."""
    operations = sum(2 * p.rows * p.shape[0] * p.shape[1] * p.count for p in products)
    return operations / sum(statistics.median(p.seconds[way]) for p in products) / 1e9


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Within each round."""
    return [a / b for a, b in zip(above, below, strict=True)]
