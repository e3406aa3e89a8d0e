"""Interventions against plain hooks in full passes of one row, for every tested architecture."""

import numpy as np
import pytest
import tiny
import torch
from contract import LOGPROB, VECTOR, relative_l2
from tape import Tape

from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.intervene import Add, ProjectOut, Replace
from ia_mech.engine.passes import Pass, current
from ia_mech.engine.score import LOGITS, Turn
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.likelihood.scorer import score_turns

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
    ("architecture", "piece"),
    [*((each, 256) for each in tiny.ARCHITECTURES), *((each, 4) for each in tiny.FAMILIES)],
)
def test_scores_under_residual_edits_equal_plain_hooks(architecture, piece, monkeypatch):
    """One batch holds rows of every turn and layer, and every kind at each layer; each is compared
    with a pass alone. The tokens from a context's :data:`START` on are scored with the turn, and
    edited there."""
    monkeypatch.setitem(LOGITS, "cpu", piece * tiny.VOCAB)
    model = tiny.model(architecture)
    rows, plain = [], []
    first, last = 0, CONTEXT - 1 - START
    for number in range(len(TURNS)):
        for place, layer in enumerate((0, 1, DEPTH)):
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

            kinds = [
                (Replace(layer, (first, last), states), put),
                (ProjectOut(layer, (first, last), direction, 0.7), remove),
                (Add(layer, (2,), direction, 0.5), add),
            ]
            edit, by_hand = kinds[(number + place) % 3]
            rows.append((number, [edit]))
            plain.append((layer, by_hand))
        rows.append((number, []))
        plain.append(None)
    given = [
        Turn(0, [*context()[START:], *turns()[n]], interventions=tuple(some), whole_at=last + 1)
        for n, some in rows
    ]
    found = score_turns(model, [context()[:START]], given, [0.7])
    moved = []
    for (number, _), edit, own in zip(rows, plain, found, strict=True):
        turn, logits = turns()[number], by_plain_hooks(model, [*context(), *turns()[number]], edit)
        for ours, temperature in ((own.logprobs_raw, 1.0), (own.logprobs_tempered[0], 0.7)):
            wanted = logprobs(logits, turn, temperature)
            np.testing.assert_allclose(ours[last + 1 :], wanted, rtol=0, atol=LOGPROB / temperature)
        whole = logits[CONTEXT - 1].log_softmax(-1)
        np.testing.assert_allclose(own.whole, whole, rtol=0, atol=LOGPROB)
        moved.append(wanted.sum())
    assert len({round(float(one), 3) for one in moved}) > len(moved) / 2, (
        "edits that move something"
    )


def prefilled_with(model, *interventions):
    return prefill(model, [Prefix(context(), (3, 5), interventions)])


def test_no_dose_and_own_states_change_no_bit():
    model = tiny.model("llama")
    plain, direction = prefilled_with(model), vectors(1, seed=2)[0]
    for kind in (
        Add(2, (3, 5), direction, 0.0),
        ProjectOut(2, (3, 5), direction, 0.0),
        Replace(2, (3, 5), plain.residuals[0, 2]),
    ):
        found = prefilled_with(model, kind)
        assert torch.equal(found.logits, plain.logits)
        assert torch.equal(found.residuals, plain.residuals)
    other = prefilled_with(model, Add(2, (3, 5), direction, 0.1))
    assert not torch.equal(other.logits, plain.logits)


def hooks_of(model) -> list[tuple]:
    """Every hook and replaced forward."""
    return [
        (*module._forward_hooks, *module._forward_pre_hooks, vars(module).get("forward"))
        for module in model.modules()
    ]


def test_nothing_is_left_on_whatever_happens(monkeypatch):
    model = tiny.model("llama")
    before, plain = (hooks_of(model), model.config._attn_implementation), prefilled_with(model)
    late = Replace(1, (CONTEXT,), vectors(1, seed=0))
    with pytest.raises(UserError, match="position 23 isn't among the tokens 0 to 22"):
        prefilled_with(model, late)
    with pytest.raises(UserError, match="position 99 isn't among the tokens 0 to 22"):
        prefill(model, [Prefix(context(), (99,))])

    def fails(self, own):
        assert current() is not None
        return 1 / 0

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Replace, "apply", fails)
        prefilled_with(model, Replace(2, (5,), vectors(1, seed=1)))
    assert current() is None
    assert (hooks_of(model), model.config._attn_implementation) == before
    assert torch.equal(prefilled_with(model).logits, plain.logits)
    fed = [*context()[START:], *turns()[0]]
    for position in (-1, len(fed) - 1):
        wrong = Turn(0, fed, interventions=(Replace(1, (position,), vectors(1, seed=0)),))
        with pytest.raises(UserError, match="can't be changed"):
            score_turns(model, [context()[:START]], [wrong])


def test_a_pass_whose_blocks_do_not_run_once_each_is_an_error():
    one = Pass(4, 5, [0], [[0]])
    for layer in (0, 1, 3):
        one.through(layer, torch.zeros(1, 5, WIDTH))
    with pytest.raises(RuntimeError, match=r"layers \[0, 1, 3\] ran, expected each of 0 to 4 once"):
        one.residuals()


def test_capturing_launches_one_operation_a_block():
    """On a GPU, each operation takes as long to be started as a small block's."""
    few, columns = torch.zeros(3, 5, WIDTH), [[0, -1], [2, 4], [-1, 1]]
    counted = []
    for depth in (4, 9):
        one = Pass(depth, 5, [0, 0, 0], columns)
        with Tape() as tape:
            for layer in range(depth + 1):
                one.through(layer, few)
            kept = one.residuals()
        counted.append(len(tape.names))
        assert kept.isnan().all(-1).any(1).tolist() == [[False, True], [False] * 2, [True, False]]
    assert counted[1] - counted[0] == 5


def test_what_selects_nothing_or_isnt_there_is_refused():
    state = vectors(1, seed=0)
    for made, said in (
        (lambda: Replace(1, (), state[:0]), "selects no position"),
        (lambda: Add(1, (), state[0], 1.0), "selects no position"),
        (lambda: Add(1, (0,), 0 * state[0], 1.0), "has length 0"),
        (lambda: ProjectOut(1, (), state[0], 1.0), "selects no position"),
        (lambda: ProjectOut(1, (0,), state[0] / 0, 1.0), "has length inf"),
    ):
        with pytest.raises(UserError, match=said):
            made()
    with pytest.raises(ValueError, match="2 positions"):
        Replace(1, (0, 1), state)
    with pytest.raises(UserError, match="no layer 5 to change; give layers from 0 to 4"):
        prefilled_with(tiny.model("llama"), Replace(5, (0,), state))


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
    kept = prefill(model, [Prefix(context(), (7, CONTEXT - 1))]).residuals[0]
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
            ours = prefilled_with(model, kind).logits[0]
            assert relative_l2(theirs[-1], ours) <= VECTOR
            assert (ours - plain[-1]).norm() > 1e-2
