"""How much disk, memory and time a run takes, and what ``--dry-run`` says."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ia_mech.collect.compute import DRAWS
from ia_mech.collect.parts import Parts, part_room, plan_parts
from ia_mech.collect.survey import Survey, survey
from ia_mech.engine.memory import Footprint
from ia_mech.engine.workers import usable_cores
from ia_mech.errors import UserError
from ia_mech.models.load import resolve_device, resolve_dtype, stored_dtype, text_config
from ia_mech.run import Run, layout
from ia_mech.run.integrity import without_folders
from ia_mech.run.writer import refuse_another
from ia_mech.settings import Settings, Shard, flag_of

# Operations of matrix products a second, and bytes read a second: of one CPU core, as measured
# (AVX-512, 96 rows), and of a GPU, as estimated.
OPERATIONS = {"cpu": 4e10, "cuda": 2e14}
BANDWIDTH = {"cpu": 1.4e10, "cuda": 2e12}


def known_footprint(settings: Settings, dtype: torch.dtype, out: Path) -> Footprint | None:
    """What the model holds in memory, if a run in ``out`` or beside it has recorded that."""
    known = without_folders({"settings": settings.to_dict()})["settings"]
    for file in [out / layout.RUN, *sorted(out.parent.glob(f"*/{layout.RUN}"))]:
        try:
            record = json.loads(file.read_text())
            there = record["identity"]
            same = all(there["settings"][name] == known[name] for name in ("model", "revision"))
            if same and there["model"]["dtype"] == str(dtype).removeprefix("torch."):
                return Footprint.read(record["footprint"])
        except (OSError, ValueError, LookupError, TypeError):  # none, or not of this version
            continue
    return None


def run_bytes(settings: Settings, surveyed: Survey, parts: Parts, itemsize: int) -> int:
    """About how many bytes are written of these parts, by a model with so many bytes a number."""
    text = text_config(surveyed.config)
    states = len(surveyed.positions) * (text.num_hidden_layers + 1) * text.hidden_size
    logits = 2 * text.vocab_size if settings.header_logits == "full" else 0
    # A generation: id, log-probability, rank and margin of four bytes each per token, and its text.
    turns = len(settings.rows()) * (settings.max_new_tokens * 20 + 100)
    scores = 600  # a log-probability per temperature, and what columns cost
    each = states * itemsize + logits + turns + scores
    tokens = sum(surveyed.lengths[order] for order in parts.orders)
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


def dry_run(settings: Settings, out: Path, shard: Shard) -> tuple[dict[str, str], Survey]:
    """What a command would do and write, found out without the model's weights.

    Returns:
        Lines by their name, and what was surveyed for them.

    Raises:
        UserError: anything that can't be used; a folder that holds another run.
    """
    surveyed, device = survey(settings, out), resolve_device(settings.device)
    config, text = surveyed.config, text_config(surveyed.config)
    dtype = resolve_dtype(settings.dtype, device)
    dtype = stored_dtype(config) if isinstance(dtype, str) else dtype
    size = known_footprint(settings, dtype, out)
    room = 2**62 if size is None else part_room(settings, size, out)
    parts = plan_parts(surveyed, settings, size or Footprint(0, text.vocab_size, ()), room)
    settings = replace(settings, batch_rows=parts.batch_rows)
    kept = _kept(settings, surveyed, parts, out)
    parts = parts.of_shard(shard)
    lengths = [surveyed.lengths[order] for order in parts.orders]
    each, contexts = len(settings.rows()), len(lengths)
    writing = sum(order in surveyed.prompts for order in parts.orders)
    draws = DRAWS if settings.wants_finished else 1
    tokens = each * contexts * settings.max_new_tokens
    tokens += writing * draws * settings.max_response_tokens
    pace = Pace(config, dtype, device.type)
    redrawn = f" (up to {draws * writing} draws, until enough are finished and differ)"
    rows = [each * len(part) for part in parts.contexts.values()]
    rows += [sum(one in surveyed.prompts for one in part) for part in parts.responses.values()]
    itemsize = dtype.itemsize
    lens = size_text((text.vocab_size + 2) * text.hidden_size * itemsize)
    written = size_text(run_bytes(settings, surveyed, parts, itemsize))
    return {
        "model": settings.model + random_blocks_text(settings.random_blocks),
        "conversations": f"{settings.dataset}: {surveyed.dataset_conversations}",
        **({"what was read": surveyed.read} if surveyed.read else {}),
        "contexts": str(contexts),
        "responses to generate": str(writing) + (redrawn if writing and draws > 1 else ""),
        "user header": repr(surveyed.chat.header_text),
        "positions kept": ", ".join(surveyed.positions),
        "context tokens": f"{sum(lengths)} (longest {max(lengths, default=0)})",
        "rows to decode": f"{each * contexts} x at most {settings.max_new_tokens} tokens",
        "new tokens": f"at most {tokens}, responses included",
        "parts": f"{len(rows)}; a kill costs a worker at most one of {max(rows, default=0)} rows",
        "memory": memory_text(size, parts.part_bytes),
        "time": time_text(_seconds(parts, settings, pace, sum(lengths), writing)),
        "bytes to be written": f"{written}, to {out}",
        "of this already there": kept,
        "once for this model": f"{lens}, its final norm and unembedding, if not kept yet",
    }, surveyed


def _kept(settings: Settings, surveyed: Survey, parts: Parts, out: Path) -> str:
    """What is there already of the run that the command would go on with.

    Raises:
        UserError: the folder holds another run.
    """
    if not (out / layout.RUN).is_file():
        return "nothing"
    run, wanted = Run.open(out), surveyed.identity(settings)
    there = without_folders(run.record["identity"])
    known = {"identity": {name: there.get(name) for name in wanted}, "parts": run.record["parts"]}
    refuse_another(out, known, {"identity": wanted, "parts": parts.counts}, flag_of)
    if run.complete:
        return "all of it: nothing would be computed again"
    counts = ", ".join(f"{count} {kind}" for kind, count in run.counts.items())
    return f"{counts}; all above is of the whole run"


def _seconds(parts: Parts, settings: Settings, pace: "Pace", tokens: int, written: int) -> float:
    """About how long contexts of so many tokens take, with so many responses, none of which ends
    before its limit."""
    rows, count = len(settings.rows()), len(parts.contexts)
    batches = count * -(-rows // parts.batch_rows)
    steps, many = settings.max_new_tokens, settings.max_response_tokens
    turns = pace.seconds(rows * len(parts.orders) * steps, batches * steps)
    responses = pace.seconds(written * many, len(parts.responses) * many)
    return turns + responses + pace.seconds(tokens, count)


class Pace:
    """About how fast a model computes on a device, by its configuration and the usual speed.

    A block has some 12 d² weights that a token passes (attention 4, feed-forward 8; of experts,
    those that are chosen), and the unembedding one row per token of the vocabulary.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: str) -> None:
        text = text_config(config)
        d = text.hidden_size
        self.weights = d * (12 * d * text.num_hidden_layers + text.vocab_size)
        self.bytes, self.device = self.weights * dtype.itemsize, device

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


def memory_text(size: Footprint | None, part: int) -> str:
    """How much memory the weights take, and each part that is being computed."""
    if size is None:
        return "said here once a run of this model has begun: it is measured with the weights"
    weights = size_text(size.weights)
    return f"{weights} for weights, at most {size_text(part)} for each part in work"


def time_text(seconds: float) -> str:
    """About how long something takes."""
    return f"about {duration(seconds)} where nothing else runs, by the usual speed of such a device"


def duration(seconds: float) -> str:
    """How long something takes, in minutes or hours."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.2g} hours"


def random_blocks_text(seed: int | None) -> str:
    """What to say after a model's name if its blocks are random."""
    return "" if seed is None else f" with random blocks (seed {seed}) over its trained embeddings"
