"""What requests cost, and stopping before they cost too much."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ia_mech.judge.verdict import CostLimit

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
