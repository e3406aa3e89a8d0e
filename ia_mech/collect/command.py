"""The main job's command line, and the same as a function.

Usage::

    python -m ia_mech.sample
    python -m ia_mech.sample --dataset chats.jsonl --limit all --temperatures 0.5 1.0 --samples 8
    python -m ia_mech.sample --model Qwen/Qwen3-0.6B --response generate --device cuda

What needs torch is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ia_mech.cli import (
    Parser,
    guarded,
    named,
    one_line,
    path_of,
    threads,
    tolerant_streams,
    utf8,
    whole_from,
)
from ia_mech.errors import UserError
from ia_mech.models import embedded

if TYPE_CHECKING:
    from ia_mech.collect.config import SampleConfig
    from ia_mech.collect.shards import Rank, Shard
    from ia_mech.display import Progress
    from ia_mech.run import Run

DESCRIPTION = """\
Give a chat model a query and a response, open the user header of its chat template, and let it
write the next user turn, greedily and at several temperatures. Keeps the turns, the residual stream
of every layer at the header, the logits there, and the likelihood of users' real follow-ups.
"""

EPILOG = """\
examples:
  python -m ia_mech.sample                                 24 built-in conversations, ~1 minute
  python -m ia_mech.sample --limit all --dry-run           what that would do, write and cost
  python -m ia_mech.sample --dataset chats.jsonl --limit all           your own conversations
  python -m ia_mech.sample --model Qwen/Qwen3-0.6B --dataset gsm8k --response generate
The same command goes on with an interrupted run. --help-all lists all flags; docs/sampling.md
explains them.
"""

# What --help shows; --help-all shows every flag.
COMMON = {
    *("help", "help_all", "model", "dtype", "device", "threads", "dataset", "limit", "response"),
    *("temperatures", "samples", "max_new_tokens", "seed", "positions"),
    *("responses", "contrasts", "out", "dry_run"),
}


class _Help(argparse.Action):
    """Print the help of all flags, or of the common ones."""

    def __call__(self, parser, *_) -> None:
        if self.dest == "help":
            for action in parser._actions:
                if action.dest not in COMMON:
                    action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def build_parser(kind: type[Parser] = Parser) -> Parser:
    """The command line, in groups; ``kind`` says how mistakes are refused."""
    parser = kind(
        prog="python -m ia_mech.sample",
        usage="python -m ia_mech.sample [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=28, width=100
        ),
    )
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        type=named,
        default=embedded.NAME,
        metavar="NAME",
        help="hub id, folder or GGUF file (default: %(default)s)",
    )
    add(
        "--revision",
        type=named,
        metavar="REV",
        help="branch, tag or commit of a hub model (default: main)",
    )
    add(
        "--adapter",
        type=named,
        metavar="FOLDER",
        help="a PEFT adapter to merge into the model (needs ia-mech[train])",
    )
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    add("--dtype", choices=dtypes, default="auto", metavar="TYPE", help=_among(dtypes))
    add("--device", default="auto", metavar="DEV", help="auto, cpu, cuda or cuda:N (default: auto)")
    add(
        "--attention",
        type=named,
        default="auto",
        metavar="NAME",
        help="sdpa, eager, … as transformers names them (default: auto)",
    )
    add("--trust-remote-code", action="store_true", help="run code that a hub model brings")
    add(
        "--device-map",
        choices=["auto"],
        metavar="auto",
        help="distribute the model over this machine's GPUs, memory and disk",
    )
    add(
        "--tensor-parallel",
        type=whole_from(1),
        default=1,
        metavar="N",
        help="so many ranks of torchrun hold the model together (see docs/scale.md)",
    )
    add(
        "--threads",
        type=threads,
        metavar="N",
        help="on a CPU; a busy machine is faster with 1 (default: all cores)",
    )

    add = parser.add_argument_group("conversations").add_argument
    add(
        "--dataset",
        type=named,
        default="builtin",
        metavar="DATA",
        help="builtin, a file, a preset or a hub id (default: builtin)",
    )
    add("--subset", type=named, metavar="NAME", help="configuration of a hub dataset")
    add("--split", type=named, metavar="NAME", help="split of a hub dataset")
    add("--limit", type=_limit, default=24, metavar="N", help="how many, or: all (default: 24)")
    formats = ["auto", "messages", "sharegpt", "qa", "turns"]
    add("--format", choices=formats, default="auto", metavar="NAME", help=_among(formats))
    for name, what in (
        ("id", "ids"),
        ("source", "ids of the original prompt, where several rows share one"),
        ("messages", "the list of messages or turns"),
        ("query", "the user's query"),
        ("response", "the assistant's response"),
        ("followup", "what the user really said next"),
        ("answer", "the gold answer"),
    ):
        add(f"--{name}-column", type=named, metavar="NAME", help=f"column with {what}")
    add(
        "--cut",
        choices=["first", "last"],
        default="first",
        metavar="WHERE",
        help="cut after the first response, or before the last user turn (default: first)",
    )
    add(
        "--response",
        choices=["given", "generate", "auto"],
        default="auto",
        metavar="HOW",
        help="given, generate, or auto: generate the missing ones (default: auto)",
    )
    add(
        "--responses",
        type=int,
        default=1,
        metavar="K",
        help="how many the model writes to each query, a context each (default: 1)",
    )
    add(
        "--response-temperature",
        type=float,
        metavar="T",
        help="0 is greedy (default: 0 for one response, 1 for several)",
    )
    add(
        "--max-response-tokens",
        type=whole_from(1),
        default=512,
        metavar="N",
        help="limit of generated responses; those it cuts off are flagged (default: 512)",
    )

    add = parser.add_argument_group("chat template").add_argument
    system = "system message (default: the template's own, if any)"
    add("--system", type=utf8, metavar="TEXT", help=system)
    add(
        "--thinking",
        choices=["template", "keep"],
        default="template",
        metavar="HOW",
        help="template: as rendered once a user turn follows; keep: with its thinking block",
    )
    add(
        "--date",
        type=_date,
        metavar="DATE",
        help="for templates that print today's date, as YYYY-MM-DD (default: 2026-01-01)",
    )

    add = parser.add_argument_group("decoding, capture and scores").add_argument
    add(
        "--temperatures",
        nargs="+",
        type=_temperatures,
        default=[(0.7, 1.0, 1.3)],
        metavar="T",
        help="besides greedy, which is always there (default: 0.7 1.0 1.3)",
    )
    add("--samples", type=int, default=4, metavar="N", help="turns per temperature (default: 4)")
    add("--max-new-tokens", type=int, default=40, metavar="N", help="of a turn (default: 40)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    add(
        "--positions",
        nargs="+",
        type=named,
        default=["all"],
        metavar="P",
        help="where the residual stream is kept: all, header, or names (default: all)",
    )
    add(
        "--header-logits",
        type=_header_logits,
        default="full",
        metavar="full|K|none",
        help="all logits at the header's last token, the K largest, or none (default: full)",
    )
    add(
        "--batch-rows",
        type=whole_from(1),
        metavar="N",
        help="rows decoded together (default: 128 on a CPU, 1024 on a GPU)",
    )
    engines = ["auto", "shared", "portable", "graphs"]
    add(
        "--engine",
        choices=engines,
        default="auto",
        metavar="NAME",
        help=f"{_among(engines)}; graphs needs a GPU (see docs/engine.md)",
    )

    add(
        "--contrasts",
        action="store_true",
        help="score real follow-ups after other responses, too, and against rivals",
    )
    add(
        "--swaps",
        type=whole_from(0),
        metavar="K",
        help="with --contrasts: after K other responses (default: 4)",
    )
    add(
        "--score-generations",
        action="store_true",
        help="with --contrasts: the generations as well",
    )
    add(
        "--candidates",
        type=named,
        metavar="FILE",
        help="your own rivals of the real follow-up (JSONL), besides the usual ones",
    )

    add(
        "--intervention",
        type=named,
        metavar="FILE",
        help="steer the model with this vector (see docs/causal.md)",
    )

    add = parser.add_argument_group("run").add_argument
    add(
        "--out",
        type=path_of,
        metavar="FOLDER",
        help="default: cache/<model>-<dataset>-<hash>, or under $IA_MECH_CACHE",
    )
    add(
        "--shard",
        type=named,
        metavar="I/N",
        help="make shard I of N (default: what Slurm's array or torchrun says; see docs/scale.md)",
    )
    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="make many shards on the devices of a Ray cluster, or of this machine",
    )
    add(
        "--phase",
        choices=["responses", "turns"],
        metavar="NAME",
        help="of shards, when contrasts need the model's responses: responses, then turns",
    )
    add("--dry-run", action="store_true", help="print what would be done and written, and stop")
    add("--repair", action="store_true", help="compute damaged parts of the run again")
    add("-h", "--help", nargs=0, action=_Help, help="the common flags")
    add("--help-all", nargs=0, action=_Help, help="all flags")
    return parser


def _among(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]} (default: {names[0]})"


def _limit(text: str) -> int | None:
    if text == "all":
        return None
    if not _is_positive(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor all")
    return int(text)


def _header_logits(text: str) -> str:
    if text in ("full", "none"):
        return text
    if not _is_positive(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither full, none nor a positive number")
    return str(int(text))  # "010" and "10" are one configuration


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) <= sys.maxsize


def _temperatures(text: str) -> tuple[float, ...]:
    """One temperature, or several with commas between them."""
    try:
        found = tuple(float(piece) for piece in text.split(",") if piece.strip())
    except ValueError:
        found = ()
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.7")
    return found


def _date(text: str) -> str:
    try:
        same = date.fromisoformat(text).isoformat() == text  # 20260101 would be another one
    except ValueError:
        same = False
    if not same:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date such as 2026-01-31")
    return text


def parse_config(args: argparse.Namespace) -> "SampleConfig":
    """A ``SampleConfig`` from parsed arguments.

    Raises:
        UserError: a value, or a combination, that can't be.
    """
    from ia_mech.chat.template import PINNED_DATE
    from ia_mech.collect.config import SampleConfig
    from ia_mech.data.formats import ColumnMap
    from ia_mech.engine.plan import Grid
    from ia_mech.models.load import ModelSpec

    if not args.contrasts and (args.swaps is not None or args.score_generations):
        flag = "--score-generations" if args.score_generations else f"--swaps {args.swaps}"
        raise UserError(f"{flag} is about scores after other responses", "add --contrasts")
    warmth = args.response_temperature
    if warmth is None:
        warmth = 1.0 if args.responses > 1 else 0.0
    return SampleConfig(
        model=ModelSpec(
            name=args.model,
            revision=args.revision,
            dtype=args.dtype,
            device=args.device,
            attention=args.attention,
            trust_remote_code=args.trust_remote_code,
            adapter=args.adapter,
            device_map=args.device_map,
            tensor_parallel=args.tensor_parallel,
        ),
        dataset=args.dataset,
        subset=args.subset,
        split=args.split,
        limit=args.limit,
        columns=ColumnMap(
            format=args.format,
            id=args.id_column,
            source=args.source_column,
            messages=args.messages_column,
            query=args.query_column,
            response=args.response_column,
            followup=args.followup_column,
            answer=args.answer_column,
            cut=args.cut,
        ),
        response=args.response,
        responses=args.responses,
        response_temperature=warmth,
        max_response_tokens=args.max_response_tokens,
        grid=Grid(sum(args.temperatures, ()), args.samples, args.max_new_tokens, args.seed),
        system=args.system,
        thinking=args.thinking,
        date=args.date or PINNED_DATE,
        positions=tuple(args.positions),
        header_logits=args.header_logits,
        batch_rows=args.batch_rows,
        contrasts=args.contrasts,
        swaps=4 if args.swaps is None else args.swaps,
        score_generations=args.score_generations,
        candidates=args.candidates,
        engine=args.engine,
        intervention=args.intervention,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    out: Path | None = args.out
    shard: Shard | None = None

    def body() -> None:
        nonlocal out, shard
        from ia_mech.collect.shards import WHOLE, Rank, Shard

        config = parse_config(args)
        out = out or config.folder()
        together = config.model.tensor_parallel
        if args.ray is not None and (args.shard or args.phase):
            raise UserError("--ray makes all shards and phases", "leave out --shard and --phase")
        if args.ray is not None and together > 1:
            raise UserError(
                "--ray gives a worker one device, and --tensor-parallel takes several",
                "use torchrun, in each task of a Slurm array for several machines",
            )
        shard = WHOLE if args.ray is not None else Shard.of_environment(os.environ, together)
        if args.shard:
            shard = Shard.parse(args.shard)
        if args.dry_run:
            _dry_run(config, out, args.repair, shard)
        elif args.ray is not None:
            from ia_mech.collect.ray import sample_on_ray
            from ia_mech.collect.summary import print_run
            from ia_mech.display import Bar

            print_run(sample_on_ray(config, out, args.ray, Bar(), args.threads, args.repair))
        else:
            _sample(config, out, shard, Rank.of_environment(os.environ, together), args)

    return guarded(body, lambda: _kept(shard.folder(out) if out and shard else out))


def _sample(
    config: "SampleConfig", out: Path, shard: "Shard", rank: "Rank", args: argparse.Namespace
) -> None:
    """Make a run, or a shard, and print what came out; of several ranks the first one does."""
    from ia_mech.collect.shards import PATIENCE, named, wait_for
    from ia_mech.collect.summary import print_run, print_shard
    from ia_mech.display import Bar, Quiet
    from ia_mech.models import parallel
    from ia_mech.run import Run

    progress = Quiet() if rank.number else Bar()
    try:
        run = _run(config, out, progress, args, shard, rank)
    except UserError as error:
        if not rank.leads and not isinstance(error, parallel.OnThisRank):
            time.sleep(PATIENCE)  # the first one finds the same and says it, and all are ended
        where = f"shard {shard}: " if rank.several else ""
        raise UserError(f"{where}{error.problem}", error.remedy) from error
    except RuntimeError as error:
        if not parallel.lost(error):
            raise
        time.sleep(PATIENCE)  # torchrun ends this one, too
        raise UserError(
            f"another rank of shard {shard} ended", "see what it said; the same command goes on"
        ) from error
    if rank.number:
        return
    lacking = []
    if args.phase != "responses":
        lacking = wait_for(out, shard.others, lambda other: other.complete, rank.several)
        if not lacking:
            print_run(Run.open(out))
            return
    print_shard(run, shard, named(lacking), out)


class _Raising(Parser):
    """A parser for callers from Python: it raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, "see help(ia_mech.sample)")


def sample(
    out: str | Path | None = None, *, progress: "Progress | None" = None, **settings: Any
) -> "Run":
    """Make a run, or go on with it: ``python -m ia_mech.sample`` as a function.

    Args:
        out: the run's folder; ``cache/<model>-<dataset>-<hash>`` if None.
        progress: shows what is done; :class:`ia_mech.display.Bar` draws a bar. None shows nothing.
        settings: the command's flags with underscores, and their values: ``limit=6``,
            ``dataset="chats.jsonl"``, ``temperatures=[0.7, 1.0]``, ``contrasts=True``. None and
            False mean the default, as when a flag isn't given; all conversations are ``"all"``.

    Returns:
        The finished run.

    Raises:
        TypeError: no flag is called so.
        UserError: a value, data, a model or a folder that can't be used.
    """
    from ia_mech.collect.shards import WHOLE, Rank, Shard
    from ia_mech.display import Progress, Quiet

    if progress is None:
        progress = Quiet()
    elif isinstance(progress, type) or not isinstance(progress, Progress):
        raise UserError(
            f"progress={_shown(progress)} shows nothing", "give ia_mech.display.Bar(), or None"
        )
    parser = build_parser(_Raising)
    flags = {action.dest: action for action in parser._actions}
    commands = {"help", "help_all", "dry_run", "out", "ray", "tensor_parallel"}
    taken = sorted(flags.keys() - commands)
    words = _words(flags["out"], out)
    for name, value in settings.items():
        if name not in taken:
            raise TypeError(f"sample() has no {name!r}; it takes {', '.join(taken)}")
        words += _words(flags[name], value)

    args = parser.parse_args(words)
    config = parse_config(args)
    shard = Shard.parse(args.shard) if args.shard else WHOLE
    return _run(config, args.out or config.folder(), progress, args, shard, Rank())


def _words(action: argparse.Action, value: Any) -> list[str]:
    """A setting as it is on a command line.

    Raises:
        UserError: a value of a type that no flag has.
    """
    flag, several = action.option_strings[-1], action.nargs == "+"
    if value is None or value is False:
        return []
    if action.nargs == 0:
        if value is not True:
            raise UserError(f"{action.dest}={_shown(value)}", "give True or False")
        return [flag]
    listed = several and isinstance(value, Iterable) and not isinstance(value, str)
    values = list(value) if listed else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | Number | os.PathLike | date):
            kinds = "a text or a number" + (", or a list of these" if several else "")
            raise UserError(f"{action.dest}={_shown(value)}", f"give {kinds}")
    return [flag, *map(str, values)] if several else [f"{flag}={value}"]


def _shown(value: Any) -> str:
    return one_line(repr(value), 60)


def _run(
    config: "SampleConfig",
    out: Path,
    progress: "Progress",
    args: argparse.Namespace,
    shard: "Shard",
    rank: "Rank",
) -> "Run":
    import torch

    from ia_mech.collect.job import make_run

    before = torch.get_num_threads()
    torch.set_num_threads(args.threads or rank.threads(before))
    rank.take_device(config.model.device)
    try:
        return make_run(
            config,
            out,
            progress,
            repair=args.repair,
            shard=shard,
            phase=args.phase,
            wait=rank.several,
        )
    finally:
        torch.set_num_threads(before)


def _dry_run(config: "SampleConfig", out: Path, repair: bool, shard: "Shard") -> None:
    from ia_mech.collect.config import flag_of
    from ia_mech.collect.identity import build_chat, identity_asked_for
    from ia_mech.collect.preflight import make_plan, open_inputs
    from ia_mech.collect.summary import print_plan
    from ia_mech.engine.plan import batch_defaults
    from ia_mech.models.load import (
        load_tokenizer_and_config,
        resolve_device,
        resolve_dtype,
        stored_dtype,
    )
    from ia_mech.run import Run, layout
    from ia_mech.run.integrity import without_folders
    from ia_mech.run.writer import refuse_another

    inputs = open_inputs(config, out, shard, repair=repair)
    out = shard.folder(out)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    tokenizer, model_config = load_tokenizer_and_config(config.model)
    size = (stored_dtype(model_config) if isinstance(dtype, str) else dtype).itemsize
    chat, defaults = build_chat(config, tokenizer), batch_defaults(device)
    config = replace(config, batch_rows=config.batch_rows or defaults.batch_rows)
    plan = make_plan(config, inputs, chat, model_config, size, defaults, shard)
    there = None
    if (out / layout.RUN).is_file():
        there = Run(out) if repair else Run.open(out)
        wanted = identity_asked_for(config, chat, plan.conversations, inputs)
        kept = without_folders(there.record["identity"])
        found = {name: kept.get(name) for name in wanted}
        refuse_another(out, found, wanted, flag_of)
    print_plan(config, plan, out, there)


def _kept(out: Path | None) -> str:
    """What an interrupted run has on the disk."""
    done = {"responses": 0, "contexts": 0, "conversations": 0}
    if out is not None and (out / "manifest.json").is_file():
        # Without ia_mech.run, which imports torch: perhaps its import was interrupted.
        try:
            for part in json.loads((out / "manifest.json").read_text("utf-8"))["parts"]:
                done[part["kind"]] += part["contexts"]
        except Exception:  # damaged
            return f"{out} can't be read; the same command says what is wrong with it"
    if not any(done.values()):
        return "nothing was kept; the same command begins again"
    responses = f"responses kept: {done['responses']}, " if done["responses"] else ""
    return (
        f"{responses}contexts kept: {done['contexts']}, in {out}; "
        "the same command goes on from there"
    )
