"""The main job's command line, and the same as a function.

Both are made from the fields of :class:`ia_mech.settings.Settings`. What needs torch is imported
late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ia_mech import cli
from ia_mech.cli import Parser, one_line, path_of, run_command, tolerant_streams
from ia_mech.display import Bar, Progress
from ia_mech.errors import UserError
from ia_mech.models.embedded import refuse_missing_model
from ia_mech.run import Run, layout
from ia_mech.run.integrity import without_folders
from ia_mech.run.writer import kept_draws, refuse_another
from ia_mech.settings import (
    FIRST,
    RUN,
    WHOLE,
    Flag,
    Settings,
    Shard,
    default_text,
    flag_of,
    parameters_named,
    parse_value,
)

if TYPE_CHECKING:
    from ia_mech.collect.plan import Plan

DESCRIPTION = """\
Give a chat model a query and a response, add the user header of its chat template, and let it write
the next user turn, greedily and at several temperatures. A run keeps the turns, the residual stream
of every layer at the header, the logits there, and the likelihood of real follow-ups. The same
command resumes an interrupted run. docs/sampling.md explains the flags.
"""

EPILOG = """\
examples:
  ia-mech sample                                 24 built-in conversations, ~1 minute
  ia-mech sample --limit all --dry-run           what that would compute and write
  ia-mech sample --dataset chats.jsonl --limit all           your own conversations
  ia-mech sample --model Qwen/Qwen3-0.6B --dataset gsm8k --response generate
"""


def build_parser() -> Parser:
    """The command line. Values of settings are left as words, for :class:`Settings` to read."""
    parser = Parser(
        prog="ia-mech sample",
        usage="ia-mech sample [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=28, width=100
        ),
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in fields(Settings):
        flag: Flag = setting.metadata["flag"]
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        options: dict[str, Any] = {"action": "store_true"}
        if flag.parse is not None:
            options = {"metavar": flag.metavar, "nargs": "+" if flag.several else None}
        if flag.mapping:
            options |= {"nargs": "+", "action": "extend"}
        groups[flag.group].add_argument(
            "--" + setting.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            help=flag.help + default_text(setting),
            **options,
        )
    groups[FIRST].add_argument(
        "--out",
        type=path_of,
        metavar="FOLDER",
        help="where to write (default: cache/<model>-<dataset>-<hash>)",
    )
    add = groups[RUN].add_argument
    add("--dry-run", action="store_true", help="print what would be done and written, and stop")
    add(
        "--workers",
        type=cli.threads,
        metavar="N",
        help="parts computed at once (default: one per core)",
    )
    add(
        "--threads",
        type=cli.threads,
        metavar="N",
        help="threads of each worker (default: as the run began, or 1)",
    )
    cli.add_ray(groups[RUN])
    add("--full", action="store_true", help="print all tables, also that of real follow-ups")
    add(
        "--shard",
        type=shard_of,
        default=WHOLE,
        metavar="I/N",
        help="compute only share I of N, as on one of N machines (docs/scale.md)",
    )
    add("-h", "--help", action="help", help="show this text")
    return parser


def shard_of(text: str) -> Shard:
    """``2/4`` as (2, 4), for argparse."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with i from 1 to n, such as 2/4")
    return int(found[1]), int(found[2])


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    words = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(words)
    out: Path | None = args.out

    def body() -> None:
        nonlocal out
        settings = settings_of(args)
        out = out or settings.folder()
        bar = Bar()
        plan = _planned(settings, out, bar, args.ray)
        if args.dry_run:
            from ia_mech.collect.summary import print_plan

            print_plan(plan, args.shard)
            return
        from ia_mech.collect.job import make_run
        from ia_mech.collect.summary import print_run, print_shard
        from ia_mech.engine.workers import Crew

        crew = Crew(args.workers, args.threads, args.ray)
        run = make_run(plan, bar, shard=args.shard, crew=crew)
        if run.complete:
            print_run(run, args.full)
        else:
            print_shard(run, args.shard)

    return run_command(body, lambda: _interrupted(out, words))


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings among the arguments of the command."""
    names = {setting.name for setting in fields(Settings)}
    return _given({k: v for k, v in vars(args).items() if k in names})


def _given(settings: dict[str, Any]) -> Settings:
    """Settings that a user gives, among which none may do nothing."""
    if settings.get("first_tokens") is not None and settings.get("samples") is not None:
        raise UserError(
            "--samples does nothing with --first-tokens: a turn goes on from each first token",
            "leave one of them out",
        )
    return Settings.read(settings)


def _planned(settings: Settings, out: Path, progress: Progress, ray: str | None) -> "Plan":
    """The plan of a run. What can be refused before torch is loaded, which takes seconds, is
    refused first: all of the data is read and checked before."""
    refuse_missing_model(settings.model)
    layout.refuse_as_run(out)
    if (out / layout.RUN).is_file():
        there, wanted = Run(out).record, settings.to_dict()
        if settings.batch_rows is None:  # it depends on the device
            wanted["batch_rows"] = there["identity"]["settings"]["batch_rows"]
        known = {"identity": without_folders({"settings": wanted})}
        refuse_another(out, there, known, flag_of, settings.local_model)
        done, parts = len(Run(out).parts("contexts")), there["parts"]["contexts"]
        if done < parts:
            progress.say(f"going on with {out}: {done} of {parts} parts are there")
    source = settings.conversations()
    if not (settings.dataset.startswith("builtin") or cli.expanded(settings.dataset).exists()):
        progress.say(f"reading {one_line(settings.dataset)} …")  # over the network
    rows = [*source.usable()]
    progress.say(f"loading {one_line(settings.model)} …")  # a busy machine imports for a minute
    from ia_mech.collect.plan import Plan
    from ia_mech.engine.cluster import device_of

    return Plan(settings, out, source=source, rows=rows, device=device_of(settings.device, ray))


@parameters_named()
def sample(
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
    shard: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    ray: str | None = None,
    **settings: Any,
) -> Run:
    """Make a run, or go on with it: ``ia-mech sample`` as a function.

    Args:
        out: the run's folder; ``cache/<model>-<dataset>-<hash>`` if None.
        progress: shows what is done: a bar if None; :class:`ia_mech.display.Quiet` shows nothing.
        shard: ``"2/4"`` makes the second of four shares of the run.
        workers: that compute parts at once; None for one per core. Rows don't depend on it.
        threads: of each worker; None for as many as the run was begun with, or the cores' share.
        ray: the address of a Ray cluster whose devices compute; ``"local"`` is this machine.
        settings: the command's flags with underscores, and their values: ``limit=6``,
            ``dataset="chats.jsonl"``, ``temperatures=[0.7, 1.0]``. ``dataset`` may also be rows: a
            list of dicts, a pandas DataFrame or a ``datasets.Dataset``. None is the default, but
            ``limit=None`` is all conversations, as is ``limit="all"``.

    Returns:
        The run; of a shard, with what all shards have made so far.

    Raises:
        TypeError: there is no such setting.
        UserError: a value, data, a model or a folder that can't be used.
    """
    chosen = _given(settings)
    folder = _argument("out", out, path_of) or chosen.folder()
    share = _argument("shard", shard, shard_of) or WHOLE
    asked = {"workers": workers, "threads": threads}
    crew = {name: _argument(name, number, cli.threads) for name, number in asked.items()}

    shown = progress or Bar()
    at = _argument("ray", ray, cli.ray_address)
    plan = _planned(chosen, folder, shown, at)
    from ia_mech.collect.job import make_run
    from ia_mech.engine.workers import Crew

    run = make_run(plan, shown, shard=share, crew=Crew(**crew, ray=at))
    if run.complete:
        from ia_mech.collect.summary import what_was_written

        shown.say(what_was_written(run))
    return run


def _argument(name: str, value: Any, parse: Callable[[str], Any]) -> Any:
    return None if value is None else parse_value(name, value, parse)


def _interrupted(out: Path | None, words: Sequence[str]) -> str:
    """What an interrupted run has on the disk, and how to go on."""
    try:
        return cli.go_on(_kept(out), "ia-mech sample", words)
    except UserError as error:  # a damaged file: the same command would be refused
        return str(error)


def _kept(out: Path | None) -> str:
    if out is None or not (out / layout.RUN).exists():
        return "nothing was written yet"
    run = Run(out)
    done, counts = run.counts["contexts"], run.counts
    drawn, parts = kept_draws(out), run.record["parts"]["contexts"]
    every = run.record["identity"]["conversations"]["count"]
    kept = [f"the turns of {done} of {every} conversations"] if done else []
    kept += [f"{counts['responses']} responses"] if counts["responses"] else []
    kept += [f"{drawn} responses of unfinished parts"] if drawn else []
    if not kept:
        several = -(-every // parts)
        return (
            f"nothing was kept: turns are written {several} conversation{'s' * (several > 1)} at a "
            "time"
        )
    return f"kept in {out}: {', '.join(kept)}"
