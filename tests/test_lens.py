"""The offline lens against the models' own logits, and the hand-over to TransformerLens."""

import pytest
import tiny
import torch
from conftest import Silent
from runs import sampled

from ia_mech.engine.installed import install
from ia_mech.engine.state import Prefix, prefill
from ia_mech.engine.workers import Team
from ia_mech.errors import UserError
from ia_mech.lens import Lens, lens_file, save_lens
from ia_mech.models.bridge import activation_cache, hook_name, hook_tensors
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.settings import Settings


def subject(model) -> Subject:
    return Subject(ModelSpec(name="tiny"), model, None, weights_hash(model))


def saved(about: Subject, ids: list[int]) -> str | None:
    return save_lens(Team(about), about.weights_hash, ids)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_lens_of_the_last_layer_gives_the_models_logits(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    about = subject(tiny.model(architecture))
    assert saved(about, tiny.prompt(9, seed=0)) is None
    lens = Lens.load(about.weights_hash)
    prefix = Prefix(tiny.prompt(20, seed=1), (3, 19))
    result = prefill(about.model, [prefix])
    full = about.model(torch.tensor([prefix.ids])).logits[0, [3, 19]]
    torch.testing.assert_close(lens.logits(result.residuals[0, -1]), full, atol=2e-5, rtol=1e-5)


def test_softcap_and_scaling_are_part_of_the_lens(tmp_path, monkeypatch):
    import transformers

    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    sizes = {k: v for k, v in tiny._SIZES.items() if k != "tie_word_embeddings"}
    for config in (
        transformers.Gemma2Config(**sizes, final_logit_softcapping=5.0, query_pre_attn_scalar=8),
        transformers.GraniteConfig(**sizes, logits_scaling=4.0),
        transformers.CohereConfig(**sizes, logit_scale=0.25),
    ):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        install(model)
        about = subject(model)
        assert saved(about, tiny.prompt(9, seed=0)) is None
        ids = tiny.prompt(12, seed=1)
        result = prefill(model, [Prefix(ids, (11,))])
        logits = Lens.load(about.weights_hash).logits(result.residuals[0, -1])
        torch.testing.assert_close(logits, result.logits, atol=2e-5, rtol=1e-4)


def test_a_lens_that_misses_the_models_logits_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    about = subject(tiny.model("llama"))
    honest = about.model.forward

    def shifted(*args, **kwargs):
        output = honest(*args, **kwargs)
        output.logits = output.logits + 1
        return output

    monkeypatch.setattr(about.model, "forward", shifted)
    assert "miss the model's logits by 1" in saved(about, tiny.prompt(9, seed=0))
    assert not lens_file(about.weights_hash).exists()
    with pytest.raises(UserError, match="no lens for the model"):
        Lens.load(about.weights_hash)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = {
    "a bit of the header": lambda content: flipped(content, 20),
    "a setting's name": lambda content: content.replace(b"eps", b"epr", 1),
    "a tensor's name": lambda content: content.replace(b"norm_bias", b"norm_bios", 1),
    "a bit of a weight": lambda content: flipped(content, len(content) // 2),
    "cut": lambda content: content[:100],
    "emptied": lambda content: b"",
}


def test_a_damaged_lens_or_one_of_other_weights_is_refused_and_written_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    about = subject(tiny.model("llama"))
    assert saved(about, tiny.prompt(9, seed=0)) is None
    file = lens_file(about.weights_hash)
    whole = file.read_bytes()
    for damage in DAMAGES.values():
        file.write_bytes(damage(whole))
        assert file.read_bytes() != whole
        with pytest.raises(UserError, match=f"{file} is damaged .*; remove it and sample"):
            Lens.load(about.weights_hash)
        assert saved(about, tiny.prompt(9, seed=0)) is None
        assert file.read_bytes() == whole
    other = lens_file("other")
    other.parent.mkdir()
    other.write_bytes(whole)
    with pytest.raises(UserError, match=f"{other} is damaged"):
        Lens.load("other")


@pytest.fixture(scope="module")
def run(tiny_subject, tmp_path_factory):
    settings = Settings(
        limit=4, temperatures=(), max_new_tokens=3, positions=("turn_end", "header_last")
    )
    return sampled(settings, tiny_subject, tmp_path_factory.mktemp("lens") / "run", Silent())


def test_a_runs_residuals_carry_transformer_lens_names(run):
    tensors = hook_tensors(run)
    assert list(tensors) == [
        "blocks.0.hook_resid_pre",
        *(f"blocks.{i}.hook_resid_post" for i in range(4)),
    ]
    assert tensors["blocks.2.hook_resid_post"].shape == (4, 2, 32)
    kept = run.residuals(3, "header_last")
    assert torch.equal(tensors["blocks.2.hook_resid_post"][:, 1], kept)


def test_a_runs_residuals_make_an_activation_cache(run):
    cache = activation_cache(run, model=None, layers=[2, 4])
    assert set(cache.keys()) == {hook_name(2), hook_name(4)}
    assert torch.equal(cache["resid_post", 1][:, 0], run.residuals(2, "turn_end"))
