"""A language model as a judge, at any server that speaks OpenAI's chat-completions protocol.

From the inside out: :class:`Address` is where the server is and which key it takes, :class:`Budget`
what requests may cost, :class:`Client` what goes over the network, :class:`Server` one request with
its retries and what refusals mean, :class:`Session` many requests at once, :class:`LlmJudge` the
judge.

The event loop runs in its own thread, so that a judge works where a loop runs already (a notebook),
an interrupt never lands inside the loop, and storing a verdict delays no request. A kill costs at
most ``concurrency`` turns' answers, an interrupt none that had arrived.

The client's own retries are off. They repeat requests after a quota is used up, honour
``Retry-After`` for the refused request alone and only up to a minute or two, go on waiting when the
run has been halted, and set no money aside per attempt: a lost attempt that is charged would not
count against ``max_cost``. So is its reading of answers: it raises the same error for a body that
can't be read, which was paid for, as for a connection that never came about.
"""

import asyncio
import contextlib
import email.utils
import json
import math
import os
import queue
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import openai

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.judge.mask import Mask
from ia_mech.judge.prompt import (
    MODES,
    messages,
    prompt_hash,
    read_completion,
    response_format,
    system_message,
)
from ia_mech.judge.rubric import rubric_hash
from ia_mech.judge.verdict import CostLimit, Item, Verdict

KEY = "OPENAI_API_KEY"  # goes to OpenAI, or to the server that $OPENAI_BASE_URL names with it
OPENAI = "https://api.openai.com/v1"
_OPENAI_HOST = "api.openai.com"
NO_KEY = "no-key"  # what servers without keys are sent: the protocol wants one


@dataclass(frozen=True)
class Address:
    """A server's address, and the environment variable that holds its key."""

    url: str = field(repr=False)  # for the client, without its query
    query: dict[str, str] = field(repr=False)  # some services want an API version there
    shown: str  # for people and files: no user, no password, no query
    api_key_env: str | None
    wants_key: bool  # whether going without one is an error

    @classmethod
    def of(cls, base_url: str | None, api_key_env: str | None) -> "Address":
        """The address given, or ``$OPENAI_BASE_URL``, or OpenAI's.

        A server that is named here is sent no key unless its variable is named too: a key for
        OpenAI in the environment is for OpenAI alone.

        Raises:
            UserError: it isn't an http address.
        """
        given = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI
        try:
            parts = urlsplit(given.strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            name = "--base-url" if base_url else "$OPENAI_BASE_URL"
            raise UserError(
                f"{name} is not the address of a server",
                "give one such as http://localhost:8000/v1",
            )
        path = parts.path.rstrip("/")
        place = f"[{host}]" if ":" in host else host
        place += f":{port}" if port else ""
        return cls(
            url=urlunsplit((parts.scheme, parts.netloc, path, "", "")),
            query=dict(parse_qsl(parts.query)),
            shown=urlunsplit((parts.scheme, place, path, "", "")),
            api_key_env=api_key_env or (None if base_url and host != _OPENAI_HOST else KEY),
            wants_key=bool(api_key_env) or host == _OPENAI_HOST,
        )

    def key(self) -> str:
        """The key; a server other than OpenAI's may do without.

        Raises:
            UserError: none is set, or it can't be sent.
        """
        if self.api_key_env is None:
            return NO_KEY
        key = os.environ.get(self.api_key_env, "").strip()
        if not key and self.wants_key:
            raise UserError(
                f"no key for {self.shown}: the environment variable {self.api_key_env} is not set",
                "set it, name another with --api-key-env, or give --base-url for a server of yours",
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                f"the environment variable {self.api_key_env} holds characters that no key has",
                "set it to the key alone",
            )
        return key or NO_KEY


FIRST_COMPLETION = 1000  # tokens a completion may take, before any has been seen
SLACK = 64  # tokens a chat template may add to the texts


@dataclass
class Bill:
    """What one request turned out to cost."""

    tokens: tuple[int, int] | None = None  # of prompt and completion, if the server counted them
    unknown: bool = False  # the server may charge an amount that it didn't report


def dollars(price: tuple[float, float] | None, prompt: int, completion: int) -> float:
    """What so many tokens cost at a price per million of each kind; 0 if no price is known."""
    prompt_price, completion_price = price or (0.0, 0.0)
    return (prompt * prompt_price + completion * completion_price) / 1e6


class Budget:
    """A limit in US dollars that the requests of one invocation share.

    Before a request is sent, the most it could cost is set aside, and given back when its real cost
    is known. The bound for its prompt: byte-level tokenizers make at most one token per byte, and
    the rubric's part has been counted by the server with the first answer. For its completion:
    ``completion_limit`` if the user set one, else twice the longest completion seen so far and at
    least ``FIRST_COMPLETION`` tokens; this last one is an estimate and no bound.

    Args:
        price: dollars per million prompt and completion tokens, or None.
        limit: dollars, or None for no limit; a limit needs the price.
        completion_limit: the most tokens a completion can have, if the request says so.
    """

    def __init__(
        self,
        price: tuple[float, float] | None,
        limit: float | None,
        completion_limit: int | None = None,
    ) -> None:
        self.price = price
        self.limit = limit
        self.spent = 0.0
        self._unsure = 0.0  # set aside for requests whose answer never came
        self._reserved: list[float] = []  # of each request under way
        self._completion_limit = completion_limit
        self._longest_completion = 0
        self._fixed: int | None = None  # tokens that every prompt has, at most
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def request(self, fixed_bytes: int, item_bytes: int) -> AsyncIterator[Bill]:
        """Set aside what one request may cost, while it is made.

        ``fixed_bytes`` is the size of what all prompts share, ``item_bytes`` that of the rest.

        Raises:
            CostLimit: it could cost more than is left.
        """
        bill = Bill()
        most = await self._reserve(fixed_bytes, item_bytes)
        try:
            yield bill
        finally:
            self._reserved.remove(most)
            if bill.tokens is not None:
                prompt, completion = bill.tokens
                self.spent += dollars(self.price, prompt, completion)
                self._longest_completion = max(self._longest_completion, completion)
                # The whole prompt bounds its shared part.
                self._fixed = prompt if self._fixed is None else min(self._fixed, prompt)
            elif bill.unknown:
                self._unsure += most
            async with self._changed:
                self._changed.notify_all()

    async def _reserve(self, fixed_bytes: int, item_bytes: int) -> float:
        async with self._changed:
            while True:
                fixed = fixed_bytes + SLACK if self._fixed is None else self._fixed
                completion = self._completion_limit or max(
                    FIRST_COMPLETION, 2 * self._longest_completion
                )
                most = dollars(self.price, fixed + item_bytes, completion)
                if (
                    self.limit is None
                    or self.spent + self._unsure + sum(self._reserved) + most <= self.limit
                ):
                    self._reserved.append(most)
                    return most
                if not self._reserved:
                    break
                await self._changed.wait()  # those under way may turn out cheaper
        unsure = f", and up to ${self._unsure:.4f} for unanswered ones" if self._unsure else ""
        raise CostLimit(
            f"--max-cost {self.limit:g} limits this invocation: ${self.spent:.4f} is spent in it"
            f"{unsure}, and the next request may cost ${most:.4f}",
            "the same command goes on with as much again; verdicts so far are kept"
            if self.spent or self._unsure
            else "give a larger --max-cost, or bound answers with --param max_completion_tokens=N",
        )


FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before a retry, at most: doubled from one to other
LONGEST_RETRY_AFTER = 300.0  # a server that asks for more isn't waited for
CONNECT_SECONDS = 10.0
QUOTED = 300  # characters of a server's message
LARGEST_ANSWER = 16 * 2**20  # bytes of an unpacked body; no completion is so long
REDIRECTS = 5  # in a row

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


class Redirected(Exception):
    """A server sends its requests on to where they may not go."""


def origin(url: Any) -> str:
    """Scheme, host and port of an URL of the client's; the scheme's own port isn't shown."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


class Client(openai.DefaultAsyncHttpxClient):
    """The HTTP client under OpenAI's. It sends nothing to another origin than the one it is given.

    It follows redirects within the origin, and reads answers whole: up to ``LARGEST_ANSWER``, and
    as far as they came if the connection breaks or the encoding is damaged. Whether that is an
    answer is for the JSON to tell: no part of an object is an object. Only a connection that breaks
    before the headers of an answer raises.

    Attributes:
        origin: what sent the last answer.
    """

    origin = ""

    async def send(self, request: Any, **options: Any) -> Any:
        """Send a request.

        Raises:
            Redirected: to another origin, or too often.
        """
        options |= {"stream": True, "follow_redirects": False}
        for _ in range(REDIRECTS + 1):
            response = await super().send(request, **options)
            try:
                onward = response.next_request
                if onward is None:
                    self.origin = origin(response.url)
                    return await _whole(response)
            finally:
                await response.aclose()
            here, there = origin(request.url), origin(onward.url)
            if here != there:
                raise Redirected(f"redirects requests from {here} to {there}")
            request = onward
        raise Redirected(f"redirects requests more than {REDIRECTS} times in a row")


async def _whole(response: Any) -> Any:
    """A response that is read, of the class that the client's HTTP library has for them."""
    content = bytearray()
    # Which exceptions there are depends on the library. None is the time limit's, which cancels.
    with contextlib.suppress(Exception):
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > LARGEST_ANSWER:
                break
    packing = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(name, value) for name, value in response.headers.items() if name not in packing]
    return type(response)(
        response.status_code, headers=headers, content=bytes(content), request=response.request
    )


class Failed(Exception):
    """One item got no verdict. ``status`` as in ``Verdict``."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class FormatRefused(Exception):
    """The server doesn't take the response format that was requested."""


class Halted(Exception):
    """Nothing more is to be sent."""


class Server:
    """The requests of one call of :meth:`LlmJudge.judge`.

    Server errors, rate limits, timeouts and broken connections are retried up to ``judge.retries``
    times, after a random wait whose bound doubles each time (full jitter). ``Retry-After`` is
    honoured by all requests and not by the refused one alone. An answer that arrived is never
    requested again here, whatever it holds. ``secret`` is the key, never to be shown: all that the
    server sends goes through ``scrub`` before it is kept or printed.
    """

    def __init__(self, http: Client, judge: "LlmJudge", secret: str) -> None:
        self.answered = False  # has a request ever been completed?
        self.broken = 0  # answers in a row that were no chat completions
        self.halted = asyncio.Event()  # set when nothing more may be sent
        self._reached = False  # has it ever sent anything back?
        self._http = http
        self._client = openai.AsyncOpenAI(
            api_key=secret,
            base_url=judge.address.url,
            default_query=judge.address.query or None,
            max_retries=0,
            # The time limit is that of the whole request, in ``_complete_once``.
            timeout=openai.Timeout(None, connect=min(judge.timeout, CONNECT_SECONDS)),
            http_client=http,
        )
        self._judge = judge
        self._shown = judge.address.shown
        limits = [judge.params.get(name) for name in ("max_completion_tokens", "max_tokens")]
        limit = next((value for value in limits if isinstance(value, int) and value > 0), None)
        self._budget = Budget(judge.price, judge.max_cost, limit)
        self.scrub = Mask(secret)
        self._keyless = secret == NO_KEY
        self._not_before = 0.0  # monotonic time, from Retry-After

    async def complete(
        self, messages: Sequence[dict[str, str]], response_format: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One completion, as JSON.

        Raises:
            Failed: none for this item: ``unavailable``, ``rejected`` or ``filtered``; ``empty`` or
                ``unparsable`` for an answer that is no chat completion.
            FormatRefused: not with this response format.
            Halted: the run ended meanwhile.
            UserError: what no item would get past.
        """
        request = {"model": self._judge.model, "messages": list(messages), **self._judge.params}
        if response_format is not None:
            request["response_format"] = response_format
        *shared, item = [len(message["content"].encode()) for message in messages]
        size = sum(shared) + len(str(response_format or "")), item
        attempts = self._judge.retries + 1
        for attempt in range(attempts):
            if (closed := self._not_before - time.monotonic()) > 0:
                await self._wait(closed + random.uniform(0, FIRST_WAIT))
            if self.halted.is_set():
                raise Halted
            wanted: float | None = None
            last: Exception
            try:
                return await self._complete_once(request, size)
            except openai.APIStatusError as error:
                self._reached = True
                self._raise_unless_passing(error)
                wanted, last = self._retry_after(error), error
            except (openai.OpenAIError, TimeoutError) as error:
                last = error
            if attempt + 1 < attempts:
                if wanted is not None:
                    self._not_before = max(self._not_before, time.monotonic() + wanted)
                else:
                    await self._wait(random.uniform(0, min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)))
        if not self._reached and _never_connected(last):
            raise UserError(
                f"{self._shown} can't be reached ({self._described(last)})",
                "check --base-url and that the server is running",
            )
        raise Failed("unavailable", f"after {attempts} attempts: {self._described(last)}")

    @property
    def origin(self) -> str:
        """What sent the last answer."""
        return self._http.origin

    async def _complete_once(
        self, request: dict[str, Any], size: tuple[int, int]
    ) -> dict[str, Any]:
        async with self._budget.request(*size) as bill:
            if self.halted.is_set():  # while it waited for its part of the budget
                raise Halted
            try:
                async with asyncio.timeout(self._judge.timeout):
                    body = await self._client.post("/chat/completions", cast_to=bytes, body=request)
            except Redirected as redirect:
                self._refuse_redirect(redirect)
            except (openai.OpenAIError, TimeoutError) as error:
                if isinstance(error.__cause__, Redirected):  # by the client's version
                    self._refuse_redirect(error.__cause__)
                bill.unknown = not (
                    isinstance(error, openai.APIStatusError) or _never_connected(error)
                )
                raise
            self._reached = bill.unknown = True
            completion = self._read(body)
            self.answered, self.broken = True, 0
            bill.tokens = tokens_of(completion)
            bill.unknown = bill.tokens is None
            return completion

    def _read(self, body: bytes) -> dict[str, Any]:
        """The chat completion that a body holds.

        Raises:
            Failed: it holds none.
            UserError: it is a web page, and the server has never sent anything better.
        """
        try:
            answer = json.loads(body)
            if isinstance(answer, dict) and isinstance(answer.get("choices"), list):
                return answer
            problem = _message(answer)  # some report errors with status 200
        except (ValueError, RecursionError) as error:
            problem = str(error)
        start = body.strip()[: 4 * QUOTED]
        if start.startswith(b"<") and not self.answered:
            self._refuse_endpoint("answers with a web page, which is no chat completion")
        self.broken += 1
        if not start:
            raise Failed("empty", "the server's answer has no content that can be read")
        quoted = one_line(start.decode("utf-8", "replace"), 100)
        described = f"the server's answer is no chat completion ({problem or 'other JSON'}): "
        raise Failed("unparsable", self.scrub(one_line(f"{described}{quoted}", QUOTED)))

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

    def _raise_unless_passing(self, error: openai.APIStatusError) -> None:
        """Return if the request is worth repeating; raise what the refusal means otherwise."""
        status, reason, code = error.status_code, self._described(error), error.code or ""
        if (status == 429 and code == "insufficient_quota") or status == 402:
            raise UserError(
                f"{self._shown} reports that the account has no credit left ({reason})",
                "add credit, then give the same command again; verdicts so far are kept",
            )
        if status in (408, 409, 425, 429) or status >= 500:
            return
        if status == 401 or (status == 403 and not self.answered):
            # The server's message about a wrong key may repeat a part of it: it isn't shown.
            name = self._judge.address.api_key_env
            problem = "no key was sent" if self._keyless else f"the key in {name}"
            own = f"set {name} to a key that is good for {self._judge.model}, or " if name else ""
            raise UserError(
                f"{self._shown} refuses access (HTTP {status}; {problem})",
                f"{own}name the variable that holds its key with --api-key-env",
            )
        if status == 404:
            self._refuse_endpoint(
                f"knows no model {self._judge.model!r}, or no such path ({reason})"
            )
        if status in (400, 422):
            self._raise_bad_request(error, reason, code)
        raise Failed("rejected", reason)

    def _raise_bad_request(self, error: openai.APIStatusError, reason: str, code: str) -> None:
        """Raise what a bad request means, unless it is about this item alone."""
        named = error.param if isinstance(error.param, str) else ""
        for key in self._judge.params:
            if named == key or named.startswith((f"{key}.", f"{key}[")):
                self._refuse_param(key, reason)
        if code == "content_filter":
            raise Failed("filtered", reason)
        if code == "context_length_exceeded" or _TOO_LONG.search(reason):
            raise Failed("rejected", reason)
        if named.startswith("response_format") or _ABOUT_FORMAT.search(reason):
            raise FormatRefused(reason)
        for key in self._judge.params:
            if _names(reason, key):
                self._refuse_param(key, reason)
        model = self._judge.model
        about_model = named == "model" or code in _NO_MODEL_CODES or _NO_MODEL.search(reason)
        if about_model or (not self.answered and model in reason):
            self._refuse_endpoint(f"doesn't serve the model {model!r} ({reason})")

    def _refuse_endpoint(self, problem: str) -> NoReturn:
        raise UserError(
            f"{self._shown} {problem}", "check --model, and --base-url (it usually ends in /v1)"
        )

    def _refuse_redirect(self, redirect: Redirected) -> NoReturn:
        raise UserError(
            self.scrub(f"{self._shown} {redirect}"),
            "nothing is sent there; give the other address with --base-url if it is the one meant",
        )

    def _refuse_param(self, key: str, reason: str) -> NoReturn:
        raise UserError(
            f"{self._shown} refuses --param {key}={self._judge.params[key]} ({reason})",
            "leave it out, or give a value that the model takes",
        )

    def _retry_after(self, error: openai.APIStatusError) -> float | None:
        """Seconds to wait, given in the header as a number or as a date; None without one.

        Raises:
            UserError: longer than anyone would want to watch.
        """
        value = error.response.headers.get("retry-after")
        if value is None:
            return None
        try:
            seconds = float(value)
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
            except (ValueError, OverflowError):
                return None
        if seconds > LONGEST_RETRY_AFTER:
            raise UserError(
                f"{self._shown} wants a wait of {seconds:.7g} s ({self._described(error)})",
                "give the same command again after that; verdicts so far are kept",
            )
        return None if math.isnan(seconds) else max(0.0, seconds)

    def _described(self, error: BaseException | None) -> str:
        """A server's message, or what went wrong, on one line and without the key."""
        if isinstance(error, openai.APIStatusError):
            text = f"HTTP {error.status_code}: {_message(error.body) or error.message}"
        elif isinstance(error, (openai.APITimeoutError, TimeoutError)):
            text = f"no answer within {self._judge.timeout:g} s"
        else:
            cause = getattr(error, "__cause__", None) or error
            text = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        return self.scrub(one_line(" ".join(text.split()), QUOTED))


MOST_TOKENS = 10**9  # of one request; a larger count is a server's mistake


def tokens_of(completion: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens of the prompt and the completion, if the server counted them and the count can be."""
    usage = completion.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(prompt) is not int or type(written) is not int:  # True is an int, too
        return None
    return (
        (prompt, written)
        if 0 <= min(prompt, written) <= max(prompt, written) <= MOST_TOKENS
        else None
    )


def _message(body: Any) -> str:
    """The message of an error's body, without whatever of the request it repeats.

    FastAPI servers (vLLM, ``transformers serve``) give ``detail``, with a refused field's place in
    ``loc``.
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


def _names(text: str, key: str) -> bool:
    """Whether a message names a parameter: in quotes, after "parameter", or as part of a path.

    Names that are no words of prose (with an underscore) count wherever they stand whole.
    """
    name = re.escape(key)
    quoted = rf"[\"'`]{name}[\"'`]|\bparam(eter)?s?:? {name}\b|\bbody\.{name}\b"
    bare = rf"|(?<![\w.]){name}(?![\w])" if "_" in key else ""
    return re.search(quoted + bare, text, re.I) is not None


def _never_connected(error: BaseException | None) -> bool:
    """No connection was made at all: an unknown host, a refused or unanswered connection."""
    cause = getattr(error, "__cause__", None)
    return cause is not None and type(cause).__name__ in ("ConnectError", "ConnectTimeout")


BREAKER = 10  # verdicts in a row without an answer that end the run, or --concurrency if it is more
GRACE_SECONDS = 1.0  # after an early end, for the answers under way: they are paid for already
SHUTDOWN_SECONDS = 5.0


@dataclass(frozen=True)
class Received:
    """A verdict that has come. ``taken`` is set when the consumer has finished with it."""

    index: int
    verdict: Verdict
    taken: asyncio.Event


class Session:
    """One pass over items, in a thread of its own; :class:`Verdicts` is how to iterate over it.

    The first item goes alone: what no item would get past is found with one request, the response
    format is settled, and servers that cache prompts have the rubric when the others come. Then up
    to ``concurrency`` items are in flight. An item is in flight from its request until the consumer
    has written its verdict and comes back for the next, so answers that wait behind another's write
    count: at no moment have more than ``concurrency`` turns been requested and not written, and a
    kill loses no more. (A turn that was requested twice is still one.)

    The run ends early, with a ``UserError``, when ``BREAKER`` items in a row were ``unavailable``
    or got answers that are no chat completions, or when the server has ``rejected`` as many and
    answered none. Such rejections aren't handed out before: with a wrong setting they would be
    stored as if they were the items' fault. Broken answers are, since they may have been charged.
    """

    def __init__(self, judge: "LlmJudge", items: Sequence[Item], key: str) -> None:
        self.received: list[Received] = []  # all verdicts that came, in that order
        self.problem: BaseException | None = None  # what ended the run early
        self._judge = judge
        self._items = items
        self._key = key
        self._breaker = max(BREAKER, judge.concurrency)
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes ``wait``
        # With a factory, a runner leaves the caller's own event loop alone.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._main_task: asyncio.Task | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._stopping = False
        self._server: Server | None = None
        self._unavailable = 0  # in a row
        self._held: list[tuple[int, Verdict]] = []  # rejections before the first answer

    def wait(self, taken: int) -> None:
        """Wait until more than ``taken`` verdicts are received, or no more will be.

        The caller has finished with the ``taken`` that it has had so far.
        """
        if self._thread is None:
            self._runner.get_loop()  # so that ``_in_loop`` has one from now on
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        elif taken:
            self._in_loop(self.received[taken - 1].taken.set)
        while len(self.received) == taken and not self._ended:
            self._news.get()

    def stop(self) -> None:
        """Send nothing more. Answers under way may come for another ``GRACE_SECONDS``."""
        if self._thread is not None and self._thread.is_alive():
            self._in_loop(self._stop)
            self._thread.join(GRACE_SECONDS + SHUTDOWN_SECONDS)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: all is done
            self._runner.get_loop().call_soon_threadsafe(call)

    # -- in the session's thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._runner, contextlib.suppress(asyncio.CancelledError):
                self._runner.run(self._main())
        except BaseException as error:
            self.problem = self.problem or error
        finally:
            self._ended = True
            self._news.put(None)

    def _stop(self) -> None:
        self._stopping = True
        if self._server is not None:
            self._server.halted.set()
        for entry in self.received:
            entry.taken.set()
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._cancel)

    def _cancel(self) -> None:
        if self._main_task is not None:
            self._main_task.cancel()

    async def _main(self) -> None:
        self._main_task = asyncio.current_task()
        waiting = iter(range(len(self._items)))
        judge = self._judge
        async with Client() as http:
            server = self._server = Server(http, judge, self._key)
            if self._stopping:
                server.halted.set()
            try:
                await self._work(server, iter([next(waiting)]))
                workers = min(judge.concurrency, len(self._items) - 1)
                await asyncio.gather(*[self._work(server, waiting) for _ in range(workers)])
            finally:
                cut_short = self._stopping or self.problem is not None
                if server.answered or not cut_short:
                    for index, verdict in self._held:
                        await self._deliver(index, verdict)

    async def _work(self, server: Server, waiting: Iterator[int]) -> None:
        """Judge what is waiting, until nothing is or the run is halted.

        A problem halts the run: nothing more is sent, and what is under way comes to its end.
        """
        while not server.halted.is_set():
            index = next(waiting, None)
            if index is None:
                return
            try:
                verdict = await self._judge.verdict(server, self._items[index])
                if verdict.status == "rejected" and not server.answered:
                    self._held.append((index, verdict))
                else:
                    await self._deliver(index, verdict)
                self._give_up_if_useless(server, verdict)
            except Halted:
                return
            except Exception as error:
                self.problem = self.problem or error
                server.halted.set()

    def _give_up_if_useless(self, server: Server, verdict: Verdict) -> None:
        self._unavailable = self._unavailable + 1 if verdict.status == "unavailable" else 0
        if self._unavailable >= self._breaker:
            raise UserError(
                f"{self._unavailable} requests in a row got no answer, the last {verdict.error}",
                "check the server, --timeout and --concurrency, then give the same command again; "
                "verdicts so far are kept",
            )
        if server.broken >= self._breaker:
            raise UserError(
                f"{server.broken} answers in a row were no chat completions; the last: "
                f"{verdict.error}",
                "check the server, --model and --base-url (it usually ends in /v1); verdicts so "
                "far are kept, and --retry-failed sends the failed ones again",
            )
        if len(self._held) >= self._breaker and not server.answered:
            raise UserError(
                f"the server rejected the first {len(self._held)} requests, the last with "
                f"{verdict.error}",
                "check --model, --mode and --param",
            )

    async def _deliver(self, index: int, verdict: Verdict) -> None:
        entry = Received(index, verdict, asyncio.Event())
        self.received.append(entry)
        self._news.put(None)
        if not self._stopping:
            await entry.taken.wait()


class Verdicts:
    """What a session receives: an iterator of (index, verdict), as they come.

    An exception while waiting, ``KeyboardInterrupt`` above all, closes it.

    Raises:
        UserError: what ended the session early, after all verdicts that were still received.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._taken = 0
        self._closed = False

    def __iter__(self) -> Iterator[tuple[int, Verdict]]:
        return self

    def __next__(self) -> tuple[int, Verdict]:
        session = self._session
        if not self._closed:
            try:
                session.wait(self._taken)
            except BaseException:
                self.close()
                raise
        if self._taken < len(session.received):
            entry = session.received[self._taken]
            self._taken += 1
            return entry.index, entry.verdict
        if not self._closed:
            self._closed = True
            if session.problem is not None:
                raise session.problem
        raise StopIteration

    def close(self) -> None:
        """End the session. What it received can still be iterated over.

        That begins with the verdict handed out last: an interrupt may have come before it was kept.
        """
        if not self._closed:
            self._taken = max(0, self._taken - 1)
            self._closed = True
            self._session.stop()

    def __del__(self) -> None:
        self.close()


CHARACTERS_PER_TOKEN = 4  # of English prose, for estimates
COMPLETION_TOKENS = 60  # of a one-sentence rationale and a name, for estimates
OUR_PARAMS = {  # request parameters that are no --param, and what to use instead
    "model": "--model",
    "messages": "nothing: the rubric is fixed",
    "response_format": "--mode",
    "stream": "nothing: answers are read whole",
    "n": "--repeats",
}


class LlmJudge:
    """Judges with a language model, at OpenAI or any compatible server.

    Verdicts other than ``judged``, which never name a category: ``refused`` (the refusal field),
    ``filtered`` (a content filter), ``truncated`` (cut off by a token limit before a verdict),
    ``empty``, ``unparsable`` (no JSON object, or none of the rubric's names; like ``empty``
    requested once more), ``rejected`` (the server takes other items but not this one),
    ``unavailable`` (nothing after all retries; never cached). An answer that is no chat completion
    at all (cut off, no JSON, other JSON) is ``unparsable`` or ``empty``, too, but isn't requested
    again: that is the server's fault or a proxy's, which seldom passes within a second.

    ``Verdict.mode`` is the form that was requested and, after a slash, where the verdict stood if
    it wasn't all of the content: ``json_schema/text`` (inside other text: the server ignores the
    response format), ``json_object/reasoning`` (in the reasoning field).

    Repeats are the same request again, so they differ as the server samples: with
    ``temperature=0`` they add nothing.

    Args:
        model: the model's name at the server.
        base_url: the server; ``$OPENAI_BASE_URL`` or OpenAI's by default.
        api_key_env: the environment variable that holds the key; ``OPENAI_API_KEY`` by default, but
            none for a ``base_url`` given here. Read when judging begins, so that estimates and
            replays need none.
        mode: ``json_schema``, ``json_object``, ``text``, or ``auto``: the first of these that the
            server doesn't refuse, for the rest of this judge's life.
        params: further request parameters. Nothing is sent that isn't here.
        concurrency: most requests at a time.
        timeout: seconds for a whole request.
        retries: how often a failed request is repeated at most.
        price: US dollars per million prompt and completion tokens.
        max_cost: US dollars that one call of ``judge`` may spend before it stops with a
            ``CostLimit`` (see ``Budget``). Verdicts from a cache don't count.

    Raises:
        UserError: a setting that can't be used.
    """

    paid = True
    caveat = ""

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str | None = None,
        mode: str = "auto",
        params: dict[str, Any] | None = None,
        concurrency: int = 8,
        timeout: float = 60.0,
        retries: int = 5,
        price: tuple[float, float] | None = None,
        max_cost: float | None = None,
    ) -> None:
        self.model = model
        self.params = dict(params or {})
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self.price = price
        self.max_cost = max_cost
        self._check(mode)
        self.address = Address.of(base_url, api_key_env)
        self._modes = list(MODES) if mode == "auto" else [mode]
        self.identity: dict[str, Any] = {
            "kind": "llm",
            "model": model,
            "base_url": self.address.shown,
            "rubric": rubric_hash(),
            "prompt": prompt_hash(),
            "params": self.params,
            "mode": mode,
        }

    def estimate(self, items: Sequence[Item]) -> str:
        """Requests, tokens and, where the price is known, dollars; on one line."""
        if not items:
            return ""
        rubric = len(system_message()) * len(items)
        rest = sum(len(messages(item)[-1]["content"]) for item in items)
        tokens = (rubric + rest) // CHARACTERS_PER_TOKEN
        written = COMPLETION_TOKENS * len(items)
        line = (
            f"{len(items):,} requests to {self.model}, about {tokens:,} prompt tokens (characters "
            f"/ {CHARACTERS_PER_TOKEN}; {rubric / (rubric + rest):.0%} of them the rubric, the "
            f"same every time) and {written:,} completion tokens ({COMPLETION_TOKENS} each; "
            "reasoning models write many more)"
        )
        if self.price is None:
            return line
        return f"{line}, about ${dollars(self.price, tokens, written):.2f}"

    def judge(self, items: Sequence[Item], repeats: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """(index, verdict) as they come. See :class:`Session` for order and ends.

        To end early, close the iterator; it then still gives what was received (:class:`Verdicts`).

        Raises:
            UserError: no key; a server that can't be reached, refuses access, has no such model,
                refuses a parameter, or gives up; a reached ``max_cost``. All verdicts that were
                received are yielded first.
        """
        if not items:
            return iter(())
        key = self.address.key()
        return Verdicts(Session(self, items, key))

    # -- one item ------------------------------------------------------------------------------

    def messages(self, item: Item) -> list[dict[str, str]]:
        """The dialogue that is sent for an item."""
        return messages(item)

    def read(self, completion: dict[str, Any]) -> Verdict:
        """What a chat completion says of its item; tokens and cost are added to it."""
        return read_completion(completion)

    async def verdict(self, server: Server, item: Item) -> Verdict:
        """One item's verdict; an answer that can't be used is requested once more.

        If that second request fails, is interrupted or may not be made, the first answer stands: it
        was paid for. Raises ``Halted`` if the run was halted before there was an answer.
        """
        try:
            verdict = await self._attempt(server, item)
        except Failed as failure:
            return Verdict(None, failure.status, error=str(failure), origin=server.origin)
        if verdict.status in ("unparsable", "empty"):
            with contextlib.suppress(Failed, UserError, Halted, asyncio.CancelledError):
                verdict = (await self._attempt(server, item)).with_cost_of(verdict)
        return verdict

    async def _attempt(self, server: Server, item: Item) -> Verdict:
        """One answer as a verdict; raises what :meth:`Server.complete` does."""
        while True:
            mode = self._modes[0]
            try:
                completion = await server.complete(self.messages(item), response_format(mode))
                break
            except FormatRefused as refusal:
                self._fall_back(mode, str(refusal))
        verdict = self.read(completion)
        tokens = tokens_of(completion) or (0, 0)
        return replace(
            verdict,
            rationale=server.scrub(verdict.rationale),
            mode=f"{mode}/{verdict.mode}" if verdict.mode else mode,
            origin=server.origin,
            error=server.scrub(verdict.error),
            prompt_tokens=tokens[0],
            completion_tokens=tokens[1],
            cost=dollars(self.price, *tokens) if self.price is not None and any(tokens) else None,
        )

    def _fall_back(self, mode: str, reason: str) -> None:
        """Use the next simpler form from now on; of several refused requests, once."""
        if mode == "text":  # no form was requested, so it was about something else
            raise Failed("rejected", reason)
        if self.identity["mode"] != "auto":
            raise UserError(
                f"{self.address.shown} refuses --mode {mode} ({reason})", "use --mode auto or text"
            )
        if self._modes[0] == mode:
            self._modes.pop(0)

    # -- settings ------------------------------------------------------------------------------

    def _check(self, mode: str) -> None:
        if mode not in ("auto", *MODES):
            raise UserError(f"no mode {mode!r}", f"use auto, {', '.join(MODES)}")
        for name, instead in OUR_PARAMS.items():
            if name in self.params:
                raise UserError(f"--param {name} can't be set", f"use {instead}")
        try:
            json.dumps(self.params, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"--param: {error}", "give values that are JSON") from None
        if self.concurrency < 1:
            raise UserError(f"--concurrency {self.concurrency} is below 1", "use 1 or more")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise UserError(f"--timeout {self.timeout:g} is no time", "use seconds above 0")
        if self.retries < 0:
            raise UserError(f"--retries {self.retries} is below 0", "use 0 or more")
        if self.price is not None and not all(math.isfinite(p) and p >= 0 for p in self.price):
            raise UserError("--price can't be negative", "use dollars per million tokens")
        if self.max_cost is not None:
            if self.price is None:
                raise UserError("--max-cost needs the price", "give --price IN OUT as well")
            if not (math.isfinite(self.max_cost) and self.max_cost > 0):
                raise UserError(f"--max-cost {self.max_cost:g} is no amount", "use dollars above 0")
