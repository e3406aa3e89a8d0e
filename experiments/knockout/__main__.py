"""What does the turn lose when tokens can't attend to the response?

Usage::

    python -m ia_mech.sample --response generate --responses 4 --out cache/several
    python -m experiments.knockout cache/several --dry-run
    python -m experiments.knockout cache/several --queries 20
"""

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, Results, add_given
from ia_mech.cli import whole_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from ia_mech.run import Run


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> Results | None:
    """Block edges, read the turns, estimate and draw."""
    import numpy as np
    import pandas as pd

    from experiments.given_turns import computed_for_each, given_turns
    from experiments.knockout import show
    from experiments.knockout.analyse import estimates, with_bits
    from experiments.knockout.block import SPARED, Asked, arms_of, blocked
    from experiments.knockout.matched import MATCHED, blocked_matched
    from experiments.knockout.read import asked_of
    from experiments.knockout.resample import resampled, windows_of
    from experiments.resample import subject_of
    from ia_mech.engine.capture import find_blocks
    from ia_mech.engine.intervene import attention_of, check_layers
    from ia_mech.errors import UserError

    given = given_turns(runs, args.queries, args.temperature, args.seed)
    queries, notes = asked_of(given, args.responses, args.turns)
    depth = runs[0].model["layers"]
    if args.window > depth:
        raise UserError(
            f"--window {args.window}: the model has {depth} layers", f"give at most {depth}"
        )
    arms = arms_of(depth, args.window)
    check_layers([layer for window in args.resample for layer in window], depth, 1)
    writing = windows_of(args.resample) if args.resample else []
    show.plan(queries, arms, depth, len(writing))
    if args.dry_run:
        return None
    subject = subject_of(runs[0])
    for layer, block in enumerate(find_blocks(subject.model), start=1):
        attention_of(block, layer)

    def computed(
        phase: str, what: list, compute: "Callable[[Asked], pd.DataFrame]"
    ) -> "pd.DataFrame":
        def key(query: Asked) -> list:
            contexts = [
                [c.ids, c.positions, *map(list, (c.query, c.response))] for c in query.contexts
            ]
            identity = [subject.weights_hash, query.source, contexts, query.turns, args.seed]
            return [*identity, SPARED, *what]

        return computed_for_each(queries, phase, folder / "parts", key, compute)

    def compute(query: Asked) -> pd.DataFrame:
        return blocked(subject.model, query, arms, args.seed)

    def compute_matched(query: Asked) -> pd.DataFrame:
        return blocked_matched(subject.model, query, depth, args.seed)

    def compute_own(query: Asked) -> pd.DataFrame:
        stops = given.chat.stop_ids
        return resampled(subject.model, query, writing, args.turns, stops, args.seed)

    rows = computed("blocking", [[*map(asdict, arms)]], compute)
    more = computed("blocking others", [MATCHED], compute_matched)
    share = float(np.mean(np.stack(more.pop("reached").tolist())))
    notes.append(f"edges of as much attention carry {share:.2f} of it, the mean of all layers.")
    rows = pd.concat([rows, more], ignore_index=True)
    rows = with_bits(rows, args.seed)
    own, tables = None, {"turns": rows}
    if writing:
        own = computed("sampling", [[*map(asdict, writing)], args.turns], compute_own)
        tables["own_turns"] = own
    found = estimates(rows, args.responses, own, level=args.level, seed=args.seed)
    return Results(
        runs=runs,
        judge=None,
        estimates=found,
        show=lambda console: show.tables(console, found, args.level),
        figures=show.figures(found, runs[0].model["name"]),
        tables=tables,
        notes=given.notes + notes,
        sentence=show.verdict(found),
        control=show.control(found),
    )


def window_of(text: str) -> tuple[int, int]:
    """First and last layer of a window, for argparse."""
    found = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", text)
    window = (int(found[1]), int(found[2])) if found else (1, 0)
    if window[0] > window[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no window of layers, such as 1-6")
    return window


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How much is blocked."""
    add_given(parser, "T = 1")
    parser.add_argument(
        "--responses",
        type=whole_from(2),
        default=4,
        metavar="K",
        help="the first K responses to each (default: 4)",
    )
    parser.add_argument(
        "--turns",
        type=whole_from(1),
        default=1,
        metavar="N",
        help="turns after each response (default: 1)",
    )
    parser.add_argument(
        "--window",
        type=whole_from(1),
        default=6,
        metavar="LAYERS",
        help="layers of a sliding window, which moves by half of them (default: 6)",
    )
    parser.add_argument(
        "--resample",
        type=window_of,
        nargs="+",
        default=[],
        metavar="FIRST-LAST",
        help="windows of layers in which the model so changed writes turns itself, too, as many "
        "after each response; their information about the response is I_K (default: none)",
    )


EXPERIMENT = Experiment(
    name="knockout",
    description="""\
By which attention edges does the turn learn of the response? Edges are blocked in all layers and in
a sliding window of layers, and the model so changed reads turns that were sampled from the intact
one: how many bits does it still find in them about which of K responses they followed? The runs
need several responses per query (sample with --response generate --responses K).

header → response   what stands between response and turn can't attend to the response
turn → response     the turn's tokens can't; header and turn → response: neither can
turn → header       the turn's tokens can't attend to what stands between
turn → query        they can't attend to the query
random edges        as many as of each kind, of the tokens after the response
edges of attention  others of these tokens that carry as much attention
                    (neither kind leads to the first token, an attention sink)

--resample samples turns from the model so changed, whose I_K is measured under it.

Interrupted, the same command continues.""",
    written="turns (bits of every turn and knockout), own_turns (with --resample), knockouts and "
    "windows (PNG, SVG), parts/",
    run=run,
    add_flags=add_flags,
    judged=False,
    page="causal.md",
    drawn="queries, random edges, folds and tests",
    kept="what was computed is kept; the same command goes on from there",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
