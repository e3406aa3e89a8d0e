"""Contexts, turns and the direction that is steered along."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from experiments.given_turns import TOKENS, Ids, drawn
from ia_mech.errors import UserError
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import NO_ANNOTATOR, read_runs
from ia_mech.run import Run
from ia_mech.steering import ADD, SteeringVector
from probes.card import Probe
from probes.targets import GROUNDED

CHOOSING, REPORTING = HALVES = ("choosing", "reporting")  # of the sources


@dataclass(frozen=True)
class Context:
    """A context, as its run holds it.

    Attributes:
        id: within its run.
        run: index of its run.
        ids: with the open header.
        places: position → index among ``ids``; None for one that is lacking.
        messages: up to and including the response.
    """

    id: str
    run: int
    ids: Ids
    places: dict[str, int | None]
    messages: tuple[dict, ...]


@dataclass(frozen=True)
class Turn:
    """A sampled turn: its ids, which of its query's contexts it followed, and the judge's label (1,
    0, or NaN without one)."""

    ids: Ids
    followed: int
    label: float


@dataclass(frozen=True)
class Query:
    """A source with the contexts and turns that are scored.

    Attributes:
        source: a key that holds across runs.
        dataset: of the source.
        half: :data:`CHOOSING` or :data:`REPORTING`.
        contexts: one per response.
        turns: after them; after each, one that the judge accepts and one that it doesn't, where
            there are both.
    """

    source: str
    dataset: str
    half: str
    contexts: tuple[Context, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Read:
    """What comes in.

    Attributes:
        queries: the sources that are used.
        contexts: all of the runs: ``run``, ``context_id``, ``source``, ``dataset``,
            ``prompt_tokens``, ``response_tokens``, and of sampled turns ``positives`` and
            ``trials`` (0 without verdicts).
        opened: of all sampled turns but those of :data:`REPORTING` sources: ``token`` (the first)
            and ``label``.
        outcome: ``genuine`` or ``grounded``, what a label of 1 means.
        gate: whether the judge can tell a turn's own conversation; None without verdicts.
        notes: what a reader has to know.
    """

    queries: list[Query]
    contexts: pd.DataFrame
    opened: pd.DataFrame
    outcome: str
    gate: Gate | None
    notes: list[str]


def vector_of_probe(
    probe: Probe, path: Path, direction: str, runs: Sequence[Run]
) -> SteeringVector:
    """A probe's direction, to be added where the probe reads.

    Raises:
        UserError: there is no such direction; the probe is of another model than the runs.
    """
    if direction not in probe.directions:
        raise UserError(
            f"the probe {path} has no direction {direction!r}",
            f"give --direction {' or '.join(probe.directions)}",
        )
    try:
        models = [run["model"] for run in probe.card["asked"]["runs"]]
        layer, position = int(probe.card["layer"]), str(probe.card["position"])
        known = {model["weights_hash"]: model["name"] for model in models}
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"the card of the probe {path} doesn't say where it is from",
            "write the probe again with probes.train, or give --vector",
        ) from None
    wanted = runs[0].model
    if wanted["weights_hash"] not in known:
        raise UserError(
            f"the probe {path} is of {', '.join(known.values())}, the runs are of "
            f"{wanted['name']} with other weights",
            "give a probe that was trained on runs of this model",
        )
    weights = torch.from_numpy(probe.directions[direction].weights)
    return SteeringVector(
        ADD, layer, (position,), weights, 1.0, wanted["name"], wanted["weights_hash"]
    )


def read(
    runs: Sequence[Run], judge: str | None, outcome: str, most: int, responses: int, seed: int
) -> Read:
    """The sources, contexts and turns of runs.

    Args:
        runs: of one model.
        judge: whose verdicts; the only judge there if None. Without any verdict, turns have no
            labels.
        outcome: ``genuine`` or ``grounded``.
        most: most sources.
        responses: most contexts of a source.
        seed: of which sources are used, and in which half.

    Raises:
        UserError: verdicts that aren't of the runs, or don't have the outcome; fewer than four
            sources with turns to score.
    """
    gate, notes = None, []
    labels = pd.Series(dtype=float)
    if judge is not None or any(run.labels.judges for run in runs):
        judged = read_runs(runs, judge, NO_ANNOTATOR)
        if outcome not in judged.outcomes:
            raise UserError(
                f"judge {judged.judge!r} doesn't test whether turns are {GROUNDED}",
                "give --judge one that does, or another probe",
            )
        gate, notes = judged.gates[outcome], list(judged.notes)
        keys = judged.turns[["run", "context_id", "temperature", "sample"]]
        labels = pd.Series(judged.turns[outcome].to_numpy(), pd.MultiIndex.from_frame(keys))
    else:
        notes.append(
            "the runs have no verdicts: turns aren't told apart, and the dose is chosen by the "
            "change of the next token alone."
        )
    contexts, turns = _frames(runs, labels)
    counts = turns.groupby(["run", "context_id"])["label"].agg(["sum", "count", "size"])
    keys = pd.MultiIndex.from_frame(contexts[["run", "context_id"]])
    counts = counts.reindex(keys).fillna(0)
    contexts = contexts.assign(
        positives=counts["sum"].to_numpy(), trials=counts["count"].to_numpy()
    )
    both = (contexts["positives"] > 0) & (contexts["positives"] < contexts["trials"])
    usable = contexts[both if gate is not None else counts["size"].to_numpy() > 0]
    names = list(dict.fromkeys(usable["source"]))
    used = drawn(names, most, seed)
    if len(used) < 4:
        raise UserError(
            f"{len(used)} sources have turns to compare",
            "give runs of four sources or more, with sampled turns"
            + (" that the judge accepts, and others" if gate else ""),
        )
    if gate is not None and len(names) < contexts["source"].nunique():
        left = contexts["source"].nunique() - len(names)
        notes.append(
            f"{left} sources have no response after which the judge accepts some turns and not "
            "others; they are left out."
        )
    chosen = set(drawn(used, len(used) // 2, seed + 1))
    queries = []
    for source in used:
        mine = contexts[contexts["source"] == source]
        mine = mine.loc[both[mine.index].sort_values(ascending=False, kind="stable").index]
        half = CHOOSING if source in chosen else REPORTING
        queries.append(_query(mine.head(responses), turns, half, runs))
    reporting = {query.source for query in queries if query.half == REPORTING}
    apart = turns[~turns["source"].isin(reporting) & turns["label"].notna()]
    opened = pd.DataFrame(
        {"token": [int(ids[0]) for ids in apart["token_ids"]], "label": apart["label"].to_numpy()}
    )
    return Read(queries, contexts, opened, outcome, gate, notes)


def _frames(runs: Sequence[Run], labels: pd.Series) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All contexts and all sampled turns of runs, the latter with ``label``."""
    contexts, turns = [], []
    for number, run in enumerate(runs):
        own = run.contexts
        places = [_places(one) for one in own["positions"]]
        ends = [one.get("query_end") for one in places]
        prompts = [0 if end is None else end + 1 for end in ends]
        contexts.append(
            own[["context_id", "dataset", "token_ids", "messages", "response_tokens"]].assign(
                run=number,
                source=own["dataset"] + "\x1f" + own["source_id"],
                places=places,
                prompt_tokens=prompts,
            )
        )
        rows = run.generations
        rows = rows[(rows["temperature"] > 0) & (rows["token_ids"].map(len) > 0)]
        keys = [rows[name] for name in ("context_id", "temperature", "sample")]
        at = pd.MultiIndex.from_arrays([[str(run.path)] * len(rows), *keys])
        label = labels.reindex(at).to_numpy(dtype=float) if len(labels) else np.nan
        turns.append(
            rows[["context_id", "temperature", "sample", "token_ids"]].assign(
                run=number, label=label, source=rows["dataset"] + "\x1f" + rows["source_id"]
            )
        )
    return pd.concat(contexts, ignore_index=True), pd.concat(turns, ignore_index=True)


def _places(positions: dict) -> dict[str, int | None]:
    return {name: None if pd.isna(at) else int(at) for name, at in positions.items()}


def _query(rows: pd.DataFrame, turns: pd.DataFrame, half: str, runs: Sequence[Run]) -> Query:
    contexts, found = [], []
    for k, row in enumerate(rows.itertuples()):
        contexts.append(
            Context(
                row.context_id,
                row.run,
                tuple(row.token_ids.tolist()),
                row.places,
                tuple(dict(message) for message in row.messages),
            )
        )
        mine = turns[(turns["run"] == row.run) & (turns["context_id"] == row.context_id)]
        mine = mine.sort_values(["temperature", "sample"], ascending=[False, True], kind="stable")
        mine = mine.drop_duplicates("label")[["token_ids", "label"]].sort_values("label")
        mine = mine.dropna().tail(2) if mine["label"].notna().any() else mine.head(1)
        pairs = zip(mine["token_ids"], mine["label"], strict=True)
        found += [Turn(tuple(ids.tolist()[:TOKENS]), k, label) for ids, label in pairs]
    first = rows.iloc[0]
    return Query(first["source"], first["dataset"], half, tuple(contexts), tuple(found))
