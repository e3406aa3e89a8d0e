"""Where does what a turn tells about its response come from: the header, or the response itself?

While a model writes a turn it attends to keys and values: those of the query, of the response, and
of the tokens after it, the user header among them. Here those of one such place, a site, are taken
from one context and put into another. A query has four responses; one is the recipient, the other
three are candidates. A turn that followed a candidate is scored after each candidate's own context:
that gives the bits that it tells, or expresses. It is scored again after three hybrids, each the
recipient's context with one site of a candidate: that gives the bits that the site carries. The
turn followed none of the hybrids, and they differ in the candidate alone: what splicing damages is
damaged in all three. Maps show states of the header by layer, and windows of three layers of the
response; the windows that carry most are chosen on half of the queries and reported on the other.

Needs: a run with four or more responses per query (sample with --response generate --responses 4).
Cost: about 20,000 tokens a query; 60 queries take an hour or two on two cores (135M); without maps
half of that.

    python -m experiments.locate cache/RUN
    python -m experiments.locate cache/RUN --queries 20 --no-maps
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment, Model, Unit
from experiments.tables import tables_of
from ia_mech.estimates import ALL, TidyEstimate, estimate_of, together
from ia_mech.likelihood.carried import CANDIDATES, CEILING, Told, told
from ia_mech.stats import Estimate, cluster_bootstrap, cluster_mean, paired_difference

if TYPE_CHECKING:
    from experiments.figures import Drawing
    from ia_mech.engine.score import Turn
    from ia_mech.engine.splice import Hybrid
    from ia_mech.engine.state import Prefilled
    from ia_mech.results import Table

TOKENS = 24  # of a turn: nearly all of the bits come before (docs/reaction.md)
STEP = 3  # layers of a window, and between layers whose states are put in
EQUIVALENT = 0.1  # a share of what is expressed that counts as nothing
OWN = "own context"
HEADER, AFTER, RESPONSE, QUERY = SITES = ("header", "after the response", "response", "query")
WINDOW, FIRST, LAST = MAPS = ("response, layers", "header_0", "header_last")
RANKING, REPORTING = "ranking half", "reporting half"
GREEDY, SAMPLED = "greedy", "sampled"  # the latter: of all temperatures above 0 together
SCORES = [f"score_{number}" for number in range(CANDIDATES)]


@dataclass(frozen=True)
class Siblings(Unit):
    """Four responses to a query, and turns after each.

    Attributes:
        contexts: token ids of each, with its open header.
        starts, stops: where the response begins and ends in each.
        header: where the header begins and ends, counted from where the response ends.
        turns: of each, the response that it followed, temperature, sample, and its first tokens.
        recipient: of the maps; -1 for no maps.
        mapped: the temperature of the turns in maps.
        layers: of the model.
    """

    contexts: list[tuple[int, ...]]
    starts: list[int]
    stops: list[int]
    header: tuple[int, int]
    turns: list[tuple[int, float, int, tuple[int, ...]]]
    recipient: int
    mapped: float
    layers: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Recipient and donor of every hybrid."""
        numbers = range(len(self.contexts))
        return [(d, j) for d in numbers for j in numbers if j != d]

    @property
    def windows(self) -> list[range]:
        """The windows of layers, from 1, that maps show."""
        firsts = range(1, self.layers + 1, STEP)
        return [range(first, min(first + STEP, self.layers + 1)) for first in firsts]


# -- measure ---------------------------------------------------------------------------------------


def hybrid(unit: Siblings, site: str, recipient: int, donor: int) -> "Hybrid":
    """The recipient's context with a site of the donor's."""
    from ia_mech.engine.splice import Hybrid, Piece

    edges = {
        which: [
            0,
            unit.starts[which],
            unit.stops[which],
            unit.stops[which] + unit.header[0],
            len(unit.contexts[which]),
        ]
        for which in (recipient, donor)
    }
    taken = {QUERY: {0}, RESPONSE: {1}, AFTER: {2, 3}, HEADER: {3}}[site]
    pieces = []
    for number in range(4):
        which = donor if number in taken else recipient
        start, stop = edges[which][number : number + 2]
        pieces.append(Piece(which, start, stop))
    return Hybrid(recipient, tuple(pieces))


class Measured:
    """What is measured of one query.

    Args:
        model: with the function that counts tokens.
        unit: the query.
    """

    def __init__(self, model: Model, unit: Siblings) -> None:
        self._model, self._unit = model, unit
        self._rows: list[dict[str, Any]] = []

    def table(self) -> pd.DataFrame:
        """A row per site, recipient and turn, with the scores after the three candidates."""
        from ia_mech.engine.capture import find_blocks
        from ia_mech.engine.splice import aligned, spliced
        from ia_mech.engine.state import Prefix

        unit, model = self._unit, self._model.subject.model
        first, last = unit.header
        prefixes = [
            Prefix(ids, (stop + first, stop + last - 1))
            for ids, stop in zip(unit.contexts, unit.stops, strict=True)
        ]
        whole = aligned(model, prefixes, find_blocks(model))
        self._own(whole)
        for site in SITES:
            made = [hybrid(unit, site, *pair) for pair in unit.pairs]
            self._whole(site, spliced(whole, made))
        if unit.recipient >= 0:
            self._maps(whole)
        return pd.DataFrame(self._rows)

    def _own(self, whole: "Prefilled") -> None:
        from ia_mech.engine.score import Turn

        numbers = range(len(self._unit.contexts))
        wanted = [Turn(j, ids) for *_, ids in self._unit.turns for j in numbers]
        scores = self._scored([whole], wanted).reshape(-1, len(numbers))
        for turn, after in zip(self._unit.turns, scores, strict=True):
            for d in numbers:
                if d != turn[0]:
                    self._add(OWN, d, turn, np.delete(after, d))

    def _whole(self, site: str, group: "Prefilled") -> None:
        from ia_mech.engine.score import Turn

        pairs = self._unit.pairs
        wanted, rows = [], []
        for d in range(len(self._unit.contexts)):
            for turn in self._unit.turns:
                if turn[0] != d:
                    rows.append((d, turn))
                    wanted += [Turn(at, turn[3]) for at, pair in enumerate(pairs) if pair[0] == d]
        scores = self._scored([group], wanted).reshape(-1, CANDIDATES)
        for (d, turn), three in zip(rows, scores, strict=True):
            self._add(site, d, turn, three)

    def _maps(self, whole: "Prefilled") -> None:
        """States of the header, and windows of the response, with what follows computed anew."""
        from ia_mech.engine.intervene import Replace
        from ia_mech.engine.score import Turn
        from ia_mech.engine.shared import Borrowed, Engine, held
        from ia_mech.engine.splice import Hybrid, Piece, aligned, spliced
        from ia_mech.engine.state import Prefix, is_full

        unit, model = self._unit, self._model.subject.model
        d, (first, last) = unit.recipient, unit.header
        cut = aligned(
            model,
            [Prefix(ids[:stop]) for ids, stop in zip(unit.contexts, unit.stops, strict=True)],
        )
        donors = [j for j in range(len(unit.contexts)) if j != d]
        pieces = [
            (Piece(d, 0, unit.starts[d]), Piece(j, unit.starts[j], unit.stops[j])) for j in donors
        ]
        groups = [cut, spliced(cut, [Hybrid(d, some) for some in pieces])]
        after = unit.contexts[d][unit.stops[d] :]
        shared = Engine.possible(model).shared if self._model.share else ()
        layer = next((one for one in cut.state.cache.layers if is_full(one)), None)
        heads = 0 if layer is None else held(layer)[0].shape[1]
        states = whole.residuals
        assert states is not None
        cells: list[tuple[str, int, Callable[[int, int, tuple[int, ...]], Turn]]] = []
        for window in unit.windows:
            taken = {number: range(heads) for number in window if number in shared}
            if taken:

                def borrowing(at: int, j: int, ids: tuple[int, ...], taken=taken) -> Turn:
                    return Turn(d, ids, borrowed=Borrowed(len(unit.contexts) + at, taken))

                cells.append((WINDOW, window[0], borrowing))
        for which, (name, position) in enumerate(((FIRST, first), (LAST, last - 1))):
            for number in range(STEP, unit.layers, STEP):

                def put(at: int, j: int, ids: tuple[int, ...], which=which, position=position,
                        number=number) -> Turn:  # fmt: skip
                    state = states[j, number, which : which + 1]
                    return Turn(d, ids, interventions=(Replace(number, (position,), state),))

                cells.append((name, number, put))
        mapped = [turn for turn in unit.turns if turn[1:3] == (unit.mapped, 0) and turn[0] != d]
        wanted = [
            make(at, j, (*after, *turn[3]))
            for _, _, make in cells
            for turn in mapped
            for at, j in enumerate(donors)
        ]
        scores = self._scored(groups, wanted, len(after)).reshape(len(cells), -1, CANDIDATES)
        for (site, number, _), each in zip(cells, scores, strict=True):
            for turn, three in zip(mapped, each, strict=True):
                self._add(site, d, turn, three, number)

    def _scored(
        self, groups: "list[Prefilled]", turns: "list[Turn]", before: int = 0
    ) -> np.ndarray:
        """``[turns]`` log-likelihoods in nats, without the tokens before the turn and its first."""
        from ia_mech.engine.score import score

        found = score(
            self._model.subject.model,
            groups,
            turns,
            share=self._model.share,
            on_tokens=self._model.on_tokens,
        )
        return np.array([one.logprobs_raw[before + 1 :].sum(dtype=float) for one in found])

    def _add(self, site: str, recipient: int, turn: tuple, three: np.ndarray, layer=-1) -> None:
        followed, temperature, sample, _ = turn
        own = followed - (followed > recipient)
        row = {"site": site, "layer": layer, "recipient": recipient, "followed": followed}
        row |= {"temperature": temperature, "sample": sample, "own": own}
        self._rows.append(row | dict(zip(SCORES, three.tolist(), strict=True)))


# -- estimate --------------------------------------------------------------------------------------


def told_of(rows: pd.DataFrame, seed: int) -> Told | None:
    """What rows of one site tell; None of fewer than two queries."""
    whole = rows.groupby("source")["own"].transform("nunique") == CANDIDATES
    rows = rows[whole]
    if rows["source"].nunique() < 2:
        return None
    return told(rows[SCORES].to_numpy(), rows["own"].to_numpy(), rows["source"], seed=seed)


@dataclass(frozen=True)
class Maker:
    """Estimates with their names; ``options`` are ``level``, ``resamples`` and ``seed``."""

    options: dict[str, Any]

    def mean(self, quantity: str, found: Told, **names: Any) -> TidyEstimate:
        estimate = cluster_mean(found.bits, found.queries, level=self.options["level"])
        return self._row(quantity, estimate.within(-np.inf, CEILING), found, names)

    def hits(self, found: Told, **names: Any) -> TidyEstimate:
        """How often the own candidate is the likeliest, against the third that chance gives."""
        more = (found.hits - 1 / CANDIDATES).round(9)  # thirds that were added up are no signs
        options = {name: self.options[name] for name in ("level", "seed")}
        pair = paired_difference(more, found.queries, np.zeros(len(more)), found.queries, **options)
        level = self.options["level"]
        estimate = cluster_mean(found.hits, found.queries, level=level).within(0, 1)
        names = {"dataset": ALL} | names
        return TidyEstimate("own is likeliest", names, len(found.hits), estimate, pair.p, pair.test)

    def share(self, found: Told, expressed: Told, **names: Any) -> Iterator[TidyEstimate]:
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

    def difference(self, quantity: str, found: Told, base: Told, **names: Any) -> TidyEstimate:
        """Bits less another arm's, of the same queries."""
        options = {name: self.options[name] for name in ("level", "seed")}
        pair = paired_difference(found.bits, found.queries, base.bits, base.queries, **options)
        names = {"dataset": ALL} | names
        return TidyEstimate(quantity, names, len(found.bits), pair.difference, pair.p, pair.test)

    def _row(self, quantity: str, estimate: Estimate, found: Told, names: dict) -> TidyEstimate:
        return TidyEstimate(quantity, {"dataset": ALL} | names, len(found.bits), estimate)


def halves(queries: Sequence[str], seed: int) -> dict[str, str]:
    """Each query's half, drawn by seed."""
    names = sorted(set(queries))
    order = np.random.default_rng([seed, 2]).permutation(len(names))
    return {names[at]: (RANKING, REPORTING)[place % 2] for place, at in enumerate(order)}


def estimates(rows: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate."""
    maker, seed = Maker(options), options["seed"]
    arms = {t: rows["temperature"] == t for t in sorted(set(rows["temperature"]))}
    sampled = rows["temperature"] > 0
    expressed: dict[Any, Told] = {}
    for arm, here in [*arms.items(), (None, sampled)]:
        names = {"temperature": np.nan if arm is None else arm}
        for site in (OWN, *SITES):
            found = told_of(rows[here & (rows["site"] == site)], seed)
            if found is None:
                continue
            yield maker.mean("bits", found, of=site, **names)
            yield maker.hits(found, of=site, **names)
            if site == OWN:
                expressed[arm] = found
            elif arm in expressed:
                yield from maker.share(found, expressed[arm], of=site, **names)
        if arm is None and 0.0 in expressed and arm in expressed:
            yield maker.difference(
                "bits, less greedy's", expressed[arm], expressed[0.0], of=OWN, **names
            )
    mapped = rows[rows["site"].isin(MAPS)]
    for (site, layer), cell in mapped.groupby(["site", "layer"], sort=False):
        found = told_of(cell, seed)
        if found is not None:
            names = {"of": site, "layer": layer, "temperature": cell["temperature"].iloc[0]}
            yield maker.mean("bits", found, **names)
            yield maker.hits(found, **names)
    yield from strongest(mapped[mapped["site"] == WINDOW], expressed, maker)


def by_query(rows: pd.DataFrame, seed: int) -> pd.DataFrame:
    """What whole sites tell of each query: ``of``, ``temperature`` (missing: all sampled turns),
    ``source``, ``bits`` and ``hits``."""
    found = []
    for t in [*sorted(set(rows["temperature"])), np.nan]:
        here = rows["temperature"] > 0 if np.isnan(t) else rows["temperature"] == t
        for site in (OWN, *SITES):
            one = told_of(rows[here & (rows["site"] == site)], seed)
            if one is not None:
                table = {"source": one.queries, "bits": one.bits, "hits": one.hits}
                found.append(pd.DataFrame(table).assign(of=site, temperature=t))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def strongest(
    windows: pd.DataFrame, expressed: Mapping[Any, Told], maker: Maker
) -> Iterator[TidyEstimate]:
    """The two windows that carry most in one half of the queries, as the other half has them."""
    of = halves(list(windows["source"]), maker.options["seed"])
    half = windows["source"].map(of)
    ranked = {}
    for layer, cell in windows[half == RANKING].groupby("layer"):
        found = told_of(cell, maker.options["seed"])
        if found is not None:
            ranked[layer] = found.bits.mean()
    for layer in sorted(sorted(ranked, key=lambda one: -ranked[one])[:2]):
        cell = windows[(half == REPORTING) & (windows["layer"] == layer)]
        found = told_of(cell, maker.options["seed"])
        if found is not None:
            temperature = cell["temperature"].iloc[0]
            names = {"of": WINDOW, "layer": layer, "temperature": temperature}
            yield maker.mean("bits, chosen on other queries", found, **names)
            yield from maker.share(found, expressed[temperature], **names)


# -- the experiment --------------------------------------------------------------------------------


class Locate(Experiment):
    """See the module."""

    name = "locate"
    siblings = True
    queries_used = 60
    columns: ClassVar[Mapping[str, str]] = {**Experiment.columns, "layer": "Int64"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--no-maps", action="store_true", help="whole sites alone: a third of the time"
        )

    def units(self) -> Iterator[Siblings]:
        few = 0
        temperatures = [t for t in self.runs[0].settings["temperatures"] if t > 0]
        for query in self.queries:
            texts = query.responses
            distinct = [k for k, text in enumerate(texts) if texts.index(text) == k]
            chosen = distinct[: CANDIDATES + 1]
            placed = [self._placed(query.messages, texts[k]) for k in chosen]
            whole = len(chosen) == CANDIDATES + 1 and all(each is not None for each in placed)
            if not whole or not set(chosen) <= set(query.turns["followed"]):
                few += 1
                continue
            turns = [
                (chosen.index(followed), float(t), int(sample), tuple(ids[:TOKENS].tolist()))
                for followed, t, sample, ids in query.turns[
                    ["followed", "temperature", "sample", "token_ids"]
                ].itertuples(index=False)
                if followed in chosen and sample == 0
            ]
            contexts = [query.token_ids[k] for k in chosen]
            starts, stops, headers = (list(each) for each in zip(*placed, strict=True))
            recipient = -1 if self.args.no_maps else self._recipient(query.source)
            layers = self.runs[0].model["layers"]
            whole_sites = len(turns) * CANDIDATES * (CANDIDATES * len(SITES) + CANDIDATES + 1)
            maps = 0 if recipient < 0 else CANDIDATES**2 * (layers // STEP) * 3
            tokens = whole_sites * TOKENS + maps * (TOKENS + headers[0][1])
            yield Siblings(
                query.source, query.dataset, tokens, contexts, starts, stops, headers[0], turns,
                recipient, min(temperatures, default=0.0), layers,
            )  # fmt: skip
        if few:
            self.notes.append(
                f"{few} of {len(self.queries)} queries lack {CANDIDATES + 1} different responses "
                "with a turn after each, and are left out."
            )

    def _placed(self, messages: list[dict], response: str) -> tuple | None:
        """Where the response begins and ends, and the header counted from there; None of an empty
        response."""
        found = self.chat.context([*messages, {"role": "assistant", "content": response}])
        first, last = found.positions["header_0"], found.positions["header_last"]
        if not found.response or first is None or last is None:
            return None
        stop = found.response.stop
        return found.response.start, stop, (first - stop, last + 1 - stop)

    def _recipient(self, source: str) -> int:
        from ia_mech.engine.sampling import stream_key

        rng = np.random.default_rng(list(stream_key(self.args.seed, source, 0)))
        return int(rng.integers(CANDIDATES + 1))

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        return Measured(model, unit).table()

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        return estimates(rows, self.options)

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"rows": rows, "queries": by_query(rows, self.args.seed)}

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        columns = {
            "bits": ("bits", 2),
            "own is likeliest": ("own likeliest (chance 0.33)", 2),
            "share of expressed": ("share", 2),
        }
        whole = found[found["of"].isin([OWN, *SITES])]
        title = (
            f"bits about which of {CANDIDATES} responses a turn followed (at most {CEILING:.2f})"
        )
        made = tables_of(
            title,
            whole,
            columns,
            index=("temperature", "of"),
            rows="queries",
            legend=(
                f"{OWN}: expressed. Sites: carried by keys and values of the header, of all tokens "
                "after the response, of the response; the query's are the same tokens in all, so "
                "that they show what differing lengths alone do. share: of what is expressed."
            ),
        )
        for site in MAPS:
            mine = found[(found["of"] == site) & (found["quantity"].isin(list(columns)))]
            mine = mine[mine["quantity"] != "share of expressed"]
            made += tables_of(
                f"carried by {site}", mine, columns, index=("of", "layer"), rows="queries",
                full=True,
            )  # fmt: skip
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        return drawings(found, self.runs[0].model["name"])

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        of = Lookup(found)
        name = self.runs[0].model["name"]
        sentence = (
            f"{name}'s sampled turns tell {of('bits', OWN)} of {CEILING:.2f} bits about which of "
            f"{CANDIDATES} responses they followed, greedy ones {of('bits', OWN, 0.0)}"
        )
        for site in (RESPONSE, HEADER):
            share = of("share of expressed", site)
            sentence += f"; {of('bits', site)} ({share}) through the keys and values of the {site}"
        chosen = found[found["quantity"] == "bits, chosen on other queries"]
        if len(chosen):
            windows = [
                f"{row.layer}–{min(row.layer + STEP - 1, self.runs[0].model['layers'])} "
                f"({estimate_of(row).text()})"
                for row in chosen.itertuples()
            ]
            sentence += f", of the response's layers most in {' and '.join(windows)}"
        control = (
            "Each number is held against two siblings whose states are put in alike; keys and "
            f"values of the query, the same tokens in all siblings, carry {of('bits', QUERY)}."
        )
        return Conclusion(f"{sentence}.", control)


def drawings(found: pd.DataFrame, model: str) -> "dict[str, Drawing]":
    """What is expressed and carried, by site and by layer, from the estimates."""
    from experiments.figures import Bars, Lines

    bits = found[found["quantity"] == "bits"]
    whole = bits[bits["of"].isin([OWN, *SITES]) & bits["layer"].isna()]
    names = [GREEDY if t == 0 else SAMPLED if np.isnan(t) else f"T = {t:g}"
             for t in whole["temperature"]]  # fmt: skip
    made: dict[str, Drawing] = {
        "sites": Bars(
            f"{model} · expressed and carried", "bits", whole.assign(turns=names), by="turns"
        )
    }
    mapped = bits[bits["of"].isin(MAPS)]
    if len(mapped):
        own = whole[(whole["of"] == OWN) & whole["temperature"].eq(mapped["temperature"].iloc[0])]
        levels = {"expressed": float(own["value"].iloc[0]), "": 0.0}
        across = "layer (of a window: its first)"
        title = f"{model} · carried by layer"
        made["layers"] = Lines(title, across, "bits", mapped, across="layer", levels=levels)
    return made


class Lookup:
    """Estimates as text, by quantity, site and temperature (None: all sampled turns)."""

    def __init__(self, found: pd.DataFrame) -> None:
        self._found = together(found)

    def __call__(self, quantity: str, of: str, temperature: float | None = None) -> str:
        rows = self._found
        t = (
            rows["temperature"].isna()
            if temperature is None
            else rows["temperature"].eq(temperature)
        )
        mine = rows[(rows["quantity"] == quantity) & (rows["of"] == of) & t]
        return estimate_of(next(mine.itertuples())).text() if len(mine) else "–"


main = Locate.main

if __name__ == "__main__":
    sys.exit(main())
