"""How likely each turn is after each of the responses to its query."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from experiments.given_turns import computed_once
from experiments.reaction.read import Arm, Query
from experiments.resample import chat_of
from ia_mech.chat.format import ChatFormat
from ia_mech.collect.identity import eos_ids, probe_ids
from ia_mech.display import Progress
from ia_mech.engine.check import check_engine
from ia_mech.engine.memory import Backoff
from ia_mech.engine.score import Scored, Turn, score
from ia_mech.engine.shared import Engine
from ia_mech.engine.state import Prefix, prefill_all
from ia_mech.errors import UserError
from ia_mech.models.load import (
    ModelSpec,
    Subject,
    context_limit,
    load,
    load_tokenizer_and_config,
)
from ia_mech.run import Run
from ia_mech.untrusted import parse_json


@dataclass(frozen=True)
class Likelihoods:
    """Log-likelihoods of an arm's turns, in nats, in the order of its turns.

    Attributes:
        own: ``[turns, K, tokens]`` of each token, turn-end included, after each response, at the
            turn's own temperature; NaN after the turn's last token, and all NaN for greedy turns.
        reader: ``[turns, K]`` of the whole turn at T = 1.
        absent: ``[turns]`` of the whole turn without a response, at its own temperature; NaN for
            greedy turns, and where no context without a response was scored.
    """

    own: np.ndarray
    reader: np.ndarray
    absent: np.ndarray


@dataclass(frozen=True)
class Reader:
    """What scores turns: a model and its chat format.

    Attributes:
        model: a causal language model.
        weights: their hash, which tells models and dtypes apart
            (:func:`ia_mech.models.load.weights_hash`).
        engine: which of its layers contexts of one query can share.
        chat: its format, for contexts without a response; None leaves these out.
    """

    model: PreTrainedModel
    weights: str
    engine: Engine
    chat: ChatFormat | None


def reader_of(subject: Subject, run: Run) -> Reader:
    """A model as a reader, with the chat settings of a run, checked as before sampling."""
    model = subject.model
    chat = chat_of(run, subject.tokenizer, eos_ids(model.generation_config, model.config))
    engine = check_engine(model, probe_ids(chat))
    return Reader(model, subject.weights_hash, engine, chat)


def retold(arm: Arm, name: str, run: Run) -> Arm:
    """The same texts as token ids of another model, under its own chat template.

    No weights are loaded, so that what can't be scored is refused before anything is computed.

    Args:
        arm: the turns.
        name: of the model.
        run: whose chat settings are used.

    Returns:
        The arm with the other model's ``token_ids``, all turns at T = 1.

    Raises:
        UserError: the model can't be had, has no chat template that can express the texts, or is
            made for shorter ones.
    """
    tokenizer, model_config = load_tokenizer_and_config(ModelSpec(name=name))
    chat = chat_of(run, tokenizer, eos_ids(None, model_config))
    limit = context_limit(model_config)
    queries, ids = [], {}
    for query in arm.queries:
        messages = [
            [*query.messages, {"role": "assistant", "content": text}] for text in query.responses
        ]
        contexts = [chat.context(one) for one in messages]
        token_ids = tuple(tuple(context.ids) for context in contexts)
        queries.append(replace(query, token_ids=token_ids))
        mine = arm.turns[arm.turns["source"] == query.source]
        end = [] if chat.closing_id is None else [chat.closing_id]
        for row, text, reason in zip(mine.index, mine["text"], mine["finish_reason"], strict=True):
            turn = chat.reference_ids(messages[0], contexts[0], text) if text else []
            ids[row] = np.array(turn + end * (reason == "turn_end"))
        needed = max(map(len, token_ids)) + max(len(ids[row]) for row in mine.index)
        if limit is not None and needed > limit:
            raise UserError(
                f"--scorer {name} takes {limit} tokens, a context of {query.contexts[0]} and its "
                f"turn have {needed}",
                "give a model with a longer context, or leave --scorer out",
            )
    turns = arm.turns.assign(token_ids=pd.Series(ids), temperature=1.0)
    return replace(arm, queries=queries, turns=turns)


def scored_by(name: str, told: Arm, run: Run, folder: Path, progress: Progress) -> np.ndarray:
    """``[turns, K]`` log-likelihoods at T = 1 by another model.

    Args:
        name: of the model.
        told: the turns in its token ids (:func:`retold`).
        run: whose dtype, device and chat settings are used.
        folder: as of :func:`likelihoods`.
        progress: counts tokens.

    Raises:
        UserError: it can't be loaded.
    """
    first = run.settings
    subject = load(ModelSpec(name=name, dtype=first["dtype"], device=first["device"]))
    reader = replace(reader_of(subject, run), chat=None)
    return likelihoods(told, reader, folder, progress).reader


def given_scores(file: Path, arm: Arm) -> np.ndarray:
    """``[turns, K]`` scores of a judge or an embedding, from a file of the user's.

    JSONL, a line per turn with ``context_id``, ``temperature``, ``sample`` and ``scores``: K in the
    order of the responses; larger means likelier.

    Raises:
        UserError: no such file, not such JSON, or turns that are missing, unknown or scored twice.
    """
    remedy = 'write lines such as {"context_id": …, "temperature": …, "sample": …, "scores": […]}'
    if not file.is_file():
        raise UserError(f"no file {file}", "give --scores an existing file")
    keys = ["context_id", "temperature", "sample"]
    rows = {key: at for at, key in enumerate(arm.turns[keys].itertuples(index=False, name=None))}
    found = np.full((len(arm.turns), arm.responses), np.nan)
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        place = f"{file.name} line {number}"
        if not line.strip():
            continue
        row = parse_json(line, place, remedy)
        scores = row.get("scores") if isinstance(row, dict) else None
        finite = isinstance(scores, list) and all(
            isinstance(score, int | float) and np.isfinite(score) for score in scores
        )
        if scores is None or not finite or len(scores) != arm.responses:
            raise UserError(f"{place} has no list of {arm.responses} scores", remedy)
        key = tuple(row.get(name) for name in keys)
        if key not in rows:
            raise UserError(f"{place}: the runs have no turn {key}", remedy)
        if not np.isnan(found[rows[key]]).all():
            raise UserError(f"{place}: turn {key} is scored twice", "leave out one of the lines")
        found[rows[key]] = scores
    missing = int(np.isnan(found).any(1).sum())
    if missing:
        raise UserError(f"{file} lacks {missing} of {len(found)} turns", "score all of them")
    return found


def likelihoods(arm: Arm, reader: Reader, folder: Path, progress: Progress) -> Likelihoods:
    """Score every turn after every response to its query.

    Args:
        arm: the turns.
        reader: the subject model, or another.
        folder: where what was found of each query is kept, and isn't computed again.
        progress: counts tokens.
    """
    contexts = {query.source: _contexts(query, reader.chat) for query in arm.queries}
    after = arm.turns["source"].map(lambda source: len(contexts[source]))
    tokens = arm.turns["token_ids"].map(len) * after
    progress.start(f"scoring, {arm.name}", int(tokens.sum()), unit="token")
    parts = []
    try:
        for query in arm.queries:
            turns = arm.turns[arm.turns["source"] == query.source]
            mine = [[*map(int, ids)] for ids in turns["token_ids"]]
            its = contexts[query.source]
            key = [reader.weights, its, mine, turns["temperature"].tolist()]
            compute = partial(_of_query, turns, its, arm.responses, reader, progress.advance)
            ready = partial(progress.advance, int(tokens[turns.index].sum()))
            parts.append(computed_once(folder, key, compute, ready))
    finally:
        progress.stop()
    frame = pd.concat(parts).loc[arm.turns.index]
    return _arrays(frame, arm.responses)


def _contexts(query: Query, chat: ChatFormat | None) -> list[tuple[int, ...]]:
    """Token ids of the contexts after which a query's turns are scored: after each response, and
    after none unless there is no chat format, or its template refuses an empty response."""
    contexts = [*query.token_ids]
    if chat is not None:
        with contextlib.suppress(UserError):
            empty = chat.context([*query.messages, {"role": "assistant", "content": ""}])
            contexts.append(tuple(empty.ids))
    return contexts


def _of_query(
    mine: pd.DataFrame,
    contexts: Sequence[tuple[int, ...]],
    responses: int,
    reader: Reader,
    on_tokens: Callable[[int], None],
) -> pd.DataFrame:
    """A row per turn of one query, indexed as the turns: ``own``, ``reader`` and ``absent``."""
    groups, order = prefill_all(reader.model, [Prefix(context) for context in contexts])
    place = {context: at for at, context in enumerate(order)}
    temperatures = sorted({t for t in mine["temperature"] if t not in (0.0, 1.0)})
    wanted = [
        Turn(place[context], ids.tolist())
        for ids in mine["token_ids"]
        for context in range(len(contexts))
    ]

    def scored(some: Sequence[Turn]) -> list[Scored]:
        share = reader.engine.share
        return score(reader.model, groups, some, temperatures, share=share, on_tokens=on_tokens)

    found = Backoff(len(wanted)).map(scored, wanted)
    rows = []
    for at, temperature in enumerate(mine["temperature"]):
        each = found[at * len(contexts) : (at + 1) * len(contexts)]
        raw = np.stack([one.logprobs_raw for one in each]).astype(np.float64)
        own = raw
        if temperature in temperatures:
            which = temperatures.index(temperature)
            own = np.stack([one.logprobs_tempered[which] for one in each]).astype(np.float64)
        if temperature == 0.0:
            own = np.full_like(raw, np.nan)
        rows.append(
            {
                "own": own[:responses].ravel(),
                "reader": raw[:responses].sum(1),
                "absent": float(own[responses].sum()) if len(own) > responses else np.nan,
            }
        )
    return pd.DataFrame(rows, index=mine.index)


def _arrays(frame: pd.DataFrame, responses: int) -> Likelihoods:
    lengths = [len(own) // responses for own in frame["own"]]
    own = np.full((len(frame), responses, max(lengths)), np.nan)
    for row, (values, length) in enumerate(zip(frame["own"], lengths, strict=True)):
        own[row, :, :length] = np.reshape(values, (responses, length))
    return Likelihoods(own, np.stack(frame["reader"].tolist()), frame["absent"].to_numpy(float))
