"""A run in shards: the same rows and the same digest, whatever their number."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import Silent
from runs import rewritten
from shell import call, refusal

import ia_mech.engine.plan
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.collect.preflight import open_inputs
from ia_mech.collect.shards import WHOLE, Shard
from ia_mech.engine.plan import Grid, bucket_of
from ia_mech.errors import UserError
from ia_mech.merge import main as merging
from ia_mech.merge import merge
from ia_mech.run import Run, layout

CONFIG = SampleConfig(limit=12, grid=Grid((1.0,), 2, 4), batch_rows=4)
WRITTEN = replace(CONFIG, limit=9, response="generate", max_response_tokens=5)
SWAPS = replace(CONFIG, limit=6, grid=Grid((), 1, 3), contrasts=True, swaps=2)


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


def test_a_layer_is_read_from_its_own_files(shards):
    run = Run.open(shards)
    for path in (shards / "shards").rglob("layer_0[!2]/*.safetensors"):
        assert path.is_file()
    assert len(run.residuals(2, "header_last")) == 12
    read = {name for name in run._verified if "residuals" in name}
    assert len(read) == 2 and all("layer_02" in name for name in read)


@pytest.mark.parametrize("config", [SWAPS, WRITTEN], ids=["swaps", "written responses"])
def test_swaps_and_written_responses_do_not_depend_on_the_number_of_shards(
    tiny_subject, tmp_path, config
):
    whole = collect(config, tiny_subject, tmp_path / "whole", Silent())
    made(config, tiny_subject, tmp_path / "run", 2)
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
    for read in (Run.open, merge):
        with pytest.raises(UserError, match=f"shards 1/2 and 2/2 of .* {problem}"):
            read(copied)
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
    for read in (Run.open, merge):
        with pytest.raises(UserError, match=r"damaged: shards/2-of-2/contexts/.* bytes, .* were"):
            read(copied)
    collect(CONFIG, tiny_subject, copied, Silent(), shard=Shard(2, 2), repair=True)
    assert Run.open(copied).digest() == whole.digest()


# -- merging ------------------------------------------------------------------------------------


def test_merged_shards_are_the_run(copied, tiny_subject, whole, capfd):
    labels = Run.open(copied).labels
    kept = labels.write_judgements("rules", [], {"judge": "rules"}).read_bytes()
    outcome = call(merging, [str(copied)], capfd)
    assert outcome.status == 0 and outcome.out.startswith("12 contexts in one run: ")
    run = Run.open(copied)
    assert run.verify() == [] and run.complete and run.digest() == whole.digest()
    assert [part["contexts"] for part in run.parts("contexts")] == [12]
    snapshot = pq.read_table(copied / layout.CONVERSATIONS)
    assert snapshot.equals(pq.read_table(whole.path / layout.CONVERSATIONS))
    assert run.record == whole.record
    # The command of the whole run takes it for its own, also where a part is to be made again.
    next((copied / "contexts").glob("*.parquet")).unlink()
    again = collect(CONFIG, tiny_subject, copied, Silent(), repair=True)
    assert again.digest() == whole.digest()
    assert merge(copied, remove=True).digest() == whole.digest()
    assert not (copied / "shards").exists()
    assert (copied / "judgements" / "rules.parquet").read_bytes() == kept
    assert "holds no shards; give" in refusal(call(merging, [str(copied)], capfd))


def test_a_merge_that_is_killed_leaves_the_shards(copied, whole, monkeypatch):
    """Before every rename of the last step the folder is the run."""
    honest, moves = os.replace, []

    def replace_until(source, target):
        if Path(target).parent == copied:
            if len(moves) == until:
                raise KeyboardInterrupt
            moves.append(Path(target).name)
        honest(source, target)

    for until in range(8):  # noqa: B007 (of replace_until)
        moves.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_until)
            with pytest.raises(KeyboardInterrupt):
                merge(copied)
        assert Run.open(copied).digest() == whole.digest()
    assert moves[-1] == "run.json"
    assert merge(copied).digest() == whole.digest()
