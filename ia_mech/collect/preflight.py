"""Before anything is sampled: check what was asked for, and say what the run will take.

Everything that can be wrong is found here, before anything is written, and nowhere else: first what
needs nothing but the configuration, then what needs the data, then what needs the model.
"""

import hashlib
import json
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PretrainedConfig

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.shards import WHOLE, Shard
from ia_mech.data.conversations import (
    UNPERTURBED,
    Conversation,
    ConversationSource,
    open_conversations,
)
from ia_mech.engine.plan import (
    PREFILL_COST,
    RESCORE_COST,
    RESPONSE_ROWS,
    SCORE_COST,
    UNIT_BATCHES,
    BatchDefaults,
    bucket_count,
    bucket_of,
    contexts_per_batch,
    evenly,
    plan_units,
    write_units,
)
from ia_mech.errors import UserError
from ia_mech.likelihood.candidates import OwnCandidates
from ia_mech.models.load import context_limit, resolve_device, text_config
from ia_mech.run import layout
from ia_mech.steering import SteeringVector


@dataclass(frozen=True)
class Inputs:
    """What a run reads: its conversations, the user's own candidates, and a steering vector."""

    source: ConversationSource
    own: OwnCandidates | None
    vector: SteeringVector | None = None


def open_inputs(
    config: SampleConfig, out: Path, shard: Shard = WHOLE, *, repair: bool = False
) -> Inputs:
    """Check everything that needs no model, before one is fetched.

    Args:
        out: the run's folder, of all shards.
        shard: which is to be made.

    Raises:
        UserError: a device, a folder, candidates or a dataset that can't be used.
    """
    if resolve_device(config.model.device).type == "cpu" and config.engine == "graphs":
        raise UserError("--engine graphs: CUDA graphs need a GPU", "use --engine auto")
    check_folder(out, shard)
    folder = shard.folder(out)
    if repair and not (folder / layout.RUN).is_file():
        raise UserError(f"there is no run in {folder} to repair", "leave --repair out to begin one")
    return read_inputs(config)


def read_inputs(config: SampleConfig) -> Inputs:
    """Open the conversations, and read the user's candidates and steering vector.

    Raises:
        UserError: candidates, a vector or a dataset that can't be used.
    """
    given = config.intervention
    vector = None if given is None else SteeringVector.load(given)
    own = None if config.candidates is None else OwnCandidates.read(config.candidates)
    source = open_conversations(
        config.dataset,
        limit=config.limit,
        columns=config.columns,
        split=config.split,
        subset=config.subset,
    )
    return Inputs(source, own, vector)


def check_folder(out: Path, shard: Shard = WHOLE) -> None:
    """Refuse an output folder that can't become, or isn't, a run, or one in shards.

    Raises:
        UserError: a file, or a folder of other things, within a run or not writable; a run in
            another number of shards.
    """
    folder = shard.folder(out)
    layout.refuse_inside_run(folder)
    layout.refuse_unwritable(folder, "give another --out or set IA_MECH_CACHE")
    other = sorted({of for _, of in layout.shards_in(out)} - {shard.of})
    if other and not (out / layout.RUN).is_file():
        asked = f"shard {shard} was" if shard.of > 1 else "all in one was"
        raise UserError(
            f"{out} is a run in {other[0]} shards, and {asked} asked for",
            f"give --shard i/{other[0]}, another --out, or merge them: python -m ia_mech.merge",
        )
    for one in {folder, out}:
        kept = {layout.RUN, layout.SHARDS} if one == out and shard.of > 1 else {layout.RUN}
        if one.is_dir() and any(one.iterdir()) and not any((one / name).exists() for name in kept):
            raise UserError(f"{one} holds files but no run", "give an empty or new folder as --out")


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


def check_header_logits(config: SampleConfig, model_config: PretrainedConfig) -> None:
    """Raise UserError if more header logits are to be kept than the model has."""
    most = text_config(model_config).vocab_size
    if config.header_logits not in ("full", "none") and int(config.header_logits) > most:
        raise UserError(
            f"--header-logits {config.header_logits}: the model has {most} logits",
            f"give full, or at most {most}",
        )


def check_vector(
    vector: SteeringVector | None, chat: ChatFormat, model_config: PretrainedConfig
) -> None:
    """Raise UserError if a model lacks what a vector, if there is one, is to change."""
    if vector is not None:
        text = text_config(model_config)
        vector.check(text.num_hidden_layers, text.hidden_size, chat.position_names)


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


Buckets = dict[int, list[int]]  # by number, the orders of their contexts; none is empty
Units = dict[int, dict[str, list[int]]]  # by bucket and name, the orders of their contexts


@dataclass(frozen=True, slots=True)
class Size:
    """What the work on a context depends on, besides the configuration.

    Attributes:
        dataset, source_id: of the conversation.
        length: tokens of the context, at its longest where the response is still to be written.
        turn: tokens of the reference turn, or None.
        own: about how many tokens the user's candidates for it have.
        perturbed: a perturbed context is a contrast itself; only its reference is scored.
        prompt: tokens of the prompt of the response if that is still to be written, or None.
    """

    dataset: str
    source_id: str
    length: int
    turn: int | None
    own: int
    perturbed: bool
    prompt: int | None = None


@dataclass(frozen=True)
class Survey:
    """The conversations of a run, of all its shards, checked and measured.

    Attributes:
        facts: part of the run's identity.
        sizes: of the contexts, in order.
        read: how many conversations the dataset gave, each of which may become several contexts.
    """

    facts: dict
    sizes: list[Size]
    read: int

    def prompts(self, orders: Iterable[int]) -> dict[int, int]:
        """Tokens of the prompts of the responses that are still to be written, of these."""
        sizes = ((order, self.sizes[order].prompt) for order in orders)
        return {order: prompt for order, prompt in sizes if prompt is not None}

    def bucket_count(self, config: SampleConfig) -> int:
        """Into how many buckets the contexts are dealt, whatever the number of shards."""
        assert config.batch_rows is not None
        return bucket_count(len(self.sizes), len(config.grid.rows()), config.batch_rows)

    def buckets(self, config: SampleConfig, shard: Shard) -> "Buckets":
        """The contexts of a shard."""
        count, found = self.bucket_count(config), Buckets()
        for order, size in enumerate(self.sizes):
            bucket = bucket_of(size.dataset, size.source_id, count)
            if shard.holds(bucket):
                found.setdefault(bucket, []).append(order)
        return dict(sorted(found.items()))

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each context, at its longest."""
        return [size.length for size in self.sizes]

    @cached_property
    def _plain(self) -> Counter:
        """How many unperturbed conversations there are of each dataset, and of each source."""
        return Counter(
            key
            for size in self.sizes
            if not size.perturbed
            for key in (size.dataset, (size.dataset, size.source_id))
        )

    def cost(self, config: SampleConfig, order: int, length: int) -> float:
        """The work on a context of so many tokens in decoded tokens, at most: every row at its
        longest, and as many other responses as its dataset has."""
        size = self.sizes[order]
        others = self._plain[size.dataset] - self._plain[size.dataset, size.source_id]
        return context_cost(config, size, length, min(config.swaps, others))

    def costs(self, config: SampleConfig, lengths: Sequence[int] | None = None) -> list[float]:
        """The work on each context; their own lengths unless others are given."""
        of = self.lengths if lengths is None else lengths
        return [self.cost(config, order, length) for order, length in enumerate(of)]


def survey(
    inputs: Inputs,
    config: SampleConfig,
    chat: ChatFormat,
    model_config: PretrainedConfig,
    keep: Callable[[str], None] = lambda text: None,
) -> Survey:
    """Read all conversations, checking and measuring them.

    Args:
        keep: called with each conversation as JSON.

    Raises:
        UserError: a missing response, a context longer than the model's, a refusing template,
            candidates of unknown conversations, or more header logits than the model has.
    """
    check_header_logits(config, model_config)
    check_vector(inputs.vector, chat, model_config)
    limit = context_limit(model_config)
    total = hashlib.sha256()
    sizes: list[Size] = []
    ids: set[str] = set()
    read: set[str] = set()
    for conversation in _alternatives(inputs.source, config):
        try:
            length, turn, prompt = _lengths(conversation, config, chat, inputs.vector)
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
        texts = [] if inputs.own is None else inputs.own.of(conversation.id)
        own = sum(len(one.text) for one in texts) // 3
        names = conversation.dataset, conversation.source_id
        perturbed = conversation.perturbation != UNPERTURBED
        sizes.append(Size(*names, length, turn, own, perturbed, prompt))
        ids.add(conversation.id)
        read.add(conversation.id.removesuffix(f"/r{conversation.response_index}"))
        text = json.dumps(conversation.to_dict(), sort_keys=True, ensure_ascii=False)
        total.update(text.encode() + b"\n")
        keep(text)
    if config.writes_responses and all(size.prompt is None for size in sizes):
        raise UserError(
            "every conversation has a response: --responses and --response-temperature do nothing",
            "use --response generate, which replaces them, or leave the two flags out",
        )
    if inputs.own is not None:
        inputs.own.check(ids, sum(size.turn is not None for size in sizes))
    tokens = sum(size.length for size in sizes)
    facts = {"count": len(sizes), "tokens": tokens, "sha256": total.hexdigest()}
    return Survey(facts, sizes, len(read))


def _alternatives(source: Iterable[Conversation], config: SampleConfig) -> Iterator[Conversation]:
    """The conversations, each as often as the model writes responses to its query.

    Raises:
        UserError: the data has several responses, and the model is to write others.
    """
    for conversation in source:
        several = config.responses > 1 and needs_response(config, conversation)
        if several and conversation.response_index is not None:
            raise UserError(
                f"conversation {conversation.id} is one of several responses already",
                "use --response given, or give each query once",
            )
        if several:
            yield from map(conversation.alternative, range(config.responses))
        else:
            yield conversation


def _lengths(
    conversation: Conversation,
    config: SampleConfig,
    chat: ChatFormat,
    vector: SteeringVector | None,
) -> tuple[int, int | None, int | None]:
    """Tokens of a conversation's context (at its longest), of its reference turn, if any, and of
    the prompt if the response is still to be written."""
    messages, extra, prompt = list(conversation.messages), 0, None
    if needs_response(config, conversation):
        # A stand-in for the response, so that everything around it is checked now.
        messages = [*without_response(conversation), {"role": "assistant", "content": "Yes."}]
        prompt = len(chat.prompt(messages[:-1]))
        extra = config.max_response_tokens
    elif conversation.response is None:
        raise UserError(
            "no response, and --response given was asked for",
            "use --response auto to let the model write the missing ones",
        )
    context, turn = rendered(chat, replace(conversation, messages=tuple(messages)))
    if vector is not None:
        vector.at_context(context.positions)
    return len(context.ids) + extra, None if turn is None else len(turn), prompt


class Texts:
    """The conversations of a run as JSON, in a file without a name: it is gone with the process.

    Args:
        folder: on whose disk it is.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._starts = array("q", [0])

    def append(self, text: str) -> None:
        """Add the next one."""
        self._file.write(text.encode())
        self._starts.append(self._file.tell())

    def __getitem__(self, order: int) -> str:
        start, end = self._starts[order : order + 2]
        self._file.seek(start)
        return self._file.read(end - start).decode()

    def conversations(self) -> Iterator[tuple[int, Conversation]]:
        """All of them, with their orders."""
        for order in range(len(self._starts) - 1):
            yield order, Conversation.from_dict(json.loads(self[order]))


def write_snapshot(texts: Texts, buckets: Buckets, path: Path) -> None:
    """Write the conversations of a shard to a file, one row group per bucket."""
    fields = [("bucket", pa.int32()), ("order", pa.int64()), ("conversation", pa.string())]
    schema = pa.schema(fields)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for bucket, orders in buckets.items():
            columns = [[bucket] * len(orders), orders, [texts[order] for order in orders]]
            writer.write_table(pa.table(columns, schema=schema))


def read_snapshot(path: Path) -> Iterator[tuple[int, dict[int, Conversation]]]:
    """The buckets of a snapshot: their numbers, and their conversations by order."""
    file = pq.ParquetFile(path)
    for number in range(file.num_row_groups):
        rows = file.read_row_group(number).to_pylist()
        yield (
            rows[0]["bucket"],
            {row["order"]: Conversation.from_dict(json.loads(row["conversation"])) for row in rows},
        )


def too_few(config: SampleConfig, count: int) -> str | None:
    """What to say of a dataset that has fewer conversations than were asked for."""
    if config.limit is None or count >= config.limit:
        return None
    return f"{config.dataset} has fewer conversations than --limit {config.limit}: {count}"


# -- what it takes --------------------------------------------------------------------------------


def context_cost(config: SampleConfig, size: Size, length: int, swaps: int) -> float:
    """The work on a context in decoded tokens, every row at its longest.

    Args:
        size: of the context.
        length: its tokens.
        swaps: after how many other responses turns are scored.
    """
    rows = len(config.grid.rows()) * config.grid.max_new_tokens
    prefilled, scored, rescored = length, 0, 0
    if size.turn is not None:
        scored = size.turn
        if config.rivals and not size.perturbed:
            # Query, response, another reference and a closing.
            scored += length + 2 * size.turn + size.own
    if config.contrasts and not size.perturbed:
        turns = 2 * (size.turn or 0) + (rows if config.score_generations else 0)
        if turns:
            prefilled += (1 + swaps) * length  # after an empty response, too
            rescored = (2 + swaps) * turns  # and after the bare header
    return rows + PREFILL_COST * prefilled + SCORE_COST * scored + RESCORE_COST * rescored


def context_units(
    config: SampleConfig,
    most_cost: float,
    buckets: Buckets,
    lengths: Sequence[int],
    costs: Sequence[float],
) -> Units:
    """Which contexts are computed and written together.

    Args:
        config: with ``batch_rows``.
        most_cost: most work of a unit, in decoded tokens.
        buckets: of the shard.
        lengths, costs: of all contexts of the run; one of length 0 is left out.
    """
    assert config.batch_rows is not None
    most = contexts_per_batch(len(config.grid.rows()), config.batch_rows * UNIT_BATCHES)

    def split(orders: list[int]) -> list[list[int]]:
        return write_units(
            [lengths[i] for i in orders], [costs[i] for i in orders], most, most_cost
        )

    return _units({b: [i for i in orders if lengths[i]] for b, orders in buckets.items()}, split)


def response_units(
    config: SampleConfig, most_cost: float, buckets: Buckets, prompts: dict[int, int]
) -> Units:
    """Which responses are decoded and written together; ``prompts`` has their tokens by order."""
    assert config.batch_rows is not None
    batch_rows = config.batch_rows

    def split(orders: list[int]) -> list[list[int]]:
        lengths = [prompts[i] for i in orders]
        each = config.max_response_tokens + PREFILL_COST * max(lengths, default=0)
        most = min(batch_rows, max(RESPONSE_ROWS, int(most_cost / each)))
        return plan_units(lengths, evenly(len(lengths), most))

    return _units({b: [i for i in orders if i in prompts] for b, orders in buckets.items()}, split)


def _units(buckets: Buckets, split: Callable[[list[int]], list[list[int]]]) -> Units:
    """The units into which each bucket is split."""
    return {
        bucket: {
            f"{bucket}.{number}": [orders[i] for i in unit]
            for number, unit in enumerate(split(orders))
        }
        for bucket, orders in buckets.items()
    }


def run_bytes(
    config: SampleConfig,
    positions: tuple[str, ...],
    model_config: PretrainedConfig,
    dtype_bytes: int,
    contexts: int,
    tokens: int,
) -> dict[str, int]:
    """About how many bytes a run of so many contexts, of so many tokens together, will take."""
    text = text_config(model_config)
    residuals = len(positions) * (text.num_hidden_layers + 1) * text.hidden_size * dtype_bytes
    per_logits = {"full": 2 * text.vocab_size, "none": 0}
    # Top-k keeps a float16 value and an int32 index each.
    logits = per_logits.get(config.header_logits)
    if logits is None:
        logits = 6 * int(config.header_logits)
    # A generation: id, log-probability, rank and margin of four bytes each per token, and its text.
    rows = len(config.grid.rows()) * (config.grid.max_new_tokens * 20 + 100)
    # Candidates with their texts and a log-probability per temperature, and what columns cost.
    scores = (4_500 if config.rivals else 2_000) * contexts + 8_000
    return {
        "residuals": contexts * residuals,
        "header logits": contexts * logits,
        "turns": contexts * rows,
        "contexts": 10 * tokens + scores,
    }


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

    ``conversations`` is their part of the run's identity. ``cost`` is the work of all of it in
    decoded tokens, at most; ``unit_cost``, of ``unit_rows`` rows, is the most that a kill costs.
    ``read`` conversations make so many ``contexts``.
    """

    conversations: dict
    read: int
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
    shard: Shard = WHOLE,
) -> Plan:
    """What a run, or a shard of one, would do and write, without the model's weights.

    Raises:
        UserError: conversations or candidates that can't be used.
    """
    positions = kept_positions(config, chat)
    found = survey(inputs, config, chat, model_config)
    buckets = found.buckets(config, shard)
    orders = [order for bucket in buckets.values() for order in bucket]
    costs, prompts = found.costs(config), found.prompts(orders)
    rows, longest = len(config.grid.rows()), max(prompts.values(), default=0)
    contexts = context_units(config, defaults.unit_cost, buckets, found.lengths, costs)
    responses = response_units(config, defaults.unit_cost, buckets, prompts)
    units = [  # rows and work of each
        (rows * len(unit), sum(costs[i] for i in unit))
        for part in contexts.values()
        for unit in part.values()
    ]
    units += [
        (len(unit), len(unit) * (config.max_response_tokens + PREFILL_COST * longest))
        for part in responses.values()
        for unit in part.values()
    ]
    unit_rows, unit_cost = max(units, key=lambda unit: unit[1], default=(0, 0.0))
    lengths, text = [found.lengths[order] for order in orders], text_config(model_config)
    counts = len(lengths), sum(lengths)
    return Plan(
        conversations=found.facts,
        read=found.read,
        contexts=len(lengths),
        responses_to_generate=len(prompts),
        rows=rows * len(lengths),
        context_tokens=sum(lengths),
        longest_context=max(lengths, default=0),
        cost=sum(cost for _, cost in units),
        unit_rows=unit_rows,
        unit_cost=unit_cost,
        bytes=sum(run_bytes(config, positions, model_config, dtype_bytes, *counts).values()),
        lens_bytes=(text.vocab_size + 2) * text.hidden_size * dtype_bytes,
        header_text=chat.header_text,
        positions=positions,
    )
