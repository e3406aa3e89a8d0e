"""A server that speaks OpenAI's chat-completions protocol: its address, its key, one request."""

import contextlib
import email.utils
import ipaddress
import json
import os
import random
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import openai

from ia_mech.cli import one_line
from ia_mech.errors import UserError

KEY_VARIABLE = "OPENAI_API_KEY"  # goes to OpenAI, or to the server in $OPENAI_BASE_URL
OPENAI_URL = "https://api.openai.com/v1"
ACCOUNT = {  # headers that say which account pays, for OpenAI alone
    "OpenAI-Organization": "OPENAI_ORG_ID",
    "OpenAI-Project": "OPENAI_PROJECT_ID",
}
NO_KEY = "no-key"  # what servers without keys are sent: the protocol wants one
LEAST_KEY_LENGTH = 8  # characters of a key that is a secret; "EMPTY" and the like are none
LONGEST_MESSAGE = 500  # characters of a server's message
LONGEST_WAIT = 600.0  # seconds that a server may ask to wait
MOST_TIMEOUTS = 3  # requests that are repeated after a time limit, each with twice the time
PASSING = (408, 409, 425, 429)  # statuses that may pass, like all from 500 on
_PROXIED = ("http://", "https://", "all://")  # what variables such as HTTP_PROXY are for
NO_CREDIT = "insufficient_quota"  # the code of a 429 that doesn't pass


@dataclass(eq=False)
class Failure(Exception):
    """A request without a chat completion."""

    message: str
    status: int = 0  # of HTTP, or of an error that came with status 200; 0 where nothing came
    code: Any = None  # of the error, in the server's words
    param: Any = None  # the request parameter that it is about, in the server's words
    wait: float | None = None  # seconds after which the server wants to be asked again
    target: str | None = None  # of a redirect
    slow: bool = False  # it took longer than the time limit
    repeated: bool = True  # whether the same request may do better

    @property
    def passing(self) -> bool:
        """Whether it says nothing about the request, so that another may succeed."""
        return self.status < 300 or self.status in PASSING or self.status >= 500


class ChatServer:
    """Sends requests, and repeats those that failed by what may pass.

    The key is sent to the server that it is for and nowhere else: redirects aren't followed. It is
    read at the first request, from ``api_key_env``; by default from ``OPENAI_API_KEY``, but nowhere
    for a ``base_url`` given here that isn't OpenAI's. A server that takes longer than ``timeout``
    seconds is given twice as long from then on.

    Raises:
        UserError: no address of a server, or OpenAI's without encryption.
    """

    def __init__(
        self, base_url: str | None, api_key_env: str | None, timeout: float, retries: int
    ) -> None:
        self.url = _address(base_url)
        self.timeout, self.retries = timeout, retries
        self._is_openai = _is_openai(self.url)
        self._needs_key = bool(api_key_env) or self._is_openai
        own = base_url and not self._is_openai
        self.key_variable = api_key_env or (None if own else KEY_VARIABLE)
        self.reached = False  # whether anything has ever come from it

    def completion(
        self, request: dict[str, Any], ended: threading.Event
    ) -> tuple[dict[str, Any], bool]:
        """The chat completion, and whether the time limit was raised for it. Nothing is repeated
        once ``ended`` is set.

        Raises:
            Failure: there is none.
            UserError: there is no key.
        """
        timeouts = 0
        for retried in range(self.retries + 1):
            limit = self.timeout
            try:
                return self.post(request, limit), timeouts > 0
            except Failure as failure:
                timeouts += failure.slow
                if failure.slow:
                    self.timeout = max(self.timeout, 2 * limit)
                wait = failure.wait
                if wait is None:
                    wait = min(0.5 * 2**retried, 8.0) * random.uniform(0.75, 1.0)
                over = retried == self.retries or timeouts > MOST_TIMEOUTS or wait > LONGEST_WAIT
                if not failure.repeated or over or self._wait(ended, wait):
                    raise
        raise AssertionError("the last try returns or raises")

    def _wait(self, ended: threading.Event, seconds: float) -> bool:
        """Wait before a retry; True if none is wanted any more."""
        return ended.wait(seconds)

    def post(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The chat completion after one request; raises what :meth:`completion` does."""
        try:
            chat = self._client.with_options(timeout=limit).chat.completions
            others = {name: request[name] for name in request if name not in ("model", "messages")}
            response = chat.with_raw_response.create(
                model=request["model"], messages=request["messages"], extra_body=others
            ).http_response
        except openai.APIStatusError as error:
            response = error.response
        except openai.APITimeoutError as error:
            slow = type(error.__cause__).__name__ not in ("ConnectTimeout", "PoolTimeout")
            raise Failure(f"no answer in {limit:g} s", slow=slow) from error.__cause__
        except openai.OpenAIError as error:
            cause = error.__cause__ or error
            absent = type(cause).__name__ == "ConnectError" and not self.reached
            text = str(cause) or type(cause).__name__
            raise Failure(text, repeated=not absent) from cause
        self.reached = True
        try:
            body = json.loads(response.content)
        except (ValueError, RecursionError):
            body = None
        status, problem = response.status_code, _problem_of(body, response.status_code)
        if status == 200 and not problem:
            if isinstance(body, dict) and isinstance(body.get("choices"), list):
                return body
            text = f"not a chat completion: {response.text[:LONGEST_MESSAGE]!r}"
            raise Failure(text, status, repeated=False)
        if status == 200:  # a proxy's, for an error of the server behind it
            code = str(problem.get("code"))
            status = int(code) if code.isdecimal() and 400 <= int(code) < 600 else 502
        failure = Failure(
            f"HTTP {status}: {problem.get('message') or response.text[:LONGEST_MESSAGE]}",
            status,
            code=problem.get("code"),
            param=problem.get("param"),
            wait=_seconds_to_wait(response.headers.get("retry-after", "")),
            target=response.headers.get("location"),
        )
        failure.repeated = failure.passing and failure.code != NO_CREDIT
        raise failure

    def line(self, text: str) -> str:
        """What the server says, on one line and without the key."""
        return one_line(" ".join(self.without_key(text).split()), LONGEST_MESSAGE)

    def without_key(self, text: str) -> str:
        return text if len(self._key) < LEAST_KEY_LENGTH else text.replace(self._key, "[key]")

    @cached_property
    def _client(self) -> openai.OpenAI:
        # Of itself the client would send the account's headers to any server.
        account = {
            name: (self._is_openai and os.environ.get(variable)) or openai.omit
            for name, variable in ACCOUNT.items()
        }
        return openai.OpenAI(
            api_key=self._key,
            base_url=self.url,
            default_headers=account,  # type: ignore[arg-type]  # omit is for this
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False,
                mounts=dict.fromkeys(_PROXIED) if _is_local(self.url) else None,
            ),
        )

    @cached_property
    def _key(self) -> str:
        key = os.environ.get(self.key_variable or "", "").strip()
        if not key and self._needs_key:
            raise UserError(
                f"no key for {self.url}: {self.key_variable} is not set",
                "set it, name another with --api-key-env, or give --base-url for a server of yours",
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"${self.key_variable} holds characters that no key has", "set it again"
            )
        return key or NO_KEY


def _is_local(url: str) -> bool:
    """Whether a server is on this machine, where a proxy of the environment can't reach it."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _is_openai(url: str) -> bool:
    return urlsplit(url).hostname == urlsplit(OPENAI_URL).hostname


def _address(base_url: str | None) -> str:
    """The address given, or ``$OPENAI_BASE_URL``, or OpenAI's. It is stored with the verdicts, so
    it may hold nothing secret."""
    given = (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).strip()
    name = "--base-url" if base_url else "$OPENAI_BASE_URL"
    try:
        parts = urlsplit(given)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(
            f"{name} is not the address of a server, without user and query",
            "give one such as http://localhost:8000/v1",
        )
    if _is_openai(given) and parts.scheme != "https":
        raise UserError(f"{name} would send the key to OpenAI in clear", "give https://")
    return given.rstrip("/")


def _problem_of(body: Any, status: int) -> dict[str, Any]:
    """The error that a body tells of, whatever the server: ``message``, perhaps ``code`` and
    ``param``; empty if it tells of none."""
    if not isinstance(body, dict):
        return {}
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    problem = body.get("error") or (first.get("error") if isinstance(first, dict) else None)
    if status != 200:
        problem = problem or body.get("detail") or body.get("message")
    if not problem:
        return {}
    if not isinstance(problem, dict):
        problem = {"message": problem if isinstance(problem, str) else json.dumps(problem)}
    return problem | {"message": str(problem.get("message") or json.dumps(problem))}


def _seconds_to_wait(given: str) -> float | None:
    """What the header Retry-After says, in seconds or as a date; None without one."""
    with contextlib.suppress(ValueError):
        seconds = float(given)
        return max(seconds, 0.0) if seconds == seconds else None
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(email.utils.parsedate_to_datetime(given).timestamp() - time.time(), 0.0)
    return None
