"""``ia-mech judge``: subcommands, their flags and help."""

import argparse
import importlib
import shlex
import sys
from functools import partial
from pathlib import Path

from rich.markup import escape

from ia_mech.cli import (
    RUN,
    Parser,
    add_threads,
    go_on,
    one_line,
    path_of,
    refuse,
    run_command,
    run_folder,
    tolerant_streams,
    whole_from,
)
from ia_mech.display import console
from ia_mech.judge.rubric import CATEGORIES, ORDER, VERSION

COMMANDS = ("run", "check", "agreement", "remove", "rubric")

DESCRIPTION = """\
Label user turns: which are follow-ups? Judges see text only: the query, the response and the turn.
Every judge uses one rubric (ia-mech judge rubric). Any number of judges and annotators can label
the same run, and can be compared. As a control, every judge also labels the same turns after a
wrong conversation (one of another query) and after siblings (other responses to the same query).
"""

EPILOG = """\
examples:
  ia-mech judge run cache/RUN
      the built-in judge: English, deterministic, free. How good it is: judge/builtin/CARD.md
  ia-mech judge run cache/RUN --judge llm --model gpt-5-mini
      a language model at OpenAI (key from $OPENAI_API_KEY), or at --base-url, any compatible server
  ia-mech judge agreement cache/RUN
      how far judges and annotators agree, on turns and on turns after wrong conversations
Labels by people: ia-mech annotate. Then: ia-mech rates cache/RUN
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] not in COMMANDS and (Path(words[0]) / RUN).is_file():
        meant = f"ia-mech judge run {shlex.join(words)}"
        return refuse(f"{words[0]} is a run, not a command of ia-mech judge; did you mean: {meant}")
    args = build_parser().parse_args(words)

    def body() -> int | None:
        # Imported late, so that --help and a mistyped flag are answered at once.
        module, function = args.function.split(":")
        return getattr(importlib.import_module(module), function)(args)

    cached = getattr(args, "judge", "builtin") != "builtin"
    kept = "labels so far are kept" if cached else "no file was left half-written"
    return run_command(
        body, lambda: go_on(kept, "ia-mech judge", words), getattr(args, "threads", None)
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line; ``args.function`` is ``module:function`` of the subcommand."""
    parser = Parser(prog="ia-mech judge", description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    _add_run(commands)
    _add_check(commands)
    _add_agreement(commands)
    _add_remove(commands)
    rubric = commands.add_parser("rubric", help="print the rubric")
    rubric.set_defaults(function=f"{__name__}:print_rubric")
    return parser


def print_rubric(args: argparse.Namespace) -> None:
    """Print the rubric with its worked examples."""
    screen = console()
    screen.print(f"[bold]Rubric {VERSION}[/]: what a generated user turn can be\n")
    for category in CATEGORIES:
        screen.print(f"[bold]{category.name}[/]", escape(category.definition), soft_wrap=True)
        for example in category.examples:
            turn = escape(one_line(example.turn)) or "(nothing)"
            screen.print(f"    [dim]e.g.[/] {turn}", soft_wrap=True)
            screen.print(f"         ({escape(example.why)})", soft_wrap=True)
        screen.print()
    screen.print(f"Where two fit, the first that applies: {ORDER}.", soft_wrap=True)


def _add_run(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="label all user turns of a run",
        usage="%(prog)s RUN [--judge builtin|llm|hf|MODULE:CLASS] [--model NAME] [options]",
        description="Label all user turns of a run, and the same turns after wrong conversations "
        "and "
        "siblings.\nLabels go to judgements/<name>.parquet in the run. Labels by language models "
        "are also kept in\ncache/judgements/: none is paid for twice. Labels that the run has are "
        "not made again.",
    )
    parser.set_defaults(function="ia_mech.judge.command:run_judge")
    add = parser.add_argument
    add("run", type=run_folder, metavar="RUN", help="a run's folder")
    _add_judge(parser)
    add("--name", help="the judge's name in the run (default: builtin, or the model's name)")
    add(
        "--decoys",
        type=whole_from(0),
        metavar="M",
        help="turns of each query and temperature that are also shown after other conversations "
        "(default: all, or 1 for a judge that is paid)",
    )
    add(
        "--replace",
        action="store_true",
        help="judge again, and replace all labels of that name, even another judge's",
    )
    add(
        "--unperturbed",
        action="store_true",
        help="show the judge each turn after the response as it was before it was perturbed",
    )


def _add_check(commands) -> None:
    parser = commands.add_parser(
        "check",
        help="judge annotated turns in a file, and show how good the judge is",
        usage="%(prog)s FILE [--judge builtin|llm|hf|MODULE:CLASS] [--model NAME] [options]",
        description="Judge the turns of a JSON-lines file (query, response, user_turn; category "
        "where\nannotated; source_id for intervals) and compare with the annotations.",
    )
    parser.set_defaults(function="ia_mech.judge.check:check")
    parser.add_argument("file", type=path_of, help="JSON-lines file")
    _add_judge(parser)


def _add_judge(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--judge",
        type=_judge,
        default="builtin",
        help="builtin: learned, English (default); llm: a server's model; hf: a local model; "
        "MODULE:CLASS: your own (docs/judging.md)",
    )
    add(
        "--rubric",
        default=argparse.SUPPRESS,
        type=path_of,
        metavar="FILE",
        help="instructions and categories of your own, for --judge llm and hf (docs/judging.md)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print how many turns would be judged and what that takes, and stop",
    )
    group = parser.add_argument_group("language models (--judge llm)")
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--model", help="the model's name at the server; for hf: hub id or directory")
    add("--base-url", help="an OpenAI-compatible server (default: $OPENAI_BASE_URL, or OpenAI's)")
    add(
        "--api-key-env",
        metavar="NAME",
        help="variable that holds the key (default: OPENAI_API_KEY; none with --base-url)",
    )
    add(
        "--mode",
        choices=["json_schema", "json_object", "text"],
        help="form of the answer that is requested (default: json_schema)",
    )
    add(
        "--param",
        action="append",
        metavar="KEY=VALUE",
        help="a parameter of the request, such as temperature=0 (gpt-5 and similar models refuse "
        "this one); by default none is sent. For your own judge: an argument",
    )
    add("--concurrency", type=whole_from(1), help="requests at a time (default: 8)")
    add(
        "--timeout",
        type=float,
        help="seconds that a request may take; a slow server gets more (default: 60)",
    )
    add(
        "--retries",
        type=whole_from(0),
        help="how often a failed request is sent again (default: 5)",
    )
    add(
        "--price",
        nargs=2,
        type=float,
        metavar=("IN", "OUT"),
        help="dollars per million prompt and completion tokens",
    )
    add(
        "--max-cost",
        type=float,
        help="send nothing more once so many dollars are spent; open requests may exceed it",
    )
    group = parser.add_argument_group("local models (--judge hf)")
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--force", action="store_true", help="let the subject model judge its own turns")
    add_threads(group)


def _judge(name: str) -> str:
    if name not in ("builtin", "llm", "hf") and not name.strip(":").partition(":")[2]:
        raise argparse.ArgumentTypeError(f"{name!r} is none of builtin, llm, hf and MODULE:CLASS")
    return name


def _add_agreement(commands) -> None:
    parser = commands.add_parser(
        "agreement",
        help="how far judges and annotators agree",
        description="Compare any judges and annotators of a run: Cohen's kappa, balanced accuracy, "
        "confusion matrices,\nprecision and recall per category, weighted for the sampling, with "
        "intervals over queries; then\nthe disagreements. Judges are compared with annotators; if "
        "two judges or two annotators are\ncompared, the first one named counts as the truth. "
        "Another table says how often each calls turns\nfollow-ups after wrong "
        "conversations.\nResults go to results/agreement in "
        "the run.",
    )
    parser.set_defaults(function="ia_mech.judge.labellers:command")
    add = parser.add_argument
    add("run", type=run_folder, metavar="RUN", help="a run's folder")
    add("--between", nargs="+", metavar="NAME", help="judges and annotators (default: all)")
    add(
        "--disagreements",
        type=whole_from(0),
        default=10,
        help="how many to show (default: 10; disagreements.parquet has all)",
    )
    add("--full", action="store_true", help="show the tables of each pair, too")
    add_threads(parser)


def _add_remove(commands) -> None:
    parser = commands.add_parser(
        "remove",
        help="remove a judge's or an annotator's labels from a run",
        description="Remove all labels of a judge or an annotator from a run. Results that rest on "
        "them stay, and\nthe page says so. Labels by language models stay in cache/judgements/.",
    )
    parser.set_defaults(function="ia_mech.judge.command:remove_labels")
    parser.add_argument("run", type=run_folder, metavar="RUN", help="a run's folder")
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--judge", metavar="NAME", help="whose labels")
    whose.add_argument("--annotator", metavar="NAME", help="whose labels")


if __name__ == "__main__":
    sys.exit(main())
