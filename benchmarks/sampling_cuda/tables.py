"""The Markdown of ``benchmarks.sampling_cuda``: pure functions of what was measured."""

import statistics
from collections.abc import Sequence
from itertools import chain

from benchmarks.sampling.tables import spread, table
from benchmarks.sampling_cuda.floor import Least
from benchmarks.sampling_cuda.results import (
    CAPTURE,
    CEILINGS,
    NO_MODEL,
    OURS,
    PROFILE,
    Measured,
    Results,
    ratio,
)

NAME = "benchmarks.sampling_cuda"
OPENING, CLOSING = f"<!-- {NAME} -->", f"<!-- /{NAME} -->"
TIMED = {  # by the name that --contenders takes: what tables call it, and the ratio that is wanted
    OURS: ("ia_mech, all layers at 5 positions", ""),
    "ours-no-graphs": ("the same without CUDA graphs", ""),
    "generate-captures": ("`generate` with hidden states and scores", "8"),
    "generate": ("`generate`", ""),
    "static": ("`generate`, static cache, compiled", "4"),
    "continuous": ("`transformers`' continuous batching", "3"),
}
FLOOR_WANTED, CAPTURE_WANTED, IDLE_WANTED = "60%", "2%", "5%"


def full(results: Results) -> str:
    """Everything, for benchmarks/README.md."""
    parts = [opening(results), ceilings_line(results)]
    for model in results.models:
        parts += [f"### {model}", timed_table(results, model), floor_line(results, model)]
        parts += [capture_line(results, model), profile_text(results, model)]
    return "\n\n".join(parts)


def opening(results: Results) -> str:
    """The setting, and how ratios are made."""
    s = results.setting
    rounds = max((len(one.values) for one in results.measured.values()), default=0)
    cards = {state["uuid"] for one in results.measured.values() for state in one.gpu if state}
    several = f" **On {len(cards)} GPUs of this kind**, which may differ." if len(cards) > 1 else ""
    return (
        f"Measured on {s.device}, driver {s.driver}, torch {s.torch}, transformers "
        f"{s.transformers} (packages with kernels for it: {s.besides}), {s.dtype}, "
        f"{' and '.join(results.days)}: {s.contexts} contexts of "
        f"{s.context_tokens} tokens x {s.rows} rows x {s.new_tokens} tokens; up to {rounds} "
        f"rounds.{several} Contenders ran one after the other in processes of their own, so a "
        "ratio is the median of theirs over the median of ours, with the least and the most of "
        "all pairs of rounds. The clock and the temperature before each round show whether the "
        "GPU changed its pace meanwhile."
    )


def ceilings_line(results: Results) -> str:
    found = results.of(NO_MODEL, CEILINGS)
    if not found.values:
        return f"The device's ceilings: {unmeasured(found)}."
    bandwidth, rate = (found.take(name)[-1] for name in ("bandwidth", "rate"))
    return (
        f"Copies reach {bandwidth / 1e12:.3g} TB/s, {results.setting.dtype} products "
        f"{rate / 1e12:.3g} TFLOP/s."
    )


def timed_table(results: Results, model: str) -> str:
    """Seconds and tokens per second of the whole job, and ours over it."""
    body = []
    for name, (label, wanted) in TIMED.items():
        one = results.of(model, name)
        body.append([label, wanted, *_cells(results, model, name), _how(one), _pace(one)])
    head = ["", "wanted", "s", "tokens/s", "ours ÷ it", "engine", "MHz, °C"]
    return table(head, body)


def _cells(results: Results, model: str, name: str) -> list[str]:
    one, ours = results.of(model, name), results.of(model, OURS)
    if not one.values:
        return ["", "", ""]
    seconds = one.take("seconds")
    compared = ""
    if name != OURS and ours.values:
        compared = "{:.2f} ({:.2f} … {:.2f})".format(*ratio(seconds, ours.take("seconds")))
    per_second = results.setting.tokens / statistics.median(seconds)
    return [spread(seconds, ".3g"), f"{per_second:.0f}", compared]


def _how(one: Measured) -> str:
    """How it ran, and what kept it from running as it should."""
    told = [one.notes["engine"]] if "engine" in one.notes else []
    if "together" in one.notes:
        together = one.notes["together"]
        tried = ", ".join(one.notes["tried"])
        told.append(f"{together} contexts a call" + (f" ({tried} don't fit)" if tried else ""))
    if one.cut:
        told.append(f"measured once, after {one.cut}")
    if one.failed or not one.values:
        told.append(unmeasured(one))
    return _cell("; ".join(told))


def unmeasured(one: Measured) -> str:
    """Why there is no figure, or not all of them."""
    if not one.failed:
        return "not measured yet"
    return f"{'stopped' if one.values else 'not measured'} ({one.failed})"


def _pace(one: Measured) -> str:
    """Clock and temperature before the rounds, as least to most."""
    told = []
    for name in ("sm_mhz", "celsius"):
        known = [state[name] for state in one.gpu if state and state[name] is not None]
        if known:
            low, high = (f"{value:.0f}" for value in (min(known), max(known)))
            told.append(low if low == high else f"{low} to {high}")
    return ", ".join(told)


def floor_line(results: Results, model: str) -> str:
    """Decoding alone, and what of the device it reaches."""
    ours, ceilings = results.of(model, OURS), results.of(NO_MODEL, CEILINGS)
    if not ours.values:
        return f"Decoding alone: {unmeasured(ours)}."
    decode = ours.take("decode")
    # The prefill predicts the first tokens, but they are drawn in the time measured here.
    per_second = results.setting.tokens / statistics.median(decode)
    told = f"Decoding alone, of prefilled contexts: {spread(decode, '.3g')} s, "
    told += f"{per_second:.0f} tokens/s. "
    if not ceilings.values:
        return f"{told}What of the device that is: the ceilings are {unmeasured(ceilings)}."
    ceiling = (ceilings.take(name)[-1] for name in ("bandwidth", "rate"))
    least = Least(ours.notes["least_bytes"], ours.notes["least_operations"])
    by_bytes, by_operations = least.seconds(*ceiling)
    shares = [max(by_bytes, by_operations) / seconds for seconds in decode]
    return (
        f"{told}Its bytes alone would take {by_bytes:.3g} s and its operations "
        f"{by_operations:.3g} s: {spread(shares, '.0%')} of the larger is reached. Wanted: "
        f"{FLOOR_WANTED}."
    )


def capture_line(results: Results, model: str) -> str:
    """What capture adds to a prefill; a ratio of neighbours, which took turns."""
    one = results.of(model, CAPTURE)
    if not one.values:
        return f"Capturing all layers at 5 positions: {unmeasured(one)}."
    plain, captured = (list(chain(*one.take(name))) for name in ("plain", "captured"))
    extra = [more / less - 1 for less, more in zip(plain, captured, strict=True)]
    return (
        f"Capturing all layers at 5 positions adds {spread(extra, '+.1%')} to a plain prefill "
        f"({statistics.median(plain) * 1000:.0f} ms). Wanted: at most {CAPTURE_WANTED}."
    )


def profile_text(results: Results, model: str) -> str:
    """The GPU's idle share, and what the time goes into."""
    one = results.of(model, PROFILE)
    if not one.values:
        return f"The GPU's idle share: {unmeasured(one)}."
    found = one.values[-1]
    line = (
        f"The GPU is idle for {found['idle']:.1%} of a run ({found['span']:.3g} s from its first "
        f"kernel to its last, under the profiler; copies from and to the host are no work). "
        f"Wanted: at most {IDLE_WANTED}. The most expensive kernels:"
    )
    return f"{line}\n\n{kernels_table(found['kernels'], found['busy'])}"


def kernels_table(kernels: Sequence[dict], busy: float) -> str:
    """Kernels by total time, with their share of the time in which anything ran."""
    body = [
        [
            f"`{_cell(kernel['name'].replace('`', ' '))}`",
            str(kernel["count"]),
            f"{kernel['seconds']:.3g}",
            f"{kernel['seconds'] / busy:.1%}",
        ]
        for kernel in kernels
    ]
    return table(["kernel", "times", "s", "of the busy time"], body)


def _cell(text: str) -> str:
    """Text that doesn't end a cell."""
    return " ".join(text.replace("|", "\\|").split())
