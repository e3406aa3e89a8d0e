"""Does the turn follow the header's states when they come from another response's context?

Usage::

    python -m ia_mech.sample --response generate --responses 4 --out cache/several
    python -m experiments.patching cache/several --dry-run
    python -m experiments.patching cache/several --queries 40
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, Results, add_given, intervals
from ia_mech.cli import whole_from

if TYPE_CHECKING:
    from ia_mech.run import Run


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> Results | None:
    """Draw pairs, patch, estimate and draw."""
    import pandas as pd

    from experiments.given_turns import computed_for_each, given_turns
    from experiments.patching import patch, show
    from experiments.patching.analyse import estimates, largest_error, strongest
    from experiments.patching.read import Pair, pairs_of, positions_of
    from experiments.resample import subject_of
    from ia_mech.engine.intervene import check_layers

    given = given_turns(runs, args.queries, args.temperature, args.seed)
    pairs, notes = pairs_of(given, args.seed)
    positions = positions_of(pairs, args.positions)
    depth = runs[0].model["layers"]
    check_layers(args.layers or [], depth)
    layers = sorted(set(args.layers)) if args.layers else range(depth + 1)
    cells = tuple((layer, name) for layer in layers for name in positions)
    controls = tuple(cell for cell in cells if cell[0] % patch.EVERY == 0)
    design = patch.Design(cells, controls, True, given.temperature, args.seed)
    show.plan(pairs, design, depth)
    if args.dry_run:
        return None
    subject = subject_of(runs[0])

    def all_patched(design: patch.Design) -> pd.DataFrame:
        def key(pair: Pair) -> list:
            contexts = [c and [c.ids, c.positions] for c in (pair.a, pair.b, pair.same, pair.other)]
            identity = [pair.source, *contexts, pair.bare, pair.turns]
            return [subject.weights_hash, asdict(design), identity]

        def compute(pair: Pair) -> pd.DataFrame:
            return patch.patched(subject.model, pair, design)

        return computed_for_each(pairs, "patching", folder / "parts", key, compute)

    rows = all_patched(design)
    best = strongest(rows)
    if best not in controls:
        winner = patch.Design((), (best,), False, given.temperature, args.seed)
        rows = pd.concat([rows, all_patched(winner)], ignore_index=True)
    found = estimates(rows, **intervals(args))
    same = largest_error(rows, patch.BOTH, "goal")
    own = largest_error(rows, patch.SELF, "before")
    sums = {name: rows[name].map(sum) for name in ("before", "after", "goal")}
    return Results(
        runs=runs,
        judge=None,
        estimates=found,
        show=lambda console: show.tables(console, found, args.level, same, own),
        figures=show.figures(found, runs[0].model["name"]),
        tables={"turns": rows.assign(**sums)},
        notes=given.notes + notes,
        sentence=show.verdict(found),
        control=show.control(found),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How much is patched."""
    add_given(parser, "that temperature")
    parser.add_argument(
        "--layers",
        type=whole_from(0),
        nargs="+",
        metavar="L",
        help="layers of the map, 0 = embeddings (default: all)",
    )
    parser.add_argument(
        "--positions",
        nargs="+",
        metavar="NAME",
        help="positions of the map, such as header_last (default: all after the response)",
    )


EXPERIMENT = Experiment(
    name="patching",
    description="""\
Where does the response's effect on the turn pass? Residual states after one response (B) are put
into the run after another one (A) to the same query, and turns that followed B are scored. τ is the
share of their log-likelihood ratio between B and A that follows the states: 0 none, 1 all of it.
The runs need several responses per query (sample with --response generate --responses K).

map        one state: every layer and every position between response and turn
arms       all layers of a position, of the header, of all; the response alone; the header after
           nothing
controls   own states, A's sentences in another order, a response to another query, a random
           direction of the same length

Interrupted, the same command continues.""",
    written="turns (log-likelihoods of every turn), map and tokens (PNG, SVG), parts/",
    run=run,
    add_flags=add_flags,
    judged=False,
    page="causal.md",
    drawn="pairs, directions and resampling",
    kept="what was patched is kept; the same command goes on from there",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
