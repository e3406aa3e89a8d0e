"""The job: models, their contexts and rows, and how our engine decodes them."""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import open_conversations
from ia_mech.data.formats import ColumnMap
from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.check import TOKENS, check_engine
from ia_mech.engine.decode import Decoded, Row, decode
from ia_mech.engine.installed import install, installed
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.shared import Engine
from ia_mech.engine.state import Prefilled, Prefix, prefill_all
from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.models.load import DTYPES, ModelSpec, load, text_config

TEMPERATURES, POSITIONS = (0.5, 0.7, 1.0, 1.3), 5
QWEN3: dict[str, Any] = {
    "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6,
}  # fmt: skip
TINY_WIDTHS: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
SHAPES: dict[str, Callable[[], Any]] = {  # configurations, which get random weights
    "qwen3-0.6b": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16,
    ),
    "qwen3-4b": lambda: transformers.Qwen3Config(
        **QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32,
    ),
    # Three gated delta layers to one of full attention, as in the family. The widths are close to
    # those of the 4B above and belong to no released checkpoint.
    "qwen3.5-hybrid": lambda: Qwen3_5TextConfig(
        vocab_size=248_320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        tie_word_embeddings=True,
    ),
    "tiny": lambda: transformers.Qwen3Config(**QWEN3 | TINY_WIDTHS, num_hidden_layers=2),
    "tiny-hybrid": lambda: Qwen3_5TextConfig(
        **TINY_WIDTHS, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, tie_word_embeddings=True,
    ),
}  # fmt: skip
TINY = ("tiny", "tiny-hybrid")  # show whether the benchmark runs; the figures mean nothing
MODELS = (embedded.NAME, *SHAPES)


@dataclass(frozen=True)
class Size:
    """How much is decoded.

    Attributes:
        counts: numbers of contexts that are decoded together; ascending.
        context_tokens: of each context.
        rows: of each context; greedy first, then samples at :data:`TEMPERATURES` in turn.
        new_tokens: of each row. The prefill predicts the first of them.
    """

    counts: tuple[int, ...]
    context_tokens: int
    rows: int
    new_tokens: int


@dataclass(frozen=True)
class Task:
    """What one process measures."""

    model: str  # one of MODELS
    contenders: tuple[str, ...]  # keys of ``measure.CONTENDERS``
    rounds: int
    size: Size
    device: str
    dtype: str  # a key of ``DTYPES``
    together: int  # contexts in a call of ``generate``, to begin with


class Workload:
    """The model of a task with its contexts, and the job as our engine does it.

    Attributes:
        model: the embedded model, or one with random weights.
        ids: token ids of the contexts, ``[contexts][context_tokens]``.
        written: rows that our engines wrote, by contender and number of contexts.

    Raises:
        UserError: too few built-in contexts are that long.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.size, self.device = task, task.size, torch.device(task.device)
        self.on_gpu, self._subject = self.device.type == "cuda", None
        if task.model == embedded.NAME:
            self._subject = load(ModelSpec(device=task.device, dtype=task.dtype))
        self.model: PreTrainedModel = (
            self._subject.model
            if self._subject
            else random_model(task.model, DTYPES[task.dtype], self.device)
        )
        self.blocks = find_blocks(self.model)
        install(self.model)
        self.ids = self.contexts(self.size.counts[-1], self.size.context_tokens)
        self.written: dict[tuple[str, int], list[Decoded]] = {}

    def contexts(self, count: int, tokens: int) -> list[list[int]]:
        """The last ``tokens`` of built-in chat contexts; random ids for random weights."""
        if self._subject is None:
            return random_contexts(self.model, count, tokens)
        chat = ChatFormat(self._subject.tokenizer)
        source = open_conversations(
            "builtin", limit=None, columns=ColumnMap(), split=None, subset=None, revision=None
        )
        every = (chat.context(conversation.messages).ids for conversation in source)
        found = list(islice((list(ids[-tokens:]) for ids in every if len(ids) >= tokens), count))
        if len(found) < count:
            raise UserError(
                f"only {len(found)} built-in contexts have {tokens} tokens, not {count}",
                "use a smaller --context-tokens or --contexts",
            )
        return found

    @cached_property
    def engine(self) -> Engine:
        """Chosen and checked as for any run."""
        return check_engine(self.model, self.contexts(1, TOKENS)[0])

    def rows(self, contexts: int) -> list[Row]:
        """All rows of the first contexts."""
        return [row for at in range(contexts) for row in rows_of(at, self.size.rows)]

    def prefilled(self, contexts: int, capture: bool) -> list[Prefilled]:
        """The first contexts, in groups; with ``capture`` all layers at the last positions."""
        ids = self.ids[:contexts]
        last = POSITIONS if capture else 0
        prefixes = [Prefix(one, range(len(one) - last, len(one))) for one in ids]
        # Groups keep the order of contexts that are equally long.
        return prefill_all(self.model, prefixes)[0]

    def decode(self, groups: Sequence[Prefilled], new_tokens: int, share: bool) -> list[Decoded]:
        """Decode all rows of prefilled contexts together.

        Args:
            groups: what :meth:`prefilled` returns.
            new_tokens: of each row.
            share: rows read their context's keys and values in one place, where the engine can.
        """
        rows = self.rows(sum(len(group.logits) for group in groups))
        copied = replace(self.engine, shared=(), within=())
        installed(self.model).engine = self.engine if share else copied
        decoded = decode(self.model, groups, rows, [], new_tokens)
        if any(len(row.token_ids) != new_tokens for row in decoded):
            raise RuntimeError(f"a row has fewer than {new_tokens} tokens")
        return decoded

    def whole_job(self, contexts: int, new_tokens: int, share: bool = True) -> list[Decoded]:
        """Prefill with capture, decode and sample; tokens and captures end up on the host."""
        groups = self.prefilled(contexts, capture=True)
        decoded = self.decode(groups, new_tokens, share)
        for group in groups:
            assert group.residuals is not None  # since they were captured
            group.logits.cpu(), group.residuals.cpu()
        return decoded


class Contender(ABC):
    """Something that is measured on one workload.

    Args:
        work: the job.
        contexts: how many are decoded together.

    Attributes:
        notes: how it runs, for the tables.
    """

    def __init__(self, work: Workload, contexts: int) -> None:
        self.work, self.contexts, self.notes = work, contexts, ""

    @abstractmethod
    def run(self, new_tokens: int) -> object:
        """The whole job with so many tokens per row: prefill, decoding and sampling."""

    def warm_up(self) -> None:
        """Do once what later rounds needn't repeat. Peers on a GPU compile for the full length."""
        self.run(self.work.size.new_tokens if self.work.on_gpu else 2)

    def measure(self) -> dict[str, Any]:
        """One round: values by name, for JSON; ``seconds`` is the time of the whole job."""
        return {"seconds": self.seconds(lambda: self.run(self.work.size.new_tokens))}

    def seconds(self, function: Callable[[], object]) -> float:
        """Seconds of one round, up to the device's last kernel."""
        return timed(function, self.work.device)

    def close(self) -> None:
        """Release what a library keeps between calls."""
        return None


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, up to the device's last kernel."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begun


def rows_of(context: int, count: int) -> list[Row]:
    """Greedy, then samples that go through the temperatures; each sample has its own noise."""
    samples = [divmod(number, len(TEMPERATURES)) for number in range(count - 1)]
    return [Row(context, 0.0, (0, 0))] + [
        Row(context, TEMPERATURES[at], stream_key(0, f"benchmark-{context}", sample))
        for sample, at in samples
    ]


def random_model(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of one of ``SHAPES`` with random weights, made on the device."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(SHAPES[name](), dtype=dtype)
    return model.eval().requires_grad_(False)


def random_contexts(
    model: PreTrainedModel, count: int, tokens: int, seed: int = 1
) -> list[list[int]]:
    """Token ids ``[count][tokens]``, a pure function of ``seed``."""
    vocab = text_config(model.config).vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab, (count, tokens), generator=generator).tolist()


def one_line(error: Exception) -> str:
    """An exception on one line."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())[:200]


def release_memory(device: torch.device) -> None:
    """Return unused memory to the device. Call it outside of ``except``: a traceback holds the
    tensors of its frames."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a failed kernel may have left it unusable
            torch.cuda.empty_cache()
