"""Do intervals of reaction bits hold the true value? Tested on planted language models.

    python -m benchmarks.reaction            the whole study, a few minutes on one core
    python -m benchmarks.reaction --quick    a tenth of the studies

A query has K = 4 responses. After response j, token t of a turn is drawn from softmax(common +
strength · own), with standard normal logits over 8 words; the strength differs between queries
(log-normal, σ = 0.5) and is set so that I_K is 0.1, 0.5 or 0.9 of log₂ K on average. Turns are
drawn as in a run: samples of one index share their Gumbel noise over all responses and arms of a
query. Seed 0. Markdown goes to stdout, progress to stderr.
"""

import argparse
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import scipy
from scipy.optimize import brentq
from scipy.special import log_softmax, stdtrit

from benchmarks.coverage_data import percent, share_and_interval, table
from ia_mech.likelihood.reaction import evidence, reaction_bits, readable_bits
from ia_mech.stats import Estimate, cluster_mean, paired_difference

K, WORDS, CEILING = 4, 8, 2.0  # log2 K bits
LEVELS = (0.1, 0.5, 0.9)  # I_K / log2 K
TOKENS = 4  # of a turn
ALIKE = 0.4  # share of the strength that is left to responses that are alike
READER = 0.7  # noise in the reader's logits, which the subject's have with a variance of 1 or more
SAMPLES = 2  # turns after each response of a simulated study
POPULATION = 100_000  # queries that stand for all of them


@dataclass(frozen=True)
class Turns:
    """Turns of many queries.

    Attributes:
        logprobs: ``[queries, K, samples, K]``: log-probabilities after each response (last axis)
            of the turns that followed each response (second axis).
        alike: the same for a second arm whose responses are alike, with equal queries and noise.
        reader: ``[queries, K, samples, K]`` another model's log-likelihoods of the first arm.
    """

    logprobs: np.ndarray
    alike: np.ndarray
    reader: np.ndarray


def models(
    rng: np.random.Generator, queries: int, strength: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits ``[queries, 1, tokens, words]`` that responses share, ``[queries, K, tokens, words]``
    of their own, and ``[queries, 1, 1, 1]`` strengths."""
    common = rng.normal(size=(queries, 1, TOKENS, WORDS))
    own = rng.normal(size=(queries, K, TOKENS, WORDS))
    return common, own, strength * np.exp(0.5 * rng.normal(size=(queries, 1, 1, 1)))


def sample_words(log_p: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Words ``[queries, K, samples, tokens]``: Gumbel-argmax with ``noise [queries, samples,
    tokens, words]`` shared by the K responses, whose ``log_p`` is ``[queries, K, tokens, words]``.
    """
    return (log_p[:, :, None] + noise[:, None]).argmax(-1)


def scored(log_p: np.ndarray, words: np.ndarray) -> np.ndarray:
    """``[queries, K, samples, K]`` log-probability of each turn after each response."""
    out = np.empty((*words.shape[:3], K))
    for j in range(K):
        after = np.broadcast_to(log_p[:, None, None, j], (*words.shape, WORDS))
        out[:, :, :, j] = np.take_along_axis(after, words[..., None], -1)[..., 0].sum(-1)
    return out


def simulate(rng: np.random.Generator, queries: int, samples: int, strength: float) -> Turns:
    """Turns of ``queries`` fresh queries, in blocks of bounded memory."""
    parts = []
    for start in range(0, queries, 10_000):
        size = min(10_000, queries - start)
        common, own, strengths = models(rng, size, strength)
        noise = rng.gumbel(size=(size, samples, TOKENS, WORDS))
        log_p = log_softmax(common + strengths * own, -1)
        near = log_softmax(common + ALIKE * strengths * own, -1)
        blurred = common + strengths * own + READER * rng.normal(size=own.shape)
        words = sample_words(log_p, noise)
        arms = (log_p, words), (near, sample_words(near, noise)), (log_softmax(blurred, -1), words)
        parts.append([scored(*arm) for arm in arms])
    return Turns(*(np.concatenate(arm) for arm in zip(*parts, strict=True)))


def bits(logprobs: np.ndarray) -> np.ndarray:
    """``[queries]`` mean reaction bits of ``[queries, K, samples, K]``."""
    return reaction_bits(logprobs.reshape(-1, K)).reshape(len(logprobs), -1).mean(1)


@cache
def strength_of(level: float) -> float:
    """The strength at which I_K is a given share of log2 K, on 4,000 queries."""

    def gap(strength: float) -> float:
        rng = np.random.default_rng(0)
        common, own, strengths = models(rng, 4000, strength)
        log_p = log_softmax(common + strengths * own, -1)
        words = sample_words(log_p, rng.gumbel(size=(len(log_p), 1, TOKENS, WORDS)))
        return float(bits(scored(log_p, words)).mean()) / CEILING - level

    return float(brentq(gap, 0.02, 30, xtol=1e-3))


def coverage(studies: int) -> None:
    """Coverage of the intervals of I_K (two kinds), of a difference and of readable bits."""
    print(f"### Coverage of 95% intervals: {studies} studies a row\n")
    cells = list(product(LEVELS, (40, 100)))
    readable_rows: list[list[object]] = []

    def rows() -> Iterator[list[object]]:
        for number, (level, queries) in enumerate(cells):
            strength = strength_of(level)
            truth, truth_alike, readable = population(level)
            betas = np.geomspace(0.01, 5, 60)
            most = max(readable(beta) for beta in betas)
            rng = np.random.default_rng([0, 2, number])
            covered = np.zeros(6, dtype=int)
            width = np.zeros(3)
            followed = np.tile(np.repeat(np.arange(K), SAMPLES), queries)
            sources = np.repeat(np.arange(queries), K * SAMPLES)
            for _ in range(studies):
                study = simulate(rng, queries, SAMPLES, strength)
                h, alike = bits(study.logprobs), bits(study.alike)
                at = np.arange(queries)
                chosen = cluster_mean(h, at)
                reach = stdtrit(queries - 1, 0.975) * h.std(ddof=1) / np.sqrt(queries)
                pair = paired_difference(h, at, alike, at, permutations=1).difference
                out = readable_bits(study.reader.reshape(-1, K), followed, sources)
                read = cluster_mean(out.bits.reshape(queries, -1).mean(1), at)
                known = [readable(beta) for beta in out.fitted]
                target = np.average(known, weights=np.bincount(out.fold))
                covered += [
                    inside(chosen, truth),
                    abs(h.mean() - truth) <= reach,
                    inside(pair, truth - truth_alike),
                    inside(read, float(target)),
                    inside(read, most),
                    read.low > target,
                ]
                width += [one.high - one.low for one in (chosen, pair, read)]
            shares = [share_and_interval(int(n), studies, 1) for n in covered]
            widths = [f"{one / studies:.2f}" for one in width]
            readable_rows.append([level, queries, f"{most:.3f}", *shares[3:], widths[2]])
            yield [
                *(level, queries, f"{truth:.3f}", shares[0], widths[0]),
                *(
                    percent(covered[1] / studies),
                    f"{truth - truth_alike:.3f}",
                    shares[2],
                    widths[1],
                ),
            ]

    header = ["I_K / log₂ K", "queries", "I_K", "covered", "width", "with n − 1 degrees"]
    table([*header, "paired difference", "covered", "width"], rows(), len(cells), "coverage")
    print("Of readable bits, in the same studies:\n")
    header = ["I_K / log₂ K", "queries", "readable bits", "covered", "at the best β"]
    table([*header, "interval too high", "width"], readable_rows, len(cells), "readable bits")


@cache
def population(level: float):
    """I_K of both arms, and readable bits as a function of β, on :data:`POPULATION` queries."""
    rng = np.random.default_rng([0, 3])
    turns = simulate(rng, POPULATION, 1, strength_of(level))
    followed = np.tile(np.arange(K), POPULATION)
    scores = turns.reader.reshape(-1, K)
    betas = np.r_[0.0, np.geomspace(0.01, 5, 60)]
    values = [evidence(beta * scores, followed).mean() for beta in betas]

    def readable(beta: float) -> float:
        return float(np.interp(beta, betas, values))

    return bits(turns.logprobs).mean(), bits(turns.alike).mean(), readable


def inside(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the studies")
    args = parser.parse_args()
    begun = time.perf_counter()
    coverage(200 if args.quick else 2000)
    print(
        f"{(time.perf_counter() - begun) / 60:.1f} minutes on one core of "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, SciPy {scipy.__version__}."
    )


if __name__ == "__main__":
    main()
