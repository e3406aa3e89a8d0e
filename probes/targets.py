"""What a probe predicts of a context: k positive of n judged turns, and which turns those are."""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ia_mech.errors import UserError
from ia_mech.judge.rubric import ASSESSED, GENUINE
from ia_mech.stats.resampling import source_index


@dataclass(frozen=True)
class Outcome:
    """Binomial outcomes of contexts, with the source and run of each.

    All samples of a context share its header state, so a context is one row with a rate, not n rows
    with a label each.

    Attributes:
        positives: ``[contexts]`` turns that have the predicted property (k).
        trials: ``[contexts]`` turns assessed (n); above 0, at least ``positives``.
        sources: ``[contexts]`` source of each, numbered from 0: the unit of folds, permutations and
            intervals.
        runs: ``[contexts]`` run of each (or dataset, to compare within datasets only), numbered
            from 0: a covariate. Probes get an intercept per run, labels are permuted within runs,
            and scores compare contexts of the same run only.
    """

    positives: np.ndarray
    trials: np.ndarray
    sources: np.ndarray
    runs: np.ndarray

    @classmethod
    def from_counts(
        cls,
        positives: ArrayLike,
        trials: ArrayLike,
        sources: Iterable[Hashable],
        runs: Iterable[Hashable] | None = None,
    ) -> "Outcome":
        """From any labels of sources and runs; one run if none are given.

        Raises:
            ValueError: lengths differ, a source is missing, or there are not 0 ≤ k ≤ n, n > 0.
        """
        index, _ = source_index(sources)
        k, n = np.asarray(positives, dtype=float), np.asarray(trials, dtype=float)
        run = np.zeros(len(index), dtype=int) if runs is None else source_index(runs)[0]
        if not k.shape == n.shape == index.shape == run.shape:
            raise ValueError("positives, trials, sources and runs must have one entry per context")
        if not ((k >= 0) & (k <= n) & (n > 0)).all():
            raise ValueError("positives must lie between 0 and trials, and trials above 0")
        return cls(k, n, index, run)

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def source_count(self) -> int:
        return int(self.sources.max()) + 1

    @property
    def negatives(self) -> np.ndarray:
        """``[contexts]`` turns without the property."""
        return self.trials - self.positives

    @property
    def rate(self) -> np.ndarray:
        """``[contexts]`` share of positives."""
        return self.positives / self.trials

    def take(self, rows: np.ndarray) -> "Outcome":
        """Some contexts, with sources and runs renumbered."""
        return Outcome.from_counts(
            self.positives[rows], self.trials[rows], self.sources[rows], self.runs[rows]
        )


# -- targets --------------------------------------------------------------------------------------

FAILURES: tuple[str, ...] = tuple(name for name in ASSESSED if name != GENUINE)
KEYS = ["run", "context_id"]  # a context of one run
RATE, GREEDY, LATENT, CATEGORY = "rate", "greedy", "latent", "category"
GROUNDED = "grounded"
CHOICES = (
    f"give rate, rate@T, greedy, latent or, as rates, {GROUNDED} or one of {', '.join(FAILURES)}"
)


@dataclass(frozen=True)
class Target:
    """A target, as :func:`parse_target` makes it.

    Attributes:
        kind: ``rate``, ``grounded``, ``greedy``, ``latent`` or ``category``.
        temperature: the one whose turns count; None for all above 0.
        category: of the rubric, for the kind ``category``.
    """

    kind: str
    temperature: float | None = None
    category: str | None = None

    @property
    def name(self) -> str:
        """As ``--target`` takes it."""
        name = self.category or self.kind
        return name if self.temperature is None else f"{name}@{self.temperature:g}"

    @property
    def positive(self) -> str:
        """What a positive turn or context is called, with its article."""
        if self.kind == LATENT:
            return "a genuine follow-up among the samples only"
        if self.kind == GROUNDED:
            return "a genuine and grounded turn"
        return f"a turn of {self.category}" if self.category else "a genuine follow-up"

    @property
    def negative(self) -> str:
        """What one without it is called, with its article."""
        if self.kind == LATENT:
            return "no genuine follow-up in any turn"
        return f"a turn other than {self.positive}"

    @property
    def words(self) -> str:
        """The subject of a sentence about it."""
        if self.kind == GREEDY:
            return "whether the greedy turn is a genuine follow-up"
        if self.kind == LATENT:
            return "whether any sample is a genuine follow-up where the greedy turn is not"
        what = f"the rate of {self.category}" if self.category else "the follow-up rate"
        what = "the rate of genuine and grounded turns" if self.kind == GROUNDED else what
        return what if self.temperature is None else f"{what} at T = {self.temperature:g}"

    def describe(self) -> str:
        """One sentence: what k and n are."""
        if self.kind == GREEDY:
            return "k is 1 if the greedy turn is a genuine follow-up and 0 if not, of n = 1."
        if self.kind == LATENT:
            return (
                "k is 1 if a sampled turn is a genuine follow-up and 0 if none is, of n = 1; "
                "contexts whose greedy turn is one are left out."
            )
        what = f"are {self.category}" if self.category else "are genuine follow-ups"
        what = "are genuine and grounded" if self.kind == GROUNDED else what
        at = "above temperature 0" if self.temperature is None else f"at T = {self.temperature:g}"
        return f"k of the n assessed turns that were sampled {at} {what}."


def parse_target(text: str) -> Target:
    """The target that ``--target`` names.

    Raises:
        UserError: there is no such target, or its temperature isn't a number above 0.
    """
    name, at, temperature = text.strip().partition("@")
    rates = (RATE, GROUNDED)
    if name not in (*rates, GREEDY, LATENT, *FAILURES):
        raise UserError(f"unknown target {text!r}", CHOICES)
    if name in (GREEDY, LATENT):
        if at:
            raise UserError(f"target {text!r}: {name} has no temperature", f"give {name} alone")
        return Target(name)
    warmth = _temperature(text, name, temperature) if at else None
    return Target(name, warmth) if name in rates else Target(CATEGORY, warmth, name)


def counts_of(target: Target, turns: pd.DataFrame) -> pd.DataFrame:
    """k and n of every context that has an outcome.

    Args:
        target: what to predict.
        turns: one row per turn with ``run``, ``context_id``, ``temperature``, ``category`` and
            ``genuine`` (NaN where not assessed), as ``JudgedTurns.turns``; for ``grounded`` also
            ``grounded`` (likewise).

    Returns:
        ``k`` and ``n`` per (``run``, ``context_id``). Contexts with no assessed turn that counts
        are absent; for ``latent`` also those whose greedy turn is genuine, not assessed or missing.

    Raises:
        UserError: no turn was sampled at the target's temperature.
    """
    _check_sampled(target, turns)
    if target.kind == GROUNDED:
        turns = turns[turns["grounded"].notna()]
    assessed = turns[turns["genuine"].notna()]
    greedy, sampled = (assessed[assessed["temperature"].eq(0) == is_it] for is_it in (True, False))
    if target.kind == LATENT:
        any_genuine = sampled.groupby(KEYS)["genuine"].max()
        failed_greedy = greedy.groupby(KEYS)["genuine"].max().eq(0)
        kept = any_genuine[any_genuine.index.isin(failed_greedy.index[failed_greedy])]
        return pd.DataFrame({"k": kept.astype(int), "n": 1}, index=kept.index)
    chosen = greedy if target.kind == GREEDY else sampled
    positive = chosen["category"].eq(target.category or GENUINE)
    if target.kind == GROUNDED:
        positive = chosen["grounded"].eq(1)
    return _shares(target, chosen, positive)


def _shares(target: Target, turns: pd.DataFrame, positive: pd.Series) -> pd.DataFrame:
    """k and n of turns at the target's temperature."""
    if target.temperature is not None:
        at = turns["temperature"] == target.temperature
        turns, positive = turns[at], positive[at]
    by_context = positive.groupby([turns[key] for key in KEYS])
    return pd.DataFrame({"k": by_context.sum().astype(int), "n": by_context.size()})


def _temperature(text: str, name: str, given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if value == 0:
        raise UserError(
            f"target {text!r}: temperature 0 has one turn, the greedy one",
            "use greedy" if name == RATE else f"give a temperature above 0, as in {name}@1",
        )
    if not 0 < value < math.inf:
        raise UserError(
            f"target {text!r}: {given!r} is not a temperature", f"give a number, as in {name}@0.7"
        )
    return value


def _check_sampled(target: Target, turns: pd.DataFrame) -> None:
    if target.temperature is None:
        return
    there = sorted({t for t in turns["temperature"] if t > 0})
    if target.temperature not in there:
        name = target.name.partition("@")[0]
        raise UserError(
            f"no turn was sampled at temperature {target.temperature:g}",
            f"give {' or '.join(f'{name}@{t:g}' for t in there) or 'greedy'}",
        )
