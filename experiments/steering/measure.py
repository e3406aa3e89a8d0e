"""Scores under arms and under controls; what was scored is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.given_turns import computed_for_each
from experiments.steering.analyse import ARM, by_context
from experiments.steering.controls import (
    ASKING,
    first_token_bias,
    other_layer,
    patched_arms,
    prompted,
    random_arms,
    shuffled_arms,
    without_known,
)
from experiments.steering.read import CHOOSING, Query, Read
from experiments.steering.steer import (
    UNSTEERED,
    Arm,
    FirstToken,
    divergences,
    of_equal_kl,
    steered,
)
from ia_mech.chat.format import ChatFormat
from ia_mech.engine.capture import find_blocks
from ia_mech.models.load import Subject
from probes.card import Probe

PARTS = "parts"


@dataclass(frozen=True)
class Scorer:
    """Scores the turns of queries.

    Attributes:
        subject: the model.
        chat: its format.
        token: what is measured of the first token.
        folder: where scores are kept.
    """

    subject: Subject
    chat: ChatFormat
    token: FirstToken
    folder: Path

    def steered(self, queries: Sequence[Query], arms: Sequence[Arm], crossed: bool) -> pd.DataFrame:
        """:func:`experiments.steering.steer.steered` of all queries."""

        def compute(query: Query) -> pd.DataFrame:
            return steered(self.subject.model, query, arms, self.token, crossed)

        return self._kept(queries, "steering", [crossed, [arm.key for arm in arms]], compute)

    def prompted(self, queries: Sequence[Query]) -> pd.DataFrame:
        """:func:`experiments.steering.controls.prompted` of all queries."""

        def compute(query: Query) -> pd.DataFrame:
            return prompted(self.subject.model, self.chat, query, self.token)

        return self._kept(queries, "with a prompt", [ASKING], compute)

    def kl(self, queries: Sequence[Query], arms: Sequence[Arm]) -> np.ndarray:
        """``[arms]`` KL at the header in nats, the mean over all contexts of the queries."""

        def compute(query: Query) -> pd.DataFrame:
            return divergences(self.subject.model, query, arms)

        what = ["kl", [arm.key for arm in arms]]
        found = self._kept(queries, "doses of equal KL", what, compute)
        return found.groupby("arm")["kl"].mean().to_numpy()

    def _kept(
        self,
        queries: Sequence[Query],
        phase: str,
        what: list,
        compute: Callable[[Query], pd.DataFrame],
    ) -> pd.DataFrame:
        rates = None if self.token.rates is None else self.token.rates.tolist()

        def key(query: Query) -> list:
            contexts = [[context.ids, context.places] for context in query.contexts]
            turns = [[turn.ids, turn.followed, str(turn.label)] for turn in query.turns]
            identity = [self.subject.weights_hash, query.source, query.half, contexts, turns]
            return [*identity, rates, *what]

        return computed_for_each(queries, phase, self.folder / PARTS, key, compute)


def controls_of(
    chosen: Sequence[Arm],
    scorer: Scorer,
    x: np.ndarray,
    given: Read,
    rows: pd.DataFrame,
    probe: tuple[Probe, str] | None,
    count: int,
    seed: int,
) -> tuple[list[Arm], int]:
    """What the chosen doses are compared with.

    Args:
        chosen: doses of the direction, the first one above 0.
        scorer: with the model.
        x: of :func:`experiments.steering.controls.states`.
        given: the queries and contexts.
        rows: scores under the arms.
        probe: that the direction is of, and which of its directions; None of another one.
        count: of random directions.
        seed: of all that is drawn.

    Returns:
        Random directions of the KL that each chosen dose has in the choosing half; for the first
        dose all other controls of this KL, and patched arms. And how many arms are left out since
        they don't reach their KL.
    """
    model = scorer.subject.model
    queries = [query for query in given.queries if query.half == CHOOSING]
    means = pd.DataFrame(x).groupby(given.contexts["run"].to_numpy()).transform("mean")
    centred = x - means.to_numpy()
    first = chosen[0]
    sets = [random_arms(centred, arm, count, seed) for arm in chosen]
    sets[0] += [
        other_layer(first, len(find_blocks(model))),
        without_known(centred, _with_expected(given, rows), first),
        first_token_bias(model, queries, first),
    ]
    if probe is not None:
        sets[0] += shuffled_arms(centred, given, first, *probe, seed)
    kl = by_context(rows[rows["half"] == CHOOSING]).groupby(ARM)["kl"].mean()
    found: list[Arm] = []
    for arm, others in zip(chosen, sets, strict=True):
        wanted = float(kl[arm.of, arm.draw, arm.dose])
        found += of_equal_kl(others, wanted, partial(scorer.kl, queries))
    left = sum(map(len, sets)) - len(found)
    return [*found, *patched_arms(x, given, first, seed)], left


def _with_expected(given: Read, rows: pd.DataFrame) -> Read:
    """The contexts with the ``expected`` rate of the unsteered model, where it was computed."""
    plain = rows[rows["of"] == UNSTEERED].drop_duplicates(["source", "followed"])
    if plain["expected"].isna().any():
        return given
    of = {}
    contexts = {query.source: query.contexts for query in given.queries}
    for source, k, value in zip(plain["source"], plain["followed"], plain["expected"], strict=True):
        of[contexts[source][k].run, contexts[source][k].id] = value
    pairs = zip(given.contexts["run"], given.contexts["context_id"], strict=True)
    expected = [of.get(pair, np.nan) for pair in pairs]
    return replace(given, contexts=given.contexts.assign(expected=expected))
