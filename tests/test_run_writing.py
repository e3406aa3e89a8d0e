"""What a writer may do to a run: merging, going on, damage, other processes, memory."""

import errno
import os
import resource
import shutil
import weakref
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import (
    CONFIG,
    CONTEXTS,
    RECORD,
    UNITS,
    add_unit,
    contexts_table,
    files_named,
    files_under,
    generations_table,
    resealed,
    residuals_of,
    sampled,
    snapshot_in,
    with_column,
    write_by_hand,
)

import ia_mech.collect.job
import ia_mech.engine.plan
from ia_mech.collect.config import SampleConfig
from ia_mech.engine.plan import Grid, bucket_of
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter, integrity, layout, writer

# -- merging ------------------------------------------------------------------------------------


def test_merging_keeps_the_content_and_removes_the_small_files(tmp_path, monkeypatch, by_hand):
    monkeypatch.setattr(layout, "PART_CONTEXTS", 5)
    with RunWriter.create(tmp_path / "run", RECORD, snapshot_in(tmp_path / "scratch")) as run:
        seen = []
        for unit in range(len(UNITS)):
            add_unit(run, unit)
            parts = Run.open(run.path)._parts
            seen.append([(part["name"], part["contexts"]) for part in parts])
            on_disk = [f for f in files_under(run.path) if "/" in f]
            assert on_disk == [f for f in files_named(run.path) if "/" in f]
        # Units have 2, 3, 2 and 1 contexts; a merge takes a new number.
        assert seen == [
            [("00000", 2)],
            [("00002", 5)],
            [("00002", 5), ("00003", 2)],
            [("00002", 5), ("00003", 2), ("00004", 1)],
        ]
        assert run.done("contexts") == {"0.0", "0.1", "0.2", "0.3"}
        assert run.count("contexts") == 8
        run.finish()
    done = Run.open(tmp_path / "run")
    assert [(p["name"], p["contexts"]) for p in done._parts] == [("00002", 5), ("00005", 3)]
    assert done._parts[0]["units"] == ["0.0", "0.1"]
    assert done.complete and done.verify() == []
    assert done.digest() == by_hand.digest()


def test_no_context_is_written_more_than_twice_before_the_end(tmp_path, monkeypatch):
    """Merges that leave a part just short of full would write it again with every unit."""
    monkeypatch.setattr(layout, "PART_CONTEXTS", 20)
    written = []
    write = RunWriter._write_file

    def count(self, file, data):
        if file.startswith("responses/"):
            written.append(data.num_rows)
        return write(self, file, data)

    monkeypatch.setattr(RunWriter, "_write_file", count)
    with RunWriter.create(tmp_path / "run", RECORD, snapshot_in(tmp_path / "scratch")) as run:
        for unit in range(30):
            orders = range(unit * 3, unit * 3 + 3)
            rows = [{"order": o, "response": str(o), "finish_reason": "length"} for o in orders]
            run.add_responses(f"{unit}.0", rows)
        assert sum(written) <= 2 * 90
        assert len(run._parts("responses")) == 4 + 2  # four of 21, and two units so far
        found = run.read_responses()
        assert {o: found[o]["response"] for o in (4, 45, 80)} == {4: "4", 45: "45", 80: "80"}
        of_a_part = run.read_responses(1)
        assert set(of_a_part) == set(range(21)) and of_a_part[5]["response"] == "5"
        assert run.read_responses(30) == {}


# -- going on, orphans and damage ---------------------------------------------------------------


def test_orphans_are_removed_and_what_is_not_the_writers_is_kept(by_hand):
    part = by_hand._parts[0]["name"]
    orphans = [
        "contexts/part-00099.parquet",
        f"contexts/part-{part}.parquet.tmp",
        "generations/part-00099.parquet",
        "header_logits/00099.safetensors",
        "residuals/layer_01/00099.safetensors.tmp",
        "residuals/layer_07/00000.safetensors",
        "responses/part-00000.parquet",
    ]
    orphans.append("manifest.json.elsewhere-99.tmp")  # the lock says that its writer is gone
    others = ["judgements/rules.parquet", "probes/first/card.json", "report.html", "notes.tmp"]
    before = files_under(by_hand.path)
    for name in orphans + others:
        path = by_hand.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    assert Run.open(by_hand.path).digest() == by_hand.digest()
    RunWriter.resume(by_hand.path, RECORD).close()
    assert files_under(by_hand.path) == sorted(before + others)


def _truncate(path: Path) -> str:
    size = path.stat().st_size
    with open(path, "rb+") as handle:
        handle.truncate(size - 1)
    return f"has {size - 1} bytes, {size} were written"


def _flip(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "the content of .* is not what was written"


def _remove(path: Path) -> str:
    path.unlink()
    return "is missing"


DAMAGES = {"truncated": _truncate, "flipped": _flip, "missing": _remove}


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        ("truncated", "contexts/part-00002.parquet"),
        ("missing", "header_logits/00002.safetensors"),
        ("flipped", "residuals/layer_01/00002.safetensors"),
    ],
)
def test_a_damaged_part_is_named_and_made_again(parted, tmp_path, tiny_subject, file, damage):
    out = shutil.copytree(parted.path, tmp_path / "run")
    problem = DAMAGES[damage](out / file)
    named = rf"part 00002 of .*run is damaged: .*{problem}"
    if damage == "flipped":  # sizes are compared on opening, contents when asked to
        assert len(Run.open(out).verify()) == 1
        assert Run.open(out).verify()[0].startswith("part 00002: ")
        assert file in Run.open(out).verify()[0]
    else:
        with pytest.raises(UserError, match=named + "; run the command .* with --repair"):
            Run.open(out)
    with pytest.raises(UserError, match=named + "; add --repair") as refusal:
        sampled(CONFIG, tiny_subject, out)
    assert file in refusal.value.problem
    assert files_under(out) == [
        f for f in files_under(parted.path) if damage != "missing" or f != file
    ]
    repaired = sampled(CONFIG, tiny_subject, out, repair=True)
    assert repaired.complete and repaired.verify() == []
    assert repaired.digest() == parted.digest()
    assert "00002" not in [part["name"] for part in repaired._parts]


def test_a_damaged_part_of_responses_is_made_again(tiny_subject, tmp_path):
    config = SampleConfig(limit=3, grid=Grid((), 1, 2), response="generate", max_response_tokens=3)
    run = sampled(config, tiny_subject, tmp_path / "run")
    before = run.digest()
    _flip(next((run.path / "responses").iterdir()))
    with pytest.raises(UserError, match=r"part 00000 of .* responses/part-00000.parquet is not"):
        sampled(config, tiny_subject, run.path)
    repaired = sampled(config, tiny_subject, run.path, repair=True)
    assert repaired.complete and repaired.verify() == []
    assert repaired.digest() == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_conversations_are_named_and_read_again(by_hand, tmp_path, damage):
    file = by_hand.path / "conversations.parquet"
    content, digest = file.read_bytes(), by_hand.digest()
    problem = DAMAGES[damage](file)
    assert len(by_hand.verify()) == 1
    assert by_hand.verify()[0].startswith("part conversations: ")
    with pytest.raises(UserError, match=f"part conversations of .* is damaged: .*{problem}"):
        RunWriter.resume(by_hand.path, RECORD, snapshot_in(tmp_path / "scratch"))
    with pytest.raises(UserError, match=r"is damaged.*remove the folder and sample again"):
        RunWriter.resume(by_hand.path, RECORD, repair=True)
    repaired = write_by_hand(by_hand.path, tmp_path / "scratch", repair=True)
    assert file.read_bytes() == content
    assert repaired.complete and repaired.verify() == []
    assert repaired.digest() == digest


def test_a_whole_run_is_not_written_again(merged, tmp_path, tiny_subject):
    out = shutil.copytree(merged.path, tmp_path / "run")
    before = {name: (out / name).stat().st_mtime_ns for name in files_under(out) if name != ".lock"}
    again = sampled(CONFIG, tiny_subject, out, repair=True)
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert again.digest() == merged.digest()


def test_another_configuration_is_refused_with_what_differs(merged, tmp_path, tiny_subject):
    out = shutil.copytree(merged.path, tmp_path / "run")
    other = SampleConfig(limit=CONTEXTS, grid=Grid((0.7,), 2, 6, 1), batch_rows=4)
    with pytest.raises(UserError) as refusal:
        sampled(other, tiny_subject, out)
    assert refusal.value.problem == (
        f"{out} holds another configuration: --seed is 0 there, 1 here, "
        "--temperatures is 0.7 1.0 there, 0.7 here"
    )
    assert refusal.value.remedy == "give another --out, or the configuration that it holds"
    assert Run.open(out).digest() == merged.digest()


def test_other_conversations_and_another_model_are_refused(by_hand):
    known = RECORD["identity"] | {"conversations": {"count": 8, "sha256": "ab"}}
    other = known | {"conversations": {"count": 8, "sha256": "cd"}}
    for there, wanted, said in (
        (known, other, "conversations.sha256 differs;"),
        (known, known | {"positions": ["header_last"]}, "positions is response_end header_last th"),
    ):
        integrity.write_json(by_hand.path / layout.RUN, RECORD | {"identity": there})
        resealed(by_hand.path)
        with pytest.raises(UserError, match=f"holds another configuration: {said}"):
            RunWriter.resume(by_hand.path, RECORD | {"identity": wanted})
    integrity.write_json(by_hand.path / layout.RUN, RECORD)
    resealed(by_hand.path)
    RunWriter.resume(by_hand.path, RECORD).close()


# -- more than one process ----------------------------------------------------------------------


def test_a_second_writer_is_refused(tmp_path):
    busy = "run is being written by another process; wait for it, or give another --out"
    with RunWriter.create(tmp_path / "run", RECORD, snapshot_in(tmp_path / "a")):
        with pytest.raises(UserError, match=busy):
            RunWriter.resume(tmp_path / "run", RECORD)
        with pytest.raises(UserError, match=busy):  # both found no run and began one
            RunWriter.create(tmp_path / "run", RECORD, snapshot_in(tmp_path / "b"))
        assert not Run.open(tmp_path / "run").complete  # a reader is not a writer
    RunWriter.resume(tmp_path / "run", RECORD).close()


# -- when writing fails -------------------------------------------------------------------------


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_state_between_two_file_operations_can_be_gone_on_from(
    tmp_path, monkeypatch, by_hand, step
):
    """A kill can fall between any two operations on files, or in the middle of writing one."""
    monkeypatch.setattr(layout, "PART_CONTEXTS", 5)
    monkeypatch.setattr("os.fsync", lambda _: None)  # says nothing about a kill, and is slow
    live, states = tmp_path / "live", []

    def keep() -> None:
        states.append(tmp_path / f"state-{len(states)}")
        shutil.copytree(live, states[-1])

    def before(operation):
        def operate(*args, **kwargs):
            keep()
            return operation(*args, **kwargs)

        return operate

    def halfway(operation):
        def operate(data, path, **kwargs):
            Path(path).write_bytes(b"half")
            keep()
            return operation(data, path, **kwargs)

        return operate

    live.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", before(os.replace))
        patch.setattr(Path, "unlink", before(Path.unlink))
        patch.setattr(writer, "save_file", halfway(writer.save_file))
        patch.setattr(writer.pq, "write_table", halfway(writer.pq.write_table))
        write_by_hand(live / "run", live / "scratch")
    assert len(states) > 60
    begun, finished = 0, set()
    for state in states[::step]:
        out = state / "run"
        if out.exists():
            found = Run.open(out)
            assert found.verify() == []
            units = {unit for part in found._parts for unit in part["units"]}
            finished.add(len(units))
            begun += 1
            with RunWriter.resume(out, RECORD) as run:
                assert run.done("contexts") == units
            assert [f for f in files_under(out) if "/" in f] == [
                f for f in files_named(out) if "/" in f
            ]
        done = write_by_hand(out, state / "again")
        assert done.complete and done.verify() == []
        assert done.digest() == by_hand.digest()
        shutil.rmtree(state)
    assert begun >= len(states[::step]) - 7  # before its folder, with two files, is put in place
    assert finished == {0, 1, 2, 3, 4}


@contextmanager
def _files_of_at_most(size: int):
    """The kernel lets no file grow beyond a size; Python is told by an error, not by a signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("vocab", "text", "file"),
    [(40_000, "", "header_logits/00000.safetensors"), (10, "x", "contexts/part-00000.parquet")],
)
def test_what_the_kernel_refuses_to_write_is_an_oserror(tmp_path, vocab, text, file):
    """Also from the safetensors library, whose own error isn't one."""
    generator = np.random.default_rng(0)
    long = text and generator.bytes(100_000).hex()
    contexts = with_column("text", long)(contexts_table(UNITS[0]))
    logits = {"shifted": torch.zeros(2, vocab, dtype=torch.float16)}
    residuals = torch.stack([residuals_of(order) for order in UNITS[0]])
    with RunWriter.create(tmp_path / "run", RECORD, snapshot_in(tmp_path / "scratch")) as run:
        with _files_of_at_most(60_000), pytest.raises(OSError) as refusal:
            run.add_contexts("0.0", contexts, generations_table(UNITS[0]), logits, residuals)
        assert refusal.value.errno == errno.EFBIG
        assert not (run.path / file).exists()
    assert Run.open(tmp_path / "run")._parts == []
    with RunWriter.resume(tmp_path / "run", RECORD) as run:
        run.add_contexts("0.0", contexts, generations_table(UNITS[0]), logits, residuals)
    assert (tmp_path / "run" / file).is_file()
    assert Run.open(tmp_path / "run").verify() == []


# -- memory -------------------------------------------------------------------------------------


class Census:
    """Wraps a class: how many were made, and how many lived at once at most."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.made: list[weakref.ref] = []
        self.most = 0

    def __call__(self, *args, **kwargs):
        made = self.kind(*args, **kwargs)
        self.made.append(weakref.ref(made))
        self.most = max(self.most, sum(ref() is not None for ref in self.made))
        return made


def test_what_is_in_memory_does_not_grow_with_the_run(tiny_subject, tmp_path, monkeypatch):
    """Two buckets of contexts and two units of results live at once, however many come."""
    monkeypatch.setattr(ia_mech.engine.plan, "BUCKET", 3)
    items, results = (
        Census(ia_mech.collect.job.PreparedContext),
        Census(ia_mech.collect.job.ContextResult),
    )
    monkeypatch.setattr(ia_mech.collect.job, "PreparedContext", items)
    monkeypatch.setattr(ia_mech.collect.job, "ContextResult", results)
    config = SampleConfig(limit=12, grid=Grid((), 1, 2), batch_rows=1)
    run = sampled(config, tiny_subject, tmp_path / "run")
    assert len(items.made) == len(results.made) == 12
    names = [bucket_of(*row) for row in run.contexts[["dataset", "source_id"]].assign(n=4).values]
    sizes = [names.count(bucket) for bucket in range(4)]
    assert items.most == max(map(sum, pairwise(sizes))) < 12
    assert results.most <= 2 * 3  # a unit is three batches of one row
