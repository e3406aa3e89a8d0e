"""The judge that a command line asks for, or why it can't be had."""

import argparse
import json
from collections.abc import Sequence

from ia_mech.errors import UserError
from ia_mech.judge.verdict import Item, Judge
from ia_mech.run import Run

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
    from ia_mech.models import same_model

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
        from ia_mech.judge.hf_replay import HfReplay

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
