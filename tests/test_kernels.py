"""The attention kernels in Triton's interpreter, if there is Triton, in float64 and in a model."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import tiny
import torch
from test_attention import exact
from test_stream import ROWS, STOPS, near_ties, prefilled_by

from ia_mech.engine.cuda import kernels
from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.loop import decode, decode_stream

TRITON = importlib.util.find_spec("triton") is not None
KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    """A batch and an attention.

    Attributes:
        contexts: of each line, None if it is idle.
        lengths: of the contexts' prefixes; there is a slot more, that is free.
        room: of prefixes.
        own: room of the lines' own tokens.
    """

    dtype: torch.dtype = torch.float32
    group: int = 2
    dim: int = 8
    value_dim: int = 8
    contexts: tuple[int | None, ...] = (None, 1, 0, 1)
    lengths: tuple[int, ...] = (9, 40)
    room: int = 128
    own: int = 40
    scaling: float = 0.4
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None


MANY = (*(0,) * 9, None, *(1, 0) * 4, *(0,) * 3)  # seats of one context: 16
CASES = (
    Case(),
    Case(group=1, dim=64, value_dim=64, window=5),
    Case(group=3, dim=80, value_dim=128, window=30, sinks=True),
    Case(group=8, dim=128, value_dim=80, softcap=3.0),
    Case(group=3, contexts=MANY, lengths=(70, 33), softcap=20.0, sinks=True),
    Case(contexts=MANY, lengths=(70, 33), window=36),
    Case(window=1),
    Case(room=640, lengths=(640, 9, 300), contexts=(0, 2, 1, None), scaling=1.5),
    Case(room=640, lengths=(640, 9, 300), contexts=(0, 2, 1, None), window=350, sinks=True),
    Case(torch.bfloat16, dim=64, value_dim=80, group=3),
    Case(torch.bfloat16, contexts=MANY, lengths=(70, 33), window=36, sinks=True),
    Case(torch.float16, dim=80, value_dim=64, softcap=3.0),
    Case(torch.float16, contexts=MANY, lengths=(70, 33), window=36),
)


def differences(case: Case, device: str) -> float:
    """The largest one from float64, relative to the largest output.

    Whatever nobody may look at is not a number: a token that isn't there, a free slot, the query
    and the own tokens of an idle line.
    """
    lines, slots = len(case.contexts), len(case.lengths) + 1
    seats = max(case.contexts.count(n) for n in range(slots - 1))
    sizes = Sizes(lines, slots, seats, case.room, case.own)
    generator = torch.Generator().manual_seed(lines)

    def drawn(*shape) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    seating = Seating(slots)
    for context in range(slots - 1):
        assert seating.hold(context) == context
    line_at, seat_of = map(torch.from_numpy, seating.tables(case.contexts, sizes))
    place = torch.arange(lines) * 7 % case.own
    length = torch.tensor([*case.lengths, 1])
    dims = case.dim, case.value_dim
    query = drawn(lines, KV_HEADS * case.group, 1, case.dim)
    own = tuple(drawn(lines, KV_HEADS, case.own, dim) for dim in dims)
    prefix = tuple(drawn(slots, KV_HEADS, case.room, dim) for dim in dims)
    sinks = drawn(query.shape[1]) if case.sinks else None
    for line, context in enumerate(case.contexts):
        (query if context is None else query[:0])[line : line + 1] = torch.nan
        for tensor in own:
            tensor[line, :, 0 if context is None else place[line] + 1 :] = torch.nan
    for tensor in prefix:
        for slot, tokens in enumerate([*case.lengths, 0]):
            tensor[slot, :, tokens:] = torch.nan

    def there(value):
        return tuple(map(there, value)) if isinstance(value, tuple) else value.to(device)

    numbers = {"scaling": case.scaling, "softcap": case.softcap}
    ours = kernels.attend(
        there(query),
        there(own),
        there(prefix),
        place=there(place),
        length=there(length),
        line_at=there(line_at.flatten()),
        seat_of=there(seat_of),
        sinks=None if sinks is None else there(sinks),
        window=case.window,
        **numbers,
    ).cpu()
    assert ours.dtype == case.dtype and ours.shape == (*query.shape[:3], case.value_dim)
    worst = largest = 0.0
    for line, context in enumerate(case.contexts):
        if context is None:
            continue
        key, value = (
            torch.cat([p[context, :, : length[context]], o[line, :, : place[line] + 1]], 1)[None]
            for p, o in zip(prefix, own, strict=True)
        )
        unseen = torch.arange(key.shape[2]) < key.shape[2] - (case.window or key.shape[2])
        asked = query[line : line + 1]
        theirs = exact(asked, key.double(), value.double(), unseen, sinks=sinks, **numbers)
        worst = max(worst, float((ours[line].double() - theirs).abs().nan_to_num(torch.inf).max()))
        largest = max(largest, float(theirs.abs().max()))
    return worst / largest


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 17, 66, 1000])
def test_a_tile_fits_on_small_gpus(queries, dim, item):
    """Queries, and keys and values in two stages."""
    rows, columns, warps = kernels.tile(queries, dim, item)
    padded = 1 << (dim - 1).bit_length()
    assert padded * item * (rows + 2 * 2 * columns) <= 96 * 2**10 and warps in (4, 8)
    assert 16 <= rows <= 64 and 16 <= columns <= 64 and rows / 2 < max(queries, 32)


def test_prefixes_are_split_where_there_are_few_programs():
    assert kernels.split(slots=64, kv_heads=8, queries=66, room=2048) == 1
    assert kernels.split(slots=2, kv_heads=8, queries=66, room=2048) == 8
    assert kernels.split(slots=1, kv_heads=1, queries=1, room=640) == 2
    assert kernels.split(slots=1, kv_heads=1, queries=1, room=128) == 1


def test_kernels_are_for_gpus_with_triton(monkeypatch):
    gpu = torch.device("cuda")
    assert kernels.usable(gpu, torch.bfloat16) is TRITON
    assert not kernels.usable(gpu, torch.float64)
    assert not kernels.usable(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setenv("IA_MECH_TRITON", "0")
    assert not kernels.usable(gpu, torch.bfloat16)


def mend_the_interpreter() -> None:
    """Triton's interpreter (3.9) multiplies the bits of bfloat16 as if they were integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    honest = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder, a, b, *rest):
        return honest(builder, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def check(device: str) -> None:
    """Asserts that the kernels are right in all cases."""
    for case in CASES:
        allowed = max(2e-6, torch.finfo(case.dtype).eps if case.dtype.itemsize < 4 else 0.0)
        assert (found := differences(case, device)) < allowed, (case, found)


def check_model() -> None:
    """Asserts that a model's rows are the loop's, by kernels on the CPU."""
    kernels.usable = lambda device, dtype: True
    model, lengths = tiny.model("llama"), (9, 5, 31)
    rows = [replace(row, context=row.context % 3) for row in ROWS[:7]]
    loops = decode(model, prefilled_by(model, lengths), rows, STOPS, 6)
    ours = decode_stream(
        model, [prefilled_by(model, lengths)], rows, STOPS, 6, width=4, graphs=True, longest=31
    )
    assert near_ties(ours, loops) <= 1


@pytest.mark.skipif(not TRITON, reason="Triton isn't installed, which comes with PyTorch for CUDA")
@pytest.mark.parametrize("call", ["mend_the_interpreter(); t.check('cpu')", "check_model()"])
def test_the_kernels_in_the_interpreter(call):
    """In a process of its own: Triton decides on import whether it interprets."""
    paths = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, "-c", f"import test_kernels as t; t.{call}"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        check=True,
    )
