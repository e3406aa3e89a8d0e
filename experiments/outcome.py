"""What an experiment measures of the turn.

- *Bits*: turns are scored after several contexts; the scores tell which one a turn followed. They
  are of the first token, of the later ones, or of all; the turns exist, or are written anew.
- *Follow-ups*: how often a judge calls turns follow-ups, and the two parts of that rate: how many
  turns stay in the user's role, and how many of these are follow-ups.
- *First tokens*: the distribution of a turn's first token by temperature and, through the model's
  lens, by layer; and what turns it opens. Runs have kept it: no model is loaded.

What is measured after a change (:mod:`experiments.change`) is measured in the same way after the
recipient's own context, and after the donor's. To add an outcome, write what a unit's ``rows`` are
and what they amount to for a query.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.change import OWN, RESPONSES, WHOLE_SITES, Cell, Ids, Mask, Pairs, Passes, Replaced
from experiments.experiment import Model, Unit
from ia_mech.cli import shell_word
from ia_mech.errors import UserError
from ia_mech.judge.decoys import SIBLING
from ia_mech.judge.rubric import CANNOT_ASSESS, FOLLOW_UP, NO_FOLLOW_UP, OUT_OF_ROLE
from ia_mech.likelihood.carried import CANDIDATES, QueryBits, bits_by_query
from ia_mech.likelihood.reaction import by_query
from ia_mech.rates.gate import VERDICTS
from ia_mech.rates.load import JudgedTurns
from ia_mech.run import Run
from ia_mech.run.labelled import FAILED
from ia_mech.run.labels import KEY
from ia_mech.run.queries import Query

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.engine.score import Turn
    from ia_mech.engine.state import Prefilled
    from ia_mech.lens import Lens

LEAST_QUERIES = 3  # a scale is fitted on other queries, and a penalty chosen on others again
TOKENS = 24  # of a turn: nearly all of the bits come before (docs/locate.md)
SCORES = [f"score_{number}" for number in range(CANDIDATES)]
FIRST_SCORES = [f"first_{number}" for number in range(CANDIDATES)]  # of the first token alone
OWN_SCORES = [f"own_{name}" for name in SCORES]  # after own contexts
OWN_FIRST_SCORES = [f"own_{name}" for name in FIRST_SCORES]
WRITTEN_AFTER = "written: "  # how cells are called after which turns are written
# By temperature (None: all sampled turns), and by term and layer.
BitsByCell = dict[float | None, dict[tuple[str, int], QueryBits]]

# -- bits: turns scored after each response --------------------------------------------------------


@dataclass(frozen=True)
class SiblingTurns(Unit):
    """Turns that are scored after each of the contexts of a query.

    Attributes:
        arm: whose turns they are.
        contexts: token ids with each of the K responses, and the open header.
        turns: token ids and temperature of each turn.
    """

    arm: str
    contexts: tuple[Ids, ...]
    turns: tuple[tuple[Ids, float], ...]

    def rows(self, model: Model) -> pd.DataFrame:
        """One row per turn, in the unit's order, log-probabilities in nats.

        ``own`` ``[K · tokens]``: of each token, turn-end included, after each response, at the
        turn's own temperature (at T = 1 for greedy turns); ``whole`` ``[K]``: their sums;
        ``reader`` ``[K]``: of the whole turn at T = 1.
        """
        from ia_mech.likelihood.scorer import after_each

        temperatures = sorted({t for _, t in self.turns} - {0.0, 1.0})
        score = partial(model.score, temperatures=temperatures)
        rows = []
        scores = after_each(score, self.contexts, [ids for ids, _ in self.turns])
        for each, (_, temperature) in zip(scores, self.turns, strict=True):
            raw = np.stack([one.logprobs_raw for one in each]).astype(np.float64)
            own = raw
            if temperature in temperatures:
                which = temperatures.index(temperature)
                own = np.stack([one.logprobs_tempered[which] for one in each]).astype(np.float64)
            rows.append({"own": own.ravel(), "whole": own.sum(1), "reader": raw.sum(1)})
        return pd.DataFrame(rows).assign(arm=self.arm)


def unit_of(arm: str, query: Query, turns: pd.DataFrame) -> SiblingTurns:
    """Turns (rows as of ``Query.turns``), to be scored after each context of a query."""
    ids = (tuple(one.tolist()) for one in turns["token_ids"])
    pairs = tuple(zip(ids, turns["temperature"].astype(float), strict=True))
    contexts = tuple(query.token_ids)
    tokens = sum(map(len, contexts)) + len(contexts) * sum(len(ids) for ids, _ in pairs)
    return SiblingTurns(query.source, query.dataset, tokens, arm, contexts, pairs)


def mean_by_query(turns: pd.DataFrame, values: Any, responses: int) -> pd.Series:
    """Values of turns → their mean by query, each of its responses weighing the same."""
    names, found = by_query(values, turns["followed"], turns["source"], responses)
    return pd.Series(found, index=names)


# -- bits: what is carried by a change -------------------------------------------------------------


@dataclass(frozen=True)
class SiblingContexts(Unit):
    """Four responses to a query, turns after each, and what is changed.

    Attributes:
        contexts: token ids of each, with its open header.
        starts, stops: where the response begins and ends in each.
        places: named tokens after the response, counted from where it ends.
        context_ids: the name of each.
        turns: of each, the response that it followed, temperature, sample, and its first tokens.
        recipients: the responses that are recipients; maps use the first one alone.
        cells: what is changed.
        mapped: the temperature of the turns in maps.
        seed: of what is drawn, and of the noise of turns that are written.
    """

    contexts: list[Ids]
    starts: list[int]
    stops: list[int]
    places: dict[str, int]
    context_ids: list[str]
    turns: list[tuple[int, float, int, Ids]]
    recipients: list[int]
    cells: list[Cell]
    mapped: float
    seed: int = 0

    @property
    def after(self) -> Ids:
        """The tokens after the response, the same in all contexts."""
        return self.contexts[0][self.stops[0] :]

    def edges(self, number: int) -> list[int]:
        """Where the parts of a context begin, and where the last one ends."""
        start, stop = self.starts[number], self.stops[number]
        return [0, start, stop, stop + self.places["header_0"], len(self.contexts[number])]

    def pairs(self, every: bool) -> Pairs:
        """Recipients, each with its candidates."""
        those = self.recipients if every else self.recipients[:1]
        numbers = range(len(self.contexts))
        return [(d, j) for d in those for j in numbers if j != d]

    def rows(self, model: Model) -> pd.DataFrame:
        """A row per cell, recipient and turn, with the scores after the three candidates in nats:
        of the turn (:data:`SCORES`) and of its first token (:data:`FIRST_SCORES`).

        Raises:
            UserError: a hybrid of everything isn't its donor.
        """
        of = Passes(model.subject.model, self, model.on_tokens)
        found = [row for cell in self.cells if not cell.written for row in _scored(of, cell)]
        if written := [cell for cell in self.cells if cell.written]:
            found += _written(of, written, model)
        return pd.DataFrame(found)


def _scored(of: Passes, cell: Cell) -> Iterator[dict[str, Any]]:
    """The turns of candidates after the contexts of a cell; none where it changes nothing."""
    unit, pairs = of.unit, of.unit.pairs(cell.every)
    laid = cell.change.laid(of, pairs)
    if laid is None:
        return
    turns = [
        (d, turn)
        for d in dict.fromkeys(d for d, _ in pairs)
        for turn in unit.turns
        if turn[0] != d and (cell.every or turn[1:3] == (unit.mapped, 0))
    ]
    before = unit.after if laid.anew else ()
    wanted = [
        laid.turn(n, (*before, *turn[3]))
        for own, turn in turns
        for n, (d, _) in enumerate(pairs)
        if d == own
    ]
    scores = _nats(of, laid.groups, wanted, len(before))
    for (d, turn), each in zip(turns, scores, strict=True):
        yield _row(unit, cell, d, turn, each)


def _written(of: Passes, cells: Sequence[Cell], model: Model) -> Iterator[dict[str, Any]]:
    """Turns that the model writes after the contexts of cells, scored after the candidates' own.
    Their texts are kept beside the scores, not as a run: cut at :data:`TOKENS`, none can be judged
    (follow-ups after hybrids have an outcome of their own)."""
    from ia_mech.engine.decode import Row, decode
    from ia_mech.engine.sampling import stream_key
    from ia_mech.engine.score import Turn

    unit, pairs = of.unit, of.unit.pairs(False)
    stream = stream_key(unit.seed, unit.source, 0)
    groups: list[Prefilled] = []
    rows: list[tuple[Cell, int, Row]] = []
    for cell in cells:
        laid, first = cell.change.laid(of, pairs), sum(len(one.logits) for one in groups)
        assert laid is not None
        groups += laid.groups
        for n, (_, j) in enumerate(pairs):
            for temperature in dict.fromkeys((0.0, unit.mapped)):
                context = first + laid.turn(n, ()).context
                rows.append((cell, j, Row(context, temperature, stream)))
    what = [row for *_, row in rows], model.chat.stop_ids, TOKENS
    decoded = decode(of.model, groups, *what)
    of.on_tokens(sum(len(one.token_ids) for one in decoded))
    turns = [tuple(one.token_ids.tolist()) for one in decoded]
    scores = _nats(of, [of.whole], [Turn(j, ids) for ids in turns for _, j in pairs], 0)
    for (cell, j, row), ids, each in zip(rows, turns, scores, strict=True):
        turn = j, row.temperature, 0, ids
        yield _row(unit, cell, pairs[0][0], turn, each) | {"text": model.chat.text(ids)}


def _nats(
    of: Passes, groups: "Sequence[Prefilled]", turns: "Sequence[Turn]", skip: int
) -> np.ndarray:
    """``[turns / 3, 3, 2]`` log-likelihoods behind ``skip`` tokens: of all, of the first."""
    from ia_mech.engine.score import score

    unique = {turn: at for at, turn in enumerate(dict.fromkeys(turns))}
    found = score(of.model, groups, list(unique), on_tokens=of.on_tokens)
    each = (one.logprobs_raw[skip:].astype(float) for one in found)
    sums = np.array([(one.sum(), one[:1].sum()) for one in each])
    return sums[[unique[turn] for turn in turns]].reshape(-1, CANDIDATES, 2)


def _row(
    unit: SiblingContexts, cell: Cell, recipient: int, turn: tuple, scores: np.ndarray
) -> dict[str, Any]:
    followed, temperature, sample, _ = turn
    row = {"site": cell.term, "layer": cell.layer, "recipient": recipient, "followed": followed}
    row |= {"temperature": temperature, "sample": sample, "own": followed - (followed > recipient)}
    row["context_id"] = unit.context_ids[followed]
    return row | dict(zip((*SCORES, *FIRST_SCORES), scores.T.ravel().tolist(), strict=True))


def tokens_scored(
    cells: Sequence[Cell], turns: int, recipients: int, after: int, responses: int = 0
) -> int:
    """About how many tokens are scored or written for a query with so many turns, recipients,
    tokens after each response, and tokens of the four together, which masks compute anew."""
    each, found = turns * CANDIDATES // RESPONSES * CANDIDATES, 0  # of a recipient
    for cell in cells:
        if cell.written:
            found += RESPONSES * 2 * CANDIDATES * TOKENS
        elif cell.every:
            anew = after * isinstance(cell.change, Replaced)
            found += each * min(recipients, 2 if cell.term == OWN else recipients) * (TOKENS + anew)
        else:
            found += CANDIDATES**2 * (TOKENS + after)
        if isinstance(cell.change, Mask):
            found += responses
    return found


def siblings_of(
    query: Query,
    chat: Any,
    cells: Sequence[Cell],
    recipients: int,
    temperatures: Sequence[float],
    seed: int,
) -> SiblingContexts | None:
    """The first four different responses to a query, with a turn after each; None if it lacks them,
    or what follows the response isn't the same in all. So many of them are drawn as recipients."""
    from ia_mech.engine.sampling import stream_key

    texts = query.responses
    chosen = [k for k, text in enumerate(texts) if texts.index(text) == k][:RESPONSES]
    placed = [found for k in chosen if (found := placed_in(chat, query.dialogues[k]))]
    if len(placed) < RESPONSES or not set(chosen) <= set(query.turns["followed"]):
        return None
    contexts = [query.token_ids[k] for k in chosen]
    starts, stops, places = (list(each) for each in zip(*placed, strict=True))
    if len({ids[stop:] for ids, stop in zip(contexts, stops, strict=True)}) > 1:
        return None
    turns = [
        (chosen.index(followed), float(t), int(sample), tuple(ids[:TOKENS].tolist()))
        for followed, t, sample, ids in query.turns[
            ["followed", "temperature", "sample", "token_ids"]
        ].itertuples(index=False)
        if followed in chosen and sample == 0
    ]
    rng = np.random.default_rng(list(stream_key(seed, query.source, 0)))
    drawn = rng.permutation(RESPONSES)[:recipients].tolist()
    mapped = min((t for t in temperatures if t > 0), default=0.0)
    names = query.contexts["context_id"].iloc[chosen].tolist()
    unit = SiblingContexts(
        query.source, query.dataset, 0, contexts, starts, stops, places[0], names, turns, drawn,
        list(cells), mapped, seed,
    )  # fmt: skip
    responses = sum(stop - start for start, stop in zip(starts, stops, strict=True))
    size = len(turns), recipients, len(unit.after), responses
    return replace(unit, tokens=tokens_scored(cells, *size))


def placed_in(chat: Any, messages: list[dict]) -> tuple[int, int, dict[str, int]] | None:
    """Where the response of a dialogue begins and ends, and named tokens after it, counted from
    there; None of an empty response."""
    found = chat.context(messages)
    last = found.positions["header_last"]
    if not found.response or last is None:
        return None
    stop = found.response.stop
    places = {n: at - stop for n, at in found.positions.items() if at is not None and at >= stop}
    return found.response.start, stop, places | {"header_0": last + 1 - len(chat.header_ids) - stop}


def with_own_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the scores of their turns after the candidates' own contexts, too. Turns that were
    written after hybrids have no others."""
    keys = ["source", "recipient", "followed", "temperature", "sample"]
    names = [*SCORES, *FIRST_SCORES]
    own = rows.loc[rows["site"] == OWN, [*keys, *names]]
    own = own.rename(columns={name: f"own_{name}" for name in names})
    found = rows.merge(own, on=keys, how="left")
    written = found["site"].str.startswith(WRITTEN_AFTER)
    found.loc[written, own.columns[len(keys) :]] = found.loc[written, names].to_numpy()
    return found


def of_first_tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of :func:`with_own_scores` with the scores of first tokens in place of whole turns'."""
    first = dict(zip((*FIRST_SCORES, *OWN_FIRST_SCORES), (*SCORES, *OWN_SCORES), strict=True))
    return rows.drop(columns=list(first.values())).rename(columns=first)


def of_later_tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the scores of all tokens but the first, which the last header state alone
    decides."""
    pairs = zip((*SCORES, *OWN_SCORES), (*FIRST_SCORES, *OWN_FIRST_SCORES), strict=True)
    return rows.assign(**{whole: rows[whole] - rows[first] for whole, first in pairs})


def query_bits_of(rows: pd.DataFrame, seed: int) -> QueryBits | None:
    """What the rows of one site tell; None if not two queries have turns of all candidates."""
    rows = balanced_queries(rows)
    if rows["source"].nunique() < 2:
        return None
    each = rows[SCORES].to_numpy(), rows["own"].to_numpy(), rows["source"]
    return bits_by_query(*each, rows[OWN_SCORES].to_numpy(), seed=seed)


def balanced_queries(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of queries that have turns of all candidates."""
    return rows[rows.groupby("source")["own"].transform("nunique") == CANDIDATES]


def bits_by_cell(rows: pd.DataFrame, seed: int) -> BitsByCell:
    """What cells tell, by temperature (None: all sampled turns, of whole sites); ``rows`` are those
    of :func:`with_own_scores`."""
    found: BitsByCell = {}
    for t in [*sorted(set(rows["temperature"])), None]:
        here = rows[rows["temperature"] > 0 if t is None else rows["temperature"] == t]
        if t is None:
            here = here[here["site"].isin([OWN, *WHOLE_SITES]) & (here["layer"] < 0)]
        found[t] = {
            key: bits
            for key, cell in here.groupby(["site", "layer"], sort=False)
            if (bits := query_bits_of(cell, seed)) is not None
        }
    return found


# -- follow-ups ------------------------------------------------------------------------------------

IN_ROLE, ONCE_IN_ROLE = "in role", "once in role"
CHOOSING, SCORING = "choosing", "scoring"  # shares of turns with even and odd sample numbers
RATE, SIBLINGS = "follow-ups", "follow-ups after siblings"
BEYOND_SIBLINGS = "follow-ups beyond siblings"  # the first minus the second


def parts_of(turns: pd.DataFrame, category: str) -> pd.DataFrame:
    """Of turns, 1 or 0: whether they are of the category, stay in the user's role, and are of the
    category once they do (NaN of turns out of role). NaN without a verdict, and of the role by a
    judge that says only whether turns are follow-ups."""
    told = turns["category"].astype(object)
    assessed = told.notna() & ~told.isin([FAILED, CANNOT_ASSESS])
    roles = assessed & (told != NO_FOLLOW_UP).all()
    whole = (told == category).astype(float).where(assessed)
    inside = (~told.isin(OUT_OF_ROLE)).astype(float).where(roles)
    return pd.DataFrame({"share": whole, IN_ROLE: inside, ONCE_IN_ROLE: whole.where(inside.eq(1))})


def shares_of(turns: pd.DataFrame, category: str, temperature: float) -> pd.DataFrame:
    """The share of a category among the judged turns of contexts at a temperature, in each half.

    A row per context, indexed from 0: ``dataset``, ``source``, ``context_id``, ``unfinished``,
    ``greedy`` (1 if the greedy turn is of it), :data:`CHOOSING`, :data:`SCORING`, and ``share`` of
    both halves; NaN where nothing was judged.
    """
    keys = ["dataset", "source", "context_id", "unfinished"]
    rows = turns[[*keys, "temperature", "sample"]].astype(dict.fromkeys(keys[:3], object))
    rows = rows.assign(value=parts_of(turns, category)["share"])
    drawn = rows[rows["temperature"] == temperature]
    halves = {
        "greedy": rows[rows["temperature"] == 0],
        CHOOSING: drawn[drawn["sample"] % 2 == 0],
        SCORING: drawn[drawn["sample"] % 2 == 1],
        "share": drawn,
    }
    found = {name: half.groupby(keys)["value"].mean() for name, half in halves.items()}
    return pd.DataFrame(found).reset_index()


def rates_of(judged: JudgedTurns, siblings: bool = False) -> pd.DataFrame:
    """How often turns are follow-ups (:data:`RATE`), and the parts of that: :data:`IN_ROLE`, and
    :data:`ONCE_IN_ROLE` (NaN of turns out of role).

    A row per turn, with the columns of ``judged.turns``. Or, with ``siblings``, of the turns that
    were shown after siblings, too: a row per temperature and source with the means over turns, also
    of :data:`SIBLINGS` and :data:`BEYOND_SIBLINGS`.

    Raises:
        UserError: no turn was judged after siblings.
    """
    turns, (own, other) = judged.turns, VERDICTS
    if siblings:
        turns = judged.decoys[judged.decoys["decoy"] == SIBLING]
        if turns.empty:
            path = judged.runs[0].path
            raise UserError(
                f"{path} has no turns judged after siblings",
                f"judge it again: ia-mech judge run {shell_word(path)} --replace",
            )
        turns = turns.dropna(subset=[own, other])
    rate, inside = turns[own if siblings else "follow_up"].astype(float), 1 - turns["out_of_role"]
    texts = ["run", "context_id", "dataset", "source", "category", "perturbation"]
    found = turns.astype({name: object for name in texts if name in turns})
    parts = {RATE: rate, IN_ROLE: inside, ONCE_IN_ROLE: rate.where(inside == 1)}
    if not siblings:
        return found.assign(**parts)
    after = turns[other].astype(float)
    parts |= {SIBLINGS: after, BEYOND_SIBLINGS: rate - after}
    keys = ["temperature", "dataset", "source"]
    rows = found[keys].astype({"temperature": float}).assign(**parts)
    return rows.groupby(keys, sort=False).mean().reset_index()


# -- first tokens: distributions that runs have kept, and lenses on them ---------------------------

HEADER_LAST = "header_last"  # where the first token of the user turn is predicted
LOGITS = 2**23  # most held at a time: 32 MiB, and a few times that for what is computed from them
LEAST_FOLLOW_UPS = 0.5  # least share of follow-ups among the turns that a follow-up opening opens
RESTATEMENTS = ("repeats_query", "repeats_response")
OPENINGS = GREEDY, BEST = ("greedy's opening", "best follow-up opening")


@dataclass(frozen=True)
class Openings:
    """How many follow-ups each token opened, and how many turns that repeat query or response: a
    row per source, a column per id of a token that opened a sampled turn of either kind."""

    follow_up: pd.DataFrame
    restated: pd.DataFrame

    @property
    def ids(self) -> np.ndarray:
        """``[tokens]`` of the columns, ascending."""
        return self.follow_up.columns.to_numpy(dtype=np.int64)

    def of_others(self, sources: Sequence[str]) -> list[np.ndarray]:
        """``[contexts, tokens]``: of the turns of either kind that a token opens in other sources
        than the context's, the share of each kind.

        The shares of a token add up to 1, or are 0 if it opened none, so that no probability counts
        twice. A row is NaN where no other source has a turn of the kind.
        """
        kinds = [
            of.sum().to_numpy() - of.loc[list(sources)].to_numpy()
            for of in (self.follow_up, self.restated)
        ]
        total = np.maximum(kinds[0] + kinds[1], 1)
        return [np.where(of.sum(1, keepdims=True) > 0, of / total, np.nan) for of in kinds]


def openings_of(turns: pd.DataFrame) -> Openings:
    """Count the tokens that open sampled (not greedy) turns, at any temperature."""
    sampled = turns[turns["temperature"] > 0]
    first = sampled["token_ids"].map(lambda ids: int(ids[0])).astype(np.int64)
    kinds = sampled["category"] == FOLLOW_UP, sampled["category"].isin(RESTATEMENTS)
    ids = np.unique(first[kinds[0] | kinds[1]])
    if not len(ids):  # some token that opened neither: its shares are NaN, an empty sum would be 0
        ids = np.unique(first[:1])
    where = {"index": sorted(turns["source"].unique()), "columns": ids, "fill_value": 0}
    sources = sampled["source"].astype(object)
    return Openings(*(pd.crosstab(sources[one], first[one]).reindex(**where) for one in kinds))


def with_token_scores(turns: pd.DataFrame, runs: Sequence[Run]) -> pd.DataFrame:
    """The turns with their tokens, the tokens' log-probabilities and ranks, and ``at``, the row of
    their context.

    Raises:
        UserError: a run doesn't keep the first token's distribution.
    """
    written = []
    for run in runs:
        if run.settings["opening"] is not None:
            raise UserError(
                f"the turns of {run.path} begin after --opening: {HEADER_LAST} doesn't predict "
                "them",
                "give a run without",
            )
        if run.settings["header_logits"] != "full":
            raise UserError(
                f"{run.path} doesn't keep all header logits", "sample with --header-logits full"
            )
        row = {name: at for at, name in enumerate(run.contexts["context_id"])}
        own = run.generations[[*KEY, "token_ids", "logprobs_raw", "ranks"]]
        written.append(own.assign(run=str(run.path), at=own["context_id"].map(row).astype(int)))
    return turns.merge(pd.concat(written), on=["run", *KEY], how="left", validate="one_to_one")


def first_token_masses(
    logits: "Tensor",
    temperatures: Sequence[float],
    turn_ends: Sequence[int],
    opening_ids: np.ndarray,
    shares: Sequence[np.ndarray],
) -> np.ndarray:
    """``[2 + shares, contexts, temperatures]``: entropy in nats, the probability of turn ends, and
    the mass on each kind of opening.

    Args:
        logits: ``[contexts, vocab]`` at T = 1, up to a constant per context.
        temperatures: above 0.
        turn_ends: ids of the tokens that end a turn.
        opening_ids: ``[tokens]`` ids.
        shares: ``[contexts, tokens]`` arrays: the share of a token's probability that counts.
    """
    import torch

    logits, columns = logits - logits.amax(-1, keepdim=True), []
    for scaled in (logits / t for t in temperatures):
        probability = scaled.softmax(-1)
        # log Z − E[logit] needs no logarithm of a probability that underflowed.
        expected = torch.einsum("cv,cv->c", probability, scaled)
        opened = probability[:, list(opening_ids)].double()
        masses = [(opened * torch.from_numpy(share)).sum(-1) for share in shares]
        ends = probability[:, list(turn_ends)].sum(-1)
        columns.append(torch.stack([scaled.logsumexp(-1) - expected, ends, *masses]).double())
    return torch.stack(columns, dim=-1).numpy()


def first_token_curves(
    runs: Sequence[Run], contexts: pd.DataFrame, openings: Openings, temperatures: Sequence[float]
) -> dict[str, np.ndarray]:
    """``[contexts, temperatures]`` arrays of :func:`first_token_masses`: ``entropy``, ``turn_end``,
    and the mass on openings of ``follow_up`` turns and of ``restated`` ones.

    Args:
        runs: that have passed :func:`with_token_scores`.
        contexts: with ``run`` (the run's folder), ``at`` (the row in that run) and ``source``.
        openings: of the runs' turns.
        temperatures: above 0.
    """
    import torch

    names = ("entropy", "turn_end", "follow_up", "restated")
    found = np.full((len(names), len(contexts), len(temperatures)), np.nan)
    shares = openings.of_others(contexts["source"])
    stops = sorted({int(i) for run in runs for i in run.record["identity"]["chat"]["stop_ids"]})
    for run in runs:
        kept, mine = run.header_logits(), np.flatnonzero(contexts["run"] == str(run.path))
        size = max(1, LOGITS // run.model["vocab"])
        for here in (mine[start : start + size] for start in range(0, len(mine), size)):
            logits = torch.stack([kept[int(at)] for at in contexts["at"].iloc[here]])
            own = [share[here] for share in shares]
            found[:, here] = first_token_masses(logits, temperatures, stops, openings.ids, own)
    return dict(zip(names, found, strict=True))


def lens_of(run: Run, notes: list[str]) -> "Lens | None":
    """The lens of a run's model; if there is none, why is noted."""
    from ia_mech.lens import Lens, NoLens

    try:
        return Lens.load(run.model["weights_hash"])
    except NoLens as why:
        notes.append(f"no logit lens: {why}.")
        return None


def log_p_by_layer(
    run: Run, rows: Sequence[int], ids: np.ndarray, lens: "Lens", temperature: float = 1.0
) -> "Iterator[Tensor]":
    """The logit lens: every layer at ``header_last``, through final norm and unembedding;
    ``[rows, ids]`` log-probabilities in nats, after contexts of a run that are given by row."""
    import torch

    few = replace(lens, unembedding=lens.unembedding[torch.from_numpy(ids)])
    for layer in run.layers:
        states = run.residuals(layer, HEADER_LAST)[list(rows)]
        slices = [(x / temperature).logsumexp(-1) for x in lens.logits_in_slices(states)]
        total = torch.stack(slices).logsumexp(0)[:, None]
        yield few.logits(states) / temperature - total


def lens_curves(
    runs: Sequence[Run], contexts: pd.DataFrame, openings: Openings, lens: "Lens"
) -> dict[str, np.ndarray]:
    """Openings by the logit lens.

    Args:
        runs, contexts, openings: as for :func:`first_token_curves`; contexts also with ``greedy``,
            the token that opens the greedy turn.
        lens: of the model.

    Returns:
        ``[contexts, layers]`` log-probabilities in nats of the token that opens the greedy turn
        (:data:`GREEDY`), and of the likeliest other token (:data:`BEST`) whose turns in other
        sources are follow-ups at least half of the time. NaN where there is none.
    """
    own = contexts["greedy"].to_numpy()
    ids = np.unique(np.concatenate([openings.ids, own]))
    shares = np.zeros((len(contexts), len(ids)))
    shares[:, np.searchsorted(ids, openings.ids)] = openings.of_others(contexts["source"])[0]
    column = np.searchsorted(ids, own)
    shares[np.arange(len(own)), column] *= 0.0  # greedy's token is no other opening; NaN stays
    found = np.full((2, len(own), len(runs[0].layers)), np.nan)
    for run in runs:
        mine = np.flatnonzero(contexts["run"] == str(run.path))
        if HEADER_LAST not in run.positions or not len(mine):
            continue
        eligible = shares[mine] >= LEAST_FOLLOW_UPS
        every = log_p_by_layer(run, contexts["at"].iloc[mine], ids, lens)
        for number, log_p in enumerate(one.double().numpy() for one in every):
            found[0, mine, number] = log_p[np.arange(len(mine)), column[mine]]
            found[1, mine, number] = np.where(eligible, log_p, -np.inf).max(1)
    none = np.isneginf(found[1]) | np.isnan(shares).any(1, keepdims=True)
    found[1] = np.where(none, np.nan, found[1])
    return dict(zip(OPENINGS, found, strict=True))


def lens_masses(run: Run, openings: pd.DataFrame, lens: "Lens", temperature: float) -> np.ndarray:
    """``[layers, values, contexts]``: by the logit lens at ``header_last``, for each value of
    openings its sum over a context's, weighted by their probabilities.

    Args:
        run: that has kept the states.
        openings: indexed by context and token id, with columns of values.
        lens: of the model.
        temperature: of the probabilities.
    """
    row = {name: at for at, name in enumerate(run.contexts["context_id"])}
    ids, column = np.unique(openings.index.get_level_values("token"), return_inverse=True)
    values = np.zeros((openings.shape[1], len(row), len(ids)))
    at = [row[name] for name in openings.index.get_level_values("context_id")]
    values[:, at, column] = openings.to_numpy(float).T
    every = log_p_by_layer(run, range(len(row)), ids, lens, temperature)
    each = (log_p.exp().double().numpy() for log_p in every)
    return np.array([(values * p).sum(-1).clip(max=1) for p in each])
