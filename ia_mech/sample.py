"""Sample user turns of a chat model and capture its residual stream at the user header.

Usage::

    python -m ia_mech.sample
    python -m ia_mech.sample --dataset chats.jsonl --limit all --temperatures 0.5 1.0 --samples 8
    python -m ia_mech.sample --model Qwen/Qwen3-0.6B --response generate --device cuda

What torch needs is imported late, so that ``--help`` and a mistyped flag answer at once.

The command line of ``python -m ia_mech.sample``: its flags, their help, and the configuration
they make.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech.cli import Parser, guarded, tolerant_streams, whole_from
from ia_mech.errors import UserError
from ia_mech.models import embedded

if TYPE_CHECKING:
    from ia_mech.collect.config import SampleConfig
    from ia_mech.run import Run

DESCRIPTION = """\
Give a chat model a query and an assistant response, open the *user* header of its own chat
template, and let it write the next user turn: greedily and at several temperatures. Every context
is run through the model once; that pass also yields the residual stream of every layer at the named
tokens around the user header, the logits at the header's last token, and the likelihood of the
user's real follow-up where the data has one. The run is a folder of Parquet and safetensors files
that pandas, datasets and safetensors open; ia_mech.run.Run.open reads it.
"""

EPILOG = """\
examples:
  python -m ia_mech.sample
      the embedded model on 24 built-in conversations, greedy + T 0.7, 1.0, 1.3 x 4 samples
  python -m ia_mech.sample --dry-run --limit all
      what a run over all 96 built-in conversations would do and write
  python -m ia_mech.sample --dataset chats.jsonl --limit all --response auto
      your own conversations (JSONL or Parquet), responses written by the model where missing
  python -m ia_mech.sample --model Qwen/Qwen3-0.6B --dataset gsm8k --response generate
      a hub model on a hub dataset, the model's own responses first, as the paper does

Runs and models are kept under cache/ in the working folder, or under $IA_MECH_CACHE.
An interrupted run goes on where it was when the same command is given again.
Exit status: 0 done, 2 bad input (one line says what and what to do), 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line, grouped as a reader would look for things."""
    parser = Parser(
        prog="python -m ia_mech.sample",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default=embedded.NAME,
        help="hub id, local directory, GGUF file, or the embedded %(default)s (default)",
    )
    model.add_argument("--revision", help="branch, tag or commit of a hub model (default: main)")
    model.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto: float32 on a CPU, the checkpoint's own on a GPU (default: auto)",
    )
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    model.add_argument(
        "--attention",
        default="auto",
        help="attention implementation of transformers: sdpa, eager, … (default: auto, which is "
        "sdpa where the architecture has it)",
    )
    model.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that a hub model brings; off unless asked for",
    )

    data = parser.add_argument_group("conversations")
    data.add_argument(
        "--dataset",
        default="builtin",
        help="builtin, builtin:maths|instructions|open, a JSONL, JSON or Parquet file, a preset "
        "(gsm8k, math-500, ifeval, ifbench, healthbench, coval, mt-bench, wildchat), or a hub id "
        "(default: builtin)",
    )
    data.add_argument("--subset", help="configuration of a hub dataset")
    data.add_argument("--split", help="split of a hub dataset")
    data.add_argument(
        "--limit",
        type=_limit,
        default=24,
        help="how many conversations, from the start, or: all (default: 24)",
    )
    data.add_argument(
        "--format",
        choices=["auto", "messages", "sharegpt", "qa", "turns"],
        default="auto",
        help="how the rows hold a conversation (default: told from the columns)",
    )
    for name, what in (
        ("id", "ids"),
        ("source", "ids of the original prompt, where several rows share one"),
        ("messages", "the list of messages or turns"),
        ("query", "the user's query"),
        ("response", "the assistant's response"),
        ("followup", "what the user really said next"),
        ("answer", "the gold answer"),
    ):
        data.add_argument(f"--{name}-column", metavar="NAME", help=f"column with {what}")
    data.add_argument(
        "--cut",
        choices=["first", "last"],
        default="first",
        help="where longer conversations are cut: after the first response, or before the last "
        "user turn (default: first)",
    )
    data.add_argument(
        "--response",
        choices=["given", "generate", "auto"],
        default="auto",
        help="given: the data's response; generate: the model writes it greedily; auto: it writes "
        "the missing ones (default: auto)",
    )
    data.add_argument(
        "--max-response-tokens",
        type=int,
        default=512,
        help="where generated responses are cut off; such responses are flagged (default: 512)",
    )

    chat = parser.add_argument_group("chat template")
    chat.add_argument(
        "--system", help="system message (default: whatever the template does without one)"
    )
    chat.add_argument(
        "--thinking",
        choices=["template", "keep"],
        default="template",
        help="template: render the response as the template does once a user turn follows; keep: "
        "as it does when the response is last, with its thinking block (default: template)",
    )
    chat.add_argument(
        "--date",
        default=None,
        help="YYYY-MM-DD, for templates that print today's date; fixed so that ids don't change at "
        "midnight (default: 2026-01-01)",
    )

    decoding = parser.add_argument_group("decoding and capture")
    decoding.add_argument(
        "--temperatures",
        nargs="+",
        default=["0.7", "1.0", "1.3"],
        metavar="T",
        help="temperatures besides greedy, which is always there (default: 0.7 1.0 1.3)",
    )
    decoding.add_argument(
        "--samples", type=int, default=4, help="user turns per temperature (default: 4)"
    )
    decoding.add_argument(
        "--max-new-tokens", type=int, default=40, help="longest user turn (default: 40)"
    )
    decoding.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    decoding.add_argument(
        "--positions",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="tokens whose residual stream is kept: all, header, or names such as response_end "
        "turn_end header_last (default: all)",
    )
    decoding.add_argument(
        "--header-logits",
        type=_header_logits,
        default="full",
        metavar="full|K|none",
        help="keep all logits at the header's last token (float16), the K largest with the others' "
        "mass, or none (default: full)",
    )
    decoding.add_argument(
        "--batch-rows",
        type=int,
        help="most rows decoded together; halved by itself where memory is too little "
        "(default: 128 on a CPU, 1024 on a GPU)",
    )
    decoding.add_argument(
        "--engine",
        choices=["auto", "shared", "portable"],
        default="auto",
        help="shared: the rows of a context attend to its keys and values in one place, exactly; "
        "portable: each row has a copy; auto: shared in the layers that allow it, said at the "
        "start and recorded (default: auto)",
    )

    scoring = parser.add_argument_group("likelihood of given turns")
    scoring.add_argument(
        "--swaps",
        type=whole_from(0),
        default=4,
        metavar="K",
        help="score the users' real follow-ups after K other conversations' responses as well, "
        "after an empty one and after the bare user header (default: 4)",
    )
    scoring.add_argument(
        "--score-generations",
        action="store_true",
        help="and the generations too; --dry-run says what that costs",
    )
    scoring.add_argument(
        "--candidates",
        metavar="FILE",
        help='your own rivals of the real follow-up, JSONL: {"name": …, "text": …}, for one '
        'conversation with "id"; besides the query, the response, another follow-up and a closing',
    )

    run = parser.add_argument_group("run")
    run.add_argument(
        "--out", type=Path, help="the run's folder (default: cache/<model>-<dataset>-<hash>)"
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be done and written, and stop; needs the tokenizer, and so fetches "
        "the embedded model if it isn't there yet",
    )
    run.add_argument(
        "--repair", action="store_true", help="compute damaged parts of an existing run again"
    )
    return parser


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
    return text.isascii() and text.isdigit() and int(text) > 0


def _temperatures(words: list[str]) -> tuple[float, ...]:
    pieces = [piece.strip() for word in words for piece in word.split(",") if piece.strip()]
    given = f"--temperatures {' '.join(words)}"
    if not pieces:
        raise UserError(f"{given}: no number", "give for example 0.7 1.0")
    try:
        return tuple(float(piece) for piece in pieces)
    except ValueError:
        raise UserError(f"{given}: not all are numbers", "give for example 0.7 1.0") from None


def _date(text: str) -> str:
    with contextlib.suppress(ValueError):
        if date.fromisoformat(text).isoformat() == text:  # 20260101 would be another configuration
            return text
    raise UserError(f"--date {text!r} is not a date", "give it as YYYY-MM-DD")


def parse_config(args: argparse.Namespace) -> "SampleConfig":
    """A ``SampleConfig`` from parsed arguments.

    Raises:
        UserError: a value that can't be.
    """
    from ia_mech.chat.template import PINNED_DATE
    from ia_mech.collect.config import SampleConfig
    from ia_mech.data.formats import ColumnMap
    from ia_mech.engine.plan import Grid
    from ia_mech.models.load import ModelSpec

    for flag in ("batch_rows", "max_response_tokens"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value}", "give at least 1")
    return SampleConfig(
        model=ModelSpec(
            name=args.model,
            revision=args.revision,
            dtype=args.dtype,
            device=args.device,
            attention=args.attention,
            trust_remote_code=args.trust_remote_code,
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
        max_response_tokens=args.max_response_tokens,
        grid=Grid(_temperatures(args.temperatures), args.samples, args.max_new_tokens, args.seed),
        system=args.system,
        thinking=args.thinking,
        date=PINNED_DATE if args.date is None else _date(args.date),
        positions=tuple(args.positions),
        header_logits=args.header_logits,
        batch_rows=args.batch_rows,
        swaps=args.swaps,
        score_generations=args.score_generations,
        candidates=args.candidates,
        engine=args.engine,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    tolerant_streams()
    args = build_parser().parse_args(argv)
    out: Path | None = args.out

    def body() -> None:
        nonlocal out
        config = parse_config(args)
        out = out or default_out(config)
        if args.dry_run:
            _dry_run(config, out)
        else:
            from ia_mech.collect.summary import print_run

            print_run(_sample(config, out, args.repair))

    return guarded(body, lambda: _kept(out))


def default_out(config: "SampleConfig") -> Path:
    """``cache/<model>-<dataset>-<hash>``: the same command, the same folder."""
    text = json.dumps(asdict(config), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    model = Path(os.path.abspath(config.model.name)).name  # a name for "." too
    names = [model, Path(config.dataset).stem, digest]
    words = ["".join(c if c.isalnum() or c in ".-" else "-" for c in name) for name in names]
    return embedded.cache_dir() / "-".join(words).lower()


def _dry_run(config: "SampleConfig", out: Path) -> None:
    from ia_mech.collect.identity import build_chat
    from ia_mech.collect.preflight import check_folder, make_plan
    from ia_mech.collect.summary import print_plan
    from ia_mech.likelihood.candidates import OwnCandidates
    from ia_mech.models.load import (
        load_tokenizer_and_config,
        resolve_device,
        resolve_dtype,
        stored_dtype,
    )

    check_folder(out)
    own = None if config.candidates is None else OwnCandidates.read(config.candidates)
    dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
    tokenizer, model_config = load_tokenizer_and_config(config.model)
    if dtype == "auto":
        dtype = stored_dtype(model_config)
    size = dtype.itemsize
    plan = make_plan(config, build_chat(config, tokenizer), model_config, size, own)
    print_plan(config, plan, out)


def _sample(config: "SampleConfig", out: Path, repair: bool) -> "Run":
    from safetensors import SafetensorError

    from ia_mech.collect.job import collect
    from ia_mech.display import Bar
    from ia_mech.lens import save_lens
    from ia_mech.models.load import load

    _check_input(config, out, repair)
    subject = load(config.model)
    about = subject.describe()
    bar = Bar(
        f"{config.model.name}: {about['layers']} layers, d_model {about['d_model']}, "
        f"{about['dtype']} on {about['device']}, weights {about['weights_hash']}"
    )
    run = collect(config, subject, out, bar, repair=repair)
    if not bar.started:
        print(f"{out} was finished before; nothing was computed again", file=sys.stderr)
    try:
        problem = save_lens(subject, run.contexts["token_ids"].iloc[0].tolist()[:64])
    except (OSError, SafetensorError, RuntimeError) as error:  # the run is whole without it
        problem = str(error)
    if problem:
        print(f"note: no offline lens for this model: {problem}", file=sys.stderr)
    return run


def _check_input(config: "SampleConfig", out: Path, repair: bool = False) -> None:
    """Refuse what can be refused before a model of perhaps many gigabytes is fetched and loaded.

    Raises:
        UserError: a device, folder, dataset, template or position that can't be.
    """
    from ia_mech.collect.identity import build_chat
    from ia_mech.collect.preflight import check_folder, kept_positions, open_source
    from ia_mech.likelihood.candidates import OwnCandidates
    from ia_mech.models.load import load_tokenizer_and_config, resolve_device
    from ia_mech.run import layout

    resolve_device(config.model.device)
    check_folder(out)
    if repair and not (out / layout.RUN).is_file():
        raise UserError(f"there is no run in {out} to repair", "leave --repair out to begin one")
    open_source(config)
    if config.candidates is not None:
        OwnCandidates.read(config.candidates)
    tokenizer, _ = load_tokenizer_and_config(config.model)
    kept_positions(config, build_chat(config, tokenizer))


def _kept(out: Path | None) -> str:
    """What an interrupted run has on the disk."""
    from ia_mech.run import layout

    if out is None or not (out / layout.MANIFEST).is_file():
        return "nothing was written yet"
    parts = layout.read_json(out / layout.MANIFEST)["parts"]
    done = {
        kind: sum(part["contexts"] for part in parts if part["kind"] == kind)
        for kind in ("responses", "contexts")
    }
    responses = f"responses kept: {done['responses']}, " if done["responses"] else ""
    return (
        f"{responses}contexts kept: {done['contexts']}, in {out}; "
        "the same command goes on from there"
    )


if __name__ == "__main__":
    sys.exit(main())
