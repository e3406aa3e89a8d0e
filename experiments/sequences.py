"""Sequences that teach a model the real follow-ups of conversations.

A sequence holds the ids of a context as the main job makes them, and the user turn as it is
tokenized in the dialogue. Labels are the ids of the turn, and :data:`IGNORED` elsewhere: the
convention of ``transformers`` and ``trl``, whose trainers take such sequences as they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.arms import conversations_of
from ia_mech.chat.format import ChatFormat
from ia_mech.cli import shell_word
from ia_mech.collect.plan import build_chat
from ia_mech.data.conversations import Conversation, open_conversations
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec, load_files, recall
from ia_mech.rates.load import open_runs
from ia_mech.run import Run, layout
from ia_mech.run.queries import subsample
from ia_mech.run.sources import source_key
from ia_mech.settings import Settings

IGNORED = -100


# -- what comes in --------------------------------------------------------------------------------


def read_conversations(data: str) -> tuple[list[Conversation], Run | None]:
    """Conversations with a response, from a run's folder or a dataset as ``--dataset`` names it.

    Raises:
        UserError: neither a finished run nor a dataset; no conversation has a response.
    """
    if (Path(data) / layout.RUN).is_file():
        (run,) = open_runs([data])
        indices = [None if pd.isna(k) else int(k) for k in run.contexts["response_index"]]
        several = zip(conversations_of(run.contexts), indices, strict=True)
        return [replace(one, response_index=k) for one, k in several], run
    found = [one for one in open_conversations(data) if one.response is not None]
    if not found:
        raise UserError(
            f"{shell_word(data)} holds no response",
            "sample it with --response generate --responses 4, and give that run",
        )
    return found, None


def model_of(run: Run | None, name: str | None) -> tuple[ModelSpec, ChatFormat]:
    """The model to train and its chat format, with a run's chat settings.

    Args:
        run: the run that the conversations come from, if any.
        name: the model's name; None for the run's model, or the embedded one.

    Raises:
        UserError: there is no such model, or it has no chat template.
    """
    if name is not None:
        spec = ModelSpec(name=name)
    else:
        spec = ModelSpec() if run is None else recall(run.settings, run.model["weights_hash"])
    settings = Settings() if run is None else Settings.read(run.settings)
    return spec, build_chat(settings, load_files(spec))


def split(
    conversations: Sequence[Conversation], held_out: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to train on, and those of ``held_out`` sources: the same for every seed.

    Raises:
        UserError: no source would be left to train on.
    """
    sources = list(dict.fromkeys(map(_source, conversations)))
    if held_out >= len(sources):
        raise UserError(
            f"--held-out {held_out} leaves none of {len(sources)} queries to train on",
            "hold out fewer",
        )
    apart = set(subsample(sources, held_out, 0))
    kept = [one for one in conversations if _source(one) not in apart]
    return kept, [one for one in conversations if _source(one) in apart]


def _source(conversation: Conversation) -> str:
    return source_key(conversation.dataset, conversation.source_id)


# -- sequences ------------------------------------------------------------------------------------


def sequence(chat: ChatFormat, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Ids and labels that teach the conversation's user turn and its end.

    A template that closes user turns with text has no token for the end, and none is taught.

    Raises:
        UserError: the template can't express the turn.
    """
    context = chat.context(conversation.messages)
    assert conversation.real_follow_up is not None
    turn = chat.turn_ids(conversation.messages, context, conversation.real_follow_up).whole
    return [*context.ids, *turn], [IGNORED] * len(context.ids) + turn


def sequences(
    chat: ChatFormat, conversations: Sequence[Conversation], longest: int
) -> pd.DataFrame:
    """Training sequences, one per conversation.

    Args:
        chat: the chat format of the model to train.
        conversations: with a response and a ``real_follow_up``.
        longest: most tokens of a sequence. Longer ones are left out, since cutting them would cut
            off the turn.

    Returns:
        A row per sequence: ``input_ids``, ``labels``, ``dataset``, ``source_id``, ``id`` and
        ``turn`` (the text that is learned).

    Raises:
        UserError: the template can't express a turn, or no sequence is short enough.
    """
    rows: list[dict[str, Any]] = []
    for one in conversations:
        try:
            ids, labels = sequence(chat, one)
        except UserError as error:
            problem = f"conversation {one.id}: {error.problem}"
            raise UserError(problem, error.remedy) from error
        rows.append(
            {"input_ids": ids, "labels": labels, "dataset": one.dataset}
            | {"source_id": one.source_id, "id": one.id, "turn": one.real_follow_up}
        )
    kept = [row for row in rows if len(row["input_ids"]) <= longest]
    if not kept:
        shortest = min(len(row["input_ids"]) for row in rows)
        raise UserError(
            f"no sequence has at most {longest} tokens (the shortest has {shortest})",
            "raise --max-tokens",
        )
    return pd.DataFrame(kept)
