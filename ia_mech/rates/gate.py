"""Whether a judge can tell what a turn followed: one word per model, judge and kind of decoy.

The word stands wherever numbers of that judge appear. It says nothing of any single number.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ia_mech.data.conversations import UNPERTURBED
from ia_mech.judge.decoys import AFTER, SIBLING, WRONG
from ia_mech.judge.verdict import OUTCOMES
from ia_mech.stats import Estimate, dyadic_difference

GATE_LEVEL = 0.95  # of the interval that decides
PASSED, NOT_PASSED = "passed", "failed"
UNDECIDED, NO_DECOYS = "undecided", "no decoys"


@dataclass(frozen=True)
class Gate:
    """What decoys of one kind say of a judge, over all datasets and temperatures of a model.

    The margin decides. After wrong conversations it is the rate less twice the floor: more than
    half of the rate must be excess. After siblings it is the excess itself: an apt turn may fit
    another response to its query, too, so that it is a lower bound of how often turns react to
    theirs.
    """

    judge: str
    outcome: str  # one of ``judge.verdict.OUTCOMES``
    decoys: int  # with both verdicts
    rate: float  # of the turns of these decoys after their own contexts; each decoy counts
    floor: float  # of the same turns after the contexts that they didn't follow
    excess: Estimate  # rate less floor
    margin: Estimate
    kind: str = WRONG
    model: str = ""  # whose turns they are
    siblings: "Gate | None" = None  # the gate after siblings, where this one isn't it

    @property
    def verdict(self) -> str:
        """*passed* if the margin's interval lies above 0, *failed* if below, else *undecided*; or
        *no decoys*."""
        if not self.decoys:
            return NO_DECOYS
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
    def sentence(self) -> str:
        """What the words rest on: of wrong conversations, and of siblings where there are any."""
        whose = f", on turns of {self.model}," if self.model else ""
        if not self.decoys:
            text = (
                f"The floor of judge {self.judge}{whose} is unknown: the run has no decoys "
                "of wrong conversations (they need two queries of a dataset)"
            )
        else:
            text = f"Over all temperatures together, judge {self.judge}{whose} calls {self.numbers}"
        if self.siblings is not None and self.siblings.decoys:
            text += f"; it calls {self.siblings.numbers}"
        return text

    @property
    def numbers(self) -> str:
        """Rate, floor and excess in words, with the verdict."""
        decided = f"{self.verdict}, {self.decoys} decoys"
        if self.kind == WRONG:
            twice = f"rate less twice the floor {self.margin.text(sign=True)}"
            decided = f"gate {decided}: {twice}"
        return (
            f"{self.rate:.2f} of the turns {OUTCOMES[self.outcome]}, and {self.floor:.2f} when it "
            f"is shown them after {AFTER[self.kind]}: an excess of "
            f"{self.excess.text(sign=True)} ({decided})"
        )


def gate_of(decoys: pd.DataFrame, judge: str, outcome: str, model: str = "") -> Gate:
    """The gate of a judge on the turns of one model, whose decoys these are
    (``JudgedTurns.decoys``). Where some are of unperturbed contexts, these decide.
    """
    plain = decoys[decoys["perturbation"] == UNPERTURBED]
    decoys = (decoys if plain.empty else plain).dropna(subset=[outcome, f"own_{outcome}"])
    siblings = _gate(decoys, judge, outcome, model, SIBLING)
    return _gate(decoys, judge, outcome, model, WRONG, siblings)


def _gate(
    decoys: pd.DataFrame, judge: str, outcome: str, model: str, kind: str, *siblings: Gate
) -> Gate:
    pairs = decoys[decoys["decoy"] == kind]
    own, other = pairs[f"own_{outcome}"].astype(float), pairs[outcome].astype(float)
    sources = pairs["source"], pairs["shown_source"]
    excess, twice = (
        dyadic_difference(own, other, *sources, times=times, level=GATE_LEVEL) for times in (1, 2)
    )
    margin = twice if kind == WRONG else excess
    rate, floor = (float(of.mean()) if len(pairs) else np.nan for of in (own, other))
    numbers = rate, floor, excess, margin
    return Gate(judge, outcome, len(pairs), *numbers, kind, model, *siblings)
