"""Before anything is sampled: check what was asked for, plan the parts, say what the run will take.

A **part** is some consecutive contexts with all their rows: what is dealt to a shard, computed,
written and resumed as one. Parts are a pure function of settings and conversations, since rounding
depends on the batch that a row sits in: nothing here looks at the clock, at free memory, at what
was already done, or at the number of shards. What a part may take of memory follows from the
machine that a run is begun on, and is read from the run by all others.

Everything that can be wrong is found here, before anything is written: first what needs nothing but
the settings, then what needs the data, then what needs the model.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PretrainedConfig

from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import context_and_reference
from ia_mech.collect.identity import build_chat, probe_ids, requested_identity
from ia_mech.data.conversations import Conversation, ConversationSource, open_conversations
from ia_mech.engine.footprint import Footprint, footprint, part_bytes
from ia_mech.engine.rotary import refuse_growth
from ia_mech.errors import UserError
from ia_mech.models.load import (
    context_limit,
    load_tokenizer_and_config,
    refuse_unknown_ids,
    resolve_device,
    resolve_dtype,
    stored_dtype,
    text_config,
)
from ia_mech.run import Run, layout
from ia_mech.run.integrity import without_folders
from ia_mech.run.writer import refuse_another
from ia_mech.settings import WHOLE, Settings, Shard
from ia_mech.steering import SteeringVector

# Rows decoded together. One core's matrix products are nearly at their best with these; a GPU's
# number is an estimate.
BATCH_ROWS = {"cpu": 96, "cuda": 1024}
RESPONSES = 16  # fewer responses together cost as much: reading the weights is what takes the time
# Where memory allows few long responses at a time, a part has so many times more, which take the
# places of those that end.
WAITING = 4
# A part of contexts has so many times the rows that are decoded together, and the others wait. Most
# turns are short and a few long: a GPU's step takes as long for the last rows as for a thousand.
QUEUE = {"cpu": 1, "cuda": 4}
PARTS = {"cpu": 4, "cuda": 1}  # parts come in such numbers, so that workers end together


@dataclass(frozen=True)
class Inputs:
    """What a run reads: its conversations, and a steering vector."""

    source: ConversationSource
    vector: SteeringVector | None = None


def open_inputs(settings: Settings, out: Path) -> Inputs:
    """Check everything that needs no model, before one is fetched.

    Args:
        settings: of the run.
        out: the run's folder.

    Raises:
        UserError: a device, a folder, a vector or a dataset that can't be used.
    """
    resolve_device(settings.device)
    layout.refuse_as_run(out)
    source = open_conversations(
        settings.dataset,
        limit=settings.limit,
        columns=settings.columns,
        split=settings.split,
        subset=settings.subset,
        skip_unusable=settings.skip_unusable,
    )
    file = settings.intervention
    return Inputs(source, None if file is None else SteeringVector.load(file))


def kept_positions(settings: Settings, chat: ChatFormat) -> tuple[str, ...]:
    """Position names that are kept, in the template's order.

    Raises:
        UserError: a name that the template hasn't.
    """
    wanted: set[str] = set()
    for name in settings.positions:
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


def check_model(
    settings: Settings, inputs: Inputs, chat: ChatFormat, model_config: PretrainedConfig
) -> None:
    """Refuse what a model lacks, by its configuration alone.

    Raises:
        UserError: positions, tokens or a vector's layer that the model hasn't.
    """
    text = text_config(model_config)
    refuse_unknown_ids(probe_ids(chat), model_config)
    kept_positions(settings, chat)
    if inputs.vector is not None:
        inputs.vector.check(text.num_hidden_layers, text.hidden_size, chat.position_names)


def check_without_weights(settings: Settings, out: Path) -> Inputs:
    """Check everything that needs no weights of the model, before they are fetched.

    Raises:
        UserError: as for :func:`open_inputs` and :func:`check_model`.
    """
    inputs = open_inputs(settings, out)
    tokenizer, model_config = load_tokenizer_and_config(settings.model_spec)
    check_model(settings, inputs, build_chat(settings, tokenizer), model_config)
    return inputs


def needs_response(settings: Settings, conversation: Conversation) -> bool:
    """Whether the subject model has to write the response of this conversation."""
    if settings.response == "generate":
        return True
    return settings.response == "auto" and conversation.response is None


def without_response(conversation: Conversation) -> list[dict]:
    """The messages up to and including the query."""
    messages = list(conversation.messages)
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


# -- conversations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """The conversations of a run, of all its shards, checked and measured.

    Attributes:
        facts: part of the run's identity.
        conversations: one per context, in the run's order.
        lengths: tokens of each context, at its longest where the response is still to be written.
        prompts: tokens of the prompt of each response that is still to be written, by order.
        dataset_conversations: how many conversations the dataset gave, each of which may become
            several contexts.
        skipped: one line for each that can't be used, where these are to be skipped.
        notes: what else to say of the data.
    """

    facts: dict
    conversations: list[Conversation]
    lengths: list[int]
    prompts: dict[int, int]
    dataset_conversations: int
    skipped: list[str]
    notes: list[str] = field(default_factory=list)


def survey(
    inputs: Inputs, settings: Settings, chat: ChatFormat, model_config: PretrainedConfig
) -> Survey:
    """Read all conversations, checking and measuring them.

    Raises:
        UserError: a missing response, a context longer than the model's or rotated otherwise as it
            grows, or a refusing template, where such conversations aren't to be skipped.
    """
    surveyed = Survey({}, [], [], {}, 0, [])
    ids: set[str] = set()  # of queries
    for conversation in _alternatives(inputs.source, settings):
        conversation = _told_apart(conversation, chat)
        try:
            length, prompt = _lengths(conversation, settings, chat, inputs, model_config)
        except UserError as error:
            problem = f"conversation {conversation.id}: {error.problem}"
            if not settings.skip_unusable:
                raise UserError(problem, error.remedy) from error
            surveyed.skipped.append(problem)
            continue
        if prompt is not None:
            surveyed.prompts[len(surveyed.lengths)] = prompt
        surveyed.conversations.append(conversation)
        surveyed.lengths.append(length)
        ids.add(conversation.query_id)
    surveyed.skipped.extend(inputs.source.skipped)
    if not surveyed.conversations:
        raise UserError(
            f"no conversation of {settings.dataset} can be used ({len(surveyed.skipped)} skipped, "
            f"such as {surveyed.skipped[0]})",
            "give others",
        )
    if settings.writes_responses and not surveyed.prompts:
        raise UserError(
            "every conversation has a response: --responses and --response-temperature do nothing",
            "use --response generate, which replaces them, or leave the two flags out",
        )
    total = hashlib.sha256()
    for conversation in surveyed.conversations:
        text = json.dumps(conversation.to_dict(), sort_keys=True, ensure_ascii=False)
        total.update(text.encode() + b"\n")
    lengths = surveyed.lengths
    facts = {"count": len(lengths), "tokens": sum(lengths), "sha256": total.hexdigest()}
    notes = _notes(settings, inputs.source, len(ids))
    return replace(surveyed, facts=facts, dataset_conversations=len(ids), notes=notes)


def _notes(settings: Settings, source: ConversationSource, count: int) -> list[str]:
    """How many conversations of the data are used, and which of its columns no model sees."""
    notes = []
    if source.rest and settings.dataset.split(":")[0] != "builtin":
        total = source.count()
        first = f"{count} of {total}" if total else f"the first {count}"
        notes.append(f"{settings.dataset}: {first} conversations used (--limit)")
    elif settings.limit is not None and count < settings.limit:
        fewer = f"has fewer conversations than --limit {settings.limit}: {count}"
        notes.append(f"{settings.dataset} {fewer}")
    if source.left:
        notes.append(f"columns that are kept as metadata alone: {', '.join(source.left)}")
    return notes


def _alternatives(source: Iterable[Conversation], settings: Settings) -> Iterator[Conversation]:
    """The conversations, each as often as the model writes responses to its query.

    Raises:
        UserError: the data has several responses, and the model is to write others.
    """
    for conversation in source:
        several = settings.responses > 1 and needs_response(settings, conversation)
        if several and conversation.response_index is not None:
            raise UserError(
                f"conversation {conversation.id} is one of several responses already",
                "use --response given, or give each query once",
            )
        if several:
            yield from map(conversation.with_response_index, range(settings.responses))
        else:
            yield conversation


def _told_apart(conversation: Conversation, chat: ChatFormat) -> Conversation:
    """The conversation, what its responses say without the thoughts that they hold."""
    ended = conversation.finish_reason
    if conversation.response and conversation.thought is None:
        within = chat.thoughts.of_text(conversation.response).within_thought
        ended = "thought" if within else ended
    messages = tuple(chat.thoughts.told_apart(conversation.messages))
    return replace(conversation, messages=messages, finish_reason=ended)


def _lengths(
    conversation: Conversation,
    settings: Settings,
    chat: ChatFormat,
    inputs: Inputs,
    model_config: PretrainedConfig,
) -> tuple[int, int | None]:
    """Tokens of a conversation's context, at its longest, and of the prompt if the response is
    still to be written."""
    messages, extra, prompt = list(conversation.messages), 0, None
    if needs_response(settings, conversation):
        # A stand-in for the response, so that everything around it is checked now.
        messages = [*without_response(conversation), {"role": "assistant", "content": "Yes."}]
        prompt = len(chat.prompt(messages[:-1]))
        extra = settings.max_response_tokens
    elif conversation.response is None:
        raise UserError(
            "no response, and --response given was asked for",
            "use --response auto to let the model write the missing ones",
        )
    context, turn = context_and_reference(chat, replace(conversation, messages=tuple(messages)))
    if inputs.vector is not None:
        inputs.vector.at_context(context.positions)
    refuse_unknown_ids([*context.ids, *(() if turn is None else turn.whole)], model_config)
    length, following = len(context.ids) + extra, 0 if turn is None else len(turn.whole)
    needed, limit = length + max(settings.max_new_tokens, following), context_limit(model_config)
    if limit is not None and needed > limit:
        raise UserError(
            f"it needs {needed} tokens, the model has {limit}",
            "remove or shorten it, lower --max-response-tokens or --max-new-tokens, or use "
            "--skip-unusable",
        )
    # No pass reads the last token. A response that is written may have any length up to its limit.
    shortest = len(context.ids) if prompt is None else prompt
    refuse_growth(text_config(model_config), shortest, needed - 1)
    return length, prompt


# -- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What is computed, written and resumed together.

    Attributes:
        contexts: by name, the orders of the contexts of each part.
        responses: likewise of the responses that the model writes: wider parts, since responses are
            long and a step costs little more for many rows; each serves whole parts of contexts.
        batch_rows: most user turns decoded together.
        response_rows: most responses written together.
        part_bytes: that the largest part takes of memory, about.
    """

    contexts: dict[str, list[int]]
    responses: dict[str, list[int]]
    batch_rows: int
    response_rows: int
    part_bytes: int

    @property
    def counts(self) -> dict[str, int]:
        """How many parts there are of each kind: what ``run.json`` says."""
        return {"responses": len(self.responses), "contexts": len(self.contexts)}

    def of_shard(self, shard: Shard) -> "Parts":
        """The parts that are dealt to a shard: each n-th, with the responses that they need."""
        number, of = shard
        dealt = range(number - 1, max(len(self.contexts), len(self.responses)), of)
        if not self.responses:
            names = list(self.contexts)
            mine = {names[at]: self.contexts[names[at]] for at in dealt if at < len(names)}
            return replace(self, contexts=mine)
        names = list(self.responses)
        written = {names[at]: self.responses[names[at]] for at in dealt if at < len(names)}
        orders = {order for some in written.values() for order in some}
        mine = {name: some for name, some in self.contexts.items() if some[0] in orders}
        return replace(self, contexts=mine, responses=written)


def part_room(settings: Settings, size: Footprint, out: Path) -> int:
    """Bytes of memory that a part may take: what the run was begun with, else this machine's."""
    if (out / layout.RUN).is_file() and (begun := Run(out).record.get("part_room")):
        return begun
    everywhere = settings.device_map is not None
    return part_bytes(resolve_device(settings.device), size.weights, everywhere)


def plan_parts(surveyed: Survey, settings: Settings, size: Footprint, room: int) -> Parts:
    """The parts of a run.

    Parts of contexts are alike in size, with at most :data:`QUEUE` times ``batch_rows`` rows or one
    context each, as long as they take no more than ``room`` bytes of memory. Where the rows of the
    longest context alone take more, fewer are decoded together. Where the model writes several
    responses to a query, no part splits them: one is drawn in place of another.
    """
    device = resolve_device(settings.device).type
    batch_rows = settings.batch_rows or BATCH_ROWS[device]
    rows, several, new = len(settings.rows()), PARTS[device], settings.max_new_tokens
    longest = max(surveyed.lengths)
    fitting = (room - size.context(longest)) // size.row(longest, new)
    if fitting < rows:
        batch_rows = max(1, min(batch_rows, fitting))
    each = settings.responses  # contexts of a query whose responses are written
    starts = [
        order
        for order, one in enumerate(surveyed.conversations)
        if order not in surveyed.prompts or each == 1 or one.response_index == 0
    ]
    parts = part_count(len(starts), max(1, QUEUE[device] * batch_rows // (rows * each)), several)
    firsts, splits = {starts[at * len(starts) // parts] for at in range(parts)}, set(starts)
    contexts: list[list[int]] = []
    held: list[int] = []  # bytes of each part
    state = taken = widest = 0  # bytes of the last part: its contexts, all its rows, its widest row
    for order, length in enumerate(surveyed.lengths):
        row = size.row(length, new)
        state, taken = state + size.context(length), taken + min(rows, batch_rows) * row
        widest = max(widest, row)
        needed = state + min(taken, batch_rows * widest)
        if order in firsts or (order in splits and needed > room):
            state, taken, widest = size.context(length), min(rows, batch_rows) * row, row
            needed = state + taken
            contexts.append([])
            held.append(0)
        contexts[-1].append(order)
        held[-1] = needed
    response_rows, responses = batch_rows, []
    if surveyed.prompts:
        prompt = max(surveyed.prompts.values())
        context, row = size.context(prompt), size.row(prompt, settings.max_response_tokens)
        waiting = WAITING if row > WAITING**2 * context else 1  # not where prompts fill the memory
        response_rows = max(1, min(batch_rows, room // (row + waiting * context)))
        most, writing = min(batch_rows, waiting * response_rows), len(surveyed.prompts)
        wanted = min(most, max(RESPONSES, writing // part_count(writing, most, several)))
        together = max(1, wanted // max(map(len, contexts)))
        responses = [
            [order for part in contexts[start : start + together] for order in part]
            for start in range(0, len(contexts), together)
        ]
        held.append(min(wanted, response_rows) * row + wanted * context)
    return Parts(_named(contexts), _named(responses), batch_rows, response_rows, max(held))


def part_count(count: int, most: int, several: int) -> int:
    """Of how many equal parts ``count`` items are, at most ``most`` in each: a multiple of
    ``several`` if there are items enough."""
    parts = -(-count // most)
    return min(count, -(-parts // several) * several)


def _named(parts: list[list[int]]) -> dict[str, list[int]]:
    return {f"{number:05d}": part for number, part in enumerate(parts)}


# -- what it takes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a run, or a shard of one, will do and write; from tokenizer and configuration alone.

    Attributes:
        conversations: their part of the run's identity.
        dataset_conversations: how many conversations the dataset gave, which make so many
            ``contexts``.
        skipped: a line for each that can't be used.
        notes: what else to say of the data.
        rows: user turns.
        parts: of contexts and responses together.
        part_rows: rows of the largest part: what a kill costs at most.
        tokens: new ones, at most.
        bytes: that will be written, about.
        lens_bytes: of the model's final norm and unembedding, which are kept once per model.
        weight_bytes, part_bytes: of memory: the model's weights, and the largest part besides.
        seconds: that it takes at most, about.
    """

    conversations: dict
    dataset_conversations: int
    skipped: list[str]
    notes: list[str]
    contexts: int
    responses_to_generate: int
    rows: int
    context_tokens: int
    longest_context: int
    parts: int
    part_rows: int
    tokens: int
    bytes: int
    lens_bytes: int
    weight_bytes: int
    part_bytes: int
    seconds: float
    header_text: str
    positions: tuple[str, ...]


def dry_run(settings: Settings, out: Path, shard: Shard = WHOLE) -> tuple[Plan, Run | None]:
    """What a command would do, found out without the model's weights.

    Returns:
        The plan, and the run that the command would go on with, if there is one.

    Raises:
        UserError: anything that can't be used; a folder that holds another run.
    """
    inputs = open_inputs(settings, out)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    tokenizer, model_config = load_tokenizer_and_config(settings.model_spec)
    chat = build_chat(settings, tokenizer)
    check_model(settings, inputs, chat, model_config)
    surveyed = survey(inputs, settings, chat, model_config)
    size = footprint(model_config, stored_dtype(model_config) if isinstance(dtype, str) else dtype)
    parts = plan_parts(surveyed, settings, size, part_room(settings, size, out))
    settings = replace(settings, batch_rows=parts.batch_rows)
    there = None
    if (out / layout.RUN).is_file():
        there = Run.open(out)
        positions = kept_positions(settings, chat)
        wanted = requested_identity(settings, positions, surveyed.facts, inputs.vector)
        kept = without_folders(there.record["identity"])
        record = {"identity": {name: kept.get(name) for name in wanted}}
        record["parts"] = there.record["parts"]
        refuse_another(out, record, {"identity": wanted, "parts": parts.counts}, flag_of)
    mine = parts.of_shard(shard)
    return _plan(surveyed, mine, settings, chat, model_config, size), there


def _plan(
    surveyed: Survey,
    parts: Parts,
    settings: Settings,
    chat: ChatFormat,
    model_config: PretrainedConfig,
    size: Footprint,
) -> Plan:
    orders = [order for part in parts.contexts.values() for order in part]
    lengths = [surveyed.lengths[order] for order in orders]
    each, writing = len(settings.rows()), [order for order in orders if order in surveyed.prompts]
    text, positions = text_config(model_config), kept_positions(settings, chat)
    dtype_bytes, device = size.weights // size.parameters, resolve_device(settings.device).type
    sizes = [each * len(part) for part in parts.contexts.values()]
    sizes += [sum(order in surveyed.prompts for order in part) for part in parts.responses.values()]
    return Plan(
        conversations=surveyed.facts,
        dataset_conversations=surveyed.dataset_conversations,
        skipped=surveyed.skipped,
        notes=surveyed.notes,
        contexts=len(orders),
        responses_to_generate=len(writing),
        rows=each * len(orders),
        context_tokens=sum(lengths),
        longest_context=max(lengths, default=0),
        parts=len(parts.contexts) + len(parts.responses),
        part_rows=max(sizes, default=0),
        tokens=each * len(orders) * settings.max_new_tokens
        + len(writing) * settings.max_response_tokens,
        bytes=run_bytes(
            settings, positions, model_config, dtype_bytes, lengths, len(parts.contexts)
        ),
        lens_bytes=(text.vocab_size + 2) * text.hidden_size * dtype_bytes,
        weight_bytes=size.weights,
        part_bytes=parts.part_bytes,
        seconds=_seconds(parts, settings, size, lengths, len(writing), device),
        header_text=chat.header_text,
        positions=positions,
    )


def _seconds(
    parts: Parts, settings: Settings, size: Footprint, lengths: list[int], written: int, device: str
) -> float:
    """About how long contexts of these lengths take, with so many responses, none of which ends
    before its limit."""
    rows = len(settings.rows())
    batches = len(parts.contexts) * -(-rows // parts.batch_rows)
    steps, many = settings.max_new_tokens, settings.max_response_tokens
    turns = size.seconds(rows * len(lengths) * steps, batches * steps, device)
    responses = size.seconds(written * many, len(parts.responses) * many, device)
    return turns + responses + size.seconds(sum(lengths), len(parts.contexts), device)


def run_bytes(
    settings: Settings,
    positions: tuple[str, ...],
    model_config: PretrainedConfig,
    dtype_bytes: int,
    lengths: list[int],
    parts: int,
) -> int:
    """About how many bytes a run takes whose contexts have these tokens, in so many parts."""
    text = text_config(model_config)
    residuals = len(positions) * (text.num_hidden_layers + 1) * text.hidden_size * dtype_bytes
    logits = 2 * text.vocab_size if settings.header_logits == "full" else 0
    # A generation: id, log-probability, rank and margin of four bytes each per token, and its text.
    turns = len(settings.rows()) * (settings.max_new_tokens * 20 + 100)
    files = parts * (22_000 + 400 * text.num_hidden_layers)  # what they cost without content
    scores = 600  # a log-probability per temperature, and what columns cost
    return len(lengths) * (residuals + logits + turns + scores) + 10 * sum(lengths) + files


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
    free = shutil.disk_usage(next(p for p in out.absolute().parents if p.exists())).free
    if needed > free and not (out / layout.RUN).is_file():
        raise UserError(
            f"the run needs about {size_text(needed)}, {out.parent} has {size_text(free)} free",
            "free some space, lower --limit, name fewer --positions, or use --header-logits none",
        )


def flag_of(path: str) -> str:
    """What a user calls a part of a run's identity: a flag for ``settings.samples``."""
    group, _, name = path.partition(".")
    return "--" + name.replace("_", "-") if group == "settings" else path.removesuffix(".sha256")
