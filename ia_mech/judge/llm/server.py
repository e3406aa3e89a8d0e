"""One request to a server, with its retries, and what the server's refusals mean."""

import asyncio
import email.utils
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import openai

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.judge.llm.address import NO_KEY, Address
from ia_mech.judge.llm.budget import Budget

FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before a retry, at most: doubled from one to other
LONGEST_RETRY_AFTER = 300.0  # a server that asks for more isn't waited for
CONNECT_SECONDS = 10.0
QUOTED = 300  # characters of what a server said

sleep = asyncio.sleep  # tests replace it

_TOO_LONG = re.compile(
    r"context (length|window|size)|(prompt|input|request|messages?) (is|are) too (long|large)|"
    r"maximum (context|model|input|number of tokens)",
    re.I,
)
_ABOUT_FORMAT = re.compile(
    r"response.?format|json.?schema|json.?object|json.?mode|structured.?output|guided|grammar", re.I
)
_NO_MODEL_CODES = ("model_not_found", "invalid_model")
_NO_MODEL = re.compile(
    r"\bmodel\b.{0,120}(does not exist|not found|not exist|unknown)", re.I | re.S
)


class Failed(Exception):
    """One item got no answer. ``status`` as in ``Verdict``."""

    def __init__(self, status: str, said: str) -> None:
        super().__init__(said)
        self.status = status
        self.said = said


class FormatRefused(Exception):
    """The server doesn't take the response format it was asked for."""


class Halted(Exception):
    """Nothing more is to be sent."""


class Server:
    """A chat-completions endpoint that is asked politely.

    Server errors, rate limits, timeouts and broken connections are retried up to ``retries`` times,
    after a random wait whose bound doubles each time (full jitter). ``Retry-After`` is honoured, by
    all requests and not by the refused one alone.

    Args:
        client: made with ``max_retries=0``.
        address: for messages.
        model: the model's name at the server.
        params: further request parameters, sent as they are; nothing else is added.
        timeout: seconds for a whole request.
        retries: how often a request is repeated at most.
        budget: pays.
        secret: the key, never to be shown.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        address: Address,
        model: str,
        params: dict[str, Any],
        timeout: float,
        retries: int,
        budget: Budget,
        secret: str = NO_KEY,
    ) -> None:
        self.answered = False  # has it ever completed a request?
        self.halted = asyncio.Event()
        self._reached = False  # has it ever sent anything back?
        self._client = client
        self._address = address
        self._model = model
        self._params = params
        self._timeout = timeout
        self._retries = retries
        self._budget = budget
        self._secret = secret
        self._not_before = 0.0  # monotonic time; the server asked to be left alone until then

    async def ask(
        self, messages: Sequence[dict[str, str]], response_format: dict[str, Any] | None
    ) -> tuple[Any, int, int]:
        """One completion, with its prompt and completion tokens.

        Raises:
            Failed: no answer for this item: ``unavailable``, ``rejected`` or ``filtered``.
            FormatRefused: not with this response format.
            Halted: the run ended meanwhile.
            UserError: what no item would get past.
        """
        request = {"model": self._model, "messages": list(messages)}
        if response_format is not None:
            request["response_format"] = response_format
        *shared, item = [len(message["content"].encode()) for message in messages]
        size = sum(shared) + len(str(response_format or "")), item
        for attempt in range(self._retries + 1):
            if (closed := self._not_before - time.monotonic()) > 0:
                await self._wait(closed + random.uniform(0, FIRST_WAIT))
            if self.halted.is_set():
                raise Halted
            try:
                return await self._once(request, size)
            except openai.APIStatusError as error:
                self._reached = True
                self._judge_status(error)
                last, wanted = error, self._retry_after(error)
            except (openai.OpenAIError, TimeoutError, ValueError) as error:
                last, wanted = error, None  # ValueError: the body ends in the middle of its JSON
            if attempt < self._retries:
                if wanted is not None:
                    self._not_before = max(self._not_before, time.monotonic() + wanted)
                else:
                    bound = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)
                    await self._wait(random.uniform(0, bound))
        self._judge_unreachable(last)
        raise Failed("unavailable", f"after {self._retries + 1} attempts: {self.said(last)}")

    def said(self, error: BaseException) -> str:
        """What a server said, or what went wrong, on one line and without the key."""
        if isinstance(error, openai.APIStatusError):
            text = f"HTTP {error.status_code}: {_message(error.body) or error.message}"
        elif isinstance(error, (openai.APITimeoutError, TimeoutError)):
            text = f"no answer within {self._timeout:g} s"
        else:
            cause = error.__cause__ or error
            text = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        return self.scrub(one_line(" ".join(text.split()), QUOTED))

    def scrub(self, text: str) -> str:
        """Text without the key, whoever repeated it."""
        return text if self._secret == NO_KEY else text.replace(self._secret, "[key]")

    # -- one attempt ---------------------------------------------------------------------------

    async def _once(self, request: dict[str, Any], size: tuple[int, int]) -> tuple[Any, int, int]:
        async with self._budget.request(*size) as bill:
            if self.halted.is_set():  # while it waited for its part of the budget
                raise Halted
            try:
                async with asyncio.timeout(self._timeout):
                    completion = await self._client.chat.completions.create(
                        **request, extra_body=self._params or None
                    )
            except (openai.OpenAIError, TimeoutError, ValueError) as error:
                if not (isinstance(error, openai.APIStatusError) or _never_connected(error)):
                    bill.unknown()
                raise
            if not hasattr(completion, "choices"):  # a web page, say
                raise self._no_endpoint("answers with something that is no chat completion")
            self.answered = self._reached = True
            return completion, *bill.paid(getattr(completion, "usage", None))

    async def _wait(self, seconds: float) -> None:
        """Wait, unless the run is halted meanwhile."""
        if seconds <= 0:
            return
        tasks = [asyncio.ensure_future(sleep(seconds)), asyncio.ensure_future(self.halted.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    # -- what refusals mean --------------------------------------------------------------------

    def _judge_status(self, error: openai.APIStatusError) -> None:
        """Return if the request is worth repeating; raise what the refusal means otherwise."""
        status, said, code = error.status_code, self.said(error), error.code or ""
        if (status == 429 and code == "insufficient_quota") or status == 402:
            raise UserError(
                f"{self._address.shown} says that the account has no credit left ({said})",
                "add credit, then give the same command again; verdicts so far are kept",
            )
        if status in (408, 409, 425, 429) or status >= 500:
            return
        if status == 401 or (status == 403 and not self.answered):
            # What the server says of a wrong key may repeat a part of it.
            name = self._address.api_key_env
            problem = "no key was sent" if self._secret == NO_KEY else f"the key in {name}"
            remedy = (
                f"set {name} to a key that is good for {self._model}, or name" if name else "name"
            )
            raise UserError(
                f"{self._address.shown} refuses access (HTTP {status}; {problem})",
                f"{remedy} the variable that holds its key with --api-key-env",
            )
        if status == 404:
            raise self._no_endpoint(f"knows no model {self._model!r}, or no such path ({said})")
        if status in (400, 422):
            self._judge_bad_request(error, said, code)
        raise Failed("rejected", said)

    def _judge_bad_request(self, error: openai.APIStatusError, said: str, code: str) -> None:
        named = error.param if isinstance(error.param, str) else ""
        for key in self._params:
            if named == key or named.startswith((f"{key}.", f"{key}[")):
                raise self._param_refused(key, said)
        if code == "content_filter":
            raise Failed("filtered", said)
        if code == "context_length_exceeded" or _TOO_LONG.search(said):
            raise Failed("rejected", said)
        if named.startswith("response_format") or _ABOUT_FORMAT.search(said):
            raise FormatRefused(said)
        for key in self._params:
            if _names(said, key):
                raise self._param_refused(key, said)
        about_model = named == "model" or code in _NO_MODEL_CODES or _NO_MODEL.search(said)
        if about_model or (not self.answered and self._model in said):
            raise self._no_endpoint(f"doesn't serve the model {self._model!r} ({said})")

    def _judge_unreachable(self, error: BaseException) -> None:
        """A server that nothing was ever heard of, and that can't even be connected to."""
        if not self._reached and _never_connected(error):
            raise UserError(
                f"{self._address.shown} can't be reached ({self.said(error)})",
                "check --base-url and that the server is running",
            )

    def _no_endpoint(self, problem: str) -> UserError:
        return UserError(
            f"{self._address.shown} {problem}",
            "check --model, and --base-url (it usually ends in /v1)",
        )

    def _param_refused(self, key: str, said: str) -> UserError:
        return UserError(
            f"{self._address.shown} refuses --param {key}={self._params[key]} ({said})",
            "leave it out, or give a value that the model takes",
        )

    def _retry_after(self, error: openai.APIStatusError) -> float | None:
        """Seconds that the server asks to wait; None if it doesn't say.

        Raises:
            UserError: longer than anyone would want to watch.
        """
        seconds = retry_after(error.response.headers)
        if seconds is not None and seconds > LONGEST_RETRY_AFTER:
            raise UserError(
                f"{self._address.shown} asks to wait for {seconds:.0f} s ({self.said(error)})",
                "give the same command again after that; verdicts so far are kept",
            )
        return seconds


def retry_after(headers) -> float | None:
    """``Retry-After`` in seconds from now, given as a number or as a date; None without one."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds == seconds else None


def _message(body: Any) -> str:
    """The message of an error's body, without whatever of the request it repeats.

    FastAPI servers (vLLM, ``transformers serve``) say ``detail``, and of a field that they refuse
    its place in ``loc``.
    """
    if not isinstance(body, dict):
        return body[:QUOTED] if isinstance(body, str) else ""
    for value in (body.get("message"), body.get("detail"), body.get("error")):
        if isinstance(value, str) and value:
            return value
        if isinstance(value, dict) and isinstance(value.get("message"), str):
            return value["message"]
        if isinstance(value, list):
            parts = [part for part in value if isinstance(part, dict)]
            return "; ".join(
                f"{'.'.join(str(p) for p in part.get('loc', ()))}: {part.get('msg', '')}"
                for part in parts
            )
    return ""


def _names(said: str, key: str) -> bool:
    """Whether a message names a parameter: in quotes, after "parameter", or as part of a path.

    Names that are no words of prose (with an underscore) count wherever they stand whole.
    """
    name = re.escape(key)
    quoted = rf"[\"'`]{name}[\"'`]|\bparam(eter)?s?:? {name}\b|\bbody\.{name}\b"
    bare = rf"|(?<![\w.]){name}(?![\w])" if "_" in key else ""
    return re.search(quoted + bare, said, re.I) is not None


def _never_connected(error: BaseException) -> bool:
    """No connection was made at all: an unknown host, a refused or unanswered connection."""
    cause = error.__cause__
    return cause is not None and type(cause).__name__ in ("ConnectError", "ConnectTimeout")
