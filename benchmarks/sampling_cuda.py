"""The sampling loop on a GPU against what ``transformers`` offers, and against the device's limits.

    python -m benchmarks.sampling_cuda                       all three shapes, bfloat16
    python -m benchmarks.sampling_cuda --models qwen3-0.6b --rounds 1

Random weights of three shapes, built from their configurations; nothing is downloaded and nothing
stops early. 32 contexts of 512 tokens, each with greedy + 4 temperatures x 8 samples = 33 rows of
64 tokens. ``generate`` can't mix temperatures, so it gets the easier job of all rows at T = 1. The
contenders take turns, round by round, and ratios are taken within a round. What a contender can't
do, for lack of memory or of support, is said in its place. Prints Markdown.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from ia_mech.engine.capture import find_blocks
from ia_mech.engine.check import check_engine
from ia_mech.engine.cuda.check import with_graphs
from ia_mech.engine.cuda.outbox import Outbox, Parcel
from ia_mech.engine.loop import Row, decode_stream
from ia_mech.engine.plan import GPU, plan_units
from ia_mech.engine.prefix import Prefilled, Prefix, prefill
from ia_mech.engine.shared import Engine
from ia_mech.models import DTYPES, text_config
from ia_mech.sampling import stream_key

OURS = "ia_mech, all layers at 5 positions"
CONTEXTS, CONTEXT_TOKENS, NEW_TOKENS, POSITIONS = 32, 512, 64, 5
TEMPERATURES, SAMPLES = (0.5, 0.7, 1.0, 1.3), 8
ROWS = 1 + len(TEMPERATURES) * SAMPLES
TOGETHER = 4  # contexts in one call of generate, which keeps a copy of everything per row

QWEN3 = {
    "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
}  # fmt: skip
SHAPES = {
    "qwen3-0.6b": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16,
    ),
    "qwen3-4b": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32,
    ),
    # Three gated delta layers to one of full attention, as the family has them; the widths are
    # chosen to be near the 4B above and are no released checkpoint's.
    "qwen3.5-hybrid": lambda: Qwen3_5TextConfig(
        vocab_size=248_320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def seconds(function: Callable[[], object]) -> float:
    """Of one call, up to the device's last kernel."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of the fastest of ten copies of 4 GiB."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(10))


def matrix_rate() -> float:
    """Operations per second of the fastest of ten bfloat16 products of 8192 x 8192."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / min(seconds(lambda: a @ b) for _ in range(10))


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A random model of one of ``SHAPES``, made on the device."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(SHAPES[name](), dtype=dtype)
    return model.eval().requires_grad_(False)


class Workload:
    """The contexts and rows of the benchmark, for one model."""

    def __init__(self, model: PreTrainedModel, contexts: int) -> None:
        vocab = text_config(model.config).vocab_size
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, vocab, (contexts, CONTEXT_TOKENS), generator=generator).tolist()
        self.model, self.blocks, self.contexts = model, find_blocks(model), contexts
        probe = self.ids[0][:12]
        self.engine: Engine = with_graphs(model, probe, check_engine(model, probe))
        self.outbox = Outbox(model.device)
        self.rows = [
            Row(c, t, stream_key(0, f"context {c}", s))
            for c in range(contexts)
            for t, s in [(0.0, 0), *((t, s) for t in TEMPERATURES for s in range(SAMPLES))]
        ]

    def groups(self, capture: bool, sent: list[Parcel] | None = None) -> Iterator[Prefilled]:
        """The contexts prefilled; residuals and logits are sent off the device if asked for."""
        at = range(CONTEXT_TOKENS - POSITIONS, CONTEXT_TOKENS)
        prefixes = [Prefix(ids, at) for ids in self.ids]
        lengths = [CONTEXT_TOKENS] * self.contexts
        for unit in plan_units(lengths, self.contexts, GPU.prefill_tokens):
            members = [prefixes[i] for i in unit]
            group = prefill(self.model, members, self.blocks if capture else None)
            if sent is not None:
                sent += [self.outbox.send(tensor) for tensor in (group.logits, group.residuals)]
            yield group

    def ours(self, graphs: bool) -> None:
        """The whole job."""
        sent: list[Parcel] = []
        decode_stream(
            self.model, self.groups(True, sent), self.rows, [], NEW_TOKENS, width=len(self.rows),
            share=self.engine.shared > 0, graphs=graphs, longest=CONTEXT_TOKENS,
        )  # fmt: skip
        for parcel in sent:
            parcel.take()

    def generate(self, **settings) -> None:
        """``generate``, several contexts a call."""
        config = sampling_config(num_return_sequences=ROWS, **settings)
        for start in range(0, self.contexts, TOGETHER):
            batch = torch.tensor(self.ids[start : start + TOGETHER], device=self.model.device)
            self.model.generate(
                batch, attention_mask=torch.ones_like(batch), generation_config=config
            )

    def continuous(self) -> None:
        """``transformers``' continuous batching, all contexts in one call."""
        self.model.generate_batch(
            self.ids, generation_config=sampling_config(num_return_sequences=ROWS)
        )

    def least_seconds(self, bandwidth: float, rate: float) -> tuple[float, float]:
        """What bytes and operations alone would take: the weights once per step, each context's
        keys and values once per step, each row's own at half their final length, the logits written
        and read; two operations per weight and token, and those of attention."""
        config, cache = text_config(self.model.config), next(self.groups(False)).state.cache
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        item, rows = self.model.dtype.itemsize, len(self.rows)
        per_token = sum(t.shape[1] * t.shape[-1] for x in layers for t in (x.keys, x.values))
        table = config.vocab_size * config.hidden_size  # what the logits are made with
        weights = sum(p.numel() for p in self.model.parameters())
        weights -= table if config.tie_word_embeddings else 2 * table
        read = self.contexts * CONTEXT_TOKENS + rows * NEW_TOKENS / 2
        step_bytes = (weights + table + per_token * read + 2 * rows * config.vocab_size) * item
        heads = config.num_attention_heads * sum(
            t.shape[-1] for x in layers for t in (x.keys, x.values)
        )
        step_operations = 2 * rows * (weights + table + heads * (CONTEXT_TOKENS + NEW_TOKENS / 2))
        tokens = self.contexts * CONTEXT_TOKENS
        prefill_operations = 2 * tokens * (weights + heads * CONTEXT_TOKENS / 2)
        steps = NEW_TOKENS - 1
        return (
            steps * step_bytes / bandwidth,
            (steps * step_operations + prefill_operations) / rate,
        )

    def capture_cost(self, pairs: int = 10) -> float:
        """Share that capture adds to a plain prefill, median of pairs."""
        plain, captured = (partial(lambda c: list(self.groups(c)), c) for c in (False, True))
        return statistics.median(seconds(captured) / seconds(plain) for _ in range(pairs)) - 1

    def idle_share(self) -> float:
        """Share of a run, from its first kernel to its last, in which the GPU did nothing."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.ours(self.engine.graphs)
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        busy, end = 0.0, spans[0][0]
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return 1 - busy / (end - spans[0][0])


def sampling_config(**settings) -> GenerationConfig:
    """Sampling at T = 1 of ``NEW_TOKENS`` tokens; these configurations name no token that ends."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=0,
        **settings,
    )  # fmt: skip


def attempt(function: Callable[[], None]) -> float | str:
    """Seconds, or what kept it from running."""
    try:
        return seconds(function)
    except Exception as error:  # a peer that can't is a result, too
        torch.cuda.empty_cache()
        return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"


def report(name: str, args: argparse.Namespace, bandwidth: float, rate: float) -> None:
    """The table of one shape."""
    model = build(name, DTYPES[args.dtype])
    work = Workload(model, args.contexts)
    contenders: dict[str, Callable[[], None]] = {
        OURS: lambda: work.ours(work.engine.graphs),
        "the same without graphs": lambda: work.ours(False),
        "generate, dynamic cache, hidden states and scores": lambda: work.generate(
            return_dict_in_generate=True, output_hidden_states=True, output_scores=True
        ),
        "generate, static cache, compiled": lambda: work.generate(cache_implementation="static"),
        "transformers' continuous batching": work.continuous,
    }
    taken: dict[str, list[float | str]] = {label: [] for label in contenders}
    for label, run in contenders.items():
        if isinstance(problem := attempt(run), str):  # a warm-up
            taken[label].append(problem)
    for _ in range(args.rounds):
        for label, run in contenders.items():
            if not any(isinstance(t, str) for t in taken[label]):
                taken[label].append(attempt(run))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"\n### {name}: {millions:.0f} M weights, {args.dtype}, engine: {work.engine}\n")
    print("| | s | tokens/s | ratio of ours to it (min … max over rounds) |\n|---|---|---|---|")
    mine, tokens = taken[OURS], len(work.rows) * NEW_TOKENS
    for label, times in taken.items():
        if problems := [t for t in times if isinstance(t, str)]:
            print(f"| {label} | {problems[0]} | | |")
            continue
        row, ratios = statistics.median(times), "no figure of ours"
        if not any(isinstance(t, str) for t in mine):
            each = [theirs / ours for theirs, ours in zip(times, mine, strict=True)]
            ratios = f"{statistics.median(each):.2f} ({min(each):.2f} … {max(each):.2f})"
        print(f"| {label} | {row:.2f} | {tokens / row:.0f} | {ratios} |")
    if any(isinstance(t, str) for t in mine):
        return
    by_bytes, by_operations = work.least_seconds(bandwidth, rate)
    share = max(by_bytes, by_operations) / statistics.median(mine)
    print(
        f"\nBytes alone would take {by_bytes:.2f} s and operations {by_operations:.2f} s: "
        f"{share:.0%} of the larger is reached.\n"
        f"Capture adds {work.capture_cost():+.1%} to a plain prefill; "
        f"the GPU is idle for {work.idle_share():.1%} of a run."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3, help="of every contender (default: 3)")
    parser.add_argument("--contexts", type=int, default=CONTEXTS, help="default: %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks.sampling_cuda needs a CUDA device, and there is none: nothing measured"
        )
    torch.set_float32_matmul_precision("highest")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(
        f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; "
        f"{args.contexts} contexts of {CONTEXT_TOKENS} tokens x {ROWS} rows x {NEW_TOKENS} tokens; "
        f"{args.rounds} rounds, medians. Copies reach {bandwidth / 1e12:.2f} TB/s, bfloat16 "
        f"products {rate / 1e12:.0f} TFLOP/s."
    )
    for name in args.models:
        report(name, args, bandwidth, rate)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
