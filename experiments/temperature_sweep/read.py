"""Judged user turns with their tokens, their contexts, and which tokens open which turns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ia_mech.data.conversations import UNPERTURBED
from ia_mech.errors import UserError
from ia_mech.judge.rubric import GENUINE
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import NO_ANNOTATOR, read_runs
from ia_mech.run import Run
from ia_mech.run.labels import KEY

HEADER_LAST = "header_last"  # where the first token of the user turn is predicted
RESTATEMENTS = ("prompt_restatement", "assistant_restatement")
FEWEST = 2  # sampled temperatures: of one there is no curve


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        runs: the runs, of one model.
        turns: one row per user turn: the columns of :class:`ia_mech.rates.load.Judged`, and
            ``token_ids``, ``logprobs_raw`` and ``ranks`` per token.
        contexts: one row per context, whichever runs hold it: ``context`` (its key), ``dataset``,
            ``source``, ``run`` (number of a run that has it), ``at`` (its row there) and
            ``greedy`` (the token that opens the greedy turn).
        gate: whose verdicts, and whether they pass their control.
        notes: what a reader has to know.
    """

    runs: list[Run]
    turns: pd.DataFrame
    contexts: pd.DataFrame
    gate: Gate
    notes: list[str]

    @property
    def temperatures(self) -> list[float]:
        """At which turns were sampled, ascending; greedy (0) isn't among them."""
        return sorted(float(t) for t in self.turns["temperature"].unique() if t > 0)

    @property
    def turn_ends(self) -> list[int]:
        """Ids of the tokens that end a user turn."""
        return sorted(
            {int(i) for run in self.runs for i in run.record["identity"]["chat"]["stop_ids"]}
        )


def read(runs: list[Run], judge: str | None = None) -> Sweep:
    """Read judged runs of one model.

    Args:
        runs: the runs.
        judge: whose verdicts; the only judge there if not given.

    Raises:
        UserError: no (or several) judges, only perturbed contexts, fewer than two sampled
            temperatures, or sources that weren't all sampled at the same ones.
    """
    judged = read_runs(runs, judge, NO_ANNOTATOR)
    notes = list(judged.notes)
    turns = _unperturbed(judged.turns, notes)
    _check_temperatures(turns)
    turns = _with_tokens(turns, runs)
    missing = int(turns["genuine"].isna().sum())
    if missing:
        notes.append(
            f"{missing} of {len(turns)} turns were not assessed and are left out of rates."
        )
    cut = int(turns["cut_off"].sum())
    if cut:
        notes.append(
            f"{cut} of {len(turns)} turns come after a response that was cut off, which is another "
            "stimulus: python -m ia_mech.rates --responses complete leaves them out."
        )
    return Sweep(runs, turns, _contexts(turns, runs), judged.gate, notes)


def _unperturbed(turns: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Without turns of perturbed contexts: a mixture of both would have no meaning."""
    plain = turns["perturbation"] == UNPERTURBED
    if not plain.any():
        raise UserError(
            "all contexts are perturbed", "give runs that hold unperturbed conversations"
        )
    if not plain.all():
        notes.append(f"{int((~plain).sum())} turns of perturbed contexts are left out.")
    return turns[plain].reset_index(drop=True)


def _check_temperatures(turns: pd.DataFrame) -> None:
    """Raise UserError if there is no curve, or one whose points are of different sources."""
    found = turns.groupby(["run", "source"])["temperature"].agg(lambda t: frozenset(t) - {0.0})
    every = sorted(frozenset().union(*found))
    if len(every) < FEWEST:
        at = f"at T = {every[0]:g} only" if every else "greedily only"
        raise UserError(
            f"user turns were sampled {at}: of one temperature there is no sweep",
            "sample the same conversations with --temperatures 0.7 1 1.3, or give such a run too",
        )
    of_source = found.groupby("source").agg(lambda sets: frozenset().union(*sets))
    odd = of_source[of_source != frozenset(every)]
    if len(odd):
        path = next(run for run, source in found.index if source == odd.index[0])
        there, all_of = (", ".join(f"{t:g}" for t in sorted(ts)) for ts in (odd.iloc[0], every))
        raise UserError(
            f"the runs don't match: {len(odd)} of {len(of_source)} sources lack a temperature "
            f"({path} has {there or 'greedy only'}, all together {all_of})",
            "give runs in which every source is sampled at the same temperatures",
        )


def _with_tokens(turns: pd.DataFrame, runs: list[Run]) -> pd.DataFrame:
    """The turns with their tokens and what the model made of them."""
    columns = ["token_ids", "logprobs_raw", "ranks"]
    tokens = pd.concat(
        [run.generations[[*KEY, *columns]].assign(run=str(run.path)) for run in runs]
    )
    return turns.merge(tokens, on=["run", *KEY], how="left", validate="one_to_one")


def _contexts(turns: pd.DataFrame, runs: list[Run]) -> pd.DataFrame:
    """Each context once: its greedy turn is there once too."""
    greedy = turns[turns["temperature"] == 0]
    rows = {
        (str(run.path), name): (number, at)
        for number, run in enumerate(runs)
        for at, name in enumerate(run.contexts["context_id"])
    }
    places = [rows[key] for key in zip(greedy["run"], greedy["context_id"], strict=True)]
    return pd.DataFrame(
        {
            "context": greedy["context"].to_numpy(),
            "dataset": greedy["dataset"].to_numpy(),
            "source": greedy["source"].to_numpy(),
            "run": [run for run, _ in places],
            "at": [at for _, at in places],
            "greedy": [int(ids[0]) for ids in greedy["token_ids"]],
        }
    )


def genuine(turns: pd.DataFrame) -> pd.Series:
    """Which turns the judge calls genuine follow-ups."""
    return turns["category"] == GENUINE


@dataclass(frozen=True)
class Openings:
    """How often which token opened what, by source.

    Attributes:
        ids: ``[tokens]`` those that opened a sampled turn of either kind, ascending.
        sources: the sources, as rows of the counts.
        genuine: ``[sources, tokens]`` judged-genuine turns that a token opened.
        restated: ``[sources, tokens]`` restatements (of query or response) that it opened.
    """

    ids: np.ndarray
    sources: list[str]
    genuine: np.ndarray
    restated: np.ndarray

    def of_others(self, sources: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Which share of the turns that a token opens in other sources is genuine, or restated.

        Counted are turns of either kind, at any temperature, in all sources but the context's own.
        Both shares are 0 for a token that opened none, and else add up to 1: a token that opens
        both kinds counts for each in proportion, and no probability counts twice.

        Args:
            sources: ``[contexts]`` of each context.

        Returns:
            ``[contexts, tokens]`` shares of genuine turns and of restatements; a row is NaN where
            no other source has a turn of the kind.
        """
        number = {source: row for row, source in enumerate(self.sources)}
        own = [number[source] for source in sources]
        kinds = [counts.sum(0) - counts[own] for counts in (self.genuine, self.restated)]
        total = np.maximum(kinds[0] + kinds[1], 1)  # nothing opened is a share of 0
        shares = [counts / total for counts in kinds]
        for share, counts in zip(shares, kinds, strict=True):
            share[counts.sum(1) == 0] = np.nan
        return shares[0], shares[1]


def openings_of(turns: pd.DataFrame) -> Openings:
    """Count the tokens that open sampled (not greedy) turns of a :class:`Sweep`."""
    sampled = turns[turns["temperature"] > 0]
    kinds = genuine(sampled), sampled["category"].isin(RESTATEMENTS)
    first = np.array([int(ids[0]) for ids in sampled["token_ids"]], dtype=np.int64)
    ids = np.unique(first[(kinds[0] | kinds[1]).to_numpy()])
    if not len(ids):  # a token that opened neither, so that shares are missing and not sums of none
        ids = first[:1]
    sources = sorted(turns["source"].unique())
    row = np.searchsorted(sources, sampled["source"].to_numpy(dtype=str))
    counts = np.zeros((2, len(sources), len(ids)))
    for table, kind in zip(counts, kinds, strict=True):
        of_kind = kind.to_numpy()
        np.add.at(table, (row[of_kind], np.searchsorted(ids, first[of_kind])), 1)
    return Openings(ids, sources, counts[0], counts[1])
