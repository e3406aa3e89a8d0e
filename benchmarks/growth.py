"""How time and memory grow with the number of contexts, from the writer to the report.

Usage::

    python -m benchmarks.growth                            # 1,250 to 10,000 contexts of 64 rows
    python -m benchmarks.growth --contexts 250 500 --write    # and write benchmarks/growth.md

No model takes part: contexts, turns and tensors are made up, in the shapes of a run of a tiny model
(4 layers, d_model 64, 4 positions, 100 header logits). Each step is a process of its own, which
reports its CPU seconds and by how much its memory grew after its imports, at the most. A slope is
that of log cost over log contexts, from the two largest numbers: 1 is linear, 0 is constant.
"""

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ia_mech.cli import guarded
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.preflight import Texts, write_snapshot
from ia_mech.collect.rows import stored_logits
from ia_mech.collect.shards import Shard
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.judge.label import label_run
from ia_mech.judge.rubric import GENUINE
from ia_mech.judge.verdict import Verdict
from ia_mech.merge import merge
from ia_mech.models.load import ModelSpec
from ia_mech.rates.__main__ import main as rates
from ia_mech.report.__main__ import main as report
from ia_mech.run import Run, RunWriter, layout

LAYERS, D_MODEL, VOCAB, TOKENS = 4, 64, 1000, 24
POSITIONS = ["response_end", "turn_end", "header_0", "header_last"]
SHARDS, BUCKET, UNIT = 4, 64, 16
GRID = Grid((0.7, 1.0, 1.3), 21, TOKENS)  # 64 rows with the greedy one
CONFIG = SampleConfig(ModelSpec("made-up"), limit=None, grid=GRID, header_logits="100")
STEPS = ("write", "merge", "read", "layer", "judge", "rates", "report")
WORDS = np.array(["why", "how", "does", "it", "rise", "when", "the", "dough", "is", "warm", "then"])
TABLE = Path(__file__).with_suffix(".md")


def record(contexts: int, shard: Shard) -> dict:
    """``run.json`` of a shard."""
    model = {"name": "made-up", "weights_hash": "00", "layers": LAYERS, "d_model": D_MODEL}
    return {
        "format": layout.FORMAT,
        "identity": {
            "config": json.loads(json.dumps(asdict(CONFIG))),
            "model": model | {"vocab": VOCAB, "dtype": "float32", "device": "cpu"},
            "chat": {"template_hash": "00", "tail_ids": [1], "stop_ids": {"2": "end"}},
            "positions": POSITIONS,
            "conversations": {"count": contexts},
            "software": {},
        },
        "buckets": math.ceil(contexts / BUCKET),
        "shard": [shard.number, shard.of],
    }


def text(random: np.random.Generator, words: int) -> str:
    return " ".join(random.choice(WORDS, words))


def unit(orders: list[int]) -> tuple[pa.Table, pa.Table, dict, torch.Tensor]:
    """Contexts, rows, header logits and residuals, which depend on the orders alone."""
    contexts, rows = [], []
    for order in orders:
        random = np.random.default_rng(order)
        names = {"context_id": f"c{order}", "source_id": f"c{order}", "order": order}
        names |= {"dataset": "made-up", "perturbation": "none", "response_cut_off": False}
        messages = [
            {"role": "user", "content": text(random, 30)},
            {"role": "assistant", "content": text(random, 80)},
        ]
        rendered = "\n".join(message["content"] for message in messages)
        contexts.append(
            {
                **names,
                "messages": messages,
                "metadata": "{}",
                "text": rendered,
                "context_tokens": 150,
            }
        )
        for temperature, sample in GRID.rows():
            numbers = random.normal(size=(2, TOKENS)).astype(np.float32)
            rows.append(
                {
                    **names,
                    "temperature": temperature,
                    "sample": sample,
                    "text": text(random, 12),
                    "finish_reason": "turn_end",
                    "tokens": TOKENS,
                    "logprob_raw": float(numbers[0].sum()),
                    "logprob_tempered": float(numbers[0].sum()) if temperature else None,
                    "token_ids": random.integers(VOCAB, size=TOKENS),
                    "logprobs_raw": numbers[0],
                    "ranks": random.integers(1, VOCAB, size=TOKENS),
                    "margins": numbers[1],
                }
            )
    made = torch.Generator().manual_seed(orders[0])
    shape = len(orders), LAYERS + 1, len(POSITIONS), D_MODEL
    logits = stored_logits(torch.randn(len(orders), VOCAB, generator=made), CONFIG.header_logits)
    return (
        pa.Table.from_pylist(contexts, schema=layout.contexts_schema(POSITIONS)),
        pa.Table.from_pylist(rows, schema=layout.GENERATIONS),
        logits,
        torch.randn(shape, generator=made),
    )


def write(out: Path, contexts: int) -> None:
    """The run in shards, unit by unit, as the main job writes it."""
    for number in range(1, SHARDS + 1):
        shard = Shard(number, SHARDS)
        buckets = {
            bucket: list(range(first, min(first + BUCKET, contexts)))
            for bucket, first in enumerate(range(0, contexts, BUCKET))
            if shard.holds(bucket)
        }
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            texts, file = Texts(Path(scratch)), Path(scratch) / layout.CONVERSATIONS
            for order in range(contexts):
                texts.append(json.dumps({"id": f"c{order}"}))
            write_snapshot(texts, buckets, file)
            writer = RunWriter.create(shard.folder(out), record(contexts, shard), file)
        with writer:
            writer.start_session({})
            for bucket, orders in buckets.items():
                for at in range(0, len(orders), UNIT):
                    writer.add_contexts(f"{bucket}.{at}", *unit(orders[at : at + UNIT]))
            writer.finish()


def read(out: Path, _: int) -> None:
    """All that a run holds, and the hash of every file."""
    run = Run.open(out)
    assert not run.verify()
    assert len(run.generations) == len(run.contexts) * len(GRID.rows())
    for layer in run.layers:
        run.residuals(layer, "header_last")
    for index, _ in enumerate(logits := run.header_logits()):
        logits.log_probs(index)


def layer(out: Path, _: int) -> None:
    """One layer at one position, and nothing else."""
    assert Run.open(out).residuals(2, "header_last").isfinite().all()


class Stub:
    """A judge that answers at once: by a turn's first letter."""

    identity = {"kind": "stub"}  # noqa: RUF012
    paid, caveat = False, ""

    def estimate(self, items) -> str:
        return ""

    def judge(self, items, repeats):
        for index, item in enumerate(items):
            genuine = item.turn < "e"
            yield index, Verdict(GENUINE if genuine else "degenerate")


def judge(out: Path, _: int) -> None:
    from ia_mech.display import Quiet

    label_run(Run.open(out), Stub(), "stub", Quiet())


def command(main, *words: str) -> None:
    """Run a command, and fail with it: it prints its error and returns a status."""
    if status := main(list(words)):
        raise SystemExit(status)


ACTIONS = {
    "write": write,
    "merge": lambda out, _: merge(out, remove=True),
    "read": read,
    "layer": layer,
    "judge": judge,
    "rates": lambda out, _: command(rates, str(out), "--judge", "stub"),
    "report": lambda out, _: command(report, str(out)),
}


def peak() -> float:
    """The most memory this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def step(name: str, out: Path, contexts: int) -> None:
    """Do one step, and print what it took as JSON."""
    before, begun = peak(), resource.getrusage(resource.RUSAGE_SELF)
    torch.set_num_threads(1)
    ACTIONS[name](out, contexts)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    seconds = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
    print(json.dumps({"seconds": seconds, "megabytes": peak() - before}))


def measured(contexts: list[int], steps: list[str], folder: Path) -> dict:
    """Seconds and megabytes of each step, by contexts."""
    found: dict = {}
    for count in contexts:
        out = folder / f"{count}" / "run"
        out.parent.mkdir(parents=True)
        for name in steps:
            words = ["-m", "benchmarks.growth", "--step", name, str(out), f"{count}"]
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
            if done.returncode:
                raise UserError(f"{name} of {count} failed", done.stderr[-2000:])
            found[name, count] = json.loads(done.stdout.splitlines()[-1])
            print(f"{count} {name}: {found[name, count]}", flush=True)
        shutil.rmtree(out.parent)
    return found


def slope(found: dict, name: str, key: str, contexts: list[int]) -> float:
    """Between the two largest numbers of contexts."""
    few, many = contexts[-2:]
    ratio = max(found[name, many][key], 1e-3) / max(found[name, few][key], 1e-3)
    return math.log(ratio) / math.log(many / few)


def tables(found: dict, contexts: list[int], steps: list[str]) -> str:
    """Markdown: a table of CPU seconds, and one of memory."""
    lines = []
    for key, title in (("seconds", "CPU seconds"), ("megabytes", "memory at most, MB")):
        heads = [title, *(f"{count:,}" for count in contexts), "slope"]
        lines += ["", f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
        for name in steps:
            values = [found[name, count][key] for count in contexts]
            numbers = [f"{value:.{1 if value >= 0.1 else 2}f}" for value in values]
            exponent = f"{slope(found, name, key, contexts):.2f}"
            lines.append(f"| {' | '.join([name, *numbers, exponent])} |")
    return "\n".join(lines[1:]) + "\n"


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1250, 2500, 5000, 10_000])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--folder", type=Path, help="where the runs are made (default: /tmp)")
    parser.add_argument("--write", action="store_true", help=f"replace the tables of {TABLE.name}")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        name, out, contexts = args.step
        return guarded(lambda: step(name, Path(out), int(contexts)), lambda: "")
    if len(args.contexts) < 2:
        parser.error("a slope takes two numbers of contexts")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measured(args.contexts, args.steps, Path(folder))
    made = tables(found, args.contexts, args.steps)
    print(made)
    if args.write:
        begin, _, rest = TABLE.read_text().partition("<!-- benchmarks.growth -->\n")
        _, mark, end = rest.partition("<!-- /benchmarks.growth -->")
        TABLE.write_text(f"{begin}<!-- benchmarks.growth -->\n{made}{mark}{end}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
