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

from experiments.reaction.read import Query, cut_off, read
from experiments.resample import chat_of, same_settings
from ia_mech.chat.format import ChatContext, ChatFormat
from ia_mech.collect.identity import eos_ids
from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.models.load import load_tokenizer_and_config, recalled
from ia_mech.run import Run, integrity

TOKENS = 24  # of a turn: nearly all of the bits come before (docs/reaction.md)

Ids = tuple[int, ...]


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
