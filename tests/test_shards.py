"""A run in shards: the same rows and the same digest, whatever their number."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Silent
from runs import files_under, rewritten
from shell import call, refusal

import ia_mech.engine.plan
from ia_mech.collect.command import main, sample
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.collect.preflight import open_inputs
from ia_mech.collect.shards import WHOLE, Rank, Shard
from ia_mech.engine.plan import Grid, bucket_of
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter

CONFIG = SampleConfig(limit=12, grid=Grid((1.0,), 2, 4), batch_rows=4)
WRITTEN = replace(CONFIG, limit=9, response="generate", max_response_tokens=5)
SWAPS = replace(CONFIG, limit=6, grid=Grid((), 1, 3), contrasts=True, swaps=2)


WHOLE_RANK = Rank()


def array(task: int, first: int, count: int, step: int = 1) -> dict[str, str]:
    """What Slurm sets for a task of an array."""
    values = {"ID": task, "MIN": first, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.fixture(autouse=True, scope="module")
def _small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ia_mech.engine.plan, "BUCKET", 3)
        yield


def made(config: SampleConfig, subject, out: Path, of: int, **options) -> list[Run]:
    """All shards, the last one first, as no order is promised."""
    shards = [Shard(k, of) for k in range(of, 0, -1)]
    return [collect(config, subject, out, Silent(), shard=shard, **options) for shard in shards]


@pytest.fixture(scope="module")
def whole(tiny_subject, tmp_path_factory) -> Run:
    return collect(CONFIG, tiny_subject, tmp_path_factory.mktemp("whole") / "run", Silent())


@pytest.fixture(scope="module")
def shards(tiny_subject, tmp_path_factory) -> Path:
    """A run in two shards; tests that write into it copy it."""
    out = tmp_path_factory.mktemp("shards") / "run"
    made(CONFIG, tiny_subject, out, 2)
    return out


@pytest.fixture
def copied(shards, tmp_path) -> Path:
    return shutil.copytree(shards, tmp_path / "run")


# -- what they hold -----------------------------------------------------------------------------


def test_a_source_lies_in_one_bucket_whatever_else_there_is():
    # Known values: another hash would deal the contexts of unfinished runs anew.
    assert [bucket_of("d", f"s{i}", 7) for i in range(8)] == [4, 1, 5, 4, 5, 1, 3, 3]
    assert bucket_of("d", "s", 1) == 0
    counts = [0] * 10
    for i in range(10_000):
        counts[bucket_of("d", str(i), 10)] += 1
    # Binomial(10000, 0.1): a standard deviation of 30, and five of them.
    assert all(850 <= count <= 1150 for count in counts)


def test_two_and_five_shards_are_the_run(tiny_subject, tmp_path, whole, shards):
    assert Run.open(shards).digest() == whole.digest()
    five = made(CONFIG, tiny_subject, tmp_path / "run", 5)
    assert sum(run.kept["contexts"] for run in five) == len(whole.contexts)
    run = Run.open(tmp_path / "run")
    assert run.complete and run.verify() == [] and run.digest() == whole.digest()
    assert run.identity_digest == whole.identity_digest
    for one in five:  # whole sources
        if one.kept["contexts"]:
            others = whole.contexts[~whole.contexts["order"].isin(one.contexts["order"])]
            assert not {*one.contexts["source_id"]} & {*others["source_id"]}


def test_a_shard_without_contexts_is_complete(tiny_subject, tmp_path, whole):
    runs = made(CONFIG, tiny_subject, tmp_path / "run", 5)
    (empty,) = [run for run in runs if not run.kept["contexts"]]
    assert empty.complete and empty.verify() == []
    with pytest.raises(UserError, match="holds no contexts; give the whole run"):
        print(empty.contexts)
    again = collect(CONFIG, tiny_subject, tmp_path / "run", Silent(), shard=Shard(5, 5))
    assert again.complete


def test_a_layer_is_read_from_its_own_files(shards, copied):
    run = Run.open(shards)
    assert len(run.residuals(2, "header_last")) == 12
    read = {name for name in run._verified if "residuals" in name}
    assert len(read) == 2 and all("layer_02" in name for name in read)
    # Of one shard without the rest of it: the other files aren't even there.
    shard = copied / "shards" / "1-of-2"
    wanted = Run.open(shard).residuals(2, "header_last")
    for name in files_under(shard):
        if not name.startswith(("residuals/layer_02/", "contexts/", "run.json", "manifest.json")):
            (shard / name).unlink()
    assert torch.equal(Run(shard).residuals(2, "header_last"), wanted)


def test_written_responses_do_not_depend_on_the_number_of_shards(tiny_subject, tmp_path):
    whole = collect(WRITTEN, tiny_subject, tmp_path / "whole", Silent())
    made(WRITTEN, tiny_subject, tmp_path / "run", 2)
    assert Run.open(tmp_path / "run").digest() == whole.digest()


def test_swaps_of_written_responses_wait_for_all_of_them(tiny_subject, tmp_path):
    config = replace(SWAPS, response="generate", max_response_tokens=4)
    whole = collect(config, tiny_subject, tmp_path / "whole", Silent())
    out, one, two = tmp_path / "run", Shard(1, 2), Shard(2, 2)

    def go(shard, phase=None):
        return collect(config, tiny_subject, out, Silent(), shard=shard, phase=phase)

    with pytest.raises(UserError, match=r"responses of .*/1-of-2 are not written yet; .*--phase"):
        go(one, "turns")
    run = go(one, "responses")
    assert not run.complete and run.kept["contexts"] == 0 < run.kept["responses"]
    with pytest.raises(UserError, match=r"contrasts need .* of all .* shard 2/2 has not"):
        go(one)
    go(two)
    assert go(one, "turns").complete
    assert Run.open(out).digest() == whole.digest()


# -- who makes which --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "shard"),
    [
        ({}, "1/1"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, "4/4"),
        (array(5, first=2, count=4), "4/4"),
        (array(7, first=1, count=4, step=3), "3/4"),
        ({"RANK": "2", "WORLD_SIZE": "3"}, "3/3"),
        (array(2, first=1, count=2) | {"RANK": "0", "WORLD_SIZE": "8"}, "9/16"),
    ],
)
def test_slurm_and_torchrun_say_which_shard_a_process_makes(environ, shard):
    assert str(Shard.of_environment(environ)) == shard


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (array(7, first=1, count=3), "task 7 of the Slurm array is none of 3 evenly spaced"),
        (array(6, first=1, count=4, step=3), "task 6 of the Slurm array is none of 4"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "RANK 3 of WORLD_SIZE 3 is no rank; unset both"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a whole number; unset WORLD_SIZE"),
    ],
)
def test_variables_that_name_no_shard_are_refused(environ, problem):
    with pytest.raises(UserError, match=problem):
        Shard.of_environment(environ)


def test_all_tasks_of_all_shapes_of_arrays_make_each_shard_once():
    for first, count, step, ranks in [(0, 5, 1, 1), (1, 3, 2, 2), (10, 2, 7, 3)]:
        made = [
            Shard.of_environment(
                array(first + step * k, first, count, step)
                | {"RANK": f"{r}", "WORLD_SIZE": f"{ranks}"}
            )
            for k in range(count)
            for r in range(ranks)
        ]
        assert [shard.number for shard in made] == list(range(1, count * ranks + 1))
        assert {shard.of for shard in made} == {count * ranks}


def test_ranks_share_a_machine_s_devices(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert [Rank(here=n).threads(5) for n in (1, 2, 3, 9)] == [5, 3, 2, 1]
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for rank, device in [
        (Rank(1, 2, 1, 2), "auto"),
        (Rank(1, 2, 1, 2), "cpu"),
        (WHOLE_RANK, "cuda"),
    ]:
        rank.take_device(device)
    assert taken == [1]
    with pytest.raises(UserError, match=r"rank 2 .* has no GPU \(2 here\); .* --nproc-per-node 2"):
        Rank(2, 3, 2, 3).take_device("cuda")


SMALL = ["--limit", "12", "--temperatures", "1", "--samples", "2", "--max-new-tokens", "4"]


@pytest.fixture
def command(tiny_model_dir, tmp_path, capfd, monkeypatch):
    """The command with a model and a folder, as a task of an array does it."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    words = [*SMALL, "--model", tiny_model_dir, "--batch-rows", "4", "--out", str(tmp_path / "run")]

    def run(*more: str, **environ: str):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            return call(main, [*words, *more], capfd)

    return run


def test_the_last_task_of_an_array_prints_the_whole_run(command, tmp_path, whole):
    outcome = command(**array(2, first=1, count=2))
    assert outcome.status == 0 and "user turns (95%" not in outcome.out
    assert outcome.out.startswith("shard 2/2: ")
    assert f"next: shard 1/2 of {tmp_path / 'run'}" in outcome.out
    outcome = command(**array(1, first=1, count=2))
    assert "user turns (95%" in outcome.out
    assert outcome.run.path == tmp_path / "run"
    assert outcome.run.generations["text"].tolist() == whole.generations["text"].tolist()
    outcome = command("--dry-run", "--shard", "1/2")
    assert "nothing would be computed again" in outcome.out
    # The whole run isn't begun beside its shards.
    assert "is a run in 2 shards" in refusal(command("--shard", "1/1"))


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "1/0", "-1/2", "a/b"])
def test_a_shard_out_of_range_is_one_line(command, shard):
    line = refusal(command(f"--shard={shard}"))
    assert line == f"--shard {shard} is no shard; give i/n with i from 1 to n, such as 2/4"


def test_two_processes_cannot_make_one_shard(command, copied, tiny_subject):
    with RunWriter(copied / "shards" / "1-of-2"), pytest.raises(UserError, match="another process"):
        collect(CONFIG, tiny_subject, copied, Silent(), shard=Shard(1, 2))


def test_a_shard_in_python(tiny_model_dir, tmp_path):
    made = sample(
        model=tiny_model_dir, limit=3, temperatures=[1.0], samples=1, max_new_tokens=2,
        shard="1/2", out=tmp_path / "run",
    )  # fmt: skip
    assert made.path == tmp_path / "run" / "shards" / "1-of-2" and made.complete


def torchrun(ranks: int, words: list[str]) -> subprocess.CompletedProcess:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", *words]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


@pytest.mark.slow
def test_ranks_make_the_run_and_the_first_one_reports(tiny_model_dir, tmp_path):
    """With buckets of the usual size, since these are processes of their own."""
    words = ["ia_mech.sample", *SMALL, "--limit", "96", "--model", tiny_model_dir, "--threads", "1"]
    subprocess.run([sys.executable, "-m", *words, "--out", tmp_path / "1"], check=True)
    whole = Run.open(tmp_path / "1")
    for ranks in (2, 3):
        done = torchrun(ranks, [*words, "--out", str(tmp_path / f"{ranks}")])
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("user turns (95%") == 1
        assert Run.open(tmp_path / f"{ranks}").digest() == whole.digest()
    words = [*words, "--limit", "6", "--response", "generate", "--max-response-tokens", "3"]
    done = torchrun(2, [*words, "--contrasts", "--out", str(tmp_path / "swaps")])
    assert done.returncode == 0 and Run.open(tmp_path / "swaps").complete, done.stderr
    done = torchrun(2, [*words, "--out", str(tmp_path / "2")])
    assert done.returncode == 1 and "error: shard 1/2: " in done.stderr
    assert "holds another configuration: --limit is 96 there, 6 here" in done.stderr


@pytest.mark.slow
def test_the_script_for_slurm_in_the_documentation(tiny_model_dir, tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()
    script = re.search(r"<!-- study.sh -->\n```bash\n(.*?)```", text, re.DOTALL)[1]
    assert script.count("\n") == 12
    (tmp_path / "study.sh").write_text(script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    words = [*SMALL, "--model", tiny_model_dir, "--threads", "1"]
    for task in (1, 2):
        environ = array(task, first=1, count=2) | {"SLURM_SUBMIT_DIR": str(tmp_path)}
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environ = os.environ | environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
        environ.pop("IA_MECH_CACHE", None)
        subprocess.run(["bash", tmp_path / "study.sh", *words], env=environ, check=True)
    assert len(Run.open(tmp_path / "cache" / "study").contexts) == 12


# -- what is refused ----------------------------------------------------------------------------


def test_shards_that_are_missing_or_unfinished_are_named(copied):
    shutil.rmtree(copied / "shards" / "2-of-2")
    with pytest.raises(UserError, match=r"run has no shard 2/2; run the command .* --shard i/n"):
        Run.open(copied)
    rewritten(copied / "shards" / "1-of-2", "manifest.json", lambda m: m.update(complete=False))
    with pytest.raises(UserError, match="has no shard 2/2 and has not finished shard 1/2; "):
        Run.open(copied)


def other_weights(record: dict) -> None:
    record["identity"]["model"]["weights_hash"] = "00"


def other_seed(record: dict) -> None:
    record["identity"]["config"]["grid"]["seed"] = 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (other_weights, "differ: model.weights_hash differs; remove the one that is wrong"),
        (other_seed, "differ: config.grid.seed is 0 there, 1 here; remove"),
    ],
)
def test_shards_of_two_runs_are_not_read_as_one(copied, tiny_subject, change, problem):
    rewritten(copied / "shards" / "2-of-2", "run.json", change)
    with pytest.raises(UserError, match=f"shards 1/2 and 2/2 of .* {problem}"):
        Run.open(copied)
    if change is other_seed:  # nor is one of them begun beside the other
        shutil.rmtree(copied / "shards" / "1-of-2")
        with pytest.raises(
            UserError, match="2-of-2 holds another configuration: --seed is 1 there"
        ):
            collect(CONFIG, tiny_subject, copied, Silent(), shard=Shard(1, 2))


def test_shards_of_two_counts_are_refused(copied):
    for shard in (Shard(1, 3), WHOLE):
        with pytest.raises(UserError, match=r"in 2 shards, and .* asked for; give --shard i/2"):
            open_inputs(CONFIG, copied, shard)
    shutil.copytree(copied / "shards" / "1-of-2", copied / "shards" / "1-of-3")
    with pytest.raises(UserError, match="holds shards of 2 and of 3; remove those of one count"):
        Run.open(copied)
    shutil.rmtree(copied / "shards" / "1-of-3")
    (copied / "shards" / "2-of-2").rename(copied / "shards" / "x")
    shutil.copytree(copied / "shards" / "1-of-2", copied / "shards" / "2-of-2")
    with pytest.raises(UserError, match="2-of-2 is not shard 2/2"):
        Run.open(copied)


def test_a_truncated_shard_is_named_and_repaired(copied, tiny_subject, whole):
    file = next((copied / "shards" / "2-of-2" / "contexts").glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"damaged: shards/2-of-2/contexts/.* bytes, .* were"):
        Run.open(copied)
    collect(CONFIG, tiny_subject, copied, Silent(), shard=Shard(2, 2), repair=True)
    assert Run.open(copied).digest() == whole.digest()


def test_scratch_of_another_host_on_the_same_disk_is_left_alone(copied, tiny_subject, whole):
    others = [copied / "shards" / f".ia_mech-{name}-1-abc" for name in ("node7", "node8")]
    for folder in others:
        folder.mkdir()
        (folder / "conversations.parquet").write_text("being written")
    shutil.rmtree(copied / "shards" / "2-of-2")
    collect(CONFIG, tiny_subject, copied, Silent(), shard=Shard(2, 2))
    assert Run.open(copied).digest() == whole.digest()
    assert all((folder / "conversations.parquet").is_file() for folder in others)
