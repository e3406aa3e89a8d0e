"""Tensor parallelism: several processes hold one model between them.

The plan, which weights are split and where sums are taken, is the architecture's own in
``transformers``. All ranks of a group run the same deterministic loop over the same data; the first
one draws the tokens, which the others take over, and writes. The residual stream is whole on every
rank, since each block's output is summed over the ranks, so nothing has to be gathered for it.
"""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ia_mech.errors import UserError

Value = TypeVar("Value")

PATIENCE = timedelta(hours=2)  # ranks load a large model at different speeds

_size = 1  # ranks of this process's group


class OnThisRank(UserError):
    """What is wrong on one rank, which the others don't find."""


def check(size: int, config: Any) -> None:
    """Refuse a number of ranks that a model can't be split among.

    Args:
        size: ranks that are to hold the model.
        config: of its text part.

    Raises:
        UserError: heads that can't be dealt out evenly; an architecture without a plan.
    """
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or groups % size:
        most = math.gcd(heads, groups)
        sizes = ", ".join(str(n) for n in range(2, most + 1) if most % n == 0)
        raise UserError(
            f"--tensor-parallel {size} does not divide the model's {heads} heads of attention and "
            f"{groups} of keys and values",
            f"give one of {sizes}" if sizes else "use --device-map auto",
        )
    if not getattr(config, "base_model_tp_plan", None):
        raise UserError(
            f"transformers has no tensor parallel plan for {config.model_type}",
            "use --device-map auto",
        )


def join(size: int, device: torch.device) -> None:
    """Make this process one of a group of ranks; waits for the others.

    Each group is a world of its own to ``torch.distributed``, so that groups of several shards
    under one torchrun know nothing of each other.
    """
    global _size
    if _size == size:
        return
    store, rank, _ = next(iter(dist.rendezvous("env://")))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"ia_mech-{rank // size}", store),
        rank=rank % size,
        world_size=size,
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    _size = size


def active() -> bool:
    """Whether the model is split among several processes."""
    return _size > 1


def leads() -> bool:
    """Whether this process is the first of its group, the one that draws and writes."""
    return _size == 1 or dist.get_rank() == 0


def barrier() -> None:
    """Wait until all ranks are here."""
    if active():
        dist.barrier()


def of_first(action: Callable[[], Value]) -> Value:
    """What a function returns on the first rank, pickled; it isn't called on the others.

    Raises:
        UserError: on the others, where it raised on the first.
    """
    if not active():
        return action()
    found: list[Any] = [None, False]
    try:
        if leads():
            found = [action(), True]
    finally:
        dist.broadcast_object_list(found, src=0)
    if not found[1]:
        raise UserError("the first rank failed", "see what it said")
    return found[0]


def lost(error: RuntimeError) -> bool:
    """Whether an exception says that another rank ended."""
    return active() and (isinstance(error, dist.DistError) or "onnection" in str(error))


def tokens_of_first(token: Tensor) -> Tensor:
    """The tokens that the first rank drew, in place of this rank's own."""
    if active():
        dist.broadcast(token, src=0)
    return token


def whole(tensor: Tensor) -> Tensor:
    """A weight with the shares of all ranks; every rank has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
