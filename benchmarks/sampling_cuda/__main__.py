"""The sampling loop on a GPU against what transformers offers, and against the device's limits.

    python -m benchmarks.sampling_cuda                         everything that is missing
    python -m benchmarks.sampling_cuda --budget 560            … for ten minutes; then once more
    python -m benchmarks.sampling_cuda --models qwen3-0.6b --rounds 1
    python -m benchmarks.sampling_cuda --read FILE --write     tables into benchmarks/README.md
    python -m benchmarks.sampling_cuda --device cpu --models tiny tiny-hybrid     does it run?

Random weights of three shapes, built from their configurations; nothing is downloaded and nothing
stops early. 32 contexts of 512 tokens, each with greedy + 4 temperatures x 8 samples = 33 rows of
64 tokens. Its peers can't mix temperatures and get the easier job of all rows at T = 1; generate
gets as many contexts in one call as fit.

Contenders, in the order in which they are measured:

  ceilings           bytes per second of copies, operations per second of matrix products
  ours               the whole job, and decoding alone, which is held against the ceilings
  capture            what capturing all layers at 5 positions adds to a plain prefill
  profile            how long the GPU is idle in ours, and its ten most expensive kernels
  generate-captures  generate with a dynamic cache, hidden states and scores
  static             generate with a static cache, compiled
  continuous         continuous batching (generate_batch), its cache and graphs kept
  generate           generate with a dynamic cache
  ours-no-graphs     ours without CUDA graphs

Each runs in a process of its own (the first three of ours share one), and each measurement is
printed and added to --out as a line of JSON at once. A command with the same --out goes on with
what is missing, so a kill costs the round that was being measured. What fails, or is killed at
--limit, is recorded as that and not tried again without --retry. Prints Markdown; progress goes to
stderr.

Exit status: 0 nothing is missing, 2 wrong input, 3 the budget is spent and something is missing,
130 interrupted.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.sampling.tables import between_markers
from benchmarks.sampling_cuda.processes import GROUPS, Plan, Refused, Runner, tell
from benchmarks.sampling_cuda.results import Log, Results, Size, setting_of
from benchmarks.sampling_cuda.tables import CLOSING, OPENING, full
from benchmarks.sampling_cuda.workload import SHAPES, TINY, TINY_SIZE
from ia_mech.cli import Parser, guarded, whole_from
from ia_mech.errors import UserError
from ia_mech.models.load import DTYPES, resolve_device

DOCUMENT = Path(__file__).parents[1] / "README.md"  # for --write
MEANINGLESS = "--write: figures of tiny models, or of a CPU, mean nothing"
CONTENDERS = [name for group in GROUPS for name in group]
MODELS = [name for name in SHAPES if name not in TINY]


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    status = 0

    def body() -> None:
        nonlocal status
        try:
            status = run(args)
        except Refused:  # the process has said why
            status = 2

    done = guarded(body, lambda: f"what was measured is in {args.out}; the same command goes on")
    return done or status


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.sampling_cuda", description=__doc__)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--models",
        nargs="+",
        choices=SHAPES,
        default=MODELS,
        metavar="MODEL",
        help=f"{', '.join(SHAPES)} (default: {' '.join(MODELS)})",
    )
    what.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=CONTENDERS,
        metavar="NAME",
        help="those above (default: all)",
    )
    what.add_argument(
        "--rounds", type=whole_from(1), default=3, help="of every contender (default: 3)"
    )
    what.add_argument("--device", default="cuda", help="cuda, cuda:N, cpu, or auto (default: cuda)")
    what.add_argument(
        "--dtype", choices=DTYPES, help="default: bfloat16; of the tiny models float32"
    )
    what.add_argument("--contexts", type=whole_from(1), help="default: 32; of the tiny models 4")
    what.add_argument(
        "--together",
        type=whole_from(1),
        help="contexts in a call of generate to begin with, where all of them break the device "
        "instead of being refused (default: all)",
    )
    when = parser.add_argument_group("how long it takes")
    when.add_argument(
        "--budget",
        type=whole_from(1),
        default=math.inf,
        metavar="SECONDS",
        help="of this command; what it has no time for is left to the next one (default: none)",
    )
    when.add_argument(
        "--limit",
        type=whole_from(1),
        default=300,
        metavar="SECONDS",
        help="of one process, at which it is killed; a contender whose warm-up says that its "
        "rounds would pass its share of that is measured once (default: 300)",
    )
    when.add_argument("--retry", action="store_true", help="try again what failed before")
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out",
        type=Path,
        default=Path("sampling-cuda.jsonl"),
        metavar="FILE",
        help="where measurements are kept (default: %(default)s)",
    )
    files.add_argument(
        "--read",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="make the tables of these; measure nothing",
    )
    files.add_argument(
        "--write", action="store_true", help="put the tables into benchmarks/README.md"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, or read, and print; returns the exit status."""
    missing = []
    if args.write:  # better known now than after the measurement
        between_markers(DOCUMENT.read_text(encoding="utf-8"), "", OPENING, CLOSING)
    if args.read is None:
        missing = Runner(plan(args)).run()
        if missing:
            names = ", ".join(f"{model} {name}".strip() for model, name in missing)
            tell(f"the budget is spent; missing are {names}: the same command goes on with them")
        if setting_of(Log(args.out).records()) is None:
            raise UserError(
                "no process got as far as measuring", "give more time with --limit and --budget"
            )
    results = Results.read(args.read or [args.out])
    if args.write and (not results.setting.gpu or set(results.models) & set(TINY)):
        raise UserError(MEANINGLESS, "leave --write out")
    print(full(results))
    if args.write:
        after = between_markers(
            DOCUMENT.read_text(encoding="utf-8"), full(results), OPENING, CLOSING
        )
        DOCUMENT.write_text(after, encoding="utf-8")
    return 3 if missing else 0


def plan(args: argparse.Namespace) -> Plan:
    """What these arguments ask for.

    Raises:
        UserError: they can't be measured together, or here.
    """
    tiny = [model for model in args.models if model in TINY]
    if tiny and len(tiny) < len(args.models):
        raise UserError("--models: the tiny ones decode another job", "measure them by themselves")
    everything = f"--device cpu --models {' '.join(TINY)}"
    try:
        device = resolve_device(args.device)
    except UserError as error:
        raise UserError(error.problem, f"use {everything} to see whether it runs") from error
    if args.write and (tiny or device.type == "cpu"):
        raise UserError(MEANINGLESS, "leave --write out")
    if device.type == "cpu" and not tiny:
        raise UserError("--device cpu: these models take hours on a CPU", f"use {everything}")
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a folder", "name a file in it")
    if not args.out.parent.is_dir():
        raise UserError(f"no folder {args.out.parent}", "make it, or name another file")
    size = TINY_SIZE if tiny else Size()
    size = replace(size, contexts=args.contexts or size.contexts)
    return Plan(
        models=args.models,
        contenders=args.contenders,
        rounds=args.rounds,
        out=args.out,
        device=str(device),
        dtype=args.dtype or ("float32" if tiny else "bfloat16"),
        size=size,
        together=min(args.together or size.contexts, size.contexts),
        limit=args.limit,
        budget=args.budget,
        retry=args.retry,
    )


if __name__ == "__main__":
    sys.exit(main())
