"""The Triton kernels against the engine's own draw and attention: on a GPU where there is one, else
in Triton's interpreter. They are also compiled for GPUs that aren't there.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import two_level

from ia_mech.engine.sampling import Draw, draw_tokens, philox
from ia_mech.engine.shared import attend, merge

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from ia_mech.engine import attend_kernel, draw_kernel  # noqa: E402
from ia_mech.engine.attend_kernel import Prefixes, Tiling  # noqa: E402

# Shapes of ``compiled.py`` beside Qwen3's.
OTHERS = ["smollm2", "gpt_oss", "gemma2", "gemma4", "float32 64", "float32 128", "float32 256"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- the draw --------------------------------------------------------------------------------------


@triton.jit
def store_words(stream, step, out, FIRST: tl.constexpr, LEVEL: tl.constexpr):
    key = tl.load(stream) | (tl.load(stream + 1) << 32)
    counter = FIRST + tl.arange(0, 16)
    words = draw_kernel._words(key, counter, tl.load(step).to(tl.int32), LEVEL)
    tl.store(out + tl.arange(0, 64), words.to(tl.int64))


@pytest.mark.parametrize("stream", [[0, 0], [2**32 - 1, 2**31], [123_456_789, 4_000_000_000]])
def test_random_words_are_the_same_bit_for_bit(stream):
    stream, counters, zero = torch.tensor(stream), 7 + torch.arange(16), torch.zeros(())
    for step in (0, 5, 100_000):
        for level in (0, 1):
            at = torch.tensor(step)
            out = torch.empty(64, dtype=torch.long, device=DEVICE)
            store_words[(1,)](stream.to(DEVICE), at.to(DEVICE), out, FIRST=7, LEVEL=level)
            four = philox((counters, at, at * 0 + level, zero.long()), (*stream[:, None],))
            assert torch.equal(out.cpu(), torch.stack(four, -1).flatten())


def drawn_by_both(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    stream: torch.Tensor,
    step: torch.Tensor,
    drawn: torch.Tensor | None = None,
) -> tuple[Draw, Draw]:
    """What the kernels and the engine draw; what stands behind a row's logits is NaN."""
    rows, vocab = logits.shape
    wider = torch.full((rows, vocab + 5), torch.nan, dtype=logits.dtype, device=DEVICE)
    wider[:, :vocab] = logits
    drawn = torch.full((rows,), 2**40) if drawn is None else drawn
    others = (one.to(DEVICE) for one in (temperature, drawn, stream, step))
    ours = draw_kernel.draw(wider[:, :vocab], *others)
    cooled = temperature.masked_fill(step >= drawn, 0.0)
    theirs = draw_tokens(logits.float(), cooled, stream, step[:, None])
    return Draw(**{name: one.cpu() for name, one in vars(ours).items()}), theirs


def assert_same(ours: Draw, theirs: Draw) -> None:
    """But for near-ties, at which both may round apart."""
    same = ours.token == theirs.token
    assert (same | (theirs.margin < 4 * two_level.ROUNDING)).all()
    assert torch.equal(ours.rank[same], theirs.rank[same])
    for name, allowed in (("logprob", 1e-5), ("logprob_tempered", 1e-5), ("margin", 1e-4)):
        a, b = (getattr(draw, name)[same] for draw in (ours, theirs))
        torch.testing.assert_close(a, b, atol=allowed, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "rows"), [(40, 12), (97, 33), (5001, 24), (151_936, 3)])
def test_draws_are_the_engines(vocab, rows, dtype):
    logits = (torch.randn(rows, vocab, generator=seeded(vocab)) * 3).to(dtype)
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.3, 2.0, 0.05]).repeat(6)[:rows]
    stream = torch.randint(0, 2**32, (rows, 2), generator=seeded(1))
    assert_same(*drawn_by_both(logits, temperature, stream, torch.arange(rows)))


def test_after_its_sampled_tokens_a_row_is_greedy():
    rows = 12
    logits = (torch.randn(1, 150, generator=seeded(0)) * 0.1).expand(rows, -1)
    stream = torch.randint(0, 2**32, (rows, 2), generator=seeded(1))
    drawn = torch.tensor([0, 1, 3, 9]).repeat(3)
    step = torch.tensor([0, 1, 2]).repeat_interleave(4)
    ours, theirs = drawn_by_both(logits, torch.full((rows,), 1.5), stream, step, drawn)
    assert_same(ours, theirs)
    greedy = step >= drawn
    assert torch.equal(ours.logprob_tempered.isnan(), greedy) and greedy.sum() == 5
    assert (ours.rank[greedy] == 1).all() and (ours.rank[~greedy] > 1).any()


def test_ties_and_tokens_that_cannot_be_drawn():
    """A greedy row takes the first of the largest logits, of whichever block."""
    logits = torch.full((4, 130), -torch.inf)
    logits[0, [70, 71, 129]] = logits[1, 129] = 0.3
    logits[1, 5] = 1.0
    logits[2:, 64:128] = torch.randn(2, 64, generator=seeded(0))
    stream = torch.randint(0, 2**32, (4, 2), generator=seeded(1))
    temperature = torch.tensor([0.0, 1.0, 0.7, 0.0])
    ours, theirs = drawn_by_both(logits, temperature, stream, torch.zeros(4, dtype=torch.long))
    assert_same(ours, theirs)
    assert ours.token[0] == 70 and ours.rank[0] == 1 and ours.margin[0] == 0


def test_an_idle_rows_token_is_one_of_the_vocabulary():
    """Its logits may be anything; the model looks the token up."""
    logits = torch.full((3, 97), torch.nan)
    logits[1], logits[2] = torch.inf, -torch.inf
    rows = torch.zeros(3, dtype=torch.long)
    given = logits, torch.tensor([1.0, 0.0, 1.0]), rows + 1, torch.zeros(3, 2).long(), rows
    token = draw_kernel.draw(*(one.to(DEVICE) for one in given)).token
    assert ((token >= 0) & (token < 97)).all()


# -- attention -------------------------------------------------------------------------------------

KV_HEADS, ROOM = 2, 48
GROUPS = ((9, 40), (70,))  # two groups of prefilled contexts, each padded on its left
SEVEN = (0, 1, 1, 2, -1, 2, 2)  # the context of each row; -1 for an idle one
LARGE = Tiling(64, 64, warps=4)
MANY = (*(0,) * 9, -1, *(1, 0) * 4, *(2,) * 5)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    contexts: tuple[int, ...] = SEVEN
    group: int = 2
    dim: int = 16
    value_dim: int = 16
    groups: tuple[tuple[int, ...], ...] = GROUPS
    numbers: dict = field(default_factory=dict)  # scaling, softcap, window
    sinks: bool = False
    tiling: Tiling = LARGE


CASES = {
    "plain": Case(),
    "one row": Case(contexts=(0,), groups=((3,),)),
    "many rows": Case(contexts=MANY),
    "small tiles": Case(contexts=MANY, numbers={"window": 36}, tiling=Tiling(16, 16, warps=4)),
    "own tokens leave the window": Case(group=1, numbers={"window": 5}),
    "a window of one": Case(numbers={"window": 1}),
    "odd sizes": Case(group=3, dim=80, value_dim=128, numbers={"window": 30}, sinks=True),
    "small sizes": Case(group=3, dim=6, value_dim=10),
    "softcap": Case(group=8, dim=128, value_dim=80, numbers={"softcap": 3.0}),
    "softcap and sinks": Case(contexts=MANY, group=3, numbers={"softcap": 20.0}, sinks=True),
    "a group of seven": Case(contexts=MANY, group=7, dim=64, value_dim=64),
    "dim 256": Case(dim=256, value_dim=256, numbers={"scaling": 0.1}),
    "large scores": Case(numbers={"scaling": 1e4}),
    "bfloat16": Case(torch.bfloat16, MANY, dim=64, value_dim=64, sinks=True),
    "float16": Case(torch.float16, group=3, dim=64, value_dim=80, numbers={"window": 36}),
    "long": Case(
        contexts=(0,) * 9 + (1,) * 9, dim=128, value_dim=128, groups=((512, 500),),
        tiling=Tiling.of(torch.float32, 128),
    ),
}  # fmt: skip


class Batch:
    """A case's tensors on the device; whatever no row may look at is NaN."""

    def __init__(self, case: Case) -> None:
        self.case, rows, generator = case, len(case.contexts), seeded(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype).to(DEVICE)

        def ints(values) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)

        sizes = case.dim, case.value_dim
        self.query = normal(rows, KV_HEADS * case.group, case.dim)
        self.new = [normal(rows, KV_HEADS, size) for size in sizes]
        self.places = torch.randperm(rows + 3, generator=generator)[:rows].tolist()
        self.ages = [7 * row % (ROOM - 1) for row in range(rows)]
        self.own = [torch.full_like(normal(rows + 3, KV_HEADS, ROOM, s), torch.nan) for s in sizes]
        for place, age in zip(self.places, self.ages, strict=True):
            for own in self.own:
                own[place, :, :age] = normal(KV_HEADS, age, own.shape[-1])
        self.prefixes, addresses, tokens, begins = [], [], [], []
        for lengths in case.groups:
            longest = max(lengths)
            # Places behind the tokens, as where a layer has kept a part of what it had.
            pair = [normal(len(lengths), KV_HEADS, longest + 3, size) for size in sizes]
            for number, length in enumerate(lengths):
                one = [tensor[number] for tensor in pair]
                for tensor in one:
                    tensor[:, : longest - length] = tensor[:, longest:] = torch.nan
                self.prefixes.append([tensor[:, longest - length : longest] for tensor in one])
                addresses.append([tensor.data_ptr() for tensor in one])
                tokens.append((longest + 3, longest))
                begins.append(longest - length)
        places_of_head, stops = torch.tensor(tokens, device=DEVICE).T
        at = torch.tensor(addresses, device=DEVICE).T.contiguous()
        self.prefix = Prefixes(*at, places_of_head.contiguous(), ints(begins), ints(stops))
        tile = case.tiling.rows(case.group)
        made = attend_kernel.tiles(case.contexts, tile)
        filled = [[*rows, *[-1] * (tile - len(rows))] for _, rows in made]
        self.tile_rows = ints([*filled, [-1] * tile])  # and a tile without rows
        self.tile_context = ints([*(context for context, _ in made), -1])
        self.sinks = 3 * normal(KV_HEADS * case.group) if case.sinks else None
        self.numbers = {"scaling": 0.4, **case.numbers}
        self.seated = [row for row, context in enumerate(case.contexts) if context >= 0]
        self.tables = self.tile_context, self.tile_rows, ints(self.places), ints(self.ages)

    def ours(self) -> torch.Tensor:
        """``[seated rows, heads, value_dim]``."""
        options = {**self.numbers, "sinks": self.sinks, "tiling": self.case.tiling}
        return attend_kernel.attend(
            self.query, *self.new, *self.own, self.prefix, *self.tables, **options
        )[self.seated].cpu()

    def parts(self, row: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """A row's query, and its keys and values in two parts, as ``attend`` takes them."""
        place, age = self.places[row], self.ages[row]
        prefix = self.prefixes[self.case.contexts[row]]
        own = [
            torch.cat([own[place, :, :age], new[row][:, None]], 1)
            for own, new in zip(self.own, self.new, strict=True)
        ]
        parts = [[tensor[None].cpu().float() for tensor in part] for part in (prefix, own)]
        return self.query[row][None, :, None].cpu().float(), parts

    def theirs(self) -> torch.Tensor:
        """The same by the engine's own functions, in float32."""
        numbers, found = dict(self.numbers), []
        window = numbers.pop("window", 10**9)
        sinks = None if self.sinks is None else self.sinks.cpu()
        for row in self.seated:
            query, parts = self.parts(row)
            lengths = [key.shape[2] for key, _ in parts]
            hidden = torch.arange(sum(lengths)) < sum(lengths) - window
            bias = torch.zeros(1, 1, 1, len(hidden)).masked_fill(hidden, -torch.inf)
            both = zip(parts, bias.split(lengths, -1), strict=True)
            averages = [attend(query, *part, bias=hides, **numbers) for part, hides in both]
            found.append(merge(*averages, sinks)[0, :, 0])
        return torch.stack(found)

    def allowed(self) -> float:
        """How far the kernel may be off. In float32 as in ``test_shared``: a score is rounded by
        4e-7 of the largest. In half precision, weights that add up to 1, and then the result, are
        each off by at most an epsilon (the interpreter doesn't round bfloat16, but cuts it off).
        """
        largest = max(float(value.abs().max()) for row in self.seated for value in self.values(row))
        if self.case.dtype != torch.float32:
            return 2 * torch.finfo(self.case.dtype).eps * largest
        scores = [
            (query @ key.repeat_interleave(self.case.group, 1).mT).abs().max()
            for query, parts in map(self.parts, self.seated)
            for key, _ in parts
        ]
        score = self.numbers["scaling"] * float(max(scores))
        return 2e-6 + 4e-7 * min(score, self.numbers.get("softcap", score))

    def values(self, row: int) -> list[torch.Tensor]:
        return [value for _, value in self.parts(row)[1]]


@pytest.fixture
def mended(monkeypatch):
    """Triton's interpreter multiplies bfloat16 as if its bits were integers."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    honest = builder.create_dot

    def exact(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    monkeypatch.setattr(
        builder, "create_dot", lambda self, a, b, *rest: honest(self, exact(a), exact(b), *rest)
    )


@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_engines(name, mended):
    batch = Batch(CASES[name])
    theirs, before = batch.theirs(), [own.clone() for own in batch.own]
    ours = batch.ours()
    assert (ours.float() - theirs).abs().max() < batch.allowed()
    for own, new, was in zip(batch.own, batch.new, before, strict=True):
        for row in batch.seated:
            was[batch.places[row], :, batch.ages[row]] = new[row]
        torch.testing.assert_close(own, was, rtol=0, atol=0, equal_nan=True)  # nothing else


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16][: 1 + (DEVICE == "cuda")], ids=str
)
def test_half_precision_is_as_exact_as_attention_of_pytorch(dtype, mended):
    batch = Batch(Case(dtype, MANY, dim=64, value_dim=64, numbers={"scaling": 0.5}))
    theirs = []
    for row in batch.seated:
        query, parts = batch.parts(row)
        key, value = (torch.cat(pair, 2) for pair in zip(*parts, strict=True))
        given = (x.to(dtype) for x in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(*given, scale=0.5, enable_gqa=True)
        theirs.append(found[0, :, 0])
    exact = batch.theirs()
    ours, theirs = ((x.float() - exact).norm() for x in (batch.ours(), torch.stack(theirs)))
    assert ours <= 1.5 * theirs


def test_tiles_hold_each_row_once():
    made = attend_kernel.tiles(MANY, 4)
    assert sorted(row for _, rows in made for row in rows) == [
        row for row, context in enumerate(MANY) if context >= 0
    ]
    assert all(MANY[row] == context for context, rows in made for row in rows)
    assert [len(rows) for _, rows in made] == [4, 3, 3, 3, 4, 3, 2]


# -- compiled --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "most"),
    [
        (["qwen3"], 0),
        # To fit one more program onto a processor, ptxas may store a few registers.
        pytest.param(OTHERS, 24, marks=pytest.mark.slow),
    ],
)
def test_compiled_kernels_fit_into_registers(shapes, most, tmp_path):
    """For an A100 and an H100, by the assembler that comes with Triton."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).parent / "compiled.py"), *shapes]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(made.stdout)
    assert made.returncode == 0, made.stderr
    stacks = re.findall(r" registers, (\d+) bytes of stack", made.stdout)
    assert len(stacks) == 6 * len(shapes)  # three kernels on two devices
    assert max(map(int, stacks)) <= most
