"""Sample and judge changed conversations with the model, the settings and the judge of a run.

The changed conversations are written to ``conversations.jsonl`` in the experiment's folder, and
sampled to ``run/`` there, which is a run like any other and goes on where it was interrupted.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ia_mech.chat.format import ChatFormat
from ia_mech.cli import shell_word
from ia_mech.collect.identity import build_chat
from ia_mech.collect.job import Interventions, collect
from ia_mech.data.conversations import Conversation
from ia_mech.display import Bar
from ia_mech.engine.workers import ANY, Crew
from ia_mech.errors import UserError
from ia_mech.judge.judging import ON_UNPERTURBED, label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.judge.verdict import identity_hash
from ia_mech.models.load import Subject, load, recall
from ia_mech.run import Run, integrity, layout
from ia_mech.run.integrity import without_folders
from ia_mech.settings import Settings
from ia_mech.steering import SteeringVector

CONVERSATIONS, RUN = "conversations.jsonl", "run"
# Settings of a run that changed conversations share with it: of the chat, and others.
SHARED = ("system", "thinking", "template_option", "date", "opening")
MODEL = (
    "revision",
    "random_blocks",
    "dtype",
    "device",
    "attention",
    "trust_remote_code",
    "device_map",
)
REST = ("batch_rows", "ignore_check")
DECODING = ("temperatures", "samples", "max_new_tokens", "seed")


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
            reference=text_of(row["reference"]),
            answer=text_of(row["answer"]),
            metadata=json.loads(row["metadata"]),
            finish_reason=text_of(row["response_finish_reason"]),
        )
        for row in contexts.to_dict("records")
    ]


def settings_of(first: Run, file: Path, **changes: Any) -> Settings:
    """The settings of the run over the changed conversations in a file: a run's, with changes."""
    model = recall(first.settings, first.model["weights_hash"])
    return Settings(
        **{name: first.settings[name] for name in (*MODEL, *SHARED, *DECODING, *REST)}
        | {"model": model.name, "adapter": model.adapter, "dataset": str(file), "limit": None}
        | {"response": "given", "header_logits": "none"}
        | changes
    )


def resample_run(
    first: Run,
    conversations: Sequence[Conversation],
    folder: Path,
    positions: tuple[str, ...],
    intervention: Path | None = None,
    subject: Subject | None = None,
    crew: Crew = ANY,
    interventions: Interventions | None = None,
    **changes: Any,
) -> Run:
    """The run over changed conversations in a folder: sampled, continued, or as it is.

    Args:
        first: the run whose model and settings are used.
        conversations: with their responses.
        folder: of the experiment; made if it isn't there.
        positions: where the residual stream is kept.
        intervention: a file with a steering vector.
        subject: the model; loaded if it isn't given.
        crew: workers and threads of each.
        interventions: as of :func:`ia_mech.collect.job.collect`.
        changes: settings that the new run has otherwise, such as ``temperatures``.

    Raises:
        UserError: the folder holds other conversations, or a run without them; the model has other
            weights than the run's.
    """
    # Absolute, for the path is part of the run's configuration, wherever the command is given.
    file, out = folder.resolve() / CONVERSATIONS, folder / RUN
    text = "".join(json.dumps(c.to_dict(), ensure_ascii=False) + "\n" for c in conversations)
    content = text.encode()
    same = file.is_file() and file.read_bytes() == content
    if (out / layout.RUN).is_file() and not same:
        differs = "holds other conversations, or other conditions, than these"
        raise UserError(
            f"{file} {differs if file.is_file() else 'is missing'}",
            "give another --out, or what it was made with",
        )

    def write(scratch: Path) -> None:
        scratch.write_bytes(content)

    folder.mkdir(parents=True, exist_ok=True)
    if not same:
        integrity.replace_file(file, write)
    steered = {}  # the vector itself, not its file's name, tells runs apart
    if intervention is not None:
        changes["intervention"] = str(intervention)
        steered = {"intervention": SteeringVector.load(intervention).sha256}
    settings = settings_of(first, file, positions=positions, **changes)
    if (out / layout.RUN).is_file():
        there = Run.open(out)
        wanted = {"settings": settings.to_dict(), **steered}
        kept = {"settings": there.settings | {"dataset": str(file)}}
        kept |= {name: there.record["identity"].get(name) for name in steered}
        if there.complete and without_folders(kept) == without_folders(wanted):
            return there
    subject = subject or subject_of(first)
    rows = len(conversations) * len(settings.rows())
    where = f"{settings.model} on {subject.device}"
    print(
        f"{len(conversations)} changed contexts, {rows} user turns, {where}, to {out}",
        file=sys.stderr,
    )
    return collect(settings, subject, out, Bar(), crew=crew, interventions=interventions)


def refuse_other_settings(runs: Sequence[Run]) -> None:
    """Refuse runs that weren't decoded alike.

    Raises:
        UserError: they differ in how, or in the chat settings.
    """
    first = runs[0]
    for run in runs[1:]:
        names = (*SHARED, *DECODING)
        if differ := [name for name in names if run.settings[name] != first.settings[name]]:
            raise UserError(
                f"{first.path} and {run.path} differ in {', '.join(differ)}",
                "give runs of the same settings",
            )


def chat_of(run: Run, tokenizer: Any, stops: Sequence[int]) -> ChatFormat:
    """A tokenizer's chat format with the chat settings of a run; ``stops`` end a response."""
    return build_chat(Settings.read(run.settings), tokenizer, stops)


def subject_of(run: Run) -> Subject:
    """The model that a run was sampled from.

    Raises:
        UserError: it can't be loaded, has other weights now, or was changed while it sampled.
    """
    if run.settings["intervention"] is not None:
        raise UserError(
            f"{run.path} was sampled under --intervention {run.settings['intervention']}: scored "
            "again, its turns would be those of another model",
            "give a run that was sampled without one",
        )
    spec = recall(run.settings, run.model["weights_hash"])
    subject = load(spec)
    if subject.weights_hash != run.model["weights_hash"]:
        raise UserError(
            f"{spec.name} has the weights {subject.weights_hash} now, {run.path} those of "
            f"{run.model['weights_hash']}",
            "give --model of the same weights, or sample the run again",
        )
    return subject


def judge_alike(first: Run, runs: Sequence[Run], judge: str, *, unperturbed: bool = False) -> None:
    """Have runs labelled by the judge of a first one.

    Args:
        first: labelled by that judge.
        runs: labelled here by the rules judge, if they aren't yet.
        judge: its name.
        unperturbed: turns are shown after the unchanged responses; then the name has another end.

    Raises:
        UserError: it is another judge, which the user has to run.
    """
    name = judge + ON_UNPERTURBED if unperturbed else judge
    todo = [run for run in runs if name not in run.labels.judges]
    own, rules = first.labels.record("judgements", judge).get("identity", {}), RulesJudge()
    if todo and identity_hash(own) != identity_hash(rules.identity):
        against = " against the unchanged responses" if unperturbed else ""
        commands = " and ".join(
            f"python -m ia_mech.judge run {shell_word(run.path)} --name {name}"
            + (" --unperturbed" if unperturbed else "")
            for run in todo
        )
        raise UserError(
            f"{' and '.join(str(run.path) for run in todo)}: not judged by {judge!r}{against}",
            f"run {commands} with the flags that judged {first.path}, then this command again",
        )
    for run in todo:
        label_run(run, rules, name, Bar(), unperturbed=unperturbed)
