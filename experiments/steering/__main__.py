"""Can a direction in the residual stream move the turns, more than random ones?

Usage::

    python -m probes.train cache/RUN
    python -m experiments.steering cache/RUN --probe cache/RUN/probes/rate-logistic-rules --dry-run
    python -m experiments.steering cache/RUN --probe cache/RUN/probes/rate-logistic-rules
    python -m experiments.steering cache/RUN --vector my.safetensors --doses 0.1 0.2 0.4
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, Results, add_dry_run, intervals
from ia_mech.cli import named, path_of, whole_from

if TYPE_CHECKING:
    import pandas as pd

    from experiments.steering.read import Query, Read
    from experiments.steering.steer import Arm, FirstToken
    from ia_mech.models.load import Subject
    from ia_mech.run import Run
    from ia_mech.steering import SteeringVector
    from probes.card import Probe

DOSES = (-2.0, -0.5, 0.1, 0.5, 1.0, 2.0, 4.0)
SHUFFLES = 5
PARTS = "parts"


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> Results | None:
    """Read, steer, choose a dose, compare, sample, estimate and draw."""
    import pandas as pd

    from experiments.resample import chat_of, subject_of
    from experiments.steering import controls, sample, show
    from experiments.steering.analyse import ADDED, REMOVED, by_context, chosen_dose, estimates
    from experiments.steering.read import CHOOSING, REPORTING, read
    from experiments.steering.steer import (
        UNSTEERED,
        Arm,
        FirstToken,
        of_equal_kl,
        rates_by_first_token,
    )
    from ia_mech.collect.identity import eos_ids
    from ia_mech.errors import UserError
    from ia_mech.steering import PROJECT_OUT, TURN

    vector, probe, outcome = _vector(args, runs)
    model = runs[0].model
    names = sorted({name for run in runs for name in run.contexts["positions"].iloc[0]})
    vector.check(model["layers"], model["d_model"], names)
    vector.check_weights(model["weights_hash"])
    if set(vector.positions) == {TURN}:
        raise UserError(
            "steering the turn's tokens alone leaves the next token at the header as it is",
            "give --positions a token of the header, too",
        )
    doses = sorted(set(args.doses or DOSES) - {0.0})
    if not all(map(isfinite, doses)) or max(doses, default=0) <= 0:
        raise UserError("there is no dose above 0 to choose", "give --doses some, such as 0.5 1 2")
    given = read(runs, args.judge, outcome, args.queries, args.responses, args.seed)
    arms = [Arm(UNSTEERED)]
    arms += [Arm(ADDED, 0, replace(vector, dose=dose)) for dose in doses]
    arms.append(Arm(REMOVED, 0, replace(vector, kind=PROJECT_OUT, dose=1.0)))
    others = args.controls and args.controls + (SHUFFLES if probe else 0) + 3
    show.plan(given, vector, len(arms), others, args.samples, model["layers"])
    if args.dry_run:
        return None
    x = controls.states(runs, given, vector) if args.controls else None
    subject = subject_of(runs[0])
    stops = eos_ids(subject.model.generation_config, subject.model.config)
    chat = chat_of(runs[0], subject.tokenizer, stops)
    rates = rates_by_first_token(given.opened, model["vocab"])
    token = FirstToken(rates, chat.stop_ids)
    scored = partial(_scored, subject, token=token, folder=folder)
    rows = scored(given.queries, arms, crossed=True)
    dose = chosen_dose(by_context(rows), args.most_kl)
    (chosen,) = (arm for arm in arms if arm.of == ADDED and arm.dose == dose)
    assert chosen.vector is not None
    folder.mkdir(parents=True, exist_ok=True)
    chosen.vector.save(folder / sample.FILE)
    choosing = [query for query in given.queries if query.half == CHOOSING]
    reporting = [query for query in given.queries if query.half == REPORTING]
    notes = list(given.notes)
    drawn: list[Arm] = []
    if x is not None:
        known = _with_expected(given, rows)
        alike = [
            *controls.random_arms(x, chosen, args.controls, args.seed),
            controls.other_layer(chosen, model["layers"]),
            controls.without_known(x, known, chosen),
        ]
        if probe is not None:
            named = probe, args.direction
            alike += controls.shuffled_arms(x, given, chosen, *named, SHUFFLES, args.seed)
        alike.append(controls.first_token_bias(subject.model, choosing, chosen))
        mine = by_context(rows)
        at = (mine["of"] == ADDED) & (mine["dose"] == dose) & (mine["half"] == CHOOSING)
        drawn = of_equal_kl(subject.model, choosing, alike, float(mine.loc[at, "kl"].mean()))
        if len(drawn) < len(alike):
            notes.append(
                f"{len(alike) - len(drawn)} of {len(alike)} controls don't reach the KL of the "
                "chosen dose and are left out."
            )
        rows = pd.concat([rows, scored(reporting, drawn, crossed=False)], ignore_index=True)
        try:
            rows = pd.concat(
                [rows, _prompted(subject, chat, reporting, token, folder)], ignore_index=True
            )
        except UserError as error:
            notes.append(f"no control with {controls.PROMPT}: {error.problem}.")
    found_in = {}
    if args.samples:
        first = [arm for arm in drawn if arm.of == controls.RANDOM][:2]
        prompted = [Arm(controls.PROMPT)] if controls.PROMPT in set(rows["of"]) else []
        for arm in [*arms, *first, *prompted]:
            name = f"{arm.of} {arm.draw} {arm.dose:g}".replace(" ", "-")
            place = folder / "sampled" / name
            judged = sample.sampled_under(arm, reporting, runs, subject, chat, args.samples, place)
            key = (arm.of, arm.draw, arm.dose)
            found_in[key] = judged, sample.described(judged, subject)
    found = estimates(rows, dose, found_in, outcome, **intervals(args))
    said = show.verdict(found, dose, outcome)
    tables = {"turns": rows.drop(columns="logprobs")}
    if found_in:
        texts = [
            turns.assign(of=of, draw=draw, dose=size)
            for (of, draw, size), (_, turns) in found_in.items()
        ]
        tables["sampled"] = pd.concat(texts, ignore_index=True)
    return Results(
        runs=runs,
        judge=given.gate,
        estimates=found,
        show=lambda console: show.tables(console, found, dose, args.level),
        figures=show.figures(found, dose, model["name"]),
        tables=tables,
        notes=notes,
        sentence=said,
        control=show.control(found),
    )


def _vector(
    args: argparse.Namespace, runs: "list[Run]"
) -> "tuple[SteeringVector, Probe | None, str]":
    """The direction, the probe that it is of, and what its judge accepts."""
    from experiments.steering.read import vector_of_probe
    from ia_mech.steering import SteeringVector
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
    return vector, probe, outcome


def _scored(
    subject: "Subject",
    queries: "list[Query]",
    arms: "list[Arm]",
    *,
    token: "FirstToken",
    folder: Path,
    crossed: bool,
) -> "pd.DataFrame":
    from experiments.given_turns import computed_for_each
    from experiments.steering.steer import steered

    def key(query: "Query") -> list:
        return [*_key(subject, query, token), crossed, [arm.key for arm in arms]]

    def compute(query: "Query") -> "pd.DataFrame":
        return steered(subject.model, query, arms, token, crossed)

    return computed_for_each(queries, "steering", folder / PARTS, key, compute)


def _prompted(subject, chat, queries: "list[Query]", token: "FirstToken", folder: Path):
    from experiments.given_turns import computed_for_each
    from experiments.steering.controls import ASKING, prompted

    def key(query: "Query") -> list:
        return [*_key(subject, query, token), ASKING]

    def compute(query: "Query") -> "pd.DataFrame":
        return prompted(subject.model, chat, query, token)

    return computed_for_each(queries, "with a prompt", folder / PARTS, key, compute)


def _key(subject: "Subject", query: "Query", token: "FirstToken") -> list:
    contexts = [[context.ids, context.places] for context in query.contexts]
    turns = [[turn.ids, turn.followed, str(turn.label)] for turn in query.turns]
    rates = None if token.rates is None else token.rates.tolist()
    return [subject.weights_hash, query.source, query.half, contexts, turns, rates]


def _with_expected(given: "Read", rows: "pd.DataFrame") -> "Read":
    """The contexts with the ``expected`` rate of the unsteered model, where it was computed."""
    from experiments.steering.steer import UNSTEERED

    plain = rows[rows["of"] == UNSTEERED].drop_duplicates(["source", "followed"])
    if plain["expected"].isna().any():
        return given
    ids = {
        (query.source, k): (context.run, context.id)
        for query in given.queries
        for k, context in enumerate(query.contexts)
    }
    keys = zip(plain["source"], plain["followed"], strict=True)
    of = {ids[key]: value for key, value in zip(keys, plain["expected"], strict=True)}
    pairs = zip(given.contexts["run"], given.contexts["context_id"], strict=True)
    expected = [of.get(pair, float("nan")) for pair in pairs]
    return replace(given, contexts=given.contexts.assign(expected=expected))


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
        help="of the probe: logistic, mass-mean or whitened (default: logistic)",
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
        default=20,
        metavar="N",
        help="random directions; 0: no control (default: 20)",
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
layer, or projected out. Turns that the run holds are scored, new ones are sampled and judged. The
dose is chosen on half of the sources and reported on the other half, beside other directions of the
same KL at the header.

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
    page="causal.md",
    drawn="sources, halves, random directions and resampling",
    kept="what was scored and sampled is kept; the same command goes on from there",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
