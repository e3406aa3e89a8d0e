"""Turns scored after hybrids: contexts in which one site is a sibling's and the rest their own.

A site is a place whose states a turn may read. A query has four responses; one is the *recipient*,
the other three are *candidates*. A turn that followed a candidate is scored after each candidate's
own context, and after three hybrids, each the recipient's context with one site of a candidate's.
``experiments.locate`` says what follows from the scores.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from experiments.experiment import Experiment, Model, Unit
from ia_mech.likelihood.carried import CANDIDATES

if TYPE_CHECKING:
    from ia_mech.engine.score import Turn
    from ia_mech.engine.splice import Hybrid
    from ia_mech.engine.state import Prefilled

TOKENS = 24  # of a turn: nearly all of the bits come before (docs/reaction.md)
SIBLINGS = CANDIDATES + 1
OWN = "own context"
HEADER, AFTER, RESPONSE, QUERY = SITES = ("header", "after the response", "response", "query")
TOTAL = "response, computed on"  # what comes after the response is computed anew
WINDOW, OTHERS, HEAD = ("response, layers", "response, other layers", "response, layers, head")
FIRST, LAST = ("header_0", "header_last")
BOTH = "response and header"
WRITTEN = tuple(f"written: {site}" for site in (OWN, RESPONSE, HEADER, BOTH, QUERY))
WINDOWS, HEADS, STATES, WRITING = MAPS = ("windows", "heads", "states", "written")
SCORES = [f"score_{number}" for number in range(CANDIDATES)]
RECIPIENT = "score_recipient"
# Which pieces of a context are a candidate's: 0 the query, 1 the response, 2 what stands between
# it and the header, 3 the header.
TAKEN = {
    QUERY: {0},
    RESPONSE: {1},
    AFTER: {2, 3},
    HEADER: {3},
    BOTH: {1, 3},
    OWN: {0, 1, 2, 3},
}


@dataclass(frozen=True)
class Siblings(Unit):
    """Four responses to a query, and turns after each.

    Attributes:
        contexts: token ids of each, with its open header.
        starts, stops: where the response begins and ends in each.
        header: where the header begins and ends, counted from where the response ends.
        context_ids: the name of each.
        turns: of each, the response that it followed, temperature, sample, and its first tokens.
        recipients: which responses are; maps have the first one alone.
        maps: which of :data:`MAPS` are measured.
        mapped: the temperature of the turns in maps.
        layers: of the model.
        seed: of the noise of turns that are written after hybrids.
    """

    contexts: list[tuple[int, ...]]
    starts: list[int]
    stops: list[int]
    header: tuple[int, int]
    context_ids: list[str]
    turns: list[tuple[int, float, int, tuple[int, ...]]]
    recipients: list[int]
    maps: list[str]
    mapped: float
    layers: int
    seed: int = 0

    @property
    def after(self) -> tuple[int, ...]:
        """The tokens after the response, the same in all contexts."""
        return self.contexts[0][self.stops[0] :]


def step_of(layers: int) -> int:
    """Layers of a window, and between layers whose states are put in: an eighth of all."""
    return -(-layers // 8)


def windows_of(layers: int) -> list[range]:
    """The windows of layers, from 1, that maps show."""
    step = step_of(layers)
    return [range(at, min(at + step, layers + 1)) for at in range(1, layers + 1, step)]


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
    pieces = []
    for number in range(4):
        which = donor if number in TAKEN[site] else recipient
        start, stop = edges[which][number : number + 2]
        pieces.append(Piece(which, start, stop))
    return Hybrid(recipient, tuple(pieces))


@dataclass(frozen=True)
class Cell:
    """One cell of a map.

    Attributes:
        site, layer, head: what it is of; -1 for none.
        turn: makes what is scored, from the number of the donor among the candidates, the donor
            and the turn's tokens.
    """

    site: str
    layer: int
    head: int
    turn: "Callable[[int, int, tuple[int, ...]], Turn]"


class Measured:
    """What is measured of one query.

    Args:
        model: with the function that counts tokens.
        unit: the query.
    """

    def __init__(self, model: Model, unit: Siblings) -> None:
        self._model, self._unit = model, unit
        self._rows: list[dict[str, Any]] = []
        self._numbers = range(len(unit.contexts))

    def table(self) -> pd.DataFrame:
        """A row per site, recipient and turn, with the scores after the three candidates in nats.

        Of turns that were written after hybrids there is the score after the recipient, too.
        """
        from ia_mech.engine.splice import aligned, continued, spliced

        unit, model = self._unit, self._model.subject.model
        ends = zip(unit.contexts, unit.stops, strict=True)
        cut = aligned(model, [ids[:stop] for ids, stop in ends])
        first, last = unit.header
        whole = continued(model, cut, unit.after, (first, last - 1))
        self._own(whole)
        pairs = [(d, j) for d in unit.recipients for j in self._numbers if j != d]
        for site in SITES:
            made = [hybrid(unit, site, *pair) for pair in pairs]
            self._whole(site, spliced(whole, made), pairs)
        if {WINDOWS, HEADS, STATES} & set(unit.maps):
            self._maps(cut, whole)
        if WRITING in unit.maps:
            self._written(whole)
        return pd.DataFrame(self._rows)

    def _donors(self, recipient: int) -> list[int]:
        return [j for j in self._numbers if j != recipient]

    def _own(self, whole: "Prefilled") -> None:
        from ia_mech.engine.score import Turn

        turns = self._unit.turns
        pairs = sorted(
            {
                (number, j)
                for number, (followed, *_) in enumerate(turns)
                for d in self._unit.recipients
                for j in self._donors(d)
                if followed != d
            }
        )
        scores = self._scored([whole], [Turn(j, turns[number][3]) for number, j in pairs])
        after = dict(zip(pairs, scores, strict=True))
        for d in self._unit.recipients:
            for number, turn in enumerate(turns):
                if turn[0] != d:
                    self._add(OWN, d, turn, [after[number, j] for j in self._donors(d)])

    def _whole(self, site: str, group: "Prefilled", pairs: list[tuple[int, int]]) -> None:
        from ia_mech.engine.score import Turn

        wanted, rows = [], []
        for d in self._unit.recipients:
            for turn in self._unit.turns:
                if turn[0] != d:
                    rows.append((d, turn))
                    wanted += [Turn(at, turn[3]) for at, pair in enumerate(pairs) if pair[0] == d]
        scores = self._scored([group], wanted).reshape(-1, CANDIDATES)
        for (d, turn), three in zip(rows, scores, strict=True):
            self._add(site, d, turn, three)

    def _maps(self, cut: "Prefilled", whole: "Prefilled") -> None:
        """States of the header, and windows of the response, with what follows computed anew."""
        from ia_mech.engine.splice import Hybrid, Piece, spliced

        unit, d = self._unit, self._unit.recipients[0]
        donors = self._donors(d)
        made = [
            Hybrid(d, (Piece(d, 0, unit.starts[d]), Piece(j, unit.starts[j], unit.stops[j])))
            for j in donors
        ]
        cells = [*self._windows(cut, d), *self._states(whole, d)]
        mapped = [turn for turn in unit.turns if turn[1:3] == (unit.mapped, 0) and turn[0] != d]
        wanted = [
            cell.turn(at, j, (*unit.after, *turn[3]))
            for cell in cells
            for turn in mapped
            for at, j in enumerate(donors)
        ]
        scores = self._scored([cut, spliced(cut, made)], wanted, skip=len(unit.after) + 1)
        for cell, each in zip(cells, scores.reshape(len(cells), -1, CANDIDATES), strict=True):
            for turn, three in zip(mapped, each, strict=True):
                self._add(cell.site, d, turn, three, layer=cell.layer, head=cell.head)

    def _windows(self, cut: "Prefilled", d: int) -> Iterator[Cell]:
        """The candidates' response in some layers or heads: put in alone, and left out alone."""
        from ia_mech.engine.score import Turn
        from ia_mech.engine.shared import Borrowed, Engine, held
        from ia_mech.engine.state import is_full

        unit, model = self._unit, self._model.subject.model
        shared = Engine.possible(model).shared if self._model.share else ()
        layer = next((one for one in cut.state.cache.layers if is_full(one)), None)
        heads = range(0 if layer is None else held(layer)[0].shape[1])
        first = len(unit.contexts)  # the number of the first hybrid

        def borrowing(taken: "dict[int, Sequence[int]]") -> Callable:
            return lambda at, j, ids: Turn(d, ids, borrowed=Borrowed(first + at, taken))

        if {WINDOWS, HEADS} & set(unit.maps):
            yield Cell(TOTAL, -1, -1, lambda at, j, ids: Turn(first + at, ids))
        for window in windows_of(unit.layers):
            inside = [number for number in window if number in shared]
            outside = [number for number in shared if number not in window]
            if inside and WINDOWS in unit.maps:
                yield Cell(WINDOW, window[0], -1, borrowing(dict.fromkeys(inside, heads)))
                yield Cell(OTHERS, window[0], -1, borrowing(dict.fromkeys(outside, heads)))
            if inside and HEADS in unit.maps:
                for head in heads:
                    taken = borrowing({number: [head] for number in inside})
                    yield Cell(HEAD, window[0], head, taken)

    def _states(self, whole: "Prefilled", d: int) -> Iterator[Cell]:
        """The candidates' state of one header token after one layer."""
        from ia_mech.engine.intervene import Replace
        from ia_mech.engine.score import Turn

        unit, states = self._unit, whole.residuals
        assert states is not None
        first, last = unit.header

        def putting(which: int, position: int, layer: int) -> Callable:
            def turn(at: int, j: int, ids: tuple[int, ...]) -> Turn:
                state = states[j, layer, which : which + 1]
                return Turn(d, ids, interventions=(Replace(layer, (position,), state),))

            return turn

        if STATES in unit.maps:
            step = step_of(unit.layers)
            for which, (site, position) in enumerate(((FIRST, first), (LAST, last - 1))):
                for layer in range(step, unit.layers, step):
                    yield Cell(site, layer, -1, putting(which, position, layer))

    def _written(self, whole: "Prefilled") -> None:
        """Turns that the model writes after hybrids, scored after all contexts."""
        from ia_mech.engine.decode import Row, decode
        from ia_mech.engine.sampling import stream_key
        from ia_mech.engine.score import Turn
        from ia_mech.engine.splice import spliced

        unit, d = self._unit, self._unit.recipients[0]
        donors = self._donors(d)
        stream = stream_key(unit.seed, unit.source, 0)
        made: list[Hybrid] = []
        rows: list[tuple[str, int, Row]] = []
        for site in WRITTEN:
            for j in donors:
                for temperature in dict.fromkeys((0.0, unit.mapped)):
                    rows.append((site, j, Row(len(made), temperature, stream)))
                made.append(hybrid(unit, site.removeprefix("written: "), d, j))
        decoded = decode(
            self._model.subject.model,
            [spliced(whole, made)],
            [row for *_, row in rows],
            self._model.chat.stop_ids,
            TOKENS,
            share=self._model.share,
        )
        self._model.on_tokens(sum(len(one.token_ids) for one in decoded))
        turns = [tuple(one.token_ids.tolist()) for one in decoded]
        wanted = [Turn(j, ids) for ids in turns for j in self._numbers]
        scores = self._scored([whole], wanted, skip=0).reshape(-1, len(self._numbers))
        for (site, j, row), ids, after in zip(rows, turns, scores, strict=True):
            turn = (j, row.temperature, 0, ids)
            self._add(site, d, turn, np.delete(after, d), **{RECIPIENT: after[d]})

    def _scored(self, groups: "list[Prefilled]", turns: "list[Turn]", skip: int = 1) -> np.ndarray:
        """``[turns]`` log-likelihoods in nats, without the first ``skip`` tokens."""
        from ia_mech.engine.score import score

        found = score(
            self._model.subject.model,
            groups,
            turns,
            share=self._model.share,
            on_tokens=self._model.on_tokens,
        )
        return np.array([one.logprobs_raw[skip:].sum(dtype=float) for one in found])

    def _add(self, site: str, recipient: int, turn: tuple, three: ArrayLike, **more) -> None:
        followed, temperature, sample, _ = turn
        own = followed - (followed > recipient)
        row = {"site": site, "layer": -1, "head": -1, "recipient": recipient, "followed": followed}
        row |= {"temperature": temperature, "sample": sample, "own": own, RECIPIENT: np.nan}
        row["context_id"] = self._unit.context_ids[followed]
        self._rows.append(
            row | dict(zip(SCORES, np.asarray(three, dtype=float).tolist(), strict=True)) | more
        )


class Hybrids(Experiment):
    """An experiment that measures turns after hybrids of their siblings' contexts."""

    siblings = True
    queries_used = 60

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--maps",
            nargs="*",
            choices=MAPS,
            default=[WINDOWS, STATES, WRITING],
            metavar="MAP",
            help=f"which of {', '.join(MAPS)}; nothing: whole sites alone (default: all but heads)",
        )
        parser.add_argument(
            "--recipients",
            type=int,
            choices=range(1, SIBLINGS + 1),
            default=SIBLINGS,
            metavar="N",
            help=f"responses to a query that are recipients, 1 to {SIBLINGS}: fewer take less time "
            f"and give wider intervals (default: {SIBLINGS})",
        )

    def units(self) -> Iterator[Siblings]:
        few = 0
        temperatures = [t for t in self.runs[0].settings["temperatures"] if t > 0]
        for query in self.queries:
            texts = query.responses
            distinct = [k for k, text in enumerate(texts) if texts.index(text) == k]
            chosen = distinct[:SIBLINGS]
            placed = [self._placed(query.messages, texts[k]) for k in chosen]
            whole = len(chosen) == SIBLINGS and all(each is not None for each in placed)
            if not whole or not set(chosen) <= set(query.turns["followed"]):
                few += 1
                continue
            contexts = [query.token_ids[k] for k in chosen]
            starts, stops, headers = (list(each) for each in zip(*placed, strict=True))
            if len({ids[stop:] for ids, stop in zip(contexts, stops, strict=True)}) > 1:
                few += 1  # what follows the response isn't the same in all
                continue
            turns = [
                (chosen.index(followed), float(t), int(sample), tuple(ids[:TOKENS].tolist()))
                for followed, t, sample, ids in query.turns[
                    ["followed", "temperature", "sample", "token_ids"]
                ].itertuples(index=False)
                if followed in chosen and sample == 0
            ]
            layers = self.runs[0].model["layers"]
            unit = Siblings(
                query.source, query.dataset, 0, contexts, starts, stops, headers[0],
                query.contexts["context_id"].iloc[chosen].tolist(), turns,
                self._recipients(query.source), sorted(self.args.maps),
                min(temperatures, default=0.0), layers, self.args.seed,
            )  # fmt: skip
            yield replace(unit, tokens=tokens_of(unit))
        if few:
            self.notes.append(
                f"{few} of {len(self.queries)} queries lack {SIBLINGS} different responses "
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

    def _recipients(self, source: str) -> list[int]:
        from ia_mech.engine.sampling import stream_key

        rng = np.random.default_rng(list(stream_key(self.args.seed, source, 0)))
        return rng.permutation(SIBLINGS)[: self.args.recipients].tolist()

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        return Measured(model, unit).table()


def tokens_of(unit: Siblings) -> int:
    """That are scored or written for a query, about; heads are counted as two a window."""
    turns = len(unit.turns) * CANDIDATES // SIBLINGS * CANDIDATES  # of a recipient, and scored
    scored = len(unit.recipients) * turns * len(SITES)
    scored += min(len(unit.recipients), 2) * turns
    windows, states = len(windows_of(unit.layers)), unit.layers // step_of(unit.layers)
    cells = {WINDOWS: 2 * windows, HEADS: 2 * windows, STATES: 2 * states}
    mapped = sum(cells.get(name, 0) for name in unit.maps) * CANDIDATES**2
    written = (SIBLINGS + 1) * 2 * CANDIDATES * len(WRITTEN) if WRITING in unit.maps else 0
    return (scored + written) * TOKENS + mapped * (TOKENS + len(unit.after))
