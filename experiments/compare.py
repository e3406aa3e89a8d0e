"""How do models differ in how much their user turns depend on the response?

The numbers of several studies side by side, over the queries that all of them hold: the bits that
turns express, the bits that sites carry, and how much more often a judge calls turns follow-ups to
their own response than to another one. Differences from the first study are paired by query.
Nothing else is computed: each study has stored its numbers by query. Each model wrote its own
responses, which alone can move bits: responses that differ more are easier to tell apart.

Needs: two or more finished studies of the same queries. Cost: seconds.

    ia-mech compare cache/study-A cache/study-B
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from experiments.elicit import arm_name
from experiments.experiment import Conclusion
from experiments.judged import Arms
from experiments.locate import WINDOW
from experiments.shown import Bars, Drawing, Lines, only, sentence_of, tables_of
from ia_mech.cli import path_of
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, all_datasets
from ia_mech.likelihood.carried import CEILING
from ia_mech.models.embedded import cache_dir
from ia_mech.results import Table, folder_of, kind_of, read
from ia_mech.run import Run
from ia_mech.run.sources import split_source

BITS, BEYOND_SIBLINGS = "bits", "follow-ups beyond siblings"
BOUNDS = {BITS: (-np.inf, CEILING), BEYOND_SIBLINGS: (-1.0, 1.0)}
TITLES = {
    BITS: "bits about the response, expressed (own context) and by site alone",
    BEYOND_SIBLINGS: "follow-ups by the judge, beyond siblings",
}
SAMPLED = "sampled"


def run_of(study: Path) -> Path:
    """The run of a finished study."""
    if not kind_of(folder_of(study / "run", "study")):
        raise UserError(f"{study} is not a finished study", "give folders of ia-mech study")
    return study / "run"


def numbers_of(run: Run) -> pd.DataFrame:
    """The numbers of a study by query: ``quantity``, ``term`` (a site, or all turns), ``turns``
    (``greedy``, ``sampled`` or an arm), ``source``, ``dataset``, ``value``."""
    bits = pd.read_parquet(folder_of(run.path, "locate") / "queries.parquet")
    bits["turns"] = bits["temperature"].map(turns_of)
    found = [bits.assign(quantity=BITS, value=bits["bits"])]
    elicited = folder_of(run.path, "elicit") / "rows.parquet"  # --quick leaves it out
    if elicited.is_file():
        arms = pd.read_parquet(elicited).rename(columns={"arm": "turns", BEYOND_SIBLINGS: "value"})
        found.append(arms.assign(quantity=BEYOND_SIBLINGS, term="turns"))
    columns = ["quantity", "term", "turns", "source", "value"]
    rows = pd.concat([frame[columns] for frame in found], ignore_index=True)
    return rows.assign(dataset=[split_source(source)[0] for source in rows["source"]])


def turns_of(temperature: float) -> str:
    """How turns at a temperature are named; NaN is all sampled ones."""
    return SAMPLED if np.isnan(temperature) else arm_name(temperature)


class Compare(Arms):
    name = "compare"
    given = "STUDY", path_of
    judged, loads, several_models, mixed = False, False, True, True
    by = ("term", "turns", "model")
    columns: ClassVar = {
        **dict.fromkeys(("dataset", "model", "term", "turns"), "str"),
        "temperature": "float64",
    }

    @classmethod
    def command(cls, args: argparse.Namespace) -> None:
        names = "-".join(study.resolve().name.removeprefix("study-") for study in args.runs)
        args.out = args.out or cache_dir() / f"compare-{names}"
        args.runs = [run_of(study) for study in args.runs]
        super().command(args)

    def read(self) -> None:
        if len(self.runs) < 2:
            raise UserError("one study can't be compared", "give two or more")
        self.models = [run.model["name"] for run in self.runs]
        if len(set(self.models)) < len(self.models):
            raise UserError(
                f"two studies are of {self.models[0]}", "give studies of different models"
            )

    def rows(self) -> pd.DataFrame:
        """The numbers that all studies have of a query, those of one kind below each other."""
        each = zip(self.models, self.runs, strict=True)
        rows = pd.concat([numbers_of(run).assign(model=model) for model, run in each])
        kind = rows.groupby(["quantity", "term", "turns"], sort=False)
        rows = rows.assign(kind=kind.ngroup()).sort_values("kind", kind="stable")
        of = rows.groupby(["kind", "source"])["model"].transform("nunique")
        rows = rows[of == len(self.runs)].drop(columns="kind").reset_index(drop=True)
        if rows.empty:
            raise UserError("the studies share no queries", "make them with the same --dataset")
        return rows

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        values = {one: rows["value"].where(rows["quantity"] == one) for one in BOUNDS}
        first = {"less": {"model": self.models[0]}}
        return self.compare(rows.assign(**values), BOUNDS, less=first)

    def tables(self, found: pd.DataFrame) -> list[Table]:
        made: list[Table] = []
        for quantity, title in TITLES.items():
            made += tables_of(
                f"{title}; the same queries",
                found,
                {quantity: ("mean", 2), f"{quantity}, less": (f"minus {self.models[0]}", "+.2f")},
                index=("dataset", *self.by),
                rows="queries",
            )
        return made

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        """What sampled turns express, and what sites and windows of layers carry of it."""
        bits = all_datasets(only(found, BITS, turns=SAMPLED))
        made: dict[str, Drawing] = {
            "models": Bars("expressed (own context) and carried", "bits", bits, by="model")
        }
        windows = []
        for run in self.runs:
            rows = read(folder_of(run.path, "locate")).estimates
            rows = rows[(rows["term"] == WINDOW) & (rows["quantity"] == BITS)]
            depth = rows["layer"].astype(float) / run.model["layers"]
            windows.append(rows.assign(depth=depth, model=run.model["name"]))
        if len(layers := pd.concat(windows, ignore_index=True)):
            title = "carried by windows of the response's layers"
            across = "first layer, as a share of all"
            made["layers"] = Lines(title, across, "bits", layers, across="depth", by="model")
        return made

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        words = "bits that sampled turns tell about their response (each model wrote its own)"
        own, less = (
            only(found, quantity, term="own context", turns=SAMPLED)
            for quantity in (BITS, f"{BITS}, less")
        )
        difference = f"the difference from {self.models[0]} on the same queries"
        return Conclusion(
            sentence_of(words, own),
            f"{sentence_of(difference, less, null=0.0)} Within each study every number is a "
            "comparison with other responses to the same query.",
        )


main = Compare.main

if __name__ == "__main__":
    sys.exit(main())
