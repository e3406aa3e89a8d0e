"""The contract of a judge: an :class:`Item` in, a :class:`Verdict` out."""

import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

from ia_mech.errors import UserError
from ia_mech.judge.rubric import BUILT_IN, FOLLOW_UP, NO_FOLLOW_UP, YES_NO, Rubric

UNNAMED = "own-function"  # the name of a judge that is a lambda
JUDGED = "judged"  # the status of a verdict that names a category
# The other statuses. But for ``truncated``, they aren't cached: the same command requests again.
TRUNCATED = "truncated"
FAILURES = ("refused", "filtered", TRUNCATED, "empty", "unparsable", "rejected", "unavailable")
_KINDS: Any = {str: str, int: Real, float | None: Real | None}  # what fields may hold


@dataclass(frozen=True)
class Item:
    """One user turn to judge: the user's query, the assistant's response, the turn written next."""

    query: str
    response: str
    turn: str

    def key(self, judge: str = "") -> str:
        """Content address of a verdict: 64 hex digits over the judge's hash and the texts."""
        # The 0 was the number of a repetition: the built-in judge names items by this.
        text = json.dumps([judge, 0, self.query, self.response, self.turn])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def id(self) -> str:
        """16 hex digits over its texts."""
        return self.key()[:16]


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict on one item, or why there is none.

    Raises:
        TypeError: a text that is none, or a count or cost that is no number.
        ValueError: a category without ``judged`` or the other way round, or a score that is no
            finite number.
    """

    category: str | None  # one of the judge's rubric's; None for a failure
    status: str = JUDGED  # or one of :data:`FAILURES`
    rationale: str = ""  # the evidence in the judge's words
    scores: dict[str, float] | None = None  # probability per category, from judges that have them
    mode: str = ""  # how the judge arrived at it: rule, likelihood, json_schema, …
    error: str = ""  # of a failure, what went wrong, on one line
    prompt_tokens: int = 0  # as billed; 0 for judges that don't count
    completion_tokens: int = 0
    cost: float | None = None  # in US dollars; None if no price is known
    answer: str = ""  # what a model wrote, as it came
    reasoning: str = ""
    served: str = ""  # the model that a server says it answered with

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, _KINDS.get(one.type, object)):
                raise TypeError(f"a verdict whose {one.name} is {value!r:.60}")
        if (self.status == JUDGED) != isinstance(self.category, str):
            raise ValueError(f"a verdict {self.status!r:.60} of {self.category!r:.60}")
        if not all(map(math.isfinite, (self.scores or {}).values())):
            raise ValueError(f"a score that is no finite number: {self.scores}")

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
        return cls(**value)


class Judge:
    """What labels items. Subclass it, and name the subclass with ``--judge module:Class``.

    A judge sees the three texts of an item and nothing else. :mod:`ia_mech.judge.judging` finds the
    distinct items, asks the cache, starts threads, shows progress and writes the rows.

    Attributes:
        identity: all that decides its verdicts (kind, model, rubric hash, settings), as JSON. No
            key. Verdicts in the cache are found by it: change it when the verdicts change.
        paid: whether a verdict costs time or money, so that it is worth keeping in the cache.
        rubric: whose categories its verdicts have.
        caveat: one line to print with its labels; empty for none. It may change while judging.
        batch: how many items :meth:`judge` is given at a time, at most.
        concurrency: how many threads call :meth:`judge` at a time.
        ended: set when no further verdict is wanted, so that no thread waits any longer.
        prepared: whether it holds already what :meth:`prepare` gets.
    """

    identity: dict[str, Any]
    rubric: Rubric = BUILT_IN
    paid = False
    caveat = ""
    batch = 1
    concurrency = 1
    ended = threading.Event()
    prepared = False

    def prepare(self) -> None:
        """Get what judging needs, such as files to download. It is called before any progress is
        shown."""

    def estimate(self, items: Sequence[Item]) -> str:
        """What judging these takes, on one line; empty if it isn't worth a line."""
        return ""

    def fitted_on(self, items: Sequence[Item]) -> list[bool]:
        """Which of these it was fitted on: on them it looks better than it is."""
        return [False] * len(items)

    def judge(self, items: Sequence[Item]) -> Sequence[Verdict]:
        """The verdicts of some items, in their order.

        A failure to judge one item is a verdict; what would make all of them fail, and ends the
        judging, is a ``UserError``.
        """
        raise NotImplementedError


def judge_of(says: Callable[[Item], str | bool]) -> Judge:
    """A judge that puts an item into the category which a function names. If the function says True
    (a follow-up) or False instead, its labels are by :data:`ia_mech.judge.rubric.YES_NO`.

    It is identified by the function's name alone: nothing tells whether the function has changed.
    """
    name = getattr(says, "__name__", type(says).__name__)
    name = UNNAMED if name == "<lambda>" else name
    yes_no = {"True": FOLLOW_UP, "False": NO_FOLLOW_UP}  # NumPy's, too
    kinds: set[bool] = set()

    def judge(self: Judge, items: Sequence[Item]) -> list[Verdict]:
        answers = [says(item) for item in items]
        wrong = [one for one in answers if str(one) not in yes_no and not isinstance(one, str)]
        if wrong:
            raise UserError(
                f"the judge {name} returned {wrong[0]!r:.60}",
                "return True (a follow-up) or False, or the name of a category",
            )
        said = [str(one) for one in answers]
        kinds.update(one in yes_no for one in said)
        if len(kinds) > 1:
            raise UserError(
                f"the judge {name} returned True or False for some turns and a category for others",
                "return one or the other for all of them",
            )
        if True in kinds:
            self.rubric = YES_NO
        return [Verdict(yes_no.get(one, one)) for one in said]

    members = {
        "identity": {"kind": "function", "name": name},
        "judge": judge,
        "__module__": says.__module__,
    }
    return type(name, (Judge,), members)()


def identity_hash(identity: dict[str, Any]) -> str:
    """16 hex digits of a judge's identity."""
    text = json.dumps(identity, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
