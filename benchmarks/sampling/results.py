"""What was measured: records that are saved as JSON, and their arithmetic."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.sampling.workload import Size
from ia_mech.errors import UserError

OURS, FLOOR = "ours", "products"


@dataclass
class Results:
    """Everything that was measured on one machine.

    Attributes:
        setting: hardware, versions and dtype on one line.
        on_gpu: peers had processes of their own, one after the other; on a CPU they took turns.
        days: dates of measurement.
        sizes: of the models' workloads.
        records: as ``benchmarks.sampling.measure`` describes them, in order.
    """

    setting: str = ""
    on_gpu: bool = False
    days: list[str] = field(default_factory=list)
    sizes: dict[str, Size] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Results":
        """What :meth:`save` wrote to several files, as one.

        Raises:
            UserError: a file is missing or holds something else, or they don't belong together.
        """
        found = [_read(path) for path in paths]
        whole = found[0]
        for path, more in zip(paths[1:], found[1:], strict=True):
            both = set(whole.sizes) & set(more.sizes)
            if (
                (more.setting, more.on_gpu) != (whole.setting, whole.on_gpu)
                or any(more.sizes[model] != whole.sizes[model] for model in both)
                or (both and not whole.on_gpu)  # rounds of one file don't pair with the other's
            ):
                raise UserError(
                    f"{path} and {paths[0]} were measured in different settings, or hold the same "
                    "model on a CPU",
                    "make tables of each alone",
                )
            whole.sizes |= more.sizes
            whole.records += more.records
            whole.days = sorted({*whole.days, *more.days})
        return whole

    def records_of(
        self, model: str, contender: str, contexts: int | None = None
    ) -> list[dict[str, Any]]:
        """A contender's records of all rounds; only for so many contexts, if given."""
        return [
            record
            for record in self.records
            if (record["model"], record["contender"]) == (model, contender)
            and "values" in record
            and contexts in (None, record["contexts"])
        ]

    def values(
        self, model: str, contender: str, contexts: int | None = None
    ) -> list[dict[str, Any]]:
        """What was measured in each round."""
        return [record["values"] for record in self.records_of(model, contender, contexts)]

    def seconds(self, model: str, contender: str, contexts: int) -> list[float]:
        """Seconds of the whole job, per round, with all contexts in one call or one call each."""
        if contender == FLOOR:
            return self.floor(model, contexts)
        for together in (contexts, 1):
            if found := self.values(model, contender, together):
                return [contexts // together * values["seconds"] for values in found]
        return []

    def ratios(self, theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
        """Ratios round by round if contenders took turns, else of every pair of rounds."""
        pairs = product(theirs, ours) if self.on_gpu else zip(theirs, ours, strict=False)
        return [a / b for a, b in pairs]

    def products(self, model: str) -> pd.DataFrame:
        """Timed matrix products (see ``limits.Products``) with their ``round``."""
        rounds = enumerate(self.values(model, FLOOR))
        return pd.DataFrame(
            [one | {"round": number} for number, values in rounds for one in values["products"]]
        )

    def floor(
        self, model: str, contexts: int, parts: Sequence[str] = ("prefill", "head", "step")
    ) -> list[float]:
        """Seconds of the workload's matrix products alone, per round; empty if unknown.

        The products of the prefill count once. Those of a step count for every new token but the
        first, which the prefill predicts. Each shape counts the faster way of that round.
        """
        found = self.products(model)
        if found.empty:
            return []
        found = found[(found.contexts == contexts) & found.part.isin(parts)]
        fastest = found.groupby(["round", "part", "out", "in"]).seconds.min().reset_index()
        steps = self.sizes[model].new_tokens - 1
        times = fastest.part.map({"prefill": 1, "head": 1, "step": steps})
        return (times * fastest.seconds).groupby(fastest["round"]).sum().tolist()


def _read(path: Path) -> Results:
    if not path.is_file():
        raise UserError(f"no file {path}", "measure first, with --json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        for model, size in fields["sizes"].items():
            fields["sizes"][model] = Size(**size | {"counts": tuple(size["counts"])})
        read = Results(**fields)
        if not all(record["model"] in read.sizes for record in read.records):
            raise ValueError("a record without a size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} was not saved by --json ({error})", "measure again") from error
    return read


def gflops(products: pd.DataFrame) -> float:
    """Billions of floating-point operations per second of some products of one way together.

    Seconds of each shape are the median over rounds.
    """
    shapes = products.groupby(["out", "in", "rows", "count"]).seconds.median().reset_index()
    operations = 2 * shapes.rows * shapes.out * shapes["in"] * shapes["count"]
    return float(operations.sum() / shapes.seconds.sum() / 1e9)
