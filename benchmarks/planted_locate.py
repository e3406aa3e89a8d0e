"""Does ``locate`` find how bits get from response to turn? Tested on planted transformers.

    python -m benchmarks.planted_locate                  the whole study, some 30 minutes
    python -m benchmarks.planted_locate --seeds 2        two studies of each kind
    python -m benchmarks.planted_locate --only latent    studies of one kind

Each study has a transformer of its own and 60 queries with four responses and a turn after each.
It is measured and estimated as ``experiments.locate`` does it. ``benchmarks/planted_routes.py``
says what is planted. A study is right if its sentence is right about:

- whether turns tell something, and whether response and header carry something. They do if the
  interval lies above 0; they don't if it reaches 0 or lies below a tenth of what is expressed;
- kinds in which sampled turns alone read the header (gated): greedy turns tell nothing;
- the kind with one layer: its window is the only one that may carry most;
- the recurrent kind: the state carries bits;
- the kind with wordings: turns tell no more than about wordings of one content.

Markdown goes to stdout, progress to stderr.
"""

import argparse
import platform
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch

from benchmarks.coverage_data import table
from benchmarks.planted_routes import DEPTH, DIRECT, GREEDY, ROUTES, SAMPLED, Kind, model, siblings
from experiments.change import HEADER, OWN, RESPONSE, STATE
from experiments.experiment import Model
from experiments.locate import (
    ABOVE_TENTH,
    BITS,
    MAY_BE_MOST,
    WINDOW,
    Locate,
    estimated,
    estimates,
    layer_windows,
)
from experiments.outcome import bits_by_cell, query_bits_of, with_own_scores
from ia_mech.estimates import frame_of

QUERIES, SEEDS = 60, 20
NOISE = 0.01  # spread of the noise on every weight; planted weights are 0.25 and more
POWER = 2.8  # standard errors of an effect that is shown with a power of 80%
OPTIONS = {"level": 0.95, "resamples": 400, "seed": 0}
BEYOND = "bits beyond wordings"
WORDED = ("wording only", "header")  # kinds whose wordings are measured, too


# -- planted transformers --------------------------------------------------------------------------


def measure_study(
    kind: Kind, seed: int, queries: int, noise: float = NOISE, *, wordings: bool = False
) -> pd.DataFrame:
    """The scores of a study's queries, with ``source`` and the scores after own contexts."""
    subject = Namespace(model=model(kind, seed, noise))
    rng = np.random.default_rng([seed, wordings])
    parts = []
    for number in range(queries):
        unit = siblings(kind, rng, f"q{number:03d}", wordings)
        parts.append(unit.rows(Model(subject, None)))
        parts[-1]["source"] = unit.source
    return with_own_scores(pd.concat(parts, ignore_index=True))


def study_estimates(kind: Kind, seed: int, queries: int, noise: float = NOISE) -> pd.DataFrame:
    """Every estimate of one study."""
    rows = measure_study(kind, seed, queries, noise)
    found = estimates(bits_by_cell(rows, OPTIONS["seed"]), OPTIONS)
    if kind.name in WORDED:
        worded = measure_study(kind, seed, queries, noise, wordings=True)
        both = [
            query_bits_of(
                one[(one["site"] == OWN) & (one["temperature"] == SAMPLED)], OPTIONS["seed"]
            )
            for one in (rows, worded)
        ]
        found += estimated(OPTIONS, BEYOND, *both, term=OWN)
    return frame_of(found, Locate.columns)


def site_estimate(found: pd.DataFrame, quantity: str, site: str, temperature: float | None = None):
    """The estimate of a whole site, of all sampled turns if no temperature is given."""
    t = found["temperature"]
    here = t.isna() if temperature is None else t.eq(temperature)
    here &= (found["quantity"] == quantity) & (found["term"] == site) & found["layer"].isna()
    return next(found[here].itertuples())


def wrong_claims(kind: Kind, found: pd.DataFrame) -> list[str]:
    """What the study's sentence would get wrong."""
    said = []
    if (site_estimate(found, BITS, OWN).low > 0) != bool(kind.carries):
        said.append("expressed")
    if kind.gated and site_estimate(found, BITS, OWN, GREEDY).low > 0:
        said.append("greedy expressed")
    for site in (RESPONSE, HEADER, STATE) if kind.state else (RESPONSE, HEADER):
        shown = site_estimate(found, BITS, site).low > 0
        nothing = not shown or site_estimate(found, ABOVE_TENTH, site).high < 0
        if not (shown if site in kind.carries else nothing):
            said.append(site)
    if kind.windows:
        windows = found[(found["term"] == WINDOW) & (found["quantity"] == MAY_BE_MOST)]
        named = set(windows.loc[windows["value"] > 1 - OPTIONS["level"], "layer"])
        if named != {window[0] for window in layer_windows(DEPTH) if DIRECT in window}:
            said.append("window")
    if kind.name in WORDED and (site_estimate(found, BEYOND, OWN).low > 0) != (
        kind.name != WORDED[0]
    ):
        said.append("beyond wordings")
    return said


def routes(kinds: list[Kind], seeds: int) -> None:
    """How many studies of each kind are right."""
    print(f"### Planted transformers: {seeds} studies of {QUERIES} queries a row\n")

    def rows() -> Iterator[list[object]]:
        for kind in kinds:
            tried = [study_estimates(kind, seed, QUERIES) for seed in range(seeds)]
            faults = [wrong_claims(kind, found) for found in tried]
            counted = Counter(fault for each in faults for fault in each)
            bits = [
                np.mean([site_estimate(found, BITS, site).value for found in tried])
                for site in (OWN, RESPONSE, HEADER)
            ]
            yield [
                kind.name,
                sum(not each for each in faults),
                f"{bits[0]:.2f}" + (f" ({effect(tried):.1f})" if kind.carries else ""),
                *(f"{value:.2f}" for value in bits[1:]),
                ", ".join(f"{fault} {count}" for fault, count in counted.items()) or "–",
            ]

    header = ["planted", "right", "expressed", "response", "header"]
    table([*header, "wrong"], rows(), len(kinds), "planted")


def effect(tried: list[pd.DataFrame]) -> float:
    """Expressed bits, in units of the effect that is shown with a power of 80%."""
    found = [site_estimate(each, BITS, OWN) for each in tried]
    error = np.mean([(one.high - one.low) / 4 for one in found])  # two of Student's either way
    return float(np.mean([one.value for one in found]) / (POWER * error))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="studies of each kind")
    parser.add_argument("--only", choices=[*ROUTES], nargs="+", help="some of it")
    args = parser.parse_args()
    begun = time.perf_counter()
    wanted = args.only or [*ROUTES]
    routes([kind for kind in ROUTES.values() if kind.name in wanted], args.seeds)
    print(
        f"{(time.perf_counter() - begun) / 60:.1f} minutes on one core of "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, PyTorch {torch.__version__}."
    )


if __name__ == "__main__":
    main()
