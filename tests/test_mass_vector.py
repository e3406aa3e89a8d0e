"""``experiments.mass_vector``: gradients, masses under a vector, a planted gate, the command."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import planted_gate as planted
import pytest
import scored
import tiny
import torch
from conftest import Silent
from judging import judged_by_chance
from planted_reaction import OPENER
from runs import sampled
from shell import call, refusal

from experiments.experiment import Model
from experiments.mass_vector import (
    DOSE,
    GREEDY,
    GREEDY_ROLE,
    KL,
    LEARNED,
    OF_MASS,
    FirstTokens,
    Learning,
    MassVector,
    learn,
    main,
)
from experiments.steering import SteeredContext, dosing
from ia_mech import results
from ia_mech.errors import UserError
from ia_mech.estimates import frame_of
from ia_mech.run import Run
from ia_mech.settings import Settings
from ia_mech.steering import SteeringVector

TOKENS, LIKED = tuple(range(10, 30)), (12, 15, 28)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3"])
def test_a_vector_that_is_learned_from_first_tokens_moves_their_mass_at_its_kl(architecture):
    """More than a random one of this KL."""
    network = tiny.model(architecture)
    model = Model(SimpleNamespace(model=network), None)
    contexts = []
    for seed in range(6):
        ids = tuple(tiny.prompt(12 + seed, seed))
        where = ids, 2, (len(ids) - 1,), False, ((0,),)
        labels = tuple(float(token in LIKED) for token in TOKENS)
        names = {"context_id": "", "firsts": TOKENS, "p": (0.01,) * 20, "follow_up": labels}
        contexts.append(FirstTokens("q", "", 1, *where, **names, temperature=0.7))
    taught = tuple(replace(one, turns=((token,),)) for one in contexts for token in LIKED)
    unit = Learning("", "", 1, taught, 10, 0)
    with torch.inference_mode():  # as in a worker
        (along,) = unit.rows(model)["direction"]
    np.testing.assert_array_equal(along, learn(model, unit))
    assert np.linalg.norm(along) == pytest.approx(1, abs=1e-6)
    both = [along.tolist(), np.random.default_rng(0).standard_normal(32).tolist()]
    doses = dosing("", contexts, both, 0.1).rows(model)["dose"]
    found = pd.concat([one.under(both, doses).rows(model) for one in contexts])
    plain, moved, other = (found[found["draw"] == draw] for draw in (0, 1, 2))
    for less in (plain, other):
        assert (moved[OF_MASS].to_numpy() > less[OF_MASS].to_numpy()).all()
    assert (plain[KL] == 0).all() and moved[KL].mean() == pytest.approx(0.1, rel=0.11)
    logits = network(torch.tensor([contexts[0].ids])).logits[0, -1]
    p = (logits / 0.7).softmax(-1)
    assert plain[OF_MASS].iloc[0] == pytest.approx(float(p[list(LIKED)].sum()), rel=1e-4)


def test_recurrent_layers_without_a_gradient_are_refused_by_name():
    ids = tuple(tiny.prompt(12, 0))
    contexts = (SteeredContext("q", "", 0, ids, 2, (11,), False, ((5,),)),)
    model = Model(SimpleNamespace(model=tiny.model("qwen3_5")), None)
    with pytest.raises(UserError, match="passes of Qwen3_5ForCausalLM have no gradient"):
        learn(model, Learning("", "", 1, contexts, 1, 0))


# -- planted truths --------------------------------------------------------------------------------


def named(model: Model, layer: int, shift: int) -> float:
    """In what share of 16 queries greedy turns name their response, under vectors learned on the
    other half: from the names of these responses, or of a sibling that is ``shift`` away."""
    queries, shares = planted.queries(16, 0), []
    for half in (0, 1):
        mine = [q for number, q in enumerate(queries) if number // 2 % 2 == half]
        pairs = tuple(
            replace(one, ids=(*one.ids, OPENER), turns=(name.turns[0][1:],), layer=layer)
            for q in mine
            for one, name in zip(q, [*q[shift:], *q[:shift]], strict=True)
        )
        along = torch.from_numpy(learn(model, Learning("", "", 1, pairs, 3, 0)))
        for q in queries:
            if q not in mine:
                said = planted.said(model, q, layer, along, DOSE)
                shares.append(np.mean([name == k for k, name in enumerate(said)]))
    return float(np.mean(shares))


def test_the_layer_at_which_a_planted_gate_opens_is_found():
    """Block 3 reads the header: 11 of 16 queries can be opened before it, none after it."""
    model = planted.model(True)
    assert named(model, 2, 0) == pytest.approx(11 / 16)
    assert named(model, 4, 0) == 0
    assert named(model, 2, 1) <= 1 / 4  # the control says some name whatever the response


def test_nothing_is_found_where_nothing_is_behind_the_gate():
    assert named(planted.model(False), 2, 0) <= 1 / 4


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def run(siblings, tmp_path, monkeypatch) -> Run:
    """Of four queries, judged, with their mass."""
    found = judged_by_chance(siblings, tmp_path / "run", monkeypatch)
    measured(found)
    return found


@pytest.fixture
def runs(siblings, tiny_subject, tmp_path, monkeypatch) -> tuple[Run, Run]:
    """Two runs of a model, of four queries and of one, judged."""
    data = tmp_path / "more.jsonl"
    scored.dataset(data, scored.CONVERSATIONS[4:5])
    data.write_text(data.read_text().replace('"c0"', '"c4"'))
    settings = replace(Settings.read(siblings.settings), dataset=str(data))
    more = sampled(settings, tiny_subject, tmp_path / "sampled", Silent())
    each = zip(("run", "more"), (siblings, more), strict=True)
    return tuple(judged_by_chance(one, tmp_path / name, monkeypatch) for name, one in each)


def measured(run: Run, *others: Run) -> None:
    """What ``ia-mech mass`` of runs writes, with labels by chance."""
    rng = np.random.default_rng(0)
    contexts = pd.concat([one.contexts for one in (run, *others)], ignore_index=True)
    names = contexts[["context_id", "dataset"]].loc[np.repeat(range(len(contexts)), 20)]
    tokens = names.assign(token=list(TOKENS) * len(contexts), p=0.01)
    labels = rng.random((2, len(tokens))) < 0.5
    tokens = tokens.assign(**{"share": labels.all(0) * 1.0, "in role": labels[0] * 1.0})
    about = {"kind": "mass", "judge": "builtin", "command": "ia-mech mass run"}
    data = {"first_tokens": tokens}
    made = results.Result("mass", "", "", "", frame_of([], {}), about=about, data=data)
    results.write(made, run.path / "results" / "mass")


def test_the_command_tries_what_a_half_learned_on_the_other_half(runs, capfd):
    """Each conversation counts once, though the mass of the first run holds those of both."""
    run, other = runs
    words = [str(run.path), str(other.path), "--resamples", "100"]
    measured(run, other)
    lacking = refusal(call(main, words, capfd))
    assert "more/results/mass holds no result; make it with:" in lacking and " mass " in lacking
    measured(other)
    words += ["--steps", "2", "--layer", "2", "--kl", "0.01"]
    planned = call(main, [*words, "--dry-run"], capfd)
    assert planned.status == 0, planned.err
    assert "20 conversations, a greedy turn after each, under two vectors" in planned.out
    outcome = call(main, [*words, "--full"], capfd)
    assert outcome.status == 0, outcome.err
    assert "On queries that a vector wasn't learned from, the follow-up mass is" in outcome.out
    beside = run.path.with_name(f"{run.name}-mass-vector")
    sources = []
    for half in (1, 2):
        steered = Run.open(beside / f"layer_2_follow-ups_{half}" / "run")
        sources.append(set(steered.contexts["source_id"]))
        file = beside / f"layer_2_follow-ups_{half}" / "vector.safetensors"
        vector = SteeringVector.load(file)
        assert steered.record["identity"]["intervention"] == vector.sha256
        assert vector.positions == ("header_last",) and vector.layer == 2
    assert sources[0].isdisjoint(sources[1])
    folder = run.path / "results" / "mass-vector"
    rows = pd.read_parquet(folder / "rows.parquet")
    assert rows.groupby("term")["context_id"].apply(set).map(len).tolist() == [20] * 3
    assert len(rows) == 60 and rows[[OF_MASS, GREEDY]].notna().all(axis=None)
    found = pd.read_parquet(folder / "estimates.parquet")
    value = found.set_index(["quantity", "term"])["value"]
    for quantity in (OF_MASS, GREEDY):
        for less, base in MassVector.less.items():
            apart = value[quantity, LEARNED] - value[quantity, base["term"]]
            assert value[f"{quantity}, {less}", LEARNED] == pytest.approx(apart)
    assert (f"{OF_MASS}, minus permuted", "unsteered") not in value.index
    alone = found.set_index(["quantity", "term"]).loc[(f"{OF_MASS}, minus permuted", LEARNED)]
    assert alone["p_holm"] == alone["p"]  # one comparison
    said = " ".join(outcome.out.split())
    for quantity in (OF_MASS, GREEDY, GREEDY_ROLE):
        apart = value[f"{quantity}, minus permuted", LEARNED]
        assert f"(vector minus control {apart:+.2f} [" in said, quantity
    far = call(main, [*words, "--kl", "1000"], capfd)
    assert far.status == 2 and "error: no dose has a KL of 1000 after layer 2; " in far.err
