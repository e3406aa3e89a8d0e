"""Before anything is sampled: read and check the conversations, and say what the run will take."""

import contextlib
import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.config import SampleConfig
from ia_mech.data.conversations import (
    UNPERTURBED,
    Conversation,
    ConversationSource,
    open_conversations,
)
from ia_mech.engine.plan import WINDOW
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OwnCandidates
from ia_mech.models.load import Subject, context_limit, text_config
from ia_mech.run import layout


@dataclass(frozen=True)
class Plan:
    """What a run will do and write; from tokenizer and configuration alone (``--dry-run``).

    ``contrast_contexts`` are prefilled only to score turns after them, ``contrast_tokens`` are
    theirs; ``scored_tokens`` are those of the turns, counted for every context they follow. Both
    are estimates: other conversations' responses are taken to be as long as a context's own.
    """

    contexts: int
    responses_to_generate: int
    rows: int
    context_tokens: int
    longest_context: int
    contrast_contexts: int
    contrast_tokens: int
    scored_tokens: int
    bytes: int
    lens_bytes: int
    header_text: str
    positions: tuple[str, ...]


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


def open_source(config: SampleConfig) -> ConversationSource:
    """Where a configuration's conversations come from."""
    return open_conversations(
        config.dataset,
        limit=config.limit,
        columns=config.columns,
        split=config.split,
        subset=config.subset,
    )


def checked(
    source: ConversationSource, config: SampleConfig, chat: ChatFormat, limit: int | None
) -> Iterator[tuple[Conversation, int]]:
    """The conversations of a source with the token length of their context.

    Where the response is still to be written its longest form is counted. Everything that can be
    wrong with a conversation is found here, before anything is written.

    Raises:
        UserError: a missing response, a context longer than the model's, a refusing template.
    """
    for conversation in source:
        try:
            length, following = _lengths(conversation, config, chat)
        except UserError as error:
            raise UserError(
                f"conversation {conversation.id}: {error.problem}", error.remedy
            ) from error
        needed = length + max(config.grid.max_new_tokens, following)
        if limit is not None and needed > limit:
            raise UserError(
                f"conversation {conversation.id} needs {needed} tokens, the model has {limit}",
                "remove it, shorten it, or lower --max-response-tokens or --max-new-tokens",
            )
        yield conversation, length


def _lengths(conversation: Conversation, config: SampleConfig, chat: ChatFormat) -> tuple[int, int]:
    """Tokens of a conversation's context (at its longest) and of its reference turn's."""
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
    return len(context.ids) + extra, 0 if turn is None else len(turn) + 1


def run_bytes(
    config: SampleConfig, positions, model_config, dtype_bytes: int, contexts: int, tokens: int
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
    scores = 4_500 * contexts + 8_000
    return contexts * (residuals + logits + rows) + 10 * tokens + scores


def size_text(count: int) -> str:
    """A number of bytes as it is said."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


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


def check_room(
    config: SampleConfig, subject: Subject, chat: ChatFormat, snapshot: dict, out: Path
) -> None:
    """Refuse a run that the disk has no room for.

    Raises:
        UserError: says how much is needed and how much is free.
    """
    positions = kept_positions(config, chat)
    size = subject.model.dtype.itemsize
    counts = snapshot["count"], snapshot["tokens"]
    needed = run_bytes(config, positions, subject.model.config, size, *counts)
    free = shutil.disk_usage(out.parent).free
    if needed > free and not (out / layout.RUN).is_file():
        raise UserError(
            f"the run needs about {size_text(needed)}, {out.parent} has {size_text(free)} free",
            "make room, lower --limit, name fewer --positions, or use --header-logits 1000",
        )


def make_plan(
    config: SampleConfig,
    chat: ChatFormat,
    model_config,
    dtype_bytes: int,
    own: OwnCandidates | None = None,
) -> Plan:
    """What a run would do and write, without the model's weights.

    Raises:
        UserError: conversations or the user's ``own`` candidates that can't be used.
    """
    positions = kept_positions(config, chat)
    lengths, to_generate, ids, references = [], 0, set(), 0
    candidate_tokens, turns, sources = 0, [], defaultdict(set)
    text = text_config(model_config)

    def count(turn: str) -> int:
        return len(chat.tokenizer(turn, add_special_tokens=False)["input_ids"])

    for conversation, length in checked(
        open_source(config), config, chat, context_limit(model_config)
    ):
        lengths.append(length)
        to_generate += needs_response(config, conversation)
        ids.add(conversation.id)
        references += conversation.reference is not None
        if conversation.perturbation != UNPERTURBED:  # its reference is scored, and nothing else
            candidate_tokens += count(conversation.reference or "")
            continue
        sources[conversation.dataset].add(conversation.source_id)
        turn = 0
        if conversation.reference is not None:
            turn = count(conversation.reference)
            # Query and response are rivals of the reference, about as long as the context.
            candidate_tokens += length + turn
            for candidate in own.of(conversation.id) if own is not None else []:
                candidate_tokens += count(candidate.text)
        if config.score_generations:
            turn += len(config.grid.rows()) * config.grid.max_new_tokens
        if turn:
            turns.append((conversation.dataset, length, turn))
    if own is not None:
        own.check(ids, references)
    # Other responses of the dataset and an empty one; the bare header is next to nothing.
    others = {name: min(config.swaps, len(found) - 1) + 1 for name, found in sources.items()}
    return Plan(
        contexts=len(lengths),
        responses_to_generate=to_generate,
        rows=len(config.grid.rows()) * len(lengths),
        context_tokens=sum(lengths),
        longest_context=max(lengths),
        contrast_contexts=sum(others[dataset] for dataset, _, _ in turns),
        contrast_tokens=sum(others[dataset] * length for dataset, length, _ in turns),
        scored_tokens=candidate_tokens
        + sum((others[dataset] + 1) * turn for dataset, _, turn in turns),
        bytes=run_bytes(config, positions, model_config, dtype_bytes, len(lengths), sum(lengths)),
        lens_bytes=(text.vocab_size + 2) * text.hidden_size * dtype_bytes,
        header_text=chat.header_text,
        positions=positions,
    )


def write_snapshot(
    source: ConversationSource,
    config: SampleConfig,
    chat: ChatFormat,
    limit: int | None,
    path: Path,
) -> dict:
    """Write the conversations to a file; returns how many, their tokens and a hash of them."""
    total = hashlib.sha256()
    schema = pa.schema([("conversation", pa.string())])
    count, tokens, rows = 0, 0, []
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            if rows:
                # One row group per window, so that windows can be read one by one.
                writer.write_table(pa.table({"conversation": rows}, schema=schema))
                rows.clear()

        for conversation, length in checked(source, config, chat, limit):
            text = json.dumps(conversation.to_dict(), sort_keys=True, ensure_ascii=False)
            total.update(text.encode() + b"\n")
            rows.append(text)
            count += 1
            tokens += length
            if len(rows) == WINDOW:
                flush()
        flush()
    return {"count": count, "tokens": tokens, "sha256": total.hexdigest()}


def windows(path: Path) -> Iterator[tuple[int, list[tuple[int, Conversation]]]]:
    """Windows of (order, conversation) from the snapshot."""
    file = pq.ParquetFile(path)
    order = 0
    for window in range(file.num_row_groups):
        texts = file.read_row_group(window)["conversation"].to_pylist()
        yield (
            window,
            [(order + i, Conversation.from_dict(json.loads(t))) for i, t in enumerate(texts)],
        )
        order += len(texts)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder of this process for files in the making; those of killed processes are removed."""
    for stale in parent.glob(".ia_mech-*"):
        pid = stale.name.rpartition("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(stale, ignore_errors=True)
    folder = parent / f".ia_mech-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
