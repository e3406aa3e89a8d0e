"""Sampled turns and the contexts they followed, to be scored again under interventions."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.resample import chat_of, same_settings
from ia_mech.chat.format import ChatContext, ChatFormat
from ia_mech.cli import quoted
from ia_mech.collect.identity import eos_ids
from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.models.load import load_tokenizer_and_config, recalled
from ia_mech.run import Run, integrity

TOKENS = 24  # of a turn: nearly all of the bits come before (docs/reaction.md)

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Query:
    """A query with its K responses.

    Attributes:
        source: a key that holds across runs.
        dataset: of the query.
        contexts: ids of the contexts, in the order of the responses.
        messages: up to and including the query.
        responses: the K texts.
        token_ids: of each context, with its open header.
        complete: of each response, whether it was not cut off.
    """

    source: str
    dataset: str
    contexts: tuple[str, ...]
    messages: tuple[dict, ...]
    responses: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    complete: tuple[bool, ...]

    @property
    def distinct(self) -> int:
        """How many of the responses differ."""
        return len(set(self.responses))


@dataclass(frozen=True)
class Arm:
    """Turns that followed one of the K responses to their query.

    Attributes:
        queries: all with the same number of responses, K.
        turns: one row per turn: ``source``, ``dataset``, ``followed`` (the response's index),
            ``temperature`` (0 = greedy), ``sample``, ``text``, ``token_ids``, ``finish_reason``,
            ``complete`` (of the response that it followed) and ``context_id``.
    """

    queries: list[Query]
    turns: pd.DataFrame

    @property
    def responses(self) -> int:
        """K."""
        return len(self.queries[0].contexts)


def read(runs: Sequence[Run]) -> tuple[Arm, list[str]]:
    """The queries of runs that have several responses, with the turns after them.

    Returns:
        The turns, and what a reader has to know.

    Raises:
        UserError: a run has one response per query; the responses to each query are all alike; a
            context is in two runs.
    """
    contexts = pd.concat([_contexts_of(run) for run in runs], ignore_index=True)
    twice = contexts["key"].duplicated()
    if twice.any():
        raise UserError(
            f"context {contexts.loc[twice, 'context_id'].iloc[0]} is in two runs",
            "give one of them",
        )
    queries = [_query(source, rows) for source, rows in contexts.groupby("source", sort=False)]
    most = max(len(query.contexts) for query in queries)
    kept = [query for query in queries if len(query.contexts) == most]
    notes = []
    every = {(run.path, *pair) for run in runs for pair in _sources(run)}
    if len(kept) < len(every):
        notes.append(
            f"{len(every) - len(kept)} of {len(every)} queries have fewer than {most} responses "
            "and are left out."
        )
    if all(query.distinct == 1 for query in kept):
        raise UserError(
            f"the {most} responses to each query are all alike: no turn can tell them apart",
            "sample with a higher --response-temperature",
        )
    of = {
        (query.dataset, id_): (query, k) for query in kept for k, id_ in enumerate(query.contexts)
    }
    turns = pd.concat([run.generations for run in runs], ignore_index=True)
    keys = list(zip(turns["dataset"], turns["context_id"], strict=True))
    here = [key in of for key in keys]
    turns = turns[here].reset_index(drop=True)
    found = [of[key] for key in keys if key in of]
    columns = ["context_id", "dataset", "temperature", "sample", "text", "token_ids"]
    return Arm(
        kept,
        turns[[*columns, "finish_reason"]].assign(
            source=[query.source for query, _ in found],
            followed=np.array([k for _, k in found]),
            complete=[query.complete[k] for query, k in found],
        ),
    ), notes


def cut_off(queries: Sequence[Query]) -> list[str]:
    """How many of the responses are another stimulus, as a note; none if all are complete."""
    complete = [each for query in queries for each in query.complete]
    if all(complete):
        return []
    cut = complete.count(False)
    return [f"{cut} of {len(complete)} responses were cut off, which is another stimulus."]


def _sources(run: Run) -> set[tuple[str, str]]:
    """Dataset and source of every context."""
    return set(zip(run.contexts["dataset"], run.contexts["source_id"], strict=True))


def _contexts_of(run: Run) -> pd.DataFrame:
    """Contexts of a run that are one of several after the same query."""
    several = run.contexts[run.contexts["response_index"].notna()]
    several = several.assign(source=several["dataset"] + "\x1f" + several["source_id"])
    several = several[several.groupby("source")["source"].transform("size") > 1]
    if several.empty:
        raise UserError(
            f"{run.path} has one response per query",
            f"sample {quoted(run.settings['dataset'])} again with --response generate "
            "--responses 4",
        )
    several = several.sort_values(["order", "response_index"])
    return several.assign(key=several["dataset"] + "\x1f" + several["context_id"])


def _query(source: str, rows: pd.DataFrame) -> Query:
    messages = [tuple(dict(m) for m in all_) for all_ in rows["messages"]]
    if len({tuple(map(str, one[:-1])) for one in messages}) > 1:
        raise UserError(
            f"the contexts of {rows['source_id'].iloc[0]} have several queries",
            "correct their source_id",
        )
    return Query(
        source,
        rows["dataset"].iloc[0],
        tuple(rows["context_id"]),
        messages[0][:-1],
        tuple(one[-1]["content"] for one in messages),
        tuple(tuple(ids.tolist()) for ids in rows["token_ids"]),
        tuple((~rows["response_cut_off"].astype(bool)).tolist()),
    )


@dataclass(frozen=True)
class Given:
    """Queries with several responses, and turns of one temperature after each.

    Attributes:
        queries: drawn from the runs', in their order.
        contexts: source → the context with each of its responses.
        turns: source → for each response the ids of the turns after it, in the order of samples;
            their first :data:`TOKENS` tokens, turn end included.
        temperature: that they were sampled at.
        chat: the format of the contexts.
        notes: what a reader has to know.
    """

    queries: list[Query]
    contexts: dict[str, list[ChatContext]]
    turns: dict[str, list[list[Ids]]]
    temperature: float
    chat: ChatFormat
    notes: list[str]


def given_turns(runs: Sequence[Run], queries: int, temperature: float | None, seed: int) -> Given:
    """What runs hold of turns after several responses.

    Args:
        runs: of one model and the same settings.
        queries: most of them.
        temperature: whose turns are used; 1 if not given, or the largest one if there is no 1.
        seed: of which queries are used.

    Raises:
        UserError: a run has one response per query, no turns at this temperature, or contexts that
            its template doesn't make.
    """
    arm, notes = read(runs)
    sampled = same_settings(runs).temperatures
    if temperature is None:
        temperature = 1.0 if 1.0 in sampled else max(sampled)
    if temperature not in sampled:
        raise UserError(
            f"the runs have no turns at T = {temperature:g}",
            f"give --temperature {' or '.join(f'{t:g}' for t in sampled)}",
        )
    kept = set(drawn([query.source for query in arm.queries], queries, seed))
    used = [query for query in arm.queries if query.source in kept]
    notes += cut_off(used)
    tokenizer, model_config = load_tokenizer_and_config(
        recalled(runs[0].settings, runs[0].model["weights_hash"])
    )
    chat = chat_of(runs[0], tokenizer, eos_ids(None, model_config))
    contexts = {
        query.source: [_context(chat, query, k) for k in range(arm.responses)] for query in used
    }
    turns: dict[str, list[list[Ids]]] = {
        query.source: [[] for _ in query.contexts] for query in used
    }
    rows = arm.turns[arm.turns["temperature"] == temperature].sort_values("sample", kind="stable")
    for source, k, ids in zip(rows["source"], rows["followed"], rows["token_ids"], strict=True):
        if source in turns:
            turns[source][k].append(tuple(ids.tolist()[:TOKENS]))
    return Given(used, contexts, turns, temperature, chat, notes)


def drawn(names: Sequence[str], most: int, seed: int) -> list[str]:
    """At most so many of the names, drawn by seed; in their order."""
    rng = np.random.default_rng([seed, len(names)])
    return [names[i] for i in sorted(rng.permutation(len(names))[:most])]


def _context(chat: ChatFormat, query: Query, k: int) -> ChatContext:
    """A query's context with its response ``k``."""
    found = chat.context([*query.messages, {"role": "assistant", "content": query.responses[k]}])
    if tuple(found.ids) != query.token_ids[k]:
        raise UserError(
            f"context {query.contexts[k]} has other ids than its template makes now",
            "sample the run again with this version",
        )
    return found


def computed_for_each(
    those: Sequence[Any],
    phase: str,
    folder: Path,
    key: Callable[[Any], Any],
    compute: Callable[[Any], pd.DataFrame],
) -> pd.DataFrame:
    """Tables of queries one below the other, with ``source`` and ``dataset``.

    Args:
        those: the queries; each has a ``source`` and a ``dataset``.
        phase: what the progress bar is called.
        folder: as of :func:`computed_once`.
        key: the same of one of them.
        compute: the same of one of them.
    """
    bar, parts = Bar(), []
    bar.start(phase, len(those), unit="source")
    try:
        for one in those:
            made = computed_once(folder, key(one), partial(compute, one))
            parts.append(made.assign(source=one.source, dataset=one.dataset))
            bar.advance()
    finally:
        bar.stop()
    return pd.concat(parts, ignore_index=True)


def computed_once(
    folder: Path,
    key: Any,
    compute: Callable[[], pd.DataFrame],
    on_kept: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """A table that an interrupted command needn't compute again.

    Args:
        folder: where tables are kept.
        key: all that the table depends on, as JSON can hold it.
        compute: makes it.
        on_kept: called if the table is there, and can be read.
    """
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()
    file = folder / f"{name}.parquet"
    try:
        kept = pq.read_table(file, page_checksum_verification=True).to_pandas()
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):  # or it is damaged
        pass
    else:
        on_kept()
        return kept
    made = compute()
    folder.mkdir(parents=True, exist_ok=True)
    integrity.replace_file(file, partial(made.to_parquet, write_page_checksum=True))
    return made
