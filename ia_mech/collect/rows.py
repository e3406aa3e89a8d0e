"""From what the engine gave for a context to the rows and tensors that a run stores."""

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ia_mech.chat.format import ChatContext, ChatFormat, TurnIds
from ia_mech.data.conversations import Conversation
from ia_mech.engine.decode import Decoded
from ia_mech.engine.intervene import Intervention, TokenwiseIntervention
from ia_mech.engine.score import Scored
from ia_mech.engine.splice import Foreign
from ia_mech.likelihood.real_follow_up import real_follow_up_columns
from ia_mech.run import layout
from ia_mech.settings import Settings


@dataclass(frozen=True)
class PreparedContext:
    """One conversation, rendered for the engine."""

    order: int
    conversation: Conversation
    written: dict | None  # the response the subject model wrote, if it did
    chat: ChatContext
    real_follow_up: TurnIds | None
    at_context: tuple[Intervention, ...] = ()
    at_turn: tuple[TokenwiseIntervention, ...] = ()  # each of its tokens
    foreign: Foreign | None = None  # pieces of another context that it has

    @property
    def finish_reason(self) -> str:
        """How the response ended; ``given`` where the data brought it and doesn't say."""
        if self.written is not None:
            return self.written["finish_reason"]
        return self.conversation.finish_reason or "given"

    @property
    def response_unfinished(self) -> bool:
        """Whether the response was cut off, or ended within its thought: a different stimulus."""
        return self.finish_reason in layout.UNFINISHED


@dataclass(frozen=True)
class ContextResult:
    """What the engine gave for one context."""

    rows: list[Decoded]
    scored: Scored | None  # the real follow-up, if the data has one
    logits: Tensor  # [vocab] float32
    residuals: Tensor  # [layers + 1, positions, d_model]


def tables(
    prepared: list[PreparedContext],
    results: list[ContextResult],
    settings: Settings,
    chat: ChatFormat,
) -> tuple[pa.Table, pa.Table, Tensor | None, Tensor | None]:
    """One part as ``RunWriter.add_contexts`` takes it.

    Returns:
        Contexts, generations, header logits (or None), and residuals
        ``[contexts, layers + 1, positions, d_model]`` (None where no context can be used).
    """
    contexts = [context_row(c, r, settings, chat) for c, r in zip(prepared, results, strict=True)]
    generations = [
        generation_row(context, *place, row, chat)
        for context, result in zip(prepared, results, strict=True)
        for place, row in zip(settings.rows(), result.rows, strict=not settings.first_tokens)
    ]
    logits = residuals = None
    if results:
        if settings.header_logits == "full":
            logits = torch.stack([r.logits for r in results])
            # Minus the maximum: the likely tokens then lie near zero, where float16 is finest.
            logits = (logits - logits.amax(-1, keepdim=True)).half()
        residuals = torch.stack([r.residuals for r in results])
    return (
        pa.Table.from_pylist(contexts, schema=layout.contexts_schema(chat.position_names)),
        pa.Table.from_pylist(generations, schema=layout.GENERATIONS),
        logits,
        residuals,
    )


def context_row(
    context: PreparedContext, result: ContextResult, settings: Settings, chat: ChatFormat
) -> dict:
    """One row of ``contexts/``."""
    conversation, written = context.conversation, context.written
    real_follow_up, scores = context.real_follow_up, {}
    if result.scored is not None and real_follow_up is not None:
        text, closed = conversation.real_follow_up or "", bool(real_follow_up.end)
        scores = real_follow_up_columns(result.scored, real_follow_up.words, text, closed)
    given = chat.tokenizer(conversation.response, add_special_tokens=False)["input_ids"]
    return {
        **_key_columns(context),
        "messages": [layout.message_columns(message) for message in conversation.messages],
        "real_follow_up": conversation.real_follow_up,
        "answer": conversation.answer,
        "metadata": json.dumps(conversation.metadata, ensure_ascii=False),
        "response_policy": "generated" if written else "given",
        "response_thought": conversation.thought,
        "response_finish_reason": context.finish_reason,
        "response_unfinished": context.response_unfinished,
        "text": context.chat.text,
        "token_ids": context.chat.ids,
        "context_tokens": len(context.chat.ids),
        "response_tokens": written["tokens"] if written else len(given),
        "positions": context.chat.positions,
        "first_token_entropy": entropy(result.logits),
        "first_token_entropy_tempered": [entropy(result.logits / t) for t in settings.temperatures],
        **scores,
    }


def generation_row(
    context: PreparedContext,
    temperature: float,
    drawn: int,
    sample: int,
    row: Decoded,
    chat: ChatFormat,
) -> dict:
    """One row of ``generations/``; log-probabilities are sums in float64, tempered ones over the
    tokens that were drawn."""
    tempered = float(row.logprobs_tempered[:drawn].sum(dtype=np.float64)) if drawn else None
    return {
        **_key_columns(context),
        "response_unfinished": context.response_unfinished,
        "temperature": temperature,
        "sampled_tokens": drawn,
        "sample": sample,
        "text": chat.text(row.token_ids.tolist()),
        "finish_reason": row.finish_reason,
        "tokens": len(row.token_ids),
        "logprob_raw": float(row.logprobs_raw.sum(dtype=np.float64)),
        "logprob_tempered": tempered,
        "token_ids": row.token_ids,
        "logprobs_raw": row.logprobs_raw,
        "ranks": row.ranks,
        "margins": row.margins,
    }


def _key_columns(context: PreparedContext) -> dict:
    return {
        "context_id": context.conversation.id,
        "source_id": context.conversation.source_id,
        "dataset": context.conversation.dataset,
        "perturbation": context.conversation.perturbation,
        "order": context.order,
        "response_index": context.conversation.response_index,
    }


def entropy(logits: Tensor) -> float:
    """Entropy of ``softmax(logits)`` in nats; logits ``[vocab]``."""
    return float(torch.special.entr(logits.double().softmax(-1)).sum())
