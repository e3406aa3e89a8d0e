"""Models on several devices: tensor parallel ranks, and a device map."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from conftest import Silent
from shell import call, refusal

from ia_mech.collect.command import main
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import make_run
from ia_mech.collect.shards import Rank, Shard
from ia_mech.engine.plan import Grid, OomBackoff
from ia_mech.errors import UserError
from ia_mech.models import parallel
from ia_mech.models.load import ModelSpec, load, recalled
from ia_mech.run import Run, RunWriter
from ia_mech.run.writer import RunFollower

SMALL = ["--threads", "1", "--batch-rows", "8", "--temperatures", "0.7", "--samples", "1"]


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["-m", "ia_mech.sample", *SMALL, *words]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def farthest(run: Run, other: Run) -> float:
    """The largest relative difference of two states of the residual stream."""
    return max(
        float(((x - y).norm(dim=-1) / x.norm(dim=-1)).nan_to_num(0).max())
        for layer in run.layers
        for position in run.positions
        for x, y in [(run.residuals(layer, position), other.residuals(layer, position))]
    )


# -- which rank does what -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "ranks", "together", "shard", "leads", "several"),
    [
        (0, 3, 3, "1/1", True, False),
        (2, 3, 3, "1/1", False, False),
        (3, 8, 4, "1/2", False, True),
        (4, 8, 4, "2/2", True, True),
        (1, 2, 1, "2/2", True, True),
    ],
)
def test_ranks_of_consecutive_numbers_make_a_shard(rank, ranks, together, shard, leads, several):
    environ = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    assert str(Shard.of_environment(environ, together)) == shard
    found = Rank.of_environment(environ, together)
    assert found.leads is leads and found.several is several


def test_a_task_of_an_array_makes_as_many_shards_as_it_has_groups_of_ranks():
    name = "SLURM_ARRAY_TASK_"
    environ = {f"{name}ID": "3", f"{name}MIN": "1", f"{name}COUNT": "5"}
    environ |= {"RANK": "6", "WORLD_SIZE": "8"}
    assert str(Shard.of_environment(environ, 4)) == "6/10"


def test_numbers_of_ranks_that_cannot_hold_the_model_are_refused():
    with pytest.raises(UserError, match=r"--tensor-parallel 2: 3 process.* no multiple of it"):
        Rank.of_environment({"RANK": "0", "WORLD_SIZE": "3"}, 2)
    config = transformers.LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    parallel.check(3, config)
    with pytest.raises(UserError, match=r"9 does not divide .* 9 heads .* 3 of .*; give one of 3$"):
        parallel.check(9, config)
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=1)
    with pytest.raises(UserError, match=r"8 heads of attention and 1 .*; use --device-map auto"):
        parallel.check(2, config)
    with pytest.raises(UserError, match="transformers has no tensor parallel plan for gpt2"):
        parallel.check(3, transformers.GPT2Config())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tensor-parallel", "2"], "1 process(es) are no multiple of it; start the command with"),
        (["--tensor-parallel", "2", "--device", "cpu"], "not --device cpu; leave --device out"),
        (["--tensor-parallel", "2", "--device-map", "auto"], "exclude each other; give one"),
        (["--tensor-parallel", "2", "--ray"], "--ray gives a worker one device"),
    ],
)
def test_flags_that_do_not_go_together(flags, problem, tmp_path, capfd):
    outcome = call(main, [*flags, "--out", str(tmp_path / "run")], capfd)
    assert problem in refusal(outcome)


def test_memory_that_one_rank_lacks_ends_the_run(monkeypatch):
    """With smaller batches it would wait for the other ranks for ever."""
    monkeypatch.setattr(parallel, "_size", 2)
    monkeypatch.setenv("RANK", "1")

    def function(width: int) -> None:
        raise MemoryError

    with pytest.raises(parallel.OnThisRank, match=r"memory on rank 1 with 8 .* lower --batch-rows"):
        OomBackoff(8).retry(function)


def test_only_the_first_rank_writes(tiny_subject, tmp_path):
    config = SampleConfig(limit=2, grid=Grid((), 1, 2), response="generate", max_response_tokens=3)
    run = make_run_of(config, tiny_subject, tmp_path / "run")
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    follower = RunFollower(run.path)
    with RunWriter(run.path), follower:  # it takes no lock
        assert follower.done("contexts") and len(follower.read_responses()) == 2
        follower.start_session({})
        follower.note("left_out", ["x"])
        follower.add_responses("9.0", [])
        follower.finish_responses()
        follower.finish()
    after = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    assert after == files


def make_run_of(config, subject, out: Path) -> Run:
    from ia_mech.collect.job import collect

    return collect(config, subject, out, Silent())


# -- a device map -----------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch):
    """As much as says: the rest of a model goes to the disk."""

    def limit(count: int) -> None:
        name = "transformers.integrations.accelerate.get_max_memory"
        monkeypatch.setattr(name, lambda *_: {"cpu": count})

    return limit


def test_a_run_with_blocks_on_the_disk_is_the_same(
    tiny_model_dir, tmp_path, little_memory, monkeypatch
):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    config = SampleConfig(
        model=ModelSpec(tiny_model_dir), limit=3, grid=Grid((1.0,), 2, 4), batch_rows=8
    )
    whole = make_run(config, tmp_path / "whole", Silent())
    lens = next((tmp_path / "cache").rglob("lens.safetensors"))
    held = lens.read_bytes()
    lens.unlink()
    little_memory(280_000)  # of which accelerate keeps room for the largest layer
    spec = ModelSpec(tiny_model_dir, device_map="auto")
    places = load(spec).model.hf_device_map
    assert places["model.layers.0"] == "cpu" and places["model.layers.3"] == "disk"
    run = make_run(SampleConfig(**{**vars(config), "model": spec}), tmp_path / "disk", Silent())
    assert run.model["weights_hash"] == whole.model["weights_hash"]
    assert lens.read_bytes() == held
    assert run.generations["text"].tolist() == whole.generations["text"].tolist()
    assert farthest(whole, run) < 1e-5  # the contract's, of batches: sums in another order
    little_memory(1000)
    with pytest.raises(UserError, match=r"not even the embeddings of .* fit into memory"):
        load(spec)


# -- tensor parallel ranks --------------------------------------------------------------------


@pytest.mark.slow
def test_three_ranks_of_the_embedded_model_make_the_run_of_one_process(tmp_path):
    words = ["--limit", "3", "--max-new-tokens", "8"]
    done = torchrun(1, *words, "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    done = torchrun(3, *words, "--tensor-parallel", "3", "--out", str(tmp_path / "three"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("user turns (95%") == 1
    one, three = Run.open(tmp_path / "one"), Run.open(tmp_path / "three")
    assert three.model["weights_hash"] == one.model["weights_hash"]
    greedy = [run.generations.query("temperature == 0")["text"].tolist() for run in (one, three)]
    assert greedy[0] == greedy[1]
    assert farthest(one, three) < 1e-4
    again = recalled(three.config["model"], three.model["weights_hash"])
    assert again.tensor_parallel == 1  # experiments load it in one process

    done = torchrun(2, *words, "--tensor-parallel", "2", "--out", str(tmp_path / "two"))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "--tensor-parallel 2 does not divide" in errors[0]
    assert "exitcode  : 2" in done.stderr and not (tmp_path / "two").exists()


@pytest.mark.slow
def test_two_shards_of_two_ranks_each_with_written_responses(tiny_model_dir, tmp_path):
    words = ["--model", tiny_model_dir, "--limit", "96", "--max-new-tokens", "4", "--contrasts"]
    words += ["--response", "generate", "--max-response-tokens", "4"]
    done = torchrun(1, *words, "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    done = torchrun(4, *words, "--tensor-parallel", "2", "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    one, two = Run.open(tmp_path / "one"), Run.open(tmp_path / "two")
    assert len(two.parts("conversations")) == 2
    assert two.generations["text"].tolist() == one.generations["text"].tolist()
    assert farthest(one, two) < 1e-4


@pytest.mark.slow
def test_what_the_first_rank_refuses_is_said_once(tiny_model_dir, tmp_path):
    out = tmp_path / "run"
    words = ["--model", tiny_model_dir, "--limit", "6", "--max-new-tokens", "4"]
    words += ["--tensor-parallel", "2", "--out", str(out)]
    assert torchrun(2, *words).returncode == 0
    done = torchrun(2, *words, "--seed", "3")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "--seed is 0 there, 3 here" in errors[0]
