"""The attention kernels in Triton's interpreter, if there is Triton, in float64 and in a model."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tiny
import torch
from contract import near_ties
from test_attention import exact
from test_stream import ROWS, STOPS, prefilled_by

from ia_mech.engine.cuda import kernels
from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.decode import decode, decode_stream

TRITON = importlib.util.find_spec("triton") is not None
KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    """A batch and an attention.

    Attributes:
        contexts: of each line; None if it is idle and not a number, -1 if it is idle and isn't.
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


MANY = (*(0,) * 9, None, *(1, 0) * 4, *(0,) * 3, -1)  # seats of one context: 16
CASES = (
    Case(),
    Case(group=1, dim=64, value_dim=64, window=5),
    Case(group=3, dim=80, value_dim=128, window=30, sinks=True),
    Case(group=8, dim=128, value_dim=80, softcap=3.0),
    Case(group=3, contexts=MANY, lengths=(70, 33), softcap=20.0, sinks=True),
    Case(contexts=MANY, lengths=(70, 33), window=36),
    Case(dim=256, value_dim=256, scaling=0.1),
    Case(window=1),
    Case(room=640, lengths=(640, 9, 300), contexts=(0, 2, 1, None), scaling=1.5),
    Case(room=640, lengths=(640, 9, 300), contexts=(0, 2, 1, None), window=350, sinks=True),
    Case(torch.bfloat16, dim=64, value_dim=80, group=3),
    Case(torch.bfloat16, contexts=MANY, lengths=(70, 33), window=36, sinks=True),
    Case(torch.float16, dim=80, value_dim=64, softcap=3.0),
    Case(torch.float16, contexts=MANY, lengths=(70, 33), window=36),
    Case(torch.float16, room=640, lengths=(640, 9, 300), contexts=(0, 2, 1, None)),
)


def batch(case: Case) -> dict:
    """What :func:`kernels.attend` is given, on the CPU.

    Whatever nobody may look at is not a number: a token that isn't there, a free slot, the query
    and the own tokens of an idle line, or of some of them.
    """
    lines, slots = len(case.contexts), len(case.lengths) + 1
    generator = torch.Generator().manual_seed(lines)

    def drawn(*shape) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    seats = max(case.contexts.count(context) for context in range(slots - 1))
    seating, sizes = Seating(slots), Sizes(lines, slots, seats, case.room, case.own)
    assert [seating.hold(context) for context in range(slots - 1)] == [*range(slots - 1)]
    held = [None if context == -1 else context for context in case.contexts]
    line_at, seat_of = map(torch.from_numpy, seating.tables(held, sizes))
    place = torch.arange(lines) * 7 % case.own
    query = drawn(lines, KV_HEADS * case.group, 1, case.dim)
    own, prefix = (
        tuple(drawn(count, KV_HEADS, room, dim) for dim in (case.dim, case.value_dim))
        for count, room in ((lines, case.own), (slots, case.room))
    )
    nobody = torch.tensor([context is None for context in case.contexts])
    query[nobody] = torch.nan
    for tensor in own:
        tensor[nobody] = torch.nan
        for line in range(lines):
            tensor[line, :, place[line] + 1 :] = torch.nan
    for tensor in prefix:
        for slot, tokens in enumerate([*case.lengths, 0]):
            tensor[slot, :, tokens:] = torch.nan
    return {
        "query": query,
        "own": own,
        "prefix": prefix,
        "place": place,
        "length": torch.tensor([*case.lengths, 1]),
        "line_at": line_at.flatten(),
        "seat_of": seat_of,
        "sinks": 3 * drawn(query.shape[1]) if case.sinks else None,
    }


def expected(case: Case, given: dict, line: int) -> torch.Tensor:
    """``[1, heads, 1, value_dim]`` of a line, in float64."""
    context = case.contexts[line]
    tokens = 0 if context == -1 else case.lengths[context]
    key, value = (
        torch.cat([p[context, :, :tokens], o[line, :, : given["place"][line] + 1]], 1)[None]
        for p, o in zip(given["prefix"], given["own"], strict=True)
    )
    keys = key.shape[2]
    unseen = torch.arange(keys) < keys - (case.window or keys)
    numbers = {"scaling": case.scaling, "softcap": case.softcap, "sinks": given["sinks"]}
    query = given["query"][line : line + 1]
    return exact(query, key.double(), value.double(), unseen, **numbers)


def difference(case: Case, device: str) -> float:
    """The largest one from float64, relative to the largest output."""

    def there(value):
        if isinstance(value, tuple):
            return tuple(map(there, value))
        return value if value is None else value.to(device)

    given = batch(case)
    numbers = {"scaling": case.scaling, "softcap": case.softcap, "window": case.window}
    there_given = {name: there(value) for name, value in given.items()}
    ours = kernels.attend(**there_given, **numbers).cpu()
    lines = [line for line, context in enumerate(case.contexts) if context is not None]
    theirs = torch.cat([expected(case, given, line) for line in lines])
    assert ours.dtype == case.dtype and ours[lines].shape == theirs.shape
    worst = (ours[lines].double() - theirs).abs().nan_to_num(torch.inf).max()
    return float(worst / theirs.abs().max())


def mend_the_interpreter() -> None:
    """Triton's interpreter (3.9) multiplies the bits of bfloat16 as if they were integers."""
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


def check(device: str, cases: Sequence[Case] = CASES) -> None:
    """Asserts that the kernels are right."""
    for case in cases:
        allowed = max(2e-6, torch.finfo(case.dtype).eps if case.dtype.itemsize < 4 else 0.0)
        assert (found := difference(case, device)) < allowed, (case, found)


def check_model() -> None:
    """Asserts that a model's rows are the loop's, by kernels on the CPU."""
    honest, asked = kernels.attend, []
    kernels.usable = lambda device, dtype: True
    kernels.attend = lambda *given, **named: asked.append(0) or honest(*given, **named)
    model, lengths = tiny.model("llama"), (9, 5, 31)
    rows = [replace(row, context=row.context % 3) for row in ROWS[:7]]
    loops = decode(model, prefilled_by(model, lengths), rows, STOPS, 6)
    sizes = Sizes.of_rows([row.context for row in rows], 4, 31, 6)
    ours = decode_stream(
        model, [prefilled_by(model, lengths)], rows, STOPS, 6, width=4, static=sizes
    )
    assert near_ties(model, lengths, rows, ours, loops) <= 1 and asked


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
    monkeypatch.setattr("ia_mech.engine.cuda.fused.problem", lambda device: "")
    assert kernels.usable(gpu, torch.bfloat16) is TRITON
    assert not kernels.usable(gpu, torch.float64)
    assert not kernels.usable(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setenv("IA_MECH_TRITON", "0")
    assert not kernels.usable(gpu, torch.bfloat16)


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
