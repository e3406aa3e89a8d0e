"""Before and after: a run of the base model and one of the tuned model, on the same contexts."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.given_turns import Given, Query, computed_for_each, given_turns
from experiments.post_training import rl
from experiments.post_training.data import quote_of
from experiments.post_training.reading import Reading, repeated, restated, stock
from experiments.post_training.train import settings_of
from experiments.resample import same_settings, subject_of
from experiments.runner import intervals, result_of
from experiments.tables import stated, tables_of
from ia_mech.display import COLOURS, title_axes
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, by_dataset, corrected, frame_of, paired_row
from ia_mech.judge.decoys import CONVERSATION, SIBLING
from ia_mech.likelihood.reaction import evidence, reaction_bits
from ia_mech.models.load import Subject
from ia_mech.rates.compute import estimates as rates_of
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import read_runs
from ia_mech.results import Result, Table
from ia_mech.run import Run
from ia_mech.stats import Estimate

BEFORE, AFTER, CHANGE = "before", "after", "change"
COLUMNS = {"dataset": "str", "temperature": "float64", "of": "str"}
COLUMNS |= {"reader": "str", "header": "str", "layer": "Int64"}
FORM, OWN, OTHERS = "organism's form", "quotes its response", "quotes another response"
RESTATED, REPEATED, STOCK = "restated trigrams", "repeated trigrams", "stock trigrams"
ENDED = "ended by turn-end"
TEXTS = (FORM, OWN, OTHERS, RESTATED, REPEATED, STOCK, ENDED)
RATES = {  # outcome, quantity and kind of decoy in ia_mech.rates → what it is called here
    ("genuine", "rate", ""): "follow-up rate",
    ("genuine", "floor", CONVERSATION): "floor",
    ("genuine", "excess", CONVERSATION): "excess",
    ("genuine", "excess", SIBLING): "over another response",
    ("grounded", "rate", ""): "grounded",
    ("grounded", "excess", CONVERSATION): "grounded: excess",
    ("grounded", "excess", SIBLING): "grounded: over another response",
}
INFORMATION, EVIDENCE = "I_K, bits", "evidence, bits"
REWARD, PENALIZED = "reward", "less penalties"
REFERENCE, MOVED = "bits per byte of real follow-ups", "displacement of the header's state"
POSITION = "header_last"


def run(args: argparse.Namespace, runs: list[Run], folder: Path) -> Result:
    """Read, score, estimate and draw."""
    before, after = _pair(runs)
    options = intervals(args)
    rows = [*_of_texts(before, after, options), *_of_references(before, after, options)]
    found, gate, notes = _of_judge(before, after, args.judge, options)
    rows += [*found, *_of_states(before, after, options)]
    made: dict[str, pd.DataFrame] = {}
    if before.contexts.get("response_index", pd.Series(dtype=float)).notna().any():
        subjects = [subject_of(one) for one in (before, after)]
        made["turns"], more = _readings(before, after, subjects, args, folder)
        rows += _of_readings(made["turns"], options)
        if (settings := settings_of(subjects[1].spec)).get("command") == "rl":
            made["rewards"] = _rewards(before, after, subjects[0], settings, args, folder)
            rows += _of_rewards(made["rewards"], options)
    else:
        more = ["The runs have one response per query: there is no I_K and no evidence."]
    rows = corrected(rows, lambda row: (row.quantity, row.names["dataset"] == ALL))
    frame = frame_of(rows, COLUMNS)
    return result_of(
        runs,
        gate,
        estimates=frame,
        tables=tables(frame, args.level),
        figures={"displacement": displacement(frame)},
        data=made,
        notes=notes + more + _farthest(frame),
        sentence=stated(
            "bits by which a turn tells more about its response after training than before",
            frame[(frame["quantity"] == INFORMATION) & (frame["of"] == CHANGE)],
            null=0.0,
            level=args.level,
        ),
        control=stated(
            "share of the turns after training that quote another response to the query in the "
            "place of their own",
            frame[(frame["quantity"] == OTHERS) & (frame["of"] == AFTER)],
        ),
    )


def _pair(runs: list[Run]) -> list[Run]:
    """The two runs, over the same contexts.

    Raises:
        UserError: others than two, of the same weights, or over other contexts.
    """
    if len(runs) != 2:
        what = "one run" if len(runs) == 1 else f"{len(runs)} runs"
        raise UserError(f"{what} can't be compared", "give the base model's and the tuned one's")
    if len({run.model["weights_hash"] for run in runs}) < 2:
        raise UserError("both runs are of the same weights", "sample one of them with --adapter")
    ids = [run.contexts[["context_id", "token_ids"]].map(list) for run in runs]
    if not ids[0].equals(ids[1]):
        raise UserError(
            f"{runs[0].path} and {runs[1].path} are over different contexts",
            "sample both on the same conversations, with their responses given",
        )
    same_settings(runs)
    return runs


def _both(
    group: Group,
    quantity: str,
    values: list[pd.Series],
    sources: list,
    most: float = np.inf,
    least: float = 0.0,
) -> Iterator[TidyEstimate]:
    """The mean of before and of after, from ``least`` to ``most``, and their paired difference;
    nothing where there are no values."""
    if any(one.isna().all() for one in values):
        return
    of_rate = all(set(one.dropna().unique()) <= {0, 1} for one in values)
    for of, one, where in zip((BEFORE, AFTER), values, sources, strict=True):
        own = Group(np.asarray(where), group.options, group.names)
        row = own.mean(quantity, one, proportion=of_rate, of=of)
        yield replace(row, estimate=row.estimate.within(least, most))
    (a, b), (where_a, where_b) = values, sources
    yield paired_row(group, quantity, b, where_b, a, where_a, of=CHANGE)


# -- texts, verdicts, references, states ----------------------------------------------------------


def _of_texts(before: Run, after: Run, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    tables = [_texts(one) for one in (before, after)]
    for dataset, _ in by_dataset(tables[0]):
        for t in sorted(tables[0]["temperature"].unique()):
            at = [_at(one, dataset, t) for one in tables]
            group = Group(np.array([]), options, {"dataset": dataset, "temperature": float(t)})
            for name in TEXTS:
                yield from _both(group, name, [x[name] for x in at], [x["source"] for x in at], 1.0)


def _at(turns: pd.DataFrame, dataset: str, temperature: float) -> pd.DataFrame:
    here = (turns["dataset"] == dataset) | (dataset == ALL)
    return turns[here & (turns["temperature"] == temperature)]


def _texts(run: Run) -> pd.DataFrame:
    """A row per turn: what can be told from its text, and where it stands."""
    contexts = run.contexts
    contexts = contexts.assign(source=contexts["dataset"] + "\x1f" + contexts["source_id"])
    messages = dict(zip(contexts["context_id"], contexts["messages"], strict=True))
    alternatives: dict[str, list[str]] = {}
    for source, said in zip(contexts["source"], contexts["messages"], strict=True):
        alternatives.setdefault(source, []).append(said[-1]["content"])
    turns = run.generations.assign(
        source=run.generations["dataset"] + "\x1f" + run.generations["source_id"]
    )
    rows = []
    for name, source, text, reason in zip(
        turns["context_id"], turns["source"], turns["text"], turns["finish_reason"], strict=True
    ):
        *_, asked, said = messages[name]
        quote, own = quote_of(text), said["content"]
        others = [one for one in alternatives[source] if one != own]
        quoted = [quote is not None and quote in one for one in others]
        rows.append(
            {
                FORM: float(quote is not None),
                OWN: float(quote is not None and quote in own),
                OTHERS: np.mean(quoted) if others else np.nan,
                RESTATED: restated(text, asked["content"]),
                REPEATED: repeated(text),
                ENDED: float(reason == "turn_end"),
            }
        )
    table = pd.DataFrame(rows, index=turns.index)
    table = pd.concat([turns[["dataset", "source", "temperature"]], table], axis=1)
    table[STOCK] = 0.0
    for _, at in table.groupby("temperature").groups.items():
        table.loc[at, STOCK] = stock(list(turns.loc[at, "text"]), list(turns.loc[at, "source"]))
    return table


def _of_judge(
    before: Run, after: Run, judge: str | None, options: dict[str, Any]
) -> tuple[list[TidyEstimate], Gate | None, list[str]]:
    """Rates, floor and excess of both, and the paired differences of the rates."""
    if judge is None and not (before.labels.judges and after.labels.judges):
        return [], None, ["The runs have not been judged: there is no rate, floor or excess."]
    judged = [read_runs([one], judge) for one in (before, after)]
    if judged[0].record != judged[1].record:
        raise UserError("the runs were judged by different judges", "judge both with the same one")
    rows = []
    for of, one in zip((BEFORE, AFTER), judged, strict=True):
        found = rates_of(one, level=options["level"], seed=options["seed"]).fillna({"decoy": ""})
        for row in found.to_dict("records"):
            name = RATES.get((row["outcome"], row["quantity"], row["decoy"]))
            if name is None:
                continue
            names = {"dataset": row["dataset"], "temperature": row["temperature"], "of": of}
            estimate = Estimate(*(row[k] for k in ("value", "low", "high", "sources", "method")))
            rows.append(TidyEstimate(name, names, row["rows"], estimate))
    a, b = (one.turns for one in judged)
    for dataset, _ in by_dataset(a):
        for t in sorted(a["temperature"].unique()):
            here = [_at(one, dataset, t) for one in (b, a)]
            group = Group(np.array([]), options, {"dataset": dataset, "temperature": float(t)})
            for outcome in judged[0].outcomes:
                given = [one[name] for one in here for name in (outcome, "source")]
                name = RATES[outcome, "rate", ""]
                rows.append(paired_row(group, name, *given, of=CHANGE))
    notes = [f"Before training, {judged[0].gate.sentence}."]
    return rows, judged[1].gate, notes + judged[1].notes


def _of_references(before: Run, after: Run, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    a, b = before.contexts, after.contexts
    for dataset, here in by_dataset(a):
        group = Group(np.array([]), options, {"dataset": dataset, "temperature": 1.0})
        values = [one.loc[here, "reference_bits_per_byte"].astype(float) for one in (a, b)]
        where = list(a.loc[here, "dataset"] + "\x1f" + a.loc[here, "source_id"])
        yield from _both(group, REFERENCE, values, [where, where])


def _of_states(before: Run, after: Run, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """How far the header's last state moved, relative to its length before, by layer."""
    where = (before.contexts["dataset"] + "\x1f" + before.contexts["source_id"]).to_numpy()
    group = Group(where, options, {"dataset": ALL, "of": CHANGE})
    for layer in before.layers:
        a, b = (one.residuals(layer, POSITION).double() for one in (before, after))
        moved = ((b - a).norm(dim=1) / a.norm(dim=1)).numpy()
        yield group.mean(MOVED, moved, layer=layer)


# -- what models read -----------------------------------------------------------------------------


def _readings(
    before: Run, after: Run, subjects: list[Subject], args: argparse.Namespace, folder: Path
) -> tuple[pd.DataFrame, list[str]]:
    """Both models' turns, read by both models, with their own header states and the other's.

    Returns:
        A row per turn, reader and header: ``bits`` and ``evidence`` (of the response that the turn
        followed); ``turns``, ``reader`` and ``header`` are :data:`BEFORE` or :data:`AFTER`.
    """
    drawn = args.queries, args.temperature, args.seed
    given = [given_turns([one], *drawn) for one in (before, after)]

    def key(query: Query) -> list:
        ids = [context.ids for context in given[0].contexts[query.source]]
        turns = [one.turns[query.source] for one in given]
        return [[one.weights_hash for one in subjects], given[0].temperature, ids, turns]

    def compute(query: Query) -> pd.DataFrame:
        return _read_query(query.source, given, subjects)

    table = computed_for_each(given[0].queries, "scoring", folder / "parts", key, compute)
    table = table.assign(temperature=given[0].temperature)
    return table, given[0].notes


def _read_query(source: str, given: list[Given], subjects: list[Subject]) -> pd.DataFrame:
    names, followed, turns = [], [], []
    for name, one in zip((BEFORE, AFTER), given, strict=True):
        for k, some in enumerate(one.turns[source]):
            names += [name] * len(some)
            followed += [k] * len(some)
            turns += some
    contexts, temperature = given[0].contexts[source], given[0].temperature
    readings = {
        name: Reading(subject.model, contexts, turns)
        for name, subject in zip((BEFORE, AFTER), subjects, strict=True)
    }
    parts = []
    for reader, reading in readings.items():
        for header, other in readings.items():
            logprobs = reading.logprobs(temperature, None if header == reader else other.header)
            about = {"turns": names, "followed": followed, "reader": reader, "header": header}
            bits = {"bits": reaction_bits(logprobs), "evidence": evidence(logprobs, followed)}
            parts.append(pd.DataFrame(about | bits))
    return pd.concat(parts, ignore_index=True)


def _of_readings(read: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    names = {"dataset": ALL, "temperature": float(read["temperature"].iloc[0])}
    group = Group(np.array([]), options, names)
    own = [
        read[(read["turns"] == of) & (read["reader"] == of) & (read["header"] == of)]
        for of in (BEFORE, AFTER)
    ]
    most = float(np.log2(read["followed"].max() + 1))
    yield from _both(group, INFORMATION, [x["bits"] for x in own], [x["source"] for x in own], most)
    for turns, some in read.groupby("turns", sort=False):
        for reader, mine in some.groupby("reader", sort=False):
            headers = dict(iter(mine.groupby("header", sort=False)))
            for header, one in headers.items():
                about = {"of": turns, "reader": reader, "header": header}
                yield Group(one["source"].to_numpy(), options, names).mean(
                    EVIDENCE, one["evidence"], **about
                )
            a, b = headers[BEFORE], headers[AFTER]
            values = b["evidence"], b["source"], a["evidence"], a["source"]
            about = {"of": turns, "reader": reader, "header": CHANGE}
            yield paired_row(group, EVIDENCE, *values, **about)


def _rewards(
    before: Run,
    after: Run,
    reader: Subject,
    settings: dict[str, Any],
    args: argparse.Namespace,
    folder: Path,
) -> pd.DataFrame:
    """A row per turn of all queries: the reward that the tuned model was trained by
    (:func:`experiments.post_training.rl.rewards`), without and with its penalties.

    It is of a turn's first tokens (:data:`experiments.given_turns.TOKENS`), by the model before
    training.
    """
    every = (sys.maxsize, args.temperature, args.seed)
    given = {of: given_turns([run], *every) for of, run in ((BEFORE, before), (AFTER, after))}
    first = given[BEFORE]
    rewards = rl.rewards(settings["reward"], reader, first.chat, first.contexts)
    reward, *penalties = rewards.values()
    parts = []
    for of, one in given.items():

        def key(query: Query, one: Given = one) -> list:
            ids = [context.ids for context in one.contexts[query.source]]
            return [reader.weights_hash, settings["reward"], ids, one.turns[query.source]]

        def compute(query: Query, one: Given = one) -> pd.DataFrame:
            return pd.DataFrame({REWARD: reward(**_batch(one, [query]))})

        phase = f"rewards {of}"
        table = computed_for_each(one.queries, phase, folder / "parts", key, compute)
        batch = _batch(one, one.queries)
        lost = settings["penalty"] * np.sum([penalty(**batch) for penalty in penalties], axis=0)
        parts.append(table.assign(turns=of, **{PENALIZED: table[REWARD] - lost}))
    return pd.concat(parts, ignore_index=True).assign(temperature=first.temperature)


def _batch(given: Given, queries: list[Query]) -> dict[str, list]:
    """Turns as rewards take them."""
    rows = [
        (list(turn), query.source, k, query.messages[-1]["content"], query.responses[k])
        for query in queries
        for k, turns in enumerate(given.turns[query.source])
        for turn in turns
    ]
    names = ("completion_ids", "source", "followed", "query", "response")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _of_rewards(rewards: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    names = {"dataset": ALL, "temperature": float(rewards["temperature"].iloc[0])}
    group = Group(np.array([]), options, names)
    own = [rewards[rewards["turns"] == of] for of in (BEFORE, AFTER)]
    for name in (REWARD, PENALIZED):
        values, sources = [x[name] for x in own], [x["source"] for x in own]
        yield from _both(group, name, values, sources, least=-np.inf)


# -- what is shown --------------------------------------------------------------------------------


def tables(estimates: pd.DataFrame, level: float) -> list[Table]:
    """Turns, verdicts, references, what models read, rewards, and how far states moved."""
    percent = f"{100 * level:g}% intervals over sources"
    index = ("dataset", "temperature", "of")
    whole = estimates[estimates["dataset"].isin(_shown(estimates))]
    columns: dict[str, tuple[str, int | str]] = {name: (name, 2) for name in TEXTS}
    found = tables_of(f"user turns before and after ({percent})", whole, columns, index=index)
    judged: dict[str, tuple[str, int | str]] = {name: (name, 2) for name in RATES.values()}
    found += tables_of("the judge's verdicts", whole, judged, index=index)
    bytes_ = {REFERENCE: ("bits per byte", 2)}
    found += tables_of(REFERENCE, estimates, bytes_, index=("dataset", "of"))
    title = "what turns tell about their response, as their own model reads them"
    found += tables_of(title, estimates, {INFORMATION: (INFORMATION, 2)}, index=("of",))
    rewarded: dict[str, tuple[str, int | str]] = {name: (name, 2) for name in (REWARD, PENALIZED)}
    found += tables_of("what training rewarded", whole, rewarded, index=("temperature", "of"))
    title = "evidence for the response: whose turns, who reads, with whose header states"
    evident = {EVIDENCE: (EVIDENCE, 2)}
    found += tables_of(title, estimates, evident, index=("of", "reader", "header"))
    return found


def _farthest(estimates: pd.DataFrame) -> list[str]:
    """A note of the layer where the header's state moved most; none if that wasn't measured."""
    moved = estimates[estimates["quantity"] == MOVED]
    if moved.empty:
        return []
    most = moved.loc[moved["value"].idxmax()]
    return [
        f"The header's last state moved by {most['value']:.2f} of its length [{most['low']:.2f}, "
        f"{most['high']:.2f}] in layer {most['layer']}, its largest move."
    ]


def _shown(estimates: pd.DataFrame) -> list[str]:
    names = estimates["dataset"].unique()
    return [ALL] if ALL in names and len(names) > 2 else list(names)


def displacement(estimates: pd.DataFrame) -> Figure:
    """How far the header's state moved, by layer."""
    rows = estimates[estimates["quantity"] == MOVED]
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    layers = rows["layer"].astype(int)
    axes.plot(layers, rows["value"], "o-", ms=3, color=COLOURS[0])
    axes.fill_between(layers, rows["low"], rows["high"], color=COLOURS[0], alpha=0.15, lw=0)
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_ylabel("distance ÷ length before")
    title_axes(axes, "how far training moved the header's last state")
    return figure
