"""Likelihoods of given turns, and of the first token, while the model is steered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from experiments.steering.read import Context, Query
from ia_mech.engine.intervene import Intervention, Replace, at_tokens
from ia_mech.likelihood.intervened import Continued
from ia_mech.steering import TURN, SteeringVector

UNSTEERED = "unsteered"
EITHER = 0.5, 2.0  # times a guess: doses of a KL above and below one that is sought


@dataclass(frozen=True, eq=False)
class Arm:
    """A way of changing the model.

    Attributes:
        of: what is done.
        draw: which of several alike, from 0.
        vector: along which the model is steered; None for the model as it is.
        bias: ``[vocab]`` nats, added to the log-probabilities of the turn's first token.
        states: (run, context) → ``[d_model]`` that takes the place of the context's own state at
            the vector's layer and first position; nothing is done along the vector, and contexts
            without a state are left out.
    """

    of: str
    draw: int = 0
    vector: SteeringVector | None = None
    bias: np.ndarray | None = None
    states: Mapping[tuple[int, str], Tensor] | None = None

    @property
    def dose(self) -> float:
        """Of the vector; 0 without one."""
        return 0.0 if self.vector is None else self.vector.dose

    @property
    def key(self) -> list:
        """What its results depend on, as JSON can hold it."""
        bias = None if self.bias is None else [float(x) for x in self.bias]
        states = self.states and [[*of, one.tolist()] for of, one in self.states.items()]
        content = sha256(repr(states).encode()).hexdigest()
        return [self.of, self.draw, self.vector and self.vector.sha256, bias, content]

    def leaves_out(self, context: Context) -> bool:
        """Whether it does nothing with a context."""
        return self.states is not None and (context.run, context.id) not in self.states


@dataclass(frozen=True)
class FirstToken:
    """What is measured of the first token's distribution.

    Attributes:
        rates: ``[vocab]`` the rate of accepted turns that begin with each token; None if unknown.
        ends: ids that end a turn.
    """

    rates: np.ndarray | None
    ends: Sequence[int]

    def measured(self, logprobs: np.ndarray, plain: np.ndarray) -> dict[str, np.ndarray]:
        """Of ``[rows, vocab]`` log-probabilities, and ``[vocab]`` those of the unsteered model:
        ``kl`` from it in nats, ``expected`` rate, and the mass on ``ended``, each ``[rows]``."""
        p = np.exp(logprobs.astype(np.float64))
        unknown = np.full(len(p), np.nan)
        return {
            "kl": (p * (logprobs - plain)).sum(-1).clip(min=0),
            "expected": unknown if self.rates is None else p @ self.rates,
            "ended": p[:, list(self.ends)].sum(-1),
        }


def rates_by_first_token(opened: pd.DataFrame, vocab: int) -> np.ndarray | None:
    """``[vocab]`` share of accepted turns by their first token, shrunk to the mean by one turn."""
    if opened.empty:
        return None
    label, token = opened["label"].to_numpy(), opened["token"].to_numpy()
    counts = np.bincount(token, minlength=vocab)
    return (np.bincount(token, label, minlength=vocab) + label.mean()) / (counts + 1)


def interventions(arm: Arm, context: Context, tokens: int) -> list[Intervention]:
    """What an arm does to a context and ``tokens`` of a turn after it that are computed.

    Raises:
        UserError: the context lacks a position.
    """
    if arm.vector is None or arm.leaves_out(context):
        return []
    if arm.states is not None:
        at = context.places[first_position(arm.vector)]
        assert at is not None  # at_context has refused such a context under another arm
        return [Replace(arm.vector.layer, (at,), arm.states[context.run, context.id][None])]
    end = len(context.ids)
    at_turn = at_tokens(arm.vector.at_turn, range(end, end + tokens))
    return [*arm.vector.at_context(context.places), *at_turn]


def first_position(vector: SteeringVector) -> str:
    """The first of a vector's positions that isn't in the turn."""
    return next(name for name in vector.positions if name != TURN)


def _start(arms: Sequence[Arm], context: Context) -> int:
    """The first token of a context that an arm touches; its last one if none is."""
    end = len(context.ids) - 1
    named = [name for arm in arms if arm.vector for name in arm.vector.positions]
    places = [context.places.get(name) for name in named]
    return min([end, *(at for at in places if at is not None)])


def first_tokens(
    model: PreTrainedModel, context: Context, arms: Sequence[Arm]
) -> tuple[np.ndarray, np.ndarray]:
    """``[arms, vocab]`` log-probabilities of the first token, and ``[vocab]`` without steering."""
    run = Continued(model, context.ids, _start(arms, context), [[0]])
    found = run.first_tokens([[], *(interventions(arm, context, 0) for arm in arms)])
    plain, steered = found[0], found[1:]
    for row, arm in enumerate(arms):
        if arm.bias is not None:
            steered[row] = biased(steered[row], arm.bias)
    return steered, plain


def biased(logprobs: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """``[…, vocab]`` log-probabilities with a bias ``[vocab]`` in nats added, normalised."""
    moved = logprobs.astype(np.float64) + bias
    return moved - np.logaddexp.reduce(moved, axis=-1, keepdims=True)


def steered(
    model: PreTrainedModel, query: Query, arms: Sequence[Arm], token: FirstToken, crossed: bool
) -> pd.DataFrame:
    """Likelihoods of a query's turns under every arm, in nats at T = 1.

    Args:
        model: the subject model.
        query: with contexts and turns.
        arms: ways of changing the model.
        token: what is measured of the first token.
        crossed: whether turns are scored after all of the query's contexts, not their own only.

    Returns:
        A row per arm and turn, without those whose context the arm leaves out: ``of``, ``draw``,
        ``dose``, ``half``, ``turn``, ``followed``, ``label``, ``tokens``; ``logprobs``
        ``[contexts]`` (of one context if not ``crossed``), ``logprob`` and ``plain`` (steered or
        not, in its own context), and ``kl``, ``expected`` and ``ended`` of its own context.
    """
    turns = [turn.ids for turn in query.turns]
    after = np.full((len(arms), len(turns), len(query.contexts)), np.nan)
    plain = np.full(len(turns), np.nan)
    of_context = []
    for k, context in enumerate(query.contexts):
        first, before = first_tokens(model, context, arms)
        of_context.append(token.measured(first, before))
        own = [n for n, turn in enumerate(query.turns) if turn.followed == k]
        here = range(len(turns)) if crossed else own
        run = Continued(model, context.ids, _start(arms, context), turns)
        rows = [(n, interventions(arm, context, len(turns[n]) - 1)) for arm in arms for n in here]
        scores = run.score([*((n, ()) for n in own), *rows])
        plain[own] = [one.sum() for one in scores[: len(own)]]
        sums = [one.sum() for one in scores[len(own) :]]
        after[:, list(here), k] = np.reshape(sums, (len(arms), len(here)))
        for number, arm in enumerate(arms):
            if arm.bias is not None:  # of the first token alone
                opening = [turns[n][0] for n in here]
                moved = first[number, opening] - before[opening]
                after[number, list(here), k] += moved
    found = []
    for number, arm in enumerate(arms):
        for n, turn in enumerate(query.turns):
            if arm.leaves_out(query.contexts[turn.followed]):
                continue
            values = {name: one[number] for name, one in of_context[turn.followed].items()}
            scored = after[number, n]
            found.append(
                {"of": arm.of, "draw": arm.draw, "dose": arm.dose, "half": query.half}
                | {"turn": n, "followed": turn.followed, "label": turn.label}
                | {"tokens": len(turn.ids), "logprobs": scored[~np.isnan(scored)]}
                | {"logprob": scored[turn.followed], "plain": plain[n]}
                | values
            )
    return pd.DataFrame(found)


def divergences(model: PreTrainedModel, query: Query, arms: Sequence[Arm]) -> pd.DataFrame:
    """A row per context and arm: its number, ``arm``, and its ``kl`` at the header in nats."""
    token, found = FirstToken(None, ()), []
    for context in query.contexts:
        kl = token.measured(*first_tokens(model, context, arms))["kl"]
        found += [{"arm": number, "kl": value} for number, value in enumerate(kl)]
    return pd.DataFrame(found)


def of_equal_kl(
    arms: Sequence[Arm], kl: float, kl_of: Callable[[Sequence[Arm]], np.ndarray]
) -> list[Arm]:
    """The arms with doses, or biases scaled, so that their mean KL at the header is this one.

    Doses are doubled or halved until one KL lies above and one below, and interpolated on a log
    scale between them; so the KL that they then have is near to what was wanted, and is reported.

    Args:
        arms: with a first guess of the dose. Arms whose KL can't be reached are left out.
        kl: in nats.
        kl_of: the mean KL of each of some arms.
    """
    scale = np.ones(len(arms))
    known: list[dict[float, float]] = [{} for _ in arms]
    for _ in range(8):
        unknown = [n for n, one in enumerate(known) if scale[n] not in one]
        if not unknown:
            break
        tried = [scaled(arms[n], scale[n]) for n in unknown]
        for n, value in zip(unknown, kl_of(tried), strict=True):
            known[n][float(scale[n])] = float(value)
            below, above = (min(known[n].values()) < kl), (max(known[n].values()) >= kl)
            if not (below and above):
                scale[n] *= EITHER[0] if above else EITHER[1]
    found = []
    for arm, one in zip(arms, known, strict=True):
        values = sorted(one.items(), key=lambda pair: pair[1])
        logs = np.log([max(value, 1e-9) for _, value in values])
        if min(one.values()) < kl <= max(one.values()):
            at = np.interp(np.log(kl), logs, np.log([size for size, _ in values]))
            found.append(scaled(arm, float(np.exp(at))))
    return found


def scaled(arm: Arm, by: float) -> Arm:
    """An arm with its dose and its bias multiplied."""
    vector = arm.vector and replace(arm.vector, dose=arm.vector.dose * by)
    return replace(arm, vector=vector, bias=None if arm.bias is None else arm.bias * by)
