"""Online code: how many bits labels take if hidden states may help, and how many if not.

Voita & Titov, "Information-theoretic probing with minimum description length", EMNLP 2020 (arXiv
2003.12298), section 3.2.2: labels are sent in blocks, each coded by a probe trained on the blocks
before it. Unlike a score after training, the length also counts how much data the probe needs.

What differs here: outcomes are binomial and coded turn by turn (the binomial coefficients, the same
for every code, are left out); blocks are made of whole sources; and the reference isn't the uniform
code but one that knows the turns so far and no hidden state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from ia_mech.stats import Estimate, cluster_mean
from probes.fit.nested_cv import Cell, rotate
from probes.fit.solvers import PENALTIES, logistic_path
from probes.outcome import Outcome

BLOCKS = 10
NARROW = 1e-4  # a probe's probability stays so far off 0 and 1: no turn costs over 13.3 bits


@dataclass(frozen=True)
class CodeLength:
    """What it takes to send the labels of all turns.

    Attributes:
        bits: with a probe, mean over orders of the sources.
        intercept_bits: with the rates of the turns so far alone, likewise.
        turns: how many there are.
        saved_per_turn: bits that the probe saves per turn, with an interval over sources: how the
            savings differ from source to source, given these orders. Negative if the probe costs
            more by overfitting than it finds.
    """

    bits: float
    intercept_bits: float
    turns: int
    saved_per_turn: Estimate

    @property
    def ratio(self) -> float:
        """Compression: above 1 where the probe's code is the shorter one."""
        return self.intercept_bits / self.bits


def code_length(
    cell: Cell,
    outcome: Outcome,
    *,
    orders: int = 2,
    seed: int = 0,
    level: float = 0.95,
    penalties: Sequence[float] = PENALTIES,
) -> CodeLength:
    """Length of the online code of an outcome by the hidden states of a cell.

    Args:
        cell: hidden states of all contexts.
        outcome: k of n per context.
        orders: how many random orders of the sources are averaged over.
        seed: of the orders.
        level: coverage of the interval.
        penalties: falling; see :func:`block_bits` for how one is chosen.

    Raises:
        ValueError: cell and outcome differ in length, there are fewer than two sources, no order
            or no penalty, penalties don't fall, or the level isn't one.
    """
    if orders < 1:
        raise ValueError(f"orders must be at least 1, not {orders}")
    sources = int(outcome.sources.max(initial=-1)) + 1
    ends = block_ends(sources)
    rng = np.random.default_rng(seed)
    totals = np.zeros((2, len(outcome)))
    for _ in range(orders):
        position = rng.permutation(sources)
        block = np.searchsorted(ends, position, side="right")[outcome.sources]
        totals += block_bits(cell, outcome, block, penalties)
    by_probe, by_intercept = totals / orders
    saved = (by_intercept - by_probe) / outcome.trials
    return CodeLength(
        bits=float(by_probe.sum()),
        intercept_bits=float(by_intercept.sum()),
        turns=round(outcome.trials.sum()),
        saved_per_turn=cluster_mean(saved, outcome.sources, weights=outcome.trials, level=level),
    )


def block_ends(sources: int, blocks: int = BLOCKS) -> list[int]:
    """How many sources have been sent after each block.

    The first block, which no probe codes, is a sixteenth of the sources, but at least 10, but at
    most half of them. From there the ends grow geometrically to all sources and are rounded; where
    that makes two the same, as with fewer than about 20 sources, there are fewer blocks.

    Args:
        sources: how many there are.
        blocks: how many are wanted.

    Returns:
        At most ``blocks`` numbers, strictly growing, the last being ``sources``.

    Raises:
        ValueError: fewer than two sources or blocks: nothing would be left to code by a probe.
    """
    if sources < 2:
        raise ValueError(f"an online code needs at least 2 sources, not {sources}")
    if blocks < 2:
        raise ValueError(f"an online code needs at least 2 blocks, not {blocks}")
    first = min(max(10, sources // 16), sources // 2)
    return np.unique(np.rint(np.geomspace(first, sources, blocks)).astype(int)).tolist()


def block_bits(
    cell: Cell, outcome: Outcome, block: np.ndarray, penalties: Sequence[float] = PENALTIES
) -> np.ndarray:
    """Bits of each context by both codes, for given blocks.

    Block 0 takes 1 bit per turn: a rate of one half, agreed on in advance. A later block is coded
    by rates made from the blocks before it:

    - by a probe, L2-penalised binomial logistic regression. Every penalty codes along; the one that
      has taken the fewest bits for the blocks so far (the stronger one, if equal) codes the next.
      For the first probe, when none has coded yet, it is the strongest but one.
    - by intercepts alone: a run's rate of turns so far, ``(k + 1) / (n + 2)`` (Laplace's rule).

    The probe gets Laplace's two turns as well, one of each kind, at the centre of every run. So the
    codes are the same where hidden states say nothing at all, also for a run that no block had so
    far, and what is saved is owed to hidden states and not to how intercepts are estimated.

    Args:
        cell: hidden states of all contexts.
        outcome: k of n per context.
        block: ``[contexts]`` number of the block each is in, from 0; contexts of a source share it.
        penalties: falling.

    Returns:
        ``[2, contexts]`` bits, by probe and by intercepts.

    Raises:
        ValueError: cell and outcome differ in length, or penalties are none or don't fall.
    """
    if len(cell.features) != len(outcome):
        raise ValueError(f"{len(cell.features)} hidden states but {len(outcome)} outcomes")
    if not len(penalties) or (np.diff(penalties) >= 0).any():
        raise ValueError(f"penalties must be given, falling, not {penalties!r}")
    bits = np.stack([outcome.trials, outcome.trials]).astype(float)
    spent = np.zeros(len(penalties))
    choice = min(1, len(penalties) - 1)
    for number in range(1, int(block.max()) + 1):
        train, test = np.flatnonzero(block < number), np.flatnonzero(block == number)
        k, n = outcome.positives[test], outcome.trials[test]
        tried = _turn_bits(k, n, _probe_chances(cell, outcome, train, test, penalties))
        bits[0, test] = tried[choice]
        bits[1, test] = _turn_bits(k, n, _laplace(outcome, train)[outcome.runs[test]])
        spent += tried.sum(1)
        choice = int(np.argmin(spent))
    return bits


def _turn_bits(positives: np.ndarray, trials: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """``[..., contexts]`` bits of turns one by one, by ``[..., contexts]`` probabilities."""
    return -positives * np.log2(chance) - (trials - positives) * np.log2(1 - chance)


def _laplace(outcome: Outcome, train: np.ndarray) -> np.ndarray:
    """``[runs]`` smoothed rates; one half where there is no turn yet."""
    runs, number = outcome.runs[train], int(outcome.runs.max()) + 1
    positives = np.bincount(runs, outcome.positives[train], number)
    return (positives + 1) / (np.bincount(runs, outcome.trials[train], number) + 2)


def _probe_chances(
    cell: Cell, outcome: Outcome, train: np.ndarray, test: np.ndarray, penalties: Sequence[float]
) -> np.ndarray:
    """``[penalties, test]`` probabilities by probes trained on the training rows."""
    rotated = rotate(cell, train, test, outcome.runs)
    every_run = np.arange(int(outcome.runs.max()) + 1)
    none = np.zeros(len(every_run))  # in rotated coordinates, the centre of a run
    path = logistic_path(
        np.concatenate([rotated.train, np.zeros((len(none), rotated.train.shape[1]))]),
        np.concatenate([outcome.runs[train], every_run]),
        np.concatenate([outcome.positives[train], none + 1]),
        np.concatenate([outcome.trials[train], none + 2]),
        penalties,
        len(every_run),
    )
    scores = [fit.scores(rotated.test, outcome.runs[test]) for fit in path]
    return np.clip(expit(scores), NARROW, 1 - NARROW)
