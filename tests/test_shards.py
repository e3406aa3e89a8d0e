"""Several processes on one run give the same rows and digest, however the parts are dealt."""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from runs import files_named, sampled

import ia_mech.collect.job as job
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter, layout
from ia_mech.settings import Settings

WORDS = ["--limit", "12", "--temperatures", "1", "--samples", "2", "--max-new-tokens", "4"]
WORDS += ["--batch-rows", "6", "--threads", "1"]
SETTINGS = Settings(limit=6, temperatures=(1.0,), samples=2, max_new_tokens=4, batch_rows=3)
WRITTEN = replace(SETTINGS, response="generate", max_response_tokens=5)


def in_shards(settings: Settings, subject, out: Path, of: int) -> Run:
    """All shards, the last one first, as no order is promised."""
    for number in range(of, 0, -1):
        run = sampled(settings, subject, out, shard=(number, of))
        assert run.complete == (number == 1)
    return run


@pytest.fixture(scope="module")
def whole(tiny_subject, tmp_path_factory) -> Run:
    run = sampled(SETTINGS, tiny_subject, tmp_path_factory.mktemp("whole") / "run")
    assert run.record["parts"] == {"responses": 0, "contexts": 6}
    return run


@pytest.fixture(scope="module")
def written(tiny_subject, tmp_path_factory) -> Run:
    run = sampled(WRITTEN, tiny_subject, tmp_path_factory.mktemp("written") / "run")
    assert run.record["parts"] == {"responses": 2, "contexts": 6}
    return run


@pytest.mark.parametrize("of", [pytest.param(5, marks=pytest.mark.slow), 3])
def test_any_number_of_shards_makes_the_run(tiny_subject, tmp_path, whole, written, of):
    for settings, expected in ((SETTINGS, whole), (WRITTEN, written)):
        run = in_shards(settings, tiny_subject, tmp_path / settings.response, of)
        assert run.verify() == [] and run.digest() == expected.digest()
        assert run.identity_digest == expected.identity_digest
        dealt = min(of, run.record["parts"]["responses"] or run.record["parts"]["contexts"])
        assert sorted(one["shard"] for one in run.sessions) == [[k + 1, of] for k in range(dealt)]
        assert {*files_named(run.path)} == {*files_named(expected.path)}
        assert (run.path / "README.md").read_text() == (expected.path / "README.md").read_text()
        assert run.contexts["order"].tolist() == list(range(settings.limit))


@pytest.mark.parametrize(
    "shards",
    [[(1, 1), (1, 2), (2, 2)], [(2, 3), (1, 2), (2, 2)]],
    ids=["begun whole", "begun as other shards"],
)
def test_a_run_may_go_on_in_other_shards(tiny_subject, tmp_path, monkeypatch, written, shards):
    """Whatever was begun by another number of processes; nothing is computed twice."""
    out, honest, parts = tmp_path / "run", RunWriter.add_contexts, []

    def stopping(self, name, *arguments, **options):
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(name)
        honest(self, name, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunWriter, "add_contexts", stopping)
        sampled(WRITTEN, tiny_subject, out, shard=shards[0])
    for before, shard in pairwise(shards):
        assert before != shard
        run = sampled(WRITTEN, tiny_subject, out, shard=shard)
    assert run.complete and run.digest() == written.digest()
    named = files_named(out)
    assert len(named) == len(set(named))  # no part was written by two


def test_a_shard_without_parts_has_nothing_to_do(tiny_subject, tmp_path):
    run = sampled(SETTINGS, tiny_subject, tmp_path / "run", shard=(9, 9))
    assert run.counts["contexts"] == 0 and not run.complete and not run.sessions
    with pytest.raises(UserError, match="holds no finished part yet; let the run go on first"):
        run.contexts  # noqa: B018


def test_shards_may_be_copied_together(tiny_subject, whole, tmp_path):
    """From machines that share no disk."""
    folders = [tmp_path / "machine-1", tmp_path / "machine-2"]
    for number, folder in enumerate(folders, start=1):
        sampled(SETTINGS, tiny_subject, folder, shard=(number, 2))
    out = folders[0]
    with pytest.raises(UserError, match="another configuration: --seed is 0 there, 1 here; give"):
        sampled(replace(SETTINGS, seed=1), tiny_subject, out, shard=(2, 2))
    shutil.copytree(folders[1], out, dirs_exist_ok=True)
    run = Run.open(out)
    assert run.complete and run.verify() == [] and run.digest() == whole.digest()


@pytest.mark.parametrize("done", [True, False], ids=["done", "given up"])
def test_what_another_process_computes_is_waited_for(
    tiny_subject, whole, tmp_path, progress, monkeypatch, done
):
    monkeypatch.setattr(job, "PATIENCE", 0.01)
    out, name = tmp_path / "run", "00001"
    record = {key: whole.record[key] for key in whole.record if key != "format"}
    with RunWriter(out, record) as other, ThreadPoolExecutor(1) as pool:
        assert other.claim("contexts", name)
        waiting = pool.submit(sampled, SETTINGS, tiny_subject, out, progress)
        while not waiting.done() and not any("waiting for" in line for line in progress.lines):
            time.sleep(0.01)
        assert "waiting for 1 part(s) that other processes compute" in progress.lines
        assert name not in other.finished_parts("contexts") and len(Run(out).contexts) == 5
        if done:
            (part,) = (one for one in whole.parts("contexts") if one["name"] == name)
            for file in (*part["files"], layout.manifest_file("contexts", name)):
                shutil.copy(whole.path / file, out / file)
        other.close()
        run = waiting.result()
    assert run.complete and run.verify() == [] and run.digest() == whole.digest()
    assert len(run.sessions) == 1 + done


@pytest.mark.slow
def test_the_script_for_slurm_in_the_documentation(tiny_model_dir, tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
    script = re.search(r"<!-- study.sh -->\n```bash\n(.*?)```", text, re.DOTALL)[1]
    (tmp_path / "study.sh").write_text(script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_COUNT": "2"}
    environ.pop("IA_MECH_CACHE", None)
    for task in (1, 2):
        number = {"SLURM_ARRAY_TASK_ID": str(task)}
        words = ["bash", tmp_path / "study.sh", "--model", tiny_model_dir, *WORDS]
        subprocess.run(words, env=environ | number, check=True, cwd=tmp_path)
    assert len(Run.open(tmp_path / "cache" / "study").contexts) == 12
