"""The judge that asks a server, when it is interrupted, fails or is killed: what is kept."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from judging import KEY, Quiet, items, judge_for
from stub_server import HANG, StubServer, completion, error

from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.label import judge_items
from ia_mech.judge.llm import LlmJudge
from ia_mech.judge.llm import server as session
from ia_mech.judge.verdict import Verdict


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    """A key in the environment, and no other server."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


class Slow(VerdictCache):
    """A cache on a slow disk; answers pile up behind its writes."""

    def put(self, *entry) -> None:
        time.sleep(0.1)
        super().put(*entry)


def kept(judge: LlmJudge, folder: Path) -> set[str]:
    """The turns that a cache has."""
    with VerdictCache(judge.identity, folder, read_only=True) as cache:
        return {item.turn for item in items(200) if cache.get(item, 0)}


def test_answers_that_came_before_an_interrupt_are_all_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("ia_mech.judge.label.VerdictCache", Slow)

    class Interrupted(Quiet):
        def advance(self, verdict: Verdict) -> None:
            super().advance(verdict)
            if len(self.seen) == 10:
                time.sleep(0.2)  # the others' answers come, and wait
                raise KeyboardInterrupt

    with StubServer() as stub:
        judge = judge_for(stub)
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(200), judge, Interrupted(), cache_folder=tmp_path)
    assert len(stub.bodies) > 15
    assert kept(judge, tmp_path) == set(stub.turns)
    assert len((next(tmp_path.glob("*.jsonl"))).read_text().splitlines()) == 1 + len(stub.bodies)


def test_an_interrupt_before_the_write_loses_nothing(tmp_path, monkeypatch):
    """Ctrl-C comes when a verdict has been handed out and isn't in the cache yet."""

    class Once(Slow):
        puts = 0

        def put(self, *entry) -> None:
            Once.puts += 1
            if Once.puts == 6:
                raise KeyboardInterrupt
            super().put(*entry)

    monkeypatch.setattr("ia_mech.judge.label.VerdictCache", Once)
    with StubServer() as stub:
        judge = judge_for(stub)
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(200), judge, Quiet(), cache_folder=tmp_path)
    assert kept(judge, tmp_path) == set(stub.turns) and max(stub.turns.values()) == 1


def test_a_second_interrupt_while_the_first_is_served_keeps_what_came(tmp_path, monkeypatch):
    def stop(_) -> None:
        raise KeyboardInterrupt

    class Interrupted(Quiet):
        def advance(self, verdict: Verdict) -> None:
            time.sleep(0.3)
            raise KeyboardInterrupt

    with StubServer() as stub:
        judge = judge_for(stub)
        judge_items(items(1), judge, Quiet(), cache_folder=tmp_path)
        monkeypatch.setattr(session.Session, "stop", stop)
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(9), judge, Interrupted(), cache_folder=tmp_path)
        assert kept(judge, tmp_path) == set(stub.turns)


def test_answers_under_way_when_interrupted_get_a_moment(tmp_path):
    class Interrupted(Quiet):
        def advance(self, verdict: Verdict) -> None:
            super().advance(verdict)
            if len(self.seen) == 2:  # the others are at the server
                raise KeyboardInterrupt

    with StubServer(delay=0.3) as stub:
        judge = judge_for(stub, concurrency=6)
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(50), judge, Interrupted(), cache_folder=tmp_path)
    assert kept(judge, tmp_path) == set(stub.turns) and len(stub.bodies) < 20


def test_an_answer_that_is_asked_for_again_is_kept_when_interrupted(tmp_path):
    with StubServer(lambda _, n: HANG if n else completion("hm")) as stub:
        judge = judge_for(stub, timeout=30.0, price=(1.0, 1.0))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(5), judge, Quiet(), cache_folder=tmp_path)
    with VerdictCache(judge.identity, tmp_path, read_only=True) as cache:
        verdict = cache.get(items(1)[0], 0)
    assert (verdict.status, verdict.cost) == ("unparsable", pytest.approx(120e-6))


@pytest.mark.parametrize("broken", ["progress", "server"])
def test_a_fatal_error_keeps_what_was_received(tmp_path, monkeypatch, broken):
    monkeypatch.setattr("ia_mech.judge.label.VerdictCache", Slow)

    class Broken(Quiet):
        def advance(self, verdict: Verdict) -> None:
            super().advance(verdict)
            if len(self.seen) == 10 and broken == "progress":
                time.sleep(0.2)
                raise BrokenPipeError("stderr is gone")

    revoked = error(401, "revoked") if broken == "server" else completion()
    with StubServer(lambda _, n: revoked if n == 30 else completion()) as stub:
        judge = judge_for(stub)
        with pytest.raises((BrokenPipeError, UserError)):
            judge_items(items(200), judge, Broken(), cache_folder=tmp_path)
    assert len(kept(judge, tmp_path)) == len(stub.bodies) - (broken == "server") > 15


def test_no_more_than_concurrency_are_in_flight_while_the_disk_is_slow(tmp_path, monkeypatch):
    """Requested and unwritten at every write: what a kill at that moment would cost."""
    unwritten = []

    class Counted(Slow):
        def put(self, *entry) -> None:
            time.sleep(0.03)
            unwritten.append(len(stub.bodies) - len(unwritten))
            VerdictCache.put(self, *entry)

    monkeypatch.setattr("ia_mech.judge.label.VerdictCache", Counted)
    with StubServer() as stub:
        judge_items(items(40), judge_for(stub, concurrency=4), Quiet(), cache_folder=tmp_path)
    assert len(unwritten) == 40 and max(unwritten) == 4


KILLED = """
import sys
from pathlib import Path
from judging import Quiet, items
from ia_mech.judge.label import judge_items
from ia_mech.judge.llm import LlmJudge

judge = LlmJudge("stub-model", base_url=sys.argv[1], concurrency=4)
judge_items(items(80), judge, Quiet(), cache_folder=Path(sys.argv[2]))
"""


def test_a_kill_loses_no_verdict_and_pays_for_none_twice(tmp_path):
    with StubServer(delay=0.02) as stub:
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, stub.url, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        )
        try:
            deadline = time.monotonic() + 60
            while len(stub.bodies) < 30 and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == -signal.SIGKILL
        time.sleep(0.1)  # what was under way comes to its end at the server
        paid = dict(stub.turns)
        judge = LlmJudge("stub-model", base_url=stub.url, concurrency=4)
        verdicts, cached = judge_items(items(80), judge, Quiet(), cache_folder=tmp_path)
    assert len(verdicts) == 80 and {v.status for v in verdicts.values()} == {"judged"}
    assert 30 <= len(paid) < 80, "it was killed midway"
    assert all(stub.turns[item.turn] == 1 for item, _ in cached), "none is paid for twice"
    twice = [turn for turn, times in stub.turns.items() if times > 1]
    assert len(twice) <= 4 and len(cached) >= len(paid) - 4, "only what was under way is lost"
