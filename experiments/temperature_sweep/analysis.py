"""Everything that estimates are made of, from runs and the lens."""

from collections.abc import Sequence
from typing import Protocol

from safetensors import SafetensorError

from experiments.common.references import References, references_of
from experiments.temperature_sweep.first_token import (
    COLDEST_STORED,
    GRID,
    check,
    first_token,
    stored,
)
from experiments.temperature_sweep.hidden import hidden
from experiments.temperature_sweep.lens_curves import lens_curves, positions_of
from experiments.temperature_sweep.openings import Openings, openings_of
from experiments.temperature_sweep.read import Sweep
from experiments.temperature_sweep.tables import Found
from ia_mech.conversations import UNPERTURBED
from ia_mech.errors import UserError
from ia_mech.lens import Lens


class Progress(Protocol):
    def start(self, phase: str, steps: int) -> None: ...
    def advance(self) -> None: ...


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
    lens, why = _lens(sweep)
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


def _lens(sweep: Sweep) -> tuple[Lens | None, str]:
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
