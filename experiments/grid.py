"""Changes × outcomes: what experiments share that put a part of one context into another.

A subclass lists its ``cells`` (what is changed), and of which ``outcomes`` it asks; ``--outcome``
chooses. The runner and the statistics are the same for all:

- ``bits``: of a query's four responses one is the recipient, the others are candidates. Turns that
  followed a candidate are scored after the recipient with each candidate's part
  (:class:`experiments.locate.Bits`).
- ``follow-up``: the recipient is a context whose greedy turn isn't a follow-up. Turns are sampled
  after it with parts of donors: of two with a high and a low share of follow-ups, and of two with
  equal shares. Its turns are kept as a run of their own, and judged.
- ``mass``: the same, but nothing is drawn: what moves is the follow-up mass
  (:mod:`experiments.moved_mass`).
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from experiments.arms import Arm, conversations_of, verdicts_of
from experiments.change import (
    RESPONSES,
    Cell,
    Change,
    Given,
    Replaced,
    Splice,
    positions_of,
)
from experiments.control import (
    ARMS,
    BEYOND,
    COVERED_UNDER,
    DONORS,
    EQUAL,
    FIRST,
    HALF,
    HIGH,
    MOVED,
    MOVED_PARTS,
    OWN_MASS,
    RATIO,
    UNCHANGED,
    UNDER,
    donors_of,
    estimates,
)
from experiments.experiment import Conclusion, Experiment, Model, Unit, flag
from experiments.outcome import (
    SCORING,
    parts_of,
    shares_of,
)
from experiments.shown import Bars, Drawing, Lines, only, tables_of, told
from ia_mech.cli import above_zero, whole_from
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, all_datasets, could_show, holm_corrected
from ia_mech.judge.rubric import ASSESSED, FOLLOW_UP, heading
from ia_mech.results import SHARE as AS_SHARE
from ia_mech.results import Table, cell_of
from ia_mech.run.tokens import RESID

if TYPE_CHECKING:  # these load torch
    from torch import Tensor

    from ia_mech.chat.format import ChatContext

EXCHANGED = "interchange"  # the perturbation of sampled contexts, and the key of their metadata
TEMPERATURE = 0.7
SAMPLES = 16
BY_BITS, BY_FOLLOW_UPS, BY_MASS = "bits", "follow-up", "mass"
OTHERS, SIBLINGS = "others", "siblings"  # donors: conversations of other queries, or of the same


class Grid(Experiment):
    """An experiment of cells, whose outcome is chosen (:meth:`asked`).

    Class attributes:
        outcomes: name → the class that measures it; the first is the usual one.
        whole: terms of cells after which all turns are measured; None for all cells.
        flags: of an outcome, the flags that are of use to it.
    """

    judged = True
    queries_used = 60
    columns: ClassVar[Mapping[str, str]] = {**Experiment.columns, "layer": "Int64"}
    outcomes: ClassVar[Mapping[str, type["Grid"]]]
    whole: ClassVar[tuple[str, ...] | None] = None
    flags: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def asked(cls, args: argparse.Namespace) -> type[Experiment]:
        """The class of the outcome and the cells; results of the usual outcome, component and
        donors have the plain name of the command."""
        plain = {"outcome": next(iter(cls.outcomes)), "component": RESID, "donors": OTHERS}
        words = [vars(args).get(name, plain[name]) for name in plain]
        name = "-".join(
            [cls.folder_name(), *(word for word in words if word not in plain.values())]
        )
        about = {"__module__": cls.__module__, "folder_name": classmethod(lambda _: name)}
        return type(cls.__name__, (cls.outcomes[args.outcome], cls), about)

    def cells(self) -> list[Cell]:
        """What is changed."""
        raise NotImplementedError

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add, names = partial(flag, parser), ", ".join(ASSESSED)
        kinds, usual = list(cls.outcomes), next(iter(cls.outcomes))
        what = f"what is measured: {' or '.join(kinds)}"
        add("--outcome", str, usual, what, choices=kinds, metavar="OUTCOME")
        share = f"of {BY_FOLLOW_UPS}: whose share is exchanged, one of {names}"
        add("--category", str, FOLLOW_UP, share, choices=ASSESSED, metavar="CATEGORY")
        turns = f"of {BY_FOLLOW_UPS}: turns under each donor"
        add("--samples", whole_from(1), SAMPLES, turns, metavar="N")
        turns = f"of {BY_FOLLOW_UPS}: of turns, one that the runs have"
        add("--temperature", above_zero, TEMPERATURE, turns, metavar="T")
        fewer = f"of {BY_BITS}: responses to a query that are recipients, 1 to {RESPONSES}: fewer "
        every, fewer = range(1, RESPONSES + 1), f"{fewer}take less time and give wider intervals"
        add("--recipients", int, RESPONSES, fewer, choices=every, metavar="N")

    def read(self) -> None:
        """Refuse by name what the outcome doesn't take."""
        parser = self.build_parser()
        for kind, other in self.outcomes.items():
            for name in ({*other.flags} - {*self.flags}) & {*vars(self.args)}:
                if getattr(self.args, name) != parser.get_default(name):
                    raise UserError(f"--{name} is of --outcome {kind}", "leave it out")


# -- follow-ups ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PutBack(Unit):
    """A context whose own states are put in, at the tokens and after the layer of each cell, which
    may not change what is computed of it."""

    context: tuple[int, ...]
    cells: list[tuple[tuple[int, ...], int]]

    def rows(self, model: Model) -> pd.DataFrame:
        """Compare what a turn goes on from, logits and the whole state; refuse a differing bit."""
        import torch

        from ia_mech.engine.intervene import Replace
        from ia_mech.engine.state import Prefix, held_tensors, prefill

        subject, places = model.subject.model, sorted({at for one, _ in self.cells for at in one})
        with torch.inference_mode():
            plain = prefill(subject, [Prefix(self.context, places)] * len(self.cells))
            states = plain.residuals
            assert states is not None
            own = []
            for number, (at, layer) in enumerate(self.cells):
                put = states[number, layer, [places.index(one) for one in at]]
                own.append(Prefix(self.context, places, (Replace(layer, at, put),)))
            again = prefill(subject, own)
        every = [
            [one.logits, *(x for layer in one.state.cache.layers for x in held_tensors(layer))]
            for one in (plain, again)
        ]
        pairs = list(zip(*every, strict=True))
        same = [all(torch.equal(a[n], b[n]) for a, b in pairs) for n in range(len(self.cells))]
        model.on_tokens(self.tokens)
        if not all(same):
            raise UserError(
                f"a context's own states, put where they were, change what is computed in "
                f"{same.count(False)} of {len(same)} cells: this model can't be measured so",
                "report it with the model's name",
            )
        return pd.DataFrame({"same": same})


@dataclass(frozen=True)
class Ceiling(Unit):
    """Recipient and donor of which a hybrid with everything has to equal the donor."""

    contexts: tuple[tuple[int, ...], tuple[int, ...]]

    def rows(self, model: Model) -> pd.DataFrame:
        from ia_mech.engine.splice import aligned, check_ceiling

        group = aligned(model.subject.model, self.contexts)
        check_ceiling(model.subject.model, group, self.contexts[0][-1:])
        return pd.DataFrame({"same": [True]})


class FollowUps(Grid):
    """How far the share of a category moves with a part of a donor.

    Its ``contexts`` are those whose greedy turn isn't of the category, as of :func:`shares_of`; its
    ``donors`` are of recipients, as of :func:`donors_of`.
    """

    siblings, judged = False, True
    flags: ClassVar[tuple[str, ...]] = ("category", "samples", "temperature")

    put = "parts"  # of donors
    donors_are = "donors among other queries of their dataset"

    @property
    def temperature(self) -> float:
        """Of the turns, or of their first token."""
        return self.args.temperature

    @property
    def legends(self) -> tuple[str, str]:
        """Of the tables of what moves, and of what there is to move."""
        return (
            "Paired by recipient, intervals over recipients' and donors' queries; p: "
            "Holm-corrected over lines, without the first token. In role: the same of turns that "
            "stay in the user's role; once in role: of the share among these. Of the donors' "
            "difference: 1 if the share travels with what is put in. Beyond the first token: minus "
            "the same difference under the donors' first tokens alone.",
            "Donors: in the half of their turns that didn't choose them. The whole context moves "
            "so much.",
        )

    @property
    def what(self) -> str:
        """As it is shown: ``judged 'repeats response'``."""
        return f"judged {heading(self.args.category)!r}"

    @property
    def measured(self) -> str:
        """What is said to move."""
        return f"the share of sampled turns that are {self.what}"

    # -- chosen -----------------------------------------------------------------------------------

    def read(self) -> None:
        """Measure the shares and choose recipients and donors."""
        super().read()
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
        every = shares_of(turns, self.args.category, self.args.temperature).dropna()
        finished = every[~every["unfinished"].astype(bool)]
        self.contexts = finished[finished["greedy"] == 0].reset_index(drop=True)
        self.donors = self.with_donors(self.contexts["greedy"] == 0)
        self.tell_donors(
            f"a finished response whose greedy turn isn't {self.what}",
            f"of {len(every)} judged conversations {len(finished)} have a finished response, and "
            f"{len(self.contexts)} of these such a turn",
            "give a run of more queries with finished responses, or another --category",
        )

    def tell_donors(self, recipients: str, out_of: str, remedy: str) -> None:
        """Refuse too few recipients; else note how many there are, and how many donors."""
        if len(self.donors) < 2:
            raise UserError(
                f"{len(self.donors)} queries have {recipients}, and {self.donors_are} ({out_of})",
                remedy,
            )
        every_donor = self.donors[list(ARMS)].stack()
        most, given = every_donor.value_counts().max(), self.contexts["source"][every_donor]
        self.notes.append(
            f"{out_of[:1].upper()}{out_of[1:]}. {len(self.donors)} of {len(self.queries)} queries "
            f"have {recipients}: a recipient with donors. The donors are of {given.nunique()} "
            f"queries; a conversation is one at most {most} times."
        )

    def recipients(self, eligible: pd.Series) -> pd.Index:
        """The first eligible context of each query."""
        asked = self.contexts["source"].isin([query.source for query in self.queries])
        return self.contexts[asked & eligible].drop_duplicates("source").index

    def with_donors(self, eligible: pd.Series) -> pd.DataFrame:
        """The donors of recipients."""
        return donors_of(self.contexts, self.recipients(eligible), self.args.seed)

    @cached_property
    def rows_of_contexts(self) -> pd.DataFrame:
        """The rows of ``Run.contexts`` of :attr:`contexts`, in their order, with ``row``, which
        counts the contexts of all runs."""
        every = pd.concat([run.contexts for run in self.runs], ignore_index=True)
        every = every.assign(row=range(len(every))).set_index(["dataset", "context_id"], drop=False)
        keys = self.contexts[["dataset", "context_id"]].itertuples(index=False, name=None)
        return every.loc[list(keys)].reset_index(drop=True)

    # -- sampled ----------------------------------------------------------------------------------

    def arms(self) -> Mapping[str, Arm]:
        own = conversations_of(self.rows_of_contexts)
        states = [run.identity_digest for run in self.runs]
        found = []
        for row in self.donors.to_dict("records"):
            recipient = own[row["recipient"]]
            for cell in self.cells():
                for arm in ARMS:
                    about = {"place": cell.term, "layer": cell.layer, "arm": arm, "runs": states}
                    about |= {"recipient": row["recipient"], "donor": own[row[arm]].id}
                    about |= {"row": int(self.rows_of_contexts["row"][row[arm]])}
                    words = recipient.id, cell.term, str(cell.layer), arm
                    changed = replace(
                        recipient,
                        id="~".join(word.replace(" ", "_") for word in words),
                        perturbation=EXCHANGED,
                        real_follow_up=None,
                        metadata=recipient.metadata | {EXCHANGED: about},
                    )
                    found.append(changed)
        settings = {"temperatures": (self.args.temperature,), "samples": self.args.samples}
        return {"turns": Arm(found, settings, self._changed)}

    @cached_property
    def _changes(self) -> dict[tuple[str, int], Change]:
        return {(cell.term, cell.layer): cell.change for cell in self.cells()}

    @cached_property
    def _states(self) -> "Callable[[int, str], Tensor]":
        """``[contexts of all runs, d_model]`` by layer and position."""
        import torch

        return cache(lambda *at: torch.cat([run.residuals(*at) for run in self.runs]))

    def _changed(self, conversation: Conversation, context: "ChatContext") -> list[Any]:
        """What a conversation's donor has, where it is put."""
        about = conversation.metadata[EXCHANGED]
        change, row = self._changes[about["place"], about["layer"]], about["row"]

        def of_donor() -> "ChatContext":
            rows = self.rows_of_contexts
            return self.chat.context(list(rows.loc[rows["row"] == row, "messages"].iloc[0]))

        donor = Given(of_donor, lambda layer, name: self._states(layer, name)[row])
        assert isinstance(change, Splice | Replaced)
        return [change.sampled(context, donor)]

    # -- the recipient's own states ---------------------------------------------------------------

    def units(self) -> Iterator[Unit]:
        replaced = [cell.change for cell in self.cells() if isinstance(cell.change, Replaced)]
        for one in self.donors.to_dict("records"):
            row = self.rows_of_contexts.iloc[one["recipient"]]
            ids, other = (
                tuple(self.rows_of_contexts["token_ids"][one[name]].tolist())
                for name in ("recipient", HIGH)
            )
            query = self.contexts["source"][one["recipient"]], row["dataset"]
            if replaced:
                cells = [(positions_of(row["positions"], x.tokens), x.layer) for x in replaced]
                yield PutBack(*query, 2 * len(cells) * len(ids), ids, cells)
            else:
                yield Ceiling(*query, 2 * len(ids), (ids, other))

    # -- estimated --------------------------------------------------------------------------------

    def rows(self) -> pd.DataFrame:
        self._own = len(self.measure_units(self.units(), "putting in own states"))
        judge, (run,) = self.judge_arms(), self.sampled.values()
        turns = verdicts_of([run], judge).turns
        turns = turns[turns["temperature"] == self.args.temperature]
        parts = parts_of(turns, self.args.category)
        shares = parts.groupby(turns["context_id"].astype(object)).mean()
        about = pd.DataFrame([json.loads(text)[EXCHANGED] for text in run.contexts["metadata"]])
        about = about.join(shares.reindex(run.contexts["context_id"]).reset_index(drop=True))
        index, values = ["recipient", "place", "layer"], list(parts)
        table = about.pivot_table(index=index, columns="arm", values=values, sort=False)
        table = table.reindex(columns=pd.MultiIndex.from_product([values, ARMS]))
        table.columns = [arm if of == "share" else f"{of} {arm}" for of, arm in table.columns]
        table = table.dropna(subset=list(ARMS))
        about = self.about_donors(own=SCORING)
        for name in ("dataset", "context_id"):
            about[name] = self.contexts[name][about.index].to_numpy()
        about["unchanged"] = self.contexts["share"][about.index].to_numpy()
        table = table.reset_index().join(about, on="recipient")
        return table.drop(columns="recipient").rename(columns={"place": "term"})

    def about_donors(self, **values: str) -> pd.DataFrame:
        """By recipient its ``source``, and the name, the query and some values of its donors: what
        they are called (``own high``) → their column in :attr:`contexts`."""
        of = self.contexts
        found = pd.DataFrame({"source": of["source"][self.donors["recipient"]]})
        for arm in ARMS:
            for name, column in ({"donor": "context_id", "query": "source"} | values).items():
                found[f"{name} {arm}"] = of[column].to_numpy()[self.donors[arm]]
        return found

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected over cells, by quantity and dataset, the control apart."""

        def family(row: TidyEstimate) -> tuple:
            return row.quantity, row.names["dataset"], row.names.get("term") == FIRST

        return holm_corrected(self.cell_estimates(rows), family)

    def cell_estimates(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        """Those of cells, some of which are of no layer."""
        for row in estimates(rows, self.options):
            none = {"layer": None} if row.names.get("layer") == -1 else {}
            yield replace(row, names=row.names | none)

    # -- shown ------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        columns: dict[str, tuple[str, int | str]] = {
            MOVED: ("high minus low", "+.2f"),
            **{quantity: (part, "+.2f") for part, quantity in MOVED_PARTS.items()},
            BEYOND: ("beyond the first token", "+.2f"),
            RATIO: ("of the donors' difference", AS_SHARE),
            HALF: ("p: from here on more than half", 2),
            EQUAL: ("equal donors", "+.2f"),
            **{UNDER[arm]: (f"under {arm}", 2) for arm in UNDER},
            **{COVERED_UNDER[arm]: (f"covered, {arm}", 2) for arm in UNDER},
        }
        legend, of_donors = self.legends
        return [
            *tables_of(
                f"{self.measured} under {self.put} of donors, T = {self.temperature:g}",
                found,
                columns,
                index=("dataset", "term", *["layer"] * bool(found["layer"].notna().any())),
                rows="recipients",
                legend=legend,
            ),
            *tables_of(
                "what there is to move",
                found,
                {
                    UNCHANGED: ("recipients, unchanged", 2),
                    DONORS: ("high minus low donors", "+.2f"),
                    OWN_MASS: ("by their own openings", "+.2f"),
                },
                index=("dataset",),
                rows="recipients",
                legend=of_donors,
            ),
        ]

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        title = f"{self.runs[0].model['name']} · {self.measured}"
        axis = "under the high donor minus under the low one"
        rows = all_datasets(only(found, MOVED))
        by_layer = rows[rows["layer"].notna() & (rows["term"] != FIRST)]
        if by_layer.empty:
            return {"cells": Bars(title, axis, rows, differences=True)}
        zero = {"no difference": 0.0}
        return {"cells": Lines(title, "layer", axis, by_layer, across="layer", levels=zero)}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        level, whole = self.args.level, all_datasets(found)
        moved, equal = only(whole, MOVED), only(whole, EQUAL)
        moved = moved[moved["term"] != FIRST]
        shown = moved[moved["p_holm"] <= 1 - level]
        apart = self.tested("the donors' own shares differ by", only(whole, DONORS), most=1)
        thing = "state" if moved["layer"].notna().all() else "site"
        if len(shown):
            said = []
            for _, row in shown.iterrows():
                layer = row["layer"] if pd.notna(row["layer"]) else None
                at = f" after layer {layer}" if layer is not None else ""
                said.append(f"{row['term']}{at} {cell_of(row, '+.2f')}")
                for part, quantity in MOVED_PARTS.items():
                    if number := told(whole, quantity, "+.2f", term=row["term"], layer=layer):
                        said[-1] += f", {part} {number}"
            sentence = f"A {thing} moves {self.measured} at {len(said)} of {len(moved)} cells: "
            sentence += f"{'; '.join(said)}. {apart}"
        else:
            low, high = moved["detectable"].min(), moved["detectable"].max()
            could = could_show(low, most=1, up_to=high)
            could += ", uncorrected" * bool(low < 1 and len(moved) > 1)
            cells = f"{len(moved)} cell{'s' * (len(moved) > 1)}"
            sentence = f"No {thing} is shown to move {self.measured} ({cells})"
            sentence += f"{could and '; '}{could}. {apart}"
        control = f"{self.said_of_equal('share', equal)} "
        if thing == "state":
            control += f"The recipient's own states change no bit in any of {self._own} cells. "
        else:
            control += f"Of {self._own} pairs a hybrid of everything equals the donor. "
        if alone := told(whole, MOVED, "+.2f", term=FIRST):
            control += f"Under the donors' first tokens alone the share differs by {alone}. "
        return Conclusion(sentence, f"{control}{self.gate.short}.")

    def said_of_equal(self, what: str, equal: pd.DataFrame) -> str:
        """At how many cells, if any, donors of equal share or mass are shown to differ."""
        false = int((equal["p_holm"] <= 1 - self.args.level).sum())
        largest = f" (largest {equal['value'].abs().max():.2f})"
        said = f"Two donors of equal {what} differ at {false} of {len(equal)} cells{largest}."
        return said if len(equal) else ""
