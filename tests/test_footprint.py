"""The memory of contexts and rows, as the start-up check measures it, against real passes."""

import json
from dataclasses import asdict

import pytest
import tiny
import torch

import ia_mech.engine.memory as memory
import ia_mech.engine.score as scoring
from ia_mech.engine.check import TOKENS, check_engine
from ia_mech.engine.memory import LOGITS_HELD, Footprint, footprint, part_bytes, smaller_passes
from ia_mech.engine.shared import SharedLayer
from ia_mech.engine.state import Prefix, copied_bytes, expand, forward, held_tensors, prefill
from ia_mech.engine.workers import Memory
from ia_mech.likelihood.scorer import score_turns

LENGTH, NEW = 30, 5


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_contexts_and_rows_hold_what_the_check_has_measured(architecture):
    model = tiny.model(architecture)
    check_engine(model, tiny.prompt(TOKENS, seed=0))
    size = footprint(model)
    assert Footprint.read(json.loads(json.dumps(asdict(size)))) == size
    linear = [one.weight for one in model.modules() if type(one) is torch.nn.Linear]
    both = [*model.parameters(), *linear]  # the check has installed it, with both orders
    assert size.weights == sum(one.nbytes for one in both)
    group = prefill(model, [Prefix(tiny.prompt(LENGTH, seed=n)) for n in range(2)])
    layers = group.state.cache.layers
    assert sum(t.nbytes for one in layers for t in held_tensors(one)) == 2 * size.context(LENGTH)
    state = expand(model, [group], [0, 0, 1], NEW)
    for _ in range(NEW):
        forward(model, state, torch.full((3, 1), 5), torch.ones(3, 1, dtype=torch.long))
    own, copied = 0, [0]
    for layer in state.cache.layers:
        if isinstance(layer, SharedLayer):
            own += sum(tensor.nbytes for tensor in layer._own) / 3
        else:
            copied.append(sum(tensor.nbytes for tensor in held_tensors(layer)) / 3)
    assert size.row(LENGTH, NEW) == own + sum(copied) + max(copied) + LOGITS_HELD * 4 * tiny.VOCAB
    assert copied_bytes(model, [group], NEW) == sum(
        one.layers * one.of(LENGTH) for one in size.layers if not one.shared
    )


def test_room_goes_by_all_memory_and_every_worker(monkeypatch):
    total = 64 * 10**9
    monkeypatch.setattr(memory, "usable_memory", lambda: Memory(total, 0))
    monkeypatch.setattr(memory, "usable_cores", lambda: 4)
    assert part_bytes(torch.device("cpu"), 16 * 10**9) == 10 * 10**9
    assert part_bytes(torch.device("cpu"), 70 * 10**9) == 2 * 10**9  # weights on a disk


@pytest.mark.parametrize("limit", ["STATE_BYTES", "LOGITS"])
def test_scoring_passes_are_limited_by_state_and_logits(monkeypatch, limit):
    model = tiny.model("qwen3_5")
    contexts = [tiny.prompt(20, seed=1)]
    turns = [scoring.Turn(0, tiny.prompt(6, seed=n)) for n in range(8)]
    each = {"LOGITS": 6 * tiny.VOCAB, "STATE_BYTES": 0}
    each["STATE_BYTES"] = copied_bytes(model, [prefill(model, [Prefix(contexts[0])])], 6)
    honest, rows = scoring.forward, []

    def counted(model, state, *others, **options):
        rows.append(state.rows)
        return honest(model, state, *others, **options)

    monkeypatch.setattr(scoring, "forward", counted)
    whole = score_turns(model, contexts, turns)
    assert rows == [8]
    monkeypatch.setitem(getattr(scoring, limit), "cpu", 4 * each[limit])
    parts = score_turns(model, contexts, turns)
    with smaller_passes(2):
        halves = score_turns(model, contexts, turns)
    assert rows == [8, 4, 4, 2, 2, 2, 2]
    for a, b, c in zip(whole, parts, halves, strict=True):
        for other in (b, c):
            assert abs(a.logprobs_raw - other.logprobs_raw).max() < 1e-4
