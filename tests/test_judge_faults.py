"""Servers at fault, and judges that are stopped: nothing is lost, nothing is bought twice.

The client is real, the server a stub. Kills are in ``test_kills``.
"""

import email.utils
import json
import threading
import time
from collections import Counter
from typing import NamedTuple

import openai
import pytest
from judging import Recorded, items, judge_for, one
from stub_server import DROP, HANG, Reply, StubServer, Wire, completion, error, turn_of

from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.label import judge_items
from ia_mech.judge.llm import BREAKER, LlmJudge

KEY = "sk-proj-Zq81xWv0Kd73LmPb29Tn"
GOOD = json.loads(completion().body)
WHOLE = completion().body
RETRIES = 1


@pytest.fixture(autouse=True)
def naps(monkeypatch) -> list[float]:
    """A key; and the client's waits before retries, which take no time."""
    asked: list[float] = []

    def nap(client, *, retries_taken, max_retries, options, response) -> None:
        headers = response.headers if response else None
        left = max_retries - retries_taken
        asked.append(client._calculate_retry_timeout(left, options, headers))

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(openai.OpenAI, "_sleep_for_retry", nap)
    return asked


class Fault(NamedTuple):
    """What a server sends, what comes of it, and how often it is asked for a turn.

    The outcome is a verdict's status, or ``error: `` and what the user is told.
    """

    reply: Reply | Wire | str
    outcome: str
    requests: int = 1


def speaking(**message) -> Reply:
    return Reply(200, GOOD | {"choices": [{"message": message, "finish_reason": "stop"}]})


def used(prompt, written) -> Reply:
    usage = {"prompt_tokens": prompt, "completion_tokens": written}
    return Reply(200, GOOD | {"usage": usage})


AWAY = "http://elsewhere.invalid/v1/chat/completions"
FAULTS = {
    # what passes is retried
    "429": Fault(error(429, f"slow, {KEY}"), "unavailable", 2),
    "429 for seconds": Fault(error(429, "slow", Retry_After="2"), "unavailable", 2),
    "429 for ever": Fault(error(429, "slow", Retry_After="1e999"), "unavailable"),
    "500": Fault(error(500, f"at {KEY}"), "unavailable", 2),
    "503 packed garbage": Fault(Reply(503, "hm", Content_Encoding="gzip"), "unavailable", 2),
    "408": Fault(error(408, "late"), "unavailable", 2),
    "closed before the headers": Fault(DROP, "unavailable", 2),
    "reset": Fault(Wire(reset=True), "unavailable", 2),
    "no HTTP": Fault(Wire(b"hello\r\n\r\n"), "unavailable", 2),
    "closed within the body": Fault(
        Reply(200, WHOLE[:150], Content_Length=str(len(WHOLE))), "unavailable", 2
    ),
    # bodies that arrived aren't asked for again
    "a truncated body": Fault(Reply(200, WHOLE[:150]), "unavailable"),
    "an empty body": Fault(Reply(200), "unavailable"),
    "no UTF-8": Fault(Reply(200, WHOLE.encode().replace(b"lens", b"\xff")), "unavailable"),
    "a web page": Fault(Reply(200, f"<html>{KEY}</html>"), "unavailable"),
    "an event stream": Fault(Reply(200, "data: {}\n\ndata: [DONE]\n"), "unavailable"),
    "a list": Fault(Reply(200, [GOOD]), "unavailable"),
    "an error with 200": Fault(Reply(200, {"error": {"message": KEY}}), "unavailable"),
    "deep nesting": Fault(Reply(200, '{"choices": ' + "[" * 100_000), "unavailable"),
    "choices null": Fault(Reply(200, GOOD | {"choices": None}), "unavailable"),
    "no choices": Fault(Reply(200, GOOD | {"choices": []}), "empty"),
    "choices of numbers": Fault(Reply(200, GOOD | {"choices": [5]}), "empty"),
    "content null": Fault(speaking(content=None), "empty"),
    "content an object": Fault(speaking(content={"category": "generic"}), "empty"),
    "other words": Fault(completion(f"hm {KEY}"), "unparsable"),
    "a refusal": Fault(completion(None, refusal=f"not with {KEY}"), "refused"),
    "cut off": Fault(completion("{", finish="length"), "truncated"),
    "filtered": Fault(completion("", finish="content_filter"), "filtered"),
    "control characters": Fault(
        completion('{"rationale": "\\u001b[2J\\ud800", "category": "generic"}'), "judged"
    ),
    "usage of text": Fault(used("100", "20"), "judged"),
    "usage below 0": Fault(used(-100, -20), "judged"),
    "usage NaN": Fault(used(float("nan"), True), "judged"),
    # refusals
    "400": Fault(error(400, f"bad {KEY}"), "rejected"),
    "400 filtered": Fault(error(400, "no", code="content_filter"), "filtered"),
    "418": Fault(Reply(418, b"\xff\xfe"), "rejected"),
    "401": Fault(error(401, f"no key {KEY[:12]}"), "error: refuses access"),
    "402": Fault(error(402, f"{KEY} owes"), "error: no credit left"),
    "an empty quota": Fault(error(429, KEY, code="insufficient_quota"), "error: no credit left", 2),
    "404": Fault(error(404, f"no model {KEY}"), "error: knows no model"),
    **{
        f"{status} to another host": Fault(Reply(status, Location=f"{AWAY}?{KEY}"), "error: redir")
        for status in (301, 303, 307, 308)
    },
    "307 to nowhere": Fault(Reply(307), "error: redirects requests to nowhere"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(name, tmp_path, capsys):
    """Some turns are answered well, others badly; then the same is judged by a sound server."""
    reply, outcome, requests = FAULTS[name]
    turns, sound = items(7), {"turn 0", "turn 1", "turn 2"}
    mended = False

    def answer(body: dict, _: int):
        return completion() if mended or turn_of(body) in sound else reply

    def judge() -> dict:
        judge = judge_for(stub, retries=RETRIES, concurrency=2, price=(1.0, 1.0))
        return judge_items(turns, judge, Quiet(), cache_folder=tmp_path)[0]

    with StubServer(answer) as stub:
        told = ""
        try:
            found = judge()
        except UserError as problem:
            found, told = {}, str(problem)
        if outcome.startswith("error: "):
            assert outcome.removeprefix("error: ") in told and told.isprintable()
        else:
            assert told == ""
            for (item, _), verdict in found.items():
                expected = "judged" if item.turn in sound else outcome
                assert verdict.status == expected, verdict
                assert bool(verdict.error) == (expected != "judged")
                assert verdict.error.isprintable() and 0 <= verdict.prompt_tokens <= 100
        before = Counter(stub.turns)
        assert max(before.values()) <= requests
        mended = True
        again = judge()
    assert {verdict.status for verdict in again.values()} == {"judged"}
    assert all(stub.turns[turn] == 1 for turn in sound)
    for item in turns:
        once_more = outcome != "judged" and item.turn not in sound
        assert stub.turns[item.turn] <= before[item.turn] + (once_more or not before[item.turn])
    assert set(stub.keys) == {f"Bearer {KEY}"}
    files = "".join(path.read_text() for path in tmp_path.iterdir())
    assert KEY not in files + told + repr(found) + "".join(capsys.readouterr())


def test_a_hang_ends_after_the_timeout():
    with StubServer(lambda *_: HANG) as stub:
        verdict = one(judge_for(stub, timeout=0.2, retries=1))
        assert verdict.status == "unavailable" and len(stub.bodies) == 2


def test_the_server_says_how_long_to_wait(naps):
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    replies = [error(429, "slow", Retry_After="7"), error(503, "no", Retry_After=date)]
    with StubServer(lambda _, n: [*replies, error(500, "oh"), completion()][n]) as stub:
        assert one(judge_for(stub)).status == "judged"
    assert naps[0] == 7 and 7 < naps[1] <= 100 and naps[2] < 7


# -- a server that is no good ----------------------------------------------------------------------

CONCURRENCY = 3
UNDER_WAY = CONCURRENCY - 1  # besides the request that ends the judging


def gives_up(stub: StubServer, folder, **options) -> str:
    judge = judge_for(stub, concurrency=CONCURRENCY, retries=RETRIES, **options)
    with pytest.raises(UserError) as raised:
        judge_items(items(99), judge, Quiet(), cache_folder=folder)
    return str(raised.value)


def test_a_server_that_fails_again_and_again_is_given_up(tmp_path):
    with StubServer(lambda *_: error(500, "out of memory")) as stub:
        line = gives_up(stub, tmp_path)
    assert f"failed {BREAKER} times in a row, at last with: HTTP 500" in line
    assert len(stub.turns) <= BREAKER + UNDER_WAY
    line = gives_up(stub, tmp_path)  # it is gone
    assert "in a row" in line and "refused" in line and "check the server, --base-url" in line


def test_web_pages_end_the_run_even_after_answers(tmp_path):
    with StubServer(lambda _, n: Reply(200, "<html>") if n > 4 else completion()) as stub:
        assert "not a chat completion: '<html>'" in gives_up(stub, tmp_path)
    # Each of the last good answers may come after web pages that were sent later.
    assert len(stub.bodies) <= 5 + 2 * UNDER_WAY + BREAKER
    assert max(stub.turns.values()) == 1


def test_a_server_that_takes_no_item_at_all_is_given_up(tmp_path):
    with StubServer(lambda *_: error(400, "bad 'seed'")) as stub:
        assert "HTTP 400" in gives_up(stub, tmp_path)
    assert len(stub.bodies) <= BREAKER + UNDER_WAY
    with StubServer(lambda body, n: error(400, "long") if n else completion()) as stub:
        found, _ = judge_items(
            items(40), judge_for(stub, concurrency=1), Quiet(), cache_folder=tmp_path
        )
    assert Counter(v.status for v in found.values()) == {"judged": 1, "rejected": 39}


def test_what_is_spent_goes_beyond_the_limit_by_what_is_under_way(tmp_path):
    """A request costs 0.003 dollars."""
    with StubServer() as stub:
        price, done = (10.0, 100.0), 0
        for _ in range(2):
            line = gives_up(stub, tmp_path, price=price, max_cost=0.029)
            assert line.startswith("--max-cost 0.029 is reached: $0.03") and "goes on" in line
            assert 10 <= len(stub.bodies) - done <= 10 + UNDER_WAY
            done = len(stub.bodies)
        rest = judge_for(stub, price=price, max_cost=1.0)
        _, cached = judge_items(items(99), rest, Quiet(), cache_folder=tmp_path)
    assert len(cached) == done and set(stub.turns.values()) == {1}


# -- many at once, and ends ------------------------------------------------------------------------


def kept(judge: LlmJudge, folder) -> set[str]:
    with VerdictCache(judge.identity, folder) as cache:
        return {item.turn for item in items(99) if cache.get(item, 0)}


def test_so_many_requests_are_under_way_at_once_and_no_more(tmp_path):
    together = threading.Barrier(CONCURRENCY)

    def answer(*_) -> Reply:
        together.wait(60)
        return completion()

    with StubServer(answer) as stub:
        judge = judge_for(stub, concurrency=CONCURRENCY)
        judge_items(items(4 * CONCURRENCY), judge, Quiet(), cache_folder=tmp_path)
    assert stub.most == CONCURRENCY


@pytest.mark.parametrize("end", [KeyboardInterrupt, BrokenPipeError])
def test_what_is_under_way_when_judging_ends_is_kept(end, tmp_path):
    with StubServer(delay=0.05) as stub:
        judge = judge_for(stub, concurrency=6)
        with pytest.raises(end):
            judge_items(items(99), judge, Recorded(at=2, error=end), cache_folder=tmp_path)
        asked = set(stub.turns)
        assert kept(judge, tmp_path) == asked and 2 <= len(asked) < 99
        judge_items(items(99), judge, Quiet(), cache_folder=tmp_path)
    assert set(stub.turns.values()) == {1}


def test_a_disk_that_is_full_ends_the_judging(tmp_path, monkeypatch):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(VerdictCache, "put", full)
    with StubServer() as stub, pytest.raises(OSError, match="No space"):
        judge_items(items(99), judge_for(stub, concurrency=3), Quiet(), cache_folder=tmp_path)
    assert len(stub.bodies) <= 3
