"""Do turns react more when they are asked for in another way than by greedy decoding?

The ways of asking, called arms, are listed before anything is sampled: each temperature of the run;
a system prompt that asks for a user who follows up, and words with which every turn is forced to
begin (an opening), both greedily and at each temperature; with --intervention also a steering
vector. All are the same for every response to a query, and the judge sees neither prompt nor
opening. An arm's number is the rate at which the judge accepts its turns, minus the rate at which
it accepts the same turns after another response to the same query: the control. The best arm is
chosen on half of the queries, its excess over greedy decoding is measured on the other half, and
the other way round; the bootstrap repeats the choice. This excess is the elicitation gap.

Needs: a judged run with several responses per query. Cost: for each of prompt and opening a third
to the whole of the time that sampling the run's turns took; the rules judge labels the new turns at
once.

    python -m experiments.elicit cache/RUN
    python -m experiments.elicit cache/RUN --opening "Let me ask one thing." --dry-run
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment
from experiments.tables import sentence_of, tables_of
from ia_mech.cli import path_of, shell_word
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, holm_corrected, paired_row
from ia_mech.stats import cluster_bootstrap, cluster_mean

if TYPE_CHECKING:
    from experiments.figures import Drawing
    from ia_mech.data.conversations import Conversation
    from ia_mech.results import Table
    from ia_mech.run import Run

PROMPT = (
    "In this conversation the user reads every answer closely. In each further message the user "
    "asks one question about something that the assistant has just said."
)
OPENING = "Thanks. I have one question about what you said."
PROMPTED, OPENED, STEERED = "prompt", "opening", "steering"
GREEDY = "greedy"
RATE, SIBLINGS, EXCESS = "accepted", "accepted after siblings", "excess over siblings"
LESS_GREEDY = "excess, less greedy's"  # paired by query
GAP, BEST, TEMPERATURE = "elicitation gap", "best arm", "best temperature"


def arm_name(temperature: float, way: str = "") -> str:
    """``greedy``, ``T = 0.7``, ``prompt, greedy``, …"""
    plain = GREEDY if temperature == 0 else f"T = {temperature:g}"
    return f"{way}, {plain}" if way else plain


def rates_by_query(decoys: pd.DataFrame, outcome: str) -> pd.DataFrame:
    """Rates of arms by query, from turns shown after siblings.

    Args:
        decoys: a row per turn and sibling: ``arm``, ``source``, ``dataset``, and of ``outcome`` the
            verdict after the sibling and, as ``own_…``, after what the turn followed.
        outcome: whose rate.

    Returns:
        One row per arm and source with both verdicts: :data:`RATE`, :data:`SIBLINGS` and
        :data:`EXCESS`, means over its turns.
    """
    both = decoys.dropna(subset=[outcome, f"own_{outcome}"])
    own, other = both[f"own_{outcome}"].astype(float), both[outcome].astype(float)
    rows = both[["arm", "dataset", "source"]].astype(object)
    rows = rows.assign(**{RATE: own, SIBLINGS: other, EXCESS: own - other})
    return rows.groupby(["arm", "dataset", "source"], sort=False).mean().reset_index()


def gaps(excess: np.ndarray, greedy: int, half: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Gaps of the best arm, which is chosen on one half of the queries and read off the other.

    Args:
        excess: ``[arms, queries]``.
        greedy: which arm is subtracted; it may be chosen, too, and then the gap is 0.
        half: ``[queries]`` 0 or 1.
        counts: ``[resamples, queries]`` how often each query was drawn.

    Returns:
        ``[resamples]``, each the mean over both halves weighted by their queries; NaN where a half
        is empty.
    """
    total = np.zeros(len(counts))
    for chosen_on in (0, 1):
        ranking = counts * (half == chosen_on)
        reporting = counts * (half != chosen_on)
        best = (ranking @ excess.T).argmax(1)  # sums rank as means do
        more = excess[best] - excess[greedy]  # [resamples, queries]
        total += (reporting * more).sum(1)
        total[ranking.sum(1) == 0] = np.nan
    return total / counts.sum(1)


class Elicit(Experiment):
    """See the module."""

    name = "elicit"
    siblings = True
    judged = True
    beside = "elicit"

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--outcome",
            choices=("genuine", "grounded"),
            default="genuine",
            help="what counts as accepted (default: genuine)",
        )
        parser.add_argument(
            "--prompt", default=PROMPT, metavar="TEXT", help="the system prompt of further arms"
        )
        parser.add_argument(
            "--opening",
            default=OPENING,
            metavar="TEXT",
            help=f"the words that turns of further arms go on from (default: {OPENING!r})",
        )
        parser.add_argument(
            "--intervention",
            type=path_of,
            metavar="FILE",
            help="further arms: steer the model with this vector, which must not have been fitted "
            "on these queries (docs/steering.md)",
        )

    @property
    def ways(self) -> dict[str, dict[str, Any]]:
        """How the run's contexts are sampled again: the name of the way → what differs."""
        found = {PROMPTED: {"system": self.args.prompt}, OPENED: {"opening": self.args.opening}}
        steered = {STEERED: {"intervention": self.args.intervention}}
        return found | (steered if self.args.intervention else {})

    def read(self) -> None:
        from ia_mech.settings import Settings
        from ia_mech.steering import SteeringVector

        Settings(opening=self.args.opening)  # refuses what can't be one
        if self.args.intervention:
            vector = SteeringVector.load(self.args.intervention)
            vector.check_weights(self.runs[0].model["weights_hash"])

    def decoding(self) -> dict[str, Any]:
        return {"samples": 1}

    def conversations(self) -> "Mapping[str, list[Conversation]]":
        from experiments.resample import conversations_of

        contexts = pd.concat([query.contexts for query in self.queries], ignore_index=True)
        return dict.fromkeys(self.ways, conversations_of(contexts))

    def plan(self) -> dict[str, str]:
        temperatures = [0.0, *self.runs[0].settings["temperatures"]]
        arms = [arm_name(t, way) for way in ("", *self.ways) for t in temperatures]
        return {"arms": "; ".join(arms), **super().plan()}

    def sample(self, name: str, conversations: "list[Conversation]") -> "Run":
        from experiments.resample import resample_run

        where, changes = self.place(name), self.ways[name] | self.decoding() | {"crew": self.crew}
        return resample_run(self.runs[0], conversations, where, ("header_last",), **changes)

    def rows(self) -> pd.DataFrame:
        from experiments.resample import judge_alike
        from ia_mech.judge.decoys import SIBLING
        from ia_mech.rates.load import NO_ANNOTATOR, read_runs

        assert self.gate is not None
        judge_alike(self.runs[0], list(self.sampled.values()), self.gate.judge)
        parts = []
        for way, runs in {"": self.runs, **{k: [run] for k, run in self.sampled.items()}}.items():
            decoys = read_runs(runs, self.gate.judge, NO_ANNOTATOR).decoys
            mine = decoys[decoys["decoy"] == SIBLING]
            arms = [arm_name(t, way) for t in mine["temperature"]]
            parts.append(mine.assign(arm=arms))
        rows = pd.concat(parts, ignore_index=True)
        if rows.empty:
            raise UserError(
                f"{self.runs[0].path} has no turns judged after siblings",
                "judge it again: python -m ia_mech.judge run "
                f"{shell_word(self.runs[0].path)} --replace",
            )
        return rates_by_query(rows, self.args.outcome)

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        level = self.args.level
        arms = list(dict.fromkeys(rows["arm"]))
        for arm in arms:
            mine = rows[rows["arm"] == arm]
            for quantity, low in ((RATE, 0.0), (SIBLINGS, 0.0), (EXCESS, -1.0)):
                found = cluster_mean(mine[quantity], mine["source"], level=level).clip(low, 1.0)
                yield TidyEstimate(quantity, {"dataset": ALL, "term": arm}, len(mine), found)
        group = Group(np.array([]), self.options, {"dataset": ALL})
        by_arm = {arm: rows[rows["arm"] == arm] for arm in arms}
        base = by_arm.pop(GREEDY)
        less = [
            paired_row(
                group,
                LESS_GREEDY,
                own[EXCESS],
                own["source"],
                base[EXCESS],
                base["source"],
                term=arm,
            )
            for arm, own in by_arm.items()
        ]
        yield from holm_corrected(less, lambda row: row.quantity)
        table = rows.pivot_table(index="arm", columns="source", values=EXCESS, sort=True)
        table = table.loc[arms].dropna(axis=1)
        excess = table.to_numpy()
        order = np.random.default_rng([self.args.seed, 3]).permutation(excess.shape[1])
        half = np.empty(len(order), dtype=int)
        half[order] = np.arange(len(order)) % 2
        # Of all arms, and of those of the run's own turns, whose states other experiments measure.
        plain = [number for number, arm in enumerate(arms) if ", " not in arm]
        for name, among in ((BEST, list(range(len(arms)))), (TEMPERATURE, plain)):
            greedy = among.index(arms.index(GREEDY))

            def statistic(counts: np.ndarray, among=among, greedy=greedy) -> np.ndarray:
                return gaps(excess[among], greedy, half, counts)

            (gap,) = cluster_bootstrap(statistic, list(table.columns), **self.options)
            yield TidyEstimate(GAP, {"dataset": ALL, "term": name}, excess.shape[1], gap)
        for number in (0, 1):
            best = arms[int(excess[:, half == number].mean(1).argmax())]
            self.notes.append(f"chosen on half {number + 1} of the queries: {best}.")

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        columns: dict[str, tuple[str, int | str]] = {
            RATE: ("accepted", 2),
            SIBLINGS: ("after siblings", 2),
            EXCESS: ("excess", "+.2f"),
            LESS_GREEDY: ("less greedy's", "+.2f"),
            GAP: ("gap to greedy", "+.2f"),
        }
        return tables_of(
            f"turns that the judge accepts ({self.args.outcome})",
            found,
            columns,
            index=("dataset", "term"),
            rows="queries",
            legend="Each query counts alike. After siblings: the same turns, shown after other "
            "responses to the same query. Less greedy's: an arm's excess less that of greedy "
            "turns, paired by query; p: Holm-corrected over arms.",
        )

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Bars

        rows = found[found["quantity"] == EXCESS]
        title = f"{self.runs[0].model['name']} · accepted beyond siblings"
        return {"arms": Bars(title, "rate less that after siblings", rows)}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        gap = found[(found["quantity"] == GAP) & (found["term"] == BEST)]
        greedy = found[(found["quantity"] == EXCESS) & (found["term"] == GREEDY)]
        level = self.args.level
        sentence = " ".join(
            [
                sentence_of(
                    "accepted greedy turns, beyond siblings", greedy, null=0.0, level=level
                ),
                sentence_of(
                    "the best arm, chosen on other queries, adds", gap, null=0.0, level=level
                ),
            ]
        )
        assert self.gate is not None
        control = (
            "Rates are less those of the same turns after siblings; an arm is never chosen on the "
            f"queries that it is reported on. {self.gate.sentence}."
        )
        return Conclusion(sentence, control)


main = Elicit.main

if __name__ == "__main__":
    sys.exit(main())
