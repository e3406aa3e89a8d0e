"""The statements of ``locate`` on simulated queries, for ``coverage``.

Turns are likelier after the response that they followed, by a strength that differs between
queries and turns (exponential), with noise. Sites and windows share half of the noise.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pandas as pd

from benchmarks.coverage_data import percent, table
from experiments.change import AFTER_RESPONSE, HEADER, OWN, QUERY, RESPONSE
from experiments.locate import (
    ABOVE_TENTH,
    BITS,
    HITS,
    LEFT_OUT,
    LESS_QUERY,
    SHARE,
    WINDOW,
    estimates,
    window_set,
)
from experiments.outcome import OWN_SCORES, SCORES, query_bits_of
from ia_mech.likelihood.carried import CANDIDATES

QUERIES = 60, 168
OPTIONS = {"level": 0.95, "resamples": 400, "seed": 0}
NOISE, EXPRESSED = 0.7, 1.5  # nats
TRUTH = 5000  # queries that give the true values


def scores(rng: np.random.Generator, queries: int, nats: list[float]) -> list[pd.DataFrame]:
    """Rows of each site: three turns of a query, one after each candidate."""
    own = np.tile(np.arange(CANDIDATES), queries)
    common, strength = rng.normal(size=(len(own), CANDIDATES)), rng.exponential(size=queries)
    names = {"own": own, "source": np.repeat(np.arange(queries), CANDIDATES), "temperature": 1.0}

    def scored(mean: float) -> np.ndarray:
        found = NOISE * (common + rng.normal(size=common.shape)) / np.sqrt(2)
        each = strength.repeat(CANDIDATES) * rng.exponential(size=len(own))
        found[np.arange(len(own)), own] += mean * each
        return found

    whole = dict(zip(OWN_SCORES, scored(EXPRESSED).T, strict=True))
    return [
        pd.DataFrame(names | dict(zip(SCORES, scored(mean).T, strict=True)) | whole)
        for mean in nats
    ]


def windows(trials: int) -> None:
    """How often windows are named wrongly, and how often rightly."""
    print(f"### Windows of layers that are named: {trials // 5} data sets a row\n")
    kinds = {
        "8 equal": [0.8] * 8,
        "none": [0.0] * 8,
        "1 of 8": [0.8] + [0.1] * 7,
        "2 of 8": [0.8] * 2 + [0.1] * 6,
    }
    cells = list(product(QUERIES, kinds))

    def rows() -> Iterator[list[object]]:
        for number, (queries, kind) in enumerate(cells):
            rng, counts = np.random.default_rng([9, number]), np.zeros(3)
            nats = np.array(kinds[kind])
            best, equal = nats == nats.max(), (nats == nats[0]).all()
            for _ in range(trials // 5):
                each = [query_bits_of(one, 0) for one in scores(rng, queries, kinds[kind])]
                cells_of = {layer: one for layer, one in enumerate(each) if one}
                found = [one.estimate.value for one in window_set(cells_of, OPTIONS)]
                kept = np.array(found) > 1 - OPTIONS["level"]
                named = len(kept) > 0 and not kept.all()
                wrong = named and (equal or not kept[best].all())
                right = named and not equal and (kept == best).all()
                counts += wrong, named and not wrong, right
            yield [queries, kind, *map(percent, counts / (trials // 5))]

    header = ["queries", "windows that carry most", "named wrongly", "named rightly, with others"]
    table([*header, "exactly"], rows(), len(cells), WINDOW)


def sites(trials: int) -> None:
    """How often intervals of sites lie above / below the truth, which bits are a lower bound of."""
    print(f"### Sites: {trials // 5} data sets a row\n")
    names = [OWN, RESPONSE, AFTER_RESPONSE, HEADER, QUERY]

    def estimates_of(rng: np.random.Generator, queries: int, nats: list[float]) -> dict:
        own, *rest = scores(rng, queries, [EXPRESSED, *nats])
        own[SCORES] = own[OWN_SCORES].to_numpy()
        found = [query_bits_of(one, 0) for one in (own, *rest)]
        each = {(name, -1): one for name, one in zip(names, found, strict=True) if one}
        made = estimates({1.0: each}, OPTIONS)
        return {(one.quantity, one.names["term"]): one for one in made}

    kinds = {"response": [1.4, 0.1, 0.0, 0.0], "both": [1.2, 1.2, 1.2, 0.0]}
    wanted = [(q, s) for q, s in product((BITS, SHARE), (RESPONSE, HEADER))]
    wanted += [(LEFT_OUT, RESPONSE), (LEFT_OUT, AFTER_RESPONSE), (HITS, RESPONSE)]
    cells = list(product(kinds, QUERIES))

    def rows() -> Iterator[list[object]]:
        for number, (kind, queries) in enumerate(cells):
            true = estimates_of(np.random.default_rng([10, number]), TRUTH, kinds[kind])
            rng = np.random.default_rng([11, number])
            missed, shown, little = np.zeros((len(wanted), 2)), np.zeros(2), 0
            for _ in range(trials // 5):
                found = estimates_of(rng, queries, kinds[kind])
                for at, key in enumerate(wanted):
                    one, value = found[key].estimate, true[key].estimate.value
                    missed[at] += one.low > value, one.high < value
                p = [found[key, site].p for key, site in ((LESS_QUERY, HEADER), (HITS, HEADER))]
                shown += np.array(p) <= 1 - OPTIONS["level"]
                little += found[ABOVE_TENTH, HEADER].estimate.high < 0
            each = [" / ".join(percent(one / (trials // 5)) for one in pair) for pair in missed]
            shares = [percent(one / (trials // 5)) for one in (*shown, little)]
            yield [kind, queries, *each, *shares]

    header = [f"{site}: {quantity}" for quantity, site in wanted]
    header += ["header: p ≤ 0.05, bits", "p ≤ 0.05, likeliest", "moves little"]
    table(["enough", "queries", *header], rows(), len(cells), "sites")


PARTS = {"windows": windows, "sites": sites}
