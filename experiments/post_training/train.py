"""Fine-tuning by ``trl`` and ``peft``, and what is left on disk."""

import contextlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ia_mech.chat.format import ChatFormat
from ia_mech.display import COLOURS, title_axes
from ia_mech.errors import UserError
from ia_mech.models.load import Subject, load
from ia_mech.untrusted import parse_json

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import Trainer

    from ia_mech.models.load import ModelSpec

LOG, SETTINGS = "log.jsonl", "post_training.json"


@dataclass(frozen=True)
class Tuning:
    """How weights are changed.

    Attributes:
        rank: of LoRA's matrices, in all linear layers but the unembedding; 0 tunes all weights.
        learning_rate: of AdamW, falling linearly to 0.
        batch: sequences of a step.
        seed: of adapters and order.
    """

    rank: int
    learning_rate: float
    batch: int
    seed: int

    def adapter(self) -> "LoraConfig | None":
        """The adapter's configuration (Hu et al. 2021, arXiv 2106.09685), with alpha = 2 rank."""
        from peft import LoraConfig

        if not self.rank:
            return None
        return LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )

    def arguments(self, folder: Path) -> dict[str, Any]:
        """What all trainers are given."""
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


def trainable(spec: "ModelSpec", chat: ChatFormat, tuning: Tuning) -> Subject:
    """The model to train; sequences are padded with a token that ends turns if with no other."""
    subject = load(spec)
    subject.model.requires_grad_(tuning.rank == 0)
    tokenizer: Any = subject.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = chat.template.token(chat.stop_ids[0])
    return subject


def sft(
    subject: Subject, sequences: pd.DataFrame, tuning: Tuning, epochs: float, folder: Path
) -> "Trainer":
    """Train on sequences (:func:`experiments.post_training.data.sequences`)."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **tuning.arguments(folder),
        num_train_epochs=epochs,
        max_length=None,
        train_sampling_strategy="group_by_length",
    )
    columns = sequences[["input_ids", "labels"]]
    trainer = SFTTrainer(
        subject.model,
        args=arguments,
        train_dataset=Dataset.from_pandas(columns, preserve_index=False),
        processing_class=subject.tokenizer,
        peft_config=tuning.adapter(),
    )
    trainer.train()
    return trainer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what trainers print to stderr, without their notices for developers."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def save(
    trainer: "Trainer", subject: Subject, tuning: Tuning, about: dict[str, Any], folder: Path
) -> None:
    """Write adapter or model, curves and settings; nothing is pickled.

    Args:
        trainer: after training.
        subject: what was trained.
        tuning: how.
        about: further settings.
        folder: of the adapter, to be given to ``--adapter``, or of the model, for ``--model``.
    """
    model: Any = trainer.model
    if tuning.rank:
        model.peft_config["default"].base_model_name_or_path = _place(subject.spec.name)
        model.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
        subject.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
    curves = [row for row in trainer.state.log_history if "loss" in row]
    (folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in curves))
    known = {"base": subject.describe(), "tuning": asdict(tuning)} | about
    (folder / SETTINGS).write_text(json.dumps(known, indent=1) + "\n")


def settings_of(spec: "ModelSpec") -> dict[str, Any]:
    """What :func:`save` left beside the adapter or model; nothing of one that was not tuned here.

    Raises:
        UserError: the file is damaged.
    """
    file = Path(spec.adapter or spec.name) / SETTINGS
    if not file.is_file():
        return {}
    settings = parse_json(file.read_bytes(), str(file), "train the model again")
    if not isinstance(settings, dict):
        raise UserError(f"{file} is damaged", "train the model again")
    return settings


def _place(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name


def curves(trainer: "Trainer", names: Sequence[str]) -> Figure:
    """Logged values by step."""
    rows = pd.DataFrame(trainer.state.log_history)
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for colour, name in zip(COLOURS, [name for name in names if name in rows], strict=False):
        at = rows[rows[name].notna()]
        label = name.removeprefix("rewards/").removesuffix("/mean")
        axes.plot(at["step"], at[name], color=colour, label=label)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    title_axes(axes, "training")
    return figure


def curve(trainer: "Trainer", names: Sequence[str]) -> str:
    """First and last fifth of the logged values, in a line."""
    rows = pd.DataFrame(trainer.state.log_history)
    fifth = max(1, len(rows) // 5)
    return ", ".join(
        f"{name} {rows[name].dropna().head(fifth).mean():.3f} → "
        f"{rows[name].dropna().tail(fifth).mean():.3f}"
        for name in names
        if name in rows
    )
