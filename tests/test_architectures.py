"""The numbers contract for every tested architecture, each point against an independent reference.

The references are the model's own full forward passes, ``hidden_states`` and ``generate``; never
the hook or the cache under test. TransformerLens' bridge is one more, in ``test_intervene.py``.
"""

import contextlib

import numpy as np
import pytest
import tiny
import torch
import two_level
from contract import (
    LOGPROB,
    MARGIN,
    NORM,
    VECTOR,
    assert_logprobs,
    assert_ranks,
    copied_prefixes,
    full_logits,
    relative_l2,
)
from transformers import GenerationConfig

from ia_mech.engine.blocks import find_blocks, find_final_norm
from ia_mech.engine.check import check_engine
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.score import Turn, score
from ia_mech.engine.state import Prefilled, Prefix, prefill
from ia_mech.errors import UserError

LENGTHS = (23, 14, 5)  # sliding windows are 8 tokens in the models that have them
FAMILIES = pytest.mark.parametrize("architecture", tiny.FAMILIES)
EACH = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)


def prefixes() -> list[Prefix]:
    return [Prefix(tiny.prompt(n, seed=n), (n - 4, n - 1, -1)) for n in LENGTHS]


def groups_of(model) -> list[Prefilled]:
    """Of two contexts and of one."""
    return [prefill(model, prefixes()[:2]), prefill(model, prefixes()[2:])]


def rows(context: int) -> list[Row]:
    stream = stream_key(7, f"source-{context}", 0)
    return [Row(context, temperature, stream) for temperature in (0.0, 0.7, 1.3)]


@EACH
def test_a_batch_has_the_models_own_states_and_logits_of_each_context_alone(architecture):
    model = tiny.model(architecture)
    together = prefill(model, prefixes())
    assert together.residuals[:, :, 2].isnan().all(), "positions that contexts lack"
    for index, prefix in enumerate(prefixes()):
        alone = model(torch.tensor([prefix.ids]), output_hidden_states=True)
        states = torch.stack(alone.hidden_states)[:, 0, list(prefix.positions[:2])]
        kept = together.residuals[index, :, :2]  # [layers + 1, positions, d_model]
        assert kept.shape == states.shape
        assert relative_l2(kept[:-1], states[:-1]) <= VECTOR
        # The last of the model's states is after the final norm; ours is before it.
        # With a weight of ones a norm only changes lengths, so it keeps relative distances.
        assert relative_l2(find_final_norm(model)(kept[-1]), states[-1]) <= VECTOR
        assert relative_l2(kept[-1], states[-1]) > 1e-2
        assert relative_l2(together.logits[index], alone.logits[0, -1]) <= VECTOR
        assert alone.logits[0, -1].norm() < NORM


@EACH
def test_greedy_rows_equal_generate(architecture):
    model = tiny.model(architecture)
    prefilled = prefill(model, prefixes())
    decoded = decode(model, [prefilled], [Row(i, 0.0, (0, 0)) for i in (2, 0, 1)], [tiny.EOS], 10)
    neutral = GenerationConfig(
        do_sample=False, max_new_tokens=10, eos_token_id=tiny.EOS, pad_token_id=0
    )
    distinct = set()
    for index, row in zip((2, 0, 1), decoded, strict=True):
        ids = prefixes()[index].ids
        written = model.generate(torch.tensor([ids]), generation_config=neutral)[0, len(ids) :]
        assert row.token_ids.tolist() == written.tolist()
        distinct.update(written.tolist())
    assert len(distinct) > 10, "references that repeat themselves would show little"


@pytest.mark.parametrize(
    "architecture",
    [
        *tiny.FAMILIES,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in tiny.ARCHITECTURES
            if each not in tiny.FAMILIES
        ),
    ],
)
def test_rows_of_a_batch_follow_the_rule_on_the_logits_of_full_passes(architecture):
    """Tokens and margins follow the sampling rule, whatever else is in the batch."""
    model = tiny.model(architecture)
    wanted = [row for context in range(3) for row in rows(context)]
    found = decode(model, groups_of(model), wanted, [tiny.EOS, *range(90, 97)], 12)
    assert len({len(one.token_ids) for one in found}) > 1, "rows end at different times"
    for row, ours in zip(wanted, found, strict=True):
        logits = full_logits(model, prefixes()[row.context].ids, ours.token_ids)
        assert logits.norm(dim=-1).max() < NORM
        assert_logprobs(ours.logprobs_raw, logits, ours.token_ids)
        assert_ranks(ours.ranks, logits, ours.token_ids)
        warmth = row.temperature or 1.0
        if row.temperature:
            assert_logprobs(ours.logprobs_tempered, logits, ours.token_ids, warmth)
        else:
            assert np.isnan(ours.logprobs_tempered).all() and (ours.ranks == 1).all()
        right = [
            two_level.draw(one, row.temperature, row.stream, step)
            for step, one in enumerate(logits)
        ]
        tokens, margins = map(np.array, zip(*right, strict=True))
        assert ((tokens == ours.token_ids) | (ours.margins < MARGIN)).all()
        np.testing.assert_allclose(ours.margins, margins, rtol=0, atol=2 * LOGPROB / warmth)


@pytest.mark.parametrize(
    ("architecture", "share", "piece"),
    [
        *((each, True, 5) for each in tiny.ARCHITECTURES),
        *((each, False, 256) for each in tiny.FAMILIES),
        *(pytest.param(each, True, 256, marks=pytest.mark.slow) for each in tiny.FAMILIES),
    ],
)
def test_scores_equal_a_full_forward_pass(architecture, share, piece, monkeypatch):
    monkeypatch.setattr("ia_mech.engine.score.LOGITS", {"cpu": piece * tiny.VOCAB})
    model, tokens = tiny.model(architecture), []
    turns = [  # one is longer than its context, one as short as can be, one is empty
        Turn(context, tiny.prompt(length, seed=length))
        for context, length in [(2, 15), (0, 9), (1, 1), (0, 11), (1, 40), (0, 0)]
    ]
    with contextlib.nullcontext() if share else copied_prefixes(model):
        scores = score(model, groups_of(model), turns, [0.5], on_tokens=tokens.append)
    assert sum(tokens) == sum(len(turn.ids) for turn in turns)
    for turn, scored in zip(turns, scores, strict=True):
        assert scored.logprobs_tempered.shape == (1, len(turn.ids))
        logits = full_logits(model, prefixes()[turn.context].ids, turn.ids)
        assert_logprobs(scored.logprobs_raw, logits, turn.ids)
        assert_logprobs(scored.logprobs_tempered[0], logits, turn.ids, 0.5)
        assert_ranks(scored.ranks, logits, turn.ids)
        assert (scored.greedy == (scored.ranks == 1)).all()


@FAMILIES
def test_the_prefilled_state_survives_everything_done_with_it(architecture):
    """Numbers contract 8, bit for bit: recurrent layers update their states in place."""
    model = tiny.model(architecture)
    prefilled = prefill(model, prefixes())
    before = [t.clone() for t in _tensors(prefilled.state.cache)]
    wanted = [row for context in range(3) for row in rows(context)]
    first = decode(model, [prefilled], wanted, [tiny.EOS], 12)
    score(model, [prefilled], [Turn(0, tiny.prompt(9, seed=1))], [1.0])
    second = decode(model, [prefilled], wanted, [tiny.EOS], 12)
    after = _tensors(prefilled.state.cache)
    assert len(before) == len(after) >= 8
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs_raw.tolist() == b.logprobs_raw.tolist()


def _tensors(cache) -> list[torch.Tensor]:
    """Keys, values, and recurrent states of every layer that holds them."""
    found = []
    for layer in cache.layers:
        for value in vars(layer).values():
            held = value.values() if isinstance(value, dict) else [value]
            found += [t for t in held if isinstance(t, torch.Tensor) and t.ndim > 1]
    return found


@pytest.mark.parametrize("architecture", tiny.WRAPPERS)
def test_blocks_and_norm_are_those_of_the_text_beside_a_stack_that_reads_images(architecture):
    model = tiny.wrapper(architecture)
    blocks = find_blocks(model)
    assert all(type(block).__name__.lower().startswith(architecture[:6]) for block in blocks)
    assert "vision" not in type(blocks[0]).__name__.lower()
    assert find_final_norm(model).weight.shape == (32,)
    assert check_engine(model, tiny.prompt(24, seed=0)).layers == 4


def test_an_architecture_without_a_list_of_blocks_is_refused_by_name():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = tiny.model("llama").config
            self.layer = torch.nn.Linear(2, 2)

        def get_decoder(self):
            return self

    with pytest.raises(UserError, match="the blocks of Odd could not be found"):
        find_blocks(Odd())


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("Mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8,
                    "chunk_size": 32}, "Mamba2"),
        ("Mamba", {"state_size": 8}, "Mamba"),
        ("Jamba", {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
                   "num_experts": 2, "mamba_d_state": 8, "use_mamba_kernels": False}, "Jamba"),
    ],
)  # fmt: skip
def test_architectures_that_would_give_wrong_numbers_are_refused_by_name(kind, settings, said):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_hidden_layers": 4}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with pytest.raises(UserError, match=said):
        check_engine(model, tiny.prompt(24, seed=0))
