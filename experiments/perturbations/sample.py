"""Sample the perturbed contexts, or find them sampled, and have them judged.

The unperturbed runs: what of them is used, and their conversations under every condition.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from experiments.common.command import of_one_model, open_runs, unperturbed
from experiments.perturbations.conditions import CONDITIONS, SWAP, perturbed
from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.identity import build_chat, eos_ids
from ia_mech.data.conversations import Conversation
from ia_mech.display import Bar
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.judge.label import UNSEEN, label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.judge.verdict import identity_hash
from ia_mech.likelihood.swaps import SwapSources
from ia_mech.models.load import ModelSpec, context_limit, load, load_tokenizer_and_config
from ia_mech.run import Run, layout

# What the perturbed contexts take over from the runs, which therefore have to agree in it.
SHARED = ("system", "thinking", "date")


@dataclass(frozen=True)
class Base:
    """Unperturbed contexts and how they were sampled.

    Attributes:
        runs: where they are.
        grid: what the conditions are compared on: of what all runs have.
        contexts: one row per context that is used: ``run`` (its folder), ``row`` (its place among
            the run's contexts) and the columns of these.
    """

    runs: list[Run]
    grid: Grid
    contexts: pd.DataFrame

    @property
    def shared(self) -> dict:
        """The settings that all runs share, and so do the perturbed contexts."""
        return {name: self.runs[0].config[name] for name in SHARED}


def read_base(
    paths: Sequence[str | Path],
    *,
    limit: int | None = None,
    temperatures: Sequence[float] | None = None,
    samples: int | None = None,
) -> Base:
    """Read the unperturbed runs.

    Args:
        paths: the runs' folders.
        limit: contexts per run, from the start; None for all.
        temperatures: besides greedy; 1 if not given (if the runs have it, else all they share).
        samples: per temperature; 4 if not given (or as many as the runs have).

    Raises:
        UserError: runs of several models or settings, perturbed ones, one source twice, or
            decoding that they lack.
    """
    runs = unperturbed(of_one_model(open_runs(paths)))
    for name in (*SHARED, "dtype"):
        settings = [run.config.get(name, run.model.get(name)) for run in runs]
        _same(runs, name, settings)
    for name in ("max_new_tokens", "seed"):
        _same(runs, name, [run.config["grid"][name] for run in runs])
    grids = [run.config["grid"] for run in runs]
    common = set.intersection(*(set(grid["temperatures"]) for grid in grids))
    if temperatures is None:
        temperatures = [1.0] if 1.0 in common else sorted(common)
    missing = [t for t in temperatures if t not in common]
    if missing or not temperatures:
        has = ", ".join(f"{t:g}" for t in sorted(common)) or "none but greedy"
        asked = f"temperature {missing[0]:g} is not in all runs" if missing else "no temperature"
        raise UserError(f"{asked} (they have {has})", "give --temperatures of these")
    most = min(grid["samples"] for grid in grids)
    samples = min(4, most) if samples is None else samples
    if samples > most:
        raise UserError(f"--samples {samples}: the runs have {most}", f"give at most {most}")
    first = grids[0]
    grid = Grid(tuple(temperatures), samples, first["max_new_tokens"], first["seed"])
    used = [
        run.contexts.assign(run=str(run.path), row=range(len(run.contexts))).head(
            len(run.contexts) if limit is None else limit
        )
        for run in runs
    ]
    contexts = pd.concat(used, ignore_index=True)
    _check(contexts)
    return Base(runs, grid, contexts)


def _same(runs: list[Run], name: str, settings: list) -> None:
    for run, setting in zip(runs, settings, strict=True):
        if setting != settings[0]:
            raise UserError(
                f"{runs[0].path} and {run.path} differ in {name} ({settings[0]!r}, {setting!r})",
                "perturb them apart",
            )


def _check(contexts: pd.DataFrame) -> None:
    twice = contexts[contexts.duplicated("context_id")]
    if len(twice):
        raise UserError(
            f"context {twice['context_id'].iloc[0]} is in two runs",
            "give one of them, or perturb them apart if these are different conversations",
        )


def conversations_of(contexts: pd.DataFrame) -> list[Conversation]:
    """The conversations of contexts, with the response that each was given."""
    found = []
    for _, row in contexts.iterrows():
        text = {name: row[name] for name in ("reference", "answer")}
        found.append(
            Conversation(
                id=row["context_id"],
                source_id=row["source_id"],
                dataset=row["dataset"],
                messages=tuple(dict(message) for message in row["messages"]),
                **{name: one if isinstance(one, str) else None for name, one in text.items()},
                metadata=json.loads(row["metadata"])
                | {"response_cut_off": bool(row["response_cut_off"])},
            )
        )
    return found


def under_conditions(
    conversations: Sequence[Conversation],
    names: Iterable[str],
    chat: ChatFormat,
    seed: int,
    room: int | None,
) -> tuple[list[Conversation], list[str], list[str]]:
    """Every conversation under every condition that the template can express.

    A condition that no conversation can be put under is left out; a conversation that some
    condition can't be made of is left out of all, so that conditions stay comparable.

    Args:
        conversations: unperturbed.
        names: of the conditions.
        chat: the model's format.
        seed: of the draws.
        room: most tokens that a context may have, or None.

    Returns:
        The perturbed conversations, condition by condition; ids of the conversations left out; and
        a note for each thing left out.

    Raises:
        UserError: nothing is left.
    """
    donors = SwapSources.of(
        ((i, c, None) for i, c in enumerate(conversations)), chat.tokenizer, seed
    )
    made: dict[str, dict[str, Conversation]] = {}
    failed: dict[str, str] = {}
    notes = []
    for name in names:
        done, problems = {}, {}
        for order, one in enumerate(conversations):
            try:
                done[one.id] = _made(one, order, name, seed, donors, chat, room)
            except UserError as error:
                problems[one.id] = error.problem
        if not done:
            notes.append(f"condition {name} is left out: {next(iter(problems.values()))}.")
            continue
        made[name] = done
        failed |= problems
    if failed:
        first = next(iter(failed))
        notes.append(
            f"{len(failed)} conversations are left out of all conditions, since one of them can't "
            f"be made of them ({first}: {failed[first]})."
        )
    kept = [c.id for c in conversations if c.id not in failed]
    if not made or not kept:
        raise UserError(
            "no condition can be made of these conversations: "
            + (notes[0] if notes else "none was asked for"),
            "give other runs, or other --conditions",
        )
    return [done[i] for done in made.values() for i in kept], list(failed), notes


def _made(
    conversation: Conversation,
    order: int,
    name: str,
    seed: int,
    donors: SwapSources,
    chat: ChatFormat,
    room: int | None,
) -> Conversation:
    lender = None
    if name == SWAP:
        lenders = donors.responses(order, 1)
        if not lenders:
            raise UserError(
                "none of these conversations has another response of its dataset to swap with", ""
            )
        lender = lenders[0]
    changed = perturbed(conversation, name, seed, lender and lender.response)
    if lender is not None:
        changed = replace(changed, metadata=changed.metadata | {"lender": lender.id})
    context, turn = rendered(chat, changed)
    if room is not None and len(context.ids) + len(turn or ()) > room:
        raise UserError(f"its context has {len(context.ids)} tokens under {name}", "")
    return changed


def config_of(base: Base, file: Path, positions: tuple[str, ...]) -> SampleConfig:
    """The configuration of the run over the perturbed conversations in a file."""
    first = base.runs[0].config
    return SampleConfig(
        model=ModelSpec(**first["model"]),
        dataset=str(file),
        limit=None,
        response="given",
        grid=base.grid,
        positions=positions,
        header_logits="none",
        batch_rows=first["batch_rows"],
        engine=first.get("engine", "portable"),  # runs of before there was a choice
        swaps=0,
        **base.shared,
    )


def known_conditions(names: Sequence[str]) -> list[str]:
    """The conditions asked for, in their usual order.

    Raises:
        UserError: an unknown name.
    """
    unknown = [name for name in names if name not in CONDITIONS]
    if unknown:
        raise UserError(f"no condition {unknown[0]!r}", f"use {', '.join(CONDITIONS)}")
    return [name for name in CONDITIONS if name in names]


CONVERSATIONS, RUN = "conversations.jsonl", "run"


def prepare(base: Base, names: list[str]) -> tuple[list[Conversation], list[str], list[str]]:
    """The perturbed conversations; see :func:`under_conditions`. Loads no weights."""
    first = base.runs[0].config
    config = config_of(base, Path("-"), ())
    tokenizer, model_config = load_tokenizer_and_config(config.model)
    chat = build_chat(config, tokenizer, eos_ids(None, model_config))
    recorded = base.runs[0].record["identity"]["chat"]["template_hash"]
    if chat.describe()["template_hash"] != recorded:
        raise UserError(
            f"the chat template of {first['model']['name']} is not the one that "
            f"{base.runs[0].path} was sampled with",
            "sample the run again",
        )
    limit = context_limit(model_config)
    room = None if limit is None else limit - base.grid.max_new_tokens
    originals = conversations_of(base.contexts)
    return under_conditions(originals, names, chat, base.grid.seed, room)


def sampled(base: Base, conversations: list[Conversation], folder: Path) -> Run:
    """The run over these conversations in ``folder``: sampled now, gone on with, or as it is.

    Raises:
        UserError: the folder holds other conversations, the model has other weights than the runs'.
    """
    # Absolute, for the path is part of the run's configuration, wherever the command is given.
    file, out = folder.resolve() / CONVERSATIONS, folder / RUN
    text = "".join(json.dumps(c.to_dict(), ensure_ascii=False) + "\n" for c in conversations)
    if (out / layout.RUN).is_file() and (not file.is_file() or file.read_text("utf-8") != text):
        raise UserError(
            f"{folder} holds other conversations, or other conditions, than these",
            "give another --out, or what it was made with",
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not file.is_file() or file.read_text("utf-8") != text:
        layout.replace_file(file, lambda scratch: scratch.write_text(text, "utf-8"))
    positions = [p for p in base.runs[0].positions if all(p in r.positions for r in base.runs)]
    config = config_of(base, file, tuple(p for p in positions if p.startswith("header_")))
    if (out / layout.RUN).is_file():
        there = Run.open(out)
        asked = json.loads(json.dumps(asdict(config)))
        if there.complete and there.config | {"dataset": str(file)} == asked:
            return there
    return _sample(base, config, out, len(conversations))


def _sample(base: Base, config: SampleConfig, out: Path, contexts: int) -> Run:
    from ia_mech.collect.job import collect
    from ia_mech.display import Bar

    subject = load(config.model)
    of = base.runs[0].model
    if subject.weights_hash != of["weights_hash"]:
        raise UserError(
            f"{config.model.name} has the weights {subject.weights_hash} now, "
            f"{base.runs[0].path} those of {of['weights_hash']}",
            "give --model of the same weights, or sample the run again",
        )
    rows = contexts * len(config.grid.rows())
    where = f"{config.model.name} on {subject.device}"
    print(f"{contexts} perturbed contexts, {rows} user turns, {where}, to {out}", file=sys.stderr)
    return collect(config, subject, out, Bar())


def judged(run: Run, judge: str, base: Base) -> None:
    """See that a judge has said of the perturbed turns what it has said of the unperturbed ones.

    Twice: of the response that the model was given, and of the unperturbed one. The rules judge
    does it now.

    Raises:
        UserError: another judge hasn't.
    """
    own = base.runs[0].labels.record("judgements", judge).get("identity", {})
    rules = RulesJudge()
    for name, unseen in ((judge, False), (judge + UNSEEN, True)):
        if name in run.labels.judges:
            continue
        if identity_hash(own) != identity_hash(rules.identity):
            flag = " --unperturbed" if unseen else ""
            raise UserError(
                f"{run.path} has not been judged by {judge!r}"
                + (" against the unperturbed responses" if unseen else ""),
                f"run python -m ia_mech.judge run {run.path} --name {name}{flag} with the flags "
                f"that judged {base.runs[0].path}, then this command again",
            )
        label_run(run, rules, name, Bar(), unperturbed=unseen)
