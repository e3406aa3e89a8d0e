"""``experiments.mass_vector``: masses under a vector, and the command that learns it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scored
import tiny
import torch
from conftest import Silent
from judging import judged_by_chance
from runs import sampled
from shell import call, refusal

from experiments.experiment import Model
from experiments.learned_vector import Learning, learn
from experiments.mass_vector import (
    GREEDY,
    KL,
    LEARNED,
    OF_MASS,
    OF_ROLE,
    REST,
    FirstTokens,
    MassVector,
    main,
)
from experiments.steering import dosing
from ia_mech import results
from ia_mech.estimates import frame_of
from ia_mech.run import Run
from ia_mech.settings import Settings
from ia_mech.steering import SteeringVector

TOKENS, LIKED = tuple(range(10, 30)), (12, 15, 28)


def test_a_vector_that_is_learned_from_first_tokens_moves_their_mass_at_its_kl():
    model = Model(SimpleNamespace(model=tiny.model("llama")), None)
    contexts = []
    for seed in range(6):
        ids = tuple(tiny.prompt(12 + seed, seed))
        where = ids, 2, (len(ids) - 1,), False, ((0,),)
        labels = tuple((float(token in LIKED), 1.0) for token in TOKENS)
        names = {"context_id": "", "firsts": TOKENS, "p": (0.01,) * 20, "labels": labels}
        contexts.append(FirstTokens("q", "", 1, *where, **names, temperature=0.7))
    taught = tuple(replace(one, turns=((token,),)) for one in contexts for token in LIKED)
    along = tuple(learn(model, Learning("", "", 1, taught, 10, 0)).tolist())
    (dose,) = dosing("", contexts, [along], 0.1).rows(model)["dose"]
    found = pd.concat([one.under([along], [dose]).rows(model) for one in contexts])
    plain, moved = (found[found["draw"] == draw] for draw in (0, 1))
    assert (moved[OF_MASS].to_numpy() > plain[OF_MASS].to_numpy()).all()
    assert (plain[KL] == 0).all() and moved[KL].mean() == pytest.approx(0.1, rel=0.11)
    np.testing.assert_allclose(found[OF_ROLE] + found[REST], 1)
    logits = tiny.model("llama")(torch.tensor([contexts[0].ids])).logits[0, -1]
    p = (logits / 0.7).softmax(-1)
    assert plain[OF_MASS].iloc[0] == pytest.approx(float(p[list(LIKED)].sum()), rel=1e-4)


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
    assert "20 conversations under each of 2 vectors" in planned.out
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
