"""A language model as a judge, at any server that speaks OpenAI's chat-completions protocol."""

import math
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ia_mech.errors import UserError
from ia_mech.judge.answers import read_completion
from ia_mech.judge.prompt import MODES, messages, prompt_hash, response_format, system_message
from ia_mech.judge.rubric import BUILT_IN, Rubric
from ia_mech.judge.server import LONGEST_WAIT, NO_CREDIT, ChatServer, Failure
from ia_mech.judge.verdict import Item, Judge, Verdict

MOST_FAILURES = 8  # failures of the server in a row that end the judging
MOST_REJECTED = 3  # items that a server rejects before its first answer
MOST_TOKENS = 10**9  # of one request; a larger count is a server's mistake
CHARACTERS_PER_TOKEN = 4  # of English prose, for estimates
MOST_CHARACTERS_PER_TOKEN = 6  # of any tokenizer for the rubric: fewer tokens were cut off
COMPLETION_TOKENS = 60  # of a one-sentence rationale and a name, for estimates
RESERVED_PARAMS = {  # request parameters that are no --param, and what to use instead
    "model": "--model",
    "messages": "--rubric",
    "response_format": "--mode",
    "stream": "nothing: answers are read whole",
    "n": "nothing: a turn has one label",
}
_FORMAT = re.compile(  # what servers call the form of answers where they refuse one
    r"response_format|json.(schema|object)|structured.output|guided|grammar", re.IGNORECASE
)
_CHECK = "check the server, --base-url (it usually ends in /v1)"
_AGAIN = "give the same command again; labels so far are kept"
_KEY_REMEDY = "set a key that is good for the model, or name its variable with --api-key-env"
_REMEDIES = {  # by HTTP status: what to do where every other request would be refused, too
    401: _KEY_REMEDY,
    402: f"add credit to the account, then {_AGAIN}",
    403: _KEY_REMEDY,
    404: "check --model, and --base-url (it usually ends in /v1)",
}


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

    Args:
        model: the model's name at the server.
        base_url, api_key_env, timeout, retries: see :class:`ia_mech.judge.server.ChatServer`.
        mode: the form of answers that is requested, one of :data:`ia_mech.judge.prompt.MODES`.
        params: further request parameters. Nothing is sent that isn't here.
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
        self.concurrency, self.price, self.max_cost = concurrency, price, max_cost
        self._check_settings(timeout)
        self.server = ChatServer(base_url, api_key_env, timeout, retries)
        self.identity = {
            "kind": "llm",
            "model": model,
            "base_url": self.server.url,
            "rubric": rubric.hash,
            "prompt": prompt_hash(rubric),
            "params": self.params,
            "mode": mode,
        }
        self.ended = threading.Event()
        self._lock = threading.Lock()  # of what follows
        self._spent = 0.0
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
            self._check_cost()
            verdicts.append(self._verdict(item))
            self._count(verdicts[-1])
        return verdicts

    # -- one item --------------------------------------------------------------------------------

    def _verdict(self, item: Item) -> Verdict:
        said = messages(item, self.rubric)
        request = {"model": self.model, "messages": said, **self.params}
        if form := response_format(self.mode, self.rubric):
            request["response_format"] = form
        try:
            completion, slow = self.server.completion(request, self.ended)
        except Failure as failure:
            return self._failed(failure)
        answer = read_completion(completion, self.rubric, item)
        sent = sum(len(message["content"]) for message in said)
        tokens = _tokens(completion)
        billed = tokens
        if not any(tokens):
            characters = sent, len(answer.answer) + len(answer.reasoning)
            billed = [-(-count // CHARACTERS_PER_TOKEN) for count in characters]
        self._note(slow, tokens[0], sent)
        served, clean = completion.get("model"), self.server.without_key
        return replace(
            answer,
            rationale=clean(answer.rationale),
            answer=clean(answer.answer),
            reasoning=clean(answer.reasoning),
            served=self.server.line(served) if isinstance(served, str) else "",
            mode=f"{self.mode}/{answer.mode}" if answer.mode else self.mode,
            error=self.server.line(answer.error),
            prompt_tokens=tokens[0],
            completion_tokens=tokens[1],
            cost=None if self.price is None else self._dollars(*billed),
        )

    def _failed(self, failure: Failure) -> Verdict:
        """The failure of one item.

        Raises:
            UserError: every other item would fail, too.
        """
        url, status, message = self.server.url, failure.status, self.server.line(failure.message)
        remedy = _REMEDIES.get(402 if failure.code == NO_CREDIT else status)
        if 300 <= status < 400:
            target = failure.target or "nowhere"
            message = self.server.line(f"HTTP {status}: it redirects them to {target}")
            remedy = "give the other address with --base-url if it is the one meant"
        if status == 401:  # the server's words about a wrong key may repeat a part of it
            message = f"HTTP 401; the key is that in {self.server.key_variable or 'no variable'}"
        if remedy and not (status == 403 and self._answered):
            raise UserError(f"{url} refuses requests ({message})", remedy)
        if failure.wait is not None and failure.wait > LONGEST_WAIT:
            asked = f"{url} wants to be asked again in {failure.wait:.0f} s ({message})"
            raise UserError(asked, _AGAIN.replace("again", "again then"))
        if failure.code == "content_filter":
            return Verdict(None, "filtered", error=message)
        if not self._answered:  # else it is the item
            self._check_request(failure, message)
        return Verdict(None, "unavailable" if failure.passing else "rejected", error=message)

    def _check_request(self, failure: Failure, message: str) -> None:
        """Raise UserError if it isn't the item that the first request failed for."""
        url, about = self.server.url, f"{failure.param or ''} {message}"
        if failure.passing:
            raise UserError(f"{url} doesn't answer ({message})", f"{_CHECK} and --timeout")
        given = {f"--param {name}": name for name in self.params} | {"--model": self.model}
        for flag, name in given.items():
            if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", about):
                raise UserError(f"{url} refuses {flag} ({message})", "leave it out, or mend it")
        if self.mode != "text" and _FORMAT.search(about):
            others = " or ".join(MODES[MODES.index(self.mode) + 1 :])
            problem = f"{url} refuses --mode {self.mode} ({message})"
            raise UserError(problem, f"use --mode {others}")

    # -- all items -------------------------------------------------------------------------------

    def _note(self, slow: bool, tokens: int, characters: int) -> None:
        """Note what an answer shows of the server.

        It read less than it was sent if the tokens of a prompt are too few for its characters, or
        if a longer prompt has no more of them than another that was as long as any.
        """
        url = self.server.url
        with self._lock:
            if slow:
                limit = f"the time limit is {self.server.timeout:g} s now"
                self._notes["timeout"] = f"{url} is slow: {limit}"
            if self.price is not None and not tokens:
                estimate = "costs are an estimate by characters"
                self._notes["tokens"] = f"{url} reports no tokens: {estimate}"
            before, longest = self._longest
            few = 0 < tokens * MOST_CHARACTERS_PER_TOKEN < characters
            if few or (tokens == before > 0 and abs(characters - longest) > 1000):
                self._notes["prompt"] = (
                    f"{url} counts {tokens} tokens in a prompt of {characters} characters: it "
                    "seems to cut prompts off, so its labels are worthless; give the model a "
                    "longer context"
                )
            if tokens > before:
                self._longest = tokens, characters

    def _check_cost(self) -> None:
        if self.max_cost is not None and self._spent >= self.max_cost:
            estimated = ", by an estimate" if "tokens" in self._notes else ""
            raise UserError(
                f"--max-cost {self.max_cost:g} is reached: ${self._spent:.4f} is spent{estimated}",
                "the same command goes on with as much again; labels so far are kept",
            )

    def _count(self, verdict: Verdict) -> None:
        """Add up what was spent, and give up on a server that fails again and again."""
        with self._lock:
            self._spent += verdict.cost or 0.0
            rejected = verdict.status == "rejected" and not self._answered
            if verdict.status != "unavailable" and not rejected:
                self._failures = 0
                self._answered |= verdict.status != "rejected"
                return
            self._failures += 1
            if self._failures >= (MOST_REJECTED if rejected else MOST_FAILURES):
                raise UserError(
                    f"{self.server.url} failed {self._failures} times in a row, at last with: "
                    f"{verdict.error}",
                    f"{_CHECK}, --model and --param, then {_AGAIN}",
                )

    def _dollars(self, prompt: int, completion: int) -> float:
        prompt_price, completion_price = self.price or (0.0, 0.0)
        return (prompt * prompt_price + completion * completion_price) / 1e6

    def _check_settings(self, timeout: float) -> None:
        for name in self.params.keys() & RESERVED_PARAMS.keys():
            raise UserError(f"--param {name} can't be set", f"use {RESERVED_PARAMS[name]}")
        for flag, value in (("--timeout", timeout), ("--max-cost", self.max_cost)):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{flag} {value:g} is not above 0", "use seconds or dollars")
        if self.price is not None and not all(0 <= dollars < math.inf for dollars in self.price):
            raise UserError("--price can't be negative", "use dollars per million tokens")
        if self.max_cost is not None and self.price is None:
            raise UserError("--max-cost needs the price", "give --price IN OUT as well")


def _tokens(completion: dict[str, Any]) -> list[int]:
    """Tokens of the prompt and the completion; 0 where the server's count can't be."""
    usage = completion.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    found = (counts.get(name) for name in ("prompt_tokens", "completion_tokens"))
    kept = [count for count in found if type(count) is int and 0 <= count <= MOST_TOKENS]
    return kept if len(kept) == 2 else [0, 0]
