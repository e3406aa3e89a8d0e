"""Static buffers on a CPU: the same rows as the loop's, in tensors that stay where they are."""

import gc
import weakref
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from contract import near_ties
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stream import LENGTHS, ROWS, STOPS, prefilled_by

import ia_mech.collect.job
import ia_mech.engine.cuda.stepper as stepper_module
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine.cuda import check
from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Sizes, states_of
from ia_mech.engine.cuda.stepper import Stepper, stepper_for, why_not
from ia_mech.engine.cuda.stream import resolve
from ia_mech.engine.decode import decode, decode_stream
from ia_mech.engine.loop import Row
from ia_mech.engine.plan import Grid
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.shared_prefix import Engine

pytestmark = pytest.mark.usefixtures("many_buckets")
FAMILIES = pytest.mark.parametrize("architecture", tiny.FAMILIES)
steady = settings(derandomize=True, deadline=None, max_examples=60)


def statically(model, groups, rows, stops, most, width, on_step=None):
    sizes = Sizes.of_rows([row.context for row in rows], width, 31, most)
    return decode_stream(
        model, groups, rows, stops, most, width=width, on_step=on_step, static=sizes
    )


@FAMILIES
@pytest.mark.parametrize(("width", "parts"), [(5, ((0, 3), (3, 4), (4, 8))), (17, ((0, 8),))])
def test_rows_equal_the_loops(architecture, width, parts):
    model = tiny.model(architecture)
    loops = decode(model, prefilled_by(model, LENGTHS), ROWS, STOPS, 13)
    assert {1, 13} < {len(row.token_ids) for row in loops}, "rows end at all times"
    groups = (prefilled_by(model, LENGTHS[a:b]) for a, b in parts)
    ours = statically(model, groups, ROWS, STOPS, 13, width)
    assert near_ties(model, LENGTHS, ROWS, ours, loops) <= 1


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_rows_dont_depend_on_when_the_host_looks(steps, monkeypatch):
    model = tiny.model("llama")
    monkeypatch.setattr("ia_mech.engine.cuda.stream.STEPS", steps)
    monkeypatch.setattr(stepper_module, "STEPS", steps)
    monkeypatch.setattr(stepper_module, "_kept", weakref.WeakKeyDictionary())
    ours = statically(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 13, 9)
    loops = decode(model, prefilled_by(model, LENGTHS), ROWS, STOPS, 13)
    assert near_ties(model, LENGTHS, ROWS, ours, loops) <= 1


@FAMILIES
@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=24),
    width=st.integers(1, 9),
    cuts=st.sets(st.integers(1, 4)),
    most=st.integers(1, 7),
    stops=st.sets(st.integers(3, tiny.VOCAB - 1), max_size=60),
)
def test_any_mix_of_contexts_rows_and_stops(architecture, rows, width, cuts, most, stops):
    model = tiny.model(architecture)
    rows = [Row(c, 0.5 * (i % 3), stream_key(0, "mix", i)) for i, c in enumerate(rows)]
    edges, told = [0, *sorted(cuts), 5], []
    groups = (prefilled_by(model, LENGTHS[a:b]) for a, b in pairwise(edges))
    ours = statically(model, groups, rows, stops, most, width, lambda *n: told.append(n))
    loops = decode(model, prefilled_by(model, LENGTHS[:5]), rows, stops, most)
    assert near_ties(model, LENGTHS, rows, ours, loops) <= 1
    assert sum(tokens for tokens, _ in told) == sum(len(row.token_ids) for row in ours)
    lengths = sorted(length for _, finished in told for length in finished)
    assert lengths == sorted(len(row.token_ids) for row in ours)


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


@pytest.mark.parametrize(
    ("architecture", "buffers"), [("qwen3", 16), ("gemma3", 16), ("qwen3_5", 10)]
)
def test_every_tensor_stays_where_it_is_over_refills_buckets_and_streams(architecture, buffers):
    model = tiny.model(architecture)
    seen, honest = [], Stepper.run

    def watched(stepper, lines, steps):
        seen.append((lines, [t.data_ptr() for t in stepper.tensors()]))
        drawn = honest(stepper, lines, steps)
        assert seen[-1][1] == [t.data_ptr() for t in stepper.tensors()]
        assert {t.data_ptr() for t in states(stepper)} <= set(seen[-1][1])
        return drawn

    def states(stepper):
        """What the model's own code sees of a recurrent layer."""
        return [t for layer in stepper._cache.layers for t in states_of(layer).values()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "run", watched)
        first = statically(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 12, 17)
        again = statically(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 12, 17)
    assert len({tuple(pointers) for _, pointers in seen}) == 1
    lines = [n for n, _ in seen[: len(seen) // 2]]
    assert len(seen[0][1]) == 10 + buffers and max(lines) == 17
    assert lines == sorted(lines, reverse=True) and len(set(lines)) > 2, "buckets only shrink"
    assert all(np.array_equal(a.margins, b.margins) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (Sizes(5, 3, 5, 0, 3), "a context of 31 tokens, where room was made for 0"),
        (Sizes(4, 3, 5, 128, 3), "5 rows of 3 tokens, 5 of a context, don't fit into "),
        (Sizes(5, 3, 4, 128, 3), "5 rows of 3 tokens, 5 of a context, don't fit into "),
        (Sizes(5, 3, 5, 128, 2), "5 rows of 3 tokens, 5 of a context, don't fit into "),
    ],
)
def test_what_doesnt_fit_into_the_buffers_is_refused(sizes, problem):
    model = tiny.model("llama")
    with pytest.raises(ValueError, match=problem):
        decode_stream(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 3, width=5, static=sizes)


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_5"])
def test_a_stepper_used_again_writes_the_same_bits(architecture):
    """A small unit on a fresh stepper, and after a large one: lines that it doesn't fill would send
    to the experts what they were left with."""
    model, sizes = tiny.model(architecture), Sizes.of(8, 7, 23, 31, 12)
    runs = []
    for rows_before in ([], ROWS):
        stepper_module.forget(model)
        for rows in (rows_before, ROWS[8:17]):
            group = prefilled_by(model, LENGTHS)
            wrote = decode_stream(model, [group], rows, STOPS, 12, width=23, static=sizes)
        runs.append(wrote)
    for fresh, again in zip(*runs, strict=True):
        assert np.array_equal(fresh.token_ids, again.token_ids)
        assert np.array_equal(fresh.logprobs_raw, again.logprobs_raw)
        assert np.array_equal(fresh.margins, again.margins)


def test_a_stepper_is_kept_while_its_model_and_its_sizes_are():
    model = type(tiny.model("llama"))(tiny.model("llama").config).eval().requires_grad_(False)
    group = prefilled_by(model, (9, 5))
    sizes = Sizes.of_rows([0, 1, 1], 3, 9, 4)
    kept = stepper_for(model, sizes, group)
    assert stepper_for(model, sizes, group) is kept
    gone = weakref.ref(kept)
    kept = stepper_for(model, Sizes.of_rows([0, 1, 1], 2, 9, 4), group)
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


@FAMILIES
def test_the_check_of_graphs_passes_on_these_and_finds_wrong_numbers(architecture, monkeypatch):
    model = tiny.model(architecture)
    assert why_not(model) == ""
    assert check._problem(model, tiny.prompt(12, seed=0)) == ""
    if architecture == "llama":
        wrong = "ia_mech.engine.cuda.layer.merge"
        monkeypatch.setattr(wrong, lambda first, second, sinks=None: second[0])
        said = check._problem(model, tiny.prompt(12, seed=0))
        assert said.startswith("no CUDA graphs: log-probabilities differ from a full pass by")


@pytest.mark.parametrize(
    ("architecture", "engine", "wanted", "asked"),
    [
        ("llama", Engine(4, 4), "shared", True),
        ("gpt_oss", Engine(2, 4), "auto", True),
        ("mistral", Engine(0, 4, "no layer has full attention"), "auto", True),
        ("mistral", Engine(0, 4), "portable", False),  # the user's word
        ("llama", Engine(0, 4), "portable", False),
        ("llama", Engine(0, 4, "other logits"), "auto", False),  # sharing was found wrong
    ],
)
def test_graphs_are_asked_for_on_a_gpu_unless_sharing_is_refused(
    architecture, engine, wanted, asked, monkeypatch
):
    gpu = SimpleNamespace(device=torch.device("cuda"), config=tiny.model(architecture).config)
    monkeypatch.setattr(check, "_problem", lambda model, ids: "")
    for problem in ("", "no CUDA graphs: wrong"):
        monkeypatch.setattr(check, "why_not", lambda model, problem=problem: problem)
        ours = check.with_graphs(gpu, [], engine, wanted)
        if not asked:
            assert ours is engine
            continue
        assert ours.graphs == (problem == "") and ours.shared == engine.shared
        assert ours.why == "; ".join(part for part in (engine.why, problem) if part and problem)


def test_a_run_decodes_from_static_buffers_where_the_engine_says_so(
    tiny_subject, tmp_path, progress, monkeypatch
):
    """Responses and user turns; what is recorded says so, and the rows are those of the loop."""
    grid = Grid((0.7, 1.0), 2, 8, 0)
    config = SampleConfig(limit=3, grid=grid, batch_rows=10, response="generate", swaps=0)
    config = replace(config, max_response_tokens=6)
    loops = collect(config, tiny_subject, tmp_path / "loop", progress)
    monkeypatch.setattr(
        ia_mech.collect.job,
        "with_graphs",
        lambda model, ids, engine, wanted: replace(engine, graphs=True),
    )
    ours = collect(config, tiny_subject, tmp_path / "static", progress)
    assert ours.record["identity"]["engine"] == "shared-prefix 4 of 4 layers, CUDA graphs"
    for a, b in zip(ours.generations.iloc, loops.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            n = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:n] != b["token_ids"][:n]))
            assert min(a["margins"][first], b["margins"][first]) < 1e-4
