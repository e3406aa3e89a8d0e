"""Sampling under a steering vector: naive forward passes, batches, files, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from contract import LOGPROB
from runs import sampled
from safetensors.torch import save_file
from test_intervene import by_plain_hooks, hooks_of, vectors

from experiments.units import Loaded
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.intervene import Add, ProjectOut, at_tokens
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.score import Turn, score
from ia_mech.engine.state import Prefix, prefill
from ia_mech.engine.workers import ANY
from ia_mech.errors import UserError
from ia_mech.rates.load import open_runs
from ia_mech.settings import Settings
from ia_mech.steering import ADD, STEERING_KINDS, SteeringVector

LENGTHS, STEPS, DEPTH = (11, 17, 14), 6, 4  # sliding windows are 8 tokens


def steered_in(kind: str, layer: int, positions=(0,)) -> Add | ProjectOut:
    direction = vectors(1, seed=layer)[0]
    if kind == ADD:
        return Add(layer, positions, direction, 0.6)
    return ProjectOut(layer, positions, direction, 1.0)


def by_hand(kind: str, layer: int, where):
    """A plain hook that changes these tokens of a pass."""
    direction = vectors(1, seed=layer)[0]
    unit = direction / direction.norm()

    def change(hidden):
        for at in where:
            own = hidden[at].clone()
            along = own.norm() * 0.6 if kind == ADD else -torch.dot(own, unit)
            hidden[at] = own + along * unit

    return layer, change


@pytest.mark.parametrize("architecture", tiny.FAMILIES)
def test_sampled_and_scored_rows_equal_full_passes_with_plain_hooks(architecture):
    """Contexts of several lengths and groups in one batch, each row under an
    intervention of its own: at a named token, at the turn's tokens, at both, or none."""
    model = tiny.model(architecture)
    before = hooks_of(model)
    cases = [
        (length, kind, layer, at, turn)
        for length, layer in zip(LENGTHS, (0, 2, DEPTH), strict=True)
        for kind in STEERING_KINDS
        for at, turn in ((True, False), (False, True), (True, True), (False, False))
    ]
    prefixes, rows = [], []
    for number, (length, kind, layer, at, turn) in enumerate(cases):
        named = (steered_in(kind, layer, (length - 3, length - 1)),) if at else ()
        prefixes.append(Prefix(tiny.prompt(length, seed=length), (), named))
        each = (steered_in(kind, layer),) if turn else ()
        rows.append(Row(number, number % 2 * 1.0, stream_key(3, "s", number), each))
    groups = [prefill(model, prefixes[:14]), prefill(model, prefixes[14:])]
    found = decode(model, groups, rows, [], STEPS)
    assert hooks_of(model) == before
    for (length, kind, layer, at, turn), row, own in zip(cases, rows, found, strict=True):
        ids, written = tiny.prompt(length, seed=length), own.token_ids.tolist()
        where = [length - 3, length - 1] if at else []
        where += range(length, length + STEPS - 1) if turn else []
        edit = by_hand(kind, layer, where)
        logits = by_plain_hooks(model, [*ids, *written[:-1]], edit)[length - 1 :].double()
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(written)[:, None])[:, 0]
        np.testing.assert_allclose(own.logprobs_raw, wanted, rtol=0, atol=LOGPROB)
        if row.temperature == 0:
            top = logits.topk(2).values
            argmax = logits.argmax(-1).tolist()
            for token, best, margin in zip(written, argmax, -top.diff()[:, 0], strict=True):
                assert token == best or margin < 1e-4
    turns = []
    for i, own in enumerate(found[:14]):
        edits = at_tokens(rows[i].steered, range(len(own.token_ids) - 1))
        turns.append(Turn(i, own.token_ids.tolist(), interventions=tuple(edits)))
    for one, own in zip(score(model, groups, turns, [0.7]), found, strict=False):
        np.testing.assert_allclose(one.logprobs_raw, own.logprobs_raw, rtol=0, atol=LOGPROB)
    plain = score(model, groups, [replace(turn, interventions=()) for turn in turns])
    moved = [
        np.abs(one.logprobs_raw - own.logprobs_raw).max()
        for one, own in zip(plain, found, strict=False)
    ]
    assert max(moved) > 1e-2, "steering changes something"


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_dose_zero_and_unsteered_neighbours_draw_what_no_steering_draws(architecture):
    model = tiny.model(architecture)
    ids = tiny.prompt(13, seed=1)
    none = Add(2, (0,), vectors(1, seed=5)[0], 0.0)
    strong = Add(2, (0,), vectors(1, seed=5)[0], 2.0)

    def rows(steered):
        return [Row(0, t, stream_key(0, "q", 0), steered) for t in (0.0, 1.0)]

    def run(at_context, *steered):
        prefilled = prefill(model, [Prefix(ids, (), at_context)])
        return decode(model, [prefilled], [row for s in steered for row in rows(s)], [], 8)

    plain = run((), (), ())
    for zero in (run((), (none,), ()), run((replace(none, positions=(4,)),), (), (none,))):
        for a, b in zip(plain, zero, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.logprobs_raw, b.logprobs_raw)
    beside = run((), (strong,), ())
    for a, b in zip(beside[2:], plain[2:], strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs_raw, b.logprobs_raw, rtol=0, atol=LOGPROB)
    assert any((a.token_ids != b.token_ids).any() for a, b in zip(beside[:2], plain, strict=False))


# -- the file -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vector(tiny_subject) -> SteeringVector:
    return SteeringVector(
        ADD,
        2,
        ("header_last", "turn"),
        vectors(1, seed=3)[0],
        0.5,
        "tiny",
        tiny_subject.weights_hash,
    )


def test_a_file_holds_all_of_it(vector, tmp_path):
    file = tmp_path / "v.safetensors"
    vector.save(file)
    again = SteeringVector.load(file)
    assert torch.equal(again.direction, vector.direction)
    for name in ("kind", "layer", "positions", "dose", "model", "weights_hash", "sha256"):
        assert getattr(again, name) == getattr(vector, name)
    for change in ({"dose": 0.6}, {"layer": 1}, {"direction": -vector.direction}):
        assert replace(vector, **change).sha256 != vector.sha256


def test_what_isnt_a_vector_of_this_model_is_refused(vector, tmp_path):
    missing, wrong = tmp_path / "none", tmp_path / "wrong.safetensors"
    wrong.write_text("no")
    plain = tmp_path / "plain.safetensors"
    save_file({"direction": torch.ones(3)}, plain)
    names = ["turn_end", "header_last"]
    for made, said in (
        (lambda: SteeringVector.load(missing), "there is no steering vector"),
        (lambda: SteeringVector.load(wrong), "is damaged or no steering vector"),
        (lambda: SteeringVector.load(plain), "is damaged or no steering vector"),
        (lambda: replace(vector, direction=torch.zeros(3)), "has length 0"),
        (lambda: replace(vector, dose=float("nan")), "vector of dose nan"),
        (lambda: vector.check(4, 7, names), "has 32 numbers, the model's states have 7"),
        (lambda: vector.check(1, 32, names), "no layer 2 to change; give layers from 0 to 1"),
        (lambda: vector.check(4, 32, names[:1]), "no position header_last to steer at; use names"),
        (lambda: vector.check_weights("other"), "this model has other; give a vector of this"),
        (lambda: vector.at_context({"header_last": None}), "the context has no header_last"),
    ):
        with pytest.raises(UserError, match=said):
            made()


# -- a run ----------------------------------------------------------------------------------------

GRID = {"temperatures": (1.0,), "samples": 2, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def configs(tmp_path_factory, vector):
    """Runs without a vector, with one, and with one of dose 0."""
    folder = tmp_path_factory.mktemp("steered")
    file = folder / "chats.jsonl"
    rows = [{"question": f"What is {i}?", "response": "It is.", "followup": "Why?"} for i in "abc"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {"plain": Settings(dataset=str(file), limit=None, **GRID)}
    for name, dose in (("steered", 0.5), ("zero", 0.0)):
        path = folder / f"{name}.safetensors"
        replace(vector, dose=dose).save(path)
        made[name] = replace(made["plain"], intervention=str(path))
    return folder, made


def test_a_run_is_sampled_scored_and_captured_under_a_vector(configs, tiny_subject, progress):
    folder, made = configs
    runs = {name: sampled(made[name], tiny_subject, folder / name, progress) for name in made}
    assert runs["zero"].digest() == runs["plain"].digest()
    assert runs["zero"].identity_digest != runs["plain"].identity_digest
    assert (
        runs["steered"].record["identity"]["intervention"]
        == SteeringVector.load(made["steered"].intervention or "").sha256
    )
    with pytest.raises(UserError, match="scored again, its turns would be those of another model"):
        _ = Loaded(runs["steered"], None, ANY).team
    with pytest.raises(UserError, match="were not sampled under the same intervention; give each"):
        open_runs([runs["plain"], runs["steered"]])
    assert f"steered: {SteeringVector.load(made['steered'].intervention or '')}" in progress.lines
    vector = SteeringVector.load(made["steered"].intervention or "")
    for row in runs["steered"].generations.to_dict("records")[:4]:
        context = runs["steered"].contexts.set_index("context_id").loc[row["context_id"]]
        ids, written = context["token_ids"].tolist(), row["token_ids"].tolist()
        where = [len(ids) - 1, *range(len(ids), len(ids) + len(written) - 1)]
        unit = vector.direction / vector.direction.norm()

        def change(hidden, where=where, unit=unit):
            for at in where:
                hidden[at] += 0.5 * hidden[at].norm() * unit

        logits = by_plain_hooks(tiny_subject.model, [*ids, *written[:-1]], (2, change))
        wanted = logits[len(ids) - 1 :].double().log_softmax(-1)
        wanted = wanted.gather(-1, torch.tensor(written)[:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs_raw"], wanted, rtol=0, atol=LOGPROB)
    captured = runs["steered"].residuals(2, "header_last")[0]
    plain = runs["plain"].residuals(2, "header_last")[0]
    moved = plain + 0.5 * plain.norm() * vector.direction / vector.direction.norm()
    assert (captured - moved).norm() <= 1e-5 * moved.norm()
    scores = [run.contexts["real_follow_up_logprob"].to_numpy(float) for run in runs.values()]
    assert (scores[0] == scores[2]).all() and (scores[0] != scores[1]).all()


def test_a_vector_of_another_model_is_refused_before_anything_is_written(
    configs, vector, tiny_subject, progress
):
    folder, made = configs
    other = folder / "other.safetensors"
    replace(vector, weights_hash="0" * 16).save(other)
    config = replace(made["plain"], intervention=str(other))
    with pytest.raises(UserError, match="with the weights 0000000000000000, this model has"):
        sampled(config, tiny_subject, folder / "other", progress)
    assert not (folder / "other").exists()
