"""Whether a judge can tell a turn's own conversation from another one: one word per judge.

The word stands wherever numbers of that judge appear. It says nothing of any single number.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ia_mech.data.conversations import UNPERTURBED
from ia_mech.judge.decoys import CONVERSATION
from ia_mech.judge.verdict import OUTCOMES
from ia_mech.stats import Estimate, dyadic_mean

LEVEL = 0.95  # of the interval that decides
GROUNDED, NOT_GROUNDED = "grounded", "not grounded"
UNDECIDED, NO_DECOYS = "undecided", "no decoys"


@dataclass(frozen=True)
class Gate:
    """What the decoys of other conversations say of a judge, over all datasets and temperatures.

    Attributes:
        judge: its name.
        outcome: one of ``judge.verdict.OUTCOMES``.
        decoys: how many there are with both verdicts.
        rate: of the turns of these decoys, after their own contexts.
        floor: of the same turns, after another conversation.
        excess: rate less floor, with its interval.
        margin: rate less twice the floor, with the interval that decides: *grounded* if it lies
            above 0, so that more than half of the rate exceeds the floor, *not grounded* below.
    """

    judge: str
    outcome: str
    decoys: int
    rate: float
    floor: float
    excess: Estimate
    margin: Estimate

    @property
    def verdict(self) -> str:
        """``grounded``, ``not grounded``, ``undecided`` or ``no decoys``."""
        if not self.decoys:
            return NO_DECOYS
        if self.margin.low > 0:
            return GROUNDED
        return NOT_GROUNDED if self.margin.high < 0 else UNDECIDED

    @property
    def word(self) -> str:
        """The verdict; undecided with the number of decoys."""
        return self.verdict + (f" ({self.decoys} decoys)" if self.verdict == UNDECIDED else "")

    def __str__(self) -> str:
        return f"{self.judge}: {self.word}"

    @property
    def sentence(self) -> str:
        """What the word rests on, in one sentence."""
        if not self.decoys:
            return (
                f"the floor of judge {self.judge} is unknown: the run has no decoys (they need two "
                "sources of a dataset)"
            )
        return (
            f"judge {self.judge} on {OUTCOMES[self.outcome]} turns: {self.verdict}. Of "
            f"{self.decoys} turns it accepts {self.rate:.2f} after their own conversation and "
            f"{self.floor:.2f} after another one, as decoys: an excess of {self.excess.text()}"
        )


def gate_of(decoys: pd.DataFrame, judge: str, outcome: str) -> Gate:
    """The gate of a judge.

    Args:
        decoys: as ``Judged.decoys``. Where there are some of unperturbed contexts, these decide.
        judge: its name.
        outcome: one of ``judge.verdict.OUTCOMES``.
    """
    pairs = decoys[decoys["decoy"] == CONVERSATION]
    plain = pairs[pairs["perturbation"] == UNPERTURBED]
    pairs = (pairs if plain.empty else plain).dropna(subset=[outcome, f"own_{outcome}"])
    own, decoy = pairs[f"own_{outcome}"].astype(float), pairs[outcome].astype(float)
    sources = pairs["source"], pairs["lender"]
    return Gate(
        judge=judge,
        outcome=outcome,
        decoys=len(pairs),
        rate=float(own.mean()) if len(pairs) else np.nan,
        floor=float(decoy.mean()) if len(pairs) else np.nan,
        excess=dyadic_mean(own - decoy, *sources, level=LEVEL),
        margin=dyadic_mean(own - 2 * decoy, *sources, ends=(-2, 1), level=LEVEL),
    )
