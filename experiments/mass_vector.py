"""Does a vector at the user header that raises the follow-up mass change the greedy turn, too?

``ia-mech mass`` tells which first tokens of a user turn lead to a follow-up. On half of the
queries, the command learns by gradient a vector that makes these tokens likely. The vector is added
to the state of the header's last token after one layer. On the other half, the mass of the same
tokens is measured under the vector, and greedy turns are written and judged. Then the halves change
places. The control is a vector learned in the same way from labels that were permuted within each
conversation. Each vector has the dose at which its KL at the header is --kl on 24 conversations of
the half that learned it. Intervals are over queries, for these very vectors. Each layer is a
command of its own (with its own --out); p values of several aren't corrected together.

Needs: ``ia-mech mass`` of each run by the same judge, and a model whose passes have gradients.
Cost: minutes (135M, two cores), and two greedy turns after each conversation.

    ia-mech mass cache/RUN
    ia-mech mass-vector cache/RUN --layer 15
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
from scipy.special import log_softmax

from experiments.arms import Arm, conversations_of
from experiments.control import halves_of
from experiments.experiment import Conclusion, Model, Unit, flag
from experiments.grid import TEMPERATURE
from experiments.judged import Arms
from experiments.mass import SHARE
from experiments.outcome import IN_ROLE, RATE
from experiments.shown import Bars, Drawing, only, tables_of, told
from experiments.steering import FILE, SteeredContext, dosing
from ia_mech.cli import above_zero, whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, all_datasets, holm_corrected
from ia_mech.results import Table, folder_of
from ia_mech.run import Run
from ia_mech.steering import ADD, SteeringVector
from probes.dataset import masses_of
from probes.targets import MASS

if TYPE_CHECKING:
    from torch import Tensor

VECTORS = LEARNED, PERMUTED = "follow-ups", "permuted labels"  # what they are of
UNSTEERED = "unsteered"
OF_MASS, GREEDY, GREEDY_ROLE, KL = (
    "follow-up mass",
    "greedy follow-ups",
    "greedy in role",
    "KL at the header",
)
SHARES = OF_MASS, GREEDY, GREEDY_ROLE
COMPARED, ALONE = dict.fromkeys(SHARES, (0.0, 1.0)), {KL: (0.0, np.inf)}
DRAWN = 8  # first tokens of a context to learn from, drawn by their probability
DOSED = 24  # contexts, at most, drawn to seek a dose on
BATCH, CHANGE = 12, 0.1  # first tokens of a step of Adam, most change of a unit vector
DOSE = 0.5  # length of a vector while it is learned, in norms of the state that it is added to
Name = tuple[int, str]  # of a vector: the half that learns it, and what it is of


@dataclass(frozen=True, kw_only=True)
class FirstTokens(SteeredContext):
    """A context, whose turn doesn't matter, with those of its first tokens whose turn was assessed.

    Attributes:
        context_id: its name.
        firsts, p: ids of first tokens, and the probability of each.
        follow_up: of each, 1 if it leads to a follow-up, else 0.
        temperature: of the first token.
    """

    context_id: str
    firsts: tuple[int, ...]
    p: tuple[float, ...]
    follow_up: tuple[float, ...]
    temperature: float

    @property
    def teaches(self) -> bool:
        """Whether some of its first tokens lead to follow-ups, and others don't."""
        return 0 < sum(self.follow_up) < len(self.follow_up)

    def drawn(self, permuted: bool, rng: np.random.Generator) -> list[SteeredContext]:
        """The context with first tokens that lead to follow-ups, drawn by their probability, each
        perhaps several times; or, permuted, with as many that labels drawn at random say so of."""
        labels = rng.permutation(self.follow_up) if permuted else self.follow_up
        held = np.array(self.p) * labels
        tokens = rng.choice(self.firsts, DRAWN, p=held / held.sum()).tolist()
        return [replace(self, turns=((token,),)) for token in tokens]

    def rows(self, model: Model) -> pd.DataFrame:
        """A row without a direction, and one under each: the mass, and the KL."""
        _, log, kl = self.scores(model.after([self.prefix]))
        p = np.exp(log_softmax(log / self.temperature, axis=1)[:, list(self.firsts)])
        mass = (p @ np.array(self.follow_up)).clip(0, 1)  # rounding
        names = {"draw": range(len(log)), "context_id": self.context_id}
        return pd.DataFrame(names | {OF_MASS: mass, KL: kl})


# -- learned ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learning(Unit):
    """A direction to be learned.

    Attributes:
        contexts: each with a turn of one token, which is to become likely.
        steps: of Adam, of :data:`BATCH` tokens each.
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
    """``[d_model]`` float32 of length 1: the direction that makes tokens likely if states are moved
    along it by :data:`DOSE`. What is minimised is the tokens' mean cross-entropy.

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
        said = [own[turn.whole_at, turn.ids[-1]] for own, turn in zip(log, turns, strict=True)]
        return -torch.stack(said).mean()

    along = torch.randn(text_config(network.config).hidden_size, generator=draw).requires_grad_()
    (uphill,) = torch.autograd.grad(cross_entropy(along, DOSE / 100), along)
    downhill = -uphill if uphill.norm() > 0 else along.detach()
    along = (downhill / downhill.norm()).requires_grad_()
    adam = torch.optim.Adam([along], lr=CHANGE / len(along) ** 0.5)
    for _ in range(unit.steps):
        adam.zero_grad()
        cross_entropy(along, DOSE).backward()
        adam.step()
        with torch.no_grad():
            along /= along.norm()
    return along.detach().numpy()


# -- the experiment --------------------------------------------------------------------------------


class MassVector(Arms):
    """Vectors are learned on half of the queries. Under them greedy turns of the other half are
    written and judged.

    :meth:`read` sets these.

    Attributes:
        layer: after which vectors are added.
        halves: of each half of the queries the contexts.
        taught: of each vector the contexts that it is learned from, each with a token that is to
            become likely.
        tried: of each half that learns, the other half's contexts, as ``Query.contexts``.
    """

    name = "mass_vector"
    queries_used = 60
    by = ("term",)
    positions = ("header_last",)
    shares = SHARES
    layer: int
    halves: list[list[FirstTokens]]
    taught: dict[Name, tuple[SteeredContext, ...]]
    tried: list[pd.DataFrame]
    less: ClassVar = {
        "minus permuted": {"term": PERMUTED},
        "minus unsteered": {"term": UNSTEERED},
    }
    columns: ClassVar[Mapping[str, str]] = {"dataset": "str", "term": "str"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add = partial(flag, parser)
        after = "after which vectors are added (default: the middle one)"
        add("--layer", whole_from(0), None, after, metavar="L")
        add("--steps", whole_from(1), 30, f"of {BATCH} tokens, to learn a vector", metavar="N")
        add("--kl", above_zero, 0.1, "at the header under every vector, in nats", metavar="NATS")
        add("--temperature", above_zero, TEMPERATURE, "of the first token", metavar="T")

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        """Find the layer, and the first tokens of each context of both halves."""
        model, seed = self.runs[0].model, self.args.seed
        names = list(self.runs[0].contexts["positions"].iloc[0])
        middle = model["layers"] // 2
        self.layer = middle if self.args.layer is None else self.args.layer
        some_vector = self.vector(np.ones(model["d_model"]))
        some_vector.check(model["layers"], model["d_model"], names)
        of = halves_of((query.source for query in self.queries), seed)
        each = list(self._first_tokens(some_vector))
        self.halves = [[one for one in each if of[one.source] == half] for half in (0, 1)]
        self.taught = {}
        for half, own in enumerate(self.halves):
            some = [one for one in own if one.teaches]
            if not some:
                raise UserError(
                    f"half {half + 1} of the queries has no conversation of which some first "
                    "tokens lead to follow-ups, and others don't",
                    "measure the mass of more queries: ia-mech mass with --queries",
                )
            for term in VECTORS:
                rng = np.random.default_rng([seed, 5, half])
                drawn = (context for one in some for context in one.drawn(term == PERMUTED, rng))
                self.taught[half, term] = tuple(drawn)
        contexts = pd.concat([query.contexts for query in self.queries])
        contexts.index = pd.MultiIndex.from_frame(contexts[["dataset", "context_id"]])
        keys = [[(one.dataset, one.context_id) for one in own] for own in self.halves]
        self.tried = [contexts.loc[those].reset_index(drop=True) for those in keys[::-1]]

    def _first_tokens(self, vector: SteeringVector) -> Iterator[FirstTokens]:
        """Contexts with their first tokens, steered where a vector says; of each run those of its
        own, as ``ia-mech mass`` of several runs writes all of them to the first one."""
        places = {
            (row.run, row.dataset, row.context_id): (query, row.Index)
            for query in self.queries
            for row in query.contexts.itertuples()
        }
        for run in self.runs:
            masses_of(run, self.gate.judge)  # refuses what isn't there
            found = pd.read_parquet(folder_of(run.path, MASS) / "first_tokens.parquet")
            assessed = found[found[SHARE].notna()]
            for key, own in assessed.groupby(["dataset", "context_id"], sort=False):
                if place := places.get((str(run.path), *key)):
                    yield FirstTokens.of(
                        *(*place, vector, ((0,),)),
                        context_id=key[1],
                        firsts=tuple(own["token"].tolist()),
                        p=tuple(own["p"].tolist()),
                        follow_up=tuple(own[SHARE].tolist()),
                        temperature=self.args.temperature,
                    )

    def vector(self, direction: np.ndarray, dose: float = 1.0) -> SteeringVector:
        """A direction as what is added."""
        import torch

        model, along = self.runs[0].model, torch.tensor([*direction], dtype=torch.float32)
        what = ADD, self.layer, self.positions, along, dose
        return SteeringVector(*what, model["name"], model["weights_hash"])

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
        more = f"{len(self.contexts)} conversations, a greedy turn after each, under two vectors"
        return super().plan() | {"then to sample": more}

    @cached_property
    def directions(self) -> dict[Name, np.ndarray]:
        """What is learned."""
        learned = self.measure_units(self.units(), "learning vectors")["direction"]
        return dict(zip(self.taught, learned, strict=True))

    @cached_property
    def vectors(self) -> dict[Name, SteeringVector]:
        """The learned vectors, each with the dose at which it has the KL in some contexts of the
        half that learned it."""
        searches = []
        for half, own in enumerate(self.halves):
            drawn = np.random.default_rng([self.args.seed, 6, half]).permutation(len(own))[:DOSED]
            some = [own[at] for at in sorted(drawn)]
            along = [self.directions[half, term] for term in VECTORS]
            searches.append(dosing(f"half {half + 1}", some, along, self.args.kl))
        doses = self.measure_units(searches, "doses of one KL")["dose"].tolist()
        if np.isnan(doses).any():
            raise UserError(
                f"no dose has a KL of {self.args.kl:g} after layer {self.layer}",
                "give another --kl, or --layer",
            )
        pairs = zip(self.directions.items(), doses, strict=True)
        return {name: self.vector(direction, dose) for (name, direction), dose in pairs}

    def compared(self) -> Iterator[tuple[dict[str, Any], Sequence[Run]]]:
        """The turns as they are, then those of each half under what the other has learned. A
        vector is kept beside its turns."""
        yield {"term": UNSTEERED}, self.runs
        for (half, term), vector in self.vectors.items():
            name = f"layer {self.layer} {term} {half + 1}"
            folder = self.place(name)
            folder.mkdir(parents=True, exist_ok=True)
            vector.save(folder / FILE)
            settings = {"temperatures": (), "intervention": folder / FILE}
            run = self.sample(name, Arm(conversations_of(self.tried[half]), settings))
            yield {"term": term}, [run]

    def rows(self) -> pd.DataFrame:
        """A row per context without a vector, and under each."""
        greedy, tried = super().rows().rename(columns={RATE: GREEDY, IN_ROLE: GREEDY_ROLE}), []
        for half in (0, 1):
            own = [self.vectors[half, term] for term in VECTORS]
            what = [one.direction.tolist() for one in own], [one.dose for one in own]
            tried += [one.under(*what) for one in self.halves[1 - half]]
        found = self.measure_units(tried, "masses under vectors")
        found["term"] = found.pop("draw").map(dict(enumerate((UNSTEERED, *VECTORS))))
        keys = ["term", "dataset", "context_id"]
        those = greedy.loc[greedy["temperature"] == 0, [*keys, GREEDY, GREEDY_ROLE]]
        return found.merge(those, on=keys, how="left", validate="one_to_one")

    # -- estimate ---------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        rows = rows.assign(**{KL: rows[KL].where(rows["term"] != UNSTEERED)})
        found = [
            row
            for row in self.compare(rows, COMPARED)
            if row.names["term"] != UNSTEERED or row.quantity in COMPARED
        ]
        return [*holm_corrected(found), *self.compare(rows, ALONE, less={})]

    # -- say --------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        made = []
        for title, quantities, more in (
            ("the mass of first tokens under a vector", SHARES[:1], {KL: (KL, 2)}),
            ("greedy turns under a vector", SHARES[1:], {}),
        ):
            columns = [item for one in quantities for item in self.columns_of(one, one).items()]
            made += tables_of(
                f"{title} after layer {self.layer} ({self.intervals})",
                found,
                dict(columns) | more,
                index=("term",),
                rows="conversations",
                legend="The vectors were learned on the other half of the queries. Minus: paired "
                "by query; p is for these very vectors, Holm-corrected over those of a column.",
            )
        return made

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = all_datasets(found)
        shown = rows[rows["quantity"].isin(SHARES)]
        title = f"{self.runs[0].model['name']}, T = {self.args.temperature:g}"
        title += f", after layer {self.layer}"
        return {"moved": Bars(title, "share (0 to 1)", shown, names="quantity", by="term")}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        whole = all_datasets(found)

        def moved(what: str, quantity: str) -> str:
            learned, permuted, without = (
                told(whole, quantity, term=term) for term in (LEARNED, PERMUTED, UNSTEERED)
            )
            apart = told(whole, f"{quantity}, minus permuted", "+.2f", term=LEARNED)
            return (
                f"{what} is {learned} under the vector, {permuted} under the control and "
                f"{without} without one (vector minus control {apart})"
            )

        kl = only(whole, KL)["value"]
        return Conclusion(
            f"On queries that a vector wasn't learned from, {moved('the follow-up mass', OF_MASS)}."
            f" {moved('The rate at which greedy turns are follow-ups', GREEDY)}.",
            f"The control is learned from first tokens with permuted labels; the KL at "
            f"the header is {kl.min():.2f} to {kl.max():.2f} nats under the vectors. "
            f"{moved('In role, the share of greedy turns', GREEDY_ROLE)}. {self.gate.short}.",
        )


main = MassVector.main

if __name__ == "__main__":
    sys.exit(main())
