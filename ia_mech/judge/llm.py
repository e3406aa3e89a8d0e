"""A language model as a judge, at any server that speaks OpenAI's chat-completions protocol.

The client retries by itself what may pass (server errors, rate limits, timeouts, broken
connections). :mod:`ia_mech.judge.label` calls a judge from ``concurrency`` threads, each of which
stores a verdict before it requests the next.
"""

import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import openai

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.judge.prompt import (
    MODES,
    messages,
    prompt_hash,
    read_completion,
    response_format,
    system_message,
)
from ia_mech.judge.rubric import rubric_hash
from ia_mech.judge.verdict import Item, Judge, Verdict

KEY_VARIABLE = (
    "OPENAI_API_KEY"  # goes to OpenAI, or to the server that $OPENAI_BASE_URL names with it
)
OPENAI_URL = "https://api.openai.com/v1"
NO_KEY = "no-key"  # what servers without keys are sent: the protocol wants one
LEAST_KEY_LENGTH = 8  # characters of a key that is a secret; "EMPTY" and the like are none
MOST_FAILURES = 8  # failures of the server in a row that end the judging
LONGEST_MESSAGE = 300  # characters of a server's message
MOST_TOKENS = 10**9  # of one request; a larger count is a server's mistake
CHARACTERS_PER_TOKEN = 4  # of English prose, for estimates
COMPLETION_TOKENS = 60  # of a one-sentence rationale and a name, for estimates
RESERVED_PARAMS = {  # request parameters that are no --param, and what to use instead
    "model": "--model",
    "messages": "nothing: the rubric is fixed",
    "response_format": "--mode",
    "stream": "nothing: answers are read whole",
    "n": "--repeats",
}
FORMAT_WORDS = ("format", "schema", "json", "structured", "guided", "grammar")
_KEY_REMEDY = "set a key that is good for the model, or name its variable with --api-key-env"
REMEDIES = {  # by HTTP status: what to do where every other request would be refused, too
    401: _KEY_REMEDY,
    402: "add credit to the account, then give the same command again; verdicts so far are kept",
    403: _KEY_REMEDY,
    404: "check --model, and --base-url (it usually ends in /v1)",
}


class LlmJudge(Judge):
    """Judges with a language model, at OpenAI or any compatible server.

    Failures, which never name a category: ``refused`` (the refusal field), ``filtered`` (a content
    filter), ``truncated`` (cut off by a token limit before a verdict), ``empty``, ``unparsable``
    (no JSON object, or none of the rubric's names), ``rejected`` (the server takes other items but
    not this one), ``unavailable`` (no chat completion after all retries).

    ``Verdict.mode`` is the form that was requested and, after a slash, where the verdict stood if
    it wasn't all of the content: ``json_schema/text`` (inside other text: the server ignores the
    response format), ``json_object/reasoning`` (in the reasoning field).

    Repeats are the same request again, so they differ as the server samples: with
    ``temperature=0`` they add nothing.

    The key is sent to the server that it is for and nowhere else: redirects aren't followed. What
    the server sends is kept and shown without it.

    Args:
        model: the model's name at the server.
        base_url: the server; ``$OPENAI_BASE_URL`` or OpenAI's by default.
        api_key_env: the environment variable that holds the key; ``OPENAI_API_KEY`` by default, but
            none for a ``base_url`` given here. Read when judging begins: estimates need none.
        mode: ``json_schema``, ``json_object``, ``text``, or ``auto``: the first of these that the
            server doesn't refuse, for the rest of this judge's life.
        params: further request parameters. Nothing is sent that isn't here.
        concurrency: most requests at a time.
        timeout: seconds to wait for an answer, or for more of it.
        retries: how often a failed request is repeated at most.
        price: US dollars per million prompt and completion tokens.
        max_cost: US dollars after which nothing more is requested; open requests may go beyond it.

    Raises:
        UserError: a setting that can't be used.
    """

    paid = True

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
        self._check_settings(mode)
        self.base_url = _address(base_url)
        is_openai = urlsplit(self.base_url).hostname == urlsplit(OPENAI_URL).hostname
        self.api_key_env = api_key_env or (None if base_url and not is_openai else KEY_VARIABLE)
        self._needs_key = bool(api_key_env) or is_openai
        self._modes = list(MODES) if mode == "auto" else [mode]
        self.identity = {
            "kind": "llm",
            "model": model,
            "base_url": self.base_url,
            "rubric": rubric_hash(),
            "prompt": prompt_hash(),
            "params": self.params,
            "mode": mode,
        }
        self._lock = threading.Lock()  # of what follows
        self._spent = 0.0
        self._answered = False  # has the server ever sent a chat completion?
        self._failures = 0  # in a row: without a chat completion, or rejected before the first

    def estimate(self, items: Sequence[Item]) -> str:
        """Requests, tokens and, where the price is known, dollars; on one line."""
        rubric = len(system_message()) * len(items)
        rest = sum(len(messages(item)[-1]["content"]) for item in items)
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
            UserError: no key; a server that refuses access, has no such model or redirects; one
                that fails several times in a row; ``max_cost`` is reached.
        """
        verdicts = []
        for item in items:
            self._check_cost()
            verdicts.append(self._request(item))
            self._count(verdicts[-1])
        return verdicts

    # -- one request -----------------------------------------------------------------------------

    def _request(self, item: Item) -> Verdict:
        mode = self._modes[0]
        request = {"model": self.model, "messages": messages(item), **self.params}
        if form := response_format(mode):
            request["response_format"] = form
        try:
            body = self._client.post(
                "/chat/completions",
                cast_to=bytes,
                body=request,
                options={"follow_redirects": False},
            )
            completion = json.loads(body)
            if not isinstance(completion["choices"], list):
                raise ValueError("no choices")
        except openai.APIStatusError as error:
            if form and _is_about_format(error):
                self._fall_back(mode, self._message_of(error))
                return self._request(item)
            return self._verdict_of(error)
        except openai.OpenAIError as error:
            return Verdict(None, "unavailable", error=self._message_of(error.__cause__ or error))
        except (ValueError, LookupError, TypeError, RecursionError):
            start = body[:LONGEST_MESSAGE].decode("utf-8", "replace")
            message = self._message_of(f"not a chat completion: {start!r}")
            return Verdict(None, "unavailable", error=message)
        answer = read_completion(completion)
        tokens = _tokens(completion)
        return replace(
            answer,
            rationale=self._without_key(answer.rationale),
            mode=f"{mode}/{answer.mode}" if answer.mode else mode,
            error=self._message_of(answer.error),
            prompt_tokens=tokens[0],
            completion_tokens=tokens[1],
            cost=self._dollars(*tokens) if self.price is not None and any(tokens) else None,
        )

    def _fall_back(self, mode: str, reason: str) -> None:
        """Use the next simpler form from now on; of several refused requests, once."""
        if self.identity["mode"] != "auto":
            raise UserError(
                f"{self.base_url} refuses --mode {mode} ({reason})", "use --mode auto or text"
            )
        with self._lock:
            if self._modes[0] == mode:
                self._modes.pop(0)

    def _verdict_of(self, error: openai.APIStatusError) -> Verdict:
        """The failure of one item.

        Raises:
            UserError: every other item would fail, too.
        """
        status, message = error.status_code, self._message_of(error)
        remedy = REMEDIES.get(402 if error.code == "insufficient_quota" else status)
        if 300 <= status < 400:
            target = error.response.headers.get("location", "nowhere")
            message = self._message_of(f"HTTP {status}: it redirects them to {target}")
            remedy = "give the other address with --base-url if it is the one meant"
        if status == 401:  # the server's words about a wrong key may repeat a part of it
            message = f"HTTP 401; the key is that in {self.api_key_env or 'no variable'}"
        if remedy and not (status == 403 and self._answered):
            raise UserError(f"{self.base_url} refuses requests ({message})", remedy)
        if error.code == "content_filter":
            return Verdict(None, "filtered", error=message)
        passing = status in (408, 409, 425, 429) or status >= 500
        return Verdict(None, "unavailable" if passing else "rejected", error=message)

    def _message_of(self, problem: str | BaseException) -> str:
        """What went wrong, on one line and without the key."""
        if isinstance(problem, openai.APIStatusError):
            text = f"HTTP {problem.status_code}: {problem.response.text[:LONGEST_MESSAGE]}"
        elif isinstance(problem, BaseException):
            text = str(problem) or type(problem).__name__
        else:
            text = problem
        return one_line(" ".join(self._without_key(text).split()), LONGEST_MESSAGE)

    def _without_key(self, text: str) -> str:
        return text if len(self._key) < LEAST_KEY_LENGTH else text.replace(self._key, "[key]")

    # -- all requests ------------------------------------------------------------------------------

    def _check_cost(self) -> None:
        if self.max_cost is not None and self._spent >= self.max_cost:
            raise UserError(
                f"--max-cost {self.max_cost:g} is reached: ${self._spent:.4f} is spent",
                "the same command goes on with as much again; verdicts so far are kept",
            )

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
            if self._failures >= MOST_FAILURES:
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
        return openai.OpenAI(
            api_key=self._key,
            base_url=self.base_url,
            max_retries=self.retries,
            timeout=self.timeout,
        )

    @cached_property
    def _key(self) -> str:
        """The key; a server other than OpenAI's may do without."""
        key = os.environ.get(self.api_key_env or "", "").strip()
        if not key and self._needs_key:
            raise UserError(
                f"no key for {self.base_url}: {self.api_key_env} is not set",
                "set it, name another with --api-key-env, or give --base-url for a server of yours",
            )
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"${self.api_key_env} holds characters that no key has", "set it again")
        return key or NO_KEY

    def _check_settings(self, mode: str) -> None:
        if mode not in ("auto", *MODES):
            raise UserError(f"no mode {mode!r}", f"use auto, {', '.join(MODES)}")
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
        UserError: it isn't an http address, or more than that: it is stored with the verdicts.
    """
    given = (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).strip()
    try:
        parts = urlsplit(given)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or parts.query or parts.fragment:
        name = "--base-url" if base_url else "$OPENAI_BASE_URL"
        raise UserError(
            f"{name} is not the address of a server, without user and query",
            "give one such as http://localhost:8000/v1",
        )
    return given.rstrip("/")


def _is_about_format(error: openai.APIStatusError) -> bool:
    """Whether a bad request is refused for its ``response_format``."""
    if error.status_code not in (400, 422) or error.code == "content_filter":
        return False
    text = f"{error.param} {error.response.text[:LONGEST_MESSAGE]}".lower()
    return any(word in text for word in FORMAT_WORDS)


def _tokens(completion: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and the completion; 0 where the server's count can't be."""
    usage = completion.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    prompt, written = (counts.get(name) for name in ("prompt_tokens", "completion_tokens"))
    if type(prompt) is not int or type(written) is not int:  # True is an int, too
        return 0, 0
    possible = min(prompt, written) >= 0 and max(prompt, written) <= MOST_TOKENS
    return (prompt, written) if possible else (0, 0)
