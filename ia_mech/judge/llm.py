"""A language model as a judge, at any server that speaks OpenAI's chat-completions protocol.

The client retries by itself what may pass (server errors, rate limits, timeouts, broken
connections). :mod:`ia_mech.judge.judging` calls a judge from ``concurrency`` threads, each of which
stores a verdict before it requests the next. Until the server has answered once, requests go one
at a time, so that a wrong address, name or parameter is told after one request.
"""

import contextlib
import email.utils
import json
import math
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import openai

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.judge.answers import read_completion
from ia_mech.judge.prompt import MODES, messages, prompt_hash, response_format, system_message
from ia_mech.judge.rubric import BUILT_IN, Rubric
from ia_mech.judge.verdict import Item, Judge, Verdict

KEY_VARIABLE = "OPENAI_API_KEY"  # goes to OpenAI, or to the server in $OPENAI_BASE_URL
OPENAI_URL = "https://api.openai.com/v1"
ACCOUNT = {  # headers that say which account pays, for OpenAI alone
    "OpenAI-Organization": "OPENAI_ORG_ID",
    "OpenAI-Project": "OPENAI_PROJECT_ID",
}
NO_KEY = "no-key"  # what servers without keys are sent: the protocol wants one
LEAST_KEY_LENGTH = 8  # characters of a key that is a secret; "EMPTY" and the like are none
MOST_FAILURES = 8  # failures of the server in a row that end the judging
MOST_REJECTED = 3  # items that a server rejects before its first answer
LONGEST_MESSAGE = 500  # characters of a server's message
LONGEST_WAIT = 600.0  # seconds that a server may ask to wait
MOST_TIMEOUTS = 3  # requests that are repeated after a time limit, each with twice the time
MOST_TOKENS = 10**9  # of one request; a larger count is a server's mistake
CHARACTERS_PER_TOKEN = 4  # of English prose, for estimates
MOST_CHARACTERS_PER_TOKEN = 6  # of any tokenizer for the rubric: fewer tokens were cut off
COMPLETION_TOKENS = 60  # of a one-sentence rationale and a name, for estimates
RESERVED_PARAMS = {  # request parameters that are no --param, and what to use instead
    "model": "--model",
    "messages": "--rubric",
    "response_format": "--mode",
    "stream": "nothing: answers are read whole",
    "n": "nothing: a turn has one verdict",
}
PASSING = (408, 409, 425, 429)  # statuses that may pass, like all from 500 on
_FORMAT = re.compile(r"response_format|json_schema|json_object|structured.output|guided|grammar")
_KEY_REMEDY = "set a key that is good for the model, or name its variable with --api-key-env"
REMEDIES = {  # by HTTP status: what to do where every other request would be refused, too
    401: _KEY_REMEDY,
    402: "add credit to the account, then give the same command again; verdicts so far are kept",
    403: _KEY_REMEDY,
    404: "check --model, and --base-url (it usually ends in /v1)",
}


@dataclass(eq=False)
class _Failure(Exception):
    """A request without a chat completion."""

    message: str
    status: int = 0  # of HTTP, or of an error that came with status 200; 0 where nothing came
    code: Any = None  # of the error, in the server's words
    param: Any = None  # the request parameter that it is about, in the server's words
    wait: float | None = None  # seconds after which the server wants to be asked again
    target: str | None = None  # of a redirect
    slow: bool = False  # it took longer than the time limit

    @property
    def passing(self) -> bool:
        """Whether it says nothing about the request, so that another may succeed."""
        return self.status < 300 or self.status in PASSING or self.status >= 500


class LlmJudge(Judge):
    """Judges with a language model, at OpenAI or any compatible server.

    Failures, which never name a category: ``refused`` (the refusal field, or words of refusal
    alone), ``filtered`` (a content filter), ``truncated`` (cut off by a token limit before a
    verdict), ``empty``, ``unparsable`` (no JSON object, or none of the rubric's names),
    ``rejected`` (the server takes other items but not this one), ``unavailable`` (no chat
    completion after all retries).

    ``Verdict.mode`` is the form that was requested and, after a slash, where the verdict stood if
    it wasn't all of the content: ``json_schema/text`` (inside other text: the server ignores the
    response format), ``json_object/reasoning``, ``json_schema/tool_calls``.

    The key is sent to the server that it is for and nowhere else: redirects aren't followed. What
    the server sends is kept and shown without it.

    Args:
        model: the model's name at the server.
        base_url: the server; ``$OPENAI_BASE_URL`` or OpenAI's by default.
        api_key_env: the environment variable that holds the key; ``OPENAI_API_KEY`` by default, but
            none for a ``base_url`` given here that isn't OpenAI's. Read when judging begins.
        mode: the form of answers that is requested: ``json_schema``, ``json_object`` or ``text``.
        params: further request parameters. Nothing is sent that isn't here.
        concurrency: most requests at a time.
        timeout: seconds to wait for an answer, or for more of it. A server that takes longer is
            given twice as long from then on.
        retries: how often a failed request is repeated at most.
        price: US dollars per million prompt and completion tokens.
        max_cost: US dollars after which nothing more is requested; open requests may go beyond it.
            Where the server reports no tokens, they are estimated by characters.
        rubric: what it labels by.

    Raises:
        UserError: a setting that can't be used.
    """

    paid = True

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str | None = None,
        mode: str = "json_schema",
        params: dict[str, Any] | None = None,
        concurrency: int = 8,
        timeout: float = 60.0,
        retries: int = 5,
        price: tuple[float, float] | None = None,
        max_cost: float | None = None,
        rubric: Rubric = BUILT_IN,
    ) -> None:
        self.model, self.mode, self.rubric = model, mode, rubric
        self.params = dict(params or {})
        self.concurrency, self.timeout, self.retries = concurrency, timeout, retries
        self.price, self.max_cost = price, max_cost
        self._check_settings()
        self.base_url = _address(base_url)
        self._is_openai = urlsplit(self.base_url).hostname == urlsplit(OPENAI_URL).hostname
        self.api_key_env = api_key_env or (
            None if base_url and not self._is_openai else KEY_VARIABLE
        )
        self._needs_key = bool(api_key_env) or self._is_openai
        self.identity = {
            "kind": "llm",
            "model": model,
            "base_url": self.base_url,
            "rubric": rubric.hash,
            "prompt": prompt_hash(rubric),
            "params": self.params,
            "mode": mode,
        }
        self.ended = threading.Event()
        self._alone = threading.Lock()  # of requests before the first answer
        self._lock = threading.Lock()  # of what follows
        self._spent = 0.0
        self._end: UserError | None = None  # what ended the first requests
        self._answered = False  # has the server ever sent a chat completion?
        self._failures = 0  # in a row: without a chat completion, or rejected before the first
        self._longest = (0, 0)  # tokens, as counted by the server, and characters of a prompt
        self._notes: dict[str, str] = {}

    @property
    def caveat(self) -> str:  # type: ignore[override]
        """What the server's answers have shown."""
        return "; ".join(self._notes.values())

    def estimate(self, items: Sequence[Item]) -> str:
        """Requests, tokens and, where the price is known, dollars; on one line."""
        rubric = len(system_message(self.rubric)) * len(items)
        rest = sum(len(messages(item, self.rubric)[-1]["content"]) for item in items)
        tokens = (rubric + rest) // CHARACTERS_PER_TOKEN
        written = COMPLETION_TOKENS * len(items)
        dollars = f", about ${self._dollars(tokens, written):.2f}" if self.price else ""
        return (
            f"{len(items):,} requests to {self.model}, about {tokens:,} prompt tokens (characters "
            f"/ {CHARACTERS_PER_TOKEN}; most are the rubric, the same every time) and {written:,} "
            f"completion tokens ({COMPLETION_TOKENS} each; reasoning models write many "
            f"more){dollars}"
        )

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """One request per item; may be called from several threads.

        Raises:
            UserError: no key; a server that refuses access, has no such model or parameter, or
                redirects; one that can't be reached, fails several times in a row or wants to be
                left alone for long; ``max_cost`` is reached.
        """
        verdicts = []
        for item in items:
            with contextlib.nullcontext() if self._answered else self._first_requests():
                self._check_cost()
                verdicts.append(self._verdict(item))
                self._count(verdicts[-1])
        return verdicts

    @contextlib.contextmanager
    def _first_requests(self) -> Iterator[None]:
        """Lets one request through at a time until one is answered; what ends one ends all."""
        with contextlib.ExitStack() as alone:
            alone.enter_context(self._alone)
            if self._answered:
                alone.close()
            elif self._end is not None:
                raise self._end
            try:
                yield
            except UserError as error:
                self._end = error
                raise

    # -- one item --------------------------------------------------------------------------------

    def _verdict(self, item: Item) -> Verdict:
        said = messages(item, self.rubric)
        request = {"model": self.model, "messages": said, **self.params}
        if form := response_format(self.mode, self.rubric):
            request["response_format"] = form
        try:
            completion = self._completion(request)
        except _Failure as failure:
            return self._failed(failure)
        answer = read_completion(completion, self.rubric)
        tokens = _tokens(completion)
        sent = sum(len(message["content"]) for message in said)
        written = len(answer.answer) + len(answer.reasoning)
        if self.price is not None and not any(tokens):
            self._notes["tokens"] = (
                f"{self.base_url} reports no tokens: costs are an estimate by characters"
            )
        self._check_prompt(tokens[0], sent)
        billed = tokens if any(tokens) else [-(-n // CHARACTERS_PER_TOKEN) for n in (sent, written)]
        served = completion.get("model")
        return replace(
            answer,
            rationale=self._without_key(answer.rationale),
            answer=self._without_key(answer.answer),
            reasoning=self._without_key(answer.reasoning),
            served=self._message_of(served) if isinstance(served, str) else "",
            mode=f"{self.mode}/{answer.mode}" if answer.mode else self.mode,
            error=self._message_of(answer.error),
            prompt_tokens=tokens[0],
            completion_tokens=tokens[1],
            cost=None if self.price is None else self._dollars(*billed),
        )

    def _failed(self, failure: _Failure) -> Verdict:
        """The failure of one item.

        Raises:
            UserError: every other item would fail, too.
        """
        status, message = failure.status, self._message_of(failure.message)
        remedy = REMEDIES.get(402 if failure.code == "insufficient_quota" else status)
        if 300 <= status < 400:
            target = failure.target or "nowhere"
            message = self._message_of(f"HTTP {status}: it redirects them to {target}")
            remedy = "give the other address with --base-url if it is the one meant"
        if status == 401:  # the server's words about a wrong key may repeat a part of it
            message = f"HTTP 401; the key is that in {self.api_key_env or 'no variable'}"
        if remedy and not (status == 403 and self._answered):
            raise UserError(f"{self.base_url} refuses requests ({message})", remedy)
        if failure.wait is not None and failure.wait > LONGEST_WAIT:
            raise UserError(
                f"{self.base_url} wants to be asked again in {failure.wait:.0f} s ({message})",
                "give the same command again then; verdicts so far are kept",
            )
        if failure.code == "content_filter":
            return Verdict(None, "filtered", error=message)
        if not self._answered:
            self._check_request(failure, message)
        return Verdict(None, "unavailable" if failure.passing else "rejected", error=message)

    def _check_request(self, failure: _Failure, message: str) -> None:
        """Raise UserError if it isn't the item that the first request failed for."""
        if failure.passing:
            raise UserError(
                f"{self.base_url} doesn't answer ({message})",
                "check the server, --base-url (it usually ends in /v1) and --timeout",
            )
        about = f"{failure.param or ''} {message}"
        given = {f"--param {name}": name for name in self.params} | {"--model": self.model}
        for flag, name in given.items():
            if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", about):
                raise UserError(
                    f"{self.base_url} refuses {flag} ({message})", "leave it out, or mend it"
                )
        if self.mode != "text" and _FORMAT.search(about):
            others = " or ".join(MODES[MODES.index(self.mode) + 1 :])
            raise UserError(
                f"{self.base_url} refuses --mode {self.mode} ({message})", f"use --mode {others}"
            )

    # -- one request -----------------------------------------------------------------------------

    def _completion(self, request: dict[str, Any]) -> dict[str, Any]:
        """The chat completion, after retries of what may pass.

        Raises:
            _Failure: there is none.
        """
        timeouts = 0
        for retried in range(self.retries + 1):
            limit = self.timeout
            try:
                return self._post(request, limit)
            except _Failure as failure:
                timeouts += failure.slow
                if failure.slow:
                    with self._lock:
                        self.timeout = max(self.timeout, 2 * limit)
                        self._notes["timeout"] = (
                            f"{self.base_url} is slow: the time limit is {self.timeout:g} s now"
                        )
                wait = failure.wait
                if wait is None:
                    wait = min(0.5 * 2**retried, 8.0) * random.uniform(0.75, 1.0)
                unreachable = not (failure.status or failure.slow or self._answered)
                if (
                    failure.status in range(200, 300)  # it is no chat server
                    or not failure.passing
                    or failure.code == "insufficient_quota"
                    or retried == self.retries
                    or timeouts > MOST_TIMEOUTS
                    or wait > LONGEST_WAIT
                    or (unreachable and type(failure.__cause__).__name__ == "ConnectError")
                    or self._wait(wait)
                ):
                    raise
        raise AssertionError("the last try returns or raises")

    def _wait(self, seconds: float) -> bool:
        """Wait before a retry; True if none is wanted any more."""
        return self.ended.wait(seconds)

    def _post(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """One request.

        Raises:
            _Failure: no chat completion came.
        """
        try:
            chat = self._client.with_options(timeout=limit).chat.completions
            others = {name: request[name] for name in request if name not in ("model", "messages")}
            response = chat.with_raw_response.create(
                model=request["model"], messages=request["messages"], extra_body=others
            ).http_response
        except openai.APIStatusError as error:
            response = error.response
        except openai.APITimeoutError as error:
            connecting = type(error.__cause__).__name__ in ("ConnectTimeout", "PoolTimeout")
            raise _Failure(f"no answer in {limit:g} s", slow=not connecting) from error.__cause__
        except openai.OpenAIError as error:
            cause = error.__cause__ or error
            raise _Failure(str(cause) or type(cause).__name__) from cause
        try:
            found = json.loads(response.content)
        except (ValueError, RecursionError):
            found = None
        body: dict[str, Any] = found if isinstance(found, dict) else {}
        status = response.status_code
        problem = _problem_of(body, status)
        if status == 200 and not problem and isinstance(body.get("choices"), list):
            return body
        if status == 200 and problem:  # a proxy's, for an error of the server behind it
            code = str(problem.get("code"))
            status = int(code) if code.isdecimal() and 400 <= int(code) < 600 else 502
        text = problem.get("message") or response.text[:LONGEST_MESSAGE]
        if status == 200:
            raise _Failure(f"not a chat completion: {text!r}", status)
        raise _Failure(
            f"HTTP {status}: {text}",
            status,
            code=problem.get("code"),
            param=problem.get("param"),
            wait=_seconds_to_wait(response),
            target=response.headers.get("location"),
        )

    def _message_of(self, text: str) -> str:
        """What went wrong, on one line and without the key."""
        return one_line(" ".join(self._without_key(text).split()), LONGEST_MESSAGE)

    def _without_key(self, text: str) -> str:
        return text if len(self._key) < LEAST_KEY_LENGTH else text.replace(self._key, "[key]")

    # -- all requests ------------------------------------------------------------------------------

    def _check_cost(self) -> None:
        if self.max_cost is not None and self._spent >= self.max_cost:
            estimated = ", by an estimate" if "tokens" in self._notes else ""
            raise UserError(
                f"--max-cost {self.max_cost:g} is reached: ${self._spent:.4f} is spent{estimated}",
                "the same command goes on with as much again; verdicts so far are kept",
            )

    def _check_prompt(self, tokens: int, characters: int) -> None:
        """Note it if the server read less than it was sent, as its context may be too short.

        Either the tokens are too few for the characters, or a longer prompt has no more of them
        than another that was as long as any.
        """
        with self._lock:
            before, longest = self._longest
            few = 0 < tokens * MOST_CHARACTERS_PER_TOKEN < characters
            if few or (tokens == before > 0 and abs(characters - longest) > 1000):
                self._notes["prompt"] = (
                    f"{self.base_url} counts {tokens} tokens in a prompt of {characters} "
                    "characters: it seems to cut prompts off, so its verdicts are worthless; give "
                    "the model a longer context"
                )
            if tokens > before:
                self._longest = tokens, characters

    def _count(self, verdict: Verdict) -> None:
        """Add up what was spent, and give up on a server that fails again and again."""
        with self._lock:
            self._spent += verdict.cost or 0.0
            rejected = verdict.status == "rejected" and not self._answered
            if verdict.status == "unavailable" or rejected:
                self._failures += 1
            else:
                self._failures = 0
                self._answered |= verdict.status != "rejected"
            if self._failures >= (MOST_REJECTED if rejected else MOST_FAILURES):
                raise UserError(
                    f"{self.base_url} failed {self._failures} times in a row, at last with: "
                    f"{verdict.error}",
                    "check the server, --base-url (it usually ends in /v1), --model and --param, "
                    "then give the same command again; verdicts so far are kept",
                )

    def _dollars(self, prompt: int, completion: int) -> float:
        prompt_price, completion_price = self.price or (0.0, 0.0)
        return (prompt * prompt_price + completion * completion_price) / 1e6

    @cached_property
    def _client(self) -> openai.OpenAI:
        # Of itself the client would send the account's headers to any server.
        account = {
            name: os.environ[variable]
            if self._is_openai and os.environ.get(variable)
            else openai.omit
            for name, variable in ACCOUNT.items()
        }
        http = openai.DefaultHttpxClient(follow_redirects=False)
        return openai.OpenAI(
            api_key=self._key,
            base_url=self.base_url,
            default_headers=account,  # type: ignore[arg-type]  # omit is for this
            max_retries=0,
            http_client=http,
        )

    @cached_property
    def _key(self) -> str:
        key = os.environ.get(self.api_key_env or "", "").strip()
        if not key and self._needs_key:
            raise UserError(
                f"no key for {self.base_url}: {self.api_key_env} is not set",
                "set it, name another with --api-key-env, or give --base-url for a server of yours",
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"${self.api_key_env} holds characters that no key has", "set it again")
        return key or NO_KEY

    def _check_settings(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"no mode {self.mode!r}", f"use {', '.join(MODES)}")
        for name, instead in RESERVED_PARAMS.items():
            if name in self.params:
                raise UserError(f"--param {name} can't be set", f"use {instead}")
        for flag, value in (("--timeout", self.timeout), ("--max-cost", self.max_cost)):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{flag} {value:g} is not above 0", "use seconds or dollars")
        if self.price is not None and not all(0 <= dollars < math.inf for dollars in self.price):
            raise UserError("--price can't be negative", "use dollars per million tokens")
        if self.max_cost is not None and self.price is None:
            raise UserError("--max-cost needs the price", "give --price IN OUT as well")


def _address(base_url: str | None) -> str:
    """The address given, or ``$OPENAI_BASE_URL``, or OpenAI's.

    Raises:
        UserError: it isn't an http address, or more than that: it is stored with the verdicts; or
            it is OpenAI's without encryption, where a key would go in clear.
    """
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
    if parts.hostname == urlsplit(OPENAI_URL).hostname and parts.scheme != "https":
        raise UserError(f"{name} would send the key to OpenAI in clear", "give https://")
    return given.rstrip("/")


def _problem_of(body: dict[str, Any], status: int) -> dict[str, Any]:
    """The error that a body tells of: ``message`` and perhaps ``code`` and ``param``."""
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    problem = body.get("error") or (first.get("error") if isinstance(first, dict) else None)
    if status != 200:
        problem = problem or body.get("detail") or body.get("message")
    if isinstance(problem, dict):
        return problem | {"message": str(problem.get("message") or json.dumps(problem))}
    if not problem:
        return {}
    return {"message": problem if isinstance(problem, str) else json.dumps(problem)}


def _seconds_to_wait(response: Any) -> float | None:
    """What the header Retry-After says, in seconds or as a date; None without one."""
    given = response.headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        seconds = float(given)
        return max(seconds, 0.0) if seconds == seconds else None
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(email.utils.parsedate_to_datetime(given).timestamp() - time.time(), 0.0)
    return None


def _tokens(completion: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and the completion; 0 where the server's count can't be."""
    usage = completion.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    prompt, written = (counts.get(name) for name in ("prompt_tokens", "completion_tokens"))
    if type(prompt) is not int or type(written) is not int:  # True is an int, too
        return 0, 0
    possible = min(prompt, written) >= 0 and max(prompt, written) <= MOST_TOKENS
    return (prompt, written) if possible else (0, 0)
