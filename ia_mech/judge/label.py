"""Judge the user turns of a run: each distinct (query, response, turn) once, and never twice.

Rows of the same text in the same context share one verdict per repeat; verdicts of paid judges come
from the cache where it has them.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ia_mech.conversations import UNPERTURBED, UNPERTURBED_RESPONSE
from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.rubric import VERSION, rubric_hash
from ia_mech.judge.verdict import JUDGED, CostLimit, Item, Judge, Verdict, identity_hash
from ia_mech.run import Run
from ia_mech.run.labels import KEY, check_name

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
