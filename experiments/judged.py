"""Turns under arms, measured and compared, paired by query.

A subclass of :class:`Arms` declares what its arms are, and what each is compared with. Usually a
judge labels the turns: how often they are follow-ups is told with the two parts of that rate, *in
role* and *once in role*. Where queries have several responses (``siblings``), what counts is the
rate beyond siblings: minus that of the same turns after siblings. Something else of turns can be
measured without a judge (``measured``). ``docs/worked_arm.py`` is one to begin from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from experiments.arms import verdicts_of
from experiments.experiment import Conclusion, Experiment
from experiments.outcome import BEYOND_SIBLINGS, IN_ROLE, ONCE_IN_ROLE, RATE, SIBLINGS, rates_of
from experiments.shown import Bars, Drawing, only, tables_of
from ia_mech.estimates import (
    ALL,
    Group,
    TidyEstimate,
    all_datasets,
    by_dataset,
    holm_corrected,
    paired_row,
)
from ia_mech.judge.judging import ON_UNPERTURBED
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.sources import sources_of
from ia_mech.stats import cluster_mean

UNCHANGED = "unchanged"  # the arm of the runs' own turns
SHARES = (RATE, IN_ROLE, ONCE_IN_ROLE, SIBLINGS)  # of turns
BOUNDS = dict.fromkeys(SHARES, (0.0, 1.0)) | {BEYOND_SIBLINGS: (-1.0, 1.0)}


class Arms(Experiment):
    """Turns under arms, and how they differ from those of other arms.

    Class attributes:
        by: the columns that name an arm.
        less: words → what differs in the name of the arm that is subtracted.
        shares: quantities of which each value is a share of turns, or a turn's 0 or 1.
        measured: what :meth:`measure` says of turns, in place of a judge: name → least and most
            value. The first one counts.
        unperturbed: what counts are turns shown after the responses as they were before a change.
        controls: terms that the sentence leaves to the control.
        title, legend, more: of the table of rates, the legend's last sentences, further columns.
        words: terms, as tables and figures show them.
    """

    judged = True
    by: ClassVar[Sequence[str]] = ("temperature", "term")
    less: ClassVar[Mapping[str, Mapping[str, Any]]] = {"minus unchanged": {"term": UNCHANGED}}
    shares: ClassVar[Sequence[str]] = SHARES
    measured: ClassVar[Mapping[str, tuple[float, float]]] = {}
    unperturbed: ClassVar[bool] = False
    controls: ClassVar[Sequence[str]] = ()
    title: ClassVar[str] = "follow-ups by the judge"
    legend: ClassVar[str] = ""
    more: ClassVar[Mapping[str, tuple[str, int | str]]] = {}
    words: ClassVar[Mapping[str, str]] = {}

    # -- what is compared -------------------------------------------------------------------------

    @property
    def outcome(self) -> str:
        """The quantity that counts."""
        return next(iter(self.measured), BEYOND_SIBLINGS if self.siblings else RATE)

    @cached_property
    def contexts(self) -> pd.DataFrame:
        """The contexts of the runs whose turns are compared, as ``Query.contexts``."""
        return pd.concat([query.contexts for query in self.queries], ignore_index=True)

    def compared(self) -> Iterable[tuple[dict[str, Any], Sequence[Run]]]:
        """The name of each arm, and its runs: usually the runs that were given, and each sampled
        one."""
        yield {"term": UNCHANGED}, self.runs
        for name, run in self.sampled.items():
            yield {"term": name}, [run]

    def measure(self, turns: pd.DataFrame) -> pd.DataFrame:
        """A column for each name of ``measured``, with a number for each turn (NaN: it isn't
        counted). ``turns`` is ``Run.generations``."""
        raise NotImplementedError

    def rows(self) -> pd.DataFrame:
        """What is measured of the turns of all arms, or else their rates
        (:func:`experiments.outcome.rates_of`), with the arms' names."""
        arms = list(self.compared())
        if self.measured:
            rows = pd.concat(self._turns(runs).assign(**names) for names, runs in arms)
            return rows[rows["source"].isin(set(sources_of(self.contexts)))].reset_index(drop=True)
        judge, found = self.judge_arms(unperturbed=self.unperturbed), []
        for names, runs in arms:
            changed = self.unperturbed and runs is not self.runs
            judged = verdicts_of(runs, judge + ON_UNPERTURBED * changed)
            if runs[0] in self.runs:
                self.notes += [note for note in judged.notes if note not in self.notes]
            rates = rates_of(judged, self.siblings)
            if runs is self.runs and not self.siblings:
                keys = ["run", "context_id"]
                those = pd.MultiIndex.from_frame(self.contexts[keys])
                rates = rates[pd.MultiIndex.from_frame(rates[keys]).isin(those)]
            found.append(rates.assign(**names))
        rows = pd.concat(found, ignore_index=True)
        return rows[rows["source"].isin(set(sources_of(self.contexts)))].reset_index(drop=True)

    def _turns(self, runs: Sequence[Run]) -> pd.DataFrame:
        """The turns of an arm; of the runs that were given, those of the compared contexts."""
        found = []
        for run in runs:
            turns = run.generations
            turns = turns[run.drawn(turns)]
            if runs is self.runs:
                those = self.contexts.loc[self.contexts["run"] == str(run.path), "context_id"]
                turns = turns[turns["context_id"].isin(those)]
            keys = turns[["dataset", "temperature"]].assign(source=sources_of(turns))
            found.append(keys.join(self.measure(turns)))
        return pd.concat(found)

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        return self.compare(rows, self.measured or BOUNDS)

    def compare(
        self,
        rows: pd.DataFrame,
        bounds: Mapping[str, tuple[float, float]],
        by: Sequence[str] = (),
        less: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[TidyEstimate]:
        """Means of arms, and their differences from others, paired by query: of all datasets
        together and, if there are several, of each; Holm-corrected within each quantity.

        Args:
            rows: ``source``, ``dataset``, the columns that name an arm, and values of quantities.
            bounds: quantity → its bounds. One without values is left out. A difference, named as in
                ``less``, is called ``quantity, words``. No arm is subtracted from itself.
            by, less: if they aren't those of the class.
        """
        columns, found, level = list(by or self.by), list[TidyEstimate](), self.args.level
        rows = rows.sort_values(list(rows[columns].select_dtypes("number")), kind="stable")
        groups = dict(by_dataset(rows))
        groups = groups if len(groups) > 1 else {ALL: np.ones(len(rows), dtype=bool)}
        for dataset, here in groups.items():
            group = Group(np.array([]), self.options, {"dataset": dataset})
            arms = dict(list(rows[here].groupby(columns, sort=False)))
            for (key, own), quantity in product(arms.items(), bounds):
                if quantity not in own or own[quantity].isna().all():
                    continue
                names, (least, most) = dict(zip(columns, key, strict=True)), bounds[quantity]
                values, sources = own[quantity], own["source"]
                mean = cluster_mean(
                    values, sources, proportion=quantity in self.shares, level=level
                )
                counted = int(values.notna().sum())
                found.append(group.row(quantity, mean.clip(least, most), counted, **names))
                for words, other in (self.less if less is None else less).items():
                    base = arms.get(tuple((names | dict(other))[name] for name in columns))
                    if base is not None and base is not own:
                        pair = values, sources, base[quantity], base["source"]
                        row = paired_row(group, f"{quantity}, {words}", *pair, **names)
                        clipped = row.estimate.clip(least - most, most - least)
                        found.append(replace(row, estimate=clipped))
        return holm_corrected(found)

    # -- shown ------------------------------------------------------------------------------------

    @property
    def change(self) -> str:
        """The quantity that counts, minus that of the first arm that is subtracted."""
        return f"{self.outcome}, {next(iter(self.less))}"

    def columns_of(
        self, quantity: str, head: str, digits: int | str = 2, difference: str = "+.2f"
    ) -> dict[str, tuple[str, int | str]]:
        """The columns of a quantity and of its differences."""
        of_less = {f"{quantity}, {words}": (words, difference) for words in self.less}
        return {quantity: (head, digits), **of_less}

    def tables(self, found: pd.DataFrame) -> list[Table]:
        """What is measured; or what counts, and the rate's parts."""
        found = found.assign(term=found["term"].replace(self.words))
        if self.measured:
            heads = [item for one in self.measured for item in self.columns_of(one, one).items()]
            paired = f"Differences are paired by query; p is Holm-corrected. {self.legend}"
            of = f"user turns by arm ({self.intervals})", found, dict(heads)
            return tables_of(*of, index=("dataset", *self.by), rows="turns", legend=paired.strip())
        rows = "queries" if self.siblings else "turns"
        how: dict[str, Any] = {"index": ("dataset", *self.by), "rows": rows}
        columns: dict[str, tuple[str, int | str]] = {RATE: ("follow-ups", 2)}
        legend = "Differences are paired by query; p is Holm-corrected."
        if self.siblings:
            columns |= {
                SIBLINGS: ("after siblings", 2),
                **self.columns_of(BEYOND_SIBLINGS, "beyond siblings", "+.2f"),
            }
            legend = (
                "Every query has the same weight. After siblings: the same turns, shown after "
                "other responses to the same query; beyond siblings: the rate minus that, of which "
                f"the differences are. {legend}"
            )
        else:
            columns |= self.columns_of(RATE, "follow-ups")
        legend = f"{legend} {self.legend}".strip()
        made = tables_of(self.title, found, columns | {**self.more}, legend=legend, **how)
        return made + tables_of(
            "the parts of the rate",
            found,
            self.columns_of(IN_ROLE, IN_ROLE) | self.columns_of(ONCE_IN_ROLE, ONCE_IN_ROLE),
            legend="In role: the share of turns that neither repeat the conversation nor speak as "
            "the assistant; once in role: the share of follow-ups among these.",
            **how,
        )

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        from ia_mech.rates.figures import gate_title  # loads matplotlib

        rows = all_datasets(only(found, self.change))
        rows = rows.assign(term=rows["term"].replace(self.words))
        title = self.runs[0].model["name"]
        title = gate_title(title, self.gate) if self.judged else title
        unit = "difference" if self.measured else "difference of shares of turns (-1 to 1)"
        return {"arms": Bars(f"Differences: {self.change}\n{title}", unit, rows, differences=True)}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        """The changes of what counts, then those of the controls."""
        least, most = self.measured.get(self.outcome, (0.0, 1.0))
        said = {
            term: self.tested(
                f"{self.change}, of {self.words.get(term, term)}", rows, most=most - least
            )
            for term, rows in only(found, self.change).groupby("term", sort=False)
        }
        control = [said.pop(term, "") for term in self.controls]
        control += [f"{self.gate.short}."] if self.judged else []
        return Conclusion(" ".join(said.values()), " ".join(control).strip())
