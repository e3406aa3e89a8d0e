"""After which layers can one vector at the user header open reacting to the response?

Some turns that a model samples react to their response where its greedy turn doesn't. A vector is
learned that makes the model's own accepted sampled turns likely: as many numbers as a state has,
added after one layer to the states of the header's tokens, by gradient, on half of the queries. The
other half's turns are then written under it and judged; and the other way round. Such a vector may
raise the judged rate without any reaction, so what counts is the excess: the rate of turns less
that of the same turns shown after siblings, other responses to their query. The control is a vector
learned alike from the same turns, each after a sibling of the response that it followed: form and
topic are in it, this response isn't. Beside it stand one from turns after responses to other
queries (form alone), and a random direction. The layer is chosen on other queries than it is
reported on.

Needs: a judged run with several responses per query and sampled turns; a model whose passes have
gradients. Cost, of 60 queries on two cores (135M): at each layer some three minutes for each of six
vectors, and four times the run's greedy turns; name a few --layers.

    python -m experiments.learned_vector cache/RUN --dry-run
    python -m experiments.learned_vector cache/RUN --layers 8 15 22
    python -m experiments.learned_vector cache/RUN --layers 8 --positions header_last
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from scipy.special import softmax
from torch import Tensor

from experiments.directions import RATE, SteeredContext, random_directions
from experiments.elicit import EXCESS, SIBLINGS, rates_by_query
from experiments.elicit import RATE as ACCEPTED
from experiments.experiment import Conclusion, Experiment, Model, Unit
from experiments.tables import sentence_of, tables_of
from ia_mech.cli import above_zero, shell_word, whole_from
from ia_mech.engine.score import differentiable_logits
from ia_mech.engine.state import Prefix, prefill_all
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, holm_corrected, paired_row
from ia_mech.likelihood.reaction import readable_bits
from ia_mech.likelihood.scorer import after_each
from ia_mech.models.load import text_config
from ia_mech.stats import cluster_bootstrap, cluster_mean
from ia_mech.steering import ADD, TURN, SteeringVector

if TYPE_CHECKING:
    from experiments.figures import Drawing
    from ia_mech.results import Table
    from ia_mech.run import Run
    from ia_mech.run.queries import Query

UNSTEERED = "unsteered"
OWN, SIBLING, OTHER, RANDOM = "own", "siblings", "other queries", "random"  # what vectors are of
LEARNED = OWN, SIBLING, OTHER
CHOSEN = "chosen layer"
GENUINE, DEPENDENT, BITS = "genuine", "genuine and dependent", "readable bits"
RANGES = {
    ACCEPTED: (0.0, 1.0),
    SIBLINGS: (0.0, 1.0),
    EXCESS: (-1.0, 1.0),
    DEPENDENT: (0.0, 1.0),
    BITS: (-np.inf, np.inf),
}
COMPARED = EXCESS, DEPENDENT, BITS  # paired by query
LESS = {UNSTEERED: "less unsteered", SIBLING: "less the siblings' vector"}
DOSE = 0.5  # length of a vector, in norms of the state that it is added to
BATCH, TOKENS = 12, 48  # turns of a step; tokens of a turn that count
UNIT = -1  # of the layer, where nothing is steered
FILE = "vector.safetensors"
KEY = ["run", "context_id", "temperature", "sample"]  # of a turn

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Learning(Unit):
    """A vector to be learned.

    Attributes:
        half: of the queries, that the turns are of.
        term: what they come after.
        contexts: each with one turn that is to become likely.
        dose: length of the vector, in norms of the state that it is added to.
        steps: of Adam, of :data:`BATCH` turns each.
        seed: of the start and the batches, which are alike for all that are compared.
    """

    half: int
    term: str
    contexts: tuple[SteeredContext, ...]
    dose: float
    steps: int
    seed: int


@dataclass(frozen=True)
class Turns(Unit):
    """Turns of a query, to be scored after each of its contexts, unsteered."""

    contexts: tuple[Ids, ...]
    turns: tuple[Ids, ...]


@torch.inference_mode(False)  # whatever thread this is called in
def learn(model: Model, unit: Learning) -> np.ndarray:
    """``[d_model]`` of length 1: the direction along which a state has to be moved by the dose so
    that turns become likely.

    It begins as the gradient at a dose near 0. Then Adam lowers the mean cross-entropy of the
    turns' tokens; after each step the direction is of length 1 again.

    Raises:
        UserError: the model's passes have no gradient.
    """
    network = model.subject.model
    keys = [one.ids[: one.start] for one in unit.contexts]
    prefixes = list(dict.fromkeys(keys))
    groups, order = prefill_all(network, [Prefix(ids) for ids in prefixes], model.on_tokens)
    place = {prefixes[at]: number for number, at in enumerate(order)}
    draw = torch.Generator().manual_seed(unit.seed)

    def cross_entropy(along: Tensor, dose: float) -> Tensor:
        """Of a new batch, in nats per token."""
        drawn = torch.randperm(len(keys), generator=draw)[:BATCH].tolist()
        some = sorted(drawn, key=lambda i: place[keys[i]])
        turns, ends = [], []
        for i in some:
            turns += unit.contexts[i].steered_turns(place[keys[i]], along, dose)
            ends.append(len(turns[-1].ids) - len(unit.contexts[i].turns[0]))
        log = differentiable_logits(network, groups, turns).log_softmax(-1)
        model.on_tokens(sum(unit.contexts[i].scored for i in some))
        said = [
            own[end : len(turn.ids)].gather(-1, torch.tensor([turn.ids[end:]]).T.to(own.device))
            for own, turn, end in zip(log, turns, ends, strict=True)
        ]
        return -torch.cat(said).mean()

    along = torch.randn(text_config(network.config).hidden_size, generator=draw).requires_grad_()
    (uphill,) = torch.autograd.grad(cross_entropy(along, unit.dose / 100), along)
    start = -uphill if uphill.norm() > 0 else along.detach()
    along = (start / start.norm()).requires_grad_()
    adam = torch.optim.Adam([along], lr=RATE / len(along) ** 0.5)
    for _ in range(unit.steps):
        adam.zero_grad()
        cross_entropy(along, unit.dose).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
    return along.detach().numpy()


def at_chosen_layer(
    ranked: np.ndarray, reported: np.ndarray, part: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Values at the layer that is best on other queries, whose vectors were learned on the same.

    Args:
        ranked: ``[layers, queries]`` by whose mean a layer is chosen.
        reported: ``[layers, queries]`` what is read off there.
        part: ``[queries]`` of four: those of 0 and 1 were measured under the same vectors, and so
            were those of 2 and 3; each is reported where the other has chosen.
        counts: ``[resamples, queries]`` how often each query was drawn.

    Returns:
        ``[resamples]`` means over queries; NaN where a part has nothing to choose by.
    """
    total = np.zeros(len(counts))
    for one in np.unique(part):
        choosing, reporting = counts * (part == one ^ 1), counts * (part == one)
        best = (choosing @ ranked.T).argmax(1)  # sums rank as means do
        total += (reporting * reported[best]).sum(1)
        total[(choosing.sum(1) == 0) & (reporting.sum(1) > 0)] = np.nan
    return total / counts.sum(1)


def parts_of(queries: "Sequence[Query]", seed: int) -> dict[str, int]:
    """The part of each query by its source, drawn within datasets: 0 and 1 are one half of the
    queries, 2 and 3 the other."""
    order = np.random.default_rng([seed, 3]).permutation(len(queries)).tolist()
    order.sort(key=lambda i: queries[i].dataset)
    return {queries[i].source: 2 * (n % 2) + n // 2 % 2 for n, i in enumerate(order)}


class LearnedVector(Experiment):
    """See the module.

    Attributes:
        layers: after which vectors are added.
        positions: of the tokens whose states they are added to.
        part: of each query, by its source; the half is ``part // 2``.
        examples: by half, then by what the turns come after: contexts with a turn each.
    """

    name = "learned_vector"
    siblings = True
    judged = True
    queries_used = 60
    beside = "learned-vector"
    columns: ClassVar = dict(Experiment.columns) | {"layer": "Int64"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        more, layers = parser.add_argument, "after which (default: one to seven eighths of them)"
        more("--layers", type=whole_from(0), nargs="+", metavar="L", help=layers)
        tokens = f"which tokens' states, {TURN}: the turn's (default: all of the header)"
        more("--positions", nargs="+", metavar="NAME", help=tokens)
        steps = f"of {BATCH} turns, to learn a vector (default: 30)"
        more("--steps", type=whole_from(1), default=30, metavar="N", help=steps)
        turns = "most accepted turns to learn from, of each half (default: 96)"
        more("--turns", type=whole_from(2), default=96, metavar="N", help=turns)
        also = "of the run, at which turns are written, too (default: greedy turns alone)"
        more("--temperatures", type=above_zero, nargs="+", default=[], metavar="T", help=also)
        more("--quick", action="store_true", help="one half learns, the other is measured")

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Find layers, positions, halves, and the turns to learn from.

        Raises:
            UserError: the model lacks a layer or a position, the run a temperature; or a half has
                no accepted turns with a sibling and another query.
        """
        first, args = self.runs[0], self.args
        depth, names = first.model["layers"], list(first.contexts["positions"].iloc[0])
        eighths = {round(depth * eighth / 8) for eighth in range(1, 8)} - {0, depth}
        self.layers = sorted(set(args.layers or eighths))
        header = [name for name in names if name.startswith("header_")]
        self.positions = tuple(args.positions or header)
        for layer in self.layers:
            anything = self.vector(layer, torch.ones(first.model["d_model"]))
            anything.check(depth, first.model["d_model"], names)
        if lacking := set(args.temperatures) - set(first.settings["temperatures"]):
            raise UserError(
                f"{first.path} has no turns at T = {min(lacking):g} to compare with",
                "name temperatures of the run",
            )
        if len(self.queries) < 4:
            raise UserError(
                f"{len(self.queries)} queries have several responses: they are dealt to four parts",
                "sample more queries",
            )
        self.part = parts_of(self.queries, args.seed)
        accepted = self._accepted()
        self.examples = [self._examples(half, accepted) for half in self.learners]
        for half, those in zip(self.learners, self.examples, strict=True):
            count, queries = len(those[OWN]), len({one.source for one in those[OWN]})
            self.notes.append(f"half {half + 1} learns from {count} turns of {queries} queries.")

    @property
    def learners(self) -> tuple[int, ...]:
        """The halves that learn; each is measured under what the other has learned."""
        return (0,) if self.args.quick else (0, 1)

    def vector(self, layer: int, direction: Tensor) -> SteeringVector:
        """A direction as what is added after a layer."""
        model = self.runs[0].model
        what = ADD, layer, self.positions, direction, DOSE
        return SteeringVector(*what, model["name"], model["weights_hash"])

    def _accepted(self) -> set[tuple]:
        """Run, context, temperature and sample of the accepted turns that were sampled."""
        from ia_mech.rates.load import NO_ANNOTATOR, read_runs

        assert self.gate is not None
        turns = read_runs(self.runs, self.gate.judge, NO_ANNOTATOR).turns
        mine = turns[(turns["temperature"] > 0) & (turns[GENUINE] == 1)]
        return set(mine[KEY].astype(object).itertuples(index=False, name=None))

    def _examples(self, half: int, accepted: set[tuple]) -> dict[str, list[SteeredContext]]:
        """The accepted turns of a half, as many of each query as can be: after the response that
        each followed, after a sibling that is finished like it, and after a response to another
        query of the half, of the same dataset and finished like it where there is one. The layer
        is still to be set."""
        rng = np.random.default_rng([self.args.seed, 4, half])
        mine = [query for query in self.queries if self.part[query.source] // 2 == half]
        found: list[tuple[int, dict[str, SteeredContext]]] = []  # how many of its query came before
        for query in mine:
            foreign = [one for one in mine if one is not query]
            foreign = [one for one in foreign if one.dataset == query.dataset] or foreign
            kinds = list(zip(query.responses, query.complete, strict=True))
            before = len(found)
            for _, turn in query.turns.sample(frac=1, random_state=rng).iterrows():
                k, ids = turn["followed"], tuple(turn["token_ids"].tolist()[:TOKENS])
                text, complete = kinds[k]
                others = [j for j, (t, c) in enumerate(kinds) if t != text and c == complete]
                if tuple(turn[KEY]) in accepted and ids and others and foreign:
                    other = foreign[rng.integers(len(foreign))]
                    alike = np.flatnonzero(np.array(other.complete) == complete)
                    those = alike if len(alike) else np.arange(len(other.contexts))
                    pairs = {
                        OWN: self._steered(query, k, ids),
                        SIBLING: self._steered(query, int(rng.choice(others)), ids),
                        OTHER: self._steered(other, int(rng.choice(those)), ids),
                    }
                    found.append((len(found) - before, pairs))
        if not found:
            raise UserError(
                f"half {half + 1} of the queries has no accepted sampled turn to learn from",
                "sample more turns (--samples, --temperatures), or more queries",
            )
        found.sort(key=lambda one: one[0])
        kept = [pairs for _, pairs in found[: self.args.turns]]
        return {term: [pairs[term] for pairs in kept] for term in LEARNED}

    def _steered(self, query: "Query", k: int, turn: Ids) -> SteeredContext:
        """A context with a turn."""
        named = query.contexts["positions"].iloc[k]
        places = {name: None if pd.isna(at) else int(at) for name, at in named.items()}
        layer = self.layers[0]
        vector = self.vector(layer, torch.ones(self.runs[0].model["d_model"]))
        at = sorted(at for one in vector.at_context(places) for at in one.positions)
        where = layer, tuple(at), TURN in self.positions
        return SteeredContext(query.source, query.token_ids[k], *where, (turn,))

    # -- measure ----------------------------------------------------------------------------------

    def units(self) -> list[Learning]:
        """All vectors that are learned."""
        found = []
        for half, those in zip(self.learners, self.examples, strict=True):
            for layer in self.layers:
                for term, contexts in those.items():
                    at = tuple(replace(one, layer=layer) for one in contexts)
                    tokens = sum(len(ids) for ids in {one.ids[: one.start] for one in at})
                    batch = min(BATCH, len(at)) * sum(one.scored for one in at) // len(at)
                    name = f"half {half + 1}", "", tokens + (self.args.steps + 1) * batch
                    how = DOSE, self.args.steps, self.args.seed
                    found.append(Learning(*name, half, term, at, *how))
        return found

    def plan(self) -> dict[str, str]:
        units, vectors = self.units(), (*LEARNED, RANDOM)
        contexts = sum(len(one.contexts) for half in self.learners for one in self.measured(half))
        turns = 1 + len(self.args.temperatures) * self.runs[0].settings["samples"]
        return {
            "vectors": f"{', '.join(vectors)}; at {', '.join(self.positions)}, after layers "
            f"{', '.join(map(str, self.layers))}",
            "to learn": f"{len(units)} of them from "
            f"{' and '.join(str(len(those[OWN])) for those in self.examples)} accepted turns, "
            f"about {sum(unit.tokens for unit in units):,} tokens; {self._stored(units)} are "
            "learned already",
            "then to sample": f"{contexts} contexts under each of {len(self.layers) * len(vectors)}"
            f" vectors, {turns} turns after each; greedy ones are scored",
        }

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        """Of :class:`Learning` the direction; of :class:`Turns` a row each, ``ids`` and
        ``logprobs`` ``[K]`` in nats."""
        if isinstance(unit, Learning):
            row = {"half": unit.half, "term": unit.term, "layer": unit.contexts[0].layer}
            return pd.DataFrame([row | {"direction": learn(model, unit)}])
        scores = after_each(model.score, unit.contexts, unit.turns)
        sums = [[one.logprobs_raw.sum(dtype=float) for one in each] for each in scores]
        return pd.DataFrame({"ids": list(map(list, unit.turns)), "logprobs": sums})

    def measured(self, learner: int) -> "list[Query]":
        """The queries whose turns are written under what a half has learned."""
        return [query for query in self.queries if self.part[query.source] // 2 != learner]

    def rows(self) -> pd.DataFrame:
        """A row per temperature, arm and query.

        Raises:
            UserError: another judge than the rules has yet to label the turns.
        """
        from experiments.resample import judge_alike

        assert self.gate is not None
        learned = self.measure_units(self.units(), "learning vectors")
        arms = [(UNSTEERED, UNIT, run) for run in self.runs]
        for half, layer, term, direction in self._with_random(learned):
            name = f"layer {layer} {term} {half + 1}"
            self.sampled[name] = self._write_under(self.vector(layer, direction), name, half)
            arms.append((term, layer, self.sampled[name]))
        judge_alike(self.runs[0], list(self.sampled.values()), self.gate.judge)
        read = [self._judged(*arm) for arm in arms]
        rates = pd.concat([rates for rates, _ in read], ignore_index=True)
        wanted = {query.source for half in self.learners for query in self.measured(half)}
        rates = rates[rates["source"].isin(wanted)]
        turns = pd.concat([turns for _, turns in read], ignore_index=True)
        turns = self._dependence(turns[turns["source"].isin(wanted) & turns["ids"].map(bool)])
        keys = ["temperature", "layer", "term", "source"]
        means = turns.groupby(keys)[[DEPENDENT, BITS]].mean().reset_index()
        return rates.drop(columns="arm").merge(means, "left", keys)

    def _with_random(self, learned: pd.DataFrame) -> Iterator[tuple[int, int, str, Tensor]]:
        """Half, layer, name and direction of the learned vectors, and for each that was learned
        after own responses a random one, with the covariance of the states and nothing of it."""
        named = next((name for name in self.positions if name != TURN), "header_last")
        for one in learned.itertuples():
            direction = np.array(one.direction, dtype=np.float32)
            yield one.half, one.layer, one.term, torch.from_numpy(direction)
            if one.term == OWN:
                states = [run.residuals(one.layer, named).double().numpy() for run in self.runs]
                centred = np.concatenate([of_run - of_run.mean(0) for of_run in states])
                (drawn,) = random_directions(centred, direction, 1, self.args.seed + one.half)
                yield one.half, one.layer, RANDOM, torch.from_numpy(drawn).float()

    def _write_under(self, vector: SteeringVector, name: str, learner: int) -> "Run":
        """The turns of the other half under a vector, which is kept beside them."""
        from experiments.resample import conversations_of, resample_run

        folder = self.place(name)
        folder.mkdir(parents=True, exist_ok=True)
        vector.save(folder / FILE)
        contexts = pd.concat([one.contexts for one in self.measured(learner)], ignore_index=True)
        return resample_run(
            self.runs[0],
            conversations_of(contexts),
            folder,
            ("header_last",),
            folder / FILE,
            self.model.subject,
            self.crew,
            temperatures=tuple(self.args.temperatures),
        )

    def _judged(self, term: str, layer: int, run: "Run") -> tuple[pd.DataFrame, pd.DataFrame]:
        """Rates of a run's arm by temperature and query, and its greedy turns with verdicts."""
        from ia_mech.judge.decoys import SIBLING as SHOWN
        from ia_mech.rates.load import NO_ANNOTATOR, read_runs

        assert self.gate is not None
        judged = read_runs([run], self.gate.judge, NO_ANNOTATOR)
        decoys = judged.decoys[judged.decoys["decoy"] == SHOWN].assign(arm=term)
        if decoys.empty:
            raise UserError(
                f"{run.path} has no turns judged after siblings",
                f"judge it again: python -m ia_mech.judge run {shell_word(run.path)} --replace",
            )
        rates = pd.concat(
            rates_by_query(mine, GENUINE).assign(temperature=float(t))
            for t, mine in decoys.groupby("temperature")
            if t in (0.0, *self.args.temperatures)
        )
        greedy = run.generations[run.generations["temperature"] == 0].set_index("context_id")
        turns = judged.turns[judged.turns["temperature"] == 0]
        turns = turns[["temperature", "source", "context_id", GENUINE]].astype(
            {"source": object, "context_id": object}
        )
        turns["ids"] = [tuple(greedy["token_ids"][one].tolist()) for one in turns["context_id"]]
        for frame in (rates, turns):  # named as queries are
            frame["source"] = frame["source"].str.replace("\0", "\x1f", regex=False)
        names = {"term": term, "layer": layer}
        return rates.assign(**names), turns.assign(**names)

    def _dependence(self, turns: pd.DataFrame) -> pd.DataFrame:
        """Greedy turns with what they tell about their response: :data:`DEPENDENT`, and
        :data:`BITS` by one reader of all arms; scored without steering."""
        units = []
        for query in self.queries:
            written = tuple(dict.fromkeys(turns.loc[turns["source"] == query.source, "ids"]))
            contexts = tuple(query.token_ids)
            tokens = sum(map(len, contexts)) + len(contexts) * sum(map(len, written))
            if written:
                units.append(Turns(query.source, query.dataset, tokens, contexts, written))
        columns = self.measure_units(units, "scoring turns")[["source", "ids", "logprobs"]]
        scored = {
            (source, tuple(ids)): np.array(sums)
            for source, ids, sums in columns.itertuples(index=False)
        }
        place = {
            (query.source, name): k
            for query in self.queries
            for k, name in enumerate(query.contexts["context_id"])
        }
        found = turns.assign(
            followed=[place[key] for key in zip(turns["source"], turns["context_id"], strict=True)],
            sums=[scored[key] for key in zip(turns["source"], turns["ids"], strict=True)],
        )
        pairs = zip(found["sums"], found["followed"], strict=True)
        favoured = np.array([softmax(sums)[followed] > 0.5 for sums, followed in pairs])
        count = found["sums"].map(len)
        whole = found[count == count.max()]  # bits of fewer responses would be other bits
        bits = pd.Series(np.nan, found.index)
        if whole["source"].nunique() > 1:
            own = whole["followed"], whole["source"]
            sums = np.stack(whole["sums"].tolist())
            bits[whole.index] = readable_bits(sums, *own, seed=self.args.seed).bits
        return found.assign(**{DEPENDENT: found[GENUINE] * favoured, BITS: bits})

    # -- estimate ---------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        level, tested = self.args.level, []
        group = Group(np.array([]), self.options, {"dataset": ALL})
        grouped = rows.groupby(["temperature", "layer", "term"], sort=False)
        arms = {key: own.set_index("source") for key, own in grouped}
        for (t, layer, term), own in arms.items():
            names = {"temperature": t, "layer": None if layer == UNIT else layer, "term": term}
            for quantity, ends in RANGES.items():
                if quantity in own and own[quantity].notna().any():
                    found = cluster_mean(own[quantity], own.index, level=level).clip(*ends)
                    count = int(own[quantity].notna().sum())
                    yield TidyEstimate(quantity, {"dataset": ALL} | names, count, found)
            against = {UNSTEERED: (t, UNIT, UNSTEERED)} if term != UNSTEERED else {}
            against |= {SIBLING: (t, layer, SIBLING)} if term == OWN else {}
            for less, key in against.items():
                for quantity in (one for one in COMPARED if one in own and key in arms):
                    base, what = arms[key][quantity], f"{quantity}, {LESS[less]}"
                    pair = own[quantity], own.index, base, base.index
                    tested.append(paired_row(group, what, *pair, **names))
        # Over layers: each quantity, temperature and kind of vector is a family.
        yield from holm_corrected(
            tested, lambda row: (row.quantity, row.names["temperature"], row.names["term"])
        )
        for t in sorted(set(rows["temperature"])):
            yield from self._at_chosen_layer(rows[rows["temperature"] == t], t)

    def _at_chosen_layer(self, rows: pd.DataFrame, t: float) -> Iterator[TidyEstimate]:
        """What own responses' vectors have, at a layer chosen by their excess over the control."""
        values = [one for one in (EXCESS, DEPENDENT) if one in rows and rows[one].notna().any()]
        wide = rows.pivot_table(index="source", columns=["term", "layer"], values=values).dropna()
        ranked = (wide[EXCESS][OWN] - wide[EXCESS][SIBLING]).to_numpy().T
        part = np.array([self.part[source] for source in wide.index], dtype=int)
        for quantity in values:
            own = wide[quantity][OWN].to_numpy()
            for less, words in LESS.items():
                reported = (own - wide[quantity][less].to_numpy()).T  # unsteered has one column

                def statistic(counts: np.ndarray, reported=reported) -> np.ndarray:
                    return at_chosen_layer(ranked, reported, part, counts)

                (found,) = cluster_bootstrap(statistic, list(wide.index), **self.options)
                names = {"dataset": ALL, "temperature": t, "term": CHOSEN}
                yield TidyEstimate(f"{quantity}, {words}", names, len(wide), found)
        layers = list(wide[EXCESS][OWN])
        best = [(one, ranked[:, part == one].mean(1).argmax()) for one in np.unique(part)]
        said = ", ".join(f"{layers[at]} by part {one + 1}" for one, at in best)
        plain = "greedy turns" if t == 0 else f"T = {t:g}"
        self.notes.append(f"chosen layers, {plain}: {said} of the queries.")

    # -- say --------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        index = "temperature", "layer", "term"
        legend = (
            "own, siblings, other queries: after whose responses the turns came that a vector was "
            "learned from. Less unsteered, less the siblings' vector: paired by query; p: "
            "Holm-corrected over layers."
        )
        shown: dict[str, tuple[str, int | str]] = {
            ACCEPTED: ("accepted", 2),
            SIBLINGS: ("after siblings", 2),
            EXCESS: ("excess", "+.2f"),
        }
        here = found[found["term"] != CHOSEN]
        made = tables_of(
            "turns that the judge accepts, by layer of the vector",
            here,
            shown | _differences(EXCESS),
            index=index,
            rows="queries",
            legend=legend,
        )
        depend = {DEPENDENT: (DEPENDENT, 2)} | _differences(DEPENDENT)
        made += tables_of(
            "greedy turns that are genuine and likelier after their own response than after its "
            "siblings together",
            here,
            depend | {BITS: (BITS, 2)} | _differences(BITS),
            index=index,
            rows="queries",
            legend=f"{legend} Readable bits: what the turn tells about its response, by one reader "
            "for all; turns are scored unsteered.",
        )
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Lines

        rows = found[(found["quantity"] == EXCESS) & (found["temperature"] == 0)]
        plain = rows.loc[rows["term"] == UNSTEERED, "value"].item()
        title = f"{self.runs[0].model['name']} · greedy turns under learned vectors"
        words = title, "layer", "accepted, less after siblings", rows[rows["term"] != UNSTEERED]
        return {"layers": Lines(*words, across="layer", levels={UNSTEERED: plain})}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        greedy = found[(found["temperature"] == 0) & (found["term"] == CHOSEN)]

        def said(words: str, quantity: str, less: str) -> str:
            rows = greedy[greedy["quantity"] == f"{quantity}, {LESS[less]}"]
            return sentence_of(words, rows, null=0.0, level=self.args.level)

        learned = f"a vector at {', '.join(self.positions)}, learned and its layer chosen on others"
        sentence = said(
            f"excess over siblings of greedy turns under {learned}, less that under its control",
            EXCESS,
            SIBLING,
        )
        assert self.gate is not None
        control = (
            "The control is a vector learned from the same turns, each after a sibling of the "
            "response that it followed. "
            f"{said('excess, less that of unsteered turns', EXCESS, UNSTEERED)} "
            f"{said('genuine and dependent turns, less the control', DEPENDENT, SIBLING)} "
            f"{self.gate.sentence}."
        )
        return Conclusion(sentence, control)


def _differences(quantity: str) -> dict[str, tuple[str, int | str]]:
    """The columns of what a quantity is compared with."""
    return {f"{quantity}, {less}": (less, "+.2f") for less in LESS.values()}


main = LearnedVector.main

if __name__ == "__main__":
    sys.exit(main())
