"""How much disk, memory and time a run takes, and what ``--dry-run`` says."""

import shutil
from pathlib import Path
from typing import Any

import torch

from ia_mech.collect.compute import DRAWS
from ia_mech.collect.memory import Memory
from ia_mech.collect.parts import Parts
from ia_mech.collect.plan import Plan
from ia_mech.engine.memory import Footprint
from ia_mech.engine.workers import usable_cores
from ia_mech.errors import UserError
from ia_mech.models.load import resolve_dtype, stored_dtype, text_config
from ia_mech.run import Run, layout
from ia_mech.settings import Shard

# Operations of matrix products a second, and bytes read a second: of one CPU core, as measured
# (AVX-512, 96 rows), and of a GPU, as estimated.
OPERATIONS = {"cpu": 4e10, "cuda": 2e14}
BANDWIDTH = {"cpu": 1.4e10, "cuda": 2e12}


def run_bytes(plan: Plan, parts: Parts, itemsize: int) -> int:
    """About how many bytes are written of these parts, by a model with so many bytes a number."""
    text, settings = text_config(plan.config), plan.settings
    states = len(plan.positions) * (text.num_hidden_layers + 1) * text.hidden_size
    logits = 2 * text.vocab_size if settings.header_logits == "full" else 0
    # A generation: id, log-probability, rank and margin of four bytes each per token, and its text.
    turns = len(settings.rows()) * (settings.max_new_tokens * 20 + 100)
    scores = 600  # a log-probability per temperature, and what columns cost
    each = states * itemsize + logits + turns + scores
    tokens = sum(plan.contexts[order].tokens for order in parts.orders)
    files = len(parts.contexts) * (22_000 + 400 * text.num_hidden_layers)  # without content
    return len(parts.orders) * each + 10 * tokens + files


def check_disk(needed: int, out: Path) -> None:
    """Refuse a new run that the disk has not enough space for.

    Raises:
        UserError: says how much is needed and how much is free.
    """
    free = shutil.disk_usage(next(p for p in out.absolute().parents if p.exists())).free
    if needed > free and not (out / layout.RUN).is_file():
        raise UserError(
            f"the run needs about {size_text(needed)}, {out.parent} has {size_text(free)} free",
            "free some space, lower --limit, name fewer --positions, or use --header-logits none",
        )


def plan_lines(plan: Plan, shard: Shard) -> dict[str, str]:
    """What a shard of a plan would do and write: lines by their name."""
    settings, parts = plan.settings, plan.parts.of_shard(shard)
    text, dtype = text_config(plan.config), resolve_dtype(settings.dtype, plan.device)
    dtype = stored_dtype(plan.config) if isinstance(dtype, str) else dtype
    mine = [plan.contexts[order] for order in parts.orders]
    each, contexts = len(settings.rows()), len(mine)
    read, longest = sum(one.tokens for one in mine), max((one.tokens for one in mine), default=0)
    writing = sum(bool(one.prompt) for one in mine)
    draws = DRAWS if settings.wants_finished else 1
    redrawn = f" (up to {draws * writing} tries, until enough are finished and differ)"
    rows = [each * len(part) for part in parts.contexts.values()]
    rows += [sum(bool(plan.contexts[i].prompt) for i in one) for one in parts.responses.values()]
    lens = size_text((text.vocab_size + 2) * text.hidden_size * dtype.itemsize)
    written = size_text(run_bytes(plan, parts, dtype.itemsize))
    return {
        "model": settings.model + random_blocks_text(settings.random_blocks),
        "conversations": f"{settings.dataset}: {plan.data.rows}",
        **({"what was read": plan.data.text} if plan.data.text else {}),
        "contexts": str(contexts),
        "responses to generate": str(writing) + (redrawn if writing and draws > 1 else ""),
        "user header": repr(plan.chat.header_text),
        "positions kept": ", ".join(plan.positions),
        "context tokens": f"{read} (longest {longest})",
        "user turns": f"{each * contexts} x at most {settings.max_new_tokens} tokens",
        "parts": f"{len(rows)}, of at most {max(rows, default=0)} turns; a stop costs those begun",
        "time": time_text(_seconds(plan, parts, dtype, read, writing)),
        "bytes to be written": f"{written}, to {plan.out}",
        **_there(plan),
        "once for this model": f"{lens}, its final norm and unembedding, if not kept yet",
    }


def _there(plan: Plan) -> dict[str, str]:
    """What is there already of the run that the command would go on with. It says how much memory a
    part takes, too: that is measured with the weights."""
    kept, memory = "nothing", "known once the run has begun: it is measured with the weights"
    if (plan.out / layout.RUN).is_file():
        run = Run.open(plan.out, unfinished=True)
        counts = ", ".join(f"{count} {kind}" for kind, count in run.counts.items())
        kept = f"{counts}; all above is of the whole run"
        if run.complete:
            kept = "all of it: nothing would be computed again"
        size = Footprint.read(run.record["footprint"])
        part = size_text(Memory(plan, size, run.record["part_room"]).part_bytes)
        memory = f"{size_text(size.weights)} for weights, at most {part} for each part in work"
    return {"of this already there": kept, "memory": memory}


def _seconds(plan: Plan, parts: Parts, dtype: torch.dtype, read: int, written: int) -> float:
    """About how long contexts of so many tokens take, with so many responses, none of which ends
    before its limit."""
    settings, pace = plan.settings, Pace(plan.config, dtype, plan.device)
    rows, count, steps = len(settings.rows()), len(parts.contexts), settings.max_new_tokens
    batches, many = count * -(-rows // plan.batch_rows), settings.max_response_tokens
    return (
        pace.seconds(rows * len(parts.orders) * steps, batches * steps)
        + pace.seconds(written * many, len(parts.responses) * many)
        + pace.seconds(read, count)
    )


class Pace:
    """About how fast a model computes on a device, by its configuration and the usual speed.

    A block has some 12 d² weights that a token passes (attention 4, feed-forward 8; of experts,
    those that are chosen), and the unembedding one row per token of the vocabulary.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        text, self.device = text_config(config), device.type
        d = text.hidden_size
        self.weights = d * (12 * d * text.num_hidden_layers + text.vocab_size)
        self.bytes = self.weights * dtype.itemsize

    def seconds(self, tokens: int, passes: int) -> float:
        """How long so many tokens take in so many passes that read all weights."""
        cores = usable_cores() if self.device == "cpu" else 1
        reading = passes * self.bytes / BANDWIDTH[self.device]
        return max(reading, 2 * self.weights * tokens / (OPERATIONS[self.device] * cores))


def size_text(count: int) -> str:
    """A number of bytes, with its unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def time_text(seconds: float) -> str:
    """About how long something takes."""
    return f"about {duration(seconds)} on an idle machine, by the usual speed of such a device"


def duration(seconds: float) -> str:
    """How long something takes, in minutes or hours."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.2g} hours"


def random_blocks_text(seed: int | None) -> str:
    """What to say after a model's name if its blocks are random."""
    return "" if seed is None else f" with random blocks (seed {seed}) over its trained embeddings"
