"""Turns after several responses to one query, from sampled runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ia_mech.cli import quoted
from ia_mech.errors import UserError
from ia_mech.run import Run

ALTERNATIVES, SAME_CONTENT, ASSISTANT = "alternatives", "same content", "assistant header"
COMPLETE = "complete responses"  # those of the alternatives that weren't cut off


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
        name: :data:`ALTERNATIVES` for the runs' own responses, :data:`SAME_CONTENT` for versions of
            one response, :data:`ASSISTANT` for turns under the assistant's header.
        queries: all with the same number of responses, K.
        turns: one row per turn: ``source``, ``dataset``, ``followed`` (the response's index),
            ``temperature`` (0 = greedy), ``sample``, ``text``, ``token_ids``, ``finish_reason``,
            ``complete`` (of the response that it followed) and ``context_id``.
    """

    name: str
    queries: list[Query]
    turns: pd.DataFrame

    @property
    def responses(self) -> int:
        """K."""
        return len(self.queries[0].contexts)

    def complete_responses(self, most: int) -> int:
        """The largest number, up to ``most``, of complete responses that half of the queries have;
        below 2 there is nothing to compare."""
        counts = sorted((sum(query.complete) for query in self.queries), reverse=True)
        return min(most, counts[(len(counts) - 1) // 2])

    def of(self, sources: Sequence[str]) -> "Arm":
        """Only these queries."""
        kept = set(sources)
        turns = self.turns[self.turns["source"].isin(kept)].reset_index(drop=True)
        return replace(self, queries=[q for q in self.queries if q.source in kept], turns=turns)


def read(runs: Sequence[Run], name: str = ALTERNATIVES) -> tuple[Arm, list[str]]:
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
    if all(query.distinct == 1 for query in kept) and name == ALTERNATIVES:
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
        name,
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
