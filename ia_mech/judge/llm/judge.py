"""A language model at a server as a judge."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import openai

from ia_mech.errors import UserError
from ia_mech.judge.llm import prompt
from ia_mech.judge.llm.address import Address
from ia_mech.judge.llm.budget import Budget
from ia_mech.judge.llm.parse import read_completion
from ia_mech.judge.llm.server import CONNECT_SECONDS, Failed, FormatRefused, Halted, Server
from ia_mech.judge.llm.session import Session, Verdicts
from ia_mech.judge.rubric import rubric_hash
from ia_mech.judge.verdict import Item, Verdict

REASKS = 1  # how often an unparsable or empty answer is asked for again, with the same prompt
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
    """Judges by asking a language model, at OpenAI or any compatible server.

    Verdicts other than ``judged``, which never name a category: ``refused`` (the refusal field),
    ``filtered`` (a content filter), ``truncated`` (cut off by a token limit before a verdict),
    ``empty``, ``unparsable`` (no JSON object, or none of the rubric's names; like ``empty`` asked
    for once more), ``rejected`` (the server takes other items but not this one), ``unavailable``
    (nothing after all retries; never cached).

    ``Verdict.mode`` says what was asked for and, after a slash, where the verdict stood if it
    wasn't all of the content: ``json_schema/text`` (inside other text: the server ignores the
    response format), ``json_object/reasoning`` (in the reasoning field).

    Repeats are the same request again, so they differ as the server samples: with
    ``temperature=0`` they say nothing.

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
        UserError: a setting that can't be.
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
        self.price = None if price is None else (price[0], price[1])
        self.max_cost = max_cost
        self._check(mode)
        self.address = Address.of(base_url, api_key_env)
        self._modes = list(prompt.MODES) if mode == "auto" else [mode]
        self.identity: dict[str, Any] = {
            "kind": "llm",
            "model": model,
            "base_url": self.address.shown,
            "rubric": rubric_hash(),
            "prompt": prompt.prompt_hash(),
            "params": self.params,
            "mode": mode,
        }

    def estimate(self, items: Sequence[Item]) -> str:
        """Requests, tokens and, where the price is known, dollars; on one line."""
        if not items:
            return ""
        rubric = len(prompt.system_message())
        rest = sum(len(prompt.messages(item)[-1]["content"]) for item in items)
        tokens = (rubric * len(items) + rest) // CHARACTERS_PER_TOKEN
        written = COMPLETION_TOKENS * len(items)
        line = (
            f"{len(items):,} requests to {self.model}, about {tokens:,} prompt tokens (characters "
            f"/ {CHARACTERS_PER_TOKEN}; {rubric * len(items) / (rubric * len(items) + rest):.0%} "
            f"of them the rubric, the same every time) and {written:,} completion tokens "
            f"({COMPLETION_TOKENS} each; reasoning models write many more)"
        )
        cost = Budget(self.price, None).cost(tokens, written)
        return line if cost is None else f"{line}, about ${cost:.2f}"

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
        limits = [self.params.get(name) for name in ("max_completion_tokens", "max_tokens")]
        limit = next((value for value in limits if isinstance(value, int) and value > 0), None)
        budget = Budget(self.price, self.max_cost, limit)

        @contextlib.asynccontextmanager
        async def connect() -> AsyncIterator[Server]:
            client = openai.AsyncOpenAI(
                api_key=key,
                base_url=self.address.url,
                default_query=self.address.query or None,
                max_retries=0,
                timeout=openai.Timeout(self.timeout, connect=min(self.timeout, CONNECT_SECONDS)),
            )
            async with client:
                yield Server(
                    client,
                    self.address,
                    self.model,
                    self.params,
                    self.timeout,
                    self.retries,
                    budget,
                    key,
                )

        return Verdicts(Session(connect, self._verdict, items, self.concurrency))

    # -- one item ------------------------------------------------------------------------------

    async def _verdict(self, server: Server, item: Item) -> Verdict:
        """One item's verdict; answers that can't be used are asked for once more.

        If that second request fails, is interrupted or may not be made, the first answer stands: it
        was paid for.
        """
        verdict: Verdict | None = None
        for _ in range(1 + REASKS):
            try:
                verdict = await self._ask(server, item, verdict)
            except Failed as failure:
                return verdict or Verdict(None, failure.status, error=failure.said)
            except (UserError, Halted, asyncio.CancelledError):
                # The next item will meet the same problem, or there is no next.
                if verdict is None:
                    raise
                return verdict
            if verdict.status not in ("unparsable", "empty"):
                break
        return verdict

    async def _ask(self, server: Server, item: Item, before: Verdict | None) -> Verdict:
        """One answer as a verdict; tokens and cost include those of the answer ``before``."""
        while True:
            mode = self._modes[0]
            try:
                completion, prompt_tokens, completion_tokens = await server.ask(
                    prompt.messages(item), prompt.response_format(mode)
                )
                break
            except FormatRefused as refusal:
                self._fall_back(mode, str(refusal))
        answer = read_completion(completion)
        prompt_tokens += before.prompt_tokens if before else 0
        completion_tokens += before.completion_tokens if before else 0
        counted = self.price is not None and (prompt_tokens or completion_tokens)
        return Verdict(
            category=answer.category,
            status=answer.status,
            rationale=server.scrub(answer.rationale),
            mode=f"{mode}/{answer.place}" if answer.place else mode,
            error=server.scrub(answer.error),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost=Budget(self.price, None).cost(prompt_tokens, completion_tokens)
            if counted
            else None,
        )

    def _fall_back(self, mode: str, said: str) -> None:
        """Ask for the next simpler form from now on; of several refused requests, once."""
        if mode == "text":  # nothing was asked for, so it was about something else
            raise Failed("rejected", said)
        if self.identity["mode"] != "auto":
            raise UserError(
                f"{self.address.shown} refuses --mode {mode} ({said})", "use --mode auto or text"
            )
        if self._modes[0] == mode:
            self._modes.pop(0)

    # -- settings ------------------------------------------------------------------------------

    def _check(self, mode: str) -> None:
        if not self.model or not self.model.strip():
            raise UserError("--judge llm needs a model", "give --model NAME")
        if mode not in ("auto", *prompt.MODES):
            raise UserError(f"no mode {mode!r}", f"use auto, {', '.join(prompt.MODES)}")
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
