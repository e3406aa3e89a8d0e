"""How fast rows are sampled: our engine against its peers and against the device's limits.

    python -m benchmarks.sampling                        about 20 minutes on two cores
    python -m benchmarks.sampling --rounds 1 --tokens 8  does it run? the figures mean little
    python -m benchmarks.sampling --device cuda --json gpu.json
    python -m benchmarks.sampling --read gpu.json --write

On a CPU: the embedded model and built-in contexts. On a GPU: random weights of three shapes,
nothing is downloaded. Every context gets greedy + 4 temperatures x 8 samples = 33 rows, and nothing
stops early. Peers get the easier job of all rows at T = 1.

Contenders, by default those for the device:

  both  ours               prefill, capture of all layers, decoding and sampling
  CPU   copies             the same, a copy of the prefix per row
  both  generate           of transformers, with a dynamic cache
  both  generate-captures  with hidden states and scores
  GPU   static             with a static cache, compiled
  GPU   continuous         transformers' continuous batching
  CPU   transformer-lens   its generate; the embedded model only
  CPU   products           the model's matrix products alone
  CPU   steps              decoding steps, which take turns with their products
  GPU   ceilings, decode   copies and products; decoding alone, which is compared with them
  both  capture            what capture adds to a prefill

On a CPU contenders take turns in one process, since a machine's pace drifts, and ratios are made
round by round. On a GPU each peer has a process of its own, since compiled graphs clear workspaces
that others use. A contender that can't run is named in the output with the reason. Prints Markdown;
progress goes to stderr.
"""

import argparse
import datetime
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.sampling.measure import CONTENDERS, in_process
from benchmarks.sampling.results import Results
from benchmarks.sampling.tables import between_markers, full
from benchmarks.sampling.workload import MODELS, SHAPES, TINY, Size, Task
from ia_mech.cli import Parser, run_command, whole_from
from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.models.load import DTYPES, resolve_device

FOLDER = Path(__file__).parents[1]
DOCUMENT = FOLDER / "README.md"  # where --write puts the tables, between the markers of the device


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    kept = f"what was measured is in {args.json}" if args.json else "nothing was kept (see --json)"
    return run_command(lambda: run(args), lambda: kept)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.sampling", description=__doc__)
    number = whole_from(1)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    what.add_argument(
        "--models", nargs="+", choices=MODELS, metavar="MODEL",
        help=f"{', '.join(MODELS)} (default: the first on a CPU, the next three on a GPU; the tiny "
        "ones show whether everything runs)",
    )  # fmt: skip
    what.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, metavar="NAME",
        help="those above (default: by device; of tiny models all)",
    )  # fmt: skip
    what.add_argument("--rounds", type=number, default=3, help="of every contender (default: 3)")
    what.add_argument("--contexts", type=number, help="4 on a CPU, and 1 alone; 32 on a GPU")
    what.add_argument("--context-tokens", type=whole_from(12), help="231 on a CPU, 512 on a GPU")
    what.add_argument("--rows", type=number, help="of each context (default: 33)")
    what.add_argument(
        "--tokens", type=whole_from(2), help="new ones of each row; 48 on a CPU, 64 on a GPU"
    )
    what.add_argument("--dtype", choices=DTYPES, help="float32 on a CPU, bfloat16 on a GPU")
    what.add_argument(
        "--together", type=number, help="contexts in a call of generate, to begin with (default: 1 "
        "on a CPU, all on a GPU); halved until they fit",
    )  # fmt: skip
    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, metavar="FILE", help="save the measurements, too")
    files.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE",
        help="make the tables of saved measurements together; measure nothing",
    )  # fmt: skip
    files.add_argument(
        "--write",
        action="store_true",
        help="put the tables between the markers of benchmarks/README.md",
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Measure, or read, and print.

    Raises:
        UserError: the arguments don't fit together, or the machine lacks what they ask for.
    """
    results = Results.read(args.read) if args.read else planned(args)
    if args.write:  # better known now than after the measurement
        if set(results.sizes) & set(TINY):
            raise UserError("--write: figures of tiny models mean nothing", "leave --write out")
        with_tables(results)
    if not args.read:
        measure(args, results)
    print(full(results))
    if args.write:
        DOCUMENT.write_text(with_tables(results), encoding="utf-8")


def planned(args: argparse.Namespace) -> Results:
    """What the arguments ask for, before anything is measured.

    Raises:
        UserError: it can't be measured here.
    """
    on_gpu = resolve_device(args.device).type == "cuda"
    models = args.models or (list(SHAPES)[:3] if on_gpu else [embedded.NAME])
    large = set(models) - {embedded.NAME, *TINY}
    if large and not on_gpu:
        raise UserError(f"{min(large)} takes hours on a CPU", f"use --models {' '.join(TINY)}")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UserError(f"--json {args.json} can't be written", "name a file in an existing folder")
    sizes = {model: size_of(args, model, on_gpu) for model in models}
    return Results("", on_gpu, [datetime.date.today().isoformat()], sizes)


def size_of(args: argparse.Namespace, model: str, on_gpu: bool) -> Size:
    """The model's workload, with what the arguments change."""
    size = Size((32,), 512, 33, 64) if on_gpu else Size((1, 4), 231, 33, 48)
    if model in TINY:
        size = Size((4,) if on_gpu else (1, 4), 24, 5, 6)
    last = args.contexts or size.counts[-1]
    return Size(
        (last,) if on_gpu or last == 1 else (1, last),
        args.context_tokens or size.context_tokens,
        args.rows or size.rows,
        args.tokens or size.new_tokens,
    )


def measure(args: argparse.Namespace, results: Results) -> None:
    """All of it, into ``results``; saved after every process if ``--json`` is given."""
    for model in results.sizes:
        for task in tasks(args, model, results):
            setting, records = in_process(task)
            results.setting = setting or results.setting
            results.records += records
            if args.json:
                results.save(args.json)


def tasks(args: argparse.Namespace, model: str, results: Results) -> Iterator[Task]:
    """The processes for one model, in order."""
    size, kind = results.sizes[model], "cuda" if results.on_gpu else "cpu"
    dtype = "bfloat16" if results.on_gpu and model not in TINY else "float32"
    together = size.counts[-1] if results.on_gpu else 1
    whole = Task(
        model, (), args.rounds, size, str(resolve_device(args.device)), args.dtype or dtype,
        args.together or together,
    )  # fmt: skip
    chosen = [
        name
        for name, one in CONTENDERS.items()
        if name in (args.contenders or CONTENDERS)
        and (args.contenders or model in TINY or kind in one.devices)
    ]
    shared = tuple(name for name in chosen if kind not in CONTENDERS[name].alone)
    if shared:
        yield replace(whole, contenders=shared)
    for name in chosen:
        if name not in shared:
            for count in CONTENDERS[name].numbers(size):
                yield replace(whole, contenders=(name,), size=replace(size, counts=(count,)))


def with_tables(results: Results) -> str:
    """The document with the tables between the markers of the device.

    Raises:
        UserError: it lacks a marker.
    """
    marker = "benchmarks.sampling cuda" if results.on_gpu else "benchmarks.sampling"
    return between_markers(DOCUMENT.read_text(encoding="utf-8"), full(results), marker)


if __name__ == "__main__":
    sys.exit(main())
