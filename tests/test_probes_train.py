"""``ia-mech probes`` on planted runs: what it says, what it keeps, what it refuses."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from runs import rehashed
from safetensors import safe_open
from safetensors.torch import save_file
from shell import call, files, refusal

from benchmarks.probe_validation.planted import Plan, Planted, plant, write
from ia_mech.collect.command import main as sample
from ia_mech.models.load import recall
from ia_mech.results import read, sentences_of
from ia_mech.run import Run
from probes import train
from probes.card import Probe

FEW = ["--permutations", "19", "--resamples", "100", "--threads", "1"]
KEPT = ("query_end", "response_end", "header_last")
SOURCES = 60
PLAN = Plan("signal", contexts=SOURCES, layers=3, informative_layer=2, d_model=24, positions=KEPT)
FILES = [
    "card.json",
    "estimates.parquet",
    *("heat_map.pdf", "heat_map.png", "heat_map.svg"),
    *("layer_curve.pdf", "layer_curve.png", "layer_curve.svg"),
    "predictions.parquet",
    "probe.safetensors",
    "result.json",
]
ONE_CELL = ["--layers", "2", "--positions", "header_last"]


@pytest.fixture(scope="module")
def planted() -> Planted:
    return plant(PLAN)


@pytest.fixture(scope="module")
def original(planted, tmp_path_factory) -> Path:
    return write(planted, tmp_path_factory.mktemp("planted") / "run").path


@pytest.fixture
def run(original, tmp_path, monkeypatch) -> Path:
    """A run of its own for every test; no lens of its model is in the cache."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(original, tmp_path / "run"))


def probe(words: list, capfd):
    return call(train.main, [*map(str, words), *FEW], capfd)


# -- what comes out -------------------------------------------------------------------------------


def test_it_finds_what_was_planted_and_keeps_it(run, planted, capfd, monkeypatch):
    def never(*args, **options):
        raise AssertionError("a language model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", never)
    planted.lens.save(planted.weights_hash)
    said = probe([run, "--full"], capfd)
    assert said.status == 0, said.err
    assert said.err.splitlines()[-1] == f"wrote {run}/results/probe-rate-planted"
    folder = run / "results" / "probe-rate-planted"
    assert sorted(path.name for path in folder.iterdir()) == FILES

    card = json.loads((folder / "card.json").read_text())
    assert card["position"] == "header_last" and abs(card["layer"] - 2) <= 1
    assert len(card["training_sources"]) == SOURCES
    result = read(folder)
    assert result.about["kind"] == "probe" and result.about["judge"] == "planted"
    assert result.sentence == card["sentence"] and "beyond" not in result.sentence.split(".")[0]
    for text in (*sentences_of(result.sentence), *sentences_of(result.control)):
        assert text in said.out  # in one line each, whatever the screen's width
    numbers = result.estimates.set_index("quantity")
    assert numbers.loc["statistic_headline", "p"] == 1 / 20
    auroc = numbers.loc["auroc"]
    assert auroc["low"] < auroc["value"] < auroc["high"]
    named = set(result.estimates["control"].dropna())
    assert named >= {"text", "lengths", "output"}

    loaded, states = Probe.load(folder), Run.open(run).residuals(card["layer"], card["position"])
    for direction, least in (("logistic", 0.8), ("mass-mean", 0.5)):
        assert np.corrcoef(loaded.score(states, direction).numpy(), planted.z)[0, 1] > least
    predictions = pd.read_parquet(folder / "predictions.parquet")
    assert list(predictions["context_id"]) == list(Run.open(run).contexts["context_id"])
    assert list(predictions["positives"]) == planted.positives.tolist()


def test_a_dry_run_says_what_would_be_fitted_and_writes_nothing(run, capfd):
    before = files(run)
    said = probe([run, "--dry-run"], capfd)
    assert said.status == 0, said.err
    assert "60 conversations" in said.out and "19 permutations" in said.out
    assert "4 layers × 3 positions; 5 folds" in said.out and "\ntime  " in said.out
    assert files(run) == before


def test_runs_are_pooled_in_whatever_order_they_are_given(run, tmp_path, capfd):
    other = write(plant(replace(PLAN, draw=1, prevalence=0.5)), tmp_path / "other").path
    words = [*ONE_CELL, "--within", "dataset", "--out", "pooled"]
    said = probe([run, other, *words], capfd)
    assert said.status == 0, said.err
    predictions = pd.read_parquet(run / "results" / "pooled" / "predictions.parquet")
    assert predictions["run"].value_counts().to_dict() == {run.name: SOURCES, other.name: SOURCES}
    text = " ".join(said.out.split())
    assert "The follow-up rate within datasets can be read from the hidden states" in text
    assert not (other / "results").exists()
    assert probe([other, run, *words], capfd).out == said.out


def test_the_same_again_is_the_same_and_another_analysis_replaces_it(run, capfd):
    words = [run, *ONE_CELL, "--out", "mine"]
    said = probe(words, capfd)
    # Without a lens nothing is said to go beyond the output.
    assert said.status == 0 and "the ends of query and response was not tested" in said.out
    before = files(run)
    assert "replaced" not in probe(words, capfd).err
    assert files(run) == before
    assert "this replaced the result of other settings" in probe([*words, "--seed", "1"], capfd).err
    assert files(run) != before
    file = run / "results" / "mine" / "result.json"
    file.write_text(file.read_text().replace('"kind": "probe"', '"kind": "rates"'))
    assert "holds results of rates; name another folder with --out" in refusal(probe(words, capfd))


def test_random_blocks_that_are_read_as_well_decide_the_verdict(run, tmp_path, capfd):
    """One twin has the same states, the other has other states after the same conversations."""
    twin = write(plant(PLAN), tmp_path / "twin", random_blocks=1).path
    other = write(plant(replace(PLAN, kind="none")), tmp_path / "other", random_blocks=2).path
    said = probe([run, *ONE_CELL, "--random-blocks", twin, other, "--out", "both"], capfd)
    assert said.status == 0, said.err
    found = read(run / "results" / "both")
    assert "better there than from a model with random blocks" in found.sentence
    assert "Random blocks (random blocks 1) are not shown to be read less well" in found.control
    assert "Random blocks (random blocks 2) are read less well than the model's" in found.control
    cells = found.estimates[found.estimates["quantity"] == "auroc_cell"].set_index("control")
    assert cells["value"]["random blocks 1"] == cells.loc[cells.index.isna(), "value"].item()
    pair = write(plant(replace(PLAN, draw=1)), tmp_path / "pair").path
    for words, problem in {
        (run, "--random-blocks", pair): "is of a model as it was trained",
        (run, pair, "--random-blocks", twin): "lacks conversations of",
    }.items():
        assert problem in refusal(probe([*words, *ONE_CELL], capfd))


def test_a_twin_is_sampled_from_the_run_s_own_contexts(tiny_model_dir, tmp_path, capfd):
    """As docs/probes.md has it: responses that the model wrote are given to its twin."""
    words = ["--model", tiny_model_dir, "--limit", "3", "--device", "cpu", "--max-new-tokens", "1"]
    words += ["--samples", "1", "--temperatures", "1"]
    writing = ["--response", "generate", "--responses", "2", "--max-response-tokens", "6"]
    writing += ["--unfinished"]
    own = call(sample, [*words, *writing, "--out", str(tmp_path / "own")], capfd).run
    columns, file = ["context_id", "source_id", "messages"], tmp_path / "same.jsonl"
    own.contexts[columns].to_json(file, orient="records", lines=True)
    words += ["--limit", "all", "--dataset", str(file)]
    words += ["--id-column", "context_id", "--source-column", "source_id"]
    said = call(sample, [*words, "--random-blocks", "1", "--out", str(tmp_path / "twin")], capfd)
    twin = said.run
    assert twin.model["weights_hash"] != own.model["weights_hash"]
    assert twin.model["random_blocks"] == 1 and twin.settings["random_blocks"] == 1
    ids = [[tuple(row) for row in run.contexts["token_ids"]] for run in (own, twin)]
    assert sorted(ids[0]) == sorted(ids[1]) and len(ids[0]) == 6
    assert recall(twin.settings, twin.model["weights_hash"]).random_blocks == 1


# -- what is refused ------------------------------------------------------------------------------


def all_alike(run: Path) -> None:
    labels = Run.open(run).labels
    rows = labels.judgements("planted").astype(object)
    rows = rows.where(rows.notna(), None).assign(category="new_topic", follow_up=False)
    record = labels.record("judgements", "planted")
    labels.write_judgements("planted", rows.to_dict("records"), record)


def not_a_number(run: Path) -> None:
    (part,) = (run / "residuals").iterdir()
    with safe_open(part, "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["layer_02"][5, -1, 1] = torch.nan
    save_file(tensors, part, about)
    rehashed(run)


def damaged(run: Path) -> None:
    (part,) = (run / "residuals").iterdir()
    part.write_bytes(part.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "words", "problem", "remedy"),
    [
        (all_alike, [], "0 of 60 queries have a turn that counts", "--target"),
        (not_a_number, [], "layer 2 at header_last holds NaN", "--dtype"),
        (damaged, [], "is damaged", "compute the part again with: "),
        (None, ["--positions", "nowhere"], "position nowhere was not kept", "header_last"),
        (None, ["--layers", "2", "9"], "no layer 9", "0 … 3"),
        (None, ["--out", "../up"], "can't name a file", "letters"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run, capfd, change, words, problem, remedy):
    if change is not None:
        change(run)
    before = files(run)
    said = probe([run, *words], capfd)
    # Hidden states are read while a bar is shown; what comes before is one line.
    line = refusal(said._replace(err=re.sub(r"\r[^\r\n]*(\n(?=error))?", "", said.err)))
    assert problem in line and remedy in line
    assert files(run) == before


def test_runs_of_two_models_are_refused(run, tmp_path, capfd):
    other = write(plant(replace(PLAN, seed=1)), tmp_path / "other").path
    assert "are of different models; train a probe for each" in refusal(probe([run, other], capfd))
