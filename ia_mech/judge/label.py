"""Judge the user turns of a run and its decoys: each distinct item once, and never twice.

All items stand in one order that tells nothing about which are decoys. Rows of the same text in the
same context share one verdict per repeat; verdicts of paid judges come from the cache where it has
them. ``run`` is the subcommand of ``python -m ia_mech.judge``.
"""

import argparse
import contextlib
import importlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape

from ia_mech.cli import NOTHING, one_line, shell_word
from ia_mech.data.conversations import UNPERTURBED, UNPERTURBED_RESPONSE
from ia_mech.display import Bar, Progress, console
from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.rubric import ASSESSED, NAMES, SHORT, VERSION, rubric_hash
from ia_mech.judge.verdict import FAILURES, JUDGED, Item, Judge, Verdict, identity_hash
from ia_mech.results import Table, print_table
from ia_mech.run import Run, layout
from ia_mech.run.labels import KEY, positions
from ia_mech.untrusted import parse_json

UNSEEN = "-unperturbed"  # ends the name of verdicts on responses that the model was not given

Pair = tuple[Item, int]  # an item and the number of the repeat


def check_finished(run: Run) -> None:
    """Raise UserError for a run that is still being written, or was left unfinished."""
    if not run.complete:
        parts, planned = len(run.parts("contexts")), run.record["parts"]["contexts"]
        raise UserError(
            f"{run.path} is still being written or was interrupted ({parts} of {planned} parts)",
            "let the command that writes it finish, or give that command again",
        )


def check_judged(run: Run, unperturbed: bool) -> None:
    """Raise UserError for a run that can't be judged, yet or in this way."""
    check_finished(run)
    if unperturbed and run.turns["perturbation"].isin([UNPERTURBED, None]).all():
        raise UserError(f"{run.path} holds no perturbed context", "judge it without --unperturbed")


def same_judges(run: Run) -> list[str]:
    """One note per judge whose verdicts a run has under several names."""
    names: dict[str, list[str]] = {}
    for name in run.labels.judges:
        record = run.labels.record("judgements", name)
        if "identity" in record:
            names.setdefault(identity_hash(_decisive(record)), []).append(name)
    return [
        f"{' and '.join(same)} are one judge under several names in {run.path} (same kind and "
        "identity): that they agree is no evidence."
        for same in names.values()
        if len(same) > 1
    ]


def _decisive(record: dict[str, Any]) -> dict[str, Any]:
    """All that decides recorded verdicts: the judge, and which response it was shown."""
    return record.get("identity", {}) | {"unperturbed": record.get("unperturbed", False)}


def items_of(
    run: Run, decoys: pd.DataFrame | None = None, *, unperturbed: bool = False
) -> list[Item]:
    """What a judge sees of every row of ``run.turns``, in its order, and then of every decoy.

    Args:
        run: the run.
        decoys: decoys of this run, rows as of :func:`draw_decoys`; none if not given.
        unperturbed: show the response that the source's conversation had before it was perturbed,
            not the one that the model was given. A turn that was written without having seen the
            response can then be held against it.

    Raises:
        UserError: an unfinished run; no perturbed context, or one that doesn't record what it was
            before.
    """
    check_judged(run, unperturbed)
    shown: dict[str, tuple[str, str]] = {}  # query and response by context
    items = []
    columns = ["context_id", "messages", "perturbation", "metadata"]
    for contexts, turns in run.windows(columns, ["context_id", "text"]):
        for context in contexts.itertuples(index=False):
            *_, query, response = (message["content"] for message in context.messages)
            if unperturbed and (context.perturbation or UNPERTURBED) != UNPERTURBED:
                response = _unperturbed_response(run, context)
            shown[context.context_id] = query, response
        rows = zip(turns["context_id"], turns["text"], strict=True)
        items += [Item(*shown[context], text) for context, text in rows]
    if decoys is None:
        return items
    turns_of_decoys = positions(run.turns, decoys)
    rows = zip(decoys["shown"], turns_of_decoys, strict=True)
    return items + [Item(*shown[context], items[row].turn) for context, row in rows]


def _unperturbed_response(run: Run, context: Any) -> str:
    before = json.loads(context.metadata).get(UNPERTURBED_RESPONSE)
    if before is None:
        raise UserError(
            f"context {context.context_id} of {run.path} doesn't record what it was before it was "
            "perturbed",
            "judge it as it was shown to the model",
        )
    return before


def judge_items(
    items: Sequence[Item],
    judge: Judge,
    progress: Progress,
    *,
    repeats: int = 1,
    cache_folder: Path | None = None,
) -> tuple[dict[Pair, Verdict], set[Pair]]:
    """Verdicts of all distinct items, and which of them came from the cache.

    Args:
        items: repetitions are judged once.
        judge: of the items.
        progress: counts verdicts; its note has the tokens, dollars and failures so far.
        repeats: independent answers per item, for self-consistency.
        cache_folder: of the verdicts that were paid for. Failures aren't kept there.

    Raises:
        UserError: what makes a judge useless. What was received before that, or before an
            interrupt, is in the cache; a kill loses what is under way.
    """
    wanted = [(item, repeat) for item in dict.fromkeys(items) for repeat in range(repeats)]
    opened: contextlib.AbstractContextManager[VerdictCache | None] = contextlib.nullcontext()
    if judge.paid:
        opened = VerdictCache(judge.identity, cache_folder)
    with opened as cache:
        verdicts: dict[Pair, Verdict] = {}
        if cache is not None:
            verdicts = {pair: kept for pair in wanted if (kept := cache.get(*pair))}
        cached = set(verdicts)
        missing = [pair for pair in wanted if pair not in cached]
        if cached:
            progress.say(f"{len(cached)} verdicts from the cache")
        if missing:
            if estimate := judge.estimate([item for item, _ in missing]):
                progress.say(estimate)
            progress.start("judging", len(missing), unit="turn")
            try:
                verdicts |= _judge_missing(judge, missing, cache, progress)
            finally:
                progress.stop()
    return verdicts, cached


def _judge_missing(
    judge: Judge, missing: list[Pair], cache: VerdictCache | None, progress: Progress
) -> dict[Pair, Verdict]:
    """The verdicts of ``missing``. The thread that received one stores it at once."""
    batches = [missing[at : at + judge.batch] for at in range(0, len(missing), judge.batch)]
    ended = threading.Event()

    def work(batch: list[Pair]) -> dict[Pair, Verdict]:
        if ended.is_set():
            return {}
        try:
            answers = judge.judge([item for item, _ in batch])
            received = dict(zip(batch, answers, strict=True))
            for pair, verdict in received.items():
                if cache is not None and verdict.status not in FAILURES:
                    cache.put(*pair, verdict)
            return received
        except BaseException:
            ended.set()
            raise

    verdicts: dict[Pair, Verdict] = {}
    tokens, cost, failures = 0, 0.0, 0
    with _mapped(work, batches, judge.concurrency, ended) as parts:
        for received in parts:
            verdicts |= received
            for verdict in received.values():
                tokens += verdict.prompt_tokens + verdict.completion_tokens
                cost += verdict.cost or 0.0
                failures += verdict.status in FAILURES
                facts = [f"{tokens} tokens"] if tokens else []
                facts += [f"${cost:.4f}"] if cost else []
                facts += [f"{failures} failed"] if failures else []
                progress.advance(1, ", ".join(facts))
    return verdicts


@contextlib.contextmanager
def _mapped(
    work: Callable[[list[Pair]], dict[Pair, Verdict]],
    batches: list[list[Pair]],
    threads: int,
    ended: threading.Event,
) -> Iterator[Iterator[dict[Pair, Verdict]]]:
    """What ``work`` gives for each batch, as it comes. A single thread is the caller's own.

    However the caller ends, nothing more is begun, and what is under way is waited for.
    """
    if threads == 1:
        yield map(work, batches)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, batch) for batch in batches]
        try:
            yield (future.result() for future in as_completed(futures))
        finally:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _decoys_per_source(judge: Judge, decoys: int | None) -> int | None:
    """Turns of a source and temperature that a judge is shown as decoys; None for all.

    That is the default for a judge that is free; for one that is paid it is one.
    """
    return 1 if decoys is None and judge.paid else decoys


def label_run(
    run: Run,
    judge: Judge,
    name: str,
    progress: Progress,
    *,
    decoys: int | None = None,
    replace: bool = False,
    unperturbed: bool = False,
    **options,
) -> Path:
    """Judge every user turn of a run and its decoys; write ``judgements/<name>.parquet``.

    ``decoys`` is how many turns of each source and temperature are shown as decoys
    (:func:`draw_decoys`); by default all for a judge that is free, one for a judge that is paid.
    ``unperturbed`` is that of :func:`items_of`, ``options`` are those of :func:`judge_items`.

    Raises:
        UserError: a name that can't be a file's; a run that can't be written to; verdicts of
            another judge under that name; what :func:`items_of` and :func:`judge_items` raise.
            Nothing is written then.
    """
    run.labels.check_name("judgements", name)
    check_judged(run, unperturbed)
    # Before anything is paid for.
    layout.refuse_unwritable(run.path / "judgements", "judge a copy of the run")
    per_source = _decoys_per_source(judge, decoys)
    _check_replaced(run, judge, name, unperturbed, per_source, replace)
    plan = draw_decoys(run, per_source)
    items = items_of(run, plan, unperturbed=unperturbed)
    # By their texts: so what has much in common, as items of one context do, stands together.
    ordered = sorted(set(items), key=lambda item: (item.query, item.response, item.turn))
    verdicts, cached = judge_items(ordered, judge, progress, **options)
    record = {
        "identity": judge.identity,
        "identity_hash": identity_hash(judge.identity),
        "rubric": {"version": VERSION, "hash": rubric_hash()},
        "repeats": options.get("repeats", 1),
        "decoys_per_source": per_source,
        "unperturbed": unperturbed,
        "caveat": judge.caveat,
    }
    turns = run.turns[list(KEY)].astype({"context_id": object}).assign(decoy=None, shown=None)
    rows = _rows(pd.concat([turns, plan]) if len(plan) else turns, items, verdicts, cached)
    return run.labels.write_judgements(name, rows, record)


def _check_replaced(
    run: Run,
    judge: Judge,
    name: str,
    unperturbed: bool,
    per_source: int | None,
    replace: bool,
) -> None:
    """Raise UserError if verdicts of that name are there that these may not replace."""
    if name not in run.labels.judges or replace:
        return
    record = run.labels.record("judgements", name)
    before = record.get("decoys_per_source")
    if per_source is not None and (before is None or per_source < before):
        raise UserError(
            f"{run.path} has verdicts named {name!r} with more decoys, which would be lost",
            "give no --decoys, another --name, or --replace",
        )
    there = _decisive(record)
    mine = _decisive({"identity": judge.identity, "unperturbed": unperturbed})
    if identity_hash(there) != identity_hash(mine):
        changed = sorted(k for k in {*there, *mine} if there.get(k) != mine.get(k))
        raise UserError(
            f"{run.path} has verdicts of another judge named {name!r} (differs in "
            f"{', '.join(changed)})",
            "give another --name, or --replace",
        )


def _rows(
    turns: pd.DataFrame, items: list[Item], verdicts: dict[Pair, Verdict], cached: set[Pair]
) -> Iterator[dict[str, Any]]:
    """One row per turn and repeat.

    Tokens and cost stand on the first row of an item only, so that a column's sum is what the
    labels cost.
    """
    repeats = 1 + max((repeat for _, repeat in verdicts), default=0)
    seen: set[Pair] = set()
    records = (dict(zip(turns, row, strict=True)) for row in turns.itertuples(index=False))
    for turn, item in zip(records, items, strict=True):
        for repeat in range(repeats):
            pair = item, repeat
            verdict, first = verdicts[pair], pair not in seen
            seen.add(pair)
            row = verdict.to_json() | {
                **turn,
                "repeat": repeat,
                "genuine": verdict.genuine,
                "scores": json.dumps(verdict.scores) if verdict.scores else None,
                "cached": pair in cached or not first,
                "item": item.key("", 0)[:16],
            }
            if not first:
                row |= {"prompt_tokens": 0, "completion_tokens": 0}
                row["cost"] = None if verdict.cost is None else 0.0
            yield row


# -- from the command line ---------------------------------------------------------------------

# Flags that are for some judges; those not given are the judge's own defaults. A judge of the
# user's is "own".
_SERVER = ("base_url", "api_key_env", "mode", "concurrency", "timeout", "retries", "max_cost")
_ONLY = {
    **dict.fromkeys((*_SERVER, "price"), ("llm",)),
    **dict.fromkeys(("device", "force"), ("hf",)),
    "model": ("llm", "hf"),
    "param": ("llm", "module:Class"),
}


def command(args: argparse.Namespace) -> int:
    """``python -m ia_mech.judge run``; returns its exit status."""
    run = Run.open(args.run)
    name = args.name or _default_name(args) + UNSEEN * args.unperturbed
    run.labels.check_name("judgements", name)
    check_judged(run, args.unperturbed)
    judge = make_judge(args, run)
    if args.dry_run:
        plan = draw_decoys(run, _decoys_per_source(judge, args.decoys))
        items = items_of(run, plan, unperturbed=args.unperturbed)
        print_plan(judge, items, args, decoys=len(plan))
        return 0
    begun = time.monotonic()
    path = label_run(
        run,
        judge,
        name,
        Bar(),
        decoys=args.decoys,
        replace=args.replace,
        unperturbed=args.unperturbed,
        repeats=args.repeats,
    )
    rows = run.labels.judgements(name, _PRINTED)
    decoys = run.labels.decoys(name, columns=_PRINTED)
    _print_verdicts(rows, decoys, name, time.monotonic() - begun)
    if judge.caveat:
        console().print(escape(judge.caveat), soft_wrap=True)
    print(f"verdicts: {path}")
    if not (rows["status"] == JUDGED).any():
        print("no turn could be judged, for the reasons above: fix them, then judge again")
        return NOTHING
    chosen = f" --judge {shell_word(name)}" if len(run.labels.judges) > 1 else ""
    print(f"next: python -m ia_mech.rates {shell_word(args.run)}{chosen}")
    return 0


def make_judge(args: argparse.Namespace, run: Run | None = None) -> Judge:
    """The judge that the flags describe.

    The subject model of the ``run`` that is to be judged is no judge of it.

    Raises:
        UserError: flags that don't go together, or a judge that can't be had.
    """
    _check_flags(args)
    if args.judge == "rules":
        from ia_mech.judge.rules import RulesJudge

        return RulesJudge()
    if args.judge == "hf":
        return _make_hf(args, run)
    if args.judge != "llm":
        return _make_own(args.judge, _params(args.param))
    from ia_mech.judge.llm import LlmJudge

    return LlmJudge(
        args.model,
        params=_params(args.param),
        price=tuple(args.price) if args.price else None,
        **_given(args, *_SERVER),
    )


def print_plan(
    judge: Judge, items: Sequence[Item], args: argparse.Namespace, *, decoys: int = 0
) -> None:
    """What ``--dry-run`` shows; ``decoys`` of the items are decoys."""
    distinct = list(dict.fromkeys(items))
    turns = f"{len(items) - decoys} user turns" + (f" and {decoys} decoys" if decoys else "")
    print(f"{turns}, {len(distinct)} distinct, x {args.repeats}")
    if estimate := judge.estimate(distinct * args.repeats):
        print(f"{estimate} (before what the cache has)")


def _check_flags(args: argparse.Namespace) -> None:
    kind = "module:Class" if ":" in args.judge else args.judge
    for flag, kinds in _ONLY.items():
        value = getattr(args, flag)
        given = value is not None and value is not False and value != []  # 0 is given
        if given and kind not in kinds:
            needed = " or ".join(f"--judge {kind}" for kind in kinds)
            raise UserError(f"--{flag.replace('_', '-')} needs {needed}", "add it, or drop it")
    if kind in _ONLY["model"] and not (args.model or "").strip():
        raise UserError(f"--judge {kind} needs a model", "give --model NAME")
    if kind in ("rules", "hf") and args.repeats > 1:
        raise UserError(f"the {kind} judge answers the same each time", "drop --repeats")


def _make_own(name: str, arguments: dict[str, Any]) -> Judge:
    """A user's own judge, from the working folder or an installed package."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script has its own folder there
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"--judge {name}: {error}", "check it") from error
    if not (isinstance(made, type) and issubclass(made, Judge)):
        raise UserError(
            f"--judge {name} is no subclass of ia_mech.judge.verdict.Judge", "see docs/judging.md"
        )
    try:
        judge = made(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--judge {name}: {error}", "give its arguments with --param") from error
    try:
        identity_hash(judge.identity)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"--judge {name} has no identity that is JSON ({error})", "see docs/judging.md"
        ) from error
    return judge


def _make_hf(args: argparse.Namespace, run: Run | None) -> Judge:
    """A local model; the run's subject only if forced.

    The name is compared before anything is loaded, the weights after: another name may be a copy.
    """
    from ia_mech.judge.hf import HfJudge
    from ia_mech.models.load import same_model

    subject = None if run is None or args.force else run.model
    known = subject and same_model(args.model, None, subject["name"], subject.get("revision"))
    judge = None if known else HfJudge(args.model, **_given(args, "device"))
    if judge is None or (subject and subject["weights_hash"] == judge.identity["weights_hash"]):
        raise UserError(
            f"{args.model} is the subject model of {args.run}: it would judge its own turns",
            "give another --model, or --force",
        )
    return judge


def _given(args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """The flags that were given; the judge has defaults for the others."""
    return {flag: value for flag in flags if (value := getattr(args, flag)) is not None}


def _params(pairs: list[str]) -> dict[str, Any]:
    """``["temperature=0"]`` as ``{"temperature": 0}``: values are JSON, or else text."""
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--param {pair!r} isn't KEY=VALUE", "give for example temperature=0")
        try:
            params[key] = parse_json(value, pair, "")
        except UserError:
            params[key] = value
    return params


def _default_name(args: argparse.Namespace) -> str:
    name = args.judge.partition(":")[2] or Path(args.model or args.judge).name
    words = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    return words.strip("-._")[:100] or args.judge


_PRINTED = [
    *("temperature", "category", "status", "error", "item"),
    *("prompt_tokens", "completion_tokens", "cost", "cached"),
]  # columns of verdicts that are counted


def _print_verdicts(rows: pd.DataFrame, decoys: pd.DataFrame, name: str, seconds: float) -> None:
    """Counts of each category by temperature; the rates with intervals are another command's."""
    screen = console()
    failed = rows["status"] != JUDGED
    categories = rows["category"].astype(object).mask(failed, "failed")
    counts = pd.crosstab(rows["temperature"], categories)
    shown = [c for c in (*NAMES, "failed") if c in ASSESSED or c in counts]
    lines = [
        [f"{temperature:g}" if temperature else "greedy", *map(str, line)]
        for temperature, line in counts.reindex(columns=shown, fill_value=0).iterrows()
    ]
    heads = ["T", *(SHORT.get(category, category) for category in shown)]
    print_table(screen, Table(f"verdicts of {name}, counted", heads, lines))
    rows = pd.concat([rows, decoys]) if len(decoys) else rows
    for status, part in rows[rows["status"] != JUDGED].groupby("status"):
        errors = part["error"].value_counts()
        listed = "; ".join(f"{one_line(error, 100)} ({n})" for error, n in errors.iloc[:3].items())
        more = f"; {len(errors) - 3} other messages" if len(errors) > 3 else ""
        screen.print(f"{len(part)} {status}: {escape(listed)}{more}", soft_wrap=True)
    apart = f" ({len(decoys)} of them of decoys)" if len(decoys) else ""
    paid = [f"{len(rows)} rows{apart}, {rows['item'].nunique()} distinct turns in {seconds:.0f} s"]
    if tokens := rows["prompt_tokens"].sum() + rows["completion_tokens"].sum():
        paid.append(f"{tokens} tokens")
    if rows["cost"].notna().any():
        before = rows["cost"][rows["cached"]].sum()
        earlier = f" (${before:.4f} of it paid before)" if before else ""
        paid.append(f"${rows['cost'].sum():.4f}{earlier}")
    screen.print(", ".join(paid), soft_wrap=True)
