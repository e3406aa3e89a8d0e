"""``run``, ``check`` and ``rubric`` of ``python -m ia_mech.judge``."""

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

from ia_mech.cli import one_line
from ia_mech.errors import UserError
from ia_mech.judge.label import check_finished, items_of, judge_items, label_run
from ia_mech.judge.rubric import ASSESSED, CATEGORIES, NAMES, ORDER, SHORT, VERSION
from ia_mech.judge.verdict import JUDGED, Item, Judge, Verdict
from ia_mech.run import Run
from ia_mech.run.labels import check_name

# Flags that are for one kind of judge; those not given are the judge's own defaults.
_SERVER = ("base_url", "api_key_env", "mode", "concurrency", "timeout", "retries", "max_cost")
_ONLY = {"llm": (*_SERVER, "param", "price"), "hf": ("device", "force")}


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
    name = check_name(args.name or _default_name(args))
    judge = make_judge(args)
    _refuse_the_subject(args, there, judge)
    if args.dry_run:
        _tell_plan(judge, items_of(there), args)
        return
    begun = time.monotonic()
    path = label_run(there, judge, name, _bar(judge), replace=args.replace, **_options(args))
    _show_verdicts(there, name, judge, time.monotonic() - begun)
    print(f"verdicts: {path}\nnext: python -m ia_mech.rates {shlex.quote(str(args.run))}")


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
    judge = make_judge(args)
    if args.repeats > 1:
        raise UserError("check compares one verdict per turn", "drop --repeats")
    items = [Item(row["query"], row["response"], row["user_turn"]) for row in rows]
    if args.dry_run:
        _tell_plan(judge, items, args)
        return
    verdicts, _ = judge_items(items, judge, _bar(judge), **_options(args))
    found = [verdicts[item, 0] for item in items]
    console = Console(highlight=False, emoji=False)
    console.width = max(console.width, 100)
    annotated = [i for i, row in enumerate(rows) if row.get("category")]
    if annotated:
        comparison = compare(
            [rows[i]["category"] for i in annotated],
            [found[i].category for i in annotated],
            [_source(rows[i], i) for i in annotated],
        )
        print_comparison(console, f"{args.judge} against {args.file.name}", comparison)
    else:
        for row, verdict in zip(rows, found, strict=True):
            console.print(
                f"{verdict.category or verdict.status:<22}{escape(one_line(row['user_turn'], 90))}",
                soft_wrap=True,
            )
    _show_caveat(console, judge)
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
    console = Console(highlight=False, emoji=False)
    console.print(f"[bold]Rubric {VERSION}[/]: what a generated user turn can be\n")
    for category in CATEGORIES:
        console.print(f"[bold]{category.name}[/]", escape(category.definition), soft_wrap=True)
        for example in category.examples:
            turn = escape(one_line(example.turn)) or "(nothing)"
            console.print(f"    [dim]e.g.[/] {turn}", soft_wrap=True)
            console.print(f"         ({escape(example.why)})", soft_wrap=True)
        console.print()
    console.print(f"Where two fit, the first that applies: {ORDER}.", soft_wrap=True)


def make_judge(args: argparse.Namespace) -> Judge:
    """The judge that the flags ask for.

    Raises:
        UserError: flags that don't go together, or a judge that can't be had.
    """
    for kind, flags in _ONLY.items():
        for flag in flags:
            value = getattr(args, flag)
            given = value is not None and value is not False and value != []
            if given and args.judge != kind:
                name = flag.replace("_", "-")
                raise UserError(f"--{name} needs --judge {kind}", "add it, or drop it")
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}", "give at least 1")
    if args.replay and args.retry_failed:
        raise UserError("--replay asks no one, and --retry-failed asks again", "drop one of them")
    if args.judge == "rules":
        from ia_mech.judge.rules import RulesJudge

        if args.model:
            raise UserError("--model needs --judge llm or --judge hf", "add it, or drop it")
        if args.repeats > 1:
            raise UserError("the rules judge says the same each time", "drop --repeats")
        if args.replay:
            raise UserError("the rules judge keeps no cache to replay", "drop --replay")
        return RulesJudge()
    if not args.model:
        raise UserError(f"--judge {args.judge} needs a model", "give --model NAME")
    if args.judge == "hf":
        from ia_mech.judge.hf import HfJudge

        return HfJudge(args.model, **_given(args, "device"))
    from ia_mech.judge.llm import LlmJudge

    return LlmJudge(
        args.model,
        params=_params(args.param),
        price=tuple(args.price) if args.price else None,
        **_given(args, *_SERVER),
    )


def _given(args: argparse.Namespace, *flags: str) -> dict:
    """The flags that were given; the judge has defaults for the others."""
    return {flag: value for flag in flags if (value := getattr(args, flag)) is not None}


def _params(pairs: list[str]) -> dict:
    """``["temperature=0"]`` as ``{"temperature": 0}``: values are JSON, or else text."""
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--param {pair!r} isn't KEY=VALUE", "give for example temperature=0")
        try:
            params[key] = json.loads(value)
        except ValueError:
            params[key] = value
    return params


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


def _refuse_the_subject(args: argparse.Namespace, run: Run, judge: Judge) -> None:
    if args.judge == "hf" and judge.weights_hash == run.model["weights_hash"] and not args.force:
        raise UserError(
            f"{args.model} is the subject model of {args.run}: it would judge its own turns",
            "give another --model, or --force",
        )


def _tell_plan(judge: Judge, items: list[Item], args: argparse.Namespace) -> None:
    distinct = list(dict.fromkeys(items))
    print(f"{len(items)} user turns, {len(distinct)} distinct, x {args.repeats}")
    estimate = judge.estimate(distinct * args.repeats)
    if estimate:
        print(f"{estimate} (before what the cache has)")


def _show_verdicts(run: Run, name: str, judge: Judge, seconds: float) -> None:
    """Counts of each category by temperature; the rates with intervals are another command's."""
    console = Console(highlight=False, emoji=False)
    console.width = max(console.width, 100)
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
    console.print(table)
    for status, count in rows[failed]["status"].value_counts().items():
        error = rows[rows["status"] == status]["error"].iloc[0]
        console.print(f"{count} {status}: {escape(one_line(error, 120))}", soft_wrap=True)
    paid = [f"{len(rows)} rows, {rows['item'].nunique()} distinct turns in {seconds:.0f} s"]
    tokens = rows["prompt_tokens"].sum() + rows["completion_tokens"].sum()
    if tokens:
        paid.append(f"{tokens} tokens")
    if rows["cost"].notna().any():
        paid.append(f"${rows['cost'].sum():.4f}")
        before = rows["cost"][rows["cached"]].sum()
        if before:
            paid[-1] += f" (${before:.4f} of it paid before)"
    console.print(", ".join(paid), soft_wrap=True)
    _show_caveat(console, judge)


def _show_caveat(console: Console, judge: Judge) -> None:
    if judge.identity["kind"] == "rules":
        console.print(escape(judge.caveat), soft_wrap=True)


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
