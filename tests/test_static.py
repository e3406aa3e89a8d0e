"""Static buffers on a CPU: the same rows as the loop's, in tensors that stay where they are."""

import gc
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import exact
from test_stream import LENGTHS, ROWS, STOPS, near_ties, prefilled_by

import ia_mech.collect
import ia_mech.engine.cuda.stepper as stepper_module
from ia_mech.collect import collect
from ia_mech.config import SampleConfig
from ia_mech.engine.cuda import check
from ia_mech.engine.cuda.layer import StaticLayer, View
from ia_mech.engine.cuda.outbox import Outbox
from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Sizes
from ia_mech.engine.cuda.stepper import Stepper, stepper_for, why_not
from ia_mech.engine.cuda.stream import resolve
from ia_mech.engine.loop import Row, decode, decode_stream
from ia_mech.engine.plan import Grid
from ia_mech.engine.shared import Engine
from ia_mech.sampling import stream_key

STATIC = ("llama", "qwen3", "qwen3_moe", "glm4", "glm4_moe")  # all layers are shared
EACH = pytest.mark.parametrize("architecture", STATIC)
steady = settings(derandomize=True, deadline=None, max_examples=200)


def statically(model, groups, rows, stops, most, width, on_step=None):
    return decode_stream(
        model, groups, rows, stops, most, width=width, on_step=on_step, graphs=True, longest=31
    )


@EACH
@pytest.mark.parametrize(
    ("width", "parts"), [(1, ((0, 8),)), (5, ((0, 3), (3, 4), (4, 8))), (17, ((0, 8),))]
)
def test_rows_equal_the_loops(architecture, width, parts):
    model = tiny.model(architecture)
    loops = decode(model, prefilled_by(model, LENGTHS), ROWS, STOPS, 13)
    assert {1, 13} < {len(row.token_ids) for row in loops}, "rows end at all times"
    groups = (prefilled_by(model, LENGTHS[a:b]) for a, b in parts)
    assert near_ties(statically(model, groups, ROWS, STOPS, 13, width), loops) <= 1


def test_rows_equal_the_loops_without_the_kernel_for_cpus(monkeypatch):
    """The attention that a GPU takes."""
    model = tiny.model("qwen3")
    loops = decode(model, prefilled_by(model, LENGTHS), ROWS, STOPS, 13)
    monkeypatch.setattr("ia_mech.engine.attention.FUSED", ())
    ours = statically(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 13, 17)
    assert near_ties(ours, loops) <= 1


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_rows_dont_depend_on_when_the_host_looks(steps, monkeypatch):
    model = tiny.model("llama")
    monkeypatch.setattr("ia_mech.engine.cuda.stream.STEPS", steps)
    monkeypatch.setattr(stepper_module, "STEPS", steps)
    monkeypatch.setattr(stepper_module, "_kept", weakref.WeakKeyDictionary())
    ours = statically(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 13, 9)
    assert near_ties(ours, decode(model, prefilled_by(model, LENGTHS), ROWS, STOPS, 13)) <= 1


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=24),
    width=st.integers(1, 9),
    cuts=st.sets(st.integers(1, 4)),
    most=st.integers(1, 7),
    stops=st.sets(st.integers(3, tiny.VOCAB - 1), max_size=60),
)
def test_any_mix_of_contexts_rows_and_stops(rows, width, cuts, most, stops):
    model = tiny.model("llama")
    rows = [Row(c, 0.5 * (i % 3), stream_key(0, "mix", i)) for i, c in enumerate(rows)]
    edges, told = [0, *sorted(cuts), 5], []
    groups = (prefilled_by(model, LENGTHS[a:b]) for a, b in pairwise(edges))
    ours = statically(model, groups, rows, stops, most, width, lambda *n: told.append(n))
    assert near_ties(ours, decode(model, prefilled_by(model, LENGTHS[:5]), rows, stops, most)) <= 1
    assert sum(tokens for tokens, _ in told) == sum(len(row.token_ids) for row in ours)
    assert sum(finished for _, finished in told) == len(rows)


def test_bfloat16_is_as_near_to_float32_as_the_loop_is():
    model = tiny.model("llama")
    half = type(model)(model.config).eval().requires_grad_(False)
    half.load_state_dict(model.state_dict())
    half = half.bfloat16()
    rows = [Row(c, 0.0, (0, 0)) for c in (0, 1, 1)]
    static = statically(half, [prefilled_by(half, (9, 5))], rows, [], 8, 3)
    for row, one in zip(rows, static, strict=True):
        prompt = tiny.prompt((9, 5)[row.context], seed=(9, 5)[row.context])
        logits = model(torch.tensor([[*prompt, *one.token_ids.tolist()]])).logits[0]
        chosen = torch.from_numpy(one.token_ids)[:, None]
        full = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, chosen)[:, 0]
        assert np.abs(one.logprobs_raw - full.numpy()).max() < 0.25


def test_every_tensor_stays_where_it_is_over_refills_buckets_and_streams():
    model = tiny.model("qwen3")
    seen, honest = [], Stepper.run

    def watched(stepper, lines, steps):
        seen.append((lines, [t.data_ptr() for t in stepper.tensors()]))
        drawn = honest(stepper, lines, steps)
        assert seen[-1][1] == [t.data_ptr() for t in stepper.tensors()]
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "run", watched)
        first = statically(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 12, 17)
        again = statically(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 12, 17)
    assert len({tuple(pointers) for _, pointers in seen}) == 1
    lines = [n for n, _ in seen[: len(seen) // 2]]
    assert len(seen[0][1]) == 12 + 4 * 4 and max(lines) == 17
    assert lines == sorted(lines, reverse=True) and len(set(lines)) > 2, "buckets only shrink"
    assert all(np.array_equal(a.margins, b.margins) for a, b in zip(first, again, strict=True))


def test_a_stepper_is_kept_while_its_model_and_its_sizes_are():
    model = type(tiny.model("llama"))(tiny.model("llama").config).eval().requires_grad_(False)
    group = prefilled_by(model, (9, 5))
    sizes = Sizes.of([0, 1, 1], 3, 9, 4)
    kept = stepper_for(model, sizes, group)
    assert stepper_for(model, sizes, group) is kept
    gone = weakref.ref(kept)
    kept = stepper_for(model, Sizes.of([0, 1, 1], 2, 9, 4), group)
    assert gone() is None
    gone, model = weakref.ref(kept), weakref.ref(model)
    del kept, group
    gc.collect()
    assert gone() is None and model() is None


@steady
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(1, 12),
    st.data(),
)
def test_ends_are_found_among_tokens_that_were_drawn_without_looking(lines, stops, most, data):
    """Against a loop that looks at each."""
    ages = np.array([data.draw(st.integers(1, max(1, most - 1))) for _ in lines])
    kept, ended = resolve(np.array(lines).T, ages, sorted(stops), most)
    for line, tokens in enumerate(lines):
        wrote, over = [], False
        for token in tokens:
            wrote.append(token)
            over = token in stops or ages[line] + len(wrote) == most
            if over:
                break
        assert (int(kept[line]), bool(ended[line])) == (len(wrote), over)


@steady
@given(st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=8))
def test_each_line_has_a_seat_in_its_contexts_slot(batches):
    """Lines of any contexts come and go, and the batch moves to smaller buckets."""
    seating, sizes = Seating(8), Sizes(8, 8, 8, 128, 4)
    slots = sizes.slots
    content: list[int | None] = [None] * 8  # of each slot
    for held in batches:
        contexts = [None if c == 9 else c for c in held]
        seating.keep({c for c in contexts if c is not None})
        for context in contexts:
            if context is not None and context not in seating.slot:
                assert seating.free
                content[seating.hold(context)] = context
        bucket = sizes.bucket(max(1, len(contexts)))
        if bucket.slots < slots:
            for start, to in seating.squeeze(bucket.slots):
                content[to] = content[start]
        slots = bucket.slots
        line_at, seat_of = seating.tables(contexts, bucket)
        assert line_at.shape == (bucket.slots, bucket.seats) and len(seat_of) == bucket.lines
        for line, context in enumerate(contexts):
            if context is not None:
                slot, seat = divmod(seat_of[line], bucket.seats)
                assert line_at[slot, seat] == line and content[slot] == context


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_over_slots_and_own_tokens_in_float64(softcap):
    """Lines of two contexts in turns, of any age, a line that is idle and a slot that is free."""
    sizes = Sizes(lines=5, slots=3, seats=2, prefix=128, own=6)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    source = type("Layer", (), {"keys": drawn(2, 2, 9, 8), "values": drawn(2, 2, 9, 8)})
    layer = StaticLayer(source, sizes)
    lengths = torch.tensor([9, 5, 1])  # of the slots; context 1 has 4 tokens of padding
    layer.put_prefix(0, source, 0, 0)
    layer.put_prefix(1, source, 1, 4)
    seating, contexts = Seating(3), [1, 0, None, 1, 0]
    assert [seating.hold(0), seating.hold(1)] == [0, 1]
    line_at, seat_of = map(torch.from_numpy, seating.tables(contexts, sizes))
    place = torch.tensor([0, 3, 5, 5, 1])
    layer.own[0].copy_(drawn(5, 2, 6, 8))
    layer.own[1].copy_(drawn(5, 2, 6, 8))

    def bias(unseen):
        return torch.zeros(unseen.shape).masked_fill(unseen, -torch.inf)[:, None, None]

    layer.view = View(
        sizes,
        place,
        lengths,
        line_at.flatten(),
        seat_of,
        own_bias=bias(torch.arange(6) > place[:, None]),
        prefix_bias=bias(torch.arange(128) >= lengths[:, None]),
    )
    query, new = drawn(5, 4, 1, 8), (drawn(5, 2, 1, 8), drawn(5, 2, 1, 8))
    keys, values = layer.update(*new)
    assert keys.shared_layer is layer
    ours = layer.attend(query, keys, values, 0.3, softcap, None)
    assert torch.isfinite(ours).all()
    for line, context in enumerate(contexts):
        if context is not None:
            parts = [
                torch.cat(
                    [given[context, :, (0, 4)[context] :], own[line, :, : place[line] + 1]], 1
                )
                for given, own in zip((source.keys, source.values), layer.own, strict=True)
            ]
            assert torch.equal(parts[0][:, -1:], new[0][line])
            theirs = exact(
                query[line : line + 1],
                *(part[None] for part in parts),
                torch.zeros(1, dtype=torch.bool),
                scaling=0.3,
                softcap=softcap,
            )
            assert (ours[line].double() - theirs[0]).abs().max() < 2e-6


@EACH
def test_the_check_of_graphs_passes_on_these(architecture):
    model = tiny.model(architecture)
    assert why_not(model) == "" and check._problem(model, tiny.prompt(12, seed=0)) == ""


def test_the_check_finds_wrong_numbers(monkeypatch):
    monkeypatch.setattr("ia_mech.engine.cuda.layer.merge", lambda parts, sinks=None: parts[1][0])
    said = check._problem(tiny.model("llama"), tiny.prompt(12, seed=0))
    assert said.startswith("no CUDA graphs: log-probabilities differ from a full pass by")


@pytest.mark.parametrize("architecture", ["qwen3_5", "gpt_oss", "gemma3", "mistral"])
def test_models_of_other_layers_say_so(architecture):
    assert why_not(tiny.model(architecture)).startswith("no CUDA graphs: some layers hold state")


def test_on_a_cpu_the_engine_stays_as_it_was():
    engine = Engine(4, 4)
    assert check.with_graphs(tiny.model("llama"), tiny.prompt(12, seed=0), engine) is engine
    assert Engine(4, 4, graphs=True).name == "shared-prefix 4 of 4 layers, CUDA graphs"


@pytest.mark.parametrize("response", ["given", "generate"])
def test_a_run_decodes_from_static_buffers_where_the_engine_says_so(
    response, tiny_subject, tmp_path, progress, monkeypatch
):
    """Responses and user turns; what is recorded says so, and the rows are those of the loop."""
    config = SampleConfig(
        limit=6,
        grid=Grid((0.7, 1.0), 2, 8, 0),
        batch_rows=20,
        response=response,
        max_response_tokens=6,
    )
    loops = collect(config, tiny_subject, tmp_path / "loop", progress)
    monkeypatch.setattr(
        ia_mech.collect, "with_graphs", lambda model, ids, engine: replace(engine, graphs=True)
    )
    ours = collect(config, tiny_subject, tmp_path / "static", progress)
    assert ours.record["identity"]["engine"] == "shared-prefix 4 of 4 layers, CUDA graphs"
    for a, b in zip(ours.generations.iloc, loops.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            n = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:n] != b["token_ids"][:n]))
            assert min(a["margins"][first], b["margins"][first]) < 1e-4


def test_on_a_cpu_nothing_has_to_be_sent():
    tensor = torch.randn(3)
    assert Outbox(torch.device("cpu")).send(tensor).take() is tensor
