"""An installed model: outside of passes it computes what it did before installing, and passes of
several threads at once equal each pass alone, to the bit."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
import tiny
import torch
import transformers
from contract import VECTOR, assert_logprobs, full_logits, relative_l2

from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import install, installed
from ia_mech.engine.intervene import Add, ProjectOut, Replace
from ia_mech.engine.passes import current, on_block
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.score import Turn, differentiable_logits, score
from ia_mech.engine.shared import Borrowed
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError

THREADS, WIDTH, BORDER = 4, 32, 80  # tokens up to which both kinds of rope rotate alike
FAMILIES = pytest.mark.parametrize("architecture", tiny.FAMILIES)


def rope(kind: str) -> transformers.PreTrainedModel:
    """A tiny model whose rotary frequencies depend on the length, not installed."""
    parameters: dict = {"rope_type": kind, "rope_theta": 1e4}
    if kind == "dynamic":
        return tiny.fresh(
            "llama",
            max_position_embeddings=BORDER,
            rope_parameters=parameters | {"factor": 8.0},
        )
    parameters |= {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 8.0, 13.0]}
    parameters |= {"original_max_position_embeddings": BORDER}
    return tiny.fresh("llama", rope_parameters=parameters)


# -- one thread ------------------------------------------------------------------------------------


@FAMILIES
def test_outside_of_passes_nothing_is_computed_otherwise(architecture, tmp_path):
    """Logits, states, ``generate``, a gradient; also of a copy, and of what was saved."""
    plain, model = tiny.fresh(architecture), tiny.fresh(architecture)
    install(model)
    prefill(model, [Prefix(tiny.prompt(9, seed=1))])
    ids = torch.tensor([tiny.prompt(23, seed=3), tiny.prompt(23, seed=4)])
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    model.save_pretrained(tmp_path)
    saved = (
        type(plain)
        .from_pretrained(tmp_path, attn_implementation=plain.config._attn_implementation)
        .eval()
    )
    neutral = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=9, eos_token_id=tiny.EOS, pad_token_id=0
    )
    for other in (model, copy.deepcopy(model), saved):
        for one in (None, mask):
            wanted, found = (
                m(ids, attention_mask=one, output_hidden_states=True) for m in (plain, other)
            )
            assert torch.equal(found.logits, wanted.logits)
            assert all(map(torch.equal, found.hidden_states, wanted.hidden_states))
            wanted, found = (
                m.generate(ids, attention_mask=one, generation_config=neutral)
                for m in (plain, other)
            )
            assert torch.equal(found, wanted)
    grown = []
    for each in (plain, model):
        states = each.get_input_embeddings()(ids).detach().requires_grad_()
        each(inputs_embeds=states).logits.logsumexp(-1).sum().backward()
        grown.append(states.grad)
    assert torch.equal(*grown)


@FAMILIES
def test_a_copy_is_installed_and_has_its_own_weights(architecture):
    model = tiny.fresh(architecture)
    install(model)
    prefixes = [Prefix(tiny.prompt(n, seed=n), [n - 1]) for n in (9, 14)]
    before = prefill(model, prefixes)
    other = copy.deepcopy(model)
    assert torch.equal(prefill(other, prefixes).residuals, before.residuals)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    changed = prefill(other, prefixes)
    assert not torch.equal(changed.logits, before.logits)
    for prefix, ours in zip(prefixes, changed.logits, strict=True):
        assert relative_l2(ours, other(torch.tensor([prefix.ids])).logits[0, -1]) <= VECTOR
    assert torch.equal(prefill(model, prefixes).residuals, before.residuals)


def test_an_adapter_that_is_merged_later_is_seen_after_installing_again():
    peft = pytest.importorskip("peft")
    model = tiny.fresh("llama")
    install(model)
    prefix = Prefix(tiny.prompt(14, seed=3))
    before = prefill(model, [prefix]).logits
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    merged = tuned.merge_and_unload()
    assert merged is model
    install(model)
    after = prefill(model, [prefix]).logits
    assert relative_l2(after, model(torch.tensor([prefix.ids])).logits[:, -1]) <= VECTOR
    assert relative_l2(after, before) > 1e-2


def test_installing_twice_adds_nothing():
    model = tiny.fresh("gemma3")
    made = install(model)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert install(model) is made
    again = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert hooks == again


def test_a_model_that_is_not_installed_is_an_error():
    with pytest.raises(RuntimeError, match="LlamaForCausalLM isn't installed"):
        prefill(tiny.fresh("llama"), [Prefix([3, 4])])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rows_that_would_be_rotated_otherwise_are_refused(kind):
    """Rows may grow up to the length where rotations change; outside of passes there's no limit."""
    model, turn, lengths = rope(kind), tiny.prompt(5, seed=7), (BORDER - 5, 20)
    install(model)
    long = tiny.prompt(BORDER + 1, seed=1)
    model(torch.tensor([long]))
    prompts = [tiny.prompt(n, seed=n) for n in lengths]
    group = prefill(model, [Prefix(prompt) for prompt in prompts])
    scores = score(model, [group], [Turn(c, turn) for c in range(2)])
    for prompt, one in zip(prompts, scores, strict=True):
        assert_logprobs(one.logprobs_raw, full_logits(rope(kind), prompt, turn), turn)
    said = f"a row has {BORDER + 1} tokens; beyond {BORDER}, this model rotates"
    for refused in (
        lambda: decode(model, [group], [Row(c, 0.0, (0, 0)) for c in (1, 0)], [], 7),
        lambda: score(model, [group], [Turn(0, [*turn, 3, 4])]),
        lambda: prefill(model, [Prefix(long)]),
    ):
        with pytest.raises(UserError, match=said):
            refused()


# -- several threads -------------------------------------------------------------------------------


@dataclass
class Job:
    """Something to compute on a model, and how to tell its results apart to the bit."""

    model: transformers.PreTrainedModel
    run: Callable[[transformers.PreTrainedModel], list]

    def __call__(self) -> list:
        with torch.inference_mode():  # of this thread
            return [one.tolist() if hasattr(one, "tolist") else one for one in self.run(self.model)]


def captured(lengths, edits, model) -> list:
    """Contexts that are prefilled and captured, each edited in its own way."""
    prefixes = [
        Prefix(tiny.prompt(n, seed=n), (n - 4, n - 1, -1), edits if row % 2 else ())
        for row, n in enumerate(lengths)
    ]
    found = prefill(model, prefixes)
    return [found.logits, found.residuals.nan_to_num(0.0)]


def written(lengths, steered, model) -> list:
    """Rows that are decoded: greedy and sampled, and steered."""
    group = prefill(model, [Prefix(tiny.prompt(n, seed=n)) for n in lengths])
    rows = [
        Row(c, t, stream_key(0, f"s{c}", 0), steered)
        for c in range(len(lengths))
        for t in (0.0, 0.9)
    ]
    found = decode(model, [group], rows, [tiny.EOS, *range(80, 97)], 5)
    return [value for one in found for value in (one.token_ids, one.logprobs_raw)]


def read(lengths, edits, layers, model) -> list:
    """Turns that are scored, some of them edited, some with borrowed keys."""
    group = prefill(model, [Prefix(tiny.prompt(n, seed=n)) for n in lengths])
    turns = [
        Turn(
            c,
            tiny.prompt(6 + c, seed=c),
            Borrowed(0, layers) if layers and c else None,
            interventions=edits if c % 2 else (),
            whole_at=3,
        )
        for c in range(len(lengths))
    ]
    found = score(model, [group], turns, [0.7])
    return [value for one in found for value in (one.logprobs_tempered, one.whole)]


def differentiated(lengths, model) -> list:
    """A gradient that goes through edits."""
    group = prefill(model, [Prefix(tiny.prompt(n, seed=n)) for n in lengths])
    with torch.inference_mode(False):
        along = torch.ones(WIDTH, requires_grad=True)
        turns = [
            Turn(c, tiny.prompt(6, seed=c), interventions=(Add(2, (1, 3), along, 0.5),))
            for c in range(len(lengths))
        ]
        differentiable_logits(model, [group], turns).logsumexp(-1).sum().backward()
        return [along.grad]


@cache
def jobs() -> list[Job]:
    """Jobs of every kind, on several architectures; lengths lie around that of a sliding window."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, WIDTH, generator=generator)
    models = {name: tiny.model(name) for name in tiny.FAMILIES}
    found = []
    for name, model in models.items():
        shared = installed(model).engine.shared
        layers = tuple(shared)
        for lengths in ((23, 14, 5), (9, 60)):
            edits = (
                Replace(len(lengths), (1, 3), states),
                Add(0, (2,), states[0], 0.3),
                ProjectOut(4, (0, 2), states[1], 1.0),
            )
            steered = (Add(1, (0,), states[0], 0.2),)
            kinds = [
                partial(captured, lengths, ()),
                partial(captured, lengths, edits),
                partial(written, lengths, ()),
                partial(written, lengths, steered),
                partial(read, lengths, edits, layers),
            ]
            if name != "qwen3_5":  # its recurrent layers change their state in place
                kinds.append(partial(differentiated, lengths))
            found += [Job(model, run) for run in kinds]
    return found


@cache
def alone() -> list[list]:
    return [job() for job in jobs()]


def in_threads(calls: Iterator[Callable[[], list]]) -> list:
    with ThreadPoolExecutor(THREADS) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_passes_of_several_threads_equal_each_alone(rounds):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = alone()
        order = np.random.default_rng(0).permutation(rounds * len(jobs())) % len(jobs())
        found = in_threads(jobs()[number] for number in order)
        assert all(a == wanted[number] for number, a in zip(order, found, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_a_pass_that_is_stopped_leaves_others_and_the_model_alone():
    model = tiny.model("llama")
    job = Job(model, partial(written, (23, 14, 5), ()))
    wanted = job()

    class Stopped(Exception): ...

    def stopped(after: int) -> str:
        passed = []

        def count() -> None:
            passed.append(1)
            if len(passed) > after:
                raise Stopped

        on_block.set(count)
        with pytest.raises(Stopped):
            job()
        assert current() is None and len(passed) == after + 1
        on_block.set(None)
        assert job() == wanted
        return "stopped"

    found = in_threads(iter([partial(stopped, 2), job, partial(stopped, 9), job]))
    assert found == ["stopped", wanted, "stopped", wanted]
    assert on_block.get() is None
