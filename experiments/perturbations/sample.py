"""Sample the perturbed contexts, or find them sampled, and have them judged."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.perturbations.conditions import SWAP, perturbed
from experiments.perturbations.read import Base
from experiments.resample import chat_of, conversations_of, resampled
from experiments.swaps import Lenders, lender_of
from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.cli import quoted
from ia_mech.collect.identity import eos_ids
from ia_mech.data.conversations import Conversation
from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.judge.label import UNSEEN, label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.judge.verdict import identity_hash
from ia_mech.models.load import context_limit, load_tokenizer_and_config, recalled
from ia_mech.run import Run


def under_conditions(
    conversations: Sequence[Conversation],
    names: Iterable[str],
    chat: ChatFormat,
    seed: int,
    limit: int | None,
) -> tuple[list[Conversation], list[str], list[str]]:
    """Every conversation under every condition that the template can express.

    A condition that fits no conversation is left out. A conversation that some condition doesn't
    fit is left out of all, so that conditions stay comparable.

    Args:
        conversations: unperturbed.
        names: of the conditions.
        chat: the model's format.
        seed: of the draws.
        limit: tokens that a context may have, or None.

    Returns:
        The perturbed conversations, condition by condition; ids of the conversations left out; and
        a note for each thing left out.

    Raises:
        UserError: nothing is left.
    """
    lenders = Lenders([lender_of(one, chat.tokenizer) for one in conversations], seed)
    made: dict[str, dict[str, Conversation]] = {}
    failed: dict[str, str] = {}
    notes = []
    for name in names:
        done, problems = {}, {}
        for order, one in enumerate(conversations):
            try:
                done[one.id] = _made(one, order, name, seed, lenders, chat, limit)
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
            f"{len(failed)} conversations are left out of all conditions, since one of these can't "
            f"be made of them ({first}: {failed[first]})."
        )
    kept = [c.id for c in conversations if c.id not in failed]
    if not made or not kept:
        raise UserError(
            "no condition can be made of these conversations: "
            + (notes[0] if notes else "none was requested"),
            "give other runs, or other --conditions",
        )
    return [done[i] for done in made.values() for i in kept], list(failed), notes


def _made(
    conversation: Conversation,
    order: int,
    name: str,
    seed: int,
    lenders: Lenders,
    chat: ChatFormat,
    limit: int | None,
) -> Conversation:
    """A conversation under a condition; UserError if it can't be made or is too long."""
    if name == SWAP:
        sources = lenders.responses(order, 1)
        if not sources:
            raise UserError(
                "none of these conversations has another response of its dataset to swap with", ""
            )
        changed = perturbed(conversation, name, seed, sources[0].response)
        changed = replace(changed, metadata=changed.metadata | {"lender": sources[0].id})
    else:
        changed = perturbed(conversation, name, seed)
    context, turn = rendered(chat, changed)
    if limit is not None and len(context.ids) + len(turn or ()) > limit:
        raise UserError(f"its context has {len(context.ids)} tokens under {name}", "")
    return changed


def prepare(base: Base, names: list[str]) -> tuple[list[Conversation], list[str], list[str]]:
    """The perturbed conversations; see :func:`under_conditions`. Loads no weights."""
    first = base.runs[0]
    spec = recalled(first.settings, first.model["weights_hash"])
    tokenizer, model_config = load_tokenizer_and_config(spec)
    chat = chat_of(first, tokenizer, eos_ids(None, model_config))
    recorded = first.record["identity"]["chat"]["template_hash"]
    if chat.describe()["template_hash"] != recorded:
        raise UserError(
            f"the chat template of {first.model['name']} is not the one that {first.path} was "
            "sampled with",
            "sample the run again",
        )
    limit = context_limit(model_config)
    limit = None if limit is None else limit - base.settings.max_new_tokens
    originals = conversations_of(base.contexts)
    return under_conditions(originals, names, chat, base.settings.seed, limit)


def sampled(base: Base, conversations: list[Conversation], folder: Path) -> Run:
    """The run over these conversations; see :func:`experiments.resample.resampled`."""
    positions = [p for p in base.runs[0].positions if all(p in r.positions for r in base.runs)]
    header = tuple(p for p in positions if p.startswith("header_"))
    return resampled(
        base.runs[0],
        conversations,
        folder,
        header,
        temperatures=base.settings.temperatures,
        samples=base.settings.samples,
    )


def judged(run: Run, judge: str, base: Base) -> None:
    """Make sure that the judge of the unperturbed turns has judged the perturbed ones, too.

    Twice: against the response that the model was given, and against the unperturbed one. The rules
    judge does it now.

    Raises:
        UserError: another judge hasn't done it.
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
                f"run python -m ia_mech.judge run {quoted(run.path)} --name {name}{flag} with the "
                f"flags that judged {base.runs[0].path}, then this command again",
            )
        label_run(run, rules, name, Bar(), unperturbed=unperturbed)
