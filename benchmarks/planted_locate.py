"""Are the ways told that bits take from response to turn? Planted transformers, and nulls.

    python -m benchmarks.planted_locate                  the whole study, some 30 minutes
    python -m benchmarks.planted_locate --seeds 2        two studies of each kind
    python -m benchmarks.planted_locate --only latent    studies of one kind; "rule": the nulls

Each study has a transformer of its own and 60 queries with four responses and a turn after each,
and is measured and estimated as ``experiments.locate`` does it. What is planted is in
``benchmarks/planted_routes.py``. A study is right if what its sentence says is: that turns tell
something, and that the response and the header carry something (the interval lies above 0), or
don't (it reaches 0, or lies below a tenth of what is expressed); of kinds with a gate, that greedy
turns tell nothing, and whether the header is latent; of the kind with one layer, that its window
carries, and no other; of the recurrent kind, that the state does; of the kind with wordings, that
turns tell no more than of wordings of one content. Then the rule by which ``experiments.study``
says "latent" is tried on simulated bits and rates. Markdown goes to stdout, progress to stderr.
"""

import argparse
import platform
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
import torch

from benchmarks.coverage_data import table
from benchmarks.planted_routes import DEPTH, DIRECT, GREEDY, ROUTES, SAMPLED, Kind, model, siblings
from experiments import arms, elicit
from experiments.experiment import Model
from experiments.hybrids import (
    HEADER,
    OWN,
    QUERY,
    RESPONSE,
    STATE,
    WINDOW,
    SiteScorer,
    layer_windows,
)
from experiments.locate import (
    ABOVE_TENTH,
    BITS,
    CHOSEN,
    HITS,
    Locate,
    estimated,
    estimates,
    query_bits_of,
    share_of,
    whole_site_bits,
    with_own_scores,
)
from experiments.study import latent_sentence
from ia_mech.estimates import TidyEstimate, frame_of
from ia_mech.likelihood.carried import QueryBits
from ia_mech.stats import Estimate

QUERIES, SEEDS = 60, 20
NOISE = 0.01  # spread of what is added to every weight; what is planted is 0.25 and more
POWER = 2.8  # standard errors of an effect that is shown with a power of 80%
OPTIONS = {"level": 0.95, "resamples": 400, "seed": 0}
RULE = "rule"
BEYOND = "bits beyond wordings"
WORDED = ("wording only", "header")  # kinds whose wordings are measured, too


# -- planted transformers --------------------------------------------------------------------------


def measure_study(
    kind: Kind, seed: int, queries: int, noise: float = NOISE, *, wordings: bool = False
) -> pd.DataFrame:
    """Scores of a study's queries, with ``source`` and the scores after own contexts."""
    subject = Namespace(model=model(kind, seed, noise))
    rng = np.random.default_rng([seed, wordings])
    parts = []
    for number in range(queries):
        unit = siblings(kind, rng, f"q{number:03d}", wordings)
        parts.append(SiteScorer(Model(subject, None), unit).table())
        parts[-1]["source"] = unit.source
    return with_own_scores(pd.concat(parts, ignore_index=True))


def study_estimates(kind: Kind, seed: int, queries: int, noise: float = NOISE) -> pd.DataFrame:
    """Every estimate of one study."""
    rows = measure_study(kind, seed, queries, noise)
    found = estimates(rows, whole_site_bits(rows, OPTIONS["seed"]), OPTIONS)
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
    """The estimate of a whole site; of all sampled turns where no temperature is given."""
    t = found["temperature"]
    here = t.isna() if temperature is None else t.eq(temperature)
    here &= (found["quantity"] == quantity) & (found["term"] == site) & found["layer"].isna()
    return next(found[here].itertuples())


def wrong_claims(kind: Kind, found: pd.DataFrame) -> list[str]:
    """What a study's sentence would say wrongly."""
    said = []
    if (site_estimate(found, BITS, OWN).low > 0) != bool(kind.carries):
        said.append("expressed")
    if kind.gated and site_estimate(found, BITS, OWN, GREEDY).low > 0:
        said.append("greedy expressed")
    if kind.gated and says_latent(found) != (HEADER in kind.carries):
        said.append("latent")
    for site in (RESPONSE, HEADER, STATE) if kind.state else (RESPONSE, HEADER):
        shown = site_estimate(found, BITS, site).low > 0
        nothing = not shown or site_estimate(found, ABOVE_TENTH, site).high < 0
        if not (shown if site in kind.carries else nothing):
            said.append(site)
    if kind.windows:
        windows = found[found["term"] == WINDOW].set_index(["quantity", "layer"])
        carrying = {
            layer
            for layer, window in windows.loc[CHOSEN].iterrows()
            if window["low"] > 0 and windows.loc[(ABOVE_TENTH, layer), "high"] >= 0
        }
        if carrying != {window[0] for window in layer_windows(DEPTH) if DIRECT in window}:
            said.append("window")
    if kind.name in WORDED and (site_estimate(found, BEYOND, OWN).low > 0) != (
        kind.name != WORDED[0]
    ):
        said.append("beyond wordings")
    return said


def says_latent(found: pd.DataFrame) -> bool:
    """Whether "latent" is said where a judge accepts more turns under an elicitor."""
    gap = TidyEstimate(
        elicit.GAP, {"term": elicit.TEMPERATURE}, QUERIES, Estimate(0.3, 0.2, 0.4, QUERIES, "")
    )
    gaps = frame_of([gap], elicit.Elicit.columns)
    return latent_sentence(
        pd.concat([found.assign(stage="locate"), gaps.assign(stage="elicit")]), ""
    ).startswith("Latent")


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
    """Expressed bits in those that are shown with a power of 80%."""
    found = [site_estimate(each, BITS, OWN) for each in tried]
    error = np.mean([(one.high - one.low) / 4 for one in found])  # two of Student's either way
    return float(np.mean([one.value for one in found]) / (POWER * error))


# -- the rule that says "latent" -------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A study on arrays: what its bits and rates are on average.

    Attributes:
        name: as it is shown.
        latent: whether it is.
        greedy, sampled: bits that the header carries in these turns.
        gap: how much more often turns are accepted, beyond siblings, when sampled.
        prompted: the same under a prompt.
        expressed: bits in greedy turns; sampled ones have :data:`EXPRESSED`.
        spread: of the header's bits between queries.
        hits: how often the own sibling is the likeliest by the header of greedy turns.
    """

    name: str
    latent: bool
    greedy: float = 0.0
    sampled: float = 0.0
    gap: float = 0.0
    expressed: float = 0.8
    spread: float = 0.15
    hits: float = 1 / 3
    prompted: float = 0.0


EXPRESSED = 0.9  # bits in sampled turns
SPREAD, RATES = 0.5, 0.3  # between queries, of expressed bits and of an arm's rate
NULLS = (
    Setting("neither bits nor rates rise", False),
    Setting("greedy turns carry a tenth of what is expressed", False, 0.09, 0.5, 0.2),
    Setting("the header carries nothing in either", False, 0.0, 0.0, 0.2),
    Setting("rates don't rise", False, 0.0, 0.5, 0.0),
    Setting("greedy turns carry what one β misses", False, 0.0, 0.5, 0.2, hits=0.5),
    Setting("rates rise under a prompt alone", False, 0.0, 0.5, prompted=0.2),
)
TRUE = (
    Setting("sampled 0.5 bits", True, 0.0, 0.5, 0.2),
    Setting("sampled 0.3 bits", True, 0.0, 0.3, 0.2),
    Setting("sampled 0.5 bits, greedy turns express nothing", True, 0.0, 0.5, 0.2, 0.0),
    Setting("sampled 0.5 bits, a spread of 0.25", True, 0.0, 0.5, 0.2, spread=0.25),
    Setting("sampled 0.5 bits, a spread of 0.4", True, 0.0, 0.5, 0.2, spread=0.4),
    Setting("sampled 0.5 bits, a gap of 0.1", True, 0.0, 0.5, 0.1),
)


def simulate_study(setting: Setting, rng: np.random.Generator) -> pd.DataFrame:
    """The estimates of one study, as ``experiments.study`` gets them."""
    names = [f"q{number:03d}" for number in range(QUERIES)]
    common = rng.normal(size=QUERIES)  # turns of one query have half of their variance in common

    def simulated_bits(mean: float, spread: float, hits: float) -> QueryBits:
        bits = mean + spread * (common + rng.normal(size=QUERIES)) / np.sqrt(2)
        right = rng.binomial(12, hits, QUERIES) / 12  # 4 recipients, 3 turns
        return QueryBits(names, bits, right, bits)

    rows: list[TidyEstimate] = []
    for temperature, expressed, carried, hits in (
        (GREEDY, setting.expressed, setting.greedy, setting.hits),
        (np.nan, EXPRESSED, setting.sampled, 1 / 3 + setting.sampled / 2),
    ):
        whole = simulated_bits(expressed, SPREAD, 0.8)
        sites = {
            OWN: whole,
            HEADER: simulated_bits(carried, setting.spread, hits),
            QUERY: simulated_bits(0.0, 0.1, 1 / 3),
        }
        for site, found in sites.items():
            at = {"term": site, "temperature": temperature}
            rows += estimated(OPTIONS, BITS, found, **at)
            rows += estimated(OPTIONS, HITS, found, **at)
            if site != OWN:
                rows += share_of(OPTIONS, found, whole, **at)
    located = frame_of(rows, Locate.columns).assign(stage="locate")
    return pd.concat([located, elicit_estimates(setting, names, rng).assign(stage="elicit")])


def elicit_estimates(setting: Setting, names: list[str], rng: np.random.Generator) -> pd.DataFrame:
    """What ``experiments.elicit`` estimates of three temperatures, without a prompt and with it."""
    common = rng.normal(size=QUERIES)
    parts = []
    for prompted, t in product((False, True), (0.0, 0.7, 1.0)):
        arm = elicit.arm_name(t, elicit.PROMPTED if prompted else "")
        mean = setting.gap * (t > 0) + setting.prompted * prompted
        rate = mean + RATES * (common + rng.normal(size=QUERIES)) / np.sqrt(2)
        rate = rate.clip(-1, 1)
        values = {arms.RATE: 0.5 + rate / 2, arms.SIBLINGS: 0.5 - rate / 2, arms.EXCESS: rate}
        parts.append(pd.DataFrame({"source": names, "arm": arm, "dataset": "d"} | values))
    experiment = Namespace(args=Namespace(**OPTIONS), options=OPTIONS, notes=[])
    return frame_of(elicit.Elicit.estimate(experiment, pd.concat(parts)), elicit.Elicit.columns)


def rule(studies: int) -> None:
    """How often "latent" is said where it isn't true, and where it is."""
    print(f'### How often "latent" is said: {studies} studies of {QUERIES} queries a row\n')

    def rows() -> Iterator[list[object]]:
        for number, setting in enumerate((*NULLS, *TRUE)):
            rng = np.random.default_rng([3, number])
            said = [
                latent_sentence(simulate_study(setting, rng), "").startswith("Latent")
                for _ in range(studies)
            ]
            yield [setting.name, "yes" if setting.latent else "no", sum(said)]

    table(["simulated", "true", "said"], rows(), len(NULLS) + len(TRUE), RULE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="studies of each kind")
    parser.add_argument("--only", choices=[*ROUTES, RULE], nargs="+", help="some of it")
    args = parser.parse_args()
    begun = time.perf_counter()
    wanted = args.only or [*ROUTES, RULE]
    if kinds := [kind for kind in ROUTES.values() if kind.name in wanted]:
        routes(kinds, args.seeds)
    if RULE in wanted:
        rule(2 * args.seeds)
    print(
        f"{(time.perf_counter() - begun) / 60:.1f} minutes on one core of "
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"NumPy {np.__version__}, PyTorch {torch.__version__}."
    )


if __name__ == "__main__":
    main()
