"""Tokens per second of the sampling loop against ``generate``, and what capture costs.

    python -m benchmarks.sampling                 about five minutes on two cores
    python -m benchmarks.sampling --rounds 1      a quick look

One workload, one process, the same model object: a context of 231 tokens, greedy + 4 temperatures
x 8 samples = 33 rows, 48 new tokens each, nothing stops early. ``generate`` can't mix temperatures,
so it gets the easier job of 33 rows at T = 1 in a single call. Ours runs with the shared prefix and
with a copy per row; and both decode four such contexts, 132 rows, together. The contenders take
turns, round by round, and ratios are taken within a round, so that a machine that changes pace
doesn't favour one. Prints Markdown.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import transformers
from transformers import GenerationConfig

from ia_mech.chat import ChatFormat
from ia_mech.conversations import open_conversations
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.loop import Row, decode
from ia_mech.engine.prefix import Prefix, prefill
from ia_mech.formats import ColumnMap
from ia_mech.models import ModelSpec, load
from ia_mech.sampling import stream_key

OURS = "ia_mech, all layers at 7 positions"
TEMPERATURES, SAMPLES, NEW_TOKENS, CONTEXT_TOKENS = (0.5, 0.7, 1.0, 1.3), 8, 48, 231


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def context_ids(subject) -> list[int]:
    """The last 231 tokens of a real chat context, its user header included."""
    chat = ChatFormat(subject.tokenizer)
    source = open_conversations(
        "builtin", limit=None, columns=ColumnMap(), split=None, subset=None, revision=None
    )
    contexts = (chat.context(c.messages).ids for c in source)
    return next(ids for ids in contexts if len(ids) >= CONTEXT_TOKENS)[-CONTEXT_TOKENS:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of every contender (default: 3)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    args = parser.parse_args()
    subject = load(ModelSpec(device=args.device, dtype=args.dtype))
    model, blocks, ids = subject.model, find_blocks(subject.model), context_ids(subject)
    last = len(ids) - 1
    rows = [Row(0, 0.0, (0, 0))] + [
        Row(0, t, stream_key(0, "benchmark", s)) for t in TEMPERATURES for s in range(SAMPLES)
    ]
    batch = torch.tensor([ids] * len(rows), device=model.device)

    def ours(contexts: int = 1, share: bool = True) -> None:
        prefixes = [Prefix(ids, range(last - 6, last + 1))] * contexts
        mine = [replace(row, context=c) for c in range(contexts) for row in rows]
        prefilled = prefill(model, prefixes, blocks)
        decode(model, prefilled, mine, [], NEW_TOKENS, share=share)

    def generate(**outputs) -> None:
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            return_dict_in_generate=bool(outputs),
            **outputs,
        )
        model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)

    contenders = {
        OURS: ours,
        "the same, a copy of the prefix per row": lambda: ours(share=False),
        "generate": generate,
        "generate, output_hidden_states and output_scores": lambda: generate(
            output_hidden_states=True, output_scores=True
        ),
        OURS + ", 4 contexts": lambda: ours(4),
        "the same, a copy of the prefix per row, 4 contexts": lambda: ours(4, share=False),
    }
    for warm_up in contenders.values():
        warm_up()
    seconds = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, run in contenders.items():
            seconds[name].append(timed(run))

    plain, captured = [], []
    for _ in range(20):
        plain.append(timed(lambda: prefill(model, [Prefix(ids)])))
        captured.append(
            timed(lambda: prefill(model, [Prefix(ids, range(last - 6, last + 1))], blocks))
        )
    extra = statistics.median(c / p for c, p in zip(captured, plain, strict=True)) - 1

    tokens = len(rows) * NEW_TOKENS
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, {subject.describe()['dtype']} on {model.device.type}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; "
        f"{args.rounds} rounds, medians.\n"
    )
    print("| | tokens/s | ratio of ours to it (min … max over rounds) |")
    print("|---|---|---|")
    for name, taken in seconds.items():
        contexts = 4 if name.endswith("4 contexts") else 1
        base = seconds[OURS + ", 4 contexts" if contexts == 4 else OURS]
        ratios = [other / mine for other, mine in zip(taken, base, strict=True)]
        print(
            f"| {name} | {contexts * tokens / statistics.median(taken):.0f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) |"
        )
    print(
        f"\nCapturing all layers at 7 positions adds {extra:+.1%} to a plain prefill "
        f"({statistics.median(plain) * 1000:.0f} ms; median of 20 pairs)."
    )


if __name__ == "__main__":
    main()
