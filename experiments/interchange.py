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

With --outcome bits, states of siblings are put in, and it is measured how many bits turns tell
about the sibling whose state it is, as in ia-mech locate. With --outcome first-token nothing is
drawn: it is the probability that the first token opens a follow-up (as judged after other queries)
that may travel; after the last layer it does by construction.

    ia-mech interchange cache/RUN
    ia-mech interchange cache/RUN --category repeats_response --dry-run
    ia-mech interchange cache/RUN --outcome bits   # any run with four responses per query
"""

import argparse
import math
import sys
from functools import cached_property, partial
from typing import ClassVar

import pandas as pd

from experiments.change import OWN, Cell, Replaced, Whole
from experiments.control import FIRST
from experiments.experiment import flag
from experiments.grid import (
    BY_BITS,
    BY_FIRST_TOKENS,
    BY_FOLLOW_UPS,
    Bits,
    FirstTokens,
    FollowUps,
    Grid,
)
from ia_mech.cli import whole_from
from ia_mech.errors import UserError

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
        BY_FIRST_TOKENS: FirstTokens,
    }

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        super().add_flags(parser)
        add, where = partial(flag, parser), "where states are put (default: all four)"
        add("--tokens", str, None, where, nargs="+", choices=TOKENS, metavar="TOKEN")
        after = "after which (default: 1, 3, 5 and 7 eighths of them)"
        add("--layers", whole_from(1), None, after, nargs="+", metavar="L")

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
        wanted = self.args.tokens or TOKENS
        places = {place: header if place == HEADER else (place,) for place in TOKENS}
        found = {at: places[at] for at in wanted if places[at] and {*places[at]} <= kept}
        if not found:
            raise UserError(
                f"{self.runs[0].path} keeps no state at {', '.join(wanted)}",
                "sample again with --positions all",
            )
        return found | ({FIRST: (LAST,)} if LAST in found else {})

    def cells(self) -> list[Cell]:
        """Places, each after each layer, but for the control, which is after the last one.

        Raises:
            UserError: the model has no such layer.
        """
        depth = self.runs[0].model["layers"]
        layers = sorted({*(self.args.layers or exchanged_layers(depth))})
        if layers[-1] > depth:
            raise UserError(f"--layers {layers[-1]}: the model has {depth}", "give 1 to that")
        found = [
            Cell(place, Replaced(positions, layer), layer, every=True)
            for place, positions in self.tokens.items()
            for layer in ([depth] if place == FIRST else layers)
        ]
        own = [Cell(OWN, Whole(), every=True)] if self.args.outcome == BY_BITS else []
        return [*own, *found]


main = Interchange.main

if __name__ == "__main__":
    sys.exit(main())
