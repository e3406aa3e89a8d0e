"""What a study costs before it is begun: tokens, bytes, device hours, dollars, and its commands.

Usage::

    python -m experiments.plan STUDY.toml

A study is a grid of models × datasets × temperatures. docs/scale.md has the formulas, and
docs/study.toml is one to copy. Nothing is loaded, sampled or looked up: what isn't in the file is
not known, and a cost that would need it is left out.
"""

import math
import shlex
import sys
import tomllib
from collections import Counter
from dataclasses import MISSING, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from ia_mech.cli import Parser, guarded, path_of, tolerant_streams
from ia_mech.errors import UserError
from ia_mech.models import embedded

DESCRIPTION = "Print what a study of models × datasets × temperatures takes, and its commands."
Z = 1.959964  # of a 95% interval
CONTEXT_BUCKET = 64  # contexts of a bucket on average: no shard makes less than one

# Tokens per second of the one model and device that were measured (benchmarks/README.md: the
# embedded model, float32, two threads of an AMD EPYC; 231 tokens in 183 ms, and 132 rows).
MEASURED = {embedded.NAME: {"prefill_tokens_per_s": 1260.0, "decode_tokens_per_s": 677.0}}


@dataclass(frozen=True)
class Grid:
    """What is sampled in every cell, and how well a rate is to be known.

    Attributes:
        temperatures, samples, max_new_tokens: as the flags of ``ia_mech.sample``.
        turn_tokens: of a turn on average; ``max_new_tokens`` if it isn't given.
        responses: that the model writes to each query; 0 where the dataset has them.
        positions: at which the residual stream is kept.
        header_logits: as the flag.
        rate, design_effect: guessed; how much wider the variance of a rate is than that of as many
            independent turns.
        precision: half of the 95% interval that is wanted.
        dollars_per_device_hour: of one GPU, or of one machine without any.
        devices: that there are; hours of the clock are not known without it.
        out: folder of the runs.
    """

    temperatures: list
    samples: int
    max_new_tokens: int
    turn_tokens: float = 0.0
    responses: int = 0
    positions: int = 8
    header_logits: str = "full"
    rate: float = 0.1
    design_effect: float = 2.0
    precision: float = 0.02
    dollars_per_device_hour: float = 0.0
    devices: int = 0
    out: str = "cache/study"

    @property
    def rows(self) -> int:
        """Turns per context, the greedy one included."""
        return 1 + len(self.temperatures) * self.samples

    @property
    def wanted(self) -> int:
        """Contexts per point, a rate at one temperature, for the precision."""
        turns = Z**2 * self.rate * (1 - self.rate) / self.precision**2
        return math.ceil(turns * self.design_effect / self.samples)


@dataclass(frozen=True)
class Model:
    """A subject model.

    Attributes:
        layers, d_model, vocab: as its ``config.json`` has them.
        bytes_per_number: of a state as it is stored: 2 in half precision, 4 in float32.
        devices: that hold it together.
        tensor_parallel: whether they split its layers, which takes a number of heads of keys and
            values that ``devices`` divides; else they hold some layers each, and wait in turn.
        prefill_tokens_per_s, decode_tokens_per_s: of these devices together, measured.
    """

    name: str
    layers: int
    d_model: int
    vocab: int
    bytes_per_number: int = 2
    devices: int = 1
    tensor_parallel: bool = True
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Dataset:
    """Conversations.

    Attributes:
        contexts: queries.
        context_tokens: of a context on average, response included.
        response_tokens: of a response that the model writes, on average.
    """

    name: str
    contexts: int
    context_tokens: float
    response_tokens: float = 0.0


@dataclass(frozen=True)
class Cell:
    """A model on a dataset, at all temperatures.

    Attributes:
        hours: of one device; None where the model's speed isn't known.
    """

    model: Model
    dataset: Dataset
    grid: Grid

    @property
    def contexts(self) -> int:
        return self.dataset.contexts * max(1, self.grid.responses)

    @property
    def turns(self) -> int:
        return self.contexts * self.grid.rows

    @property
    def prefilled(self) -> float:
        """Tokens; the prompts of written responses are prefilled once more."""
        written = self.grid.responses > 0
        prompts = self.dataset.context_tokens - self.dataset.response_tokens
        extra = self.dataset.contexts * prompts if written else 0.0
        return self.contexts * self.dataset.context_tokens + extra

    @property
    def decoded(self) -> float:
        """Tokens, of turns and of written responses."""
        turn = self.grid.turn_tokens or self.grid.max_new_tokens
        written = self.contexts * self.dataset.response_tokens if self.grid.responses else 0.0
        return self.turns * turn + written

    @property
    def bytes(self) -> dict[str, int]:
        """On the disk, by what they hold."""
        from transformers import PretrainedConfig

        from ia_mech.collect.config import SampleConfig
        from ia_mech.collect.preflight import run_bytes
        from ia_mech.engine.plan import Grid as Rows

        rows = Rows(tuple(self.grid.temperatures), self.grid.samples, self.grid.max_new_tokens)
        shape = PretrainedConfig()
        shape.num_hidden_layers, shape.hidden_size = self.model.layers, self.model.d_model
        shape.vocab_size = self.model.vocab
        return run_bytes(
            SampleConfig(grid=rows, header_logits=self.grid.header_logits),
            ("position",) * self.grid.positions,
            shape,
            self.model.bytes_per_number,
            self.contexts,
            round(self.contexts * self.dataset.context_tokens),
        )

    @property
    def hours(self) -> float | None:
        model = self.model
        if not (model.prefill_tokens_per_s and model.decode_tokens_per_s):
            return None
        seconds = self.prefilled / model.prefill_tokens_per_s
        seconds += self.decoded / model.decode_tokens_per_s
        return seconds * model.devices / 3600

    def commands(self) -> list[str]:
        """Sample, merge, judge."""
        grid, model = self.grid, self.model
        name = f"{Path(model.name).name}-{Path(self.dataset.name).stem}".lower()
        out = shlex.quote(f"{grid.out}/{name}")
        together = model.devices > 1 and model.tensor_parallel
        begin = f"torchrun --nproc-per-node {model.devices} -m" if together else "python -m"
        words = [begin, "ia_mech.sample --model", shlex.quote(model.name), "--dataset"]
        words += [shlex.quote(self.dataset.name), "--limit all --temperatures"]
        words += [f"{temperature:g}" for temperature in grid.temperatures]
        words += [f"--samples {grid.samples} --max-new-tokens {grid.max_new_tokens}"]
        words += [f"--header-logits {grid.header_logits}"] * (grid.header_logits != "full")
        if grid.responses:
            words.append(f"--response generate --responses {grid.responses}")
        words += [f"--tensor-parallel {model.devices}"] * together
        words += ["--device-map auto"] * (model.devices > 1 and not together)
        shards, judge = self.shards, f"python -m ia_mech.judge run {out}"
        if shards == 1:
            return [" ".join([*words, "--out", out]), judge]
        words += ["--out", out, f"--shard I/{shards}    # I = 1 … {shards}, anywhere"]
        return [" ".join(words), f"python -m ia_mech.merge {out}", judge]

    @property
    def shards(self) -> int:
        """As many as there are devices for, and no more than there are buckets."""
        most = -(-self.contexts // CONTEXT_BUCKET)
        return max(1, min(self.grid.devices // self.model.devices, most))


Table = TypeVar("Table", Grid, Model, Dataset)


def filled(kind: type[Table], given: Any, place: str) -> Table:
    """A dataclass from a table of the file.

    Raises:
        UserError: a key that is unknown or missing, or a value that can't be.
    """
    if not isinstance(given, dict):
        raise UserError(f"{place} is no table", f"write it as in docs/study.toml: [{place}]")
    known = {one.name: one for one in fields(kind)}
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"{place} has an unknown {unknown[0]!r}", f"it takes {', '.join(known)}")
    if missing := [n for n, one in known.items() if one.default is MISSING and n not in given]:
        raise UserError(f"{place} lacks {missing[0]!r}", "add it; docs/study.toml shows all")
    for name, value in given.items():
        wanted = known[name].type
        if wanted is float and type(value) is int:
            value = float(value)
        right = type(value) is wanted and value != [] and value != ""
        numbers = value if isinstance(value, list) else [value]
        if not right or any(
            type(one) not in (int, float) or not (0 <= one < math.inf)
            for one in numbers
            if wanted not in (str, bool)
        ):
            raise UserError(f"{place}: {name} = {value!r} can't be", "see docs/study.toml")
    return kind(**given)


def read(path: Path) -> tuple[Grid, list[Cell]]:
    """The grid and the cells of a study.

    Raises:
        UserError: no file, not TOML, or a study that can't be.
    """
    try:
        study = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"{path} can't be read ({error})", "give a file as docs/study.toml"
        ) from None
    if unknown := study.keys() - {"grid", "models", "datasets"}:
        raise UserError(f"{path} has an unknown {sorted(unknown)[0]!r}", "see docs/study.toml")
    grid = filled(Grid, study.get("grid", {}), "grid")
    if not 0 < grid.rate < 1 or not grid.precision or not grid.samples or not grid.design_effect:
        raise UserError(
            "rate, precision, samples and design_effect have to be above 0, and rate below 1",
            "change them under [grid]",
        )
    lists = {name: study.get(name) for name in ("models", "datasets")}
    for name, found in lists.items():
        if not isinstance(found, list) or not found:
            raise UserError(f"{path} lists no {name}", f"add one under [[{name}]]")
    models = [
        filled(Model, MEASURED.get(str(one.get("name")), {}) | one, f"models.{at}")
        if isinstance(one, dict)
        else filled(Model, one, f"models.{at}")
        for at, one in enumerate(study["models"], start=1)
    ]
    datasets = [
        filled(Dataset, one, f"datasets.{at}") for at, one in enumerate(study["datasets"], start=1)
    ]
    if any(not model.devices for model in models):
        raise UserError("a model needs at least one device", "change devices under [[models]]")
    if grid.turn_tokens > grid.max_new_tokens:
        raise UserError(
            f"turn_tokens = {grid.turn_tokens:g} is more than max_new_tokens",
            "turns end there: lower it under [grid]",
        )
    for data in datasets:
        if data.response_tokens > data.context_tokens:
            raise UserError(
                f"{data.name}: response_tokens is more than context_tokens",
                "contexts include the response: change one under [[datasets]]",
            )
    for kind, tables in (("models", models), ("datasets", datasets)):
        name, times = Counter(table.name for table in tables).most_common(1)[0]
        if times > 1:
            raise UserError(f"{path} lists {name} {times} times", f"once under [[{kind}]] will do")
    return grid, [Cell(model, dataset, grid) for model, dataset in product(models, datasets)]


def show(grid: Grid, cells: list[Cell]) -> None:
    """Print tables, what they leave out, and the commands."""
    from rich.table import Table as Shown

    from ia_mech.collect.preflight import size_text
    from ia_mech.display import console

    to = console(1000)
    table = Shown(title="what each cell takes, all temperatures together", title_justify="left")
    heads = ["contexts", "turns", "prefilled", "decoded", "residuals", "all bytes"]
    heads += ["device hours", "dollars"]
    for name in ("model", "dataset"):
        table.add_column(name, no_wrap=True)
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)

    def line(names: tuple[str, str], own: list[Cell]) -> None:
        held = [cell.bytes for cell in own]
        known = [cell.hours for cell in own]
        hours = None if None in known else sum(filter(None, known))
        price = grid.dollars_per_device_hour
        numbers = [
            f"{sum(cell.contexts for cell in own):,}",
            f"{sum(cell.turns for cell in own):,}",
            _short(sum(cell.prefilled for cell in own)),
            _short(sum(cell.decoded for cell in own)),
            size_text(sum(one["residuals"] for one in held)),
            size_text(sum(sum(one.values()) for one in held)),
            "–" if hours is None else f"{hours:,.2f}",
            "–" if hours is None or not price else f"{hours * price:,.2f}",
        ]
        table.add_row(*names, *numbers)

    for cell in cells:
        line((cell.model.name, cell.dataset.name), [cell])
    line(("all", ""), cells)
    to.print(table)
    for said in notes(grid, cells):
        to.print(said, markup=False, soft_wrap=True)
    to.print("\ncommands:", markup=False)
    for cell in cells:
        to.print("\n".join(cell.commands()), markup=False, soft_wrap=True)
    to.print(f"python -m ia_mech.rates {shlex.quote(grid.out)}/*", markup=False, soft_wrap=True)


def notes(grid: Grid, cells: list[Cell]) -> list[str]:
    """How many contexts a point needs, what it costs, and what isn't known."""
    said = [
        f"a point (one model, dataset and temperature) at ±{grid.precision:g} needs "
        f"{grid.wanted:,} contexts of {grid.samples} samples, if its rate is {grid.rate:g} and "
        f"the design effect {grid.design_effect:g}"
    ]
    few = {cell.dataset.name: cell.contexts for cell in cells if cell.contexts < grid.wanted}
    for name, contexts in few.items():
        reached = grid.precision * math.sqrt(grid.wanted / contexts)
        said.append(f"{name} has {contexts:,}: ±{reached:.3f}")
    known = [(cell, cell.hours) for cell in cells]
    points = 1 + len(grid.temperatures)
    for cell, hours in known:
        if hours is not None and cell.dataset is cells[0].dataset:
            each = hours / cell.contexts * grid.wanted / points
            cost = f", {each * grid.dollars_per_device_hour:,.2f} dollars"
            said.append(
                f"{cell.model.name} on {cell.dataset.name}: {each:,.3g} device hours"
                f"{cost if grid.dollars_per_device_hour else ''} per such point"
            )
    unknown = list(dict.fromkeys(cell.model.name for cell, hours in known if hours is None))
    if unknown:
        said.append(
            f"hours and dollars of {_listed(unknown)} are not known: give prefill_tokens_per_s and "
            "decode_tokens_per_s, measured on your devices (make gpu-check). Only "
            f"{embedded.NAME} on two cores of a CPU has been measured here"
        )
    elif grid.devices:
        hours = sum(filter(None, (hours for _, hours in known)))
        said.append(f"on {grid.devices:,} devices: {hours / grid.devices:,.2f} hours at best")
    if not grid.dollars_per_device_hour:
        said.append("dollars need dollars_per_device_hour under [grid]")
    return said


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more models"


def _short(count: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return f"{count:.0f}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    parser = Parser(prog="python -m experiments.plan", description=DESCRIPTION)
    parser.add_argument("study", type=path_of, metavar="STUDY.toml", help="as docs/study.toml")
    args = parser.parse_args(argv)
    return guarded(lambda: show(*read(args.study)), lambda: "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
