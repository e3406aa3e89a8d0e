"""Parts computed by several threads: what is handed on, and what happens when one has to end."""

import os
import signal
import threading
import time

import psutil
import pytest
import torch

from ia_mech.engine import workers
from ia_mech.engine.passes import on_block
from ia_mech.engine.workers import Crew, compute_in_workers


def collected(items, compute, count):
    """What was handed on, and in which threads."""
    found, threads = {}, set()

    def done(item, result):
        found[item] = result
        threads.add(threading.current_thread())

    compute_in_workers(items, compute, done, count)
    return found, threads


def compute_until_stopped(_item):
    """Work that only ends when its worker is to end."""
    while True:
        on_block.get()()
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_every_item_is_handed_on_once_in_the_calling_thread(count):
    found, threads = collected(range(7), lambda item: item * item, count)
    assert found == {item: item * item for item in range(7)}
    assert threads == {threading.current_thread()}


def test_workers_have_compute_threads_of_their_own_and_the_caller_keeps_its():
    before = torch.get_num_threads()
    for number in (1, 3):
        found = {}
        compute_in_workers(
            range(4), lambda item: torch.get_num_threads(), found.__setitem__, 2, number
        )
        assert set(found.values()) == {number}
        assert torch.get_num_threads() == before


def test_workers_compute_at_the_same_time():
    meeting = threading.Barrier(3)
    found, _ = collected(range(3), lambda item: meeting.wait(timeout=30), 3)
    assert sorted(found.values()) == [0, 1, 2]


def test_an_error_ends_the_others_and_what_was_finished_is_handed_on_first():
    first_done, found, before = threading.Event(), {}, threading.active_count()

    def compute(item):
        if item == 0:
            return "whole"
        if item == 1:
            assert first_done.wait(timeout=30)
            raise ValueError("broken")
        return compute_until_stopped(item)

    def done(item, result):
        found[item] = result
        first_done.set()

    with pytest.raises(ValueError, match="broken"):
        compute_in_workers(range(5), compute, done, 3)
    assert found == {0: "whole"}
    assert threading.active_count() == before


def test_an_error_of_who_takes_results_ends_the_workers():
    before = threading.active_count()

    def done(item, result):
        raise OSError("disk full")

    def compute(item):
        return item if item == 0 else compute_until_stopped(item)

    with pytest.raises(OSError, match="disk full"):
        compute_in_workers(range(4), compute, done, 2)
    assert threading.active_count() == before


def test_an_interrupt_ends_the_workers_within_a_second():
    found, begun = {}, threading.Event()

    def compute(item):
        if item == 0:
            return "whole"
        begun.set()
        return compute_until_stopped(item)

    def interrupt():
        assert begun.wait(timeout=30)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        compute_in_workers(range(4), compute, found.__setitem__, 2)
    assert found == {0: "whole"}


@pytest.mark.parametrize(
    ("cores", "items", "asked", "shared"),
    [
        (2, 24, (None, None), (2, 1)),
        (2, 1, (None, None), (1, 2)),
        (4, 4, (None, None), (4, 1)),
        (4, 2, (None, None), (2, 2)),
        (64, 500, (None, None), (8, 8)),
        (4, 24, (None, 2), (2, 2)),
        (4, 24, (3, None), (3, 1)),
        (2, 24, (4, None), (4, 1)),
        (2, 24, (1, 1), (1, 1)),
        (2, 24, (1, None), (1, 1)),
        (4, 2, (1, None), (1, 2)),
        (1, 24, (None, 3), (1, 3)),
    ],
)
def test_cores_are_shared_among_workers(monkeypatch, cores, items, asked, shared):
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    assert Crew(*asked).for_items(items) == shared
    assert Crew(*asked).for_items(items, on_cpu=False) == (1, asked[1] or cores)


def test_there_are_no_more_workers_than_memory_holds_parts_of(monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: 4)
    free = psutil.virtual_memory().available
    assert Crew().for_items(24, free // 2 - 2**28) == (2, 1)
    assert Crew().for_items(24, 2 * free) == (1, 1)
    assert Crew(workers=3).for_items(24, 2 * free) == (3, 1)


@pytest.mark.parametrize(
    ("process", "folder", "names", "most"),
    [
        ("0::/a/b", "a", ("memory.max", "memory.current", "inactive_file"), "9000"),  # a parent's
        ("0::/a/b", "a/b", ("memory.max", "memory.current", "inactive_file"), "9000"),
        # In a container: the path is the host's, or /.
        ("2:cpu,memory:/host/1\n0::/", "memory", workers.GROUP_V1, "9000"),
        ("0::/", "", ("memory.max", "memory.current", "inactive_file"), "9000"),
        ("0::/", "", ("memory.max", "memory.current", "inactive_file"), "max"),
        ("0::/", "", ("memory.max", "memory.current", "inactive_file"), "what?"),
        ("0::/a", "b", ("memory.max", "memory.current", "inactive_file"), "9000"),  # not of ours
    ],
)
def test_memory_is_what_control_groups_allow(tmp_path, monkeypatch, process, folder, names, most):
    (tmp_path / "cgroup").write_text(process + "\n")
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    limit, used, cached = names
    (group / limit).write_text(most + "\n")
    (group / used).write_text("5000\n")
    (group / "memory.stat").write_text(f"anon 1\n{cached} 3000\nslab 7\n")
    monkeypatch.setattr(workers, "PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(workers, "GROUPS", tmp_path / "groups")
    found = workers.usable_memory()
    if most == "9000" and folder != "b":
        assert found == (9000, 7000)
        assert workers.Crew().for_items(24, 4000)[0] == 1
    else:
        assert found.total == psutil.virtual_memory().total
