"""The targets of probes: for each context, k positive turns of n judged ones.

Of a mass, k and n are probabilities of first tokens.
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ia_mech.errors import UserError
from ia_mech.judge.rubric import ASSESSED, FOLLOW_UP
from ia_mech.stats.resampling import source_index


@dataclass(frozen=True)
class Outcome:
    """Binomial outcomes of contexts, with the source and run of each.

    All samples of a context share its header state. A context is therefore one row with a rate, not
    n rows with a label each.

    Sources are the unit of folds, permutations and intervals. Runs are a covariate: a probe has an
    intercept for each run, labels are permuted within runs, and scores compare contexts of the same
    run.
    """

    positives: np.ndarray  # [contexts] turns that have the predicted property (k)
    trials: np.ndarray  # [contexts] turns assessed (n); above 0, at least ``positives``
    sources: np.ndarray  # [contexts] source of each, numbered from 0
    runs: np.ndarray  # [contexts] run, dataset or source of each, numbered from 0

    @classmethod
    def from_counts(
        cls,
        positives: ArrayLike,
        trials: ArrayLike,
        sources: Iterable[Hashable],
        runs: Iterable[Hashable] | None = None,
    ) -> "Outcome":
        """An outcome from any names of sources and runs; one run if none are given.

        Raises:
            ValueError: lengths differ, a source is missing, or not 0 ≤ k ≤ n with n > 0.
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
    def compares_siblings(self) -> bool:
        """Whether each run is a single source, so that the responses to one query are compared."""
        pairs = np.unique(np.stack([self.runs, self.sources]), axis=1).shape[1]
        return pairs == int(self.runs.max()) + 1 > 1

    @property
    def negatives(self) -> np.ndarray:
        """``[contexts]`` turns without the property."""
        return self.trials - self.positives

    @property
    def rate(self) -> np.ndarray:
        """``[contexts]`` share of positives."""
        return self.positives / self.trials

    def sources_of_either_kind(self, rows: np.ndarray | slice = slice(None)) -> tuple[int, int]:
        """How many sources have a positive turn in these contexts, and how many a negative one."""
        sources = self.sources[rows]
        with_positive = sources[self.positives[rows] > 0]
        with_negative = sources[self.negatives[rows] > 0]
        return len(np.unique(with_positive)), len(np.unique(with_negative))

    def take(self, rows: np.ndarray) -> "Outcome":
        """The outcome of these contexts, with sources and runs renumbered."""
        return Outcome.from_counts(
            self.positives[rows], self.trials[rows], self.sources[rows], self.runs[rows]
        )


# -- targets --------------------------------------------------------------------------------------

FAILURES: tuple[str, ...] = tuple(name for name in ASSESSED if name != FOLLOW_UP)
KEYS = ["run", "context_id"]  # a context of one run
RATE, GREEDY, LATENT = "rate", "greedy", "latent"
MASS, MASS_IN_ROLE = MASSES = ("mass", "mass-in-role")  # that ``ia-mech mass`` has measured
CHOICES = (
    "give rate, rate@T, latent, latent@T, greedy, mass, mass-in-role or, as rates, one of "
    f"{', '.join(FAILURES)}"
)


# Kind → the subject of a sentence about the target, and the end of one that says what counts.
_WORDS = {
    RATE: ("the follow-up rate", "are follow-ups"),
    **{name: (f"the rate of {name}", f"are {name}") for name in FAILURES},
    GREEDY: (
        "whether the greedy turn is a follow-up",
        "k is 1 if the greedy turn is a follow-up and 0 if not, of n = 1.",
    ),
    MASS: (
        "the follow-up mass",
        "k is the probability of first tokens whose greedy continuation is a follow-up, of n, the "
        "probability of all that were gone on from.",
    ),
    MASS_IN_ROLE: (
        "the mass in role",
        "k is the probability of first tokens whose greedy continuation is in the user's role, of "
        "n, the probability of all that were gone on from.",
    ),
    LATENT: (
        "the follow-up rate of samples where the greedy turn is none",
        "are follow-ups; conversations whose greedy turn is one are left out",
    ),
}
_UNDRAWN = (GREEDY, *MASSES)  # of these no temperature can be asked for


@dataclass(frozen=True)
class Target:
    """A target, as :func:`parse_target` makes it."""

    kind: str  # ``rate``, ``greedy``, ``latent``, ``mass…``, or a failure category (its rate)
    temperature: float | None = None  # of the turns that count; None for all above 0

    @property
    def name(self) -> str:
        """The text that ``--target`` takes."""
        return self.kind if self.temperature is None else f"{self.kind}@{self.temperature:g}"

    @property
    def words(self) -> str:
        """The subject of a sentence about the target."""
        what, _ = _WORDS[self.kind]
        return what if self.temperature is None else f"{what} at T = {self.temperature:g}"

    def describe(self) -> str:
        """One sentence that says what k and n are."""
        _, what = _WORDS[self.kind]
        if self.kind in _UNDRAWN:
            return what
        at = "above temperature 0" if self.temperature is None else f"at T = {self.temperature:g}"
        return f"k of the n assessed turns that were sampled {at} {what}."


def parse_target(text: str) -> Target:
    """The target that ``--target`` names.

    Raises:
        UserError: there is no such target, or the temperature isn't a number above 0.
    """
    name, at, given = text.strip().partition("@")
    if name not in _WORDS:
        raise UserError(f"unknown target {text!r}", CHOICES)
    if not at:
        return Target(name)
    if name in _UNDRAWN:
        raise UserError(f"target {text!r}: {name} has no temperature", f"give {name} alone")
    try:
        temperature = float(given)
    except ValueError:
        temperature = math.nan
    if not 0 < temperature < math.inf:
        raise UserError(
            f"target {text!r}: {given!r} is not a temperature above 0",
            f"give a number, as in {name}@0.7",
        )
    return Target(name, temperature)


def turns_that_count(target: Target, turns: pd.DataFrame) -> pd.DataFrame:
    """The turns that count for a target, with the column ``positive``.

    Args:
        target: the target.
        turns: a row per turn with ``run``, ``context_id``, ``temperature``, ``category`` and
            ``follow_up`` (NaN where not assessed), as in ``JudgedTurns.turns``.

    Returns:
        The assessed turns. For ``latent``, only turns of contexts whose greedy turn was assessed
        and is no follow-up.

    Raises:
        UserError: no turn was sampled at the target's temperature.
    """
    if target.temperature is not None:
        there = sorted({t for t in turns["temperature"] if t > 0})
        if target.temperature not in there:
            raise UserError(
                f"no turn was sampled at temperature {target.temperature:g}",
                f"give {' or '.join(f'{target.kind}@{t:g}' for t in there) or 'greedy'}",
            )
    assessed = turns[turns["follow_up"].notna()]
    greedy, sampled = (assessed[assessed["temperature"].eq(0) == is_it] for is_it in (True, False))
    if target.kind == LATENT:
        failed = greedy.groupby(KEYS)["follow_up"].max().eq(0)
        sampled = sampled[pd.MultiIndex.from_frame(sampled[KEYS]).isin(failed.index[failed])]
    chosen = greedy if target.kind == GREEDY else sampled
    if target.temperature is not None:
        chosen = chosen[chosen["temperature"] == target.temperature]
    failure = target.kind in FAILURES
    positive = chosen["category"].eq(target.kind) if failure else chosen["follow_up"].eq(1)
    return chosen.assign(positive=positive)
