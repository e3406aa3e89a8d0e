"""``experiments.steering``: likelihoods under arms, gradients, planted directions, the command."""

import json
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import planted_reaction as planted
import pytest
import tiny
import torch
from shell import call
from test_temperature_sweep import judged

from experiments import steering
from experiments.control import permuted_probes, random_directions
from experiments.experiment import Model
from experiments.shown import estimates_of
from experiments.steering import (
    BEYOND,
    DIRECTION,
    KL,
    ODDS,
    OTHER_MEAN,
    RANK,
    Odds,
    SteeredContext,
    Steering,
    doses_of_equal_kl,
    dosing,
    estimates,
    is_shown,
    main,
)
from ia_mech.collect.command import main as sample
from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.intervene import Add
from ia_mech.engine.score import Turn, differentiable_logits, score
from ia_mech.engine.state import Prefix, prefill
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.run import Run
from ia_mech.stats import permutation_p
from ia_mech.steering import ADD, TURN, SteeringVector
from probes.card import Direction, Probe, directions
from probes.targets import Outcome

LAYER = 3  # between the block that writes and the one that reads
FROM, TO = 0, 2  # names
OPTIONS = {"level": 0.95, "resamples": 100, "seed": 0}


def model_of(network) -> Model:
    return Model(SimpleNamespace(model=network), None)


# -- likelihoods and gradients against independent computations --------------------------------


@torch.inference_mode()
def test_changes_equal_full_passes_with_plain_hooks(tiny_subject):
    network = tiny_subject.model
    ids, turns = tuple(range(20, 41)), ((50, 60, 70, 80), (55, 65))
    direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
    unit_vector = direction / direction.norm()
    for at, in_turn in (((20,), False), ((17,), True)):
        context = SteeredContext("q", "", 0, ids, 2, at, in_turn, turns)
        tried = context.under([direction.tolist()], [0.7])
        scored, _, kls = tried.scores(Model(tiny_subject, None).after([tried.prefix]))
        sums, firsts = {}, {}
        for name in ("plain", "moved"):
            for number, turn in enumerate(turns):
                where = [*at, *(range(len(ids), len(ids) + len(turn) - 1) if in_turn else ())]

                def change(_module, _args, output, where=where):
                    for place in where:
                        output[0, place] += 0.7 * output[0, place].norm() * unit_vector

                handle = find_blocks(network)[1].register_forward_hook(change)
                if name == "plain":
                    handle.remove()
                whole = torch.tensor([[*ids, *turn]])
                log = network(whole, use_cache=False).logits[0].double().log_softmax(-1)
                handle.remove()
                ahead = range(len(ids) - 1, len(ids) + len(turn) - 1)
                sums[name, number] = sum(float(log[i, t]) for i, t in zip(ahead, turn, strict=True))
                firsts[name] = log[len(ids) - 1]
        moved = [sums["moved", n] - sums["plain", n] for n in (0, 1)]
        np.testing.assert_allclose(scored[1] - scored[0], moved, rtol=0, atol=1e-4)
        kl = float((firsts["moved"].exp() * (firsts["moved"] - firsts["plain"])).sum())
        assert kls == pytest.approx([0, kl], abs=1e-5) and kl > 5e-4


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss"])
def test_gradients_equal_finite_differences(architecture):
    network = tiny.model(architecture)
    turns = [tiny.prompt(5, seed=5), tiny.prompt(9, seed=9)]
    ids = tiny.prompt(23, seed=3)
    groups, header = [prefill(network, [Prefix(ids[:18])])], 5
    start = torch.randn(32, generator=torch.Generator().manual_seed(0))

    def rows(direction):
        steered = (Add(2, (2, 4), direction, 0.5),)
        return [Turn(0, [*ids[18:], *turn], interventions=steered) for turn in turns]

    def odds(direction) -> float:
        found = score(network, groups, rows(direction))
        own, other = (one.logprobs_raw[header:].sum(dtype=float) for one in found)
        return float(own - other)

    along = start.clone().requires_grad_()
    log = differentiable_logits(network, groups, rows(along))[:, header:].log_softmax(-1)
    sums = [
        log[n, : len(turn)].gather(-1, torch.tensor(turn)[:, None]).sum()
        for n, turn in enumerate(turns)
    ]
    (sums[0] - sums[1]).backward()
    assert float((sums[0] - sums[1]).detach()) == pytest.approx(odds(start), abs=1e-4)
    for seed in range(3):
        step = 1e-2 * torch.randn(32, generator=torch.Generator().manual_seed(seed + 1))
        difference = (odds(start + step) - odds(start - step)) / 2
        assert float(along.grad @ step) == pytest.approx(difference, rel=5e-3, abs=1e-4)


# -- what it is compared with --------------------------------------------------------------------


def test_random_directions_have_the_covariance_of_the_states_and_nothing_of_the_direction():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 6)) * [5, 2, 1, 1, 0.1, 0.1]
    x -= x.mean(0)
    direction = np.eye(6)[0]
    drawn = random_directions(x, direction, 4000, 0)
    np.testing.assert_allclose(drawn @ direction, 0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), 1)
    spread = drawn.var(0)
    assert spread[1] > 1.5 * spread[2] > 15 * spread[4]


def test_permuted_probes_are_the_probe_with_the_labels_of_other_sources():
    rng = np.random.default_rng(0)
    states, sources = rng.standard_normal((8, 5)), np.repeat(np.arange(4), 2)
    outcome = Outcome.from_counts([0, 1, 2, 2, 0, 0, 4, 3], np.full(8, 4), sources)
    found = permuted_probes(states, outcome, 0.1, 60, 0)
    possible = []
    for order in permutations(range(4)):
        rows = np.concatenate([[2 * one, 2 * one + 1] for one in order])
        moved = replace(outcome, positives=outcome.positives[rows])
        possible.append(directions(states, moved, 0.1)["logistic"].weights)
    close = abs(found[:, None] - np.array(possible)).max(axis=2) < 1e-6
    assert close.any(axis=1).all() and close.any(axis=0).sum() > 18  # of 24 orders
    assert (found == permuted_probes(states, outcome, 0.1, 60, 0)).all()
    assert (found != permuted_probes(states, outcome, 0.1, 60, 1)).any()


def rank_p(rng: np.random.Generator, permuted: bool, planted: float) -> float:
    """p of a weakly penalised probe's rank among 19 other directions. The log-odds move along any
    axis; the first token hardly does along axes along which states hardly vary."""
    scale = 1 / np.arange(1, 41)
    states = rng.standard_normal((60, 40)) * scale
    states -= states.mean(0)
    moves, first = rng.standard_normal(40), rng.standard_normal((20, 40)) * scale**0.5
    told = states @ moves
    k = rng.binomial(4, 1 / (1 + np.exp(-planted * told / told.std())))
    outcome, seed = Outcome.from_counts(k, np.full(60, 4), range(60)), int(rng.integers(10**6))
    own = directions(states, outcome, 1e-3)["logistic"].weights.astype(float)
    if permuted:
        others = permuted_probes(states, outcome, 1e-3, 19, seed)
    else:
        others = random_directions(states, own, 19, seed)
    along = np.stack([own, *others])
    effects = along @ moves / np.linalg.norm(along @ first.T, axis=1)  # at doses of equal KL
    return float(permutation_p(effects[0], effects[1:]))


def test_meaningless_labels_make_no_false_alarms_against_permuted_probes():
    """Against random directions they do."""
    rng = np.random.default_rng(0)
    called = np.mean([rank_p(rng, True, 0.0) <= 0.05 for _ in range(100)])
    found = np.mean([rank_p(rng, True, 2.0) <= 0.05 for _ in range(30)])
    before = np.mean([rank_p(rng, False, 0.0) <= 0.05 for _ in range(100)])
    assert called <= 0.11 < before and found >= 0.4  # three standard deviations above 0.05


def test_directions_get_the_doses_of_one_kl():
    model, told = model_of(planted.model(True)), np.zeros(planted.WIDTH)
    told[planted.READ_OUT + TO] = 1.0
    along, nothing = tuple(told.tolist()), tuple(np.roll(told, 1).tolist())
    made = [planted_context(n) for n in range(4)]
    contexts = tuple(replace(one, layer=5, at=(len(one.ids) - 1,)) for one in made)
    doses = dosing("", contexts, [along, nothing], 1e-3).rows(model)["dose"]
    each = (one.under([along, nothing], doses).rows(model) for one in contexts)
    reached = pd.concat(each).groupby("draw")["kl"].mean()
    np.testing.assert_allclose(reached, 1e-3, rtol=0.1)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.5, 4.0, 5.0])
def test_a_dose_is_found_whatever_power_of_it_a_kl_grows_with(power):
    scales = np.array([0.01, 0.2, 1.0, 5.0, 0.0])

    def kl_of(some: np.ndarray, doses: np.ndarray) -> np.ndarray:
        return scales[some] * doses**power

    found = doses_of_equal_kl(len(scales), 0.05, kl_of)
    wanted = (0.05 / scales[:-1]) ** (1 / power)
    there = (wanted > steering.LEAST_DOSE) & (wanted < steering.MOST_DOSE)
    assert (~np.isnan(found)).tolist() == [*there.tolist(), False]
    reached = kl_of(np.flatnonzero(there), found[:-1][there])
    assert there.any() and (abs(reached - 0.05) <= 0.1 * 0.05).all()


# -- planted truths --------------------------------------------------------------------------------


def planted_context(number: int) -> Odds:
    """The context's own turn is no follow-up; that of another name is."""
    made = planted.context(FROM, 4 + number % 4, 1, query=2 + number)
    turns = tuple(planted.turn(name, 4) for name in (TO, FROM))
    at = (made.positions[planted.WRITTEN],)
    return Odds(f"q{number}", "d", 0, tuple(made.ids), LAYER, at, False, turns)


def planted_direction() -> np.ndarray:
    direction = np.zeros(planted.WIDTH)
    direction[planted.COPIED + TO], direction[planted.COPIED + FROM] = 1.0, -1.0
    return direction / np.sqrt(2)


def found_along(direction: np.ndarray, seed: int, dose: float = 0.4) -> pd.DataFrame:
    """Estimates of a direction and of random ones, in the planted model."""
    model, rng = model_of(planted.model(True)), np.random.default_rng(seed)
    states = rng.standard_normal((60, planted.WIDTH))
    drawn = random_directions(states, direction, 19, seed)
    what = (direction, *drawn), [dose] * 20
    parts = [planted_context(n).under(*what).rows(model) for n in rng.permutation(24)[:10].tolist()]
    rows = pd.concat([one.assign(source=str(n), dataset="d") for n, one in enumerate(parts)])
    return estimates_of(estimates(rows, OPTIONS), Steering.columns, 0.95)


def test_a_planted_direction_is_found():
    found = found_along(planted_direction(), 0)
    assert is_shown(found)
    rows = found.set_index(["quantity", "term"])["value"]
    assert rows[BEYOND, DIRECTION] == pytest.approx(rows[ODDS, DIRECTION] - rows[ODDS, OTHER_MEAN])
    assert rows[RANK, DIRECTION] == 0 and rows[ODDS, DIRECTION] > 3
    noise = np.random.default_rng(5).standard_normal(planted.WIDTH)
    assert not is_shown(found_along(noise / np.linalg.norm(noise), 1))


def simulated(effect: float, seed: int) -> pd.DataFrame:
    """Estimates of directions whose log-odds differ by draws alike for all, and an effect of the
    first: 20 sources, whose spread is that of 20 nats of noise in a turn."""
    rng = np.random.default_rng(seed)
    sources, rows = rng.normal(0, 1, 20), []
    for draw, at in enumerate(rng.normal(0, 0.3, 40)):
        moved = sources + at + effect * (draw == 0) + rng.normal(0, 0.7, 20)
        names = {"draw": draw, "dataset": "d", "kl": 0.1}
        rows += [names | {"source": str(s), "log_odds": odds} for s, odds in enumerate(moved)]
    return estimates_of(estimates(pd.DataFrame(rows), OPTIONS), Steering.columns, 0.95)


@pytest.mark.slow
def test_planted_effects_are_found_in_95_percent_and_random_ones_called_in_5():
    """Over 100 simulated experiments each, and 20 in the planted model. By exchangeability random
    ones are called in 2 of 40: more than 10 of 100 would be 1 in 100 then."""
    found = np.mean([is_shown(simulated(1.6, seed)) for seed in range(100)])
    called = np.mean([is_shown(simulated(0.0, seed)) for seed in range(100, 200)])
    assert found >= 0.95 and called <= 10 / 100
    right = planted_direction()
    assert all(is_shown(found_along(right, seed)) for seed in range(20))
    called = 0
    for seed in range(20):
        noise = np.random.default_rng([seed, 1]).standard_normal(planted.WIDTH)
        noise -= (noise @ right) * right
        called += is_shown(found_along(noise / np.linalg.norm(noise), seed))
    assert called <= 1


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_model_dir, tmp_path_factory):
    """A judged run of two responses to each of six queries, and two probes."""
    place = tmp_path_factory.mktemp("steering")
    file = place / "several.jsonl"
    with file.open("w") as lines:
        for i in range(6):
            row = {"id": f"q{i}", "question": f"What is {i}?"}
            row["responses"] = [f"It is {i}. That is all.", f"Ask me about {i}."]
            lines.write(json.dumps(row) + "\n")
    out = place / "run"
    words = ["--model", tiny_model_dir, "--dataset", str(file), "--out", str(out)]
    assert sample([*words, "--samples", "3", "--temperatures", "1", "--max-new-tokens", "5"]) == 0

    def kind(key) -> str:
        """After every other query two of three turns are follow-ups, else one."""
        query, number = int(key[0][1]), key[2]
        return FOLLOW_UP if number == 0 or (number == 2 and query % 2) else "degenerate"

    run = judged(Run.open(out), kind)
    weights = np.random.default_rng(0).standard_normal(32)
    unit_vector = (weights / np.linalg.norm(weights)).astype(np.float32)
    along = {"logistic": Direction(unit_vector, 0.0, 1.0, 0.0)}
    for name, weights_hash in (("probe", run.model["weights_hash"]), ("other-probe", "00")):
        asked = {"target": "rate", "runs": [{"model": {"weights_hash": weights_hash, "name": "x"}}]}
        card = {"layer": 2, "position": "header_last", "penalty": 1.0, "asked": asked}
        Probe(along, card).save(place / name)
    return out


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(steering, "OTHERS", 19)


def test_the_command_holds_a_direction_against_random_ones_and_goes_on(folder, small, capfd):
    out = folder.parent / "steering"
    words = [str(folder), "--probe", str(folder.parent / "probe"), "--kl", "0.01"]
    words += ["--out", str(out), "--resamples", "100"]
    assert "units of" in call(main, [*words, "--dry-run"], capfd).out and not out.exists()
    outcome = call(main, words, capfd)
    assert outcome.status == 0, outcome.err
    assert "to make follow-ups likelier" in outcome.out or "makes follow-ups" in outcome.out
    assert "of 19 probes of permuted labels do as much" in outcome.out
    assert "random directions" not in outcome.out
    assert "(the least there can be: 0.050)" in outcome.out
    found = pd.read_parquet(out / "estimates.parquet")
    assert {DIRECTION, OTHER_MEAN} == set(found["term"])
    rows = pd.read_parquet(out / "rows.parquet")
    assert rows["source"].nunique() == 3 and found["sources"].max() == 3
    chosen = SteeringVector.load(out / "vector.safetensors")
    assert chosen.layer == 2 and chosen.kind == ADD
    assert set(rows.loc[rows["draw"] == 0, "dose"]) == {chosen.dose}
    assert (found.loc[found["quantity"] == KL, "low"].fillna(0) >= 0).all()
    kept = {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()}
    assert call(main, words, capfd).out == outcome.out
    assert {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()} == kept


def test_a_vector_that_steers_the_turn_too_gets_a_dose_of_its_own(folder, small, tmp_path, capfd):
    model = Run.open(folder).model
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))
    places = ("header_last", TURN)
    vector = SteeringVector(ADD, 2, places, direction, 9.0, "tiny", model["weights_hash"])
    vector.save(tmp_path / "v.safetensors")
    words = [str(folder), "--vector", str(tmp_path / "v.safetensors"), "--queries", "4"]
    words += ["--kl", "0.02", "--resamples", "100", "--full", "--out", str(tmp_path / "out")]
    outcome = call(main, words, capfd)
    assert outcome.status == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert "of 19 random directions do as much" in said
    assert "Fitted directions favour axes of low variance" in said
    chosen = SteeringVector.load(tmp_path / "out" / "vector.safetensors")
    assert (chosen.layer, chosen.positions) == (2, places) and chosen.dose != 9.0


def test_what_cant_be_used_is_refused_in_a_line(folder, small, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(steering, "ROUNDS", 1)

    def refused(*words: str) -> str:
        outcome = call(main, [str(folder), *words, "--out", str(tmp_path / "out")], capfd)
        assert outcome.status == 2
        return outcome.err.splitlines()[-1]

    probe, other = (str(folder.parent / name) for name in ("probe", "other-probe"))
    words = refused("--probe", probe, "--kl", "1000")
    assert "the direction does not reach a KL of 1000 nats" in words
    assert "is of x with the weights 00, this model has" in refused("--probe", other)
    own = Probe.load(probe)
    alike = own.card | {"asked": own.card["asked"] | {"target": "greedy"}}
    Probe(own.directions, alike).save(tmp_path / "alike")
    line = refused("--probe", str(tmp_path / "alike"))
    assert "all conversations here have the same rate, so that no probe can be fitted" in line
    model = "tiny", Run.open(folder).model["weights_hash"]
    SteeringVector(ADD, 2, (TURN,), torch.ones(32), 1.0, *model).save(tmp_path / "v.safetensors")
    line = refused("--vector", str(tmp_path / "v.safetensors"))
    assert "the direction does not reach a KL of 0.1 nats" in line
