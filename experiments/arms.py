"""Arms: conditions under which a run's turns are sampled anew, and how they compare with it.

An arm changes the conversations, the settings, or what happens while a context is prefilled. It is
sampled with the model and all other settings of the first run. Its folder holds
``conversations.jsonl`` and ``run/``, a run like any other, which goes on where it was interrupted.
Its turns are judged as the first run's were.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ia_mech.cli import shell_word
from ia_mech.data.conversations import Conversation
from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.judge import builtin_judge
from ia_mech.judge.judging import ON_UNPERTURBED, label_run
from ia_mech.judge.verdict import identity_hash
from ia_mech.rates.load import NO_ANNOTATOR, JudgedTurns, read_runs
from ia_mech.run import Run, integrity, layout
from ia_mech.run.integrity import without_folders
from ia_mech.run.writer import refuse_another
from ia_mech.settings import Settings, flag_of

if TYPE_CHECKING:
    from experiments.units import Loaded
    from ia_mech.chat.format import ChatFormat
    from ia_mech.collect.job import Interventions

CONVERSATIONS, RUN = "conversations.jsonl", "run"
CHANGES = "changes"  # of a conversation's metadata: a hash of what is changed in its pass
# Settings of a run that an arm shares with it, unless it says otherwise.
CHAT = ("system", "thinking", "chat_template", "template_option", "date", "opening")
DECODING = ("temperatures", "samples", "max_new_tokens", "seed")
SHARED = (
    *CHAT,
    *DECODING,
    *("revision", "random_blocks", "dtype", "device", "attention", "trust_remote_code"),
    *("device_map", "batch_rows", "ignore_check"),
)
POSITIONS = ("header_last",)  # where the residual stream of arms is kept


@dataclass(frozen=True)
class Arm:
    """A condition under which turns are sampled.

    Attributes:
        conversations: with their responses.
        settings: in which the arm's run differs from the first one.
        interventions: what is changed in each context while it is prefilled, as of
            :func:`ia_mech.collect.job.collect`.
        turns: about how many there are after each context, where settings don't say it.
        flags: of the experiment that change a setting, where they aren't called as it is.
    """

    conversations: Sequence[Conversation]
    settings: Mapping[str, Any] = field(default_factory=dict)
    interventions: "Interventions | None" = None
    turns: int | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    def rows(self, first: Run) -> int:
        """Turns after each context."""
        of = first.settings | dict(self.settings)
        return self.turns or len(of["temperatures"]) * of["samples"] + 1

    def turns_text(self, count: int) -> str:
        """So many turns, in words."""
        return f"{'about ' * (self.turns is not None)}{count} user turns"


# -- sampled ---------------------------------------------------------------------------------------


def conversations_of(contexts: pd.DataFrame) -> list[Conversation]:
    """The conversations of contexts, with the response that each was given."""

    def text_of(value: Any) -> str | None:
        return value if isinstance(value, str) else None  # pandas has NaN for none

    return [
        Conversation(
            id=row["context_id"],
            source_id=row["source_id"],
            dataset=row["dataset"],
            messages=tuple(row["messages"]),
            real_follow_up=text_of(row["real_follow_up"]),
            answer=text_of(row["answer"]),
            metadata=json.loads(row["metadata"]),
            finish_reason=text_of(row["response_finish_reason"]),
        )
        for row in contexts.to_dict("records")
    ]


def told_apart(arm: Arm, chat: "ChatFormat") -> list[Conversation]:
    """The conversations of an arm. Each names in its metadata what is changed while it is
    prefilled, by its content, so that other changes are another run."""
    from ia_mech.chat.headers import context_and_real_follow_up

    if arm.interventions is None:
        return list(arm.conversations)
    found = []
    for one in arm.conversations:
        hashed = hashlib.blake2b(digest_size=8)
        for value in _parts(arm.interventions(one, context_and_real_follow_up(chat, one)[0])):
            hashed.update(value + b"\x1f")
        found.append(replace(one, metadata=one.metadata | {CHANGES: hashed.hexdigest()}))
    return found


def _parts(value: Any) -> Iterator[bytes]:
    """The content of changes, piece by piece."""
    if is_dataclass(value):
        yield type(value).__name__.encode()
        value = [getattr(value, one.name) for one in fields(value)]
    if isinstance(value, list | tuple):
        for one in value:
            yield from _parts(one)
    elif hasattr(value, "detach"):
        yield value.detach().float().cpu().numpy().tobytes()
    else:
        yield repr(value).encode()


class ArmRun:
    """The run of an arm in a folder, ``folder/run``, beside the conversations that it is of.

    Args:
        of: the model of the run whose settings are used; it is loaded where something is left to
            sample.
        arm: what differs; with the setting ``intervention``, a file with a steering vector.
        folder: made if it isn't there.

    Raises, in both methods:
        UserError: the folder holds other conversations or changes, or a run without them.
    """

    def __init__(self, of: "Loaded", arm: Arm, folder: Path) -> None:
        self.of, self.arm, self.out = of, arm, folder / RUN
        # Absolute, for the path is part of the run's configuration, wherever the command is given.
        self.file = folder.resolve() / CONVERSATIONS
        lines = (json.dumps(one.to_dict(), ensure_ascii=False) for one in told_apart(arm, of.chat))
        self.content = "".join(f"{line}\n" for line in lines).encode()

    def sample(self) -> Run:
        """The run: sampled, continued, or as it is."""
        from ia_mech.collect.job import collect
        from ia_mech.collect.plan import Plan

        if (run := self.finished()) is not None:
            return run
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not self.same:
            integrity.replace_file(self.file, lambda scratch: scratch.write_bytes(self.content))
        settings, used, contexts = self.settings, self.of.team, len(self.arm.conversations)
        many = f"{contexts} conversation{'s' * (contexts > 1)}"
        turns = f"{many}, {self.arm.turns_text(contexts * self.arm.rows(self.of.run))}"
        print(f"{turns}, {settings.model} on {used.device}, to {self.out}", file=sys.stderr)
        plan = Plan(settings, self.out, device=used.device)
        return collect(plan, used, Bar(), crew=self.of.crew, interventions=self.arm.interventions)

    @property
    def same(self) -> bool:
        """Whether it holds the arm's conversations."""
        return self.file.is_file() and self.file.read_bytes() == self.content

    @property
    def settings(self) -> Settings:
        """Of the arm's run."""
        first, model, changes = self.of.run, self.of.spec, dict(self.arm.settings)
        if vector := changes.get("intervention"):
            changes["intervention"] = str(vector)
        return Settings(
            **{name: first.settings[name] for name in SHARED}
            | {"model": model.name, "adapter": model.adapter, "dataset": str(self.file)}
            | {"limit": None, "response": "given", "header_logits": "none", "positions": POSITIONS}
            | changes
        )

    def _flag_of(self, path: str) -> str:
        return self.arm.flags.get(path.removeprefix("settings."), flag_of(path))

    def finished(self) -> Run | None:
        """The run, if it is there and whole."""
        from ia_mech.steering import SteeringVector

        if not (self.out / layout.RUN).is_file():
            return None
        if not self.same:
            differs = "holds other conversations, or other conditions, than these"
            raise UserError(
                f"{self.file} {differs if self.file.is_file() else 'is missing'}",
                f"give another --out, what it was made with, or remove {self.out.parent}",
            )
        there, vector = Run.open(self.out, unfinished=True), self.arm.settings.get("intervention")
        wanted: dict[str, Any] = {"settings": self.settings.to_dict(), "intervention": None}
        if vector:  # not its file's name, tells runs apart
            wanted["intervention"] = SteeringVector.load(vector).sha256
        same_weights = there.model["weights_hash"] == self.of.run.model["weights_hash"]
        known = {"identity": without_folders(wanted)}
        refuse_another(self.out, there.record, known, self._flag_of, same_weights)
        return there if there.complete else None


# -- judged ----------------------------------------------------------------------------------------


def judge_alike(first: Run, runs: Sequence[Run], judge: str, *, unperturbed: bool = False) -> None:
    """Have runs labelled by the judge of a first one, if they aren't yet.

    ``unperturbed``: also after the unchanged responses; those labels' name has another end.

    Raises:
        UserError: it isn't the built-in judge: the user has to run it.
    """
    names = {judge: False} | ({judge + ON_UNPERTURBED: True} if unperturbed else {})
    todo = [(run, name) for name in names for run in runs if name not in run.labels.judges]
    own, ours = first.labels.record("judgements", judge).get("identity", {}), builtin_judge()
    if todo and identity_hash(own) != identity_hash(ours.identity):
        commands = []
        for name in dict.fromkeys(name for _, name in todo):
            paths = " ".join(shell_word(run.path) for run, own in todo if own == name)
            flags = f"--name {name}{' --unperturbed' * names[name]}"
            commands.append(f"for run in {paths}; do ia-mech judge run $run {flags}; done")
        lacking = list(dict.fromkeys(str(run.path) for run, _ in todo))
        more = f" and {len(lacking) - 1} more runs" if len(lacking) > 1 else ""
        raise UserError(
            f"{lacking[0]}{more}: not judged by {judge!r}",
            f"run {' and '.join(commands)} with the flags that judged {first.path}, then this "
            "command again",
        )
    for run, name in todo:
        label_run(run, ours, name, Bar(), unperturbed=names[name])


def verdicts_of(runs: Sequence[Run], judge: str | None) -> JudgedTurns:
    """The turns of runs with a judge's verdicts; no annotations are read."""
    return read_runs(runs, judge, NO_ANNOTATOR)
