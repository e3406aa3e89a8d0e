"""Units that are written while the next one is computed."""

import errno
import json
import threading
import time
from dataclasses import replace

import pytest

import ia_mech.collect.job
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.run import Run, RunWriter
from ia_mech.run.background import Background

CONFIG = SampleConfig(limit=6, grid=Grid((0.7, 1.0), 2, 6, 0), batch_rows=5)


def test_without_a_thread_work_is_done_at_once():
    here = []
    with Background(False) as behind:
        behind.do(lambda: here.append(threading.current_thread()))
        assert here == [threading.main_thread()]


def test_work_is_done_in_order_one_ahead_of_the_caller():
    done, may_go_on = [], threading.Event()
    with Background(True) as behind:
        behind.do(lambda: may_go_on.wait(10) and done.append(1))
        assert done == []  # and yet this line was reached
        threading.Timer(0.05, may_go_on.set).start()
        behind.do(lambda: done.append(2))
        assert done[0] == 1, "the second was given only after the first was done"
    assert done == [1, 2]


def test_what_work_raised_is_raised_at_the_next_one_or_at_the_end():
    def fail():
        raise OSError(errno.ENOSPC, "full")

    begun = []
    with pytest.raises(OSError, match="full"), Background(True) as behind:
        behind.do(fail)
        behind.do(lambda: begun.append(1))
    assert begun == []
    with pytest.raises(OSError, match="full"), Background(True) as behind:
        behind.do(fail)


def test_an_interrupt_waits_for_what_is_being_written():
    done = []
    with pytest.raises(KeyboardInterrupt), Background(True) as behind:
        behind.do(lambda: (time.sleep(0.1), done.append(1)))
        raise KeyboardInterrupt
    assert done == [1]


@pytest.fixture
def threaded(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(ia_mech.collect.job, "Background", lambda _: Background(True))
    monkeypatch.setattr("ia_mech.collect.preflight.UNIT_BATCHES", 1)


def test_a_run_written_behind_is_the_same(tiny_subject, tmp_path, progress, threaded, monkeypatch):
    threads, honest = [], RunWriter.add_contexts

    def noted(writer, *arguments):
        threads.append(threading.current_thread().name)
        honest(writer, *arguments)

    monkeypatch.setattr(RunWriter, "add_contexts", noted)
    behind = collect(CONFIG, tiny_subject, tmp_path / "behind", progress)
    assert len(threads) == 6 and all(name.startswith("writer") for name in threads)
    monkeypatch.setattr(ia_mech.collect.job, "Background", lambda _: Background(False))
    assert collect(CONFIG, tiny_subject, tmp_path / "at-once", progress).digest() == behind.digest()


def test_an_interrupted_run_keeps_what_was_being_written(
    tiny_subject, tmp_path, progress, threaded, monkeypatch
):
    """Ctrl-C while the second unit is computed and the first one is being written, slowly."""
    honest, job, units = RunWriter.add_contexts, ia_mech.collect.job._Job, []

    def slowly(writer, *arguments):
        time.sleep(0.3)
        honest(writer, *arguments)

    def interrupted(self, *arguments):
        units.append(1)
        if len(units) == 2:
            raise KeyboardInterrupt
        return run_contexts(self, *arguments)

    run_contexts = job._run_contexts
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "add_contexts", slowly)
        patch.setattr(job, "_run_contexts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    parts = json.loads((tmp_path / "run" / "manifest.json").read_text())["parts"]
    assert [part["contexts"] for part in parts if part["kind"] == "contexts"] == [1]
    assert Run.open(tmp_path / "run").verify() == []
    whole = collect(CONFIG, tiny_subject, tmp_path / "run", progress)
    assert whole.digest() == collect(CONFIG, tiny_subject, tmp_path / "again", progress).digest()


def test_what_was_noted_is_what_it_was_then(tiny_subject, tmp_path, progress):
    """Another thread may be writing the manifest while its caller goes on to change it."""
    run = collect(replace(CONFIG, limit=1), tiny_subject, tmp_path / "run", progress)
    with RunWriter(run.path) as writer:
        halved = [4]
        writer.note("out_of_memory", halved)
        halved.append(2)
        assert writer.manifest["sessions"][-1]["out_of_memory"] == [4]


def test_a_full_disk_is_told(tiny_subject, tmp_path, progress, threaded, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunWriter, "add_contexts", full)
    with pytest.raises(UserError, match="No space left"):
        collect(replace(CONFIG, limit=1), tiny_subject, tmp_path / "run", progress)
