"""The judge at a server over many items: retries, ends, money, the cache, interrupts.

Kills are in ``test_kills``.
"""

import asyncio
import email.utils
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from judging import KEY, Recorded, items, judge_for, one, verdicts_of
from stub_server import DROP, HANG, Reply, StubServer, completion, error, turn_of

from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge import llm
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.label import judge_items
from ia_mech.judge.llm import LlmJudge
from ia_mech.judge.verdict import Verdict


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    """A key in the environment, and no other server."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    """The waits that were asked for, which take no time."""
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(llm, "sleep", sleep)
    return asked


# -- retries ----------------------------------------------------------------------------------


def test_retry_after_is_honoured_in_seconds_and_as_a_date(naps):
    date = email.utils.formatdate(time.time() + 40, usegmt=True)
    replies = [error(429, "slow down", Retry_After="7"), error(429, "still", Retry_After=date)]
    with StubServer(lambda _, n: [*replies, completion()][n]) as stub:
        verdict = one(judge_for(stub))
    assert verdict.category == "genuine_follow_up"
    assert [round(nap) in range(low, low + 3) for nap, low in zip(naps, (7, 38), strict=True)]
    assert 6.5 < naps[0] < 8.1 and 38 < naps[1] < 41.1


def test_a_retry_after_of_hours_ends_the_run(naps):
    with (
        StubServer(lambda *_: error(429, "daily limit", Retry_After="7200")) as stub,
        pytest.raises(UserError, match=r"wants a wait of 7200 s .*same command"),
    ):
        one(judge_for(stub))
    assert naps == []


PASSING = [error(500, "oh"), error(409, "conflict"), error(408, "late"), DROP]


def test_errors_of_the_server_are_retried_after_bounded_doubling_waits(naps):
    with StubServer(lambda _, n: [*PASSING, completion()][n]) as stub:
        assert one(judge_for(stub)).category == "genuine_follow_up"
    assert len(stub.bodies) == 5 and len(naps) == 4
    assert all(nap <= 2**attempt for attempt, nap in enumerate(naps))
    for reply in PASSING:
        with StubServer(lambda *_: reply) as stub:  # noqa: B023
            verdict = one(judge_for(stub, retries=2))
        assert verdict.status == "unavailable" and len(stub.bodies) == 3
        assert verdict.error.startswith("after 3 attempts: ")


def test_a_hang_ends_after_the_timeout(naps):
    with StubServer(lambda *_: HANG) as stub:
        start = time.monotonic()
        verdict = one(judge_for(stub, timeout=0.2, retries=1))
    assert time.monotonic() - start < 3
    assert verdict.status == "unavailable"
    assert verdict.error == "after 2 attempts: no answer within 0.2 s"


# -- what ends a run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (error(401, f"Incorrect API key provided: {KEY}"), "refuses access .*OPENAI_API_KEY"),
        (error(403, "country"), "refuses access"),
        (error(402, "Insufficient Balance"), "no credit"),
        (error(429, "quota", code="insufficient_quota"), "no credit"),
        (error(404, "The model `stub-model` does not exist", code="model_not_found"), "no model"),
        (
            Reply(404, "<html>nginx</html>", Content_Type="text/html"),
            "check --model, and --base-url",
        ),
        (Reply(400, {"detail": "Server is pinned to 'x'; requested 'stub-model'."}), "the model"),
        (Reply(200, "<html>hello</html>", Content_Type="text/html"), "no chat completion"),
    ],
)
def test_what_no_item_would_get_past_ends_the_run_with_one_request(reply, problem):
    with StubServer(lambda *_: reply) as stub, pytest.raises(UserError, match=problem) as raised:
        verdicts_of(judge_for(stub), items(30))
    assert len(stub.bodies) == 1
    assert KEY not in str(raised.value) and "\n" not in str(raised.value)


def test_an_unreachable_server_is_an_error(naps):
    with StubServer() as stub:
        url = stub.url
    for base_url in (url, "http://no-such-host.invalid/v1"):
        with pytest.raises(UserError, match=r"can't be reached .*check --base-url"):
            verdicts_of(LlmJudge("m", base_url=base_url, retries=2), items(30))
        assert len(naps) == 2
        naps.clear()


def test_a_server_that_never_answers_is_given_up(naps):
    with StubServer(lambda *_: error(500, "out of memory")) as stub:
        judge, got = judge_for(stub, retries=1, concurrency=3), []
        with pytest.raises(UserError, match=r"requests in a row got no answer, .*out of memory"):
            got.extend(judge.judge(items(100), [0] * 100))
    assert llm.BREAKER <= len(got) <= llm.BREAKER + 3
    assert {verdict.status for _, verdict in got} == {"unavailable"}


def test_rejections_are_no_verdicts_before_the_server_has_answered_anything():
    with StubServer(lambda *_: error(400, "bad")) as stub:
        judge, got = judge_for(stub, concurrency=3), []
        with pytest.raises(UserError, match=r"rejected the first \d+ requests.*HTTP 400: bad"):
            got.extend(judge.judge(items(100), [0] * 100))
    assert got == []
    with StubServer(
        lambda body, _: error(400, "bad") if "9" in turn_of(body) else completion()
    ) as s:
        verdicts = verdicts_of(judge_for(s), items(40))
    assert Counter(v.status for v in verdicts) == {"judged": 36, "rejected": 4}


def test_verdicts_under_way_come_before_the_error():
    def answer(body, number):
        if number == 5:
            return error(401, "revoked")
        if number:
            time.sleep(0.15)
        return completion()

    with StubServer(answer) as stub:
        got = []
        with pytest.raises(UserError, match="refuses access"):
            got.extend(judge_for(stub, concurrency=5).judge(items(50), [0] * 50))
    assert len(got) == len(stub.bodies) - 1
    assert {verdict.status for _, verdict in got} == {"judged"}


# -- money ------------------------------------------------------------------------------------


def test_the_maximum_cost_is_never_exceeded(monkeypatch):
    monkeypatch.setattr(llm, "FIRST_COMPLETION", 30)
    # 100 prompt and 20 completion tokens a request: 0.003 dollars
    with StubServer(delay=0.01) as stub:
        judge, got = judge_for(stub, price=(10.0, 100.0), max_cost=0.2), []
        with pytest.raises(
            UserError, match=r"limits this invocation: .*; the same command goes on"
        ) as raised:
            got.extend(judge.judge(items(200), [0] * 200))
        spent = sum(verdict.cost for _, verdict in got)
        assert len(got) == len(stub.bodies)
        assert 0.15 < spent <= 0.2
        assert f"--max-cost 0.2 limits this invocation: ${spent:.4f} is spent in it" in str(
            raised.value
        )


def test_a_cost_limit_below_one_request_sends_none():
    with (
        StubServer() as stub,
        pytest.raises(
            UserError, match=r"\$0.0000 is spent in it, and .* may cost.*; give a larger"
        ),
    ):
        one(judge_for(stub, price=(10.0, 100.0), max_cost=0.01))
    assert stub.bodies == []


def test_unanswered_requests_count_against_the_limit(naps):
    with StubServer(lambda *_: HANG) as stub:
        options = {"price": (1.0, 1.0), "max_cost": 0.03, "timeout": 0.1}
        with pytest.raises(UserError, match="unanswered"):
            one(judge_for(stub, **options))
    assert 1 <= len(stub.bodies) <= 2


def test_the_estimate_says_how_it_was_made():
    judge = LlmJudge("m", base_url="http://x/v1", price=(1.0, 2.0))
    line = judge.estimate(items(1000))
    assert line.startswith("1,000 requests to m, about 3,")
    assert "characters / 4" in line and ", about $3." in line and "\n" not in line
    assert judge.estimate([]) == ""
    assert "$" not in LlmJudge("m", base_url="http://x/v1").estimate(items(2))


# -- many at once -----------------------------------------------------------------------------


def test_concurrency_is_used_and_bounded():
    with StubServer(delay=0.03) as stub:
        verdicts_of(judge_for(stub, concurrency=4), items(41))
    assert stub.most == 4
    with StubServer(delay=0.01) as stub:
        verdicts_of(judge_for(stub, concurrency=1), items(5))
    assert stub.most == 1


def test_no_more_answers_wait_than_concurrency_allows():
    with StubServer() as stub:
        stream = judge_for(stub, concurrency=3).judge(items(50), [0] * 50)
        for taken in range(1, 6):
            next(stream)
            time.sleep(0.05)
            assert len(stub.bodies) <= taken - 1 + 3, "the last one taken may not be written yet"
        stream.close()


def test_a_consumer_may_stop(naps):
    before = set(threading.enumerate())
    with StubServer(lambda _, n: HANG if n > 3 else completion()) as stub:
        stream = judge_for(stub, concurrency=2, timeout=30.0).judge(items(50), [0] * 50)
        next(stream)
        start = time.monotonic()
        stream.close()
        assert time.monotonic() - start < 2
        sent = len(stub.bodies)
        time.sleep(0.1)
        assert len(stub.bodies) == sent
    ours = [t for t in threading.enumerate() if t not in before and "_run" in t.name]
    for thread in ours:
        thread.join(5)
    assert not [thread for thread in ours if thread.is_alive()]


def test_an_interrupt_while_waiting_ends_at_once():
    with StubServer(lambda _, n: HANG if n else completion()) as stub:
        stream = judge_for(stub, timeout=30.0).judge(items(50), [0] * 50)
        next(stream)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert time.monotonic() - start < 2


def test_it_works_inside_a_running_loop():
    async def cell() -> list[Verdict]:
        return verdicts_of(judge_for(stub), items(3))

    with StubServer() as stub:
        assert len(asyncio.run(cell())) == 3


# -- with the cache ---------------------------------------------------------------------------


def test_failures_of_items_are_kept_and_those_of_the_server_are_not(tmp_path, naps):
    replies = {"turn 1": error(500, "oh"), "turn 2": completion(None, refusal="no")}
    with StubServer(lambda body, _: replies.get(turn_of(body), completion())) as stub:
        judge = judge_for(stub, retries=0)
        judge_items(items(4), judge, Quiet(), cache_folder=tmp_path)
        replies.clear()
        found, cached = judge_items(items(4), judge, Quiet(), cache_folder=tmp_path)
        assert len(cached) == 3 and stub.turns["turn 1"] == 2
        assert found[items(4)[2], 0].status == "refused"
        found, cached = judge_items(
            items(4), judge, Quiet(), cache_folder=tmp_path, retry_failed=True
        )
    assert {verdict.status for verdict in found.values()} == {"judged"}
    assert stub.turns == {"turn 0": 1, "turn 1": 2, "turn 2": 2, "turn 3": 1}


def test_a_cost_limit_keeps_what_was_paid_for(tmp_path, monkeypatch):
    monkeypatch.setattr(llm, "FIRST_COMPLETION", 30)
    with StubServer() as stub:
        options, folder = {"price": (10.0, 100.0)}, tmp_path
        judge = judge_for(stub, max_cost=0.15, **options)
        done = 0
        for _ in range(2):
            with pytest.raises(UserError, match="--max-cost") as raised:
                judge_items(items(200), judge, Quiet(), cache_folder=folder)
            before, done = done, len(stub.bodies)
            assert f"${(done - before) * 0.003:.4f} is spent in it" in str(raised.value)
            assert f"turns have cost ${done * 0.003:.4f} in all" in str(raised.value)
        assert before > 5 and done > before + 5, "the same command went on"
        _, cached = judge_items(
            items(200), judge_for(stub, max_cost=1.0, **options), Quiet(), cache_folder=folder
        )
    assert len(cached) == done > 5
    assert max(stub.turns.values()) == 1
    with VerdictCache(judge_for(stub).identity, folder) as cache:
        assert all(cache.get(item, 0) for item in items(200))


# -- interrupts and errors: what is kept -----------------------------------------------------------


class Slow(VerdictCache):
    """A cache on a slow disk; answers pile up behind its writes."""

    def put(self, *entry) -> None:
        time.sleep(0.02)
        super().put(*entry)


class Late(Recorded):
    """Interrupts once answers have come that are not taken yet."""

    def interrupt(self) -> None:
        time.sleep(0.2)
        super().interrupt()


def kept(judge: LlmJudge, folder: Path) -> set[str]:
    """The turns that a cache has."""
    with VerdictCache(judge.identity, folder, read_only=True) as cache:
        return {item.turn for item in items(200) if cache.get(item, 0)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_answers_that_came_before_an_interrupt_or_error_are_all_kept(tmp_path, monkeypatch, error):
    monkeypatch.setattr("ia_mech.judge.label.VerdictCache", Slow)
    with StubServer() as stub:
        judge, progress = judge_for(stub), Late(at=10, error=error)
        with pytest.raises(error):
            judge_items(items(200), judge, progress, cache_folder=tmp_path)
    assert len(stub.bodies) > 15 and progress.stopped == 1
    assert kept(judge, tmp_path) == set(stub.turns)
    assert len((next(tmp_path.glob("*.jsonl"))).read_text().splitlines()) == 1 + len(stub.bodies)


def test_a_fatal_refusal_keeps_what_was_received(tmp_path, monkeypatch):
    monkeypatch.setattr("ia_mech.judge.label.VerdictCache", Slow)
    with StubServer(lambda _, n: error(401, "revoked") if n == 30 else completion()) as stub:
        judge = judge_for(stub)
        with pytest.raises(UserError, match="refuses access"):
            judge_items(items(200), judge, Quiet(), cache_folder=tmp_path)
    assert len(kept(judge, tmp_path)) == len(stub.bodies) - 1 > 15


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

    with StubServer() as stub:
        judge = judge_for(stub)
        judge_items(items(1), judge, Quiet(), cache_folder=tmp_path)
        monkeypatch.setattr(llm.Session, "stop", stop)
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(9), judge, Late(at=1), cache_folder=tmp_path)
        assert kept(judge, tmp_path) == set(stub.turns)


def test_answers_under_way_when_interrupted_get_a_moment(tmp_path):
    with StubServer(delay=0.3) as stub:
        judge = judge_for(stub, concurrency=6)
        with pytest.raises(KeyboardInterrupt):  # the others are at the server
            judge_items(items(50), judge, Recorded(at=2), cache_folder=tmp_path)
    assert kept(judge, tmp_path) == set(stub.turns) and len(stub.bodies) < 20


def test_an_answer_that_is_asked_for_again_is_kept_when_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(llm, "GRACE_SECONDS", 0.1)
    with StubServer(lambda _, n: HANG if n else completion("hm")) as stub:
        judge = judge_for(stub, timeout=30.0, price=(1.0, 1.0))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(5), judge, Quiet(), cache_folder=tmp_path)
    with VerdictCache(judge.identity, tmp_path, read_only=True) as cache:
        verdict = cache.get(items(1)[0], 0)
    assert (verdict.status, verdict.cost) == ("unparsable", pytest.approx(120e-6))


def test_no_more_than_concurrency_are_in_flight_while_the_disk_is_slow(tmp_path, monkeypatch):
    """Requested and unwritten at every write: what a kill at that moment would cost."""
    unwritten = []

    class Counted(VerdictCache):
        def put(self, *entry) -> None:
            time.sleep(0.02)
            unwritten.append(len(stub.bodies) - len(unwritten))
            super().put(*entry)

    monkeypatch.setattr("ia_mech.judge.label.VerdictCache", Counted)
    with StubServer() as stub:
        judge_items(items(25), judge_for(stub, concurrency=4), Quiet(), cache_folder=tmp_path)
    assert len(unwritten) == 25 and max(unwritten) == 4
