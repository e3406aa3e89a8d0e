"""``experiments.steering``: likelihoods under arms, gradients, planted directions, the command."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import planted_reaction as planted
import pytest
import tiny
import torch
from shell import call, refusal
from test_temperature_sweep import judged

from experiments import directions, steering
from experiments.directions import (
    BIAS,
    DIRECTION,
    OPTIMISED,
    RANDOM,
    Change,
    ControlSearch,
    Learning,
    ScoredQuery,
    SteeredContext,
    arms_of_equal_kl,
    find_controls,
    learn,
    random_directions,
    steering_effects,
)
from experiments.experiment import Model
from experiments.steering import (
    BEYOND,
    CHOOSING,
    KL,
    ODDS,
    RANDOM_MEAN,
    RANK,
    REPORTING,
    Steering,
    chosen_dose,
    estimates,
    is_shown,
    main,
)
from experiments.tables import estimates_of
from ia_mech.collect.command import main as sample
from ia_mech.engine.blocks import find_blocks
from ia_mech.engine.intervene import Add
from ia_mech.engine.score import Turn, differentiable_logits, score
from ia_mech.engine.state import Prefix, prefill
from ia_mech.errors import UserError
from ia_mech.judge.rubric import GENUINE
from ia_mech.run import Run
from ia_mech.steering import ADD, TURN, SteeringVector
from probes.card import Direction, Probe

LAYER = 3  # between the block that writes and the one that reads
FROM, TO = 0, 2  # names
OPTIONS = {"level": 0.95, "resamples": 100, "seed": 0}


def model_of(network) -> Model:
    return Model(SimpleNamespace(model=network), None)


def unit(contexts, arms) -> ScoredQuery:
    return ScoredQuery("q", "d", 0, REPORTING, tuple(contexts), tuple(arms))


# -- likelihoods and gradients against independent computations --------------------------------


@torch.inference_mode()
def test_changes_equal_full_passes_with_plain_hooks(tiny_subject):
    network = tiny_subject.model
    ids, turns = tuple(range(20, 41)), ((50, 60, 70, 80), (55, 65))
    direction = torch.randn(32, generator=torch.Generator().manual_seed(0))
    unit_vector, bias = direction / direction.norm(), np.zeros(network.config.vocab_size)
    bias[50] = 1.0
    for at, in_turn in (((20,), False), ((17,), True)):
        context = SteeredContext("q", ids, 2, at, in_turn, turns)
        arms = [
            Change(DIRECTION, 0.7, tuple(direction.tolist())),
            Change(BIAS, 2.0, (), tuple(bias)),
        ]
        found = steering_effects(Model(tiny_subject, None), unit([context], arms))
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
        row = found.iloc[0]
        assert row["log_odds"] == pytest.approx(moved[0] - moved[1], abs=2e-4)
        kl = float((firsts["moved"].exp() * (firsts["moved"] - firsts["plain"])).sum())
        assert row["kl"] == pytest.approx(kl, abs=1e-5) and kl > 5e-4
        # The bias of token 50 alone, which opens the accepted turn.
        p = float(firsts["plain"][50].exp())
        total = np.log(1 - p + p * np.exp(2.0))
        row = found.iloc[1]
        assert row["log_odds"] == pytest.approx(2.0, abs=1e-4)
        q = p * np.exp(2 - total)
        assert row["kl"] == pytest.approx(2 * q - total, abs=1e-5)


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


def test_controls_reach_the_kl_that_is_wanted(monkeypatch):
    """In a model without gradients: no direction is optimised."""

    def refuse(*_):
        raise UserError("no gradient", "")

    monkeypatch.setattr(directions, "learn", refuse)
    model, told = model_of(planted.model(True)), torch.zeros(planted.WIDTH)
    told[planted.READ_OUT + TO] = 1.0
    made = [planted_context(n) for n in range(4)]
    contexts = tuple(replace(one, layer=5, at=(len(one.ids) - 1,)) for one in made)
    arm = Change(DIRECTION, 0.02, tuple(told.tolist()))
    for kl in (1e-4, 1e-3, 1e-2):
        search = ControlSearch("", "", 0, contexts, arm, kl, (replace(arm, term=RANDOM),), 0)
        *found, none = [Change(**row) for row in find_controls(model, search).to_dict("records")]
        assert none == Change(OPTIMISED, 0.0)
        assert [one.term for one in found] == [RANDOM, BIAS]
        reached = steering_effects(model, unit(contexts, found)).groupby("term")["kl"].mean()
        np.testing.assert_allclose(reached, kl, rtol=0.1)
    assert arms_of_equal_kl([Change("idle", 1e-9)], 1e-2, lambda arms: np.zeros(len(arms))) == []


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.5, 4.0, 5.0])
@pytest.mark.parametrize("start", [0.01, 0.3, 1.0, 4.0, 20.0])
def test_a_dose_is_found_whatever_power_of_it_a_kl_grows_with(power, start):
    def kl_of(arms) -> np.ndarray:
        return np.array([0.02 * one.dose**power for one in arms])

    (found,) = arms_of_equal_kl([Change("one", start)], 0.05, kl_of)
    assert abs(kl_of([found])[0] - 0.05) <= 0.1 * 0.05


def test_the_dose_is_chosen_within_the_kl():
    rows = pd.DataFrame(
        [
            {"source": source, "dose": dose, "log_odds": odds, "kl": kl}
            for source in "ab"
            for dose, odds, kl in ((0.1, 1, 0.1), (0.2, 3, 0.4), (0.4, 8, 2.0))
        ]
    )
    chosen = {kl: chosen_dose(rows, kl) for kl in (0.01, 0.2, 0.5, 5.0)}
    assert chosen == {0.01: 0.1, 0.2: 0.1, 0.5: 0.2, 5.0: 0.4}


# -- planted truths --------------------------------------------------------------------------------


def planted_context(number: int) -> SteeredContext:
    """The context's own turn isn't accepted; that of another name is."""
    made = planted.context(FROM, 4 + number % 4, 1, query=2 + number)
    turns = tuple(planted.turn(name, 4) for name in (TO, FROM))
    at = (made.positions[planted.WRITTEN],)
    return SteeredContext(f"q{number}", tuple(made.ids), LAYER, at, False, turns)


def planted_direction() -> np.ndarray:
    direction = np.zeros(planted.WIDTH)
    direction[planted.COPIED + TO], direction[planted.COPIED + FROM] = 1.0, -1.0
    return direction / np.sqrt(2)


def found_along(direction: np.ndarray, best: np.ndarray, seed: int, dose: float = 0.4):
    """Estimates of a direction, of an optimised one, and of random ones, in the planted model."""
    model, rng = model_of(planted.model(True)), np.random.default_rng(seed)
    states = rng.standard_normal((60, planted.WIDTH))
    drawn = random_directions(states, direction, 19, seed)
    arms = [Change(DIRECTION, dose, tuple(direction)), Change(OPTIMISED, dose, tuple(best))]
    arms += [Change(RANDOM, dose, tuple(one), draw=n) for n, one in enumerate(drawn)]
    numbers = rng.permutation(24)[:10]
    parts = [
        steering_effects(model, unit([planted_context(n)], arms)).assign(source=str(n), dataset="d")
        for n in numbers.tolist()
    ]
    return estimates_of(
        estimates(pd.concat(parts, ignore_index=True), dose, OPTIONS), Steering.columns, 0.95
    )


def test_a_planted_direction_is_found_and_optimising_finds_it():
    contexts = tuple(planted_context(n) for n in range(6))
    one = Learning("", "", 0, 0, "", contexts, dose=0.4, steps=15, seed=0)
    model = model_of(planted.model(True))
    with torch.inference_mode():  # as in a worker
        best = learn(model, one)
    assert abs(np.linalg.norm(best) - 1) < 1e-5 and best @ planted_direction() > 0.5
    found = found_along(planted_direction(), best, 0)
    assert is_shown(found, DIRECTION) and is_shown(found, OPTIMISED)
    rows = found.set_index(["quantity", "term"])["value"]
    assert rows[BEYOND, DIRECTION] == pytest.approx(rows[ODDS, DIRECTION] - rows[ODDS, RANDOM_MEAN])
    assert rows[RANK, DIRECTION] == 0 and rows[ODDS, DIRECTION] > 3
    noise = np.random.default_rng(5).standard_normal(planted.WIDTH)
    assert not is_shown(found_along(noise / np.linalg.norm(noise), best, 1), DIRECTION)


def simulated(effect: float, seed: int) -> pd.DataFrame:
    """Estimates of arms whose log-odds differ by draws alike for all, and an effect of the first:
    20 sources, whose spread is that of 20 nats of noise in a turn."""
    rng = np.random.default_rng(seed)
    sources, spread = rng.normal(0, 1, 20), rng.normal(0, 0.3, 40)
    arms = [(DIRECTION, 0, spread[0])] + [(RANDOM, n, at) for n, at in enumerate(spread[1:])]
    rows = []
    for term, draw, at in arms:
        moved = sources + at + effect * (term == DIRECTION) + rng.normal(0, 0.7, 20)
        names = {"term": term, "draw": draw, "dose": 1.0, "dataset": "d", "kl": 0.1}
        rows += [names | {"source": str(s), "log_odds": odds} for s, odds in enumerate(moved)]
    return estimates_of(estimates(pd.DataFrame(rows), 1.0, OPTIONS), Steering.columns, 0.95)


@pytest.mark.slow
def test_planted_effects_are_found_in_95_percent_and_random_ones_called_in_5():
    """Over 100 simulated experiments each, and 20 in the planted model. By exchangeability random
    ones are called in 2 of 40: more than 10 of 100 would be 1 in 100 then."""
    found = np.mean([is_shown(simulated(1.6, seed), DIRECTION) for seed in range(100)])
    called = np.mean([is_shown(simulated(0.0, seed), DIRECTION) for seed in range(100, 200)])
    assert found >= 0.95 and called <= 10 / 100
    right = planted_direction()
    assert all(is_shown(found_along(right, right, seed), DIRECTION) for seed in range(20))
    called = 0
    for seed in range(20):
        noise = np.random.default_rng([seed, 1]).standard_normal(planted.WIDTH)
        noise -= (noise @ right) * right
        found = found_along(noise / np.linalg.norm(noise), right, seed)
        called += is_shown(found, DIRECTION)
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
    assert sample([*words, "--samples", "2", "--temperatures", "1", "--max-new-tokens", "5"]) == 0
    run = judged(Run.open(out), (GENUINE, "degenerate"))
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
    monkeypatch.setattr(directions, "STEPS", 2)
    monkeypatch.setattr(steering, "CONTROLS", 19)


def words_of(folder, out) -> list[str]:
    words = [str(folder), "--probe", str(folder.parent / "probe"), "--doses", "0.2", "0.4"]
    return [*words, "--out", str(out), "--resamples", "100"]


def test_the_command_holds_a_direction_against_its_controls_and_goes_on(folder, small, capfd):
    out = folder.parent / "steering"
    words = words_of(folder, out)
    assert "units of" in call(main, [*words, "--dry-run"], capfd).out and not out.exists()
    outcome = call(main, words, capfd)
    assert outcome.status == 0, outcome.err
    sentence, control = outcome.out.replace("Control: ", "").splitlines()[:2]
    assert "to make genuine turns likelier" in sentence or "makes genuine" in sentence
    assert "random directions reach it" in sentence and "the least there can be: 0.050" in sentence
    assert control.startswith("A direction that was optimised for that there, on other sources")
    found = pd.read_parquet(out / "estimates.parquet")
    assert {DIRECTION, RANDOM, RANDOM_MEAN, OPTIMISED, BIAS} == set(found["term"])
    arms = pd.read_parquet(out / "arms.parquet")
    sources = {half: set(mine["source"]) for half, mine in arms.groupby("half")}
    assert sources[CHOOSING].isdisjoint(sources[REPORTING]) and found["sources"].max() == 3
    assert (arms[arms["half"] == CHOOSING]["term"] == DIRECTION).all(), "controls don't choose"
    chosen = SteeringVector.load(out / "vector.safetensors")
    assert chosen.layer == 2 and chosen.kind == ADD
    kl = found[(found["quantity"] == KL) & (found["dose"] == chosen.dose)]
    assert (kl["low"].fillna(0) >= 0).all()
    kept = {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()}
    assert call(main, words, capfd).out == outcome.out
    assert {file: file.stat().st_mtime_ns for file in (out / "parts").iterdir()} == kept


def test_a_vector_that_steers_the_turn_too(folder, small, tmp_path, capfd):
    """Its dose is chosen anew."""
    model = Run.open(folder).model
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))
    places = ("header_last", TURN)
    vector = SteeringVector(ADD, 2, places, direction, 9.0, "tiny", model["weights_hash"])
    vector.save(tmp_path / "v.safetensors")
    words = [str(folder), "--vector", str(tmp_path / "v.safetensors"), "--queries", "4"]
    words += ["--doses", "0.1", "9", "--most-kl", "0.05"]
    outcome = call(main, [*words, "--resamples", "100", "--out", str(tmp_path / "out")], capfd)
    assert outcome.status == 0, outcome.err
    chosen = SteeringVector.load(tmp_path / "out" / "vector.safetensors")
    assert (chosen.layer, chosen.positions) == (2, places) and chosen.dose == 0.1


def test_what_cant_be_used_is_refused_in_a_line(folder, tmp_path, capfd):
    def refused(*words: str) -> str:
        return refusal(call(main, [str(folder), *words], capfd))

    probe = str(folder.parent / "probe")
    assert "'-1' is not a number above 0" in refused("--probe", probe, "--doses", "-1")
    other = str(folder.parent / "other-probe")
    assert "is of x with the weights 00, this model has" in refused("--probe", other)
    Probe(Probe.load(probe).directions, {"layer": 2}).save(tmp_path / "by-hand")
    line = refused("--probe", str(tmp_path / "by-hand"))
    assert "doesn't say which direction of which model" in line
    known = Run.open(folder).model["weights_hash"]
    vector = SteeringVector(ADD, 2, ("header_last",), torch.ones(32), 1.0, "tiny", known)
    for changes, said in (
        ({"layer": 5}, "there is no layer 5 to change; give layers from 0 to 4"),
        ({"positions": ("header_9",)}, "no position header_9 to steer at; use names among"),
        ({"positions": (TURN,)}, "steering the turn's tokens alone leaves the next token"),
        ({"weights_hash": "0" * 16}, "of tiny with the weights 0000000000000000, this model has"),
    ):
        replace(vector, **changes).save(tmp_path / "v.safetensors")
        assert said in refused("--vector", str(tmp_path / "v.safetensors"))
