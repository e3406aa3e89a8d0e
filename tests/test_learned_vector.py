"""``experiments.learned_vector``: gradients, the choice of a layer, a planted gate, the command."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import planted_gate as planted
import pytest
import tiny
import torch
from judging import judged_by_chance
from shell import call, refusal

from experiments.control import best_elsewhere
from experiments.experiment import Model
from experiments.learned_vector import (
    CHOSEN,
    DOSE,
    LEARNED,
    OWN,
    RANDOM,
    SIBLING,
    UNIT,
    UNSTEERED,
    LearnedVector,
    Learning,
    learn,
    main,
)
from experiments.outcome import EXCESS, RATE, SIBLINGS
from experiments.steering import SteeredContext
from ia_mech.engine.intervene import Add
from ia_mech.engine.score import Turn
from ia_mech.errors import UserError
from ia_mech.estimates import frame_of
from ia_mech.rates.load import NO_ANNOTATOR, read_runs
from ia_mech.run import Run
from ia_mech.stats import cluster_bootstrap
from ia_mech.steering import SteeringVector

OPENED = f"{EXCESS}, minus the siblings' vector"

# -- learning --------------------------------------------------------------------------------------


def learning(contexts, steps: int = 10) -> Learning:
    return Learning("half 1", "", 1, tuple(contexts), steps, 0)


@pytest.mark.parametrize(
    ("architecture", "in_turn"),
    [
        *(("llama", False), ("llama", True), ("gpt_oss", True), ("gemma3", False)),
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),
        pytest.param("gemma3", True, marks=pytest.mark.slow),
    ],
)
def test_what_is_learned_makes_the_turns_likely_where_it_is_added(architecture, in_turn):
    """By plain scores of whole contexts, as a run under the vector would have them."""
    network = tiny.model(architecture)
    contexts = []
    for seed in range(5):
        ids = tuple(tiny.prompt(12 + seed, seed))
        at, turn = (len(ids) - 2, len(ids) - 1), tuple(tiny.prompt(3 + seed, 50 + seed))
        contexts.append(SteeredContext("q", "", 0, ids, 2, at, in_turn, (turn,)))
    model = Model(SimpleNamespace(model=network), None)
    with torch.inference_mode():  # as in a worker
        (direction,) = learning(contexts).rows(model)["direction"]
    np.testing.assert_array_equal(direction, learn(model, learning(contexts)))
    assert abs(np.linalg.norm(direction) - 1) < 1e-6

    def log_likelihood(along) -> float:
        turns = []
        for number, one in enumerate(contexts):
            ids = one.turns[0]
            after = range(len(one.ids), len(one.ids) + len(ids) - 1) if in_turn else ()
            at = tuple(place - 1 for place in (*one.at, *after))  # all but one token is scored
            moved = () if along is None else (Add(2, at, torch.from_numpy(along), DOSE),)
            turns.append(Turn(number, (*one.ids[1:], *ids), interventions=moved))
        found = model.score([one.ids[:1] for one in contexts], turns)
        lengths = [len(one.turns[0]) for one in contexts]
        return sum(
            float(score.logprobs_raw[-length:].sum())
            for score, length in zip(found, lengths, strict=True)
        )

    other = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    assert log_likelihood(direction) > max(log_likelihood(None), log_likelihood(other)) + 5


def test_recurrent_layers_without_a_gradient_are_refused_by_name():
    ids = tuple(tiny.prompt(12, 0))
    contexts = [SteeredContext("q", "", 0, ids, 2, (11,), False, ((5, 6, 7),))]
    model = Model(SimpleNamespace(model=tiny.model("qwen3_5")), None)
    with pytest.raises(UserError, match="passes of Qwen3_5ForCausalLM have no gradient"):
        learn(model, learning(contexts))


# -- the choice of a layer -------------------------------------------------------------------------


def by_loops(ranked, reported, part, counts) -> float:
    total = 0.0
    drawn = [q for q in range(len(part)) for _ in range(int(counts[q]))]
    for one, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        choosing = [q for q in drawn if part[q] == other]
        best = max(range(len(ranked)), key=lambda layer: sum(ranked[layer][q] for q in choosing))
        total += sum(reported[best][q] for q in drawn if part[q] == one)
    return total / len(drawn)


def test_a_layer_is_chosen_on_queries_of_the_same_vectors_and_reported_on_others():
    rng = np.random.default_rng(0)
    ranked, reported, part = rng.normal(size=(3, 16)), rng.normal(size=(3, 16)), np.arange(16) % 4
    counts = 1.0 + rng.multinomial(16, np.full(16, 1 / 16), size=50)
    wanted = [by_loops(ranked, reported, part, one) for one in counts]
    np.testing.assert_allclose(best_elsewhere(ranked, reported, part, counts), wanted, atol=1e-12)
    assert np.isnan(best_elsewhere(ranked, reported, part, 1.0 * (part == 0)[None]))


@pytest.mark.slow
def test_layers_that_do_nothing_are_called_in_5_percent_though_the_best_is_chosen():
    """Of 400 studies of 60 queries with seven layers: within three standard errors of the level."""
    rng, called = np.random.default_rng(1), 0
    part = np.arange(60) % 4
    for seed in range(400):
        values = rng.normal(size=(7, 60)) + rng.normal(size=60)
        options = {"level": 0.95, "resamples": 400, "seed": seed}

        def statistic(counts: np.ndarray, values=values) -> np.ndarray:
            return best_elsewhere(values, values, part, counts)

        (found,) = cluster_bootstrap(statistic, range(60), **options)
        called += not found.low <= 0 <= found.high
    assert called / 400 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


# -- planted truths --------------------------------------------------------------------------------


def rates_under(model: Model, queries, layer: int, direction) -> list[dict]:
    """Of each query how often greedy turns say the name of their response, and of siblings'."""
    rows = []
    for contexts in queries:
        along = None if direction is None else torch.from_numpy(direction)
        said = planted.said(model, contexts, layer, along, DOSE)
        own = np.mean([name == k for k, name in enumerate(said)])
        other = np.mean([name in range(4) and name != k for k, name in enumerate(said)]) / 3
        values = {RATE: own, SIBLINGS: other, EXCESS: own - other}
        rows.append({"source": contexts[0].source, "layer": layer} | values)
    return rows


def estimates_of(
    model: Model, layers: tuple[int, ...], count: int
) -> tuple[pd.DataFrame, list[str]]:
    """What the experiment finds in a planted model of so many queries, its notes."""
    queries, rows = planted.queries(count, 0), []
    args = SimpleNamespace(level=0.95, resamples=200, seed=0)
    one = LearnedVector([], args, Path())
    one.part = {contexts[0].source: n % 4 for n, contexts in enumerate(queries)}
    for half in (0, 1):
        mine = [q for q in queries if one.part[q[0].source] // 2 == half]
        others = [q for q in queries if one.part[q[0].source] // 2 != half]
        rows += [row | {"term": UNSTEERED} for row in rates_under(model, others, UNIT, None)]
        for layer in layers:
            for term, shift in ((OWN, 0), (SIBLING, 1)):
                pairs = [
                    replace(q[(k + shift) % 4], turns=q[k].turns, layer=layer)
                    for q in mine
                    for k in range(4)
                ]
                found = rates_under(model, others, layer, learn(model, learning(pairs, steps=3)))
                rows += [row | {"term": term} for row in found]
    each = one.estimate(pd.DataFrame(rows).assign(dataset="d"))
    found = frame_of(each, LearnedVector.columns)
    return found.set_index(["quantity", "term", "layer"]).sort_index(), one.notes


def test_the_layer_at_which_a_planted_gate_opens_is_found():
    """Block 3 reads the header: 11 of 16 queries can be opened before it, none after it."""
    found, notes = estimates_of(planted.model(True), (2, 4), 16)
    value = found["value"]
    assert value[EXCESS, UNSTEERED].item() == 0
    assert value[EXCESS, OWN, 2] == pytest.approx(11 / 16)
    assert value[EXCESS, SIBLING, 2] == value[EXCESS, OWN, 4] == 0
    opened = found.loc[(OPENED, CHOSEN)].iloc[0]
    assert opened["value"] == pytest.approx(11 / 16) and opened["low"] > 0
    assert found["p_holm"][OPENED, OWN, 2] < 0.05 and found["p_holm"][OPENED, OWN, 4] == 1
    assert notes[-1].startswith("chosen layers: 2 on part 1, 2 on part 2, 2 on part")


def test_nothing_is_found_where_nothing_is_behind_the_gate():
    found, _ = estimates_of(planted.model(False), (2,), 8)
    assert found.loc[(OPENED, CHOSEN)].iloc[0]["value"] == 0
    assert (found.loc[OPENED, "p_holm"].dropna() == 1).all()


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def run(siblings, tmp_path, monkeypatch) -> Run:
    return judged_by_chance(siblings, tmp_path / "run", monkeypatch)


def test_the_command_holds_what_a_half_learned_against_the_other_half(run, tmp_path, capfd):
    out = tmp_path / "out"
    words = [str(run.path), "--out", str(out), "--resamples", "100", "--steps", "2"]
    words += ["--layers", "2"]
    planned = call(main, [*words, "--dry-run"], capfd)
    assert planned.status == 0 and "6 units of" in planned.out and not out.exists()
    assert "16 conversations under each of 4 vectors, a greedy turn after each" in planned.out
    outcome = call(main, [*words, "--full"], capfd)
    assert outcome.status == 0, outcome.err
    _, sentence, control = outcome.out.splitlines()[:3]  # the first: too few queries
    assert (
        "header_last" in sentence
        and "minus that under the control's vector" in sentence
        and "these very vectors, learned once on other queries" in sentence
    )
    assert "vectors learned anew may do otherwise" in outcome.out
    assert "from the same turns, each after another response to its query" in control

    sources = []
    for half in ("1", "2"):
        steered = Run.open(out / f"layer_2_own_{half}" / "run")
        sources.append(set(steered.contexts["source_id"]))
        for column in ("response_unfinished", "response_finish_reason"):  # or decoys would differ
            whole = run.contexts.set_index("context_id")[column]
            mine = steered.contexts.set_index("context_id")[column]
            assert mine.equals(whole[mine.index])
        vectors = {
            term: SteeringVector.load(out / f"layer_2_{term}_{half}" / "vector.safetensors")
            for term in (OWN, SIBLING, "other_queries", RANDOM)
        }
        assert steered.record["identity"]["intervention"] == vectors[OWN].sha256
        assert vectors[OWN].positions == ("header_0", "header_1", "header_last")
        assert {one.dose for one in vectors.values()} == {DOSE}
        along = vectors[OWN].direction @ vectors[RANDOM].direction
        assert abs(float(along)) < 1e-5  # 32 products of float32, each below 1
    assert sources[0].isdisjoint(sources[1]) and len(sources[0]) == len(sources[1]) == 2

    found = pd.read_parquet(out / "estimates.parquet")
    assert not found[found["term"] == CHOSEN].empty
    value = found.set_index(["quantity", "term", "layer"])["value"]
    value = value.sort_index()
    apart = value[EXCESS, OWN, 2] - value[EXCESS, SIBLING, 2]
    assert value[OPENED, OWN, 2] == pytest.approx(apart)


def test_turns_are_paired_with_their_own_response_a_sibling_and_another_query(run, tmp_path):
    args = LearnedVector.build_parser().parse_args([str(run.path)])
    one = LearnedVector([run], args, tmp_path / "out")
    one.check()
    place = {
        query.token_ids[k]: (query, k) for query in one.queries for k in range(len(query.contexts))
    }
    turns = read_runs([run], "builtin", NO_ANNOTATOR).turns
    accepted = turns[(turns["follow_up"] == 1) & (turns["temperature"] > 0)]
    sampled = run.generations.set_index(["context_id", "temperature"])["token_ids"]
    learned = 0
    for half in (0, 1):
        each = (one.taught[half, one.layers[0], term] for term in LEARNED)
        for own, sibling, other in zip(*each, strict=True):
            assert own.turns == sibling.turns == other.turns
            (mine, k), (same, j), (foreign, _) = (place[x.ids] for x in (own, sibling, other))
            assert mine is same and mine is not foreign
            assert mine.responses[k] != same.responses[j]
            assert mine.complete[k] == same.complete[j]
            assert one.part[mine.source] // 2 == one.part[foreign.source] // 2 == half
            context = mine.contexts["context_id"][k]
            assert context in set(accepted["context_id"])
            assert tuple(sampled[context, 1.0].tolist()) == own.turns[0]
            learned += 1
    assert 0 < learned <= len(accepted)


def test_what_cant_be_done_is_refused_in_a_line(run, tmp_path, capfd):
    def refused(*words: str) -> str:
        return refusal(call(main, [str(run.path), "--out", str(tmp_path / "out"), *words], capfd))

    assert "3 queries have several responses" in refused("--queries", "3")
    assert not (tmp_path / "out").exists()
