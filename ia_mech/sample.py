"""Sample user turns of a chat model and capture its residual stream at the user header.

Usage::

    python -m ia_mech.sample
    python -m ia_mech.sample --dataset chats.jsonl --limit all --temperatures 0.5 1.0 --samples 8
    python -m ia_mech.sample --model Qwen/Qwen3-0.6B --response generate --device cuda

What torch needs is imported late, so that ``--help`` and a mistyped flag answer at once.
"""

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ia_mech import embedded
from ia_mech.cli import guarded, tolerant_streams
from ia_mech.errors import UserError
from ia_mech.options import build_parser, parse_config

if TYPE_CHECKING:
    from ia_mech.config import SampleConfig
    from ia_mech.run import Run


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
            from ia_mech.terminal import print_run

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
    from ia_mech.identity import build_chat
    from ia_mech.intake import check_folder, make_plan
    from ia_mech.models import (
        load_tokenizer_and_config,
        resolve_device,
        resolve_dtype,
        stored_dtype,
    )
    from ia_mech.scoring.candidates import OwnCandidates
    from ia_mech.terminal import print_plan

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

    from ia_mech.collect import collect
    from ia_mech.lens import save_lens
    from ia_mech.models import load
    from ia_mech.terminal import Bar

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
    from ia_mech.identity import build_chat
    from ia_mech.intake import check_folder, kept_positions, open_source
    from ia_mech.models import load_tokenizer_and_config, resolve_device
    from ia_mech.run import layout
    from ia_mech.scoring.candidates import OwnCandidates

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
