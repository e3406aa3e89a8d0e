"""Interventions against plain hooks in full passes of one row, for every tested architecture."""

import numpy as np
import pytest
import tiny
import torch
from contract import LOGPROB, VECTOR, relative_l2

from ia_mech.engine.capture import find_blocks
from ia_mech.engine.intervene import Add, ProjectOut, Replace, from_layer, intervene
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.likelihood.intervened import IntervenedTurns

CONTEXT, START, DEPTH = 23, 18, 4  # sliding windows are 8 tokens
TURNS = (5, 9, 1)
WIDTH = 32


def context() -> list[int]:
    return tiny.prompt(CONTEXT, seed=3)


def turns() -> list[list[int]]:
    return [tiny.prompt(n, seed=n) for n in TURNS]


def vectors(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def by_plain_hooks(model, ids: list[int], edit=None) -> torch.Tensor:
    """``[tokens, vocab]`` logits of one pass without a cache.

    Args:
        edit: layer and a function of ``[tokens, d_model]`` that changes them in place.
    """
    blocks, handles = find_blocks(model), []
    if edit is not None:
        layer, change = edit

        def leave(_module, _args, output):
            change(output[0])

        def enter(_module, args, kwargs):
            change((args[0] if args else kwargs["hidden_states"])[0])

        handles.append(
            blocks[layer - 1].register_forward_hook(leave)
            if layer
            else blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
        )
    try:
        return model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()


def logprobs(logits: torch.Tensor, turn: list[int], temperature: float) -> np.ndarray:
    before = logits[CONTEXT - 1 : CONTEXT - 1 + len(turn)].double() / temperature
    return before.log_softmax(-1).gather(-1, torch.tensor(turn)[:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    ("architecture", "temperature"), [("llama", 1.0), *((each, 0.7) for each in tiny.ARCHITECTURES)]
)
def test_scores_under_residual_edits_equal_plain_hooks(architecture, temperature):
    """One batch holds rows of every turn, layer and kind; each is compared with a pass alone."""
    model = tiny.model(architecture)
    rows, plain = [], []
    for number in range(len(TURNS)):
        for layer in (0, 1, DEPTH):
            states, direction = vectors(2, seed=layer), vectors(1, seed=9)[0]

            def put(hidden, states=states):
                hidden[[START, CONTEXT - 1]] = states

            def add(hidden, direction=direction):
                own = hidden[START + 2].clone()
                hidden[START + 2] += 0.5 * own.norm() * direction / direction.norm()

            def remove(hidden, direction=direction):
                unit = direction / direction.norm()
                for at in (START, CONTEXT - 1):
                    hidden[at] -= 0.7 * torch.dot(hidden[at].clone(), unit) * unit

            rows.append((number, [Replace(layer, (START, CONTEXT - 1), states)]))
            plain.append((layer, put))
            rows.append((number, [ProjectOut(layer, (START, CONTEXT - 1), direction, 0.7)]))
            plain.append((layer, remove))
            rows.append((number, [Add(layer, (START + 2,), direction, 0.5)]))
            plain.append((layer, add))
        rows.append((number, []))
        plain.append(None)
    found = IntervenedTurns(model, context(), START, turns()).score(rows, temperature)
    moved = []
    for (number, _), edit, own in zip(rows, plain, found, strict=True):
        turn = turns()[number]
        wanted = logprobs(by_plain_hooks(model, [*context(), *turn], edit), turn, temperature)
        np.testing.assert_allclose(own, wanted, rtol=0, atol=LOGPROB / temperature)
        moved.append(wanted.sum())
    assert len({round(float(one), 3) for one in moved}) > len(moved) / 2, (
        "edits that move something"
    )


@torch.inference_mode()
def test_no_dose_and_own_states_change_no_bit():
    model = tiny.model("llama")
    ids = torch.tensor([context()])
    plain = model(ids, use_cache=False, output_hidden_states=True)
    own = plain.hidden_states[2][0, [3, 5]]
    direction = vectors(1, seed=2)[0]
    none = (
        Add(2, (3, 5), direction, 0.0),
        ProjectOut(2, (3, 5), direction, 0.0),
        Replace(2, (3, 5), own),
    )
    for kind in none:
        with intervene(model, [[kind]]):
            assert torch.equal(model(ids, use_cache=False).logits, plain.logits)
    with intervene(model, [[Add(2, (3, 5), vectors(1, seed=2)[0], 0.1)]]):
        assert not torch.equal(model(ids, use_cache=False).logits, plain.logits)


def hooks_of(model) -> list[tuple]:
    """Every hook and replaced forward; transformers leaves some of its own."""
    return [
        (*module._forward_hooks, *module._forward_pre_hooks, vars(module).get("forward"))
        for module in model.modules()
    ]


@torch.inference_mode()
def test_no_hook_is_left_whatever_happens():
    model = tiny.model("llama")
    ids, before = torch.tensor([context()]), hooks_of(model)
    kinds = [Replace(0, (1,), vectors(1, seed=0)), Replace(2, (5,), vectors(1, seed=1))]
    with pytest.raises(ZeroDivisionError), intervene(model, [kinds]):
        raise ZeroDivisionError
    assert hooks_of(model) == before
    with pytest.raises(ZeroDivisionError), from_layer(model, 3, torch.zeros(1, CONTEXT, WIDTH)):
        raise ZeroDivisionError
    assert hooks_of(model) == before
    with pytest.raises(RuntimeError, match="layer 0 ran 0 times"), intervene(model, [kinds]):
        pass
    late = Replace(1, (CONTEXT,), vectors(1, seed=0))
    said = "position 23 isn't among the tokens 0 to 22"
    with pytest.raises(UserError, match=said), intervene(model, [[late]]):
        model(ids, use_cache=False)
    assert hooks_of(model) == before
    early = Replace(1, (START - 1,), vectors(1, seed=0))
    with pytest.raises(UserError, match="position 17 isn't among the tokens 18 to"):
        IntervenedTurns(model, context(), START, turns()).score([(0, [early])])
    assert hooks_of(model) == before


def test_what_selects_nothing_or_isnt_there_is_refused():
    state = vectors(1, seed=0)
    for made, said in (
        (lambda: Replace(1, (), state[:0]), "selects no position"),
        (lambda: Add(1, (), state[0], 1.0), "selects no position"),
        (lambda: Add(1, (0,), 0 * state[0], 1.0), "has no length"),
        (lambda: ProjectOut(1, (), state[0]), "selects no position"),
        (lambda: ProjectOut(1, (0,), state[0] / 0), "has no length"),
    ):
        with pytest.raises(UserError, match=said):
            made()
    with pytest.raises(ValueError, match="2 positions"):
        Replace(1, (0, 1), state)
    model = tiny.model("llama")
    before = hooks_of(model)
    said = "no layer 5 to change; give layers from 0 to 4"
    with pytest.raises(UserError, match=said), intervene(model, [[Replace(5, (0,), state)]]):
        pass
    assert hooks_of(model) == before


@pytest.mark.slow  # TransformerLens takes long to import
@torch.inference_mode()
def test_captured_patched_and_steered_passes_equal_transformer_lens(tmp_path, tokenizer):
    from transformer_lens.model_bridge import TransformerBridge

    from ia_mech.models.bridge import hook_name

    model = tiny.model("qwen3", len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu", dtype=torch.float32)
    ids, state = torch.tensor([context()]), vectors(1, seed=4)
    _, cache = bridge.run_with_cache(ids)
    kept = prefill(model, [Prefix(context(), (7, CONTEXT - 1))], find_blocks(model)).residuals[0]
    for layer, states in enumerate(kept):
        assert relative_l2(states, cache[hook_name(layer)][0, [7, CONTEXT - 1]]) <= VECTOR
    plain = model(ids, use_cache=False).logits[0]
    for layer in (0, 2):
        for kind in (Replace(layer, (7,), state), Add(layer, (7,), state[0], 0.8)):

            def change(hidden, hook, kind=kind):
                own = hidden[0, 7].clone()
                length = 0.8 * own.norm() / state[0].norm()
                hidden[0, 7] = state[0] if isinstance(kind, Replace) else own + length * state[0]
                return hidden

            theirs = bridge.run_with_hooks(ids, fwd_hooks=[(hook_name(layer), change)])[0]
            with intervene(model, [[kind]]):
                ours = model(ids, use_cache=False).logits[0]
            assert relative_l2(theirs, ours) <= VECTOR
            assert (ours - plain)[7:].norm() > 1e-2
