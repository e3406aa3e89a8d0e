"""What a judge is given and what it says: the few types that all judges share.

A judge sees text and nothing else. A label that came from log-probabilities or activations would
make every later probe of those circular, so there is no place for them here.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ia_mech.errors import UserError
from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE

JUDGED = "judged"  # the status of a verdict that names a category; any other names a failure


@dataclass(frozen=True)
class Item:
    """One user turn to judge: the user's query, the assistant's response, the turn written next."""

    query: str
    response: str
    turn: str

    def key(self, judge: str, repeat: int) -> str:
        """Content address of a verdict: 64 hex digits over the judge's hash, repeat and texts."""
        text = json.dumps([judge, repeat, self.query, self.response, self.turn])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Verdict:
    """What a judge says of one item.

    Attributes:
        category: one of the rubric's names, ``cannot_assess`` included; None if there is none.
        status: ``judged``, or why there is no category: ``refused``, ``unparsable``, ``empty``,
            ``truncated``, ``rejected``, ``unavailable``, ….
        rationale: the evidence in the judge's words.
        scores: probability per category, from judges that have them.
        mode: how a language model was made to answer (``json_schema``, ``json_object``, ``text``).
        error: of a failure, what the server said, on one line.
        prompt_tokens, completion_tokens: as billed, failed attempts at the item included; 0 for
            judges that don't count.
        cost: in US dollars; None if no price is known.
    """

    category: str | None
    status: str = JUDGED
    rationale: str = ""
    scores: dict[str, float] | None = None
    mode: str = ""
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None

    @property
    def genuine(self) -> bool | None:
        """Derived from the category; None where the judge could not say."""
        if self.category is None or self.category == CANNOT_ASSESS:
            return None
        return self.category == GENUINE

    def after(self, earlier: "Verdict") -> "Verdict":
        """This verdict with what an earlier attempt at the same item cost on top."""
        costs = [cost for cost in (earlier.cost, self.cost) if cost is not None]
        return replace(
            self,
            prompt_tokens=earlier.prompt_tokens + self.prompt_tokens,
            completion_tokens=earlier.completion_tokens + self.completion_tokens,
            cost=sum(costs) if costs else None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Judge(Protocol):
    """Anything that labels items.

    Attributes:
        identity: all that decides its verdicts (kind, model, rubric hash, settings), as JSON. No
            key, no address with a password in it.
        paid: whether a verdict costs time or money, so that it is worth keeping in the cache.
    """

    identity: dict[str, Any]
    paid: bool

    def estimate(self, items: Sequence[Item]) -> str:
        """What judging these will take, on one line; empty if it isn't worth saying."""
        ...

    def judge(self, items: Sequence[Item], repeats: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """Yield (index into items, verdict) as they come, in any order, each index once.

        ``repeats[i]`` numbers the independent answers to one item, from 0. A failure to judge one
        item is a verdict; what makes all of them fail is a ``UserError``.

        If the iterator has a ``close()``, that ends the judging, and what had been received by then
        can still be iterated over, perhaps with the last one again. (Of a generator that is
        nothing.)
        """
        ...


class CostLimit(UserError):
    """A judge may not spend any more in this invocation."""


def identity_hash(identity: dict[str, Any]) -> str:
    """16 hex digits of a judge's identity."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
