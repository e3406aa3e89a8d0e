"""Queries with their responses and the turns after each response. Every experiment starts here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pandas as pd

from ia_mech.errors import UserError
from ia_mech.run.layout import UNPERTURBED
from ia_mech.run.sources import sources_of

T = TypeVar("T")


class RunTables(Protocol):
    """The part of a run (:class:`ia_mech.run.Run`) that is read here."""

    path: Path

    @property
    def contexts(self) -> pd.DataFrame: ...

    @property
    def generations(self) -> pd.DataFrame: ...

    def drawn(self, turns: pd.DataFrame) -> pd.Series: ...


@dataclass(frozen=True, eq=False)
class Query:
    """A query, its responses, and the turns after them.

    Attributes:
        source: dataset and ``source_id`` in one key, the same in all runs.
        dataset: the dataset of the query.
        contexts: a row per response, indexed from 0, with the columns of ``Run.contexts``, and
            ``run``, the folder it is from.
        turns: a row per turn, greedy or sampled as a whole, with the columns of
            ``Run.generations``, and ``followed``, the index of the response that it followed.
    """

    source: str
    dataset: str
    contexts: pd.DataFrame
    turns: pd.DataFrame

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages up to and including the query."""
        return [dict(message) for message in self.contexts["messages"].iloc[0][:-1]]

    @property
    def responses(self) -> list[str]:
        """The text of each response."""
        return [messages[-1]["content"] for messages in self.contexts["messages"]]

    @property
    def dialogues(self) -> list[list[dict[str, Any]]]:
        """The messages of each context, its response the last."""
        return [list(messages) for messages in self.contexts["messages"]]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The token ids of each context, up to the end of its open header."""
        return [tuple(ids.tolist()) for ids in self.contexts["token_ids"]]

    @property
    def complete(self) -> list[bool]:
        """Whether each response is finished."""
        return (~self.contexts["response_unfinished"].astype(bool)).tolist()


def exchange(messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The last thing that the user said, and the response at the end."""
    query = next(m["content"] for m in reversed(messages) if m["role"] == "user")
    return query, messages[-1]["content"]


def conversations_text(conversations: int, queries: int) -> str:
    """``24 conversations``; where queries have several responses, with what they are."""
    text = f"{conversations} conversation{'s' * (conversations != 1)}"
    if conversations == queries:
        return text
    each, rest = divmod(conversations, queries)
    responses = f"{conversations} responses to" if rest else f"{each} responses to each of"
    return f"{text} ({responses} {queries} queries)"


def unfinished_text(contexts: pd.DataFrame) -> str:
    """How many of the responses are unfinished, and why, such as ``5 of 8 responses are unfinished
    (4 cut off, 1 within its thought)``; empty if none is."""
    why = contexts.loc[contexts["response_unfinished"].astype(bool), "response_finish_reason"]
    if why.empty:
        return ""
    thought = int((why == "thought").sum())
    words = [f"{len(why) - thought} cut off"] if thought < len(why) else []
    words += [f"{thought} within {'its' if thought == 1 else 'their'} thought"] if thought else []
    be = "is" if len(why) == 1 else "are"
    return f"{len(why)} of {len(contexts)} responses {be} unfinished ({', '.join(words)})"


def queries_of(runs: Sequence[RunTables], kind: str = UNPERTURBED) -> list[Query]:
    """The queries of runs, in their order. Contexts of one query are joined across runs.

    Only contexts with the perturbation ``kind`` are used.

    Raises:
        UserError: a context is in two runs; contexts of one ``source_id`` have several queries.
    """
    contexts = pd.concat([_keyed(run, run.contexts) for run in runs], ignore_index=True)
    contexts = contexts[contexts["perturbation"].astype(object).fillna(UNPERTURBED) == kind]
    twice = contexts.duplicated(["dataset", "context_id"])
    if twice.any():
        raise UserError(
            f"context {contexts.loc[twice, 'context_id'].iloc[0]} is in two runs",
            "give one of them",
        )
    written = [_keyed(run, run.generations) for run in runs]
    whole = [frame[run.drawn(frame)] for run, frame in zip(runs, written, strict=True)]
    turns = pd.concat(whole, ignore_index=True)
    after = dict(list(turns.groupby("source", sort=False)))
    found = []
    for source, own in contexts.groupby("source", sort=False):
        own = own.sort_values(["run", "response_index"], kind="stable").reset_index(drop=True)
        queries = {str(list(messages[:-1])) for messages in own["messages"]}
        if len(queries) > 1:
            raise UserError(
                f"the contexts of {own['source_id'].iloc[0]} have several queries",
                "correct their source_id",
            )
        place = {name: k for k, name in enumerate(own["context_id"])}
        rows = after.get(source, turns.iloc[:0])
        rows = rows[rows["context_id"].isin(list(place))].reset_index(drop=True)
        followed = rows["context_id"].map(place).to_numpy(dtype=np.intp)
        found.append(
            Query(str(source), own["dataset"].iloc[0], own, rows.assign(followed=followed))
        )
    return found


def subsample(queries: Sequence[T], most: int | None, seed: int) -> list[T]:
    """At most ``most`` queries (or their names), in their order.

    The choice depends on the seed and on how many queries there are. A smaller choice is part of a
    larger one: all experiments on a run use the same queries.
    """
    order = np.random.default_rng([seed, len(queries)]).permutation(len(queries))
    return [queries[i] for i in sorted(order[:most])]


def _keyed(run: RunTables, frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(run=str(run.path), source=sources_of(frame))
