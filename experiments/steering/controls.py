"""What a direction is compared with: other directions of the same effect on the next token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from experiments.steering.read import Context, Query, Read
from experiments.steering.steer import Arm, FirstToken, first_position, first_tokens
from ia_mech.chat.format import ChatFormat
from ia_mech.errors import UserError
from ia_mech.likelihood.intervened import Continued
from ia_mech.run import Run
from ia_mech.steering import SteeringVector
from probes.card import Probe, directions
from probes.targets import Outcome

RANDOM = "random direction"
LAYER = "another layer"
WITHOUT = "without length, topic and first token"
SHUFFLED = "probe of shuffled labels"
BIAS = "bias of the first token"
PROMPT = "a prompt"
ALIKE = (RANDOM, LAYER, WITHOUT, SHUFFLED, BIAS)  # of equal KL
HIGH, LOW = "state of a high score", "state of another low score"
PATCHED = (HIGH, LOW)  # put into contexts of a low score
DONORS = 5  # to each of them
SHUFFLES = 5
TOPICS = 5  # directions along which the means of sources differ most
ASKING = "When it is the user's turn, the user asks a follow-up question about the last response."


def states(runs: Sequence[Run], read: Read, vector: SteeringVector) -> np.ndarray:
    """``[contexts, d_model]`` of all contexts, at the first position where the vector is added.

    Raises:
        UserError: a run doesn't keep the states there, or lacks the position.
    """
    position = first_position(vector)
    found = []
    for number, run in enumerate(runs):
        if position not in run.positions:
            raise UserError(
                f"{run.path} keeps no states at {position}, which controls are drawn from",
                f"sample it again with --positions {position}, or give --controls 0",
            )
        found.append(run.residuals(vector.layer, position).double().numpy())
        assert len(found[-1]) == (read.contexts["run"] == number).sum()
    return np.concatenate(found)


def random_arms(x: np.ndarray, like: Arm, count: int, seed: int) -> list[Arm]:
    """Directions drawn from a normal distribution with the covariance of ``x`` ``[contexts, d]``,
    whose rows are centred."""
    rng = np.random.default_rng([seed, 24])
    drawn = rng.standard_normal((count, len(x))) @ x
    return [along(like, RANDOM, one, number) for number, one in enumerate(drawn)]


def along(like: Arm, of: str, direction: np.ndarray, draw: int = 0) -> Arm:
    """An arm that steers along another direction, ``[d]``."""
    assert like.vector is not None
    vector = replace(like.vector, direction=torch.from_numpy(direction).float())
    return Arm(of, draw, vector)


def without_known(x: np.ndarray, read: Read, like: Arm) -> Arm:
    """The direction without what goes along with lengths, topic and the first token's rate.

    Taken out are the covariances of the states with the logarithms of the lengths of query and
    response and with the ``expected`` rate of the first token (where it is known), and the first
    :data:`TOPICS` principal directions of the means of the sources.
    """
    assert like.vector is not None
    frame = read.contexts.reset_index(drop=True)
    known = [np.log1p(frame[name].to_numpy(float)) for name in ("prompt_tokens", "response_tokens")]
    if "expected" in frame:
        known.append(frame["expected"].fillna(frame["expected"].mean()).to_numpy())
    lines = [(one - one.mean()) @ x for one in known]
    means = pd.DataFrame(x).groupby(frame["source"].to_numpy()).mean().to_numpy()
    lines += list(np.linalg.svd(means - means.mean(0), full_matrices=False)[2][:TOPICS])
    kept = [line / np.linalg.norm(line) for line in lines if np.linalg.norm(line) > 0]
    basis = np.linalg.qr(np.stack(kept, axis=1))[0]  # [d, lines]
    own = like.vector.direction.double().numpy()
    return along(like, WITHOUT, own - basis @ (basis.T @ own))


def shuffled_arms(
    x: np.ndarray, read: Read, like: Arm, probe: Probe, name: str, seed: int
) -> list[Arm]:
    """Probes that are fitted as this one was, to the outcomes of other contexts; none where all
    outcomes are alike."""
    frame = read.contexts.reset_index(drop=True)
    there = (frame["trials"] > 0).to_numpy()
    rows = frame[there]
    if (rows["positives"] / rows["trials"]).nunique() < 2:
        return []
    rng = np.random.default_rng([seed, 25])
    found = []
    for number in range(SHUFFLES):
        order = rng.permutation(len(rows))
        k, n = (rows[column].to_numpy()[order] for column in ("positives", "trials"))
        outcome = Outcome.of(k, n, rows["source"], rows["run"])
        fitted = directions(x[there], outcome, float(probe.card.get("penalty", 1.0)))
        found.append(along(like, SHUFFLED, fitted[name].weights.astype(float), number))
    return found


def patched_arms(x: np.ndarray, read: Read, like: Arm, seed: int) -> list[Arm]:
    """States of other sources in place of those of contexts with a low score.

    A context's score is the product of its state and the direction. It is low below the median of
    all contexts, and high in the highest quarter.

    Args:
        x: ``[contexts, d_model]``.
        read: of these contexts.
        like: an arm that steers along the direction.
        seed: of the donors.

    Returns:
        :data:`DONORS` arms with states of high scores, and as many with states of low ones.
    """
    assert like.vector is not None
    vector = replace(like.vector, dose=0.0)  # where, and nothing is added
    score = x @ like.vector.direction.double().numpy()
    low, high = score < np.median(score), score >= np.quantile(score, 0.75)
    source = read.contexts["source"].to_numpy()
    used = {(context.run, context.id) for query in read.queries for context in query.contexts}
    keys = list(zip(read.contexts["run"], read.contexts["context_id"], strict=True))
    receivers = [i for i in np.flatnonzero(low) if keys[i] in used]
    found = []
    for number, (of, those) in enumerate(((HIGH, high), (LOW, low))):
        rng = np.random.default_rng([seed, 26, number])
        for draw in range(DONORS):
            moved = {}
            for i in receivers:
                donors = np.flatnonzero(those & (source != source[i]))
                if len(donors):
                    moved[keys[i]] = torch.from_numpy(x[rng.choice(donors)]).float()
            found.append(Arm(of, draw, vector, states=moved))
    return found


def other_layer(like: Arm, layers: int) -> Arm:
    """The same direction a third of the depth away, later if there are layers."""
    assert like.vector is not None
    step = max(1, layers // 3)
    layer = like.vector.layer + step
    if layer > layers - 1:  # what follows the last block is the next token alone
        layer = max(0, like.vector.layer - step)
    return Arm(LAYER, 0, replace(like.vector, layer=layer))


def first_token_bias(model: PreTrainedModel, queries: Sequence[Query], like: Arm) -> Arm:
    """The mean change of the first token's log-probabilities, without the direction."""
    changes = []
    for query in queries:
        for context in query.contexts:
            steered, plain = first_tokens(model, context, [like])
            changes.append(steered[0].astype(np.float64) - plain)
    return Arm(BIAS, bias=np.mean(changes, axis=0))


def asked(chat: ChatFormat, context: Context) -> Context:
    """The context with a system message that says what the user does.

    Raises:
        UserError: the template has no system message.
    """
    messages = [dict(message) for message in context.messages]
    if messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n{ASKING}"
    else:
        messages.insert(0, {"role": "system", "content": ASKING})
    made = chat.context(messages)
    return replace(
        context, ids=tuple(made.ids), places=dict(made.positions), messages=tuple(messages)
    )


def prompted(
    model: PreTrainedModel, chat: ChatFormat, query: Query, token: FirstToken
) -> pd.DataFrame:
    """Likelihoods of a query's turns after contexts that :func:`asked` makes; columns as of
    :func:`experiments.steering.steer.steered`."""
    found = []
    for k, context in enumerate(query.contexts):
        changed = asked(chat, context)
        own = [n for n, turn in enumerate(query.turns) if turn.followed == k]
        turns = [query.turns[n].ids for n in own]
        _, plain = first_tokens(model, context, [])
        _, first = first_tokens(model, changed, [])
        values = {name: one[0] for name, one in token.measured(first[None], plain).items()}
        before, after = (
            Continued(model, one.ids, len(one.ids) - 1, turns).score(
                [(n, ()) for n in range(len(turns))]
            )
            for one in (context, changed)
        )
        for n, a, b in zip(own, before, after, strict=True):
            turn = query.turns[n]
            found.append(
                {"of": PROMPT, "draw": 0, "dose": 0.0, "half": query.half, "turn": n}
                | {"followed": k, "label": turn.label, "tokens": len(turn.ids)}
                | {"logprobs": b.sum()[None], "logprob": b.sum(), "plain": a.sum()}
                | values
            )
    return pd.DataFrame(found)
