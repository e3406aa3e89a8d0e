"""The Markdown of ``benchmarks.sampling``: pure functions of what was measured."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.sampling.results import FLOOR, OURS, Results, floor, gflops, ratios
from ia_mech.errors import UserError

OPENING, CLOSING = "<!-- benchmarks.sampling -->", "<!-- /benchmarks.sampling -->"
PEERS = {  # by the name that --peers takes: what tables call it, and the ratio that is wanted
    OURS: ("ia_mech, all layers at 5 positions", ""),
    "portable": ("the same, a copy of the prefix per row", ""),
    "generate": ("`generate`", "8"),
    "generate-captures": ("`generate` with hidden states and scores", "10"),
    "transformer-lens": ("TransformerLens `generate`", "20"),
    "llama.cpp": ("llama.cpp, 4-bit weights", "1.2 and 2"),
    FLOOR: ("the matrix products alone", "0.6 for all contexts"),
}


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """``median (min … max)``; the median alone if there is one value."""
    middle = format(statistics.median(values), form)
    if len(values) == 1:
        return middle
    return f"{middle} ({format(min(values), form)} … {format(max(values), form)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def peers_table(results: Results, wanted: bool = True) -> str:
    """Tokens per second of every contender, and ours over it."""
    counts, body = (1, results.contexts), []
    for peer, (name, aim) in PEERS.items():
        cells = []
        for contexts in counts:
            taken = results.seconds(peer, contexts)
            if taken is None:
                cells += ["", ""]
                continue
            tokens = contexts * results.rows * results.new_tokens
            cells.append(f"{tokens / statistics.median(taken):.0f}")
            ours = results.seconds(OURS, contexts)
            cells.append("" if peer == OURS else spread(ratios(taken, ours)))
        if any(cells):
            body.append([name, *([aim] if wanted else []), *cells])
    head = ["", *(["wanted"] if wanted else [])]
    for contexts in counts:
        head += [f"tokens/s, {contexts * results.rows} rows", "ours ÷ it"]
    return table(head, body)


def products_table(results: Results) -> str:
    """GFLOP/s of a decoding step's products, by shape and way of computing."""
    steps = [p for p in results.products if p.part == "step"]
    columns = list(dict.fromkeys((p.rows, way) for p in steps for way in p.seconds))
    body = []
    for shape in [*dict.fromkeys(tuple(p.shape) for p in steps), None]:  # None: all together
        of = [p for p in steps if shape in (None, tuple(p.shape))]
        name = "all" if shape is None else f"{shape[0]} × {shape[1]}"
        count = sum(p.count for p in of if p.rows == columns[0][0])
        rates = [gflops([p for p in of if p.rows == rows], way) for rows, way in columns]
        body.append([name, str(count), *(f"{rate:.0f}" for rate in rates)])
    return table(["weights", "of them", *(f"{rows} rows, {way}" for rows, way in columns)], body)


def floor_line(results: Results) -> str:
    """What the floor is made of."""
    told = []
    for contexts in (1, results.contexts):
        parts = (floor(results, contexts, parts) for parts in (("prefill", "head"), ("step",)))
        prefill, steps = (statistics.median(seconds) for seconds in parts)
        rows = contexts * results.rows
        told.append(f"{prefill:.2f} s of prefill and {steps:.2f} s of steps for {rows} rows")
    return f"The floor is {', '.join(told)}."


def growth_table(results: Results) -> str:
    """Seconds as rows, new tokens or the prefix grow, and their ratio to the workload's."""
    base, body = results.growth[0], []
    for point in results.growth:
        whole = [sum(both) for both in zip(point.prefill, point.decode, strict=True)]
        base_whole = [sum(both) for both in zip(base.prefill, base.decode, strict=True)]
        steps = point.new_tokens - 1
        linear = point.rows / base.rows * steps / (base.new_tokens - 1)
        body.append(
            [
                *(str(n) for n in (point.rows, point.new_tokens, point.prefix)),
                f"{statistics.median(point.prefill):.2f}",
                f"{statistics.median(point.decode):.2f}",
                f"{statistics.median(point.decode) / steps * 1000:.0f}",
                spread(ratios(point.decode, base.decode)),
                f"{linear:.2f}",
                spread(ratios(whole, base_whole)),
            ]
        )
    head = ["rows", "new tokens", "context", "prefill, s", "decoding, s", "a step, ms"]
    head += ["decoding ÷ the workload's", "if linear", "both ÷ the workload's"]
    return table(head, body)


def memory_table(results: Results) -> str:
    """Keys and values expected and found, in MB."""
    body = []
    for held in results.memory:
        cells = [f"{held.expected / 1e6:.0f}"]
        for found in (held.caches, held.peak):
            known = found is not None
            cells += [f"{found / 1e6:.0f}" if known else "unknown"]
            cells += [f"{found / held.expected - 1:+.0%}" if known else ""]
        rows = f"{held.contexts * results.rows} rows of {_contexts(held.contexts)}"
        body.append([rows + ("" if held.shared else ", a copy of the prefix per row"), *cells])
    head = ["", "prefixes once + own tokens, MB", "in the caches, MB", "more"]
    head += ["the process grew by, MB", "more"]
    return table(head, body)


def compared_table(results: Results) -> str:
    """Rows that two computations write differently, and how narrow each decision was."""
    body = []
    for one in results.compared:
        margins = ", ".join(f"{margin:.1e}" for margin in sorted(one.margins, reverse=True))
        body.append([one.what, str(one.rows), str(len(one.margins)), margins])
    return table(["", "rows", "that differ", "margins where they first do"], body)


def capture_line(results: Results) -> str:
    extra = [ratio - 1 for ratio in ratios(results.captured, results.plain)]
    return (
        f"Capturing all layers at 5 positions adds {spread(extra, '+.1%')} to a plain prefill "
        f"({statistics.median(results.plain) * 1000:.0f} ms)."
    )


def short(results: Results) -> str:
    """For the README: who is how fast, and what capture costs."""
    rounds = f"{results.rounds} rounds" if results.rounds > 1 else "one round"
    return "\n\n".join(
        [
            f"Measured on {results.setting}: a context of {results.context_tokens} tokens, "
            f"{results.rows} rows of {results.new_tokens} new tokens each; and "
            f"{results.contexts} such contexts together. Median of {rounds} (min … max):",
            peers_table(results, wanted=False),
            capture_line(results),
        ]
    )


def full(results: Results) -> str:
    """For benchmarks/README.md: every table."""
    several = _contexts(results.contexts)
    rounds = f"{results.rounds} rounds" if results.rounds > 1 else "one round"
    parts = [
        f"Measured on {results.setting}; {rounds}, medians (min … max over rounds).",
        f"**Peers.** {results.context_tokens} tokens of context, {results.rows} rows, "
        f"{results.new_tokens} new tokens each; and {several}, {results.contexts * results.rows} "
        "rows. `generate` and TransformerLens are called once per context, which takes as many "
        "times as long. Wanted: the least that ours ÷ it should be; for llama.cpp 1.2 with one "
        "context and 2 with all.",
        peers_table(results),
    ]
    parts += [f"Not measured: {PEERS[p][0]}: {why}." for p, why in results.missing.items()]
    parts.append(f"{capture_line(results)} Wanted: at most 2%.")
    if results.products:
        parts += [
            "**Matrix products** of one decoding step, GFLOP/s. Each weight is multiplied once, in "
            "the model's order, so that none waits in the cache. The floor among the peers is made "
            f"of these, {results.new_tokens - 1} times, and of the prefill's, the unembedding at "
            "the last token only; for each shape the faster way. Attention, norms and sampling are "
            "not in it.",
            products_table(results),
            floor_line(results),
        ]
    parts += [
        "**Growth**, one context. Wanted: linear in rows and new tokens, and at most 1.15 for a "
        "doubled context. The prefill predicts the first new token, so n of them are n - 1 steps.",
        growth_table(results),
        "**Memory** for keys and values. Wanted: at most 20% more than every prefix once and every "
        "row's own tokens. In the caches: the distinct storages that the prefilled and the "
        "expanded state reach. The process: the peak of its resident memory in a prefill and the "
        "decoding after it, less what it held before; the logits and all else that is alive for a "
        "moment are in it.",
        memory_table(results),
        "**Rows that differ** between computations that round differently. Wanted: only where the "
        "margin (by how much the chosen token won) is below 1e-4.",
        compared_table(results),
    ]
    return "\n\n".join(parts)


def between_markers(
    document: str, text: str, opening: str = OPENING, closing: str = CLOSING
) -> str:
    """The document with ``text`` in place of what stands between its two markers.

    Raises:
        UserError: it doesn't have each marker once, in order.
    """
    head, _, rest = document.partition(opening)
    _, _, tail = rest.partition(closing)
    once = document.count(opening) == document.count(closing) == rest.count(closing) == 1
    if not once:
        raise UserError(
            "a README lacks one of the two markers, or has it twice",
            f"put {opening} and {closing} where the tables belong",
        )
    return f"{head}{opening}\n\n{text.strip()}\n\n{closing}{tail}"


def _contexts(count: int) -> str:
    return f"{count} contexts" if count > 1 else "1 context"
