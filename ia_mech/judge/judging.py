"""Judging a run: what a judge sees of each turn, its verdicts, and their rows in the run.

Each distinct item is judged once, and never twice. All items stand in one order, which doesn't
depend on which are decoys. Rows of the same text in the same context share one verdict; verdicts of
paid judges come from the cache where it has them.
"""

import contextlib
import importlib
import json
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd

from ia_mech.data.conversations import UNPERTURBED, UNPERTURBED_RESPONSE
from ia_mech.display import Progress
from ia_mech.errors import UserError
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.prompt import clean
from ia_mech.judge.verdict import JUDGED, TRUNCATED, Item, Judge, Verdict, identity_hash
from ia_mech.run import Run, layout
from ia_mech.run.labelled import positions
from ia_mech.run.labels import KEY
from ia_mech.run.queries import exchange

ON_UNPERTURBED = "-unperturbed"  # ends the names of verdicts on responses as they were before


def check_judged(run: Run, unperturbed: bool) -> None:
    """Raise UserError for a run that can't be judged, yet or in this way."""
    run.check_finished()
    if unperturbed and run.turns["perturbation"].isin([UNPERTURBED, None]).all():
        raise UserError(f"{run.path} holds no perturbed context", "judge it without --unperturbed")


def items_of(
    run: Run, decoys: pd.DataFrame | None = None, *, unperturbed: bool = False
) -> list[Item]:
    """What a judge sees of every row of ``run.turns``, in its order, and then of every decoy.

    With ``unperturbed`` it sees the response as it was before it was perturbed: whether a turn
    follows up on a response that its writer never saw.

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
            query, response = exchange(context.messages)
            if unperturbed and (context.perturbation or UNPERTURBED) != UNPERTURBED:
                response = json.loads(context.metadata).get(UNPERTURBED_RESPONSE)
                if response is None:
                    raise UserError(
                        f"context {context.context_id} of {run.path} doesn't record what it was "
                        "before it was perturbed",
                        "judge it as it was shown to the model",
                    )
            shown[context.context_id] = query, response
        rows = zip(turns["context_id"], turns["text"], strict=True)
        items += [Item(*shown[context], text) for context, text in rows]
    if decoys is None:
        return items
    turns_of_decoys = positions(run.turns, decoys)
    rows = zip(decoys["shown"], turns_of_decoys, strict=True)
    return items + [Item(*shown[context], items[row].turn) for context, row in rows]


def judge_items(
    items: Sequence[Item], judge: Judge, progress: Progress, *, cache_folder: Path | None = None
) -> tuple[dict[Item, Verdict], set[Item]]:
    """Verdicts of all distinct items, and which of them came from the cache.

    ``progress`` counts verdicts; its note has the tokens, dollars and failures so far. The cache
    keeps no failures, but for answers that a token limit cut off: the same request would be cut off
    again.

    Raises:
        UserError: what makes a judge useless. What was received before that, or before an
            interrupt, is in the cache; a kill loses what is under way.
    """
    wanted = list(dict.fromkeys(items))
    opened: contextlib.AbstractContextManager[VerdictCache | None] = contextlib.nullcontext()
    if judge.paid:
        opened = VerdictCache(judge.identity, cache_folder)
    with opened as cache:
        verdicts: dict[Item, Verdict] = {}
        if cache is not None:
            verdicts = {item: verdict for item in wanted if (verdict := cache.get(item))}
            if cache.read_only:
                progress.say(
                    f"{cache.path.parent} can't be written to: labels are read from it, but new "
                    "ones are kept in the run alone, once all are there"
                )
        cached = set(verdicts)
        missing = [item for item in wanted if item not in cached]
        if cached:
            progress.say(f"{len(cached)} labels from the cache")
        if cut := sum(verdict.status == TRUNCATED for verdict in verdicts.values()):
            progress.say(
                f"{cut} of these answers were cut off by a token limit. They were paid for and are "
                "not requested again: allow more tokens (--param), which makes another judge"
            )
        if missing:
            if not (judge.paid or judge.prepared or _is_own(judge)):
                progress.say("loading the judge …")
            with faults_named(judge):
                judge.prepare()
                estimate = judge.estimate(missing)
            if estimate:
                progress.say(estimate)
            progress.start("judging", len(missing), unit="label")
            try:
                verdicts |= _judge_missing(judge, missing, cache, progress)
            finally:
                progress.stop()
    return verdicts, cached


def _judge_missing(
    judge: Judge, missing: list[Item], cache: VerdictCache | None, progress: Progress
) -> dict[Item, Verdict]:
    """The verdicts of ``missing``. The thread that received one stores it at once."""
    batches = [missing[at : at + judge.batch] for at in range(0, len(missing), judge.batch)]
    judge.ended = ended = threading.Event()

    def work(batch: list[Item]) -> dict[Item, Verdict]:
        if ended.is_set():
            return {}
        try:
            received = _received(judge, batch)
            for item, verdict in received.items():
                if cache is not None and verdict.status in (JUDGED, TRUNCATED):
                    cache.put(item, verdict)
            return received
        except BaseException:
            ended.set()
            raise

    verdicts: dict[Item, Verdict] = {}
    tokens, cost, failures, said = 0, 0.0, 0, judge.caveat
    with _map_in_threads(work, batches, judge.concurrency, ended) as parts:
        for received in parts:
            verdicts |= received
            if judge.caveat and not said:  # once: it may count on with every answer
                said = judge.caveat
                progress.say(said)
            for verdict in received.values():
                if verdict.category not in (None, *judge.rubric.names):
                    raise UserError(
                        f"the judge named a category {verdict.category!r:.60}, which its rubric "
                        "lacks",
                        f"its categories are {', '.join(judge.rubric.names)}",
                    )
                tokens += verdict.prompt_tokens + verdict.completion_tokens
                cost += verdict.cost or 0.0
                failures += verdict.status != JUDGED
            facts = [f"{tokens} tokens"] if tokens else []
            facts += [f"${cost:.4f}"] if cost else []
            facts += [f"{failures} failed"] if failures else []
            # At once: the time left would be wrong after one of a batch.
            progress.advance(len(received), ", ".join(facts))
    return verdicts


def _received(judge: Judge, batch: list[Item]) -> dict[Item, Verdict]:
    """The verdicts on a batch.

    Raises:
        UserError: a judge of the user's own returned something else, or failed.
    """
    name = type(judge).__name__
    with faults_named(judge):
        verdicts = list(judge.judge(batch))
    if len(verdicts) != len(batch) or not all(isinstance(one, Verdict) for one in verdicts):
        kinds = sorted({type(one).__name__ for one in verdicts})
        raise UserError(
            f"the judge {name} returned {len(verdicts)} objects ({', '.join(kinds)}) for "
            f"{len(batch)} turns",
            "return a list with one ia_mech.judge.verdict.Verdict for each",
        )
    return dict(zip(batch, verdicts, strict=True))


@contextlib.contextmanager
def faults_named(judge: Judge | str) -> Iterator[None]:
    """Turn what code of a judge of the user's own raises, a network's error too, into one line that
    says where. A text is the name of one that isn't made yet."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if not isinstance(judge, str) and not _is_own(judge):
            raise
        ours = (str(Path(__file__).parent), "<frozen", importlib.__file__)
        stack = traceback.extract_tb(error.__traceback__)
        frames = [one for one in stack if not one.filename.startswith(ours)]
        within = [one for one in frames if one.filename == frames[0].filename]  # not its libraries
        place = f" ({within[-1].filename}:{within[-1].lineno})" if within else ""
        name = judge if isinstance(judge, str) else type(judge).__name__
        raise UserError(
            f"the judge {name} failed: {type(error).__name__}: {error}{place}",
            "correct it or what it needs, and judge again",
        ) from error


@contextlib.contextmanager
def _map_in_threads(
    work: Callable[[list[Item]], dict[Item, Verdict]],
    batches: list[list[Item]],
    threads: int,
    ended: threading.Event,
) -> Iterator[Iterator[dict[Item, Verdict]]]:
    """What ``work`` gives for each batch, as it comes; the first goes alone, so that what is wrong
    with all of them is told after one. A single thread is the caller's own.

    However the caller ends, nothing more is begun, and what is under way is waited for.
    """
    if threads == 1:
        yield map(work, batches)
        return
    with ThreadPoolExecutor(threads) as pool:

        def parts() -> Iterator[dict[Item, Verdict]]:
            yield pool.submit(work, batches[0]).result()  # an interrupt here stops no request
            futures = [pool.submit(work, batch) for batch in batches[1:]]
            yield from (future.result() for future in as_completed(futures))

        try:
            yield parts()
        finally:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)


def decoys_per_source(judge: Judge, decoys: int | None) -> int | None:
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

    Nothing is judged if this judge's verdicts are there already, and none of them failed. (A judge
    of the user's own that isn't paid judges again: its code may have changed.)

    ``decoys`` is as for :func:`decoys_per_source`, ``unperturbed`` as for :func:`items_of`, and
    ``options`` are :func:`judge_items`'. ``replace`` allows to replace the verdicts that are there
    under that name, also another judge's.

    Raises:
        UserError: a name that can't be a file's; a run that can't be written to; verdicts of
            another judge under that name; a run or a judge that can't be used. Nothing is written
            then.
    """
    run.labels.check_name("judgements", name)
    # Before anything is paid for.
    layout.refuse_unwritable(run.path / "judgements", "judge a copy of the run")
    per_source = decoys_per_source(judge, decoys)
    settings = {
        "identity": judge.identity,
        "identity_hash": identity_hash(judge.identity),
        "rubric": judge.rubric.record(),
        "decoys_per_source": per_source,
        "unperturbed": unperturbed,
    }
    if name in run.labels.judges and not replace:
        _check_same_judge(run, judge, name, unperturbed)
        if there := _standing(run, judge, name, settings):
            progress.say(
                f"{there} labels by {name} were there already (also of the control): "
                "nothing is judged again"
            )
            return run.labels.path / "judgements" / f"{name}.parquet"
    plan = draw_decoys(run, per_source)
    items = items_of(run, plan, unperturbed=unperturbed)
    # Sorted by their texts, so that items of one context, which share a prefix, stand together.
    ordered = sorted(set(items), key=lambda item: (item.query, item.response, item.turn))
    verdicts, cached = judge_items(ordered, judge, progress, **options)
    # A function's rubric is known once it was asked.
    record = settings | {"caveat": judge.caveat, "rubric": judge.rubric.record()}
    turns = run.turns[list(KEY)].astype({"context_id": object}).assign(decoy=None, shown=None)
    rows = _rows(pd.concat([turns, plan]) if len(plan) else turns, items, verdicts, cached, judge)
    return run.labels.write_judgements(name, rows, record)


def _check_same_judge(run: Run, judge: Judge, name: str, unperturbed: bool) -> None:
    """Raise UserError unless the verdicts of that name are this judge's."""
    record = run.labels.record("judgements", name)
    before = record.get("identity", {}) | {"unperturbed": record.get("unperturbed", False)}
    now = judge.identity | {"unperturbed": unperturbed}
    if changed := sorted(k for k in {*before, *now} if before.get(k) != now.get(k)):
        raise UserError(
            f"{run.path} has labels by another judge named {name!r} (differs in "
            f"{', '.join(changed)})",
            'give another name (name="NAME", --name NAME), or replace them (replace=True, '
            "--replace)",
        )


def _standing(run: Run, judge: Judge, name: str, settings: dict[str, Any]) -> int:
    """How many verdicts of that name stand as they are; 0 if they have to be made again."""
    record, now = run.labels.record("judgements", name), json.loads(json.dumps(settings))
    if _is_own(judge) or any(record.get(key) != value for key, value in now.items()):
        return 0
    both = run.labels.judgements, run.labels.decoys
    statuses = pd.concat([read(name, columns=["status"]) for read in both])["status"]
    return len(statuses) * bool((statuses == JUDGED).all())


def _is_own(judge: Judge) -> bool:
    """Whether the judge's code is the user's."""
    module = type(judge).__module__  # None in code that was executed without a __name__
    return not (module or "").startswith("ia_mech.")


def _rows(
    turns: pd.DataFrame,
    items: list[Item],
    verdicts: dict[Item, Verdict],
    cached: set[Item],
    judge: Judge,
) -> Iterator[dict[str, Any]]:
    """One row per turn.

    Tokens and cost stand on the first row of an item only, so that a column's sum is what the
    labels cost.
    """
    seen: set[Item] = set()
    records = (dict(zip(turns, row, strict=True)) for row in turns.itertuples(index=False))
    with faults_named(judge):
        fitted_on = list(zip(items, judge.fitted_on(items), strict=True))
    for turn, (item, fitted) in zip(records, fitted_on, strict=True):
        verdict, first = verdicts[item], item not in seen
        seen.add(item)
        said = verdict.to_json().items()
        row = {name: clean(value) if isinstance(value, str) else value for name, value in said} | {
            **turn,
            "follow_up": judge.rubric.follow_up(verdict.category),
            "scores": json.dumps(verdict.scores) if verdict.scores else None,
            "cached": item in cached or not first,
            "item": item.id,
            "fitted": fitted,
        }
        if not first:
            row |= {"prompt_tokens": 0, "completion_tokens": 0}
            row["cost"] = None if verdict.cost is None else 0.0
        yield row
