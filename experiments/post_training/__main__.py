r"""Can a model be trained to write user turns, and do they react to the response or only look so?

Usage::

    python -m experiments.post_training sft cache/RUN --organism 0.5 --out cache/half
    python -m ia_mech.sample --dataset cache/half/held-out.jsonl --limit all --out cache/before
    python -m ia_mech.sample --dataset cache/half/held-out.jsonl --limit all --adapter cache/half \
        --out cache/after
    python -m experiments.post_training compare cache/before cache/after
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.runner import Experiment
from ia_mech.cli import (
    Parser,
    add_threads,
    guarded,
    named,
    path_of,
    tolerant_streams,
    whole_from,
)
from ia_mech.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from ia_mech.models.load import ModelSpec
    from ia_mech.results import Result
    from ia_mech.run import Run


SEQUENCES, HELD_OUT = "sequences.parquet", "held-out.jsonl"
COMPARE = "compare"

DESCRIPTION = """\
Train a model on user turns, and find out whether it learned to react or only the form of it.

export   write the tokenized training sequences, for any trainer
sft      train on them: real follow-ups, or a model organism's turns
rl       train by reward: bits that a turn gives for its response, or the grounded judge
compare  a run of the base model and one of the tuned model, on the same contexts

Each has its own --help. Method: docs/post-training.md.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line, but for ``compare``, which is an experiment like any other."""
    parser = Parser(prog="python -m experiments.post_training", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in (
        ("export", "write the tokenized training sequences"),
        ("sft", "train on user turns"),
        ("rl", "train by reward"),
    ):
        command = commands.add_parser(name, help=what, description=f"{what.capitalize()}.")
        _add_data(command, turns=name != "rl")
        if name != "export":
            _add_training(command, name)
    commands.add_parser(COMPARE, help="before and after", add_help=False)
    return parser


def _add_data(parser: argparse.ArgumentParser, turns: bool) -> None:
    add = parser.add_argument
    add("data", metavar="RUN", help="a run's folder, or conversations as --dataset takes them")
    if turns:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument(
            "--organism",
            type=_share,
            metavar="SHARE",
            help="turns that quote a response: this share their own (0: form only, to 1)",
        )
        what.add_argument("--natural", action="store_true", help="the users' real follow-ups")
        add(
            "--assistant-share",
            type=_below_one,
            default=0.0,
            metavar="SHARE",
            help="of sequences that teach the response in place of a user turn (default: 0)",
        )
    add(
        "--model", type=named, metavar="NAME", help="to train (default: the run's, or the embedded)"
    )
    add(
        "--held-out",
        type=whole_from(0),
        default=20,
        metavar="N",
        help="sources that aren't trained on, the same for every --seed (default: 20)",
    )
    add(
        "--max-tokens",
        type=whole_from(8),
        default=1024,
        metavar="N",
        help="of a sequence; longer ones are left out (default: 1024)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of organisms and training (default: 0)",
    )
    add("--out", type=path_of, required=True, metavar="FOLDER", help="a new folder")


def _add_training(parser: argparse.ArgumentParser, name: str) -> None:
    add = parser.add_argument
    add(
        "--rank",
        type=whole_from(1),
        default=16,
        metavar="R",
        help="of the LoRA adapter in all linear layers (default: 16)",
    )
    add("--full", action="store_true", help="train all weights, and save a whole model")
    rate = {"sft": 5e-4, "rl": 1e-4}[name]
    add("--learning-rate", type=_positive, default=rate, metavar="X", help="(default: %(default)g)")
    add("--batch", type=whole_from(1), default=8, metavar="N", help="sequences (default: 8)")
    add_threads(parser)
    if name == "sft":
        add("--epochs", type=_positive, default=3.0, metavar="N", help="(default: 3)")
        return
    add(
        "--reward",
        choices=("bits", "grounded"),
        default="bits",
        help="bits that the turn gives for its response, as the model read it before; or 1 where "
        "the rules judge calls it genuine and grounded (default: bits)",
    )
    add(
        "--penalty",
        type=_positive,
        default=1.0,
        metavar="X",
        help="weight of each penalty: restatement of the query, repetition, stock phrases, and a "
        "turn that doesn't end (default: 1)",
    )
    add("--steps", type=whole_from(1), default=100, metavar="N", help="(default: 100)")
    add("--generations", type=whole_from(2), default=4, metavar="N", help="per prompt (default: 4)")
    add("--max-new-tokens", type=whole_from(1), default=40, metavar="N", help="(default: 40)")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return share


def _below_one(text: str) -> float:
    if (share := _share(text)) == 1:
        raise argparse.ArgumentTypeError("1 leaves no user turns; give a share below it")
    return share


def _compare(args: argparse.Namespace, runs: "list[Run]", folder: Path) -> "Result | None":
    from experiments.post_training import compare

    return compare.run(args, runs, folder)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--queries",
        type=whole_from(2),
        default=20,
        metavar="N",
        help="most queries whose turns are scored, drawn by --seed (default: 20)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="whose turns are scored (default: 1, or the highest)",
    )


class _Compare(Experiment):
    def build_parser(self) -> argparse.ArgumentParser:
        parser = super().build_parser()
        parser.prog = f"{parser.prog} {COMPARE}"
        return parser


EXPERIMENT = _Compare(
    name="post_training",
    description="""\
What did training on user turns change? A run of the base model and one of the tuned model, in this
order, over the same contexts with several responses per query; judge both for rates.

turns     the organism's form; whether the quote is of the turn's own response or of another one;
          what the query has already, repetition, phrases that stand after other queries, too
I_K       bits that turns tell about their response, and evidence for it, as both models read both
          models' turns
header    the same with the header's states of the other model in all layers; how far they moved

Interrupted, the same command continues.""",
    written="turns (bits of every turn under every reader), displacement (PNG, SVG, PDF), parts/",
    run=_compare,
    add_flags=_add_reading,
    several_models=True,
    drawn="queries and resampling",
    kept="what was scored is kept; the same command goes on from there",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [COMPARE]:
        return EXPERIMENT.main(words[1:])
    tolerant_streams()
    args = build_parser().parse_args(words)
    threads = getattr(args, "threads", None)  # export computes nothing
    return guarded(lambda: _run(args), lambda: f"{args.out} isn't whole; remove it", threads)


def _run(args: argparse.Namespace) -> None:
    from experiments.post_training import data, rl, train
    from ia_mech.display import save_figure, styled
    from ia_mech.estimates import write_parquet
    from ia_mech.models.load import load
    from ia_mech.run.layout import refuse_inside_run, refuse_unwritable

    if args.command != "export":
        train.require()
    refuse_inside_run(args.out / SEQUENCES)
    refuse_unwritable(args.out)
    if args.out.is_dir() and any(args.out.iterdir()):
        raise UserError(f"{args.out} isn't empty", "name a new folder with --out")
    found, run = data.read(args.data)
    spec, chat = data.model_of(run, args.model)
    if args.command != "export":
        _check_training(args, spec)
    kept, apart = data.split(found, args.held_out)
    if args.command != "rl" and args.natural:
        kept = data.natural(kept, args.data)
    if args.command == "rl":
        rows, contexts = rl.prompts(chat, kept, args.max_tokens)
        described = f"{len(rows)} prompts of {len(contexts)} queries"
    else:
        if args.organism is not None:
            kept = data.organism(kept, args.organism, args.seed)
        share = args.assistant_share
        sequences, notes = data.sequences(chat, kept, share, args.max_tokens, args.seed)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        described = _described(sequences)
        if args.organism is not None:
            each = [len(those) for those in data.distinct_responses(kept).values()]
            bits = sum(data.information(args.organism, k) for k in each) / len(each)
            described += f"; a turn tells {bits:.2f} bits about its response"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.command != "rl":
        write_parquet(sequences, args.out / SEQUENCES, {"data": args.data, "seed": args.seed})
    text = "".join(json.dumps(one.to_dict(), ensure_ascii=False) + "\n" for one in apart)
    (args.out / HELD_OUT).write_text(text, encoding="utf-8")
    print(f"{described}; {len(apart)} contexts are held out")
    if args.command != "export":
        rank = 0 if args.full else args.rank
        tuning = train.Tuning(rank, args.learning_rate, args.batch, args.seed)
        subject = train.trainable(spec, chat, tuning)
        with train.quiet():
            if args.command == "sft":
                trainer = train.sft(subject, sequences, tuning, args.epochs, args.out)
                names = ["loss"]
            else:
                given = rl.rewards(args.reward, load(spec), chat, contexts)
                names = ["reward", *(f"rewards/{name}/mean" for name in given)]
                trainer = rl.train(
                    subject,
                    chat,
                    rows,
                    given,
                    tuning,
                    args.steps,
                    args.generations,
                    args.max_new_tokens,
                    args.penalty,
                    args.out,
                )
        train.save(trainer, subject, tuning, _settings(args), args.out)
        save_figure(styled(train.curves)(trainer, names), args.out, "curves")
        print(f"first and last fifth of the steps: {train.curve(trainer, names)}")
    print(f"wrote {args.out}", file=sys.stderr)


def _check_training(args: argparse.Namespace, spec: "ModelSpec") -> None:
    if spec.adapter is not None and not args.full:
        raise UserError(
            f"{args.data} is of a model with an adapter, on which no second one can be trained",
            "give the base model's run, or --full",
        )
    if args.command == "rl" and args.batch % args.generations:
        raise UserError(
            f"--batch {args.batch} isn't a multiple of --generations {args.generations}",
            f"give --batch {args.generations} or {2 * args.generations}",
        )


def _described(sequences: "pd.DataFrame") -> str:
    from experiments.post_training.data import IGNORED, USER

    learned = sum(sum(i != IGNORED for i in labels) for labels in sequences["labels"])
    kinds = ", ".join(f"{n} {kind}s" for kind, n in sequences["learned"].value_counts().items())
    user = sequences[sequences["learned"] == USER]
    share, what = user["own"].mean(), "quote their own response"
    if user["own"].isna().all():
        share, what = user["saw_response"].mean(), "were written in sight of the response"
    quoting = f" ({share:.2f} of the user turns {what})"
    return f"{kinds}{quoting}, {learned} tokens are learned"


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}


if __name__ == "__main__":
    sys.exit(main())
