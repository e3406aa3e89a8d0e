"""Servers that fail in every way we could think of: at once, and after good answers.

What comes of each is a right verdict, a failed verdict that is kept and never bought again, or one
line for the user. No part of the key reaches a file, a verdict or an error.
"""

import functools
import gzip
import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
from judging import items, judge_for
from stub_server import (
    DROP,
    HANG,
    VERDICT,
    Moved,
    Reply,
    StubServer,
    Wire,
    completion,
    error,
    turn_of,
)

from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge import llm
from ia_mech.judge.label import judge_items
from ia_mech.judge.mask import Mask
from ia_mech.judge.rubric import NAMES
from ia_mech.judge.verdict import Verdict

KEY = "sk-proj-Zq81xWv0Kd73LmPb29Tn"
GOOD = json.loads(completion().body)
WHOLE = completion().body.encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
RETRIES = 1


class Fault(NamedTuple):
    """A server's fault.

    Attributes:
        reply: what it sends; may depend on the address of the server.
        outcome: the status of the verdict, or ``error: `` and what the user is told.
        requests: the most per turn and call.
        first: the outcome if it has answered nothing before, where that differs.
    """

    reply: Reply | Wire | str | Callable[[StubServer], Reply]
    outcome: str
    requests: int = 1
    first: str = ""


def used(**usage) -> Reply:
    return Reply(200, GOOD | {"usage": usage})


def choosing(choices) -> Reply:
    return Reply(200, GOOD | {"choices": choices})


def speaking(**message) -> Reply:
    return choosing([{"message": message, "finish_reason": "stop"}])


def reasoned(rationale: str) -> Reply:
    return completion(json.dumps(VERDICT | {"rationale": rationale}))


def packed(body: bytes) -> Reply:
    return Reply(200, body, Content_Encoding="gzip")


def elsewhere(status: int) -> Callable[[StubServer], Reply]:
    """To a host that isn't there, whose name is a part of the key."""
    return lambda stub: Reply(status, Location=f"http://{KEY[4:]}.invalid/v1/chat/completions")


AWAY = "error: http://127.0.0.1:[0-9]+/v1 redirects requests from http://127.0.0.1:[0-9]+ to "
REDIRECTS = {
    **{f"{status} to another host": Fault(elsewhere(status), AWAY) for status in (301, 303, 307)},
    "308 to another port": Fault(
        lambda stub: Reply(308, Location="http://127.0.0.1:9/v1/chat/completions"),
        AWAY + "http://127.0.0.1:9; nothing is sent there; give .* --base-url",
    ),
    "308 to https": Fault(
        lambda stub: Reply(308, Location=stub.url.replace("http:", "https:") + "/chat"), AWAY
    ),
    "307 to a file": Fault(Reply(307, Location="file:///etc/passwd"), AWAY + "file:"),
    "308 within the origin": Fault(Moved(308, "/moved", completion()), "judged", 2),
    "307 with the whole address": Fault(
        lambda stub: Moved(307, f"{stub.origin}/moved", completion()), "judged", 2
    ),
    "301 in a circle": Fault(
        Reply(301, Location="/v1/chat/completions"), "error: .* more than 5 times in a row"
    ),
    "307 in a circle": Fault(
        Reply(307, Location="/v1/chat/completions"), "error: .* more than 5 times in a row", 6
    ),
    "307 to nowhere": Fault(Reply(307), "rejected"),
    "307 to no address": Fault(Reply(307, Location="http://host:port/"), "rejected"),
}
BODIES = {
    "a truncated body": Fault(Reply(200, WHOLE[:150]), "unparsable"),
    "an empty body": Fault(Reply(200), "empty"),
    "204": Fault(Wire(b"HTTP/1.1 204 No Content\r\n\r\n"), "empty"),
    "blanks": Fault(Reply(200, " \n" * 9), "empty"),
    "no UTF-8": Fault(Reply(200, WHOLE.replace(b"lens", b"l\xe9ns\xff")), "unparsable"),
    "a web page": Fault(
        Reply(200, f"<html>{KEY[:20]}…</html>"), "unparsable", 1, "error: .* web page, .*/v1"
    ),
    "text": Fault(Reply(200, f"Hello, {KEY[:20]}…"), "unparsable"),
    "an event stream": Fault(Reply(200, "data: {}\n\ndata: [DONE]\n"), "unparsable"),
    "other JSON": Fault(Reply(200, {"hello": "world"}), "unparsable"),
    "a list": Fault(Reply(200, [GOOD]), "unparsable"),
    "a number": Fault(Reply(200, "17"), "unparsable"),
    "an error with 200": Fault(
        Reply(200, {"error": {"message": f"{KEY} is busy", "code": 502}}), "unparsable"
    ),
    "deep nesting": Fault(Reply(200, "[" * 200_000), "unparsable"),
    "deep choices": Fault(Reply(200, '{"choices": ' + "[" * 100_000), "unparsable"),
    "a number of 9,000 digits": Fault(Reply(200, '{"choices": [1' + "0" * 9000), "unparsable"),
    "a completion and more": Fault(Reply(200, WHOLE * 2), "unparsable"),
    "choices null": Fault(choosing(None), "unparsable"),
    "choices an object": Fault(choosing({"0": GOOD["choices"][0]}), "unparsable"),
    "no choices": Fault(choosing([]), "empty", 2),
    "choices of numbers": Fault(choosing([5]), "empty", 2),
    "a message that is text": Fault(choosing([{"message": "hm"}]), "empty", 2),
    "content null": Fault(speaking(content=None), "empty", 2),
    "content a number": Fault(speaking(content=5), "empty", 2),
    "content an object": Fault(speaking(content=VERDICT), "empty", 2),
    "another content": Fault(completion(f"hm {KEY[3:15]} {KEY[10:]}"), "unparsable", 2),
    "a category that is a list": Fault(completion('{"category": [[]]}'), "unparsable", 2),
    "a refusal": Fault(completion(None, refusal=f"not with {KEY}"), "refused"),
    "a refusal that is a number": Fault(completion(refusal=5), "empty", 2),
    "cut off": Fault(completion("{", finish="length"), "truncated"),
    "filtered": Fault(completion("", finish="content_filter"), "filtered"),
    "packed": Fault(packed(gzip.compress(WHOLE)), "judged"),
    "packed garbage": Fault(packed(b"\x1f\x8bgarbage"), "empty"),
    "not packed": Fault(packed(WHOLE), "empty"),
    "packed and cut off": Fault(packed(gzip.compress(WHOLE)[:60]), "unparsable"),
    "packed a thousandfold": Fault(packed(gzip.compress(b" " * 10**7)), "empty"),
}
USAGE = {
    "no usage": Fault(Reply(200, {"choices": GOOD["choices"]}), "judged"),
    "usage of text": Fault(used(prompt_tokens="100", completion_tokens="20"), "judged"),
    "negative usage": Fault(used(prompt_tokens=-100, completion_tokens=-20), "judged"),
    "huge usage": Fault(used(prompt_tokens=10**30, completion_tokens=1), "judged"),
    "usage NaN": Fault(used(prompt_tokens=float("nan"), completion_tokens=1), "judged"),
    "usage true": Fault(used(prompt_tokens=True, completion_tokens=True), "judged"),
    "usage a list": Fault(Reply(200, GOOD | {"usage": [1, 2]}), "judged"),
}
RATIONALES = {
    "control characters": Fault(reasoned("\x1b[2J\x00\u202eabc\u2028"), "judged"),
    "half a character": Fault(reasoned("\ud800"), "judged"),
    "a rationale of 1 MB": Fault(reasoned("x" * 10**6), "judged"),
    "a rationale of 3 MB": Fault(reasoned("x" * 3 * 10**6), "unparsable"),
    "a rationale that is none": Fault(reasoned(None), "judged"),  # type: ignore[arg-type]
    "the key": Fault(reasoned(f"a {KEY} b {KEY.lower()}"), "judged"),
    "parts of the key": Fault(reasoned(f"{KEY[:20]}… {KEY[12:]} {KEY[10:18]}."), "judged"),
}
STATUSES = {
    "400": Fault(error(400, f"bad {KEY[5:25]}"), "rejected"),
    "400 unknown parameter": Fault(error(400, "no seed", param="seed"), "error: .*--param seed=1"),
    "400 too long": Fault(error(400, "maximum context length is 10"), "rejected"),
    "400 filtered": Fault(error(400, "no", code="content_filter"), "filtered"),
    "401": Fault(error(401, f"no key {KEY}"), "error: .* refuses access"),
    "402": Fault(error(402, f"{KEY[:-3]} owes"), "error: .* no credit left"),
    "403": Fault(error(403, KEY), "rejected", 1, "error: .* refuses access"),
    "404": Fault(error(404, f"no model; {KEY[8:]}"), "error: .* knows no model"),
    "404 a web page": Fault(Reply(404, "<html>" * 999), "error: .* knows no model"),
    "408": Fault(error(408, "late"), "unavailable"),
    "413": Fault(error(413, "big"), "rejected"),
    "418": Fault(Reply(418, b"\xff\xfe"), "rejected"),
    "429 for seconds": Fault(error(429, KEY, Retry_After="2"), "unavailable"),
    "429 until a date": Fault(
        error(429, "slow", Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"), "unavailable"
    ),
    "429 for ever": Fault(error(429, KEY[:-1], Retry_After="1e999"), "error: .* wait of inf s"),
    "429 until the year 9999": Fault(
        error(429, "slow", Retry_After="Fri, 31 Dec 9999 23:59:59 GMT"), "error: .* wait of"
    ),
    "429 for less than nothing": Fault(error(429, "slow", Retry_After="-5"), "unavailable"),
    "429 for no number": Fault(error(429, "slow", Retry_After="soon"), "unavailable"),
    "429 quota": Fault(error(429, KEY, code="insufficient_quota"), "error: .* no credit left"),
    "429 code a number": Fault(error(429, "slow", code=7), "unavailable"),  # type: ignore
    "500": Fault(error(500, f"at {KEY[2:]}"), "unavailable"),
    "500 with a huge body": Fault(Reply(500, "x" * 3 * 10**6), "unavailable"),
    "503 with a truncated body": Fault(Reply(503, "{", Content_Length="99"), "unavailable"),
    "503 packed garbage": Fault(Reply(503, "hm", Content_Encoding="gzip"), "unavailable"),
    "999": Fault(Reply(999), "unavailable"),
}
CONNECTIONS = {
    "closed before the headers": Fault(DROP, "unavailable"),
    "reset before the headers": Fault(Wire(reset=True), "unavailable"),
    "closed within the headers": Fault(Wire(HEAD), "unavailable"),
    "no HTTP": Fault(Wire(b"hello\r\n\r\n"), "unavailable"),
    "an endless header": Fault(Wire(HEAD, b"X: ", again=[b"x" * 9999]), "unavailable"),
    "closed within the body": Fault(
        Reply(200, WHOLE[:150], Content_Length=str(len(WHOLE))), "unparsable"
    ),
    "closed before the body": Fault(Reply(200, Content_Length="99"), "empty"),
    "reset within the body": Fault(
        Wire(HEAD, b"Content-Length: 999\r\n\r\n", WHOLE[:150], 0.05, reset=True), "unparsable"
    ),
    "Content-Length too long": Fault(Reply(200, WHOLE, Content_Length="9999"), "judged"),
    "Content-Length too short": Fault(Reply(200, WHOLE, Content_Length="99"), "unparsable"),
    "a chunk of no size": Fault(Wire(CHUNKED, b'5\r\n{"a":\r\nhm\r\n'), "unparsable"),
    "chunks without an end": Fault(Wire(CHUNKED, b'5\r\n{"a":\r\n'), "unparsable"),
    "an endless body": Fault(
        Wire(CHUNKED, again=[b"2000\r\n" + b"x" * 8192 + b"\r\n"]), "unparsable"
    ),
    "an endless error": Fault(
        Wire(HEAD.replace(b"200 OK", b"500 No") + b"\r\n", again=[b"x" * 8192]), "unavailable"
    ),
}
FAST = REDIRECTS | BODIES | USAGE | RATIONALES | STATUSES | CONNECTIONS
SLOW = {
    "slow headers": Fault(HANG, "unavailable"),
    "a slow body": Fault(Wire(CHUNKED, again=[b"1\r\n \r\n", 0.05]), "unavailable"),
    "a body that stops": Fault(Wire(CHUNKED, b"1\r\n{\r\n", 9.0), "unavailable"),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    """A key, no waits before retries, and no certificates, which take longest to load."""

    async def sleep(_: float) -> None: ...

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(llm, "sleep", sleep)
    monkeypatch.setattr(llm, "Client", functools.partial(llm.Client, verify=False))


def leaks(text: str) -> set[str]:
    """Parts of the key that a text holds."""
    parts = {KEY[i : i + 8].lower() for i in range(1, len(KEY) - 7)}  # 0 is the vendor's prefix
    return {part for part in parts if part in text.lower()}


GOOD_TURNS = 3


def check(fault: Fault, tmp_path, capsys, *, warm: bool, timeout: float) -> None:
    """Judge with a server at fault, again, and then with a sound one."""
    outcome = fault.outcome if warm else fault.first or fault.outcome
    turns = items(GOOD_TURNS + 4)[0 if warm else GOOD_TURNS :]
    sound = {f"turn {number}" for number in range(GOOD_TURNS)} if warm else set()

    def answer(body: dict, _: int):
        if mended or (body and turn_of(body) in sound):
            return completion()
        return fault.reply(stub) if callable(fault.reply) else fault.reply

    def judge(**options) -> tuple[dict[str, Verdict], str]:
        judge = judge_for(stub, retries=RETRIES, timeout=timeout, params={"seed": 1}, **options)
        try:
            found, _ = judge_items(turns, judge, Quiet(), cache_folder=tmp_path, **again)
        except UserError as problem:
            return {}, str(problem)
        return {item.turn: verdict for (item, _), verdict in found.items()}, ""

    mended, again = False, {}
    most = RETRIES + 1 if outcome == "unavailable" else fault.requests
    with StubServer(answer) as stub:
        seen = []
        for call in (1, 2):
            verdicts, told = judge(price=(1.0, 1.0))
            seen.append((verdicts, told))
            if outcome.startswith("error: "):
                pattern = outcome.removeprefix("error: ")
                assert llm.re.match(pattern, told), told
                assert "; " in told and "\n" not in told and told.isprintable()
                limit = call * most
            else:
                assert told == ""
                for turn, verdict in verdicts.items():
                    expected = "judged" if turn in sound else outcome
                    assert verdict.status == expected, (turn, verdict)
                    assert (verdict.category in NAMES) == (expected == "judged")
                    assert bool(verdict.error) == (expected != "judged")
                    assert verdict.error.isprintable()
                    assert 0 <= verdict.prompt_tokens <= 200
                limit = call * most if outcome == "unavailable" else most
            assert all(stub.turns[turn] == 1 for turn in sound)
            assert max(stub.turns[turn] for turn in {i.turn for i in turns} - sound) <= limit
        mended, again = True, {"retry_failed": True}
        verdicts, told = judge()
        assert told == "" and {v.status for v in verdicts.values()} == {"judged"}
        if outcome == "judged":
            assert verdicts == seen[0][0], "kept as it was"
    assert {v.origin for v in verdicts.values()} == {stub.origin}
    assert set(stub.keys) == {f"Bearer {KEY}"}
    files = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not leaks(files + repr(seen) + "".join(capsys.readouterr()))


@pytest.mark.parametrize("warm", [False, True], ids=["at once", "after good answers"])
@pytest.mark.parametrize("name", FAST)
def test_a_fault(name, warm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(llm, "LARGEST_ANSWER", 2 * 10**6)
    check(FAST[name], tmp_path, capsys, warm=warm, timeout=20.0)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True], ids=["at once", "after good answers"])
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_fault(name, warm, tmp_path, capsys):
    check(SLOW[name], tmp_path, capsys, warm=warm, timeout=1.0)


# -- many broken answers -------------------------------------------------------------------------


IN_A_ROW = r"answers in a row were no chat completions; .* --retry-failed sends the failed ones"


def test_broken_answers_end_the_run_and_are_never_bought_again(tmp_path):
    def judge(**options) -> dict:
        judge = judge_for(stub, concurrency=3)
        return judge_items(items(60), judge, Quiet(), cache_folder=tmp_path, **options)[0]

    with StubServer(lambda *_: Reply(200, "{")) as stub:
        for call in (1, 2):
            with pytest.raises(UserError, match=IN_A_ROW):
                judge()
            broken = len(stub.bodies)
            assert call * llm.BREAKER <= broken <= call * (llm.BREAKER + 3)
        stub.answer = lambda *_: completion()
        assert sum(verdict.status == "unparsable" for verdict in judge().values()) == broken
        assert len(stub.bodies) == 60 and max(stub.turns.values()) == 1
        found = judge(retry_failed=True)
        assert {verdict.status for verdict in found.values()} == {"judged"}
        assert len(stub.bodies) == 60 + broken


def test_web_pages_end_the_run_even_after_answers(tmp_path):
    with StubServer(lambda _, n: Reply(200, "<html>") if n > 4 else completion()) as stub:
        judge = judge_for(stub, concurrency=3)
        with pytest.raises(UserError, match=IN_A_ROW):
            judge_items(items(60), judge, Quiet(), cache_folder=tmp_path)
        assert len(stub.bodies) <= 5 + llm.BREAKER + 3
        with pytest.raises(UserError, match="web page"):
            judge_items(items(60), judge, Quiet(), cache_folder=tmp_path)
    assert max(stub.turns.values()) == 1


def test_a_broken_answer_counts_against_the_limit():
    """What it cost is unknown, so the most that it could is set aside."""
    with StubServer(lambda *_: Reply(200, "{")) as stub:
        judge = judge_for(stub, price=(1.0, 1.0), max_cost=0.03)
        with pytest.raises(UserError, match=r"\$0.0000 is spent in it, and up to \$0.0[12]"):
            dict(judge.judge(items(20), [0] * 20))
    assert 1 <= len(stub.bodies) <= 2


def test_no_more_is_read_than_an_answer_can_have():
    wire = Wire(CHUNKED, again=[b"%x\r\n" % 2**20 + b"x" * 2**20 + b"\r\n"])
    with StubServer(lambda *_: wire) as stub:
        ((_, verdict),) = judge_for(stub).judge(items(1), [0])
    assert verdict.status == "unparsable" and len(stub.bodies) == 1
    assert llm.LARGEST_ANSWER < wire.sent < llm.LARGEST_ANSWER + 2**24, "and what sockets hold"


# -- where requests go, and what is masked ---------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("hops", [0, 1])
def test_nothing_is_sent_to_another_origin(status, hops):
    with StubServer() as other:
        away = Reply(status, Location=f"{other.url}/chat/completions?{KEY}")
        with (
            StubServer(lambda *_: Moved(308, "/moved", away) if hops else away) as stub,
            pytest.raises(UserError) as raised,
        ):
            list(judge_for(stub).judge(items(30), [0] * 30))
    assert str(raised.value) == (
        f"{stub.url} redirects requests from {stub.origin} to {other.origin}; nothing is sent "
        "there; give the other address with --base-url if it is the one meant"
    )
    assert other.bodies == [] and len(stub.bodies) == 1 + hops


def test_parts_of_a_key_are_masked():
    mask = Mask(KEY)
    for text, masked in {
        KEY: "[key]",
        f"{KEY[:20]}…": "[key]…",
        f"({KEY[9:]}), ({KEY[9:17]}), ({KEY[9:16]})": f"([key]), ([key]), ({KEY[9:16]})",
        f"{KEY.upper()} {KEY.lower()}": "[key] [key]",
        f"{KEY}{KEY[4:]}": "[key]",
        f"İ {KEY[:15]} İ": "İ [key] İ",  # its lower case is longer
        "keys begin with sk-proj- or sk-": "keys begin with sk-proj- or sk-",
        "sk-proj-z": "[key]",
        "": "",
    }.items():
        assert mask(text) == masked
    long = "sk-proj-x " * 20_000
    assert mask(long) == long, "in linear time"


@pytest.mark.parametrize(
    "key", ["no-key", "EMPTY", "dummy", "sk-no-key-required", "not-needed", "sk-1234", "token"]
)
def test_dummy_and_short_keys_are_no_secrets(key):
    text = f"It is {key}, as required and needed; no-key-required."
    assert Mask(key)(text) == text


def test_a_vendors_prefix_is_no_secret():
    mask = Mask("sk-ant-api03-AbCdEfGh1234567")
    assert mask("sk-ant-api03-… and api03-") == "sk-ant-api03-… and api03-"
    assert mask("sk-ant-api03-AbC and AbCdEfGh") == "[key] and [key]"
