"""The plan of a run: all that is known of it before the model's weights are loaded.

It is made once, from the settings, the data, and what the model's folder holds beside its weights.
``--dry-run`` prints it, a run that is there already is compared with it, and the job executes it.
What can be refused without weights is refused here.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from ia_mech import __version__
from ia_mech.chat.format import ChatContext, ChatFormat, TurnIds
from ia_mech.chat.headers import context_and_real_follow_up
from ia_mech.collect.data_read import what_was_read
from ia_mech.collect.parts import plan_parts
from ia_mech.data.conversations import Conversation, ConversationSource, together
from ia_mech.engine.check import TOKENS
from ia_mech.errors import UserError
from ia_mech.likelihood.real_follow_up import scored_temperatures
from ia_mech.models.load import (
    ModelFiles,
    context_limit,
    load_files,
    refuse_unknown_ids,
    resolve_device,
    text_config,
)
from ia_mech.run import Run, integrity, layout
from ia_mech.run.writer import refuse_another
from ia_mech.settings import BATCH_ROWS, Settings, flag_of
from ia_mech.steering import SteeringVector

Rendered = tuple[ChatContext, TurnIds | None]  # a context, and its real follow-up


@dataclass(frozen=True)
class PlannedContext:
    """A context of the run.

    Attributes:
        conversation: what it is made of.
        tokens: how many it has; the most that it can have if its response is still to be written.
        rendered: the context itself; None if its response is still to be written.
        prompt: the ids after which the model writes the response; empty if it is given.
        written: which of the query's responses the model writes (0, 1, …); None if it is given.
    """

    conversation: Conversation
    tokens: int
    rendered: Rendered | None
    prompt: tuple[int, ...] = ()
    written: int | None = None


class Plan:
    """The plan of a run. All shards of a run make the same.

    ``files`` of the model and the ``source`` of conversations are opened here if they aren't given,
    and the source is read unless all of its usable ``rows`` are given. The ``device`` is the one of
    this machine that is set, unless it is elsewhere.

    Attributes:
        settings: with their ``batch_rows``, the most rows that are decoded together.
        out: the run's folder.
        positions: names of those that are kept, in the template's order.
        vector: that the model is steered with.
        contexts: in the run's order.
        skipped: a line for each conversation that can't be used, where these are to be skipped.
        data: what was read, in words.
        parts: what is computed, written and resumed as one.
        identity: what two runs must share to be one run, as far as it is known without weights.

    Raises:
        UserError: a device, a vector, a dataset or a conversation that can't be used; positions,
            tokens or a vector's layer that the model hasn't; or the folder holds another run.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path,
        files: ModelFiles | None = None,
        source: ConversationSource | None = None,
        device: torch.device | None = None,
        rows: Sequence[Conversation] | None = None,
    ) -> None:
        self.out, self.device = out, device or resolve_device(settings.device)
        self.batch_rows = settings.batch_rows or BATCH_ROWS[self.device.type]
        self.settings = replace(settings, batch_rows=self.batch_rows)
        self.source = source or settings.conversations()
        file = settings.intervention
        self.vector = None if file is None else SteeringVector.load(file)
        files = files or load_files(settings.model_spec, needs_template=not settings.chat_template)
        self.config, text = files.config, text_config(files.config)
        self.chat = build_chat(settings, files)
        refuse_unknown_ids(probe_ids(self.chat), self.config)
        self.positions = kept_positions(settings, self.chat)
        if self.vector is not None:
            self.vector.check(text.num_hidden_layers, text.hidden_size, self.chat.position_names)
        self.contexts: list[PlannedContext] = []
        self._ids: dict[int, int] = {}  # of many equal numbers, all contexts hold one
        self.skipped: list[str] = []
        self._faults: list[tuple[str, UserError]] = []
        for conversation in self.source.usable() if rows is None else rows:
            self._add(conversation)
        if faults := [*self.source.faults, *self._faults]:
            raise together(faults)
        self.skipped += self.source.skipped
        self._refuse_nothing_to_do()
        used = [one.conversation for one in self.contexts]
        joints = self.chat.template.joints()
        self.data = what_was_read(used, self.source, settings, joints)
        written = [one.written for one in self.contexts]
        self.parts = plan_parts(self.settings, self.device.type, written)
        self.identity = self._identity()
        if (out / layout.RUN).is_file():
            refuse_another(out, Run(out).record, self.record, flag_of, settings.local_model)

    def render(self, conversation: Conversation) -> Rendered:
        """A conversation's context, and its real follow-up.

        Raises:
            UserError: the template can't express them, or a position isn't there to be steered at.
        """
        context, turn = context_and_real_follow_up(self.chat, conversation)
        if self.vector is not None:
            self.vector.at_context(context.positions)
        return context, turn

    def writes_response(self, conversation: Conversation) -> bool:
        """Whether the model has to write the response of a conversation."""
        missing = self.settings.response == "auto" and conversation.response is None
        return missing or self.settings.response == "generate"

    @property
    def record(self) -> dict:
        """What ``run.json`` says of the run before weights are there."""
        return {
            "identity": self.identity,
            "parts": self.parts.counts,
            "position_tokens": self.chat.position_tokens,
            "skipped": self.skipped,
            "source": self.source.description | {"dataset": self.identity["settings"]["dataset"]},
        }

    def _add(self, one: Conversation) -> None:
        """Plan a conversation of the data, as often as the model writes responses to its query."""
        several = self.settings.responses > 1 and self.writes_response(one)
        if several and one.response_index is not None:
            raise UserError(
                f"conversation {one.id} is one of several responses already",
                "use --response given, or give each query once",
            )
        try:
            planned = self._planned(_told_apart(one, self.chat))
        except UserError as error:
            place = self.source.places[one.id]
            problem = f"{place}: {error.problem}"
            if self.settings.skip_unusable:
                self.skipped.append(problem)
            else:
                self._faults.append((place, UserError(problem, error.remedy)))
            return
        if not several:
            self.contexts.append(planned)
            return
        for index in range(self.settings.responses):
            own = planned.conversation.with_response_index(index)
            self.contexts.append(replace(planned, conversation=own, written=index))

    def _planned(self, one: Conversation) -> PlannedContext:
        writes, shown, extra = self.writes_response(one), one, 0
        if writes:
            # A stand-in for the response, so that everything around it is checked now.
            shown, extra = one.with_response("Yes."), self.settings.max_response_tokens
        elif one.response is None:
            raise UserError(
                "no response, and --response given was asked for",
                "use --response auto to let the model write the missing ones",
            )
        context, turn = self.render(shown)
        following = [] if turn is None else turn.whole
        refuse_unknown_ids([*context.ids, *following], self.config)
        tokens = len(context.ids) + extra
        needed = tokens + max(self.settings.max_new_tokens, len(following))
        limit = context_limit(self.config)
        if limit is not None and needed > limit:
            raise UserError(
                f"it needs {needed} tokens, the model has {limit}",
                "shorten the row, or lower --max-response-tokens or --max-new-tokens",
            )
        if writes:
            prompt = tuple(self.chat.prompt(shown.messages[:-1]))
            return PlannedContext(one, tokens, None, prompt, 0)
        context = replace(context, ids=[self._ids.setdefault(i, i) for i in context.ids])
        return PlannedContext(one, tokens, (context, turn))

    def _refuse_nothing_to_do(self) -> None:
        if not self.contexts:
            raise UserError(
                f"no conversation of {self.settings.dataset} can be used ({len(self.skipped)} "
                f"skipped, such as {self.skipped[0]})",
                "give others",
            )
        if self.settings.writes_responses and not any(one.prompt for one in self.contexts):
            raise UserError(
                "every conversation has a response: --responses and --response-temperature do "
                "nothing",
                "use --response generate, which replaces them, or leave the two out",
            )

    def _identity(self) -> dict:
        content = hashlib.sha256()
        for one in self.contexts:
            row = json.dumps(one.conversation.to_dict(), sort_keys=True, ensure_ascii=False)
            content.update(row.encode() + b"\n")
        known = {
            "settings": self.settings.to_dict(),
            "chat": self.chat.describe(),
            "positions": self.positions,
            "score_temperatures": scored_temperatures(self.settings.temperatures),
            "conversations": {
                "count": len(self.contexts),
                "tokens": sum(one.tokens for one in self.contexts),
                "sha256": content.hexdigest(),
            },
            "intervention": None if self.vector is None else self.vector.sha256,
            "software": {
                "ia_mech": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        return integrity.without_folders(known)


def build_chat(settings: Settings, files: ModelFiles) -> ChatFormat:
    """The chat format that settings ask for, of a model's files."""
    known = (getattr(one, "eos_token_id", None) for one in (files.generation_config, files.config))
    ids: int | list[int] = next((one for one in known if one is not None), [])
    return ChatFormat(
        files.tokenizer,
        settings.system,
        settings.thinking,
        settings.date,
        [ids] if isinstance(ids, int) else ids,
        settings.opening,
        settings.template_option,
        settings.chat_template,
    )


def probe_ids(chat: ChatFormat) -> list[int]:
    """``TOKENS`` ids of a short conversation, with which the engine is checked at start-up."""
    messages = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "Blue."},
    ]
    return (chat.context(messages).ids * TOKENS)[:TOKENS]


def kept_positions(settings: Settings, chat: ChatFormat) -> tuple[str, ...]:
    """Position names that are kept, in the template's order.

    Raises:
        UserError: a name that the template hasn't.
    """
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in chat.position_names}
    groups |= {"all": chat.position_names, "header": chat.header_names}
    for name in settings.positions:
        if name not in groups:
            raise UserError(
                f"--positions {name}: this model's template has no such position",
                f"give all, header, or names among {', '.join(chat.position_names)}",
            )
    wanted = {one for name in settings.positions for one in groups[name]}
    return tuple(name for name in chat.position_names if name in wanted)


def _told_apart(conversation: Conversation, chat: ChatFormat) -> Conversation:
    """The conversation, with the thoughts of its responses set apart from what they say."""
    ended = conversation.finish_reason
    if conversation.response and conversation.thought is None:
        within = chat.thoughts.of_text(conversation.response).within_thought
        ended = "thought" if within else ended
    messages = tuple(chat.thoughts.told_apart(conversation.messages))
    return replace(conversation, messages=messages, finish_reason=ended)
