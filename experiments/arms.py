"""Arms: conditions under which a run's turns are sampled anew, and how they compare with it.

An arm changes the conversations, the settings, or what happens while a context is prefilled. It is
sampled with the model and all other settings of the first run. Its folder holds
``conversations.jsonl`` and ``run/``, a run like any other, which goes on where it was interrupted.
Its turns are judged as the first run's were. They are compared with the turns of the unchanged run,
or of another arm, paired by query: by their follow-up rate, and by its excess over the rate of the
same turns after siblings.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ia_mech.cli import shell_word
from ia_mech.data.conversations import Conversation
from ia_mech.display import Bar
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, paired_row
from ia_mech.judge import builtin_judge
from ia_mech.judge.decoys import SIBLING
from ia_mech.judge.judging import ON_UNPERTURBED, label_run
from ia_mech.judge.verdict import identity_hash
from ia_mech.rates.gate import VERDICTS
from ia_mech.rates.load import NO_ANNOTATOR, JudgedTurns, read_runs
from ia_mech.run import Run, integrity, layout
from ia_mech.run.integrity import without_folders
from ia_mech.settings import Settings
from ia_mech.stats import Estimate, cluster_bootstrap, cluster_mean

if TYPE_CHECKING:
    from ia_mech.collect.job import Interventions
    from ia_mech.engine.workers import Crew, Team
    from ia_mech.models.load import ModelSpec

CONVERSATIONS, RUN = "conversations.jsonl", "run"
# Settings of a run that an arm shares with it, unless it says otherwise.
CHAT = ("system", "thinking", "template_option", "date", "opening")
DECODING = ("temperatures", "samples", "max_new_tokens", "seed")
SHARED = (
    *CHAT,
    *DECODING,
    *("revision", "random_blocks", "dtype", "device", "attention", "trust_remote_code"),
    *("device_map", "batch_rows", "ignore_check"),
)
POSITIONS = ("header_last",)  # where the residual stream of arms is kept
RATE, SIBLINGS, EXCESS = "follow-ups", "follow-ups after siblings", "excess over siblings"
OF_QUERIES = {RATE: (0.0, 1.0), SIBLINGS: (0.0, 1.0), EXCESS: (-1.0, 1.0)}  # and their bounds


@dataclass(frozen=True)
class Arm:
    """A condition under which turns are sampled.

    Attributes:
        conversations: with their responses.
        settings: in which the arm's run differs from the first one.
        interventions: what is changed in each context while it is prefilled, as of
            :func:`ia_mech.collect.job.collect`.
    """

    conversations: Sequence[Conversation]
    settings: Mapping[str, Any] = field(default_factory=dict)
    interventions: "Interventions | None" = None

    def rows(self, first: Run) -> int:
        """Turns after each context."""
        of = first.settings | dict(self.settings)
        return len(of["temperatures"]) * of["samples"] + 1


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


def sample_arm(
    first: Run,
    model: "ModelSpec",
    arm: Arm,
    folder: Path,
    team: "Callable[[], Team]",
    crew: "Crew",
) -> Run:
    """The run of an arm in a folder: sampled, continued, or as it is.

    Args:
        first: the run whose model and settings are used.
        model: where its model is.
        arm: what differs; with the setting ``intervention``, a file with a steering vector.
        folder: made if it isn't there.
        team: the workers that have the model, where something is left to sample.
        crew: how many of them, and threads of each.

    Raises:
        UserError: the folder holds other conversations, or a run without them.
    """
    from ia_mech.collect.job import collect
    from ia_mech.collect.plan import Plan
    from ia_mech.steering import SteeringVector

    # Absolute, for the path is part of the run's configuration, wherever the command is given.
    file, out = folder.resolve() / CONVERSATIONS, folder / RUN
    lines = (json.dumps(one.to_dict(), ensure_ascii=False) for one in arm.conversations)
    content = "".join(f"{line}\n" for line in lines).encode()
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
    changes, steered = {}, {}
    if vector := arm.settings.get("intervention"):
        changes["intervention"] = str(vector)
        # The vector itself, not its file's name, tells runs apart.
        steered["intervention"] = SteeringVector.load(vector).sha256
    settings = Settings(
        **{name: first.settings[name] for name in SHARED}
        | {"model": model.name, "adapter": model.adapter, "dataset": str(file), "limit": None}
        | {"response": "given", "header_logits": "none", "positions": POSITIONS}
        | dict(arm.settings)
        | changes
    )
    if (out / layout.RUN).is_file():
        there = Run.open(out)
        wanted = {"settings": settings.to_dict(), **steered}
        kept = {"settings": there.settings | {"dataset": str(file)}}
        if there.model["weights_hash"] == first.model["weights_hash"]:  # wherever they are
            kept["settings"] |= {"model": model.name, "adapter": model.adapter}
        kept |= {name: there.record["identity"].get(name) for name in steered}
        if there.complete and without_folders(kept) == without_folders(wanted):
            return there
    used, contexts = team(), len(arm.conversations)
    turns = f"{contexts} changed conversations, {contexts * len(settings.rows())} user turns"
    print(f"{turns}, {settings.model} on {used.device}, to {out}", file=sys.stderr)
    plan = Plan(settings, out, device=used.device)
    return collect(plan, used, Bar(), crew=crew, interventions=arm.interventions)


# -- judged ----------------------------------------------------------------------------------------


def judge_alike(first: Run, runs: Sequence[Run], judge: str, *, unperturbed: bool = False) -> None:
    """Have runs labelled by the judge of a first one.

    Args:
        first: labelled by that judge.
        runs: labelled here by the built-in judge, if they aren't yet.
        judge: its name.
        unperturbed: turns are shown after the unchanged responses; then the name has another end.

    Raises:
        UserError: it is another judge, which the user has to run.
    """
    name = judge + ON_UNPERTURBED if unperturbed else judge
    todo = [run for run in runs if name not in run.labels.judges]
    own, ours = first.labels.record("judgements", judge).get("identity", {}), builtin_judge()
    if todo and identity_hash(own) != identity_hash(ours.identity):
        against = " against the unchanged responses" if unperturbed else ""
        commands = " and ".join(
            f"ia-mech judge run {shell_word(run.path)} --name {name}"
            + (" --unperturbed" if unperturbed else "")
            for run in todo
        )
        raise UserError(
            f"{' and '.join(str(run.path) for run in todo)}: not judged by {judge!r}{against}",
            f"run {commands} with the flags that judged {first.path}, then this command again",
        )
    for run in todo:
        label_run(run, ours, name, Bar(), unperturbed=unperturbed)


def verdicts_of(runs: Sequence[Run], judge: str | None) -> JudgedTurns:
    """The turns of runs with a judge's verdicts; no annotations are read."""
    return read_runs(runs, judge, NO_ANNOTATOR)


def rates_by_query(judged: JudgedTurns) -> pd.DataFrame:
    """Rates of turns by temperature and query, and of the same turns shown after siblings.

    Args:
        judged: with decoys.

    Returns:
        One row per temperature and source with both verdicts: ``temperature``, ``dataset``,
        ``source``, and :data:`OF_QUERIES`, means over its turns.

    Raises:
        UserError: no turn was judged after siblings.
    """
    decoys = judged.decoys[judged.decoys["decoy"] == SIBLING]
    if decoys.empty:
        path = judged.runs[0].path
        raise UserError(
            f"{path} has no turns judged after siblings",
            f"judge it again: ia-mech judge run {shell_word(path)} --replace",
        )
    both = decoys.dropna(subset=[*VERDICTS])
    own, other = (both[name].astype(float) for name in VERDICTS)
    keys = ["temperature", "dataset", "source"]
    rows = both[keys].astype({"temperature": float, "dataset": object, "source": object})
    rows = rows.assign(**{RATE: own, SIBLINGS: other, EXCESS: own - other})
    return rows.groupby(keys, sort=False).mean().reset_index()


# -- compared --------------------------------------------------------------------------------------


def arm_estimates(
    rows: pd.DataFrame,
    by: Sequence[str],
    bounds: Mapping[str, tuple[float, float]],
    less: Mapping[str, dict[str, Any]],
    options: dict[str, Any],
    dataset: str = ALL,
    compared: Sequence[str] | None = None,
) -> Iterator[TidyEstimate]:
    """Means of arms, and their differences from others, paired by query.

    Args:
        rows: ``source``, the columns that name an arm, and values of quantities.
        by: the columns that name an arm.
        bounds: quantity → its bounds. A quantity without values is left out.
        less: words → what differs in the name of the arm that is subtracted; the difference is
            called ``quantity, words``. No arm is subtracted from itself.
        options: ``level``, ``resamples`` and ``seed``.
        dataset: that the rows are of.
        compared: the quantities of differences (default: all).
    """
    group = Group(np.array([]), options, {"dataset": dataset})
    arms = dict(list(rows.groupby(list(by), sort=False)))
    for key, own in arms.items():
        names = dict(zip(by, key, strict=True))
        known = [one for one in bounds if one in own and own[one].notna().any()]
        for quantity in known:
            values, sources = own[quantity], own["source"]
            found = cluster_mean(values, sources, level=options["level"])
            clipped = found.clip(*bounds[quantity])
            yield group.row(quantity, clipped, int(values.notna().sum()), **names)
        for words, other in less.items():
            base = arms.get(tuple((names | other)[name] for name in by))
            if base is None or base is own:
                continue
            for quantity in (one for one in known if one in (compared or known)):
                pair = own[quantity], own["source"], base[quantity], base["source"]
                least, most = bounds[quantity]
                row = paired_row(group, f"{quantity}, {words}", *pair, **names)
                yield replace(row, estimate=row.estimate.clip(least - most, most - least))


def best_elsewhere(
    ranked: np.ndarray, reported: np.ndarray, part: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The mean of the arm that is best on other queries.

    Args:
        ranked: ``[arms, queries]`` by whose mean an arm is chosen.
        reported: ``[arms, queries]`` what is read off there.
        part: ``[queries]`` numbers: the queries of part 1 choose the arm that those of part 0
            report, and the other way round; likewise parts 2 and 3, and so on.
        counts: ``[resamples, queries]`` how often each query was drawn.

    Returns:
        ``[resamples]`` means over queries; NaN where a part has nothing to choose by.
    """
    total = np.zeros(len(counts))
    for one in np.unique(part):
        choosing, reporting = counts * (part == one ^ 1), counts * (part == one)
        best = (choosing @ ranked.T).argmax(1)  # sums rank as means do
        total += (reporting * reported[best]).sum(1)
        total[(choosing.sum(1) == 0) & (reporting.sum(1) > 0)] = np.nan
    return total / counts.sum(1)


def estimate_best(
    ranked: np.ndarray,
    reported: np.ndarray,
    part: np.ndarray,
    sources: Sequence[str],
    options: Mapping[str, Any],
) -> Estimate:
    """:func:`best_elsewhere` with its interval; the bootstrap repeats the choice."""

    def statistic(counts: np.ndarray) -> np.ndarray:
        return best_elsewhere(ranked, reported, part, counts)

    return cluster_bootstrap(statistic, list(sources), **options)[0]
