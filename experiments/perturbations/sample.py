"""Sample the perturbed contexts, or find them sampled, and have them judged."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.perturbations.base import Base, config_of, conversations_of, under_conditions
from ia_mech.config import SampleConfig
from ia_mech.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.identity import build_chat, eos_ids
from ia_mech.judge.commands import Bar as JudgeBar
from ia_mech.judge.label import UNSEEN, label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.judge.verdict import identity_hash
from ia_mech.models import context_limit, load, load_tokenizer_and_config
from ia_mech.run import Run, layout

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
    from ia_mech.collect import collect
    from ia_mech.terminal import Bar

    subject = load(config.model)
    of = base.runs[0].model
    if subject.weights_hash != of["weights_hash"]:
        raise UserError(
            f"{config.model.name} has the weights {subject.weights_hash} now, "
            f"{base.runs[0].path} those of {of['weights_hash']}",
            "give --model of the same weights, or sample the run again",
        )
    rows = contexts * len(config.grid.rows())
    print(f"{contexts} perturbed contexts, {rows} user turns, to {out}", file=sys.stderr)
    return collect(config, subject, out, Bar(f"{config.model.name} on {subject.device}"))


def judged(run: Run, judge: str, base: Base) -> None:
    """See that a judge has said of the perturbed turns what it has said of the unperturbed ones.

    Twice: of the response that the model was given, and of the unperturbed one. The rules judge
    does it now.

    Raises:
        UserError: another judge hasn't.
    """
    own = base.runs[0].labels.record("judgements", judge).get("identity", {})
    rules = RulesJudge()
    for name, unperturbed in ((judge, False), (judge + UNSEEN, True)):
        if name in run.labels.judges:
            continue
        if identity_hash(own) != identity_hash(rules.identity):
            flag = " --unperturbed" if unperturbed else ""
            raise UserError(
                f"{run.path} has not been judged by {judge!r}"
                + (" against the unperturbed responses" if unperturbed else ""),
                f"run python -m ia_mech.judge run {run.path} --name {name}{flag} with the flags "
                f"that judged {base.runs[0].path}, then this command again",
            )
        label_run(run, rules, name, JudgeBar(), unperturbed=unperturbed)
