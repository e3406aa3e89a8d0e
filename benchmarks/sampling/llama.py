"""llama.cpp at the benchmark's workload, through the bindings of ``llama-cpp-python``.

The cheapest way that its interface offers: each context is prefilled once and its cells are copied
to the rows that continue it, then all rows are decoded in one batch per step. Every row keeps a
cache of its own: one cache for all is as fast with 33 rows, but has each row pass over all other
rows' tokens and takes half as long again with 132. Memory for the caches is allocated beforehand,
outside of what is timed.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import llama_cpp
import numpy as np

from ia_mech.errors import UserError

CACHE_STEP = 256  # llama.cpp rounds the length of a cache up to a multiple of this

# Kept for good: llama.cpp calls it, and would else write pages about the model to stderr.
_silent = llama_cpp.llama_log_callback(lambda level, text, data: None)


def job(
    gguf: Path,
    contexts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    most_tokens: int,
    threads: int,
) -> Callable[[int], np.ndarray]:
    """A function of the number of new tokens, which returns them: ``[rows, new_tokens]``.

    Args:
        gguf: the model's file, loaded once for all jobs.
        contexts: token ids, as many for each context.
        temperatures: of the rows that continue each context, 0 for greedy.
        most_tokens: the largest number of new tokens.
        threads: for single tokens and for batches.

    Raises:
        UserError: the file can't be loaded, or memory is lacking.
    """
    model = load(gguf)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    length, per_context = len(contexts[0]), len(temperatures)
    rows = len(contexts) * per_context
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = rows * -(-(length + most_tokens) // CACHE_STEP) * CACHE_STEP
    settings.n_seq_max, settings.kv_unified = rows, False
    settings.n_batch = settings.n_ubatch = max(length, rows)
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise UserError("llama.cpp could not allocate its caches", "leave it out of --contenders")
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
    firsts = [at * per_context for at in range(len(contexts))]  # the row that is prefilled
    all_temperatures = np.tile(np.asarray(temperatures, np.float32), len(contexts))

    def forward(tokens, positions, rows, wanted) -> np.ndarray:
        """Logits ``[wanted, vocab]``, in llama.cpp's memory; all arguments ``[tokens]``."""
        count = batch.n_tokens = len(tokens)
        for field, values in (
            (batch.token, tokens),
            (batch.pos, positions),
            (batch.logits, wanted),
            (batch.n_seq_id, 1),
        ):
            np.ctypeslib.as_array(field, (count,))[:] = values
        for at, row in enumerate(rows):
            batch.seq_id[at][0] = row
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(logits, (int(np.sum(wanted)), vocab))

    def run(new_tokens: int) -> np.ndarray:
        random = np.random.default_rng(0)
        llama_cpp.llama_memory_clear(memory, False)
        last = np.arange(length) == length - 1
        logits = np.concatenate(
            [
                np.repeat(forward(ids, np.arange(length), [row] * length, last), per_context, 0)
                for row, ids in zip(firsts, contexts, strict=True)
            ]
        )
        for row, more in product(firsts, range(1, per_context)):
            llama_cpp.llama_memory_seq_cp(memory, row, row + more, -1, -1)
        written = [draw(logits, all_temperatures, random)]
        for step in range(new_tokens - 1):
            position = np.full(rows, length + step)
            logits = forward(written[-1], position, range(rows), np.ones(rows, bool))
            written.append(draw(logits, all_temperatures, random))
        return np.stack(written, axis=1)

    return run


@cache
def load(gguf: Path):
    """The model in a file.

    Raises:
        UserError: llama.cpp can't load it.
    """
    llama_cpp.llama_log_set(_silent, None)
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), settings)
    if not model:
        raise UserError(f"{gguf} could not be loaded by llama.cpp", "give --gguf another file")
    return model


def draw(logits: np.ndarray, temperatures: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One token per row by the inverse of its cumulative distribution; ``logits`` are overwritten.

    A third faster than llama.cpp's own samplers, which go over a list of candidates.

    Args:
        logits: ``[rows, vocab]`` float32.
        temperatures: ``[rows]`` float32, 0 for greedy.
        random: where uniform numbers come from.
    """
    tokens = np.empty(len(logits), dtype=np.int64)
    for at, (row, temperature) in enumerate(zip(logits, temperatures, strict=True)):
        if temperature == 0:
            tokens[at] = row.argmax()
            continue
        row -= row.max()
        row /= temperature
        np.cumsum(np.exp(row, out=row), out=row)
        tokens[at] = row.searchsorted(random.random() * row[-1], side="right")
    return np.minimum(tokens, logits.shape[1] - 1)
