"""``experiments.mass_vector``: masses under a vector, and the command that learns it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from judging import judged_by_chance
from shell import call, refusal

from experiments.experiment import Model
from experiments.fit import Dosing, Learning, SteeredContext, learn
from experiments.mass_vector import (
    GREEDY,
    KL,
    LEARNED,
    LESS,
    OF_MASS,
    OF_ROLE,
    PERMUTED,
    REST,
    Moved,
    main,
)
from ia_mech import results
from ia_mech.estimates import frame_of
from ia_mech.run import Run
from ia_mech.steering import SteeringVector

TOKENS, LIKED = tuple(range(10, 30)), (12, 15, 28)


def test_a_vector_that_is_learned_from_first_tokens_moves_their_mass_at_its_kl():
    model = Model(SimpleNamespace(model=tiny.model("llama")), None)
    contexts = []
    for seed in range(6):
        ids = tuple(tiny.prompt(12 + seed, seed))
        contexts.append(SteeredContext("q", ids, 2, (len(ids) - 1,), False, ((0,),)))
    taught = tuple(replace(one, turns=((token,),)) for one in contexts for token in LIKED)
    along = tuple(learn(model, Learning("", "", 1, 0, "", taught, 0.5, 10, 0)).tolist())
    (dose,) = Dosing("", "", 1, tuple(contexts), (along,), 0.1).rows(model)["dose"]
    labels = tuple((float(token in LIKED), 1.0) for token in TOKENS)
    what = (along,), (dose,), TOKENS, labels, 0.7
    found = pd.concat([Moved("", "", 1, one, *what).rows(model) for one in contexts])
    plain, moved = (found[found["draw"] == draw] for draw in (0, 1))
    assert (moved[OF_MASS].to_numpy() > plain[OF_MASS].to_numpy()).all()
    assert (plain[KL] == 0).all() and moved[KL].mean() == pytest.approx(0.1, rel=0.11)
    np.testing.assert_allclose(found[OF_ROLE] + found[REST], 1)
    logits = tiny.model("llama")(torch.tensor([contexts[0].ids])).logits[0, -1]
    p = (logits / 0.7).softmax(-1)
    assert plain[OF_MASS].iloc[0] == pytest.approx(float(p[list(LIKED)].sum()), rel=1e-4)


@pytest.fixture
def run(siblings, tmp_path, monkeypatch) -> Run:
    return judged_by_chance(siblings, tmp_path / "run", monkeypatch)


def measured(run: Run) -> None:
    """What ``ia-mech mass`` writes, with labels by chance."""
    rng = np.random.default_rng(0)
    names = run.contexts[["context_id", "dataset"]].loc[np.repeat(range(len(run.contexts)), 20)]
    tokens = names.assign(token=list(TOKENS) * len(run.contexts), p=0.01)
    labels = rng.random((2, len(tokens))) < 0.5
    tokens = tokens.assign(**{"share": labels.all(0) * 1.0, "in role": labels[0] * 1.0})
    about = {"kind": "mass", "judge": "builtin", "command": "ia-mech mass run"}
    data = {"first_tokens": tokens}
    made = results.Result("mass", "", "", "", frame_of([], {}), about=about, data=data)
    results.write(made, run.path / "results" / "mass")


def test_the_command_tries_what_a_half_learned_on_the_other_half(run, tmp_path, capfd):
    words = [str(run.path), "--resamples", "100"]
    lacking = refusal(call(main, words, capfd))
    assert "holds no result; make it with:" in lacking and " mass " in lacking
    measured(run)
    words += ["--steps", "2", "--layer", "2", "--kl", "0.01"]
    planned = call(main, [*words, "--dry-run"], capfd)
    assert planned.status == 0, planned.err
    assert "conversations under each of two vectors" in planned.out
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
    assert rows.groupby("term")["context_id"].apply(set).map(len).tolist() == [16] * 3
    found = pd.read_parquet(folder / "estimates.parquet")
    value = found.set_index(["quantity", "term"])["value"]
    for quantity in (OF_MASS, GREEDY):
        apart = value[quantity, LEARNED] - value[quantity, PERMUTED]
        assert value[f"{quantity}, {LESS[PERMUTED]}", LEARNED] == pytest.approx(apart)
