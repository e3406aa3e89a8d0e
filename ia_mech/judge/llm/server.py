"""One request to a server, with its retries, and what the server's refusals mean.

Where a server is and which key opens it: from flags and environment, checked, never shown.

What requests cost, and stopping before they cost too much.

Many items at once: requests in a thread of their own, verdicts out as they come.

The event loop runs in its own thread, so that a judge works where a loop runs already (a notebook),
an interrupt never lands inside the loop, and storing a verdict delays no request. A kill costs at
most ``concurrency`` turns' answers, an interrupt none that had arrived.
"""

import asyncio
import contextlib
import email.utils
import os
import queue
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import openai

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.judge.verdict import CostLimit, Item, Verdict

KEY = "OPENAI_API_KEY"  # goes to OpenAI, or to the server that $OPENAI_BASE_URL names with it
OPENAI = "https://api.openai.com/v1"
_OPENAI_HOST = "api.openai.com"
NO_KEY = "no-key"  # what servers without keys are sent: the protocol wants one


@dataclass(frozen=True)
class Address:
    """A server's address.

    Attributes:
        url: for the client, without its query.
        query: of the address as given (some services want an API version there).
        shown: for people and files: no user, no password, no query.
        api_key_env: the environment variable that holds the key.
        wants_key: whether going without one is an error.
    """

    url: str = field(repr=False)
    query: dict[str, str] = field(repr=False)
    shown: str
    api_key_env: str | None
    wants_key: bool

    @classmethod
    def of(cls, base_url: str | None, api_key_env: str | None) -> "Address":
        """The address given, or ``$OPENAI_BASE_URL``, or OpenAI's.

        A server that is named here is sent no key unless its variable is named too: a key for
        OpenAI in the environment is not for everybody.

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


class Bill:
    """One request's part of the budget: what came of it."""

    def __init__(self) -> None:
        self.usage: tuple[int, int] | None = None
        self.billed = False  # by an amount that isn't known

    def paid(self, usage: Any) -> tuple[int, int]:
        """Note an answer's ``usage``; returns (prompt tokens, completion tokens), 0 if unsaid."""
        prompt = getattr(usage, "prompt_tokens", None)
        completion = getattr(usage, "completion_tokens", None)
        if isinstance(prompt, int) and isinstance(completion, int):
            self.usage = (prompt, completion)
            return self.usage
        self.billed = True
        return 0, 0

    def unknown(self) -> None:
        """The answer never came, but the server may charge for it."""
        self.billed = True


class Budget:
    """A limit in US dollars that the requests of one invocation share.

    Before a request is sent, the most it could cost is set aside, and given back when its real cost
    is known. The bound for its prompt: byte-level tokenizers make at most one token per byte, and
    the rubric's part has been counted by the server with the first answer. For its completion:
    ``completion_limit`` if the user set one, else twice the longest completion seen so far and at
    least ``FIRST_COMPLETION`` tokens; this last one is an estimate and no bound.

    Args:
        price: dollars per million prompt and completion tokens, or None.
        limit: dollars, or None for no limit.
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
        self._unsure = 0.0  # of requests whose answer never came
        self._reserved: list[float] = []  # of each request under way
        self._completion_limit = completion_limit
        self._longest_completion = 0
        self._fixed: int | None = None  # tokens that every prompt has, at most
        self._changed = asyncio.Condition()

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """Dollars for so many tokens; None if no price is known."""
        if self.price is None:
            return None
        return (prompt_tokens * self.price[0] + completion_tokens * self.price[1]) / 1e6

    @contextlib.asynccontextmanager
    async def request(self, fixed_bytes: int, item_bytes: int) -> AsyncIterator[Bill]:
        """Set aside what one request may cost, while it is made.

        Args:
            fixed_bytes: of the part of the prompt that all requests share.
            item_bytes: of the rest.

        Raises:
            CostLimit: it could cost more than is left.
        """
        bill = Bill()
        if self.limit is None:
            yield bill
            self._settle(bill, 0.0)
            return
        most = await self._reserve(fixed_bytes, item_bytes)
        try:
            yield bill
        finally:
            self._reserved.remove(most)
            self._settle(bill, most)
            async with self._changed:
                self._changed.notify_all()

    async def _reserve(self, fixed_bytes: int, item_bytes: int) -> float:
        async with self._changed:
            while True:
                fixed = fixed_bytes + SLACK if self._fixed is None else self._fixed
                completion = self._completion_limit or max(
                    FIRST_COMPLETION, 2 * self._longest_completion
                )
                most = self.cost(fixed + item_bytes, completion)
                if self.spent + self._unsure + sum(self._reserved) + most <= self.limit:
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

    def _settle(self, bill: Bill, most: float) -> None:
        if bill.usage is not None:
            prompt, completion = bill.usage
            self.spent += self.cost(prompt, completion) or 0.0
            self._longest_completion = max(self._longest_completion, completion)
            # The whole prompt bounds its shared part.
            self._fixed = prompt if self._fixed is None else min(self._fixed, prompt)
        elif bill.billed:
            self._unsure += most


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


BREAKER = 10  # verdicts in a row without an answer that end the run, or --concurrency if it is more
GRACE_SECONDS = 1.0  # after an early end, for the answers under way: they are paid for already
SHUTDOWN_SECONDS = 5.0

Ask = Callable[[Server, Item], Awaitable[Verdict]]
Connect = Callable[[], contextlib.AbstractAsyncContextManager[Server]]


class Received(NamedTuple):
    """A verdict that has come. ``taken`` is set when whoever was given it is done with it."""

    index: int
    verdict: Verdict
    taken: asyncio.Event


class Session:
    """One pass over items.

    The first item goes alone: what no item would get past is found with one request, the response
    format is settled, and servers that keep prompts have the rubric when the others come. Then up
    to ``concurrency`` items are in flight. An item is in flight from its request until whoever
    takes its verdict has written it and comes back for the next, so answers that wait behind
    another's write count: no moment has more than ``concurrency`` turns whose answers are asked for
    and unwritten, and a kill loses no more. (A turn that was asked for twice is still one.)

    The run ends early, with a ``UserError``, when ``BREAKER`` items in a row were ``unavailable``,
    or when the server has ``rejected`` as many and answered none. Such rejections aren't handed out
    before: with a wrong setting they would be stored as if they were the items' fault.

    Args:
        connect: opens the server; entered and left in the session's thread.
        ask: one item's verdict; raises ``Halted`` if the run was halted before there was one, and
            when cancelled gives what was paid for, if anything was.
        items: what to judge.
        concurrency: most items in flight.

    Attributes:
        received: all verdicts that came, in that order.
        problem: what ended the run early.
    """

    def __init__(self, connect: Connect, ask: Ask, items: Sequence[Item], concurrency: int) -> None:
        self.received: list[Received] = []
        self.problem: BaseException | None = None
        self._connect = connect
        self._ask = ask
        self._items = items
        self._concurrency = concurrency
        self._breaker = max(BREAKER, concurrency)
        self._news: queue.SimpleQueue = queue.SimpleQueue()  # wakes ``wait``
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main_task: asyncio.Task | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._stopping = False
        self._server: Server | None = None
        self._unavailable = 0  # in a row
        self._held: list[tuple[int, Verdict]] = []  # rejections before the first answer

    def wait(self, taken: int) -> None:
        """Wait until more than ``taken`` verdicts are received, or no more will be.

        Args:
            taken: how many the caller has had so far; it is done with all of them.
        """
        if self._thread is None:
            self._loop = asyncio.new_event_loop()
            self._main_task = self._loop.create_task(self._main())
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
            self._loop.call_soon_threadsafe(call)

    # -- in the session's thread ---------------------------------------------------------------

    def _run(self) -> None:
        loop = self._loop
        try:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(self._main_task)
            if leftover := asyncio.all_tasks(loop):
                for task in leftover:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(leftover))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:
            self.problem = self.problem or error
        finally:
            loop.close()
            self._ended = True
            self._news.put(None)

    def _stop(self) -> None:
        self._stopping = True
        if self._server is not None:
            self._server.halted.set()
        for entry in self.received:
            entry.taken.set()
        self._loop.call_later(GRACE_SECONDS, self._main_task.cancel)

    async def _main(self) -> None:
        waiting = iter(range(len(self._items)))
        async with self._connect() as self._server:
            if self._stopping:
                self._server.halted.set()
            try:
                await self._work(iter([next(waiting)]))
                workers = min(self._concurrency, len(self._items) - 1)
                await asyncio.gather(*[self._work(waiting) for _ in range(workers)])
            finally:
                cut_short = self._stopping or self.problem is not None
                if self._server.answered or not cut_short:
                    for index, verdict in self._held:
                        await self._deliver(index, verdict)

    async def _work(self, waiting: Iterator[int]) -> None:
        """Judge what is waiting, until nothing is or the run is halted.

        A problem halts the run: nothing more is sent, and what is under way comes to its end.
        """
        while not self._server.halted.is_set():
            index = next(waiting, None)
            if index is None:
                return
            try:
                await self._count(index, await self._ask(self._server, self._items[index]))
            except Halted:
                return
            except Exception as error:
                self.problem = self.problem or error
                self._server.halted.set()

    async def _count(self, index: int, verdict: Verdict) -> None:
        self._unavailable = self._unavailable + 1 if verdict.status == "unavailable" else 0
        if verdict.status == "rejected" and not self._server.answered:
            self._held.append((index, verdict))
        else:
            await self._deliver(index, verdict)
        if self._unavailable >= self._breaker:
            raise UserError(
                f"{self._unavailable} requests in a row got no answer, the last {verdict.error}",
                "check the server, --timeout and --concurrency, then give the same command again; "
                "verdicts so far are kept",
            )
        if len(self._held) >= self._breaker and not self._server.answered:
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
