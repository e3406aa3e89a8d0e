"""Reinforcement learning of user turns by ``trl``'s ``GRPOTrainer`` (Shao et al. 2024, 2402.03300).

A prompt is a context with its open user header, and a completion the user turn. The reader is the
model as it was before training, so that the reward doesn't move with the policy.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.post_training.data import distinct_responses
from experiments.post_training.reading import Reading, repeated, restated, stock
from experiments.post_training.train import Tuning
from ia_mech.chat.format import ChatContext, ChatFormat
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.judge.rules import RulesJudge
from ia_mech.judge.verdict import Item
from ia_mech.likelihood.reaction import evidence
from ia_mech.models.load import Subject

if TYPE_CHECKING:
    from transformers import Trainer

BITS, GROUNDED = "bits", "grounded"
RARE = (
    2255  # a word so rare is shared by at most 5% of other conversations (benchmarks/grounding.md)
)
WORST = -4.0  # bits: what a turn may lose by fitting another response; evidence has no lower bound

Reward = Callable[..., list[float]]


def prompts(
    chat: ChatFormat, conversations: Sequence[Conversation], longest: int
) -> tuple[list[dict[str, Any]], dict[str, list[ChatContext]]]:
    """Prompts of queries with several responses, and the contexts of each query.

    ``trl`` tokenizes prompts itself; they are texts that its call of the tokenizer turns into
    exactly the ids of the context.

    Raises:
        UserError: no query has two different responses whose contexts have at most ``longest``
            tokens; a context that the tokenizer reads otherwise as a text.
    """
    rows, contexts = [], {}
    for source, responses in distinct_responses(conversations).items():
        made = [chat.context(one.messages) for one in responses]
        fitting = [k for k, one in enumerate(made) if len(one.ids) <= longest]
        if len(fitting) < 2:
            continue
        contexts[source] = [made[k] for k in fitting]
        for followed, k in enumerate(fitting):
            one = responses[k]
            row = {"prompt": _text(chat, made[k], one.id), "source": source, "followed": followed}
            rows.append(row | {"query": one.query, "response": one.response})
    if not rows:
        raise UserError(
            f"no query has two different responses in contexts of at most {longest} tokens",
            "give a run that was sampled with --response generate --responses 4, or raise "
            "--max-tokens",
        )
    return rows, contexts


def _text(chat: ChatFormat, context: ChatContext, name: str) -> str:
    """A context's text as the tokenizer has to get it: without what it puts in front by itself."""
    added = chat.template.decode(chat.tokenizer("")["input_ids"])
    for text in (context.text, context.text.removeprefix(added)):
        if chat.tokenizer(text)["input_ids"] == context.ids:
            return text
    raise UserError(
        f"the tokenizer reads context {name} otherwise as a text than in its dialogue",
        "train with sft, which takes token ids",
    )


def rewards(
    kind: str, reader: Subject, chat: ChatFormat, contexts: dict[str, list[ChatContext]]
) -> dict[str, Reward]:
    """The reward, then the penalties, by name; each takes a batch as ``trl`` gives it."""

    def bits(completion_ids: list[list[int]], source: list[str], followed: list[int], **_):
        found = np.zeros(len(source))
        of = defaultdict(list)
        for row, name in enumerate(source):
            of[name].append(row)
        for name, rows in of.items():
            reading = Reading(reader.model, contexts[name], [completion_ids[row] for row in rows])
            own = [followed[row] for row in rows]
            found[rows] = evidence(reading.logprobs(1.0), own)
        return found.clip(WORST).tolist()

    judge = RulesJudge()

    def grounded(completion_ids: list[list[int]], query: list[str], response: list[str], **_):
        items = map(Item, query, response, map(chat.text, completion_ids))
        verdicts = map(judge.verdict, items)
        return [
            float(bool(one.genuine) and one.grounding is not None and one.grounding >= RARE)
            for one in verdicts
        ]

    def restatement(completion_ids: list[list[int]], query: list[str], **_):
        return [restated(chat.text(ids), q) for ids, q in zip(completion_ids, query, strict=True)]

    def repetition(completion_ids: list[list[int]], **_):
        return [repeated(chat.text(ids)) for ids in completion_ids]

    def stock_phrases(completion_ids: list[list[int]], source: list[str], **_):
        return stock([chat.text(ids) for ids in completion_ids], source)

    def unfinished(completion_ids: list[list[int]], **_):
        return [float(ids[-1] not in chat.stop_ids) for ids in completion_ids]

    reward = {BITS: bits, GROUNDED: grounded}[kind]
    every: tuple[Any, ...] = (reward, restatement, repetition, stock_phrases, unfinished)
    return {one.__name__: one for one in every}


def train(
    subject: Subject,
    chat: ChatFormat,
    rows: list[dict[str, Any]],
    given: dict[str, Reward],
    tuning: Tuning,
    steps: int,
    generations: int,
    new_tokens: int,
    penalty: float,
    folder: Path,
) -> "Trainer":
    """Train on prompts (:func:`prompts`) by rewards (:func:`rewards`).

    Args:
        penalty: weight of each penalty; that of the reward is 1.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    kept = subject.model.generation_config.eos_token_id
    subject.model.generation_config.eos_token_id = chat.stop_ids  # where trl ends completions
    arguments = GRPOConfig(
        **tuning.arguments(folder),
        max_steps=steps,
        num_generations=generations,
        max_completion_length=new_tokens,
        temperature=1.0,
        reward_weights=[1.0, *[-penalty] * (len(given) - 1)],
    )
    trainer = GRPOTrainer(
        subject.model,
        reward_funcs=list(given.values()),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=subject.tokenizer,
        peft_config=tuning.adapter(),
    )
    trainer.train()
    subject.model.generation_config.eos_token_id = kept
    return trainer
