"""Do the tests of experiments keep their level where their units aren't independent?

    python -m benchmarks.coverage_experiments            some ten minutes on one core
    python -m benchmarks.coverage_experiments --quick    a tenth of the data sets

Each part draws data sets at 60 and at 168 queries. Seeds are fixed. Markdown goes to stdout.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import chain, product

import numpy as np
import pandas as pd

from benchmarks.coverage_data import percent, table
from experiments.control import (
    ARMS,
    MOVED,
    RATIO,
    UNDER,
    donors_of,
    estimates,
    permuted_probes,
    random_directions,
)
from experiments.outcome import CHOOSING
from ia_mech.judge.decoys import WRONG
from ia_mech.rates.latent import REST, RISE, ROLE, rises
from ia_mech.stats import cluster_mean, paired_difference, permutation_p
from ia_mech.stats.intervals import student
from probes.card import directions
from probes.show import MARGIN
from probes.targets import Outcome

SIZES = (60, 168)
OPTIONS = {"level": 0.95, "resamples": 200, "seed": 0}


def probe_ranks(trials: int) -> None:
    """How often a probe's rank among 39 other directions has p of at most 0.05.

    States have 48 axes of falling variance. Log-odds move along any axis; the next token, whose KL
    all directions share, moves less along axes along which states hardly vary.
    """
    trials //= 4
    print(f"### Steering, rank of a probe among 39 directions: {trials} data sets a row\n")
    cells = list(product(SIZES, (1e-3, 0.1), (0.0, 1.0, 2.0)))

    def rows() -> Iterator[list[object]]:
        for number, (queries, penalty, planted) in enumerate(cells):
            rng, called = np.random.default_rng([21, number]), np.zeros(2)
            scale = 1 / np.arange(1, 49)
            for _ in range(trials):
                states = rng.standard_normal((queries, 48)) * scale
                states -= states.mean(0)
                moves, first = rng.standard_normal(48), rng.standard_normal((20, 48)) * scale**0.5
                told = states @ moves
                k = rng.binomial(4, 1 / (1 + np.exp(-planted * told / told.std())))
                labels = Outcome.from_counts(k, np.full(queries, 4), range(queries))
                own = directions(states, labels, penalty)["logistic"].weights.astype(float)
                seed = int(rng.integers(10**6))
                for at, others in enumerate(
                    (
                        random_directions(states, own, 39, seed),
                        permuted_probes(states, labels, penalty, 39, seed),
                    )
                ):
                    along = np.stack([own, *others])
                    effect = along @ moves / np.linalg.norm(along @ first.T, axis=1)
                    called[at] += permutation_p(effect[0], effect[1:]) <= 0.05
            yield [queries, penalty, planted, *map(percent, called / trials)]

    header = ["queries", "penalty", "planted log-odds per SD"]
    table([*header, "random directions", "probes of permuted labels"], rows(), len(cells), "ranks")


def exchanged(trials: int) -> None:
    """False alarms, power and coverage of interchange, where donors have effects of their own."""
    trials //= 2
    print(f"### Interchange, donors with effects of SD 0.1: {trials} data sets a row\n")
    cells = list(product(SIZES, (0.0, 0.05, 0.1)))

    def rows() -> Iterator[list[object]]:
        for number, (queries, moved) in enumerate(cells):
            rng, found = np.random.default_rng([22, number]), []
            source = np.repeat([f"q{i}" for i in range(queries)], 2)
            contexts = pd.DataFrame({"dataset": "d", "source": source})
            for trial in range(trials):
                if trial % 20 == 0:  # who gives to whom
                    true = rng.beta(1, 2, 2 * queries)
                    contexts[CHOOSING] = rng.binomial(8, true) / 8
                    donors = donors_of(contexts, range(0, 2 * queries, 2), trial)
                    gap = float((true[donors["high"]] - true[donors["low"]]).mean())
                effect, base = rng.normal(0, 0.1, 2 * queries), rng.beta(8, 12, len(donors))
                cell = pd.DataFrame({"source": source[donors["recipient"]], "unchanged": base})
                cell = cell.assign(dataset="d", term="header", layer=3)
                for arm in ARMS:
                    at = donors[arm].to_numpy()
                    share = base + effect[at] + {"high": moved / 2, "low": -moved / 2}.get(arm, 0)
                    cell[arm] = rng.binomial(16, share.clip(0, 1)) / 16
                    cell[f"own {arm}"] = rng.binomial(8, true[at]) / 8
                    cell[f"query {arm}"] = source[at]
                each = {row.quantity: row for row in estimates(cell, OPTIONS)}
                own = cell["source"]
                before = paired_difference(cell["high"], own, cell["low"], own, permutations=2000)
                covered = [
                    row.low <= truth <= row.high
                    for row, truth in (
                        (each[MOVED].estimate, moved),
                        (each[UNDER["high"]].estimate, 0.4 + moved / 2),
                        (each[RATIO].estimate, moved / gap),
                    )
                ]
                found.append([before.p <= 0.05, each[MOVED].p <= 0.05, *covered])
            yield [queries, moved, *map(percent, np.mean(found, axis=0))]

    header = ["queries", "moved", "p ≤ 0.05 over recipients alone", "p ≤ 0.05"]
    header += ["coverage of the difference", "of a share", "of the ratio"]
    table(header, rows(), len(cells), "interchange")


def shares(trials: int) -> None:
    """Coverage and width of means of shares of 16 turns, a query each."""
    print(f"### Mean of shares of 16 turns: {2 * trials} data sets a row\n")
    cells = list(product(SIZES, (0.01, 0.1, 0.5), (0.0, 0.2)))

    def rows() -> Iterator[list[object]]:
        for number, (queries, rate, spread) in enumerate(cells):
            rng, held, width = np.random.default_rng([23, number]), np.zeros(2), np.zeros(2)
            for _ in range(2 * trials):
                each = np.full(queries, rate)
                if spread:
                    each = rng.beta(rate * (1 / spread - 1), (1 - rate) * (1 / spread - 1), queries)
                values = rng.binomial(16, each) / 16
                own = cluster_mean(values, range(queries), proportion=True)
                plain = student(np.stack([values, np.ones(queries)], axis=1), 0.95)
                for at, one in enumerate((own, plain if np.ptp(values) else own)):
                    held[at] += one.low <= rate <= one.high
                    width[at] += one.high - one.low
            means = width / 2 / trials
            both = zip(map(percent, held / 2 / trials), (f"{x:.3f}" for x in means), strict=True)
            yield [queries, rate, spread, *chain.from_iterable(both)]

    header = ["queries", "rate", "correlation within", "coverage", "width"]
    table([*header, "Student's coverage", "its width"], rows(), len(cells), "shares")


def alike(trials: int) -> None:
    """How often two AUROCs are called the same, by their whole interval within the margin."""
    print(f"### Called “as well as”, margin {MARGIN:g}: {2 * trials} data sets a row\n")
    cells = list(product(SIZES, (0.0, MARGIN, 0.1), (0.1, 0.3)))

    def rows() -> Iterator[list[object]]:
        for number, (queries, truth, spread) in enumerate(cells):
            rng, said = np.random.default_rng([24, number]), np.zeros(2)
            for _ in range(2 * trials):
                values = rng.normal(truth, spread, queries)
                one = cluster_mean(values, range(queries))
                said += [not one.low > 0, one.low > -MARGIN and one.high < MARGIN]
            yield [queries, truth, spread, *map(percent, said / 2 / trials)]

    header = ["queries", "true difference", "SD over queries", "before", "now"]
    table(header, rows(), len(cells), "alike")


def latent(trials: int) -> None:
    """False alarms of a rise and of its second part, and coverage of both parts.

    A quarter of the turns are greedy. Copies of the query, which are never follow-ups, go from one
    share to another; turns in role are follow-ups at one rate and another. After a wrong
    conversation 3% of turns are.
    """
    trials //= 2
    print(f"### Latent: the parts of a rise: {trials} data sets a row\n")
    plans = (((0.5, 0.5), (0.65, 0.65)), ((0.5, 0.25), (0.65, 0.65)), ((0.5, 0.25), (0.65, 0.8)))
    cells = list(product(SIZES, plans))

    def rows() -> Iterator[list[object]]:
        for number, (queries, (copies, rates)) in enumerate(cells):
            rng, found = np.random.default_rng([25, number]), []
            greedy, heated = ((1 - c) * r for c, r in zip(copies, rates, strict=True))
            mix = (copies[0] - copies[1]) * sum(rates) / 2
            truths = heated - greedy, mix, heated - greedy - mix
            frame = pd.DataFrame({"source": np.repeat(np.arange(queries), 8), "decoy": WRONG})
            hot = np.tile([0, 1, 1, 1], 2 * queries)
            frame["temperature"] = 0.7 * hot
            for _ in range(trials):
                tilt = np.repeat(rng.beta(2, 2, queries) - 0.5, 8) / 2  # of queries
                away = rng.random(len(hot)) < np.array(copies)[hot] + tilt
                yes = ~away & (rng.random(len(hot)) < np.array(rates)[hot])
                floor = rng.random(len(hot)) < 0.03
                own = frame.assign(out_of_role=away * 1.0, own_follow_up=yes * 1.0)
                each = {r.quantity: r for r in rises(own.assign(follow_up=floor * 1.0), {})}
                parts = [each[name] for name in (RISE, ROLE, REST)]
                held = [
                    e.estimate.low <= truth <= e.estimate.high
                    for e, truth in zip(parts, truths, strict=True)
                ]
                found.append([parts[0].p <= 0.05, parts[2].p <= 0.05, *held])
            plan = f"{copies[0]:g} → {copies[1]:g}", f"{rates[0]:g} → {rates[1]:g}"
            yield [queries, *plan, *map(percent, np.mean(found, axis=0))]

    header = ["queries", "copies", "rate in role", "rise, p ≤ 0.05", "once in role, p ≤ 0.05"]
    header += ["coverage of the rise", "staying in role", "once in role"]
    table(header, rows(), len(cells), "latent")


PARTS: dict[str, Callable[[int], None]] = {
    part.__name__: part for part in (probe_ranks, exchanged, shares, alike, latent)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the data sets")
    parser.add_argument("--only", choices=PARTS, help="one part of the study")
    args = parser.parse_args()
    for name, part in PARTS.items():
        if args.only in (None, name):
            part(100 if args.quick else 1000)


if __name__ == "__main__":
    main()
