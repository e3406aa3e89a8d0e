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
from ia_mech.judge.choose import make_judge
from ia_mech.judge.label import UNSEEN, check_finished, items_of, judge_items, label_run
from ia_mech.judge.rubric import ASSESSED, CATEGORIES, NAMES, ORDER, SHORT, VERSION
from ia_mech.judge.verdict import JUDGED, Item, Judge, Verdict
from ia_mech.run import Run
from ia_mech.run.labels import check_name


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
        known = judge.fitted_on(items) if args.judge == "rules" else 0
        if known:
            console.print(
                f"[bold]{known} of these {len(items)} turns were in the rules judge's fit[/]: on "
                "them it looks better than it is; its card has cross-validated figures.",
                soft_wrap=True,
            )
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
        errors = rows[rows["status"] == status]["error"].value_counts()
        told = "; ".join(f"{one_line(error, 100)} ({n})" for error, n in errors.iloc[:3].items())
        more = f"; {len(errors) - 3} other messages" if len(errors) > 3 else ""
        console.print(f"{count} {status}: {escape(told)}{more}", soft_wrap=True)
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
