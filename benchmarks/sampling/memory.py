"""Bytes of keys and values while rows are decoded: expected, held by the caches, and in all.

The process's own growth is measured in a child, so that nothing which ran before it is counted or
hidden: Linux keeps the peak of a process's resident memory and sets it back on request. Memory that
a child freed before must not be used again unseen either, so its large blocks go back to the system
when they are freed (glibc's MALLOC_MMAP_THRESHOLD_).
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, ModuleType

import torch
from torch import Tensor, nn

from benchmarks.sampling.peers import CONTEXTS, Size, Workload, prefixes
from benchmarks.sampling.results import Held
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.decode import decode
from ia_mech.engine.prefill import expand, prefill
from ia_mech.models.load import ModelSpec, load, text_config

MAPPED_FROM = 2**20  # bytes; smaller blocks may stay with the process
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(spec: ModelSpec, size: Size) -> list[Held]:
    """Of the shared and the portable engine, for one and for all contexts."""
    found = []
    for count in (1, CONTEXTS):
        for shared in (True, False):
            asked = {"spec": dataclasses.asdict(spec), "size": dataclasses.asdict(size)}
            asked |= {"contexts": count, "shared": shared}
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.sampling.memory", json.dumps(asked)],
                env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM)},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found.append(Held(**json.loads(done.stdout)))
    return found


def expected_bytes(model, contexts: int, context_tokens: int, rows: int, new_tokens: int) -> int:
    """Of every context once and every row's own tokens, from the configuration."""
    config = text_config(model.config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return token * (contexts * context_tokens + rows * new_tokens)


def held_bytes(roots: Iterable[object]) -> int:
    """Bytes of the distinct storages of all tensors that can be reached from some objects.

    Attributes, lists, tuples, sets and dictionaries are followed; modules of a model are not.
    """
    storages, seen, ahead = {}, set(), list(roots)
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, nn.Module | type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            storages[one.device, storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            ahead += one.values()
        elif isinstance(one, list | tuple | set):
            ahead += one
        elif hasattr(one, "__dict__"):
            ahead += vars(one).values()
    return sum(storages.values())


def _child(spec: ModelSpec, size: Size, contexts: int, shared: bool) -> Held:
    workload = Workload.of(load(spec), size)
    model, rows = workload.subject.model, workload.rows(contexts)
    blocks = find_blocks(model)
    wanted = prefixes(workload.contexts[:contexts])

    def run(rows: list, new_tokens: int) -> None:
        prefilled = prefill(model, wanted[: rows[-1].context + 1], blocks)
        decode(model, prefilled, rows, [], new_tokens, share=shared)

    run(rows[:2], 2)  # what is made once for all is made: reordered weights, the threads' own
    before = _reset_peak() if model.device.type == "cpu" else None
    run(rows, size.new_tokens)
    peak = None if before is None else _resident("VmHWM") - before

    prefilled = prefill(model, wanted)
    index = torch.tensor([row.context for row in rows], device=model.device)
    state = expand(prefilled.state, index, capacity=size.new_tokens, share=shared)
    return Held(
        contexts,
        shared,
        expected_bytes(model, contexts, size.context_tokens, len(rows), size.new_tokens),
        held_bytes([prefilled.state.cache.layers, state.cache.layers]),
        peak,
    )


def _reset_peak() -> int | None:
    """The process's resident bytes, from which its peak is counted anew; None if not on Linux."""
    try:
        CLEAR.write_text("5")
        return _resident("VmRSS")
    except OSError:
        return None


def _resident(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    held = _child(
        ModelSpec(**asked["spec"]), Size(**asked["size"]), asked["contexts"], asked["shared"]
    )
    print(json.dumps(dataclasses.asdict(held)))
