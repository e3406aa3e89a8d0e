"""Who is measured by ``benchmarks.sampling``, and on what.

Every contender decodes the same number of tokens from the same contexts. Only ours and llama.cpp
can mix temperatures in a batch and run the prefix once; the others get the easier job of one
temperature, T = 1, in a call of their own for each context.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GenerationConfig

from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import open_conversations
from ia_mech.data.formats import ColumnMap
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Decoded, Row
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.errors import UserError
from ia_mech.models.load import Subject, embedded

TEMPERATURES, POSITIONS, CONTEXTS = (0.5, 0.7, 1.0, 1.3), 5, 4


@dataclass(frozen=True)
class Size:
    """How much is measured: the workload, and what it grows to."""

    context_tokens: int = 231
    rows: int = 33  # per context: greedy + 4 temperatures x 8 samples
    new_tokens: int = 48
    grown_rows: Sequence[int] = (8, 16, 66, 132)
    grown_tokens: Sequence[int] = (12, 24, 96)
    grown_contexts: Sequence[int] = (115, 462)


QUICK = Size(48, 9, 4, grown_rows=(18,), grown_tokens=(8,), grown_contexts=(96,))


@dataclass(frozen=True)
class Contender:
    """``run(new_tokens)`` does the whole job: prefill, decoding and sampling of every row."""

    peer: str
    contexts: int
    run: Callable[[int], object]


@dataclass(frozen=True)
class Workload:
    """The model and the contexts, ``size.context_tokens`` each."""

    subject: Subject
    contexts: list[list[int]]
    size: Size

    @classmethod
    def of(cls, subject: Subject, size: Size) -> "Workload":
        return cls(subject, real_contexts(subject, size.context_tokens, CONTEXTS), size)

    def rows(self, contexts: int) -> list[Row]:
        """Greedy and equally many samples per temperature, for each context."""
        return [row for at in range(contexts) for row in rows_of(at, self.size.rows)]


def real_contexts(subject: Subject, tokens: int, count: int) -> list[list[int]]:
    """The last ``tokens`` of the first ``count`` built-in chat contexts that have as many."""
    chat = ChatFormat(subject.tokenizer)
    source = open_conversations(
        "builtin", limit=None, columns=ColumnMap(), split=None, subset=None, revision=None
    )
    found = (chat.context(conversation.messages).ids for conversation in source)
    enough = (list(ids[-tokens:]) for ids in found if len(ids) >= tokens)
    return [ids for _, ids in zip(range(count), enough, strict=False)]


def rows_of(context: int, count: int) -> list[Row]:
    """Greedy, then samples that go through the temperatures; each sample has its own noise."""
    samples = [divmod(number, len(TEMPERATURES)) for number in range(count - 1)]
    return [Row(context, 0.0, (0, 0))] + [
        Row(context, TEMPERATURES[at], stream_key(0, f"benchmark-{context}", sample))
        for sample, at in samples
    ]


def prefixes(contexts: Sequence[Sequence[int]]) -> list[Prefix]:
    """Contexts with their last positions to be captured."""
    return [Prefix(ids, range(len(ids) - POSITIONS, len(ids))) for ids in contexts]


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def ours(workload: Workload, written: dict[tuple[str, int], list[Decoded]]) -> list[Contender]:
    """The engine as runs use it, and the portable one; what rows wrote is left in ``written``."""
    model, blocks = workload.subject.model, find_blocks(workload.subject.model)

    def contender(peer: str, contexts: int) -> Contender:
        rows = workload.rows(contexts)

        def run(new_tokens: int) -> None:
            prefilled = prefill(model, prefixes(workload.contexts[:contexts]), blocks)
            written[peer, contexts] = decode(
                model, prefilled, rows, [], new_tokens, share=peer == "ours"
            )

        return Contender(peer, contexts, run)

    return [
        contender(peer, n) for n in (1, len(workload.contexts)) for peer in ("ours", "portable")
    ]


def generate(workload: Workload, peer: str, **outputs: bool) -> list[Contender]:
    """``generate`` of transformers; ``outputs`` are what it is asked to return besides tokens."""
    model = workload.subject.model
    batch = torch.tensor([workload.contexts[0]] * workload.size.rows, device=model.device)

    def run(new_tokens: int) -> None:
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            return_dict_in_generate=bool(outputs),
            **outputs,
        )
        model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)

    return [Contender(peer, 1, run)]


def transformer_lens(workload: Workload) -> list[Contender]:
    """The library's own generation loop, with its cache, on the same weights.

    Raises:
        UserError: the library isn't installed.
    """
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise UserError(
            f"transformer-lens can't be imported ({error})", "pip install 'transformer-lens>=4,<5'"
        ) from error
    model = workload.subject.model
    bridge = TransformerBridge.boot_transformers(
        str(embedded.directory()), device=str(model.device), dtype=model.dtype
    )
    batch = torch.tensor([workload.contexts[0]] * workload.size.rows, device=model.device)

    def run(new_tokens: int) -> None:
        bridge.generate(
            batch,
            max_new_tokens=new_tokens,
            stop_at_eos=False,
            do_sample=True,
            temperature=1.0,
            use_past_kv_cache=True,
            return_type="tokens",
            verbose=False,
        )

    return [Contender("transformer-lens", 1, run)]


def llama_cpp(workload: Workload, gguf: Path | None) -> list[Contender]:
    """llama.cpp on the embedded model's 4-bit file, which is fetched unless it is given.

    Raises:
        UserError: the bindings aren't installed, or the file can't be had.
    """
    if workload.subject.device.type != "cpu":
        raise UserError("llama.cpp is measured on CPUs only", "use --device cpu")
    try:
        from benchmarks.sampling.llama import Llama
    except (ImportError, OSError, RuntimeError) as error:  # the last two of its shared library
        raise UserError(
            f"llama-cpp-python can't be imported ({error})",
            "pip install llama-cpp-python; it is compiled then, by a C++ compiler and cmake",
        ) from error
    llama = Llama(_gguf() if gguf is None else gguf, torch.get_num_threads())
    return [
        Contender(
            "llama.cpp",
            contexts,
            llama.job(
                workload.contexts[:contexts],
                [row.temperature for row in rows_of(0, workload.size.rows)],
                workload.size.new_tokens,
            ),
        )
        for contexts in (1, len(workload.contexts))
    ]


def _gguf() -> Path:
    """The embedded model's 4-bit file, kept beside the converted model."""
    kept = embedded.cache_dir() / "models" / Path(embedded.GGUF).name
    if not kept.is_file():
        with TemporaryDirectory(dir=kept.parent) as scratch:
            embedded.gguf_file(Path(scratch)).rename(kept)
    return kept


def contenders(
    workload: Workload,
    peers: Sequence[str],
    gguf: Path | None,
    written: dict[tuple[str, int], list[Decoded]],
) -> tuple[list[Contender], dict[str, str]]:
    """Ours and the peers that can be had; and of those that can't, why and what to do.

    Args:
        workload: what all of them decode.
        peers: which, besides ours.
        gguf: the 4-bit file, None for the embedded model's.
        written: what rows of our engines wrote is left here, by name and number of contexts.
    """
    makers = {
        "generate": lambda: generate(workload, "generate"),
        "generate-captures": lambda: generate(
            workload, "generate-captures", output_hidden_states=True, output_scores=True
        ),
        "transformer-lens": lambda: transformer_lens(workload),
        "llama.cpp": lambda: llama_cpp(workload, gguf),
    }
    found = [one for one in ours(workload, written) if one.peer == "ours" or one.peer in peers]
    missing = {}
    for peer, make in makers.items():
        if peer not in peers:
            continue
        try:
            found += make()
        except UserError as error:
            missing[peer] = str(error)
    return found, missing
