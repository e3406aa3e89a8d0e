"""Training on user turns by thin calls of ``trl``: SFT, GRPO and the reward for GRPO.

For GRPO (Shao et al. 2024, arXiv 2402.03300) a prompt is a context with its open user header, and a
completion is the user turn. The model before training computes the reward, so that the reward
doesn't change with the trained model.

A sequence to train on holds the ids of a context as the main job makes them, and the turn as it
is tokenized in the dialogue. Labels are the ids of the turn, and :data:`IGNORED` elsewhere: the
convention of ``transformers`` and ``trl``, whose trainers take such sequences as they are.
"""

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from experiments.arms import conversations_of
from ia_mech.chat.format import ChatFormat
from ia_mech.cli import expanded, shell_word
from ia_mech.collect.plan import build_chat
from ia_mech.data.conversations import Conversation, open_conversations
from ia_mech.errors import UserError
from ia_mech.likelihood.reaction import evidence
from ia_mech.likelihood.scorer import after_each, score_turns
from ia_mech.models.load import ModelSpec, Subject, load_files, recall
from ia_mech.rates.load import open_runs
from ia_mech.run import Run, layout
from ia_mech.run.queries import subsample
from ia_mech.run.sources import source_key
from ia_mech.settings import Settings

if TYPE_CHECKING:
    from transformers import Trainer

LOG = "log.jsonl"
# The rank of LoRA's matrices, which are in all linear layers but the unembedding (Hu et al. 2021,
# arXiv 2106.09685); alpha is twice the rank.
RANK = 16
WORST = -4.0  # bits: the lowest reward of a turn, since evidence has no lower bound

IGNORED = -100

Reward = Callable[..., list[float]]


# -- what comes in --------------------------------------------------------------------------------


def read_conversations(data: str) -> tuple[list[Conversation], Run | None]:
    """Conversations with a response, from a run's folder or a dataset as ``--dataset`` names it.

    Raises:
        UserError: neither a finished run nor a dataset; no conversation has a response.
    """
    if (expanded(data) / layout.RUN).is_file():
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
    """Train on :func:`sequences`."""
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
