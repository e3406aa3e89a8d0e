"""Servers at fault, and judges that are stopped: nothing is lost, nothing is bought twice.

The client is real, the server a stub. Kills are in ``test_kills``.
"""

import email.utils
import json
import threading
import time
from collections import Counter

import pytest
from judging import KEY, QUERY, RESPONSE, Recorded, items, judge_for, one
from stub_server import DROP, HANG, Reply, StubServer, Wire, completion, error, turn_of

from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.judging import judge_items
from ia_mech.judge.llm import MOST_FAILURES, MOST_REJECTED
from ia_mech.judge.server import ChatServer
from ia_mech.judge.verdict import Item

WHOLE = completion().body
GOOD = json.loads(WHOLE)


@pytest.fixture(autouse=True)
def naps(monkeypatch) -> list[float]:
    """A key; and the client's waits before retries, which take no time."""
    waits: list[float] = []

    def nap(_, ended: threading.Event, seconds: float) -> bool:
        waits.append(seconds)
        return False

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(ChatServer, "_wait", nap)
    return waits


def speaking(**message) -> Reply:
    return Reply(200, GOOD | {"choices": [{"message": message, "finish_reason": "stop"}]})


def used(prompt, written) -> Reply:
    usage = {"prompt_tokens": prompt, "completion_tokens": written}
    return Reply(200, GOOD | {"usage": usage})


PASSING = {  # is requested twice: a single retry is allowed
    "429": error(429, f"slow, {KEY}"),
    "429 for seconds": error(429, "slow", Retry_After="2"),
    "500": error(500, f"at {KEY}"),
    "503 packed garbage": Reply(503, "hm", Content_Encoding="gzip"),
    "408": error(408, "late"),
    "an error with 200": Reply(200, {"error": {"message": KEY}}),
    "429 with 200": Reply(200, {"error": {"message": KEY, "code": 429}}),
    "an error in the choice": Reply(200, {"choices": [{"error": {"message": KEY}}]}),
    "closed before the headers": DROP,
    "reset": Wire(reset=True),
    "no HTTP": Wire(b"hello\r\n\r\n"),
    "closed within the body": Reply(200, WHOLE[:150], Content_Length=str(len(WHOLE))),
}
ARRIVED = {  # with the status of its verdict; is requested once
    "a truncated body": ("unavailable", Reply(200, WHOLE[:150])),
    "an empty body": ("unavailable", Reply(200)),
    "no UTF-8": ("unavailable", Reply(200, WHOLE.encode().replace(b"lens", b"\xff"))),
    "a web page": ("unavailable", Reply(200, f"<html>{KEY}</html>")),
    "an event stream": ("unavailable", Reply(200, "data: {}\n\ndata: [DONE]\n")),
    "a list": ("unavailable", Reply(200, [GOOD])),
    "an error 400 with 200": ("rejected", Reply(200, {"error": {"message": KEY, "code": 400}})),
    "deep nesting": ("unavailable", Reply(200, '{"choices": ' + "[" * 100_000)),
    "choices null": ("unavailable", Reply(200, GOOD | {"choices": None})),
    "no choices": ("empty", Reply(200, GOOD | {"choices": []})),
    "choices of numbers": ("empty", Reply(200, GOOD | {"choices": [5]})),
    "content null": ("empty", speaking(content=None)),
    "content an object": ("empty", speaking(content={"category": "generic"})),
    "other words": ("unparsable", completion(f"hm {KEY}")),
    "a refusal": ("refused", completion(None, refusal=f"not with {KEY}")),
    "cut off": ("truncated", completion("{", finish="length")),
    "filtered": ("filtered", completion("", finish="content_filter")),
    "400": ("rejected", error(400, f"bad {KEY}")),
    "400 filtered": ("filtered", error(400, "no", code="content_filter")),
    "418": ("rejected", Reply(418, b"\xff\xfe")),
    "the key": ("judged", completion(f'{{"rationale": "is {KEY}", "category": "generic"}}')),
    "control characters": (
        "judged",
        completion('{"rationale": "\\u001b[2J\\ud800", "category": "generic"}'),
    ),
    "usage of text": ("judged", used("100", "20")),
    "usage below 0": ("judged", used(-100, -20)),
    "usage NaN": ("judged", used(float("nan"), True)),
    "usage beyond any": ("judged", used(10**30, 20)),
}
FAULTS = {name: ("unavailable", reply) for name, reply in PASSING.items()} | ARRIVED


def test_a_faulty_answer_costs_its_own_turn_and_is_asked_for_again(tmp_path, capsys):
    """Turns with a fault, between sound ones; then the same turns and a server without faults."""
    names = [name for fault in FAULTS for name in (fault, f"sound {fault}")]
    turns = [Item(QUERY, RESPONSE, name) for name in ["sound", *names]]
    mended = False

    def answer(body: dict, _: int):
        turn = turn_of(body)
        return completion() if mended or turn not in FAULTS else FAULTS[turn][1]

    with StubServer(answer) as stub:
        judge = judge_for(stub, retries=1, concurrency=1, price=(1.0, 1.0))
        first, _ = judge_items(turns, judge, Quiet(), cache_folder=tmp_path)
        requests = dict(stub.turns)
        mended = True
        again, _ = judge_items(turns, judge, Quiet(), cache_folder=tmp_path)
    for item, verdict in first.items():
        status = FAULTS.get(item.turn, ("judged", None))[0]
        assert (verdict.status, bool(verdict.error)) == (status, status != "judged"), item.turn
        assert verdict.error.isprintable() and 0 <= verdict.prompt_tokens <= 100
        assert requests[item.turn] == 1 + (item.turn in PASSING), item.turn
        again_asked = status not in ("judged", "truncated")  # what was cut off would be again
        assert stub.turns[item.turn] == requests[item.turn] + again_asked, item.turn
    other_words = first[Item(QUERY, RESPONSE, "other words")]
    assert (other_words.prompt_tokens, other_words.completion_tokens) == (100, 20)
    assert other_words.cost == pytest.approx(120e-6)  # it was billed, though unparsable
    assert {verdict.status for verdict in again.values()} == {"judged", "truncated"}
    assert set(stub.keys) == {f"Bearer {KEY}"}
    files = "".join(path.read_text() for path in tmp_path.iterdir())
    shown = files + repr(first) + "".join(capsys.readouterr())
    assert "is [key]" in shown and KEY not in shown


AWAY = "http://elsewhere.invalid/v1/chat/completions"


@pytest.mark.parametrize(
    ("reply", "fragment"),
    [
        (error(401, f"no key {KEY[:12]}"), "refuses requests (HTTP 401"),
        (error(402, f"{KEY} owes"), "add credit"),
        (error(429, KEY, code="insufficient_quota"), "add credit"),
        (error(404, f"no model {KEY}"), "check --model"),
        (Reply(301, Location=f"{AWAY}?{KEY}"), f"redirects them to {AWAY}"),
        (Reply(307, Location=f"{AWAY}?{KEY}"), f"redirects them to {AWAY}"),
        (Reply(307), "redirects them to nowhere"),
    ],
)
def test_what_no_turn_would_get_past_ends_the_judging(reply, fragment, tmp_path):
    with StubServer(lambda body, n: reply if n > 2 else completion()) as stub:
        judge = judge_for(stub, concurrency=1)
        with pytest.raises(UserError) as raised:
            judge_items(items(7), judge, Quiet(), cache_folder=tmp_path)
        assert set(stub.turns) == {f"turn {n}" for n in range(4)}
    assert fragment in str(raised.value) and KEY[:12] not in str(raised.value)
    assert kept(judge, tmp_path) == {"turn 0", "turn 1", "turn 2"}


def test_a_slow_server_is_given_more_time(monkeypatch):
    """It takes longer than the limit at first, and than twice that."""
    limits, post = [], ChatServer.post

    def noted(server, request, limit):
        limits.append(limit)
        return post(server, request, limit)

    monkeypatch.setattr(ChatServer, "post", noted)
    with StubServer(lambda _, n: HANG if n < 2 else completion()) as stub:
        judge = judge_for(stub, timeout=0.2)
        assert [v.status for v in judge.judge(items(2))] == ["judged", "judged"]
    assert limits == [0.2, 0.4, 0.8, 0.8] and "the time limit is 0.8 s now" in judge.caveat


def test_a_hang_ends_after_a_few_timeouts():
    with StubServer(lambda *_: HANG) as stub, pytest.raises(UserError, match="doesn't answer"):
        one(judge_for(stub, timeout=0.1))
    assert len(stub.bodies) == 4


def test_the_server_says_how_long_to_wait(naps):
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    waits = [error(429, "slow", Retry_After=given) for given in ("7", "300")]
    replies = [*waits, error(503, "no", Retry_After=date), error(500, "oh")]
    with StubServer(lambda _, n: [*replies, completion()][n]) as stub:
        assert one(judge_for(stub)).status == "judged"
    assert naps[:2] == [7, 300] and 7 < naps[2] <= 100 and naps[3] < 7


def test_a_server_that_wants_to_be_left_alone_for_long_ends_the_judging(naps):
    for given in ("3600", "1e999"):
        replies = [completion(), error(429, "slow", Retry_After=given)]
        with StubServer(lambda _, n, replies=replies: replies[n]) as stub:
            judge = judge_for(stub, concurrency=1)
            with pytest.raises(
                UserError, match=r"wants to be asked again in .*; give the same com"
            ):
                judge.judge(items(5))
        assert len(stub.bodies) == 2 and naps == []


# -- a server that is no good ----------------------------------------------------------------------

CONCURRENCY = 3
UNDER_WAY = CONCURRENCY - 1  # besides the request that ends the judging


def gives_up(stub: StubServer, folder, **options) -> str:
    judge = judge_for(stub, concurrency=CONCURRENCY, retries=0, **options)
    with pytest.raises(UserError) as raised:
        judge_items(items(40), judge, Quiet(), cache_folder=folder)
    return str(raised.value)


def test_a_server_that_fails_again_and_again_is_given_up(tmp_path):
    """After it has answered; requests go one by one, so that their order is known."""
    failures = [error(500, "out of memory")] * MOST_FAILURES
    replies = [completion(), *failures[1:], completion(), *failures]
    with StubServer(lambda _, n: replies[n]) as stub:
        judge = judge_for(stub, concurrency=1, retries=0)
        with pytest.raises(UserError, match=f"failed {MOST_FAILURES} times in a row, .*HTTP 500"):
            judge_items(items(40), judge, Quiet(), cache_folder=tmp_path)
    assert len(stub.bodies) == len(replies) and max(stub.turns.values()) == 1


WRONG_SERVERS = {
    "no server": (Wire(b"hello\r\n\r\n"), "doesn't answer"),
    "web pages": (Reply(200, "<html>"), "not a chat completion: '<html>'"),
    "another form": (error(400, "Invalid", param="response_format"), "refuses --mode json_schema"),
}


@pytest.mark.parametrize("name", WRONG_SERVERS)
def test_what_no_request_would_get_past_is_told_after_one(name, tmp_path):
    """The first request goes alone, however many may be under way later."""
    reply, fragment = WRONG_SERVERS[name]
    with StubServer(lambda *_: reply) as stub:
        assert fragment in gives_up(stub, tmp_path)
    assert len(stub.bodies) == 1


def test_an_address_without_a_server_is_told_at_once(naps, tmp_path):
    with StubServer() as stub:
        pass
    judge = judge_for(stub)
    with pytest.raises(UserError, match=r"refused.*check the server, --base-url"):
        judge_items(items(40), judge, Quiet(), cache_folder=tmp_path)
    assert naps == []


def test_a_server_that_takes_no_item_at_all_is_given_up(tmp_path):
    with StubServer(lambda *_: error(400, "no")) as stub:
        assert "HTTP 400" in gives_up(stub, tmp_path)
    assert MOST_REJECTED <= len(stub.bodies) <= MOST_REJECTED + UNDER_WAY
    with StubServer(lambda body, n: error(400, "long") if n else completion()) as stub:
        judge = judge_for(stub, concurrency=1)
        verdicts, _ = judge_items(items(12), judge, Quiet(), cache_folder=tmp_path)
    assert Counter(v.status for v in verdicts.values()) == {"judged": 1, "rejected": 11}


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
        _, cached = judge_items(items(40), rest, Quiet(), cache_folder=tmp_path)
    assert len(cached) == done and set(stub.turns.values()) == {1}


# -- many at once, and ends ------------------------------------------------------------------------


def kept(judge, folder) -> set[str]:
    with VerdictCache(judge.identity, folder) as cache:
        return {item.turn for item in items(40) if cache.get(item)}


def test_so_many_requests_are_under_way_at_once_and_no_more(tmp_path):
    together = threading.Barrier(CONCURRENCY)

    def answer(_, n: int) -> Reply:
        if n:
            together.wait(60)
        return completion()

    with StubServer(answer) as stub:
        judge = judge_for(stub, concurrency=CONCURRENCY)
        judge_items(items(1 + 4 * CONCURRENCY), judge, Quiet(), cache_folder=tmp_path)
    assert stub.most == CONCURRENCY


def test_what_is_under_way_when_judging_ends_is_kept(tmp_path):
    with StubServer(delay=0.05) as stub:
        judge = judge_for(stub, concurrency=6)
        with pytest.raises(KeyboardInterrupt):
            judge_items(items(40), judge, Recorded(at=2), cache_folder=tmp_path)
        requested = set(stub.turns)
        assert kept(judge, tmp_path) == requested and 2 <= len(requested) < 40
        judge_items(items(40), judge, Quiet(), cache_folder=tmp_path)
    assert set(stub.turns.values()) == {1}


def test_a_disk_that_is_full_ends_the_judging(tmp_path, monkeypatch):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(VerdictCache, "put", full)
    with StubServer() as stub, pytest.raises(OSError, match="No space"):
        judge_items(items(40), judge_for(stub, concurrency=3), Quiet(), cache_folder=tmp_path)
    assert len(stub.bodies) <= 3


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch, variable):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("NO_PROXY", raising=False)
    with StubServer() as stub:
        for url in (stub.url, stub.url.replace("127.0.0.1", "localhost")):
            assert one(judge_for(stub, base_url=url)).category == "follow_up"
