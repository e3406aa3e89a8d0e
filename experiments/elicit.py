"""Do turns react more when they are asked for in another way than by greedy decoding?

The ways of asking, called arms, are each temperature of the run; a system prompt that asks for a
user who follows up; and an opening, words with which every turn is forced to begin. Prompt and
opening are tried greedily and at each temperature; the judge sees neither. An arm's number is the
follow-up rate of its turns, minus that of the same turns after a sibling (another response to the
same query): the control. The best arm is chosen on half of the queries, and what it adds to greedy
decoding, the elicitation gap, is measured on the other half; then the halves change places. The
bootstrap repeats the choice.

Needs: a judged run with several responses per query. Cost: for each of prompt and opening a third
to the whole of the time that sampling the run's turns took.

    ia-mech elicit cache/RUN
    ia-mech elicit cache/RUN --opening "Let me ask one thing." --dry-run
"""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd

from experiments.arms import Arm, conversations_of
from experiments.control import best_elsewhere, halves_of
from experiments.experiment import Conclusion, flag
from experiments.judged import UNCHANGED, Arms
from experiments.outcome import BEYOND_SIBLINGS
from experiments.shown import only
from ia_mech.estimates import ALL, TidyEstimate
from ia_mech.models.embedded import NAME
from ia_mech.settings import Settings
from ia_mech.stats import cluster_bootstrap

PROMPT = (
    "In this conversation the user reads every answer closely. In each further message the user "
    "asks one question about something that the assistant has just said."
)
OPENING = "Thanks. I have one question about what you said."
PROMPTED, OPENED = "prompt", "opening"
GREEDY = "greedy"
GAP, BEST = "elicitation gap", "best arm"


def arm_name(temperature: float, way: str = "") -> str:
    """``greedy``, ``T = 0.7``, ``prompt, greedy``, …"""
    plain = GREEDY if temperature == 0 else f"T = {temperature:g}"
    return f"{way}, {plain}" if way else plain


class Elicit(Arms):
    name = "elicit"
    siblings = True
    by = ("term",)
    less: ClassVar = {"minus greedy": {"term": GREEDY}}
    more: ClassVar = {GAP: ("more than greedy", "+.2f")}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        what = "the system prompt of further arms"
        parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=what)
        what = "words with which turns of further arms begin"
        flag(parser, "--opening", str, OPENING, what, metavar="TEXT")

    def read(self) -> None:
        Settings(opening=self.args.opening)  # refuses what can't be one

    def arms(self) -> Mapping[str, Arm]:
        own = conversations_of(self.contexts)
        return {
            PROMPTED: Arm(
                own, {"samples": 1, "system": self.args.prompt}, flags={"system": "--prompt"}
            ),
            OPENED: Arm(own, {"samples": 1, "opening": self.args.opening}),
        }

    def rows(self) -> pd.DataFrame:
        """A row per arm and query: a temperature and a way of asking are an arm."""
        rows = super().rows()
        ways = rows["term"].replace(UNCHANGED, "")
        names = [arm_name(*one) for one in zip(rows["temperature"], ways, strict=True)]
        return rows.assign(term=names).drop(columns="temperature")

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"rows": rows.rename(columns={"term": "arm"})}

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        found, arms = super().estimate(rows), list(dict.fromkeys(rows["term"]))
        beyond = rows.pivot_table(index="source", columns="term", values=BEYOND_SIBLINGS)[
            arms
        ].dropna()
        halves = halves_of(beyond.index, self.args.seed)
        half = np.array([halves[source] for source in beyond.index], dtype=int)
        more = beyond.sub(beyond[GREEDY], axis=0)
        values = beyond.to_numpy().T, more.to_numpy().T
        chosen = partial(best_elsewhere, *values, half)  # the bootstrap repeats the choice
        (gap,) = cluster_bootstrap(chosen, list(beyond.index), **self.options)
        found.append(TidyEstimate(GAP, {"dataset": ALL, "term": BEST}, len(beyond), gap))
        best = [f"{beyond[half == n].mean().idxmax()} on half {n + 1}" for n in np.unique(half)]
        self.notes.append(f"chosen as the best arm: {', '.join(best)} of the queries.")
        return found

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        greedy, gap = only(found, BEYOND_SIBLINGS, term=GREEDY), only(found, GAP, term=BEST)
        words = (
            "follow-up rate of greedy turns, minus that after another response to the same query"
        )
        sentence = self.tested(words, greedy, most=1)
        sentence += " " + self.tested("what the best other way of asking adds", gap, most=1)
        control = (
            "Every rate is minus the rate of the same turns after siblings, other responses to "
            "the same query. A way of asking is chosen on other queries than it is reported on. "
            f"{self.gate.short}."
        )
        if self.args.opening == OPENING and self.runs[0].model["name"] == NAME:
            control += " The opening was chosen on this model, so what it adds is too large here."
        return Conclusion(sentence, control)


main = Elicit.main

if __name__ == "__main__":
    sys.exit(main())
