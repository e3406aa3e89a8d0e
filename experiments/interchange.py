"""Does the share of sampled follow-ups travel with a state of the header?

Take the contexts whose greedy turn isn't a follow-up. Some have many sampled turns that are
follow-ups, some have few: their share is high or low, measured on half of a context's turns. For
each query, one such context is the recipient. Two contexts of other queries are its donors, one
with a high share and one with a low one. Both are equally foreign, so that what a foreign state
damages cancels. While the recipient is prefilled, its residual stream is set to a donor's, after
one of four layers, at a token that all contexts have (turn end, separator, the header's tokens, the
last of them). Then turns are sampled. The effect is the share under the high donor minus that under
the low one. Its ratio to the difference between the donors themselves, in the half of their turns
that chose nothing, is 1 if the share travels with the state. Controls are two donors of equal
share; the recipient's own states, which may not change a bit; and the donors' first tokens, which
are all that travels with the last token's state after the last layer. A cell moves the share if
that is shown at 5%, Holm-corrected over all places and layers tried.

Needs: a judged run with many sampled turns per context (16 or more), and states at all positions.
Cost: 68 contexts per query, each prefilled and sampled anew (60 queries of the embedded model: some
hours on a CPU).

    ia-mech interchange cache/RUN
    ia-mech interchange cache/RUN --outcome repeats_response --dry-run
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.arms import Arm, conversations_of, verdicts_of
from experiments.experiment import Conclusion, Experiment, Model, Unit, flag
from experiments.figures import Drawing, HeatMap
from experiments.tables import only, tables_of
from ia_mech.cli import above_zero, whole_from
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.estimates import (
    Group,
    TidyEstimate,
    all_datasets,
    by_dataset,
    could_show,
    holm_corrected,
)
from ia_mech.judge.rubric import ASSESSED, FOLLOW_UP, heading
from ia_mech.results import SHARE as AS_SHARE
from ia_mech.results import Table, cell_of
from ia_mech.stats import dyadic_mean, dyadic_test

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.chat.format import ChatContext
    from ia_mech.engine.intervene import Replace

EXCHANGED = "interchange"  # the perturbation of sampled contexts, and the key of their metadata
HEADER = "header"  # all tokens of the header together
LAST = "header_last"
TOKENS = ("turn_end", "turn_separator", HEADER, LAST)
FIRST = "first token alone"  # the last token's state after the last layer, which nothing else reads
HIGH, LOW, EQUAL_A, EQUAL_B = ARMS = ("high", "low", "equal a", "equal b")
TEMPERATURE = 0.7
SAMPLES = 16
POOL = 0.25  # donors of a high share are of the upper quarter, those of a low one of the lower
CHOOSING, SCORING = "choosing", "scoring"  # shares of turns with even and odd sample numbers
MOVED, RATIO, EQUAL = "high minus low donor", "share of the donors' difference", "equal donors"
BEYOND = "high minus low donor, beyond the first token"
DONORS, UNCHANGED = "donors' own difference, held out", "share, unchanged"
UNDER = {HIGH: "share under the high donor", LOW: "share under the low donor"}
CELL = ["term", "layer"]


def exchanged_layers(depth: int) -> list[int]:
    """The layers after which states are put in: 1, 3, 5 and 7 eighths of the depth, rounded up."""
    return list(dict.fromkeys(math.ceil(depth * eighths / 8) for eighths in (1, 3, 5, 7)))


def positions_of(places: Mapping[str, int | None], names: Sequence[str]) -> tuple[int, ...]:
    """The indices of named positions that a context has."""
    return tuple(int(at) for name in names if (at := places[name]) is not None)


# -- shares and donors -----------------------------------------------------------------------------


def with_outcome(turns: pd.DataFrame, outcome: str) -> pd.Series:
    """1 for turns of a category, 0 for others, NaN without a verdict."""
    category = turns["category"].astype(object)
    return (category == outcome).astype(float).where(category.isin(ASSESSED))


def shares_of(turns: pd.DataFrame, outcome: str, temperature: float) -> pd.DataFrame:
    """The shares of contexts, measured in each half of their turns.

    Args:
        turns: of :class:`ia_mech.rates.load.JudgedTurns`.
        outcome: the category whose share it is.
        temperature: of the turns that count.

    Returns:
        A row per context, indexed from 0: ``dataset``, ``source``, ``context_id``, ``unfinished``,
        ``greedy`` (1 if the greedy turn has the outcome), :data:`CHOOSING`, :data:`SCORING`, and
        ``share`` of both halves; NaN where nothing was judged.
    """
    keys = ["dataset", "source", "context_id", "unfinished"]
    rows = turns[[*keys, "temperature", "sample"]].astype(dict.fromkeys(keys[:3], object))
    rows = rows.assign(value=with_outcome(turns, outcome))
    drawn = rows[rows["temperature"] == temperature]
    halves = {
        "greedy": rows[rows["temperature"] == 0],
        CHOOSING: drawn[drawn["sample"] % 2 == 0],
        SCORING: drawn[drawn["sample"] % 2 == 1],
        "share": drawn,
    }
    found = {name: half.groupby(keys)["value"].mean() for name, half in halves.items()}
    return pd.DataFrame(found).reset_index()


def donors_of(contexts: pd.DataFrame, recipients: Sequence[int], seed: int) -> pd.DataFrame:
    """Donors for recipients, all of the same dataset and of other queries than the recipient's.

    High and low donors come from the upper and the lower quarter by :data:`CHOOSING`. The two equal
    donors are any context and the nearest to it, in random order. Of the possible donors the least
    used ones are taken, by lot.

    Args:
        contexts: ``dataset``, ``source`` and :data:`CHOOSING`, indexed from 0.
        recipients: of the contexts.
        seed: of the lots.

    Returns:
        A row per recipient that has all four: ``recipient`` and :data:`ARMS`, of the contexts.
    """
    rng, used, found = np.random.default_rng([seed, 5]), Counter[int](), []
    source, share = contexts["source"].to_numpy(), contexts[CHOOSING].to_numpy(float)

    def taken(pool: np.ndarray, *besides: int) -> int | None:
        others = [i for i in pool.tolist() if source[i] not in {source[j] for j in besides}]
        return min(others, key=lambda i: (used[i], rng.random()), default=None)

    for one in recipients:
        same = contexts["dataset"].to_numpy() == contexts["dataset"].iloc[one]
        pool = np.flatnonzero(same & (source != source[one]))
        if len(np.unique(source[pool])) < 2:
            continue
        few, many = np.quantile(share[pool], [POOL, 1 - POOL])
        high = taken(pool[share[pool] >= many], one)
        low = None if high is None else taken(pool[share[pool] <= few], one, high)
        first = taken(pool, one)
        assert first is not None
        others = pool[source[pool] != source[first]]
        apart = abs(share[others] - share[first])
        second = taken(others[apart == apart.min()], one)
        if high is None or low is None or second is None:
            continue
        equal = rng.permutation([first, second]).tolist()
        used.update([high, low, *equal])
        found.append([one, high, low, *equal])
    return pd.DataFrame(found, columns=["recipient", *ARMS])


# -- estimate --------------------------------------------------------------------------------------


def estimates(rows: pd.DataFrame, options: dict[str, Any]) -> Iterator[TidyEstimate]:
    """Every estimate, with its interval over queries: those of the recipient and of its donors, as
    values that share one may depend on each other (:func:`ia_mech.stats.dyadic_mean`).

    There is no ratio where the donors' own difference isn't shown to be above 0, and nothing beyond
    the first token where that wasn't put in alone.

    Args:
        rows: a row per recipient and cell: ``dataset``, ``source``, :data:`CELL`, ``unchanged``,
            the share under each of :data:`ARMS`, and of each donor its query (``query high``, …)
            and its share in the half that chose nothing (``own high``, …).
        options: ``level``, ``resamples`` and ``seed``.
    """
    level = options["level"]

    def row(of: Group, quantity: str, values: Any, queries: Any, most: float = 1) -> TidyEstimate:
        each = (queries[name] for name in queries)
        found = dyadic_test(values, *each, ends=(-most, most), level=level)
        return of.row(quantity, found.difference, len(values), p=found.p, test=found.test)

    for dataset, here in by_dataset(rows):
        of_recipient = rows[here].drop_duplicates("source")
        group = Group(of_recipient["source"].to_numpy(), options, {"dataset": dataset})
        yield group.mean(UNCHANGED, of_recipient["unchanged"], proportion=True)
        high, low = (of_recipient[f"own {arm}"] for arm in (HIGH, LOW))
        apart = row(group, DONORS, high - low, of_recipient[["query high", "query low"]])
        yield apart
        first = rows[here & (rows["term"] == FIRST)].set_index("source")
        for (term, layer), cell in rows[here].groupby(CELL, sort=False):
            sources = cell["source"].to_numpy()
            own = Group(sources, options, group.names | {"term": term, "layer": layer})
            for arm, quantity in UNDER.items():
                pair = cell["source"], cell[f"query {arm}"]
                share = dyadic_mean(cell[arm], *pair, ends=(0, 1), level=level)
                yield own.row(quantity, share, len(cell))
            for quantity, a, b in ((MOVED, HIGH, LOW), (EQUAL, EQUAL_A, EQUAL_B)):
                queries = cell[["source", f"query {a}", f"query {b}"]]
                yield row(own, quantity, cell[a] - cell[b], queries)
            queries = cell[["source", "query high", "query low"]]
            moved, whole = cell[HIGH] - cell[LOW], cell["own high"] - cell["own low"]
            if len(first) and term != FIRST:
                alone = (first[HIGH] - first[LOW]).loc[sources].to_numpy()
                yield row(own, BEYOND, moved - alone, queries, most=2)
            if apart.estimate.low > 0 and whole.mean() > 0:
                ratio = moved.mean() / whole.mean()
                linear = ratio + (moved - ratio * whole) / whole.mean()  # the delta method
                most = abs(ratio) + (1 + abs(ratio)) / whole.mean()
                yield replace(row(own, RATIO, linear, queries, most), p=np.nan, test=None)


@dataclass(frozen=True)
class Recipient(Unit):
    """A context whose own states are put in, which may not change what is computed of it.

    Attributes:
        context: its token ids.
        cells: the tokens and the layer of each.
    """

    context: tuple[int, ...]
    cells: list[tuple[tuple[int, ...], int]]


class Interchange(Experiment):
    """See the module.

    Attributes:
        contexts: those whose greedy turn lacks the outcome, as of :func:`shares_of`.
        donors: of recipients, as of :func:`donors_of`.
    """

    name = "interchange"
    judged = True
    queries_used = 60
    columns: ClassVar = {"dataset": "str", "term": "str", "layer": "Int64"}

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add, names = partial(flag, parser), ", ".join(ASSESSED)
        share = f"whose share is exchanged, one of {names}"
        add("--outcome", str, FOLLOW_UP, share, choices=ASSESSED, metavar="CATEGORY")
        add("--samples", whole_from(1), SAMPLES, "turns under each donor", metavar="N")
        turns = "of turns, one that the runs have"
        add("--temperature", above_zero, TEMPERATURE, turns, metavar="T")
        where = "where states are put (default: all four)"
        add("--tokens", str, None, where, nargs="+", choices=TOKENS, metavar="TOKEN")
        after = "after which (default: 1, 3, 5 and 7 eighths of them)"
        add("--layers", whole_from(1), None, after, nargs="+", metavar="L")

    @property
    def outcome(self) -> str:
        """As it is shown: ``judged 'repeats response'``."""
        return f"judged {heading(self.args.outcome)!r}"

    # -- chosen -----------------------------------------------------------------------------------

    def read(self) -> None:
        """Measure the shares and choose recipients and donors.

        Raises:
            UserError: the runs lack the temperature, turns to tell contexts apart, or contexts.
        """
        settings = self.runs[0].settings
        if self.args.temperature not in settings["temperatures"] or settings["samples"] < SAMPLES:
            has = ", ".join(f"{t:g}" for t in settings["temperatures"]) or "greedy ones alone"
            raise UserError(
                f"shares of conversations take {SAMPLES} turns of each at one temperature; "
                f"{self.runs[0].path} has {settings['samples']} at T = {has}, and T = "
                f"{self.args.temperature:g} was asked for",
                f"give --temperature, or sample more turns (ia-mech sample --samples {SAMPLES})",
            )
        turns = self.verdicts.turns
        every = shares_of(turns, self.args.outcome, self.args.temperature).dropna()
        finished = every[~every["unfinished"].astype(bool)]
        self.contexts = finished[finished["greedy"] == 0].reset_index(drop=True)
        chosen = self.contexts["source"].isin([query.source for query in self.queries])
        recipients = self.contexts[chosen].drop_duplicates("source").index
        self.donors = donors_of(self.contexts, recipients, self.args.seed)
        if len(self.donors) < 2:
            raise UserError(
                f"{len(self.donors)} queries have a finished response whose greedy turn isn't "
                f"{self.outcome}, and donors among other queries of their dataset (of "
                f"{len(every)} judged conversations {len(finished)} have a finished response, and "
                f"{len(self.contexts)} of these such a turn)",
                "give a run of more queries with finished responses, or another --outcome",
            )
        every_donor = self.donors[list(ARMS)].stack()
        most, given = every_donor.value_counts().max(), self.contexts["source"][every_donor]
        self.notes.append(
            f"{len(self.contexts)} of {len(every)} judged conversations are finished and have a "
            f"greedy turn that isn't {self.outcome}; {len(self.donors)} of {len(self.queries)} "
            "queries have such a recipient with donors. The donors are of "
            f"{given.nunique()} queries; a conversation is one at most {most} times."
        )

    @cached_property
    def rows_of_contexts(self) -> pd.DataFrame:
        """The rows of ``Run.contexts`` of :attr:`contexts`, in their order, with ``row``, which
        counts the contexts of all runs."""
        every = pd.concat([run.contexts for run in self.runs], ignore_index=True)
        every = every.assign(row=range(len(every))).set_index(["dataset", "context_id"], drop=False)
        keys = self.contexts[["dataset", "context_id"]].itertuples(index=False, name=None)
        return every.loc[list(keys)].reset_index(drop=True)

    @cached_property
    def tokens(self) -> dict[str, list[str]]:
        """Where states are put: the name of the place → its positions. With the last token comes
        the control that puts in its first token alone.

        Raises:
            UserError: no state of these places was kept.
        """
        there = pd.DataFrame(self.rows_of_contexts["positions"].tolist()).notna().all()
        kept = set.intersection(*(set(run.positions) for run in self.runs))
        names = [name for name in there.index[there] if name in kept]
        header = [name for name in names if name.startswith("header_")]
        wanted = self.args.tokens or TOKENS
        places = {place: header if place == HEADER else [place] for place in TOKENS}
        found = {at: places[at] for at in wanted if places[at] and {*places[at]} <= {*names}}
        if not found:
            raise UserError(
                f"{self.runs[0].path} keeps no state at {', '.join(wanted)}",
                "sample again with --positions all",
            )
        return found | ({FIRST: [LAST]} if LAST in found else {})

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Places, each after each layer, but for the control, which is after the last one.

        Raises:
            UserError: the model has no such layer.
        """
        depth = self.runs[0].model["layers"]
        layers = sorted({*(self.args.layers or exchanged_layers(depth))})
        if layers[-1] > depth:
            raise UserError(f"--layers {layers[-1]}: the model has {depth}", "give 1 to that")
        return [
            (place, layer)
            for place in self.tokens
            for layer in ([depth] if place == FIRST else layers)
        ]

    # -- sampled ----------------------------------------------------------------------------------

    def arms(self) -> Mapping[str, Arm]:
        own = conversations_of(self.rows_of_contexts)
        states = [run.identity_digest for run in self.runs]
        found = []
        for row in self.donors.to_dict("records"):
            recipient = own[row["recipient"]]
            for place, layer in self.cells:
                for arm in ARMS:
                    about = {"place": place, "layer": layer, "arm": arm, "runs": states}
                    about |= {"recipient": row["recipient"], "donor": own[row[arm]].id}
                    about |= {"row": int(self.rows_of_contexts["row"][row[arm]])}
                    changed = replace(
                        recipient,
                        id=f"{recipient.id}~{place}~{layer}~{arm.replace(' ', '_')}",
                        perturbation=EXCHANGED,
                        real_follow_up=None,
                        metadata=recipient.metadata | {EXCHANGED: about},
                    )
                    found.append(changed)
        settings = {"temperatures": (self.args.temperature,), "samples": self.args.samples}
        return {"turns": Arm(found, settings, self._donor_states)}

    @cached_property
    def _states(self) -> "dict[tuple[int, str], Tensor]":
        """``[contexts of all runs, d_model]`` by layer and position."""
        import torch

        return {
            (layer, position): torch.cat([run.residuals(layer, position) for run in self.runs])
            for place, layer in self.cells
            for position in self.tokens[place]
        }

    def _donor_states(self, conversation: Conversation, context: "ChatContext") -> "list[Replace]":
        """What a conversation's donor has, where it is put."""
        import torch

        from ia_mech.engine.intervene import Replace

        about = conversation.metadata[EXCHANGED]
        layer, names = about["layer"], self.tokens[about["place"]]
        at = positions_of(context.positions, names)
        donor = [self._states[layer, name][about["row"]] for name in names]
        return [Replace(layer, at, torch.stack(donor))]

    # -- the recipient's own states ---------------------------------------------------------------

    def units(self) -> list[Unit]:
        found = list[Unit]()
        for recipient in self.donors["recipient"]:
            row = self.rows_of_contexts.iloc[recipient]
            ids = tuple(row["token_ids"].tolist())
            cells = [
                (positions_of(row["positions"], self.tokens[place]), layer)
                for place, layer in self.cells
            ]
            query = self.contexts["source"][recipient], row["dataset"]
            found.append(Recipient(*query, 2 * len(cells) * len(ids), ids, cells))
        return found

    @staticmethod
    def measure(model: Model, unit: Recipient) -> pd.DataFrame:
        """Compare what a turn goes on from, logits and the whole state, with and without the
        recipient's own states put in.

        Raises:
            UserError: they differ in a bit.
        """
        import torch

        from ia_mech.engine.intervene import Replace
        from ia_mech.engine.state import Prefix, held_tensors, prefill

        subject, places = model.subject.model, sorted({at for one, _ in unit.cells for at in one})
        with torch.inference_mode():
            plain = prefill(subject, [Prefix(unit.context, places)] * len(unit.cells))
            states = plain.residuals
            assert states is not None
            own = []
            for number, (at, layer) in enumerate(unit.cells):
                put = states[number, layer, [places.index(one) for one in at]]
                own.append(Prefix(unit.context, places, (Replace(layer, at, put),)))
            again = prefill(subject, own)
        every = [
            [one.logits, *(x for layer in one.state.cache.layers for x in held_tensors(layer))]
            for one in (plain, again)
        ]
        same = [
            all(torch.equal(a[number], b[number]) for a, b in zip(*every, strict=True))
            for number in range(len(unit.cells))
        ]
        model.on_tokens(unit.tokens)
        if not all(same):
            raise UserError(
                f"a context's own states, put where they were, change what is computed in "
                f"{same.count(False)} of {len(same)} cells: this model can't be measured so",
                "report it with the model's name",
            )
        return pd.DataFrame({"same": same})

    # -- estimated --------------------------------------------------------------------------------

    def rows(self) -> pd.DataFrame:
        self._own = len(self.measure_units(self.units(), "putting in own states"))
        judge, (run,) = self.judge_arms(), self.sampled.values()
        turns = verdicts_of([run], judge).turns
        turns = turns[turns["temperature"] == self.args.temperature]
        labels = with_outcome(turns, self.args.outcome)
        share = labels.groupby(turns["context_id"].astype(object)).mean()
        about = pd.DataFrame([json.loads(text)[EXCHANGED] for text in run.contexts["metadata"]])
        about = about.assign(share=share.reindex(run.contexts["context_id"]).to_numpy())
        table = about.pivot_table(
            index=["recipient", "place", "layer"], columns="arm", values="share", sort=False
        )
        table = table.reindex(columns=list(ARMS)).dropna().reset_index()
        of = self.contexts
        donors = self.donors.set_index("recipient").loc[table["recipient"]]
        for arm in ARMS:
            table[f"own {arm}"] = of[SCORING].to_numpy()[donors[arm]]
            table[f"donor {arm}"] = of["context_id"].to_numpy()[donors[arm]]
            table[f"query {arm}"] = of["source"].to_numpy()[donors[arm]]
        for name in ("dataset", "source", "context_id"):
            table[name] = of[name].to_numpy()[table["recipient"]]
        table["unchanged"] = of["share"].to_numpy()[table["recipient"]]
        return table.drop(columns="recipient").rename(columns={"place": "term"})

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected over cells, by quantity and dataset, the control apart."""

        def family(row: TidyEstimate) -> tuple:
            return row.quantity, row.names["dataset"], row.names.get("term") == FIRST

        return holm_corrected(list(estimates(rows, self.options)), family)

    # -- shown ------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        title = f"share {self.outcome} under states of donors, T = {self.args.temperature:g}"
        columns: dict[str, tuple[str, int | str]] = {
            MOVED: ("high minus low", "+.2f"),
            BEYOND: ("beyond the first token", "+.2f"),
            RATIO: ("of the donors' difference", AS_SHARE),
            EQUAL: ("equal donors", "+.2f"),
            UNDER[HIGH]: ("under high", 2),
            UNDER[LOW]: ("under low", 2),
        }
        whole: dict[str, tuple[str, int | str]] = {
            UNCHANGED: ("recipients, unchanged", 2),
            DONORS: ("high minus low donors", "+.2f"),
        }
        return [
            *tables_of(
                title,
                found,
                columns,
                detectable=MOVED,
                most=1.0,
                index=("dataset", "term", "layer"),
                rows="recipients",
                legend="Paired by recipient, intervals over recipients' and donors' queries; p: "
                "Holm-corrected over lines, without the first "
                "token. Of the donors' difference: 1 if the share travels with the state. Beyond "
                "the first token: minus the same difference under the donors' first tokens alone.",
            ),
            *tables_of(
                "what there is to move",
                found,
                whole,
                index=("dataset",),
                rows="recipients",
                legend="Donors: in the half of their turns that didn't choose them. The whole "
                "context moves so much.",
            ),
        ]

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = all_datasets(only(found, MOVED))
        rows = rows[rows["term"] != FIRST]
        title = f"{self.runs[0].model['name']} · {self.outcome}"
        unit = "share under the high donor minus that under the low one"
        return {"cells": HeatMap(title, "after layer", "token", unit, rows, "layer", "term")}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        level, whole = self.args.level, all_datasets(found)
        moved, equal = only(whole, MOVED), only(whole, EQUAL)
        first, moved = moved[moved["term"] == FIRST], moved[moved["term"] != FIRST]
        shown = moved[moved["p_holm"] <= 1 - level]
        apart = self.tested("the donors' own shares differ by", only(whole, DONORS), most=1)
        what = f"the share of sampled turns that are {self.outcome}"
        if len(shown):
            ratios, beyond = (only(whole, name).set_index(CELL) for name in (RATIO, BEYOND))
            said = []
            for _, row in shown.iterrows():
                said.append(f"{row['term']} after layer {row['layer']} {cell_of(row, '+.2f')}")
                if (key := (row["term"], row["layer"])) in ratios.index:
                    said[-1] += f", {cell_of(ratios.loc[key], AS_SHARE)} of the donors' difference"
                if key in beyond.index:
                    said[-1] += f", beyond the first token {cell_of(beyond.loc[key], '+.2f')}"
            sentence = f"A state moves {what} at {len(said)} of {len(moved)} cells: "
            sentence += f"{'; '.join(said)}. {apart}"
        else:
            low, high = moved["detectable"].min(), moved["detectable"].max()
            could = could_show(low, most=1)
            if len(moved) > 1 and high < 1:
                could = f"with 80% power {low:.2f} to {high:.2f} would have been shown, uncorrected"
            cells = f"{len(moved)} cell{'s' * (len(moved) > 1)}"
            sentence = f"No state is shown to move {what} ({cells}); {could}. {apart}"
        false = int((equal["p_holm"] <= 1 - level).sum())
        assert self.gate is not None
        control = (
            f"Two donors of equal share differ at {false} of {len(equal)} cells (largest "
            f"{equal['value'].abs().max():.2f}). The recipient's own states change no bit in any "
            f"of {self._own} cells. "
        )
        if len(first):
            alone = cell_of(first.iloc[0], "+.2f")
            control += f"Under the donors' first tokens alone the share differs by {alone}. "
        control += f"{self.gate.short}."
        return Conclusion(sentence, control)


main = Interchange.main

if __name__ == "__main__":
    sys.exit(main())
