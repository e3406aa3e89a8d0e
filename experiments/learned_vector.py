"""After which layers can one vector at the user header make turns react to the response?

Some turns that a model samples react to their response where its greedy turn doesn't. On half of
the queries, a vector is learned by gradient that makes the model's own sampled follow-ups likely.
It is added after one layer to the states of the header's tokens. Turns after the other half's
queries are then written under the vector and judged. After that the halves change places. Such a
vector may raise the follow-up rate without any reaction to the response. So what counts is the
excess: the rate minus that of the same turns after siblings, other responses to their query. The
control is a vector that is learned in the same way from the same turns, each after a sibling of the
response that it followed: it holds form and topic, but not this response. Two more vectors stand
beside it: one from turns after responses to other queries, which holds form alone, and a random
direction. The layer is chosen on other queries than those that it is reported on. Intervals and
p values are over queries, for these very vectors: learning has chances of its own.

Needs: a judged run with several responses per query and sampled turns; a model whose passes have
gradients. Cost, of 60 queries on two cores (135M): at each layer some three minutes for each of six
vectors, and four times the run's greedy turns; name a few --layers.

    ia-mech learned-vector cache/RUN --dry-run
    ia-mech learned-vector cache/RUN --layers 8 15 22
    ia-mech learned-vector cache/RUN --layers 8 --positions header_last
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.arms import Arm, conversations_of
from experiments.control import centred_states, random_directions
from experiments.experiment import Conclusion, Experiment, Model, Unit, flag
from experiments.judged import Arms
from experiments.outcome import EXCESS
from experiments.shown import Drawing, Lines, only
from experiments.steering import FILE, SteeredContext, labelled
from ia_mech.cli import whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, TidyEstimate, all_datasets, by_quantity
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.queries import Query
from ia_mech.steering import ADD, TURN, SteeringVector

if TYPE_CHECKING:
    from torch import Tensor

UNSTEERED, OWN, SIBLING, OTHER = "unsteered", "own", "siblings", "other queries"
LEARNED, RANDOM = (OWN, SIBLING, OTHER), "random"  # what vectors are of
CHOSEN = "chosen layer"
TOKENS = 48  # of a turn that count
BATCH, RATE = 12, 0.1  # contexts of a step of Adam, most change of a unit vector
DOSE = 0.5  # length of a vector while it is learned, in norms of the state that it is added to
UNIT = -1  # of the layer, where nothing is steered
Name = tuple[int, int, str]  # of a vector: the half that learns it, the layer, what it is of


# -- learned ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learning(Unit):
    """A direction to be learned.

    Attributes:
        contexts: each with a turn that is to become likely.
        steps: of Adam, of :data:`BATCH` turns each.
        seed: of the start and the batches, which are alike for all that are compared.
    """

    contexts: tuple[SteeredContext, ...]
    steps: int
    seed: int

    def rows(self, model: Model) -> pd.DataFrame:
        """One row, with the ``direction``."""
        import torch

        with torch.inference_mode(False):  # workers compute in it
            return pd.DataFrame([{"direction": learn(model, self)}])


def learn(model: Model, unit: Learning) -> np.ndarray:
    """``[d_model]`` float32 of length 1: the direction that makes turns likely if states are moved
    along it by :data:`DOSE`. What is minimised is the mean cross-entropy of the turns' tokens.

    The start is the downhill gradient at a dose near 0. After each step of Adam the direction is
    scaled to length 1.
    """
    import torch

    from ia_mech.engine.score import differentiable_logits
    from ia_mech.engine.state import Prefix, prefill_all
    from ia_mech.models.load import text_config

    network = model.subject.model
    prefixes = list(dict.fromkeys(one.prefix for one in unit.contexts))
    groups, order = prefill_all(network, [Prefix(ids) for ids in prefixes], model.on_tokens)
    place = {prefixes[at]: number for number, at in enumerate(order)}
    draw = torch.Generator().manual_seed(unit.seed)

    def cross_entropy(along: "Tensor", dose: float) -> "Tensor":
        """Of a new batch, in nats per token."""
        drawn = torch.randperm(len(unit.contexts), generator=draw)[:BATCH].tolist()
        some = sorted((unit.contexts[i] for i in drawn), key=lambda one: place[one.prefix])
        turns = [t for one in some for t in one.steered_turns(place[one.prefix], along, dose)]
        log = differentiable_logits(network, groups, turns).log_softmax(-1)
        model.on_tokens(sum(one.scored for one in some))
        said = []
        for own, turn in zip(log, turns, strict=True):
            ids = torch.tensor([turn.ids[turn.whole_at :]], device=log.device).T
            said.append(own[turn.whole_at : len(turn.ids)].gather(-1, ids))
        return -torch.cat(said).mean()

    along = torch.randn(text_config(network.config).hidden_size, generator=draw).requires_grad_()
    (uphill,) = torch.autograd.grad(cross_entropy(along, DOSE / 100), along)
    downhill = -uphill if uphill.norm() > 0 else along.detach()
    along = (downhill / downhill.norm()).requires_grad_()
    adam = torch.optim.Adam([along], lr=RATE / len(along) ** 0.5)
    for _ in range(unit.steps):
        adam.zero_grad()
        cross_entropy(along, DOSE).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
    return along.detach().numpy()


class Vectors(Arms):
    """Vectors are learned on half of the queries. Under them greedy turns of the other half are
    written and judged.

    :meth:`read` sets these.

    Attributes:
        layers, positions: where vectors are added.
        taught: of each vector the contexts that it is learned from, each with a turn that is to
            become likely.
        tried: of each half that learns, the other half's contexts, as ``Query.contexts``.
    """

    by = ("layer", "term")
    terms: ClassVar[Sequence[str]]  # what vectors are of
    layers: Sequence[int]
    positions: tuple[str, ...]
    taught: dict[Name, tuple[SteeredContext, ...]]
    tried: list[pd.DataFrame]

    def vector(self, layer: int, direction: np.ndarray, dose: float = DOSE) -> SteeringVector:
        """A direction as what is added after a layer."""
        import torch

        model, along = self.runs[0].model, torch.tensor([*direction], dtype=torch.float32)
        what = ADD, layer, self.positions, along, dose
        return SteeringVector(*what, model["name"], model["weights_hash"])

    def check_layers(self) -> None:
        """Refuse layers or positions that the model lacks."""
        model, names = self.runs[0].model, list(self.runs[0].contexts["positions"].iloc[0])
        for layer in self.layers:
            replace(self.anything, layer=layer).check(model["layers"], model["d_model"], names)

    @cached_property
    def anything(self) -> SteeringVector:
        """A vector after the first layer."""
        return self.vector(self.layers[0], np.ones(self.runs[0].model["d_model"]))

    @cached_property
    def contexts(self) -> pd.DataFrame:
        return pd.concat(self.tried, ignore_index=True)

    # -- measure ----------------------------------------------------------------------------------

    def units(self) -> list[Learning]:
        """All vectors that are learned."""
        found, args = [], self.args
        for (half, *_), some in self.taught.items():
            tokens = sum(len(ids) for ids in {one.prefix for one in some})
            batch = min(BATCH, len(some)) * sum(one.scored for one in some) // len(some)
            tokens += (args.steps + 1) * batch
            found.append(Learning(f"half {half + 1}", "", tokens, some, args.steps, args.seed))
        return found

    def plan(self) -> dict[str, str]:
        vectors = len(self.layers) * len(self.terms)
        more = f"{len(self.contexts)} conversations under each of {vectors} vectors, a greedy turn "
        return super().plan() | {"then to sample": f"{more}after each"}

    @cached_property
    def directions(self) -> dict[Name, np.ndarray]:
        """What is learned."""
        learned = self.measure_units(self.units(), "learning vectors")["direction"]
        return dict(zip(self.taught, learned, strict=True))

    @cached_property
    def vectors(self) -> dict[Name, SteeringVector]:
        """The vectors that greedy turns are written under."""
        return {name: self.vector(name[1], one) for name, one in self.directions.items()}

    def compared(self) -> Iterator[tuple[dict[str, Any], Sequence[Run]]]:
        """The turns as they are, then those of each half under what the other has learned. A
        vector is kept beside its turns."""
        yield {"layer": UNIT, "term": UNSTEERED}, self.runs
        for (half, layer, term), vector in self.vectors.items():
            name = f"layer {layer} {term} {half + 1}"
            folder = self.place(name)
            folder.mkdir(parents=True, exist_ok=True)
            vector.save(folder / FILE)
            settings = {"temperatures": (), "intervention": folder / FILE}
            run = self.sample(name, Arm(conversations_of(self.tried[half]), settings))
            yield {"layer": layer, "term": term}, [run]

    def rows(self) -> pd.DataFrame:
        """A row per arm and query, or turn, of greedy turns."""
        rows = super().rows()
        return rows[rows["temperature"] == 0]


def placed(each: Sequence[TidyEstimate]) -> list[TidyEstimate]:
    """Estimates; those of unsteered turns are of no layer."""
    return [
        replace(one, names=one.names | {"layer": None}) if one.names["layer"] == UNIT else one
        for one in each
    ]


# -- the experiment --------------------------------------------------------------------------------


def parts_of(queries: Sequence[Query], seed: int) -> dict[str, int]:
    """The part of each query by its source, drawn within datasets: 0 and 1 are one half of the
    queries, 2 and 3 the other."""
    order = np.random.default_rng([seed, 3]).permutation(len(queries)).tolist()
    order.sort(key=lambda i: queries[i].dataset)
    return {queries[i].source: 2 * (n % 2) + n // 2 % 2 for n, i in enumerate(order)}


class LearnedVector(Vectors):
    name = "learned_vector"
    siblings = True
    queries_used = 60
    columns: ClassVar = {**Experiment.columns, "layer": "Int64"}
    terms = *LEARNED, RANDOM
    less: ClassVar = {
        "minus unsteered": {"layer": UNIT, "term": UNSTEERED},
        "minus the siblings' vector": {"term": SIBLING},
    }
    title = "greedy follow-ups by the judge, by layer of the vector"
    legend = (
        "Own, siblings, other queries: after whose responses the turns came that a vector was "
        "learned from; p is for these very vectors, over layers."
    )

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add = partial(flag, parser)
        layers = "after which (default: one to seven eighths of them)"
        add("--layers", whole_from(0), None, layers, nargs="+", metavar="L")
        tokens = f"which tokens' states, {TURN}: the turn's (default: all of the header)"
        add("--positions", str, None, tokens, nargs="+", metavar="NAME")
        steps, turns = f"of {BATCH} turns, to learn a vector", "most follow-ups to "
        add("--steps", whole_from(1), 30, steps, metavar="N")
        add("--turns", whole_from(2), 96, f"{turns}learn from, of each half", metavar="N")
        half = "one half learns, the other is measured"
        parser.add_argument("--quick", action="store_true", help=half)

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Find layers, positions, parts (two to a half), and the turns to learn from."""
        first, args = self.runs[0], self.args
        depth = first.model["layers"]
        eighths = {round(depth * eighth / 8) for eighth in range(1, 8)} - {0, depth}
        self.layers = sorted(set(args.layers or eighths))
        names = first.contexts["positions"].iloc[0]
        header = [name for name in names if name.startswith("header_")]
        self.positions = tuple(args.positions or header)
        self.check_layers()
        if (count := len(self.queries)) < 4:
            few = f"{count} queries have several responses: they are dealt to four parts"
            raise UserError(few, "sample more queries")
        self.part = parts_of(self.queries, args.seed)
        halves = [[one for one in self.queries if self.part[one.source] // 2 == n] for n in (0, 1)]
        self.taught, self.tried = {}, []
        for half, queries in enumerate(halves[:1] if args.quick else halves):
            found = self._examples(queries, np.random.default_rng([args.seed, 4, half]))
            if not found:
                raise UserError(
                    f"half {half + 1} of the queries has no sampled follow-up to learn from",
                    "sample more turns (--samples), or more queries",
                )
            for layer, term in product(self.layers, LEARNED):
                some = (replace(one[term], layer=layer) for one in found)
                self.taught[half, layer, term] = tuple(some)
            self.tried.append(pd.concat([query.contexts for query in halves[1 - half]]))
            of = len({one[OWN].source for one in found})
            self.notes.append(f"half {half + 1} learns from {len(found)} turns of {of} queries.")

    def _examples(
        self, queries: Sequence[Query], rng: np.random.Generator
    ) -> list[dict[str, SteeredContext]]:
        """Follow-ups of queries, as many of each query as can be: after the response that each
        followed, after a sibling that is finished like it, and after a response to another query,
        of the same dataset and finished like it where there is one."""
        found: list[tuple[int, dict[str, SteeredContext]]] = []  # how many of its query came before
        for query, turns in labelled(queries, self.verdicts):
            foreign = [one for one in queries if one is not query]
            foreign = [one for one in foreign if one.dataset == query.dataset] or foreign
            kinds, before = list(zip(query.responses, query.complete, strict=True)), len(found)
            for _, turn in turns.sample(frac=1, random_state=rng).iterrows():
                k, ids = turn["followed"], turn["token_ids"].tolist()[:TOKENS]
                text, complete = kinds[k]
                others = [j for j, (t, c) in enumerate(kinds) if t != text and c == complete]
                if turn["label"] == 1 and others and foreign:
                    other = foreign[rng.integers(len(foreign))]
                    alike = np.flatnonzero(np.array(other.complete) == complete)
                    those = alike if len(alike) else np.arange(len(other.contexts))
                    steered = partial(SteeredContext.of, vector=self.anything, turns=(ids,))
                    pairs = {
                        OWN: steered(query, k),
                        SIBLING: steered(query, int(rng.choice(others))),
                        OTHER: steered(other, int(rng.choice(those))),
                    }
                    found.append((len(found) - before, pairs))
        found.sort(key=lambda one: one[0])
        return [pairs for _, pairs in found[: self.args.turns]]

    # -- measure ----------------------------------------------------------------------------------

    @cached_property
    def vectors(self) -> dict[Name, SteeringVector]:
        """The learned vectors, and for each that was learned after own responses a random one, with
        the covariance of the states and nothing of it."""
        found = {}
        for (half, layer, term), direction in self.directions.items():
            found[half, layer, term] = self.vector(layer, direction)
            if term == OWN:
                states = centred_states(self.runs, layer, self.positions)
                (drawn,) = random_directions(states, direction, 1, self.args.seed + half)
                found[half, layer, RANDOM] = self.vector(layer, drawn)
        return found

    # -- estimate ---------------------------------------------------------------------------------

    def family(self, row: TidyEstimate) -> Any:
        """Over layers: each difference and kind of vector is one."""
        return by_quantity(row), row.names["term"]

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        return [*placed(super().estimate(rows)), *self._at_chosen_layer(rows)]

    def _at_chosen_layer(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        """What own responses' vectors have, at a layer chosen by their excess over the control.

        The choice makes the interval too wide where layers don't differ: with seven equal layers
        and no effect, it left out 0 in 0.7% of 600 simulated studies of 60 queries.
        """
        wide = rows.pivot_table(index="source", columns=["term", "layer"], values=EXCESS).dropna()
        own, ranked = wide[OWN], wide[OWN] - wide[SIBLING]
        each = own.sub(wide[UNSTEERED, UNIT], axis=0), ranked
        for words, reported in zip(self.less, each, strict=True):
            found, chosen = self.best_of(ranked, reported, self.part)
            names = {"dataset": ALL, "term": CHOSEN}
            yield TidyEstimate(f"{EXCESS}, {words}", names, len(wide), found)
        self.notes.append(f"chosen layers: {chosen} of the queries.")

    # -- say --------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        return super().tables(found[found["term"] != CHOSEN])

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = all_datasets(only(found[found["term"] != CHOSEN], EXCESS))
        plain = rows.loc[rows["term"] == UNSTEERED, "value"].item()
        title = f"{self.runs[0].model['name']} · greedy turns under learned vectors"
        axis, steered = "follow-ups minus those after siblings", rows[rows["term"] != UNSTEERED]
        words = title, "layer", axis, steered
        return {"layers": Lines(*words, across="layer", levels={UNSTEERED: plain})}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        unsteered, siblings = (only(found, f"{EXCESS}, {less}", term=CHOSEN) for less in self.less)
        return Conclusion(
            self.tested(
                "greedy turns are written under these very vectors, learned once on other queries, "
                f"at {', '.join(self.positions)}; the rate at which they are follow-ups to their "
                "own response rather than to another one, minus that under the control's vector",
                siblings,
                most=1,
            ),
            "The control is a vector that was learned from the same turns, each after another "
            "response to its query. The interval is over queries: vectors learned anew may do "
            "otherwise. "
            f"{self.tested('the same rate, minus that without a vector', unsteered, most=1)} "
            f"{self.gate.short}.",
        )


main = LearnedVector.main

if __name__ == "__main__":
    sys.exit(main())
