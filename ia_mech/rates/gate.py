"""The gate: whether a judge can tell the conversation that a turn followed from a wrong one.

It is one word per model, judge and kind of decoy, which stands wherever numbers of that judge
appear. It says nothing of any single number.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ia_mech.data.conversations import UNPERTURBED
from ia_mech.estimates import smallest_effect
from ia_mech.judge.decoys import SIBLING, WRONG
from ia_mech.run.labels import BUILT_IN
from ia_mech.stats import Estimate, dyadic_difference

VERDICTS = ("own_follow_up", "follow_up")  # columns of decoys: after its own context, and there
GATE_LEVEL = 0.95  # of the interval that decides
PASSED, NOT_PASSED = "passed", "failed"
UNDECIDED, NO_DECOYS = "undecided", "no decoys"
RULE = (
    "passed if the follow-up rate is shown to be more than twice the rate after wrong conversations"
)


@dataclass(frozen=True)
class Gate:
    """What decoys of one kind say of a judge, over all datasets and temperatures of a model.

    The margin decides. After wrong conversations it is the rate minus twice the floor
    (:data:`RULE`). After siblings it is the rate minus the floor. An apt turn may fit
    another response to its query, too: the rate beyond siblings is a lower bound of how often turns
    react to the response that they followed.
    """

    judge: str
    decoys: int  # with both verdicts
    rate: float  # at which their turns are follow-ups to their own contexts; each decoy counts
    floor: float  # at which they are follow-ups to the contexts that they didn't follow
    beyond: Estimate  # rate minus floor
    margin: Estimate
    kind: str = WRONG
    model: str = ""  # whose turns they are
    siblings: "Gate | None" = None  # the gate after siblings, where this one isn't it

    @property
    def verdict(self) -> str:
        """*passed* if the margin's interval lies above 0, *failed* if below, else *undecided*, as
        with so few queries that no interval is shown; or *no decoys*."""
        if not self.decoys:
            return NO_DECOYS
        if self.margin.few:
            return UNDECIDED
        if self.margin.low > 0:
            return PASSED
        return NOT_PASSED if self.margin.high < 0 else UNDECIDED

    @property
    def word(self) -> str:
        """The verdict; undecided with the number of decoys."""
        return self.verdict + (f" ({self.decoys} decoys)" if self.verdict == UNDECIDED else "")

    def __str__(self) -> str:
        return f"{self.judge}: {self.word}"

    @property
    def reacts(self) -> bool:
        """Whether turns are shown to react to the response that they followed."""
        return self.siblings is not None and self.siblings.verdict == PASSED

    @property
    def short(self) -> str:
        """The verdict in a sentence without a full stop at its end."""
        if not self.decoys:
            of_model = f", on turns of {self.model}," if self.model else ""
            return (
                f"There is no control of {named(self.judge)}{of_model}: it was shown no turn "
                "after a wrong conversation, which takes two queries of a dataset"
            )
        what = "" if self.verdict != NOT_PASSED else ": don't rely on its rates"
        if self.verdict == UNDECIDED:
            few = self.margin.few or np.isnan(self.margin.value)
            what = ", of too few queries to be sure" if few else self.enough
        floor, of = self.count(self.floor), f" of {self.model}" if self.model else ""
        return (
            f"Judge's control {self.verdict}: of the {self.decoys} turns{of}, {named(self.judge)} "
            f"calls {self.count(self.rate)} follow-ups to their own conversation, and "
            f"{floor or 'none'} to a wrong one (of another query){what}"
        )

    @property
    def enough(self) -> str:
        """That the control isn't passed; and how many queries like these would show with 80% power
        that it is, if it seems to be."""
        least = smallest_effect(vars(self.margin), GATE_LEVEL)
        said = f"; {self.margin.sources} queries are too few to pass"
        if not least > self.margin.value > 0:
            return said
        needed = math.ceil(self.margin.sources * (least / self.margin.value) ** 2)
        return f"{said} (about {needed} such would do)"

    @property
    def details(self) -> list[str]:
        """The rule behind the verdict, in sentences: of wrong conversations, and of siblings
        where there are any."""
        found = []
        if self.decoys:
            found.append(
                "Over all temperatures together, the difference of the two rates is "
                f"{self.beyond.text(sign=True)}. The control is {RULE}: the first minus twice the "
                f"second is {self.margin.text(sign=True)}."
            )
        if (siblings := self.siblings) is not None and siblings.decoys:
            found.append(
                f"The judge was also shown turns {siblings.decoys} times after siblings, other "
                f"responses to the same query: it called {siblings.count(siblings.floor)} of them "
                f"follow-ups there, and {siblings.count(siblings.rate)} after their own response, "
                f"a difference of {siblings.beyond.text(sign=True)}."
            )
        return found

    def count(self, rate: float) -> int:
        """How many decoys a rate is: counts can be subtracted, unlike rounded rates."""
        return round(rate * self.decoys)


def named(judge: str) -> str:
    """A judge as sentences name it."""
    return "the built-in judge" if judge == BUILT_IN else f"judge {judge}"


def gate_of(decoys: pd.DataFrame, judge: str, model: str = "") -> Gate:
    """The gate of a judge on the turns of one model, whose decoys these are
    (``JudgedTurns.decoys``). Decoys of unperturbed contexts decide, where there are any.
    """
    plain = decoys[decoys["perturbation"] == UNPERTURBED]
    decoys = (decoys if plain.empty else plain).dropna(subset=[*VERDICTS])
    siblings = _gate(decoys, judge, model, SIBLING)
    return _gate(decoys, judge, model, WRONG, siblings)


def _gate(decoys: pd.DataFrame, judge: str, model: str, kind: str, *siblings: Gate) -> Gate:
    pairs = decoys[decoys["decoy"] == kind]
    own, other = (pairs[name].astype(float) for name in VERDICTS)
    sources = pairs["source"], pairs["shown_source"]
    beyond, twice = (
        dyadic_difference(own, other, *sources, times=times, level=GATE_LEVEL) for times in (1, 2)
    )
    margin = twice if kind == WRONG else beyond
    rate, floor = (float(of.mean()) if len(pairs) else np.nan for of in (own, other))
    numbers = rate, floor, beyond, margin
    return Gate(judge, len(pairs), *numbers, kind, model, *siblings)
