"""How far the follow-up mass moves with a donor's query or response.

Recipients, donors and masses are those of :mod:`experiments.moved_mass`; donors may also be other
responses to the recipient's query. Keys and values of the query, of the response or of both are
the donor's; a recurrent state is the one at the end of the response. What follows, up to the end of
the header, is computed anew, so that the logits of the first token aren't the donor's. With both
the mass is that of the donor's own distribution.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import pandas as pd

from experiments.change import (
    QUERY,
    QUERY_AND_RESPONSE,
    RESPONSE,
    RESPONSE_AND_STATE,
    STATE,
    Ids,
    Splice,
)
from experiments.control import ARMS, donors_among_siblings
from experiments.experiment import Model, Unit
from experiments.grid import SIBLINGS
from experiments.moved_mass import MovedMass, OfOpenings
from ia_mech.run import Run

WAYS = {
    QUERY: "the query's keys and values",
    RESPONSE: "the response's keys and values",
    STATE: "the recurrent state",
    RESPONSE_AND_STATE: "the response's keys and values with the recurrent state",
}


def sites_of(recurrent: bool, siblings: bool) -> list[str]:
    """What is the donor's, the ceiling last. Siblings have the query in common."""
    sites = list(WAYS) if recurrent else [QUERY, RESPONSE]
    if siblings:
        sites.remove(QUERY)
    return [*sites, QUERY_AND_RESPONSE]


@dataclass(frozen=True)
class MassWith(OfOpenings):
    """A recipient with sites of its donors.

    Attributes:
        contexts: token ids of the recipient, and of different donors, each up to its response's
            end.
        starts: where the response begins in each.
        donors: for each of :data:`ARMS`, which of the contexts it is.
        after: the recipient's tokens after the response.
        sites: what is a donor's.
    """

    contexts: list[Ids]
    starts: list[int]
    donors: list[int]
    after: Ids
    sites: list[str]

    def rows(self, model: Model) -> pd.DataFrame:
        import torch

        from ia_mech.engine.splice import Hybrid, Piece, aligned, check_ceiling, continued, spliced

        subject = model.subject.model
        group = aligned(subject, self.contexts)
        model.on_tokens(sum(map(len, self.contexts)))
        check_ceiling(subject, group, self.after)
        pairs = zip(self.starts, self.contexts, strict=True)
        edges = [(0, start, len(ids)) for start, ids in pairs]

        def after(hybrids: list[Hybrid]) -> torch.Tensor:
            """Logits of the last token."""
            made = continued(subject, spliced(group, hybrids), self.after)
            model.on_tokens(len(hybrids) * len(self.after))
            return made.logits

        def of(donor: int) -> torch.Tensor:
            both = (0, edges[0]), (donor, edges[donor])
            return after([Splice(site).hybrid(*both) for site in self.sites])

        plain = after([Hybrid(0, (Piece(0, 0, edges[0][-1]),))] * len(self.sites))
        cells = [(site, -1) for site in self.sites]
        return self.masses(cells, plain, of(0), map(of, self.donors))


class MovedBySites(MovedMass):
    """How far the follow-up mass moves with sites of donors."""

    flags: ClassVar[tuple[str, ...]] = ("donors",)
    put = "parts"
    own = (
        "The recipient's own keys and values, put back, change no bit; a hybrid of everything "
        "equals the donor."
    )

    @property
    def ceiling(self) -> tuple[str, int]:
        return QUERY_AND_RESPONSE, -1

    def with_donors(self, eligible: pd.Series) -> pd.DataFrame:
        if self.args.donors != SIBLINGS:
            return super().with_donors(eligible)
        self.donors_are, self.whose = "three other responses with a mass", "the siblings'"
        return donors_among_siblings(self.contexts, self.recipients(eligible), self.args.seed)

    @cached_property
    def responses(self) -> dict[str, range]:
        """The tokens of each context's response."""
        every = pd.concat([run.contexts for run in self.runs])
        pairs = zip(every["context_id"], every["messages"], strict=True)
        return {name: self.chat.context(list(those)).response for name, those in pairs}

    def _as_they_are(self, masses: Run) -> set[str]:
        """Of these the contexts whose response isn't empty."""
        return {name for name in super()._as_they_are(masses) if self.responses[name]}

    def units(self) -> Iterator[Unit]:
        rows, sites = self.rows_of_contexts, [cell.term for cell in self.cells()]
        responses = [self.responses[name] for name in rows["context_id"]]
        ids = [tuple(one.tolist()) for one in rows["token_ids"]]
        for one in self.donors.to_dict("records"):
            recipient = one["recipient"]
            each = list(dict.fromkeys([recipient, *(one[arm] for arm in ARMS)]))
            contexts = [ids[n][: responses[n].stop] for n in each]
            starts = [responses[n].start for n in each]
            after = ids[recipient][responses[recipient].stop :]
            fed = (2 + len(ARMS)) * len(sites) * len(after)
            query = self.contexts["source"][recipient], rows["dataset"][recipient]
            what = *query, sum(map(len, contexts)) + fed, *self.openings_of(recipient)
            donors = [each.index(one[arm]) for arm in ARMS]
            yield MassWith(*what, contexts, starts, donors, after, sites)

    # -- shown ------------------------------------------------------------------------------------

    @property
    def legends(self) -> tuple[str, str]:
        common, of_donors = super().legends
        return (
            f"{QUERY_AND_RESPONSE} is the donor's own distribution by construction: the others are "
            "held against it, and need not sum to it. Keys and values of a site, or the recurrent "
            "state after the response, are the donor's; the tokens after the response are computed "
            f"anew. {common}",
            of_donors,
        )

    def said_of_cells(self, whole: pd.DataFrame, moved: pd.DataFrame) -> Iterator[str]:
        for term in moved["term"]:
            rows = moved[moved["term"] == term]
            yield self.tested(f"with {WAYS[term]} it moves by", rows, most=1)
