"""A whole study of a tiny model, its sentence and page; two studies side by side; ``ia-mech``."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scored
import torch
from shell import call, refusal

from experiments import compare, study
from ia_mech import console
from ia_mech.estimates import estimate_of
from ia_mech.results import read

STUDY = "run/results/study"
SETTINGS = ["--queries", "5", "--quick", "--maps", "windows"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return scored.dataset(tmp_path_factory.mktemp("data") / "chats.jsonl", scored.CONVERSATIONS[:5])


@pytest.fixture(scope="module")
def made(data, tiny_model_dir, tmp_path_factory) -> Path:
    """A finished study; tests leave it as it is."""
    return finished(str(tiny_model_dir), data, tmp_path_factory.mktemp("study") / "tiny")


def finished(model: str, data: str, out: Path) -> Path:
    """The folder of a study of a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "RESPONSE_TOKENS", 5)
        patch.setattr(study, "TURN_TOKENS", 6)
        assert study.main([model, "--dataset", data, *SETTINGS, "--out", str(out)]) == 0
    return out


def test_a_study_ends_with_one_sentence_its_control_and_a_page(made, capfd):
    found = read(made / STUDY)
    assert "of 1.58 bits about their response" in found.sentence
    assert "arrive through the response's keys and values" in found.sentence
    assert found.control.startswith("Every number is held against siblings")
    assert {"locate", "elicit", "study"} == set(found.estimates["stage"])
    assert "share of bits in accepted turns" in set(found.estimates["quantity"])
    assert "sites" in found.figures
    page = re.sub("<[^>]*>", "", (made / "report.html").read_text("utf-8"))
    assert found.sentence.partition(" tell ")[2][:60] in page


def test_a_second_call_computes_nothing_again(made, data, tiny_model_dir, capfd, monkeypatch):
    monkeypatch.setattr(study, "RESPONSE_TOKENS", 5)
    monkeypatch.setattr(study, "TURN_TOKENS", 6)
    parts = {path: path.stat().st_mtime_ns for path in made.rglob("part*")}
    before = read(made / STUDY).sentence
    words = [str(tiny_model_dir), "--dataset", data, *SETTINGS]
    assert call(study.main, [*words, "--out", str(made)], capfd).status == 0
    assert {path: path.stat().st_mtime_ns for path in made.rglob("part*")} == parts
    assert read(made / STUDY).sentence == before


@pytest.mark.slow
def test_killed_at_five_moments_it_comes_to_the_same_numbers(made, data, tiny_model_dir, tmp_path):
    patched = "study.RESPONSE_TOKENS, study.TURN_TOKENS = 5, 6"
    command = f"import sys; from experiments import study; {patched}; sys.exit(study.main())"
    words = [str(tiny_model_dir), "--dataset", data, *SETTINGS, "--out", str(tmp_path / "study")]
    for written in (
        "run/contexts/*.parquet",
        "run/judgements/*.parquet",
        "run/results/locate/parts/*.parquet",
        "run-elicit/prompt/run/contexts/*.parquet",
        "run-elicit/rows.parquet",
    ):
        # As many threads as these tests have: with more, sums round differently.
        alone = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        with subprocess.Popen([sys.executable, "-c", command, *words], env=alone) as process:
            while process.poll() is None and not any((tmp_path / "study").glob(written)):
                time.sleep(0.005)
            process.kill()
        assert process.returncode == -signal.SIGKILL, written
    again = finished(str(tiny_model_dir), data, tmp_path / "study")
    assert read(again / STUDY).sentence == read(made / STUDY).sentence
    pd.testing.assert_frame_equal(read(again / STUDY).estimates, read(made / STUDY).estimates)


def test_a_plan_names_stages_and_time_and_hours_choose_what_fits(tiny_model_dir, capfd, tmp_path):
    words = [str(tiny_model_dir), "--dry-run", "--out", str(tmp_path / "no")]
    outcome = call(study.main, words, capfd)
    assert outcome.status == 0 and not (tmp_path / "no").exists()
    for name in ("pace", "sample", "judge", "locate", "elicit", "probes", "all"):
        assert f"\n{name} " in f"\n{outcome.out}"
    args = study.with_defaults(study.build_parser().parse_args(["m", "--hours", "1"]))
    whole = sum(study.stage_seconds(one, 500, 50) for one in study.stages(args))
    args.hours = whole / 3600 / 2
    fewer = study.fit(args, 500, 50)
    assert fewer.samples < 4 and fewer.queries <= 60
    assert sum(study.stage_seconds(one, 500, 50) for one in study.stages(fewer)) <= whole / 2
    args = study.with_defaults(study.build_parser().parse_args(["m", "--hours", "0.01"]))
    with pytest.raises(Exception, match="hours are too few"):
        study.fit(args, 500, 50)


@pytest.mark.parametrize(
    ("high", "low", "hits", "gap", "said"),
    [
        (0.08, 0.2, 0.3, 0.1, "Latent at the header"),
        (0.10, 0.2, 0.3, 0.1, "Nothing is shown to be latent"),  # greedy may carry a tenth
        (0.08, 0.05, 0.3, 0.1, "Nothing is shown to be latent"),  # nothing carries more than greedy
        (0.08, 0.2, 0.4, 0.1, "Nothing is shown to be latent"),  # greedy ones are told, beyond bits
        (
            0.08,
            0.2,
            0.3,
            -0.1,
            "Nothing is shown to be latent",
        ),  # nor accepted more often
    ],
)
def test_latent_is_said_only_if_all_four_hold(high, low, hits, gap, said):
    site = {"stage": "locate", "layer": pd.NA, "sources": 60}
    rows = [
        {"quantity": "bits", "term": "header", "temperature": 0.0, "low": -0.1, "high": high},
        {"quantity": "bits", "term": "header", "temperature": np.nan, "low": low, "high": 0.4},
        {"quantity": "bits", "term": "own context", "temperature": np.nan, "value": 0.9},
        {"quantity": "own is likeliest", "term": "header", "temperature": 0.0, "low": hits},
        {"quantity": "own is likeliest", "term": "query", "temperature": 0.0, "high": 0.35},
    ]
    rows = [site | row for row in rows]
    for term, low in (("best temperature", gap), ("best arm", 0.3)):
        rows.append({"stage": "elicit", "term": term, "quantity": "elicitation gap", "low": low})
    found = pd.DataFrame(rows)
    assert study.latent_sentence(found, "0.00").startswith(said)
    few = study.latent_sentence(found.assign(sources=49), "0.00")
    assert few == "Whether anything is latent isn't told of fewer than 50 queries."
    assert study.latent_sentence(found[1:], "0.00") == "Whether anything is latent can't be told."


def test_hours_given_again_leave_what_was_begun_as_it_is(made, data, tiny_model_dir, monkeypatch):
    asked = []
    monkeypatch.setattr(study, "pace", lambda model: (1e-3, 1e-3))
    monkeypatch.setattr(study, "stages", lambda args: asked.append(args) or [])
    words = [str(tiny_model_dir), "--dataset", data, "--hours", "1", "--out", str(made)]
    assert study.main(words) == 0
    assert (asked[-1].queries, asked[-1].samples) == (5, 1)


def test_studies_are_compared_over_the_queries_that_they_share(made, tmp_path, capfd):
    other = Path(shutil.copytree(made, tmp_path / "other"))
    line = refusal(call(compare.main, [str(made), str(other)], capfd))
    assert "two studies are of" in line
    assert "one study can't be compared" in refusal(call(compare.main, [str(made)], capfd))
    assert "ia-mech report" in refusal(call(compare.main, [str(made / "run")] * 2, capfd))
    numbers = {"a": compare.numbers_of(made)}
    numbers["b"] = numbers["a"].assign(value=numbers["a"]["value"] + 0.25)
    found = list(compare.estimates(numbers, 0.95, 0))
    less = [row.estimate.value for row in found if row.quantity == "bits, less"]
    assert less and np.allclose(less, 0.25)


def test_a_comparison_has_both_models_numbers_figures_and_a_page(
    made, data, tiny_model_dir, tmp_path, capfd
):
    model = shutil.copytree(tiny_model_dir, tmp_path / "other")
    other = finished(str(model), data, tmp_path / "study")
    words = [str(made), str(other), "--out", str(tmp_path / "both")]
    assert call(compare.main, words, capfd).status == 0
    found = read(tmp_path / "both")
    assert {"models", "layers"} == set(found.figures)
    assert found.sentence.count("other") == 1
    less = found.estimates[found.estimates["quantity"].str.endswith(", less")]
    assert len(less) and (less["model"] == "other").all()
    assert np.allclose(less["value"], 0) and (less["p"].dropna() == 1).all()
    shares = found.estimates[found.estimates["quantity"] == compare.SHARE]
    each = shares.groupby(["model", "turns"])["value"].sum()
    assert np.allclose(each, 1)
    page = (tmp_path / "both" / "report.html").read_text("utf-8")
    assert found.sentence.partition(":")[0] in page


def test_every_command_has_a_module_with_a_main(capfd):
    assert call(console.main, [], capfd).out == console.usage() + "\n"
    assert call(console.main, ["--version"], capfd).out.startswith("ia-mech 0.")
    for name, (module, _) in console.COMMANDS.items():
        assert callable(importlib.import_module(module).main), name
    assert "no command 'sampel'" in call(console.main, ["sampel"], capfd).err
    assert "usage: " in call(console.main, ["rates", "--help"], capfd).out


@pytest.mark.slow
def test_the_page_that_compares_two_models_says_what_their_tables_say(tmp_path, capfd):
    results = Path(__file__).parent.parent / "docs" / "results"
    studies = [
        str(folder) for folder in sorted((results / "data").glob("*-instruct"), reverse=True)
    ]
    words = [*studies, "--out", str(tmp_path / "both")]
    assert call(compare.main, words, capfd).status == 0
    found = read(tmp_path / "both").estimates
    page = (results / "compare.md").read_text("utf-8").replace("−", "-")
    rows = found[(found["quantity"] == compare.BITS) & (found["turns"] == compare.SAMPLED)]
    assert len(rows) == 10
    for row in rows.itertuples():
        assert f"| {estimate_of(row).text()} |" in page
    rows = found[(found["quantity"] == compare.EXCESS) & (found["turns"] == "greedy")]
    for row in rows.itertuples():
        assert f"| {estimate_of(row).text()} |" in page
