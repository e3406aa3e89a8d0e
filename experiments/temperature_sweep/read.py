"""Judged user turns with their tokens, and the contexts that they follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.common.runs import of_one_model, open_runs
from ia_mech.conversations import UNPERTURBED
from ia_mech.errors import UserError
from ia_mech.judge.rubric import GENUINE
from ia_mech.rates.pool import NOBODY, read_runs
from ia_mech.run import Run
from ia_mech.run.labels import KEY

HEADER_LAST = "header_last"  # where the first token of the user turn is predicted
RESTATEMENTS = ("prompt_restatement", "assistant_restatement")
FEWEST = 2  # sampled temperatures: of one there is no curve


@dataclass(frozen=True)
class Sweep:
    """What the estimates are computed from.

    Attributes:
        runs: the runs, of one model.
        turns: one row per user turn: the columns of :class:`ia_mech.rates.pool.Judged`, and
            ``token_ids``, ``logprobs_raw`` and ``ranks`` per token.
        contexts: one row per context, whichever runs hold it: ``context`` (its key), ``dataset``,
            ``source``, ``run`` (number of a run that has it), ``at`` (its row there) and
            ``greedy`` (the token that opens the greedy turn).
        judge: whose verdicts.
        notes: what a reader has to know.
    """

    runs: list[Run]
    turns: pd.DataFrame
    contexts: pd.DataFrame
    judge: str
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


def read(paths: Sequence[str | Path], judge: str | None = None) -> Sweep:
    """Read judged runs of one model.

    Args:
        paths: the runs' folders.
        judge: whose verdicts; the only judge there if not given.

    Raises:
        UserError: not a finished run, one given twice, several models, no (or several) judges, only
            perturbed contexts, fewer than two sampled temperatures, or sources that weren't all
            sampled at the same ones.
    """
    runs = of_one_model(open_runs(paths))
    judged = read_runs(paths, judge, NOBODY)
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
    return Sweep(runs, turns, _contexts(turns, runs), judged.judge, notes)


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
    """Raise UserError where there is no curve, or one whose points are of different sources."""
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
