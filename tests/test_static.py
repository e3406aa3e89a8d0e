"""Static buffers on a CPU: the same rows as the loop's, in tensors that stay where they are."""

import gc
import weakref
from collections import Counter
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
from ia_mech.engine.cuda.check import why_not
from ia_mech.engine.cuda.layers import Sizes, StaticRecurrentLayer, states_of
from ia_mech.engine.cuda.stepper import StaticBuffers, Stepper
from ia_mech.engine.cuda.stream import PrefixSlots
from ia_mech.engine.decode import decode, decode_stream
from ia_mech.engine.loop import Row
from ia_mech.engine.plan import Grid, OomBackoff
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError

FAMILIES = pytest.mark.parametrize("architecture", tiny.FAMILIES)
steady = settings(derandomize=True, deadline=None, max_examples=60)


def buffers_for(model, rows, most) -> StaticBuffers:
    each = Counter(row.context for row in rows)
    return StaticBuffers(model, len(each), max(each.values()), 31, most)


def statically(model, groups, rows, stops, most, width, on_step=None):
    static = buffers_for(model, rows, most)
    return decode_stream(
        model, groups, rows, stops, most, width=width, on_step=on_step, static=static
    )


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@pytest.mark.parametrize(("width", "parts"), [(5, ((0, 3), (3, 4), (4, 8))), (17, ((0, 8),))])
def test_rows_equal_the_loops(architecture, width, parts):
    model = tiny.model(architecture)
    loops = decode(model, prefilled_by(model, LENGTHS), ROWS, STOPS, 13)
    assert {1, 13} < {len(row.token_ids) for row in loops}, "rows end at all times"
    groups = (prefilled_by(model, LENGTHS[a:b]) for a, b in parts)
    ours = statically(model, groups, ROWS, STOPS, 13, width)
    assert near_ties(model, LENGTHS, ROWS, ours, loops) <= 1


def not_captured(stepper) -> SimpleNamespace:
    """Stands in for a graph: makes the step that it would replay."""
    return SimpleNamespace(replay=lambda: stepper._step(stepper.sizes))


@FAMILIES
def test_a_graph_always_makes_the_step_of_the_whole_batch(architecture, monkeypatch):
    monkeypatch.setattr(Stepper, "_capture", not_captured)
    sizes, honest = [], Stepper._step
    monkeypatch.setattr(
        Stepper, "_step", lambda stepper, part: sizes.append(part) or honest(stepper, part)
    )
    model = tiny.model(architecture)
    static = replace(buffers_for(model, ROWS, 13), graphs=True)
    groups = [prefilled_by(model, LENGTHS)]
    ours = decode_stream(model, groups, ROWS, STOPS, 13, width=17, static=static)
    assert set(sizes) == {static.sizes(17)}
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


def tensors_of(stepper) -> list[torch.Tensor]:
    """Every tensor that a step reads or writes and that is still there after it."""
    own = [value for value in vars(stepper).values() if isinstance(value, torch.Tensor)]
    return own + [t for layer in stepper._layers for t in layer.tensors()]


@pytest.mark.parametrize(
    ("architecture", "buffers"), [("qwen3", 16), ("gemma3", 16), ("qwen3_5", 10)]
)
def test_every_tensor_stays_where_it_is_over_refills_and_streams(architecture, buffers):
    model = tiny.model(architecture)
    seen, honest = [], Stepper.step

    def watched(stepper, part):
        seen.append((part.slots, [t.data_ptr() for t in tensors_of(stepper)]))
        drawn = honest(stepper, part)
        assert seen[-1][1] == [t.data_ptr() for t in tensors_of(stepper)]
        assert {t.data_ptr() for t in states(stepper)} <= set(seen[-1][1])
        return drawn

    def states(stepper):
        """What the model's own code sees of a recurrent layer."""
        recurrent = [one for one in stepper._layers if isinstance(one, StaticRecurrentLayer)]
        return [t for layer in recurrent for t in states_of(layer).values()]

    static = buffers_for(model, ROWS, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "step", watched)
        first, again = (
            decode_stream(
                model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 12, width=17, static=static
            )
            for _ in range(2)
        )
    assert len({tuple(pointers) for _, pointers in seen}) == 1
    slots = [n for n, _ in seen[: len(seen) // 2]]
    assert len(seen[0][1]) == 9 + buffers and max(slots) == 17
    assert slots == sorted(slots, reverse=True) and len(set(slots)) > 2, "the batch is compacted"
    assert all(np.array_equal(a.margins, b.margins) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((5, 3, 5, 24, 3), "a context of 31 tokens doesn't fit into buffers for 24"),
        ((4, 3, 5, 32, 3), "5 rows of 3 tokens, 5 of a context, don't fit into "),
        ((5, 3, 4, 32, 3), "5 rows of 3 tokens, 5 of a context, don't fit into "),
        ((5, 3, 5, 32, 2), "5 rows of 3 tokens, 5 of a context, don't fit into "),
    ],
)
def test_what_doesnt_fit_into_the_buffers_is_refused(sizes, problem, monkeypatch):
    model = tiny.model("llama")
    static = buffers_for(model, ROWS, 3)
    monkeypatch.setattr(static, "sizes", lambda width: Sizes(*sizes))
    with pytest.raises(ValueError, match=problem):
        decode_stream(model, [prefilled_by(model, LENGTHS)], ROWS, STOPS, 3, width=5, static=static)


def test_buffers_that_dont_fit_into_memory_are_refused_before_they_are_made(monkeypatch):
    """Of 17 rows, where there is memory for those of 8: MemoryError, on which a run goes on with
    half the rows."""
    model, tried = tiny.model("llama"), []
    static = buffers_for(model, ROWS, 12)
    sizes = static.sizes(8)
    # Keys and values of 4 layers, 2 heads and 8 dimensions in float32.
    needed = 4 * 2 * 2 * 8 * 4 * (sizes.prefixes * 32 + sizes.slots * 12)

    def attempt(width):
        tried.append(width)
        groups = [prefilled_by(model, LENGTHS)]
        return decode_stream(model, groups, ROWS, STOPS, 12, width=width, static=static)

    monkeypatch.setattr(stepper_module, "free_bytes", lambda device: needed - 1)
    with pytest.raises(MemoryError, match="buffers need"):
        attempt(8)
    monkeypatch.setattr(stepper_module, "free_bytes", lambda device: needed)
    tried.clear()
    ours = OomBackoff(17).retry(attempt)
    assert tried == [17, 8]
    loops = decode(model, prefilled_by(model, LENGTHS), ROWS, STOPS, 12)
    assert near_ties(model, LENGTHS, ROWS, ours, loops) <= 1


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("graphs", [False, True])
def test_buffers_used_again_give_the_same_bits(architecture, graphs, monkeypatch):
    """A small unit in fresh buffers, and after a large one: batch slots that it doesn't fill would
    send to the experts what they were left with."""
    monkeypatch.setattr(Stepper, "_capture", not_captured)
    model, runs = tiny.model(architecture), []
    for rows_before in ([], ROWS):
        static = StaticBuffers(model, 8, 7, 31, 12, graphs)
        for rows in (rows_before, ROWS[8:17]):
            group = prefilled_by(model, LENGTHS)
            wrote = decode_stream(model, [group], rows, STOPS, 12, width=23, static=static)
        runs.append(wrote)
    for fresh, again in zip(*runs, strict=True):
        assert np.array_equal(fresh.token_ids, again.token_ids)
        assert np.array_equal(fresh.logprobs_raw, again.logprobs_raw)
        assert np.array_equal(fresh.margins, again.margins)


def test_buffers_are_kept_for_batches_of_the_same_width():
    model = tiny.model("llama")
    group, static = prefilled_by(model, (9, 5)), StaticBuffers(model, 2, 2, 9, 4)
    kept = static.stepper(static.sizes(3), group)
    assert static.stepper(static.sizes(3), group) is kept
    gone = weakref.ref(kept)
    kept = static.stepper(static.sizes(2), group)
    assert gone() is None
    gone = weakref.ref(kept)
    del kept
    static.release()
    gc.collect()
    assert gone() is None


def test_buffers_are_released_by_what_fails():
    model = tiny.model("llama")
    static = buffers_for(model, ROWS, 3)

    def told(*_):
        raise RuntimeError("from outside")

    with pytest.raises(RuntimeError, match="from outside"):
        decode_stream(
            model, [prefilled_by(model, LENGTHS)], ROWS, [], 3, width=5, on_step=told, static=static
        )
    assert static._stepper is None


@steady
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=8))
def test_each_batch_slot_is_gathered_once_with_its_context(batches):
    """Rows of any contexts come and go, in batches of any size."""
    held, sizes = PrefixSlots(8), Sizes(8, 8, 8, 128, 4)
    content: list[int | None] = [None] * 8  # of each prefix slot
    for batch in batches:
        contexts = [None if c == 9 else c for c in batch]
        held.keep({c for c in contexts if c is not None})
        for context in contexts:
            if context is not None and context not in held.slot:
                assert held.free
                content[held.hold(context)] = context
        part = replace(sizes, slots=len(contexts), rows=len(contexts))
        gather, scatter = held.tables(contexts, part)
        assert gather.shape == (8 * part.rows,) and len(scatter) == part.slots
        busy = [slot for slot, context in enumerate(contexts) if context is not None]
        assert len({int(scatter[slot]) for slot in busy}) == len(busy)
        for slot in busy:
            assert gather[scatter[slot]] == slot
            assert content[scatter[slot] // part.rows] == contexts[slot]


@FAMILIES
def test_the_check_passes_on_these_and_finds_wrong_numbers(architecture, monkeypatch):
    model = tiny.model(architecture)
    assert why_not(model) == ""
    assert check._failure(model, tiny.prompt(24, seed=0), graphs=False) == ""
    if architecture == "llama":
        wrong = "ia_mech.engine.cuda.layers.merge"
        monkeypatch.setattr(wrong, lambda first, second, sinks=None: second[0])
        said = check._failure(model, tiny.prompt(24, seed=0), graphs=False)
        assert said.startswith("no static buffers: LlamaForCausalLM gives other logits in sampled")


@pytest.mark.parametrize(
    ("architecture", "engine", "wanted", "checked"),
    [
        ("llama", Engine(4, 4), "shared", True),
        ("llama", Engine(4, 4), "graphs", True),
        ("gpt_oss", Engine(2, 4), "auto", True),
        ("mistral", Engine(0, 4, "no layer has full attention"), "auto", True),
        ("mistral", Engine(0, 4), "portable", False),  # the user's word
        ("llama", Engine(0, 4), "portable", False),
        ("llama", Engine(0, 4, "other logits"), "auto", False),  # sharing was found wrong
        ("llama", Engine(0, 4, "other logits"), "graphs", False),
    ],
)
def test_a_gpu_has_static_buffers_and_graphs_only_on_demand(
    architecture, engine, wanted, checked, monkeypatch
):
    gpu = SimpleNamespace(device=torch.device("cuda"), config=tiny.model(architecture).config)
    monkeypatch.setattr(check, "why_not", lambda model: "")
    for problem in ("", "no static buffers: wrong"):
        monkeypatch.setattr(check, "_failure", lambda *_, problem=problem: problem)
        if wanted == "graphs" and (problem or not checked):
            why = problem if checked else engine.why
            with pytest.raises(UserError, match=f"--engine graphs: {why}; use --engine auto"):
                check.with_static_buffers(gpu, [], engine, wanted)
            continue
        ours = check.with_static_buffers(gpu, [], engine, wanted)
        assert ours.static == (checked and not problem) and ours.shared == engine.shared
        assert ours.graphs == (wanted == "graphs")
        if not checked:
            assert ours == engine
        else:
            why = [part for part in (engine.why, problem) if part and problem]
            assert ours.why == "; ".join(why)


def test_a_cpu_has_no_static_buffers():
    engine = Engine(4, 4)
    assert check.with_static_buffers(tiny.model("llama"), [], engine) is engine


def test_what_a_run_records():
    assert Engine(4, 4).name == "shared-prefix 4 of 4 layers"
    assert Engine(4, 4, static=True).name == "shared-prefix 4 of 4 layers, static buffers"
    assert Engine(2, 4, static=True, graphs=True).name == "shared-prefix 2 of 4 layers, CUDA graphs"
    assert Engine(0, 4, static=True).name == "static buffers"
    assert Engine(0, 4).name == "portable"


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
        "with_static_buffers",
        lambda model, ids, engine, wanted: replace(engine, static=True),
    )
    made, honest = [], stepper_module.Stepper
    monkeypatch.setattr(
        stepper_module, "Stepper", lambda *given: made.append(given[1]) or honest(*given)
    )
    ours = collect(config, tiny_subject, tmp_path / "static", progress)
    assert ours.record["identity"]["engine"] == "shared-prefix 4 of 4 layers, static buffers"
    assert [sizes.own_capacity for sizes in made] == [6, 8], "made once for each phase"
    longest = ours.contexts["token_ids"].map(len).max()
    assert longest <= made[1].prefix_capacity < longest + 8, "by the responses as they were written"
    for a, b in zip(ours.generations.iloc, loops.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            n = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:n] != b["token_ids"][:n]))
            assert min(a["margins"][first], b["margins"][first]) < 1e-4
