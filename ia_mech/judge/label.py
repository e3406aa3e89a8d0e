"""Judge the user turns of a run: each distinct (query, response, turn) once, and never twice.

Rows of the same text in the same context share one verdict per repeat; verdicts of paid judges come
from the cache where it has them.

The judge that a command line asks for, or why it can't be had.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ia_mech.data.conversations import UNPERTURBED, UNPERTURBED_RESPONSE
from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.rubric import VERSION, rubric_hash
from ia_mech.judge.verdict import JUDGED, CostLimit, Item, Judge, Verdict, identity_hash
from ia_mech.run import Run
from ia_mech.run.labels import KEY, check_name

# Flags that are for one kind of judge; those not given are the judge's own defaults.
_SERVER = ("base_url", "api_key_env", "mode", "concurrency", "timeout", "retries", "max_cost")
_ONLY = {"llm": (*_SERVER, "param", "price"), "hf": ("device", "force")}


def make_judge(args: argparse.Namespace, items: Sequence[Item], run: Run | None = None) -> Judge:
    """The judge that the flags ask for.

    Args:
        args: the command line.
        items: what it is to judge; a replay looks for them.
        run: where they are from. Its subject model is no judge of them.

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


def _check_flags(args: argparse.Namespace) -> None:
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
        if args.model:
            raise UserError("--model needs --judge llm or --judge hf", "add it, or drop it")
        if args.replay:
            raise UserError("the rules judge keeps no cache to replay", "drop --replay")
    elif not args.model:
        raise UserError(f"--judge {args.judge} needs a model", "give --model NAME")
    if args.judge != "llm" and args.repeats > 1:
        raise UserError(f"the {args.judge} judge says the same each time", "drop --repeats")


def _make_hf(args: argparse.Namespace, items: Sequence[Item], run: Run | None) -> Judge:
    """A local model, or what stands in for it; the run's subject only if forced.

    The name is compared before anything is loaded, the weights after: another name may be a copy.
    """
    from ia_mech.models.load import same_model

    guarded = run is not None and not args.force
    refusal = UserError(
        f"{args.model} is the subject model of {args.run}: it would judge its own turns"
        if run is not None
        else "",
        "give another --model, or --force",
    )
    if guarded and same_model(args.model, None, run.model["name"], run.model.get("revision")):
        raise refusal
    if args.replay:
        from ia_mech.judge.hf import HfReplay

        judge = HfReplay(args.model, items)
    else:
        from ia_mech.judge.hf import HfJudge

        judge = HfJudge(args.model, **_given(args, "device"))
    if guarded and judge.is_subject(run.model):
        raise refusal
    return judge


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


# A failure that another attempt may not meet: the server's, not the item's. Never cached.
PASSING = frozenset({"unavailable"})
UNSEEN = "-unperturbed"  # ends the name of verdicts on responses that the model was not given


class Progress(Protocol):
    def start(self, total: int, cached: int, estimate: str) -> None: ...
    def advance(self, verdict: Verdict) -> None: ...
    def stop(self) -> None: ...


def check_finished(run: Run) -> None:
    """Raise UserError for a run that is still being written, or was left unfinished."""
    if not run.complete:
        asked = run.record["identity"]["conversations"]["count"]
        raise UserError(
            f"{run.path} is still being written or was interrupted "
            f"({len(run.contexts)} of {asked} contexts)",
            "let the command that writes it finish, or give that command again",
        )


def items_of(run: Run, *, unperturbed: bool = False) -> list[Item]:
    """What a judge sees of every row of ``run.generations``, in its order.

    Args:
        run: the run.
        unperturbed: show the response that the source's conversation had before it was perturbed,
            not the one that the model was given. A turn that was written without having seen the
            response can then be held against it.

    Raises:
        UserError: there is no perturbed context, or one doesn't say what it was.
    """
    contexts = run.contexts
    shown = {
        context: (messages[-2]["content"], messages[-1]["content"])
        for context, messages in zip(contexts["context_id"], contexts["messages"], strict=True)
    }
    if unperturbed:
        changed = contexts[contexts["perturbation"].fillna(UNPERTURBED) != UNPERTURBED]
        if changed.empty:
            raise UserError(
                f"{run.path} holds no perturbed context", "judge it without --unperturbed"
            )
        for context, metadata in zip(changed["context_id"], changed["metadata"], strict=True):
            before = json.loads(metadata).get(UNPERTURBED_RESPONSE)
            if before is None:
                raise UserError(
                    f"context {context} of {run.path} doesn't say what it was before it was "
                    "perturbed",
                    "judge it as it was shown to the model",
                )
            shown[context] = (shown[context][0], before)
    generations = run.generations
    return [
        Item(*shown[context], turn)
        for context, turn in zip(generations["context_id"], generations["text"], strict=True)
    ]


def judge_items(
    items: Sequence[Item],
    judge: Judge,
    progress: Progress,
    *,
    repeats: int = 1,
    cache_folder: Path | None = None,
    replay: bool = False,
    retry_failed: bool = False,
) -> tuple[dict[tuple[Item, int], Verdict], set[tuple[Item, int]]]:
    """Verdicts of all distinct items, and which of them came from the cache.

    Args:
        items: with repetitions as they come.
        judge: who judges.
        progress: told of the number to judge, and of every verdict.
        repeats: independent answers per item, for self-consistency.
        cache_folder: of the verdicts that were paid for.
        replay: answer from the cache alone, which is only read.
        retry_failed: judge anew what the cache has as a failure.

    Raises:
        UserError: with ``replay``, an item that the cache lacks; or what makes a judge useless.
            What was received before that, or before an interrupt, is in the cache.
    """
    wanted = [(item, repeat) for item in dict.fromkeys(items) for repeat in range(repeats)]
    verdicts: dict[tuple[Item, int], Verdict] = {}
    failed: dict[tuple[Item, int], Verdict] = {}  # to be judged anew; what they cost stays paid
    keeps = contextlib.nullcontext()
    if judge.paid:
        keeps = VerdictCache(judge.identity, cache_folder, read_only=replay)
    with keeps as cache:
        if cache is not None:
            for item, repeat in wanted:
                verdict = cache.get(item, repeat)
                if verdict and (verdict.status == JUDGED or not retry_failed):
                    verdicts[item, repeat] = verdict
                elif verdict:
                    failed[item, repeat] = verdict
        cached = set(verdicts)
        missing = [pair for pair in wanted if pair not in verdicts]
        if replay and missing and cache is not None:
            raise UserError(
                f"--replay: {len(missing)} of {len(wanted)} verdicts are not in {cache.path}, the "
                f"first for the turn {missing[0][0].turn[:60]!r}",
                "leave --replay out to judge them",
            )
        progress.start(len(missing), len(cached), judge.estimate([item for item, _ in missing]))

        def keep(index: int, verdict: Verdict) -> None:
            pair = missing[index]
            if pair not in verdicts:
                if pair in failed:
                    verdict = verdict.after(failed[pair])
                if cache is not None and verdict.status not in PASSING:
                    cache.put(*pair, verdict)
                verdicts[pair] = verdict

        try:
            _ask(judge, missing, keep, progress)
        except CostLimit as limit:
            total = sum(verdict.cost or 0.0 for verdict in verdicts.values())
            raise UserError(
                f"{limit.problem}; the verdicts of these turns have cost ${total:.4f} in all",
                limit.remedy,
            ) from limit
        finally:
            progress.stop()
    return verdicts, cached


def _ask(
    judge: Judge,
    pairs: list[tuple[Item, int]],
    keep: Callable[[int, Verdict], None],
    progress: Progress,
) -> None:
    """Have ``pairs`` of item and repeat judged, and everything that comes kept, whatever happens.

    ``keep`` may be told of a verdict twice.
    """
    asked = judge.judge([item for item, _ in pairs], [repeat for _, repeat in pairs])
    try:
        for index, verdict in asked:
            keep(index, verdict)
            progress.advance(verdict)
    finally:
        # After an interrupt or an error the judge ends what it has under way. What it had received
        # by then, and not handed out, was paid for.
        if hasattr(asked, "close"):
            try:
                asked.close()
            finally:
                for index, verdict in asked:
                    keep(index, verdict)


def label_run(
    run: Run,
    judge: Judge,
    name: str,
    progress: Progress,
    *,
    replace: bool = False,
    unperturbed: bool = False,
    **options,
) -> Path:
    """Judge every user turn of a run and write ``judgements/<name>.parquet``.

    ``unperturbed`` is that of :func:`items_of`, ``options`` are those of :func:`judge_items`.

    Raises:
        UserError: an unfinished run; a name that can't be a file's; verdicts of another judge
            under the same name; what :func:`judge_items` raises. Nothing is written then.
    """
    check_finished(run)
    check_name(name)
    if name in run.labels.judges and not replace:
        record = run.labels.record("judgements", name)
        if record.get("unperturbed", False) != unperturbed:
            shown = "another" if unperturbed else "the unperturbed"
            raise UserError(
                f"{run.path} has verdicts named {name!r} of turns after {shown} response",
                "give another --name, or --replace",
            )
        there = record.get("identity", {})
        if identity_hash(there) != identity_hash(judge.identity):
            changed = sorted(
                key
                for key in {*there, *judge.identity}
                if there.get(key) != judge.identity.get(key)
            )
            raise UserError(
                f"{run.path} has verdicts of another judge named {name!r} (differs in "
                f"{', '.join(changed)})",
                "give another --name, or --replace",
            )
    items = items_of(run, unperturbed=unperturbed)
    verdicts, cached = judge_items(items, judge, progress, **options)
    rows = _rows(run, items, verdicts, cached)
    record = {
        "identity": judge.identity,
        "identity_hash": identity_hash(judge.identity),
        "rubric": {"version": VERSION, "hash": rubric_hash()},
        "repeats": options.get("repeats", 1),
        "unperturbed": unperturbed,
        "caveat": getattr(judge, "caveat", ""),
    }
    return run.labels.write_judgements(name, rows, record)


def _rows(run: Run, items: list[Item], verdicts: dict, cached: set) -> list[dict]:
    """One row per user turn and repeat. Tokens and cost stand on the first row of an item only, so
    that a column's sum is what the labels cost."""
    repeats = sorted({repeat for _, repeat in verdicts})
    seen: set[tuple[Item, int]] = set()
    rows = []
    for key, item in zip(run.generations[list(KEY)].itertuples(index=False), items, strict=True):
        for repeat in repeats:
            verdict = verdicts[item, repeat]
            first = (item, repeat) not in seen
            seen.add((item, repeat))
            row = verdict.to_json() | {
                **dict(zip(KEY, key, strict=True)),
                "repeat": repeat,
                "genuine": verdict.genuine,
                "scores": json.dumps(verdict.scores) if verdict.scores else None,
                "cached": (item, repeat) in cached or not first,
                "item": item.key("", 0)[:16],
            }
            if not first:
                row |= {"prompt_tokens": 0, "completion_tokens": 0}
                row["cost"] = None if verdict.cost is None else 0.0
            rows.append(row)
    return rows
