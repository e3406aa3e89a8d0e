"""Training on user turns by thin calls of ``trl``: SFT, GRPO and the reward for GRPO.

For GRPO (Shao et al. 2024, arXiv 2402.03300) a prompt is a context with its open user header, and a
completion is the user turn. The model before training computes the reward, so that the reward
doesn't change with the trained model.
"""

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from ia_mech.chat.format import ChatFormat
from ia_mech.cli import expanded
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.likelihood.reaction import evidence
from ia_mech.likelihood.scorer import after_each, score_turns
from ia_mech.models.load import Subject
from ia_mech.run.sources import source_key

if TYPE_CHECKING:
    from transformers import Trainer

LOG = "log.jsonl"
# The rank of LoRA's matrices, which are in all linear layers but the unembedding (Hu et al. 2021,
# arXiv 2106.09685); alpha is twice the rank.
RANK = 16
WORST = -4.0  # bits: the lowest reward of a turn, since evidence has no lower bound

Reward = Callable[..., list[float]]


# -- what is rewarded -----------------------------------------------------------------------------


def prompts(
    chat: ChatFormat, conversations: Sequence[Conversation], longest: int
) -> tuple[list[dict[str, Any]], dict[str, list[list[int]]]]:
    """Prompts of queries with several responses, and the contexts' ids of each query.

    ``trl`` tokenizes prompts itself. So a prompt is a text that the tokenizer turns into exactly
    the ids of its context.

    Raises:
        UserError: no query has two different responses whose contexts have at most ``longest``
            tokens, or the tokenizer turns no text into the ids of some context.
    """
    rows, contexts = [], {}
    for source, responses in distinct_responses(conversations).items():
        made = [(one, chat.context(one.messages)) for one in responses]
        fitting = [(one, context) for one, context in made if len(context.ids) <= longest]
        if len(fitting) < 2:
            continue
        contexts[source] = [context.ids for _, context in fitting]
        for followed, (one, context) in enumerate(fitting):
            prompt = _prompt(chat, context.text, context.ids, one.id)
            row = {"prompt": prompt, "source": source, "followed": followed, "query": one.query}
            rows.append(row)
    if not rows:
        raise UserError(
            f"no query has two different responses in conversations of at most {longest} tokens",
            "give a run that was sampled with --response generate --responses 4, or raise "
            "--max-tokens",
        )
    return rows, contexts


def distinct_responses(conversations: Iterable[Conversation]) -> dict[str, list[Conversation]]:
    """By query, conversations whose responses differ and have words; queries with one are left
    out."""
    queries: dict[str, dict[str, Conversation]] = defaultdict(dict)
    for one in conversations:
        if one.response is not None and re.search(r"\w", one.response):
            source = source_key(one.dataset, one.source_id)
            queries[source].setdefault(one.response, one)
    return {source: list(found.values()) for source, found in queries.items() if len(found) > 1}


def _prompt(chat: ChatFormat, text: str, ids: list[int], name: str) -> str:
    """A context's text for the tokenizer, without what the tokenizer puts in front by itself."""
    added = chat.template.decode(chat.tokenizer("")["input_ids"])
    for one in (text, text.removeprefix(added)):
        if chat.tokenizer(one)["input_ids"] == ids:
            return one
    raise UserError(
        f"the tokenizer gives the text of context {name} other ids than its dialogue has",
        "train with sft, which takes token ids",
    )


def reward(reader: Subject, contexts: Mapping[str, list[list[int]]]) -> Reward:
    """A reward: the bits of evidence that a turn gives at T = 1 for its response among the query's,
    but never less than :data:`WORST`.

    Args:
        reader: the model before training, installed.
        contexts: as :func:`prompts` returns them.

    Returns:
        A function that ``trl`` calls with the columns of a batch.
    """

    def bits(completion_ids: list[list[int]], source: list[str], followed: list[int], **_):
        rewards = np.zeros(len(source))
        rows_of = defaultdict(list)
        for row, name in enumerate(source):
            rows_of[name].append(row)
        for name, rows in rows_of.items():
            turns = [completion_ids[row] for row in rows]
            scores = after_each(partial(score_turns, reader.model), contexts[name], turns)
            whole = [[one.logprobs_raw.sum(dtype=np.float64) for one in each] for each in scores]
            rewards[rows] = evidence(whole, [followed[row] for row in rows]).clip(WORST)
        return rewards.tolist()

    return bits


# -- trainers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """How an adapter is trained.

    Attributes:
        learning_rate: for AdamW, falling linearly to 0.
        batch: sequences per step.
        seed: for the adapter's first weights and the order of sequences.
        folder: where the adapter is written.
    """

    learning_rate: float
    batch: int
    seed: int
    folder: Path

    def model(self, subject: Subject, chat: ChatFormat) -> dict[str, Any]:
        """The arguments of trainers that concern the model. If the tokenizer has no padding token,
        sequences are padded with one that ends turns."""
        from peft import LoraConfig

        tokenizer: Any = subject.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = chat.template.token(chat.stop_ids[0])
        adapter = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return {"model": subject.model, "processing_class": tokenizer, "peft_config": adapter}

    @property
    def arguments(self) -> dict[str, Any]:
        """The other arguments of trainers."""
        cuda = torch.cuda.is_available()
        return {
            "output_dir": str(self.folder),
            "learning_rate": self.learning_rate,
            "per_device_train_batch_size": self.batch,
            "seed": self.seed,
            "use_cpu": not cuda,
            "bf16": cuda and torch.cuda.is_bf16_supported(),
            "gradient_checkpointing": cuda,
            "dataloader_pin_memory": cuda,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
        }


def require() -> None:
    """Refuse to train without ``trl`` and ``peft``.

    Raises:
        UserError: one of them isn't installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("trl", "peft")):
        raise UserError("training needs trl and peft", "install them: pip install 'ia-mech[train]'")


def sft(
    subject: Subject, chat: ChatFormat, sequences: pd.DataFrame, tuning: Tuning, epochs: float
) -> None:
    """Train on :func:`experiments.sequences.sequences`."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **tuning.arguments,
        num_train_epochs=epochs,
        max_length=None,
        train_sampling_strategy="group_by_length",
    )
    columns = Dataset.from_pandas(sequences[["input_ids", "labels"]], preserve_index=False)
    trainer = SFTTrainer(args=arguments, train_dataset=columns, **tuning.model(subject, chat))
    _train(trainer, subject, tuning.folder)


def grpo(
    subject: Subject,
    chat: ChatFormat,
    rows: list[dict[str, Any]],
    rewards: list[Reward],
    tuning: Tuning,
    **how: Any,
) -> None:
    """Train on :func:`prompts`.

    Args:
        subject: the model to train.
        chat: its format.
        rows: the prompts.
        rewards: :func:`reward`, and others to add to it; ``trl`` logs each by its name.
        tuning: how an adapter is trained.
        how: further settings of ``GRPOConfig``.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    subject.model.generation_config.eos_token_id = chat.stop_ids  # where trl ends completions
    trainer = GRPOTrainer(
        reward_funcs=rewards,
        args=GRPOConfig(**tuning.arguments, temperature=1.0, **how),
        train_dataset=Dataset.from_list(rows),
        **tuning.model(subject, chat),
    )
    _train(trainer, subject, tuning.folder)


def _train(trainer: "Trainer", subject: Subject, folder: Path) -> None:
    """Train, then write the adapter, which ``--adapter`` takes, and a log of the steps; nothing is
    pickled."""
    trainer.train()
    model: Any = trainer.model
    name = subject.spec.name
    place = expanded(name)
    base = str(place.resolve()) if place.exists() else name
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    steps = [row for row in trainer.state.log_history if "loss" in row]
    (folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in steps))
