"""Probes of the follow-up mass: read from what ``ia-mech mass`` has written, or refused."""

import re

import numpy as np
import pandas as pd
import pytest
from shell import call, refusal

from benchmarks.probe_validation.planted import Plan, Planted, plant, write
from experiments.mass import masses
from ia_mech import results
from ia_mech.errors import UserError
from ia_mech.estimates import frame_of
from ia_mech.run import Run
from probes import train
from probes.dataset import MEASURED, UNCOVERED, check_reliable, read
from probes.targets import MASS, MASS_IN_ROLE, MASSES

FEW = ["--permutations", "19", "--resamples", "100", "--threads", "1"]
PLAN = Plan("signal", contexts=80, per_source=2, layers=3, informative_layer=2, d_model=24)
TRIED = 0.9  # of the first tokens' probability


@pytest.fixture(scope="module")
def planted() -> Planted:
    return plant(PLAN)


@pytest.fixture
def run(planted, tmp_path, monkeypatch) -> Run:
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    planted.lens.save(planted.weights_hash)
    return write(planted, tmp_path / "run")


def at_header(planted: Planted) -> np.ndarray:
    """``[contexts]`` a linear function of the state where the signal is, between 0 and 1."""
    where = PLAN.positions.index(PLAN.informative_position)
    along = planted.residuals[PLAN.informative_layer, :, where] @ planted.direction
    return (along - along.min()) / np.ptp(along)


def measured(run: Run, share: np.ndarray, in_role: np.ndarray, judge: str = "planted") -> None:
    """What ``ia-mech mass`` writes, of a first token that is a follow-up, one that is in role and
    none, and one that is neither."""
    rows = []
    for context, own, role in zip(run.contexts["context_id"], share, in_role, strict=True):
        kinds = ((own, 1.0, 1.0), (role - own, 0.0, 1.0), (TRIED - role, 0.0, 0.0))
        for at, (p, is_one, inside) in enumerate(kinds):
            names = {"context_id": context, "dataset": "planted", "source": "", "greedy": at == 0}
            rows.append(names | {"p": p, "share": is_one, "in role": inside})
    tokens = pd.DataFrame(rows).assign(**{"after a wrong conversation": np.nan})
    about = {"kind": "mass", "judge": judge, "command": "ia-mech mass run"}
    data = {"contexts": masses(tokens)}
    made = results.Result("mass", "", "", "", frame_of([], {}), about=about, data=data)
    results.write(made, results.folder_of(run.path, MASS))


def test_the_mass_is_read_where_it_is_a_function_of_the_state(planted, run, capfd):
    mass = TRIED * at_header(planted)
    measured(run, mass, mass + (TRIED - mass) / 2)
    said = call(train.main, [str(run.path), "--target", MASS, "--full", *FEW], capfd)
    assert said.status == 0, said.err
    text = " ".join(said.out.split())
    assert "The follow-up mass can be read from the hidden states" in text
    assert "masses are those of: ia-mech mass run" in text
    result = results.read(run.path / "results" / "probe-mass-planted")
    cells = result.estimates[result.estimates["quantity"] == "auroc_cell"]
    best = cells.sort_values("value").iloc[-1]
    assert (best["position"], best["layer"]) == ("header_last", PLAN.informative_layer)
    assert {"text", "output"} <= set(result.estimates["control"].dropna())
    found = pd.read_parquet(run.path / "results" / "probe-mass-planted" / "predictions.parquet")
    np.testing.assert_allclose(found["positives"], mass, atol=1e-8)
    np.testing.assert_allclose(found["trials"], TRIED, atol=1e-8)
    assert np.corrcoef(found["probability"], mass)[0, 1] > 0.8
    siblings = read([run], target=MASS, within="source")
    check_reliable(siblings)
    assert siblings.outcome.compares_siblings


def test_the_mass_in_role_is_another_number(planted, run):
    mass = TRIED * at_header(planted)
    measured(run, mass / 2, mass)
    found = read([run], target=MASS_IN_ROLE)
    np.testing.assert_allclose(found.outcome.positives, mass, atol=1e-8)
    assert found.target.words == "the mass in role"


def test_contexts_without_a_mass_are_left_out(planted, run):
    mass = TRIED * at_header(planted)
    mass[3], once = np.nan, np.arange(len(mass)) % PLAN.per_source == 0
    mass[~once] = np.nan
    measured(run, mass, mass)
    found = read([run], target=MASS, within="source")
    assert len(found) == once.sum() - (1 if once[3] else 0)
    with pytest.raises(UserError, match="no query has several responses with the follow-up mass"):
        check_reliable(found)


@pytest.mark.parametrize("target", MASSES)
def test_a_mass_that_was_not_measured_is_refused(target, run, capfd):
    said = call(train.main, [str(run.path), "--target", target, *FEW], capfd)
    assert re.search(r"holds no result; make it with: .*mass ", refusal(said))


def test_a_mass_by_another_judge_is_refused(planted, run, capfd):
    mass = TRIED * at_header(planted)
    measured(run, mass, mass, judge="other")
    said = call(train.main, [str(run.path), "--target", MASS, *FEW], capfd)
    assert "is of the judge 'other', and not of 'planted'" in refusal(said)


def test_columns_are_those_that_the_experiment_writes():
    tokens = pd.DataFrame(
        {"context_id": ["a"], "dataset": ["d"], "source": ["s"], "greedy": [True], "p": [0.5]}
        | {"share": [1.0], "in role": [1.0], "after a wrong conversation": [0.0]}
    )
    assert {*MEASURED.values(), UNCOVERED} <= {*masses(tokens)}
