"""The layers of static buffers one by one, and that a step launches without looking at data."""

import copy
from dataclasses import replace

import pytest
import tiny
import torch
from test_attention import exact
from test_static import tensors_of
from test_stream import prefilled_by
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ia_mech.engine.cuda.check import why_not
from ia_mech.engine.cuda.layers import Sizes, StaticLayer, StaticRecurrentLayer, View
from ia_mech.engine.cuda.stepper import StaticBuffers, Stepper
from ia_mech.engine.cuda.stream import PrefixSlots
from ia_mech.engine.prefill import Prefilled, State

CPU = torch.device("cpu")
ADVANCED = ("_token", "_age", "_start", "_temperature", "_key", "_length")
FAMILIES = pytest.mark.parametrize("architecture", tiny.FAMILIES)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 2, 8, 10, 300])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_over_prefixes_and_own_tokens_in_float64(
    window, softcap, fused, with_sinks, monkeypatch
):
    """Rows of two contexts in turns, of any age, an idle batch slot and a free prefix slot. Of
    windows some are full before the row begins, some reach the prefix no more, some see all."""
    if not fused:
        monkeypatch.setattr("ia_mech.engine.shared_prefix.FUSED", ())
    sizes = Sizes(slots=5, prefixes=3, rows=2, prefix_capacity=128, own_capacity=6)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    given = drawn(2, 2, 9, 8), drawn(2, 2, 9, 8)
    source = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    source.update(*given)
    layer = StaticLayer(source, sizes, CPU)
    assert layer.prefix[0].shape[2] == (128 if window is None else min(128, window))
    lengths = torch.tensor([9, 5, 1])  # of the prefixes; context 1 has 4 tokens of padding
    padded = torch.tensor([0, 4])
    layer.put_prefixes(torch.arange(2), source, torch.arange(2), padded)
    held, contexts = PrefixSlots(3), [1, 0, None, 1, 0]
    assert [held.hold(0), held.hold(1)] == [0, 1]
    gather, scatter = map(torch.from_numpy, held.tables(contexts, sizes))
    place = torch.tensor([0, 3, 5, 5, 1])
    layer.own[0].copy_(drawn(5, 2, 6, 8))
    layer.own[1].copy_(drawn(5, 2, 6, 8))
    layer.look(View(sizes, place, lengths, gather, scatter))
    query, new = drawn(5, 4, 1, 8), (drawn(5, 2, 1, 8), drawn(5, 2, 1, 8))
    keys, values = layer.update(*new)
    assert keys.shared_layer is layer
    sinks = torch.linspace(-2, 2, 4) if with_sinks else None
    ours = layer.attend(query, keys, values, 0.3, softcap, sinks)
    assert torch.isfinite(ours).all()
    for slot, context in enumerate(contexts):
        if context is not None:
            parts = [
                torch.cat(
                    [tensor[context, :, (0, 4)[context] :], own[slot, :, : place[slot] + 1]], 1
                )
                for tensor, own in zip(given, layer.own, strict=True)
            ]
            assert torch.equal(parts[0][:, -1:], new[0][slot])
            tokens = parts[0].shape[1]
            unseen = torch.arange(tokens) < tokens - (window or tokens)
            theirs = exact(
                query[slot : slot + 1],
                *(part[None] for part in parts),
                unseen,
                scaling=0.3,
                softcap=softcap,
                sinks=sinks,
            )
            assert (ours[slot].double() - theirs[0]).abs().max() < 2e-6


def recurrent_layer(generator: torch.Generator, contexts: int = 3) -> LinearAttentionLayer:
    """As a prefill leaves it, with two states of one kind and one of the other."""
    layer = LinearAttentionLayer(number_of_states=2)
    for number in range(2):
        layer.update_conv_state(torch.randn(contexts, 6, 4, generator=generator), number)
    layer.update_recurrent_state(torch.randn(contexts, 2, 3, 5, generator=generator))
    return layer


def test_recurrent_states_begin_advance_and_move_in_place():
    generator = torch.Generator().manual_seed(0)
    source, sizes = recurrent_layer(generator), Sizes(5, 3, 2, 128, 6)
    layer = StaticRecurrentLayer(source, sizes, CPU)
    pointers = [t.data_ptr() for t in layer.tensors()]
    assert len(pointers) == 3 and all(t.shape[0] == 5 for t in layer.tensors())
    layer.begin(torch.tensor([4, 0, 2]), source, torch.tensor([1, 2, 1]))
    assert torch.equal(layer.conv_states[1][[0, 2, 4]], source.conv_states[1][[2, 1, 1]])
    assert torch.equal(layer.recurrent_states[0][[0, 2, 4]], source.recurrent_states[0][[2, 1, 1]])
    assert not layer.recurrent_states[0][[1, 3]].any()
    layer.keep(torch.tensor([2, 4]))
    assert torch.equal(layer.recurrent_states[0][:2], source.recurrent_states[0][[1, 1]])
    before = [t.clone() for t in layer.tensors()]
    numbers = torch.zeros(2, dtype=torch.long)
    layer.look(View(replace(sizes, slots=2), numbers, numbers, numbers, numbers))
    new = torch.randn(2, 2, 3, 5, generator=generator), torch.randn(2, 6, 1, generator=generator)
    assert layer.update_recurrent_state(new[0]).shape[0] == 2
    seen = layer.update_conv_state(new[1], 0)
    assert torch.equal(seen, torch.cat([before[0][:2], new[1]], -1)), "goes on from what was there"
    assert torch.equal(layer.states["recurrent_states", 0][:2], new[0])
    assert torch.equal(layer.states["conv_states", 0][:2], seen[..., -4:])
    assert torch.equal(layer.states["conv_states", 1], before[1])
    for now, then in zip(layer.tensors(), before, strict=True):
        assert torch.equal(now[2:], then[2:]), "slots of no row are left alone"
    assert pointers == [t.data_ptr() for t in layer.tensors()]


@FAMILIES
def test_steps_before_a_capture_leave_no_trace(architecture):
    """What two batches draw, one of which was warmed up; their own tokens aside, which a row writes
    before it reads them."""
    model = tiny.model(architecture)
    group, drawn, left = prefilled_by(model, (9, 5)), [], []
    for warmed in (False, True):
        sizes = StaticBuffers(None, 2, 2, 9, 12).sizes(5)
        stepper, held = Stepper(model, sizes, group), PrefixSlots(sizes.prefixes)
        if warmed:
            with torch.inference_mode():
                stepper._token.fill_(7)  # the embedding of 0, padding, is zero
                stepper._warm_up()
        recurrent = [one for one in stepper._layers if isinstance(one, StaticRecurrentLayer)]
        kept = [value for name, value in vars(stepper).items() if name in ADVANCED]
        left.append([*kept, *(t for layer in recurrent for t in layer.tensors())])
        left[-1] = [tensor.clone() for tensor in left[-1]]
        stepper.put_prefixes([held.hold(0), held.hold(1)], group, [0, 1])
        contexts, hot = [0, 1, 1], (torch.ones(3), torch.arange(6).view(3, 2))
        stepper.begin(range(3), contexts, group, torch.tensor(contexts), *hot)
        stepper.put_tables(*held.tables(contexts, sizes))
        drawn.append([stepper.step(sizes)()[:, :3] for _ in range(4)])
    for ours, theirs in zip(*left, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(*drawn, strict=True):
        assert torch.equal(ours, theirs)


class NoData(TorchDispatchMode):
    """Raises where an operation touches a tensor that isn't on the meta device: a copy from the
    host, or work there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, output)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                raise RuntimeError(f"{func} of a tensor on {leaf.device}")
        return output


def without_data(group: Prefilled) -> Prefilled:
    """The shapes of a prefilled group."""

    def moved(value):
        if isinstance(value, dict):
            return {name: moved(one) for name, one in value.items()}
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    cache, state = copy.copy(group.state.cache), group.state
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in cache.layers:
        vars(layer).update(moved(vars(layer)))
    state = State(cache, moved(state.mask), moved(state.position))
    return Prefilled(state, moved(group.logits), None)


def step_without_data(architecture: str, experts: str | None = None) -> Stepper:
    """A step on tensors that have shapes and no numbers, with the attention that a GPU takes: what
    would make the host wait for a number raises."""
    # In half precision, the only one whose grouped products PyTorch has shapes for.
    model = copy.deepcopy(tiny.model(architecture)).bfloat16()
    group = prefilled_by(model, (9, 5, 12))
    if experts is not None:
        model.set_experts_implementation(experts)
    sizes = StaticBuffers(None, 3, 2, 12, 12).sizes(5)
    stepper = Stepper(model.to("meta"), sizes, without_data(group))
    with torch.inference_mode(), NoData():
        stepper._step(stepper.part(3))
    return stepper


@FAMILIES
def test_no_step_depends_on_data(architecture):
    stepper = step_without_data(architecture)
    assert {tensor.device.type for tensor in tensors_of(stepper)} == {"meta"}


@pytest.mark.parametrize("architecture", ["gpt_oss"])
def test_loops_over_experts_depend_on_data(architecture):
    """With that implementation of them steps can't be captured."""
    with pytest.raises(NotImplementedError, match="nonzero"):
        step_without_data(architecture, experts="eager")


@pytest.mark.parametrize(
    "look", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.ones(3).to(x.device)]
)
def test_looking_at_data_is_noticed(look):
    with pytest.raises((RuntimeError, NotImplementedError)), NoData():
        look(torch.ones(3, device="meta"))


def test_models_of_other_layers_say_so():
    model = copy.deepcopy(tiny.model("llama"))
    model.config.layer_types = ["hybrid"] * 4
    assert why_not(model) == (
        "no static buffers: there are none for a LinearAttentionAndFullAttentionLayer"
    )
    model.config.layer_types = ["chunked_attention"] * 4
    model.config.attention_chunk_size = 8
    assert why_not(model) == "no static buffers: some layers attend in chunks"
