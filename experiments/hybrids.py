"""Hybrids: contexts that have one site of a sibling. Turns are scored after them.

A site is a part of the context whose keys and values, or state, a turn may read. A query has four
responses. One is the *recipient*, the other three are *candidates*. A turn that followed a
candidate is scored after each candidate's own context, and after three hybrids, each the
recipient's context with one site of a candidate. A model with recurrent layers has one more site:
their state, which holds all tokens before it. ``experiments.locate`` says what follows from the
scores.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from experiments.experiment import Model, Unit
from ia_mech.likelihood.carried import CANDIDATES

if TYPE_CHECKING:
    from ia_mech.engine.score import Turn
    from ia_mech.engine.splice import Hybrid
    from ia_mech.engine.state import Prefilled

TOKENS = 24  # of a turn: nearly all of the bits come before (docs/locate.md)
RESPONSES = CANDIDATES + 1
OWN = "own context"
HEADER, AFTER_RESPONSE, RESPONSE, QUERY = "header", "after the response", "response", "query"
SITES = (HEADER, AFTER_RESPONSE, RESPONSE, QUERY)
STATE = "recurrent state"
PLAYERS = (RESPONSE, HEADER, STATE)  # of a recurrent model; all their combinations are measured
RESPONSE_AND_HEADER, RESPONSE_AND_STATE = "response and header", "response and state"
HEADER_AND_STATE, ALL_THREE = "header and state", "response, header and state"
OF_RECURRENT = (STATE, RESPONSE_AND_HEADER, RESPONSE_AND_STATE, HEADER_AND_STATE, ALL_THREE)
# What comes after the response is computed anew.
ALL_LAYERS = "response, computed on"
FULL_LAYERS = "response, layers of full attention, computed on"
STATE_ON, RESPONSE_AND_STATE_ON = f"{STATE}, computed on", f"{RESPONSE_AND_STATE}, computed on"
COMPUTED_ON = (ALL_LAYERS, FULL_LAYERS, STATE_ON, RESPONSE_AND_STATE_ON)
WINDOW, WITHOUT_WINDOW = "response, layers", "response, other layers"
HEADER_FIRST, HEADER_LAST = "header_0", "header_last"
WRITTEN = tuple(f"written: {site}" for site in (OWN, RESPONSE, HEADER, RESPONSE_AND_HEADER, QUERY))
WRITTEN_OF_RECURRENT = (f"written: {STATE}", f"written: {ALL_THREE}")
MAPS = WINDOWS, STATES, WRITING, BANDS, BLOCKS = "windows", "states", "written", "bands", "blocks"
USUAL_MAPS = (WINDOWS, STATES, WRITING, BANDS)
# Bands of the response by how many of its tokens follow, at least and at most.
BAND_SITES: dict[str, tuple[int, int | None]] = {
    "response, last token": (0, 1),
    "response, tokens 2–8 from its end": (1, 8),
    "response, tokens 9–32 from its end": (8, 32),
    "response, tokens 33–128 from its end": (32, 128),
    "response, tokens before these": (128, None),
}
SCORES = [f"score_{number}" for number in range(CANDIDATES)]
FIRST_SCORES = [f"first_{number}" for number in range(CANDIDATES)]  # of the first token alone
# Which pieces of a hybrid come from the candidate: 0 the query, 1 the response, 2 the tokens
# between response and header, 3 the header, 4 the recurrent state after the header.
DONATED = {
    QUERY: {0},
    RESPONSE: {1},
    AFTER_RESPONSE: {2, 3},
    HEADER: {3},
    STATE: {4},
    RESPONSE_AND_HEADER: {1, 3},
    RESPONSE_AND_STATE: {1, 4},
    HEADER_AND_STATE: {3, 4},
    ALL_THREE: {1, 3, 4},
    OWN: {0, 1, 2, 3, 4},
}


# The response is computed anew with attention within blocks of so many tokens; None: one block.
BLOCK_SITES: dict[str, int | None] = {
    "response, blocks of 1": 1,
    "response, blocks of 4": 4,
    "response, blocks of 16": 16,
    "response, one block": None,
}
# The control of blocks: each token sees as many others, from anywhere in the response.
RANDOM_SITES = {f"response, {n} random tokens": n for n in (4, 16)}


@dataclass(frozen=True)
class SiblingContexts(Unit):
    """Four responses to a query, and turns after each.

    Attributes:
        contexts: token ids of each, with its open header.
        starts, stops: where the response begins and ends in each.
        header: where the header begins and ends, counted from where the response ends.
        context_ids: the name of each.
        turns: of each, the response that it followed, temperature, sample, and its first tokens.
        recipients: the responses that are recipients; maps use the first one alone.
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


def window_size(layers: int) -> int:
    """Layers of a window, and between layers whose states are put in: an eighth of all."""
    return -(-layers // 8)


def layer_windows(layers: int) -> list[range]:
    """The windows of layers, from 1, that maps show."""
    step = window_size(layers)
    return [range(at, min(at + step, layers + 1)) for at in range(1, layers + 1, step)]


def hybrid(unit: SiblingContexts, site: str, recipient: int, donor: int) -> "Hybrid":
    """The recipient's context with a site of the donor's."""
    from ia_mech.engine.splice import Hybrid, Piece

    pieces = []
    for number in range(4):
        which = donor if number in DONATED[site] else recipient
        stop = unit.stops[which]
        end = len(unit.contexts[which])
        edges = [0, unit.starts[which], stop, stop + unit.header[0], end]
        pieces.append(Piece(which, *edges[number : number + 2]))
    return Hybrid(recipient, tuple(pieces), donor if 4 in DONATED[site] else recipient)


def with_band(
    unit: SiblingContexts, band: tuple[int, int | None], recipient: int, donor: int
) -> "Hybrid":
    """The recipient's context up to the response's end, with a band of tokens of the donor's
    response in place of as many of its own, at the same distance from the end. The band without a
    limit reaches to the start of the shorter response."""
    from ia_mech.engine.splice import Hybrid, Piece

    behind, most = band
    both = recipient, donor
    lengths = [unit.stops[which] - unit.starts[which] for which in both]
    counts = min(most or max(lengths), *lengths), min(behind, *lengths)
    (own_first, first), (own_stop, stop) = (
        [unit.stops[which] - count for which in both] for count in counts
    )
    pieces = (
        Piece(recipient, 0, own_first),
        Piece(donor, first, stop),
        Piece(recipient, own_stop, unit.stops[recipient]),
    )
    return Hybrid(recipient, tuple(piece for piece in pieces if piece.start < piece.stop))


@dataclass(frozen=True)
class MapCell:
    """One cell of a map.

    Attributes:
        site, layer: what it is of; layer -1 for none.
        turn: makes the turn that is scored, from the donor's number among the candidates, the donor
            and the turn's tokens.
    """

    site: str
    layer: int
    turn: "Callable[[int, int, tuple[int, ...]], Turn]"


class SiteScorer:
    """Scores one query's turns after own contexts and after hybrids.

    Args:
        model: with the function that counts tokens.
        unit: the query.
    """

    def __init__(self, model: Model, unit: SiblingContexts) -> None:
        self._model, self._unit = model, unit
        self._rows: list[dict[str, Any]] = []
        self._numbers = range(len(unit.contexts))

    def table(self) -> pd.DataFrame:
        """A row per site, recipient and turn, with the scores after the three candidates in nats:
        of the turn (:data:`SCORES`) and of its first token (:data:`FIRST_SCORES`).

        Raises:
            UserError: a hybrid of everything isn't its donor.
        """
        from ia_mech.engine.splice import aligned, check_ceiling, continued, is_recurrent, spliced

        unit, model = self._unit, self._model.subject.model
        ends = zip(unit.contexts, unit.stops, strict=True)
        to_response = aligned(model, [ids[:stop] for ids, stop in ends])
        first, last = unit.header
        whole = continued(model, to_response, unit.after, (first, last - 1))
        check_ceiling(model, to_response, unit.after)
        check_ceiling(model, whole, unit.turns[0][3])
        self._recurrent = is_recurrent(whole)
        self._score_own_contexts(whole)
        pairs = [(d, j) for d in unit.recipients for j in self._candidates(d)]
        for site in (*SITES, *OF_RECURRENT) if self._recurrent else SITES:
            hybrids = [hybrid(unit, site, *pair) for pair in pairs]
            self._score_site(site, spliced(whole, hybrids), pairs)
        if {*unit.maps} - {WRITING}:
            self._score_maps(to_response, whole)
        if WRITING in unit.maps:
            self._write_turns(whole)
        return pd.DataFrame(self._rows)

    def _candidates(self, recipient: int) -> list[int]:
        return [j for j in self._numbers if j != recipient]

    def _turns_of_candidates(self, recipient: int) -> list[tuple[int, tuple]]:
        """The turns that followed candidates, with their numbers."""
        turns = enumerate(self._unit.turns)
        return [(number, turn) for number, turn in turns if turn[0] != recipient]

    def _score_own_contexts(self, whole: "Prefilled") -> None:
        """Every turn after every context that it needs, once."""
        from ia_mech.engine.score import Turn

        turns = self._unit.turns
        needed = {
            (number, j)
            for d in self._unit.recipients
            for number, _ in self._turns_of_candidates(d)
            for j in self._candidates(d)
        }
        pairs = sorted(needed)
        scores = self._scores([whole], [Turn(j, turns[number][3]) for number, j in pairs])
        after = dict(zip(pairs, scores, strict=True))
        for d in self._unit.recipients:
            for number, turn in self._turns_of_candidates(d):
                self._add(OWN, d, turn, [after[number, j] for j in self._candidates(d)])

    def _score_site(self, site: str, group: "Prefilled", pairs: list[tuple[int, int]]) -> None:
        """The turns after the hybrids of pairs of recipient and donor."""
        from ia_mech.engine.score import Turn

        wanted, rows = [], []
        for d in self._unit.recipients:
            for _, turn in self._turns_of_candidates(d):
                rows.append((d, turn))
                wanted += [Turn(at, turn[3]) for at, pair in enumerate(pairs) if pair[0] == d]
        scores = self._scores([group], wanted).reshape(-1, CANDIDATES, 2)
        for (d, turn), each in zip(rows, scores, strict=True):
            self._add(site, d, turn, each)

    def _score_maps(self, to_response: "Prefilled", whole: "Prefilled") -> None:
        """States of the header, and windows, bands and blocks of the response, with what follows
        computed anew."""
        from ia_mech.engine.splice import Hybrid, Piece, spliced

        unit, d = self._unit, self._unit.recipients[0]
        candidates = self._candidates(d)
        hybrids = []
        for of_response, of_state in ((True, False), (False, True), (True, True)):
            for j in candidates:
                k = j if of_response else d
                pieces = Piece(d, 0, unit.starts[d]), Piece(k, unit.starts[k], unit.stops[k])
                hybrids.append(Hybrid(d, pieces, j if of_state else d))
        hybrids = hybrids if self._recurrent else hybrids[:CANDIDATES]
        cells = [*self._windows(d), *self._states(whole, d)]
        for site, band in BAND_SITES.items() if BANDS in unit.maps else ():
            exchanged = [with_band(unit, band, d, j) for j in candidates]
            if all(len({piece.context for piece in one.pieces}) == 1 for one in exchanged):
                continue  # no response is long enough
            following = partial(_following, len(unit.contexts) + len(hybrids))
            cells.append(MapCell(site, -1, following))
            hybrids += exchanged
        groups = [to_response, spliced(to_response, hybrids)]
        for site, group in self._in_blocks(to_response) if BLOCKS in unit.maps else ():
            first = sum(len(one.logits) for one in groups)
            cells.append(MapCell(site, -1, partial(_following, first)))
            groups.append(spliced(group, hybrids[:CANDIDATES]))  # those of whole responses
        mapped = [turn for _, turn in self._turns_of_candidates(d) if turn[1:3] == (unit.mapped, 0)]
        wanted = [
            cell.turn(at, j, (*unit.after, *turn[3]))
            for cell in cells
            for turn in mapped
            for at, j in enumerate(candidates)
        ]
        scores = self._scores(groups, wanted, skip=len(unit.after))
        for cell, rows in zip(cells, scores.reshape(len(cells), -1, CANDIDATES, 2), strict=True):
            for turn, each in zip(mapped, rows, strict=True):
                self._add(cell.site, d, turn, each, cell.layer)

    def _in_blocks(self, to_response: "Prefilled") -> "Iterator[tuple[str, Prefilled]]":
        """The contexts with responses whose tokens see few others: in blocks, and at random."""
        from ia_mech.engine.splice import among_random, in_blocks

        unit = self._unit
        contexts = [ids[:stop] for ids, stop in zip(unit.contexts, unit.stops, strict=True)]
        what = self._model.subject.model, to_response, contexts, unit.starts
        for site, width in BLOCK_SITES.items():
            yield site, in_blocks(*what, width)
            self._model.on_tokens(_response_tokens(unit))
        for site, count in RANDOM_SITES.items():
            yield site, among_random(*what, count, unit.seed)
            self._model.on_tokens(_response_tokens(unit))

    def _windows(self, d: int) -> Iterator[MapCell]:
        """The candidates' response in some layers: put in alone, and left out alone."""
        from ia_mech.engine.installed import installed
        from ia_mech.engine.score import Turn
        from ia_mech.engine.shared import Borrowed

        unit, model = self._unit, self._model.subject.model
        shared = installed(model).engine.shared
        first = len(unit.contexts)  # the number of the first hybrid

        def borrowing(layers: "Sequence[int]") -> Callable:
            return lambda at, j, ids: Turn(d, ids, borrowed=Borrowed(first + at, layers))

        if {WINDOWS, BANDS, BLOCKS} & set(unit.maps):
            wholes = (ALL_LAYERS, STATE_ON, RESPONSE_AND_STATE_ON)
            for which, site in enumerate(wholes if self._recurrent else wholes[:1]):
                yield MapCell(site, -1, partial(_following, first + which * CANDIDATES))
            if 0 < len(shared) < unit.layers:
                yield MapCell(FULL_LAYERS, -1, borrowing(shared))
        for window in layer_windows(unit.layers):
            inside = [number for number in window if number in shared]
            outside = [number for number in shared if number not in window]
            if inside and WINDOWS in unit.maps:
                yield MapCell(WINDOW, window[0], borrowing(inside))
                yield MapCell(WITHOUT_WINDOW, window[0], borrowing(outside))

    def _states(self, whole: "Prefilled", d: int) -> Iterator[MapCell]:
        """The candidates' state of one header token after one layer."""
        from ia_mech.engine.intervene import Replace
        from ia_mech.engine.score import Turn

        unit, states = self._unit, whole.residuals
        assert states is not None
        first, last = unit.header

        def replacing(which: int, position: int, layer: int) -> Callable:
            def turn(at: int, j: int, ids: tuple[int, ...]) -> Turn:
                state = states[j, layer, which : which + 1]
                return Turn(d, ids, interventions=(Replace(layer, (position,), state),))

            return turn

        if STATES in unit.maps:
            step = window_size(unit.layers)
            tokens = ((HEADER_FIRST, first), (HEADER_LAST, last - 1))
            for which, (site, position) in enumerate(tokens):
                for layer in range(step, unit.layers, step):
                    yield MapCell(site, layer, replacing(which, position, layer))

    def _write_turns(self, whole: "Prefilled") -> None:
        """Turns that the model writes after hybrids, scored after the candidates' own contexts."""
        from ia_mech.engine.decode import Row, decode
        from ia_mech.engine.sampling import stream_key
        from ia_mech.engine.score import Turn
        from ia_mech.engine.splice import spliced

        unit, d = self._unit, self._unit.recipients[0]
        stream = stream_key(unit.seed, unit.source, 0)
        hybrids: list[Hybrid] = []
        rows: list[tuple[str, int, Row]] = []
        for site in (*WRITTEN, *WRITTEN_OF_RECURRENT) if self._recurrent else WRITTEN:
            for j in self._candidates(d):
                for temperature in dict.fromkeys((0.0, unit.mapped)):
                    rows.append((site, j, Row(len(hybrids), temperature, stream)))
                hybrids.append(hybrid(unit, site.removeprefix("written: "), d, j))
        decoded = decode(
            self._model.subject.model,
            [spliced(whole, hybrids)],
            [row for *_, row in rows],
            self._model.chat.stop_ids,
            TOKENS,
        )
        self._model.on_tokens(sum(len(one.token_ids) for one in decoded))
        turns = [tuple(one.token_ids.tolist()) for one in decoded]
        wanted = [Turn(j, ids) for ids in turns for j in self._candidates(d)]
        scores = self._scores([whole], wanted).reshape(-1, CANDIDATES, 2)
        for (site, j, row), ids, after in zip(rows, turns, scores, strict=True):
            self._add(site, d, (j, row.temperature, 0, ids), after)

    def _scores(self, groups: "list[Prefilled]", turns: "list[Turn]", skip: int = 0) -> np.ndarray:
        """``[turns, 2]`` log-likelihoods in nats behind ``skip`` tokens: of all, of the first."""
        from ia_mech.engine.score import score

        found = score(
            self._model.subject.model,
            groups,
            turns,
            on_tokens=self._model.on_tokens,
        )
        each = (one.logprobs_raw[skip:].astype(float) for one in found)
        return np.array([(one.sum(), one[:1].sum()) for one in each])

    def _add(
        self, site: str, recipient: int, turn: tuple, scores: ArrayLike, layer: int = -1
    ) -> None:
        followed, temperature, sample, _ = turn
        own = followed - (followed > recipient)
        row = {"site": site, "layer": layer, "recipient": recipient, "followed": followed}
        row |= {"temperature": temperature, "sample": sample, "own": own}
        row["context_id"] = self._unit.context_ids[followed]
        whole, first = np.asarray(scores, dtype=float).T.tolist()
        row |= dict(zip(SCORES, whole, strict=True)) | dict(zip(FIRST_SCORES, first, strict=True))
        self._rows.append(row)


def _response_tokens(unit: SiblingContexts) -> int:
    return sum(stop - start for start, stop in zip(unit.starts, unit.stops, strict=True))


def _following(first: int, at: int, j: int, ids: tuple[int, ...]) -> "Turn":
    """A turn after the hybrid of a candidate; the hybrids of all candidates begin at ``first``."""
    from ia_mech.engine.score import Turn

    return Turn(first + at, ids)


def tokens_scored(
    turns: int,
    recipients: int,
    maps: Sequence[str],
    layers: int,
    after: int,
    recurrent: bool = False,
    responses: int = 0,
) -> int:
    """About how many tokens are scored or written for a query.

    Args:
        turns: of the four responses together.
        recipients: how many.
        maps: which of :data:`MAPS`.
        layers: of the model.
        after: tokens between a response and its turn.
        recurrent: whether any layer has a recurrent state, which is one site more.
        responses: tokens of the four together, which blocks compute anew.
    """
    each = turns * CANDIDATES // RESPONSES * CANDIDATES  # of a recipient
    sites = len(SITES) + recurrent * len(OF_RECURRENT)
    scored = each * (recipients * sites + min(recipients, 2))
    windows, states = len(layer_windows(layers)), layers // window_size(layers)
    cells = {WINDOWS: 2 * windows, STATES: 2 * states, BANDS: len(BAND_SITES)}
    cells[BLOCKS] = of_blocks = len(BLOCK_SITES) + len(RANDOM_SITES)
    count = sum(cells.get(name, 0) for name in maps)
    if {WINDOWS, BANDS, BLOCKS} & set(maps):
        count += len(COMPUTED_ON) if recurrent else 1
    mapped = count * CANDIDATES**2
    sites = len(WRITTEN) + recurrent * len(WRITTEN_OF_RECURRENT)
    written = RESPONSES * 2 * CANDIDATES * sites if WRITING in maps else 0
    anew = of_blocks * responses if BLOCKS in maps else 0
    return (scored + written) * TOKENS + mapped * (TOKENS + after) + anew
