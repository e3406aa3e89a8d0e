"""A model whose blocks are on two GPUs, as ``--device-map auto`` leaves it.

The devices are stand-ins (``placed.py``): numbers are computed on the CPU, and an operation on
tensors of two devices is an error. What this can't show is that real copies between GPUs work,
and that ``accelerate``'s own hooks, which move hidden states, do what the hooks here do.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scored
import tiny
import torch
from conftest import Silent
from contract import LOGPROB, VECTOR, near_ties, prefilled, relative_l2, stepped
from placed import Gpus, Placed
from runs import sampled
from shell import call
from test_moved_mass import under_states
from test_temperature_sweep import judged
from transformers.cache_utils import KVSharingDict

from experiments import elicit, locate, steering
from experiments.experiment import Model
from experiments.mass_vector import Learning, learn
from experiments.steering import SteeredContext
from ia_mech.collect import job
from ia_mech.collect.capture import Wanted, capture
from ia_mech.display import Quiet
from ia_mech.engine.check import TOKENS, check_engine
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import install
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.score import Turn, score
from ia_mech.engine.shared import Borrowed, SharedLayer
from ia_mech.engine.splice import Hybrid, Piece, aligned, check_ceiling, spliced
from ia_mech.engine.state import expand
from ia_mech.judge import builtin_judge
from ia_mech.judge.judging import label_run
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.models.load import Subject
from ia_mech.run import Run
from ia_mech.settings import Settings
from ia_mech.steering import ADD, TURN, SteeringVector

LENGTHS = (23, 14, 5)
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def gpus():
    with Gpus():
        yield


def over_two(architecture: str, vocab: int = tiny.VOCAB):
    """A tiny model with its embeddings and first two blocks on one GPU, the rest on another."""
    model = copy.deepcopy(tiny.model(architecture, vocab))
    inner = model.model

    def place(module, device):
        for each in module.modules():
            for held in (each._parameters, each._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = torch.nn.Parameter(Placed(tensor.data, device), False)

    def arrive(module, args, kwargs, device):
        moved = torch.utils._pytree.tree_map(
            lambda one: one.to(device) if isinstance(one, torch.Tensor | KVSharingDict) else one,
            (args, kwargs),
        )
        return moved

    second = (*inner.layers[2:], inner.norm, model.lm_head)
    for module in (*inner.children(), *inner.layers, model.lm_head):
        if module is inner.layers:
            continue
        device = SECOND if module in second else FIRST
        place(module, device)
        module.register_forward_pre_hook(
            lambda m, a, k, device=device: arrive(m, a, k, device), with_kwargs=True
        )
    return model


@pytest.mark.parametrize(
    ("architecture", "share"),
    [
        pytest.param("llama", True, marks=pytest.mark.slow),
        *(("mistral", True), ("gemma3", True)),
        pytest.param("gemma3", False, marks=pytest.mark.slow),
        ("gemma4", False),
    ],
)
def test_caches_and_tables_follow_each_layers_device(architecture, share, gpus):
    model, cpu = over_two(architecture), tiny.model(architecture)
    assert model.device == FIRST
    groups, theirs = ([prefilled(m, LENGTHS[:2]), prefilled(m, LENGTHS[2:])] for m in (model, cpu))
    assert groups[0].logits.device == SECOND
    ours, right = (
        expand(m, g, [0, 0, 1, 2], 4, copies=not share) for m, g in ((model, groups), (cpu, theirs))
    )
    for step, drop in enumerate(([], [1], [0], [])):
        tokens = tiny.prompt(ours.rows, seed=step)
        logits = stepped(model, ours, tokens)
        assert relative_l2(logits.cpu(), stepped(cpu, right, tokens)) <= VECTOR
        assert ours.drop(drop) == right.drop(drop)
    for number, layer in enumerate(ours.cache.layers):
        if architecture == "gemma4" and number >= 2:
            continue  # it reads the keys of the layers before
        where = FIRST if number < 2 else SECOND
        held = [layer.keys, layer.values]
        if isinstance(layer, SharedLayer):
            held += layer.prefixes[0]
        assert {tensor.device for tensor in held} == {where}


def test_rows_and_scores_over_two_devices_equal_those_on_one(gpus):
    model, cpu = over_two("llama"), tiny.model("llama")
    rows = [Row(c, t, stream_key(0, "s", c)) for c in (2, 0) for t in (0.0, 0.8)]
    rows += [Row(c, 0.8, stream_key(0, "s", c), drawn=1, first=2) for c in (1, 2)]
    turns = [
        Turn(c, tiny.prompt(n, seed=n), borrowed=Borrowed(0, (2, 3)))
        for c, n in ((1, 6), (2, 9), (1, 1))
    ]
    found = []
    for one in (model, cpu):
        groups = [prefilled(one, LENGTHS[:2]), prefilled(one, LENGTHS[2:])]
        wrote = decode(one, groups, rows, [tiny.EOS, *range(60, 80)], 4)
        found.append((wrote, score(one, groups, turns, [0.5])))
    assert near_ties(cpu, LENGTHS, rows, found[0][0], found[1][0]) == 0
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert abs(ours.logprobs_raw - theirs.logprobs_raw).max() < LOGPROB


@pytest.mark.parametrize(
    ("architecture", "share"),
    [
        *(("llama", True), ("gemma4", False)),
        *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("gemma3", "qwen3_5")),
    ],
)
def test_the_check_finds_what_can_be_shared_over_two_devices(architecture, share, gpus):
    """Gemma 4's last layers read keys of layers on the other GPU, which are moved on their way."""
    ids = tiny.prompt(TOKENS, seed=0)
    assert check_engine(over_two(architecture), ids).share == share


def test_a_tensor_on_another_device_is_noticed(gpus):
    with pytest.raises(RuntimeError, match="tensors on"):
        torch.ones(2, device=FIRST) + torch.ones(2, device=SECOND)
    with pytest.raises(RuntimeError, match="tensors on cpu"):
        torch.ones(2, device=FIRST) * torch.ones(2)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_5"])
def test_hybrids_are_spliced_on_each_layers_device(architecture, gpus):
    model, cpu = over_two(architecture), tiny.model(architecture)
    contexts = [tiny.prompt(n, seed=n) for n in LENGTHS]
    made = [Hybrid(0, (Piece(0, 0, 9), Piece(1, 9, 14)), 1), Hybrid(1, (Piece(2, 0, 5),), 0)]
    turns = [Turn(n, tiny.prompt(6, seed=n)) for n in range(2)]
    ours, right = (score(m, [spliced(aligned(m, contexts), made)], turns) for m in (model, cpu))
    for mine, theirs in zip(ours, right, strict=True):
        assert abs(mine.logprobs_raw - theirs.logprobs_raw).max() <= LOGPROB
    check_ceiling(model, aligned(model, contexts), tiny.prompt(3, seed=4))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_5"])
def test_masses_under_states_equal_those_on_one_device(architecture, gpus):
    states = [np.random.default_rng(n).normal(size=(4, 1, 2, 32)).astype("f4") for n in range(4)]
    ours, right = (
        unit.rows(subject)
        for unit, subject in (
            under_states(model, states)
            for model in (over_two(architecture), tiny.model(architecture))
        )
    )
    pd.testing.assert_frame_equal(ours, right, rtol=0, atol=1e-5)


# -- commands --------------------------------------------------------------------------------------


DECODING = {"limit": None, "temperatures": (1.0,), "max_new_tokens": 4}
WRITTEN = {"response": "generate", "unfinished": True, "max_response_tokens": 4}


def both(architecture, tokenizer) -> tuple[Subject, Subject]:
    """The same model on the CPU, and over two devices."""
    cpu = tiny.subject(architecture, tokenizer)
    return cpu, replace(cpu, model=over_two(architecture, len(tokenizer)))


@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in tiny.FAMILIES[1:])],
)
def test_the_main_job_equals_that_on_one_device(
    architecture, tokenizer, tmp_path, gpus, monkeypatch
):
    """Responses, user turns with few and with all tokens sampled, and states at the header and of
    any token."""
    # The check has a test of its own, and takes longer than the rest.
    monkeypatch.setattr(job, "check_engine", lambda model, *_, **__: install(model).engine)
    data = scored.dataset(tmp_path / "chats.jsonl", scored.CONVERSATIONS[:1])
    runs = []
    for number, one in enumerate(both(architecture, tokenizer)):
        given = {"dataset": data, "model": one.spec.name, "samples": 1, "responses": 2}
        settings = Settings(**given, **DECODING, **WRITTEN, sampled_tokens=(1, "all"))
        run = sampled(settings, one, tmp_path / str(number), Silent())
        capture(Wanted(run, ["response:-1", "turn:0"], [1, 4], ["attn", "mlp"]), one, Quiet())
        runs.append(Run.open(run.path))
    wanted, found = runs
    assert found.contexts["text"].tolist() == wanted.contexts["text"].tolist()
    assert found.generations["text"].tolist() == wanted.generations["text"].tolist()
    for layer in found.layers:
        states = (run.residuals(layer, "header_last") for run in (found, wanted))
        assert relative_l2(*states) <= VECTOR
    for part in ("attn", "mlp"):
        for token in ("response:-1", "turn:0"):
            states = (run.residuals([1, 4], tokens=token, component=part) for run in runs)
            assert relative_l2(*states) <= VECTOR


@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt_oss", "gemma3"))],
)
def test_gradients_go_through_both_devices(architecture, gpus):
    contexts = tuple(
        SteeredContext("q", "", 0, tuple(tiny.prompt(n, n)), 2, (n - 1,), False, ((n,),))
        for n in (9, 12)
    )
    unit = Learning("", "", 0, contexts, steps=2, seed=0)
    found = []
    for model in (over_two(architecture), tiny.model(architecture)):
        install(model)
        subject = SimpleNamespace(model=model)
        found.append(learn(Model(subject, None), unit))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)
    assert len(found[0]) == 32


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def runs(request, tokenizer, tmp_path_factory):
    """Both models; a run with four responses to each query, judged by the built-in judge and as
    planted; a vector."""
    cpu, placed = both(request.param, tokenizer)
    folder = tmp_path_factory.mktemp(request.param)
    cpu.model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = scored.dataset(folder / "chats.jsonl", scored.CONVERSATIONS[:4])
    given = {"dataset": data, "model": str(folder / "model"), "samples": 2, **DECODING}
    settings = Settings(**given, **WRITTEN, responses=4)
    siblings = judged(
        sampled(settings, cpu, folder / "siblings", Silent()), (FOLLOW_UP, "degenerate")
    )
    label_run(siblings, builtin_judge(), "builtin", Silent())
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))
    places = ("header_last", TURN)
    made = SteeringVector(ADD, 2, places, direction, 0.5, "tiny", siblings.model["weights_hash"])
    made.save(folder / "vector.safetensors")
    return folder, cpu, placed, siblings


@pytest.mark.slow
@pytest.mark.parametrize("command", [locate, elicit, steering])
def test_a_command_equals_itself_on_one_device(command, runs, gpus, tmp_path, monkeypatch, capfd):
    """Every score and every turn is equal. An estimate may differ more where it hardly depends on
    them, as where siblings are told apart by the query, which they share."""
    folder, cpu, placed, siblings = runs
    monkeypatch.setattr("experiments.outcome.TOKENS", 4)
    monkeypatch.setattr(steering, "OTHERS", 29)
    vector = str(folder / "vector.safetensors")
    recurrent = "linear_attention" in getattr(cpu.model.config, "layer_types", ())
    maps = [name for name in locate.MAPS if name != locate.BLOCKS or not recurrent]
    words = {
        locate: [siblings.path, "--queries", "3", "--recipients", "1", "--maps", *maps],
        elicit: [siblings.path, "--judge", "builtin"],
        steering: [siblings.path, "--judge", "planted", "--vector", vector, "--kl", "0.001"],
    }[command]
    for name, subject in (("one", cpu), ("two", placed)):
        monkeypatch.setattr("ia_mech.models.load.load", lambda _, subject=subject: subject)
        out = ["--resamples", "100", "--out", str(tmp_path / name)]
        outcome = call(command.main, [*map(str, words), *out], capfd)
        assert outcome.status == 0, outcome.err
    one = tmp_path / "one"
    kept = {locate: "rows.parquet", elicit: "*/run/generations/*.parquet"}
    files = [*one.glob(kept.get(command, "*.parquet"))]
    assert files
    for file in files:
        there = tmp_path / "two" / file.relative_to(tmp_path / "one")
        wanted, found = pd.read_parquet(file), pd.read_parquet(there)
        pd.testing.assert_frame_equal(found, wanted, rtol=0, atol=scored.nats(4)["atol"])
