"""The same job done by others: ``transformers`` and TransformerLens.

They can't mix temperatures in a batch, so they get the easier job of one temperature, T = 1.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.sampling.workload import (
    Contender,
    Workload,
    one_line,
    random_contexts,
    release_memory,
)
from ia_mech.engine.installed import installed
from ia_mech.errors import UserError, is_out_of_memory
from ia_mech.models import embedded

# What errors say if a tensor has more numbers than a kernel can count.
TOO_LARGE = ("32-bit", "INT_MAX", "invalid configuration argument")


class Generate(Contender):
    """``generate`` of ``transformers``, called with as many contexts as fit into the memory.

    ``settings`` are those of the ``GenerationConfig`` besides sampling.
    """

    def __init__(self, work: Workload, contexts: int, **settings: Any) -> None:
        super().__init__(work, contexts)
        self.together, self.settings = min(work.task.together, contexts), settings

    def warm_up(self) -> None:
        """One call with all contexts, or with half as many and again half, until it fits."""
        new_tokens = self.work.size.new_tokens if self.work.on_gpu else 2
        tried = []
        while problem := too_much(lambda: self._call(self.work.ids[: self.together], new_tokens)):
            self._forget_compiled()
            release_memory(self.work.device)
            if self.together == 1:
                raise MemoryError(f"not one context fits: {problem}")
            tried.append(str(self.together))
            self.together //= 2
        self.notes = f"{self._engine()}; {self.together} contexts a call"
        self.notes += f" ({', '.join(tried)} don't fit)" if tried else ""

    def run(self, new_tokens: int) -> None:
        ids = self.work.ids[: self.contexts]
        for start in range(0, self.contexts, self.together):
            self._call(ids[start : start + self.together], new_tokens)

    def _call(self, ids: Sequence[Sequence[int]], new_tokens: int) -> None:
        size = self.work.size
        batch = torch.tensor(ids, device=self.work.device)
        config = sampling_config(size.rows, new_tokens, min_new_tokens=new_tokens, **self.settings)
        with generating(self.work) as model:
            written = model.generate(
                inputs=batch, attention_mask=torch.ones_like(batch), generation_config=config
            )
        tokens = written if isinstance(written, torch.Tensor) else written.sequences
        expected = len(ids) * size.rows, size.context_tokens + new_tokens
        if tuple(tokens.shape) != expected:
            raise RuntimeError(f"tokens {tuple(tokens.shape)}, not {expected}")

    def _forget_compiled(self) -> None:
        """Else the next batch would be compiled for any size, which is slower than for its own."""
        if vars(self.work.model).pop("_compiled_call", None) is not None:
            torch.compiler.reset()

    def _engine(self) -> str:
        model = self.work.model
        # transformers compiles by itself where it can, and keeps the compiled call.
        how = "compiled" if hasattr(model, "_compiled_call") else "not compiled"
        static = self.settings.get("cache_implementation") == "static"
        cache = f"static cache, {how}" if static else "dynamic cache"
        return f"{cache}, {installed(model).attention}"


class Continuous(Contender):
    """``transformers``' continuous batching, all contexts in one call.

    Its cache and graphs are made in the warm-up and kept. It also keeps prefixes that it has seen,
    so each call gets other contexts, or only the first one would prefill.
    """

    calls = 0

    def warm_up(self) -> None:
        used: set[str] = set()
        # The library puts the model's own attention back after each call.
        config = self.work.model.config
        hook = self.work.blocks[0].register_forward_pre_hook(
            lambda *_: used.add(config._attn_implementation)
        )
        try:
            self.run(self.work.size.new_tokens)
        finally:
            hook.remove()
        self.notes = f"attention {', '.join(sorted(used))}"

    def run(self, new_tokens: int) -> None:
        self.calls += 1
        size = self.work.size
        ids = random_contexts(self.work.model, self.contexts, size.context_tokens, seed=self.calls)
        with ErrorLog() as errors, generating(self.work) as model:
            results = model.generate_batch(
                inputs=ids,
                generation_config=sampling_config(size.rows, new_tokens),
                persistent_manager=True,
            )
        check_complete(results, self.contexts, size.rows, new_tokens, errors)

    def close(self) -> None:
        # A failed kernel may have left a GPU unusable.
        with contextlib.suppress(RuntimeError), generating(self.work) as model:
            model.destroy_cached_continuous_batching_manager()


@contextlib.contextmanager
def generating(work: Workload) -> Iterator[Any]:
    """The model, whose type doesn't declare ``generate``, with its own attention."""
    with installed(work.model).own_attention():
        yield work.model


def sampling_config(rows: int, new_tokens: int, **settings: Any) -> GenerationConfig:
    """Sampling at T = 1, ``rows`` sequences of each context."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new_tokens,
        num_return_sequences=rows, pad_token_id=0, **settings,
    )  # fmt: skip


def too_much(function: Callable[[], object]) -> str:
    """Run it; returns the error if memory, or a kernel's numbering, was too small for it."""
    try:
        function()
    except Exception as error:
        if not is_out_of_memory(error) and not any(text in str(error) for text in TOO_LARGE):
            raise
        return one_line(error)
    return ""


class ErrorLog(logging.Handler):
    """Collects the errors that continuous batching logs, since it raises none."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("ContinuousBatchingLogger").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ContinuousBatchingLogger").removeHandler(self)


def check_complete(
    results: Mapping[str, Any], contexts: int, rows: int, new_tokens: int, errors: Sequence[str]
) -> None:
    """Continuous batching returns what it has, whatever went wrong: ``results`` by request.

    transformers 5.17 returns one result of each context, though it makes all; 5.23 returns those
    of forked requests, too.

    Raises:
        RuntimeError: ``errors`` were logged, or a result is missing, failed or too short.
    """
    expected = contexts * rows if any("__child#" in name for name in results) else contexts
    problems = list(errors)
    if len(results) != expected:
        problems.append(f"{len(results)} results, not {expected}")
    for name, result in results.items():
        written = len(result.generated_tokens)
        if result.error is not None or written != new_tokens:
            problems.append(f"{name}: {result.error or f'{written} tokens, not {new_tokens}'}")
    if problems:
        raise RuntimeError(f"continuous batching: {problems[0]}")


class TransformerLens(Contender):
    """The library's own generation loop, with its cache, on the embedded model's weights.

    Raises:
        UserError: the library isn't installed, or the model is another one.
    """

    def __init__(self, work: Workload, contexts: int) -> None:
        super().__init__(work, contexts)
        if work.task.model != embedded.NAME:  # the others have random weights
            raise UserError(f"{work.task.model} has no file to load", f"use {embedded.NAME}")
        try:
            from transformer_lens.model_bridge import TransformerBridge
        except ImportError as error:
            raise UserError(
                f"transformer-lens can't be imported ({error})",
                "pip install 'transformer-lens>=4,<5'",
            ) from error
        self.bridge = TransformerBridge.boot_transformers(
            str(embedded.directory()), device=str(work.device), dtype=work.model.dtype
        )

    def run(self, new_tokens: int) -> None:
        for ids in self.work.ids[: self.contexts]:
            self.bridge.generate(
                torch.tensor([ids] * self.work.size.rows, device=self.work.device),
                max_new_tokens=new_tokens,
                stop_at_eos=False,
                do_sample=True,
                temperature=1.0,
                use_past_kv_cache=True,
                return_type="tokens",
                verbose=False,
            )
