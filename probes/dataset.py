"""The data of probes: judged contexts of one or more runs, and their hidden states.

Each row is a context, or a turn where states of a turn's tokens are read. Text and numbers are in a
data frame; hidden states are read from the runs, one layer at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from ia_mech import results
from ia_mech.cli import program, shell_word
from ia_mech.errors import UserError
from ia_mech.rates.gate import Gate
from ia_mech.rates.load import NO_ANNOTATOR, open_runs, read_runs
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.run.queries import conversations_text
from ia_mech.run.sources import sources_of
from ia_mech.run.tokens import COMPONENTS, TURN, of_turns, place_of, token_names
from ia_mech.stats import Estimate, variance_components
from probes.targets import (
    KEYS,
    MASS,
    MASS_IN_ROLE,
    MASSES,
    Outcome,
    Target,
    parse_target,
    turns_that_count,
)

MIN_SOURCES = 20  # with a positive turn, and with a negative one
LEAST_RELIABILITY = 0.3  # of siblings' rates: below it, siblings aren't probed
RUN, DATASET, SOURCE = "run", "dataset", "source"
# Of what ``ia-mech mass`` writes: what of the first tokens' probability each target is, and what of
# it no assessed turn began with.
MEASURED = {MASS: "first token sampled share", MASS_IN_ROLE: "first token sampled in role"}
UNCOVERED = "not covered"
DECIMALS = 9  # of probabilities: beyond these is rounding
ENDS = ("query_end", "response_end")  # states there hold the words of the conversation


@dataclass(frozen=True, eq=False)
class ProbeSet:
    """Contexts with an outcome, in the order of the runs and then of ``run.contexts``.

    ``contexts`` has one row per context: ``run`` (index into ``runs``), ``row`` (in
    ``run.contexts``), ``context_id``, ``dataset``, ``perturbation``, ``source`` (the same key in
    all runs), ``text`` (all messages, one below the other), ``prompt_tokens`` (up to the end of
    the query), ``response_tokens`` (from there to the response's end), ``context_tokens``,
    ``unfinished``, ``token_ids``, ``positives`` and ``trials``.

    Where states of a turn's tokens are read, it has one row per turn that counts, with the columns
    that name the turn (:data:`ia_mech.run.labels.KEY`); ``text`` then goes on with the turn's
    tokens up to the last one that is read.
    """

    runs: list[Run]  # in the given order
    judge: str  # the judge whose verdicts make the outcomes
    target: Target
    contexts: pd.DataFrame
    positions: list[str]  # that every row has, in storage order; or captured tokens
    notes: list[str]  # sentences on how the data were put together
    layers: Sequence[int]  # ascending; 0 = embeddings
    width: int  # d_model
    gate: Gate  # whether the judge can tell a turn's own conversation from a wrong one
    # Contexts are compared if they have this in common (``run``, ``dataset`` or ``source``) and
    # their perturbation. Each group gets an intercept, and labels are permuted within it.
    within: str = RUN
    has_ends: bool = False  # whether every context has states at both of :data:`ENDS`
    component: str = COMPONENTS[0]  # of captured tokens
    # Where siblings are compared, the reliability of their rates, over as many turns as a context
    # has (:mod:`ia_mech.stats.components`); None if no query has several responses.
    reliability: Estimate | None = None

    def __len__(self) -> int:
        return len(self.contexts)

    @cached_property
    def outcome(self) -> Outcome:
        """k of n per context, with sources, and runs or whatever else ``within`` says."""
        frame = self.contexts
        more = {RUN: [], DATASET: ["dataset"], SOURCE: ["source"]}[self.within]
        shared = ["run", "perturbation", *more]
        strata = frame.groupby(shared, sort=False).ngroup()
        return Outcome.from_counts(frame["positives"], frame["trials"], frame["source"], strata)

    @property
    def counted(self) -> str:
        """How many conversations there are, and how many turns (of a mass, none), in words."""
        frame = self.contexts
        conversations = len(frame.drop_duplicates(KEYS))
        turns = "" if self.target.kind in MASSES else f", {frame['trials'].sum()} turns"
        return f"{conversations_text(conversations, self.outcome.source_count)}{turns}"

    @property
    def labelled_by(self) -> str:
        """The judge and its gate, in the words of conclusions and captions."""
        return f"judge {self.gate}"

    def ends(self, layer: int) -> np.ndarray | None:
        """``[contexts, 2 d_model]`` states at :data:`ENDS`, side by side; None without them."""
        return np.hstack([self.at(layer, name) for name in ENDS]) if self.has_ends else None

    def at(self, layer: int, position: str) -> np.ndarray:
        """Hidden states, ``[contexts, d_model]`` float32, at a layer and position of all runs, or
        of the component at a captured token.

        Raises:
            UserError: there is no such layer, a value isn't finite, or a file can't be read.
        """
        states = np.empty((len(self), self.width), dtype=np.float32)
        for number, frame in self.contexts.groupby("run"):
            run = self.runs[number]
            found = _states(run, layer, position, self.component, frame)
            finite = np.isfinite(found).all(axis=1)
            if not finite.all():
                context = frame["context_id"].iloc[int(np.argmin(finite))]
                raise UserError(
                    f"layer {layer} at {position} holds NaN or infinity for context {context} "
                    f"of {run.path}",
                    "sample it again with --dtype float32 and another --out",
                )
            states[frame.index] = found
        return states


def read(
    runs: Sequence[str | Path | Run],
    judge: str | None = None,
    target: str = "rate",
    positions: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    within: str = RUN,
    tokens: Sequence[str] = (),
    component: str = COMPONENTS[0],
) -> ProbeSet:
    """Read judged runs.

    Args:
        runs: folders, or runs that are open.
        judge: the judge whose verdicts count; see :func:`ia_mech.run.labels.choose_judge`.
        target: what to predict, as :func:`probes.targets.parse_target` takes it.
        positions, layers: those to read; all that were kept if not given.
        within: see :class:`ProbeSet`.
        tokens, component: in place of positions, what ``ia-mech capture`` has added. With a token
            of turns, each turn that counts is a row.

    Raises:
        UserError: :func:`ia_mech.rates.read_runs` refuses the runs (unfinished, not judged, …);
            their models differ in size; the target, a position or a layer is unknown; no context
            has an outcome; or no position is in all contexts.
    """
    wanted, names = parse_target(target), token_names(tokens)
    _check_tokens(names, component, positions, within)
    if wanted.kind in MASSES and of_turns(names):
        raise UserError(
            f"{wanted.words} is of contexts, not of turns", "give tokens of the context"
        )
    judged = read_runs(runs, judge, NO_ANNOTATOR)
    runs = judged.runs
    gate = judged.gate
    notes = [*judged.notes, f"{gate.short}."]
    _check_same_size(runs)
    each = [_contexts(run, number) for number, run in enumerate(runs)]
    contexts, has = (pd.concat(frames, ignore_index=True) for frames in zip(*each, strict=True))
    reliability = None
    if wanted.kind in MASSES:
        each_run = enumerate(runs)
        counts = pd.concat([_masses(run, n, wanted, judged.judge, notes) for n, run in each_run])
    else:
        counted = turns_that_count(wanted, judged.turns)
        numbers = {str(run.path): number for number, run in enumerate(runs)}
        keys = ["run", *KEY] if of_turns(names) else KEYS
        by = counted.assign(run=counted["run"].astype(str).map(numbers)).groupby(
            keys, observed=True
        )
        counts = by["positive"].agg(positives="sum", trials="size").astype(int).reset_index()
        reliability = _reliability(counted) if within == SOURCE else None
    kept = contexts.assign(place=contexts.index).merge(counts, on=KEYS)
    there = kept.pop("place")
    if not len(kept):
        raise UserError(
            f"none of the {len(contexts)} conversations has an outcome for the target "
            f"{wanted.name}",
            "choose another target: " + wanted.describe(),
        )
    if lacking := len(contexts) - there.nunique():
        notes.append(
            f"{lacking} of {len(contexts)} conversations have no outcome for the target "
            f"{wanted.name} and are left out."
        )
    has = has.loc[there].eq(True)
    data = ProbeSet(
        runs=runs,
        judge=judged.judge,
        target=wanted,
        positions=names or _common_positions(has, positions, notes),
        contexts=kept,
        notes=notes,
        layers=_chosen_layers(runs[0].layers, layers),
        width=runs[0].model["d_model"],
        within=within,
        gate=gate,
        reliability=reliability,
        has_ends=all(name in has and has[name].all() for name in ENDS),
        component=component,
    )
    return _with_tokens(data, layers is None) if names else data


def _check_tokens(
    tokens: list[str], component: str, positions: Sequence[str] | None, within: str
) -> None:
    """Refuse what can't be asked for together with captured tokens, or without them."""
    if not tokens and component != COMPONENTS[0]:
        raise UserError(f"a component {component} without tokens", "name captured ones (--at)")
    if tokens and positions:
        raise UserError("positions and captured tokens (--at) together", "give one of them")
    if of_turns(tokens) and within == SOURCE:
        raise UserError(
            "--within source compares responses, not turns", "give tokens of the context, or run"
        )


def _with_tokens(data: ProbeSet, all_layers: bool) -> ProbeSet:
    """The rows that have the captured tokens; by default of all layers that were captured.

    Raises:
        UserError: the tokens weren't captured at a layer, or no row has all of them.
    """
    tokens, component, frame = data.positions, data.component, data.contexts
    layers = data.layers
    if all_layers:
        layers = data.runs[0].captured_layers(tokens, component) or layers[1:]
    has, texts = pd.Series(True, frame.index), frame["text"].copy()
    for number, own in frame.groupby("run"):
        run = data.runs[number]
        for layer in layers:
            for token in tokens:
                has[own.index] &= ~np.isnan(_states(run, layer, token, component, own)).any(1)
        if of_turns(tokens):
            written = run.generations.set_index([*KEY])["token_ids"]
            ids = written.loc[pd.MultiIndex.from_frame(own[[*KEY]])]
            texts[own.index] += [_read_of_turn(tokens, one) for one in ids]
    what = "turns" if of_turns(tokens) else "conversations"
    lacking = f"{(~has).sum()} of {len(has)} {what} lack one of {' '.join(tokens)}"
    if not has.any():
        raise UserError(lacking, "give other tokens (--at)")
    notes = [*data.notes, f"states: {component} of {' '.join(tokens)}."]
    notes += [f"{lacking} and are left out."] * (not has.all())
    if of_turns(tokens):
        notes.append("each turn is a row; the text control reads it, too, up to the last token.")
    kept = frame.assign(text=texts)[has].reset_index(drop=True)
    return replace(data, layers=layers, contexts=kept, notes=notes)


def _read_of_turn(tokens: Sequence[str], ids: Sequence[int]) -> str:
    """A turn's tokens, up to the last one that is read, as words for the text control."""
    whole = {TURN: range(len(ids))}
    end = max(place_of(token, whole) for token in tokens if of_turns([token]))
    return "".join(f" token{one}" for one in ids[: end + 1])


def _states(run: Run, layer: int, position: str, component: str, rows: pd.DataFrame) -> np.ndarray:
    """``[rows, d_model]`` float32, at a position or a captured token."""
    if ":" in position:
        found = run.residuals(layer, tokens=position, component=component, turns=rows)
        return found.float().numpy()
    return run.residuals(layer, position).float().numpy()[rows["row"]]


def masses_of(run: Run, judge: str) -> results.Result:
    """What ``ia-mech mass`` found in a run.

    Raises:
        UserError: it wasn't asked, or another judge was.
    """
    folder = results.folder_of(run.path, MASS)
    found = results.read(folder)
    if (by := found.about["judge"]) != judge:
        raise UserError(
            f"{folder} is of the judge {by!r}, and not of {judge!r}",
            f"give --judge {shell_word(by)}, or make it again: {program()} mass "
            f"{shell_word(run.path)} --judge {shell_word(judge)}",
        )
    return found


def _masses(run: Run, number: int, target: Target, judge: str, notes: list[str]) -> pd.DataFrame:
    """``positives`` and ``trials`` by ``run`` and ``context_id``. The command that found them is
    noted."""
    notes.append(f"masses are those of: {masses_of(run, judge).about['command']}")
    found = pd.read_parquet(results.folder_of(run.path, MASS) / "contexts.parquet")
    tried = (1 - found[UNCOVERED]).round(DECIMALS)
    held = found[MEASURED[target.kind]].round(DECIMALS).clip(upper=tried)
    counts = found[["context_id"]].assign(run=number, positives=held, trials=tried)
    return counts[tried > 0].dropna()


def _reliability(turns: pd.DataFrame) -> Estimate | None:
    """The reliability of siblings' rates over these turns; None if it can't be estimated."""
    draws = turns.assign(positive=turns["positive"].astype(float))
    tables = [
        own.pivot(index="context_id", columns=["temperature", "sample"], values="positive")
        for _, own in draws.groupby(["run", "source"], observed=True)
    ]
    try:
        components = variance_components([table.to_numpy() for table in tables])
    except ValueError:
        return None
    each = draws.groupby(KEYS, observed=True).size()
    return components.reliability(round(float(each.mean())))


def check_reliable(data: ProbeSet) -> None:
    """Refuse to probe siblings whose rates don't differ reliably. Masses, which nothing was drawn
    for, are reliable.

    Raises:
        UserError: no query has several responses, or the upper end of the reliability of their
            rates is below :data:`LEAST_RELIABILITY`.
    """
    if data.target.kind in MASSES:
        if not data.contexts.duplicated(["run", "source"]).any():
            raise UserError(
                f"no query has several responses with {data.target.words}",
                "give a run with --responses 4, after mass with --responses 4",
            )
        return
    found = data.reliability
    if found is None:
        raise UserError("no query has several responses", "give a run with --responses 4")
    if found.high < LEAST_RELIABILITY:
        raise UserError(
            f"{data.target.words} hangs on the query, not on its response: the reliability of "
            f"siblings' rates is {found.text()}, too low for a probe of siblings",
            "that is a result; --within run asks which queries",
        )


# -- is there enough? -----------------------------------------------------------------------------


def check_enough(outcome: Outcome, target: Target) -> None:
    """Refuse outcomes on which no probe can be trained and tested.

    Raises:
        UserError: too few sources have a positive turn, or a negative one; only runs whose rates
            differ between contexts count.
    """
    sources = outcome.source_count
    needs = f"a probe takes about {2 * MIN_SOURCES} queries: {MIN_SOURCES} with a turn that counts"
    needs += f" and {MIN_SOURCES} with one that doesn't"

    def fewest(rows: np.ndarray | slice) -> tuple[int, str]:
        """The number of sources with the rarer kind of turn, and a clause that says so."""
        kinds = "counts", "doesn't count"
        few, kind = min(zip(outcome.sources_of_either_kind(rows), kinds, strict=True))
        return few, f"{few} of {sources} queries have a turn that {kind} towards {target.words}"

    few, there = fewest(slice(None))
    if few < MIN_SOURCES:
        more = "sample other conversations (--dataset)"
        if few:
            enough = max(math.ceil(sources * MIN_SOURCES / few / 10) * 10, 2 * MIN_SOURCES)
            more = f"sample about {enough} queries of this kind (a larger --limit, or more data)"
        raise UserError(f"{there}; {needs}", f"{more}, or give another --target")
    # A run whose contexts all have the same rate has nothing to predict.
    varies = np.array([np.ptp(outcome.rate[outcome.runs == run]) > 0 for run in outcome.runs])
    few, there = fewest(varies)
    if few < MIN_SOURCES:
        raise UserError(
            f"conversations are compared within a run or dataset, and where their rates differ "
            f"{there}; {needs}",
            "give another --target or --within, or sample more turns of each (--samples)",
        )


# -- random blocks --------------------------------------------------------------------------------


def check_one_model(runs: Sequence[Run]) -> None:
    """Refuse runs of several models: a direction may mean something else in another model.

    Raises:
        UserError: the runs are of different models.
    """
    for run in runs[1:]:
        if run.model["weights_hash"] != runs[0].model["weights_hash"]:
            raise UserError(
                f"{runs[0].path} and {run.path} are of different models",
                "train a probe for each; probes.cross_evaluate tests one's on the other",
            )


def with_random_blocks(data: ProbeSet, runs: Sequence[str | Path | Run]) -> dict[str, ProbeSet]:
    """The same contexts with the states of models with random blocks, by a name for tables.

    Args:
        data: contexts of trained models.
        runs: each made with ``sample --random-blocks``, with all contexts of ``data``.

    Raises:
        UserError: a run's model has no random blocks or another size, or the run lacks positions or
            contexts of ``data``.
    """
    twins = {}
    for run in open_runs(runs):
        if run.model.get("random_blocks") is None:
            raise UserError(
                f"{run.path} is of a model as it was trained",
                "sample it with --random-blocks SEED, on the same conversations",
            )
        _check_same_size([data.runs[0], run])
        if of_turns(data.positions):
            raise UserError(
                "a model with random blocks writes other turns",
                "give tokens of the context, or no --random-blocks",
            )
        kept = {name for name in data.positions if ":" not in name}
        if lacking := sorted(kept - {*run.positions}):
            raise UserError(
                f"{run.path} lacks the position {', '.join(lacking)}", "sample it with --positions"
            )
        rows = {tuple(ids): row for row, ids in enumerate(run.contexts["token_ids"])}
        at = [rows.get(tuple(ids)) for ids in data.contexts["token_ids"]]
        if None in at:
            raise UserError(
                f"{run.path} lacks conversations of {', '.join(str(r.path) for r in data.runs)}",
                "sample it on the same conversations, responses included",
            )
        names = run.contexts["context_id"].to_numpy()[at]
        contexts = data.contexts.assign(run=0, row=at, context_id=names)
        twins[f"random blocks {run.model['random_blocks']}"] = replace(
            data, runs=[run], contexts=contexts
        )
    return twins


# -- what the runs have in common -----------------------------------------------------------------


def _check_same_size(runs: list[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for size, words in (("d_model", "hidden size"), ("layers", "number of blocks")):
            if run.model[size] != first.model[size]:
                raise UserError(
                    f"the models of {first.path} and {run.path} differ in their {words}: "
                    f"{first.model[size]} and {run.model[size]}",
                    "train a probe for each of them",
                )


def _chosen_layers(there: range, wanted: Sequence[int] | None) -> Sequence[int]:
    if wanted is None:
        return there
    unknown = sorted(set(wanted) - set(there))
    if unknown:
        raise UserError(
            f"no layer {', '.join(map(str, unknown))}",
            f"give some of 0 … {there[-1]} (0 = embeddings)",
        )
    return sorted(set(wanted))


def _common_positions(
    has: pd.DataFrame, wanted: Sequence[str] | None, notes: list[str]
) -> list[str]:
    """The wanted positions that every context has. A note on each of the others goes to ``notes``.

    Args:
        has: ``[contexts, positions]`` whether a context has a position and its run kept it.
        wanted: names; all if None.
    """
    if unknown := [name for name in wanted or () if name not in has]:
        raise UserError(
            f"position {', '.join(unknown)} was not kept", f"give some of {', '.join(has)}"
        )
    names = [name for name in has if wanted is None or name in wanted]
    lacking = {name: count for name in names if (count := int((~has[name]).sum()))}
    notes += [
        f"left out: {name}, which {count} of {len(has)} conversations lack."
        for name, count in lacking.items()
    ]
    if len(lacking) == len(names):
        raise UserError(
            f"no position is left: some conversations lack {', '.join(names) or 'any'}",
            "choose others with --positions, or sample with --positions all",
        )
    return [name for name in names if name not in lacking]


def _contexts(run: Run, number: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``ProbeSet.contexts`` of one run, without outcome, and which kept positions each has."""
    own = run.contexts
    at = pd.DataFrame(list(own["positions"])).reindex(columns=[*run.positions, *ENDS])
    at = at.loc[:, ~at.columns.duplicated()]
    query, response = (at[name].fillna(-1).astype(int).to_numpy() for name in ENDS)
    contexts = pd.DataFrame(
        {
            "run": number,
            "row": np.arange(len(own)),
            "context_id": own["context_id"],
            "dataset": own["dataset"],
            "perturbation": own["perturbation"].fillna("none"),
            "source": sources_of(own),
            "text": ["\n".join(m["content"] for m in messages) for messages in own["messages"]],
            "prompt_tokens": query + 1,
            "response_tokens": np.where(response < 0, 0, response - query),
            "context_tokens": own["context_tokens"].astype(int),
            "unfinished": own["response_unfinished"].fillna(False).astype(bool),
            "token_ids": own["token_ids"],
        }
    )
    return contexts, at[[*run.positions]].notna()
