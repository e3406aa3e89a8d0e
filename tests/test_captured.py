"""Captured steps against plain ones, on a CPU: a tape (``tape.py``) stands for a CUDA graph. Plain
PyTorch computes what the kernels are to compute; in a few cases the kernels do."""

import contextlib
import copy
import ctypes
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tape
import tiny
import torch
from contract import near_ties, prefilled, relative_l2
from runs import sampled
from torch import Tensor

from ia_mech.engine import check
from ia_mech.engine.check import check_engine
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import install, installed
from ia_mech.engine.memory import LOGITS_HELD, Backoff, footprint, kept
from ia_mech.engine.sampling import Draw, draw_tokens, stream_key
from ia_mech.engine.workers import Crew
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.run import layout
from ia_mech.settings import Settings

pytest.importorskip("triton")

from ia_mech.engine import attend_kernel, captured, draw_kernel, norms
from ia_mech.engine.attend_kernel import Prefixes

LENGTHS = (3, 5, 9, 14, 17, 23)
STOPS = [tiny.EOS, *range(88, 97)]
ROWS = [
    Row(context, temperature, stream_key(1, f"s{context}", 0), drawn=drawn)
    for context in range(6)
    for temperature, drawn in ((0.0, None), (0.7, None), (1.3, 2))
]
ROWS += [Row(4, 0.7, stream_key(1, "s4", 0), drawn=1, first=nth) for nth in (0, 1, 5)]


KERNELS: list[bool] = []  # whether the kernels are used, and not their definition


def at(address: int, like: Tensor, head_tokens: int, tokens: int) -> Tensor:
    """``[kv_heads, tokens, dim]`` that begin at an address, in numbers like a row's own."""
    kv_heads, _, dim = like.shape
    count = ((kv_heads - 1) * head_tokens + tokens) * dim
    memory = (ctypes.c_char * (count * like.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=like.dtype)
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
    kv_heads = own_key.shape[1]
    group = query.shape[1] // kv_heads
    output = query.new_full((*query.shape[:2], own_value.shape[-1]), torch.nan)
    for context, rows in zip(tile_context.tolist(), tile_rows.tolist(), strict=True):
        for row in [row for row in rows if row >= 0 and context >= 0]:
            place, age = int(places[row]), int(ages[row])
            own_key[place, :, age], own_value[place, :, age] = new_key[row], new_value[row]
            key_at, value_at, head, begin, stop = (int(one[context]) for one in prefix)
            key, value = (
                torch.cat([at(address, own, head, stop)[:, begin:], own[:, : age + 1]], 1)
                .repeat_interleave(group, 0)
                .float()
                for address, own in ((key_at, own_key[place]), (value_at, own_value[place]))
            )
            scores = (key @ query[row].float()[..., None])[..., 0] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if window is not None:
                scores[:, :-window] = -torch.inf
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None].float()], -1)
            weights = scores.softmax(-1)[:, : key.shape[1]]
            output[row] = (weights[:, None] @ value)[:, 0].to(output.dtype)
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
    for to, value in zip(
        (token, logprob, tempered, rank, margin), vars(found).values(), strict=True
    ):
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
            kept.pop(model, None)

    return made


def groups_of(model):
    return [prefilled(model, LENGTHS[:4]), prefilled(model, LENGTHS[4:])]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt_oss", "mistral"])
@pytest.mark.parametrize("capture", [uncaptured, tape.record])
def test_rows_that_end_and_join_are_as_by_plain_steps(architecture, capture, capturing):
    model, steps = tiny.model(architecture), []
    groups = groups_of(model)
    plain = decode(model, groups, ROWS, STOPS, 9, together=11)
    assert len({len(row.token_ids) for row in plain}) > 3
    with capturing(model, capture) as made:
        numbers = []
        for _ in range(2):  # the second time with the tensors and graphs of the first
            found = decode(
                model, groups, ROWS, STOPS, 9, together=11, on_step=lambda *n: steps.append(n)
            )
            assert near_ties(model, LENGTHS, ROWS, found, plain) == 0
            numbers.append(kept[model])
        assert made.engine.captured and numbers[0] is numbers[1]
    assert sorted(numbers[0]._graphs) == [8, 16]
    assert sum(drew for drew, *_ in steps) == 2 * sum(len(row.token_ids) for row in plain)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_with_the_kernels(architecture, capturing):
    model, rows = tiny.fresh(architecture, num_hidden_layers=2), [ROWS[at] for at in (0, 1, 8, 16)]
    install(model)
    groups = groups_of(model)
    plain = decode(model, groups, rows, [], 3, together=3)
    with capturing(model, uncaptured, kernels=True) as made:
        found = decode(model, groups, rows, [], 3, together=3)
        assert made.engine.captured
    assert near_ties(model, LENGTHS, rows, found, plain) == 0


def test_graphs_are_given_up_where_weights_have_moved(capturing):
    model, numbers = tiny.fresh("llama"), []
    install(model)
    with capturing(model):
        for moved in (False, False, True):
            if moved:
                weight = model.lm_head.weight
                weight.data = 2 * weight.data
            groups = groups_of(model)
            wrote = decode(model, groups, ROWS[:2], [], 3)
            numbers.append(kept[model])
    assert numbers[0] is numbers[1] and numbers[1] is not numbers[2]
    assert near_ties(model, LENGTHS, ROWS[:2], wrote, decode(model, groups, ROWS[:2], [], 3)) == 0


def test_hooks_that_others_put_on_a_model_are_not_passed_over(capturing):
    model, groups = tiny.fresh("llama"), []
    install(model)
    groups = groups_of(model)
    with capturing(model) as made:
        before = decode(model, groups, ROWS[:6], [], 5)
        handle = model.model.layers[0].register_forward_hook(lambda *given: 2 * given[-1])
        hooked = decode(model, groups, ROWS[:6], [], 5)
        made.engine = replace(made.engine, captured=False)
        plain = decode(model, groups, ROWS[:6], [], 5)
        handle.remove()
    written = [[row.token_ids.tolist() for row in rows] for rows in (hooked, plain, before)]
    assert written[0] == written[1] != written[2]


# -- the tape: what a graph doesn't see, and what it can't hold ------------------------------------


def test_what_python_counts_is_not_in_a_graph(capturing, monkeypatch):
    """The rows are right where each step is made anew, and wrong from a tape."""
    model, honest = tiny.model("llama"), captured._Numbers._step
    groups, rows = groups_of(model), [ROWS[1], ROWS[4], ROWS[7]]
    plain, wrong = decode(model, groups, rows, [], 7), []
    for capture in (uncaptured, tape.record):
        count = itertools.count()

        def counting(numbers, model, width, count=count):
            numbers.step[:width] = next(count)
            honest(numbers, model, width)

        monkeypatch.setattr(captured._Numbers, "_step", counting)
        with capturing(model, capture):
            found = decode(model, groups, rows, [], 7)
        pairs = zip(found, plain, strict=True)
        wrong.append(sum(a.token_ids.tolist() != b.token_ids.tolist() for a, b in pairs))
    assert wrong == [0, 3]


def asks_the_host(numbers):
    assert int(numbers.token[0]) >= 0


def has_a_shape_that_depends_on_numbers(numbers):
    numbers.token[numbers.token > 0].sum()


def has_a_tensor_of_the_hosts_numbers(numbers):
    numbers.rank[:2].copy_(torch.tensor([1, 2]))


@pytest.mark.parametrize(
    "planted",
    [asks_the_host, has_a_shape_that_depends_on_numbers, has_a_tensor_of_the_hosts_numbers],
)
def test_a_step_that_cannot_be_captured_is_computed_as_it_comes(planted, capturing, monkeypatch):
    model, honest = tiny.model("llama"), captured._Numbers._step
    groups = groups_of(model)
    plain = decode(model, groups, ROWS, STOPS, 6, together=11)
    monkeypatch.setattr(
        captured._Numbers, "_step", lambda self, *given: (planted(self), honest(self, *given))
    )
    with capturing(model) as made:
        found = decode(model, groups, ROWS, STOPS, 6, together=11)
        assert not made.engine.captured and "not permitted" in made.engine.uncaptured
        assert model not in kept
    assert near_ties(model, LENGTHS, ROWS, found, plain) == 0


def test_launches_of_a_step(capturing, monkeypatch):
    """28 layers of Qwen3, with fused norms; each kernel is one launch, and the draw is two."""
    monkeypatch.setattr(norms, "rms_norm", fused)
    model = tiny.fresh("qwen3", num_hidden_layers=28)
    install(model)
    norms.fuse_norms(model)
    groups, rows = groups_of(model), ROWS[1:3]
    plain = decode(model, groups, rows, [], 2)
    with capturing(model):
        found = decode(model, groups, rows, [], 2)
        names = Counter(kept[model]._graphs[8].names)
    assert near_ties(model, LENGTHS, rows, found, plain) == 0
    assert names["attend"] == 28 and names["draw"] == 1 and names["rms_norm"] == 4 * 28 + 1
    assert sum(names.values()) + 1 <= 800


@torch.library.custom_op("ia_mech_tests::rms_norm", mutates_args=())
def fused(states: Tensor, shape: list[int], weight: Tensor, epsilon: float) -> Tensor:
    """On CUDA it is one kernel."""
    return torch.nn.functional.rms_norm(states, shape, weight, epsilon)


def test_after_a_capture_that_fails_a_thread_goes_on_with_its_own_stream(monkeypatch):
    """``torch.cuda.graph`` makes its stream current, and leaves it so where ending fails; steps
    that wait are found before a capture begins."""
    now, modes, ran = ["own"], [], []

    class Graph:
        def __init__(self, graph, pool, stream, capture_error_mode):
            self.stream = stream

        def __enter__(self):
            now[0] = self.stream

        def __exit__(self, *error):
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextlib.contextmanager
    def on(stream):
        before, now[0] = now[0], stream
        try:
            yield
        finally:
            now[0] = before

    pretended = SimpleNamespace(
        current_stream=lambda: now[0], current_device=lambda: 0, Stream=lambda: "side",
        CUDAGraph=SimpleNamespace, graph=Graph, stream=on, set_sync_debug_mode=modes.append,
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", pretended)
    captured._side_stream.cache_clear()
    with pytest.raises(RuntimeError, match="previous error"):
        captured.capture(lambda: ran.append((now[0], modes[-1:])), None)
    captured._side_stream.cache_clear()
    assert ran == [("own", []), ("own", ["error"]), ("side", ["default"])]
    assert now == ["own"]


# -- the start-up check ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", torch.float32),
        ("gpt_oss", torch.float32),
        ("gemma3", torch.float32),
        ("qwen3", torch.bfloat16),
        ("mistral", torch.float16),
    ],
)
def test_the_check_goes_through_captured_steps(architecture, dtype, capturing, monkeypatch):
    honest = captured.attend
    monkeypatch.setattr(check, "CAPTURING", ("cpu",))
    with capturing(tiny.model("llama")):
        engine = check_engine(tiny.fresh(architecture).to(dtype), tiny.prompt(24, seed=0))
        assert engine.captured

        def blind(*tensors, **about):  # to the oldest own token of rows that have several
            ages = tensors[-1]
            return honest(*tensors[:-1], (ages - 1).clamp(min=0), **about)

        monkeypatch.setattr(captured, "attend", blind)
        engine = check_engine(tiny.fresh(architecture).to(dtype), tiny.prompt(24, seed=0))
        assert not engine.captured and engine.share and "captured steps" in engine.uncaptured
        assert str(engine).endswith(f"; steps aren't captured ({engine.uncaptured})")


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


@pytest.mark.parametrize(
    ("architecture", "sizes", "why"),
    [
        ("qwen3_5", {}, "some layers"),
        ("gemma4", {}, "some layers"),
        ("llama", {"rope_parameters": DYNAMIC}, "longest row"),
    ],
)
def test_models_whose_steps_are_not_captured(architecture, sizes, why, capturing, monkeypatch):
    monkeypatch.setattr(check, "CAPTURING", ("cpu",))
    engine = check_engine(tiny.fresh(architecture, **sizes), tiny.prompt(24, seed=0))
    assert not engine.captured and why in engine.uncaptured


# -- memory, and runs on disk ----------------------------------------------------------------------


def test_memory_that_is_kept_is_given_up_before_batches_are_halved(capturing):
    model = tiny.model("llama")
    with capturing(model):
        decode(model, groups_of(model), ROWS[:2], [], 3)
        sizes, shrunk = [], []

        def needs_what_is_kept(size):
            sizes.append(size)
            if kept:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return size

        assert Backoff(4, shrunk.append).retry(needs_what_is_kept) == 4
        assert (sizes, shrunk) == ([4, 4], [])


def test_the_plan_of_memory_counts_what_rows_hold(capturing, monkeypatch):
    """Also where a row writes more tokens than a layer's window has."""
    monkeypatch.setattr(check, "CAPTURING", ("cpu",))
    model, new = tiny.fresh("gemma3"), 12
    with capturing(tiny.model("llama")):
        check_engine(model, tiny.prompt(24, seed=0))
        decode(model, [prefilled(model, LENGTHS[:1])], ROWS[:3] * 8, [], new + 1)
    own = sum(one.nbytes for layer in kept[model]._cache.layers for one in layer.own)
    row = footprint(model).row(LENGTHS[0], new)
    assert own == 24 * (row - LOGITS_HELD * 4 * tiny.VOCAB)


def test_a_capture_that_runs_out_of_memory_is_left_to_backing_off(capturing):
    model = tiny.model("llama")
    groups = groups_of(model)

    def scarce(step, _before):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with capturing(model, scarce) as made:
        with pytest.raises(torch.OutOfMemoryError):
            decode(model, groups, ROWS[:2], [], 3)
        assert made.engine.captured and not kept


def test_parts_say_which_steps_computed_them_and_a_run_goes_on_with_others(
    tokenizer, tmp_path, progress, capturing, monkeypatch
):
    monkeypatch.setattr(check, "CAPTURING", ("cpu",))
    model = tiny.fresh("llama", vocab_size=len(tokenizer))
    subject = Subject(ModelSpec(name="tiny"), model, tokenizer, weights_hash(model))
    settings = Settings(limit=4, temperatures=(0.7,), samples=2, max_new_tokens=5, batch_rows=6)
    with capturing(tiny.model("llama")):
        run = sampled(settings, subject, tmp_path / "run", progress, crew=Crew(1, 1))
    assert any(line.endswith("; steps are captured") for line in progress.lines)
    ours, (first, *others) = run.generations, run.parts("contexts")
    assert first["captured"] and all(part["captured"] for part in others)
    (run.path / layout.manifest_file("contexts", first["name"])).unlink()

    monkeypatch.setattr(check, "CAPTURING", ())
    check._PASSED.pop(model)
    run = sampled(settings, subject, run.path, progress, crew=Crew(1, 1))
    assert run.complete and not progress.lines[-1].endswith("captured")
    told = {part["name"]: "captured" in part for part in run.parts("contexts")}
    assert told == {part["name"]: part is not first for part in (first, *others)}
    assert run.generations["token_ids"].map(list).equals(ours["token_ids"].map(list))


# -- norms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt_oss", "qwen3_5"])
def test_norms_are_fused_in_passes_alone(architecture, dtype):
    model = copy.deepcopy(tiny.model(architecture)).to(dtype)
    with torch.no_grad():
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.weight += 0.1 * torch.randn(module.weight.shape)
    groups, ids = [prefilled(model, LENGTHS)], torch.tensor([tiny.prompt(9, seed=1)])
    before = model(ids).logits
    norms.fuse_norms(model)
    twin = copy.deepcopy(model)
    fused = [one for one in model.modules() if "forward" in vars(one)]
    gated = [one for one in model.modules() if "Gated" in type(one).__name__]
    assert len(fused) >= 9 and not {*map(id, fused)} & {*map(id, gated)}
    assert torch.equal(model(ids).logits, before)
    logits = prefilled(model, LENGTHS).logits
    assert relative_l2(logits, groups[0].logits) <= (1e-5 if dtype == torch.float32 else 0.05)
    with torch.no_grad():
        fused[0].weight += 1.0
    assert torch.equal(prefilled(twin, LENGTHS).logits, logits)  # it has norms of its own
    assert not torch.equal(prefilled(model, LENGTHS).logits, logits)


def test_a_norm_that_computes_something_else_is_left_alone():
    class OddRMSNorm(torch.nn.RMSNorm):
        def forward(self, states):
            return super().forward(states) + 1e-3

    odd, even = OddRMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6)
    norms.fuse_norms(torch.nn.ModuleList([odd, even]))
    assert "forward" in vars(even) and "forward" not in vars(odd)
