"""What only a GPU can show, within five minutes: the parts in order of value. Each part prints as
it goes and may fail alone; all that was measured is in one JSON file.

    python -m benchmarks.gpu_check                         on a machine with a GPU
    python -m benchmarks.gpu_check --only steps profile    some parts
    python -m benchmarks.gpu_check --cpu                   does every line run? Tiny sizes, whose
                                                           figures mean nothing

  kernels    both kernels against the engine's own functions, at real shapes
  tiles      ways to cut the attention; the draw, a norm, a step's matrix products
  steps      the whole job by eager steps, with the kernels, and captured; its limit
  profile    what a captured step is made of
  rows       steps of 32 to 2,048 rows, and of rows that end and join
  prefill    what capture adds; sizes of batches; the model's own pass
  generate-captures, generate, static, continuous
             what other engines take for the job
  tests      those that need a GPU

Random weights in the shapes of Qwen3-0.6B, bfloat16; 32 contexts of 512 tokens x 33 rows x 64 new
tokens. The limit of a step is the time of its bytes at the card's bandwidth and of its products at
the card's rate, one after the other. --cpu leaves out the graphs and the other engines. The exit
status is 1 if a part failed; one for which no time was left can be named in another call.
"""

import contextlib
import datetime
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from benchmarks.sampling.limits import Ceilings, least
from benchmarks.sampling.measure import measure, setting
from benchmarks.sampling.ours import Capture, first_differences
from benchmarks.sampling.workload import SHAPES, Size, Task, Workload, one_line, rows_of, timed
from ia_mech.cli import Parser, run_command
from ia_mech.engine import state
from ia_mech.engine.decode import Decoded, decode
from ia_mech.engine.installed import installed
from ia_mech.engine.memory import kept
from ia_mech.engine.sampling import draw_tokens
from ia_mech.engine.shared import attend, merge
from ia_mech.engine.state import Prefilled, Prefix, prefill_all
from ia_mech.errors import UserError

ROOT = Path(__file__).parents[1]
ALL, EACH = 290, 75  # most seconds of all parts, and of each
NEAR = 1e-4  # of two tokens whose margin is less, rounding may choose either
# Bytes, and operations in half precision, that a card can do in a second, by NVIDIA's datasheets.
CARDS = {
    "H200": (4.8e12, 989e12), "H100 80GB HBM3": (3.35e12, 989e12), "H100 NVL": (3.9e12, 835e12),
    "H100 PCIe": (2.0e12, 756e12), "A100-SXM4-80GB": (2.04e12, 312e12),
}  # fmt: skip
CUTS = (  # of the attention kernel: queries, columns, warps, stages
    (32, 64, 4, 2), (16, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 3), (64, 64, 4, 2), (64, 64, 8, 3),
    (128, 64, 8, 2), (32, 128, 4, 2),
)  # fmt: skip
Line = dict[str, Any]  # what was measured, by name


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = Parser(prog="python -m benchmarks.gpu_check", description=__doc__)
    out = Path("gpu-check.json")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=f"(default: {out})")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help="these parts")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, without a GPU")
    args = parser.parse_args(argv)

    def body() -> int:
        if not (args.cpu or torch.cuda.is_available()):
            raise UserError(
                "no CUDA device is available here", "use a machine with a GPU, or --cpu"
            )
        chosen = args.only or [name for name in PARTS if not (args.cpu and name in PEERS)]
        bench = Bench(args.cpu)
        report: dict[str, Any] = {
            "when": datetime.datetime.now().isoformat(timespec="seconds"),
            "where": setting(bench.device, bench.task.dtype),
            "model": bench.task.model,
            "size": asdict(bench.size),
            "parts": {},
            "summary": [],
        }
        save(args.out, report)  # that it can't be is better known now
        print(report["where"], flush=True)
        for name, found in measured({name: PARTS[name] for name in chosen}, args.cpu):
            report["parts"][name] = found
            report["summary"] = summary(report["parts"])
            save(args.out, report)
        failed = [name for name, found in report["parts"].items() if found["error"]]
        for line in report["summary"]:
            print(line)
        print(f"failed: {', '.join(failed) or 'nothing'}; all figures are in {args.out}")
        return int(bool(failed))

    return run_command(body, lambda: f"what was measured so far is in {args.out}")


def save(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} can't be written ({error.strerror})", "give another --out"
        ) from error


def summary(parts: Mapping[str, Any]) -> list[str]:
    """What the aims are about, as far as it was measured."""
    lines = {name: found["measured"] for name, found in parts.items()}
    captured = [one for one in lines.get("steps", ()) if one.get("steps") == "captured"]
    if not captured:
        return []
    ours = captured[0]
    said = [
        f"a step: {ours['step_ms']:.2f} ms, {ours['of_limit']:.1f} times its limit (wanted: 2.5); "
        f"outside of steps: {ours['outside_s']:.2f} of {ours['job_s']:.2f} s (wanted: 0.7)"
    ]
    for name, wanted in PEERS.items():
        said += [
            f"{ours['tokens_s'] / one['tokens_s']:.1f} times {name}"
            + (f" (wanted: {wanted})" if wanted else "")
            for one in lines.get(name, ())
        ]
    return said


# -- parts, each in turn --------------------------------------------------------------------------


def measured(parts: Mapping[str, Callable], on_cpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of parts with what was measured, in ``seconds``, and the ``error`` if one failed.

    All are measured by one other process; a part that fails may have left the GPU unusable, so the
    next gets a new one. So do other engines, which leave graphs and workspaces.
    """
    end = time.monotonic() + ALL
    with contextlib.ExitStack() as stack:
        process: _Process | None = None
        for name, part in parts.items():
            begun, lines, error = time.monotonic(), list[Line](), ""
            print(f"== {name}", flush=True)
            if process is None or name in PEERS:
                stack.close()
                process = _Process(on_cpu)
                stack.callback(process.kill)
            for line in process.measure(part, min(begun + EACH, end)):
                if isinstance(line, str):
                    error = line
                    print(f"   failed: {error}", flush=True)
                else:
                    lines.append(line)
                    print(f"   {', '.join(map(_said, line, line.values()))}", flush=True)
            seconds = round(time.monotonic() - begun, 1)
            print(f"   ({seconds:.0f} s)", flush=True)
            yield name, {"measured": lines, "seconds": seconds, "error": error}
            if error or name in PEERS:
                process = None


def _said(name: str, value: Any) -> str:
    return f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"


class _Process:
    """A process that measures parts."""

    def __init__(self, on_cpu: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, on_cpu), daemon=True)
        self._process.start()
        theirs.close()

    def measure(self, part: Callable, end: float) -> Iterator[Line | str]:
        """What a part measures, as it comes; and why it ended if it wasn't done."""
        try:
            self._pipe.send(part)
            while self._pipe.poll(max(0.0, end - time.monotonic())):
                line = self._pipe.recv()
                if line is not None:
                    yield line
                if not isinstance(line, dict):
                    return
            yield "there was no time left"
        except (EOFError, OSError):
            yield "its process died"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # before it has made its group
            os.killpg(self._process.pid or 0, signal.SIGKILL)  # with those that it has started
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, on_cpu: bool) -> None:
    """Measure the parts that come through the pipe."""
    os.setsid()
    if on_cpu:
        torch.set_num_threads(1)
    bench = Bench(on_cpu)
    while True:
        part, error = pipe.recv(), None
        try:
            for line in part(bench):
                pipe.send(line)
        except Exception as problem:
            error = one_line(problem)
        pipe.send(error)


# -- what all parts use ---------------------------------------------------------------------------


class Bench:
    """The job on the device."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.size = Size((2,), 20, 3, 3) if on_cpu else Size((32,), 512, 33, 64)
        self.task = Task(
            *("tiny" if on_cpu else "qwen3-0.6b", (), 1, self.size, self.device.type),
            *("float32" if on_cpu else "bfloat16", 16),
        )
        self.contexts, self.dtype = self.size.counts[-1], getattr(torch, self.task.dtype)
        self.config = SHAPES[self.task.model]()
        self.captured = "with the kernels" if on_cpu else "captured"  # the best steps there are
        if on_cpu:  # before another process imports Triton
            os.environ["TRITON_INTERPRET"] = "1"

    @cached_property
    def work(self) -> Workload:
        torch.set_float32_matmul_precision("highest")
        return Workload(self.task)

    @cached_property
    def card(self) -> tuple[float, float]:
        """Bytes and operations a second, as the card's maker has them, or else as measured."""
        name = "" if self.on_cpu else torch.cuda.get_device_name()
        ceilings = Ceilings(self.work, 1).measure
        return next((CARDS[one] for one in CARDS if one in name), None) or (*ceilings().values(),)

    def milliseconds(self, function: Callable[[], object]) -> float:
        if self.on_cpu:
            return 1e3 * timed(function, self.device)
        from triton.testing import do_bench

        return do_bench(function, warmup=10, rep=60, return_mode="median")

    @contextlib.contextmanager
    def stepping(self, how: str) -> Iterator[None]:
        """While it lasts, steps are eager, with the kernels, or captured."""
        made = installed(self.work.model)
        capture: contextlib.AbstractContextManager = contextlib.nullcontext()
        made.engine = replace(self.work.engine, captured=how != "eager", uncaptured="")
        if how == "with the kernels":
            capture = mock.patch("ia_mech.engine.captured.capture", _uncaptured)
        kept.clear()
        with capture:
            yield
        kept.clear()
        if made.engine.uncaptured:
            raise RuntimeError(f"steps aren't captured: {made.engine.uncaptured}")

    def limit(self, each: int) -> float:
        """Milliseconds of a step of so many rows of each context, if nothing had to wait."""
        size = replace(self.size, rows=each)
        cache = self.work.prefilled(1, capture=False)[0].state.cache
        needed = least(self.work.model, cache, size, self.contexts)
        seconds = sum(count / pace for count, pace in zip(needed, self.card, strict=True))
        return 1e3 * seconds / (size.new_tokens - 1)

    def decode(self, groups: Sequence[Prefilled], each: int, **options: Any) -> list[Decoded]:
        """Decode so many rows of each context; ``options`` as for the engine's ``decode``."""
        rows = [row for at in range(self.contexts) for row in rows_of(at, each)]
        given = {"stop_ids": (), "max_new_tokens": self.size.new_tokens, **options}
        return decode(self.work.model, groups, rows, **given)

    @torch.inference_mode()
    def job(self, each: int, **options: Any) -> tuple[list[Decoded], Line]:
        """Prefill with capture, decode, move to the host: what was written, and how long it took.
        Arguments as for :meth:`decode`."""
        begun, ends = self.now(), list[float]()
        groups = self.work.prefilled(self.contexts, capture=True)
        prefilled = self.now()
        wrote = self.decode(groups, each, on_step=lambda *_: ends.append(self.now()), **options)
        decoded = self.now()
        for of_group in ([one.logits for one in groups], [one.residuals for one in groups]):
            torch.cat(of_group).cpu()
        whole, step = self.now() - begun, float(np.median(np.diff(ends)))
        return wrote, {
            "rows": self.contexts * each,
            "step_ms": 1e3 * step,
            "job_s": whole,
            "outside_s": whole - step * (len(ends) - 1),
            "tokens_s": sum(len(one.token_ids) for one in wrote) / whole,
            "prefill_s": prefilled - begun,
            "to_host_s": begun + whole - decoded,
        }

    def now(self) -> float:
        """Seconds, once the device has done everything."""
        if not self.on_cpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def _uncaptured(step: Callable[[], None], _before: Any) -> Any:
    """In place of ``captured.capture``."""
    return SimpleNamespace(replay=step)


# -- parts ----------------------------------------------------------------------------------------


def attention(
    bench: Bench, dtype: torch.dtype, age: int, cut: Iterable[int] = ()
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """A step's attention in one layer, by the kernel and by the engine's functions in float32.

    Args:
        age: how many own tokens each row has.
        cut: as in :data:`CUTS`; the kernel's own if empty.
    """
    from ia_mech.engine import attend_kernel as kernel

    size, config, device = bench.size, bench.config, bench.device
    contexts, each, tokens = bench.contexts, size.rows, size.context_tokens
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows, scaling = contexts * each, dim**-0.5
    normal = partial(torch.randn, device=device, dtype=dtype)
    ints = partial(torch.tensor, device=device, dtype=torch.int32)
    prefix = [normal(contexts, kv_heads, tokens, dim) for _ in range(2)]
    own = [normal(rows, kv_heads, size.new_tokens, dim) for _ in range(2)]
    new = [normal(rows, kv_heads, dim) for _ in range(2)]
    query = normal(rows, heads, dim)
    addresses = [[one.data_ptr() for one in states] for states in prefix]
    places = kernel.Prefixes(
        *torch.tensor([*addresses, [tokens] * contexts], device=device),
        *ints([[0] * contexts, [tokens] * contexts]),
    )
    tiling = kernel.Tiling(*cut) if cut else kernel.Tiling.of(dtype, dim)
    width = tiling.rows(heads // kv_heads)
    tiles = kernel.tiles([row // each for row in range(rows)], width)
    tables = (
        ints([context for context, _ in tiles]),
        ints([members + [-1] * (width - len(members)) for _, members in tiles]),
        *(ints(range(rows)), ints([age] * rows)),
    )
    ours = partial(
        kernel.attend, query, *new, *own, places, *tables, scaling=scaling, tiling=tiling
    )

    def theirs() -> Tensor:
        together = query.float().view(contexts, each, heads, dim).transpose(1, 2)
        first, total = attend(together, *(one.float() for one in prefix), scaling=scaling)
        first = first.transpose(1, 2).reshape(rows, heads, 1, dim)
        total = total.transpose(1, 2).reshape(rows, heads, 1)
        both = zip(own, new, strict=True)
        tail = [torch.cat([old[:, :, :age], one[:, :, None]], 2).float() for old, one in both]
        other = attend(query.float()[:, :, None], *tail, scaling=scaling)
        return merge((first, total), other)[:, :, 0]

    return ours, theirs


def draws(bench: Bench, dtype: torch.dtype) -> tuple[Callable, Callable]:
    """A step's draw by the kernels and by the engine's function."""
    from ia_mech.engine.draw_kernel import draw

    rows, device = bench.contexts * bench.size.rows, bench.device
    logits = (torch.randn(rows, bench.config.vocab_size, device=device) * 3).to(dtype)
    temperature = torch.tensor([0.0, 0.5, 0.7, 1.0, 1.3, 2.0], device=device).repeat(rows)[:rows]
    stream = torch.randint(0, 2**32, (rows, 2), device=device)
    step = torch.arange(rows, device=device)
    drawn = step + 1
    return (
        lambda: draw(logits, temperature, drawn, stream, step),
        lambda: draw_tokens(logits.float(), temperature, stream, step[:, None]),
    )


def kernels(bench: Bench) -> Iterator[Line]:
    torch.manual_seed(0)
    last = bench.size.new_tokens - 1
    wrong = False
    for dtype in dict.fromkeys([bench.dtype, torch.float32]):
        allowed = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        for age in (0, last // 2, last):
            ours, theirs = attention(bench, dtype, age)
            right = theirs()
            off = float(((ours().float() - right).norm(dim=-1) / right.norm(dim=-1)).max())
            wrong |= not off <= allowed
            yield {"attention": str(dtype), "age": age, "vectors off": off, "allowed": allowed}
        ours, theirs = (one() for one in draws(bench, dtype))
        same = ours.token == theirs.token
        apart = ~same & (theirs.margin >= NEAR)
        off = float((ours.logprob - theirs.logprob)[same].abs().max())
        ranks = bool((ours.rank == theirs.rank)[same].all())
        wrong |= bool(apart.any()) or not ranks or not off <= 1e-5
        yield {
            "draw": str(dtype), "rows": len(same), "other tokens": int((~same).sum()),
            "beyond near-ties": int(apart.sum()), "ranks equal": ranks, "log-probability off": off,
        }  # fmt: skip
    if wrong:
        raise RuntimeError("a kernel is wrong")


def tiles(bench: Bench) -> Iterator[Line]:
    last, rows = bench.size.new_tokens - 1, bench.contexts * bench.size.rows
    for cut in CUTS[:1] if bench.on_cpu else CUTS:
        line: Line = {"queries, columns, warps, stages": cut}
        try:
            for age in (1, last // 2, last):
                ours, _ = attention(bench, bench.dtype, age, cut)
                line[f"us at age {age}"] = 1e3 * bench.milliseconds(ours)
        except Exception as error:  # more than the card's shared memory, say
            line["failed"] = one_line(error)
        yield line
    ours, theirs = draws(bench, bench.dtype)
    yield {"draw, ms": bench.milliseconds(ours), "eager": bench.milliseconds(theirs)}
    model = bench.work.model
    norm, states = model.model.norm, model.model.embed_tokens.weight[:rows]
    given = states, states.shape[-1:], norm.weight, norm.variance_epsilon
    yield {
        "norm, us": 1e3 * bench.milliseconds(lambda: rms_norm(*given)),
        "eager": 1e3 * bench.milliseconds(lambda: norm(states)),
    }
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for width in (rows, -(-rows // 128) * 128):
        fed = {
            one.in_features: torch.randn(
                width, one.in_features, device=bench.device, dtype=bench.dtype
            )
            for one in linears
        }

        def products(fed: dict[int, Tensor] = fed) -> None:
            for one in linears:
                one(fed[one.in_features])

        yield {"a step's products, ms": bench.milliseconds(products), "rows": width}


def steps(bench: Bench) -> Iterator[Line]:
    begun = time.monotonic()
    engine, model = str(bench.work.engine), bench.work.model
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    fused = sum("forward" in vars(norm) for norm in norms)
    yield {"engine": engine, "fused norms": fused, "check_s": time.monotonic() - begun}
    copies = Ceilings(bench.work, 1).measure()
    yield {"bytes a second": bench.card[0], "operations a second": bench.card[1], **copies}
    each = bench.size.rows
    limit, eager = bench.limit(each), None
    for how in ("eager", "with the kernels", "captured")[: 2 if bench.on_cpu else 3]:
        with bench.stepping(how):
            _, first = bench.job(each)  # compiles and captures
            wrote, line = bench.job(each)
        eager = eager or wrote
        margins = first_differences(eager, wrote)
        yield {
            "steps": how, **line, "limit_ms": limit, "of_limit": line["step_ms"] / limit,
            "first_job_s": first["job_s"], "rows unlike eager": len(margins),
            "largest margin there": max(margins, default=0.0),
        }  # fmt: skip


def profile(bench: Bench) -> Iterator[Line]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    kind = ProfilerActivity.CPU if bench.on_cpu else ProfilerActivity.CUDA
    with bench.stepping(bench.captured), torch.inference_mode():
        groups = bench.work.prefilled(bench.contexts, capture=False)
        bench.decode(groups, bench.size.rows)
        with profiled(activities=[kind]) as made:
            bench.decode(groups, bench.size.rows)
            bench.now()
    time_of = "self_cpu_time_total" if bench.on_cpu else "self_device_time_total"
    count = bench.size.new_tokens - 1
    found = [
        (getattr(one, time_of) / 1e3 / count, one.count / count, one.key)
        for one in made.key_averages()
    ]
    launches, busy = (sum(one[at] for one in found) for at in (1, 0))
    yield {"decoding, per step: launches": launches, "busy_ms": busy}
    for busy, launches, name in sorted(found, reverse=True)[:20]:
        yield {"ms": busy, "launches": launches, "kernel": name[:80]}


def rows(bench: Bench) -> Iterator[Line]:
    for each in (1,) if bench.on_cpu else (1, 4, 16, 64):
        limit = bench.limit(each)
        with bench.stepping(bench.captured):
            bench.job(each)
            _, line = bench.job(each)
        yield {**line, "limit_ms": limit, "of_limit": line["step_ms"] / limit}
    each = bench.size.rows
    stops = range(0, bench.config.vocab_size, bench.size.new_tokens)  # half the rows end early
    with bench.stepping(bench.captured):
        for number in (1, 2):
            options = {"stop_ids": stops, "together": bench.contexts * each // 2}
            yield {"rows end and join, round": number, **bench.job(each, **options)[1]}


def prefill(bench: Bench) -> Iterator[Line]:
    work, size, kind = bench.work, bench.size, bench.device.type
    taken = Capture(work, bench.contexts).measure()
    without, with_capture = (float(np.median(one)) for one in taken.values())
    yield {"plain_s": without, "captured_s": with_capture, "added": with_capture / without - 1}
    pieces = np.linspace(0.5, 1, bench.contexts) * size.context_tokens
    mixed = [Prefix(ids[: int(tokens)]) for ids, tokens in zip(work.ids, pieces, strict=True)]
    equal = [Prefix(ids) for ids in work.ids]
    for most in (2048, state.PREFILL_TOKENS[kind], 32_768):
        for what, prefixes in (("equally long", equal), ("of mixed lengths", mixed)):
            with mock.patch.dict(state.PREFILL_TOKENS, {kind: most}):
                seconds = [
                    timed(lambda: prefill_all(work.model, prefixes), bench.device)  # noqa: B023
                    for _ in range(4)
                ]
            tokens = sum(len(one.ids) for one in prefixes)
            pace = tokens / float(np.median(seconds[1:]))
            yield {"contexts": what, "tokens together": most, "tokens_s": pace}
    together = torch.tensor(work.ids, device=bench.device)[: 8192 // size.context_tokens]

    @torch.inference_mode()
    def own() -> None:
        work.model(input_ids=together, use_cache=True, logits_to_keep=1)

    with installed(work.model).own_attention():
        seconds = [timed(own, bench.device) for _ in range(4)]
    pace = together.numel() / float(np.median(seconds[1:]))
    yield {"contexts": "the model's own pass", "tokens_s": pace}


def peer(name: str, contexts: int, bench: Bench) -> Iterator[Line]:
    """The job by another engine; of fewer contexts where it takes only so many at a time."""
    size = replace(bench.size, counts=(contexts,))
    _, records = measure(replace(bench.task, contenders=(name,), size=size))
    if problem := records[-1].get("failed"):
        raise RuntimeError(problem)
    seconds = records[-1]["values"]["seconds"]
    written = contexts * size.rows * size.new_tokens
    yield {"seconds": seconds, "tokens_s": written / seconds, "how": records[-1]["notes"]}


def tests(bench: Bench) -> Iterator[Line]:
    files = ["tests/test_cuda.py", *([] if bench.on_cpu else ["tests/test_kernels.py"])]
    command = [sys.executable, "-m", "pytest", "-n", "0", *files]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None  # a pipe, as asked for above
        last = ""
        for line in process.stdout:
            last = line.strip(" =\n") or last
            if line.startswith(("FAILED", "ERROR")):
                yield {"test": last}
    yield {"tests": last}
    if process.returncode:
        raise RuntimeError(f"the tests ended with status {process.returncode}")


# What multiple of each ours is wanted to be, if any.
PEERS = {"generate-captures": 8, "generate": None, "static": 4, "continuous": 3}
PARTS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    **{one.__name__: one for one in (kernels, tiles, steps, profile, rows, prefill)},
    **{name: partial(peer, name, 32 if name == "continuous" else 16) for name in PEERS},
    "tests": tests,
}

if __name__ == "__main__":
    sys.exit(main())
