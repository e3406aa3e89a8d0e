"""Writing a run: resuming, shards, refusals, and every state that a kill can leave."""

import errno
import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from runs import (
    PARTS,
    RECORD,
    add_part,
    contexts_table,
    files_named,
    files_under,
    generations_table,
    record_of,
    residuals_of,
    with_column,
    write_by_hand,
)

from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter, layout, writer

NAMES = layout.part_names(len(PARTS))


def test_a_part_is_entered_with_its_files_contexts_and_rows(tmp_path, by_hand):
    manifests = [f"manifests/contexts-{name}.json" for name in NAMES]
    parts = [json.loads((by_hand.path / file).read_text()) for file in manifests]
    assert [part["name"] for part in parts] == NAMES
    assert [part["contexts"] for part in parts] == [len(part) for part in PARTS]
    assert parts[2]["files"] == {}  # of a part without contexts
    rest = {"run.json", "README.md", *manifests}
    assert {*files_under(by_hand.path)} == {*files_named(by_hand.path)} | rest
    with RunWriter(tmp_path / "run", RECORD) as run:
        run.start_session({"machine": "a"})
        nothing = contexts_table([]), generations_table([]), None, None
        run.add_contexts(NAMES[0], *nothing, batch_rows=64)
    read = Run.open(tmp_path / "run", unfinished=True)
    (session,) = read.sessions
    assert session["machine"] == "a" and session["begun"]
    (part,) = read.parts("contexts")
    assert part["batch_rows"] == 64


# -- responses ----------------------------------------------------------------------------------


def test_responses_are_parts_of_their_own(tmp_path):
    record = record_of(1, responses=2)

    def response(order: int) -> dict:
        said = {"query": 0, "draw": order, "order": order, "response": f"r{order}"}
        said["thought"] = f"t{order}"
        return said | {"finish_reason": "stop", "tokens": 3}

    with RunWriter(tmp_path / "run", record) as run:
        run.add_responses("00000", [response(0), response(1)])
        assert not Run.open(tmp_path / "run", unfinished=True).complete
        with RunWriter(tmp_path / "run", record) as other:
            other.add_responses("00001", [response(2)])
        assert run.finished_parts("responses") == {"00000": 2, "00001": 1}
    read = Run.open(tmp_path / "run", unfinished=True)
    assert read.counts == {"responses": 3, "contexts": 0} and not read.complete
    assert read.responses.to_dict("records") == [response(order) for order in range(3)]


# -- several processes --------------------------------------------------------------------------


def test_a_run_is_the_union_of_its_manifests(tmp_path, by_hand):
    out = tmp_path / "run"
    first = write_by_hand(out, parts=[0, 2])
    assert not first.complete and not (out / "README.md").exists()
    assert first.contexts["order"].tolist() == [0, 1]
    second = write_by_hand(out, parts=[1, 3])
    assert second.complete and (out / "README.md").is_file()
    assert second.digest() == by_hand.digest() and len(second.sessions) == 2
    with RunWriter(out, RECORD) as third:  # nothing is left to do
        assert third.finished_parts("contexts") == dict(zip(NAMES, map(len, PARTS), strict=True))
        assert not any(third.claim("contexts", name) for name in NAMES)


def test_a_part_is_computed_by_whoever_has_locked_it(tmp_path):
    out = tmp_path / "run"
    with RunWriter(out, RECORD) as one, RunWriter(out, RECORD) as other:
        assert one.claim("contexts", NAMES[0]) and one.claim("contexts", NAMES[0])
        assert not other.claim("contexts", NAMES[0]) and other.claim("contexts", NAMES[1])
        with pytest.raises(RuntimeError, match="part 00000 of the contexts is done, or another"):
            add_part(other, 0)
        add_part(one, 0)
        assert not one.claim("contexts", NAMES[0]) and not other.claim("contexts", NAMES[0])
        one.claim("contexts", NAMES[2])
    with RunWriter(out, RECORD) as later:  # what was given up, or held by a process that died
        assert [name for name in NAMES if later.claim("contexts", name)] == NAMES[1:]
        for part in (1, 2, 3):
            add_part(later, part)
    assert Run.open(out).complete and not list(out.rglob("*.lock"))


# -- going on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("generations/part-00001.parquet", "missing"),
        ("residuals/00001.safetensors", "cut"),
        ("residuals/00001.safetensors", "flipped"),
    ],
)
def test_a_damaged_part_is_named_dropped_and_made_again(by_hand, file, damage):
    digest, path = by_hand.digest(), by_hand.path / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    if damage == "missing":
        path.unlink()
    (problem,) = Run(by_hand.path).verify()
    assert path.name in problem
    last = by_hand.path / layout.manifest_file("contexts", NAMES[-1])
    unfinished = last.rename(by_hand.path / "last")
    with RunWriter(by_hand.path, RECORD) as run:  # hashes of tensors aren't compared yet
        assert len(run.find_damage("contexts", NAMES)) == (damage != "flipped")
    unfinished.rename(last)
    with RunWriter(by_hand.path, RECORD) as run, RunWriter(by_hand.path, RECORD) as other:
        assert run.find_damage("contexts", NAMES[2:]) == []  # it was asked for others
        for one in (other, run):
            (problem,) = one.find_damage("contexts", NAMES)
            assert path.name in problem and NAMES[1] not in one.finished_parts("contexts")
        assert run.claim("contexts", NAMES[1]) and not other.claim("contexts", NAMES[1])
    assert Run(by_hand.path).complete  # no manifest was removed
    again = write_by_hand(by_hand.path)
    assert again.complete and again.verify() == []
    assert again.digest() == digest


def test_another_run_is_refused_and_all_that_differs_is_named(by_hand, tmp_path):
    def refused(record: dict) -> str:
        with pytest.raises(UserError) as refusal:
            RunWriter(by_hand.path, record, name_of=lambda name: name.replace("settings.", "--"))
        return str(refusal.value)

    model = {"name": "by hand", "layers": 1, "d_model": 3, "vocab": 11}
    same = {"positions": ["response_end", "header_last"], "model": model, "dataset": "by hand"}
    RunWriter(by_hand.path, record_of(4, **same)).close()
    said = refused(record_of(4, **same | {"seed": 3, "samples": 1, "positions": []}))
    assert "by-hand holds another configuration: " in said
    assert "--samples is 2 there, 1 here, --seed is 0 there, 3 here; give another --out" in said
    RunWriter(tmp_path / "limited", record_of(4, **same | {"limit": 3})).close()
    with pytest.raises(UserError, match="limit is 3 there, all here;"):
        RunWriter(tmp_path / "limited", record_of(4, **same | {"limit": None}))
    assert "positions is response_end header_last there" in refused(
        record_of(4, **same | {"positions": ["header_last"]})
    )
    assert "weights_hash differs" in refused(
        record_of(4, **same | {"model": model | {"weights_hash": "ff"}})
    )
    assert "parts.contexts is 4 there, 5 here" in refused(record_of(5, **same))
    RunWriter(by_hand.path, RECORD).close()  # none of the refusals kept the lock


# -- when writing fails -------------------------------------------------------------------------


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_state_between_two_file_operations_can_be_gone_on_from(
    tmp_path, monkeypatch, by_hand, step
):
    """A kill can fall between any two operations on files, or in the middle of writing one."""
    live, states = tmp_path / "live", []

    def keep() -> None:
        states.append(tmp_path / f"state-{len(states)}")
        shutil.copytree(live, states[-1])

    def around(operation):  # a part's files are renamed, and its manifest isn't there yet
        def operate(*args, **kwargs):
            keep()
            operation(*args, **kwargs)
            keep()

        return operate

    def halfway(operation):
        def operate(data, path, **kwargs):
            Path(path).write_bytes(b"half")
            keep()
            return operation(data, path, **kwargs)

        return operate

    live.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", around(os.replace))
        patch.setattr(safetensors.torch, "save_file", halfway(safetensors.torch.save_file))
        patch.setattr(writer.pq, "write_table", halfway(writer.pq.write_table))
        write_by_hand(live / "run")
    assert len(states) > 40
    finished = set()
    for state in states[::step]:
        if (state / "run" / "run.json").exists():
            found = Run.open(state / "run", unfinished=True)
            assert found.verify() == []
            finished.add(len(found.parts("contexts")))
        done = write_by_hand(state / "run")
        assert done.complete and done.verify() == []
        assert done.digest() == by_hand.digest()
        shutil.rmtree(state)
    assert {0, 1, 3} <= finished


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
    long = text and np.random.default_rng(0).bytes(100_000).hex()
    contexts = with_column("text", long)(contexts_table(PARTS[0]))
    logits = torch.zeros(2, vocab, dtype=torch.float16)
    residuals = torch.stack([residuals_of(order) for order in PARTS[0]])
    stored = contexts, generations_table(PARTS[0]), logits, residuals
    with RunWriter(tmp_path / "run", RECORD) as run:
        with _files_of_at_most(60_000), pytest.raises(OSError) as refusal:
            run.add_contexts(NAMES[0], *stored)
        assert refusal.value.errno == errno.EFBIG
        assert not (run.path / file).exists() and run.finished_parts("contexts") == {}
        run.add_contexts(NAMES[0], *stored)
    assert Run.open(tmp_path / "run", unfinished=True).verify() == []
