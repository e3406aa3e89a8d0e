"""The shared prefix against the portable engine and full forward passes, and in runs."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
import transformers
from contract import (
    MARGIN,
    VECTOR,
    assert_logprobs,
    assert_same_scores,
    full_logits,
    logits_apart,
)

import ia_mech.engine.shared_prefix
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine.check import check_engine
from ia_mech.engine.loop import decode_step
from ia_mech.engine.plan import Grid
from ia_mech.engine.prefill import Prefix, expand, prefill
from ia_mech.engine.score import Turn, score
from ia_mech.engine.shared_prefix import SharedLayer, sharing
from ia_mech.errors import UserError
from ia_mech.run import Run, integrity, layout

LENGTHS = (23, 14, 5)
SHARED = {  # layers of full attention, of 4
    "llama": 4, "mistral": 0, "qwen3": 4, "qwen3_moe": 4, "qwen3_5": 1, "gpt_oss": 2, "glm4": 4,
    "glm4_moe": 4, "gemma3": 1, "gemma2": 2,
}  # fmt: skip
EACH = pytest.mark.parametrize("architecture", SHARED)
FAMILIES = pytest.mark.parametrize("architecture", [*tiny.FAMILIES, "gemma2"])


def model_of(architecture: str) -> transformers.PreTrainedModel:
    """The tested architectures, and two more: one of soft-capped scores, and one whose cache holds
    what keys and values are made from."""
    if architecture in tiny.ARCHITECTURES:
        return tiny.model(architecture)
    sizes = {
        "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "initializer_range": 0.25,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": tiny.EOS,
    }  # fmt: skip
    config = {
        "gemma2": lambda: transformers.Gemma2Config(
            **sizes, num_key_value_heads=2, head_dim=8, sliding_window=8,
            attn_logit_softcapping=2.0, query_pre_attn_scalar=8,
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **sizes, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
            qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=4, n_routed_experts=4,
            n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        ),
    }[architecture]()  # fmt: skip
    torch.manual_seed(0)
    attention = "eager" if architecture == "gemma2" else "sdpa"
    made = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention
    )
    return made.eval().requires_grad_(False)


def prefilled_by(model):
    return prefill(model, [Prefix(tiny.prompt(n, seed=n)) for n in LENGTHS])


def largest_difference(model, index: list[int], steps: int, leave: dict[int, list[int]]) -> float:
    """Of the logits of both engines, step by step; see :func:`contract.logits_apart`."""
    state, rows = prefilled_by(model).state, torch.tensor(index)
    copied = expand(state, rows, capacity=steps)
    shared = expand(state, rows, capacity=steps, share=True)
    worst = 0.0
    for step in range(steps):
        if step in leave:
            copied, kept = expand(copied, torch.tensor(leave[step])), torch.tensor(leave[step])
            shared.keep(kept)
        token = torch.tensor(tiny.prompt(copied.rows, seed=step))
        ours, theirs = decode_step(model, shared, token), decode_step(model, copied, token)
        worst = max(worst, logits_apart(ours, theirs))
    assert torch.equal(copied.mask, shared.mask) and torch.equal(copied.position, shared.position)
    return worst


@FAMILIES
@pytest.mark.parametrize(
    ("index", "leave"),
    [
        ([0] * 5 + [1] * 3 + [2] * 9, {4: [0, 3, 4, 5, 9, 16], 7: [5, 1, 2], 9: [0]}),
        ([2, 0, 2, 1, 0], {6: [4, 4, 1]}),  # contexts in turns, and a row twice
    ],
)
def test_logits_equal_the_portable_engines(architecture, index, leave):
    assert largest_difference(model_of(architecture), index, 12, leave) <= VECTOR


@FAMILIES
@pytest.mark.parametrize("piece", [256, 5])  # turns fed whole, and in pieces
def test_scores_equal_the_portable_engines_and_a_full_pass(architecture, piece, monkeypatch):
    monkeypatch.setattr("ia_mech.engine.score.LOGITS", piece * tiny.VOCAB)
    model = model_of(architecture)
    prefilled = prefilled_by(model)
    turns = [Turn(c, tiny.prompt(n, seed=n)) for c, n in
             [(2, 9), (0, 8), (1, 1), (0, 11), (2, 10), (1, 30), (0, 9)]]  # fmt: skip
    ours, theirs = (score(model, prefilled, turns, [0.5], s) for s in (True, False))
    for turn, a, b in zip(turns, ours, theirs, strict=True):
        assert_same_scores(a, b)
        ids = tiny.prompt(LENGTHS[turn.context], seed=LENGTHS[turn.context])
        assert_logprobs(a.logprobs_raw, full_logits(model, ids, turn.ids), turn.ids)


@EACH
def test_layers_are_shared_one_by_one(architecture):
    model = model_of(architecture)
    engine = check_engine(model, tiny.prompt(12, seed=0))
    assert (engine.shared, engine.layers) == (SHARED[architecture], 4)
    said = {0: "portable (no layer has full attention)"}
    assert str(engine) == said.get(engine.shared, f"shared-prefix {engine.shared} of 4 layers")
    state = expand(prefilled_by(model).state, torch.tensor([0, 1]), capacity=3, share=True)
    assert sum(isinstance(layer, SharedLayer) for layer in state.cache.layers) == engine.shared


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@FAMILIES
def test_the_prefix_is_in_memory_once_and_room_is_made_once(architecture):
    model = model_of(architecture)
    prefilled = prefilled_by(model)
    state = expand(prefilled.state, torch.tensor([0] * 4 + [1] * 2), capacity=6, share=True)
    pairs = list(zip(prefilled.state.cache.layers, state.cache.layers, strict=True))
    pairs = [(theirs, ours) for theirs, ours in pairs if isinstance(ours, SharedLayer)]
    assert pairs
    made = [[storage(t) for t in (ours.keys, ours.values)] for _, ours in pairs]
    for step in range(6):
        decode_step(model, state, torch.tensor(tiny.prompt(6, seed=step)))
        for (theirs, ours), at in zip(pairs, made, strict=True):
            assert [storage(t) for t in (ours.keys, ours.values)] == at
            for context, padding in ((0, 0), (1, 9)):
                keys, values = ours.contexts[context]
                assert keys.data_ptr() == theirs.keys[context, :, padding:].data_ptr()
                assert values.data_ptr() == theirs.values[context, :, padding:].data_ptr()
            assert ours.get_seq_length() == LENGTHS[0] + step + 1
            assert ours.get_mask_sizes(1) == (LENGTHS[0] + step + 2, 0)
    state.keep(torch.tensor([1, 5]))
    assert all(ours.contexts[0][0].data_ptr() == theirs.keys.data_ptr() for theirs, ours in pairs)
    held = [ours.keys.untyped_storage().nbytes() for _, ours in pairs]
    assert held == [ours.keys[:, :, :1].nbytes * 6 for _, ours in pairs], "of two rows"
    decode_step(model, state, torch.tensor([3, 4]))  # beyond the room
    assert pairs[0][1].keys.shape[2] == 7


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_the_attention_implementation_is_restored_after_an_error(architecture, monkeypatch):
    model = model_of(architecture)
    before = model.config._attn_implementation
    state = expand(prefilled_by(model).state, torch.tensor([0, 1]), capacity=3, share=True)
    seen = []

    def failing(*_):
        seen.append(model.config._attn_implementation)
        raise ZeroDivisionError

    monkeypatch.setattr(ia_mech.engine.shared_prefix, "merge", failing)
    with pytest.raises(ZeroDivisionError):
        decode_step(model, state, torch.tensor([3, 4]))
    assert seen[0].startswith("ia_mech_shared")
    assert model.config._attn_implementation == before


def test_keys_that_the_attention_function_never_sees_are_an_error():
    model = tiny.model("llama")
    state = expand(prefilled_by(model).state, torch.tensor([0]), capacity=3, share=True)
    layer, new = state.cache.layers[0], torch.zeros(1, 2, 1, 8)
    with (
        pytest.raises(RuntimeError, match="doesn't use the cached keys"),
        sharing(model, state.cache),
    ):
        state.slots.begin(1)
        layer.update(new, new)
    with pytest.raises(RuntimeError, match="doesn't use the cached keys"):
        layer.update(new, new)


def wrong(first, second, sinks=None):
    return second[0]


def test_where_sharing_goes_wrong_the_portable_engine_is_used_and_says_why(monkeypatch):
    model, ids = tiny.model("llama"), tiny.prompt(12, seed=0)
    monkeypatch.setattr(ia_mech.engine.shared_prefix, "merge", wrong)
    engine = check_engine(model, ids)
    assert engine.shared == 0 and engine.name == "portable"
    assert "LlamaForCausalLM gives other logits in cached decoding" in str(engine)
    with pytest.raises(UserError, match="--engine shared: LlamaForCausalLM gives other logits"):
        check_engine(model, ids, "shared")
    assert str(check_engine(model, ids, "portable")) == "portable"
    with pytest.raises(UserError, match="MistralForCausalLM can't"):  # no layer can be shared
        check_engine(tiny.model("mistral"), ids, "shared")


def test_a_cache_of_something_else_than_keys_is_found_out_and_left_portable():
    model, ids = model_of("deepseek_v3"), tiny.prompt(12, seed=0)
    state = expand(prefilled_by(model).state, torch.tensor([0, 1]), capacity=3, share=True)
    with pytest.raises(RuntimeError, match="doesn't use the cached keys"):
        decode_step(model, state, torch.tensor([3, 4]))
    assert str(check_engine(model, ids)) == (
        "portable (DeepseekV3ForCausalLM can't be run by this engine "
        "(its attention doesn't use the cached keys as they are))"
    )


CONFIG = SampleConfig(limit=3, grid=Grid((0.7, 1.3), 2, 8, 0), batch_rows=10, swaps=0)


def differing_margins(one: Run, other: Run) -> list[float]:
    """Margins at the first difference of the rows that differ."""
    margins = []
    for a, b in zip(one.generations.iloc, other.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            length = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:length] != b["token_ids"][:length]))
            margins.append(min(a["margins"][first], b["margins"][first]))
    return margins


def test_both_engines_write_the_same_run(tiny_subject, tmp_path, progress):
    runs = {
        engine: collect(replace(CONFIG, engine=engine), tiny_subject, tmp_path / engine, progress)
        for engine in ("auto", "shared", "portable")
    }
    recorded = ["shared-prefix 4 of 4 layers", "shared-prefix 4 of 4 layers", "portable"]
    said = [line for line in progress.lines if line.startswith("engine: ")]
    assert said == [f"engine: {name}" for name in recorded]
    for (engine, run), name in zip(runs.items(), recorded, strict=True):
        assert run.record["identity"]["engine"] == name
        assert run.record["identity"]["config"]["engine"] == engine
    assert runs["auto"].digest() == runs["shared"].digest()
    margins = differing_margins(runs["shared"], runs["portable"])
    assert len(runs["shared"].generations) == 15
    assert len(margins) <= 1 and all(margin < MARGIN for margin in margins)
    kept = [runs[engine].residuals(2, "header_last") for engine in ("shared", "portable")]
    assert kept[0].equal(kept[1]), "the engines differ after the prefill only"
    with pytest.raises(UserError, match=r"holds another configuration.*engine"):
        collect(replace(CONFIG, engine="portable"), tiny_subject, runs["auto"].path, progress)


def test_a_fall_back_is_said_and_recorded(tiny_subject, tmp_path, progress, monkeypatch):
    monkeypatch.setattr(
        ia_mech.engine.shared_prefix, "merge", lambda first, second, sinks=None: second[0]
    )
    run = collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    said = next(line for line in progress.lines if line.startswith("engine: "))
    assert said.startswith("engine: portable (LlamaForCausalLM gives other logits in cached")
    assert run.record["identity"]["engine"] == "portable"
    session = integrity.read_json(run.path / layout.MANIFEST)["sessions"][0]
    assert f"engine: {session['engine']}" == said
