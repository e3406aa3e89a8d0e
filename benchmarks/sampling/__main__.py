"""How fast rows are sampled: ours against its peers and against the matrix products alone.

    python -m benchmarks.sampling                     about 20 minutes on two cores
    python -m benchmarks.sampling --rounds 1          about 8 minutes
    python -m benchmarks.sampling --quick             does it run? its figures mean nothing
    python -m benchmarks.sampling --write             puts the tables into the two READMEs

One process, the embedded model, nothing stops early: a context of 231 tokens, greedy + 4
temperatures x 8 samples = 33 rows of 48 new tokens; and 4 such contexts, 132 rows, together.
Contenders take turns, round by round, and ratios are taken within a round, so that a machine that
changes pace doesn't favour one. In the same rounds: the model's matrix products by themselves, what
capture adds to a prefill, and ours with more or fewer rows, new tokens and tokens of context. Then
the memory for keys and values, and which rows the portable engine or another width writes
otherwise. Prints Markdown; progress goes to stderr. A peer that isn't installed is named in the
output, with what would install it.
"""

import argparse
import datetime
import os
import platform
import re
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.sampling import floor, memory
from benchmarks.sampling.growth import Growth, capture_cost, compare
from benchmarks.sampling.peers import CONTEXTS, QUICK, Size, Workload, contenders, timed
from benchmarks.sampling.results import FLOOR, OURS, Results, Timing
from benchmarks.sampling.tables import PEERS, between_markers, full, short
from ia_mech.cli import Parser, guarded, whole_from
from ia_mech.models.load import ModelSpec, Subject, load

FOLDER = Path(__file__).parents[1]
DOCUMENTS = {FOLDER / "README.md": full, FOLDER.parent / "README.md": short}  # for --write
CHOICES = [peer for peer in PEERS if peer not in (OURS, FLOOR)]
CAPTURE_PAIRS = 10  # of prefills with and without capture, per round
PACKAGES = ("torch", "transformers", "transformer-lens", "llama-cpp-python")


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.quick and args.write:
        parser.error("--write: the figures of --quick mean nothing")
    return guarded(lambda: run(args), lambda: "nothing was kept")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.sampling", description=__doc__)
    parser.add_argument(
        "--rounds", type=whole_from(1), default=3, help="of every contender (default: 3)"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=CHOICES,
        default=CHOICES,
        metavar="PEER",
        help=f"which, besides ours: {', '.join(CHOICES)} (default: all that can be had)",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="for llama.cpp (default: the embedded model's, 93 MB, fetched once)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--quick", action="store_true", help="few rows and tokens, one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the measurements too")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="make the tables of saved ones; measure nothing"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="put the tables between the markers in README.md and benchmarks/README.md",
    )
    return parser


def run(args: argparse.Namespace) -> None:
    if args.write:  # better known now than after the measurement
        for document in DOCUMENTS:
            between_markers(document.read_text(encoding="utf-8"), "")
    results = Results.read(args.read) if args.read else measure(args)
    print(full(results))
    if args.json:
        results.save(args.json)
    if args.write:
        for document, text in DOCUMENTS.items():
            after = between_markers(document.read_text(encoding="utf-8"), text(results))
            document.write_text(after, encoding="utf-8")


def measure(args: argparse.Namespace) -> Results:
    """All of it, in rounds; progress is told on stderr."""
    size, rounds = (QUICK, 1) if args.quick else (Size(), args.rounds)
    spec = ModelSpec(device=args.device, dtype=args.dtype)
    workload, written = Workload.of(load(spec), size), {}
    found, missing = contenders(workload, args.peers, args.gguf, written)
    timings = [Timing(one.peer, one.contexts, []) for one in found]
    products, plain, captured, growth = [], [], [], Growth(workload)
    for one in found:
        tell(f"warming up: {one.peer}")
        one.run(2)
    for number in range(1, rounds + 1):
        for one, timing in zip(found, timings, strict=True):
            tell(f"round {number} of {rounds}: {one.peer}, contexts: {one.contexts}")
            timing.seconds.append(timed(lambda run=one.run: run(size.new_tokens)))
        if workload.subject.device.type == "cpu":  # elsewhere waiting for each would be counted
            tell(f"round {number} of {rounds}: matrix products")
            floor.measure(workload, products)
        tell(f"round {number} of {rounds}: capture, growth")
        for taken, seconds in zip(
            (plain, captured), capture_cost(workload, CAPTURE_PAIRS), strict=True
        ):
            taken.append(seconds)
        growth.measure()
    tell("memory")
    return Results(
        setting=setting(workload.subject),
        context_tokens=size.context_tokens,
        rows=size.rows,
        new_tokens=size.new_tokens,
        contexts=CONTEXTS,
        rounds=rounds,
        missing=missing,
        timings=timings,
        products=products,
        plain=plain,
        captured=captured,
        growth=growth.points,
        memory=memory.measure(replace(spec, device=str(workload.subject.device)), size),
        compared=compare(written, size.rows, CONTEXTS),
    )


def setting(subject: Subject) -> str:
    """Hardware, versions, dtype and date, on one line."""
    described = subject.describe()
    names = []
    for package in PACKAGES:
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return (
        f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"{described['dtype']} on {described['device']}, {', '.join(names)}, "
        f"{datetime.date.today().isoformat()}"
    )


def processor() -> str:
    """The CPU's name, with the widest vectors it has."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"model name\s*: (.*)", told)
    vectors = next((v for v in ("avx512f", "avx2") if re.search(rf"\b{v}\b", told)), None)
    named = name[1].strip() if name else platform.machine()
    return f"{named} ({vectors})" if vectors else named


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
