"""``run``, ``check`` and ``rubric`` of ``python -m ia_mech.judge``.

The command line of ``python -m ia_mech.judge``: its subcommands, their flags and help.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from ia_mech.cli import Parser, one_line
from ia_mech.display import console
from ia_mech.errors import UserError
from ia_mech.judge.label import UNSEEN, check_finished, items_of, judge_items, label_run, make_judge
from ia_mech.judge.rubric import ASSESSED, CATEGORIES, NAMES, ORDER, SHORT, VERSION
from ia_mech.judge.verdict import JUDGED, Item, Judge, Verdict
from ia_mech.run import Run
from ia_mech.run.labels import check_name

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


class Bar:
    """Progress on the terminal: verdicts, their rate, what they cost so far, time left.

    Args:
        check: called before anything is shown or judged; may raise a ``UserError``.
    """

    def __init__(self, check: Callable[[], object] | None = None) -> None:
        self._check = check
        self.failed = 0
        self.cost: float | None = None
        self._tokens = 0
        self._bar: tqdm | None = None

    def start(self, total: int, cached: int, estimate: str) -> None:
        if total and self._check is not None:
            self._check()
        if cached:
            print(f"{cached} verdicts from the cache", file=sys.stderr)
        if not total:
            return
        if estimate:
            print(estimate, file=sys.stderr)
        self._bar = tqdm(
            total=total,
            desc="judging",
            unit="turn",
            mininterval=0.5 if sys.stderr.isatty() else 10,
            bar_format="{desc}: {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} turns "
            "[{elapsed}, {remaining} left, {rate_fmt}{postfix}]",
        )

    def advance(self, verdict: Verdict) -> None:
        self.failed += verdict.status != JUDGED
        self._tokens += verdict.prompt_tokens + verdict.completion_tokens
        if verdict.cost is not None:
            self.cost = (self.cost or 0.0) + verdict.cost
        facts = [f"{self._tokens} tokens"] if self._tokens else []
        facts += [f"${self.cost:.4f}"] if self.cost is not None else []
        facts += [f"{self.failed} failed"] if self.failed else []
        self._bar.set_postfix_str(", ".join(facts), refresh=False)
        self._bar.update()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def run(args: argparse.Namespace) -> None:
    """Judge a run.

    Raises:
        UserError: anything that can't be used; nothing is written into the run then.
    """
    there = Run.open(args.run)
    check_finished(there)
    name = check_name(args.name or _default_name(args) + UNSEEN * args.unperturbed)
    items = items_of(there, unperturbed=args.unperturbed)
    judge = make_judge(args, items, there)
    if args.dry_run:
        _tell_plan(judge, items, args)
        return
    begun = time.monotonic()
    how = {"replace": args.replace, "unperturbed": args.unperturbed}
    path = label_run(there, judge, name, _bar(judge), **how, **_options(args))
    _show_verdicts(there, name, judge, time.monotonic() - begun)
    print(f"verdicts: {path}")
    if (there.labels.judgements(name)["status"] == JUDGED).any():
        print(f"next: python -m ia_mech.rates {shlex.quote(str(args.run))}")
    else:
        print("no turn could be judged, for the reasons above: mend them, and add --retry-failed")


def check(args: argparse.Namespace) -> None:
    """Judge the turns of a file, and compare with its annotations.

    Raises:
        UserError: a file that can't be read, with the line.
    """
    from ia_mech.judge.agreement import compare, print_comparison

    rows = _read_turns(args.file)
    if args.out is not None:
        if args.out.exists():
            raise UserError(f"{args.out} is there already", "give another --out")
        if not args.out.parent.is_dir():
            raise UserError(f"there is no folder {args.out.parent}", "make it, or another --out")
    items = [Item(row["query"], row["response"], row["user_turn"]) for row in rows]
    judge = make_judge(args, items)
    if args.repeats > 1:
        raise UserError("check compares one verdict per turn", "drop --repeats")
    if args.dry_run:
        _tell_plan(judge, items, args)
        return
    verdicts, _ = judge_items(items, judge, _bar(judge), **_options(args))
    found = [verdicts[item, 0] for item in items]
    screen = console()
    screen.width = max(screen.width, 100)
    annotated = [i for i, row in enumerate(rows) if row.get("category")]
    if annotated:
        comparison = compare(
            [rows[i]["category"] for i in annotated],
            [found[i].category for i in annotated],
            [_source(rows[i], i) for i in annotated],
        )
        print_comparison(screen, f"{args.judge} against {args.file.name}", comparison)
        known = judge.fitted_on(items) if args.judge == "rules" else 0
        if known:
            screen.print(
                f"[bold]{known} of these {len(items)} turns were in the rules judge's fit[/]: on "
                "them it looks better than it is; its card has cross-validated figures.",
                soft_wrap=True,
            )
    else:
        for row, verdict in zip(rows, found, strict=True):
            screen.print(
                f"{verdict.category or verdict.status:<22}{escape(one_line(row['user_turn'], 90))}",
                soft_wrap=True,
            )
    _show_caveat(screen, judge)
    if args.out is not None:
        lines = [
            json.dumps(row | {"judge": args.judge, "verdict": verdict.to_json()}) + "\n"
            for row, verdict in zip(rows, found, strict=True)
        ]
        scratch = args.out.with_name(args.out.name + ".tmp")
        try:
            scratch.write_text("".join(lines), encoding="utf-8")
            scratch.replace(args.out)
        finally:
            scratch.unlink(missing_ok=True)
        print(f"verdicts: {args.out}")


def rubric(args: argparse.Namespace) -> None:
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


def _default_name(args: argparse.Namespace) -> str:
    if args.judge == "rules":
        return "rules"
    name = Path(args.model or "").name
    words = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return words.strip("-._")[:100] or args.judge


def _bar(judge: Judge) -> Bar:
    """A bar that asks for the key, where one is needed, before it shows anything."""
    return Bar(judge.address.key if judge.identity["kind"] == "llm" else None)


def _options(args: argparse.Namespace) -> dict:
    return {
        "repeats": args.repeats,
        "replay": args.replay,
        "retry_failed": args.retry_failed,
    }


def _tell_plan(judge: Judge, items: list[Item], args: argparse.Namespace) -> None:
    distinct = list(dict.fromkeys(items))
    print(f"{len(items)} user turns, {len(distinct)} distinct, x {args.repeats}")
    estimate = judge.estimate(distinct * args.repeats)
    if estimate:
        print(f"{estimate} (before what the cache has)")


def _show_verdicts(run: Run, name: str, judge: Judge, seconds: float) -> None:
    """Counts of each category by temperature; the rates with intervals are another command's."""
    screen = console()
    screen.width = max(screen.width, 100)
    rows = run.labels.judgements(name)
    table = Table(title=f"verdicts of {escape(name)}, counted", title_justify="left")
    table.add_column("T", justify="right")
    shown = [c for c in NAMES if (rows["category"] == c).any() or c in ASSESSED]
    failed = rows["status"] != JUDGED
    for category in shown:
        table.add_column(SHORT[category], justify="right")
    if failed.any():
        table.add_column("failed", justify="right")
    for temperature, part in rows.groupby("temperature"):
        counts = [str(int((part["category"] == c).sum())) for c in shown]
        if failed.any():
            counts.append(str(int(failed[part.index].sum())))
        table.add_row(f"{temperature:g}" if temperature else "greedy", *counts)
    screen.print(table)
    for status, count in rows[failed]["status"].value_counts().items():
        errors = rows[rows["status"] == status]["error"].value_counts()
        told = "; ".join(f"{one_line(error, 100)} ({n})" for error, n in errors.iloc[:3].items())
        more = f"; {len(errors) - 3} other messages" if len(errors) > 3 else ""
        screen.print(f"{count} {status}: {escape(told)}{more}", soft_wrap=True)
    paid = [f"{len(rows)} rows, {rows['item'].nunique()} distinct turns in {seconds:.0f} s"]
    tokens = rows["prompt_tokens"].sum() + rows["completion_tokens"].sum()
    if tokens:
        paid.append(f"{tokens} tokens")
    if rows["cost"].notna().any():
        paid.append(f"${rows['cost'].sum():.4f}")
        before = rows["cost"][rows["cached"]].sum()
        if before:
            paid[-1] += f" (${before:.4f} of it paid before)"
    screen.print(", ".join(paid), soft_wrap=True)
    _show_caveat(screen, judge)


def _show_caveat(screen: Console, judge: Judge) -> None:
    if judge.identity["kind"] == "rules":
        screen.print(escape(judge.caveat), soft_wrap=True)


def _source(row: dict, number: int) -> str:
    """What a row's intervals are clustered by; a row without a source stands alone."""
    return f"row {number}" if row.get("source_id") is None else str(row["source_id"])


def _read_turns(path: Path) -> list[dict]:
    """The rows of an annotated file.

    Raises:
        UserError: naming the line that isn't as it should be.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}", "give a JSON-lines file")
    rows = []
    try:
        # Not splitlines(): the texts of other writers may hold a bare U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text", "give a JSON-lines file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"line {number} of {path} is not JSON ({error})", "mend it") from None
        texts = [
            row.get(key) if isinstance(row, dict) else None
            for key in ("query", "response", "user_turn")
        ]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"line {number} of {path} lacks a text",
                'each needs "query", "response" and "user_turn"',
            )
        if row.get("category") and row["category"] not in NAMES:
            raise UserError(
                f"line {number} of {path}: no category {row['category']!r} in the rubric",
                f"give one of {', '.join(NAMES)}",
            )
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no turn", "give a JSON-lines file")
    return rows
