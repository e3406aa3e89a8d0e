"""How much do user turns tell about which response they followed?

Usage::

    python -m ia_mech.sample --response generate --responses 4 --out cache/several
    python -m experiments.reaction cache/several
    python -m experiments.reaction cache/several --dry-run
"""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.runner import Experiment, add_dry_run, result_of
from ia_mech.cli import path_of, whole_from
from ia_mech.errors import UserError

if TYPE_CHECKING:
    from experiments.reaction.read import Arm
    from ia_mech.results import Result
    from ia_mech.run import Run


def run(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> "Result | None":
    """Sample the controls, score all turns, estimate and draw."""
    from experiments.reaction import score, show
    from experiments.reaction.analyse import (
        INFORMATION,
        LESS,
        ScoredArm,
        estimates,
        per_turn,
        readable,
    )
    from experiments.reaction.controls import read_paraphrases, same_content, under_assistant
    from experiments.reaction.read import ALTERNATIVES, ASSISTANT, SAME_CONTENT, cut_off, read
    from experiments.resample import resampled, same_settings, subject_of
    from experiments.tables import stated
    from ia_mech.display import Bar

    arm, notes = read(runs)
    notes += cut_off(arm.queries)
    scores = None if args.scores is None else score.given_scores(args.scores, arm)
    told = None if args.scorer is None else score.retold(arm, args.scorer, runs[0])
    same_settings(runs)
    arms = {ALTERNATIVES: arm}
    size = min(args.control_responses, arm.responses)
    requests, conversations = "", {}
    if args.paraphrase_model is None and (args.base_url or args.api_key_env):
        raise UserError("--base-url and --api-key-env need --paraphrase-model", "give it as well")
    if args.control_queries:
        texts = None if args.paraphrases is None else read_paraphrases(args.paraphrases, arm)
        among = arm
        if args.paraphrase_model is not None:
            among, texts, requests = _paraphrased(args, arm, size, folder / "paraphrases")
        made, more = same_content(among, size, args.control_queries, args.seed, texts)
        notes += more
        conversations[SAME_CONTENT] = made
        made, more = under_assistant(arm, size, args.control_queries, args.seed, runs[0])
        notes += more
        conversations[ASSISTANT] = made
    if args.dry_run:
        show.plan(arm, {name: len(those) for name, those in conversations.items()}, requests)
        return None
    used = list(runs)
    for name, those in conversations.items():
        place = folder / name.replace(" ", "_")
        control = resampled(runs[0], those, place, ("header_last",))
        arms[name], _ = read([control], name)
        used.append(control)
    subject = subject_of(runs[0])
    reader = score.reader_of(subject, runs[0])
    scored = {
        name: ScoredArm(one, score.likelihoods(one, reader, folder / "likelihoods", Bar()))
        for name, one in arms.items()
    }
    if told is not None:
        scores = score.scored_by(args.scorer, told, runs[0], folder / "likelihoods", Bar())
    main = scored[ALTERNATIVES]
    held = readable(main, main.found.reader if scores is None else scores, args.seed)
    turns = per_turn(main, held)
    complete = arm.complete_responses(size)
    found = estimates(scored, turns, scores, complete, level=args.level, seed=args.seed)
    whole = found[found["of"] == ALTERNATIVES]
    return result_of(
        used,
        None,
        estimates=found,
        tables=show.tables(found, turns, args.level),
        figures=show.figures(found, runs[0].model["name"]),
        data={"turns": show.written(turns)},
        notes=notes,
        sentence=stated(
            f"bits that a turn tells about which of {arm.responses} responses it followed, at most "
            f"{math.log2(arm.responses):.2f}",
            whole[(whole["quantity"] == INFORMATION) & (whole["responses"] == arm.responses)],
        ),
        control=stated(
            f"with {size} responses, bits more than with versions of one that say the same",
            found[(found["quantity"] == LESS) & (found["of"] == SAME_CONTENT)],
            null=0.0,
            level=args.level,
        )
        or "No control was made of versions of one response that say the same.",
    )


def _paraphrased(
    args: argparse.Namespace, arm: "Arm", size: int, folder: Path
) -> "tuple[Arm, dict[str, list[str]], str]":
    """The queries of which a response is paraphrased, the texts by context id, and what they take.

    With ``--dry-run`` no request is sent, and every answer is taken for a version.
    """
    from experiments.reaction.paraphrase import Paraphraser, paraphrases, to_rewrite
    from ia_mech.display import Bar

    model = Paraphraser(args.paraphrase_model, args.base_url, args.api_key_env)
    chosen = to_rewrite(arm, args.control_queries, args.seed)
    items = {id_: item for id_, (_, item) in chosen.items()}
    if args.dry_run:
        texts = {id_: [str(k) for k in range(size)] for id_ in items}
    else:
        texts = paraphrases(model, items, size, folder, Bar())
    among = arm.of([source for source, _ in chosen.values()])
    return among, texts, model.estimate([*items.values()] * size)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The controls, and who reads."""
    parser.add_argument(
        "--control-queries",
        type=whole_from(0),
        default=40,
        metavar="N",
        help="queries that the controls are made of; 0 leaves the controls out (default: 40)",
    )
    parser.add_argument(
        "--control-responses",
        type=whole_from(2),
        default=4,
        metavar="K",
        help="contexts of each in a control (default: 4)",
    )
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument(
        "--paraphrases",
        type=path_of,
        metavar="FILE",
        help='JSONL with {"id": "open-03/r0", "versions": […]}: texts that say what that response '
        "says, in place of its sentences shuffled",
    )
    texts.add_argument(
        "--paraphrase-model",
        metavar="NAME",
        help="a model at a server that paraphrases one response to each of these queries instead",
    )
    parser.add_argument(
        "--base-url", help="an OpenAI-compatible server (default: $OPENAI_BASE_URL, or OpenAI's)"
    )
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="variable that holds the key (default: OPENAI_API_KEY; none with --base-url)",
    )
    reader = parser.add_mutually_exclusive_group()
    reader.add_argument(
        "--scorer",
        metavar="MODEL",
        help="another model as the one reader of all turns (default: the subject at T = 1)",
    )
    reader.add_argument(
        "--scores",
        type=path_of,
        metavar="FILE",
        help="scores of any judge or embedding in the reader's place (JSONL; see docs/reaction.md)",
    )
    add_dry_run(parser, "sampled and scored")


EXPERIMENT = Experiment(
    name="reaction",
    description="""\
Given the query, how much does a generated user turn tell about which response it followed? In bits,
without a judge, from the likelihood of every turn after each of the K responses to its query. The
runs need several responses per query (sample with --response generate --responses K).

I_K        information of turn and response, at most log2 K; readable: what one reader finds of it
identified how often the response that a turn followed is the one that makes it likeliest
presence   bits by which a turn is likelier after its response than after none
controls   versions of one response that say the same; the assistant's header in the user's place
copied     bits that shared words, numbers and names tell already

Interrupted, the same command continues.""",
    written="turns (bits of every turn), information, responses and tokens (PNG, SVG, PDF), "
    "likelihoods/, same_content/ and assistant_header/ (runs like any other)",
    run=run,
    add_flags=add_flags,
    beside="reaction",
    judged=False,
    drawn="controls, folds and tests",
    kept="what was sampled and scored is kept; the same command goes on from there",
)
build_parser, main = EXPERIMENT.build_parser, EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
