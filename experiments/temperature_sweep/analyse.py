"""Every estimate of a sweep, one row each, with intervals over sources.

Everything that estimates are made of, from runs and the lens.

How far below greedy decoding a sampled turn lies: where, by how many ranks, by how many nats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from safetensors import SafetensorError

from experiments.common.references import References, by_temperature, references_of
from experiments.temperature_sweep.first_token import (
    COLDEST_STORED,
    GRID,
    FirstToken,
    check,
    first_token,
    stored,
)
from experiments.temperature_sweep.lens_curves import (
    MOSTLY,
    LensCurves,
    lens_curves,
    overtaking,
    positions_of,
)
from experiments.temperature_sweep.read import HEADER_LAST, Openings, Sweep, genuine, openings_of
from ia_mech.data.conversations import UNPERTURBED
from ia_mech.display import Progress
from ia_mech.errors import UserError
from ia_mech.estimates import (
    ALL,
    Group,
    TidyEstimate,
    by_dataset,
    corrected,
    frame_of,
    paired_row,
)
from ia_mech.judge.rubric import ASSESSED, GENUINE
from ia_mech.lens import Lens

NAMES = ("run", "dataset", "source", "context", "context_id", "temperature", "sample", "category")


def hidden(sweep: Sweep) -> pd.DataFrame:
    """Where greedy decoding leaves every sampled turn that was assessed.

    Up to that token the turn and the run's own greedy turn are the same, so that both tokens follow
    the same text: the stored log-probabilities of both are of one distribution, and their
    difference is exact, at whichever token it is.

    Returns:
        One row per turn: :data:`NAMES` of ``Sweep.turns``, ``genuine`` (1 or 0), ``follows`` (its
        first token is greedy's, 1 or 0), ``leaves`` (greedy leaves it, 1 or 0), and where it does,
        else NaN: ``token`` (number of the token, from 1), ``before`` (share of the turn's tokens
        before it, turn-end included), ``rank`` (from 1), ``probability`` and ``gap``
        (log-probability of greedy's token less that of the turn's, in nats), all at T = 1.
    """
    turns = sweep.turns[sweep.turns["genuine"].notna()]
    sampled = turns[turns["temperature"] > 0]
    greedy = {
        (str(run.path), row.context_id): row
        for run in sweep.runs
        for row in run.generations.query("temperature == 0").itertuples()
    }
    pairs = [(row, greedy[row.run, row.context_id]) for row in sampled.itertuples()]
    frame = sampled[[*NAMES]].reset_index(drop=True)
    frame["genuine"] = genuine(sampled).to_numpy(dtype=float)
    left = pd.DataFrame([leaving(turn, other) for turn, other in pairs])
    return pd.concat([frame, left], axis=1)


def leaving(turn, greedy) -> dict[str, float]:
    """Where greedy leaves one turn; both have ``token_ids``, ``logprobs_raw`` and ``ranks``."""
    ids, others = np.asarray(turn.token_ids), np.asarray(greedy.token_ids)
    shared = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:shared] != others[:shared])
    found = {"follows": float(ids[0] == others[0]), "leaves": float(len(differ) > 0)}
    if not len(differ):  # the same turn, to its end or to the limit of tokens
        return found | dict.fromkeys(("token", "before", "rank", "probability", "gap"), np.nan)
    at = int(differ[0])
    log_p = float(turn.logprobs_raw[at])
    return found | {
        "token": at + 1.0,
        "before": at / len(ids),
        "rank": float(turn.ranks[at]),
        "probability": float(np.exp(log_p)),
        "gap": float(greedy.logprobs_raw[at]) - log_p,
    }


def against_others(frame: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray, pd.DataFrame]:
    """Genuine turns against the others of the same context at the same temperature.

    Every value is taken less the mean of those others, so that neither contexts nor temperatures
    with many genuine turns are compared with ones that have few. Turns of a context without both
    kinds are left out.

    Args:
        frame: rows of :func:`hidden`.
        column: of it; NaN is left out.

    Returns:
        ``[rows]`` centred values; ``[rows]`` which of them are genuine; the rows themselves.
    """
    kept = frame[frame[column].notna()]
    cells = kept.groupby(["context", "temperature"])["genuine"]
    kept = kept[(cells.transform("min") == 0) & (cells.transform("max") == 1)]
    others = kept[column].where(kept["genuine"] == 0)
    mean = others.groupby([kept["context"], kept["temperature"]]).transform("mean")
    return (kept[column] - mean).to_numpy(), (kept["genuine"] == 1).to_numpy(), kept


RATE, FAILURE = "follow-up rate", "share of turns"
LESS = " less greedy's"  # of the same sources
LESS_OTHERS = " less other turns'"  # of the same context at the same temperature
GARBLED = "degenerate"
OTHERS = ("all others", "others but degenerate ones")
KINDS = {1.0: "genuine", 0.0: "not genuine"}
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
RANKS = (2, 3, 5, 10, 30, 100, 300, 1000)
RIVALS = {"best": "best follow-up opening", "follow_ups": "all follow-up openings"}
# ``of``: a category, a kind of turn or of opening; ``at``: a number of tokens, or a rank.
COLUMNS = {
    "dataset": "str",
    "temperature": "float64",
    "layer": "Int64",
    "position": "str",
    "of": "str",
    "at": "float64",
}


@dataclass(frozen=True)
class Found:
    """What estimates are made of; ``lens`` and ``references`` may be missing."""

    sweep: Sweep
    first: FirstToken
    hidden: pd.DataFrame
    lens: LensCurves | None
    references: References | None


def estimates(
    found: Found, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """Every estimate, one row each: quantity, :data:`COLUMNS`, value, interval, test."""
    options = {"level": level, "resamples": resamples, "seed": seed}

    def groups(frame: pd.DataFrame) -> Iterator[tuple[Group, np.ndarray]]:
        for dataset, here in by_dataset(frame):
            yield Group(frame["source"].to_numpy()[here], options, {"dataset": dataset}), here

    rows: list[TidyEstimate] = []
    turns = found.sweep.turns[found.sweep.turns["genuine"].notna()]
    for group, here in groups(turns):
        rows += _shares(group, turns[here])
    for group, here in groups(found.sweep.contexts):
        rows += _first_token(group, found.first, here)
        if found.lens is not None:
            rows += _lens(group, found.lens, here)
    for group, here in groups(found.hidden):
        rows += _hidden(group, found.hidden[here])
    if found.references is not None:
        for group, here in groups(found.references.frame):
            curve = found.references.curve[here]
            rows += by_temperature(group, curve, found.references.temperatures)
    # All datasets together say nothing that each of them didn't: a family of their own.
    families = corrected(rows, lambda row: (_family(row.quantity), row.names["dataset"] == ALL))
    return frame_of(families, COLUMNS)


def _family(quantity: str) -> str:
    """The rate, the failures, and how hidden genuine turns are: one question each."""
    return LESS_OTHERS if quantity.endswith(LESS_OTHERS) else quantity


def _mass(group: Group, quantity: str, values, **names) -> TidyEstimate:
    """The mean of values between 0 and 1 that aren't events, nor made of events.

    The interval of a rate takes no more variance from sources than events would have, far more than
    probabilities have; this one is of a mean, and no wider than they can be.
    """
    row = group.mean(quantity, values, **names)
    low, high = np.clip([row.estimate.low, row.estimate.high], 0, 1)
    return replace(row, estimate=replace(row.estimate, low=float(low), high=float(high)))


# -- rates ----------------------------------------------------------------------------------------


def _shares(group: Group, turns: pd.DataFrame) -> Iterator[TidyEstimate]:
    """Follow-up rate and failure profile by temperature, and how they differ from greedy's."""
    greedy = turns[turns["temperature"] == 0]
    for temperature, at in turns.groupby("temperature"):
        own = Group(at["source"].to_numpy(), group.options, group.names)
        for category in ASSESSED:
            names = {"temperature": float(temperature)}
            quantity = RATE
            if category != GENUINE:
                quantity, names["of"] = FAILURE, category
            so, before = ((f["category"] == category).astype(float) for f in (at, greedy))
            yield own.mean(quantity, so, proportion=True, **names)
            if temperature:
                yield paired_row(
                    own, quantity + LESS, so, at["source"], before, greedy["source"], **names
                )


# -- the first token ------------------------------------------------------------------------------


def _first_token(group: Group, first: FirstToken, here: np.ndarray) -> Iterator[TidyEstimate]:
    for column, t in enumerate(first.temperatures):
        own, names = {}, {"temperature": float(t)}
        for name, values in vars(first).items():
            if name != "temperatures":
                own[name] = values[here, column]
        yield group.mean("first token's entropy", own["entropy"], **names)
        yield group.mean("effective number of first tokens", own["tokens"], **names)
        yield _mass(group, "mass on turn-end", own["turn_end"], **names)
        yield _mass(group, "total variation from T = 1", own["variation"], **names)
        for of in ("genuine", "restated"):
            yield _mass(group, "mass on openings", own[of], of=of, **names)
        less = own["genuine"] - own["restated"]
        yield group.mean("mass on openings", less, of="genuine less restated", **names)


# -- how hidden -----------------------------------------------------------------------------------


def _hidden(group: Group, frame: pd.DataFrame) -> Iterator[TidyEstimate]:
    for temperature, at in frame.groupby("temperature"):
        names = {"temperature": float(temperature)}
        for kind, of in KINDS.items():
            turns = at[at["genuine"] == kind]
            if len(turns):
                own = Group(turns["source"].to_numpy(), group.options, group.names | names)
                yield from _depths(replace(own, names=own.names | {"of": of}), turns)
        yield from _against(group, at, **names)
    yield from _against(group, frame)


def _depths(group: Group, turns: pd.DataFrame) -> Iterator[TidyEstimate]:
    """Of turns of one kind: whether and where greedy leaves them, and how far below it they are."""
    left = turns["leaves"]
    yield group.mean("first token is greedy's", turns["follows"], proportion=True)
    yield group.mean("greedy leaves it", left, proportion=True)
    yield group.median("token where greedy leaves", turns["token"])
    yield _mass(group, "share of turn before greedy leaves", turns["before"])
    yield group.median("rank where greedy leaves", turns["rank"])
    yield _mass(group, "probability where greedy leaves", turns["probability"])
    yield group.mean("gap where greedy leaves", turns["gap"])
    yield group.median("median gap where greedy leaves", turns["gap"])
    for at in TOKENS:
        by_then = (turns["token"] <= at).astype(float)  # one that is never left counts as not
        yield group.mean("greedy has left by token", by_then, proportion=True, at=float(at))
    for at in RANKS:
        within = (turns["rank"] <= at).astype(float).where(left == 1)
        yield group.mean("rank where greedy leaves, at most", within, proportion=True, at=float(at))


def _against(group: Group, frame: pd.DataFrame, **names) -> Iterator[TidyEstimate]:
    """Genuine turns less the others of the same context and temperature, and whether that is 0.

    Noise that leads far from greedy also garbles, and what is garbled isn't genuine. So they are
    compared with the others that are well formed, too.
    """
    yield from _compared(group, frame, of=OTHERS[0], **names)
    yield from _compared(group, frame[frame["category"] != GARBLED], of=OTHERS[1], **names)


def _compared(group: Group, frame: pd.DataFrame, **names) -> Iterator[TidyEstimate]:
    columns = {
        "first token is greedy's": frame["follows"],
        "token where greedy leaves": frame["token"],
        "log2 rank where greedy leaves": np.log2(frame["rank"]),
        "gap where greedy leaves": frame["gap"],
    }
    for quantity, values in columns.items():
        centred, genuine, rows = against_others(frame.assign(value=values), "value")
        if not genuine.any():
            continue
        sources = rows["source"].to_numpy()
        yield paired_row(
            group,
            quantity + LESS_OTHERS,
            centred[genuine],
            sources[genuine],
            centred[~genuine],
            sources[~genuine],
            **names,
        )


# -- logit lens -----------------------------------------------------------------------------------


def _lens(group: Group, lens: LensCurves, here: np.ndarray) -> Iterator[TidyEstimate]:
    greedy = lens.greedy[here]
    for place, position in enumerate(lens.positions):
        if np.isnan(greedy[..., place]).all():
            continue
        for at, layer in enumerate(lens.layers):
            names = {"layer": layer, "position": position}
            for name, of in {"greedy": "greedy opening", **RIVALS}.items():
                values = getattr(lens, name)[here, at, place]
                yield group.mean("log p by the lens", values, of=of, **names)
    share = lens.share[here]
    # Where greedy itself opens as follow-ups do, it overtakes no more than other such openings.
    kinds = {", greedy opens so": share >= MOSTLY, ", greedy doesn't": share < MOSTLY}
    for name, of in RIVALS.items():
        first = overtaking(greedy, getattr(lens, name)[here])
        for place, position in enumerate(lens.positions):
            names = {"position": position}
            yield from _overtaking(group, first[:, place], lens.layers, of=of, **names)
            if position == HEADER_LAST:
                for kind, so in kinds.items():
                    subset = replace(group, sources=group.sources[so])
                    own = first[so, place]
                    yield from _overtaking(subset, own, lens.layers, of=of + kind, **names)


def _overtaking(
    group: Group, first: np.ndarray, layers: list[int], **names
) -> Iterator[TidyEstimate]:
    """From which layer on greedy's opening stays ahead: the distribution, and its median."""
    if np.isnan(first).all():
        return
    for at, layer in enumerate(layers):
        ahead = (first <= at).astype(float)
        ahead[np.isnan(first)] = np.nan
        yield group.mean("greedy ahead for good", ahead, proportion=True, layer=layer, **names)
    overtaken = np.isfinite(first)
    numbers = np.full(len(first), np.nan)
    numbers[overtaken] = np.array(layers)[first[overtaken].astype(int)]
    yield group.median("layer where greedy overtakes", numbers, **names)


def analyse(
    sweep: Sweep,
    temperatures: Sequence[float] | None,
    positions: Sequence[str] | None,
    progress: Progress,
) -> tuple[Found, list[str]]:
    """Curves, divergences and lens of a sweep, and what a reader has to know of them.

    Args:
        sweep: judged runs.
        temperatures: of the first-token curves; None is :data:`GRID` and the sampled ones.
        positions: of the logit lens; None is all.
        progress: is told of what takes long.

    Raises:
        UserError: no logits for a run, or an unknown position.
    """
    notes = list(sweep.notes)
    places = positions_of(sweep, positions)
    openings = openings_of(sweep.turns)
    notes += _of_openings(openings)
    lens, why = _offline_lens(sweep)
    if lens is None:
        notes.append(f"no logit lens: {why}.")
    sampled = [t for t in sweep.temperatures if t >= COLDEST_STORED]
    grid = temperatures or [*GRID, *sampled]
    for run in sweep.runs:
        check(run, lens, grid)
    without = [str(run.path) for run in sweep.runs if not stored(run)]
    progress.start("first token", len(sweep.runs))
    first = first_token(sweep, openings, grid, lens, progress.advance)
    if without:
        notes.append(
            f"header logits of {', '.join(without)} are not stored: they were computed from the "
            "last layer with the lens."
        )
    curves = None
    if lens is not None:
        kept = sum(name in run.positions for run in sweep.runs for name in places)
        progress.start("logit lens", kept * len(sweep.runs[0].layers))
        curves = lens_curves(sweep, openings, lens, positions, progress.advance)
    references = _references(sweep, notes)
    return Found(sweep, first, hidden(sweep), curves, references), notes


def _offline_lens(sweep: Sweep) -> tuple[Lens | None, str]:
    try:
        return Lens.load(sweep.runs[0].model["weights_hash"]), ""
    except UserError as error:
        return None, str(error)
    except SafetensorError as error:
        return None, f"the lens of {sweep.runs[0].model['name']} can't be read ({error})"


def _of_openings(openings: Openings) -> list[str]:
    """What there is too little of for openings to be compared."""
    counts = {"genuine": openings.genuine, "restatements": openings.restated}
    notes = [
        f"sampled turns of {int((table.sum(1) > 0).sum())} sources were judged {kind}: their "
        "openings can't be held against those of other sources."
        for kind, table in counts.items()
        if (table.sum(1) > 0).sum() < 2
    ]
    both = ((openings.genuine.sum(0) > 0) & (openings.restated.sum(0) > 0)).sum()
    return [
        *notes,
        f"openings: {len(openings.ids)} tokens opened {openings.genuine.sum():.0f} genuine turns "
        f"and {openings.restated.sum():.0f} restatements, {both} of them both kinds.",
    ]


def _references(sweep: Sweep, notes: list[str]) -> References | None:
    """Scored references of unperturbed contexts, each once."""
    scored = [run for run in sweep.runs if run.score_temperatures]
    older = [
        str(run.path)
        for run in sweep.runs
        if not run.score_temperatures and run.contexts["reference"].notna().any()
    ]
    if older:
        notes.append(
            f"{', '.join(older)}: sampled before references were scored at many temperatures, so "
            "there is no curve of theirs; sample again for it."
        )
    found = references_of(scored) if scored else None
    if found is None:
        if scored:
            notes.append("no context has a reference turn, so there is no curve of references.")
        return None
    frame = found.frame
    plain = frame["perturbation"].fillna(UNPERTURBED) == UNPERTURBED
    kept = (plain & ~frame.duplicated(["source", "context_id", "text"])).to_numpy()
    if not kept.any():
        return None
    return References(
        frame[kept].reset_index(drop=True),
        found.temperatures,
        found.curve[kept],
        found.columns,
        found.closed,
    )
