"""The check before each run: faults planted in the engine are found, in every dtype."""

import copy
from dataclasses import replace

import pytest
import tiny
import torch
import transformers
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import ia_mech.engine.check as check
import ia_mech.engine.installed as installed
import ia_mech.engine.shared as shared
import ia_mech.engine.state
import ia_mech.engine.steps as loop
from ia_mech.engine.check import TOKENS, check_engine
from ia_mech.engine.installed import install
from ia_mech.errors import UserError
from ia_mech.models.load import text_config


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


# The coarsest is the one in which a fault is hardest to find.
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *map(slow, (torch.float32, torch.float16))], ids=str
)
IDS = tiny.prompt(TOKENS, seed=0)
SHARED = {  # how many of 4 layers
    "llama": 4, "mistral": 0, "qwen3": 4, "qwen3_moe": 4, "qwen3_5": 1, "gpt_oss": 2, "glm4": 4,
    "glm4_moe": 4, "gemma3": 1, "gemma4": 1, "llama4": 1,
}  # fmt: skip


def model_of(architecture: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    return copy.deepcopy(tiny.model(architecture)).to(dtype)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, torch.float32) for architecture in tiny.ARCHITECTURES),
        *((architecture, torch.bfloat16) for architecture in tiny.FAMILIES),
        *(
            pytest.param(architecture, dtype, marks=pytest.mark.slow)
            for architecture in tiny.ARCHITECTURES
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
)
def test_models_that_are_computed_correctly_pass(architecture, dtype):
    engine = check_engine(model_of(architecture, dtype), IDS)
    assert len(engine.shared) == SHARED[architecture] and not engine.ignored


def test_a_model_that_has_passed_is_checked_again_in_another_dtype_alone(monkeypatch):
    model = model_of("gemma3", torch.float32)
    engine = check_engine(model, IDS)
    install(model).engine = replace(engine, shared=(), within=())
    monkeypatch.setattr(check, "prefill", None)
    assert check_engine(model, IDS) == engine == install(model).engine
    with pytest.raises(UserError, match="can't be run by this engine"):
        check_engine(model.bfloat16(), IDS)


def test_rounding_of_a_model_that_repeats_its_last_token_is_no_fault():
    """Its next token has nearly the same log-probability at each step, so their spread is no scale
    for errors: in bfloat16 one row in twenty failed the check, and rows lost the shared prefix."""
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    for seed in (3, 5):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        install(model)
        with torch.inference_mode():
            differences = check._Differences(model, IDS)
            differences.measure()
        most = check.ROUNDINGS * torch.finfo(torch.bfloat16).eps
        assert max(differences.deviations["sampled rows"]) < most


@pytest.mark.parametrize("hidden", [0, 20])
@DTYPES
def test_where_a_token_changes_nothing_errors_are_held_against_rounding(dtype, hidden, monkeypatch):
    """All tokens have one embedding. A part of the vocabulary may have logits of -1e4."""
    model, honest = model_of("qwen3", dtype), check._step
    model.model.embed_tokens.weight[:] = model.model.embed_tokens.weight[5].clone()
    seen = (torch.arange(tiny.VOCAB) >= hidden).to(dtype)
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * seen - 1e4 * (1 - seen))
    for epsilons in (1, 128):
        off = 1 + epsilons * torch.finfo(dtype).eps * seen
        monkeypatch.setattr(check, "_step", lambda *state, off=off: honest(*state) * off)
        check._PASSED.clear()
        if epsilons == 1:
            assert check_engine(model, IDS).share
        else:
            with pytest.raises(UserError, match="other logits in cached decoding"):
                check_engine(model, IDS)


def assert_found(architecture: str, dtype: torch.dtype, *kinds: str) -> None:
    """A fault ends the check, in one of these kinds, unless it is to be ignored."""
    model = model_of(architecture, dtype)
    with pytest.raises(UserError, match="gives other logits in") as raised:
        check_engine(model, IDS)
    assert any(f"other logits in {kind} than" in raised.value.problem for kind in kinds)
    ignored = check_engine(model, IDS, ignore=True)
    assert not ignored.share and ignored.ignored == raised.value.problem


@DTYPES
@pytest.mark.parametrize("architecture", ["llama", slow("qwen3_moe"), slow("gemma3")])
def test_logits_of_the_token_before_are_found(architecture, dtype, monkeypatch):
    honest = check.forward

    def displaced(model, state, *tokens):
        logits = honest(model, state, *tokens)
        earlier = getattr(state, "before", logits)
        state.before = logits
        return earlier

    monkeypatch.setattr(check, "forward", displaced)
    assert_found(architecture, dtype, "cached decoding")


@DTYPES
@pytest.mark.parametrize("architecture", [slow("llama"), slow("qwen3"), "gpt_oss", slow("glm4")])
def test_position_ids_off_by_one_are_found(architecture, dtype, monkeypatch):
    honest = check.expand

    def late(*arguments, **settings):
        state = honest(*arguments, **settings)
        state.position = state.position + 1
        return state

    monkeypatch.setattr(check, "expand", late)
    assert_found(architecture, dtype, "cached decoding")


@DTYPES
@pytest.mark.parametrize("architecture", [slow("llama"), "qwen3", slow("glm4")])
def test_a_mask_that_shows_the_padding_is_found(architecture, dtype, monkeypatch):
    honest = ia_mech.engine.state._left_padded

    def unmasked(ids):
        padded, mask = honest(ids)
        return padded, torch.ones_like(mask)

    monkeypatch.setattr(ia_mech.engine.state, "_left_padded", unmasked)
    assert_found(architecture, dtype, "a left-padded batch", "cached decoding")


@DTYPES
@pytest.mark.parametrize("architecture", [slow("llama"), "gemma3"])
def test_a_loop_that_samples_from_another_rows_logits_is_found(architecture, dtype, monkeypatch):
    honest = loop.draw_tokens

    def displaced(logits, *others):
        return honest(logits.roll(1, 0), *others)

    monkeypatch.setattr(loop, "draw_tokens", displaced)
    assert_found(architecture, dtype, "sampled rows")


@pytest.mark.parametrize("fault", ["no noise", "another step", "another stream", "temperature"])
@pytest.mark.parametrize("dtype", [torch.float32, *map(slow, (torch.bfloat16, torch.float16))])
def test_another_sampling_rule_is_found(fault, dtype, monkeypatch):
    honest = loop.draw_tokens

    def other(logits, temperature, stream, step):
        if fault == "temperature":
            return honest(logits, temperature * 2, stream, step)
        if fault == "no noise":
            greedy = honest(logits, temperature * 0, stream, step)
            scaled = (logits / temperature.clamp(min=1e-3)[:, None]).log_softmax(-1)
            tempered = scaled.gather(-1, greedy.token[:, None])[:, 0]
            return replace(greedy, logprob_tempered=tempered)
        if fault == "another step":
            return honest(logits, temperature, stream, step + 1)
        return honest(logits, temperature, stream + 1, step)

    monkeypatch.setattr(loop, "draw_tokens", other)
    assert_found("llama", dtype, "sampled rows")


@DTYPES
@pytest.mark.parametrize("architecture", [slow("llama"), "gpt_oss"])
def test_attention_that_forgets_its_first_block_of_keys_is_found(architecture, dtype, monkeypatch):
    """Every row gets a copy then, whose attention is the model's own."""
    honest = shared.attend

    def forgetful(query, key, value, **settings):
        return honest(query, key[:, :, key.shape[2] // 513 * 512 :], value[
            :, :, value.shape[2] // 513 * 512 :], **settings)  # fmt: skip

    monkeypatch.setattr(shared, "attend", forgetful)
    engine = check_engine(model_of(architecture, dtype), IDS)
    assert not engine.share and "other logits in rows of a long context than" in engine.why


@DTYPES
@pytest.mark.parametrize("architecture", [slow("mistral"), "gemma3", "gemma4", "llama4"])
def test_windows_of_thousands_of_tokens_are_seen_full(architecture, dtype, monkeypatch):
    name = "sliding_window"
    if architecture == "llama4":
        model, name = tiny.wrapper(architecture), "attention_chunk_size"  # complex: no other dtype
    else:
        model = model_of(architecture, dtype)
    config = text_config(model.config)
    holders = [config, *(m for m in model.modules() if getattr(m, name, None))]
    for holder in holders:
        setattr(holder, name, 4096)
    assert len(check_engine(model, IDS).shared) == SHARED[architecture]
    check._PASSED.clear()
    honest = DynamicSlidingWindowLayer.update

    def forgetful(layer, *arguments, **settings):
        full = honest(layer, *arguments, **settings)
        if layer.keys.shape[-2] == layer.sliding_window - 1:
            layer.values = layer.values.roll(1, -2)
        return full

    monkeypatch.setattr(DynamicSlidingWindowLayer, "update", forgetful)
    with pytest.raises(UserError, match="other logits in cached decoding"):
        check_engine(model, IDS)
    assert {getattr(holder, name) for holder in holders} == {4096}


def test_where_sharing_alone_goes_wrong_rows_get_copies_and_it_says_why(monkeypatch):
    monkeypatch.setattr(shared, "merge", lambda first, second, sinks=None: second[0])
    engine = check_engine(model_of("llama", torch.float32), IDS)
    assert not engine.share and not engine.ignored
    assert "LlamaForCausalLM gives other logits in cached decoding" in str(engine)


def test_where_sharing_within_a_window_goes_wrong_other_layers_go_on_sharing(monkeypatch):
    honest = installed.attend_shared

    def wrong(*arguments, sliding_window=None, **settings):
        output, _ = honest(*arguments, sliding_window=sliding_window, **settings)
        return output if sliding_window is None else output.roll(1, -1), None

    monkeypatch.setattr(installed, "attend_shared", wrong)
    engine = check_engine(tiny.fresh("gemma3", sliding_window=4096), IDS)
    assert engine.shared == (4,) and engine.within == ()
    assert "other logits in decoding within a window" in engine.why


def test_the_models_own_attention_is_what_is_compared_with():
    """A model that looks at its attention's name: where the name matters, the model's own attention
    stays. Full passes under the other name wouldn't show the difference."""

    def picky(module, query, *others, **settings):
        output, _ = sdpa_attention_forward(module, query, *others, **settings)
        return output * (module.config._attn_implementation == "test_picky"), None

    transformers.AttentionInterface.register("test_picky", picky)
    transformers.AttentionMaskInterface.register("test_picky", sdpa_mask)
    model = tiny.fresh("llama")
    model.config._attn_implementation = "test_picky"
    engine = check_engine(model, IDS)
    assert not engine.share and "other logits in a left-padded batch" in engine.why
    assert model.config._attn_implementation == "test_picky"


def test_queries_that_see_nothing_go_on_to_nothing(monkeypatch):
    """As some kernels for GPUs do, this one gives NaN for them in batches of 1 token modulo 32."""
    honest = torch.nn.functional.scaled_dot_product_attention

    def faulty(query, key, value, attn_mask=None, **settings):
        found = honest(query, key, value, attn_mask=attn_mask, **settings)
        if attn_mask is None or query.shape[2] % 32 != 1 or query.shape[2] == 1:
            return found
        return found.masked_fill(~attn_mask.any(-1, keepdim=True), torch.nan)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", faulty)
    for architecture in ("llama", "gemma3"):
        assert (
            len(check_engine(model_of(architecture, torch.float32), IDS).shared)
            == (SHARED[architecture])
        )
    # Where no layer shares, the mask is the model's own: such a kernel is found.
    monkeypatch.setattr(check.Engine, "possible", lambda model: check.Engine((), 4))
    with pytest.raises(UserError, match="other logits in a left-padded batch"):
        check_engine(model_of("mistral", torch.float32), IDS)
