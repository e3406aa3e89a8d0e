"""Training on user turns by thin calls of ``trl``: SFT and GRPO, with the rewards of GRPO.

For GRPO (Shao et al. 2024, arXiv 2402.03300) a prompt is a context with its open user header, and a
completion the user turn. The model before training computes the reward, so that it doesn't move
with the policy.
"""

import contextlib
import importlib.util
import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from experiments.organisms import distinct_responses
from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import Conversation
from ia_mech.engine.score import Scored, Turn
from ia_mech.errors import UserError
from ia_mech.likelihood.reaction import evidence
from ia_mech.likelihood.scorer import score
from ia_mech.models.load import ModelSpec, Subject
from ia_mech.untrusted import parse_json

if TYPE_CHECKING:
    from transformers import Trainer

LOG, CARD = "log.jsonl", "post_training.json"
WORST = -4.0  # bits: what a turn may lose by fitting another response; evidence has no lower bound

Reward = Callable[..., list[float]]


# -- what is rewarded -----------------------------------------------------------------------------


def prompts(
    chat: ChatFormat, conversations: Sequence[Conversation], longest: int
) -> tuple[list[dict[str, Any]], dict[str, list[list[int]]]]:
    """Prompts of queries with several responses, and the contexts' ids of each query.

    ``trl`` tokenizes prompts itself; they are texts that its call of the tokenizer turns into
    exactly the ids of the context.

    Raises:
        UserError: no query has two different responses whose contexts have at most ``longest``
            tokens; a context that the tokenizer reads otherwise as a text.
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
            f"no query has two different responses in contexts of at most {longest} tokens",
            "give a run that was sampled with --response generate --responses 4, or raise "
            "--max-tokens",
        )
    return rows, contexts


def _prompt(chat: ChatFormat, text: str, ids: list[int], name: str) -> str:
    """A context's text as the tokenizer has to get it: without what it puts in front by itself."""
    added = chat.template.decode(chat.tokenizer("")["input_ids"])
    for one in (text, text.removeprefix(added)):
        if chat.tokenizer(one)["input_ids"] == ids:
            return one
    raise UserError(
        f"the tokenizer reads context {name} otherwise as a text than in its dialogue",
        "train with sft, which takes token ids",
    )


def after_each(
    scored: Callable[[Sequence[Sequence[int]], list[Turn]], list[Scored]],
    contexts: Sequence[Sequence[int]],
    turns: Sequence[Sequence[int]],
) -> list[list[Scored]]:
    """``[turns][contexts]`` scores of every turn after every context, by the one scorer."""
    count = len(contexts)
    found = scored(contexts, [Turn(k, ids) for ids in turns for k in range(count)])
    return [found[at : at + count] for at in range(0, len(found), count)]


def evidence_reward(
    found: Sequence[Sequence[Scored]], followed: Sequence[int], tokens: int
) -> np.ndarray:
    """``[turns]`` the reward: evidence in bits at T = 1 that a turn's first tokens give for its
    response, at least :data:`WORST`.

    Args:
        found: of :func:`after_each`, by the model before training.
        followed: ``[turns]`` the number of the response.
        tokens: so many.
    """
    whole = [[one.logprobs_raw[:tokens].sum(dtype=np.float64) for one in row] for row in found]
    return evidence(whole, followed).clip(WORST)


def penalties(
    turns: Sequence[str], queries: Sequence[str], sources: Sequence[str], ended: Sequence[bool]
) -> dict[str, list[float]]:
    """What is subtracted from the reward of each turn, by name.

    Args:
        turns: texts.
        queries: of each turn.
        sources: the query's key.
        ended: whether the turn came to its end.
    """
    return {
        "restatement": [restatement(*both) for both in zip(turns, queries, strict=True)],
        "repetition": [repetition(turn) for turn in turns],
        "stock_phrases": stock_phrases(turns, sources),
        "unfinished": [float(not one) for one in ended],
    }


def trigrams(text: str) -> list[tuple[str, ...]]:
    """Runs of three words, in their order."""
    words = re.findall(r"\w+", text.lower())
    return list(zip(words, words[1:], words[2:], strict=False))


def restatement(turn: str, query: str) -> float:
    """The share of the turn's trigrams that its query has; 0 of a turn without any."""
    found, asked = trigrams(turn), set(trigrams(query))
    return sum(one in asked for one in found) / len(found) if found else 0.0


def repetition(turn: str) -> float:
    """The share of the turn's trigrams that stand in it before; 0 of a turn without any."""
    found = trigrams(turn)
    return 1 - len(set(found)) / len(found) if found else 0.0


def stock_phrases(turns: Sequence[str], sources: Sequence[str]) -> list[float]:
    """Of each turn, the share of its trigrams that turns after other queries have, too.

    It is high for generic questions, and rises as a model's turns lose their diversity.
    """
    found = [trigrams(turn) for turn in turns]
    where: dict[tuple[str, ...], set[str]] = {}
    for some, source in zip(found, sources, strict=True):
        for one in some:
            where.setdefault(one, set()).add(source)
    return [sum(len(where[one]) > 1 for one in some) / max(len(some), 1) for some in found]


def rewards(
    reader: Subject, chat: ChatFormat, contexts: Mapping[str, list[list[int]]]
) -> list[Reward]:
    """The reward, then the penalties; each takes a batch as ``trl`` gives it."""

    def bits(completion_ids: list[list[int]], source: list[str], followed: list[int], **_):
        found = np.zeros(len(source))
        rows_of = defaultdict(list)
        for row, name in enumerate(source):
            rows_of[name].append(row)
        for name, rows in rows_of.items():
            turns = [completion_ids[row] for row in rows]
            scores = after_each(partial(score, reader.model), contexts[name], turns)
            found[rows] = evidence_reward(
                scores, [followed[row] for row in rows], max(map(len, turns))
            )
        return found.tolist()

    def penalty(name: str) -> Reward:
        def penalise(completion_ids: list[list[int]], query: list[str], source: list[str], **_):
            texts = [chat.text(ids) for ids in completion_ids]
            ended = [ids[-1] in chat.stop_ids for ids in completion_ids]
            return penalties(texts, query, source, ended)[name]

        penalise.__name__ = name  # under which trl logs it
        return penalise

    return [bits, *map(penalty, penalties([], [], [], []))]


# -- trainers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuning:
    """How weights are changed.

    Attributes:
        rank: of LoRA's matrices, in all linear layers but the unembedding (Hu et al. 2021, arXiv
            2106.09685), with alpha = 2 rank; 0 trains all weights.
        learning_rate: of AdamW, falling linearly to 0.
        batch: sequences of a step.
        seed: of adapters and order.
    """

    rank: int
    learning_rate: float
    batch: int
    seed: int

    def model(self, subject: Subject, chat: ChatFormat) -> dict[str, Any]:
        """What trainers are given of the model. Sequences are padded with a token that ends turns
        if with no other."""
        from peft import LoraConfig

        subject.model.requires_grad_(self.rank == 0)
        tokenizer: Any = subject.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = chat.template.token(chat.stop_ids[0])
        adapter = None
        if self.rank:
            adapter = LoraConfig(
                r=self.rank,
                lora_alpha=2 * self.rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
        model = {"model": subject.model, "processing_class": tokenizer}
        return model | {"peft_config": adapter}

    def arguments(self, folder: Path) -> dict[str, Any]:
        """What trainers are given of the rest."""
        cuda = torch.cuda.is_available()
        return {
            "output_dir": str(folder),
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
    subject: Subject,
    chat: ChatFormat,
    learned: pd.DataFrame,
    tuning: Tuning,
    epochs: float,
    folder: Path,
) -> "Trainer":
    """Train on :func:`sequences`."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **tuning.arguments(folder),
        num_train_epochs=epochs,
        max_length=None,
        train_sampling_strategy="group_by_length",
    )
    columns = Dataset.from_pandas(learned[["input_ids", "labels"]], preserve_index=False)
    trainer = SFTTrainer(args=arguments, train_dataset=columns, **tuning.model(subject, chat))
    trainer.train()
    return trainer


def grpo(
    subject: Subject,
    chat: ChatFormat,
    rows: list[dict[str, Any]],
    given: list[Reward],
    tuning: Tuning,
    folder: Path,
    *,
    penalty: float,
    **how: int,
) -> "Trainer":
    """Train on :func:`prompts` by :func:`rewards`.

    Args:
        penalty: weight of each penalty; that of the reward is 1.
        how: further settings of ``GRPOConfig``.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    kept = subject.model.generation_config.eos_token_id
    subject.model.generation_config.eos_token_id = chat.stop_ids  # where trl ends completions
    arguments = GRPOConfig(
        **tuning.arguments(folder),
        temperature=1.0,
        reward_weights=[1.0, *[-penalty] * (len(given) - 1)],
        **how,
    )
    trainer = GRPOTrainer(
        reward_funcs=given,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        **tuning.model(subject, chat),
    )
    trainer.train()
    subject.model.generation_config.eos_token_id = kept
    return trainer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what trainers print to stderr, without their notices for developers."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def save(trainer: "Trainer", subject: Subject, tuning: Tuning, folder: Path) -> dict[str, Any]:
    """Write the adapter, to be given to ``--adapter``, or the model, for ``--model``, and what was
    logged by step; nothing is pickled. Returns what the card says of the model."""
    model: Any = trainer.model
    if tuning.rank:
        name = subject.spec.name
        base = str(Path(name).resolve()) if Path(name).exists() else name
        model.peft_config["default"].base_model_name_or_path = base
    else:
        subject.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    model.save_pretrained(folder)
    steps = [row for row in trainer.state.log_history if "loss" in row]
    (folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in steps))
    return {"base": subject.describe(), "tuning": asdict(tuning)}


def card_of(spec: ModelSpec) -> dict[str, Any]:
    """What stands beside an adapter or model that was trained here; nothing of any other.

    Raises:
        UserError: the file is damaged.
    """
    file = Path(spec.adapter or spec.name) / CARD
    if not file.is_file():
        return {}
    card = parse_json(file.read_bytes(), str(file), "train the model again")
    if not isinstance(card, dict):
        raise UserError(f"{file} is damaged", "train the model again")
    return card
