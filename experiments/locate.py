"""Which part of a conversation does a turn depend on: the query, the response, or the user header?

The method is activation patching of keys and values. Of a query's four responses one is the
recipient, the other three are candidates. The keys and values of one part (a site) come from a
candidate, the rest of the context from the recipient, and a turn that followed a candidate is
scored after these hybrids with each of the three. The scores tell which one it followed. How well
they do is what the site carries, in bits (at most log₂ 3): what it is enough for. A second number
says how many bits are lost without the site. Scored after the candidates' own contexts, the same
turn tells all the bits that it expresses. The control is the query as a site: its tokens are the
same in all contexts. Recurrent layers have a state in place of keys and values: one more site.

Maps look closer, with one recipient per query:

- windows: the response's layers, an eighth of them alone, or without these;
- bands: the response's tokens, by their distance from its end;
- blocks: the response, computed anew while each token sees only its block;
- states: header tokens, by layer;
- written: turns that the model writes after hybrids.

With --outcome follow-up turns are sampled after a recipient with one site of another query's
context, with many or with few follow-ups; they are kept, and judged. With --outcome mass nothing is
sampled: the command measures how the follow-up mass of ia-mech mass moves. Donors are other
queries' contexts, or with --donors siblings other responses to the same query, of the highest and
of the lowest mass.

Needs: a run with four or more responses per query (sample with --response generate --responses 4).
Cost: about 30,000 tokens a query with all four recipients and the usual maps; --dry-run counts.
Docs: docs/locate.md.

    ia-mech locate cache/RUN
    ia-mech locate cache/RUN --queries 20 --maps none        # whole sites alone
    ia-mech locate cache/RUN --recipients 1 --maps windows   # a larger model
    ia-mech locate cache/RUN --outcome follow-up             # a judged run with 16 samples
    ia-mech locate cache/RUN --outcome mass                  # after ia-mech mass cache/RUN
    ia-mech locate cache/RUN --outcome mass --donors siblings   # after ia-mech mass --responses 4
"""

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from experiments.change import (
    ALL_THREE,
    DONATED,
    HEADER,
    OWN,
    QUERY,
    RESPONSE,
    RESPONSE_AND_HEADER,
    RESPONSE_AND_STATE,
    RESPONSES,
    SITES,
    STATE,
    WHOLE_SITES,
    Anew,
    Band,
    Cell,
    Layers,
    Mask,
    Replaced,
    Splice,
    Whole,
)
from experiments.control import FIRST, ratio
from experiments.experiment import Conclusion, flag
from experiments.grid import (
    BY_BITS,
    BY_FOLLOW_UPS,
    BY_MASS,
    OTHERS,
    SIBLINGS,
    FollowUps,
    Grid,
)
from experiments.moved_by_sites import MovedBySites, sites_of
from experiments.outcome import (
    LEAST_QUERIES,
    WRITTEN_AFTER,
    BitsByCell,
    SiblingContexts,
    bits_by_cell,
    of_first_tokens,
    of_later_tokens,
    siblings_of,
    with_own_scores,
)
from experiments.shown import Bars, Drawing, Lines, only, spans, tables_of, told
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, all_datasets, holm_corrected, paired_row
from ia_mech.likelihood.carried import CANDIDATES, CEILING, QueryBits
from ia_mech.results import SHARE as AS_SHARE
from ia_mech.results import Table, cell_of
from ia_mech.stats import Estimate, cluster_mean, model_confidence_set

# What comes after the response is computed anew.
ALL_LAYERS = "response, computed on"
FULL_LAYERS = "response, layers of full attention, computed on"
STATE_ON, RESPONSE_AND_STATE_ON = f"{STATE}, computed on", f"{RESPONSE_AND_STATE}, computed on"
WINDOW, WITHOUT_WINDOW = "response, layers", "response, other layers"
HEADER_FIRST, HEADER_LAST = "header_0", "header_last"
WRITTEN = tuple(
    WRITTEN_AFTER + site for site in (OWN, RESPONSE, HEADER, RESPONSE_AND_HEADER, QUERY)
)
ALL_WRITTEN = (*WRITTEN, WRITTEN_AFTER + STATE, WRITTEN_AFTER + ALL_THREE)
MAPS = WINDOWS, STATES, WRITING, BANDS, BLOCKS = "windows", "states", "written", "bands", "blocks"
NO_MAPS = "none"
USUAL_MAPS = (WINDOWS, STATES, WRITING, BANDS)
# Bands of the response by how many of its tokens follow, at least and at most.
BAND_SITES = {
    "response, last token": Band(0, 1),
    "response, tokens 2–8 from its end": Band(1, 8),
    "response, tokens 9–32 from its end": Band(8, 32),
    "response, tokens 33–128 from its end": Band(32, 128),
    "response, tokens before these": Band(128, None),
}
# The response is computed anew with attention within blocks of so many tokens; None: one block.
BLOCK_SITES = {
    "response, blocks of 1": Mask(1),
    "response, blocks of 4": Mask(4),
    "response, blocks of 16": Mask(16),
    "response, one block": Mask(None),
}
# The control of blocks: each token sees as many others, from anywhere in the response.
RANDOM_SITES = {f"response, {n} random tokens": Mask(n, random=True) for n in (4, 16)}
PART_SITES = (*BAND_SITES, *BLOCK_SITES, *RANDOM_SITES)  # of the response's tokens

MAY_BE_MOST = "p that no other window carries more"
# Paired by query. The query's tokens are the same in all candidates: a control.
LESS_GREEDY, LESS_WHOLE = "bits, minus greedy", "bits, minus the whole response's"
LESS_RANDOM = "bits, minus those of as many random tokens"
LESS_QUERY, HITS_LESS_QUERY = "bits, minus the query's", "own is likeliest, minus the query's"
LEFT_OUT = "bits lost without"  # a site, which may hold what another has
STRETCH = 1.1  # of spreads: bits are skewed, which 60 queries don't level (benchmarks/coverage.md)
BITS, HITS, SHARE = "bits", "own is likeliest", "share of expressed"
ABOVE_TENTH = "bits above a tenth of expressed"
EQUIVALENT = 0.1  # a share of what is expressed that counts as nothing
LESS_FIRST = "bits, minus the first token's"
WAYS = {
    RESPONSE: "the response's keys and values",
    HEADER: "the header's",
    STATE: "the recurrent layers' states",
}
FIRST_BITS, LATER_BITS = "bits of first tokens", "bits of later tokens"


def window_size(layers: int) -> int:
    """Layers of a window, and between layers whose states are put in: an eighth of all."""
    return -(-layers // 8)


def layer_windows(layers: int) -> list[range]:
    """The windows of layers, from 1, that maps show."""
    step = window_size(layers)
    return [range(at, min(at + step, layers + 1)) for at in range(1, layers + 1, step)]


def cells_of(maps: Collection[str], layers: int, recurrent: bool = False) -> list[Cell]:
    """What is changed: whole sites, and the cells of maps."""
    sites = WHOLE_SITES if recurrent else SITES
    found = [Cell(site, Splice(site), every=True) for site in sites]
    if {WINDOWS, BANDS, BLOCKS} & {*maps}:
        found += [Cell(ALL_LAYERS, Anew()), Cell(FULL_LAYERS, Layers(1, layers + 1))]
        if recurrent:
            found.append(Cell(STATE_ON, Anew(response=False, state=True)))
            found.append(Cell(RESPONSE_AND_STATE_ON, Anew(state=True)))
    for window in layer_windows(layers) if WINDOWS in maps else ():
        span = window.start, window.stop
        found.append(Cell(WINDOW, Layers(*span), window[0]))
        found.append(Cell(WITHOUT_WINDOW, Layers(*span, others=True), window[0]))
    for token in (HEADER_FIRST, HEADER_LAST) if STATES in maps else ():
        step = window_size(layers)
        found += [Cell(token, Replaced((token,), at), at) for at in range(step, layers, step)]
    parts = (BAND_SITES if BANDS in maps else {}) | (
        BLOCK_SITES | RANDOM_SITES if BLOCKS in maps else {}
    )
    found += [Cell(site, change) for site, change in parts.items()]
    for site in (ALL_WRITTEN if recurrent else WRITTEN) if WRITING in maps else ():
        found.append(Cell(site, Splice(site.removeprefix(WRITTEN_AFTER)), written=True))
    return found


# -- estimate --------------------------------------------------------------------------------------


def estimated(
    options: dict[str, Any],
    quantity: str,
    found: QueryBits,
    base: QueryBits | None = None,
    **names: Any,
) -> Iterator[TidyEstimate]:
    """Mean bits of queries, or hits (tested against the third that chance gives); minus those of
    another arm or site, if there is one."""
    hits = quantity.startswith(HITS)
    group = Group(np.array(found.queries), options, {"dataset": ALL} | names)
    values, *less = (one.hits if hits else one.bits for one in (found, base) if one)
    if base is not None:
        yield paired_row(group, quantity, values, found.queries, less[0], base.queries)
    elif hits:
        # Rounded: sums of thirds that miss 0 by 1e-17 would count as signs.
        more = (values - 1 / CANDIDATES).round(9)
        test = paired_row(group, quantity, more, found.queries, 0 * more, found.queries)
        mean = group.mean(quantity, values, least=0, most=1)
        yield replace(mean, p=test.p, test=test.test)
    else:
        yield group.mean(quantity, values, most=CEILING)


def share_of(
    options: dict[str, Any], found: QueryBits, expressed: QueryBits, **names: Any
) -> Iterator[TidyEstimate]:
    """What a site carries as a share of what is expressed in the same queries, and by how many bits
    it carries more than :data:`EQUIVALENT` of that."""
    group = Group(np.array(found.queries), options, {"dataset": ALL} | names)
    expressed = expressed.only(found.queries)
    if cluster_mean(expressed.bits, expressed.queries).low > 0:
        share = ratio(found.bits, expressed.bits, found.queries, options)
        yield group.row(SHARE, share, len(found.bits))
    yield group.mean(ABOVE_TENTH, found.bits - EQUIVALENT * expressed.bits)


def estimates(
    each: BitsByCell, options: dict[str, Any], of_all: Collection[str] | None = WHOLE_SITES
) -> list[TidyEstimate]:
    """What cells carry, and how that differs from what they are held against. Terms ``of_all``
    turns (None: all terms) have a share of what these express."""
    row, found, tested = partial(estimated, options), list[TidyEstimate](), list[TidyEstimate]()
    greedy = each.get(0.0, {}).get((OWN, -1))
    for t, cells in each.items():
        sites = {term: bits for (term, layer), bits in cells.items() if layer < 0}
        first = next((bits for (term, _), bits in cells.items() if term == FIRST), None)
        # What windows are parts of: layers without a shared prefix are in none.
        response, names = sites.get(FULL_LAYERS, sites.get(ALL_LAYERS)), dict[str, Any]()
        for (term, layer), bits in cells.items():
            names = {"temperature": np.nan if t is None else t, "term": term}
            names |= {"layer": layer} if layer >= 0 else {}
            whole, against = term in WHOLE_SITES, dict[str, QueryBits | None]()
            found += [*row(BITS, bits, **names), *row(HITS, bits, **names)]
            if (of_all is None or term in of_all) and OWN in sites and term != OWN:
                found += share_of(options, bits, sites[OWN], **names)
            if whole and term != QUERY:
                against = dict.fromkeys((LESS_QUERY, HITS_LESS_QUERY), sites.get(QUERY))
            if term == OWN and t != 0:
                against = {LESS_GREEDY: greedy}
            if term in (WITHOUT_WINDOW, *PART_SITES):
                against = {LESS_WHOLE: response and response.only(bits.queries)}
            if term in BLOCK_SITES:
                random = f"response, {BLOCK_SITES[term].width} random tokens"
                against[LESS_RANDOM] = sites.get(random)
            if term not in (OWN, FIRST):
                against[LESS_FIRST] = first
            for quantity, base in against.items():
                tested += row(quantity, bits, base, **names) if base else ()
        found += lost_without(sites, options, **names | {"layer": None})
        windows = {layer: bits for (term, layer), bits in cells.items() if term == WINDOW}
        found += window_set(windows, options, temperature=t)

    def family(row: TidyEstimate) -> tuple[str, str]:
        term = row.names["term"]
        together = term in PART_SITES or row.quantity == LESS_FIRST
        return row.quantity, "parts" if together else term

    return found + holm_corrected(tested, family)


def lost_without(
    sites: dict[str, QueryBits], options: dict[str, Any], **names: Any
) -> Iterator[TidyEstimate]:
    """What is lost of everything that is spliced if only one site is the recipient's."""
    all_of = ALL_THREE if ALL_THREE in sites else OWN
    together = DONATED[all_of] - ({0, 4} if all_of == OWN else set())
    whole = [site for site in sites if site in DONATED]
    for site, rest in permutations(whole, 2):
        if DONATED[rest] == together - DONATED[site] and DONATED[site] <= together:
            lost = replace(sites[all_of], bits=sites[all_of].bits - sites[rest].bits)
            yield from estimated(options, LEFT_OUT, lost, **names | {"term": site})


def token_estimates(rows: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """What first and later tokens express, and what sites carry of it."""
    rows = rows[rows["site"].isin([OWN, *WHOLE_SITES]) & (rows["layer"] < 0)]
    parts = {FIRST_BITS: of_first_tokens(rows), LATER_BITS: of_later_tokens(rows)}
    for quantity, part in parts.items():
        for t, cells in bits_by_cell(part, options["seed"]).items():
            if (OWN, -1) not in cells or not cells[OWN, -1].bits.any():
                continue  # nothing could be fitted on other queries: no measurement
            for (site, _), bits in cells.items():
                at = np.nan if t is None else t
                yield from estimated(options, quantity, bits, term=site, temperature=at)


def window_set(
    cells: dict[int, QueryBits], options: dict[str, Any], **names: Any
) -> Iterator[TidyEstimate]:
    """Whether each window may be the one that carries most: p values of their confidence set.

    There are none where no window is shown to carry anything (Bonferroni).
    """
    level = 1 - (1 - options["level"]) / max(len(cells), 1)
    means = [cluster_mean(one.bits, one.queries, level=level) for one in cells.values()]
    if len(cells) < 2 or not any(mean.low > 0 for mean in means):
        return
    losses, how = -np.stack([one.bits for one in cells.values()]), "model confidence set"
    drawn = {name: options[name] for name in ("resamples", "seed")}
    each = model_confidence_set(losses, stretch=STRETCH, **drawn)
    names |= {"dataset": ALL, "term": WINDOW}
    for layer, p in zip(cells, each.tolist(), strict=True):
        count = losses.shape[1]
        estimate = Estimate(p, np.nan, np.nan, count, how)
        yield TidyEstimate(MAY_BE_MOST, names | {"layer": layer}, count, estimate)


# -- the experiment --------------------------------------------------------------------------------


class Bits(Grid):
    """How many bits turns tell about the candidate that they followed: of what they express, and by
    what is changed."""

    siblings, judged = True, False
    flags = ("recipients", "maps")

    def units(self) -> Iterator[SiblingContexts]:
        queries = self.queries  # refuses runs without siblings, before the model is looked for
        # What turns express is what their whole own context tells.
        cells, few, used = [Cell(OWN, Whole(), every=True), *self.cells()], 0, 0
        temperatures = self.runs[0].settings["temperatures"]
        for query in queries:
            how = cells, self.args.recipients, temperatures, self.args.seed
            unit = siblings_of(query, self.chat, *how)
            few, used = few + (unit is None), used + (unit is not None)
            if unit is not None:
                yield unit
        if 0 < used < LEAST_QUERIES:
            raise UserError(
                f"{used} queries have {RESPONSES} different responses with a turn after each: what "
                f"is fitted on some queries is scored on others, which takes {LEAST_QUERIES}",
                "sample more queries",
            )
        if few:
            self.notes.append(
                f"{few} of {len(queries)} queries lack {RESPONSES} different responses "
                f"with a turn after each, and are left out (sample --responses {RESPONSES})."
            )

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        scored = with_own_scores(rows)
        self.each = bits_by_cell(scored, self.args.seed)
        found = estimates(self.each, self.options, self.whole)
        return [*found, *token_estimates(scored, self.options)]

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """The scores; and by query the bits and hits of whole sites, without a temperature those of
        all sampled turns."""
        found = [pd.DataFrame()]
        for t, cells in self.each.items():
            for (term, layer), one in cells.items():
                if term in (OWN, *WHOLE_SITES) and layer < 0:
                    table = {"source": one.queries, "bits": one.bits, "hits": one.hits}
                    table |= {"term": term, "temperature": np.nan if t is None else t}
                    found.append(pd.DataFrame(table))
        return {"rows": rows, "queries": pd.concat(found, ignore_index=True)}

    def tables(self, found: pd.DataFrame) -> list[Table]:
        found = without_repeats(found)
        columns: dict[str, tuple[str, int | str]] = {
            BITS: ("bits", 2),
            HITS: ("own likeliest (chance 0.33)", 2),
            SHARE: ("enough for (share)", AS_SHARE),
        }
        whole = found["term"].isin([OWN, *(self.whole or found["term"])])
        made = tables_of(
            f"activation patching: bits about which of {CANDIDATES} responses a turn followed (at "
            f"most {CEILING:.2f})",
            found[whole],
            columns
            | {LESS_FIRST: ("beyond the first token", "+.2f")}
            | {LEFT_OUT: ("lost without (bits)", 2)}
            | {FIRST_BITS: ("first tokens", 2), LATER_BITS: ("later ones", 2)},
            index=(
                "temperature",
                "term",
                *["layer"] * bool(found.loc[whole, "layer"].notna().any()),
            ),
            rows="queries",
            legend=(
                f"{OWN}: what turns express; other lines: what this part of the context, or this "
                "state, is enough for. The query has the same tokens in all contexts. Enough for "
                "(sufficiency): these bits as a share of what is expressed. Beyond the first "
                "token: minus the bits of the state that alone decides the first token (p: "
                "Holm-corrected over lines). Lost without (necessity): bits that are lost if "
                "only this part is another response's. First tokens: the bits of each turn's "
                "first token; later ones: of its other tokens. A number is left out where a fit "
                "on other queries finds nothing to read."
            ),
        )
        made += tables_of(
            "differences, paired by query",
            found,
            {
                LESS_QUERY: ("bits minus the query's", "+.2f"),
                HITS_LESS_QUERY: ("own likeliest, minus the query's", "+.2f"),
                LESS_GREEDY: ("minus greedy", "+.2f"),
                LESS_WHOLE: ("bits minus the whole response's", "+.2f"),
                LESS_RANDOM: ("bits minus as many random tokens'", "+.2f"),
            },
            index=("temperature", "term", "layer"),
            rows="queries",
            legend=(
                "p: Holm-corrected over the lines of a term, and over parts of the response. The "
                f"query has the same tokens in all contexts. {WITHOUT_WINDOW}: how much is lost "
                "where a window is the recipient's."
            ),
        )
        return made + tables_of(
            "carried by cells of maps",
            found[~whole],
            {BITS: columns[BITS], HITS: columns[HITS], MAY_BE_MOST: ("p: none has more", 3)},
            index=("temperature", "term", "layer"),
            rows="queries",
            legend=(
                "What is named is the candidate's, everything else the recipient's. What follows "
                "the response is computed anew, but for written turns, which the model writes. "
                "Last, 2–8, …: so many tokens of the candidate's response replace as many of the "
                "recipient's. Blocks: each token of the candidate's response saw only those before "
                "it in its block, and the first few. n random tokens: it saw itself and n − 1 "
                "others from all before it."
            ),
            full=True,
        )

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        return drawings(without_repeats(found), self.runs[0].model["name"])

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        lookup, model = Lookup(found), self.runs[0].model
        windows = strongest_windows(found, model["layers"], self.args.level)
        said = [
            f"Sampled turns of {model['name']} tell {lookup(BITS, OWN)} of {CEILING:.2f} bits "
            f"about which of {CANDIDATES} responses they followed, greedy ones "
            f"{lookup(BITS, OWN, 0.0)}.",
            f"{alone}{windows and f'; {windows}'}." if (alone := enough_alone(found)) else "",
        ]
        mapped = found.loc[found["term"].isin([ALL_LAYERS, *WRITTEN]), "temperature"].max()
        parts = {site: f"written: {site}" for site in (RESPONSE, HEADER, RESPONSE_AND_HEADER)}
        if found["term"].isin(parts.values()).any():
            each = [f"{lookup(BITS, of, mapped)} ({site})" for site, of in parts.items()]
            said.append(
                f"Turns that are written after hybrids tell {', '.join(each)} about the candidate."
            )
        if found["term"].isin(BLOCK_SITES).any():
            kept = [f"{lookup(BITS, site, mapped)} ({site.split(', ')[1]})" for site in BLOCK_SITES]
            whole = lookup(BITS, ALL_LAYERS, mapped)
            said.append(
                f"Of its {whole} bits, the response keeps {', '.join(kept)} if each of its tokens "
                "sees only its own block."
            )
        cells = only(found, BITS)
        cells = cells[cells["layer"].notna() & (cells["term"] != FIRST)]
        cells = cells[cells["temperature"] == cells["temperature"].max()]
        if self.whole is None and len(cells):
            shown = [
                f"{row['term']} after layer {row['layer']} {cell_of(row, 2)}"
                for _, row in cells[cells["low"] > 0].iterrows()
            ]
            said.append(
                f"Of {len(cells)} states {len(shown)} are shown to carry some of them"
                f"{': ' * bool(shown)}{'; '.join(shown)}."
            )
        control = (
            "Each number compares a response with two others to the same query, whose states are "
            "put in the same way; a hybrid of everything equals its donor"
        )
        if (query := lookup(BITS, QUERY)) != "–":
            control += (
                "; keys and values of the query, whose tokens are the same in all contexts, are "
                f"enough for {query}"
            )
        if first := told(found, BITS, term=FIRST, temperature=found["temperature"].max()):
            control += f"; the first token alone: {first}"
        return Conclusion(" ".join(filter(None, said)), f"{control}.")


class Locate(Grid):
    name = "locate"
    whole = WHOLE_SITES
    outcomes: ClassVar = {BY_BITS: Bits, BY_FOLLOW_UPS: FollowUps, BY_MASS: MovedBySites}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        of = f"of {BY_BITS}: which of {', '.join(MAPS)}; {NO_MAPS}: whole sites alone"
        how: dict[str, Any] = {"nargs": "+", "choices": (*MAPS, NO_MAPS), "metavar": "MAP"}
        flag(parser, "--maps", str, list(USUAL_MAPS), of, **how)
        super().add_flags(parser)
        donors = f"of {BY_MASS}: responses to {OTHERS[:-1]} queries, or to the same one (siblings)"
        how = {"choices": (OTHERS, SIBLINGS), "metavar": "WHOSE"}
        flag(parser, "--donors", str, OTHERS, donors, **how)

    def cells(self) -> list[Cell]:
        from ia_mech.engine.splice import RECURRENT, layer_kinds

        recurrent = not RECURRENT.isdisjoint(layer_kinds(self.config))
        if self.args.outcome == BY_FOLLOW_UPS:
            return [Cell(site, Splice(site)) for site in (WHOLE_SITES if recurrent else SITES)]
        if self.args.outcome == BY_MASS:
            siblings = self.args.donors == SIBLINGS
            return [Cell(site, Splice(site)) for site in sites_of(recurrent, siblings)]
        if recurrent and BLOCKS in self.args.maps:
            name = self.runs[0].model["name"]
            raise UserError(
                f"--maps {BLOCKS}: {name} has recurrent layers, where a token sees all before it",
                "leave it out",
            )
        return cells_of(self.args.maps, self.runs[0].model["layers"], recurrent)


def without_repeats(found: pd.DataFrame) -> pd.DataFrame:
    """Estimates to be shown: without those of all sampled turns where turns have only one
    temperature above 0, whose estimates are the same."""
    t = found["temperature"]
    return found[t.notna()] if t[t > 0].nunique() == 1 else found


def enough_alone(found: pd.DataFrame) -> str:
    """For how many of the bits of sampled turns each way is enough alone, and how many are lost
    without it."""
    lookup, said = Lookup(found), []
    for site, of in WAYS.items():
        if (bits := lookup(BITS, site)) == "–":
            continue
        little = only(all_datasets(found), ABOVE_TENTH, term=site, temperature=None)
        if len(little) and little["high"].item() < 0:
            likeliest = f"own likeliest {lookup(HITS, site)}, {1 / CANDIDATES:.2f} by chance"
            words = f"{of} move likelihoods little ({bits} bits; {likeliest})"
        else:
            words = f"{of} are enough for {bits} of these bits (share {lookup(SHARE, site)})"
        lost = lookup(LEFT_OUT, site)
        said.append(words + (f", and without them {lost} are lost" if lost != "–" else ""))
    text = "; ".join(said)
    return text[:1].upper() + text[1:]


def strongest_windows(found: pd.DataFrame, layers: int, level: float) -> str:
    """The layers that may carry most, in words; an empty text where none is shown to carry any."""
    every = found[(found["quantity"] == MAY_BE_MOST) & (found["term"] == WINDOW)]
    kept = every[every["value"] > 1 - level]
    if len(kept) == len(every):
        return "its layers can't be told apart" if len(every) else ""
    those = (
        number for one in layer_windows(layers) if one[0] in set(kept["layer"]) for number in one
    )
    return f"the layers that may carry most are {spans(those, ' and ')}"


def drawings(found: pd.DataFrame, model: str) -> dict[str, Drawing]:
    """What is expressed and carried, by site and by layer, from the estimates."""
    bits = only(found, BITS)
    whole = bits[bits["term"].isin([OWN, *WHOLE_SITES]) & bits["layer"].isna()]
    made: dict[str, Drawing] = {}
    if whole["term"].nunique() > 1:
        made["sites"] = Bars(f"{model} · expressed and carried", "bits", whole)
    mapped = bits[bits["layer"].notna() & (bits["term"] != FIRST)]
    if len(mapped := mapped[mapped["temperature"] == mapped["temperature"].max()]):
        own = only(whole, BITS, term=OWN, temperature=mapped["temperature"].iloc[0])
        levels = {"expressed": float(own["value"].iloc[0]), "": 0.0}
        words = f"{model} · carried by layer", "layer (of a window: its first)", "bits", mapped
        made["layers"] = Lines(*words, across="layer", levels=levels)
    if len(written := bits[bits["term"].isin(ALL_WRITTEN)]):
        made["written"] = Bars(f"{model} · turns written after hybrids", "bits", written)
    return made


class Lookup:
    """Estimates as text, by quantity, site and temperature (None: all sampled turns)."""

    def __init__(self, found: pd.DataFrame) -> None:
        self._found = all_datasets(found)

    def __call__(self, quantity: str, term: str, temperature: float | None = None) -> str:
        at = {"term": term, "temperature": temperature}
        return told(self._found, quantity, AS_SHARE if quantity == SHARE else 2, **at) or "–"


main = Locate.main

if __name__ == "__main__":
    sys.exit(main())
