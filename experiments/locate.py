"""Where does what a turn tells about its response come from: the header, or the response itself?

While a model writes a turn it attends to keys and values: those of the query, of the response, and
of the tokens after it, the user header among them. The experiment takes those of one such site from
one context and puts them into another. Of a query's four responses one is the recipient, the other
three are candidates. A turn that followed a candidate is scored twice:

- after each candidate's own context: these are the bits that the turn expresses;
- after three hybrids, each the recipient's context with one site of a candidate: these are the bits
  that the site carries. The turn followed none of the hybrids, and they differ in the candidate
  alone: what splicing damages is damaged in all three.

Maps use one recipient per query and ask for more: windows of the response's layers, put in alone
and left out alone, or single key-value heads of them; states of header tokens by layer; and turns
that the model writes after hybrids. The windows that carry most are chosen on half of the queries
and reported on the other.

Needs: a run with four or more responses per query (sample with --response generate --responses 4).
Cost: about 30,000 tokens a query with all four recipients and the usual maps; --dry-run counts.

    python -m experiments.locate cache/RUN
    python -m experiments.locate cache/RUN --queries 20 --maps             # whole sites alone
    python -m experiments.locate cache/RUN --recipients 1 --maps windows   # a larger model
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment
from experiments.hybrids import (
    AFTER,
    FIRST,
    HEAD,
    HEADER,
    LAST,
    OTHERS,
    OWN,
    QUERY,
    RECIPIENT,
    RESPONSE,
    SCORES,
    SITES,
    TOTAL,
    WINDOW,
    WRITTEN,
    Hybrids,
    step_of,
)
from experiments.tables import tables_of
from ia_mech.estimates import ALL, TidyEstimate, all_datasets, estimate_of, holm_corrected
from ia_mech.likelihood.carried import CANDIDATES, CEILING, QueryBits, bits_by_query
from ia_mech.stats import Estimate, cluster_bootstrap, cluster_mean, paired_difference

if TYPE_CHECKING:
    from experiments.figures import Drawing
    from ia_mech.results import Table

WHOLES = (OWN, *SITES)  # sites whose bits have no layers
WHOLE = [f"whole_{number}" for number in range(CANDIDATES)]  # after the candidates' own contexts
CHOSEN = "bits, chosen on other queries"
# Paired by query. The query's tokens are the same in all candidates: a control.
LESS_GREEDY, LESS_ALL_LAYERS = "bits, less greedy's", "bits, less with all layers"
LESS_QUERY, HITS_LESS_QUERY = "bits, less the query's", "own is likeliest, less the query's"
MORE_ACCEPTED = "bits of accepted turns, less those of others"
EQUIVALENT = 0.1  # a share of what is expressed that counts as nothing
CELLS = (WINDOW, OTHERS, HEAD, FIRST, LAST)  # of maps, by layer
RANKING, REPORTING = "ranking half", "reporting half"
GREEDY, SAMPLED = "greedy", "sampled"  # the latter: of all temperatures above 0 together


# -- estimate --------------------------------------------------------------------------------------


def with_own(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the scores of their turns after the candidates' own contexts, too.

    Turns that were written after hybrids have no others.
    """
    keys = ["source", "recipient", "followed", "temperature", "sample"]
    own = rows.loc[rows["site"] == OWN, [*keys, *SCORES]]
    own = own.rename(columns=dict(zip(SCORES, WHOLE, strict=True)))
    found = rows.drop(columns=WHOLE, errors="ignore").merge(own, on=keys, how="left")
    written = found["site"].isin(WRITTEN)
    found.loc[written, WHOLE] = found.loc[written, SCORES].to_numpy()
    return found


def query_bits_of(rows: pd.DataFrame, seed: int) -> QueryBits | None:
    """What rows of one site, of :func:`with_own`, tell; None of fewer than two queries with turns
    of all candidates."""
    rows = balanced_queries(rows)
    if rows["source"].nunique() < 2:
        return None
    each = rows[SCORES].to_numpy(), rows["own"].to_numpy(), rows["source"]
    return bits_by_query(*each, rows[WHOLE].to_numpy(), seed=seed)


def balanced_queries(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of queries that have turns of all candidates."""
    return rows[rows.groupby("source")["own"].transform("nunique") == CANDIDATES]


@dataclass(frozen=True)
class Estimator:
    """Estimates with their names; ``options`` are ``level``, ``resamples`` and ``seed``."""

    options: dict[str, Any]

    def mean(self, quantity: str, found: QueryBits, **names: Any) -> TidyEstimate:
        estimate = cluster_mean(found.bits, found.queries, level=self.options["level"])
        return self._row(quantity, estimate.clip(-np.inf, CEILING), found, names)

    def hits(self, found: QueryBits, **names: Any) -> TidyEstimate:
        """How often the own candidate is the likeliest, against the third that chance gives."""
        more = (found.hits - 1 / CANDIDATES).round(9)  # thirds that were added up are no signs
        options = {name: self.options[name] for name in ("level", "seed")}
        pair = paired_difference(more, found.queries, np.zeros(len(more)), found.queries, **options)
        level = self.options["level"]
        estimate = cluster_mean(found.hits, found.queries, level=level).clip(0, 1)
        names = {"dataset": ALL} | names
        return TidyEstimate("own is likeliest", names, len(found.hits), estimate, pair.p, pair.test)

    def share(self, found: QueryBits, expressed: QueryBits, **names: Any) -> Iterator[TidyEstimate]:
        """What a site carries as a share of what is expressed in the same queries, and the bits
        by which it is more than :data:`EQUIVALENT` of it."""
        expressed = expressed.only(found.queries)
        if cluster_mean(expressed.bits, expressed.queries).low > 0:

            def ratio(counts: np.ndarray) -> np.ndarray:
                return (counts @ found.bits) / (counts @ expressed.bits)

            (estimate,) = cluster_bootstrap(ratio, found.queries, **self.options)
            yield self._row("share of expressed", estimate, found, names)
        more = found.bits - EQUIVALENT * expressed.bits
        estimate = cluster_mean(more, found.queries, level=self.options["level"])
        yield self._row("bits above a tenth of expressed", estimate, found, names)

    def rate(self, quantity: str, events: pd.Series, sources: pd.Series, **names) -> TidyEstimate:
        """How often something is so."""
        level = self.options["level"]
        found = cluster_mean(events.astype(float), sources, proportion=True, level=level)
        return TidyEstimate(quantity, {"dataset": ALL} | names, len(events), found)

    def difference(
        self, quantity: str, found: QueryBits, base: QueryBits, **names: Any
    ) -> TidyEstimate:
        """Bits, or hits, less those of another arm or site in the same queries."""
        options = {name: self.options[name] for name in ("level", "seed")}
        mine, other = (
            (one.hits if quantity == HITS_LESS_QUERY else one.bits, one.queries)
            for one in (found, base)
        )
        pair = paired_difference(*mine, *other, **options)
        names = {"dataset": ALL} | names
        return TidyEstimate(quantity, names, len(found.bits), pair.difference, pair.p, pair.test)

    def _row(
        self, quantity: str, estimate: Estimate, found: QueryBits, names: dict
    ) -> TidyEstimate:
        return TidyEstimate(quantity, {"dataset": ALL} | names, len(found.bits), estimate)


def halves(queries: Sequence[str], seed: int) -> dict[str, str]:
    """Each query's half, drawn by seed."""
    names = sorted(set(queries))
    order = np.random.default_rng([seed, 2]).permutation(len(names))
    return {names[at]: (RANKING, REPORTING)[place % 2] for place, at in enumerate(order)}


def estimates(rows: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate."""
    estimator, seed, rows = Estimator(options), options["seed"], with_own(rows)
    arms = {t: rows["temperature"] == t for t in sorted(set(rows["temperature"]))}
    sampled = rows["temperature"] > 0
    expressed: dict[Any, QueryBits] = {}
    differences: list[TidyEstimate] = []
    for arm, here in [*arms.items(), (None, sampled)]:
        names = {"temperature": np.nan if arm is None else arm}
        every = {site: query_bits_of(rows[here & (rows["site"] == site)], seed) for site in WHOLES}
        there = {site: bits for site, bits in every.items() if bits is not None}
        for site, bits in there.items():
            yield estimator.mean("bits", bits, term=site, **names)
            yield estimator.hits(bits, term=site, **names)
            if site == OWN:
                expressed[arm] = bits
            elif arm in expressed:
                yield from estimator.share(bits, expressed[arm], term=site, **names)
            if QUERY in there and site in (HEADER, AFTER, RESPONSE):
                differences += [
                    estimator.difference(quantity, bits, there[QUERY], term=site, **names)
                    for quantity in (LESS_QUERY, HITS_LESS_QUERY)
                ]
        if arm != 0 and 0.0 in expressed and arm in expressed:
            less = estimator.difference(
                LESS_GREEDY, expressed[arm], expressed[0.0], term=OWN, **names
            )
            differences.append(less)
    mapped = rows[rows["site"].isin([TOTAL, *CELLS, *WRITTEN])]
    total = query_bits_of(mapped[mapped["site"] == TOTAL], seed)
    for (site, layer, head, t), cell in mapped.groupby(
        ["site", "layer", "head", "temperature"], sort=False
    ):
        found = query_bits_of(cell, seed)
        if found is None:
            continue
        names = {"term": site, "temperature": t} | cell_names(layer, head)
        yield estimator.mean("bits", found, **names)
        yield estimator.hits(found, **names)
        if site == OTHERS and total is not None:
            differences.append(estimator.difference(LESS_ALL_LAYERS, found, total, **names))
        if site in WRITTEN:
            more = cell[RECIPIENT] > cell[SCORES].to_numpy()[np.arange(len(cell)), cell["own"]]
            yield estimator.rate("likelier after the recipient", more, cell["source"], **names)
    yield from holm_corrected(differences, lambda row: (row.quantity, row.names["term"]))
    for site in (WINDOW, HEAD):
        yield from strongest_cells(mapped[mapped["site"] == site], expressed, estimator)


def cell_names(layer: int, head: int) -> dict[str, int]:
    """The columns that name a cell of a map; a whole site has none."""
    return {name: at for name, at in (("layer", layer), ("head", head)) if at >= 0}


def query_table(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """What whole sites tell of each query: ``term``, ``temperature`` (missing: all sampled turns),
    ``source``, ``bits`` and ``hits``."""
    found, rows = [], with_own(rows)
    for t in [*sorted(set(rows["temperature"])), np.nan]:
        here = rows["temperature"] > 0 if np.isnan(t) else rows["temperature"] == t
        for site in (OWN, *SITES):
            one = query_bits_of(rows[here & (rows["site"] == site)], seed)
            if one is not None:
                table = {"source": one.queries, "bits": one.bits, "hits": one.hits}
                found.append(pd.DataFrame(table).assign(term=site, temperature=t))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def strongest_cells(
    cells: pd.DataFrame, expressed: Mapping[Any, QueryBits], estimator: Estimator
) -> Iterator[TidyEstimate]:
    """The two cells that carry most in one half of the queries, as the other half has them."""
    half_of = halves(list(cells["source"]), estimator.options["seed"])
    half = cells["source"].map(half_of)
    ranked = {}
    for place, cell in cells[half == RANKING].groupby(["layer", "head"]):
        found = query_bits_of(cell, estimator.options["seed"])
        if found is not None:
            ranked[place] = found.bits.mean()
    for layer, head in sorted(sorted(ranked, key=lambda one: -ranked[one])[:2]):
        here = (cells["layer"] == layer) & (cells["head"] == head)
        cell = cells[(half == REPORTING) & here]
        found = query_bits_of(cell, estimator.options["seed"])
        if found is not None:
            temperature = cell["temperature"].iloc[0]
            names = {"term": cell["site"].iloc[0], "temperature": temperature} | cell_names(
                layer, head
            )
            yield estimator.mean(CHOSEN, found, **names)
            yield from estimator.share(found, expressed[temperature], **names)


def accepted_bits(
    rows: pd.DataFrame, verdicts: pd.DataFrame, options: dict[str, Any]
) -> Iterator[TidyEstimate]:
    """How much of what sampled turns express is in turns that a judge accepts.

    Args:
        rows: of :meth:`experiments.hybrids.Measured.table`, with ``source``.
        verdicts: ``context_id``, ``temperature``, ``sample`` and ``accepted``; turns that weren't
            assessed are left out.
        options: ``level``, ``resamples`` and ``seed``.
    """
    own = balanced_queries(with_own(rows[(rows["site"] == OWN) & (rows["temperature"] > 0)]))
    found = query_bits_of(own, options["seed"])
    if found is None:
        return
    keys = ["context_id", "temperature", "sample"]
    own = own[["source", *keys]].assign(bits=found.each)
    own = own.merge(verdicts, on=keys).dropna()
    accepted, bits = own["accepted"].to_numpy(dtype=float), own["bits"].to_numpy()
    columns = {"all": np.ones(len(own)), "accepted": accepted}
    columns |= {"bits": bits, "accepted bits": accepted * bits}
    sums = pd.DataFrame(columns).groupby(own["source"].to_numpy()).sum()

    def statistics(counts: np.ndarray) -> np.ndarray:
        turns, taken, total, of_taken = (counts @ sums.to_numpy()).T
        with np.errstate(invalid="ignore", divide="ignore"):
            more = of_taken / taken - (total - of_taken) / (turns - taken)
            return np.stack([taken / turns, of_taken / total, more], axis=1)

    quantities = ("share of turns accepted", "share of bits in accepted turns", MORE_ACCEPTED)
    estimates = cluster_bootstrap(statistics, list(sums.index), **options)
    for quantity, estimate in zip(quantities, estimates, strict=True):
        yield TidyEstimate(quantity, {"dataset": ALL, "term": OWN}, len(own), estimate)


# -- the experiment --------------------------------------------------------------------------------


class Locate(Hybrids):
    """See the module."""

    name = "locate"
    columns: ClassVar[Mapping[str, str]] = {
        **Experiment.columns,
        "layer": "Int64",
        "head": "Int64",
    }

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        return estimates(rows, self.options)

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"rows": rows, "queries": query_table(rows, self.args.seed)}

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        columns: dict[str, tuple[str, int | str]] = {
            "bits": ("bits", 2),
            "own is likeliest": ("own likeliest (chance 0.33)", 2),
            "share of expressed": ("share", 2),
        }
        title = (
            f"bits about which of {CANDIDATES} responses a turn followed (at most {CEILING:.2f})"
        )
        made = tables_of(
            title,
            found[found["term"].isin([OWN, *SITES])],
            columns,
            index=("temperature", "term"),
            rows="queries",
            legend=(
                f"{OWN}: expressed. Sites: carried by keys and values of the header, of all tokens "
                "after the response, of the response; the query's are the same tokens in all, so "
                "that they show what differing lengths alone do. share: of what is expressed."
            ),
        )
        made += tables_of(
            "differences, paired by query",
            found,
            {
                LESS_QUERY: ("bits less the query's", "+.2f"),
                HITS_LESS_QUERY: ("own likeliest, less the query's", "+.2f"),
                LESS_GREEDY: ("bits less greedy's", "+.2f"),
                LESS_ALL_LAYERS: ("bits less with all layers", "+.2f"),
            },
            index=("temperature", "term", "layer"),
            rows="queries",
            legend=(
                "p: Holm-corrected over the lines of a term. The query's tokens are alike in all "
                f"contexts. {OTHERS}: what is lost where a window is the recipient's."
            ),
        )
        del columns["share of expressed"]
        again = {"likelier after the recipient": ("likelier after the recipient", 2)}
        made += tables_of(
            "turns that the model writes after hybrids: do they tell the candidate?",
            found[found["term"].isin(WRITTEN)],
            columns | again,
            index=("temperature", "term"),
            rows="queries",
            legend="What is named is the candidate's, everything else the recipient's.",
        )
        for site in (TOTAL, *CELLS):
            mine = found[(found["term"] == site) & found["quantity"].isin(list(columns))]
            made += tables_of(
                f"carried by {site}",
                mine,
                columns,
                index=("term", "layer", "head"),
                rows="queries",
                full=True,
            )
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        return drawings(found, self.runs[0].model["name"])

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        lookup = Lookup(found)
        name = self.runs[0].model["name"]
        sentence = (
            f"{name}'s sampled turns tell {lookup('bits', OWN)} of {CEILING:.2f} bits about which "
            f"of {CANDIDATES} responses they followed, greedy ones {lookup('bits', OWN, 0.0)}"
        )
        for site in (RESPONSE, HEADER):
            share = lookup("share of expressed", site)
            sentence += (
                f"; {lookup('bits', site)} ({share}) through the keys and values of the {site}"
            )
        if windows := strongest_windows(found, self.runs[0].model["layers"]):
            sentence += f", of the response's layers most in {windows}"
        control = (
            "Each number is held against two siblings whose states are put in alike; keys and "
            f"values of the query, the same tokens in all siblings, carry {lookup('bits', QUERY)}."
        )
        return Conclusion(f"{sentence}.", control)


def strongest_windows(found: pd.DataFrame, layers: int) -> str:
    """The windows that carry most, as other queries show it; an empty text where none is shown."""
    chosen = found[(found["quantity"] == CHOSEN) & (found["term"] == WINDOW) & (found["low"] > 0)]
    last = step_of(layers) - 1
    return " and ".join(
        f"{row.layer}–{min(row.layer + last, layers)} ({estimate_of(row).text()})"
        for row in chosen.itertuples()
    )


def drawings(found: pd.DataFrame, model: str) -> "dict[str, Drawing]":
    """What is expressed and carried, by site and by layer, from the estimates."""
    from experiments.figures import Bars, HeatMap, Lines

    bits = found[found["quantity"] == "bits"]
    whole = bits[bits["term"].isin([OWN, *SITES]) & bits["layer"].isna()]
    names = [GREEDY if t == 0 else SAMPLED if np.isnan(t) else f"T = {t:g}"
             for t in whole["temperature"]]  # fmt: skip
    made: dict[str, Drawing] = {
        "sites": Bars(
            f"{model} · expressed and carried", "bits", whole.assign(turns=names), by="turns"
        )
    }
    cells = bits[bits["term"].isin(CELLS)]
    if len(mapped := cells[cells["head"].isna()]):
        own = whole[(whole["term"] == OWN) & whole["temperature"].eq(mapped["temperature"].iloc[0])]
        levels = {"expressed": float(own["value"].iloc[0]), "": 0.0}
        across = "layer (of a window: its first)"
        title = f"{model} · carried by layer"
        made["layers"] = Lines(title, across, "bits", mapped, across="layer", levels=levels)
    if len(heads := cells[cells["head"].notna()]):
        title = f"{model} · carried by key-value heads of the response"
        across = "first layer of a window"
        made["heads"] = HeatMap(title, across, "head", "bits", heads, across="layer", down="head")
    if len(written := bits[bits["term"].isin(WRITTEN)]):
        turns = [GREEDY if t == 0 else f"T = {t:g}" for t in written["temperature"]]
        title = f"{model} · turns written after hybrids"
        made["written"] = Bars(title, "bits", written.assign(turns=turns), by="turns")
    return made


class Lookup:
    """Estimates as text, by quantity, site and temperature (None: all sampled turns)."""

    def __init__(self, found: pd.DataFrame) -> None:
        self._found = all_datasets(found)

    def __call__(self, quantity: str, term: str, temperature: float | None = None) -> str:
        rows = self._found
        t = (
            rows["temperature"].isna()
            if temperature is None
            else rows["temperature"].eq(temperature)
        )
        mine = rows[(rows["quantity"] == quantity) & (rows["term"] == term) & t]
        return estimate_of(next(mine.itertuples())).text() if len(mine) else "–"


main = Locate.main

if __name__ == "__main__":
    sys.exit(main())
