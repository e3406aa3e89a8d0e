"""Everything that can be wrong with what was asked for, found before weights are loaded.

First what needs nothing but the settings, then what needs the model's tokenizer and configuration,
then every conversation: it is read, checked and measured.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from ia_mech import __version__
from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import context_and_real_follow_up
from ia_mech.chat.template import MARK, Joints
from ia_mech.collect.identity import build_chat, probe_ids
from ia_mech.data.conversations import Conversation, ConversationSource
from ia_mech.data.formats import like_gold
from ia_mech.errors import UserError
from ia_mech.likelihood.real_follow_up import scored_temperatures
from ia_mech.models.load import (
    context_limit,
    load_tokenizer_and_config,
    refuse_unknown_ids,
    resolve_device,
    text_config,
)
from ia_mech.run import layout
from ia_mech.run.integrity import without_folders
from ia_mech.settings import Settings
from ia_mech.steering import SteeringVector

# What a column may be read as, by the field of ColumnMap.
ROLES = {
    "messages": "messages",
    "query": "query",
    "context": "passage",
    "response": "response",
    "system": "system message",
    "followup": "real follow-up",
    "answer": "gold answer",
}
DEFAULT_SYSTEM = "get the template's default system message"


@dataclass
class Survey:
    """What all shards of a run read together, checked and measured.

    Attributes:
        chat: the model's chat format; without the stop ids that only its weights' folder names.
        config: of the model.
        positions: names of those that are kept, in the template's order.
        vector: that the model is steered with.
        source: of the conversations.
        conversations: one per context, in the run's order.
        lengths: tokens of each context, at its longest where the response is still to be written.
        prompts: tokens of the prompt of each response that is still to be written, by order.
        dataset_conversations: how many conversations the dataset gave, each of which may become
            several contexts.
        read: what rows of the user's data hold, in one line; empty for built-in data.
        skipped: one line for each that can't be used, where these are to be skipped.
        facts: part of the run's identity.
        notes: what else to say about the data, a line each.
    """

    chat: ChatFormat
    config: PretrainedConfig
    positions: tuple[str, ...]
    vector: SteeringVector | None
    source: ConversationSource
    conversations: list[Conversation] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    prompts: dict[int, int] = field(default_factory=dict)
    dataset_conversations: int = 0
    read: str = ""
    skipped: list[str] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def identity(self, settings: Settings) -> dict:
        """That part of the run's identity which is known before the model's weights are;
        ``settings`` have their ``batch_rows``."""
        known = {
            "settings": settings.to_dict(),
            "positions": self.positions,
            "score_temperatures": scored_temperatures(settings.temperatures),
            "conversations": self.facts,
            "intervention": None if self.vector is None else self.vector.sha256,
            "software": {
                "ia_mech": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        return without_folders(json.loads(json.dumps(known)))


def survey(settings: Settings, out: Path, loaded: tuple[Any, Any] | None = None) -> Survey:
    """Check what was asked for, and read all conversations.

    Args:
        settings: of the run.
        out: the run's folder.
        loaded: the model's tokenizer and configuration, if they are there already.

    Raises:
        UserError: a device, a folder, a vector or a dataset that can't be used; positions, tokens
            or a vector's layer that the model hasn't; or, where such conversations aren't to be
            skipped, a missing response, a context longer than the model's, or a refusing template.
    """
    resolve_device(settings.device)
    layout.refuse_as_run(out)
    source = settings.conversations()
    file = settings.intervention
    vector = None if file is None else SteeringVector.load(file)
    tokenizer, config = loaded or load_tokenizer_and_config(settings.model_spec)
    chat, text = build_chat(settings, tokenizer), text_config(config)
    refuse_unknown_ids(probe_ids(chat), config)
    surveyed = Survey(chat, config, kept_positions(settings, chat), vector, source)
    if vector is not None:
        vector.check(text.num_hidden_layers, text.hidden_size, chat.position_names)
    _read(surveyed, settings)
    return surveyed


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


def without_response(conversation: Conversation) -> list[dict]:
    """The messages up to and including the query."""
    messages = list(conversation.messages)
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _read(surveyed: Survey, settings: Settings) -> None:
    queries: set[str] = set()
    kinds, total = Counter[str](), hashlib.sha256()
    for conversation in _alternatives(surveyed.source, settings):
        conversation = _told_apart(conversation, surveyed.chat)
        try:
            length, prompt = _lengths(conversation, settings, surveyed)
        except UserError as error:
            problem = f"conversation {conversation.id}: {error.problem}"
            if not settings.skip_unusable:
                skip = "--skip-unusable leaves such conversations out, with --dry-run it lists them"
                more = f"{error.remedy} ({skip})"
                raise UserError(problem, more) from error
            surveyed.skipped.append(problem)
            continue
        if prompt is not None:
            surveyed.prompts[len(surveyed.lengths)] = prompt
        surveyed.conversations.append(conversation)
        surveyed.lengths.append(length)
        if conversation.query_id not in queries:
            queries.add(conversation.query_id)
            kinds.update(_kinds(conversation, settings))
        row = json.dumps(conversation.to_dict(), sort_keys=True, ensure_ascii=False)
        total.update(row.encode() + b"\n")
    surveyed.skipped.extend(surveyed.source.skipped)
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
    lengths = surveyed.lengths
    surveyed.facts = {"count": len(lengths), "tokens": sum(lengths), "sha256": total.hexdigest()}
    surveyed.dataset_conversations = len(queries)
    surveyed.notes = _notes(settings, surveyed.source, len(queries))
    if settings.dataset.split(":")[0] != "builtin":
        surveyed.read = _read_text(len(queries), kinds, settings, surveyed)


def _kinds(conversation: Conversation, settings: Settings) -> Iterator[str]:
    """What a row has, or lacks, that decides what the model is shown."""
    messages = conversation.messages
    if messages[0]["role"] == "system":
        yield "system"
    if sum(message["role"] == "user" for message in messages) > 1:
        yield "earlier"
    if "tools" in messages[0]:
        yield "tools"
    if conversation.response is None:
        yield "no response"
    elif _needs_response(settings, conversation):
        yield "replaced"
    elif conversation.response_index is not None:
        yield "several"
    if conversation.real_follow_up is not None:
        yield "follow-up"
    if conversation.answer is not None:
        yield "answer"


def _read_text(rows: int, kinds: Counter[str], settings: Settings, surveyed: Survey) -> str:
    """What was read of a dataset, in one line: columns that no flag named, and what rows have."""
    recognised = [
        f"{what} from {' or '.join(f'`{name}`' for name in surveyed.source.roles[role])}"
        for role, what in ROLES.items()
        if role in surveyed.source.roles and getattr(settings.columns, role) is None
    ]
    own = kinds["system"]
    parts = [(own, "with a system message of their own")]
    if settings.system is not None:
        parts.append((rows - own, "get that of --system"))
    elif writes_system(surveyed.chat.template.joints()):
        parts.append((rows - own, "get the template's default one" if own else DEFAULT_SYSTEM))
    parts += [
        (kinds["earlier"], "with earlier turns"),
        (kinds["tools"], "with tools"),
        (kinds["no response"], "without a response (the model will write it)"),
        (kinds["replaced"], "whose response the model will write anew"),
        (kinds["several"], "with several responses"),
        (surveyed.source.unpacked, "whose response was a text with messages, read as these"),
        (kinds["follow-up"], "with a later user turn, the real follow-up"),
        (kinds["answer"], "with a gold answer"),
    ]
    listed = [*recognised, *(f"{count} {what}" for count, what in parts if count)]
    return f"{rows} rows: {', '.join(listed) or 'a query and a response each'}"


def writes_system(joints: Joints) -> bool:
    """Whether a template writes a system message of its own where a conversation has none."""
    before, after, *_ = [*joints.system.split(MARK), ""]
    around = joints.first.startswith(before) and joints.first.endswith(after)
    return bool(before) and around and len(joints.first) > len(before) + len(after)


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
    if source.cut:
        later = "--cut last would read up to the last one"
        notes.append(f"rows with user turns after the first follow-up: {source.cut}; {later}")
    if source.left:
        gold = [name for name in source.left if like_gold(name)]
        more = f" (if {gold[0]} is a gold answer: --answer-column {gold[0]})" if gold else ""
        listed = ", ".join(source.left)
        notes.append(f"columns that the model doesn't see (metadata): {listed}{more}")
    return notes


def _needs_response(settings: Settings, conversation: Conversation) -> bool:
    """Whether the subject model has to write the response of this conversation."""
    if settings.response == "generate":
        return True
    return settings.response == "auto" and conversation.response is None


def _alternatives(source: Iterable[Conversation], settings: Settings) -> Iterator[Conversation]:
    """The conversations, each as often as the model writes responses to its query.

    Raises:
        UserError: the data has several responses, and the model is to write others.
    """
    for conversation in source:
        several = settings.responses > 1 and _needs_response(settings, conversation)
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
    """The conversation, with the thoughts of its responses set apart from what they say."""
    ended = conversation.finish_reason
    if conversation.response and conversation.thought is None:
        within = chat.thoughts.of_text(conversation.response).within_thought
        ended = "thought" if within else ended
    messages = tuple(chat.thoughts.told_apart(conversation.messages))
    return replace(conversation, messages=messages, finish_reason=ended)


def _lengths(
    conversation: Conversation, settings: Settings, surveyed: Survey
) -> tuple[int, int | None]:
    """Tokens of a conversation's context, at its longest, and of the prompt if the response is
    still to be written."""
    chat, config = surveyed.chat, surveyed.config
    messages, extra, prompt = list(conversation.messages), 0, None
    if _needs_response(settings, conversation):
        # A stand-in for the response, so that everything around it is checked now.
        messages = [*without_response(conversation), {"role": "assistant", "content": "Yes."}]
        prompt = len(chat.prompt(messages[:-1]))
        extra = settings.max_response_tokens
    elif conversation.response is None:
        raise UserError(
            "no response, and --response given was asked for",
            "use --response auto to let the model write the missing ones",
        )
    context, turn = context_and_real_follow_up(
        chat, replace(conversation, messages=tuple(messages))
    )
    if surveyed.vector is not None:
        surveyed.vector.at_context(context.positions)
    refuse_unknown_ids([*context.ids, *(() if turn is None else turn.whole)], config)
    length, following = len(context.ids) + extra, 0 if turn is None else len(turn.whole)
    needed, limit = length + max(settings.max_new_tokens, following), context_limit(config)
    if limit is not None and needed > limit:
        raise UserError(
            f"it needs {needed} tokens, the model has {limit}",
            "remove or shorten it, lower --max-response-tokens or --max-new-tokens, or use "
            "--skip-unusable",
        )
    return length, prompt
