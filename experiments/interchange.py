"""Does the share of sampled follow-ups travel with a hidden state of the header?

For each query the recipient is a context whose greedy turn isn't a follow-up. Its two donors are
contexts of other queries, one with a high share of follow-ups among its sampled turns and one with
a low share. While the recipient is prefilled, its residual stream is set to a donor's, after one of
four layers, at a token that all contexts have (turn end, separator, the header's tokens, the last
of them). Then turns are sampled. Both donors are equally foreign, so the damage by a foreign state
cancels in the difference of the two shares. This difference, divided by the difference between the
donors themselves, is 1 if the share travels with the state.

Controls: two donors of equal share; the recipient's own states, which may not change a bit; and the
donors' first tokens, which are all that the last token's state after the last layer brings.

With --outcome bits states of siblings are put in, and the command measures how many bits turns tell
about the sibling, as ia-mech locate does. With --outcome mass nothing is sampled: the command
measures how the follow-up mass of ia-mech mass moves with the state of the header's last token,
after every layer. A state holds all that was computed below it. With --component attn or mlp only
what one layer adds to the state is the donor's; ia-mech capture has to keep it first.

Needs: a judged run with 16 or more sampled turns per context, and states at all positions.
Cost: 68 contexts per query, each prefilled and sampled anew (60 queries of the embedded model: some
hours on a CPU); with --outcome mass a prefill and a few single tokens a query.
Docs: docs/experiments.md.

    ia-mech interchange cache/RUN
    ia-mech interchange cache/RUN --category repeats_response --dry-run
    ia-mech interchange cache/RUN --outcome mass   # after ia-mech mass cache/RUN
    ia-mech interchange cache/RUN --outcome mass --component attn
    ia-mech interchange cache/RUN --outcome bits   # any run with four responses per query
"""

import argparse
import math
import sys
from functools import cached_property, partial
from typing import ClassVar

import pandas as pd

from experiments.change import Cell, Replaced
from experiments.control import FIRST
from experiments.experiment import flag
from experiments.grid import BY_BITS, BY_FOLLOW_UPS, BY_MASS, FollowUps, Grid
from experiments.locate import Bits
from experiments.moved_mass import MovedByStates
from ia_mech.cli import whole_from
from ia_mech.errors import UserError
from ia_mech.run.tokens import COMPONENTS, RESID

HEADER = "header"  # all tokens of the header together
LAST = "header_last"
TOKENS = ("turn_end", "turn_separator", HEADER, LAST)


def exchanged_layers(depth: int) -> list[int]:
    """The layers after which states are put in: 1, 3, 5 and 7 eighths of the depth, rounded up."""
    return list(dict.fromkeys(math.ceil(depth * eighths / 8) for eighths in (1, 3, 5, 7)))


class Interchange(Grid):
    name = "interchange"
    outcomes: ClassVar = {
        BY_FOLLOW_UPS: FollowUps,
        BY_BITS: Bits,
        BY_MASS: MovedByStates,
    }

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        super().add_flags(parser)
        add = partial(flag, parser)
        where = f"where states are put (default: all four; {LAST} of {BY_MASS})"
        add("--tokens", str, None, where, nargs="+", choices=TOKENS, metavar="TOKEN")
        after = f"after which (default: 1, 3, 5 and 7 eighths of them; all of {BY_MASS})"
        add("--layers", whole_from(1), None, after, nargs="+", metavar="L")
        what = f"of {BY_MASS}: what is put in, the state or what a part of the layer adds to it"
        add("--component", str, RESID, what, choices=COMPONENTS, metavar="COMPONENT")

    @cached_property
    def tokens(self) -> dict[str, tuple[str, ...]]:
        """Where states are put: the name of the place → its positions. With the last token comes
        the control that puts in its first token alone.

        Raises:
            UserError: no state of these places was kept.
        """
        contexts = pd.concat([run.contexts["positions"] for run in self.runs])
        there = pd.DataFrame(contexts.tolist()).notna().all()
        kept = set(there.index[there])
        if self.args.outcome != BY_BITS:
            kept = kept.intersection(*(run.positions for run in self.runs))
        header = tuple(name for name in there.index if name.startswith("header_") and name in kept)
        wanted = self.args.tokens or ((LAST,) if self.of_mass else TOKENS)
        if (component := self.args.component) != RESID:
            if [*wanted] != [LAST]:
                raise UserError(f"what {component} adds is put in at {LAST}", "leave out --tokens")
            return {f"{LAST}, {component}": (LAST,)}
        places = {place: header if place == HEADER else (place,) for place in TOKENS}
        found = {at: places[at] for at in wanted if places[at] and {*places[at]} <= kept}
        if not found:
            raise UserError(
                f"{self.runs[0].path} keeps no state at {', '.join(wanted)}",
                "sample again with --positions all",
            )
        return found | ({FIRST: (LAST,)} if LAST in found and not self.of_mass else {})

    @property
    def of_mass(self) -> bool:
        return self.args.outcome == BY_MASS

    def cells(self) -> list[Cell]:
        """Places, each after each layer, but for the control, which is after the last one. Of the
        follow-up mass the header's last token after the last layer is always among them.

        Raises:
            UserError: the model has no such layer.
        """
        depth = self.runs[0].model["layers"]
        usual = range(1, depth + 1) if self.of_mass else exchanged_layers(depth)
        layers = sorted({*(self.args.layers or usual)})
        if layers[-1] > depth:
            raise UserError(f"--layers {layers[-1]}: the model has {depth}", "give 1 to that")
        found = [
            Cell(place, Replaced(positions, layer, self.args.component), layer, every=True)
            for place, positions in self.tokens.items()
            for layer in ([depth] if place == FIRST else layers)
        ]
        if self.of_mass and (LAST not in self.tokens or depth not in layers):
            found.append(Cell(LAST, Replaced((LAST,), depth), depth, every=True))
        return found


main = Interchange.main

if __name__ == "__main__":
    sys.exit(main())
