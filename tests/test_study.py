"""A whole study of a tiny model, its sentence and page; two studies side by side."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scored
import torch
from runs import rewritten
from shell import call, refusal

from experiments import compare, study
from ia_mech.models import load as models
from ia_mech.results import read

STUDY = "run/results/study"
SETTINGS = ["--queries", "4", "--quick", "--maps", "windows", "--unfinished", "--workers", "1"]
SMALL = {"RESPONSE_TOKENS": 5, "TURN_TOKENS": 6, "TEMPERATURES": (1.0,)}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return scored.dataset(tmp_path_factory.mktemp("data") / "chats.jsonl", scored.CONVERSATIONS[:4])


@pytest.fixture(scope="module")
def made(data, tiny_model_dir, tmp_path_factory) -> Path:
    """A finished study; tests leave it as it is."""
    return finished(str(tiny_model_dir), data, tmp_path_factory.mktemp("study") / "tiny")


def finished(model: str, data: str, out: Path) -> Path:
    """The folder of a study of a model, which is loaded once for all its stages."""
    loaded, once = [], models._load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_load", lambda spec: loaded.append(spec) or once(spec))
        # Other tests' copies of the model, which are used meanwhile, are none of this study's.
        patch.setattr(models, "_places", lambda weights: out.parent / "notes" / weights)
        for name, value in SMALL.items():
            patch.setattr(study, name, value)
        with redirect_stdout(io.StringIO()) as said:
            assert study.main([model, "--dataset", data, *SETTINGS, "--out", str(out)]) == 0
    assert len(loaded) <= 1
    (out / "said.txt").write_text(said.getvalue(), "utf-8")
    return out


def test_a_study_ends_with_one_sentence_its_control_and_a_page(made):
    found = read(made / STUDY)
    assert re.search(r"\d+ of 16 greedy user turns of \S+ are follow-ups", found.sentence)
    assert "first token" in found.sentence
    assert "of 1.58 bits about which of 3 responses they followed" in found.sentence
    assert "The response's keys and values are enough for" in found.sentence
    assert found.control.startswith("Follow-ups are compared with wrong conversations, bits")
    rates = {"rates-builtin", "rates-builtin-sampled-1"}
    assert rates | {"mass", "locate"} == set(found.estimates["stage"])
    assert "sites" in found.figures
    page = re.sub("<[^>]*>", "", (made / "report.html").read_text("utf-8"))
    assert found.sentence.partition(" tell ")[2][:60] in page


def test_a_study_prints_a_line_a_stage_its_result_and_one_table(made):
    said = (made / "said.txt").read_text("utf-8")
    assert len(said.encode()) <= 6000
    stages, _, rest = said.partition("\n\n")
    names = [line.partition(":")[0] for line in stages.splitlines()]
    assert names == ["sample", "judge", "rates", "first token", "mass", "locate"]
    assert rest.count("┏") == 1 and "\nthe page: 3 more tables" in rest
    assert rest.endswith(f"\npage: {made / 'report.html'}\n")


def test_a_second_call_computes_nothing_again(made, data, tiny_model_dir, monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(study, name, value)
    parts = {path: path.stat().st_mtime_ns for path in made.rglob("part*")}
    before = read(made / STUDY).sentence
    options = {
        "dataset": data,
        "queries": 4,
        "quick": True,
        "unfinished": True,
        "maps": ["windows"],
        "out": made,
    }
    assert study.study(tiny_model_dir, **options).sentence == before
    assert {path: path.stat().st_mtime_ns for path in made.rglob("part*")} == parts


@pytest.mark.slow
def test_killed_at_five_moments_it_comes_to_the_same_numbers(made, data, tiny_model_dir, tmp_path):
    patched = f"vars(study).update({SMALL}); embedded.encoder_directory = encoder_directory"
    imports = "from experiments import study; from ia_mech.models import embedded"
    imports = f"import sys; from tiny_encoder import encoder_directory; {imports}"
    command = f"{imports}; {patched}; sys.exit(study.main())"
    words = [str(tiny_model_dir), "--dataset", data, *SETTINGS, "--out", str(tmp_path / "study")]
    for written in (
        "run/contexts/*.parquet",
        "run/judgements/*.parquet",
        "run/results/locate/parts/*.parquet",
        "run-mass/turns/run/contexts/*.parquet",
        "run/results/mass/estimates.parquet",
    ):
        # As many threads as these tests have: with more, sums round differently.
        alone = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        tests = Path(__file__).parent
        alone["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests)])
        with subprocess.Popen([sys.executable, "-c", command, *words], env=alone) as process:
            while process.poll() is None and not any((tmp_path / "study").glob(written)):
                time.sleep(0.005)
            process.kill()
        assert process.returncode == -signal.SIGKILL, written
    again = finished(str(tiny_model_dir), data, tmp_path / "study")
    assert read(again / STUDY).sentence == read(made / STUDY).sentence
    pd.testing.assert_frame_equal(read(again / STUDY).estimates, read(made / STUDY).estimates)


def test_a_plan_names_the_command_of_each_stage(tiny_model_dir, capfd, tmp_path):
    outcome = call(study.main, [tiny_model_dir, "--dry-run", "--out", f"{tmp_path}/no"], capfd)
    assert outcome.status == 0 and not (tmp_path / "no").exists()
    for name in ("sample", "judge", "mass", "locate", "elicit", "probes", "all"):
        assert f"\n{name} " in f"\n{outcome.out}"
    quick = call(study.main, [tiny_model_dir, "--quick", "--dry-run"], capfd).out
    assert "--recipients 1 --maps none\n" in quick
    given = study.build_parser().parse_args(["m", "--judge", "llm --model 'a b'"])
    todo = {one.name: one.words for one in study.stages(study.with_defaults(given))}
    assert todo["judge"][3:] == ["--judge", "llm", "--model", "a b"]
    assert "No closing quotation" in refusal(call(study.main, ["m", "--judge", "llm 'x"], capfd))


def test_studies_are_compared_over_the_queries_that_they_share(made, tmp_path, capfd):
    """With one of another model, in which all bits are a quarter more."""
    other = Path(shutil.copytree(made, tmp_path / "other"))
    assert "is a copy of" in refusal(call(compare.main, [str(made), str(other)], capfd))
    assert "one study can't be compared" in refusal(call(compare.main, [str(made)], capfd))
    assert "not a finished study" in refusal(call(compare.main, [str(made / "run")] * 2, capfd))
    model = {"name": "other"}
    rewritten(other / "run", "run.json", lambda record: record["identity"]["model"].update(model))
    file = other / "run" / "results" / "locate" / "queries.parquet"
    bits = pd.read_parquet(file)
    bits[bits["source"] != bits["source"].iloc[0]].assign(bits=bits["bits"] + 0.25).to_parquet(file)
    words = [str(made), str(other), "--out", str(tmp_path / "both")]
    said = call(compare.main, words, capfd)
    assert said.status == 0, said.err
    found = read(tmp_path / "both")
    assert {"models", "layers"} == set(found.figures) and found.sentence.count("other") == 1
    less = found.estimates[found.estimates["quantity"].str.endswith(", less")]
    assert (less["model"] == "other").all()
    of_bits = less["quantity"] == "bits, less"
    assert np.allclose(less.loc[of_bits, "value"], 0.25) and of_bits.any()
    assert (less.loc[of_bits, "sources"] == bits["source"].nunique() - 1).all()
    assert np.allclose(less.loc[~of_bits, "value"], 0)
    assert f"report {made}/run {other}/run --results {tmp_path / 'both'}" in said.out
