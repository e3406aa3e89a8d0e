"""The command line of ``python -m ia_mech.judge``: its subcommands, their flags and help."""

import argparse
from pathlib import Path

from ia_mech.cli import Parser

DESCRIPTION = """\
Say which generated user turns are genuine follow-ups. Judges see text only: the query, the response
and the turn. Every judge uses one rubric (python -m ia_mech.judge rubric), and any number of judges
and people can label the same run, to be compared.
"""

EPILOG = """\
examples:
  python -m ia_mech.judge run cache/RUN
      the embedded rules judge: offline, deterministic, free; a heuristic, say so where you use it
  python -m ia_mech.judge run cache/RUN --judge llm --model gpt-5-mini
      a language model at OpenAI (key from $OPENAI_API_KEY), or at --base-url, any compatible server
  python -m ia_mech.judge export cache/RUN --n 200 --out sheet
  python -m ia_mech.judge import cache/RUN sheet.csv --annotator anna
      a blind sheet for a person to fill in, and its way back
  python -m ia_mech.judge agreement cache/RUN
      how far judges and people agree
Then: python -m ia_mech.rates cache/RUN
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line; ``args.command`` is the subcommand."""
    parser = Parser(prog="python -m ia_mech.judge", description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    _add_run(commands)
    _add_check(commands)
    _add_export(commands)
    _add_import(commands)
    _add_agreement(commands)
    commands.add_parser("rubric", help="print the rubric")
    return parser


def _add_run(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="judge all user turns of a run",
        description="Judge all user turns of a run and write judgements/<name>.parquet into it.\n"
        "Identical turns in identical contexts are judged once. Verdicts of language models are\n"
        "kept in cache/judgements/, so that judging again, or going on after an interrupt, pays\n"
        "for nothing twice that had arrived.",
    )
    parser.add_argument("run", type=Path, help="a run's folder")
    _add_judge(parser)
    parser.add_argument(
        "--name", help="the verdicts' name in the run (default: rules, or the model's name)"
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace verdicts of another judge that are there under the same name",
    )
    parser.add_argument(
        "--unperturbed",
        action="store_true",
        help="of perturbed contexts (experiments.perturbations): show the judge the response as it "
        "was, not what the model was given in its place; default name: that of the judge with "
        "-unperturbed",
    )


def _add_check(commands) -> None:
    parser = commands.add_parser(
        "check",
        help="judge annotated turns in a file, and say how well the judge does",
        description="Judge the turns of a JSON-lines file (query, response, user_turn; category "
        "where\nannotated; source_id for intervals) and compare with the annotations.",
    )
    parser.add_argument("file", type=Path, help="JSON-lines file")
    _add_judge(parser)
    parser.add_argument("--out", type=Path, help="write the verdicts here (JSON lines)")


def _add_judge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--judge",
        choices=["rules", "llm", "hf"],
        default="rules",
        help="rules: offline heuristic; llm: a server's model; hf: a local causal language model "
        "without a server (default: rules)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="independent verdicts per turn of --judge llm, for self-consistency (default: 1)",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="from the cache alone: no server, no model is loaded, nothing is written there; what "
        "it lacks is an error",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="judge anew what failed the last time"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what judging would take, and stop"
    )
    llm = parser.add_argument_group("language models (--judge llm)")
    llm.add_argument("--model", help="the model's name at the server; for hf: hub id or directory")
    llm.add_argument(
        "--base-url", help="an OpenAI-compatible server (default: $OPENAI_BASE_URL, or OpenAI's)"
    )
    llm.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="environment variable that holds the key; keys are read from nowhere else and never "
        "written (default: OPENAI_API_KEY; with --base-url none, since that one is for OpenAI)",
    )
    llm.add_argument(
        "--mode",
        choices=["auto", "json_schema", "json_object", "text"],
        help="how the answer's form is asked for; auto begins with json_schema and falls back "
        "where the server refuses it (default: auto)",
    )
    llm.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a request parameter, such as temperature=0 or max_completion_tokens=400; nothing is "
        "sent that isn't given here",
    )
    llm.add_argument("--concurrency", type=int, help="requests at a time (default: 8)")
    llm.add_argument("--timeout", type=float, help="seconds for a request (default: 60)")
    llm.add_argument(
        "--retries",
        type=int,
        help="of a request that a server error, a rate limit or a broken connection ended "
        "(default: 5)",
    )
    llm.add_argument(
        "--price",
        nargs=2,
        type=float,
        metavar=("IN", "OUT"),
        help="US dollars per million prompt and completion tokens, for costs",
    )
    llm.add_argument(
        "--max-cost",
        type=float,
        help="stop before this invocation spends more dollars than this; verdicts from the cache "
        "don't count, so the same command goes on with as much again",
    )
    hf = parser.add_argument_group("local models (--judge hf)")
    hf.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    hf.add_argument(
        "--force",
        action="store_true",
        help="let the subject model judge its own turns, which says little",
    )


def _add_export(commands) -> None:
    parser = commands.add_parser(
        "export",
        help="write a blind sheet for people to annotate",
        description="Write a sample of a run's user turns as a sheet (CSV and JSON lines) for a "
        "person to\nfill in: query, response and turn in random order, without model, "
        "temperature, judge or\nreference. Stratified by a judge's verdict, so that rare "
        "categories are seen; the inclusion\nprobabilities stay in the run, for weighting. At "
        "least five turns of each category, the rest\nby the square root of its size. Nothing "
        "that is there is overwritten.",
    )
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--n", type=int, default=200, help="how many turns (default: 200)")
    parser.add_argument(
        "--by", metavar="JUDGE", help="the judge to stratify by (default: the only one, or rules)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    parser.add_argument(
        "--out",
        type=Path,
        help="the sheet without its suffix; .csv and .jsonl are written (default: a name beside "
        "the run that tells the annotator nothing, as the run's own would)",
    )
    parser.add_argument("--name", help="the sheet's name in the run (default: like the file's)")


def _add_import(commands) -> None:
    parser = commands.add_parser(
        "import",
        help="read a filled-in sheet",
        description="Check a filled-in sheet (CSV or JSON lines) row by row and write "
        "annotations/<annotator>.parquet.\nRows without a category are left out; one bad row and "
        "nothing is written. Commas, semicolons or\ntabs, any quoting and line ends will do, but "
        "it must be UTF-8. Texts aren't read back: only item,\ncategory and note are.",
    )
    parser.add_argument("run", type=Path, help="the run that the sheet was exported from")
    parser.add_argument("file", type=Path, help="the sheet, .csv, .tsv or .jsonl")
    parser.add_argument("--annotator", required=True, help="who filled it in; a name for the file")
    parser.add_argument(
        "--replace", action="store_true", help="replace labels of this annotator that are there"
    )


def _add_agreement(commands) -> None:
    parser = commands.add_parser(
        "agreement",
        help="how far judges and people agree",
        description="Compare any judges and annotators of a run: confusion matrices, precision and "
        "recall per\ncategory, Cohen's kappa and Krippendorff's alpha, weighted for the sampling,\n"
        "with cluster-bootstrap intervals over sources; abstentions apart; then the disagreements."
        "\nPeople are the truth of judges; between equals it is the one named first.",
    )
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument(
        "--between",
        nargs="+",
        metavar="NAME",
        help="judges and annotators to compare (default: all there are); judge:NAME and "
        "annotator:NAME tell apart what is named alike",
    )
    parser.add_argument(
        "--disagreements", type=int, default=10, help="how many to show (default: 10)"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--csv", type=Path, help="write all disagreements, with texts, here")
