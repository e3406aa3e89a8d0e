"""Loading: which device, which dtype, which weights exactly, and what can't be loaded."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import ia_mech.models.load as models
from ia_mech.errors import UserError
from ia_mech.models.load import (
    ModelSpec,
    context_limit,
    load,
    load_files,
    resolve_device,
    resolve_dtype,
    text_config,
    weights_hash,
)

pytestmark = pytest.mark.usefixtures("loaded_anew")


def refusal(function, *args) -> str:
    with pytest.raises(UserError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def cuda(monkeypatch):
    """Pretend that this machine has so many CUDA devices."""

    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.fixture
def checkpoint(tiny_model_dir, tmp_path) -> Path:
    """A copy of the tiny model's folder, to be damaged."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "checkpoint"))


# -- device and dtype -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "requested", "expected"),
    [
        (0, "auto", "cpu"),
        (2, "auto", "cuda"),
        (2, "cpu", "cpu"),
        (2, "cuda:1", "cuda:1"),
        *((2, odd, "is not a device; use auto") for odd in ("gpu", "cuda:²")),
        (2, "cuda:2", "this machine has 2 CUDA device"),
        (0, "cuda", "this machine has 0 CUDA device(s); use --device cpu"),
    ],
)
def test_a_device_is_taken_by_name_or_refused(cuda, count, requested, expected):
    cuda(count)
    if " " in expected:
        assert expected in refusal(resolve_device, requested)
    else:
        assert resolve_device(requested) == torch.device(expected)


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_own_elsewhere():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (resolve_dtype("auto", cpu), resolve_dtype("auto", gpu)) == (torch.float32, "auto")
    assert resolve_dtype("float32", gpu) == torch.float32
    assert resolve_dtype("bfloat16", cpu) == torch.bfloat16


# -- a model as it is loaded ----------------------------------------------------------------------


def test_a_directory_is_loaded_for_inference(tiny_model_dir, tiny_subject, capfd):
    torch.set_float32_matmul_precision("high")
    subject = load(ModelSpec(name=tiny_model_dir, device="cpu"))
    assert torch.get_float32_matmul_precision() == "highest"
    assert not subject.model.training
    assert not any(p.requires_grad for p in subject.model.parameters())
    assert subject.device == torch.device("cpu")
    assert subject.weights_hash == tiny_subject.weights_hash
    about = subject.describe()
    assert [about[name] for name in ("name", "architecture", "layers", "d_model", "dtype")] == [
        tiny_model_dir, "LlamaForCausalLM", 4, 32, "float32"
    ]  # fmt: skip
    json.dumps(about)
    assert capfd.readouterr() == ("", "")
    other = load(ModelSpec(tiny_model_dir, device="cpu", dtype="bfloat16", attention="eager"))
    assert other.model.dtype == torch.bfloat16 and other.describe()["attention"] == "eager"


def test_tokenizer_and_configuration_come_without_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    tokenizer, config, _ = load_files(ModelSpec(name=str(checkpoint)))
    assert tokenizer.chat_template and context_limit(config) == 4096
    assert text_config(config) is config


def test_random_blocks_keep_embeddings_head_and_every_entry(tiny_model_dir, tiny_subject):
    spec = ModelSpec(name=tiny_model_dir, device="cpu", random_blocks=3)
    found, plain = load(spec), tiny_subject.model.state_dict()
    moved = 0
    for name, tensor in found.model.state_dict().items():
        if ".layers." in name:
            torch.testing.assert_close(tensor.flatten().sort()[0], plain[name].flatten().sort()[0])
            moved += not torch.equal(tensor, plain[name])
        else:
            assert torch.equal(tensor, plain[name]), name
    assert moved >= 4 * 7  # the matrices of four blocks; norms may be all ones
    assert found.describe()["random_blocks"] == 3
    hashes = {load(replace(spec, random_blocks=n)).weights_hash for n in (3, 4, None)}
    assert found.weights_hash in hashes and len(hashes) == 3
    said = refusal(lambda: ModelSpec(device_map="auto", random_blocks=1))
    assert "--random-blocks" in said


# -- the hash of the weights ----------------------------------------------------------------------


def test_the_hash_changes_with_one_weight(tiny_subject):
    model = copy.deepcopy(tiny_subject.model)
    assert weights_hash(model) == tiny_subject.weights_hash
    weight = model.model.layers[2].mlp.down_proj.weight
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf))
    assert weights_hash(model) != tiny_subject.weights_hash


def weights(**tensors) -> SimpleNamespace:
    return SimpleNamespace(state_dict=lambda: tensors)


def test_the_hash_knows_names_and_shapes_but_no_order():
    a, b = torch.arange(6.0), torch.ones(2, 3)
    first = weights_hash(weights(a=a, b=b))
    assert weights_hash(weights(b=b, a=a)) == first
    assert weights_hash(weights(a=b, b=a)) != first
    assert weights_hash(weights(a=a.view(2, 3), b=b)) != first
    assert weights_hash(weights(a=a, c=b)) != first
    assert weights_hash(weights(a=a)) != first
    transposed = weights(a=a.view(2, 3).T.contiguous().T, b=b)  # in memory only
    assert weights_hash(transposed) == weights_hash(weights(a=a.view(2, 3), b=b))
    assert weights_hash(weights(a=torch.tensor(1.0), b=torch.zeros(0)))  # no dimension, no element


# -- where a model is looked for ------------------------------------------------------------------


@pytest.fixture
def requested(monkeypatch) -> list[tuple[str, dict]]:
    """What ``from_pretrained`` was asked for; it finds nothing."""
    calls: list[tuple[str, dict]] = []

    def from_pretrained(place, **kwargs):
        calls.append((place, kwargs))
        raise OSError("nothing there")

    for name in ("AutoTokenizer", "AutoConfig", "AutoModelForCausalLM"):
        loader = SimpleNamespace(from_pretrained=from_pretrained)
        monkeypatch.setattr(models, name, loader)
    return calls


@pytest.mark.parametrize("function", [load, load_files])
def test_a_hub_model_is_requested_by_its_revision_and_code_of_its_own_only_if_trusted(
    requested, function
):
    for spec, revision in (
        (ModelSpec("org/name"), "main"),
        (ModelSpec("org/name", "v2", trust_remote_code=True), "v2"),
    ):
        assert "'org/name' could not be loaded (nothing there); name " in refusal(function, spec)
        # Tests may not reach the hub; with it out of reach only the local cache is looked into.
        kwargs = {"revision": revision, "local_files_only": True}
        wanted = kwargs | {"trust_remote_code": spec.trust_remote_code, "fix_mistral_regex": True}
        assert requested.pop() == ("org/name", wanted) and not requested


def test_what_is_not_there_is_not_looked_for_on_the_hub(tiny_model_dir, tmp_path, requested):
    for name in ("./nothing", "/nothing", "~/nothing", "a/b/c"):
        assert f"no directory {name}" in refusal(load, ModelSpec(name))
    missing = tmp_path / "missing.gguf"
    assert f"no file {missing}" in refusal(load, ModelSpec(str(missing)))
    for name in (tiny_model_dir, *models.embedded.MODELS):
        assert "not a model of the hub" in refusal(load, ModelSpec(name, revision="v2"))
    assert requested == []


@pytest.mark.parametrize(
    ("raised", "local_only"),
    [
        ("ConnectError", True),
        ("ReadTimeout", True),
        ("RepositoryNotFoundError", False),
        (None, False),
    ],
)
def test_a_hub_out_of_reach_is_noticed_before_anything_retries(monkeypatch, raised, local_only):
    import huggingface_hub

    def model_info(self, name, timeout):
        assert (name, timeout) == ("org/name", models.PROBE_SECONDS)
        if raised:
            raise type(raised, (Exception,), {})()

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert models._locate(ModelSpec("org/name"))[1]["local_files_only"] is local_only
    assert models._locate(ModelSpec("org/name"), fetch=False)[1]["local_files_only"]


# -- models that can't be loaded ------------------------------------------------------------------


def rewritten(folder: Path, change) -> ModelSpec:
    """The checkpoint with its weights changed by a function of their dictionary."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelSpec(name=str(folder), device="cpu")


def test_weights_that_are_missing_are_not_made_up(checkpoint, capfd):
    spec = rewritten(checkpoint, lambda weights: weights.pop("lm_head.weight"))
    assert "lacks weights (1, such as lm_head.weight)" in refusal(load, spec)
    assert capfd.readouterr() == ("", "")


def test_missing_files_of_weights_are_found_in_the_plan(checkpoint):
    first = checkpoint / "model.safetensors"
    first.rename(checkpoint / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    line = refusal(load_files, ModelSpec(str(checkpoint)))
    assert "lacks 1 of 2 files of weights, such as model-00002" in line


def test_a_model_of_another_kind_is_one_line(checkpoint, capfd):
    (checkpoint / "config.json").write_text('{"model_type": "vit"}')  # no causal language model
    text = refusal(load, ModelSpec(name=str(checkpoint), device="cpu"))
    assert text.startswith(f"model '{checkpoint}' ")
    assert capfd.readouterr() == ("", "")


def test_weights_that_are_not_used_are_mentioned(checkpoint, tiny_subject, capfd):
    spec = rewritten(checkpoint, lambda weights: weights.update(extra=torch.zeros(2)))
    assert load(spec).weights_hash == tiny_subject.weights_hash
    assert "are not used (1, such as extra)" in capfd.readouterr().err


def test_what_can_not_be_run_is_one_line(tiny_model_dir, tiny_subject, monkeypatch):
    text = refusal(load, ModelSpec(name=tiny_model_dir, device="cpu", attention="nope"))
    assert "nope" in text and "; leave out --attention, or name " in text

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", full)
    text = refusal(load, ModelSpec(name=tiny_model_dir, device="cpu"))
    assert "could not be loaded (CUDA out of memory" in text and "; use --dtype bfloat16" in text


@pytest.mark.parametrize("kind", ["fp8", "bitsandbytes"])
def test_quantized_weights_are_refused_by_name(checkpoint, kind, capfd):
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": kind}
    (checkpoint / "config.json").write_text(json.dumps(config))
    text = refusal(load, ModelSpec(name=str(checkpoint), device="cpu"))
    assert text.startswith(
        f"the weights of '{checkpoint}' are quantized ({kind}); give a checkpoint"
    )
    assert capfd.readouterr() == ("", "")


def test_mxfp4_weights_are_read_as_the_numbers_that_they_are(tmp_path, tiny_model_dir):
    """By the format's own definition: pairs of 4-bit floats, low half first, 32 to a scale 2ˢ⁻¹²⁷
    (OCP Microscaling Formats 1.0)."""
    made = tiny.fresh("gpt_oss", hidden_size=32, intermediate_size=32, head_dim=8)
    made.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights, rng = load_file(file), np.random.default_rng(0)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid, expected = np.concatenate([grid, -grid]), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = weights.pop(name).shape
        blocks = rng.integers(0, 256, size=(experts, out, width // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 124, size=(experts, out, width // 32), dtype=np.uint8)
        pairs = np.stack([grid[blocks & 15], grid[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
        numbers = pairs * 2.0 ** (scales[..., None].astype(float) - 127)
        expected[name] = numbers.reshape(experts, out, width).swapaxes(1, 2)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = map(torch.tensor, (blocks, scales))
    save_file(weights, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(ModelSpec(name=str(tmp_path), device="cpu")).model
    assert expected
    for name, numbers in expected.items():
        found = model.get_parameter(name)
        assert np.array_equal(found.float().numpy(), numbers)


def test_weights_are_read_on_their_device(tiny_model_dir, cuda, monkeypatch):
    """Not by way of host memory, but for a model on a CPU."""
    asked = []

    def from_pretrained(place, **options):
        asked.append(options.get("device_map"))
        raise OSError("enough")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    cuda(2)
    for device in ("cpu", "cuda:1"):
        refusal(load, ModelSpec(name=tiny_model_dir, device=device))
    refusal(load, ModelSpec(name=tiny_model_dir, device_map="auto"))
    assert asked == [None, {"": "cuda:1"}, "auto"]
