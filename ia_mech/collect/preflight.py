"""Before anything is sampled: check what was asked for, and say what the run will take.

Everything that can be wrong is found here, before anything is written, and nowhere else: first what
needs nothing but the configuration, then what needs the data, then what needs the model.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PretrainedConfig

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.config import SampleConfig
from ia_mech.data.conversations import (
    UNPERTURBED,
    Conversation,
    ConversationSource,
    open_conversations,
)
from ia_mech.engine.plan import (
    PREFILL_COST,
    RESCORE_COST,
    SCORE_COST,
    UNIT_BATCHES,
    WINDOW,
    BatchDefaults,
    contexts_per_batch,
    evenly,
    plan_units,
    write_units,
)
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OwnCandidates
from ia_mech.models.load import context_limit, resolve_device, text_config
from ia_mech.run import layout
from ia_mech.run.integrity import abandoned


@dataclass(frozen=True)
class Inputs:
    """What a run reads: its conversations, and the user's own candidates."""

    source: ConversationSource
    own: OwnCandidates | None


def open_inputs(config: SampleConfig, out: Path, *, repair: bool = False) -> Inputs:
    """Check everything that needs no model, before one is fetched.

    Raises:
        UserError: a device, a folder, candidates or a dataset that can't be used.
    """
    resolve_device(config.model.device)
    check_folder(out)
    if repair and not (out / layout.RUN).is_file():
        raise UserError(f"there is no run in {out} to repair", "leave --repair out to begin one")
    own = None if config.candidates is None else OwnCandidates.read(config.candidates)
    source = open_conversations(
        config.dataset,
        limit=config.limit,
        columns=config.columns,
        split=config.split,
        subset=config.subset,
    )
    return Inputs(source, own)


def check_folder(out: Path) -> None:
    """Refuse an output folder that can't become, or isn't, a run.

    Raises:
        UserError: a file, a folder of other things, or one that can't be written to.
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file", "give another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there} is not writable", "give another --out or set IA_MECH_CACHE")
    if out.is_dir() and not (out / layout.RUN).is_file() and any(out.iterdir()):
        raise UserError(f"{out} holds files but no run", "give an empty or new folder as --out")


def kept_positions(config: SampleConfig, chat: ChatFormat) -> tuple[str, ...]:
    """Position names that a configuration keeps, in the template's order.

    Raises:
        UserError: a name that the template hasn't.
    """
    wanted: set[str] = set()
    for name in config.positions:
        if name == "all":
            wanted.update(chat.position_names)
        elif name == "header":
            wanted.update(n for n in chat.position_names if n.startswith("header_"))
        elif name in chat.position_names:
            wanted.add(name)
        else:
            raise UserError(
                f"--positions {name}: this model's template has no such position",
                f"give all, header, or names among {', '.join(chat.position_names)}",
            )
    return tuple(name for name in chat.position_names if name in wanted)


def needs_response(config: SampleConfig, conversation: Conversation) -> bool:
    """Whether the subject model has to write the response of this conversation."""
    if config.response == "generate":
        return True
    return config.response == "auto" and conversation.response is None


def without_response(conversation: Conversation) -> list[dict]:
    """The messages up to and including the query."""
    messages = list(conversation.messages)
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


# -- conversations --------------------------------------------------------------------------------


def checked(
    inputs: Inputs, config: SampleConfig, chat: ChatFormat, limit: int | None
) -> Iterator[tuple[Conversation, int, float]]:
    """The conversations with the token length of their context and the work on it.

    Where the response is still to be written its longest form is counted.

    Args:
        limit: tokens that the model's context holds, or None.

    Raises:
        UserError: a missing response, a context longer than the model's, a refusing template, or
            candidates of unknown conversations.
    """
    ids: set[str] = set()
    references = 0
    for conversation in inputs.source:
        try:
            length, turn = _lengths(conversation, config, chat)
        except UserError as error:
            raise UserError(
                f"conversation {conversation.id}: {error.problem}", error.remedy
            ) from error
        following = 0 if turn is None else turn + 1
        needed = length + max(config.grid.max_new_tokens, following)
        if limit is not None and needed > limit:
            raise UserError(
                f"conversation {conversation.id} needs {needed} tokens, the model has {limit}",
                "remove it, shorten it, or lower --max-response-tokens or --max-new-tokens",
            )
        ids.add(conversation.id)
        references += turn is not None
        yield conversation, length, context_cost(config, inputs.own, conversation, length, turn)
    if inputs.own is not None:
        inputs.own.check(ids, references)


def _lengths(
    conversation: Conversation, config: SampleConfig, chat: ChatFormat
) -> tuple[int, int | None]:
    """Tokens of a conversation's context (at its longest) and of its reference turn, if any."""
    messages, extra = list(conversation.messages), 0
    if needs_response(config, conversation):
        # A stand-in for the response, so that everything around it is checked now.
        messages = [*without_response(conversation), {"role": "assistant", "content": "Yes."}]
        chat.prompt(messages[:-1])
        extra = config.max_response_tokens
    elif conversation.response is None:
        raise UserError(
            "no response, and --response given was asked for",
            "use --response auto to let the model write the missing ones",
        )
    context, turn = rendered(chat, replace(conversation, messages=tuple(messages)))
    return len(context.ids) + extra, None if turn is None else len(turn)


@dataclass(frozen=True)
class Snapshot:
    """The conversations of a run as they were read: ``facts`` are part of the run's identity."""

    facts: dict
    lengths: list[int]  # tokens of each context, at its longest
    costs: list[float]  # work on each, in decoded tokens


def write_snapshot(
    inputs: Inputs, config: SampleConfig, chat: ChatFormat, limit: int | None, path: Path
) -> Snapshot:
    """Check the conversations and write them to a file, one row group per chunk.

    Raises:
        UserError: see :func:`checked`.
    """
    total = hashlib.sha256()
    schema = pa.schema([("conversation", pa.string())])
    lengths: list[int] = []
    costs: list[float] = []
    rows: list[str] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            if rows:
                writer.write_table(pa.table({"conversation": rows}, schema=schema))
                rows.clear()

        for conversation, length, work in checked(inputs, config, chat, limit):
            text = json.dumps(conversation.to_dict(), sort_keys=True, ensure_ascii=False)
            total.update(text.encode() + b"\n")
            rows.append(text)
            lengths.append(length)
            costs.append(work)
            if len(rows) == WINDOW:
                flush()
        flush()
    facts = {"count": len(lengths), "tokens": sum(lengths), "sha256": total.hexdigest()}
    return Snapshot(facts, lengths, costs)


def read_chunks(path: Path) -> Iterator[tuple[int, list[tuple[int, Conversation]]]]:
    """Chunks of (order, conversation) from the snapshot, with their numbers."""
    file = pq.ParquetFile(path)
    order = 0
    for number in range(file.num_row_groups):
        texts = file.read_row_group(number)["conversation"].to_pylist()
        conversations = [Conversation.from_dict(json.loads(text)) for text in texts]
        yield number, list(enumerate(conversations, start=order))
        order += len(texts)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder of its own for files in the making; those of killed processes are removed."""
    for left in parent.glob(".ia_mech-*"):
        process = left.name.split("-")[1]
        if process.isdecimal() and abandoned(left, int(process)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".ia_mech-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- what it takes --------------------------------------------------------------------------------


def context_cost(
    config: SampleConfig,
    own: OwnCandidates | None,
    conversation: Conversation,
    length: int,
    turn: int | None,
) -> float:
    """The work on a context in decoded tokens, at most: every row at its longest.

    Args:
        length: tokens of the context.
        turn: tokens of its reference turn, or None.
    """
    rows = len(config.grid.rows()) * config.grid.max_new_tokens
    prefilled, scored, rescored = length, 0, 0
    compared = conversation.perturbation == UNPERTURBED
    if turn is not None:
        scored = turn
        if compared and config.rivals:
            scored += length + 2 * turn  # query, response, another reference and a closing
            texts = [] if own is None else own.of(conversation.id)
            scored += sum(len(one.text) for one in texts) // 3
    if compared and config.contrasts:
        turns = 2 * (turn or 0) + (rows if config.score_generations else 0)
        if turns:
            prefilled += config.other_contexts * length
            rescored = (config.other_contexts + 1) * turns
    return rows + PREFILL_COST * prefilled + SCORE_COST * scored + RESCORE_COST * rescored


def context_units(
    config: SampleConfig, batch_rows: int, most_cost: float, lengths: list[int], costs: list[float]
) -> list[list[int]]:
    """Which contexts of a chunk are computed and written together, as indices."""
    most = contexts_per_batch(len(config.grid.rows()), batch_rows * UNIT_BATCHES)
    return write_units(lengths, costs, most, most_cost)


def run_units(
    config: SampleConfig, batch_rows: int, most_cost: float, lengths: list[int], costs: list[float]
) -> dict[str, list[int]]:
    """The units of all chunks of a run by their names, as indices of its contexts."""
    units = {}
    for start in range(0, len(lengths), WINDOW):
        chunk = slice(start, start + WINDOW)
        parts = context_units(config, batch_rows, most_cost, lengths[chunk], costs[chunk])
        for index, part in enumerate(parts):
            units[f"{start // WINDOW}.{index}"] = [start + i for i in part]
    return units


def response_units(
    config: SampleConfig, batch_rows: int, most_cost: float, lengths: list[int]
) -> list[list[int]]:
    """Which responses of a chunk are decoded and written together, as indices of their prompts."""
    each = config.max_response_tokens + PREFILL_COST * max(lengths, default=0)
    most = min(batch_rows, max(1, int(most_cost / each)))
    return plan_units(lengths, evenly(len(lengths), most))


def run_bytes(
    config: SampleConfig,
    positions: tuple[str, ...],
    model_config: PretrainedConfig,
    dtype_bytes: int,
    contexts: int,
    tokens: int,
) -> int:
    """About how many bytes a run of so many contexts, of so many tokens together, will take."""
    text = text_config(model_config)
    residuals = len(positions) * (text.num_hidden_layers + 1) * text.hidden_size * dtype_bytes
    per_logits = {"full": 2 * text.vocab_size, "none": 0}
    # Top-k keeps a float16 value and an int32 index each.
    logits = per_logits.get(config.header_logits)
    if logits is None:
        logits = 6 * min(int(config.header_logits), text.vocab_size)
    # A generation: id, log-probability, rank and margin of four bytes each per token, and its text.
    rows = len(config.grid.rows()) * (config.grid.max_new_tokens * 20 + 100)
    # Candidates with their texts and a log-probability per temperature, and what columns cost.
    scores = (4_500 if config.rivals else 2_000) * contexts + 8_000
    return contexts * (residuals + logits + rows) + 10 * tokens + scores


def size_text(count: int) -> str:
    """A number of bytes, with its unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def check_disk(needed: int, out: Path) -> None:
    """Refuse a new run that the disk has not enough space for.

    Raises:
        UserError: says how much is needed and how much is free.
    """
    free = shutil.disk_usage(out.parent).free
    if needed > free and not (out / layout.RUN).is_file():
        raise UserError(
            f"the run needs about {size_text(needed)}, {out.parent} has {size_text(free)} free",
            "free some space, lower --limit, name fewer --positions, or use --header-logits 1000",
        )


@dataclass(frozen=True)
class Plan:
    """What a run will do and write; from tokenizer and configuration alone (``--dry-run``).

    ``cost`` is the work of all of it in decoded tokens, at most; ``unit_cost``, of ``unit_rows``
    rows, is the most that a kill costs.
    """

    contexts: int
    responses_to_generate: int
    rows: int
    context_tokens: int
    longest_context: int
    cost: float
    unit_rows: int
    unit_cost: float
    bytes: int
    lens_bytes: int
    header_text: str
    positions: tuple[str, ...]


def make_plan(
    config: SampleConfig,
    inputs: Inputs,
    chat: ChatFormat,
    model_config: PretrainedConfig,
    dtype_bytes: int,
    defaults: BatchDefaults,
) -> Plan:
    """What a run would do and write, without the model's weights.

    Raises:
        UserError: conversations or candidates that can't be used.
    """
    positions = kept_positions(config, chat)
    lengths: list[int] = []
    costs: list[float] = []
    prompts: list[int] = []
    for conversation, length, cost in checked(inputs, config, chat, context_limit(model_config)):
        lengths.append(length)
        costs.append(cost)
        if needs_response(config, conversation):
            prompts.append(len(chat.prompt(without_response(conversation))))
    limits = config.batch_rows or defaults.batch_rows, defaults.unit_cost
    rows, longest = len(config.grid.rows()), max(prompts, default=0)
    units = [  # rows and work of each
        (rows * len(unit), sum(costs[i] for i in unit))
        for unit in run_units(config, *limits, lengths, costs).values()
    ]
    units += [
        (len(unit), len(unit) * (config.max_response_tokens + PREFILL_COST * longest))
        for unit in response_units(config, *limits, prompts)
    ]
    unit_rows, unit_cost = max(units, key=lambda unit: unit[1])
    counts, text = (len(lengths), sum(lengths)), text_config(model_config)
    return Plan(
        contexts=len(lengths),
        responses_to_generate=len(prompts),
        rows=rows * len(lengths),
        context_tokens=sum(lengths),
        longest_context=max(lengths),
        cost=sum(cost for _, cost in units),
        unit_rows=unit_rows,
        unit_cost=unit_cost,
        bytes=run_bytes(config, positions, model_config, dtype_bytes, *counts),
        lens_bytes=(text.vocab_size + 2) * text.hidden_size * dtype_bytes,
        header_text=chat.header_text,
        positions=positions,
    )
