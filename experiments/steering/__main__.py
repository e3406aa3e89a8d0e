"""Can a direction in the residual stream move the turns, more than random ones?

Usage::

    python -m probes.train cache/RUN
    python -m experiments.steering cache/RUN --probe cache/RUN/results/probe-rate-rules --dry-run
    python -m experiments.steering cache/RUN --probe cache/RUN/results/probe-rate-rules
    python -m experiments.steering cache/RUN --vector my.safetensors --doses 0.1 0.2 0.4
"""

import argparse
import sys
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, add_dry_run, intervals, result_of
from ia_mech.cli import named, path_of, whole_from

if TYPE_CHECKING:
    from ia_mech.results import Result
    from ia_mech.run import Run
    from ia_mech.steering import SteeringVector
    from probes.card import Probe

LEAST = 19  # random directions with which p = 0.05 can be reached
DOSES = (-2.0, -0.5, 0.1, 0.5, 1.0, 2.0, 4.0)


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> "Result | None":
    """Read, steer, choose a dose, compare, sample, estimate and draw."""
    import pandas as pd

    from experiments.resample import chat_of, subject_of
    from experiments.steering import controls, sample, show
    from experiments.steering.analyse import ADDED, REMOVED, by_context, chosen_dose, estimates
    from experiments.steering.measure import Scorer, controls_of
    from experiments.steering.read import REPORTING, read
    from experiments.steering.steer import UNSTEERED, Arm, FirstToken, rates_by_first_token
    from ia_mech.collect.identity import eos_ids
    from ia_mech.errors import UserError
    from ia_mech.steering import PROJECT_OUT

    vector, probe, outcome = _vector(args, runs)
    model = runs[0].model
    doses = sorted(set(args.doses or DOSES) - {0.0})
    if not all(map(isfinite, doses)) or max(doses, default=0) <= 0:
        raise UserError("--doses need one above 0, and no infinite one", "give some: 0.5 1 2")
    if 0 < args.controls < LEAST:
        raise UserError(
            f"--controls {args.controls}: p would be at least {1 / (args.controls + 1):.2f}",
            f"give {LEAST} or more, with which 0.05 can be reached, or 0 for none",
        )
    if not args.most_kl > 0:
        raise UserError(f"--most-kl {args.most_kl:g}: no dose has so little", "give 0.5, or inf")
    given = read(runs, args.judge, outcome, args.queries, args.responses, args.seed)
    arms = [Arm(UNSTEERED)]
    arms += [Arm(ADDED, 0, replace(vector, dose=dose)) for dose in doses]
    arms.append(Arm(REMOVED, 0, replace(vector, kind=PROJECT_OUT, dose=1.0)))
    show.plan(given, vector, len(arms), args.controls, args.samples)
    if args.dry_run:
        return None
    x = controls.states(runs, given, vector) if args.controls else None
    subject = subject_of(runs[0])
    stops = eos_ids(subject.model.generation_config, subject.model.config)
    chat = chat_of(runs[0], subject.tokenizer, stops)
    token = FirstToken(rates_by_first_token(given.opened, model["vocab"]), chat.stop_ids)
    scorer = Scorer(subject, chat, token, folder)
    rows = scorer.steered(given.queries, arms, crossed=True)
    sizes = [chosen_dose(by_context(rows), args.most_kl, sign) for sign in (1, -1)]
    chosen = [arm for dose in sizes for arm in arms if (arm.of, arm.dose) == (ADDED, dose)]
    folder.mkdir(parents=True, exist_ok=True)
    assert chosen[0].vector is not None
    chosen[0].vector.save(folder / sample.FILE)
    reporting = [query for query in given.queries if query.half == REPORTING]
    notes = list(given.notes)
    sampled = list(arms)
    if x is not None:
        fitted = None if probe is None else (probe, args.direction)
        options = given, rows, fitted, args.controls, args.seed
        others, left = controls_of(chosen, scorer, x, *options)
        if left:
            notes.append(f"{left} controls don't reach the KL of their dose and are left out.")
        parts = [rows, scorer.steered(reporting, others, crossed=False)]
        sampled += [arm for arm in others if arm.of == controls.RANDOM][:2]
        try:
            parts.append(scorer.prompted(reporting))
            sampled.append(Arm(controls.PROMPT))
        except UserError as error:
            notes.append(f"no control with {controls.PROMPT}: {error.problem}.")
        rows = pd.concat(parts, ignore_index=True)
    setting = reporting, runs, subject, chat, args.samples, folder / "sampled"
    found_in = {
        (arm.of, arm.draw, arm.dose): sample.sampled_under(arm, *setting)
        for arm in (sampled if args.samples else ())
    }
    doses = [arm.dose for arm in chosen]  # one above 0, and one below it if there is any
    found = estimates(rows, doses, found_in, outcome, **intervals(args))
    tables = {"turns": rows.drop(columns="logprobs")}
    if found_in:
        tables["sampled"] = pd.concat([turns for _, turns in found_in.values()], ignore_index=True)
    return result_of(
        runs,
        given.gate,
        estimates=found,
        tables=show.tables(found, doses[0], args.level),
        figures=show.figures(found, doses, model["name"]),
        data=tables,
        notes=[*notes, show.LIMITS],
        sentence=show.verdict(found, doses[0], outcome),
        control=show.control(found),
    )


def _vector(
    args: argparse.Namespace, runs: "list[Run]"
) -> "tuple[SteeringVector, Probe | None, str]":
    """The direction, the probe that it is of, and what its judge accepts.

    Raises:
        UserError: it is of another model, or nothing is steered before the turn's first token.
    """
    from experiments.steering.read import vector_of_probe
    from ia_mech.errors import UserError
    from ia_mech.steering import TURN, SteeringVector
    from probes.card import Probe
    from probes.targets import GROUNDED

    probe, outcome = None, "genuine"
    if args.vector is not None:
        vector = SteeringVector.load(args.vector)
    else:
        probe = Probe.load(args.probe)
        vector = vector_of_probe(probe, args.probe, args.direction, runs)
        if probe.card["asked"].get("target") == GROUNDED:
            outcome = GROUNDED
    if args.layer is not None:
        vector = replace(vector, layer=args.layer)
    if args.positions:
        vector = replace(vector, positions=tuple(dict.fromkeys(args.positions)))
    model = runs[0].model
    names = sorted({name for run in runs for name in run.contexts["positions"].iloc[0]})
    vector.check(model["layers"], model["d_model"], names)
    vector.check_weights(model["weights_hash"])
    if set(vector.positions) == {TURN}:
        raise UserError(
            "steering the turn's tokens alone leaves the next token at the header as it is",
            "give --positions a token of the header, too",
        )
    return vector, probe, outcome


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Along what, where, and how much."""
    along = parser.add_mutually_exclusive_group(required=True)
    along.add_argument(
        "--probe", type=path_of, metavar="PROBE", help="folder that probes.train wrote"
    )
    along.add_argument("--vector", type=path_of, metavar="FILE", help="a steering vector's file")
    parser.add_argument(
        "--direction",
        type=named,
        default="logistic",
        metavar="NAME",
        help="of the probe: logistic or mass-mean (default: logistic)",
    )
    parser.add_argument(
        "--layer", type=whole_from(0), metavar="L", help="0 = embeddings (default: the probe's)"
    )
    parser.add_argument(
        "--positions",
        nargs="+",
        metavar="NAME",
        help="tokens such as header_last; turn: each of the turn's (default: the probe's)",
    )
    parser.add_argument(
        "--doses",
        type=float,
        nargs="+",
        metavar="D",
        help=f"in norms of the state (default: {' '.join(f'{dose:g}' for dose in DOSES)})",
    )
    parser.add_argument(
        "--most-kl",
        type=float,
        default=0.5,
        metavar="NATS",
        help="the dose is chosen among those of at most this KL at the header (default: 0.5)",
    )
    parser.add_argument(
        "--queries",
        type=whole_from(4),
        default=20,
        metavar="N",
        help="most sources, drawn by --seed; half of them choose the dose (default: 20)",
    )
    parser.add_argument(
        "--responses",
        type=whole_from(1),
        default=4,
        metavar="K",
        help="most contexts of a source (default: 4)",
    )
    parser.add_argument(
        "--controls",
        type=whole_from(0),
        default=39,
        metavar="N",
        help=f"random directions, at least {LEAST}; 0: no control (default: 39)",
    )
    parser.add_argument(
        "--samples",
        type=whole_from(0),
        default=2,
        metavar="N",
        help="turns sampled per context and arm; 0: none (default: 2)",
    )
    add_dry_run(parser)


EXPERIMENT = Experiment(
    name="steering",
    description="""\
Does a direction in the residual stream move the user turn? It is added at chosen tokens of one
layer, or projected out, or states of contexts with a high score are put in place of those with a
low one. Turns that the run holds are scored, new ones are sampled and judged. The dose is chosen on
half of the sources and reported on the other half, beside other directions of the same KL at the
header.

log-odds   of turns that the judge accepts against others after the same context
controls   random directions with the covariance of the states, another layer, the direction without
           length, topic and first token, probes of shuffled labels, a bias of the first token, a
           prompt
sampled    rate, excess over decoys, degenerate turns, and what the unsteered model thinks of them

Interrupted, the same command continues.""",
    written="turns and sampled (parquet), doses and controls (PNG, SVG), vector.safetensors (of "
    "the chosen dose, for sample --intervention), parts/ and sampled/ (runs)",
    run=run,
    add_flags=add_flags,
    beside="steering",
    drawn="sources, halves, random directions and resampling",
    kept="what was scored and sampled is kept; the same command goes on from there",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
