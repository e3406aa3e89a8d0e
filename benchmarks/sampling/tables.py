"""The Markdown of ``benchmarks.sampling``: pure functions of what was measured."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.sampling.results import FLOOR, OURS, Results, gflops
from ia_mech.errors import UserError

# Contender → its name in tables, and the wanted ratio on a CPU and on a GPU.
PEERS = {
    OURS: ("ia_mech, all layers at 5 positions", "", ""),
    "copies": ("the same, a copy of the prefix per row", "", ""),
    "generate": ("`generate`", "8", ""),
    "generate-captures": ("`generate` with hidden states and scores", "10", "8"),
    "static": ("`generate`, static cache, compiled", "", "4"),
    "continuous": ("`transformers`' continuous batching", "", "3"),
    "transformer-lens": ("TransformerLens `generate`", "20", ""),
    FLOOR: ("the matrix products alone", "0.6 for all contexts", ""),
}


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """``median (min … max)``; the median alone if there is one value."""
    middle = format(median(values), form)
    if len(values) == 1:
        return middle
    return f"{middle} ({format(min(values), form)} … {format(max(values), form)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(text: str) -> str:
    """Text that doesn't end a cell."""
    return " ".join(text.replace("|", "\\|").split())


def full(results: Results) -> str:
    """Every table."""
    setting = f"{results.setting}, {' and '.join(results.days)}"
    parts = [f"Measured on {setting}; {rounds(results)}, medians (min … max over rounds)."]
    if results.on_gpu:
        parts.append(
            "Peers ran one after the other in processes of their own, so a ratio is the median of "
            "all pairs of rounds."
        )
    for model in results.sizes:
        parts += [f"### {model}"] if results.on_gpu or len(results.sizes) > 1 else []
        parts += of_model(results, model)
    return "\n\n".join(parts)


def rounds(results: Results) -> str:
    keys = [(r["model"], r["contender"], r["contexts"]) for r in results.records if "values" in r]
    most = max(map(keys.count, keys), default=0)
    return "one round" if most == 1 else f"{most} rounds"


def of_model(results: Results, model: str) -> list[str]:
    """Paragraphs and tables."""
    size = results.sizes[model]
    jobs = "; and ".join(f"{counted(count)}, {count * size.rows} rows" for count in size.counts)
    text = (
        f"**Peers.** {jobs}; {size.context_tokens} tokens of context, {size.new_tokens} new tokens "
        "each. Wanted: the least that ours ÷ it should be"
    )
    if not results.on_gpu:
        text += (
            ". `generate` and TransformerLens are called once per context, which takes as many "
            "times as long"
        )
    parts = [f"{text}.", peers_table(results, model)]
    failures = {
        f"Not measured, or not to the end: {one['contender']}: {one['failed']}."
        for one in results.records
        if one["model"] == model and "failed" in one
    }
    parts += sorted(failures)
    parts += [f"{line} Wanted: at most 2%." for line in capture_line(results, model)]
    parts += decoding_lines(results, model)
    if not results.products(model).empty:
        parts += [
            "**Matrix products** of one decoding step, GFLOP/s. Each weight is multiplied once, in "
            "the model's order, so that none waits in the cache. The floor among the peers is made "
            f"of these, {size.new_tokens - 1} times, and of the prefill's, the unembedding at the "
            "last token only; for each shape the faster way. Attention, norms and sampling are not "
            "in it.",
            products_table(results, model),
            floor_line(results, model),
        ]
    parts += steps_lines(results, model)
    if compared := results.values(model, "differing"):
        parts += [
            "**Rows that differ** between computations that round differently. Wanted: only where "
            "the margin (by how much the chosen token won) is below 1e-4.",
            differing_table(compared[-1]["compared"]),
        ]
    return parts


def peers_table(results: Results, model: str) -> str:
    """Tokens per second of every contender, and our ratio to it; on a GPU also how it ran."""
    size, body = results.sizes[model], []
    for name, (label, *aims) in PEERS.items():
        cells = []
        for contexts in size.counts:
            taken, ours = (results.seconds(model, one, contexts) for one in (name, OURS))
            tokens = contexts * size.rows * size.new_tokens
            cells.append(f"{tokens / median(taken):.0f}" if taken else "")
            ratios = results.ratios(taken, ours) if name != OURS else []
            cells.append(spread(ratios) if ratios else "")
        if any(cells):
            notes = [cell(one["notes"]) for one in results.records_of(model, name)[-1:]]
            body.append([label, aims[results.on_gpu], *cells, *(notes if results.on_gpu else [])])
    head = ["", "wanted"]
    for contexts in size.counts:
        head += [f"tokens/s, {contexts * size.rows} rows", "ours ÷ it"]
    return table([*head, *(["engine"] if results.on_gpu else [])], body)


def capture_line(results: Results, model: str) -> list[str]:
    """What capture adds to a prefill, if it was measured."""
    found = results.values(model, "capture")
    if not found:
        return []
    plain, captured = ([median(one[name]) for one in found] for name in ("plain", "captured"))
    extra = [more / less - 1 for less, more in zip(plain, captured, strict=True)]
    return [
        f"Capturing all layers at 5 positions adds {spread(extra, '+.1%')} to a plain prefill "
        f"({median(plain) * 1000:.0f} ms)."
    ]


def decoding_lines(results: Results, model: str) -> list[str]:
    """Decoding alone and what of the device it reaches, if they were measured."""
    size, found = results.sizes[model], results.values(model, "decode")
    if not found:
        return []
    taken = [values["seconds"] for values in found]
    # The prefill predicts the first tokens, but they are drawn in the time measured here.
    rate = size.counts[-1] * size.rows * size.new_tokens / median(taken)
    text = f"Decoding alone, of prefilled contexts: {spread(taken, '.3g')} s, {rate:.0f} tokens/s."
    for ceilings in results.values(model, "ceilings")[-1:]:
        by_bytes = found[-1]["least_bytes"] / ceilings["bandwidth"]
        by_operations = found[-1]["least_operations"] / ceilings["rate"]
        shares = [max(by_bytes, by_operations) / seconds for seconds in taken]
        text += (
            f" Copies reach {ceilings['bandwidth'] / 1e12:.3g} TB/s and matrix products "
            f"{ceilings['rate'] / 1e12:.3g} TFLOP/s: its bytes alone would take {by_bytes:.3g} s, "
            f"its operations {by_operations:.3g} s, and {spread(shares, '.0%')} of the larger is "
            "reached. Wanted: 60%."
        )
    return [text]


def products_table(results: Results, model: str) -> str:
    """GFLOP/s of a decoding step's products, by shape and way of computing."""
    steps = results.products(model).query("part == 'step'")
    ways = [way for _, way in steps.groupby(["rows", "way"], sort=False)]
    body = []
    for shape in [*steps.groupby(["out", "in"], sort=False).groups, None]:  # None: all together
        by_way = [
            way if shape is None else way[(way["out"] == shape[0]) & (way["in"] == shape[1])]
            for way in ways
        ]
        name = "all" if shape is None else f"{shape[0]} × {shape[1]}"
        count = by_way[0][by_way[0]["round"] == 0]["count"].sum()
        body.append([name, str(count), *(f"{gflops(one):.0f}" for one in by_way)])
    head = [f"{way['rows'].iloc[0]} rows, {way['way'].iloc[0]}" for way in ways]
    return table(["weights", "of them", *head], body)


def floor_line(results: Results, model: str) -> str:
    """What the lower bound is made of."""
    size, parts = results.sizes[model], []
    for contexts in size.counts:
        prefill = median(results.floor(model, contexts, ("prefill", "head")))
        steps = median(results.floor(model, contexts, ("step",)))
        rows = contexts * size.rows
        parts.append(f"{prefill:.2f} s of prefill and {steps:.2f} s of steps for {rows} rows")
    return f"The floor is {', '.join(parts)}."


def steps_lines(results: Results, model: str) -> list[str]:
    """What share of the fastest step its matrix products take, if that was measured."""
    found = []
    for contexts in results.sizes[model].counts:
        values = results.values(model, "steps", contexts)
        if values:
            step, products = (min(one[name] for one in values) for name in ("step", "products"))
            rows = contexts * results.sizes[model].rows
            found.append(
                f"{products / step:.2f} at {rows} rows ({products * 1000:.0f} of "
                f"{step * 1000:.0f} ms)"
            )
    if not found:
        return []
    return [
        "**Steps**, which take turns with their products in one process, both at their fastest: "
        f"the products' share is {', '.join(found)}. Wanted, at 33 and 132 rows: 0.50 and 0.60 "
        "with AVX-512, 0.60 and 0.75 with AVX2."
    ]


def differing_table(compared: Sequence[dict[str, Any]]) -> str:
    """Rows that two computations write differently, and how narrow each decision was."""
    body = []
    for one in compared:
        margins = ", ".join(f"{margin:.1e}" for margin in sorted(one["margins"], reverse=True))
        body.append([one["what"], str(one["rows"]), str(len(one["margins"])), margins])
    return table(["", "rows", "that differ", "margins where they first do"], body)


def counted(contexts: int) -> str:
    return f"{contexts} contexts" if contexts > 1 else "1 context"


def between_markers(document: str, text: str, marker: str) -> str:
    """The document with ``text`` in place of what stands between its two markers.

    Raises:
        UserError: it doesn't have each marker once, in order.
    """
    opening, closing = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, _, rest = document.partition(opening)
    _, _, tail = rest.partition(closing)
    if not document.count(opening) == document.count(closing) == rest.count(closing) == 1:
        raise UserError(
            "a README lacks one of the two markers, or has it twice",
            f"put {opening} and {closing} where the tables belong",
        )
    return f"{head}{opening}\n\n{text.strip()}\n\n{closing}{tail}"
