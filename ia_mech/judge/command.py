"""``ia-mech judge run``, and the judge that a command's flags describe."""

import argparse
import importlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.markup import escape

from ia_mech.cli import NOTHING, one_line, program, shell_word
from ia_mech.display import Bar, console
from ia_mech.errors import UserError
from ia_mech.judge import builtin_judge
from ia_mech.judge.decoys import draw_decoys
from ia_mech.judge.judging import (
    ON_UNPERTURBED,
    check_judged,
    decoys_per_source,
    faults_named,
    items_of,
    label_run,
)
from ia_mech.judge.rubric import Rubric, read_rubric
from ia_mech.judge.shown import (
    counts_of,
    judged_text,
    labelled_turns,
    lines_of,
    rule,
)
from ia_mech.judge.verdict import JUDGED, Item, Judge, identity_hash
from ia_mech.results import folders_of, read
from ia_mech.run import Run
from ia_mech.untrusted import parse_json

SHOWN = 5  # verdicts that are printed with their turns
_COUNTED = ["category", "status", "error", "item", "cached"]  # of verdicts, on the screen
_COUNTED += ["prompt_tokens", "completion_tokens", "cost"]

# Which judges a flag is for. Of those not given the namespace has nothing, and the judge a default.
_OF_SERVERS = ("base_url", "api_key_env", "mode", "concurrency", "timeout", "retries", "price")
_JUDGES_OF_FLAG = {
    **dict.fromkeys((*_OF_SERVERS, "max_cost"), ("llm",)),
    **dict.fromkeys(("device", "force"), ("hf",)),
    "rubric": ("llm", "hf"),
    "model": ("llm", "hf"),
    "param": ("llm", "module:Class"),
}


def run_judge(args: argparse.Namespace) -> int:
    """``ia-mech judge run``; returns its exit status."""
    run = Run.open(args.run)
    name = args.name or _default_name(args) + ON_UNPERTURBED * args.unperturbed
    run.labels.check_name("judgements", name)
    check_judged(run, args.unperturbed)
    judge = make_judge(args, run)
    if args.dry_run:
        plan = draw_decoys(run, decoys_per_source(judge, args.decoys))
        items = items_of(run, plan, unperturbed=args.unperturbed)
        print_plan(judge, items, decoys=len(plan))
        return 0
    begun, before = time.monotonic(), run.labels.digest([name])
    path = label_run(
        run,
        judge,
        name,
        Bar(),
        decoys=args.decoys,
        replace=args.replace,
        unperturbed=args.unperturbed,
    )
    rows = run.labels.judgements(name, _COUNTED)
    decoys = run.labels.decoys(name, columns=[*_COUNTED, "decoy"])
    seconds, screen = time.monotonic() - begun, console()
    if shown := labelled_turns(run, name, SHOWN):
        screen.print(f"labels by {name} ({rule(shown)}):", soft_wrap=True, markup=False)
        for line in lines_of(shown, rationale=True):
            screen.print(line, soft_wrap=True, markup=False)
        screen.print()
    made = args.replace or run.labels.digest([name]) != before
    _print_verdicts(rows, decoys, judge.rubric, seconds if made else None)
    if caveat := run.labels.record("judgements", name)["caveat"]:
        screen.print(escape(caveat), soft_wrap=True)
    print(f"labels: {shell_word(path)}")
    if not (rows["status"] == JUDGED).any():
        print("no turn could be judged, for the reasons above: fix them, then judge again")
        return NOTHING
    if not run.settings["first_tokens"]:  # its turns are no sample
        print(f"next: {program()} rates {shell_word(args.run)}{run.labels.flag(name)}")
    return 0


def remove_labels(args: argparse.Namespace) -> None:
    """``ia-mech judge remove``."""
    run = Run.open(args.run)
    kind, name = (
        ("judgements", args.judge) if args.judge is not None else ("annotations", args.annotator)
    )
    folders = folders_of(run.path, run.identity_digest, [run.path.resolve().parent])
    rest = [at for at in folders if name in read(at).about.get("labellers", ())]
    run.labels.remove(kind, name)
    print(f"removed the {kind} of {name}")
    for folder in rest:
        print(f"rests on them, and stays: {shell_word(folder)}")
    todo = "report" if run.labels.judges else "judge run"
    print(f"next: {program()} {todo} {shell_word(args.run)}")


def make_judge(args: argparse.Namespace, run: Run | None = None) -> Judge:
    """The judge that the flags describe.

    The subject model of the ``run`` that is to be judged is no judge of it.

    Raises:
        UserError: flags that don't go together, or a judge that can't be had.
    """
    kind = "module:Class" if ":" in args.judge else args.judge
    given = {flag: getattr(args, flag) for flag in _JUDGES_OF_FLAG if hasattr(args, flag)}
    for flag in given:
        if kind not in _JUDGES_OF_FLAG[flag]:
            needed = " or ".join(f"--judge {kind}" for kind in _JUDGES_OF_FLAG[flag])
            raise UserError(f"--{flag.replace('_', '-')} needs {needed}", "add it, or drop it")
    if kind in _JUDGES_OF_FLAG["model"] and not given.get("model", "").strip():
        raise UserError(f"--judge {kind} needs a model", "give --model NAME")
    params = _params(given.pop("param", []))
    if "rubric" in given:
        given["rubric"] = read_rubric(given["rubric"])
    if kind == "builtin":
        return builtin_judge()
    if kind == "hf":
        return _make_hf(run, **given)
    if kind == "llm":
        from ia_mech.judge.llm import LlmJudge

        return LlmJudge(**given, params=params)
    with faults_named(args.judge):
        return _make_own(args.judge, params)


def print_plan(judge: Judge, items: Sequence[Item], *, decoys: int = 0) -> None:
    """What ``--dry-run`` shows; ``decoys`` of the items are decoys."""
    distinct = list(dict.fromkeys(items))
    turns = f"{len(items) - decoys} turns" + (f" + {decoys} decoys" if decoys else "")
    print(f"{turns}, {len(distinct)} distinct")
    with faults_named(judge):
        estimate = judge.estimate(distinct)
    if estimate:
        print(f"{estimate} (before what the cache has)")


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


def _make_hf(run: Run | None, model: str, force: bool = False, **options: Any) -> Judge:
    """A local model; the run's subject only if forced.

    The name is compared before anything is loaded, the weights after: another name may be a copy.
    """
    from ia_mech.judge.hf import HfJudge
    from ia_mech.models.load import same_model

    subject = None if run is None or force else run.model
    known = subject and same_model(model, None, subject["name"], subject.get("revision"))
    judge = None if known else HfJudge(model, **options)
    if judge is None or (subject and subject["weights_hash"] == judge.identity["weights_hash"]):
        raise UserError(
            f"{model} is the subject model of {run and run.path}: it would judge its own turns",
            "give another --model, or --force",
        )
    return judge


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
    name = args.judge.partition(":")[2] or Path(getattr(args, "model", args.judge)).name
    words = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    return words.strip("-._")[:100] or args.judge


def _print_verdicts(
    rows: pd.DataFrame, decoys: pd.DataFrame, rubric: Rubric, seconds: float | None
) -> None:
    """How many turns are of each category, what failed, and, where it was done now, what it took
    and cost."""
    screen = console()
    listed = counts_of(rows["category"], rubric)
    screen.print(f"all {len(rows)} turns: {listed}", soft_wrap=True)
    judged = judged_text(rows["item"], decoys)
    rows = pd.concat([rows, decoys]) if len(decoys) else rows
    for status, part in rows[rows["status"] != JUDGED].groupby("status"):
        errors = part["error"].value_counts()
        commonest = escape(one_line(errors.index[0], 300))
        screen.print(f"{len(part)} {status}: {commonest} ({errors.iloc[0]})", soft_wrap=True)
    if seconds is None:
        return
    facts = [f"judged {judged}, in {seconds:.0f} s"]
    if tokens := rows["prompt_tokens"].sum() + rows["completion_tokens"].sum():
        facts.append(f"{tokens} tokens")
    if rows["cost"].notna().any():
        before = rows["cost"][rows["cached"]].sum()
        earlier = f" (${before:.4f} of it paid before)" if before else ""
        facts.append(f"${rows['cost'].sum():.4f}{earlier}")
    screen.print(", ".join(facts), soft_wrap=True)
