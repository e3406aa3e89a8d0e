"""A chat-completions server on loopback that answers as a test tells it to."""

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VERDICT = {"rationale": "asks about the lens", "category": "follow_up"}
HANG, DROP = "hang", "drop"


class Reply:
    """What the server sends: a status, a body (JSON; text and bytes as they are) and headers.

    A ``Content_Length`` is sent as it is given, and the connection closed if it isn't the body's.
    """

    def __init__(self, status: int, body: Any = "", **headers: str) -> None:
        self.status = status
        self.body = body if isinstance(body, (str, bytes)) else json.dumps(body)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Wire:
    """Bytes to send after a request, HTTP or not; then the connection is closed, or reset."""

    def __init__(self, content: bytes = b"", *, reset: bool = False) -> None:
        self.content = content
        self.reset = reset


def completion(content: str | None = None, *, finish: str = "stop", **message) -> Reply:
    """A chat completion; 100 prompt and 20 completion tokens."""
    if content is None and not message:
        content = json.dumps(VERDICT)
    spoken = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "finish_reason": finish, "message": spoken}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    head = {"id": "c", "object": "chat.completion", "created": 0, "model": "stub"}
    return Reply(200, head | {"choices": [choice], "usage": usage})


def error(status: int, message: str, **more) -> Reply:
    """An error as OpenAI words them; ``param`` and ``code`` in ``more``, headers after them."""
    fields = {name: more.pop(name) for name in ("param", "code", "type") if name in more}
    return Reply(status, {"error": {"message": message, **fields}}, **more)


Answer = Reply | Wire | str
Answering = Callable[[dict, int], Answer]


class StubServer:
    """Runs while it is entered.

    ``answer(body, n)`` is called with the body of request number n (from 0) and says what to send:
    a ``Reply``, a ``Wire``, ``HANG`` or ``DROP``.

    Attributes:
        bodies: the bodies of all requests, in the order of their arrival; a GET's is empty.
        keys: the Authorization headers.
        headers: the names of all headers, in small letters.
        turns: how many requests each user turn was in.
        most: the largest number of requests at the same time.
    """

    def __init__(self, answer: Answering = lambda body, n: completion(), delay: float = 0) -> None:
        self.answer = answer
        self.delay = delay
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.headers: set[str] = set()
        self.turns: Counter[str] = Counter()
        self.most = 0
        self._under_way = 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def url(self) -> str:
        return f"{self.origin}/v1"

    def __enter__(self) -> "StubServer":
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._http.shutdown()
        self._http.server_close()

    def _receive(self, body: dict, key: str | None) -> Answer:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.keys.append(key)
            if body:
                self.turns[turn_of(body)] += 1
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            time.sleep(self.delay)
            return self.answer(body, number)
        finally:
            with self._lock:
                self._under_way -= 1

    def _handler(stub):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or b"{}")
                stub.headers |= {name.lower() for name in self.headers}
                self._send(stub._receive(body, self.headers.get("Authorization")))

            do_GET = do_POST  # what a 301 makes of it

            def _send(self, reply: Answer) -> None:
                if isinstance(reply, Wire):
                    with contextlib.suppress(OSError):  # the client has gone
                        self._put(reply)
                    self.close_connection = True
                    return
                if isinstance(reply, str):
                    if reply == HANG:
                        stub._end.wait(30)
                    self.close_connection = True
                    return
                content = reply.body.encode() if isinstance(reply.body, str) else reply.body
                self.send_response(reply.status)
                length = {"Content-Length": str(len(content))}
                headers = {"Content-Type": "application/json"} | length | reply.headers
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
                if headers["Content-Length"] != str(len(content)):
                    self.close_connection = True

            def _put(self, wire: Wire) -> None:
                self.wfile.write(wire.content)
                if wire.reset:
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.connection.close()

            def log_message(self, *_) -> None: ...

        return Handler


def item_of(body: dict) -> dict[str, str]:
    """The item in a request, read as the prompt tells a judge to read it."""
    return json.loads(re.match(r"Item: (.*)\n", body["messages"][-1]["content"])[1])


def turn_of(body: dict) -> str:
    return item_of(body)["user_turn"]
