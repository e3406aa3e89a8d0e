"""How near the main job's workers come to the matrix products that they can't avoid.

    python -m benchmarks.workers                     about ten minutes on two cores
    python -m benchmarks.workers --busy              the same, beside one busy process
    python -m benchmarks.workers --rounds 1 --contexts 4 --tokens 3    does it run?

The default job without its files: 24 built-in contexts of 231 tokens, 13 rows each (greedy, three
temperatures × 4 samples), 24 new tokens, all layers captured at 5 positions, in parts as the main
job plans them. The lower bound is the time of the matrix products of the same parts: those of the
prefill, the unembedding at the last token and those of the steps, each shape computed the faster
way. It is measured in one process per core at once, with one thread each. Contenders take turns,
and ratios are made within a round.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.sampling.limits import plain, product_seconds, reordered
from benchmarks.sampling.measure import setting
from benchmarks.sampling.workload import POSITIONS, Size, Task, Workload
from ia_mech.cli import Parser, run_command, whole_from
from ia_mech.collect.parts import PARTS, part_count
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.state import Prefix, prefill_all
from ia_mech.engine.workers import Crew, compute_in_workers, usable_cores
from ia_mech.models import embedded
from ia_mech.settings import BATCH_ROWS

TEMPERATURES, SAMPLES = (0.7, 1.0, 1.3), 4
ROWS = 1 + len(TEMPERATURES) * SAMPLES


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.workers", description=__doc__)
    number = whole_from(1)
    parser.add_argument("--rounds", type=number, default=5, help="(default: 5)")
    parser.add_argument("--contexts", type=number, default=24, help="(default: 24)")
    parser.add_argument("--tokens", type=whole_from(2), default=24, help="new ones (default: 24)")
    parser.add_argument("--busy", action="store_true", help="beside a process that computes")
    args = parser.parse_args(argv)
    return run_command(lambda: measure(args), lambda: "nothing was kept")


def measure(args: argparse.Namespace) -> None:
    """Print the rounds' medians as Markdown."""
    size = Size((args.contexts,), 231, ROWS, args.tokens)
    job = Job(Workload(Task(embedded.NAME, (), args.rounds, size, "cpu", "float32", 1)))
    cores = usable_cores()
    contenders: dict[str, Callable[[], float]] = {
        f"{cores} workers, 1 thread each": partial(job.seconds, Crew(cores, 1)),
        f"1 worker, {cores} threads": partial(job.seconds, Crew(1, cores)),
        "1 worker, 1 thread": partial(job.seconds, Crew(1, 1)),
    }
    tokens = args.contexts * ROWS * args.tokens
    with Floor(job, cores) as floor, busy(args.busy):
        contenders["the products alone"] = floor.seconds
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for count in range(args.rounds):
            for name, contender in contenders.items():
                print(f"round {count + 1}: {name}", file=sys.stderr, flush=True)
                taken[name].append(contender())
    beside = ", beside one busy process" if args.busy else ""
    print(f"Measured on {setting(torch.device('cpu'), 'float32')}{beside}; {args.rounds} rounds.\n")
    print("| | tokens/s | of the products alone |\n| --- | --- | --- |")
    least = taken["the products alone"]
    for name, seconds in taken.items():
        shares = sorted(a / b for a, b in zip(least, seconds, strict=True))
        share = f"{median(shares):.2f} ({shares[0]:.2f} … {shares[-1]:.2f})"
        print(f"| {name} | {tokens / median(seconds):.0f} | {share} |")


class Job:
    """The parts of the job, and how they are computed."""

    def __init__(self, work: Workload) -> None:
        self.work, count = work, work.size.counts[0]
        parts = part_count(count, BATCH_ROWS["cpu"] // ROWS, PARTS["cpu"])
        firsts = [number * count // parts for number in range(parts + 1)]
        self.parts = [range(a, b) for a, b in pairwise(firsts)]

    def seconds(self, crew: Crew) -> float:
        """Seconds of the whole job with a crew."""
        begun = time.perf_counter()
        workers, threads = crew.for_items(len(self.parts))
        compute_in_workers(self.parts, self.compute, lambda *_: None, workers, threads)
        return time.perf_counter() - begun

    @torch.inference_mode()
    def compute(self, part: range) -> None:
        ids, model = self.work.ids, self.work.model
        prefixes = [Prefix(ids[k], range(len(ids[k]) - POSITIONS, len(ids[k]))) for k in part]
        groups, order = prefill_all(model, prefixes)
        rows = [row for at, k in enumerate(order) for row in rows_of(at, part[k])]
        decode(model, groups, rows, [], self.work.size.new_tokens)


def rows_of(context: int, name: int) -> list[Row]:
    """The rows of a context of the default job."""
    grid = [(t, sample) for t in TEMPERATURES for sample in range(SAMPLES)]
    return [
        Row(context, t, stream_key(0, f"benchmark-{name}", sample))
        for t, sample in [(0.0, 0), *grid]
    ]


class Floor:
    """Processes that compute the products of the parts; the context manager ends them."""

    def __init__(self, job: Job, processes: int) -> None:
        size, each = job.work.size, -(-len(job.parts) // processes)
        contexts = max(map(len, job.parts))
        shapes = contexts * size.context_tokens, contexts, contexts * ROWS
        self.pipes, self.processes = [], []
        for _ in range(processes):
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            arguments = theirs, job.work.task, shapes, each * (size.new_tokens - 1), each
            process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Floor":
        for pipe in self.pipes:
            pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()

    def seconds(self) -> float:
        """Seconds of all products, by the slowest process."""
        for pipe in self.pipes:
            pipe.send(None)
        return max(pipe.recv() for pipe in self.pipes)


def serve(pipe: Any, task: Task, shapes: tuple[int, int, int], steps: int, prefills: int) -> None:
    """Measure a process's products whenever it is asked."""
    torch.set_num_threads(1)
    model = Workload(task).model
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head = model.get_output_embeddings()
    blocks = [module for module in linears if module is not head]
    prefill, contexts, rows = shapes

    def seconds(modules: list[nn.Linear], count: int) -> float:
        ways = [product_seconds(modules, count, way) for way in (plain, reordered)]
        return sum(map(min, *ways))

    pipe.send(None)
    while True:
        pipe.recv()
        once = seconds(blocks, prefill) + seconds([head], contexts)
        pipe.send(prefills * once + steps * seconds(linears, rows))


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """While it lasts, another process multiplies matrices with one thread, if wanted."""
    process = multiprocessing.get_context("spawn").Process(target=multiply, daemon=True)
    if wanted:
        process.start()
    try:
        yield
    finally:
        if wanted:
            process.terminate()


def multiply() -> None:
    torch.set_num_threads(1)
    one = torch.randn(512, 512)
    while True:
        one @ one


if __name__ == "__main__":
    sys.exit(main())
