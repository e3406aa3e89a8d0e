"""Synthetic runs with a known truth, to check what ``ia-mech probes`` claims.

No model is behind them: model, dataset and judge are all named "planted". A plan's ``seed`` makes
a *world* (means, noise covariance, lens, direction), and its ``draw`` draws contexts from it. The
AUROC of a fixed direction over all contexts of a world is known (:func:`true_auroc`).
"""

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from scipy.optimize import brentq
from scipy.special import expit, logsumexp, ndtr
from scipy.stats import beta, norm

from ia_mech import __version__
from ia_mech.chat.template import message
from ia_mech.collect.rows import entropy
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import BUILT_IN, FOLLOW_UP, VERSION
from ia_mech.judge.verdict import Verdict, identity_hash
from ia_mech.lens import Lens
from ia_mech.run import Run, RunWriter, layout
from ia_mech.run.labels import KEY
from ia_mech.settings import Settings

NAME = "planted"
GAUSSIAN = ("signal", "none", "output-common", "output-rare")  # true_auroc has a closed form
SIGNALS = (*GAUSSIAN, "topic")
COMMON_TOKEN, RARE_TOKEN = 20, 21  # of every lens

_CONTENT = ("query_end", "response_end")  # text; the other positions are the template's own tokens
_TAIL = ("turn_end", "turn_separator", "header_0", "header_1", "header_last")
_LAST = "header_last"
_GROWTH = 0.15  # noise variance that a block adds, per dimension; the embeddings' is 1
_SIGNAL = 2.0  # standard deviation of the signal along its direction, relative to the noise there
_TOPICS, _TOPIC_SIZE = 12, 4.0  # how many, length of their vectors; noise deviates by about 1.3
_GRID = np.linspace(-8, 8, 401)  # of a standard normal variable, with the mass of each point
_MASS = norm.pdf(_GRID) / norm.pdf(_GRID).sum()

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_WORDS = [a + b for a in _SYLLABLES for b in _SYLLABLES]
_COMMON_WORDS, _TOPIC_WORDS = 200, 15  # the first words are common, each topic has its own
_OPENERS = ("Sure", "Well", "First", "Yes", "Okay", "Maybe")  # no two begin alike
_END, _START, _NEWLINE, _USER, _ASSISTANT, _FIRST_OPENER, _FIRST_WORD = 1, 2, 3, 4, 5, 8, 16
_TAIL_IDS = [_END, _NEWLINE, _START, _USER, _NEWLINE]


@dataclass(frozen=True)
class Plan:
    """All that decides a planted run.

    Attributes:
        kind: where rates can be read from. ``signal``: a direction at one position, from one layer
            on. ``none``: nowhere. ``output-common``, ``output-rare``: only the logit of one token,
            often or never sampled. ``topic``: the text, and with it the states of all positions.
        per_source: contexts of a source; they share the rate, and the topic.
        samples: turns per context and temperature.
        layers: blocks; layer 0 are the embeddings.
        positions: those kept, ``header_last`` among them.
        oracle_auroc: probability that a positive turn's latent z is above a negative one's, within
            (0.5, 1).
        prevalence: mean rate, within (0, 1).
        seed: of the world.
        draw: which contexts of the world.
    """

    kind: str
    contexts: int = 300
    per_source: int = 1
    samples: int = 8
    temperatures: tuple[float, ...] = (1.0,)
    layers: int = 7
    d_model: int = 64
    vocab: int = 256
    positions: tuple[str, ...] = ("query_end", "response_end", "turn_end", "header_last")
    informative_layer: int = 4
    informative_position: str = "header_last"
    oracle_auroc: float = 0.75
    prevalence: float = 0.3
    seed: int = 0
    draw: int = 0

    def __post_init__(self) -> None:
        for name, right in {
            "kind": self.kind in SIGNALS,
            "positions": {_LAST} <= {*self.positions} <= {*_CONTENT, *_TAIL},
            "informative_layer": 1 <= self.informative_layer <= self.layers,
            "informative_position": self.informative_position in self.positions,
            "oracle_auroc": 0.5 < self.oracle_auroc < 1,
            "prevalence": 0 < self.prevalence < 1,
        }.items():
            if not right:
                raise ValueError(f"a plan can't have {name} {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class Planted:
    """What was planted.

    Attributes:
        plan: of it.
        residuals: ``[layers + 1, contexts, positions, d_model]`` float32.
        z: ``[contexts]`` the latent that the rates are a rising function of.
        rates: ``[contexts]`` probability of a positive turn.
        turns: ``[contexts, temperatures × samples]`` whether a turn is positive.
        sources: ``[contexts]`` numbered from 0.
        topics: ``[contexts]`` numbered from 0; -1 except for the kind "topic".
        lens: from the last layer to logits.
        direction: ``[d_model]`` unit vector that z is added along, where the kind has one.
        slopes: ``[layers + 1, positions, d_model]`` what one unit of z adds.
        variances: ``[layers + 1, positions]`` of the noise, in units of ``covariance``.
        covariance: ``[d_model, d_model]`` of embedding noise; its mean variance is 1.
    """

    plan: Plan
    residuals: np.ndarray
    z: np.ndarray
    rates: np.ndarray
    turns: np.ndarray
    sources: np.ndarray
    topics: np.ndarray
    lens: Lens
    direction: np.ndarray
    slopes: np.ndarray
    variances: np.ndarray
    covariance: np.ndarray

    @property
    def positives(self) -> np.ndarray:
        """``[contexts]`` positive turns, of all temperatures."""
        return self.turns.sum(axis=1)

    @property
    def weights_hash(self) -> str:
        """The run's name for its model's weights, of which there is only the lens."""
        tensors = (self.lens.norm_weight, self.lens.unembedding)
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def plant(plan: Plan) -> Planted:
    """The arrays of a plan, a pure function of it."""
    world = np.random.default_rng([plan.seed, 0])
    rng = np.random.default_rng([plan.seed, 1, plan.draw])
    cells, width = (plan.layers + 1, len(plan.positions)), plan.d_model

    # A residual stream: every block adds noise. Positions whose token is always the same have none
    # at layer 0; the first block's attention brings them what the others have there.
    deviations = np.geomspace(3, 0.3, width)
    rotation, _ = np.linalg.qr(world.standard_normal((width, width)))
    root = rotation * (deviations / np.sqrt(np.mean(deviations**2)))
    covariance = root @ root.T
    variances = np.broadcast_to(1 + _GROWTH * np.arange(cells[0])[:, None], cells).copy()
    variances[0] = [name in _CONTENT for name in plan.positions]

    means = np.broadcast_to(world.standard_normal((cells[1], width)), (*cells, width)).copy()
    header = (-1, plan.positions.index(_LAST))
    means[header] = 3 * world.standard_normal(width)  # large: it makes some tokens likely
    # What is added at right angles to the mean hardly changes the norm, so that what is linear
    # before the RMSNorm stays so behind it.
    spanning = np.column_stack([means[header], world.standard_normal((width, 3))])
    directions = np.linalg.qr(spanning)[0].T[1:]
    lens = _lens(plan, means[header], variances[header], directions[:2], world)
    topic_vectors = world.standard_normal((_TOPICS, width))
    topic_vectors *= _TOPIC_SIZE / np.linalg.norm(topic_vectors, axis=1, keepdims=True)
    topic_effects = world.permutation(_quantiles(_TOPICS))

    sources = np.arange(plan.contexts) // plan.per_source
    count, topics, carried = sources[-1] + 1, np.full(plan.contexts, -1), np.zeros((1, width))
    if plan.kind == "topic":
        topics = rng.integers(_TOPICS, size=count)[sources]
        z, carried = topic_effects[topics], topic_vectors[topics]
    else:
        z = rng.standard_normal(count)[sources]
    rates = _rates(plan, z)
    turns = rng.random((plan.contexts, len(plan.temperatures) * plan.samples)) < rates[:, None]

    direction = directions[{"output-common": 0, "output-rare": 1}.get(plan.kind, 2)]
    where = _where(plan)
    earliest = np.unravel_index(where.argmax(), cells)
    size = _SIGNAL * np.sqrt(variances[earliest] * (direction @ covariance @ direction))
    slopes = where[..., None] * (size * direction * (plan.kind in GAUSSIAN))
    residuals = np.empty((cells[0], plan.contexts, cells[1], width), dtype=np.float32)
    noise = np.zeros(residuals.shape[1:], dtype=np.float32)
    steps = np.sqrt(np.diff(variances, axis=0, prepend=0)).astype(np.float32)
    for layer in range(cells[0]):
        drawn = rng.standard_normal(noise.shape, dtype=np.float32) @ root.T.astype(np.float32)
        noise += steps[layer][:, None] * drawn
        signal = where[layer][:, None] * carried[:, None] + z[:, None, None] * slopes[layer]
        residuals[layer] = means[layer] + noise + signal
    parts = (residuals, z, rates, turns, sources, topics, lens, direction, slopes, variances)
    return Planted(plan, *parts, covariance)


def true_auroc(planted: Planted, layer: int, position: str, weights: np.ndarray) -> float:
    """AUROC, over the turns of all sources of the world, of the score ``residual @ weights``.

    A turn is positive with its context's rate; the two turns compared come from two sources. The
    score is α z + τ ε with ε standard normal, so what remains is an integral over two latents.

    Args:
        planted: of a kind in :data:`GAUSSIAN`.
        layer: 0 … layers.
        position: one of the plan's.
        weights: ``[d_model]``, chosen without a look at the turns it is asked about.
    """
    plan = planted.plan
    if plan.kind not in GAUSSIAN:
        raise ValueError(f"no closed form for {plan.kind!r}; there is for {', '.join(GAUSSIAN)}")
    at = (layer, plan.positions.index(position))
    alpha = planted.slopes[at] @ weights
    tau = np.sqrt(planted.variances[at] * (weights @ planted.covariance @ weights))
    if alpha == 0 or tau == 0:  # no noise: the state, or the score, is constant
        return 0.5
    positive, negative = _MASS * _rates(plan, _GRID), _MASS * (1 - _rates(plan, _GRID))
    above = ndtr(alpha * (_GRID[:, None] - _GRID) / (tau * np.sqrt(2)))
    return float(positive @ above @ negative / (positive.sum() * negative.sum()))


# -- the world ------------------------------------------------------------------------------------


def _where(plan: Plan) -> np.ndarray:
    """``[layers + 1, positions]`` 1 where states carry z or the topic, else 0."""
    where = np.zeros((plan.layers + 1, len(plan.positions)))
    first = {"output-common": -1, "output-rare": -1}
    at = {"signal": plan.informative_position, "output-common": _LAST, "output-rare": _LAST}
    there = [at.get(plan.kind, name) == name for name in plan.positions]
    where[first.get(plan.kind, plan.informative_layer) :, there] = plan.kind != "none"
    return where


def _quantiles(count: int) -> np.ndarray:
    """``[count]`` of a standard normal variable, ascending."""
    return norm.ppf((np.arange(count) + 0.5) / count)


@lru_cache
def _link(of_topics: bool, prevalence: float, auroc: float) -> tuple[float, float]:
    """(a, b) such that rates of sigmoid(a + b z) have this mean, and z this AUROC for turns."""
    z, mass = (_quantiles(_TOPICS), np.full(_TOPICS, 1 / _TOPICS)) if of_topics else (_GRID, _MASS)

    def intercept(b: float) -> float:
        return brentq(lambda a: mass @ expit(a + b * z) - prevalence, -999, 999)

    def excess(b: float) -> float:
        rates = expit(intercept(b) + b * z)
        positive, negative = mass * rates / prevalence, mass * (1 - rates) / (1 - prevalence)
        return positive @ (negative.cumsum() - negative / 2) - auroc  # ties count one half

    slope = brentq(excess, 0, 99)
    return intercept(slope), slope


def _rates(plan: Plan, z: np.ndarray) -> np.ndarray:
    """Probability of a positive turn at each z, same shape."""
    mean = plan.prevalence
    a, b = _link(plan.kind == "topic", mean, plan.oracle_auroc)
    if plan.kind != "none":
        return expit(a + b * z)
    # A Beta distribution with the variance that the rates of the other kinds have.
    size = mean * (1 - mean) / (_MASS @ expit(a + b * _GRID) ** 2 - mean**2) - 1
    return beta.ppf(ndtr(z), mean * size, (1 - mean) * size)


def _lens(
    plan: Plan, mean: np.ndarray, variance: float, special: np.ndarray, rng: np.random.Generator
) -> Lens:
    """A lens whose logits have a model's spread: 2 to 4 nats of entropy, of a vocabulary of 256.

    At ``mean`` the common token has probability 0.2, and the rare one's logit is 15 below the
    largest. Each has a direction in the residual stream (a row of ``special``) that moves its logit
    and no other, so that a signal in the rare token leaves all that is ever sampled as it is.
    """
    typical = np.sqrt(np.mean(mean**2) + variance)  # root mean square of a state
    base = 2.2 * rng.permutation(_quantiles(plan.vocab))
    others = np.delete(base, [COMMON_TOKEN, RARE_TOKEN])
    base[COMMON_TOKEN] = logsumexp(others) + np.log(0.2 / 0.8)
    base[RARE_TOKEN] = max(others.max(), base[COMMON_TOKEN]) - 15
    length = 1.2  # of what a token has of its own: noise moves logits by about a half
    rows = length / np.sqrt(plan.d_model) * rng.standard_normal((plan.vocab, plan.d_model))
    kept_out = np.vstack([mean / np.linalg.norm(mean), special])
    rows -= rows @ kept_out.T @ kept_out
    rows[[COMMON_TOKEN, RARE_TOKEN]] = length * special
    rows += np.outer(base, mean * typical / (mean @ mean))
    weight = rng.uniform(0.5, 1.5, plan.d_model)
    norm, bias, unembedding = (
        torch.from_numpy(array).float() for array in (weight, 0 * weight, rows / weight)
    )
    return Lens(norm, bias, unembedding, eps=1e-6, centred=False, scale=1.0, softcap=None)


# -- the run --------------------------------------------------------------------------------------


def write(planted: Planted, folder: Path, random_blocks: int | None = None) -> Run:
    """A complete run in a new folder, judged by "planted". Its lens isn't put into the cache.

    ``random_blocks`` is the seed that the run says its model's blocks were permuted by.
    """
    plan = planted.plan
    settings = Settings(
        model=NAME,
        dataset=NAME,
        limit=plan.contexts,
        response="given",
        temperatures=plan.temperatures,
        samples=plan.samples,
        max_new_tokens=8,
        seed=plan.seed,
        positions=plan.positions,
        header_logits="none",
        random_blocks=random_blocks,
    )
    rows = _contexts(planted)
    # In the order of ``planted.turns``, which needn't be that of the settings.
    grid = [(0.0, 0), *product(plan.temperatures, range(plan.samples))]
    same = ("context_id", "source_id", "dataset", "perturbation", "order", "response_unfinished")
    turns = [
        {key: row[key] for key in same}
        | {
            "temperature": t,
            "sampled_tokens": 8 * (t > 0),
            "sample": sample,
            "text": f"turn {row['order']} {number}",
        }
        | {"finish_reason": "turn_end", "tokens": 4}
        for row in rows
        for number, (t, sample) in enumerate(grid)
    ]
    identity = {
        "settings": settings.to_dict(),
        "model": {"name": NAME, "weights_hash": planted.weights_hash, "layers": plan.layers}
        | {
            "random_blocks": random_blocks,
            "d_model": plan.d_model,
            "vocab": plan.vocab,
            "dtype": "float32",
            "device": "cpu",
        },
        "chat": {
            "template": NAME,
            "tail_ids": _TAIL_IDS,
            "header_ids": _TAIL_IDS[2:],
            "turn_end_id": _END,
        }
        | {"closing_id": _END, "stop_ids": {str(_END): "<end>"}},
        "positions": plan.positions,
        "conversations": {"count": plan.contexts, "draw": plan.draw},
        "software": {"ia_mech": __version__},
    }
    source = {"dataset": NAME, "plan": asdict(plan)}
    record = {"source": source, "identity": identity}
    record["parts"] = {"responses": 0, "contexts": 1}
    contexts = pa.Table.from_pylist(rows, layout.contexts_schema(_CONTENT + _TAIL))
    generations = pa.Table.from_pylist(turns, layout.GENERATIONS)
    residuals = torch.from_numpy(planted.residuals).transpose(0, 1)
    with RunWriter(folder, record) as writer:
        writer.start_session({"machine": NAME})
        (name,) = layout.part_names(1)
        writer.add_contexts(name, contexts, generations, None, residuals)
        writer.finish()
    positive = np.column_stack([planted.rates > 0.5, planted.turns]).ravel().tolist()
    _judge(run := Run.open(folder), dict(zip([t["text"] for t in turns], positive, strict=True)))
    return run


def _contexts(planted: Planted) -> list[dict]:
    """Rows of ``contexts/``: random words; half of them the topic's, where there is one."""
    plan, rng = planted.plan, np.random.default_rng([planted.plan.seed, 2, planted.plan.draw])
    states = torch.from_numpy(planted.residuals[-1, :, plan.positions.index(_LAST)])
    rows = []
    for order, logits in enumerate(planted.lens.logits(states)):
        source = f"{plan.seed}-{plan.draw}-{planted.sources[order]:05d}"
        asked, said, opener = rng.integers([10, 15, 0], [21, 36, len(_OPENERS)]).tolist()
        words = rng.integers(_COMMON_WORDS, size=asked + said)
        if plan.kind == "topic":
            own = rng.integers(_TOPIC_WORDS, size=len(words)) + planted.topics[order] * _TOPIC_WORDS
            words = np.where(rng.random(len(words)) < 0.5, _COMMON_WORDS + own, words)
        text = [_WORDS[word] for word in words]
        ids = (_FIRST_WORD + words % (plan.vocab - _FIRST_WORD)).tolist()
        query, response = " ".join(text[:asked]), " ".join([_OPENERS[opener], *text[asked:]])
        asking = [_START, _USER, _NEWLINE, *ids[:asked], *_TAIL_IDS[:3], _ASSISTANT, _NEWLINE]
        ids = [*asking, _FIRST_OPENER + opener, *ids[asked:], *_TAIL_IDS]
        end = len(ids) - len(_TAIL)
        positions = dict(zip(_TAIL, range(end, len(ids)), strict=True))
        rows.append(
            {
                "context_id": f"{source}-{order}",
                "source_id": source,
                "dataset": NAME,
                "metadata": "{}",
            }
            | {
                "order": order,
                "perturbation": "none",
                "response_unfinished": False,
                "token_ids": ids,
            }
            | {"response_policy": "given", "response_finish_reason": "given"}
            | {"messages": [message("user", query), message("assistant", response)]}
            | {"text": f"<user>\n{query}<end>\n<assistant>\n{response}<end>\n<user>\n"}
            | {"positions": {"query_end": asked + 2, "response_end": end - 1} | positions}
            | {"context_tokens": len(ids), "response_tokens": said + 1}
            | {"first_token_entropy": entropy(logits)}
            | {"first_token_entropy_tempered": [entropy(logits / t) for t in plan.temperatures]}
        )
    return rows


def _judge(run: Run, positive: dict[str, bool]) -> None:
    """Write the verdicts that go with the planted truth, a turn's text → whether it is positive."""
    rows = []
    for key, item in zip(run.generations[list(KEY)].to_numpy(), items_of(run), strict=True):
        verdict = Verdict(FOLLOW_UP if positive[item.turn] else "new_topic", rationale=NAME)
        about: dict[str, Any] = {"follow_up": BUILT_IN.follow_up(verdict.category), "cached": False}
        about["item"] = item.id
        rows.append(verdict.to_json() | dict(zip(KEY, key, strict=True)) | about)
    record = {
        "identity": {"kind": NAME},
        "identity_hash": identity_hash({"kind": NAME}),
        "rubric": {"version": VERSION, "hash": BUILT_IN.hash},
        "caveat": "the labels were drawn from planted rates: no text was read",
    }
    run.labels.write_judgements(NAME, rows, record)
