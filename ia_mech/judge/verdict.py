"""The contract of a judge: what it is given (:class:`Item`), what it says (:class:`Verdict`).

To add a judge:

1. Write a class with the members of :class:`Judge` in a module of this package. It sees the three
   texts of an item and nothing else, and uses the categories of ``rubric``.
2. Construct it in ``label.make_judge``, which turns flags into a judge.
3. Name it in the choices of ``--judge`` in ``__main__``, with the flags that it alone takes.

The cache, replays, repeats, progress and the rows in the run come from ``label``.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

from ia_mech.errors import UserError
from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE, NAMES

# What a judge's verdict on a turn may be counted for, and in words. A turn is ``grounded`` if it is
# genuine and at most this share of the run's decoys of other conversations have its grounding.
OUTCOMES = {"genuine": "genuine", "grounded": "genuine and grounded"}
GROUNDED_P = 0.05
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
        category: one of the rubric's names, ``cannot_assess`` included; None for a failure.
        status: ``judged``, or the kind of failure: ``refused``, ``unparsable``, ``empty``,
            ``truncated``, ``filtered``, ``rejected``, ``unavailable``.
        rationale: the evidence in the judge's words.
        scores: probability per category, from judges that have them.
        mode: how the judge arrived at it (``rule``, ``likelihood``, ``json_schema``, …).
        error: of a failure, what the server answered, on one line.
        origin: scheme, host and port of the server that answered, if one did.
        prompt_tokens, completion_tokens: as billed, failed attempts at the item included; 0 for
            judges that don't count.
        cost: in US dollars; None if no price is known.
        grounding: how well the turn's words show that it belongs to the conversation (larger is
            better, no unit), from judges that score that; None from others.
    """

    category: str | None
    status: str = JUDGED
    rationale: str = ""
    scores: dict[str, float] | None = None
    mode: str = ""
    error: str = ""
    origin: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    grounding: float | None = None

    @property
    def genuine(self) -> bool | None:
        """Derived from the category; None for a failure and for ``cannot_assess``."""
        if self.category is None or self.category == CANNOT_ASSESS:
            return None
        return self.category == GENUINE

    def with_cost_of(self, earlier: "Verdict") -> "Verdict":
        """This verdict with the tokens and dollars of an earlier attempt at the item on top."""
        costs = [cost for cost in (earlier.cost, self.cost) if cost is not None]
        return replace(
            self,
            prompt_tokens=earlier.prompt_tokens + self.prompt_tokens,
            completion_tokens=earlier.completion_tokens + self.completion_tokens,
            cost=sum(costs) if costs else None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "Verdict":
        """The verdict that :meth:`to_json` gave.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(value, dict) or value.keys() != {field.name for field in fields(cls)}:
            raise ValueError("no verdict")
        verdict = cls(**value)
        if (verdict.status == JUDGED) != (verdict.category in [*NAMES]):
            raise ValueError(f"a verdict {verdict.status!r:.60} of {verdict.category!r:.60}")
        return verdict


class Judge(Protocol):
    """Anything that labels items.

    Attributes:
        identity: all that decides its verdicts (kind, model, rubric hash, settings), as JSON. No
            key, no address with a password in it.
        paid: whether a verdict costs time or money, so that it is worth keeping in the cache.
        caveat: one line to print with its labels; empty for none.
    """

    identity: dict[str, Any]
    paid: bool
    caveat: str

    def estimate(self, items: Sequence[Item]) -> str:
        """What judging these takes, on one line; empty if it isn't worth a line."""
        ...

    def judge(self, items: Sequence[Item], repeats: Sequence[int]) -> Iterator[tuple[int, Verdict]]:
        """Yield (index into items, verdict) as they come, in any order, each index once.

        ``repeats[i]`` numbers the independent answers to one item, from 0. A failure to judge one
        item is a verdict; what makes all of them fail is a ``UserError``.

        If the iterator has a ``close()``, that ends the judging, and what had been received by then
        can still be iterated over, perhaps beginning with the last one again. (A closed generator
        yields nothing more.)
        """
        ...


class CostLimit(UserError):
    """A judge may not spend any more in this invocation."""


def identity_hash(identity: dict[str, Any]) -> str:
    """16 hex digits of a judge's identity."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
