"""The user turns of one or more runs, joined with a judge's verdicts and an annotator's labels.

Runs are pooled where they are of the same model (name and weights), dataset, perturbation and
judge. A source is named by its dataset and its ``source_id``: pooled runs keep the samples of one
prompt together, and prompts of two datasets that happen to have the same id stay apart.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ia_mech.cli import quoted
from ia_mech.errors import UserError
from ia_mech.judge.decoys import CONVERSATION, KINDS, own_turns
from ia_mech.judge.label import check_finished, same_judges, windows_of
from ia_mech.judge.rubric import CANNOT_ASSESS, GENUINE, NAMES
from ia_mech.judge.rules import fitted_items
from ia_mech.judge.verdict import GROUNDED_P, JUDGED, OUTCOMES, Item, identity_hash
from ia_mech.rates.gate import Gate, gate_of
from ia_mech.run import Run
from ia_mech.run.labels import KEY, positions

# Columns of verdicts that rates need.
_VERDICT = [*KEY, "repeat", "category", "status", "item", "grounded_p"]
FAILED = "failed"  # the judge gave no category
_DECOYS = [
    *("run", "model", "weights_hash", "dataset", "perturbation", "temperature"),
    *("decoy", "source", "lender", "context", "cut_off", "alike"),
    *(f"{whose}{name}" for name in OUTCOMES for whose in ("", "own_")),
]  # columns of Judged.decoys
EVERY, COMPLETE, CUT_OFF = RESPONSES = ("all", "complete", "cut-off")  # what turns come after
NO_ANNOTATOR = ""  # no annotator: annotations are not read
_SAMPLING = ("system", "thinking", "response", "date", "max_new_tokens", "max_response_tokens")
SUBJECT = ["model", "weights_hash", "perturbation"]  # one table each


@dataclass(frozen=True)
class Judged:
    """What rates are computed from.

    Attributes:
        turns: one row per user turn: ``model``, ``weights_hash``, ``dataset``, ``perturbation``,
            ``source`` and ``context`` (keys that hold across runs), ``temperature``, ``sample``,
            ``cut_off`` (it follows a cut-off response), ``category`` (a name of the rubric, or
            ``failed``), the outcomes ``genuine`` and ``grounded`` (1, 0, or NaN where not
            assessed; grounded is NaN throughout if the judge doesn't test it), and of the annotator
            ``truth`` (likewise; NaN where not annotated) and ``inclusion`` (the probability of
            being chosen for annotation). Of the run: ``run`` (its folder), ``context_id`` (its
            own name of the context), ``annotated`` (the annotator has labelled turns of it),
            ``fitted`` (the rules judge was fitted on the turn) and ``unlabelled`` (the strata of
            its sheet that have turns but no label; empty if there are none). Names are categorical.
        judge: the judge's name.
        record: who the judge is.
        annotator: whose labels are in ``truth``; None without any.
        runs: the runs, in the given order.
        notes: what a reader has to know of how they were put together.
        responses: after which responses the turns come: ``all``, ``complete`` or ``cut-off`` ones.
        decoys: one row per decoy (:mod:`ia_mech.judge.decoys`): ``run``, ``model``,
            ``weights_hash``, ``dataset``, ``perturbation`` and ``temperature`` as in ``turns``;
            ``decoy``, its kind; ``source``, ``context`` and ``cut_off`` of the context shown, and
            ``lender``, the source of the turn; ``alike``, the own turn is worded like the decoy,
            or follows the same query and response; and of every outcome the verdict on the decoy
            (``genuine``, ``grounded``) and on the context's own turn (``own_genuine``,
            ``own_grounded``).
    """

    turns: pd.DataFrame
    judge: str
    record: dict[str, Any]
    annotator: str | None
    runs: list[Run]
    notes: list[str]
    responses: str = EVERY
    decoys: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_DECOYS))

    @property
    def outcomes(self) -> list[str]:
        """The outcomes that this judge's verdicts have, ``genuine`` first."""
        return [name for name in OUTCOMES if name == "genuine" or self.turns[name].notna().any()]

    @cached_property
    def gates(self) -> dict[str, Gate]:
        """By outcome, whether the judge can tell a turn's own conversation from another."""
        return {name: gate_of(self.decoys, self.judge, name) for name in self.outcomes}

    @property
    def gate(self) -> Gate:
        """That of ``genuine``."""
        return self.gates["genuine"]


def open_runs(runs: Sequence[str | Path | Run]) -> list[Run]:
    """Finished runs, each once.

    Args:
        runs: folders, or runs that are open.

    Raises:
        UserError: not a run, an unfinished one, one given twice, a copy of another, or runs under
            different interventions.
    """
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    places = [path.resolve() for path in paths]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise UserError(f"{paths[at]} is given twice", "give each run once")
    found = [run if isinstance(run, Run) else Run.open(run) for run in runs]
    for at, run in enumerate(found):
        check_finished(run)
        same = [other for other in found[:at] if other.identity_digest == run.identity_digest]
        if same:
            raise UserError(f"{run.path} is a copy of {same[0].path}", "give each run once")
        if _intervention(run) != _intervention(found[0]):  # a steered model is another model
            raise UserError(
                f"{found[0].path} and {run.path} were not sampled under the same intervention",
                "give each in a command of its own",
            )
    return found


def _intervention(run: Run) -> str | None:
    return run.record["identity"].get("intervention")


def read_runs(
    runs: Sequence[str | Path | Run],
    judge: str | None = None,
    annotator: str | None = None,
    responses: str = EVERY,
) -> Judged:
    """Read runs with their labels, and check that they can be reported together.

    Args:
        runs: folders, or runs that are open.
        judge: whose verdicts; the only judge there if not given.
        annotator: whose labels; the only annotator there, if any, if not given;
            :data:`NO_ANNOTATOR` for none.
        responses: ``complete`` keeps only turns after responses that weren't cut off, ``cut-off``
            only those after ones that were.

    Raises:
        UserError: as :func:`open_runs`; none or several judges or annotators to choose from;
            verdicts or labels that aren't of the run's turns; judges that share a name but not
            their identity; no turn comes after such responses.
    """
    runs = open_runs(runs)
    judge = _choose_judge(runs, judge)
    verdicts = [run.labels.judgements(judge, _VERDICT) for run in runs]
    record = _same_judge(runs, judge)
    annotator = _choose_annotator(runs, annotator)
    turns: list[pd.DataFrame] = []
    decoys: list[pd.DataFrame] = []
    earlier: list[tuple[Path, pd.MultiIndex]] = []
    for run, said in zip(runs, verdicts, strict=True):
        frame, drawn = _turns_and_decoys(run, judge, said)
        decoys.append(drawn)
        _label(frame, run, annotator, judge, said)
        turns.append(_without_repeated(frame, run, earlier) if len(runs) > 1 else frame)
    pooled = _pooled(turns)
    if pooled["genuine"].isna().all():
        raise UserError(
            f"{judge!r} assessed none of the {len(pooled)} user turns",
            "see why in the column status of its verdicts, and judge again with --retry-failed",
        )
    notes = _notes(runs, record, pooled, annotator)
    without = [run.name for run, frame in zip(runs, decoys, strict=True) if frame.empty]
    if 0 < len(without) < len(runs):
        notes.append(
            f"no decoys in {', '.join(without)}: these verdicts have no floor. Judging the run "
            "again adds them; verdicts in the cache are not paid for again."
        )
    found = [frame for frame in decoys if len(frame)] or decoys[:1]
    judged = Judged(
        *(pooled, judge, record, annotator, runs, notes),
        decoys=_pooled(found),
    )
    judged = restricted(judged, responses)
    return replace(judged, notes=judged.notes + _decoy_notes(judged.decoys))


def restricted(judged: Judged, responses: str) -> Judged:
    """Only the turns after such responses, with a note of how many they are.

    Raises:
        UserError: there are none.
        ValueError: ``responses`` isn't one of :data:`RESPONSES`.
    """
    if responses not in RESPONSES:
        raise ValueError(f"unknown responses {responses!r}; choose from {', '.join(RESPONSES)}")
    if responses == EVERY:
        return judged
    kept, decoys = (
        frame[frame["cut_off"] == (responses == CUT_OFF)].reset_index(drop=True)
        for frame in (judged.turns, judged.decoys)
    )
    if kept.empty:
        raise UserError(
            f"no user turn comes after a {responses} response",
            f"leave --responses out: all {len(judged.turns)} come after the other kind",
        )
    note = (
        f"{len(kept)} of {len(judged.turns)} user turns: those after {responses} responses. A "
        "response that was cut off is a different stimulus."
    )
    notes = [*judged.notes, note]
    return replace(judged, turns=kept, decoys=decoys, notes=notes, responses=responses)


# -- whose labels -------------------------------------------------------------------------------


def _choose_judge(runs: list[Run], judge: str | None) -> str:
    for run in runs:
        if not run.labels.judges:
            raise UserError(
                f"{run.path} has not been judged",
                f"run: python -m ia_mech.judge run {quoted(run.path)}",
            )
    names = sorted({name for run in runs for name in run.labels.judges})
    if judge is not None:
        for run in runs:
            if judge not in run.labels.judges:
                raise UserError(
                    f"{run.path} has no verdicts of {judge!r}",
                    f"give --judge one of: {', '.join(run.labels.judges)}",
                )
        return judge
    if len(names) > 1:
        raise UserError(f"there are verdicts of {', '.join(names)}", "choose one with --judge")
    return names[0]


def _same_judge(runs: list[Run], judge: str) -> dict[str, Any]:
    """The judge's record; UserError if the runs' verdicts aren't one judge's."""
    records = [run.labels.record("judgements", judge) for run in runs]
    hashes = [
        (identity_hash(record.get("identity", {})), record.get("rubric", {}).get("hash"))
        for record in records
    ]
    for run, these in zip(runs, hashes, strict=True):
        if these != hashes[0]:
            raise UserError(
                f"the verdicts named {judge!r} of {runs[0].path} and {run.path} are of different "
                "judges (model, settings or rubric)",
                "judge both alike (python -m ia_mech.judge run … --replace), or report them apart",
            )
    return records[0] | {"repeats": max(record.get("repeats", 1) for record in records)}


def _choose_annotator(runs: list[Run], annotator: str | None) -> str | None:
    if annotator == NO_ANNOTATOR:
        return None
    names = sorted({name for run in runs for name in run.labels.annotators})
    if annotator is None:
        if len(names) > 1:
            raise UserError(f"there are labels of {', '.join(names)}", "choose with --annotator")
        return names[0] if names else None
    if annotator not in names:
        raise UserError(
            f"there are no labels of {annotator!r}",
            f"give --annotator one of: {', '.join(names)}" if names else "leave --annotator out",
        )
    return annotator


# -- one run ------------------------------------------------------------------------------------


def _turns_and_decoys(
    run: Run, judge: str, verdicts: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """``Judged.turns``, without labels, and ``Judged.decoys`` of one run."""
    again = f"judge it again: {run.labels.command('judgements', judge)}"
    unknown = sorted(set(verdicts["category"].dropna().unique()) - set(NAMES))
    if unknown:
        raise UserError(
            f"the verdicts of {judge!r} in {run.path} name {', '.join(unknown)}, which the rubric "
            "lacks",
            again,
        )
    verdicts = verdicts[verdicts["repeat"] == 0]
    at = positions(run.turns, verdicts)
    misses = len(run.turns) - len(np.unique(at[at >= 0]))
    if misses or len(at) != len(run.turns):
        raise UserError(
            f"the verdicts of {judge!r} don't cover {run.path}: {len(at)} verdicts for "
            f"{len(run.turns)} user turns, {misses} of which have none",
            again,
        )
    verdicts = verdicts.iloc[np.argsort(at)]
    decoys = run.labels.decoys(judge, columns=[*_VERDICT, "decoy", "shown"])
    decoys = decoys[decoys["repeat"] == 0].reset_index(drop=True)
    own, other = positions(run.turns, own_turns(decoys).to_frame()), positions(run.turns, decoys)
    lent = pd.MultiIndex.from_frame(decoys.loc[decoys["decoy"] == CONVERSATION, list(KEY[:2])])
    sound = bool(
        (own >= 0).all()
        and (other >= 0).all()
        and lent.is_unique
        and decoys["decoy"].isin(KINDS).all()
        and decoys["category"].dropna().isin(NAMES).all()
    )
    said = pd.concat([verdicts["item"], decoys["item"]]) if sound else verdicts["item"]
    unperturbed = run.labels.record("judgements", judge).get("unperturbed", False)
    changed, spoken, followed = _texts(
        run, windows_of(run, decoys if sound else None, unperturbed=unperturbed), said.to_numpy()
    )
    if count := int(changed[: len(run.turns)].sum()):
        raise UserError(
            f"the verdicts of {judge!r} in {run.path} are of other texts ({count} turns have "
            "changed since)",
            again,
        )
    if not sound or changed.any():
        raise UserError(f"the decoys of {judge!r} in {run.path} are not of its turns", again)
    turns = _named(run).assign(**_said(verdicts))
    alike = (spoken[own] == spoken[other]) | (followed[own] == followed[other])
    frame = turns.iloc[own].reset_index(drop=True)
    frame = frame[["run", *SUBJECT, "dataset", "temperature", "source", "context", "cut_off"]]
    lenders = turns["source"].iloc[other].reset_index(drop=True)
    frame = frame.assign(decoy=decoys["decoy"], lender=lenders, alike=alike)
    of_decoys = _said(decoys)
    for name in OUTCOMES:
        frame[name], frame[f"own_{name}"] = of_decoys[name], turns[name].to_numpy()[own]
    return turns, frame[_DECOYS]


def _texts(
    run: Run, windows: Iterable[tuple[pd.DataFrame, list[Item]]], said: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is needed of the texts of turns and decoys.

    Args:
        run: the run.
        windows: of :func:`~ia_mech.judge.label.windows_of`.
        said: ``[rows]`` the column ``item`` of their verdicts.

    Returns:
        ``[rows]`` whether a verdict is of other texts; and hashes of the turn, and of the query and
        response before it: 64 bits, which none of 10⁵ pairs of texts is likely to share by chance.
    """
    changed = np.zeros(len(said), dtype=bool)
    spoken, followed = np.zeros((2, len(said)), dtype=np.int64)
    for rows, items in windows:
        texts = [item.key("", 0)[:16] for item in items]
        changed[rows.index] = pd.notna(said[rows.index]) & (said[rows.index] != texts)
        spoken[rows.index] = [hash(item.turn) for item in items]
        followed[rows.index] = [hash((item.query, item.response)) for item in items]
    return changed, spoken, followed


def _named(run: Run) -> pd.DataFrame:
    """The columns of ``Judged.turns`` that say what was sampled. Texts are categorical."""
    turns = run.turns
    hashes = {
        context: hashlib.sha256(str(text).encode(errors="surrogatepass")).hexdigest()[:32]
        for contexts, _ in run.windows(["context_id", "text"])
        for context, text in zip(contexts["context_id"], contexts["text"], strict=True)
    }
    first = turns.drop_duplicates("context_id")
    sources = first["dataset"].astype(str) + "\0" + first["source_id"].astype(str)
    names = first["context_id"].astype(str)
    contexts = sources + "\0" + names + "\0" + names.map(hashes)
    place = np.empty(len(first), dtype=int)  # in ``first``, by category of context_id
    place[first["context_id"].cat.codes] = np.arange(len(first))
    place = place[turns["context_id"].cat.codes]

    def per_context(values: pd.Series) -> pd.Categorical:
        return pd.Categorical(values).take(place)

    def same(value: str) -> pd.Categorical:
        return pd.Categorical.from_codes(np.zeros(len(turns), dtype=np.int8), [value])

    return pd.DataFrame(
        {
            "run": same(str(run.path)),
            "model": same(run.model["name"]),
            "weights_hash": same(run.model["weights_hash"]),
            "dataset": turns["dataset"],
            "perturbation": per_context(first["perturbation"].astype(object).fillna("none")),
            "source": per_context(sources),
            "context": per_context(contexts),
            "temperature": turns["temperature"],
            "sample": turns["sample"],
            "cut_off": turns["response_cut_off"].fillna(False).astype(bool),
            "context_id": turns["context_id"],
        }
    )


def _pooled(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Frames of several runs as one; categories that differ between them are joined."""
    pooled = pd.concat(frames, ignore_index=True)
    names = [name for name, dtype in frames[0].dtypes.items() if dtype == "category"]
    return pooled.astype(dict.fromkeys(names, "category"))


def _said(verdicts: pd.DataFrame) -> dict[str, Any]:
    """``[rows]`` category and outcomes, as in ``Judged.turns``."""
    category = verdicts["category"].where(verdicts["status"] == JUDGED)
    category = pd.Categorical(category.astype(object).fillna(FAILED), sorted((*NAMES, FAILED)))
    assessed = ~category.isin([FAILED, CANNOT_ASSESS])
    genuine = np.where(assessed, category == GENUINE, np.nan).astype(float)
    p = verdicts["grounded_p"].astype(float).to_numpy()
    tested = p.size and not np.isnan(p).all()
    grounded = np.where(genuine == 1, np.where(np.isnan(p), np.nan, p <= GROUNDED_P), genuine)
    return {
        "category": category,
        "genuine": genuine,
        "grounded": grounded if tested else np.full(len(p), np.nan),
    }


def _label(
    frame: pd.DataFrame, run: Run, annotator: str | None, judge: str, said: pd.DataFrame
) -> None:
    """Add what the annotator says; ``said`` are the judge's verdicts."""
    frame["truth"] = frame["inclusion"] = np.nan
    frame["annotated"], frame["unlabelled"], frame["fitted"] = False, "", False
    if annotator is None or annotator not in run.labels.annotators:
        return
    labels = run.labels.annotations(annotator)
    where = f"the labels of {annotator!r} in {run.path}"
    remedy = f"import them again: {run.labels.command('annotations', annotator)}"
    unknown = sorted(set(labels["category"]) - set(NAMES), key=str)
    if unknown:
        raise UserError(f"{where} name {', '.join(map(str, unknown))}", remedy)
    at = positions(run.turns, labels)
    if (at < 0).any() or len(np.unique(at)) < len(at):
        raise UserError(f"{where} are not of its user turns", remedy)
    chances = labels["inclusion_probability"].dropna()
    if not ((chances > 0) & (chances <= 1)).all():
        raise UserError(f"{where} have inclusion probabilities outside (0, 1]", remedy)
    if run.labels.record("judgements", judge).get("identity", {}).get("kind") == "rules":
        fitted = said[(said["repeat"] == 0) & said["item"].isin(fitted_items())]
        frame.loc[positions(run.turns, fitted), "fitted"] = True
    truth = (labels["category"] == GENUINE).astype(float)
    truth[labels["category"] == CANNOT_ASSESS] = np.nan
    frame.loc[at, "truth"] = truth.to_numpy()
    frame.loc[at, "inclusion"] = labels["inclusion_probability"].astype(float).to_numpy()
    frame["annotated"] = bool(truth.notna().any())
    record = run.labels.record("annotations", annotator)
    strata = _strata_to_label(run, record, judge)
    known = set(labels["stratum"][truth.notna()])
    frame["unlabelled"] = ", ".join(name for name in strata if name not in known)
    if not strata:  # labels that came without a sheet: whole datasets may have been left out
        frame["annotated"] = frame["truth"].notna().groupby(frame["dataset"]).transform("any")


def _strata_to_label(run: Run, record: dict[str, Any], judge: str) -> list[str]:
    """Strata of the annotator's sheet that have turns which may count in a rate by this judge.

    Where the strata are this judge's own categories, those that it didn't assess never count.
    """
    strata = [name for name, of in (record.get("strata") or {}).items() if of.get("rows")]
    by = record.get("judge") or {}
    verdicts = run.labels.record("judgements", judge).get("identity_hash")
    own = by.get("name") == judge and by.get("identity_hash") == verdicts
    return [name for name in strata if not (own and name in (FAILED, CANNOT_ASSESS))]


def _without_repeated(
    frame: pd.DataFrame, run: Run, earlier: list[tuple[Path, pd.MultiIndex]]
) -> pd.DataFrame:
    """Leave out greedy turns that an earlier run has; refuse samples that it has.

    A sample is fixed by model, context, temperature, seed and number. Runs of other seeds or
    temperatures add samples, but their greedy turns are the same turns once more, which would count
    twice.
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


def _notes(runs: list[Run], record: dict, turns: pd.DataFrame, annotator: str | None) -> list[str]:
    notes = [note for run in runs for note in same_judges(run)]
    notes += [
        f"{run.name} was sampled although the engine's check failed ({run.ignored_check})."
        for run in runs
        if run.ignored_check
    ]
    if record["repeats"] > 1:
        notes.append(f"of the judge's {record['repeats']} verdicts per turn, the first is used.")
    if len(runs) > 1:
        notes.append(f"{len(runs)} runs; greedy turns that several of them hold count once.")
    different = sorted({name for same in _by_model(runs) for name in differing(same)})
    if different:
        notes.append(f"runs that were pooled differ in {', '.join(different)}.")
    if annotator and turns.loc[turns["truth"].notna(), "inclusion"].isna().any():
        notes.append(
            f"some labels of {annotator} have no inclusion probability: all are weighed alike."
        )
    fitted = turns[turns["fitted"]]
    if len(fitted):
        notes.append(
            f"{len(fitted)} of {len(turns)} turns, {fitted['truth'].notna().sum()} of them "
            "labelled, were in the rules judge's fit: its errors and corrected rates leave them "
            "out."
        )
    return notes


def _decoy_notes(decoys: pd.DataFrame) -> list[str]:
    notes, count = [], len(decoys)
    unassessed = decoys["genuine"].isna()
    own = ~unassessed & decoys["own_genuine"].isna()
    if (unassessed | own).any():
        notes.append(
            f"{(unassessed | own).sum()} of {count} decoys are left out: the judge gave no "
            f"category to the decoy ({unassessed.sum()}) or else to the context's own turn "
            f"({own.sum()})."
        )
    if decoys["alike"].any():
        notes.append(
            f"{decoys['alike'].sum()} of {count} decoys are no contrast: the same turn, or the same"
            " query and response, as the context's own. They count all the same."
        )
    return notes


def _by_model(runs: list[Run]) -> list[list[Run]]:
    found: dict[tuple, list[Run]] = {}
    for run in runs:
        found.setdefault((run.model["name"], run.model["weights_hash"]), []).append(run)
    return list(found.values())


def differing(runs: list[Run]) -> list[str]:
    """Names of the settings that change what is sampled and in which these runs aren't alike."""
    settings = [
        {name: run.settings[name] for name in _SAMPLING} | {"dtype": run.model["dtype"]}
        for run in runs
    ]
    return [name for name in settings[0] if any(s[name] != settings[0][name] for s in settings)]
