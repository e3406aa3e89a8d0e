"""How far the follow-up mass of a context moves with states or sites of another one.

The recipient is a context whose greedy turn isn't a follow-up. Its openings are its own likeliest
first tokens, each judged by its greedy continuation (:mod:`experiments.mass`). With a part of a
donor the mass is the probability of those openings whose turn is a follow-up; nothing is drawn.
Donors are contexts of other queries: one with a high mass of its own, one with a low one, and two
with equal masses.

A state of the residual stream brings all that was computed below it. What one layer's attention
or MLP adds to the stream (``ia-mech capture`` keeps it) is put in by layer, and in all layers
together.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments import mass
from experiments.arms import RUN, Arm
from experiments.change import Replaced, positions_of
from experiments.control import (
    ARMS,
    CELL,
    COVERED,
    DONORS,
    EQUAL,
    HALF,
    HIGH,
    LOW,
    MOVED,
    OWN_MASS,
)
from experiments.experiment import Conclusion, Model, Unit
from experiments.grid import FollowUps, Grid
from experiments.mass import SHARE
from experiments.outcome import CHOOSING, HEADER_LAST, IN_ROLE, ONCE_IN_ROLE
from experiments.shown import only, spans
from ia_mech.cli import shell_word
from ia_mech.errors import UserError
from ia_mech.estimates import Group, TidyEstimate, all_datasets, by_dataset, holm_corrected
from ia_mech.run import Run, layout
from ia_mech.run.tokens import ATTN, RESID
from ia_mech.stats import Estimate, dyadic_test

if TYPE_CHECKING:  # this loads torch
    from torch import Tensor

OF_COVERED = "donors' own difference, of what is covered"
TOGETHER = "together"  # the term of what is put in in all layers that were asked for
HEADER_END = "header:-1"  # as ia-mech capture calls HEADER_LAST
Place = tuple[str, int, tuple[int, ...]]  # component, layer, tokens


@dataclass(frozen=True)
class OfOpenings(Unit):
    """A recipient of which something is a donor's.

    Attributes:
        openings: ids of first tokens.
        labels: of each, whether its turn is a follow-up and whether it is in role.
        temperature: of the first token.
    """

    openings: list[int]
    labels: list[tuple[float, float]]
    temperature: float

    def masses(
        self,
        cells: list[tuple[str, int]],
        plain: "Tensor",
        own: "Tensor",
        under: Iterable["Tensor"],
    ) -> pd.DataFrame:
        """A row per cell: the follow-up mass, that in role, and the openings' probability, with
        each donor's part and unchanged.

        Args:
            cells: term and layer of each.
            plain, own: ``[cells, vocab]`` logits of the recipient, and those with its own part put
                where it was.
            under: those with each donor's part.

        Raises:
            UserError: the recipient's own part changes a bit.
        """
        import torch

        if not torch.equal(own, plain):
            raise UserError(
                "a context's own states, put where they were, change what is computed: "
                "this model can't be measured so",
                "report it with the model's name",
            )
        labels = np.column_stack([np.array(self.labels), np.ones(len(self.openings))])
        table = pd.DataFrame(cells, columns=CELL)
        for arm, logits in zip(("unchanged", *ARMS), (plain, *under), strict=True):
            p = (logits.cpu() / self.temperature).softmax(-1)[:, self.openings]
            mass = (p.double().numpy() @ labels).clip(0, 1)
            table[[arm, f"{IN_ROLE} {arm}", f"{COVERED} {arm}"]] = mass
        return table


@dataclass(frozen=True)
class MassUnder(OfOpenings):
    """A recipient under states of its donors.

    Attributes:
        context: its token ids.
        tail: so many last tokens are computed anew for each state.
        cells: term and layer of each, and its places, whose tokens are counted from the tail's
            first.
        states: of each cell, ``[donors, places, tokens, d_model]``.
    """

    context: tuple[int, ...]
    tail: int
    cells: list[tuple[str, int, list[Place]]]
    states: list[np.ndarray]

    def rows(self, model: Model) -> pd.DataFrame:
        import torch

        from ia_mech.engine.components import hook_branches, keeping
        from ia_mech.engine.intervene import Replace
        from ia_mech.engine.memory import allowed
        from ia_mech.engine.score import LOGITS, STATE_BYTES
        from ia_mech.engine.state import Prefix, copied_bytes, expand, forward, prefill

        subject, begin = model.subject.model, len(self.context) - self.tail
        if any(place[0] != RESID for *_, places in self.cells for place in places):
            hook_branches(subject)

        def passed(puts: list[tuple[Any, ...]]) -> tuple[Any, Any]:
            """Logits of the tail's last token; by component and layer the states of all its
            tokens."""
            ids = torch.tensor([self.context[begin:]] * len(puts))
            state = expand(subject, [group], [0] * len(puts), self.tail)
            captured = [range(self.tail)] * len(puts)
            with keeping(torch.tensor(captured)) as added:
                made = forward(subject, state, ids, captured=captured, interventions=puts)
            model.on_tokens(ids.numel())
            assert made.residuals is not None
            residuals = enumerate(made.residuals.unbind(1))
            return made.logits[:, -1].cpu(), {(RESID, n): one for n, one in residuals} | added

        def put(cells: list, states: list) -> list[tuple[Any, ...]]:
            """Of each cell, what is put in at its places."""
            return [
                tuple(
                    Replace(layer, tokens, one, component)
                    for (component, layer, tokens), one in zip(places, those, strict=True)
                )
                for (*_, places), those in zip(cells, states, strict=True)
            ]

        found = []
        with torch.inference_mode():
            group = prefill(subject, [Prefix(self.context[:begin])])
            model.on_tokens(begin)
            device, vocab = subject.device.type, group.logits.shape[-1]
            bytes_each = max(1, copied_bytes(subject, [group], self.tail))
            limits = allowed(LOGITS[device]) // vocab, allowed(STATE_BYTES[device]) // bytes_each
            step = max(1, min(limits))
            for at in range(0, len(self.cells), step):
                cells, states = self.cells[at : at + step], self.states[at : at + step]
                plain, own = passed([()] * len(cells))
                back = [
                    [own[component, layer][n, list(tokens)] for component, layer, tokens in places]
                    for n, (*_, places) in enumerate(cells)
                ]
                donated = (map(torch.from_numpy, of_arm) for of_arm in zip(*states, strict=True))
                under = (passed(put(cells, list(one)))[0] for one in donated)
                named = [cell[:2] for cell in cells]
                found.append(self.masses(named, plain, passed(put(cells, back))[0], under))
        return pd.concat(found, ignore_index=True)


class MovedMass(FollowUps):
    """How far the follow-up mass moves with parts of donors. Its ``contexts`` are all that have a
    mass.

    Class attributes:
        own: what is said of the recipient's own parts.
    """

    flags: ClassVar[tuple[str, ...]] = ()
    measured = "the follow-up mass"
    own: ClassVar[str]
    whose = "the donors'"

    @property
    def ceiling(self) -> tuple[str, int]:
        """Term and layer of the cell that makes the donor's own distribution by construction."""
        raise NotImplementedError

    def at_ceiling(self, rows: pd.DataFrame) -> pd.Series:
        term, layer = self.ceiling
        return (rows["term"] == term) & (rows["layer"].fillna(-1) == layer)

    # -- chosen -----------------------------------------------------------------------------------

    @cached_property
    def of_masses(self) -> Run:
        """The run in which each first token is gone on from.

        Raises:
            UserError: there is none, or it isn't finished, of this model and judged.
        """
        first = self.runs[0].path.resolve()
        place = first.with_name(f"{first.name}-{mass.Mass.folder_name()}") / mass.TURNS / RUN
        if (place / layout.RUN).is_file():
            run = Run.open(place, unfinished=True)
            alike = run.model["weights_hash"] == self.runs[0].model["weights_hash"]
            if alike and run.complete and self.gate.judge in run.labels.judges:
                return run
        raise UserError(
            f"{place} doesn't hold all first tokens of {first}, by the same model, judged by "
            f"{self.gate.judge!r}",
            f"run ia-mech mass {shell_word(first)} before",
        )

    def read(self) -> None:
        """Choose recipients, and donors by their own masses."""
        Grid.read(self)
        run = self.of_masses
        tokens = mass.first_tokens(run, self.gate.judge).dropna(subset=[SHARE])
        own, greedy = f"{mass.FIRST} {SHARE}", f"{mass.GREEDY} {SHARE}"
        every = mass.masses(tokens).dropna(subset=[own, greedy])
        every = every[every["context_id"].isin(self._as_they_are(run))]
        self.contexts = every.assign(**{CHOOSING: every[own]}).reset_index(drop=True)
        self.openings = dict(list(tokens.groupby("context_id", sort=False)))
        self.donors = self.with_donors(self.contexts[greedy] == 0)
        self.tell_donors(
            "a response whose greedy turn is no follow-up",
            f"{len(self.contexts)} conversations have a follow-up mass",
            "give a run of more queries, with its masses",
        )

    def _as_they_are(self, masses: Run) -> set[str]:
        """The runs' contexts that have a mass.

        Raises:
            UserError: one was another when its mass was measured.
        """

        def known(run: Run) -> set[tuple]:
            return {(one.context_id, *one.token_ids) for one in run.contexts.itertuples()}

        mine, theirs = set[tuple]().union(*map(known, self.runs)), known(masses)
        of_mine, of_theirs, kept = (
            {name for name, *_ in of} for of in (mine, theirs, mine & theirs)
        )
        if (of_mine & of_theirs) - kept:
            path = self.runs[0].path
            raise UserError(
                f"{masses.path} holds masses of other conversations than {path}",
                f"remove it, and run ia-mech mass {shell_word(path)} again",
            )
        return kept

    # -- measured ---------------------------------------------------------------------------------

    def arms(self) -> Mapping[str, Arm]:
        return {}

    def openings_of(self, recipient: int) -> tuple[list[int], list[tuple[float, float]], float]:
        """As in :class:`OfOpenings`."""
        own = self.openings[self.contexts["context_id"][recipient]]
        labels = list(own[[SHARE, IN_ROLE]].itertuples(index=False, name=None))
        return own["token"].tolist(), labels, self.temperature

    def rows(self) -> pd.DataFrame:
        """A row per recipient and cell, as :func:`experiments.control.estimates` takes them;
        ``own high`` and so on are the masses at the ceiling."""
        table = self.measure_units(self.units(), f"follow-up mass under {self.put}")
        for arm in ARMS:
            role = table[f"{IN_ROLE} {arm}"]
            table[f"{ONCE_IN_ROLE} {arm}"] = (table[arm] / role.where(role > 0)).clip(upper=1)
        own = table[self.at_ceiling(table)]
        about = self.about_donors(mass=CHOOSING)
        about = about.join(own.set_index("source")[list(ARMS)].add_prefix("own "), on="source")
        return table.merge(about, on="source", validate="many_to_one")

    @property
    def temperature(self) -> float:
        (found,) = self.of_masses.settings["temperatures"]
        return found

    # -- estimated --------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected over cells, by quantity and dataset, without the ceiling and without what
        is put in in all layers together."""

        def trivial(row: TidyEstimate) -> bool:
            return (row.names.get("term"), row.names.get("layer") or -1) == self.ceiling

        def family(row: TidyEstimate) -> tuple:
            return row.quantity, row.names["dataset"], trivial(row), row.names.get("layer") is None

        found = []
        for row in self.cell_estimates(rows):
            if row.quantity != DONORS:
                found.append(row)
            if row.quantity == MOVED and trivial(row):
                names = {"dataset": row.names["dataset"]}
                found.append(replace(row, quantity=DONORS, names=names))
        for dataset, here in by_dataset(rows):
            last = rows[here & self.at_ceiling(rows)]
            own = Group(last["source"].to_numpy(), self.options, {"dataset": dataset})
            found.append(own.mean(OWN_MASS, last[f"mass {HIGH}"] - last[f"mass {LOW}"]))
            held = {arm: last[arm] / last[f"{COVERED} {arm}"] for arm in (HIGH, LOW)}
            queries = (last[name] for name in ("source", f"query {HIGH}", f"query {LOW}"))
            test = dyadic_test(held[HIGH] - held[LOW], *queries, level=self.args.level)
            found.append(own.row(OF_COVERED, test.difference, len(last), p=test.p, test=test.test))
        return holm_corrected(found, family)

    # -- shown ------------------------------------------------------------------------------------

    @property
    def legends(self) -> tuple[str, str]:
        return (
            "Paired by recipient, intervals over recipients' and donors' queries; p: "
            "Holm-corrected over the other lines. In role: the mass of first tokens whose turn "
            "stays in the user's role; once in role: the follow-up mass as a share of it. Covered: "
            "the probability of the recipient's openings; other first tokens count as none.",
            "Donors: their own distributions on the recipient's openings. By their own openings: "
            "their masses, by which they were chosen.",
        )

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        whole = all_datasets(found)
        moved, equal = (
            cells[~self.at_ceiling(cells)] for cells in (only(whole, MOVED), only(whole, EQUAL))
        )
        words = f"{self.whose} own first tokens differ in follow-up mass by"
        covered = only(whole, OF_COVERED)
        said = [
            self.tested(words, only(whole, DONORS), most=1),
            self.tested("as a share of what is covered, that is", covered, most=1),
            *self.said_of_cells(whole, moved),
        ]
        control = f"{self.said_of_equal('mass', equal)} {self.own} {self.gate.short}."
        return Conclusion(" ".join(filter(None, said)), control.strip())

    def said_of_cells(self, whole: pd.DataFrame, moved: pd.DataFrame) -> Iterator[str]:
        """What cells move, of estimates of all datasets; ``moved`` are those but the ceiling's."""
        raise NotImplementedError


class MovedByStates(MovedMass):
    """How far the follow-up mass moves with states of donors, or with what is added to them."""

    flags: ClassVar[tuple[str, ...]] = ("component",)
    put = "states"
    own = "The recipient's own states change no bit."

    @property
    def ceiling(self) -> tuple[str, int]:
        return HEADER_LAST, self.depth

    @property
    def depth(self) -> int:
        return self.runs[0].model["layers"]

    @cached_property
    def _added(self) -> "dict[int, Tensor]":
        """By layer, what the component adds at the header's last token:
        ``[contexts of all runs, d_model]``.

        Raises:
            UserError: it wasn't captured.
        """
        import torch

        layers = [cell.layer for cell in self.cells() if cell.term != HEADER_LAST]
        what = {"tokens": HEADER_END, "component": self.args.component}
        each = torch.cat([run.residuals(layers, **what) for run in self.runs])
        return dict(zip(layers, each.unbind(1), strict=True))

    def _given(self, change: Replaced, contexts: list[int]) -> np.ndarray:
        """``[contexts, 1, tokens, d_model]``: what these contexts of all runs give to a change."""
        import torch

        every = (
            [self._states(change.layer, name) for name in change.tokens]
            if change.component == RESID
            else [self._added[change.layer]]
        )
        return torch.stack([one[contexts].float() for one in every], 1)[:, None].numpy()

    def units(self) -> Iterator[Unit]:
        every = [(cell.term, cell.change) for cell in self.cells()]
        replaced = [(term, change) for term, change in every if isinstance(change, Replaced)]
        for one in self.donors.to_dict("records"):
            recipient = self.rows_of_contexts.iloc[one["recipient"]]
            ids, donors = tuple(recipient["token_ids"].tolist()), [one[arm] for arm in ARMS]
            at = self.rows_of_contexts["row"].iloc[donors].tolist()
            named = [positions_of(recipient["positions"], change.tokens) for _, change in replaced]
            begin = min(min(tokens) for tokens in named)
            cells, states = [], [self._given(change, at) for _, change in replaced]
            for (term, change), tokens in zip(replaced, named, strict=True):
                place = change.component, change.layer, tuple(token - begin for token in tokens)
                cells.append((term, change.layer, [place]))
            added = [n for n, (_, change) in enumerate(replaced) if change.component != RESID]
            if len(added) > 1:
                places = [cells[n][2][0] for n in added]
                cells.append((f"{cells[added[0]][0]}, {TOGETHER}", -1, places))
                states.append(np.concatenate([states[n] for n in added], axis=1))
            query, tail = self.contexts["source"][one["recipient"]], len(ids) - begin
            computed = begin + (2 + len(ARMS)) * len(cells) * tail
            openings = self.openings_of(one["recipient"])
            what = query, recipient["dataset"], computed, *openings
            yield MassUnder(*what, ids, tail, cells, states)

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Also from which layer on the header's last state moves more than half."""
        found, last = super().estimate(rows), rows["term"] == HEADER_LAST
        for dataset, here in by_dataset(rows):
            found += half_moved(rows[here & last], dataset, self.args.level)
        return found

    @property
    def legends(self) -> tuple[str, str]:
        common, of_donors = super().legends
        return (
            f"{HEADER_LAST} after layer {self.depth}, the last one, is the donor's own "
            "distribution by construction: the others are held against it. attn, mlp: only what "
            f"the layer's attention or MLP adds is the donor's; {TOGETHER}: in all layers of the "
            "table at once (attn in all the model's layers makes the donor's distribution, too). "
            "From here on more than half: the layers whose p is above "
            f"{1 - self.args.level:.2g} are the confidence set. {common}",
            of_donors,
        )

    def said_of_cells(self, whole: pd.DataFrame, moved: pd.DataFrame) -> Iterator[str]:
        level, covered = self.args.level, only(whole, OF_COVERED)
        if len(half := only(whole, HALF)) and (covered["p_holm"] <= 1 - level).all():
            layers = half.loc[half["value"] > 1 - level, "layer"].tolist()
            last = only(whole, MOVED, term=HEADER_LAST).set_index("layer")["value"]
            above = last > last[self.depth] / 2
            first = int(above[::-1].cumprod()[::-1].idxmax())
            tried = spans(half["layer"].tolist())
            yield (
                f"More than half of that is moved by the header's last state from layer {first} "
                f"on ({100 * level:g}% confidence set of layers {tried}: {spans(layers)})."
            )
        what, before = "A state", " before the last layer"
        together, moved = moved[moved["layer"].isna()], moved[moved["layer"].notna()]
        if self.args.component != RESID:
            what, before = f"What {self.args.component} adds in one layer", ""
            those = spans(moved["layer"].tolist())
            # The header's tokens are the same everywhere, and an MLP reads what attention brought.
            trivial = self.args.component == ATTN and len(moved) == self.depth
            donor = ", which makes the donor's own distribution by construction," * trivial
            words = f"what {self.args.component} adds in layers {those} together{donor} moves it by"
            yield self.tested(words, together, most=1)
        shown = moved[moved["p_holm"] <= 1 - level]
        each = [
            f"{term} after {spans(rows['layer'].tolist())}"
            for term, rows in shown.groupby("term", sort=False)
        ]
        if len(moved):
            yield (
                f"{what} is shown to move it at {len(shown)} of {len(moved)} cells{before}"
                f"{': ' * bool(each)}{'; '.join(each)}."
            )


def half_moved(rows: pd.DataFrame, dataset: str, level: float) -> Iterator[TidyEstimate]:
    """Whether each layer may be the first from which on more than half is moved: p values, whose
    layers above ``1 - level`` are a confidence set.

    A layer isn't the first if less than half is shown to be moved after it, or more than half after
    the one before. Each is tested one-sidedly with half of the level, by the dyadic test of the
    mean of what is moved minus half of the donors' own difference. Of the true layer two tests can
    be false, however many layers there are. There are no values where the donors' own difference
    isn't shown to be above 0.

    Args:
        rows: a row per recipient and layer, of one token, with the last layer.
    """
    tests = []
    for layer, cell in rows.groupby("layer"):
        beyond = cell[HIGH] - cell[LOW] - (cell[f"own {HIGH}"] - cell[f"own {LOW}"]) / 2
        queries = (cell[name] for name in ("source", f"query {HIGH}", f"query {LOW}"))
        test = dyadic_test(beyond, *queries, ends=(-1.5, 1.5), level=level)
        tests.append((layer, test.difference, 1.0 if np.isnan(test.p) else test.p))
    if len(tests) < 2 or not (tests[-1][1].value > 0 and tests[-1][2] <= 1 - level):
        return
    before = 1.0
    for layer, difference, p in tests:
        less, more = (p, 1.0) if difference.value < 0 else (1.0, p)
        value = Estimate(min(less, before), np.nan, np.nan, difference.sources, "one-sided tests")
        names = {"dataset": dataset, "term": HEADER_LAST, "layer": layer}
        yield TidyEstimate(HALF, names, difference.sources, value)
        before = more
