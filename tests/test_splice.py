"""Hybrids of several contexts, against one pass over all of them with a mask per token."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from contract import LOGPROB, VECTOR, masked_logits, relative_l2
from transformers import DynamicCache

from ia_mech.engine import splice
from ia_mech.engine.installed import install, installed
from ia_mech.engine.intervene import Replace
from ia_mech.engine.score import Turn, score
from ia_mech.engine.shared import Borrowed, Engine
from ia_mech.engine.splice import (
    SINKS,
    Foreign,
    Hybrid,
    Piece,
    aligned,
    arriving,
    check_ceiling,
    continued,
    in_blocks,
    of_everything,
    prefill_foreign,
    spliced,
)
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError

QUERY, AFTER = 9, 4  # tokens before the responses, which all contexts share, and after them
RESPONSES = (6, 11, 3)
ARCHITECTURES = ("llama", "gpt_oss", "gemma3")


def contexts(after: int = AFTER) -> list[list[int]]:
    query, end = tiny.prompt(QUERY, seed=1), tiny.prompt(AFTER, seed=2)[:after]
    return [[*query, *tiny.prompt(n, seed=n), *end] for n in RESPONSES]


def hybrid(recipient: int, response: int, after: int | None) -> Hybrid:
    """The recipient's query, a second one's response, and what comes after it of a third."""
    ends = [QUERY + n for n in RESPONSES]
    pieces = [Piece(recipient, 0, QUERY), Piece(response, QUERY, ends[response])]
    if after is not None:
        pieces.append(Piece(after, ends[after], ends[after] + AFTER))
    return Hybrid(recipient, tuple(pieces))


def by_one_pass(model, one: Hybrid, turn: list[int], layers=None, after=AFTER) -> np.ndarray:
    """Log-probabilities ``[tokens - 1]`` of a turn after its first token: one pass over every
    context, each seeing itself, and the turn, which sees the tokens that the hybrid is made of, and
    windows of them; the recipient's in others than these layers, if any are given.
    """
    all_of = contexts(after)
    longest = max(map(len, all_of))
    ids, at, owner, index = [], [], [], []
    for number, context in enumerate(all_of):
        ids += context
        at += range(longest - len(context), longest)
        owner += [number] * len(context)
        index += range(len(context))
    ids, at = [*ids, *turn], torch.tensor([*at, *range(longest, longest + len(turn))])
    part = torch.tensor([*owner, *[-1] * len(turn)])
    index = torch.tensor([*index, *[0] * len(turn)])
    made = torch.zeros(len(ids), dtype=torch.bool)
    for piece in one.pieces:
        made |= (part == piece.context) & (index >= piece.start) & (index < piece.stop)
    own = part == one.recipient
    before = torch.arange(len(ids)) <= torch.arange(len(ids))[:, None]

    def seen_by_turn(layer: int) -> torch.Tensor:
        return (made if layers is None or layer in layers else own) | (part == -1)

    def sees(layer: int) -> torch.Tensor:
        of_turn = seen_by_turn(layer)
        return before & torch.where((part == -1)[:, None], of_turn, part == part[:, None])

    # A window counts a hybrid's own tokens, whose positions may leave a gap.
    whole = [Piece(one.recipient, 0, len(all_of[one.recipient]))]
    place, taken = torch.zeros_like(at), 0
    for piece in one.pieces if layers is None else whole:
        its = (part == piece.context) & (index >= piece.start) & (index < piece.stop)
        place[its] = torch.arange(taken, taken + int(its.sum()))
        taken += int(its.sum())
    place[part == -1] = torch.arange(taken, taken + len(turn))
    behind = torch.where((part == -1)[:, None], place[:, None] - place, at[:, None] - at)
    logits = masked_logits(model, ids, at, sees, behind)[-len(turn) : -1].double().log_softmax(-1)
    return logits.gather(-1, torch.tensor(turn[1:])[:, None])[:, 0].numpy()


WHOLE = [(0, 1, 0), (1, 0, 1), (0, 0, 2), (2, 1, 0)]
CUT = [(0, 1, None), (1, 2, None), (2, 2, None)]
# None is as long as the group, whose longest context lends no response.
SHORT, SHORT_CUT = [(0, 2, 1), (1, 2, 0), (2, 0, 0)], [(0, 2, None), (1, 2, None)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("cases", "after"), [(WHOLE, AFTER), (CUT, 0), (SHORT, AFTER), (SHORT_CUT, 0)]
)
def test_turns_after_hybrids_equal_one_pass_with_a_mask_per_token(architecture, cases, after):
    model = tiny.model(architecture)
    group = aligned(model, contexts(after))
    made = [hybrid(*case) for case in cases]
    turns = [Turn(n, tiny.prompt(5 + n, seed=n)) for n in range(len(made))]
    found = score(model, [spliced(group, made)], turns)
    for one, turn, ours in zip(made, turns, found, strict=True):
        theirs = by_one_pass(model, one, list(turn.ids), after=after)
        np.testing.assert_allclose(ours.logprobs_raw[1:], theirs, rtol=0, atol=LOGPROB)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_context_that_is_prefilled_with_pieces_of_another_is_their_hybrid(architecture):
    model, (own, other, _) = tiny.model(architecture), contexts()
    whole = Prefix(own, [QUERY, -1])
    one = prefill_foreign(model, whole, Foreign(tuple(other), hybrid(0, 1, 0).pieces, 0))
    turn = tiny.prompt(7, seed=5)
    (ours,) = score(model, [one], [Turn(0, turn)])
    theirs = by_one_pass(model, hybrid(0, 1, 0), turn)
    np.testing.assert_allclose(ours.logprobs_raw[1:], theirs, rtol=0, atol=LOGPROB)
    kept, plain = (group.residuals[0].unbind(1) for group in (one, prefill(model, [whole])))
    assert relative_l2(kept[0], plain[0]) <= VECTOR  # what is kept is the context's own
    assert kept[1].isnan().all() and plain[1].isnan().all()  # a position that it lacks


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_a_context_with_everything_of_another_is_that_one(architecture):
    model, (own, other, _), turn = tiny.model(architecture), contexts(), tiny.prompt(7, seed=5)
    everything = Foreign(tuple(other), (Piece(1, 0, len(other)),), 1)
    found, wanted = (
        score(model, [group], [Turn(0, turn)])[0].logprobs_raw
        for group in (
            prefill_foreign(model, Prefix(own, [QUERY]), everything),
            prefill(model, [Prefix(other)]),
        )
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=LOGPROB)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_that_borrow_from_a_hybrid_equal_one_pass(architecture):
    model = tiny.model(architecture)
    shared = Engine.possible(model).shared
    layers = shared[1:] or shared
    group = aligned(model, contexts())
    one = hybrid(0, 1, 0)
    its = spliced(group, [one])
    turn = tiny.prompt(7, seed=5)
    (ours,) = score(model, [group, its], [Turn(0, turn, borrowed=Borrowed(3, layers))])
    np.testing.assert_allclose(
        ours.logprobs_raw[1:], by_one_pass(model, one, turn, layers), rtol=0, atol=LOGPROB
    )


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "glm4"])  # rotary in part
def test_contexts_that_end_together_score_as_they_do_alone(architecture):
    """Rotary positions are relative: where a context begins doesn't matter."""
    model = tiny.model(architecture)
    group = aligned(model, contexts())
    turns = [Turn(n, tiny.prompt(6, seed=n)) for n in range(3)]
    for turn, ours in zip(turns, score(model, [group], turns), strict=True):
        context = contexts()[turn.context]
        with torch.inference_mode():
            logits = model(torch.tensor([[*context, *turn.ids]])).logits[0, len(context) - 1 : -1]
        chosen = torch.tensor(list(turn.ids))[:, None]
        theirs = logits.double().log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
        np.testing.assert_allclose(ours.logprobs_raw, theirs, rtol=0, atol=LOGPROB)


def test_states_put_into_a_turns_first_tokens_equal_those_of_a_pass_with_a_hook():
    """What comes after the response is computed anew, with another context's state in it."""
    model = tiny.model("llama")
    group = aligned(model, contexts(after=0))
    cut = spliced(group, [hybrid(0, 0, None)])
    states = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    after, turn = contexts()[0][-AFTER:], tiny.prompt(5, seed=8)
    ids = [*after, *turn]
    put = Replace(2, (1,), states)
    (ours,) = score(model, [cut], [Turn(0, ids, interventions=(put,))])
    context = contexts()[0]

    def hook(_module, _args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[0, len(context) - AFTER + 1] = states[0]
        return output

    handle = model.model.layers[1].register_forward_hook(hook)
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([[*context, *turn]])).logits[0, len(context) - 1 : -1]
    finally:
        handle.remove()
    chosen = torch.tensor(turn)[:, None]
    theirs = logits.double().log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
    np.testing.assert_allclose(ours.logprobs_raw[AFTER:], theirs, rtol=0, atol=LOGPROB)


def with_states(model, context: list[int], start: int) -> DynamicCache:
    """What ``transformers`` keeps of a context alone, whose first token is at a position."""
    cache = DynamicCache(config=model.config)
    at = torch.arange(start, start + len(context))[None]
    model(torch.tensor([context]), position_ids=at, past_key_values=cache)
    return cache


@torch.inference_mode()
def by_hand(model, one: Hybrid, turn: list[int], after: int) -> np.ndarray:
    """Log-probabilities ``[tokens - 1]`` of a turn after a hybrid that is put together from each
    context's own cache and fed token by token."""
    all_of = contexts(after)
    longest = max(map(len, all_of))
    caches = [with_states(model, ids, longest - len(ids)) for ids in all_of]
    cache = caches[one.recipient]
    for number, layer in enumerate(cache.layers):
        each = [other.layers[number] for other in caches]
        if hasattr(layer, "recurrent_states"):
            state = each[one.recipient if one.state is None else one.state].recurrent_states[0]
            conv = each[one.pieces[-1].context].conv_states[0]
            layer.recurrent_states, layer.conv_states = {0: state.clone()}, {0: conv.clone()}
            continue
        for name in ("keys", "values"):
            parts = [getattr(each[p.context], name)[:, :, p.start : p.stop] for p in one.pieces]
            setattr(layer, name, torch.cat(parts, 2))
    found = []
    for step, token in enumerate(turn[:-1]):
        at = torch.tensor([[longest + step]])
        logits = model(torch.tensor([[token]]), position_ids=at, past_key_values=cache).logits
        found.append(logits[0, -1].double().log_softmax(-1)[turn[step + 1]])
    return torch.stack(found).numpy()


@pytest.mark.parametrize("after", [AFTER, 0])
def test_recurrent_states_and_convolutions_are_spliced_as_by_hand(after):
    model = tiny.model("qwen3_5")
    plain = tiny.fresh("qwen3_5")
    group = aligned(model, contexts(after))
    made = [
        replace(hybrid(recipient, response, last if after else None), state=state)
        for recipient, response, last, state in [(0, 1, 0, 1), (1, 0, 1, None), (0, 2, 2, 1)]
    ]
    turns = [Turn(n, tiny.prompt(5 + n, seed=n)) for n in range(len(made))]
    for one, turn, ours in zip(
        made, turns, score(model, [spliced(group, made)], turns), strict=True
    ):
        theirs = by_hand(plain, one, list(turn.ids), after)
        np.testing.assert_allclose(ours.logprobs_raw[1:], theirs, rtol=0, atol=LOGPROB)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_oss", "gemma3", "qwen3_5"])
def test_a_hybrid_of_everything_is_its_donor(architecture, copied):
    """In a model with recurrent states, all tokens without these states don't make the donor."""
    model, ids = tiny.model(architecture), tiny.prompt(4, seed=3)
    cut = aligned(model, contexts(after=0))
    for group in (cut, continued(model, cut, contexts()[0][-AFTER:])):
        before, made = installed(model).engine, of_everything(group)
        installed(model).engine = replace(before, shared=(), within=()) if copied else before
        try:
            check_ceiling(model, group, ids)
            share = arriving(model, group, made, ids)
            tokens = arriving(model, group, [replace(one, state=None) for one in made], ids)
        finally:
            installed(model).engine = before
        assert share.min() >= 1 - VECTOR and share.shape == (3, model.config.num_hidden_layers)
        assert (tokens.min() < 0.9) == (architecture == "qwen3_5")


def test_layers_that_do_not_get_everything_are_named(monkeypatch):
    model = tiny.model("qwen3_5")
    group = aligned(model, contexts())
    made = [replace(one, state=None) for one in of_everything(group)]
    monkeypatch.setattr(splice, "of_everything", lambda group: made)
    with pytest.raises(UserError, match=r"layers 1 \(.*4 \("):
        check_ceiling(model, group, tiny.prompt(4, seed=3))


def test_chunked_attention_is_refused_by_name():
    model = tiny.wrapper("llama4")
    install(model)
    with pytest.raises(UserError, match=r"layers 1 \(chunked_attention\), 2"):
        aligned(model, contexts())


# -- with few tokens in sight ----------------------------------------------------------------------


def after_few(model, number: int, turn: list[int], seen: dict[int, list[int]]) -> np.ndarray:
    """Log-probabilities ``[tokens - 1]`` of a turn after its first token, after a context whose
    tokens see only those of ``seen`` and themselves, where given: one pass with a mask."""
    context = contexts(0)[number]
    ids = [*context, *turn]
    at = torch.arange(len(ids)) + max(map(len, contexts(0))) - len(context)
    sees = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    behind = at[:, None] - at
    for token, others in seen.items():
        sees[token] = False
        sees[token, [*others, token]] = True
        # A window counts the tokens that are seen.
        order = sorted([*others, token])
        for far, one in enumerate(reversed(order)):
            behind[token, one] = far
    logits = masked_logits(model, ids, at, lambda layer: sees, behind)
    logits = logits[-len(turn) : -1].double().log_softmax(-1)
    return logits.gather(-1, torch.tensor(turn[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen3"])
@pytest.mark.parametrize("width", [1, 4, None])
def test_turns_after_responses_in_blocks_equal_one_pass_with_a_mask(architecture, width):
    model, group = tiny.model(architecture), aligned(tiny.model(architecture), contexts(0))
    before = group.state.cache.layers[0].keys.clone()
    made = in_blocks(model, group, contexts(0), [QUERY] * 3, width)
    turns = [Turn(n, tiny.prompt(6 + n, seed=n)) for n in range(3)]
    for turn, ours in zip(turns, score(model, [made], turns), strict=True):
        length = RESPONSES[turn.context]
        seen = {}
        for k in range(length):
            first = 0 if width is None else k // width * width
            seen[QUERY + k] = [*range(SINKS), *range(QUERY + first, QUERY + k)]
        theirs = after_few(model, turn.context, list(turn.ids), seen)
        np.testing.assert_allclose(ours.logprobs_raw[1:], theirs, rtol=0, atol=LOGPROB)
    assert torch.equal(group.state.cache.layers[0].keys, before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_tokens_in_sight_are_as_they_were_computed(architecture):
    model = tiny.model(architecture)
    group = aligned(model, contexts(0))
    turns = [Turn(n, tiny.prompt(6, seed=n)) for n in range(3)]

    def scores(made) -> list[np.ndarray]:
        return [one.logprobs_raw for one in score(model, [made], turns)]

    alone = scores(in_blocks(model, group, contexts(0), [QUERY] * 3, 1))
    same = scores(in_blocks(model, group, contexts(0), [QUERY] * 3, 1, seed=0))
    few, again, other = (
        scores(in_blocks(model, group, contexts(0), [QUERY] * 3, 4, seed)) for seed in (0, 0, 1)
    )
    for a, b in zip(alone, same, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=LOGPROB)
    assert all(np.array_equal(a, b) for a, b in zip(few, again, strict=True))
    assert not np.allclose(few[1], other[1], atol=1e-3)
    # Where all earlier tokens are sampled, nothing changes.
    whole = in_blocks(model, group, contexts(0), [SINKS] * 3, 10**6, seed=0)
    for a, b in zip(scores(whole), scores(group), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=LOGPROB)
