"""What ``transformers`` offers for the same job: ``generate`` and continuous batching.

Neither can mix temperatures in a batch or reports log-probabilities of what it drew, so they get
the easier job of all rows at T = 1.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from transformers import GenerationConfig

from benchmarks.sampling_cuda import device as devices
from benchmarks.sampling_cuda.contenders import Contender
from benchmarks.sampling_cuda.workload import Workload, random_contexts
from ia_mech.models.load import is_out_of_memory

# What is said where a tensor has more numbers than a kernel can count.
TOO_LARGE = ("32-bit", "INT_MAX", "invalid configuration argument")
LOGGER = "ContinuousBatchingLogger"
CHILD = "__child#"  # in the ids of requests that were forked from another


class Generate(Contender):
    """``generate``, as many contexts in a call as the memory has room for.

    Args:
        work: the job.
        together: contexts in a call to begin with; half of them if that is too much.
        settings: of the ``GenerationConfig``, besides sampling.
    """

    def __init__(self, work: Workload, together: int, **settings) -> None:
        super().__init__(work)
        self.together, self.tried = together, {}
        self.config = sampling_config(work, **settings)

    def warm_up(self) -> float:
        """One call with all contexts, or with half as many and again half, until it fits."""
        while True:
            begun = time.perf_counter()
            problem = too_much(partial(self._call, self.work.ids[: self.together]))
            taken = time.perf_counter() - begun
            if not problem:
                break
            self._forget_compiled()
            devices.tidy(self.work.model.device)
            self.tried[self.together] = problem
            if self.together == 1:
                raise MemoryError(f"not one context fits: {problem}")
            self.together //= 2
        self.notes = {"engine": self._engine(), "together": self.together, "tried": self.tried}
        return taken * -(-len(self.work.ids) // self.together)

    def measure(self) -> dict:
        return {"seconds": self._seconds(self._all)}

    def _all(self) -> None:
        ids = self.work.ids
        for start in range(0, len(ids), self.together):
            self._call(ids[start : start + self.together])

    def _call(self, ids: Sequence[Sequence[int]]) -> None:
        model, size = self.work.model, self.work.size
        batch = torch.tensor(ids, device=model.device)
        mask = torch.ones_like(batch)
        written = model.generate(batch, attention_mask=mask, generation_config=self.config)
        tokens = written if torch.is_tensor(written) else written.sequences
        expected = len(ids) * size.rows, size.context_tokens + size.new_tokens
        if tuple(tokens.shape) != expected:
            raise RuntimeError(f"tokens {tuple(tokens.shape)}, not {expected}")

    def _forget_compiled(self) -> None:
        """Or the next batch would be compiled for any size, which is slower than for its own."""
        if vars(self.work.model).pop("_compiled_call", None) is not None:
            torch.compiler.reset()

    def _engine(self) -> str:
        model = self.work.model
        static = self.config.cache_implementation == "static"
        # transformers compiles by itself where it thinks it can, and keeps the compiled call.
        how = ", compiled" if hasattr(model, "_compiled_call") else ", not compiled"
        cache = f"static cache{how}" if static else "dynamic cache"
        return f"{cache}, {model.config._attn_implementation}"


class Continuous(Contender):
    """``transformers``' continuous batching, all contexts in one call.

    Its cache and graphs are made in the warm-up and kept. It also keeps prefixes that it has seen,
    so each call gets other contexts, or only the first one would prefill.
    """

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.config, self.calls = sampling_config(work), 0

    def warm_up(self) -> float:
        used: set[str] = set()
        block = self.work.blocks[0]
        # The library puts the model's own attention back after each call.
        config = self.work.model.config
        hook = block.register_forward_pre_hook(lambda *_: used.add(config._attn_implementation))
        try:
            taken = super().warm_up()
        finally:
            hook.remove()
        self.notes = {"engine": f"attention {', '.join(sorted(used))}"}
        return taken

    def measure(self) -> dict:
        self.calls += 1
        ids = random_contexts(self.work.model, self.work.size, seed=self.calls)
        return {"seconds": self._seconds(partial(self._call, ids))}

    def _call(self, ids: list[list[int]]) -> None:
        with errors_logged() as errors:
            results = self.work.model.generate_batch(
                ids, generation_config=self.config, persistent_manager=True
            )
        size = self.work.size
        demand_complete(results, size.contexts, size.rows, size.new_tokens, errors)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a device that a failed kernel left unusable
            self.work.model.destroy_cached_continuous_batching_manager()


def sampling_config(work: Workload, **settings) -> GenerationConfig:
    """Sampling at T = 1, as many sequences of each context as it has rows; none stops early."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=work.size.new_tokens,
        num_return_sequences=work.size.rows, pad_token_id=0,
        **settings,
    )  # fmt: skip


def too_much(function: Callable[[], object]) -> str:
    """Run it; returns what was said if memory, or a kernel's numbering, was too small for it."""
    try:
        function()
    except Exception as error:
        if not is_out_of_memory(error) and not any(text in str(error) for text in TOO_LARGE):
            raise
        return told(error)
    return ""


def told(error: BaseException) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@contextlib.contextmanager
def errors_logged() -> Iterator[list[str]]:
    """What continuous batching says went wrong while this lasts: it raises nothing."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def demand_complete(
    results: Mapping[str, object],
    contexts: int,
    rows: int,
    new_tokens: int,
    errors: Sequence[str] = (),
) -> None:
    """Continuous batching returns what it has, whatever went wrong.

    transformers 5.17 returns one result of each context, though it makes all; 5.23 returns the
    others, too.

    Args:
        results: as ``generate_batch`` returns them, by the request's id.
        contexts: that were given.
        rows: of each.
        new_tokens: of each row.
        errors: what was logged meanwhile.

    Raises:
        RuntimeError: something failed, is lacking or is too short.
    """
    if errors:
        raise RuntimeError(f"continuous batching: {errors[0]}")
    forked = any(CHILD in name for name in results)
    expected = contexts * rows if forked else contexts
    if len(results) != expected:
        raise RuntimeError(f"continuous batching: {len(results)} results, not {expected}")
    for name, result in results.items():
        if result.error is not None:
            raise RuntimeError(f"continuous batching: {name}: {result.error}")
        if len(result.generated_tokens) != new_tokens:
            raise RuntimeError(
                f"continuous batching: {name} has {len(result.generated_tokens)} tokens, "
                f"not {new_tokens}"
            )
