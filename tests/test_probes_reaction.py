"""Reaction bits as a target: read, checked for reliability, compared within queries."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from shell import call, refusal

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech.errors import UserError
from ia_mech.run import Run
from probes import train
from probes.card import Probe
from probes.dataset import read
from probes.reaction import check_reliable, read_bits, reliability

PLAN = Plan(
    "source-constant", contexts=160, per_source=4, samples=6, layers=2, informative_layer=1,
    d_model=16, temperatures=(0.7, 1.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def planted():
    return plant(PLAN)


@pytest.fixture(scope="module")
def original(planted, tmp_path_factory) -> Path:
    return write(planted, tmp_path_factory.mktemp("planted") / "run").path


@pytest.fixture
def run(original, planted, tmp_path, monkeypatch) -> Run:
    """Not judged; its model's lens is in a cache."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    planted.lens.save(planted.weights_hash)
    copy = Path(shutil.copytree(original, tmp_path / "run"))
    shutil.rmtree(copy / "judgements")
    return Run.open(copy)


def table_of(run: Run, strength: float) -> pd.DataFrame:
    """Turns whose bits from the second token on rise with a direction of layer 1; the first token
    has many bits, and queries differ by far more than their responses."""
    rng = np.random.default_rng(0)
    value = run.residuals(1, "header_last").numpy()[:, 0]
    of = dict(zip(run.contexts["context_id"], strength * value, strict=True))
    query = {source: 50 * rng.normal() for source in run.contexts["source_id"].unique()}
    turns = run.generations
    bits = turns["context_id"].map(of) + turns["source_id"].map(query) + rng.normal(size=len(turns))
    tokens = [None if t == 0 else [99.0 * rng.normal(), b, 1.0] for t, b in
              zip(turns["temperature"], bits, strict=True)]  # fmt: skip
    columns = ["dataset", "source_id", "context_id", "temperature", "sample", "text"]
    return turns[columns].assign(bits_by_token=tokens)


def written(table: pd.DataFrame, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    table.to_parquet(folder / "turns.parquet")
    return folder


def test_a_turn_s_bits_begin_with_its_second_token_and_are_held_against_its_query(run, tmp_path):
    table = table_of(run, 2.0)
    turns = read_bits([run], written(table, tmp_path / "found"))
    sampled = table[table["temperature"] > 0]
    assert len(turns) == len(sampled) == 160 * 12
    expected = {
        (row.context_id, row.temperature, row.sample): row.bits_by_token[1] + 1
        for row in sampled.itertuples()
    }
    for row in turns.itertuples():
        assert row.bits == pytest.approx(expected[row.context_id, row.temperature, row.sample])
    share = turns.groupby(["query", "temperature"])["positive"].mean()
    assert len(share) == 40 * 2 and (share == 0.5).all()


def test_reliability_is_that_of_the_contexts_means(run, tmp_path):
    strong = read_bits([run], written(table_of(run, 2.0), tmp_path / "strong"))
    found = reliability(strong)
    # By hand: the share of the variance of a context's mean that isn't noise of 12 turns.
    means = strong.groupby(["query", "context_id"])["bits"].mean()
    centred = means - means.groupby("query").transform("mean")
    within = centred.var() * 4 / 3
    assert found.value == pytest.approx(1 - (1 / 12) / within, abs=0.03)
    assert found.low < found.value < found.high and found.sources == 40
    assert "0.9" in check_reliable(strong)
    nothing = read_bits([run], written(table_of(run, 0.0), tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"is below 0.2: there is too little to predict; sample"):
        check_reliable(nothing)
    with pytest.raises(UserError, match="two samples per context"):
        check_reliable(strong[strong["sample"] == strong["sample"].min()])


def test_states_and_controls_are_compared_within_queries(run, tmp_path):
    folder = written(table_of(run, 2.0), tmp_path / "found")
    data = read([run], target="reaction@0.7", reaction=folder)
    assert data.judge == "" and data.labelled_by == "reaction bits"
    assert (data.contexts["trials"] == 6).all() and data.outcome.source_count == 40
    states = data.layer(1)
    sums = pd.DataFrame(states[:, 0]).groupby(data.contexts["source"]).sum()
    assert np.abs(sums.to_numpy()).max() < 1e-3
    raw = run.residuals(1, data.positions[0]).numpy()
    assert states[0, 0] - states[1, 0] == pytest.approx(raw[0] - raw[1], abs=1e-4)


def test_what_is_the_same_after_all_responses_of_a_query_is_nothing(run, tmp_path):
    """Not rounding, blown up to the size of a state."""
    data = read([run], target="reaction", reaction=written(table_of(run, 2.0), tmp_path / "found"))
    states = np.repeat(np.random.default_rng(0).normal(size=(40, 2, 5)), 4, axis=0)
    rounding = 1 + 1e-6 * np.random.default_rng(1).normal(size=states.shape)
    states[:, 1] *= 1 + np.random.default_rng(2).normal(size=(160, 1))
    found = data.comparable((states * rounding).astype(np.float32))
    assert not found[:, 0].any() and np.abs(found[:, 1]).mean() > 0.1


def test_the_command_finds_it_without_a_judge(run, tmp_path, capfd):
    folder = written(table_of(run, 1.0), tmp_path / "cache" / "run-reaction")
    words = [str(run.path), "--target", "reaction", "--layers", "1", "--positions", "header_last"]
    words += ["--permutations", "39", "--resamples", "100", "--threads", "1"]
    said = call(train.main, words, capfd)
    assert said.status == 0, said.err
    assert said.err.splitlines()[-1].endswith("results/probe-reaction")
    kept = run.path / "results" / "probe-reaction"
    found = pd.read_parquet(kept / "estimates.parquet").set_index("quantity")
    assert found.loc["p_headline", "value"] == 1 / 40 and found.loc["auroc", "low"] > 0.6
    fitted, states = Probe.load(kept), run.residuals(1, "header_last")
    with pytest.raises(UserError, match="give queries"):
        fitted.score(states)
    scores = fitted.score(states, queries=run.contexts["source_id"]).numpy()
    centred = states.numpy() - np.repeat(states.numpy().reshape(40, 4, -1).mean(1), 4, axis=0)
    assert np.corrcoef(scores, centred[:, 0])[0, 1] > 0.5
    text = " ".join(said.out.split())
    assert "reliability of the contexts' mean bits, less their query's: 0." in text
    assert "Labels: reaction bits." in text
    # Another run's table, a turn too few, no table.
    table = table_of(run, 1.0)
    for wrong in (table.assign(text="else"), table.assign(context_id="x")):
        written(wrong, folder)
        assert "is not of the turns of" in refusal(call(train.main, words, capfd))
    (folder / "turns.parquet").write_text("no table")
    assert "python -m experiments.reaction" in refusal(call(train.main, words, capfd))
    elsewhere = [*words, "--reaction", str(tmp_path / "nowhere")]
    assert "nowhere/turns.parquet is missing" in refusal(call(train.main, elsewhere, capfd))
