"""Captured steps against plain ones, on a CPU: with the kernels' definition in plain PyTorch, and in
a few cases with the kernels. A tape (``tape.py``) stands for a CUDA graph."""

import contextlib
import ctypes
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tape
import tiny
import torch
from contract import near_ties, prefilled
from torch import Tensor

from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import installed
from ia_mech.engine.memory import kept
from ia_mech.engine.sampling import Draw, draw_tokens, stream_key

pytest.importorskip("triton")

from ia_mech.engine import attend_kernel, captured, draw_kernel  # noqa: E402
from ia_mech.engine.attend_kernel import Prefixes  # noqa: E402

LENGTHS = (3, 5, 9, 14, 17, 23)
STOPS = [tiny.EOS, *range(88, 97)]
ROWS = [
    Row(context, temperature, stream_key(1, f"s{context}", 0), drawn=drawn)
    for context in range(6)
    for temperature, drawn in ((0.0, None), (0.7, None), (1.3, 2))
]


KERNELS: list[bool] = []  # whether the kernels are used, and not their definition


def at(address: int, kv_heads: int, head_tokens: int, tokens: int, dim: int) -> Tensor:
    """``[kv_heads, tokens, dim]`` float32 that begin at an address."""
    count = ((kv_heads - 1) * head_tokens + tokens) * dim
    flat = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
    return flat.as_strided((kv_heads, tokens, dim), (head_tokens * dim, dim, 1))


@torch.library.custom_op("ia_mech_tests::attend", mutates_args=("own_key", "own_value"))
def plain_attend(
    query: Tensor, new_key: Tensor, new_value: Tensor, own_key: Tensor, own_value: Tensor,
    prefix: list[Tensor], tile_context: Tensor, tile_rows: Tensor, places: Tensor, ages: Tensor,
    scaling: float, softcap: float | None, window: int | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """What ``attend_kernel.attend`` is to compute, row by row."""
    if KERNELS:
        return attend_kernel.attend(
            query, new_key, new_value, own_key, own_value, Prefixes(*prefix), tile_context,
            tile_rows, places, ages, scaling=scaling, softcap=softcap, window=window, sinks=sinks,
        )  # fmt: skip
    _, kv_heads, _, dim = own_key.shape
    group = query.shape[1] // kv_heads
    output = query.new_full((*query.shape[:2], own_value.shape[-1]), torch.nan)
    for context, rows in zip(tile_context.tolist(), tile_rows.tolist(), strict=True):
        for row in [row for row in rows if row >= 0 and context >= 0]:
            place, age = int(places[row]), int(ages[row])
            own_key[place, :, age], own_value[place, :, age] = new_key[row], new_value[row]
            key_at, value_at, head, begin, stop = (int(one[context]) for one in prefix)
            key, value = (
                torch.cat([at(address, kv_heads, head, stop, states.shape[-1])[:, begin:],
                           states[place, :, : age + 1]], 1).repeat_interleave(group, 0)
                for address, states in ((key_at, own_key), (value_at, own_value))
            )  # fmt: skip
            scores = (key @ query[row, :, :, None])[..., 0] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if window is not None:
                scores[:, :-window] = -torch.inf
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None]], -1)
            weights = scores.softmax(-1)[:, : key.shape[1]]
            output[row] = (weights[:, None] @ value)[:, 0]
    return output


@torch.library.custom_op(
    "ia_mech_tests::draw", mutates_args=("token", "logprob", "tempered", "rank", "margin")
)
def plain_draw(
    logits: Tensor, temperature: Tensor, drawn: Tensor, stream: Tensor, step: Tensor,
    token: Tensor, logprob: Tensor, tempered: Tensor, rank: Tensor, margin: Tensor,
) -> None:  # fmt: skip
    """What ``draw_kernel.draw`` is to compute."""
    if KERNELS:
        out = Draw(token, logprob, tempered, rank, margin)
        draw_kernel.draw(logits, temperature, drawn, stream, step, out=out)
        return
    temperature = temperature.where(step < drawn, 0.0)
    found = draw_tokens(logits.float(), temperature, stream, step[:, None])
    for to, value in zip((token, logprob, tempered, rank, margin), vars(found).values()):
        to.copy_(value)


def attend(*tensors, scaling, softcap, window, sinks):
    tensors = [list(one) if isinstance(one, Prefixes) else one for one in tensors]
    return plain_attend(*tensors, float(scaling), softcap, window, sinks)


def draw(logits, temperature, drawn, stream, step, *, out=None):
    if out is None:
        float32 = [torch.empty_like(temperature) for _ in range(3)]
        out = Draw(torch.empty_like(step), *float32[:2], torch.empty_like(step), float32[2])
    plain_draw(logits, temperature, drawn, stream, step, *vars(out).values())
    return out


def uncaptured(step, _before):
    """In place of ``captured.capture``: the step is made anew each time."""
    step()
    return SimpleNamespace(replay=step)


@pytest.fixture
def capturing(monkeypatch):
    """Whatever is decoded is decoded by captured steps, or by ``capture``'s alternative."""
    monkeypatch.setattr(captured, "attend", attend)
    monkeypatch.setattr(captured, "draw", draw)

    @contextlib.contextmanager
    def made(model, capture=tape.record, kernels=False):
        about = installed(model)
        before, about.engine = about.engine, replace(about.engine, captured=True)
        monkeypatch.setattr(captured, "capture", capture)
        KERNELS[:] = [True] * kernels
        try:
            yield about
        finally:
            about.engine = before
            kept.clear()

    return made


def groups_of(model):
    return [prefilled(model, LENGTHS[:4]), prefilled(model, LENGTHS[4:])]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt_oss", "gemma4"])
@pytest.mark.parametrize("capture", [uncaptured, tape.record])
def test_rows_that_end_and_join_are_as_by_plain_steps(architecture, capture, capturing):
    model, steps = tiny.model(architecture), []
    groups = groups_of(model)
    plain = decode(model, groups, ROWS, STOPS, 9, together=11)
    with capturing(model, capture) as made:
        for _ in range(2):  # the second time with the graphs of the first
            found = decode(
                model, groups, ROWS, STOPS, 9, together=11, on_step=lambda *n: steps.append(n)
            )
            print(made.engine.uncaptured)
            assert near_ties(model, LENGTHS, ROWS, found, plain) == 0
    assert len({len(row.token_ids) for row in plain}) > 3
