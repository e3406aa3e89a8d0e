"""The user turns of one or more runs, joined with a judge's verdicts and an annotator's labels.

Runs are pooled where they are of the same model (name and weights), dataset, perturbation and
judge. A source is named by its dataset and its ``source_id``: pooled runs keep the samples of one
prompt together, and prompts of two datasets that happen to have the same id stay apart.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ia_mech.cli import did_you_mean
from ia_mech.errors import UserError
from ia_mech.judge.rubric import CANNOT_ASSESS, OUT_OF_ROLE, Rubric, rubric_of
from ia_mech.judge.verdict import identity_hash
from ia_mech.rates.evidence import DEPENDENT, dependent
from ia_mech.rates.fit import highest, looks_english
from ia_mech.rates.gate import VERDICTS, Gate, gate_of
from ia_mech.run import Run
from ia_mech.run.labelled import FAILED
from ia_mech.run.labels import choose_judge
from ia_mech.run.queries import exchange
from ia_mech.run.reader import GROUPS
from ia_mech.run.sources import SEPARATOR, sources_of

QUESTION = "How often are the user turns follow-ups?"
EVERY, UNFINISHED = "all", "unfinished"  # responses that turns come after; the third is "complete"
NO_ANNOTATOR = ""  # no annotator: annotations are not read
# Settings that change what is sampled, beside those that rates are by.
_SAMPLING = ["system", "thinking", "response", "date", "opening"]
_SAMPLING += ["max_new_tokens", "max_response_tokens"]
SUBJECT = ["model", "weights_hash", "perturbation"]  # one table each
_OF_TURN = ["run", *SUBJECT, "dataset", "temperature", "source", "context", "unfinished"]
_OF_TURN += ["out_of_role"]
_DECOYS = [*_OF_TURN, "decoy", "shown_source", *VERDICTS]  # columns of JudgedTurns.decoys


@dataclass(frozen=True)
class JudgedTurns:
    """What rates are computed from.

    ``turns`` are those of :meth:`ia_mech.run.Run.labelled`, a row each, and

    - of the run ``run`` (its folder), ``model``, ``weights_hash`` and ``context`` (a key that holds
      across runs);
    - of the judge ``fitted`` (it was fitted on the turn); ``dependent``, 1 if the turn is a
      follow-up with a likelihood that favours the own response over all its siblings together, 0 if
      not, NaN where not assessed or no bits were computed (``experiments.reaction``);
    - ``out_of_role``, 1 if it repeats the conversation or speaks as the assistant
      (:data:`ia_mech.judge.rubric.OUT_OF_ROLE`), else 0; NaN where not assessed, or where the
      rubric has no such category;
    - of the annotator ``unlabelled``: the turn's run, or a stratum of it, if the annotator labelled
      no turn of it; else empty.

    ``decoys`` has a row per decoy (:mod:`ia_mech.judge.decoys`). Columns named as in ``turns`` are
    of its turn; ``decoy`` is its kind, ``shown_source`` the source of the context shown.
    ``follow_up`` is the verdict on the decoy, ``own_follow_up`` that on the same turn after the
    context that it followed.
    """

    turns: pd.DataFrame
    judge: str
    record: dict[str, Any]  # who the judge is
    annotator: str | None  # whose labels the column ``truth`` has
    runs: list[Run]
    notes: list[str]  # what a reader has to know of how they were put together
    responses: str = EVERY  # after which the turns come
    by: str | None = None  # the field of the data whose values stand in for datasets
    sampled_tokens: int | None = None  # of the sampled turns; None: all
    foreign: frozenset[str] = frozenset()  # contexts that don't look English, if the judge reads it
    decoys: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_DECOYS))

    @property
    def rubric(self) -> Rubric:
        """What the judge labels by."""
        return rubric_of(self.record)

    @cached_property
    def by_model(self) -> dict[tuple[str, str], Gate]:
        """By model and hash of its weights: the gate of the judge there."""
        models = self.turns[SUBJECT[:2]].drop_duplicates().astype(str).sort_values(SUBJECT[:2])
        found = {}
        for model, weights in models.itertuples(index=False):
            own = self.decoys[matching(self.decoys, {"model": model, "weights_hash": weights})]
            whose = model if len(models) > 1 else ""
            found[model, weights] = gate_of(own, self.judge, whose)
        return found

    @property
    def gate(self) -> Gate:
        """The gate of the only model. Of several models it is the gate with the lowest margin, or
        without one: a claim about all models rests on that."""
        return min(
            self.by_model.values(), key=lambda gate: np.nan_to_num(gate.margin.low, nan=-np.inf)
        )


def matching(rows: pd.DataFrame, values: Mapping[str, Any]) -> np.ndarray:
    """``[rows]`` whether a row has these values."""
    equal = np.ones(len(rows), dtype=bool)
    for name, value in values.items():
        equal &= (rows[name] == value).to_numpy()
    return equal


def open_runs(runs: Sequence[str | Path | Run]) -> list[Run]:
    """Finished runs, each once.

    Raises:
        UserError: not a run, an unfinished one, one that another is a copy of, or runs under
            different interventions.
    """
    opened = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    for at, run in enumerate(opened):
        run.check_finished()
        for other in opened[:at]:
            if other.identity_digest == run.identity_digest:
                same = run.path.resolve() == other.path.resolve()
                problem = "is given twice" if same else f"is a copy of {other.path}"
                raise UserError(f"{run.path} {problem}", "give each run once")
        those = {str(one.record["identity"].get("intervention")) for one in (run, opened[0])}
        if len(those) > 1:  # a steered model is another model
            raise UserError(
                f"{opened[0].path} and {run.path} were not sampled under the same intervention",
                "give each in a command of its own",
            )
    return opened


def _refuse_twice(runs: Sequence[Run]) -> None:
    """Refuse queries that several runs of one model hold under different datasets: they would count
    twice."""
    datasets = defaultdict[tuple[str, str], dict[str, Path]](dict)
    for run in runs:
        rows = run.contexts[["dataset", "messages"]].itertuples(index=False, name=None)
        for dataset, messages in rows:
            asked = json.dumps([[one["role"], one["content"]] for one in messages[:-1]])
            datasets[run.model["weights_hash"], asked].setdefault(dataset, run.path)
    twice = [of for of in datasets.values() if len(set(of.values())) > 1]
    if twice:
        (first, where), (second, there), *_ = twice[0].items()
        raise UserError(
            f"{len(twice)} quer{'y is' if len(twice) == 1 else 'ies are'} in dataset {first!r} of "
            f"{where} and in {second!r} of {there}, and would count twice",
            "count each run alone, or sample them from one file",
        )


def read_runs(
    runs: Sequence[str | Path | Run],
    judge: str | None = None,
    annotator: str | None = None,
    responses: str = EVERY,
    by: str | None = None,
    sampled_tokens: int | None = None,
) -> JudgedTurns:
    """Read runs with their labels, and check that they can be reported together.

    The judge is that of :func:`ia_mech.run.labels.choose_judge`, and the annotator by default the
    only one if there is one (:data:`NO_ANNOTATOR`: none). ``responses`` is as for
    :func:`restrict_responses`. ``by`` is a field of the data: turns are then told apart by its
    values instead of by dataset. It may be ``dataset`` itself. Of sampled turns those count whose
    first ``sampled_tokens`` tokens were sampled and no others; by default those that were
    sampled as a whole.

    Raises:
        UserError: as :func:`open_runs`; a judge or an annotator has to be named;
            verdicts or labels of other turns or another rubric; judges that share a name but not
            their identity; no turn comes after such responses; no data have such a field
            with few values.
    """
    runs = open_runs(runs)
    if len(runs) > 1:
        _refuse_twice(runs)
    judge = choose_judge(runs, judge)
    record = _record_of_one_judge(runs, judge)
    annotator = choose_annotator(runs, annotator)
    turns: list[pd.DataFrame] = []
    decoys: list[pd.DataFrame] = []
    earlier: list[tuple[Path, pd.MultiIndex]] = []
    foreign: set[str] = set()
    for run in runs:
        own, own_decoys = _turns_and_decoys(run, judge, annotator, by, sampled_tokens)
        own[DEPENDENT] = dependent(own, runs, run)
        if highest(record) < math.inf:
            foreign.update(own["context"][own["context_id"].isin(_foreign(run))])
        turns.append(_without_repeated(own, run, earlier))
        decoys.append(own_decoys)
    pooled = _pooled(turns)
    if pooled["follow_up"].isna().all():
        raise UserError(
            f"{judge!r} assessed none of the {len(pooled)} user turns",
            "see why in the column status of its labels, and judge again",
        )
    notes = _notes(runs, pooled)
    without = [run.name for run, frame in zip(runs, decoys, strict=True) if frame.empty]
    if 0 < len(without) < len(runs):
        notes.append(
            f"in {', '.join(without)} no turn was shown after a wrong conversation: these labels "
            "have no control."
        )
    some = _pooled([frame for frame in decoys if len(frame)] or decoys[:1])
    last = by, sampled_tokens, frozenset(foreign), some
    judged = JudgedTurns(pooled, judge, record, annotator, runs, notes, EVERY, *last)
    judged = restrict_responses(judged, responses)
    lost = judged.decoys[["follow_up", "own_follow_up"]].isna().any(axis=1)
    if not lost.any():
        return judged
    note = (
        f"{lost.sum()} of {len(lost)} turns shown after wrong conversations or siblings are left "
        "out: the judge gave them no category there, or none after their own conversation."
    )
    return replace(judged, notes=[*judged.notes, note])


def restrict_responses(judged: JudgedTurns, responses: str) -> JudgedTurns:
    """Only the turns after ``complete`` or ``unfinished`` responses, or ``all``, with a note.

    Raises:
        UserError: there are none.
    """
    if responses == EVERY:
        return judged
    kept, decoys = (
        frame[frame["unfinished"] == (responses == UNFINISHED)].reset_index(drop=True)
        for frame in (judged.turns, judged.decoys)
    )
    if kept.empty:
        raise UserError(
            f"no user turn comes after a {responses} response",
            f"count all responses: the {len(judged.turns)} turns come after the other kind",
        )
    note = (
        f"{len(kept)} of {len(judged.turns)} user turns: those after {responses} responses. Turns "
        "after an unfinished response may only continue it."
    )
    notes = [*judged.notes, note]
    return replace(judged, turns=kept, decoys=decoys, notes=notes, responses=responses)


# -- whose labels -------------------------------------------------------------------------------


def _record_of_one_judge(runs: list[Run], judge: str) -> dict[str, Any]:
    """The judge's record; UserError if the runs' verdicts aren't one judge's."""
    records = [run.labels.record("judgements", judge) for run in runs]
    hashes = [
        (identity_hash(record.get("identity", {})), record.get("rubric", {}).get("hash"))
        for record in records
    ]
    for run, these in zip(runs, hashes, strict=True):
        if these != hashes[0]:
            raise UserError(
                f"the labels by {judge!r} in {runs[0].path} and {run.path} are by different "
                "judges (model, settings or rubric)",
                "judge both alike (ia-mech judge run … --replace, or label(…, replace=True)), or "
                "report them apart",
            )
    return records[0]


def choose_annotator(runs: list[Run], annotator: str | None) -> str | None:
    """Whose labels count: those of the ``annotator`` that is named, else of the only one; None
    where there is none. UserError where one has to be named, or has no labels."""
    if annotator == NO_ANNOTATOR:
        return None
    names = sorted({name for run in runs for name in run.labels.annotators})
    if annotator is None:
        if len(names) > 1:
            raise UserError(
                f"there are labels by {', '.join(names)}",
                'choose whose labels correct the rates: --annotator NAME, or annotator="NAME" '
                "('': nobody's)",
            )
        return names[0] if names else None
    if annotator not in names:
        raise UserError(
            f"there are no labels by {annotator!r}",
            f"choose the annotator from: {', '.join(names)}" if names else "name no annotator",
        )
    return annotator


# -- one run ------------------------------------------------------------------------------------


def _turns_and_decoys(
    run: Run, judge: str, annotator: str | None, by: str | None, sampled_tokens: int | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``turns`` of :class:`JudgedTurns` but for ``dependent``, and its ``decoys``."""
    if run.settings["first_tokens"]:
        raise UserError(
            f"the turns of {run.path} continue each of the likeliest first tokens: they are no "
            "sample",
            "give the run that ia-mech mass was given",
        )
    there = annotator if annotator in run.labels.annotators else None
    turns = run.labelled(judge, there, ["fitted"], texts=False)
    of_run = str(run.path), run.model["name"], run.model["weights_hash"]
    for name, value in zip(("run", "model", "weights_hash"), of_run, strict=True):
        turns[name] = pd.Categorical.from_codes([0] * len(turns), [value])
    turns["fitted"] = turns["fitted"].fillna(False).astype(bool)
    turns["context"] = _contexts(run, turns)
    turns["unlabelled"] = unlabelled(run, turns, annotator, judge)
    named = set(OUT_OF_ROLE) & set(rubric_of(run.labels.record("judgements", judge)).names)
    outside = turns["category"].isin(named).astype(float)
    turns["out_of_role"] = outside.where(turns["follow_up"].notna() & bool(named))
    if by not in (None, "dataset"):
        turns["dataset"] = _groups(run, turns["context_id"], by)
    if there is None:
        turns["truth"] = turns["inclusion"] = np.nan
    kept = run.drawn(turns, sampled_tokens).to_numpy()
    sampled = (turns["temperature"] > 0).to_numpy()
    if (sampled.any() or sampled_tokens) and not (kept & sampled).any():
        which = (
            "with all tokens sampled"
            if sampled_tokens is None
            else f"with --sampled-tokens {sampled_tokens}"
        )
        counts = " or ".join(f"--sampled-tokens {k}" for k in run.settings["sampled_tokens"])
        raise UserError(f"{run.path} has no sampled turns {which}", f"count others: {counts}")
    return turns[kept].reset_index(drop=True), decoys_of(run, judge, turns, kept)


def decoys_of(run: Run, judge: str, turns: pd.DataFrame, kept: np.ndarray) -> pd.DataFrame:
    """``decoys`` of :class:`JudgedTurns`: those of the ``[turns]`` of a run that are ``kept``, with
    such columns of their turns as there are."""
    decoys = run.decoys(judge)
    row = decoys["row"].to_numpy()
    frame = turns[[name for name in _OF_TURN if name in turns]].iloc[row].reset_index(drop=True)
    frame = frame.assign(decoy=decoys["decoy"].astype(object), shown_source=decoys["shown_source"])
    frame["follow_up"] = decoys["follow_up"]
    frame["own_follow_up"] = turns["follow_up"].to_numpy()[row]
    return frame[kept[row]].reset_index(drop=True)


def _groups(run: Run, contexts: pd.Series, by: str) -> pd.Series:
    """``[turns]`` the value of a field of the data (:attr:`ia_mech.run.Run.groups`)."""
    if by not in run.groups:
        fields = ", ".join(["dataset", *map(str, run.groups.columns)])
        if by in run.metadata:
            problem = f"the field {by!r} of {run.path} has more than {GROUPS} different values, or "
            problem += "values that are lists or objects: it can't group turns"
        else:
            problem = f"{run.path} has no field {by!r}{did_you_mean(by, [*run.groups.columns])}"
        raise UserError(
            problem,
            f"choose from: {fields}. Fields are the columns of the data that sampling doesn't read "
            "as the conversation (ia-mech sample --metadata-columns keeps others out of it)",
        )
    return contexts.astype(object).map(run.groups[by]).astype("category")


def _contexts(run: Run, turns: pd.DataFrame) -> pd.Series:
    """``[turns]`` keys of contexts that hold across runs."""
    keys = {}
    for contexts, _ in run.windows(["context_id", "dataset", "source_id", "text"], []):
        texts = zip(sources_of(contexts), contexts["context_id"], contexts["text"], strict=True)
        for source, name, text in texts:
            digest = hashlib.sha256(str(text).encode(errors="surrogatepass")).hexdigest()[:32]
            keys[name] = SEPARATOR.join([source, name, digest])
    return turns["context_id"].map(keys).astype("category")


def _foreign(run: Run) -> list[str]:
    """The ids of contexts whose query and response don't look English."""
    windows = (contexts for contexts, _ in run.windows(["context_id", "messages"], []))
    rows = (row for contexts in windows for row in contexts.itertuples())
    return [row.context_id for row in rows if not looks_english(" ".join(exchange(row.messages)))]


def _pooled(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Frames of several runs as one; categories that differ between them are joined."""
    pooled = pd.concat(frames, ignore_index=True)
    names = [name for name, dtype in frames[0].dtypes.items() if dtype == "category"]
    return pooled.astype(dict.fromkeys(names, "category"))


def unlabelled(run: Run, turns: pd.DataFrame, annotator: str | None, judge: str) -> str:
    """The run, or a stratum of it, of which the annotator labelled no turn; else empty."""
    if annotator is None:
        return ""
    if annotator not in run.labels.annotators:
        return f"turns of {run.name}"
    known = set(turns["stratum"][turns["truth"].notna()])
    missing = [name for name in _strata_to_label(run, annotator, judge) if name not in known]
    return f"the stratum {', '.join(missing)} of {run.name}" if missing else ""


def _strata_to_label(run: Run, annotator: str, judge: str) -> list[str]:
    """Strata of the annotator's sheet that have turns which may count in a rate by this judge.

    Where the strata are this judge's own categories, those that it didn't assess never count.
    """
    sheet = run.labels.record("annotations", annotator)
    strata = [name for name, of in sheet.get("strata", {}).items() if of["rows"]]
    by = sheet.get("judge") or {}
    verdicts = run.labels.record("judgements", judge).get("identity_hash")
    own = by.get("name") == judge and by.get("identity_hash") == verdicts
    return [name for name in strata if not (own and name in (FAILED, CANNOT_ASSESS))]


def _without_repeated(
    frame: pd.DataFrame, run: Run, earlier: list[tuple[Path, pd.MultiIndex]]
) -> pd.DataFrame:
    """Leave out greedy turns that an earlier run has; refuse samples that it has.

    A sample is fixed by model, context, temperature, seed and number. Runs of other seeds or
    temperatures add samples. But their greedy turns are the same turns, which would count twice.
    """
    sampled = (frame["temperature"] > 0).to_numpy()
    seed = np.where(sampled, run.settings["seed"], -1)
    names = frame[[*SUBJECT, "context", "temperature", "sample"]].assign(seed=seed)
    keys = pd.MultiIndex.from_frame(names.astype(dict.fromkeys((*SUBJECT, "context"), object)))
    shared = np.full(len(keys), -1)  # which earlier run has the turn first
    for number, (_, there) in enumerate(earlier):
        shared[(shared < 0) & keys.isin(there)] = number
    twice = shared[(shared >= 0) & sampled]
    if len(twice):
        raise UserError(
            f"{earlier[twice[0]][0]} and {run.path} hold {len(twice)} of the same samples (same "
            "model, contexts and seed)",
            "give one of them",
        )
    earlier.append((run.path, keys))
    return frame[shared < 0]


# -- what a reader has to know --------------------------------------------------------------------


def _notes(runs: list[Run], turns: pd.DataFrame) -> list[str]:
    notes = [
        f"skipped rows of {run.name}'s data, which are in no number: {len(skipped)} ({skipped[0]}"
        f"{', …' if len(skipped) > 1 else ''})."
        for run in runs
        if (skipped := run.record.get("skipped"))
    ]
    notes += [
        f"{few} of {queries} queries of {run.name} have too few finished responses, and are in no "
        "number: queries with long responses are missing more often."
        for run in runs
        for few, queries in [run.unanswered]
        if few
    ]
    notes += [
        f"turns of {run.name} continue {run.settings['opening']!r}, which the judge doesn't see."
        for run in runs
        if run.settings["opening"] is not None
    ]
    if len(runs) > 1:
        notes.append(f"{len(runs)} runs; greedy turns that several of them hold count once.")
    settings = pd.DataFrame(
        {name: str(run.settings[name]) for name in _SAMPLING}
        | {"dtype": run.model["dtype"], "model": (run.model["name"], run.model["weights_hash"])}
        for run in runs
    )
    kinds = settings.groupby("model").nunique()
    if different := sorted(kinds.columns[(kinds > 1).any()]):
        notes.append(f"runs that were pooled differ in {', '.join(different)}.")
    fitted = turns[turns["fitted"]]
    if fitted["truth"].notna().any():
        notes.append(
            f"{len(fitted)} of {len(turns)} turns, {fitted['truth'].notna().sum()} of them "
            "labelled, were in the judge's fit: corrected rates leave them out."
        )
    return notes
