"""A run in shards: manifests in one folder, and the same rows and digest whatever their number."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from runs import files_named, sampled
from shell import call

from ia_mech.collect.command import main
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter
from ia_mech.settings import Settings

SETTINGS = Settings(limit=12, temperatures=(1.0,), samples=2, max_new_tokens=4, batch_rows=6)
WRITTEN = replace(SETTINGS, limit=9, response="generate", max_response_tokens=5, batch_rows=3)
LEFTOVER = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "nowhere"}
LEFTOVER |= {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_ARRAY_TASK_ID": "3"}
LEFTOVER |= {"SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "0"}


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
    assert run.record["parts"] == {"responses": 3, "contexts": 9}
    return run


def manifests(run: Run) -> list[str]:
    return sorted(path.name for path in run.path.glob("manifest*"))


@pytest.mark.parametrize("of", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_any_number_of_shards_makes_the_run(tiny_subject, tmp_path, whole, written, of):
    for name, settings, expected in (("a", SETTINGS, whole), ("b", WRITTEN, written)):
        run = in_shards(settings, tiny_subject, tmp_path / name, of)
        assert run.verify() == [] and run.digest() == expected.digest()
        assert run.identity_digest == expected.identity_digest
        dealt = min(of, run.record["parts"]["responses"] or run.record["parts"]["contexts"])
        assert manifests(run) == [f"manifest-{k}-of-{of}.json" for k in range(1, dealt + 1)]
        assert {*files_named(run.path)} == {*files_named(expected.path)}
        assert (run.path / "README.md").read_text() == (expected.path / "README.md").read_text()
        assert run.contexts["order"].tolist() == list(range(settings.limit))


def test_a_shard_writes_the_responses_that_its_contexts_need(tiny_subject, tmp_path):
    run = sampled(WRITTEN, tiny_subject, tmp_path / "run", shard=(2, 2))
    assert [part["name"] for part in run.parts("responses")] == ["00001"]
    assert run.contexts["order"].tolist() == run.responses["order"].tolist() == [3, 4, 5]
    assert not run.complete and run.counts == {"responses": 3, "contexts": 3}


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


def test_a_shard_is_locked_by_its_one_writer_and_others_may_write(tiny_subject, whole, tmp_path):
    out = tmp_path / "run"
    with RunWriter(out, whole.record, (1, 2)):
        with pytest.raises(UserError, match="is being written by another process"):
            sampled(SETTINGS, tiny_subject, out, shard=(1, 2))
        sampled(SETTINGS, tiny_subject, out, shard=(2, 2))
    assert sampled(SETTINGS, tiny_subject, out, shard=(1, 2)).digest() == whole.digest()


def test_shards_of_another_run_are_refused(tiny_subject, tmp_path):
    sampled(SETTINGS, tiny_subject, tmp_path / "run", shard=(1, 2))
    with pytest.raises(UserError, match="another configuration: --seed is 0 there, 1 here; give"):
        sampled(replace(SETTINGS, seed=1), tiny_subject, tmp_path / "run", shard=(2, 2))


def test_a_damaged_part_of_a_shard_is_named_and_made_again_by_it(tiny_subject, whole, tmp_path):
    out = tmp_path / "run"
    in_shards(SETTINGS, tiny_subject, out, 2)
    damaged = out / "contexts" / "part-00001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"part 00001 of .* damaged: contexts/part-00001.* bytes"):
        Run.open(out)
    assert sampled(SETTINGS, tiny_subject, out, shard=(2, 2)).digest() == whole.digest()


def test_the_shards_of_a_finished_run_may_be_copied_together(tiny_subject, whole, tmp_path):
    """From machines that share no disk: their files have different names."""
    folders = []
    for number in (1, 2):
        folders.append(tmp_path / f"machine-{number}")
        sampled(SETTINGS, tiny_subject, folders[-1], shard=(number, 2))
    shutil.copytree(folders[1], folders[0], dirs_exist_ok=True)
    run = Run.open(folders[0])
    assert run.complete and run.verify() == [] and run.digest() == whole.digest()


# -- processes ------------------------------------------------------------------------------------

WORDS = ["--limit", "12", "--temperatures", "1", "--samples", "2", "--max-new-tokens", "4"]
WORDS += ["--batch-rows", "6", "--threads", "1"]


def started(words: list[str], cache: Path) -> subprocess.Popen:
    environ = os.environ | LEFTOVER | {"IA_MECH_CACHE": str(cache)}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "ia_mech.sample", *words]
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_shards_at_once_make_the_run_whatever_a_scheduler_left_in_the_environment(
    tiny_model_dir, tmp_path, capfd
):
    words = ["--model", tiny_model_dir, *WORDS, "--response", "generate"]
    words += ["--max-response-tokens", "3"]
    one = call(main, [*words, "--out", str(tmp_path / "one")], capfd).run
    out = ["--out", str(tmp_path / "two"), "--shard"]
    both = [started([*words, *out, f"{number}/2"], tmp_path) for number in (1, 2)]
    for process in both:
        said, err = process.communicate()
        assert process.returncode == 0, err
        assert re.search(r"^(shard|run: )", said, re.MULTILINE)
    run = Run.open(tmp_path / "two")
    assert run.complete and run.verify() == [] and run.digest() == one.digest()
    assert manifests(run) == ["manifest-1-of-2.json", "manifest-2-of-2.json"]


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
        words = ["bash", tmp_path / "study.sh", *WORDS, "--model", tiny_model_dir]
        subprocess.run(words, env=environ | number, check=True, cwd=tmp_path)
    assert len(Run.open(tmp_path / "cache" / "study").contexts) == 12
