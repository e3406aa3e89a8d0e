"""Judge the user turns of a run: each distinct (query, response, turn) once, and never twice.

Decoys (``decoys``) are judged among them: a judge sees all items in one order that tells nothing
about which are which.

Rows of the same text in the same context share one verdict per repeat; verdicts of paid judges come
from the cache where it has them. ``run`` is the subcommand of ``python -m ia_mech.judge``.
"""

import argparse
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import NOTHING, one_line, quoted
from ia_mech.data.conversations import UNPERTURBED, UNPERTURBED_RESPONSE
from ia_mech.display import Bar, Progress, console
from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache, cached_identity
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.rubric import ASSESSED, NAMES, SHORT, VERSION, rubric_hash
from ia_mech.judge.verdict import JUDGED, CostLimit, Item, Judge, Verdict, identity_hash
from ia_mech.run import Run, layout
from ia_mech.run.labels import JUDGEMENTS, KEY, ROWS, check_name, positions

# A failure that another attempt may not meet: the server's, not the item's. Never cached.
PASSING = frozenset({"unavailable"})
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
        if identity := record.get("identity"):
            told = identity_hash(identity | {"unperturbed": record.get("unperturbed", False)})
            names.setdefault(told, []).append(name)
    return [
        f"{' and '.join(same)} are one judge under several names in {run.path} (same kind and "
        "identity): that they agree is no evidence."
        for same in names.values()
        if len(same) > 1
    ]


def items_of(run: Run, decoys: pd.DataFrame | None = None, **options) -> list[Item]:
    """What a judge sees of every row of ``run.turns``, in its order, and then of every decoy.

    ``decoys`` and ``options`` are those of :func:`windows_of`, which raises the same.
    """
    return _together(windows_of(run, decoys, **options))[1]


def windows_of(
    run: Run, decoys: pd.DataFrame | None = None, *, unperturbed: bool = False
) -> Iterator[tuple[pd.DataFrame, list[Item]]]:
    """What a judge sees of a run, part by part. A decoy is in the part of the context shown.

    Args:
        run: the run.
        decoys: rows as of :func:`draw_decoys`; none if not given.
        unperturbed: show the response that the source's conversation had before it was perturbed,
            not the one that the model was given. A turn that was written without having seen the
            response can then be held against it.

    Returns:
        Of each part the turns (KEY, ``decoy`` and ``shown``, both None but for decoys) and the item
        of each. The index counts ``run.turns``, and after these the decoys.

    Raises:
        UserError: an unfinished run; no perturbed context, or one that doesn't record what it was
            before.
        KeyError: a decoy's turn isn't in the run.
    """
    check_judged(run, unperturbed)
    if decoys is None:
        decoys = pd.DataFrame(columns=[*KEY, "decoy", "shown"])
    decoys = decoys.set_axis(range(len(run.turns), len(run.turns) + len(decoys)))
    return _windows(run, decoys, unperturbed)


def _windows(
    run: Run, decoys: pd.DataFrame, unperturbed: bool
) -> Iterator[tuple[pd.DataFrame, list[Item]]]:
    at = positions(run.turns, decoys)
    if (at < 0).any():
        raise KeyError("a decoy's turn isn't in the run")
    lent: dict[int, str] = {}  # texts of the decoys, which are in other parts
    if len(decoys):
        for _, turns in run.windows(turns=["text"]):
            own = turns["text"][turns.index.isin(at)]
            lent |= zip(own.index, own, strict=True)
    texts = pd.Series([lent[place] for place in at], decoys.index, dtype=object)
    after = decoys.groupby("shown").indices
    columns = ["context_id", "messages", "perturbation", "metadata"]
    for contexts, turns in run.windows(columns, [*KEY, "text"]):
        shown = _shown(run, contexts, unperturbed)
        here = np.sort(np.concatenate([[], *(after.get(name, []) for name in shown)]).astype(int))
        other = decoys.iloc[here]
        rows = turns[list(KEY)].astype({"context_id": object}).assign(decoy=None, shown=None)
        items = [
            Item(*shown[context], turn)
            for names, written in (
                (turns["context_id"], turns["text"]),
                (other["shown"], texts.iloc[here]),
            )
            for context, turn in zip(names, written, strict=True)
        ]
        yield pd.concat([rows, other]) if len(other) else rows, items


def _shown(run: Run, contexts: pd.DataFrame, unperturbed: bool) -> dict[str, tuple[str, str]]:
    """Query and response by context."""
    shown = {
        context: (messages[-2]["content"], messages[-1]["content"])
        for context, messages in zip(contexts["context_id"], contexts["messages"], strict=True)
    }
    if unperturbed:
        changed = contexts[contexts["perturbation"].fillna(UNPERTURBED) != UNPERTURBED]
        for context, metadata in zip(changed["context_id"], changed["metadata"], strict=True):
            before = json.loads(metadata).get(UNPERTURBED_RESPONSE)
            if before is None:
                raise UserError(
                    f"context {context} of {run.path} doesn't record what it was before it was "
                    "perturbed",
                    "judge it as it was shown to the model",
                )
            shown[context] = (shown[context][0], before)
    return shown


def _together(
    windows: Iterable[tuple[pd.DataFrame, list[Item]]],
) -> tuple[pd.DataFrame, list[Item]]:
    """All windows as one, in the order of the index."""
    frames, texts = zip(*windows, strict=True)
    turns, items = pd.concat(frames), list(chain.from_iterable(texts))
    order = np.argsort(turns.index, kind="stable")
    return turns.iloc[order], [items[at] for at in order]


def judge_items(
    items: Sequence[Item],
    judge: Judge,
    progress: Progress,
    *,
    repeats: int = 1,
    cache_folder: Path | None = None,
    replay: bool = False,
    retry_failed: bool = False,
    phase: str = "judging",
    unit: str = "turn",
) -> tuple[dict[Pair, Verdict], set[Pair]]:
    """Verdicts of all distinct items, and which of them came from the cache.

    Args:
        items: repetitions are judged once.
        judge: of the items.
        progress: counts verdicts; its note has the tokens, dollars and failures so far.
        repeats: independent answers per item, for self-consistency.
        cache_folder: of the verdicts that were paid for.
        replay: answer from the cache alone, which is only read.
        retry_failed: judge anew what the cache has as a failure.
        phase, unit: what the progress calls the work, and one item of it.

    Raises:
        UserError: with ``replay``, an item that the cache lacks; or what makes a judge useless.
            What was received before that, or before an interrupt, is in the cache.
    """
    wanted = [(item, repeat) for item in dict.fromkeys(items) for repeat in range(repeats)]
    verdicts: dict[Pair, Verdict] = {}
    failed: dict[Pair, Verdict] = {}  # to be judged anew; what they cost stays paid
    opened: contextlib.AbstractContextManager[VerdictCache | None] = contextlib.nullcontext()
    if judge.paid:
        opened = VerdictCache(judge.identity, cache_folder, read_only=replay)
    with opened as cache:
        for pair in wanted:
            if cache is not None and (verdict := cache.get(*pair)):
                again = retry_failed and verdict.status != JUDGED
                (failed if again else verdicts)[pair] = verdict
        cached = set(verdicts)
        missing = [pair for pair in wanted if pair not in verdicts]
        if replay and missing and cache is not None:
            raise UserError(
                f"--replay: {len(missing)} of {len(wanted)} verdicts are not in {cache.path}, the "
                f"first for the turn {missing[0][0].turn[:60]!r}",
                "leave --replay out to judge them",
            )

        def keep(index: int, verdict: Verdict) -> None:
            pair = missing[index]
            if pair not in verdicts:
                if pair in failed:
                    verdict = verdict.with_cost_of(failed[pair])
                if cache is not None and verdict.status not in PASSING:
                    cache.put(*pair, verdict)
                verdicts[pair] = verdict

        try:
            _judge_missing(judge, missing, len(cached), keep, progress, phase, unit)
        except CostLimit as limit:
            total = sum(verdict.cost or 0.0 for verdict in verdicts.values())
            raise UserError(
                f"{limit.problem}; the verdicts of these turns have cost ${total:.4f} in all",
                limit.remedy,
            ) from limit
    return verdicts, cached


def _judge_missing(
    judge: Judge,
    pairs: list[Pair],
    cached: int,
    keep: Callable[[int, Verdict], None],
    progress: Progress,
    phase: str,
    unit: str,
) -> None:
    """Have ``pairs`` judged and every verdict that is received kept, whatever happens.

    ``keep`` may be given a verdict twice.
    """
    # A judge that needs a key checks it here, before anything is shown.
    received = judge.judge([item for item, _ in pairs], [repeat for _, repeat in pairs])
    tokens, cost, failures = 0, 0.0, 0
    with contextlib.ExitStack() as ends:
        ends.callback(progress.stop)
        ends.callback(_end, received, keep)
        if cached:
            progress.say(f"{cached} verdicts from the cache")
        if pairs:
            if estimate := judge.estimate([item for item, _ in pairs]):
                progress.say(estimate)
            progress.start(phase, len(pairs), unit=unit)
        for index, verdict in received:
            keep(index, verdict)
            tokens += verdict.prompt_tokens + verdict.completion_tokens
            cost += verdict.cost or 0.0
            failures += verdict.error != ""
            facts = [f"{tokens} tokens"] if tokens else []
            facts += [f"${cost:.4f}"] if cost else []
            facts += [f"{failures} failed"] if failures else []
            progress.advance(1, ", ".join(facts))


def _end(received: Iterator[tuple[int, Verdict]], keep: Callable[[int, Verdict], None]) -> None:
    """End the judging and keep what had been received but not handed out: it was paid for."""
    try:
        if hasattr(received, "close"):
            received.close()
    finally:
        for index, verdict in received:
            keep(index, verdict)


def _per_source(judge: Judge, decoys: int | None) -> int | None:
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
    check_name(name)
    # Before anything is paid for.
    layout.refuse_unwritable(run.path / "judgements", "judge a copy of the run")
    check_judged(run, unperturbed)
    drawn = draw_decoys(run, _per_source(judge, decoys))
    windows = windows_of(run, drawn, unperturbed=unperturbed)
    if name in run.labels.judges and not replace:
        record = run.labels.record("judgements", name)
        if record.get("unperturbed", False) != unperturbed:
            shown = "another" if unperturbed else "the unperturbed"
            raise UserError(
                f"{run.path} has verdicts named {name!r} of turns after {shown} response",
                "give another --name, or --replace",
            )
        there, mine = record.get("identity", {}), judge.identity
        if identity_hash(there) != identity_hash(mine):
            changed = sorted(k for k in {*there, *mine} if there.get(k) != mine.get(k))
            raise UserError(
                f"{run.path} has verdicts of another judge named {name!r} (differs in "
                f"{', '.join(changed)})",
                "give another --name, or --replace",
            )
    if judge.paid:  # verdicts that were paid for are in memory anyway: the cache holds them
        windows = iter([_together(windows)])
    origins: set[str] = set()
    rows = _rows(windows, judge, progress, options, origins)
    first = next(rows)  # with the first row, all that was paid for is judged
    record = {
        "identity": judge.identity,
        "identity_hash": identity_hash(judge.identity),
        # Of the servers that answered.
        "origins": sorted(origins),
        "rubric": {"version": VERSION, "hash": rubric_hash()},
        "repeats": options.get("repeats", 1),
        "decoys_per_source": _per_source(judge, decoys),
        "unperturbed": unperturbed,
        "caveat": judge.caveat,
    }
    return run.labels.write_judgements(name, chain([first], rows), record)


def _shuffled(items: Sequence[Item]) -> list[Item]:
    """The items in the order of their hashes, which tells nothing about which are decoys."""
    return sorted(items, key=lambda item: item.key("", 0))


def _rows(
    windows: Iterable[tuple[pd.DataFrame, list[Item]]],
    judge: Judge,
    progress: Progress,
    options: dict[str, Any],
    origins: set[str],
) -> Iterator[dict[str, Any]]:
    """Judge part by part: one row per turn and repeat, those of decoys last.

    Tokens and cost stand on the first row of an item only, so that a column's sum is what the
    labels cost. ``origins`` is given those of the verdicts.
    """
    late, places = [JUDGEMENTS.empty_table()], []
    for turns, items in windows:
        verdicts, cached = judge_items(_shuffled(items), judge, progress, **options)
        origins |= {verdict.origin for verdict in verdicts.values()} - {""}
        rows = _rows_of(turns, items, verdicts, cached)
        yield from islice(rows, int(turns["decoy"].isna().sum()) * options.get("repeats", 1))
        late.append(pa.Table.from_pylist(list(rows), schema=JUDGEMENTS))
        places += np.repeat(turns.index[turns["decoy"].notna()], options.get("repeats", 1)).tolist()
    decoys = pa.concat_tables(late).take(np.argsort(places, kind="stable"))
    for batch in decoys.to_batches(max_chunksize=ROWS):
        yield from batch.to_pylist()


def _rows_of(
    turns: pd.DataFrame, items: list[Item], verdicts: dict[Pair, Verdict], cached: set[Pair]
) -> Iterator[dict[str, Any]]:
    repeats = sorted({repeat for _, repeat in verdicts})
    seen: set[Pair] = set()
    records = (dict(zip(turns, row, strict=True)) for row in turns.itertuples(index=False))
    for turn, item in zip(records, items, strict=True):
        for repeat in repeats:
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

# Flags that are for one kind of judge; those not given are the judge's own defaults.
_SERVER = ("base_url", "api_key_env", "mode", "concurrency", "timeout", "retries", "max_cost")
_ONLY = {"llm": (*_SERVER, "param", "price"), "hf": ("device", "force")}


def run(args: argparse.Namespace) -> int:
    """``python -m ia_mech.judge run``; returns its exit status."""
    there = Run.open(args.run)
    name = check_name(args.name or _default_name(args) + UNSEEN * args.unperturbed)
    check_judged(there, args.unperturbed)
    if args.decoys is not None and args.decoys < 0:
        raise UserError(f"--decoys {args.decoys}", "give 0 or more")
    judge = make_judge(
        args, lambda: items_of(there, draw_decoys(there, 1), unperturbed=args.unperturbed), there
    )
    if args.dry_run:
        drawn = draw_decoys(there, _per_source(judge, args.decoys))
        items = items_of(there, drawn, unperturbed=args.unperturbed)
        print_plan(judge, items, args, decoys=len(drawn))
        return 0
    begun = time.monotonic()
    path = label_run(
        there,
        judge,
        name,
        Bar(),
        decoys=args.decoys,
        replace=args.replace,
        unperturbed=args.unperturbed,
        repeats=args.repeats,
        replay=args.replay,
        retry_failed=args.retry_failed,
    )
    rows = there.labels.judgements(name, _PRINTED)
    decoys = there.labels.decoys(name, columns=_PRINTED)
    _print_verdicts(rows, decoys, name, time.monotonic() - begun)
    if judge.caveat:
        console().print(escape(judge.caveat), soft_wrap=True)
    print(f"verdicts: {path}")
    if not (rows["status"] == JUDGED).any():
        print("no turn could be judged, for the reasons above: fix them, and add --retry-failed")
        return NOTHING
    print(f"next: python -m ia_mech.rates {quoted(args.run)}")
    return 0


def make_judge(
    args: argparse.Namespace, items: Callable[[], Sequence[Item]], run: Run | None = None
) -> Judge:
    """The judge that the flags describe.

    A replay without the model finds its cache by the ``items``. The subject model of the ``run``
    that they are from is no judge of them.

    Raises:
        UserError: flags that don't go together, or a judge that can't be had.
    """
    _check_flags(args)
    if args.judge == "rules":
        from ia_mech.judge.rules import RulesJudge

        return RulesJudge()
    if args.judge == "hf":
        return _make_hf(args, items, run)
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
    for kind, flags in _ONLY.items():
        for flag in flags:
            value = getattr(args, flag)
            given = value is not None and value is not False and value != []  # 0 is given
            if given and args.judge != kind:
                name = flag.replace("_", "-")
                raise UserError(f"--{name} needs --judge {kind}", "add it, or drop it")
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}", "give at least 1")
    if args.replay and args.retry_failed:
        raise UserError("--replay judges nothing, and --retry-failed judges again", "drop one")
    if args.judge == "rules":
        if args.model:
            raise UserError("--model needs --judge llm or --judge hf", "add it, or drop it")
        if args.replay:
            raise UserError("the rules judge keeps no cache to replay", "drop --replay")
    elif not (args.model or "").strip():
        raise UserError(f"--judge {args.judge} needs a model", "give --model NAME")
    if args.judge != "llm" and args.repeats > 1:
        raise UserError(f"the {args.judge} judge answers the same each time", "drop --repeats")


def _make_hf(
    args: argparse.Namespace, items: Callable[[], Sequence[Item]], run: Run | None
) -> Judge:
    """A local model; the run's subject only if forced.

    The name is compared before anything is loaded, the weights after: another name may be a copy.
    """
    from ia_mech.judge.hf import HfJudge, described
    from ia_mech.models.load import same_model

    refusal = UserError(
        f"{args.model} is the subject model of {args.run}: it would judge its own turns"
        if run is not None
        else "",
        "give another --model, or --force",
    )
    subject = None if run is None or args.force else run.model
    if subject and same_model(args.model, None, subject["name"], subject.get("revision")):
        raise refusal
    identity = cached_identity(described(args.model), items()) if args.replay else None
    judge = HfJudge(args.model, identity=identity, **_given(args, "device"))
    if subject and judge.is_subject(subject):
        raise refusal
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
            params[key] = json.loads(value)
        except ValueError:
            params[key] = value
    return params


def _default_name(args: argparse.Namespace) -> str:
    if args.judge == "rules":
        return "rules"
    words = re.sub(r"[^A-Za-z0-9._-]", "-", Path(args.model or "").name)
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
    table = Table(title=f"verdicts of {escape(name)}, counted", title_justify="left")
    table.add_column("T", justify="right")
    shown = [c for c in (*NAMES, "failed") if c in ASSESSED or c in counts]
    for category in shown:
        table.add_column(SHORT.get(category, category), justify="right")
    for temperature, line in counts.reindex(columns=shown, fill_value=0).iterrows():
        table.add_row(f"{temperature:g}" if temperature else "greedy", *map(str, line))
    screen.print(table)
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
